// Initial rows of tables: the entry points.
#include "draws.h"

using namespace funcrec;

FUNCREC_ENTRY(initial_rows)
FUNCREC_ENTRY(draw_rows)

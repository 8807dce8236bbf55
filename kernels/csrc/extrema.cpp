#include "extrema.h"

using namespace funcrec;

FUNCREC_ENTRY(bag_extrema)
FUNCREC_ENTRY(bag_extrema_transpose)

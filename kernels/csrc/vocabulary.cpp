// Vocabularies: the entry points.
#include "columns.h"

using namespace funcrec;

FUNCREC_ENTRY(find_ids)
FUNCREC_ENTRY(admit_ids)
FUNCREC_ENTRY(settle_ids)
FUNCREC_ENTRY(find_columns)
FUNCREC_ENTRY(admit_columns)
FUNCREC_ENTRY(settle_columns)

// Vocabularies: the entry points.
#include "admission.h"

using namespace funcrec;

FUNCREC_ENTRY(find_ids)
FUNCREC_ENTRY(admit_ids)
FUNCREC_ENTRY(settle_ids)

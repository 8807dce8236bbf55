#include "interaction.h"

using namespace funcrec;

FUNCREC_ENTRY(dot_interaction)
FUNCREC_ENTRY(dot_interaction_transpose)

#include "functions_loop.h"

namespace funcrec {
using functions::invariant_function;
FUNCREC_ENTRY(invariant_function)
}  // namespace funcrec

#include "invariant.h"

#include "invariant_sums.h"

using namespace funcrec;

FUNCREC_EXPORT int64_t funcrec_invariant_bmm(const int64_t* numbers) { return guarded([&] { invariant::run_product(Reader{numbers}); }); }
FUNCREC_EXPORT int64_t funcrec_invariant_sum(const int64_t* numbers) { return guarded([&] { invariant::run_sum(Reader{numbers}); }); }

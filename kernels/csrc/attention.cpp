// Attention apart from the other kernels: CMakeLists.txt lets the compiler contract its products and sums to fused multiply-adds.
#include "attention_transpose.h"

using namespace funcrec;

FUNCREC_EXPORT int64_t funcrec_jagged_attention(const int64_t* numbers) { return guarded([&] { run_attention(Reader{numbers}); }); }
FUNCREC_EXPORT int64_t funcrec_jagged_attention_transpose(const int64_t* numbers) {
  return guarded([&] { run_attention_transpose(Reader{numbers}); });
}

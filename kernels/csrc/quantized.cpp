#include "quantized.h"

namespace funcrec {

template <int BITS> static Kernel kernel_of_bits(const Feature& f) {
  using Usual = Codes<BITS>;
  constexpr int W = RowTraits<Usual>::LEAST;
  if (f.table.dim >= W) return f.weighted ? kernel_of<Usual, float, true>(f.table.dim) : kernel_of<Usual, float, false>(f.table.dim);
  return f.weighted ? pool_bags<Codes<BITS, true>, float, true, 1, 0, W> : pool_bags<Codes<BITS, true>, float, false, 1, 0, W>;
}

Kernel kernel_of_codes(const Feature& f) {
  return f.table.dtype == CODES8 ? kernel_of_bits<8>(f) : f.table.dtype == CODES4 ? kernel_of_bits<4>(f) : kernel_of_bits<2>(f);
}

}  // namespace funcrec

using namespace funcrec;

FUNCREC_ENTRY(quantized_rows)
FUNCREC_ENTRY(quantize_rows)

// Products of small matrices, in the order of one thread: what attention and interactions need of dense arithmetic.
//
//   C[r, c] (+)= Σ_k A[r, k] · B[k, c]        6 rows by up to 4 vectors of columns stay in registers
//
// Rows of B and C begin at multiples of a vector, and are padded to whole vectors. Rows of A and C are padded to multiples of 6.
// Every element is one chain of `fused` in order of k: its bits depend on the numbers alone.
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"
#include "fused.h"
#include "scratch.h"
#include "top_k.h"

namespace funcrec {

constexpr int ROWS = 6;                                       // rows of C in registers
constexpr int VECTORS = VECTOR_BYTES == 64 ? 4 : 2;           // vectors of columns in registers
constexpr int64_t UNIT = 48;                                  // sides of tiles are multiples of it, hence of ROWS and of any vector

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A[r, k] is a[r * row + k * column].
template <class A> struct Left {
  const A* a;
  int64_t row, column;
};

template <class A, int NV, int R> FUNCREC_INLINE void product_block(A* c, int64_t c_row, Left<A> left, const A* b, int64_t b_row, int64_t depth, bool add) {
  constexpr int W = LANES<A>;
  Vec<A, W> sums[R][NV];
  FUNCREC_UNROLL for (int r = 0; r < R; r++)
    FUNCREC_UNROLL for (int v = 0; v < NV; v++) sums[r][v] = add ? load<W>(c + r * c_row + v * W) : Vec<A, W>{};
  for (int64_t k = 0; k < depth; k++) {
    Vec<A, W> x[NV];
    FUNCREC_UNROLL for (int v = 0; v < NV; v++) x[v] = load<W>(b + k * b_row + v * W);
    FUNCREC_UNROLL for (int r = 0; r < R; r++) {
      const A y = left.a[r * left.row + k * left.column];
      FUNCREC_UNROLL for (int v = 0; v < NV; v++) sums[r][v] = fused<A, W>(y, x[v], sums[r][v]);
    }
  }
  FUNCREC_UNROLL for (int r = 0; r < R; r++)
    FUNCREC_UNROLL for (int v = 0; v < NV; v++) store<W>(c + r * c_row + v * W, sums[r][v]);
}

// R rows of C, and columns [0, columns), rounded up to whole vectors.
template <class A, int R = ROWS> void product(A* c, int64_t c_row, Left<A> left, const A* b, int64_t b_row, int64_t columns, int64_t depth, bool add) {
  constexpr int W = LANES<A>;
  int64_t vectors = (columns + W - 1) / W;
  for (; vectors >= VECTORS; vectors -= VECTORS, c += VECTORS * W, b += VECTORS * W)
    product_block<A, VECTORS, R>(c, c_row, left, b, b_row, depth, add);
  if constexpr (VECTORS > 2) {
    if (vectors == 3) product_block<A, 3, R>(c, c_row, left, b, b_row, depth, add);
    if (vectors == 2) product_block<A, 2, R>(c, c_row, left, b, b_row, depth, add);
  }
  if (vectors == 1) product_block<A, 1, R>(c, c_row, left, b, b_row, depth, add);
}

// Rows of `dim` elements E, `stride` elements apart, as rows of A times a factor, padded by zeros to `width`; rows [rows, padded) are zeros.
template <class A, class E> void pack_rows(A* to, int64_t width, const E* from, int64_t stride, int64_t rows, int64_t padded, int64_t dim, A factor) {
  constexpr int W = LANES<A>;
  for (int64_t r = 0; r < rows; r++) {
    const E* x = from + r * stride;
    A* y = to + r * width;
    int64_t d = 0;
    for (; d + W <= dim; d += W) store<W>(y + d, Vec<A, W>(load<W>(x + d) * factor));
    for (; d < dim; d++) y[d] = A(load<1>(x + d)) * factor;
    for (; d < width; d++) y[d] = 0;
  }
  std::fill(to + rows * width, to + padded * width, A(0));
}

template <class A, class E> void unpack_row(E* to, const A* from, int64_t dim, A factor) {
  constexpr int W = LANES<A>;
  int64_t d = 0;
  for (; d + W <= dim; d += W) store<W>(to + d, Vec<A, W>(load<W>(from + d) * factor));
  for (; d < dim; d++) store<1>(to + d, A(from[d] * factor));
}

#if defined(__x86_64__) && !defined(__AVX512F__)
// to[16 × 16] = fromᵀ, by blocks of 4 × 4.
FUNCREC_INLINE void transpose_16(float* to, int64_t to_stride, const float* from, int64_t stride) {
  for (int j = 0; j < 16; j += 4)
    for (int d = 0; d < 16; d += 4) {
      const float* at = from + j * stride + d;
      __m128 a = _mm_loadu_ps(at), b = _mm_loadu_ps(at + stride), c = _mm_loadu_ps(at + 2 * stride), e = _mm_loadu_ps(at + 3 * stride);
      _MM_TRANSPOSE4_PS(a, b, c, e);
      float* out = to + d * to_stride + j;
      _mm_storeu_ps(out, a), _mm_storeu_ps(out + to_stride, b), _mm_storeu_ps(out + 2 * to_stride, c), _mm_storeu_ps(out + 3 * to_stride, e);
    }
}
#endif

// to[width × rows] = fromᵀ for rows and width that are multiples of 16; rows of `to` are `to_row` apart.
template <class A> void transposed(A* to, int64_t to_row, const A* from, int64_t width, int64_t rows) {
  for (int64_t j = 0; j < rows; j += 16)
    for (int64_t d = 0; d < width; d += 16) {
#if defined(__x86_64__)
      if constexpr (sizeof(A) == 4) {
        transpose_16(to + d * to_row + j, to_row, from + j * width + d, width);
        continue;
      }
#endif
      for (int64_t x = d; x < d + 16; x++)
        for (int64_t y = j; y < j + 16; y++) to[x * to_row + y] = from[y * width + x];
    }
}

}  // namespace funcrec

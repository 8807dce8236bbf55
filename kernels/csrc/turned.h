// Squares of f32 that are turned in registers:  t[j][i] = x[i, j]  for W rows and W terms, at any width of vectors.
//
// A load takes the same four terms of every fourth row. So all that is left to exchange lies within quarters of a register.
#pragma once
#include <algorithm>
#include <utility>

#include "simd.h"

namespace funcrec {

#if defined(FUNCREC_SHUFFLES)
// The lane of shuffle I: in each quarter, place P of the first operand, or place P - 4 of the second one.
template <int W> constexpr int lane(int p, int i) { return (p < 4 ? p : W + p - 4) + i / 4 * 4; }
template <int P, int Q, int R, int S, int W, int... I>
FUNCREC_INLINE Vec<float, W> exchanged(Vec<float, W> a, Vec<float, W> b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, lane<W>(I % 4 == 0 ? P : I % 4 == 1 ? Q : I % 4 == 2 ? R : S, I)...);
}

template <class V, int... I> FUNCREC_INLINE auto joined(V a, V b, std::integer_sequence<int, I...>) { return __builtin_shufflevector(a, b, I...); }

// Four terms of the rows that `row` names: row(i), row(i + 4), and so on.
template <int W, class F> FUNCREC_INLINE Vec<float, W> quarters(int i, F row) {
#if defined(__AVX__)
  if constexpr (W == 8)  // a half that comes from memory costs no shuffle
    return (Vec<float, W>)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(i))), _mm_loadu_ps(row(i + 4)), 1);
#endif
  if constexpr (W == 4) return load<4>(row(i));
  else return joined(quarters<W / 2>(i, row), quarters<W / 2>(i + W / 2, row), std::make_integer_sequence<int, W>());
}

// t[j][i] = row(i)[j].
template <int W, class F> FUNCREC_INLINE void turn(Vec<float, W> (&t)[W], F row) {
  constexpr auto all = std::make_integer_sequence<int, W>();
  for (int q = 0; q < W; q += 4) {
    const auto at = [&](int i) { return row(i) + q; };
    const Vec<float, W> a = quarters<W>(0, at), b = quarters<W>(1, at), c = quarters<W>(2, at), d = quarters<W>(3, at);
    const Vec<float, W> ab = exchanged<0, 4, 1, 5, W>(a, b, all), cd = exchanged<0, 4, 1, 5, W>(c, d, all);
    const Vec<float, W> rest = exchanged<2, 6, 3, 7, W>(a, b, all), others = exchanged<2, 6, 3, 7, W>(c, d, all);
    t[q] = exchanged<0, 1, 4, 5, W>(ab, cd, all), t[q + 1] = exchanged<2, 3, 6, 7, W>(ab, cd, all);
    t[q + 2] = exchanged<0, 1, 4, 5, W>(rest, others, all), t[q + 3] = exchanged<2, 3, 6, 7, W>(rest, others, all);
  }
}
#else
template <int W, class F> FUNCREC_INLINE void turn(Vec<float, W> (&t)[W], F row) {
  for (int j = 0; j < W; j++)
    for (int i = 0; i < W; i++) t[j][i] = row(i)[j];
}
#endif

// to[k * width + i] = x[i * stride + k] for i < count. Reads nothing outside of x. Where a row of `to` is less than a vector, up to a vector is written
// past the last one.
template <class A> void turn_rows(int64_t depth, int64_t width, int64_t count, const A* x, int64_t stride, A* to) {
  constexpr int W = LANES<A>;
  int64_t done = 0;
  if constexpr (sizeof(A) == 4)
    if (depth >= W && (width % W == 0 || width < W)) {
      constexpr int64_t LINE = 64 / sizeof(A);  // whole cache lines of x: rows 2^n apart share few sets of a cache
      done = depth;
      for (int64_t begin = 0; begin < depth; begin += LINE)
        for (int64_t i = 0; i < count; i += W) {
          const A* rows[W];
          for (int j = 0; j < W; j++) rows[j] = x + std::min(i + j, count - 1) * stride;
          for (int64_t k = begin; k < std::min(begin + LINE, depth); k += W) {
            const int64_t from = std::min(k, depth - W);  // the last square overlaps the one before
            Vec<A, W> t[W];
            if (i + W <= count) turn<W>(t, [&](int j) { return x + (i + j) * stride + from; });
            else turn<W>(t, [&](int j) { return rows[j] + from; });
            for (int64_t j = k - from; j < W; j++) store<W>(to + (from + j) * width + i, t[j]);
          }
        }
    }
  for (int64_t k = done; k < depth; k++)
    for (int64_t i = 0; i < count; i++) to[k * width + i] = x[i * stride + k];
}

}  // namespace funcrec

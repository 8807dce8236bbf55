// Passes over a row: `each` runs a formula over the row in vectors, then in single elements; `total` sums a formula.
// A formula is a generic lambda of a position `at`: at(p) reads p's element(s) there, and at.put(p, v) writes them.
#pragma once
#include <cstdint>

#include "simd.h"

namespace funcrec {

template <class A, int N> struct Position {
  int64_t i;
  FUNCREC_INLINE Vec<A, N> operator()(const A* p) const { return load<N>(p + i); }
  FUNCREC_INLINE void put(A* p, const Vec<A, N>& v) const { store<N>(p + i, v); }
  template <class E> FUNCREC_INLINE Vec<A, N> operator()(const Narrow<E>& w) const { return load<N>(w.p + i); }
  template <class E> FUNCREC_INLINE void put(const Narrow<E>& w, const Vec<A, N>& v) const {
    if (w.bits) store_random<N>(w.p + i, v, load_u16<N>(w.bits + i));
    else store<N>(w.p + i, v);
  }
  FUNCREC_INLINE Vec<A, N> root(const Vec<A, N>& v) const { return square_root<A, N>(v); }
  FUNCREC_INLINE Vec<A, N> sign(const Vec<A, N>& v) const { return where(v > 0, one, zero) - where(v < 0, one, zero); }
  FUNCREC_INLINE Vec<A, N> abs(const Vec<A, N>& v) const { return where(v < 0, -v, v); }
  template <class C> FUNCREC_INLINE Vec<A, N> where(C c, const Vec<A, N>& a, const Vec<A, N>& b) const { return c ? a : b; }
  const Vec<A, N> zero = {}, one = zero + A(1);
  static constexpr int lanes = N;
};

// The lanes of the vectors that follow those of N lanes.
template <int N> constexpr int NARROWER = N > 4 ? N / 2 : 1;

// f(i) for i = begin, begin + N, .. while N elements are left before end, at most MOST times; returns the next i. Without MOST, a
// compiler would make vectors of the single elements again: half of its work, for code that never runs.
template <int N, int MOST, class F> FUNCREC_INLINE int64_t at_most(int64_t i, int64_t end, const F& f) {
  if constexpr (MOST == 1) {
    if (i + N <= end) f(i), i += N;
  } else {
    const int64_t last = end - N < i + N * (MOST - 1) ? end - N : i + N * (MOST - 1);  // GCC heeds the next line if one test ends the loop
#pragma GCC unroll 1
    for (; i <= last; i += N) f(i);
  }
  return i;
}

// Calls f at every position of a row. D > 0 divides the row's length, which is then not 0: there are no tails. D = 0: any length.
template <class A, int D, int N = LANES<A>, int MOST = 0, class F>
FUNCREC_INLINE void each(int64_t dim, const F& f, int64_t i = 0) {
  if constexpr (D > 0) {
    static_assert(D % N == 0);
    for (; i < dim; i += N) f(Position<A, N>{i});
  } else {
    if constexpr (MOST) i = at_most<N, MOST>(i, dim, [&](int64_t k) __attribute__((always_inline)) { f(Position<A, N>{k}); });
    else
      for (; i + N <= dim; i += N) f(Position<A, N>{i});
    if constexpr (N > 1) each<A, 0, NARROWER<N>, N / NARROWER<N> - 1>(dim, f, i);
  }
}

// The number of partial sums of a row: the same on every instruction set, so that a sum has the same bits on all of them.
template <class A> constexpr int PARTIAL_SUMS = 64 / int(sizeof(A));

// Σ f over a row: N partial sums, one for every N-th element, whose halves are then added; the remaining elements come first, in the same
// way with fewer partial sums. The order depends on the row's length alone: N lanes are as many of the widest vectors as are needed.
// D is as in `each`.
template <class A, int D, int N = PARTIAL_SUMS<A>, int MOST = 0, class F>
FUNCREC_INLINE A total(int64_t dim, const F& f, int64_t i = 0) {
  A whole = 0, rest = 0;
  if constexpr (N == 1) {
    at_most<1, MOST>(i, dim, [&](int64_t k) __attribute__((always_inline)) { rest += f(Position<A, 1>{k}); });
    return rest;
  } else {
    static_assert(D % N == 0);
    if (D > 0 || i + N <= dim) {
      constexpr int W = N < LANES<A> ? N : LANES<A>, K = N / W;
      Vec<A, W> sums[K];
      for (int k = 0; k < K; k++) sums[k] = f(Position<A, W>{i + k * W});
      i += N;
      if constexpr (MOST != 1)
        for (; i + N <= dim; i += N)
          for (int k = 0; k < K; k++) sums[k] += f(Position<A, W>{i + k * W});
      for (int half = K / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) sums[k] += sums[k + half];
      whole = sum<A, W>(sums[0]);
    }
    if constexpr (D == 0) rest = total<A, 0, NARROWER<N>, N / NARROWER<N> - 1>(dim, f, i);
    return rest + whole;
  }
}

}  // namespace funcrec

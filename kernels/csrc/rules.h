// The rules of the row optimizers, each for one row: w the row, x its summed gradient, s its slots, in the accumulator type;
// w may be a row of 16 bits, which is widened where it is read and rounded where it is written. A rule writes w once.
// The rules are in formulas.h; here is what they are made of, and a user's. `each` runs a formula over a row in vectors and in single elements behind them:
// a formula is a generic lambda of a position `at`, where at(p) reads p's element(s) there and at.put(p, v)
// writes them.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

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
};

// The lanes of the vectors behind those of N lanes.
template <int N> constexpr int NARROWER = N > 4 ? N / 2 : 1;

// f(i) for i = begin, begin + N, .. while N elements are left before end, at most MOST times; returns where it stopped. A compiler that is
// not told of MOST makes vectors of the single elements behind vectors once more: half of its work, and it never runs.
template <int N, int MOST, class F> FUNCREC_INLINE int64_t at_most(int64_t i, int64_t end, const F& f) {
  if constexpr (MOST == 1) {
    if (i + N <= end) f(i), i += N;
  } else {
#pragma GCC unroll 1
    for (int k = 0; k < MOST && i + N <= end; i += N, k++) f(i);
  }
  return i;
}

// f at every position of a row; D is the row's length where the compiler knows it, else 0.
template <class A, int D, int N = LANES<A>, int MOST = 0, class F>
FUNCREC_INLINE void each(int64_t dim, const F& f, int64_t begin = 0) {
  const int64_t end = D ? D : dim;
  int64_t i = begin;
  if constexpr (MOST) i = at_most<N, MOST>(i, end, [&](int64_t k) __attribute__((always_inline)) { f(Position<A, N>{k}); });
  else
    for (; i + N <= end; i += N) f(Position<A, N>{i});
  if constexpr (N > 1 && (D == 0 || D % N != 0)) each<A, D, NARROWER<N>, N / NARROWER<N> - 1>(dim, f, i);
}

// Σ f over a row: one partial sum per lane, then the lanes; the order depends on nothing but the row's length.
template <class A, int D, int N = LANES<A>, int MOST = 0, class F>
FUNCREC_INLINE A total(int64_t dim, const F& f, int64_t begin = 0) {
  const int64_t end = D ? D : dim;
  int64_t i = begin;
  A rest = 0;
  if constexpr (N == 1) {
    at_most<1, MOST>(i, end, [&](int64_t k) __attribute__((always_inline)) { rest += f(Position<A, 1>{k}); });
    return rest;
  } else {
    Vec<A, N> lanes = {};
    if (i + N <= end) lanes = f(Position<A, N>{i}), i += N;
    if constexpr (MOST != 1)
      for (; i + N <= end; i += N) lanes += f(Position<A, N>{i});
    if constexpr (D == 0 || D % N != 0) rest = total<A, D, NARROWER<N>, N / NARROWER<N> - 1>(dim, f, i);
    return rest + sum<A, N>(lanes);
  }
}

constexpr int MOST_SLOTS = 8;

// What a rule sees of one row.
template <class A, class W = A*> struct Row {
  W w;           // f[D], or Narrow
  const A* x;    // f[D]
  A* s[MOST_SLOTS];  // each f[D], or f[1] for a slot with one number per row
  A* spare;      // f[D], to be overwritten
  int64_t dim;
  A repeats;     // how many entries were summed into x
};

// A user's rule, compiled from generated text for one dim and accumulator type A (kernels/cpp/_rules.py).
struct Code {
  void *rule = nullptr, *prepare = nullptr;
  const void* const* constants = nullptr;
  int64_t slots = 0, sizes[MOST_SLOTS] = {};  // elements of each slot of a row
  std::vector<char> shared;                   // what `prepare` finds out once per update, for all rows

  template <class A> void start(A lr, A t) {
    reinterpret_cast<void (*)(A, A, const void* const*, void*)>(prepare)(lr, t, constants, shared.data());
  }
};

// What a rule is made of, before its constructor picks its numbers.
struct Hyper {
  double lr;          // rounded to the accumulator type already
  double t;           // 1 at the first update
  const double* h;    // the rule's own numbers, in the order of kernels/rules.py
  const Code* code;   // of a user's rule
};

constexpr int WIDE = 1, NARROW = 0;   // a slot [R, D], a slot [R]

template <class A, int D, class W> FUNCREC_INLINE A norm(int64_t dim, const W& p) {
  return std::sqrt(total<A, D>(dim, [&](auto at) { auto v = at(p); return v * v; }));
}

// 1 - bᵗ
inline double correction(double b, double t) { return b > 0 ? -std::expm1(t * std::log(b)) : 1; }

// A user's rule knows only plain pointers and may write w more than once: a row of 16 bits is widened into `spare` and
// narrowed from there.
template <class A> struct Generated {
  const int64_t slots, *const sizes;
  void (*const rule)(A*, const A*, A* const*, A, const void*);
  const void* const shared;
  explicit Generated(const Hyper& n)
      : slots(n.code->slots), sizes(n.code->sizes), rule(reinterpret_cast<decltype(rule)>(n.code->rule)),
        shared(n.code->shared.data()) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    if constexpr (std::is_pointer_v<W>) {
      rule(r.w, r.x, r.s, r.repeats, shared);
    } else {
      const W w = r.w;  // the rule is given r.s: what lies in r itself would be read again behind every store
      A* const wide = r.spare;
      const int64_t dim = r.dim;
      const auto narrow = [&](const W& to) { each<A, D>(dim, [&](auto at) { at.put(to, at(wide)); }); };
      each<A, D>(dim, [&](auto at) { at.put(wide, at(w)); });
      rule(wide, r.x, r.s, r.repeats, shared);
      if (w.bits) narrow(w);
      else narrow({w.p, nullptr});
    }
  }
};

// The elements of slot i of a row.
template <class Rule> FUNCREC_INLINE int64_t slot_size(const Rule&, int i, int64_t dim) {
  return Rule::width[i] == WIDE ? dim : 1;
}
template <class A> FUNCREC_INLINE int64_t slot_size(const Generated<A>& rule, int i, int64_t) { return rule.sizes[i]; }

}  // namespace funcrec

// The rules of the row optimizers, each for one row: w the row, x its summed gradient, s its slots, in the accumulator type;
// w may be a row of 16 bits, which is widened where it is read and rounded where it is written. A rule writes w once.
// The formulas are those of funcrec/optim. `each` runs a formula over a row in vectors and in single elements behind them:
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
  const double* h;    // the rule's own numbers, in the order of forms.RULES
  const Code* code;   // of a user's rule
};

constexpr int WIDE = 1, NARROW = 0;   // a slot [R, D], a slot [R]

template <class A, int D, class W> FUNCREC_INLINE A norm(int64_t dim, const W& p) {
  return std::sqrt(total<A, D>(dim, [&](auto at) { auto v = at(p); return v * v; }));
}

template <class A> struct Sgd {
  static constexpr int slots = 0, width[3] = {};
  A lr, decay;
  explicit Sgd(const Hyper& n) : lr(n.lr), decay(n.h[0]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) { auto w = at(r.w); at.put(r.w, w - lr * (at(r.x) + decay * w)); });
  }
};

template <class A> struct Momentum {
  static constexpr int slots = 1, width[3] = {WIDE};
  A lr, b, decay;
  bool nesterov;
  explicit Momentum(const Hyper& n) : lr(n.lr), b(n.h[0]), decay(n.h[1]), nesterov(n.h[2] != 0) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A ahead = nesterov ? b : 1, now = nesterov ? 1 : 0;   // w ← w - lr · (now · g + ahead · m)
    each<A, D>(r.dim, [&](auto at) {
      auto w = at(r.w), g = at(r.x) + decay * w, m = b * at(r.s[0]) + g;
      at.put(r.s[0], m);
      at.put(r.w, w - lr * (now * g + ahead * m));
    });
  }
};

template <class A> struct LarsSgd {
  static constexpr int slots = 1, width[3] = {WIDE};
  A lr, eta, b, decay;
  explicit LarsSgd(const Hyper& n) : lr(n.lr), eta(n.h[0]), b(n.h[1]), decay(n.h[2]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A length = norm<A, D>(r.dim, r.w), slope = norm<A, D>(r.dim, r.x);
    const A pull = slope + decay * length;
    const A rate = lr * (length > 0 && pull > 0 ? eta * length / pull : A(1));
    each<A, D>(r.dim, [&](auto at) {
      auto w = at(r.w), m = b * at(r.s[0]) + rate * (at(r.x) + decay * w);
      at.put(r.s[0], m);
      at.put(r.w, w - m);
    });
  }
};

template <class A> struct Lion {
  static constexpr int slots = 1, width[3] = {WIDE};
  A lr, b1, c1, b2, c2, decay;
  explicit Lion(const Hyper& n) : lr(n.lr), b1(n.h[0]), c1(1 - n.h[0]), b2(n.h[1]), c2(1 - n.h[1]), decay(n.h[2]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      auto w = at(r.w), g = at(r.x), m = at(r.s[0]);
      at.put(r.s[0], b2 * m + c2 * g);
      at.put(r.w, w - lr * (at.sign(b1 * m + c1 * g) + decay * w));
    });
  }
};

template <class A> struct Adagrad {
  static constexpr int slots = 1, width[3] = {WIDE};
  A lr, eps, decay;
  explicit Adagrad(const Hyper& n) : lr(n.lr), eps(n.h[0]), decay(n.h[1]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      auto w = at(r.w), g = at(r.x) + decay * w, n = at(r.s[0]) + g * g;
      at.put(r.s[0], n);
      at.put(r.w, w - lr * g / (at.root(n) + eps));
    });
  }
};

template <class A> struct RowwiseAdagrad {
  static constexpr int slots = 1, width[3] = {NARROW};
  A lr, eps, l2, kept, most;
  explicit RowwiseAdagrad(const Hyper& n) : lr(n.lr), eps(n.h[0]), most(n.h[3]) {
    l2 = n.h[2] ? 0 : n.h[1];
    kept = n.h[2] ? 1 - lr * A(n.h[1]) : A(1);
  }
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    A square;
    if (l2 != 0) square = total<A, D>(r.dim, [&](auto at) { auto g = at(r.x) + l2 * at(r.w); return g * g; });
    else square = total<A, D>(r.dim, [&](auto at) { auto g = at(r.x); return g * g; });
    const A n = r.s[0][0] += square / r.dim, rate = lr / (std::sqrt(n) + eps);
    const auto put = [&](const auto& to) {
      each<A, D>(r.dim, [&](auto at) { auto w = at(r.w); at.put(to, kept * w - rate * (at(r.x) + l2 * w)); });
    };
    if (!(most > 0)) return put(r.w);
    put(r.spare);
    const A length = norm<A, D>(r.dim, r.spare);  // a row longer than `most` is scaled back to it
    if (length > most) each<A, D>(r.dim, [&](auto at) { at.put(r.w, at(r.spare) * (most / length)); });
    else each<A, D>(r.dim, [&](auto at) { at.put(r.w, at(r.spare)); });
  }
};

template <class A> struct RowwiseAdagradCounter {
  static constexpr int slots = 3, width[3] = {NARROW, NARROW, NARROW};
  A lr, t, half_life, eps, decay;
  bool decoupled;
  explicit RowwiseAdagradCounter(const Hyper& n)
      : lr(n.lr), t(n.t), half_life(n.h[0]), eps(n.h[1]), decay(n.h[2]), decoupled(n.h[3] != 0) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    A &n = *r.s[0], &counter = *r.s[1], &last = *r.s[2];
    const A passed = last == 0 ? A(1) : t - last, l2 = decoupled ? 0 : decay;
    counter = 1 + counter * std::exp2(-passed / half_life);
    last = t;
    n += total<A, D>(r.dim, [&](auto at) { auto g = at(r.x) + l2 * at(r.w); return g * g; }) / r.dim;
    const A rate = lr / (std::sqrt(n) + eps), kept = 1 - (decoupled ? lr : rate) * (half_life / counter * decay);
    each<A, D>(r.dim, [&](auto at) { at.put(r.w, kept * at(r.w) - rate * at(r.x)); });
  }
};

template <class A> struct RowwiseAdagradCowclip {
  static constexpr int slots = 1, width[3] = {NARROW};
  A lr, ratio, least, eps, l2, kept;
  explicit RowwiseAdagradCowclip(const Hyper& n) : lr(n.lr), ratio(n.h[0]), least(n.h[1]), eps(n.h[2]) {
    l2 = n.h[4] ? 0 : n.h[3];
    kept = n.h[4] ? 1 - lr * A(n.h[3]) : A(1);
  }
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A square = total<A, D>(r.dim, [&](auto at) { auto g = at(r.x) + l2 * at(r.w); return g * g; });
    const A n = r.s[0][0] += square / r.dim, clip = ratio * norm<A, D>(r.dim, r.w);
    const A most = r.repeats * (clip < least ? least : clip), length = std::sqrt(square);
    const A rate = (length > most ? most / length : A(1)) * lr / (std::sqrt(n) + eps);
    each<A, D>(r.dim, [&](auto at) { auto w = at(r.w); at.put(r.w, kept * w - rate * (at(r.x) + l2 * w)); });
  }
};

template <class A, bool MOMENTUM> struct RmsProp {
  static constexpr int slots = MOMENTUM ? 2 : 1, width[3] = {WIDE, WIDE};
  A lr, b, c, eps, momentum, decay;
  explicit RmsProp(const Hyper& n)
      : lr(n.lr), b(n.h[0]), c(1 - n.h[0]), eps(n.h[1]), momentum(n.h[2]), decay(n.h[3]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      auto w = at(r.w), g = at(r.x) + decay * w, v = b * at(r.s[0]) + c * (g * g), m = g / (at.root(v) + eps);
      at.put(r.s[0], v);
      if constexpr (MOMENTUM) at.put(r.s[1], m = momentum * at(r.s[1]) + m);
      at.put(r.w, w - lr * m);
    });
  }
};

template <class A> struct Ftrl {
  static constexpr int slots = 2, width[3] = {WIDE, WIDE};
  A lr, beta, l1, l2;
  explicit Ftrl(const Hyper& n) : lr(n.lr), beta(n.h[0]), l1(n.h[1]), l2(n.h[2]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      auto w = at(r.w), g = at(r.x), old = at(r.s[1]), n = old + g * g, deep = at.root(n);
      auto z = at(r.s[0]) + g - (deep - at.root(old)) / lr * w;
      at.put(r.s[0], z);
      at.put(r.s[1], n);
      at.put(r.w, at.where((z <= l1) & (z >= -l1), at.zero, -(z - at.sign(z) * l1) / ((beta + deep) / lr + l2)));
    });
  }
};

// 1 - bᵗ
inline double correction(double b, double t) { return b > 0 ? -std::expm1(t * std::log(b)) : 1; }

// The means that Adam and LAMB share; V is WIDE for a mean of g², NARROW for one of mean(g²).
template <class A, int V> struct Moments {
  static constexpr int slots = 2, width[3] = {WIDE, V};
  A lr, b1, c1, b2, c2, eps, decay, first, second;
  explicit Moments(const Hyper& n)
      : lr(n.lr), b1(n.h[0]), c1(1 - n.h[0]), b2(n.h[1]), c2(1 - n.h[1]), eps(n.h[2]), decay(n.h[3]),
        first(correction(n.h[0], n.t)), second(correction(n.h[1], n.t)) {}
  // then(at, w, u) for every position, u the corrected mean over the corrected root; l2 · w is added to the gradient
  template <int D, class W, class F> FUNCREC_INLINE void move(const Row<A, W>& r, A l2, const F& then) const {
    A under = 0;
    if constexpr (V == NARROW) {
      const A square = total<A, D>(r.dim, [&](auto at) { auto g = at(r.x) + l2 * at(r.w); return g * g; }) / r.dim;
      *r.s[1] = b2 * *r.s[1] + c2 * square;
      under = std::sqrt(*r.s[1] / second) + eps;
    }
    each<A, D>(r.dim, [&](auto at) {
      auto w = at(r.w), g = at(r.x) + l2 * w, m = b1 * at(r.s[0]) + c1 * g;
      at.put(r.s[0], m);
      if constexpr (V == NARROW) {
        then(at, w, m / first / under);
      } else {
        auto v = b2 * at(r.s[1]) + c2 * (g * g);
        at.put(r.s[1], v);
        then(at, w, m / first / (at.root(v / second) + eps));
      }
    });
  }
};

template <class A, int V, bool DECOUPLED> struct Adam : Moments<A, V> {
  using Moments<A, V>::Moments;
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A lr = this->lr, late = DECOUPLED ? this->decay : 0;
    this->template move<D>(r, DECOUPLED ? 0 : this->decay, [&](auto at, auto w, auto u) {
      at.put(r.w, w - lr * (u + late * w));
    });
  }
};

template <class A, int V> struct Lamb : Moments<A, V> {
  using Moments<A, V>::Moments;
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A length = norm<A, D>(r.dim, r.w), decay = this->decay;
    this->template move<D>(r, 0, [&](auto at, auto w, auto u) { at.put(r.spare, u + decay * w); });
    const A step = norm<A, D>(r.dim, r.spare), rate = this->lr * (length > 0 && step > 0 ? length / step : A(1));
    each<A, D>(r.dim, [&](auto at) { at.put(r.w, at(r.w) - rate * at(r.spare)); });
  }
};

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

constexpr int64_t GENERATED = 15;

// f(rule) with the rule of that number in the order of forms.RULES, then GENERATED.
template <class A, class F> void with_rule(int64_t number, const Hyper& n, const F& f) {
  switch (number) {
    case 0: return f(Sgd<A>(n));
    case 1: return f(Momentum<A>(n));
    case 2: return f(LarsSgd<A>(n));
    case 3: return f(Lion<A>(n));
    case 4: return f(Adagrad<A>(n));
    case 5: return f(RowwiseAdagrad<A>(n));
    case 6: return f(RowwiseAdagradCounter<A>(n));
    case 7: return f(RowwiseAdagradCowclip<A>(n));
    case 8: return n.h[2] != 0 ? f(RmsProp<A, true>(n)) : f(RmsProp<A, false>(n));
    case 9: return f(Ftrl<A>(n));
    case 10: return f(Adam<A, WIDE, false>(n));
    case 11: return f(Adam<A, WIDE, true>(n));
    case 12: return f(Adam<A, NARROW, true>(n));
    case 13: return f(Lamb<A, WIDE>(n));
    case 14: return f(Lamb<A, NARROW>(n));
    case GENERATED: return f(Generated<A>(n));
  }
}

}  // namespace funcrec

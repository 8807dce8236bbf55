// The rules of the row optimizers: written by `python -m funcrec.optim.write`, and not by hand.
// Each is for one row, as rules.h says; a number n.h[i] is a hyper-parameter, in the order of kernels/rules.py.
#pragma once
#include "rules.h"

namespace funcrec {

constexpr int64_t FORMULAS = 1777904588;  // as in kernels/rules.py

// sgd: w ← w - lr · (g + weight_decay · w). No slots. The default lr is 0.01; torch.optim.SGD's is 0.001.
template <class A> struct Sgd {
  static constexpr int slots = 0, width[MOST_SLOTS] = {};
  A lr, weight_decay;
  explicit Sgd(const Hyper& n)
      : lr(n.lr), weight_decay(n.h[0]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto w = at(r.w);
      at.put(r.w, w - lr * (at(r.x) + weight_decay * w));
    });
  }
};

// momentum: m ← momentum · m + g + weight_decay · w;  w ← w - lr · m, with nesterov w ← w - lr · (g + weight_decay · w + momentum · m).
template <class A> struct Momentum {
  static constexpr int slots = 1, width[MOST_SLOTS] = {WIDE};
  A lr, momentum, weight_decay, h2;
  explicit Momentum(const Hyper& n)
      : lr(n.lr), momentum(n.h[0]), weight_decay(n.h[1]), h2(n.h[2]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    if (h2 == 0) {
      each<A, D>(r.dim, [&](auto at) {
        const auto w = at(r.w);
        const auto u2 = momentum * at(r.s[0]) + (at(r.x) + weight_decay * w);
        at.put(r.s[0], u2);
        at.put(r.w, w - lr * u2);
      });
    } else {  // h2 != 0
      each<A, D>(r.dim, [&](auto at) {
        const auto w = at(r.w);
        const auto u2 = at(r.x) + weight_decay * w;
        const auto u3 = momentum * at(r.s[0]) + u2;
        at.put(r.s[0], u3);
        at.put(r.w, w - lr * (u2 + momentum * u3));
      });
    }
  }
};

// lars_sgd: Momentum with a rate for each row in proportion to the row's length.
template <class A> struct LarsSgd {
  static constexpr int slots = 1, width[MOST_SLOTS] = {WIDE};
  A lr, momentum, weight_decay, eta;
  explicit LarsSgd(const Hyper& n)
      : lr(n.lr), momentum(n.h[1]), weight_decay(n.h[2]), eta(n.h[0]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A v1 = total<A, D>(r.dim, [&](auto at) { const auto w = at(r.w); return w * w; });
    const A v2 = std::sqrt(v1);
    const A v3 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
    const A v4 = std::sqrt(v3) + weight_decay * v2;
    const bool v5 = (v2 > 0 && v4 > 0);
    const A v6 = lr * (v5 ? eta * v2 / (v5 ? v4 : A(1)) : A(1));
    each<A, D>(r.dim, [&](auto at) {
      const auto w = at(r.w);
      const auto u2 = momentum * at(r.s[0]) + v6 * (at(r.x) + weight_decay * w);
      at.put(r.s[0], u2);
      at.put(r.w, w - u2);
    });
  }
};

// lion: w ← w - lr · (sign(b1 · m + (1 - b1) · g) + weight_decay · w);  m ← b2 · m + (1 - b2) · g.
template <class A> struct Lion {
  static constexpr int slots = 1, width[MOST_SLOTS] = {WIDE};
  A lr, b1, c2, weight_decay, b2, c4;
  explicit Lion(const Hyper& n)
      : lr(n.lr), b1(n.h[0]), c2(1 - n.h[0]), weight_decay(n.h[2]), b2(n.h[1]), c4(1 - n.h[1]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto old_mean = at(r.s[0]);
      const auto g = at(r.x);
      const auto w = at(r.w);
      at.put(r.s[0], b2 * old_mean + c4 * g);
      at.put(r.w, w - lr * (at.sign(b1 * old_mean + c2 * g) + weight_decay * w));
    });
  }
};

// adagrad: g ← g + weight_decay · w;  n ← n + g²;  w ← w - lr · g / (√n + eps).
template <class A> struct Adagrad {
  static constexpr int slots = 1, width[MOST_SLOTS] = {WIDE};
  A lr, weight_decay, eps;
  explicit Adagrad(const Hyper& n)
      : lr(n.lr), weight_decay(n.h[1]), eps(n.h[0]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto w = at(r.w);
      const auto u2 = at(r.x) + weight_decay * w;
      const auto u3 = at(r.s[0]) + u2 * u2;
      at.put(r.s[0], u3);
      at.put(r.w, w - lr * u2 / (at.root(u3) + eps));
    });
  }
};

// rowwise_adagrad: Adagrad with one accumulator for each row.
template <class A> struct RowwiseAdagrad {
  static constexpr int slots = 1, width[MOST_SLOTS] = {NARROW};
  A lr, eps, weight_decay, max_norm, c1, c2, h1, h2, h3;
  explicit RowwiseAdagrad(const Hyper& n)
      : lr(n.lr), eps(n.h[0]), weight_decay(n.h[1]), max_norm(n.h[3]), c1(lr * weight_decay), c2(1 - c1),
        h1(n.h[1]), h2(n.h[2]), h3(n.h[3]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    if (h2 == 0 && h3 == 0 && h1 == 0) {
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
      const A v4 = old_sum + v3 / r.dim;
      const A v5 = lr / (std::sqrt(v4) + eps);
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, at(r.w) - v5 * at(r.x));
      });
      *r.s[0] = v4;
    } else if (h2 == 0 && h3 == 0 && h1 != 0) {
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto u1 = at(r.x) + weight_decay * at(r.w); return u1 * u1; });
      const A v4 = old_sum + v3 / r.dim;
      const A v5 = lr / (std::sqrt(v4) + eps);
      each<A, D>(r.dim, [&](auto at) {
        const auto w = at(r.w);
        at.put(r.w, w - v5 * (at(r.x) + weight_decay * w));
      });
      *r.s[0] = v4;
    } else if (h2 == 0 && h3 != 0) {
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto u1 = at(r.x) + weight_decay * at(r.w); return u1 * u1; });
      const A v4 = old_sum + v3 / r.dim;
      const A v5 = lr / (std::sqrt(v4) + eps);
      each<A, D>(r.dim, [&](auto at) {
        const auto w = at(r.w);
        at.put(r.spare, w - v5 * (at(r.x) + weight_decay * w));
      });
      const A v6 = total<A, D>(r.dim, [&](auto at) { const auto u1 = at(r.spare); return u1 * u1; });
      const A v7 = std::sqrt(v6);
      const bool v8 = v7 > max_norm;
      const A v9 = (v8 ? max_norm / (v8 ? v7 : A(1)) : A(1));
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, at(r.spare) * v9);
      });
      *r.s[0] = v4;
    } else if (h2 == 1 && h3 == 0) {
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
      const A v4 = old_sum + v3 / r.dim;
      const A v5 = lr / (std::sqrt(v4) + eps);
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, c2 * at(r.w) - v5 * at(r.x));
      });
      *r.s[0] = v4;
    } else {  // h2 == 1 && h3 != 0
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
      const A v4 = old_sum + v3 / r.dim;
      const A v5 = lr / (std::sqrt(v4) + eps);
      const A v6 = total<A, D>(r.dim, [&](auto at) { const auto u1 = c2 * at(r.w) - v5 * at(r.x); return u1 * u1; });
      const A v7 = std::sqrt(v6);
      const bool v8 = v7 > max_norm;
      const A v9 = (v8 ? max_norm / (v8 ? v7 : A(1)) : A(1));
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, (c2 * at(r.w) - v5 * at(r.x)) * v9);
      });
      *r.s[0] = v4;
    }
  }
};

// rowwise_adagrad_counter: Row-wise Adagrad that decays a row the more, the more seldom it is seen.
template <class A> struct RowwiseAdagradCounter {
  static constexpr int slots = 3, width[MOST_SLOTS] = {NARROW, NARROW, NARROW};
  A lr, eps, t, half_life, weight_decay, h2, h3;
  explicit RowwiseAdagradCounter(const Hyper& n)
      : lr(n.lr), eps(n.h[1]), t(n.t), half_life(n.h[0]), weight_decay(n.h[2]), h2(n.h[2]), h3(n.h[3]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    if (h3 == 0 && h2 == 0) {
      const A old_sum = *r.s[0];
      const A old_counter = *r.s[1];
      const A old_last = *r.s[2];
      const A v1 = 1 + old_counter * std::exp2(-(old_last == 0 ? A(1) : t - old_last) / half_life);
      const A v2 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
      const A v3 = old_sum + v2 / r.dim;
      const A v4 = lr / (std::sqrt(v3) + eps);
      const A v5 = 1 - v4 * (half_life / v1 * 0);
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, v5 * at(r.w) - v4 * at(r.x));
      });
      *r.s[0] = v3;
      *r.s[1] = v1;
      *r.s[2] = t;
    } else if (h3 == 0 && h2 != 0) {
      const A old_sum = *r.s[0];
      const A old_counter = *r.s[1];
      const A old_last = *r.s[2];
      const A v1 = 1 + old_counter * std::exp2(-(old_last == 0 ? A(1) : t - old_last) / half_life);
      const A v2 = total<A, D>(r.dim, [&](auto at) { const auto u1 = at(r.x) + weight_decay * at(r.w); return u1 * u1; });
      const A v3 = old_sum + v2 / r.dim;
      const A v4 = lr / (std::sqrt(v3) + eps);
      const A v5 = 1 - v4 * (half_life / v1 * weight_decay);
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, v5 * at(r.w) - v4 * at(r.x));
      });
      *r.s[0] = v3;
      *r.s[1] = v1;
      *r.s[2] = t;
    } else {  // h3 == 1
      const A old_counter = *r.s[1];
      const A old_last = *r.s[2];
      const A v1 = 1 + old_counter * std::exp2(-(old_last == 0 ? A(1) : t - old_last) / half_life);
      const A v2 = 1 - lr * (half_life / v1 * weight_decay);
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
      const A v4 = old_sum + v3 / r.dim;
      const A v5 = lr / (std::sqrt(v4) + eps);
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, v2 * at(r.w) - v5 * at(r.x));
      });
      *r.s[0] = v4;
      *r.s[1] = v1;
      *r.s[2] = t;
    }
  }
};

// rowwise_adagrad_cowclip: Row-wise Adagrad with a step clipped for each row, by how often it occurs and how long it is.
template <class A> struct RowwiseAdagradCowclip {
  static constexpr int slots = 1, width[MOST_SLOTS] = {NARROW};
  A lr, weight_decay, clip_ratio, lower_bound, eps, c1, c2, h4;
  explicit RowwiseAdagradCowclip(const Hyper& n)
      : lr(n.lr), weight_decay(n.h[3]), clip_ratio(n.h[0]), lower_bound(n.h[1]), eps(n.h[2]), c1(lr *
        weight_decay), c2(1 - c1), h4(n.h[4]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    if (h4 == 0) {
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto u1 = at(r.x) + weight_decay * at(r.w); return u1 * u1; });
      const A v4 = std::sqrt(v3);
      const A v5 = total<A, D>(r.dim, [&](auto at) { const auto w = at(r.w); return w * w; });
      const A v6 = clip_ratio * std::sqrt(v5);
      const A v7 = r.repeats * (v6 < lower_bound ? lower_bound : v6);
      const bool v8 = v4 > v7;
      const A v9 = old_sum + v3 / r.dim;
      const A v10 = (v8 ? v7 / (v8 ? v4 : A(1)) : A(1)) * lr / (std::sqrt(v9) + eps);
      each<A, D>(r.dim, [&](auto at) {
        const auto w = at(r.w);
        at.put(r.w, w - v10 * (at(r.x) + weight_decay * w));
      });
      *r.s[0] = v9;
    } else {  // h4 == 1
      const A old_sum = *r.s[0];
      const A v3 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
      const A v4 = std::sqrt(v3);
      const A v5 = total<A, D>(r.dim, [&](auto at) { const auto w = at(r.w); return w * w; });
      const A v6 = clip_ratio * std::sqrt(v5);
      const A v7 = r.repeats * (v6 < lower_bound ? lower_bound : v6);
      const bool v8 = v4 > v7;
      const A v9 = old_sum + v3 / r.dim;
      const A v10 = (v8 ? v7 / (v8 ? v4 : A(1)) : A(1)) * lr / (std::sqrt(v9) + eps);
      each<A, D>(r.dim, [&](auto at) {
        at.put(r.w, c2 * at(r.w) - v10 * at(r.x));
      });
      *r.s[0] = v9;
    }
  }
};

// rmsprop: g ← g + weight_decay · w;  v ← b2 · v + (1 - b2) · g²;  m ← momentum · m + g / (√v + eps);  w ← w - lr · m.
template <class A> struct Rmsprop {
  static constexpr int slots = 1, width[MOST_SLOTS] = {WIDE};
  A lr, weight_decay, b2, c2, eps;
  explicit Rmsprop(const Hyper& n)
      : lr(n.lr), weight_decay(n.h[3]), b2(n.h[0]), c2(1 - n.h[0]), eps(n.h[1]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto w = at(r.w);
      const auto u2 = at(r.x) + weight_decay * w;
      const auto u3 = b2 * at(r.s[0]) + c2 * (u2 * u2);
      at.put(r.s[0], u3);
      at.put(r.w, w - lr * (u2 / (at.root(u3) + eps)));
    });
  }
};

// rmsprop: g ← g + weight_decay · w;  v ← b2 · v + (1 - b2) · g²;  m ← momentum · m + g / (√v + eps);  w ← w - lr · m.
template <class A> struct Rmsprop2 {
  static constexpr int slots = 2, width[MOST_SLOTS] = {WIDE, WIDE};
  A lr, momentum, weight_decay, b2, c2, eps;
  explicit Rmsprop2(const Hyper& n)
      : lr(n.lr), momentum(n.h[2]), weight_decay(n.h[3]), b2(n.h[0]), c2(1 - n.h[0]), eps(n.h[1]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto w = at(r.w);
      const auto u2 = at(r.x) + weight_decay * w;
      const auto u3 = b2 * at(r.s[0]) + c2 * (u2 * u2);
      const auto u4 = momentum * at(r.s[1]) + u2 / (at.root(u3) + eps);
      at.put(r.s[0], u3);
      at.put(r.s[1], u4);
      at.put(r.w, w - lr * u4);
    });
  }
};

// ftrl: Follow the regularised leader, proximal, for each coordinate.
template <class A> struct Ftrl {
  static constexpr int slots = 2, width[MOST_SLOTS] = {WIDE, WIDE};
  A lr, l1, beta, l2;
  explicit Ftrl(const Hyper& n)
      : lr(n.lr), l1(n.h[1]), beta(n.h[0]), l2(n.h[2]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto g = at(r.x);
      const auto old_sum = at(r.s[1]);
      const auto u3 = old_sum + g * g;
      const auto u4 = at.root(u3);
      const auto u5 = at(r.s[0]) + g - (u4 - at.root(old_sum)) / lr * at(r.w);
      at.put(r.s[0], u5);
      at.put(r.s[1], u3);
      at.put(r.w, at.where(at.abs(u5) <= l1, at.one * A(0), -(u5 - at.sign(u5) * l1) / ((beta + u4) / lr + l2)));
    });
  }
};

// adam: w ← w - lr · u, with g + weight_decay · w for g. Slots: mean and square, each f[R, D].
template <class A> struct Adam {
  static constexpr int slots = 2, width[MOST_SLOTS] = {WIDE, WIDE};
  A lr, b1, weight_decay, c2, c3, b2, c5, c6, eps;
  explicit Adam(const Hyper& n)
      : lr(n.lr), b1(n.h[0]), weight_decay(n.h[3]), c2(1 - n.h[0]), c3(correction(n.h[0], n.t)), b2(n.h[1]),
        c5(1 - n.h[1]), c6(correction(n.h[1], n.t)), eps(n.h[2]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto w = at(r.w);
      const auto u2 = at(r.x) + weight_decay * w;
      const auto u3 = b1 * at(r.s[0]) + c2 * u2;
      const auto u4 = b2 * at(r.s[1]) + c5 * (u2 * u2);
      at.put(r.s[0], u3);
      at.put(r.s[1], u4);
      at.put(r.w, w - lr * (u3 / c3 / (at.root(u4 / c6) + eps)));
    });
  }
};

// adamw: w ← w - lr · (u + weight_decay · w). Slots: mean and square, each f[R, D].
template <class A> struct Adamw {
  static constexpr int slots = 2, width[MOST_SLOTS] = {WIDE, WIDE};
  A lr, b1, c2, c3, b2, c5, c6, eps, weight_decay;
  explicit Adamw(const Hyper& n)
      : lr(n.lr), b1(n.h[0]), c2(1 - n.h[0]), c3(correction(n.h[0], n.t)), b2(n.h[1]), c5(1 - n.h[1]),
        c6(correction(n.h[1], n.t)), eps(n.h[2]), weight_decay(n.h[3]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto g = at(r.x);
      const auto u2 = b1 * at(r.s[0]) + c2 * g;
      const auto u3 = b2 * at(r.s[1]) + c5 * (g * g);
      const auto w = at(r.w);
      at.put(r.s[0], u2);
      at.put(r.s[1], u3);
      at.put(r.w, w - lr * (u2 / c3 / (at.root(u3 / c6) + eps) + weight_decay * w));
    });
  }
};

// partial_rowwise_adam: AdamW with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square f[R].
template <class A> struct PartialRowwiseAdam {
  static constexpr int slots = 2, width[MOST_SLOTS] = {WIDE, NARROW};
  A lr, b1, c2, c3, b2, c5, c6, eps, weight_decay;
  explicit PartialRowwiseAdam(const Hyper& n)
      : lr(n.lr), b1(n.h[0]), c2(1 - n.h[0]), c3(correction(n.h[0], n.t)), b2(n.h[1]), c5(1 - n.h[1]),
        c6(correction(n.h[1], n.t)), eps(n.h[2]), weight_decay(n.h[3]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A old_square = *r.s[1];
    const A v7 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
    const A v8 = b2 * old_square + c5 * (v7 / r.dim);
    const A v9 = std::sqrt(v8 / c6) + eps;
    each<A, D>(r.dim, [&](auto at) {
      const auto u1 = b1 * at(r.s[0]) + c2 * at(r.x);
      const auto w = at(r.w);
      at.put(r.s[0], u1);
      at.put(r.w, w - lr * (u1 / c3 / v9 + weight_decay * w));
    });
    *r.s[1] = v8;
  }
};

// lamb: r = u + weight_decay · w;  w ← w - lr · ‖w‖ / ‖r‖ · r. Slots: mean and square, each f[R, D].
template <class A> struct Lamb {
  static constexpr int slots = 2, width[MOST_SLOTS] = {WIDE, WIDE};
  A lr, b1, c2, c3, b2, c5, c6, eps, weight_decay;
  explicit Lamb(const Hyper& n)
      : lr(n.lr), b1(n.h[0]), c2(1 - n.h[0]), c3(correction(n.h[0], n.t)), b2(n.h[1]), c5(1 - n.h[1]),
        c6(correction(n.h[1], n.t)), eps(n.h[2]), weight_decay(n.h[3]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    each<A, D>(r.dim, [&](auto at) {
      const auto g = at(r.x);
      const auto u2 = b1 * at(r.s[0]) + c2 * g;
      const auto u3 = b2 * at(r.s[1]) + c5 * (g * g);
      at.put(r.spare, u2 / c3 / (at.root(u3 / c6) + eps) + weight_decay * at(r.w));
      at.put(r.s[0], u2);
      at.put(r.s[1], u3);
    });
    const A v7 = total<A, D>(r.dim, [&](auto at) { const auto w = at(r.w); return w * w; });
    const A v8 = std::sqrt(v7);
    const A v9 = total<A, D>(r.dim, [&](auto at) { const auto u1 = at(r.spare); return u1 * u1; });
    const A v10 = std::sqrt(v9);
    const bool v11 = (v8 > 0 && v10 > 0);
    const A v12 = lr * (v11 ? v8 / (v11 ? v10 : A(1)) : A(1));
    each<A, D>(r.dim, [&](auto at) {
      at.put(r.w, at(r.w) - v12 * at(r.spare));
    });
  }
};

// partial_rowwise_lamb: LAMB with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square f[R].
template <class A> struct PartialRowwiseLamb {
  static constexpr int slots = 2, width[MOST_SLOTS] = {WIDE, NARROW};
  A lr, b1, c2, c3, b2, c5, c6, eps, weight_decay;
  explicit PartialRowwiseLamb(const Hyper& n)
      : lr(n.lr), b1(n.h[0]), c2(1 - n.h[0]), c3(correction(n.h[0], n.t)), b2(n.h[1]), c5(1 - n.h[1]),
        c6(correction(n.h[1], n.t)), eps(n.h[2]), weight_decay(n.h[3]) {}
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const A old_square = *r.s[1];
    const A v7 = total<A, D>(r.dim, [&](auto at) { const auto w = at(r.w); return w * w; });
    const A v8 = std::sqrt(v7);
    const A v9 = total<A, D>(r.dim, [&](auto at) { const auto g = at(r.x); return g * g; });
    const A v10 = b2 * old_square + c5 * (v9 / r.dim);
    const A v11 = std::sqrt(v10 / c6) + eps;
    each<A, D>(r.dim, [&](auto at) {
      const auto u1 = b1 * at(r.s[0]) + c2 * at(r.x);
      at.put(r.spare, u1 / c3 / v11 + weight_decay * at(r.w));
      at.put(r.s[0], u1);
    });
    const A v12 = total<A, D>(r.dim, [&](auto at) { const auto u1 = at(r.spare); return u1 * u1; });
    const A v13 = std::sqrt(v12);
    const bool v14 = (v8 > 0 && v13 > 0);
    const A v15 = lr * (v14 ? v8 / (v14 ? v13 : A(1)) : A(1));
    each<A, D>(r.dim, [&](auto at) {
      at.put(r.w, at(r.w) - v15 * at(r.spare));
    });
    *r.s[1] = v10;
  }
};

constexpr int64_t GENERATED = 15;  // a user's rule

// f(rule) with the rule of that number in the order of kernels/rules.py, or GENERATED.
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
    case 8: if (n.h[2] == 0) return f(Rmsprop<A>(n)); return f(Rmsprop2<A>(n));
    case 9: return f(Ftrl<A>(n));
    case 10: return f(Adam<A>(n));
    case 11: return f(Adamw<A>(n));
    case 12: return f(PartialRowwiseAdam<A>(n));
    case 13: return f(Lamb<A>(n));
    case 14: return f(PartialRowwiseLamb<A>(n));
    case GENERATED: return f(Generated<A>(n));
  }
}

}  // namespace funcrec

// The rules of the row optimizers, each for one row: w the row, x its summed gradient, s its slots, in the accumulator type.
// w may be a 16-bit row, which is widened on reading and rounded on writing. A rule writes w once.
// The rules are in formulas.h; this file has their arguments, and a user's rule.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "passes.h"

namespace funcrec {

constexpr int MOST_SLOTS = 8;

// A rule's view of one row.
template <class A, class W = A*> struct Row {
  W w;           // f[D], or Narrow
  const A* x;    // f[D]
  A* s[MOST_SLOTS];  // each f[D], or f[1] for a slot with one number per row
  A* spare;      // f[D], to be overwritten
  int64_t dim;
  A repeats;     // the number of entries summed into x
};

// A user's rule, compiled from generated text for one dim and accumulator type A (kernels/cpp/_rules.py).
struct Code {
  void *rule = nullptr, *prepare = nullptr;
  const void* const* constants = nullptr;
  int64_t slots = 0, sizes[MOST_SLOTS] = {};  // elements of each slot of a row
  std::vector<char> shared;                   // the values that `prepare` computes once per update, for all rows

  template <class A> void start(A lr, A t) {
    reinterpret_cast<void (*)(A, A, const void* const*, void*)>(prepare)(lr, t, constants, shared.data());
  }
};

// The inputs of a rule's constructor, which picks its numbers.
struct Hyper {
  double lr;          // already rounded to the accumulator type
  double t;           // 1 at the first update
  const double* h;    // the rule's own numbers, in the order of kernels/rules.py
  const Code* code;   // the code of a user's rule
};

constexpr int WIDE = 1, NARROW = 0;   // a slot [R, D], a slot [R]

// 1 - bᵗ
inline double correction(double b, double t) { return b > 0 ? -std::expm1(t * std::log(b)) : 1; }

// A user's rule takes plain pointers and may write w more than once: a 16-bit row is widened into `spare`, and narrowed from there.
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
      const W w = r.w;  // copies: after each store the compiler would read members of r again, since the rule gets r.s
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

// A rule for tables that hold some columns of their rows, and whose gradients have all columns.
//   columns [0, wide) of a row:   0 .. 0 | the table's own, from `first` on | 0 .. 0     the rule's row, and its slots that are as wide
// The rule runs on that row and the whole gradient. Of the result, the table's own columns are kept, and slots with one number per row.
#pragma once
#include <algorithm>

#include "rules.h"

namespace funcrec {

// A rule by itself, on plain rows of `wide` columns: its code exists once for each accumulator type, for any type of table.
template <class A> struct Windowed {
  const int64_t wide, first;
  const void* const rule;
  void (*const run)(const void*, const Row<A, A*>&);
  int64_t slots = 0, wide_slots = 0;
  bool is_wide[MOST_SLOTS] = {};

  template <class Rule> Windowed(const Rule& inner, int64_t wide, int64_t first)
      : wide(wide), first(first), rule(&inner), run(wide == 64 ? run_with<Rule, 64> : run_with<Rule, 0>), slots(inner.slots) {
    for (int i = 0; i < slots; i++) wide_slots += is_wide[i] = inner.width[i] == WIDE;
  }

  template <class Rule, int D> static void run_with(const void* rule, const Row<A, A*>& r) {
    static_cast<const Rule*>(rule)->template apply<D>(r);
  }

  // r.dim: the table's own columns; r.spare: spare_rows(*this) rows of `wide`, rounded up to 32.
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    const int64_t dim = r.dim, room = (wide + 31) / 32 * 32;
    const W w = r.w;
    A* memory = r.spare + room;
    const auto blank = [&] {
      A* const made = memory;
      memory += room;
      std::fill(made, made + wide, A(0));
      return made;
    };
    Row<A, A*> whole{blank(), r.x, {}, r.spare, wide, r.repeats};
    A* const own = whole.w + first;
    each<A, D>(dim, [&](auto at) { at.put(own, at(w)); });
    for (int i = 0; i < slots; i++) {
      whole.s[i] = is_wide[i] ? blank() : r.s[i];
      if (is_wide[i]) std::copy(r.s[i], r.s[i] + dim, whole.s[i] + first);
    }
    run(rule, whole);
    each<A, D>(dim, [&](auto at) { at.put(w, at(own)); });
    for (int i = 0; i < slots; i++)
      if (is_wide[i]) std::copy(whole.s[i] + first, whole.s[i] + first + dim, r.s[i]);
  }
};

template <class A> FUNCREC_INLINE int64_t slot_size(const Windowed<A>& rule, int i, int64_t dim) { return rule.is_wide[i] ? dim : 1; }

// The number of columns of a row's gradient, and of each row that `apply` gets to write to.
template <class Rule> FUNCREC_INLINE int64_t gradient_size(const Rule&, int64_t dim) { return dim; }
template <class A> FUNCREC_INLINE int64_t gradient_size(const Windowed<A>& rule, int64_t) { return rule.wide; }
template <class Rule> FUNCREC_INLINE int64_t spare_rows(const Rule&) { return 1; }
template <class A> FUNCREC_INLINE int64_t spare_rows(const Windowed<A>& rule) { return 2 + rule.wide_slots; }

}  // namespace funcrec

// A rule by itself, on plain rows of any length: its code exists once for each accumulator type. It serves windows, and 16-bit tables of
// uncommon widths, whose rows are widened before the rule and narrowed after it.
// A window is a table that holds some columns of its rows, and whose gradients have all columns:
//   columns [0, wide) of a row:   0 .. 0 | the table's own, from `first` on | 0 .. 0     the rule's row, and its slots that are as wide
// The rule runs on that row and the whole gradient. Of the result, the table's own columns are kept, and slots with one number per row.
#pragma once
#include <algorithm>
#include <type_traits>

#include "rules.h"

namespace funcrec {

template <class A> struct Called {
  const int64_t wide, first;  // first: -1 if the table holds whole rows
  const void* const rule;
  void (*const run)(const void*, const Row<A>&);
  const int64_t slots;
  int64_t wide_slots = 0, sizes[MOST_SLOTS] = {};
  bool is_wide[MOST_SLOTS] = {};

  template <class Rule> Called(const Rule& inner, int64_t dim, int64_t wide, int64_t first)
      : wide(wide), first(first), rule(&inner), run(run_with<Rule>), slots(inner.slots) {
    for (int i = 0; i < slots; i++) {
      sizes[i] = slot_size(inner, i, dim);
      if constexpr (!std::is_same_v<Rule, Generated<A>>) wide_slots += is_wide[i] = inner.width[i] == WIDE;
    }
  }

  template <class Rule> static void run_with(const void* rule, const Row<A>& r) { static_cast<const Rule*>(rule)->template apply<0>(r); }

  // r.dim: the table's own columns; r.spare: spare_rows(*this) rows of `wide`, rounded up to 32.
  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {
    if (first >= 0) return apply_to_window(r);
    if constexpr (std::is_pointer_v<W>) {
      run(rule, r);
    } else {
      const W w = r.w;  // copies: after each store the compiler would read members of r again, since the rule gets r.s
      const int64_t dim = r.dim;
      A* const own = r.spare + room();
      each<A, 0>(dim, [&](auto at) { at.put(own, at(w)); });
      Row<A> plain{own, r.x, {}, r.spare, dim, r.repeats};
      std::copy(r.s, r.s + MOST_SLOTS, plain.s);
      run(rule, plain);
      if (w.bits) each<A, 0>(dim, [&](auto at) { at.put(w, at(own)); });
      else each<A, 0>(dim, [&](auto at) { at.put(W{w.p, nullptr}, at(own)); });
    }
  }

 private:
  int64_t room() const { return (wide + 31) / 32 * 32; }

  template <class W> __attribute__((noinline)) void apply_to_window(const Row<A, W>& r) const {
    const int64_t dim = r.dim;
    const W w = r.w;
    A* memory = r.spare + room();
    const auto blank = [&] {
      A* const made = memory;
      memory += room();
      std::fill(made, made + wide, A(0));
      return made;
    };
    Row<A> whole{blank(), r.x, {}, r.spare, wide, r.repeats};
    A* const own = whole.w + first;
    each<A, 0>(dim, [&](auto at) { at.put(own, at(w)); });
    for (int i = 0; i < slots; i++) {
      whole.s[i] = is_wide[i] ? blank() : r.s[i];
      if (is_wide[i]) std::copy(r.s[i], r.s[i] + dim, whole.s[i] + first);
    }
    run(rule, whole);
    each<A, 0>(dim, [&](auto at) { at.put(w, at(own)); });
    for (int i = 0; i < slots; i++)
      if (is_wide[i]) std::copy(whole.s[i] + first, whole.s[i] + first + dim, r.s[i]);
  }
};

template <class A> FUNCREC_INLINE int64_t slot_size(const Called<A>& rule, int i, int64_t) { return rule.sizes[i]; }

// The number of columns of a row's gradient, and of each row that `apply` gets to write to.
template <class Rule> FUNCREC_INLINE int64_t gradient_size(const Rule&, int64_t dim) { return dim; }
template <class A> FUNCREC_INLINE int64_t gradient_size(const Called<A>& rule, int64_t) { return rule.wide; }
template <class Rule> FUNCREC_INLINE int64_t spare_rows(const Rule&) { return 1; }
template <class A> FUNCREC_INLINE int64_t spare_rows(const Called<A>& rule) { return 2 + rule.wide_slots; }

}  // namespace funcrec

// One class of rows of a table: for every row that occurs, its gradients are summed in order, the rule is applied and the row is written
// once. Most of the compiled code is in update_class<E>, so tables of each dtype E have a file of their own.
#pragma once
#include <algorithm>

#include "called.h"
#include "formulas.h"
#include "group.h"
#include "random.h"

namespace funcrec {

constexpr int64_t FETCH_AHEAD = 32;  // entries between an entry's prefetch into L2 and its use
constexpr int64_t TOUCH_BYTES = 2048;  // bytes of rows and slots between the touch and the use

// A table, the slots, the keys of random bits (or none), and a user's rule if there is one. Gradients have `wide` columns. If the table has
// fewer columns, its columns begin at column *first of the gradients. lr, t and numbers are those of the table's member of an ensemble.
struct Trained {
  Table table;
  Vector slots[MOST_SLOTS];
  const Draws* draws;
  const int64_t* first;
  int64_t wide;
  Code code;
  double lr, t;
  const double* numbers;

  bool is_window() const { return wide > table.dim; }
};

// -- one class of rows -------------------------------------------------------------------------------------------

// E: the row's type in memory. D divides the rows' length, unless it is 0. DIM is that length, if it is not 0: then loops over a row are
// unrolled. A 16-bit row is narrowed as the rule writes it, not through memory, unless the rule is called.
template <class E, class Rule, int D, int DIM = 0> void update_rows(const Trained& t, const Group& g, const Rule rule, int64_t block) {
  using A = Acc<E>;
  constexpr bool NARROWED = sizeof(E) == 2;
  thread_local Scratch<A> row_memory;
  thread_local Scratch<uint16_t> bits_memory;
  const int64_t dim = DIM ? DIM : t.table.dim, wide = gradient_size(rule, dim);
  const int64_t row_bytes = dim * sizeof(E), first = block << BLOCK_BITS, room = (wide + 31) / 32 * 32;
  // Σ of a row's entries, then memory that the rule may overwrite; `room` is a multiple of the widest vector
  A *const sum = row_memory.get((1 + spare_rows(rule)) * room), *const spare = sum + room;
  const Draws* draws = t.draws;
  uint16_t* const bits = NARROWED && draws ? bits_memory.get(room + 32) : nullptr;
  const Entry* const e = g.entries;
  const auto slot = [&](int64_t row, int i) { return t.slots[i].as<A>() + row * slot_size(rule, i, dim); };
  // Inlined by force: GCC assumes that a function that only prefetches has no effect, and drops its calls.
  const auto fetch = [&](int64_t k) __attribute__((always_inline)) {
    if (k >= g.size) return;
    const int64_t row = first + e[k].row;
    prefetch<2>(t.table.data + row * row_bytes, row_bytes);
    prefetch<2>(g.gradient(e[k]), wide * (g.is_wide ? 8 : 4));
    for (int i = 0; i < rule.slots; i++) prefetch<2>(slot(row, i), slot_size(rule, i, dim) * sizeof(A));
  };
  // As in RowsAhead of lookup.h: without this second step, misses of the use itself wait for those of the prefetches.
  const auto touch_entry = [&](int64_t k) __attribute__((always_inline)) {
    if (k >= g.size) return;
    const int64_t row = first + e[k].row;
    touch(t.table.data + row * row_bytes);
    touch(g.gradient(e[k]));
    for (int i = 0; i < rule.slots; i++) touch(slot(row, i));
  };
  // Rows whose first lines are being loaded into L1: some kilobytes of them, or they would evict one another.
  int64_t bytes = row_bytes;
  for (int i = 0; i < rule.slots; i++) bytes += slot_size(rule, i, dim) * sizeof(A);
  const int64_t near = std::clamp<int64_t>(TOUCH_BYTES / bytes, 4, 8);
  for (int64_t k = 0; k < FETCH_AHEAD; k++) fetch(k);
  for (int64_t k = 0, end = 0; k < g.size; k = end) {
    const int64_t row = first + e[k].row;
    do {  // Entries are sorted, so the entries [k, end) of one row are neighbours.
      fetch(end + FETCH_AHEAD);
      touch_entry(end + near);
    } while (++end < g.size && e[end].row == e[k].row);
    E* const at = t.table.as<E>() + row * dim;
    const auto apply = [&](auto w) __attribute__((always_inline)) {
      Row<A, decltype(w)> r{w, g.sum<A>(k, end, wide, sum), {}, spare, dim, A(end - k)};
      for (int i = 0; i < rule.slots; i++) r.s[i] = slot(row, i);
      rule.template apply<D>(r);
    };
    if constexpr (NARROWED) {
      if (bits) {
        while (draws[1].begin <= row) draws++;  // Rows ascend.
        random_bits(*draws, row, dim, bits);
      }
      apply(Narrow<E>{at, bits ? bits + draws->phase : nullptr});
    } else {
      apply(at);
    }
  }
}

// Tables of f32 and 16 bits whose rows are some times UNIT long, by one of the library's rules. Common lengths are unrolled.
constexpr int UNIT = 16;

template <class E> void update_class(const Trained& t, const Group& group, int64_t block, int64_t number, const Hyper& hyper) {
  with_rule<float>(number, hyper, [&](const auto& rule) {
    using Rule = std::decay_t<decltype(rule)>;
    if constexpr (!std::is_same_v<Rule, Generated<float>>) {
      const auto update = [&](auto dim) { update_rows<E, Rule, UNIT, decltype(dim)::value>(t, group, rule, block); };
      if constexpr (sizeof(E) == 4) {
        if (t.table.dim == 16) return update(std::integral_constant<int, 16>());
        if (t.table.dim == 32) return update(std::integral_constant<int, 32>());
      }
      if (t.table.dim == 64) return update(std::integral_constant<int, 64>());
      if (t.table.dim == 128) return update(std::integral_constant<int, 128>());
      update(std::integral_constant<int, 0>());
    }
  });
}

// All other tables: rows of any length, f64, windows, rules of users.
void update_other(const Trained& t, const Group& group, int64_t block, int64_t number, const Hyper& hyper);

}  // namespace funcrec

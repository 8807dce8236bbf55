// The fused update: for every row that a cotangent names, its gradients are summed in order, the rule is applied and the
// row is written once. Work is handed out by classes of rows, so no two threads share a row nor a line of its slots, and
// the bits depend neither on the threads nor on the classes.
#pragma once
#include "group.h"
#include "window.h"

namespace funcrec {

constexpr int64_t FETCH_AHEAD = 32;  // entries between the fetch of what one needs into L2 and its use
constexpr int64_t TOUCH_BYTES = 2048;  // of rows and slots between the touch and the use
constexpr int64_t LEAST_PART = 256;  // entries that are worth an item of work of their own

// A table, its slots, the key of its random bits, or none, and its rule, if a user's. Its gradients have `wide` columns; where those are
// more than its own, its own begin at *first.
struct Trained {
  Table table;
  Vector slots[MOST_SLOTS];
  const int64_t *key, *first;
  int64_t wide;
  Code code;

  bool is_window() const { return wide > table.dim; }
};

// -- random bits -------------------------------------------------------------------------------------------------

// SplitMix64's finaliser.
template <class U> FUNCREC_INLINE U mix(U z) {
  z = (z ^ (z >> 30)) * uint64_t(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * uint64_t(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

// bits[c]: the 16 random bits of column c of a row; room for dim rounded up to 32.
inline void random_bits(uint64_t key, uint64_t row, int64_t dim, uint16_t* bits) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "four columns' bits lie in a word from the least");
  constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
  using U = Vec<uint64_t, 8>;
  const uint64_t words = (dim + 3) / 4;
  U z = key + GAMMA * (row * words + 1 + U{0, 1, 2, 3, 4, 5, 6, 7});
  for (uint64_t q = 0; q < words; q += 8, z += 8 * GAMMA) {
    const U h = mix(z);
    std::memcpy(bits + 4 * q, &h, sizeof h);
  }
}

// -- one class of rows -------------------------------------------------------------------------------------------

// E: the row's type in memory; a row of 16 bits is narrowed as the rule writes it, never through memory.
template <class E, class Rule, int D> void update_rows(const Trained& t, const Group& g, const Rule rule, int64_t block) {
  using A = Acc<E>;
  constexpr bool NARROWED = sizeof(E) == 2;
  thread_local Scratch<A> row_memory;
  thread_local Scratch<uint16_t> bits_memory;
  const int64_t dim = D ? D : t.table.dim, wide = gradient_size(rule, dim);
  const int64_t row_bytes = dim * sizeof(E), first = block << BLOCK_BITS, room = (wide + 31) / 32 * 32;
  A *const sum = row_memory.need((1 + spare_rows(rule)) * room), *const spare = sum + room;
  uint16_t* const bits = NARROWED && t.key ? bits_memory.need(room) : nullptr;
  const Entry* const e = g.entries;
  const auto slot = [&](int64_t row, int i) { return t.slots[i].as<A>() + row * slot_size(rule, i, dim); };
  // Inlined by force: GCC takes a function that only fetches for one without effect, and drops its calls.
  const auto fetch = [&](int64_t k) __attribute__((always_inline)) {
    if (k >= g.size) return;
    const int64_t row = first + e[k].row;
    prefetch<2>(t.table.data + row * row_bytes, row_bytes);
    prefetch<2>(g.gradient(e[k]), wide * (g.is_wide ? 8 : 4));
    for (int i = 0; i < rule.slots; i++) prefetch<2>(slot(row, i), slot_size(rule, i, dim) * sizeof(A));
  };
  // As in RowsAhead of lookup.h: a second step, or the misses of the use itself wait behind those of the prefetches.
  const auto touch_entry = [&](int64_t k) __attribute__((always_inline)) {
    if (k >= g.size) return;
    const int64_t row = first + e[k].row;
    touch(t.table.data + row * row_bytes);
    touch(g.gradient(e[k]));
    for (int i = 0; i < rule.slots; i++) touch(slot(row, i));
  };
  int64_t bytes = row_bytes;
  for (int i = 0; i < rule.slots; i++) bytes += slot_size(rule, i, dim) * sizeof(A);
  const int64_t near = std::clamp<int64_t>(TOUCH_BYTES / bytes, 4, 8);
  for (int64_t k = 0; k < FETCH_AHEAD; k++) fetch(k);
  for (int64_t k = 0, end = 0; k < g.size; k = end) {
    const int64_t row = first + e[k].row;
    do {
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
      if (bits) random_bits(*t.key, row, dim, bits);
      apply(Narrow<E>{at, bits});
    } else {
      apply(at);
    }
  }
}

template <class E> void update_class(const Trained& t, const Group& group, int64_t block, int64_t number, const Hyper& hyper) {
  with_rule<Acc<E>>(number, hyper, [&](const auto& rule) {
    using Rule = std::decay_t<decltype(rule)>;
    if (t.is_window()) {
      if constexpr (!std::is_same_v<Rule, Generated<Acc<E>>>) {
        using Window = Windowed<Acc<E>>;
        update_rows<E, Window, 0>(t, group, Window(rule, t.wide, *t.first), block);
      }
      return;
    }
    const auto update = [&](auto d) { update_rows<E, Rule, decltype(d)::value>(t, group, rule, block); };
    if constexpr (sizeof(E) <= 4) {
      if constexpr (sizeof(E) == 4) {
        if (t.table.dim == 16) return update(std::integral_constant<int, 16>());
        if (t.table.dim == 32) return update(std::integral_constant<int, 32>());
      }
      switch (t.table.dim) {
        case 64: return update(std::integral_constant<int, 64>());
        case 128: return update(std::integral_constant<int, 128>());
      }
    }
    update(std::integral_constant<int, 0>());
  });
}

// -- all tables --------------------------------------------------------------------------------------------------

// Every cluster that has entries, cut into classes, none with more than a thread's share; large ones first. A class costs a
// pass over all entries of its cluster, so there are no more of them than that takes.
inline std::vector<Class> classes(const Terms& terms, const std::vector<std::vector<Cluster>>& of, int64_t threads) {
  const auto entries = [&](const Cluster& c) {
    int64_t size = 0;
    for (const Segment* s : c.segments) size += most_positions(terms, *s);
    return size;
  };
  int64_t all = 0;
  for (const auto& mine : of)
    for (const Cluster& c : mine) all += entries(c);
  std::vector<std::pair<int64_t, Class>> sized;
  for (int64_t t = 0; t < int64_t(of.size()); t++) {
    for (const Cluster& c : of[t]) {
      const int64_t size = entries(c);
      int64_t parts = 1;
      while (threads > 1 && all / threads < size / parts && size / parts > LEAST_PART) parts *= 2;
      for (int64_t block = c.first >> BLOCK_BITS; size > 0 && block <= c.last >> BLOCK_BITS; block++)
        for (int64_t part = 0; part < parts; part++) sized.push_back({size / parts, {t, &c, block, part, parts}});
    }
  }
  const auto larger = [](const auto& a, const auto& b) { return a.first > b.first; };
  if (threads > 1) std::stable_sort(sized.begin(), sized.end(), larger);
  std::vector<Class> out;
  for (const auto& each : sized) out.push_back(each.second);
  return out;
}

inline void read_code(Reader& in, int64_t slots, Code& code) {
  code.rule = in.pointer<void>();
  code.prepare = in.pointer<void>();
  code.constants = in.pointer<const void* const>();
  code.shared.resize(in.number());
  code.slots = slots;
  for (int64_t i = 0; i < slots; i++) code.sizes[i] = in.number();
}

// The first slot that is not what the rule needs of its table, MOST_SLOTS · table + slot, or -1.
inline int64_t unfit_slot(const std::vector<Trained>& tables, int64_t number, const double* numbers) {
  int64_t bad = -1;
  for (int64_t i = int64_t(tables.size()) - 1; i >= 0; i--)
    with_rule<float>(number, {0, 1, numbers, &tables[i].code}, [&](const auto& rule) {
      const Table& t = tables[i].table;
      for (int j = int(rule.slots) - 1; j >= 0; j--) {
        const Vector& slot = tables[i].slots[j];
        const bool fits = slot.dtype == (t.dtype == F64 ? F64 : F32) && slot.size == t.rows * slot_size(rule, j, t.dim);
        if (!fits) bad = MOST_SLOTS * i + j;
      }
    });
  return bad;
}

// The first table whose columns are not among those of its gradients, or -1.
inline int64_t unfit_window(const std::vector<Trained>& tables) {
  for (size_t i = 0; i < tables.size(); i++) {
    const Trained& t = tables[i];
    if (t.wide < t.table.dim || (t.is_window() && (*t.first < 0 || *t.first > t.wide - t.table.dim))) return int64_t(i);
  }
  return -1;
}

// bad[0] becomes the number of a segment that does not fit, -2 - MOST_SLOTS · table - slot for a slot, else -1; bad[1] that of a table
// whose columns are not among its gradients', else -1; unless both are -1, nothing is written. [threads, bad*, rule, lr*, step*,
// hyper: n and n reals, slots: n, tables: T and (table, n slots, key*, wide, first*, and for a user's rule rule*, prepare*, constants*,
// bytes of the shared numbers, n sizes) each, terms]
inline void fused_update(Reader in) {
  const int64_t threads = in.number();
  int64_t* bad = in.pointer<int64_t>();
  const int64_t number = in.number();
  const double lr = *in.pointer<double>(), t = double(*in.pointer<int64_t>() + 1);
  std::vector<double> numbers(in.number());
  for (double& x : numbers) x = in.real();
  const int64_t slots = in.number();
  std::vector<Trained> tables(in.number());
  std::vector<int64_t> shapes;
  for (Trained& each : tables) {
    each.table = in.table();
    for (int64_t i = 0; i < slots; i++) each.slots[i] = in.vector();
    each.key = in.pointer<int64_t>();
    each.wide = in.number();
    each.first = in.pointer<int64_t>();
    if (number == GENERATED) read_code(in, slots, each.code);
    shapes.insert(shapes.end(), {each.table.rows, each.wide});
  }
  const Terms terms(in, shapes, bad);
  const int64_t slot = unfit_slot(tables, number, numbers.data());
  if (slot >= 0 && *bad < 0) *bad = -2 - slot;
  bad[1] = unfit_window(tables);
  if (bad[0] != -1 || bad[1] != -1) return;
  for (Trained& each : tables) {
    if (number != GENERATED) break;
    if (each.table.dtype == F64) each.code.start<double>(lr, t);
    else each.code.start<float>(float(lr), float(t));
  }
  std::vector<std::vector<Cluster>> of;
  for (int64_t t = 0; t < int64_t(tables.size()); t++) {
    const bool is_empty = tables[t].table.dim == 0;  // rows without columns: nothing to write, nor an address
    of.push_back(is_empty ? std::vector<Cluster>() : clusters(terms, t, tables[t].table.rows));
  }
  const std::vector<Class> work = classes(terms, of, threads);
  parallel_for(threads, work.size(), [&](int64_t i) {
    thread_local Group group;
    const Trained& mine = tables[work[i].table];
    group.build(terms, work[i], mine.table.rows);
    if (group.size == 0) return;
    const bool is_wide = mine.table.dtype == F64;
    const Hyper hyper{is_wide ? lr : float(lr), is_wide ? t : float(t), numbers.data(), &mine.code};
    with_table_type(mine.table.dtype, [&](auto tag) {
      update_class<typename decltype(tag)::type>(mine, group, work[i].block, number, hyper);
    });
  });
}

}  // namespace funcrec

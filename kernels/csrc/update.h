// The fused update: for every row in a cotangent, its gradients are summed in order, the rule is applied, and the row is written once. Work
// is handed out by classes of rows, so that no two threads share a row or a line of its slots. The bits depend neither on the threads
// nor on the classes.
#pragma once
#include "update_rows.h"

namespace funcrec {

constexpr int64_t LEAST_PART = 256;  // the least number of entries for an item of work

// Separate files define these functions, and are compiled in parallel.
extern template void update_class<float>(const Trained&, const Group&, int64_t, int64_t, const Hyper&);
extern template void update_class<Half>(const Trained&, const Group&, int64_t, int64_t, const Hyper&);
extern template void update_class<Bf16>(const Trained&, const Group&, int64_t, int64_t, const Hyper&);

// -- all tables --------------------------------------------------------------------------------------------------

// All clusters that have entries, cut into classes with at most a thread's share each; large ones come first. A class costs a pass over
// all entries of its cluster, so there are no more classes than needed.
inline std::vector<Class> classes(const Terms& terms, const std::vector<std::vector<Cluster>>& of, int64_t threads) {
  const auto entries = [&](const Cluster& c) {
    int64_t size = 0;
    for (const Segment* s : c.segments) size += most_positions(terms, *s);
    return size;
  };
  int64_t all = 0;  // the work that threads share, of all tables: a small table next to a large one is not cut
  for (const auto& mine : of)
    for (const Cluster& c : mine) all += entries(c);
  std::vector<std::pair<int64_t, Class>> sized;
  for (int64_t t = 0; t < int64_t(of.size()); t++) {
    for (const Cluster& c : of[t]) {
      const int64_t size = entries(c);
      int64_t parts = 1;  // a power of two: a row's part is some of its bits
      while (threads > 1 && all / threads < size / parts && size / parts > LEAST_PART) parts *= 2;
      for (int64_t block = c.first >> BLOCK_BITS; size > 0 && block <= c.last >> BLOCK_BITS; block++)
        for (int64_t part = 0; part < parts; part++) sized.push_back({size / parts, {t, &c, block, part, parts}});
    }
  }
  // Threads take items in order. So the last items, for which other threads wait, are small. The sort is stable: ties keep their order.
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

// The first slot that does not fit the rule and its table, MOST_SLOTS · table + slot, or -1.
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

// The first table whose columns are not among the columns of its gradients, or -1.
inline int64_t unfit_window(const std::vector<Trained>& tables) {
  for (size_t i = 0; i < tables.size(); i++) {
    const Trained& t = tables[i];
    if (t.wide < t.table.dim || (t.is_window() && (*t.first < 0 || *t.first > t.wide - t.table.dim))) return int64_t(i);
  }
  return -1;
}

// bad[0] becomes the number of a segment that does not fit, or -2 - MOST_SLOTS · table - slot for a slot, else -1. bad[1] becomes the number of
// a table whose columns are not among its gradients', else -1. Unless both are -1, nothing is written. [threads, bad*, rule, lr*, step*,
// hyper: n and n reals, slots: n, tables: T and (table, n slots, draws*, wide, first*, and for a user's rule rule*, prepare*, constants*,
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
    each.draws = in.pointer<const Draws>();
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
  // A user's rule computes the values of lr and t alone here, once for all rows; a built-in rule does so in its constructor.
  for (Trained& each : tables) {
    if (number != GENERATED) break;
    if (each.table.dtype == F64) each.code.start<double>(lr, t);
    else each.code.start<float>(float(lr), float(t));
  }
  std::vector<std::vector<Cluster>> of;
  for (int64_t t = 0; t < int64_t(tables.size()); t++) {
    const bool is_empty = tables[t].table.dim == 0;  // rows without columns: nothing to write, and no address
    of.push_back(is_empty ? std::vector<Cluster>() : clusters(terms, t, tables[t].table.rows));
  }
  const std::vector<Class> work = classes(terms, of, threads);
  parallel_for(threads, work.size(), [&](int64_t i) {
    thread_local Group group;  // its memory is kept from class to class
    const Trained& mine = tables[work[i].table];
    group.build(terms, work[i], mine.table.rows);
    if (group.size == 0) return;
    const bool is_wide = mine.table.dtype == F64;
    // lr and t in the accumulator's precision, as the rule in torch sees them
    const Hyper hyper{is_wide ? lr : float(lr), is_wide ? t : float(t), numbers.data(), &mine.code};
    with_table_type(mine.table.dtype, [&](auto tag) {
      update_class<typename decltype(tag)::type>(mine, group, work[i].block, number, hyper);
    });
  });
}

}  // namespace funcrec

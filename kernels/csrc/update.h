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

// A class of rows, and the tables [begin, end) that have its entries: a table, and the same table of other members of an ensemble.
struct Work {
  Class rows;
  const int64_t *begin, *end;
};

// Lists of tables that have the same entries: for each of the first member's tables this table and those of other members, and a list
// for each table that has entries of its own.
inline std::vector<std::vector<int64_t>> tables_alike(const Terms& terms, const std::vector<Trained>& tables, int64_t members) {
  const int64_t each = int64_t(tables.size()) / members;
  std::vector<std::vector<int64_t>> out;
  for (int64_t t = 0; t < int64_t(tables.size()); t++) {
    const int64_t first = t % each;
    if (t >= each && tables[t].table.rows == tables[first].table.rows && terms.are_alike(first, t)) out[first].push_back(t);
    else out.push_back({t});
  }
  return out;
}

// All clusters that have entries, cut into classes with at most a thread's share each; large ones come first. A class costs a pass over
// all entries of its cluster, so there are no more classes than needed. Where a class has too few entries, its tables are cut. of: the
// clusters of each list of tables.
inline std::vector<Work> classes(
    const Terms& terms, const std::vector<std::vector<int64_t>>& tables, const std::vector<std::vector<Cluster>>& of, int64_t threads) {
  const auto entries = [&](const Cluster& c) {
    int64_t size = 0;
    for (const Segment* s : c.segments) size += most_positions(terms, *s);
    return size;
  };
  int64_t all = 0;  // the work that threads share, of all tables: a small table next to a large one is not cut
  for (size_t i = 0; i < of.size(); i++)
    for (const Cluster& c : of[i]) all += entries(c) * int64_t(tables[i].size());
  std::vector<std::pair<int64_t, Work>> sized;
  for (size_t i = 0; i < of.size(); i++) {
    for (const Cluster& c : of[i]) {
      const int64_t one = entries(c), count = int64_t(tables[i].size());
      const auto is_large = [&](int64_t size) { return threads > 1 && all / threads < size; };
      int64_t parts = 1, own = count;  // parts: a power of two, because a row's part is some of its bits. own: the tables of an item
      while (is_large(one * count / parts) && one / parts > LEAST_PART) parts *= 2;
      while (is_large(one * own / parts) && own > 1) own = (own + 1) / 2;
      for (int64_t block = c.first >> BLOCK_BITS; one > 0 && block <= c.last >> BLOCK_BITS; block++)
        for (int64_t part = 0; part < parts; part++)
          for (int64_t k = 0; k < count; k += own) {
            const int64_t *const begin = tables[i].data() + k, *const end = tables[i].data() + std::min(k + own, count);
            sized.push_back({one * (end - begin) / parts, {{tables[i][0], &c, block, part, parts}, begin, end}});
          }
    }
  }
  // Threads take items in order. So the last items, for which other threads wait, are small. The sort is stable: ties keep their order.
  const auto larger = [](const auto& a, const auto& b) { return a.first > b.first; };
  if (threads > 1) std::stable_sort(sized.begin(), sized.end(), larger);
  std::vector<Work> out;
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
inline int64_t unfit_slot(const std::vector<Trained>& tables, int64_t number) {
  int64_t bad = -1;
  for (int64_t i = int64_t(tables.size()) - 1; i >= 0; i--)
    with_rule<float>(number, {0, 1, tables[i].numbers, &tables[i].code}, [&](const auto& rule) {
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
// a table whose columns are not among its gradients', else -1. Unless both are -1, nothing is written. The tables are those of the members of
// an ensemble, member after member; lr, step and hyper are one for all members, or one for each. [threads, bad*, rule, members, rates, lr*,
// steps, step*, sets of hyper, n, hyper*, slots: n, tables: T and (table, n slots, draws*, wide, first*, and for a user's rule rule*, prepare*,
// constants*, bytes of the shared numbers, n sizes) each, terms]
inline void fused_update(Reader in) {
  const int64_t threads = in.number();
  int64_t* bad = in.pointer<int64_t>();
  const int64_t number = in.number(), members = in.number();
  const int64_t rates = in.number();
  const double* const lr = in.pointer<double>();
  const int64_t steps = in.number();
  const int64_t* const step = in.pointer<int64_t>();
  const int64_t sets = in.number(), hyper_size = in.number();
  const double* const hyper = in.pointer<double>();
  const int64_t slots = in.number();
  std::vector<Trained> tables(in.number());
  std::vector<int64_t> shapes;
  for (size_t i = 0; i < tables.size(); i++) {
    Trained& each = tables[i];
    each.table = in.table();
    for (int64_t j = 0; j < slots; j++) each.slots[j] = in.vector();
    each.draws = in.pointer<const Draws>();
    each.wide = in.number();
    each.first = in.pointer<int64_t>();
    if (number == GENERATED) read_code(in, slots, each.code);
    const int64_t member = i / (tables.size() / members);
    each.lr = lr[rates > 1 ? member : 0], each.t = double(step[steps > 1 ? member : 0] + 1);
    each.numbers = hyper + (sets > 1 ? member * hyper_size : 0);
    shapes.insert(shapes.end(), {each.table.rows, each.wide});
  }
  const Terms terms(in, shapes, bad);
  const int64_t slot = unfit_slot(tables, number);
  if (slot >= 0 && *bad < 0) *bad = -2 - slot;
  bad[1] = unfit_window(tables);
  if (bad[0] != -1 || bad[1] != -1) return;
  // A user's rule computes the values of lr and t alone here, once for all rows; a built-in rule does so in its constructor.
  for (Trained& each : tables) {
    if (number != GENERATED) break;
    if (each.table.dtype == F64) each.code.start<double>(each.lr, each.t);
    else each.code.start<float>(float(each.lr), float(each.t));
  }
  const std::vector<std::vector<int64_t>> alike = tables_alike(terms, tables, members);
  std::vector<std::vector<Cluster>> of;
  for (const auto& mine : alike) {
    const Table& table = tables[mine[0]].table;
    const bool is_empty = table.dim == 0;  // rows without columns: nothing to write, and no address
    of.push_back(is_empty ? std::vector<Cluster>() : clusters(terms, mine[0], table.rows));
  }
  const std::vector<Work> work = classes(terms, alike, of, threads);
  parallel_for(threads, work.size(), [&](int64_t i) {
    thread_local Group group;  // its memory is kept from class to class
    const Class& rows = work[i].rows;
    group.build(terms, rows, tables[rows.table].table.rows);
    if (group.size == 0) return;
    int64_t aimed = rows.table;  // the table whose gradients the group has
    for (const int64_t* t = work[i].begin; t < work[i].end; t++) {
      const Trained& mine = tables[*t];
      if (*t != aimed) group.aim(terms, aimed, *t);
      aimed = *t;
      const bool is_wide = mine.table.dtype == F64;
      // lr and t in the accumulator's precision, as the rule in torch sees them
      const Hyper hyper{is_wide ? mine.lr : float(mine.lr), is_wide ? mine.t : float(mine.t), mine.numbers, &mine.code};
      const auto update = [&] {
        if (is_wide || number == GENERATED || mine.is_window() || mine.table.dim % UNIT) return update_other;
        return mine.table.dtype == F32 ? update_class<float> : mine.table.dtype == F16 ? update_class<Half> : update_class<Bf16>;
      };
      update()(mine, group, rows.block, number, hyper);
    }
  });
}

}  // namespace funcrec

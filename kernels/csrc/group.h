// One table's entries, grouped by row.
//   collect   list a table's entries in order, (row, source), for one class of rows
//   sort      sort the entries by row; the entries of a row keep their order
//   coalesce  sum the gradients of every row that occurs;  expand  write out every entry
// Rows are 32-bit numbers inside a block of 2^32 rows; a larger table is processed block by block.
#pragma once
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "scratch.h"
#include "terms.h"

namespace funcrec {

// Adds one term of a row's sum: x ← by · g for the first term, x ← x + by · g for each later term. No zeros are written first, so a sum of
// one term equals that term to the bit.
template <class A, class G, int W, bool FIRST> FUNCREC_INLINE void add_at(A* x, const G* g, A by, int64_t i) {
  const Vec<A, W> v = convert<A, W>(load<W>(g + i)) * by;
  store<W>(x + i, FIRST ? v : Vec<A, W>(load<W>(x + i) + v));
}
template <class A, class G, bool FIRST> inline void add(A* x, const G* g, A by, int64_t dim) {
  constexpr int W = LANES<A>;
  int64_t i = 0;
  for (; i + W <= dim; i += W) add_at<A, G, W, FIRST>(x, g, by, i);
  for (; i < dim; i++) add_at<A, G, 1, FIRST>(x, g, by, i);
}

struct Entry { uint32_t row, source; };  // row: the row's number inside its block
struct Source { const char* d; double scale; };

// A class of rows of one table: the rows of a cluster that lie in `block` and whose number >> LINE_BITS is `part` modulo `parts`, a
// power of two.
struct Class {
  int64_t table;
  const Cluster* cluster;
  int64_t block, part, parts;
};

// The entries of a class of rows, sorted by row, and the places of their gradients. `aim` moves the places to another table's gradients.
class Group {
 public:
  const Entry* entries = nullptr;
  int64_t size = 0;
  bool is_wide = false;  // whether gradients are f64

  // The gradient of an entry, and its multiplier.
  const char* gradient(const Entry& e) const { return sources_ ? sources_[e.source].d : base_ + e.source * stride_; }
  double scale(const Entry& e) const { return sources_ ? sources_[e.source].scale : 1; }

  // Prefetches the gradient of entry k, if there is one.
  FUNCREC_INLINE void fetch(int64_t k, int64_t dim) const {
    if (k < size) prefetch<2>(gradient(entries[k]), dim * (is_wide ? 8 : 4));
  }

  // Σ scale · gradient over entries [begin, end), in order. Returns the place of a single gradient, or `memory` with the sum.
  template <class A> FUNCREC_INLINE const A* sum(int64_t begin, int64_t end, int64_t dim, A* memory) const {
    const bool same = is_wide == (sizeof(A) == 8);  // Most rows of a batch have one entry, whose gradient is read in place.
    if (same && end - begin == 1 && scale(entries[begin]) == 1)
      return reinterpret_cast<const A*>(gradient(entries[begin]));
    is_wide ? add_all<A, double>(begin, end, dim, memory) : add_all<A, float>(begin, end, dim, memory);
    return memory;
  }

  void build(const Terms& terms, const Class& c, int64_t num_rows) {
    const auto& mine = c.cluster->segments;
    int64_t most = 0;
    for (const Segment* s : mine) most += most_positions(terms, *s);
    if (most >= int64_t(UINT32_MAX)) throw std::length_error("2^32 entries of one table");
    Entry* out = first_.get(most + 1);  // one more, because a candidate is written before the test
    // Plain: all scales are 1 and all gradients are in one matrix, so a source is a bag's number, not an address of 16 bytes.
    const bool plain = mine.size() == 1 && !mine[0]->mean && mine[0]->weights < 0;
    sources_ = plain ? nullptr : many_.get(most + 1);
    size = 0;
    is_wide = terms.is_wide;
    parts_.clear();
    for (const Segment* s : mine) {
      stride_ = terms.stride(*s);
      base_ = terms.begin(*s);
      parts_.push_back({s, size});
      with_int_type(terms.rows[s->rows].dtype, [&](auto tag) {
        using I = typename decltype(tag)::type;
        plain ? collect<I, true>(terms, *s, c, num_rows, out) : collect<I, false>(terms, *s, c, num_rows, out);
      });
    }
    // Digits are those of row - first: if a batch's rows lie in some thousands of a table of millions, one pass sorts them.
    const int64_t begin = c.block << BLOCK_BITS, first = std::max<int64_t>(c.cluster->first - begin, 0);
    const int64_t last = std::min<int64_t>(c.cluster->last - begin, (int64_t(1) << BLOCK_BITS) - 1);
    entries = sort(out, second_.get(size), size, uint32_t(first), last - first + 1);
  }

  // Moves the places of all gradients from those of one table to those of another, whose segments are alike.
  void aim(const Terms& terms, int64_t from, int64_t to) {
    for (size_t i = 0; i < parts_.size(); i++) {
      const Segment*& s = parts_[i].segment;
      const auto& mine = terms.of[from];
      const Segment* const next = terms.of[to][std::lower_bound(mine.begin(), mine.end(), s) - mine.begin()];
      const char *const was = terms.begin(*s), *const is = base_ = terms.begin(*next);
      const int64_t end = i + 1 < parts_.size() ? parts_[i + 1].first : size;
      for (int64_t k = parts_[i].first; sources_ && k < end; k++) sources_[k].d = is + (sources_[k].d - was);
      s = next;
    }
  }

 private:
  // The entries of a segment begin at this place in the order of collection.
  struct Part { const Segment* segment; int64_t first; };

  template <class I, bool PLAIN>
  void collect(const Terms& terms, const Segment& s, const Class& c, int64_t num_rows, Entry* out) {
    const I* rows = terms.rows[s.rows].as<I>();
    const uint64_t mask = c.parts - 1, part = c.part, block = c.block;
    int64_t m = size;
    positions(terms, s, [&](int64_t i, int64_t b, int64_t length) {
      const uint64_t row = uint64_t(int64_t(rows[i]));
      // The loop writes a candidate before the test, to avoid an unpredictable branch. The next candidate overwrites an entry of another class.
      out[m] = {uint32_t(row), uint32_t(PLAIN ? b : m)};
      if (!PLAIN) sources_[m] = {base_ + b * stride_, terms.scale(s, i, length)};
      m += (row < uint64_t(num_rows)) & ((row >> LINE_BITS & mask) == part) & (row >> BLOCK_BITS == block);
    });
    size = m;
  }

  template <class A, class G>
  __attribute__((noinline)) void add_all(int64_t begin, int64_t end, int64_t dim, A* memory) const {
    for (int64_t k = begin; k < end; k++) {
      const G* g = reinterpret_cast<const G*>(gradient(entries[k]));
      const A by = A(scale(entries[k]));
      k == begin ? add<A, G, true>(memory, g, by, dim) : add<A, G, false>(memory, g, by, dim);
    }
  }

  // Rows lie in [first, first + num_rows). The sort is stable, from the lowest digit up. Both arrays are overwritten; the one with the
  // result is returned.
  Entry* sort(Entry* from, Entry* to, int64_t n, uint32_t first, int64_t num_rows) {
    int bits = 0, width = 6;  // bits of all digits; largest digit: 2^11 counters are 8 KiB, and there are not many more counters than entries
    while (bits < BLOCK_BITS && (int64_t(1) << bits) < num_rows) bits++;
    while (width < 11 && (int64_t(1) << width) < n) width++;
    const int passes = n < 2 ? 0 : (bits + width - 1) / width;
    for (int pass = 0, shift = 0; pass < passes; pass++) {
      // Share the remaining bits evenly over the remaining passes: 13 bits are 7 and 6, not 11 and 2
      const int digit = (bits - shift + passes - pass - 1) / (passes - pass);
      const uint32_t mask = (1u << digit) - 1;
      uint32_t* next = counts_.get(2048);
      std::fill(next, next + mask + 1, 0);
      for (int64_t i = 0; i < n; i++) next[(from[i].row - first) >> shift & mask]++;
      uint32_t begin = 0;
      for (uint32_t i = 0; i <= mask; i++) begin += std::exchange(next[i], begin);
      for (int64_t i = 0; i < n; i++) to[next[(from[i].row - first) >> shift & mask]++] = from[i];
      std::swap(from, to);
      shift += digit;
    }
    return from;
  }

  const char* base_ = nullptr;
  int64_t stride_ = 0;
  Source* sources_ = nullptr;
  std::vector<Part> parts_;
  Scratch<Entry> first_, second_;
  Scratch<Source> many_;
  Scratch<uint32_t> counts_;
};

// -- written out -------------------------------------------------------------------------------------------------

// Python's outputs for a table's entries: expand writes rows and grads, coalesce writes all.
struct Written {
  int64_t num_rows, dim, capacity;
  int64_t *rows, *count, *repeats;
  char* grads;
};

constexpr int64_t CHUNK = 256;  // entries per item of work
constexpr int64_t SUM_AHEAD = 16;  // entries between the fetch of a gradient and its sum

// f(table, begin, end) for pieces of every table's capacity, in parallel.
template <class F> void chunks(int64_t threads, const std::vector<Written>& tables, const F& f) {
  std::vector<std::pair<int64_t, int64_t>> items;
  for (size_t t = 0; t < tables.size(); t++)
    for (int64_t begin = 0; begin < tables[t].capacity; begin += CHUNK) items.emplace_back(t, begin);
  parallel_for(threads, items.size(), [&](int64_t i) {
    const auto [t, begin] = items[i];
    f(t, begin, std::min(begin + CHUNK, tables[t].capacity));
  });
}

// One sorted class of rows, the begin of each row's run, and the number of earlier runs in its table.
struct Runs {
  Group group;
  std::vector<uint32_t> begins;
  int64_t before = 0;

  void build(const Terms& terms, const Class& c, int64_t num_rows) {
    group.build(terms, c, num_rows);
    for (int64_t k = 0; k < group.size; k++)
      if (k == 0 || group.entries[k].row != group.entries[k - 1].row) begins.push_back(uint32_t(k));
    begins.push_back(uint32_t(group.size));
  }
  int64_t size() const { return int64_t(begins.size()) - 1; }
};

// rows[k] = the k-th row that occurs, grads[k] = Σ scale · gradient over its run, repeats[k] = the length of its run. First the runs of each
// class of rows are found; when the number of earlier runs is known, every row is written by itself.
template <class A> void coalesce(const Terms& terms, const std::vector<Written>& tables, int64_t threads) {
  std::vector<Class> work;
  std::vector<Cluster> whole;
  std::vector<std::vector<Runs>> runs(tables.size());
  for (int64_t t = 0; t < int64_t(tables.size()); t++) whole.push_back({terms.of[t], 0, tables[t].num_rows - 1});
  for (int64_t t = 0; t < int64_t(tables.size()); t++) {
    runs[t].resize(((tables[t].num_rows - 1) >> BLOCK_BITS) + 1);
    for (size_t block = 0; block < runs[t].size(); block++) work.push_back({t, &whole[t], int64_t(block), 0, 1});
  }
  parallel_for(threads, work.size(), [&](int64_t i) {
    runs[work[i].table][work[i].block].build(terms, work[i], tables[work[i].table].num_rows);
  });
  for (size_t t = 0; t < tables.size(); t++) {
    int64_t count = 0;
    for (Runs& each : runs[t]) {
      each.before = count;
      count += each.size();
    }
    *tables[t].count = count;
  }
  chunks(threads, tables, [&](int64_t t, int64_t begin, int64_t end) {
    const Written& out = tables[t];
    size_t block = 0;
    for (int64_t k = begin; k < end; k++) {
      while (block < runs[t].size() && k >= runs[t][block].before + runs[t][block].size()) block++;
      A* const grads = reinterpret_cast<A*>(out.grads) + k * out.dim;
      if (block == runs[t].size()) {
        std::fill(out.rows + k, out.rows + end, -1);
        std::fill(out.repeats + k, out.repeats + end, 0);
        std::fill(grads, grads + (end - k) * out.dim, A(0));
        return;
      }
      const Runs& mine = runs[t][block];
      const int64_t first = mine.begins[k - mine.before], last = mine.begins[k - mine.before + 1];
      // sum returns a single gradient in place, which must be copied; a real sum is already in `grads`
      mine.group.fetch(last + SUM_AHEAD, out.dim);
      const A* x = mine.group.sum<A>(first, last, out.dim, grads);
      if (x != grads) std::copy(x, x + out.dim, grads);
      out.rows[k] = (int64_t(block) << BLOCK_BITS) + mine.group.entries[first].row;
      out.repeats[k] = last - first;
    }
  });
}

// Lists where each entry of a segment goes, and its gradient.
inline void place(const Terms& terms, const Segment& s, const Written& out, int64_t begin, Source* sources) {
  const Matrix& d = terms.d[s.d];
  const int64_t bytes = terms.is_wide ? 8 : 4, num_ids = terms.rows[s.rows].size;
  const bool padded = s.offsets >= 0 && s.is_padded(num_ids);
  const Ints rows(terms.rows[s.rows]);
  int64_t last = -1, inside = 0;
  positions(terms, s, [&](int64_t i, int64_t b, int64_t length) {
    inside = b == last ? inside + 1 : 0;  // the position within its bag
    last = b;
    if (rows[i] < 0 || rows[i] >= out.num_rows) return;
    const int64_t k = begin + (padded ? b * s.max_length + inside : i);
    out.rows[k] = rows[i];
    sources[k] = {d.data + (s.column + b * d.stride) * bytes, terms.scale(s, i, length)};
  });
}

// grads[k] = scale · gradient of entry k, in the order of segments. First the places are found, segment by segment; then rows are written in
// chunks, which are equal even if segments are not.
template <class A> void expand(const Terms& terms, const std::vector<Written>& tables, int64_t threads) {
  std::vector<std::vector<Source>> sources(tables.size());
  std::vector<int64_t> begins(terms.num_segments);
  for (size_t t = 0; t < tables.size(); t++) {
    sources[t].assign(tables[t].capacity, Source{nullptr, 0});
    std::fill(tables[t].rows, tables[t].rows + tables[t].capacity, -1);
    int64_t begin = 0;
    for (const Segment* s : terms.of[t]) {
      begins[s - terms.segments] = begin;
      begin += s->capacity(terms.rows[s->rows].size);
    }
  }
  parallel_for(threads, terms.num_segments, [&](int64_t i) {
    const Segment& s = terms.segments[i];
    place(terms, s, tables[s.table], begins[i], sources[s.table].data());
  });
  chunks(threads, tables, [&](int64_t t, int64_t begin, int64_t end) {
    const int64_t dim = tables[t].dim;
    for (int64_t k = begin; k < end; k++) {
      A* const grads = reinterpret_cast<A*>(tables[t].grads) + k * dim;
      const auto [g, scale] = sources[t][k];
      if (!g) std::fill(grads, grads + dim, A(0));
      else if (terms.is_wide) add<A, double, true>(grads, reinterpret_cast<const double*>(g), A(scale), dim);
      else add<A, float, true>(grads, reinterpret_cast<const float*>(g), A(scale), dim);
    }
  });
}

// [threads, bad*, whether to coalesce, whether sums are f64, T and (R, D, capacity, rows*, count*, repeats*, grads*) each, terms]
inline void write_out(Reader in) {
  const int64_t threads = in.number();
  int64_t* bad = in.pointer<int64_t>();
  const bool sums = in.number(), wide = in.number();
  std::vector<Written> tables(in.number());
  std::vector<int64_t> shapes;
  for (Written& t : tables) {
    t.num_rows = in.number(), t.dim = in.number(), t.capacity = in.number();
    t.rows = in.pointer<int64_t>(), t.count = in.pointer<int64_t>(), t.repeats = in.pointer<int64_t>();
    t.grads = in.pointer<char>();
    shapes.insert(shapes.end(), {t.num_rows, t.dim});
  }
  const Terms terms(in, shapes, bad);
  if (*bad >= 0) return;
  if (sums) wide ? coalesce<double>(terms, tables, threads) : coalesce<float>(terms, tables, threads);
  else wide ? expand<double>(terms, tables, threads) : expand<float>(terms, tables, threads);
}

}  // namespace funcrec

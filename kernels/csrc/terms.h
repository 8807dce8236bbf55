// The cotangent of tables as sums of segments (see `Segment` in forms.py), and the segments of a table that share rows.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace funcrec {

constexpr int BLOCK_BITS = 32;  // the bits of a row's number inside its block
constexpr int LINE_BITS = 4;    // rows whose numbers differ only in these bits belong to one class: their slots share a line

// One term of a table's cotangent: entries (rows[i], scale_i · d[b, column : column + D]).
struct Segment {
  int64_t table, d, column, rows, offsets, first_bag, num_bags, max_length, mean, weights;
  int64_t capacity(int64_t num_ids) const {  // as `capacity_of` in forms.py
    return offsets < 0 ? num_bags : is_padded(num_ids) ? max_length * num_bags : num_ids;
  }
  bool is_padded(int64_t num_ids) const {
    return max_length > 0 && num_bags > 0 && max_length <= std::max(num_ids, num_bags) / num_bags;
  }
};

// Python's description of a cotangent, and the segments of each table.
struct Terms {
  std::vector<Matrix> d;
  std::vector<Vector> rows, weights;
  std::vector<Ints> offsets;
  const Segment* segments;
  int64_t num_segments;
  std::vector<std::vector<const Segment*>> of;
  bool is_wide;  // whether d is f64, else f32

  // shapes: [R0, D0, R1, D1, ...]. `bad` becomes the number of the first segment that does not fit, else -1.
  Terms(Reader& in, const std::vector<int64_t>& shapes, int64_t* bad) : of(shapes.size() / 2) {
    const int64_t counts[5] = {in.number(), in.number(), in.number(), in.number(), in.number()};
    for (int64_t i = 0; i < counts[0]; i++) d.push_back(in.matrix());
    for (int64_t i = 0; i < counts[1]; i++) rows.push_back(in.vector());
    memory_.resize(counts[2]);
    for (auto& memory : memory_) offsets.push_back(ascending(Ints(in.vector()), memory));
    for (int64_t i = 0; i < counts[3]; i++) weights.push_back(in.vector());
    segments = reinterpret_cast<const Segment*>(in.at);
    num_segments = counts[4];
    is_wide = !d.empty() && d[0].dtype == F64;
    *bad = -1;
    for (int64_t i = 0; i < num_segments && *bad < 0; i++) {
      if (fits(segments[i], shapes)) of[segments[i].table].push_back(segments + i);
      else *bad = i;
    }
  }

  // The address of the gradient of bag 0 of a segment, and the bytes from a bag's gradient to the next.
  const char* begin(const Segment& s) const { return d[s.d].data + s.column * (is_wide ? 8 : 4); }
  int64_t stride(const Segment& s) const { return d[s.d].stride * (is_wide ? 8 : 4); }

  // Whether two tables have the same entries with the same multipliers. The gradients may lie elsewhere, with the same strides.
  bool are_alike(int64_t one, int64_t other) const {
    const auto same = [&](const Segment* a, const Segment* b) {
      return a->rows == b->rows && a->offsets == b->offsets && a->first_bag == b->first_bag && a->num_bags == b->num_bags &&
             a->max_length == b->max_length && a->mean == b->mean && a->weights == b->weights && d[a->d].stride == d[b->d].stride;
    };
    return std::equal(of[one].begin(), of[one].end(), of[other].begin(), of[other].end(), same);
  }

  // The multiplier of position i's gradient.
  double scale(const Segment& s, int64_t i, int64_t length) const {
    return (s.weights < 0 ? 1 : Reals(weights[s.weights])[i]) / double(length);
  }

 private:
  bool fits(const Segment& s, const std::vector<int64_t>& shapes) const {
    const auto within = [](int64_t i, const auto& list) { return i >= 0 && i < int64_t(list.size()); };
    if (!within(s.table, of) || !within(s.d, d) || !within(s.rows, rows)) return false;
    if (s.column < 0 || s.column > d[s.d].columns - shapes[2 * s.table + 1]) return false;
    if (s.num_bags < 0 || s.num_bags > d[s.d].rows || s.max_length < 0) return false;
    if (s.weights >= 0 && (!within(s.weights, weights) || weights[s.weights].size < rows[s.rows].size)) return false;
    if (s.offsets < 0) return s.num_bags <= rows[s.rows].size;
    return within(s.offsets, offsets) && s.first_bag >= 0 && s.first_bag < offsets[s.offsets].size - s.num_bags;
  }

  std::vector<std::vector<int64_t>> memory_;
};

// f(i, bag, length) for the positions i of a segment, in order: `length` is the bag's for a mean, else 1.
template <class F> FUNCREC_INLINE void positions(const Terms& terms, const Segment& s, const F& f) {
  if (s.offsets < 0) {
    for (int64_t i = 0; i < s.num_bags; i++) f(i, i, int64_t(1));
    return;
  }
  const Ints offsets = terms.offsets[s.offsets];
  const int64_t n = terms.rows[s.rows].size;
  for (int64_t b = 0; b < s.num_bags; b++) {
    const Range at = bag(offsets, s.first_bag + b, n, s.max_length);
    for (int64_t i = at.begin; i < at.end; i++) f(i, b, s.mean ? at.size() : 1);
  }
}

// The most positions that `positions` can visit.
inline int64_t most_positions(const Terms& terms, const Segment& s) {
  if (s.offsets < 0) return s.num_bags;
  const Ints& offsets = terms.offsets[s.offsets];
  const int64_t n = terms.rows[s.rows].size, first = offsets[s.first_bag], last = offsets[s.first_bag + s.num_bags];
  return std::clamp<int64_t>(last, 0, n) - std::clamp<int64_t>(first, 0, n);
}

// Segments of one table, in their order, and a range [first, last] that holds all their rows.
struct Cluster {
  std::vector<const Segment*> segments;
  int64_t first, last;
};

// A table's segments by disjoint ranges of rows: if several tables lie in one, each gets entries of its own, few enough for the caches.
// Ranges end at whole lines of slots.
inline std::vector<Cluster> clusters(const Terms& terms, int64_t table, int64_t num_rows) {
  const auto& mine = terms.of[table];
  if (mine.size() < 2) return {{mine, 0, num_rows - 1}};
  std::vector<Cluster> spans, out;
  for (const Segment* s : mine) {
    Cluster span{{s}, num_rows, -1};
    with_int_type(terms.rows[s->rows].dtype, [&](auto tag) {
      const auto* rows = terms.rows[s->rows].as<typename decltype(tag)::type>();
      positions(terms, *s, [&](int64_t i, int64_t, int64_t) {
        const int64_t row = rows[i];
        const bool inside = row >= 0 && row < num_rows;
        span.first = inside ? std::min(span.first, row) : span.first;
        span.last = inside ? std::max(span.last, row) : span.last;
      });
    });
    // Two clusters are two threads' work: a line of slots that both write would travel between their caches
    span.first &= ~((int64_t(1) << LINE_BITS) - 1), span.last |= (int64_t(1) << LINE_BITS) - 1;
    if (span.first <= span.last) spans.push_back(std::move(span));
  }
  // Spans that overlap are joined, from left to right. Sums are in the order of segments, whatever the clusters are
  std::stable_sort(spans.begin(), spans.end(), [](const Cluster& a, const Cluster& b) { return a.first < b.first; });
  for (Cluster& span : spans) {
    if (out.empty() || span.first > out.back().last) {
      out.push_back(std::move(span));
      continue;
    }
    out.back().segments.push_back(span.segments[0]);
    out.back().last = std::max(out.back().last, span.last);
  }
  for (Cluster& c : out) {
    std::sort(c.segments.begin(), c.segments.end());
    c.last = std::min(c.last, num_rows - 1);
  }
  return out;
}

}  // namespace funcrec

// The gradient of a pooled lookup's weights: d_weights[i] = <table[rows[i]], d[b]> for the positions i of bag b.
#pragma once
#include <algorithm>

#include "lookup.h"

namespace funcrec {

// <x, y> over n elements.
template <class A, class E, class D> FUNCREC_INLINE A dot(const E* x, const D* y, int64_t n) {
  return total<A, 0>(n, [&](auto at) {
    constexpr int W = decltype(at)::lanes;
    return Vec<A, W>(load<W>(x + at.i) * convert<A, W>(load<W>(y + at.i)));
  });
}

// Adds <table[rows[i]], d[b]> to out[i] for the positions i in `part` of f's bags.
template <class E, class D, class G>
void add_weight_gradients(const Lookup& call, const Feature& f, const Matrix& d, Range part, G* out) {
  const E* table = f.table.as<E>();
  int64_t low = 0, high = call.num_bags;  // the first bag that ends after part.begin
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (call.offsets[f.first_bag + middle + 1] <= part.begin) low = middle + 1;
    else high = middle;
  }
  for (int64_t b = low; b < call.num_bags; b++) {
    const Range r = call.bag(f, b);
    if (r.begin >= part.end) break;
    const D* row_of_d = d.as<D>() + b * d.stride + f.column;
    const Acc<E> length = f.mean && r.size() > 1 ? Acc<E>(r.size()) : Acc<E>(1);
    for (int64_t i = std::max(r.begin, part.begin); i < std::min(r.end, part.end); i++) {
      const int64_t row = f.rows[i];
      if (uint64_t(row) >= uint64_t(f.table.rows)) continue;
      if (i + FAR < r.end) prefetch<2>(row_address(f.table.data, f.rows[i + FAR], f.row_bytes), f.row_bytes);
      out[i] += dot<Acc<E>>(table + row * f.table.dim, row_of_d, f.table.dim) / length;
    }
  }
}

// A part is a range of positions, so that it owns their gradients even if features share positions.
inline void pooled_lookup_weights(Reader in) {
  int64_t threads = in.number();
  auto features = read_features(in);
  const Vector offsets = in.vector(), out = in.vector();
  const Matrix d = in.matrix();
  std::vector<int64_t> memory;
  const Lookup call{std::move(features), ascending(Ints(offsets), memory), Reals(), d.rows, d.columns, nullptr};
  int64_t dims = 0;
  for (const Feature& f : call.features) dims += f.table.dim;
  if (out.size * dims < MIN_WORK) threads = 1;
  const int64_t parts = threads > 1 ? std::min(4 * threads, out.size) : 1;
  parallel_for(threads, parts, [&](int64_t p) {
    const Range part{out.size * p / parts, out.size * (p + 1) / parts};
    if (out.dtype == F64) std::fill(out.as<double>() + part.begin, out.as<double>() + part.end, 0.0);
    else std::fill(out.as<float>() + part.begin, out.as<float>() + part.end, 0.0f);
    for (const Feature& f : call.features) {
      if (!f.weighted) continue;
      with_table_type(f.table.dtype, [&](auto tag) {
        using E = typename decltype(tag)::type;
        const Range mine{part.begin, std::min(part.end, f.rows.size)};
        auto add = [&](auto d_tag, auto* to) {
          add_weight_gradients<E, typename decltype(d_tag)::type>(call, f, d, mine, to);
        };
        if (d.dtype == F64) out.dtype == F64 ? add(Type<double>{}, out.as<double>()) : add(Type<double>{}, out.as<float>());
        else out.dtype == F64 ? add(Type<float>{}, out.as<double>()) : add(Type<float>{}, out.as<float>());
      });
    }
  });
}

}  // namespace funcrec

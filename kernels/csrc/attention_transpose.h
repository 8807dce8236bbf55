// The transpose of attention: cotangents of queries, keys, values and biases. Scores are computed once more, tile by tile.
//
//   p_ij = e^(s_ij - log Σ), ds_ij = p_ij (⟨d_i, v_j⟩ - ⟨d_i, out_i⟩)      or      p = silu(s) / n, ds = ⟨d_i, v_j⟩ silu'(s) / n
//   dv_j = Σ_i p_ij d_i,   dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,   d_bias[x] = Σ ds_ij over the pairs of bias x
//
// One thread computes a bag and head in one order. Biases are summed over up to GROUPS groups of bags, each in the order of bags, and then over
// the groups and heads: the bits do not depend on the number of threads.
#pragma once
#include "attention.h"

namespace funcrec {

constexpr int64_t GROUPS = 64, TIME_LANES = 8;  // sums of one bucket, so that an addition need not wait for the one before

template <class A, class E> struct Transpose {
  const Attention& a;
  const E *d_out, *out;
  const A* logs;
  E *d_q, *d_k, *d_v;
  Workspace<A>& w;

  template <class T> T* row(T* x, int64_t position, int64_t head, int64_t dim) const { return x + (position * a.heads + head) * dim; }
  const E* given(const char* x, int64_t position, int64_t head, int64_t dim) const {
    return row(reinterpret_cast<const E*>(x), position, head, dim);
  }

  // One bag and head. d_distance f[P] and d_time f[T] of the group are added to.
  void run(int64_t b, int64_t head, A* d_distance, A* d_time) const {
    const Sight s(a, b);
    const int64_t n = s.queries.size(), m = s.keys.size();
    if (!n || !m) return clear(s, head, n, m);
    const int64_t wide = round_up(a.dim, 16), values = round_up(a.width, 16), all = round_up(m, UNIT), rows = round_up(n, TILE_ROWS);
    const int64_t columns = std::min(all, TILE_COLUMNS);
    Bag x{s, Biases<A>(a, s, head, w.distances), head, wide, values, columns, all};
    x.q = w.q.get(rows * wide), x.k = w.k.get(all * wide), x.v = w.v.get(all * values), x.d_out = w.d_out.get(rows * values);
    x.k_columns = w.k_columns.get(all * wide), x.v_columns = w.v_columns.get(all * values);
    x.d_q = w.d_q.get(rows * wide), x.d_k = w.d_k.get(all * wide), x.d_v = w.d_v.get(all * values);
    x.scores = w.scores.get(TILE_ROWS * columns), x.d_scores = w.d_scores.get(TILE_ROWS * columns);
    x.found = w.buckets.get(TILE_COLUMNS + UNIT);
    pack_rows<A>(x.q, wide, given(a.q, s.queries.begin, head, a.dim), a.heads * a.dim, n, rows, a.dim, A(a.scale));
    pack_rows<A>(x.k, wide, given(a.k, s.keys.begin, head, a.dim), a.heads * a.dim, m, all, a.dim, A(1));
    pack_rows<A>(x.v, values, given(a.v, s.keys.begin, head, a.width), a.heads * a.width, m, all, a.width, A(1));
    pack_rows<A>(x.d_out, values, row(d_out, s.queries.begin, head, a.width), a.heads * a.width, n, rows, a.width, A(1));
    for (int64_t j = 0; j < all; j += columns) {
      transposed(x.k_columns + j * wide, x.panel(j), x.k + j * wide, wide, x.panel(j));
      transposed(x.v_columns + j * values, x.panel(j), x.v + j * values, values, x.panel(j));
    }
    std::fill(x.d_q, x.d_q + rows * wide, A(0));
    std::fill(x.d_k, x.d_k + all * wide, A(0));
    std::fill(x.d_v, x.d_v + all * values, A(0));
    if (d_distance) std::fill_n(x.d_distances = w.d_distances.get(x.biases.length + TILE_COLUMNS), x.biases.length + TILE_COLUMNS, A(0));
    if (d_time) std::fill_n(x.d_times = w.d_times.get(a.buckets * TIME_LANES), a.buckets * TIME_LANES, A(0));
    for (int64_t i = 0; i < n; i += TILE_ROWS) block(x, i, std::min(TILE_ROWS, n - i));
    for (int64_t i = 0; i < n; i++) unpack_row(row(d_q, s.queries.begin + i, head, a.dim), x.d_q + i * wide, a.dim, A(a.scale));
    for (int64_t j = 0; j < m; j++) {
      unpack_row(row(d_k, s.keys.begin + j, head, a.dim), x.d_k + j * wide, a.dim, A(1));  // q has the scale
      unpack_row(row(d_v, s.keys.begin + j, head, a.width), x.d_v + j * values, a.width, A(1));
    }
    if (d_distance)
      for (int64_t t = 0; t < x.biases.length; t++) d_distance[std::min(std::abs(t - x.biases.middle), a.distances - 1)] += x.d_distances[t];
    if (d_time)
      for (int64_t t = 0; t < a.buckets; t++)
        for (int64_t l = 0; l < TIME_LANES; l++) d_time[t] += x.d_times[t * TIME_LANES + l];
  }

 private:
  struct Bag {
    const Sight& s;
    const Biases<A> biases;
    int64_t head, wide, values, columns, all;
    A *q = nullptr, *k = nullptr, *v = nullptr, *d_out = nullptr, *k_columns = nullptr, *v_columns = nullptr;
    A *d_q = nullptr, *d_k = nullptr, *d_v = nullptr, *scores = nullptr, *d_scores = nullptr, *d_distances = nullptr, *d_times = nullptr;
    int32_t* found = nullptr;
    int64_t panel(int64_t j) const { return std::min(columns, all - j); }  // the columns of the tile of keys that begins at j
  };

  void clear(const Sight& s, int64_t head, int64_t n, int64_t m) const {
    for (int64_t i = 0; i < n; i++) std::fill_n(row(d_q, s.queries.begin + i, head, a.dim), a.dim, E{});
    for (int64_t j = 0; j < m; j++) {
      std::fill_n(row(d_k, s.keys.begin + j, head, a.dim), a.dim, E{});
      std::fill_n(row(d_v, s.keys.begin + j, head, a.width), a.width, E{});
    }
  }

  // Rows [i, i + rows) of queries, with all keys that they see.
  void block(Bag& x, int64_t i, int64_t rows) const {
    const Sight& s = x.s;
    A log[TILE_ROWS], middle[TILE_ROWS];  // the logarithm of the denominator and ⟨d_i, out_i⟩
    for (int64_t r = 0; r < rows && a.softmax; r++) {
      log[r] = logs[(s.queries.begin + i + r) * a.heads + x.head];
      const E* y = row(out, s.queries.begin + i + r, x.head, a.width);
      middle[r] = 0;
      for (int64_t d = 0; d < a.width; d++) middle[r] += x.d_out[(i + r) * x.values + d] * A(load<1>(y + d));
    }
    const auto seen = [&](int64_t r, int64_t j) { return r < rows ? std::min(std::max<int64_t>(s.limit(i + r) - j, 0), x.columns) : 0; };
    for (int64_t j = 0; j < s.limit(i + rows - 1); j += x.columns) {
      const int64_t most = seen(rows - 1, j), end = std::min(round_up(most, UNIT), x.columns);
      for (int64_t g = 0; g < rows; g += ROWS) tile(x, i, g, rows, j, end, log, middle, seen);
      for (int64_t c = 0, first = 0; c < most; c += ROWS) {  // each key's rows begin where the first query sees it
        while (seen(first, j) <= c) first++;
        const int64_t depth = rows - first;
        const A *p = x.scores + first * x.columns + c, *ds = x.d_scores + first * x.columns + c;
        product(x.d_v + (j + c) * x.values, x.values, Left<A>{p, 1, x.columns}, x.d_out + (i + first) * x.values, x.values, a.width, depth, true);
        product(x.d_k + (j + c) * x.wide, x.wide, Left<A>{ds, 1, x.columns}, x.q + (i + first) * x.wide, x.wide, a.dim, depth, true);
      }
    }
    for (int64_t r = 0; r < rows; r++)
      if (s.is_target(i + r)) see_itself(x, i + r, log[r], middle[r]);
  }

  // p and ds of ROWS rows from g on and keys [j, j + end), and the rows' part of d_q.
  template <class Seen>
  void tile(Bag& x, int64_t i, int64_t g, int64_t rows, int64_t j, int64_t end, const A* log, const A* middle, const Seen& seen) const {
    const int64_t most = seen(std::min(g + ROWS, rows) - 1, j);
    A *p = x.scores + g * x.columns, *ds = x.d_scores + g * x.columns;
    if (most) {
      product(p, x.columns, Left<A>{x.q + (i + g) * x.wide, x.wide, 1}, x.k_columns + j * x.wide, x.panel(j), most, a.dim, false);
      product(ds, x.columns, Left<A>{x.d_out + (i + g) * x.values, x.values, 1}, x.v_columns + j * x.values, x.panel(j), most, a.width, false);
    }
    for (int64_t r = 0; r < ROWS; r++, p += x.columns, ds += x.columns) {
      const int64_t n = seen(g + r, j);
      if (n) slopes(x, p, ds, i + g + r, x.s.position(i + g + r), j, n, a.softmax ? log[g + r] : A(0), a.softmax ? middle[g + r] : A(0));
      std::fill(p + n, p + end, A(0));
      std::fill(ds + n, ds + end, A(0));
      if (n) add_biases(x, ds, i + g + r, x.s.position(i + g + r), j, n);
    }
    if (most) product(x.d_q + (i + g) * x.wide, x.wide, Left<A>{x.d_scores + g * x.columns, x.columns, 1}, x.k + j * x.wide, x.wide, a.dim, most, true);
  }

  // Turns n scores into p, and n products ⟨d_i, v_j⟩ into ds. Numbers behind n are overwritten.
  void slopes(Bag& x, A* p, A* ds, int64_t i, int64_t position, int64_t j, int64_t n, A log, A middle) const {
    constexpr int W = LANES<A>;
    x.biases.add(p, x.found, i, position, j, n);
    if (a.softmax) {
      for (int64_t c = 0; c < n; c += W) {
        const Vec<A, W> y = exponential<A, W>(load<W>(p + c) - log);
        store<W>(p + c, y);
        store<W>(ds + c, Vec<A, W>(y * (load<W>(ds + c) - middle)));
      }
      return;
    }
    const A part = A(1 / a.normalizer);
    for (int64_t c = 0; c < n; c += W) {
      const Vec<A, W> y = load<W>(p + c), z = sigmoid<A, W>(y);
      store<W>(p + c, Vec<A, W>(y * z * part));
      store<W>(ds + c, Vec<A, W>(load<W>(ds + c) * part * (z * (A(1) + y * (A(1) - z)))));
    }
  }

  // The buckets of row i are those that `slopes` found.
  void add_biases(Bag& x, const A* ds, int64_t i, int64_t position, int64_t j, int64_t n) const {
    if (x.d_distances) {
      A* to = x.d_distances + x.biases.middle + j - position;
      for (int64_t c = 0; c < n; c++) to[c] += ds[c];
    }
    if (x.d_times)
      for (int64_t c = 0; c < n; c++) x.d_times[x.found[c] * TIME_LANES + c % TIME_LANES] += ds[c];
  }

  // A target's own key.
  void see_itself(Bag& x, int64_t i, A log, A middle) const {
    const int64_t j = x.s.place(i);
    alignas(64) A p[LANES<A>] = {}, ds[LANES<A>] = {};
    const A *q = x.q + i * x.wide, *d = x.d_out + i * x.values, *k = x.k + j * x.wide;
    p[0] = inner(q, k, x.wide), ds[0] = inner(d, x.v + j * x.values, x.values);
    slopes(x, p, ds, i, j, j, 1, a.softmax ? log : A(0), a.softmax ? middle : A(0));  // at distance 0
    add_biases(x, ds, i, j, j, 1);
    add_times(x.d_v + j * x.values, d, p[0], x.values);
    add_times(x.d_k + j * x.wide, q, ds[0], x.wide);
    add_times(x.d_q + i * x.wide, k, ds[0], x.wide);
  }
};

// Returns where each group of bags begins: as many pairs of queries and keys in each, as far as whole bags allow.
inline std::vector<int64_t> group_bags(const Attention& a, int64_t groups) {
  std::vector<int64_t> begins{0};
  double all = 0, sum = 0;
  std::vector<double> pairs(a.bags());
  for (int64_t b = 0; b < a.bags(); b++)
    all += pairs[b] = double(bag(a.offsets, b, a.num_queries, 0).size()) * double(bag(a.key_offsets, b, a.num_keys, 0).size());
  for (int64_t b = 0; b < a.bags(); b++) {
    sum += pairs[b];
    if (sum * double(groups) >= all * double(begins.size()) || b + 1 == a.bags()) begins.push_back(b + 1);
  }
  return begins;
}

// What Python passes: what attention takes, then d_out, out, the logarithms or null, and the results d_q, d_k, d_v, d_position_bias and
// d_time_bias; a bias that is not given has none.
inline void run_attention_transpose(Reader r) {
  const int64_t threads = r.number();
  Attention a = Attention::read(r);
  char *d_out = r.pointer<char>(), *out = r.pointer<char>(), *logs = r.pointer<char>();
  char *d_q = r.pointer<char>(), *d_k = r.pointer<char>(), *d_v = r.pointer<char>(), *d_position = r.pointer<char>(), *d_time = r.pointer<char>();
  std::vector<int64_t> memory, key_memory;
  a.offsets = ascending(a.offsets, memory), a.key_offsets = ascending(a.key_offsets, key_memory);
  const bool is_biased = a.position_bias || a.time_bias;
  const std::vector<int64_t> begins = group_bags(a, is_biased ? std::min(GROUPS, a.bags()) : a.bags());
  const int64_t groups = int64_t(begins.size()) - 1, each = (a.position_bias ? a.distances : 0) + (a.time_bias ? a.buckets : 0);
  with_table_type(a.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    using A = Acc<E>;
    const auto at = [](char* x) { return reinterpret_cast<E*>(x); };
    clear_outside(at(d_q), a.heads * a.dim, a.num_queries, a.offsets, E{});
    clear_outside(at(d_k), a.heads * a.dim, a.num_keys, a.key_offsets, E{});
    clear_outside(at(d_v), a.heads * a.width, a.num_keys, a.key_offsets, E{});
    std::vector<A> parts(groups * a.heads * each, A(0));
    parallel_for(threads, groups * a.heads, [&](int64_t t) {
      const int64_t head = t % a.heads;
      A* const own = parts.data() + t * each;
      const Transpose<A, E> one{a, at(d_out), at(out), reinterpret_cast<const A*>(logs), at(d_q), at(d_k), at(d_v), workspace<A>()};
      for (int64_t b = begins[t / a.heads]; b < begins[t / a.heads + 1]; b++)
        one.run(b, head, a.position_bias ? own : nullptr, a.time_bias ? own + each - a.buckets : nullptr);
    });
    const auto add = [&](char* to, int64_t first, int64_t size, int64_t heads) {
      A* const x = reinterpret_cast<A*>(to);
      if (x) std::fill_n(x, heads * size, A(0));
      for (int64_t t = 0; x && t < groups * a.heads; t++)
        for (int64_t c = 0; c < size; c++) x[(heads > 1 ? t % a.heads : 0) * size + c] += parts[t * each + first + c];
    };
    add(d_position, 0, a.distances, a.position_heads);
    add(d_time, each - (a.time_bias ? a.buckets : 0), a.buckets, a.time_heads);
  });
}

}  // namespace funcrec

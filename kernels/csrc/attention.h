// Attention within bags: each (bag, head) by itself, tile by tile, so that scores never leave the second cache.
//
//   s_ij = scale · ⟨q_i, k_j⟩ + position_bias + time_bias,   out_i = Σ_j softmax_j(s_ij) v_j  or  Σ_j silu(s_ij) v_j / normalizer
//
// A row of queries sees keys [0, limit) of its bag, and a target also its own key, after these. Every sum, also the softmax's denominator, is one
// chain over the dims, or over the keys that the row sees, in order; multiply-adds round once. The logarithm of the denominator is all that is
// kept for the transpose. One thread computes a row: the bits depend on the numbers alone.
#pragma once
#include <cmath>
#include <limits>

#include "fused.h"
#include "invariant_sums.h"
#include "parallel.h"
#include "products.h"

namespace funcrec {

constexpr int64_t TILE_ROWS = UNIT, TILE_COLUMNS = 8 * UNIT;
constexpr int64_t CHUNK = 10 * TILE_ROWS;  // queries of one task of the forward pass

// What Python passes: [threads, q, k, v, dtype, N, M, H, D, V, offsets, key offsets, position bias, its P and heads, time bias, its T and heads,
// the least time of each bucket f32[T + 1], times of queries and keys f64, number of targets or none, scale, normalizer, softmax, causal].
// Biases are of the type of sums, or null.
struct Attention {
  const char *q, *k, *v;
  int64_t dtype, num_queries, num_keys, heads, dim, width;
  Ints offsets, key_offsets;
  const char* position_bias;
  int64_t distances, position_heads;
  const char* time_bias;
  int64_t buckets, time_heads;
  const float* bounds;
  const double *query_times, *key_times;
  Vector targets;
  double scale, normalizer;
  bool softmax, causal;

  static Attention read(Reader& r) {
    return {r.pointer<char>(), r.pointer<char>(), r.pointer<char>(), r.number(), r.number(), r.number(), r.number(), r.number(), r.number(),
            Ints(r.vector()), Ints(r.vector()), r.pointer<char>(), r.number(), r.number(), r.pointer<char>(), r.number(), r.number(),
            r.pointer<float>(), r.pointer<double>(), r.pointer<double>(), r.vector(), r.real(), r.real(), r.number() != 0, r.number() != 0};
  }
  int64_t bags() const { return offsets.size - 1; }
};

// The queries and keys of one bag, and what each query sees.
struct Sight {
  Range queries, keys;
  int64_t history;  // the keys before the targets
  bool causal;

  Sight(const Attention& a, int64_t b)
      : queries(bag(a.offsets, b, a.num_queries, 0)), keys(bag(a.key_offsets, b, a.num_keys, 0)), history(keys.size()), causal(a.causal) {
    if (!a.targets) return;
    const int64_t targets = Ints(a.targets)[b];
    history -= std::min(std::max<int64_t>(targets, 0), keys.size());
  }
  int64_t place(int64_t i) const { return i + keys.size() - queries.size(); }
  bool is_target(int64_t i) const { return i < queries.size() && place(i) >= history; }
  int64_t position(int64_t i) const { return std::min(place(i), history); }
  // Does not descend as i grows, for i inside the bag.
  int64_t limit(int64_t i) const {
    if (i >= queries.size()) return 0;
    return causal ? std::max<int64_t>(0, std::min(place(i) + 1, history)) : history;
  }
};

// The biases of one (bag, head): position_at[j] for the distance of query and key, and the bucket of each pair's time.
template <class A> struct Biases {
  const A *by_distance = nullptr, *by_time = nullptr;
  int64_t middle = 0;  // by_distance[middle + j - position] is the bias of key j
  int64_t length = 0;  // of by_distance
  const float* bounds = nullptr;
  int64_t buckets = 0;
  const double *query_times = nullptr, *key_times = nullptr;

  Biases(const Attention& a, const Sight& s, int64_t head, Scratch<A>& memory) {
    if (a.position_bias) {
      const A* bias = reinterpret_cast<const A*>(a.position_bias) + (a.position_heads > 1 ? head * a.distances : 0);
      middle = s.keys.size();
      length = 2 * middle + std::max<int64_t>(0, s.queries.size() - middle) + 1;
      A* x = memory.get(length + TILE_COLUMNS);  // a tile may reach behind the last key
      for (int64_t t = 0; t < length; t++) x[t] = bias[std::min(std::abs(t - middle), a.distances - 1)];
      std::fill(x + length, x + length + TILE_COLUMNS, A(0));
      by_distance = x;
    }
    if (a.time_bias) {
      by_time = reinterpret_cast<const A*>(a.time_bias) + (a.time_heads > 1 ? head * a.buckets : 0);
      bounds = a.bounds, buckets = a.buckets;
      query_times = a.query_times + s.queries.begin, key_times = a.key_times + s.keys.begin;
    }
  }

  // The buckets of the times from query i to keys [j, j + n).
  void find_buckets(int32_t* __restrict found, int64_t i, int64_t j, int64_t n) const {
    const double now = query_times[i];
    const float top = float(buckets - 1);
    for (int64_t c = 0; c < n; c++) {
      const float apart = float(std::fabs(now - key_times[j + c]));
      uint32_t bits;
      std::memcpy(&bits, &apart, 4);
      // The exponent and the fraction are at most log2 of the time, and at least that less 0.09: at most one bucket too low.
      float near = (float(int32_t(bits)) * 0x1p-23f - 127.0f) * float(0.6931471805599453 / 0.301) - 1e-3f;
      near = near > 0 ? near : 0.0f;
      const int32_t at = int32_t(near < top ? near : top);
      found[c] = at + (apart >= bounds[at + 1]);
    }
  }

  // Adds the biases to the scores of query i and keys [j, j + n); `found` gets the buckets.
  void add(A* __restrict scores, int32_t* found, int64_t i, int64_t position, int64_t j, int64_t n) const {
    if (by_distance) {
      const A* x = by_distance + middle + j - position;
      for (int64_t c = 0; c < n; c++) scores[c] += x[c];
    }
    if (by_time) {
      find_buckets(found, i, j, n);
      for (int64_t c = 0; c < n; c++) scores[c] += by_time[found[c]];
    }
  }
};

template <class A> FUNCREC_INLINE A greatest(const A* x, int64_t n) {
  constexpr int W = LANES<A>;
  Vec<A, W> best = load<W>(x);
  for (int64_t c = W; c < n; c += W) best = most<A, W>(load<W>(x + c), best);
  A lanes[W], top = -std::numeric_limits<A>::infinity();
  store<W>(lanes, best);
  for (int l = 0; l < W; l++) top = lanes[l] > top ? lanes[l] : top;
  return top;
}

// x = e^(x - shift) for n numbers. Numbers behind n are overwritten, up to a vector.
template <class A> FUNCREC_INLINE void raise(A* x, int64_t n, A shift) {
  constexpr int W = LANES<A>;
  for (int64_t c = 0; c < n; c += W) store<W>(x + c, exponential<A, W>(load<W>(x + c) - shift));
}

template <class A> A inner(const A* x, const A* y, int64_t n) {
  A total = 0;
  for (int64_t d = 0; d < n; d++) total = std::fma(x[d], y[d], total);
  return total;
}

template <class A> FUNCREC_INLINE void add_times(A* to, const A* x, A factor, int64_t n) {
  for (int64_t d = 0; d < n; d += LANES<A>) store<LANES<A>>(to + d, fused<A, LANES<A>>(factor, load<LANES<A>>(x + d), load<LANES<A>>(to + d)));
}

template <class A> struct Workspace {
  Scratch<A> q, k, k_columns, v, v_columns, scores, d_scores, out, d_out, d_q, d_k, d_v, distances, d_distances, d_times, row;
  Scratch<int32_t> buckets;
};

// The queries [first, last) of one bag and head.
template <class A, class E> struct Forward {
  const Attention& a;
  E* out;
  A* logs;
  Workspace<A>& w;

  void run(int64_t b, int64_t head, int64_t first, int64_t last) const {
    constexpr int W = LANES<A>;
    const Sight s(a, b);
    const int64_t wide = round_up(a.dim, 16), values = round_up(a.width, 16), keys = s.limit(last - 1), padded = round_up(keys, UNIT);
    const int64_t queries = round_up(last - first, TILE_ROWS), columns = std::min(padded, TILE_COLUMNS);  // of keys at a time
    const E *k = row<E>(a.k, s.keys.begin, head, a.dim), *v = row<E>(a.v, s.keys.begin, head, a.width);
    A *q = w.q.get(queries * wide), *kept = w.k.get(padded * wide), *across = w.k_columns.get(padded * wide), *vs = w.v.get(padded * values);
    pack_rows<A>(q, wide, row<E>(a.q, s.queries.begin + first, head, a.dim), a.heads * a.dim, last - first, queries, a.dim, A(a.scale));
    pack_rows<A>(kept, wide, k, a.heads * a.dim, keys, padded, a.dim, A(1));
    pack_rows<A>(vs, values, v, a.heads * a.width, keys, padded, a.width, A(1));
    for (int64_t j = 0; j < padded; j += columns)
      transposed(across + j * wide, std::min(columns, padded - j), kept + j * wide, wide, std::min(columns, padded - j));
    const Biases<A> biases(a, s, head, w.distances);
    A *scores = w.scores.get(TILE_ROWS * std::max(padded, UNIT)), *sums = w.out.get(TILE_ROWS * values), *one = w.row.get(wide + values);
    int32_t* found = w.buckets.get(TILE_COLUMNS + UNIT);
    static_assert(UNIT % W == 0);

    for (int64_t i = first; i < last; i += TILE_ROWS) {
      const int64_t rows = std::min(TILE_ROWS, last - i);
      const auto limit = [&](int64_t r) { return r < rows ? s.limit(i + r) : 0; };
      const auto seen = [&](int64_t r, int64_t j) { return std::min(std::max<int64_t>(limit(r) - j, 0), columns); };
      for (int64_t j = 0; j < limit(rows - 1); j += columns)
        for (int64_t g = 0; g < rows; g += ROWS) {
          const int64_t most = seen(std::min(g + ROWS, rows) - 1, j);
          A* x = scores + g * padded + j;
          if (most) product(x, padded, Left<A>{q + (i - first + g) * wide, wide, 1}, across + j * wide, std::min(columns, padded - j), most, a.dim, false);
          for (int64_t r = g; r < g + ROWS; r++, x += padded)
            if (const int64_t n = seen(r, j)) biases.add(x, found, i + r, s.position(i + r), j, n);
        }
      A shift[TILE_ROWS], own[TILE_ROWS], total[TILE_ROWS];
      for (int64_t r = 0; r < rows; r++) own[r] = s.is_target(i + r) ? own_score(s, biases, head, i + r, q + (i - first + r) * wide, one, found) : A(0);
      for (int64_t r = 0; r < TILE_ROWS; r++)
        weigh(scores + r * padded, limit(r), limit(rows - 1), r < rows && s.is_target(i + r) ? own + r : nullptr, shift[r]);
      for (int64_t r = 0; a.softmax && r < rows; r += 16)
        invariant::chains_of_numbers(scores + r * padded, padded, limit(std::min(r + 16, rows) - 1), 16, total + r);
      std::fill(sums, sums + TILE_ROWS * values, A(0));
      for (int64_t j = 0; j < limit(rows - 1); j += columns)
        for (int64_t g = 0; g < rows; g += ROWS)
          if (const int64_t most = seen(std::min(g + ROWS, rows) - 1, j))
            product(sums + g * values, values, Left<A>{scores + g * padded + j, padded, 1}, vs + j * values, values, a.width, most, true);
      for (int64_t r = 0; r < rows; r++) {
        A* x = sums + r * values;
        const bool target = s.is_target(i + r);
        if (target) {
          pack_rows<A>(one, values, row<E>(a.v, s.keys.begin + s.place(i + r), head, a.width), 0, 1, 1, a.width, A(1));
          add_times(x, one, own[r], values);
          total[r] += own[r];
        }
        const int64_t at = (s.queries.begin + i + r) * a.heads + head;
        const bool none = !target && limit(r) == 0;
        if (a.softmax) {
          logs[at] = none ? -std::numeric_limits<A>::infinity() : logarithm(total[r]) + shift[r];
          if (!none)
            for (int64_t d = 0; d < values; d += W) store<W>(x + d, Vec<A, W>(load<W>(x + d) / total[r]));
        }
        unpack_row(out + at * a.width, x, a.width, A(1));
      }
    }
  }

  template <class T> const T* row(const char* x, int64_t position, int64_t head, int64_t dim) const {
    return reinterpret_cast<const T*>(x) + (position * a.heads + head) * dim;
  }

  // Turns the n scores of a row, and the score of a target's own key, into weights; those of softmax are not divided yet. Zeros follow up to `end`.
  void weigh(A* x, int64_t n, int64_t end, A* own, A& shift) const {
    constexpr int W = LANES<A>;
    constexpr A NONE = -std::numeric_limits<A>::infinity();
    shift = 0;
    if (a.softmax) {
      std::fill(x + n, x + round_up(n, W), NONE);
      const A best = n ? greatest(x, n) : NONE, most = own ? std::max(best, *own) : best;
      shift = most > NONE ? most : A(0);
      raise(x, n, shift);
    } else {
      activate(x, n);
    }
    std::fill(x + n, x + std::max(end, round_up(n, W)), A(0));
    if (!own) return;
    alignas(64) A y[W] = {*own};
    a.softmax ? raise(y, 1, shift) : activate(y, 1);
    *own = y[0];
  }

  void activate(A* x, int64_t n) const {
    constexpr int W = LANES<A>;
    const A part = A(1 / a.normalizer);
    for (int64_t c = 0; c < n; c += W) {
      const Vec<A, W> y = load<W>(x + c);
      store<W>(x + c, Vec<A, W>(y * sigmoid<A, W>(y) * part));
    }
  }

  // The score of a target's own key.
  A own_score(const Sight& s, const Biases<A>& biases, int64_t head, int64_t i, const A* q, A* one, int32_t* found) const {
    const int64_t wide = round_up(a.dim, 16), j = s.place(i);
    pack_rows<A>(one, wide, row<E>(a.k, s.keys.begin + j, head, a.dim), 0, 1, 1, a.dim, A(1));
    A x = inner(q, one, a.dim);
    biases.add(&x, found, i, j, j, 1);  // at distance 0
    return x;
  }
};

template <class A> Workspace<A>& workspace() {
  static thread_local Workspace<A> mine;
  return mine;
}

// Fills the rows of x, `size` elements each, that lie outside of all bags.
template <class T> void clear_outside(T* x, int64_t size, int64_t rows, const Ints& offsets, T with) {
  const auto at = [&](int64_t b) { return std::min(std::max<int64_t>(offsets[b], 0), rows); };
  const int64_t begin = offsets.size > 1 ? at(0) : rows, end = offsets.size > 1 ? at(offsets.size - 1) : rows;
  std::fill(x, x + begin * size, with);
  std::fill(x + end * size, x + rows * size, with);
}

inline void run_attention(Reader r) {
  const int64_t threads = r.number();
  Attention a = Attention::read(r);
  char* out = r.pointer<char>();
  char* logs = r.pointer<char>();
  std::vector<int64_t> memory, key_memory;
  a.offsets = ascending(a.offsets, memory), a.key_offsets = ascending(a.key_offsets, key_memory);
  struct Task { int64_t bag, head, first, last; };
  std::vector<Task> tasks;
  for (int64_t b = 0; b < a.bags(); b++) {
    const int64_t n = bag(a.offsets, b, a.num_queries, 0).size();
    for (int64_t h = 0; h < a.heads; h++)
      for (int64_t i = 0; i < n; i += CHUNK) tasks.push_back({b, h, i, std::min(i + CHUNK, n)});
  }
  with_table_type(a.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    using A = Acc<E>;
    clear_outside(reinterpret_cast<E*>(out), a.heads * a.width, a.num_queries, a.offsets, E{});
    if (a.softmax) clear_outside(reinterpret_cast<A*>(logs), a.heads, a.num_queries, a.offsets, A(0));
    parallel_for(threads, tasks.size(), [&](int64_t t) {
      const Task& it = tasks[t];
      Forward<A, E>{a, reinterpret_cast<E*>(out), reinterpret_cast<A*>(logs), workspace<A>()}.run(it.bag, it.head, it.first, it.last);
    });
  });
}

}  // namespace funcrec

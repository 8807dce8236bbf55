// Sums in the order of invariant.h: chains of CHAIN terms, then a tree of neighbours.
#pragma once
#include "invariant.h"

namespace funcrec::invariant {

constexpr int64_t COLUMNS = 256;  // columns whose sums stay in the first cache
constexpr int SIDE_BY_SIDE = 8;   // chains of single numbers that run at once

// out[j] = the chain over `terms` rows of x [terms, inner], columns [0, n).
template <class A> void chain_of_rows(const A* __restrict x, int64_t inner, int64_t terms, int64_t n, A* __restrict out) {
  std::fill(out, out + n, A(0));
  for (int64_t k = 0; k < terms; k++)
    for (int64_t j = 0; j < n; j++) out[j] += x[k * inner + j];
}

// out[i] = the chain over x[i * apart + k] for k < terms, for `count` chains.
template <class A> void chains_of_numbers(const A* x, int64_t apart, int64_t terms, int64_t count, A* out) {
  int64_t i = 0;
  if constexpr (sizeof(A) == 4) {  // chains in the lanes of vectors: squares are turned
    constexpr int W = LANES<A>;
    const auto in_lanes = [&](auto vectors) {
      constexpr int V = decltype(vectors)::value;
      for (; i + V * W <= count; i += V * W) {
        const A* from = x + i * apart;
        Vec<A, W> s[V] = {};
        const int64_t whole = terms / W * W;
        for (int64_t k = 0; k < whole; k += W)
          for (int v = 0; v < V; v++) {
            Vec<A, W> t[W];
            turn<W>(t, [&](int j) { return from + (v * W + j) * apart + k; });
            for (int j = 0; j < W; j++) s[v] += t[j];
          }
        for (int v = 0; v < V; v++) store<W>(out + i + v * W, s[v]);
        for (int64_t k = whole; k < terms; k++)
          for (int64_t j = 0; j < V * W; j++) out[i + j] += from[j * apart + k];
      }
    };
    in_lanes(std::integral_constant<int, 4>{}), in_lanes(std::integral_constant<int, 1>{});
  }
  for (; i + SIDE_BY_SIDE <= count; i += SIDE_BY_SIDE) {
    A s[SIDE_BY_SIDE] = {};
    for (int64_t k = 0; k < terms; k++)
      for (int j = 0; j < SIDE_BY_SIDE; j++) s[j] += x[(i + j) * apart + k];
    std::copy(s, s + SIDE_BY_SIDE, out + i);
  }
  for (; i < count; i++) {
    A s = 0;
    for (int64_t k = 0; k < terms; k++) s += x[i * apart + k];
    out[i] = s;
  }
}

// sums [blocks, inner] of x [terms, inner], for blocks [first, last).
template <class A> void sums_of_blocks(const A* x, int64_t terms, int64_t inner, int64_t first, int64_t last, A* sums) {
  if (inner == 1) {
    const int64_t whole = std::max(first, std::min(last, terms / CHAIN));
    chains_of_numbers(x + first * CHAIN, CHAIN, CHAIN, whole - first, sums + first);
    if (whole < last) chains_of_numbers(x + whole * CHAIN, CHAIN, terms - whole * CHAIN, 1, sums + whole);
    return;
  }
  for (int64_t j = 0; j < inner; j += COLUMNS)
    for (int64_t b = first; b < last; b++)
      chain_of_rows(x + b * CHAIN * inner + j, inner, std::min(CHAIN, terms - b * CHAIN), std::min(COLUMNS, inner - j), sums + b * inner + j);
}

// The tree over sums [blocks, inner]: its root takes the place of the first.
template <class A> void join_blocks(A* sums, int64_t blocks, int64_t inner) {
  for (int64_t half = 1; half < blocks; half *= 2)
    for (int64_t b = 0; b + half < blocks; b += 2 * half)
      for (int64_t j = 0; j < inner; j++) sums[b * inner + j] += sums[(b + half) * inner + j];
}

// out [rows] of x [rows, terms].
template <class A> void sums_of_rows(const A* x, int64_t rows, int64_t terms, A* out) {
  const int64_t blocks = (terms + CHAIN - 1) / CHAIN;
  if (blocks <= 1) return chains_of_numbers(x, terms, terms, rows, out);
  std::vector<A> memory(blocks * rows);
  for (int64_t b = 0; b < blocks; b++) chains_of_numbers(x + b * CHAIN, terms, std::min(CHAIN, terms - b * CHAIN), rows, memory.data() + b * rows);
  join_blocks(memory.data(), blocks, rows);
  std::copy(memory.begin(), memory.begin() + rows, out);
}

// out [inner] of x [terms, inner]: the blocks are shared out to the threads.
template <class A> void sums_of_columns(int64_t threads, const A* x, int64_t terms, int64_t inner, A* out) {
  const int64_t blocks = std::max<int64_t>(1, (terms + CHAIN - 1) / CHAIN);
  if (blocks == 1) return sums_of_blocks(x, terms, inner, 0, 1, out);
  std::vector<A> memory(blocks * inner);
  const int64_t together = std::max<int64_t>(inner == 1 ? SIDE_BY_SIDE : 1, blocks / (4 * threads));
  parallel_for(threads, (blocks + together - 1) / together, [&](int64_t task) {
    sums_of_blocks(x, terms, inner, task * together, std::min(blocks, (task + 1) * together), memory.data());
  });
  join_blocks(memory.data(), blocks, inner);
  std::copy(memory.begin(), memory.begin() + inner, out);
}

// out [outer, inner] of x [outer, terms, inner].
template <class A> void sums(int64_t threads, int64_t outer, int64_t terms, int64_t inner, const A* x, A* out) {
  const int64_t most = std::max<int64_t>(1, std::min(threads, outer * terms * inner / (WORTH / 4)));
  if (outer < SIDE_BY_SIDE) {
    for (int64_t i = 0; i < outer; i++) sums_of_columns(most, x + i * terms * inner, terms, inner, out + i * inner);
    return;
  }
  const int64_t together = round_up((outer + 4 * most - 1) / (4 * most), 16);
  parallel_for(most, (outer + together - 1) / together, [&](int64_t task) {
    const int64_t first = task * together, last = std::min(outer, first + together);
    if (inner == 1) return sums_of_rows(x + first * terms, last - first, terms, out + first);
    for (int64_t i = first; i < last; i++) sums_of_columns(1, x + i * terms * inner, terms, inner, out + i * inner);
  });
}

// threads, dtype, outer, terms, inner, x, out.
inline void run_sum(Reader r) {
  const int64_t threads = r.number(), dtype = r.number(), outer = r.number(), terms = r.number(), inner = r.number();
  if (dtype == F64) {
    const double* x = r.pointer<const double>();
    sums(threads, outer, terms, inner, x, r.pointer<double>());
  } else {
    const float* x = r.pointer<const float>();
    sums(threads, outer, terms, inner, x, r.pointer<float>());
  }
}

}  // namespace funcrec::invariant

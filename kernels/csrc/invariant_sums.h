// Sums in the order of invariant.h: chains of at most CHAIN terms, then a tree of neighbours.
#pragma once
#include "invariant.h"

namespace funcrec::invariant {

constexpr int64_t COLUMNS = 256;  // columns whose sums stay in the first cache
constexpr int SIDE_BY_SIDE = 8;   // chains of single numbers that run at once

// out[j] = the chain over `terms` rows of x [terms, inner], columns [0, n).
template <class A> void chain_of_rows(const A* __restrict x, int64_t inner, int64_t terms, int64_t n, A* __restrict out) {
  std::fill(out, out + n, A(0));
  int64_t k = 0;
  for (; k + 4 <= terms; k += 4) {  // a sum is read and written once for four rows
    const A *a = x + k * inner, *b = a + inner, *c = b + inner, *d = c + inner;
    for (int64_t j = 0; j < n; j++) out[j] = (((out[j] + a[j]) + b[j]) + c[j]) + d[j];
  }
  for (; k < terms; k++)
    for (int64_t j = 0; j < n; j++) out[j] += x[k * inner + j];
}

// out[i] = the chain over at(i)[k] for k < terms, for `count` chains.
template <class A, class At> void chains_at(At at, int64_t terms, int64_t count, A* out) {
  int64_t i = 0;
  if constexpr (sizeof(A) == 4) {  // chains in the lanes of vectors: squares are turned
    constexpr int W = LANES<A>;
    const auto in_lanes = [&](auto vectors) {
      constexpr int V = decltype(vectors)::value;
      for (; i + V * W <= count; i += V * W) {
        Vec<A, W> s[V] = {};
        const int64_t whole = terms / W * W;
        for (int64_t k = 0; k < whole; k += W)
          for (int v = 0; v < V; v++) {
            Vec<A, W> t[W];
            turn<W>(t, [&](int j) { return at(i + v * W + j) + k; });
            for (int j = 0; j < W; j++) s[v] += t[j];
          }
        for (int v = 0; v < V; v++) store<W>(out + i + v * W, s[v]);
        for (int64_t k = whole; k < terms; k++)
          for (int64_t j = 0; j < V * W; j++) out[i + j] += at(i + j)[k];
      }
    };
    in_lanes(std::integral_constant<int, 4>{}), in_lanes(std::integral_constant<int, 1>{});
  }
  for (; i + SIDE_BY_SIDE <= count; i += SIDE_BY_SIDE) {
    A s[SIDE_BY_SIDE] = {};
    for (int64_t k = 0; k < terms; k++)
      for (int j = 0; j < SIDE_BY_SIDE; j++) s[j] += at(i + j)[k];
    std::copy(s, s + SIDE_BY_SIDE, out + i);
  }
  for (; i < count; i++) {
    A s = 0;
    for (int64_t k = 0; k < terms; k++) s += at(i)[k];
    out[i] = s;
  }
}

// out[i] = the chain over x[i * apart + k].
template <class A> void chains_of_numbers(const A* x, int64_t apart, int64_t terms, int64_t count, A* out) {
  chains_at([=](int64_t i) { return x + i * apart; }, terms, count, out);
}

// sums [blocks, inner] of x [terms, inner], for blocks [first, last).
template <class A> void sums_of_blocks(const A* x, const Blocks& blocks, int64_t inner, int64_t first, int64_t last, A* sums) {
  if (inner == 1) {
    const int64_t least = blocks.least();
    if (least << blocks.levels == blocks.terms) return chains_of_numbers(x + first * least, least, least, last - first, sums + first);
    chains_at([&](int64_t i) { return x + blocks.at(first + i); }, least, last - first, sums + first);
    for (int64_t b = first; b < last; b++)
      if (blocks.size(b) > least) sums[b] += x[blocks.at(b) + least];
    return;
  }
  for (int64_t j = 0; j < inner; j += COLUMNS)
    for (int64_t b = first; b < last; b++)
      chain_of_rows(x + blocks.at(b) * inner + j, inner, blocks.size(b), std::min(COLUMNS, inner - j), sums + b * inner + j);
}

// The tree over sums [blocks, inner]: its root takes the place of the first.
template <class A> void join_blocks(A* sums, int64_t blocks, int64_t inner) {
  for (int64_t half = 1; half < blocks; half *= 2)
    for (int64_t b = 0; b < blocks; b += 2 * half)
      for (int64_t j = 0; j < inner; j++) sums[b * inner + j] += sums[(b + half) * inner + j];
}

// out [rows] of x [rows, terms].
template <class A> void sums_of_rows(const A* x, int64_t rows, int64_t terms, A* out) {
  const Blocks blocks(terms);
  const auto chains = [&](int64_t b, A* to) { chains_of_numbers(x + blocks.at(b), terms, blocks.size(b), rows, to); };
  if (blocks.count() == 1) return chains(0, out);
  std::vector<A> memory(blocks.count() * rows);
  for (int64_t b = 0; b < blocks.count(); b++) chains(b, memory.data() + b * rows);
  join_blocks(memory.data(), blocks.count(), rows);
  std::copy(memory.begin(), memory.begin() + rows, out);
}

// out [inner] of x [terms, inner]: the blocks are shared out to the threads.
template <class A> void sums_of_columns(int64_t threads, const A* x, int64_t terms, int64_t inner, A* out) {
  const Blocks blocks(terms);
  const int64_t count = blocks.count();
  if (count == 1) return sums_of_blocks(x, blocks, inner, 0, 1, out);
  std::vector<A> memory(count * inner);
  const int64_t together = std::max<int64_t>(inner == 1 ? SIDE_BY_SIDE : 1, count / (4 * threads));
  parallel_for(threads, (count + together - 1) / together, [&](int64_t task) {
    sums_of_blocks(x, blocks, inner, task * together, std::min(count, (task + 1) * together), memory.data());
  });
  join_blocks(memory.data(), count, inner);
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

// Chains of multiply-adds that run side by side, in the order of invariant.h: what a tile of sums needs of A and B, however B lies.
#pragma once
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "fused.h"
#include "products.h"
#include "turned.h"

namespace funcrec::invariant {

constexpr int64_t CHAIN = 256;              // the most terms of one chain
constexpr int64_t TOGETHER = 4;             // blocks that are packed at a time: a whole subtree,
constexpr int64_t DEPTH = TOGETHER * CHAIN;  // and their most terms
constexpr int TALL = VECTOR_BYTES == 64 ? 14 : VECTOR_BYTES == 32 ? 6 : 4;  // rows of a tile: all its sums stay in registers
constexpr int WIDE = 2;                     // vectors of a tile
constexpr int FEW = std::min(TALL, 6);  // rows for which columns of B are turned in registers
constexpr int SLIM = VECTOR_BYTES == 64 ? 4 : 2;  // rows for which rows of B are read one after the other,
constexpr int64_t THIN = 4;             // and terms for which they are

// -- the blocks of a sum ----------------------------------------------------------------------------------------------

// The least power of two of blocks of at most CHAIN terms. Their lengths differ by one at most, so half of the terms are half of the blocks.
struct Blocks {
  int64_t terms, levels = 0;
  explicit Blocks(int64_t terms) : terms(terms) {
    while ((CHAIN << levels) < terms) levels++;
  }
  int64_t count() const { return int64_t(1) << levels; }
  int64_t least() const { return terms >> levels; }  // terms of the shortest block
  int64_t at(int64_t j) const { return j * least() + ((j * (terms - (least() << levels))) >> levels); }  // j terms / count
  int64_t size(int64_t j) const { return at(j + 1) - at(j); }
};

// The blocks of a subtree: block i has the terms [at[i], at[i + 1]) after its first one.
struct Subtree {
  int64_t count, at[TOGETHER + 1];
  Subtree(const Blocks& blocks, int64_t first, int64_t count) : count(count) {
    for (int64_t i = 0; i <= count; i++) at[i] = blocks.at(first + i) - blocks.at(first);
  }
  int64_t depth() const { return at[count]; }
};

// -- the tile: R rows by V vectors ------------------------------------------------------------------------------------

// Numbers of a term in a packed panel of `rows` rows: with AVX-512 whole squares, which are written and read without a remainder.
template <class A> constexpr int64_t pitch(int64_t rows) { return VECTOR_BYTES == 64 && sizeof(A) == 4 ? 16 : rows; }

// How A lies, and B. BESIDE: the numbers of A for a term lie side by side, and terms `stride` apart, as in a packed panel or a transposed matrix.
// ALONG: the terms of a row lie side by side, and rows `stride` apart. TURNED: A is a packed panel, and the terms of a column of B lie side by side.
enum class Lies { BESIDE, ALONG, TURNED };

// What a chain reads of R rows of A for a term. Of rows that lie along, a register holds each third address: an instruction adds one or two strides.
template <class A, int R, Lies HOW> struct Rows {
  static constexpr int HELD = HOW == Lies::ALONG ? (R + 2) / 3 : 1;
  const A* at[HELD];
  int64_t stride;
  FUNCREC_INLINE Rows(const A* a, int64_t stride) : stride(stride) {
    FUNCREC_UNROLL for (int i = 0; i < HELD; i++) at[i] = a + 3 * i * stride;
  }
  FUNCREC_INLINE A operator[](int r) const { return HOW == Lies::ALONG ? at[r / 3][r % 3 * stride] : at[0][r]; }
  FUNCREC_INLINE void next() {
    FUNCREC_UNROLL for (int i = 0; i < HELD; i++) at[i] += HOW == Lies::ALONG ? 1 : stride;
  }
};

// C [R, V vectors] of one chain, plus `joins` sums that came before it, the last one first: they lie at `kept`, downwards. With `add`, C is joined last.
// `b` has rows `b_row` apart. All sums stay in registers.
template <class A, int R, int V, Lies HOW>
void chain(int64_t depth, const A* a, int64_t a_stride, const A* b, int64_t b_row, A* c, int64_t c_row, const A* kept, int joins, bool add) {
  constexpr int W = LANES<A>;
  Vec<A, W> s[R][V];
  FUNCREC_UNROLL for (int r = 0; r < R; r++)
    FUNCREC_UNROLL for (int v = 0; v < V; v++) s[r][v] = Vec<A, W>{};
  Rows<A, R, HOW> x(a, a_stride);
  for (int64_t k = 0; k < depth; k++, x.next(), b += b_row) {
    Vec<A, W> y[V];
    FUNCREC_UNROLL for (int v = 0; v < V; v++) y[v] = load<W>(b + v * W);
    FUNCREC_UNROLL for (int r = 0; r < R; r++)
      FUNCREC_UNROLL for (int v = 0; v < V; v++) s[r][v] = fused<A, W>(x[r], y[v], s[r][v]);
  }
  for (; joins > 0; joins--, kept -= R * V * W)
    FUNCREC_UNROLL for (int r = 0; r < R; r++)
      FUNCREC_UNROLL for (int v = 0; v < V; v++) s[r][v] = load<W>(kept + (r * V + v) * W) + s[r][v];
  if (add)
    FUNCREC_UNROLL for (int r = 0; r < R; r++)
      FUNCREC_UNROLL for (int v = 0; v < V; v++) s[r][v] = load<W>(c + r * c_row + v * W) + s[r][v];
  FUNCREC_UNROLL for (int r = 0; r < R; r++)
    FUNCREC_UNROLL for (int v = 0; v < V; v++) store<W>(c + r * c_row + v * W, s[r][v]);
}

// The same of columns of B that are contiguous and `b_row` apart: squares of them are turned in registers, which costs less than to pack what is read
// once. The last square overlaps the one before it.
template <class A, int R, int V>
void turned_chain(int64_t depth, const A* a, int64_t /* pitch<A>(R) */, const A* b, int64_t b_row, A* c, int64_t c_row, const A* kept, int joins, bool /* add: never */) {
  constexpr int W = LANES<A>;
  constexpr int64_t LINE = std::max<int64_t>(W, 64 / sizeof(A)), AHEAD = 4 * LINE;
  Vec<A, W> s[R][V];
  FUNCREC_UNROLL for (int r = 0; r < R; r++)
    FUNCREC_UNROLL for (int v = 0; v < V; v++) s[r][v] = Vec<A, W>{};
  int64_t k = 0;
  for (; k + LINE <= depth; k += LINE)
    FUNCREC_UNROLL for (int v = 0; v < V; v++) {
      FUNCREC_UNROLL for (int i = 0; i < W; i++) __builtin_prefetch(b + (v * W + i) * b_row + k + AHEAD);
      for (int64_t own = k; own < k + LINE; own += W) {
        Vec<A, W> t[W];
        turn<W>(t, [&](int i) { return b + (v * W + i) * b_row + own; });
        FUNCREC_UNROLL for (int j = 0; j < W; j++)
          FUNCREC_UNROLL for (int r = 0; r < R; r++) s[r][v] = fused<A, W>(a[(own + j) * pitch<A>(R) + r], t[j], s[r][v]);
      }
    }
  for (; k < depth; k += W) {
    const int64_t from = std::min(k, depth - W);
    FUNCREC_UNROLL for (int v = 0; v < V; v++) {
      Vec<A, W> t[W];
      turn<W>(t, [&](int i) { return b + (v * W + i) * b_row + from; });
      for (int64_t j = k - from; j < W; j++)
        FUNCREC_UNROLL for (int r = 0; r < R; r++) s[r][v] = fused<A, W>(a[(from + j) * pitch<A>(R) + r], t[j], s[r][v]);
    }
  }
  for (; joins > 0; joins--, kept -= R * V * W)
    FUNCREC_UNROLL for (int r = 0; r < R; r++)
      FUNCREC_UNROLL for (int v = 0; v < V; v++) s[r][v] = load<W>(kept + (r * V + v) * W) + s[r][v];
  FUNCREC_UNROLL for (int r = 0; r < R; r++)
    FUNCREC_UNROLL for (int v = 0; v < V; v++) store<W>(c + r * c_row + v * W, s[r][v]);
}

// Sums of R rows that pass through the first cache: B is read row by row, as it lies. C [R, columns] of whole vectors; `kept` has room for 3 of SWEPT
// numbers.
constexpr int64_t SWEPT = 4096;
template <class A, int R> void sweep(const Subtree& terms, int64_t columns, const A* a, const A* b, int64_t b_row, A* c, int64_t c_row, A* kept) {
  constexpr int W = LANES<A>, TERMS = R == 1 ? 8 : R == 2 || VECTOR_BYTES == 64 ? 4 : 2;
  constexpr int64_t PART = SWEPT / R / W * W;
  for (int64_t left = 0; left < columns; left += PART) {
    const int64_t n = std::min(PART, columns - left);
    A* const out[TOGETHER] = {c + left, kept, kept + SWEPT, kept + 2 * SWEPT};
    const int64_t rows[TOGETHER] = {c_row, PART, PART, PART};
    for (int64_t block = 0; block < terms.count; block++) {
      A* const to = out[block];
      const int64_t to_row = rows[block], begin = terms.at[block], end = terms.at[block + 1];
      const auto pass = [&](auto number, int64_t k) {
        constexpr int T = decltype(number)::value;
        A x[T][R];  // they stay in registers, whatever is written to C
        FUNCREC_UNROLL for (int t = 0; t < T; t++)
          FUNCREC_UNROLL for (int r = 0; r < R; r++) x[t][r] = a[(k + t) * pitch<A>(R) + r];
        for (int64_t j = 0; j < n; j += W) {
          Vec<A, W> s[R];
          FUNCREC_UNROLL for (int r = 0; r < R; r++) s[r] = k == begin ? Vec<A, W>{} : load<W>(to + r * to_row + j);
          FUNCREC_UNROLL for (int t = 0; t < T; t++) {
            const Vec<A, W> y = load<W>(b + (k + t) * b_row + left + j);
            FUNCREC_UNROLL for (int r = 0; r < R; r++) s[r] = fused<A, W>(x[t][r], y, s[r]);
          }
          FUNCREC_UNROLL for (int r = 0; r < R; r++) store<W>(to + r * to_row + j, s[r]);
        }
      };
      int64_t k = begin;
      for (; k + TERMS <= end; k += TERMS) pass(std::integral_constant<int, TERMS>{}, k);
      for (; k < end; k++) pass(std::integral_constant<int, 1>{}, k);
    }
    for (int64_t half = 1; half < terms.count; half *= 2)
      for (int64_t i = 0; i < terms.count; i += 2 * half)
        for (int r = 0; r < R; r++)
          for (int64_t j = 0; j < n; j += W)
            store<W>(out[i] + r * rows[i] + j, load<W>(out[i] + r * rows[i] + j) + load<W>(out[i + half] + r * rows[i + half] + j));
  }
}

// C of R rows and `columns` columns, at most V vectors: chains of the subtree's blocks, whose sums are joined as a tree. With `add`, their sum is
// added to C, where the sum of the terms before lies.
template <class A, int R, int V, Lies HOW>
void tile(const Subtree& terms, const A* a, int64_t a_stride, const A* b, int64_t b_row, A* c, int64_t c_row, int64_t columns, [[maybe_unused]] bool add) {
  constexpr int W = LANES<A>, SIZE = R * V * W;
  const auto run = [](auto... of) {
    if constexpr (HOW == Lies::TURNED) turned_chain<A, R, V>(of...);
    else chain<A, R, V, HOW>(of...);
  };
  const bool whole = columns == V * W;
  alignas(64) A kept[3][SIZE];  // a binary counter of sums: at most a pair and a single chain wait
  int top = 0;
  for (int64_t i = 0; i < terms.count; i++) {
    const bool direct = i + 1 == terms.count && whole;
    const int64_t k = terms.at[i];
    const int joins = __builtin_ctzll(~i), to = top - joins;
    run(terms.at[i + 1] - k, a + k * (HOW == Lies::ALONG ? 1 : a_stride), a_stride, b + k * (HOW == Lies::TURNED ? 1 : b_row), b_row,
        direct ? c : kept[to], direct ? c_row : V * W, kept[0] + (top - 1) * SIZE, joins, direct && add);
    top = to + 1;
  }
  if (whole) return;
  for (int r = 0; r < R; r++)
    for (int64_t j = 0; j < columns; j++) c[r * c_row + j] = add ? c[r * c_row + j] + kept[0][r * V * W + j] : kept[0][r * V * W + j];
}

// Few rows have few chains: a wider tile keeps the units busy. A turned square takes half of the registers.
constexpr int width_of(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : WIDE; }
constexpr int turned_width(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

template <class A> using Tile = void (*)(const Subtree&, const A*, int64_t, const A*, int64_t, A*, int64_t, int64_t, bool);
template <class A> using Tiles = std::array<Tile<A>, TALL>;  // by their rows
template <class A, int V, Lies HOW, int... R> constexpr Tiles<A> tiles(std::integer_sequence<int, R...>) { return {tile<A, R + 1, V, HOW>...}; }
template <class A, int... R> constexpr Tiles<A> wide_tiles(std::integer_sequence<int, R...>) { return {tile<A, R + 1, width_of(R + 1), Lies::BESIDE>...}; }
template <class A, int V, int... R> constexpr Tiles<A> turned_tiles(std::integer_sequence<int, R...>) {
  return {tile<A, R + 1, V ? V : turned_width(R + 1), Lies::TURNED>...};
}

template <class A> using Sweep = void (*)(const Subtree&, int64_t, const A*, const A*, int64_t, A*, int64_t, A*);
template <class A, int... R> constexpr std::array<Sweep<A>, sizeof...(R)> sweeps(std::integer_sequence<int, R...>) { return {sweep<A, R + 1>...}; }

}  // namespace funcrec::invariant

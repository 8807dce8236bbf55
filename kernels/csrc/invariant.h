// Products and sums whose bits depend on the numbers alone: not on the batch, the threads, the vectors' width or the instruction set.
//
//   C[m, n] = tree_j  chain_{k in block j}  fma(A[m, k], B[k, n], acc)         out[i] = tree_j  chain_{k in block j}  acc + x[k, i]
//
// A block is CHAIN terms in order, from acc = 0. The tree adds the sums of neighbouring blocks, then neighbouring sums of these, and so on; a
// sum without a neighbour goes up as it is. Tiles, packing and threads choose which chains run side by side, never the order inside one.
//
// The product is laid out as in BLIS: panels of A (R rows) and of B (VECTORS vectors) are packed, and a tile of R rows by some vectors of
// sums stays in registers. Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008).
#pragma once
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "abi.h"
#include "fused.h"
#include "parallel.h"
#include "products.h"

namespace funcrec::invariant {

constexpr int64_t CHAIN = 256;              // terms of one chain
constexpr int64_t DEPTH = 4 * CHAIN;        // terms that are packed at a time: a whole subtree
constexpr int TALL = VECTOR_BYTES == 64 ? 14 : VECTOR_BYTES == 32 ? 6 : 4;  // rows of a tile: all its sums stay in registers
constexpr int WIDE = 2;                     // vectors of a tile
constexpr int64_t SQUARE = 16;              // a side of the squares that are turned
constexpr int64_t PANELS = 4, STRIPS = 8;  // tiles of rows and of columns that are packed at a time
constexpr int64_t IN_PLACE = 5 * TALL;      // up to so many rows, B is read where it lies

// -- the tile: R rows by V vectors ------------------------------------------------------------------------------------

// Numbers of a term in a packed panel of `rows` rows: with AVX-512 whole squares, which are written and read without a remainder.
template <class A> constexpr int64_t pitch(int64_t rows) { return VECTOR_BYTES == 64 && sizeof(A) == 4 ? SQUARE : rows; }

// C [R, V vectors] of one chain, plus `joins` sums that came before it, the last one first: they lie at `kept`, downwards. `a` is packed; `b` has rows
// `b_row` apart. All sums stay in registers.
template <class A, int R, int V> void chain(int64_t depth, const A* a, const A* b, int64_t b_row, A* c, int64_t c_row, const A* kept, int joins) {
  constexpr int W = LANES<A>;
  Vec<A, W> s[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) s[r][v] = Vec<A, W>{};
  for (int64_t k = 0; k < depth; k++, a += pitch<A>(R), b += b_row) {
    Vec<A, W> y[V];
    for (int v = 0; v < V; v++) y[v] = load<W>(b + v * W);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) s[r][v] = fused<A, W>(a[r], y[v], s[r][v]);
  }
  for (; joins > 0; joins--, kept -= R * V * W)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) s[r][v] = load<W>(kept + (r * V + v) * W) + s[r][v];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store<W>(c + r * c_row + v * W, s[r][v]);
}

// C of R rows and `columns` columns, at most V vectors, for at most DEPTH terms: four chains, whose sums are joined as a tree.
template <class A, int R, int V> void tile(int64_t depth, const A* a, const A* b, int64_t b_row, A* c, int64_t c_row, int64_t columns) {
  constexpr int W = LANES<A>, SIZE = R * V * W;
  const bool whole = columns == V * W;
  if (depth <= CHAIN && whole) return chain<A, R, V>(depth, a, b, b_row, c, c_row, nullptr, 0);
  alignas(64) A kept[3][SIZE];  // a binary counter of sums: at most a pair and two single chains wait
  int top = 0;
  for (int64_t k = 0; k < depth; k += CHAIN) {
    const bool last = k + CHAIN >= depth;
    const int joins = last ? top : __builtin_ctzll(~(k / CHAIN)), to = top - joins;
    A* const at = last && whole ? c : kept[to];
    chain<A, R, V>(std::min(CHAIN, depth - k), a + k * pitch<A>(R), b + k * b_row, b_row, at, last && whole ? c_row : V * W, kept[0] + (top - 1) * SIZE, joins);
    top = to + 1;
  }
  if (!whole)
    for (int r = 0; r < R; r++) std::memcpy(c + r * c_row, kept[0] + r * V * W, columns * sizeof(A));
}

// Few rows have few chains: a wider tile keeps the units busy.
constexpr int width_of(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : WIDE; }

template <class A> using Tile = void (*)(int64_t, const A*, const A*, int64_t, A*, int64_t, int64_t);
template <class A, int V, int... R> constexpr std::array<Tile<A>, TALL> tiles(std::integer_sequence<int, R...>) { return {tile<A, R + 1, V>...}; }
template <class A, int... R> constexpr std::array<Tile<A>, TALL> wide_tiles(std::integer_sequence<int, R...>) { return {tile<A, R + 1, width_of(R + 1)>...}; }

// -- packing ----------------------------------------------------------------------------------------------------------

// A matrix whose rows, or columns if `turned`, are contiguous, `stride` numbers apart.
template <class A> struct Operand {
  const A* at;
  int64_t stride;
  bool turned;
  const A* cell(int64_t row, int64_t column) const { return turned ? at + column * stride + row : at + row * stride + column; }
  Operand from(int64_t row, int64_t column) const { return {cell(row, column), stride, turned}; }
  Operand transposed() const { return {at, stride, !turned}; }
};

// n numbers, of which the usual counts are copied by a few instructions.
template <class A> FUNCREC_INLINE void copy(A* to, const A* from, int64_t n) {
  constexpr int W = LANES<A>;
  if (n == WIDE * W) std::memcpy(to, from, WIDE * W * sizeof(A));
  else if (n == TALL) std::memcpy(to, from, TALL * sizeof(A));
  else if (n == TALL - 1) std::memcpy(to, from, (TALL - 1) * sizeof(A));
  else std::memcpy(to, from, n * sizeof(A));
}

// to[k * width + i] = x[k, i] for i < count: rows of x, one after the other.
template <class A> void pack_rows(int64_t depth, int64_t width, int64_t count, const A* x, int64_t stride, A* to) {
  for (int64_t k = 0; k < depth; k++) copy(to + k * width, x + k * stride, count);
}

// to[k * width + i] = x[i, k] for i < count. Squares are turned in registers; what lies outside of x is neither read nor left in what another call packs.
template <class A> void pack_columns(int64_t depth, int64_t width, int64_t count, const A* x, int64_t stride, A* to) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4)
    if (width % SQUARE == 0) {
      for (int64_t k = 0; k < depth; k += SQUARE)
        for (int64_t i = 0; i < count; i += SQUARE) {
          const int64_t rows = std::min(SQUARE, count - i), terms = std::min(SQUARE, depth - k);
          if (rows == SQUARE && terms == SQUARE) {
            transpose_16(to + k * width + i, width, x + i * stride + k, stride);
            continue;
          }
          const __mmask16 some = __mmask16((1u << terms) - 1);
          alignas(64) A square[SQUARE * SQUARE], turned[SQUARE * SQUARE];
          for (int64_t j = 0; j < rows; j++) _mm512_store_ps(square + j * SQUARE, _mm512_maskz_loadu_ps(some, x + (i + j) * stride + k));
          if (terms == SQUARE) {
            transpose_16(to + k * width + i, width, square, SQUARE);
            continue;
          }
          transpose_16(turned, SQUARE, square, SQUARE);
          for (int64_t j = 0; j < terms; j++) std::memcpy(to + (k + j) * width + i, turned + j * SQUARE, SQUARE * sizeof(A));
        }
      return;
    }
#endif
  for (int64_t k = 0; k < depth; k++)
    for (int64_t i = 0; i < count; i++) to[k * width + i] = x[i * stride + k];
}

template <class A> void pack(int64_t depth, int64_t width, int64_t count, Operand<A> x, A* to) {  // x is [depth, count]
  if (x.turned) pack_columns(depth, width, count, x.at, x.stride, to);
  else pack_rows(depth, width, count, x.at, x.stride, to);
}

// -- the product ------------------------------------------------------------------------------------------------------

// C [rows, columns] for at most DEPTH terms.
template <class A> void product_of_subtree(int64_t rows, int64_t columns, int64_t depth, Operand<A> a, Operand<A> b, A* c, int64_t c_row) {
  using Upto = std::make_integer_sequence<int, TALL>;
  static constexpr auto NARROW = tiles<A, 1>(Upto{}), FULL = tiles<A, WIDE>(Upto{}), WIDER = wide_tiles<A>(Upto{});
  constexpr int64_t L = LANES<A>, STRIP = WIDE * L, STEP = STRIP * STRIPS, TILES = TALL * PANELS;
  static thread_local Scratch<A> memory;
  const int64_t room = pitch<A>(TALL) * depth;  // of a panel of A
  A* const packed_b = memory.get(DEPTH * (STEP + pitch<A>(TALL) * PANELS));
  A* const packed_a = packed_b + DEPTH * STEP;
  const bool in_place = rows <= IN_PLACE && !b.turned;
  const int64_t step = rows <= TALL && in_place ? width_of(int(rows)) * L : STRIP;
  for (int64_t left = 0; left < columns; left += STEP)
    for (int64_t top = 0; top < rows; top += TILES) {
      const int64_t width = std::min(STEP, columns - left), height = std::min(TILES, rows - top);
      const int64_t count = (height + TALL - 1) / TALL;  // tiles of equal height, or one row less
      for (int64_t i = 0; i < count; i++) {
        const int64_t r = height * i / count, end = height * (i + 1) / count;
        pack(depth, pitch<A>(end - r), end - r, a.from(top + r, 0).transposed(), packed_a + i * room);
      }
      for (int64_t j = 0; j < width;) {
        const int64_t wide = step > STRIP && width - j < step ? STRIP : step, n = std::min(wide, width - j);
        const A* at = b.cell(0, left + j);
        int64_t stride = b.stride;
        if (!in_place || n < wide) {
          A* to = rows > TILES ? packed_b + j * depth : packed_b;  // without a second use, one strip's place stays in the cache
          if (top == 0) pack(depth, STRIP, n, b.from(0, left + j), to);
          at = to, stride = STRIP;
        }
        const auto& set = wide > STRIP ? WIDER : n <= L ? NARROW : FULL;
        for (int64_t i = 0; i < count; i++) {
          const int64_t r = height * i / count, end = height * (i + 1) / count;
          set[end - r - 1](depth, packed_a + i * room, at, stride, c + (top + r) * c_row + left + j, c_row, n);
        }
        j += n;
      }
    }
}

// The blocks of the left half of a tree of n blocks, which is whole.
constexpr int64_t left_half(int64_t n) {
  int64_t half = 1;
  while (2 * half < n) half *= 2;
  return half;
}

template <class A> void product_of_tree(int64_t rows, int64_t columns, int64_t depth, Operand<A> a, Operand<A> b, A* c, int64_t c_row) {
  if (depth <= DEPTH) return product_of_subtree(rows, columns, depth, a, b, c, c_row);
  const int64_t half = CHAIN * left_half((depth + CHAIN - 1) / CHAIN);
  product_of_tree(rows, columns, half, a, b, c, c_row);
  std::vector<A> other(rows * columns);
  product_of_tree(rows, columns, depth - half, a.from(0, half), b.from(half, 0), other.data(), columns);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < columns; j++) c[r * c_row + j] += other[r * columns + j];
}

// C [rows, columns], its rows `c_row` apart. Less columns than lanes are computed as rows of the transposed product.
template <class A> void product_of(int64_t rows, int64_t columns, int64_t depth, Operand<A> a, Operand<A> b, A* c, int64_t c_row) {
  if (rows <= columns || columns >= LANES<A>) return product_of_tree(rows, columns, depth, a, b, c, c_row);
  if (columns == 1 && c_row == 1) return product_of_tree(columns, rows, depth, b.transposed(), a.transposed(), c, rows);
  std::vector<A> turned(rows * columns);
  product_of_tree(columns, rows, depth, b.transposed(), a.transposed(), turned.data(), rows);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < columns; j++) c[r * c_row + j] = turned[j * rows + r];
}

constexpr int64_t WORTH = 1 << 18;  // multiply-adds that are worth a thread

// C [stack, rows, columns] = A [stack, rows, depth] B [stack, depth, columns].
template <class A> void products(int64_t threads, int64_t stack, int64_t rows, int64_t columns, int64_t depth, Operand<A> a, int64_t a_step, Operand<A> b,
                                 int64_t b_step, A* c) {
  if (depth == 0) return std::fill(c, c + stack * rows * columns, A(0));
  const int64_t work = rows * columns * depth;
  const int64_t most = std::max<int64_t>(1, std::min(threads, stack * work / WORTH));
  const bool by_rows = rows >= columns;
  const int64_t side = by_rows ? rows : columns, unit = by_rows ? TALL : WIDE * LANES<A>;
  const int64_t cuts = std::min((most + stack - 1) / stack, (side + unit - 1) / unit);  // parts of each product
  const int64_t together = std::max<int64_t>(1, stack / (4 * most));                    // small products in one task
  const int64_t groups = (stack + together - 1) / together;
  parallel_for(most, groups * cuts, [&](int64_t task) {
    const int64_t cut = task % cuts, part = round_up((side + cuts - 1) / cuts, unit);
    const int64_t begin = std::min(side, cut * part), count = std::min(side, begin + part) - begin;
    if (count == 0) return;
    const int64_t first = task / cuts * together, last = std::min(stack, first + together);
    for (int64_t i = first; i < last; i++) {
      const Operand<A> x{a.at + i * a_step, a.stride, a.turned}, y{b.at + i * b_step, b.stride, b.turned};
      A* z = c + i * rows * columns;
      if (by_rows) product_of(count, columns, depth, x.from(begin, 0), y, z + begin * columns, columns);
      else product_of(rows, count, depth, x, y.from(0, begin), z + begin, columns);
    }
  });
}

// threads, dtype, stack, rows, columns, depth; of A and of B: pointer, step between matrices, stride, turned; C.
inline void run_product(Reader r) {
  const int64_t threads = r.number(), dtype = r.number(), stack = r.number(), rows = r.number(), columns = r.number(), depth = r.number();
  const auto run = [&](auto tag) {
    using A = typename decltype(tag)::type;
    const A* a = r.pointer<const A>();
    const int64_t a_step = r.number(), a_stride = r.number();
    const Operand<A> left{a, a_stride, r.number() != 0};
    const A* b = r.pointer<const A>();
    const int64_t b_step = r.number(), b_stride = r.number();
    const Operand<A> right{b, b_stride, r.number() != 0};
    products<A>(threads, stack, rows, columns, depth, left, a_step, right, b_step, r.pointer<A>());
  };
  dtype == F64 ? run(Type<double>{}) : run(Type<float>{});
}

}  // namespace funcrec::invariant

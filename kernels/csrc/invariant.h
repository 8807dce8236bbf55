// Products and sums whose bits depend on the numbers alone: not on the batch, the threads, the vectors' width or the instruction set.
//
//   C[m, n] = tree_j  chain_{k in block j}  fma(A[m, k], B[k, n], acc)         out[i] = tree_j  chain_{k in block j}  acc + x[k, i]
//
// N terms are the least power of two J of blocks of at most CHAIN terms; block j has the terms from ⌊j N / J⌋ on, in order, from acc = 0. The tree adds
// the sums of neighbouring blocks, then neighbouring sums of these, and so on: 2 n terms are the sum of two halves, if n > CHAIN / 2. Tiles, packing and
// threads choose which chains run side by side, never the order inside one.
//
// The product is laid out as in BLIS: panels of A (R rows) and of B (VECTORS vectors) are packed, and a tile of R rows by some vectors of
// sums stays in registers. Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008).
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"
#include "chains.h"
#include "parallel.h"

namespace funcrec::invariant {

constexpr int64_t PANELS = 4, STRIPS = 8;  // tiles of rows and of columns that are packed at a time
constexpr int64_t IN_PLACE = 5 * TALL;     // up to so many rows, B is read where it lies
constexpr int64_t LONG = 32;               // terms from which rows of A are read where they lie,
constexpr int64_t SETS = 4096;             // unless their distance is a multiple of so many bytes: they would share one set of the first cache
constexpr int64_t SPARE = 32;              // numbers that are written past the last one

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

template <class A> void pack(int64_t depth, int64_t width, int64_t count, Operand<A> x, A* to) {  // x is [depth, count]
  if (x.turned) turn_rows(depth, width, count, x.at, x.stride, to);
  else pack_rows(depth, width, count, x.at, x.stride, to);
}

// -- the product ------------------------------------------------------------------------------------------------------

// C [rows, columns] of few rows and a matrix B whose columns are contiguous, for L terms or more; L columns or more.
template <class A> void product_of_squares(int64_t rows, int64_t columns, const Subtree& terms, const A* a, const A* b, int64_t b_row, A* c, int64_t c_row) {
  using Upto = std::make_integer_sequence<int, FEW>;
  static constexpr auto ONE = turned_tiles<A, 1>(Upto{}), SOME = turned_tiles<A, 0>(Upto{});
  constexpr int64_t L = LANES<A>;
  const int64_t wide = turned_width(int(rows)) * L;
  int64_t j = 0;
  for (; j + wide <= columns; j += wide) SOME[rows - 1](terms, a, pitch<A>(rows), b + j * b_row, b_row, c + j, c_row, wide, false);
  for (; j < columns; j += L) {
    const int64_t at = std::min(j, columns - L);  // the last columns are computed twice, to the same bits
    ONE[rows - 1](terms, a, pitch<A>(rows), b + at * b_row, b_row, c + at, c_row, L, false);
  }
}

// C [rows, columns] of a subtree; with `add`, its terms are added to C. Tiles read A where it lies, unless its rows share too few sets of the first cache.
template <class A> void product_of_tiles(int64_t rows, int64_t columns, const Subtree& terms, Operand<A> a, Operand<A> b, A* c, int64_t c_row, bool add) {
  using Upto = std::make_integer_sequence<int, TALL>;
  using Set = Tiles<A>;
  static constexpr Set BESIDE[] = {tiles<A, 1, Lies::BESIDE>(Upto{}), tiles<A, WIDE, Lies::BESIDE>(Upto{}), wide_tiles<A>(Upto{})};
  static constexpr Set ALONG[] = {tiles<A, 1, Lies::ALONG>(Upto{}), tiles<A, WIDE, Lies::ALONG>(Upto{})};
  constexpr int64_t L = LANES<A>, STRIP = WIDE * L, TILES = TALL * PANELS;
  static thread_local Scratch<A> memory;
  const int64_t depth = terms.depth();
  const bool in_place = rows <= IN_PLACE && !b.turned;
  const int64_t step = rows <= TALL && in_place ? width_of(int(rows)) * L : STRIP;
  const bool along = !a.turned && step == STRIP && depth >= LONG && a.stride * sizeof(A) % SETS != 0, packed = !a.turned && !along;
  const int64_t room = packed ? pitch<A>(TALL) * depth : 0;  // of a panel of A
  const int64_t most = DEPTH / depth * STRIP * STRIPS;       // columns of B that are packed at a time
  A* const packed_b = memory.get(DEPTH * (STRIP * STRIPS + pitch<A>(TALL) * PANELS) + SPARE);
  A* const packed_a = packed_b + DEPTH * STRIP * STRIPS;
  for (int64_t left = 0; left < columns; left += most)
    for (int64_t top = 0; top < rows; top += TILES) {
      const int64_t width = std::min(most, columns - left), height = std::min(TILES, rows - top);
      const int64_t count = (height + TALL - 1) / TALL;  // tiles of equal height, or one row less
      const auto begin = [=](int64_t i) { return height * i / count; };
      const auto high = [=](int64_t i) { return begin(i + 1) - begin(i); };
      for (int64_t i = 0; packed && i < count; i++)
        pack(depth, pitch<A>(high(i)), high(i), a.from(top + begin(i), 0).transposed(), packed_a + i * room);
      for (int64_t j = 0; j < width;) {
        const int64_t wide = step > STRIP && width - j < step ? STRIP : step, n = std::min(wide, width - j);
        const A* at = b.cell(0, left + j);
        int64_t stride = b.stride;
        if (!in_place || n < wide) {
          A* to = rows > TILES ? packed_b + j * depth : packed_b;  // without a second use, one strip's place stays in the cache
          if (top == 0) pack(depth, STRIP, n, b.from(0, left + j), to);
          at = to, stride = STRIP;
        }
        const Set& set = (along ? ALONG : BESIDE)[wide > STRIP ? 2 : n <= L ? 0 : 1];
        for (int64_t i = 0; i < count; i++)
          set[high(i) - 1](terms, packed ? packed_a + i * room : a.cell(top + begin(i), 0), packed ? pitch<A>(high(i)) : a.stride, at, stride,
                           c + (top + begin(i)) * c_row + left + j, c_row, n, add);
        j += n;
      }
    }
}

// The same: few rows, or few terms, have ways of their own.
template <class A> void product_of_subtree(int64_t rows, int64_t columns, const Subtree& terms, Operand<A> a, Operand<A> b, A* c, int64_t c_row, bool add) {
  constexpr int64_t L = LANES<A>;
  static thread_local Scratch<A> memory;
  const int64_t depth = terms.depth();
  if constexpr (sizeof(A) == 4)
    if (!add && b.turned && rows <= FEW && columns >= L && depth >= L) {
      A* const packed = memory.get(DEPTH * pitch<A>(FEW) + SPARE);
      pack(depth, pitch<A>(rows), rows, a.transposed(), packed);
      return product_of_squares(rows, columns, terms, packed, b.at, b.stride, c, c_row);
    }
  if (!add && !b.turned && (rows <= SLIM || depth <= THIN) && columns >= L) {
    static constexpr auto SWEEPS = sweeps<A>(std::make_integer_sequence<int, 4>{});
    const int64_t whole = columns / L * L;
    A* const kept = memory.get(3 * SWEPT + DEPTH * pitch<A>(4) + SPARE);
    for (int64_t r = 0; r < rows; r += 4) {
      const int64_t n = std::min<int64_t>(4, rows - r);
      pack(depth, pitch<A>(n), n, a.from(r, 0).transposed(), kept + 3 * SWEPT);
      SWEEPS[n - 1](terms, whole, kept + 3 * SWEPT, b.at, b.stride, c + r * c_row, c_row, kept);
    }
    b = b.from(0, whole), c += whole, columns -= whole;
    if (columns == 0) return;
  }
  product_of_tiles(rows, columns, terms, a, b, c, c_row, add);
}

// C [rows, columns] of the blocks [first, first + count); `a` and `b` begin at the first one.
template <class A>
void product_of_tree(int64_t rows, int64_t columns, const Blocks& blocks, int64_t first, int64_t count, Operand<A> a, Operand<A> b, A* c, int64_t c_row) {
  if (count <= TOGETHER) return product_of_subtree(rows, columns, Subtree(blocks, first, count), a, b, c, c_row, false);
  const int64_t half = count / 2, middle = first + half, terms = blocks.at(middle) - blocks.at(first);
  const Operand<A> x = a.from(0, terms), y = b.from(terms, 0);
  product_of_tree(rows, columns, blocks, first, half, a, b, c, c_row);
  if (half <= TOGETHER && rows > FEW) return product_of_subtree(rows, columns, Subtree(blocks, middle, half), x, y, c, c_row, true);
  std::vector<A> other(rows * columns);
  product_of_tree(rows, columns, blocks, middle, half, x, y, other.data(), columns);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < columns; j++) c[r * c_row + j] += other[r * columns + j];
}

// C [rows, columns], its rows `c_row` apart. Less columns than lanes are computed as rows of the transposed product.
template <class A> void product_of(int64_t rows, int64_t columns, int64_t depth, Operand<A> a, Operand<A> b, A* c, int64_t c_row) {
  const Blocks blocks(depth);
  const int64_t all = blocks.count();
  if (rows <= columns || columns >= LANES<A>) return product_of_tree(rows, columns, blocks, 0, all, a, b, c, c_row);
  if (columns == 1 && c_row == 1) return product_of_tree(columns, rows, blocks, 0, all, b.transposed(), a.transposed(), c, rows);
  std::vector<A> turned(rows * columns);
  product_of_tree(columns, rows, blocks, 0, all, b.transposed(), a.transposed(), turned.data(), rows);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < columns; j++) c[r * c_row + j] = turned[j * rows + r];
}

constexpr int64_t WORTH = 1 << 18;  // multiply-adds that are worth a thread;
constexpr int64_t READ = 3;         // as many for each number of B as it takes to read it

// C [stack, rows, columns] = A [stack, rows, depth] B [stack, depth, columns].
template <class A> void products(int64_t threads, int64_t stack, int64_t rows, int64_t columns, int64_t depth, Operand<A> a, int64_t a_step, Operand<A> b,
                                 int64_t b_step, A* c) {
  if (depth == 0) return std::fill(c, c + stack * rows * columns, A(0));
  const int64_t work = (rows + READ) * columns * depth;
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

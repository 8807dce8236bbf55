// The inner products of all pairs of the F vectors of an example, and the transpose of this map at x.
//
//   out[b, pair(i, j)] = ⟨x_i, x_j⟩, i > j        d_x[b, i] = Σ_{j ≠ i} d[b, pair(i, j)] x_j        pair(i, j) = i (i - 1) / 2 + j
//
// Only the blocks of x xᵀ that meet the lower triangle are computed. The vectors may come in several parts, which are never joined in memory.
// One thread computes an example, in the order of invariant.h: chains of at most CHAIN terms, then a tree. The bits depend on the numbers alone.
#pragma once
#include "invariant_sums.h"
#include "parallel.h"
#include "products.h"

namespace funcrec {

constexpr int64_t MIN_PAIR_PRODUCTS = 1 << 18;  // products of numbers for which a second thread pays
constexpr int64_t LINE = 16;                    // sides of transposed blocks

// The vectors [begin, begin + count) of every example; an example's rows are contiguous, and examples `stride` elements apart.
struct Vectors {
  char* data;
  int64_t begin, count, stride;
};

// What Python passes: [threads, dtype, B, D, number of parts, (address, vectors, stride) of each part of x, ...].
struct Stack {
  int64_t dtype, examples, dim, vectors = 0;
  std::vector<Vectors> parts;

  static Stack read(Reader& in) {
    Stack s{in.number(), in.number(), in.number()};
    for (int64_t n = in.number(); n > 0; n--) s.add(in);
    return s;
  }
  void add(Reader& in) {
    parts.push_back({in.pointer<char>(), vectors, in.number(), in.number()});
    vectors += parts.back().count;
  }
  int64_t pairs() const { return vectors * (vectors - 1) / 2; }
  int64_t depth() const { return round_up(std::max<int64_t>(dim, 1), LINE); }      // columns of packed vectors
  int64_t height() const { return round_up(std::max<int64_t>(vectors, 1), LINE); }  // rows of packed vectors
};

inline int64_t chains_of(int64_t terms) { return invariant::Blocks(terms).count(); }

// f(first, terms, its place) for each chain of a sum.
template <class F> void for_chains(int64_t terms, F&& f) {
  const invariant::Blocks blocks(terms);
  for (int64_t j = 0; j < blocks.count(); j++) f(blocks.at(j), blocks.size(j), j);
}

// The packed vectors of one example [height, depth], with zeros around them.
template <class E, class A> void pack_example(A* to, const Stack& s, int64_t b) {
  for (const Vectors& p : s.parts)
    pack_rows(to + p.begin * s.depth(), s.depth(), reinterpret_cast<const E*>(p.data) + b * p.stride, s.dim, p.count, p.count, s.dim, A(1));
  std::fill(to + s.vectors * s.depth(), to + s.height() * s.depth(), A(0));
}

// Rows [begin, end) of C, at most ROWS at a time and in blocks of nearly one size; f(first, rows<R>) computes rows [first, first + R).
template <class F> void for_row_blocks(int64_t begin, int64_t end, F&& f) {
  int64_t blocks = (end - begin + ROWS - 1) / ROWS;
  for (int64_t first = begin, n; first < end; first += n, blocks--) {
    n = (end - first + blocks - 1) / blocks;
    switch (n) {
      case 1: f(first, std::integral_constant<int, 1>{}); break;
      case 2: f(first, std::integral_constant<int, 2>{}); break;
      case 3: f(first, std::integral_constant<int, 3>{}); break;
      case 4: f(first, std::integral_constant<int, 4>{}); break;
      case 5: f(first, std::integral_constant<int, 5>{}); break;
      default: f(first, std::integral_constant<int, 6>{});
    }
  }
}

// Copies n numbers of a row, in whole vectors as long as they stay below `room`. So a row of fewer than n + W numbers may be read or written
// behind its end, where the next row follows.
template <class To, class From> FUNCREC_INLINE void copy_row(To* to, const From* from, int64_t n, int64_t room) {
  constexpr int W = LANES<Acc<From>>;
  int64_t j = 0;
  for (; j < n && j + W <= room; j += W) store<W>(to + j, load<W>(from + j));
  for (; j < n; j++) store<1>(to + j, load<1>(from + j));
}

template <class E> void products_of_example(const Stack& s, int64_t b, E* out, Acc<E>* memory) {
  using A = Acc<E>;
  const int64_t depth = s.depth(), height = s.height();
  A *const x = memory, *const across = x + height * depth, *const square = across + depth * height;
  pack_example<E>(x, s, b);
  transposed(across, height, x, depth, height);
  const int64_t size = height * height;
  for_chains(s.dim, [&](int64_t k, int64_t terms, int64_t chain) {
    for_row_blocks(1, s.vectors, [&](int64_t first, auto rows) {
      constexpr int R = decltype(rows)::value;
      A* const to = square + chain * size + first * height;
      product<A, R>(to, height, Left<A>{x + first * depth + k, depth, 1}, across + k * height, height, first + R - 1, terms, false);
    });
  });
  invariant::join_blocks(square, chains_of(s.dim), size);
  for (int64_t i = 1, at = 0; i < s.vectors; at += i++) copy_row(out + at, square + i * height, i, s.pairs() - at);
}

// S + Sᵀ for a lower triangle S, which d lists row by row: [vectors, height], with zeros around it.
template <class E> void symmetric(Acc<E>* to, Acc<E>* other, const Stack& s, const E* d) {
  using A = Acc<E>;
  constexpr int W = LANES<A>;
  const int64_t height = s.height();
  std::fill(to, to + height, A(0));
  for (int64_t i = 1, at = 0; i < s.vectors; at += i++) {
    copy_row(to + i * height, d + at, i, s.pairs() - at);
    std::fill(to + i * height + i, to + (i + 1) * height, A(0));
  }
  std::fill(to + s.vectors * height, to + height * height, A(0));
  transposed(other, height, to, height, height);
  for (int64_t k = 0; k < s.vectors * height; k += W) store<W>(to + k, Vec<A, W>(load<W>(to + k) + load<W>(other + k)));
}

template <class E> void transpose_of_example(const Stack& s, const Stack& out, int64_t b, const E* d, Acc<E>* memory) {
  using A = Acc<E>;
  const int64_t depth = s.depth(), height = s.height();
  A *const x = memory, *const both = x + height * depth, *const rows_of_part = both + height * height;
  pack_example<E>(x, s, b);
  symmetric(both, rows_of_part, s, d);
  for (const Vectors& p : out.parts) {
    E* const to = reinterpret_cast<E*>(p.data) + b * p.stride;
    const bool whole = std::is_same_v<E, A> && s.dim % LANES<A> == 0 && s.vectors <= invariant::CHAIN;  // then products go straight to the output
    A* const c = whole ? reinterpret_cast<A*>(to) : rows_of_part;
    const int64_t c_row = whole ? s.dim : depth, size = p.count * c_row;
    for_chains(s.vectors, [&](int64_t k, int64_t terms, int64_t chain) {
      for_row_blocks(p.begin, p.begin + p.count, [&](int64_t first, auto rows) {
        constexpr int R = decltype(rows)::value;
        A* const at = c + chain * size + (first - p.begin) * c_row;
        product<A, R>(at, c_row, Left<A>{both + first * height + k, height, 1}, x + k * depth, depth, s.dim, terms, false);
      });
    });
    invariant::join_blocks(c, chains_of(s.vectors), size);
    if (!whole)
      for (int64_t i = 0; i < p.count; i++) unpack_row(to + i * s.dim, c + i * c_row, s.dim, A(1));
  }
}

// f(b, memory) for every example, with `numbers` numbers of memory of one thread.
template <class A, class F> void for_examples(int64_t threads, const Stack& s, int64_t numbers, F&& f) {
  const int64_t work = std::max<int64_t>(1, s.vectors * s.vectors * s.dim), each = std::max<int64_t>(1, MIN_PAIR_PRODUCTS / work);
  parallel_for(threads, (s.examples + each - 1) / each, [&](int64_t k) {
    static thread_local Scratch<A> scratch;
    A* const memory = scratch.get(numbers);
    for (int64_t b = k * each, last = std::min(s.examples, b + each); b < last; b++) f(b, memory);
  });
}

// [..., out [B, F (F - 1) / 2]].
inline void dot_interaction(Reader in) {
  const int64_t threads = in.number();
  const Stack s = Stack::read(in);
  char* const out = in.pointer<char>();
  with_table_type(s.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    const int64_t numbers = s.height() * (2 * s.depth() + chains_of(s.dim) * s.height());
    for_examples<Acc<E>>(threads, s, numbers, [&](int64_t b, Acc<E>* memory) {
      products_of_example(s, b, reinterpret_cast<E*>(out) + b * s.pairs(), memory);
    });
  });
}

// [..., d, its stride, (address, vectors, stride) of each part of d_x].
inline void dot_interaction_transpose(Reader in) {
  const int64_t threads = in.number();
  const Stack s = Stack::read(in);
  const char* const d = in.pointer<char>();
  const int64_t stride = in.number();
  Stack out{s.dtype, s.examples, s.dim};
  for (size_t k = 0; k < s.parts.size(); k++) out.add(in);
  with_table_type(s.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    const int64_t numbers = s.height() * (s.depth() + s.height() + std::max(chains_of(s.vectors) * s.depth(), s.height()));
    for_examples<Acc<E>>(threads, s, numbers, [&](int64_t b, Acc<E>* memory) {
      transpose_of_example(s, out, b, reinterpret_cast<const E*>(d) + b * stride, memory);
    });
  });
}

}  // namespace funcrec

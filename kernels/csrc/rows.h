// Plain rows of several tables, read or written by one list of rows.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "abi.h"
#include "lookup.h"
#include "parallel.h"
#include "simd.h"

namespace funcrec {

constexpr int64_t NEAR_ROWS = 8;  // rows between the touch and the copy

// to[c] = from[c] for c < n, converted and rounded.
template <class To, class From> FUNCREC_INLINE void copy_row(To* to, const From* from, int64_t n) {
  constexpr int W = sizeof(From) == 8 || sizeof(To) == 8 ? LANES<double> : LANES<float>;
  using A = Acc<To>;
  int64_t c = 0;
  for (; c + W <= n; c += W) store<W>(to + c, convert<A, W>(load<W>(from + c)));
  for (; c < n; c++) store<1>(to + c, A(load<1>(from + c)));
}

// A table, and a matrix with a row for each listed row that is read from it or written to it.
struct Target {
  Table table;
  Matrix rows;
};

// f(target, begin, end) for pieces [begin, end) of n rows of every target.
template <class F> void for_chunks(int64_t threads, const std::vector<Target>& targets, int64_t n, const F& f) {
  constexpr int64_t ROWS = 256;
  int64_t columns = 0;
  for (const Target& t : targets) columns += t.table.dim;
  const int64_t chunks = (n + ROWS - 1) / ROWS;
  parallel_for(n * columns < MIN_WORK ? 1 : threads, chunks * targets.size(), [&](int64_t k) {
    const int64_t begin = k % chunks * ROWS;
    f(targets[k / chunks], begin, std::min(n, begin + ROWS));
  });
}

// f(i, row) for i in [begin, end) with a row inside the table, which is being prefetched; outside(i) for the others.
template <class F, class G>
FUNCREC_INLINE void for_rows(const Table& t, const Ints& ids, int64_t begin, int64_t end, const F& f, const G& outside) {
  const int64_t bytes = t.row_bytes();
  const auto fetch = [&](int64_t i) __attribute__((always_inline)) {
    if (i < end) prefetch<2>(row_address(t.data, ids[i], bytes), bytes);
  };
  for (int64_t i = begin; i < begin + FAR; i++) fetch(i);
  for (int64_t i = begin; i < end; i++) {
    fetch(i + FAR);
    const uint64_t ahead = i + NEAR_ROWS < end ? ids[i + NEAR_ROWS] : -1;
    if (ahead < uint64_t(t.rows)) touch(t.data + ahead * bytes);
    if (uint64_t(ids[i]) < uint64_t(t.rows)) f(i, t.data + ids[i] * bytes);
    else outside(i);
  }
}

// f(number of threads, targets, ids) with what Python passes: [threads, n and (table, matrix) each, rows]
template <class F> void with_targets(Reader& in, const F& f) {
  const int64_t threads = in.number();
  std::vector<Target> targets;
  for (int64_t n = in.number(); n > 0; n--) {
    const Target t{in.table(), in.matrix()};
    if (t.table.dim > 0) targets.push_back(t);
  }
  f(threads, targets, Ints(in.vector()));
}

inline void gather_block(Reader in) {
  with_targets(in, [](int64_t threads, const std::vector<Target>& targets, const Ints& ids) {
    for_chunks(threads, targets, ids.size, [&](const Target& t, int64_t begin, int64_t end) {
      with_table_type(t.table.dtype, [&](auto tag) {
        using E = typename decltype(tag)::type;
        Acc<E>* const out = t.rows.as<Acc<E>>();
        const int64_t dim = t.table.dim;
        for_rows(t.table, ids, begin, end,
                 [&](int64_t i, char* row) { copy_row(out + i * dim, reinterpret_cast<const E*>(row), dim); },
                 [&](int64_t i) { std::memset(out + i * dim, 0, dim * sizeof(*out)); });
      });
    });
  });
}

// After the rows comes count*, the number of rows to write.
inline void scatter_block(Reader in) {
  with_targets(in, [&](int64_t threads, const std::vector<Target>& targets, const Ints& ids) {
    const int64_t n = std::clamp<int64_t>(*in.pointer<int64_t>(), 0, ids.size);
    for_chunks(threads, targets, n, [&](const Target& t, int64_t begin, int64_t end) {
      with_table_type(t.table.dtype, [&](auto tag) {
        using E = typename decltype(tag)::type;
        const Matrix& from = t.rows;
        const int64_t dim = t.table.dim;
        for_rows(t.table, ids, begin, end, [&](int64_t i, char* row) {
          E* const to = reinterpret_cast<E*>(row);
          if (from.dtype == F64) copy_row(to, from.as<double>() + i * from.stride, dim);
          else copy_row(to, from.as<float>() + i * from.stride, dim);
        }, [](int64_t) {});
      });
    });
  });
}

}  // namespace funcrec

// Plain rows of one table: read, and written.
#pragma once
#include <algorithm>
#include <cstring>

#include "abi.h"
#include "lookup.h"
#include "parallel.h"
#include "simd.h"

namespace funcrec {

// to[c] = from[c] for c < n, converted and rounded.
template <class To, class From> FUNCREC_INLINE void copy_row(To* to, const From* from, int64_t n) {
  constexpr int W = sizeof(From) == 8 || sizeof(To) == 8 ? LANES<double> : LANES<float>;
  using A = Acc<To>;
  int64_t c = 0;
  for (; c + W <= n; c += W) store<W>(to + c, convert<A, W>(load<W>(from + c)));
  for (; c < n; c++) store<1>(to + c, A(load<1>(from + c)));
}

template <class F> void for_chunks(int64_t threads, int64_t n, int64_t dim, F&& f) {
  constexpr int64_t CHUNK = 256;
  parallel_for(n * dim < MIN_WORK ? 1 : threads, (n + CHUNK - 1) / CHUNK,
               [&](int64_t k) { f(k * CHUNK, std::min(n, (k + 1) * CHUNK)); });
}

inline void gather_rows(Reader in) {
  const int64_t threads = in.number();
  const Table table = in.table();
  const Vector rows = in.vector();
  char* out = in.pointer<char>();
  const Ints ids(rows);
  with_table_type(table.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    const E* from = table.as<E>();
    for_chunks(threads, rows.size, table.dim, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        if (i + FAR < rows.size)
          prefetch<2>(table.data + uint64_t(ids[i + FAR]) * table.dim * sizeof(E), table.dim * sizeof(E));
        Acc<E>* to = reinterpret_cast<Acc<E>*>(out) + i * table.dim;
        if (uint64_t(ids[i]) < uint64_t(table.rows)) copy_row(to, from + ids[i] * table.dim, table.dim);
        else std::memset(to, 0, table.dim * sizeof(*to));
      }
    });
  });
}

inline void scatter_rows(Reader in) {
  const int64_t threads = in.number();
  const Table table = in.table();
  const Vector rows = in.vector();
  const int64_t count = *in.pointer<int64_t>();
  const Matrix source = in.matrix();
  const Ints ids(rows);
  with_table_type(table.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    E* to = table.as<E>();
    for_chunks(threads, std::max<int64_t>(0, std::min(count, rows.size)), table.dim, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        if (uint64_t(ids[i]) >= uint64_t(table.rows)) continue;
        E* row = to + ids[i] * table.dim;
        if (source.dtype == F64) copy_row(row, source.as<double>() + i * source.stride, table.dim);
        else copy_row(row, source.as<float>() + i * source.stride, table.dim);
      }
    });
  });
}

}  // namespace funcrec

// The k rows of a table whose inner products with a query are greatest, for many queries; [B, N] scores never exist at once.
//
//   panel of J rows, transposed [D, J]  ─▶  scores of Q queries at a time, in registers  ─▶  those above a query's k-th so far
//
// A score is Σ_d q_d · x_d, d ascending, each product and sum rounded: its bits do not depend on the other rows and queries.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "abi.h"
#include "lookup.h"
#include "parallel.h"
#include "quantized.h"
#include "simd.h"

namespace funcrec {

template <class A> struct Scored {
  A score;
  int64_t row;
  bool operator<(const Scored& y) const { return score > y.score || (score == y.score && row < y.row); }  // ranks before y
};

// Rows of floats, or quantised rows: scale f16, bias f16, then codes of `bits`, low bits first.
struct Items {
  const char* data;
  int64_t dtype, rows, dim, row_bytes, bits;
};

template <class A, class E> void read_floats(A* to, const E* from, int64_t n) {
  constexpr int W = LANES<double>;
  int64_t c = 0;
  for (; c + W <= n; c += W) store<W>(to + c, convert<A, W>(load<W>(from + c)));
  for (; c < n; c++) to[c] = A(load<1>(from + c));
}

template <class A> void read_row(A* to, const Items& t, int64_t row) {
  const char* from = t.data + row * t.row_bytes;
  if (!t.bits) return with_table_type(t.dtype, [&](auto tag) {
    read_floats(to, reinterpret_cast<const typename decltype(tag)::type*>(from), t.dim);
  });
  if constexpr (sizeof(A) == 4) {
    if (t.bits == 8) return read_codes<8>(to, from, t.dim);
    return t.bits == 4 ? read_codes<4>(to, from, t.dim) : read_codes<2>(to, from, t.dim);
  }
  const float scale = load<1>(reinterpret_cast<const Half*>(from)), bias = load<1>(reinterpret_cast<const Half*>(from + 2));
  const auto codes = reinterpret_cast<const uint8_t*>(from + 4);
  const int each = int(8 / t.bits), mask = (1 << t.bits) - 1;
  for (int64_t c = 0; c < t.dim; c++) to[c] = A(float((codes[c / each] >> (c % each * t.bits)) & mask) * scale + bias);
}

#if defined(__AVX512F__)
// to[16 × 16] = fromᵀ; rows are `to_stride` and `stride` apart. Pairs of lanes, then of pairs, then of quarters are exchanged.
FUNCREC_INLINE void transpose_16(float* to, int64_t to_stride, const float* from, int64_t stride) {
  __m512 x[16], y[16];
  for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_ps(from + i * stride);
  for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int h = 0; h < 2; h++) {
      const __m512d a = _mm512_castps_pd(y[i + h]), b = _mm512_castps_pd(y[i + 2 + h]);
      x[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), x[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int i = 0; i < 16; i += 8)
    for (int c = i; c < i + 4; c++)
      y[c] = _mm512_shuffle_f32x4(x[c], x[4 + c], 0x88), y[4 + c] = _mm512_shuffle_f32x4(x[c], x[4 + c], 0xdd);
  for (int c = 0; c < 8; c++) {
    _mm512_storeu_ps(to + c * to_stride, _mm512_shuffle_f32x4(y[c], y[8 + c], 0x88));
    _mm512_storeu_ps(to + (c + 8) * to_stride, _mm512_shuffle_f32x4(y[c], y[8 + c], 0xdd));
  }
}
#endif

// to[d · J + j] = from[j · dim + d]. The next panel is prefetched meanwhile: with one query, memory is the limit.
template <class A, int J> void transpose(A* to, const A* from, int64_t dim) {
  int64_t d = 0;
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4 && J % 16 == 0)
    for (; d + 16 <= dim; d += 16)
      for (int j = 0; j < J; j += 16) {
        for (int i = 0; i < 16; i++) prefetch<1>(from + (J + j + i) * dim + d, 1);
        transpose_16(to + d * J + j, J, from + j * dim + d, dim);
      }
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(A) == 4 && J % 4 == 0)
    for (; d + 4 <= dim; d += 4)
      for (int j = 0; j < J; j += 4) {
        const A* at = from + j * dim + d;
        if (d % 16 == 0)
          for (int i = 0; i < 4; i++) prefetch<1>(at + (J + i) * dim, 1);
        __m128 a = _mm_loadu_ps(at), b = _mm_loadu_ps(at + dim), c = _mm_loadu_ps(at + 2 * dim), e = _mm_loadu_ps(at + 3 * dim);
        _MM_TRANSPOSE4_PS(a, b, c, e);
        A* out = to + d * J + j;
        _mm_storeu_ps(out, a), _mm_storeu_ps(out + J, b), _mm_storeu_ps(out + 2 * J, c), _mm_storeu_ps(out + 3 * J, e);
      }
#endif
  for (; d < dim; d++)
    for (int j = 0; j < J; j++) to[d * J + j] = from[j * dim + d];
}

template <class V> FUNCREC_INLINE bool any(const V& mask) {
  int64_t parts[sizeof(V) / 8], all = 0;
  std::memcpy(parts, &mask, sizeof mask);
  for (const int64_t x : parts) all |= x;
  return all;
}

// The best k so far of one query, as a heap with the worst first.
template <class A> struct Best {
  Scored<A>* at;
  int64_t size, k;
  A least;  // the score that a later row must exceed
  const int64_t *excluded, *excluded_end;

  void offer(A score, int64_t row) {
    if (!(score > least) || std::binary_search(excluded, excluded_end, row)) return;
    if (size == k) std::pop_heap(at, at + size--);
    at[size++] = {score, row};
    std::push_heap(at, at + size);
    if (size == k) least = at[0].score;
  }
};

template <class A> constexpr int PANEL_VECTORS = VECTOR_BYTES == 64 ? 4 : 2;
template <class A> constexpr int PANEL = PANEL_VECTORS<A> * LANES<A>;
constexpr int TOGETHER = VECTOR_BYTES == 64 ? 6 : 4;  // queries whose sums fit in the registers
constexpr int64_t GROUP = 256;                        // queries that share one transposed panel

template <class A, int Q>
FUNCREC_INLINE void score(const A* panel, const A* queries, int64_t dim, int64_t first, int64_t rows, Best<A>* best) {
  constexpr int W = LANES<A>, V = PANEL_VECTORS<A>;
  Vec<A, W> sums[Q][V] = {};
  for (int64_t d = 0; d < dim; d++) {
    Vec<A, W> x[V];
    for (int v = 0; v < V; v++) x[v] = load<W>(panel + (d * V + v) * W);
    for (int q = 0; q < Q; q++)
      for (int v = 0; v < V; v++) sums[q][v] += x[v] * queries[q * dim + d];
  }
  for (int q = 0; q < Q; q++) {
    auto above = sums[q][0] > best[q].least;
    for (int v = 1; v < V; v++) above |= sums[q][v] > best[q].least;
    if (!any(above)) continue;
    A out[V * W];
    for (int v = 0; v < V; v++) store<W>(out + v * W, sums[q][v]);
    for (int64_t j = 0; j < rows; j++) best[q].offer(out[j], first + j);
  }
}

#if defined(__AVX512F__)
// -- few queries: most rows are told from the best without a transpose ------------------------------------------------
//
//   |Σ_d q_d x_d in any order - Σ_d q_d x_d in the order of d|  <=  (2 D + 96) 2⁻²⁴ · ‖q‖ ‖x‖ + 4 (D + 4) 2⁻¹²⁶
//
// So a row whose sum in the order of lanes is further below the k-th best needs no score. The others wait for 15 more.
constexpr int64_t FEW = 4;           // queries for which that is faster than scores of all rows
constexpr int64_t FEW_DIM = 1 << 12;  // the most columns for which the bound holds with its slack of 5 %
constexpr int WAITING = 16;

struct Waiting {
  std::vector<float> rows;  // [16, D]
  int64_t numbers[WAITING];
  int count = 0;
};

// The sums over the lanes of each of 16 vectors.
FUNCREC_INLINE __m512 lane_sums(const __m512* x) {
  __m512 y[8], z[4], u[2];
  for (int i = 0; i < 8; i++) y[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    z[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  for (int i = 0; i < 2; i++) u[i] = _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0x88) + _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0xdd);
  return _mm512_shuffle_f32x4(u[0], u[1], 0x88) + _mm512_shuffle_f32x4(u[0], u[1], 0xdd);
}

// sums[i] += q · x_i of 16 rows, 16 columns at a time. SQUARES: squares += x_i · x_i, too, and the next rows are fetched.
template <bool SQUARES> FUNCREC_INLINE void lane_products(__m512* sums, __m512* squares, const float* rows, const float* query, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) {
    const __mmask16 some = dim - d < 16 ? __mmask16((1 << (dim - d)) - 1) : __mmask16(-1);
    const __m512 q = _mm512_maskz_loadu_ps(some, query + d);
    for (int i = 0; i < 16; i++) {
      const __m512 x = _mm512_maskz_loadu_ps(some, rows + i * dim + d);
      sums[i] = _mm512_fmadd_ps(x, q, sums[i]);
      if (SQUARES) _mm_prefetch(rows + (16 + i) * dim + d, _MM_HINT_T0);
      if (SQUARES) squares[i % 4] = _mm512_fmadd_ps(x, x, squares[i % 4]);
    }
  }
}

// Offers the scores of the rows that wait, in their order.
inline void offer_waiting(Waiting& own, float* panel, const float* query, int64_t dim, Best<float>& best) {
  transpose<float, WAITING>(panel, own.rows.data(), dim);
  Vec<float, WAITING> sums = {};
  for (int64_t d = 0; d < dim; d++) sums += load<WAITING>(panel + d * WAITING) * query[d];
  float out[WAITING];
  store<WAITING>(out, sums);
  for (int j = 0; j < own.count; j++) best.offer(out[j], own.numbers[j]);
  own.count = 0;
}

inline void scan_few(const Items& items, int64_t begin, int64_t end, const float* queries, int64_t count, Best<float>* best) {
  const int64_t dim = items.dim;
  const bool as_it_lies = !items.bits && items.dtype == F32;
  std::vector<float> read(16 * dim), panel(WAITING * dim);
  Waiting waiting[FEW];
  float slack[FEW];
  for (int64_t q = 0; q < count; q++) {
    waiting[q].rows.resize(WAITING * dim);
    double square = 0;
    for (int64_t d = 0; d < dim; d++) square += double(queries[q * dim + d]) * queries[q * dim + d];
    slack[q] = float(1.05 * (2 * dim + 96) * 0x1p-24 * std::sqrt(square));
  }
  for (int64_t first = begin; first < end; first += 16) {
    const int64_t rows = std::min<int64_t>(16, end - first);
    const float* from = read.data();
    if (as_it_lies && rows == 16) from = reinterpret_cast<const float*>(items.data + first * items.row_bytes);
    else for (int64_t j = 0; j < rows; j++) read_row(read.data() + j * dim, items, first + j);
    float norm = 0;
    for (int64_t q = 0; q < count; q++) {
      __m512 sums[16] = {}, squares[4] = {};
      if (q) lane_products<false>(sums, squares, from, queries + q * dim, dim);
      else {
        lane_products<true>(sums, squares, from, queries, dim);
        norm = std::sqrt(_mm512_reduce_add_ps(squares[0] + squares[1] + (squares[2] + squares[3])) * 1.02f + 16 * dim * 0x1p-126f);
      }
      const __m512 most = lane_sums(sums) + _mm512_set1_ps(slack[q] * norm + 4 * (dim + 4) * 0x1p-126f);
      unsigned near = _mm512_cmp_ps_mask(most, _mm512_set1_ps(best[q].least), _CMP_NLE_UQ) & ((1u << rows) - 1);  // also NaN
      for (Waiting& own = waiting[q]; near; near &= near - 1) {
        const int j = __builtin_ctz(near);
        std::copy_n(from + j * dim, dim, own.rows.data() + own.count * dim);
        own.numbers[own.count++] = first + j;
        if (own.count == WAITING) offer_waiting(own, panel.data(), queries + q * dim, dim, best[q]);
      }
    }
  }
  for (int64_t q = 0; q < count; q++) offer_waiting(waiting[q], panel.data(), queries + q * dim, dim, best[q]);
}
#endif

// The best of rows [begin, end) for each of `count` queries.
template <class A> void scan(const Items& items, int64_t begin, int64_t end, const A* queries, int64_t count, Best<A>* best) {
  constexpr int J = PANEL<A>;
  const int64_t dim = items.dim;
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4)
    if (count <= FEW && dim <= FEW_DIM) return scan_few(items, begin, end, queries, count, best);
#endif
  const bool as_it_lies = !items.bits && items.dtype == (sizeof(A) == 8 ? F64 : F32);
  std::vector<A> panel(J * dim), read(J * dim);
  for (int64_t first = begin; first < end; first += J) {
    const int64_t rows = std::min<int64_t>(J, end - first);
    const A* from = read.data();
    if (as_it_lies && rows == J) from = reinterpret_cast<const A*>(items.data + first * items.row_bytes);
    else for (int64_t j = 0; j < rows; j++) read_row(read.data() + j * dim, items, first + j);
    transpose<A, J>(panel.data(), from, dim);
    int64_t q = 0;
    for (; q + TOGETHER <= count; q += TOGETHER) score<A, TOGETHER>(panel.data(), queries + q * dim, dim, first, rows, best + q);
    for (; q < count; q++) score<A, 1>(panel.data(), queries + q * dim, dim, first, rows, best + q);
  }
}

// The rows that each query leaves out, ascending.
struct Excluded {
  std::vector<int64_t> rows, begins;
  Excluded(const Vector& values, const Vector& offsets, int64_t num_queries) : begins(num_queries + 1, 0) {
    if (!values) return;
    std::vector<int64_t> memory;
    const Ints ids(values), bounds = ascending(Ints(offsets), memory);
    for (int64_t b = 0; b < num_queries; b++) {
      const Range own = bag(bounds, b, ids.size, 0);
      for (int64_t i = own.begin; i < own.end; i++) rows.push_back(ids[i]);
      begins[b + 1] = rows.size();
      std::sort(rows.begin() + begins[b], rows.end());
    }
  }
};

template <class A> void top_k_of(Reader r) {
  const int64_t threads = r.number();
  const Matrix queries = r.matrix();
  Items items{r.pointer<char>(), r.number(), r.number(), r.number(), r.number(), r.number()};
  const Vector values = r.vector(), offsets = r.vector();
  const int64_t k = r.number(), kept = std::min(k, items.rows), dim = items.dim;
  A* scores = r.pointer<A>();
  int64_t* rows = r.pointer<int64_t>();
  const Excluded excluded(values, offsets, queries.rows);
  std::fill(scores, scores + queries.rows * k, -std::numeric_limits<A>::infinity());
  std::fill(rows, rows + queries.rows * k, int64_t(-1));
  if (kept == 0) return;

  const int64_t panels = (items.rows + PANEL<A> - 1) / PANEL<A>;
  const bool is_small = queries.rows * items.rows * dim < MIN_WORK;
  const int64_t parts = is_small || threads < 2 ? 1 : std::min(4 * threads, (panels + 7) / 8);
  const auto begin = [&](int64_t part) { return std::min(items.rows, panels * part / parts * PANEL<A>); };
  for (int64_t start = 0; start < queries.rows; start += GROUP) {
    const int64_t count = std::min(GROUP, queries.rows - start);
    std::vector<Scored<A>> found;
    std::vector<Best<A>> best(parts * count);
    std::vector<int64_t> most(parts);  // the most rows that a part can return: fewer than k if the part is small
    for (int64_t p = 0; p < parts; p++) most[p] = std::min(kept, begin(p + 1) - begin(p));
    found.resize(count * std::accumulate(most.begin(), most.end(), int64_t(0)));
    Scored<A>* room = found.data();
    for (int64_t i = 0; i < parts * count; room += most[i++ / count]) {
      const int64_t *at = excluded.rows.data(), *begins = excluded.begins.data() + start + i % count;
      best[i] = {room, 0, most[i / count], -std::numeric_limits<A>::infinity(), at + begins[0], at + begins[1]};
    }
    parallel_for(threads, parts, [&](int64_t p) {
      scan(items, begin(p), begin(p + 1), queries.as<A>() + start * dim, count, &best[p * count]);
    });
    for (int64_t q = 0; q < count; q++) {
      std::vector<Scored<A>> all;
      for (int64_t p = 0; p < parts; p++) all.insert(all.end(), best[p * count + q].at, best[p * count + q].at + best[p * count + q].size);
      const int64_t given = std::min<int64_t>(kept, all.size());
      std::partial_sort(all.begin(), all.begin() + given, all.end());
      for (int64_t i = 0; i < given; i++) scores[(start + q) * k + i] = all[i].score, rows[(start + q) * k + i] = all[i].row;
    }
  }
}

// What Python passes: [threads, queries f32|f64[B, D] contiguous, items (data, dtype, N, D, bytes of a row, bits or 0),
// rows left out and their offsets [B + 1] or none, k, scores [B, k] of the queries' type, rows i64[B, k]]
inline void top_k(Reader r) { r.at[2] == F64 ? top_k_of<double>(r) : top_k_of<float>(r); }

}  // namespace funcrec

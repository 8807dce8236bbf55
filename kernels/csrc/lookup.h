// Pooled sums of table rows.
//   out[b, column:column+D] = sum over positions i of bag b of s_i * table[rows[i]]
// A panel is the part of a row that one pass over a bag sums in registers: NV vectors of W lanes. A row is cut into panels. If W does not
// divide D, the last panel overlaps the one before and both write the same numbers, so that there is no scalar tail.
// The work is cut into blocks of bags, and a block goes feature by feature: its rows of the output stay in L2 meanwhile.
#pragma once
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "abi.h"
#include "codes.h"
#include "parallel.h"
#include "passes.h"
#include "simd.h"

namespace funcrec {

constexpr int64_t BLOCK = 64;        // bags
constexpr int64_t FAR = 64;          // rows between the fetch into L2 and the sum
constexpr int64_t NEAR_BYTES = 4096;  // bytes of rows between the touch and the sum
constexpr uint64_t RING = 128;       // a power of two above FAR
constexpr int MAX_VECTORS = 8;       // accumulators of a panel: AVX has 16 registers
constexpr int64_t MIN_STREAM = 8 << 20;  // bytes of output above which stores bypass the caches: a smaller output is still in them when it is read
constexpr int64_t MIN_WORK = 32768;  // with fewer elements one thread is faster

// A panel of zeros of any type, which stands for a row outside its table.
alignas(64) inline const char ZEROS[MAX_VECTORS * VECTOR_BYTES] = {};

struct Lookup;
struct Feature;
class RowsAhead;
using Kernel = void (*)(const Lookup&, const Feature&, Range bags, RowsAhead&);

struct Feature {
  Table table;
  Ints rows;
  int64_t first_bag, max_length, column, row_bytes;
  bool mean, weighted, streamed;
  Kernel kernel;
};

// Whether x[0], x[1] ... x[n] go up by one.
template <class I> bool counts_up(const I* x, int64_t n) {
  I other = 0;  // The loop works without a branch, in vectors.
  for (int64_t i = 0; i < n; i++) other |= (x[i + 1] - x[i]) ^ 1;
  return other == 0;
}

struct Lookup {
  std::vector<Feature> features;
  Ints offsets;
  Reals weights;
  int64_t num_bags, columns;
  char* out;

  Range bag(const Feature& f, int64_t b) const {
    return funcrec::bag(offsets, f.first_bag + b, f.rows.size, f.max_length);
  }

  // Whether each of these bags is one position, inside the buffer.
  bool is_single(const Feature& f, Range bags) const {
    const int64_t n = bags.size(), at = f.first_bag + bags.begin;
    if (n <= 0 || offsets[at] < 0 || offsets[at + n] > f.rows.size || offsets[at + n] - offsets[at] != n) return false;
    return offsets.wide ? counts_up(static_cast<const int64_t*>(offsets.data) + at, n) : counts_up(static_cast<const int32_t*>(offsets.data) + at, n);
  }
};

// A part of the work: blocks x features.
struct Part { Range blocks, features; };

inline Range bags_of(int64_t block, int64_t num_bags) {
  return {block * BLOCK, std::min(num_bags, (block + 1) * BLOCK)};
}

// The rows of a part in the order in which they are summed, found some rows before the sum. A row is prefetched in two steps: first
// all its lines into L2, then, shortly before the sum, its first line is touched. Without the second step the sum's own misses wait
// for those of the prefetches, and up to 40 % of the bandwidth is lost. The state for each row must be small (registers, and a ring of
// addresses), because the number of loads in flight is the limit here.
class RowsAhead {
 public:
  // The state that finds the next address: positions [i, end) of `rows`, rows of a table.
  struct Cursor {
    const void* rows = nullptr;
    bool wide = true;
    int64_t i = 0, end = 0;
    uint64_t num_rows = 0;
    const char* table = nullptr;
    int64_t bytes = 0;
  };

  RowsAhead(const Lookup& call, Part part) : call_(call), part_(part), block_(part.blocks.begin), f_(part.features.begin) {
    bags_ = bags_of(block_, call.num_bags);
    int64_t most = 1;
    for (int64_t f = part.features.begin; f < part.features.end; f++) most = std::max(most, call.features[f].row_bytes);
    near_ = std::clamp<int64_t>(NEAR_BYTES / most, 4, 16);
    for (int64_t k = 0; k < FAR; k++) find<0>(cursor, k);
    for (int64_t k = 0; k < near_; k++) touch(ring_[k]);
  }

  // The address of row k of the part, for k = 0, 1, ...; prefetches of USUAL bytes of a row are unrolled. A row that begins anywhere in a line
  // ends in one more line than its bytes fill.
  template <int64_t USUAL> FUNCREC_INLINE const char* next(Cursor& c, uint64_t k) {
    find<USUAL>(c, k + FAR);
    const char* const near = ring_[(k + near_) % RING];
    touch(near);
    if constexpr (USUAL % 16) prefetch<1>(near + USUAL - 1, 1);
    return ring_[k % RING];
  }

  Cursor cursor;
  uint64_t taken = 0;  // rows whose address was returned

 private:
  template <int64_t USUAL> FUNCREC_INLINE void find(Cursor& c, uint64_t k) {
    if (__builtin_expect(c.i >= c.end, 0)) c = next_range();
    const uint64_t row = c.wide ? static_cast<const int64_t*>(c.rows)[c.i] : static_cast<const int32_t*>(c.rows)[c.i];
    c.i++;
    const char* at = __builtin_expect(row < c.num_rows, 1) ? c.table + row * c.bytes : ZEROS;
    if (__builtin_expect(c.bytes == USUAL, 1)) prefetch<2>(at, USUAL);
    else prefetch<2>(at, c.bytes);
    if constexpr (USUAL % 16) prefetch<2>(at + c.bytes - 1, 1);
    ring_[k % RING] = at;
  }

  // The next range: bags of a feature as long as each begins where the last one ended. After the last row come rows of zeros.
  __attribute__((noinline)) Cursor next_range() {
    while (block_ < part_.blocks.end) {
      const Feature& f = call_.features[f_];
      Range r{0, 0};
      if (call_.is_single(f, bags_)) {
        r = {call_.offsets[f.first_bag + bags_.begin], call_.offsets[f.first_bag + bags_.end]};
        bags_.begin = bags_.end;
      }
      for (; bags_.begin < bags_.end; bags_.begin++) {
        const Range next = call_.bag(f, bags_.begin);
        if (next.size() == 0) continue;
        if (r.size() == 0) r = next;
        else if (next.begin == r.end) r.end = next.end;
        else break;
      }
      if (bags_.begin == bags_.end) {
        if (++f_ == part_.features.end) f_ = part_.features.begin, block_++;
        bags_ = bags_of(block_, call_.num_bags);
      }
      if (r.size()) return {f.rows.data, f.rows.wide, r.begin, r.end, uint64_t(f.table.rows), f.table.data, f.row_bytes};
    }
    static constexpr int32_t OUTSIDE[FAR] = {};  // No table has rows here, so the numbers do not matter.
    return {OUTSIDE, false, 0, FAR, 0, nullptr, 0};
  }

  const Lookup& call_;
  const Part part_;
  int64_t block_, f_;
  Range bags_;
  int64_t near_;
  const char* ring_[RING];
};

// One panel of one bag: columns [column, column + NV * W) of rows. at(i): the row of position i, from its column on.
template <class E, class Out, bool WEIGHTED, int NV, int W, class At>
FUNCREC_INLINE void pool_panel(const Lookup& call, const Feature& f, Range r, int64_t column, Out* out, const At& at) {
  using A = Acc<E>;
  Vec<A, W> sums[NV] = {};
  for (int64_t i = r.begin; i < r.end; i++) {
    const InRow<E, W> from = at(i);
    if constexpr (WEIGHTED) {
      const A scale = std::is_same_v<Out, float> || f.weighted ? A(call.weights[i]) : A(1);
      for (int v = 0; v < NV; v++) sums[v] += from.get(v * W) * scale;
    } else {
      for (int v = 0; v < NV; v++) sums[v] += from.get(v * W);
    }
  }
  // The division comes once, at the end: (Σ s_i · row_i) / n.
  const A length = f.mean && r.size() > 1 ? A(r.size()) : A(1);
  for (int v = 0; v < NV; v++) {
    if (f.mean) sums[v] = sums[v] / length;
    const auto sum = convert<Out, W>(sums[v]);
    if constexpr (RowTraits<E>::LEAST > 1) {  // codes begin at a byte: the last vector may reach beyond the row
      if (const int64_t left = f.table.dim - column - v * W; left < W) {
        std::memcpy(out + column + v * W, &sum, left * sizeof(Out));
        continue;
      }
    }
    if (f.streamed) stream<W>(out + column + v * W, sum);
    else store<W>(out + column + v * W, sum);
  }
}

// The panels from `column` on: of FULL vectors, then a panel that overlaps the last one. Their addresses are found again, because a bag may be
// longer than the ring of those found ahead. This function is shared by rows of all lengths.
template <class E, class Out, bool WEIGHTED, int FULL, int W>
__attribute__((noinline)) void pool_rest(const Lookup& call, const Feature& f, Range r, int64_t column, Out* out) {
  constexpr int64_t EACH = RowTraits<E>::EACH;
  const int64_t dim = f.table.dim;
  int64_t c = column;
  const auto at = [&](int64_t i) __attribute__((always_inline)) {
    const uint64_t row = f.rows[i];
    const bool inside = row < uint64_t(f.table.rows);
    return InRow<E, W>(inside ? f.table.data + row * f.row_bytes : ZEROS, inside ? c : 0, dim);
  };
  for (; c + FULL * W <= dim; c += FULL * W) pool_panel<E, Out, WEIGHTED, FULL, W>(call, f, r, c, out, at);
  if (c == dim) return;
  c = (dim - W + EACH - 1) / EACH * EACH;
  pool_panel<E, Out, WEIGHTED, 1, W>(call, f, r, c, out, at);
}

// Bags of one id each, whose rows are one panel: the general sum's loops and tests would take as long as the row itself.
template <class E, class Out, int NV, int W>
FUNCREC_INLINE void pool_single(const Lookup& call, const Feature& f, Range bags, Out* out, RowsAhead& ahead) {
  auto [cursor, taken] = std::pair(ahead.cursor, ahead.taken);
  for (int64_t b = bags.begin; b < bags.end; b++, out += call.columns) {
    const InRow<E, W> from(ahead.next<RowTraits<E>::bytes(NV * W)>(cursor, taken++), 0, f.table.dim);
    for (int v = 0; v < NV; v++) {
      const auto sum = convert<Out, W>(Vec<Acc<E>, W>{} + from.get(v * W));  // 0 + x turns a -0 into +0, as in any sum
      if (f.streamed) stream<W>(out + v * W, sum);
      else store<W>(out + v * W, sum);
    }
  }
  ahead.cursor = cursor, ahead.taken = taken;
}

// Bags of one feature. A row is a panel of NV vectors, then panels of FULL vectors, then a panel that overlaps the last one. With f64
// outputs, WEIGHTED kernels serve features without weights as well, whose weights are 1.
template <class E, class Out, bool WEIGHTED, int FULL, int NV, int W>
void pool_bags(const Lookup& call, const Feature& f, Range bags, RowsAhead& ahead) {
  constexpr int FIRST = NV > 0 ? NV : FULL;
  const int64_t dim = f.table.dim;
  Out* out = reinterpret_cast<Out*>(call.out) + bags.begin * call.columns + f.column;
  if constexpr (!WEIGHTED)
    if (dim == FIRST * W && call.is_single(f, bags)) return pool_single<E, Out, FIRST, W>(call, f, bags, out, ahead);
  RowsAhead::Cursor cursor = ahead.cursor;
  uint64_t taken = ahead.taken;
  const auto next = [&](int64_t) __attribute__((always_inline)) {
    return InRow<E, W>(ahead.next<RowTraits<E>::bytes(FIRST * W)>(cursor, taken++), 0, dim);
  };
  for (int64_t b = bags.begin; b < bags.end; b++, out += call.columns) {
    const Range r = call.bag(f, b);
    pool_panel<E, Out, WEIGHTED, FIRST, W>(call, f, r, 0, out, next);
    if (FIRST * W < dim) pool_rest<E, Out, WEIGHTED, FULL, W>(call, f, r, FIRST * W, out);
  }
  ahead.cursor = cursor, ahead.taken = taken;
}

template <class E, class Out, bool WEIGHTED, int W, int... NV>
constexpr std::array<Kernel, sizeof...(NV)> kernels_by_vectors(std::integer_sequence<int, NV...>) {
  return {pool_bags<E, Out, WEIGHTED, MAX_VECTORS, NV, W>...};
}

// The kernel for rows of `dim` elements; W is halved until a row has at least one vector.
template <class E, class Out, bool WEIGHTED, int W = LANES<Out>> Kernel kernel_of(int64_t dim) {
  if constexpr (W > RowTraits<E>::LEAST) {
    if (dim < W) return kernel_of<E, Out, WEIGHTED, W / 2>(dim);
  }
  if constexpr (W == LANES<Out>) {
    static constexpr auto kernels =
        kernels_by_vectors<E, Out, WEIGHTED, W>(std::make_integer_sequence<int, MAX_VECTORS>{});
    return kernels[dim / W % MAX_VECTORS];
  } else {
    return pool_bags<E, Out, WEIGHTED, 1, 0, W>;  // narrow rows: one vector
  }
}

// The kernel of sums in f64, which serve for checks: fewer kernels.
template <class E> Kernel kernel_of_f64(int64_t dim) {
  constexpr int W = LANES<double>;
  if (dim < W) return pool_bags<E, double, true, 1, 0, 1>;
  if constexpr (std::is_same_v<E, double>) {
    switch (dim / W % 8) {
      case 0: return pool_bags<E, double, true, 8, 0, W>;
      case 4: return pool_bags<E, double, true, 8, 4, W>;
      case 1: case 5: return pool_bags<E, double, true, 4, 1, W>;
      case 2: case 6: return pool_bags<E, double, true, 4, 2, W>;
      default: return pool_bags<E, double, true, 4, 3, W>;
    }
  } else {
    return pool_bags<E, double, true, 1, 0, W>;
  }
}

Kernel kernel_of_codes(const Feature& f);  // quantized.cpp

template <class Out> Kernel kernel_of(const Feature& f) {
  constexpr bool wide = std::is_same_v<Out, double>;
  if (f.table.dtype >= CODES8) return wide ? nullptr : kernel_of_codes(f);
  return with_table_type(f.table.dtype, [&](auto tag) -> Kernel {
    using E = typename decltype(tag)::type;
    if constexpr (wide) return kernel_of_f64<E>(f.table.dim);
    else if constexpr (sizeof(E) > sizeof(Out)) return nullptr;  // f64 tables have f64 outputs
    else return f.weighted ? kernel_of<E, Out, true>(f.table.dim) : kernel_of<E, Out, false>(f.table.dim);
  });
}

inline std::vector<Feature> read_features(Reader& in) {
  std::vector<Table> tables(in.number());
  for (Table& t : tables) t = in.table();
  std::vector<Vector> rows(in.number());
  for (Vector& r : rows) r = in.vector();
  std::vector<Feature> features;
  int64_t n = in.number();
  for (features.reserve(n); n > 0; n--) {
    const Table t = tables[in.number()];
    const Ints ids(rows[in.number()]);
    const int64_t first_bag = in.number(), max_length = in.number();
    const bool mean = in.number(), weighted = in.number();
    const Feature f{t, ids, first_bag, max_length, in.number(), t.row_bytes(), mean, weighted, false, nullptr};
    if (t.dim > 0) features.push_back(f);
  }
  return features;
}

// Cuts blocks x features into parts: whole blocks if there are enough for the threads, else by features.
inline std::vector<Part> parts_of(int64_t blocks, int64_t features, int64_t threads) {
  const int64_t want = threads > 1 ? 4 * threads : 1;
  const int64_t by_block = std::min(blocks, want), by_feature = std::min(features, (want + by_block - 1) / by_block);
  std::vector<Part> parts;
  for (int64_t i = 0; i < by_block; i++)
    for (int64_t j = 0; j < by_feature; j++)
      parts.push_back({{blocks * i / by_block, blocks * (i + 1) / by_block},
                       {features * j / by_feature, features * (j + 1) / by_feature}});
  return parts;
}

// Tables of codes have f32 outputs only.
inline void pooled_lookup(Reader in) {
  int64_t threads = in.number();
  auto features = read_features(in);
  const Vector offsets = in.vector(), weights = in.vector();
  const int64_t num_bags = in.number(), columns = in.number(), out_dtype = in.number();
  std::vector<int64_t> memory;
  Lookup call{std::move(features), ascending(Ints(offsets), memory), Reals(weights), num_bags, columns, in.pointer<char>()};
  if (num_bags == 0 || call.features.empty()) return;
  // Only whole lines are streamed: a feature's column must be a multiple of this; 0 streams nothing.
  const int64_t bytes = out_dtype == F64 ? 8 : 4, line = 64 / bytes;
  const bool aligned = columns % line == 0 && reinterpret_cast<uint64_t>(call.out) % 64 == 0;
  const int64_t stream_columns = aligned && num_bags * columns * bytes > MIN_STREAM ? line : 0;
  int64_t work = 0;
  for (Feature& f : call.features) {
    f.kernel = out_dtype == F64 ? kernel_of<double>(f) : kernel_of<float>(f);
    f.streamed = stream_columns && f.column % stream_columns == 0 && f.table.dim % stream_columns == 0;
    work += (call.bag(f, num_bags - 1).end - call.bag(f, 0).begin + num_bags) * f.table.dim;
  }
  if (work < MIN_WORK) threads = 1;
  const int64_t num_features = call.features.size();
  const auto parts = parts_of((num_bags + BLOCK - 1) / BLOCK, num_features, threads);
  parallel_for(threads, parts.size(), [&](int64_t p) {
    RowsAhead ahead(call, parts[p]);
    for (int64_t block = parts[p].blocks.begin; block < parts[p].blocks.end; block++)
      for (int64_t f = parts[p].features.begin; f < parts[p].features.end; f++)
        call.features[f].kernel(call, call.features[f], bags_of(block, num_bags), ahead);
    if (stream_columns) stream_end();
  });
}

inline void quantized_lookup(Reader in) { pooled_lookup(in); }

}  // namespace funcrec

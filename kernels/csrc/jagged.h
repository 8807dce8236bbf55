// Jagged buffers: copies of whole ranges, padding, and a sort of ids by owner. The functions copy elements as bytes, of any dtype and
// trailing shape; `bytes` is the size of one position.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "abi.h"
#include "parallel.h"

namespace funcrec {

constexpr int64_t MAX_BAGS_PER_ITEM = 512;
constexpr int64_t MIN_BYTES = 1 << 17;  // with fewer bytes one thread is faster

// Copies S <= n <= 2 S bytes as two blocks of S that may overlap; all is read before anything is written.
template <int64_t S> inline void copy_ends(char* to, const char* from, int64_t n) {
  struct Block { char bytes[S]; } first, last;
  std::memcpy(&first, from, S), std::memcpy(&last, from + n - S, S);
  std::memcpy(to, &first, S), std::memcpy(to + n - S, &last, S);
}

// Copies n bytes; few bytes, as in most bags, need no call.
inline void copy_bytes(char* to, const char* from, int64_t n) {
  if (n > 64) std::memcpy(to, from, n);
  else if (n > 32) copy_ends<32>(to, from, n);
  else if (n > 16) copy_ends<16>(to, from, n);
  else if (n >= 8) copy_ends<8>(to, from, n);
  else if (n >= 4) copy_ends<4>(to, from, n);
  else for (int64_t i = 0; i < n; i++) to[i] = from[i];
}

inline void zero_bytes(char* to, int64_t n) {
  static constexpr char zeros[64] = {};
  if (n > 64) std::memset(to, 0, n);
  else copy_bytes(to, zeros, n);
}

// Copies n bytes where more than n bytes may be read and written, so that short ragged bags need no unpredictable branch.
inline void copy_bytes_within(char* to, int64_t writable, const char* from, int64_t readable, int64_t n) {
  if (n <= 64 && writable >= 64 && readable >= 64) std::memcpy(to, from, 64);
  else copy_bytes(to, from, n);
}

// f(b, last) for every bag; one thread takes all from b to before `last`, in order. `bytes` is the size of the whole output.
template <class F> void for_bags(int64_t threads, int64_t num_bags, int64_t bytes, F&& f) {
  const int64_t team = bytes < MIN_BYTES ? 1 : threads;
  const int64_t each = std::max<int64_t>(1, std::min(MAX_BAGS_PER_ITEM, num_bags / (8 * team)));
  parallel_for(team, (num_bags + each - 1) / each, [&](int64_t k) {
    const int64_t last = std::min(num_bags, (k + 1) * each);
    for (int64_t b = k * each; b < last; b++) f(b, last);
  });
}

// Boundaries that ascend within [0, n], for any `offsets`.
inline std::vector<int64_t> bounds_of(const Ints& offsets, int64_t n) {
  std::vector<int64_t> bounds(offsets.size);
  int64_t last = 0;
  for (int64_t b = 0; b < offsets.size; b++) bounds[b] = last = std::max(last, std::min(n, offsets[b]));
  return bounds;
}

// offsets[b + 1] = offsets[b] + lengths[b], from 0; a sum beyond i64 wraps.
inline void sum_lengths(const Ints& lengths, int64_t* offsets) {
  offsets[0] = 0;
  for (int64_t b = 0; b < lengths.size; b++) offsets[b + 1] = int64_t(uint64_t(offsets[b]) + uint64_t(lengths[b]));
}

// out = values[starts[b] : starts[b] + lengths[b]] for each b in turn, then zeros; offsets say where each range begins.
inline void take_ranges(Reader in) {
  const int64_t threads = in.number();
  const char* values = in.pointer<char>();
  const int64_t num_values = in.number(), bytes = in.number();
  const Vector starts_in = in.vector(), lengths_in = in.vector();
  const Ints starts(starts_in), lengths(lengths_in);
  char* out = in.pointer<char>();
  const int64_t capacity = in.number(), num_bags = lengths.size;
  int64_t* offsets = in.pointer<int64_t>();
  sum_lengths(lengths, offsets);
  if (bytes == 0) return;
  const auto bounds = bounds_of(Ints(Vector{reinterpret_cast<char*>(offsets), I64, num_bags + 1}), capacity);
  for_bags(threads, num_bags, capacity * bytes, [&](int64_t b, int64_t last) {
    const int64_t length = bounds[b + 1] - bounds[b], start = starts[b];
    char* to = out + bounds[b] * bytes;
    if (start >= 0 && start <= num_values - length) {  // most ranges lie inside the buffer
      const int64_t writable = (bounds[last] - bounds[b]) * bytes, readable = (num_values - start) * bytes;
      return copy_bytes_within(to, writable, values + start * bytes, readable, length * bytes);
    }
    const int64_t before = start < 0 ? (start <= -length ? length : -start) : 0;  // positions below 0
    const int64_t from = start < 0 ? 0 : std::min(start, num_values), taken = std::min(length - before, num_values - from);
    zero_bytes(to, before * bytes);
    copy_bytes(to + before * bytes, values + from * bytes, taken * bytes);
    zero_bytes(to + (before + taken) * bytes, (length - before - taken) * bytes);
  });
  zero_bytes(out + bounds[num_bags] * bytes, (capacity - bounds[num_bags]) * bytes);
}

// out[i] = the sum of d[offsets[b] + i - starts[b]] over the ranges b that hold i, in order. A thread owns a part of `out`, and
// reads every range.
template <class E> void add_ranges(int64_t threads, const E* d, int64_t width, const Ints& starts,
                                   const std::vector<int64_t>& bounds, int64_t num_values, E* out) {
  const int64_t parts = num_values * width * int64_t(sizeof(E)) < MIN_BYTES ? 1 : threads;
  parallel_for(threads, parts, [&](int64_t k) {
    const int64_t first = num_values * k / parts, last = num_values * (k + 1) / parts;
    zero_bytes(reinterpret_cast<char*>(out + first * width), (last - first) * width * sizeof(E));
    for (int64_t b = 0; b < starts.size; b++) {
      const int64_t start = starts[b], length = bounds[b + 1] - bounds[b];
      if (start >= last || start <= first - length) continue;
      const int64_t begin = std::max(start, first), end = start > last - length ? last : start + length;
      const E* from = d + (bounds[b] + begin - start) * width;
      for (int64_t i = begin * width; i < end * width; i++) out[i] += *from++;
    }
  });
}

// The transpose of take_ranges, for f32 and f64.
inline void take_ranges_transpose(Reader in) {
  const int64_t threads = in.number();
  const Matrix d = in.matrix();
  const Vector starts_in = in.vector(), lengths_in = in.vector();
  const Ints starts(starts_in), lengths(lengths_in);
  char* out = in.pointer<char>();
  const int64_t num_values = in.number();
  std::vector<int64_t> offsets(lengths.size + 1);
  sum_lengths(lengths, offsets.data());
  const auto bounds = bounds_of(Ints(offsets), d.rows);
  auto add = [&](auto one) {
    using E = decltype(one);
    add_ranges(threads, d.as<E>(), d.columns, starts, bounds, num_values, reinterpret_cast<E*>(out));
  };
  d.dtype == F64 ? add(double{}) : add(float{});
}

// An array of numbers at any address.
template <class E> struct Unaligned {
  char* p;
  E operator[](int64_t i) const {
    E x;
    std::memcpy(&x, p + i * int64_t(sizeof(E)), sizeof(E));
    return x;
  }
  void put(int64_t i, E x) const { std::memcpy(p + i * int64_t(sizeof(E)), &x, sizeof(E)); }
};

// to[l] = l < length ? from[l] : fill for l < n, without a branch on the length; all n elements of `from` must be readable.
template <class E> inline void pad_bag(char* __restrict to_bytes, char* __restrict from_bytes, int64_t length, int64_t n, E fill) {
  constexpr int64_t W = 64 / sizeof(E);
  const Unaligned<E> to{to_bytes}, from{from_bytes};
  auto block = [&](int64_t l) {
    for (int64_t i = l; i < l + W; i++) {
      const E x = from[i];
      to.put(i, i < length ? x : fill);
    }
  };
  if (n <= W) {
    for (int64_t l = 0; l < n; l++) {  // a conditional would become a branch here
      const E inside = E(0) - E(l < length);
      to.put(l, (from[l] & inside) | (fill & ~inside));
    }
    return;
  }
  for (int64_t l = 0; l + W <= n; l += W) block(l);
  if (n % W) block(n - W);
}

// Pads bags whose positions have the bytes of one number, of any type.
template <class E> void pad_numbers(int64_t threads, const Ints& offsets, int64_t num_bags, char* values, int64_t num_values,
                                    int64_t max_length, E fill, char* out) {
  constexpr int64_t bytes = sizeof(E);
  for_bags(threads, num_bags, num_bags * max_length * bytes, [&](int64_t b, int64_t) {
    const Range r = bag(offsets, b, num_values, 0);
    char *const to = out + b * max_length * bytes, *const from = values + r.begin * bytes;
    if (r.begin <= num_values - max_length) return pad_bag(to, from, r.size(), max_length, fill);
    for (int64_t l = 0; l < max_length; l++) Unaligned<E>{to}.put(l, l < r.size() ? Unaligned<E>{from}[l] : fill);
  });
}

// out[b, l] = values[offsets[b] + l] inside bag b, else `fill`, which has one position's bytes.
inline void to_padded(Reader in) {
  const int64_t threads = in.number();
  char* const values = in.pointer<char>();
  const int64_t num_values = in.number(), bytes = in.number();
  std::vector<int64_t> memory;
  const Ints offsets = ascending(Ints(in.vector()), memory);
  const int64_t max_length = in.number(), num_bags = offsets.size - 1;
  const char* fill = in.pointer<char>();
  char* out = in.pointer<char>();
  if (max_length == 0 || bytes == 0) return;
  auto numbers = [&](auto one) {
    std::memcpy(&one, fill, sizeof one);
    pad_numbers(threads, offsets, num_bags, values, num_values, max_length, one, out);
  };
  if (bytes == 8) return numbers(uint64_t{});
  if (bytes == 4) return numbers(uint32_t{});
  const bool zeros = std::all_of(fill, fill + bytes, [](char c) { return c == 0; });
  for_bags(threads, num_bags, num_bags * max_length * bytes, [&](int64_t b, int64_t) {
    const Range r = bag(offsets, b, num_values, max_length);
    char* to = out + b * max_length * bytes;
    copy_bytes(to, values + r.begin * bytes, r.size() * bytes);
    if (zeros) zero_bytes(to + r.size() * bytes, (max_length - r.size()) * bytes);
    else for (int64_t l = r.size(); l < max_length; l++) copy_bytes(to + l * bytes, fill, bytes);
  });
}

// out[offsets[b] + l] = padded[b, l] for l < max_length inside bag b; zeros elsewhere.
inline void from_padded(Reader in) {
  const int64_t threads = in.number();
  const char* padded = in.pointer<char>();
  const int64_t max_length = in.number(), bytes = in.number();
  const Vector offsets_in = in.vector();
  const Ints offsets(offsets_in);
  const int64_t num_bags = offsets.size - 1;
  char* out = in.pointer<char>();
  const int64_t capacity = in.number();
  if (bytes == 0) return;
  const auto bounds = bounds_of(offsets, capacity);
  zero_bytes(out, bounds[0] * bytes);
  for_bags(threads, num_bags, capacity * bytes, [&](int64_t b, int64_t last) {
    const int64_t length = bounds[b + 1] - bounds[b], taken = std::min(length, max_length);
    const int64_t writable = (bounds[last] - bounds[b]) * bytes, readable = (num_bags - b) * max_length * bytes;
    char* to = out + bounds[b] * bytes;
    copy_bytes_within(to, writable, padded + b * max_length * bytes, readable, taken * bytes);
    if (length > taken) zero_bytes(to + taken * bytes, (length - taken) * bytes);
  });
  zero_bytes(out + bounds[num_bags] * bytes, (capacity - bounds[num_bags]) * bytes);
}

// -- bucketize --------------------------------------------------------------------------------------------------------

// row -> its shard, -1 for none. For rows below 2^32, 64 bits of 1 / block are exact. Otherwise the quotient by multiplication is off by
// at most one, because there are fewer than 2^31 shards.
struct Owner {
  int64_t block, num_shards;
  uint64_t end;  // rows of all shards
  uint64_t scale = 0;  // 2^64 / block, rounded up
  double inverse;
  Owner(int64_t block, int64_t num_shards) : block(block), num_shards(num_shards), inverse(1.0 / double(block)) {
    const int64_t most = std::numeric_limits<int64_t>::max();
    end = num_shards > 0 && block > most / num_shards ? uint64_t(most) + 1 : block * num_shards;
    if (end <= uint64_t(1) << 32 && block > 1) scale = ~uint64_t(0) / uint64_t(block) + 1;
  }
  int64_t operator()(int64_t row) const {
    if (uint64_t(row) >= end) return -1;
    if (scale) return int64_t((unsigned __int128)(uint64_t(row)) * scale >> 64);
    int64_t shard = int64_t(double(row) * inverse);
    const int64_t rest = int64_t(uint64_t(row) - uint64_t(shard) * uint64_t(block));  // shard · block may be 2^63
    return shard + (rest >= block) - (rest < 0);
  }
};

struct Buckets {
  const char* weights;
  int64_t weight_bytes;
  int64_t* lengths;    // [S, B], zeros at first
  int64_t* positions;  // [N]
  char* new_weights;
};

// Ids of shard s keep their order, so that its output is one stream. Only the place where a chunk's part of each stream begins must
// be known, and that is a sum over the chunks' counts.
template <class I> void bucketize_as(int64_t threads, const I* rows, I* out, int64_t num_ids, const Owner& owner,
                                     const std::vector<int64_t>& bounds, const Buckets& to) {
  const int64_t num_bags = int64_t(bounds.size()) - 1, shards = owner.num_shards;
  const int64_t chunks = threads > 1 && num_ids * 8 > MIN_BYTES ? std::min(num_bags, 4 * threads) : 1;
  std::vector<int64_t> next(chunks * shards, 0);  // per chunk and shard: first a count, then the place of its next id
  auto bags = [&](int64_t k) { return Range{num_bags * k / chunks, num_bags * (k + 1) / chunks}; };
  parallel_for(threads, chunks, [&](int64_t k) {
    for (int64_t b = bags(k).begin; b < bags(k).end; b++)
      for (int64_t i = bounds[b]; i < bounds[b + 1]; i++) {
        const int64_t shard = to.positions[i] = owner(rows[i]);
        if (shard < 0) continue;
        to.lengths[shard * num_bags + b]++;
        next[k * shards + shard]++;
      }
  });
  int64_t total = 0;
  for (int64_t s = 0; s < shards; s++)
    for (int64_t k = 0; k < chunks; k++) total += std::exchange(next[k * shards + s], total);
  parallel_for(threads, chunks, [&](int64_t k) {
    for (int64_t i = bounds[bags(k).begin]; i < bounds[bags(k).end]; i++) {
      const int64_t shard = to.positions[i];
      if (shard < 0) continue;
      const int64_t place = to.positions[i] = next[k * shards + shard]++;
      out[place] = I(int64_t(rows[i]) - shard * owner.block);
      const int64_t size = to.weight_bytes;
      if (to.weights) copy_bytes(to.new_weights + place * size, to.weights + i * size, size);
    }
  });
  std::fill(to.positions, to.positions + bounds[0], -1);
  std::fill(to.positions + bounds[num_bags], to.positions + num_ids, -1);
  std::fill(out + total, out + num_ids, I(0));
  if (to.weights) zero_bytes(to.new_weights + total * to.weight_bytes, (num_ids - total) * to.weight_bytes);
}

inline void bucketize(Reader in) {
  const int64_t threads = in.number();
  const Vector rows = in.vector(), offsets = in.vector();
  const int64_t num_shards = in.number(), block = in.number();
  char* out = in.pointer<char>();
  Buckets to;
  to.weights = in.pointer<char>(), to.weight_bytes = in.number();
  to.lengths = in.pointer<int64_t>(), to.positions = in.pointer<int64_t>(), to.new_weights = in.pointer<char>();
  const auto bounds = bounds_of(Ints(offsets), rows.size);
  zero_bytes(reinterpret_cast<char*>(to.lengths), num_shards * (offsets.size - 1) * 8);
  with_int_type(rows.dtype, [&](auto tag) {
    using I = typename decltype(tag)::type;
    bucketize_as(threads, rows.as<I>(), reinterpret_cast<I*>(out), rows.size, Owner(block, num_shards), bounds, to);
  });
}

}  // namespace funcrec

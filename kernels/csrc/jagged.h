// Jagged buffers: moving whole ranges, padding, and sorting ids by their owner. Elements are moved as bytes, so any dtype
// and any trailing shape will do; `bytes` is the size of one position.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "abi.h"
#include "parallel.h"

namespace funcrec {

constexpr int64_t BAGS_PER_ITEM = 512;
constexpr int64_t MIN_BYTES = 1 << 17;  // below which one thread is faster

// n bytes; the commonest sizes without a call.
inline void copy_bytes(char* to, const char* from, int64_t n) {
  if (n == 8) std::memcpy(to, from, 8);
  else if (n == 4) std::memcpy(to, from, 4);
  else if (n > 0) std::memcpy(to, from, n);
}

inline void zero_bytes(char* to, int64_t n) {
  if (n > 0) std::memset(to, 0, n);
}

template <class F> void for_bags(int64_t threads, int64_t num_bags, int64_t bytes, F&& f) {
  parallel_for(bytes < MIN_BYTES ? 1 : threads, (num_bags + BAGS_PER_ITEM - 1) / BAGS_PER_ITEM, [&](int64_t k) {
    for (int64_t b = k * BAGS_PER_ITEM; b < std::min(num_bags, (k + 1) * BAGS_PER_ITEM); b++) f(b);
  });
}

// Boundaries that ascend within [0, n], whatever `offsets` holds: bags then share no position.
inline std::vector<int64_t> ascending(const Ints& offsets, int64_t n) {
  std::vector<int64_t> bounds(offsets.size);
  int64_t last = 0;
  for (int64_t b = 0; b < offsets.size; b++) bounds[b] = last = std::max(last, std::min(n, offsets[b]));
  return bounds;
}

// out = values[starts[b] : starts[b] + lengths[b]] for each b in turn, zeros behind; offsets say where each begins.
inline void take_ranges(Reader in) {
  const int64_t threads = in.number();
  const char* values = in.pointer<char>();
  const int64_t num_values = in.number(), bytes = in.number();
  const Vector starts_in = in.vector(), lengths_in = in.vector();
  const Ints starts(starts_in), lengths(lengths_in);
  char* out = in.pointer<char>();
  const int64_t capacity = in.number(), num_bags = lengths.size;
  int64_t* offsets = in.pointer<int64_t>();
  offsets[0] = 0;
  for (int64_t b = 0; b < num_bags; b++) offsets[b + 1] = int64_t(uint64_t(offsets[b]) + uint64_t(lengths[b]));
  const auto bounds = ascending(Ints(Vector{reinterpret_cast<char*>(offsets), I64, num_bags + 1}), capacity);
  for_bags(threads, num_bags, capacity * bytes, [&](int64_t b) {
    const int64_t length = bounds[b + 1] - bounds[b], start = starts[b];
    char* to = out + bounds[b] * bytes;
    const int64_t before = start < 0 ? (start <= -length ? length : -start) : 0;  // positions below 0, and beyond the end
    const int64_t stop = start >= num_values ? before : std::max(before, std::min(length, num_values - start));
    zero_bytes(to, before * bytes);
    copy_bytes(to + before * bytes, values + (start + before) * bytes, (stop - before) * bytes);
    zero_bytes(to + stop * bytes, (length - stop) * bytes);
  });
  zero_bytes(out + bounds[num_bags] * bytes, (capacity - bounds[num_bags]) * bytes);
}

// out[b, l] = values[offsets[b] + l] while in bag b, else `fill`, one position's bytes.
inline void to_padded(Reader in) {
  const int64_t threads = in.number();
  const char* values = in.pointer<char>();
  const int64_t num_values = in.number(), bytes = in.number();
  const Vector offsets_in = in.vector();
  const Ints offsets(offsets_in);
  const int64_t max_length = in.number(), num_bags = offsets.size - 1;
  const char* fill = in.pointer<char>();
  char* out = in.pointer<char>();
  if (max_length == 0) return;
  for_bags(threads, num_bags, num_bags * max_length * bytes, [&](int64_t b) {
    const Range r = bag(offsets, b, num_values, max_length);
    char* to = out + b * max_length * bytes;
    copy_bytes(to, values + r.begin * bytes, r.size() * bytes);
    for (int64_t l = r.size(); l < max_length; l++) copy_bytes(to + l * bytes, fill, bytes);
  });
}

// out[offsets[b] + l] = padded[b, l] for l < max_length while in bag b; zeros elsewhere.
inline void from_padded(Reader in) {
  const int64_t threads = in.number();
  const char* padded = in.pointer<char>();
  const int64_t max_length = in.number(), bytes = in.number();
  const Vector offsets_in = in.vector();
  const Ints offsets(offsets_in);
  const int64_t num_bags = offsets.size - 1;
  char* out = in.pointer<char>();
  const int64_t capacity = in.number();
  const auto bounds = ascending(offsets, capacity);
  zero_bytes(out, bounds[0] * bytes);
  for_bags(threads, num_bags, capacity * bytes, [&](int64_t b) {
    const int64_t length = bounds[b + 1] - bounds[b], taken = std::min(length, max_length);
    char* to = out + bounds[b] * bytes;
    copy_bytes(to, padded + b * max_length * bytes, taken * bytes);
    zero_bytes(to + taken * bytes, (length - taken) * bytes);
  });
  zero_bytes(out + bounds[num_bags] * bytes, (capacity - bounds[num_bags]) * bytes);
}

// -- bucketize --------------------------------------------------------------------------------------------------------

// row -> its shard, -1 for nobody. A quotient by multiplication is off by one at most: shards are fewer than 2^31.
struct Owner {
  int64_t block, num_shards;
  uint64_t end;  // rows of all shards
  double inverse;
  Owner(int64_t block, int64_t num_shards) : block(block), num_shards(num_shards), inverse(1.0 / double(block)) {
    const int64_t most = std::numeric_limits<int64_t>::max();
    end = num_shards > 0 && block > most / num_shards ? most : block * num_shards;
  }
  int64_t operator()(int64_t row) const {
    if (uint64_t(row) >= end) return -1;
    int64_t shard = int64_t(double(row) * inverse);
    const int64_t rest = row - shard * block;
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

// Ids of shard s keep their order, so that its output is one stream: only where a chunk's part of each stream begins must
// be known, and that is a sum over the chunks' counts.
template <class I> void bucketize_as(int64_t threads, const I* rows, I* out, int64_t num_ids, const Owner& owner,
                                     const std::vector<int64_t>& bounds, const Buckets& to) {
  const int64_t num_bags = int64_t(bounds.size()) - 1, shards = owner.num_shards;
  const int64_t chunks = threads > 1 && num_ids * 8 > MIN_BYTES ? std::min(num_bags, 4 * threads) : 1;
  std::vector<int64_t> next(chunks * shards, 0);  // per chunk and shard: first a count, then where its next id goes
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
  const auto bounds = ascending(Ints(offsets), rows.size);
  zero_bytes(reinterpret_cast<char*>(to.lengths), num_shards * (offsets.size - 1) * 8);
  with_int_type(rows.dtype, [&](auto tag) {
    using I = typename decltype(tag)::type;
    bucketize_as(threads, rows.as<I>(), reinterpret_cast<I*>(out), rows.size, Owner(block, num_shards), bounds, to);
  });
}

}  // namespace funcrec

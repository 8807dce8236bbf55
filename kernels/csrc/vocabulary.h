// Vocabularies: ids in buckets of 128 slots. kernels/reference_vocabulary.py has the same in torch, and describes tags and entries.
// A found id costs two lines of memory: the bucket's tags, and the entry. Both are prefetched, a few ids ahead.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "parallel.h"
#include "random.h"
#include "simd.h"

namespace funcrec {

constexpr int64_t SLOTS = 128;

struct Entry {
  int64_t id;
  uint32_t count, stamp;
};
static_assert(sizeof(Entry) == 16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "entries are i64[R, 2]");

// `how` is the number of shared rows and, in its upper half, the number of buckets of the whole vocabulary if this is a part of one, of
// an equal range of buckets; else 0. The ids of other parts find buckets here, too, but no such id is here.
struct Vocabulary {
  uint8_t* tags;
  Entry* entries;
  int64_t rows;
  uint64_t how, salt;

  uint64_t shared() const { return how & 0xffffffffu; }
  uint64_t hash(int64_t id) const { return mix(uint64_t(id) ^ salt); }
  int64_t bucket(uint64_t h) const {
    const uint64_t own = rows / SLOTS, all = how >> 32;
    return int64_t(all ? ((h >> 32) * all >> 32) % own : (h >> 32) * own >> 32);
  }
  int64_t unknown(uint64_t h) const { return shared() ? rows + int64_t((h & 0xffffffffu) * shared() >> 32) : -1; }
};

inline uint8_t tag_of(uint64_t h) { return uint8_t(h) ? uint8_t(h) : 1; }

// The slots of a bucket as two words of bits.
struct Slots {
  uint64_t words[2];
  int count() const { return __builtin_popcountll(words[0]) + __builtin_popcountll(words[1]); }
  bool has(int64_t slot) const { return words[slot >> 6] >> (slot & 63) & 1; }
  // f(slot) in ascending order, until f returns false.
  template <class F> FUNCREC_INLINE void each(F&& f) const {
    for (int half = 0; half < 2; half++)
      for (uint64_t w = words[half]; w; w &= w - 1)
        if (!f(int64_t(64 * half + __builtin_ctzll(w)))) return;
  }
};

// The slots whose tag is `tag`.
FUNCREC_INLINE Slots match(const uint8_t* tags, uint8_t tag) {
  Slots out{{0, 0}};
  for (int half = 0; half < 2; half++) {
    const uint8_t* at = tags + 64 * half;
#if defined(__AVX512BW__)
    out.words[half] = _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(at), _mm512_set1_epi8(char(tag)));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + i);
      out.words[half] |= uint64_t(uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_set1_epi8(char(tag)))))) << (32 * i);
    }
#elif defined(__SSE2__)
    for (int i = 0; i < 4; i++) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + i);
      out.words[half] |= uint64_t(uint32_t(_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_set1_epi8(char(tag)))))) << (16 * i);
    }
#else
    for (int i = 0; i < 64; i++) out.words[half] |= uint64_t(at[i] == tag) << i;
#endif
  }
  return out;
}

constexpr int64_t AHEAD = 24;      // ids between a prefetch and its use
constexpr int64_t CHUNK = 1 << 13; // ids of one item of a loop

// rows[i] = the row of ids[i], or -1, for i in [begin, end).
template <class I> void find_rows(const Vocabulary& v, const I* ids, int64_t begin, int64_t end, int64_t* rows) {
  uint64_t hashes[64];
  for (int64_t i = begin; i < end + 2 * AHEAD; i++) {
    if (i < end) {
      const uint64_t h = hashes[i & 63] = v.hash(ids[i]);
      const uint8_t* tags = v.tags + v.bucket(h) * SLOTS;
      __builtin_prefetch(tags);
      __builtin_prefetch(tags + 64);
    }
    if (const int64_t j = i - AHEAD; j >= begin && j < end) {
      const uint64_t h = hashes[j & 63];
      const int64_t first = v.bucket(h) * SLOTS;
      const Slots found = match(v.tags + first, tag_of(h));
      const int64_t slot = found.words[0] ? __builtin_ctzll(found.words[0]) : found.words[1] ? 64 + __builtin_ctzll(found.words[1]) : -1;
      rows[j] = slot < 0 ? -1 : first + slot;
      if (slot >= 0) __builtin_prefetch(v.entries + first + slot);
    }
    if (const int64_t j = i - 2 * AHEAD; j >= begin) {
      const int64_t id = ids[j];
      if (rows[j] < 0 || v.entries[rows[j]].id == id) continue;
      const uint64_t h = hashes[j & 63];  // another id has the same tag
      const int64_t first = v.bucket(h) * SLOTS;
      rows[j] = -1;
      match(v.tags + first, tag_of(h)).each([&](int64_t slot) {
        if (v.entries[first + slot].id == id) rows[j] = first + slot;
        return rows[j] < 0;
      });
    }
  }
}

// f(begin, end) for chunks of [0, size), on several threads.
template <class F> void for_chunks(int64_t threads, int64_t size, F&& f) {
  parallel_for(threads, (size + CHUNK - 1) / CHUNK, [&](int64_t c) { f(c * CHUNK, std::min(size, (c + 1) * CHUNK)); });
}

template <class F> void with_ids(const Vector& ids, F&& f) {
  if (ids.dtype == I32) f(ids.as<const int32_t>());
  else f(ids.as<const int64_t>());
}

inline int64_t cut(int64_t n, int64_t least, int64_t most) { return n < least ? least : n > most ? most : n; }

// What Python passes: [threads, tags u8[R], entries i64[R, 2], R, shared, salt, ids i[N], valid i64[], rows i64[N]]
inline void find_ids(Reader r) {
  const int64_t threads = r.number();
  Vocabulary v{r.pointer<uint8_t>(), r.pointer<Entry>(), r.number(), uint64_t(r.number()), uint64_t(r.number())};
  const Vector ids = r.vector();
  const int64_t valid = cut(*r.pointer<const int64_t>(), 0, ids.size);
  int64_t* const rows = r.pointer<int64_t>();
  with_ids(ids, [&](const auto* own) {
    for_chunks(threads, valid, [&](int64_t begin, int64_t end) {
      find_rows(v, own, begin, end, rows);
      if (v.shared())
        for (int64_t i = begin; i < end; i++)
          if (rows[i] < 0) rows[i] = v.unknown(v.hash(own[i]));
    });
  });
  std::fill(rows + valid, rows + ids.size, int64_t(-1));
}

// The rows that a step reads. For a vocabulary far larger than the step it is a hash table, so that the cost follows the step.
class Seen {
 public:
  Seen(int64_t rows, int64_t most) : is_map_(rows / 64 <= most) {
    int64_t size = 1;
    if (is_map_) size = (rows + 63) / 64;
    else
      while (size < 2 * most) size *= 2;
    words_.assign(size, is_map_ ? 0 : ~uint64_t(0));
  }
  // Returns whether the row is new here.
  bool add(int64_t row) {
    if (is_map_) {
      const uint64_t bit = uint64_t(1) << (row & 63), before = words_[row >> 6];
      words_[row >> 6] = before | bit;
      return !(before & bit);
    }
    uint64_t& at = words_[place(row)];
    const bool is_new = at != uint64_t(row);
    at = uint64_t(row);
    return is_new;
  }
  // The slots of bucket b that are rows here.
  Slots of_bucket(int64_t b) const {
    if (is_map_) return {{words_[2 * b], words_[2 * b + 1]}};
    Slots out{{0, 0}};
    const auto is_in = [&](int64_t row) { return uint64_t(words_[place(row)] == uint64_t(row)); };
    for (int64_t slot = 0; slot < SLOTS; slot++) out.words[slot >> 6] |= is_in(b * SLOTS + slot) << (slot & 63);
    return out;
  }

 private:
  size_t place(int64_t row) const {
    const size_t mask = words_.size() - 1;
    size_t at = mix(uint64_t(row)) & mask;
    while (words_[at] != ~uint64_t(0) && words_[at] != uint64_t(row)) at = (at + 1) & mask;
    return at;
  }
  bool is_map_;
  std::vector<uint64_t> words_;
};

}  // namespace funcrec

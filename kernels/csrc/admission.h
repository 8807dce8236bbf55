// A step's new ids get rows of a vocabulary. All of it is read first (admit_ids), then written (settle_ids), so that a step that keeps the
// old vocabulary and one that takes its memory run the same code. Missed ids are sorted by their hash. Buckets are ranges of hashes,
// so parts of the sorted ids have buckets of their own, and threads share nothing but the parts.
#pragma once
#include "vocabulary.h"

namespace funcrec {

enum Policy : int64_t { LRU = 0, LFU = 1, DISTANCE_LFU = 2, SCORED = 3 };

// An occurrence of an id without a row.
struct Missed {
  uint64_t hash;
  int64_t place;
};

// A distinct id without a row: missed [begin, end).
struct Candidate {
  uint64_t hash;
  int64_t seen, begin, end;
};

struct Change {
  int64_t row, new_id, old_id, count;
  bool evicted;
};

// A slot that an id may take. The order in which slots are taken: free, expired, then by score; among equal ones the oldest.
struct Place {
  int64_t score;
  uint64_t next;  // kind, ~age and slot, from the highest bits
  Place(int64_t score, uint32_t kind, uint32_t age, int64_t slot)
      : score(score), next(uint64_t(kind) << 40 | uint64_t(~age) << 8 | uint64_t(slot)) {}
  uint32_t kind() const { return next >> 40; }
  int64_t slot() const { return next & 255; }
  bool operator<(const Place& b) const {
    if (kind() != b.kind()) return kind() < b.kind();
    return score != b.score ? score < b.score : next < b.next;
  }
};
enum Kind : uint32_t { FREE = 0, EXPIRED = 1, LIVE = 2 };

struct Admission {
  Vocabulary v;
  const uint8_t* sketch;  // null without one
  int64_t now;
  Vector ids;
  const int64_t* scores;
  int64_t policy, ttl, least, share;

  // The number that the policy compares. The bits of a double >= 0 order as the number does.
  int64_t score(uint32_t age, int64_t count, int64_t row) const {
    if (policy == LFU) return count;
    if (policy == DISTANCE_LFU) return bit_cast<int64_t>(double(count) / (double(age) + 1));
    return policy == SCORED && row >= 0 ? scores[row] : 0;
  }
};

// The places of an id's two counters in the sketch.
struct Counters {
  int64_t first, second;
  Counters(const Vocabulary& v, uint64_t h) {
    const int64_t line = v.bucket(h) * SLOTS, at = h >> 8 & (SLOTS - 1);
    first = line + at, second = line + ((at + 1 + (h >> 15 & 63)) & (SLOTS - 1));
  }
};

// The slots of bucket b in the order in which they are taken; at most `most`, which is all that its candidates can need.
inline void places_of(const Admission& a, const Seen& seen, int64_t b, size_t most, std::vector<Place>& out) {
  const uint8_t* tags = a.v.tags + b * SLOTS;
  out.clear();
  match(tags, 0).each([&](int64_t slot) {
    out.push_back({0, FREE, 0, slot});
    return out.size() < most;
  });
  if (out.size() >= most) return;
  const size_t free = out.size();
  const Slots read = seen.of_bucket(b), none = match(tags, 0);
  Slots{{~(read.words[0] | none.words[0]), ~(read.words[1] | none.words[1])}}.each([&](int64_t slot) {
    const int64_t row = b * SLOTS + slot;
    const Entry e = a.v.entries[row];
    const uint32_t age = uint32_t(a.now) - e.stamp;
    const bool expired = a.ttl > 0 && int64_t(age) > a.ttl;
    out.push_back({expired ? 0 : a.score(age, e.count, row), expired ? EXPIRED : LIVE, age, slot});
    return true;
  });
  const size_t kept = std::min(out.size(), most);
  std::partial_sort(out.begin() + free, out.begin() + kept, out.end());
  out.erase(out.begin() + kept, out.end());
}

struct Part {
  std::vector<Change> changes;
  int64_t refused = 0;
};

// Gives rows to the ids of `missed` in [begin, end), sorted by hash, and writes the row of each occurrence.
inline void admit_part(const Admission& a, const Seen& seen, Missed* missed, int64_t begin, int64_t end, int64_t* rows, Part& part) {
  constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
  std::sort(missed + begin, missed + end, [](const Missed& x, const Missed& y) { return x.hash < y.hash; });
  std::vector<Candidate> candidates;
  std::vector<Place> places;
  const auto write = [&](const Candidate& c, int64_t row) {
    for (int64_t i = c.begin; i < c.end; i++) rows[missed[i].place] = row;
  };
  for (int64_t i = begin; i < end;) {
    const int64_t b = a.v.bucket(missed[i].hash);
    candidates.clear();
    for (; i < end && a.v.bucket(missed[i].hash) == b;) {
      Candidate c{missed[i].hash, 0, i, i};
      while (c.end < end && missed[c.end].hash == c.hash) c.end++;
      c.seen = i = c.end, c.seen -= c.begin;
      if (a.least) {
        const Counters at(a.v, c.hash);
        c.seen += std::min(a.sketch[at.first], a.sketch[at.second]);
      }
      if (c.seen >= a.least && int64_t(mix(c.hash + GAMMA * (uint64_t(a.now) + 1)) >> 11) < a.share) candidates.push_back(c);
      else write(c, a.v.unknown(c.hash)), part.refused++;
    }
    if (candidates.empty()) continue;
    if (i < end && !places.empty() && places.back().kind() != FREE) {  // the next bucket is probably full, too
      const char* next = reinterpret_cast<const char*>(a.v.entries + a.v.bucket(missed[i].hash) * SLOTS);
      for (int64_t at = 0; at < SLOTS * int64_t(sizeof(Entry)); at += 64) __builtin_prefetch(next + at);
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& x, const Candidate& y) { return x.seen > y.seen; });
    places_of(a, seen, b, std::min<size_t>(candidates.size(), SLOTS), places);
    for (size_t j = 0; j < candidates.size(); j++) {
      const Candidate& c = candidates[j];
      const bool compares = a.policy == LFU || a.policy == DISTANCE_LFU;
      if (j >= places.size() || (compares && places[j].kind() == LIVE && a.score(0, c.seen, -1) <= places[j].score)) {
        write(c, a.v.unknown(c.hash)), part.refused++;
        continue;
      }
      const int64_t row = b * SLOTS + places[j].slot(), first = missed[c.begin].place;
      const int64_t id = a.ids.dtype == I32 ? a.ids.as<int32_t>()[first] : a.ids.as<int64_t>()[first];
      const bool evicted = places[j].kind() != FREE;
      part.changes.push_back({row, id, evicted ? a.v.entries[row].id : 0, c.seen - (c.end - c.begin), evicted});
      write(c, row);
    }
  }
}

// Groups the missed ids by parts of whole buckets. Returns where each part begins, and where the last ends.
inline std::vector<int64_t> partition(const Vocabulary& v, std::vector<Missed>& missed) {
  const int64_t buckets = v.rows / SLOTS, most = std::min<int64_t>(4096, missed.size() / 64 + 1);
  int shift = 0;
  while (buckets >> shift > most) shift++;
  std::vector<int64_t> begins((buckets >> shift) + 2, 0);
  for (const Missed& m : missed) begins[(v.bucket(m.hash) >> shift) + 1]++;
  for (size_t p = 1; p < begins.size(); p++) begins[p] += begins[p - 1];
  std::vector<int64_t> next(begins.begin(), begins.end() - 1);
  std::vector<Missed> moved(missed.size());
  for (const Missed& m : missed) moved[next[v.bucket(m.hash) >> shift]++] = m;
  missed.swap(moved);
  return begins;
}

// What an admission writes. old_ids and evicted may be null.
struct Admitted {
  int64_t *rows, *changed, *new_ids, *old_ids;
  uint8_t* evicted;
  int64_t* counts;
  uint8_t* missed;
  int64_t* numbers;
};

// Admits the first `valid` ids.
inline void admit(int64_t threads, const Admission& a, int64_t valid, const Admitted& out) {
  const int64_t n = a.ids.size;
  std::vector<Missed> missed;
  Seen seen(a.v.rows, valid);
  int64_t hits = 0;
  with_ids(a.ids, [&](const auto* ids) {
    for_chunks(threads, valid, [&](int64_t begin, int64_t end) { find_rows(a.v, ids, begin, end, out.rows); });
    for (int64_t i = 0; i < valid; i++) {
      out.missed[i] = out.rows[i] < 0;
      if (out.rows[i] >= 0) hits += seen.add(out.rows[i]);
      else missed.push_back({a.v.hash(ids[i]), i});
    }
  });
  std::fill(out.rows + valid, out.rows + n, int64_t(-1));
  std::fill(out.missed + valid, out.missed + n, uint8_t(0));
  const std::vector<int64_t> begins = partition(a.v, missed);
  std::vector<Part> parts(begins.size() - 1);
  parallel_for(threads, int64_t(parts.size()), [&](int64_t p) {
    admit_part(a, seen, missed.data(), begins[p], begins[p + 1], out.rows, parts[p]);
  });
  int64_t at = 0, num_evicted = 0, refused = 0;
  for (const Part& part : parts) {
    refused += part.refused;
    for (const Change& c : part.changes) {
      out.changed[at] = c.row, out.new_ids[at] = c.new_id, out.counts[at] = c.count;
      if (out.old_ids) out.old_ids[at] = c.old_id, out.evicted[at] = c.evicted;
      at++, num_evicted += c.evicted;
    }
  }
  std::fill(out.changed + at, out.changed + n, int64_t(-1));
  for (int64_t* x : {out.new_ids, out.old_ids, out.counts})
    if (x) std::fill(x + at, x + n, int64_t(0));
  if (out.evicted) std::fill(out.evicted + at, out.evicted + n, uint8_t(0));
  out.numbers[0] = at, out.numbers[1] = num_evicted, out.numbers[2] = hits, out.numbers[3] = refused;
}

// What Python passes: [threads, tags, entries, R, shared, salt, sketch u8[R] or 0, now i64[], ids i[N], valid i64[], scores i64[R] or 0,
// policy, ttl, least, share; rows, changed, new_ids, old_ids i64[N], evicted b[N], counts i64[N], missed b[N], numbers i64[4]]
inline void admit_ids(Reader r) {
  const int64_t threads = r.number();
  Admission a;
  a.v = {r.pointer<uint8_t>(), r.pointer<Entry>(), r.number(), uint64_t(r.number()), uint64_t(r.number())};
  a.sketch = r.pointer<const uint8_t>(), a.now = *r.pointer<const int64_t>(), a.ids = r.vector();
  const int64_t valid = cut(*r.pointer<const int64_t>(), 0, a.ids.size);
  a.scores = r.pointer<const int64_t>(), a.policy = r.number(), a.ttl = r.number(), a.least = r.number(), a.share = r.number();
  Admitted out{r.pointer<int64_t>(), r.pointer<int64_t>(), r.pointer<int64_t>(), r.pointer<int64_t>(), r.pointer<uint8_t>()};
  out.counts = r.pointer<int64_t>(), out.missed = r.pointer<uint8_t>(), out.numbers = r.pointer<int64_t>();
  admit(threads, a, valid, out);
}

// One part of the sketch: counts the missed ids of buckets [first, last), and halves each line that became full.
inline void count_missed(const Vocabulary& v, uint8_t* sketch, int64_t least, const Vector& ids, const uint8_t* missed, int64_t first, int64_t last) {
  std::vector<int64_t> touched;
  with_ids(ids, [&](const auto* own) {
    for (int64_t i = 0; i < ids.size; i++) {
      if (!missed[i]) continue;
      const uint64_t h = v.hash(own[i]);
      const int64_t b = v.bucket(h);
      if (b < first || b >= last) continue;
      const Counters at(v, h);
      sketch[at.first] += sketch[at.first] < 255;
      sketch[at.second] += sketch[at.second] < 255;
      touched.push_back(b);
    }
  });
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (const int64_t b : touched) {
    int64_t sum = 0;
    for (int64_t i = 0; i < SLOTS; i++) sum += sketch[b * SLOTS + i];
    if (sum >= SLOTS / 2 * least)
      for (int64_t i = 0; i < SLOTS; i++) sketch[b * SLOTS + i] >>= 1;
  }
}

// What `admit` found. changed, new_ids, counts: `num_changed` each.
struct Found {
  Vector ids;
  const int64_t* rows;
  const uint8_t* missed;
  const int64_t *changed, *new_ids, *counts;
  int64_t num_changed;
};

// Each part has a range of buckets, so that rows are written in the order of ids. sketch: null without one.
inline void settle(int64_t threads, const Vocabulary& v, uint8_t* sketch, uint32_t now, const Found& f, int64_t least) {
  const int64_t n = f.ids.size, buckets = v.rows / SLOTS, parts = n < CHUNK || threads < 2 ? 1 : std::min(threads, buckets);
  parallel_for(threads, parts, [&](int64_t p) {
    const int64_t first = buckets * p / parts, last = buckets * (p + 1) / parts;
    const uint64_t begin = first * SLOTS, size = (last - first) * SLOTS;
    for (int64_t i = 0; i < f.num_changed; i++) {
      const int64_t row = f.changed[i];
      if (uint64_t(row) - begin >= size) continue;
      v.tags[row] = tag_of(v.hash(f.new_ids[i]));
      v.entries[row] = {f.new_ids[i], uint32_t(cut(f.counts[i], 0, 0xffffffff)), now};
    }
    for (int64_t i = 0; i < n; i++) {
      if (i + AHEAD < n && uint64_t(f.rows[i + AHEAD]) - begin < size) __builtin_prefetch(v.entries + f.rows[i + AHEAD], 1);
      if (uint64_t(f.rows[i]) - begin >= size) continue;
      Entry& e = v.entries[f.rows[i]];
      e.stamp = now;
      e.count += e.count != 0xffffffffu;
    }
    if (least) count_missed(v, sketch, least, f.ids, f.missed, first, last);
  });
}

// What Python passes: [threads, tags, entries, R, shared, salt, sketch or 0, now i64[], ids i[N], rows i64[N], missed b[N], changed i64[M],
// new_ids, counts i64[M], M, numbers i64[4], least]
inline void settle_ids(Reader r) {
  const int64_t threads = r.number();
  const Vocabulary v{r.pointer<uint8_t>(), r.pointer<Entry>(), r.number(), uint64_t(r.number()), uint64_t(r.number())};
  uint8_t* const sketch = r.pointer<uint8_t>();
  const uint32_t now = uint32_t(*r.pointer<const int64_t>());
  Found f{r.vector(), r.pointer<const int64_t>(), r.pointer<const uint8_t>()};
  f.changed = r.pointer<const int64_t>(), f.new_ids = r.pointer<const int64_t>(), f.counts = r.pointer<const int64_t>();
  const int64_t places = r.number();
  f.num_changed = cut(*r.pointer<const int64_t>(), 0, places);
  settle(threads, v, sketch, now, f, r.number());
}

}  // namespace funcrec

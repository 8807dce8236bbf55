// Operations on several vocabularies whose ids are columns of bags: one call for all. The rows are those of calls one by one.
// A column belongs to a vocabulary and has bags of one buffer of ids. kernels/reference_vocabularies.py has the same in torch.
#pragma once
#include "admission.h"

namespace funcrec {

struct Column {
  int64_t vocabulary, buffer, first_bag, num_bags, max_length;
};

struct Buffer {
  Vector ids;
  Ints offsets;
  int64_t begin;  // the number of ids of the buffers before
};

// Ids [begin, end) of a buffer.
struct Stretch {
  int64_t buffer, begin, end;
};

inline std::vector<Buffer> buffers_of(Reader& r, std::vector<std::vector<int64_t>>& memory) {
  std::vector<Buffer> out;
  int64_t begin = 0;
  const int64_t n = r.number();
  memory.resize(n);
  for (int64_t k = 0; k < n; k++) {
    const Vector ids = r.vector();
    out.push_back({ids, ascending(Ints(r.vector()), memory[k]), begin});
    begin += ids.size;
  }
  return out;
}

// The ids of each vocabulary's columns, at most `max_length` (0: all) of each bag, in the order of columns. Neighbours are joined.
inline std::vector<std::vector<Stretch>> stretches_of(Reader& r, const std::vector<Buffer>& buffers, int64_t vocabularies) {
  std::vector<std::vector<Stretch>> out(vocabularies);
  for (int64_t n = r.number(); n > 0; n--) {
    const Column c{r.number(), r.number(), r.number(), r.number(), r.number()};
    const bool is_there = c.vocabulary >= 0 && c.vocabulary < vocabularies && c.buffer >= 0 && c.buffer < int64_t(buffers.size());
    if (!is_there || c.first_bag < 0 || c.num_bags < 0) throw std::out_of_range("a column");
    const Buffer& b = buffers[c.buffer];
    if (c.first_bag >= b.offsets.size || c.num_bags >= b.offsets.size - c.first_bag) throw std::out_of_range("a column's bags");
    std::vector<Stretch>& own = out[c.vocabulary];
    const auto add = [&](int64_t begin, int64_t end) {
      if (begin == end) return;
      if (!own.empty() && own.back().buffer == c.buffer && own.back().end == begin) own.back().end = end;
      else own.push_back({c.buffer, begin, end});
    };
    if (c.max_length > 0) {
      for (int64_t i = 0; i < c.num_bags; i++) {
        const Range at = bag(b.offsets, c.first_bag + i, b.ids.size, c.max_length);
        add(at.begin, at.end);
      }
    } else {
      add(cut(b.offsets[c.first_bag], 0, b.ids.size), cut(b.offsets[c.first_bag + c.num_bags], 0, b.ids.size));
    }
  }
  return out;
}

inline int64_t size_of(const std::vector<Stretch>& stretches) {
  int64_t n = 0;
  for (const Stretch& s : stretches) n += s.end - s.begin;
  return n;
}

// What Python passes: [threads, V, (tags, entries, R, shared, salt) each, 1 buffer (ids i[N], offsets), n and columns, rows i64[N]]
// An id in no column stays as it is.
inline void find_columns(Reader r) {
  const int64_t threads = r.number();
  std::vector<Vocabulary> vocabularies;
  for (int64_t n = r.number(); n > 0; n--)
    vocabularies.push_back({r.pointer<uint8_t>(), r.pointer<Entry>(), r.number(), uint64_t(r.number()), uint64_t(r.number())});
  std::vector<std::vector<int64_t>> memory;
  const std::vector<Buffer> buffers = buffers_of(r, memory);
  const auto stretches = stretches_of(r, buffers, vocabularies.size());
  int64_t* const rows = r.pointer<int64_t>();
  struct Item { int64_t vocabulary, begin, end; };
  std::vector<Item> items;
  for (size_t v = 0; v < stretches.size(); v++)
    for (const Stretch& s : stretches[v])
      for (int64_t begin = s.begin; begin < s.end; begin += CHUNK) items.push_back({int64_t(v), begin, std::min(s.end, begin + CHUNK)});
  const Vector ids = buffers.at(0).ids;
  with_ids(ids, [&](const auto* own) {
    std::copy(own, own + ids.size, rows);
    parallel_for(ids.size < CHUNK ? 1 : threads, items.size(), [&](int64_t k) {
      const auto [at, begin, end] = items[k];
      const Vocabulary& v = vocabularies[at];
      find_rows(v, own, begin, end, rows);
      if (v.shared())
        for (int64_t i = begin; i < end; i++)
          if (rows[i] < 0) rows[i] = v.unknown(v.hash(own[i]));
    });
  });
}

// f(number of threads, v) for vocabularies [0, n): several at once if there are as many as threads, else one by one on all threads.
template <class F> void for_vocabularies(int64_t threads, int64_t n, int64_t ids, F&& f) {
  if (ids < CHUNK) threads = 1;
  if (n >= threads) return parallel_for(threads, n, [&](int64_t v) { f(1, v); });
  for (int64_t v = 0; v < n; v++) f(threads, v);
}

// One vocabulary of a step, and its ids end to end.
struct Step {
  Vocabulary v;
  int64_t* now;
  uint8_t* sketch;
  const int64_t* scores;
  int64_t policy, ttl, least, share, places;  // places: the most ids
  int64_t begin = 0;                          // the places of the vocabularies before
};

inline std::vector<Step> steps_of(Reader& r) {
  std::vector<Step> out;
  int64_t begin = 0;
  for (int64_t n = r.number(); n > 0; n--) {
    Step s{{r.pointer<uint8_t>(), r.pointer<Entry>(), r.number(), 0, 0}, r.pointer<int64_t>(), r.pointer<uint8_t>(), r.pointer<const int64_t>()};
    s.policy = r.number(), s.ttl = r.number(), s.least = r.number(), s.share = r.number();
    s.v.how = r.number(), s.v.salt = r.number(), s.places = r.number();
    s.begin = begin, begin += s.places;
    out.push_back(s);
  }
  return out;
}

inline std::vector<int64_t> ids_of(const std::vector<Buffer>& buffers, const std::vector<Stretch>& stretches) {
  std::vector<int64_t> out;
  out.reserve(size_of(stretches));
  for (const Stretch& s : stretches)
    with_ids(buffers[s.buffer].ids, [&](const auto* ids) { out.insert(out.end(), ids + s.begin, ids + s.end); });
  return out;
}

// f(place among all ids, place among those of the stretches, number of ids)
template <class F> void for_stretches(const std::vector<Buffer>& buffers, const std::vector<Stretch>& stretches, F&& f) {
  int64_t at = 0;
  for (const Stretch& s : stretches) f(buffers[s.buffer].begin + s.begin, at, s.end - s.begin), at += s.end - s.begin;
}

// What Python passes: [threads, V, steps; K, buffers; n and columns; rows i64[N] of all buffers' ids, missed b[N]; changed, new_ids, counts
// i64[P] by vocabulary, numbers i64[V, 4]]. rows are -1 for ids in no column.
inline void admit_columns(Reader r) {
  const int64_t threads = r.number();
  const std::vector<Step> steps = steps_of(r);
  std::vector<std::vector<int64_t>> memory;
  const std::vector<Buffer> buffers = buffers_of(r, memory);
  const auto stretches = stretches_of(r, buffers, steps.size());
  int64_t* const rows = r.pointer<int64_t>();
  uint8_t* const missed = r.pointer<uint8_t>();
  int64_t *const changed = r.pointer<int64_t>(), *const new_ids = r.pointer<int64_t>(), *const counts = r.pointer<int64_t>();
  int64_t* const numbers = r.pointer<int64_t>();
  const int64_t all = buffers.empty() ? 0 : buffers.back().begin + buffers.back().ids.size;
  std::fill(rows, rows + all, int64_t(-1));
  std::fill(missed, missed + all, uint8_t(0));
  for (size_t v = 0; v < steps.size(); v++)
    if (size_of(stretches[v]) > steps[v].places) throw std::out_of_range("more ids than places");
  for_vocabularies(threads, steps.size(), all, [&](int64_t own_threads, int64_t at) {
    const Step& s = steps[at];
    std::vector<int64_t> ids = ids_of(buffers, stretches[at]), own_rows(ids.size());
    std::vector<uint8_t> own_missed(ids.size());
    const int64_t n = ids.size();
    const Vector whole{reinterpret_cast<char*>(ids.data()), I64, n};
    const Admission a{s.v, s.sketch, int64_t(uint64_t(*s.now) + 1), whole, s.scores, s.policy, s.ttl, s.least, s.share};
    int64_t* const places[] = {changed + s.begin, new_ids + s.begin, counts + s.begin};
    admit(own_threads, a, n, {own_rows.data(), places[0], places[1], nullptr, nullptr, places[2], own_missed.data(), numbers + 4 * at});
    for (int i = 0; i < 3; i++) std::fill(places[i] + n, places[i] + s.places, int64_t(i ? 0 : -1));
    for_stretches(buffers, stretches[at], [&](int64_t to, int64_t from, int64_t size) {
      std::copy_n(own_rows.data() + from, size, rows + to);
      std::copy_n(own_missed.data() + from, size, missed + to);
    });
  });
}

// The numbers of admit_columns. It writes the changes, and now + 1.
inline void settle_columns(Reader r) {
  const int64_t threads = r.number();
  const std::vector<Step> steps = steps_of(r);
  std::vector<std::vector<int64_t>> memory;
  const std::vector<Buffer> buffers = buffers_of(r, memory);
  const auto stretches = stretches_of(r, buffers, steps.size());
  const int64_t* const rows = r.pointer<const int64_t>();
  const uint8_t* const missed = r.pointer<const uint8_t>();
  const int64_t *const changed = r.pointer<const int64_t>(), *const new_ids = r.pointer<const int64_t>();
  const int64_t* const counts = r.pointer<const int64_t>();
  const int64_t* const numbers = r.pointer<const int64_t>();
  const int64_t all = buffers.empty() ? 0 : buffers.back().begin + buffers.back().ids.size;
  for_vocabularies(threads, steps.size(), all, [&](int64_t own_threads, int64_t at) {
    const Step& s = steps[at];
    const int64_t n = size_of(stretches[at]);
    std::vector<int64_t> ids, own_rows(n);
    std::vector<uint8_t> own_missed(s.least ? n : 0);
    if (s.least) ids = ids_of(buffers, stretches[at]);
    for_stretches(buffers, stretches[at], [&](int64_t from, int64_t to, int64_t size) {
      std::copy_n(rows + from, size, own_rows.data() + to);
      if (s.least) std::copy_n(missed + from, size, own_missed.data() + to);
    });
    const uint64_t now = uint64_t(*s.now) + 1;
    const Found f{{reinterpret_cast<char*>(ids.data()), I64, n}, own_rows.data(), own_missed.data(), changed + s.begin, new_ids + s.begin,
                  counts + s.begin, cut(numbers[4 * at], 0, s.places)};
    settle(own_threads, s.v, s.sketch, uint32_t(now), f, s.least);
    *s.now = int64_t(now);
  });
}

}  // namespace funcrec

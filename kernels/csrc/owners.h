// Ids as blocks for the ranks that own their rows, written directly into the memory that is sent. A rank's ids keep the order of lanes
// and bags, so that its block is one stream. Only the place where each chunk's part of a stream begins must be known; with one chunk
// nothing is counted before it is written.
#pragma once
#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "abi.h"
#include "jagged.h"
#include "parallel.h"

namespace funcrec {

// The rows of a lane's table on one rank: row r of the table is the rank's row r + shift. told: the place of the lane's bag lengths in the
// rank's block, -1 for none.
struct OwnedPart { int64_t rank, shift, told; };

struct OwnedLane {
  int64_t first_bag, max_length;
  Owner owner;  // the owner of the row's part
  std::vector<OwnedPart> parts;
};

struct OwnerBlocks {
  Vector ids;
  Ints offsets;
  std::vector<OwnedLane> lanes;
  int64_t num_bags, num_ranks, room;
  Matrix blocks;  // [n, room + K * B]
  int64_t* counts;
  int64_t* places;  // null if the caller does not want places

  Range bag_of(const OwnedLane& lane, int64_t b) const {
    return bag(offsets, lane.first_bag + b, ids.size, lane.max_length);
  }
};

// f(lane, bags) for each lane with bags in [first, last), where all lanes' bags are numbered in order.
template <class F> void for_lanes(const OwnerBlocks& to, int64_t first, int64_t last, F&& f) {
  for (int64_t at = first; at < last;) {
    const int64_t lane = at / to.num_bags, begin = lane * to.num_bags;
    const int64_t end = std::min(last, begin + to.num_bags);
    f(to.lanes[lane], Range{at - begin, end - begin});
    at = end;
  }
}

// next[r] += the number of ids of these bags that rank r owns.
template <class I> void count_owned(const OwnerBlocks& to, const OwnedLane& lane, Range bags, int64_t* next) {
  const I* ids = to.ids.as<I>();
  for (int64_t b = bags.begin; b < bags.end; b++) {
    const Range r = to.bag_of(lane, b);
    for (int64_t i = r.begin; i < r.end; i++) {
      const int64_t part = lane.owner(ids[i]);
      if (part >= 0) next[lane.parts[part].rank]++;
    }
  }
}

// A lane of several parts: each id goes to the stream of its owner. next: the place of a rank's next row.
template <class I, class O>
void write_parts(const OwnerBlocks& to, const OwnedLane& lane, Range bags, int64_t* next, const int64_t*) {
  const I* ids = to.ids.as<I>();
  O* const blocks = to.blocks.as<O>();
  const Owner owner = lane.owner;  // a copy: the compiler must assume that the writes below could change lane.owner
  const OwnedPart* const parts = lane.parts.data();
  int64_t* const places = to.places;
  const int64_t room = to.room, stride = to.blocks.stride;
  for (int64_t b = bags.begin; b < bags.end; b++) {
    const Range r = to.bag_of(lane, b);
    for (int64_t i = r.begin; i < r.end; i++) {
      const int64_t row = ids[i], part = owner(row);
      if (part < 0) continue;
      const OwnedPart p = parts[part];
      const int64_t place = next[p.rank]++;
      O* block = blocks + p.rank * stride;
      if (p.told >= 0) block[p.told + b]++;
      if (place >= room) continue;  // The id is counted but not written, so the caller sees that there were too many.
      block[place] = O(row + p.shift);
      if (places) places[i] = p.rank * room + place;
    }
  }
}

// A lane of one part: a whole bag goes to one stream, and the next id overwrites an id without owner. ends: where the chunk's part of
// each stream ends.
template <class I, class O>
void write_whole(const OwnerBlocks& to, const OwnedLane& lane, Range bags, int64_t* next, const int64_t* ends) {
  const I* ids = to.ids.as<I>();
  const OwnedPart& p = lane.parts[0];
  O* block = to.blocks.as<O>() + p.rank * to.blocks.stride;
  int64_t place = next[p.rank];
  const uint64_t end = lane.owner.end;
  const int64_t limit = std::min(to.room, ends[p.rank]);
  for (int64_t b = bags.begin; b < bags.end; b++) {
    const Range r = to.bag_of(lane, b);
    const int64_t before = place;
    if (place + r.size() <= limit && !to.places) {
      for (int64_t i = r.begin; i < r.end; i++) {
        const int64_t row = ids[i];
        block[place] = O(uint64_t(row) + uint64_t(p.shift));  // for a row outside the table this is an arbitrary number
        place += uint64_t(row) < end;
      }
    } else {
      for (int64_t i = r.begin; i < r.end; i++) {
        const int64_t row = ids[i];
        if (uint64_t(row) >= end) continue;
        if (place < to.room) {
          block[place] = O(row + p.shift);
          if (to.places) to.places[i] = p.rank * to.room + place;
        }
        place++;
      }
    }
    if (p.told >= 0) block[p.told + b] = O(place - before);
  }
  next[p.rank] = place;
}

template <class I, class O> void owner_blocks_as(int64_t threads, const OwnerBlocks& to) {
  const int64_t n = to.num_ranks, all = int64_t(to.lanes.size()) * to.num_bags;
  const int64_t chunks = threads > 1 && to.ids.size * 8 > MIN_BYTES ? std::max<int64_t>(1, std::min(all, 4 * threads)) : 1;
  std::vector<int64_t> next(chunks * n, 0);  // per chunk and rank: first a count, then the place of its next row
  const int64_t told = to.blocks.columns - to.room;  // columns of the bags' lengths, to which counts are added
  for (int64_t r = 0; r < n; r++) {
    O* block = to.blocks.as<O>() + r * to.blocks.stride;
    zero_bytes(reinterpret_cast<char*>(block + to.room), told * int64_t(sizeof(O)));
  }
  if (to.places) std::fill(to.places, to.places + to.ids.size, -1);
  auto lanes_of = [&](int64_t k, auto&& f) { for_lanes(to, all * k / chunks, all * (k + 1) / chunks, f); };
  if (chunks > 1)
    parallel_for(threads, chunks, [&](int64_t k) {
      lanes_of(k, [&](const OwnedLane& lane, Range bags) { count_owned<I>(to, lane, bags, &next[k * n]); });
    });
  for (int64_t r = 0; r < n; r++) {
    int64_t total = 0;  // counts become beginnings: the sum of the chunks before
    for (int64_t k = 0; k < chunks; k++) total += std::exchange(next[k * n + r], total);
  }
  // A chunk's part of a stream ends where the next chunk's begins: a whole bag that ends before that is written without a test of each id
  std::vector<int64_t> ends(next.begin() + n, next.end());
  ends.resize(chunks * n, to.room);
  parallel_for(threads, chunks, [&](int64_t k) {
    lanes_of(k, [&](const OwnedLane& lane, Range bags) {
      auto write = lane.parts.size() == 1 ? write_whole<I, O> : write_parts<I, O>;
      write(to, lane, bags, &next[k * n], &ends[k * n]);
    });
  });
  for (int64_t r = 0; r < n; r++) {  // the last chunk ends where its stream ends
    to.counts[r] = next[(chunks - 1) * n + r];
    O* block = to.blocks.as<O>() + r * to.blocks.stride;
    std::fill(block + std::min(to.counts[r], to.room), block + to.room, O(-1));
  }
}

inline std::vector<OwnedLane> owned_lanes(Reader in, int64_t num_numbers) {
  const int64_t* end = in.at + num_numbers;
  std::vector<OwnedLane> lanes;
  while (in.at < end) {
    if (end - in.at < 5 || in.at[4] < 0 || in.at[4] > (end - in.at - 5) / 2) throw std::out_of_range("a lane's parts");
    const int64_t first_bag = in.number(), max_length = in.number(), num_rows = in.number(), part = in.number();
    const int64_t num_parts = in.number();
    OwnedLane lane{first_bag, max_length, Owner(std::max<int64_t>(part, 1), num_parts), {}};
    lane.owner.end = std::min(lane.owner.end, uint64_t(std::max<int64_t>(num_rows, 0)));
    for (int64_t i = 0; i < num_parts; i++)
      lane.parts.push_back({in.at[i], int64_t(uint64_t(in.at[num_parts + i]) - uint64_t(i) * uint64_t(part)), -1});
    in.at += 2 * num_parts;
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

// Whether two lanes read the same bags.
inline bool is_shared(const std::vector<OwnedLane>& lanes, int64_t num_bags) {
  std::vector<int64_t> firsts;
  for (const OwnedLane& lane : lanes) firsts.push_back(lane.first_bag);
  std::sort(firsts.begin(), firsts.end());
  for (size_t i = 1; i < firsts.size(); i++)
    if (firsts[i - 1] >= 0 && firsts[i] - firsts[i - 1] < num_bags) return true;
  return false;
}

// ids [N], offsets -> blocks [n, room + K * B]: each rank's rows, lane by lane and bag by bag, then -1, then the lengths of the bags of
// its K slots; counts [n], of all owned rows; places [N], each id's place among the n * room.
inline void owner_blocks(Reader in) {
  const int64_t threads = in.number();
  const Vector ids = in.vector(), offsets = in.vector();
  std::vector<int64_t> memory;
  OwnerBlocks to{ids, ascending(Ints(offsets), memory), {}, 0, 0, 0, {}, nullptr, nullptr};
  const int64_t num_numbers = in.number();
  to.lanes = owned_lanes(in, num_numbers), in.at += num_numbers;
  const int64_t num_slots = in.number();
  const int64_t* slots = in.at;
  in.at += num_slots;
  to.num_bags = in.number(), to.num_ranks = in.number(), to.room = in.number();
  to.blocks = in.matrix(), to.counts = in.pointer<int64_t>();
  const bool placed = in.number();
  to.places = in.pointer<int64_t>();
  if (!placed) to.places = nullptr;
  const int64_t each = num_slots / std::max<int64_t>(to.num_ranks, 1);
  if (placed && is_shared(to.lanes, to.num_bags)) throw std::out_of_range("ids of two lanes");
  for (OwnedLane& lane : to.lanes) {
    if (lane.first_bag < 0 || lane.first_bag > offsets.size - 1 - to.num_bags)
      throw std::out_of_range("a lane's bags");
    for (OwnedPart& p : lane.parts) {
      if (p.rank < 0 || p.rank >= to.num_ranks) throw std::out_of_range("a rank");
      const int64_t* own = slots + p.rank * each;
      const int64_t k = std::find(own, own + each, &lane - to.lanes.data()) - own;
      if (k < each) p.told = to.room + k * to.num_bags;
    }
  }
  with_int_type(ids.dtype, [&](auto tag) {
    using I = typename decltype(tag)::type;
    to.blocks.dtype == I64 ? owner_blocks_as<I, int64_t>(threads, to) : owner_blocks_as<I, int32_t>(threads, to);
  });
}

}  // namespace funcrec

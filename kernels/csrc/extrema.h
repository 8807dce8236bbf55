// The greatest or the least value of each bag and column, and the place of the first such value.
//
//   out[b, j] = values[p, j],  places[b, j] = p:  the first p in bag b with no better value in the bag;  a NaN is better than any number
//
// One pass over the values, bag by bag. A bag is one thread's, so no bit depends on the number of threads.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "jagged.h"
#include "parallel.h"

namespace funcrec {

// The order of numbers of 16 bits in integers: +0 and -0 are equal, and NaN is the best.
template <bool greatest, int mantissa_bits> struct Halves {
  using Element = uint16_t;
  static int16_t key(uint16_t bits) {
    const int16_t magnitude = int16_t(bits & 0x7fff), infinity = int16_t(0x7fff & -(1 << mantissa_bits));
    const int16_t signed_magnitude = bits & 0x8000 ? int16_t(-magnitude) : magnitude;
    return magnitude > infinity ? (greatest ? std::numeric_limits<int16_t>::max() : std::numeric_limits<int16_t>::min()) : signed_magnitude;
  }
  static bool is_better(uint16_t x, uint16_t best) { return greatest ? key(x) > key(best) : key(x) < key(best); }
  static uint16_t limit() { return uint16_t((greatest ? 0x8000 : 0) | (0x7fff & -(1 << mantissa_bits))); }
};

template <bool greatest, class E> struct Numbers {
  using Element = E;
  static bool is_better(E x, E best) {
    if constexpr (std::is_floating_point_v<E>) return (best == best) & !(greatest ? x <= best : x >= best);
    else return greatest ? x > best : x < best;
  }
  static E limit() {
    using L = std::numeric_limits<E>;
    if constexpr (std::is_floating_point_v<E>) return greatest ? -L::infinity() : L::infinity();
    else return greatest ? L::min() : L::max();
  }
};

// c ? a : b without a branch, which numbers in any order would mispredict.
template <class E> inline E choose(bool c, E a, E b) {
  using U = std::conditional_t<sizeof(E) == 8, uint64_t, std::conditional_t<sizeof(E) == 4, uint32_t, std::conditional_t<sizeof(E) == 2, uint16_t, uint8_t>>>;
  U x, y;
  std::memcpy(&x, &a, sizeof x), std::memcpy(&y, &b, sizeof y);
  const U mask = U(0) - U(c), z = (x & mask) | (y & ~mask);
  E out;
  std::memcpy(&out, &z, sizeof out);
  return out;
}

constexpr int64_t EXTREMA_COLUMNS = 256;  // the best values of so many columns stay in the first cache

// W columns of a bag, too few for vectors, in registers.
template <class Order, bool placed, int W, class E, class P>
void extrema_of_few(const E* from, int64_t stride, int64_t length, E* out, P* places) {
  E best[W];
  P place[W] = {};
  for (int j = 0; j < W; j++) best[j] = from[j];
  for (int64_t i = 1; i < length; i++)
    for (int j = 0; j < W; j++) {
      const E x = from[i * stride + j];
      const bool better = Order::is_better(x, best[j]);
      best[j] = choose(better, x, best[j]);
      if constexpr (placed) place[j] = choose(better, P(i), place[j]);
    }
  for (int j = 0; j < W; j++) out[j] = best[j], places[j] = place[j];
}

// One bag's columns [0, n). A place is counted from the bag's begin.
template <class Order, bool placed, class E, class P>
void extrema_of_bag(const E* __restrict from, int64_t stride, int64_t length, int64_t n, E* __restrict best, P* __restrict place) {
  for (int64_t j = 0; j < n; j++) best[j] = from[j];
  if constexpr (placed) std::fill(place, place + n, P(0));
  for (int64_t i = 1; i < length; i++) {
    const E* __restrict x = from + i * stride;
    for (int64_t j = 0; j < n; j++) {
      const bool better = Order::is_better(x[j], best[j]);
      best[j] = choose(better, x[j], best[j]);
      if constexpr (placed) place[j] = choose(better, P(i), place[j]);
    }
  }
}

template <class Order, class P>
void extrema_as(int64_t threads, const Matrix& values, const Ints& offsets, char* out_bytes, int64_t* places) {
  using E = typename Order::Element;
  const int64_t width = values.columns, num_values = values.rows, num_bags = offsets.size - 1;
  E* out = reinterpret_cast<E*>(out_bytes);
  for_bags(threads, num_bags, (num_values + num_bags) * width * int64_t(sizeof(E)), [&](int64_t b, int64_t) {
    const Range r = bag(offsets, b, num_values, 0);
    E* best = out + b * width;
    if (r.size() == 0) {
      std::fill(best, best + width, Order::limit());
      if (places) std::fill(places + b * width, places + (b + 1) * width, num_values);
      return;
    }
    const E* from = values.as<E>() + r.begin * values.stride;
    for (int64_t first = 0, n; first < width; first += n) {
      const int64_t left = width - first;
      const E* x = from + first;
      P place[EXTREMA_COLUMNS];
      if (left >= 8) n = std::min(EXTREMA_COLUMNS, left & -8);
      else n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
      auto run = [&](auto tag) {
        constexpr bool placed = decltype(tag)::value;
        if (n == 1) extrema_of_few<Order, placed, 1>(x, values.stride, r.size(), best + first, place);
        else if (n == 2) extrema_of_few<Order, placed, 2>(x, values.stride, r.size(), best + first, place);
        else if (n == 4) extrema_of_few<Order, placed, 4>(x, values.stride, r.size(), best + first, place);
        else extrema_of_bag<Order, placed>(x, values.stride, r.size(), n, best + first, place);
      };
      places ? run(std::true_type{}) : run(std::false_type{});
      if (places)
        for (int64_t j = 0; j < n; j++) places[b * width + first + j] = r.begin + int64_t(place[j]);
    }
  });
}

enum Kind : int64_t { KIND_F32, KIND_F16, KIND_BF16, KIND_F64, KIND_I32, KIND_I64, KIND_I16, KIND_I8, KIND_U8 };

template <bool greatest, class F> void with_order(int64_t kind, F&& f) {
  switch (kind) {
    case KIND_F16: return f(Halves<greatest, 10>{});
    case KIND_BF16: return f(Halves<greatest, 7>{});
    case KIND_F64: return f(Numbers<greatest, double>{});
    case KIND_I32: return f(Numbers<greatest, int32_t>{});
    case KIND_I64: return f(Numbers<greatest, int64_t>{});
    case KIND_I16: return f(Numbers<greatest, int16_t>{});
    case KIND_I8: return f(Numbers<greatest, int8_t>{});
    case KIND_U8: return f(Numbers<greatest, uint8_t>{});
    default: return f(Numbers<greatest, float>{});
  }
}

// values [N, C] of any of the kinds (the matrix's dtype is a Kind); offsets; greatest; out [B, C]; placed; places i64[B, C] if placed.
inline void bag_extrema(Reader in) {
  const int64_t threads = in.number();
  const Matrix values = in.matrix();
  std::vector<int64_t> memory;
  const Ints offsets = ascending(Ints(in.vector()), memory);
  const bool greatest = in.number();
  char* out = in.pointer<char>();
  const bool placed = in.number();
  int64_t* const memory_of_places = in.pointer<int64_t>();
  int64_t* const places = placed ? memory_of_places : nullptr;
  auto run = [&](auto order) {
    using E = typename decltype(order)::Element;
    using P = std::conditional_t<sizeof(E) == 8, int64_t, int32_t>;
    if (values.rows > std::numeric_limits<int32_t>::max()) extrema_as<decltype(order), int64_t>(threads, values, offsets, out, places);
    else extrema_as<decltype(order), P>(threads, values, offsets, out, places);
  };
  greatest ? with_order<true>(values.dtype, run) : with_order<false>(values.dtype, run);
}

template <class E>
void put_at_places(int64_t threads, const E* d, const int64_t* places, const Ints& offsets, int64_t num_values, int64_t width, E* out) {
  const int64_t num_bags = offsets.size - 1;
  const int64_t begin = num_bags ? bag(offsets, 0, num_values, 0).begin : num_values;
  const int64_t end = num_bags ? bag(offsets, num_bags - 1, num_values, 0).end : num_values;
  auto zero = [&](int64_t from, int64_t to) { std::fill(out + from * width, out + to * width, E(0)); };
  zero(0, begin);
  for_bags(threads, num_bags, num_values * width * int64_t(sizeof(E)), [&](int64_t b, int64_t) {
    const Range r = bag(offsets, b, num_values, 0);
    zero(r.begin, r.end);
    const int64_t* place = places + b * width;
    for (int64_t j = 0; j < width; j++)
      if (place[j] >= r.begin && place[j] < r.end) out[place[j] * width + j] = d[b * width + j];
  });
  zero(std::max(begin, end), num_values);
}

// out[places[b, j], j] = d[b, j], zeros elsewhere; a place outside its bag is left out. d [B, C], of `bytes` each; out [N, C].
inline void bag_extrema_transpose(Reader in) {
  const int64_t threads = in.number();
  const char* d = in.pointer<char>();
  const int64_t width = in.number(), bytes = in.number();
  std::vector<int64_t> memory;
  const Ints offsets = ascending(Ints(in.vector()), memory);
  const int64_t* places = in.pointer<int64_t>();
  char* out = in.pointer<char>();
  const int64_t num_values = in.number();
  auto put = [&](auto one) {
    using E = decltype(one);
    put_at_places(threads, reinterpret_cast<const E*>(d), places, offsets, num_values, width, reinterpret_cast<E*>(out));
  };
  bytes == 8 ? put(uint64_t{}) : bytes == 4 ? put(uint32_t{}) : bytes == 2 ? put(uint16_t{}) : put(uint8_t{});
}

}  // namespace funcrec

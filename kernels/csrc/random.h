// Random bits as a function of a key and a place: number i of a key is mix(key + i * GAMMA), SplitMix64.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace funcrec {

// Rows of a table whose random bits are consecutive: row r, from `begin` on, has the key's words r · words + 1, ...; its first column is the
// `phase`-th of the first word. Segments ascend, the first from row 0 on; after the last comes one that begins after all rows.
struct Draws {
  int64_t key, begin, phase, words;
};

// SplitMix64's finaliser.
template <class U> FUNCREC_INLINE U mix(U z) {
  z = (z ^ (z >> 30)) * uint64_t(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * uint64_t(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

// Writes the 16 random bits of column c of a row to bits[phase + c]. `bits` has room for phase + dim numbers, rounded up to 32.
inline void random_bits(const Draws& draws, uint64_t row, int64_t dim, uint16_t* bits) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "four columns' bits lie in a word from the least");
  constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
  using U = Vec<uint64_t, 8>;
  const uint64_t words = (draws.phase + dim + 3) / 4;
  U z = uint64_t(draws.key) + GAMMA * (row * uint64_t(draws.words) + 1 + U{0, 1, 2, 3, 4, 5, 6, 7});
  for (uint64_t q = 0; q < words; q += 8, z += 8 * GAMMA) {
    const U h = mix(z);
    std::memcpy(bits + 4 * q, &h, sizeof h);
  }
}

}  // namespace funcrec

// Rows that a sum reads: plain elements, or [scale f16][bias f16][codes], which stand for the numbers code * scale + bias.
// code * scale has at most 8 + 11 bits, so it is exact in f32: the result has the same bits with or without a fused multiply-add.
#pragma once
#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "simd.h"

namespace funcrec {

// The elements of a row of codes. SHORT: the row is narrower than the narrowest vector.
template <int BITS, bool SHORT = false> struct Codes {};

template <class E> struct RowTraits {
  static constexpr int LEAST = 1, EACH = 1;  // lanes of the narrowest vector; elements that share a byte
  static constexpr int64_t bytes(int64_t n) { return n * int64_t(sizeof(E)); }
};
template <int BITS, bool SHORT> struct RowTraits<Codes<BITS, SHORT>> {
  static constexpr int LEAST = 4, EACH = 8 / BITS;
  static constexpr int64_t bytes(int64_t n) { return HEAD_BYTES + (n * BITS + 7) / 8; }
};

// Row `row` of a table of `dim` columns, from `column` on (a multiple of EACH), in vectors of W lanes.
template <class E, int W> struct InRow {
  const E* p;
  FUNCREC_INLINE InRow(const char* row, int64_t column, int64_t) : p(reinterpret_cast<const E*>(row) + column) {}
  FUNCREC_INLINE Vec<Acc<E>, W> get(int64_t c) const { return load<W>(p + c); }
};

template <class B> FUNCREC_INLINE B load_bits(const void* p) {
  B b;
  std::memcpy(&b, p, sizeof b);
  return b;
}

// W codes from p on, as u32 lanes. A u64 lane with two codes becomes two lanes with one code each.
template <int BITS, int W> FUNCREC_INLINE Vec<uint32_t, W> load_codes(const uint8_t* p) {
  if constexpr (BITS == 8) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return bit_cast<Vec<uint32_t, W>>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return bit_cast<Vec<uint32_t, W>>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
    return convert<uint32_t, W>(load_bits<Vec<uint8_t, W>>(p));
  } else {
#if defined(__AVX2__)
    if constexpr (W == 8) {
      const Vec<uint32_t, 8> all = Vec<uint32_t, 8>{} + (BITS == 4 ? load_bits<uint32_t>(p) : load_bits<uint16_t>(p));
      return (all >> (Vec<uint32_t, 8>{0, 1, 2, 3, 4, 5, 6, 7} * BITS)) & uint32_t((1 << BITS) - 1);
    }
#endif
    Vec<uint64_t, W / 2> pairs;
    if constexpr (BITS == 4) pairs = convert<uint64_t, W / 2>(load_bits<Vec<uint8_t, W / 2>>(p));
    else pairs = convert<uint64_t, W / 2>(load_codes<4, W / 2>(p));
    pairs = (pairs | (pairs << (32 - BITS))) & (uint64_t((1 << BITS) - 1) * 0x100000001u);
    return bit_cast<Vec<uint32_t, W>>(pairs);
  }
}

// a * b + c, where a * b is exact.
template <int W> FUNCREC_INLINE Vec<float, W> multiply_add(const Vec<float, W>& a, const Vec<float, W>& b, const Vec<float, W>& c) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return bit_cast<Vec<float, W>>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#endif
#if defined(__FMA__)
  if constexpr (W == 8) return bit_cast<Vec<float, W>>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#endif
  return a * b + c;
}

// The scale and the bias of a row, in all lanes.
template <int W> FUNCREC_INLINE void load_head(const char* row, Vec<float, W>& scale, Vec<float, W>& bias) {
  const uint32_t both = load_bits<uint32_t>(row);
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __m512 v = _mm512_cvtph_ps(_mm256_set1_epi32(both));
    scale = bit_cast<Vec<float, W>>(_mm512_moveldup_ps(v)), bias = bit_cast<Vec<float, W>>(_mm512_movehdup_ps(v));
    return;
  }
#endif
#if defined(__F16C__)
  if constexpr (W == 8) {
    const __m256 v = _mm256_cvtph_ps(_mm_set1_epi32(both));
    scale = bit_cast<Vec<float, W>>(_mm256_moveldup_ps(v)), bias = bit_cast<Vec<float, W>>(_mm256_movehdup_ps(v));
    return;
  }
#endif
  scale = Vec<float, W>{} + load<1>(reinterpret_cast<const Half*>(row));
  bias = Vec<float, W>{} + load<1>(reinterpret_cast<const Half*>(row) + 1);
}

template <int BITS, bool SHORT, int W> struct InRow<Codes<BITS, SHORT>, W> {
#if defined(__AVX512F__)
  static constexpr bool LISTED = BITS < 8 && W == 16;
#else
  static constexpr bool LISTED = false;
#endif
  Vec<float, W> scale, bias, listed;  // listed[i]: the number of code i % 2^BITS, if LISTED
  const uint8_t* p;
  uint8_t few[4] = {};
  FUNCREC_INLINE InRow(const char* row, int64_t column, int64_t dim) : p(reinterpret_cast<const uint8_t*>(row) + HEAD_BYTES + column * BITS / 8) {
    load_head<W>(row, scale, bias);
    if constexpr (SHORT) std::memcpy(few, p, std::min<int64_t>((dim * BITS + 7) / 8, sizeof few));
    if constexpr (LISTED) {
      const Vec<int32_t, 16> code = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      listed = multiply_add<W>(convert<float, W>(code & ((1 << BITS) - 1)), scale, bias);
    }
  }

  FUNCREC_INLINE Vec<float, W> get(int64_t c) const {
    const uint8_t* const at = (SHORT ? few : p) + c * BITS / 8;
#if defined(__AVX512F__)
    if constexpr (LISTED) {  // a permutation reads only the last four bits of a lane
      __m512i all;
      if constexpr (BITS == 4)
        all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi32(load_bits<int32_t>(at))), _mm256_set1_epi32(load_bits<int32_t>(at + 4)), 1);
      else all = _mm512_set1_epi32(load_bits<int32_t>(at));
      const Vec<uint32_t, 16> lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const __m512i by = bit_cast<__m512i>(Vec<uint32_t, 16>(lane * BITS & 31u));
      return bit_cast<Vec<float, W>>(_mm512_permutexvar_ps(_mm512_srlv_epi32(all, by), bit_cast<__m512>(listed)));
    }
#endif
    return multiply_add<W>(convert<float, W>(bit_cast<Vec<int32_t, W>>(load_codes<BITS, W>(at))), scale, bias);
  }
};

}  // namespace funcrec

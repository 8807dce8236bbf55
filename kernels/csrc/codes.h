// Rows as a sum reads them: plain elements, or [scale f16][bias f16][codes], whose numbers are code * scale + bias.
// code * scale has at most 8 + 11 bits, so it is exact in f32: with a fused multiply-add or without, a number has the same bits.
#pragma once
#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "simd.h"

namespace funcrec {

// The elements of a row of codes; SHORT: of one that is narrower than the narrowest vector.
template <int BITS, bool SHORT = false> struct Codes {};

template <class E> struct RowTraits {
  static constexpr int LEAST = 1, EACH = 1;  // lanes of the narrowest vector; elements that begin with a byte
  static constexpr int64_t bytes(int64_t n) { return n * int64_t(sizeof(E)); }
};
template <int BITS, bool SHORT> struct RowTraits<Codes<BITS, SHORT>> {
  static constexpr int LEAST = 4, EACH = 8 / BITS;
  static constexpr int64_t bytes(int64_t n) { return HEAD_BYTES + (n * BITS + 7) / 8; }
};

// Row `row` of a table of `dim` columns, from `column` on, which is a multiple of EACH.
template <class E> struct InRow {
  const E* p;
  FUNCREC_INLINE InRow(const char* row, int64_t column, int64_t) : p(reinterpret_cast<const E*>(row) + column) {}
  template <int W> FUNCREC_INLINE Vec<Acc<E>, W> get(int64_t c) const { return load<W>(p + c); }
};

template <class B, int W> FUNCREC_INLINE Vec<B, W> load_bits(const void* p) {
  Vec<B, W> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// W codes from p on, as lanes of u32. A lane of u64 that holds two codes becomes two lanes with one each.
template <int BITS, int W> FUNCREC_INLINE Vec<uint32_t, W> load_codes(const uint8_t* p) {
  if constexpr (BITS == 8) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return bit_cast<Vec<uint32_t, W>>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return bit_cast<Vec<uint32_t, W>>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
    return convert<uint32_t, W>(load_bits<uint8_t, W>(p));
  } else {
    Vec<uint64_t, W / 2> pairs;
    if constexpr (BITS == 4) pairs = convert<uint64_t, W / 2>(load_bits<uint8_t, W / 2>(p));
    else pairs = convert<uint64_t, W / 2>(load_codes<4, W / 2>(p));
    pairs = (pairs | (pairs << (32 - BITS))) & (uint64_t((1 << BITS) - 1) * 0x100000001u);
    return bit_cast<Vec<uint32_t, W>>(pairs);
  }
}

// a * b + c, where a * b is exact.
template <int W> FUNCREC_INLINE Vec<float, W> multiply_add(const Vec<float, W>& a, float b, float c) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return bit_cast<Vec<float, W>>(_mm512_fmadd_ps(bit_cast<__m512>(a), _mm512_set1_ps(b), _mm512_set1_ps(c)));
#endif
#if defined(__FMA__)
  if constexpr (W == 8) return bit_cast<Vec<float, W>>(_mm256_fmadd_ps(bit_cast<__m256>(a), _mm256_set1_ps(b), _mm256_set1_ps(c)));
#endif
  return a * b + c;
}

template <int BITS, bool SHORT> struct InRow<Codes<BITS, SHORT>> {
  float scale, bias;
  const uint8_t* p;
  uint8_t few[4] = {};
  FUNCREC_INLINE InRow(const char* row, int64_t column, int64_t dim)
      : scale(load<1>(reinterpret_cast<const Half*>(row))), bias(load<1>(reinterpret_cast<const Half*>(row) + 1)),
        p(reinterpret_cast<const uint8_t*>(row) + HEAD_BYTES + column * BITS / 8) {
    if constexpr (SHORT) std::memcpy(few, p, std::min<int64_t>((dim * BITS + 7) / 8, sizeof few));
  }
  template <int W> FUNCREC_INLINE Vec<float, W> get(int64_t c) const {
    const auto codes = load_codes<BITS, W>((SHORT ? few : p) + c * BITS / 8);
    return multiply_add<W>(convert<float, W>(bit_cast<Vec<int32_t, W>>(codes)), scale, bias);
  }
};

}  // namespace funcrec

// Vectors of the width that this object is compiled for, by the vector extensions of GCC and Clang.
// Every function here works elementwise for any number of lanes W, also one, so one text serves AVX-512, AVX, SSE, NEON and plain
// scalars. Intrinsics are used only where the compilers have no portable form: square roots, f16, stores past the caches.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "abi.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FUNCREC_INLINE inline __attribute__((always_inline))
#define FUNCREC_UNROLL _Pragma("GCC unroll 16")  // Before a loop over an array of registers: GCC unrolls others after it has given the array memory.

namespace funcrec {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

template <class A, int W> struct VecOf { typedef A type __attribute__((vector_size(W * sizeof(A)))); };
template <class A> struct VecOf<A, 1> { using type = A; };
template <class A, int W> using Vec = typename VecOf<A, W>::type;

template <class A> constexpr int LANES = VECTOR_BYTES / int(sizeof(A));  // lanes of the widest vector

template <class To, class From> FUNCREC_INLINE To bit_cast(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// Converts numbers lane by lane, W lanes.
template <class To, int W, class V> FUNCREC_INLINE Vec<To, W> convert(const V& v) {
  if constexpr (W == 1) return static_cast<To>(v);
  else return __builtin_convertvector(v, Vec<To, W>);
}

// -- loads: E in memory, the accumulation type in registers ---------------------------------------------------------

template <int W> FUNCREC_INLINE Vec<uint32_t, W> load_u16(const void* p) {
#if defined(__AVX512F__)
  if constexpr (W == 16)  // GCC 12 splits it in two halves
    return bit_cast<Vec<uint32_t, W>>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#endif
  Vec<uint16_t, W> h;
  std::memcpy(&h, p, sizeof h);
  return convert<uint32_t, W>(h);
}

template <int W> FUNCREC_INLINE Vec<float, W> load(const float* p) {
  Vec<float, W> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <int W> FUNCREC_INLINE Vec<double, W> load(const double* p) {
  Vec<double, W> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <int W> FUNCREC_INLINE Vec<float, W> load(const Bf16* p) {
  return bit_cast<Vec<float, W>>(Vec<uint32_t, W>(load_u16<W>(p) << 16));
}

// c ? a : b for lanes of u32; c is the result of a comparison.
template <int W, class C> FUNCREC_INLINE Vec<uint32_t, W> choose(C c, Vec<uint32_t, W> a, Vec<uint32_t, W> b) {
  return c ? a : b;
}

// A product moves the exponent from a bias of 15 to one of 127, and normalises small numbers as well. NaN keeps its upper bits and
// becomes quiet, as in the processor's own conversions.
template <int W> FUNCREC_INLINE Vec<float, W> from_half(Vec<uint32_t, W> h) {
  using U = Vec<uint32_t, W>;
  const U sign = (h & 0x8000u) << 16;
  const Vec<float, W> size = bit_cast<Vec<float, W>>(U((h & 0x7fffu) << 13)) * 0x1p112f;
  const U bits = bit_cast<U>(size);
  const U infinite = choose<W>((h & 0x7fffu) > 0x7c00u, bits | 0x7fc00000u, bits | 0x7f800000u);
  return bit_cast<Vec<float, W>>(U(choose<W>((h & 0x7c00u) == 0x7c00u, infinite, bits) | sign));
}

template <int W> FUNCREC_INLINE Vec<float, W> load(const Half* p) {
#if defined(__F16C__)
  if constexpr (W == 4 || W == 1) {
    __m128i h = _mm_setzero_si128();
    std::memcpy(&h, p, 2 * W);
    const __m128 v = _mm_cvtph_ps(h);
    if constexpr (W == 1) return v[0];
    else return bit_cast<Vec<float, W>>(v);
  }
  if constexpr (W == 8) {
    __m128i h;
    std::memcpy(&h, p, 16);
    return bit_cast<Vec<float, W>>(_mm256_cvtph_ps(h));
  }
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    __m256i h;
    std::memcpy(&h, p, 32);
    return bit_cast<Vec<float, W>>(_mm512_cvtph_ps(h));
  }
#endif
#endif
  return from_half<W>(load_u16<W>(p));
}

// -- stores: rounded to the nearest, ties to even; NaN stays NaN ----------------------------------------------------

template <int W> FUNCREC_INLINE void store_u16(void* p, const Vec<uint32_t, W>& u) {
  const auto h = convert<uint16_t, W>(u);
  std::memcpy(p, &h, sizeof h);
}

template <int W> FUNCREC_INLINE void store(float* p, const Vec<float, W>& v) { std::memcpy(p, &v, sizeof v); }
template <int W> FUNCREC_INLINE void store(double* p, const Vec<double, W>& v) { std::memcpy(p, &v, sizeof v); }

// The upper halves of the lanes: by one permutation if there is one, not by a shift and a narrowing.
template <int W> FUNCREC_INLINE void store_high(void* p, const Vec<uint32_t, W>& u) {
#if defined(__AVX512BW__)
  if constexpr (W == 16) {
    const Vec<uint16_t, 32> odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i high = _mm512_permutexvar_epi16(bit_cast<__m512i>(odd), bit_cast<__m512i>(u));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_castsi512_si256(high));
    return;
  }
#endif
  store_u16<W>(p, u >> 16);
}

// bf16 is the upper half of an f32 after `add` was added with carry; inf, whose lower half is 0, stays.
template <int W> FUNCREC_INLINE void store_carried(Bf16* p, const Vec<float, W>& v, const Vec<uint32_t, W>& add) {
  using U = Vec<uint32_t, W>;
  const U carried = bit_cast<U>(v) + add, nan = U{} + 0x7fc00000u;
  store_high<W>(p, choose<W>(v == v, carried, nan));
}

template <int W> FUNCREC_INLINE void store(Bf16* p, const Vec<float, W>& v) {
  using U = Vec<uint32_t, W>;
  store_carried<W>(p, v, U(((bit_cast<U>(v) >> 16) & 1u) + 0x7fffu));
}

// Small numbers are rounded by adding 0.5, whose last place is f16's least; large ones by the carry of the bits cut off.
template <int W> FUNCREC_INLINE Vec<uint32_t, W> to_half(const Vec<float, W>& v) {
  using U = Vec<uint32_t, W>;
  const U u = bit_cast<U>(v), sign = (u >> 16) & 0x8000u, size = u & 0x7fffffffu;
  const Vec<float, W> shifted = bit_cast<Vec<float, W>>(size) + 0.5f;
  const U small = bit_cast<U>(shifted) - 0x3f000000u;
  const U normal = (size + (0xc8000fffu + ((size >> 13) & 1u))) >> 13;
  const U infinite = U{} + 0x7c00u, nan = ((size >> 13) & 0x1ffu) | 0x7e00u;
  U h = choose<W>(size < 0x38800000u, small, normal);
  h = choose<W>(size >= 0x477ff000u, infinite, h);
  return choose<W>(size > 0x7f800000u, nan, h) | sign;
}

template <int W> FUNCREC_INLINE void store(Half* p, const Vec<float, W>& v) {
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __m256i h = _mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
    return;
  }
#endif
#if defined(__F16C__)
  if constexpr (W == 8) {
    const __m128i h = _mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
    return;
  }
#endif
  store_u16<W>(p, to_half<W>(v));
}

// Rounds v up or down at random: the bits that are cut off carry with a probability equal to their value. NaN and inf stay.
template <int W> FUNCREC_INLINE void store_random(Bf16* p, const Vec<float, W>& v, const Vec<uint32_t, W>& random) {
  store_carried<W>(p, v, random);
}
template <int W> FUNCREC_INLINE void store_random(Half* p, const Vec<float, W>& v, const Vec<uint32_t, W>& random) {
  using U = Vec<uint32_t, W>;
  const U u = bit_cast<U>(v), carried = (u + (random & 0x1fffu)) & ~0x1fffu;
  store<W>(p, bit_cast<Vec<float, W>>(U(choose<W>(v == v, carried, u))));
}

// A 16-bit row that a rule writes: rounded at random by bits[c] for column c, or to nearest if bits is null.
template <class E> struct Narrow {
  E* p;
  const uint16_t* bits;
};

// -- arithmetic -------------------------------------------------------------------------------------------------------

// The sum of the lanes, by adding halves: a fixed order. It uses shuffles if the compiler has a word for them. Through memory (store a
// whole vector, load its halves) it would wait longer than all the additions take.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FUNCREC_SHUFFLES
template <class V, int... I> FUNCREC_INLINE auto fold(const V& v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, I...) + __builtin_shufflevector(v, v, (I + int(sizeof...(I)))...);
}
#endif
#endif

template <class A, int W, class V> FUNCREC_INLINE A sum(const V& v) {
  if constexpr (W == 1) return v;
  else if constexpr (W == 2) return v[0] + v[1];
  else {
#if defined(FUNCREC_SHUFFLES)
    return sum<A, W / 2>(fold(v, std::make_integer_sequence<int, W / 2>()));
#else
    Vec<A, W / 2> low, high;
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return sum<A, W / 2>(low + high);
#endif
  }
}

template <class A, int W> FUNCREC_INLINE Vec<A, W> square_root(const Vec<A, W>& v) {
  if constexpr (W == 1) return std::sqrt(v);
  else {
#if defined(__AVX512F__)
    if constexpr (sizeof v == 64 && sizeof(A) == 4) return bit_cast<Vec<A, W>>(_mm512_sqrt_ps(bit_cast<__m512>(v)));
    if constexpr (sizeof v == 64 && sizeof(A) == 8) return bit_cast<Vec<A, W>>(_mm512_sqrt_pd(bit_cast<__m512d>(v)));
#endif
#if defined(__AVX__)
    if constexpr (sizeof v == 32 && sizeof(A) == 4) return bit_cast<Vec<A, W>>(_mm256_sqrt_ps(bit_cast<__m256>(v)));
    if constexpr (sizeof v == 32 && sizeof(A) == 8) return bit_cast<Vec<A, W>>(_mm256_sqrt_pd(bit_cast<__m256d>(v)));
#endif
#if defined(__x86_64__)
    if constexpr (sizeof v == 16 && sizeof(A) == 4) return bit_cast<Vec<A, W>>(_mm_sqrt_ps(bit_cast<__m128>(v)));
    if constexpr (sizeof v == 16 && sizeof(A) == 8) return bit_cast<Vec<A, W>>(_mm_sqrt_pd(bit_cast<__m128d>(v)));
#endif
    Vec<A, W> r;
    if constexpr (int(sizeof v) > VECTOR_BYTES) {
      Vec<A, W / 2> half[2];
      std::memcpy(half, &v, sizeof v);
      for (auto& x : half) x = square_root<A, W / 2>(x);
      std::memcpy(&r, half, sizeof v);
    } else {
      for (int i = 0; i < W; i++) r[i] = std::sqrt(v[i]);
    }
    return r;
  }
}

// -- memory -----------------------------------------------------------------------------------------------------------

// Prefetches the cache lines of `bytes` at p. LEVEL 1: into L1, 2: into L2. Never faults, so p may be any address.
template <int LEVEL> FUNCREC_INLINE void prefetch(const void* p, int64_t bytes) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(at + i), 0, LEVEL == 1 ? 3 : 2);
  asm volatile("");  // GCC assumes that a function that only prefetches has no effect, and drops calls to it
}

// The address that row `row` of `bytes` each would have, for a prefetch: the row may be any number.
FUNCREC_INLINE const void* row_address(const void* rows, uint64_t row, int64_t bytes) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(rows) + row * uint64_t(bytes));
}

// Reads the byte at p, which must be readable, without waiting for it: the processor never drops such a load, as it may a prefetch.
FUNCREC_INLINE void touch(const void* p) { (void)*static_cast<const volatile char*>(p); }

// A store past the caches, if there is one; p is aligned to the vector. Call `stream_end` before others read.
template <int W, class A> FUNCREC_INLINE void stream(A* p, const Vec<A, W>& v) {
#if defined(__AVX512F__)
  if constexpr (sizeof v == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bit_cast<__m512i>(v));
#endif
#if defined(__AVX__)
  if constexpr (sizeof v == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bit_cast<__m256i>(v));
#endif
#if defined(__x86_64__)
  if constexpr (sizeof v == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(p), bit_cast<__m128i>(v));
#endif
  store<W>(p, v);
}

inline void stream_end() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace funcrec

// What every instruction set rounds alike: multiply-adds with one rounding, exponentials and logarithms.
//
//   e^x = 2^n (1 + r + r² p(r)),   log x = e log 2 + log(1 + f)        in the order of operations of funcrec/invariance/_functions.py
//
// A multiply-add is always the function `fused`, never left to the compiler's flags; all else is a rounded sum, product or quotient.
#pragma once
#include <cmath>
#include <limits>
#include <utility>

#include "simd.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace funcrec {

#if defined(__x86_64__) && !defined(__FMA__)
// x + y rounded to odd, so that a rounding to f32 is the only one. Source: Boldo and Melquiond, "Emulation of a FMA" (2008).
FUNCREC_INLINE __m128d sum_to_odd(__m128d x, __m128d y) {
  const __m128d s = _mm_add_pd(x, y), t = _mm_sub_pd(s, x), e = _mm_add_pd(_mm_sub_pd(x, _mm_sub_pd(s, t)), _mm_sub_pd(y, t)), zero = _mm_setzero_pd();
  const __m128d above = _mm_cmpgt_pd(e, zero), below = _mm_cmplt_pd(e, zero), negative = _mm_cmplt_pd(s, zero);
  const __m128d away = _mm_or_pd(_mm_and_pd(above, negative), _mm_andnot_pd(negative, below));  // s was rounded away from zero
  const __m128i inexact = _mm_srli_epi64(_mm_castpd_si128(_mm_or_pd(above, below)), 63);
  return _mm_castsi128_pd(_mm_or_si128(_mm_add_epi64(_mm_castpd_si128(s), _mm_castpd_si128(away)), inexact));
}
#endif

// x y + acc with one rounding in each lane, whatever the compiler's flags. Vectors go by value: GCC keeps arrays of them in registers only so.
template <class A, int W> FUNCREC_INLINE Vec<A, W> fused(A x, Vec<A, W> y, Vec<A, W> acc) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) return (Vec<A, W>)_mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)y, (__m512)acc);
  else return (Vec<A, W>)_mm512_fmadd_pd(_mm512_set1_pd(x), (__m512d)y, (__m512d)acc);
#elif defined(__AVX__) && defined(__FMA__)
  if constexpr (sizeof(A) == 4) return (Vec<A, W>)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)y, (__m256)acc);
  else return (Vec<A, W>)_mm256_fmadd_pd(_mm256_set1_pd(x), (__m256d)y, (__m256d)acc);
#elif defined(__aarch64__)
  if constexpr (sizeof(A) == 4) return (Vec<A, W>)vfmaq_n_f32((float32x4_t)acc, (float32x4_t)y, x);
  else return (Vec<A, W>)vfmaq_n_f64((float64x2_t)acc, (float64x2_t)y, x);
#else
#if defined(__x86_64__)
  if constexpr (W == 4 && sizeof(A) == 4) {  // without the instruction, four calls would take four times as long
    const __m128 u = (__m128)y, v = (__m128)acc;
    const __m128d by = _mm_set1_pd(x);
    const __m128d low = sum_to_odd(_mm_mul_pd(_mm_cvtps_pd(u), by), _mm_cvtps_pd(v));
    const __m128d high = sum_to_odd(_mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(u, u)), by), _mm_cvtps_pd(_mm_movehl_ps(v, v)));
    return (Vec<A, W>)_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
  }
#endif
  Vec<A, W> out;
  for (int i = 0; i < W; i++) out[i] = std::fma(x, y[i], acc[i]);
  return out;
#endif
}

// The numbers of a type: log 2 as high + low, where n high is exact for every exponent n; 1 / log 2; what rounds to whole numbers when it is added; the
// mantissa's bits and the exponent of 1; where e^x is 0 and inf; the series of the logarithm.
template <class A> struct Numbers;
template <> struct Numbers<float> {
  using Int = int32_t;
  static constexpr float HIGH = 0.693359375f, LOW = -2.12194440e-4f, ROUND = 12582912.0f, LEAST = -104.0f, MOST = 89.0f;
  static constexpr int TERMS = 8, BITS = 23, BIAS = 127;
  static constexpr float SERIES[] = {0.66666662693f, 0.40000972152f, 0.28498786688f, 0.24279078841f};
};
template <> struct Numbers<double> {
  using Int = int64_t;
  static constexpr double HIGH = 6.93147180369123816490e-01, LOW = 1.90821492927058770002e-10, ROUND = 6755399441055744.0, LEAST = -746.0, MOST = 710.0;
  static constexpr int TERMS = 14, BITS = 52, BIAS = 1023;
  static constexpr double SERIES[] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
                                      1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01};
};

// The greater and the less of two numbers; y if one of them is NaN.
template <class A, int W> FUNCREC_INLINE Vec<A, W> most(Vec<A, W> x, Vec<A, W> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof x == 64 && sizeof(A) == 4) return (Vec<A, W>)_mm512_max_ps((__m512)x, (__m512)y);
#endif
  return x > y ? x : y;
}
template <class A, int W> FUNCREC_INLINE Vec<A, W> least(Vec<A, W> x, Vec<A, W> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof x == 64 && sizeof(A) == 4) return (Vec<A, W>)_mm512_min_ps((__m512)x, (__m512)y);
#endif
  return x < y ? x : y;
}

// The nearest whole number, ties to even, of numbers below 2^22.
template <class A, int W> FUNCREC_INLINE Vec<A, W> whole(Vec<A, W> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof x == 64 && sizeof(A) == 4) return (Vec<A, W>)_mm512_roundscale_ps((__m512)x, 0);
#endif
  return (x + Numbers<A>::ROUND) - Numbers<A>::ROUND;
}

// x 2^n, rounded once, for a whole number n.
template <class A, int W> FUNCREC_INLINE Vec<A, W> scaled(Vec<A, W> x, Vec<A, W> n) {
  using N = Numbers<A>;
  using I = Vec<typename N::Int, W>;
#if defined(__AVX512F__)
  if constexpr (sizeof x == 64 && sizeof(A) == 4) return (Vec<A, W>)_mm512_scalef_ps((__m512)x, (__m512)n);
#endif
  const I k = convert<typename N::Int, W>(n), half = k >> 1;  // 2^n alone may overflow
  const auto power = [](I k) { return bit_cast<Vec<A, W>>(I((k + N::BIAS) << N::BITS)); };
  return x * power(half) * power(k - half);
}

constexpr double INVERSE_FACTORIALS[] = {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800,
                                         1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800, 1.0 / 87178291200};

// p r + 1 / k! for k = N, N - 1, ..., 2: a template, so that every constant is one.
template <int N, class A, class V> FUNCREC_INLINE V series(V p, V r) {
  if constexpr (N < 2) return p;
  else return series<N - 1, A>(V(p * r + A(INVERSE_FACTORIALS[N])), r);
}

// e^x with an error below 1.1 units of the last place; NaN for NaN.
template <class A, int W> FUNCREC_INLINE Vec<A, W> exponential(Vec<A, W> x) {
  using V = Vec<A, W>;
  using N = Numbers<A>;
  const V cut = least<A, W>(V{} + N::MOST, most<A, W>(V{} + N::LEAST, x));
  const V n = whole<A, W>(cut * A(1.4426950408889634));
  const V r = (cut - n * N::HIGH) - n * N::LOW;
  const V p = series<N::TERMS - 1, A>(V(V{} + A(INVERSE_FACTORIALS[N::TERMS])), r);
  return scaled<A, W>((r + r * r * p) + A(1), n);
}

// 1 / (1 + e^-x), with an error below 3 units of the last place.
template <class A, int W> FUNCREC_INLINE Vec<A, W> sigmoid(Vec<A, W> x) {
  using V = Vec<A, W>;
  const V e = exponential<A, W>(x < 0 ? x : V(-x)), one = V{} + A(1);
  return (x < 0 ? e : one) / (e + A(1));
}

// log x with an error below 1 unit of the last place.
template <class A> A logarithm(A x) {
  using N = Numbers<A>;
  using I = typename N::Int;
  const bool small = x < std::numeric_limits<A>::min();
  const A y = small ? x * A(int64_t(1) << N::BITS) : x;
  const I root = bit_cast<I>(A(0.70710678118654757)), bits = bit_cast<I>(y) - root, e = bits >> N::BITS;
  const A f = bit_cast<A>(I((bits - (e << N::BITS)) + root)) - A(1), k = A(e) - (small ? A(N::BITS) : A(0));
  const A s = f / (f + A(2)), z = s * s, square = f * f * A(0.5);
  int last = int(sizeof N::SERIES / sizeof(A)) - 1;
  A p = N::SERIES[last];
  while (last--) p = p * z + N::SERIES[last];
  const A out = k * N::HIGH - ((square - (s * (square + p * z) + k * N::LOW)) - f);
  if (x == std::numeric_limits<A>::infinity()) return x;
  return x > 0 ? out : x == 0 ? -std::numeric_limits<A>::infinity() : std::numeric_limits<A>::quiet_NaN();
}

}  // namespace funcrec

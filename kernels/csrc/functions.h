// Elementwise functions as sums, products, quotients and roots, which every processor rounds alike.
//
//   out[i] = f(x[i]),   f32 or f64, by the operations of funcrec/invariance/_functions.py and its neighbours, in their order
//
// These functions are the references, with the errors and the sources. An expression here is theirs with vectors in the place of tensors, so that the bits
// are the same. Whole numbers n of exponents are bits of n + magic, because not every instruction set converts 64 bits.
#pragma once
#include <limits>
#include <type_traits>

#include "abi.h"
#include "simd.h"

namespace funcrec::functions {

template <class A> constexpr A INFINITE = std::numeric_limits<A>::infinity();
template <class A> constexpr A NOT_A_NUMBER = std::numeric_limits<A>::quiet_NaN();
constexpr double LOG_2 = 0.6931471805599453, LOG_10 = 2.302585092994046, ROOT_HALF = 0.7071067811865476;

template <class A> struct FormOf;
template <> struct FormOf<float> {
  using Int = int32_t;
  using Word = uint32_t;
  static constexpr int bits = 23, bias = 127, terms = 8;
  static constexpr float high = 0.693359375f, low = -2.12194440e-4, least = -104, most = 89, magic = 0x1.8p23f;
  static constexpr float series[] = {0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841};
};
template <> struct FormOf<double> {
  using Int = int64_t;
  using Word = uint64_t;
  static constexpr int bits = 52, bias = 1023, terms = 14;
  static constexpr double high = 6.93147180369123816490e-01, low = 1.90821492927058770002e-10, least = -746, most = 710, magic = 0x1.8p52;
  static constexpr double series[] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
                                      1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01};
};

// The numbers of one vector, and their bits as signed and unsigned integers.
template <class A> using Num = Vec<A, LANES<A>>;
template <class A> using Int = Vec<typename FormOf<A>::Int, LANES<A>>;
template <class A> using Word = Vec<typename FormOf<A>::Word, LANES<A>>;
template <class V> struct NumberOf { using type = std::decay_t<decltype(std::declval<V&>()[0])>; };
template <class V> using Number = typename NumberOf<V>::type;

// A part of a function, and a function of numbers of type E, which are computed in vectors V of type A.
#define FUNCREC_PART template <class V, class A = Number<V>> FUNCREC_INLINE V
#define FUNCREC_FUNCTION template <class E, class V, class A = Number<V>> FUNCREC_INLINE V

template <class V, class A = Number<V>> FUNCREC_INLINE Word<A> bits_of(V x) { return bit_cast<Word<A>>(x); }
FUNCREC_PART all(Number<V> x) { return x - V{}; }  // -0 stays -0

// m ? a : b, lane by lane. m is the result of a comparison.
template <class M, class V> FUNCREC_INLINE V where(M m, V a, V b) { return m ? a : b; }

FUNCREC_PART size_of(V x) { return bit_cast<V>(Word<A>(bits_of(x) & (~typename FormOf<A>::Word(0) >> 1))); }
FUNCREC_PART with_sign(V x, V sign) {
  constexpr auto TOP = ~(~typename FormOf<A>::Word(0) >> 1);
  return bit_cast<V>(Word<A>((bits_of(x) & ~TOP) | (bits_of(sign) & TOP)));
}
template <class V, class A = Number<V>> FUNCREC_INLINE Int<A> is_negative(V x) { return bit_cast<Int<A>>(x) < 0; }  // also -0

// NaN stays NaN.
FUNCREC_PART at_most(V x, Number<V> most) { return where(x > most, all<V>(most), x); }
FUNCREC_PART within(V x, Number<V> least, Number<V> most) { return where(x < least, all<V>(least), at_most(x, most)); }

// The nearest whole number, even at ties, with x's sign. Numbers that have no digits after the point stay.
FUNCREC_PART nearest(V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 8) return bit_cast<V>(_mm512_roundscale_pd(bit_cast<__m512d>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX__)
  if constexpr (sizeof(A) == 8) return bit_cast<V>(_mm256_round_pd(bit_cast<__m256d>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  constexpr A WHOLE = A(int64_t(1) << FormOf<A>::bits);
  const V size = size_of(x);
  return where(size < WHOLE, with_sign((size + WHOLE) - WHOLE, x), x);
}
FUNCREC_PART floor_of(V x) {
  const V near = nearest(x);
  return where(near > x, near - 1, near);
}

// c[0] + c[1] z + c[2] z² + ...
template <class V, class A, size_t N> FUNCREC_INLINE V polynomial(V z, const A (&c)[N]) {
  V out = all<V>(c[N - 1]);
#pragma GCC unroll 16
  for (int k = int(N) - 2; k >= 0; k--) out = out * z + c[k];
  return out;
}

// -- exponentials and logarithms ----------------------------------------------------------------------------------------

// 1 / 2!, 1 / 3!, ..., of the series of e^x.
template <class A> struct Series {
  A of[FormOf<A>::terms - 1];
  constexpr Series() : of() {
    double factorial = 1;
    for (int k = 2; k <= FormOf<A>::terms; k++) of[k - 2] = A(1 / (factorial *= k));
  }
};
template <class A> constexpr Series<A> SERIES;

// Exponents are unsigned, with the bits of signed ones: they wrap for NaN.
template <class V, class A = Number<V>> FUNCREC_INLINE V power_of_two(Word<A> n) {
  using F = FormOf<A>;
  return bit_cast<V>(Word<A>((n + F::bias) << F::bits));
}

// x 2^n by the factors of ⌊n / 2⌋ and the rest, as 2^n alone may overflow.
template <class V, class A = Number<V>> FUNCREC_INLINE V scaled(V x, Word<A> n) {
  constexpr unsigned EVEN = 1 << 12;  // more than any -n
  const Word<A> half = ((n + EVEN) >> 1) - EVEN / 2;
  return x * power_of_two<V>(half) * power_of_two<V>(n - half);
}

// n and e^r - 1, where x = n log 2 + r; n as an integer and as a number.
template <class V, class A = Number<V>> struct Reduced {
  Word<A> n;
  V number, rest;
};
template <class V, class A = Number<V>> FUNCREC_INLINE Reduced<V> reduced(V x) {
  using F = FormOf<A>;
  const V moved = x * A(1 / LOG_2) + F::magic, n = moved - F::magic;
  const V r = (x - n * F::high) - n * F::low;
  return {bits_of(moved) - bit_cast<typename F::Word>(F::magic), n, r + r * r * polynomial(r, SERIES<A>.of)};
}

FUNCREC_FUNCTION exp(V x) {
  const auto [n, number, rest] = reduced(within(x, FormOf<A>::least, FormOf<A>::most));
  return scaled(rest + 1, n);
}

// e^x - 1 for x below the numbers whose 2^n is the greatest power; n ≥ 1 - bias.
FUNCREC_PART middle_expm1(const Reduced<V>& x, Word<A> n) {
  const V half = power_of_two<V>(n - 1);
  return where(x.number == 0, x.rest, (x.rest * half + (half - A(0.5))) * 2);
}

FUNCREC_FUNCTION expm1(V x) {
  using F = FormOf<A>;
  const Reduced<V> part = reduced(within(x, F::least, F::most));
  const Word<A> least = Word<A>{} + typename F::Word(2 - F::bias), most = Word<A>{} + typename F::Word(F::bias + 1);
  const V n = part.number, middle = middle_expm1(part, where(n < 2 - F::bias, least, where(n > F::bias + 1, most, part.n)));
  return where(x == 0, x, where(n > F::bias, scaled(part.rest + 1, part.n), middle));
}

FUNCREC_FUNCTION log(V x) {
  using F = FormOf<A>;
  constexpr A TINY = F::bits == 23 ? A(0x1p-126) : A(0x1p-1022), UP = A(int64_t(1) << F::bits);
  const auto small = x < TINY;
  const auto root = bit_cast<typename F::Word>(A(ROOT_HALF));
  const Word<A> bits = bits_of(where(small, x * UP, x)) - root;
  const V f = bit_cast<V>(Word<A>((bits & ((typename F::Word(1) << F::bits) - 1)) + root)) - 1;
  const Word<A> e = (bits + (typename F::Word(F::bias + 1) << F::bits)) >> F::bits;  // the exponent + bias + 1, which is positive
  const V k = (bit_cast<V>(Word<A>(e + bit_cast<typename F::Word>(UP))) - (UP + (F::bias + 1))) - where(small, all<V>(F::bits), V{});
  const V s = f / (f + 2), z = s * s, p = polynomial(z, F::series), square = f * f * A(0.5);
  const V out = k * F::high - ((square - (s * (square + p * z) + k * F::low)) - f);
  const V other = where(x == 0, all<V>(-INFINITE<A>), all<V>(NOT_A_NUMBER<A>));
  return where(x > 0, where(x == INFINITE<A>, x, out), other);
}

FUNCREC_FUNCTION log1p(V x) {
  constexpr A FAR = A(int64_t(2) << FormOf<A>::bits);
  const V u = x + 1, own = log<E>(u), left = where(size_of(x) < FAR, (x - (u - 1)) / u, V{});
  return where((x == -1) | (x == INFINITE<A>), own, where(x == 0, x, own + left));
}

FUNCREC_FUNCTION log2(V x) { return log<E>(x) / A(LOG_2); }
FUNCREC_FUNCTION log10(V x) { return log<E>(x) / A(LOG_10); }

FUNCREC_FUNCTION sigmoid(V x) {
  const V e = exp<E>(-size_of(x));
  return where(x < 0, e, all<V>(1)) / (e + 1);
}

FUNCREC_FUNCTION tanh(V x) {
  const Reduced<V> part = reduced(at_most(size_of(x), A(FormOf<A>::bits)) * 2);
  const V t = middle_expm1(part, part.n);
  return with_sign(t / (t + 2), x);
}

FUNCREC_FUNCTION sinh(V x) {
  const V size = size_of(x), t = expm1<E>(size), half = exp<E>(size * A(0.5));
  return with_sign(where(size < 30, (t + t / (t + 1)) * A(0.5), half * A(0.5) * half), x);
}

FUNCREC_FUNCTION cosh(V x) {
  const V half = exp<E>(size_of(x) * A(0.5)), square = half * A(0.5) * half;
  return square + A(0.25) / square;
}

FUNCREC_FUNCTION sqrt(V x) { return square_root<A, LANES<A>>(x); }
FUNCREC_FUNCTION rsqrt(V x) { return A(1) / sqrt<E>(x); }

FUNCREC_FUNCTION asinh(V x) {
  const V size = size_of(x), small = at_most(size, A(0x1p30)), square = small * small;
  const auto large = size > A(0x1p30);
  const V out = log1p<E>(where(large, size - 1, small + square / (sqrt<E>(square + 1) + 1))) + where(large, all<V>(LOG_2), V{});
  return with_sign(out, x);
}

FUNCREC_FUNCTION acosh(V x) {
  const auto large = x > A(0x1p30);
  const V t = where(x < 1, all<V>(NOT_A_NUMBER<A>), at_most(x, A(0x1p30)) - 1);
  return log1p<E>(where(large, x - 1, t + sqrt<E>(t * (t + 2)))) + where(large, all<V>(LOG_2), V{});
}

FUNCREC_FUNCTION atanh(V x) {
  const V size = size_of(x);
  return with_sign(log1p<E>(size * 2 / (1 - size)) * A(0.5), x);
}

}  // namespace funcrec::functions

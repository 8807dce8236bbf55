// Sine, cosine, tangent and their inverses, as in funcrec/invariance/_circular.py: those of f32, too, are computed in f64.
#pragma once
#include <iterator>

#include "functions.h"

namespace funcrec::functions {

constexpr double PI = 3.141592653589793, ROOT_2 = 1.4142135623730951;
constexpr int DIGITS[] = {10680707, 7228996, 1387004, 2578385, 16069853, 12639074, 9804092, 4427841};
constexpr double SINE[] = {-0.16666666666666632, 0.00833333333332249, -0.0001984126982985795, 2.7557313707070068e-06, -2.5050760253406863e-08, 1.58969099521155e-10};
constexpr double COSINE[] = {0.0416666666666666, -0.001388888888887411, 2.480158728947673e-05, -2.7557314351390663e-07, 2.087572321298175e-09, -1.1359647557788195e-11};
constexpr double ARC[] = {
    0.3333333333333293, -0.19999999999876483, 0.14285714272503466, -0.11111110405462356, 0.09090887133436507, -0.0769187620504483,
    0.06661073137387531, -0.058335701337905735, 0.049768779946159324, -0.036531572744216916, 0.016285820115365782};

using Wide = Num<double>;

// 2/π as a sum of pieces of 24 bits.
struct Pieces {
  double of[std::size(DIGITS)];
  constexpr Pieces() : of() {
    double unit = 1;
    for (size_t k = 0; k < std::size(DIGITS); k++) of[k] = DIGITS[k] * (unit *= 0x1p-24);
  }
};
constexpr Pieces PIECES;

FUNCREC_INLINE Wide modulo_4(Wide x) { return x - nearest(Wide(x * 0.25)) * 4; }

// n modulo 4 and t, where x · 2/π = n + t, for numbers x of type E.
struct Turns {
  Wide n, rest;
};
template <class E> FUNCREC_INLINE Turns turns(Wide x) {
  if constexpr (std::is_same_v<E, float>) {
    Wide total = modulo_4(x * PIECES.of[0]);
    for (size_t k = 1; k < std::size(DIGITS); k++) total = modulo_4(total + x * PIECES.of[k]);
    const Wide n = nearest(total);
    return {n, total - n};
  }
  const Wide high = bit_cast<Wide>(Word<double>(bits_of(x) & ~uint64_t(0x7FFFFFF)));  // 26 digits, and 27 others
  Wide total{}, rest{};
  for (const double piece : PIECES.of)
    for (int half = 0; half < 2; half++) {
      const Wide term = modulo_4((half ? x - high : high) * piece), before = total;
      total = before + term;
      const Wide back = total - before;
      rest = rest + ((before - (total - back)) + (term - back));
      total = modulo_4(total);
    }
  const Wide n = nearest(total);
  return {n, where(size_of(x) < 0x1p80, (total - n) + rest, all<Wide>(NOT_A_NUMBER<double>))};
}

// n, sin r and cos r.
struct Waves {
  Wide n, sine, cosine;
};
template <class E> FUNCREC_INLINE Waves waves(Wide x) {
  const Turns at = turns<E>(x);
  const Wide r = at.rest * (PI / 2), z = r * r, half = z * 0.5, near = 1 - half;
  return {at.n, r + r * z * polynomial(z, SINE), near + (((1 - near) - half) + z * z * polynomial(z, COSINE))};
}

FUNCREC_INLINE Int<double> is_odd(Wide n) { return nearest(Wide(n * 0.5)) * 2 != n; }

// The value after n quarters of a turn: first, second, -first, -second.
FUNCREC_INLINE Wide after(Wide n, Wide first, Wide second) {
  const Wide out = where(is_odd(n), second, first);
  return where(floor_of(Wide(n * 0.5)) != floor_of(Wide(n * 0.25)) * 2, -out, out);
}

template <class E> FUNCREC_INLINE Wide sin(Wide x) {
  const Waves w = waves<E>(x);
  return where(size_of(x) < 0x1p-27, x, after(w.n, w.sine, w.cosine));
}

template <class E> FUNCREC_INLINE Wide cos(Wide x) {
  const Waves w = waves<E>(x);
  return after(w.n + 1, w.sine, w.cosine);
}

template <class E> FUNCREC_INLINE Wide tan(Wide x) {
  const Waves w = waves<E>(x);
  const auto odd = is_odd(w.n);
  const Wide out = where(odd, -w.cosine, w.sine) / where(odd, w.sine, w.cosine);
  return where(size_of(x) < 0x1p-27, x, out);
}

template <class E> FUNCREC_INLINE Wide atan(Wide x) {
  const Wide size = size_of(x);
  const auto near = size < 0.4375, far = size > 1 + ROOT_2;
  const Wide y = where(near, size, where(far, -1 / size, (size - 1) / (size + 1)));
  const Wide z = y * y, angle = y - y * z * polynomial(z, ARC);
  return with_sign(where(near, angle, where(far, all<Wide>(PI / 2), all<Wide>(PI / 4)) + angle), x);
}

FUNCREC_INLINE Wide angle_of(Wide y, Wide x) {
  const Wide a = size_of(y), b = size_of(x);
  const auto steep = a > b;
  Wide ratio = where(steep, b, a) / where(steep, a, b);
  ratio = where(a == b, where(a != 0, all<Wide>(1), Wide{}), ratio);
  ratio = where((a != a) | (b != b), all<Wide>(NOT_A_NUMBER<double>), ratio);
  Wide angle = atan<double>(ratio);
  angle = where(steep, PI / 2 - angle, angle);
  return with_sign(where(is_negative(x), PI - angle, angle), y);
}

template <class E> FUNCREC_INLINE Wide asin(Wide x) { return with_sign(angle_of(x, sqrt<E>(Wide((1 - x) * (x + 1)))), x); }
template <class E> FUNCREC_INLINE Wide acos(Wide x) { return angle_of(sqrt<E>(Wide(1 - x)), sqrt<E>(Wide(x + 1))) * 2; }

}  // namespace funcrec::functions

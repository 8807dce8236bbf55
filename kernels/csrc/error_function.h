// The error function, its complement and its inverse, as in funcrec/invariance/_error_function.py.
#pragma once
#include "circular.h"
#include "draws.h"

namespace funcrec::functions {

constexpr double NEAR_OVER[] = {0.12837916709551256, -0.3250421072470015, -0.02848174957559851, -0.005770270296489442, -2.3763016656650163e-05};
constexpr double NEAR_UNDER[] = {1.0, 0.39791722395915535, 0.0650222499887673, 0.005081306281875766, 0.00013249473800432164, -3.960228278775368e-06};
constexpr double AROUND_1_OVER[] = {
    -0.0023621185607526594, 0.41485611868374833, -0.3722078760357013, 0.31834661990116175, -0.11089469428239668, 0.035478304325618236,
    -0.002166375594868791};
constexpr double AROUND_1_UNDER[] = {1.0, 0.10642088040084423, 0.540397917702171, 0.07182865441419627, 0.12617121980876164, 0.01363708391202905, 0.011984499846799107};
constexpr double BEYOND_OVER[] = {
    -0.009864944034847148, -0.6938585727071818, -10.558626225323291, -62.375332450326006, -162.39666946257347, -184.60509290671104,
    -81.2874355063066, -9.814329344169145};
constexpr double BEYOND_UNDER[] = {
    1.0, 19.651271667439257, 137.65775414351904, 434.56587747522923, 645.3872717332679, 429.00814002756783, 108.63500554177944,
    6.570249770319282, -0.0604244152148581};
constexpr double FAR_OVER[] = {
    -0.0098649429247001, -0.799283237680523, -17.757954917754752, -160.63638485582192, -637.5664433683896, -1025.0951316110772,
    -483.5191916086514};
constexpr double FAR_UNDER[] = {1.0, 30.33806074348246, 325.7925129965739, 1536.729586084437, 3199.8582195085955, 2553.0504064331644, 474.52854120695537, -22.44095244658582};
constexpr double LAST_OVER[] = {
    6.657904643501103, 5.463784911164114, 1.7848265399172913, 0.29656057182850487, 0.026532189526576124, 0.0012426609473880784,
    2.7115555687434876e-05, 2.0103343992922881e-07};
constexpr double LAST_UNDER[] = {
    1.0, 0.599832206555888, 0.1369298809227358, 0.014875361290850615, 0.0007868691311456133, 1.8463183175100548e-05, 1.421511758316446e-07,
    2.0442631033899397e-15};
constexpr float SMALL[] = {0.128379166, -0.376125336, 0.112819925, -0.0267681349, 0.00499119423, -0.000596761703};
constexpr float LARGE[] = {-0.128717512, -0.634846687, -0.106777877, 0.0242546219, -0.00388396438, 0.000383197126, -1.7285347e-05};
constexpr double AT_1 = 0.8450629115104675;  // erf 1, to 24 bits

template <size_t N, size_t M> FUNCREC_INLINE Wide quotient(Wide z, const double (&over)[N], const double (&under)[M]) {
  return polynomial(z, over) / polynomial(z, under);
}

// (erf x - x) / x near zero, erf |x| - AT_1 around 1, and the complement of |x| beyond.
struct Parts {
  Wide near, around, tail;
};
FUNCREC_INLINE Parts parts(Wide x) {
  const Wide size = at_most(size_of(x), 30), square = 1 / (size * size);
  const Wide high = bit_cast<Wide>(Word<double>(bits_of(size) & ~uint64_t(0xFFFFFFFF)));  // its square is exact
  const Wide p = where(size < 1 / 0.35, quotient(square, BEYOND_OVER, BEYOND_UNDER), quotient(square, FAR_OVER, FAR_UNDER));
  const Wide tail = exp<double>(Wide(-high * high - 0.5625)) * exp<double>(Wide((high - size) * (high + size) + p)) / size;
  return {quotient(x * x, NEAR_OVER, NEAR_UNDER), quotient(size - 1, AROUND_1_OVER, AROUND_1_UNDER), tail};
}

template <class E, class V> FUNCREC_INLINE V erf(V x) {
  const V size = size_of(x);
  if constexpr (std::is_same_v<E, float>) {
    const V s = at_most(size, 4), far = 1 - exp<E>(V(s * polynomial(s, LARGE) - s));
    return where(size < 0.927734375f, x + x * polynomial(V(x * x), SMALL), with_sign(far, x));
  } else {
    const Parts p = parts(x);
    const V far = where(size < 1.25, p.around + AT_1, 1 - p.tail);
    return where(size < 0.84375, x + x * p.near, with_sign(far, x));
  }
}

template <class E> FUNCREC_INLINE Wide erfc(Wide x) {
  const Parts p = parts(x);
  const Wide small = where(x < 0.25, 1 - (x + x * p.near), 0.5 - ((x - 0.5) + x * p.near));
  const Wide around = where(x > 0, (1 - AT_1) - p.around, (p.around + AT_1) + 1), far = where(x > 0, p.tail, 2 - p.tail);
  const Wide size = size_of(x);
  return where(size < 0.84375, small, where(size < 1.25, around, far));
}

template <class E> FUNCREC_INLINE Wide erfinv(Wide x) {
  const Wide q = x * 0.5, p = (1 - size_of(x)) * 0.5;  // p is the lesser probability of a tail
  const Wide middle = q * quotient(0.180625 - q * q, MIDDLE_OVER, MIDDLE_UNDER);
  const Wide r = sqrt<E>(Wide(-log<double>(where((p > 0) & (p < 0.1), p, all<Wide>(0.01)))));
  const Wide tail = where(r <= 5, quotient(r - 1.6, TAIL_OVER, TAIL_UNDER), quotient(r - 5, LAST_OVER, LAST_UNDER));
  const Wide out = where(size_of(q) <= 0.425, middle, with_sign(tail, q)) * ROOT_HALF;
  return where(p >= 0, where(p == 0, with_sign(all<Wide>(INFINITE<double>), x), out), all<Wide>(NOT_A_NUMBER<double>));
}

}  // namespace funcrec::functions

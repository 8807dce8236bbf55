// The loop of an elementwise function over numbers, and the table of the functions.
#pragma once
#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "circular.h"
#include "error_function.h"
#include "functions.h"
#include "parallel.h"

namespace funcrec::functions {

constexpr int64_t TASK = 1 << 13, WORTH = 1 << 15;  // numbers of a task, and those that are worth a thread

// out[i] = F(x[i]) for i < n, in vectors of A; the last vector is filled with zeros.
template <class F, class A, class E> void each(int64_t n, const E* x, E* out) {
  constexpr int W = LANES<A>;
  const auto one = [](const E* from, E* to) { store<W>(to, convert<E, W>(F::template of<E, Num<A>>(convert<A, W>(load<W>(from))))); };
  int64_t i = 0;
  for (; i + W <= n; i += W) one(x + i, out + i);
  if (i == n) return;
  E last[W] = {};
  std::memcpy(last, x + i, (n - i) * sizeof(E));
  one(last, last);
  std::memcpy(out + i, last, (n - i) * sizeof(E));
}

// The functions, in the order of their numbers, and the type in which one of f32 is computed.
#define FUNCREC_FUNCTIONS(X) \
  X(exp, float) X(expm1, float) X(log, float) X(log1p, float) X(log2, double) X(log10, double) X(sigmoid, float) X(tanh, float) \
  X(sqrt, float) X(rsqrt, float) X(sinh, double) X(cosh, double) X(asinh, double) X(acosh, double) X(atanh, double) \
  X(sin, double) X(cos, double) X(tan, double) X(asin, double) X(acos, double) X(atan, double) \
  X(erf, float) X(erfc, double) X(erfinv, double)

#define FUNCREC_CALLABLE(name, type) \
  struct name##_function { template <class E, class V> static FUNCREC_INLINE V of(V x) { return name<E>(x); } };
FUNCREC_FUNCTIONS(FUNCREC_CALLABLE)

template <class E> using Run = void (*)(int64_t n, const E* x, E* out);
#define FUNCREC_NARROW(name, type) each<name##_function, type, float>,
#define FUNCREC_WIDE(name, type) each<name##_function, double, double>,
constexpr Run<float> OF_F32[] = {FUNCREC_FUNCTIONS(FUNCREC_NARROW)};
constexpr Run<double> OF_F64[] = {FUNCREC_FUNCTIONS(FUNCREC_WIDE)};

template <class E> void run_tasks(int64_t threads, Run<E> run, int64_t n, const E* x, E* out) {
  const int64_t most = std::min(threads, n / WORTH), size = most > 1 ? TASK : n;
  if (n == 0) return;
  parallel_for(most, (n + size - 1) / size, [&](int64_t task) { run(std::min(size, n - task * size), x + task * size, out + task * size); });
}

// threads, number of the function, dtype, count, pointers to the numbers and to the results, which may be the same.
inline void invariant_function(Reader r) {
  const int64_t threads = r.number(), number = r.number(), dtype = r.number(), n = r.number();
  if (number < 0 || number >= int64_t(std::size(OF_F32))) throw std::out_of_range("function");
  const auto run = [&](auto tag, auto set) {
    using E = typename decltype(tag)::type;
    const E* x = r.pointer<const E>();
    run_tasks<E>(threads, set[number], n, x, r.pointer<E>());
  };
  dtype == F64 ? run(Type<double>{}, OF_F64) : run(Type<float>{}, OF_F32);
}

}  // namespace funcrec::functions

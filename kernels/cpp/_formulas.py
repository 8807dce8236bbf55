"""The C++ formula of each aten operation in a rule, on operands {0}, {1}, ...

A name that ends in `_` is a function of the prelude, for f32 and f64. Formulas propagate NaN as torch does: max(NaN, 1)
is NaN.
"""

FUNCTIONS = (
    "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh",
    "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "trunc", "nearbyint",
)  # fmt: skip
BINARY_FUNCTIONS = ("pow", "atan2", "fmod", "hypot", "copysign")
# {function with a vector form in Sleef (inside torch): the suffix of that form's name, its error in 0.1 ulp}
SLEEF = {
    **dict.fromkeys(FUNCTIONS[1:21], "_u10"), "erf": "_u10", "erfc": "_u15", "pow": "_u10", "atan2": "_u10", "fmod": "",
    "hypot": "_u05",
}  # fmt: skip

COMPARISONS = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}", "isinf": "{0} == INFINITY || {0} == -INFINITY",
}  # fmt: skip
LOGIC = {"logical_and": "{0} && {1}", "logical_or": "{0} || {1}", "logical_xor": "{0} != {1}", "logical_not": "!{0}"}
BITS = {"bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}"}
COPIES = ("_to_copy", "convert_element_type", "clone", "lift_fresh_copy", "scalar_tensor")
FILLS = ("full", "full_like", "zeros", "zeros_like", "ones", "ones_like")
WHERE, COPY, AT_LEAST, AT_MOST = "{0} ? {1} : {2}", "{0}", "{0} < {1} ? {1} : {0}", "{0} > {1} ? {1} : {0}"

ARITHMETIC = {
    **{name: name + "_({0})" for name in FUNCTIONS if name != "nearbyint"},
    **{name: name + "_({0}, {1})" for name in BINARY_FUNCTIONS},
    **dict.fromkeys(COPIES, "{0}"),
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "abs": "abs_({0})", "neg": "-{0}", "square": "{0} * {0}", "reciprocal": "1 / {0}", "rsqrt": "1 / sqrt_({0})",
    "sign": "({0} > 0) - ({0} < 0)", "relu": "{0} < 0 ? 0 : {0}", "round": "nearbyint_({0})",
    "maximum": "{0} > {1} || {0} != {0} ? {0} : {1}", "minimum": "{0} < {1} || {0} != {0} ? {0} : {1}",
}  # fmt: skip
INTEGRAL = {
    *COPIES,
    "add",
    "sub",
    "rsub",
    "mul",
    "abs",
    "neg",
    "square",
    "sign",
    "relu",
    "maximum",
    "minimum",
}  # operations whose formulas serve integers, too
POWERS = {2: "{0} * {0}", 3: "{0} * {0} * {0}", 1: "{0}", 0.5: "sqrt_({0})", -0.5: "1 / sqrt_({0})", -1: "1 / {0}"}

# name: (the formula of one element, the formula of the result from n such elements)
BY_LANES = {
    "sum": ("{0}", "total({0}, {1})"), "mean": ("{0}", "total({0}, {1}) / {1}"),
    "prod": ("{0}", "product({0}, {1})"),
    "amax": ("{0}", "largest({0}, {1})"), "amin": ("-{0}", "-largest({0}, {1})"),
}  # fmt: skip
# name: (start value, operator of `omp simd reduction`, one step from {0} by {1}), for any order of steps
REDUCTIONS = {
    "any": ("false", "||", "{0} = {0} || {1};"),
    "all": ("true", "&&", "{0} = {0} && {1};"),
}  # fmt: skip

PRELUDE = f"""#include <stdint.h>
#define INFINITY __builtin_inff()
#define LANES 16
#define NAN __builtin_nanf("")
#define UNARY(name) \\
  static inline float name##_(float x) {{ return __builtin_##name##f(x); }} \\
  static inline double name##_(double x) {{ return __builtin_##name(x); }}
#define BINARY(name) \\
  static inline float name##_(float x, float y) {{ return __builtin_##name##f(x, y); }} \\
  static inline double name##_(double x, double y) {{ return __builtin_##name(x, y); }}
{" ".join(f"UNARY({name})" for name in FUNCTIONS)}
{" ".join(f"BINARY({name})" for name in BINARY_FUNCTIONS)}
template <class A, int N> struct Lanes {{ typedef A V __attribute__((vector_size(N * sizeof(A)))); }};
template <class A> static inline A fold(typename Lanes<A, LANES>::V v) {{  // by halves; through memory it takes longer
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HALF(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
  auto eight = HALF(v, 0, 1, 2, 3, 4, 5, 6, 7) + HALF(v, 8, 9, 10, 11, 12, 13, 14, 15);
  auto four = HALF(eight, 0, 1, 2, 3) + HALF(eight, 4, 5, 6, 7);
  auto two = HALF(four, 0, 1) + HALF(four, 2, 3);
  return two[0] + two[1];
#endif
#endif
  for (int h = LANES / 2; h > 0; h /= 2)
    for (int k = 0; k < h; k++) v[k] += v[k + h];
  return v[0];
}}
template <class A> static inline A total(const A* p, int n) {{
  typename Lanes<A, LANES>::V lanes = {{}}, x = {{}};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {{
    __builtin_memcpy(&x, p + i, sizeof x);
    lanes += x;
  }}
  for (int k = 0; i + k < n; k++) lanes[k] += p[i + k];
  return fold<A>(lanes);
}}
template <class A> static inline A product(const A* p, int n) {{
  typename Lanes<A, LANES>::V lanes = {{}}, x = {{}};
  lanes += A(1);
  int i = 0;
  for (; i + LANES <= n; i += LANES) {{
    __builtin_memcpy(&x, p + i, sizeof x);
    lanes *= x;
  }}
  A all[LANES];
  __builtin_memcpy(all, &lanes, sizeof lanes);
  for (int k = 0; i + k < n; k++) all[k] *= p[i + k];
  for (int h = LANES / 2; h > 0; h /= 2)
    for (int k = 0; k < h; k++) all[k] *= all[k + h];
  return all[0];
}}
template <class A> static inline A largest(const A* p, int n) {{  // NaN if one is
  typedef typename Lanes<A, LANES>::V V;
  V most = -INFINITY - V{{}}, x = {{}};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {{
    __builtin_memcpy(&x, p + i, sizeof x);
    most = (x > most) | (x != x) ? x : most;
  }}
  A all[LANES];
  __builtin_memcpy(all, &most, sizeof most);
  for (int k = 0; i + k < n; k++) all[k] = p[i + k] > all[k] || p[i + k] != p[i + k] ? p[i + k] : all[k];
  for (int h = LANES / 2; h > 0; h /= 2)
    for (int k = 0; k < h; k++) all[k] = all[k + h] > all[k] || all[k + h] != all[k + h] ? all[k + h] : all[k];
  return all[0];
}}
static inline float abs_(float x) {{ return __builtin_fabsf(x); }}
static inline double abs_(double x) {{ return __builtin_fabs(x); }}
static inline int64_t abs_(int64_t x) {{ return x < 0 ? -x : x; }}
static inline int32_t abs_(int32_t x) {{ return x < 0 ? -x : x; }}
"""

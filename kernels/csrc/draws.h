// Initial rows of tables: numbers that depend on a key and on an element's place alone. kernels/reference_draws.py has the same in torch.
// Element e of a key comes from the upper 24 bits u of random word e + 1. All operations are exact to the last bit by IEEE 754 (+, -, *, /
// and square roots of f64, without contraction), so every instruction set gives the same numbers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "random.h"
#include "rows.h"
#include "simd.h"

namespace funcrec {

// The numbers of kernels/draws.py. GIVEN: rows of a matrix.
enum Distribution : int64_t { UNIFORM = 0, NORMAL = 1, CONSTANT = 2, GIVEN = 3 };

constexpr int DRAWN = 8;            // lanes of a draw
constexpr int64_t MOST_DRAWN = 256; // elements of one draw
using Reals8 = Vec<double, DRAWN>;
using Words8 = Vec<uint64_t, DRAWN>;

// c[0] + c[1] x + c[2] x² + ...
template <int N> FUNCREC_INLINE Reals8 polynomial(const double (&c)[N], const Reals8& x) {
  Reals8 y = c[N - 1] - Reals8{};
#pragma GCC unroll 8
  for (int i = N - 2; i >= 0; i--) y = y * x + c[i];
  return y;
}

// A rational approximation of the inverse of the normal distribution's integral: Wichura, AS 241 (1988), PPND16.
// In the middle it is a function of 0.425² - (p - 1/2)², else of sqrt(-log(p)) - 1.6, for p from e⁻²⁵ on.
constexpr double MIDDLE_OVER[] = {3.3871328727963666080e0, 1.3314166789178437745e+2, 1.9715909503065514427e+3, 1.3731693765509461125e+4,
                                  4.5921953931549871457e+4, 6.7265770927008700853e+4, 3.3430575583588128105e+4, 2.5090809287301226727e+3};
constexpr double MIDDLE_UNDER[] = {1.0, 4.2313330701600911252e+1, 6.8718700749205790830e+2, 5.3941960214247511077e+3,
                                   2.1213794301586595867e+4, 3.9307895800092710610e+4, 2.8729085735721942674e+4, 5.2264952788528545610e+3};
constexpr double TAIL_OVER[] = {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
                                1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4};
constexpr double TAIL_UNDER[] = {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
                                 1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9};
constexpr double MIDDLE = 0.425;

// The logarithm of fdlibm (Sun, e_log.c), for normal numbers: log(2^k · m) = k log 2 + log m, with m from √½ to √2.
constexpr double LOG_EVEN[] = {0.0, 3.999999999940941908e-1, 2.222219843214978396e-1, 1.531383769920937332e-1};
constexpr double LOG_ODD[] = {6.666666666666735130e-1, 2.857142874366239149e-1, 1.818357216161805012e-1, 1.479819860511658591e-1};
constexpr double LOG2_HIGH = 6.93147180369123816490e-1, LOG2_LOW = 1.90821492927058770002e-10;

// Whole numbers below 2^52 as f64.
FUNCREC_INLINE Reals8 as_reals(const Words8& x) { return bit_cast<Reals8>(Words8(x | uint64_t(0x4330000000000000))) - 0x1p52; }

FUNCREC_INLINE Reals8 log_of(const Reals8& x) {
  constexpr uint64_t HALF_ROOT = 0x3fe6a09e667f3bcd, ONE = 0x3ff0000000000000;  // the bits of √½ and 1
  const Words8 bits = bit_cast<Words8>(x) + (ONE - HALF_ROOT);
  const Reals8 k = as_reals(bits >> 52) - 1023.0;
  const Reals8 f = bit_cast<Reals8>(Words8((bits & 0x000fffffffffffff) + HALF_ROOT)) - 1.0;
  const Reals8 half = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
  const Reals8 rest = polynomial(LOG_EVEN, w) + z * polynomial(LOG_ODD, w);
  return s * (half + rest) + k * LOG2_LOW - half + f + k * LOG2_HIGH;
}

// The probabilities (u + 1/2) / 2^24.
FUNCREC_INLINE Reals8 midpoints(const Words8& u) { return (as_reals(u) + 0.5) * 0x1p-24; }

FUNCREC_INLINE Reals8 middle_of(const Reals8& p) {
  const Reals8 q = p - 0.5, r = 0.180625 - q * q;
  return q * polynomial(MIDDLE_OVER, r) / polynomial(MIDDLE_UNDER, r);
}

// For p below 1/2 - 0.425, without its sign.
FUNCREC_INLINE Reals8 tail_of(const Reals8& p) {
  const Reals8 r = square_root<double, DRAWN>(-log_of(p)) - 1.6;
  return polynomial(TAIL_OVER, r) / polynomial(TAIL_UNDER, r);
}

struct Drawing {
  int64_t kind;
  uint64_t key;
  float scale;
};

// Writes elements first, first + 1, ... to out[0 .. n), n <= MOST_DRAWN. `out` has room for a multiple of DRAWN.
inline void draw(const Drawing& d, uint64_t first, int64_t n, float* out) {
  if (d.kind == CONSTANT) return std::fill(out, out + n, d.scale);
  constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
  Words8 at = d.key + GAMMA * (first + 1 + Words8{0, 1, 2, 3, 4, 5, 6, 7});
  alignas(64) uint64_t words[MOST_DRAWN];
  for (int64_t c = 0; c < n; c += DRAWN, at += DRAWN * GAMMA) {
    const Words8 u = mix(at) >> 40;
    if (d.kind == UNIFORM) {
      const Reals8 x = as_reals(u) * 0x1p-23 - 1.0;  // exact, in f32 too
      store<DRAWN>(out + c, convert<float, DRAWN>(x) * d.scale);
    } else {
      std::memcpy(words + c, &u, sizeof u);
      store<DRAWN>(out + c, convert<float, DRAWN>(middle_of(midpoints(u))) * d.scale);
    }
  }
  if (d.kind == UNIFORM) return;
  // The tails, 15 % of the elements, without gaps. Their number is rounded up with elements of the middle, which are not written.
  alignas(64) uint64_t tails[MOST_DRAWN + DRAWN];
  int32_t places[MOST_DRAWN];
  constexpr uint64_t LAST = (uint64_t(1) << 24) - 1, EDGE = uint64_t(0.075 * 0x1p24);  // u + 1/2 < 0.075 · 2^24 for u up to EDGE
  int64_t count = 0;
  for (int64_t c = 0; c < n; c++) {
    const uint64_t u = words[c], near = std::min(u, LAST - u);
    tails[count] = near, places[count] = int32_t(c), count += near < EDGE;
  }
  for (int64_t i = 0; i < DRAWN; i++) tails[count + i] = EDGE;
  for (int64_t i = 0; i < count; i += DRAWN) {
    Words8 u;
    std::memcpy(&u, tails + i, sizeof u);
    const Vec<float, DRAWN> x = convert<float, DRAWN>(tail_of(midpoints(u)));
    for (int64_t j = i; j < std::min(count, i + DRAWN); j++)
      out[places[j]] = (words[places[j]] > LAST / 2 ? x[j - i] : -x[j - i]) * d.scale;
  }
}

// Writes elements first .. first + n of a drawing to a row.
inline void draw_row(const Drawing& d, uint64_t first, int64_t n, const Table& t, char* row) {
  alignas(64) float block[MOST_DRAWN];
  for (int64_t c = 0; c < n; c += MOST_DRAWN) {
    const int64_t size = std::min(n - c, MOST_DRAWN);
    draw(d, first + c, size, block);
    with_table_type(t.dtype, [&](auto tag) {
      using E = typename decltype(tag)::type;
      copy_row(reinterpret_cast<E*>(row) + c, block, size);
    });
  }
}

constexpr uint64_t PLAIN = uint64_t(1) << 40;  // the products of other ids and dims would wrap, and ids share elements
constexpr int64_t DRAWN_ROWS = 64;  // rows of one item of a loop

// What Python passes: [threads, out [M, D], the first elements i[M], key i64[], kind, scale]
inline void initial_rows(Reader in) {
  const int64_t threads = in.number();
  const Table out = in.table();
  const Ints first(in.vector());
  const uint64_t key = *in.pointer<const uint64_t>();
  const Drawing d{in.number(), key, float(in.real())};
  const int64_t bytes = out.row_bytes(), chunks = (out.rows + DRAWN_ROWS - 1) / DRAWN_ROWS;
  parallel_for(out.rows * out.dim < MIN_WORK ? 1 : threads, chunks, [&](int64_t k) {
    const int64_t end = std::min(out.rows, (k + 1) * DRAWN_ROWS);
    for (int64_t i = k * DRAWN_ROWS; i < end;) {
      int64_t next = i + 1;  // rows whose elements follow each other are one long row
      while (next < end && uint64_t(first[next]) == uint64_t(first[i]) + uint64_t(out.dim) * uint64_t(next - i)) next++;
      draw_row(d, first[i], (next - i) * out.dim, out, out.data + i * bytes);
      i = next;
    }
  });
}

// An entry of `draw_rows`: new rows for one table, as kernels/draws.py describes it.
struct Fresh {
  int64_t table, kind, given, dim, first, rows_begin, ids_begin, places, number;
  uint64_t key;
  double scale;
};

// What Python passes: [threads, n and tables, n and given matrices, rows i[], ids i[], counts i64[], n and entries]
inline void draw_rows(Reader in) {
  const int64_t threads = in.number();
  std::vector<Table> tables;
  std::vector<Matrix> given;
  for (int64_t n = in.number(); n > 0; n--) tables.push_back(in.table());
  for (int64_t n = in.number(); n > 0; n--) given.push_back(in.matrix());
  const Vector rows_of = in.vector(), ids_of = in.vector(), counts = in.vector();
  const Ints rows(rows_of), ids(ids_of);
  struct Item { Fresh fresh; int64_t begin, end; };
  std::vector<Item> items;
  int64_t work = 0;
  for (int64_t n = in.number(); n > 0; n--) {
    Fresh f{in.number(), in.number(), in.number(), in.number(), in.number(), in.number(), in.number(), in.number(), in.number(), 0, 0};
    const uint64_t* key = in.pointer<const uint64_t>();
    f.key = key ? *key : 0, f.scale = in.real();
    const auto is_in = [](int64_t begin, int64_t size, int64_t all) { return begin >= 0 && size >= 0 && size <= all && begin <= all - size; };
    const bool fits = is_in(f.table, 1, tables.size()) && is_in(f.number, 1, counts.size) && is_in(f.rows_begin, f.places, rows.size) &&
                      (f.kind == GIVEN || f.kind == CONSTANT || is_in(f.ids_begin, f.places, ids.size)) && (f.kind != GIVEN || is_in(f.given, 1, given.size()));
    if (!fits) throw std::out_of_range("an entry");
    const int64_t dim = tables[f.table].dim;
    if (f.kind == GIVEN && (given[f.given].columns != dim || (given[f.given].rows != 1 && given[f.given].rows != f.places))) throw std::out_of_range("given rows");
    const int64_t count = std::clamp<int64_t>(counts.as<const int64_t>()[f.number], 0, f.places);
    for (int64_t begin = 0; begin < count; begin += DRAWN_ROWS) items.push_back({f, begin, std::min(count, begin + DRAWN_ROWS)});
    work += count * dim;
  }
  parallel_for(work < MIN_WORK ? 1 : threads, items.size(), [&](int64_t k) {
    const auto& [f, begin, end] = items[k];
    const Table& t = tables[f.table];
    const int64_t bytes = t.row_bytes();
    const Drawing d{f.kind, f.key, float(f.scale)};
    for (int64_t j = begin; j < end; j++) {
      const int64_t row = rows[f.rows_begin + j];
      if (uint64_t(row) >= uint64_t(t.rows)) continue;
      char* const to = t.data + row * bytes;
      if (f.kind != GIVEN) {
        const uint64_t id = f.kind == CONSTANT ? 0 : uint64_t(ids[f.ids_begin + j]);
        draw_row(d, (id < PLAIN ? id * uint64_t(f.dim) : mix(id)) + uint64_t(f.first), t.dim, t, to);
        continue;
      }
      const Matrix& from = given[f.given];
      const int64_t at = (from.rows == 1 ? 0 : j) * from.stride;
      with_table_type(t.dtype, [&](auto tag) {
        using E = typename decltype(tag)::type;
        if (from.dtype == F64) copy_row(reinterpret_cast<E*>(to), from.as<double>() + at, t.dim);
        else copy_row(reinterpret_cast<E*>(to), from.as<float>() + at, t.dim);
      });
    }
  });
}

}  // namespace funcrec

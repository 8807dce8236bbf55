// Writes and reads quantised rows: [scale f16][bias f16][codes, low bits first], number ~ code * scale + bias.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "codes.h"
#include "lookup.h"
#include "parallel.h"
#include "random.h"
#include "rows.h"

namespace funcrec {

// to[c] = the numbers of a row.
template <int BITS> FUNCREC_INLINE void read_codes(float* to, const char* row, int64_t dim) {
  constexpr int W = LANES<float>;
  const InRow<Codes<BITS>, W> from(row, 0, dim);
  int64_t c = 0;
  for (; c + W <= dim; c += W) store<W>(to + c, from.get(c));
  for (; c < dim; c++) to[c] = float((from.p[c * BITS / 8] >> c * BITS % 8) & ((1 << BITS) - 1)) * from.scale[0] + from.bias[0];
}

// Plain rows of one table of codes: [threads, table, out, rows]
inline void quantized_rows(Reader in) {
  const int64_t threads = in.number();
  const Target target{in.table(), in.matrix()};
  const Ints ids(in.vector());
  if (target.table.dim == 0) return;
  for_chunks(threads, {target}, ids.size, [&](const Target& t, int64_t begin, int64_t end) {
    const int64_t dim = t.table.dim;
    float* const out = t.rows.as<float>();
    const auto read = [&](auto codes) {
      constexpr int BITS = decltype(codes)::value;
      for_rows(t.table, ids, begin, end, [&](int64_t i, char* row) { read_codes<BITS>(out + i * dim, row, dim); },
               [&](int64_t i) { std::memset(out + i * dim, 0, dim * sizeof(float)); });
    };
    if (t.table.dtype == CODES8) read(std::integral_constant<int, 8>());
    else if (t.table.dtype == CODES4) read(std::integral_constant<int, 4>());
    else read(std::integral_constant<int, 2>());
  });
}

inline float from_half_bits(uint16_t h) { return from_half<1>(uint32_t(h)); }

// x in f16: the nearest number, or if `directed` the next one not above x (`down`) or not below it; inf stays inf.
inline uint16_t half_of(float x, bool down, bool directed) {
  const uint16_t near = uint16_t(to_half<1>(x));
  const float wide = from_half_bits(near);
  if (!directed || (near & 0x7fff) == 0x7c00 || !(down ? wide > x : wide < x)) return near;
  return uint16_t(near + (bool(near & 0x8000) == down ? 1 : -1));
}

// Writes a row; reference_quantized.py explains each step.
struct RowCoder {
  int bits;
  const Draws* draws;  // null: codes are rounded to the nearest, ties to even

  // x f32[room] is overwritten; room is a multiple of 32 and at least dim.
  void write(char* to, float* x, uint16_t* random, int64_t row, int64_t dim) const {
    constexpr int W = LANES<float>;
    constexpr uint16_t NAN_HALF = 0x7e00;
    const int most = (1 << bits) - 1;
    const int64_t room = (dim + 31) / 32 * 32;
    uint8_t* const codes = reinterpret_cast<uint8_t*>(to) + HEAD_BYTES;
    std::fill(x + dim, x + room, dim ? x[0] : 0.0f);
    float low = 0, high = 0;
    bool lost = extent<W>(x, room, low, high);
    low += 0.0f;  // turns -0 into +0: extent may find either
    const uint16_t bias_bits = half_of(low, true, draws);
    const float bias = from_half_bits(bias_bits);
    uint16_t scale_bits = half_of((high - bias) / float(most), false, draws);
    if ((scale_bits & 0x7fff) == 0) scale_bits = 0x3c00;  // 1
    const float scale = from_half_bits(scale_bits);
    lost = lost || (bias_bits & 0x7c00) == 0x7c00 || (scale_bits & 0x7c00) == 0x7c00;
    const uint16_t head[2] = {lost ? NAN_HALF : scale_bits, lost ? NAN_HALF : bias_bits};
    std::memcpy(to, head, sizeof head);
    if (lost) {
      std::memset(codes, 0, (dim * bits + 7) / 8);
      return;
    }
    if (draws) {
      random_bits(*draws, row, dim, random);
      for (int64_t c = 0; c < dim; c++) {
        const float place = (x[c] - bias) / scale, whole = std::floor(place);
        x[c] = whole + float((float(random[c]) + 0.5f) * 0x1p-16f < place - whole);
      }
    } else {
      const float inverse = 1.0f / scale;
      for (int64_t c = 0; c < room; c++) x[c] = (x[c] - bias) * inverse;
    }
    // Clamped before the rounding, which uses the last place of a large number: to nearest.
    for (int64_t c = 0; c < room; c++) x[c] = std::min(std::max(x[c], 0.0f), float(most));
    for (int64_t c = 0; c < room; c++) x[c] = x[c] + 0x1.8p23f;
    const auto code = [&](int64_t c) { return bit_cast<uint32_t>(x[c]) & 0xff; };
    if (bits == 8) {
      for (int64_t c = 0; c < dim; c++) codes[c] = code(c);
    } else {
      const int64_t each = 8 / bits;
      for (int64_t c = dim; c < room; c++) x[c] = 0x1.8p23f;
      for (int64_t k = 0; k * each < dim; k++) {
        uint32_t byte = 0;
        for (int64_t j = 0; j < each; j++) byte |= code(k * each + j) << (j * bits);
        codes[k] = byte;
      }
    }
  }

 private:
  // The least and the greatest of x; returns true if a number is not finite.
  template <int W> static bool extent(const float* x, int64_t room, float& low, float& high) {
    if (room == 0) return false;
    using V = Vec<float, W>;
    V least = load<W>(x), most = least, rest = {};
    for (int64_t c = 0; c < room; c += W) {
      const V v = load<W>(x + c);
      least = v < least ? v : least;
      most = v > most ? v : most;
      rest += v * 0.0f;  // NaN for inf and NaN
    }
    low = least[0], high = most[0];
    bool lost = rest[0] != rest[0];
    for (int i = 1; i < W; i++) low = std::min(low, least[i]), high = std::max(high, most[i]), lost |= rest[i] != rest[i];
    return lost;
  }
};

// [threads, table of floats, bits, key* or 0, out u8[R, HEAD_BYTES + codes]]
inline void quantize_rows(Reader in) {
  constexpr int64_t ROWS = 64;
  const int64_t threads = in.number();
  const Table table = in.table();
  const int bits = int(in.number());
  const int64_t* const key = in.pointer<int64_t>();
  char* const out = in.pointer<char>();
  const int64_t dim = table.dim, room = (dim + 31) / 32 * 32, bytes = HEAD_BYTES + (dim * bits + 7) / 8;
  const Draws draws{key ? *key : 0, 0, 0, (dim + 3) / 4};
  const RowCoder coder{bits, key ? &draws : nullptr};
  parallel_for(table.rows * dim < MIN_WORK ? 1 : threads, (table.rows + ROWS - 1) / ROWS, [&](int64_t block) {
    std::vector<float> x(room);
    std::vector<uint16_t> random(key ? room + 32 : 0);
    for (int64_t row = block * ROWS; row < std::min(table.rows, (block + 1) * ROWS); row++) {
      with_table_type(table.dtype, [&](auto tag) {
        using E = typename decltype(tag)::type;
        const E* const from = table.as<E>() + row * dim;
        for (int64_t c = 0; c < dim; c++) x[c] = float(load<1>(from + c));
      });
      coder.write(out + row * bytes, x.data(), random.data(), row, dim);
    }
  });
}

}  // namespace funcrec

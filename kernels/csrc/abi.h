// How Python calls: each entry point takes one array of i64 (sizes, flags, pointers, bits of doubles). It returns 0, or 1 for no memory,
// 3 for numbers that do not fit each other, 2 for anything else. `Reader` takes the array apart in the order in which _native.py's callers
// wrote it. The first number is always the number of threads.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#define FUNCREC_EXPORT extern "C" __attribute__((visibility("default")))

namespace funcrec {

constexpr int64_t ABI = 20;  // raised here and in _native.py whenever an entry point comes or its array changes

enum DType : int64_t { F32 = 0, F16 = 1, BF16 = 2, F64 = 3, I32 = 4, I64 = 5, CODES8 = 6, CODES4 = 7, CODES2 = 8 };

struct Half { uint16_t bits; };
struct Bf16 { uint16_t bits; };

// A type as a value, for generic lambdas: `using E = typename decltype(tag)::type`.
template <class T> struct Type { using type = T; };

// The type in which a table's rows are summed: f32, or f64 for f64.
template <class E> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <class E> using Acc = typename AccOf<E>::type;

constexpr int64_t HEAD_BYTES = 4;  // [scale f16][bias f16] of a quantised row, before its codes

// A contiguous table [rows, dim]; for codes [rows, HEAD_BYTES + dim codes in whole bytes].
struct Table {
  char* data;
  int64_t dtype, rows, dim;
  int64_t row_bytes() const {
    if (dtype >= CODES8) return HEAD_BYTES + (dim * (8 >> (dtype - CODES8)) + 7) / 8;
    return dim * (dtype == F64 ? 8 : dtype == F32 ? 4 : 2);
  }
  template <class E> E* as() const { return reinterpret_cast<E*>(data); }
};

// A contiguous vector; size -1 means None.
struct Vector {
  char* data;
  int64_t dtype, size;
  explicit operator bool() const { return size >= 0; }
  template <class E> E* as() const { return reinterpret_cast<E*>(data); }
};

// A matrix whose rows are contiguous, `stride` elements apart.
struct Matrix {
  char* data;
  int64_t dtype, rows, columns, stride;
  template <class E> E* as() const { return reinterpret_cast<E*>(data); }
};

// i32 or i64 numbers, widened on reading.
struct Ints {
  const void* data;
  int64_t size;
  bool wide;
  explicit Ints(const Vector& v) : data(v.data), size(v.size), wide(v.dtype == I64) {}
  explicit Ints(const std::vector<int64_t>& v) : data(v.data()), size(v.size()), wide(true) {}
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// f32 or f64 numbers, as f64 (exact).
struct Reals {
  const void* data = nullptr;
  bool wide = false;
  Reals() = default;
  explicit Reals(const Vector& v) : data(v.data), wide(v.dtype == F64) {}
  double operator[](int64_t i) const {
    return wide ? static_cast<const double*>(data)[i] : static_cast<const float*>(data)[i];
  }
};

template <class I> bool ascends(const I* x, int64_t n) {
  I descents = 0;  // The loop counts without a branch, in vectors.
  for (int64_t i = 1; i < n; i++) descents |= x[i] < x[i - 1];
  return descents == 0;
}

// Returns the running maximum of offsets, which every operation reads, so that bags share no position. It returns ascending offsets
// unchanged, and writes the maxima of other offsets to `memory`. The reader of a bag cuts off positions outside a buffer.
inline Ints ascending(const Ints& offsets, std::vector<int64_t>& memory) {
  const int64_t n = offsets.size;
  if (offsets.wide ? ascends(static_cast<const int64_t*>(offsets.data), n) : ascends(static_cast<const int32_t*>(offsets.data), n))
    return offsets;
  memory.resize(n);
  int64_t last = offsets[0];
  for (int64_t b = 0; b < n; b++) memory[b] = last = offsets[b] > last ? offsets[b] : last;
  return Ints(memory);
}

// Positions [begin, end) of a buffer.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Bag `b` of ascending offsets, kept inside a buffer of n positions for any offsets, and cut to max_length (0: not cut).
inline Range bag(const Ints& offsets, int64_t b, int64_t n, int64_t max_length) {
  int64_t begin = offsets[b], end = offsets[b + 1];
  begin = begin < 0 ? 0 : begin > n ? n : begin;
  end = end < begin ? begin : end > n ? n : end;
  if (max_length > 0 && end - begin > max_length) end = begin + max_length;
  return {begin, end};
}

// The numbers of one call, in order.
struct Reader {
  const int64_t* at;
  int64_t number() { return *at++; }
  double real() { double x; std::memcpy(&x, at++, 8); return x; }
  template <class T> T* pointer() { return reinterpret_cast<T*>(*at++); }
  Table table() { Table t{reinterpret_cast<char*>(at[0]), at[1], at[2], at[3]}; at += 4; return t; }
  Vector vector() { Vector v{reinterpret_cast<char*>(at[0]), at[1], at[2]}; at += 3; return v; }
  // All rows of a matrix without columns lie at its beginning, which may be null.
  Matrix matrix() { Matrix m{reinterpret_cast<char*>(at[0]), at[1], at[2], at[3], at[3] ? at[4] : 0}; at += 5; return m; }
};

// f(Type<E>) for the element type E of a table.
template <class F> auto with_table_type(int64_t dtype, F&& f) {
  switch (dtype) {
    case F16: return f(Type<Half>{});
    case BF16: return f(Type<Bf16>{});
    case F64: return f(Type<double>{});
    default: return f(Type<float>{});
  }
}

// f(Type<I>) for i32 or i64.
template <class F> auto with_int_type(int64_t dtype, F&& f) {
  return dtype == I32 ? f(Type<int32_t>{}) : f(Type<int64_t>{});
}

// No exception may leave an entry point.
template <class F> int64_t guarded(F&& f) {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::out_of_range&) {
    return 3;
  } catch (...) {
    return 2;
  }
}

// Defines an entry point that takes the numbers of one call; the comment at the function of this name describes them.
#define FUNCREC_ENTRY(name) \
  FUNCREC_EXPORT int64_t funcrec_##name(const int64_t* numbers) { return guarded([&] { name(Reader{numbers}); }); }

}  // namespace funcrec

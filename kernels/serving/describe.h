// Tensors as the numbers that the kernels' entry points take (csrc/abi.h), through torch's stable ABI: a build with
// torch 2.11 or later runs with all of these.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "objects.h"

namespace funcrec::operators {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string text(const Tensor& x) {
  std::string out = torch::headeronly::toString(x.scalar_type());
  out += '[';
  for (int64_t i = 0; i < x.dim(); i++) out += (i ? ", " : "") + std::to_string(x.size(i));
  return out + ']';
}

// Returns the number of a dtype in csrc/abi.h, or -1.
inline int64_t number_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return F32;
    case ScalarType::Half: return F16;
    case ScalarType::BFloat16: return BF16;
    case ScalarType::Double: return F64;
    case ScalarType::Int: return I32;
    case ScalarType::Long: return I64;
    default: return -1;
  }
}

inline Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

inline Tensor empty(const std::vector<int64_t>& shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size());
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 0; size *= shape[i]) strides[i] = size;
  AtenTensorHandle out;
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      int64_t(shape.size()), shape.data(), strides.data(), number, aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

inline char* address(const Tensor& x) { return static_cast<char*>(x.data_ptr()); }

// The numbers of one call, in order; the first is the number of threads.
class Call {
 public:
  explicit Call(const char* name) : name_(name), numbers_{int64_t(torch::stable::get_num_threads())} {}

  Call& add(const std::vector<int64_t>& numbers) {
    numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
    return *this;
  }
  Call& add(int64_t number) {
    numbers_.push_back(number);
    return *this;
  }
  Call& pointer(const Tensor& x) { return add(reinterpret_cast<int64_t>(address(x))); }

  // Contiguous floats [R, D]; with `member`, that member of a stack, or the table itself if it is no stack.
  Call& table(const Tensor& x, int64_t member = -1) {
    const int64_t dims = x.dim(), number = number_of(x.scalar_type());
    if (!is_of_rank(x, 2, member) || number < 0 || number > F64 || !x.is_contiguous() || !x.is_cpu())
      fail("a table is of another kind", x, "contiguous f32, f64, f16 or bf16 [rows, dim] on the CPU");
    const int64_t rows = x.size(dims - 2), dim = x.size(dims - 1);
    const int64_t skipped = dims == 3 ? member * rows * dim * int64_t(x.element_size()) : 0;
    return add({reinterpret_cast<int64_t>(address(x)) + skipped, number, rows, dim});
  }

  // Contiguous rows u8[R, S] of `dim` codes of `bits` bits, or floats [R, dim] of `bits` bits.
  Call& coded(const Tensor& x, int64_t bits, int64_t dim) {
    const bool codes = bits == 8 || bits == 4 || bits == 2;
    if (x.dim() != 2 || dim < 0 || dim > INT32_MAX || x.size(1) != (codes ? HEAD_BYTES + (dim * bits + 7) / 8 : dim))
      fail("a table has other columns", x, "scale, bias and codes of 8, 4 or 2 bits, or floats");
    if (!codes && int64_t(x.element_size()) * 8 == bits && bits <= 32) return table(x);
    if (!codes || x.scalar_type() != ScalarType::Byte || !x.is_contiguous() || !x.is_cpu()) fail("a table is of another kind", x, "contiguous rows of u8 on the CPU");
    return add({reinterpret_cast<int64_t>(address(x)), bits == 8 ? CODES8 : bits == 4 ? CODES4 : CODES2, x.size(0), dim});
  }

  // Contiguous i32|i64[N].
  Call& ints(const Tensor& x, int64_t member = -1) {
    const int64_t number = number_of(x.scalar_type());
    if (number < I32) fail("numbers are of another dtype", x, "i32 or i64");
    return vector(x, number, member);
  }
  Call& bounds(const Tensor& x, int64_t member = -1) {
    if (x.dim() < 1 || x.size(x.dim() - 1) < 1) fail("offsets have no boundary", x, "one more than there are bags");
    return ints(x, member);
  }

  // Contiguous f32|f64[N] or none.
  Call& reals(const std::optional<Tensor>& x, int64_t member = -1) {
    if (!x) return add({0, 0, -1});
    const int64_t number = number_of(x->scalar_type());
    if (number != F32 && number != F64) fail("numbers are of another dtype", *x, "f32 or f64");
    return vector(*x, number, member);
  }

  // Contiguous matrix [M, C].
  Call& matrix(const Tensor& x) {
    return add({reinterpret_cast<int64_t>(address(x)), number_of(x.scalar_type()), x.size(0), x.size(1), x.size(1)});
  }

  void run(Entry entry) const {
    const int64_t status = entry(numbers_.data());
    if (status == 1) throw std::bad_alloc();
    if (status) operators::fail(name_, "the compiled function failed.", std::to_string(status), "numbers that fit each other");
  }

  [[noreturn]] void fail(const char* what, const Tensor& got, const char* need) const {
    operators::fail(name_, std::string(what) + '.', text(got), need);
  }

 private:
  static bool is_of_rank(const Tensor& x, int64_t rank, int64_t member) {
    return x.dim() == rank || (member >= 0 && x.dim() == rank + 1 && member < x.size(0));
  }

  Call& vector(const Tensor& x, int64_t number, int64_t member) {
    if (!is_of_rank(x, 1, member)) fail("a tensor has another number of dimensions", x, "one");
    if (!x.is_contiguous() || !x.is_cpu()) fail("numbers do not lie one after the other", x, "a contiguous tensor on the CPU");
    const int64_t size = x.size(x.dim() - 1), skipped = x.dim() == 2 ? member * size * int64_t(x.element_size()) : 0;
    return add({reinterpret_cast<int64_t>(address(x)) + skipped, number, size});
  }

  const char* name_;
  std::vector<int64_t> numbers_;
};

}  // namespace funcrec::operators

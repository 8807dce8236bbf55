// Operators that torch's dispatcher calls without Python, because Python takes longer around a small product than the product itself. torch's stable
// C functions register them (torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h). They are found by name, so the kernels need no
// header of torch.
#pragma once
#include <dlfcn.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <array>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "abi.h"

namespace funcrec::operators {

using Handle = void*;    // torch's AtenTensorHandle and TorchLibraryHandle
using Value = uint64_t;  // torch's StableIValue: the bits of a handle or of a number
using Kernel = void (*)(Value*, uint64_t, uint64_t);

struct Torch {
  int (*dims)(Handle, int64_t*), (*sizes)(Handle, int64_t**), (*strides)(Handle, int64_t**);
  int (*dtype)(Handle, int32_t*), (*device)(Handle, int32_t*), (*data)(Handle, void**), (*release)(Handle), (*threads)(uint32_t*);
  int (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*), (*call)(const char*, const char*, Value*);
  int (*library)(const char*, const char*, const char*, uint32_t, Handle*), (*implement)(Handle, const char*, Kernel);
  int32_t (*f32)(), (*f64)(), (*cpu)(), (*contiguous)();
  const char* (*what)();

  // Returns whether the library has all functions but the last, which came with torch 2.13.
  bool find(void* torch) {
    bool found = true;
    const auto get = [&](auto& to, const char* name) {
      to = reinterpret_cast<std::decay_t<decltype(to)>>(dlsym(torch, name));
      found = found && to;
    };
    get(dims, "aoti_torch_get_dim"), get(sizes, "aoti_torch_get_sizes"), get(strides, "aoti_torch_get_strides");
    get(dtype, "aoti_torch_get_dtype"), get(device, "aoti_torch_get_device_type"), get(data, "aoti_torch_get_data_ptr");
    get(release, "aoti_torch_delete_tensor_object"), get(threads, "torch_get_num_threads");
    get(empty, "aoti_torch_empty_strided"), get(call, "aoti_torch_call_dispatcher");
    get(library, "aoti_torch_library_init_impl"), get(implement, "aoti_torch_library_impl");
    get(f32, "aoti_torch_dtype_float32"), get(f64, "aoti_torch_dtype_float64"), get(cpu, "aoti_torch_device_type_cpu");
    get(contiguous, "aoti_torch_memory_format_contiguous_format");
    const bool all = found;
    get(what, "torch_exception_get_what_without_backtrace");
    return all;
  }

  void check(int error) const {
    if (error) throw std::runtime_error(what ? what() : "funcrec_cpp: torch has no memory");
  }
};
inline Torch& torch() {
  static Torch it{};
  return it;
}

// A tensor that this object owns.
class Tensor {
 public:
  explicit Tensor(Value value) : handle_(reinterpret_cast<Handle>(value)) {
    const Torch& t = torch();
    t.check(t.dims(handle_, &dims)), t.check(t.sizes(handle_, &shape)), t.check(t.strides(handle_, &strides));
    t.check(t.dtype(handle_, &dtype)), t.check(t.device(handle_, &device_));
    void* data = nullptr;
    if (device_ == t.cpu()) t.check(t.data(handle_, &data));
    address = reinterpret_cast<int64_t>(data);
  }
  Tensor(const Tensor&) = delete;
  Tensor(Tensor&& x) noexcept : address(x.address), dims(x.dims), shape(x.shape), strides(x.strides), dtype(x.dtype), handle_(std::exchange(x.handle_, nullptr)), device_(x.device_) {}
  ~Tensor() {
    if (handle_) torch().release(handle_);
  }

  int64_t elements() const { return std::accumulate(shape, shape + dims, int64_t(1), std::multiplies<int64_t>()); }
  int64_t item_bytes() const { return dtype == torch().f64() ? 8 : 4; }
  int64_t kind() const { return dtype == torch().f64() ? F64 : F32; }

  // Whether the kernels may read it: f32|f64[., ., .] that has memory, at a multiple of a number's bytes.
  bool is_stack() const {
    const bool is_real = dtype == torch().f32() || dtype == torch().f64();
    return is_real && dims == 3 && device_ == torch().cpu() && address % item_bytes() == 0 && (address || !elements());
  }

  std::string text() const {
    std::string out = dtype == torch().f64() ? "torch.float64[" : dtype == torch().f32() ? "torch.float32[" : "another dtype[";
    for (int64_t i = 0; i < dims; i++) out += (i ? ", " : "") + std::to_string(shape[i]);
    return out + ']';
  }

  // The handle, which has another owner then.
  Value give() && { return reinterpret_cast<Value>(std::exchange(handle_, nullptr)); }

  Tensor contiguous() && {
    const int32_t format = torch().contiguous();
    Value stack[2] = {std::move(*this).give(), 0};
    std::memcpy(&stack[1], &format, sizeof(format));
    torch().check(torch().call("aten::contiguous", "", stack));
    return Tensor(stack[0]);
  }

  int64_t address = 0, dims = 0;
  int64_t *shape = nullptr, *strides = nullptr;
  int32_t dtype = 0;

 private:
  Handle handle_;
  int32_t device_ = 0;
};

// Returns an uninitialised tensor. Large memory gets pages of 2 MiB, as in _native.py.
template <size_t N> Tensor empty(const std::array<int64_t, N>& shape, int32_t dtype) {
  constexpr int64_t PAGE = 2 << 20, LEAST = 4 << 20;
  std::array<int64_t, N> strides;
  for (int64_t i = N, step = 1; i-- > 0; step *= std::max<int64_t>(shape[i], 1)) strides[i] = step;
  Handle made;
  torch().check(torch().empty(N, shape.data(), strides.data(), dtype, torch().cpu(), 0, &made));
  Tensor out(reinterpret_cast<Value>(made));
#ifdef __linux__
  const int64_t bytes = out.elements() * out.item_bytes();
  const int64_t first = (out.address + PAGE - 1) / PAGE * PAGE, size = (out.address + bytes) / PAGE * PAGE - first;
  if (bytes >= LEAST && size > 0) madvise(reinterpret_cast<void*>(first), size, MADV_HUGEPAGE);
#endif
  return out;
}

inline int64_t threads() {
  uint32_t number;
  torch().check(torch().threads(&number));
  return number;
}

// Runs an entry point on an array of numbers.
inline void run(const char* name, int64_t (*entry)(const int64_t*), const int64_t* numbers) {
  const int64_t status = entry(numbers);
  if (status == 1) throw std::bad_alloc();
  if (status) throw std::runtime_error(std::string("funcrec_cpp::") + name + ": the compiled function failed with " + std::to_string(status));
}

// Raises a ValueError in Python.
[[noreturn]] inline void fail(const char* name, const std::string& got, const char* need) {
  throw std::invalid_argument(std::string("funcrec_cpp::") + name + ": the operands do not match.\n  got   " + got + "\n  need  " + need + "\n  try   x.to(dtype)");
}

}  // namespace funcrec::operators

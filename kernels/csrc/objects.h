// Calls whose tensors are still Python's objects. The kernel needs each tensor's address, shape and strides. DLPack's functions for
// torch.Tensor return these under the interpreter's lock, in 40 ns a tensor, while Python needs 350. Nothing of a tensor is kept from call to
// call, so nothing can be stale. Neither torch's headers nor Python's are needed: the few functions of both are passed as addresses, once.
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"

namespace funcrec {

// A tensor that has another owner, as in dlpack.h.
struct Borrowed {
  void* data;
  int32_t device_type, device_id, dims;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Interpreter {
  void* tensor;                        // the type torch.Tensor; other types, such as fakes, may have no memory
  int (*borrow)(void*, Borrowed*);     // dltensor_from_py_object_no_sync
  void* (*item)(void*, intptr_t);      // PyList_GetItem
  void* (*type)(void*);                // PyObject_Type
  void (*release)(void*);              // Py_DecRef
  void (*clear)();                     // PyErr_Clear
  void* (*unlock)();                   // PyEval_SaveThread
  void (*lock)(void*);                 // PyEval_RestoreThread
};
inline Interpreter& interpreter() {
  static Interpreter it{};
  return it;
}

// The form that a call requires of one of its tensors, and the place in the call's array that describes it.
//
//   ROWS     [R, size]                         address, -, R
//   OUT      [R, size]                         address
//   INTS     i32 or i64 [N], N >= size         address, dtype, N
//   REALS    [N], N >= the array's number at `size`   address, -, N
//   NUMBER   one number                        address
//   FLAT     any number of dimensions          address, -, elements
//   MATRIX   [M, size], rows at any distance   address, -, M, -, distance
//   INSIDE   no tensor                         the address of the array's number at `size`
//
// kind: DLPack's code << 8 | bits. Memory of all but a MATRIX is contiguous.
struct Slot {
  enum Form : int64_t { ROWS, INTS, OUT, REALS, NUMBER, FLAT, MATRIX, INSIDE };
  int64_t place, form, size, kind;

  // Returns false if the tensor differs from the usual form.
  bool fill(int64_t* numbers, void* object) const {
    const Interpreter& py = interpreter();
    void* const type = py.type(object);
    py.release(type);
    if (type != py.tensor) return false;
    Borrowed x;
    if (py.borrow(object, &x)) {
      py.clear();
      return false;
    }
    if (!fits(numbers, x) || x.lanes != 1 || x.device_type != 1) return false;
    int64_t elements = 1, stride = 1;
    for (int i = 0; i < x.dims; i++) elements *= x.shape[i];
    for (int i = x.dims - 1; i >= (form == MATRIX) && elements; stride *= x.shape[i--])
      if (x.shape[i] != 1 && x.strides[i] != stride) return false;
    const uint64_t at = reinterpret_cast<uint64_t>(x.data) + x.byte_offset;
    if ((elements && !x.data) || at % (x.bits / 8)) return false;
    numbers[place] = int64_t(at);
    if (form == INTS) numbers[place + 1] = x.bits == 64 ? I64 : I32;
    if (form != OUT && form != NUMBER) numbers[place + 2] = form == FLAT ? elements : x.shape[0];
    if (form == MATRIX) numbers[place + 4] = x.strides[0];
    return true;
  }

 private:
  bool fits(const int64_t* numbers, const Borrowed& x) const {
    if (form == INTS) return x.code == 0 && (x.bits == 32 || x.bits == 64) && x.dims == 1 && x.shape[0] >= size;
    if ((x.code << 8 | x.bits) != kind) return false;
    if (form == REALS) return x.dims == 1 && x.shape[0] >= numbers[size];
    if (form == NUMBER) return x.dims == 0;
    return form == FLAT || (x.dims == 2 && x.shape[1] == size);
  }
};

// Runs the entry point on the array of a plan, [slots, size, verdicts, a Slot each, the array], filled with the tensors of a list. The
// last `verdicts` numbers of the array are -1 before the call, and after it unless it refused its arguments and did nothing.
// Returns 4 if a tensor does not fit the plan, or the call refused; then nothing was done.
inline int64_t planned(int64_t (*entry)(const int64_t*), void* list, const int64_t* plan, int64_t threads) {
  const int64_t count = plan[0], size = plan[1], verdicts = plan[2];
  const Slot* const slots = reinterpret_cast<const Slot*>(plan + 3);
  const int64_t* const array = plan + 3 + 4 * count;
  std::vector<int64_t> numbers(array, array + size);
  for (int64_t i = 0, object = 0; i < count; i++) {
    if (slots[i].form == Slot::INSIDE) numbers[slots[i].place] = reinterpret_cast<int64_t>(&numbers[slots[i].size]);
    else if (!slots[i].fill(numbers.data(), interpreter().item(list, object++))) return 4;
  }
  numbers[0] = threads;
  void* const state = interpreter().unlock();
  const int64_t status = entry(numbers.data());
  interpreter().lock(state);
  return status || std::all_of(numbers.end() - verdicts, numbers.end(), [](int64_t x) { return x == -1; }) ? status : 4;
}

}  // namespace funcrec

// Calls whose tensors are still Python's objects. The kernel needs each tensor's address, shape and strides. DLPack's functions for
// torch.Tensor return these under the interpreter's lock, in 40 ns a tensor, while Python needs 350. Nothing of a tensor is kept from call to
// call, so nothing can be stale. Neither torch's headers nor Python's are needed: the few functions of both are passed as addresses, once.
#pragma once
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
struct Slot {
  enum Form : int64_t { ROWS, INTS, OUT };
  int64_t place, form, size, kind;  // ROWS, OUT: [R, size] of this kind (DLPack's code << 8 | bits); OUT does not write R. INTS: i32 or i64 [N], N >= size

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
    const bool is_ints = x.code == 0 && (x.bits == 32 || x.bits == 64) && x.dims == 1 && x.shape[0] >= size;
    const bool is_rows = (x.code << 8 | x.bits) == kind && x.dims == 2 && x.shape[1] == size;
    if (!(form == INTS ? is_ints : is_rows) || x.lanes != 1 || x.device_type != 1) return false;
    int64_t elements = 1, stride = 1;
    for (int i = 0; i < x.dims; i++) elements *= x.shape[i];
    for (int i = x.dims - 1; i >= 0 && elements; stride *= x.shape[i--])
      if (x.shape[i] != 1 && x.strides[i] != stride) return false;
    const uint64_t at = reinterpret_cast<uint64_t>(x.data) + x.byte_offset;
    if ((elements && !x.data) || at % (x.bits / 8)) return false;
    numbers[place] = int64_t(at);
    if (form == INTS) numbers[place + 1] = x.bits == 64 ? I64 : I32;
    if (form != OUT) numbers[place + 2] = x.shape[0];
    return true;
  }
};

// Runs the entry point on the array of a plan, [slots, size, a Slot each, the array], filled with the tensors of a list.
// Returns 4 if a tensor does not fit the plan; then nothing was done.
inline int64_t planned(int64_t (*entry)(const int64_t*), void* list, const int64_t* plan, int64_t threads) {
  std::vector<int64_t> numbers(plan + 2 + 4 * plan[0], plan + 2 + 4 * plan[0] + plan[1]);
  const Slot* const slots = reinterpret_cast<const Slot*>(plan + 2);
  for (int64_t i = 0; i < plan[0]; i++)
    if (!slots[i].fill(numbers.data(), interpreter().item(list, i))) return 4;
  numbers[0] = threads;
  void* const state = interpreter().unlock();
  const int64_t status = entry(numbers.data());
  interpreter().lock(state);
  return status;
}

}  // namespace funcrec

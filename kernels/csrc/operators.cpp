// Products and sums of one order as operators: what kernels/cpp/_invariant.py does, without Python.
#include "operators.h"

FUNCREC_EXPORT int64_t funcrec_invariant_bmm(const int64_t*);
FUNCREC_EXPORT int64_t funcrec_invariant_sum(const int64_t*);

namespace funcrec::operators {
namespace {

// Whether the kernel reads matrices [S, R, C] in place: their rows are contiguous, or, if `turned`, their columns.
bool is_in_place(const Tensor& x, bool turned) {
  const int64_t inner = turned ? 1 : 2;
  return x.strides[0] >= 0 && x.strides[inner] == 1 && x.strides[3 - inner] >= x.shape[inner];
}

Tensor operand(Tensor&& x) { return is_in_place(x, false) || is_in_place(x, true) ? std::move(x) : std::move(x).contiguous(); }

// Writes pointer, step between matrices, stride, and whether the stride is between columns.
void describe(const Tensor& x, int64_t* to) {
  const bool rows = is_in_place(x, false), columns = !rows && is_in_place(x, true);  // neither: contiguous, a stride of one row is free
  to[0] = x.address, to[3] = columns;
  to[1] = rows || columns ? x.strides[0] : x.shape[1] * x.shape[2];
  to[2] = columns ? x.strides[2] : rows ? x.strides[1] : x.shape[2];
}

void invariant_bmm(Value* stack, uint64_t, uint64_t) {
  Tensor a(stack[0]), b(stack[1]);
  if (!a.is_stack() || !b.is_stack() || a.dtype != b.dtype || a.shape[0] != b.shape[0] || a.shape[2] != b.shape[1])
    fail("invariant_bmm", a.text() + " and " + b.text(), "f[S, M, K] and f[S, K, N] of one dtype, f32 or f64, on the CPU");
  const Tensor x = operand(std::move(a)), y = operand(std::move(b));
  Tensor out = empty<3>({x.shape[0], x.shape[1], y.shape[2]}, x.dtype);
  if (out.elements()) {
    int64_t numbers[15] = {threads(), x.kind(), x.shape[0], x.shape[1], y.shape[2], x.shape[2]};
    describe(x, numbers + 6), describe(y, numbers + 10);
    numbers[14] = out.address;
    run("invariant_bmm", funcrec_invariant_bmm, numbers);
  }
  stack[0] = std::move(out).give();
}

void invariant_sum(Value* stack, uint64_t, uint64_t) {
  Tensor given(stack[0]);
  if (!given.is_stack()) fail("invariant_sum", given.text(), "f[P, N, Q] of f32 or f64, on the CPU");
  const Tensor x = std::move(given).contiguous();
  Tensor out = empty<2>({x.shape[0], x.shape[2]}, x.dtype);
  if (out.elements()) {
    const int64_t numbers[7] = {threads(), x.kind(), x.shape[0], x.shape[1], x.shape[2], x.address, out.address};
    run("invariant_sum", funcrec_invariant_sum, numbers);
  }
  stack[0] = std::move(out).give();
}

}  // namespace
}  // namespace funcrec::operators

// Finds torch's functions in its library, and returns 0, or 1 if one is missing. It comes before all that follow.
FUNCREC_EXPORT int64_t funcrec_find_torch(void* library) {
  funcrec::operators::Torch found;
  if (!found.find(library)) return 1;
  funcrec::operators::torch() = found;
  return 0;
}

// The operators as torch calls them, for a library that registers them itself: kernels/serving/operators.cpp.
FUNCREC_EXPORT void funcrec_operator_invariant_bmm(uint64_t* stack, uint64_t, uint64_t) { funcrec::operators::invariant_bmm(stack, 2, 1); }
FUNCREC_EXPORT void funcrec_operator_invariant_sum(uint64_t* stack, uint64_t, uint64_t) { funcrec::operators::invariant_sum(stack, 1, 1); }

// Registers the operators, whose schemas Python defines, and returns 0, or another number if torch lacks a function.
FUNCREC_EXPORT int64_t funcrec_operators(void* library) {
  using namespace funcrec::operators;
  if (funcrec_find_torch(library)) return 1;
  Handle own;
  return torch().library("funcrec_cpp", "CPU", "operators.cpp", 1, &own) || torch().implement(own, "invariant_bmm", invariant_bmm) ||
         torch().implement(own, "invariant_sum", invariant_sum);
}

// torch.ops.funcrec_cpp.invariant_bmm and invariant_sum for a process without Python: the functions of kernels/cpp/_invariant.py.
#include "describe.h"

namespace funcrec::operators {
namespace {

// Whether the kernel reads matrices [S, R, C] in place: their rows or their columns are contiguous.
bool by_rows(const Tensor& x) { return x.stride(2) == 1 && x.stride(1) >= x.size(2); }
bool by_columns(const Tensor& x) { return x.stride(1) == 1 && x.stride(2) >= x.size(1); }

Tensor matrices(Call& call, const Tensor& x) {
  const bool is_float = x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double;
  if (x.dim() != 3 || !is_float || !x.is_cpu()) call.fail("a tensor is of another kind", x, "f32 or f64 [S, R, C], on the CPU");
  return x.stride(0) >= 0 && (by_rows(x) || by_columns(x)) ? x : packed(x);
}

void add_operand(Call& call, const Tensor& x) {
  const bool turned = !by_rows(x);
  call.pointer(x).add({x.stride(0), x.stride(turned ? 2 : 1), int64_t(turned)});
}

Tensor invariant_bmm(Tensor a, Tensor b) {
  static const Entry entry = Object::get().entry("invariant_bmm");
  Call call("invariant_bmm");
  a = matrices(call, a), b = matrices(call, b);
  if (a.scalar_type() != b.scalar_type() || a.size(0) != b.size(0) || a.size(2) != b.size(1)) call.fail("the operands do not match", b, "[S, K, N] for [S, M, K], of one dtype");
  const Tensor out = empty({a.size(0), a.size(1), b.size(2)}, a.scalar_type());
  if (!out.numel()) return out;
  call.add({number_of(a.scalar_type()), a.size(0), a.size(1), b.size(2), a.size(2)});
  add_operand(call, a), add_operand(call, b);
  call.pointer(out).run(entry);
  return out;
}

Tensor invariant_sum(Tensor x) {
  static const Entry entry = Object::get().entry("invariant_sum");
  Call call("invariant_sum");
  x = packed(matrices(call, x));
  const Tensor out = empty({x.size(0), x.size(2)}, x.scalar_type());
  if (!out.numel()) return out;
  call.add({number_of(x.scalar_type()), x.size(0), x.size(1), x.size(2)}).pointer(x).pointer(out).run(entry);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(funcrec_cpp, m) {
  m.def("invariant_bmm(Tensor a, Tensor b) -> Tensor");
  m.def("invariant_sum(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(funcrec_cpp, CPU, m) {
  m.impl("invariant_bmm", TORCH_BOX(&invariant_bmm));
  m.impl("invariant_sum", TORCH_BOX(&invariant_sum));
}

}  // namespace funcrec::operators

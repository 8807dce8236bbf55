"""The inner products of all pairs of vectors, and the transpose of this map, in C++ (csrc/interaction.h)."""

from collections.abc import Sequence

from funcrec.kernels.cpp._native import DTYPES, FLOATS, call, check, empty, fail
from funcrec.kernels.interaction import num_pairs
from torch import Tensor


def dot_interaction(x: Sequence[Tensor]) -> Tensor:
    """Return ⟨x_i, x_j⟩ for i > j, f[B, F (F - 1) / 2], of the vectors in parts f[B, F, D] of one stack."""
    x = _packed("dot_interaction", x)
    out = empty((x[0].shape[0], num_pairs(x)), x[0].dtype)
    call("dot_interaction", [*_stack(x), out.data_ptr()])
    return out


def dot_interaction_transpose(d: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    """Return Σ_{j≠i} d[pair(i, j)] x_j for each vector x_i, in parts as x."""
    x = _packed("dot_interaction_transpose", x)
    if d.dtype != x[0].dtype or d.shape != (x[0].shape[0], num_pairs(x)):
        got, need = f"{d.dtype}{list(d.shape)}", f"{x[0].dtype}{[x[0].shape[0], num_pairs(x)]}"
        fail("dot_interaction_transpose", "`d` does not match the vectors.", got, need, "a number for each pair")
    d = d if d.stride(1) == 1 or d.shape[1] < 2 else d.contiguous()
    outs = [empty(tuple(part.shape), part.dtype) for part in x]
    told = [n for part in outs for n in (part.data_ptr(), part.shape[1], part.stride(0))]
    call("dot_interaction_transpose", [*_stack(x), check(d, 2, FLOATS), d.stride(0), *told])
    return outs


def _packed(name: str, x: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts, each with its vectors end to end, after a check that they fit each other."""
    for part in x:
        if part.dim() != 3 or part.dtype not in FLOATS or not part.is_cpu:
            got, need = f"{part.dtype}{list(part.shape)} on {part.device}", f"[B, F, D] of {[*map(str, FLOATS)]} on cpu"
            fail(name, "a part is not a stack of vectors.", got, need, "x.float()", TypeError)
    if not x or {(p.dtype, p.shape[0], p.shape[2]) for p in x} != {(x[0].dtype, x[0].shape[0], x[0].shape[2])}:
        got = [f"{p.dtype}{list(p.shape)}" for p in x]
        fail(name, "the parts do not fit each other.", got, "one or more parts of one B, D and dtype", "torch.cat")
    return [part if _is_packed(part) else part.contiguous() for part in x]


def _is_packed(x: Tensor) -> bool:
    _, along, inner = x.stride()
    return (inner == 1 or x.shape[2] < 2) and (along == x.shape[2] or x.shape[1] < 2)


def _stack(x: Sequence[Tensor]) -> list[int]:
    told = [n for part in x for n in (check(part, 3, FLOATS), part.shape[1], part.stride(0))]
    return [DTYPES[x[0].dtype], x[0].shape[0], x[0].shape[2], len(x), *told]

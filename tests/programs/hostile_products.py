"""Generated calls of products and functions: those of one order, and the dot products of all pairs. See hostile.py.

Shapes: S stacked matrices, M rows, K terms, N columns; B examples, F vectors, D dim.
"""

import torch
from funcrec.kernels import cpp, reference
from funcrec.kernels.invariant import FUNCTIONS
from torch import Tensor

from funcrec.invariance import _replaced
from programs.hostile_draw import DIMS, F32, F64, FLOATS, Draw, Result, size, wide

SIDES, DEPTHS = (0, 1, 2, 3, 7, 13, 14, 15, 29, 33), (0, 1, 2, 15, 16, 17, 100, 256, 257, 600)


def matrix(draw: Draw, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return matrices stored by rows or by columns, or one matrix that all share, or every second row of a larger."""
    kind = draw.one("rows", "columns", "shared", "steps")
    if kind == "columns":
        return draw.place(draw.noise(shape[0], shape[2], shape[1], dtype=dtype)).mT
    if kind == "shared" and shape[0]:
        return draw.place(draw.noise(1, *shape[1:], dtype=dtype)).expand(shape)
    if kind == "steps" and shape[1]:
        return draw.place(draw.noise(shape[0], 2 * shape[1] - 1, shape[2], dtype=dtype))[:, ::2]
    return draw.place(draw.noise(*shape, dtype=dtype))


def invariant_bmm(draw: Draw) -> Result:
    dtype, stack, depth = draw.one(F32, F64), draw.one(0, 1, 2, 5), draw.one(*DEPTHS)
    a = matrix(draw, stack, draw.one(*SIDES), depth, dtype=dtype)
    b = matrix(draw, stack, depth, draw.one(*SIDES), dtype=dtype)
    run = lambda: [torch.ops.funcrec_cpp.invariant_bmm(a, b), cpp.invariant_bmm(a, b)]
    return Result(run, [reference.invariant_bmm(a, b)] * 2)


def invariant_sum(draw: Draw) -> Result:
    x = matrix(draw, draw.one(*SIDES), draw.one(*DEPTHS), draw.one(1, 1, *SIDES), dtype=draw.one(F32, F64))
    run = lambda: [torch.ops.funcrec_cpp.invariant_sum(x), cpp.invariant_sum(x)]
    return Result(run, [reference.invariant_sum(x)] * 2)


def invariant_function(draw: Draw) -> Result:
    name, dtype, shape = draw.one(*FUNCTIONS), draw.one(F32, F64), [draw.one(0, 1, 2, 5), *draw.one((), (7,), (33, 3))]
    x = draw.noise(*shape, dtype=dtype) * draw.one(1.0, 30.0, 1e30)
    x = draw.place(torch.where(draw.noise(*shape) > 2, draw.one(0.0, torch.inf, -torch.inf, torch.nan, 1e-40), x))
    x = x.mT if x.dim() > 1 and draw.one(True, False) else x
    module = next(m for m, names in _replaced.FUNCTIONS.items() if name in names.split())
    return Result(lambda: [cpp.invariant_function(name, x)], [getattr(module, name)(x)])


def stacks(draw: Draw) -> list[Tensor]:
    dtype, count, dim = draw.one(*FLOATS), draw.one(0, 1, 2, 5, 70), draw.one(*DIMS)
    return [
        draw.place(draw.noise(count, draw.one(0, 1, 3, 8, 26), dim, dtype=dtype)) for _ in range(draw.one(1, 1, 2, 3))
    ]


def dot_interaction(draw: Draw) -> Result:
    x = stacks(draw)
    call = reference.dot_interaction
    run = lambda: [torch.ops.funcrec_cpp.dot_interaction(x)]
    return Result(run, [call(wide(x))], [call(size(x))], x[0].shape[2])


def dot_interaction_transpose(draw: Draw) -> Result:
    x = stacks(draw)
    vectors = sum(part.shape[1] for part in x)
    d = draw.place(draw.noise(x[0].shape[0], vectors * (vectors - 1) // 2, dtype=x[0].dtype))
    call = reference.dot_interaction_transpose
    run = lambda: [*torch.ops.funcrec_cpp.dot_interaction_transpose(d, x)]
    return Result(run, call(wide(d), wide(x)), call(size(d), size(x)), vectors)


PRODUCTS = (invariant_bmm, invariant_sum, invariant_function, dot_interaction, dot_interaction_transpose)

"""Checks that results are the same along an axis where out_specs promise that they are the same.

    x[0] = x[1] = ... = x[n-1], bit by bit

Under a vmap the values below all transforms are compared. While a function is staged there are no values. If a result
is differentiated, equal values do not show equal derivatives. In both cases a result passes only if it does not depend
on a value that is cut along the axis. The vmap level of the axis shows this. Real ranks have no such level. They
compare tangents as they compare values. A reverse derivative is the derivative of each rank's own result.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from funcrec.core import Problem, is_recorded, is_tracked, outside_transforms, tangents_below, tree_leaves, value_below
from funcrec.mesh._collectives import pmax
from funcrec.mesh._parts import Part


def unequal(
    parts: Sequence[Part], stacked: Sequence[Any], varying: Sequence[Sequence[frozenset[str]]], sizes: dict[str, int]
) -> Iterator[Problem]:
    """Report the results that differ along an axis that their spec does not name.

    Where no value can be read, or a result is differentiated, it reports the results that may differ.

    stacked: each result with all axes in front, as under emulation.
    varying: for each tensor of a result, the axes that the tensor depends on. Along the other axes it is one value.
    """
    for p, value, axes in zip(parts, stacked, varying, strict=True):
        for d, axis in enumerate(sizes):
            tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)] if axis not in p.spec.axes else []
            for x, own in zip(tensors, axes, strict=bool(tensors)):
                got = _difference(x, d) if axis in own and x.shape[d] > 1 else ""
                if got:
                    yield _problem(p, axis, got)


def _difference(x: Tensor, d: int) -> str:
    """Return a description of what differs, or may differ, along dimension d; "" if nothing does."""
    by_place = "follows from the rank's place, or from what is cut along the axis"
    if not is_readable(x):
        return f"a value that {by_place}"
    if is_tracked(x):
        return f"a value that is followed by a derivative and {by_place}"
    others = (bits_of(x) != bits_of(x.select(d, 0).unsqueeze(d))).movedim(d, 0)
    differs = value_below(others[..., None].flatten(1).any(1))
    if not bool(differs.any()):
        return ""
    return f"rank 0 and rank {int(differs.nonzero()[0, -1])} differ"


def unequal_over_ranks(parts: Sequence[Part], names: Sequence[str]) -> Iterator[Problem]:
    """Report the results of real ranks that differ along an axis that their spec does not name.

    Ranks compare checksums: if all are equal, the greatest checksum is also the least.
    """
    for axis in names:
        shared = [
            (p, x) for p in parts if axis not in p.spec.axes for x in tree_leaves(p.value) if isinstance(x, Tensor)
        ]
        if not shared:
            continue
        tangents = [tangents_below(x) for _, x in shared]
        with outside_transforms():
            each = zip(shared, tangents, strict=True)
            sums = torch.stack([sum_with_tangents(value_below(x), own) for (_, x), own in each])
            most = pmax(torch.stack([sums, -sums]), axis)  # max s = -max(-s) = min s only if all are equal
            differ = (most[0] != -most[1]).tolist()
        for (p, _), wrong in zip(shared, differ, strict=True):
            if wrong:
                yield _problem(p, axis, "the ranks' checksums differ")


def is_readable(x: Tensor) -> bool:
    """Return whether the value below x can be read here.

    It cannot be read while a function is staged or compiled.
    """
    return not (isinstance(value_below(x), FakeTensor) or torch.compiler.is_dynamo_compiling() or is_recorded())


def _problem(part: Part, axis: str, got: str) -> Problem:
    hint = f"psum, pmean or all_gather over {axis!r}; or name {axis!r} in out_specs"
    need = f"equal bits, as {part.spec} promises"
    return Problem(f"`{part.path}` is not the same along axis {axis!r}.", got, need, hint)


def checksum(x: Tensor) -> Tensor:
    """Return a checksum of the bits, of their places and of the shape, i64[]."""
    bits = bits_of(x).flatten().to(torch.int64)
    places = torch.arange(bits.shape[0], device=x.device) * 2 + 1
    shape = sum(n * (2 * i + 3) for i, n in enumerate(x.shape))
    return (bits * places * 0x9E3779B97F4A7C1).sum() + shape


def sum_with_tangents(value: Tensor, tangents: Mapping[int, Tensor]) -> Tensor:
    """Return a checksum of the value and of its tangents at every level, i64[].

    A missing tangent counts as zeros.
    """
    total = checksum(value)
    for place, t in tangents.items():
        total = total + (checksum(t + 0.0) - checksum(torch.zeros_like(t))) * (2 * place + 1)  # -0 + 0 = 0
    return total


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of x, as integers."""
    if not x.is_floating_point():
        return x
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size(), torch.int8)
    return x.contiguous().view(integer)

"""torch's functions that choose the order of their products by shapes, above the operators that a mode sees.

    multi_dot(a, b, c)  =  (a b) c        einsum("…", a, b, c)  =  einsum("…", einsum("…", a, b), c)

A chain of products is cheapest in an order that follows the number of rows, so an example alone would have another
order than in a batch. Here products go from left to right. `opt_einsum`, where it is installed, has no say.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class LeftToRight(TorchFunctionMode):
    """A mode in which chains of products go from left to right. What chooses an algorithm by a shape raises."""

    def __init__(self, refuse: Callable[[Any], Any]) -> None:
        super().__init__()
        self.refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cdist:
            self.refuse("torch.cdist")
        call: Any = CHAINS.get(func, func)
        return call(*args, **kwargs) if kwargs else call(*args)


def multi_dot(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    if len(tensors) < 3 or out is not None:  # one order; an `out` has no place in the table
        return torch.linalg.multi_dot(tensors, out=out)
    return functools.reduce(torch.matmul, tensors)


def einsum(*args: Any) -> Tensor:
    if not isinstance(args[0], str):
        args = by_letters(args)
    equation, *operands = args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    return cast(Any, torch._VF).einsum(equation, operands)  # without a path: from left to right


def by_letters(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return an equation in letters, and the operands, of an einsum of lists of numbers."""
    letter = lambda n: "..." if n is Ellipsis else chr(ord("A") + n if n < 26 else ord("a") + n - 26)
    of = lambda numbers: "".join(map(letter, numbers))
    operands, inputs = args[: len(args) // 2 * 2 : 2], args[1::2]
    out = f"->{of(args[-1])}" if len(args) % 2 else ""
    return ",".join(map(of, inputs)) + out, *operands


CHAINS: dict[Any, Callable] = {
    torch.linalg.multi_dot: multi_dot,
    torch.chain_matmul: lambda *tensors, out=None: multi_dot(tensors, out=out),
    torch.einsum: einsum,
}

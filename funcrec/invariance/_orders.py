"""torch's functions that follow shapes or transforms, above the operators that a dispatch mode sees.

    multi_dot(a, b, c)  =  (a b) c        einsum("…", a, b, c)  =  einsum("…", einsum("…", a, b), c)

A chain of products is cheapest in an order that follows the number of rows, so an example alone would have another
order than in a batch. Here products go from left to right. `opt_einsum`, where it is installed, has no say.

torch's vmap writes some functions otherwise than a member's own run: it lets a number without dims decide the dtype of
a result, multiplies a bias by beta = 0, and rounds normalised values of 16 bits before their weights.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from funcrec.core import is_in_transform
from funcrec.invariance._replaced import SHORT, of_dtypes, of_one_dtype


class LeftToRight(TorchFunctionMode):
    """A mode in which chains of products go from left to right, and a member of vmap computes as its own run.

    What chooses an algorithm by a shape raises. So does one of these functions that writes to an `out`.
    """

    passes_reads = True  # `funcrec.core.check`: it changes no read of a shape, so validators need not pass it

    def __init__(self, refuse: Callable[[Any], Any]) -> None:
        super().__init__()
        self.refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in CHANGED:  # most calls, such as reads of a shape
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is torch.cdist or (func in CHAINS and kwargs and kwargs.get("out") is not None):
            self.refuse("torch.cdist" if func is torch.cdist else f"{func.__name__}(out=...)")
        call: Any = CHAINS.get(func, func)
        if func in BY_MEMBER and is_in_transform():
            return BY_MEMBER[func](call, args, kwargs or {})
        return call(*args, **kwargs) if kwargs else call(*args)


def multi_dot(tensors: Sequence[Tensor], *, out: None = None) -> Tensor:
    return functools.reduce(torch.matmul, tensors)


def einsum(equation: str, *operands: Any) -> Tensor:  # torch has made an equation of lists
    given: Sequence[Any] = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    return cast(Any, torch._VF).einsum(equation, given)  # without a path: from left to right


def addmm(*args: Any, **kwargs: Any) -> Tensor:
    """Return torch.addmm(...), which reads no bias if beta is 0. vmap multiplies it by 0, so NaN would stay NaN."""
    if kwargs.get("beta") == 0 and len(args) == 3 and kwargs.keys() <= {"beta", "alpha"}:
        return torch.mm(*args[1:]) * kwargs.get("alpha", 1)
    return torch.addmm(*args, **kwargs)


def weighted(norm: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return normalised values [B, C, ...], then times weights, plus a bias [C], as in vmap; torch joins some of it."""
    out, per_channel = norm(wide_of(x)), (-1, *[1] * (x.dim() - 2))
    out = out if weight is None else out * wide_of(weight).reshape(per_channel)
    return (out if bias is None else out + wide_of(bias).reshape(per_channel)).to(x.dtype)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    return weighted(lambda x: torch.group_norm(x, num_groups, eps=eps), input, weight, bias)


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    norm = lambda x: functional.batch_norm(x, running_mean, running_var, None, None, *args, **kwargs)
    return weighted(norm, input, weight, bias)


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    norm = lambda x: functional.instance_norm(x, running_mean, running_var, None, None, *args, **kwargs)
    return weighted(norm, input, weight, bias)


def ndtr(input: Tensor, *, out: None = None) -> Tensor:
    """Return the normal distribution Φ, with an error below 2 (4 + x²) ulp: half of erfc(-x / √2).

    torch's 1 + erf(x / √2) has no digits where Φ is small.
    """
    half = torch.erfc(wide_of(input) * -math.sqrt(0.5)) * 0.5
    return half.to(input.dtype) if input.is_floating_point() else half


CHAINS: dict[Any, Callable] = {
    torch.special.ndtr: ndtr,
    torch.group_norm: group_norm,
    functional.group_norm: group_norm,
    functional.batch_norm: batch_norm,
    functional.instance_norm: instance_norm,
    torch.addmm: addmm,
    torch.Tensor.addmm: addmm,
    torch.linalg.multi_dot: multi_dot,
    torch.chain_matmul: lambda *tensors, out=None: multi_dot(tensors, out=out),
    torch.einsum: einsum,
}

# Functions in which torch's vmap lets a member's number without dims decide the dtype.
NAMES = """
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ equal not_equal less less_equal greater greater_equal
    eq_ ne_ lt_ le_ gt_ ge_ where div divide floor_divide div_ divide_ floor_divide_ __floordiv__ __itruediv__
    clamp clamp_min clamp_max clip clamp_ clamp_min_ clamp_max_ clip_ addcmul addcdiv addcmul_ addcdiv_
    add_ sub_ mul_ subtract_ multiply_ true_divide_ __iadd__ __isub__ __imul__ atan2 arctan2 xlogy logaddexp logaddexp2
    fmod remainder remainder_ fmod_ pow pow_ copysign copysign_
"""


def by_dtype(call: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    every = of_one_dtype([*args, *kwargs.values()])
    ints = [x for x in every if isinstance(x, Tensor) and x.dtype != torch.bool]
    every = every if any(x.is_floating_point() for x in ints) else of_dtypes(every, ints)
    return call(*every[: len(args)], **dict(zip(kwargs, every[len(args) :], strict=True)))


def by_f32(call: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the normalised values, which are rounded once: of 16 bits, vmap would round them before their weights."""
    dtype = (args[0] if args else kwargs["input"]).dtype
    return call(*map(wide_of, args), **{name: wide_of(x) for name, x in kwargs.items()}).to(dtype)


def wide_of(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in SHORT else x


BY_MEMBER: dict[Any, Callable] = {
    **{getattr(space, n): by_dtype for n in NAMES.split() for space in (torch, torch.Tensor) if hasattr(space, n)},
    **{space.layer_norm: by_f32 for space in (torch, functional)},
}
CHANGED: set[Any] = {torch.cdist, *CHAINS, *BY_MEMBER}

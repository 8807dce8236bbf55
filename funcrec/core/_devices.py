"""Move trees to another device, change the dtype of floats in trees, and copy tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.core._errors import Problem, check, describe
from funcrec.kernels.memory import empty_table
from funcrec.kernels.tracked import is_transformed

RETYPED: dict[
    type, Callable[..., Any]
] = {}  # {a class with a static field that is a dtype: fn(value, new dtype) -> new value}


def to(tree: Any, device: Any = None, dtype: Any = None) -> Any:
    """Return the tree on a device, or with its floats in a dtype.

    This implements `fr.tree.to`, and the method `to` of every class made by `fr.pytree`.
    """
    check("funcrec.tree.to", target_problems(device, dtype))
    if isinstance(device, torch.dtype):
        device, dtype = None, device
    device, known = None if device is None else torch.device(device), {}

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in known:
            known[id(x)] = x, _moved(x, device or x.device, dtype if dtype and x.is_floating_point() else x.dtype)
        return known[id(x)][1]  # A tensor that occurs twice stays one tensor.

    out = torch_tree.tree_map(moved, tree)
    own = lambda x: type(x) in RETYPED
    return (
        torch_tree.tree_map(lambda x: RETYPED[type(x)](x, dtype) if own(x) else x, out, is_leaf=own) if dtype else out
    )


def _moved(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    is_here = device.type == x.device.type and device.index in (None, x.device.index)
    return copied(x, dtype) if is_here and dtype != x.dtype else x.to(device, dtype)


def copied(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of x, in `dtype` unless that is None.

    The copy of a plain table on the CPU lies in large pages, as the tables of `fr.init` do.
    """
    is_plain = type(x) is Tensor and not torch.compiler.is_dynamo_compiling() and not is_transformed(x)
    if is_plain and x.dim() == 2 and x.is_contiguous() and x.device.type == "cpu":
        return empty_table(tuple(x.shape), dtype=dtype or x.dtype).copy_(x)
    return x.clone() if dtype is None else x.to(dtype)


def target_problems(device: object, dtype: object) -> Iterator[Problem]:
    """Yield the problems of the arguments of `to`: a device, a float dtype, or both; the dtype may come first."""
    hint = 'x.to("cpu"), x.to(torch.float16), or x.to("cpu", torch.float16)'
    if isinstance(device, torch.dtype) and dtype is None:
        device, dtype = None, device
    elif device is None and dtype is None:
        yield Problem("`device` and `dtype` are both None.", "neither", "a device or a dtype", hint)
    if device is not None and not isinstance(device, str | torch.device):
        need = "a torch.device, or its name"
        yield Problem("`device` is not a device.", describe(device), need, hint, TypeError)
    elif device is not None and torch.device("cpu") != device:
        try:
            torch.empty(0, device=device)
        except (AssertionError, NotImplementedError, RuntimeError) as error:  # an unknown name, or a missing device
            need = "a device of this machine and of this torch"
            got = f"{str(device)!r}: {str(error).splitlines()[0]:.80}"
            yield Problem("`device` is not available.", got, need, hint)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        yield Problem("`dtype` is not a dtype.", describe(dtype), "a torch.dtype of floats", hint, TypeError)
    elif dtype is not None and not dtype.is_floating_point:
        hint = "fr.tree.map(lambda x: x.long(), tree), for every leaf"
        yield Problem("`dtype` is not of floats, and only floats change.", f"{dtype}", "a float dtype", hint, TypeError)

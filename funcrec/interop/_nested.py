"""Converts torch's nested tensors of layout jagged, which have the same values and offsets as a JaggedTensor."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, is_wrapped, typed
from funcrec.jagged import JaggedTensor


def from_nested(x: Tensor) -> JaggedTensor:
    """Return the bags of a nested tensor [B, ragged, ...] of layout `torch.jagged`.

    Both objects share values and offsets.

    Raises:
      TypeError: if the layout is not `torch.jagged`.
      ValueError: if the ragged dimension is not the second one, or has holes.

    Law: `from_nested(to_nested(x))` is x without padding.

    Example:
      >>> import torch, funcrec as fr
      >>> x = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([7])], layout=torch.jagged)
      >>> fr.interop.from_nested(x)
      JaggedTensor([[1, 2], [7]], values=i64[3])
    """
    check("funcrec.interop.from_nested", nested_problems(x))
    return JaggedTensor.from_offsets(x.values(), cast(Any, x).offsets())


@typed
def to_nested(x: JaggedTensor) -> Tensor:
    """Return bags as a nested tensor [B, ragged, ...] of layout `torch.jagged`.

    Both objects share values and offsets.

    A view cuts the padding off, for which the function reads offsets[-1] on the host.

    Raises:
      ValueError: if the bags have weights, because a nested tensor has no place for weights.
      TypeError: if it is called under a transform of torch.func, because nested tensors have no rules for transforms
        (`backward()` works).

    Example:
      >>> import torch, funcrec as fr
      >>> nested = fr.interop.to_nested(fr.JaggedTensor.from_lists([[1.0, 2.0], [], [3.0]]))
      >>> [bag.tolist() for bag in nested.unbind()]
      [[1.0, 2.0], [], [3.0]]
    """
    call = "funcrec.interop.to_nested"
    check(call, bag_problems(x))
    x = x.unpad()
    return torch.nested.nested_tensor_from_jagged(x.values, x.offsets)


def nested_problems(x: Any) -> Iterator[Problem]:
    hint = "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)"
    if not isinstance(x, Tensor) or not x.is_nested:
        yield Problem("`x` is not a nested tensor.", describe(x), "layout torch.jagged", hint, TypeError)
    elif x.layout != torch.jagged:
        own = "torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)"
        yield Problem("`x` has another layout.", f"{x.layout}", "torch.jagged", own, TypeError)
    elif (lengths := cast(Any, x).lengths()) is not None:
        got = f"offsets {cast(Any, x).offsets().tolist()}, lengths {lengths.tolist()}"
        yield Problem("`x` has holes between its bags.", got, "bags end to end", "x.contiguous()")
    elif not isinstance(x.shape[1], torch.SymInt):
        ragged = next(i for i, n in enumerate(x.shape) if isinstance(n, torch.SymInt))
        yield Problem("`x` is ragged in another dimension.", f"dimension {ragged}", "dimension 1",
                      f"x.transpose(1, {ragged})")  # fmt: skip


def bag_problems(x: JaggedTensor) -> Iterator[Problem]:
    if x.weights is not None:
        yield Problem("`x` has weights.", describe(x.weights), "none: a nested tensor has no place for them",
                      "to_nested(fr.JaggedTensor(x.values, x.offsets)), and one of (x.weights, x.offsets)")  # fmt: skip
    if is_wrapped(x.values) or is_wrapped(x.offsets):
        yield Problem("`x` is inside a transform of torch.func.", describe(x.values), "values of no transform",
                      "x.to_padded(length), or to_nested outside of it", TypeError)  # fmt: skip

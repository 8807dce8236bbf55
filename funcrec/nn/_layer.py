"""The record of a layer's functions, and draws of its initial parameters.

    y = apply(params, x),   params = init(key)

A draw is a function (key, shape) -> f32[shape]. A matrix is [out, in], as in torch.nn.Linear.
"""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcrec.core import (
    Draw,
    Key,
    Magnitude,
    Problem,
    Shape,
    Within,
    describe,
    random,
    reduced,
    shown,
    tree_problems,
    typed,
    typed_fields,
)

Y = TypeVar("Y")
FEW = "has too few dimensions"
OutputShape = Annotated[Shape, Within("1 dimension or more, the first for the outputs", lambda s: len(s) >= 1, FEW)]
MatrixShape = Annotated[Shape, Within("2 dimensions or more, the first for the outputs", lambda s: len(s) >= 2, FEW)]


@typed_fields
class Layer(NamedTuple, Generic[Y]):
    """A layer's functions and sizes; its parameters are outside of it.

    init: (key) -> params, a plain tree of f32 tensors, which you may convert to f64 or move to another device.
    apply: (params, x, ...) -> y, as in evaluation: without dropout, with running statistics.
    train_apply: (params, x, key, stats) -> (y, stats), as in training; None if training does not differ.
    init_stats: () -> the running statistics at the start; [] if there are none.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.linear(3, 2)
      >>> layer.apply(layer.init(fr.key(0)), torch.zeros(4, 3)).shape
      torch.Size([4, 2])
    """

    init: Callable[[Tensor], Any]
    apply: Callable[..., Y]
    train_apply: Callable[..., tuple[Y, Any]] | None = None
    init_stats: Callable[[], Any] = list

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)


@typed
def xavier_normal(key: Key, shape: MatrixShape) -> Tensor:
    """Return a matrix [out, in] drawn from N(0, 2 / (in + out)): (key, shape) -> f32[shape].

    torch.nn.init.xavier_normal_ draws the same way, and so do the weights of DLRM's MLPs.

    Example:
      >>> import funcrec as fr
      >>> round(fr.nn.xavier_normal(fr.key(0), (100, 300)).std().item(), 3)
      0.07
    """
    return random.normal(key, tuple(shape)) * math.sqrt(2 / max(shape[0] + shape[1], 1))


@typed
def fan_out_normal(key: Key, shape: OutputShape) -> Tensor:
    """Return numbers drawn from N(0, 1 / out), like the biases of DLRM's MLPs: (key, shape) -> f32[shape].

    Example:
      >>> import funcrec as fr
      >>> layer = fr.nn.linear(13, 512, bias=fr.nn.fan_out_normal)
      >>> round(layer.init(fr.key(0))["bias"].std().item(), 3)
      0.045

    Source: facebookresearch/dlrm, dlrm_s_pytorch.py, create_mlp.
    """
    return random.normal(key, tuple(shape)) * math.sqrt(1 / max(shape[0], 1))


@typed
def normal(std: Magnitude) -> Draw:
    """Return a draw of numbers from N(0, std²).

    Example:
      >>> import funcrec as fr
      >>> fr.nn.normal(1.0)(fr.key(0), (2, 3)).shape
      torch.Size([2, 3])
    """
    return lambda key, shape: random.normal(key, shape) * std


@typed
def zeros(key: Key, shape: Shape) -> Tensor:
    """Return zeros on the key's device: (key, shape) -> f32[shape].

    Example:
      >>> import funcrec as fr
      >>> fr.nn.zeros(fr.key(0), (2,))
      tensor([0., 0.])
    """
    return torch.zeros(shape, device=key.device)


@typed
def ones(key: Key, shape: Shape) -> Tensor:
    """Return ones on the key's device: (key, shape) -> f32[shape]."""
    return torch.ones(shape, device=key.device)


# -- validators --------------------------------------------------------------------------------------------------


def width_problems(x: object, width: int, name: str = "x") -> Iterator[Problem]:
    """Yield a problem unless x is f[..., width]."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        hint = f"{name}.float()" if isinstance(x, Tensor) else f"torch.zeros(2, {width})"
        yield Problem(f"`{name}` is not a float tensor.", describe(x), f"f[..., {width}]", hint, TypeError)
    elif x.dim() < 1 or x.shape[-1] != width:
        hint = f"a layer of {x.shape[-1]} inputs" if x.dim() else "x[None]"
        yield Problem(f"`{name}` has another width than the layer.", describe(x), f"f[..., {width}]", hint)


def param_problems(params: object, form: Any, name: str = "params", *, some: bool = True) -> Iterator[Problem]:
    """Yield problems unless `params` has the form that `tree_problems` takes."""
    hint = "stats=layer.init_stats()" if name == "stats" else "layer.init(key)"
    yield from tree_problems(params, name, form, "are not this layer's", hint, some=some)

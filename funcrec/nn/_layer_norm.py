"""Layer norm, and swish layer norm, which multiplies the input by a gate.

    layer norm: y = (x - mean) / √(var + eps) ⊙ weight + bias          swish layer norm: x ⊙ sigmoid(layer norm(x))

mean and var are over the D numbers of the last dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import Count, PositiveMagnitude, check, is_forward, remade, typed
from funcrec.nn._layer import Layer, ones, param_problems, width_problems, zeros


@remade
@typed
def layer_norm(dim: Count, *, eps: PositiveMagnitude = 1e-5) -> Layer[Tensor]:
    """Make a layer x f[..., dim] -> f[..., dim] that norms the last dimension.

    Returns:
      Layer with params {"weight", "bias"}, ones and zeros at the start.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.layer_norm(2)
      >>> layer.apply(layer.init(fr.key(0)), torch.tensor([[1.0, 3.0]])).round(decimals=3)
      tensor([[-1.,  1.]])

    Source: Ba et al., "Layer normalization" (arXiv:1607.06450); torch.nn.LayerNorm, whose state dict it reads.
    """
    return _normed("layer_norm", dim, eps, lambda x, y: y)


@remade
@typed
def swish_layer_norm(dim: Count, *, eps: PositiveMagnitude = 1e-5) -> Layer[Tensor]:
    """Make a layer x f[..., dim] -> f[..., dim] that multiplies x by the sigmoid of its layer norm.

    Returns:
      Layer with the params of `layer_norm`.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.swish_layer_norm(2)
      >>> layer.apply(layer.init(fr.key(0)), torch.tensor([[1.0, 3.0]])).round(decimals=3)
      tensor([[0.2690, 2.1930]])

    Source: TorchRec's SwishLayerNorm.
    """
    return _normed("swish_layer_norm", dim, eps, lambda x, y: x * y.sigmoid())


def _norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of x. The tangent of the tangent of torch's own layer norm (2.13) is wrong, without an
    error."""
    if not is_forward():
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    own = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (own * weight + bias).to(x.dtype)


def _normed(name: str, dim: int, eps: float, after) -> Layer[Tensor]:
    def init(key: Tensor) -> dict[str, Tensor]:
        return {"weight": ones(key, (dim,)), "bias": zeros(key, (dim,))}

    def apply(params: dict[str, Tensor], x: Tensor) -> Tensor:
        needed = {"weight": (dim,), "bias": (dim,)}
        check(f"funcrec.nn.{name}", width_problems(x, dim), param_problems(params, needed))
        return after(x, _norm(x, params["weight"], params["bias"], eps))

    return Layer(init, apply)

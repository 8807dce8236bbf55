"""Cross layers: products of features up to a fixed degree, as in DCN-v2.

    x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l,      W_l a matrix, or U_l V_l of low rank

Shapes: B batch, d width, r rank.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from funcrec.core import Count, Draw, check, random, typed
from funcrec.nn._layer import Layer, param_problems, width_problems, xavier_normal, zeros


@typed
def cross(dim: Count, rank: Count | None = None, *, weight: Draw = xavier_normal) -> Layer:
    """Make one cross layer, (x0, x f[..., dim]) -> f[..., dim].

    Args:
      rank: None for the full matrix W f[d, d]; r for U f[d, r] and V f[r, d], with W = U V.

    Returns:
      Layer with params {"weight", "bias"}, or {"u", "v", "bias"}.

    Cost: 2 B d² multiply-adds forward, or 4 B d r.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.cross(2)
      >>> x0 = torch.tensor([[2.0, 3.0]])
      >>> layer.apply({"weight": torch.eye(2), "bias": torch.ones(2)}, x0, x0)
      tensor([[ 8., 15.]])

    Source: Wang et al., "DCN V2" (WWW 2021), §3.2 and §3.4; TorchRec's CrossNet and LowRankCrossNet.
    """

    own = {"weight": (dim, dim)} if rank is None else {"u": (dim, rank), "v": (rank, dim)}
    needed = {**own, "bias": (dim,)}

    def init(key: Tensor) -> dict[str, Tensor]:
        first, second = random.split(key)
        bias = zeros(key, (dim,))
        if rank is None:
            return {"weight": weight(first, (dim, dim)), "bias": bias}
        return {"u": weight(first, (dim, rank)), "v": weight(second, (rank, dim)), "bias": bias}

    def apply(params: dict[str, Tensor], x0: Tensor, x: Tensor) -> Tensor:
        check(
            "funcrec.nn.cross", width_problems(x0, dim, "x0"), width_problems(x, dim), param_problems(params, **needed)
        )
        if rank is None:
            return x0 * F.linear(x, params["weight"], params["bias"]) + x
        return x0 * F.linear(F.linear(x, params["v"]), params["u"], params["bias"]) + x

    return Layer(init, apply)


@typed
def cross_network(dim: Count, num_layers: Count, rank: Count | None = None, *, weight: Draw = xavier_normal) -> Layer:
    """Make `num_layers` cross layers on one x0 f[..., dim] -> f[..., dim]; params are a list.

    Example:
      >>> import torch, funcrec as fr
      >>> net = fr.nn.cross_network(4, 3, rank=2)
      >>> net.apply(net.init(fr.key(0)), torch.ones(5, 4)).shape
      torch.Size([5, 4])
    """
    layer = cross(dim, rank, weight=weight)

    def init(key: Tensor) -> list[Any]:
        return [layer.init(k) for k in random.split(key, num_layers)]

    def apply(params: list[Any], x0: Tensor) -> Tensor:
        x = x0
        for own in params:
            x = layer.apply(own, x0, x)
        return x

    return Layer(init, apply)

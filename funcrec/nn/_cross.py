"""Cross layers: products of features up to a fixed degree, as in DCN-v2.

    x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l,      W_l a matrix, or U_l V_l of low rank

Shapes: B batch, d width, r rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import Count, Draw, check, random, remade, typed
from funcrec.nn._layer import Layer, param_problems, width_problems, xavier_normal, zeros


@remade
@typed
def cross(dim: Count, rank: Count | None = None, *, weight: Draw = xavier_normal) -> Layer[Tensor]:
    """Return one cross layer, (x0, x f[..., dim]) -> f[..., dim].

    Args:
      rank: None for the full matrix W f[d, d], or r for U f[d, r] and V f[r, d] with W = U V.

    Returns:
      Layer with params {"weight", "bias"}, or {"u", "v", "bias"}.

    Cost: the forward pass takes 2 B d² multiply-adds with the full matrix, and 4 B d r with rank r.

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
        check("funcrec.nn.cross", width_problems(x0, dim, "x0"), width_problems(x, dim), param_problems(params, needed))
        if rank is None:
            return x0 * F.linear(x, params["weight"], params["bias"]) + x
        return x0 * F.linear(F.linear(x, params["v"]), params["u"], params["bias"]) + x

    return Layer(init, apply)


@remade
@typed
def cross_network(
    dim: Count, num_layers: Count, rank: Count | None = None, *, weight: Draw = xavier_normal
) -> Layer[Tensor]:
    """Return a layer of `num_layers` cross layers on one x0 f[..., dim] -> f[..., dim]. Its params are a list.

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
        check("funcrec.nn.cross_network", param_problems(params, [...] * num_layers))
        x = x0
        for own in params:
            x = layer.apply(own, x0, x)
        return x

    return Layer(init, apply)


@remade
@typed
def vector_cross_network(dim: Count, num_layers: Count, *, weight: Draw = xavier_normal) -> Layer[Tensor]:
    """Make `num_layers` cross layers of one vector each, x0 f[..., dim] -> f[..., dim]; params are a list.

        x_{l+1} = x_0 ⟨w_l, x_l⟩ + b_l + x_l

    Returns:
      Layer with params [{"weight", "bias"}, ...], the weight with one row.

    Example:
      >>> import torch, funcrec as fr
      >>> net = fr.nn.vector_cross_network(2, 1)
      >>> net.apply([{"weight": torch.tensor([[1.0, 0.0]]), "bias": torch.ones(2)}], torch.tensor([[2.0, 3.0]]))
      tensor([[ 7., 10.]])

    Source: Wang et al., "Deep & cross network for ad click predictions" (ADKDD 2017), eq. 3; TorchRec's VectorCrossNet.
    """
    needed = {"weight": (1, dim), "bias": (dim,)}

    def init(key: Tensor) -> list[dict[str, Tensor]]:
        keys = random.split(key, num_layers)
        return [{"weight": weight(k, (1, dim)), "bias": zeros(k, (dim,))} for k in keys]

    def apply(params: list[dict[str, Tensor]], x0: Tensor) -> Tensor:
        found = param_problems(params, [needed] * num_layers)
        check("funcrec.nn.vector_cross_network", width_problems(x0, dim, "x0"), found)
        x = x0
        for own in params:
            x = x0 * F.linear(x, own["weight"]) + own["bias"] + x
        return x

    return Layer(init, apply)


@remade
@typed
def mixture_cross_network(
    dim: Count,
    num_layers: Count,
    num_experts: Count,
    rank: Count,
    *,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    weight: Draw = xavier_normal,
) -> Layer[Tensor]:
    """Make `num_layers` cross layers of low rank, each a mixture of experts, x0 f[..., dim] -> f[..., dim].

        x_{l+1} = Σ_k p_k(x_l) x_0 ⊙ (U_lk g(C_lk g(V_lk x_l)) + b_l) + x_l,    p(x) = softmax(G x),  g the activation

    Returns:
      Layer with params {"gate", "layers"}: one gate for all layers, as in TorchRec, and {"u", "c", "v", "bias"} of each
      layer, the first three with a matrix for each expert.

    Example:
      >>> import torch, funcrec as fr
      >>> net = fr.nn.mixture_cross_network(4, 2, num_experts=3, rank=2)
      >>> net.apply(net.init(fr.key(0)), torch.ones(5, 4)).shape
      torch.Size([5, 4])

    Source: Wang et al., "DCN V2" (WWW 2021), §3.4; TorchRec's LowRankMixtureCrossNet.
    """
    shapes = {"u": (num_experts, dim, rank), "c": (num_experts, rank, rank), "v": (num_experts, rank, dim)}

    def init(key: Tensor) -> dict[str, Any]:
        for_gate, *keys = random.split(key, num_layers + 1)
        draw = lambda k, shape: torch.stack([weight(own, shape[1:]) for own in random.split(k, num_experts)])
        drawn = [{n: draw(own, shapes[n]) for own, n in zip(random.split(k, 3), shapes, strict=True)} for k in keys]
        layers = [{**own, "bias": zeros(k, (dim,))} for own, k in zip(drawn, keys, strict=True)]
        return {"gate": weight(for_gate, (num_experts, dim)), "layers": layers}

    def apply(params: dict[str, Any], x0: Tensor) -> Tensor:
        form = {"gate": (num_experts, dim), "layers": [{**shapes, "bias": (dim,)}] * num_layers}
        check("funcrec.nn.mixture_cross_network", width_problems(x0, dim, "x0"), param_problems(params, form))
        x = x0
        for own in params["layers"]:
            inner = activation(torch.einsum("krd,...d->...kr", own["v"], x))
            inner = activation(torch.einsum("kqr,...kr->...kq", own["c"], inner))
            crossed = x0.unsqueeze(-2) * (torch.einsum("kdr,...kr->...kd", own["u"], inner) + own["bias"])
            share = F.linear(x, params["gate"]).softmax(-1)
            x = (share.unsqueeze(-1) * crossed).sum(-2) + x
        return x

    return Layer(init, apply)

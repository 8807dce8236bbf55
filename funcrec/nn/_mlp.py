"""Linear layers, and MLPs.

    linear: y = x Wᵀ + b          mlp: y = a_L(n_L(W_L d(... a_1(n_1(W_1 d(x) + b_1)) ...) + b_L))

d is dropout, n is batch norm, and a is the activation.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import Count, Draw, Share, Sizes, Within, check, random, remade, sure, typed
from funcrec.nn._batch_norm import batch_norm as batch_norm_layer
from funcrec.nn._dropout import dropout as drop
from funcrec.nn._layer import Layer, param_problems, width_problems, xavier_normal, zeros

Widths = Annotated[Sizes, Within("at least two sizes, an int >= 1", lambda s: len(s) >= 2, "has too few")]


@remade
@typed
def linear(num_in: Count, num_out: Count, *, weight: Draw = xavier_normal, bias: Draw | None = zeros) -> Layer[Tensor]:
    """Return a layer x f[..., num_in] -> f[..., num_out] with {"weight": f[num_out, num_in], "bias": f[num_out]}.

    Args:
      weight, bias: draw the parameters. bias=None makes a layer without bias.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.linear(2, 1)
      >>> layer.apply({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([10.0])}, torch.ones(1, 2))
      tensor([[13.]])

    Source: torch.nn.Linear, whose state dict the layer can read.
    """

    needed = {"weight": (num_out, num_in)} if bias is None else {"weight": (num_out, num_in), "bias": (num_out,)}

    def init(key: Tensor) -> dict[str, Tensor]:
        for_weight, for_bias = random.split(key)
        params = {"weight": weight(for_weight, (num_out, num_in))}
        return params if bias is None else {**params, "bias": bias(for_bias, (num_out,))}

    def apply(params: dict[str, Tensor], x: Tensor) -> Tensor:
        check("funcrec.nn.linear", width_problems(x, num_in), param_problems(params, needed))
        return F.linear(x, params["weight"], params.get("bias"))

    return Layer(init, apply)


@remade
@typed
def mlp(
    sizes: Widths,
    *,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    final_activation: Callable[[Tensor], Tensor] | None = None,
    dropout: Share = 0.0,
    batch_norm: bool = False,
    weight: Draw = xavier_normal,
    bias: Draw = zeros,
) -> Layer[Tensor]:
    """Return an MLP x f[..., num_in] -> f[..., num_out] of linear layers sizes[0] -> sizes[1] -> ... -> sizes[-1].

    Args:
      final_activation: the activation of the last layer. None leaves this layer linear, and without batch norm.
      dropout: the rate before every linear layer.
      batch_norm: whether there is batch norm between each linear layer and its activation.

    Returns:
      Layer with params {"linear": [...]} and, with batch norm, "norm": [...]. Its functions are
      apply(params, x, stats=[]) and train_apply(params, x, key, stats=[], mask=None) -> (y, stats). mask: as in
      `batch_norm`.

    Example:
      >>> import torch, funcrec as fr
      >>> tower = fr.nn.mlp((8, 16, 1), dropout=0.1)
      >>> params = tower.init(fr.key(0))
      >>> y, stats = tower.train_apply(params, torch.ones(4, 8), fr.key(1))
      >>> y.shape, stats
      (torch.Size([4, 1]), [])
    """
    count = len(sizes) - 1
    layers = [linear(a, b, weight=weight, bias=bias) for a, b in itertools.pairwise(sizes)]
    activations = [activation] * (count - 1) + [final_activation]
    norms = [batch_norm_layer(n) for n, a in zip(sizes[1:], activations, strict=True) if batch_norm and a is not None]
    stages = [(layer, i < len(norms), a) for i, (layer, a) in enumerate(zip(layers, activations, strict=True))]

    form = {"linear": [...] * count} | ({"norm": [...] * len(norms)} if norms else {})

    def check_parts(params: object, stats: object) -> None:
        check("funcrec.nn.mlp", param_problems(stats, [...] * len(norms), "stats"), param_problems(params, form))

    def init(key: Tensor) -> dict[str, Any]:
        keys = random.split(key, count)
        params = {"linear": [layer.init(k) for layer, k in zip(layers, keys, strict=True)]}
        return {**params, "norm": [n.init(key) for n in norms]} if norms else params

    def apply(params: dict[str, Any], x: Tensor, stats: Sequence[Any] = ()) -> Tensor:
        check_parts(params, stats)
        norm = lambda i, x: norms[i].apply(params["norm"][i], x, stats[i])
        return _stack(stages, params["linear"], x, lambda i, x: x, norm)

    def train_apply(
        params: dict[str, Any], x: Tensor, key: Tensor, stats: Sequence = (), mask: Tensor | None = None
    ) -> tuple[Tensor, list]:
        check_parts(params, stats)
        keys, new = random.split(key, count) if dropout else None, []

        def norm(i: int, x: Tensor) -> Tensor:
            y, own = sure(norms[i].train_apply)(params["norm"][i], x, None, stats[i], mask)
            new.append(own)
            return y

        before = lambda i, x: x if keys is None else drop(x, keys[i], dropout)
        return _stack(stages, params["linear"], x, before, norm), new

    return Layer(init, apply, train_apply, lambda: [n.init_stats() for n in norms])


def _stack(stages: Sequence, params: Sequence, x: Tensor, before: Callable, norm: Callable) -> Tensor:
    """Return a(norm(linear(before(x)))) after all stages. `before` and `norm` get the number of the stage."""
    for i, (layer, normed, active) in enumerate(stages):
        x = layer.apply(params[i], before(i, x))
        x = norm(i, x) if normed else x
        x = x if active is None else active(x)
    return x

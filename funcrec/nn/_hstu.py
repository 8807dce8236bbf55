"""The layer of HSTU: attention without softmax, whose output a gate multiplies.

    [u, v, q, k] = silu(W norm(x) + b),   a_i = Σ_j silu(⟨q_i, k_j⟩ / √D + bias_ij) v_j / normalizer
    y = x + W_out (u ⊙ norm(a)),   or   y = x + W_out [u, a, u ⊙ norm(a)]

Shapes: B bags, N capacity, H heads, D dim of queries and keys, V dim of values.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import (
    Count,
    PositiveMagnitude,
    Problem,
    Share,
    Size,
    check,
    describe,
    kind_of,
    pytree,
    random,
    reduced,
    remade,
    shown,
    typed,
    typed_fields,
)
from funcrec.jagged import JaggedTensor, jagged_attention, joined_bags
from funcrec.nn._dropout import dropout as drop
from funcrec.nn._layer import normal, param_problems, width_problems
from funcrec.nn._layer_norm import layer_norm
from funcrec.nn._mlp import linear

BAGS = kind_of(JaggedTensor)


@pytree(optional=("times",))
class Kept:
    """The keys and values of a history in one layer, so that later positions need not compute them.

    Args:
      keys: bags f[M, H, D].
      values: f[M, H, V].
      times: [M], or None.
    """

    keys: JaggedTensor
    values: Tensor
    times: Tensor | None = None


KEPT = kind_of(Kept | None)


@typed_fields
class HstuLayer(NamedTuple):
    """A layer of HSTU, as `hstu_layer` makes it.

    init: (key) -> params.
    apply: (params, x, times=None, num_targets=None, kept=None) -> y, as in evaluation. x and y are bags f[N, dim].
    train_apply: (params, x, key, times=None, num_targets=None) -> (y, []), with dropout.
    keep: (params, x, times=None) -> (y, Kept). A later `apply` of the positions after x takes what is kept.
    """

    init: Callable[[Tensor], Any]
    apply: Callable[..., JaggedTensor]
    train_apply: Callable[..., tuple[JaggedTensor, list]]
    keep: Callable[..., tuple[JaggedTensor, Kept]]

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)


@remade
@typed
def hstu_layer(
    dim: Count,
    *,
    normalizer: PositiveMagnitude,
    num_heads: Count = 1,
    qk_dim: Count = 32,
    linear_dim: Count = 32,
    num_positions: Size = 0,
    num_times: Size = 0,
    concatenate: bool = False,
    dropout: Share = 0.0,
) -> HstuLayer:
    """Return the layer of HSTU (hierarchical sequential transduction units) over bags of vectors, causal.

    Args:
      normalizer: the number that divides the sums of attention: the greatest length of a bag in the data. It must not
        depend on the batch.
      qk_dim, linear_dim: D and V of each head.
      num_positions, num_times: the sizes of the learned biases by distance and by time (`jagged_attention`). 0 means no
        such bias.
      concatenate: whether the output product also reads u and a, as in DLRMv3.
      dropout: the rate before the output product.

    Returns:
      HstuLayer. `times` [N] are the times of the positions, which a layer with num_times requires. `num_targets`
      i[B] marks the last positions of each bag as candidates: each sees the positions before them all, and itself.

    Law: y at a position depends on the positions before it and on itself. `apply` of the positions after x, with what
      `keep` returned for x, is `apply` of all positions.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.hstu_layer(4, normalizer=10.0, num_positions=8)
      >>> x = fr.JaggedTensor.from_lists([torch.ones(2, 4), torch.ones(1, 4)])
      >>> layer.apply(layer.init(fr.key(0)), x).values.shape
      torch.Size([3, 4])

    Source: Zhai et al., "Actions Speak Louder than Words" (ICML 2024), eqs. 1-3; meta-recsys/generative-recommenders.
    """
    call, inner = "funcrec.nn.hstu_layer", num_heads * linear_dim
    parts = [inner, inner, num_heads * qk_dim, num_heads * qk_dim]
    before, after = layer_norm(dim), layer_norm(inner)
    project, out = linear(dim, sum(parts)), linear(inner * (3 if concatenate else 1), dim, bias=None)
    biases = {"position_bias": num_positions, "time_bias": num_times}

    def init(key: Tensor) -> dict[str, Any]:
        keys = dict(zip(("project", "out", *biases), random.split(key, 4), strict=True))
        params = {"norm": before.init(key), "project": project.init(keys["project"]), "out": out.init(keys["out"])}
        learned = {name: normal(0.02)(keys[name], (num_heads, size)) for name, size in biases.items() if size}
        return {**params, "out_norm": after.init(key), **learned}

    form = dict.fromkeys(("norm", "project", "out", "out_norm"), ...)
    form |= {name: (num_heads, size) for name, size in biases.items() if size}

    def forward(params, x: JaggedTensor, key, times, num_targets, kept: Kept | None):
        check(call, BAGS.find("x", x), KEPT.find("kept", kept), param_problems(params, form))
        check(call, width_problems(x.values, dim, "x.values"), time_problems(times, num_times, x))
        inside = (x.bag_ids() < x.num_bags)[:, None]
        values = torch.where(inside, x.values, 0)
        u, v, q, k = F.silu(project.apply(params["project"], before.apply(params["norm"], values))).split(parts, 1)
        heads = lambda y: y.unflatten(1, (num_heads, -1))
        own = Kept(JaggedTensor(heads(k), x.offsets), heads(v), times if num_times else None)
        seen = own if kept is None else joined(kept, own)
        settings = {name: params[name] for name, size in biases.items() if size}
        if num_times:
            settings |= {"query_times": times, "key_times": seen.times}
        a = jagged_attention(
            JaggedTensor(heads(q), x.offsets), seen.keys, seen.values,
            activation="silu", normalizer=normalizer, num_targets=num_targets, **settings,
        ).values.flatten(1)  # fmt: skip
        gated = u * after.apply(params["out_norm"], a)
        gated = torch.cat([u, a, gated], 1) if concatenate else gated
        gated = gated if key is None else drop(gated, key, dropout)
        return JaggedTensor(values + out.apply(params["out"], gated), x.offsets), own

    def apply(params, x: JaggedTensor, times=None, num_targets=None, kept: Kept | None = None) -> JaggedTensor:
        return forward(params, x, None, times, num_targets, kept)[0]

    def train_apply(params, x: JaggedTensor, key: Tensor, times=None, num_targets=None) -> tuple[JaggedTensor, list]:
        random.check_key(call, key)
        return forward(params, x, key, times, num_targets, None)[0], []

    def keep(params, x: JaggedTensor, times=None) -> tuple[JaggedTensor, Kept]:
        return forward(params, x, None, times, None, None)

    return HstuLayer(init, apply, train_apply, keep)


def joined(kept: Kept, own: Kept) -> Kept:
    """Return the keys, values and times of the kept positions, followed by those of x, bag by bag."""
    like = lambda x, of: JaggedTensor(x, of.keys.offsets)
    values = joined_bags([like(x.values, x) for x in (kept, own)]).values
    times = None if own.times is None else joined_bags([like(x.times, x) for x in (kept, own)]).values
    return Kept(joined_bags([kept.keys, own.keys]), values, times)


# -- validators --------------------------------------------------------------------------------------------------


def time_problems(times: object, num_times: int, x: JaggedTensor) -> Iterator[Problem]:
    if not num_times:
        return
    if not isinstance(times, Tensor):
        need, hint = f"[{x.capacity}], a time for each position", "num_times=0, for a layer without times"
        yield Problem("`times` are not a tensor.", describe(times), need, hint, TypeError)
    elif times.shape != (x.capacity,):
        yield Problem("`times` do not match the positions.", describe(times), f"[{x.capacity}]")

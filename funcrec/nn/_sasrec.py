"""Layers of SASRec on bags of vectors: embeddings of positions, and blocks of causal attention.

    x + position[p]                  p counts from the start of the bag
    block: h = q + attention(q W_q, x W_k, x W_v) W_o,  q = norm(x);    y = f + relu(f W_1) W_2,  f = norm(h)

Shapes: B bags, N vectors, D dim, H heads, L positions.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Magnitude,
    Problem,
    Share,
    check,
    describe,
    kind_of,
    random,
    remade,
    replace,
    reported,
    typed,
)
from funcrec.jagged import JaggedTensor, jagged_attention
from funcrec.nn._dropout import dropout as drop
from funcrec.nn._layer import Layer, normal, param_problems, width_problems, xavier_normal, zeros
from funcrec.nn._layer_norm import layer_norm
from funcrec.nn._mlp import linear

BAGS = kind_of(JaggedTensor)
STD, EPS = 0.02, 1e-8  # like the source's parameters and its layer norms


@remade
@typed
def position_embedding(max_length: Count, dim: Count, *, std: Magnitude = STD) -> Layer[JaggedTensor]:
    """Return a layer that adds a learned vector for each position of a bag: apply(params, bags) -> bags.

    The first vector of a bag has position 0. Positions >= max_length get the last vector. Padding becomes 0.

    Args:
      max_length: L.
      std: of the first parameters, which are drawn from N(0, std²).

    Returns:
      Layer with params {"weight": f[L, D]}.

    Example:
      >>> import torch, funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([torch.zeros(2, 1), torch.zeros(1, 1)])
      >>> fr.nn.position_embedding(2, 1).apply({"weight": torch.tensor([[1.0], [2.0]])}, bags).values.flatten()
      tensor([1., 2., 1.])

    Source: Kang and McAuley, "Self-attentive sequential recommendation" (ICDM 2018), §III-A.
    """
    call = "funcrec.nn.position_embedding"

    def apply(params: dict[str, Tensor], bags: JaggedTensor) -> JaggedTensor:
        check(call, vector_problems(bags, dim), param_problems(params, {"weight": (max_length, dim)}))
        bag, start = places_of(bags)
        at = (torch.arange(bags.capacity, device=start.device) - start).clamp(0, max_length - 1)
        return replace(bags, values=without_padding(bags.values + params["weight"].index_select(0, at), bag, bags))

    return Layer(lambda key: {"weight": normal(std)(key, (max_length, dim))}, apply)


@remade
@typed
def sasrec_block(dim: Count, *, heads: Count = 1, dropout: Share = 0.0) -> Layer[JaggedTensor]:
    """Return a block of SASRec on bags of vectors f[N, dim]: causal attention, then a layer for each position.

    Args:
      heads: H, which divides dim.
      dropout: the rate after the attention and after each linear layer of the second part. (The source also applies
        dropout to attention weights, which are never stored here.)

    Returns:
      Layer with apply(params, bags) -> bags and train_apply(params, bags, key) -> (bags, []). Its result has the bags'
      offsets. Padding is not read, and holds no NaN.

    Law: the vector at position p does not depend on vectors after p, nor on other bags.

    Example:
      >>> import torch, funcrec as fr
      >>> block = fr.nn.sasrec_block(4, heads=2)
      >>> bags = fr.JaggedTensor.from_lists([torch.ones(3, 4), torch.ones(1, 4)])
      >>> block.apply(block.init(fr.key(0)), bags).values.shape
      torch.Size([4, 4])

    Source: Kang and McAuley, "Self-attentive sequential recommendation" (ICDM 2018), §III-B, with the norms of
      pmixer/SASRec.pytorch: queries are normed, keys and values are not.
    """
    call = "funcrec.nn.sasrec_block"
    check(call, head_problems(dim, heads))
    small = normal(STD)
    parts = {
        "attention_norm": layer_norm(dim, eps=EPS),
        "in": linear(dim, 3 * dim, weight=xavier_normal, bias=zeros),
        "out": linear(dim, dim, weight=small),
        "norm": layer_norm(dim, eps=EPS),
        "first": linear(dim, dim, weight=small),
        "second": linear(dim, dim, weight=small),
    }

    def init(key: Tensor) -> dict[str, Any]:
        return {
            name: part.init(k) for (name, part), k in zip(parts.items(), random.split(key, len(parts)), strict=True)
        }

    def run(params: dict[str, Any], bags: JaggedTensor, key: Tensor | None) -> JaggedTensor:
        check(call, vector_problems(bags, dim), param_problems(params, dict.fromkeys(parts, ...), some=False))
        keys = None if key is None else random.split(key, 3)
        dropped = lambda x, i: x if keys is None else drop(x, keys[i], dropout)
        of = lambda name, x: parts[name].apply(params[name], x)
        x = without_padding(bags.values, bags.bag_ids(), bags)
        q = of("attention_norm", x)
        seen = attention(call, q, x, params["in"], bags, heads)
        f = of("norm", q + dropped(of("out", seen), 0))
        inner = dropped(of("first", f), 1).relu()
        return replace(bags, values=f + dropped(of("second", inner), 2))

    return Layer(
        init, lambda params, bags: run(params, bags, None), lambda params, bags, key: (run(params, bags, key), [])
    )


def attention(call: str, q: Tensor, x: Tensor, params: Any, bags: JaggedTensor, heads: int) -> Tensor:
    """Return the attention f[N, D] of q over the keys and values of x; the weights and biases are concatenated."""
    dim = x.shape[1]
    check(call, param_problems(params, {"weight": (3 * dim, dim), "bias": (3 * dim,)}))
    (w_q, w), (b_q, b) = (params[n].split([dim, 2 * dim]) for n in ("weight", "bias"))
    split = lambda y: y.unflatten(-1, (-1, heads, dim // heads))
    queries = split(torch.nn.functional.linear(q, w_q, b_q))[:, 0]
    keys, values = split(torch.nn.functional.linear(x, w, b)).unbind(1)
    return jagged_attention(replace(bags, values=queries), replace(bags, values=keys), values).values.flatten(1)


def places_of(bags: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Return the bag of each place, and the start of this bag, i64[N] each."""
    bag = bags.bag_ids()
    return bag, bags.offsets.index_select(0, bag)


def without_padding(x: Tensor, bag: Tensor, bags: JaggedTensor) -> Tensor:
    return torch.where((bag < bags.num_bags)[:, None], x, 0)


# -- validators --------------------------------------------------------------------------------------------------


def vector_problems(bags: Any, dim: int) -> Iterator[Problem]:
    """Yield a problem unless `bags` are bags of vectors f[N, dim] without weights."""
    if (yield from reported(BAGS.find("bags", bags))):
        return
    yield from width_problems(bags.values, dim, "bags.values")
    if bags.values.dim() != 2:
        yield Problem("`bags` do not hold vectors.", describe(bags.values), f"values f[N, {dim}]")
    if bags.weights is not None:
        yield Problem("`bags` have weights.", describe(bags.weights), "weights=None", "JaggedTensor(values, offsets)")


def head_problems(dim: int, heads: int) -> Iterator[Problem]:
    if dim % heads:
        yield Problem("`heads` does not divide `dim`.", f"dim {dim}, heads {heads}", "a divisor of dim", "heads=1")

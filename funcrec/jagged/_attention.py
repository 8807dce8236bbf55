"""Attention within bags, without padding to the longest bag.

    out_i = Σ_j softmax_j(s_ij) v_j    or    Σ_j silu(s_ij) v_j / normalizer        over the keys j that query i sees
    s_ij = scale · ⟨q_i, k_j⟩ + position_bias[|i - j|] + time_bias[bucket(|t_i - t_j|)]

Shapes: B bags, N queries, M keys, H heads, D dim of queries and keys, V dim of values, P distances, T buckets of time.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from torch import Tensor

from funcrec.core import Finite, Form, PositiveMagnitude, Problem, check, describe, device_problems, replace, typed
from funcrec.jagged._attention_rules import attention
from funcrec.jagged._jagged import JaggedTensor


@typed
def jagged_attention(
    queries: JaggedTensor,
    keys: JaggedTensor,
    values: Annotated[Tensor, Form("f[M, H, V]")],
    *,
    causal: bool = True,
    activation: Literal["softmax", "silu"] = "softmax",
    scale: Finite | None = None,
    normalizer: PositiveMagnitude | None = None,
    position_bias: Annotated[Tensor, Form("f[K, P]")] | None = None,
    time_bias: Annotated[Tensor, Form("f[L, T]")] | None = None,
    query_times: Annotated[Tensor, Form("x[N]")] | None = None,
    key_times: Annotated[Tensor, Form("x[M]")] | None = None,
    num_targets: Annotated[Tensor, Form("i[B]")] | None = None,
) -> JaggedTensor:
    """Return the attention of each bag's queries over the bag's keys, a JaggedTensor of values -> f[N, H, V].

    The result has the offsets of the queries. Its padding is 0, and so is the row of a query that sees no key. Scores
    and sums are in f32, or in f64 for f64.

    Args:
      queries: values f[N, H, D], without weights.
      keys: values f[M, H, D] of as many bags, without weights. A bag of m keys and n queries may have m > n: then the
        first m - n keys are a kept history, and the last n belong to the queries. Query i has position i + m - n.
      values: f[M, H, V], a value for each key, in the dtype of queries and keys.
      causal: whether a query sees only the keys up to its own position. If not, it sees all keys of its bag.
      activation: "softmax"; or "silu", the attention of HSTU, where each weight is silu(s) / `normalizer`.
      scale: of the products. None is 1 / √D.
      normalizer: a number that "silu" requires. It must not depend on the batch; HSTU takes the greatest length.
      position_bias: f[H, P] or f[1, P], by the distance of the positions of query and key. Distances above P - 1 count
        as P - 1.
      time_bias: f[H, T] or f[1, T], by the time t between query and key. Bucket 0 has t < e^0.301, bucket k has
        e^(0.301 k) <= t < e^(0.301 (k + 1)), and bucket T - 1 all longer times.
      query_times, key_times: [N] and [M], the times of queries and keys, integers or floats; read as f64. The time
        between two is rounded to f32.
      num_targets: i[B]: the last queries and keys of each bag are targets, also called candidates. A target sees the
        keys before the targets, and itself. Each target has the distances to the history that the next position would
        have. Numbers are cut to [0, m].

    Returns:
      the attention, in the dtype of the queries.

    Raises:
      TypeError, ValueError: tensors, settings and dtypes that do not fit each other.

    Law: the attention of one bag depends on that bag alone. With `causal`, query i does not depend on keys and values
      after its position. Each target has the row that it would have as the only target of its bag.

    Cost: B times H products of n · m · (D + V) numbers; memory of the order of the operands.

    Example:
      >>> import torch, funcrec as fr
      >>> x = fr.JaggedTensor(torch.zeros(3, 1, 4), torch.tensor([0, 2, 3]))
      >>> v = torch.tensor([2.0, 4.0, 8.0]).view(3, 1, 1)
      >>> fr.jagged_attention(x, x, v).values.flatten()
      tensor([2., 3., 8.])

    Source: Zhai et al., "Actions Speak Louder than Words" (ICML 2024), section 3; its code's
      RelativeBucketedTimeAndPositionBasedBias and M-FALCON.
    """
    call = "funcrec.jagged_attention"
    check(call, buffer_problems(queries, keys, values))
    check(
        call,
        setting_problems(activation, normalizer),
        bias_problems(position_bias, time_bias, queries.values),
        time_problems(time_bias, query_times, key_times, queries.values, keys.values),
        target_problems(num_targets, queries),
    )
    tensors = queries.values, keys.values, values, position_bias, time_bias, queries.offsets, keys.offsets
    scale = queries.values.shape[2] ** -0.5 if scale is None else float(scale)
    divisor = 1.0 if normalizer is None else float(normalizer)
    numbers = scale, divisor, activation == "softmax", bool(causal)
    out = attention((*tensors, query_times, key_times, num_targets), numbers)
    return replace(queries, values=out)


# -- validators --------------------------------------------------------------------------------------------------


def buffer_problems(queries: JaggedTensor, keys: JaggedTensor, values: Tensor) -> Iterator[Problem]:
    q, k = queries.values, keys.values
    for name, x in (("queries.values", q), ("keys.values", k), ("values", values)):
        if not x.is_floating_point() or x.itemsize < 2:
            hint = f"{name}.float()"
            yield Problem(f"`{name}` are not floats of 16 bits or more.", describe(x), "f[N, H, D]", hint, TypeError)
        elif x.dim() != 3:
            yield Problem(f"`{name}` have no heads.", describe(x), "f[N, H, D]", f"{name}.unflatten(-1, (H, -1))")
        elif x.dtype != q.dtype:
            got = f"{describe(x)} and {describe(q)}"
            yield Problem(f"`{name}` has another dtype.", got, "the dtype of `queries`", f"{name}.to(dtype)", TypeError)
    for name, bags in (("queries", queries), ("keys", keys)):
        if bags.weights is not None:
            hint = "JaggedTensor(values, offsets)"
            yield Problem(f"`{name}` have weights.", describe(bags.weights), "weights=None", hint, TypeError)
    if q.dim() == k.dim() == values.dim() == 3:
        yield from size_problems(queries, keys, values)


def size_problems(queries: JaggedTensor, keys: JaggedTensor, values: Tensor) -> Iterator[Problem]:
    q, k = queries.values, keys.values
    if q.shape[1:] != k.shape[1:] or not q.shape[2]:
        got, need = f"{describe(q)} and {describe(k)}", "f[N, H, D] and f[M, H, D], D >= 1"
        yield Problem("`queries` and `keys` have no heads or dim in common.", got, need, "one number of heads for both")
    if values.shape[:2] != k.shape[:2]:
        got, need = f"{describe(values)}; keys are {describe(k)}", "f[M, H, V], a value for each key"
        yield Problem("`values` do not match `keys`.", got, need, "values of the keys' positions and heads")
    if queries.num_bags != keys.num_bags:
        got, need = f"{queries.num_bags} and {keys.num_bags} bags", "as many bags"
        hint = "keys with an empty bag, where there is none"
        yield Problem("`queries` and `keys` have different numbers of bags.", got, need, hint)
    yield from device_problems(queries=q, keys=k, values=values)


def setting_problems(activation: str, normalizer: float | None) -> Iterator[Problem]:
    if activation == "silu" and normalizer is None:
        hint = "normalizer=200, the greatest length of a bag in the data"
        yield Problem("`silu` requires `normalizer`.", "normalizer=None", "a number > 0", hint)
    elif activation == "softmax" and normalizer is not None:
        hint = 'normalizer=None, or activation="silu"'
        yield Problem("`softmax` takes no `normalizer`.", f"normalizer={normalizer}", "None", hint)


def bias_problems(position_bias: Tensor | None, time_bias: Tensor | None, queries: Tensor) -> Iterator[Problem]:
    heads = queries.shape[1]
    for name, bias in (("position_bias", position_bias), ("time_bias", time_bias)):
        if bias is None:
            continue
        if bias.shape[0] not in (1, heads) or not bias.shape[1]:
            need, hint = f"f[{heads}, P] or f[1, P], P >= 1", f"torch.zeros({heads}, 200)"
            yield Problem(f"`{name}` does not fit the heads.", describe(bias), need, hint)
        if bias.itemsize < 2:
            need = "floats of 16 bits or more"
            yield Problem(f"`{name}` is of 8 bits.", describe(bias), need, f"{name}.float()", TypeError)
        yield from device_problems(**{"queries": queries, name: bias})


def time_problems(
    bias: Tensor | None, query_times: Tensor | None, key_times: Tensor | None, queries: Tensor, keys: Tensor
) -> Iterator[Problem]:
    show = lambda x: "None" if x is None else describe(x)
    given = {"query_times": (query_times, queries), "key_times": (key_times, keys)}
    for name, (times, owner) in given.items():
        if (times is None) != (bias is None):
            got = f"{name}={show(times)}, time_bias={show(bias)}"
            hint = "both times, or no time_bias"
            yield Problem("`time_bias` and times come together.", got, "time_bias, query_times and key_times", hint)
        elif times is not None and times.shape != owner.shape[:1]:
            yield Problem(f"`{name}` does not match its rows.", describe(times), f"[{owner.shape[0]}]")
        elif times is not None:
            yield from device_problems(**{"queries": queries, name: times})
            if times.dtype == torch.bool or times.itemsize < 2:
                need = "integers or floats of 16 bits or more"
                yield Problem(f"`{name}` are not times.", describe(times), need, f"{name}.long()", TypeError)


def target_problems(num_targets: Tensor | None, queries: JaggedTensor) -> Iterator[Problem]:
    if num_targets is None:
        return
    if num_targets.shape[0] != queries.num_bags:
        got, need = describe(num_targets), f"i[{queries.num_bags}], a number for each bag"
        yield Problem("`num_targets` does not match the bags.", got, need, "torch.ones(B, dtype=torch.int64)")
    yield from device_problems(queries=queries.values, num_targets=num_targets)

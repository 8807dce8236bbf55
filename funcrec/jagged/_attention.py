"""Attention within bags, without padding to the longest bag.

    out_i = Σ_j softmax_j(s_ij) v_j    or    Σ_j silu(s_ij) v_j / normalizer        over the keys j that query i sees
    s_ij = scale · ⟨q_i, k_j⟩ + position_bias[|i - j|] + time_bias[bucket(|t_i - t_j|)]

Shapes: B bags, N queries, M keys, H heads, D dim of queries and keys, V dim of values, P distances, T buckets of time.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from torch import Tensor

from funcrec.core import Finite, Form, PositiveMagnitude, Problem, check, describe, device_problems, replace, typed
from funcrec.jagged._attention_rules import attention
from funcrec.jagged._jagged import JaggedTensor


@typed
def jagged_attention(
    queries: Annotated[JaggedTensor, Form("f16+[N, H, D]", bags="B", weights=False)],
    keys: Annotated[JaggedTensor, Form("f16+[M, H, D]", bags="B", weights=False)],
    values: Annotated[Tensor, Form("f16+[M, H, V]")],
    *,
    causal: bool = True,
    activation: Literal["softmax", "silu"] = "softmax",
    scale: Finite | None = None,
    normalizer: PositiveMagnitude | None = None,
    position_bias: Annotated[Tensor, Form("f16+[K, P]")] | None = None,
    time_bias: Annotated[Tensor, Form("f16+[L, T]")] | None = None,
    query_times: Annotated[Tensor, Form("n16+[N]")] | None = None,
    key_times: Annotated[Tensor, Form("n16+[M]")] | None = None,
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
    check(call, dtype_problems(queries.values, keys.values, values), setting_problems(activation, normalizer))
    heads = queries.values.shape[1]
    check(call, bias_problems(position_bias, time_bias, heads), time_problems(time_bias, query_times, key_times))
    biases = {name: x for name, x in (("position_bias", position_bias), ("time_bias", time_bias)) if x is not None}
    check(call, device_problems(queries=queries.values, **biases))
    tensors = queries.values, keys.values, values, position_bias, time_bias, queries.offsets, keys.offsets
    scale = queries.values.shape[2] ** -0.5 if scale is None else float(scale)
    divisor = 1.0 if normalizer is None else float(normalizer)
    numbers = scale, divisor, activation == "softmax", bool(causal)
    out = attention((*tensors, query_times, key_times, num_targets), numbers)
    return replace(queries, values=out)


# -- validators --------------------------------------------------------------------------------------------------


def dtype_problems(queries: Tensor, keys: Tensor, values: Tensor) -> Iterator[Problem]:
    for name, x in (("keys.values", keys), ("values", values)):
        if x.dtype != queries.dtype:
            got = f"{describe(x)} and {describe(queries)}"
            yield Problem(f"`{name}` has another dtype.", got, "the dtype of `queries`", f"{name}.to(dtype)", TypeError)
    if not queries.shape[2]:
        yield Problem("`queries` have no dim.", describe(queries), "f[N, H, D], D >= 1", "vectors of a model")


def setting_problems(activation: str, normalizer: float | None) -> Iterator[Problem]:
    if activation == "silu" and normalizer is None:
        hint = "normalizer=200, the greatest length of a bag in the data"
        yield Problem("`silu` requires `normalizer`.", "normalizer=None", "a number > 0", hint)
    elif activation == "softmax" and normalizer is not None:
        hint = 'normalizer=None, or activation="silu"'
        yield Problem("`softmax` takes no `normalizer`.", f"normalizer={normalizer}", "None", hint)


def bias_problems(position_bias: Tensor | None, time_bias: Tensor | None, heads: int) -> Iterator[Problem]:
    for name, bias in (("position_bias", position_bias), ("time_bias", time_bias)):
        if bias is not None and (bias.shape[0] not in (1, heads) or not bias.shape[1]):
            need, hint = f"f[{heads}, P] or f[1, P], P >= 1", f"torch.zeros({heads}, 200)"
            yield Problem(f"`{name}` does not fit the heads.", describe(bias), need, hint)


def time_problems(bias: Tensor | None, query_times: Tensor | None, key_times: Tensor | None) -> Iterator[Problem]:
    given = {"time_bias": bias, "query_times": query_times, "key_times": key_times}
    if 0 < sum(x is None for x in given.values()) < 3:
        got = ", ".join(f"{name}={'None' if x is None else describe(x)}" for name, x in given.items())
        hint = "both times, or no time_bias"
        yield Problem("`time_bias` and times come together.", got, "time_bias, query_times and key_times", hint)

"""Losses of a query's own candidate among drawn negatives.

sampled_softmax: log (exp z⁺ + Σ_k exp z_k) - z⁺,   z = ⟨q, c⟩ / T - log Q
gbce:            -(β log σ(z⁺) + Σ_k log σ(-z_k)) / (K + 1),   β = 1 - t (1 - K / (R - 1))

Q is the probability that the draw gives the candidate. gBCE undoes the overconfidence that few negatives of R items
cause: t = 0 is binary cross entropy, and with t = 1 the scores are those of all items.
Shapes: N queries, K negatives, D dim, R items.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import (
    Count,
    Form,
    PositiveMagnitude,
    Problem,
    Scalar,
    UnitInterval,
    check,
    describe,
    or_nan,
    sure,
    typed,
)
from funcrec.losses._classes import log_q_problems
from funcrec.losses._mean import Reduction, reduce, weight_problems
from funcrec.tables import blank_padding

Vectors = Annotated[Tensor, Form("f[N, D]")]
Weights = Annotated[Tensor, Form("f[N]")] | None
Negatives = Annotated[Tensor, Form("f[...]")]  # f[K, D] for all queries, or f[N, K, D]
LogQ = Annotated[Tensor, Form("f[N]")]
NegativeLogQ = Annotated[Tensor, Form("f[...]")]
Ids = Annotated[Tensor, Form("i[N]")]
NegativeIds = Annotated[Tensor, Form("i[...]")]


@typed(needs={
    "log_q": "negative_log_q", "negative_log_q": "log_q", "candidate_ids": "negative_ids",
    "negative_ids": "candidate_ids",
})  # fmt: skip
def sampled_softmax(
    query: Vectors,
    candidate: Vectors,
    negatives: Negatives,
    weight: Weights = None,
    *,
    log_q: LogQ | None = None,
    negative_log_q: NegativeLogQ | None = None,
    candidate_ids: Ids | None = None,
    negative_ids: NegativeIds | None = None,
    temperature: PositiveMagnitude | Scalar = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the mean cross entropy of each query's own candidate among drawn negatives, f[].

    Args:
      query, candidate: f[N, D]. Row i of `query` and row i of `candidate` belong together.
      negatives: f[K, D] for all queries, or f[N, K, D], each query's own.
      weight: f[N] >= 0, or None. An example of weight 0 is padding and is not read, unless the weights are
        differentiated (`weighted_mean`).
      log_q: f[N], the logarithm of the probability with which each candidate is drawn; `fr.data.log_q` computes it from
        counts. If both are None, nothing is corrected, which is right if all items are equally likely.
      negative_log_q: the same for the negatives, f[K] or f[N, K].
      candidate_ids: i[N], with `negative_ids`. A negative that is the query's own candidate does not count.
      negative_ids: the ids of the negatives, i[K] or i[N, K].
      temperature: T > 0, a number or f[]. The loss is NaN for a tensor that is not > 0.
      reduction: "mean" for `weighted_mean`, f[]; "none" for the loss of each example, f[N], 0 for padding.

    Floats of 16 bits are computed in f32.

    Raises:
      TypeError, ValueError: the negatives do not fit the queries, or a `log_q` is not the logarithm of a probability,
        finite and <= 0. If no value can be read (under `jit`, on a GPU), the loss is NaN instead.

    Law: with all other items as negatives and no correction, it is `full_softmax`.

    Example:
      >>> import torch, funcrec as fr
      >>> query = candidate = torch.eye(2)
      >>> fr.losses.sampled_softmax(query, candidate, torch.zeros(3, 2))
      tensor(0.7437)

    Source: Bengio and Senécal, "Quick training of probabilistic neural nets" (2003); Jean et al., "On using very large
      target vocabulary for neural machine translation" (ACL 2015).
    """
    call = "funcrec.losses.sampled_softmax"
    check(call, weight_problems(weight), fit_problems(query, negatives, negative_log_q, negative_ids))
    check(call, log_q_problems(log_q, weight), log_q_problems(negative_log_q, None, "negative_log_q"))
    own, others = scores(query, candidate, negatives, weight, candidate_ids, negative_ids, temperature)
    if log_q is not None:
        own = own - chances(blank_padding(log_q, weight))
        others = others - chances(sure(negative_log_q))
    loss = -torch.log_softmax(torch.cat([own[:, None], others], 1), 1)[:, 0]
    return reduce(loss.to(query.dtype), weight, reduction)


@typed(needs={"candidate_ids": "negative_ids", "negative_ids": "candidate_ids"})
def gbce(
    query: Vectors,
    candidate: Vectors,
    negatives: Negatives,
    weight: Weights = None,
    *,
    num_items: Count,
    calibration: UnitInterval | Scalar = 0.75,
    candidate_ids: Ids | None = None,
    negative_ids: NegativeIds | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the mean generalised binary cross entropy of each query's candidate and its drawn negatives, f[].

    Args:
      query, candidate, negatives, weight, candidate_ids, negative_ids, reduction: as in `sampled_softmax`.
      num_items: R, the number of items that the negatives are drawn from, uniformly.
      calibration: t in [0, 1], a number or f[] (NaN outside of [0, 1]). With 0 it is plain binary cross entropy.

    Floats of 16 bits are computed in f32.

    Law: with t = 0 it is the mean of `bce` over the candidate (label 1) and the K negatives (label 0).

    Example:
      >>> import torch, funcrec as fr
      >>> fr.losses.gbce(torch.eye(2), torch.eye(2), torch.zeros(3, 2), num_items=100, calibration=0.0)
      tensor(0.5982)

    Source: Petrov and Macdonald, "gSASRec" (RecSys 2023), eq. 20 to 22.
    """
    call = "funcrec.losses.gbce"
    check(call, weight_problems(weight), fit_problems(query, negatives, None, negative_ids))
    own, others = scores(query, candidate, negatives, weight, candidate_ids, negative_ids, 1.0)
    count = others.shape[1]
    power = 1 - or_nan(calibration, lambda t: (t >= 0) & (t <= 1)) * (1 - count / max(num_items - 1, 1))
    loss = -(power * F.logsigmoid(own) + F.logsigmoid(-others).sum(1)) / (count + 1)
    return reduce(loss.to(query.dtype), weight, reduction)


def scores(
    query: Tensor,
    candidate: Tensor,
    negatives: Tensor,
    weight: Tensor | None,
    candidate_ids: Tensor | None,
    negative_ids: Tensor | None,
    temperature: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the scores of the own candidates f[N] and of the negatives f[N, K]; -∞ for a negative that is the own
    candidate."""
    dtype = torch.promote_types(torch.promote_types(query.dtype, candidate.dtype), torch.float32)
    dtype = torch.promote_types(dtype, negatives.dtype)
    q, c = (blank_padding(x, weight).to(dtype) for x in (query, candidate))
    n = (negatives if negatives.dim() == 2 else blank_padding(negatives, weight)).to(dtype)
    q = q / or_nan(temperature)
    others = q @ n.T if n.dim() == 2 else (n @ q[:, :, None])[:, :, 0]
    if candidate_ids is not None:
        others = torch.where(negative_ids == candidate_ids[:, None], -torch.inf, others)
    return (q * c).sum(1), others


def chances(log_q: Tensor) -> Tensor:
    """Return log Q, with NaN for what is not the logarithm of a probability."""
    return torch.where((log_q <= 0) & (log_q > -torch.inf), log_q, torch.nan)


# -- validators --------------------------------------------------------------------------------------------------


def fit_problems(query: Tensor, negatives: Tensor, log_q: Tensor | None, ids: Tensor | None) -> Iterator[Problem]:
    n, d = query.shape
    if negatives.dim() not in (2, 3) or negatives.shape[-1] != d or (negatives.dim() == 3 and negatives.shape[0] != n):
        hint = "fr.lookup_sequence of drawn ids, fr.data.uniform_negatives"
        yield Problem("`negatives` do not fit the queries.", describe(negatives), f"f[K, {d}] or f[{n}, K, {d}]", hint)
        return
    for name, x in (("negative_log_q", log_q), ("negative_ids", ids)):
        if x is not None and x.shape != negatives.shape[:-1]:
            need = f"{list(negatives.shape[:-1])}, one for each negative"
            yield Problem(f"`{name}` do not match the negatives.", describe(x), need, "one draw for both")

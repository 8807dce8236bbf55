"""Metrics of lists: how many of the relevant rows are among the first k of a list.

    recall = |given ∩ relevant| / |relevant|,    hit rate = [given ∩ relevant ≠ ∅],
    NDCG = Σ_j [given_j relevant] / log2(j + 2)  /  Σ_{j < min(k, |relevant|)} 1 / log2(j + 2),         j = 0 .. k - 1

Shapes: B lists, K rows in each, N relevant rows in all lists together.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from funcrec.core import PARTS, Count, Problem, check, describe, typed
from funcrec.jagged import JaggedTensor
from funcrec.kernels.reference_jagged import ascending, place_among
from funcrec.metrics._metric import ANY, Metric, sums


@typed
def recall(k: Count) -> Metric:
    """Make a metric: the share of the relevant rows that are among the first k, as the mean over lists. Lists without
    relevant rows are left out.

    predictions: i[B, K], rows with the best first, each at most once in a list, as `fr.top_k` returns them; -1 for no
    row. labels: a JaggedTensor of B bags of relevant rows; a row that is there twice counts once. weights: [B].

    Example:
      >>> import torch, funcrec as fr
      >>> m = fr.metrics.recall(2)
      >>> m.compute(m.update(m.init(), torch.tensor([[5, 3, 1]]), fr.JaggedTensor.from_lists([[3, 1]])))
      tensor(0.5000, dtype=torch.float64)
    """
    return _of_lists("recall", k, lambda hits, count: hits.sum(1) / count)


@typed
def hit_rate(k: Count) -> Metric:
    """Make a metric: the share of the lists with a relevant row among the first k. Arguments as in `recall`."""
    return _of_lists("hit_rate", k, lambda hits, count: hits.amax(1))


@typed
def ndcg(k: Count) -> Metric:
    """Make a metric: the normalised discounted cumulative gain of the first k, for relevance 0 or 1. Arguments as in
    `recall`.

    Source: Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques" (TOIS 2002).
    """

    def gain(hits, count):
        discounts = 1 / torch.arange(2, k + 2, dtype=torch.float64, device=hits.device).log2()
        best = (discounts * (torch.arange(k, device=hits.device) < count[:, None])).sum(1)
        return (hits * discounts[: hits.shape[1]]).sum(1) / best

    return _of_lists("ndcg", k, gain)


def _of_lists(name: str, k: int, value: Callable[[Tensor, Tensor], Tensor]) -> Metric:
    call = f"funcrec.metrics.{name}"
    mean = sums(name, lambda p, y: {"value": p}, lambda s: s["value"] / s["weight"], from_logits=ANY)

    def update(state, predictions, labels, weights=None):
        check(f"{call}.update", list_problems(predictions, labels, weights))
        hits, count = hits_of(predictions[:, :k], labels)
        weights = torch.ones_like(count) if weights is None else weights
        hits = hits if hits.shape[1] else hits.new_zeros(hits.shape[0], 1)
        own = torch.where(count > 0, value(hits, count), 0)
        return mean.update(state, own, torch.zeros_like(own), weights * (count > 0))

    return Metric(mean.init, update, mean.compute)


def hits_of(rows: Tensor, relevant: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Return (f64[B, K]: which rows are relevant, f64[B]: the number of distinct relevant rows)."""
    num_bags, values = rows.shape[0], relevant.values.long()
    bounds = ascending(relevant.offsets).clamp(0, values.shape[0]).long()
    bag = place_among(bounds, torch.arange(values.shape[0], device=values.device)) - 1
    bag = torch.where((bag >= 0) & (bag < num_bags), bag, num_bags)  # padding belongs to bag num_bags
    order = values.argsort(stable=True)
    order = order[bag[order].argsort(stable=True)]
    bag, values = bag[order], values[order]
    is_new = (values >= 0) & (bag < num_bags)
    is_new[1:] &= (bag[1:] != bag[:-1]) | (values[1:] != values[:-1])
    count = torch.zeros(num_bags + 1, dtype=torch.float64, device=rows.device).index_add(0, bag, is_new.double())
    given = torch.cat([rows.long(), rows.new_full((1, rows.shape[1]), -1).long()])
    found = (given.index_select(0, bag) == values[:, None]) & is_new[:, None]
    return torch.zeros_like(given, dtype=torch.float64).index_add(0, bag, found.double())[:-1], count[:-1]


# -- validators --------------------------------------------------------------------------------------------------


def list_problems(predictions: object, labels: object, weights: object) -> Iterator[Problem]:
    is_rows = isinstance(predictions, Tensor) and predictions.dtype in (torch.int32, torch.int64)
    if not is_rows or predictions.dim() != 2:
        kind = ValueError if is_rows else TypeError
        what, hint = "`predictions` are not lists of rows.", "fr.top_k(...)[1]"
        yield Problem(what, describe(predictions), "i[B, K]", hint, kind)
        return
    values = labels.values if isinstance(labels, JaggedTensor) else None
    if not isinstance(values, Tensor) or values.dtype not in (torch.int32, torch.int64):
        got = describe(values if isinstance(labels, JaggedTensor) else labels)
        hint = "fr.JaggedTensor.from_lists([[3], [5, 1]])"
        yield Problem("`labels` are not bags of rows.", got, "a JaggedTensor of integers", hint, TypeError)
    elif found := list(PARTS[JaggedTensor](labels, "labels")):
        yield from found
    elif values.dim() != 1 or labels.offsets.shape[0] != predictions.shape[0] + 1:
        got, need = f"{labels.offsets.shape[0] - 1} bags", f"{predictions.shape[0]}, one for each list"
        yield Problem("`labels` have other lists.", got, need, "the same batch's relevant rows")
    if weights is not None and not isinstance(weights, Tensor):
        yield Problem("`weights` are not numbers.", describe(weights), "a tensor, or None", "torch.tensor", TypeError)
    elif weights is not None and weights.shape != predictions.shape[:1]:
        need = f"shape [{predictions.shape[0]}]"
        yield Problem("`weights` do not match `predictions`.", describe(weights), need, "one for each list")

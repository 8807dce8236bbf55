"""Metrics of lists: how many of the relevant rows are among the first k of a list.

    recall = |given ∩ relevant| / |relevant|,    hit rate = [given ∩ relevant ≠ ∅],
    NDCG = Σ_j [given_j relevant] / log2(j + 2)  /  Σ_{j < min(k, |relevant|)} 1 / log2(j + 2),         j = 0 .. k - 1
    MAP  = Σ_j [given_j relevant] · precision(j + 1)  /  min(k, |relevant|),     MRR = 1 / (1 + the least j with a hit)

Shapes: B lists, K rows in each, N relevant rows in all lists together, R rows of the item table.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import Count, Form, Problem, check, describe, kind_of, reported, tree_problems, typed
from funcrec.jagged import JaggedTensor, is_concrete
from funcrec.kernels.reference_jagged import ascending, place_among
from funcrec.metrics._metric import ANY, Metric, range_problems, sums

LISTS = kind_of(Annotated[Tensor, Form("i[B, K]", "lists of rows")])
ROWS = kind_of(Annotated[JaggedTensor, Form("i[N]", "rows")])


@typed
def recall(k: Count) -> Metric:
    """Make a metric: the share of the relevant rows that are among the first k, as the mean over lists. Lists without
    relevant rows are left out.

    predictions: i[B, K], rows with the best first, each at most once in a list, as `fr.top_k` returns them; -1 for no
    row. labels: a JaggedTensor of B bags of relevant rows; a repeated row counts once. weights: [B].

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


@typed
def precision(k: Count) -> Metric:
    """Make a metric: the number of relevant rows among the first k, divided by k, as the mean over lists. Arguments as
    in `recall`."""
    return _of_lists("precision", k, lambda hits, count: hits.sum(1) / k)


@typed
def mrr(k: Count) -> Metric:
    """Make a metric: the mean over lists of 1 / the place of the first relevant row. It is 0 if none is among the
    first k. Arguments as in `recall`.

    Source: Voorhees, "The TREC-8 question answering track report" (1999).
    """
    return _of_lists("mrr", k, lambda hits, count: (hits / places(hits)).amax(1))


@typed
def mean_average_precision(k: Count) -> Metric:
    """Make a metric: the mean over lists of the average precision: the sum of the precisions at relevant rows, over
    min(k, the number of relevant rows). Arguments as in `recall`.

    Source: TREC's MAP, cut at k; RecTools' MAP.
    """

    def value(hits, count):
        return (hits * hits.cumsum(1) / places(hits)).sum(1) / count.clamp(max=k)

    return _of_lists("mean_average_precision", k, value)


@typed
def coverage(k: Count, num_items: Count) -> Metric:
    """Make a metric: the share of the items that are among the first k of at least one list.

    It reads no labels, and leaves out lists of weight 0.

    predictions: rows below num_items; -1 stands for none.

    Cost: the state is f64[num_items].

    Example:
      >>> import torch, funcrec as fr
      >>> m = fr.metrics.coverage(2, num_items=8)
      >>> none = fr.JaggedTensor.from_lists([[], []], dtype=torch.int64)
      >>> m.compute(m.update(m.init(), torch.tensor([[5, 3], [3, 1]]), none))
      tensor(0.3750, dtype=torch.float64)
    """
    call = "funcrec.metrics.coverage"

    def init(device=None):
        return torch.zeros(num_items, dtype=torch.float64, device=device)

    def update(state, predictions, labels, weights=None):
        check(f"{call}.update", list_problems(predictions, labels, weights))
        check(
            f"{call}.update",
            item_problems(predictions, weights, num_items),
            tree_problems(state, "state", (num_items,), "", "state = metric.init()"),
        )
        is_given, rows, w = given(predictions[:, :k], weights, num_items)
        return state.index_add(0, rows.flatten(), torch.where(is_given, w[:, None], 0 * w[:, None]).flatten())

    def compute(state):
        check(f"{call}.compute", tree_problems(state, "state", (num_items,), "", "state = metric.init()"))
        return torch.where(state.isnan().any(), torch.nan, (state > 0).double().mean())

    return Metric(init, update, compute)


@typed
def novelty(k: Count, counts: Annotated[Tensor, Form("n[R]")], num_users: Count) -> Metric:
    """Make a metric: the mean over lists of the mean of log2(num_users / counts[row]), in bits, of the first k rows.

    Args:
      counts: [R], how many of the users in training took each row, 0 to num_users; a row with count 0 counts as 1.

    Lists without a row are left out. Labels are not read.

    Example:
      >>> import torch, funcrec as fr
      >>> m = fr.metrics.novelty(2, counts=torch.tensor([8, 2, 1]), num_users=8)
      >>> none = fr.JaggedTensor.from_lists([[]], dtype=torch.int64)
      >>> m.compute(m.update(m.init(), torch.tensor([[0, 1]]), none))
      tensor(1., dtype=torch.float64)

    Source: Zhou et al., "Solving the apparent diversity-accuracy dilemma of recommender systems" (PNAS 2010); RecTools'
    MeanInvUserFreq.
    """
    check("funcrec.metrics.novelty", popularity_problems(counts, num_users))
    num_items = counts.shape[0]
    bits = (num_users / counts.double().clamp(min=1)).log2()
    mean = sums("novelty", lambda p, y: {"value": p}, lambda s: s["value"] / s["weight"], from_logits=ANY)

    def update(state, predictions, labels, weights=None):
        call = "funcrec.metrics.novelty.update"
        check(call, list_problems(predictions, labels, weights), item_problems(predictions, weights, num_items))
        is_given, rows, w = given(predictions[:, :k], weights, num_items)
        number = is_given.sum(1)
        own = (bits.to(rows.device)[rows] * is_given).sum(1) / number.clamp(min=1)
        return mean.update(state, own, torch.zeros_like(own), torch.where((number > 0) | w.isnan(), w, 0))

    return Metric(mean.init, update, mean.compute)


def places(hits: Tensor) -> Tensor:
    """Return the places of the rows in a list, f64[K] from 1 on."""
    return torch.arange(1, hits.shape[1] + 1, dtype=torch.float64, device=hits.device)


def given(rows: Tensor, weights: Tensor | None, num_items: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (whether a place holds a row, the row or 0, the weight of each list).

    The weight is NaN if it is out of range, or if the list has a row that is neither an item nor padding.
    """
    w = torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device) if weights is None else weights.double()
    is_right = (w >= 0) & (w < torch.inf) & ((w == 0) | (rows < num_items).all(1))
    is_given = (rows >= 0) & (rows < num_items)
    return is_given, torch.where(is_given, rows, 0).long(), torch.where(is_right, w, torch.nan)


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


def list_problems(predictions: Any, labels: Any, weights: Any) -> Iterator[Problem]:
    hint = "fr.top_k(...)[1]"
    if (yield from reported(p._replace(hint=hint) for p in LISTS.find("predictions", predictions))):
        return
    hint = "fr.JaggedTensor.from_lists([[3], [5, 1]])"
    are_rows = not (yield from reported(p._replace(hint=hint) for p in ROWS.find("labels", labels)))
    if are_rows and labels.num_bags != predictions.shape[0]:
        got, need = f"{labels.num_bags} bags", f"{predictions.shape[0]}, one for each list"
        yield Problem("`labels` have other lists.", got, need, "the same batch's relevant rows")
    if weights is not None and not isinstance(weights, Tensor):
        yield Problem("`weights` are not numbers.", describe(weights), "a tensor, or None", "torch.tensor", TypeError)
    elif weights is not None and weights.shape != predictions.shape[:1]:
        need = f"shape [{predictions.shape[0]}]"
        yield Problem("`weights` do not match `predictions`.", describe(weights), need, "one for each list")


def item_problems(predictions: Tensor, weights: Tensor | None, num_items: int) -> Iterator[Problem]:
    """If values can be read, rows must be items, and weights in range. A list of weight 0 is padding."""
    if weights is not None:
        yield from range_problems(weights, "weights", 0, sys.float_info.max, "finite weights >= 0")
    if not is_concrete(predictions) or (weights is not None and not is_concrete(weights)):
        return
    rows = predictions if weights is None else predictions[weights != 0]
    if rows.numel() and int(rows.max()) >= num_items:
        got, need = f"row {int(rows.max())}", f"rows below {num_items}, the number of items"
        yield Problem("`predictions` hold rows that no item has.", got, need, "the items that were ranked")


def popularity_problems(counts: Tensor, num_users: int) -> Iterator[Problem]:
    if not counts.shape[0]:
        yield Problem("`counts` are not one number for each item.", describe(counts), "[R], R >= 1", "ids.bincount()")
    else:
        need, hint = f"counts from 0 to num_users, {num_users}", "ids.bincount(), of users and items each once"
        yield from range_problems(counts, "counts", 0, num_users, need, hint=hint)

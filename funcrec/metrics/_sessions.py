"""Metrics within sessions, such as the items of one page, which are ranked by their predictions.

    by_session: Σ_s ω_s metric(s) / Σ_s ω_s,        ω_s = the greatest weight in s
    top_k_of_session: `metric` of [fewer than k of the session have a higher prediction]

An update has whole sessions: a session number in two updates stands for two sessions. Weights of 0 are padding.
Shapes: B examples.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from funcrec.core import Count, Problem, check, tree_leaves, tree_map, typed
from funcrec.jagged import is_concrete
from funcrec.metrics._groups import ends_of, in_order, latest, pair_problems, starts_of, total_of
from funcrec.metrics._metric import ANY, CHANCES, FINITE, Metric, example_problems, examples, sums
from funcrec.metrics._sums import binary_precision, binary_recall

MOST_NUMBERS = 4096  # of a session's state: larger ones take B times their memory


@typed
def by_session(metric: Metric) -> Metric:
    """Make a metric: the mean over sessions of `metric` of the session's examples.

    labels: (labels, i[B] sessions). A session has the weight of its heaviest example. Sessions for which `metric` is
    NaN are left out. `metric` reads predictions f[B], its state is a sum over examples, and its `compute` returns a
    number. A metric of pairs, such as `xauc`, raises. If values cannot be read (under `jit`), its sessions are NaN.

    Cost: B states. The state of `auc(num_bins=256)` has 512 numbers for each session; `grouped_auc` sorts instead.

    Law: a session of weight 2 is that session twice.

    Example:
      >>> import torch
      >>> from funcrec.metrics import accuracy, by_session
      >>> m, labels, sessions = by_session(accuracy()), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 4, 9])
      >>> m.compute(m.update(m.init(), torch.tensor([0.9, 0.8, 0.7]), (labels, sessions)))
      tensor(0.7500, dtype=torch.float64)
    """
    mean = sums("by_session", lambda p, y: {"value": p}, lambda s: s["value"] / s["weight"], from_logits=ANY)

    def update(state, predictions, labels, weights=None):
        call = "funcrec.metrics.by_session.update"
        check(call, pair_problems(labels, predictions), size_problems(metric))
        y, sessions = labels
        check(call, example_problems(predictions, y, weights, ANY, of_labels=FINITE))
        whole = None
        if is_concrete(predictions):
            whole = metric.update(metric.init(predictions.device), predictions, y, weights)  # checks the values
        p, y, w = examples(predictions, y, weights, ANY, FINITE)
        if not len(p):
            return mean.update(state, p, y, w)
        zero = metric.init(p.device)
        one = lambda p, y, w: metric.update(zero, p[None], y[None], w[None])
        session = _numbers(w, sessions)
        each = tree_map(lambda x: torch.zeros_like(x).index_add(0, session, x), vmap(one)(p, y, w))
        if whole is not None:
            check(call, sum_problems(tree_map(lambda x: x.detach().sum(0), each), whole))
        has_value = ~vmap(metric.compute)(tree_map(torch.Tensor.detach, each)).isnan()
        at = torch.arange(len(p), device=p.device)
        with_value = torch.where(has_value, at, has_value.to(torch.int8).argmax())  # no derivative of NaN
        value = vmap(metric.compute)(tree_map(lambda x: x.index_select(0, with_value), each))
        return _added(mean, state, torch.where(has_value, value, torch.nan), _greatest(w, session))

    return mean._replace(update=update, from_logits=metric.from_logits)


@typed
def top_k_of_session(metric: Metric, k: Count, *, rank_labels: bool = False) -> Metric:
    """Make a metric: `metric` of predictions that are 1 for the k highest of their session, and 0 for the others.

    A metric of logits gets the logits of 1 and 0, which are infinite.

    predictions: f[B], no NaN. labels: (labels, i[B] sessions). An example is among the k if fewer than k examples of
    its session have a higher prediction. So examples with equal predictions are all among the k, or none is.

    rank_labels: whether labels, too, become 1 for the k highest of their session; they may then be any finite numbers.

    Example:
      >>> import torch
      >>> from funcrec.metrics import accuracy, top_k_of_session
      >>> m, labels, sessions = top_k_of_session(accuracy(), 1), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 4, 9])
      >>> m.compute(m.update(m.init(), torch.tensor([0.1, 0.2, 0.0]), (labels, sessions)))
      tensor(0.3333, dtype=torch.float64)

    Source: TorchRec's SessionMetricDef of top_threshold and run_ranking_of_labels.
    """
    of_labels = FINITE if rank_labels else CHANCES
    check("funcrec.metrics.top_k_of_session", mixed_problems(metric))

    def update(state, predictions, labels, weights=None):
        call = "funcrec.metrics.top_k_of_session.update"
        check(call, pair_problems(labels, predictions))
        y, sessions = labels
        check(call, example_problems(predictions, y, weights, ANY, of_labels=of_labels))
        p, y, w = examples(predictions, y, weights, ANY, of_labels)
        is_top = lambda x: _rank(x, w, sessions) < k
        top = torch.where(is_top(p), torch.inf, -torch.inf) if metric.from_logits else is_top(p).double()
        return metric.update(state, top, is_top(y).double() if rank_labels else y, w)

    return metric._replace(update=update)


@typed
def recall_session_level(k: Count, *, rank_labels: bool = False) -> Metric:
    """Make a metric: the share of the positive examples that are among the k highest of their session. Arguments as in
    `top_k_of_session`.

    Example:
      >>> import torch
      >>> from funcrec.metrics import recall_session_level
      >>> m, labels, sessions = recall_session_level(1), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 4, 9])
      >>> m.compute(m.update(m.init(), torch.tensor([0.1, 0.2, 0.0]), (labels, sessions)))
      tensor(0.5000, dtype=torch.float64)

    Source: TorchRec's recall on session level.
    """
    return top_k_of_session(binary_recall(), k, rank_labels=rank_labels)


@typed
def precision_session_level(k: Count, *, rank_labels: bool = False) -> Metric:
    """Make a metric: the share of the examples among the k highest of their session that are positive. Arguments as in
    `top_k_of_session`.

    Source: TorchRec's precision on session level.
    """
    return top_k_of_session(binary_precision(), k, rank_labels=rank_labels)


@typed
def session_ndcg(k: Count | None = None, *, exponential: bool = False) -> Metric:
    """Make a metric: the normalised discounted cumulative gain of the first k of each session, as the mean over
    sessions. A session has the weight of its heaviest example. Sessions without a gain are left out.

    predictions: f[B], no NaN. labels: (gains >= 0, i[B] sessions). Examples of equal predictions get the mean of their
    discounts.

    k: None for all. exponential: whether a label's gain is 2^label - 1.

    Example:
      >>> import torch
      >>> from funcrec.metrics import session_ndcg
      >>> m, gains, sessions = session_ndcg(), torch.tensor([3.0, 0.0, 1.0]), torch.tensor([4, 4, 9])
      >>> m.compute(m.update(m.init(), torch.tensor([0.1, 0.2, 0.0]), (gains, sessions)))
      tensor(0.8155, dtype=torch.float64)

    Source: scikit-learn's ndcg_score; TorchRec's NDCG, which reports 1 - NDCG, breaks ties in any order, and counts a
    session without a gain as 0.
    """
    mean = sums("session_ndcg", lambda p, y: {"value": p}, lambda s: s["value"] / s["weight"], from_logits=ANY)
    of_labels = (0.0, 1000.0) if exponential else (0.0, FINITE[1])

    def update(state, predictions, labels, weights=None):
        call = "funcrec.metrics.session_ndcg.update"
        check(call, pair_problems(labels, predictions))
        y, sessions = labels
        check(call, example_problems(predictions, y, weights, ANY, of_labels=of_labels))
        p, y, w = examples(predictions, y, weights, ANY, of_labels)
        session = _numbers(w, sessions)
        gain = torch.where(w == 0, 0, y.exp2() - 1 if exponential else y)
        reached, best = (total_of(gain * _discount(x, w, sessions, k), session) for x in (p, gain))
        value = torch.where(best > 0, reached / torch.where(best > 0, best, 1), torch.nan)
        return _added(mean, state, value, _greatest(w, session))

    return mean._replace(update=update)


def _sorted(x: Tensor, w: Tensor, sessions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (the order by sessions, highest x first; and for each place in it the first place of its session, the
    first place of equal x, and the place after the last of equal x). All padding forms one more session."""
    is_padding = w == 0
    order = in_order(-x, sessions, is_padding.to(torch.int8))
    is_new = starts_of(sessions[order]) | starts_of(is_padding[order])
    is_other = is_new | starts_of(x[order])
    return order, latest(is_new), latest(is_other), ends_of(is_other)


def _rank(x: Tensor, w: Tensor, sessions: Tensor) -> Tensor:
    """Return for each example how many examples of its session have a higher x, i64[B]."""
    order, session, first, _ = _sorted(x, w, sessions)
    return torch.zeros_like(order).scatter(0, order, first - session)


def _discount(x: Tensor, w: Tensor, sessions: Tensor, k: int | None) -> Tensor:
    """Return the mean of 1 / log2(place + 1) over the places that the examples of equal x share, f64[B]."""
    order, session, first, last = _sorted(x, w, sessions)
    places = torch.arange(1, len(x) + 1, device=x.device)
    discounts = 1 / (places + 1).double().log2() * (places <= (len(x) if k is None else k))
    upto = torch.cat([discounts.new_zeros(1), discounts.cumsum(0)])
    mean = (upto[last - session] - upto[first - session]) / (last - first)
    return torch.zeros_like(mean).scatter(0, order, mean)


def _numbers(w: Tensor, sessions: Tensor) -> Tensor:
    """Return the session of each example as a number from 0 on, below B, i64[B]. Padding has a number of its own."""
    is_padding = w == 0
    order = in_order(sessions, is_padding.to(torch.int8))
    number = (starts_of(sessions[order]) | starts_of(is_padding[order])).cumsum(0) - 1
    return torch.zeros_like(number).scatter(0, order, number)


def _greatest(w: Tensor, session: Tensor) -> Tensor:
    return torch.zeros_like(w).scatter_reduce(0, session, w, "amax")


def _added(mean: Metric, state, value: Tensor, weight: Tensor):
    """Return the state with the sessions that have a value, without the others."""
    has_value = ~value.isnan() | weight.isnan()
    used = torch.where(has_value & (weight != 0), value, 0)
    return mean.update(state, used, torch.zeros_like(used), torch.where(has_value, weight, 0))


# -- validators --------------------------------------------------------------------------------------------------


def mixed_problems(metric: Metric) -> Iterator[Problem]:
    if metric.from_logits is None:
        need, hint = "all of logits or all of probabilities", "top_k_of_session of each, then collect"
        yield Problem("`metric` joins metrics of logits and of probabilities.", "both", need, hint)


def sum_problems(total: Any, whole: Any) -> Iterator[Problem]:
    pairs = zip(tree_leaves(total), tree_leaves(whole), strict=True)
    if not all(torch.allclose(x, y.detach().to(x.dtype), rtol=1e-6, atol=1e-6, equal_nan=True) for x, y in pairs):
        got, need = "a metric of pairs, or of what is not a sum", "a metric whose state is a sum over examples"
        hint = "accuracy(), normalized_entropy() or another sum; grouped_auc, grouped_rauc and session_ndcg sort"
        yield Problem("`metric` does not add up over examples.", got, need, hint)


def size_problems(metric: Metric) -> Iterator[Problem]:
    size = sum(x.numel() for x in tree_leaves(metric.init("meta")))
    if size > MOST_NUMBERS:
        need, hint = f"at most {MOST_NUMBERS}, since each session has a state", "auc(num_bins=256), or grouped_auc"
        yield Problem("`metric` has a large state.", f"{size} numbers", need, hint)

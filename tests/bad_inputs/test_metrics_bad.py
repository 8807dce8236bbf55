"""Bad calls of metrics: the error's type and the fragment that names the bad argument."""

import pytest
import torch
from programs.refused import assert_refused

from funcrec import JaggedTensor, metrics

P, Y = torch.tensor([0.2, 0.7]), torch.tensor([0, 1])
LISTS, BAGS = torch.tensor([[5, 3], [1, 2], [7, 8]]), JaggedTensor.from_lists([[3, 1], [9], [7]])


def update(metric, *rows):
    return metric.update(metric.init(), *rows)


ROWS = [
    ("int predictions", lambda: update(metrics.auc(), Y, Y), TypeError, "`predictions` are not floating-point"),
    ("list predictions", lambda: update(metrics.mse(), [0.1], Y), TypeError, "`predictions` are not floating-point"),
    ("matrix", lambda: update(metrics.auc(), P[None], Y[None]), ValueError, "`predictions` are not a vector"),
    ("short labels", lambda: update(metrics.log_loss(), P, Y[:1]), ValueError, "`labels` do not match `predictions`"),
    ("labels of 2", lambda: update(metrics.log_loss(), P, Y * 2), ValueError, "labels[1] = 2"),
    ("no labels", lambda: update(metrics.ctr(), P, None), TypeError, "`labels` are not numbers"),
    ("long weights", lambda: update(metrics.mae(), P, Y, torch.ones(3)), ValueError, "`weights` do not match"),
    (
        "one weight of lists",
        lambda: update(metrics.recall(2), LISTS, BAGS, P[:1]),
        ValueError,
        "`weights` do not match",
    ),
    ("two weights of 3", lambda: update(metrics.ndcg(2), LISTS, BAGS, P), ValueError, "`weights` do not match"),
    ("listed weights", lambda: update(metrics.hit_rate(2), LISTS, BAGS, [1.0] * 3), TypeError, "`weights` are not"),
    ("negative weights", lambda: update(metrics.mae(), P, Y, -P), ValueError, "weights >= 0"),
    ("logits for probabilities", lambda: update(metrics.auc(), P + 3, Y), ValueError, "from_logits=True"),
    ("NaN probability", lambda: update(metrics.log_loss(), P * torch.nan, Y), ValueError, "predictions[0] = nan"),
    ("NaN score", lambda: metrics.exact_auc(P * torch.nan, Y), ValueError, "scores[0] = nan"),
    ("scores of another shape", lambda: metrics.exact_auc(P, Y[:1]), ValueError, "`labels` do not match `scores`"),
    ("classes of no columns", lambda: update(metrics.multiclass_accuracy(), P, Y), ValueError, "need  f[B, C]"),
    ("class 2 of 2", lambda: update(metrics.multiclass_accuracy(), P[:, None] * P, Y * 2), ValueError, "labels[1] = 2"),
    ("no target of 2", lambda: metrics.recall_at_precision(2.0), ValueError, "`target` is out of range"),
    ("labels without groups", lambda: metrics.grouped_auc(P, Y), TypeError, "`labels` are not labels and groups"),
    ("float groups", lambda: metrics.grouped_auc(P, (Y, P)), TypeError, "`labels[1]` are not groups"),
    ("groups of others", lambda: metrics.grouped_auc(P, (Y, Y[:1])), ValueError, "`labels[1]` do not match"),
    ("a group of 2", lambda: update(metrics.grouped(metrics.ctr(), 2), P, (Y, Y + 1)), ValueError, "labels[1][1] = 2"),
    ("a coefficient of 0", lambda: metrics.recalibrated(metrics.ctr(), 0.0), ValueError, "`coefficient` is out of"),
    (
        "a metric of logits is not recalibrated",
        lambda: metrics.recalibrated(metrics.log_loss(from_logits=True), 0.1),
        ValueError,
        "`metric` takes logits",
    ),
    (
        "recalibrated logits",
        lambda: update(metrics.recalibrated(metrics.ctr(), 0.1), P + 3, Y),
        ValueError,
        "sigmoid()",
    ),
    (
        "recalibrated numbers",
        lambda: update(metrics.recalibrated(metrics.ctr(), 0.1), Y, Y),
        TypeError,
        "`predictions` are not floating-point",
    ),
    (
        "listed weights, unweighted",
        lambda: update(metrics.unweighted(metrics.ctr()), P, Y, [1.0]),
        TypeError,
        "`weights` are not numbers",
    ),
    ("labels of no device", lambda: update(metrics.auc(), P, Y.to("meta")), ValueError, "are on another device"),
    (
        "logits of no class",
        lambda: update(metrics.multiclass_accuracy(), P[:, None][:, :0], Y),
        ValueError,
        "have no column for each class",
    ),
    ("negative weights, unweighted", lambda: update(metrics.unweighted(metrics.ctr()), P, Y, -P), ValueError, ">= 0"),
    ("rows beyond", lambda: update(metrics.coverage(2, 4), LISTS, BAGS), ValueError, "rows that no item has"),
    ("counts below 0", lambda: metrics.novelty(2, Y - 1, 2), ValueError, "`counts` leave their range"),
    ("counts of no item", lambda: metrics.novelty(2, Y[:0], 2), ValueError, "not one number for each item"),
    ("infinite label", lambda: update(metrics.rmse(), P, Y / 0), ValueError, "finite labels"),
    ("NaN label of a pair", lambda: metrics.exact_rauc(P, Y / 0), ValueError, "labels[0] = nan"),
    ("pairs of labels without groups", lambda: metrics.grouped_rauc(P, Y), TypeError, "labels and groups"),
    ("sessions of others", lambda: update(metrics.session_ndcg(), P, (Y, Y[:1])), ValueError, "`labels[1]` do not"),
    ("no sessions", lambda: update(metrics.recall_session_level(1), P, Y), TypeError, "labels and groups"),
    ("a gain below 0", lambda: update(metrics.session_ndcg(), P, (-Y, Y)), ValueError, "labels[1] = -1"),
    ("first 0 of a session", lambda: metrics.precision_session_level(0), ValueError, "`k` is out of range"),
    (
        "a session's large state",
        lambda: update(metrics.by_session(metrics.auc()), P, (Y, Y)),
        ValueError,
        "num_bins=256",
    ),
    ("pairs of sessions", lambda: update(metrics.by_session(metrics.xauc()), P, (Y, Y)), ValueError, "does not add up"),
    ("a session's NaN", lambda: update(metrics.by_session(metrics.ctr()), P / 0 * 0, (Y, Y)), ValueError, "= nan"),
    ("no column", lambda: update(metrics.per_task(metrics.ctr(), 2), P, Y), ValueError, "column for each task"),
    (
        "weights of 3 tasks",
        lambda: update(metrics.per_task(metrics.ctr(), 2), P[:, None] * P, Y[:, None] * Y, torch.ones(2, 3)),
        ValueError,
        "`weights` do not match",
    ),
    ("a unit of mice", lambda: metrics.log_loss(unit="mice"), ValueError, "`unit`"),
    ("a target of 2 in hindsight", lambda: metrics.hindsight_target_pr(2.0), ValueError, "`target` is out of range"),
    ("an infinite label of xauc", lambda: update(metrics.xauc(), P, Y / 0), ValueError, "finite labels"),
    (
        "missing labels of a count",
        lambda: update(metrics.sum_weights(), P, None),
        TypeError,
        "`labels` are not numbers",
    ),
    ("no bins", lambda: metrics.auc(0), ValueError, "`num_bins` is out of range"),
    ("threshold of 2", lambda: metrics.accuracy(2.0), ValueError, "`threshold` is out of range"),
    ("function for metric", lambda: metrics.collect({"auc": metrics.auc}), TypeError, "auc(), not auc"),
    (
        "foreign state",
        lambda: metrics.merge(metrics.ctr().init(), metrics.auc().init()),
        TypeError,
        "different metrics",
    ),
]


@pytest.mark.parametrize("name, call, kind, fragment", ROWS, ids=[r[0] for r in ROWS])
def test_bad_metric(name, call, kind, fragment):
    """A bad call raises the right type, and names the bad argument in four parts."""
    assert_refused(call, kind, fragment, "funcrec.metrics.")


def test_all_at_once():
    """One error reports every violation of a call."""
    with pytest.raises(ValueError) as error:
        update(metrics.log_loss(), P, Y * 3, torch.ones(1))
    assert "labels[1] = 3" in str(error.value) and "`weights` do not match" in str(error.value)

"""Values that TorchRec's metrics get wrong. Each test shows TorchRec's number, and that ours is that of the formula."""

import math

import pytest
import torch

import funcrec as fr
from funcrec import metrics

pytest.importorskip("torchrec")
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.cali_free_ne import CaliFreeNEMetricComputation
from torchrec.metrics.gauc import compute_gauc_3d
from torchrec.metrics.hindsight_target_pr import HindsightTargetPRMetricComputation
from torchrec.metrics.metrics_namespace import MetricPrefix
from torchrec.metrics.ndcg import _get_ndcg_states
from torchrec.metrics.ne import NEMetricComputation
from torchrec.metrics.rauc import compute_rauc
from torchrec.metrics.recall_session import ranking_within_session
from torchrec.metrics.xauc import get_xauc_states

f64 = lambda *x: torch.tensor(x, dtype=torch.float64)


def value(metric, *rows):
    return metric.compute(metric.update(metric.init(), *rows))


def theirs_of(cls, batches, prefix=MetricPrefix.LIFETIME, window_size=1000, **options):
    """Return {name: number} of TorchRec's computation after the batches of (predictions, labels)."""
    metric = cls(my_rank=0, batch_size=len(batches[0][0]), n_tasks=1, window_size=window_size, **options)
    for p, y in batches:
        metric.update(predictions=p[None], labels=y[None], weights=torch.ones_like(p)[None])
    return {
        r.name.value: float(r.value) for r in metric.compute() if r.metric_prefix == prefix and r.value.numel() == 1
    }


def test_auc_of_one_prediction_for_all():
    """A constant prediction has AUC ½. TorchRec's depends on the order of the examples, from 0 to 1."""
    p = torch.full((4,), 0.3, dtype=torch.float64)
    found = []
    for y in (f64(1, 1, 0, 0), f64(0, 0, 1, 1)):
        found.append(float(compute_auc(1, [p[None]], [y[None]], [torch.ones(1, 4)])))
        assert metrics.exact_auc(p, y) == 0.5 and value(metrics.auc(), p, y) == 0.5
    assert found == [1.0, 0.0]


def test_auc_without_a_value():
    """With one class, or without examples, AUC is NaN. TorchRec reports ½, which a mean over groups takes for a
    value."""
    p, ones = f64(0.1, 0.9), torch.ones(2).double()
    assert float(compute_auc(1, [p[None]], [ones[None]], [ones[None]])) == 0.5
    assert metrics.exact_auc(p, ones).isnan() and value(metrics.auc(), p, ones).isnan()
    groups = torch.tensor([0, 0, 1, 1])
    rows = torch.cat([p, p]), torch.cat([ones, f64(0, 1)])
    assert metrics.grouped_auc(rows[0], (rows[1], groups), equal=True) == 1


def test_rauc_and_xauc_of_one_prediction_for_all():
    """A constant prediction orders no pair, and RAUC and XAUC are ½. TorchRec's RAUC is 1 and its XAUC is 0."""
    p, y = torch.full((3,), 0.3, dtype=torch.float64), f64(2, 1, 3)
    assert float(compute_rauc(1, [p[None]], [y[None]], [torch.ones(1, 3)])) == 1
    states = get_xauc_states(y[None], p[None], torch.ones(1, 3).double())
    assert states["error_sum"] == 0 and states["weighted_num_pairs"] == 3
    assert metrics.exact_rauc(p, y) == 0.5 and value(metrics.xauc(), p, y) == 0.5


def test_cali_free_ne_of_the_same_examples_again():
    """A batch that is seen ten times has the same number. TorchRec's is a tenth of what it was."""
    p, y = f64(0.1, 0.4, 0.7, 0.8), f64(0, 1, 0, 1)
    once, tenfold = (theirs_of(CaliFreeNEMetricComputation, [(p, y)] * n)["cali_free_ne"] for n in (1, 10))
    assert tenfold == pytest.approx(once / 10)
    ours = metrics.cali_free_ne()
    state = ours.init()
    for _ in range(10):
        state = ours.update(state, p, y)
    torch.testing.assert_close(ours.compute(state), value(ours, p, y))


def test_cali_free_ne_of_a_constant():
    """A constant prediction has 1, calibrated or not, as the constant that it is compared with."""
    for p in (0.1, 0.5, 0.75):
        constant = torch.full((4,), p, dtype=torch.float64)
        torch.testing.assert_close(value(metrics.cali_free_ne(), constant, f64(0, 1, 1, 1)), f64(1)[0])


def test_a_window_smaller_than_a_batch():
    """A window of one update has that update's number. TorchRec drops a batch that is larger than the window, and NE
    has no value."""
    p, y = f64(0.1, 0.4, 0.7, 0.8), f64(0, 1, 0, 1)
    found = theirs_of(NEMetricComputation, [(p, y)], MetricPrefix.WINDOW, window_size=3)["ne"]
    assert not found or math.isnan(found)
    metric = metrics.normalized_entropy()
    torch.testing.assert_close(value(metrics.windowed(metric, 1), p, y), value(metric, p, y))


def test_a_window_after_a_large_value():
    """A window has the value of its own updates. TorchRec subtracts the updates that leave, and keeps their rounding
    errors."""
    from torchrec.metrics.mse import MSEMetricComputation

    large, small = (f64(1e9, 1e9), f64(0, 0)), (f64(1e-3, 0), f64(0, 0))
    batches = [large, *[small] * 3]
    found = theirs_of(MSEMetricComputation, batches, MetricPrefix.WINDOW, window_size=4)["mse"]
    window = metrics.windowed(metrics.mse(), 2)
    state = window.init()
    for batch in batches:
        state = window.update(state, *batch)
    assert float(window.compute(state)) == pytest.approx(5e-7) and abs(found - 5e-7) > 1e-7


def test_hindsight_of_a_prediction_at_a_threshold():
    """An example is found or missed. TorchRec counts one at a threshold as both: its recall is ½, though it found
    all. Its threshold is the size of a tensor without values."""
    at_one = theirs_of(
        HindsightTargetPRMetricComputation, [(f64(1.0, 1.0, 0.9995), f64(1, 1, 0))], target_precision=1.0
    )
    assert at_one["hindsight_target_precision"] == 1 and at_one["hindsight_target_recall"] == 0.5
    ours = value(metrics.hindsight_target_pr(1.0), f64(1.0, 1.0, 0.9995), f64(1, 1, 0))
    assert ours["precision"] == 1 and ours["recall"] == 1


def test_ranks_in_a_session_of_several_tasks():
    """Several tasks are one call of vmap. TorchRec ranks one task at a time, and fails for two."""
    p, y = torch.tensor([[0.9, 0.1, 0.5], [0.1, 0.9, 0.5]]), torch.tensor([[1.0, 0, 0], [0, 0, 1]])
    session = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(RuntimeError, match="must match the size"):
        ranking_within_session(p, session)
    metric = metrics.precision_session_level(1)
    found = torch.func.vmap(lambda p, y: value(metric, p, (y, session[0])))(p, y)
    assert found.tolist() == [1, 0]


def test_ndcg_of_ties():
    """Equal predictions share their places. TorchRec's NDCG of them depends on the order of the examples."""
    p, sessions = torch.full((3,), 0.5, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    found, ours = set(), set()
    for gains in (f64(1, 0, 0), f64(0, 0, 1)):
        state = _get_ndcg_states(
            labels=gains[None], predictions=p[None], weights=torch.ones(1, 3).double(), session_ids=sessions[None],
            exponential_gain=False,
        )  # fmt: skip
        found.add(round(float(state["sum_ndcg"]), 6))
        ours.add(round(float(value(metrics.session_ndcg(), p, (gains, sessions))), 6))
    assert len(found) == 2 and len(ours) == 1


def test_gauc_of_a_tie():
    """A tie of a positive and a negative counts half. TorchRec's session AUC counts it as wrong or right, by order."""
    p = torch.tensor([[[0.5, 0.5, 0.9]]], dtype=torch.float64)
    found = {
        float(compute_gauc_3d(p, torch.tensor([[y]], dtype=torch.float64), torch.ones_like(p))["auc_sum"])
        for y in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    }
    groups = torch.zeros(3, dtype=torch.long)
    ours = {float(metrics.grouped_auc(p[0, 0], (f64(*y), groups))) for y in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])}
    assert len(found) == 2 and ours == {0.25}


def test_missing_labels():
    """A NaN label raises unless the metric defines it, so no sum becomes NaN silently."""
    p, y = f64(0.5, 0.5), f64(1, math.nan)
    with pytest.raises(ValueError, match=r"`labels` leave their range"):
        value(metrics.ctr(), p, y)
    assert value(metrics.labelled(metrics.ctr()), p, y) == 1
    assert fr.metrics.TORCHREC_NAMES["num_missing_labels"].call == "num_missing_labels()"

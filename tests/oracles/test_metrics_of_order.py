"""Metrics of ordered scores, of thresholds and of groups equal those of scikit-learn, torchmetrics and TorchRec."""

import math

import numpy as np
import pytest
import sklearn.metrics as sklearn
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec import metrics


def value(metric, *rows):
    return float(metric.compute(metric.update(metric.init(), *rows)))


@st.composite
def examples(draw):
    """Return random (probabilities f64[B] of twenty levels, labels, weights, groups), with B from 1 to 60 and some
    weights 0."""
    n, g = draw(st.integers(1, 60)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    p = torch.randint(1, 20, (n,), generator=g).double() / 20
    y = torch.randint(0, 2, (n,), generator=g).double()
    w = torch.randint(0, 3, (n,), generator=g).double()
    return p, y, w, torch.randint(0, 4, (n,), generator=g)


near = lambda x: pytest.approx(x, rel=1e-9, abs=1e-12, nan_ok=True)


@given(rows=examples())
def test_average_precision_is_scikit_learns(rows):
    """Twenty levels fall into separate bins, so that binning loses nothing. Without a positive, the metric is NaN."""
    p, y, w, _ = rows
    got = value(metrics.average_precision(), p, y, w)
    want = sklearn.average_precision_score(y, p, sample_weight=w) if (w * y).sum() else math.nan
    assert got == near(want)
    logits = value(metrics.average_precision(from_logits=True), p.logit(), y, w)
    assert logits == near(want)


@given(rows=examples(), target=st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]))
def test_recall_at_precision_is_that_of_the_best_threshold(rows, target):
    """The test tries all thresholds by hand. torchmetrics has the same number without weights."""
    p, y, w, _ = rows
    found = [0.0]
    for threshold in p.unique():
        said = p >= threshold
        hits, all_said, positives = (w * y * said).sum(), (w * said).sum(), (w * y).sum()
        if positives and all_said and hits / all_said >= target:
            found.append(float(hits / positives))
    want = max(found) if (w * y).sum() else math.nan
    assert value(metrics.recall_at_precision(target), p, y, w) == near(want)
    if y.sum() and target < 1:  # torchmetrics appends a point of recall 0 and precision 1
        tm = pytest.importorskip("torchmetrics.functional.classification")
        theirs = tm.binary_recall_at_fixed_precision(p, y.long(), min_precision=target, thresholds=None)[0]
        assert value(metrics.recall_at_precision(target), p, y) == pytest.approx(float(theirs), abs=1e-6)


@given(rows=examples(), target=st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]))
def test_hindsight_is_the_lowest_threshold_that_reaches_the_target(rows, target):
    """The test tries the predictions as thresholds, lowest first. All examples that are not below the threshold, and no
    others, are predicted."""
    p, y, w, _ = rows
    found = {n: float(x) for n, x in metrics.hindsight_target_pr(target).compute(state_of(target, rows)).items()}
    reached = {}
    for threshold in p[w > 0].unique().flip(0):
        said = p >= threshold
        hits, all_said = float((w * y * said).sum()), float((w * said).sum())
        if hits / all_said >= target:
            recall = hits / float((w * y).sum()) if (w * y).sum() else math.nan
            reached = {"threshold": float(threshold), "precision": hits / all_said, "recall": recall}
    if not (w * y).sum():
        assert all(math.isnan(x) for x in found.values())
    elif not reached:
        assert found["recall"] == 0 and math.isnan(found["precision"]) and math.isnan(found["threshold"])
    else:
        assert found["precision"] == near(reached["precision"]) and found["recall"] == near(reached["recall"])
        kept = w > 0
        assert ((p >= found["threshold"]) == (p >= reached["threshold"]))[kept].all()
    assert found["recall"] == near(value(metrics.recall_at_precision(target), p, y, w))


def state_of(target, rows):
    metric = metrics.hindsight_target_pr(target)
    return metric.update(metric.init(), *rows[:3])


@given(rows=examples())
def test_exact_average_precision_is_scikit_learns(rows):
    """The average precision of a whole set is that of scikit-learn, with ties and weights, and of logits."""
    p, y, w, _ = rows
    want = sklearn.average_precision_score(y, p, sample_weight=w) if (w * y).sum() else math.nan
    assert float(metrics.exact_average_precision(p, y, w)) == near(want)
    assert float(metrics.exact_average_precision(p.logit(), y, w)) == near(want)


@given(rows=examples(), threshold=st.sampled_from([0.25, 0.5, 0.8]))
def test_precision_and_recall_of_a_threshold_are_scikit_learns(rows, threshold):
    """Where a quotient has no value, the metric is NaN. scikit-learn gives 0 there unless a caller asks for NaN."""
    p, y, w, _ = rows
    if not w.sum():
        return
    said = p >= threshold
    for name, theirs in (("binary_precision", sklearn.precision_score), ("binary_recall", sklearn.recall_score)):
        want = theirs(y, said, sample_weight=w, zero_division=np.nan)
        assert value(getattr(metrics, name)(threshold), p, y, w) == near(want), name
        want = theirs(y, p.logit().sigmoid() >= threshold, sample_weight=w, zero_division=np.nan)
        assert value(getattr(metrics, name)(threshold, from_logits=True), p.logit(), y, w) == near(want), name


@given(rows=examples())
def test_grouped_auc_is_the_mean_of_each_groups_auc(rows):
    """Groups with one class are left out, and all other groups count by their weight. One group has the number of
    `exact_auc`, in any order."""
    p, y, w, groups = rows
    total = weights = 0.0
    for g in groups.unique():
        own = groups == g
        area = float(metrics.exact_auc(p[own], y[own], w[own]))
        if not math.isnan(area):
            total, weights = total + float(w[own].sum()) * area, weights + float(w[own].sum())
    want = total / weights if weights else math.nan
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(0))
    assert float(metrics.grouped_auc(p, (y, groups), w)) == near(want)
    assert float(metrics.grouped_auc(p[order], (y[order], groups[order] * 7 - 3), w[order])) == near(want)
    assert float(metrics.grouped_auc(p, (y, groups * 0), w)) == near(float(metrics.exact_auc(p, y, w)))


@given(rows=examples())
def test_r2_and_nmse(rows):
    """r2 equals that of scikit-learn, and is NaN where all labels are the same. nmse is a quotient of two mse."""
    p, y, w, _ = rows
    y = y * 3 + p.round()
    if w.sum() and len(y[w > 0].unique()) > 1:
        assert value(metrics.r2(), p, y, w) == pytest.approx(sklearn.r2_score(y, p, sample_weight=w), rel=1e-9)
    else:
        assert math.isnan(value(metrics.r2(), p, y, w))
    mse, base = value(metrics.mse(), p, y, w), value(metrics.mse(), torch.ones_like(p), y, w)
    assert value(metrics.nmse(), p, y, w) == near(mse / base if base else math.nan)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_top_k_accuracy_is_scikit_learns(k):
    """Accuracy at k equals that of scikit-learn for weighted logits without ties. If k is at least the number of
    classes, it is 1. With k = 1 it is multiclass_accuracy, even with ties."""
    g = torch.Generator().manual_seed(k)
    z, y, w = torch.randn(200, 4, generator=g), torch.randint(0, 4, (200,), generator=g), torch.rand(200, generator=g)
    want = 1.0 if k >= 4 else sklearn.top_k_accuracy_score(y, z, k=k, sample_weight=w, labels=range(4))
    assert value(metrics.top_k_accuracy(k), z, y, w) == near(want)
    tied = z.round()
    assert value(metrics.top_k_accuracy(1), tied, y, w) == value(metrics.multiclass_accuracy(), tied, y, w)
    assert value(metrics.multiclass_accuracy(), tied, y) == near(float((tied.argmax(1) == y).double().mean()))


def test_torchrec_has_the_same_sums():
    """NE of positives, NMSE, weighted average and recalibrated calibration equal those of TorchRec's computations."""
    pytest.importorskip("torchrec")
    from torchrec.metrics.calibration_with_recalibration import RecalibratedCalibrationMetricComputation
    from torchrec.metrics.metrics_namespace import MetricPrefix
    from torchrec.metrics.ne_positive import NEPositiveMetricComputation
    from torchrec.metrics.nmse import NMSEMetricComputation
    from torchrec.metrics.weighted_avg import WeightedAvgMetricComputation

    pairs = {
        "ne_positive": (metrics.positive_normalized_entropy(), NEPositiveMetricComputation, {}),
        "nmse": (metrics.nmse(), NMSEMetricComputation, {}),
        "calibration": (
            metrics.recalibrated(metrics.calibration(), 0.2),
            RecalibratedCalibrationMetricComputation,
            {"recalibration_coefficient": 0.2},
        ),
        "weighted_avg": (metrics.mean_prediction(), WeightedAvgMetricComputation, {}),
    }
    g = torch.Generator().manual_seed(0)
    for name, (ours, cls, more) in pairs.items():
        theirs = cls(my_rank=0, batch_size=100, n_tasks=1, window_size=300, **more)
        state = ours.init()
        for _ in range(3):
            p, w = torch.rand(2, 100, generator=g, dtype=torch.float64)
            y = (torch.rand(100, generator=g) < p).double()
            state = ours.update(state, p, y, w)
            theirs.update(predictions=p[None], labels=y[None], weights=w[None])
        found = {r.name.value: float(r.value) for r in theirs.compute() if r.metric_prefix == MetricPrefix.LIFETIME}
        assert float(ours.compute(state)) == pytest.approx(found[name], rel=1e-9), (name, found)


def test_evaluate_takes_labels_with_groups():
    """A metric of groups and a function of all examples read the pair that `label` returns."""
    ids = fr.KeyedJaggedTensor.from_lists({"user": [[0], [0], [1], [1]]})
    batch = fr.Batch(ids, torch.tensor([0.0, 1.0, 1.0, 0.0]), dense=torch.tensor([[0.1], [0.4], [0.2], [0.8]]))
    predict = lambda params, batch: batch.dense[:, 0] * params
    label = lambda batch: (batch.label, batch.ids["user"].values[:4])
    found = fr.evaluate(predict, torch.ones(()), [batch, batch], {"gauc": metrics.grouped_auc}, label=label)
    assert found == {"gauc": 0.5}


def test_derivatives_by_weights_are_numbers():
    """A group of one class and a bin without an example give no NaN to the derivatives by the weights."""
    p, y = torch.tensor([0.1, 0.4, 0.2, 0.8, 0.3], dtype=torch.float64), torch.tensor([0.0, 1, 1, 0, 1])
    groups, w = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1.0, 2, 1, 3, 1], dtype=torch.float64)
    average = metrics.average_precision(64)
    for f in (
        lambda w: metrics.grouped_auc(p, (y, groups), w),
        lambda w: average.compute(average.update(average.init(), p, y, w)),
    ):
        eps = 1e-6 * torch.eye(5, dtype=torch.float64)
        want = torch.stack([(f(w + e) - f(w - e)) / 2e-6 for e in eps])
        torch.testing.assert_close(torch.func.grad(f)(w), want, rtol=1e-6, atol=1e-8)
        assert torch.func.jacrev(torch.func.jacfwd(f))(w).isfinite().all()


def test_grouped_auc_is_traceable():
    """A compiled or mapped call has the numbers of single calls; without examples the result is NaN."""
    p = torch.tensor([[0.1, 0.4, 0.2, 0.8], [0.5, 0.5, 0.9, 0.1]])
    y, groups = torch.tensor([0, 1, 1, 0]), torch.tensor([[7, 7, 3, 3], [1, 2, 1, 2]])
    f = lambda p, g: metrics.grouped_auc(p, (y, g))
    want = torch.stack([f(*rows) for rows in zip(p, groups, strict=True)])
    torch.testing.assert_close(torch.func.vmap(f)(p, groups), want)
    torch.testing.assert_close(fr.jit(f)(p[0], groups[0]), want[0])
    assert metrics.grouped_auc(p[0, :0], (y[:0], groups[0, :0])).isnan()

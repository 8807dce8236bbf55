"""Metrics equal those of scikit-learn and torchmetrics."""

import pytest
import sklearn.metrics as sklearn
import torch

from funcrec import metrics


def data(num, seed, *, ties):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(num, generator=g)
    p = z.sigmoid()
    labels = (torch.rand(num, generator=g) < (2 * z).sigmoid()).long()
    return (p * 20).round() / 20 if ties else p, labels, torch.rand(num, generator=g) + 0.1


def run(metric, *rows):
    return float(metric.compute(metric.update(metric.init(), *rows)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_auc_sklearn(ties, weighted, seed):
    """exact_auc equals roc_auc_score, with ties and weights. The histogram is within its bound of roc_auc_score."""
    p, y, w = data(5000, seed, ties=ties)
    w = w if weighted else None
    expected = sklearn.roc_auc_score(y, p, sample_weight=w)
    assert abs(float(metrics.exact_auc(p, y, w)) - expected) < 1e-12
    metric = metrics.auc()
    state = metric.update(metric.init(), p, y, w)
    # twenty levels fall into twenty bins, so that the histogram is exact
    bound = 1e-12 if ties else float(metrics.auc_error(state))
    assert abs(float(metric.compute(state)) - expected) <= bound
    assert ties or bound < 1e-4


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_sums_sklearn(weighted, seed):
    """log loss, accuracy, mse and mae equal those of scikit-learn."""
    p, y, w = data(5000, seed, ties=False)
    w = w if weighted else None
    # scikit-learn requires that rows [1 - p, p] sum to 1. In f32 they may not, in f64 they do.
    assert abs(run(metrics.log_loss(), p, y, w) - sklearn.log_loss(y, p.double(), sample_weight=w)) < 1e-12
    assert abs(run(metrics.accuracy(), p, y, w) - sklearn.accuracy_score(y, p >= 0.5, sample_weight=w)) < 1e-12
    assert abs(run(metrics.mse(), p, y, w) - sklearn.mean_squared_error(y, p.double(), sample_weight=w)) < 1e-12
    assert abs(run(metrics.mae(), p, y, w) - sklearn.mean_absolute_error(y, p.double(), sample_weight=w)) < 1e-12


def test_auc_torchmetrics():
    """exact_auc equals the unbinned AUROC of torchmetrics, up to the rounding of its f32 sums."""
    tm = pytest.importorskip("torchmetrics.functional.classification")
    p, y, _ = data(5000, 7, ties=True)
    assert abs(float(metrics.exact_auc(p, y)) - float(tm.binary_auroc(p, y, thresholds=None))) < 1e-6


def test_normalized_entropy_formula():
    """NE is the log loss of scikit-learn divided by the log loss of the base rate."""
    p, y, w = data(5000, 3, ties=False)
    rate = float((w * y).sum() / w.sum())
    base = sklearn.log_loss(y, torch.full((5000,), rate).double(), sample_weight=w)
    expected = sklearn.log_loss(y, p.double(), sample_weight=w) / base
    # `rate` was rounded to f32
    assert abs(run(metrics.normalized_entropy(), p, y, w) - expected) < 1e-6

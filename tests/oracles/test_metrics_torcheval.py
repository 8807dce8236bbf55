"""Metrics equal those of torcheval, on generated scores with ties, one class, and weights 0 and 2, in any parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcrec import metrics

torcheval = pytest.importorskip("torcheval.metrics.functional")


@st.composite
def judged(draw):
    """Return (probabilities, labels, weights, a place to cut the rows)."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    size = draw(st.sampled_from([1, 2, 7, 60, 400]))
    p = torch.rand(size, generator=g) * 0.98 + 0.01
    p = (p * 8).round() / 8 * 0.9 + 0.05 if draw(st.booleans()) else p  # ties
    rate = draw(st.sampled_from([0.0, 0.3, 1.0]))
    labels = (torch.rand(size, generator=g) < rate).float()
    weights = draw(st.sampled_from([torch.ones(size), torch.randint(0, 3, (size,), generator=g).float()]))
    return p, labels, weights, draw(st.integers(0, size))


def in_parts(metric, cut, *rows):
    """Return the metric of the rows, which come in two parts."""
    states = [metric.update(metric.init(), *(x[part] for x in rows)) for part in (slice(cut), slice(cut, None))]
    return float(metric.compute(metrics.merge(*states)))


def assert_same(got, want, **how):
    torch.testing.assert_close(
        torch.tensor(float(got)).double(), torch.as_tensor(want).double().reshape(()), rtol=2e-5, atol=2e-6, **how
    )


@given(judged())
def test_sums(it):
    """Squared error, click-through rate, calibration and normalised entropy, with weights."""
    p, y, w, cut = it
    if not w.sum():
        return
    assert_same(in_parts(metrics.mse(), cut, p, y, w), torcheval.mean_squared_error(p, y, sample_weight=w))
    assert_same(in_parts(metrics.ctr(), cut, p, y, w), torcheval.click_through_rate(y, w))
    if (w * y).sum():
        assert_same(in_parts(metrics.calibration(), cut, p, y, w), torcheval.weighted_calibration(p, y, w))
    if 0 < (w * y).sum() < w.sum():  # torcheval clamps the entropy of one class
        want = torcheval.binary_normalized_entropy(p.double(), y.double(), weight=w.double())
        assert_same(in_parts(metrics.normalized_entropy(), cut, p, y, w), want)


@given(judged())
def test_thresholds(it):
    """Accuracy, precision and recall at a threshold."""
    p, y, _, cut = it
    threshold = 0.5 + 1e-4  # no probability has it
    assert_same(in_parts(metrics.accuracy(threshold), cut, p, y), torcheval.binary_accuracy(p, y, threshold=threshold))
    if (p >= threshold).any():
        want = torcheval.binary_precision(p, y.long(), threshold=threshold)
        assert_same(in_parts(metrics.binary_precision(threshold), cut, p, y), want)
    if y.any():
        want = torcheval.binary_recall(p, y.long(), threshold=threshold)
        assert_same(in_parts(metrics.binary_recall(threshold), cut, p, y), want)


@given(judged())
def test_order(it):
    """The area under the ROC curve with weights, and that of precision and recall, which torcheval has without."""
    p, y, w, _ = it
    if 0 < (w * y).sum() < w.sum():
        assert_same(metrics.exact_auc(p, y, w), torcheval.binary_auroc(p, y, weight=w))
    if y.any():
        assert_same(metrics.exact_average_precision(p, y), torcheval.binary_auprc(p, y))


@given(judged(), st.integers(1, 5))
def test_classes(it, k):
    """A class among the k highest of distinct logits."""
    p, _, _, cut = it
    g = torch.Generator().manual_seed(len(p))
    logits, classes = torch.randn(len(p), 5, generator=g), torch.randint(5, (len(p),), generator=g)
    assert_same(
        in_parts(metrics.top_k_accuracy(k), cut, logits, classes), torcheval.hit_rate(logits, classes, k=k).mean()
    )
    assert_same(
        in_parts(metrics.multiclass_accuracy(), cut, logits, classes), torcheval.multiclass_accuracy(logits, classes)
    )


@given(judged())
def test_regression(it):
    """The coefficient of determination."""
    p, _, _, cut = it
    y = torch.rand(len(p), generator=torch.Generator().manual_seed(3))
    if len(p) > 2:
        assert_same(in_parts(metrics.r2(), cut, p, y), torcheval.r2_score(p.double(), y.double()))

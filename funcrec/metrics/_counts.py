"""Metrics that are sums and means of labels, predictions or weights, without a comparison.

    Σ w,   Σ w y,   Σ w p,   Σ w [y is missing],   Σ w p / Σ w,   Σ w y / Σ w

A missing label is NaN. The sums are 0 without examples; the means are NaN.
"""

import torch
from torch import Tensor

from funcrec.metrics._metric import ANY, FINITE, Metric, sums


def sum_weights() -> Metric:
    """Make a metric: the sum of the weights, which is the number of examples if none are given. Labels may be missing.

    Example:
      >>> import torch
      >>> from funcrec.metrics import sum_weights
      >>> m = sum_weights()
      >>> m.compute(m.update(m.init(), torch.tensor([0.5, 0.5]), torch.tensor([1, 0]), torch.tensor([2.0, 1.0])))
      tensor(3., dtype=torch.float64)

    Source: TorchRec's sum of weights.
    """
    return _of_missing("sum_weights", "weight")


def num_missing_labels() -> Metric:
    """Make a metric: the sum of the weights of the examples whose label is NaN.

    `labelled` leaves these examples out of another metric.

    Example:
      >>> import torch
      >>> from funcrec.metrics import num_missing_labels
      >>> m = num_missing_labels()
      >>> m.compute(m.update(m.init(), torch.tensor([0.5, 0.5]), torch.tensor([1, torch.nan])))
      tensor(1., dtype=torch.float64)

    Source: TorchRec's number of missing labels.
    """
    return _of_missing("num_missing_labels", "missing")


def num_positive_samples() -> Metric:
    """Make a metric: the weighted sum of the labels.

    Example:
      >>> import torch
      >>> from funcrec.metrics import num_positive_samples
      >>> m = num_positive_samples()
      >>> m.compute(m.update(m.init(), torch.tensor([0.5, 0.5]), torch.tensor([1, 0]), torch.tensor([2.0, 1.0])))
      tensor(2., dtype=torch.float64)

    Source: TorchRec's number of positive samples, which counts a label of NaN as 0: `labelled(num_positive_samples())`.
    """
    return sums("num_positive_samples", lambda p, y: {"positive": y}, lambda s: s["positive"], from_logits=ANY)


def weighted_sum_predictions() -> Metric:
    """Make a metric: the weighted sum of the predictions, which may be any numbers but NaN.

    Source: TorchRec's weighted sum of predictions.
    """
    terms = lambda p, y: {"predicted": p}
    return sums("weighted_sum_predictions", terms, lambda s: s["predicted"], from_logits=ANY, of_labels=FINITE)


def weighted_avg() -> Metric:
    """Make a metric: the weighted mean of the predictions, which may be any numbers but NaN. No label counts.

    Pass any column as predictions to get its mean.

    Example:
      >>> import torch
      >>> from funcrec.metrics import weighted_avg
      >>> m, watched_s = weighted_avg(), torch.tensor([30.0, 90.0])
      >>> m.compute(m.update(m.init(), watched_s, torch.zeros(2), torch.tensor([2.0, 1.0])))
      tensor(50., dtype=torch.float64)

    Source: TorchRec's weighted average and tensor weighted average.
    """
    terms, mean = lambda p, y: {"predicted": p}, lambda s: s["predicted"] / s["weight"]
    return sums("weighted_avg", terms, mean, from_logits=ANY, of_labels=FINITE)


def mean_label() -> Metric:
    """Make a metric: the weighted mean of the labels, which may be any finite numbers. If labels are in [0, 1], it is
    `ctr`.

    Source: TorchRec's label average, and its scalar, which is `windowed(unweighted(mean_label()), 1)`.
    """
    terms, mean = lambda p, y: {"label": y}, lambda s: s["label"] / s["weight"]
    return sums("mean_label", terms, mean, from_logits=ANY, of_labels=FINITE)


def _of_missing(name: str, total: str) -> Metric:
    """Return a metric that counts by which labels are missing. Its labels may be NaN."""
    inner = sums(name, lambda p, y: {"missing": y}, lambda s: s[total], from_logits=ANY)

    def update(state, predictions, labels, weights=None):
        if isinstance(labels, Tensor) and not labels.is_complex():
            labels = torch.isnan(labels).to(torch.float64)
        return inner.update(state, predictions, labels, weights)

    return inner._replace(update=update)

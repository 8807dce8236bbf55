"""Metrics that are quotients of weighted sums.

    log loss = -Σ w (y ln p + (1 - y) ln(1 - p)) / Σ w,   NE = log loss / H(Σ w y / Σ w),   calibration = Σ w p / Σ w y

H(q) = -q ln q - (1 - q) ln(1 - q), the log loss of always predicting q.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import UnitInterval, typed
from funcrec.metrics._metric import ANY, FINITE, Metric, sums

ROUNDING = 1e-12  # of a sum of squares: if the variance is below this share, it counts as none
PROBABILITY_EPS = torch.finfo(torch.float32).eps


def cross_entropy(predictions: Tensor, labels: Tensor, from_logits: bool) -> Tensor:
    """Return each example's log loss, f64[B]; probabilities are clamped PROBABILITY_EPS away from 0 and 1."""
    if from_logits:  # 0 · ∞ counts as 0: an infinite logit of the right sign costs nothing
        cost = lambda label, z: torch.where(label == 0, 0, label * F.softplus(z))
        return cost(labels, -predictions) + cost(1 - labels, predictions)
    p = predictions.clamp(PROBABILITY_EPS, 1 - PROBABILITY_EPS)
    return -(torch.xlogy(labels, p) + torch.xlogy(1 - labels, 1 - p))


@typed
def log_loss(*, from_logits: bool = False, unit: Literal["nats", "bits"] = "nats") -> Metric:
    """Make a metric: the mean cross entropy, in nats or in bits. TorchRec's is in bits.

    Probabilities are clamped 2⁻²³ away from 0 and 1, so that one that is certain but wrong costs 15.9 and not infinity.
    Logits are not clamped and lose no digits: prefer from_logits=True.

    Example:
      >>> import torch
      >>> from funcrec.metrics import log_loss
      >>> m = log_loss()
      >>> m.compute(m.update(m.init(), torch.tensor([0.5, 0.5]), torch.tensor([1, 0])))
      tensor(0.6931, dtype=torch.float64)
    """
    nats = 1 if unit == "nats" else math.log(2)
    terms = lambda p, y: {"loss": cross_entropy(p, y, from_logits)}
    return sums("log_loss", terms, lambda s: s["loss"] / s["weight"] / nats, from_logits=from_logits)


@typed
def normalized_entropy(*, from_logits: bool = False) -> Metric:
    """Make a metric: log loss divided by the log loss of the base rate. A result below 1 is better than predicting that
    rate.

    It is NaN while all labels are equal: then no model is better than another, and a comparison with NaN is false.

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook" (ADKDD 2014), §3; TorchRec's NE.
    """
    terms = lambda p, y: {"loss": cross_entropy(p, y, from_logits), "positive": y}
    return sums("normalized_entropy", terms, _over_base, from_logits=from_logits)


@typed
def positive_normalized_entropy(*, from_logits: bool = False) -> Metric:
    """Make a metric: `normalized_entropy` with only the log loss of the positive examples in the numerator.

    Source: TorchRec's NE of positives.
    """
    terms = lambda p, y: {"loss": y * cross_entropy(p, torch.ones_like(y), from_logits), "positive": y}
    return sums("positive_normalized_entropy", terms, _over_base, from_logits=from_logits)


@typed
def cali_free_ne(*, from_logits: bool = False) -> Metric:
    """Make a metric: log loss divided by the log loss of always predicting the mean prediction.

    A result below 1 is better than that constant prediction. `normalized_entropy` compares with the base rate instead,
    so it also judges the mean of the predictions. Here every constant prediction has the result 1, whatever the base
    rate.

    Source: TorchRec's calibration-free NE. Theirs is NE divided by Σ w times our denominator in bits, so that it falls
    as examples come.
    """
    terms = lambda p, y: {
        "loss": cross_entropy(p, y, from_logits),
        "positive": y,
        "predicted": _probability(p, from_logits),
    }

    def compute(s):
        rate, mean = s["positive"] / s["weight"], s["predicted"] / s["weight"]
        return _over(s["loss"] / s["weight"], cross_entropy(mean, rate, False))

    return sums("cali_free_ne", terms, compute, from_logits=from_logits)


@typed
def calibration(*, from_logits: bool = False) -> Metric:
    """Make a metric: predicted clicks divided by clicks. 1 is right, and above 1 is too many.
    It is NaN without a click. Source: TorchRec's calibration."""
    terms = lambda p, y: {"predicted": _probability(p, from_logits), "positive": y}
    return sums(
        "calibration",
        terms,
        lambda s: torch.where(s["positive"] > 0, s["predicted"] / s["positive"], torch.nan),
        from_logits=from_logits,
    )


def ctr() -> Metric:
    """Make a metric: the base rate, which is the weighted mean of the labels."""
    return sums("ctr", lambda p, y: {"positive": y}, lambda s: s["positive"] / s["weight"], from_logits=ANY)


@typed
def accuracy(threshold: UnitInterval = 0.5, *, from_logits: bool = False) -> Metric:
    """Make a metric: the share of the examples for which (probability >= threshold) equals (label >= 0.5)."""
    terms = lambda p, y: {"right": ((_probability(p, from_logits) >= threshold) == (y >= 0.5)).double()}
    return sums("accuracy", terms, lambda s: s["right"] / s["weight"], from_logits=from_logits)


@typed
def binary_precision(threshold: UnitInterval = 0.5, *, from_logits: bool = False) -> Metric:
    """Make a metric: the share of the examples with probability >= threshold that have a label >= 0.5.

    It is NaN if no example has such a probability.
    """
    terms = lambda p, y: {"said": (said := _said(p, threshold, from_logits)), "right": said * (y >= 0.5)}
    return sums("binary_precision", terms, lambda s: s["right"] / s["said"], from_logits=from_logits)


@typed
def binary_recall(threshold: UnitInterval = 0.5, *, from_logits: bool = False) -> Metric:
    """Make a metric: the share of the examples with label >= 0.5 that have a probability >= threshold.

    It is NaN if no example has such a label.
    """
    terms = lambda p, y: {"positive": (y >= 0.5).double(), "right": _said(p, threshold, from_logits) * (y >= 0.5)}
    return sums("binary_recall", terms, lambda s: s["right"] / s["positive"], from_logits=from_logits)


@typed
def mean_prediction(*, from_logits: bool = False) -> Metric:
    """Make a metric: the weighted mean of the probabilities. Divided by `ctr` it is `calibration`."""
    terms = lambda p, y: {"predicted": _probability(p, from_logits)}
    return sums("mean_prediction", terms, lambda s: s["predicted"] / s["weight"], from_logits=from_logits)


def r2() -> Metric:
    """Make a metric: the coefficient of determination, 1 - mse / the variance of the labels.

    It is NaN if the labels vary by less than a millionth of their size: subtract their mean first.

    Predictions may be any numbers but NaN, and labels any finite numbers. Source: scikit-learn's r2_score.
    """
    terms = lambda p, y: {"error": (p - y).square(), "label": y, "square": y.square()}

    def compute(s):
        variance = s["square"] / s["weight"] - (s["label"] / s["weight"]).square()
        is_spread = variance > ROUNDING * s["square"] / s["weight"]
        return torch.where(is_spread, 1 - s["error"] / s["weight"] / variance, torch.nan)

    return sums("r2", terms, compute, from_logits=ANY, of_labels=FINITE)


def nmse() -> Metric:
    """Make a metric: `mse` divided by the mse of predicting 1. It is NaN if all labels are 1.

    Predictions may be any numbers but NaN, and labels any finite numbers.

    Source: TorchRec's NMSE.
    """
    terms = lambda p, y: {"error": (p - y).square(), "base": (1 - y).square()}
    compute = lambda s: torch.where(s["base"] > 0, s["error"] / s["base"], torch.nan)
    return sums("nmse", terms, compute, from_logits=ANY, of_labels=FINITE)


def nrmse() -> Metric:
    """Make a metric: the square root of `nmse`. Source: TorchRec's NRMSE."""
    mean = nmse()
    return mean._replace(compute=lambda state: mean.compute(state).sqrt())


def mse() -> Metric:
    """Make a metric: the mean of (prediction - label)², for any predictions and any finite labels.

    Example:
      >>> import torch
      >>> from funcrec.metrics import mse
      >>> m = mse()
      >>> m.compute(m.update(m.init(), torch.tensor([3.0, 5.0]), torch.tensor([1.0, 5.0])))
      tensor(2., dtype=torch.float64)
    """
    return _of_errors("mse", torch.square, lambda mean: mean)


def rmse() -> Metric:
    """Make a metric: the square root of `mse`, in the unit of the labels."""
    return _of_errors("rmse", torch.square, torch.sqrt)


def mae() -> Metric:
    """Make a metric: the mean of |prediction - label|, for any predictions and any finite labels."""
    return _of_errors("mae", torch.abs, lambda mean: mean)


def _of_errors(name: str, cost: Callable[[Tensor], Tensor], of_mean: Callable[[Tensor], Tensor]) -> Metric:
    terms = lambda p, y: {"error": cost(p - y)}
    return sums(name, terms, lambda s: of_mean(s["error"] / s["weight"]), from_logits=ANY, of_labels=FINITE)


def _over_base(s: dict[str, Tensor]) -> Tensor:
    """Return the mean loss divided by the log loss of predicting the base rate."""
    rate = s["positive"] / s["weight"]
    return _over(s["loss"] / s["weight"], -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate)))


def _over(loss: Tensor, base: Tensor) -> Tensor:
    return torch.where(base > 0, loss / base, torch.nan)


def _said(p: Tensor, threshold: float, from_logits: bool) -> Tensor:
    return (_probability(p, from_logits) >= threshold).double()


def _probability(p: Tensor, from_logits: bool) -> Tensor:
    return p.sigmoid() if from_logits else p

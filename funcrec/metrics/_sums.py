"""Metrics that are quotients of weighted sums.

    log loss = -Σ w (y ln p + (1 - y) ln(1 - p)) / Σ w,   NE = log loss / H(Σ w y / Σ w),   calibration = Σ w p / Σ w y

H(q) = -q ln q - (1 - q) ln(1 - q), the log loss of always saying q.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import UnitInterval, typed
from funcrec.metrics._metric import ANY, FINITE, Metric, sums

PROBABILITY_EPS = torch.finfo(torch.float32).eps


def cross_entropy(predictions: Tensor, labels: Tensor, from_logits: bool) -> Tensor:
    """f64[B]: each example's log loss; a probability is held PROBABILITY_EPS away from 0 and 1."""
    if from_logits:  # 0 · ∞ = 0: an infinite logit of the right sign costs nothing
        cost = lambda label, z: torch.where(label == 0, 0, label * F.softplus(z))
        return cost(labels, -predictions) + cost(1 - labels, predictions)
    p = predictions.clamp(PROBABILITY_EPS, 1 - PROBABILITY_EPS)
    return -(torch.xlogy(labels, p) + torch.xlogy(1 - labels, 1 - p))


@typed
def log_loss(*, from_logits: bool = False) -> Metric:
    """The mean cross entropy, in nats.

    Probabilities are held 2⁻²³ from 0 and 1, so that a wrong certainty costs 15.9 and not infinity; logits are not, and
    lose no digits: prefer from_logits=True.

    Example:
      >>> import torch
      >>> from funcrec.metrics import log_loss
      >>> m = log_loss()
      >>> m.compute(m.update(m.init(), torch.tensor([0.5, 0.5]), torch.tensor([1, 0])))
      tensor(0.6931, dtype=torch.float64)
    """
    terms = lambda p, y: {"loss": cross_entropy(p, y, from_logits)}
    return sums("log_loss", terms, lambda s: s["loss"] / s["weight"], from_logits=from_logits)


@typed
def normalized_entropy(*, from_logits: bool = False) -> Metric:
    """Log loss over the log loss of the base rate: below 1 is better than knowing only the base rate.

    NaN while all labels are the same: no model is then better than another, and NaN is below no best value.

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook" (ADKDD 2014), §3; TorchRec's NE.
    """
    terms = lambda p, y: {"loss": cross_entropy(p, y, from_logits), "positive": y}

    def compute(s):
        rate = s["positive"] / s["weight"]
        base = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
        return torch.where(base > 0, s["loss"] / s["weight"] / base, torch.nan)

    return sums("normalized_entropy", terms, compute, from_logits=from_logits)


@typed
def calibration(*, from_logits: bool = False) -> Metric:
    """Predicted clicks over clicks; 1 is right, above is too many.
    NaN without a click. Source: TorchRec's calibration."""
    terms = lambda p, y: {"predicted": _probability(p, from_logits), "positive": y}
    return sums(
        "calibration",
        terms,
        lambda s: torch.where(s["positive"] > 0, s["predicted"] / s["positive"], torch.nan),
        from_logits=from_logits,
    )


def ctr() -> Metric:
    """The base rate: the weighted mean of the labels."""
    return sums("ctr", lambda p, y: {"positive": y}, lambda s: s["positive"] / s["weight"], from_logits=ANY)


@typed
def accuracy(threshold: UnitInterval = 0.5, *, from_logits: bool = False) -> Metric:
    """The part of the examples where (probability >= threshold) is (label >= 0.5)."""
    terms = lambda p, y: {"right": ((_probability(p, from_logits) >= threshold) == (y >= 0.5)).double()}
    return sums("accuracy", terms, lambda s: s["right"] / s["weight"], from_logits=from_logits)


def mse() -> Metric:
    """The mean of (prediction - label)², of any predictions and any finite labels.

    Example:
      >>> import torch
      >>> from funcrec.metrics import mse
      >>> m = mse()
      >>> m.compute(m.update(m.init(), torch.tensor([3.0, 5.0]), torch.tensor([1.0, 5.0])))
      tensor(2., dtype=torch.float64)
    """
    return _of_errors("mse", torch.square, lambda mean: mean)


def rmse() -> Metric:
    """The square root of `mse`, in the unit of the labels."""
    return _of_errors("rmse", torch.square, torch.sqrt)


def mae() -> Metric:
    """The mean of |prediction - label|, of any predictions and any finite labels."""
    return _of_errors("mae", torch.abs, lambda mean: mean)


def _of_errors(name: str, cost: Callable[[Tensor], Tensor], of_mean: Callable[[Tensor], Tensor]) -> Metric:
    terms = lambda p, y: {"error": cost(p - y)}
    return sums(name, terms, lambda s: of_mean(s["error"] / s["weight"]), from_logits=ANY, of_labels=FINITE)


def _probability(p: Tensor, from_logits: bool) -> Tensor:
    return p.sigmoid() if from_logits else p

"""Rules that take a step along the gradient, or along its sign.

    w ← w - lr · u        u: the gradient, its running sum, or the sign of its running mean

Every rule updates one row: w, g and the slots are f[D].
"""

import torch
from torch import Tensor

from funcrec.optim._builtin import builtin, per_element
from funcrec.optim._row import Rate, RowOptimizer, norm


def _sgd(row, grad, slots, hyper):
    return row - hyper.lr * (grad + hyper.weight_decay * row), slots


def _is_rate(hyper) -> bool:
    return not isinstance(hyper.weight_decay, Tensor) and hyper.weight_decay == 0


@builtin(rule=_sgd, slots=lambda hyper: {}, is_rate=_is_rate)
def sgd(lr: Rate = 0.01, *, weight_decay: float = 0.0) -> RowOptimizer:
    """w ← w - lr · (g + weight_decay · w). No slots. The default lr is 0.01; torch.optim.SGD's is 0.001.

    A row that holds inf becomes NaN when it is named, also with weight_decay=0: 0 · inf is NaN.

    Example:
      >>> import funcrec as fr
      >>> fr.optim.sgd(lr=0.1).init(fr.init(fr.key(0), [fr.TableConfig("item", 3, 2)]))
      {'item': {}}

    Source: torch.optim.SGD; FBGEMM's EXACT_SGD without decay.
    """

    ...


def _momentum(row, grad, slots, hyper):
    grad = grad + hyper.weight_decay * row
    m = hyper.momentum * slots["momentum"] + grad
    return row - hyper.lr * (grad + hyper.momentum * m if hyper.nesterov else m), {"momentum": m}


@builtin(rule=_momentum, slots=lambda hyper: {"momentum": per_element()})
def momentum(
    lr: Rate = 0.01, *, momentum: float = 0.9, weight_decay: float = 0.0, nesterov: bool = False
) -> RowOptimizer:
    """m ← momentum · m + g + weight_decay · w;
    w ← w - lr · m, with nesterov w ← w - lr · (g + weight_decay · w + momentum · m).

    The rule is lazy: the m of a row that no id names does not change. Slots: momentum f[R, D].

    Source: torch.optim.SGD with dampening 0.
    """

    ...


def _lars_sgd(row, grad, slots, hyper):
    row_norm = norm(row)
    pull = norm(grad) + hyper.weight_decay * row_norm
    used = (row_norm > 0) & (pull > 0)
    rate = hyper.lr * torch.where(used, hyper.eta * row_norm / torch.where(used, pull, 1), 1)
    m = hyper.momentum * slots["momentum"] + rate * (grad + hyper.weight_decay * row)
    return row - m, {"momentum": m}


@builtin(rule=_lars_sgd, slots=lambda hyper: {"momentum": per_element()})
def lars_sgd(lr: Rate = 0.01, *, eta: float = 0.001, momentum: float = 0.9, weight_decay: float = 0.0) -> RowOptimizer:
    """Momentum with a rate for each row in proportion to the row's length.

        rate = lr · eta · ‖w‖ / (‖g‖ + weight_decay · ‖w‖);  m ← momentum · m + rate · (g + weight_decay · w);
        w ← w - m

    The rate is lr for a row of zeros, and where the divisor is 0. Slots: momentum f[R, D].

    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks" (2017), alg. 1, with a row as a
    layer; FBGEMM's LARS_SGD, where a row of zeros never moves.
    """

    ...


def _lion(row, grad, slots, hyper):
    direction = (hyper.b1 * slots["mean"] + (1 - hyper.b1) * grad).sign()
    mean = hyper.b2 * slots["mean"] + (1 - hyper.b2) * grad
    return row - hyper.lr * (direction + hyper.weight_decay * row), {"mean": mean}


@builtin(rule=_lion, slots=lambda hyper: {"mean": per_element()})
def lion(lr: Rate = 1e-4, *, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0) -> RowOptimizer:
    """w ← w - lr · (sign(b1 · m + (1 - b1) · g) + weight_decay · w);  m ← b2 · m + (1 - b2) · g.

    Slots: mean f[R, D].

    Source: Chen et al., "Symbolic discovery of optimization algorithms" (2023), alg. 2.
    """

    ...

"""Rules with running means of the gradient and of its square, corrected for their start at zero.

    m ← b1 · m + (1 - b1) · g;   v ← b2 · v + (1 - b2) · g²;   u = m / (1 - b1ᵗ) / (√(v / (1 - b2ᵗ)) + eps)

The rules are lazy, like those of FBGEMM: only rows that the batch names change, while t counts every step. Partial
row-wise variants keep one v for each row, the running mean of mean(g²). A rule updates one row: w, g, m, u are f[D].
"""

import math

import torch

from funcrec.kernels import formula
from funcrec.optim._builtin import builtin, per_element, per_row
from funcrec.optim._row import Rate, RowOptimizer, norm, root


def by_element(hyper):
    return {"mean": per_element(), "square": per_element()}


def by_row(hyper):
    return {"mean": per_element(), "square": per_row()}


def _direction(grad, slots, hyper):
    """Return u and the new slots. The shape of `square`, f[D] or f[], says whether v is per element or per row."""
    square = grad.square() if slots["square"].dim() else grad.square().mean()
    m = hyper.b1 * slots["mean"] + (1 - hyper.b1) * grad
    v = hyper.b2 * slots["square"] + (1 - hyper.b2) * square
    denominator = root(v / correction(hyper.b2, hyper.step))
    return m / correction(hyper.b1, hyper.step) / (denominator + hyper.eps), {"mean": m, "square": v}


@formula.primitive
def correction(b, step):
    """Return 1 - bᵗ. For b near 1 and small t, `1 - b**t` would lose half of the digits of f32."""
    if not isinstance(b, torch.Tensor):
        return -torch.expm1(step * math.log(b)) if b > 0 else torch.ones_like(step)
    above = torch.where(b > 0, b, 1.0)  # at b = 0 the derivative avoids the logarithm
    return torch.where(b > 0, -torch.expm1(step * above.log()), 1 - b**step)


def _adam(row, grad, slots, hyper):
    direction, slots = _direction(grad + hyper.weight_decay * row, slots, hyper)
    return row - hyper.lr * direction, slots


@builtin(rule=_adam, slots=by_element)
def adam(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> RowOptimizer:
    """w ← w - lr · u, with g + weight_decay · w for g. Slots: mean and square, each f[R, D].

    Source: Kingma, Ba, "Adam" (2015), alg. 1; torch.optim.Adam.
    """

    ...


def _adamw(row, grad, slots, hyper):
    direction, slots = _direction(grad, slots, hyper)
    return row - hyper.lr * (direction + hyper.weight_decay * row), slots


@builtin(rule=_adamw, slots=by_element)
def adamw(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> RowOptimizer:
    """w ← w - lr · (u + weight_decay · w). Slots: mean and square, each f[R, D].

    Source: Loshchilov, Hutter, "Decoupled weight decay regularization"
      (2019), alg. 2; torch.optim.AdamW; FBGEMM's ADAM.
    """

    ...


@builtin(rule=_adamw, slots=by_row)
def partial_rowwise_adam(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> RowOptimizer:
    """AdamW with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square f[R].

    Source: FBGEMM's PARTIAL_ROWWISE_ADAM.
    """

    ...


def _lamb(row, grad, slots, hyper):
    direction, slots = _direction(grad, slots, hyper)
    direction = direction + hyper.weight_decay * row
    row_norm, length = norm(row), norm(direction)
    used = (row_norm > 0) & (length > 0)
    ratio = torch.where(used, row_norm / torch.where(used, length, 1), 1)
    return row - hyper.lr * ratio * direction, slots


@builtin(rule=_lamb, slots=by_element)
def lamb(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> RowOptimizer:
    """r = u + weight_decay · w;  w ← w - lr · ‖w‖ / ‖r‖ · r. Slots: mean and square, each f[R, D].

    The ratio is 1 where ‖w‖ or ‖r‖ is 0.

    Source: You et al., "Large batch optimization for deep learning" (2020), alg. 2, with a row as a layer; FBGEMM's
    LAMB, where a row of zeros never moves.
    """

    ...


@builtin(rule=_lamb, slots=by_row)
def partial_rowwise_lamb(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> RowOptimizer:
    """LAMB with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square f[R].

    Source: FBGEMM's PARTIAL_ROWWISE_LAMB.
    """

    ...

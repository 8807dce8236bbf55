"""Rules with running means of the gradient and of its square, corrected for their start at zero.

    m ← b1 · m + (1 - b1) · g;   v ← b2 · v + (1 - b2) · g²;   u = m / (1 - b1ᵗ) / (√(v / (1 - b2ᵗ)) + eps)

They are lazy, as FBGEMM's: only rows that the batch names move on, while t counts every step. Partial row-wise variants
keep one v for each row, the running mean of mean(g²). Every rule is for one row: w, g, m, u are f[D].
"""

import math

import torch

from funcrec.core import remade
from funcrec.optim._row import Rate, RowOptimizer, builtin_optimizer, norm, per_element, per_row
from funcrec.tables import root


@remade
def adam(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> RowOptimizer:
    """w ← w - lr · u, with g + weight_decay · w for g. Slots: mean and square, each f[R, D].

    Source: Kingma, Ba, "Adam" (2015), alg. 1; torch.optim.Adam.
    """
    return _build("adam", _adam, per_element, lr, b1, b2, eps, weight_decay)


def _adam(row, grad, slots, hyper):
    direction, slots = _direction(grad + hyper.weight_decay * row, slots, hyper)
    return row - hyper.lr * direction, slots


@remade
def adamw(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> RowOptimizer:
    """w ← w - lr · (u + weight_decay · w). Slots: mean and square, each f[R, D].

    Source: Loshchilov, Hutter, "Decoupled weight decay regularization" (2019), alg. 2; torch.optim.AdamW; FBGEMM's ADAM.
    """
    return _build("adamw", _adamw, per_element, lr, b1, b2, eps, weight_decay)


def _adamw(row, grad, slots, hyper):
    direction, slots = _direction(grad, slots, hyper)
    return row - hyper.lr * (direction + hyper.weight_decay * row), slots


@remade
def partial_rowwise_adam(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> RowOptimizer:
    """AdamW with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square f[R].

    Source: FBGEMM's PARTIAL_ROWWISE_ADAM.
    """
    return _build("partial_rowwise_adam", _adamw, per_row, lr, b1, b2, eps, weight_decay)


@remade
def lamb(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> RowOptimizer:
    """r = u + weight_decay · w;  w ← w - lr · ‖w‖ / ‖r‖ · r. Slots: mean and square, each f[R, D].

    The ratio is 1 where ‖w‖ or ‖r‖ is 0.

    Source: You et al., "Large batch optimization for deep learning" (2020), alg. 2, a row as a layer; FBGEMM's LAMB,
    where a row of zeros never moves.
    """
    return _build("lamb", _lamb, per_element, lr, b1, b2, eps, weight_decay)


@remade
def partial_rowwise_lamb(
    lr: Rate = 1e-3, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> RowOptimizer:
    """LAMB with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square f[R].

    Source: FBGEMM's PARTIAL_ROWWISE_LAMB.
    """
    return _build("partial_rowwise_lamb", _lamb, per_row, lr, b1, b2, eps, weight_decay)


def _lamb(row, grad, slots, hyper):
    direction, slots = _direction(grad, slots, hyper)
    direction = direction + hyper.weight_decay * row
    row_norm, length = norm(row), norm(direction)
    used = (row_norm > 0) & (length > 0)
    ratio = torch.where(used, row_norm / torch.where(used, length, 1), 1)
    return row - hyper.lr * ratio * direction, slots


def _build(name, rule, square, lr, b1, b2, eps, weight_decay) -> RowOptimizer:
    init = lambda table: {"mean": per_element(table), "square": square(table)}
    return builtin_optimizer(
        init=init, rule=rule, lr=lr, name=name, is_gradient_wise=name == "partial_rowwise_adam", b1=b1, b2=b2, eps=eps,
        weight_decay=weight_decay,
    )  # fmt: skip


def _direction(grad, slots, hyper):
    """u and the new slots; the shape of `square`, f[D] or f[], says which v is meant."""
    square = grad.square() if slots["square"].dim() else grad.square().mean()
    m = hyper.b1 * slots["mean"] + (1 - hyper.b1) * grad
    v = hyper.b2 * slots["square"] + (1 - hyper.b2) * square
    denominator = root(v / _correction(hyper.b2, hyper.step))
    return m / _correction(hyper.b1, hyper.step) / (denominator + hyper.eps), {"mean": m, "square": v}


def _correction(b, step):
    """1 - bᵗ; `1 - b**t` would lose half of f32's digits for b near 1 and small t."""
    return -torch.expm1(step * math.log(b)) if b > 0 else torch.ones_like(step)

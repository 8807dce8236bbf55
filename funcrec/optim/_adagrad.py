"""Rules that divide by the root of a sum, or of a running mean, of squared gradients.

    n ← n + g²;   w ← w - lr · g / (√n + eps)

Row-wise variants keep one n for each row, the mean of g² over its elements: D times less state. Every rule is for one
row: w, g are f[D].
"""

import torch

from funcrec.core import remade
from funcrec.optim._row import Rate, RowOptimizer, builtin_optimizer, norm, per_element, per_row
from funcrec.tables import root


@remade
def adagrad(
    lr: Rate = 0.01, *, eps: float = 1e-8, weight_decay: float = 0.0, initial_accumulator: float = 0.0
) -> RowOptimizer:
    """g ← g + weight_decay · w;  n ← n + g²;  w ← w - lr · g / (√n + eps).

    Slots: sum f[R, D], which begins at `initial_accumulator`. The default eps is FBGEMM's; torch.optim.Adagrad's is 1e-10.

    Source: Duchi, Hazan, Singer, "Adaptive subgradient methods" (2011), fig. 1; torch.optim.Adagrad; FBGEMM's EXACT_ADAGRAD.
    """
    return builtin_optimizer(
        init=lambda table: {"sum": per_element(table, initial_accumulator)}, rule=_adagrad, lr=lr, name="adagrad",
        eps=eps, weight_decay=weight_decay, initial_accumulator=initial_accumulator,
    )  # fmt: skip


def _adagrad(row, grad, slots, hyper):
    grad = grad + hyper.weight_decay * row
    total = slots["sum"] + grad.square()
    return row - hyper.lr * grad / (root(total) + hyper.eps), {"sum": total}


@remade
def rowwise_adagrad(
    lr: Rate = 0.01,
    *,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = "l2",
    max_norm: float | None = None,
    initial_accumulator: float = 0.0,
) -> RowOptimizer:
    """Adagrad with one accumulator for each row.

        n ← n + mean(g²);  k = lr / (√n + eps);  w ← w - k · g

    With decay="l2" g is g + weight_decay · w everywhere; with "decoupled" w is first scaled by 1 - lr · weight_decay. With
    `max_norm` a row that has become longer is then scaled back to that length. Slots: sum f[R]. The default eps is FBGEMM's, 1e-8, not
    the 1e-10 of torch.optim.Adagrad.

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD, weight decay modes L2 and DECOUPLE.
    """
    return builtin_optimizer(
        init=lambda table: {"sum": per_row(table, initial_accumulator)}, rule=_rowwise_adagrad, lr=lr,
        name="rowwise_adagrad", is_gradient_wise=_adds_no_row(weight_decay, decay) and max_norm is None, eps=eps,
        weight_decay=weight_decay, decay=decay, max_norm=max_norm, initial_accumulator=initial_accumulator,
    )  # fmt: skip


def _shrink(length, most):
    """f[]: what takes a length to at most `most`; its derivatives exist at length 0."""
    is_long = length > most
    return torch.where(is_long, most / torch.where(is_long, length, 1), 1)


def _adds_no_row(weight_decay, decay: str) -> bool:
    """Whether the square that is kept for a row is of its gradient alone."""
    is_none = isinstance(weight_decay, int | float) and weight_decay == 0
    return is_none or (isinstance(decay, str) and decay == "decoupled")


def _rowwise_adagrad(row, grad, slots, hyper):
    if hyper.decay == "l2":
        grad = grad + hyper.weight_decay * row
    total = slots["sum"] + grad.square().mean()
    kept = row if hyper.decay == "l2" else (1 - hyper.lr * hyper.weight_decay) * row
    new = kept - hyper.lr / (root(total) + hyper.eps) * grad
    if hyper.max_norm is not None:
        length = norm(new)
        new = new * _shrink(length, hyper.max_norm)
    return new, {"sum": total}


@remade
def rowwise_adagrad_counter(
    lr: Rate = 0.01, *, half_life: float, eps: float = 1e-8, weight_decay: float = 0.0, decay: str = "l2",
    initial_accumulator: float = 0.0,
) -> RowOptimizer:  # fmt: skip
    """Row-wise Adagrad that decays a row the more, the more seldom it is seen.

        c ← 1 + c · 2^(-(t - last) / half_life);  last ← t;  f = half_life / c
        decay="decoupled":  w ← (1 - lr · f · weight_decay) · w - k · g          k as in rowwise_adagrad
        decay="l2":         w ← (1 - k · f · weight_decay) · w - k · g,  with g + weight_decay · w in the accumulator

    c counts the batches that named the row; t - last is 1 for a row that was never seen. `half_life` is in steps.
    Slots: sum, counter and last, each f[R].

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD with counter-based regularisation, without its changes to the learning rate.
    """
    return builtin_optimizer(
        init=lambda table: {"sum": per_row(table, initial_accumulator), "counter": per_row(table), "last": per_row(table)},
        rule=_rowwise_adagrad_counter, lr=lr, name="rowwise_adagrad_counter",
        is_gradient_wise=_adds_no_row(weight_decay, decay), half_life=half_life, eps=eps,
        weight_decay=weight_decay, decay=decay, initial_accumulator=initial_accumulator,
    )  # fmt: skip


def _rowwise_adagrad_counter(row, grad, slots, hyper):
    passed = torch.where(slots["last"] == 0, 1, hyper.step - slots["last"])
    counter = 1 + slots["counter"] * torch.exp2(-passed / hyper.half_life)
    penalty = hyper.half_life / counter * hyper.weight_decay
    decayed = grad + hyper.weight_decay * row if hyper.decay == "l2" else grad
    total = slots["sum"] + decayed.square().mean()
    rate = hyper.lr / (root(total) + hyper.eps)
    kept = 1 - (rate if hyper.decay == "l2" else hyper.lr) * penalty
    return kept * row - rate * grad, {"sum": total, "counter": counter, "last": hyper.step.expand_as(counter)}


@remade
def rowwise_adagrad_cowclip(
    lr: Rate = 0.01, *, clip_ratio: float = 1.0, lower_bound: float = 1e-5, eps: float = 1e-8,
    weight_decay: float = 0.0, decay: str = "l2", initial_accumulator: float = 0.0,
) -> RowOptimizer:  # fmt: skip
    """Row-wise Adagrad with a step clipped for each row, by how often it occurs and how long it is.

        k ← k · min(1, repeats · max(clip_ratio · ‖w‖, lower_bound) / ‖g‖);  else as rowwise_adagrad

    Slots: sum f[R].

    Source: Zheng et al., "CowClip: Reducing CTR prediction model training time" (2022), alg. 1: repeats is the number
    of ids in the batch. FBGEMM's cowclip mode has the row's decayed counter there.
    """
    return builtin_optimizer(
        init=lambda table: {"sum": per_row(table, initial_accumulator)}, rule=_rowwise_adagrad_cowclip, lr=lr,
        name="rowwise_adagrad_cowclip", clip_ratio=clip_ratio, lower_bound=lower_bound, eps=eps,
        weight_decay=weight_decay, decay=decay, initial_accumulator=initial_accumulator,
    )  # fmt: skip


def _rowwise_adagrad_cowclip(row, grad, slots, hyper):
    if hyper.decay == "l2":
        grad = grad + hyper.weight_decay * row
    total = slots["sum"] + grad.square().mean()
    threshold = hyper.repeats * (hyper.clip_ratio * norm(row)).clamp(min=hyper.lower_bound)
    length = norm(grad)
    factor = _shrink(length, threshold)
    kept = row if hyper.decay == "l2" else (1 - hyper.lr * hyper.weight_decay) * row
    return kept - factor * hyper.lr / (root(total) + hyper.eps) * grad, {"sum": total}


@remade
def rmsprop(
    lr: Rate = 0.01, *, b2: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0
) -> RowOptimizer:
    """g ← g + weight_decay · w;  v ← b2 · v + (1 - b2) · g²;  m ← momentum · m + g / (√v + eps);  w ← w - lr · m.

    Slots: square f[R, D], and momentum f[R, D] unless momentum is 0.

    Source: Tieleman, Hinton, "Lecture 6.5: rmsprop" (2012); torch.optim.RMSprop, whose alpha is b2.
    """
    names = ("square",) if isinstance(momentum, int | float) and momentum == 0 else ("square", "momentum")
    return builtin_optimizer(
        init=lambda table: {k: per_element(table) for k in names}, rule=_rmsprop, lr=lr, name="rmsprop",
        b2=b2, eps=eps, momentum=momentum, weight_decay=weight_decay,
    )  # fmt: skip


def _rmsprop(row, grad, slots, hyper):
    grad = grad + hyper.weight_decay * row
    square = hyper.b2 * slots["square"] + (1 - hyper.b2) * grad.square()
    m = grad / (root(square) + hyper.eps)
    if "momentum" not in slots:
        return row - hyper.lr * m, {"square": square}
    m = hyper.momentum * slots["momentum"] + m
    return row - hyper.lr * m, {"square": square, "momentum": m}


@remade
def ftrl(lr: Rate = 0.1, *, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> RowOptimizer:
    """Follow the regularised leader, proximal, for each coordinate.

        σ = (√(n + g²) - √n) / lr;  z ← z + g - σ · w;  n ← n + g²
        w ← 0 if |z| <= l1, else -(z - sign(z) · l1) / ((beta + √n) / lr + l2)

    w is a function of z and n, so a table should begin at zero (`fr.constant()`): any other start fades when a row is
    first touched. Slots: z and sum, each f[R, D].

    Source: McMahan et al., "Ad click prediction: a view from the trenches" (KDD 2013), alg. 1.
    """
    return builtin_optimizer(
        init=lambda table: {"z": per_element(table), "sum": per_element(table)}, rule=_ftrl, lr=lr, name="ftrl",
        beta=beta, l1=l1, l2=l2,
    )  # fmt: skip


def _ftrl(row, grad, slots, hyper):
    total = slots["sum"] + grad.square()
    z = slots["z"] + grad - (root(total) - root(slots["sum"])) / hyper.lr * row
    new = -(z - z.sign() * hyper.l1) / ((hyper.beta + root(total)) / hyper.lr + hyper.l2)
    return torch.where(z.abs() <= hyper.l1, 0, new), {"z": z, "sum": total}

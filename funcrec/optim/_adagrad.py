"""Rules that divide by the root of a sum, or of a running mean, of squared gradients.

    n ← n + g²;   w ← w - lr · g / (√n + eps)

Row-wise variants keep one n for each row, the mean of g² over its elements, so their state is D times smaller. Every
rule updates one row: w, g are f[D].
"""

import torch

from funcrec.optim._builtin import builtin, per_element, per_row
from funcrec.optim._row import Rate, RowOptimizer, norm, root


def _adagrad(row, grad, slots, hyper):
    grad = grad + hyper.weight_decay * row
    total = slots["sum"] + grad.square()
    return row - hyper.lr * grad / (root(total) + hyper.eps), {"sum": total}


@builtin(rule=_adagrad, slots=lambda hyper: {"sum": per_element(hyper.initial_accumulator)})
def adagrad(
    lr: Rate = 0.01, *, eps: float = 1e-8, weight_decay: float = 0.0, initial_accumulator: float = 0.0
) -> RowOptimizer:
    """g ← g + weight_decay · w;  n ← n + g²;  w ← w - lr · g / (√n + eps).

    Slots: sum f[R, D], which begins at `initial_accumulator`. The default eps is that of FBGEMM. The default of
      torch.optim.Adagrad is 1e-10.

    Source: Duchi, Hazan, Singer, "Adaptive subgradient methods" (2011), fig. 1; torch.optim.Adagrad; FBGEMM's
      EXACT_ADAGRAD.
    """

    ...


def one_sum(hyper):
    return {"sum": per_row(hyper.initial_accumulator)}


def _shrink(length, most):
    """Return a factor, f[], that scales a length down to at most `most`. Its derivatives exist at length 0."""
    is_long = length > most
    return torch.where(is_long, most / torch.where(is_long, length, 1), 1)


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


@builtin(rule=_rowwise_adagrad, slots=one_sum)
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

    With decay="l2", g is g + weight_decay · w everywhere. With "decoupled", w is first scaled by 1 - lr · weight_decay.
    With `max_norm`, a longer row is then scaled back to this length. Slots: sum f[R]. The default eps is 1e-8, as in
    FBGEMM; torch.optim.Adagrad has 1e-10.

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD, weight decay modes L2 and DECOUPLE.
    """

    ...


def counted(hyper):
    return {**one_sum(hyper), "counter": per_row(), "last": per_row()}


def _rowwise_adagrad_counter(row, grad, slots, hyper):
    passed = torch.where(slots["last"] == 0, 1, hyper.step - slots["last"])
    counter = 1 + slots["counter"] * torch.exp2(-passed / hyper.half_life)
    penalty = hyper.half_life / counter * hyper.weight_decay
    decayed = grad + hyper.weight_decay * row if hyper.decay == "l2" else grad
    total = slots["sum"] + decayed.square().mean()
    rate = hyper.lr / (root(total) + hyper.eps)
    kept = 1 - (rate if hyper.decay == "l2" else hyper.lr) * penalty
    return kept * row - rate * grad, {"sum": total, "counter": counter, "last": hyper.step.expand_as(counter)}


@builtin(rule=_rowwise_adagrad_counter, slots=counted)
def rowwise_adagrad_counter(
    lr: Rate = 0.01, *, half_life: float, eps: float = 1e-8, weight_decay: float = 0.0, decay: str = "l2",
    initial_accumulator: float = 0.0,
) -> RowOptimizer:  # fmt: skip
    """Row-wise Adagrad that decays a row the more, the more seldom it is seen.

        c ← 1 + c · 2^(-(t - last) / half_life);  last ← t;  f = half_life / c
        decay="decoupled":  w ← (1 - lr · f · weight_decay) · w - k · g          k as in rowwise_adagrad
        decay="l2":         w ← (1 - k · f · weight_decay) · w - k · g,  with g + weight_decay · w in the accumulator

    c counts the batches that named the row. t - last is 1 for a row that was never seen. `half_life` is in steps.
    Slots: sum, counter and last, each f[R].

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD with counter-based regularisation, without its changes to the learning rate.
    """

    ...


def _rowwise_adagrad_cowclip(row, grad, slots, hyper):
    if hyper.decay == "l2":
        grad = grad + hyper.weight_decay * row
    total = slots["sum"] + grad.square().mean()
    threshold = hyper.repeats * (hyper.clip_ratio * norm(row)).clamp(min=hyper.lower_bound)
    length = norm(grad)
    factor = _shrink(length, threshold)
    kept = row if hyper.decay == "l2" else (1 - hyper.lr * hyper.weight_decay) * row
    return kept - factor * hyper.lr / (root(total) + hyper.eps) * grad, {"sum": total}


@builtin(rule=_rowwise_adagrad_cowclip, slots=one_sum)
def rowwise_adagrad_cowclip(
    lr: Rate = 0.01, *, clip_ratio: float = 1.0, lower_bound: float = 1e-5, eps: float = 1e-8,
    weight_decay: float = 0.0, decay: str = "l2", initial_accumulator: float = 0.0,
) -> RowOptimizer:  # fmt: skip
    """Row-wise Adagrad with a step clipped for each row, by how often it occurs and how long it is.

        k ← k · min(1, repeats · max(clip_ratio · ‖w‖, lower_bound) / ‖g‖);  else as rowwise_adagrad

    Slots: sum f[R].

    Source: Zheng et al., "CowClip: Reducing CTR prediction model training time" (2022), alg. 1, where repeats is the
    number of ids in the batch. FBGEMM's cowclip mode uses the row's decayed counter instead.
    """

    ...


def squares(hyper):
    is_plain = isinstance(hyper.momentum, int | float) and hyper.momentum == 0
    return {k: per_element() for k in ("square", "momentum")[: 2 - is_plain]}


def _rmsprop(row, grad, slots, hyper):
    grad = grad + hyper.weight_decay * row
    square = hyper.b2 * slots["square"] + (1 - hyper.b2) * grad.square()
    m = grad / (root(square) + hyper.eps)
    if "momentum" not in slots:
        return row - hyper.lr * m, {"square": square}
    m = hyper.momentum * slots["momentum"] + m
    return row - hyper.lr * m, {"square": square, "momentum": m}


@builtin(rule=_rmsprop, slots=squares)
def rmsprop(
    lr: Rate = 0.01, *, b2: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0
) -> RowOptimizer:
    """g ← g + weight_decay · w;  v ← b2 · v + (1 - b2) · g²;  m ← momentum · m + g / (√v + eps);  w ← w - lr · m.

    Slots: square f[R, D], and momentum f[R, D] unless momentum is 0.

    Source: Tieleman, Hinton, "Lecture 6.5: rmsprop" (2012); torch.optim.RMSprop, whose alpha is b2.
    """

    ...


def _ftrl(row, grad, slots, hyper):
    total = slots["sum"] + grad.square()
    z = slots["z"] + grad - (root(total) - root(slots["sum"])) / hyper.lr * row
    new = -(z - z.sign() * hyper.l1) / ((hyper.beta + root(total)) / hyper.lr + hyper.l2)
    return torch.where(z.abs() <= hyper.l1, 0, new), {"z": z, "sum": total}


@builtin(rule=_ftrl, slots=lambda hyper: {"z": per_element(), "sum": per_element()})
def ftrl(lr: Rate = 0.1, *, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> RowOptimizer:
    """Follow the regularised leader, proximal, for each coordinate.

        σ = (√(n + g²) - √n) / lr;  z ← z + g - σ · w;  n ← n + g²
        w ← 0 if |z| <= l1, else -(z - sign(z) · l1) / ((beta + √n) / lr + l2)

    w is a function of z and n. So a table should begin at zero (`fr.constant()`): any other start fades when a row is
    first touched. Slots: z and sum, each f[R, D].

    Source: McMahan et al., "Ad click prediction: a view from the trenches" (KDD 2013), alg. 1.
    """

    ...

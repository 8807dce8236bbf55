"""The optimizers' rules on a tile of rows: written by `python -m funcrec.optim.write`, and not by hand.

g is the summed gradient, w the row, both f[rows, columns]; slots are f[rows, columns] or f[rows, 1], anything where the
rule has none; HYPER are numbers that are compiled in, computed with in f64 and rounded where they meet a tensor;
scalars hold lr, t and what `SCALARS` makes of hyper-parameters and t, in the tile's dtype. Columns behind the dim are
masked out of every sum along a row.
"""

import triton
import triton.language as tl
from funcrec.kernels.triton.device import divide, root
from funcrec.kernels.triton.tiles import correction, divide_by, row_sum, sign

# fmt: off
# what each rule makes of its hyper-parameters h and the step t f64[]; rules that are not here make nothing
SCALARS = {
    "adam": lambda h, t: [correction(h[0], t), correction(h[1], t)],
    "adamw": lambda h, t: [correction(h[0], t), correction(h[1], t)],
    "partial_rowwise_adam": lambda h, t: [correction(h[0], t), correction(h[1], t)],
    "lamb": lambda h, t: [correction(h[0], t), correction(h[1], t)],
    "partial_rowwise_lamb": lambda h, t: [correction(h[0], t), correction(h[1], t)],
}


@triton.jit
def sgd(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """w ← w - lr · (g + weight_decay · w). No slots. The default lr is 0.01; torch.optim.SGD's is 0.001."""
    lr = tl.load(scalars + 0)
    return w - lr * (g + HYPER[0] * w), s_0, s_1, s_2


@triton.jit
def momentum(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """m ← momentum · m + g + weight_decay · w;  w ← w - lr · m, with nesterov w ← w - lr · (g + weight_decay
    · w + momentum · m)."""
    lr = tl.load(scalars + 0)
    if HYPER[2] == 0:
        v0 = HYPER[0] * s_0 + (g + HYPER[1] * w)
        return w - lr * v0, v0, s_1, s_2
    else:  # HYPER[2] != 0
        v0 = g + HYPER[1] * w
        v1 = HYPER[0] * s_0 + v0
        return w - lr * (v0 + HYPER[0] * v1), v1, s_1, s_2


@triton.jit
def lars_sgd(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """Momentum with a rate for each row in proportion to the row's length."""
    lr = tl.load(scalars + 0)
    v0 = root(row_sum(w * w, column, DIM))
    v1 = root(row_sum(g * g, column, DIM)) + HYPER[2] * v0
    v2 = (v0 > 0) & (v1 > 0)
    v3 = tl.where(v2, divide(HYPER[0] * v0, tl.where(v2, v1, 1)), 1)
    v4 = HYPER[1] * s_0 + lr * v3 * (g + HYPER[2] * w)
    return w - v4, v4, s_1, s_2


@triton.jit
def lion(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """w ← w - lr · (sign(b1 · m + (1 - b1) · g) + weight_decay · w);  m ← b2 · m + (1 - b2) · g."""
    lr = tl.load(scalars + 0)
    v0 = sign(HYPER[0] * s_0 + (1 - HYPER[0]) * g) + HYPER[2] * w
    return w - lr * v0, HYPER[1] * s_0 + (1 - HYPER[1]) * g, s_1, s_2


@triton.jit
def adagrad(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """g ← g + weight_decay · w;  n ← n + g²;  w ← w - lr · g / (√n + eps)."""
    lr = tl.load(scalars + 0)
    v0 = g + HYPER[1] * w
    v1 = s_0 + v0 * v0
    return w - divide(lr * v0, root(v1) + HYPER[0]), v1, s_1, s_2


@triton.jit
def rowwise_adagrad(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """Adagrad with one accumulator for each row."""
    lr = tl.load(scalars + 0)
    if (HYPER[2] == 0) & (HYPER[3] == 0) & (HYPER[1] == 0):
        v0 = s_0 + divide_by(row_sum(g * g, column, DIM), DIM)
        return w - divide(lr, root(v0) + HYPER[0]) * g, v0, s_1, s_2
    elif (HYPER[2] == 0) & (HYPER[3] == 0) & (HYPER[1] != 0):
        v0 = g + HYPER[1] * w
        v1 = s_0 + divide_by(row_sum(v0 * v0, column, DIM), DIM)
        return w - divide(lr, root(v1) + HYPER[0]) * v0, v1, s_1, s_2
    elif (HYPER[2] == 0) & (HYPER[3] != 0):
        v0 = g + HYPER[1] * w
        v1 = s_0 + divide_by(row_sum(v0 * v0, column, DIM), DIM)
        v2 = w - divide(lr, root(v1) + HYPER[0]) * v0
        v3 = root(row_sum(v2 * v2, column, DIM))
        v4 = v3 > HYPER[3]
        v5 = tl.where(v4, divide(HYPER[3], tl.where(v4, v3, 1)), 1)
        return v2 * v5, v1, s_1, s_2
    elif (HYPER[2] == 1) & (HYPER[3] == 0):
        v0 = s_0 + divide_by(row_sum(g * g, column, DIM), DIM)
        v1 = (1 - lr * HYPER[1]) * w - divide(lr, root(v0) + HYPER[0]) * g
        return v1, v0, s_1, s_2
    else:  # (HYPER[2] == 1) & (HYPER[3] != 0)
        v0 = s_0 + divide_by(row_sum(g * g, column, DIM), DIM)
        v1 = (1 - lr * HYPER[1]) * w - divide(lr, root(v0) + HYPER[0]) * g
        v2 = root(row_sum(v1 * v1, column, DIM))
        v3 = v2 > HYPER[3]
        v4 = tl.where(v3, divide(HYPER[3], tl.where(v3, v2, 1)), 1)
        return v1 * v4, v0, s_1, s_2


@triton.jit
def rowwise_adagrad_counter(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """Row-wise Adagrad that decays a row the more, the more seldom it is seen."""
    lr, t = tl.load(scalars + 0), tl.load(scalars + 1)
    if (HYPER[3] == 0) & (HYPER[2] == 0):
        v0 = s_0 + divide_by(row_sum(g * g, column, DIM), DIM)
        v1 = divide(lr, root(v0) + HYPER[1])
        v2 = divide_by(-tl.where(s_2 == 0, 1, t - s_2), HYPER[0])
        v3 = 1 + s_1 * tl.exp2(v2)
        return (1 - v1 * (divide(HYPER[0], v3) * 0)) * w - v1 * g, v0, v3, tl.full(v3.shape, 0, v3.dtype) + t
    elif (HYPER[3] == 0) & (HYPER[2] != 0):
        v0 = g + HYPER[2] * w
        v1 = s_0 + divide_by(row_sum(v0 * v0, column, DIM), DIM)
        v2 = divide(lr, root(v1) + HYPER[1])
        v3 = divide_by(-tl.where(s_2 == 0, 1, t - s_2), HYPER[0])
        v4 = 1 + s_1 * tl.exp2(v3)
        v5 = (1 - v2 * (divide(HYPER[0], v4) * HYPER[2])) * w - v2 * g
        return v5, v1, v4, tl.full(v4.shape, 0, v4.dtype) + t
    else:  # HYPER[3] == 1
        v0 = divide_by(-tl.where(s_2 == 0, 1, t - s_2), HYPER[0])
        v1 = 1 + s_1 * tl.exp2(v0)
        v2 = s_0 + divide_by(row_sum(g * g, column, DIM), DIM)
        v3 = (1 - lr * (divide(HYPER[0], v1) * HYPER[2])) * w - divide(lr, root(v2) + HYPER[1]) * g
        return v3, v2, v1, tl.full(v1.shape, 0, v1.dtype) + t


@triton.jit
def rowwise_adagrad_cowclip(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """Row-wise Adagrad with a step clipped for each row, by how often it occurs and how long it is."""
    lr = tl.load(scalars + 0)
    if HYPER[4] == 0:
        v0 = g + HYPER[3] * w
        v1 = row_sum(v0 * v0, column, DIM)
        v2 = root(v1)
        v3 = tl.maximum(HYPER[0] * root(row_sum(w * w, column, DIM)), HYPER[1])
        v4 = repeats * v3
        v5 = v2 > v4
        v6 = tl.where(v5, divide(v4, tl.where(v5, v2, 1)), 1) * lr
        v7 = s_0 + divide_by(v1, DIM)
        return w - divide(v6, root(v7) + HYPER[2]) * v0, v7, s_1, s_2
    else:  # HYPER[4] == 1
        v0 = row_sum(g * g, column, DIM)
        v1 = root(v0)
        v2 = tl.maximum(HYPER[0] * root(row_sum(w * w, column, DIM)), HYPER[1])
        v3 = repeats * v2
        v4 = v1 > v3
        v5 = tl.where(v4, divide(v3, tl.where(v4, v1, 1)), 1) * lr
        v6 = s_0 + divide_by(v0, DIM)
        v7 = (1 - lr * HYPER[3]) * w - divide(v5, root(v6) + HYPER[2]) * g
        return v7, v6, s_1, s_2


@triton.jit
def rmsprop(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """g ← g + weight_decay · w;  v ← b2 · v + (1 - b2) · g²;  m ← momentum · m + g / (√v + eps);  w ← w - lr
    · m."""
    lr = tl.load(scalars + 0)
    if HYPER[2] == 0:
        v0 = g + HYPER[3] * w
        v1 = HYPER[0] * s_0 + (1 - HYPER[0]) * (v0 * v0)
        return w - lr * divide(v0, root(v1) + HYPER[1]), v1, s_1, s_2
    else:  # HYPER[2] != 0
        v0 = g + HYPER[3] * w
        v1 = HYPER[0] * s_0 + (1 - HYPER[0]) * (v0 * v0)
        v2 = HYPER[2] * s_1 + divide(v0, root(v1) + HYPER[1])
        return w - lr * v2, v1, v2, s_2


@triton.jit
def ftrl(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """Follow the regularised leader, proximal, for each coordinate."""
    lr = tl.load(scalars + 0)
    v0 = s_1 + g * g
    v1 = root(v0)
    v2 = s_0 + g - divide(v1 - root(s_1), lr) * w
    v3 = divide(-(v2 - sign(v2) * HYPER[1]), divide(HYPER[0] + v1, lr) + HYPER[2])
    return tl.where(tl.abs(v2) <= HYPER[1], 0, v3), v2, v0, s_2


@triton.jit
def adam(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """w ← w - lr · u, with g + weight_decay · w for g. Slots: mean and square, each f[R, D]."""
    lr, c0, c1 = tl.load(scalars + 0), tl.load(scalars + 2), tl.load(scalars + 3)
    v0 = g + HYPER[3] * w
    v1 = HYPER[0] * s_0 + (1 - HYPER[0]) * v0
    v2 = HYPER[1] * s_1 + (1 - HYPER[1]) * (v0 * v0)
    v3 = divide(divide(v1, c0), root(divide(v2, c1)) + HYPER[2])
    return w - lr * v3, v1, v2, s_2


@triton.jit
def adamw(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """w ← w - lr · (u + weight_decay · w). Slots: mean and square, each f[R, D]."""
    lr, c0, c1 = tl.load(scalars + 0), tl.load(scalars + 2), tl.load(scalars + 3)
    v0 = HYPER[0] * s_0 + (1 - HYPER[0]) * g
    v1 = HYPER[1] * s_1 + (1 - HYPER[1]) * (g * g)
    v2 = divide(divide(v0, c0), root(divide(v1, c1)) + HYPER[2])
    return w - lr * (v2 + HYPER[3] * w), v0, v1, s_2


@triton.jit
def partial_rowwise_adam(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """AdamW with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square
    f[R]."""
    lr, c0, c1 = tl.load(scalars + 0), tl.load(scalars + 2), tl.load(scalars + 3)
    v0 = HYPER[0] * s_0 + (1 - HYPER[0]) * g
    v1 = (1 - HYPER[1]) * divide_by(row_sum(g * g, column, DIM), DIM)
    v2 = HYPER[1] * s_1 + v1
    v3 = divide(divide(v0, c0), root(divide(v2, c1)) + HYPER[2])
    return w - lr * (v3 + HYPER[3] * w), v0, v2, s_2


@triton.jit
def lamb(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """r = u + weight_decay · w;  w ← w - lr · ‖w‖ / ‖r‖ · r. Slots: mean and square, each f[R, D]."""
    lr, c0, c1 = tl.load(scalars + 0), tl.load(scalars + 2), tl.load(scalars + 3)
    v0 = root(row_sum(w * w, column, DIM))
    v1 = HYPER[0] * s_0 + (1 - HYPER[0]) * g
    v2 = HYPER[1] * s_1 + (1 - HYPER[1]) * (g * g)
    v3 = divide(divide(v1, c0), root(divide(v2, c1)) + HYPER[2])
    v4 = v3 + HYPER[3] * w
    v5 = root(row_sum(v4 * v4, column, DIM))
    v6 = (v0 > 0) & (v5 > 0)
    v7 = lr * tl.where(v6, divide(v0, tl.where(v6, v5, 1)), 1)
    return w - v7 * v4, v1, v2, s_2


@triton.jit
def partial_rowwise_lamb(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    """LAMB with v ← b2 · v + (1 - b2) · mean(g²), one number for each row. Slots: mean f[R, D], square
    f[R]."""
    lr, c0, c1 = tl.load(scalars + 0), tl.load(scalars + 2), tl.load(scalars + 3)
    v0 = root(row_sum(w * w, column, DIM))
    v1 = HYPER[0] * s_0 + (1 - HYPER[0]) * g
    v2 = (1 - HYPER[1]) * divide_by(row_sum(g * g, column, DIM), DIM)
    v3 = HYPER[1] * s_1 + v2
    v4 = divide(divide(v1, c0), root(divide(v3, c1)) + HYPER[2])
    v5 = v4 + HYPER[3] * w
    v6 = root(row_sum(v5 * v5, column, DIM))
    v7 = (v0 > 0) & (v6 > 0)
    v8 = lr * tl.where(v7, divide(v0, tl.where(v7, v6, 1)), 1)
    return w - v8 * v5, v1, v3, s_2


@triton.jit
def apply_rule(
    w, g, s_0, s_1, s_2, repeats, scalars, column, RULE: tl.constexpr, HYPER: tl.constexpr, DIM: tl.constexpr,
):
    """The new row and slots; slots that the rule has not pass through."""
    if RULE == "sgd":
        return sgd(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "momentum":
        return momentum(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "lars_sgd":
        return lars_sgd(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "lion":
        return lion(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "adagrad":
        return adagrad(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "rowwise_adagrad":
        return rowwise_adagrad(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "rowwise_adagrad_counter":
        return rowwise_adagrad_counter(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "rowwise_adagrad_cowclip":
        return rowwise_adagrad_cowclip(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "rmsprop":
        return rmsprop(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "ftrl":
        return ftrl(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "adam":
        return adam(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "adamw":
        return adamw(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "partial_rowwise_adam":
        return partial_rowwise_adam(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "lamb":
        return lamb(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)
    elif RULE == "partial_rowwise_lamb":
        return partial_rowwise_lamb(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)

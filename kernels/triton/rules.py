"""The optimizers' rules on a tile of rows; each is the Python rule of funcrec.optim with the same name.

x is the summed gradient, w the row, both f[rows, columns]; slots are f[rows, columns] or f[rows, 1]; hyper are numbers
that are compiled in, computed with in f64 and rounded where they meet a tensor; lr, t and the bias corrections are
scalars of the tile's dtype. Columns behind the dim are masked out of every sum along a row.
"""

import triton
import triton.language as tl
from funcrec.kernels.triton.device import divide, plus, root

# name -> slots; a slot of partial_rowwise_* and rowwise_* has one number per row, which its tensor tells
NUM_SLOTS = {
    "sgd": 0, "momentum": 1, "lars_sgd": 1, "lion": 1, "adagrad": 1, "rowwise_adagrad": 1, "rowwise_adagrad_counter": 3,
    "rowwise_adagrad_cowclip": 1, "ftrl": 2, "adam": 2, "adamw": 2, "partial_rowwise_adam": 2, "lamb": 2,
    "partial_rowwise_lamb": 2, "rmsprop": 1,
}  # fmt: skip
# where b1 and b2 stand in hyper, for rules with bias corrections
MOMENTS = ("adam", "adamw", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb")


@triton.jit
def row_sum(x, column, DIM: tl.constexpr):
    """f[rows, 1]."""
    return tl.reduce(tl.where((column < DIM)[None, :], x, 0), 1, plus)[:, None]


@triton.jit
def row_mean(x, column, DIM: tl.constexpr):
    total = row_sum(x, column, DIM)
    return divide(total, tl.full(total.shape, DIM, total.dtype))


@triton.jit
def norm(x, column, DIM: tl.constexpr):
    return root(row_sum(x * x, column, DIM))


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def momentum(w, g, m, lr, HYPER: tl.constexpr):
    g = g + HYPER[1] * w
    m = HYPER[0] * m + g
    step = g + HYPER[0] * m if HYPER[2] != 0 else m
    return w - lr * step, m


@triton.jit
def lars_sgd(w, g, m, lr, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    row_norm, grad_norm = norm(w, column, DIM), norm(g, column, DIM)
    pull = grad_norm + HYPER[2] * row_norm
    used = (row_norm > 0) & (pull > 0)
    ratio = divide(HYPER[0] * row_norm, tl.where(used, pull, 1))
    m = HYPER[1] * m + lr * tl.where(used, ratio, 1) * (g + HYPER[2] * w)
    return w - m, m


@triton.jit
def lion(w, g, m, lr, HYPER: tl.constexpr):
    direction = sign(HYPER[0] * m + (1 - HYPER[0]) * g)
    return w - lr * (direction + HYPER[2] * w), HYPER[1] * m + (1 - HYPER[1]) * g


@triton.jit
def adagrad(w, g, total, lr, HYPER: tl.constexpr):
    g = g + HYPER[1] * w
    total = total + g * g
    return w - divide(lr * g, root(total) + HYPER[0]), total


@triton.jit
def rowwise_adagrad(w, g, total, lr, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    if HYPER[2] == 0:
        g = g + HYPER[1] * w
        kept = w
    else:
        kept = (1 - lr * HYPER[1]) * w
    total = total + row_mean(g * g, column, DIM)
    new = kept - divide(lr, root(total) + HYPER[0]) * g
    if HYPER[3] != 0:
        length = norm(new, column, DIM)
        too_long = length > HYPER[3]
        new = new * tl.where(too_long, divide(HYPER[3], tl.where(too_long, length, 1)), 1)
    return new, total


@triton.jit
def rowwise_adagrad_counter(w, g, total, counter, last, lr, t, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    passed = tl.where(last == 0, 1, t - last)
    counter = 1 + counter * tl.exp2(divide(-passed, tl.full(passed.shape, HYPER[0], passed.dtype)))
    penalty = divide(HYPER[0], counter) * HYPER[2]
    decayed = g + HYPER[2] * w if HYPER[3] == 0 else g
    total = total + row_mean(decayed * decayed, column, DIM)
    rate = divide(lr, root(total) + HYPER[1])
    kept = 1 - (rate if HYPER[3] == 0 else lr) * penalty
    return kept * w - rate * g, total, counter, tl.full(counter.shape, 0, counter.dtype) + t


@triton.jit
def rowwise_adagrad_cowclip(w, g, total, lr, repeats, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    if HYPER[4] == 0:
        g = g + HYPER[3] * w
        kept = w
    else:
        kept = (1 - lr * HYPER[3]) * w
    total = total + row_mean(g * g, column, DIM)
    threshold = repeats * tl.maximum(HYPER[0] * norm(w, column, DIM), HYPER[1])
    length = norm(g, column, DIM)
    clipped = length > threshold
    factor = tl.where(clipped, divide(threshold, tl.where(clipped, length, 1)), 1)
    return kept - divide(factor * lr, root(total) + HYPER[2]) * g, total


@triton.jit
def rmsprop(w, g, square, m, lr, HYPER: tl.constexpr):
    g = g + HYPER[3] * w
    square = HYPER[0] * square + (1 - HYPER[0]) * (g * g)
    step = divide(g, root(square) + HYPER[1])
    if HYPER[2] != 0:
        m = HYPER[2] * m + step
        step = m
    return w - lr * step, square, m


@triton.jit
def ftrl(w, g, z, total, lr, HYPER: tl.constexpr):
    before = root(total)
    total = total + g * g
    after = root(total)
    z = z + g - divide(after - before, lr) * w
    new = -divide(z - sign(z) * HYPER[1], divide(HYPER[0] + after, lr) + HYPER[2])
    return tl.where(tl.abs(z) <= HYPER[1], 0, new), z, total


@triton.jit
def direction(g, m, v, correct_1, correct_2, column, HYPER: tl.constexpr, BY_ROW: tl.constexpr, DIM: tl.constexpr):
    """(u, m, v) of the Adam family; BY_ROW: v is one number for each row, the running mean of mean(g²)."""
    square = row_mean(g * g, column, DIM) if BY_ROW else g * g
    m = HYPER[0] * m + (1 - HYPER[0]) * g
    v = HYPER[1] * v + (1 - HYPER[1]) * square
    deviation = root(divide(v, correct_2))
    return divide(divide(m, correct_1), deviation + HYPER[2]), m, v


@triton.jit
def lamb_step(w, u, lr, column, HYPER: tl.constexpr, DIM: tl.constexpr):
    u = u + HYPER[3] * w
    row_norm, length = norm(w, column, DIM), norm(u, column, DIM)
    used = (row_norm > 0) & (length > 0)
    return w - lr * tl.where(used, divide(row_norm, tl.where(used, length, 1)), 1) * u

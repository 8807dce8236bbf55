"""Distributions: tensors drawn by a key, which jit, vmap and shard_map treat as any other tensor.

    vmap(lambda k: uniform(k, shape))(split(key, n))[i] = uniform(split(key, n)[i], shape)

Inside `shard_map`, ranks that have one key draw the same numbers; fold_in(key, axis_index(name)) gives each its own.
"""

import operator
from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import (
    Form,
    Key,
    Problem,
    Shape,
    check,
    describe,
    device_problems,
    member_problems,
    plain,
    random,
    typed,
)

FLOATS = random.DIGITS


@typed
def uniform(
    key: Key, shape: Shape = (), *, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return f[shape], drawn uniformly from [low, high).

    Args:
      key: i64[]. shape: sizes. low, high: finite numbers, low < high.
      dtype: a float dtype. A number has as many random bits as the dtype has digits: 53, 24, 11 or 8.

    Example:
      >>> import funcrec as fr
      >>> x = fr.random.uniform(fr.key(0), (1000,), low=2.0, high=3.0)
      >>> bool((x >= 2).all() and (x < 3).all()), x.shape
      (True, torch.Size([1000]))
    """
    call = "funcrec.random.uniform"
    check(call, member_problems(key, "key"))
    check(call, float_problems(dtype))
    check(call, bound_problems(low, high, dtype))
    unit = random.uniform(key, tuple(shape), dtype=dtype)
    if (low, high) == (0.0, 1.0):
        return unit
    least, most = ends_of(low, high, dtype)  # rounding could leave the range
    return (low + (high - low) * unit.to(torch.float64)).to(dtype).clamp(least, most)


def ends_of(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the least number of the dtype from `low` on, and the greatest below `high`."""
    least, most = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
    if float(least) < low:
        least = torch.nextafter(least, torch.full_like(least, torch.inf))
    if float(most) >= high:
        most = torch.nextafter(most, torch.full_like(most, -torch.inf))
    return float(least), float(most)


@typed
def normal(key: Key, shape: Shape = (), *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return f[shape], drawn from the normal distribution with mean 0 and variance 1.

    Args:
      key: i64[]. shape: sizes. dtype: f32 or f64; floats of 16 bits are drawn as f32 and rounded.

    Example:
      >>> import funcrec as fr
      >>> x = fr.random.normal(fr.key(0), (100_000,))
      >>> bool(x.mean().abs() < 0.02), bool((x.std() - 1).abs() < 0.02)
      (True, True)
    """
    check("funcrec.random.normal", member_problems(key, "key"))
    check("funcrec.random.normal", float_problems(dtype))
    drawn = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return random.normal(key, tuple(shape), dtype=drawn).to(dtype)


@typed
def bernoulli(key: Key, p: float | Annotated[Tensor, Form("f[...]")] = 0.5, shape: Shape | None = None) -> Tensor:
    """Return bool[shape]: True with probability p.

    Args:
      key: i64[]. p: a number in [0, 1], or f[...], which is broadcast to `shape`. A p that is not in [0, 1] in a
        program, where it cannot be read, is True always or never.
      shape: sizes; None for the shape of p.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.random.bernoulli(fr.key(0), torch.tensor([0.0, 1.0, 1.0]))
      tensor([False,  True,  True])
    """
    call = "funcrec.random.bernoulli"
    check(call, member_problems(key, "key"))
    check(call, probability_problems(p))
    of_p = p.shape if isinstance(p, Tensor) else ()
    sizes = tuple(of_p if shape is None else shape)
    check(call, broadcast_problems(tuple(of_p), sizes))
    return random.uniform(key, sizes, dtype=torch.float64) < p


@typed
def randint(key: Key, shape: Shape, low: int, high: int, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return i[shape], drawn uniformly from [low, high).

    Args:
      key: i64[]. shape: sizes. low < high: integers of `dtype`, i32 or i64, at most 2⁵³ apart.

    Law: each integer has a probability of 1 / (high - low), up to 2⁻⁵³.

    Example:
      >>> import funcrec as fr
      >>> sorted(set(fr.random.randint(fr.key(0), (100,), 3, 6).tolist()))
      [3, 4, 5]
    """
    check("funcrec.random.randint", member_problems(key, "key"))
    check("funcrec.random.randint", integer_problems(low, high, dtype))
    unit = random.uniform(key, tuple(shape), dtype=torch.float64)
    return ((unit * (high - low)).floor().clamp(max=high - low - 1).to(torch.int64) + low).to(dtype)


@typed
def permutation(key: Key, x: int | Tensor) -> Tensor:
    """Return the numbers 0 ... x - 1, or the rows of a tensor [N, ...], in random order.

    All N! orders have the same probability, as long as N numbers of 64 bits hardly collide.

    Example:
      >>> import torch, funcrec as fr
      >>> order = fr.random.permutation(fr.key(0), 5)
      >>> order.sort().values, torch.equal(fr.random.permutation(fr.key(0), torch.arange(5)), order)
      (tensor([0, 1, 2, 3, 4]), True)
    """
    call = "funcrec.random.permutation"
    check(call, member_problems(key, "key"))
    check(call, row_problems(x))
    rows = x if isinstance(x, int) else x.shape[0]
    order = random.bits(key, (rows,)).argsort(stable=True)
    return order if isinstance(x, int) else x.index_select(0, order)


@typed
def categorical(key: Key, logits: Annotated[Tensor, Form("f[..., C]")]) -> Tensor:
    """Return i64[...], one of C classes with the probabilities softmax(logits), for each row of logits.

    key: i64[]. A class of logit -inf is never drawn, so a row needs another one. The draw is the argmax of logits plus
    Gumbel noise.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.random.categorical(fr.key(0), torch.tensor([[0.0, -torch.inf], [-torch.inf, 5.0]]))
      tensor([0, 1])
    """
    call = "funcrec.random.categorical"
    check(call, member_problems(key, "key"))
    check(call, device_problems(key=key, logits=logits), class_problems(logits))
    uniform = random.uniform(key, tuple(logits.shape), dtype=torch.float64)
    gumbel = -torch.log(-torch.log((uniform + 2.0**-54).clamp(max=1 - 2.0**-53)))
    return (logits.detach().double() + gumbel).argmax(-1)


# -- validators --------------------------------------------------------------------------------------------------


def float_problems(dtype: torch.dtype) -> Iterator[Problem]:
    if dtype not in FLOATS:
        yield Problem("`dtype` is not a float dtype.", f"{dtype}", "f64, f32, f16 or bf16", "torch.float32", TypeError)


def bound_problems(low: float, high: float, dtype: torch.dtype) -> Iterator[Problem]:
    ends = torch.finfo(dtype)
    if not (low < high and ends.min <= low and high <= ends.max and high - low < float("inf")):
        need = f"finite low < high of {dtype}"
        yield Problem("`low` and `high` are not the bounds of a range.", f"{low}, {high}", need)
    elif not operator.le(*ends_of(low, high, dtype)):
        yield Problem("`low` and `high` have no number between them.", f"{low}, {high}", f"a number of {dtype}")


def integer_problems(low: int, high: int, dtype: torch.dtype) -> Iterator[Problem]:
    if dtype not in (torch.int32, torch.int64):
        yield Problem("`dtype` is not i32 or i64.", f"{dtype}", "torch.int64", kind=TypeError)
        return
    info = torch.iinfo(dtype)
    if not info.min <= low < high <= info.max + 1 or high - low > 2**53:
        need = f"low < high of {dtype}, at most 2⁵³ apart"
        yield Problem("`low` and `high` are not the bounds of a range.", f"{low}, {high}", need)


def probability_problems(p: float | Tensor) -> Iterator[Problem]:
    value = plain(p) if isinstance(p, Tensor) else torch.tensor(float(p))
    if value is not None and not bool(((value >= 0) & (value <= 1)).all()):
        yield Problem("`p` is not a probability.", describe(p), "numbers in [0, 1]", "torch.sigmoid(logits)")


def broadcast_problems(of_p: tuple, shape: tuple) -> Iterator[Problem]:
    pairs = zip(reversed(of_p), reversed(shape), strict=False)
    if len(of_p) > len(shape) or any(a not in (1, b) for a, b in pairs):
        yield Problem("`p` cannot be broadcast to `shape`.", f"p of shape {list(of_p)}", f"shape {list(shape)}")


def row_problems(x: int | Tensor) -> Iterator[Problem]:
    if isinstance(x, Tensor) and not x.dim():
        yield Problem("`x` has no rows.", describe(x), "[N, ...], or an integer", "int(x)", TypeError)
    elif isinstance(x, int) and (isinstance(x, bool) or x < 0):
        yield Problem("`x` is not a number of rows.", describe(x), "an integer >= 0, or a tensor [N, ...]")


def class_problems(logits: Tensor) -> Iterator[Problem]:
    if not logits.dim() or not logits.shape[-1]:
        yield Problem("`logits` has no classes.", describe(logits), "f[..., C] with C >= 1")
        return
    value = plain(logits)
    if value is not None and not bool((~value.isnan().any(-1) & (value.amax(-1) > -torch.inf)).all()):
        yield Problem("`logits` has a row without a distribution.", "NaN, or -inf alone", "a logit above -inf, no NaN")

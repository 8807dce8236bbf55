"""Random numbers as pure functions of an explicit key.

    bits(key)[i] = mix(key + (i + 1) * GAMMA)        SplitMix64, counter-based

A key is an i64 scalar tensor and a leaf of trees. So compiled steps, checkpoints and vmap take keys. The same key gives
the same numbers on every device, on every mesh and with every number of threads.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), fig. 17 for the constants.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from funcrec.core._errors import check, describe, fail
from funcrec.core._levels import member_problems
from funcrec.core._ranges import Key, Size
from funcrec.core._typed import typed

Draw = Callable[[Tensor, tuple[int, ...]], Tensor]

GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as i64
GAMMA_INVERSE = -1018231460777725123  # GAMMA · GAMMA_INVERSE = 1 mod 2⁶⁴
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
LAST_SHIFT = 31
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@typed
def key(seed: int) -> Tensor:
    """Make a key from a seed -> i64[].

    Example:
      >>> import funcrec as fr
      >>> a, b = fr.split(fr.key(0), 2)
      >>> bool(a == b)
      False
    """
    return mix(torch.tensor(wrap(seed), dtype=torch.int64) + GAMMA)


def wrap(n: int) -> int:
    """Return n modulo 2⁶⁴, in i64's range."""
    return (n + 2**63) % 2**64 - 2**63


@typed
def split(key: Key, num: Size = 2) -> Tensor:
    """Make `num` independent keys from one key -> i64[num]. The result can be unpacked, as in the example.

    Example:
      >>> import funcrec as fr
      >>> for_tables, for_dense = fr.split(fr.key(0))
      >>> for_tables.shape, bool(for_tables == for_dense)
      (torch.Size([]), False)
    """
    check("funcrec.split", member_problems(key, "key"))
    return bits(mix(~key), (num,))


@typed
def fold_in(key: Key, data: int | Tensor) -> Tensor:
    """Make a key from a key i64[] and an integer (a step, a rank, a table's number) -> i64[].

    Example:
      >>> import torch, funcrec as fr
      >>> bool(fr.fold_in(fr.key(0), 7) == fr.fold_in(fr.key(0), torch.tensor(7)))
      True
    """
    check("funcrec.fold_in", member_problems(key, "key"))
    if isinstance(data, Tensor) and (data.is_floating_point() or data.is_complex() or data.dtype == torch.bool):
        need, hint = "an int, or an integer tensor", "data=step, or data=7"
        fail("funcrec.fold_in", "`data` is not an integer.", got=describe(data), need=need, hint=hint, kind=TypeError)
    step = GAMMA * (data.to(torch.int64) + 1) if isinstance(data, Tensor) else wrap(GAMMA * (data + 1))
    return mix(mix(key) + step)


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of z, a bijection of i64."""
    for shift, factor in MIX:
        z = (z ^ shift_right(z, shift)) * factor
    return z ^ shift_right(z, LAST_SHIFT)


def shift_right(z: Tensor, by: int) -> Tensor:
    """Return i64 numbers shifted to the right, with zeros inserted from the left."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def bits(key: Tensor, shape: tuple[int, ...], *, start: int | Tensor = 0) -> Tensor:
    """Return the numbers start, start + 1, ... of the key's sequence, i64[shape].

    With start i64[M] and shape (M, D), row i has the numbers start[i], start[i] + 1, ...
    """
    each = isinstance(start, Tensor)
    first, count = (0, shape[1]) if each else (start, math.prod(shape))
    counter = torch.arange(first + 1, first + count + 1, device=key.device, dtype=torch.int64)
    if each:
        counter = start[:, None] + counter
    # = key + counter · GAMMA. The sum comes first: outside fr.jit, torch.compile folds arange · GAMMA without wrapping.
    return mix((counter + key * GAMMA_INVERSE) * GAMMA).reshape(shape)


def uniform(
    key: Tensor, shape: tuple[int, ...], *, start: int | Tensor = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return f[shape], drawn uniformly from [0, 1). f32 has 24 random bits and f64 has 53."""
    digits = DIGITS[dtype]
    return shift_right(bits(key, shape, start=start), 64 - digits).to(dtype) * 2.0**-digits


def normal(
    key: Tensor, shape: tuple[int, ...], *, start: int | Tensor = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return f[shape], drawn from the normal distribution with mean 0 and variance 1.

    Each number is the inverse of the distribution's integral at the midpoint of a cell.
    """
    digits = 52 if dtype == torch.float64 else 24  # With 53, the midpoint of the last cell would round to 1.
    u = shift_right(bits(key, shape, start=start), 64 - digits).to(torch.float64)
    return (math.sqrt(2) * torch.erfinv((u + 0.5) * 2.0 ** (1 - digits) - 1)).to(dtype)


def check_key(call: str, key: object) -> Tensor:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.dim() != 0:
        fail(call, "`key` is not a key.", got=describe(key), need="i64[], from funcrec.key(seed)", kind=TypeError)
    check(call, member_problems(key, "key"))
    return key

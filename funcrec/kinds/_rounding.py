"""Rows of floats, rounded to the values that codes can hold: by the range of each row, or by a learned scale.

    x̂ = s · clip(round(x / s), -n, p)        n = 2^(bits - 1), p = n - 1

Shapes: N gathered rows, R rows of a table, D dim.

Source: see `_fake_quantized`.
"""

import math
from typing import NoReturn

import torch
from torch import Tensor

from funcrec.core import GAMMA, fail, one_level_below, sure
from funcrec.kernels import ops
from funcrec.kernels.reference_quantized import packed
from funcrec.kinds._codes import CODES, FLOATS
from funcrec.kinds._quantized import table_key

LEAST_SCALE = 2.0**-14  # the least normal number of f16
# The largest number of f16. f16 also holds its quotients by powers of two.
MOST_BIAS = 65504.0


def as_stored(x: Tensor, dtype: str, *keys: Tensor) -> Tensor:
    """Return rows f[N, D] rounded to what a dtype stores. Gradients go straight through. keys: from `row_keys`."""
    return x if dtype == "float32" else StraightThrough.apply(dtype, x, *(keys if dtype in CODES else ()))


def row_keys(key: Tensor | None, table: str, rows: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return (keys i64[N],), or () without a key. With them, rows in a copy are rounded as `quantize` rounds them in
    the table."""
    return () if key is None else (sure(table_key(key, table)) + rows.long() * -(-dim // 4) * GAMMA,)


class StraightThrough(torch.autograd.Function):
    """A function that rounds rows [N, D] to what a dtype stores. Every derivative is that of the identity."""

    @staticmethod
    def forward(dtype, x, *keys):
        if dtype not in CODES:
            return x.to(FLOATS[dtype]).to(x.dtype)
        # Only the reference implementation accepts a key for each row.
        made = ops.quantize_rows(x, CODES[dtype], *keys, implementation="reference" if keys else None)
        every = torch.arange(x.shape[0], device=x.device)
        return ops.quantized_rows(made, every, CODES[dtype], x.shape[1]).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.num_keys = len(inputs) - 2

    @staticmethod
    def backward(ctx, d):
        return None, d, *[None] * ctx.num_keys

    @staticmethod
    def jvp(ctx, _, tangent, *keys):
        return one_level_below(lambda _, tangents: tangents[0].clone(), (), (tangent,))

    @staticmethod
    def vmap(info, in_dims, dtype, x, *keys):
        k = info.batch_size
        whole = lambda t, d: (t.movedim(d, 0) if d is not None else t.expand(k, *t.shape)).flatten(0, 1)
        out = StraightThrough.apply(dtype, *map(whole, (x, *keys), in_dims[1:]))
        return out.unflatten(0, (k, -1)), 0


# -- learned scales --------------------------------------------------------------------------------------------------


def first_scales(t: Tensor, bits: int) -> Tensor:
    """Return the first scale of each row, 2 · mean|x| / √p, f[R, 1]."""
    wide = t.to(ops.accumulation_dtype(t.dtype))
    return (2 * wide.abs().mean(1, keepdim=True) / math.sqrt(2 ** (bits - 1) - 1)).clamp(min=LEAST_SCALE)


def by_scale(x: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x̂ f[N, D], its derivative by the scale, its derivative by x). scales: f[N, 1].

    Scales are rounded to f16, as in rows of codes. If a number of a row or its scale is NaN or inf, the row is NaN."""
    least, most, s = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, half_scales(scales, bits).to(x.dtype)
    place = x / s
    is_whole = x.isfinite().all(1, keepdim=True) & scales.isfinite()
    code = torch.where(is_whole, place.round().clamp(least, most), torch.nan)
    inside = (place > least) & (place < most)
    return code * s, torch.where(inside, code - place, code), inside.to(x.dtype)


def half_scales(scales: Tensor, bits: int) -> Tensor:
    """Return scales in f16, the dtype in rows of codes. They are small enough that f16 also holds -s · 2^(bits - 1)."""
    return scales.clamp(LEAST_SCALE, MOST_BIAS / 2 ** (bits - 1)).to(torch.float16)


def learned_codes(t: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the rows u8[R, S] of codes by learned scales. The bias is the value of the least code."""
    s, least = half_scales(scales, bits), 2 ** (bits - 1)
    read = by_scale(t.to(torch.float32), scales, bits)[0]
    lost = read.isnan().any(1, keepdim=True)
    codes = torch.where(lost, 0, (read / s.to(torch.float32)).round() + least)
    head = torch.where(lost, torch.nan, torch.cat([s, s * -least], 1))
    return torch.cat([head.view(torch.uint8), packed(codes.to(torch.int32), bits)], 1)


class ByScale(torch.autograd.Function):
    """Rows x̂ of `by_scale`. Differentiating them raises. Transforms that do not differentiate them are allowed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table, bits, x, scales):
        return by_scale(x, scales, bits)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.table = inputs[0]

    @staticmethod
    def backward(ctx, d):
        refuse_learned(ctx.table)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_learned(ctx.table)


def refuse_learned(table: str) -> NoReturn:
    fail(
        "funcrec.lookup", f"table {table!r} and its learned scales have gradients by rows only.",
        got="a table that torch.func or autograd follows", need="gradients by `fr.value_and_grad`",
        hint='scales="row", whose lookups have every derivative', kind=TypeError,
    )  # fmt: skip

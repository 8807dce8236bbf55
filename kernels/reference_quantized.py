"""Quantised rows u8[R, S] in plain torch. A row is [scale f16][bias f16][codes of 8, 4 or 2 bits, low bits first].

    x ~ code * scale + bias        codes 0 .. L, L = 2^bits - 1

bias is the row's least number, and scale is the row's range divided by L. Both are rounded to f16 before codes are
computed. A product code * scale is exact in f32. So a value is rounded once, with or without a fused multiply-add. A
row that holds NaN or inf, or whose bias or scale f16 does not hold, is NaN in all columns.
Shapes: N ids, R rows, D dim, S bytes.
"""

import torch
from funcrec.kernels.forms import HEAD_BYTES, check_coded
from torch import Tensor

GAMMA, GAMMA_INVERSE = -7046029254386353131, -1018231460777725123  # SplitMix64's step, and its inverse modulo 2^64
MIX = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
NAN = 0x7E00  # the bits of an f16 NaN


def quantized_rows(table: Tensor, rows: Tensor, bits: int, dim: int) -> Tensor:
    """Return the numbers that the rows encode, f32[N, D], with zeros for rows outside [0, R)."""
    check_coded("quantized_rows", table, bits, dim)
    if table.shape[0] == 0:
        return torch.zeros(rows.shape[0], dim, device=table.device)
    inside = (rows >= 0) & (rows.long() < table.shape[0])
    taken = table.index_select(0, rows.clamp(0, table.shape[0] - 1))
    # Without `flatten`, a single row would keep the stride of the whole row.
    head = taken[:, :HEAD_BYTES].flatten().view(torch.float16).unflatten(0, (-1, 2)).to(torch.float32)
    return torch.where(inside[:, None], codes_of(taken, bits, dim) * head[:, :1] + head[:, 1:], 0)


def codes_of(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Return the codes of u8[N, S] as f32[N, D]."""
    shifts = torch.arange(0, 8, bits, device=rows.device, dtype=torch.int32)
    parts = (rows[:, HEAD_BYTES:, None].to(torch.int32) >> shifts) & (2**bits - 1)
    return parts.flatten(1)[:, :dim].to(torch.float32)


def quantize_rows(table: Tensor, bits: int, key: Tensor | None = None) -> Tensor:
    """Return the quantised rows of a table, u8[R, S].

    With a key, codes are rounded at random, and scale and bias outwards, so that no number is cut off.
    """
    most = 2**bits - 1
    x = table.to(torch.float32)
    low, high = (x.amin(1), x.amax(1)) if x.shape[1] else (x.new_zeros(x.shape[0]),) * 2
    low = torch.where(low == 0, 0, low)  # amin may return -0 or +0; this gives +0 for both
    bias = _to_half(low, down=True, directed=key is not None)
    reach = high - bias.to(torch.float32)  # divided by a tensor: torch multiplies by 1 / number on CUDA
    scale = _to_half(reach / torch.full_like(reach, most), down=False, directed=key is not None)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # All numbers of such a row equal the bias.
    lost = ~(bias.isfinite() & scale.isfinite() & low.isfinite() & high.isfinite())
    place = x - bias.to(torch.float32)[:, None]
    if key is None:
        codes = (place * (1 / scale.to(torch.float32))[:, None]).round()
    else:
        codes = _at_random(place / scale.to(torch.float32)[:, None], key)
    codes = torch.where(lost[:, None], 0, codes.clamp(0, most)).to(torch.int32)
    head = torch.where(lost[:, None], torch.nan, torch.stack([scale, bias], 1))
    return torch.cat([head.view(torch.uint8), packed(codes, bits)], 1)


def _to_half(x: Tensor, *, down: bool, directed: bool) -> Tensor:
    """Return x in f16: the nearest number, or with `directed` the next number below or above x.

    If the nearest number is inf, the result is inf.
    """
    near = x.to(torch.float16)
    if not directed:
        return near
    wide, bits = near.to(torch.float32), near.view(torch.int16)
    away = bits + torch.where(wide.signbit() == down, 1, -1).to(torch.int16)
    beyond = wide > x if down else wide < x
    return torch.where(beyond & wide.isfinite(), away, bits).view(torch.float16)


def _at_random(x: Tensor, key: Tensor) -> Tensor:
    """Return x rounded up with a probability equal to its fraction, else rounded down.

    The element in row r and column c uses 16 bits of a random word, from bit 16 · (c mod 4) on. The word is number
    r · ceil(D / 4) + c // 4 of the key, or number c // 4 of key[r].
    """
    num_rows, dim = x.shape
    words = -(-dim // 4)
    counter = torch.arange(1, num_rows * words + 1, device=x.device, dtype=torch.int64).view(num_rows, words)
    if key.dim():  # With one key per row, each row uses the first words of its own key.
        counter = counter[:1] + torch.zeros_like(counter)
        key = key[:, None]
    z = mix((counter + key * GAMMA_INVERSE) * GAMMA)  # of key + counter · GAMMA, in an order that compilers keep
    parts = (z[:, :, None] >> torch.arange(0, 64, 16, device=x.device)) & 0xFFFF
    drawn = (parts.reshape(num_rows, words * 4)[:, :dim].to(torch.float32) + 0.5) / 65536
    return x.floor() + (drawn < x - x.floor())


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of z, a bijection of i64."""
    for shift, factor in MIX:
        z = (z ^ shift_right(z, shift)) * factor
    return z


def shift_right(z: Tensor, by: int) -> Tensor:
    """Return i64 numbers shifted to the right, with zeros inserted from the left."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes packed into u8[R, ceil(D · bits / 8)], low bits first, with zeros after the last code."""
    each = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).unflatten(1, (-(-codes.shape[1] // each), each))
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.int32)
    return (codes << shifts).sum(2).to(torch.uint8)

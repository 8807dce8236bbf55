"""Average pools and padding, with their transposes, as sums over windows of each dim in turn.

    out[o] = Σ x[i],  first(o) ≤ i ≤ last(o)

The windows follow the shape of one example, so the order of a sum does, too. A transpose is again a sum over windows:
those of the outputs that read an input.
Shapes: B examples, C channels; I inputs and O outputs along a dim.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.invariance import _sums

aten = torch.ops.aten


class Windows(NamedTuple):
    """Windows along one dim. first, last: i64[O], the least and the greatest place. most: the most places of one."""

    first: Tensor
    last: Tensor
    most: int


class Pool(NamedTuple):
    """How windows of an average pool lie along one dim."""

    kernel: int
    stride: int
    padding: int
    inputs: int
    outputs: int


def summed(x: Tensor, windows: Sequence[Windows]) -> Tensor:
    """Return the sums over the windows of the last dims. A place outside of x adds 0."""
    for dim, (first, last, most) in enumerate(windows, x.dim() - len(windows)):
        places = first[:, None] + torch.arange(most, device=x.device)
        is_inside = (places >= 0) & (places <= last[:, None]) & (places < x.shape[dim])
        places = torch.where(is_inside, places, x.shape[dim])
        zero = x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
        parts = torch.cat([x, zero], dim).index_select(dim, places.flatten())
        x = _sums.sum_of(parts.unflatten(dim, places.shape), [dim + 1])
    return x


def fixed(pool: Pool, device: Any) -> Windows:
    """Return windows of one size."""
    first = torch.arange(pool.outputs, device=device) * pool.stride - pool.padding
    return Windows(first, first + pool.kernel - 1, pool.kernel)


def fixed_transpose(pool: Pool, device: Any) -> Windows:
    """Return for each input the outputs whose windows have it."""
    place = torch.arange(pool.inputs, device=device) + pool.padding
    first = torch.div(place - pool.kernel + pool.stride, pool.stride, rounding_mode="floor")
    last = torch.div(place, pool.stride, rounding_mode="floor")
    return Windows(first, last, -(-pool.kernel // pool.stride))


def adaptive(inputs: int, outputs: int, device: Any) -> Windows:
    """Return windows that cut a dim into parts. Their transposes are those of `inputs` and `outputs` exchanged."""
    place = torch.arange(outputs, device=device)
    last = torch.div((place + 1) * inputs - 1, outputs, rounding_mode="floor")
    most = -(-inputs // outputs) + (1 if inputs % outputs else 0)
    return Windows(torch.div(place * inputs, outputs, rounding_mode="floor"), last, most)


def repeated_transpose(inputs: int, before: int, after: int, device: Any) -> Windows:
    """Return for each input the places of its copies, where the first and the last input are repeated."""
    place = torch.arange(inputs, device=device)
    first = torch.where(place == 0, 0, place + before)
    last = torch.where(place == inputs - 1, inputs + before + after - 1, place + before)
    return Windows(first, last, 1 + max(before, 0) + max(after, 0))


def counts(pool: Pool, includes_padding: bool, device: Any) -> Tensor:
    """Return the number of places that each window has, i64[O], at least 1."""
    first, end = torch.arange(pool.outputs, device=device) * pool.stride - pool.padding, pool.inputs
    if not includes_padding:
        return (torch.clamp(first + pool.kernel, max=end) - torch.clamp(first, min=0)).clamp(min=1)
    return torch.clamp(first + pool.kernel, max=end + pool.padding) - first


def divisors(per_dim: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the product of the counts of each dim, as floats of x."""
    out = torch.ones((), dtype=torch.int64, device=x.device)
    for count in per_dim:
        out = out.unsqueeze(-1) * count
    return out.to(x.dtype)


def divided(x: Tensor, pools: Sequence[Pool], includes_padding: bool, divisor: int | None) -> Tensor:
    """Return the sums of windows, or what is shared among their places, divided by their counts or by one number."""
    return x / (divisor or divisors([counts(pool, includes_padding, x.device) for pool in pools], x))


def pools_of(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> list[Pool] | None:
    """Return the pools of the last dims, or None if torch has an error for them."""
    n = len(kernel)
    if x.dim() not in (n + 1, n + 2):
        return None
    found = []
    for k, s, p, size in zip(kernel, stride or kernel, padding, x.shape[-n:], strict=True):
        if s < 1 or p < 0 or 2 * p > k:
            return None
        outputs = (size + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        outputs -= 1 if ceil and (outputs - 1) * s >= size + p else 0  # no window begins in the padding at the end
        if outputs < 1 or size < 1:
            return None
        found.append(Pool(k, s, p, size, outputs))
    return found


def avg_pool(dims: int) -> Callable[..., Any]:
    """Return torch's average pool of one to three dims."""
    torchs = getattr(aten, f"avg_pool{dims}d").default

    def run(
        x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Any = 0, ceil: bool = False,
        includes_padding: bool = True, divisor: int | None = None,
    ) -> Tensor:  # fmt: skip
        kernel, stride, padding = (spread(a, dims) for a in (kernel, stride, padding))
        pools = pools_of(x, kernel, stride, padding, ceil)
        if pools is None or divisor == 0 or not x.is_floating_point():
            return torchs(x, kernel, stride, padding, ceil, includes_padding, divisor)
        wide = summed(_sums.wide(x), [fixed(pool, x.device) for pool in pools])
        return divided(wide, pools, includes_padding, divisor).to(x.dtype)

    return run


def spread(value: Any, dims: int) -> list[int]:
    """Return a number of each dim, from one for all, or none."""
    value = [value] if isinstance(value, int) else list(value)
    return value * dims if len(value) == 1 else value


def avg_pool_transpose(
    d: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool,
    includes_padding: bool, divisor: int | None,
) -> Any:  # fmt: skip
    """Return the cotangents of inputs: each has its share of the windows that have it."""
    kernel, stride, padding = (spread(a, len(kernel)) for a in (kernel, stride, padding))
    pools = pools_of(x, kernel, stride, padding, ceil)
    if pools is None:
        return NotImplemented
    shares = divided(_sums.wide(d), pools, includes_padding, divisor)
    return summed(shares, [fixed_transpose(pool, d.device) for pool in pools]).to(d.dtype)


def adaptive_avg_pool(x: Tensor, outputs: Sequence[int]) -> Tensor:
    """Return the means of the parts into which the last dims are cut."""
    if x.dim() not in (len(outputs) + 1, len(outputs) + 2) or not math.prod(outputs) * math.prod(x.shape[1:]):
        return getattr(aten, f"_adaptive_avg_pool{len(outputs)}d").default(x, outputs)
    windows = [adaptive(i, o, x.device) for i, o in zip(x.shape[-len(outputs) :], outputs, strict=True)]
    wide = summed(_sums.wide(x), windows)
    return (wide / divisors([w.last - w.first + 1 for w in windows], wide)).to(x.dtype)


def adaptive_avg_pool_transpose(dims: int) -> Callable[..., Tensor]:
    def run(d: Tensor, x: Tensor) -> Tensor:
        if not math.prod(d.shape[1:]):
            return torch.zeros_like(x)
        sizes, wide = list(zip(x.shape[-dims:], d.shape[-dims:], strict=True)), _sums.wide(d)
        by = divisors([w.last - w.first + 1 for w in (adaptive(i, o, d.device) for i, o in sizes)], wide)
        return summed(wide / by, [adaptive(o, i, d.device) for i, o in sizes]).to(d.dtype)

    return run


def replication_pad_transpose(d: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Return the cotangents of inputs whose first and last ones were repeated: `padding` begins with the last dim."""
    dims = len(padding) // 2
    pads = [(padding[2 * k], padding[2 * k + 1]) for k in reversed(range(dims))]
    sizes = zip(x.shape[-dims:], pads, strict=True)
    windows = [repeated_transpose(n, before, after, d.device) for n, (before, after) in sizes]
    return summed(_sums.wide(d), windows).to(d.dtype)


REPLACED: dict[Any, Callable] = {
    **{getattr(aten, f"avg_pool{n}d").default: avg_pool(n) for n in (2, 3)},
    **{getattr(aten, f"avg_pool{n}d_backward").default: avg_pool_transpose for n in (2, 3)},
    **{getattr(aten, f"_adaptive_avg_pool{n}d").default: adaptive_avg_pool for n in (2, 3)},
    **{getattr(aten, f"_adaptive_avg_pool{n}d_backward").default: adaptive_avg_pool_transpose(n) for n in (2, 3)},
    **{getattr(aten, f"replication_pad{n}d_backward").default: replication_pad_transpose for n in (1, 2, 3)},
}

"""Attention within bags in plain torch, and its transpose, which is the vjp of these lines.

    s_ij = scale · ⟨q_i, k_j⟩ + position_bias[|i' - j'|] + time_bias[bucket(|t_i - t_j|)]        if i sees j
    out_i = Σ_j w_ij v_j          w_ij = e^s_ij / Σ_l e^s_il, or silu(s_ij) / normalizer

The scores are a dense matrix with a mask: one of each bag, padded to the longest bag, if the lengths can be read; else
one of the whole buffer.
Shapes: B bags, N queries, M keys, H heads, D dim of queries and keys, V dim of values, P distances, T buckets of time;
G matrices (B, or 1) of n queries and m keys.
"""

from typing import Any, NamedTuple

import torch
from funcrec.kernels.forms import accumulation_dtype, time_bounds
from funcrec.kernels.reference_jagged import ascending, from_padded, place_among, to_padded
from funcrec.kernels.tracked import is_concrete
from torch import Tensor


def jagged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    num_targets: Tensor | None,
    scale: float,
    normalizer: float,
    softmax: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(queries.dtype)
    of_queries, of_keys = _layouts(offsets, queries.shape[0], key_offsets, keys.shape[0])
    q, k, v = of_queries.take(queries.to(wide)), of_keys.take(keys.to(wide)), of_keys.take(values.to(wide))
    sees, distance = _pairs(of_queries, of_keys, num_targets, causal)
    s = torch.einsum("gnhd,gmhd->ghnm", q * scale, k)
    if position_bias is not None:
        s = s + _picked(position_bias.to(wide), distance.clamp(max=position_bias.shape[1] - 1))
    if time_bias is not None:
        assert query_times is not None and key_times is not None  # they come with the bias
        apart = of_queries.take(query_times.double())[:, :, None] - of_keys.take(key_times.double())[:, None, :]
        s = s + _picked(time_bias.to(wide), place_among(time_bounds(time_bias), apart.abs().float()))
    weights, total, logs = _softmax(s, sees[:, None]) if softmax else _silu(s, sees[:, None], normalizer)
    out = torch.einsum("ghnm,gmhv->gnhv", weights, v)
    out = of_queries.put(out if total is None else out / total)
    return out.to(queries.dtype), of_queries.put(logs) if softmax else logs


def jagged_attention_transpose(
    d_out: Tensor, out: Tensor | None, logs: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the cotangents of queries, keys, values, position_bias and time_bias, [0, 0] for a bias that is None.

    `out` and `logs`, which other implementations read, are computed once more, so that derivatives pass through them.
    """
    offsets, key_offsets, *biases = rest[:4]
    given = [x for x in biases if x is not None]

    def outputs(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        left = iter(given)
        own: list[Any] = [None if x is None else next(left) for x in biases]
        return jagged_attention(q, k, v, offsets, key_offsets, *own, *rest[4:])[0]

    d = iter(torch.func.vjp(outputs, queries, keys, values, *given)[1](d_out))
    return next(d), next(d), next(d), *(queries.new_empty((0, 0)) if x is None else next(d) for x in biases)


# -- layouts -------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The matrices of a buffer's bags.

    bounds: i64[B + 1]. size: the buffer's capacity. length: that of the padded bags, or None for the buffer as it is.
    bag: i64[G, n], B outside of all bags. place: that of each position in its bag, i64[G, n].
    """

    bounds: Tensor
    size: int
    length: int | None
    bag: Tensor
    place: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Return x [size, ...] as [G, n, ...], with zeros outside of all bags."""
        if self.length is not None:
            return to_padded(x, self.bounds, self.length, 0)
        inside = (self.bag < self.bounds.shape[0] - 1).view(1, -1, *[1] * (x.dim() - 1))
        return torch.where(inside, x[None], torch.zeros((), dtype=x.dtype, device=x.device))

    def put(self, x: Tensor) -> Tensor:
        """Return x [G, n, ...] as [size, ...], with zeros outside of all bags."""
        return self.take(x[0])[0] if self.length is None else from_padded(x, self.bounds, self.size)

    def of_bags(self, x: Tensor) -> Tensor:
        """Return x i64[B] of the bag of each position, i64[G, n], 0 outside of all bags."""
        return torch.cat([x, x.new_zeros(1)]).index_select(0, self.bag.flatten()).view(self.bag.shape)


def _layouts(offsets: Tensor, num_queries: int, key_offsets: Tensor, num_keys: int) -> tuple[_Layout, _Layout]:
    sizes = num_queries, num_keys
    bounds = [ascending(x).clamp(0, n).long() for x, n in zip((offsets, key_offsets), sizes, strict=True)]
    make = _padded if is_concrete(offsets) and is_concrete(key_offsets) else _whole
    return make(bounds[0], sizes[0]), make(bounds[1], sizes[1])


def _padded(bounds: Tensor, size: int) -> _Layout:
    lengths, num_bags = bounds.diff(), bounds.shape[0] - 1
    length = int(lengths.max()) if num_bags else 0
    place = torch.arange(length, device=bounds.device).expand(num_bags, length)
    bag = torch.where(place < lengths[:, None], torch.arange(num_bags, device=bounds.device)[:, None], num_bags)
    return _Layout(bounds, size, length, bag, place)


def _whole(bounds: Tensor, size: int) -> _Layout:
    place, num_bags = torch.arange(size, device=bounds.device), bounds.shape[0] - 1
    bag = place_among(bounds, place) - 1
    bag = torch.where(bag < 0, num_bags, bag)
    begin = torch.cat([bounds[:-1], bounds.new_zeros(1)]).index_select(0, bag)
    return _Layout(bounds, size, None, bag[None], (place - begin)[None])


# -- pairs ---------------------------------------------------------------------------------------------------------


def _pairs(query: _Layout, key: _Layout, num_targets: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Return whether a query sees a key, b[G, n, m], and the distance of their positions, i64[G, n, m].

    The last query and the last key of a bag have the same position. A target sees the history and itself; its position
    is the first after the history.
    """
    lengths = key.bounds.diff()
    position = (query.place + query.of_bags(lengths - query.bounds.diff()))[:, :, None]
    column, num_bags = key.place[:, None, :], lengths.shape[0]
    sees = (query.bag[:, :, None] == key.bag[:, None, :]) & (query.bag < num_bags)[:, :, None]
    if causal:
        sees = sees & (column <= position)
    if num_targets is not None:
        history = lengths - torch.minimum(num_targets.long().clamp(min=0), lengths)
        sees = sees & ((column < key.of_bags(history)[:, None, :]) | (column == position))
        position = torch.minimum(position, query.of_bags(history)[:, :, None])
        column = torch.minimum(column, key.of_bags(history)[:, None, :])
    return sees, (position - column).abs()


def _picked(bias: Tensor, index: Tensor) -> Tensor:
    """Return the bias f[H or 1, P] at an index i64[G, n, m], as f[G, H or 1, n, m]."""
    return bias.index_select(1, index.flatten()).unflatten(1, index.shape).movedim(0, 1)


def _softmax(s: Tensor, sees: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the softmax of the scores [G, H, n, m] that are seen, as numerators and denominators [G, n, H, 1], and the
    denominators' logarithms [G, n, H].

    A query that sees no key has weights of 0, and -inf as the logarithm.
    """
    if s.shape[-1] == 0:
        return s, None, s.new_full((s.shape[0], s.shape[2], s.shape[1]), -torch.inf)
    s = torch.where(sees, s, torch.zeros((), dtype=s.dtype, device=s.device))
    greatest = torch.where(sees, s.detach(), -torch.inf).amax(-1, keepdim=True)
    greatest = torch.where(greatest > -torch.inf, greatest, 0)
    raised = torch.where(sees, (s - greatest).exp(), torch.zeros((), dtype=s.dtype, device=s.device))
    total = raised.sum(-1, keepdim=True)
    is_none = ~sees.any(-1, keepdim=True)
    total = torch.where(is_none, torch.ones((), dtype=s.dtype, device=s.device), total)
    logs = torch.where(is_none, -torch.inf, total.log() + greatest)
    return raised, total.movedim(1, 2), logs[..., 0].movedim(1, 2)


def _silu(s: Tensor, sees: Tensor, normalizer: float) -> tuple[Tensor, None, Tensor]:
    """Return silu(s) / normalizer of the scores that are seen, no denominators, and no logarithms, [0, H]."""
    s = torch.where(sees, s, torch.zeros((), dtype=s.dtype, device=s.device))  # silu(0) = 0
    return torch.nn.functional.silu(s) * (1 / normalizer), None, s.new_empty((0, s.shape[1]))

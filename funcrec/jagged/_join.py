"""Join several jagged values in one buffer, and compute the capacity that this buffer needs.

    capacity = Σ over source buffers of min(Σ capacities of its parts, N · most repeats of a key)

A part (`ids["a"]`, `ids.split(...)[0]`, `ids.permute(...)`) could hold every id of its source buffer, so its own buffer
is as large. All parts of one source buffer together hold no more ids than that buffer. So each part records its source,
and `join` needs the room of one source buffer for them. A value that a tree function makes of a part (`tree_map`, or an
argument of `jit`) has no such record.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.jagged import _primitives as primitives

INT32_MAX = 2**31 - 1


class Part(NamedTuple):
    """The record of a part: the keys at `positions` of the source buffer, and that buffer's size.

    whole: the offsets of the source buffer. capacity: its length, which holds each key once.
    """

    whole: Tensor
    capacity: int
    positions: tuple[int, ...]


def as_part(taken: Any, source: Any, positions: Sequence[int]) -> Any:
    """Return `taken` with a record that says that it holds the keys at `positions` of `source`."""
    of = source.part or Part(source.offsets, source.capacity, tuple(range(len(source.keys))))
    object.__setattr__(taken, "part", of._replace(positions=tuple(of.positions[p] for p in positions)))
    return taken


def joined_capacity(values: Sequence[Any]) -> int:
    """Return a capacity that holds all `values` (JaggedTensors or KeyedJaggedTensors).

    The capacity depends on shapes alone.
    """
    sums, wholes, positions = Counter(), {}, {}
    for n, x in enumerate(values):
        of = x.part or Part(x.offsets, x.capacity, (n,))
        name = id(of.whole) if x.part else (n,)
        sums[name] += x.capacity
        wholes[name] = max(of.capacity, wholes.get(name, 0))
        positions.setdefault(name, Counter()).update(of.positions)
    return sum(min(sums[name], wholes[name] * max(positions[name].values(), default=1)) for name in sums)


def join(values: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (values, offsets, weights) of one buffer with the bags of all `values`, in order.

    `values` has one element or more.
    """
    capacity, room = joined_capacity(values), [x.capacity for x in values]
    lengths = torch.cat([x.offsets.diff() for x in values])
    used = torch.cat([x.offsets[-1:] for x in values])
    if sum(room) > INT32_MAX:
        lengths, used = lengths.long(), used.long()
    starts = torch.tensor([0, *accumulate(room)][:-1], dtype=used.dtype, device=used.device)
    take = lambda x: primitives.take_ranges(torch.cat(x), starts, used, capacity)[0]
    return take([x.values for x in values]), primitives.offsets_of(lengths), _join_weights(values, take)


def _join_weights(values: Sequence[Any], take: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    """Return the joined weights, or None if no value has weights.

    A value without weights gets ones if another value has weights.
    """
    own = next((x.weights for x in values if x.weights is not None), None)
    return None if own is None else take([own.new_ones(x.capacity) if x.weights is None else x.weights for x in values])

"""Pad buffers to a few fixed capacities, the buckets, so that a compiled step meets few shapes.

capacity(N) = the least of 16, 24, 32, 48, 64, 96, ... that is at least N
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from funcrec.core import Size, replace, typed
from funcrec.jagged._keyed_jagged import KeyedJaggedTensor
from funcrec.jagged._primitives import are_equal

BUCKET_MIN = 16


def bucket(size: int, *, minimum: int = BUCKET_MIN) -> int:
    """Return the least capacity >= size among the buckets 16, 24, 32, 48, ...

    The buckets begin at `minimum`, double, and have one more bucket halfway between each two.
    """
    power = max(minimum, 1)
    while power < size:
        if power * 3 // 2 >= size and power % 2 == 0:
            return power * 3 // 2
        power *= 2
    return power


@typed
def pad_to_bucket(ids: KeyedJaggedTensor, *, minimum: Size = BUCKET_MIN) -> KeyedJaggedTensor:
    """Return the ids, padded to the least bucket that holds them, so that a compiled step meets few shapes.

    `pad_to_bucket` reads offsets on the host. With inverse indices, the number of bags of each key is also padded to a
    bucket, or to the number of examples if that is less. The new bags are empty, and no example has them.

    Law: `pad_to_bucket(ids).to_lists() == ids.to_lists()` without inverse indices; lookups are equal with them. Above
      `minimum`, at most half of the buffer is padding.

    Example:
      >>> import funcrec as fr
      >>> fr.pad_to_bucket(fr.KeyedJaggedTensor.from_lists({"a": [[1, 2, 3]]})).capacity
      16
    """
    tight = ids.unpad()
    if ids.inverse is not None:
        counts = ids._counts
        most = ids.inverse.shape[1]
        tight = with_bags(tight, [max(n, min(bucket(n, minimum=minimum), most)) for n in counts])
    return tight.pad_to(bucket(tight.capacity, minimum=minimum))


def with_bags(ids: KeyedJaggedTensor, counts: Sequence[int]) -> KeyedJaggedTensor:
    """Return the ids with `counts` bags of each key, no fewer than before; empty bags follow the bags of a key."""
    ends, filled = [0, *accumulate(ids._counts)], []  # a key may stand twice, with a place of its own each time
    for first, end, n in zip(ends, ends[1:], counts, strict=False):
        filled += [ids.offsets[first:end], ids.offsets[end : end + 1].expand(n - end + first)]
    strides = None if are_equal(counts) else tuple(counts)
    return replace(ids, offsets=torch.cat([*filled, ids.offsets[-1:]]), strides=strides)

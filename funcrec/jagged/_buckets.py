"""Pad buffers to a few fixed capacities, the buckets, so that a compiled step meets few shapes.

capacity(N) = the least of 16, 24, 32, 48, 64, 96, ... that is at least N
"""

from funcrec.core import Size, typed
from funcrec.jagged._keyed_jagged import KeyedJaggedTensor

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

    `pad_to_bucket` reads offsets on the host.

    Law: `pad_to_bucket(ids).to_lists() == ids.to_lists()`. Above `minimum`, at most half of the buffer is padding.

    Example:
      >>> import funcrec as fr
      >>> fr.pad_to_bucket(fr.KeyedJaggedTensor.from_lists({"a": [[1, 2, 3]]})).capacity
      16
    """
    tight = ids.unpad()
    return tight.pad_to(bucket(tight.capacity, minimum=minimum))

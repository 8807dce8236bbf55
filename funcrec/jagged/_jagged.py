"""JaggedTensor: B bags of different lengths in one buffer.

    bag b = values[offsets[b] : offsets[b + 1]],   0 = offsets[0] <= offsets[1] <= ... <= offsets[B] <= N

The tail values[offsets[B]:] is padding, which keeps shapes static. No operation reads the padding. Operations here read
no value on the host, except `to_lists`, `to_tensors`, `unpad` and the value checks of constructors on CPU tensors.
Shapes: B bags, N capacity of the buffer, L a fixed length.
"""

import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import PARTS, UNPADDED, Form, Movable, Size, check, pytree, typed
from funcrec.jagged import _primitives as primitives
from funcrec.jagged._checks import (
    bag_problems,
    capacity_problems,
    fill_problems,
    jagged_parts,
    length_problems,
    list_length_problems,
    offset_problems,
    padded_problems,
    select_problems,
)
from funcrec.jagged._lists import bag_list, flat_list, repeats, show_bags, show_buffer, split_list
from funcrec.jagged._primitives import offsets_of

Values = Annotated[Tensor, Form("[N, ...]")]
Weights = Annotated[Tensor, Form("f[N]")]
Counts = Annotated[Tensor, Form("i[B]")]
Integers = Annotated[Tensor, Form("i[K]")]  # K: of bags or of boundaries, of one key or of all


@pytree(optional=("weights",))
class JaggedTensor(Movable):
    """Bags of ids, vectors or anything else with one jagged dimension.

    Args:
      values: [N, ...], the bags end to end, then padding.
      offsets: i32|i64[B + 1], the boundaries of the bags, from 0.
      weights: f[N], a multiplier per value, or None.

    Example:
      >>> import funcrec as fr
      >>> fr.JaggedTensor.from_lists([[1, 2], [], [3]])
      JaggedTensor([[1, 2], [], [3]], values=i64[3])
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    part = None  # not a field: `as_part` sets it to a record of the value from which this value was taken

    # -- constructors ------------------------------------------------------------------------------------------

    @staticmethod
    def from_lists(
        lists: Sequence[Sequence[Any]],
        *,
        weights: Sequence[Sequence[float]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "JaggedTensor":
        """Return a JaggedTensor with one bag for each list: `[[1, 2], []]` -> two bags.

        Bags and values may be NumPy arrays or tensors, too. Tensors and arrays keep their dtype, and tensors keep their
        derivative. Without `dtype`, Python's numbers become i64, f32 or bool, and an empty list becomes i64. Weights
        from Python's numbers are f32. Lists of numbers may be mixed with arrays of the same dtype:
        `[numpy.array([1, 2]), [3]]`.

        Raises:
          TypeError: if the dtypes are mixed.
          ValueError: if the dtype does not hold a number.

        Example:
          >>> import torch, funcrec as fr
          >>> fr.JaggedTensor.from_lists([torch.tensor([0.5], dtype=torch.float64), []]).values
          tensor([0.5000], dtype=torch.float64)
        """
        call = "funcrec.JaggedTensor.from_lists"
        check(call, bag_problems(lists, "lists"))
        if weights is not None:
            check(call, bag_problems(weights, "weights"))
            check(call, list_length_problems(lists, weights))
        values, lengths = flat_list(call, lists, "lists", dtype)
        flat_weights = None if weights is None else flat_list(call, weights, "weights", None, torch.float32)[0]
        return JaggedTensor.from_lengths(values, lengths, weights=flat_weights)

    @staticmethod
    @typed
    def from_lengths(values: Values, lengths: Counts, *, weights: Weights | None = None) -> "JaggedTensor":
        """Return a JaggedTensor from values [N, ...] and lengths i[B] that sum to N."""
        check("funcrec.JaggedTensor.from_lengths", length_problems(values, lengths))
        return JaggedTensor(values, offsets_of(lengths), weights)

    @staticmethod
    @typed
    def from_offsets(values: Values, offsets: Integers, *, weights: Weights | None = None) -> "JaggedTensor":
        """Make bags from values [N, ...] and offsets i[B + 1] with offsets[B] <= N; values beyond are padding."""
        check("funcrec.JaggedTensor.from_offsets", offset_problems(values, offsets))
        return JaggedTensor(values, offsets, weights)

    @staticmethod
    @typed
    def from_padded(
        padded: Annotated[Tensor, Form("[B, L, ...]")],
        lengths: Counts,
        *,
        weights: Annotated[Tensor, Form("f[B, L]")] | None = None,
    ) -> "JaggedTensor":
        """Return a JaggedTensor from padded [B, L, ...], lengths i[B] <= L, and weights f[B, L] or None.

        The capacity of its buffer is B * L.
        """
        check("funcrec.JaggedTensor.from_padded", padded_problems(padded, lengths))
        offsets, capacity = offsets_of(lengths), padded.shape[0] * padded.shape[1]
        flat = lambda x: primitives.from_padded(x, offsets, capacity)
        return JaggedTensor(flat(padded), offsets, None if weights is None else flat(weights))

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def num_bags(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Return the length of the buffer, including padding."""
        return self.values.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Return the length of each bag -> i[B]."""
        return self.offsets.diff()

    def bag_ids(self) -> Tensor:
        """Return the bag of each position -> i64[N]. Padding has bag B."""
        return bag_ids(self.offsets, self.capacity)

    def to_lists(self) -> list[list[Any]]:
        """Return the bags as lists, read on the host."""
        return split_list(self.values, self.offsets)

    def to_tensors(self) -> list[Tensor]:
        """Return the values of each bag as a tensor [n, ...], whose boundaries are read on the host.

        They are views, with the dtype and the derivative of the values. Law: `from_lists(x.to_tensors())` has the bags
        of x, if at least one is not empty.
        """
        return [self.values[a:b] for a, b in itertools.pairwise(self.offsets.tolist())]

    @typed
    def to_padded(self, length: Size, fill: float | int = 0) -> Tensor:
        """Return the bags, cut to `length` and filled up with `fill` -> [B, length, ...]."""
        check("funcrec.JaggedTensor.to_padded", fill_problems(fill, self.values.dtype))
        return primitives.to_padded(self.values, self.offsets, length, fill)

    def __len__(self) -> int:
        """Return the number of bags."""
        return self.num_bags

    def __getitem__(self, bags: int | slice | Sequence[int]) -> "JaggedTensor":
        """Return the bags at these positions: `x[3]` (one bag), `x[2:5]`, `x[[4, 0, 4]]`.

        The capacity is N times the number of repeats of the most frequent position.
        """
        chosen = bag_list(bags, self.num_bags, "funcrec.JaggedTensor.__getitem__")
        return self.select(
            torch.tensor(chosen, dtype=torch.int64, device=self.offsets.device),
            capacity=self.capacity * repeats(chosen),
        )

    @typed
    def select(self, bags: Annotated[Tensor, Form("i[K]")], *, capacity: Size) -> "JaggedTensor":
        """Return the bags i[K], in that order and with repeats, in a buffer of `capacity` values.

        Raises:
          ValueError: if a bag does not exist, or the buffer is too small. Both checks read values on the CPU. If the
            values cannot be read, the caller must ensure both conditions.
        """
        check("funcrec.JaggedTensor.select", select_problems(self.offsets, bags, capacity))
        starts = self.offsets[:-1].index_select(0, bags)
        return take_ranges(self.values, self.weights, starts, self.lengths.index_select(0, bags), capacity)

    # -- padding -----------------------------------------------------------------------------------------------

    @typed
    def pad_to(self, capacity: Size) -> "JaggedTensor":
        """Return the bags in a buffer of exactly `capacity` >= N values; the new values are zero."""
        check("funcrec.JaggedTensor.pad_to", capacity_problems(capacity, self.capacity))
        weights = None if self.weights is None else grow(self.weights, capacity)
        return JaggedTensor(grow(self.values, capacity), self.offsets, weights)

    def unpad(self) -> "JaggedTensor":
        """Return the bags without the padding; `unpad` reads offsets[-1] on the host."""
        end = int(self.offsets[-1])
        return JaggedTensor(self.values[:end], self.offsets, None if self.weights is None else self.weights[:end])

    def __repr__(self) -> str:
        return f"JaggedTensor({show_bags(self.values, self.offsets)}, {show_buffer(self)})"


# -- the arithmetic of offsets, shared with KeyedJaggedTensor -----------------------------------------------------


def bag_ids(offsets: Tensor, capacity: int) -> Tensor:
    """Return the bag of each position, i64[capacity]. Positions from offsets[B] on have bag B."""
    return primitives.bag_ids(offsets, capacity)


def take_ranges(values: Tensor, weights: Tensor | None, starts: Tensor, lengths: Tensor, capacity: int) -> JaggedTensor:
    """Return a JaggedTensor whose bag k is values[starts[k] : starts[k] + lengths[k]]; the padding is zero."""
    taken, offsets = primitives.take_ranges(values, starts, lengths, capacity)
    scale = None if weights is None else primitives.take_ranges(weights, starts, lengths, capacity)[0]
    return JaggedTensor(taken, offsets, scale)


def grow(x: Tensor, capacity: int) -> Tensor:
    return torch.cat([x, x.new_zeros((capacity - x.shape[0], *x.shape[1:]))])


PARTS[JaggedTensor] = jagged_parts
UNPADDED[JaggedTensor] = JaggedTensor.unpad

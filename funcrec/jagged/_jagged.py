"""JaggedTensor: B bags of different lengths in one buffer.

    bag b = values[offsets[b] : offsets[b + 1]],   0 = offsets[0] <= offsets[1] <= ... <= offsets[B] <= N

The tail values[offsets[B]:] is padding; no operation reads it, and that is what gives static shapes. Operations here
read no value on the host, except `to_lists`, `unpad` and the value checks that constructors make on CPU tensors.
Shapes: B bags, N capacity of the buffer, L a fixed length.
"""

import itertools
import numbers
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import PARTS, Form, Problem, Size, check, describe, fail, pytree, short_dtype, typed
from funcrec.jagged import _primitives as primitives
from funcrec.jagged._lists import flat_list
from funcrec.jagged._primitives import is_concrete, offsets_of
from funcrec.kernels.reference_jagged import place_among

INT_DTYPES = (torch.int32, torch.int64)


@pytree(optional=("weights",))
class JaggedTensor:
    """Bags of ids, vectors or anything else with one jagged dimension.

    Args:
      values: [N, ...], the bags end to end, then padding.
      offsets: i32|i64[B + 1], boundaries from 0.
      weights: f[N], a multiplier per value, or None.

    Example:
      >>> import funcrec as fr
      >>> fr.JaggedTensor.from_lists([[1, 2], [], [3]])
      JaggedTensor([[1, 2], [], [3]], values=i64[3])
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    part = None  # of `_parts`: what it was taken from; no field

    # -- constructors ------------------------------------------------------------------------------------------

    @staticmethod
    def from_lists(lists: Sequence[Sequence], *, weights: Sequence[Sequence[float]] | None = None, dtype=None):
        """`[[1, 2], []]` -> two bags; a bag may be a list, a NumPy array or a tensor, and so may its values.

        Tensors and arrays keep their dtype and tensors their derivative; Python's numbers become i64, f32 (weights always) or
        bool, and no values at all i64, unless `dtype` says otherwise.

        Raises: TypeError for dtypes that are mixed; ValueError for a number that the dtype does not hold.

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
    def from_lengths(values: Tensor, lengths: Tensor, *, weights: Tensor | None = None) -> "JaggedTensor":
        """Values [N, ...] and lengths i[B] that sum to N."""
        check("funcrec.JaggedTensor.from_lengths", buffer_problems(values, weights), length_problems(values, lengths))
        return JaggedTensor(values, offsets_of(lengths), weights)

    @staticmethod
    def from_offsets(values: Tensor, offsets: Tensor, *, weights: Tensor | None = None) -> "JaggedTensor":
        """Values [N, ...] and offsets i[B + 1] with offsets[B] <= N; what lies beyond is padding."""
        check("funcrec.JaggedTensor.from_offsets", buffer_problems(values, weights), offset_problems(values, offsets))
        return JaggedTensor(values, offsets, weights)

    @staticmethod
    def from_padded(padded: Tensor, lengths: Tensor, *, weights: Tensor | None = None) -> "JaggedTensor":
        """[B, L, ...] and lengths i[B] <= L -> bags in a buffer of capacity B * L. `weights` is [B, L]."""
        check("funcrec.JaggedTensor.from_padded", padded_problems(padded, lengths, weights))
        offsets, capacity = offsets_of(lengths), padded.shape[0] * padded.shape[1]
        flat = lambda x: None if x is None else primitives.from_padded(x, offsets, capacity)
        return JaggedTensor(flat(padded), offsets, flat(weights))

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def num_bags(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Rows of the buffer, padding included."""
        return self.values.shape[0]

    @property
    def lengths(self) -> Tensor:
        """i[B]."""
        return self.offsets.diff()

    def bag_ids(self) -> Tensor:
        """i64[N]: the bag of each position; B for padding."""
        return bag_ids(self.offsets, self.capacity)

    def to_lists(self) -> list[list]:
        """Read the bags on the host."""
        return split_list(self.values, self.offsets)

    @typed
    def to_padded(self, length: Size, fill: float | int = 0) -> Tensor:
        """[B, length, ...]: each bag cut to `length` and filled up with `fill`."""
        check("funcrec.JaggedTensor.to_padded", fill_problems(fill, self.values.dtype))
        return primitives.to_padded(self.values, self.offsets, length, fill)

    def __getitem__(self, bags: int | slice | Sequence[int]) -> "JaggedTensor":
        """Bags by position: `x[3]` (one bag), `x[2:5]`, `x[[4, 0, 4]]`. The capacity is N times the most repeats."""
        chosen = bag_list(bags, self.num_bags, "funcrec.JaggedTensor.__getitem__")
        return self.select(
            torch.tensor(chosen, dtype=torch.int64, device=self.offsets.device),
            capacity=self.capacity * repeats(chosen),
        )

    @typed
    def select(self, bags: Annotated[Tensor, Form("i[K]")], *, capacity: Size) -> "JaggedTensor":
        """The bags i[K], in that order and with repeats, in a buffer of `capacity` values.

        Raises: for values on the CPU, ValueError for a bag that is not there, or bags that the buffer does not hold; where nothing can be
          read, the caller owes them.
        """
        check("funcrec.JaggedTensor.select", select_problems(self.offsets, bags, capacity))
        starts = self.offsets[:-1].index_select(0, bags)
        return take_ranges(self.values, self.weights, starts, self.lengths.index_select(0, bags), capacity)

    # -- padding -----------------------------------------------------------------------------------------------

    def pad_to(self, capacity: int) -> "JaggedTensor":
        """A buffer of exactly `capacity` >= N values; the new ones are zero."""
        check("funcrec.JaggedTensor.pad_to", capacity_problems(capacity, self.capacity))
        return JaggedTensor(grow(self.values, capacity), self.offsets, grow(self.weights, capacity))

    def unpad(self) -> "JaggedTensor":
        """Cut the padding off; reads offsets[-1] on the host."""
        end = int(self.offsets[-1])
        return JaggedTensor(self.values[:end], self.offsets, None if self.weights is None else self.weights[:end])

    def __repr__(self) -> str:
        return f"JaggedTensor({show_bags(self.values, self.offsets)}, {show_buffer(self)})"


# -- the arithmetic of offsets, shared with KeyedJaggedTensor -----------------------------------------------------


def bag_ids(offsets: Tensor, capacity: int) -> Tensor:
    """i64[capacity]: the bag of each position; B for positions at or beyond offsets[B]."""
    return place_among(offsets, torch.arange(capacity, device=offsets.device, dtype=offsets.dtype)) - 1


def take_ranges(values: Tensor, weights: Tensor | None, starts: Tensor, lengths: Tensor, capacity: int) -> JaggedTensor:
    """Bag k of the answer is values[starts[k] : starts[k] + lengths[k]]; the padding of the answer is zero."""
    taken, offsets = primitives.take_ranges(values, starts, lengths, capacity)
    scale = None if weights is None else primitives.take_ranges(weights, starts, lengths, capacity)[0]
    return JaggedTensor(taken, offsets, scale)


def grow(x: Tensor | None, capacity: int) -> Tensor | None:
    return None if x is None else torch.cat([x, x.new_zeros((capacity - x.shape[0], *x.shape[1:]))])


def bag_list(bags: Any, num_bags: int, call: str) -> list[int]:
    """An int, slice or sequence of ints as a list of positions in [0, num_bags)."""
    if isinstance(bags, slice):
        return list(range(*bags.indices(num_bags)))
    chosen = [bags] if isinstance(bags, int) else list(bags) if isinstance(bags, Sequence) else [None]
    if any(type(b) is not int or not -num_bags <= b < num_bags for b in chosen):
        fail(
            call, "`bags` are not positions of bags.", got=f"{bags!r}", need=f"integers in [-{num_bags}, {num_bags})",
            hint="select(bags, capacity=...) for positions in a tensor", kind=IndexError,
        )  # fmt: skip
    return [b % num_bags for b in chosen]


def repeats(chosen: Sequence) -> int:
    """How often the most frequent element stands in `chosen`; at least 1."""
    return max([1, *Counter(chosen).values()])


# -- lists and text ----------------------------------------------------------------------------------------------


def split_list(values: Tensor, offsets: Tensor) -> list[list]:
    bounds = offsets.tolist()
    return [values[a:b].tolist() for a, b in itertools.pairwise(bounds)]


def show_bags(values: Tensor, offsets: Tensor, limit: int = 8) -> str:
    """The first bags as a list; only the count when the values cannot be read."""
    num_bags = offsets.shape[0] - 1
    if not (is_concrete(values) and is_concrete(offsets)):
        return f"{num_bags} bags"
    shown = split_list(values, offsets[: limit + 1]) if values.dim() == 1 else offsets.diff()[:limit].tolist()
    text = ", ".join(map(str, shown))
    more = ", ..." if num_bags > limit else ""
    return f"[{text}{more}]" if values.dim() == 1 else f"lengths=[{text}{more}]"


def show_buffer(x: Any) -> str:
    """`values=i64[3]`, with `weights=` and the padding where there is some."""
    parts = [f"values={describe(x.values)}"]
    if x.weights is not None:
        parts.append(f"weights={describe(x.weights)}")
    if is_concrete(x.offsets) and int(x.offsets[-1]) != x.values.shape[0]:
        parts.append(f"{int(x.offsets[-1])} used of capacity {x.values.shape[0]}")
    return ", ".join(parts)


# -- validators --------------------------------------------------------------------------------------------------


def bag_problems(bags: object, path: str) -> Iterator[Problem]:
    """`bags` must be a list of lists, or of anything else that has a length."""
    unordered = (str, bytes, bytearray, Mapping, Set)
    has_elements = lambda x: isinstance(x, Collection) and not isinstance(x, unordered) and getattr(x, "ndim", 1) > 0
    if not has_elements(bags):
        yield Problem(f"`{path}` is not a list of bags.", describe(bags), "[[1, 2], [], ...]", kind=TypeError)
        return
    for b, bag in enumerate(bags):
        if not has_elements(bag):
            hint = "a bag [id] for a feature with one id per example"
            yield Problem(f"`{path}[{b}]` is not a bag.", describe(bag), "a list of values", hint, TypeError)
            return


def integer_problems(name: str, n: object) -> Iterator[Problem]:
    if not isinstance(n, numbers.Integral | torch.SymInt) or isinstance(n, bool):
        yield Problem(f"`{name}` is not an integer.", describe(n), "an int >= 0", kind=TypeError)
    elif n < 0:
        yield Problem(f"`{name}` is negative.", f"{n}", f"{name} >= 0")


def capacity_problems(capacity: object, least: int) -> Iterator[Problem]:
    found = list(integer_problems("capacity", capacity))
    yield from found
    if not found and capacity < least:
        what, hint = "`capacity` is smaller than the buffer.", "unpad() first, which reads offsets on the host"
        yield Problem(what, f"{capacity}", f"capacity >= {least}", hint)


def buffer_problems(values: Tensor, weights: Tensor | None, path: str = "") -> Iterator[Problem]:
    if not isinstance(values, Tensor) or values.dim() < 1:
        yield Problem(
            f"`{path}values` is not a tensor with rows.", describe(values), "a tensor [N, ...]", kind=TypeError
        )
        return
    if weights is None:
        return
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        need = f"a floating-point tensor f[{values.shape[0]}]"
        yield Problem(f"`{path}weights` are not floating-point numbers.", describe(weights), need, kind=TypeError)
    elif weights.shape != values.shape[:1]:
        yield Problem(
            f"`{path}weights` does not match its values.",
            f"{describe(weights)}; values is {describe(values)}",
            "weights.shape == values.shape[:1]",
            "weights=None, or cut the padding off first (`unpad`)",
        )
    elif weights.device != values.device:
        yield Problem(f"`{path}weights` is on another device.", describe(weights), f"device {values.device}")


def int_problems(x: Tensor, name: str, device: torch.device | None = None) -> Iterator[Problem]:
    """x must be an i32 or i64 vector, on `device` when one is given."""
    if not isinstance(x, Tensor) or x.dtype not in INT_DTYPES:
        is_mask = name in ("rows", "bags") and describe(x).startswith("bool[")
        hint = f"{name}.nonzero()[:, 0], where the mask is True" if is_mask else ""
        yield Problem(f"`{name}` is not an integer tensor.", describe(x), "i32 or i64", hint, TypeError)
    elif x.dim() != 1:
        yield Problem(f"`{name}` is not a vector.", describe(x), "one dimension")
    elif isinstance(device, torch.device) and x.device != device:
        yield Problem(f"`{name}` is on another device.", f"{x.device}", f"device {device}, where the values are")


def list_length_problems(lists: Sequence, weights: Sequence) -> Iterator[Problem]:
    got, need = ([len(bag) for bag in x] for x in (weights, lists))
    if got != need:
        yield Problem("`weights` has bags of other lengths.", f"{got}", f"{need}", "a weight for each value")


def length_problems(values: Tensor, lengths: Tensor, name: str = "lengths") -> Iterator[Problem]:
    found = list(int_problems(lengths, name, getattr(values, "device", None)))
    yield from found
    if found or not is_concrete(lengths) or not isinstance(values, Tensor) or values.dim() < 1:
        return
    if lengths.numel() and int(lengths.min()) < 0:
        yield Problem(f"`{name}` has a negative length.", f"{int(lengths.min())}", "lengths >= 0")
    elif (lengths.numel() and int(lengths.max()) > values.shape[0]) or int(lengths.sum()) != values.shape[0]:
        yield Problem(  # no sum of lengths within the buffer overflows
            f"`{name}` does not sum to the number of values.",
            f"sum {sum(lengths.tolist())}; values is {describe(values)}",
            "lengths.sum() == values.shape[0]",
            "from_offsets, which takes padding behind the last bag",
        )


def offset_problems(values: Tensor, offsets: Tensor, name: str = "offsets") -> Iterator[Problem]:
    found = list(int_problems(offsets, name, getattr(values, "device", None)))
    yield from found
    if found or not isinstance(values, Tensor) or values.dim() < 1:
        return
    if offsets.shape[0] == 0:
        yield Problem(f"`{name}` is empty.", describe(offsets), "B + 1 boundaries, the first of them 0")
    elif is_concrete(offsets):
        yield from offset_value_problems(values.shape[0], offsets, name)


def offset_value_problems(capacity: int, offsets: Tensor, name: str = "offsets") -> Iterator[Problem]:
    """The checks that read `offsets` on the host."""
    falls = offsets[1:] < offsets[:-1]  # compared, since a difference may overflow
    if int(offsets[0]) != 0:
        yield Problem(f"`{name}` does not begin at 0.", f"offsets[0] = {int(offsets[0])}", "offsets[0] == 0")
    if bool(falls.any()):
        at = int(falls.to(torch.int8).argmax())
        got = f"offsets[{at}] = {int(offsets[at])}, offsets[{at + 1}] = {int(offsets[at + 1])}"
        yield Problem(f"`{name}` descends.", got, "offsets[b] <= offsets[b + 1]", "from_lengths, if these are lengths")
    elif int(offsets[-1]) > capacity:
        got = f"offsets[-1] = {int(offsets[-1])}; {capacity} values"
        yield Problem(f"`{name}` ends beyond the values.", got, "offsets[-1] <= values.shape[0]")


def fill_problems(fill: object, dtype: torch.dtype) -> Iterator[Problem]:
    """What stands behind a bag must be a value of the buffer's dtype: no fraction is cut, no integer wrapped."""
    floats = dtype.is_floating_point or dtype.is_complex
    if not isinstance(fill, (int, float) if floats else int):
        what, need = f"`fill` is no {short_dtype(dtype)}.", "a number" if floats else "an integer"
        yield Problem(what, describe(fill), need, "values.float() first", TypeError)
    elif not floats:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if not low <= fill <= high:
            what = f"`fill` is no {short_dtype(dtype)}."
            yield Problem(what, describe(fill), f"{low} to {high}", "values.long() first")


def select_problems(offsets: Tensor, bags: Tensor, capacity: int) -> Iterator[Problem]:
    found = [*int_problems(bags, "bags"), *integer_problems("capacity", capacity)]
    yield from found
    if found or not (is_concrete(bags) and is_concrete(offsets)) or not bags.numel():
        return
    low, high, count = int(bags.min()), int(bags.max()), offsets.shape[0] - 1
    if low < 0 or high >= count:
        got = f"bag {low if low < 0 else high}"
        yield Problem("`bags` has a bag that is not there.", got, f"0 <= bag < {count}", "the bags of this value")
        return
    total = int(offsets.diff().index_select(0, bags).sum())
    if total > capacity:
        yield Problem("`capacity` does not hold the bags.", f"{capacity}", f"capacity >= {total}", f"capacity={total}")


def padded_problems(padded: Tensor, lengths: Tensor, weights: Tensor | None) -> Iterator[Problem]:
    if not isinstance(padded, Tensor) or padded.dim() < 2:
        yield Problem("`padded` has no bags and positions.", describe(padded), "a tensor [B, L, ...]", kind=TypeError)
        return
    found = list(int_problems(lengths, "lengths", padded.device))
    yield from found
    if isinstance(lengths, Tensor) and lengths.shape != padded.shape[:1]:
        yield Problem("`lengths` does not match `padded`.", describe(lengths), f"shape [{padded.shape[0]}]")
    elif not found and lengths.numel() and is_concrete(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > padded.shape[1]:
            yield Problem("`lengths` leave the padded dimension.", f"from {low} to {high}", f"0 to {padded.shape[1]}")
    if weights is not None and not (isinstance(weights, Tensor) and weights.is_floating_point()):
        need = f"f{list(padded.shape[:2])}"
        yield Problem("`weights` are not floating-point numbers.", describe(weights), need, kind=TypeError)
    elif weights is not None and weights.shape != padded.shape[:2]:
        yield Problem("`weights` does not match `padded`.", describe(weights), f"shape {list(padded.shape[:2])}")


def jagged_parts(x: JaggedTensor, path: str) -> Iterator[Problem]:
    """What is wrong with the fields of one that was made by hand, or came out of a tree."""
    yield from buffer_problems(x.values, x.weights, f"{path}.")
    yield from offset_form_problems(x.offsets, getattr(x.values, "device", None), f"{path}.offsets")


def offset_form_problems(offsets: object, device: torch.device | None, path: str) -> Iterator[Problem]:
    """`offsets` must be integers i[B + 1], B >= 0, where the values are."""
    found = list(int_problems(offsets, path, device))
    yield from found
    if not found and offsets.shape[0] == 0:
        hint = "torch.zeros(1, dtype=torch.int64), for no bags"
        yield Problem(f"`{path}` is empty.", describe(offsets), "B + 1 boundaries, the first of them 0", hint)


PARTS[JaggedTensor] = jagged_parts

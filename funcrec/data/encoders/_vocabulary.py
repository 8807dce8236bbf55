"""Encoders that make ids: from a vocabulary of seen values, by a hash, or from integers that are ids already.

vocabulary:  id = 1 + place of the value among the kept values, in their order;   0 for other and for missing values
hashed:      id = 1 + hash(value) mod (n - 1);                                    0 for missing values
identity:    id = value

Text is ordered by its UTF-8 bytes and hashed as Σ_i mix(byte_i, i). Shapes: V ids, N values, S bytes.
"""

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcrec.core import GAMMA, Count, Form, Problem, Size, Within, check, mix, pytree, stray, sure, typed
from funcrec.data.encoders._encoders import Encoder, Place, by_elements, fixed
from funcrec.data.readers import _columns as columns
from funcrec.data.readers._arrow import compute
from funcrec.tables import hash_rows, multiply_shift

MERGE_AT = 1 << 16  # least number of waiting values before `_add_up` runs
SCAN = 16  # below V / SCAN values, bisection finds the ids, without an index of the vocabulary
HASHED_BYTES = 1 << 22  # bytes of text that are hashed at once
KINDS = "integers, text, bytes or booleans"


class Seen(NamedTuple):
    """The values so far. kind: their kind, "none" before any value. counted: (values, counts i64) with each value once,
    or None. waiting: more such pairs, which are not added yet. size: the number of waiting values. missing: the number
    of missing values."""

    kind: str = "none"
    counted: tuple | None = None
    waiting: tuple = ()
    size: int = 0
    missing: int = 0


@pytree(static=("kind",))
class FittedVocabulary:
    """Values that have ids: 1, 2, ... in the order of the values. All other values have id 0.

    Args:
      values: i64[V - 1], ascending. Unsigned ids are stored as their bits. Text and bytes are u8[S], end to end.
      offsets: i64[V] for text and bytes: where each value begins, and where the last value ends; i64[0] for integers.
      counts: i64[V], how often each id occurred in the rows that the vocabulary was learned from.
      kind: "int", "uint", "text" or "bytes"; "none" if there was no value.
    """

    values: Tensor
    offsets: Tensor
    counts: Tensor
    kind: str

    @property
    def num_ids(self) -> int:
        return self.counts.shape[0]

    @by_elements
    def apply(self, values: Any, place: Place) -> np.ndarray:
        """Return ids i64 of a column, 0 for unknown values. A column of another kind raises TypeError."""
        kind, values = of_kind(values, place)
        if "none" in (kind, self.kind):
            return np.zeros(len(values), np.int64)
        if {kind, self.kind} <= {"int", "uint"}:
            return _find_integers(values, kind, self.values.cpu().contiguous().numpy(), self.kind)
        if kind != self.kind:
            hint = f'column.cast("{"string" if self.kind == "text" else "int64"}"), or a vocabulary of such values'
            place.refuse_type(values.type, f"{self.kind}, as the vocabulary was learned from", hint)
        return _find_text(values, self._known())

    @typed
    def decode(self, ids: Annotated[Tensor, Form("i64[N]")]) -> Any:
        """Return the values of ids i64[N], as a pyarrow array. The value of id 0 is missing."""
        import pyarrow as pa

        check("funcrec.data.FittedVocabulary.decode", _id_problems(ids, self.num_ids))
        places = pa.array(ids.cpu().numpy() - 1, mask=(ids == 0).cpu().numpy())
        return self._known().take(places)

    def _known(self) -> Any:
        """Return the values as pyarrow's i64, u64 or large text, without a copy."""
        import pyarrow as pa

        if self.kind in ("int", "uint", "none"):
            return pa.array(self.values.cpu().contiguous().numpy().view(np.uint64 if self.kind == "uint" else np.int64))
        buffers = [
            None,
            pa.py_buffer(self.offsets.cpu().contiguous().numpy()),
            pa.py_buffer(self.values.cpu().contiguous().numpy()),
        ]
        kind = pa.large_string() if self.kind == "text" else pa.large_binary()
        return pa.Array.from_buffers(kind, self.num_ids - 1, buffers)

    def __repr__(self) -> str:
        return f"FittedVocabulary({self.num_ids} ids of {self.kind})"


@typed
def vocabulary(*, min_count: Count = 1, max_size: Count | None = None) -> Encoder:
    """Return an encoder of integers, text, bytes or booleans into ids: 1, 2, ... in the order of the seen values.

    Id 0 is the unknown id: missing values, values that were not seen, and values left out here get it. Rows with id 0
    train its embedding. For example, with min_count=2 the rare values teach the model how to treat unknown values.

    Args:
      min_count: values that occur less often are left out.
      max_size: the largest number of values that are kept. The most frequent values are kept; of two equally frequent
        values, the smaller is kept.

    Law: the state depends on how often each value occurs. It depends neither on the order of the rows nor on their
      chunks.

    Cost: memory for the distinct values. One core learns a million texts of 17 bytes in a second. They take 33 MB in a
    saved file.

    Example:
      >>> from funcrec.data import vocabulary
      >>> state = vocabulary(min_count=2).fit([["a", "b"], ["b", None]])
      >>> state.apply([["b"], [], ["a", None]]).to_pylist(), state.counts
      ([[1], [], [0, 0]], tensor([2, 2]))
    """
    return Encoder(Seen, _see, lambda seen: _vocabulary_of(seen, min_count, max_size))


def _see(seen: Seen, values: Any, place: Place) -> Seen:
    pc = compute()
    kind, values = of_kind(values, place)
    if "none" not in (kind, seen.kind) and kind != seen.kind:
        place.refuse_type(values.type, f"{seen.kind}, as in the rows before", "one type for all chunks of a column")
    missing, known = seen.missing + values.null_count, kind if seen.kind == "none" else seen.kind
    if kind == "none" or values.null_count == len(values):
        return seen._replace(kind=known, missing=missing)
    counted = pc.value_counts(values.drop_null())
    part = counted.field(0), counted.field(1).to_numpy()
    seen = Seen(known, seen.counted, (*seen.waiting, part), seen.size + len(counted), missing)
    return _add_up(seen) if seen.size >= max(MERGE_AT, len(seen.counted[0]) if seen.counted else 0) else seen


def _add_up(seen: Seen) -> Seen:
    """Return the state with the waiting counts added: each value once, with the sum of its counts."""
    import pyarrow as pa

    parts = [*([seen.counted] if seen.counted else []), *seen.waiting]
    coded = pa.chunked_array([v for v, _ in parts]).combine_chunks().dictionary_encode()
    sums = np.zeros(len(coded.dictionary), np.int64)
    np.add.at(sums, coded.indices.to_numpy(), np.concatenate([c for _, c in parts]))
    return seen._replace(counted=(coded.dictionary, sums), waiting=(), size=0)


def _vocabulary_of(seen: Seen, min_count: int, max_size: int | None) -> FittedVocabulary:
    import pyarrow as pa

    pc = compute()
    if not seen.waiting and seen.counted is None:
        nothing = torch.zeros(0, dtype=torch.int64)
        return FittedVocabulary(nothing, nothing, torch.tensor([seen.missing]), "none")
    values, counts = sure(_add_up(seen).counted)
    order = pc.sort_indices(values).to_numpy()
    counts = counts[order]
    kept = counts >= min_count
    if max_size is not None and kept.sum() > max_size:
        kept = np.zeros(len(counts), bool)
        kept[np.argsort(-counts, kind="stable")[:max_size]] = True
    values, unknown = values.take(pa.array(order[kept])), seen.missing + int(counts[~kept].sum())
    counts = torch.from_numpy(np.concatenate([[unknown], counts[kept]]))
    if seen.kind in ("int", "uint"):
        bits = torch.from_numpy(values.to_numpy().view(np.int64).copy())
        return FittedVocabulary(bits, torch.zeros(0, dtype=torch.int64), counts, seen.kind)
    ends, data = text_buffers(values)
    return FittedVocabulary(torch.from_numpy(data.copy()), torch.from_numpy(ends - ends[0]), counts, seen.kind)


def of_kind(values: Any, place: Place) -> tuple[str, Any]:
    """Return (kind, values): "int", "uint", "text", "bytes" or "none", and i64, u64, large text or large bytes."""
    import pyarrow as pa
    import pyarrow.types as kinds

    kind = values.type
    if kinds.is_null(kind):
        return "none", values
    if kinds.is_uint64(kind):
        return "uint", values
    if kinds.is_integer(kind) or kinds.is_boolean(kind):
        return "int", values.cast(pa.int64())
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return "text", values.cast(pa.large_string())
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind):
        return "bytes", values.cast(pa.large_binary())
    hint = 'column.cast("string"), or column.cast("int64")'
    if kinds.is_floating(kind):
        hint = (
            'column.astype("Int64") in pandas, which makes floats of integers with missing ones; bucketize() of numbers'
        )
    hint = columns.time_hint(place.name, kind) if columns.is_point_in_time(kind) else hint
    place.refuse_type(kind, KINDS, hint)


def text_buffers(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (offsets i64[N + 1], bytes u8[S]) of an array of large text or bytes. The offsets may begin above 0."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    whole = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return ends, whole[ends[0] : ends[-1]]


def _find_integers(values: Any, kind: str, known: np.ndarray, known_kind: str) -> np.ndarray:
    """Return 1 + the place of each value among the ascending known values, or 0 for an unknown or missing value."""
    there = ~values.is_null().to_numpy()
    bits = values.fill_null(0).to_numpy().view(np.int64)
    if kind != known_kind:
        there &= bits >= 0  # the other type holds neither values above 2⁶³ nor values below 0
    dtype = np.uint64 if known_kind == "uint" else np.int64
    known, bits = known.view(dtype), bits.view(dtype)
    if not len(known):
        return np.zeros(len(bits), np.int64)
    at = np.searchsorted(known, bits).clip(max=len(known) - 1)
    return np.where(there & (known[at] == bits), at + 1, 0)


def _find_text(values: Any, known: Any) -> np.ndarray:
    import pyarrow as pa

    pc = compute()
    if len(values) * SCAN >= len(known):
        return pc.fill_null(pc.index_in(values, value_set=known), -1).to_numpy().astype(np.int64) + 1
    low, high = np.zeros(len(values), np.int64), np.full(len(values), len(known))
    for _ in range(len(known).bit_length()):
        middle = (low + high) // 2
        tried = known.take(pa.array(middle.clip(max=len(known) - 1)))
        below = pc.fill_null(pc.less(tried, values), False).to_numpy() & (middle < high)
        low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
    found = known.take(pa.array(low.clip(max=len(known) - 1)))
    return np.where(pc.fill_null(pc.equal(found, values), False).to_numpy(), low + 1, 0)


def _id_problems(ids: Tensor, num_ids: int) -> Iterator[Problem]:
    if (wrong := stray(ids, num_ids)) is not None:
        hint = "ids that this vocabulary has given"
        yield Problem("`ids` has an id that does not exist.", f"id {wrong}", f"0 <= id < {num_ids}", hint)


# -- ids without a vocabulary ----------------------------------------------------------------------------------------


@pytree(static=("num_embeddings", "seed", "kind"))
class Hashed:
    """The state of `hashed`. It holds the kind of the values; values of other kinds raise."""

    num_embeddings: int
    seed: int
    kind: str

    @property
    def num_ids(self) -> int:
        return self.num_embeddings

    @by_elements
    def apply(self, values: Any, place: Place) -> np.ndarray:
        """Return ids i64 of a column, in [1, num_embeddings). A missing value gets id 0."""
        kind, values = of_kind(values, place)
        if kind == "none" or not len(values):
            return np.zeros(len(values), np.int64)
        if {kind, self.kind} - {"int", "uint", "none"} and "none" != self.kind != kind:
            place.refuse_type(values.type, f"{self.kind}, as was learned", "one type of values in all tables")
        if kind in ("int", "uint"):
            bits = torch.from_numpy(values.fill_null(0).to_numpy().view(np.int64).copy())
        else:
            coded = values.combine_chunks().fill_null("" if kind == "text" else b"").dictionary_encode()
            bits = text_bits(coded.dictionary)[torch.from_numpy(coded.indices.to_numpy().astype(np.int64))]
        rows = hash_rows(bits, multiply_shift(self.seed), self.num_embeddings - 1).numpy() + 1
        return np.where(values.is_null().to_numpy(), 0, rows)


NumHashed = Annotated[int, Within("an int in [2, 2³¹)", lambda n: 2 <= n < 2**31)]


@typed
def hashed(num_embeddings: NumHashed, *, seed: Size = 0) -> Encoder:
    """Return an encoder that hashes integers, text, bytes or booleans to ids in [1, num_embeddings).

    A missing value gets id 0.

    Args:
      num_embeddings: 2 or more. Two values have the same id with probability 1 / (num_embeddings - 1).

    Law: a value has the same id in every table and process. A column of another kind than the fitted column raises.

    Example:
      >>> from funcrec.data import hashed
      >>> hashed(1000).fit(["a"]).apply(["a", "b", None]).to_pylist()
      [940, 240, 0]
    """

    def update(known: str, values: Any, place: Place) -> str:
        kind = of_kind(values, place)[0]
        if {kind, known} - {"int", "uint", "none"} and "none" != known != kind != "none":
            place.refuse_type(values.type, f"{known}, as in the rows before", "one type for all chunks of a column")
        return kind if known == "none" else known

    return Encoder(lambda: "none", update, lambda kind: Hashed(int(num_embeddings), int(seed), kind))


def text_bits(values: Any) -> Tensor:
    """Return hashes i64[N] of the elements of an array of large text or bytes. A hash reads bytes and their places."""
    ends, data = text_buffers(values)
    ends, out, first = torch.from_numpy(ends - ends[0]), [torch.zeros(0, dtype=torch.int64)], 0
    while first < len(values):
        last = max(first + 1, int(torch.searchsorted(ends, ends[first] + HASHED_BYTES, right=True)) - 1)
        begin, own = int(ends[first]), ends[first : last + 1] - ends[first]
        place = torch.arange(int(own[-1])) - own[:-1].repeat_interleave(own.diff())
        terms = mix((place * 256 + torch.from_numpy(data[begin : begin + int(own[-1])].copy()) + 1) * GAMMA)
        sums = torch.cat([terms.new_zeros(1), terms.cumsum(0)])  # sums and their differences are modulo 2⁶⁴
        out.append(mix(sums[own[1:]] - sums[own[:-1]]))
        first = last
    return torch.cat(out)


@pytree(static=("num_embeddings",))
class Identity:
    """The state of `identity`, for integers that are ids already."""

    num_embeddings: int

    @property
    def num_ids(self) -> int:
        return self.num_embeddings

    @by_elements
    def apply(self, values: Any, place: Place) -> np.ndarray:
        """Return ids i64 of a column of integers in [0, num_embeddings). Other or missing integers raise ValueError."""
        kind, values = of_kind(values, place)
        if kind in ("text", "bytes"):
            place.refuse_type(values.type, "integers", "vocabulary(), which gives ids to text")
        values = values.cast("int64") if kind == "none" else values
        need, missing = f"0 <= id < {self.num_embeddings}", values.is_null().to_numpy()
        if missing.any():
            place.refuse(int(missing.argmax()), "a missing id", need, "vocabulary(), to which it is the unknown one")
        ids = values.to_numpy()
        wrong = (ids < 0) | (ids >= self.num_embeddings)
        if wrong.any():
            at = int(wrong.argmax())
            place.refuse(at, f"id {ids[at]}", need, "vocabulary() or hashed(n), or a larger num_embeddings")
        return ids.astype(np.int64)


@typed
def identity(num_embeddings: Count) -> Encoder:
    """Return an encoder that keeps integers in [0, num_embeddings) as ids.

    Other integers raise an error that names the column and the row.

    Example:
      >>> from funcrec.data import identity
      >>> identity(10).fit([3]).apply([[9, 0], []]).to_pylist()
      [[9, 0], []]
    """
    return fixed(Identity(int(num_embeddings)), "ids")

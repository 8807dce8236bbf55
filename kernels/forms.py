"""The static arguments of the operations, as records and as the flat integers that a torch schema can hold.

A pooled lookup takes one Feature per feature. The cotangent of a table is a sum of Segments. An update has a Rule.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Feature(NamedTuple):
    """One feature of a pooled lookup.

    table, rows: numbers of the table and of the buffer of rows.
    first_bag: the feature's bags are offsets[first_bag : first_bag + B + 1].
    max_length: the number of ids that a lookup reads per bag, 0 for all.
    mean: whether the multiplier s_i of an id is divided by the bag's length. weighted: whether s_i has the id's weight.
    column: the feature's first column in the output.
    """

    table: int
    rows: int
    first_bag: int
    max_length: int
    mean: bool
    weighted: bool
    column: int


class Segment(NamedTuple):
    """One term of a table's cotangent: entries (rows[i], s_i · d[b, column : column + D]).

    table, d, rows, offsets, weights: numbers in the lists of tensors. With offsets -1, entry i belongs to d[i], and
    there are `num_bags` entries. With weights -1, there are no weights. The other fields have the meaning of Feature.
    """

    table: int
    d: int
    column: int
    rows: int
    offsets: int
    first_bag: int
    num_bags: int
    max_length: int
    mean: bool
    weights: int


class Terms(NamedTuple):
    """The cotangents of several tables, not written out: tensors, and segments that combine the tensors."""

    d: list[Tensor]
    rows: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor]
    segments: list[Segment]

    def flat(self) -> tuple:
        return *self[:4], flatten(self.segments)


class Rule(NamedTuple):
    """A rule that implementations know (`rules.RULES`).

    slots, hyper: the names of the slots and hyper-parameters, in the order of the calls.
    wide: for each slot, whether the slot is f[R, D]; else it is f[R].
    optional: (slot, hyper-parameter) of each slot that is absent if that hyper-parameter is 0.
    is_timed: whether the formula reads the step.
    counts_entries: whether the rule receives the number of entries that were summed into a row.
    """

    slots: tuple[str, ...]
    hyper: tuple[str, ...]
    wide: tuple[bool, ...] = ()
    optional: tuple[tuple[str, str], ...] = ()
    is_timed: bool = False
    counts_entries: bool = False

    def slots_with(self, hyper: Sequence[float]) -> tuple[str, ...]:
        """Return the names of the slots that exist under these hyper-parameters."""
        absent = {slot for slot, name in self.optional if not hyper[self.hyper.index(name)]}
        return tuple(s for s in self.slots if s not in absent)


class Owners(NamedTuple):
    """The ranks that own a feature's rows: row r < num_rows lies on rank ranks[r // part].

    On that rank it is row r % part + starts[r // part]. part · len(ranks) >= num_rows.
    first_bag, max_length: the fields of Feature.
    """

    first_bag: int
    max_length: int
    num_rows: int
    part: int
    ranks: tuple[int, ...]
    starts: tuple[int, ...]

    def flat(self) -> list[int]:
        return [*self[:4], len(self.ranks), *self.ranks, *self.starts]


def flatten(records: Iterable[tuple[Any, ...]]) -> list[int]:
    return list(_kept(_flat, tuple(records)))


def _kept(make: Any, static: tuple) -> tuple:
    """Return make(static), kept for the next call.

    Sizes that an export leaves open have no hash, so a result for them is not kept.
    """
    try:
        return make(static)
    except TypeError:
        return make.__wrapped__(static)


@functools.lru_cache(maxsize=1024)
def _flat(records: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    return tuple(x if isinstance(x, torch.SymInt) else int(x) for record in records for x in record)


def features_of(flat: Sequence[int]) -> list[Feature]:
    return list(_kept(_features, tuple(flat)))


def segments_of(flat: Sequence[int]) -> list[Segment]:
    return list(_segments(tuple(flat)))


@functools.lru_cache(maxsize=1024)  # The next call most often has the same features.
def _features(flat: tuple[int, ...]) -> tuple[Feature, ...]:
    parts = (flat[i : i + 7] for i in range(0, len(flat), 7))
    return tuple(Feature._make((*p[:4], bool(p[4]), bool(p[5]), p[6])) for p in parts)


@functools.lru_cache(maxsize=1024)
def _segments(flat: tuple[int, ...]) -> tuple[Segment, ...]:
    parts = (flat[i : i + 10] for i in range(0, len(flat), 10))
    return tuple(Segment._make((*p[:8], bool(p[8]), p[9])) for p in parts)


def owners_of(flat: Sequence[int]) -> list[Owners]:
    found, at = [], 0
    while at < len(flat):
        first, last = at + 5, at + 5 + flat[at + 4]
        end = 2 * last - first
        found.append(Owners._make((*flat[at : at + 4], tuple(flat[first:last]), tuple(flat[last:end]))))
        at = end
    return found


def width_of(features: Sequence[Feature], tables: Sequence[Tensor]) -> int:
    """Return the number of columns of a pooled lookup's output."""
    return max((f.column + tables[f.table].shape[1] for f in features), default=0)


def in_blocks(features: Sequence[int], num_bags: int, width: int, blocks: int) -> Sequence[int]:
    """Return the features for an output [B, width] that is written as `blocks` parts [B, width / blocks], end to end.

    A feature's column then counts from the beginning of the output, in which all rows have width / blocks columns.
    """
    part = width // blocks
    if blocks == 1 or not part:
        return features
    moved = list(features)
    moved[6::7] = [c // part * num_bags * part + c % part for c in moved[6::7]]
    return moved


def is_padded(segment: Segment, num_ids: int) -> bool:
    """Return whether a segment of bags is written out as `max_length` entries per bag, not as one per position."""
    return 0 < segment.max_length * segment.num_bags <= max(num_ids, segment.num_bags)


def capacity_of(segment: Segment, num_ids: int) -> int:
    """Return the number of entries of a segment, from shapes alone. num_ids: the length of its buffer of rows."""
    if segment.offsets < 0:
        return segment.num_bags
    return segment.max_length * segment.num_bags if is_padded(segment, num_ids) else num_ids


def capacities(segments: Sequence[Segment], rows: Sequence[Tensor], num_tables: int) -> list[int]:
    """Return the number of entries of each table."""
    total = [0] * num_tables
    for s in segments:
        total[s.table] += capacity_of(s, rows[s.rows].shape[0])
    return total


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, rules and slots: f64 for f64 tables; f32 for f32, f16 and bf16 tables."""
    return torch.promote_types(dtype, torch.float32)


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return f64 if a tensor is f64, else f32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


# -- quantised rows ----------------------------------------------------------------------------------------------

CODE_BITS = (8, 4, 2)
HEAD_BYTES = 4  # bytes of [scale f16][bias f16] before the codes
FLOATS_OF = {32: (torch.float32,), 16: (torch.float16, torch.bfloat16)}  # dtypes of unquantised tables, by their bits


def row_bytes(bits: int, dim: int) -> int:
    """Return the number of bytes of a quantised row: scale, bias, and `dim` codes in whole bytes."""
    return HEAD_BYTES + -(-dim * bits // 8)


def check_coded(call: str, table: Tensor, bits: int, dim: int, at: str = "table") -> None:
    """Raise unless a table is u8[R, S] with rows of `dim` codes, or has `dim` columns of 16- or 32-bit floats."""
    coded = bits in CODE_BITS
    dtypes = (torch.uint8,) if coded else FLOATS_OF.get(bits, ())
    fits = table.dim() == 2 and dim >= 0 and table.shape[1] == (row_bytes(bits, dim) if coded else dim)
    if fits and table.dtype in dtypes:
        return
    if not dtypes:
        need = f"bits in {sorted((*CODE_BITS, *FLOATS_OF))}"
    elif coded:
        need = f"u8[R, {row_bytes(bits, dim)}]: 4 bytes of scale and bias, then {dim} codes of {bits} bits"
    else:
        need = f"{' or '.join(map(str, dtypes))} of [R, {dim}]"
    kind = TypeError if dtypes and table.dtype not in dtypes else ValueError
    raise kind(
        f"funcrec.kernels.{call}: `{at}` is not a table of {dim} columns of {bits} bits.\n"
        f"  got   {table.dtype}{list(table.shape)}\n  need  {need}\n  try   `quantize_rows`, or its own bits and dim"
    )


def check_tables(call: str, tables: Sequence[Tensor], bits: Sequence[int], dims: Sequence[int]) -> None:
    if not len(tables) == len(bits) == len(dims):
        raise ValueError(
            f"funcrec.kernels.{call}: `bits` and `dims` do not match the tables.\n  got   {len(bits)} bits, {len(dims)}"
            f" dims\n  need  one for each of {len(tables)} tables\n  try   bits=[8] * len(tables)"
        )
    for i, (table, b, dim) in enumerate(zip(tables, bits, dims, strict=True)):
        check_coded(call, table, b, dim, f"tables[{i}]")


def score_dtype(queries: Tensor, items: Tensor, bits: int) -> torch.dtype:
    """Return the dtype in which `top_k` computes: f64 if queries or items are f64, else f32. Raise if dims differ."""
    dim = queries.shape[1]
    if bits:
        check_coded("top_k", items, bits, dim, "items")
    elif items.dim() != 2 or items.shape[1] != dim or not items.is_floating_point():
        raise (ValueError if items.is_floating_point() else TypeError)(
            f"funcrec.kernels.top_k: `items` are not vectors of {dim} numbers.\n  got   {items.dtype}"
            f"{list(items.shape)}\n  need  floats of [N, {dim}]\n  try   bits=8 of quantised rows"
        )
    return widest([queries] if bits else [queries, items])


def check_codable(table: Tensor, bits: int, key: Tensor | None) -> None:
    """Raise unless the table is f[R, D], the codes have 8, 4 or 2 bits, and the key fits.

    A key is i64[], or i64[R] with a key for each row.
    """
    if bits not in CODE_BITS:
        raise ValueError(
            f"funcrec.kernels.quantize_rows: there are no such codes.\n  got   bits={bits}\n  need  one of"
            f" {CODE_BITS}\n  try   bits=8, or table.to(torch.float16)"
        )
    is_read = table.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    if table.dim() != 2 or not is_read:
        kind = ValueError if is_read else TypeError
        raise kind(
            f"funcrec.kernels.quantize_rows: `table` is not a table.\n  got   {table.dtype}{list(table.shape)}\n"
            "  need  [R, D] of f32, f64, f16 or bf16\n  try   table.to(torch.float32)"
        )
    if key is not None and (key.dtype != torch.int64 or tuple(key.shape) not in ((), (table.shape[0],))):
        kind = ValueError if key.dtype == torch.int64 else TypeError
        raise kind(
            f"funcrec.kernels.quantize_rows: `key` is not a key.\n  got   {key.dtype}{list(key.shape)}\n"
            f"  need  i64[], or i64[{table.shape[0]}], one for each row\n  try   fr.key(0)"
        )


# -- attention ---------------------------------------------------------------------------------------------------

TIME_STEP = 0.301  # of log |t_i - t_j|, between two buckets of time


def time_bounds(time_bias: Tensor) -> Tensor:
    """Return the least |t_i - t_j| of each bucket from the second on, f32[T - 1]: e^(0.301 k) for a bias f[H, T]."""
    places = torch.arange(1, time_bias.shape[1], dtype=torch.float64, device=time_bias.device)
    return (places * TIME_STEP).exp().float()

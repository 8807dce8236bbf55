"""The contracts of the table operations, and the choice of an implementation.

    pooled_lookup            out[b, column_f + j] = Σ_{i in bag (f, b)} s_i · table_f[rows_f[i], j]
    pooled_lookup_weights    the transpose of pooled_lookup in the weights: ⟨table_f[rows_f[i]], d_out[b, f]⟩
    expand                   the transpose of pooled_lookup in the tables: one entry (rows[i], s_i · d_out[b, f]) per id
    coalesce                 one entry per distinct row: the row's gradients, summed in the order of their positions
    fused_update             coalesce, then a rule on the touched rows, in one pass
    gather_rows              out[i] = table[rows[i]]; scatter_rows: out[rows[i]] = new[i], elsewhere the table
    take_ranges              ranges of a buffer one after the other, and take_ranges_transpose
    to_padded, from_padded   bags as a padded block and back; each is the transpose of the other
    bag_extrema              the greatest or least value of each bag, and bag_extrema_transpose
    invariant_bmm            products whose bits do not depend on the batch; invariant_sum, sums of the same order
    bucketize                ids, grouped by the shard that owns the row
    owner_blocks             bucketize for several tables, as blocks of one size for each rank, with the bags' lengths
    quantized_lookup         pooled_lookup of rows of 8, 4 or 2 bits; quantized_rows, their numbers; quantize_rows
    top_k                    the rows whose inner products with a query are greatest
    jagged_attention         softmax or silu attention within bags, and jagged_attention_transpose
    dot_interaction          the inner products of all pairs of vectors of an example, and dot_interaction_transpose
    find_ids                 the row of each id in a vocabulary; admit_ids chooses, settle_ids writes; several: _columns
    initial_rows             the first numbers of rows, from a key; draw_rows writes them to rows of tables

where s_i is the id's weight (or 1), divided by the bag's length for a mean. Every implementation keeps five rules:
 - a row outside [0, R) is never read or written: it counts as a row of zeros and gets no gradient;
 - positions from offsets[-1] on, and places from `max_length` on in a bag, are never read;
 - offsets may hold anything: an operation reads the running maximum of the offsets, cut to the buffer ("triton" cuts
   each bag to the buffer by itself), and never reads or writes outside a tensor;
 - sums run in f32 (f64 for f64 tables), over the entries of each bag and each row in the order of positions;
 - output shapes depend on input shapes only.

`implementation` is a static choice by name. None takes the name that `using` set, else the device's default: "cpp" for
the CPU, "triton" for CUDA, "reference" for any other device. A call with a tracked input (`tracked`) takes "reference",
because only "reference" has derivatives, of every order and mode. Such a call may not name another implementation. A
call also raises for an unknown name, or for an operation that the implementation lacks: nothing falls back.
"""

from collections.abc import Callable, Sequence
from typing import Any

from funcrec.kernels import library
from funcrec.kernels.admission import (
    admit_columns,
    admit_ids,
    find_columns,
    find_ids,
    settle_columns,
    settle_ids,
    settle_ids_,
)
from funcrec.kernels.choice import IMPLEMENTATIONS, ambient, available, chosen, has, is_free, is_plain, operation, using
from funcrec.kernels.first_rows import draw_rows, initial_rows
from funcrec.kernels.forms import (
    CODE_BITS,
    Feature,
    Owners,
    Rule,
    Segment,
    Terms,
    accumulation_dtype,
    check_codable,
    check_coded,
    flatten,
)
from funcrec.kernels.products import invariant_bmm, invariant_sum
from funcrec.kernels.rules import RULES
from funcrec.kernels.tracked import any_tracked
from torch import Tensor

__all__ = [
    "IMPLEMENTATIONS", "RULES", "Feature", "Owners", "Rule", "Segment", "Terms", "accumulation_dtype", "admit_columns",
    "admit_ids", "ambient", "available", "chosen", "draw_rows", "find_columns", "find_ids", "has", "initial_rows",
    "invariant_bmm", "invariant_sum", "is_free", "is_plain", "settle_columns", "settle_ids", "settle_ids_", "using",
]  # fmt: skip


def pooled_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[Feature],
    num_bags: int,
    blocks: int = 1,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the pooled rows, f32|f64[B, C], from tables f[R, D], rows i[N] and a flat buffer of bags.

    The features cover every column once. blocks: n > 1 returns the columns in n equal parts, [n · B, C / n], one part
    after the other; no feature lies in two parts.
    """
    call = operation("pooled_lookup", implementation, offsets, *tables, weights, bare=rows)
    return call(list(tables), list(rows), offsets, weights, flatten(features), num_bags, blocks)


def pooled_lookup_weights(
    d_out: Tensor,
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor,
    features: Sequence[Feature],
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the gradient of the weights of `pooled_lookup`, f[N]. An id that no weighted feature reads has zero."""
    call = operation("pooled_lookup_weights", implementation, d_out, *tables, weights)
    return call(d_out, list(tables), list(rows), offsets, weights, flatten(features))


def expand(
    terms: Terms, shapes: Sequence[tuple[int, int]], *, implementation: str | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return (rows i64[K], grads f[K, D]), the entries of each table by segment. An entry without effect has row -1."""
    flat = _of_terms("expand", implementation, terms)(*terms.flat(), [n for s in shapes for n in s])
    return list(zip(flat[::2], flat[1::2], strict=True))


def coalesce(
    terms: Terms, shapes: Sequence[tuple[int, int]], *, implementation: str | None = None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return (rows i64[K] ascending, grads f[K, D], count i64[], repeats i64[K]) of each table. K is at most R.

    From place `count` on, rows are -1, and grads and repeats are 0. `repeats` counts the entries summed into each row.
    """
    flat = _of_terms("coalesce", implementation, terms)(*terms.flat(), [n for s in shapes for n in s])
    return [tuple(flat[i : i + 4]) for i in range(0, len(flat), 4)]


def fused_update(
    tables: Sequence[Tensor],
    slots: Sequence[Sequence[Tensor]],
    terms: Terms,
    lr: Tensor,
    step: Tensor,
    key: Tensor | None,
    rule: str,
    hyper: Sequence[float],
    first: Tensor | None = None,
    dims: Sequence[int] = (),
    numbers: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return (tables, slots) with `rule` applied to every row that a term names.

    A table may hold only columns [first, first + D) of rows whose gradients have all columns. The rule then sees rows
    and slots that are zero outside the table's columns. This is right for rules that depend on other columns only
    through the gradient.

    Args:
      slots: the slots of each table, in the order of RULES[rule].slots.
      lr: f64[]. step: i64[], the number of earlier steps. hyper: numbers in the order of RULES[rule].hyper.
      key: i64[T, S + 1, 4], the source of the bits that round 16-bit tables at random; None rounds to nearest. A table
        has up to S segments of rows, (key, begin, phase, words), by ascending `begin` from row 0; unused places after
        them have begin 2⁶³ - 1. Column c of row r takes 16 bits of a random word, from bit 16 · ((phase + c) mod 4) on.
        The word is number r · words + (phase + c) // 4 of the segment's key.
      first, dims: i64[T], the column of a table's gradients at which the table's own columns begin, and the number of
        columns of its gradients. None and () for tables of whole rows.
      numbers: f64[H], which take the place of `hyper` when the operation runs. Slots are those of `hyper`. The host
        reads the numbers, so a GPU waits. None for the numbers in `hyper`.
    """
    if not tables:
        return [], []
    given, n, each = [x for s in slots for x in s], len(tables), len(slots[0]) if slots else 0
    floats = *tables, *given, *terms.d, *terms.weights, lr, numbers
    ints = [x for x in (*terms.rows, *terms.offsets, step, key, first) if x is not None]
    call = operation("fused_update", implementation, *floats, bare=ints)
    flat = call(list(tables), given, *terms.flat(), lr, step, key, rule, list(hyper), first, list(dims), numbers)
    return flat[:n], [flat[n + t * each : n + (t + 1) * each] for t in range(n)]


def gather_rows(table: Tensor, rows: Tensor, *, implementation: str | None = None) -> Tensor:
    """Return table[rows], f32|f64[K, D], with zeros for each row outside the table."""
    return operation("gather_rows", implementation, table)(table, rows)


def scatter_rows(
    table: Tensor, rows: Tensor, count: Tensor, new: Tensor, *, implementation: str | None = None
) -> Tensor:
    """Return the table with new[i] in row rows[i] for i < count. rows[:count] must be distinct and in the table."""
    return operation("scatter_rows", implementation, table, new)(table, rows, count, new)


def quantized_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[Feature],
    num_bags: int,
    bits: Sequence[int],
    dims: Sequence[int],
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the `pooled_lookup` of the numbers that quantised rows encode, f32[B, C], with the same bits.

    Args:
      tables: u8[R, S] with bits[t] 8, 4 or 2. A row is [scale f16][bias f16][dims[t] codes, low bits first, whole
        bytes], and the row's numbers are code · scale + bias. A table may also be f32[R, D] with bits[t] 32, or f16 or
        bf16[R, D] with bits[t] 16.
    """
    is_usual = weights is None and is_plain(implementation, offsets)
    out = library.planned("lookup")(tables, rows, offsets, features, num_bags, bits, dims) if is_usual else None
    if out is not None:
        return out
    call = operation("quantized_lookup", implementation, offsets, *tables, weights, bare=rows)
    return call(list(tables), list(rows), offsets, weights, flatten(features), num_bags, list(bits), list(dims))


def quantized_rows(table: Tensor, rows: Tensor, bits: int, dim: int, *, implementation: str | None = None) -> Tensor:
    """Return the numbers of quantised rows u8[R, S], or rows of floats, f32[N, D]. Rows outside the table are zeros."""
    check_coded("quantized_rows", table, bits, dim)
    if bits not in CODE_BITS:
        return gather_rows(table, rows, implementation=implementation)
    return operation("quantized_rows", implementation, table)(table, rows, bits, dim)


def quantize_rows(table: Tensor, bits: int, key: Tensor | None = None, *, implementation: str | None = None) -> Tensor:
    """Return the rows of f[R, D] in codes of 8, 4 or 2 bits, u8[R, S], which `quantized_lookup` reads.

    With L = 2^bits - 1, min and max of the row: bias = f16(min), and scale = f16((max - bias) / L), or 1 if that is 0.
    code = the integer nearest to (x - bias) / scale, ties to even, cut to [0, L]. FBGEMM's
    `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf` makes the same bytes, but with scale and bias after the codes.

    Args:
      key: i64[], which rounds codes up or down at random. Scale and bias are then rounded outwards, so that no number
        is cut off and the mean over keys is the number itself. The random bits depend on key, row and column only.

    Law: for the encoded number x', |x - x'| <= max(scale / 2, |min| · 2^-11), and L · 2^-25 more if scale is below
      f16's normal numbers. With a key, |x - x'| <= scale. A row is NaN in all columns if it holds NaN or inf, or if f16
      does not hold its min (above 65504) or its scale (range above 65504 · L). No row becomes other finite numbers.
    """
    check_codable(table, bits, key)
    if any_tracked([table]):
        raise TypeError(
            "funcrec.kernels.quantize_rows: codes have no derivative.\n  got   a table that grad or jvp follows\n"
            "  need  plain numbers\n  try   table.detach()"
        )
    return operation("quantize_rows", implementation, table)(table, bits, key)


def take_ranges(
    values: Tensor, starts: Tensor, lengths: Tensor, capacity: int, *, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (values [C, ...], offsets i64[B + 1]): the ranges values[starts[b] : starts[b] + lengths[b]] end to end.
    Zeros follow the last range."""
    return operation("take_ranges", implementation, values)(values, starts, lengths, capacity)


def take_ranges_transpose(
    d: Tensor, starts: Tensor, lengths: Tensor, num_values: int, *, implementation: str | None = None
) -> Tensor:
    """Return the ordered sums of d [C, ...] over the ranges that hold each position, [num_values, ...] in d's dtype."""
    return operation("take_ranges_transpose", implementation, d)(d, starts, lengths, num_values)


def bucketize(
    rows: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    num_shards: int,
    block: int,
    *,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows grouped by owner = row // block, then by bag, in order: the input of each row-wise shard.

    Returns:
      rows i[N] in the owner's own numbers, lengths i64[S · B], weights f[N] (or [0]), and positions i64[N], each id's
      new position, or -1 for an id without owner. Zeros follow the last row.
    """
    return operation("bucketize", implementation, rows, weights)(rows, offsets, weights, num_shards, block)


def owner_blocks(
    ids: Tensor,
    offsets: Tensor,
    lanes: Sequence[Owners],
    slots: Sequence[Sequence[int]],
    num_bags: int,
    room: int,
    *,
    wide: bool = False,
    placed: bool = False,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks that a rank sends to n ranks: the rows that it needs there, by lane and bag, and bag lengths.

    Args:
      ids: i[N]. offsets: i[M + 1], the bags of the ids. Lane l reads `num_bags` bags from lanes[l].first_bag on.
      slots: for each of the n ranks, K lanes (each at most once) whose bag lengths the rank receives; -1 for none.
      room: C, the number of rows that a block can hold; further rows are counted and left out.
      wide: whether to send i64. If not, i32 is sent, and the caller guarantees that rows and lengths fit.
      placed: whether to return each id's place; then no two lanes may read the same id.

    Returns:
      blocks [n, C + K · B]: C rows (numbers in the owner's bank, -1 in unused places), then B lengths for each of K
      slots, which also count rows that are left out. Counts i64[n]: how many rows each rank owns. Places i64[N]: each
      id's place among the n · C, or -1; [0] if not `placed`. An id outside its table has no owner.
    """
    flat, told = [n for x in lanes for n in x.flat()], [n for x in slots for n in x]
    call = operation("owner_blocks", implementation, ids)
    return call(ids, offsets, flat, told, num_bags, len(slots), room, wide, placed)


def to_padded(
    values: Tensor, offsets: Tensor, max_length: int, fill: float | int = 0, *, implementation: str | None = None
) -> Tensor:
    """Return the bags as a block [B, max_length, ...]: each bag from its beginning, then `fill`."""
    whole = int(fill) if isinstance(fill, int) else None
    return operation("to_padded", implementation, values)(values, offsets, max_length, float(fill), whole)


def from_padded(padded: Tensor, offsets: Tensor, capacity: int, *, implementation: str | None = None) -> Tensor:
    """Return the transpose of to_padded, [capacity, ...], with zeros from offsets[-1] on and where a bag exceeds L."""
    return operation("from_padded", implementation, padded)(padded, offsets, capacity)


def bag_extrema(
    values: Tensor, offsets: Tensor, greatest: bool, placed: bool, *, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (the greatest or least value of each bag [B, ...], the first place of that value i64[B, ...]).

    A NaN is better than any number, and 0 equals -0. An empty bag has the least or greatest number of the dtype, and
    place N. If not `placed`, the places are [0], and a zero may have either sign.
    """
    return operation("bag_extrema", implementation, values)(values, offsets, greatest, placed)


def bag_extrema_transpose(
    d: Tensor, offsets: Tensor, places: Tensor, num_values: int, *, implementation: str | None = None
) -> Tensor:
    """Return d[b, j] at places[b, j], and zeros elsewhere, [N, ...]. A place outside its bag is left out."""
    return operation("bag_extrema_transpose", implementation, d)(d, offsets, places, num_values)


def top_k(
    queries: Tensor,
    items: Tensor,
    rows: Tensor | None,
    offsets: Tensor | None,
    k: int,
    bits: int = 0,
    *,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (scores f32|f64[B, k], rows i64[B, k]), the greatest ⟨query, row⟩, by descending score, then by row.

    A score is summed column by column, so its bits do not depend on the other rows and queries. A row whose score is
    NaN or -∞ is left out. If fewer than k rows remain, -∞ and -1 fill the free places.

    Args:
      queries: f[B, D]. items: f[N, D], or quantised rows u8[N, S] of `bits` (8, 4 or 2).
      rows: i[L], the rows to leave out. offsets: i[B + 1], a bag of these rows for each query. None leaves out none.
    """
    call = operation("top_k", implementation, queries, items, bare=[x for x in (rows, offsets) if x is not None])
    return call(queries, items, rows, offsets, k, bits)


def jagged_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *rest: Any, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out f[N, H, V], logs f32|f64[N, H]): attention of each bag, and log Σ e^s of each query. Without softmax
    the second is [0, H]. Rows of `out` outside of all bags are 0.

    Args:
      queries, keys, values: f[N, H, D], f[M, H, D], f[M, H, V] of one dtype.
      rest: offsets, key_offsets i[B + 1]; position_bias f[H or 1, P] or None; time_bias f[H or 1, T] or None, and
        query_times [N], key_times [M]; num_targets i[B] or None; scale, normalizer (numbers); softmax, causal (bools).
    """
    call = operation("jagged_attention", implementation, queries, keys, values, *rest[2:4])
    return call(queries, keys, values, *rest)


def jagged_attention_transpose(
    d_out: Tensor, out: Tensor, logs: Tensor, *rest: Any, implementation: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the cotangents of queries, keys, values, position_bias and time_bias, [0, 0] for a bias that is None.

    `out` and `logs` are the results of jagged_attention(*rest). Sums over pairs have a fixed order.
    """
    call = operation("jagged_attention_transpose", implementation, d_out, *rest[:3], *rest[5:7])
    return call(d_out, out, logs, *rest)


def dot_interaction(x: Sequence[Tensor], *, implementation: str | None = None) -> Tensor:
    """Return ⟨x_1, x_0⟩, ⟨x_2, x_0⟩, ... of the vectors in parts f[B, F, D], joined along F: f[B, F · (F - 1) / 2]."""
    return operation("dot_interaction", implementation, *x, bare=[])(list(x))


def dot_interaction_transpose(d: Tensor, x: Sequence[Tensor], *, implementation: str | None = None) -> list[Tensor]:
    """Return Σ_{j≠i} d[pair(i, j)] x_j for each vector x_i, in parts as x: the transpose of `dot_interaction` at x."""
    return operation("dot_interaction_transpose", implementation, d, *x, bare=[])(d, list(x))


def _of_terms(name: str, implementation: str | None, terms: Terms) -> Callable:
    """Return the function of an operation on terms. Without tensors it is the reference's: operators need a tensor."""
    tensors = (*terms.d, *terms.rows, *terms.weights)
    return operation(name, implementation if tensors else "reference", *tensors)

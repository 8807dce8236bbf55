"""Pooled lookups, the gradient of a lookup's weights, and reads and writes of rows, in C++ (csrc/lookup.h)."""

import functools
from collections.abc import Sequence

import torch
from funcrec.kernels.cpp._native import DTYPES, bounds, call, empty, fail, ints, matrix, reals, stacks, table
from funcrec.kernels.cpp._native import REALS as REALS_OF
from funcrec.kernels.cpp._native import tables as described_tables
from funcrec.kernels.cpp._planned import INTS, OUT, REALS, ROWS, Plan, Slot, are_usual, find, forgotten, plan_of, ran
from funcrec.kernels.forms import in_blocks
from torch import Tensor

INTS_PER_FEATURE = 7
F32, F64 = DTYPES[torch.float32], DTYPES[torch.float64]


def pooled_lookup(
    tables: list[Tensor],
    rows: list[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: list[int],
    num_bags: int,
    blocks: int = 1,
) -> Tensor:
    """Return the pooled rows, f32|f64[n · B, C / n].

    `features` holds seven numbers for each `forms.Feature`. A stack counts as K tables.
    """
    return pool("pooled_lookup", stacks(tables), rows, offsets, weights, features, num_bags, blocks)


def planned_pooled_lookup(
    tables: list[Tensor],
    rows: list[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: list[int],
    num_bags: int,
    blocks: int = 1,
) -> tuple[Tensor] | None:
    """Return (the `pooled_lookup`,), or None if a tensor is not as the plan expects."""
    if type(num_bags) is not int:  # 2.0 and True are equal to numbers of a plan
        return None
    given = [*tables, *rows, offsets] if weights is None else [*tables, *rows, offsets, weights]
    form = (tables[0].dtype, tables[0].shape[-1:]) if tables else ()
    static = (len(tables), len(rows), weights is None or weights.dtype, form, num_bags, blocks, features)
    plan = find(_plans, static, lambda *_: _plan(static, tables, rows, offsets, weights, features, num_bags, blocks))
    if plan is None:
        return None
    out = (empty if plan.is_large else torch.empty)(plan.shape, dtype=torch.float32)
    if ran(plan, [*given, out]):
        return (out,)
    forgotten(_plans, plan)
    return None


_plans: list[Plan] = []


def _plan(
    static: tuple, tables: list[Tensor], rows: list[Tensor], offsets: Tensor, weights: Tensor | None,
    features: list[int], num_bags: int, blocks: int,
) -> Plan | None:  # fmt: skip
    """Return the plan of a lookup of f32 sums in matrices, whose weights belong to one buffer of rows."""
    others = [*rows, offsets] if weights is None else [*rows, offsets, weights]
    is_usual = are_usual([*tables, *others]) and all(x.dim() == 1 for x in others)
    if not is_usual or any(x.dim() != 2 or x.dtype == torch.float64 for x in tables):
        return None
    weighted = {r for r, is_weighted in zip(features[1::7], features[5::7], strict=True) if is_weighted}
    if weights is not None and (len(weighted) != 1 or weights.dtype not in REALS_OF):
        return None
    described = described_tables(tables)
    numbers, out, _ = _described("pooled_lookup", described, rows, offsets, weights, features, num_bags, blocks)
    array, of_rows = [0, *numbers], 3 + 4 * len(tables)
    at = of_rows + 3 * len(rows) + 1 + len(features)  # of the offsets
    slots = [Slot(2 + 4 * i, ROWS, x.shape[1], x.dtype) for i, x in enumerate(tables)]
    slots += [Slot(of_rows + 3 * i, INTS, 0) for i in range(len(rows))]
    slots.append(Slot(at, INTS, max(features[2::INTS_PER_FEATURE], default=0) + num_bags + 1 if features else 1))
    if weights is not None:
        slots.append(Slot(at + 3, REALS, of_rows + 3 * weighted.pop() + 2, weights.dtype))
    slots.append(Slot(len(array) - 1, OUT, out.shape[1], torch.float32))
    own = features if type(features) is tuple else [*features]  # a copy: a caller may change its list
    return plan_of((*static[:-1], own), "pooled_lookup", array, slots, tuple(out.shape))


def pool(
    name: str,
    described: list[int],
    rows: list[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: list[int],
    num_bags: int,
    blocks: int = 1,
) -> Tensor:
    """Return the pooled rows, f32|f64[n · B, C / n], from the entry point `name`.

    `described` holds four numbers for each table.
    """
    numbers, out, kept = _described(name, described, rows, offsets, weights, features, num_bags, blocks)
    call(name, numbers)
    del kept
    return out


def _described(
    name: str,
    described: list[int],
    rows: list[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: list[int],
    num_bags: int,
    blocks: int,
) -> tuple[list[int], Tensor, tuple]:
    """Return the numbers of a pooled lookup, its output, and the tensors that must outlive the call."""
    rows, offsets = [r.contiguous() for r in rows], offsets.contiguous()
    dtypes = described[1::4]
    width = feature_width(tuple(features), tuple(described[3::4]), len(rows), blocks)
    numbers = _features(described, rows, offsets, in_blocks(features, num_bags, width, blocks), num_bags)
    wide = F64 in dtypes and any(dtypes[t] == F64 for t in features[::INTS_PER_FEATURE])
    width = width // blocks
    out = empty((blocks * num_bags, width), torch.float64 if wide else torch.float32)
    weights = _multipliers(name, weights, rows, features)
    numbers += (*bounds(offsets), *reals(weights), num_bags, width, F64 if wide else F32, out.data_ptr())
    return numbers, out, (rows, offsets, weights)


def pooled_lookup_weights(
    d_out: Tensor, tables: list[Tensor], rows: list[Tensor], offsets: Tensor, weights: Tensor, features: list[int]
) -> Tensor:
    """Return the gradient of the weights, f[N].

    It is Σ ⟨table[row], d_out[b]⟩ over the weighted features that read the id.
    """
    rows, offsets, d_out = [r.contiguous() for r in rows], offsets.contiguous(), _with_rows(d_out)
    described = described_tables(tables)
    feature_width(tuple(features), tuple(described[3::4]), len(rows), of=d_out.shape[1])
    numbers = _features(described, rows, offsets, features, d_out.shape[0])
    d_weights = torch.empty(weights.shape, dtype=torch.float64 if weights.dtype == torch.float64 else torch.float32)
    numbers += (*bounds(offsets), *reals(d_weights), *matrix(d_out))
    call("pooled_lookup_weights", numbers)
    return d_weights.to(weights.dtype)


def gather_rows(table_: Tensor, rows: Tensor) -> Tensor:
    """Return table[rows], f32|f64[K, D], with zeros for rows outside the table."""
    return gather_block([table_], rows)[0]


def scatter_rows_(table_: Tensor, rows: Tensor, count: Tensor, new: Tensor) -> None:
    """Write table[rows[i]] = new[i] for i < count, rounded to nearest. The rows must be distinct."""
    scatter_block_([table_], rows, count, [new])


def gather_block(tables: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Return the results of `gather_rows` on several tables with the same rows."""
    rows, out, numbers = rows.contiguous(), [], [len(tables)]
    tables = [x.contiguous() if 0 in x.stride() else x for x in tables]  # an expanded cotangent is not a table's memory
    named = ints(rows)
    for x in tables:
        out.append(empty((rows.shape[0], x.shape[1]), torch.float64 if x.dtype == torch.float64 else torch.float32))
        numbers += table(x)
        numbers += matrix(out[-1])
    call("gather_block", [*numbers, *named])
    return out


def scatter_block_(tables: list[Tensor], rows: Tensor, count: Tensor, new: list[Tensor]) -> None:
    """Run `scatter_rows_` on several tables with the same rows."""
    rows, new, numbers = rows.contiguous(), [_with_rows(x) for x in new], [len(tables)]
    count = count.to(torch.int64)
    if count.numel() != 1 or not count.is_cpu:
        fail("scatter_rows_", "`count` is not one number.", list(count.shape), "i64[] on cpu", "torch.tensor(n)")
    for x, y in zip(tables, new, strict=True):
        if y.shape != (rows.shape[0], x.shape[1]):
            fail(
                "scatter_rows_",
                "`new` does not match.",
                list(y.shape),
                [*rows.shape, x.shape[1]],
                "a row for each of `rows`",
            )
        numbers += table(x)
        numbers += matrix(y)
    call("scatter_block", [*numbers, *ints(rows), count.data_ptr()])


def _features(
    described: list[int], rows: list[Tensor], offsets: Tensor, features: Sequence[int], num_bags: int
) -> list[int]:
    """Return the numbers at the beginning of the arrays of both lookups.

    `described` holds four numbers for each table.
    """
    need = max(features[2::INTS_PER_FEATURE], default=0) + num_bags
    if features and need >= offsets.shape[0]:
        raise ValueError(
            f"funcrec.kernels.cpp: `offsets` has too few boundaries.\n  got   {offsets.shape[0]}\n"
            f"  need  {need + 1}, one more than the last feature's last bag"
        )
    numbers = [len(described) // 4, *described, len(rows)]
    for r in rows:
        numbers += ints(r)
    numbers.append(len(features) // INTS_PER_FEATURE)
    numbers += features
    return numbers


@functools.lru_cache(maxsize=1024)
def feature_width(
    features: tuple[int, ...], dims: tuple[int, ...], num_buffers: int, blocks: int = 1, of: int | None = None
) -> int:
    """Return the number of output columns, after a check of the features.

    of: the number of columns that exist, which features may cover any number of times. Without `of`, the features must
    cover each column once, and no feature may cross a boundary between two `blocks`.
    """
    found = [features[i : i + INTS_PER_FEATURE] for i in range(0, len(features), INTS_PER_FEATURE)]
    for i, (t, r, first_bag, max_length, _, _, column) in enumerate(found):
        is_there = 0 <= t < len(dims) and 0 <= r < num_buffers and min(first_bag, max_length, column) >= 0
        if not is_there or (of is not None and column + dims[t] > of):
            _fail_feature(i, found[i], f"{len(dims)} tables, {num_buffers} buffers of rows, {of} columns")
    if of is not None:
        return of
    spans = sorted((column, column + dims[t], i) for i, (t, *_, column) in enumerate(found))
    width = max([end for _, end, _ in spans], default=0)
    part, at = width // max(blocks, 1), 0
    for begin, end, i in spans:
        if begin != at or blocks < 1 or width % blocks or (begin < end and begin // part != (end - 1) // part):
            _fail_feature(i, found[i], f"columns without gaps, in {blocks} blocks of {width}")
        at = end
    return width


def _fail_feature(i: int, feature: tuple[int, ...], there: str) -> None:
    fail("lookup", f"feature {i} does not fit.", feature, f"what is there: {there}", "the numbers of forms.Feature")


def _multipliers(call: str, weights: Tensor | None, rows: list[Tensor], features: list[int]) -> Tensor | None:
    """Return the weights as contiguous f32 (f64 for f64). Raise if they are too short for a feature with weights."""
    is_weighted = features[5::7]
    need = max(rows[r].shape[0] for r, is_one in zip(features[1::7], is_weighted) if is_one) if any(is_weighted) else 0
    if need > (0 if weights is None else weights.shape[0]):
        got = None if weights is None else list(weights.shape)
        fail(
            call, "`weights` is missing or short.", got, f"a number for each of {need} ids", "features without weights"
        )
    if weights is None:
        return None
    return weights.to(torch.float64 if weights.dtype == torch.float64 else torch.float32).contiguous()


def _with_rows(x: Tensor) -> Tensor:
    """Return x [M, C] in f32 (f64 for f64) with contiguous rows, and any stride between rows."""
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return x if x.dim() != 2 or x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()

"""Sum cotangents of tables by row. Write out the sums (expand, coalesce), or use them at once in an update.

w[row] ← rule(w[row], Σ gradients of the row, slots[row])        for every row that occurs in an entry
"""

from array import array
from collections.abc import Sequence

import torch
from funcrec.kernels.cpp import _native
from funcrec.kernels.cpp._rules import Generated
from funcrec.kernels.forms import accumulation_dtype, capacities, segments_of
from funcrec.kernels.rules import RULES
from torch import Tensor

_NUMBERS = {name: i for i, name in enumerate(RULES)}  # csrc/formulas.h has the same numbers
_GENERATED, MOST_SLOTS = len(RULES), 8  # csrc/formulas.h and csrc/rules.h have the same numbers


def fused_update_(
    tables: Sequence[Tensor], slots: Sequence[Tensor], d: Sequence[Tensor], rows: Sequence[Tensor],
    offsets: Sequence[Tensor], weights: Sequence[Tensor], segments: Sequence[int], lr: Tensor, step: Tensor,
    key: Tensor | None, rule: str, hyper: Sequence[float], first: Tensor | None = None, dims: Sequence[int] = (),
) -> None:  # fmt: skip
    """Apply `rule` (a name in rules.RULES) to every row that occurs in an entry, in place.

    slots: each table's slots in the rule's order, one table after the other.
    lr: f64[]. step: i64[], the number of earlier steps.
    key: i64[T, S + 1, 4], which rounds 16-bit tables at random, as in `ops.fused_update`. None rounds to nearest.
    first, dims: i64[T], and the number of columns of each table's gradients, as in `ops.fused_update`; None and () if
      the tables hold whole rows.
    """
    call = "fused_update_"
    names = _slot_names(call, rule, hyper)
    if len(slots) != len(tables) * len(names):
        raise ValueError(
            f"funcrec.kernels.cpp.{call}: `slots` does not match the tables.\n  got   {len(slots)} tensors\n"
            f"  need  {names} for each of {len(tables)} tables"
        )
    numbers = [len(hyper), *array("q", array("d", hyper).tobytes())]
    windows, terms = windows_of(call, tables, first, dims), (d, rows, offsets, weights, segments)
    _update(call, tables, slots, terms, (lr, step, key), _NUMBERS[rule], numbers, names, windows=windows)


def generated_update_(
    tables: Sequence[Tensor], slots: Sequence[Tensor], d: Sequence[Tensor], rows: Sequence[Tensor],
    offsets: Sequence[Tensor], weights: Sequence[Tensor], segments: Sequence[int], lr: Tensor, step: Tensor,
    key: Tensor | None, rules: Sequence[Generated],
) -> None:  # fmt: skip
    """Run `fused_update_` with a rule for each table.

    `generate` made each rule for the table's dim and dtype. All rules have the same number of slots.
    """
    names = tuple(str(i) for i in range(len(rules[0].sizes))) if rules else ()
    codes, kept = [], []
    for table, rule in zip(tables, rules, strict=True):
        if (table.shape[1], accumulation_dtype(table.dtype)) != (rule.dim, rule.dtype):
            raise ValueError(
                "funcrec.kernels.cpp.generated_update_: a rule is for another table.\n"
                f"  got   {table.dtype}{list(table.shape)}\n  need  rows of {rule.dim}, summed in {rule.dtype}"
            )
        now = [(x.dtype, x.shape) for x in rule.constants]
        if now != [*rule.forms]:
            need = f"{[*rule.forms]}, as when the rule was compiled"
            _native.fail(
                "generated_update_", "a tensor that a rule reads has another form.", now, need, "another tensor"
            )
        constants = [x.contiguous() for x in rule.constants]
        pointers = array("q", [x.data_ptr() for x in constants])
        kept += (constants, pointers)
        codes.append((rule.rule, rule.prepare, pointers.buffer_info()[0], rule.shared_bytes, *rule.sizes))
    terms = (d, rows, offsets, weights, segments)
    _update("generated_update_", tables, slots, terms, (lr, step, key), _GENERATED, [0], names, codes)
    del kept


def _update(
    call: str, tables, slots, terms, when, number: int, hyper, names: Sequence[str], codes=(), windows=None
) -> None:  # fmt: skip
    """Call `fused_update` in csrc/update.h with the numbers that it reads. names: the names of a table's slots."""
    lr, step, key = when
    lr, step = lr.to(torch.float64), step.to(torch.int64)
    key = None if key is None else key.contiguous()
    _check_numbers(call, (lr, step), key, tables, names)
    keys = (0, 0) if key is None else (key.data_ptr(), key[0].nbytes if len(tables) else 0)
    bad = array("q", [-1, -1])
    numbers = [bad.buffer_info()[0], number, lr.data_ptr(), step.data_ptr(), *hyper, len(names), len(tables)]
    numbers += _trained(tables, slots, len(names), keys, codes, windows)
    numbers_of_terms, kept = _terms(*terms)
    _native.call("fused_update", numbers + numbers_of_terms)
    _check_segments(call, bad[0], terms[-1])
    if bad[0] < -1:
        _fail_slot(call, tables, slots, names, -2 - bad[0])
    if bad[1] >= 0:
        _fail_window(call, tables[bad[1]], int(windows[0][bad[1]]), windows[1][bad[1]])
    del kept


def _check_numbers(call: str, numbers: Sequence[Tensor], key: Tensor | None, tables, names: Sequence[str]) -> None:
    if not all(x.numel() == 1 and x.is_cpu for x in numbers):
        got = [f"{list(x.shape)} on {x.device}" for x in numbers]
        _native.fail(call, "`lr` or `step` is not one number.", got, "f64[] and i64[] on cpu", "torch.tensor(lr)")
    if key is not None and not fits_keys(key, len(tables)):
        got, need = f"{key.dtype}{list(key.shape)} on {key.device}", f"i64[{len(tables)}, S + 1, 4] on cpu"
        _native.fail(call, "`key` does not match.", got, need, "None to round to nearest")
    if len(names) > MOST_SLOTS:
        _native.fail(
            call, "a rule has too many slots.", len(names), f"at most {MOST_SLOTS}", "one wider slot for several"
        )


def fits_keys(key: Tensor, num_tables: int) -> bool:
    """Return whether keys fit this number of tables, and satisfy what the kernel's memory safety needs.

    The last segment must begin after all rows, because it stops the kernel's loop. A phase must be 0, 1, 2 or 3.
    """
    if (key.dtype, key.dim(), key.is_cpu) != (torch.int64, 3, True) or key.shape[::2] != (num_tables, 4):
        return False
    ends, last = key.shape[1] >= 2, torch.iinfo(torch.int64).max
    return ends and bool((key[:, -1, 1] == last).all()) and not bool((key[..., 2] & ~3).any())


def windows_of(call: str, tables: Sequence[Tensor], first: Tensor | None, dims: Sequence[int]):
    """Return (first, dims) if tables hold only some columns of rows, else None."""
    if len(dims) not in (0, len(tables)) or (len(dims) > 0 and (first is None or first.shape != (len(tables),))):
        raise ValueError(
            f"funcrec.kernels.cpp.{call}: the windows do not match the tables.\n"
            f"  got   {len(dims)} dims, first {None if first is None else list(first.shape)}\n  need  one "
            f"for each of {len(tables)} tables"
        )
    return (first.to(torch.int64).contiguous(), dims) if dims else None


def _trained(
    tables: Sequence[Tensor], slots: Sequence[Tensor], each: int, keys: tuple[int, int], codes: Sequence, windows
) -> list[int]:  # fmt: skip
    """Return the numbers that `Trained` in csrc/update.h reads.

    There are numbers for each table: the table, `each` slots, the address of the table's keys or 0, its window, its
    code. The function fills them in by columns.
    """
    before = 4 + 3 * each
    width = before + 3 + (len(codes[0]) if codes else 0)
    numbers = _native.tables(tables, width)
    for j in range(each):
        at, mine = 4 + 3 * j, slots[j::each]
        found, is_fit = (
            [*map(Tensor.data_ptr, mine)],
            lambda x, at: x.is_contiguous() and x.is_cpu and not at % x.itemsize,
        )
        numbers[at::width] = found
        numbers[at + 1 :: width] = [_native.DTYPES.get(x.dtype, -1) for x in mine]
        numbers[at + 2 :: width] = [x.numel() if is_fit(x, a) else -1 for x, a in zip(mine, found, strict=True)]
    of_keys, each_bytes = keys
    if of_keys:
        numbers[before::width] = [
            of_keys + each_bytes * i if x.element_size() == 2 else 0 for i, x in enumerate(tables)
        ]
    if windows is None:
        numbers[before + 1 :: width] = numbers[3::width]
    else:
        numbers[before + 1 :: width] = windows[1]
        numbers[before + 2 :: width] = [windows[0].data_ptr() + 8 * i for i in range(len(tables))]
    for j, column in enumerate(zip(*codes, strict=True)):
        numbers[before + 3 + j :: width] = column
    return numbers


def expand(
    d: Sequence[Tensor], rows: Sequence[Tensor], offsets: Sequence[Tensor], weights: Sequence[Tensor],
    segments: Sequence[int], shapes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Return (rows i64[K], grads f[K, D]), the entries of each table in order. Unused places have row -1 and zeros."""
    return _write_out("expand", d, rows, offsets, weights, segments, shapes)


def coalesce(
    d: Sequence[Tensor], rows: Sequence[Tensor], offsets: Sequence[Tensor], weights: Sequence[Tensor],
    segments: Sequence[int], shapes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Return (rows i64[K] ascending, grads f[K, D], count i64[], repeats i64[K]) of each table.

    From place `count` on, rows are -1, and grads and repeats are 0.
    """
    return _write_out("coalesce", d, rows, offsets, weights, segments, shapes)


def _write_out(call: str, d, rows, offsets, weights, segments, shapes) -> list[Tensor]:
    sums, dtype = call == "coalesce", accumulation_dtype(d[0].dtype) if d else torch.float32
    bad, out = array("q", [-1]), []
    numbers = [bad.buffer_info()[0], sums, dtype == torch.float64, len(shapes) // 2]
    terms, num_tables = segments_of(segments), len(shapes) // 2
    inside = [0 <= s.table < num_tables and 0 <= s.rows < len(rows) for s in terms]
    _check_segments(call, -1 if all(inside) else inside.index(False), segments)
    sizes = capacities(terms, rows, num_tables)
    for capacity, num_rows, dim in zip(sizes, shapes[::2], shapes[1::2], strict=True):
        size = min(capacity, num_rows) if sums else capacity
        taken, grads = torch.empty(size, dtype=torch.int64), torch.empty(size, dim, dtype=dtype)
        more = [torch.empty((), dtype=torch.int64), torch.empty(size, dtype=torch.int64)] if sums else []
        numbers += (num_rows, dim, size, taken.data_ptr())
        numbers += (more[0].data_ptr(), more[1].data_ptr()) if sums else (0, 0)
        numbers.append(grads.data_ptr())
        out += [taken, grads, *more]
    numbers_of_terms, kept = _terms(d, rows, offsets, weights, segments)
    _native.call("write_out", numbers + numbers_of_terms)
    _check_segments(call, bad[0], segments)
    del kept
    return out


def _terms(d, rows, offsets, weights, segments) -> tuple[list[int], object]:
    """Return the numbers that `Terms` in csrc/terms.h reads, and the tensors that must outlive the call."""
    d = [_gradient(x) for x in d]
    if len({x.dtype for x in d}) > 1:
        d = [x.to(torch.float64) for x in d]
    rows, offsets = [x.contiguous() for x in rows], [x.contiguous() for x in offsets]
    weights = [(x if x.dtype == torch.float64 else x.to(torch.float32)).contiguous() for x in weights]
    numbers = [len(d), len(rows), len(offsets), len(weights), len(segments) // 10]
    for x in d:
        numbers += _native.matrix(x)
    for describe, each in ((_native.ints, rows), (_native.bounds, offsets), (_native.reals, weights)):
        for x in each:
            numbers += describe(x)
    numbers += segments
    return numbers, (d, rows, offsets, weights)


def _gradient(x: Tensor) -> Tensor:
    """Return x in f32 or f64 with contiguous rows."""
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    return x if x.dim() != 2 or x.shape[1] < 2 or x.stride(1) == 1 else x.contiguous()


# -- what does not fit -------------------------------------------------------------------------------------------


def _slot_names(call: str, rule: str, hyper: Sequence[float]) -> tuple[str, ...]:
    if rule not in RULES:
        raise ValueError(
            f"funcrec.kernels.cpp.{call}: `rule` is unknown.\n  got   {rule!r}\n  need  one of {list(RULES)}"
        )
    names = RULES[rule].hyper
    if len(hyper) != len(names):
        raise ValueError(
            f"funcrec.kernels.cpp.{call}: `hyper` does not match rule {rule!r}.\n  got   "
            f"{len(hyper)} numbers\n  need  {names}"
        )
    return RULES[rule].slots_with(hyper)


def _fail_slot(call: str, tables: Sequence[Tensor], slots: Sequence[Tensor], names: Sequence[str], number: int) -> None:
    table, name = divmod(number, MOST_SLOTS)
    slot, of = slots[table * len(names) + name], tables[table]
    raise ValueError(
        f"funcrec.kernels.cpp.{call}: slot {names[name]!r} of table {table} does not fit.\n"
        f"  got   {slot.dtype}{list(slot.shape)}, strides {slot.stride()}\n"
        f"  need  {accumulation_dtype(of.dtype)}, contiguous, a number per row or per element of "
        f"{list(of.shape)} as the rule has it"
    )


def _fail_window(call: str, table: Tensor, first: int, dim: int) -> None:
    raise ValueError(
        f"funcrec.kernels.cpp.{call}: a table's columns are not among those of its gradients.\n"
        f"  got   columns [{first}, {first + table.shape[1]}) of gradients with {dim}\n  need  0 <= first, "
        f"first + {table.shape[1]} <= {dim}"
    )


def _check_segments(call: str, bad: int, segments: Sequence[int]) -> None:
    if bad >= 0:
        (segment,) = segments_of(segments[10 * bad : 10 * bad + 10])
        raise ValueError(
            f"funcrec.kernels.cpp.{call}: segment {bad} does not fit its tensors.\n  got   {segment}\n"
            "  need  tensors and columns that are there, d with num_bags rows, first_bag + num_bags + 1 offsets,\n"
            "        a weight for every row, and as many rows as entries"
        )

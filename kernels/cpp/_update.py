"""Sum cotangents of tables by row. Write out the sums (expand, coalesce), or use them at once in an update.

w[row] ← rule(w[row], Σ gradients of the row, slots[row])        for every row that occurs in an entry
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from funcrec.kernels.cpp import _native
from funcrec.kernels.cpp._rules import Generated
from funcrec.kernels.forms import accumulation_dtype, capacities, segments_of
from funcrec.kernels.rules import RULES
from funcrec.kernels.stacks import segments_of_members
from torch import Tensor

NUMBER_OF = {name: i for i, name in enumerate(RULES)}  # csrc/formulas.h has the same numbers
_GENERATED, MOST_SLOTS = len(RULES), 8  # csrc/formulas.h and csrc/rules.h have the same numbers


def fused_update_(
    tables: Sequence[Tensor], slots: Sequence[Tensor], d: Sequence[Tensor], rows: Sequence[Tensor],
    offsets: Sequence[Tensor], weights: Sequence[Tensor], segments: Sequence[int], lr: Tensor, step: Tensor,
    key: Tensor | None, rule: str, hyper: Sequence[float], first: Tensor | None = None, dims: Sequence[int] = (),
    numbers: Tensor | None = None,
) -> None:  # fmt: skip
    """Apply `rule` (a name in rules.RULES) to every row that occurs in an entry, in place.

    Tables and slots may be stacks of K members. Then each other tensor may be a stack, too, or serve all members.
    Entries are grouped by row once for all members that share them.

    slots: each table's slots in the rule's order, one table after the other.
    lr: f64[]. step: i64[], the number of earlier steps.
    key: i64[T, S + 1, 4], which rounds 16-bit tables at random, as in `ops.fused_update`. None rounds to nearest.
    first, dims: i64[T], and the number of columns of each table's gradients, as in `ops.fused_update`; None and () if
      the tables hold whole rows.
    numbers: f64[H], in place of `hyper`; None for `hyper`. Slots are those of `hyper`.
    """
    call = "fused_update_"
    names = slot_names(call, rule, hyper)
    if len(slots) != len(tables) * len(names):
        raise ValueError(
            f"funcrec.kernels.cpp.{call}: `slots` does not match the tables.\n  got   {len(slots)} tensors\n"
            f"  need  {names} for each of {len(tables)} tables"
        )
    k, terms = _members_of(tables), (d, rows, offsets, weights, segments)
    own, windows = _sets(call, rule, hyper, numbers, k), windows_of(call, tables, first, dims, k)
    _update(call, tables, slots, terms, (lr, step, key), (NUMBER_OF[rule], *own), names, windows=windows, k=k)


def generated_update_(
    tables: Sequence[Tensor], slots: Sequence[Tensor], d: Sequence[Tensor], rows: Sequence[Tensor],
    offsets: Sequence[Tensor], weights: Sequence[Tensor], segments: Sequence[int], lr: Tensor, step: Tensor,
    key: Tensor | None, rules: Sequence[Generated],
) -> None:  # fmt: skip
    """Run `fused_update_` with a rule for each table, which may be a stack.

    `generate` made each rule for the table's dim and dtype. All rules have the same number of slots.
    """
    names = tuple(str(i) for i in range(len(rules[0].sizes))) if rules else ()
    codes, kept = [], []
    for table, rule in zip(tables, rules, strict=True):
        if (table.shape[-1], accumulation_dtype(table.dtype)) != (rule.dim, rule.dtype):
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
    own = _GENERATED, 1, array("d")
    _update("generated_update_", tables, slots, terms, (lr, step, key), own, names, codes, k=_members_of(tables))
    del kept


def _update(
    call: str, tables, slots, terms: tuple[Any, Any, Any, Any, Any], when, rule, names: Sequence[str], codes=(),
    windows: Any = None, k: int | None = None,
) -> None:  # fmt: skip
    """Call `fused_update` in csrc/update.h with the numbers that it reads.

    when: (lr, step, key). rule: (its number, how many sets of hyper-parameters, f64 of all sets one after the other).
    names: the names of a table's slots. k: the number of members, or None without stacks.
    """
    lr, step, key = when
    lr, step = lr.to(torch.float64), step.to(torch.int64)
    if k is not None:
        _check_stacks(call, k, tables, slots, terms)
        lr, step = lr.contiguous(), step.contiguous()
        key = None if key is None else key.flatten(0, 1) if key.dim() == 4 else key.repeat(k, *[1] * (key.dim() - 1))
    key = None if key is None else key.contiguous()
    _check_numbers(call, (lr, step), key, (1 if k is None else k) * len(tables), names, 1 if k is None else k)
    if k == 0:
        return
    # From here on, tables and slots are those of the first member, and moves are bytes from a member to the next.
    moves = [x.stride(0) * x.itemsize for x in (*tables, *slots)] if k else []
    if k:
        tables, slots = [x[0] for x in tables], [x[0] for x in slots]
    bad, members = array("q", [-1, -1]), (k, moves)
    numbers, segments, kept = described_update(
        tables, slots, terms, (lr, step, key), rule, len(names), codes, windows, members, bad
    )
    _native.call("fused_update", numbers)
    _check_segments(call, bad[0], segments)
    if bad[0] < -1:
        table, name = divmod(-2 - bad[0], MOST_SLOTS)
        _fail_slot(call, tables, slots, names, table % len(tables), name)
    if bad[1] >= 0:
        t = bad[1] % len(tables)
        _fail_window(call, tables[t], windows[0].reshape(-1, len(tables))[:, t].tolist(), windows[1][t])
    del kept


def described_update(
    tables, slots, terms: tuple[Any, Any, Any, Any, Any], when, rule, num_slots: int, codes: Sequence, windows: Any,
    members_moves: tuple[int | None, list[int]], bad: array,
) -> tuple[list[int], Sequence[int], tuple]:  # fmt: skip
    """Return the numbers that `fused_update` reads, the segments, and what must outlive the call.

    num_slots: those of a table. bad: where the call writes which of its arguments do not fit.
    """
    (lr, step, key), (number, sets, hyper), (k, moves) = when, rule, members_moves
    members = 1 if k is None else k
    num_tables = members * len(tables)
    keys = (0, 0) if key is None else (key.data_ptr(), key[0].nbytes if num_tables else 0)
    each = len(hyper) // sets
    numbers = [bad.buffer_info()[0], number, members, lr.numel(), lr.data_ptr(), step.numel(), step.data_ptr()]
    numbers += (sets, each, _address(hyper), num_slots, num_tables)
    trained = _trained(tables, slots, num_slots, keys, codes, windows)
    numbers += _of_members(trained, tables, num_slots, keys, windows, k, moves) if k else trained
    numbers_of_terms, segments, kept = _terms(*terms, k, len(tables))
    return numbers + numbers_of_terms, segments, (kept, hyper)


def _members_of(tables: Sequence[Tensor]) -> int | None:
    """Return the number of members, or None if tables are not stacks. `_check_stacks` checks the other tensors."""
    return tables[0].shape[0] if tables and tables[0].dim() == 3 else None


def _sets(call: str, rule: str, hyper: Sequence[float], numbers: Tensor | None, k: int | None) -> tuple:
    """Return (how many sets of hyper-parameters, f64 of all sets one after the other)."""
    if numbers is None:
        return 1, array("d", hyper)
    own, shapes = numbers.to(torch.float64).contiguous(), [(len(hyper),), *([] if k is None else [(k, len(hyper))])]
    if own.shape not in shapes or not own.is_cpu:
        got, need = f"{list(own.shape)} on {own.device}", f"{' or '.join(f'f64{list(s)}' for s in shapes)} on cpu"
        _native.fail(call, "`numbers` does not match the rule and the members.", got, need, "hyper")
    slots_with = RULES[rule].slots_with
    if RULES[rule].optional and any(slots_with(x) != slots_with(hyper) for x in own.view(-1, len(hyper)).tolist()):
        need = f"0 for {[name for _, name in RULES[rule].optional]} where `hyper` has 0, and nowhere else"
        _native.fail(call, "`numbers` stands for other slots than `hyper`.", own.tolist(), need, "another `hyper`")
    return own.numel() // len(hyper), own.flatten()


def _address(numbers: array | Tensor) -> int:
    return numbers.buffer_info()[0] if isinstance(numbers, array) else numbers.data_ptr()


def _of_members(
    numbers: list[int], tables: Sequence[Tensor], each: int, keys: tuple[int, int], windows, k: int, moves: list[int]
) -> list[int]:  # fmt: skip
    """Return the numbers of `_trained` for the tables of all members, from those of the first member.

    moves: the bytes from a member to the next of each table, then of each slot.
    """
    width, count, before = len(numbers) // len(tables), len(tables), 4 + 3 * each
    by = {0: moves[:count]} | {4 + 3 * j: moves[count + j :: each] for j in range(each)}
    by[before] = [keys[1] * count if x else 0 for x in numbers[before::width]]
    by[before + 2] = [8 * count if windows is not None and windows[0].dim() > 1 else 0] * count
    out = numbers * k
    for column, own in by.items():
        out[column::width] = [x + i * y for i in range(k) for x, y in zip(numbers[column::width], own, strict=True)]
    return out


def _check_stacks(call: str, k: int, tables, slots, terms) -> None:
    """Raise unless tables and slots are stacks of K members that share no memory, and all other stacks have K members.

    The kernel computes from the first member where the other members lie."""
    others = [x for rank, xs in zip((2, 1, 1, 1), terms, strict=False) for x in xs if x.dim() > rank]
    if any(x.dim() != 3 for x in tables) or any(x.dim() < 2 or x.shape[0] != k for x in (*tables, *slots, *others)):
        got = sorted({tuple(x.shape) for x in (*tables, *slots, *others)})
        _native.fail(call, "stacks have different numbers of members.", got, f"[{k}, ...]", "torch.func.vmap")
    for x in (*tables, *slots):
        if k > 1 and x.numel() and x.stride(0) < x.numel() // k:
            got = f"strides {x.stride()} of shape {tuple(x.shape)}"
            _native.fail(call, "members of a stack share memory.", got, "one member after the other", "x.contiguous()")


def _check_numbers(
    call: str, numbers: Sequence[Tensor], key: Tensor | None, num_tables: int, names: Sequence[str], members: int
) -> None:  # fmt: skip
    if not all((x.numel() == 1 or x.shape == (members,)) and x.is_cpu for x in numbers):
        got = [f"{list(x.shape)} on {x.device}" for x in numbers]
        need = f"f64[] and i64[] on cpu{f', or [{members}]' * (members > 1)}"
        _native.fail(call, "`lr` or `step` is not one number.", got, need, "torch.tensor(lr)")
    for x in numbers:
        _native.check(x, x.dim(), (torch.float64, torch.int64))  # the kernel reads the address
    if key is not None and not fits_keys(key, num_tables):
        got, need = f"{key.dtype}{list(key.shape)} on {key.device}", f"i64[{num_tables}, S + 1, 4] on cpu"
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


def windows_of(
    call: str, tables: Sequence[Tensor], first: Tensor | None, dims: Sequence[int], k: int | None = None
):  # fmt: skip
    """Return (first, dims) if tables hold only some columns of rows, else None."""
    shapes = (len(tables),), (k, len(tables))
    if len(dims) not in (0, len(tables)) or (len(dims) > 0 and (first is None or first.shape not in shapes)):
        raise ValueError(
            f"funcrec.kernels.cpp.{call}: the windows do not match the tables.\n"
            f"  got   {len(dims)} dims, first {None if first is None else list(first.shape)}\n  need  one "
            f"for each of {len(tables)} tables"
        )
    return (first.to(torch.int64).contiguous(), dims) if dims and first is not None else None


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
    numbers_of_terms, _, kept = _terms(d, rows, offsets, weights, segments)
    _native.call("write_out", numbers + numbers_of_terms)
    _check_segments(call, bad[0], segments)
    del kept
    return out


def _terms(
    d, rows, offsets, weights, segments, k: int | None = None, num_tables: int = 0
) -> tuple[list[int], Sequence[int], tuple]:
    """Return the numbers that `Terms` in csrc/terms.h reads, the segments, and the tensors that must outlive the call.

    k: the number of members, or None without stacks. num_tables: the number of a member's tables.
    """
    d = [_gradient(x) for x in d]
    if len({x.dtype for x in d}) > 1:
        d = [x.to(torch.float64) for x in d]
    rows, offsets = [x.contiguous() for x in rows], [x.contiguous() for x in offsets]
    weights = [(x if x.dtype == torch.float64 else x.to(torch.float32)).contiguous() for x in weights]
    terms, counts, described = (d, rows, offsets, weights), [], []
    if k:
        segments = segments_of_members(terms, segments, k, num_tables)
    forms = (_native.matrix, 2), (_native.ints, 1), (_native.bounds, 1), (_native.reals, 1)
    for (describe, rank), xs in zip(forms, terms, strict=True):
        counts.append(len(xs))
        for x in xs:
            if not k or x.dim() == rank:
                described += describe(x)
                continue
            at, *form = describe(x[0])
            described += [n for i in range(k) for n in (at + i * x.stride(0) * x.itemsize, *form)]
            counts[-1] += k - 1
    return [*counts, len(segments) // 10, *described, *segments], segments, terms


def _gradient(x: Tensor) -> Tensor:
    """Return x in f32 or f64 with contiguous rows."""
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    return x if x.dim() < 2 or x.shape[-1] < 2 or x.stride(-1) == 1 else x.contiguous()


# -- what does not fit -------------------------------------------------------------------------------------------


def slot_names(call: str, rule: str, hyper: Sequence[float]) -> tuple[str, ...]:
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


def _fail_slot(
    call: str, tables: Sequence[Tensor], slots: Sequence[Tensor], names: Sequence[str], table: int, name: int
) -> None:  # fmt: skip
    slot, of = slots[table * len(names) + name], tables[table]
    raise ValueError(
        f"funcrec.kernels.cpp.{call}: slot {names[name]!r} of table {table} does not fit.\n"
        f"  got   {slot.dtype}{list(slot.shape)}, strides {slot.stride()}\n"
        f"  need  {accumulation_dtype(of.dtype)}, contiguous, a number per row or per element of "
        f"{list(of.shape)} as the rule has it"
    )


def _fail_window(call: str, table: Tensor, firsts: list[int], dim: int) -> None:
    first = next(x for x in firsts if not 0 <= x <= dim - table.shape[1])
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

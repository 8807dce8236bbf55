"""Calls of `fused_update_` whose tensors C++ describes (`_planned`): in Python, that takes as long as 10,000 rows."""

import struct
from array import array
from collections.abc import Sequence

import torch
from funcrec.kernels.cpp._native import REALS as REALS_OF
from funcrec.kernels.cpp._planned import (
    FLAT,
    INSIDE,
    INTS,
    MATRIX,
    NUMBER,
    REALS,
    ROWS,
    Plan,
    Slot,
    are_usual,
    find,
    forgotten,
    plan_of,
    ran,
)  # fmt: skip
from funcrec.kernels.cpp._update import NUMBER_OF, described_update, slot_names
from torch import Tensor

CALL = "fused_update_"


def planned_fused_update_(
    tables: Sequence[Tensor], slots: Sequence[Tensor], d: Sequence[Tensor], rows: Sequence[Tensor],
    offsets: Sequence[Tensor], weights: Sequence[Tensor], segments: Sequence[int], lr: Tensor, step: Tensor,
    key: Tensor | None, rule: str, hyper: Sequence[float], first: Tensor | None = None, dims: Sequence[int] = (),
    numbers: Tensor | None = None,
) -> tuple[None] | None:  # fmt: skip
    """Run `fused_update_` and return (None,), or return None without running it if an argument is unusual."""
    if not (tables and d and key is None and first is None and numbers is None and not dims):
        return None
    terms, own = (d, rows, offsets, weights), array("d", hyper)
    forms = tables[0].dtype, tables[0].shape[-1:], d[0].shape[-1:], weights[0].dtype if weights else None
    static = (len(tables), len(slots), *map(len, terms), rule, own.tobytes(), forms, segments)
    plan = find(_plans, static, lambda *_: _plan(static, tables, slots, terms, segments, (lr, step), rule, own))
    if plan is None:
        return None
    if ran(plan, [lr, step, *tables, *slots, *d, *rows, *offsets, *weights]):
        return (None,)
    forgotten(_plans, plan)
    return None


_plans: list[Plan] = []


def _plan(
    static: tuple, tables: Sequence[Tensor], slots: Sequence[Tensor], terms: tuple, segments: Sequence[int],
    when: tuple[Tensor, Tensor], rule: str, hyper: array,
) -> Plan | None:  # fmt: skip
    """Return the plan of an update of matrices, rounded to nearest, whose rule has one set of hyper-parameters.

    terms: (d, rows, offsets, weights). when: (lr, step).
    """
    names, by_rank = slot_names(CALL, rule, hyper), ((0, when), (2, tables), *zip((2, 1, 1, 1), terms, strict=True))
    every = [*slots, *(x for _, xs in by_rank for x in xs)]
    if not are_usual(every) or any(x.dim() != rank for rank, xs in by_rank for x in xs):
        return None
    of_floats = {x.dtype for x in terms[0]}, {x.dtype for x in terms[3]}
    if any(len(x) > 1 or not x <= {*REALS_OF} for x in of_floats) or len(slots) != len(tables) * len(names):
        return None
    if [x.dtype for x in when] != [torch.float64, torch.int64]:
        return None
    bad, each, of_rule = array("q", [-1, -1]), len(names), (NUMBER_OF[rule], 1, hyper)
    numbers, _, _ = described_update(
        tables, slots, (*terms, segments), (*when, None), of_rule, each, (), None, (None, []), bad
    )
    full = [0, *numbers, *struct.unpack(f"{len(hyper)}q", hyper.tobytes()), *bad]
    width, at = 7 + 3 * each, 13 + (7 + 3 * each) * len(tables) + 5  # numbers of a table; the first of `terms`
    held = [Slot(1, INSIDE, len(full) - 2), Slot(10, INSIDE, len(full) - 2 - len(hyper))]
    held += [Slot(5, NUMBER, 0, torch.float64), Slot(7, NUMBER, 0, torch.int64)]
    held += [Slot(13 + width * i, ROWS, x.shape[1], x.dtype) for i, x in enumerate(tables)]
    held += [Slot(17 + width * (i // each) + 3 * (i % each), FLAT, 0, x.dtype) for i, x in enumerate(slots)]
    # The call itself compares the lengths of weights with those of rows.
    for xs, form, room, least in zip(terms, (MATRIX, INTS, INTS, REALS), (5, 3, 3, 3), (0, 0, 1, 0), strict=True):
        size = lambda x, form=form, least=least: x.shape[1] if form == MATRIX else least
        held += [Slot(at + room * i, form, size(x), x.dtype) for i, x in enumerate(xs)]
        at += room * len(xs)
    own = segments if type(segments) is tuple else [*segments]  # a copy: a caller may change its list
    return plan_of((*static[:-1], own), "fused_update", full, held, verdicts=2)

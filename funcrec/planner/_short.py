"""Explains why no plan fits: which memory or constraint is short, by how much, and the nearest change that suffices.

the least memory = min over plans of Σ_k factors_k · M_k; no plan needs less than the bound on this minimum
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from funcrec.core import fail
from funcrec.planner._constraints import TableConstraint
from funcrec.planner._options import Ground, Way, packing_of
from funcrec.planner._packing import Packing
from funcrec.planner._solve import solve
from funcrec.tables import TableConfig

MOST_TRIED = 40  # the most constraints that are lifted, one at a time


class NoPlanError(ValueError):
    """No plan fits into memory. The input itself is valid."""


def fail_short(
    call: str,
    packing: Packing,
    groups: Mapping[str, Sequence[TableConfig]],
    found: Mapping[str, list[Way]],
    told: Mapping[str, TableConstraint],
    free: Callable[[str], list[Way]],
    ground: Ground,
    limit: int,
    share: float,
    beside: Sequence[Way] = (),
) -> NoReturn:
    """Raise the error of `plan`: no plan fits."""
    for name, item in zip(groups, packing.items, strict=False):
        if not item.options:
            _fail_no_option(call, [t.name for t in groups[name]], found, told)
    least, is_proved = least_bytes(packing)
    if least <= limit:
        _fail_disk(call, packing)
    hint = f"memory_bytes={int(least * 1.001 / share) + 1}, more ranks, or a narrower dtype"
    constrained = [n for n in told if told[n] != TableConstraint()]
    if constrained:
        lifted = lambda names: packing_of(
            groups, {n: free(n) if n in names else w for n, w in found.items()}, ground, limit, beside
        )
        free_least, _ = least_bytes(lifted(constrained))
        if free_least <= limit:
            one = next((n for n in constrained[:MOST_TRIED] if least_bytes(lifted([n]))[0] <= limit), None)
            which = f"of table {one!r}" if one else f"of tables {constrained[:6]}"
            hint = f"lift the constraints {which} (then {size_text(free_least)} would do), or {hint}"
    found_it = "" if is_proved else ", in the leanest plan that was found"
    need = f"{size_text(least)} on every rank{found_it}: {size_text(least - limit)} more"
    if least <= limit:
        need = f"a plan below it: parts that are too large to lie side by side; the least sum is {size_text(least)}"
        hint = "a higher `effort`, or more memory"
    got = f"{size_text(limit)} on a rank, its reserve apart"
    fail(call, "the tables do not fit into memory.", got=got, need=need, hint=hint, kind=NoPlanError)


def _fail_no_option(
    call: str, names: list[str], found: Mapping[str, list[Way]], told: Mapping[str, TableConstraint]
) -> None:
    none = [n for n in names if not found[n]]
    if none:
        c = told[none[0]]
        set_ = [
            f"{k}={getattr(c, k)!r}"
            for k in ("kinds", "min_partition", "ranks")
            if getattr(c, k) != getattr(TableConstraint(), k)
        ]
        need = "one at least that the mesh, the optimizer and the constraints allow"
        hint = (
            "`ranks` go with table_wise, and columns with a min_partition of at most half the table: lift one of them"
        )
        got = ", ".join(set_) or "no axis"
        fail(call, f"the constraints of table {none[0]!r} leave no placement.", got=got, need=need, hint=hint)
    got = "; ".join(f"{n}: {sorted({w.key[0] for w in found[n]})}" for n in names[:4])
    need, hint = "one kind with equally many blocks on the same places", "the same `kinds` and `ranks` for each"
    fail(call, f"tables that go together have no placement in common: {names}.", got=got, need=need, hint=hint)


def _fail_disk(call: str, packing: Packing) -> None:
    """Raise an error if every plan that was found within memory needs a larger disk."""
    for i, cap in enumerate(packing.caps[1:], 1):
        others = (*packing.caps[:i], *packing.caps[i + 1 :])
        solved = solve(packing._replace(weights=cap.factors, caps=others))
        if solved.choices is not None and solved.objective > cap.limit:
            need = f"{size_text(solved.objective)} on every rank's disk, for the stores of tables larger than memory"
            hint = f"disk_bytes={int(solved.objective * 1.001) + 1}, more ranks, or more memory"
            fail(
                call,
                "the stores do not fit on the disk.",
                got=size_text(cap.limit),
                need=need,
                hint=hint,
                kind=NoPlanError,
            )


def least_bytes(packing: Packing) -> tuple[float, bool]:
    """Return (the least memory that a plan takes on a rank, whether this minimum is proved)."""
    cap = packing.caps[0]
    solved = solve(packing._replace(weights=cap.factors, caps=()))
    return solved.objective, solved.gap < 1e-3


def size_text(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if abs(size) >= 1e9 else f"{size / 1e6:.3g} MB"

"""Learns the rates of hardware from measured steps: least squares over runs whose plans differ.

    seconds of a step = rest + own · (lookup + update) + exchange · (exchange)

The seconds on the right are a plan's estimates, each of its slowest rank. `rest` is all that the planner does not
estimate, above all the dense part. The factors `own` and `exchange` say how much slower the hardware is than the
estimates say. Shapes: n runs, k of the three numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from funcrec.core import Problem, check, fail, sure
from funcrec.planner._hardware import Hardware
from funcrec.sharding import Plan

CALL = "funcrec.Hardware.from_run"
COLUMN = "steps_per_s"
SEPARATE = 1e-3  # the share of a column that no other column may explain, at least
WHAT = {"own": "memory_bytes_per_s and launch_s", "exchange": "the links and their latencies", "rest": "the rest"}


def learnt(
    runs: Sequence[tuple[Sequence[Mapping[str, Any]], Plan]], hardware: Hardware, rest_s: float | None
) -> Hardware:
    """Return the hardware with the rates that the runs show. Raise ValueError if they show less than all of them."""
    check(CALL, run_problems(runs, hardware))
    own, exchange = np.array([_parts(plan) for _, plan in runs]).T
    measured = np.array([1 / median(e[COLUMN] for e in history) for history, _ in runs])
    columns = {n: x for n, x in (("own", own), ("exchange", exchange)) if x.any()}
    if rest_s is None:
        columns["rest"] = np.ones(len(runs))
    else:
        if not (measured > rest_s).all():
            got, need = f"rest_s={rest_s}, steps of {_ms(measured)}", "less than each step"
            fail(CALL, "a step is faster than `rest_s`.", got=got, need=need)
        measured = measured - rest_s
    if not columns.keys() & {"own", "exchange"}:
        need = "plans of tables that a step reads"
        fail(CALL, "the plans estimate no time.", got="0 s in every run", need=need)
    _check_told(columns)
    # relative errors count: a step of a millisecond says as much as one of a second
    matrix = np.stack(list(columns.values()), 1) / measured[:, None]
    found = dict(zip(columns, np.linalg.lstsq(matrix, np.ones(len(runs)), rcond=None)[0].tolist(), strict=True))
    for name in (n for n in ("own", "exchange") if n in found and not found[n] > 0):
        got = f"a factor of {found[name]:.3g}; the estimates are {_ms(columns[name])}, the steps {_ms(measured)}"
        need, hint = "steps that grow with the estimate", "runs that differ only in their plans, or another `rest_s`"
        fail(CALL, f"the runs contradict the estimates of {WHAT[name]}.", got=got, need=need, hint=hint)
    slower, links = found.get("own", 1.0), found.get("exchange", 1.0)
    return replace(
        hardware,
        name="learnt",
        memory_bytes_per_s=hardware.memory_bytes_per_s / slower,
        launch_s=hardware.launch_s * slower,
        link_bytes_per_s=hardware.link_bytes_per_s / links,
        host_bytes_per_s=hardware.host_bytes_per_s / links,
        link_latency_s=hardware.link_latency_s * links,
        host_latency_s=hardware.host_latency_s * links,
    )


def _parts(plan: Plan) -> tuple[float, float]:
    """Return (lookup and update, exchange) of a plan's slowest ranks, in seconds."""
    most = lambda name: max(getattr(r, name) for r in sure(plan.report).ranks)
    return most("lookup_s") + most("update_s"), most("exchange_s")


def _check_told(columns: Mapping[str, np.ndarray]) -> None:
    """Raise an error if the other columns explain a column: then the runs say nothing about it."""
    for name, x in columns.items():
        others = np.stack([o / np.linalg.norm(o) for n, o in columns.items() if n != name] or [np.zeros_like(x)], 1)
        left = x - others @ np.linalg.lstsq(others, x, rcond=None)[0]
        if np.linalg.norm(left) <= SEPARATE * np.linalg.norm(x):
            got = f"{len(x)} runs with " + "; ".join(f"{n} {_ms(o)}" for n, o in columns.items() if n != "rest")
            need = f"{len(columns)} runs or more, whose estimates are not in one proportion"
            hint = "other placements of the same tables (fr.plan(placements=...)), or another batch size"
            hint += "" if "rest" not in columns else ", or rest_s= the seconds of a step without tables"
            fail(CALL, f"the runs say nothing about {WHAT[name]}.", got=got, need=need, hint=hint)


def _ms(seconds: np.ndarray) -> str:
    return ", ".join(f"{x * 1e3:.4g}" for x in seconds[:6]) + (", .." if len(seconds) > 6 else "") + " ms"


# -- validators --------------------------------------------------------------------------------------------------


def run_problems(runs: Sequence[tuple[Sequence[Mapping[str, Any]], Plan]], hardware: Hardware) -> Iterator[Problem]:
    """Report runs without steps, and plans without an estimate, or with one for other hardware."""
    if not runs:
        yield Problem("`runs` is empty.", "no run", "one run or more", "[(run.history, plan)]")
    for i, (history, plan) in enumerate(runs):
        path = f"`runs[{i}]`"
        rates = [e.get(COLUMN) for e in history]
        if not rates:
            yield Problem(f"{path} has no epoch.", "an empty history", "the history of a run of fr.fit")
        for j, x in enumerate(rates):
            if isinstance(x, bool) or not isinstance(x, int | float) or not (isfinite(x) and x > 0):
                need = "a number above 0: epochs of two steps or more"
                yield Problem(f"{path} has an epoch without a speed.", f"history[{j}][{COLUMN!r}] = {x!r}", need)
        if plan.report is None:
            hint = "fr.plan(..., placements=plan)"
            yield Problem(f"{path} has a plan without an estimate.", "a plan made by hand", "a plan of fr.plan", hint)
        elif plan.report.hardware != hardware.name:
            got, need = f"an estimate for {plan.report.hardware!r}", f"one for {hardware.name!r}"
            yield Problem(f"{path} has a plan for other hardware.", got, need, "hardware= that of the plans")

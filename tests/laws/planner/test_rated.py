"""Placements made by hand, rated; hardware learnt from steps."""

import functools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.refused import assert_refused

import funcrec as fr

TC, FC = fr.TableConfig, fr.FeatureConfig
TABLES = (TC("item", 30_000, 64), TC("user", 3_001, 7), TC("tiny", 3, 64))
FEATURES = (FC("clicked", table="item"), FC("seen", table="item", pooling="none"), FC("user", table="user"),
    FC("tiny", table="tiny", pooling="mean"))  # fmt: skip
USED = {"item": fr.TableConstraint(pooling_factor={"clicked": 20.0, "seen": 5.0}, zipf=1.05)}
HARDWARE = fr.Hardware("mine", 10**9, 1e10, 1e9, 5e8, 2, 2e-4, 3e-4, 1.6e-4)
MESHES = ({"model": 1}, {"model": 3}, {"node": 2, "local": 2})


def planned(mesh, tables=TABLES, features=FEATURES, constraints=USED, hardware=HARDWARE, **kwargs):
    return fr.plan(tables, features, mesh, batch_size=256, constraints=constraints, hardware=hardware, **kwargs)


@pytest.mark.parametrize("how", [{}, {"dedup": True, "optimizer": fr.optim.rowwise_adagrad()}], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_plan_is_rated_as_it_was_found(mesh, how):
    """A plan of the search, rated, has the estimates of the search: time, memory, each rank, each table, the bound."""
    found = planned(mesh, **how)
    rated = planned(mesh, placements=found, **how)
    assert rated == found and rated.report.seconds == pytest.approx(found.report.seconds, rel=1e-12)
    assert rated.report.bound_s == pytest.approx(found.report.bound_s, rel=1e-6)
    for a, b in zip(rated.report.ranks, found.report.ranks, strict=True):
        assert a == pytest.approx(b, rel=1e-12)
    for a, b in zip(rated.report.tables, found.report.tables, strict=True):
        assert a[:5] == b[:5] and a.seconds == pytest.approx(b.seconds, rel=1e-12)
    assert planned(mesh, placements=dict(found.placements), **how) == found


@st.composite
def placements(draw):
    """Any placements of the tables on {"node": 2, "local": 2}: fewer kinds when they shrink."""
    axes, out = ("node", "local"), {}
    for t in TABLES:
        ranks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        pair = [r % 2 for r in ranks[:1]]
        out[t.name] = draw(st.sampled_from([
            fr.replicated(), fr.row_wise(axes), fr.row_wise("local"), fr.table_wise(axes, rank=ranks[0]),
            fr.table_wise("node", rank=pair[0]), fr.column_wise(axes, ranks=ranks), fr.column_wise("local"),
            fr.table_row_wise(axes, rank=pair[0]), fr.table_column_wise(axes, rank=pair[0]), fr.grid(axes),
            fr.grid(axes, ranks=pair),
        ]))  # fmt: skip
    return out


@given(placements())
@settings(max_examples=6, deadline=None)
def test_no_placements_are_below_the_bound(made):
    """Any placements are rated as they are given, not below the bound, and the sum of the slowest ranks' phases is the
    time of a step."""
    mesh = {"node": 2, "local": 2}
    rated = planned(mesh, placements=made)
    assert dict(rated.placements) == made
    assert rated.report.bound_s <= rated.report.seconds and 0 <= rated.gap < 1
    assert len({r.bytes for r in rated.report.ranks}) == 1
    top = lambda name: max(getattr(r, name) for r in rated.report.ranks)
    assert rated.report.seconds == pytest.approx(sum(map(top, ("lookup_s", "exchange_s", "update_s"))), rel=1e-9)


def test_placements_that_do_not_fit_name_the_ranks():
    """Placements beyond the memory are refused. The error names the fullest ranks and their tables, largest first, and
    the memory that is short; with that memory they are rated."""
    mesh = {"model": 4}
    made = {"item": fr.table_wise("model", rank=2), "user": fr.table_wise("model", rank=1), "tiny": fr.replicated()}
    with pytest.raises(ValueError, match="the placements do not fit into memory") as caught:
        planned(mesh, placements=made, memory_bytes=10**6)
    assert re.search(r"rank 2 has [\d.]+ MB: 'item' [\d.]+ MB", str(caught.value))
    assert caught.value.args[0].index("rank 2 has") < caught.value.args[0].index("rank 1 has")
    short = re.search(r"need .*: ([\d.]+) MB less", str(caught.value))
    need = (10**6 * 0.85 + float(short[1]) * 1e6) / 0.85
    assert planned(mesh, placements=made, memory_bytes=int(need * 1.01)).report.seconds > 0
    with pytest.raises(ValueError):
        planned(mesh, placements=made, memory_bytes=int(need * 0.98))


def test_cold_tables_are_rated_with_their_stores():
    """On hardware with a disk, rated placements of a table larger than memory keep a part of its rows in memory: the
    share of the constraint, or one that the search chooses. Without a disk they are refused."""
    tables, features = (TC("big", 2_000_000, 64),), (FC("big", table="big"),)
    disk = replace(HARDWARE, memory_bytes=3 * 10**8, disk_bytes=10**12, disk_records_per_s=1e5)
    made, own = {"big": fr.row_wise("model")}, {"big": fr.TableConstraint(zipf=1.1)}
    call = lambda hardware, own: planned({"model": 2}, tables, features, own, hardware, placements=made)
    rated = call(disk, own)
    assert rated["big"] == made["big"] and 0 < rated.cached["big"] < 2_000_000
    fixed = call(disk, {"big": fr.TableConstraint(zipf=1.1, in_memory=0.1)})
    assert fixed.cached["big"] == 200_064 and fixed.report.seconds >= rated.report.seconds
    with pytest.raises(ValueError, match="the placements do not fit into memory"):
        call(replace(disk, disk_bytes=0, disk_records_per_s=0.0), own)


def test_vocabularies_are_rated_as_the_plan_cuts_them():
    """A rated Plan keeps its buckets; of placements alone the search chooses them."""
    tables, features = (TC("item", 100_000, 16),), (FC("item", table="item"),)
    own, made = {"item": fr.TableConstraint(vocabulary="items", pooling_factor=50.0)}, {"item": fr.row_wise("model")}
    call = lambda p: planned({"model": 4}, tables, features, own, placements=p)
    whole, cut, free = call(fr.Plan(made)), call(fr.Plan(made, buckets="model")), call(made)
    assert (whole.buckets, cut.buckets) == ((), ("model",))
    assert free.report.seconds == pytest.approx(min(whole.report.seconds, cut.report.seconds), rel=1e-9)


WHOLE = {"item": fr.replicated(), "user": fr.replicated(), "tiny": fr.replicated()}


@pytest.mark.parametrize(
    ("made", "more", "part"),
    [
        ({"item": fr.replicated()}, {}, "lacks table"),
        (WHOLE | {"x": fr.replicated()}, {}, "does not exist"),
        (WHOLE | {"item": fr.row_wise("x")}, {}, "an axis that the mesh lacks"),
        (WHOLE | {"item": fr.table_wise("model", rank=9)}, {}, "a rank that does not exist"),
        (fr.Plan(WHOLE, "data"), {}, "not those of `placements`"),
        (WHOLE | {"item": fr.row_wise("data")}, {"replicas": "data"}, "train apart"),
        (WHOLE, {"constraints": {"item": {"kinds": ["row_wise"]}}}, "kinds"),
        (WHOLE | {"item": fr.table_wise("model", rank=1)}, {"constraints": {"item": {"ranks": [0]}}}, "outside"),
        (WHOLE | {"item": fr.column_wise("model")}, {"constraints": {"item": {"min_partition": 33}}}, "narrower"),
        (WHOLE | {"item": fr.row_wise("model")}, {"constraints": {n: {"together": "x"} for n in WHOLE}}, "differ"),
        (
            dict.fromkeys(WHOLE, fr.column_wise(("data", "model"), ranks=range(8))),
            {"constraints": {n: {"together": "x"} for n in WHOLE}},
            "other numbers of blocks",
        ),
    ],
)
def test_placements_that_contradict_the_rest_are_refused(made, more, part):
    """Placements that the mesh, the copies or the constraints do not allow are refused, with the reason."""
    call = lambda: planned({"data": 2, "model": 4}, placements=made, **more)
    assert_refused(call, (ValueError, KeyError), "funcrec.plan", part)


# -- hardware from runs ------------------------------------------------------------------------------------------

SHAPES = (
    ({"model": 2}, {"item": fr.row_wise("model"), "user": fr.replicated(), "tiny": fr.replicated()}),
    ({"model": 2}, {"item": fr.table_wise("model", rank=0), "user": fr.replicated(), "tiny": fr.replicated()}),
    ({"model": 2}, dict.fromkeys(WHOLE, fr.column_wise("model"))),
    ({"model": 2}, dict.fromkeys(WHOLE, fr.replicated())),
)


def history(seconds):
    return [{"epoch": 0, "steps_per_s": 1 / seconds, "loss": 0.5}]


@functools.cache
def plan_of(number):
    mesh, made = SHAPES[number]
    return planned(mesh, placements=made)


def slower(own, exchange):
    """Return hardware whose own rates, and whose links, are slower by one factor each."""
    h = HARDWARE
    return replace(
        h, memory_bytes_per_s=h.memory_bytes_per_s / own, launch_s=h.launch_s * own,
        link_bytes_per_s=h.link_bytes_per_s / exchange, host_bytes_per_s=h.host_bytes_per_s / exchange,
        link_latency_s=h.link_latency_s * exchange, host_latency_s=h.host_latency_s * exchange,
    )  # fmt: skip


def assert_learnt(runs, true, rest_s):
    found = fr.Hardware.from_run(runs, hardware=HARDWARE, rest_s=rest_s)
    for name in ("memory_bytes_per_s", "launch_s", "link_bytes_per_s", "host_bytes_per_s", "link_latency_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-5), name
    assert (found.memory_bytes, found.ranks_per_host) == (true.memory_bytes, true.ranks_per_host)


def test_estimates_for_the_learnt_hardware_are_the_steps():
    """Steps that take the estimates for some hardware teach this hardware, from the estimates for another one."""
    true = slower(3.0, 0.5)
    runs = []
    for i, (mesh, made) in enumerate(SHAPES):
        runs.append((history(planned(mesh, hardware=true, placements=made).report.seconds + 0.25), plan_of(i)))
    assert_learnt(runs, true, None)


@given(st.floats(0.2, 9), st.floats(0.2, 9), st.floats(0, 1), st.booleans())
@settings(max_examples=50, deadline=None)
def test_factors_and_the_rest_are_learnt(own, exchange, rest, is_told):
    """Steps of rest + own · (lookup + update) + exchange · exchange teach the numbers, also if the rest is told."""
    runs = []
    for i in range(len(SHAPES)):
        top = lambda name: max(getattr(r, name) for r in plan_of(i).report.ranks)  # noqa: B023
        seconds = rest + own * (top("lookup_s") + top("update_s")) + exchange * top("exchange_s")
        runs.append((history(seconds), plan_of(i)))
    assert_learnt(runs, slower(own, exchange), rest if is_told else None)


@pytest.mark.parametrize(
    ("runs", "more", "part"),
    [
        (lambda: [], {}, "`runs` is empty"),
        (lambda: [([], plan_of(0))], {}, "has no epoch"),
        (lambda: [([{"steps_per_s": 0.0}], plan_of(0))], {}, "an epoch without a speed"),
        (lambda: [([{"steps_per_s": float("nan")}], plan_of(0))], {}, "an epoch without a speed"),
        (lambda: [([{"loss": 1.0}], plan_of(0))], {}, "an epoch without a speed"),
        (lambda: [(history(1.0), fr.Plan(WHOLE))], {}, "without an estimate"),
        (lambda: [(history(1.0), plan_of(0))], {"hardware": "cpu"}, "for other hardware"),
        (lambda: [(history(1.0), plan_of(0))], {"rest_s": 0.0}, "say nothing about"),
        (lambda: [(history(1.0), plan_of(0))] * 3, {}, "say nothing about"),
        (lambda: [(history(1.0), plan_of(0)), (history(1.1), plan_of(1))], {}, "say nothing about"),
        (lambda: [(history(1e-3), plan_of(0)), (history(1e-2), plan_of(3)), (history(2e-2), plan_of(1))], {},
            "contradict"),
        (lambda: [(history(0.5), plan_of(0)), (history(0.4), plan_of(3))], {"rest_s": 0.6}, "faster than `rest_s`"),
    ],
)  # fmt: skip
def test_runs_that_say_too_little_are_refused(runs, more, part):
    """Runs without steps, plans without an estimate, estimates in one proportion, and steps that contradict them raise
    an error that says so."""
    made = runs()
    call = lambda: fr.Hardware.from_run(made, **{"hardware": HARDWARE, **more})
    assert_refused(call, ValueError, "funcrec.Hardware.from_run", part)

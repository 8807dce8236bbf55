"""Costs that a plan pays once: latencies of exchanges and launches of banks. The laws include how ties are broken."""

import dataclasses
import math
import random

import pytest
import torch

import funcrec as fr
from funcrec.planner import _costs as costs
from funcrec.planner import _plan
from funcrec.planner._milp import relax
from funcrec.planner._packing import Cap, Item, Option, Packing, loads_of
from funcrec.planner._solve import longest_first, solve
from funcrec.sharding import layout_of
from funcrec.sharding._gather_terms import copy_axes
from funcrec.sharding._lanes import routes_of

TC, FC = fr.TableConfig, fr.FeatureConfig
TABLES = (TC("item", 30_000, 64), TC("user", 3_001, 7), TC("tiny", 3, 64), TC("shop", 900, 64), TC("unread", 500, 16))
FEATURES = (FC("clicked", table="item"), FC("seen", table="item", pooling="none", max_length=4),
    FC("user", table="user", weighted=True), FC("tiny", table="tiny"), FC("shop", table="shop"))  # fmt: skip
# bytes cost no time here, so that only latencies and launches count
FREE = fr.Hardware("free", 10**12, 1e30, 1e30, 1e30, 2, link_latency_s=1.0, host_latency_s=100.0, launch_s=1e4)
MESHES = ({"model": 1}, {"model": 2}, {"model": 4}, {"node": 2, "local": 2})
KINDS = ((), ("row_wise",), ("table_wise",), ("replicated",), ("row_wise", "replicated"))
CASES = [(m, k) for m in MESHES for k in KINDS]
CASES += [({"model": 4}, ("column_wise",)), ({"node": 2, "local": 2}, ("column_wise",)), (MESHES[3], ("grid",))]


def paid_for(plan, mesh) -> float:
    """Return the seconds on FREE, counted from the layout of the plan. Each set of axes costs three exchanges of
    lookups (pooled and single rows separately) and one exchange of copies. Each bank that is read costs a launch."""
    shapes, dtypes = {t.name: t.shape for t in TABLES}, {t.name: t.dtype for t in TABLES}
    layout = layout_of("test", shapes, dtypes, plan, fr.Mesh.emulated(**mesh))
    names, seconds = list(mesh), 0.0
    hosts = lambda axes: {r // 2 for r in _group(axes, names, mesh)}
    latency = lambda axes: 0.0 if math.prod(mesh[a] for a in axes) == 1 else 100.0 if len(hosts(axes)) > 1 else 1.0
    for own in ([f for f in FEATURES if f.pooling != "none"], [f for f in FEATURES if f.pooling == "none"]):
        seconds += sum(3 * latency(r.axes) for r in routes_of(layout, tuple(own)) if r.axes)
    read = {f.table for f in FEATURES}
    banks = {layout.banks[s.bank] for s in layout.shards if s.table in read}
    return seconds + sum(map(latency, {copy_axes(b, layout) for b in banks})) + 1e4 * len(banks)


def _group(axes, names, mesh):
    """Return the ranks whose other coordinates are 0."""
    stride, out = 1, [0]
    for a in reversed(names):
        out = [r + stride * i for r in out for i in (range(mesh[a]) if a in axes else (0,))]
        stride *= mesh[a]
    return out


@pytest.mark.parametrize("mesh, kinds", CASES, ids=str)
def test_a_plan_pays_for_the_exchanges_and_banks_of_its_layout(mesh, kinds):
    """If bytes are free, the seconds of a plan are the latencies of its layout's exchanges, each set of axes once, and
    the launches of the banks that are read. The solver and the report agree."""
    constraints = {t.name: {"kinds": kinds} for t in TABLES}
    plan = fr.plan(TABLES, FEATURES, mesh, batch_size=256, hardware=FREE, constraints=constraints)
    assert plan.report.seconds == pytest.approx(paid_for(plan, mesh), abs=1e-3)
    for r in plan.report.ranks:
        assert r.seconds == pytest.approx(plan.report.seconds, abs=1e-3)
        assert r.update_s == pytest.approx(1e4 * (paid_for(plan, mesh) // 1e4), abs=1e-3)
    assert plan.gap < 1e-6


def test_latencies_bring_tables_together():
    """If the latency of an exchange is high, tables share the exchange of one placement. If it is zero, each table gets
    its own fastest placement."""
    tables = (*(TC(f"s{i}", 50, 64) for i in range(3)), TC("large", 3_000_000, 64))
    features = tuple(FC(t.name, table=t.name) for t in tables)
    h = dataclasses.replace(fr.Hardware.named("h100"), link_latency_s=0.0, launch_s=0.0)
    ids = lambda t: 100.0 if t.name == "large" else 1.0
    used = {t.name: {"pooling_factor": ids(t), "kinds": ["row_wise", "replicated"]} for t in tables}
    made = lambda h: fr.plan(tables, features, {"m": 8}, batch_size=2048, hardware=h, constraints=used)
    free, dear = made(h), made(dataclasses.replace(h, link_latency_s=1.0))
    assert len({p.kind for _, p in free.placements}) == 2 and len({p.kind for _, p in dear.placements}) == 1


def test_of_many_items_the_bound_is_below_every_plan():
    """With more items than the relaxed program treats one by one, the program's bound is below every plan. This holds
    with one option for all items, and with random options."""
    single, every = ((0,), (1,)), ((0, 1),)
    item = lambda i: Item(f"i{i}", (Option("one", ((0.1 + i % 7, 0.0, 0.0),), single, "any", (0.0, 1.0, 0.0)),
        Option("both", ((0.06 + i % 5, 0.0, 0.0),), every, "any", (0.0, 0.0, float(i % 3 > 0)))))  # fmt: skip
    p = Packing(tuple(map(item, range(90))), 2, (1.0, 5.0, 50.0), (), once=(1, 2))
    relaxed, draw = relax(p, 20), random.Random(0)
    assert relaxed.bound > 0
    for way in (lambda: 0, lambda: 1, lambda: draw.randrange(2), lambda: int(draw.random() < 0.02)):
        options = [way() for _ in p.items]
        loads = longest_first(p, options)
        used = {k for k, item in zip(options, p.items) for k in [1 + k] if item.options[k - 1].base[k]}
        assert loads.value == pytest.approx(loads.load[0].max() + 5.0 * (1 in used) + 50.0 * (2 in used))
        assert relaxed.bound <= loads.value


def test_of_plans_as_fast_the_leaner_is_taken():
    """Among placements with the same time, the plan chooses the placement with the least memory."""
    single, every = ((0,), (1,)), ((0, 1),)
    ways = lambda c: (
        Option("wide", ((c, 9.0),), every),
        Option("middle", ((c, 5.0), (c, 5.0)), single, "apart"),
        Option("lean", ((c, 2.0), (c, 2.0)), ((0,), (1,)), "fixed"),
    )
    items = tuple(Item(f"i{c}", ways(float(c))) for c in (1, 2, 3))
    p = Packing(items, 2, (1.0, 0.0), (Cap("memory", (0.0, 1.0), 100.0),))
    found = solve(p)
    assert found.objective == 6.0 and loads_of(p, found.choices).most[1] == 6.0


def test_copies_that_train_apart_know_their_hosts():
    """Ranks of a copy that are not neighbours exchange at the speed between their hosts."""
    tables, features = (TC("a", 4_000, 64),), (FC("a", table="a"),)
    h = fr.Hardware("mine", 10**10, 1e12, 1e10, 1e8, 4)
    made = lambda mesh: fr.plan(tables, features, mesh, batch_size=512, hardware=h, replicas="copy",
        constraints={"a": {"kinds": ["row_wise"]}}).report.ranks[0].exchange_s  # fmt: skip
    near, far = made({"copy": 2, "model": 4}), made({"model": 4, "copy": 2})
    apart = lambda group: costs.peer_s_per_byte(h, group)
    assert far / near == pytest.approx(apart((0, 2, 4, 6)) / apart((0, 1, 2, 3)))


def test_latencies_are_those_of_the_farthest_rank():
    """A single rank has no latency, ranks of one host have the host's latency, and all other ranks the network's
    latency."""
    h = fr.Hardware("mine", 10**9, 1e9, 1e9, 1e8, 4, link_latency_s=1e-5, host_latency_s=1e-4)
    assert [costs.latency_s(h, g) for g in ([3], [0, 3], [3, 4], range(8))] == [0.0, 1e-5, 1e-4, 1e-4]


def test_measured_hardware_has_latencies(monkeypatch):
    """On an emulated mesh no bytes are sent. The calls of a bank take time on a CPU, and a plan for the measured
    hardware succeeds."""
    h = fr.Hardware.measure(fr.Mesh.emulated(data=2), memory_bytes=10**9)
    assert h.link_latency_s == h.host_latency_s == 0.0 and 1e-6 < h.launch_s < 1.0
    assert h.memory_bytes == 10**9 and 1e6 < h.memory_bytes_per_s < 1e14
    seen = {}
    monkeypatch.setattr(_plan, "solve", lambda p, effort: seen.setdefault(p, solve(p, effort)))
    plan = fr.plan(TABLES, FEATURES, {"model": 2}, batch_size=64, hardware=h)
    assert plan.report.seconds >= h.launch_s and len(seen) == 1


@pytest.mark.parametrize("name", ["link_latency_s", "host_latency_s", "launch_s"])
@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_a_latency_is_a_number_from_zero(name, value):
    """A latency below zero, or one that is not finite, raises with its name."""
    with pytest.raises(ValueError, match=rf"`{name}` is out of range") as told:
        fr.Hardware("x", 1, 1.0, 1.0, 1.0, **{name: value})
    assert "\n  got" in str(told.value) and "\n  need" in str(told.value)


def test_the_table_says_what_is_no_tables():
    """The table's megabytes, including its line for padding, sum to those of all ranks."""
    plan = fr.plan(TABLES, FEATURES, {"model": 4}, batch_size=4096, hardware="cpu")
    lines = plan.table().splitlines()
    rest = next(float(x.split()[-1]) for x in lines if x.startswith("padding of banks"))
    held = sum(t.bytes for t in plan.report.tables) / 1e6
    assert held + rest == pytest.approx(sum(r.bytes for r in plan.report.ranks) / 1e6, abs=0.05)
    assert torch.tensor(rest) > 0

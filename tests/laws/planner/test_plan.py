"""The planner's optimum, memory and values, and its error when no plan fits."""

import json
import math

import numpy as np
import pytest
import torch
from programs.packings import best_of_all, packing
from programs.refused import assert_refused

import funcrec as fr
from funcrec.planner import _costs as costs
from funcrec.planner import _plan
from funcrec.planner._packing import Choice, Item, Option, Packing, loads_of
from funcrec.planner._report import reason
from funcrec.planner._solve import solve
from funcrec.testing import assert_trees_close

TC, FC = fr.TableConfig, fr.FeatureConfig
TABLES = (TC("item", 30_000, 64), TC("user", 3_001, 7), TC("tiny", 3, 64), TC("unread", 500, 16))
FEATURES = (FC("clicked", table="item"), FC("seen", table="item", pooling="none"),
    FC("user", table="user", weighted=True), FC("again", table="user", column="user"),
    FC("tiny", table="tiny", pooling="mean", weighted=True))  # fmt: skip
USED = {"item": fr.TableConstraint(pooling_factor={"clicked": 20.0, "seen": 5.0}, zipf=1.05)}
HOW = ({}, {"exact": True}, {"dedup": True, "capacity_factor": 2.0},
    {"codec": fr.Codec("bfloat16", "int8"), "optimizer": fr.optim.rowwise_adagrad()})  # fmt: skip
MESHES = ({"model": 1}, {"model": 2}, {"model": 3}, {"node": 2, "local": 2}, {"data": 1, "model": 4})


def planned(mesh, tables=TABLES, features=FEATURES, constraints=USED, **kwargs):
    return fr.plan(tables, features, mesh, batch_size=256, constraints=constraints, hardware="cpu", **kwargs)


def test_small_problems_are_solved_to_the_optimum():
    """On 100 generated problems, the solution is the best of all plans. The bound proves that it is the best. For a
    problem without a solution, the solver finds none."""
    for seed in range(100):
        p = packing(seed)
        found, best = solve(p), best_of_all(p)
        if math.isinf(best):
            assert found.choices is None, seed
            continue
        loads = loads_of(p, found.choices)
        assert loads.excess <= 1e-9 and float(loads.most @ loads.weights) == found.objective
        assert found.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed
        assert found.bound <= best * (1 + 1e-6) and found.gap < 1e-6, seed


@pytest.mark.parametrize("mesh", [m for m in MESHES if math.prod(m.values()) <= 3], ids=str)
def test_plans_are_the_best_of_all_placements(mesh, monkeypatch):
    """By the estimates, no placement of three tables is faster than the plan."""
    seen = {}
    monkeypatch.setattr(_plan, "solve", lambda p, effort: seen.setdefault(p, solve(p, effort)))
    planned(mesh, TABLES[:3], FEATURES)
    ((p, found),) = seen.items()
    assert found.objective == pytest.approx(best_of_all(p), rel=1e-6)


def rank_bytes(tables, slots, mesh):
    """Return the bytes of the banks and slots on one rank."""
    own = {b.name: b.num_ranks for b in tables.layout.banks}
    return sum(x.nbytes // own[n] for n, x in tables.banks.items()) + sum(
        s.nbytes // own[n] for n, each in slots.items() for s in each.values()
    )


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kinds", [(), ("table_wise",), ("row_wise",), ("column_wise", "replicated")], ids=str)
def test_memory_is_what_the_layout_takes(mesh, optimizer, kinds, monkeypatch):
    """The bytes of a rank in the plan, and in the solver, are those of the rank's banks and their state."""
    seen = []
    monkeypatch.setattr(_plan, "solve", lambda p, effort: seen.append((p, solve(p, effort))) or seen[-1][1])
    sparse = getattr(fr.optim, optimizer)(lr=0.1)
    constraints = {t.name: fr.TableConstraint(kinds=kinds) for t in TABLES}
    plan = planned(mesh, features=(), constraints=constraints, optimizer=sparse)
    real = fr.Mesh.emulated(**mesh)
    weights = {t.name: torch.zeros(t.shape) for t in TABLES}
    step = fr.train_step(
        lambda p, b: 0.0, sparse=sparse, dense=fr.optim.dense(torch.optim.SGD, lr=0.1), mesh=real, plan=plan
    )
    state = step.init(fr.Params(weights, {}))
    held = rank_bytes(state.tables, state.slots, real)
    ((p, found),) = seen
    assert {r.bytes for r in plan.report.ranks} == {held}
    assert np.dot(p.caps[0].factors, loads_of(p, found.choices).most) == pytest.approx(held)


@pytest.mark.parametrize("kwargs", HOW, ids=lambda k: "-".join(k) or "sums")
@pytest.mark.parametrize("kinds", [(), ("row_wise",), ("grid",), ("table_column_wise",)], ids=str)
def test_memory_has_what_a_step_exchanges(kinds, kwargs, monkeypatch):
    """The bytes of a rank in the plan equal those in the solver. These bytes include the ids, rows and sums of
    exchanges."""
    seen = []
    monkeypatch.setattr(_plan, "solve", lambda p, effort: seen.append((p, solve(p, effort))) or seen[-1][1])
    plan = planned({"node": 2, "local": 2}, constraints={"item": {"kinds": kinds, "pooling_factor": 7.0}}, **kwargs)
    ((p, found),) = seen
    (stated,) = {r.bytes for r in plan.report.ranks}
    assert np.dot(p.caps[0].factors, loads_of(p, found.choices).most) == pytest.approx(stated, abs=1)


def test_rows_that_go_alone_take_memory():
    """The bytes of a rank include the rows of sequences, of exact and of dedup, sent and received. A plan whose rows
    exceed the memory raises."""
    table, bags, width = (TC("a", 100, 32),), 64, 32
    ids = bags * 1000
    size = lambda pooling, **how: fr.plan(table, (FC("a", table="a", pooling=pooling, max_length=1000),), {"m": 4},
        batch_size=4 * bags, constraints={"a": {"kinds": ["row_wise"]}}, **how).report.ranks[0].bytes  # fmt: skip
    for how in ({}, {"exact": True}, {"dedup": True}):
        assert size("none", **how) >= 2 * 4 * ids * (width * 4 + 4)
    assert size("sum", exact=True) >= 2 * 4 * ids * (width * 4 + 4) > 8 * size("sum") > 8 * 2 * 4 * ids * 4
    with pytest.raises(ValueError, match="do not fit"):
        fr.plan(table, (FC("a", table="a", pooling="none", max_length=1000),), {"m": 4}, batch_size=4 * bags,
            memory_bytes=2 * ids * width * 4)  # fmt: skip


@pytest.mark.parametrize("tables", [1, 2, 9])
def test_what_takes_no_time_takes_little_memory(tables):
    """Tables that no feature reads are spread over ranks. No rank has more than 1.2 times its share."""
    own = tuple(TC(f"t{i}", 80_000, 64) for i in range(tables))
    plan = fr.plan((*own, TC("read", 800, 64)), (FC("read", table="read"),), {"m": 8}, batch_size=64)
    assert plan.report.ranks[0].bytes <= 1.2 * tables * 10_000 * 64 * 4


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kwargs", HOW, ids=lambda k: "-".join(k) or "sums")
def test_a_plan_goes_into_a_step(mesh, kwargs):
    """A step with the placements of fr.plan has the loss and tables of a step on plain tables. With a codec, they agree
    within the codec's rounding."""
    plan, real = planned(mesh, **kwargs), fr.Mesh.emulated(**mesh)
    weights = fr.init(fr.key(0), TABLES)
    lists = {
        n: [[(7 * i + j) % 3 for j in range(i % 3)] for i in range(12)] for n in ("clicked", "seen", "user", "tiny")
    }
    ones = {n: [[1.0] * len(bag) for bag in bags] for n, bags in lists.items()}
    ids = fr.KeyedJaggedTensor.from_lists(lists, weights=ones)
    told = {k: kwargs[k] for k in ("exact", "dedup", "codec") if k in kwargs}

    def loss_fn(params, batch):
        pooled = fr.lookup(params.tables, batch, [f for f in FEATURES if f.pooling != "none"]).values
        listed = fr.lookup_sequence(params.tables, batch, [f for f in FEATURES if f.pooling == "none"])
        return torch.sin(pooled * params.dense).mean() + torch.cos(listed["seen"].to_padded(3)).mean()

    def after(**where):
        step = fr.train_step(loss_fn, sparse=kwargs.get("optimizer", fr.optim.sgd(0.5)),
            dense=fr.optim.dense(torch.optim.SGD, lr=0.1), **where)  # fmt: skip
        params = fr.Params({n: t.clone() for n, t in weights.items()}, torch.linspace(-1, 1, 142))
        return step(step.init(params), ids)

    state, metrics = after(mesh=real, plan=plan, **told)
    alone, expected = after()
    close = {"rtol": 2e-2, "atol": 2e-2} if "codec" in told else {"rtol": 1e-5, "atol": 1e-6}
    assert_trees_close(metrics["loss"], expected["loss"], **close)
    assert_trees_close(fr.gather_tables(state.tables, real), alone.tables, **close)
    assert 0 <= plan.gap < 0.01 and set(plan.reasons) == set(weights) and all(plan.reasons.values())
    assert len(plan.report.ranks) == real.size


def test_reasons_say_what_another_placement_would_cost():
    """The reason for a placement states the signed cost of another placement, or that both placements cost the same."""
    one = lambda name, seconds: Option((name, (), 1, (), 1.0), ((seconds,),), ((0,), (1,)))
    said = lambda *seconds: reason(p := Packing((Item("t", tuple(map(one, "ab", seconds))),), 2, (1.0,)),
        loads_of(p, [Choice(0, (0,))]), 0)  # fmt: skip
    assert said(2e-3, 5e-3) == "b instead: +3 ms" and said(5e-3, 2e-3) == "b instead: -3 ms"
    assert said(2e-3, 2e-3) == "b instead would cost as much"


def test_the_same_arguments_give_the_same_plan():
    """Two calls, one of which names a Mesh, give equal plans and reports. Another order of tables gives the same
    hash."""
    first, second = planned({"node": 2, "local": 2}), planned(fr.Mesh.emulated(node=2, local=2))
    assert first == second and first.report == second.report and first.digest == second.digest
    plan = fr.Plan({"a": fr.row_wise("model"), "b": fr.table_wise("model", rank=1)})
    assert plan.digest == fr.Plan(dict(reversed(plan.placements))).digest
    assert plan.digest == "5a61c7f0f27b2914ecd6e87f667d8b3cfa3cd4a88f9f7f7772c0716eb23df326"


def test_plans_go_to_json_and_back():
    """A plan and its report can be converted to JSON and back. So can a plan made by hand and a plan with replicas."""
    plan = planned({"node": 2, "local": 2}, optimizer=fr.optim.adam())
    back = fr.Plan.from_json(plan.to_json())
    assert back == plan and back.report == plan.report and back.table() == plan.table()
    by_hand = fr.Plan({"item": fr.grid(("a", "b"), ranks=(1, 0))}, replicas="c")
    assert fr.Plan.from_json(by_hand.to_json()) == by_hand and fr.Plan.from_json(by_hand.to_json()).report is None


def test_the_table_names_every_table_and_rank():
    """The text has the placement, parts and reason of each table, each rank, and the critical path. The picture is
    ranks × tables."""
    plan = planned({"model": 4})
    text = plan.table()
    assert all(t.name in text and plan[t.name].kind in text and plan.reasons[t.name] in text for t in TABLES)
    assert "critical path" in text and "imbalance" in text and "gap" in text
    image = plan.draw().axes[0].images[0].get_array()
    assert image.shape == (4, len(TABLES))
    assert np.allclose(image.sum(0) * 1e6, [t.bytes for t in plan.report.tables])


def test_copies_that_train_apart_are_planned_alike():
    """With replicas, the plan is that of the mesh of one copy. The plan names the replica axis."""
    apart = planned({"copy": 2, "model": 2}, replicas="copy")
    alone = fr.plan(TABLES, FEATURES, {"model": 2}, batch_size=128, constraints=USED, hardware="cpu")
    assert apart.replicas == ("copy",) and apart.placements == alone.placements
    fr.shard_tables(fr.init(fr.key(0), TABLES), apart, fr.Mesh.emulated(copy=2, model=2))
    all_apart = planned({"copy": 2}, replicas="copy")
    assert {p.kind for _, p in all_apart.placements} == {"replicated"}
    fr.shard_tables(fr.init(fr.key(0), TABLES), all_apart, fr.Mesh.emulated(copy=2))


def test_a_thousand_ranks_need_no_device():
    """A mesh shape of 1,024 ranks is enough for a plan. A table of half a terabyte is cut."""
    tables = (TC("huge", 2_000_000_000, 64), TC("item", 1_000_000, 64))
    plan = fr.plan(
        tables, (FC("huge", table="huge"), FC("item", table="item")), {"data": 128, "model": 8}, batch_size=65_536
    )
    assert plan["huge"].kind in ("row_wise", "column_wise", "grid", "table_row_wise") and len(plan.report.ranks) == 1024
    assert max(r.bytes for r in plan.report.ranks) <= plan.report.memory_bytes


def test_constraints_hold():
    """The plan follows constraints: placements, the least partition, pinned ranks, and tables that lie together."""
    c = fr.TableConstraint
    kind = lambda k, **more: {"item": c(kinds=(k,), **more)}
    for k in ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "replicated"):
        assert planned({"node": 2, "local": 2}, constraints=kind(k))["item"].kind == k
    wide = planned({"model": 4}, constraints={"item": {"kinds": ["column_wise"], "min_partition": 24}})["item"]
    assert [b.last - b.first for b in wide.blocks({"model": 4}, 64)] == [32, 32]
    assert planned({"model": 4}, constraints=kind("table_wise", ranks=(2,)))["item"].ranks == (2,)
    two = planned({"model": 4}, constraints=kind("column_wise", ranks=(3, 1)))["item"].ranks
    assert sorted(two) == [1, 3]
    pairs = {n: c(together="pair", kinds=("table_wise",)) for n in ("item", "tiny")}
    both = planned({"model": 4}, constraints=pairs)
    assert both["item"] == both["tiny"]


def test_edges_of_input():
    """There are plans for no tables, no features, one rank, more ranks than rows or columns, and a dim of one."""
    assert planned({"model": 2}, (), (), None).placements == ()
    assert planned({"model": 2}, features=(), constraints=None).gap == 0.0
    assert planned({"model": 1}, TABLES[:1], FEATURES[:1], None).report.imbalance == 1.0
    for k in ("row_wise", "column_wise"):
        tables = (TC("few", 2, 1), TC("some", 5, 3))
        if k == "row_wise":
            plan = planned({"model": 8}, tables, (), {t.name: {"kinds": [k]} for t in tables})
            held = fr.shard_tables({t.name: torch.ones(t.shape) for t in tables}, plan, fr.Mesh.emulated(model=8))
            assert torch.equal(fr.gather_tables(held, fr.Mesh.emulated(model=8))["some"], torch.ones(5, 3))
        else:
            plan = planned({"model": 8}, tables[1:], (), {"some": {"kinds": [k]}})
            assert len(plan["some"].blocks({"model": 8}, 3)) in (2, 3)


def test_what_does_not_fit_is_said_with_what_would():
    """If memory is too small, the error says how much memory is enough. With that memory there is a plan."""
    for mesh in ({"model": 2}, {"node": 2, "local": 2}):
        with pytest.raises(ValueError, match="do not fit into memory") as told:
            planned(mesh, memory_bytes=1_000_000)
        enough = int(str(told.value).split("memory_bytes=")[1].split(",")[0])
        planned(mesh, memory_bytes=enough)
        with pytest.raises(ValueError, match="do not fit"):
            planned(mesh, memory_bytes=int(enough * 0.99))
    with pytest.raises(ValueError, match="lift the constraints of table 'item'"):
        planned(
            {"model": 4}, memory_bytes=8_000_000, constraints={"item": {"kinds": ["replicated"]}, "tiny": {"zipf": 1.0}}
        )


def test_distinct_rows_are_those_of_a_sum():
    """Expected distinct rows equal Σ 1 - (1 - p)^n over all rows, for uniform, Zipf and counted ids. Computed in cells,
    they agree within 1 %."""
    for rows, ids, zipf in [(7, 3, 0.0), (1000, 500, 0.0), (1000, 500, 1.1), (30_000, 5_000, 1.3), (1, 9, 0.7)]:
        p = np.arange(1, rows + 1) ** -float(zipf)
        exact = (1 - (1 - p / p.sum()) ** ids).sum()
        assert costs.distinct_rows(ids, rows, zipf) == pytest.approx(exact, rel=1e-2)
        assert costs.distinct_rows(ids, rows, counts=p) == pytest.approx(exact, rel=1e-6)
    assert costs.distinct_rows(0, 10) == 0.0


def test_costs_grow_with_what_they_are_of():
    """More ids, columns or distant ranks never cost less, and a codec never costs more. The bytes of a lookup follow
    the lookup's equation."""
    h = fr.Hardware("mine", 10**9, 1e9, 1e9, 1e8, 4)
    assert costs.lookup_s(h, 10, 2, 8, 4) == pytest.approx((10 * 40 + 2 * 32) / 1e9)
    assert costs.update_s(h, 10, 4, 8, 4, 4) == pytest.approx((10 * (32 + 64) + 8 * 36) / 1e9)
    assert costs.peer_s_per_byte(h, range(8)) == pytest.approx(3 / 1e9 + 4 / 1e8)
    assert costs.both_ways(64, fr.Codec("int8", "bfloat16")) == 68 + 128 and costs.both_ways(64, None) == 512
    assert costs.id_bytes(100, 4, 4, None) == 800 and costs.id_bytes(100, 4, 0, 2.0) == 200


BAD = {
    "constraints, a table": (lambda: planned({"a": 2}, constraints={"x": {}}), KeyError, "a table that does not exist"),
    "constraints, a key": (
        lambda: planned({"a": 2}, constraints={"item": {"pool": 3}}),
        KeyError,
        "pooling_factor=...",
    ),
    "constraints, a feature": (
        lambda: planned({"a": 2}, constraints={"item": {"pooling_factor": {"user": 2.0}}}),
        KeyError,
        "does not read it",
    ),
    "constraints, no mapping": (
        lambda: planned({"a": 2}, constraints=[1]),
        TypeError,
        "`constraints` is not a mapping",
    ),
    "constraint, no constraint": (
        lambda: planned({"a": 2}, constraints={"item": 3}),
        TypeError,
        "is not a TableConstraint",
    ),
    "a pinned rank": (
        lambda: planned({"a": 2}, constraints={"item": {"ranks": [2]}}),
        ValueError,
        "places from 0 to 1",
    ),
    "ranks and row_wise": (
        lambda: planned({"a": 2}, constraints={"item": {"ranks": [1], "kinds": ["row_wise"]}}),
        ValueError,
        "leave no placement",
    ),
    "a partition too wide": (
        lambda: planned({"a": 2}, constraints={"item": {"min_partition": 65}}),
        ValueError,
        "wider than the table",
    ),
    "counts of other rows": (
        lambda: planned({"a": 2}, constraints={"tiny": {"row_counts": [1.0]}}),
        ValueError,
        "one for each of 3 rows",
    ),
    "two axes": (
        lambda: planned({"a": 2}, constraints={"item": {"kinds": ["grid"]}}),
        ValueError,
        "two axes of several ranks",
    ),
    "together, nothing common": (
        lambda: planned(
            {"a": 2},
            constraints={
                "item": {"together": "x", "kinds": ["row_wise"]},
                "tiny": {"together": "x", "kinds": ["table_wise"]},
            },
        ),
        ValueError,
        "no placement in common",
    ),
    "a mesh": (lambda: planned(3), TypeError, "`mesh` is not a Mesh"),
    "a mesh's axis": (lambda: planned({"a": 0}), ValueError, "`mesh['a']` is out of range"),
    "hardware": (
        lambda: fr.plan(TABLES, FEATURES, {"a": 2}, batch_size=8, hardware="b200"),
        ValueError,
        "`hardware` is unknown",
    ),
    "hardware's kind": (
        lambda: fr.plan(TABLES, FEATURES, {"a": 2}, batch_size=8, hardware=3),
        TypeError,
        "is not a Hardware",
    ),
    "a feature's table": (lambda: planned({"a": 2}, TABLES[1:]), KeyError, "reads a table that does not exist"),
    "both transports": (lambda: planned({"a": 2}, exact=True, dedup=True), ValueError, "exclude each other"),
    "reserve": (lambda: planned({"a": 2}, reserve=1.0), ValueError, "`reserve` is out of range"),
    "replicas": (lambda: planned({"a": 2}, replicas="b"), ValueError, "an axis that the mesh lacks"),
    "a plan by hand": (lambda: fr.Plan({}).gap, ValueError, "the plan has no estimate"),
    "a text": (lambda: fr.Plan.from_json("{"), ValueError, "is not JSON"),
    "another text": (lambda: fr.Plan.from_json("[]"), ValueError, "is not a plan"),
    "another version": (
        lambda: fr.Plan.from_json(json.dumps(json.loads(fr.Plan({}).to_json()) | {"version": 9})),
        ValueError,
        "has another version",
    ),
    "numbers of hardware": (
        lambda: fr.Hardware("x", 1, -1.0, 1.0, 1.0),
        ValueError,
        "`memory_bytes_per_s` is out of range",
    ),
    "a name of hardware": (lambda: fr.Hardware.named("b200"), ValueError, "'h100' or"),
    "a mesh to measure": (lambda: fr.Hardware.measure({"a": 2}), TypeError, "`mesh` is not a Mesh"),
    "a pooling factor": (
        lambda: fr.TableConstraint(pooling_factor=-1.0),
        ValueError,
        "`pooling_factor` is out of range",
    ),
    "too many ids": (lambda: fr.TableConstraint(pooling_factor=1e300), ValueError, "`pooling_factor` is out of range"),
    "a byte": (lambda: planned({"a": 2}, memory_bytes=1), ValueError, "do not fit into memory"),
    "a placement": (lambda: fr.TableConstraint(kinds=("rows",)), ValueError, "is unknown"),
}


@pytest.mark.parametrize("row", BAD)
def test_bad_input_is_told(row):
    """Each wrong argument raises before any work, in four parts that name the argument."""
    assert_refused(*BAD[row])

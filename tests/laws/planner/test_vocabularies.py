"""The planner counts the vocabularies that tables follow, and cuts them by buckets where that is faster or must be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.refused import assert_refused

import funcrec as fr
from funcrec.planner import _vocabularies as vocabularies

TC, FC = fr.TableConfig, fr.FeatureConfig
ROWS, BATCH = 128 * 40, 4096
TABLES = TC("user", ROWS, 8), TC("user_bias", ROWS, 1), TC("item", 256, 8)
FEATURES = FC("user", table="user"), FC("bias", table="user_bias", column="user"), FC("item", table="item")
DISK = fr.Hardware("h", 10**9, 1e10, 1e9, 1e9, 64, disk_bytes=10**12, disk_records_per_s=1e5)
FOLLOWING = {n: fr.TableConstraint(vocabulary="users", pooling_factor=3.0) for n in ("user", "user_bias")}


def planned(mesh, constraints=FOLLOWING, hardware="cpu", batch_size=BATCH, **more):
    return fr.plan(TABLES, FEATURES, mesh, batch_size=batch_size, constraints=constraints, hardware=hardware, **more)


def plain(constraints):
    return {n: fr.TableConstraint(pooling_factor=c.pooling_factor) for n, c in constraints.items()}


@settings(max_examples=12, deadline=None)
@given(mesh=st.sampled_from([{"x": 1}, {"x": 2}, {"x": 4}, {"a": 2, "b": 3}]),
       memory=st.sampled_from([1e9, 1e11, 3e12]), link=st.sampled_from([1e8, 1e9, 4e11]),
       latency=st.sampled_from([0.0, 1e-5, 1e-3]))  # fmt: skip
def test_the_faster_way_is_taken(mesh, memory, link, latency):
    """The estimate is that of the tables alone, plus the seconds of the faster way: n · I admissions and a gathering of
    ids, or I admissions and six messages of ids. One rank cuts nothing."""
    hardware = fr.Hardware("h", 10**12, memory, link, link, 64, latency, latency)
    plan, alone = (planned(mesh, c, hardware) for c in (FOLLOWING, plain(FOLLOWING)))
    n = 1
    for k in mesh.values():
        n *= k
    ids = BATCH / n * 3  # one column, whichever tables read it
    admit, send = ids * vocabularies.ADMIT_BYTES / memory, ids * 8 * (n - 1) / link
    whole = n * admit + (send + 2 * latency if n > 1 else 0)
    cut = admit + 6 * send + 4 * latency if n > 1 else float("inf")
    assert plan.report.seconds == pytest.approx(alone.report.seconds + min(whole, cut), rel=1e-6)
    assert plan.buckets == (tuple(mesh) if cut < whole else ())
    assert plan.gap < 1e-6 and dict(plan.placements).keys() == dict(alone.placements).keys()


def test_memory_counts_and_may_cut():
    """A rank has 18 bytes for each row of a vocabulary, or of its part of one. A whole vocabulary that is faster and
    does not fit is cut; if the parts do not fit, there is no plan."""
    slow = fr.Hardware("h", 10**9, 1e12, 1e6, 1e6, 64)  # ids that travel cost most
    kinds = {n: fr.TableConstraint(vocabulary="users", kinds=("row_wise",)) for n in FOLLOWING}
    mesh = {"x": 4}
    whole = planned(mesh, kinds, slow)
    used = whole.report.ranks[0].bytes
    alone = planned(mesh, {n: fr.TableConstraint(kinds=("row_wise",)) for n in kinds}, slow).report.ranks[0].bytes
    assert whole.buckets == () and used - alone == 18 * ROWS + BATCH * 8
    big = [TC(t.name, 100 * ROWS, 8) if t.name != "item" else t for t in TABLES]
    run = lambda size: fr.plan(
        big, FEATURES, mesh, batch_size=4, constraints=kinds, hardware=slow, memory_bytes=size, reserve=0.0
    )
    tables, part = 100 * ROWS // 4 * 8 * 4 * 2, 100 * ROWS // 4 * 18
    assert run(tables + 5 * part).buckets == () and run(tables + 2 * part).buckets == ("x",)
    with pytest.raises(ValueError, match="do not fit into memory"):
        run(tables + part // 2)


def test_what_cannot_be_cut_stays_whole():
    """Copies that train apart, and tables of which a store may have rows, keep vocabularies whole. Tables of a
    vocabulary are whole in memory."""
    assert planned({"x": 4}).buckets == ("x",)
    assert planned({"x": 2, "copy": 2}, replicas="copy").buckets == ()
    constraints = {**FOLLOWING, "item": fr.TableConstraint(in_memory=0.5)}
    plan = planned({"x": 4}, constraints, DISK, batch_size=8)
    assert plan.buckets == () and set(plan.cached) == {"item"}


def test_the_plan_explains_and_survives():
    """The reason of a table says how its vocabulary is kept and what the other way would cost. The plan's text as JSON
    has the buckets."""
    plan = planned({"x": 4})
    assert "; its vocabulary cut(x): whole instead: +" in plan.reasons["user"]
    assert "vocabulary" not in plan.reasons["item"]
    assert fr.Plan.from_json(plan.to_json()) == plan and fr.Plan.from_json(plan.to_json()).buckets == ("x",)


def test_a_planned_step_has_the_bits_of_whole_vocabularies():
    """A step by the plan, with parts of vocabularies on four ranks, gives the losses of a plan without buckets."""
    mesh = fr.Mesh.emulated(x=4)
    users = fr.vocabulary(512)
    table, read = fr.TableConfig("user", 512, 4, initializer=fr.uniform(0.1)), fr.FeatureConfig("user", table="user")
    constraints = {"user": fr.TableConstraint(vocabulary="users", kinds=("row_wise",))}
    plan = fr.plan(
        [table], [read], mesh, batch_size=64, constraints=constraints, hardware=fr.Hardware("h", 10**9, 1e9, 1e12, 1e12)
    )
    assert plan.buckets == ("x",)
    own = fr.VocabularyConfig(users, [table], [read])
    tables = fr.dynamic_tables(fr.init(fr.key(0), [table]), {"users": own}, key=fr.key(1))
    loss = lambda params, ids: (fr.lookup(params.tables, ids, [read]).values - 1).square().mean()
    losses = []
    for each in (plan, fr.Plan(dict(plan.placements))):
        step = fr.train_step(loss, sparse=fr.optim.rowwise_adagrad(0.1), mesh=mesh, plan=each)
        state, own_losses = step.init(fr.Params(fr.copy(tables), {})), []
        for ids in ([[7], [10**15], [-3], [7]], [[7], [2], [10**15], [2]]):
            state, metrics = step(state, fr.KeyedJaggedTensor.from_lists({"user": ids}))
            own_losses.append(float(metrics["loss"]))
        losses.append(own_losses)
    assert losses[0] == losses[1]


CASES = {
    "rows differ": ({"user": {"vocabulary": "v"}, "item": {"vocabulary": "v"}}, ValueError, "differ in their rows"),
    "a store": ({"user": {"vocabulary": "v", "in_memory": 0.5}}, ValueError, "follows a vocabulary"),
    "not a name": ({"user": {"vocabulary": 3}}, TypeError, "vocabulary"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_raises(case):
    """Constraints that no vocabulary can meet are refused by name."""
    constraints, kind, text = CASES[case]
    assert_refused(lambda: planned({"x": 2}, constraints, DISK), kind, text)

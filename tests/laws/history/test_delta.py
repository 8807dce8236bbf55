"""A delta holds the rows that changed since a version.

Applied to the tables of that version, a delta gives the present tables."""

import pytest
import torch
from programs import training
from programs.moving import bits
from programs.rewinding import logged, params

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.testing import assert_trees_close

BATCHES = [training.batch(i, 6) for i in range(6)]


def same(got, want):
    assert_trees_close(bits(got), bits(want))


def run_of(step, num_steps=6, dtype=torch.float32):
    """Return ([(version, tables), ...], the last value) of a run of the steps."""
    run, then = step.init(params(dtype)), []
    for batch in BATCHES[:num_steps]:
        then.append((run.log.version, run.state.tables))
        run, _ = step(run, batch)
    return then, run


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", ["adam", "accumulate", "by_table, accumulate", "freeze"])
def test_the_rows_that_changed_make_the_tables_of_now(name, steps):
    """apply_delta of the delta since any version gives the present tables, bit for bit, however many steps can be
    undone."""
    then, run = run_of(logged(name, steps=steps, rows=16 if steps else None))
    for version, tables in then:
        same(fr.apply_delta(tables, fr.delta(run, version)), run.state.tables)
    assert int(fr.delta(run).version) == 6
    assert all(x.rows.numel() == 0 for own in fr.delta(run, since=6).tables.values() for x in own)


def test_only_rows_that_were_looked_up_are_sent():
    """A Delta names exactly the rows of the steps since the version, ascending and once each."""
    step = logged("sgd")
    run = step.init(params())
    one = lambda u, v: fr.Batch(
        fr.KeyedJaggedTensor.from_lists({"u": [u] * 6, "v": [v] * 6}), torch.tensor([1.0, 0] * 3)
    )
    run, _ = step(run, one([3, 1, 3], [0]))
    run, _ = step(run, one([9], [5, 99, -1]))
    rows = lambda since: {n: x.rows.tolist() for n, (x,) in fr.delta(run, since).tables.items()}
    # the ids of c are taken modulo its 5 rows
    assert rows(0) == {"a": [0, 1, 3, 5, 9], "b": [0, 5], "c": [1, 3, 4]}
    assert rows(1) == {"a": [5, 9], "b": [5], "c": [4]}


def test_a_delta_of_another_log_is_told():
    """A Delta can be the start of the next Delta, whose rows are then those since the version of the first. A Delta of
    another log raises, whatever its version. Logs that start at the same state, on any mesh, are the same log to the
    bit."""
    step = logged("adam")
    _, run = run_of(step, 2)
    first = fr.delta(run)
    new = step.init(run.state)
    for batch in BATCHES[:3]:
        run, new = step(run, batch)[0], step(new, batch)[0]
    same(fr.delta(run, first), fr.delta(run, 2))
    for other in (new, logged("adam").init(params(), fr.key(1)), logged("sgd").init(moved())):
        with pytest.raises(ValueError, match="`since` belongs to another log"):
            fr.delta(other, first)
    assert int(run.log.origin) == int(step.init(params()).log.origin) == int(fr.jit(step.init)(params()).log.origin)
    mesh, plan = fr.Mesh.emulated(x=2), training.plan_of("row_wise", {"x": 2})
    on = [logged("adam", mesh=mesh, plan=plan).init(p).log.origin for p in (params(), params(), moved())]
    assert on[0] == on[1] != on[2]


def moved():
    """Return the same parameters with one changed row."""
    made = params()
    return fr.Params({**made.tables, "b": made.tables["b"].index_fill(0, torch.tensor([3]), 0.25)}, made.dense)


def test_rewinding_is_a_change():
    """After a rewind, a server that already received the undone rows gets the restored rows. A version never stands for
    two states."""
    step = logged("adam", steps=4)
    then, run = run_of(step)
    sent, version = run.state.tables, run.log.version
    run = fr.rewind(run, 2)
    same(fr.apply_delta(sent, fr.delta(run, version)), then[4][1])
    run, _ = step(run, BATCHES[1])
    same(fr.apply_delta(sent, fr.delta(run, version)), run.state.tables)
    same(fr.apply_delta(then[0][1], fr.delta(run)), run.state.tables)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "table_wise", "replicated", "grid", "table_row_wise"])
def test_sharded_rows_are_sent_by_their_tables(kind):
    """On a mesh a Delta has rows of tables, not of banks. Column-wise tables come in parts."""
    axes = {"x": 2, "y": 2}
    mesh = fr.Mesh.emulated(**axes)
    step = logged("adam", mesh=mesh, plan=training.plan_of(kind, axes))
    run = step.init(params())
    first = fr.gather_tables(run.state.tables, mesh)
    run, _ = step(run, training.batch(0, 8))
    then = fr.gather_tables(run.state.tables, mesh)
    run, _ = step(run, training.batch(1, 8))
    now = fr.gather_tables(run.state.tables, mesh)
    same(fr.apply_delta(then, fr.delta(run, 1, mesh=mesh)), now)
    same(fr.apply_delta(first, fr.delta(run, mesh=mesh)), now)


def test_a_delta_is_saved_and_served_in_another_dtype(tmp_path):
    """A Delta can be checkpointed. For a server in 16 bits, a Delta must be cast explicitly. Under jit, a Delta is
    applied to the tables in place."""
    then, run = run_of(logged("adam"))
    changed = fr.delta(run, then[3][0])
    fr.save(tmp_path / "delta.pt", changed)
    same(fr.load(tmp_path / "delta.pt"), changed)
    half = {n: t.to(torch.bfloat16) for n, t in then[3][1].items()}
    with pytest.raises(TypeError, match="are not of its table's dtype"):
        fr.apply_delta(half, changed)
    same(fr.apply_delta(half, changed.to(torch.bfloat16)), {n: t.bfloat16() for n, t in run.state.tables.items()})
    fast = fr.jit(fr.apply_delta, donate=("tables",))
    assert len(fast.lower(dict(then[3][1]), changed).written) == 3


def test_wrong_deltas_are_told():
    """A future version, the log of another state, an ensemble, and missing tables each raise."""
    step = logged("adam")
    then, run = run_of(step, 2)
    with pytest.raises(ValueError, match=r"`since` is later than the log's version\.\n  got   3"):
        fr.delta(run, 3)
    with pytest.raises(ValueError, match="the log belongs to another state"):
        fr.delta(replace(run, state=replace(run.state, step=run.state.step + 1)))
    many = torch.func.vmap(lambda key: step.init(params(), key))(fr.split(fr.key(0), 2))
    with pytest.raises(TypeError, match="there are several states"):
        fr.delta(many)
    with pytest.raises(KeyError, match="'b' does not exist"):
        fr.apply_delta({"a": then[0][1]["a"], "c": then[0][1]["c"]}, fr.delta(run))
    with pytest.raises(ValueError, match="the rows of 'a' are not its table's"):
        fr.apply_delta({**then[0][1], "a": torch.zeros(11, 3)}, fr.delta(run))
    with pytest.raises((TypeError, ValueError), match=">= 0"):
        fr.delta(run, -1)
    mesh = fr.Mesh.emulated(x=2)
    with pytest.raises(TypeError, match="lies on no mesh"):
        fr.delta(run, mesh=mesh)


@pytest.mark.parametrize(
    "since, kind, told",
    [
        (torch.tensor([1, 2]), ValueError, "need  an int >= 0 or i"),
        (torch.tensor(1.5), TypeError, "need  an int >= 0 or i"),
        (torch.tensor(True), TypeError, "need  an int >= 0 or i"),
        (torch.tensor(-3), ValueError, "`since` is negative"),
    ],
)
def test_what_is_no_version_is_told(since, kind, told):
    """A version must be one whole number, at least 0."""
    with pytest.raises(kind, match=told):
        fr.delta(logged("adam").init(params()), since)


@pytest.mark.parametrize(
    "kind, told, change",
    [
        (TypeError, "has no rows", lambda own: torch.ones(3)),
        (TypeError, "has no rows", lambda own: (torch.ones(3),)),
        (TypeError, "have no numbers", lambda own: (replace(own, rows=own.rows.float()),)),
        (ValueError, "not as many as their values", lambda own: (replace(own, rows=own.rows[:1]),)),
        (ValueError, "not as many as their values", lambda own: (replace(own, values=own.values[:, 0]),)),
        (ValueError, "columns that their table lacks", lambda own: (replace(own, first=1),)),
        (ValueError, "not among its table's", lambda own: (replace(own, rows=own.rows - 1),)),
        (ValueError, "not among its table's", lambda own: (replace(own, rows=own.rows + 9),)),
    ],
)
def test_deltas_by_hand_are_told(kind, told, change):
    """A Delta built by hand that does not fit its tables raises before any row is written."""
    own = fr.history._delta.ChangedRows(torch.tensor([0, 2]), torch.ones(2, 4), 0, (11, 4))
    tables = {"a": torch.zeros(11, 4)}
    make = lambda part: fr.Delta({"a": part}, torch.tensor(1))
    assert fr.apply_delta(tables, make((own,)))["a"].sum() == 8
    with pytest.raises(kind, match=told):
        fr.apply_delta(tables, make(change(own)))

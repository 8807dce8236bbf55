"""rewind restores every bit of an earlier state, or says why it cannot."""

import pickle

import pytest
import torch
from programs import ordered, rewinding, training
from programs.moving import bits, full_state
from programs.rewinding import OPTIMIZERS, logged, params, states

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.testing import assert_trees_close

SOME = ["sgd", "adam", "stochastic_rounding", "accumulate"]
BATCHES = [training.batch(i, 6) for i in range(9)]


def donated(step):
    return fr.jit(step, donate=("state",))


def same(got, want):
    assert_trees_close(bits(got), bits(want))


def ordered_loss(params, batch):
    """Return the squared errors of the model that `logged` trains, each sum in one order."""
    acts = fr.lookup(params.tables, batch.ids, training.FEATURES).values
    logits = ordered.product(ordered.product(acts, params.dense["w"]).relu(), params.dense["v"])
    return ordered.total((logits - batch.label).square(), 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eight_steps_are_undone(name, interpreted):
    """rewind of 8 steps gives the earlier state bit for bit, for every row optimizer and combinator. Training from the
    earlier state gives the same bits. Some of the steps are jitted and donated."""
    dtype = torch.bfloat16 if name == "stochastic_rounding" else torch.float32
    step = logged(name, steps=8)
    fast, run = donated(step) if name in SOME else step, step.init(params(dtype))
    kept = {}
    for i in range(10):
        kept |= {i: fr.copy(run.state)} if i in (2, 5) else {}
        run, _ = fast(run, BATCHES[i % 9])
    assert name not in SOME or fast.num_compiled() == 1
    back = fr.rewind(run, 8)
    same(back.state, kept[2])
    for i in range(2, 5):
        back, _ = fast(back, BATCHES[i % 9])
    same(back.state, kept[5])


@pytest.mark.parametrize("name", SOME)
def test_logged_steps_are_the_steps(name):
    """A log changes no bit of a state, and no metric."""
    step, alone = logged(name), rewinding.plain(name)
    run, state = step.init(params()), alone.init(params())
    for batch in BATCHES[:6]:
        (run, metrics), (state, others) = step(run, batch), alone(state, batch)
        same((run.state, metrics), (state, others))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adamax", "Rprop"])
def test_dense_optimizers_are_undone(kind):
    """rewind also restores the dense parameters and the state of torch's optimizers."""
    step = logged("sgd", dense=getattr(torch.optim, kind))
    before, run = states(step, step.init(params()), BATCHES[:4])
    for k in range(5):
        same(fr.rewind(run, k).state, before[4 - k])


@pytest.mark.parametrize("name", SOME)
def test_a_rewound_call_may_use_up_its_argument(name, interpreted):
    """With donate=True, rewind writes the rows in place. A use of the old value then raises. The result can be rewound
    further, and trained on."""
    step = logged(name, steps=6)
    fast = donated(step)
    before, run = states(fast, step.init(params()), BATCHES)
    where = run.state.tables["a"].data_ptr()
    back = fr.rewind(run, 2, donate=True)
    assert back.state.tables["a"].data_ptr() == where
    with pytest.raises(fr.DonatedError):
        run.state.tables["a"].sum()
    same(back.state, before[7])
    same(fr.rewind(back, 4).state, before[3])
    for i in (7, 8):
        back, _ = fast(back, BATCHES[i])
    same(back.state, before[9])
    same(fr.rewind(back, 6).state, before[3])


def test_everything_that_is_logged_is_written_in_place():
    """The program of a donated step writes rows of tables, slots and log in place. The program makes new memory only
    for numbers and for dense parameters, which are new in every step."""
    step = logged("rowwise_adagrad")
    lowered = donated(step).lower(step.init(params()), BATCHES[0])
    moved = set(lowered.donated) - set(lowered.written)
    of_log = {f"state.log.{n}" for n in ("version", "kept", "place", "begun", "stamp", "origin")}
    assert {p for p in moved if "dense" not in p} == of_log | {"state.state.step", "state.state.key"}


def test_what_is_not_held_is_refused():
    """rewind over more steps than are held or taken says how many steps there are. 0 steps give the value itself."""
    step = logged("adam", steps=4)
    run = step.init(params())
    assert fr.rewind(run, 0) is run
    for taken in range(1, 7):
        run, _ = step(run, BATCHES[taken])
        held = min(taken, 4)
        with pytest.raises(ValueError, match=rf"{held + 1} steps cannot be undone.\n  got   {held} steps held"):
            fr.rewind(run, held + 1)
    back = fr.rewind(run, 3)
    with pytest.raises(ValueError, match=r"2 steps cannot be undone.\n  got   1 steps held"):
        fr.rewind(back, 2)


def test_a_step_with_too_many_rows_is_refused_and_forgotten():
    """A step that touched more rows than the log has room for is never undone in part. rewind over the step raises
    until the step has left the log. The states are right in any case."""
    step, plain = logged("adam", steps=2, rows={"a": 16, "b": 1, "c": 16}), logged("adam", steps=2)
    one = fr.Batch(replace(BATCHES[0].ids, values=torch.zeros_like(BATCHES[0].ids.values)), BATCHES[0].label)
    run, other, before = step.init(params()), plain.init(params()), []
    for batch in (one, BATCHES[0], one, one):
        before.append(run.state)
        run, _ = step(run, batch)
        other, _ = plain(other, batch)
        if len(before) in (2, 3):
            with pytest.raises(ValueError, match=r"a step touched more rows[\s\S]*rows more than `rows`"):
                fr.rewind(run, len(before) - 1)
    same(run.state, other.state)
    same(fr.rewind(run, 2).state, before[2])


def test_a_log_of_another_state_is_refused():
    """A log belongs to one state. With a state of another step, key or dense parameters, rewind raises."""
    step = logged("adam")
    _, run = states(step, step.init(params()), BATCHES[:3])
    _, other = states(step, step.init(params()), BATCHES[1:4])
    _, keyed = states(step, step.init(params(), fr.key(9)), BATCHES[:3])
    for state in (other.state, keyed.state, replace(run.state, step=run.state.step + 1)):
        with pytest.raises(ValueError, match="the log belongs to another state"):
            fr.rewind(replace(run, state=state))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_log_beside_a_restored_state_is_begun_anew(compiled, interpreted):
    """A step from another state than the log's state drops the earlier steps. Only that step can be undone. A delta
    since an earlier version has every row. rewind of 0 steps and later versions are as before."""
    step = logged("adam")
    fast = fr.jit(step) if compiled else step
    run = step.init(params())
    before, run = states(fast, run, BATCHES[:4])
    sent, version = run.state.tables, run.log.version
    best = before[2]
    run, _ = fast(replace(run, state=best), BATCHES[4])
    same(fr.rewind(run, 1).state, best)
    with pytest.raises(ValueError, match=r"2 steps cannot be undone.\n  got   1 steps held"):
        fr.rewind(run, 2)
    for since, tables in ((version, sent), (0, before[0].tables), (1, before[1].tables)):
        same(fr.apply_delta(tables, fr.delta(run, since)), run.state.tables)
    then = run
    run, _ = fast(run, BATCHES[5])
    same(fr.rewind(run, 2).state, best)
    same(fr.apply_delta(then.state.tables, fr.delta(run, then.log.version)), run.state.tables)
    assert sum(x.rows.numel() for (x,) in fr.delta(run, then.log.version).tables.values()) < 24
    same(fr.apply_delta(sent, fr.delta(run, version)), run.state.tables)


def test_a_restored_state_on_a_mesh_begins_its_log_anew():
    """On a mesh, a restored state also begins its log again, even when only some ranks' parts of the dense parameters
    differ."""
    mesh = fr.Mesh.emulated(x=2)
    plan = training.plan_of("row_wise", {"x": 2})
    step = logged("adam", mesh=mesh, plan=plan, dense_axes=("x",))
    run = step.init(params())
    before, run = states(step, run, [fr.shard(training.batch(i, 8), fr.P(("x",)), mesh=mesh) for i in range(3)])
    dense = before[3].dense
    on_rank_1 = lambda x: torch.cat([x[: x.shape[0] // 2], x[x.shape[0] // 2 :] + 1])
    other = replace(before[3], dense=fr.tree.map(on_rank_1, dense))
    run, _ = step(replace(run, state=other), fr.shard(training.batch(3, 8), fr.P(("x",)), mesh=mesh))
    assert int(run.log.kept) == 1
    assert int(run.log.begun) == int(run.log.version) == 4
    same(fr.rewind(run, 1, mesh=mesh).state, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_bit_comes_back(dtype):
    """Negative zeros, NaN payloads, denormals, and 64- and 16-bit tables are restored bit for bit."""
    sparse, dense = fr.optim.adam(lr=0.1), fr.optim.dense(torch.optim.SGD, lr=0.1)
    loss = lambda p, b: fr.lookup(p.tables, b.ids, training.FEATURES).values.square().mean()
    step = fr.logged(fr.train_step(loss, sparse=sparse, dense=dense), steps=3, rows=12)
    state = replace(full_state("adam", dtype), dense={}, dense_opt=dense.init({}))
    before, run = states(step, step.init(state), BATCHES[:3])
    for k in range(4):
        same(fr.rewind(run, k).state, before[3 - k])


def test_a_step_without_ids_is_a_step():
    """A batch of empty bags touches no row, and is undone like any other batch."""
    empty = fr.Batch(
        fr.KeyedJaggedTensor.from_lists({"u": [[]] * 6, "v": [[]] * 6}, dtype=torch.int64), BATCHES[0].label
    )
    step = logged("adam")
    before, run = states(step, step.init(params()), [empty, fr.Batch(empty.ids.pad_to(5), empty.label), BATCHES[1]])
    for k in range(4):
        same(fr.rewind(run, k).state, before[3 - k])


@pytest.mark.parametrize("compiled", [False, True])
def test_members_of_an_ensemble_are_undone(compiled, interpreted):
    """Under vmap every member has its own log. All members can be undone at once, or one member alone."""
    step = logged("adam")
    runs = torch.func.vmap(lambda key: step.init(params(), key))(fr.split(fr.key(0), 3))
    many = torch.func.vmap(step, in_dims=(0, None))
    before, runs = states(donated(many) if compiled else many, runs, BATCHES[:4])
    back = torch.func.vmap(lambda run: fr.rewind(run, 3))(runs)
    same(back.state, before[1])
    for i in range(3):
        alone = fr.rewind(fr.tree.map(lambda x: x[i].clone(), runs), 3)  # noqa: B023
        same(alone, fr.tree.map(lambda x: x[i], back))  # noqa: B023


@pytest.mark.parametrize("compiled", [False, True])
def test_a_member_of_an_ensemble_is_a_run_alone(compiled, interpreted):
    """The tables, slots, dense parameters and log of a member have the bits of a single run. The loss must sum in a
    fixed order, because a library may sum a product of three members in another order than the product of one
    member."""
    # an exact rate, so that eager torch's fused multiply-add changes no bit
    dense = fr.optim.dense(torch.optim.SGD, lr=2**-6)
    step = fr.logged(fr.train_step(ordered_loss, sparse=fr.optim.adam(lr=0.05), dense=dense), steps=4, rows=16)
    keys, many = fr.split(fr.key(0), 3), torch.func.vmap(step, in_dims=(0, None))
    runs = torch.func.vmap(lambda key: step.init(params(), key))(keys)
    _, runs = states(donated(many) if compiled else many, runs, BATCHES[:4])
    for i in range(3):
        _, alone = states(step, step.init(params(), keys[i]), BATCHES[:4])
        same(fr.tree.map(lambda x: x[i], runs), alone)  # noqa: B023


def test_scanned_steps_are_undone():
    """k steps by scan can be undone like k single steps."""
    step = logged("adam")
    batches = fr.tree.map(lambda *xs: torch.stack(xs), *BATCHES[:3])
    before, _ = states(step, step.init(params()), BATCHES[:3])
    run, _ = fr.scan(step, step.init(params()), batches)
    for k in range(4):
        same(fr.rewind(run, k).state, before[3 - k])


def test_fit_takes_a_logged_step():
    """fit trains a Logged. The steps of the run can be undone afterwards."""
    step = logged("adam")
    done = fr.fit(step, step.init(params()), BATCHES[:3], epochs=1)
    same(fr.rewind(done.state, 3).state, step.init(params()).state)


def test_a_call_that_fails_has_begun_or_not(interpreted, monkeypatch):
    """A donated call that is interrupted before it writes has taken neither state nor log. A call that is interrupted
    while it writes has taken both."""
    step = logged("adam")
    fast, run = donated(step), step.init(params())
    before, run = states(fast, run, BATCHES[:2])
    (entry,) = fast.compiled.values()

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(entry.rest, "call", fail)
        with pytest.raises(KeyboardInterrupt):
            fast(run, BATCHES[2])
    same(fr.rewind(run, 2).state, before[0])
    with monkeypatch.context() as patch:
        patch.setattr(entry.rest, "writes", fail)
        with pytest.raises(KeyboardInterrupt):
            fast(run, BATCHES[2])
    for x in fr.tree.leaves(run):
        with pytest.raises(fr.DonatedError):
            x + 1


def test_a_derivative_of_a_log_is_refused():
    """A log keeps bits, which have no derivative. A differentiated state therefore raises before any work."""
    step = logged("adam")
    run = step.init(params())
    with_tables = lambda run, t: replace(run, state=replace(run.state, tables={**run.state.tables, "a": t}))
    for f in (lambda r: step(r, BATCHES[0])[0], lambda r: fr.rewind(r, 0), lambda r: step.init(r.state)):
        with pytest.raises(TypeError, match="the state is differentiated"):
            torch.func.grad(lambda t: f(with_tables(run, t)).state.tables["a"].sum())(run.state.tables["a"])  # noqa: B023
        with pytest.raises(TypeError, match="the state is differentiated"):
            f(with_tables(run, run.state.tables["a"].clone().requires_grad_()))


def test_logged_steps_pickle_and_are_saved(tmp_path):
    """A logged step pickles. Its value can be checkpointed. rewind is the same after a load."""
    step = fr.logged(fr.train_step(loss, sparse=fr.optim.adam(lr=0.1), dense=DENSE), steps=2, rows=4)
    again = pickle.loads(pickle.dumps(step))
    run = again.init(fr.Params({"t": torch.zeros(5, 2)}, torch.ones(2)))
    before, run = states(step, run, [fr.KeyedJaggedTensor.from_lists({"k": [[i], [3, 3]]}) for i in range(3)])
    fr.save(tmp_path / "run.pt", run)
    loaded = fr.load(tmp_path / "run.pt")
    same(loaded, run)
    same(fr.rewind(loaded, 2).state, before[1])


@pytest.mark.parametrize(
    "change",
    [lambda t: t[:3], lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t], 1), torch.Tensor.half],
    ids=["short", "tall", "wide", "half"],
)
def test_tables_of_another_form_are_told(change):
    """A log whose tables changed their height, width or dtype raises before any work, in a step, rewind and delta."""
    step = logged("adam")
    _, run = states(step, step.init(params()), BATCHES[:2])
    tables = {n: change(t) for n, t in run.state.tables.items()}
    run = replace(run, state=replace(run.state, tables=tables))
    for call in (lambda: step(run, BATCHES[0]), lambda: fr.rewind(run, 1), lambda: fr.delta(run)):
        with pytest.raises(ValueError, match="the log belongs to another table 'a', or has other slots"):
            call()


@pytest.mark.parametrize("donate", [False, True])
def test_an_ensemble_is_undone_by_vmap(donate):
    """rewind of several states outside of vmap raises. The error suggests vmap."""
    runs = torch.func.vmap(lambda key: logged("adam").init(params(), key))(fr.split(fr.key(0), 3))
    with pytest.raises(TypeError, match=r"there are several states[\s\S]*torch.func.vmap"):
        fr.rewind(runs, 1, donate=donate)


DENSE = fr.optim.dense(torch.optim.Adam, lr=0.1)


def loss(params, ids):
    acts = fr.lookup(params.tables, ids, [fr.FeatureConfig("k", table="t")]).values
    return (acts * params.dense - 1).square().sum()


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: fr.logged(training.loss_fn, steps=2, rows=3), "TrainStep"),
        (lambda: fr.logged(fr.TrainStep(lambda p: p, lambda s, b: (s, {})), rows=3), "train_step made"),
        (lambda: logged("adam", rows=None), "`rows` is missing"),
        (lambda: logged("adam", steps=0), "`rows` requires steps that are kept"),
        (lambda: logged("adam", rows=0), ">= 1"),
        (lambda: logged("adam", steps=-1), ">= 0"),
        (lambda: logged("adam", rows={"a": 3}).init(params()), r"`rows\['b'\]` is missing"),
        (lambda: logged("adam", rows=dict.fromkeys("abcd", 3)).init(params()), r"`rows` names no table"),
        (lambda: logged("adam")(training.params(), BATCHES[0]), "not a Logged"),
        (lambda: fr.rewind(rewinding.logged("adam").init(params()), -1), ">= 0"),
        (lambda: fr.rewind(logged("adam").init(params()).state, 1), "Logged"),
        (lambda: fr.rewind(logged("adam").init(params()), mesh=fr.Mesh.emulated(x=2)), "lies on no mesh"),
    ],
)
def test_wrong_arguments_are_told(make, told):
    """A value that cannot be logged or undone raises with its name."""
    with pytest.raises((TypeError, ValueError, KeyError), match=told):
        make()

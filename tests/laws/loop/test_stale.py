"""A stale pipeline equals the plain loop with the same staleness, bit for bit, or the call raises."""

import threading

import pytest
import torch
from funcrec.kernels import library
from programs import stale, training

import funcrec as fr
from funcrec.loop._stale import CALL
from funcrec.testing import assert_trees_close

MESH = fr.Mesh.emulated(x=2)
SGD = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
ITEM = fr.FeatureConfig("clicked", table="item")


def run(pipe, state, batches):
    out = [(state, metrics) for state, metrics in pipe.run(state, batches)]
    return out[-1][0], [metrics for _, metrics in out]


def small(loss_fn, **how):
    step = fr.train_step(loss_fn, **SGD, **how)
    tables = {"item": torch.linspace(-1, 1, 12).reshape(6, 2)}
    return step, step.init(fr.Params(tables, {"w": torch.ones(2)}))


def ids(*numbers):
    return fr.KeyedJaggedTensor.from_lists({"clicked": [[i] for i in numbers]})


def score(params, ids):
    return (fr.lookup(params.tables, ids, [ITEM]).values @ params.dense["w"]).square().mean()


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad", "by_table", "accumulate"])
def test_a_stale_pipeline_is_the_loop_by_hand(name):
    """In one process, gradients use the tables before the last update and the present dense parameters. The gradients
    update the present tables. The bits equal those of the loop by hand, even for a last batch of another size."""
    batches = [training.batch(i, 4) for i in range(4)] + [training.batch(4, 3)]
    step = fr.train_step(training.loss_fn, **training.optimizers(name))
    got = run(fr.stale_pipeline(step), step.init(training.params()), iter(batches))
    assert_trees_close(stale.whole(None, *got), stale.alone(name, batches), rtol=0, atol=0)


def test_an_emulated_mesh_is_the_loop():
    """On an emulated mesh, the bits equal those of a step that gets the previous tables. The results agree within 1e-6
    with the loop by hand."""
    batches = [training.batch(i, 4) for i in range(4)]
    how = {"mesh": MESH, "plan": training.plan_of("row_wise", MESH.shape)}
    step = fr.train_step(training.loss_fn, **training.optimizers("adam"), **how)
    state = step.init(training.params())
    got = run(fr.stale_pipeline(step, mesh=MESH), state, batches)
    assert_trees_close(got, stale.loop(step, state, batches), rtol=0, atol=0)
    assert_trees_close(stale.whole(MESH, *got), stale.alone("adam", batches, 2), rtol=0, atol=1e-6)


def test_one_batch_is_a_step_and_a_run_begins_anew():
    """The first batch of a run reads the present tables. Runs of one batch therefore equal the plain loop."""
    step, state = small(score)
    want = state
    pipe = fr.stale_pipeline(step)
    for batch in (ids(0, 1), ids(1, 1), ids(2, 0)):
        (state, _), (want, _) = run(pipe, state, [batch]), step(want, batch)
    assert_trees_close(state, want, rtol=0, atol=0)
    assert list(pipe.run(state, [])) == []


# the call that fails, and the number of calls so far
FAULTS = [0, 0]


def fault(x):
    FAULTS[1] += 1
    if FAULTS[0] == FAULTS[1]:
        raise KeyboardInterrupt
    return x.clone()


def test_the_state_is_whole_behind_an_interrupt():
    """If a compiled step that donates its state is interrupted while it computes, the state is whole and training can
    continue. After a step the state is gone."""
    library.define("test_stale", "fault", "(Tensor x) -> Tensor", fault, torch.empty_like)
    step, first = small(lambda p, b: score(p, b) + torch.ops.test_stale.fault(p.dense["w"].detach()).sum())
    batches = [ids(0, 1), ids(1, 1), ids(2, 0)]
    pipe, state, now = fr.stale_pipeline(fr.jit(step, donate=("state",))), fr.copy(first), None
    want = run(pipe, first, batches[:2])[0]
    FAULTS[:] = [3, 0]
    with pytest.raises(KeyboardInterrupt):
        for now, _ in pipe.run(state, batches):  # noqa: B007
            pass
    assert_trees_close(now, want, rtol=0, atol=0)
    run(pipe, now, batches[2:])
    with pytest.raises(fr.DonatedError):
        now.dense["w"] + 1
    assert not [t for t in threading.enumerate() if t.name == CALL]


def test_an_error_of_the_loader_comes_at_its_place():
    """An error of the loader is raised after the batches before it. No thread is left."""

    def broken():
        yield from (ids(0, 1), ids(1, 1))
        raise LookupError

    (step, state), seen = small(score), 0
    with pytest.raises(LookupError):
        for _ in fr.stale_pipeline(step).run(state, broken()):
            seen += 1
    assert seen == 2 and not [t for t in threading.enumerate() if t.name == CALL]


def draws(params, batch, key):
    rows = fr.fold_in(key, 1) % 6
    return score(params, fr.KeyedJaggedTensor(rows.reshape(1), torch.tensor([0, 1]), keys=("clicked",)))


@pytest.mark.parametrize("loss_fn, how", [
    (draws, {}), (score, {"micro_batches": 2}),
    (lambda p, b: score(p, ids(0, 1)) + (p.dense["w"][0] > 0) * score(p, fr.KeyedJaggedTensor(
        (p.dense["w"].detach() > 0).long(), torch.tensor([0, 2]), keys=("clicked",))), {}),
])  # fmt: skip
def test_lookups_that_wait_for_the_state_are_refused(loss_fn, how):
    """Ids that depend on the key or on dense parameters, and micro-batches, raise an error before any step."""
    step, state = small(loss_fn, **how)
    with pytest.raises(ValueError, match=r"(?s)funcrec.stale_pipeline: a lookup waits for the state.*fr.pipeline"):
        next(fr.stale_pipeline(step).run(state, [ids(0, 1)]))


def test_what_follows_or_looks_at_a_run_is_refused():
    """A run refuses a state that requires grad or has another form, an outer transform or `checked`, and a single
    batch. Each error has a message."""
    step, state = small(score)
    pipe = fr.stale_pipeline(step)
    tracked = fr.tree.map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, state)
    with pytest.raises(TypeError, match=r"funcrec.stale_pipeline: .*is taken where something follows"):
        next(pipe.run(tracked, [ids(0, 1)]))
    with pytest.raises(TypeError, match=r"funcrec.stale_pipeline: .*is taken where something follows"):
        torch.func.vmap(lambda x: next(pipe.run(state, [ids(0, 1)]))[1]["loss"] + x)(torch.ones(2))
    with pytest.raises(ValueError, match="a program is not looked at"):
        fr.checked(lambda: next(pipe.run(state, [ids(0, 1)])))()
    with pytest.raises(TypeError, match=r"(?s)a single batch has no stale rows.*stale.run"):
        pipe(state, ids(0, 1))
    begun = pipe.run(state, [ids(0, 1), ids(1, 1)])
    next(begun)
    with torch.inference_mode(), pytest.raises(ValueError, match="rows were read for another program"):
        next(begun)

"""Gradients that wait for a later step (`optim.accumulate`) keep their order.

The order stays when a state is gathered, resharded, saved or loaded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import training
from programs.moving import bits
from programs.training import plan_of

import funcrec as fr
from funcrec.checkpoint import load_as
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

RULES = {"elements": lambda: fr.optim.adam(lr=0.1), "rows": lambda: fr.optim.rowwise_adagrad(lr=0.1)}
ROOM = {"a": 9, "b": 4, "c": 2}


@st.composite
def laid_out(draw, replicas):
    """Return random (axes, plan) on one to four ranks."""
    mesh = draw(frs.meshes(max_ranks=4))
    return mesh.shape, draw(frs.plans(training.SHAPES, mesh, replicas=replicas))


def optimizer(rule, every=3):
    """Return an optimizer with less room for table a than the table's state has, because a gathered state has more
    room."""
    return fr.optim.accumulate(RULES[rule](), every=every, capacity={**ROOM, "a": 5})


def waiting_state(sparse, seed):
    """Return a plain state with repeated rows. Unused entries between them have NaN gradients."""
    g, params = torch.Generator().manual_seed(seed), training.params()
    slots = sparse.init(params.tables)
    for n, room in ROOM.items():
        rows, dim = training.SHAPES[n]
        at = torch.randint(-1, rows // 2 + 1, (3, room), generator=g)
        held = torch.where(at[..., None] < 0, torch.nan, torch.randn(3, room, dim, generator=g))
        slots[n] |= {"pending_rows": at, "pending_grads": held}
    return fr.TrainState(torch.tensor(4), params.tables, slots, {}, {}, fr.key(0))


def terms(state):
    """Return {table: for each step {row: the bits of the row's gradients, in order}}."""
    out = {}
    for n, own in state.slots.items():
        out[n] = [{} for _ in own["pending_rows"]]
        held = own["pending_grads"].view(torch.int32)
        for of_step, rows, grads in zip(out[n], own["pending_rows"].tolist(), held.tolist(), strict=True):
            for row, grad in zip(rows, grads, strict=True):
                of_step.setdefault(row, []).append(grad)
            of_step.pop(-1, None)
    return out


@settings(max_examples=25)
@given(st.sampled_from(list(RULES)), laid_out(True), laid_out(False), st.integers(0, 9))
def test_every_row_keeps_its_terms_under_every_plan(tmp_path_factory, rule, first, second, seed):
    """A state is laid out by two plans in turn, directly or through a folder, then gathered or loaded whole. Every row
    keeps its waiting gradients in their order. Both ways give the same state."""
    sparse, folder = optimizer(rule), tmp_path_factory.mktemp("waiting")
    state = waiting_state(sparse, seed)
    (axes, plan), (others, other) = first, second
    here, there = fr.Mesh.emulated(**axes), fr.Mesh.emulated(**others)
    one = fr.reshard(state, plan, mesh=here, sparse=sparse)
    two = fr.reshard(one, other, mesh=there, sparse=sparse, from_mesh=here)
    path = fr.save(folder / "ranks", one)
    for got in (fr.gather_state(one, here), fr.gather_state(two, there), fr.load(path)):
        assert terms(got) == terms(state)
    for source in (path, fr.save(folder / "one", state)):
        loaded = fr.load(source, plan=other, mesh=there, sparse=sparse)
        assert terms(fr.gather_state(loaded, there)) == terms(state)
    assert_trees_close(bits(fr.load(path, plan=other, mesh=there, sparse=sparse)), bits(two))
    # `fit` resumes in this way
    assert_trees_close(bits(load_as(path, two, mesh=there)), bits(two))


def test_one_process_goes_on_in_the_room_of_several():
    """One process can train on a state that two ranks trained, gathered while gradients wait. Its rows equal those of a
    state that was never on ranks."""
    batches = [training.batch(i, 4) for i in range(3)]
    sparse = fr.optim.accumulate(RULES["elements"](), every=3, capacity=256)
    mesh, opts = fr.Mesh.emulated(x=2), {"sparse": sparse, "dense": fr.optim.dense(torch.optim.SGD, lr=0.0)}
    alone = fr.train_step(training.loss_fn, **opts)
    together = fr.train_step(training.loss_fn, **opts, mesh=mesh, plan=plan_of("row_wise", {"x": 2}), exact=True)
    want, state = alone.init(training.params()), together.init(training.params())
    for batch in batches:
        want, _ = alone(want, batch)
    for batch in batches[:2]:
        state, _ = together(state, batch)
    got = fr.gather_state(state, mesh)
    assert {n: own["pending_rows"].shape for n, own in got.slots.items()} == dict.fromkeys("abc", (3, 512))
    got, _ = alone(got, batches[2])
    assert_trees_close(got.tables, want.tables, rtol=2e-6, atol=2e-6)


def test_copies_that_train_apart_keep_what_waits():
    """sync_replicas merges the tables and slots of the copies, and leaves each copy its waiting gradients. After they
    are used, the state can be gathered."""
    mesh, plan = fr.Mesh.emulated(copy=2), fr.Plan({"t": fr.replicated()}, replicas="copy")
    sparse = fr.optim.accumulate(fr.optim.adagrad(1.0), every=2, capacity=4)
    loss_fn = lambda p, ids: -fr.lookup(p.tables, ids, [fr.FeatureConfig("k", table="t")]).values.sum()
    dense = fr.optim.dense(torch.optim.SGD, lr=0.1)
    step = fr.train_step(loss_fn, sparse=sparse, dense=dense, mesh=mesh, plan=plan)
    state = step.init(fr.Params({"t": torch.zeros(3, 1)}, {}))
    ids = fr.KeyedJaggedTensor.from_lists({"k": [[0, 2], [1, 1]]})
    waits, _ = step(state, ids)
    synced = fr.sync_replicas(waits, mesh=mesh)
    assert_trees_close(synced.slots, waits.slots)
    with pytest.raises(ValueError, match="copies that trained apart"):
        fr.gather_state(synced, mesh)
    used = fr.sync_replicas(step(synced, ids)[0], mesh=mesh)
    assert fr.gather_state(used, mesh).tables["t"].flatten().tolist() == [0.5, 0.5, 0.5]


WRONG = {
    "another every": ("reshard", lambda: optimizer("elements", every=2), r"optim.accumulate\(every=3\), of which"),
    "no accumulate": ("reshard", RULES["elements"], "an optimizer without `accumulate`"),
    "load no accumulate": ("load", RULES["elements"], "an optimizer without `accumulate`"),
    "load without": ("load", lambda: None, "`sparse` is missing"),
}


@pytest.mark.parametrize(("call", "sparse", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_go_on_with_them_is_refused(call, sparse, said, tmp_path):
    """With waiting gradients, a plan requires the optimizer that uses these gradients."""
    state, mesh, plan = waiting_state(optimizer("elements"), 0), fr.Mesh.emulated(x=2), plan_of("row_wise", {"x": 2})
    path = fr.save(tmp_path / "one", state)
    with pytest.raises(ValueError, match=said):
        if call == "reshard":
            fr.reshard(state, plan, mesh=mesh, sparse=sparse())
        else:
            fr.load(path, plan=plan, mesh=mesh, sparse=sparse())


@pytest.mark.parametrize("lost", ["pending_rows", "pending_grads"])
def test_half_of_them_is_refused(lost, tmp_path):
    """reshard and load refuse waiting rows without gradients, and gradients without rows."""
    sparse, mesh, plan = optimizer("elements"), fr.Mesh.emulated(x=2), plan_of("row_wise", {"x": 2})
    state = waiting_state(sparse, 0)
    del state.slots["b"][lost]
    path = fr.save(tmp_path / "one", state)
    for call in (
        lambda: fr.reshard(state, plan, mesh=mesh, sparse=sparse),
        lambda: fr.load(path, plan=plan, mesh=mesh, sparse=sparse),
    ):
        with pytest.raises(ValueError, match=r"the gradients that wait for 'b' .* are not whole"):
            call()

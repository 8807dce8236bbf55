"""A store belongs to the last state of its run. States, stores, ids and losses that do not fit are refused."""

import dataclasses

import pytest
import torch
from programs.cached_users import CAPACITY, KEY, NUM_ROWS, OPTIMIZERS, Both, batches_of, loss_fn

import funcrec as fr
from funcrec.testing import assert_trees_close


def test_a_store_belongs_to_the_last_state():
    """A step, a reading and a commit with an older state are refused, and the last state goes on."""
    both, batches = Both(), batches_of(5, 5)
    old = both.state
    for batch in batches[:3]:
        both.whole, _ = both.step(both.whole, batch)
        both.state, _ = both.cached(both.state, batch)
    for call in (
        lambda: both.cached(old, batches[3]),
        lambda: both.cached.read(old.params, batches[3]),
        lambda: both.cached.commit(old),
        lambda: both.cached.ahead(old, batches),
    ):
        with pytest.raises(ValueError, match=r"(?s)not the one that store 'users' belongs to.*step 0.*after step 3"):
            call()
    for batch in batches[3:]:
        both.whole, _ = both.step(both.whole, batch)
        both.state, _ = both.cached(both.state, batch)
    both.check_all()


def test_a_rollback_returns_to_a_state():
    """After `rollback` a state of the last commit, or of the one before, trains again with the same bits. A state
    between two commits is refused."""
    both, batches = Both(), batches_of(7, 8)
    states = []
    for k, batch in enumerate(batches, 1):
        both.state, _ = both.cached(both.state, batch)
        states.append(fr.copy(both.state))
        if k in (2, 4, 6):
            both.cached.commit(both.state)
    for k in (1, 2, 5, 7):
        with pytest.raises(ValueError, match="is not the step of a commit"):
            both.cached.rollback(states[k - 1])
    for k in (6, 4):
        both.cached.rollback(states[k - 1])
        state = states[k - 1]
        for batch in batches[k:]:
            state, _ = both.cached(state, batch)
        assert_trees_close(state, states[-1], rtol=0, atol=0)
        both.cached.rollback(states[k - 1])


def test_a_store_of_another_run_is_refused():
    """Two runs that committed the same number of steps have different records: the state of one does not take the
    other's store."""
    both, batches = Both(), batches_of(7, 6)
    first = both.state
    ends = []
    for part in (batches[:3], batches[3:]):
        both.state = first
        both.cached.rollback(first)
        for batch in part:
            both.state, _ = both.cached(both.state, batch)
        both.cached.commit(both.state)
        ends.append(both.state)
    with pytest.raises(ValueError, match="was committed with another state"):
        both.cached.rollback(ends[0])
    with pytest.raises(ValueError, match="was committed with another state"):
        both.cached(ends[0], batches[0])
    both.cached(ends[1], batches[0])
    both.cached.rollback(ends[1])


def test_a_state_that_another_step_trained_is_refused():
    """A plain step on a cached state leaves no mark at the rows that it changes, so a commit is refused."""
    both, batch = Both(), batches_of(1, 1)[0]
    both.state, _ = both.cached(both.state, batch)
    other, _ = both.step(both.state, batch)
    for call in (lambda: both.cached.commit(other), lambda: both.cached(other, batch)):
        with pytest.raises(ValueError, match="another step trained"):
            call()


def test_batches_of_a_loop_that_ended_are_refused():
    """A batch that was read ahead knows the steps of its own loop alone: after a step with another batch, another loop,
    or a rollback it is refused, although its number is the next one. The state goes on."""
    for end in ("step", "loop", "rollback"):
        both, batches = Both(depth=3), batches_of(5, 5)
        first = both.state
        ahead = list(both.cached.ahead(both.state, batches))
        if end == "rollback":
            both.state, _ = both.cached(both.state, ahead[0])
            both.cached.rollback(first)
            both.state = first
        else:
            one = batches[4] if end == "step" else next(both.cached.ahead(both.state, [batches[4]]))
            both.whole, _ = both.step(both.whole, batches[4])
            both.state, _ = both.cached(both.state, one)
        with pytest.raises(ValueError, match="read ahead by a loop that ended"):
            both.cached(both.state, ahead[0 if end == "rollback" else 1])
        both.whole, _ = both.step(both.whole, batches[1])
        both.state, _ = both.cached(both.state, batches[1])
        both.check_all()


def test_a_store_of_another_optimizer_is_refused():
    """Records have the slots of one optimizer, with its first numbers: a step with another one is refused."""
    both = Both("adagrad")
    for other in (OPTIMIZERS["sgd"], OPTIMIZERS["adam"], fr.optim.adagrad(0.1, initial_accumulator=0.5)):
        with pytest.raises(ValueError, match="another optimizer than store 'users'"):
            fr.cached_step(fr.train_step(loss_fn, sparse=other, admit=False), {"users": both.store})


def test_batches_ahead_are_taken_in_their_order():
    """A batch that was read ahead for another step is refused, and changes nothing."""
    both, batches = Both(depth=3), batches_of(5, 4)
    ahead = list(both.cached.ahead(both.state, batches))
    with pytest.raises(ValueError, match="out of its order"):
        both.cached(both.state, ahead[1])
    for batch, one in zip(batches, ahead, strict=True):
        both.whole, _ = both.step(both.whole, batch)
        both.state, _ = both.cached(both.state, one)
    both.check_all()


@pytest.mark.parametrize("ids", [[NUM_ROWS], [-1], [2**63 - 1]])
def test_ids_outside_the_store_are_refused(ids):
    """An id that is not a row raises before anything is written, in a step, ahead, and in a reading."""
    both = Both()
    good, bad = (
        batches_of(1, 1)[0],
        fr.Batch(fr.KeyedJaggedTensor.from_lists({"user": [[1, *ids]], "item": [[0]]}), torch.ones(1)),
    )
    for call in (
        lambda: both.cached(both.state, bad),
        lambda: next(both.cached.ahead(both.state, [bad])),
        lambda: both.cached.read(both.state.params, bad),
    ):
        with pytest.raises(IndexError, match="cache 'users' are not rows of its store"):
            call()
    both.whole, _ = both.step(both.whole, good)
    both.state, _ = both.cached(both.state, good)
    both.check_all()


def test_a_step_whose_ids_do_not_fit_is_refused():
    """If a step has more ids of a bucket of the cache than the bucket has rows, it raises, and nothing changes."""
    both = Both()
    ids = fr.KeyedJaggedTensor.from_lists({"user": [list(range(CAPACITY + 1))], "item": [[0]]})
    with pytest.raises(ValueError, match=r"(?s)no room for the ids of a step.*capacity="):
        both.cached(both.state, fr.Batch(ids, torch.ones(1)))
    batch = batches_of(1, 1)[0]
    both.whole, _ = both.step(both.whole, batch)
    both.state, _ = both.cached(both.state, batch)
    both.check_all()


def test_what_cannot_hold_a_part_of_its_rows_is_refused():
    """Steps that admit ids, have a capacity or draw rows, followed states, codes, other meshes: refused in words."""
    both, batch = Both(), batches_of(1, 1)[0]
    stores, sparse = {"users": both.store}, OPTIMIZERS["adam"]
    with pytest.raises(ValueError, match="admits ids itself"):
        fr.cached_step(fr.train_step(loss_fn, sparse=sparse), stores)
    mesh = fr.Mesh.emulated(a=2)
    plan = fr.Plan({c.name: fr.row_wise("a") for c in both.configs})
    on_mesh = {"sparse": sparse, "mesh": mesh, "plan": plan, "admit": False}
    with pytest.raises(ValueError, match="`capacity` does not go with caches"):
        fr.cached_step(fr.train_step(loss_fn, **on_mesh, capacity=8), stores)
    with pytest.raises(ValueError, match="does not lie on the mesh"):
        fr.cached_step(fr.train_step(loss_fn, **on_mesh), stores)(both.state, batch)
    with pytest.raises(TypeError, match="not a step"):
        fr.cached_step(lambda state, batch: (state, {}), stores)
    with pytest.raises(ValueError, match=r"(?s)in stores.*cached_step"):
        fr.train_step(loss_fn, sparse=sparse)(both.state, batch)
    with pytest.raises(ValueError, match="in stores"):
        fr.quantize(both.state.tables)
    with pytest.raises(ValueError, match="in stores"):
        fr.export(loss_fn, both.state.params, batch, "package")
    tracked = fr.tree.map(lambda x: x.requires_grad_() if x.is_floating_point() else x, fr.copy(both.state.params))
    with pytest.raises(TypeError, match="tracked by a transform"):
        both.cached.read(tracked, batch)
    with pytest.raises(TypeError, match="tracked by a transform"):
        both.cached(dataclasses.replace(both.state, dense=tracked.dense), batch)
    with pytest.raises(TypeError, match="read under a transform"):
        torch.func.grad(lambda d: loss_fn(*both.cached.read(fr.Params(both.state.tables, d), batch)))(both.state.dense)
    with pytest.raises(TypeError, match="not cached"):
        both.cached(both.whole, batch)
    with pytest.raises(ValueError, match="belongs to no row"):
        fr.table_store(both.configs[:1], fr.optim.accumulate(sparse, every=2, capacity=8), key=KEY)
    with pytest.raises(ValueError, match="differ in their numbers of rows"):
        fr.table_store(both.configs, sparse, key=KEY)


def test_a_loss_over_all_items_is_refused():
    """A sequence model scores every item, and a cache has some: its loss says so."""
    items, history = fr.TableConfig("item", 300, 4), fr.FeatureConfig("seen", table="item", pooling="none")
    model = fr.models.sasrec([items], history, max_length=3)
    store = fr.table_store([items], OPTIMIZERS["adam"], key=KEY)
    tables = fr.cached_tables({}, {"items": fr.CacheConfig(store, CAPACITY, [history])})
    step = fr.cached_step(fr.train_step(fr.models.next_item_loss(model), admit=False), {"items": store})
    state = step.init(fr.Params(tables, model.init(fr.key(0)).dense))
    with pytest.raises(ValueError, match="a table with a row for each item"):
        step(state, fr.Batch(fr.KeyedJaggedTensor.from_lists({"seen": [[1, 2, 3]]})))


def test_read_rows_are_differentiated():
    """A loss of the rows that were read has the derivatives of the loss on whole tables."""
    both, batch = Both(), batches_of(1, 1)[0]
    both.state, _ = both.cached(both.state, batch)
    both.whole, _ = both.step(both.whole, batch)
    params, of_rows = both.cached.read(both.state.params, batch)
    of = lambda params, batch: torch.func.hessian(lambda d: loss_fn(fr.Params(params.tables, d), batch))(params.dense)
    assert torch.equal(of(params, of_rows), of(both.whole.params, batch))


def test_states_and_stores_that_do_not_fit_are_refused():
    """No store, one of another rank, states of other stores or on a mesh, and tables twice raise."""
    both, batch = Both(), batches_of(1, 1)[0]
    sparse, config = OPTIMIZERS["adam"], both.configs[0]
    step, store = fr.train_step(loss_fn, sparse=sparse, admit=False), both.store
    with pytest.raises(ValueError, match="`stores` are empty"):
        fr.cached_step(step, {})
    with pytest.raises(ValueError, match=r"store 'users' is that of another rank.*\n  got   part \(1, 2\)"):
        fr.cached_step(step, {"users": dataclasses.replace(store, part=(1, 2))})
    with pytest.raises(ValueError, match="`stores` are not those of the tables"):
        fr.cached_step(step, {"others": store})(both.state, batch)
    for call in (both.cached.commit, both.cached.rollback, lambda state: both.cached(state, batch)):
        with pytest.raises(TypeError, match=r"is not a (state|TrainState)"):
            call(3)
    mesh = fr.Mesh.emulated(a=1)
    plan = fr.Plan({c.name: fr.replicated() for c in both.configs})
    with pytest.raises(ValueError, match="`state` lies on a mesh"):
        both.cached(fr.reshard(both.state, plan, mesh=mesh, sparse=sparse), batch)
    with pytest.raises(ValueError, match="is in memory and in a store"):
        fr.cached_tables({config.name: torch.ones(3, 2)}, {"users": fr.CacheConfig(store, capacity=128, features=[])})
    with pytest.raises(ValueError, match="name a table twice"):
        fr.table_store([config, config], sparse, key=KEY)

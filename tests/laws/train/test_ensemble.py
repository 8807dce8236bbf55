"""Ensembles. vmap over states equals runs of the members one by one.

The laws include running statistics, meshes, nested vmap, compiled and donated steps."""

import contextlib
import warnings

import pytest
import torch
from funcrec.kernels import ops
from torch.func import vmap

import funcrec as fr
from funcrec.core._tree import map_tensors, replace, tree_leaves, tree_map
from funcrec.testing import assert_trees_close

F64 = torch.float64
K = 3
TABLES = (fr.TableConfig("u", 6, 2, dtype=F64), fr.TableConfig("i", 5, 2, dtype=F64))
FEATURES = (fr.FeatureConfig("u", table="u"), fr.FeatureConfig("i", table="i", pooling="mean"))
IDS = fr.KeyedJaggedTensor.from_lists({"u": [[1], [3, 3], [0], [2]], "i": [[2, 2, 4], [0], [], [1]]})
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
stack = lambda *trees: tree_map(lambda *x: torch.stack(x), *trees)
member = lambda tree, *i: map_tensors(lambda x: x[i], tree)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def batch(seed):
    return fr.Batch(IDS, (draw(seed, 4) > 0).double(), draw(seed + 1, 4, 3))


def with_batch_norm():
    """Return a step of a model with running statistics and dropout, and the parameters of each member."""
    model = fr.models.deepfm(TABLES, FEATURES, num_dense=3, sizes=(4,), batch_norm=True, dropout=0.2)
    dense = fr.optim.dense(torch.optim.SGD, lr=0.05, momentum=0.9)
    options = {"sparse": fr.optim.rowwise_adagrad(0.1), "dense": dense, "has_aux": True}
    step = fr.train_step(fr.models.loss(model), **options, merge=fr.models.merge_stats)
    return step, [map_tensors(torch.Tensor.double, model.init(fr.key(i))) for i in range(K)]


def addresses(state):
    return [x.data_ptr() for x in tree_leaves((state.tables, state.slots))]


@pytest.mark.parametrize(("how", "each"), [("eager", True), ("eager", False), ("donated", True)])
def test_an_ensemble_with_batch_norm_is_its_members(how, each, interpreted):
    """Steps of three members by vmap, with running statistics and dropout, equal three runs. Donated steps stay in
    place from the first call on."""
    step, params = with_batch_norm()
    keys = [fr.key(7 + i) for i in range(K)]
    apart = [step.init(p, key) for p, key in zip(params, keys, strict=True)]
    together, many = vmap(step.init)(stack(*params), torch.stack(keys)), vmap(step, in_dims=(0, 0 if each else None))
    many = many if how == "eager" else fr.jit(many, donate=("state",))
    assert_trees_close(together, stack(*apart), rtol=0, atol=0)
    places = addresses(together)
    for t in range(3):
        batches = [batch(10 * t + i * each) for i in range(K)]
        with warnings.catch_warnings():
            # a warning of copied memory fails the test
            warnings.filterwarnings("error", message="funcrec")
            together, metrics = many(together, stack(*batches) if each else batches[0])
        made = [step(x, b) for x, b in zip(apart, batches, strict=True)]
        apart = [state for state, _ in made]
        assert_trees_close((together, metrics), (stack(*apart), stack(*(m for _, m in made))), **CLOSE)
        assert how == "eager" or addresses(together) == places
    stats = tree_leaves(together.dense["stats"])[0]
    # the statistics of the members differ
    assert float(stats.std(0).min()) > 0.01
    assert how == "eager" or many.num_compiled() == 1


@pytest.mark.parametrize("dense_axes", [(), ("x",)], ids=["dense on all", "dense cut"])
def test_the_first_state_of_an_ensemble_on_a_mesh_has_memory_of_its_own(dense_axes):
    """Under vmap every member has its own memory for banks, slots, optimizer state, step and key, with the values of
    init. A step equals the step of each member."""
    plan = fr.Plan({"u": fr.row_wise("x"), "i": fr.replicated()})
    loss = lambda p, ids: (fr.lookup(p.tables, ids, FEATURES).values * p.dense["w"]).sin().mean()
    options = {"sparse": fr.optim.adam(0.1), "dense": fr.optim.dense(torch.optim.Adam, lr=0.1)}
    step = fr.train_step(loss, **options, mesh=fr.Mesh.emulated(x=2), plan=plan, dense_axes=dense_axes)
    params = fr.Params({"u": draw(0, K, 6, 2), "i": draw(1, K, 5, 2)}, {"w": draw(2, K, 4)})
    state, apart = vmap(step.init)(params), [step.init(member(params, i)) for i in range(K)]
    assert all(x.is_contiguous() for x in tree_leaves(state))
    assert_trees_close(state, stack(*apart), rtol=0, atol=0)
    got, need = vmap(step, in_dims=(0, None))(state, IDS), stack(*(step(x, IDS) for x in apart))
    assert_trees_close(got, need, **CLOSE)


def test_what_some_members_share_is_every_members_own_in_the_first_state():
    """Members may start with one table, may differ only in their key, or may be nested. Each member has its own memory
    for all trained leaves."""
    step = fr.train_step(lambda p, b: p.dense.sum(), sparse=fr.optim.adam(0.1), dense=fr.optim.dense(torch.optim.SGD))
    tables, dense, keys = {"t": -torch.zeros(4, 2)}, draw(0, K, 2), torch.stack([fr.key(i) for i in range(K)])
    first = lambda dense, key: step.init(fr.Params(tables, dense), key)
    states = [vmap(first, in_dims=(0, None))(dense, fr.key(0)), vmap(first, in_dims=(None, 0))(dense[0], keys)]
    states.append(vmap(vmap(first, in_dims=(None, 0)), in_dims=(0, None))(dense, keys))
    for state in states:
        assert all(x.is_contiguous() for x in tree_leaves(state))
        assert_trees_close(map_tensors(lambda x: x[(0,) * (x.dim() - 2)], state.tables), tables, rtol=0, atol=0)
        assert bool(state.tables["t"].signbit().all())


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_vmap_of_vmap_is_every_member(implementation):
    """Lookups and steps (gradients, sums, updates) on stacks of stacks of tables, ids and weights equal the loop, in
    any nesting."""
    features = [replace(f, weighted=True) for f in FEATURES]
    loss = lambda p, ids: (fr.lookup(p.tables, ids, features).values * p.dense).sin().mean()
    step = fr.train_step(loss, sparse=fr.optim.adam(0.1), dense=fr.optim.dense(torch.optim.Adam, lr=0.05))
    params = fr.Params({"u": draw(0, 2, K, 6, 2), "i": draw(1, 2, K, 5, 2)}, draw(2, 2, K, 4))
    size = IDS.values.shape[0]
    mine = lambda j, i: replace(IDS, values=IDS.values.roll(j) + i - 1, weights=draw(3 + j + 5 * i, size))
    ids = stack(*(stack(*(mine(j, i) for i in range(K))) for j in range(2)))
    state = vmap(vmap(step.init))(params)
    state = replace(state, step=state.step + torch.arange(6).view(2, K))
    shared = member(state, 0, 0)
    run = lambda state, ids: (step(state, ids), fr.lookup(state.tables, ids, features).values)
    ways = {  # (outer in_dims, inner in_dims): member (j, i) of state and ids
        ((0, 0), (0, 0)): lambda j, i: (member(state, j, i), member(ids, j, i)),
        ((0, None), (0, None)): lambda j, i: (member(state, j, i), member(ids, 0, 0)),
        ((0, None), (None, 0)): lambda j, i: (member(state, j, 0), member(ids, 0, i)),
        ((None, 0), (0, 0)): lambda j, i: (member(state, 0, i), member(ids, j, i)),
        ((None, 0), (None, 0)): lambda j, i: (shared, member(ids, j, i)),
    }
    first = lambda x: member(x, 0)
    for (outer, inner), of in ways.items():
        given = []
        for x, o, i in zip((state, ids), outer, inner, strict=True):
            x = x if o == 0 else first(x)
            given.append(x if i == 0 else vmap(first)(x) if o == 0 else first(x))
        with ops.using(implementation) if implementation else contextlib.nullcontext():
            got = vmap(vmap(run, in_dims=inner), in_dims=outer)(*given)
            need = stack(*(stack(*(run(*of(j, i)) for i in range(K))) for j in range(2)))
        assert_trees_close(got, need, **CLOSE)

"""fr.tree: trees are split, mapped, moved, measured and compared as torch and Python see these trees."""

import dataclasses

import pytest
import torch
import torch.utils._pytree as torch_tree
from hypothesis import given
from hypothesis import strategies as st
from programs import training
from torch.func import grad, hessian, jvp, vmap

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

MESH = fr.Mesh.emulated(model=2)
SPARSE, DENSE = fr.optim.rowwise_adagrad(lr=0.1), fr.optim.dense(torch.optim.Adam, lr=0.1)
STEP = fr.train_step(training.loss_fn, sparse=SPARSE, dense=DENSE)
PLAN = training.plan_of("column_wise", {"model": 2})
ON_MESH = fr.train_step(training.loss_fn, sparse=SPARSE, dense=DENSE, mesh=MESH, plan=PLAN)
STATES = {"one process": STEP, "emulated": ON_MESH}
TREES = {
    "dict": {"b": torch.ones(2), "a": [torch.arange(3), (None, 2.5)], "c": {"none": None}, ("t", 1): "text"},
    "empty": {"a": [], "b": ()},
    "leaf": torch.ones(2),
    "batch": fr.Batch(fr.KeyedJaggedTensor.from_lists({"u": [[1, 2], []]}), torch.ones(2)),
    "jagged": fr.JaggedTensor.from_lists([[0.5], []], weights=[[2.0], []]),
    "rows": fr.RowGrads.from_entries(torch.tensor([2, 0]), torch.ones(2, 3), num_embeddings=4),
    **{f"state, {name}": step.init(training.params()) for name, step in STATES.items()},
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_its_leaves_and_its_structure(name):
    """unflatten(structure(x), leaves(x)) == x. leaves are those of torch without None, in order. paths name each leaf
    as a Python expression."""
    tree = TREES[name]
    leaves, structure = fr.tree.flatten(tree)
    assert leaves == fr.tree.leaves(tree) and structure == fr.tree.structure(tree)
    assert [*map(id, leaves)] == [id(x) for x in torch_tree.tree_leaves(tree) if x is not None]
    assert_trees_close(fr.tree.unflatten(structure, leaves), tree)
    for path, leaf in fr.tree.paths(tree):
        dot = "." if path and path[0] != "[" else ""
        assert eval(f"tree{dot}{path}", {"tree": tree}) is leaf


@pytest.mark.parametrize("name", TREES)
def test_map_is_a_functor(name):
    """map of the identity is the tree. map of a composition is the composition of maps. Further trees are matched
    leaf by leaf, with dict keys in any order."""
    tree = TREES[name]
    f, g = lambda x: (x, 1), lambda x: f"{x}"
    assert_trees_close(fr.tree.map(lambda x: x, tree), tree)
    assert_trees_close(fr.tree.map(f, fr.tree.map(g, tree)), fr.tree.map(lambda x: f(g(x)), tree))
    assert_trees_close(fr.tree.map(lambda x, y, z: z, tree, tree, tree), tree)
    assert fr.tree.map(lambda x, y: x - y, {"a": 3, "b": 5}, {"b": 1, "a": 1}) == {"a": 2, "b": 4}
    assert fr.tree.map(lambda x, y: y, {"a": 1}, {"a": [2, None]}) == {"a": [2, None]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", TREES)
def test_to_changes_the_dtype_of_floats_alone(name, dtype):
    """to(x, dtype) converts floats to the dtype, and leaves integers and non-tensors. On the device and dtype of x it
    returns the tensors of x."""
    tree = TREES[name]
    out = fr.tree.to(tree, dtype)
    for x, y in zip(fr.tree.leaves(tree), fr.tree.leaves(out), strict=True):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            assert y.dtype == dtype and torch.equal(y, x.to(dtype))
        else:
            assert y is x
    assert all(x is y for x, y in zip(fr.tree.leaves(out), fr.tree.leaves(fr.tree.to(out, "cpu", dtype)), strict=True))
    assert {x.device.type for x in fr.tree.leaves(fr.tree.to(tree, "meta")) if isinstance(x, torch.Tensor)} <= {"meta"}
    if hasattr(tree, "to"):
        assert_trees_close(tree.to(dtype), out)


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_dtype_trains_in_it(name):
    """step.init(params.to(f64)) equals step.init(params).to(f64), sharded or not. Both states train on to the same
    bits."""
    step, params, batch = STATES[name], training.params(), training.batch(0, 4)
    state, want = step.init(params).to(torch.float64), step.init(params.to(torch.float64))
    assert_trees_close(state, want)
    for _ in range(2):
        (state, metrics), (want, _) = step(state, batch.to(torch.float64)), step(want, batch.to(torch.float64))
    assert_trees_close(state, want)
    assert metrics["loss"].dtype == torch.float64
    state, half = step.init(params), fr.tree.to(params.tables, torch.bfloat16)
    low = dataclasses.replace(state, tables=fr.tree.to(state.tables, torch.bfloat16))
    assert_trees_close(step(low, batch)[0], step(step.init(fr.Params(half, params.dense)), batch)[0])


def test_what_is_one_tensor_stays_one():
    """A tensor in two places stays one tensor after `to`, and counts once in bytes and parameters."""
    w = torch.ones(3, 4)
    tree = fr.Params({"t": w}, {"again": w, "ids": torch.arange(5)})
    out = tree.to(torch.float64)
    assert out.tables["t"] is out.dense["again"]
    assert fr.tree.num_parameters(tree) == 12 and fr.tree.nbytes(tree) == 48 + 40 and fr.tree.nbytes(out) == 96 + 40


def test_sizes_are_those_of_torch():
    """num_parameters and nbytes are the sums of torch's numbers for each tensor. Empty trees have 0 of both."""
    state = TREES["state, one process"]
    tensors = [x for x in torch_tree.tree_leaves(state) if isinstance(x, torch.Tensor)]
    assert fr.tree.num_parameters(state) == sum(x.numel() for x in tensors if x.is_floating_point())
    assert fr.tree.nbytes(state) == sum(x.numel() * x.element_size() for x in tensors)
    assert fr.tree.nbytes({}) == fr.tree.num_parameters({"n": 3}) == 0


def test_a_class_may_have_a_to_of_its_own():
    """A field or method named `to` replaces the `to` of fr.pytree. fr.tree.to also accepts such values."""

    @fr.pytree
    class Sent:
        to: torch.Tensor

    @fr.pytree
    class Own:
        x: torch.Tensor

        def to(self, place):
            return place

    @fr.pytree(static=("name",))
    class Mine:
        x: torch.Tensor
        name: str

    assert (
        Sent(torch.ones(2)).to.shape == (2,) and fr.tree.to(Sent(torch.ones(2)), torch.float64).to.dtype.itemsize == 8
    )
    assert Own(torch.ones(2)).to("here") == "here"
    moved = Mine(torch.ones(2), "n").to("cpu", dtype=torch.float64)
    assert (moved.x.dtype, moved.name) == (torch.float64, "n") and Mine.to.__qualname__.endswith("Mine.to")


X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
WAYS = {
    "copy": fr.copy,
    "to": lambda tree: fr.tree.to(tree, torch.float64),
    "map": lambda t: fr.tree.map(lambda x: x, t),
}


@pytest.mark.parametrize("way", WAYS)
def test_trees_go_through_every_transform(way):
    """copy, to and map are the identity under grad, hessian, jvp, vmap, jit, torch.compile and autograd. `to` may
    change the dtype."""
    same, x = WAYS[way], X[0]
    f = lambda x: (same({"x": x, "n": torch.arange(2)})["x"] ** 3).sum()
    assert_trees_close(grad(f)(x), 3 * x**2, rtol=1e-6)
    assert_trees_close(hessian(f)(x).sum((2, 3)), (6 * x).to(hessian(f)(x).dtype), rtol=1e-6)
    assert_trees_close(vmap(same)(X), same(X))
    assert_trees_close(jvp(same, (x,), (2 * x,)), (same(x), same(2 * x)))
    assert_trees_close(jvp(vmap(same), (X,), (2 * X,)), (same(X), same(2 * X)))
    leaf = x.clone().requires_grad_()
    assert_trees_close(torch.autograd.grad(f(leaf), leaf)[0], 3 * x**2, rtol=1e-6)
    batch = TREES["batch"]
    assert_trees_close(torch.compile(same, fullgraph=True, backend="eager")(batch), same(batch))


def test_to_is_compiled():
    """A jitted function that moves its arguments gives the eager result."""
    f = lambda batch: fr.tree.map(lambda x: x * 2, batch).to(torch.float64)
    assert_trees_close(fr.jit(f)(TREES["batch"]), f(TREES["batch"]))


@pytest.mark.parametrize("name", STATES)
def test_a_copy_of_a_state_outlives_the_state(name):
    """A copy of a state, sharded or not, keeps its values when the memory of the state is written, and trains on."""
    step, batch = STATES[name], training.batch(1, 4)
    state = step.init(training.params())
    kept, want = fr.copy(state), fr.copy(step(state, batch)[0])
    assert fr.tree.allclose(kept, state, rtol=0, atol=0)
    for x in fr.tree.leaves(state):
        x.fill_(1)
    assert_trees_close(step(kept, batch)[0], want)
    assert not fr.tree.allclose(kept, state)


@given(st.data())
def test_allclose_is_assert_trees_close(data):
    """allclose says whether assert_trees_close passes. Only the order of dict keys may differ."""
    x = data.draw(frs.keyed_jagged_tensors())
    y = data.draw(st.sampled_from([x, fr.copy(x), x.to(torch.float64), x.pad_to(x.capacity + 1), x.permute(x.keys)]))
    try:
        assert_trees_close(x, y)
        same = True
    except AssertionError:
        same = False
    assert fr.tree.allclose(x, y, rtol=0, atol=0) == same


def test_allclose_sees_values_dtypes_and_structure():
    """NaN equals NaN. Another value, dtype, shape, key, type of number or None is a difference. The order of keys is no
    difference."""
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    close = fr.tree.allclose
    assert close({"a": nan, "b": 1}, {"b": 1, "a": nan.clone()}) and close([], []) and close(float("nan"), float("nan"))
    for other in (
        [nan],
        [one.double()],
        [torch.ones(2, 1)],
        [None],
        [one, one],
        (one,),
        {"a": one},
        [1.0],
        [one + 0.1],
    ):
        assert not close([one], other) and not close(other, [one])
    assert (
        not close([1], [True]) and close([one], [one + 0.1], atol=0.2) and not close([one], [one + 1e-9 + 1e-6], rtol=0)
    )

"""Pytrees are registered in both registries."""

import optree
import pytest
import torch
import torch.utils._pytree as torch_tree
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.core import _tree
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

VALUES = {
    "JaggedTensor": frs.jagged_tensors(),
    "KeyedJaggedTensor": frs.keyed_jagged_tensors(),
    "KeyedJaggedTensor with strides": frs.keyed_jagged_tensors(same_bags=False),
    "KeyedTensor": frs.keyed_tensors(),
    "RowGrads": frs.row_grads(coalesced=None),
    "Params": frs.table_configs().flatmap(frs.tables).map(lambda w: fr.Params(w, {"w": torch.ones(2), "b": []})),
    "Batch": frs.keyed_jagged_tensors().map(lambda ids: fr.Batch(ids, torch.ones(2))),
    "Batch without a label": frs.keyed_jagged_tensors().map(lambda ids: fr.Batch(ids, weight=torch.ones(2))),
}


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_flatten_round_trip(name, data):
    """unflatten(flatten(x)) == x in the registry of torch and in that of optree."""
    x = data.draw(VALUES[name])
    leaves, spec = torch_tree.tree_flatten(x)
    assert_trees_close(torch_tree.tree_unflatten(leaves, spec), x)
    leaves, spec = optree.tree_flatten(x, namespace=_tree.NAMESPACE)
    assert_trees_close(optree.tree_unflatten(spec, leaves), x)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_both_registries_have_the_same_leaves(name, data):
    """The two registries hold the same tensors. Only the order of dict keys may differ."""
    x = data.draw(VALUES[name])
    torchs, optrees = torch_tree.tree_leaves(x), optree.tree_leaves(x, namespace=_tree.NAMESPACE)
    assert sorted(map(id, torchs)) == sorted(map(id, optrees))


def test_a_none_in_an_optional_field_is_structure():
    """A field that is None is no leaf and needs no in_dim of vmap. With and without the field, the structures
    differ."""
    bare = fr.JaggedTensor(torch.zeros(2), torch.tensor([0, 2]))
    full = fr.JaggedTensor(torch.zeros(2), torch.tensor([0, 2]), torch.ones(2))
    assert len(_tree.tree_leaves(bare)) == 2 and len(_tree.tree_leaves(full)) == 3
    assert _tree.tree_structure(bare) != _tree.tree_structure(full)
    assert len(optree.tree_leaves(bare, namespace=_tree.NAMESPACE)) == 2


def test_static_fields_are_structure():
    """Values with different keys, dims or strides have different structures. Equal structures have equal hashes."""
    specs = [
        _tree.tree_structure(fr.KeyedTensor(torch.zeros(1, 2), keys, dims))
        for keys, dims in [(("a",), (2,)), (("b",), (2,)), (("a", "b"), (1, 1)), (("a",), (2,))]
    ]
    assert specs[0] == specs[3] and hash(specs[0]) == hash(specs[3])
    assert len({str(s) for s in specs}) == 3


@given(frs.keyed_tensors(num_rows=3, dtypes=(torch.float32,)))
def test_vmap_maps_over_dataclasses(x):
    """vmap over a value maps over the value's leaves. in_dims may be a prefix, or a value of the same form."""
    want = x.values.sum(1)
    assert_trees_close(torch.func.vmap(lambda k: k.values.sum())(x), want)
    assert_trees_close(torch.func.vmap(lambda k, y: k.values.sum() + y, in_dims=(0, None))(x, torch.tensor(0.0)), want)
    dims = fr.KeyedTensor(1, x.keys, x.dims)
    assert_trees_close(torch.func.vmap(lambda k: k.values.sum(), in_dims=(dims,))(x), x.values.sum(0))


def test_vmap_returns_dataclasses():
    """A mapped function may return values. The leaves of the values get the mapped dimension."""
    out = torch.func.vmap(lambda w: fr.Params({"t": w}, {"n": w.sum()}))(torch.ones(3, 2, 2))
    assert out.tables["t"].shape == (3, 2, 2) and out.dense["n"].shape == (3,)


def test_values_are_frozen():
    """Fields cannot be set."""
    with pytest.raises(AttributeError):
        fr.JaggedTensor.from_lists([[1]]).values = torch.zeros(1)


def test_paths_are_for_people():
    """paths names every leaf as a Python expression."""
    tree = {"p": fr.Params({"item": torch.zeros(1)}, [torch.ones(1)])}
    assert [path for path, _ in _tree.paths(tree)] == ["['p'].tables['item']", "['p'].dense[0]"]
    assert [path for path, _ in _tree.paths(tree["p"])] == ["tables['item']", "dense[0]"]


def test_a_users_class_is_a_pytree_like_the_others():
    """`fr.pytree` gives a user's class round trips, static fields and optional fields."""

    @fr.pytree(static=("name",), optional=("extra",))
    class Mine:
        x: torch.Tensor
        name: str
        extra: torch.Tensor | None = None

    value = Mine(torch.ones(2), "n")
    doubled = torch_tree.tree_map(lambda t: t * 2, value)
    assert isinstance(doubled, Mine) and doubled.name == "n" and doubled.extra is None
    assert torch.func.grad(lambda m: (m.x**2).sum())(value).x.tolist() == [2.0, 2.0]

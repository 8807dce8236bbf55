"""Leaves of a tree that has a known structure: those of `fast_flatten`, or None."""

import collections
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.core import fast_flatten, flatten_like, structure_key


class Pair(collections.namedtuple("Pair", "one two")):
    pass


@fr.pytree(static=("name",), optional=("rest",))
class Value:
    x: Any
    name: Any
    rest: Any = None


class Key(str):
    pass


def containers(parts):
    """Return a strategy of containers of a few kinds, so that two draws often have one structure."""
    keys = st.sampled_from(["a", "b", 1, None, True, 1.0, Key("a")])
    names = st.sampled_from(["a", 1, True, 1.0, 0.0, -0.0, (1,), (True,), Key("a")])
    return st.one_of(
        st.dictionaries(keys, parts, max_size=2),
        st.dictionaries(keys, parts, max_size=2).map(collections.OrderedDict),
        st.lists(parts, max_size=2),
        st.lists(parts, max_size=2).map(tuple),
        st.builds(Pair, parts, parts),
        st.builds(Value, parts, names, st.none() | parts),
    )


TREES = st.recursive(st.none() | st.integers(0, 3), containers, max_leaves=4)


def form(tree):
    structure = fast_flatten(tree)[1]
    return structure, structure_key(structure)


@given(TREES, TREES)
def test_leaves_are_those_of_fast_flatten(known, tree):
    """The leaves are those of `fast_flatten` if the tree has the structure, with its exact keys; if it has another
    structure, there are none, or a container stands among them."""
    read = flatten_like(fast_flatten(known)[1])
    if read is None:
        return
    assert read(known) == fast_flatten(known)[0]
    found = read(tree)
    if form(tree) == form(known):
        assert found == fast_flatten(tree)[0]
    else:
        assert found is None or not all(fast_flatten(x)[1].is_leaf() for x in found)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: ({"t": x, "u": {"sum": x}}, [x, (x, None)]),
        lambda x: fr.KeyedJaggedTensor.from_lengths(["a", "b"], x, torch.tensor([1, 1])),
        lambda x: fr.TrainState(x, {"t": x}, {"t": {"sum": x}}, {"w": x}, (), x),
    ],
)
def test_common_arguments_have_a_reader(make):
    """States and batches are read. A changed key or static field is another structure."""
    tree = make(torch.tensor([3, 4]))
    leaves, structure = fast_flatten(tree)
    found = flatten_like(structure)(make(torch.tensor([5, 6])))
    assert len(found) == len(leaves) and any(torch.equal(x, torch.tensor([5, 6])) for x in found)
    assert flatten_like(structure)((tree,)) is None


def test_the_order_of_keys_and_static_fields_count():
    """Another order of a dict's keys, another key or another static field is another structure."""
    read = flatten_like(fast_flatten({"a": 1, "b": 2})[1])
    assert read({"b": 3, "a": 4}) is None and read({"a": 3, "c": 4}) is None and read({"a": 3}) is None
    ids = lambda key: fr.KeyedJaggedTensor.from_lengths([key], torch.tensor([3]), torch.tensor([1]))
    assert flatten_like(fast_flatten(ids("a"))[1])(ids("b")) is None

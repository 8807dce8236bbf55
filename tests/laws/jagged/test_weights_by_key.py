"""Ids where some keys have weights and all other keys have none: reads of weights, and operations that keep weights."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import funcrec as fr
from funcrec.checkpoint._tree_json import decode, encode
from funcrec.testing import assert_trees_close, garbage_padding, zero_padding
from funcrec.testing import strategies as frs

KJT, JT = fr.KeyedJaggedTensor, fr.JaggedTensor
LISTS = {"a": [[1, 2], []], "b": [[0], [3, 1]]}
SOME = KJT.from_lists(LISTS, weights={"a": [[0.5, 2.0], []]})
FULL = dataclasses.replace(SOME, unweighted=())
TABLES = {"t": torch.arange(8.0).reshape(4, 2) - 3}
FEATURES = (fr.FeatureConfig("a", table="t", weighted=True), fr.FeatureConfig("b", table="t", pooling="mean"))
MIXED = frs.keyed_jagged_tensors(keys=("a", "b", "c")).filter(lambda x: x.unweighted)


def test_weights_are_given_for_some_keys():
    """Constructors that get weights for one key of two give that key its weights. The other key gets no weights."""
    ones = [torch.ones(2, dtype=torch.float64), []]
    padded = {k: JT.from_lists(bags).to_padded(2) for k, bags in LISTS.items()}
    lengths = {k: JT.from_lists(bags).lengths for k, bags in LISTS.items()}
    made = {
        "lists": SOME,
        "None": KJT.from_lists(LISTS, weights={"b": None, "a": [[0.5, 2.0], []]}),
        "arrays": KJT.from_lists({k: [np.array(b, int) for b in v] for k, v in LISTS.items()}, weights={"a": ones}),
        "padded": KJT.from_padded(padded, lengths, weights={"a": torch.tensor([[0.5, 2.0], [9.0, 9.0]])}),
        "jagged": KJT.from_jagged({"a": SOME["a"], "b": JT.from_lists(LISTS["b"])}),
        "offsets": KJT.from_offsets(["a", "b"], SOME.values, SOME.offsets, weights=FULL.weights, unweighted=["b"]),
    }
    for name, ids in made.items():
        assert ids.to_lists() == LISTS and ids.unweighted == ("b",) and ids["b"].weights is None, name
        assert ids["a"].weights[:2].tolist() == ([1.0, 1.0] if name == "arrays" else [0.5, 2.0])
    assert made["arrays"].weights.dtype == torch.float64 and made["lists"].weights.tolist() == [0.5, 2.0, 1.0, 1.0, 1.0]
    for none in (None, {}, {"a": None}):
        assert KJT.from_lists(LISTS, weights=none).weights is None
    empty = KJT.from_lists({"a": [], "b": []}, weights={"a": []})
    assert empty["a"].weights.shape == (0,) and empty.permute(["b"]).weights is None and empty.unweighted == ("b",)


@given(MIXED)
def test_no_weights_are_left_where_no_key_has_some(x):
    """A part with only unweighted keys has no weights buffer. A join of the parts gives the original value."""
    for k in x.keys:
        part = x.permute([k])
        assert (part.weights is None) == (k in x.unweighted) == (x[k].weights is None) and part.unweighted == ()
    assert_trees_close(zero_padding(KJT.concat(x.split([1, 1, 1]))), zero_padding(x))
    assert_trees_close(zero_padding(KJT.from_jagged(x.to_dict())), zero_padding(x))
    assert x.permute(x.keys[::-1]).unweighted == tuple(k for k in x.keys[::-1] if k in x.unweighted)


@given(frs.lookups(poolings=("sum", "mean"), min_bags=1))
def test_keys_without_weights_are_read_without(it):
    """Features of unweighted keys have the bits of ids without weights. Weighted features have the bits of ids where
    every key has weights. The positions of unweighted keys in the buffer may hold anything."""
    ids = garbage_padding(it.ids)
    out, full = fr.lookup(*it._replace(ids=ids)), dataclasses.replace(it.ids, unweighted=())
    assert_trees_close(out, fr.lookup(*it._replace(ids=full)))
    bare = [f for f in it.features if not f.weighted and f.pooling != "none"]
    if bare:
        none = dataclasses.replace(it.ids, weights=None, unweighted=())
        want = fr.lookup(it.tables, none, bare)
        assert_trees_close({f.name: out[f.name] for f in bare}, {k: x.to(out.values.dtype) for k, x in want.items()})


def test_only_weights_have_derivatives():
    """The gradient with respect to the weights buffer equals that of fully weighted ids, and is zero for unweighted
    keys. jvp, vmap and second derivatives agree."""
    at = lambda w: fr.lookup(TABLES, dataclasses.replace(SOME, weights=w), FEATURES).values
    full = lambda w: fr.lookup(TABLES, dataclasses.replace(FULL, weights=w), FEATURES).values
    loss, want = lambda w: at(w).square().sum(), lambda w: full(w).square().sum()
    w = SOME.weights
    d = grad(loss)(w)
    assert_trees_close(d, grad(want)(w))
    assert d[:2].abs().min() > 0 and d[2:].tolist() == [0, 0, 0]
    assert_trees_close(jvp(at, (w,), (torch.ones(5),)), jvp(full, (w,), (torch.ones(5),)))
    assert_trees_close(grad(lambda w: grad(loss)(w).sum())(w), grad(lambda w: grad(want)(w).sum())(w))
    both = torch.stack([w, 2 * w])
    assert_trees_close(vmap(at)(both), torch.stack([at(w), at(2 * w)]))
    held = [torch.tensor([0.5, 2.0], requires_grad=True), []]
    own = KJT.from_lists(LISTS, weights={"a": held})
    got = torch.autograd.grad(fr.lookup(TABLES, own, FEATURES).values.square().sum(), held[0])[0]
    assert_trees_close(got, d[:2])


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise", "replicated"])
@pytest.mark.parametrize("options", [{}, {"dedup": True}, {"exact": True}], ids=str)
def test_ranks_read_the_same_weights(kind, options):
    """On an emulated mesh, a step with weights for some keys equals the step in one process, whatever the positions of
    unweighted keys hold."""
    mesh, ids = fr.Mesh.emulated(model=2), garbage_padding(SOME.pad_to(7))
    plan = fr.Plan.uniform(kind, {"t": (4, 2)}, mesh)
    loss = lambda params, batch: fr.lookup(params.tables, batch.ids, FEATURES).values.square().mean()
    kinds = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    alone, ranks = fr.train_step(loss, **kinds), fr.train_step(loss, **kinds, mesh=mesh, plan=plan, **options)
    params, batch = fr.Params(TABLES, {}), fr.Batch(ids)
    want = alone(alone.init(params), fr.Batch(FULL))[0].tables
    got = fr.gather_tables(ranks(ranks.init(params), batch)[0].tables, mesh)
    assert_trees_close(got, want, atol=1e-6)
    assert fr.shard_map(lambda x: x, mesh=mesh, in_specs=fr.P("model"), out_specs=fr.P("model"))(ids).unweighted == (
        "b",
    )


@given(st.data())
def test_structure_tells_which_keys_have_weights(data):
    """Values with different unweighted keys have different structures. No compiled program therefore serves both
    values. Maps, vmap, moves and checkpoints keep the unweighted keys."""
    x = data.draw(MIXED)
    other = dataclasses.replace(x, unweighted=x.unweighted[1:])
    assert fr.tree.structure(x) != fr.tree.structure(other) and fr.tree.structure(x) == fr.tree.structure(fr.copy(x))
    assert x.to(torch.float64).unweighted == x.unweighted
    assert vmap(lambda w: dataclasses.replace(x, weights=w))(torch.ones(2, x.capacity)).unweighted == x.unweighted
    code, tensors = encode(x, "x").code, encode(x, "x").tensors
    assert_trees_close(decode(code, iter(tensors)), x)


def test_files_from_before_have_weights_for_all_keys():
    """A file without the field for unweighted keys can be read. In its value every key has weights."""
    code, tensors = encode(FULL, "x").code, encode(FULL, "x").tensors
    assert code[4] == ["tuple", [["tuple", ["a", "b"]], None, ["tuple", []]]]
    code[4][1].pop()
    assert_trees_close(decode(code, iter(tensors)), FULL)


def test_a_weighted_feature_of_a_key_without_weights_is_named():
    """A lookup by a weighted feature of an unweighted key raises and names the feature and the key."""
    features = [fr.FeatureConfig("rated", table="t", column="b", weighted=True)]
    with pytest.raises(ValueError, match="feature 'rated' is weighted") as error:
        fr.lookup(TABLES, SOME, features)
    assert "`ids.unweighted` has 'b'" in str(error.value)
    for wrong in (("z",), "b", 3, ("b", 1)):
        with pytest.raises((TypeError, ValueError), match=r"ids\.unweighted"):
            fr.lookup(TABLES, dataclasses.replace(SOME, unweighted=wrong), FEATURES)


def test_what_is_shown():
    """repr names the keys that have no weights."""
    assert repr(SOME).endswith("weights=f32[5], unweighted=['b'])")

"""Lookups of examples that share bags: each bag is pooled once, and its row goes to the examples that have it.

lookup[e, f] = lookup_each[f][inverse[f, e]]
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.shared_bags import expanded, shared_lookups, with_inverse

import funcrec as fr
from funcrec.testing import assert_trees_close, check_adjoint, check_grads, garbage_padding
from funcrec.testing import strategies as frs

F64 = (torch.float64,)
SHARED = shared_lookups()
OF_F64 = shared_lookups(dtypes=F64)
SEQUENCES = shared_lookups(poolings=("none",), dtypes=F64)
SMALL = frs.lookups(dtypes=F64, max_bags=6, max_length=1, max_lengths=(None, 1, 2))
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def dense(grads):
    return {k: g.to_dense() for k, g in grads.items()}


def one_dtype(it):
    return len({t.dtype for t in it.tables.values()}) == 1


@given(SHARED)
def test_lookup_expands_the_rows_of_distinct_bags(it):
    """Row e of a feature is the row of bag inverse[f, e] in lookup_each, bit for bit."""
    got, each = fr.lookup(*it), fr.lookup_each(*it)
    assert got.keys == tuple(f.name for f in it.features if f.pooling != "none") == tuple(each)
    assert got.values.shape[0] == it.ids.num_examples
    for f in it.features:
        if f.pooling != "none":
            own = it.ids.inverse[it.ids.keys.index(f.key)].long()
            assert each[f.name].shape[0] == it.ids.bags_of(f.key)
            assert torch.equal(got[f.name], each[f.name][own].to(got.values.dtype))


@given(SHARED)
def test_lookup_is_that_of_the_examples(it):
    """The lookup has the bits of the lookup of the expanded batch, where tables have one dtype."""
    if one_dtype(it):
        assert_trees_close(fr.lookup(*it), fr.lookup(*it._replace(ids=expanded(it.ids))))


@given(SMALL)
def test_dedup_changes_no_bit_of_a_lookup(it):
    """lookup(dedup_bags(ids)) = lookup(ids), bit for bit, also with bags padded to buckets."""
    shared = fr.dedup_bags(it.ids)
    want = fr.lookup(*it)
    assert_trees_close(fr.lookup(*it._replace(ids=shared)), want)
    assert_trees_close(fr.lookup(*it._replace(ids=fr.pad_to_bucket(shared, minimum=4))), want)


@given(OF_F64, st.integers(0, 99))
def test_lookup_transpose_is_the_adjoint(it, seed):
    """⟨lookup(x), y⟩ = ⟨x, lookup_transpose(y)⟩, in f64."""
    forward = lambda w: fr.lookup(w, it.ids, it.features)
    transpose = lambda d: fr.lookup_transpose(d, it.ids, it.features, it.tables)
    check_adjoint(forward, transpose, it.tables, key=fr.key(seed))


@given(shared_lookups(dtypes=F64, weighted=True), st.integers(0, 99))
def test_derivatives_are_those_of_the_map(it, seed):
    """Reverse, forward and second derivatives in tables and weights agree with differences and with each other."""
    if it.ids.weights is None or not it.ids.num_examples:
        return
    at = lambda w, weights: fr.lookup(w, with_weights(it.ids, weights), it.features).values
    check_grads(lambda w, weights: at(w, weights).sin(), (it.tables, it.ids.weights.double()), key=fr.key(seed))


def with_weights(ids, weights):
    return fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, ids.inverse, ids.keys, ids.strides, ids.unweighted)


@given(OF_F64, st.integers(0, 99))
def test_vmap_and_jvp_are_those_of_the_examples(it, seed):
    """A vmap over tables, and a jvp in tables, equal those of the expanded batch; so does a vmap over the inverse."""
    draw = torch.Generator().manual_seed(seed)
    new = lambda *n: {k: torch.randn(*n, *x.shape, generator=draw, dtype=x.dtype) for k, x in it.tables.items()}
    plain, stack, tangents = expanded(it.ids), new(3), new()
    of = lambda ids: lambda w: fr.lookup(w, ids, it.features).values
    got, want = (torch.func.vmap(of(ids))(stack) for ids in (it.ids, plain))
    assert torch.equal(got, want)
    got, want = (torch.func.jvp(of(ids), (it.tables,), (tangents,)) for ids in (it.ids, plain))
    assert_trees_close(got, want)
    turned = torch.stack([it.ids.inverse, it.ids.inverse.flip(1)])
    got = torch.func.vmap(lambda inverse: of(with_inverse(it.ids, inverse))(it.tables))(turned)
    assert torch.equal(got, torch.stack([of(with_inverse(it.ids, x))(it.tables) for x in turned]))


@given(SMALL, st.integers(0, 99))
def test_gradients_of_distinct_bags_are_those_of_the_examples(it, seed):
    """value_and_grad through dedup_bags equals that of the plain ids; only the order of additions differs."""
    w = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    loss = lambda p, ids: (fr.lookup(p.tables, ids, it.features).values.sin() * p.dense).sum()
    params = fr.Params(it.tables, w)
    (got, grads), (want, plain) = (fr.value_and_grad(loss)(params, ids) for ids in (fr.dedup_bags(it.ids), it.ids))
    assert_trees_close(got, want, **EXACT)
    assert_trees_close(grads.dense, plain.dense, **EXACT)
    assert_trees_close(dense(grads.tables), dense(plain.tables), **EXACT)


@given(OF_F64)
def test_the_transpose_is_torchs_gradient(it):
    """lookup_transpose(d).to_dense(), value_and_grad and torch.func.vjp give one gradient."""
    out, vjp = torch.func.vjp(lambda w: fr.lookup(w, it.ids, it.features).values, it.tables)
    d = fr.KeyedTensor(torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out), *form(it))
    (want,), got = vjp(d.values), dense(fr.lookup_transpose(d, it.ids, it.features, it.tables))
    loss = lambda p, ids: (fr.lookup(p.tables, ids, it.features).values * d.values).sum()
    _, grads = fr.value_and_grad(loss)(fr.Params(it.tables, ()), it.ids)
    for name, x in want.items():
        mine = got.get(name, torch.zeros_like(x))
        assert_trees_close(mine, x, **EXACT)
        assert_trees_close(grads.tables[name].to_dense(), x, **EXACT)


def form(it):
    out = fr.lookup(*it)
    return out.keys, out.dims


@given(SHARED, st.integers(0, 9))
def test_padding_and_bags_of_no_example_are_never_read(it, seed):
    """Garbage in the padding, and NaN rows that only bags without an example name, change no output."""
    if not one_dtype(it) or it.ids.num_examples == 0:
        return
    want = fr.lookup(*it)
    dirty = garbage_padding(it.ids, fr.key(seed))
    assert_trees_close(fr.lookup(*it._replace(ids=dirty)), want)
    more = fr.pad_to_bucket(dirty, minimum=8)
    assert_trees_close(fr.lookup(*it._replace(ids=more)), want)
    lone = with_inverse(it.ids, torch.zeros_like(it.ids.inverse))  # every example has bag 0
    only = {k: set(x.to_lists()[0]) for k, x in lone.items()}
    poisoned = {n: t.clone() for n, t in it.tables.items()}
    for f in it.features:
        if f.hash is None:
            rows = [r for r in range(t_rows(it, f)) if not any(r in s for s in only.values())]
            poisoned[f.table][rows] = torch.nan
    if all(f.hash is None for f in it.features):
        got = fr.lookup(poisoned, lone, it.features)
        assert_trees_close(got, fr.lookup(it.tables, lone, it.features))


def t_rows(it, feature):
    return it.tables[feature.table].shape[0]


@given(OF_F64)
def test_a_jitted_lookup_is_the_lookup(it):
    """Traced by make_fx, the lookup and its transpose have the same values."""
    fn = lambda w, ids: fr.lookup(w, ids, it.features).values
    graph = torch.fx.experimental.proxy_tensor.make_fx(fn)(it.tables, it.ids)
    assert torch.equal(graph(it.tables, it.ids), fn(it.tables, it.ids))


def test_a_donated_step_trains_to_the_same_numbers():
    """train_step takes shared bags as they are: jitted and donated, it trains like an eager step on the plain
    ids."""
    draw = torch.Generator().manual_seed(0)
    bags = {k: [[int(x) for x in torch.randint(0, 3, (2,), generator=draw)] for _ in range(32)] for k in "ab"}
    ids, features = fr.KeyedJaggedTensor.from_lists(bags), [fr.FeatureConfig(k, table="t") for k in "ab"]
    tables = {"t": torch.randn(5, 4, generator=draw, dtype=torch.float64)}
    loss = lambda p, ids: (fr.lookup(p.tables, ids, features).values.sin() @ p.dense).square().mean()
    step = fr.train_step(loss, sparse=fr.optim.rowwise_adagrad(lr=0.1), dense=fr.optim.dense(torch.optim.Adam, lr=0.01))
    params, ends = fr.Params(tables, torch.ones(8, dtype=torch.float64)), []
    for fast, batch in ((step, ids), (fr.jit(step, donate=("state",)), fr.pad_to_bucket(fr.dedup_bags(ids)))):
        state = step.init(fr.copy(params))
        for _ in range(3):
            state, _ = fast(state, batch)
        ends.append((state.tables, state.slots, state.dense))
    assert_trees_close(*ends, rtol=1e-10, atol=1e-10)
    whole, parts = (
        fr.accumulate_grads(loss, k)(params, fr.dedup_bags(ids, num_parts=2))[1].tables["t"].to_dense() for k in (1, 2)
    )
    assert_trees_close(parts, whole, **EXACT)


# -- sequences ---------------------------------------------------------------------------------------------------


@given(SEQUENCES)
def test_sequences_are_those_of_the_examples(it):
    """lookup_sequence gives the rows of the examples; with expand=False those of the distinct bags."""
    plain = expanded(it.ids)
    got, want = fr.lookup_sequence(*it), fr.lookup_sequence(*it._replace(ids=plain))
    assert {k: x.to_lists() for k, x in got.items()} == {k: x.to_lists() for k, x in want.items()}
    once = fr.lookup_sequence(*it, expand=False)
    for f in it.features:
        if f.pooling == "none":
            assert once[f.name].num_bags == it.ids.bags_of(f.key) and got[f.name].num_bags == it.ids.num_examples
            assert f.max_length is None or got[f.name].capacity == it.ids.num_examples * f.max_length


@given(SEQUENCES, st.booleans(), st.integers(0, 99))
def test_lookup_sequence_transpose_is_the_adjoint(it, expand, seed):
    """⟨lookup_sequence(x), y⟩ = ⟨x, lookup_sequence_transpose(y)⟩ in f64, with and without the expansion."""
    forward = lambda w: fr.lookup_sequence(w, it.ids, it.features, expand=expand)
    transpose = lambda d: fr.lookup_sequence_transpose(d, it.ids, it.features, it.tables, expand=expand)
    check_adjoint(forward, transpose, it.tables, key=fr.key(seed))


def test_an_unknown_number_of_ids_is_refused():
    """Under jit and vmap the capacity of the examples' sequences needs a max_length, and the error names it."""
    ids = fr.dedup_bags(fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [1, 2], [0]]}))
    feature = fr.FeatureConfig("a", table="t", pooling="none")
    table = {"t": torch.eye(3)}
    run = lambda f: fr.jit(lambda w, ids: fr.lookup_sequence(w, ids, [f])["a"].values)(table, ids)
    with pytest.raises(ValueError, match="unknown number of ids") as raised:
        run(feature)
    assert "max_length" in str(raised.value) and "expand=False" in str(raised.value)
    assert run(fr.FeatureConfig("a", table="t", pooling="none", max_length=2)).shape == (6, 3)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_micro_batches_share_no_bag():
    """Micro-batches of examples that share bags across them raise. With num_parts they give the gradients of the
    batch."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1], [2], [3], [4]] * 2})
    params, feature = fr.Params({"t": torch.randn(5, 2)}, {}), fr.FeatureConfig("a", table="t")
    loss = lambda params, ids: fr.lookup(params.tables, ids, [feature]).values.square().mean()
    with pytest.raises(ValueError, match=r"(?s)share a bag across 4 parts.*num_parts=4"):
        fr.accumulate_grads(loss, 4)(params, fr.dedup_bags(ids))
    (got, grads), (want, plain) = (
        fr.accumulate_grads(loss, k)(params, fr.dedup_bags(ids, num_parts=4)) for k in (4, 1)
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads.tables["t"].to_dense(), plain.tables["t"].to_dense())


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_shared_bags_of_a_compiled_cut_give_nan(pooling, interpreted):
    """Where the indices cannot be read, examples of a part that name bags of another part make the loss NaN: within
    `jit` for micro-batches, and for the ranks of a mesh. Parts that share no bag have their numbers."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1], [2], [3], [4]] * 2})
    params, feature = fr.Params({"t": torch.randn(5, 2)}, {}), fr.FeatureConfig("a", "t", pooling, max_length=1)
    read = lambda params, ids: (fr.lookup if pooling == "sum" else fr.lookup_sequence)(params.tables, ids, [feature])
    loss = lambda params, ids: read(params, ids)["a"].values.square().mean() if pooling == "none" else (
        read(params, ids).values.square().mean()
    )  # fmt: skip
    mesh = fr.Mesh.emulated(x=2)
    of_ranks = fr.shard_map(
        lambda params, ids: fr.pmean(loss(params, ids), "x"), mesh=mesh, in_specs=(fr.P(), fr.P("x")), out_specs=fr.P()
    )
    for fn in (lambda params, ids: fr.accumulate_grads(loss, 2)(params, ids)[0], of_ranks):
        wrong, right = fr.dedup_bags(ids), fr.dedup_bags(ids, num_parts=2)
        with pytest.raises(ValueError, match="share a bag across 2 parts"):
            fn(params, wrong)
        assert fr.jit(fn)(params, wrong).isnan()
        torch.testing.assert_close(fr.jit(fn)(params, right), loss(params, ids))


def test_ids_of_a_compiled_cut_are_no_rows():
    """Where the indices cannot be read, the ids of sequences keep their dtype, and are -1 if examples name bags of
    another part."""
    ids, feature = fr.KeyedJaggedTensor.from_lists({"a": [[1], [2], [3], [4]] * 2}), fr.FeatureConfig(
        "a", table="t", pooling="none", max_length=1
    )  # fmt: skip
    mesh = fr.Mesh.emulated(x=2)
    read = fr.jit(fr.shard_map(
        lambda ids: fr.sequence_ids(ids, [feature])["a"].values, mesh=mesh, in_specs=fr.P("x"),
        out_specs=fr.P("x"),
    ))  # fmt: skip
    right = read(fr.dedup_bags(ids, num_parts=2))
    assert right.dtype == torch.int64 and right.tolist() == [1, 2, 3, 4] * 2
    assert read(fr.dedup_bags(ids)).tolist() == [-1] * 8


def test_strides_need_an_inverse():
    """Features with different numbers of bags and no inverse indices raise an error that names lookup_each."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[1], [0]]})
    features = [fr.FeatureConfig(k, table="t") for k in "ab"]
    with pytest.raises(ValueError, match=r"fr\.lookup_each"):
        fr.lookup({"t": torch.ones(2, 1)}, ids, features)
    assert {k: x.shape for k, x in fr.lookup_each({"t": torch.ones(2, 1)}, ids, features).items()} == {
        "a": (1, 1),
        "b": (2, 1),
    }


def test_checked_names_an_index_of_no_bag():
    """`checked` and `validate` raise for an inverse index out of range, which a plain lookup reads as zeros,
    and a sequence as no ids."""
    ids = with_inverse(fr.KeyedJaggedTensor.from_lists({"a": [[1]]}), torch.tensor([[0, 7, -1]]))
    features, table = [fr.FeatureConfig("a", table="t")], {"t": torch.ones(2, 1)}
    assert fr.lookup(table, ids, features)["a"].tolist() == [[1.0], [0.0], [0.0]]
    sequence = fr.FeatureConfig("a", table="t", pooling="none")
    assert fr.lookup_sequence(table, ids, [sequence])["a"].to_lists() == [[[1.0]], [], []]
    for call in (
        lambda: fr.checked(lambda: fr.lookup(table, ids, features))(),
        lambda: fr.validate(ids, features, table),
    ):
        with pytest.raises(fr.CheckError, match=r"inverse\[0\]\[1\] = 7"):
            call()


def test_no_examples_and_no_bags():
    """Keys without bags, batches without examples and lookups without features have empty results."""
    none = with_inverse(fr.KeyedJaggedTensor.from_lists({"a": [], "b": [[1]]}), torch.zeros(2, 0, dtype=torch.int64))
    features = [fr.FeatureConfig(k, table="t") for k in "ab"]
    assert fr.lookup({"t": torch.ones(2, 3)}, none, features).values.shape == (0, 6)
    assert fr.lookup({"t": torch.ones(2, 3)}, none, []).values.shape == (0, 0)
    d = fr.lookup({"t": torch.ones(2, 3)}, none, features)
    assert fr.lookup_transpose(d, none, features, {"t": torch.ones(2, 3)})["t"].to_dense().sum() == 0

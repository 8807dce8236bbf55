"""lookup and lookup_sequence equal a loop over lists, are linear, and have transposes."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.testing import assert_trees_close, check_adjoint, check_grads, garbage_padding, zero_padding
from funcrec.testing import strategies as frs

F64 = (torch.float64,)
POOLED = frs.lookups()
SEQUENCES = frs.lookups(poolings=("none", "sum", "mean"))
OUTSIDE = -1


def bags_of(it, feature):
    """Return [[(row, weight), ...], ...] of one feature in Python's numbers, cut to the feature's max_length."""
    ids = it.ids
    size = it.tables[feature.table].shape[0]
    rows = fr.hash_rows(ids.values, feature.hash, size)
    first, last = ids.bag_range(feature.key)
    bounds = ids.offsets[first : last + 1].tolist()
    out = []
    for start, stop in itertools.pairwise(bounds):
        stop = min(stop, start + feature.max_length) if feature.max_length else stop
        weights = ids.weights[start:stop].tolist() if feature.weighted else [1.0] * (stop - start)
        chosen = [r if 0 <= r < size else OUTSIDE for r in rows[start:stop].tolist()]
        out.append(list(zip(chosen, weights, strict=True)))
    return out


def naive_pooled(it):
    """Return {feature: f64[B, D]}, computed by a loop. Sums of these numbers are exact. A mean adds one division."""
    out = {}
    for f in it.features:
        if f.pooling == "none":
            continue
        table = it.tables[f.table].double()
        accumulated = torch.promote_types(it.tables[f.table].dtype, torch.float32)
        pooled = []
        for bag in bags_of(it, f):
            total = torch.zeros(table.shape[1], dtype=torch.float64)
            for row, weight in bag:
                total = total + (weight * table[row] if row != OUTSIDE else 0)
            total = total.to(accumulated)
            pooled.append(total / max(len(bag), 1) if f.pooling == "mean" else total)
        out[f.name] = torch.stack(pooled) if pooled else torch.zeros(0, table.shape[1], dtype=accumulated)
    return out


def naive_sequences(it):
    """Return {feature: [[row of the table times the id's weight, ...], ...]}, computed by a loop."""
    out = {}
    for f in it.features:
        if f.pooling == "none":
            table = torch.cat([it.tables[f.table].double(), torch.zeros(1, it.tables[f.table].shape[1])])
            out[f.name] = [[(weight * table[row]).tolist() for row, weight in bag] for bag in bags_of(it, f)]
    return out


@given(POOLED)
def test_lookup_is_a_loop(it):
    """lookup gives the sum or mean of each bag in the order of the features, bit for bit. The result is f64 if a table
    is f64."""
    got, want = fr.lookup(*it), naive_pooled(it)
    assert got.keys == tuple(want) and got.dims == tuple(x.shape[1] for x in want.values())
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in want.values()) else torch.float32
    assert_trees_close(got.to_dict(), {k: x.to(dtype) for k, x in want.items()})


@given(SEQUENCES)
def test_lookup_sequence_is_a_loop(it):
    """lookup_sequence gives the row of each id in the id's bag, with zeros in the padding."""
    got, want = fr.lookup_sequence(*it), naive_sequences(it)
    assert {k: x.to_lists() for k, x in got.items()} == want
    assert_trees_close(zero_padding(got), got)
    for f in it.features:
        if f.pooling == "none":
            bags, n = it.ids.bags_of(f.key), it.ids.capacity
            assert got[f.name].capacity == (n if f.max_length is None else min(n, bags * f.max_length))
            assert got[f.name].values.dtype == torch.promote_types(it.tables[f.table].dtype, torch.float32)


@given(POOLED, SEQUENCES)
def test_padding_is_never_read(pooled, sequences):
    """Garbage in the padding of ids changes no lookup and no transpose."""
    for seed in range(2):
        dirty = pooled._replace(ids=garbage_padding(pooled.ids, fr.key(seed)))
        assert_trees_close(fr.lookup(*dirty), fr.lookup(*pooled))
        d = fr.lookup(*pooled)
        transposes = [fr.lookup_transpose(d, x.ids, x.features, x.tables) for x in (dirty, pooled)]
        assert_trees_close(*({k: g.to_dense() for k, g in t.items()} for t in transposes))
        dirty = sequences._replace(ids=garbage_padding(sequences.ids, fr.key(seed)))
        assert_trees_close(fr.lookup_sequence(*dirty), fr.lookup_sequence(*sequences))
        d = fr.lookup_sequence(*sequences)
        transposes = [
            fr.lookup_sequence_transpose(dd, x.ids, x.features, x.tables)
            for dd, x in ((garbage_padding(d), dirty), (d, sequences))
        ]
        assert_trees_close(*({k: g.to_dense() for k, g in t.items()} for t in transposes))


@given(frs.lookups(dtypes=F64), st.integers(0, 99))
def test_lookup_transpose_is_the_adjoint(it, seed):
    """⟨lookup(x), y⟩ = ⟨x, lookup_transpose(y)⟩, in f64."""
    forward = lambda w: fr.lookup(w, it.ids, it.features)
    transpose = lambda d: fr.lookup_transpose(d, it.ids, it.features, it.tables)
    check_adjoint(forward, transpose, it.tables, key=fr.key(seed))


@given(frs.lookups(poolings=("none", "sum", "mean"), dtypes=F64), st.integers(0, 99))
def test_lookup_sequence_transpose_is_the_adjoint(it, seed):
    """⟨lookup_sequence(x), y⟩ = ⟨x, lookup_sequence_transpose(y)⟩, in f64."""
    forward = lambda w: fr.lookup_sequence(w, it.ids, it.features)
    transpose = lambda d: fr.lookup_sequence_transpose(d, it.ids, it.features, it.tables)
    check_adjoint(forward, transpose, it.tables, key=fr.key(seed))


@given(frs.lookups(dtypes=F64), st.data())
def test_the_transpose_is_torchs_gradient(it, data):
    """lookup_transpose(d).to_dense() equals torch.func.vjp of lookup for dense tables."""
    d = data.draw(frs.cotangents(it))
    got = fr.lookup_transpose(d, it.ids, it.features, it.tables)
    _, vjp = torch.func.vjp(lambda w: fr.lookup(w, it.ids, it.features), it.tables)
    (want,) = vjp(d)
    assert set(got) == {f.table for f in it.features if f.pooling != "none"}
    for name, dense in want.items():
        mine = got[name].to_dense() if name in got else torch.zeros_like(dense)
        assert_trees_close(mine, dense, atol=1e-12)


@given(POOLED)
def test_configs_serve_as_tables_of_a_transpose(it):
    """lookup_transpose reads only the shapes of the tables. Configs and tables therefore give the same gradient."""
    d = fr.lookup(*it)
    configs = [fr.TableConfig(n, *w.shape, dtype=w.dtype) for n, w in it.tables.items()]
    from_configs = fr.lookup_transpose(d, it.ids, it.features, configs)
    assert_trees_close(from_configs, fr.lookup_transpose(d, it.ids, it.features, it.tables))


@given(POOLED)
def test_a_transpose_marks_what_counts_for_nothing(it):
    """Each entry of a transpose names a row of its table, or -1."""
    for name, g in fr.lookup_transpose(fr.lookup(*it), it.ids, it.features, it.tables).items():
        rows = g.rows.tolist()
        assert all(r == -1 or 0 <= r < it.tables[name].shape[0] for r in rows)


@given(frs.lookups(dtypes=F64), st.data())
def test_lookup_is_linear(it, data):
    """lookup(a·x + y) = a·lookup(x) + lookup(y). The jvp of lookup is lookup itself. The Hessian is zero."""
    other = {n: data.draw(frs.tensors(w.shape, dtype=w.dtype)) for n, w in it.tables.items()}
    at = lambda w: fr.lookup(w, it.ids, it.features).values
    both = at({n: 2 * w + other[n] for n, w in it.tables.items()})
    assert_trees_close(both, 2 * at(it.tables) + at(other), atol=1e-12)
    _, tangent = torch.func.jvp(at, (it.tables,), (other,))
    assert_trees_close(tangent, at(other), atol=1e-12)


def test_derivatives_agree_with_differences():
    """Derivatives of lookup and lookup_sequence by tables and weights agree with finite differences, to second
    order."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 2, 2], [], [1]]}, weights={"a": [[1.0, 2.0, 0.5], [], [3.0]]})
    ids = garbage_padding(ids.pad_to(6))
    pooled = [
        fr.FeatureConfig("p", table="t", pooling="mean", weighted=True, column="a"),
        fr.FeatureConfig("q", table="t", weighted=True, column="a", max_length=2),
    ]
    history = [fr.FeatureConfig("h", table="t", pooling="none", weighted=True, column="a")]

    def f(w, weights):
        batch = fr.KeyedJaggedTensor(
            ids.values, ids.offsets, torch.where(ids.weights.isnan(), torch.nan, weights), None, ids.keys
        )
        return fr.lookup(w, batch, pooled).values.sin(), fr.lookup_sequence(w, batch, history)["h"].values.cos()

    check_grads(f, ({"t": torch.arange(6.0).reshape(3, 2) / 7}, torch.arange(6.0) / 5))


@given(frs.lookups(dtypes=(torch.float32,)), frs.lookups(poolings=("none", "sum", "mean"), dtypes=(torch.float32,)))
def test_lookups_map_over_stacked_tables(pooled, sequences):
    """vmap over stacked tables equals a loop over the tables, bit for bit."""
    acts = lambda w: fr.lookup(w, pooled.ids, pooled.features)
    rows = lambda w: {k: x.values for k, x in fr.lookup_sequence(w, sequences.ids, sequences.features).items()}
    for values, it in ((acts, pooled), (rows, sequences)):
        stacked = {n: torch.stack([w, w * 2 + 1, -w]) for n, w in it.tables.items()}
        got = torch.func.vmap(values)(stacked)
        loop = [values({n: w[i] for n, w in stacked.items()}) for i in range(3)]
        assert_trees_close(got, torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *loop))


@given(frs.lookups(dtypes=(torch.float32,), min_bags=1))
def test_lookup_maps_over_examples(it):
    """vmap over batches of the same shape equals a loop over the batches."""
    size = int(it.ids.offsets[-1])
    offsets = it.ids.offsets.clamp(max=max(size - 1, 0))
    other = dataclasses.replace(it.ids, values=it.ids.values.flip(0) % 2, offsets=offsets)
    both = torch.utils._pytree.tree_map(lambda a, b: torch.stack([a, b]), it.ids, other)
    got = torch.func.vmap(lambda ids: fr.lookup(it.tables, ids, it.features).values)(both)
    want = [fr.lookup(it.tables, ids, it.features).values for ids in (it.ids, other)]
    assert_trees_close(zero_nan(got), zero_nan(torch.stack(want)))


def zero_nan(x):
    """Return x with zeros for NaN weights. `other` above takes positions of padding, whose weights are NaN, into its
    bags."""
    return x.nan_to_num(0, 0, 0)


@settings(max_examples=12)
@given(st.data())
def test_lookups_read_nothing_on_the_host(data):
    """Lookups and transposes trace with fake tensors, with the same results."""
    it = data.draw(frs.lookups(poolings=("sum", "mean"), min_bags=1))
    d = fr.lookup(*it)

    def both(tables, ids, d):
        return fr.lookup(tables, ids, it.features), fr.lookup_transpose(d, ids, it.features, tables)

    ids = zero_padding(it.ids)
    traced = make_fx(both, tracing_mode="fake")(it.tables, ids, d)
    assert_trees_close(traced(it.tables, ids, d), both(it.tables, ids, d))


@given(POOLED, SEQUENCES)
def test_inputs_are_unchanged(pooled, sequences):
    """Lookups and transposes change none of their arguments."""
    for it, fn, back in (
        (pooled, fr.lookup, fr.lookup_transpose),
        (sequences, fr.lookup_sequence, fr.lookup_sequence_transpose),
    ):
        out = fn(*it)
        before = torch.utils._pytree.tree_map(torch.clone, (it.tables, it.ids, out))
        back(out, it.ids, it.features, it.tables)
        assert_trees_close((it.tables, it.ids, out), before)


@given(frs.lookups(dtypes=(torch.float32,)))
def test_features_are_independent(it):
    """The vector of a feature does not depend on the other features in the lookup, bit for bit."""
    together = fr.lookup(*it)
    for f in it.features:
        if f.pooling != "none":
            assert_trees_close(fr.lookup(it.tables, it.ids, [f])[f.name], together[f.name])


def test_different_numbers_of_bags_are_looked_up_apart():
    """With strides, features with different numbers of bags need separate lookups. lookup_sequence takes all of them
    together."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0], [1]], "b": [[1]]})
    tables = {"t": torch.tensor([[1.0], [2.0]])}
    a, b = (fr.FeatureConfig(k, table="t") for k in "ab")
    assert fr.lookup(tables, ids, [a])["a"].tolist() == [[1.0], [2.0]]
    assert fr.lookup(tables, ids, [b])["b"].tolist() == [[2.0]]
    history = [fr.FeatureConfig(k, table="t", pooling="none") for k in "ab"]
    got = fr.lookup_sequence(tables, ids, history)
    assert {k: x.to_lists() for k, x in got.items()} == {"a": [[[1.0]], [[2.0]]], "b": [[[2.0]]]}


def test_no_features_give_no_columns():
    """lookup of no features is a KeyedTensor [B, 0] without keys. B is the number of bags of each key, or 0 where these
    numbers differ."""
    lists = {"a": [[0], [], [0]], "b": [[0], [0, 0], []]}
    for bags, num_bags in [(lists, 3), ({**lists, "b": [[0]]}, 0), ({}, 0)]:
        ids, tables = fr.KeyedJaggedTensor.from_lists(bags), {"t": torch.ones(1, 1)}
        for out in (fr.lookup(tables, ids, []), fr.jit(lambda t, i: fr.lookup(t, i, []))(tables, ids)):
            assert out.keys == () and out.values.shape == (num_bags, 0)


def test_ids_on_meta_have_shapes():
    """Lookups and transposes accept tensors on the meta device, even with more than 2³¹ rows."""
    ids = fr.KeyedJaggedTensor(*(x.to("meta") for x in (torch.zeros(8).long(), torch.zeros(5).long())), keys=("a",))
    f = [fr.FeatureConfig("a", table="t", pooling="mean")]
    tables = {"t": torch.empty(2**33, 16, device="meta")}
    acts = fr.lookup(tables, ids, f)
    assert acts.values.shape == (4, 16)
    assert fr.lookup_transpose(acts, ids, f, tables)["t"].coalesce().grads.shape == (8, 16)


@pytest.mark.parametrize("max_length", [None, 3, 40])
def test_sums_run_in_f32_in_the_order_of_positions(max_length):
    """A bag of an f16 table is summed in f32, in the order of positions, bit for bit."""
    w = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)).half()
    bags = [[i % 50 for i in range(n, n * n + 1)][:37] for n in range(9)]
    ids = fr.KeyedJaggedTensor.from_lists({"a": bags})
    got = fr.lookup({"t": w}, ids, [fr.FeatureConfig("a", table="t", max_length=max_length)])["a"]
    for out, bag in zip(got, bags):
        total = torch.zeros(5)
        for row in bag[:max_length]:
            total = total + w[row].float()
        assert torch.equal(out, total)


def test_members_of_one_key_among_keys_of_other_batch_sizes():
    """A vmap over ids gives the lookup of each member, also where the other keys have another number of bags."""
    read, table = [fr.FeatureConfig("a", table="t")], {"t": torch.randn(9, 2)}
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]], "b": [[4], [], [5]]})
    ids_of = lambda values, offsets: fr.KeyedJaggedTensor(values, offsets, None, None, ids.keys, ids.strides)
    of = lambda *x: fr.lookup(table, ids_of(*x), read).values
    members = torch.stack([ids.values, ids.values.flip(0), ids.values + 3]), torch.stack([ids.offsets] * 3)
    assert torch.equal(torch.func.vmap(of)(*members), torch.stack([of(*x) for x in zip(*members, strict=True)]))

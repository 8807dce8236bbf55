"""Lookups with pooling "max" against a loop over bags, torch's embedding_bag, and every transform."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev, vmap

import funcrec as fr
from funcrec.testing import assert_trees_close, garbage_padding
from funcrec.testing import strategies as frs

POOLINGS = ("max", "sum", "mean", "none")
IDS = fr.KeyedJaggedTensor.from_lists(
    {"a": [[0, 1, 1], [], [5, 2]], "b": [[1], [2, 3], [9]]},
    weights={"a": [[1.0, -2.0, 3.0], [], [-1.0, 0.5]], "b": [[1.0], [2.0, 3.0], [1.0]]},
)
FEATURES = (
    fr.FeatureConfig("a", table="t", pooling="max"),
    fr.FeatureConfig("sum", table="t", column="a", weighted=True),
    fr.FeatureConfig("b", table="u", pooling="max", weighted=True, max_length=1),
)
TABLES = {
    n: torch.randn(6, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    for n, d in (("t", 3), ("u", 2))
}


def by_hand(it, feature):
    """The greatest value of each column of each bag, f64[B, D], from lists."""
    table, rows = it.tables[feature.table].double(), []
    bags = it.ids[feature.key].unpad()
    for a, b in zip(bags.offsets.tolist(), bags.offsets.tolist()[1:], strict=False):
        ids = fr.hash_rows(bags.values[a:b][: feature.max_length], feature.hash, len(table)).tolist()
        scale = bags.weights[a:b].double().tolist() if feature.weighted else [1.0] * len(ids)
        each = [table[i] * s if 0 <= i < len(table) else table[0] * 0 for i, s in zip(ids, scale, strict=False)]
        rows.append(torch.stack(each).amax(0) if each else table[0] * 0)
    return torch.stack(rows) if rows else table.new_zeros(0, table.shape[1])


@given(it=frs.lookups(poolings=POOLINGS))
def test_a_maximum_is_that_of_a_loop(it):
    """Maxima are right with hashes, weights, max_length, ids outside the table and features of other poolings. An id
    outside the table is a row of zeros, and columns have the order of the features."""
    got = fr.lookup(it.tables, garbage_padding(it.ids), it.features)
    assert got.keys == tuple(f.name for f in it.features if f.pooling != "none")
    for f in it.features:
        if f.pooling == "max":
            torch.testing.assert_close(got[f.name].double(), by_hand(it, f), rtol=1e-2, atol=1e-2)
    f32 = {n: t.float() for n, t in it.tables.items()}
    for f in it.features:
        if f.pooling == "max" and not f.weighted:
            assert torch.equal(fr.lookup(f32, it.ids, [f])[f.name].double(), by_hand(it._replace(tables=f32), f))


@given(data=st.data())
def test_it_is_torchs_embedding_bag(data):
    """Values and gradients equal embedding_bag's of mode "max": of equal values the first gets the derivative."""
    plain = {"outside": False, "hashes": (None,), "max_lengths": (None,), "max_tables": 1, "max_features": 1}
    it = data.draw(frs.lookups(poolings=("max",), weighted=False, min_bags=1, dtypes=(torch.float32,), **plain))
    (feature,) = it.features
    bags, table = it.ids[feature.key].unpad(), it.tables[feature.table].clone().requires_grad_()
    embedding_bag = torch.nn.functional.embedding_bag
    want = embedding_bag(bags.values.long(), table, bags.offsets.long(), mode="max", include_last_offset=True)
    assert torch.equal(fr.lookup(*it)[feature.name], want)
    d = data.draw(frs.cotangents(it))
    want.backward(d.values)
    mine = fr.lookup_transpose(d, it.ids, it.features, it.tables)[feature.table]
    assert_trees_close(mine.to_dense(), table.grad)


def acts(tables, ids=IDS):
    return fr.lookup(tables, ids, FEATURES).values


def dense(tables, weights):
    """The lookup of FEATURES in plain torch."""
    t, u = tables["t"], tables["u"]
    first = torch.stack([t[[0, 1, 1]].amax(0), t[0] * 0, t[[5, 2]].amax(0)])
    summed = torch.stack([(t[[0, 1, 1]] * weights[:3, None]).sum(0), t[0] * 0, (t[[5, 2]] * weights[3:5, None]).sum(0)])
    last = torch.stack([u[1] * weights[5], u[2] * weights[6], u[0] * 0])
    return torch.cat([first, summed, last], 1)


def weighted(w):
    return fr.KeyedJaggedTensor(IDS.values, IDS.offsets, w, None, IDS.keys)


def test_derivatives_in_tables_and_weights_are_torchs():
    """First and second derivatives by every table and the weights are right, forward and reverse, where no values are
    equal."""
    w = IDS.weights.double()
    f = lambda t, u, w: (acts({"t": t, "u": u}, weighted(w)).sin()).sum()
    g = lambda t, u, w: (dense({"t": t, "u": u}, w).sin()).sum()
    at = (TABLES["t"], TABLES["u"], w)
    torch.testing.assert_close(f(*at), g(*at))
    for k in range(3):
        torch.testing.assert_close(grad(f, k)(*at), grad(g, k)(*at))
        torch.testing.assert_close(jacfwd(f, k)(*at), jacfwd(g, k)(*at))
        for j in range(3):
            torch.testing.assert_close(jacfwd(grad(f, k), j)(*at), jacfwd(grad(g, k), j)(*at))
            torch.testing.assert_close(jacrev(jacrev(f, k), j)(*at), jacrev(jacrev(g, k), j)(*at))


def test_value_and_grad_is_the_transpose():
    """Row gradients of a loss equal lookup_transpose and the dense gradient, for tables of maxima and sums together,
    also where a gradient in the weights is part of the loss."""
    loss = lambda p, ids: (acts(p.tables, ids).sin() * p.dense).sum()
    params = fr.Params(TABLES, torch.tensor(2.0, dtype=torch.float64))
    _, grads = fr.value_and_grad(loss)(params, IDS)
    want = grad(lambda t: loss(fr.Params(t, params.dense), IDS))(TABLES)
    d = 2 * acts(TABLES).cos()
    mine = fr.lookup_transpose(fr.KeyedTensor(d, ("a", "sum", "b"), (3, 3, 2)), IDS, FEATURES, TABLES)
    for n, x in want.items():
        torch.testing.assert_close(grads.tables[n].to_dense(), x)
        torch.testing.assert_close(mine[n].to_dense(), x)
    within = lambda p, ids: grad(lambda w: acts(p.tables, weighted(w)).sin().sum())(ids.weights.double()).square().sum()
    _, grads = fr.value_and_grad(within)(params, IDS)
    want = grad(lambda t: within(fr.Params(t, params.dense), IDS))(TABLES)
    for n, x in want.items():
        torch.testing.assert_close(grads.tables[n].to_dense(), x)


def test_transforms_compose():
    """vmap over tables, and over weights, jit, and micro-batches have the numbers of single calls."""
    stack = {n: torch.stack([t, t.flip(0), -t]) for n, t in TABLES.items()}
    each = [acts({n: t[i] for n, t in stack.items()}) for i in range(3)]
    torch.testing.assert_close(vmap(acts)(stack), torch.stack(each))
    weights = torch.stack([IDS.weights, -IDS.weights]).double()
    of = lambda w: acts(TABLES, weighted(w))
    torch.testing.assert_close(vmap(of)(weights), torch.stack([of(w) for w in weights]))
    torch.testing.assert_close(fr.jit(acts)(TABLES, IDS), acts(TABLES))
    slope = lambda t: grad(lambda t: acts(t).sin().sum())(t)["t"]
    torch.testing.assert_close(vmap(slope)(stack)[1], slope({n: t[1] for n, t in stack.items()}))
    none = fr.KeyedJaggedTensor.from_lists({"a": [], "b": []}, weights={"a": [], "b": []}, dtype=torch.int64)
    assert acts(TABLES, none).shape == (0, 8)


@pytest.mark.parametrize("how", ["plain", "donated", "micro-batches"])
def test_a_step_trains(how):
    """A step of a loss with maxima makes the update of the dense gradient, donated and in parts, too."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 1, 1], [], [5, 2], [3]], "b": [[1], [2, 3], [0], [4]]})
    features = [fr.FeatureConfig(k, table=t, pooling="max") for k, t in (("a", "t"), ("b", "u"))]
    loss = lambda p, b: (fr.lookup(p.tables, b.ids, features).values @ p.dense).sin().mean()
    tables = {n: t.float() for n, t in TABLES.items()}
    dense_ = torch.linspace(0.1, 0.5, 5)
    more = {"micro_batches": 2} if how == "micro-batches" else {}
    step = fr.train_step(loss, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), **more)
    batch = fr.Batch(ids, torch.zeros(4))
    state = step.init(fr.copy(fr.Params(tables, dense_)))
    run = fr.jit(step, donate=("state",)) if how == "donated" else step
    state, _ = run(state, batch)
    d = grad(lambda t: loss(fr.Params(t, dense_), batch))(tables)
    for n, t in tables.items():
        torch.testing.assert_close(state.tables[n], t - 0.1 * d[n])


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
def test_quantised_tables_have_the_maxima_of_their_numbers(dtype):
    """The lookup of codes equals the lookup of the decoded rows, and fake-quantised tables give the lookup of quantised
    tables."""
    tables = {n: t.float() for n, t in TABLES.items()}
    q = fr.quantize(tables, dtype)
    want = acts(fr.dequantize(q))
    torch.testing.assert_close(acts(q), want)
    if dtype == "int8":
        torch.testing.assert_close(acts(fr.fake_quantize(tables, dtype)), want)


def test_what_cannot_be_is_refused():
    """The transpose needs the tables; TorchRec has no such pooling."""
    d = fr.KeyedTensor(acts(TABLES), ("a", "sum", "b"), (3, 3, 2))
    configs = [fr.TableConfig(n, *t.shape) for n, t in TABLES.items()]
    with pytest.raises(ValueError, match="a maximum has no transpose without its tables"):
        fr.lookup_transpose(d, IDS, FEATURES, configs)
    pytest.importorskip("torchrec")
    with pytest.raises(ValueError, match="TorchRec has no pooling of maxima"):
        fr.interop.to_torchrec((configs[:1], FEATURES[:1]))

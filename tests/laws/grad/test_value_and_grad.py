"""value_and_grad gives row gradients for tables and dense gradients for dense leaves. Both are gradients of the
loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import funcrec as fr
from funcrec.testing import assert_trees_close, check_grads, garbage_padding, zero_padding
from funcrec.testing import strategies as frs

F64 = {"dtypes": (torch.float64,), "max_tables": 2, "max_features": 3}
MIXED = frs.lookups(poolings=("none", "sum", "mean"), **F64)


def read(tables, ids, features):
    """Return all numbers of the lookups of the features in one vector."""
    parts = [x.values.flatten() for x in fr.lookup_sequence(tables, ids, features).values()]
    if any(f.pooling != "none" for f in features):
        parts.append(fr.lookup(tables, ids, features).values.flatten())
    return torch.cat(parts)


def loss_of(it):
    """Return a loss with several lookups that is nonlinear in all lookups."""

    def loss(params, ids, scale=1.0):
        once = read(params.tables, ids, it.features)
        again = read(params.tables, ids, it.features[:1])
        bent = (once * params.dense["w"]).sin().sum() + (again**2).sum() * params.dense["b"][0]
        return bent * scale

    return loss


DENSE = {"w": torch.tensor(0.7, dtype=torch.float64), "b": [torch.tensor(0.3, dtype=torch.float64)]}


def densely(loss, params, *args, **kwargs):
    """Return the gradients by torch.func, with tables as dense leaves."""
    fn = lambda tables, dense: loss(fr.Params(tables, dense), *args, **kwargs)
    return torch.func.grad_and_value(fn, argnums=(0, 1))(params.tables, params.dense)


def dense_tables(grads):
    return {n: g.to_dense() for n, g in grads.tables.items()}


@given(MIXED)
def test_rows_are_the_dense_gradient(it):
    """grads.tables[name].to_dense(), grads.dense and the loss equal the gradients and the loss of torch for dense
    tables."""
    params, loss = fr.Params(it.tables, DENSE), loss_of(it)
    value, grads = fr.value_and_grad(loss)(params, it.ids, scale=0.5)
    (want_tables, want_dense), want = densely(loss, params, it.ids, scale=0.5)
    assert_trees_close(value, want)
    assert_trees_close(grads.dense, want_dense, rtol=1e-12, atol=1e-12)
    assert set(grads.tables) == set(it.tables)
    assert_trees_close(dense_tables(grads), want_tables, rtol=1e-12, atol=1e-12)
    coalesced = {n: g.coalesce().to_dense() for n, g in grads.tables.items()}
    assert_trees_close(coalesced, dense_tables(grads))


@given(MIXED)
def test_padding_is_never_read(it):
    """A batch with garbage in its padding has the gradients of the batch without padding. The inputs do not change."""
    params, run = fr.Params(it.tables, DENSE), fr.value_and_grad(loss_of(it))
    before = tree_map(torch.clone, (params, it.ids))
    value, grads = run(params, it.ids)
    other, dirty = run(params, garbage_padding(it.ids))
    assert_trees_close((params, it.ids), before)
    assert_trees_close((value, dense_tables(grads), grads.dense), (other, dense_tables(dirty), dirty.dense))


@given(frs.lookups(poolings=("sum", "mean"), **F64), st.data())
def test_the_explicit_form_is_the_same(it, data):
    """lookup, torch.func.vjp over (dense, acts) and lookup_transpose together equal value_and_grad to the last bit."""
    loss = lambda dense, acts: (acts.values * dense).sin().sum()
    acts, dense = fr.lookup(*it), torch.tensor(0.7, dtype=torch.float64)
    value, vjp = torch.func.vjp(loss, dense, acts)
    d_dense, d_acts = vjp(torch.ones_like(value))
    rows = fr.lookup_transpose(d_acts, it.ids, it.features, it.tables)
    tapped = lambda p: loss(p.dense, fr.lookup(p.tables, it.ids, it.features))
    got, grads = fr.value_and_grad(tapped)(fr.Params(it.tables, dense))
    assert_trees_close(got, value)
    assert_trees_close(grads.dense, d_dense)
    assert_trees_close({n: grads.tables[n] for n in rows}, rows)


@settings(max_examples=10)
@given(MIXED)
def test_a_step_reads_nothing_on_the_host(it):
    """value_and_grad traces with fake tensors. value_and_grad therefore reads nothing on the host. The traced step
    gives the same values."""
    params, run = fr.Params(it.tables, DENSE), fr.value_and_grad(loss_of(it))
    ids = zero_padding(it.ids)
    traced = make_fx(lambda *args: run(*args), tracing_mode="fake")(params, ids)
    assert_trees_close(traced(params, ids), run(params, ids))


IDS = fr.KeyedJaggedTensor.from_lists({"a": [[0, 2, 2], [1]], "b": [[1], [0]]})
POOL = [fr.FeatureConfig("a", table="t"), fr.FeatureConfig("b", table="t", pooling="mean")]
TABLE = {"t": torch.arange(6.0, dtype=torch.float64).reshape(3, 2) / 7}
W = torch.tensor([0.5, -1.0], dtype=torch.float64)


def simple(params, ids):
    acts = fr.lookup(params.tables, ids, POOL)
    return (acts["a"] * acts["b"] * params.dense).sin().sum()


PARAMS = fr.Params(TABLE, W)


def test_aux_comes_back():
    """has_aux returns the second result of the loss: tensors, values and plain Python, detached from the gradient."""

    def loss(p, ids):
        return simple(p, ids), {"acts": fr.lookup(p.tables, ids, POOL), "n": 3, "name": "x", "none": None}

    (value, aux), grads = fr.value_and_grad(loss, has_aux=True)(PARAMS, IDS)
    plain, want = fr.value_and_grad(simple)(PARAMS, IDS)
    assert_trees_close(value, plain)
    assert_trees_close(dense_tables(grads), dense_tables(want))
    assert aux["n"] == 3 and aux["name"] == "x" and aux["none"] is None
    assert_trees_close(aux["acts"], fr.lookup(TABLE, IDS, POOL))


UNUSUAL = {
    "no lookup": lambda p: p.dense["w"].sum(),
    "no dense parameter used": lambda p: fr.lookup(p.tables, IDS, POOL).values.sum(),
    "nothing used": lambda p: torch.zeros((), dtype=torch.float64),
    "looked up, not used": lambda p: (fr.lookup(p.tables, IDS, POOL), p.dense["w"].sum())[1],
    "a table of ones own, constant": lambda p: fr.lookup({"t": TABLE["t"] * 2}, IDS, POOL).values.sum(),
    "looked up under no_grad": lambda p: fr.lookup(p.tables, IDS, POOL).values.detach().sum() * p.dense["w"].sum(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_losses(name):
    """If a loss uses some or none of its parameters, the unused parameters get zero gradients of the right dtype."""
    loss = UNUSUAL[name]
    params = fr.Params({**TABLE, "unused": torch.ones(2, 3, dtype=torch.float64)}, {"w": W})
    _, grads = fr.value_and_grad(loss)(params)
    (want_tables, want_dense), _ = densely(loss, params)
    assert_trees_close(dense_tables(grads), want_tables)
    assert_trees_close(grads.dense, want_dense)


@pytest.mark.parametrize("dense", [{}, (), []], ids=repr)
def test_no_dense_parameters(dense):
    """dense may be an empty tree."""
    loss = lambda p, ids: fr.lookup(p.tables, ids, POOL).values.sum()
    _, grads = fr.value_and_grad(loss)(fr.Params(TABLE, dense), IDS)
    assert grads.dense == dense and grads.tables["t"].to_dense().sum() == 12.0


@pytest.mark.parametrize("dtype", frs.FLOAT_DTYPES)
def test_short_tables_have_gradients_in_f32(dtype):
    """The gradient of an f16 or bf16 table is f32, whether or not the loss reads the table. The gradient of an f64
    table is f64."""
    params = fr.Params({"t": TABLE["t"].to(dtype), "unused": TABLE["t"].to(dtype)}, W.float())
    _, grads = fr.value_and_grad(simple)(params, IDS)
    want = torch.promote_types(dtype, torch.float32)
    assert {g.grads.dtype for g in grads.tables.values()} == {want}


def test_ensembles_are_a_loop():
    """vmap(value_and_grad) over stacked parameters equals a loop over the members."""
    stacked = tree_map(lambda x: torch.stack([x, x * 2 + 1]), PARAMS)
    run = lambda p: (lambda v, g: (v, g.dense, dense_tables(g)))(*fr.value_and_grad(simple)(p, IDS))
    got = torch.func.vmap(run)(stacked)
    loop = [run(tree_map(lambda x, i=i: x[i], stacked)) for i in range(2)]
    assert_trees_close(got, tree_map(lambda *x: torch.stack(x), *loop), rtol=1e-14, atol=1e-14)


def test_per_example_gradients():
    """vmap(value_and_grad) over examples gives the gradient of each example. These gradients sum to the gradient of the
    batch."""
    each = [IDS[b] for b in range(2)]
    capacity = max(x.unpad().capacity for x in each)
    batch = tree_map(lambda *x: torch.stack(x), *(x.unpad().pad_to(capacity) for x in each))
    run = lambda ids: dense_tables(fr.value_and_grad(simple)(PARAMS, ids)[1])["t"]
    got = torch.func.vmap(run)(batch)
    assert_trees_close(got, torch.stack([run(x) for x in each]), atol=1e-14)
    assert_trees_close(got.sum(0), run(IDS), atol=1e-14)


def test_hessian_vector_products():
    """jvp of value_and_grad in a dense direction is the Hessian times the direction, for dense leaves and tables."""

    def grads(dense):
        _, g = fr.value_and_grad(simple)(fr.Params(TABLE, dense), IDS)
        return g.dense, g.tables["t"].to_dense()

    direction = torch.tensor([1.0, 2.0], dtype=torch.float64)
    _, (dense, table) = torch.func.jvp(grads, (W,), (direction,))
    by_dense = lambda w: densely(simple, fr.Params(TABLE, w), IDS)[0]
    _, (want_tables, want_dense) = torch.func.jvp(by_dense, (W,), (direction,))
    assert_trees_close(dense, want_dense, atol=1e-12)
    assert_trees_close(table, want_tables["t"], atol=1e-12)
    assert float(dense.abs().sum()) > 0.01 and float(table.abs().sum()) > 0.01


def test_hessians_reach_through_tables():
    """jvp of value_and_grad in the direction of a table is the Hessian times the direction. Gradients of gradients
    agree with finite differences."""

    def grads(table):
        _, g = fr.value_and_grad(simple)(fr.Params({"t": table}, W), IDS)
        return g.dense, g.tables["t"].to_dense()

    check_grads(grads, (TABLE["t"],), order=1)
    check_grads(lambda t: fr.lookup({"t": t}, IDS, POOL).values.sin().sum(), (TABLE["t"],), order=2)
    hessian = torch.func.hessian(lambda t: simple(fr.Params({"t": t}, W), IDS))(TABLE["t"])
    assert_trees_close(hessian.reshape(6, 6), hessian.reshape(6, 6).T, atol=1e-12)


def test_weights_of_ids_may_be_learned():
    """If dense parameters are the weights of ids, the dense gradient passes through the lookup."""
    pool = [fr.FeatureConfig("a", table="t", weighted=True)]

    def loss(p, ids):
        scaled = fr.KeyedJaggedTensor(ids.values, ids.offsets, p.dense.index_select(0, ids.values), None, ids.keys)
        return fr.lookup(p.tables, scaled, pool).values.sin().sum()

    ids = IDS.permute(["a"]).unpad()
    params = fr.Params(TABLE, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    _, grads = fr.value_and_grad(loss)(params, ids)
    (want_tables, want_dense), _ = densely(loss, params, ids)
    assert_trees_close(grads.dense, want_dense, atol=1e-13)
    assert_trees_close(dense_tables(grads), want_tables, atol=1e-13)


def inner_gradient(p, ids):
    """Return a loss that takes a gradient inside, through a lookup."""
    inner = torch.func.grad(lambda w: (fr.lookup(p.tables, ids, POOL)["a"] * w).sin().sum())(p.dense)
    return (inner**2).sum()


def inner_weights(p, ids):
    """Return a loss whose inner gradient is taken with respect to the weights of ids."""
    weighted = [fr.FeatureConfig("a", table="t", weighted=True)]

    def inside(w):
        batch = fr.KeyedJaggedTensor(ids.values, ids.offsets, w.sum().expand(ids.capacity), None, ids.keys)
        return fr.lookup(p.tables, batch, weighted)["a"].sin().sum()

    return (torch.func.grad(inside)(p.dense) ** 2).sum()


@pytest.mark.parametrize("loss", [inner_gradient, inner_weights], ids=lambda f: f.__name__)
def test_a_loss_may_take_gradients_itself(loss):
    """value_and_grad of a loss with torch.func.grad around a lookup equals torch's gradient."""
    (want_tables, want_dense), _ = densely(loss, PARAMS, IDS)
    _, grads = fr.value_and_grad(loss)(PARAMS, IDS)
    assert_trees_close(grads.dense, want_dense, atol=1e-12)
    assert_trees_close(dense_tables(grads), want_tables, atol=1e-12)


def test_two_value_and_grads_nest():
    """value_and_grad inside the loss of value_and_grad, over other parameters, gives torch's gradients."""

    def loss(p, ids):
        _, inner = fr.value_and_grad(lambda q: simple(q, ids))(fr.Params(TABLE, p.dense))
        return (inner.dense**2).sum() + fr.lookup(p.tables, ids, POOL).values.sum()

    def plainly(p, ids):
        inner = torch.func.grad(lambda w: simple(fr.Params(TABLE, w), ids))(p.dense)
        return (inner**2).sum() + fr.lookup(p.tables, ids, POOL).values.sum()

    _, grads = fr.value_and_grad(loss)(PARAMS, IDS)
    (want_tables, want_dense), _ = densely(plainly, PARAMS, IDS)
    assert_trees_close(grads.dense, want_dense, atol=1e-12)
    assert_trees_close(dense_tables(grads), want_tables, atol=1e-12)


BATCHED = tree_map(lambda x: torch.stack([x, x]), IDS)
IN_VMAP = {
    "vmap over ids": lambda p: torch.func.vmap(lambda ids: fr.lookup(p.tables, ids, POOL).values)(BATCHED).sum(),
    "vmap of grad over ids": lambda p: torch.func.vmap(
        lambda ids: torch.func.grad(lambda w: (fr.lookup(p.tables, ids, POOL)["a"] * w).sum())(p.dense)
    )(BATCHED).sum(),
    "grad of vmap over ids": lambda p: torch.func.grad(
        lambda w: (torch.func.vmap(lambda ids: fr.lookup(p.tables, ids, POOL)["a"])(BATCHED) * w).sum()
    )(p.dense).sum(),
}


@pytest.mark.parametrize("name", IN_VMAP)
def test_a_lookup_inside_a_vmap_of_the_loss(name):
    """A lookup inside a vmap in the loss gives torch's gradient, with a tap for each member."""
    _, grads = fr.value_and_grad(IN_VMAP[name])(PARAMS)
    (want_tables, want_dense), _ = densely(IN_VMAP[name], PARAMS)
    assert_trees_close(grads.dense, want_dense, atol=1e-12)
    assert_trees_close(dense_tables(grads), want_tables, atol=1e-12)


DENSE_USES = {
    "matmul": lambda p: (p.dense @ p.tables["t"].T).sum(),
    "torch.matmul": lambda p: torch.matmul(p.dense, p.tables["t"].T).sum(),
    "method": lambda p: p.tables["t"].sum(),
    "function": lambda p: torch.sum(p.tables["t"]),
    "mul": lambda p: (p.tables["t"] * 2).sum(),
    "rsub": lambda p: (1 - p.tables["t"]).sum(),
    "index": lambda p: p.tables["t"][0].sum(),
    "iter": lambda p: sum(p.tables["t"]),
    "mul from a tensor": lambda p: (p.dense * p.tables["t"]).sum(),
    "square in a tree": lambda p: sum((t**2).sum() for t in p.tables.values()),
    "embedding": lambda p: torch.nn.functional.embedding(IDS.values, p.tables["t"]).sum(),
    "float": lambda p: p.dense.sum() * float(p.tables["t"]),
    "comparison": lambda p: (p.dense.sum() * (p.tables["t"] > 0)).sum(),
    "abs": lambda p: abs(p.tables["t"]).sum(),
}


@pytest.mark.parametrize("name", DENSE_USES)
def test_a_table_used_densely_is_refused(name):
    """Any use of a table other than a lookup (tied weights, a norm) raises TypeError. The error says where such a
    matrix belongs."""
    with pytest.raises(TypeError) as e:
        fr.value_and_grad(DENSE_USES[name])(PARAMS)
    assert "used densely" in str(e.value) and "params.dense" in str(e.value)


def test_a_ref_has_a_shape():
    """Inside the loss, a table still has its shape, dtype and device."""
    seen = []
    fr.value_and_grad(lambda p: (seen.append((p.tables["t"].shape, p.tables["t"].dtype)), p.dense.sum())[1])(PARAMS)
    assert set(seen) == {((3, 2), torch.float64)}


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_a_lookup_may_be_checkpointed(pooling):
    """torch.utils.checkpoint of a lookup, which keeps only the arguments, changes no derivative."""
    features = [fr.FeatureConfig("a", table="t", pooling=pooling, weighted=True)]
    weighted = lambda w: fr.KeyedJaggedTensor(IDS.values, IDS.offsets, w, None, IDS.keys)
    read = fr.lookup if pooling == "sum" else fr.lookup_sequence
    bend = lambda table, w: sum(x.sin().sum() for x in tensors(read({"t": table}, weighted(w), features)))
    tensors = lambda tree: [x for x in tree_leaves(tree) if x.is_floating_point()]
    leaves = [x.clone().requires_grad_() for x in (TABLE["t"], torch.linspace(0.5, 2, IDS.capacity).double())]
    kept = checkpoint(bend, *leaves, use_reentrant=False)
    assert_trees_close(torch.autograd.grad(kept, leaves), torch.autograd.grad(bend(*leaves), leaves))


@pytest.mark.parametrize("donate", [(), ("p",)])
def test_a_jitted_loss_is_differentiated(donate):
    """value_and_grad(jit(loss)) = value_and_grad(loss), whether or not jit was called before. No argument is
    donated."""
    params = fr.Params(TABLE, W)
    jitted = fr.jit(lambda p, ids: simple(p, ids), donate=donate)
    for warm in range(2):
        if warm:
            jitted(fr.copy(params), IDS)
        (loss, grads), (want, want_grads) = (
            fr.value_and_grad(jitted)(params, IDS),
            fr.value_and_grad(simple)(params, IDS),
        )
        assert_trees_close((loss, dense_tables(grads), grads.dense), (want, dense_tables(want_grads), want_grads.dense))

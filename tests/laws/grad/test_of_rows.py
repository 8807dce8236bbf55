"""of_rows: a function of the rows that it reads has the values and the derivatives of the function of whole tables."""

import functools
import inspect
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import funcrec as fr
from funcrec.grad._row_tables import apart
from funcrec.testing import assert_trees_close

assert_close = functools.partial(assert_trees_close, rtol=1e-9, atol=1e-9)

ROWS = {"item": (13, 4), "user": (7, 3), "unread": (5, 2)}
FEATURES = (
    fr.FeatureConfig("a", table="item"),
    fr.FeatureConfig("b", table="item", pooling="mean", weighted=True, max_length=3),
    fr.FeatureConfig("c", table="user", hash=fr.modulo(), max_length=2),
    fr.FeatureConfig("again", table="user", column="a"),
    fr.FeatureConfig("most", table="user", column="b", pooling="max"),
    fr.FeatureConfig("last", table="item", column="a", pooling="none", max_length=2),
)


def drawn(seed: int, num_examples: int = 5):
    """Return parameters, and a batch with empty bags, repeats, ids outside their table, weights and padding."""
    g = torch.Generator().manual_seed(seed)
    count = lambda: torch.randint(0, 5, (num_examples,), generator=g)
    bags = lambda n: [torch.randint(-1, n, (int(k),), generator=g).tolist() for k in count()]
    ids = fr.KeyedJaggedTensor.from_lists({"a": bags(14), "b": bags(13), "c": bags(99)}, dtype=torch.int64)
    weights = torch.rand(ids.capacity, generator=g, dtype=torch.float64)
    ids = fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, None, ids.keys).pad_to(ids.capacity + 5)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    params = fr.Params({n: normal(*s) for n, s in ROWS.items()}, {"w": normal(17)})
    return params, fr.Batch(ids, torch.rand(num_examples, generator=g, dtype=torch.float64))


def predict(params, batch):
    x = fr.lookup(params.tables, batch.ids, FEATURES).values
    rows = fr.lookup_sequence(params.tables, batch.ids, FEATURES)["last"].to_padded(2)
    return (x * params.dense["w"]).sum(1).tanh() + rows.sum((1, 2)).sin()


def loss_of(y, batch):
    return (y - batch.label).square().mean() + y.exp().mean()


def loss_fn(params, batch):
    return loss_of(predict(params, batch), batch)


def dense_of(tree: fr.Params) -> dict:
    """Return a gradient with dense tables, and zeros for tables without a gradient."""
    tables = {n: tree.tables[n].to_dense() for n in tree.tables}
    absent = {n: torch.zeros(s, dtype=torch.float64) for n, s in ROWS.items() if n not in tables}
    return {"tables": tables | absent, "dense": tree.dense}


def direction(params, seed: int) -> fr.Params:
    g = torch.Generator().manual_seed(seed)
    return fr.tree.map(lambda x: torch.randn(x.shape, generator=g, dtype=x.dtype), params)


def matrix(batch, params, of=loss_fn):
    """Return the Hessian by all elements of the dense parameters, f[N, N], and the function that makes a vector."""
    flat = lambda tree: torch.cat([x.flatten() for x in fr.tree.leaves(tree)])
    sizes = [x.numel() for x in fr.tree.leaves(params)]

    def back(v):
        parts = zip(v.split(sizes), fr.tree.leaves(params), strict=True)
        return fr.tree.unflatten(fr.tree.structure(params), [x.reshape(y.shape) for x, y in parts])

    return flat, back, lambda v: of(back(v), batch)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_values_and_gradients_are_those_of_the_whole_tables(seed):
    """The value has the same bits, the gradient by rows is the dense gradient, and the rows are those read."""
    params, batch = drawn(seed)
    of = fr.of_rows(loss_fn, params, batch)
    assert torch.equal(of.fn(of.params), loss_fn(params, batch))
    found, need = of.put(torch.func.grad(of.fn)(of.params)), fr.value_and_grad(loss_fn)(params, batch)[1]
    assert_close(dense_of(found), dense_of(need))
    for name, rows in of.rows.items():
        mine = rows[rows < of.shapes[name][0]]
        coalesced = need.tables[name].coalesce()
        assert mine.tolist() == coalesced.rows[coalesced.valid].tolist()
        assert torch.equal(of.params.tables[name][: len(mine)], params.tables[name][mine])


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_products_are_those_of_the_written_out_matrices(seed):
    """hvp, Gauss-Newton's and Fisher's products equal the products of matrices by all elements of dense tables."""
    params, batch = drawn(seed, 3)
    v = direction(params, seed)
    flat, back, whole = matrix(batch, params)
    at, along = flat(params), flat(v)
    near = lambda found, need: assert_close(dense_of(found), dense_of_params(back(need)))
    near(fr.hvp(loss_fn)(params, v, batch), torch.func.hessian(whole)(at) @ along)
    outputs = lambda x: predict(back(x), batch)
    jacobian, inner = torch.func.jacrev(outputs)(at), torch.func.hessian(lambda y: loss_of(y, batch))(outputs(at))
    near(fr.gauss_newton_product(predict, loss_of)(params, v, batch), jacobian.T @ inner @ jacobian @ along)
    losses = lambda p, b: (predict(p, b) - b.label).square()
    rows = torch.func.jacrev(lambda x: losses(back(x), batch))(at)
    near(fr.fisher_product(losses)(params, v, batch), rows.T @ rows @ along / 3)


def dense_of_params(params):
    return {"tables": params.tables, "dense": params.dense}


def test_a_product_is_the_difference_of_two_gradients():
    """H v equals (∇L(w + t v) - ∇L(w - t v)) / 2 t in f64."""
    params, batch = drawn(1)
    v, t = direction(params, 2), 1e-6
    gradient = lambda sign: dense_of(
        fr.value_and_grad(loss_fn)(fr.tree.map(lambda x, d: x + sign * t * d, params, v), batch)[1]
    )
    difference = fr.tree.map(lambda a, b: (a - b) / (2 * t), gradient(1), gradient(-1))
    assert_trees_close(dense_of(fr.hvp(loss_fn)(params, v, batch)), difference, rtol=1e-6, atol=1e-6)


def test_a_sparse_direction_is_that_of_its_dense_form():
    """RowGrads with repeated rows and rows that are not read, and absent tables, give the product of the dense form."""
    params, batch = drawn(3)
    grads = fr.value_and_grad(loss_fn)(params, batch)[1]
    other = fr.RowGrads.from_entries(torch.tensor([0, 6, 6, -1]), torch.ones(4, 3).double(), num_embeddings=7)
    v = fr.Params({"item": grads.tables["item"], "user": grads.tables["user"] + other}, grads.dense)
    dense = fr.Params({n: g.to_dense() for n, g in v.tables.items()}, v.dense)
    assert_close(dense_of(fr.hvp(loss_fn)(params, v, batch)), dense_of(fr.hvp(loss_fn)(params, dense, batch)))


def test_products_under_vmap():
    """vmap over directions gives the product of each."""
    params, batch = drawn(4)
    product = lambda v: dense_of(fr.hvp(loss_fn)(params, v, batch))
    each = [direction(params, 5), direction(params, 6)]
    made = torch.func.vmap(product)(fr.tree.map(lambda *x: torch.stack(x), *each))
    for i, v in enumerate(each):
        assert_close(fr.tree.map(lambda x: x[i], made), product(v))  # noqa: B023


def test_a_compiled_product_is_the_eager_one():
    """In a program the rows read have a place for each id, and the product is the same."""
    params, batch = drawn(4)
    short = lambda p, batch: fr.lookup(p.tables, batch.ids, FEATURES[:1]).values.square().sum(1).sin().sum()
    product = lambda params, v, batch: fr.hvp(short)(params, v, batch).tables["item"].to_dense()
    v = direction(params, 5)
    assert_close(fr.jit(product)(params, v, batch), product(params, v, batch))


def test_third_derivatives_and_gradients_of_products():
    """A product has the derivative of the dense function's product."""
    params, batch = drawn(5, 3)
    v = direction(params, 6)
    square = lambda w: (
        dense_of(fr.hvp(loss_fn)(fr.Params(params.tables, {"w": w}), v, batch))["dense"]["w"].square().sum()
    )

    def dense(w):
        f = lambda tables, w: loss_fn(fr.Params(tables, {"w": w}), batch)
        at, along = (params.tables, w), (v.tables, v.dense["w"])
        return torch.func.jvp(torch.func.grad(f, argnums=(0, 1)), at, along)[1][1].square().sum()

    w = params.dense["w"]
    assert_close(torch.func.grad(square)(w), torch.func.grad(dense)(w))


def test_an_empty_batch_reads_no_rows():
    """Without ids the product with the tables is zero."""
    params, _ = drawn(6)
    empty = fr.KeyedJaggedTensor.from_lists({"a": [[]], "b": [[]], "c": [[]]}, dtype=torch.int64)
    weights = torch.zeros(empty.capacity).double()
    batch = fr.Batch(
        fr.KeyedJaggedTensor(empty.values, empty.offsets, weights, None, empty.keys), torch.ones(1).double()
    )
    product = fr.hvp(loss_fn)(params, params, batch)
    assert all(not g.to_dense().any() for g in product.tables.values())


def allocated(call) -> tuple[list[int], int]:
    """Return (the bytes of each allocation of a call, in order; the most bytes held at once)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        call()
    events = [e.nbytes() for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [n for n in events if n > 0], max(itertools.accumulate(events))


PRODUCTS = {
    "hvp": fr.hvp(loss_fn),
    "gauss_newton": fr.gauss_newton_product(predict, loss_of),
    "fisher": fr.fisher_product(lambda p, b: (predict(p, b) - b.label).square()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_memory_is_in_proportion_to_the_batch(name):
    """A product allocates the same bytes for tables of any height. A batch of twice the size holds about twice the
    bytes."""

    def made(num_examples: int, height: int) -> tuple[list[int], int]:
        params, batch = drawn(8, num_examples)
        tables = {n: torch.cat([t, t.new_ones(height, t.shape[1])]) for n, t in params.tables.items()}
        params = fr.Params(tables, params.dense)
        v = fr.value_and_grad(loss_fn)(params, batch)[1]
        return allocated(lambda: PRODUCTS[name](params, v, batch))

    sizes, most = made(40, 2_000)
    assert made(40, 50_000) == (sizes, most) and max(sizes) < 50_000
    assert made(80, 2_000)[1] < 2.5 * most


def test_memory_is_in_proportion_to_the_features():
    """Twice the features, each with a table and ids of its own, hold about twice the bytes: a gradient of one table has
    no room for the ids of other tables."""

    def made(num_features: int) -> int:
        names = [f"f{i}" for i in range(num_features)]
        features = [fr.FeatureConfig(n, table=n) for n in names]
        ids = fr.KeyedJaggedTensor.from_lists({n: [[i % 7, i % 3], [], [i % 5]] * 8 for i, n in enumerate(names)})
        tables = {n: torch.ones(500, 2) for n in names}
        loss = lambda p: fr.lookup(p.tables, ids, features).values.sum(1).sin().sum()
        v = fr.value_and_grad(loss)(fr.Params(tables, {}))[1]
        return allocated(lambda: fr.hvp(loss)(fr.Params(tables, {}), v))[1]

    assert made(16) < 2.2 * made(8)


BOUNDS = [-(2**63), -(2**62), -1, 0, 1, 2, 3, 5, 7, 9, 2**62, 2**63 - 1]


@settings(max_examples=25)
@given(cuts=st.lists(st.sampled_from(BOUNDS), min_size=5, max_size=5), seed=st.integers(0, 99))
def test_any_offsets(cuts, seed):
    """Offsets that descend or leave the buffer give the value of the whole tables, and the product of differences."""
    g = torch.Generator().manual_seed(seed)
    ids = fr.KeyedJaggedTensor(torch.randint(-1, 9, (7,), generator=g), torch.tensor(cuts), None, None, ("a", "b"))
    features = [
        fr.FeatureConfig("a", table="x"), fr.FeatureConfig("b", table="y", pooling="mean"),
        fr.FeatureConfig("c", table="x", column="b", max_length=1),
    ]  # fmt: skip
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    params, t = fr.Params({"x": normal(8, 2), "y": normal(6, 3)}, {}), 1e-5
    loss = lambda p: fr.lookup(p.tables, ids, features).values.sin().sum()
    of = fr.of_rows(loss, params)
    assert torch.equal(of.fn(of.params), loss(params))
    moved = lambda sign: fr.Params({n: x * (1 + sign * t) for n, x in params.tables.items()}, {})
    gradient = lambda sign: fr.value_and_grad(loss)(moved(sign))[1].tables
    for name, found in fr.hvp(loss)(params, params).tables.items():
        difference = (gradient(1)[name].to_dense() - gradient(-1)[name].to_dense()) / (2 * t)
        assert torch.allclose(found.to_dense(), difference, atol=1e-6)


def test_bags_that_share_positions_are_read_in_layers():
    """Ranges that overlap get numbers of their own, and empty ranges none."""
    assert apart([(0, 3), (3, 5), (1, 4), (2, 2), (0, 1), (5, 9)]) == [0, 0, 1, 0, 1, 0]


SMALL = {
    "i32 ids": lambda lists: fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int32),
    "shared bags": lambda lists: fr.dedup_bags(fr.KeyedJaggedTensor.from_lists({"a": lists["a"] * 2})),
    "no id in range": lambda lists: fr.KeyedJaggedTensor.from_lists({"a": [[-1, 99]]}),
}


@pytest.mark.parametrize("ids", SMALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_of_other_ids_and_dtypes(ids, dtype):
    """The product of tables of each dtype, and of ids of each form, has the bits of the dense tables'."""
    own, g = SMALL[ids]({"a": [[1, 2, 2], [3], []]}), torch.Generator().manual_seed(0)
    table, w = torch.randn(20, 3, generator=g).to(dtype), torch.randn(3, generator=g)
    read = lambda p: (fr.lookup(p.tables, own, FEATURES[:1]).values.float() @ p.dense).tanh().square().sum()
    dense = lambda t, w: read(fr.Params({"item": t}, w))
    need = torch.func.jvp(torch.func.grad(dense, argnums=(0, 1)), (table, w), (table, w))[1]
    params = fr.Params({"item": table}, w)
    found = fr.hvp(read)(params, params)
    got = found.tables["item"].to_dense() if "item" in found.tables else torch.zeros_like(table)
    assert torch.equal(got.to(dtype), need[0]) and torch.equal(found.dense, need[1])


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_rows_that_were_not_read_are_nan(pooling):
    """A function that reads other rows when it is called again has NaN, and not zeros."""
    calls, feature = iter(([[1]], [[2]])), [fr.FeatureConfig("a", table="t", pooling=pooling)]
    look = fr.lookup if pooling == "sum" else fr.lookup_sequence
    read = lambda p: look(p.tables, fr.KeyedJaggedTensor.from_lists({"a": next(calls)}), feature)["a"]
    of = fr.of_rows(lambda p: read(p) if pooling == "sum" else read(p).values, fr.Params({"t": torch.ones(4, 1)}, {}))
    assert of.fn(of.params).isnan().all()


def test_a_penalty_of_the_tables_gradient_is_differentiated():
    """A loss with the squared norm of its own gradient by the rows has the dense function's gradient."""
    params, batch = drawn(7, 3)

    def penalised(params, batch):
        of = fr.value_and_grad(loss_fn)(params, batch)[1]
        return sum(g.squared_norm() for g in of.tables.values())

    def dense(tables):
        grads = torch.func.grad(lambda t: loss_fn(fr.Params(t, params.dense), batch))(tables)
        return sum(g.square().sum() for g in grads.values())

    found = fr.value_and_grad(penalised)(params, batch)[1]
    need = torch.func.grad(dense)(params.tables)
    for name in ("item", "user"):
        assert torch.allclose(found.tables[name].to_dense(), need[name], rtol=1e-8, atol=1e-8)


OTHER = "user"
RENAMED = {
    "another name": lambda p, look: look({"item": p.tables[OTHER]}),
    "some tables": lambda p, look: look({n: t for n, t in p.tables.items() if n != "item"} | {"item": p.tables[OTHER]}),
    "a dense table": lambda p, look: look({**p.tables, "item": p.dense["tied"]}) * look({"item": p.tables[OTHER]}),
}
FIRST = {
    "rows": lambda p, f: fr.value_and_grad(lambda q: f(q.tables))(p)[1].tables[OTHER].to_dense(),
    "dense": lambda p, f: torch.func.grad(f)(p.tables)[OTHER],
}


@pytest.mark.parametrize("pooling", ["sum", "max", "none"])
@pytest.mark.parametrize("how", [*RENAMED, "a gradient"])
def test_tables_may_have_other_names(how, pooling):
    """A lookup of the function may give its tables other names, and read plain tables, too: values, gradients and
    products are those of the whole tables. A gradient within the function has the rows of the whole table."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 6], [3, 1]]})
    features, g = [fr.FeatureConfig("a", table="item", pooling=pooling)], torch.Generator().manual_seed(0)

    def look(tables):
        if pooling == "none":
            return fr.lookup_sequence(tables, ids, features)["a"].values.cos()
        return fr.lookup(tables, ids, features)["a"].cos()

    def read(p, form="rows"):
        alone = lambda tables: look({"item": tables[OTHER]}).sin().sum()
        x = RENAMED[how](p, look) if how in RENAMED else FIRST[form](p, alone)[1:4]
        return (x * p.dense["w"]).square().sum()

    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    params = fr.Params({n: normal(*s) for n, s in ROWS.items()}, {"w": normal(3), "tied": normal(7, 3)})
    of, v = fr.of_rows(read, params), direction(params, 1)
    assert torch.equal(of.fn(of.params), read(params))
    gradient = torch.func.grad(lambda p: read(p, "dense"))
    product = torch.func.jvp(gradient, (params,), (v,))[1]
    for found, need in (
        (of.put(torch.func.grad(of.fn)(of.params)), gradient(params)),
        (fr.hvp(read)(params, v), product),
    ):
        dense = dense_of(found)
        assert_close((dense["dense"], [dense["tables"][n] for n in ROWS]), (need.dense, [need.tables[n] for n in ROWS]))


def test_of_rows_refuses_other_forms_of_its_parameters():
    """Its function takes small parameters, and torch.func's transforms: a value that it cannot read raises."""
    params, batch = drawn(1)
    of = fr.of_rows(loss_fn, params, batch)
    with pytest.raises(TypeError, match=r"funcrec.OfRows.fn: `params.tables\['item'\]` are not rows"):
        of.fn(fr.Params({n: params.tables[n] for n in of.rows}, params.dense))
    with pytest.raises(TypeError, match=r"torch.func.grad_and_value\(of.fn\)"):
        fr.value_and_grad(of.fn)(of.params)
    with pytest.raises(KeyError, match=r"are not the rows of the tables that are read"):
        of.fn(fr.Params({}, params.dense))
    faked = lambda p: fr.lookup(fr.fake_quantize(p.tables), batch.ids, FEATURES[:1]).values.sum()
    made = fr.of_rows(faked, fr.Params({"item": params.tables["item"].float()}, {}))
    with pytest.raises(TypeError, match=r"funcrec.of_rows: the function reads its tables as another kind of tables"):
        made.fn(made.params)

    counts = fr.gauss_newton_product(lambda p: {"y": p.dense["w"], "n": 3}, lambda y: y["y"].sum())
    with pytest.raises(TypeError, match=r"`predictions\['n'\]` cannot be differentiated"):
        counts(params, params)


def test_products_inside_of_value_and_grad():
    """A product of a loss's own tables says what to write; the function of rows that it names is right."""
    params, batch = drawn(1)
    penalty = lambda p, b: fr.hvp(loss_fn)(p, fr.Params({}, p.dense), b).dense["w"].square().sum()
    for inside in (penalty, lambda p, b: fr.of_rows(loss_fn, p, b).fn(p)):
        with pytest.raises(TypeError, match=r"of = fr.of_rows\(loss_fn, params, batch\) outside"):
            fr.value_and_grad(inside)(params, batch)
    of, v = fr.of_rows(loss_fn, params, batch), params.dense
    zeros = lambda p: fr.Params(fr.tree.map(torch.zeros_like, p.tables), v)

    def norm(f, at):
        return torch.func.jvp(torch.func.grad(f), (at,), (zeros(at),))[1].dense["w"].square().sum()

    got = of.put(torch.func.grad(lambda at: norm(of.fn, at))(of.params))
    whole = torch.func.grad(lambda at: norm(lambda p: loss_fn(p, batch), at))(params)
    assert_close(dense_of(got)["tables"]["item"], whole.tables["item"])


def test_products_in_threads_are_those_of_one_thread():
    """Threads that multiply at once get the products of one thread, though torch's forward mode belongs to one."""
    params, batch = drawn(1)
    products = [fr.hvp(loss_fn), fr.gauss_newton_product(predict, loss_of)]
    products.append(fr.fisher_product(lambda p, b: (predict(p, b) - b.label).square()))
    need = [dense_of(f(params, params, batch)) for f in products]

    def work(_):
        return [dense_of(f(params, params, batch)) for _ in range(4) for f in products]

    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(work, range(3)):
            assert_trees_close(got, need * 4, rtol=0, atol=0)


def test_a_gradient_without_entries_is_zero():
    """Restricted to the rows read, row gradients of no entry are zeros."""
    params, batch = drawn(8)
    of, zeros = fr.of_rows(loss_fn, params, batch), {n: fr.RowGrads.zeros(s) for n, s in ROWS.items()}
    assert_trees_close(
        of.take(fr.Params(zeros, params.dense)).tables, {n: 0.0 * of.params.tables[n].float() for n in of.rows}
    )


def test_only_values_like_the_small_parameters_are_put_back():
    """`put` names a table that was not read, and one with another number of rows."""
    of = fr.of_rows(loss_fn, *drawn(8))
    for name, words in (("unread", "a table among ['item', 'user']"), ("item", f"f64[{len(of.rows['item'])}, 4]")):
        wrong = fr.Params({**of.params.tables, name: torch.ones(13, 2).double()}, of.params.dense)
        with pytest.raises(ValueError) as error:
            of.put(wrong)
        assert f"`values.tables['{name}']` does not fit" in str(error.value) and words in str(error.value)


def test_losses_and_directions_of_other_forms_are_refused():
    """A product with the Hessian needs one number, that with the Fisher matrix one for each example, and both a
    direction like the parameters."""
    params, batch = drawn(8)
    each = lambda p, b: loss_fn(p, b).expand(2)
    with pytest.raises(TypeError, match=r"the loss is not a scalar.\n  got   f64\[2\]"):
        fr.hvp(each)(params, params, batch)
    with pytest.raises(TypeError, match=r"the losses are not one for each example.\n  got   f64\[\]"):
        fr.fisher_product(loss_fn)(params, params, batch)
    of = fr.of_rows(loss_fn, params, batch)
    longer = {n: torch.cat([t, t]) for n, t in params.tables.items()}
    with pytest.raises(ValueError, match=r"`direction.tables\['item'\]` does not fit"):
        of.take(fr.Params(longer, params.dense))
    with pytest.raises(ValueError, match=r"`direction.dense.*` has another shape or dtype"):
        of.take(fr.Params({}, fr.tree.map(lambda x: x[None], params.dense)))


def test_it_pickles_without_the_whole_tables():
    """A pickled function has the same bits, and holds the rows that it reads, not the tables."""
    params, batch = drawn(1)
    large = fr.Params({**params.tables, "item": torch.cat([params.tables["item"], torch.ones(4000, 4)])}, params.dense)
    of = fr.of_rows(loss_fn, large, batch)
    text = pickle.dumps(of)
    again = pickle.loads(text)
    assert len(text) < 20_000
    assert_trees_close(again.rows, of.rows)
    assert torch.equal(again.fn(again.params), of.fn(of.params))
    assert "loss_fn of rows" in repr(again.fn)


def test_fishers_matrix_of_one_example():
    """With a single example the product is g (gᵀ v)."""
    params, batch = drawn(9, 1)
    losses = lambda p, b: (predict(p, b) - b.label).square()
    v, g = direction(params, 10), dense_of(fr.value_and_grad(lambda p, b: losses(p, b).sum())(params, batch)[1])
    along = sum((x * y).sum() for x, y in zip(fr.tree.leaves(g), fr.tree.leaves(dense_of_params(v)), strict=True))
    assert_close(dense_of(fr.fisher_product(losses)(params, v, batch)), fr.tree.map(lambda x: x * along, g))


@pytest.mark.parametrize("how", ["hvp", "gauss_newton_product", "fisher_product"])
def test_a_product_has_its_own_signature(how):
    """A product takes a direction after the parameters, and `jit` of it does, whatever the loss's parameters are."""
    predict, loss = lambda p, x: p.dense * x, lambda y, x: y.square().sum()
    of = {
        "hvp": lambda: fr.hvp(lambda p, x: loss(predict(p, x), x)),
        "gauss_newton_product": lambda: fr.gauss_newton_product(predict, loss),
        "fisher_product": lambda: fr.fisher_product(lambda p, x: predict(p, x).square()),
    }
    multiply, x = of[how](), torch.tensor([1.0, 3.0])
    params, v = fr.Params({}, torch.tensor(2.0)), fr.Params({}, torch.tensor(10.0))
    assert list(inspect.signature(multiply).parameters)[:2] == ["params", "direction"]
    assert_trees_close(fr.jit(multiply)(params, v, x), multiply(params, v, x))

"""per_example_grads, and what is computed from gradients of examples: sums, norms, inner products, the noise scale."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

assert_close = functools.partial(assert_trees_close, rtol=1e-9, atol=1e-9)

ROWS = {"item": (13, 4), "user": (7, 3)}
FEATURES = (
    fr.FeatureConfig("a", table="item"),
    fr.FeatureConfig("b", table="item", pooling="mean", weighted=True, max_length=3),
    fr.FeatureConfig("c", table="user", pooling="mean", hash=fr.modulo(), max_length=2),
    fr.FeatureConfig("again", table="user", column="a"),
)
LATE = (fr.FeatureConfig("d", table="item", column="a", pooling="none"),)


def drawn(seed: int, num_examples: int = 6, dtype=torch.float64):
    """Return parameters, and a batch with empty bags, repeats, ids outside their table, weights and padding."""
    g = torch.Generator().manual_seed(seed)
    bags = lambda n: [
        torch.randint(-1, n, (int(k),), generator=g).tolist() for k in torch.randint(0, 5, (num_examples,), generator=g)
    ]
    ids = fr.KeyedJaggedTensor.from_lists({"a": bags(14), "b": bags(13), "c": bags(99)}, dtype=torch.int64)
    weights = torch.rand(ids.capacity, generator=g).to(dtype)
    ids = fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, None, ids.keys).pad_to(ids.capacity + 5)
    weight = torch.rand(num_examples, generator=g).to(dtype) + 0.1
    tables = {n: torch.randn(s, generator=g).to(dtype) for n, s in ROWS.items()}
    dense = {"w": torch.randn(14, generator=g).to(dtype), "c": torch.zeros((), dtype=dtype)}
    return fr.Params(tables, dense), fr.Batch(ids, torch.rand(num_examples, generator=g).to(dtype), weight=weight)


def errors(params, batch):
    x = fr.lookup(params.tables, batch.ids, FEATURES).values
    rows = fr.lookup_sequence(params.tables, batch.ids, LATE)["d"].to_padded(4)
    return ((x * params.dense["w"]).sum(1).tanh() + params.dense["c"] + rows.sum((1, 2)) ** 2 - batch.label).square()


def plain(params, batch):
    return errors(params, batch).mean()


def weighted(params, batch):
    return fr.losses.weighted_mean(errors(params, batch), batch.weight)


def dense_of(grads: fr.Params) -> dict:
    """Return gradients with dense tables."""
    return {"tables": {n: g.to_dense() for n, g in grads.tables.items()}, "dense": grads.dense}


def one(batch: fr.Batch, e: int) -> fr.Batch:
    return fr.Batch(batch.ids[e : e + 1], batch.label[e : e + 1], weight=batch.weight[e : e + 1])


@pytest.mark.parametrize("loss_fn", [plain, weighted])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_each_example_has_the_gradient_of_a_batch_of_one(loss_fn, seed):
    """Losses, gradients, norms and inner products are those of each example alone, times its share of the weights;
    the mean is the whole batch's."""
    params, batch = drawn(seed)
    losses, grads = fr.per_example_grads(loss_fn)(params, batch)
    loss, whole = fr.value_and_grad(loss_fn)(params, batch)
    mean = fr.sum_examples(grads, torch.full((6,), 1 / 6, dtype=torch.float64))
    assert_close((losses.mean(), dense_of(mean)), (loss, dense_of(whole)))
    norms, dots, each = fr.example_norms(grads), fr.example_dots(grads, whole), torch.func.vmap(dense_of)(grads)
    flat = lambda tree: torch.cat([x.flatten() for x in fr.tree.leaves(tree)])
    for e in range(6):
        value, alone = fr.value_and_grad(plain)(params, one(batch, e))
        share = 1 if loss_fn is plain else batch.weight[e] / batch.weight.mean()
        mine = fr.tree.map(lambda x: x[e], each)  # noqa: B023
        assert_close((losses[e], mine), fr.tree.map(lambda x: x * share, (value, dense_of(alone))))  # noqa: B023
        assert_close((norms[e], dots[e]), (flat(mine).norm(), flat(mine) @ flat(dense_of(whole))))


def test_entries_of_a_sum_are_in_the_batchs_order():
    """The sum of all examples' gradients has the rows and the bits of the batch's own entries."""
    params, batch = drawn(3)
    sums = lambda params, batch: fr.lookup(params.tables, batch.ids, FEATURES).values.sum()
    grads = fr.sum_examples(fr.per_example_grads(sums)(params, batch)[1])
    whole = fr.value_and_grad(sums)(params, batch)[1]
    for name, g in grads.tables.items():
        ours, theirs = g.coalesce(), whole.tables[name].coalesce()
        assert int(ours.count) == int(theirs.count)
        assert torch.equal(ours.rows[ours.valid], theirs.rows[theirs.valid])
        assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_two_lookups_of_one_buffer_keep_their_bags():
    """The same ids cut into other bags by a second lookup give the batch's gradient."""
    params, batch = drawn(4)
    read = [fr.FeatureConfig("a", table="item")]

    def loss_fn(params, batch):
        ids, first = batch.ids, lambda ids: fr.lookup(params.tables, ids, read).values.tanh().sum()
        none = fr.KeyedJaggedTensor(ids.values, ids.offsets.clamp(max=1), None, None, ids.keys)
        return first(none) + 2 * first(fr.KeyedJaggedTensor(ids.values, ids.offsets, None, None, ids.keys))

    def halves(params, batch):
        ids, ends = batch.ids, batch.ids.offsets
        ends = torch.cat([torch.stack([ends[:-1], (ends[:-1] + ends[1:]) // 2], 1).flatten(), ends[-1:]])
        cut = fr.KeyedJaggedTensor(ids.values, ends, None, None, ids.keys)
        return fr.lookup(params.tables, cut, [*read, FEATURES[2]]).values.tanh().sum()

    for fn in (loss_fn, halves):
        grads = fr.per_example_grads(fn)(params, batch)[1]
        alone = [fr.value_and_grad(fn)(params, one(batch, e))[1].tables["item"].to_dense() for e in range(6)]
        assert torch.allclose(fr.sum_examples(grads).tables["item"].to_dense(), sum(alone))
        assert torch.allclose(
            fr.example_norms(fr.Params({"item": grads.tables["item"]}, {})), torch.stack([x.norm() for x in alone])
        )


def test_examples_may_share_bags():
    """Bags stored once for several examples give the gradients of the bags written out."""
    params, batch = drawn(5)
    user = batch.ids[0:1]
    copies = fr.KeyedJaggedTensor.from_lists({k: v * 3 for k, v in user.unpad().to_lists().items()}, dtype=torch.int64)
    copies = fr.KeyedJaggedTensor(
        copies.values, copies.offsets, torch.ones(copies.capacity).double(), None, copies.keys
    )
    label = batch.label[:3]
    shared = fr.per_example_grads(plain)(params, fr.Batch(fr.dedup_bags(copies), label))
    apart = fr.per_example_grads(plain)(params, fr.Batch(copies, label))
    assert torch.equal(shared[0], apart[0])
    assert torch.equal(fr.example_norms(shared[1]), fr.example_norms(apart[1]))


def test_a_key_is_folded_with_the_examples_number():
    """An example's random numbers are those of its number, whatever the other examples are."""
    loss_fn = lambda params, x, *, key: (params.dense * fr.nn.dropout(x, key, 0.5)).sum()
    params, x = fr.Params({}, torch.ones(8)), torch.ones(3, 8)
    grads = fr.per_example_grads(loss_fn)(params, x, key=fr.key(1))[1].dense
    for e in range(3):
        assert torch.equal(grads[e], fr.value_and_grad(loss_fn)(params, x[:1], key=fr.fold_in(fr.key(1), e))[1].dense)


def test_aux_is_stacked():
    """With has_aux each example's aux has a place in front."""
    loss_fn = lambda params, x: ((params.dense * x).sum(), {"x": x, "name": "aux"})
    (losses, aux), _ = fr.per_example_grads(loss_fn, True)(fr.Params({}, torch.ones(2)), torch.ones(3, 2))
    assert losses.shape == (3,) and aux["x"].shape == (3, 1, 2)


def in_all(params, batch, max_ids=12):
    losses, grads = fr.per_example_grads(weighted, max_ids=max_ids)(params, batch)
    other = fr.value_and_grad(weighted)(params, batch)[1]
    return losses, dense_of(fr.sum_examples(grads)), fr.example_norms(grads), fr.example_dots(grads, other)


def test_a_staged_program_knows_the_room_of_an_example(interpreted):
    """Under jit max_ids is the room; an example with more ids has NaN as loss and gradient, and no other does."""
    params, batch = drawn(0, dtype=torch.float32)
    assert_trees_close(fr.jit(in_all)(params, batch), in_all(params, batch), rtol=1e-4, atol=1e-4)
    counts = batch.ids.lengths.view(3, -1).sum(0)
    most = int(counts.sort().values[2])
    losses, _, norms, _ = fr.jit(functools.partial(in_all, max_ids=most))(params, batch)
    assert torch.equal(losses.isnan(), counts > most) and torch.equal(norms.isnan(), counts > most)
    with pytest.raises(TypeError, match="`max_ids` is missing where lengths cannot be read"):
        fr.jit(fr.per_example_grads(plain))(params, batch)


def test_norms_and_losses_are_differentiable():
    """Forward and reverse derivatives of norms in the dense parameters agree with central differences, and vmap over
    parameters gives each member's."""
    params, batch = drawn(7, num_examples=3)
    norms = lambda w: fr.example_norms(
        fr.per_example_grads(plain)(fr.Params(params.tables, {**params.dense, "w": w}), batch)[1]
    )
    w, d = params.dense["w"], torch.linspace(-1, 1, 14, dtype=torch.float64)
    slope = (norms(w + 1e-6 * d) - norms(w - 1e-6 * d)) / 2e-6
    assert torch.allclose(torch.func.jvp(norms, (w,), (d,))[1], slope, rtol=1e-5, atol=1e-5)
    assert torch.allclose(torch.func.jacrev(norms)(w) @ d, slope, rtol=1e-5, atol=1e-5)
    many = torch.stack([w, w + d])
    assert torch.allclose(torch.func.vmap(norms)(many), torch.stack([norms(x) for x in many]))


def test_the_noise_scale_is_that_of_the_samples_covariance():
    """The scale is tr(cov) / ‖mean‖² with both estimated without bias."""
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    loss_fn = lambda params, x: (params.dense * x).sum()
    grads = fr.per_example_grads(loss_fn)(fr.Params({}, torch.ones(4, dtype=torch.float64)), x)[1]
    trace = x.var(0, unbiased=True).sum()
    expected = trace / (x.mean(0).square().sum() - trace / 50)
    assert torch.allclose(fr.gradient_noise_scale(grads), expected)


def test_tables_of_sixteen_bits_and_i32_ids():
    """bf16 tables and i32 ids give f32 gradients, as value_and_grad does."""
    params, batch = drawn(2, dtype=torch.float32)
    params = fr.Params({n: t.bfloat16() for n, t in params.tables.items()}, params.dense)
    ids = batch.ids
    batch = fr.Batch(
        fr.KeyedJaggedTensor(ids.values.int(), ids.offsets.int(), ids.weights, None, ids.keys), batch.label
    )
    losses, grads = fr.per_example_grads(plain)(params, batch)
    loss, whole = fr.value_and_grad(plain)(params, batch)
    assert grads.tables["item"].floats[0].dtype == whole.tables["item"].floats[0].dtype
    total = fr.sum_examples(grads, torch.full((6,), 1 / 6))
    assert_trees_close((losses.mean(), dense_of(total)), (loss, dense_of(whole)), rtol=2e-2, atol=2e-2)


IDS = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], []], "b": [[0], []], "c": [[3], [3]]})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p, f: f(p, fr.Batch(IDS, torch.zeros(3))), ValueError, "other numbers of examples"),
        (lambda p, f: f(p, {"x": 3}), TypeError, "`batch` has no examples"),
        (lambda p, f: f(p, torch.zeros(0, 2)), ValueError, "`batch` has no examples"),
        (lambda p, f: f(p, torch.tensor(1.0)), ValueError, "cannot be cut by its examples"),
    ],
)
def test_bad_batches(call, error, words):
    """A batch that has no examples, or other numbers of them, is refused before the loss is called."""
    with pytest.raises(error, match=words):
        call(fr.Params({}, torch.ones(2)), fr.per_example_grads(lambda p, b: pytest.fail("called")))


def test_losses_over_the_batch_are_refused():
    """A softmax over the batch needs the other examples."""
    loss_fn = lambda p, x: fr.losses.in_batch_softmax(x * p.dense, x, log_q=None)
    with pytest.raises(ValueError, match="are not those of the batch"):
        fr.per_example_grads(loss_fn)(fr.Params({}, torch.ones(2)), torch.ones(3, 2))
    weights = lambda p, x: fr.losses.weighted_mean(x[:, 0], p.dense[0] * x[:, 0])
    with pytest.raises(TypeError, match="weights of examples are not the batch's own"):
        fr.per_example_grads(weights)(fr.Params({}, torch.ones(2)), torch.ones(3, 2))


def test_inner_products_pair_leaves_by_name():
    """The order of a dict's keys changes nothing; other names are refused."""
    loss_fn = lambda p, x: (p.dense["w"] * x).sum(-1).mean()
    params = lambda names: fr.Params({}, {n: torch.zeros(2) for n in names})
    grads = fr.per_example_grads(loss_fn)(params("wv"), torch.tensor([[1.0, 2.0]]))[1]
    for names in ("wv", "vw"):
        other = fr.value_and_grad(loss_fn)(params(names), torch.tensor([[1.0, 2.0]]))[1]
        assert fr.example_dots(grads, other).tolist() == [5.0]
    with pytest.raises(ValueError, match="other dense leaves"):
        fr.example_dots(grads, fr.Params({}, {"no": torch.ones(2), "such": torch.ones(2)}))


def test_inner_products_with_a_gradient_of_no_ids():
    """A gradient that read no row is orthogonal to every example, also where there is no dense leaf."""
    loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("a", table="t")]).values.square().sum()
    params, ids = (
        fr.Params({"t": torch.ones(3, 2)}, {}),
        lambda bags: fr.KeyedJaggedTensor.from_lists({"a": bags}, dtype=torch.int64),
    )
    grads = fr.per_example_grads(loss_fn)(params, ids([[1], [0, 2]]))[1]
    none, some = (fr.value_and_grad(loss_fn)(params, ids(bags))[1] for bags in ([[], []], [[1]]))
    assert fr.example_dots(grads, none).tolist() == [0, 0] and fr.example_dots(grads, some).tolist() == [8, 0]


def test_norms_of_sixteen_bits_do_not_overflow():
    """Squares of f16 gradients are summed in f32."""
    loss_fn = lambda p, x: (p.dense * x).sum(-1).mean()
    grads = fr.per_example_grads(loss_fn)(fr.Params({}, torch.ones(40).half()), torch.full((1, 40), 300.0).half())[1]
    assert torch.allclose(fr.example_norms(grads), torch.tensor(300.0 * 40**0.5))


def test_stacked_ids_are_shown():
    """The ids of all examples, as aux holds them, have a text."""
    loss_fn = lambda p, ids: (p.dense.sum(), ids)
    aux = fr.per_example_grads(loss_fn, True)(fr.Params({}, torch.ones(1)), IDS)[0][1]
    assert "stacked bags" in repr(aux)


def test_gradients_that_are_not_of_examples_are_refused():
    """sum_examples, example_norms and example_dots name what is not stacked, and sizes that differ."""
    params, batch = drawn(1)
    whole = fr.value_and_grad(plain)(params, batch)[1]
    grads = fr.per_example_grads(plain)(params, batch)[1]
    for fn in (fr.sum_examples, fr.example_norms, fr.gradient_noise_scale, lambda g: fr.example_dots(g, whole)):
        with pytest.raises(TypeError, match="is not of examples"):
            fn(whole)
    with pytest.raises(ValueError, match="not one for each example"):
        fr.sum_examples(grads, torch.ones(5))
    with pytest.raises(ValueError, match="other numbers of examples in some leaves"):
        fr.sum_examples(fr.Params(grads.tables, {"w": torch.ones(5, 14)}))
    with pytest.raises(ValueError, match="`grads` is empty"):
        fr.example_norms(fr.Params({}, {}))
    with pytest.raises(ValueError, match="an example with too many ids"):
        fr.per_example_grads(plain, max_ids=1)(params, batch)
    with pytest.raises(TypeError, match="is not one gradient"):
        fr.example_dots(grads, grads)
    with pytest.raises(ValueError, match="other tables"):
        fr.example_dots(grads, fr.Params({}, whole.dense))
    with pytest.raises(ValueError, match="at least 2 examples"):
        fr.gradient_noise_scale(fr.per_example_grads(plain)(params, one(batch, 0))[1])

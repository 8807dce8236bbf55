"""private_grads and train_step(grad=): gradients clipped per example, with keyed noise."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

READ = (fr.FeatureConfig("a", table="item"), fr.FeatureConfig("b", table="user"))


def drawn(seed: int, num_examples: int = 7):
    g = torch.Generator().manual_seed(seed)
    bags = lambda n: [
        torch.randint(0, n, (int(k),), generator=g).tolist() for k in torch.randint(0, 4, (num_examples,), generator=g)
    ]
    ids = fr.KeyedJaggedTensor.from_lists({"a": bags(11), "b": bags(5)}, dtype=torch.int64)
    number = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    tables = {"item": number(11, 3), "user": number(5, 2)}
    weight = torch.rand(num_examples, generator=g, dtype=torch.float64) * 2
    return fr.Params(tables, {"w": number(5)}), fr.Batch(ids, number(num_examples), weight=weight)


def errors(params, batch):
    return ((fr.lookup(params.tables, batch.ids, READ).values * params.dense["w"]).sum(1) - batch.label).square()


def plain(params, batch):
    return errors(params, batch).mean()


def weighted(params, batch):
    return fr.losses.weighted_mean(errors(params, batch), batch.weight)


def dense_of(grads: fr.Params) -> dict:
    return {"tables": {n: g.to_dense() for n, g in grads.tables.items()}, "dense": grads.dense}


def private(loss_fn=plain, max_norm=0.7, noise_multiplier=0.0, **how):
    return fr.private_grads(loss_fn, max_norm=max_norm, noise_multiplier=noise_multiplier, **how)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), chunk=st.sampled_from([None, 1, 3, 7, 9]))
def test_without_noise_it_is_the_mean_of_clipped_gradients(seed, chunk):
    """Every example's gradient is scaled to the norm, whatever the chunks are; weights count as they are."""
    params, batch = drawn(seed)
    loss, grads = private(weighted, chunk_size=chunk, batch_size=10)(params, batch, key=fr.key(0))
    total = None
    for e in range(7):
        own = fr.Batch(batch.ids[e : e + 1], batch.label[e : e + 1])
        one = lambda p: fr.value_and_grad(plain)(p, own)[1]  # noqa: B023
        g = fr.tree.map(lambda x: x * batch.weight[e], dense_of(one(params)))  # noqa: B023
        norm = torch.cat([x.flatten() for x in fr.tree.leaves(g)]).norm()
        g = fr.tree.map(lambda x: x * min(1.0, 0.7 / max(float(norm), 0.1)) / 10, g)  # noqa: B023
        total = g if total is None else fr.tree.map(torch.add, total, g)
    assert_trees_close(dense_of(grads), total, rtol=1e-9, atol=1e-12)
    assert torch.allclose(loss, (errors(params, batch) * batch.weight).mean())


def noise_of(params, batch, key=None, **how):
    key = fr.key(5) if key is None else key
    with_noise = dense_of(private(noise_multiplier=2.0, **how)(params, batch, key=key)[1])
    without = dense_of(private(**how)(params, batch, key=key)[1])
    return fr.tree.map(lambda x, y: (x - y) * 7 / 1.4, with_noise, without)


def test_noise_follows_the_key_the_table_and_the_row():
    """The noise is that of the key, whatever the batch is; "touched" has the same numbers, at the batch's rows only."""
    params, batch = drawn(0)
    everywhere = noise_of(params, batch)
    assert_trees_close(noise_of(params, drawn(1)[1]), everywhere, atol=1e-9)
    touched = noise_of(params, batch, rows="touched")
    for name, ids in (("item", batch.ids["a"]), ("user", batch.ids["b"])):
        is_read = torch.zeros(params.tables[name].shape[0], dtype=torch.bool)
        is_read[ids.unpad().values] = True
        assert torch.allclose(touched["tables"][name], torch.where(is_read[:, None], everywhere["tables"][name], 0))
    other = noise_of(params, batch, key=fr.key(6))
    numbers = lambda tree: torch.cat([x.flatten() for x in fr.tree.leaves(tree)])
    assert not bool((numbers(other) == numbers(everywhere)).any())
    assert len(numbers(everywhere).unique()) == numbers(everywhere).numel()


def test_noise_is_normal_with_the_stated_deviation():
    """100,000 numbers of noise on a table pass a test of Kolmogorov and Smirnov for σ · C / B."""
    from scipy import stats

    params = fr.Params({"item": torch.zeros(20_000, 5)}, {})
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0], [1]]})
    loss_fn = lambda p, ids: fr.lookup(p.tables, ids, READ[:1]).values.sum()
    made = private(loss_fn, max_norm=3.0, noise_multiplier=0.5)(params, ids, key=fr.key(1))[1].tables["item"].to_dense()
    assert stats.kstest(made[2:].flatten().numpy() / (3.0 * 0.5 / 2), "norm").pvalue > 0.01


def test_another_example_changes_nothing_but_its_own_part():
    """Without the last example, weights included, the sum loses that example's clipped gradient: at most the norm."""
    params, batch = drawn(3)
    fewer = fr.Batch(batch.ids[:6], batch.label[:6], weight=batch.weight[:6])
    grads = [dense_of(private(weighted, batch_size=1)(params, b, key=fr.key(0))[1]) for b in (batch, fewer)]
    change = fr.tree.map(torch.sub, *grads)
    assert torch.cat([x.flatten() for x in fr.tree.leaves(change)]).norm() <= 0.7 + 1e-9


def test_a_step_with_private_gradients(interpreted):
    """train_step(grad=) is the gradients, then the updates; eager, staged and donated; a model's loss is taken, too."""
    params, batch = drawn(2)
    private = functools.partial(fr.private_grads, max_norm=0.7, noise_multiplier=1.0, max_ids=8)
    sgd = fr.optim.dense(torch.optim.SGD, lr=0.1)
    step = fr.train_step(plain, sparse=fr.optim.sgd(lr=0.1), dense=sgd, grad=private)
    state = step.init(params)
    key = fr.fold_in(state.key, state.step)
    grads = dense_of(private(plain)(params, batch, key=key)[1])
    new, metrics = step(state, batch)
    expected = fr.tree.map(lambda x, g: x - 0.1 * g, {"tables": params.tables, "dense": params.dense}, grads)
    assert_trees_close({"tables": new.tables, "dense": new.dense}, expected, atol=1e-9)
    staged, _ = fr.jit(step, donate=("state",))(fr.copy(state), batch)
    assert_trees_close((staged.tables, staged.dense), (new.tables, new.dense), atol=1e-9)
    tables = [fr.TableConfig("item", 11, 4)]
    model = fr.models.fm(tables, READ[:1])
    step = fr.train_step(model, grad=functools.partial(fr.private_grads, max_norm=1.0, noise_multiplier=1.0))
    labelled = fr.Batch(batch.ids, (batch.label > 0).float())
    state, metrics = step(step.init(model.init(fr.key(0))), labelled)
    assert bool(metrics["loss"].isfinite()) and int(state.step) == 1


def test_any_transform_of_a_loss_can_be_the_gradient():
    """A user's own transform, here a gradient at moved parameters, takes the place of value_and_grad."""

    def ascent(loss_fn):
        def run(params, batch):
            _, g = fr.value_and_grad(loss_fn)(params, batch)
            there = fr.Params(params.tables, fr.tree.map(lambda x, d: x + 0.05 * d, params.dense, g.dense))
            return fr.value_and_grad(loss_fn)(there, batch)

        return run

    params, batch = drawn(4)
    step = fr.train_step(plain, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), grad=ascent)
    new, _ = step(step.init(params), batch)
    assert torch.allclose(new.dense["w"], params.dense["w"] - 0.1 * ascent(plain)(params, batch)[1].dense["w"])


def test_an_example_that_is_not_finite_adds_nothing(interpreted):
    """A NaN or infinite gradient, or ids beyond `max_ids` in a program, leave the sum of the others, finite."""
    params, batch = drawn(5)
    loss_fn = lambda p, b: (errors(p, b) * b.weight).mean()
    with_weights = lambda x: fr.Batch(
        batch.ids, batch.label, weight=batch.weight.index_fill(0, torch.tensor([2, 4]), x)
    )
    call = lambda b: dense_of(private(loss_fn, batch_size=7)(params, b, key=fr.key(0))[1])
    for x in (torch.nan, torch.inf):
        assert_trees_close(call(with_weights(x)), call(with_weights(0.0)), rtol=1e-9, atol=1e-12)
    short = functools.partial(fr.private_grads, max_norm=0.7, noise_multiplier=1.0, max_ids=3)
    step = fr.train_step(plain, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), grad=short)
    state, _ = fr.jit(step, donate=("state",))(step.init(params), batch)
    assert all(bool(x.isfinite().all()) for x in fr.tree.leaves((state.tables, state.dense)))


def test_a_batch_without_examples_gets_noise_alone():
    """The noise is that of any other batch with this key."""
    params, batch = drawn(0)
    none = fr.Batch(batch.ids[0:0], batch.label[:0])
    loss, grads = private(noise_multiplier=2.0, batch_size=7)(params, none, key=fr.key(5))
    assert bool(loss.isnan())
    noise = fr.tree.map(lambda x: x * 7 / 1.4, dense_of(grads))
    assert_trees_close(noise, noise_of(params, batch), atol=1e-9)


def test_tables_have_noise_of_their_own():
    """Two names whose numbers of 31 bits are equal have other noise."""
    a, b = "ad_cat_1401", "ctx_hist_966"
    read = [fr.FeatureConfig("x", table=a), fr.FeatureConfig("y", table=b, column="x")]
    loss_fn = lambda p, ids: fr.lookup(p.tables, ids, read).values.sum() * 0
    params = fr.Params({n: torch.zeros(3, 2) for n in (a, b)}, {})
    ids = fr.KeyedJaggedTensor.from_lists({"x": [[0], [1]]})
    made = private(loss_fn, noise_multiplier=1.0)(params, ids, key=fr.key(0))[1].tables
    assert not bool((made[a].to_dense() == made[b].to_dense()).any())


def test_an_argument_of_one_number_beside_one_example():
    """A batch of one example, with a leaf that is not a tensor, takes an argument of one element."""
    params, batch = drawn(0, 1)
    scaled = lambda p, b, y: plain(p, b[0]) * y.sum()
    loss, grads = private(scaled)(params, (batch, "a name"), torch.tensor([2.0]), key=fr.key(0))
    need, own = private(lambda p, b: 2 * plain(p, b))(params, batch, key=fr.key(0))
    assert_trees_close((loss, dense_of(grads)), (need, dense_of(own)))


def test_bad_input():
    """What cannot be private is refused before any work."""
    params, batch = drawn(0)
    quantised = fr.Params(fr.fake_quantize(params.tables), params.dense)
    with pytest.raises(TypeError, match="cannot get private gradients"):
        private()(quantised, batch, key=fr.key(0))
    with pytest.raises(TypeError, match="`key` is missing"):
        private()(params, batch)
    with pytest.raises(TypeError, match="too coarse for noise"):
        private()(fr.Params(params.tables, {"w": params.dense["w"].bfloat16()}), batch, key=fr.key(0))
    with pytest.raises(TypeError, match="argument 3 has a value for each example"):
        private(lambda p, b, y: plain(p, b))(params, batch, batch.label, key=fr.key(0))
    with pytest.raises(TypeError, match="`y` has a value for each example"):
        private(lambda p, b, y: plain(p, b))(params, batch, y=batch.label, key=fr.key(0))
    inside = lambda x: private()(params, batch, key=fr.key(0))[0] + x.sum()
    with pytest.raises(TypeError, match="on ranks"):
        fr.shard_map(inside, mesh=fr.Mesh.emulated(a=2), in_specs=fr.P("a"), out_specs=fr.P())(torch.ones(2))
    without = lambda f: lambda p, b: (f(p, b), fr.Params({}, p.dense))
    for wrong, words in ((without, "gradients of other tables"), (lambda f: f, "gave no gradients")):
        step = fr.train_step(plain, grad=wrong)
        with pytest.raises((TypeError, ValueError), match=words):
            step(step.init(params), batch)
    with pytest.raises(TypeError, match="could show an example"):
        private(lambda p, b: (plain(p, b), b.label), has_aux=True)(params, batch, key=fr.key(0))
    with pytest.raises(TypeError, match="`key` is not a key"):
        private()(params, batch, key=torch.tensor(0.0))
    for bad in ({"max_norm": 0.0}, {"noise_multiplier": -1.0}, {"rows": "some"}, {"chunk_size": 0}):
        with pytest.raises((ValueError, TypeError)):
            fr.private_grads(plain, **{"max_norm": 1.0, "noise_multiplier": 1.0, **bad})
    grad = functools.partial(fr.private_grads, max_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="differentiates the whole batch"):
        fr.train_step(plain, grad=grad, micro_batches=2)

"""fake_quantize: lookups with the bits of quantised tables, and gradients of float tables.

Models trained with fake_quantize lose less when they are quantised."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

CODES = ("int8", "int4", "int2")
DTYPES = (*CODES, "float16", "bfloat16", "float32")
FEATURES = (
    fr.FeatureConfig("sum", table="a", column="x", weighted=True),
    fr.FeatureConfig("mean", table="b", column="y", pooling="mean", hash=fr.modulo()),
    fr.FeatureConfig("short", table="a", column="y", hash=fr.multiply_shift(3), max_length=2),
)
SEQUENCES = (fr.FeatureConfig("seq", table="b", column="x", pooling="none", weighted=True, max_length=2),)
IDS = fr.KeyedJaggedTensor.from_lists(
    {"x": [[1, 1, 6], [], [0, -1]], "y": [[9], [2, 3, 4], [4]]},
    weights={"x": [[0.5, 2.0, 1.0], [], [3.0, 1.0]], "y": [[1.0], [1.0] * 3, [1.0]]},
)
DRAWS = torch.Generator().manual_seed(0)
TABLES = {"a": torch.randn(7, 5, generator=DRAWS), "b": torch.randn(7, 4, generator=DRAWS)}
WIDTH = 14
DENSE = torch.linspace(-1, 1, WIDTH)


def loss_fn(params, ids):
    """Return a loss that reads bags and sequences of tables of any kind."""
    acts = fr.lookup(params.tables, ids, FEATURES).values
    rows = fr.lookup_sequence(params.tables, ids, SEQUENCES)["seq"].to_padded(2).sum(1)
    return ((acts * params.dense).cos().sum(1) * rows.sin().sum(1)).mean()


read = lambda tables, ids, features: (fr.lookup(tables, ids, features), fr.lookup_sequence(tables, ids, features))
both = (*FEATURES, *SEQUENCES)


@given(frs.lookups(poolings=("none", "sum", "mean")), st.sampled_from(DTYPES), st.booleans())
def test_lookups_have_the_bits_of_quantised_tables(it, dtype, at_random):
    """Lookups of fake_quantize(tables, dtype, key) equal those of quantize(tables, dtype, key) bit for bit. f64 tables,
    which are summed in f64, agree within the rounding of f32."""
    key = fr.key(7) if at_random else None
    fake, q = fr.fake_quantize(it.tables, dtype, key=key), fr.quantize(it.tables, dtype, key=key)
    is_wide = any(t.dtype == torch.float64 for t in it.tables.values())
    near = {"rtol": 2**-20, "atol": 2**-20} if is_wide else {}
    pooled, sequences = ([f for f in it.features if (f.pooling == "none") is s] for s in (False, True))
    if pooled:
        got, want = fr.lookup(fake, it.ids, pooled), fr.lookup(q, it.ids, pooled)
        assert_trees_close(got.values.to(torch.float32) if is_wide else got.values, want.values, **near)
    if sequences:
        got, want = fr.lookup_sequence(fake, it.ids, sequences), fr.lookup_sequence(q, it.ids, sequences)
        for f in sequences:
            assert_trees_close(got[f.name].values.to(torch.float32), want[f.name].values, **near)


@pytest.mark.parametrize("dtype", CODES)
def test_learned_scales_are_those_of_the_codes(dtype):
    """Lookups with learned scales read the values that `quantize` stores, bit for bit. Another dtype raises."""
    fake = fr.fake_quantize(TABLES, dtype, scales="learned")
    moved = fr.tree.map(lambda x: x * 1.37 - 0.01, fake)
    for tables in (fake, moved):
        assert_trees_close(read(tables, IDS, both), read(fr.quantize(tables), IDS, both))
    with pytest.raises(ValueError, match=r"`dtype` is that of tables with one"):
        fr.quantize(fake, "int8")


def test_a_key_draws_the_same_for_ids_of_any_width():
    """With a key, i32 ids read the values that i64 ids read. These values are those of `quantize`."""
    fake, q = (make(TABLES, "int4", key=fr.key(7)) for make in (fr.fake_quantize, fr.quantize))
    assert_trees_close(read(fake, replace(IDS, values=IDS.values.int()), both), read(q, IDS, both))


@pytest.mark.parametrize("dtype", CODES)
def test_learned_scales_hide_nothing(dtype):
    """A row that holds NaN or inf, or whose scale is NaN or inf, is NaN in lookups and in codes. If f16 cannot hold the
    bias of a scale, the scale is the largest one whose bias f16 can hold."""
    t = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [1.0, torch.inf], [3.0, 4.0], [3.0, 4.0], [4e4, -2e4]])
    fake = fr.fake_quantize({"a": t}, dtype, scales="learned")
    scales = torch.tensor([[0.5], [0.5], [0.5], [torch.nan], [torch.inf], [1e9]])
    fake = replace(fake, scales={"a.scale": scales})
    ids = fr.KeyedJaggedTensor.from_lists({"x": [[i] for i in range(6)]})
    rows = fr.lookup(fake, ids, [fr.FeatureConfig("x", table="a")]).values
    assert torch.equal(rows.isnan().all(1), torch.tensor([False, True, True, True, True, False]))
    assert torch.equal(rows.isnan().any(1), rows.isnan().all(1))
    assert_trees_close(fr.dequantize(fr.quantize(fake))["a"], rows)
    step = 65504 / 2.0 ** (int(dtype[3:]) - 1)
    assert torch.equal(rows[5], (t[5] / step).round() * step)


@given(st.sampled_from(CODES), st.booleans())
def test_gradients_go_straight_through(dtype, at_random):
    """The rows of value_and_grad equal the gradients at float tables with the rounded values. fake_quantize may be
    called in the loss or on the tables of the params. torch.func.grad gives the same gradients densely."""
    key = fr.key(3) if at_random else None
    inside = lambda params, ids: loss_fn(fr.Params(fr.fake_quantize(params.tables, dtype, key=key), params.dense), ids)
    whole = fr.dequantize(fr.quantize(TABLES, dtype, key=key))
    want = fr.value_and_grad(loss_fn)(fr.Params(whole, DENSE), IDS)
    own = fr.value_and_grad(loss_fn)(fr.Params(fr.fake_quantize(TABLES, dtype, key=key), DENSE), IDS)
    got = fr.value_and_grad(inside)(fr.Params(TABLES, DENSE), IDS)
    dense = lambda out: (out[0], {n: g.to_dense() for n, g in out[1].tables.items()}, out[1].dense)
    near = {"rtol": 1e-6, "atol": 1e-6}
    assert_trees_close(dense(got), dense(want))
    assert_trees_close(dense(own), dense(want))
    by_func = torch.func.grad(lambda t, w: inside(fr.Params(t, w), IDS), argnums=(0, 1))(TABLES, DENSE)
    assert_trees_close(by_func, dense(want)[1:], **near)


def test_all_derivatives_take_the_rounding_for_the_identity():
    """Second derivatives, forward and reverse, and those of members under vmap, equal those of the loss at the rounded
    values."""
    inside = lambda t: loss_fn(fr.Params(fr.fake_quantize(t, "int4"), DENSE), IDS)
    plain = lambda t: loss_fn(fr.Params(t, DENSE), IDS)
    whole = fr.dequantize(fr.quantize(TABLES, "int4"))
    near = {"rtol": 1e-5, "atol": 1e-6}
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert_trees_close(transform(inside)(TABLES), transform(plain)(whole), **near)
    v = {n: t.cos() for n, t in TABLES.items()}
    twice = lambda f: lambda t: torch.func.jvp(lambda t: torch.func.jvp(f, (t,), (v,))[1], (t,), (v,))[1]
    assert_trees_close(twice(inside)(TABLES), twice(plain)(whole), **near)
    stack = lambda x: fr.tree.map(lambda t: torch.stack([t, 2 * t.sin()]), x)
    members = torch.func.vmap(torch.func.grad(inside))(stack(TABLES))
    for i, t in enumerate((TABLES, fr.tree.map(lambda t: 2 * t.sin(), TABLES))):
        assert_trees_close(fr.tree.map(lambda x: x[i], members), torch.func.grad(inside)(t), **near)  # noqa: B023


@pytest.mark.parametrize("dtype", CODES)
def test_scales_get_lsqs_gradient(dtype):
    """Gradients of learned scales and of their tables follow the formula of the paper, written with stop-gradients on
    dense tables (arXiv:1902.08153, appendix A). Other derivatives of scales and tables raise."""
    most = 2 ** (int(dtype[3:]) - 1) - 1
    fake = fr.fake_quantize(TABLES, dtype, scales="learned")
    # some values are then clipped
    fake = fr.tree.map(lambda x: x * 0.7, fake)
    stop = lambda new, x: x + (new - x).detach()

    def paper(x, s):
        factor = 1 / (most * x.shape[1]) ** 0.5
        s = stop(s.half().float(), s)
        s = stop(s, s * factor)
        place = x / s
        inside = (place > -most - 1) & (place < most)
        place = torch.where(inside, place, place.detach().clamp(-most - 1, most))
        return stop(place.round(), place) * s

    def by_autograd(parts, dense):
        return loss_fn(fr.Params({n: paper(parts[n], parts[f"{n}.scale"]) for n in TABLES}, dense), IDS)

    got, grads = fr.value_and_grad(loss_fn)(fr.Params(fake, DENSE), IDS)
    want, value = torch.func.grad_and_value(by_autograd, argnums=(0, 1))(dict(fake), DENSE)
    assert_trees_close(got, value, rtol=1e-5, atol=1e-6)
    dense = {n: g.to_dense() for n, g in grads.tables.items()}
    assert_trees_close((dense, grads.dense), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"gradients by rows only(.|\n)*value_and_grad"):
        torch.func.grad(lambda t: loss_fn(fr.Params(t, DENSE), IDS))(fake)


@pytest.mark.parametrize("scales", ["row", "learned"])
def test_a_step_trains_them(scales, interpreted):
    """A step moves each part along its gradient, even jitted and donated. vmap trains several values."""
    step = fr.train_step(loss_fn, sparse=fr.optim.sgd(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    fresh = lambda: step.init(fr.Params(fr.fake_quantize(fr.copy(TABLES), "int4", scales=scales), DENSE.clone()))
    loss, grads = fr.value_and_grad(loss_fn)(fr.Params(fresh().tables, DENSE), IDS)
    want = {n: t - 0.1 * grads.tables[n].to_dense() for n, t in fresh().tables.items()}
    for run in (step, *([fr.jit(step, donate=("state",))] if scales == "learned" else [])):
        state, metrics = run(fresh(), IDS)
        assert type(state.tables) is fr.FakeQuantizedTables
        assert_trees_close((dict(state.tables.items()), metrics["loss"]), (want, loss), rtol=1e-5, atol=1e-6)
    states = fr.tree.map(lambda x: torch.stack([x, x]), fresh())
    stacked, _ = torch.func.vmap(step, in_dims=(0, None))(states, IDS)
    for i in range(2):
        assert_trees_close({n: t[i] for n, t in stacked.tables.items()}, want, rtol=1e-5, atol=1e-6)


def test_learned_scales_that_a_transform_only_holds():
    """Learned scales made inside a jvp or grad over other values are read as outside of that transform. A tangent of
    the scales raises."""
    make = lambda: fr.fake_quantize(fr.tree.map(lambda x: x * 1, TABLES), "int4", scales="learned")
    fake = make()
    by_rows = lambda tables, w: fr.value_and_grad(loss_fn)(fr.Params(tables, w), IDS)[1].dense
    plainly = lambda tables, w: loss_fn(fr.Params(tables, w), IDS)
    for f in (by_rows, plainly):
        want = torch.func.jvp(lambda w: f(fake, w), (DENSE,), (DENSE,))  # noqa: B023
        assert_trees_close(torch.func.jvp(lambda w: f(make(), w), (DENSE,), (DENSE,)), want)  # noqa: B023
    want = torch.func.grad(lambda w: plainly(fake, w))(DENSE)
    assert_trees_close(torch.func.grad(lambda w: plainly(make(), w))(DENSE), want)
    for f in (by_rows, plainly):
        with pytest.raises(TypeError, match=r"gradients by rows only(.|\n)*value_and_grad"):
            torch.func.jvp(lambda t: f(t, DENSE), (fake,), (fake,))  # noqa: B023


def test_what_cannot_be_trained_so_is_refused(tmp_path):
    """Scales that would not be parameters, a key with learned scales, and codes each raise. A saved value loads
    unchanged."""
    fake = fr.fake_quantize(TABLES, "int4", scales="learned")
    fr.save(tmp_path / "fake", fake)
    assert_trees_close(fr.load(tmp_path / "fake"), fake)
    assert repr(fake).startswith("FakeQuantizedTables({a: int4 of f32[7, 5], b: int4 of f32[7, 4], a.scale: f32[7, 1]")
    inside = lambda p, ids: fr.lookup(fr.fake_quantize(p.tables, scales="learned"), ids, FEATURES).values.sum()
    with pytest.raises(TypeError, match=r"the scales of `tables\['a'\]` would not be parameters"):
        fr.value_and_grad(inside)(fr.Params(TABLES, {}), IDS)
    with pytest.raises(ValueError, match=r"`key` requires scales of rows"):
        fr.fake_quantize(TABLES, scales="learned", key=fr.key(0))
    for tables in (fake, fr.quantize(TABLES)):
        with pytest.raises(TypeError, match=r"`tables` are not plain tables"):
            fr.fake_quantize(tables)


def test_parts_that_do_not_match_are_refused():
    """Scales for another number of rows or columns raise with their name. So do dtypes that are unknown, in another
    order or for other tables. This holds for the constructor and for changed leaves of a tree."""
    fake = fr.fake_quantize(TABLES, "int4", scales="learned")
    scale, ones = "a.scale", torch.ones(7, 1)
    bad = {
        r"`scales\['a.scale'\]` do not match the table.(.|\n)*f32\[1, 1\](.|\n)*f\[7, 1\]": {scale: ones[:1]},
        r"`scales\['a.scale'\]` do not match the table.(.|\n)*f32\[7, 4\]": {scale: torch.ones(7, 4)},
        r"`scales\['a.scale'\]` do not match the table.(.|\n)*f32\[7\]": {scale: torch.ones(7)},
        r"`scales\['c.scale'\]` belongs to no table of codes": {"c.scale": ones},
    }
    for text, scales in bad.items():
        with pytest.raises(ValueError, match=text):
            replace(fake, scales=scales)
    with pytest.raises(TypeError, match=r"`scales\['a.scale'\]` do not match"):
        replace(fake, scales={scale: ones.int()})
    for dtypes in ((("b", "int4"), ("a", "int4")), (("a", "int4"),), (("a", "int9"), ("b", "int4")), None):
        with pytest.raises(ValueError, match=r"`dtypes` do not match the tables(.|\n)*\['a', 'b'\], in order"):
            replace(fake, dtypes=dtypes)
    with pytest.raises(TypeError, match=r"`tables` is not a dict"):
        replace(fake, tables=[torch.ones(2, 2)])
    cut = fr.tree.map(lambda x: x[:3] if x.shape[1] == 1 else x, fake)
    for call in (lambda: fr.quantize(cut), lambda: read(cut, IDS, both)):
        with pytest.raises(ValueError, match=r"`scales\['a.scale'\]` do not match the table"):
            call()


def test_training_for_few_bits_loses_less_by_them():
    """After quantisation to 4 bits, training with fake_quantize has at most 0.8 of the squared error of training in
    floats. Both trainings take the same steps from the same rows."""
    rows, dim, num = 60, 16, 1500
    draw = torch.Generator().manual_seed(1)
    configs = [fr.TableConfig(n, rows, dim, initializer=fr.normal(0.3)) for n in ("user", "item")]
    features = [fr.FeatureConfig(n, table=n, max_length=1) for n in ("user", "item")]
    truth = {n: torch.randn(rows, 4, generator=draw) * 0.6 for n in ("user", "item")}
    pairs = {n: torch.randint(rows, (num,), generator=draw) for n in ("user", "item")}
    rating = (truth["user"][pairs["user"]] * truth["item"][pairs["item"]]).sum(1)
    ones = torch.ones(2 * num, dtype=torch.int64)
    ids = fr.KeyedJaggedTensor.from_lengths(list(pairs), torch.cat(list(pairs.values())), ones)

    def mean_square(tables):
        acts = fr.lookup(tables, ids, features)
        return ((acts["user"] * acts["item"]).sum(1) - rating).square().mean()

    def trained(tables, lr, steps):
        dense = fr.optim.dense(torch.optim.SGD, lr=0.1)
        step = fr.train_step(lambda p, ids: mean_square(p.tables), sparse=fr.optim.adam(lr), dense=dense)
        state = step.init(fr.Params(tables, {}))
        for _ in range(steps):
            state, _ = step(state, ids)
        return state.tables

    first = trained(fr.init(fr.key(0), configs), 0.05, 100)
    slower = lambda step: 0.003 * 0.5 ** (step / 15)
    floats, aware = (trained(t, slower, 100) for t in (first, fr.fake_quantize(first, "int4")))
    # the float model fits the data
    assert float(mean_square(floats)) < 1e-3 * float(rating.square().mean())
    without, trained_so = float(mean_square(fr.quantize(floats, "int4"))), float(mean_square(fr.quantize(aware)))
    assert trained_so < 0.8 * without, (trained_so, without)

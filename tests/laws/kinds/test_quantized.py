"""Quantised tables: each number is within its bound, and lookups equal those of the values of the codes."""

import copy
import itertools
import pickle

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close, garbage_padding
from funcrec.testing import strategies as frs

CODES = {"int8": 255, "int4": 15, "int2": 3}
DTYPES = (*CODES, "float16", "bfloat16", "float32")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FEATURES = (
    fr.FeatureConfig("sum", table="a", column="x", weighted=True),
    fr.FeatureConfig("mean", table="b", column="y", pooling="mean", hash=fr.modulo()),
    fr.FeatureConfig("short", table="a", column="y", hash=fr.multiply_shift(3), max_length=2),
    fr.FeatureConfig("wide", table="c", column="x", pooling="mean", weighted=True),
)
SEQUENCES = (
    fr.FeatureConfig("seq", table="a", column="x", pooling="none", weighted=True, max_length=2),
    fr.FeatureConfig("seqs", table="b", column="y", pooling="none"),
)
IDS = fr.KeyedJaggedTensor.from_lists(
    {"x": [[1, 1, 6], [], [0, -1], [99]], "y": [[9], [2, 3, 4], [4], []]},
    weights={"x": [[0.5, 2.0, 1.0], [], [3.0, 1.0], [1.0]], "y": [[1.0], [1.0] * 3, [1.0], []]},
)  # fmt: skip


def tables_of(seed, dtype=torch.float32, dims=(5, 8, 1), scale=1.0):
    draws = torch.Generator().manual_seed(seed)
    rows = lambda n, d: (torch.randn(n, d, generator=draws, dtype=torch.float64) * scale).to(dtype)
    return {n: rows(7, d) for n, d in zip("abc", dims, strict=True)}


TABLES = tables_of(0)
mixed = lambda tables: fr.quantize(tables, {"a": "int4", "b": "int8", "c": "float16"})


def bound(x, dtype, at_random=False):
    """Return the bound for the error of each number, f64[R, D], from the docstring of `quantize`."""
    x = x.double()
    if dtype not in CODES:
        unit, least = {"float16": (2**-11, 2**-25), "bfloat16": (2**-8, 2**-133), "float32": (2**-24, 2**-149)}[dtype]
        return x.abs() * unit + least
    low, reach = x.amin(1, True), x.amax(1, True) - x.amin(1, True)
    scale = (reach + low.abs() / 2048) / CODES[dtype] * 1.001 + 2**-24
    return scale * (1 if at_random else 0.5) + (low.abs() + reach) / 2048 + 2**-17


@given(
    st.sampled_from(DTYPES), st.sampled_from(FLOATS), st.integers(0, 999), st.sampled_from((1, 2, 3, 4, 7, 64)),
    st.floats(-5, 3), st.floats(-4, 3), st.booleans(),
)  # fmt: skip
def test_every_number_is_within_its_bound(dtype, of, seed, dim, size, shift, at_random):
    """|x - x̂| is within the stated bound of `quantize` for any float dtype, dim, size and position, with and without a
    key."""
    tables = tables_of(seed, torch.float64, (dim, 1, 1), 10**size)
    tables["a"] = (tables["a"] + (10**shift if shift > -3 else 0)).to(of)
    q = fr.quantize({"a": tables["a"]}, dtype, key=fr.key(seed) if at_random else None)
    x, got = tables["a"].double(), fr.dequantize(q)["a"].double()
    assert got.shape == x.shape and bool(((got - x).abs() <= bound(tables["a"], dtype, at_random)).all())


@given(frs.lookups(poolings=("none", "sum", "mean")), st.sampled_from(DTYPES))
def test_lookups_are_those_of_the_dequantised_tables(it, dtype):
    """lookup and lookup_sequence of q equal those of dequantize(q) bit for bit. Garbage in the padding is not read."""
    q = fr.quantize(it.tables, dtype)
    whole, ids = fr.dequantize(q), garbage_padding(it.ids, fr.key(0))
    pooled = [f for f in it.features if f.pooling != "none"]
    if pooled:
        assert_trees_close(fr.lookup(q, ids, pooled), fr.lookup(whole, it.ids, pooled))
    if len(pooled) < len(it.features):
        assert_trees_close(fr.lookup_sequence(q, ids, it.features), fr.lookup_sequence(whole, it.ids, it.features))


def test_rounding_at_random_is_right_on_the_mean():
    """The mean over many keys is x. One key gives one result. Another key gives another result."""
    tables = {"a": torch.linspace(-1, 1, 13)[None].repeat(400, 1)}
    draw = lambda seed: fr.dequantize(fr.quantize(tables, "int2", key=fr.key(seed)))["a"]
    assert_trees_close(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1)) and not torch.equal(draw(0)[0], draw(0)[1])
    step = 2 / 3
    error = torch.stack([draw(s) for s in range(10)]).mean((0, 1)) - tables["a"][0]
    # the mean of 4000 draws, each within one step
    assert error.abs().max() < 4 * step / 2 / 4000**0.5


def test_what_is_not_finite_is_seen():
    """A row with NaN or inf, or whose bias or scale f16 cannot hold, is NaN, even with a key. The neighbours of the row
    are not NaN."""
    lost = [[torch.nan, 1.0], [torch.inf, 1.0], [3e7, 0.0], [-1e5, 0.0], [93620.9765625] * 2, [7e4, 8e4]]
    table = torch.tensor([[1.0, 2.0], *lost, [3.0, 4.0]])
    for dtype, key in itertools.product(CODES, (None, fr.key(0))):
        got = fr.dequantize(fr.quantize({"a": table}, dtype, key=key))["a"]
        assert got.isnan().all(1).tolist() == [False, *[True] * len(lost), False]
        made = [ops.quantize_rows(table, int(dtype[3:]), key, implementation=i) for i in ("reference", None)]
        assert torch.equal(*made)


def test_quantised_tables_are_a_value():
    """Quantised tables survive save and load, pickle, copy and tree operations. `to` casts floats and leaves codes."""
    q = mixed(TABLES)
    leaves, form = fr.tree.flatten(q)
    for other in (
        pickle.loads(pickle.dumps(q)), copy.deepcopy(q), fr.copy(q), fr.tree.unflatten(form, leaves), q.to("cpu"),
        fr.tree.map(lambda x: x, q), fr.QuantizedTables(dict(q), q.forms),
    ):  # fmt: skip
        assert_trees_close(other, q)
        assert other.forms == q.forms and type(other) is fr.QuantizedTables
    halved = q.to(torch.bfloat16)
    assert_trees_close({n: halved[n] for n in "ab"}, {n: q[n] for n in "ab"})
    assert halved["c"].dtype == torch.bfloat16 and halved.forms == q.forms
    assert_trees_close(fr.lookup(q.to(torch.float32), IDS, FEATURES), fr.lookup(q, IDS, FEATURES))
    with pytest.raises(TypeError, match=r"tables \['c'\] cannot be stored so"):
        q.to(torch.float64)
    assert list(q) == ["a", "b", "c"] and len(q) == 3 and "a" in q
    assert repr(q) == "QuantizedTables({a: int4[7, 5], b: int8[7, 8], c: f16[7, 1]})"


def test_quantised_tables_are_saved(tmp_path):
    """`save` and `load` of quantised tables keep every bit, codes and forms."""
    params = fr.Params(mixed(TABLES), {"w": torch.ones(3)})
    fr.save(tmp_path / "q", params)
    assert_trees_close(fr.load(tmp_path / "q"), params)
    assert fr.load(tmp_path / "q").tables.forms == params.tables.forms


def test_lookups_of_codes_are_transformed():
    """Under jit, vmap over ids and vmap over stacked tables, lookups equal the plain lookups. quantize can also be
    jitted."""
    q, others = mixed(TABLES), mixed(tables_of(1))
    f = lambda t, ids: (fr.lookup(t, ids, FEATURES).values, fr.lookup_sequence(t, ids, SEQUENCES))
    shifted = fr.KeyedJaggedTensor(IDS.values - 1, IDS.offsets, IDS.weights, None, IDS.keys)
    stack = lambda a, b: fr.tree.map(lambda a, b: torch.stack([a, b]), a, b)
    assert_trees_close(torch.func.vmap(f, in_dims=(None, 0))(q, stack(IDS, shifted)), stack(f(q, IDS), f(q, shifted)))
    assert_trees_close(torch.func.vmap(f, in_dims=(0, None))(stack(q, others), IDS), stack(f(q, IDS), f(others, IDS)))
    whole = lambda t, q: (f(q, IDS), fr.quantize(t, "int4", key=fr.key(3)))
    assert_trees_close(fr.jit(whole)(TABLES, q), whole(TABLES, q))


def test_dense_parts_train_beside_codes():
    """A loss that reads quantised tables outside its params has the dense gradients of the values of the codes. Weights
    of ids are differentiable. As tables of the params, quantised tables raise before the loss runs."""
    q = mixed(TABLES)
    dense = torch.linspace(-1, 1, 19)
    loss = lambda p, t, ids: (fr.lookup(t, ids, FEATURES).values @ p.dense).sin().sum()
    whole = fr.dequantize(q)
    got, want = (fr.value_and_grad(loss)(fr.Params({}, dense), t, IDS) for t in (q, whole))
    assert_trees_close((got[0], got[1].dense), (want[0], want[1].dense), rtol=1e-5, atol=1e-6)
    of_weights = lambda t: torch.func.hessian(
        lambda w: loss(fr.Params({}, dense), t, fr.KeyedJaggedTensor(IDS.values, IDS.offsets, w, None, IDS.keys))
    )(IDS.weights)  # fmt: skip
    assert_trees_close(of_weights(q), of_weights(whole), rtol=1e-5, atol=1e-5)
    never = lambda *args: pytest.fail("the loss was run")
    for tables in (q, fr.quantize(TABLES, "float16")):
        with pytest.raises(TypeError, match=r"`params.tables` are read, and not trained(.|\n)*fr.fake_quantize"):
            fr.value_and_grad(never)(fr.Params(tables, dense), IDS)
    with pytest.raises(TypeError, match=r"codes have no derivative(.|\n)*fr.fake_quantize"):
        torch.func.grad(lambda t: fr.lookup(fr.quantize(t), IDS, FEATURES).values.sum())(TABLES)


def test_ids_of_quantised_tables_are_checked():
    """`validate` and `checked` name ids outside a quantised table, and features without a table, as for float
    tables."""
    q = mixed(TABLES)
    for call in (fr.checked(fr.lookup), lambda t, ids, f: fr.validate(ids, f, t)):
        with pytest.raises(fr.CheckError, match=r"id 99 in bag 3(.|\n)*0 <= id < 7"):
            call(q, IDS, FEATURES[:1])
    with pytest.raises(KeyError, match=r"`features\['x'\].table` is not a table"):
        fr.lookup(q, IDS, [fr.FeatureConfig("x", table="d")])
    back = fr.lookup_transpose(fr.lookup(q, IDS, FEATURES), IDS, FEATURES, q)
    assert {n: g.to_dense().shape for n, g in back.items()} == {n: t.shape for n, t in TABLES.items()}

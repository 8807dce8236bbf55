"""RowGrads: entries that represent a dense gradient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.testing import assert_trees_close, garbage_padding, zero_padding
from funcrec.testing import strategies as frs

GRADS = frs.row_grads(coalesced=None)


def dense_of(g):
    """Return the dense gradient in numpy, computed by a loop in f64."""
    out = np.zeros((g.num_embeddings, g.grads.shape[1]))
    for row, grad in list(zip(g.rows.tolist(), g.grads.double().numpy(), strict=True))[: int(g.count)]:
        if 0 <= row < g.num_embeddings:
            out[row] += grad
    return out


def same(x, y):
    return np.testing.assert_allclose(x.double().numpy(), y, rtol=1e-6, atol=1e-6)


# name: (the operation, the same operation on the dense gradient)
OPS = {
    "coalesce": (lambda g: g.coalesce(), lambda x: x),
    "scale": (lambda g: g.scale(-0.5), lambda x: -0.5 * x),
    "scale by a tensor": (lambda g: g.scale(torch.tensor(2.0)), lambda x: 2 * x),
    "clip": (lambda g: g.clip(1.5), lambda x: x.clip(-1.5, 1.5)),
    "plus itself": (lambda g: g + g, lambda x: x + x),
    "plus itself, coalesced": (lambda g: g.coalesce() + g, lambda x: x + x),
    "clip_by_global_norm": (
        lambda g: fr.clip_by_global_norm({"t": g}, 0.5)["t"],
        lambda x: x * min(1.0, 0.5 / (np.linalg.norm(x) + 1e-6)),
    ),
}


@given(GRADS)
def test_to_dense_sums_the_entries(g):
    """to_dense()[r] is the sum of row r's valid entries, in f32 and f64, for i32 and i64 rows."""
    dense = g.to_dense()
    assert dense.dtype == g.grads.dtype and dense.shape == (g.num_embeddings, g.grads.shape[1])
    same(dense, dense_of(g))


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_an_operation_is_that_of_dense_gradients(name, data):
    """op(g).to_dense() == op(g.to_dense())."""
    op, on_dense = OPS[name]
    g = data.draw(GRADS)
    out = op(g)
    same(out.to_dense(), on_dense(dense_of(g)))
    assert out.grads.dtype == g.grads.dtype and out.rows.dtype in (g.rows.dtype, torch.int64)


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_padding_is_never_read(name, data):
    """op(g with garbage in its padding) == op(g). The call does not change g."""
    op, _ = OPS[name]
    g = data.draw(GRADS)
    before = torch.utils._pytree.tree_map(torch.clone, g)
    assert_trees_close(op(garbage_padding(g)).to_dense(), op(g).to_dense())
    assert_trees_close(garbage_padding(g).norm(), g.norm())
    assert_trees_close(g, before)


@given(frs.row_grads(coalesced=False))
def test_coalesced_rows_are_distinct_and_ascending(g):
    """coalesce gives each touched row once, ascending, then -1 and zeros. repeats count the entries."""
    out = g.coalesce()
    n = int(out.count)
    rows = [r for r in g.rows[: g.count].tolist() if 0 <= r < g.num_embeddings]
    assert out.rows.tolist() == sorted(set(rows)) + [-1] * (len(out.rows) - n)
    assert out.repeats.tolist() == [rows.count(r) for r in sorted(set(rows))] + [0] * (len(out.rows) - n)
    assert not out.grads[n:].any() and out.coalesced and out.coalesce() is out


@given(GRADS)
def test_norms_are_those_of_dense_gradients(g):
    """norm, squared_norm and global_norm equal those of the dense gradients."""
    want = np.linalg.norm(dense_of(g))
    same(g.norm(), want)
    same(g.squared_norm(), want**2)
    same(fr.global_norm({"a": g, "b": g}, torch.tensor([2.0])), np.sqrt(2 * want**2 + 4))


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), max_size=60), st.randoms())
def test_norms_have_the_same_bits_in_any_order(numbers, random):
    """A norm has the bits of the norm of the same rows in any order, with rows of zeros among them, in one table or in
    two. It is the rounded norm of the exact sum. NaN and infinities stay."""
    of = lambda xs: fr.RowGrads.from_entries(
        torch.arange(len(xs)), torch.tensor(xs).reshape(-1, 1), num_embeddings=len(xs)
    )
    want, moved = fr.global_norm({"t": of(numbers)}), random.sample([*numbers, 0.0, 0.0], len(numbers) + 2)
    assert torch.equal(fr.global_norm({"t": of(moved)}), want)
    assert torch.equal(fr.global_norm({"a": of(moved[:5]), "b": of(moved[5:])}), want)
    squares = torch.tensor(numbers).square().double().tolist()
    assert torch.equal(want, torch.tensor(math.fsum(squares), dtype=torch.float32).sqrt())
    for odd in (torch.inf, torch.nan):
        assert_trees_close(fr.global_norm({"t": of([*moved, odd])}), torch.tensor(odd))


def test_global_norm_of_mixed_dtypes():
    """global_norm accepts f32 and f64 gradients together. Without gradients the norm is zero."""
    g = [
        fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 1, dtype=d), num_embeddings=1)
        for d in (torch.float32, torch.float64)
    ]
    assert abs(float(fr.global_norm(dict(enumerate(g)))) - 2**0.5) < 1e-6 and float(fr.global_norm({})) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_summed_in_the_order_of_their_entries(dtype):
    """coalesce and to_dense add the entries of a row one by one in order, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 7, (300,), generator=generator)
    grads = torch.randn(300, 9, generator=generator, dtype=torch.float64).to(dtype) * 10.0 ** (rows[:, None] % 3)
    want = np.zeros((7, 9), dtype=grads.numpy().dtype)
    for row, grad in zip(rows.tolist(), grads.numpy()):
        want[row] += grad
    g = fr.RowGrads.from_entries(rows, grads, num_embeddings=7)
    assert np.array_equal(g.to_dense().numpy(), want)
    assert np.array_equal(g.coalesce().grads[:7].numpy(), want)
    backwards = fr.RowGrads.from_entries(rows.flip(0), grads.flip(0), num_embeddings=7).to_dense()
    assert not np.array_equal(backwards.numpy(), want)


@given(st.data())
def test_a_sum_has_the_entries_of_both(data):
    """(a + b).to_dense() == a.to_dense() + b.to_dense()."""
    shape = {"num_embeddings": 4, "embedding_dim": 2, "dtypes": (torch.float64,), "coalesced": None}
    a, b = data.draw(frs.row_grads(**shape)), data.draw(frs.row_grads(**shape))
    same((a + b).to_dense(), dense_of(a) + dense_of(b))


@given(GRADS)
def test_zeros_are_neutral(g):
    """g + zeros equals g. zeros has no entries and norm 0."""
    zeros = fr.RowGrads.zeros((g.num_embeddings, g.grads.shape[1]), dtype=g.grads.dtype)
    same((g + zeros).to_dense(), dense_of(g))
    same((zeros + g).to_dense(), dense_of(g))
    assert float(zeros.norm()) == 0 and zeros.coalesce().to_dense().shape == zeros.to_dense().shape


def test_repeats_survive_a_sum():
    """If a and b were coalesced, the repeats of coalesce(a + b) are the sums of the repeats of a and b."""
    g = fr.RowGrads.from_entries(torch.tensor([1, 1, 0]), torch.ones(3, 1), num_embeddings=2)
    assert (g.coalesce() + g.coalesce()).coalesce().repeats[:2].tolist() == [2, 4]


def test_rows_at_the_end_of_i32():
    """The last row that i32 can hold is valid. A table with more rows than the dtype of the rows can hold raises."""
    rows, grads = torch.tensor([2**31 - 2, 5, 2**31 - 2, -1], dtype=torch.int32), torch.ones(4, 1)
    g = fr.RowGrads.from_entries(rows, grads, num_embeddings=2**31 - 1).coalesce()
    assert g.rows.tolist() == [5, 2**31 - 2, -1, -1] and g.grads[:2].flatten().tolist() == [1.0, 2.0]
    with pytest.raises(ValueError):
        fr.RowGrads.from_entries(rows, grads, num_embeddings=2**31)


@settings(max_examples=12)
@given(frs.row_grads(coalesced=False, dtypes=(torch.float32,)))
def test_row_grads_map_and_trace(g):
    """coalesce and to_dense trace with fake tensors. vmap over stacked gradients equals a loop."""
    both = lambda x: (x.coalesce(), x.to_dense(), x.clip(1.0).norm())
    assert_trees_close(make_fx(both, tracing_mode="fake")(zero_padding(g))(g), both(g))
    stacked = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), g, g.scale(2.0))
    got = torch.func.vmap(lambda x: x.coalesce().to_dense())(stacked)
    assert_trees_close(got, torch.stack([g.to_dense(), g.scale(2.0).to_dense()]))


def loss_of_bags(params, ids):
    return (fr.lookup(params.tables, ids, [fr.FeatureConfig("a", table="t")])["a"] * params.dense).square().sum()


def bags_of(dense):
    params = fr.Params({"t": torch.ones(3, 1)}, dense)
    return fr.value_and_grad(loss_of_bags)(params, fr.KeyedJaggedTensor.from_lists({"a": [[2, 2], [0]]}))[1].tables["t"]


USES = {
    "to_dense": lambda g: g.to_dense(),
    "coalesce": lambda g: g.coalesce(),
    "norm": lambda g: g.norm(),
    "rows": lambda g: g.rows,
    "+": lambda g: g + g,
    "scaled": lambda g: g.scale(2.0).to_dense(),
    "update": lambda g: fr.optim.sgd(0.1).update({"t": g}, {"t": {}}, {"t": torch.ones(3, 1)}, 0),
}


@pytest.mark.parametrize("use", USES)
def test_tangents_of_row_gradients_are_refused(use):
    """A tangent that jvp returns for RowGrads has no rows. Every use of the tangent raises. The primal is usable.
    Inside the differentiated function all values are right."""
    x, one = torch.tensor(5.0), torch.ones(())
    primal, tangent = torch.func.jvp(bags_of, (x,), (one,))
    USES[use](primal)
    with pytest.raises(TypeError, match="inside of the function that is differentiated"):
        USES[use](tangent)
    dense = torch.func.jvp(lambda x: bags_of(x).to_dense(), (x,), (one,))
    assert dense[1].flatten().tolist() == [20.0, 0.0, 80.0] and torch.equal(dense[0], primal.to_dense())


@pytest.mark.parametrize("use", USES)
def test_stacked_row_gradients_are_refused(use):
    """RowGrads that vmap stacked can be used under vmap. Elsewhere the error says how."""
    stacked = torch.func.vmap(bags_of)(torch.tensor([1.0, 5.0]))
    with pytest.raises(TypeError, match=r"try   torch\.func\.vmap\((lambda g: g\.to_dense\(\)\)|optimizer\.update, )"):
        USES[use](stacked)
    dense = torch.func.vmap(lambda g: g.to_dense())(stacked)
    assert torch.equal(dense[1], bags_of(torch.tensor(5.0)).to_dense())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_of_means_are_those_that_are_summed(weighted, dtype):
    """Entries of a mean, passed to from_entries, are summed to the bits of the gradient of the lookup itself."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 12, (200,), generator=g)
    n = int(lengths.sum())
    weights = torch.rand(n, generator=g).to(dtype) if weighted else None
    ids = fr.KeyedJaggedTensor.from_lengths(["a"], torch.randint(0, 40, (n,), generator=g), lengths, weights=weights)
    feature = fr.FeatureConfig("a", table="t", pooling="mean", weighted=weighted)
    d = fr.KeyedTensor(torch.randn(200, 3, generator=g).to(dtype), ("a",), (3,))
    own = fr.lookup_transpose(d, ids, [feature], {"t": torch.zeros(40, 3, dtype=dtype)})["t"]
    again = fr.RowGrads.from_entries(own.rows, own.grads, num_embeddings=40)
    assert_trees_close(again.coalesce(), own.coalesce())

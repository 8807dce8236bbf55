"""top_k against brute force, under every transform, and as an operation of a compiled program."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.refused import assert_refused

import funcrec as fr

QUERIES = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
ITEMS = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**20), st.booleans())
def test_no_other_row_scores_more(n, k, seed, leaves_out):
    """The scores are the k greatest of all rows except the excluded rows, computed in f64, within the rounding of
    f32."""
    generator = torch.Generator().manual_seed(seed)
    queries, items = torch.randn(3, 6, generator=generator), torch.randn(n, 6, generator=generator)
    seen = torch.rand(3, n, generator=generator) < (0.3 if leaves_out else 0)
    exclude = fr.JaggedTensor.from_lists([row.nonzero()[:, 0].tolist() for row in seen], dtype=torch.int64)
    scores, rows = fr.top_k(queries, items, k, exclude=exclude if leaves_out else None)
    exact = (queries.double() @ items.double().T).masked_fill(seen, -torch.inf)
    want = exact.sort(dim=1, descending=True).values[:, :k]
    want = torch.nn.functional.pad(want, (0, k - want.shape[1]), value=-torch.inf)
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(rows >= 0, want > -torch.inf)
    assert all(len(set(found)) == len(found) for found in ([r for r in row if r >= 0] for row in rows.tolist()))
    assert torch.equal(exact.gather(1, rows.clamp(0))[rows >= 0] > -torch.inf, torch.ones(int((rows >= 0).sum())) > 0)


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "float16", "bfloat16", "float32"])
def test_quantised_items_are_read_as_what_they_stand_for(dtype):
    """top_k of quantised items equals top_k of the items from `dequantize`, bit for bit, with the lower row first in
    ties. This holds under jit and for the derivative by the queries."""
    items = fr.quantize({"item": torch.cat([ITEMS, ITEMS[:50]])}, dtype)
    plain = fr.dequantize(items)["item"]
    want = fr.top_k(QUERIES, plain, 30)
    assert all(map(torch.equal, fr.top_k(QUERIES, items, 30), want))
    assert all(map(torch.equal, fr.top_k(QUERIES[:1], items, 30), [x[:1] for x in want]))
    if dtype == "int8":
        assert all(map(torch.equal, fr.jit(lambda q, x: fr.top_k(q, x, 30))(QUERIES, items), want))
    total = lambda x: lambda q: fr.top_k(q, x, 3)[0].sum()
    torch.testing.assert_close(torch.func.grad(total(items))(QUERIES), torch.func.grad(total(plain))(QUERIES))


def test_what_is_no_number_is_not_given():
    """A row whose score is NaN or -inf is never returned. Infinite scores come first. A NaN query gets no rows."""
    items = torch.tensor([[1.0], [torch.nan], [-torch.inf], [torch.inf], [2.0]])
    scores, rows = fr.top_k(torch.tensor([[1.0], [torch.nan], [0.0]]), items, 5)
    assert rows.tolist() == [[3, 4, 0, -1, -1], [-1] * 5, [0, 4, -1, -1, -1]]
    assert scores[0].tolist() == [torch.inf, 2.0, 1.0, -torch.inf, -torch.inf]


def test_derivatives_are_those_of_the_chosen():
    """The gradient of the scores equals that of the inner products with the chosen rows, for both arguments."""
    weights = torch.arange(15.0).view(5, 3)
    _, rows = fr.top_k(QUERIES, ITEMS, 3)
    ours = torch.func.grad(lambda q, x: (fr.top_k(q, x, 3)[0] * weights).sum(), argnums=(0, 1))(QUERIES, ITEMS)
    plain = torch.func.grad(lambda q, x: (torch.einsum("bd,bkd->bk", q, x[rows]) * weights).sum(), argnums=(0, 1))
    for x, y in zip(ours, plain(QUERIES, ITEMS), strict=True):
        torch.testing.assert_close(x, y)


def test_transforms_and_compiled_programs_agree():
    """vmap over queries or tables equals a call for each member. jit has the bits of the plain call. Padding is not
    read."""
    want = fr.top_k(QUERIES, ITEMS, 4)
    assert all(map(torch.equal, fr.jit(lambda q, x: fr.top_k(q, x, 4))(QUERIES, ITEMS), want))
    stacked = torch.stack([ITEMS[:200], ITEMS[200:]])
    scores, rows = torch.func.vmap(lambda x: fr.top_k(QUERIES, x, 4))(stacked)
    for i in range(2):
        assert all(map(torch.equal, (scores[i], rows[i]), fr.top_k(QUERIES, stacked[i], 4)))
    seen = fr.JaggedTensor.from_lists([[int(r)] for r in want[1][:, 0]])
    padded = fr.JaggedTensor(torch.cat([seen.values, want[1].flatten()]), seen.offsets)
    assert torch.equal(fr.top_k(QUERIES, ITEMS, 4, exclude=padded)[1][:, :3], want[1][:, 1:])


def test_of_no_members_there_are_none():
    """vmap over no members gives empty results with the shape of a member, for top_k and quantize."""
    found = torch.func.vmap(lambda q: fr.top_k(q, ITEMS, 3))(QUERIES.new_zeros(0, *QUERIES.shape))
    assert [(x.shape, x.dtype) for x in found] == [((0, 5, 3), torch.float32), ((0, 5, 3), torch.int64)]
    coded = torch.func.vmap(lambda x: fr.quantize({"item": x})["item"])(ITEMS.new_zeros(0, *ITEMS.shape))
    assert (coded.shape, coded.dtype) == ((0, *fr.quantize({"item": ITEMS})["item"].shape), torch.uint8)


BAD = {
    "k beyond": (lambda: fr.top_k(QUERIES, ITEMS, 10**12), ValueError, "`k` is out of range"),
    "k beyond i64": (lambda: fr.top_k(QUERIES, ITEMS, 2**63), ValueError, "`k` is out of range"),
    "sparse queries": (lambda: fr.top_k(QUERIES.to_sparse(), ITEMS, 2), TypeError, "`queries` is not dense"),
    "ints": (lambda: fr.top_k(QUERIES.long(), ITEMS, 2), TypeError, "`queries` is not a tensor of this dtype"),
    "a vector": (lambda: fr.top_k(QUERIES[0], ITEMS, 2), ValueError, "`queries` is not a tensor of these dimensions"),
    "other dim": (lambda: fr.top_k(QUERIES[:, :3], ITEMS, 2), ValueError, "does not match `queries`"),
    "k = 0": (lambda: fr.top_k(QUERIES, ITEMS, 0), ValueError, "`k`"),
    "two tables": (
        lambda: fr.top_k(QUERIES, fr.quantize({"a": ITEMS, "b": ITEMS}), 2), ValueError, "`items` are not one table",
    ),
    "codes of another dim": (
        lambda: fr.top_k(QUERIES[:, :3], fr.quantize({"a": ITEMS}), 2), ValueError, "no dim in common",
    ),
    "codes whose rows have as many bytes": (
        lambda: fr.top_k(QUERIES[:, :7].contiguous(), fr.quantize({"a": ITEMS}, "int4"), 2),
        ValueError, "no dim in common",
    ),
    "floats left out": (
        lambda: fr.top_k(QUERIES, ITEMS, 2, exclude=fr.JaggedTensor.from_lists([[0.5]] * 5)), TypeError, "`exclude.",
    ),
    "others left out": (
        lambda: fr.top_k(QUERIES, ITEMS, 2, exclude=fr.JaggedTensor.from_lists([[1]])), ValueError,
        "`exclude` does not match `queries`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_told(name):
    """A wrong argument raises before any work, in four parts."""
    assert_refused(*BAD[name], "funcrec.top_k")

"""The approximate index: recall against `top_k`, few, equal or missing items, and invalid arguments."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.refused import assert_refused

import funcrec as fr

KINDS = ("hnsw", "ivf")
ITEMS = torch.randn(2000, 16, generator=torch.Generator().manual_seed(1))
QUERIES = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def indexes():
    return {kind: fr.build_index(ITEMS, kind) for kind in KINDS}


def recall(found, want) -> float:
    return sum(len({*f} & {*w}) for f, w in zip(found.tolist(), want.tolist(), strict=True)) / want.numel()


@pytest.mark.parametrize(("kind", "efforts"), [("hnsw", (10, 64, 400)), ("ivf", (4, 16, 51))])
def test_recall_rises_with_effort(indexes, kind, efforts):
    """For 2,000 normal vectors of 16 numbers, recall@10 rises with the effort to at least 0.99. Scores equal those of
    top_k within the rounding of f32."""
    want = fr.top_k(QUERIES, ITEMS, 10)
    found = [fr.search_index(indexes[kind], QUERIES, 10, effort=n) for n in efforts]
    recalls = [recall(rows, want[1]) for _, rows in found]
    assert recalls == sorted(recalls) and recalls[0] < recalls[-1] and recalls[-1] >= 0.99, recalls
    for scores, rows in found:
        torch.testing.assert_close(scores, torch.einsum("bd,bkd->bk", QUERIES, ITEMS[rows]), rtol=1e-5, atol=1e-5)
        assert (scores.diff(dim=1) <= 0).all()


def test_the_usual_effort_is_enough(indexes):
    """Without `effort`, the graph's recall@10 on these vectors is at least 0.95."""
    assert recall(fr.search_index(indexes["hnsw"], QUERIES, 10)[1], fr.top_k(QUERIES, ITEMS, 10)[1]) >= 0.95


def test_all_lists_are_all_items(indexes):
    """If every list of "ivf" is read, the rows are those of top_k."""
    index = indexes["ivf"]
    rows = fr.search_index(index, QUERIES, 10, effort=index.faiss.nlist)[1]
    assert recall(rows, fr.top_k(QUERIES, ITEMS, 10)[1]) == 1


@settings(max_examples=30)
@given(st.sampled_from(KINDS), st.integers(0, 40), st.integers(0, 3), st.integers(1, 60), st.integers(0, 2**20))
def test_few_items_are_all_given(kind, num_items, num_queries, k, seed):
    """With fewer items than k, duplicates included, each row is returned once, best first, and the lower row first in
    ties. Then come -inf and -1, as in top_k. This also holds without items or queries."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(-1, 2, (num_items, 3), generator=generator).float()
    queries = torch.randint(1, 3, (num_queries, 3), generator=generator).float()
    index = fr.build_index(items, kind, num_lists=1, build_effort=64)
    scores, rows = fr.search_index(index, queries, k, effort=64)
    want = fr.top_k(queries, items, k)
    assert scores.shape == rows.shape == (num_queries, k) and rows.dtype == torch.int64
    if k >= num_items:
        assert torch.equal(scores, want[0]) and torch.equal(rows, want[1])


def test_lists_are_as_many_as_told():
    """An index has the requested number of lists, up to one per item, and FAISS prints nothing."""
    assert fr.build_index(ITEMS[:60], "ivf", num_lists=40).faiss.nlist == 40
    assert fr.build_index(ITEMS[:60], "ivf").faiss.nlist == 1


def test_arguments_are_left_alone():
    """Neither the construction of an index nor a search changes an argument. Items that change later do not change a
    search."""
    items, queries = ITEMS[:100].clone(), QUERIES[:3].clone()
    index = fr.build_index(items)
    want = fr.search_index(index, queries, 5)
    assert torch.equal(items, ITEMS[:100]) and torch.equal(queries, QUERIES[:3])
    items.zero_()
    assert all(map(torch.equal, fr.search_index(index, queries, 5), want))


BAD = {
    "ints": (lambda: fr.build_index(ITEMS.long()), TypeError, "`items` is not a tensor of this dtype"),
    "a vector": (lambda: fr.build_index(ITEMS[0]), ValueError, "`items` is not a tensor of these dimensions"),
    "no columns": (lambda: fr.build_index(ITEMS[:, :0]), ValueError, "`items` have no columns"),
    "NaN": (lambda: fr.build_index(ITEMS[:3] * torch.nan), ValueError, "`items` are not finite"),
    "another device": (lambda: fr.build_index(ITEMS.to("meta")), ValueError, "not on the CPU"),
    "a kind": (lambda: fr.build_index(ITEMS[:3], "tree"), ValueError, "`kind`"),
    "tracked items": (lambda: fr.build_index(ITEMS[:3].clone().requires_grad_()), TypeError, "`items` are tracked"),
    "another dim": (lambda: fr.search_index(SMALL(), QUERIES[:, :3], 2), ValueError, "have another dim"),
    "f64 beyond f32": (lambda: fr.build_index(ITEMS[:3].double() * 1e300), ValueError, "`items` are not finite in f32"),
    "one link": (lambda: fr.build_index(ITEMS[:3], links=1), ValueError, "`links` is out of range"),
    "links beyond": (lambda: fr.build_index(ITEMS[:3], links=2**31), ValueError, "`links` is out of range"),
    "effort beyond": (lambda: fr.build_index(ITEMS[:3], build_effort=2**31), ValueError, "`build_effort` is out of"),
    "more lists than items": (lambda: fr.build_index(ITEMS[:3], "ivf", num_lists=4), ValueError, "more lists"),
    "k beyond": (lambda: fr.search_index(SMALL(), QUERIES, 2**31), ValueError, "`k` is out of range"),
    "queries beyond f32": (
        lambda: fr.search_index(SMALL(), QUERIES.double() * 1e300, 2), ValueError, "`queries` are not finite in f32",
    ),
    "sparse items": (lambda: fr.build_index(ITEMS[:3].to_sparse()), TypeError, "`items` is not dense"),
    "inf": (lambda: fr.search_index(SMALL(), QUERIES[:1] / 0, 2), ValueError, "`queries` are not finite"),
    "k = 0": (lambda: fr.search_index(SMALL(), QUERIES, 0), ValueError, "`k`"),
    "grad": (
        lambda: torch.func.grad(lambda q: fr.search_index(SMALL(), q, 2)[0].sum())(QUERIES), TypeError, "are tracked",
    ),
    "vmap": (lambda: torch.func.vmap(lambda q: fr.search_index(SMALL(), q[None], 2))(QUERIES), TypeError, "tracked"),
    "jit": (lambda: fr.jit(lambda q: fr.search_index(SMALL(), q, 2))(QUERIES), TypeError, "tracked"),
}  # fmt: skip


def SMALL():
    return fr.build_index(ITEMS[:20])


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_told(name):
    """A wrong or tracked argument raises before any work, in four parts."""
    assert_refused(*BAD[name])


def test_without_faiss_the_error_says_so(monkeypatch):
    """Without FAISS a call says what to install. No other part of funcrec needs FAISS."""
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"funcrec\[retrieval\]"):
        fr.build_index(ITEMS)


PROGRAM = """
import faiss, torch, funcrec as fr
torch.set_num_threads(2)
x = torch.randn(300, 16)
for _ in range(2):
    y = (x @ x.T).relu().sum()
    rows = fr.search_index(fr.build_index(x, "ivf"), x[:50], 3, effort=7)[1]
print(torch.get_num_threads(), bool((rows == fr.top_k(x[:50], x, 3)[1]).all()))
"""


def test_two_openmp_runtimes_live_in_one_process():
    """FAISS brings its own OpenMP. If FAISS is loaded first, both runtimes run with two threads."""
    got = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert got.stdout.split() == ["2", "True"], got.stderr[-2000:]

"""Triton finds the rows of ids that the reference finds. On the CPU the kernels run in triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs triton")
from funcrec.kernels import ops
from funcrec.kernels import triton as kernels
from funcrec.kernels.reference_columns import find_columns
from funcrec.kernels.reference_vocabulary import find_ids
from funcrec.kernels.vocabulary import shared_of

import funcrec as fr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def filled(num_rows, seed, shared):
    """Return a vocabulary with half of its rows in use, and its ids."""
    held = torch.randint(-(2**62), 2**62, (num_rows // 2,), generator=torch.Generator().manual_seed(seed))
    vocabulary = fr.vocabulary(num_rows, unknown=shared or "zeros", seed=seed)
    return fr.admit(vocabulary, held)[0], held


@settings(max_examples=12, deadline=None)
@given(
    size=st.sampled_from([0, 1, 3, 4, 5, 130]), buckets=st.integers(1, 3), shared=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 2**30), dtype=st.sampled_from([torch.int64, torch.int32]), padding=st.integers(0, 3),
    of_all=st.sampled_from([0, 7, 2**30]),
)  # fmt: skip
def test_found_rows_are_the_references(size, buckets, shared, seed, dtype, padding, of_all):
    """Known and unknown ids, the padding and all 64 bits have the reference's rows, in a part of a vocabulary too."""
    vocabulary, held = filled(128 * buckets, seed, shared)
    g = torch.Generator().manual_seed(seed)
    ids = held[torch.randint(len(held), (size,), generator=g)]
    ids = torch.where(
        torch.rand(size, generator=g) < 0.3, torch.randint(-(2**63), 2**63 - 1, (size,), generator=g), ids
    )
    given = vocabulary.tags, vocabulary.entries, ids.to(dtype), torch.tensor(max(size - padding, 0))
    how = shared_of(shared, of_all), vocabulary.salt
    want = find_ids(*given, *how)
    got = kernels.find_ids(*(x.to(DEVICE) for x in given), *how)
    assert torch.equal(got.cpu(), want)


def test_columns_are_the_references():
    """The columns of several vocabularies in one buffer have the reference's rows, other ids stay, garbage after the
    last offset is not read."""
    (a, held), (b, _) = filled(128, 1, 0), filled(256, 2, 3)
    ids = torch.cat([held[:20], torch.arange(10), held[20:30], torch.tensor([-1, 2**62])])
    offsets, how = torch.tensor([0, 10, 20, 25, 30, 40, 40]), [0, a.salt, 3, b.salt]
    columns = [0, 0, 0, 2, 7, 0, 0, 4, 2, 0, 1, 0, 2, 1, 0]
    state = [a.tags, a.entries, b.tags, b.entries]
    got = kernels.find_columns([x.to(DEVICE) for x in state], ids.to(DEVICE), offsets.to(DEVICE), how, columns)
    assert torch.equal(got.cpu(), find_columns(state, ids, offsets, how, columns))


def test_cuda_takes_it():
    """On a CUDA device lookups of vocabularies take Triton's search."""
    for name in ("find_ids", "find_columns"):
        assert ops.available(name, torch.device("cuda")) == "triton"

"""Lookups of ids whose examples share bags, drawn by hypothesis."""

import torch
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import strategies as frs


@st.composite
def shared_lookups(draw, max_examples=5, min_bags=0, **options):
    """Draw a Lookup whose keys have different numbers of bags, and inverse indices i[F, E] of E examples.

    Bags may have no example. A key without bags needs E = 0.
    """
    it = draw(frs.lookups(min_bags=min_bags, **options))
    counts = [draw(st.integers(min_bags, it.ids.num_bags)) for _ in it.ids.keys]
    examples = draw(st.integers(0, max_examples)) if min(counts, default=0) else 0
    own = {k: it.ids[k][:n] for k, n in zip(it.ids.keys, counts, strict=True)}
    ids = fr.KeyedJaggedTensor.from_jagged(own)
    inverse = [[draw(st.integers(0, n - 1)) for _ in range(examples)] for n in counts]
    inverse = torch.tensor(inverse, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    return it._replace(ids=fr.tree.copy(with_inverse(ids, inverse.reshape(len(counts), examples))))


def with_inverse(ids, inverse):
    return fr.KeyedJaggedTensor(
        ids.values, ids.offsets, ids.weights, inverse, ids.keys, ids.strides, unweighted=ids.unweighted
    )


def expanded(ids):
    """Return the ids of the examples, a bag for each, read on the host."""
    own = {k: ids[k][ids.inverse[f].tolist()] for f, k in enumerate(ids.keys)}
    return fr.KeyedJaggedTensor.from_jagged(own)

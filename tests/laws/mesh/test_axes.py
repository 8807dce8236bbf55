"""Ranks and their coordinates on the axes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from funcrec.mesh import coordinates, rank_at


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_rank_is_its_coordinates(sizes, data):
    """A rank's number and the rank's coordinates determine each other. The last axis varies fastest, as in the index
    order of numpy."""
    axes = [f"a{i}" for i in range(len(sizes))]
    rank = data.draw(st.integers(0, int(np.prod(sizes, dtype=int)) - 1))
    known = dict(zip(axes, sizes, strict=True))
    where = coordinates(rank, axes, known)
    assert list(where.values())[::-1] == [int(i) for i in np.unravel_index(rank, sizes)]
    assert rank_at(where, axes, known) == rank
    order = data.draw(st.permutations(axes))
    of_order = [where[a] for a in order], [known[a] for a in order]
    assert rank_at(where, order, known) == (int(np.ravel_multi_index(*of_order)) if axes else 0)

"""ravel joins a tree's leaves into one buffer for each dtype. unravel splits the buffers."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector

from funcrec.core import in_parts, ravel
from funcrec.testing import assert_trees_close

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32)


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES)), max_size=5))
def test_a_tree_is_its_buffers(forms):
    """A buffer is torch's vector of the leaves with the buffer's dtype, in order. unravel returns the leaves, or
    stacked leaves from stacked buffers."""
    made = [torch.randint(-9, 9, shape).to(dtype) for shape, dtype in forms]
    tree = {"a": made[:2], "b": tuple(made[2:])}
    buffers, unravel = ravel(tree)
    assert [x.dtype for x in buffers] == list(dict.fromkeys(dtype for _, dtype in forms))
    for x in buffers:
        assert torch.equal(x, parameters_to_vector([y for y in made if y.dtype == x.dtype]))
    assert_trees_close(unravel(buffers), tree)
    twice = unravel([torch.stack([x, x + 1]) for x in buffers])
    assert_trees_close([x for own in twice.values() for x in own], [torch.stack([x, x + 1]) for x in made])


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=4), st.integers(1, 4))
def test_what_leads_is_kept(shapes, n):
    """Leaves [n, ...] are joined after their first dimension. unravel returns the leaves without that dimension if it
    was summed over."""
    leaves = [torch.randn(n, *shape, dtype=torch.float64) for shape in shapes]
    (buffer,), unravel = ravel(leaves, lead=1)
    assert buffer.shape == (n, sum(x[0].numel() for x in leaves))
    assert_trees_close(unravel([buffer]), leaves)
    assert_trees_close(unravel([buffer.sum(0)]), [x.sum(0) for x in leaves], rtol=1e-12, atol=1e-12)


@given(st.integers(1, 20), st.integers(1, 6))
def test_parts_are_equal_and_all(size, n):
    """in_parts cuts a tensor into n equal parts. The parts have all elements in order, then as few zeros as
    possible."""
    parts = in_parts(torch.arange(1, size + 1), n)
    assert parts.shape == (n, -(-size // n))
    assert parts.flatten().tolist() == [*range(1, size + 1), *[0] * (parts.numel() - size)]

"""Rows that pass from id to id, and between memory and a file, keep the numbers of their own id."""

from programs import evictions


def test_a_row_has_the_numbers_of_its_own_id(tmp_path):
    """After thousands of evictions each row that a step reads has the numbers of its id, in a vocabulary's table and in
    a cache, and a commit leaves each row in its file."""
    assert evictions.dynamic(30_000, lambda step: step) > 30_000
    assert evictions.cached(30_000, lambda step: step, tmp_path) > 30_000

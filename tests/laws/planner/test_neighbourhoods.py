"""The solver's programs of a few items, which large problems end with, on problems small enough to try all plans."""

import numpy as np
import pytest
from programs.packings import best_of_all, packing

from funcrec.planner._packing import loads_of, without_dominated
from funcrec.planner._solve import longest_first, neighbourhoods


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_neighbourhood_of_all_items_has_the_optimum(first):
    """From any plan within the caps the programs reach the optimum, if each holds all items and ranks. No plan gets
    worse, and the loads are those of the choices."""
    tried = 0
    for seed in range(first, first + 20):
        p, _ = without_dominated(packing(seed))
        start = longest_first(p, [0] * len(p.items))
        found = neighbourhoods(p, start, -np.inf, rounds=12)
        again = loads_of(p, found.choices)
        again.scale = found.scale
        assert found.value <= start.value and np.isclose(again.value, found.value, rtol=1e-9)
        if start.excess == 0:
            tried += 1
            assert np.isclose(found.value, best_of_all(p), rtol=1e-6)
    assert tried >= 5

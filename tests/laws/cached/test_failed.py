"""A step of cached tables that raised is taken again, as a step of whole tables is."""

import pytest
import torch
from programs.cached_users import Both, batches_of


class Failed(Exception):
    """What a loss may raise."""


@pytest.mark.parametrize("depth", [None, 1, 4])
def test_a_step_that_failed_is_taken_again(depth):
    """A step that raised after rows had left for the store is taken again with the same batch, read ahead or not. All
    later steps have the bits of whole tables."""
    both, batches = Both("adam", depth=depth or 1), batches_of(3, 12)
    step = both.cached.step

    def fails(state, batch):
        raise Failed

    for k, one in enumerate(batches if depth is None else both.cached.ahead(both.state, batches)):
        if k % 3 != 1:
            both.cached.step = fails
            with pytest.raises(Failed):
                both.cached(both.state, one)
        both.cached.step = step
        both.state, got = both.cached(both.state, one)
        both.whole, want = both.step(both.whole, batches[k])
        assert torch.equal(got["loss"], want["loss"])
    both.check_all()

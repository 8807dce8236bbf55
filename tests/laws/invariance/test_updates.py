"""Dense updates under invariant: a member of vmap has the bits of its own run."""

import functools

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

equal = functools.partial(assert_trees_close, rtol=0, atol=0)
vmap = torch.func.vmap
NAMES = ["Adagrad", "Adam", "AdamW", "RMSprop", "SGD", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"]


@pytest.mark.parametrize("name", NAMES)
def test_members_of_vmap_are_updated_as_alone(name):
    """Each member's second update has the bits of its own run, with gradients of 1e-16 to 10 beside an eps of 1e-8."""
    opt, g = fr.optim.dense(getattr(torch.optim, name), lr=0.01), torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(2, 300, generator=g)
    first, second, params = (normal() * 10 ** (17 * torch.rand(2, 300, generator=g) - 16) for _ in range(3))

    @fr.invariant
    def twice(first, second, params, step, by=lambda f: f):
        params, state = by(lambda f, p, t: opt.update(f, opt.init(p), p, t))(first, params, step)
        return by(opt.update)(second, state, params, step + 1)

    together = twice(first, second, params, torch.zeros(2, dtype=torch.int64), vmap)
    for i in range(2):
        alone = twice(first[i], second[i], params[i], torch.zeros((), dtype=torch.int64))
        equal(fr.tree.map(lambda x: x[i], together), alone)  # noqa: B023

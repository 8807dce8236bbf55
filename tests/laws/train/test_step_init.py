"""The first state under vmap."""

import torch

import funcrec as fr
from funcrec.core._tree import tree_leaves
from funcrec.testing import assert_trees_close


def test_the_first_state_of_an_ensemble_has_memory_of_its_own():
    """Under vmap every member has its own memory for step, slots, optimizer state and key, as a donated step needs. The
    values are those of init."""
    options = {"sparse": fr.optim.adam(0.1), "dense": fr.optim.dense(torch.optim.Adam, lr=0.1)}
    step = fr.train_step(lambda p, b: p.dense["w"].sum(), **options)
    params = fr.Params({"t": torch.randn(3, 4, 2)}, {"w": torch.randn(3, 2)})
    state = torch.func.vmap(step.init)(params)
    one = step.init(fr.Params({"t": params.tables["t"][0]}, {"w": params.dense["w"][0]}))
    for x, y in zip(tree_leaves(state), tree_leaves(one), strict=True):
        assert x.is_contiguous() and torch.equal(x[0], y)


def test_a_jitted_step_begins_as_the_step_does():
    """fr.jit(step).init gives the state of step.init. The state belongs to the jitted step."""
    options = {"sparse": fr.optim.adam(0.1), "dense": fr.optim.dense(torch.optim.Adam, lr=0.1)}
    step = fr.train_step(lambda p, b: p.dense["w"].sum(), **options)
    params = fr.Params({"t": torch.randn(4, 2)}, {"w": torch.randn(2)})
    assert_trees_close(fr.jit(step, donate=("state",)).init(params), step.init(params))

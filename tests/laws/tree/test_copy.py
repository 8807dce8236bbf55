"""Copies of trees."""

import torch

import funcrec as fr
from funcrec.testing import assert_trees_close


def test_a_copy_has_memory_of_its_own():
    """fr.copy gives equal tensors in other memory, in the same tree."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 1], []]})
    tree = {"x": torch.arange(6.0).reshape(2, 3), "ids": ids, "n": 3, "none": None, "t": (torch.ones(2, 3).t(), "text")}
    got = fr.copy(tree)
    assert_trees_close(got, tree)
    old, new = (torch.utils._pytree.tree_leaves(t) for t in (tree, got))
    for a, b in zip(old, new, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() and a.stride() == b.stride()


def test_a_copy_is_differentiable():
    """The derivative of a copy is the identity, even for a table."""
    x = torch.arange(4.0).reshape(2, 2).requires_grad_()
    (d,) = torch.autograd.grad(fr.copy(x).square().sum(), x)
    assert_trees_close(d, 2 * x.detach())
    assert_trees_close(torch.func.grad(lambda y: fr.copy(y).square().sum())(x.detach()), 2 * x.detach())
    assert_trees_close(torch.func.vmap(lambda y: fr.copy(y))(x.detach()), x.detach())
    assert_trees_close(torch.func.jvp(fr.copy, (x.detach(),), (torch.ones(2, 2),))[1], torch.ones(2, 2))

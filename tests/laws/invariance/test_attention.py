"""Attention under invariant: the kernel's value and derivative see no other bag; what the reference computes raises."""

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

LENGTHS = [3, 0, 140, 1, 200]


def bags(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(LENGTHS), 2, 4, generator=g)
    return fr.JaggedTensor.from_lengths(values, torch.tensor(lengths))


def attended(q):
    return fr.jagged_attention(q, q, q.values).values


def summed(x, lengths):
    out = attended(fr.JaggedTensor.from_lengths(x, torch.tensor(lengths)))
    return (out * out).sum()


def test_values_and_gradients_of_a_bag_see_no_other_bag():
    """The last bag has the bits of that bag alone, its cotangents too: 200 keys behind 144 others."""
    x = bags(LENGTHS).values
    gradient = fr.invariant(
        lambda x, n: (attended(fr.JaggedTensor.from_lengths(x, torch.tensor(n))), torch.func.grad(summed)(x, n))
    )
    for whole, alone in zip(gradient(x, LENGTHS), gradient(x[-200:], LENGTHS[-1:]), strict=True):
        assert_trees_close(whole[-200:], alone, rtol=0, atol=0)


@pytest.mark.parametrize("of", ["forward", "twice"])
def test_what_the_reference_computes_raises(of):
    """Forward and second derivatives are the reference's, which sums over the whole buffer: they raise."""
    x = bags(LENGTHS).values
    of_sum = lambda x: summed(x, LENGTHS)
    calls = {
        "forward": lambda x: torch.func.jvp(of_sum, (x,), (x,)),
        "twice": lambda x: torch.func.grad(lambda x: torch.func.grad(of_sum)(x).sum())(x),
    }
    with pytest.raises(NotImplementedError, match="no fixed order"):
        fr.invariant(calls[of])(x)

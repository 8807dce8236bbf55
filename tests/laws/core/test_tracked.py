"""is_tracked sees every way in which torch can request a derivative, and ignores constants."""

import functools

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from funcrec.core._tracked import has_tracked, is_tracked, reading

ONES = torch.ones(2)


def under_grad(f):
    torch.func.grad(lambda x: (f(x), x.sum())[1])(ONES)


def under_jvp(f):
    torch.func.jvp(lambda x: (f(x), x)[1], (ONES,), (ONES,))


def under_dual(f):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(ONES, ONES))


FOLLOWED = {"autograd": lambda f: f(ONES.clone().requires_grad_()), "grad": under_grad, "jvp": under_jvp,
    "dual": under_dual}  # fmt: skip
INSIDE = {
    "nothing": lambda f: f(ONES),
    "grad": under_grad,
    "jvp": under_jvp,
    "vmap": lambda f: torch.func.vmap(lambda x: (f(x), x)[1])(ONES),
}


# torch cannot nest this pair of transforms
NESTED = [(o, i) for o in FOLLOWED for i in INSIDE if (o, i) != ("dual", "jvp")]


@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_a_followed_tensor_is_tracked_at_every_depth(outer, inner):
    """A tensor that an outer transform tracks is tracked inside an inner transform. So are values computed from the
    tensor."""
    seen = []
    FOLLOWED[outer](
        lambda x: INSIDE[inner](lambda y: seen.extend([is_tracked(x), is_tracked(x * y), is_tracked(x * 2)]))
    )
    assert seen == [True] * 3


@pytest.mark.parametrize("outer", FOLLOWED)
def test_constants_are_not_tracked(outer):
    """Inside a transform, constants, detached values and integers are not tracked. With grad mode off, autograd
    tracks nothing."""
    seen = []

    def look(x):
        seen.extend([is_tracked(ONES), is_tracked(x.detach()), is_tracked(torch.ones(2) * 3), is_tracked(x.long())])
        with torch.no_grad():
            seen.append(outer in ("autograd", "grad") and is_tracked(x))

    FOLLOWED[outer](look)
    assert seen == [False] * 5


def test_a_tree_is_tracked_by_any_leaf():
    """One tracked leaf makes a tree tracked. Leaves that are no tensors do not count."""
    assert has_tracked({"a": [ONES, 1.0, "x"]}, ONES.clone().requires_grad_())
    assert not has_tracked({"a": [ONES, 1.0, "x", None]})


def scaled(weights, x):
    return x * weights["w"] + weights["list"][0]


class Learned:
    def __init__(self, weights):
        self.weights = weights

    def __call__(self, x):
        return scaled(self.weights, x)


def test_what_a_function_reads_is_found():
    """reading finds the tensors that a function reads in addition to its arguments: in a dict, an object, a partial and
    a closure."""
    weights = {"w": torch.ones(2), "list": [torch.zeros(2)]}
    for f in (lambda x: scaled(weights, x), functools.partial(scaled, weights), Learned(weights)):
        out, found = reading(f, ONES)
        assert [id(x) for x in found.tensors] == [id(weights["w"]), id(weights["list"][0])]
        assert torch.equal(out, ONES)
    assert [id(x) for x in reading(lambda x: weights["w"], ONES)[1].tensors] == [id(weights["w"])]
    assert reading(lambda x: (x + 1) * x, ONES)[1].tensors == ()


def test_two_runs_are_told_apart():
    """Two runs of a function are the same if their operations, numbers and tensors are the same. The shapes of tensors
    count. The values of tensors do not count."""
    a, b = torch.ones(2), torch.ones(2)
    held = {"n": 1.0, "w": a, "array": np.ones(2), "flip": False}
    ends = lambda x, z: x - z if held["flip"] else z - x
    run = lambda: reading(lambda x: ends(x, x * held["n"] + held["w"] - torch.tensor(held["array"])), ONES)[1]
    before = run()
    a.fill_(3.0)
    assert run().is_same(before)
    for name, other in (("n", 1), ("n", -0.0), ("n", float("nan")), ("w", b), ("array", np.zeros(2)), ("flip", True)):
        was, held[name] = held[name], other
        assert not run().is_same(before) and run().is_same(run())
        held[name] = was
    a.resize_(1)
    assert not run().is_same(before)

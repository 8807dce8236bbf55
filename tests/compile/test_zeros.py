"""Zeros without memory count as zeros in compiled programs. torch makes such zeros for forward derivatives."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from programs.as_staged import staged_only

import funcrec as fr

FEATURES = (fr.FeatureConfig("clicked", table="item"),)
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 1], [2], [1, 3, 3]]})
LOSSES = {
    "square": lambda logits: (logits - 1).square().mean(),
    "softplus": lambda logits: F.softplus(logits).sum(),
    "bce": lambda logits: F.binary_cross_entropy_with_logits(logits, torch.tensor([1.0, 0.0, 1.0], dtype=logits.dtype)),
}


def zeros(*size, dtype=torch.float32):
    return torch._efficientzerotensor(size, dtype=dtype)


ORDERS = {
    "square": torch.func.hessian,
    "softplus": lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    "bce": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [("square", torch.float64), ("softplus", torch.float32), ("bce", torch.float64)]
)
def test_second_derivatives_of_a_gradient_of_a_table(name, dtype):
    """The second derivative of a gradient of rows is the same in three orders: forward over reverse, reverse over
    forward and forward over forward. jit(d²f) = d²f, in one order for each loss, compiled for one and staged
    for the others."""
    table = torch.arange(12.0, dtype=dtype).view(4, 3) / 10
    w = torch.tensor([0.3, -0.2, 0.5], dtype=dtype)

    def loss(params, ids):
        return LOSSES[name](fr.lookup(params.tables, ids, FEATURES)["clicked"] @ params.dense["w"])

    def f(w):
        grads = fr.value_and_grad(loss)(fr.Params({"item": table}, {"w": w}), IDS)[1]
        return grads.tables["item"].to_dense().tanh().sum()

    expected = torch.func.jacrev(torch.func.jacrev(f))(w)
    with contextlib.nullcontext() if name == "bce" else staged_only():
        jitted = fr.jit(ORDERS[name](f))(w)
    for found in (*(order(f)(w) for order in ORDERS.values()), jitted):
        torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)


MADE = {
    "a sum": lambda x: x + zeros(3),
    "a function": lambda x: x * zeros(3).exp(),
    "a product": lambda x: x * zeros(3),
    "an output": lambda x: zeros(3),
    "a view": lambda x: zeros(3, 3).t()[1:] + x,
    "a write": lambda x: zeros(3).clone().add_(x),
    "bools": lambda x: torch.where(zeros(3, dtype=torch.bool), x, x + 1),
    "a tangent": lambda x: torch.func.jvp(lambda y: y.exp() * y, (x,), (zeros(3),))[1],
}


def test_zeros_that_a_program_makes():
    """jit(f)(x) = f(x) where f makes zeros without memory."""
    x = torch.arange(3.0)
    found = fr.jit(lambda x: [f(x) for f in MADE.values()])(x)
    for name, y in zip(MADE, found, strict=True):
        expected = MADE[name](x)
        assert torch.equal(y, torch.zeros(3) if expected._is_zerotensor() else expected), name
        assert not y._is_zerotensor() and y.data_ptr(), name


def test_zeros_that_a_program_is_given():
    """An argument that is zeros without memory counts as zeros: in the first call, in later calls, and donated."""
    f = fr.jit(lambda x, y: x.exp() + y)
    ones, x = torch.ones(3), torch.arange(3.0)
    assert torch.equal(f(zeros(3), x), ones + x)
    assert torch.equal(f(x, zeros(3)), x.exp())
    assert torch.equal(f(zeros(3), zeros(3)), ones)
    add = fr.jit(lambda state, i: state.index_put((i,), state[i] + 1), donate=("state",))
    assert torch.equal(add(zeros(3), torch.tensor([1])), torch.tensor([0.0, 1.0, 0.0]))


def test_zeros_that_a_program_closes_over():
    """A closed-over tensor that is zeros without memory raises, because later calls could not read its values."""
    closed = zeros(3)
    with pytest.raises(ValueError, match="a tensor that is closed over is not there yet"):
        fr.jit(lambda x: x + closed)(torch.ones(3))


def test_members_of_a_second_derivative():
    """jit(vmap(f'')) = vmap(f''), even where the zeros of a member are reshaped together with values that all members
    share."""
    mask, w, x = torch.tensor([True, False, True]), torch.arange(3.0), torch.ones(2, 2)

    def f(v):
        return torch.where(mask, w * v[0] / 2, w * v[0]).sum() * v.sum()

    func = torch.func
    every = lambda x: [func.vmap(order(f))(x) for order in ORDERS.values()]
    torch.testing.assert_close(fr.jit(every)(x), every(x))


def test_views_of_zeros_are_staged():
    """A view of zeros without memory has the view's shape and values, in eager and in compiled programs."""
    takes = [lambda z: z.view(3, 2), lambda z: z.reshape(6), lambda z: z.as_strided((2,), (1,))]
    made = lambda xs: [take(zeros(2, 3)) + x for take, x in zip(takes, xs, strict=True)]
    xs = [torch.arange(1.0, 7).view(3, 2), torch.arange(1.0, 7), torch.arange(1.0, 3)]
    for got in (fr.jit(made)(xs), made(xs)):
        assert all(torch.equal(y, x) for y, x in zip(got, xs, strict=True))

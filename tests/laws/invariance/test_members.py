"""A member of vmap has the bits of its own run where torch's vmap computes otherwise: 16 bits, numbers without dims."""

import functools

import pytest
import torch
from programs.invariant_models import noise
from torch.nn import functional as F

import funcrec as fr
from funcrec.testing import assert_trees_close

equal = functools.partial(assert_trees_close, rtol=0, atol=0)
grad, vmap = torch.func.grad, torch.func.vmap
X, NUMBERS = noise(3, 40), noise(3, seed=1)
NUMBERS[2] = X[2, 7].bfloat16() * (1 + 2**-10)  # it is equal to an element after its rounding to 16 bits

PAIRS = {  # of a tensor [N] and a number
    "equal": lambda x, c: torch.stack([x == c, x >= c, c < x, torch.ne(x, other=c)]),
    "where": lambda x, c: torch.where(x > 0, x, c) + torch.where(x > 0, input=c, other=x),
    "whole quotients": lambda x, c: torch.div(x, c, rounding_mode="trunc") + x // c + torch.fmod(x, c),
    "bounds": lambda x, c: x.clamp(min=c) + torch.clamp(x, c - 1, c) + torch.maximum(x, c),
    "three operands": lambda x, c: torch.addcmul(x, x, c, value=0.3) + torch.addcdiv(c, x, x + 9),
    "logarithms": lambda x, c: torch.xlogy(x.abs(), c.abs()) + torch.logaddexp(x, c) + torch.atan2(x, c),
    "in place": lambda x, c: x.clone().add_(c).mul_(c).div_(c),
    "operators": lambda x, c: (x * c + c) / (c * c + 1) - x**2 * 0.37,
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_number_has_the_digits_of_its_tensor(name, dtype):
    """A number without dims of more digits than its tensor is rounded to these, in a member as in its own run, also of
    a number that all members share; torch's vmap would let it decide the dtype."""
    x, c = X.to(dtype), NUMBERS.double() if dtype == torch.float32 else NUMBERS
    alone = fr.invariant(PAIRS[name])
    equal(fr.invariant(vmap(PAIRS[name]))(x, c), torch.stack([alone(*pair) for pair in zip(x, c, strict=True)]))
    shared = fr.invariant(vmap(PAIRS[name], in_dims=(0, None)))(x, c[2])
    equal(shared, torch.stack([alone(row, c[2]) for row in x]))
    assert alone(x[0], c[0]).dtype == PAIRS[name](x[0], c[0]).dtype
    if name not in ("equal", "whole quotients"):
        slope = grad(lambda x, c: PAIRS[name](x, c).float().sum(), argnums=(0, 1))
        want = [fr.invariant(slope)(*pair) for pair in zip(x, c, strict=True)]
        equal(fr.invariant(vmap(slope))(x, c), tuple(torch.stack(part) for part in zip(*want, strict=True)))


def test_a_whole_number_has_the_dtype_of_its_tensor():
    """A number i64[] of each member does not make i64 of a tensor of i32, which it does in torch's vmap."""
    x, c = torch.arange(12, dtype=torch.int32).view(3, 4), torch.tensor([3, 5, 7])
    for f in (lambda x, c: torch.where(x > 4, x, c), lambda x, c: x.clamp(min=c), lambda x, c: x // c):
        equal(fr.invariant(vmap(f))(x, c), torch.stack([fr.invariant(f)(*pair) for pair in zip(x, c, strict=True)]))


LAYERS = {  # of weights f[4, 5], f[4, 6] and f[6, 5]
    "a linear layer": lambda c, a, b: F.linear(a, b.mT, c[0]),
    "addmm": lambda c, a, b: torch.addmm(c, a, b, beta=0.3, alpha=3),
    "baddbmm": lambda c, a, b: torch.baddbmm(c[None], a[None], b[None], beta=0.3, alpha=3),
    "addmv": lambda c, a, b: torch.addmv(c[:, 0], a, b[:, 0], beta=0.3, alpha=3),
    "layer norm": lambda c, a, b: F.layer_norm(a, (6,), b[:, 0], b[:, 1]) + F.layer_norm(a, (6,), bias=b[:, 2]),
    "batch norm": lambda c, a, b: F.batch_norm(b, None, None, c[0], c[1], training=True),
    "instance norm": lambda c, a, b: F.instance_norm(a[None], weight=c[:, 0], bias=c[:, 1]),
    "group norm": lambda c, a, b: F.group_norm(a[None], 2, c[:, 0], c[:, 1]),
}


def with_gradients(f):
    return lambda *args: (f(*args), *grad(lambda *args: f(*args).square().float().sum(), argnums=(0, 1, 2))(*args))


def weights_of(dtype):
    return [noise(3, *s, seed=i).to(dtype) for i, s in enumerate(((4, 5), (4, 6), (6, 5)))]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_of_16_bits_rounds_at_the_same_places(name, dtype):
    """Biased products and normalisations have one rounding more or less in torch's vmap; here a member has the bits of
    its own run, with its gradients, whether inputs or weights or both are its own."""
    f, given = LAYERS[name], weights_of(dtype)
    both = with_gradients(f)
    alone = fr.invariant(both)
    for dims in ((0, 0, 0), (None, 0, None), (0, None, 0)):
        own = [x if d == 0 else x[0] for x, d in zip(given, dims, strict=True)]
        pick = lambda i, own=own, dims=dims: [x[i] if d == 0 else x for x, d in zip(own, dims, strict=True)]
        want = [alone(*pick(i)) for i in range(3)]
        got = fr.invariant(vmap(both, in_dims=dims))(*own)
        equal(got, tuple(torch.stack(part) for part in zip(*want, strict=True)))
    near = max(1e-5, 4 * torch.finfo(dtype).eps)  # six terms in another order; torch rounds 16 bits more than once
    assert_trees_close(alone(*pick(0))[0], f(*pick(0)), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_layers_have_the_eager_bits(dtype):
    """Members of all layers, with their gradients, have the eager bits in one compiled program."""
    c, a, b = weights_of(dtype)
    members = {n: fr.invariant(vmap(with_gradients(f), in_dims=(0, None, 0))) for n, f in LAYERS.items()}
    every = lambda c, a, b: {n: f(c, a, b) for n, f in members.items()}
    equal(fr.jit(every)(c, a[0], b), every(c, a[0], b))


def test_a_bias_of_beta_0_is_not_read():
    """With beta 0 a bias of NaN has no part in a product, in a member as in its own run; vmap multiplies it by 0."""
    bias, a, b = torch.full((3, 4, 5), torch.nan), noise(3, 4, 6), noise(3, 6, 5)
    for f in (torch.addmm, torch.Tensor.addmm, lambda c, a, b, **how: torch.addmv(c[:, 0], a, b[:, 0], **how)):
        ask = functools.partial(f, beta=0, alpha=2)
        got = fr.invariant(vmap(ask))(bias, a, b)
        equal(got, torch.stack([fr.invariant(ask)(*x) for x in zip(bias, a, b, strict=True)]))
        assert got.isfinite().all()

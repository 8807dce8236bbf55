"""Extrema, remainders and orders under invariant: zeros of both signs, vast quotients and equal numbers included."""

import functools
import itertools
import math
import random

import pytest
import torch
from torch.func import vmap

import funcrec as fr
from funcrec.mesh import bits_of

SEED = 0
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, -7.3, 5.4, math.inf, -math.inf, math.nan, 1e-40, 3e38, 1e10]
F = torch.nn.functional


def bits(x):
    """Return the bits, and one number for all NaNs."""
    return torch.where(x.isnan(), 7, bits_of(x).long()) if x.is_floating_point() else x


PAIRS = {
    "maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax, "fmin": torch.fmin,
    "clamp": lambda x, y: x.clamp(y, y + 1), "clamp of a number": lambda x, y: x.clamp(0, 3),
    "times 0": lambda x, y: 1 / (0 * x),
    "clamp_min": lambda x, y: 1 / x.clamp_min(0), "clamp_max": lambda x, y: 1 / x.clamp_max(0),
    "fmod": torch.fmod, "fmod of a number": lambda x, y: x.fmod(0.3), "remainder": torch.remainder,
    "remainder of a number": lambda x, y: 0.3 % y, "floor_divide": torch.floor_divide,
    "floor": lambda x, y: torch.div(x, 0.3, rounding_mode="floor"), "relu": lambda x, y: 1 / F.relu(x),
}  # fmt: skip


def pairs_of(dtype):
    """Return two vectors of all pairs of NUMBERS."""
    numbers = torch.tensor(NUMBERS, dtype=torch.float64).to(dtype)
    return [x.contiguous() for x in torch.cartesian_prod(numbers, numbers).unbind(1)]


def test_a_number_has_its_bits_at_any_place():
    """Functions of two numbers have for each pair the bits that they have alone, in a view with gaps, in a member of
    vmap and compiled; and torch's values."""
    given = {d: pairs_of(d) for d in (torch.float32, torch.float64, torch.bfloat16)}
    every = lambda x, y: {n: f(x, y) for n, f in PAIRS.items()}
    fast = fr.jit(lambda given: [fr.invariant(every)(*xs) for xs in given])([*given.values()])
    for (dtype, (x, y)), compiled in zip(given.items(), fast, strict=True):
        usual = (x.abs() > 0.1) & (x.abs() < 9) & (y.abs() > 0.1) & (y.abs() < 9)
        alone = [fr.invariant(every)(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        for name, f in PAIRS.items():
            want = fr.invariant(f)(x, y)
            if dtype != torch.bfloat16:  # torch's own quotients of 16 bits are rounded before the floor
                torch.testing.assert_close(want[usual], f(x, y)[usual], rtol=1e-6, atol=1e-6)
            gaps = fr.invariant(f)(torch.stack([x, x], 1)[:, 0], torch.stack([y, y], 1)[:, 0])
            member = fr.invariant(vmap(f))(torch.stack([x, x]), torch.stack([y, y]))[1]
            for got in (torch.cat([a[name] for a in alone]), gaps, member, compiled[name]):
                assert torch.equal(bits(got), bits(want)), (name, dtype)


def test_remainders_are_exact():
    """fmod is C's for quotients of every size, in f64 and f32; a remainder of it has the sign of the divisor."""
    draw = random.Random(SEED)
    number = lambda least, most: draw.choice([-1, 1]) * (draw.random() + 1e-3) * 2.0 ** draw.randint(least, most)
    for dtype, least, most in ((torch.float64, -1074, 1022), (torch.float32, -149, 127)):
        x, y = (torch.tensor([number(least, most) for _ in range(4000)], dtype=torch.float64) for _ in range(2))
        x, y = x.to(dtype), torch.where(y.to(dtype) == 0, 1.0, y).to(dtype)
        want = torch.tensor([math.fmod(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)], dtype=dtype)
        assert torch.equal(fr.invariant(torch.fmod)(x, y), want)
        got = fr.invariant(torch.remainder)(x, y)
        assert bool(((got == 0) | ((got < 0) == (y < 0))).all())


REDUCED = {
    "amax": lambda x: x.amax(1), "amin": lambda x: x.amin(1), "max": lambda x: x.max(1)[0],
    "its place": lambda x: x.max(1)[1], "min": lambda x: x.min(1)[0], "aminmax": lambda x: x.aminmax(dim=1)[1],
    "sort": lambda x: x.sort(1)[0], "argsort": lambda x: x.argsort(1), "descending": lambda x: x.sort(1, True)[1],
    "scatter_reduce": lambda x: x.scatter_reduce(1, torch.zeros_like(x, dtype=torch.int64), x, "amax"),
    "logsumexp": lambda x: x.logsumexp(1), "instance norm": lambda x: F.instance_norm(x.flatten(1)[:, None]),
    "cummax": lambda x: x.cummax(1)[0], "topk": lambda x: x.topk(3, 1)[1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), [*itertools.product(REDUCED, [(37, 7), (37, 5, 3)])])
def test_a_row_has_its_bits_in_any_memory(name, shape):
    """Extrema and orders of rows, most of whose numbers are equal, zeros of both signs among them, have the same bits
    alone, in other batches, for other strides, and as members of vmap."""
    g, f = torch.Generator().manual_seed(SEED), REDUCED[name]
    x = torch.randint(-2, 1, shape, generator=g).float() * torch.randint(0, 2, shape, generator=g).sub(0.5).sign()
    want = bits(fr.invariant(f)(x))
    for y in (x, x.mT.contiguous().mT, x.movedim(0, -1).contiguous().movedim(-1, 0)):
        assert torch.equal(bits(fr.invariant(f)(y)), want)
        assert torch.equal(bits(fr.invariant(f)(y[20:])), want[20:])
        assert torch.equal(torch.cat([bits(fr.invariant(f)(y[i : i + 1])) for i in range(len(y))]), want)
    one = fr.invariant(vmap(lambda row: f(row[None])[0]))(x)
    both = fr.invariant(vmap(f))(torch.stack([x.flip(0), x]))[1]
    assert torch.equal(bits(one), want) and torch.equal(bits(both), want)


def test_equal_numbers_stay_in_their_order():
    """A sort is stable, whichever sort the processor has."""
    x = torch.zeros(3, 200).index_fill(1, torch.arange(0, 200, 3), -0.0)
    assert torch.equal(fr.invariant(torch.argsort)(x), torch.arange(200).expand(3, 200))
    assert torch.equal(fr.invariant(lambda x: torch.sort(x, descending=True)[1])(x), torch.arange(200).expand(3, 200))


def test_erfinv_is_torchs_up_to_its_last_bits():
    """erfinv is near to torch's from -1 to 1 and near its ends, keeps the sign of zero, and is infinite at the ends."""
    x = torch.cat([torch.linspace(-1, 1, 2001).double(), 1 - 2.0 ** -torch.arange(1, 54).double()])
    f = fr.invariant(torch.erfinv)
    torch.testing.assert_close(f(x), torch.erfinv(x), rtol=2e-15, atol=0)
    inner = x.float()[x.float().abs() < 1]
    torch.testing.assert_close(f(inner), torch.erfinv(inner.double()).float(), rtol=0, atol=0)
    assert f(torch.tensor([1.0, -1.0])).tolist() == [math.inf, -math.inf]
    assert f(torch.tensor([1.5, -2.0])).isnan().all() and torch.signbit(f(torch.tensor([-0.0]))).all()
    assert torch.equal(fr.jit(f)(x), f(x))


def test_values_are_read_inside():
    """Inside of invariant a value can be read: a function chooses the size that it chooses outside."""
    tables, ids = {"t": torch.arange(200.0).view(50, 4) / 7}, fr.KeyedJaggedTensor.from_lists({"t": [[1, 2], [2], []]})
    loss = lambda p, b: fr.lookup(p.tables, b.ids, [fr.FeatureConfig("t", table="t")]).values.square().sum()
    call = functools.partial(fr.per_example_grads(loss), fr.Params(tables, {}), fr.Batch(ids, torch.ones(3)))
    fr.testing.assert_trees_close(fr.invariant(call)(), call(), rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="reads a tensor's value on the host"):
        fr.jit(fr.invariant(lambda x: x if x.sum() > 0 else -x))(torch.ones(3))


@pytest.mark.parametrize("f", [F.hardtanh, F.relu6, lambda x: F.hardtanh(x, -0.5, 5.4)])
def test_a_hard_tangent_has_one_value_and_one_derivative(f):
    """Values and derivatives are those of an element alone, and those of a program: at NaN and at zeros, too."""
    x = torch.tensor(NUMBERS * 3)
    both = lambda x: (f(x), torch.func.grad(lambda x: f(x).sum())(x))
    for got, want, alone in zip(fr.jit(fr.invariant(both))(x), fr.invariant(both)(x), zip(
        *(fr.invariant(both)(x[i : i + 1]) for i in range(len(x))), strict=True
    ), strict=True):  # fmt: skip
        assert bits(got).equal(bits(want))
        assert bits(torch.cat(alone)).equal(bits(want))

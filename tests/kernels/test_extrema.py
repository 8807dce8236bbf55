"""The extrema of bags, their places, and the transpose of the choice, against a loop over bags."""

import itertools

import pytest
import torch
from funcrec.kernels import ops
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import funcrec as fr
from funcrec.jagged import _primitives as primitives
from funcrec.testing import assert_trees_close, check_adjoint

OFFSETS = torch.tensor([0, 3, 3, 4, 9])
NAN, INF = torch.nan, torch.inf
COLUMN = torch.tensor([1.0, 2, 2, NAN, -0.0, 0.0, NAN, NAN, INF, 7])


def loop(x, offsets, greatest):
    """Return (extrema, places) of [N] by Python's own comparisons: the first NaN, else the first of the best."""
    out, places = [], []
    for a, b in itertools.pairwise(offsets.tolist()):
        bag = x[a:b].tolist()
        nans = [i for i, v in enumerate(bag) if v != v]
        best = nans[0] if nans else bag.index(max(bag) if greatest else min(bag)) if bag else None
        places.append(len(x) if best is None else a + best)
        out.append(bag[best] if bag else (-INF if greatest else INF))
    return torch.tensor(out), torch.tensor(places)


@pytest.mark.parametrize("implementation", ["reference", "cpp"])
@pytest.mark.parametrize("greatest", [True, False])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64, 257, 300])
def test_the_first_of_equal_values_wins_and_nan_beats_all(implementation, greatest, columns):
    """The value and its place are those of a loop over bags, in every column of any width: the first NaN, or else the
    first best value. The padding, which holds NaN or the best number, is not read."""
    generator = torch.Generator().manual_seed(columns)
    x = COLUMN[torch.randint(0, len(COLUMN), (12, columns), generator=generator)]
    x[9:] = COLUMN[torch.randint(6, 9, (3, columns), generator=generator)]
    out, places = ops.bag_extrema(x, OFFSETS, greatest, True, implementation=implementation)
    for j in range(columns):
        assert_trees_close((out[:, j], places[:, j]), loop(x[:, j], OFFSETS, greatest), rtol=0, atol=0)
    alone, none = ops.bag_extrema(x, OFFSETS, greatest, False, implementation=implementation)
    assert_trees_close(alone, out, rtol=0, atol=0)
    assert none.shape == (0,)


@pytest.mark.parametrize("implementation", ["reference", "cpp"])
def test_the_transpose_is_of_the_choice(implementation):
    """⟨x[places], d⟩ = ⟨x, put(d)⟩. Nothing is added at a place outside its bag, of an empty bag or beyond the
    buffer."""
    x, d = torch.arange(24.0).reshape(12, 2), torch.arange(1.0, 9).reshape(4, 2)
    places = torch.tensor([[2, 0], [12, 12], [3, 3], [8, 4]])
    pick = lambda x: x.gather(0, places.clamp(max=11)) * (places < 12)
    put = lambda d: ops.bag_extrema_transpose(d, OFFSETS, places, 12, implementation=implementation)
    check_adjoint(pick, put, x)
    wild = torch.tensor([[3, -1], [0, 2**62], [3, -(2**63)], [3, 9]])
    got = ops.bag_extrema_transpose(d, OFFSETS, wild, 12, implementation=implementation)
    assert got.nonzero().tolist() == [[3, 0]] and got[3, 0] == 5.0


def points():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 12, 3, generator=generator, dtype=torch.float64)


EXTREMUM = {
    name: lambda x, offsets=OFFSETS, greatest=greatest: primitives.bag_extrema(x, offsets, greatest)[
        torch.tensor([0, 2, 3])
    ]
    for name, greatest in (("max", True), ("min", False))
}


@pytest.mark.parametrize("how", EXTREMUM)
def test_a_map_over_members_is_each_members_own(how):
    """vmap over values, over offsets, over both, and over cotangents alone, gives each member's value and gradient."""
    x, offsets = points(), torch.stack([OFFSETS, torch.tensor([0, 1, 5, 6, 12])])
    f = lambda x, o: EXTREMUM[how](x, o).square().sum()
    both = lambda x, o: (f(x, o), torch.func.grad(f)(x, o))
    for dims, pick in (((0, None), lambda i: (x[i], OFFSETS)), ((None, 0), lambda i: (x[0], offsets[i])),
                       ((0, 0), lambda i: (x[i], offsets[i]))):  # fmt: skip
        given = (x if dims[0] == 0 else x[0], offsets if dims[1] == 0 else OFFSETS)
        want = [both(*pick(i)) for i in range(2)]
        assert_trees_close(vmap(both, dims)(*given), tuple(map(torch.stack, zip(*want, strict=True))))
    _, pull = torch.func.vjp(EXTREMUM[how], x[0])
    d = torch.randn(5, 3, 3, dtype=torch.float64)
    assert_trees_close(vmap(pull)(d)[0], torch.stack([pull(y)[0] for y in d]))


@pytest.mark.parametrize("how", EXTREMUM)
def test_derivatives_of_any_order_and_mode(how):
    """Forward and reverse derivatives agree with each other, and they and their derivatives agree with the
    reference's."""
    x, t = points()
    f = lambda x: EXTREMUM[how](x).sin()
    with ops.using("reference"):
        want = jacrev(f)(x), hessian(lambda x: f(x).sum())(x), jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))
    got = jacrev(f)(x), hessian(lambda x: f(x).sum())(x), jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))
    assert_trees_close(got, want)
    assert_trees_close(jacfwd(f)(x), want[0])
    y = x.clone().requires_grad_()
    torch.autograd.gradgradcheck(f, y)


@pytest.mark.parametrize("how", EXTREMUM)
def test_a_compiled_gradient_is_the_eager_one(how):
    """fr.jit of the value and of its gradient gives the eager bits."""
    x = points()[0]
    both = lambda x: (EXTREMUM[how](x), torch.func.grad(lambda y: EXTREMUM[how](y).sum())(x))
    assert all(map(torch.equal, fr.jit(both)(x), both(x)))


def test_torch_compile_has_the_eager_gradient():
    """torch.compile traces bag_reduce and its gradient without graph breaks, and gives the eager values."""
    x, f = points()[0].float(), lambda x: fr.bag_reduce(fr.JaggedTensor(x, OFFSETS), "max")[torch.tensor([0, 2, 3])]
    given = [x.clone().requires_grad_() for _ in range(2)]
    traced = torch.compile(f, fullgraph=True, backend="aot_eager")  # fr.jit compiles both by Inductor, above
    outs = [g(y) for g, y in zip((traced, f), given, strict=True)]
    for out in outs:
        out.sum().backward()
    assert torch.equal(*outs) and torch.equal(given[0].grad, given[1].grad)


def test_wrong_arguments_are_refused_before_any_work():
    """Dtypes without an order, and places of another shape, raise in four parts."""
    with pytest.raises(TypeError, match="no extrema"):
        ops.bag_extrema(torch.ones(3, dtype=torch.complex64), OFFSETS, True, True, implementation="cpp")
    with pytest.raises(ValueError, match="no boundary"):
        ops.bag_extrema(torch.ones(3), OFFSETS[:0], True, True, implementation="cpp")
    for places in (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(4, 2)):
        with pytest.raises(ValueError, match="`places` do not match"):
            ops.bag_extrema_transpose(torch.ones(4, 2), OFFSETS, places, 9, implementation="cpp")

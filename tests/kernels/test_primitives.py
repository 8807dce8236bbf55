"""funcrec.tables._primitives: the C++ kernels under every transform of torch.func, against the reference, in f64.

    transform(pooled_lookup(..., implementation="cpp")) = transform(the reference's pooled_lookup)

Shapes: B bags, C columns, N ids, R rows, D dim.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from funcrec.kernels.forms import Feature
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from funcrec.tables import _primitives as primitives
from funcrec.testing import assert_trees_close

F64 = torch.float64
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
NUM_BAGS = 3
LOOKUPS = {  # features over two tables of dims 2 and 3, with two buffers
    "unweighted": [Feature(0, 0, 0, 0, False, False, 0), Feature(1, 1, 3, 0, True, False, 2)],
    "weighted": [Feature(0, 0, 0, 0, True, True, 0), Feature(1, 1, 3, 2, False, True, 2)],
    "mixed": [
        Feature(1, 0, 0, 0, False, True, 4), Feature(0, 1, 3, 2, True, False, 0), Feature(0, 0, 0, 0, True, True, 2),
    ],
    "in blocks": [
        Feature(0, 0, 0, 0, True, True, 0), Feature(1, 1, 3, 0, False, False, 2),
        Feature(1, 0, 3, 0, False, True, 5), Feature(0, 1, 0, 2, False, False, 8),
    ],
}  # fmt: skip
BLOCKS = {"in blocks": 2}


# vmap allows no random numbers inside, so the constants are cached
@functools.cache
def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


ROWS = [torch.tensor([0, 3, 3, -1, 2, 0, 1, 3, 9, 0]), torch.tensor([1, 1, 7, 2, 0, 0, 2, 1, 2, -9], dtype=torch.int32)]
OFFSETS = torch.tensor([0, 2, 2, 5, 5, 8, 9])  # the last id is padding


def point(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return two tables, and weights that are NaN in the padding."""
    weights = torch.cat([noise(9, seed=seed + 2), torch.full((1,), torch.nan, dtype=F64)])
    return noise(4, 2, seed=seed), noise(3, 3, seed=seed + 1), weights


def lookup_of(name: str, implementation: str) -> Callable[..., Tensor]:
    """Return a function (table, table, weights) -> [B, C]."""
    features, blocks = LOOKUPS[name], BLOCKS.get(name, 1)
    given = None if not any(f.weighted for f in features) else slice(None)
    return lambda a, b, w: primitives.pooled_lookup(
        [a, b], ROWS, OFFSETS, None if given is None else w, features, NUM_BAGS, blocks, implementation=implementation
    )


def loss_of(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function (table, table, weights) -> a number, with derivatives of every order."""
    return lambda *x: (f(*x).sin() * f(*x)).sum()


def penalty(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function: the squared length of the gradient with respect to the weights and a table."""
    return lambda *x: sum(g.square().sum() for g in grad(loss, argnums=(0, 2))(*x))


def stacked(n: int = 3) -> tuple[Tensor, ...]:
    return tuple(torch.stack(xs) for xs in zip(*(point(10 * i) for i in range(n))))


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], object]] = {  # f: (table, table, weights) -> [B, C]
    "the lookup": lambda f: f(*point()),
    "grad": lambda f: grad(loss_of(f), argnums=(0, 1, 2))(*point()),
    "grad in the weights alone": lambda f: grad(lambda w: loss_of(f)(*point()[:2], w))(point()[2]),
    "vjp": lambda f: (lambda out, back: (out, back(noise(*out.shape, seed=7))))(*vjp(f, *point())),
    "jvp": lambda f: jvp(f, point(), point(20)),
    "jvp in one table": lambda f: jvp(lambda b: f(point()[0], b, point()[2]), (point()[1],), (point(20)[1],)),
    "jvp in the weights": lambda f: jvp(lambda w: f(*point()[:2], w), (point()[2],), (point(20)[2],)),
    "vmap": lambda f: vmap(f)(*stacked()),
    "vmap over one argument": lambda f: vmap(f, in_dims=(None, 0, None))(point()[0], stacked()[1], point()[2]),
    "vmap at another dimension": lambda f: vmap(f, in_dims=(2, None, 1))(
        stacked()[0].movedim(0, 2), point()[1], stacked()[2].t()
    ),
    "vmap of vmap": lambda f: vmap(vmap(f, in_dims=(0, 0, None)), in_dims=(None, None, 0))(*stacked()),
    "vmap of grad": lambda f: vmap(grad(loss_of(f), argnums=(0, 1, 2)))(*stacked()),
    "grad of vmap": lambda f: grad(lambda *x: vmap(loss_of(f))(*x).square().sum(), argnums=(0, 1, 2))(*stacked()),
    "vmap of jvp": lambda f: vmap(lambda *t: jvp(f, point(), t)[1])(*stacked()),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1, 2))(*point()),
    "jacrev": lambda f: jacrev(f, argnums=(0, 1, 2))(*point()),
    "hessian": lambda f: hessian(loss_of(f), argnums=(0, 1, 2))(*point()),
    "jvp of jvp": lambda f: jvp(lambda *x: jvp(f, x, point(20))[1], point(), point(30)),
    "jvp of jvp of a loss": lambda f: jvp(lambda *x: jvp(loss_of(f), x, point(20))[1], point(), point(30)),
    "jvp of grad": lambda f: jvp(grad(loss_of(f), argnums=(0, 1, 2)), point(), point(20)),
    "grad of jvp": lambda f: grad(lambda *x: jvp(loss_of(f), x, point(20))[1], argnums=(0, 1, 2))(*point()),
    "grad of grad": lambda f: grad(penalty(loss_of(f)), argnums=(0, 1, 2))(*point()),
    "jvp of grad of grad": lambda f: jvp(grad(penalty(loss_of(f)), argnums=2), point(), point(20)),
    "grad of the penalty's penalty": lambda f: grad(penalty(penalty(loss_of(f))), argnums=2)(*point()),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_pooled_lookup_under_transforms(name, transform):
    """Every nesting of transforms gives the same values through the kernels and through the reference."""
    got, want = (TRANSFORMS[transform](lookup_of(name, i)) for i in ("cpp", "reference"))
    assert_trees_close(got, want, **CLOSE)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gather_rows_under_transforms(transform):
    """gather_rows has the derivatives and the vmap of the reference, even with rows outside the table."""
    ids = torch.tensor([0, 3, 3, -1, 9, 1])
    take = lambda i: lambda a, b, w: primitives.gather_rows(a, ids, implementation=i) * w[:6, None] * b[0, 0]
    got, want = (TRANSFORMS[transform](take(i)) for i in ("cpp", "reference"))
    assert_trees_close(got, want, **CLOSE)


@pytest.mark.parametrize("name", LOOKUPS)
def test_autograd_agrees(name):
    """Tensor.backward and a second backward through the kernels give the reference's values."""

    def run(implementation: str):
        x = [t.clone().requires_grad_() for t in point()]
        loss = loss_of(lookup_of(name, implementation))(*x)
        used = x if any(f.weighted for f in LOOKUPS[name]) else x[:2]
        first = torch.autograd.grad(loss, used, create_graph=True)
        return loss, first, torch.autograd.grad(sum(g.square().sum() for g in first), used)

    got, want = (tree_map(torch.Tensor.detach, run(i)) for i in ("cpp", "reference"))
    assert_trees_close(got, want, **CLOSE)


@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_and_offsets_may_carry_the_batch(name):
    """vmap over ids and offsets, with grad inside, equals a loop over the members."""
    rows = [torch.stack([r, r.roll(1)]) for r in ROWS]
    offsets = torch.stack([OFFSETS, OFFSETS.clamp(max=7)])

    def one(implementation: str):
        at = lambda r, s, o: grad(lambda a, b, w: primitives.pooled_lookup(
            [a, b], [r, s], o, w, LOOKUPS[name], NUM_BAGS, implementation=implementation
        ).sin().sum(), argnums=(0, 1, 2))(*point())  # fmt: skip
        return at

    want = [one("reference")(r, s, o) for r, s, o in zip(*rows, offsets)]
    got = vmap(one("cpp"))(*rows, offsets)
    assert_trees_close(list(got), [torch.stack(x) for x in zip(*want)], **CLOSE)


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_derivatives_are_those_of_finite_differences(name, implementation):
    """gradcheck and gradgradcheck pass, forward and reverse. The two implementations are therefore not wrong
    together."""
    x = tuple(t.clone().requires_grad_() for t in point())
    f = lookup_of(name, implementation)
    f = (
        f
        if any(g.weighted for g in LOOKUPS[name])
        else lambda a, b, w: lookup_of(name, implementation)(a, b, w) * w[:9].sum()
    )
    torch.autograd.gradcheck(f, x, check_forward_ad=True)
    torch.autograd.gradgradcheck(f, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_have_the_dtype_of_what_they_are_of(dtype):
    """The gradient of a 16- or 32-bit table has the table's dtype, within one rounding of the reference. A weight's
    gradient has the dtype of the weights."""
    tables, weights = [t.to(dtype) for t in point()[:2]], point()[2].float()
    run = lambda i: grad(lambda *x: lookup_of("mixed", i)(*x).square().sum(), argnums=(0, 1, 2))(*tables, weights)
    got, want = run("cpp"), run("reference")
    assert [g.dtype for g in got] == [dtype, dtype, torch.float32]
    assert_trees_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=4e-6)

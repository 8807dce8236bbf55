"""funcrec.jagged._primitives: under every transform of torch.func, the jagged kernels equal the reference in f64.

    transform(map by the C++ kernels) = transform(map by the reference)

Shapes: B bags, N values, C capacity, L places.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from funcrec.kernels import ops
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import funcrec as fr
from funcrec.jagged import _primitives as primitives
from funcrec.testing import assert_trees_close, check_adjoint

F64 = torch.float64
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
# ranges overlap
STARTS, LENGTHS = torch.tensor([4, 0, 3, 6, 1]), torch.tensor([2, 3, 0, 1, 2], dtype=torch.int32)
# offsets of 8 values, of which the last two are padding
OFFSETS = torch.tensor([0, 2, 2, 5, 6])
MAPS = {  # name: (the map of [8, 2] values, or of a [4, 2, 2] block)
    "take_ranges": lambda x: primitives.take_ranges(x, STARTS, LENGTHS, 10)[0],
    "to_padded": lambda x: primitives.to_padded(x, OFFSETS, 2, 3.0),
    "from_padded": lambda x: primitives.from_padded(x.reshape(4, 2, 2), OFFSETS, 7),
}
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "the map": lambda f: f(point()),
    "grad": lambda f: grad(loss_of(f))(point()),
    "vjp": lambda f: (lambda out, back: (out, back(noise(*out.shape, seed=7))))(*vjp(f, point())),
    "jvp": lambda f: jvp(f, (point(),), (point(2),)),
    "vmap": lambda f: vmap(f)(noise(3, 8, 2)),
    "vmap at the last dimension": lambda f: vmap(f, in_dims=2)(noise(8, 2, 3)),
    "vmap of vmap": lambda f: vmap(vmap(f, in_dims=1))(noise(3, 8, 4, 2)),
    "vmap of grad": lambda f: vmap(grad(loss_of(f)))(noise(3, 8, 2)),
    "grad of vmap": lambda f: grad(lambda x: vmap(loss_of(f))(x).square().sum())(noise(3, 8, 2)),
    "vmap of jvp": lambda f: vmap(lambda t: jvp(f, (point(),), (t,))[1])(noise(3, 8, 2)),
    "jacfwd": lambda f: jacfwd(f)(point()),
    "jacrev": lambda f: jacrev(f)(point()),
    "hessian": lambda f: hessian(loss_of(f))(point()),
    "jvp of jvp": lambda f: jvp(lambda x: jvp(loss_of(f), (x,), (point(2),))[1], (point(),), (point(3),)),
    "jvp of grad": lambda f: jvp(grad(loss_of(f)), (point(),), (point(2),)),
    "grad of jvp": lambda f: grad(lambda x: jvp(loss_of(f), (x,), (point(2),))[1])(point()),
    "grad of grad": lambda f: grad(lambda x: grad(loss_of(f))(x).square().sum())(point()),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(loss_of(f)))(point()),
}


# vmap allows no random numbers inside, so the constants are cached
@functools.cache
def noise(*shape: int, seed: int = 0) -> Tensor:
    with temporarily_clear_interpreter_stack():  # the first call may be inside a vmap
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def point(seed: int = 0) -> Tensor:
    return noise(8, 2, seed=seed)


def loss_of(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function whose value is a number with derivatives of every order."""
    return lambda x: (f(x).sin() * f(x)).sum()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_maps_under_transforms(name, transform):
    """Every nesting of transforms gives the same values through the kernels and through the reference."""
    got = TRANSFORMS[transform](MAPS[name])
    with ops.using("reference"):
        want = TRANSFORMS[transform](MAPS[name])
    assert_trees_close(got, want, **CLOSE)


@pytest.mark.parametrize("name", MAPS)
def test_autograd_agrees(name):
    """Tensor.backward, a second backward and forward-mode autograd agree with finite differences."""
    x = point().clone().requires_grad_()
    torch.autograd.gradcheck(MAPS[name], (x,), check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(lambda x: loss_of(MAPS[name])(x), (x,))


@pytest.mark.parametrize("dtype", [F64, torch.int64])
def test_offsets_may_carry_the_batch(dtype):
    """vmap over values and boundaries equals a loop over values and boundaries, also for integers."""
    values, bounds = (noise(3, 8, 2) * 9).to(dtype), torch.stack([OFFSETS, OFFSETS.clamp(max=3), OFFSETS // 2])

    def each(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        taken, own = primitives.take_ranges(x, offsets[:-1], offsets.diff(), 9)
        return taken, own, primitives.to_padded(x, offsets, 2, -1), primitives.from_padded(x[:4, None], offsets, 5)

    want = [torch.stack(parts) for parts in zip(*(each(x, o) for x, o in zip(values, bounds)))]
    assert_trees_close(list(vmap(each)(values, bounds)), want)
    assert_trees_close(list(vmap(each, in_dims=(0, None))(values, OFFSETS)[:2]),
                       [torch.stack(parts) for parts in zip(*(each(x, OFFSETS)[:2] for x in values))])  # fmt: skip


def test_padding_carries_no_derivative():
    """NaN in the padding, and in the cotangents of padding, reaches no gradient."""
    x = torch.where(torch.arange(8)[:, None] < 6, point(), torch.nan)
    d = grad(lambda x: fr.JaggedTensor(x, OFFSETS)[[2, 0]].to_padded(3).square().sum())(x)
    assert bool(d.isfinite().all()) and bool((d[6:] == 0).all())
    out, back = vjp(lambda x: fr.JaggedTensor(x, OFFSETS)[[2, 0]].values, point())
    inside = torch.arange(out.shape[0])[:, None] < 5
    assert_trees_close(back(torch.where(inside, 1.0, torch.nan).expand(out.shape).to(F64)),
                       back(torch.where(inside, 1.0, 0.0).expand(out.shape).to(F64)))  # fmt: skip


def test_transposes_are_adjoint():
    """⟨take(x), y⟩ = ⟨x, takeᵀ(y)⟩. The transpose of to_padded is from_padded."""
    take, pad = MAPS["take_ranges"], lambda x: primitives.to_padded(x, OFFSETS, 2, 0)
    check_adjoint(take, lambda y: ops.take_ranges_transpose(y, STARTS, LENGTHS, 8), point())
    check_adjoint(pad, lambda y: primitives.from_padded(y, OFFSETS, 8), point())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_keep_their_dtype(dtype):
    """A 16-bit value that is taken 300 times gets a gradient in the value's dtype, summed in f32 and rounded once."""
    one = torch.ones(1, dtype=dtype)
    d = grad(lambda x: (primitives.take_ranges(x, torch.zeros(300, dtype=torch.int64),
                torch.ones(300, dtype=torch.int64),
                                               300)[0].float() * 0.01).sum())(one)  # fmt: skip
    assert_trees_close(d, (torch.full((300,), 0.01).to(dtype).float().sum()).to(dtype)[None])


@pytest.mark.parametrize("name", MAPS)
def test_jit_stages_the_kernels(name):
    """A compiled map and its compiled gradient equal the eager map and gradient."""
    f = MAPS[name]
    assert_trees_close(
        fr.jit(lambda x: (f(x), grad(loss_of(f))(x)))(point()), (f(point()), grad(loss_of(f))(point())), **CLOSE
    )


def test_torch_compile_traces_them():
    """torch.compile(fullgraph=True) of a map and of its gradient gives the eager values."""
    f = lambda x: fr.JaggedTensor(x, OFFSETS).to_padded(3)
    both = lambda x: (f(x), grad(loss_of(f))(x))
    assert_trees_close(torch.compile(both, fullgraph=True, backend="aot_eager")(point()), both(point()), **CLOSE)

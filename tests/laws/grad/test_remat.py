"""remat: values and derivatives are the function's own, under every transform; what is kept is less; what cannot be
right raises. The oracle is the function itself, in float64."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.as_staged import staged_only
from torch.utils.flop_counter import FlopCounterMode

import funcrec as fr
from funcrec.core import is_wrapped
from funcrec.testing import assert_trees_close, check_transforms

grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap
assert_close = functools.partial(assert_trees_close, rtol=1e-10, atol=1e-12)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, W, V, IDS = drawn(3, 2), drawn(2, 2, seed=1), drawn(2, 2, seed=2), torch.tensor([0, 2, 1, 1])
same = lambda f: f


def by_arguments(wrap):
    layer = wrap(lambda x, w: torch.tanh(x @ w))
    return lambda x, w: layer(layer(x, w), w * w).square().sum()


def by_closure(wrap):
    return lambda x, w: wrap(lambda x: torch.tanh(x @ w))(x * w.sum()).square().sum()


def by_parameter(wrap):
    """The closure has a tensor that autograd follows outside of the transform."""
    bias = drawn(2, seed=8).requires_grad_()
    return lambda x, w: wrap(lambda x: (x @ w + bias).sin())(x).sum()


def by_closure_alone(wrap):
    return lambda x, w: wrap(lambda: (torch.tanh(x @ w), w))()[0].square().sum()


def nested(wrap):
    inner = lambda x, w: wrap(lambda y: (y @ w).sin() * w.sum())(x)
    return lambda x, w: wrap(lambda x: inner(inner(x, w), w.cos()) * x)(x).square().sum()


def nested_by_argument(wrap):
    """The outer function closes over tensors and gives them to inner ones as arguments, two levels deep."""
    deepest = wrap(lambda y, w, b: (y @ w).sin() * b)
    inner = wrap(lambda y, w, b: deepest(y, w, b.cos()) * deepest(y, w * 2, b)[0])
    return lambda x, w: wrap(lambda y: inner(y, w, w.sum()) * x.sum() + inner(x, w, y.sum()))(x).square().sum()


def of_trees(wrap):
    def layer(tree, *, scale, skip=None):
        return {"y": (tree["x"] @ tree["w"]).sin() * scale, "same": tree["x"], "n": tree["n"] + 1, "none": skip}, 3

    def f(x, w):
        out, three = wrap(layer)({"x": x, "w": w, "n": torch.tensor(2)}, scale=2.0)
        return (out["y"] * out["n"] + out["same"]).square().sum() * three

    return f


def of_jagged(wrap):
    def layer(bags, w):
        return fr.JaggedTensor(bags.values @ w, bags.offsets), fr.bag_reduce(bags, "logsumexp")[[0, 2]]

    def f(x, w):
        bags, sums = wrap(layer)(fr.JaggedTensor.from_lengths(x.sin(), torch.tensor([2, 0, 1])), w)
        return fr.bag_reduce(bags, "sum").square().sum() + sums.sum()

    return f


def with_dropout(wrap):
    return lambda x, w: wrap(lambda x, key: fr.nn.dropout((x @ w).sin(), key, 0.5))(x, fr.key(3)).square().sum()


def with_lookup(wrap):
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 2, 1], [], [1]]})
    read = lambda x, weights: (
        fr.lookup(
            {"t": x},
            fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, None, ids.keys),
            [
                fr.FeatureConfig("a", table="t", weighted=True),
                fr.FeatureConfig("m", table="t", column="a", pooling="max"),
            ],
        ).values
    )
    return lambda x, w: (wrap(read)(x, w.flatten().sin()) * wrap(lambda: read(x, w.flatten()))().cos()).sum()


def inner_gradient(wrap):
    return lambda x, w: wrap(lambda x, w: grad(lambda x: (x @ w).sin().sum())(x) * w.sum())(x, w).square().sum()


def with_exchange(wrap):
    mesh = fr.Mesh.emulated(data=3)
    rank = lambda x, w: fr.psum(wrap(lambda x: fr.psum(x.sin() @ w, "data").cos())(x).square().sum(), "data")
    return fr.shard_map(rank, mesh=mesh, in_specs=(fr.P("data"), fr.P()), out_specs=fr.P())


LOSSES = {
    f.__name__: f
    for f in (by_arguments, by_closure, by_parameter, by_closure_alone, nested, nested_by_argument, of_trees,
              of_jagged, with_dropout, with_lookup, inner_gradient, with_exchange)
}  # fmt: skip


def by_autograd(f):
    def of(x, w):
        x, w = (t.clone().requires_grad_() for t in (x, w))
        first = torch.autograd.grad(f(x, w), (x, w), create_graph=True)
        return first, torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, w), allow_unused=True)

    return of


both = lambda f: grad(f, (0, 1))
squares = lambda f: lambda x, w: sum(g.square().sum() for g in both(f)(x, w))
along = lambda f: lambda x, w: jvp(f, (x, w), (w[0] * x, w + 1))
members = lambda f, *dims: lambda x, w: vmap(f, dims)(*(t if d is None else torch.stack([t, t.cos()])
                                                       for t, d in zip((x, w), dims, strict=True)))  # fmt: skip
TRANSFORMS = {
    "value": same,
    "grad": both,
    "grad of grad": lambda f: both(squares(f)),
    "grad of grad of grad": lambda f: both(squares(squares(f))),
    "jvp": along,
    "jvp of jvp": lambda f: along(lambda x, w: along(f)(x, w)[1]),
    "jvp of grad": lambda f: along(both(f)),
    "grad of jvp": lambda f: both(lambda x, w: along(f)(x, w)[1]),
    "hessian": lambda f: torch.func.hessian(f, (0, 1)),
    "vmap": lambda f: members(f, 0, None),
    "vmap of grad": lambda f: members(both(f), None, 0),
    "grad of vmap": lambda f: both(lambda x, w: members(f, 0, 0)(x, w).sum()),
    "vmap of vmap of grad": lambda f: members(members(both(f), 0, None), None, 0),
    "jacrev of vmap": lambda f: torch.func.jacrev(members(f, 0, None), (0, 1)),
    "autograd": by_autograd,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives(loss, transform):
    """Every derivative is that of the function itself, and the value has its bits."""
    make, own = LOSSES[loss], TRANSFORMS[transform]
    assert_close(own(make(fr.remat))(X, W), own(make(same))(X, W))
    assert torch.equal(make(fr.remat)(X, W), make(same)(X, W))


STAGED = {"by_closure": ("grad of grad", "jvp of grad", "grad of jvp", "vmap of grad", "grad of vmap")}


@pytest.mark.parametrize("loss", LOSSES)
def test_staged(loss):
    """The same holds for the program that `fr.jit` stages, and for derivatives of a jitted function."""
    make = LOSSES[loss]
    with staged_only():
        for own in (TRANSFORMS[n] for n in STAGED.get(loss, ("grad",))):
            assert_close(fr.jit(own(make(fr.remat)))(X, W), own(make(same))(X, W))
            assert_close(own(fr.jit(make(fr.remat)))(X, W), own(make(same))(X, W))


def test_compiled():
    """A compiled gradient has the values of the eager one."""
    assert_close(fr.jit(both(by_closure(fr.remat)))(X, W), both(by_closure(same))(X, W))


@settings(max_examples=15)
@given(rows=st.integers(0, 4), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
       seed=st.integers(0, 99))  # fmt: skip
def test_dtypes_and_empty_batches(rows, dtype, seed):
    """Gradients have the dtypes and the bits of the function's own, also of no rows."""
    x, w = drawn(rows, 2, seed=seed).to(dtype), W.to(dtype)
    layer = lambda x, w: torch.relu(x @ w) + x
    f = lambda wrap: lambda x, w: (wrap(layer)(wrap(layer)(x, w), w) * 3).sum()
    for own, need in zip(both(f(fr.remat))(x, w), both(f(same))(x, w), strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own, need, rtol=0, atol=0)


def test_nan():
    """NaN passes through both runs as through one."""
    x = X.clone()
    x[0, 0] = torch.nan
    own, need = (both(by_arguments(wrap))(x, W) for wrap in (fr.remat, same))
    assert [t.isnan().tolist() for t in own] == [t.isnan().tolist() for t in need]


def test_check_transforms():
    """Central differences agree in every mode."""
    check_transforms(by_closure(fr.remat), X, W)


# -- what is kept ------------------------------------------------------------------------------------------------


def kept_by(f, *args):
    """Return how many elements the graph of f's result keeps besides the arguments."""
    saved = {}

    def pack(x):
        saved[x.untyped_storage()._cdata] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = f(*args)
    own = {x.untyped_storage()._cdata for x in args}
    return sum(n for k, n in saved.items() if k not in own), out


def deep(wrap, depth=3, work=5):
    def layer(x, w):
        for _ in range(work):
            x = torch.tanh(x @ w)
        return x

    def f(x, w):
        for _ in range(depth):
            x = wrap(layer)(x, w)
        return x.sum()

    return f


def test_keeps_arguments_alone():
    """A layer keeps its argument, whatever it computes inside; the backward pass computes each layer once more."""
    x, w = drawn(8, 4).requires_grad_(), drawn(4, 4).requires_grad_()
    plain, _ = kept_by(deep(same), x, w)
    own, _ = kept_by(deep(fr.remat), x, w)
    assert plain >= 14 * 32
    assert own <= 3 * 32
    flops = {}
    for wrap in (same, fr.remat):
        with FlopCounterMode(display=False) as counter:
            both(deep(wrap))(x.detach(), w.detach())
        flops[wrap] = counter.get_total_flops()
    assert flops[fr.remat] * 3 == flops[same] * 4  # forward, again, and two products for each in the backward pass


def test_second_derivatives_that_are_zero_are_plain():
    """A second derivative by autograd is a plain tensor, also where it is zero, as that of a linear function."""
    x, w = drawn(8, 4), drawn(4, 4).requires_grad_()
    (first,) = torch.autograd.grad(fr.remat(lambda w: (x @ w).sum())(w), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    assert not is_wrapped(second) and torch.equal(second, torch.zeros_like(w))


def test_a_program_computes_again_after_the_cotangents():
    """In a program each layer's second run waits for the cotangents of its result; a value has no second run."""
    waits = lambda f: [n.name for n in fr.jit(f).lower(drawn(8, 4), drawn(4, 4)).graph.graph.nodes if "after" in n.name]
    assert len(waits(both(deep(fr.remat)))) == 3
    assert waits(deep(fr.remat)) == waits(both(deep(same))) == []


def test_nothing_is_computed_again_without_a_derivative():
    """Values, vmaps and tangents run the function once."""
    count = []
    f = fr.remat(lambda x: count.append(0) or x.sin())
    f(X), vmap(f)(X), jvp(f, (X,), (X,)), f(X.clone().requires_grad_()), fr.eval_shape(f, X)
    with torch.no_grad():
        f(X.clone().requires_grad_())
    module = torch.nn.Module()
    module.forward = lambda x: f(x)
    torch.export.export(module, (X,), strict=False)
    assert len(count) == 7


# -- what is around and between the runs -------------------------------------------------------------------------


def test_autocast_and_the_default_dtype_are_those_of_the_first_run():
    """A backward pass outside of autocast computes what the forward pass computed."""
    x, w = X.float().requires_grad_(), W.float().requires_grad_()
    found = {}
    for wrap in (same, fr.remat):
        with torch.autocast("cpu", torch.bfloat16):
            y = wrap(lambda x, w: (x @ w).sin() @ w)(x, w).float().sum()
        found[wrap] = torch.autograd.grad(y, (x, w))
    assert_close(found[fr.remat], found[same])
    dtypes = []
    f = fr.remat(lambda x: dtypes.append(torch.tensor(0.5).dtype) or x.sin())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        y = f(x).sum()
    finally:
        torch.set_default_dtype(before)
    torch.autograd.grad(y, x)
    assert dtypes == [torch.float64, torch.float64]
    assert torch.get_default_dtype() == before


def test_modules():
    """A module's parameters get their gradients, as of the module itself."""
    found = []
    for wrap in (same, fr.remat):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.LayerNorm(4)).double()
        wrap(module)(X).square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    assert_close(*found)


def test_a_closure_that_is_written_to_meanwhile_raises():
    """As plain autograd does, the backward pass raises if a kept tensor was written to."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = fr.remat(lambda x: (x @ w).sin())(x).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


SOFT, COUNT = [None], torch.zeros(1)
REFUSED = {
    "writes to a closure": (lambda x: x * COUNT.add_(1), TypeError, "writes to a tensor that it closes over"),
    "draws": (lambda x: torch.rand_like(x) * x, TypeError, "draws from torch's generator"),
    "own generator": (lambda x: torch.rand(2, generator=torch.Generator()).sum() * x, TypeError, "draws from torch's"),
    "writes": (lambda x: x.add_(1), ValueError, r"in-place write to args\[0\]"),
    "inner vmap": (lambda x: vmap(lambda r: r * x.sum())(SOFT[0]) * x.sum(), TypeError, "a transform inside of `fn`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    """What would be silently wrong raises."""
    f, error, words = REFUSED[case]

    def loss(x):
        SOFT[0] = x * 2
        return fr.remat(f)(x + 0).sum()

    with pytest.raises(error, match=words):
        grad(loss)(X)


def test_a_derivative_that_is_zero_by_form():
    """An inner derivative by an argument that its function does not read is zero, and has zero derivatives."""
    zero = lambda wrap: lambda x: wrap(lambda y: torch.func.vjp(lambda _: x.sin(), y)[1](y)[0] + y)(x).square().sum()
    assert_close(grad(zero(fr.remat))(X), grad(zero(same))(X))


def test_impure():
    """A function that runs otherwise the second time raises where this can be seen."""
    count = []
    f = fr.remat(lambda x: x.sum() if count.append(0) or len(count) % 2 else x)
    with pytest.raises(ValueError, match="returned another form"):
        grad(lambda x: f(x).sum())(X)

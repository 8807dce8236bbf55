"""The inner products of all pairs of vectors, in parts or joined, against float64 and under every transform."""

import functools

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import funcrec as fr
from funcrec.testing import assert_trees_close, check_adjoint

F64 = torch.float64
LOSS = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SIZES = (0, 1, 2, 5, 6, 7, 15, 16, 17, 33, 64)


def stack(batch, counts, dim, dtype=F64, seed=0):
    """Return parts [B, count, D] of one stack."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, dim, generator=draw, dtype=F64).to(dtype) for n in counts]


def pairs(x):
    """Return ⟨x_i, x_j⟩, i > j, by torch.tril_indices in float64."""
    whole = torch.cat([*x], 1).double()
    i, j = torch.tril_indices(whole.shape[1], whole.shape[1], -1)
    return (whole[:, i] * whole[:, j]).sum(-1)


@pytest.mark.parametrize("implementation", ["reference", "cpp"])
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*LOSS]), st.integers(0, 5), st.lists(st.sampled_from(SIZES[:-1]), min_size=1, max_size=3),
    st.sampled_from(SIZES),
)  # fmt: skip
def test_products_and_their_transpose_are_those_of_float64(implementation, dtype, batch, counts, dim):
    """Every product, and every cotangent, is float64's: its error is at most a rounding of each term of its sum, and
    one of the result. Any sizes, parts and dtypes: none, one, one less and one more than a vector."""
    if not sum(counts):
        counts = [*counts, 1]
    x = stack(batch, counts, dim, dtype)
    near = lambda terms: 4 * LOSS[dtype] * terms + (1e-12 if dtype == F64 else 4e-6) * (1 + terms)
    out = ops.dot_interaction(x, implementation=implementation)
    want, whole = pairs(x), torch.cat(x, 1).double()
    assert out.dtype == dtype and out.shape == want.shape
    assert ((out.double() - want).abs() <= near(pairs([p.abs() for p in x]))).all()
    d = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)
    d_x = ops.dot_interaction_transpose(d, x, implementation=implementation)
    assert [p.shape for p in d_x] == [p.shape for p in x] and {p.dtype for p in d_x} == {dtype}
    square = whole.new_zeros(batch, whole.shape[1], whole.shape[1])
    i, j = torch.tril_indices(*square.shape[1:], -1)
    square[:, i, j] = square[:, j, i] = d.double()
    assert ((torch.cat(d_x, 1).double() - square @ whole).abs() <= near(square.abs() @ whole.abs())).all()


def test_strides_do_not_matter_and_nothing_else_is_read():
    """Parts that are columns of wider tensors, and a cotangent of wider rows, give the bits of copies, although all
    numbers around them are NaN."""
    wide = torch.full((4, 3 * 8 + 5), torch.nan)
    wide[:, 2:26] = torch.arange(96.0).view(4, 24).sin()
    around = torch.full((4, 12), torch.nan)
    around[:, 1:11] = torch.arange(40.0).view(4, 10).cos()
    x, d, more = wide[:, 2:26].unflatten(1, (3, 8)), around[:, 1:11], stack(4, [8], 2, torch.float32)[0].mT
    own, own_d = [x.contiguous(), more.contiguous()], d.contiguous()
    assert torch.equal(ops.dot_interaction([x, more]), ops.dot_interaction(own))
    got, want = ops.dot_interaction_transpose(d, [x, more]), ops.dot_interaction_transpose(own_d, own)
    assert_trees_close(got, want, rtol=0, atol=0)
    assert not ops.dot_interaction([x]).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_example_has_the_bits_that_it_has_alone(dtype):
    """Neither the batch, nor threads, nor how the vectors lie in parts, changes a bit of an example."""
    x = stack(300, [1, 6, 20], 24, dtype)
    d, threads = torch.ones(300, 27 * 13, dtype=dtype), torch.get_num_threads()
    both = lambda x, d: (ops.dot_interaction(x), torch.cat(ops.dot_interaction_transpose(d, x), 1))
    try:
        torch.set_num_threads(2)
        whole = both(x, d)
    finally:
        torch.set_num_threads(threads)
    joined = both([torch.cat(x, 1)], d)
    assert_trees_close(whole, joined, rtol=0, atol=0)
    for k in (0, 137, 299):
        alone = both([p[k : k + 1].clone() for p in x], d[k : k + 1])
        assert_trees_close(alone, tuple(y[k : k + 1] for y in whole), rtol=0, atol=0)


def test_every_transform_of_the_layer():
    """Derivatives of every order and mode, with respect to one part and to all, and maps over members, are those of
    plain torch; the transpose is the transpose."""
    x, y = stack(3, [2, 4], 5)
    near = functools.partial(assert_trees_close, rtol=1e-9, atol=1e-10)
    ours, plain = fr.nn.dot_interaction, lambda x, y: pairs([x, y])
    t = torch.randn_like(x)
    for which in (0, 1):
        near(jacrev(ours, which)(x, y), jacrev(plain, which)(x, y))
        near(jacfwd(ours, which)(x, y), jacfwd(plain, which)(x, y))
    square = lambda f: lambda x, y: f(x, y).sin().sum()
    near(hessian(square(ours), (0, 1))(x, y), hessian(square(plain), (0, 1))(x, y))
    twice = lambda f: jvp(lambda x: jvp(lambda x: f(x, y), (x,), (t,))[1], (x,), (t,))
    near(twice(ours), twice(plain))
    check_adjoint(lambda x: jvp(lambda x: ours(x, y), (t,), (x,))[1],
                  lambda d: torch.func.vjp(lambda x: ours(x, y), t)[1](d)[0], x)  # fmt: skip
    assert torch.autograd.gradgradcheck(ours, (x.clone().requires_grad_(), y.clone().requires_grad_()))
    members = torch.stack([x, t])
    f = lambda x, y: (ours(x, y), grad(square(ours))(x, y))
    for dims, args in (((0, None), (members, y)), ((None, 1), (x, torch.stack([y, y + 1], 1)))):
        each = [f(*(a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True))) for i in range(2)]
        near(vmap(f, dims)(*args), tuple(map(torch.stack, zip(*each, strict=True))))


def test_a_compiled_layer_has_the_eager_bits_by_one_kernel():
    """fr.jit of the layer and of its gradient gives the eager bits. Its program calls the kernel and its transpose once
    each, and makes no product of matrices."""
    x, y = stack(3, [1, 4], 5, torch.float32)

    def both(x, y, d):
        out, pull = torch.func.vjp(fr.nn.dot_interaction, x, y)
        return out, *pull(d)

    d = torch.arange(30.0).view(3, 10)
    assert_trees_close(fr.jit(both)(x, y, d), both(x, y, d), rtol=0, atol=0)
    code = str(fr.jit(both).lower(x, y, d).graph)
    assert code.count("funcrec_cpp.dot_interaction.default") == 1
    assert code.count("funcrec_cpp.dot_interaction_transpose.default") == 1 and "aten.bmm" not in code


def test_leading_sizes_and_dtypes_may_be_any():
    """No batch, an empty one and two dimensions of it give the rows of the flat batch. Parts of two dtypes are joined
    in the wider one, as torch.cat does."""
    x = stack(6, [4], 3)[0]
    want = fr.nn.dot_interaction(x)
    assert torch.equal(fr.nn.dot_interaction(x[0]), want[0])
    assert torch.equal(fr.nn.dot_interaction(x.view(2, 3, 4, 3)), want.view(2, 3, 6))
    assert fr.nn.dot_interaction(x[:0].view(0, 3, 4, 3)).shape == (0, 3, 6)
    assert fr.nn.dot_interaction(x[:, :1]).shape == (6, 0)
    assert fr.nn.dot_interaction(x.half(), x).dtype == F64


def test_wrong_parts_are_refused_before_any_work():
    """Integers, parts of other sizes, and cotangents of another shape, raise in four parts."""
    x = torch.ones(2, 3, 4)
    with pytest.raises(TypeError, match="a part is not a stack of vectors"):
        ops.dot_interaction([x.long()], implementation="cpp")
    with pytest.raises(ValueError, match="the parts do not fit each other"):
        ops.dot_interaction([x, x[:1]], implementation="cpp")
    with pytest.raises(ValueError, match="the parts do not fit each other"):
        ops.dot_interaction_transpose(torch.ones(2, 15), [x, x.double()], implementation="cpp")
    with pytest.raises(ValueError, match="`d` does not match the vectors"):
        ops.dot_interaction_transpose(torch.ones(2, 4), [x], implementation="cpp")

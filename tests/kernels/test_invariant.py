"""Products and sums of one order: their bits are those of the chain and the tree, in any batch and on any threads."""

import pytest
import torch
from funcrec.kernels import ops
from funcrec.kernels.reference_invariant import fused
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.surroundings import on_threads
from torch import Tensor

DTYPES = (torch.float32, torch.float64)
SIZES = st.sampled_from([1, 2, 3, 5, 13, 14, 15, 29, 33, 64, 115])
DEPTHS = st.sampled_from([1, 2, 7, 16, 17, 31, 32, 100, 129, 256, 257, 512, 513, 770, 1024, 1025, 1300, 2051])
CHAIN = 256  # the most terms of a block


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(stack: int, rows: int, depth: int, columns: int, dtype: torch.dtype, turned: int) -> tuple[Tensor, Tensor]:
    """Return two operands, each stored by rows or by columns."""
    a = noise(stack, depth, rows, dtype=dtype).mT if turned & 1 else noise(stack, rows, depth, dtype=dtype)
    b = (
        noise(stack, columns, depth, seed=1, dtype=dtype).mT
        if turned & 2
        else noise(stack, depth, columns, seed=1, dtype=dtype)
    )
    return a, b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25)
@given(st.integers(1, 3), SIZES, DEPTHS, SIZES, st.integers(0, 3), st.integers(2, 4))
def test_a_product_depends_on_its_row_and_column_alone(dtype, stack, rows, depth, columns, turned, threads):
    """Every element has the bits of the reference, which knows no tile; so have a row alone, a column alone, several
    threads, and, within a block, terms that are zero after the last. A product of twice the terms is the sum of its
    halves, if each has more than half a block. It is near to the product in f64."""
    a, b = operands(stack, rows, depth, columns, dtype, turned)
    out = ops.invariant_bmm(a, b, implementation="cpp")
    if stack * rows * columns * depth < 300_000:
        assert torch.equal(out, ops.invariant_bmm(a, b, implementation="reference"))
    i, j = (rows - 1) // 2, columns // 2
    assert torch.equal(ops.invariant_bmm(a[:, i : i + 1], b), out[:, i : i + 1])
    assert torch.equal(ops.invariant_bmm(a, b[:, :, j : j + 1]), out[:, :, j : j + 1])
    with on_threads(threads):
        assert torch.equal(ops.invariant_bmm(a, b), out)
    zeros = lambda x, dim: torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)
    if depth < CHAIN:
        assert torch.equal(ops.invariant_bmm(zeros(a, 2), zeros(b, 1)), out)
    if depth > CHAIN // 2:
        twice = ops.invariant_bmm(torch.cat([a, a.roll(1, 1)], 2), torch.cat([b, b.roll(1, 2)], 1))
        assert torch.equal(twice, out + ops.invariant_bmm(a.roll(1, 1), b.roll(1, 2)))
    bound = (depth + 1) * torch.finfo(dtype).eps * (a.double().abs() @ b.double().abs())
    assert ((out.double() - a.double() @ b.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25)
@given(st.sampled_from([1, 2, 7, 8, 16, 40]), DEPTHS, st.sampled_from([1, 2, 17, 300]), st.integers(2, 4))
def test_a_sum_depends_on_its_terms_alone(dtype, outer, terms, inner, threads):
    """Every sum has the bits of the reference; so has a column alone, on several threads, and, within a block, with
    zeros after the last term. Two, four and eight equal parts of more than half a block add up to the whole."""
    x = noise(outer, terms, inner, dtype=dtype)
    out = ops.invariant_sum(x, implementation="cpp")
    assert torch.equal(out, ops.invariant_sum(x, implementation="reference"))
    assert torch.equal(ops.invariant_sum(x[-1:, :, -1:]), out[-1:, -1:])
    with on_threads(threads):
        assert torch.equal(ops.invariant_sum(x), out)
    if terms < CHAIN:
        assert torch.equal(ops.invariant_sum(torch.nn.functional.pad(x, (0, 0, 0, CHAIN - terms))), out)
    if terms > CHAIN // 2:
        wide = noise(outer, 8 * terms, inner, seed=1, dtype=dtype)
        sums = [ops.invariant_sum(part) for part in wide.split(terms, 1)]
        for count in (8, 4, 2):
            assert torch.equal(ops.invariant_sum(wide[:, : count * terms]), tree(sums[:count]))


def tree(parts: list[Tensor]) -> Tensor:
    half = len(parts) // 2
    return tree(parts[:half]) + tree(parts[half:]) if half else parts[0]


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_terms_or_rows(dtype, implementation):
    """Without terms a product and a sum are zeros; without rows or columns they are empty."""
    call = lambda *shapes: ops.invariant_bmm(
        *(torch.ones(s, dtype=dtype) for s in shapes), implementation=implementation
    )
    assert torch.equal(call((2, 3, 0), (2, 0, 4)), torch.zeros(2, 3, 4, dtype=dtype))
    assert call((2, 0, 3), (2, 3, 4)).shape == (2, 0, 4)
    assert call((0, 5, 3), (0, 3, 4)).shape == (0, 5, 4)
    total = ops.invariant_sum(torch.ones(2, 0, 3, dtype=dtype), implementation=implementation)
    assert torch.equal(total, torch.zeros(2, 3, dtype=dtype))


def test_operands_that_overlap_or_repeat_are_read_as_they_are():
    """Views with strides of zero, steps between rows, a shared matrix and a whole tensor's slice give the product of
    their copies."""
    base = noise(3, 8, 9)
    views = [base[:, ::2, :], base[:, :, 1:8], base[:1].expand(3, 8, 9), base[:, :1].expand(3, 8, 9), base.mT[:, :8]]
    for a in views:
        b = noise(3, a.shape[2], 4, seed=1)
        assert torch.equal(ops.invariant_bmm(a, b), ops.invariant_bmm(a.clone(), b))
        assert torch.equal(ops.invariant_sum(a), ops.invariant_sum(a.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_rounds_once(dtype):
    """x y + z has one rounding: it equals the exact sum of fractions, rounded, where two roundings would not."""
    from fractions import Fraction

    x, y = noise(400, dtype=dtype), noise(400, seed=1, dtype=dtype)
    z = -(x * y) * (1 + torch.arange(400) % 3 * torch.finfo(dtype).eps)
    got = fused(x, y, z.to(dtype))
    for a, b, c, out in zip(x.tolist(), y.tolist(), z.to(dtype).tolist(), got.tolist(), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        rounded = torch.tensor(float(exact), dtype=torch.float64).to(dtype).item()  # such sums are exact in f64
        assert out == rounded or abs(Fraction(out) - exact) <= abs(Fraction(rounded) - exact)


def test_other_operands_are_refused():
    """Shapes that do not match, other dtypes, and tracked tensors raise."""
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    with pytest.raises(ValueError, match="operands do not match"):
        ops.invariant_bmm(a, b[:1])
    with pytest.raises((ValueError, TypeError), match=r"operands do not match|another kind"):
        ops.invariant_bmm(a, b.double())
    with pytest.raises(TypeError, match="another kind"):
        ops.invariant_sum(torch.ones(2, 3, 4, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"has no derivative[\s\S]*fr.invariant"):
        torch.func.grad(lambda a: ops.invariant_bmm(a, b).sum())(a)

"""Triton's products and sums of one order have the bits of the reference, in triton's interpreter or on a device.

The interpreter's own `fma` rounds twice, so these tests put the reference's in its place. That `tl.fma` is the fused
instruction on a device is seen in the compiled code of sm_90 (`test_triton.py`).
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from funcrec.kernels import ops, reference_invariant  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

DTYPES = (torch.float32, torch.float64)
# stack, rows, terms, columns; outer, terms, inner
PRODUCTS = ((0, 2, 3, 4), (2, 3, 0, 5), (2, 3, 9, 5), (1, 17, 3, 65), (1, 2, 257, 3), (1, 1, 530, 1))
SUMS = ((0, 2, 3), (2, 0, 3), (1, 770, 1), (9, 7, 70), (3, 257, 5))


@pytest.fixture(autouse=True)
def fused_multiply_add(monkeypatch):
    def create_fma(self, x, y, z):
        given = (torch.from_numpy(v.data.copy()) for v in (x, y, z))
        return TensorHandle(reference_invariant.fused(*given).numpy(), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int, turned: bool = False) -> torch.Tensor:
    """Return numbers of many sizes, whose last two dimensions are stored in either order, with NaN beside them."""
    shape = (shape[0], shape[2], shape[1]) if turned else shape
    room = torch.full((shape[0], shape[1] + 1, shape[2] + 2), torch.nan, dtype=dtype)
    own = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    room[:, 1:, 1:-1] = (own * 2.0 ** (torch.arange(own.numel()) % 13).view(shape)).to(dtype)
    x = room[:, 1:, 1:-1]
    return (x.mT if turned else x).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", range(4))
def test_a_product_has_the_bits_of_the_reference(dtype, turned):
    """Every element is the reference's, for any sizes, strides and blocks; NaN beside an operand is not read."""
    for stack, rows, depth, columns in PRODUCTS[turned & 1 : 6 if turned in (0, 3) else 4 : 2]:
        a = noise((stack, rows, depth), dtype, 0, bool(turned & 1))
        b = noise((stack, depth, columns), dtype, 1, bool(turned & 2))
        want = ops.invariant_bmm(a, b, implementation="reference")
        assert torch.equal(ops.invariant_bmm(a, b, implementation="triton"), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_sum_has_the_bits_of_the_reference(dtype, turned):
    """Every sum is the reference's, for any sizes, strides and blocks; NaN beside the operand is not read."""
    for shape in SUMS:
        x = noise(shape, dtype, 2, turned)
        want = ops.invariant_sum(x, implementation="reference")
        assert torch.equal(ops.invariant_sum(x, implementation="triton"), want)


def test_other_operands_are_refused():
    """Shapes that do not match and 16-bit floats raise."""
    a = torch.ones(2, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="operands do not match"):
        ops.invariant_bmm(a, a, implementation="triton")
    with pytest.raises(ValueError, match="another kind"):
        ops.invariant_sum(a.half(), implementation="triton")

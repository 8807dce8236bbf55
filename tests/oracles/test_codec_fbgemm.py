"""Coded vectors equal those of TorchRec's QCommsConfig (fbgemm_gpu.quantize_comm)."""

import pytest
import torch

from funcrec.mesh import _codec
from funcrec.testing import assert_trees_close

comm = pytest.importorskip("fbgemm_gpu.quantize_comm")


def peer(x, kind, width):
    """Return x as another rank of TorchRec receives it."""
    precision = {"float16": comm.SparseType.FP16, "bfloat16": comm.SparseType.BF16, "int8": comm.SparseType.INT8}[kind]
    context = comm.QuantizationContext(row_dim=width)
    sent = comm._quantize_tensor(x, precision, context)
    return comm._dequantize_tensor(sent, precision, context).view_as(x)


def ours(x, kind, width):
    widths = [width] * (x.shape[-1] // width)
    return _codec._decode(_codec._encode(x, kind, widths), kind, widths, x.dtype)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_halves_are_the_peers(kind, scale):
    """Coded in 16 bits, x arrives with the bits of TorchRec, saturated values included."""
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * scale
    assert_trees_close(ours(x, kind, 16), peer(x, kind, 16))


@pytest.mark.parametrize("move", [lambda x: x, torch.abs], ids=["both signs", "one sign"])
@pytest.mark.parametrize("width", [8, 64, 128])
def test_int8_errs_by_its_step_beside_the_peers(width, move):
    """The errors here and in TorchRec have the ratio of their steps: max|row| / 127 here, (max - min) / 255 in
    TorchRec. TorchRec also sends an offset. One element of a row is exact here, two elements are exact in TorchRec."""
    x = move(torch.randn(400, 2 * width, generator=torch.Generator().manual_seed(2)))
    size = lambda y: float(y.square().mean().sqrt())
    rows = x.unflatten(1, (2, width))
    steps = size(rows.abs().amax(-1) / 127) / size((rows.amax(-1) - rows.amin(-1)) / 255)
    want = steps * ((width - 1) / (width - 2)) ** 0.5
    assert size(ours(x, "int8", width) - x) / size(peer(x, "int8", width) - x) == pytest.approx(want, rel=0.05)

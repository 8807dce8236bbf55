"""The fast interpreter of the tests, and triton's own, give one result."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the device", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from funcrec.kernels.triton.device import larger, plus
from programs.interpreter import reduce_by_halves
from triton.runtime import interpreter

OWN = interpreter.ReduceOps.generic_reduce  # when the module is imported, no fixture has replaced it


@triton.jit
def first_of_greatest(x, i, y, j):
    """Return the greater number and its place, of two equal numbers the smaller place."""
    take = (x > y) | ((x == y) & (i < j))
    return tl.where(take, x, y), tl.where(take, i, j)


@triton.jit
def _reductions(x, columns, all_of, places, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    values = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    tl.store(columns + column, tl.reduce(values, 0, plus))
    tl.store(all_of, tl.reduce(values, None, larger))
    kept, place = tl.reduce((values, column[None, :] + row[:, None] * 0), 1, first_of_greatest, keep_dims=True)
    tl.store(places + row[:, None], place + 0 * kept.to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (4, 16)])
def test_reductions_are_those_of_the_interpreter(monkeypatch, shape, dtype):
    """Sums of small integers, maxima of all elements, and places of maxima have the same bits in both."""
    x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for reduce in (OWN, reduce_by_halves):
        monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
        out = x.new_zeros(shape[1]), x.new_zeros(1), torch.zeros(shape[0], dtype=torch.int32)
        _reductions[(1,)](x, *out, *shape)
        found.append(out)
    assert OWN is not reduce_by_halves and all(map(torch.equal, *found))
    assert torch.equal(found[1][0], x.sum(0).to(dtype)) and found[1][1] == x.max()
    assert found[1][2].tolist() == [row.index(max(row)) for row in x.tolist()]

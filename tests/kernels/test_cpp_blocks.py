"""gather_block and scatter_block_ in C++: one list of rows in several tables."""

import pytest
import torch
from funcrec.kernels import cpp
from funcrec.kernels.forms import accumulation_dtype


@pytest.mark.parametrize("num_rows", [0, 1, 65, 700])
def test_blocks_are_rows_of_every_table(num_rows):
    """Law: gather_block reads, and scatter_block_ writes, the same rows of tables of any width and dtype. All other
    rows keep their bits."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    tables = [torch.randn(900, dim).to(dtype) for dim in (1, 7, 64, 130) for dtype in dtypes]
    rows = torch.randperm(900)[:num_rows]
    asked = torch.cat([rows, torch.tensor([-1, 900, 2**40])])
    read = cpp.gather_block(tables, asked)
    for x, y in zip(tables, read, strict=True):
        assert torch.equal(y[:num_rows], x[rows].to(accumulation_dtype(x.dtype))) and (y[num_rows:] == 0).all()
    new = [torch.randn(x.shape[1], num_rows).t().to(y.dtype) for x, y in zip(tables, read, strict=True)]
    count = num_rows * 3 // 4
    wanted = [x.clone().index_copy_(0, rows[:count], y[:count].to(x.dtype)) for x, y in zip(tables, new, strict=True)]
    cpp.scatter_block_(tables, rows, torch.tensor(count), new)
    assert all(torch.equal(a, b) for a, b in zip(tables, wanted, strict=True))

"""Memory of large tables: its alignment, its contents, and its release."""

import copy
import sys

import pytest
import torch
from funcrec.kernels import memory

LARGE = memory.MIN_MAPPED // 128  # rows of 128 bytes


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
@pytest.mark.parametrize("rows", [LARGE, LARGE + 1, 3 * LARGE + 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_large_table_begins_at_a_huge_page(rows, dtype):
    """A large table starts at a 2 MiB page boundary. The storage has the table's length. Each element holds its own
    value."""
    table = memory.empty_table((rows, 128 // dtype.itemsize), dtype=dtype)
    assert table.data_ptr() % memory.HUGE_PAGE == 0
    assert table.untyped_storage().nbytes() == table.nbytes and table.is_contiguous()
    values = torch.arange(table.numel()).remainder(251).view(table.shape).to(dtype)
    table.copy_(values)
    assert torch.equal(table, values) and torch.equal(copy.deepcopy(table), values)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (5, 3), ()])
def test_small_tables_are_ordinary(shape):
    """A small table of any shape, even an empty table, equals torch.full."""
    assert torch.equal(memory.full_table(shape, 0.5, dtype=torch.float32), torch.full(shape, 0.5))


def test_other_devices_are_torchs():
    """A table on another device is on that device and uses no host memory."""
    assert memory.empty_table((LARGE, 32), dtype=torch.float32, device="meta").is_meta


@pytest.mark.skipif(sys.platform != "linux", reason="the mapped memory is read from /proc")
def test_memory_is_given_back():
    """A table without references is unmapped. A view keeps the memory of the whole table."""

    def mapped_mb() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[0]) // 256

    before, rows = mapped_mb(), (256 << 20) // 128
    table = memory.empty_table((rows, 32), dtype=torch.float32)
    view = table[-1]
    del table
    assert mapped_mb() - before >= 250
    view.fill_(1.0)
    del view
    assert mapped_mb() - before < 64

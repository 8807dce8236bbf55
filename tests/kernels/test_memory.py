"""Memory of large tables: its alignment, its contents, and its release."""

import copy
import os
import platform
import subprocess
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


FAULTS = """
import contextlib, resource, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from funcrec.kernels.cpp import _native
with eval(sys.argv[1]):
    _native.library()
def used():
    blocks = [torch.ones(n << 18) for n in (2, 3, 5, 7, 11, 7)]  # MiB
count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): used()
before = count()
for _ in range(10): used()
print(count() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limit is glibc's")
@pytest.mark.parametrize("loaded_under", ["contextlib.nullcontext()", "FakeTensorMode()"])
def test_freed_memory_is_used_again(loaded_under):
    """A process that has loaded the kernels, and then uses and frees 35 MiB again and again, takes no new pages from
    the system: 10 rounds have next to no page faults (5,376 without the kernels). So does a load under a mode."""
    variables = {
        name: x for name, x in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))
    }
    command = [sys.executable, "-c", FAULTS, loaded_under]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 500

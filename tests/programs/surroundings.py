"""Facts about a process that the processor, libraries and the environment decide, in a form that can be compared.

    facts() in a test == facts() in the ranks and fresh processes that the test starts, except threads

`programs.processors` runs laws in surroundings of its choice. A run with other facts would test nothing.
PYTEST_PLUGINS=programs.surroundings with FUNCREC_EXPECTED (facts, as JSON) makes pytest and each worker refuse to start
if the facts differ.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXPECTED = "FUNCREC_EXPECTED"
# The number of threads for the tests' own process, set by conftest.py. Ranks have one thread.
THREADS = "FUNCREC_TEST_THREADS"


def facts() -> dict[str, Any]:
    """Return the facts of this process: a digest of products on one thread, whether a row's product has the same bits
    alone and among other rows, and the chosen code paths."""
    from funcrec.kernels.cpp import _native

    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 48, generator=draw), torch.randn(48, 40, generator=draw)
    with on_threads(1):
        few = [a[:n] @ b for n in (1, 3, 7, 64)]
        members = torch.bmm(a.reshape(4, 16, 48), b.expand(4, 48, 40))
        vector = a @ b[:, 0]
    return {
        "products": digest([*few, members, vector]),
        "alike": all(torch.equal(x, few[-1][: len(x)]) for x in few),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": _native.level(),
        "threads": torch.get_num_threads(),
        "mkl": torch.backends.mkl.is_available(),
        "machine": platform.machine(),
        "vendor": vendor(),
    }


@contextlib.contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def digest(tensors: list[Tensor]) -> str:
    data = b"".join(x.contiguous().numpy().tobytes() for x in tensors)
    return hashlib.sha256(data).hexdigest()[:12]


def vendor() -> str:
    """Return the processor's vendor, such as GenuineIntel or AuthenticAMD, or "" if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def pytest_sessionstart(session: Any) -> None:
    """Refuse to start if the surroundings are not the expected surroundings."""
    expected, found = json.loads(os.environ[EXPECTED]), facts()
    if found != expected:
        import pytest

        raise pytest.UsageError(f"the surroundings are others.\n  got   {found}\n  need  {expected}")


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    print(json.dumps(facts()))

"""Real ranks that live for a file of tests, and the programs that ranks and the emulation run.

A start of ranks takes 0.06 s. Every mesh of a rank leaves gloo threads that poll for messages. The tests that use
`ranks` are therefore one group, in which one test runs at a time.
"""

import sys

import pytest
from programs.coverage import save_coverage

from funcrec.testing import RankPool, _ranks

# A rank imports these modules to compile. If its parent process has not imported them, they take two seconds per rank.
_ranks.PRELOADED += ["torch._inductor.compile_fx", "torch._inductor.select_algorithm", "sympy.physics.units"]


@pytest.fixture(scope="module")
def ranks():
    """Return a function n -> n gloo ranks."""
    pools = {}
    yield lambda n: pools[n] if n in pools else pools.setdefault(n, RankPool(n))
    for pool in pools.values():
        if "coverage" in sys.modules and pool.processes:  # `make coverage`: what a killed process has counted is lost
            pool.run(save_coverage)
        pool.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("ranks"))

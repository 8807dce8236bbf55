"""Real ranks, kept alive for the session, and the programs that they and the emulation run."""

import sys
from pathlib import Path

import pytest

from funcrec.testing import RankPool

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))  # `differences`
sys.path.insert(0, str(Path(__file__).parent))  # `transforms`: the ranks import it by name


@pytest.fixture(scope="session")
def ranks():
    """n -> n gloo ranks."""
    pools = {}
    yield lambda n: pools[n] if n in pools else pools.setdefault(n, RankPool(n))
    for pool in pools.values():
        pool.kill()

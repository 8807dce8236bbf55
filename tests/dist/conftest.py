"""Real ranks, kept alive for the session, and the programs that they and the emulation run."""

import pytest

from funcrec.testing import RankPool


@pytest.fixture(scope="session")
def ranks():
    """n -> n gloo ranks."""
    pools = {}
    yield lambda n: pools[n] if n in pools else pools.setdefault(n, RankPool(n))
    for pool in pools.values():
        pool.kill()

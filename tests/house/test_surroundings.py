"""Surroundings of a test reach what it starts: without that `make processors` would test nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import surroundings

from funcrec.testing import RankPool

TESTS = Path(__file__).parents[1]


@pytest.mark.xdist_group("ranks")  # another worker would start a server of forks for this test alone
def test_ranks_and_fresh_processes_are_in_the_surroundings_of_their_test():
    """Products have the same bits in a test, its ranks and its fresh processes. The kernels have the same level, and
    ranks have one thread."""
    here = surroundings.facts()
    with RankPool(2) as ranks:
        assert ranks.run(surroundings.facts, deadline_s=120) == [here | {"threads": 1}] * 2
    command = [sys.executable, "-m", "programs.surroundings"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS)
    assert json.loads(done.stdout) == here

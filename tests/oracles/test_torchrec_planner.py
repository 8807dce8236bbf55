"""Our solver against TorchRec's planner: its options and estimates feed both, its own model scores both."""

import importlib
from pathlib import Path

import pytest

from funcrec.planner._solve import solve

pytest.importorskip("torchrec")
BENCH = Path(__file__).parents[2] / "bench"


def test_no_plan_of_torchrecs_planner_is_faster(monkeypatch):
    """On generated sets our plan fits, is rated as the solver said, and no slower than TorchRec's own; the bound is
    below both."""
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("planner")
    for seed in (2, 28):
        tables = bench.generated(seed)[:12]
        peer = bench.Peer(tables, 8)
        packing = peer.packing()
        found = solve(packing)
        ours, theirs = peer.rated(packing, found.choices), bench.Peer(tables, 8).plan()
        assert ours == pytest.approx(found.objective, rel=1e-6)
        assert found.bound * (1 - 1e-9) <= ours <= theirs * (1 + 1e-9), seed

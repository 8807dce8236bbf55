"""The solver of funcrec and the planner of TorchRec get the same options and estimates, those of TorchRec.

TorchRec's model rates both plans."""

import importlib
from pathlib import Path

import pytest

from funcrec.planner._solve import solve

pytest.importorskip("torchrec")
BENCH = Path(__file__).parents[2] / "bench"


def test_no_plan_of_torchrecs_planner_is_faster(monkeypatch):
    """On generated tables, our plan has the rating that the solver states, and is no slower than TorchRec's plan. The
    bound is below both."""
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

"""Plans for ranks that differ in memory or speed."""

import math
import random
from dataclasses import replace

import pytest
from programs.packings import best_of_all, packing
from programs.refused import assert_refused

import funcrec as fr
from funcrec.planner._packing import loads_of
from funcrec.planner._solve import solve

TABLES = tuple(fr.TableConfig(f"t{i}", 1000 * (i + 1) ** 2, 64) for i in range(4))
FEATURES = tuple(fr.FeatureConfig(f"f{i}", table=f"t{i}") for i in range(4))
USED = {f"t{i}": fr.TableConstraint(pooling_factor=20.0 * (i + 1)) for i in range(4)}
EVEN = fr.Hardware.named("cpu")
SLOW = replace(EVEN, name="slow", memory_bytes_per_s=EVEN.memory_bytes_per_s / 8)


def planned(hardware, mesh=None, **kwargs):
    mesh = {"model": 4} if mesh is None else mesh
    return fr.plan(TABLES, FEATURES, mesh, batch_size=4096, constraints=USED, hardware=hardware, **kwargs)


def test_uneven_problems_are_solved_to_the_optimum():
    """On generated problems whose ranks are slower by factors, the solution is the best of all plans, and the bound
    proves it."""
    for seed in range(30):
        p, draw = packing(seed), random.Random(seed)
        slowness = tuple(draw.choice([1.0, 1.5, 4.0]) for _ in range(p.num_ranks))
        timed = tuple(k for k in range(len(p.weights)) if k not in p.once and draw.random() < 0.7)
        p = p._replace(slowness=slowness, timed=timed)
        found, best = solve(p), best_of_all(p)
        if math.isinf(best):
            assert found.choices is None, seed
            continue
        loads = loads_of(p, found.choices)
        assert loads.excess <= 1e-9
        assert found.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed
        assert found.bound <= best * (1 + 1e-6) and found.gap < 1e-6, seed


def test_even_ranks_in_a_list_are_even_ranks():
    """A list of equal hardware gives the plan and the estimates of this hardware."""
    one, many = planned(EVEN), planned([EVEN] * 4)
    assert one == many and one.report == many.report


def test_a_slow_rank_gets_less():
    """A rank whose memory is slower gets fewer bytes of lookups than any other, and the plan is at least as fast as the
    plan for even ranks is here. A step takes at least as long as on even ranks, and no longer than if all were slow."""
    ranks = [EVEN, SLOW, EVEN, EVEN]
    plan, even, slow = planned(ranks), planned(EVEN), planned(SLOW)
    lookups = [r.lookup_s for r in plan.report.ranks]
    bytes_of = [s / (8 if r == 1 else 1) for r, s in enumerate(lookups)]
    assert bytes_of[1] == min(bytes_of)
    assert plan.report.seconds <= planned(ranks, placements=even).report.seconds
    assert even.report.seconds <= plan.report.seconds <= slow.report.seconds
    assert plan.gap < 1e-6 and plan.report.hardware == "cpu+slow"


def test_the_worst_rank_counts_for_all():
    """The least memory and the slowest link of any rank count for all ranks, and the longest latency and launch."""
    small = replace(EVEN, memory_bytes=10**9, launch_s=1e-3)
    far = replace(EVEN, link_bytes_per_s=1e8, host_bytes_per_s=1e8, host_latency_s=1e-2)
    made = {t.name: fr.row_wise("model") for t in TABLES}
    rated = planned([EVEN, small, far, EVEN], placements=made)
    worst = replace(small, link_bytes_per_s=1e8, host_bytes_per_s=1e8, host_latency_s=1e-2)
    assert rated.report.memory_bytes == int(10**9 * 0.85)
    assert rated.report.seconds == pytest.approx(planned(worst, placements=made).report.seconds, rel=1e-12)


def test_copies_that_train_apart_have_the_slowest_of_them():
    """With replicas, a place is as slow as the slowest rank of any copy there."""
    mesh, made = {"copy": 2, "model": 2}, {t.name: fr.row_wise("model") for t in TABLES}
    call = lambda *ranks: planned(list(ranks), mesh, replicas="copy", placements=made).report
    report = call(EVEN, EVEN, EVEN, SLOW)
    assert [r.lookup_s for r in report.ranks] == [r.lookup_s for r in call(EVEN, SLOW, EVEN, EVEN).ranks]
    assert report.ranks[1].lookup_s == pytest.approx(8 * report.ranks[0].lookup_s, rel=1e-12)


DISK = replace(EVEN, disk_bytes=10**12, disk_records_per_s=1e5)


@pytest.mark.parametrize(
    ("hardware", "part"),
    [([EVEN] * 3, "one entry for each rank"), ([], "one entry for each rank"),
     ([EVEN, replace(EVEN, ranks_per_host=4)] * 2, "ranks_per_host"), ([EVEN, DISK] * 2, "disk_bytes")],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_refused(hardware, part):
    """A list that has not one entry for each rank, hosts of other sizes, and a disk of some ranks are refused."""
    assert_refused(lambda: planned(hardware), ValueError, "funcrec.plan", part)

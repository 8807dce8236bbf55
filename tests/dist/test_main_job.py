"""The common decisions of the main job's ranks, and the rows of each rank."""

import pytest
import torch
from programs import moving

import funcrec as fr
from funcrec.examples import _ranks
from funcrec.testing import assert_trees_close


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ranks_stop_together(interrupted, ranks):
    """Whichever rank is interrupted, all ranks see the interruption at the same step, within 16 steps, and at every
    later step."""
    first, second = ranks(2).run(moving.questions, interrupted, 40)
    assert first == second
    assert first == [False] * 31 + [True] * 9


def test_nobody_stops_uninterrupted(ranks):
    """Without an interruption, no rank stops."""
    assert not any(map(any, ranks(2).run(moving.questions, 2, 40)))


def test_ranks_take_the_batch_apart(ranks):
    """The bags of all ranks together are the bags of the batch, in order."""
    data = fr.data.random_rows(fr.key(0), {"item": 50, "user": 9}, num_rows=30)
    rows = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:12]
    whole, parts = data.take(rows), ranks(2).run(moving.own_batch, data, rows)
    assert_trees_close(torch.cat([p.label for p in parts]), whole.label)
    for key in whole.ids.keys:
        assert [bag for p in parts for bag in p.ids[key].to_lists()] == whole.ids[key].to_lists()


@pytest.mark.parametrize("kind", _ranks.PLANS)
def test_a_plan_places_every_table_on_the_whole_mesh(kind):
    """Every plan of the main job fits a mesh of two axes and keeps every bit. Except under replicated, every rank has
    rows."""
    mesh = fr.Mesh.emulated(data=2, model=2)
    configs = [fr.TableConfig(f"t{i}", 8, 4) for i in range(4)]
    tables = fr.init(fr.key(0), configs)
    held = fr.shard_tables(tables, fr.Plan.uniform(kind, configs, mesh), mesh)
    assert_trees_close(fr.gather_tables(held, mesh), tables)
    used = {r for s in held.layout.shards for r in s.ranks}
    assert used == ({0} if kind == "replicated" else {0, 1, 2, 3})

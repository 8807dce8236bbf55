"""Edge cases of the planner: tables on every rank together with the largest shard, pinned ranks, very large meshes."""

import itertools
import random

import pytest

import funcrec as fr
from funcrec.planner._packing import Item, Option, Packing
from funcrec.planner._solve import solve

SINGLE = tuple((r,) for r in range(128))
HOSTS = tuple(tuple(range(h, h + 8)) for h in range(0, 128, 8))


def packing(seed: int, num: int) -> Packing:
    """Return tables that lie on one rank, on one of 16 hosts or on every rank. Their times are drawn over two
    decades."""
    draw, items = random.Random(seed), []
    for i in range(num):
        host = 10 ** draw.uniform(-2, 0)
        every = Option("every rank", ((10 ** draw.uniform(-2, 1) * host,),), (tuple(range(128)),))
        options = (Option("a rank", ((6 * host,),), SINGLE), Option("a host", ((host,),), HOSTS), every)
        items.append(Item(f"t{i}", options))
    return Packing(tuple(items), 128, (1.0,))


@pytest.mark.parametrize("seed, num", [(3, 30), (8, 30), (9, 30), (34, 60)])
def test_the_bound_counts_what_every_rank_has(seed, num):
    """A plan is proved optimal where the largest shard's rank also has a part of the tables on all ranks."""
    assert solve(packing(seed, num)).gap < 1e-6


OF_ONE = [None, "table_wise", "column_wise"]
OF_TWO = [*OF_ONE, "table_row_wise", "table_column_wise", "grid"]
PINNED = [(m, k) for m in ({"h": 2, "m": 2}, {"h": 3, "m": 2}) for k in OF_TWO]
PINNED += [(m, k) for m in ({"h": 1, "m": 4}, {"m": 4}, {"a": 1, "b": 1}) for k in OF_ONE]


@pytest.mark.parametrize(("mesh", "kind"), PINNED)
def test_pinned_ranks_hold_the_table_or_no_plan_does(mesh, kind):
    """A table lies on the ranks that its constraint names, on any axes. If no axes have these ranks, the error says
    that the constraint leaves no placement."""
    num = fr.Mesh.emulated(**mesh).size
    kinds = () if kind is None else (kind,)
    tables, features = (fr.TableConfig("t", 100, 8),), (fr.FeatureConfig("f", table="t"),)
    for ranks in itertools.chain.from_iterable(itertools.combinations(range(num), k) for k in (1, 2)):
        told = {"t": {"ranks": ranks, "kinds": kinds}}
        try:
            made = fr.plan(tables, features, mesh, batch_size=64, constraints=told)["t"]
        except ValueError as error:
            assert "leave no placement" in str(error)
            assert kind is not None, "a table lies somewhere"
            continue
        assert made.ranks and set(made.ranks) <= set(ranks)


def test_a_mesh_beyond_all_clusters_is_refused():
    """A mesh with more ranks than a plan can have raises before any work, on one axis and on several."""
    tables = (fr.TableConfig("t", 100, 8),)
    for mesh in ({"m": 10**6}, {"h": 1000, "m": 1000}, {"h": 2**15, "m": 4}):
        with pytest.raises(ValueError, match="`mesh` has too many ranks") as told:
            fr.plan(tables, (), mesh, batch_size=64)
        assert all(word in str(told.value) for word in ("got", "need", "65,536"))

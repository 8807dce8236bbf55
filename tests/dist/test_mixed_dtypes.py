"""Tables of several dtypes on one mesh keep their dtypes, in any order."""

import itertools

import pytest
import torch
from programs import moving
from programs.moving import bits
from programs.training import plan_of

import funcrec as fr
from funcrec.testing import assert_trees_close

DTYPES = {"a": torch.float16, "b": torch.float32, "c": torch.float64}
ORDERS = list(itertools.permutations(DTYPES))
KINDS = ["row_wise", "column_wise", "table_wise", "replicated"]


def params(order):
    """Return tables filled with thirds, whose bits differ between any two dtypes."""
    rows = {"a": 12, "b": 7, "c": 5}
    dense = torch.ones(2)
    return fr.Params({n: torch.full((rows[n], 4), 1 / 3, dtype=DTYPES[n]) for n in order}, dense)


@pytest.mark.parametrize("order, kind", zip(ORDERS, itertools.cycle(KINDS)), ids=str)
def test_tables_keep_their_dtypes_in_every_order(order, kind, tmp_path):
    """Tables of mixed dtypes, and the tables' slots, return from a mesh with every bit, in any order. shard_tables, a
    step's init, reshard and load give the same state."""
    mesh, plan = fr.Mesh.emulated(x=2), plan_of(kind, {"x": 2})
    whole = params(order)
    assert_trees_close(bits(fr.gather_tables(fr.shard_tables(whole.tables, plan, mesh), mesh)), bits(whole.tables))
    alone, laid, sparse = moving.first_states(whole, plan, mesh)
    assert_trees_close(bits(fr.gather_state(laid, mesh)), bits(alone))
    fr.save(tmp_path / "state", alone)
    moved = fr.reshard(alone, plan, mesh=mesh, sparse=sparse)
    loaded = fr.load(tmp_path / "state", plan=plan, mesh=mesh, sparse=sparse)
    assert_trees_close(bits(moved), bits(laid))
    assert_trees_close(bits(loaded), bits(laid))


def test_ranks_keep_the_dtypes_of_tables(ranks):
    """On real ranks, tables of mixed dtypes also keep their dtypes."""
    for order in ORDERS[::2]:
        for got in ranks(2).run(moving.begun, params(order), {"x": 2}, "row_wise"):
            assert_trees_close(bits(got.tables), bits(params(order).tables))

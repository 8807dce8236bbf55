"""Route, combine and sharded lookups, under every transform, equal plain lookups of all ranks' bags.

The sharded lookups are emulated or on gloo ranks."""

import pytest
import torch
from programs import lookup_transforms as lookups
from programs.as_staged import as_staged
from programs.lookup_transforms import names

import funcrec as fr
from funcrec.testing import assert_trees_close

# the tolerance is for f64 sums in another order
EXACT = {"rtol": 1e-12, "atol": 1e-12}
MESHES = [{"x": 1}, {"x": 2}, {"x": 4}, {"x": 2, "y": 2}]
# one rank and four in a row share out the lookups
SHARE = {1: slice(0, None, 2), 4: slice(1, None, 2)}
CASES = [(axes, name) for axes in MESHES for name in names(axes)[SHARE.get(axes["x"], slice(None))]]
# on a grid, these cases of the grid placement stand for the row-wise ones
CASES = [(a, n) for a, n in CASES if len(a) == 1 or n not in ("row_wise, exact", "row_wise, coded", "row_wise, dedup")]
ON_FOUR = [({"x": 4}, "row_wise"), ({"x": 2, "y": 2}, "table_row_wise"), ({"x": 2, "y": 2}, "grid, exact")]


@pytest.mark.parametrize("axes, name", CASES, ids=str)
def test_a_sharded_lookup_is_the_lookup_under_every_transform(axes, name, ranks):
    """A sharded lookup, and every transform of it by banks and weights, equals the plain lookup of all ranks' bags.
    Coded lookups agree up to rounding. Each gloo rank, of two for all lookups and of four for some, has the same values
    as under emulation."""
    close, size = lookups.ROUNDED if "coded" in name else EXACT, torch.Size(axes.values()).numel()
    emulated = lookups.cells(fr.Mesh.emulated(**axes), name)
    assert_trees_close(emulated, lookups.wanted(axes, name), **close)
    for got in ranks(size).run(lookups.real_cells, axes, name) if size == 2 or (axes, name) in ON_FOUR else ():
        assert_trees_close(got, emulated, **EXACT)


ROUNDED = [({"x": 2}, "table_wise, rounded"), ({"x": 2}, "row_wise, rounded, dedup"), ({"x": 4}, "row_wise, rounded"),
    ({"x": 2}, "row_wise, rounded, exact, coded"), ({"x": 2, "y": 2}, "table_row_wise, rounded")]  # fmt: skip


@pytest.mark.parametrize("axes, name", ROUNDED, ids=str)
def test_tables_read_as_if_quantised_are_so_under_every_transform(axes, name, ranks):
    """Fake-quantised sharded tables, rounded by a key on their owners, with several dtypes in one bank, equal the
    tables of one process under every transform. This also holds on two gloo ranks."""
    close = lookups.ROUNDED if "coded" in name else EXACT
    want = lookups.wanted(axes, name)
    assert_trees_close(lookups.cells(fr.Mesh.emulated(**axes), name), want, **close)
    for got in ranks(2).run(lookups.real_cells, axes, name) if "dedup" in name else ():
        assert_trees_close(got, want, **close)


@pytest.mark.parametrize("axes, name", [({"x": 2}, "row_wise")], ids=str)
def test_staged_lookups_are_lookups(axes, name, interpreted):
    """jit of an emulated sharded lookup, and of its gradient, changes no value, staged. `transforms.py` prints all
    these values, compiled."""
    mesh = fr.Mesh.emulated(**axes)
    got, want = lookups.compiled_cells(mesh, [name]), lookups.cells(mesh, name, ("fwd", "grad"))
    assert_trees_close({"fwd": got["jit"][name], "grad": got["jit_grad"][name]}, want, **EXACT)


def test_staged_gradients_of_real_ranks_are_gradients(ranks):
    """jit of the gradient of a sharded lookup changes no value on gloo ranks, staged. test_training compiles such a
    step."""
    axes, name = {"x": 2}, "row_wise"
    want = lookups.cells(fr.Mesh.emulated(**axes), name, ("grad",))["grad"]
    real = ranks(2).run(as_staged, lookups.real_compiled_cells, axes, [name], ("grad",), deadline_s=500)[0]
    assert_trees_close(real["jit_grad"][name], want, **EXACT)

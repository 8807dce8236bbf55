"""The sweep of right-or-raises on a mesh: what is sharded, placed and sent is differentiated rightly, or raises; on real ranks, too."""

import functools

import pytest
import torch
from programs.differences import MODES, RAISED, RIGHT, Case, along, sweep
from programs.float_ranks import BITS, CASES, FEW, TRAINED, at_once, case_of, outcomes, trained

import funcrec as fr
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.xdist_group("ranks")
SHORT = ("collectives", "gather_tables", "gather_state", "reshard")


@pytest.mark.parametrize("name", CASES)
def test_every_derivative_on_an_emulated_mesh_is_right(name):
    """Of all float inputs at once every mode's derivative is what central differences say."""
    found = sweep(case_of(name, fr.Mesh.emulated(x=2)), tuple(MODES) if name in SHORT else FEW)
    assert [k for k, o in found.items() if o != RIGHT] == []


@pytest.mark.parametrize("name", [n for n in CASES if n != "train_step"])
def test_every_derivative_on_real_ranks_is_right_or_raises(name, ranks):
    """On two gloo ranks the ranks' derivatives add up to the differences; rows that travel as bits are refused, on both ranks."""
    for found in ranks(2).run(outcomes, name, FEW):
        wrong = {k: o for (_, k), o in found.items() if o != RIGHT}
        refused = set(FEW) - {"vmap"} if name in BITS else set()
        assert set(wrong) == refused and all(o.startswith(f"{RAISED}: TypeError funcrec.") for o in wrong.values()), (
            wrong
        )


@pytest.mark.parametrize("mode", FEW)
def test_jit_of_a_step_on_a_mesh_is_differentiated(mode):
    """A jitted step's derivative by tracked inputs is the step's own, bit for bit."""
    of = lambda jit: functools.partial(trained, fr.Mesh.emulated(x=2), how="plain", steps=1, jit=jit)
    plain, jitted = (MODES[mode][0](along(Case("step", *at_once(of(jit), TRAINED)), "x")) for jit in (False, True))
    assert_trees_close(jitted, plain)


def test_a_table_that_one_rank_holds_is_differentiated_alone(ranks):
    """The derivative by a table of which one rank has all rows makes the same exchanges on all ranks."""
    assert ranks(2).run(of_one_table) == [[12.0, 12.0]] * 2


def of_one_table():
    """Of Σ 3 · table, gathered: d/d table on this rank, for a table on rank 0 and one on rank 1."""
    mesh, sums = fr.Mesh.distributed(x=2), []
    plans = [fr.Plan({"t": fr.table_wise("x", rank=r)}) for r in (0, 1)]
    for plan in plans:
        total = lambda t: 3 * fr.gather_tables(fr.shard_tables({"t": t}, plan, mesh), mesh)["t"].sum()  # noqa: B023
        both = torch.func.grad(total)(torch.ones(2, 1)).sum()
        torch.distributed.all_reduce(both)
        sums.append(float(both))
    return sums

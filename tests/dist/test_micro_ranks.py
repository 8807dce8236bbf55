"""train_step(micro_batches=) on gloo ranks whose parts have different numbers of ids."""

import pytest
import torch
from programs import micro_ranks
from programs.as_staged import as_staged
from programs.micro_ranks import KINDS

import funcrec as fr
from funcrec.testing import assert_trees_close

SEEDS = range(2)
MESHES = {2: {"x": 2}, 4: {"x": 2, "y": 2}}


def assert_looped(made, kinds, pooling, n, k, **dense):
    for seed, (tables, weights, loss) in zip(SEEDS, made, strict=False):
        want_tables, want_weights, want_loss = micro_ranks.looped(kinds, pooling, seed, n, k)
        assert_trees_close(tables, want_tables)
        assert_trees_close(weights, want_weights, **dense)
        # the printed means are added in any order
        torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling, k", [("sum", 2), ("mean", 4)])
@pytest.mark.parametrize("n", MESHES)
def test_ranks_in_micro_batches_are_a_loop_over_parts(n, pooling, k, ranks):
    """Under every placement, n ranks with k micro-batches give the tables and dense parameters of one process that
    loops over all parts, bit for bit. The parts of each rank may have any number of ids. On a grid, each placement has
    one k."""
    for kind in KINDS[k // 4 :: 2] if n == 4 else KINDS[:4]:
        for made in ranks(n).run(micro_ranks.stepped, kind, pooling, SEEDS, MESHES[n], k, True):
            assert_looped(made, kind, pooling, n, k)


@pytest.mark.parametrize("n, kinds", [(2, KINDS[1:3]), (4, KINDS[5:])], ids=str)
def test_staged_ranks_in_micro_batches_are_a_loop_over_parts(n, kinds, ranks):
    """Staged ranks in micro-batches also give the result of the loop, with another placement for each table. The staged
    step may sum dense gradients in another order."""
    for made in ranks(n).run(as_staged, micro_ranks.stepped, kinds, "sum", SEEDS[:1], MESHES[n], 2, True, True):
        assert_looped(made, kinds, "sum", n, 2, rtol=1e-6, atol=1e-6)


def test_a_nested_calls_parts_have_one_capacity(ranks):
    """Bags cut by a nested call have one capacity on all ranks, even if the ranks of the outer axis have different
    numbers of ids. Exchanges over both axes equal those of the emulated grid."""
    want = micro_ranks.nested(fr.Mesh.emulated(x=2, y=2))
    assert [x.tolist() for x in want] == [[283], [2, 80]]
    for got in ranks(4).run(micro_ranks.real_nested):
        assert_trees_close(got, want)


def test_shards_of_other_forms_are_not_joined(ranks):
    """Before anything is sent, `unshard` raises on every rank if the forms of the shards differ."""
    for tensors, ids in ranks(2).run(micro_ranks.joined_unlike):
        assert "`tree` differs between the ranks" in tensors and "float32[3] on rank 1" in tensors
        assert "`tree` differs between the ranks" in ids and "values int64[24]" in ids


def test_a_batch_that_is_not_cut_evenly_raises_on_every_rank(ranks):
    """With 8 examples on each rank, 3 micro-batches raise on both ranks."""
    assert all("`batch` is not cut evenly" in text for text in ranks(2).run(micro_ranks.uncut, 3))

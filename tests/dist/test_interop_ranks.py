"""TorchRec's sharded state dicts, of ShardedTensors on real ranks, in ours and back."""

import pytest
from programs import interop_ranks

from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")


@pytest.mark.parametrize("kind", interop_ranks.KINDS)
def test_sharded_training_goes_on(kind, ranks):
    """What TorchRec's DistributedModelParallel has trained on two ranks is loaded whole, trains on under our plan with
    the same losses and tables, goes back into a fresh one's shards bit by bit, and does so again."""
    for losses, tables, came_back in ranks(2).run(interop_ranks.goes_on, kind, deadline_s=200):
        for ours, theirs in [*losses, *tables]:
            assert_trees_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert came_back


def test_dtensors_are_loaded_whole_and_cut_again(ranks):
    """A state dict of DTensors, torch's own and of TorchRec's shards, is loaded whole on every rank; what goes back
    is each rank's part."""
    for got, want, parts, own in ranks(2).run(interop_ranks.dtensors, deadline_s=100):
        assert_trees_close((got, parts), (want, own))

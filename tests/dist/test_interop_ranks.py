"""TorchRec's sharded state dicts, with ShardedTensors on real ranks, convert to ours and back."""

import pytest
from programs import interop_ranks

from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")


@pytest.mark.parametrize("kind", interop_ranks.KINDS)
def test_sharded_training_goes_on(kind, ranks):
    """Training by TorchRec's DistributedModelParallel on two ranks is loaded whole, and trains on under our plan
    with the same losses and tables. It converts back into a fresh model's shards bit for bit, and training goes on
    there."""
    for losses, tables, came_back in ranks(2).run(interop_ranks.goes_on, kind, deadline_s=200):
        for ours, theirs in [*losses, *tables]:
            assert_trees_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert came_back


def test_dtensors_are_loaded_whole_and_cut_again(ranks):
    """A state dict of DTensors, torch's own and those of TorchRec's shards, is loaded whole on every rank. Converted
    back, each rank gets its part."""
    for got, want, parts, own in ranks(2).run(interop_ranks.dtensors, deadline_s=100):
        assert_trees_close((got, parts), (want, own))

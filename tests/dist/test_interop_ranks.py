"""State dicts of TorchRec, with ShardedTensors on real ranks, convert to states of funcrec and back."""

import pytest
from programs import interop_ranks

from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")


@pytest.mark.parametrize("kind", interop_ranks.KINDS)
def test_sharded_training_goes_on(kind, ranks):
    """Training by TorchRec's DistributedModelParallel on two ranks is loaded whole, and continues under our plan with
    the same losses and tables. The state converts back into the shards of a fresh TorchRec model bit for bit. Training
    continues there."""
    for losses, tables, came_back in ranks(2).run(interop_ranks.goes_on, kind, deadline_s=200):
        for ours, theirs in [*losses, *tables]:
            assert_trees_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert came_back


def test_dtensors_are_loaded_whole_and_cut_again(ranks):
    """Every rank loads a state dict of DTensors whole, with torch's shards and with TorchRec's shards. After conversion
    back, each rank gets its part."""
    for got, want, parts, own in ranks(2).run(interop_ranks.dtensors, deadline_s=100):
        assert_trees_close((got, parts), (want, own))

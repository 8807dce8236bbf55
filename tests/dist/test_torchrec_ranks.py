"""Sharded training equals that of TorchRec's DistributedModelParallel with the same weights, batches and ranks."""

import pytest
from programs import torchrec_ranks

from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")


@pytest.mark.parametrize("kind", torchrec_ranks.KINDS)
def test_losses_are_torchrecs(kind, ranks):
    """Six steps on two ranks have the losses of TorchRec step by step, and give its tables. This holds under every
    placement that both libraries have."""
    got, want = (ranks(2).run(f, kind, 6, deadline_s=200) for f in (torchrec_ranks.ours, torchrec_ranks.theirs))
    for mine, other in zip(got, want, strict=True):
        assert_trees_close(mine, other, rtol=1e-6, atol=1e-6)

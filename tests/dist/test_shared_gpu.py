"""Ranks of gloo whose tensors are on a GPU that they share. No test needs a GPU: the transport's choice is tested."""

import pytest
from programs import shared_gpu

SUPPORTED = {"_c10d_functional::all_reduce", "_c10d_functional::all_to_all_single"}


def test_ranks_of_gloo_share_gpus(ranks):
    """On a mesh of a gloo group, tensors of a GPU travel by gloo. Ranks choose their GPUs in turn."""
    (own, backend, total), (others, *rest) = ranks(2).run(shared_gpu.mesh_of, 1)
    assert set(own) == set(others) == {0} and (backend, total) == tuple(rest) == ("gloo", 3.0)
    (own, *_), (others, *_) = ranks(2).run(shared_gpu.mesh_of, 2)
    assert own[0] == 0 and others[0] == 1


@pytest.mark.parametrize(("num_gpus", "num_ranks", "backend", "said"), [
    (0, 1, "nccl", "has no GPU. 0 GPUs"), (0, 2, "gloo", "has no GPU. 0 GPUs"), (2, 2, "nccl", ""), (1, 2, "gloo", ""),
    (1, 2, "nccl", "would share a GPU. 2 ranks and 1 GPUs"),
])  # fmt: skip
def test_ranks_of_nccl_have_a_gpu_each(num_gpus, num_ranks, backend, said, ranks):
    """Ranks of NCCL that would share a GPU, and ranks without one, raise before a group is made."""
    for text in ranks(2).run(shared_gpu.refused, num_gpus, num_ranks, backend):
        assert said in text if said else not text


def test_gloo_s_collectives_are_those_that_take_tensors_of_a_gpu(ranks):
    """On gloo every collective and its derivative is a sum or a swap. gloo has both for tensors of a GPU, and lacks
    gathers into one tensor and scattered sums."""
    found, other = ranks(2).run(shared_gpu.operators)
    assert found == other and set(found) == set(shared_gpu.COLLECTIVES)
    assert all(set(kinds) <= {x.partition("::")[2] for x in SUPPORTED} and kinds for kinds in found.values()), found


def test_a_program_that_exchanges_by_gloo_is_not_recorded(ranks):
    """A donated call that exchanges by gloo runs anew in each call: a CUDA graph cannot hold a copy to the host. A call
    without an exchange is recorded."""
    assert ranks(2).run(shared_gpu.recorded) == [(0, 1)] * 2

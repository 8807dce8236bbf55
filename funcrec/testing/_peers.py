"""What torch and FBGEMM have for the same work, under the same transforms: `--peers` of the table.

A peer's function is compared with central differences of the same sums in f64, so a kernel that computes in f32 may
round. FBGEMM's rows stand only where it is installed. Collectives run in a group of one process.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from funcrec.testing._modes import Case, sweep

LENGTHS = torch.tensor([2, 0, 3, 1])
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
IDS = torch.tensor([0, 2, 1, 1, 3, 2])
ROUNDED = 1e-4  # of a kernel that computes in f32, relative to its sums


class Peer(NamedTuple):
    """A peer's function of one tensor, an example, the same function in f64 if the peer rounds, and its rounding."""

    f: Callable[[Tensor], Tensor]
    x: Tensor
    smooth: Callable[[Tensor], Tensor] | None = None
    rtol: float = 0.0


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def summed(rows: Tensor) -> Tensor:
    """Return the sum of each bag of rows."""
    bags = torch.repeat_interleave(torch.arange(4), LENGTHS)
    return torch.zeros(4, *rows.shape[1:], dtype=rows.dtype).index_add(0, bags, rows)


def of_torch() -> dict[str, Peer]:
    """Return rows of torch's own functions."""
    table, weights = drawn(4, 4), drawn(6, seed=1)
    bag = lambda mode: lambda t: F.embedding_bag(IDS, t, OFFSETS, mode=mode, include_last_offset=True)
    weighted = lambda w: F.embedding_bag(
        IDS, table, OFFSETS, mode="sum", per_sample_weights=w, include_last_offset=True
    )
    return {
        **{f"F.embedding_bag, {mode}": Peer(bag(mode), table) for mode in ("sum", "mean", "max")},
        "F.embedding_bag, by its weights": Peer(weighted, weights),
        "F.embedding": Peer(lambda t: F.embedding(IDS, t), table),
        "torch.segment_reduce, sum": Peer(lambda x: torch.segment_reduce(x, "sum", lengths=LENGTHS, axis=0), weights),
    }


def of_collectives() -> dict[str, Peer]:
    """Return rows of torch's functional collectives, in the group of one process that `group_of_one` makes."""
    from torch.distributed import _functional_collectives as c

    x = drawn(3)
    return {
        "functional all_reduce": Peer(lambda x: c.wait_tensor(c.all_reduce(x, "sum", [0])), x, torch.clone),
        "functional all_gather": Peer(lambda x: c.wait_tensor(c.all_gather_tensor(x, 0, [0])), x, torch.clone),
        "functional reduce_scatter": Peer(
            lambda x: c.wait_tensor(c.reduce_scatter_tensor(x, "sum", 0, [0])), x, torch.clone
        ),
    }


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Begin a process group of one rank, unless the process has a group."""
    dist = torch.distributed
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_fbgemm() -> dict[str, Peer]:
    """Return rows of FBGEMM's table-batched embeddings and jagged operators; none where it is not installed."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return {}
    import fbgemm_gpu  # noqa: F401
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        DenseTableBatchedEmbeddingBagsCodegen,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    ops, table, weights = torch.ops.fbgemm, drawn(4, 4), drawn(6, seed=1)
    dense = DenseTableBatchedEmbeddingBagsCodegen([(4, 4)], use_cpu=True)
    split = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.EXACT_SGD, learning_rate=0.0
    )
    split.weights_host.data.copy_(table.flatten())
    rows = lambda t: summed(t[IDS])
    by_weights = lambda w: summed(table[IDS] * w[:, None])
    of_table = lambda t: torch.func.functional_call(dense, {"weights": t.float().flatten()}, (IDS, OFFSETS)).double()
    of_weights = lambda w: split(IDS, OFFSETS, per_sample_weights=w.float()).double()
    padded = lambda x: ops.jagged_to_padded_dense(x.float(), [OFFSETS], [3], 0.0).double()
    ones = torch.ones(4, 3, 2)
    added = lambda x: ops.jagged_dense_elementwise_add(x.float(), [OFFSETS], ones).double()
    csr = lambda x: ops.segment_sum_csr(1, OFFSETS, x.float()).double()
    pairs = drawn(6, 2, seed=2)
    in_bags = torch.cat([torch.arange(n) + 3 * b for b, n in enumerate(LENGTHS.tolist())])
    in_f64 = lambda x: x.new_zeros(12, 2).index_put((in_bags,), x).view(4, 3, 2)
    return {
        "FBGEMM dense TBE": Peer(of_table, table, rows, ROUNDED),
        "FBGEMM split TBE, by its weights": Peer(of_weights, weights, by_weights, ROUNDED),
        "FBGEMM jagged_to_padded_dense": Peer(padded, pairs, in_f64, ROUNDED),
        "FBGEMM segment_sum_csr": Peer(csr, weights, summed, ROUNDED),
        "FBGEMM jagged_dense_elementwise_add": Peer(added, pairs, lambda x: in_f64(x) + 1, ROUNDED),
        "FBGEMM index_select_dim0": Peer(lambda t: ops.index_select_dim0(t, IDS), table),
    }


def cells(modes: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (name, {mode: outcome}) of each peer's sin(f(x)), whose second derivatives are not 0."""
    with group_of_one():
        for name, own in {**of_torch(), **of_fbgemm(), **of_collectives()}.items():
            f, smooth = (lambda x, g=g: g(x).sin() for g in (own.f, own.smooth or own.f))
            found = sweep(Case(name, f, {"x": own.x}, smooth=smooth, rtol=own.rtol), tuple(modes))
            yield name, {mode: outcome for (_, mode), outcome in found.items()}

"""On a mesh, the sum of the ranks' states is the state of all examples: compute(psum(states)) = compute(whole)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec import metrics
from funcrec.core._tree import tree_leaves

BINARY = {
    "auc": metrics.auc(64),
    "average_precision": metrics.average_precision(64),
    "hindsight_target_pr": metrics.hindsight_target_pr(0.4, 64),
    "normalized_entropy": metrics.normalized_entropy(),
    "cali_free_ne": metrics.cali_free_ne(),
    "calibration": metrics.calibration(),
    "nrmse": metrics.nrmse(),
    "binary_recall": metrics.binary_recall(),
    "sums": metrics.collect({"w": metrics.sum_weights(), "y": metrics.num_positive_samples()}),
    "windowed": metrics.windowed(metrics.log_loss(), 2),
    "unweighted": metrics.unweighted(metrics.mae()),
    "labelled": metrics.labelled(metrics.ctr()),
}
IN_GROUPS = {
    "grouped": metrics.grouped(metrics.normalized_entropy(), 4),
    "by_session": metrics.by_session(metrics.auc(16)),
    "recall_session_level": metrics.recall_session_level(2),
    "precision_session_level": metrics.precision_session_level(1),
    "session_ndcg": metrics.session_ndcg(3),
}
METRICS = {**BINARY, **IN_GROUPS, "xauc": metrics.xauc(), "per_task": metrics.per_task(metrics.mse(), 1)}


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=8)
@given(ranks=st.sampled_from([1, 2, 4]), num=st.integers(0, 6), seed=st.integers(0, 999))
def test_the_sum_of_ranks_is_the_whole(name, ranks, num, seed):
    """Each rank updates a state by its part, in two batches, and `psum` adds them. The number is that of one process,
    whatever the ties, classes and weights. Sessions are whole on a rank. For xauc, only pairs within a batch count."""
    metric, g = METRICS[name], torch.Generator().manual_seed(seed)
    size = 2 * num * ranks
    p, y = torch.randint(1, 8, (size,), generator=g).double() / 8, torch.randint(0, 2, (size,), generator=g).double()
    w, groups = torch.randint(0, 3, (size,), generator=g).double(), torch.arange(size) // max(num, 1) % 4
    rows = (p, y, w, groups)

    def updated(state, p, y, w, groups):
        p, y = (p[:, None], y[:, None]) if name == "per_task" else (p, y)
        return metric.update(state, p, (y, groups) if name in IN_GROUPS else y, w)

    def of_rank(*rows):
        state = metric.init()
        for part in (slice(num), slice(num, None)):
            state = updated(state, *(x[part] for x in rows))
        return metric.compute(fr.psum(state, "data"))

    mesh = fr.Mesh.emulated(data=ranks)
    found = fr.shard_map(of_rank, mesh=mesh, in_specs=fr.P("data"), out_specs=fr.P())(*rows)
    state = metric.init()
    parts = zip(*(x.split(num) if num else (x,) for x in rows), strict=True)
    for part in parts if name in ("by_session", "xauc", *list(IN_GROUPS)[1:]) else (rows,):
        state = updated(state, *part)
    for x, want in zip(tree_leaves(found), tree_leaves(metric.compute(state)), strict=True):
        torch.testing.assert_close(x, want, rtol=1e-11, atol=1e-12, equal_nan=True)

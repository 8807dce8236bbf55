"""Metrics equal the computations of TorchRec, in f64 and over several batches."""

import math

import pytest
import torch

from funcrec import metrics

pytest.importorskip("torchrec")
from torchrec.metrics.accuracy import AccuracyMetricComputation
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.calibration import CalibrationMetricComputation
from torchrec.metrics.ctr import CTRMetricComputation
from torchrec.metrics.mae import MAEMetricComputation
from torchrec.metrics.metrics_namespace import MetricPrefix
from torchrec.metrics.mse import MSEMetricComputation
from torchrec.metrics.ne import NEMetricComputation

B, BATCHES = 500, 3
PAIRS = {  # name -> (our metric, that of TorchRec, its name in the report, the factor to our unit)
    "normalized_entropy": (metrics.normalized_entropy(), NEMetricComputation, "ne", 1),
    # the log loss of TorchRec is in bits
    "log_loss": (metrics.log_loss(), NEMetricComputation, "logloss", math.log(2)),
    "calibration": (metrics.calibration(), CalibrationMetricComputation, "calibration", 1),
    "ctr": (metrics.ctr(), CTRMetricComputation, "ctr", 1),
    "mse": (metrics.mse(), MSEMetricComputation, "mse", 1),
    "mae": (metrics.mae(), MAEMetricComputation, "mae", 1),
    "accuracy": (metrics.accuracy(), AccuracyMetricComputation, "accuracy", 1),
}


def batches(seed, weighted):
    """Yield, BATCHES times, (predictions, labels, weights), f64[B]. Some examples have weight 0."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(BATCHES):
        z = torch.randn(B, generator=g, dtype=torch.float64)
        y = (torch.rand(B, generator=g) < (2 * z).sigmoid()).double()
        w = torch.rand(B, generator=g, dtype=torch.float64)
        yield z.sigmoid(), y, torch.where(w < 0.1, 0, w) if weighted else torch.ones(B, dtype=torch.float64)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_sums_are_theirs(name, weighted):
    """After several batches our value is the lifetime value of TorchRec. The log loss of TorchRec is in bits, ours is
    in nats."""
    ours, cls, report, unit = PAIRS[name]
    options = {"include_logloss": True} if cls is NEMetricComputation else {}
    theirs = cls(my_rank=0, batch_size=B, n_tasks=1, window_size=B * BATCHES, **options)
    state = ours.init()
    for p, y, w in batches(0, weighted):
        state = ours.update(state, p, y, w if weighted else None)
        theirs.update(predictions=p[None], labels=y[None], weights=w[None])
    found = {r.name.value: r.value for r in theirs.compute() if r.metric_prefix == MetricPrefix.LIFETIME}
    assert abs(float(ours.compute(state)) - unit * float(found[report])) < 1e-12


@pytest.mark.parametrize("weighted", [False, True])
def test_auc_is_theirs_without_ties(weighted):
    """exact_auc equals compute_auc of distinct scores, up to rounding. The histogram is within its bound."""
    ps, ys, ws = zip(*batches(1, weighted), strict=True)
    p, y, w = torch.cat(ps), torch.cat(ys), torch.cat(ws)
    assert len(p.unique()) == len(p)
    want = float(compute_auc(1, *([x[None] for x in side] for side in (ps, ys, ws))))
    assert abs(float(metrics.exact_auc(p, y, w)) - want) < 1e-12
    state = metrics.auc().init()
    for batch in zip(ps, ys, ws, strict=True):
        state = metrics.auc().update(state, *batch)
    assert abs(float(metrics.auc().compute(state)) - want) <= float(metrics.auc_error(state)) + 1e-12

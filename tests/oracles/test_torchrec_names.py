"""Every name of TorchRec's metrics has an answer here, with the value of TorchRec's own computation.

The inputs have no ties of predictions where TorchRec's value depends on the order of a sort. Weights are 0, 1 and 2
where TorchRec counts them.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import funcrec as fr
from funcrec import metrics
from funcrec.metrics._torchrec import TORCHREC_NAMES, torchrec_table

pytest.importorskip("torchrec")
from torchrec.metrics.metrics_config import RecMetricEnum, RecTaskInfo, SessionMetricDef
from torchrec.metrics.metrics_namespace import MetricPrefix

B, BATCHES, GROUPS, LABELS = 60, 3, 3, 3
README = Path(fr.interop.__file__).parent / "README.md"
WITHOUT = {"tower_qps": "not a function of a batch", "serving_ae_loss": "TorchRec has the name and no metric"}
BESIDES = {"gauc", "grouped_auc", "grouped_auprc", "grouped_rauc"}


class Rows(NamedTuple):
    """Random rows of one batch: predictions without ties, labels, weights, groups, and groups that no other batch
    has."""

    p: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor
    own: torch.Tensor


class Case(NamedTuple):
    """A computation of TorchRec's: its module, class, options and the name in its report.

    inputs: rows -> further arguments of its update. theirs, ours: rows -> (predictions, labels, weights).
    view: (our value, all rows) -> our value in TorchRec's unit. at: which of the values that TorchRec reports under
    that name. labels: "clicks" or "numbers". weights: the values of weights. atol: above 1e-9 if theirs is in f32.
    """

    module: str
    cls: str
    report: str
    options: dict = {}
    inputs: Callable[[Rows], dict] = lambda r: {}
    theirs: Callable[[Rows], tuple] = lambda r: (r.p, r.y, r.w)
    ours: Callable[[Rows], tuple] = lambda r: (r.p, r.y, r.w)
    view: Callable[[Any, Rows], Any] = lambda x, r: x
    at: slice = slice(None)
    labels: str = "clicks"
    weights: tuple = (0.0, 1.0, 2.0)
    atol: float = 1e-9


def required(**of: Callable[[Rows], torch.Tensor]) -> Callable[[Rows], dict]:
    return lambda r: {"required_inputs": {n: f(r) for n, f in of.items()}}


def coded(x: torch.Tensor) -> torch.Tensor:
    """Return each row of bits as one integer."""
    return (x.long() << torch.arange(x.shape[1])).sum(1)


def bits(x: torch.Tensor, salt: int) -> torch.Tensor:
    return ((x * 997 * salt).long()[:, None] >> torch.arange(LABELS)) & 1


def entropy_bits(rate: torch.Tensor) -> torch.Tensor:
    return -rate * rate.log2() - (1 - rate) * (1 - rate).log2()


def missing(r: Rows) -> tuple:
    return r.p, torch.where(r.p < 0.3, torch.nan, r.y), r.w


def logits(r: Rows) -> torch.Tensor:
    return torch.stack([(r.p * 7 * (i + 1)).sin() for i in range(4)], 1)


SESSION = {"session_metric_def": SessionMetricDef("session", 2)}
SESSIONS = {
    "options": SESSION,
    "inputs": required(session=lambda r: r.g[None]),
    "ours": lambda r: (r.p, (r.y, r.g), r.w),
    "weights": (1.0, 2.0),
}
GROUPED = {"ours": lambda r: (r.p, (r.y, r.g), r.w), "inputs": required(grouping_keys=lambda r: r.g), "atol": 1e-6}
NO_WEIGHTS = {"weights": (1.0,)}
NUMBERS = {"labels": "numbers"}
CASES = {
    "ne": Case("ne", "NEMetricComputation", "ne"),
    "ne_positive": Case("ne_positive", "NEPositiveMetricComputation", "ne_positive"),
    "recalibrated_ne": Case("ne_with_recalibration", "RecalibratedNEMetricComputation", "ne",
        {"recalibration_coefficient": 0.2}),
    "recalibrated_calibration": Case("calibration_with_recalibration", "RecalibratedCalibrationMetricComputation",
        "calibration", {"recalibration_coefficient": 0.2}),
    "segmented_ne": Case("segmented_ne", "SegmentedNEMetricComputation", "segmented_ne", {"num_groups": GROUPS},
        required(grouping_keys=lambda r: r.g[None]), ours=GROUPED["ours"], atol=1e-6),
    "log_loss": Case("ne", "NEMetricComputation", "logloss", {"include_logloss": True}),
    "ctr": Case("ctr", "CTRMetricComputation", "ctr"),
    "auc": Case("auc", "AUCMetricComputation", "auc", atol=1e-6),
    "auprc": Case("auprc", "AUPRCMetricComputation", "auprc", atol=1e-6),
    "rauc": Case("rauc", "RAUCMetricComputation", "rauc", atol=1e-6, **NO_WEIGHTS, **NUMBERS),
    "calibration": Case("calibration", "CalibrationMetricComputation", "calibration"),
    "mse": Case("mse", "MSEMetricComputation", "mse", **NUMBERS),
    "mae": Case("mae", "MAEMetricComputation", "mae", **NUMBERS),
    "multiclass_recall": Case("multiclass_recall", "MulticlassRecallMetricComputation", "multiclass_recall",
        {"number_of_classes": 4}, theirs=lambda r: (logits(r), (r.p * 97).long() % 4, r.w),
        ours=lambda r: (logits(r), (r.p * 97).long() % 4, r.w), at=slice(1, 2)),
    "recall_session_level": Case("recall_session", "RecallSessionMetricComputation", "recall_session_level",
        **SESSIONS),
    "precision_session_level": Case("precision_session", "PrecisionSessionMetricComputation",
        "precision_session_level", **SESSIONS),
    "weighted_avg": Case("weighted_avg", "WeightedAvgMetricComputation", "weighted_avg"),
    "accuracy": Case("accuracy", "AccuracyMetricComputation", "accuracy"),
    "ndcg": Case("ndcg", "NDCGComputation", "ndcg", inputs=required(session_id=lambda r: r.g[None]),
        ours=lambda r: (r.p, (r.y, r.g), r.w), view=lambda x, r: 1 - x, atol=1e-7, **NO_WEIGHTS, **NUMBERS),
    "xauc": Case("xauc", "XAUCMetricComputation", "xauc", **NUMBERS),
    "scalar": Case("scalar", "ScalarMetricComputation", "scalar", **NUMBERS, **NO_WEIGHTS),
    "precision": Case("precision", "PrecisionMetricComputation", "precision"),
    "recall": Case("recall", "RecallMetricComputation", "recall"),
    "serving_ne": Case("serving_ne", "ServingNEMetricComputation", "ne"),
    "serving_calibration": Case("serving_calibration", "ServingCalibrationMetricComputation", "calibration"),
    "output": Case("output", "OutputMetricComputation", "output",
        inputs=required(latest_imp=lambda r: r.p[None], total_latest_imp=lambda r: r.p[None]), at=slice(1),
        atol=1e-7, **NO_WEIGHTS),
    "tensor_weighted_avg": Case("tensor_weighted_avg", "TensorWeightedAvgMetricComputation", "weighted_avg",
        {"tasks": [RecTaskInfo("a", tensor_name="x", weighted=True)]}, required(x=lambda r: r.p[None] * 9),
        ours=lambda r: (r.p * 9, r.y, r.w)),
    "cali_free_ne": Case("cali_free_ne", "CaliFreeNEMetricComputation", "cali_free_ne",
        view=lambda x, r: x / (r.w.sum() * entropy_bits((r.w * r.y).sum() / r.w.sum()))),
    "unweighted_ne": Case("unweighted_ne", "UnweightedNEMetricComputation", "unweighted_ne", weights=(1.0, 2.0)),
    "hindsight_target_pr": Case("hindsight_target_pr", "HindsightTargetPRMetricComputation",
        "hindsight_target_precision", {"target_precision": 0.5}, view=lambda found, r: found["precision"]),
    "nmse": Case("nmse", "NMSEMetricComputation", "nmse", **NUMBERS),
    "average": Case("average", "AverageMetricComputation", "label_average", view=lambda found, r: found["label"]),
    "multi_label_precision": Case("multi_label_precision", "MultiLabelPrecisionMetricComputation",
        "multi_label_precision",
        {"num_labels": LABELS}, theirs=lambda r: (coded(bits(r.p, 1)), coded(bits(r.p, 3)), r.w),
        ours=lambda r: (bits(r.p, 1).double(), bits(r.p, 3), r.w)),
    "num_positive_samples": Case("num_positive_samples", "NumPositiveSamplesMetricComputation", "num_positive_samples",
        theirs=missing, ours=missing),
    "sum_weights": Case("sum_weights", "SumWeightsMetricComputation", "sum_weights", theirs=missing, ours=missing),
    "num_missing_labels": Case("num_missing_labels", "NumMissingLabelsMetricComputation", "num_missing_labels",
        theirs=missing, ours=missing),
    "weighted_sum_predictions": Case("weighted_sum_predictions", "WeightedSumPredictionsMetricComputation",
        "weighted_sum_predictions"),
    "gauc": Case("gauc", "GAUCMetricComputation", "gauc", inputs=lambda r: {"num_candidates": r.g.bincount()},
        theirs=lambda r: (r.p.float(), r.y.float(), r.w.float()), ours=lambda r: (r.p, (r.y, r.own), r.w),
        atol=1e-6, **NO_WEIGHTS),
    "grouped_auc": Case("auc", "AUCMetricComputation", "grouped_auc", {"grouped_auc": True}, **GROUPED),
    "grouped_auprc": Case("auprc", "AUPRCMetricComputation", "grouped_auprc", {"grouped_auprc": True}, **GROUPED),
    "grouped_rauc": Case("rauc", "RAUCMetricComputation", "grouped_rauc", {"grouped_rauc": True}, **GROUPED,
        **NO_WEIGHTS, **NUMBERS),
}  # fmt: skip


def batches(case: Case, seed: int) -> list[Rows]:
    g, found = torch.Generator().manual_seed(seed), []
    for p in ((torch.randperm(B * BATCHES, generator=g).double() + 0.5) / (B * BATCHES)).split(B):
        noise = torch.rand(B, generator=g, dtype=torch.float64)
        y = (noise < p).double() if case.labels == "clicks" else noise * 3 + p
        w = torch.tensor(case.weights, dtype=torch.float64)[torch.randint(0, len(case.weights), (B,), generator=g)]
        groups = torch.arange(B) * GROUPS // B
        found.append(Rows(p, y, w, groups, groups + GROUPS * len(found)))
    return found


def theirs_of(case: Case, rows: list[Rows]) -> torch.Tensor:
    cls = getattr(importlib.import_module(f"torchrec.metrics.{case.module}"), case.cls)
    metric = cls(my_rank=0, batch_size=B, n_tasks=1, window_size=B * 100, **case.options)
    for r in rows:
        p, y, w = (x[None] for x in case.theirs(r))
        metric.update(predictions=p, labels=y, weights=w, **case.inputs(r))
    found = metric.compute()
    named = [r for r in found if r.name.value == case.report]
    whole = [r for r in named if r.metric_prefix in (MetricPrefix.LIFETIME, MetricPrefix.DEFAULT)]
    return torch.cat([r.value.double().flatten() for r in whole or named])[case.at]


def ours_of(name: str, case: Case, rows: list[Rows]) -> torch.Tensor:
    metric = eval(TORCHREC_NAMES[name].call, dict(vars(metrics)))
    if not isinstance(metric, metrics.Metric):
        whole = fr.tree.map(lambda *xs: torch.cat(xs), *(case.ours(r) for r in rows))
        return metric(*whole).flatten()
    state = metric.init()
    for r in rows:
        state = metric.update(state, *case.ours(r))
    return torch.as_tensor(case.view(metric.compute(state), Rows(*map(torch.cat, zip(*rows, strict=True))))).flatten()


def test_every_name_has_an_answer():
    """The table has the 39 names of TorchRec's enumeration and four that only its reports have. Each has a comparison
    with TorchRec, or a reason why there is none."""
    assert {m.value for m in RecMetricEnum} | BESIDES == set(TORCHREC_NAMES)
    assert set(CASES) | set(WITHOUT) == set(TORCHREC_NAMES)
    assert torchrec_table() in README.read_text()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_the_value_is_theirs(name, seed):
    """After several batches with weights 0, 1 and 2 our value is TorchRec's lifetime value."""
    case = CASES[name]
    rows = batches(case, seed)
    want, got = theirs_of(case, rows), ours_of(name, case, rows)
    torch.testing.assert_close(got, want, rtol=case.atol, atol=case.atol)

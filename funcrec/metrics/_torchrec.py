"""The names of TorchRec's metrics, and the call that computes each here.

`tests/oracles/test_torchrec_names.py` runs each call next to TorchRec's computation, and checks that the table of
interop/README.md is this one.
"""

from typing import NamedTuple


class Answer(NamedTuple):
    """A metric for a name of TorchRec's.

    call: the call, in names of `fr.metrics`; numbers in it are examples. A function of a whole set stands without
      parentheses. formula: what it computes; w, y, p are weights, labels, predictions. oracle: what its tests compare
      it with. differs: where TorchRec's number differs, or "".
    """

    call: str
    formula: str
    oracle: str
    differs: str = ""


OURS, SKLEARN = "TorchRec", "TorchRec, scikit-learn"
NONE_IS_NAN = "without examples 0 or ½; here NaN"

TORCHREC_NAMES = {
    "ne": Answer("normalized_entropy()", "log loss / log loss of predicting Σwy/Σw", SKLEARN),
    "ne_positive": Answer("positive_normalized_entropy()", "NE with the positives' loss alone above", OURS),
    "recalibrated_ne": Answer("recalibrated(normalized_entropy(), 0.2)", "NE of p / (p + (1 - p) / c)", OURS),
    "recalibrated_calibration": Answer(
        "recalibrated(calibration(), 0.2)", "calibration of p / (p + (1 - p) / c)", OURS
    ),
    "segmented_ne": Answer("grouped(normalized_entropy(), 3)", "NE of each group", OURS),
    "log_loss": Answer('log_loss(unit="bits")', "-Σw(y log₂ p + (1 - y) log₂(1 - p)) / Σw", SKLEARN),
    "ctr": Answer("ctr()", "Σwy / Σw", OURS),
    "auc": Answer(
        "exact_auc", "pairs of a positive above a negative; ties ½", SKLEARN, "ties by the order of a sort; one class ½"
    ),
    "auprc": Answer("exact_average_precision", "Σ precision · Δrecall", SKLEARN, NONE_IS_NAN),
    "rauc": Answer(
        "exact_rauc", "pairs of different labels in order; ties ½", "brute force, scipy's somersd, TorchRec",
        "ties of scores or labels count whole; no weights",
    ),
    "calibration": Answer("calibration()", "Σwp / Σwy", OURS),
    "mse": Answer("mse()", "Σw(p - y)² / Σw; also `rmse()`, `r2()`", SKLEARN),
    "mae": Answer("mae()", "Σw abs(p - y) / Σw", SKLEARN),
    "multiclass_recall": Answer("top_k_accuracy(2)", "Σw[rank of the class <= k] / Σw", SKLEARN, "k counts from 0"),
    "recall_session_level": Answer(
        "recall_session_level(2)", "Σwy[rank in session <= k] / Σwy", OURS, "ranks of examples of weight 0 count"
    ),
    "precision_session_level": Answer(
        "precision_session_level(2)", "Σwy[rank in session <= k] / Σw[rank in session <= k]", OURS,
        "ranks of examples of weight 0 count",
    ),
    "weighted_avg": Answer("weighted_avg()", "Σwp / Σw", OURS),
    "tower_qps": Answer("", "examples a second: see the progress of `fr.fit`; time is not a function of a batch", ""),
    "accuracy": Answer("accuracy()", "Σw[(p >= ½) = y] / Σw", SKLEARN),
    "ndcg": Answer(
        "session_ndcg()", "Σω DCG / best DCG / Σω over sessions", "TorchRec, scikit-learn",
        "1 - NDCG, over the number of sessions; a session without a gain counts as 0; ties by the order of a sort",
    ),
    "xauc": Answer(
        "xauc()", "pairs of one batch in order; ties ½", "brute force, TorchRec", "a tie of scores or labels counts 0"
    ),
    "scalar": Answer("windowed(unweighted(mean_label()), 1)", "Σy / B of the last batch", OURS),
    "precision": Answer("binary_precision()", "Σwy[p >= ½] / Σw[p >= ½]", SKLEARN, NONE_IS_NAN),
    "recall": Answer("binary_recall()", "Σwy[p >= ½] / Σwy", SKLEARN, NONE_IS_NAN),
    "serving_ne": Answer("normalized_entropy()", "NE of what was served", OURS),
    "serving_calibration": Answer("calibration()", "calibration of what was served", OURS),
    "serving_ae_loss": Answer(
        "mae()", "Σw abs(p - y) / Σw of what was served", "scikit-learn", "a name without a metric"
    ),
    "output": Answer("windowed(unweighted(weighted_avg()), 1)", "the mean of a column of the last batch", OURS),
    "tensor_weighted_avg": Answer("weighted_avg()", "Σwx / Σw of any column x, passed as predictions", OURS),
    "cali_free_ne": Answer(
        "cali_free_ne()", "log loss / log loss of predicting Σwp/Σw", "brute force, TorchRec",
        "divided by Σw and by the base rate's entropy in bits as well, so it falls with more examples",
    ),
    "unweighted_ne": Answer("unweighted(normalized_entropy())", "NE with a weight of 1", OURS, "weight 0 counts as 1"),
    "hindsight_target_pr": Answer(
        "hindsight_target_pr(0.5)", "the lowest threshold with a precision >= target, and its recall",
        "brute force, TorchRec", "1000 even thresholds; examples at a threshold count as found and as missed",
    ),
    "nmse": Answer("nmse()", "mse / mse of predicting 1; also `nrmse()`", OURS),
    "average": Answer('collect({"label": mean_label(), "prediction": weighted_avg()})', "Σwy / Σw, Σwp / Σw", OURS),
    "multi_label_precision": Answer(
        "per_task(binary_precision(), 3)", "precision of each label", SKLEARN,
        "labels are bits of an integer: `(codes[:, None] >> torch.arange(3)) & 1`",
    ),
    "num_positive_samples": Answer("labelled(num_positive_samples())", "Σwy of labels that are not missing", OURS),
    "sum_weights": Answer("sum_weights()", "Σw", OURS),
    "num_missing_labels": Answer("num_missing_labels()", "Σw[y is NaN]", OURS),
    "weighted_sum_predictions": Answer("weighted_sum_predictions()", "Σwp", OURS, "a prediction of NaN counts as 0"),
    "gauc": Answer(
        "lambda p, y, w: grouped_auc(p, y, w, equal=True)", "mean over groups of AUC", "TorchRec, brute force",
        "ties count as wrong; groups of equal scores are left out",
    ),
    "grouped_auc": Answer(
        "lambda p, y, w: grouped_auc(p, y, w, equal=True)", "mean over groups of AUC", "TorchRec, brute force",
        "a group of one class counts as ½; here it is left out",
    ),
    "grouped_auprc": Answer(
        "lambda p, y, w: grouped_average_precision(p, y, w, equal=True)", "mean over groups of average precision",
        "TorchRec, scikit-learn", "a group without a positive counts as 0; here it is left out",
    ),
    "grouped_rauc": Answer(
        "lambda p, y, w: grouped_rauc(p, y, w, equal=True)", "mean over groups of RAUC", "TorchRec, brute force",
        "as rauc; a group of one example raises",
    ),
}  # fmt: skip


def torchrec_table() -> str:
    """Return the table of these names for a page, in Markdown."""
    shown = lambda call: f"`{call.replace('lambda p, y, w: ', '')}`" if call else ""
    rows = [f"| {n} | {shown(a.call)} | {a.formula} | {a.differs} |" for n, a in TORCHREC_NAMES.items()]
    return "\n".join(
        ["| TorchRec | `fr.metrics` | what | where TorchRec differs |", "| --- | --- | --- | --- |", *rows]
    )

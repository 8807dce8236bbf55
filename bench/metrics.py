"""Measures updates of metrics against TorchRec's computations and torchmetrics, and RAUC of a whole set.

    .venv/bin/python bench/metrics.py            # batches of 2,048 examples; needs TorchRec and torchmetrics

Times are CPU times of one thread, from interleaved calls. An update takes predictions, labels and weights. TorchRec's
computations keep a window too, as they do by default; ours is the metric alone. torchmetrics reads no weights, and its
AUROC has 200 thresholds; ours has 65,536 bins.
"""

import argparse
import importlib
import time
import warnings
from collections.abc import Callable

import torch
from measure import interleave, ratios, record, spread

import funcrec as fr
from funcrec import metrics

warnings.simplefilter("ignore")
ONE_TASK = {"my_rank": 0, "n_tasks": 1, "window_size": 1_000_000}


def drawn(size: int) -> dict[str, torch.Tensor]:
    """Return a batch: predictions p, clicks y, numbers t, weights w, and sessions s of about 20 examples."""
    g = torch.Generator().manual_seed(size)
    p, t, w = torch.rand(3, size, generator=g, dtype=torch.float64)
    y = (torch.rand(size, generator=g) < p).double()
    return {"p": p, "y": y, "t": t, "w": w + 0.1, "s": torch.randint(0, max(size // 20, 1), (size,), generator=g)}


def torchrec_of(module: str, name: str, size: int, **options):
    cls = getattr(importlib.import_module(f"torchrec.metrics.{module}"), name)
    return cls(batch_size=size, **ONE_TASK, **options)


def updates(metric: metrics.Metric, jitted: bool, *rows) -> Callable[[], None]:
    """Return a call that updates a state, which it keeps."""
    kept = {"state": metric.init()}
    update = fr.jit(metric.update) if jitted else metric.update

    def call():
        kept["state"] = update(kept["state"], *rows)

    return call


def of_torchrec(metric, p, y, w, **inputs) -> Callable[[], None]:
    rows = {"predictions": p[None], "labels": y[None], "weights": w[None]}
    return lambda: metric.update(**rows, **({"required_inputs": inputs} if inputs else {}))


def cases(size: int) -> dict[str, dict]:
    """Return {metric: {library: call}}."""
    from torchmetrics import MeanSquaredError
    from torchmetrics.classification import BinaryAccuracy, BinaryAUROC
    from torchrec.metrics.metrics_config import SessionMetricDef

    b = drawn(size)
    p, y, t, w, s = (b[n] for n in "pytws")
    both = lambda metric, *rows: {"funcrec": updates(metric, False, *rows), "compiled": updates(metric, True, *rows)}
    peer = lambda module, name, y, w=w, inputs=None, **options: of_torchrec(
        torchrec_of(module, name, size, **options), p, y, w, **(inputs or {})
    )
    ones, tm_y = torch.ones_like(w), y.long()
    auroc, accuracy, mse = BinaryAUROC(thresholds=200), BinaryAccuracy(), MeanSquaredError()
    session = {"session_metric_def": SessionMetricDef("s", 3)}
    return {
        "mse": {
            **both(metrics.mse(), p, t, w), "torchrec": peer("mse", "MSEMetricComputation", t),
            "torchmetrics": lambda: mse.update(p, t),
        },
        "accuracy": {
            **both(metrics.accuracy(), p, y, w), "torchrec": peer("accuracy", "AccuracyMetricComputation", y),
            "torchmetrics": lambda: accuracy.update(p, tm_y),
        },
        "normalized_entropy": {
            **both(metrics.normalized_entropy(), p, y, w), "torchrec": peer("ne", "NEMetricComputation", y)
        },
        "auc": {**both(metrics.auc(), p, y, w), "torchmetrics": lambda: auroc.update(p, tm_y)},
        "xauc": {**both(metrics.xauc(), p, t, w), "torchrec": peer("xauc", "XAUCMetricComputation", t)},
        "session_ndcg": {
            **both(metrics.session_ndcg(), p, (y, s), ones),
            "torchrec": peer("ndcg", "NDCGComputation", y, ones, {"session_id": s[None]}),
        },
        "recall_session_level": {
            **both(metrics.recall_session_level(3), p, (y, s), w),
            "torchrec": peer("recall_session", "RecallSessionMetricComputation", y, w, {"s": s[None]}, **session),
        },
    }  # fmt: skip


def whole(size: int) -> dict[str, dict]:
    """Return {metric: {library: call}}, of a whole set."""
    from torchrec.metrics.rauc import compute_rauc

    b = drawn(size)
    rows = [[b[n][None]] for n in "pt"]
    return {
        f"rauc of {size:,}": {
            "funcrec": lambda: metrics.exact_rauc(b["p"], b["t"]),
            "torchrec": lambda: compute_rauc(1, *rows, [torch.ones(1, size)]),
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for size, found, rounds in ((given.size, cases(given.size), given.rounds), (20_000, whole(20_000), 5)):
        for name, calls in found.items():
            times = interleave(calls, rounds=rounds, clock=time.thread_time)
            per_second = {n: spread([1 / max(x, 1e-9) for x in t]) for n, t in times.items()}
            peers = {n: spread(ratios(times[n], times["funcrec"])) for n in times if n != "funcrec"}
            record("metrics", {"metric": name, "size": size, "updates_per_s": per_second, "times_ours": peers})


if __name__ == "__main__":
    main()

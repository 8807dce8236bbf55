"""Collects the AUC of every model of the ladder from the results of `make ladder`: a table and a line of JSON.

make ladder && python bench/ml1m_ladder.py runs
"""

import json
import sys
from pathlib import Path

from measure import explain, record

ORDER = ("lr", "fm", "dlrm", "widedeep", "deepfm", "dcnv2", "din")
KEPT = (
    "num_parameters",
    "best_epoch",
    "valid_auc",
    "test_auc",
    "test_log_loss",
    "published_test_auc",
    "optimizer",
    "seed",
)


def main(folder: str = "runs") -> None:
    results = {}
    for model in ORDER:
        path = Path(folder) / model / "result.json"
        if path.exists():
            result = json.loads(path.read_text())
            results[model] = {name: result[name] for name in KEPT}
    record("ml1m_ladder", {"models": results})
    print("| model | parameters | best epoch | valid AUC | test AUC | published test AUC | test log loss |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, r in results.items():
        published = r["published_test_auc"] and f"{r['published_test_auc']:.4f}"
        counts = f"| {model} | {r['num_parameters']:,} | {r['best_epoch']} "
        print(f"{counts}| {r['valid_auc']:.4f} | {r['test_auc']:.4f} | {published or '-'} | {r['test_log_loss']:.4f} |")


if __name__ == "__main__":
    explain(__doc__)
    main(*sys.argv[1:])

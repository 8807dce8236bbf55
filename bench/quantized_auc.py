"""Measures the AUC of a trained DeepFM on MovieLens-1M, with quantised tables and with floats.

    .venv/bin/python bench/quantized_auc.py runs/deepfm    # a checkpoint of `make train`; without it, trains first

The law: on validation and test rows int8 is within 0.0005 of float32, and int4 within 0.005.
"""

import sys
from pathlib import Path

from measure import explain, record

import funcrec as fr
from funcrec.examples import ctr

DTYPES = ("float32", "float16", "int8", "int4", "int2")
WITHIN = {"int8": 0.0005, "int4": 0.005}
BATCH = 8192


def main(folder: str = "runs/deepfm") -> int:
    path = Path(folder) / "checkpoint.pt"
    if not path.exists() and (code := ctr.main(["--model", "deepfm", "--out", folder])):
        return code
    params, model = fr.load(path)["best"], fr.models.ml1m("deepfm")
    split = fr.data.ctr_dataset(fr.data.movielens_1m())
    held = {"valid": split.valid, "test": split.test}
    found = {}
    for dtype in DTYPES:
        tables = fr.quantize(params.tables, dtype)
        own = fr.Params(tables, params.dense)
        aucs = {f"{name}_auc": auc(model, own, split.data, rows) for name, rows in held.items()}
        found[dtype] = {"bytes": fr.tree.nbytes(tables), **aucs}
    record("quantized_auc", {"model": "deepfm", "dtypes": found})
    print("| tables | bytes | valid AUC | test AUC | test, from float32 |\n| --- | --- | --- | --- | --- |")
    for dtype, f in found.items():
        away = f["test_auc"] - found["float32"]["test_auc"]
        print(f"| {dtype} | {f['bytes']:,} | {f['valid_auc']:.4f} | {f['test_auc']:.4f} | {away:+.5f} |")
    far = [d for d, most in WITHIN.items() for k in ("valid_auc", "test_auc")
           if abs(found[d][k] - found["float32"][k]) > most]  # fmt: skip
    if far:
        print(f"the law is red: {far}")
    return bool(far)


def auc(model: fr.models.Model, params: fr.Params, data: fr.data.CtrData, rows) -> float:
    batches = (fr.data.take(data, chunk) for chunk in rows.split(BATCH))
    return fr.evaluate(model.apply, params, batches, {"auc": fr.metrics.exact_auc})["auc"]


if __name__ == "__main__":
    explain(__doc__)
    sys.exit(main(*sys.argv[1:]))

"""Export LR, FM, DLRM, DCNv2 and two-tower as packages and compare them with their Python functions.

python -m programs.exported_models [NAME ...] exports each model and runs it on batches of 0, 1, 3, 64 and 512 bags.
Some bags are empty. Some ids are -1 or outside their tables. The program prints the greatest difference, and ends
with 1 if a difference exceeds 1e-5. A model takes about ten seconds.
"""

import sys
import tempfile
import time

import torch

import funcrec as fr

SIZES, LIMIT, COLUMNS = (0, 1, 3, 64, 512), 1e-5, 3
TABLES = (fr.TableConfig("user", 50, 8), fr.TableConfig("item", 100, 8))
FEATURES = (fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item", pooling="mean"))
LINEAR_TABLES, LINEAR = fr.models.linear_twins(TABLES, FEATURES)
DENSE = {"num_dense": COLUMNS, "sizes": (8,)}
MODELS = {
    "lr": fr.models.lr(LINEAR_TABLES, LINEAR),
    "fm": fr.models.fm((*TABLES, *LINEAR_TABLES), FEATURES, linear=LINEAR),
    "dlrm": fr.models.dlrm(TABLES, FEATURES, bottom=(8, 8), **DENSE),
    "dcnv2": fr.models.dcnv2(TABLES, FEATURES, **DENSE),
    "two_tower": fr.models.two_tower(TABLES, FEATURES[:1], FEATURES[1:], sizes=(8, 4)),
}


def batch(name: str, num_bags: int) -> fr.Batch:
    random = torch.Generator().manual_seed(num_bags)
    lengths = torch.randint(0, 5, (2 * num_bags,), generator=random)
    values = torch.randint(-1, 110, (int(lengths.sum()),), generator=random)
    ids = fr.KeyedJaggedTensor.from_lengths(("user", "item"), values, lengths)
    return fr.Batch(ids, dense=torch.randn(num_bags, COLUMNS, generator=random) if name in ("dlrm", "dcnv2") else None)


def difference(*names: str) -> float:
    """Return the greatest difference over all batch sizes of a package of these models, or inf if a shape or a dtype
    differs. The first model has the batch, and the others its ids."""
    params, worst = {n: MODELS[n].init(fr.key(0)) for n in names}, 0.0

    def predict(params, batch):
        parts = {n: batch if n == names[0] else fr.Batch(batch.ids) for n in names}
        return {n: MODELS[n].apply(params[n], parts[n]) for n in names}

    with tempfile.TemporaryDirectory() as folder:
        package = fr.load_package(fr.export(predict, params, batch(names[0], 3), f"{folder}/model"))
    for n in SIZES:
        made, wanted = package(batch(names[0], n)), predict(params, batch(names[0], n))
        for got, want in ((made[name], wanted[name]) for name in names):
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                return float("inf")
            worst = max(worst, float((got - want).abs().max()) if n else 0.0)
    return worst


def main(names: list[str]) -> int:
    found = {}
    for name in names or MODELS:
        begun = time.perf_counter()
        found[name] = difference(name)
        print(f"{name}: {found[name]:.2g} apart, {time.perf_counter() - begun:.0f} s", flush=True)
    return int(any(not x <= LIMIT for x in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A small package and its model, for tests: features pooled and in sequence, weights of ids, dense inputs.

python -m programs.packages FOLDER writes the package, and the weights of one more training step to FOLDER-next.
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch

import funcrec as fr
from funcrec.serve import _export

TABLES = (fr.TableConfig("user", 50, 8), fr.TableConfig("item", 100, 8))
FEATURES = (
    fr.FeatureConfig("user", table="user"),
    fr.FeatureConfig("item", table="item", pooling="mean"),
    fr.FeatureConfig("seen", table="item", weighted=True, max_length=4),
    fr.FeatureConfig("hashed", table="user", column="item", hash=fr.multiply_shift(3)),
)
SEQUENCES = (fr.FeatureConfig("last", table="item", column="user", pooling="none", max_length=3),)
KEYS = ("user", "item", "seen")
LINEAR_TABLES, LINEAR = fr.models.linear_twins(TABLES, FEATURES)
MODEL = fr.models.deepfm((*TABLES, *LINEAR_TABLES), FEATURES, linear=LINEAR, num_dense=3, sizes=(8,), batch_norm=True)


def predict(params, batch):
    """Return (the probability f[B] of a click, the sum f[B, 8] of the last ids' rows)."""
    last = fr.lookup_sequence(params.tables, batch.ids, SEQUENCES)["last"].to_padded(3)
    return {"click": torch.sigmoid(MODEL.apply(params, batch)), "last": last.sum(1)}


def params(seed=0):
    return MODEL.init(fr.key(seed))


def batch(num_bags, seed=0, most=5, outside=True):
    """Return num_bags random bags per key, each of up to `most` ids. Some ids are -1 or outside their tables."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(KEYS) * num_bags,), generator=random)
    values = torch.randint(-2 if outside else 0, 120 if outside else 50, (int(lengths.sum()),), generator=random)
    weights = torch.rand(values.shape[0], generator=random)
    bare = ("user", "item")
    ids = fr.KeyedJaggedTensor.from_lengths(KEYS, values, lengths, weights=weights, unweighted=bare)
    return fr.Batch(ids, dense=torch.randn(num_bags, 3, generator=random))


def plain(batch):
    """Return a batch in the form of a JSON request."""
    seen = batch.ids["seen"]
    weights = [seen.weights[a:b].tolist() for a, b in pairwise(seen.offsets.tolist())]
    return {"ids": batch.ids.to_lists(), "weights": {"seen": weights}, "dense": batch.dense.tolist()}


ROWS = {
    "user": [["ann"], ["bob", "cid"], []],
    "item": [["hat"], [], ["hat", "shoe"]],
    "seen": [["hat", "sock"], [], []],
    "share": [[0.5, 2.0], [], []],
    **{"age": [30.0, 40.0, 50.0], "price": [1.0, 2.0, 6.0], "rank": [3.0, 1.0, 2.0]},
}


def encoding():
    """Return an encoding fitted to the raw rows ROWS."""
    schema = fr.data.Schema(multivalued=KEYS, dense=("age", "price", "rank"), weights={"seen": "share"})
    return fr.data.fit_encoding(ROWS, schema, share={"seen": "item"})


def export(path, **options):
    return fr.export(predict, params(), batch(3), path, version="first", encoding=encoding(), **options)


if __name__ == "__main__":
    export(Path(sys.argv[1]))
    fr.save_weights(f"{sys.argv[1]}-next", params(1), version="next")


def uncompiled(patch) -> None:
    """Make `export` write packages without a program, for laws of manifests and weights alone."""
    patch.setattr(_export, "compile_program", lambda program, path, isa, digest: path.write_bytes(b"no program"))
    patch.setattr(_export, "load_package", lambda folder, checksums: None)
    patch.setattr(_export, "compare", lambda *args: None)

"""A package with tables of every dtype and width, pooled in every way and as sequences.

The package has hashed features, weighted features and dense inputs."""

import torch

import funcrec as fr

DTYPES = ("int8", "int4", "int2", "float16", "bfloat16")
NUMBERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)  # parameters on which no output depends
KEYS = ("a", "b", "c")
KINDS = (("a", "sum", False), ("b", "mean", False), ("c", "sum", True), ("c", "mean", True))


def features(tables):
    return [
        fr.FeatureConfig(
            f"{t}_{key}_{pooling}", table=t, column=key, pooling=pooling, weighted=weighted, max_length=cut
        )
        for i, t in enumerate(tables)
        for (key, pooling, weighted), cut in zip(KINDS, (None, 3 if i % 2 else None, None, None), strict=True)
    ]


HASHED = (fr.FeatureConfig("hashed", table="int8", column="b", hash=fr.multiply_shift(3)),)
LAST = tuple(fr.FeatureConfig(f"last_{t}", table=t, column="a", pooling="none") for t in ("int8", "int4", "float16"))
WIDTH = 305  # the total width of all pooled features
WIDE = (fr.FeatureConfig("wide", table="wide", column="b"),)


def params(seed=0):
    configs = [fr.TableConfig(t, 60 + 7 * i, 5 + 3 * i) for i, t in enumerate((*DTYPES, "float32", "bare"))]
    tables = fr.init(fr.key(seed), configs)
    bare = {"bare": tables.pop("bare")}
    quantized = fr.quantize(tables, {t: t for t in (*DTYPES, "float32")})
    dense = {"w": torch.linspace(-1, 1, 3 * 4).view(3, 4), "wide": torch.linspace(-1, 1, 80).double().view(20, 4)}
    dense["scale"] = torch.tensor(1.0 + seed)
    dense["deep"] = {"weight": torch.linspace(-0.1, 0.1, 64 * WIDTH).view(64, WIDTH), "bias": torch.linspace(-1, 1, 64)}
    numbers = {str(x).removeprefix("torch."): (torch.arange(6).view(3, 2) + seed).to(x) for x in NUMBERS}
    return {"quantized": quantized, "bare": bare, "dense": dense, "unread": {**numbers, "none": torch.empty(0, 4)}}


def predict(params, batch):
    pooled = fr.lookup(params["quantized"], batch.ids, [*features((*DTYPES, "float32")), *HASHED])
    bare = fr.lookup(params["bare"], batch.ids, features(["bare"]))
    last = fr.lookup_sequence(params["quantized"], batch.ids, LAST)
    wide = fr.lookup({"wide": params["dense"]["wide"]}, batch.ids, WIDE)
    return {
        "pooled": pooled.values,
        "bare": bare.values,
        "wide": wide.values,
        "last": torch.cat([last[f.name].to_padded(2).sum(1) for f in LAST], 1),
        "dense": torch.sigmoid(batch.dense @ params["dense"]["w"] * params["dense"]["scale"]),
        "deep": torch.sigmoid(torch.nn.functional.linear(pooled.values, **params["dense"]["deep"])),
        "count": batch.ids["c"].lengths,
    }


def batch(num_bags, seed=0, most=5, outside=True):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(KEYS) * num_bags,), generator=random)
    values = torch.randint(-2 if outside else 0, 130 if outside else 20, (int(lengths.sum()),), generator=random)
    weights = torch.rand(values.shape[0], generator=random)
    ids = fr.KeyedJaggedTensor.from_lengths(KEYS, values, lengths, weights=weights, unweighted=("a", "b"))
    return fr.Batch(ids, dense=torch.randn(num_bags, 3, generator=random))


def export(path, **options):
    return fr.export(predict, params(), batch(3), path, version="first", **options)

"""A table of small models, with a batch for each model."""

import pytest
import torch
from torch.utils import _pytree as torch_tree

import funcrec as fr
from funcrec import models

B = 6
TABLES = (fr.TableConfig("user", 9, 4), fr.TableConfig("item", 7, 4))
FEATURES = (
    fr.FeatureConfig("user", table="user", max_length=1),
    fr.FeatureConfig("clicked", table="item", pooling="mean", max_length=3),
    fr.FeatureConfig("bought", table="item"),
)
WIDE_TABLES, WIDE = models.linear_twins(TABLES, FEATURES)
ALL = TABLES + WIDE_TABLES
SIZES = {"sizes": (8, 6)}
HISTORY = [fr.FeatureConfig("before", table="item", column="clicked", pooling="none", max_length=2)]
DIN = {"history": HISTORY, "target": ["bought"], "attention": (5,)}
MODELS = {
    "lr": lambda: models.lr(WIDE_TABLES, WIDE),
    "lr, dense": lambda: models.lr(WIDE_TABLES, WIDE, num_dense=3),
    "fm": lambda: models.fm(ALL, FEATURES, linear=WIDE),
    "fm, dense": lambda: models.fm(ALL, FEATURES, linear=WIDE, num_dense=3),
    "wide_deep": lambda: models.wide_deep(ALL, FEATURES, linear=WIDE, num_dense=3, dropout=0.3, **SIZES),
    "wide_deep, batch norm": lambda: models.wide_deep(ALL, FEATURES, linear=WIDE, batch_norm=True, **SIZES),
    "deepfm": lambda: models.deepfm(ALL, FEATURES, linear=WIDE, dropout=0.3, **SIZES),
    "deepfm, dense": lambda: models.deepfm(TABLES, FEATURES, num_dense=3, **SIZES),
    "dlrm": lambda: models.dlrm(TABLES, FEATURES, num_dense=3, bottom=(8, 4), dropout=0.3, **SIZES),
    "dlrm, dense kept": lambda: models.dlrm(TABLES, FEATURES, num_dense=3, bottom=(8, 4), keep="dense", **SIZES),
    "dlrm, no dense": lambda: models.dlrm(TABLES, FEATURES, **SIZES),
    "simple_deepfm": lambda: models.simple_deepfm(TABLES, FEATURES, num_dense=3, hidden_size=6, deep_size=5),
    "dcnv2": lambda: models.dcnv2(TABLES, FEATURES, batch_norm=True, dropout=0.3, cross_penalty=0.1, **SIZES),
    "dcnv2, low rank": lambda: models.dcnv2(TABLES, FEATURES, num_dense=3, rank=2, **SIZES),
    "din": lambda: models.din(TABLES, FEATURES, **DIN, **SIZES),
    "din, dense": lambda: models.din(ALL, FEATURES, linear=WIDE, num_dense=3, normalize=True, **DIN, **SIZES),
    "dlrm_dcnv2": lambda: models.dlrm_dcnv2(TABLES, FEATURES, num_dense=3, bottom=(8, 4), rank=5, **SIZES),
}
READS_DENSE = {
    "lr, dense", "fm, dense", "wide_deep", "deepfm, dense", "dlrm", "dlrm, dense kept", "dcnv2, low rank", "dlrm_dcnv2",
    "simple_deepfm", "din, dense",
}  # fmt: skip
EACH = pytest.mark.parametrize("name", MODELS)


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(name):
    """Return (the model, fresh parameters, a batch). The batch has dense inputs if the model reads them."""
    model = MODELS[name]()
    return model, model.init(fr.key(0)), make_batch(3 if name in READS_DENSE else 0)


def make_batch(num_dense=0, *, seed=0, padding=3):
    """Return bags of 0 to 3 ids (one id for "user"), followed by padding of out-of-range ids."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3, B), generator=draw)
    lengths[0] = 1
    heights = torch.tensor([9, 7, 7]).repeat_interleave(lengths.sum(1))
    values = torch.randint(0, 1 << 30, heights.shape, generator=draw) % heights
    values = torch.cat([values, torch.full((padding,), 10**9)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    ids = fr.KeyedJaggedTensor.from_offsets(("user", "clicked", "bought"), values, offsets)
    label = torch.randint(0, 2, (B,), generator=draw).float()
    return fr.Batch(ids, label, numbers(seed, B, num_dense) if num_dense else None)


def with_dense_bumps(params):
    """Return parameters with changed dense values. No dense value is 0 or 1, so that no term of a gradient vanishes."""
    bump = lambda x: x + 0.1 * numbers(x.numel(), *x.shape).abs()
    return fr.Params(params.tables, torch_tree.tree_map(bump, params.dense))


def close(a, b, **kwargs):
    torch_tree.tree_map(lambda x, y: torch.testing.assert_close(x, y, **kwargs), a, b)

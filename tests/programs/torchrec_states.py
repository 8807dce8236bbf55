"""Collections, models and steps of funcrec next to those of TorchRec, whose state dicts are loaded and given back."""

import torch
import torch.nn.functional as F
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import funcrec as fr

TABLES = (fr.TableConfig("item", 7, 4), fr.TableConfig("user", 5, 4))
COLUMNS = {"item": ("clicked", "bought"), "user": ("user", "bought")}  # a shared table and a shared column
NUM_DENSE = 3


def features(pooling="sum", tables=TABLES):
    name = lambda t, c: f"{c}@{t}" if c == "bought" else c
    column = lambda c: c if c == "bought" else None
    return tuple(
        fr.FeatureConfig(name(t.name, c), t.name, pooling, column=column(c)) for t in tables for c in COLUMNS[t.name]
    )


def configs(pooling="sum", tables=TABLES):
    return fr.interop.to_torchrec((tables, features(pooling, tables)))


def batch(seed, num_bags=6):
    g = torch.Generator().manual_seed(seed)
    lists = {k: [torch.randint(0, 5, (int(n),), generator=g).tolist() for n in torch.randint(0, 4, (num_bags,),
                generator=g)] for k in ("bought", "user", "clicked", "seen")}  # fmt: skip
    ids = fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64)
    return fr.Batch(ids, torch.randint(0, 2, (num_bags,), generator=g).float(), torch.randn(num_bags, 3, generator=g))


def theirs(ids):
    return fr.interop.to_torchrec(ids)


def fresh(tables=TABLES, dense=None):
    return fr.Params(fr.init(fr.key(1), tables), {} if dense is None else dense)


def scattered(module):
    """Return the module with random parameters, because zeros would hide values that are not loaded."""
    for i, p in enumerate(module.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return module


def models():
    """Return (TorchRec's models, our models, a function from our logits to TorchRec's answer)."""
    singles = tuple(fr.FeatureConfig(t.name, table=t.name) for t in TABLES)
    collection = lambda own: EmbeddingBagCollection(fr.interop.to_torchrec((TABLES, own)))
    shared = (
        *(fr.FeatureConfig(c, table="item") for c in ("clicked", "bought")),
        # there are five vectors, because their reordering is then not its own inverse
        *(fr.FeatureConfig(c, table="user") for c in ("user", "seen")),
    )
    sizes = NUM_DENSE, [6, 4], [8, 7, 1]
    dlrm = {"num_dense": NUM_DENSE, "bottom": (6, 4), "sizes": (8, 7), "keep": "dense"}
    dcn = {"num_dense": NUM_DENSE, "bottom": (6, 4), "sizes": (8, 7), "num_cross": 3, "rank": 2}
    deepfm = {"num_dense": NUM_DENSE, "hidden_size": 6, "deep_size": 5}
    return {
        "dlrm": (DLRM(collection(singles), *sizes), fr.models.dlrm(TABLES, singles, **dlrm)),
        "dlrm, shared": (DLRM(collection(shared), *sizes), fr.models.dlrm(TABLES, shared, **dlrm)),
        "dcn": (DLRM_DCN(collection(shared), *sizes, 3, 2), fr.models.dlrm_dcnv2(TABLES, shared, **dcn)),
        "deepfm": (SimpleDeepFMNN(NUM_DENSE, collection(shared), 6, 5),
                   fr.models.simple_deepfm(TABLES, shared, **deepfm)),
    }  # fmt: skip


LR, EPS, WIDTH = 0.1, 1e-6, 16


def loss_of(pooled, w, label):
    return F.binary_cross_entropy_with_logits(pooled @ w, label)


def our_step(sparse, dense):
    loss_fn = lambda p, b: loss_of(fr.lookup(p.tables, b.ids, features()).values, p.dense["w"], b.label)
    return fr.train_step(loss_fn, sparse=sparse, dense=dense)

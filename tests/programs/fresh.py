"""A model whose tables a package stores in every number of bits, and its training. Tests of deltas use the model."""

import json
import shutil

import torch

import funcrec as fr
from funcrec.serve import _manifest

DTYPES = ("int8", "int4", "int2", "float16", "bfloat16")
TABLES = tuple(fr.TableConfig(n, 30 + i, 8) for i, n in enumerate(DTYPES))
FEATURES = tuple(fr.FeatureConfig(n, table=n) for n in DTYPES)


def score(params, batch):
    return fr.lookup(params.tables, batch.ids, FEATURES).values @ params.dense["w"] + params.dense["b"]


def batch(seed, num_bags=5):
    random = torch.Generator().manual_seed(seed)
    ids = {n: torch.randint(0, 30, (num_bags, 2), generator=random).tolist() for n in DTYPES}
    return fr.Batch(fr.KeyedJaggedTensor.from_lists(ids), torch.rand(num_bags, generator=random))


def held(state, name):
    """Return the parameters as a package stores them: unchanged, or each table quantised to the table's number of
    bits."""
    return fr.Params(
        state.tables if name == "plain" else fr.quantize(state.tables, {n: n for n in DTYPES}), state.dense
    )


loss_fn = lambda params, b: (score(params, b) - b.label).square().mean()
STEP = fr.logged(
    fr.train_step(loss_fn, sparse=fr.optim.adagrad(0.5), dense=fr.optim.dense(torch.optim.SGD, lr=0.3)), steps=0
)
REST = lambda run: fr.Params({}, run.state.dense)


def begun():
    """Return the training run before its first step."""
    random = torch.Generator().manual_seed(0)
    dense = {"w": torch.randn(40, generator=random), "b": torch.zeros(())}
    return STEP.init(fr.Params(fr.init(fr.key(0), TABLES), dense))


def export(path, name):
    """Export a package of the parameters of `name`, "plain" or "coded"."""
    return fr.export(score, held(begun().state, name), batch(0), path, version="0")


def changed_manifest(package, path, change):
    """Copy a package without its program, and change the copy's manifest. The manifest's digest matches the changed
    content."""
    shutil.copytree(package, path, ignore=shutil.ignore_patterns(_manifest.MODEL))
    content = json.loads((path / _manifest.MANIFEST).read_text())
    change(content)
    content["digest"] = _manifest.digest_of(_manifest.text_of(content))
    (path / _manifest.MANIFEST).write_text(_manifest.text_of(content))
    return path


def bits(tensors):
    return {n: x.reshape(-1).view(torch.uint8).tolist() for n, x in tensors.items()}

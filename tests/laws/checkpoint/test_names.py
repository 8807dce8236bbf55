"""Checkpoints and pickles refer to classes by public names, whatever file defines the classes."""

import importlib
import inspect
import pickle
import re

import pytest
import torch
import torch.utils._pytree as torch_tree

import funcrec as fr
from funcrec.core._tree import CLASSES, class_name

FAMILIES = ("data", "metrics", "models", "nn", "optim", "testing")
FACES = [fr, *(importlib.import_module(f"funcrec.{x}") for x in FAMILIES)]
PUBLIC = [(face, n, v) for face in FACES for n, v in vars(face).items() if inspect.isclass(v)]


def values():
    """Return one value of every kind that can be saved."""
    tables = (fr.TableConfig("item", 7, 3), fr.TableConfig("user", 4, 2, dtype=torch.bfloat16))
    features = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("who", table="user"))
    ids = fr.KeyedJaggedTensor.from_lists(
        {"clicked": [[1, 2], [], [6]], "who": [[0], [3], [1, 1]]},
        weights={"clicked": [[1.0, 2.0], [], [0.5]], "who": [[1.0], [1.0], [1.0, 3.0]]}
    )  # fmt: skip
    params = fr.Params(fr.init(fr.key(1), tables), {"w": torch.arange(3.0)})
    batch = fr.Batch(ids, torch.tensor([0.0, 1.0, 1.0]), None)

    def loss_fn(params, batch):
        acts = fr.lookup(params.tables, batch.ids, features)
        return acts["clicked"].square().sum() + params.dense["w"].square().sum() + acts["who"].square().sum()

    step = fr.train_step(
        loss_fn, sparse=fr.optim.adam(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    _, grads = fr.value_and_grad(loss_fn)(params, batch)
    return {
        "state": step(step.init(params), batch)[0],
        "batch": batch,
        "bags": fr.JaggedTensor.from_lists([[1, 2], []]),
        "acts": fr.lookup(params.tables, ids, features),
        "grads": fr.Params({n: g.coalesce() for n, g in grads.tables.items()}, grads.dense),
        "cut": fr.DenseShard(torch.arange(4.0), (3, 2), ("data",)),
    }


def test_no_file_is_named_in_a_checkpoint(tmp_path):
    """A checkpoint stores the names of funcrec's classes, without their modules."""
    content = fr.save(tmp_path / "state", values()).read_bytes()
    named = {n.decode() for n in re.findall(rb"funcrec\.([\w.]+)", content)}
    names = {"TrainState", "Params", "Batch", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "DenseShard"}
    assert named == names | {"RowGrads", "Entries"}


def test_names_in_checkpoints_are_one_class_each():
    """No two of funcrec's pytree classes share a name, even in different modules."""
    own = [c for c in torch_tree.SUPPORTED_NODES if c.__module__.split(".")[0] == "funcrec"]
    names = {class_name(c) for c in own}
    assert len(names) == len(own) >= 15
    assert names <= set(CLASSES)


@pytest.mark.parametrize(("face", "name", "value"), PUBLIC, ids=[f"{f.__name__}.{n}" for f, n, _ in PUBLIC])
def test_a_public_class_is_called_where_it_is_found(face, name, value):
    """The module of a public class is the public module that exports the class. The class pickles under that name."""
    assert (value.__module__, value.__qualname__) == (face.__name__, name)
    assert value.__module__.encode() in pickle.dumps(value)
    assert pickle.loads(pickle.dumps(value)) is value

"""Errors that torch, pyarrow and Python would raise have the words of funcrec."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.func import grad, jacrev, vmap

import funcrec as fr
from funcrec.data import Schema, examples, fit_encoding, loader, log1p, random_rows, stream_loader

TABLES, FEATURES = (fr.TableConfig("item", 10, 4),), (fr.FeatureConfig("item", table="item"),)
IDS = fr.KeyedJaggedTensor.from_lists({"item": [[1], [2, 3]]})
BATCH = fr.Batch(IDS, torch.tensor([0.0, 1.0]))
PARAMS = fr.Params(fr.init(fr.key(0), TABLES), {"w": torch.ones(4)})
KIND = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
MODEL = fr.models.lr((fr.TableConfig("item", 10, 1),), FEATURES)
LOADER = loader(random_rows(fr.key(0), {"item": 10}, num_rows=8), None, 4)
LOSSES = {
    "bce": fr.losses.bce, "mse": fr.losses.mse, "huber": fr.losses.huber,
    "bce of each": lambda *xs: fr.losses.bce(*xs, reduction="none"),
    "cross_entropy": lambda x, y, w: fr.losses.cross_entropy(torch.stack([x, -x], 1), y.long(), w),
}  # fmt: skip


def four(what):
    """Return a pattern of the four parts, with `what` in the first part or among the hints."""
    return rf"(?s)(?=.*{what}).*\n  got   .*\n  need  .*\n  try   "


def schedule_of(kind, *args):
    return kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), *args)


def chosen(params, batch):
    x = fr.lookup(params.tables, batch.ids, FEATURES)["item"] @ params.dense["w"]
    return torch.cond(x.sum() > 0, lambda x: x.sum(), lambda x: -x.sum(), (x,))


def loss_fn(params, batch):
    return fr.losses.bce(fr.lookup(params.tables, batch.ids, FEATURES)["item"] @ params.dense["w"], batch.label)


STEP = fr.train_step(loss_fn, **KIND)


@pytest.mark.parametrize("name", LOSSES)
def test_weights_may_be_mapped_alone(name):
    """For every loss, vmap over weights alone equals a loop, with labels and predictions that all members share."""
    loss, x, y = LOSSES[name], torch.tensor([0.3, -1.0, 2.0]), torch.tensor([1.0, 0.0, 1.0])
    weights = torch.tensor([[1.0, 2.0, 0.0], [1.0, 1.0, 1.0]])
    assert torch.allclose(vmap(lambda w: loss(x, y, w))(weights), torch.stack([loss(x, y, w) for w in weights]))
    got = vmap(grad(lambda w: loss(x, y, w).sum()))(weights[1:])
    assert torch.allclose(got, grad(lambda w: loss(x, y, w).sum())(weights[1])[None])


def test_weights_of_metrics_may_be_mapped_alone():
    """A prediction that one member skips (weight 0) raises no error for the other members."""
    accuracy, x = fr.metrics.accuracy(), torch.tensor([0.3, torch.nan])
    run = lambda w: accuracy.compute(accuracy.update(accuracy.init(), x, torch.tensor([0.0, 1.0]), w))
    assert vmap(run)(torch.tensor([[1.0, 0.0], [2.0, 0.0]])).tolist() == [1.0, 1.0]


NONE = {
    "init": lambda: vmap(lambda key: fr.init(key, TABLES))(fr.split(fr.key(0), 0)),
    "fold_in": lambda: vmap(lambda key: fr.fold_in(key, 1))(fr.split(fr.key(0), 0)),
    "step.init": lambda: vmap(lambda key: STEP.init(PARAMS, key))(fr.split(fr.key(0), 0)),
    "step": lambda: vmap(STEP, in_dims=(0, None))(fr.tree.map(lambda x: x[None][:0], STEP.init(PARAMS)), BATCH),
}


@pytest.mark.parametrize("name", NONE)
def test_a_vmap_of_size_0_is_refused(name):
    """A vmap without members raises in the words of funcrec, not in the words of torch about shapes."""
    with pytest.raises(ValueError, match=four("the vmap has no members")):
        NONE[name]()


def test_jacrev_of_gradients_takes_what_is_dense():
    """jacrev of the dense form of a gradient succeeds. The docstring suggests it in place of jacrev of a RowGrads."""
    rows = lambda dense: fr.value_and_grad(loss_fn)(fr.Params(PARAMS.tables, dense), BATCH)[1].tables["item"].to_dense()
    assert jacrev(rows)(dict(PARAMS.dense))["w"].shape == (10, 4, 4)


CONDS = {
    "value_and_grad": lambda: fr.value_and_grad(chosen)(PARAMS, BATCH),
    "a step": lambda: (step := fr.train_step(chosen, **KIND))(step.init(PARAMS), BATCH),
    "a compiled step": lambda: fr.jit(step := fr.train_step(chosen, **KIND))(step.init(PARAMS), BATCH),
}


@pytest.mark.parametrize("name", CONDS)
def test_torch_cond_in_a_loss(name):
    """torch.cond in a loss raises. The error names it, and shows code to write instead."""
    with pytest.raises(TypeError, match=four(r"calls torch\.cond.*torch\.where\(condition, a, b\)")):
        CONDS[name]()


def test_ids_that_vmap_cuts_are_to_be_padded():
    """Jagged ids have no first dimension that vmap could cut. The error suggests to_padded."""
    for run in (lambda ids: fr.lookup(PARAMS.tables, ids, FEATURES)["item"],):
        with pytest.raises(TypeError, match=four("mapped by vmap.*to_padded")):
            vmap(run, in_dims=0)(IDS)


@pytest.mark.parametrize("make", [fr.optim.sgd, fr.optim.adam, lambda lr: fr.optim.dense(torch.optim.Adam, lr=lr)])
@pytest.mark.parametrize("kind", ["LambdaLR", "StepLR", "ReduceLROnPlateau"])
def test_a_scheduler_of_torch_is_no_rate(make, kind):
    """A scheduler of torch's optimizers raises as a rate. A rate is a number or a function of the step."""
    args = {"LambdaLR": (lambda step: 1.0,), "StepLR": (2,), "ReduceLROnPlateau": ()}[kind]
    lr = schedule_of(getattr(torch.optim.lr_scheduler, kind), *args)
    with pytest.raises(TypeError, match=four(r"scheduler of torch\.optim.*lr=lambda step.*fr\.optim\.schedule")):
        make(lr)


@pytest.mark.parametrize("load", [LOADER, stream_loader({"item": [1, 2]}, Schema(categorical=("item",)), 2)])
def test_a_loader_is_called(load):
    """An iteration over a loader raises and says that the loader is a function."""
    for go in (iter, list, lambda x: [batch for _, batch in x]):
        with pytest.raises(TypeError, match=four(r"a loader is called.*load\(position\)")):
            go(load)


def test_a_model_is_applied():
    """A call of a model raises and suggests the model's `apply`."""
    for args in ((BATCH,), (MODEL.init(fr.key(0)), BATCH)):
        with pytest.raises(TypeError, match=four(r"model\.apply\(params, batch\)")):
            MODEL(*args)
    with pytest.raises(TypeError, match=r"model\.apply"):
        fr.evaluate(MODEL, MODEL.init(fr.key(0)), [BATCH], {"auc": fr.metrics.exact_auc})


@pytest.mark.parametrize(
    "value", [PARAMS, BATCH, IDS, STEP.init(PARAMS), *TABLES, *FEATURES], ids=lambda x: type(x).__name__
)
def test_a_field_is_not_set(value):
    """An assignment to a field of a value or config raises Python's own error, in four parts, and changes nothing."""
    for f in dataclasses.fields(value):
        before = getattr(value, f.name)
        with pytest.raises(dataclasses.FrozenInstanceError, match=four(rf"`{f.name}`.*dataclasses\.replace")):
            setattr(value, f.name, None)
        with pytest.raises(dataclasses.FrozenInstanceError, match=four(f"`{f.name}`")):
            delattr(value, f.name)
        assert getattr(value, f.name) is before
    with pytest.raises(AttributeError, match=four("`other`")):
        value.other = 1


def frame():
    pandas = pytest.importorskip("pandas")
    when = pandas.to_datetime(["2020-01-01", "2021-01-01"])
    return pandas.DataFrame({"item": [1, 2], "genre": ["a|b", "a"], "when": when, "took": when - when[0]})


def test_text_in_a_multivalued_column_is_to_be_split(tmp_path):
    """Text in a multivalued column raises before a vocabulary of `a|b` is learned, from a frame or a file."""
    schema, path = Schema(multivalued=("genre",)), tmp_path / "x.csv"
    frame()[["genre"]].to_csv(path, index=False)
    for run in (fit_encoding, examples):
        for source in (frame(), path):
            with pytest.raises(TypeError, match=four(r"column `genre` does not hold lists.*\.str\.split\(")):
                run(source, schema)
    split = frame().assign(genre=lambda df: df["genre"].str.split("|"))
    assert fit_encoding(split, schema).num_ids == {"genre": 3}


def test_a_row_of_pandas_is_no_table():
    """A row of a data frame raises where a data frame is needed."""
    schema = Schema(categorical=("item",))
    with pytest.raises(TypeError, match=four(r"the table cannot be read.*df\.iloc\[\[0\]\] for one row")):
        examples(frame().iloc[0], schema)
    with pytest.raises(TypeError, match=four(r"column `item` cannot be read.*a list of one")):
        examples(frame().iloc[0].to_dict(), schema)
    assert examples(frame().iloc[[0]], schema).num_rows == 1


@pytest.mark.parametrize("column", ["when", "took"])
def test_times_are_no_dense_numbers(column):
    """Times and durations raise as dense columns. The error suggests a number to make from the column."""
    schema = Schema(categorical=("item",), dense=(column,))
    for run in (lambda: examples(frame(), schema), lambda: fit_encoding(frame(), schema),
                lambda: fit_encoding(frame(), schema, {column: log1p()})):  # fmt: skip
        with pytest.raises(TypeError, match=four(r"total_seconds\(\)")):
            run()


LOCAL = {"criteo_npy": lambda p: fr.data.criteo_npy(p, p, p), "file_store": lambda p: fr.file_store(p, 10, 2)}
REMOTE = {
    "criteo_tsv": lambda p: list(fr.data.criteo_tsv(p, 2)),
    "examples": lambda p: examples(p, Schema(categorical=("item",))),
    "load": fr.load,
    "latest": fr.latest,
    "save": lambda p: fr.save(p, {"x": torch.ones(1)}),
    "load_package": fr.load_package,
    "export": lambda p: fr.export(MODEL.apply, MODEL.init(fr.key(0)), BATCH, p),
    "save_weights": lambda p: fr.save_weights(p, MODEL.init(fr.key(0))),
    "save_safetensors": lambda p: fr.save_safetensors(p, {"x": torch.ones(1)}),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_url_is_no_file_of_this_machine(name):
    """URLs raise with a message of their own wherever only a local path is read."""
    with pytest.raises(ValueError, match=four("`path` is a URL")):
        LOCAL[name]("memory://bucket/rows")


@pytest.mark.parametrize("name", REMOTE)
def test_a_url_names_something_in_a_store_that_can_be_used(name, monkeypatch):
    """A URL raises before any work if its store may show half a file, if the package for it is missing, or if it names
    only a bucket. The error says what to install."""
    with pytest.raises(ValueError, match=four("without its second slash")) as told:
        fr.save(Path("memory://bucket/a"), {"x": torch.ones(1)})
    assert "try   'memory://bucket/a'" in str(told.value)
    for path, what in {
        "https://host/a": "`https://` is not a store",
        "s3://bucket": "names no f",
        "memory://": "names no f",
        "simplecache::s3://bucket/a": "is a chain of URLs",
    }.items():
        with pytest.raises(ValueError, match=four(what)):
            REMOTE[name](path)

    def missing(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.filesystem", missing)
    with pytest.raises(ModuleNotFoundError, match=four(r"`s3://` is not installed")) as told:
        REMOTE[name]("s3://bucket/a")
    assert "pip install 'funcrec[remote]'" in str(told.value)

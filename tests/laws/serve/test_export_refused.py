"""export refuses functions that have no single program for all batches. The error has a reason."""

import itertools
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from programs.shared_bags import with_inverse

import funcrec as fr
from funcrec.serve import _export
from funcrec.serve._export import compare_alone, probe, probes

HELD = torch.ones(3)
EXAMPLE = fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[1], [2]]}), label=torch.ones(2), dense=torch.ones(2, 3))
W = {"w": torch.ones(3)}
CLICKED = [fr.FeatureConfig("a", table="t")]


def writes(params, batch):
    params["w"].mul_(2)
    return batch.dense @ params["w"]


def branch(params, batch):
    return batch.dense @ params["w"] if params["w"].sum() > 0 else batch.dense[:, 0]


def above(x):
    return x > x.mean()


def by_size(params, batch):
    return batch.dense @ params["w"] if batch.ids.num_bags > 64 else batch.dense[:, 0]


FUNCTIONS = {
    "a tensor closed over": (lambda p, b: b.dense @ HELD, W, "closes over tensors"),
    "a write": (writes, W, "writes to its argument"),
    "a branch on a value": (branch, W, "the function reads a tensor's value|not one program"),
    "a branch on a size": (by_size, W, "not one program for all batch sizes"),
    "a value read": (lambda p, b: b.dense * p["w"].sum().item(), W, "the function reads a tensor's value"),
    "a draw": (lambda p, b: b.dense @ torch.rand(3), W, "draws from torch's generator"),
    "whole numbers between two": (lambda p, b: b.dense @ torch.linspace(0, 7, 3, dtype=torch.int64).float(), W,
        "makes whole numbers by torch.linspace"),
    "a loss": (lambda p, b: (b.dense @ p["w"]).mean(), W, "no row for each bag"),
    "a number": (lambda p, b: 3, W, "is not a tensor"),
    "a list": (lambda p, b: [b.dense @ p["w"]], W, "is not a tensor"),
    "a label": (lambda p, b: b.dense @ p["w"] - b.label, W, "`predict` reads the label or the weight of examples"),
    "a mean over bags": (lambda p, b: b.dense @ p["w"] - (b.dense @ p["w"]).mean(0), W, "depends on the other bags"),
    "the number of ids": (lambda p, b: {"x": b.dense @ p["w"] * b.ids.values.shape[0]}, W, "depends on the other bags"),
    "a softmax over bags, of ids": (lambda p, b: fr.lookup(p, b.ids, CLICKED).values.softmax(0), {"t": torch.eye(3)},
        "depends on the other bags"),
    "ranks in the batch": (lambda p, b: (b.dense @ p["w"]).argsort(0), W, "depends on the other bags"),
    "whether it is above the others' mean": (lambda p, b: {"x": b.dense @ p["w"], "y": above(b.dense @ p["w"])}, W,
        r"\['y'\]` of a bag depends on the other bags"),
    "the place in the batch": (lambda p, b: torch.arange(b.ids.num_bags), W, "depends on the other bags"),
    "who has most ids": (lambda p, b: b.ids["a"].lengths >= b.ids["a"].lengths.max(), W, "depends on the other bags"),
    "complex answers": (lambda p, b: (b.dense @ p["w"]) * 1j, W, "dtype that packages lack"),
    "answers by number": (lambda p, b: {3: b.dense @ p["w"]}, W, "returns no named tensors"),
    "no answer": (lambda p, b: {}, W, "returns no named tensors"),
    "no tensor": (lambda p, b: b.dense[:, 0], {}, "have no tensor"),
    "a number for a parameter": (lambda p, b: b.dense[:, 0], {"w": 3.0}, "is not a tensor"),
    "a parameter that is followed": (lambda p, b: b.dense @ p["w"], {"w": torch.ones(3, requires_grad=True)},
        "being differentiated"),
    "complex parameters": (lambda p, b: b.dense[:, 0], {"w": torch.ones(3) * 1j}, "dtype that packages lack"),
    "parameters on no device": (lambda p, b: b.dense[:, 0], {"w": torch.ones(3, device="meta")}, "strided tensor on"),
    "sharded tables": (lambda p, b: b.dense[:, 0], fr.shard_tables({"t": torch.ones(4, 2)},
        fr.Plan({"t": fr.row_wise("m")}), fr.Mesh.emulated(m=2)), "sharded tables"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_not_one_program_is_refused(name, tmp_path):
    """A function without one program for all batches raises before any file is written or changed."""
    predict, params, reason = FUNCTIONS[name]
    with pytest.raises((TypeError, ValueError), match=reason) as error:
        fr.export(predict, params, EXAMPLE, tmp_path / "model")
    assert "funcrec.export" in "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert list(tmp_path.iterdir()) == [] and torch.equal(W["w"], torch.ones(3))


EXAMPLES = {
    "keys of different bags": fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[1], [2]]})),
    "shared bags that do not exist": fr.Batch(with_inverse(EXAMPLE.ids, torch.full((1, 2), 2))),
    "no key": fr.Batch(fr.KeyedJaggedTensor.from_lists({})),
    "dense of f64": fr.Batch(EXAMPLE.ids, dense=torch.ones(2, 3).double()),
    "whole numbers for weights": fr.Batch(replace(EXAMPLE.ids, weights=torch.tensor([2, 3]))),
    "vectors for weights": fr.Batch(replace(EXAMPLE.ids, weights=torch.ones(2, 2))),
    "no numbers": fr.Batch(EXAMPLE.ids, dense=torch.ones(2, 3, device="meta")),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_that_stand_for_no_batches_are_refused(name, tmp_path):
    """An example whose form no request can have raises."""
    with pytest.raises((TypeError, ValueError), match=r"`(example|ids\.inverse)"):
        fr.export(lambda p, b: b.dense @ p["w"], W, EXAMPLES[name], tmp_path / "model")


ENCODINGS = {
    "other keys": ({"b": [[1]], "x": [0.0], "y": [0.0], "z": [0.0]}, {}, "lacks keys"),
    "fewer dense columns": ({"a": [[1]], "x": [0.0]}, {}, "other dense columns"),
    "weights": ({"a": [[1]], "x": [0.0], "y": [0.0], "z": [0.0], "w": [[1.0]]}, {"a": "w"}, "weights of other keys"),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_makes_the_batches_of_the_example(name, tmp_path):
    """An encoding whose batches the package would refuse raises at export."""
    table, weights, reason = ENCODINGS[name]
    dense, ids = ([n for n in table if n in own] for own in ("xyz", "ab"))
    schema = fr.data.Schema(multivalued=ids, dense=dense, weights=weights)
    encoding = fr.data.fit_encoding(table, schema)
    with pytest.raises(ValueError, match=reason):
        fr.export(lambda p, b: b.dense @ p["w"], W, EXAMPLE, tmp_path / "model", encoding=encoding)


def test_threads_may_export(tmp_path):
    """Exports in several threads at once get the same errors as single exports. They get no error of torch, which
    stages one program at a time."""
    predict = lambda p, b: (b.dense @ p["w"]).argsort(0)

    def told(i):
        with pytest.raises((TypeError, ValueError, AssertionError)) as error:
            fr.export(predict, W, EXAMPLE, tmp_path / f"{i}")
        return str(error.value)

    with ThreadPoolExecutor(4) as pool:
        assert all("depends on the other bags" in said for said in pool.map(told, range(4)))


PROBED = [{"name": "a", "rows": 3, "weighted": False}]
SCORES = lambda p, b: fr.lookup(p, b.ids, CLICKED).values @ p["u"].T
OWN = {
    "the best column": lambda p, b: SCORES(p, b).argmax(1),
    "the best rows": lambda p, b: fr.top_k(fr.lookup(p, b.ids, CLICKED).values, p["u"], 2)[1],
    "a threshold": lambda p, b: {"x": SCORES(p, b), "y": SCORES(p, b)[:, 0] > 0.1},
    "counts": lambda p, b: b.ids["a"].lengths,
}


def check_alone(predict):
    params = {"t": torch.randn(3, 8), "u": torch.randn(4, 8)}
    compare_alone(predict, params, lambda seed: probe(EXAMPLE, PROBED, seed), 5)


@pytest.mark.parametrize("name", OWN)
def test_whole_numbers_of_a_bag_are_its_own(name):
    """Whole numbers that depend on one bag alone are not confused with numbers that depend on several bags."""
    check_alone(OWN[name])


PAIRS = fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[1], [2, 0]], "b": [[7], [8, 9]], "c": [[5], [5]]}))
KEYS = [{"name": name, "rows": 2**63 - 1, "weighted": False} for name in "abc"]


def equal(batch, *names):
    """Return the sum of each bag's ids, if the bags of these keys have equal lengths."""
    if len({tuple(batch.ids[name].lengths.tolist()) for name in names}) > 1:
        raise ValueError(f"{names} differ")
    return fr.bag_reduce(fr.JaggedTensor(batch.ids["a"].values.float()[:, None], batch.ids["a"].offsets), "sum")


def test_columns_of_one_sequence_are_drawn_together():
    """If a function refuses keys of different lengths, keys that are equal in the example are drawn with equal bags,
    and other keys are not. A function that refuses these too raises its own error."""
    alone = lambda predict: compare_alone(predict, {}, probes(predict, {}, PAIRS, KEYS, 5), 5)
    lengths = []
    alone(lambda params, batch: lengths.append(batch.ids["c"].lengths.tolist()) or equal(batch, "a", "b"))
    assert len(lengths) > 1 and lengths[1] != [1] * 5
    bags = probes(lambda params, batch: equal(batch, "a", "b"), {}, PAIRS, KEYS, 5)(0)(slice(5)).ids
    assert bags["a"].lengths.equal(bags["b"].lengths) and not bags["a"].lengths.equal(bags["c"].lengths)
    with pytest.raises(ValueError, match=r"'c'\) differ"):
        alone(lambda params, batch: equal(batch, "a", "b", "c"))
    with pytest.raises(ValueError, match="depends on the other bags"):
        alone(lambda params, batch: equal(batch, "a", "b").cumsum(0))


@pytest.mark.parametrize("draws", [2, 3])
def test_a_tie_may_turn_and_not_always(draws):
    """Whole numbers that differ in two of six draws of bags count as a tie that rounding decides. If they differ in
    three draws, they depend on other bags."""
    calls = itertools.count()
    own = lambda p, b: torch.full((b.ids.num_bags,), int((n := next(calls)) % 6 == 0 and n < 6 * draws))
    if draws == 2:
        return check_alone(own)
    with pytest.raises(ValueError, match="depends on the other bags"):
        check_alone(own)


@pytest.mark.parametrize(
    ("bags", "unseen"),
    [
        ({"c": [[4]], "d": [[-1]], "h": [[9]]}, r"outside table 'item' in its first bags, and so for 1 more tables"),
        ({"c": [[4], [7, 5]], "d": [[1], []], "h": [[9], []]}, r"only ids outside table 'item' in its first bags\n"),
        ({"c": [[4], [7, 0]], "d": [[1], []], "h": [[9], []]}, None),
        ({"c": [[]], "d": [[1]], "h": [[9]]}, None),
        ({"c": [[0]], "d": [[1]], "h": [[-9]]}, None),
    ],
)
def test_a_canary_of_ids_outside_their_tables_is_warned_of(bags, unseen, tmp_path, monkeypatch):
    """export warns if all ids of a table in the example's first bags lie outside the table, because they read zeros.
    Ids that are hashed lie inside, also negative ones."""
    monkeypatch.setattr(_export, "compile_program", lambda *arguments: None)
    features = [fr.FeatureConfig("c", table="item"), fr.FeatureConfig("d", table="user"),
                fr.FeatureConfig("h", table="hashed", hash=fr.modulo())]  # fmt: skip
    predict = lambda params, batch: fr.lookup(params.tables, batch.ids, features).values
    params = fr.Params({n: torch.ones(4, 3) for n in ("item", "user", "hashed")}, {})
    ids = fr.KeyedJaggedTensor.from_lists(bags, dtype=torch.int64)
    with warnings.catch_warnings(record=True) as found, pytest.raises(FileNotFoundError):
        warnings.simplefilter("always")
        fr.export(predict, params, fr.Batch(ids), tmp_path / "package")
    words = [str(w.message) for w in found if "funcrec.export" in str(w.message)]
    assert len(words) == (unseen is not None) and (not words or re.search(unseen, words[0])), words

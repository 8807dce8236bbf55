"""Before new weights serve, they run on the package's example. The example's outputs must be finite."""

import json
import os
import shutil
import signal

import pytest
import torch
from programs import answers, packages
from programs.serving import Server, predict

import funcrec as fr
from funcrec.history import ChangedRows
from funcrec.serve._weights import FILE

pytestmark = pytest.mark.xdist_group("serving")
NAN, INF = float("nan"), float("inf")
ASKED = {"ids": {"a": [[7]]}, "dense": [[1.0]]}


def params(row=0.0, scale=1.0, rank=3):
    """Return parameters. row: the values of row 1, which the example reads. rank: how many of three scores are not
    masked."""
    table = torch.arange(100.0).view(50, 2) / 8
    table[1] = row
    mask = torch.where(torch.arange(3) < rank, 0.0, -INF)
    return fr.Params({"t": table}, {"scale": torch.tensor(scale), "mask": mask})


def scores(params, batch):
    feature = fr.FeatureConfig("a", table="t")
    score = fr.lookup(params.tables, batch.ids, [feature]).values.sum(1) * params.dense["scale"] + batch.dense[:, 0]
    return {
        "click": torch.sigmoid(score),
        "masked": score[:, None] + params.dense["mask"],
        "floor": score.floor().long(),
    }


def delta(package, path, row, scale):
    """Write a delta with one row and the dense weights."""
    newer = params(row, scale, rank=2)
    rows = torch.tensor([1])
    parts = {"t": (ChangedRows(rows, newer.tables["t"][rows], 0, (50, 2)),)}
    own = fr.Delta(parts, torch.tensor(1))
    return fr.write_delta(path, own, package, fr.Params({}, newer.dense), version=path.stem)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the folder of a package whose output `masked` is not finite at export. Next to it are diverged weights and
    good weights."""
    folder = tmp_path_factory.mktemp("canary")
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1], [2, 3]]})
    example = fr.Batch(ids, dense=torch.zeros(2, 1))
    fr.export(scores, params(rank=2), example, folder / "model", version="good")
    fr.save_weights(folder / "nan", params(row=NAN, rank=2), version="nan")
    fr.save_weights(folder / "inf", params(scale=NAN, rank=2), version="inf")
    fr.save_weights(folder / "fewer", params(rank=1), version="fewer")
    delta(folder / "model", folder / "bad.delta", NAN, 1.0)
    delta(folder / "model", folder / "worse.delta", 1.0, NAN)
    delta(folder / "model", folder / "right.delta", 2.0, 1.0)
    return folder / "model"


BAD = [("/reload", "weights", "nan"), ("/reload", "weights", "inf")]
BAD += [("/delta", "path", "bad.delta"), ("/delta", "path", "worse.delta")]


def test_weights_that_diverged_are_not_taken(path, built):
    """Weights or a delta that make the example's output non-finite get 400 at every request. Every bit, output and
    version stays. An output that was not finite at export may stay non-finite."""
    with Server(built / "funcrec-serve", path, "--updates", str(path.parent)) as server:
        before, memory = predict(server.connect(), ASKED), answers.pages(server.process.pid)
        assert before[1]["version"] == "good" and before[1]["outputs"]["masked"][0][2] is None
        for where, key, name in BAD * 2:
            status, _, body = server.ask("POST", where, {key: name})
            error = json.loads(body)["error"]
            assert status == 400 and "finite numbers" in error["problem"] and "click" in error["got"]
            assert str(path.parent) not in body.decode()
            assert predict(server.connect(), ASKED) == before and answers.pages(server.process.pid) == memory
        assert server.ask("POST", "/delta", {"path": "right.delta"})[0] == 200
        assert predict(server.connect(), ASKED)[1]["version"] == "right"
        assert server.ask("POST", "/reload", {"weights": "fewer"})[0] == 200
        assert predict(server.connect(), ASKED)[1]["version"] == "fewer"


def test_a_canary_may_be_left_out(path, built):
    """With `--canary false` the server accepts any weights that its program can run with."""
    with Server(built / "funcrec-serve", path, "--updates", str(path.parent), "--canary", "false") as server:
        for where, key, name in BAD:
            assert server.ask("POST", "/reload", {"weights": path.name})[0] == 200
            assert server.ask("POST", where, {key: name})[0] == 200
        assert predict(server.connect(), ASKED)[1]["outputs"]["click"] == [None]


def test_no_server_begins_with_weights_that_diverged(path, built, tmp_path):
    """A server does not start with a package whose weights are NaN, unless --canary is false."""
    copy = shutil.copytree(path, tmp_path / "copy")
    shutil.copy(path.parent / "nan" / FILE, copy / FILE)
    with pytest.raises(RuntimeError, match="is not answered with finite numbers"):
        Server(built / "funcrec-serve", copy)
    with Server(built / "funcrec-serve", copy, "--canary", "false") as server:
        assert server.ask("GET", "/healthz")[0] == 200


def test_a_package_keeps_what_it_is_tried_with(path):
    """The manifest stores the example's first bags, in the form of a program, and the names of the finite outputs."""
    example = json.loads((path / "manifest.json").read_text())["example"]
    want = {"bags": 2, "dense": [0.0, 0.0], "values": [1, 2, 3], "offsets": [0, 1, 3], "finite": ["click"]}
    assert example == want


@pytest.mark.parametrize("case", ["long", "weighted"])
def test_any_example_is_kept(case, tmp_path, monkeypatch):
    """Examples with a very long bag, with padding or with weights are stored as a request of few bags without padding.
    Servers check and run such requests at their start, those with weights too, in other tests."""
    packages.uncompiled(monkeypatch)
    feature = fr.FeatureConfig("a", table="t")
    predict = lambda params, batch: fr.lookup(params, batch.ids, [feature]).values
    lists = {"long": [[1], [1] * 5000, [2]], "weighted": [[1], [2, 3]] * 9}[case]
    weights = {"a": [[0.5] * len(x) for x in lists]} if case == "weighted" else None
    ids = fr.KeyedJaggedTensor.from_lists({"a": lists}, weights=weights)
    if case == "long":
        ids = fr.KeyedJaggedTensor.from_offsets(ids.keys, torch.cat([ids.values, torch.zeros(6).long()]), ids.offsets)
    table = {"t": torch.arange(8.0).view(4, 2)}
    fr.export(predict, table, fr.Batch(ids), tmp_path / "model")
    kept = json.loads((tmp_path / "model" / "manifest.json").read_text())["example"]
    values, offsets = {"long": ([1], [0, 1]), "weighted": ([1, 2, 3, 1, 2, 3], [0, 1, 3, 4, 6])}[case]
    want = {"bags": len(offsets) - 1, "values": values, "offsets": offsets, "finite": ["output"]}
    assert kept == (want | {"weights": [0.5] * 6} if case == "weighted" else want)


def test_a_bus_error_names_its_file(path, built, tmp_path):
    """A server whose weights file is cut while it runs ends with SIGBUS, and names the file."""
    copy = shutil.copytree(path, tmp_path / "copy")
    with Server(built / "funcrec-serve", copy, "--checksums", "false", "--canary", "false") as server:
        os.truncate(copy / FILE, 0)
        with pytest.raises(ConnectionError):
            predict(server.connect(), ASKED)
        status, errors = server.ended()
    assert status == -signal.SIGBUS and f"`{copy / FILE}` was cut short" in errors

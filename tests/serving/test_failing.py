"""A program fails for a request, or for new weights. The client gets the error. All other requests are answered."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from programs.serving import Server, predict
from programs.surroundings import on_threads

import funcrec as fr
from funcrec.serve._manifest import BLANK, digest_of, text_of

pytestmark = pytest.mark.xdist_group("serving")
ROWS, DIM = 50, 4096
PARAMS = {"t": torch.arange(ROWS * DIM).view(ROWS, DIM) / DIM, "order": torch.tensor([1, 2])}


def rows_of(params, batch):
    """Return the row of each bag's first id by torch's own index, which raises for ids outside the table."""
    ids = batch.ids["a"]
    first = torch.cat([ids.values, ids.values.new_zeros(1)])[ids.offsets[:-1]]
    return torch.relu(params["t"])[torch.where(ids.lengths > 0, first, 0)] + params["t"][params["order"], 0].sum()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the folder of a package with two torch threads. Next to it are weights whose `order` holds an invalid
    row."""
    folder = tmp_path_factory.mktemp("failing")
    with on_threads(2):
        example = fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[1], [2], [3]]}))
        fr.export(rows_of, PARAMS, example, folder / "model", version="good")
    fr.save_weights(folder / "bad", {**PARAMS, "order": torch.tensor([1, ROWS])}, version="bad")
    fr.save_weights(folder / "next", {**PARAMS, "order": torch.tensor([0, 0])}, version="next")
    return folder / "model"


@pytest.fixture
def running(path, built):
    with Server(built / "funcrec-serve", path, "--updates", str(path.parent), "--threads", "2") as server:
        yield server


def first_number(answer):
    return answer["outputs"]["output"][0][0]


def assert_reason(error):
    """Check that the error has torch's message without its call stack."""
    assert "index out of bounds" in error["got"] and "frame" not in error["got"] and "0x" not in error["got"]


def test_an_index_beyond_its_tensor_is_the_requests_error(running):
    """An id that the loops of a program cannot index gives its request a 500, for any number of threads. Other requests
    are answered. The server continues. The message has no addresses."""
    ids = [3, ROWS, 4, -ROWS - 1, 1 << 62, 5]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: predict(running.connect(), {"ids": {"a": [[i]]}}), ids))
    for i, (status, answer) in zip(ids, answers, strict=True):
        if i < 6 and i > 0:
            assert status == 200 and first_number(answer) == i + 3
        else:
            assert status == 500
            assert_reason(answer["error"])
    status, errors = running.stop()
    assert status == 0 and "index out of bounds" in errors and "frame" not in errors


def test_nobody_need_read_what_is_said(path, built):
    """A failed run is logged to a closed stderr. The server continues."""
    with Server(built / "funcrec-serve", path) as server:
        server.process.stderr.close()
        for i, code in ((ROWS, 500), (1, 200)):
            assert predict(server.connect(), {"ids": {"a": [[i]]}})[0] == code
        server.process.terminate()
        assert server.process.wait(30) == 0


def test_weights_that_the_program_fails_with_are_not_taken(running):
    """/reload of weights that make the program fail gives the reason each time. The old weights stay in use. Other
    weights can be loaded afterwards."""
    connection, asked = running.connect(), {"ids": {"a": [[7]]}}
    for _ in range(3):
        status, _, body = running.ask("POST", "/reload", {"weights": "bad"})
        assert status == 400
        assert_reason(json.loads(body)["error"])
        status, answer = predict(connection, asked)
        assert (status, answer["version"], first_number(answer)) == (200, "good", 7 + 3)
    assert running.ask("POST", "/reload", {"weights": "next"})[0] == 200
    _, answer = predict(connection, asked)
    assert (answer["version"], first_number(answer)) == ("next", 7)


def test_weights_of_a_package_of_another_program_are_not_taken(path, running):
    """/reload and swap refuse a package with other inputs, even if the package's parameters have the same form. They
    accept a package of this program."""
    other = shutil.copytree(path, path.parent / "other", dirs_exist_ok=True)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["inputs"].insert(0, {"name": "dense", "dtype": "float32", "shape": ["B", 1]})
    manifest["digest"] = digest_of(text_of({**manifest, "digest": BLANK}))
    (other / "manifest.json").write_text(text_of(manifest))
    status, _, body = running.ask("POST", "/reload", {"weights": "other"})
    error = json.loads(body)["error"]
    assert status == 400 and "is a package of another program" in error["problem"]
    with pytest.raises(ValueError, match="is a package of another program") as refused:
        fr.load_package(path).swap(other)
    assert error["got"] in str(refused.value) and error["need"] in str(refused.value)
    assert running.ask("POST", "/reload", {"weights": "model"})[0] == 200
    fr.load_package(path).swap(path)

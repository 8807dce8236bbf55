"""A served package gives the outputs of the package in Python, in both forms of bodies, with any weights."""

import contextlib
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from programs import answers, packages, serving, tensor_files

import funcrec as fr
from funcrec.history import ChangedRows
from funcrec.serve._weights import FILE

pytestmark = pytest.mark.xdist_group("packages")


@pytest.fixture(scope="module")
def path(packaged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(packaged, folder / "model")
    fr.save_weights(folder / "next", packages.params(1), version="next")
    return folder / "model"


@pytest.fixture(scope="module")
def running(path, built):
    program = os.environ.get("FUNCREC_SERVE") or built / "funcrec-serve"
    with serving.Server(program, path, "--updates", str(path.parent)) as server:
        yield server


def assert_answers(package, connection, num_bags):
    """Check that both forms of a request give the package's outputs within 1e-6, and the package's version."""
    batch = packages.batch(num_bags, seed=num_bags)
    want, asked = package(batch), packages.plain(batch)
    status, plain = serving.predict(connection, asked)
    body = serving.pack(asked, packages.KEYS, ("seen",))
    code, _, data = serving.ask(connection, "POST", "/predict", body, serving.BYTES)
    assert (status, code) == (200, 200)
    for answer in (plain, serving.unpack(data)):
        assert answer["version"] == package.version and set(answer["outputs"]) == set(want)
        for name, x in want.items():
            got = torch.as_tensor(np.array(answer["outputs"][name], dtype=np.float32)).reshape(x.shape)
            torch.testing.assert_close(got, x, rtol=0, atol=1e-6)


def test_the_manifest_is_the_packages(path, running):
    """GET /manifest returns the manifest's entries about requests and outputs, but not the example."""
    own, found = json.loads((path / "manifest.json").read_text()), json.loads(running.ask("GET", "/manifest")[2])
    assert found.pop("version") == "first" and found.pop("manifest") == own["digest"]
    features = [{k: f[k] for k in ("name", "rows", "weighted")} for f in own["features"]]
    assert found.pop("features") == features and "example" not in found
    assert found == {k: own[k] for k in found} and {"inputs", "outputs", "max_batch", "max_ids", "torch"} <= set(found)


@pytest.mark.parametrize("version", ["first", "next"])
def test_the_server_answers_as_the_package(path, running, version):
    """Batches of 0 to 512 bags, with some ids in no table, give Python's outputs within 1e-6 and the version. This
    holds as JSON and as bytes."""
    package = fr.load_package(path)
    if version == "next":
        package.swap(path.parent / "next")
        assert running.ask("POST", "/reload", {"weights": "next"})[0] == 200
    connection = running.connect()
    for num_bags in (0, 1, 3, 64, 512):
        assert_answers(package, connection, num_bags)


def test_a_delta_changes_the_answers(path, running):
    """After POST /delta, the outputs equal those of Python's package with the same file: rows of every table and dense
    weights. A delta that is cut, or applied twice, gets 400 and changes no output."""
    package, connection = fr.load_package(path), running.connect()
    assert running.ask("POST", "/reload", {"weights": path.name})[0] == 200
    for n in (1, 2):
        newer, rows = packages.params(n), torch.arange(n, 50, 2)
        parts = {t: (ChangedRows(rows, x[rows], 0, tuple(x.shape)),) for t, x in newer.tables.items()}
        delta, file = fr.Delta(parts, torch.tensor(n)), path.parent / f"{n}.delta"
        fr.write_delta(file, delta, package, fr.Params({}, newer.dense), version=str(n))
        (path.parent / "cut.delta").write_bytes(file.read_bytes()[:-1])
        assert running.ask("POST", "/delta", {"path": "cut.delta"})[0] == 400
        assert_answers(package, connection, 9)
        before = package(packages.batch(9))
        package.apply(file)
        assert not torch.equal(before["click"], package(packages.batch(9))["click"])
        assert running.ask("POST", "/delta", {"path": file.name})[0] == 200
        assert running.ask("POST", "/delta", {"path": file.name})[0] == 400
        assert_answers(package, connection, 9)


def test_versions_of_a_folder_answer_as_their_packages(path, built, tmp_path):
    """A folder of models serves each package below its name, and each version of it. Answers of the Open Inference
    Protocol equal Python's, in lists and in bytes. After /rollback, the weights have the deltas that they had."""
    repository = tmp_path / "models"
    for folder in ("click/10", "click/9", "other"):
        (repository / folder).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, repository / folder)
    shutil.copy(path.parent / "next" / FILE, repository / "click" / "10" / FILE)
    first, newer = fr.load_package(path), fr.load_package(repository / "click" / "10")
    batch = packages.batch(5, seed=5)
    with serving.Server(built / "funcrec-serve", repository, "--updates", str(path.parent)) as server:
        connection = server.connect()

        def assert_served(package, where, binary=("dense",)):
            asked = packages.plain(batch)
            more = {"parameters": {"binary_data_output": bool(binary)}}
            status, answer = serving.infer(connection, asked, path=where, binary=binary, weighted=("seen",), **more)
            assert (status, answer["version"]) == (200, package.version), answer
            for name, x in package(batch).items():
                torch.testing.assert_close(torch.tensor(answer["outputs"][name]), x, rtol=0, atol=1e-6)

        assert json.loads(server.ask("GET", "/v2/models/click")[2])["versions"] == ["first", "next"]
        assert_served(newer, "/v2/models/click/infer")
        assert_served(first, "/v2/models/click/versions/first/infer", binary=())
        assert_served(first, "/v2/models/other/infer")
        rows = torch.arange(50)
        changed = {t: (ChangedRows(rows, x[rows], 0, tuple(x.shape)),) for t, x in packages.params(3).tables.items()}
        file = path.parent / "kept.delta"
        fr.write_delta(file, fr.Delta(changed, torch.tensor(1)), first, None, version="changed")
        first.apply(file)
        post = lambda where, **body: server.ask("POST", f"/models/other/{where}", body)[0]
        assert post("delta", path=file.name) == 200 and post("reload", weights="next") == 200
        assert_served(newer, "/v2/models/other/infer")
        assert post("rollback", version="first") == 400 and post("rollback", version="changed") == 200
        assert_served(first, "/v2/models/other/infer")
        assert post("rollback", version="next") == 200
        assert_served(newer, "/v2/models/other/infer")


STEP = fr.logged(
    fr.train_step(
        fr.models.loss(packages.MODEL), sparse=fr.optim.adagrad(0.5), has_aux=True, merge=fr.models.merge_stats,
        dense=fr.optim.dense(torch.optim.Adam, lr=0.1),
    ), steps=0,
)  # fmt: skip


def flipped(folder):
    """Flip a bit of the folder's weights."""
    with open(folder / FILE, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 0x40]))
    return folder


def test_weights_that_were_changed_are_refused(path, running, built, tmp_path):
    """One flipped bit of the weights gives 400 for /reload. The version stays. No server starts with such weights
    unless `checksums` is false."""
    before = running.ask("GET", "/healthz")[2]
    flipped(shutil.copytree(path.parent / "next", path.parent / "flipped"))
    status, _, body = running.ask("POST", "/reload", {"weights": "flipped"})
    assert status == 400 and "was changed" in json.loads(body)["error"]["problem"]
    assert running.ask("GET", "/healthz")[2] == before
    copy = flipped(shutil.copytree(path, tmp_path / "copy"))
    with pytest.raises(RuntimeError, match=r"weights.safetensors` was changed(?s:.*)got   CRC"):
        serving.Server(built / "funcrec-serve", copy)
    with serving.Server(built / "funcrec-serve", copy, "--checksums", "false") as server:
        assert server.ask("GET", "/healthz")[0] == 200


@pytest.mark.parametrize("name", ["a delta", FILE])
def test_what_is_no_file_blocks_nobody(path, running, name):
    """A pipe without a writer, in the place of a file, gets 400 at once. Other updates continue."""
    folder, key = path.parent / f"pipe {name}", "path" if name == "a delta" else "weights"
    shutil.copytree(path.parent / "next", folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    asked = f"{folder.name}/{name}" if key == "path" else folder.name
    with contextlib.closing(running.connect(timeout=5, admin=True)) as connection:
        code, _, body = serving.ask(connection, "POST", "/delta" if key == "path" else "/reload", {key: asked})
    assert code == 400 and name in json.loads(body)["error"]["problem"]
    assert running.ask("POST", "/reload", {"weights": "next"})[0] == 200


def led(path, elsewhere):
    """Replace a file by a link to elsewhere."""
    path.unlink()
    path.symlink_to(elsewhere)


def test_no_answer_has_a_path_of_the_servers(path, running, tmp_path):
    """The error for an update has the client's name for the update and no other path. A file in a folder that is a link
    out of the folder of updates gets 400."""
    folder, secret = path.parent / "wrong", shutil.copytree(path.parent / "next", tmp_path / "secret")
    wrong = {
        "no values": lambda: (folder / FILE).unlink(),
        "cut off": lambda: os.truncate(folder / FILE, 5),
        "no header": lambda: (folder / FILE).write_text("{"),
        "another program": lambda: (folder / "manifest.json").write_text('{"digest": "0"}'),
        "no manifest": lambda: (folder / "manifest.json").mkdir(),
        "changed": lambda: flipped(folder),
        "led out": lambda: led(folder / FILE, secret / FILE),
    }
    for name, change in wrong.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(path.parent / "next", folder)
        change()
        for where, key in (("/reload", "weights"), ("/delta", "path")):
            status, _, body = running.ask("POST", where, {key: "wrong"})
            assert status == 400 and str(path.parent) not in body.decode() and "/tmp" not in body.decode(), name
        status, _, body = running.ask("POST", "/delta", {"path": f"wrong/{FILE}"})
        assert status == 400 and "/tmp" not in body.decode(), name
    assert running.ask("POST", "/reload", {"weights": "next"})[0] == 200


class Asking:
    """Clients that send one request in both forms until they are stopped. `answers` has (version, clicks) of each
    response."""

    def __init__(self, server, request, clients=3):
        self.answers, self.errors, self.stop = [], [], False
        self.threads = [threading.Thread(target=self._ask, args=(server, request, i)) for i in range(clients)]
        [t.start() for t in self.threads]

    def _ask(self, server, request, i):
        connection, body = server.connect(), serving.pack(request, packages.KEYS, ("seen",))
        while not self.stop:
            if i % 2:
                status, answer = serving.predict(connection, request)
            else:
                status, _, data = serving.ask(connection, "POST", "/predict", body, serving.BYTES)
                answer = serving.unpack(data) if status == 200 else data
            if status != 200:
                self.errors.append(answer)
                return
            self.answers.append((answer["version"], torch.as_tensor(np.array(answer["outputs"]["click"], np.float32))))

    def end(self):
        self.stop = True
        [t.join(20) for t in self.threads]
        assert not self.errors and not any(t.is_alive() for t in self.threads)
        return self.answers


def test_a_run_publishes_to_a_server(path, built, tmp_path):
    """A run publishes each step to a server that serves clients. Every response equals that of an export of the named
    step. A server that ended causes a warning. A restarted server gets the whole weights. Its memory equals that of the
    export."""
    (tmp_path / "published").mkdir()
    start = lambda: serving.Server(built / "funcrec-serve", path, "--updates", str(tmp_path / "published"))
    asked, reader, right = packages.batch(7, seed=7), fr.load_package(path), {}
    batches = [packages.batch(40, seed=i, outside=False) for i in range(12)]
    batches = [fr.Batch(b.ids, torch.arange(40) % 2 * 1.0, dense=b.dense) for b in batches]

    def note(record):
        """Record the outputs of the published version, from an export of its weights."""
        if record.when == "step":
            version = sorted(x.name for x in (tmp_path / "published").glob("0*"))[-1].rsplit(".", 1)[0]
            reader.swap(fr.save_weights(tmp_path / version, record.state.params, version=version))
            right[version] = reader(asked)["click"]

    def run(state, server, batches):
        address = f"http://127.0.0.1:{server.admin}"
        tell = fr.publish(tmp_path / "published", path, every_steps=1, keep=3, servers=[address])
        return fr.fit(STEP, state, batches, epochs=1, callbacks=[tell, note], progress=False).state

    with start() as server:
        asking = Asking(server, packages.plain(asked))
        state = run(STEP.init(packages.params()), server, batches[:8])
        found = asking.end()
    seen = {version for version, _ in found} - {"first"}
    assert len(seen) > 3 and seen <= set(right)
    right["first"] = fr.load_package(path)(asked)["click"]
    for version, click in found:
        assert [n for n, want in right.items() if torch.allclose(click, want, rtol=0, atol=1e-6)] == [version]
    with pytest.warns(UserWarning, match="was not answered"):
        run(state, server, batches[8:])
    with start() as server:
        version = fr.update_server(f"http://127.0.0.1:{server.admin}", tmp_path / "published")
        assert version == max(right.keys() - {"first"}) and "step-4" in version
        want = (tmp_path / version / FILE).read_bytes()
        first = len(want) - len(tensor_files.parts(want)[1])  # the bytes before the body name the version of the file
        assert answers.pages(server.process.pid)[first : len(want)] == want[first:]
        assert fr.update_server(f"http://127.0.0.1:{server.admin}", tmp_path / "published") == version


def test_weights_are_swapped_under_load(path, running):
    """Weights, a delta to them, and other weights are loaded twenty times while clients send requests. No response
    fails. Each response has the values of its version, and every version occurs."""
    package, asked, right = fr.load_package(path), packages.batch(7, seed=7), {}
    newer = packages.params(2)
    parts = {t: (ChangedRows(torch.arange(20), x[:20], 0, tuple(x.shape)),) for t, x in newer.tables.items()}
    delta, file = fr.Delta(parts, torch.tensor(1)), path.parent / "third.delta"
    fr.write_delta(file, delta, package, fr.Params({}, newer.dense), version="third")
    learn = lambda: right.update({package.version: package(asked)["click"]})
    learn(), package.apply(file), learn(), package.swap(path.parent / "next"), learn()
    turn = [("/reload", {"weights": path.name}), ("/delta", {"path": file.name}), ("/reload", {"weights": "next"})]
    assert running.ask("POST", *turn[2])[0] == 200
    asking = Asking(running, packages.plain(asked))
    for i in range(20):
        assert running.ask("POST", *turn[i % 3])[0] == 200
        before = len(asking.answers)
        while len(asking.answers) < before + 6 and not asking.errors:
            time.sleep(0.001)
    found = asking.end()
    assert {version for version, _ in found} == set(right) == {"first", "third", "next"}
    for version, click in found:
        assert [n for n, want in right.items() if torch.allclose(click, want, rtol=0, atol=1e-6)] == [version]

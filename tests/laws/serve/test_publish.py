"""A run that publishes. At every version, servers have the weights of an export of that step, bit for bit."""

import functools
import gc
import http.server
import json
import os
import random
import shutil
import threading
import warnings

import pytest
import torch
from programs.failing_store import emptied, failing
from programs.fresh import DTYPES, STEP, batch, begun, bits, held, loss_fn

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.files import _whole_file, _whole_folder, as_path, write_folder
from funcrec.serve import _command
from funcrec.serve.freshness import _publish, _published

pytestmark = pytest.mark.xdist_group("packages")

MESH = fr.Mesh.emulated(x=2)
KINDS = (
    fr.column_wise,
    fr.row_wise,
    lambda axis: fr.table_wise(axis, rank=1),
    lambda axis: fr.replicated(),
    fr.row_wise,
)
PLAN = fr.Plan({n: kind("x") for n, kind in zip(DTYPES, KINDS, strict=True)})


def sharded(plan):
    """Return the step of `fresh` on a mesh."""
    loss = lambda p, b: loss_fn(p, b) / 2
    kind = {"sparse": fr.optim.adagrad(0.5), "dense": fr.optim.dense(torch.optim.SGD, lr=0.3)}
    return fr.logged(fr.train_step(loss, **kind, mesh=MESH, plan=plan), steps=0)


SHARDED = sharded(PLAN)


def record(when, step, state):
    return fr.loop.Record(when, 0, step, {}, state)


def wanted(run, name):
    """Return the bits that an export of this state would write."""
    state = run.state if isinstance(run, fr.Logged) else run
    if isinstance(state.tables, fr.ShardedTables):
        state = fr.TrainState(state.step, fr.gather_tables(state.tables, MESH), {}, state.dense, (), state.key)
    return bits(dict(sorted(fr.tree.paths(held(state, name)))))


class Told:
    """A folder, the weights of all versions published there, and packages that follow the folder at different times."""

    def __init__(self, package, name, folder, **options):
        self.package, self.name, self.folder, self.options = package, name, folder, options
        self.right, self.tell = {}, None
        self.near, self.far = fr.load_package(package), fr.load_package(package)

    def begin(self):
        self.tell = fr.publish(self.folder, self.package, **{"every_steps": 2} | self.options)

    def step(self, number, run):
        """Publish, and record the weights of the state for each new version."""
        before = set(self.versions())
        try:
            self.tell(record("step", number, run))
        finally:
            for version in set(self.versions()) - before:
                self.right[version] = wanted(run, self.name)

    def versions(self):
        return [p.version for p in _published.pieces(self.folder)] if self.folder.exists() else []

    def assert_followed(self, package):
        package.follow(self.folder)
        assert package.version == self.versions()[-1] and bits(package.params) == self.right[package.version]


def killed(monkeypatch, rng):
    """Interrupt the next rename or tidying, as if the process were killed there. The temporary file stays."""

    def kill(*args):
        raise KeyboardInterrupt

    module, name = rng.choice([(_whole_file.os, "replace"), (_whole_folder, "take_name"), (_publish, "tidy")])
    monkeypatch.setattr(module, name, kill)


@pytest.mark.parametrize("seed, name", [(0, "coded"), (1, "coded"), (2, "plain")])
def test_every_version_is_an_export_of_its_step(seed, name, tmp_path, request, monkeypatch):
    """Publishers may be killed at any write and restart from an older state. Packages may follow always, seldom or for
    the first time. Each package has, bit for bit, the export of the step whose version the package names."""
    rng, keep = random.Random(seed), 3
    told = Told(request.getfixturevalue(name), name, tmp_path / "published", keep=keep)
    run, number, kept = begun(), 0, (begun(), 0)
    told.begin()
    for i in range(40):
        run, number = STEP(run, batch(100 * seed + i))[0], number + 1
        if rng.random() < 0.15:
            kept = run, number
        if rng.random() < 0.15:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                killed(patch, rng)
                for n in range(number, number + 2 * keep + 2):
                    told.step(n, run)
                    run = STEP(run, batch(n))[0]
            (tmp_path / "published" / ".00.delta.funcrec.tmp").write_bytes(b"half")
            run, number = kept
            told.begin()
        else:
            told.step(number, run)
        if told.versions():
            told.assert_followed(told.near)
            if rng.random() < 0.2:
                told.assert_followed(told.far)
            if rng.random() < 0.2:
                told.assert_followed(fr.load_package(told.package))
            assert sum(x.endswith(".delta") for x in os.listdir(told.folder)) <= 2 * keep


def test_every_version_in_a_store_is_an_export_of_its_step(coded):
    """The store of the published folder may fail at any request of a publication. A publisher that begins again
    succeeds, and packages that follow by URL have the bits of the versions that they name. No files are left over."""
    rng, keep, store = random.Random(0), 3, emptied()
    told = Told(coded, "coded", as_path("test", "memory://runs/published", remote=True), keep=keep, every_steps=1)
    run, fails = begun(), 0
    told.begin()
    for number in range(24):
        run = STEP(run, batch(number))[0]
        with pytest.MonkeyPatch.context() as patch:
            if rng.random() < 0.4:
                failing(patch, rng.randrange(14), late=rng.random() < 0.5)
            try:
                told.tell(record("step", number, run))
                is_lost = False
            except OSError as error:
                assert "the store is gone" in str(error) and "\n  need  " in str(error)
                is_lost, fails = True, fails + 1
        for version in set(told.versions()) - set(told.right):
            told.right[version] = wanted(run, "coded")
        if is_lost:
            told.begin()
        if told.versions():
            told.assert_followed(told.near)
            if rng.random() < 0.3:
                told.assert_followed(told.far)
    told.tell(record("step", 24, run))
    left = {x.split("/")[3] for x in store.find("/runs/published")}
    claims = {x for x in left if _published.claim_of(x) >= 0}
    assert left - claims == {p.version + p.kind for p in _published.pieces(told.folder)} and fails > 3
    assert claims == {_published.claim_name(_published.pieces(told.folder)[-1].number)}
    emptied()


def test_the_server_gets_packages_of_stores_as_folders(coded, monkeypatch):
    """`serve` copies packages that URLs before the flags name, and gives the server the paths of the copies."""
    emptied()
    url, began = as_path("test", "memory://day=1/model", remote=True), []
    write_folder("test", url, lambda own: copied(coded, own))
    monkeypatch.setattr(_command.os, "execv", lambda program, words: began.append(words[1:]))
    monkeypatch.setattr(_command, "_program", lambda: "program")
    _command.main([str(url), f"ctr={url}", "day=here", "--updates", "memory://other"])
    first, (name, _, second), *rest = began[0][0], began[0][1].partition("="), *began[0][2:]
    assert rest == ["day=here", "--updates", "memory://other"] and name == "ctr" and first != second
    for path in (first, second):
        assert bits(fr.load_package(path).params) == bits(fr.load_package(coded).params)
        shutil.rmtree(os.path.dirname(path))
    with pytest.raises(FileNotFoundError, match=r"^python -m funcrec serve: `memory://day=2/model` is not a package"):
        _command.main(["memory://day=2/model"])
    emptied()


def copied(folder, into):
    shutil.copytree(folder, into, dirs_exist_ok=True)


def test_a_package_by_url_is_the_package(coded):
    """A package, its weights and its deltas in a store answer as those of this machine. Whole weights are replaced
    only with overwrite=True, and another publisher is refused."""
    emptied()
    root, run = "memory://runs", STEP(begun(), batch(1))[0]
    write_folder(
        "test",
        as_path("test", f"{root}/model", remote=True),
        lambda own: shutil.copytree(coded, own, dirs_exist_ok=True),
    )
    near, far = fr.load_package(coded), fr.load_package(f"{root}/model")
    assert bits(far.params) == bits(near.params) and far.manifest == near.manifest
    path = fr.write_delta(
        f"{root}/1.delta", fr.delta(run, 0), f"{root}/model", fr.Params({}, run.state.dense), version="1"
    )
    far.apply(path)
    weights = fr.save_weights(f"{root}/1", held(run.state, "coded"), version="2")
    near.swap(weights)
    assert bits(far.params) == bits(near.params) and (far.version, near.version) == ("1", "2")
    with pytest.raises(FileExistsError, match=r"^funcrec\.save_weights: `memory://runs/1` is there already"):
        fr.save_weights(weights, held(run.state, "coded"))
    near.swap(fr.save_weights(weights, held(run.state, "coded"), version="3", overwrite=True))
    assert near.version == "3"
    with pytest.raises(FileExistsError, match="holds something else"):
        fr.export(lambda p, b: p, begun().params, batch(1), f"{root}/1", overwrite=True)
    first, second = (fr.publish(f"{root}/published", far, every_steps=1) for _ in range(2))
    first(record("step", 1, run)), second(record("step", 1, run))
    with pytest.raises(ValueError, match="has another publisher"):
        first(record("step", 2, run))
    with pytest.raises(ValueError, match="a server reads no store"):
        fr.update_server("http://127.0.0.1:9", f"{root}/published")
    with pytest.raises(ValueError, match="read no stores"):
        fr.publish(f"{root}/other", far, every_steps=1, servers=["http://127.0.0.1:9"])
    with pytest.raises(ValueError, match="is a package, or holds weights"):
        fr.publish(f"{root}/model", far, every_steps=1)
    emptied()


@pytest.mark.parametrize("step", [STEP, SHARDED], ids=["alone", "mesh"])
def test_what_is_written_when(step, coded, tmp_path):
    """The first publication is whole weights, the next publications are deltas, and after `keep` deltas a publication
    is both. Ends of epochs are also published, each step once. A state on a mesh, row-wise and column-wise, is
    published like a plain state."""
    told = Told(coded, "coded", tmp_path / "published", keep=2, mesh=MESH if step is SHARDED else None)
    told.begin()
    run = step.init(begun().params)
    seen = []
    for n in range(1, 12):
        run, _ = step(run, batch(n, 4))
        told.step(n, run)
        if n % 2 == 0:
            told.tell(record("epoch", n, run))
            told.assert_followed(told.near)
            seen.append([p.version.split("-")[2] + p.kind for p in _published.pieces(told.folder)])
    assert seen[:2] == [["2.weights"], ["2.weights", "4.delta"]]
    assert seen[2] == ["4.delta", "6.delta", "6.weights"] and seen[3] == ["6.delta", "6.weights", "8.delta"]
    # the last steps are published
    told.tell(record("epoch", 11, run))
    told.right[told.versions()[-1]] = wanted(run, "coded")
    told.assert_followed(told.near)
    told.assert_followed(told.far)


def test_states_without_a_log_are_published_whole(plain, tmp_path):
    """Without `logged`, each publication is whole weights. The newest publications stay."""
    told = Told(plain, "plain", tmp_path / "published")
    told.begin()
    run = begun()
    for n in (2, 4):
        run, _ = STEP(run, batch(n))
        told.step(n, run.state)
        told.assert_followed(told.near)
    assert len(told.versions()) == 1


def test_a_log_begun_anew_is_published_whole(plain, tmp_path):
    """The versions of a new log start again. The changed rows are therefore unknown. All rows are written."""
    told = Told(plain, "plain", tmp_path / "published")
    told.begin()
    run = begun()
    for n in (2, 4):
        run, _ = STEP(run, batch(n))
        told.step(n, run)
    run = STEP.init(fr.tree.map(lambda x: x + 1 if x.is_floating_point() else x, run.state))
    told.step(6, run)
    assert _published.pieces(told.folder)[-1].kind == ".weights"
    told.assert_followed(told.near)


@pytest.mark.parametrize("where", ["alone", "mesh"])
def test_a_new_log_that_is_as_old_is_published_whole(where, plain, tmp_path):
    """A log may restart in the middle of a run, as after `reshard`, and reach the version published from the old log.
    It is another log. All rows are written, then deltas again."""
    is_mesh = where == "mesh"
    told = Told(plain, "plain", tmp_path / "published", every_steps=3, mesh=MESH if is_mesh else None)
    told.begin()
    step = SHARDED if is_mesh else STEP
    run, kinds = step.init(begun().params), []
    for n in range(1, 13):
        if n == 4:
            plan, sparse = fr.Plan({n: fr.row_wise("x") for n in DTYPES}), fr.optim.adagrad(0.5)
            step = sharded(plan) if is_mesh else STEP
            run = step.init(fr.reshard(run.state, plan, mesh=MESH, sparse=sparse) if is_mesh else run.state)
        run, _ = step(run, batch(n, 4))
        told.step(n, run)
        if n % 3 == 0:
            kinds.append(_published.pieces(told.folder)[-1].kind)
            told.assert_followed(told.near)
    assert kinds == [".weights", ".weights", ".delta", ".delta"]
    told.assert_followed(told.far)


def test_a_log_of_an_older_checkpoint_is_published_whole(plain, tmp_path):
    """A log without a recorded origin may be any log. All rows are written each time. Training continues."""
    told = Told(plain, "plain", tmp_path / "published", every_steps=1)
    told.begin()
    run = begun()
    run = replace(run, log=replace(run.log, origin=None))
    for n in (1, 2):
        run, _ = STEP(run, batch(n))
        fr.save(tmp_path / "run", run)
        run = fr.load(tmp_path / "run")
        told.step(n, run)
        assert _published.pieces(told.folder)[-1].kind == ".weights"
        told.assert_followed(told.near)


def test_a_server_that_cannot_be_told_does_not_end_training(plain, tmp_path):
    """A server that cannot be reached causes a warning with its address each time. The files are written."""
    address = "http://127.0.0.1:9"
    tell = fr.publish(tmp_path / "published", plain, every_steps=1, servers=[address], timeout_s=2)
    run = begun()
    for n in (1, 2):
        run, _ = STEP(run, batch(n))
        with pytest.warns(UserWarning, match=rf"{address}/healthz was not answered"):
            tell(record("step", n, run))
    assert len(_published.pieces(tmp_path / "published")) == 2


def test_a_delta_that_is_missing_is_named(plain, tmp_path):
    """If a delta between a package and the newest version is missing, and no newer whole weights are there, the error
    names its number. A package of another run is told that weights are missing."""
    told = Told(plain, "plain", tmp_path / "published", keep=9)
    told.begin()
    run = begun()
    for n in (2, 4, 6):
        run, _ = STEP(run, batch(n))
        told.step(n, run)
    folder = tmp_path / "published"
    found = _published.pieces(folder)
    first, *rest = [p for p in found if p.kind == _published.DELTA]
    _published.remove(_published.path_of(folder, first))
    words = rf"(?s)lacks a delta.*no delta to number {first.number}, and the newest is {rest[-1].number}"
    version = _published.version_of(first.number - 1, 0, first.run)
    with pytest.raises(FileNotFoundError, match=rf"{words}.*{version}"):
        _published.route("call", folder, version)
    for piece in [p for p in found if p.kind == _published.WEIGHTS]:
        _published.remove(_published.path_of(folder, piece))
    with pytest.raises(FileNotFoundError, match="has no weights"):
        _published.route("call", folder, None)


def test_what_is_damaged_is_led_around_or_told(plain, tmp_path):
    """A package refuses a damaged delta, and takes whole weights if they are newer. Otherwise the package does not
    change. An error says what is wrong. A folder without weights raises an error that says so."""
    with pytest.raises(FileNotFoundError, match="has no weights"):
        fr.load_package(plain).follow(tmp_path)
    told = Told(plain, "plain", tmp_path / "published", keep=2)
    told.begin()
    run = begun()
    for n in (2, 4, 6, 8):
        run, _ = STEP(run, batch(n))
        told.step(n, run)
        if n == 2:
            told.assert_followed(told.near)
            told.assert_followed(told.far)
    deltas = {int(p.version.split("-")[2]): told.folder / (p.version + ".delta")
              for p in _published.pieces(told.folder) if p.kind == ".delta"}  # fmt: skip
    deltas[6].write_bytes(deltas[6].read_bytes()[:-1])
    # step 6 has whole weights
    told.assert_followed(told.near)
    deltas[8].write_bytes(deltas[8].read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        told.far.follow(told.folder)
    assert bits(told.far.params) == told.right[told.far.version]


@pytest.mark.parametrize("steps, beyond", [(3, 5), (4, 6), (4, 5), (6, 9)], ids=["5", "6", "epoch", "begin"])
def test_a_state_that_was_restored_is_published_whole(steps, beyond, plain, tmp_path):
    """A step or an end of an epoch is published as whole weights if it is not after the last published step. So is the
    first publication after "begin". The rows of the abandoned steps get the values of the restored state again."""
    told = Told(plain, "plain", tmp_path / "published")
    told.options["every_steps"] = 1
    told.begin()
    runs, when = [begun()], "epoch" if (steps, beyond) == (4, 5) else "step"
    for n in range(1, 7):
        runs.append(STEP(runs[-1], batch(n, 9))[0])
        told.step(n, runs[n])
    told.assert_followed(told.near)
    if when == "epoch":
        told.tell(record("epoch", 6, runs[6]))
    run = runs[3]
    if beyond == 9:
        told.tell(record("begin", 3, run))
    for n in range(steps):
        run, _ = STEP(run, batch(20 + n, 1))
    step = 6 if when == "epoch" else beyond
    told.step(step, run) if when == "step" else told.tell(record("epoch", step, run))
    told.right[told.versions()[-1]] = wanted(run, "plain")
    assert [p.kind for p in _published.pieces(told.folder)][-1] == ".weights"
    told.assert_followed(told.near)
    run, _ = STEP(run, batch(40))
    told.step(step + 1, run)
    assert _published.pieces(told.folder)[-1].kind == ".delta"
    told.assert_followed(told.near)
    told.assert_followed(told.far)


def test_weights_that_are_exchanged_are_closed(plain, tmp_path):
    """Weight files that no package reads any more are closed. Python has no leak to warn of."""
    weights = fr.save_weights(tmp_path / "weights", held(begun().state, "plain"))
    # this call collects the garbage of other tests
    gc.collect()
    package, count = fr.load_package(plain), len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            package.swap(weights)
        gc.collect()
    assert not seen and len(os.listdir("/proc/self/fd")) == count


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that answers 503."""

    def do_GET(self):
        self.send_error(503, "busy")

    def log_message(self, *args):
        pass


def test_a_question_that_is_refused_is_told(tmp_path):
    """If a server refuses a request, the error has the server's address. The error shows no body."""
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConnectionError, match=rf"{address}/healthz refused\.\n  got   503"):
            fr.update_server(address, tmp_path)
        thread.join()


class Answering(http.server.BaseHTTPRequestHandler):
    """A server that answers 200."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": self.server.version}).encode())

    def log_message(self, *args):
        pass


def test_servers_are_told_directly(plain, tmp_path, monkeypatch):
    """Requests go to a server directly, whatever proxy the process is configured with."""
    tell = fr.publish(tmp_path / "published", plain, every_steps=1)
    tell(record("step", 1, begun()))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        server.version = _published.pieces(tmp_path / "published")[-1].version
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            assert fr.update_server(address, tmp_path / "published") == server.version
        finally:
            server.shutdown()
            thread.join()


BAD = {
    "no name": ({"folder": ""}, ValueError, "`folder` names no folder"),
    "a null byte": ({"folder": "a\0b"}, ValueError, "`folder` names no folder"),
    "a file": ({"folder": __file__}, NotADirectoryError, "`folder` is a file, or"),
    "below a file": ({"folder": __file__ + "/a/b"}, NotADirectoryError, "`folder` is a file, or lies below one"),
    "no address": ({"servers": ["localhost:80"]}, ValueError, "`servers[0]` is not an address"),
    "one address": ({"servers": "http://localhost"}, TypeError, "`servers`"),
    "a port beyond": ({"servers": ["http://localhost:65536"]}, ValueError, "`servers[0]` is not an address"),
    "no path": ({"servers": ["unix:admin"]}, ValueError, "`servers[0]` is not an address"),
    "a user": ({"servers": ["http://me:word@localhost"]}, ValueError, "`servers[0]` is not an address"),
    "a query": ({"servers": ["http://localhost/?x=1"]}, ValueError, "`servers[0]` is not an address"),
    "no host": ({"servers": ["http://:80"]}, ValueError, "`servers[0]` is not an address"),
    "no time": ({"timeout_s": 0.0}, ValueError, "`timeout_s` is out of range"),
    "no steps": ({"every_steps": 0}, ValueError, "`every_steps`"),
    "no package": ({"package": "nowhere"}, FileNotFoundError, "is not a package"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_told(name, plain, tmp_path):
    """A wrong argument raises in four parts, before any file is written."""
    changed, kind, text = BAD[name]
    with pytest.raises(kind) as error:
        fr.publish(**{"folder": tmp_path / "published", "package": plain, "every_steps": 1} | changed)
    assert "funcrec.publish" in str(error.value) and text in str(error.value) and "  need  " in str(error.value)
    assert not list(tmp_path.iterdir())


def test_states_that_are_none_are_told(plain, tmp_path):
    """The callback refuses a value that is no training state, or that lies on a mesh that was not given."""
    tell = fr.publish(tmp_path / "published", plain, every_steps=1)
    with pytest.raises(TypeError, match="is not a training state"):
        tell(record("step", 1, {"w": torch.ones(2)}))
    with pytest.raises(TypeError, match="did not get a Record"):
        tell(begun())
    several = torch.func.vmap(functools.partial(STEP.init, begun().params))(fr.split(fr.key(0), 2))
    for state in (several, several.state):
        with pytest.raises(TypeError, match="there are several states"):
            tell(record("step", 1, state))
    run = SHARDED.init(begun().params)
    with pytest.raises(TypeError, match="lies on a mesh"):
        tell(record("step", 1, run))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell(record("begin", 0, run))

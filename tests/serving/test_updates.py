"""The updates and the end of a running server: swaps under load, allowed names, SIGTERM, settings, the command."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from programs import serving
from programs.serving import ROOT, Server, is_right, predict, some_request

pytestmark = pytest.mark.xdist_group("serving")


@pytest.fixture
def updates(tmp_path):
    """Return a root with folders `v1` to `v100` of weights and files `d1` to `d9` of deltas. A secret is outside the
    root."""
    root = tmp_path / "updates"
    for n in range(1, 101):
        (root / f"v{n}").mkdir(parents=True)
        (root / f"v{n}" / "version").write_text(str(n))
    for n in range(1, 10):
        (root / f"d{n}").write_text(str(200 + n))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "version").write_text("999")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "empty").mkdir()
    (root / "inner").mkdir()
    (root / "inner" / "version").symlink_to("../../secret/version")
    (root / "file").symlink_to(tmp_path / "secret" / "version")
    (root / "near").symlink_to("v5")
    (root / "whole").symlink_to(root / "v6")
    (root / "row").symlink_to("d7")
    return root


class Load:
    """Clients that send requests without a pause until they are stopped, or until a response closes their
    connection."""

    def __init__(self, server, clients):
        self.answers, self.errors, self.stop = [0] * clients, [], False
        self.versions = [set() for _ in range(clients)]
        self.threads = [threading.Thread(target=self._ask, args=(server, i)) for i in range(clients)]
        self.ready = threading.Barrier(clients + 1)
        [t.start() for t in self.threads]
        self.ready.wait(20)

    def _ask(self, server, i):
        rng, connection = np.random.default_rng(i), server.connect()
        requests = [some_request(rng, bags=2) for _ in range(10)]
        try:
            while not self.stop:
                request = requests[self.answers[i] % 10]
                status, answer = predict(connection, request, binary=i % 2 == 1)
                if status != 200 or not is_right(answer, request):
                    self.errors.append((status, answer))
                if not self.answers[i]:
                    self.ready.wait(20)
                self.answers[i] += 1
                self.versions[i].add(int(answer["version"]))
                # the server announced that it closes the connection
                if connection.sock is None:
                    return
        except Exception as error:
            self.errors.append(error)

    def end(self):
        self.stop = True
        [t.join(20) for t in self.threads]
        assert not any(t.is_alive() for t in self.threads)
        return self.errors


def test_weights_are_swapped_under_load(program, updates):
    """During 100 swaps and 9 deltas with six clients, no request fails. No response mixes two versions."""
    with Server(program, "sums", "--updates", str(updates), "--workers", "2") as server:
        load = Load(server, 6)
        for n in range(1, 101):
            status, _, body = server.ask("POST", "/reload", {"weights": f"v{n}"})
            assert (status, json.loads(body)) == (200, {"version": str(n)})
        for n in range(1, 10):
            assert server.ask("POST", "/delta", {"path": f"d{n}"})[0] == 200
        assert load.end() == []
        assert len(set.union(*load.versions)) > 10
        found = server.metrics()
        assert found['funcrec_reloads_total{what="weights",result="ok"}'] == 100
        assert found['funcrec_reloads_total{what="delta",result="ok"}'] == 9
        assert found['funcrec_version_info{version="209"}'] == 1


OUTSIDE = ["../secret", "link", "/etc", "", ".", "..", "v1/../../secret", "nothing", "empty", "v1\0", "x" * 5000]
# links that lead outside the folder
OUTSIDE += ["inner", "inner/version", "file"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_client_leaves_the_folder_of_updates(program, updates, name):
    """Neither .., an absolute path nor a link leads out of the folder. An update that is refused changes nothing."""
    with Server(program, "sums", "--updates", str(updates)) as server:
        for path, key in [("/reload", "weights"), ("/delta", "path")]:
            status, _, body = server.ask("POST", path, {key: name})
            assert status == 400 and json.loads(body)["error"]["need"]
            assert server.ask("POST", path, {key: name, "more": 1})[0] == 400
            assert server.ask("POST", path, {key: 3})[0] == 400
        assert json.loads(server.ask("GET", "/healthz")[2])["version"] == "0"


def test_links_within_the_folder_of_updates_are_followed(program, updates):
    """A link in the folder to a path inside the folder is accepted, both relative and absolute."""
    with Server(program, "sums", "--updates", str(updates)) as server:
        turn = [("/reload", "weights", "near"), ("/reload", "weights", "whole"), ("/delta", "path", "row")]
        for (path, key, name), version in zip(turn, ("5", "6", "207"), strict=True):
            status, _, body = server.ask("POST", path, {key: name})
            assert (status, json.loads(body)) == (200, {"version": version})


@pytest.fixture
def heard():
    """Restore SIGHUP's default for started processes, even if `nohup` started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_server_has_answered_all(program, number):
    """After a signal under load, every connected client gets its response. The response says that the connection
    closes. No new connection is accepted. Idle connections are closed. The exit status is 0."""
    with Server(program, "sums", "--workers", "2") as server:
        idle, load = server.raw(), Load(server, 12)
        half = server.raw()
        half.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(0.1)
        os.kill(server.process.pid, number)
        time.sleep(0.1)
        with pytest.raises(ConnectionError):
            server.raw()
        half.sendall(b"\r\n")
        answer = half.recv(1000)
        assert b" 503 " in answer and b'"draining"' in answer and b"Connection: close" in answer
        assert (server.ended()[0], idle.recv(10)) == (0, b"")
        assert load.end() == [] and min(load.answers) > 1
        assert not load.stop or all(not t.is_alive() for t in load.threads)


def test_nohup_holds(program, tmp_path):
    """A server started under nohup continues after SIGHUP."""
    under = tmp_path / "under"
    under.write_text(f'#!/bin/sh\ntrap "" HUP\nexec {program} "$@"\n')
    under.chmod(0o755)
    with Server(under, "sums") as server:
        os.kill(server.process.pid, signal.SIGHUP)
        assert [server.ask("GET", "/healthz")[0] for _ in range(20)] == [200] * 20
        assert server.stop() == (0, "")


def test_what_waits_at_the_end_is_answered(program):
    """Requests in the queue at SIGTERM are run, one slow batch after the other."""
    slow = {"ids": {"a": [[901]] * 400, "b": [[]] * 400}, "weights": {"b": [[]] * 400}, "dense": [[0, 0, 0]] * 400}
    body = serving.pack(slow)
    sent = serving.head(body, Content_Type=serving.BYTES)
    with Server(program, "sums", "--drain-s", "0") as server:
        clients = [server.raw() for _ in range(8)]
        [s.sendall(sent + body) for s in clients]
        # at 50 ms each, one request runs and all other requests wait
        while server.metrics()["funcrec_queue_length"] < 6:
            pass
        os.kill(server.process.pid, signal.SIGTERM)
        for s in clients:
            with s:
                answer = b"".join(iter(lambda s=s: s.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 200 ")
        assert server.ended()[0] == 0


WRONG = [
    (["--nothing", "1"], "--nothing"),
    (["--port"], "nothing"),
    (["--port", "65536"], "from 0 to 65535"),
    (["--port", "x"], "a number"),
    (["--max-header", "65537"], "from 256 to 65536"),
    (["--workers", "1.5"], "a whole number"),
    (["--timeout-s", "nan"], "a number from"),
    (["two words=sums"], "letters, digits"),
    (["sums=sums"], "one name and one version"),
    (["--settings", "/nothing"], "one JSON object"),
    (["--settings", {"prot": 1}], "a key prot"),
    (["--settings", {"port": "1"}], "a number"),
    (["--settings", {"host": 1}], "a string"),
    (["--settings", {"queue": 0}], "from 1 to"),
    (["--max-batch", "513"], "at most 512"),
    (["--settings", {"queue": 1.5}], "a whole number"),
    (["--settings", [1]], "one JSON object"),
    (["--checksums", "1"], "true or false"),
    (["--settings", {"checksums": 0}], "true or false"),
    (["--updates", "/nothing", "--admin", "0"], "a folder that is there"),
    (["--updates", "/"], "--admin PORT or --admin PATH"),
    (["--admin", "65536"], "the path of a unix socket"),
    (["--admin", "somewhere:1"], "the path of a unix socket"),
    (["--admin", "::1:1"], "the path of a unix socket"),
    (["--admin", "/folder/"], "the path of a unix socket"),
    (["--admin", "/" + "x" * 200], "the path of a unix socket"),
    (["--admin", "[127.0.0.1]:1"], "the path of a unix socket"),
    (["--host", "nonsense"], "the number of an address"),
    (["--host", "localhost.evil.example"], "the number of an address"),
    (["--host", "[127.0.0.1]"], "the number of an address"),
    (["--host", ""], "the number of an address"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[str(w) for w, _ in WRONG])
def test_wrong_settings_are_refused(program, tmp_path, words, said):
    """An unknown flag or key, or an invalid value, ends the program with got and need."""
    (tmp_path / "s.json").write_text(json.dumps(words[-1]))
    words = [w if isinstance(w, str) else str(tmp_path / "s.json") for w in words]
    out = subprocess.run([program, "sums", *words], capture_output=True, text=True, timeout=10)
    assert out.returncode == 2 and said in out.stderr and "  need  " in out.stderr


@pytest.mark.parametrize(
    "text",
    [
        '{"queue": 1, "port": 0, "queue": 9}',
        '{"queue": 1, "qu\\u0065ue" :1}',
        '{"updates": "a:\\"{", "queue": 1, "queue": 2}',
    ],
)
def test_a_key_twice_in_the_settings_is_refused(program, tmp_path, text):
    """A key that stands twice in a settings file ends the program, which names the key."""
    (tmp_path / "s.json").write_text(text)
    given = [program, "sums", "--settings", str(tmp_path / "s.json")]
    out = subprocess.run(given, capture_output=True, text=True, timeout=10)
    assert out.returncode == 2 and "the key queue twice" in out.stderr and "  need  each key once" in out.stderr


def test_settings_of_a_file(program, tmp_path):
    """A settings file uses the names of the flags. A flag in any position overrides the file. An address in use is
    reported."""
    (tmp_path / "s.json").write_text(json.dumps({"max_body": 10, "port": 1, "workers": 2, "timeout_s": 3}))
    # --port 0 comes before --settings
    with Server(program, "sums", "--settings", str(tmp_path / "s.json")) as server:
        assert server.ask("POST", "/predict", b" " * 11)[0] == 413
        taken = subprocess.run([program, "x", "--port", str(server.port)], capture_output=True, text=True, timeout=10)
        assert taken.returncode == 1 and "cannot listen" in taken.stderr
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def command(*words, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return [sys.executable, "-m", "funcrec", *words], environment


def test_the_command_becomes_the_server(program):
    """`python -m funcrec serve` replaces itself with the server program and the program's arguments. Signals therefore
    reach the program."""
    words, environment = command("serve", "sums", "--port", "0", FUNCREC_SERVE=str(program))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert "serves version 0" in process.stdout.readline()
        assert os.readlink(f"/proc/{process.pid}/exe") == str(program)
        process.terminate()
        assert process.wait(20) == 0


def test_the_command_says_what_to_build(tmp_path):
    """If the program is not built, the error names the command that builds the program."""
    words, environment = command("serve", "sums", FUNCREC_SERVE=str(tmp_path / "nothing"))
    out = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert out.returncode == 2 and "cmake -S kernels -B build/serving" in out.stderr
    out = subprocess.run(command()[0], capture_output=True, text=True, env=environment, timeout=60)
    assert out.returncode == 2 and "serve" in out.stderr and "plan" in out.stderr

"""The rights of clients. Updates have their own address. A request must name this server."""

import json
import socket
import stat

import pytest
from programs.serving import BYTES, ONE, Server, ask, everything, head, predict, statuses

import funcrec as fr

pytestmark = pytest.mark.xdist_group("serving")
BODY = json.dumps(ONE).encode()


@pytest.fixture
def updates(tmp_path):
    folder = tmp_path / "updates"
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "version").write_text("1")
    (folder / "d2").write_text("2")
    return folder


def over(path):
    """Return an open connection to a unix socket."""
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(20)
    s.connect(str(path))
    return s


def test_who_asks_for_predictions_changes_no_weights(program, updates):
    """/reload and /delta get 403 at the address for predictions, whatever their arguments. The address of --admin
    accepts /reload, /delta and all other paths."""
    with Server(program, "sums", "--updates", str(updates)) as server:
        stranger, admin = server.connect(), server.connect(admin=True)
        turn = [("/reload", {"weights": "v1"}, "1"), ("/delta", {"path": "d2"}, "2")]
        for path, body, version in turn:
            before = ask(stranger, "GET", "/healthz")[2]
            for target in (path, f"http://127.0.0.1:{server.admin}{path}"):
                status, _, answer = ask(stranger, "POST", target, body)
                assert status == 403 and "--admin" in json.loads(answer)["error"]["need"]
            assert ask(stranger, "GET", "/healthz")[2] == before
            assert ask(admin, "POST", path, b"x", BYTES)[0] == 415
            status, _, answer = ask(admin, "POST", path, body)
            assert (status, json.loads(answer)) == (200, {"version": version})
        assert predict(admin, ONE)[1]["version"] == "2"
        assert ask(admin, "GET", "/metrics")[0] == 200


def test_updates_need_a_folder(program):
    """A server without a folder of updates accepts no updates at any address."""
    with Server(program, "sums", "--admin", "0") as server:
        assert server.ask("POST", "/reload", {"weights": "x"})[0] == 403
        assert server.ask("POST", "/delta", {"path": "x"})[0] == 403


def test_a_unix_socket_takes_updates(program, updates, tmp_path):
    """`--admin PATH` is a socket that only its owner can use. The server removes the socket at its end. The socket of a
    killed server is replaced. Any other file is not replaced. `fr.update_server` accepts the socket like an address."""
    path = tmp_path / "admin"
    words = ("sums", "--updates", str(updates), "--admin", str(path))
    with Server(program, *words) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with over(path) as s:
            body = b'{"weights": "v1"}'
            s.sendall(head(body, "/reload", Connection="close") + body)
            assert statuses(everything(s)) == [200]
        assert predict(server.connect(), ONE)[1]["version"] == "1"
        with pytest.raises(RuntimeError, match="cannot listen"):
            Server(program, *words)
        server.process.kill()
    assert path.exists()
    with Server(program, *words) as server:
        (updates / "0000000001-step-1-aaaaaa.weights").mkdir()
        (updates / "0000000001-step-1-aaaaaa.weights" / "version").write_text("7")
        assert fr.update_server(f"unix:{path}", updates) == "7"
        with pytest.raises(ConnectionError, match="403"):
            fr.update_server(f"http://127.0.0.1:{server.port}", tmp_path / "updates")
        assert server.stop() == (0, "")
    assert not path.exists()
    with pytest.raises(ConnectionError, match="was not answered"):
        fr.update_server(f"unix:{path}", updates)
    path.write_text("of another")
    with pytest.raises(RuntimeError, match="cannot listen"):
        Server(program, *words)
    assert path.read_text() == "of another"


def test_clients_keep_no_operator_out(program, updates):
    """Updates are accepted while all connections for predictions are in use."""
    with Server(program, "sums", "--updates", str(updates), "--connections", "2") as server:
        taken = [server.raw() for _ in range(4)]
        for s in taken:
            s.sendall(head(b"x" * 9))
        assert server.ask("POST", "/reload", {"weights": "v1"})[0] == 200
        [s.close() for s in taken]


HOSTS = [
    ((), 400),
    (("",), 400),
    (("localhost", "localhost"), 400),
    (("localhost", "evil.example"), 400),
    (("localhost",), 200),
    (("LocalHost.:80",), 200),
    (("127.0.0.1:8080",), 200),
    (("10.1.2.3",), 200),
    (("[::1]:8080",), 200),
    (("[::1]",), 200),
    (("evil.example",), 421),
    (("evil.example:8080",), 421),
    (("localhost.evil.example",), 421),
    (("127.0.0.1.evil.example",), 421),
    (("[evil]",), 421),
    (("localhost:x",), 421),
]


def asked(server, hosts, target="/predict", version=b"1.1", admin=False):
    """Return the statuses of the responses to a request with these Host fields and to a second request."""
    fields = "".join(f"Host: {h}\r\n" for h in hosts).encode()
    sent = head(BODY, target, Host=None).replace(b" HTTP/1.1\r\n", b" HTTP/%s\r\n%s" % (version, fields))
    with server.raw(admin=admin) as s:
        s.sendall(sent + BODY + head(method="GET", path="/healthz", Connection="close"))
        return statuses(everything(s))


@pytest.mark.parametrize(("hosts", "code"), HOSTS, ids=[str(h) for h, _ in HOSTS])
def test_a_request_names_this_host(server, hosts, code):
    """A request of HTTP/1.1 needs exactly one Host field. Otherwise the request gets 400 and nothing after it is read.
    A name that another site may have gets 421."""
    assert asked(server, hosts) == ([400] if code == 400 else [code, 200])


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("localhost", "127.0.0.1"),
        ("LOCALHOST", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_server_listens_at_a_name_or_a_number(program, word, number):
    """`--host localhost` is the loopback address. An IPv6 address may have brackets, as in URLs."""
    with Server(program, "sums", "--host", word) as server:
        assert server.host == number
        assert server.ask("GET", "/healthz")[0] == 200


def test_a_target_names_this_host(server):
    """The server checks the host of an absolute target like Host."""
    assert asked(server, ["localhost"], "http://evil.example/predict") == [421, 200]
    assert asked(server, ["evil.example"], "http://localhost/predict") == [421, 200]
    assert asked(server, ["localhost"], "http://127.0.0.1:1/predict") == [200, 200]
    assert asked(server, [], version=b"1.0") == [200]


def test_names_are_allowed_by_a_list(program, updates):
    """--allowed-hosts lists the names of a server at a proxy. `*` allows any name, even at the address for updates.
    Without the list, a server that listens on more than the loopback address accepts any name there."""
    words = ("sums", "--updates", str(updates), "--allowed-hosts")
    with Server(program, *words, "models.example, b.example") as server:
        for admin in (False, True):
            assert asked(server, ["Models.example:443"], admin=admin) == [200, 200]
            assert asked(server, ["b.example"], admin=admin) == [200, 200]
            assert asked(server, ["a.models.example"], admin=admin) == [421, 200]
    with Server(program, *words, "*") as server:
        assert asked(server, ["any.example"], admin=True) == [200, 200]
    # the server has names that it cannot know
    with Server(program, *words[:3], "--host", "0.0.0.0") as server:
        assert asked(server, ["any.example"]) == [200, 200]
        assert asked(server, ["any.example"], admin=True) == [421, 200]

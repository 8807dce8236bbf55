"""The server from its clients' view: responses, refusals, limits, and slow or broken connections.

The model is the sums model."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from programs import serving
from programs.serving import (
    BYTES,
    ONE,
    Server,
    changed,
    everything,
    head,
    is_right,
    pack,
    predict,
    some_request,
    statuses,
)

pytestmark = pytest.mark.xdist_group("serving")


def test_every_answer_is_its_requests(server):
    """Requests of many clients at once get their own rows, in both forms, with and without bags."""

    def talk(seed):
        rng, connection = np.random.default_rng(seed), server.connect()
        requests = [some_request(rng) for _ in range(60)]
        answers = [predict(connection, r, binary=bool(rng.random() < 0.5)) for r in requests]
        return all(status == 200 and is_right(a, r) for (status, a), r in zip(answers, requests))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(talk, range(8)))


def test_paths_methods_and_types(server):
    """An unknown path gets 404, another method 405, another body type 415. HEAD has the header of GET."""
    assert server.ask("GET", "/nothing")[0] == 404
    status, headers, _ = server.ask("GET", "/predict")
    assert (status, headers["Allow"]) == (405, "POST")
    status, headers, _ = server.ask("POST", "/healthz", b"")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert server.ask("DELETE", "/metrics")[0] == 405
    assert server.ask("POST", "/predict", b"x", "text/plain")[0] == 415
    assert server.ask("POST", "/predict", ONE, "Application/JSON ; charset=utf-8")[0] == 200
    assert server.ask("GET", "/healthz?why")[0] == 200
    assert server.ask("GET", "http://127.0.0.1/healthz?why")[0] == 200
    assert server.ask("POST", "HTTP://localhost:1/predict", ONE)[0] == 200
    assert server.ask("POST", "http://localhost", ONE)[0] == 404
    (status, whole, _), (again, headers, body) = server.ask("GET", "/healthz"), server.ask("HEAD", "/healthz")
    assert (status, again, body) == (200, 200, b"") and headers["Content-Length"] == whole["Content-Length"] != "0"


@pytest.mark.parametrize(
    ("more", "code"),
    [("charset=latin-1", 415), ("Charset=UTF-16", 415), ('a=b; charset="iso-8859-1"', 415), ("charset=", 200),
     ("charset=utf-8; charset=cp1252", 415), ("charset=UTF-8", 200), ('charset="utf-8"', 200),
     ("charset=us-ascii", 200), ("xcharset=latin-1", 200), ("", 200)],
)  # fmt: skip
def test_a_body_of_another_charset_is_refused(server, more, code):
    """A body of JSON in another charset than UTF-8 gets 415, and the answer names the charset."""
    status, _, body = server.ask("POST", "/predict", ONE, f"application/json; {more}")
    assert status == code and (code == 200 or b"of another charset" in body)


def test_bodies_that_are_coded_are_refused(server):
    """A body with a Content-Encoding gets 415, whatever its bytes. The response says that no coding is accepted."""
    body = json.dumps(ONE).encode()
    for coding, code in (("gzip", 415), ("Identity", 200), ("br, gzip", 415)):
        with server.raw() as s:
            s.sendall(head(body, Content_Encoding=coding, Connection="close") + body)
            answer = everything(s)
        assert statuses(answer) == [code]
        assert (b"Accept-Encoding: identity" in answer) == (code == 415)


def test_pipelined_requests_are_answered_in_order(server):
    """Requests sent at once are answered in order. `Connection: close` and HTTP/1.0 close the connection."""
    bodies = [json.dumps(changed(["dense"], [[n, 0, 0]])).encode() for n in range(20)]
    sent = b"".join(head(b) + b for b in bodies[:-1]) + head(bodies[-1], Connection="close") + bodies[-1]
    s = server.raw()
    s.sendall(sent)
    answers = everything(s)
    assert statuses(answers) == [200] * 20
    found = [json.loads(x.split(b"\n")[0])["outputs"]["score"] for x in answers.split(b"\r\n\r\n")[1:]]
    assert found == [[n + 3.0] for n in range(20)]
    s = server.raw()
    s.sendall(head(bodies[0]).replace(b"1.1", b"1.0") + bodies[0])
    assert statuses(everything(s)) == [200]


def test_a_client_may_wait_for_leave(server):
    """Expect: 100-continue gets a 100 before the body is sent, or the refusal."""
    body = json.dumps(ONE).encode()
    s = server.raw()
    s.sendall(head(body, Expect="100-continue", Connection="close"))
    assert s.recv(1000).startswith(b"HTTP/1.1 100 ")
    s.sendall(body)
    assert statuses(everything(s)) == [200]
    for refused, code in [({"Content_Length": 1 << 30}, 413), ({"path": "/x"}, 404), ({"Content_Type": "x/y"}, 415)]:
        s = server.raw()
        s.sendall(head(body, **{"Expect": "100-continue", **refused}))
        assert statuses(everything(s)) == [code]


def test_bodies_in_chunks(server):
    """A chunked body is answered like any other body, with the same limit."""
    body = json.dumps(ONE).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (body[:7], body[7:])) + b"0\r\n\r\n"
    s = server.raw()
    s.sendall(head(Content_Length=None, Transfer_Encoding="chunked", Connection="close") + chunks)
    assert statuses(everything(s)) == [200]


def test_oversize_is_refused(server):
    """A body larger than the limit, announced or chunked, gets 413. A header gets 431. The client gets the status even
    if it keeps sending."""
    body = b" " * ((16 << 20) + 1)
    assert server.ask("POST", "/predict", body)[0] == 413
    s = server.raw()
    s.sendall(head(Content_Length=None, Transfer_Encoding="chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert statuses(everything(s)) == [413]
    s = server.raw()
    s.sendall(head(X="y" * 10_000))
    assert statuses(everything(s)) == [431]


BROKEN = [
    (b"nonsense\r\n\r\n", [400]),
    (b"GET / HTTP/9.9\r\n\r\n", [400]),
    (b"\x16\x03\x01\x00\xa5\x01\x00\x00", [400]),  # TLS
    (head(Content_Length="-1"), [400]),
    (head(Content_Length="1, 2"), [400]),
    # also with a length
    (head(Transfer_Encoding="chunked"), [400]),
    (head(Content_Length=None, Transfer_Encoding="chunked") + b"zz\r\n", [400]),
    (head(b"x" * 9) + b"short", [400]),
    (head()[:-2], [400]),
    (b"", []),
]


@pytest.mark.parametrize(("sent", "codes"), BROKEN)
def test_broken_messages(server, sent, codes):
    """Invalid HTTP, or a message that ends too early, gets 400 and closes the connection. The server stays up."""
    s = server.raw()
    s.sendall(sent)
    s.shutdown(socket.SHUT_WR)
    assert statuses(everything(s)) == codes


def test_half_closed_and_gone_clients(server):
    """A client that closed its sending side gets its response. A client that is gone harms no other client."""
    body = json.dumps(ONE).encode()
    s = server.raw()
    s.sendall(head(body) + body)
    s.shutdown(socket.SHUT_WR)
    assert statuses(everything(s)) == [200]
    for _ in range(20):
        s = server.raw()
        # the connection closes by a reset, not by an end
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        s.sendall(head(body) + body)
        s.close()
    assert predict(server.connect(), ONE)[0] == 200


def test_slow_clients(program):
    """A header or body that is too slow gets 408. Idle connections are closed, and so are those of clients that do not
    read responses. Other clients are served while 60 such connections are open."""
    with Server(program, "sums", "--timeout-s", "0.4", "--idle-s", "0.5") as server:
        slow = [server.raw() for _ in range(60)]
        for s in slow[:20]:
            s.sendall(head()[:-2])
        for s in slow[20:40]:
            s.sendall(head(b"x" * 9) + b"x")
        greedy = server.raw()
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        many = pack({"ids": {f: [[]] * 500 for f in "ab"}, "weights": {"b": [[]] * 500}, "dense": [[0, 0, 0]] * 500})
        # the server closes the connection while it keeps sending requests
        with pytest.raises(ConnectionError):
            greedy.settimeout(3)
            for _ in range(5000):
                greedy.sendall(head(many, Content_Type=BYTES) + many)
        assert predict(server.connect(), ONE)[0] == 200
        assert [statuses(everything(s)) for s in slow] == [[408]] * 40 + [[]] * 20
        assert server.metrics()["funcrec_connections"] == 1


def test_idle_connections_give_way(program):
    """If all connections are in use, a new connection replaces the longest idle connection. That connection must have
    been idle, or inside a request's head, for at least a second. A connection whose body has begun is kept. So is a
    connection that sends requests all the time."""
    with Server(program, "sums", "--connections", "4") as server:
        idle = [server.raw() for _ in range(2)]
        idle[1].sendall(head()[:-2])
        begun, busy = server.raw(), server.connect()
        begun.sendall(head(b"{}") + b"{")
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            assert predict(busy, ONE)[0] == 200
            time.sleep(0.05)
        new = [server.connect() for _ in range(2)]
        for connection in (new[0], busy, new[1], busy):
            assert predict(connection, ONE)[0] == 200
        assert [s.recv(10) for s in idle] == [b"", b""]
        begun.sendall(b"}")
        assert statuses(begun.recv(1000)) == [400]


def test_an_address_has_so_many_connections(program):
    """Connections from one address in excess of --per-address get 429 and are closed. But a new one replaces a
    connection of that address that was idle for a second. Other addresses are accepted."""
    of = lambda server, address: socket.create_connection(("127.0.0.1", server.port), 20, (address, 0))
    with Server(program, "sums", "--per-address", "3") as server:
        begun = [of(server, "127.0.0.2") for _ in range(3)]
        for s in begun:
            s.sendall(head(b"{}") + b"{")
        for _ in range(3):
            assert statuses(everything(of(server, "127.0.0.2"))) == [429]
        assert predict(server.connect(), ONE)[0] == 200
        assert server.metrics()['funcrec_requests_total{code="429"}'] == 3
        begun[0].sendall(b"}")
        # the connection is idle now
        assert statuses(begun[0].recv(1000)) == [400]
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with of(server, "127.0.0.2") as new:
                new.sendall(head(method="GET", path="/healthz", Connection="close"))
                if statuses(new.recv(1000)) == [200]:
                    break
            time.sleep(0.1)
        assert begun[0].recv(10) == b""
        [s.sendall(b"}") for s in begun[1:]]
        assert [statuses(s.recv(1000)) for s in begun[1:]] == [[400]] * 2


def test_a_head_has_less_time_than_a_body(program):
    """A head that takes longer than --head-s gets 408, although a body may take longer."""
    with Server(program, "sums", "--head-s", "0.2", "--timeout-s", "60") as server:
        body, slow = server.raw(), server.raw()
        body.sendall(head(b"{}") + b"{")
        slow.sendall(head()[:-2])
        assert statuses(everything(slow)) == [408]
        body.sendall(b"}")
        assert statuses(body.recv(1000)) == [400]


def test_a_full_queue_is_told(program):
    """Requests that exceed the queue get 429 with Retry-After. Queued requests are answered."""
    slow = changed(["ids", "a"], [[901]])
    with Server(program, "sums", "--queue", "2") as server, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: server.ask("POST", "/predict", slow), range(24)))
        codes = [status for status, _, _ in answers]
        assert set(codes) == {200, 429} and codes.count(200) >= 3
        assert {headers["Retry-After"] for status, headers, _ in answers if status == 429} == {"1"}
        assert server.metrics()['funcrec_requests_total{code="429"}'] == codes.count(429)


def test_neighbours_of_a_failing_request(program):
    """A batch that fails is run again request by request. Only the failing requests get an error."""
    with Server(program, "sums") as server, ThreadPoolExecutor(16) as pool:
        rng = np.random.default_rng(0)
        requests = [changed(["ids", "a"], [[901]]), *(some_request(rng, bags=2) for _ in range(15))]
        for i in (3, 9):
            requests[i]["ids"]["b"][1], requests[i]["weights"]["b"][1] = [5, 900], [1.0, 1.0]

        def go(i):
            time.sleep(0.01 * (i > 0))
            return predict(server.connect(), requests[i], binary=i % 2 == 1)

        answers = list(pool.map(go, range(16)))
        assert [status for status, _ in answers] == [500 if i in (3, 9) else 200 for i in range(16)]
        assert all(is_right(a, r) for (status, a), r in zip(answers, requests) if status == 200)
        assert "an id that fails" in answers[3][1]["error"]["got"]
        assert server.metrics()["funcrec_batches_one_by_one_total"] >= 1


def test_metrics_count_what_happened(program):
    """/metrics counts responses by status, bags and requests per batch, and ids out of range. /metrics also gives the
    version."""
    with Server(program, "sums") as server:
        rng = np.random.default_rng(1)
        requests = [some_request(rng) for _ in range(30)]
        for r in requests:
            assert predict(server.connect(), r)[0] == 200
        server.ask("GET", "/nothing")
        found = server.metrics()
        want = [serving.expected(r)["ids_out_of_range"] for r in requests]
        assert found["funcrec_ids_out_of_range_total"] == sum(want) > 0
        assert found['funcrec_requests_total{code="200"}'] == 30 and found['funcrec_requests_total{code="404"}'] == 1
        assert found["funcrec_batch_bags_sum"] == sum(len(r["dense"]) for r in requests)
        assert found["funcrec_request_seconds_count"] == found["funcrec_batch_requests_sum"] == 30
        assert found['funcrec_batch_bags_bucket{le="+Inf"}'] == found["funcrec_batch_bags_count"]
        assert found['funcrec_version_info{version="0"}'] == 1 and found["funcrec_queue_length"] == 0


def test_memory_is_flat(program):
    """After the first 5,000 requests, 20,000 more requests, good and bad, leave the server's memory unchanged."""
    with Server(program, "sums") as server:
        rng = np.random.default_rng(2)
        bodies = [json.dumps(some_request(rng)).encode() for _ in range(45)] + [b"{", b"[1]", b"{}", b"1", b"null"]
        sent, threads = b"".join(head(b) + b for b in bodies), 2

        def resident():
            with open(f"/proc/{server.process.pid}/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

        def send(count):
            with server.raw() as s:
                for _ in range(count // len(bodies)):
                    s.sendall(sent)
                    got = b""
                    while got.count(b"HTTP/1.1 ") < len(bodies) or not got.endswith(b"\n"):
                        got += s.recv(1 << 16)

        def run(count):
            several = [threading.Thread(target=send, args=(count // threads,)) for _ in range(threads)]
            [t.start() for t in several]
            [t.join() for t in several]
            return resident()

        before, after = run(5000), run(20_000)
        assert server.metrics()['funcrec_requests_total{code="200"}'] == 22_500
        assert after - before < 1024  # KiB

"""Memory for bodies and parsed requests is bounded, and long bodies delay no other client."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from programs.serving import BYTES, ONE, Server, ask, changed, everything, head, pack, predict, statuses

pytestmark = pytest.mark.xdist_group("serving")
TRIES = 2000


def padded(size, request=ONE):
    """Return a request with a body of `size` bytes."""
    return json.dumps(request).encode().ljust(size)


def many_ids(count):
    """Return a body with a bag of `count` ids."""
    return json.dumps(changed(["ids", "a"], [[1] * count])).encode()


def held(server):
    return server.metrics()["funcrec_body_memory_bytes"]


def until(is_so):
    """Wait until the condition is_so() holds."""
    for _ in range(TRIES):
        if is_so():
            return
    pytest.fail("it is never so")


def test_bodies_beyond_the_memory_are_told_to_come_again(program):
    """A body that does not fit into memory next to other bodies gets 503 with Retry-After. The 503 comes before the
    server reads the body, or while the chunks arrive. Accepted bodies are answered. Then there is room again."""
    with Server(program, "sums", "--memory", "6000000", "--max-body", "1000000") as server:
        begun = [server.raw() for _ in range(3)]
        for s in begun:
            s.sendall(head(Content_Length=900_000, Connection="close") + b"{")
        until(lambda: held(server) >= 2_700_000)
        for length in ({"Content_Length": 900_000}, {"Content_Length": None, "Transfer_Encoding": "chunked"}):
            s = server.raw()
            s.sendall(head(**length) + b"%x\r\n" % 900_000 + padded(900_000) + b"\r\n0\r\n\r\n")
            answer = everything(s)
            assert statuses(answer) == [503] and b"Retry-After: 1\r\n" in answer
        assert predict(server.connect(), ONE)[0] == 200
        for s in begun:
            s.sendall(padded(900_000)[1:])
            assert statuses(everything(s)) == [200]
        until(lambda: held(server) == 0)
        assert server.ask("POST", "/predict", padded(900_000))[0] == 200


def test_what_is_parsed_is_of_the_memory(program):
    """Parsed ids may need more memory than there is, although their text fits. The request then gets 503. The
    connection continues. A body larger than the whole memory gets 413."""
    with Server(program, "sums", "--memory", "400000") as server:
        connection = server.connect()
        for _ in range(3):
            status, headers, _ = ask(connection, "POST", "/predict", many_ids(60_000))
            assert (status, headers["Retry-After"]) == (503, "1")
            assert predict(connection, ONE)[0] == 200
        assert held(server) == 0
        assert server.ask("POST", "/predict", pack(changed(["ids", "a"], [[1] * 60_000])), BYTES)[0] == 413
    with Server(program, "sums", "--memory", "4000000") as server:
        assert server.ask("POST", "/predict", many_ids(60_000))[0] == 200


def test_many_long_bodies_take_no_more_than_there_is(program):
    """Thirty clients that send bodies of 4 MiB at once use no more memory than the server's limit. Some requests get
    503. Every request is answered."""
    body = many_ids(1_300_000)

    def peak(server):
        with open(f"/proc/{server.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10

    with Server(program, "sums", "--memory", str(48 << 20)) as server, ThreadPoolExecutor(30) as pool:
        before = peak(server)

        def send(_):
            s = server.raw(60)
            s.sendall(head(body, Connection="close") + body)
            return statuses(everything(s))

        codes = [code for code, *_ in pool.map(send, range(30))]
        assert set(codes) <= {400, 503} and codes.count(400) >= 1 and codes.count(503) >= 1
        assert peak(server) - before < 64 << 20
        until(lambda: held(server) == 0)
        assert predict(server.connect(), ONE)[0] == 200


def test_a_long_body_is_parsed_aside(program):
    """While a long body is parsed, the server answers other requests. Its metrics count the long body as being
    parsed."""
    body, over = b'{"dense": [[%s]]}' % b",".join([b"0.12345678901234"] * 900_000), threading.Event()
    with Server(program, "sums") as server:

        def send():
            while not over.is_set():
                assert server.ask("POST", "/predict", body)[0] == 400

        thread = threading.Thread(target=send)
        thread.start()
        try:
            until(lambda: server.metrics()["funcrec_parsing"] == 1)
        finally:
            over.set()
            thread.join()
        assert server.metrics()["funcrec_parsing"] == 0


def test_answers_of_long_bodies_are_right(program):
    """Bodies that another thread parses, in both forms, have the values of short bodies. So do long responses."""
    bags = [[i % 800] * 40 for i in range(500)]
    request = {"ids": {"a": bags, "b": [[]] * 500}, "weights": {"b": [[]] * 500}, "dense": [[0, 0, 0]] * 500}
    with Server(program, "sums") as server:
        for binary in (False, True):
            status, answer = predict(server.connect(), request, binary)
            assert status == 200 and [float(x) for x in answer["outputs"]["score"]] == [
                40.0 * (i % 800) for i in range(500)
            ]

"""Requests meant to harm other clients: bodies whose end is ambiguous, endless chunk extensions, missing memory."""

import json
import socket

import pytest
from programs.serving import ONE, Server, changed, everything, head, predict, statuses

pytestmark = pytest.mark.xdist_group("serving")
BODY = json.dumps(ONE).encode()
HIDDEN = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("coding", ["gzip", "chunked, gzip", "gzip, chunked", "xchunked", "identity", ""])
def test_a_body_whose_end_is_disputed_ends_the_connection(server, coding):
    """A Transfer-Encoding other than chunked gets 501, with or without a Content-Length. Nothing after the body is read
    as a request, because a proxy may have seen the body end elsewhere."""
    for more in ({"Content_Length": None}, {}):
        s = server.raw()
        s.sendall(head(BODY, Transfer_Encoding=coding, **more) + b"0\r\n\r\n" + BODY + HIDDEN)
        s.shutdown(socket.SHUT_WR)
        # a parser cannot read chunked with a Content-Length
        assert statuses(everything(s)) in ([501], [400])


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, gzip", "xchunked"])
def test_a_body_whose_end_is_disputed_is_not_waited_for(server, coding):
    """The 501 comes while the client has sent no byte of the body, and may still send some."""
    with server.raw() as s:
        s.settimeout(5)  # a body may take 30 s
        s.sendall(head(Content_Length=None, Transfer_Encoding=coding))
        assert s.recv(1 << 16).startswith(b"HTTP/1.1 501 ")


def test_chunks_are_of_http_1_1(server):
    """A chunked message of HTTP/1.0, whose proxies do not know chunks, gets 501."""
    s = server.raw()
    sent = head(Content_Length=None, Transfer_Encoding="chunked", Connection="keep-alive").replace(b"/1.1", b"/1.0")
    s.sendall(sent + b"0\r\n\r\n" + HIDDEN)
    assert statuses(everything(s)) == [501]


LONG = {
    "an extension": b"1;a=" + b"x" * 70_000,
    "extensions": b"1" + b";a=b" * 20_000,
    "a size": b"0" * 70_000,
    "a trailer": b"1\r\n1\r\n0\r\nX: " + b"y" * 70_000,
    "trailers": b"1\r\n1\r\n0\r\n" + b"X: y\r\n" * 12_000,
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_said_about_chunks_has_a_limit(server, name):
    """Chunk extensions and trailers of 64 KiB or more get 431, like a long header. Other clients are served."""
    other = server.connect()
    assert predict(other, ONE)[0] == 200
    s = server.raw()
    s.sendall(head(Content_Length=None, Transfer_Encoding="chunked") + LONG[name])
    answer = everything(s)
    assert statuses(answer) == [431] and b"about chunks" in answer
    assert predict(other, ONE)[0] == 200


def test_no_memory_for_one_body_harms_no_other(program, tmp_path):
    """A body within the server's limit may not fit into memory. Its client then gets an error and the connection ends.
    The server continues, and stops with status 0."""
    small = tmp_path / "small"
    small.write_text(f'#!/bin/sh\nulimit -v 1000000\nexec {program} "$@"\n')
    small.chmod(0o755)
    with Server(small, "sums", "--max-body", "4000000000", "--memory", "9000000000") as server:
        other = server.connect()
        for length in ({"Content_Length": 3_900_000_000}, {"Content_Length": None, "Transfer_Encoding": "chunked"}):
            s = server.raw()
            s.sendall(head(**length) + b"e8754700\r\nx")
            s.shutdown(socket.SHUT_WR)
            assert statuses(everything(s)) == ([503] if length["Content_Length"] else [400])
            assert predict(other, ONE)[0] == 200
        assert server.metrics()["funcrec_connections"] == 2
        other.close()
        assert server.stop() == (0, "")


def test_idle_connections_give_way_where_there_are_no_descriptors(program, tmp_path):
    """If idle connections use up the descriptors of the process, although fewer than the server's limit, a new
    connection waits at most about a second."""
    few = tmp_path / "few"
    few.write_text(f'#!/bin/sh\nulimit -n 40\nexec {program} "$@"\n')
    few.chmod(0o755)
    with Server(few, "sums") as server:
        idle = [server.raw() for _ in range(50)]
        assert predict(server.connect(timeout=8), ONE)[0] == 200
        [s.close() for s in idle]


def test_a_refusal_is_short(server):
    """An error cuts a long value, between two characters."""
    name = "é" * 5000
    status, _, answer = server.ask("POST", "/predict", changed(["ids", name], [[1]]))
    got = json.loads(answer)["error"]["got"]
    assert status == 400 and got == "é" * 500 + " .. of 10000 bytes" and len(answer) < 2000


def test_the_greatest_number_of_32_bits_is_one(server):
    """The server accepts the largest f32 in its short decimal form, which is slightly larger. A number half a step
    larger gets 400."""
    for text, code in (("3.4028235e38", 200), ("-3.4028235677973e38", 200), ("3.4028235677973368e38", 400)):
        assert server.ask("POST", "/predict", json.dumps(ONE).replace("0.5]]}", f"{text}]]}}"))[0] == code

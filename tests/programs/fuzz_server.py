"""Hostile requests to a server built with the address sanitizer:

    PYTHONPATH=tests python -m programs.fuzz_server [--count 100000] [--seed 0] [--program funcrec-serve-sums]

Each connection carries a pipeline of good requests between hostile ones; what comes back is read to the end. Hostile
are requests whose JSON or bytes were changed in some places, cut, or doubled, whose headers lie, and random bytes. A
changed body that is still a request is answered as any other. What must hold: every good request that was sent before
the connection's first broken message is answered right, in its place; neighbours in a batch too (connections run side
by side, and ids that make a batch fail are among the requests); the server is there at the end, has no leak, and the
sanitizer nothing to say.
"""

import argparse
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from programs import serving
from programs.serving import BYTES, JSON, Server, is_right, pack, some_request, unpack

SANITIZERS = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
WORDS = [
    b"null", b"[]", b"{}", b'"', b"1e999", b"-1", b"9" * 40, b"[" * 50, b"\xff\xfe", b"\\u0000", b'"ids":', b"901",
    b"900", b",",
]  # fmt: skip
FIELDS = [
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: 1073741824",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Content-Type: text/html", b"Content-Type:",
    b"Expect: 100-continue",
    b"Connection: upgrade", b"X: " + b"y" * 9000, b": x", b"x", b"\x00: \x00", b"Host: a\r\n b",
]  # fmt: skip
TARGETS = [b"/predict", b"/reload", b"/delta", b"/healthz", b"/metrics", b"/", b"*", b"/%00", b"/predict/.."]
TARGETS += [b"http://x/predict", b"/" + b"z" * 300]
METHODS = [b"POST", b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"post"]


def message(
    body: bytes, kind: str = JSON, target: bytes = b"/predict", method: bytes = b"POST", more: bytes = b""
) -> bytes:
    length = b"" if b"Content-Length" in more or b"chunked" in more else b"Content-Length: %d\r\n" % len(body)
    fields = b"Content-Type: %s\r\n%s%s" % (kind.encode(), length, more and more + b"\r\n")
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, target, fields, body)


def changed(rng, body: bytes) -> bytes:
    """A body with a few changes in it."""
    made = bytearray(body)
    for _ in range(rng.integers(1, 4)):
        i = int(rng.integers(0, len(made) + 1))
        match rng.integers(0, 6):
            case 0:
                made[i : i + 1] = rng.bytes(1)
            case 1:
                made[i:i] = WORDS[rng.integers(len(WORDS))]
            case 2:
                del made[i : i + int(rng.integers(1, 9))]
            case 3:
                made[i : i + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x80", b"\xff" * 7 + b"\x7f"])
            case 4:
                made[i:i] = made[: rng.integers(0, len(made) + 1)]
            case 5:
                del made[i:]
    return bytes(made)


def hostile(rng) -> tuple[bytes, bool]:
    """A request, and whether the connection may end with it."""
    request = some_request(rng)
    kind = [JSON, BYTES][rng.integers(2)]
    body = pack(request) if kind == BYTES else json.dumps(request).encode()
    match rng.integers(0, 10):
        case 0 | 1 | 2 | 3:
            return message(changed(rng, body), kind), False
        case 4:
            if request["ids"]["b"]:
                request["ids"]["b"][0], request["weights"]["b"][0] = [900], [1.0]  # its run fails
            return message(pack(request), BYTES), False
        case 5:
            return message(body, [JSON, BYTES, "text/plain"][rng.integers(3)], TARGETS[rng.integers(3)]), False
        case 6:
            return message(b"", target=TARGETS[rng.integers(len(TARGETS))], method=METHODS[rng.integers(2)]), False
        case 7:
            target, method = TARGETS[rng.integers(len(TARGETS))], METHODS[rng.integers(len(METHODS))]
            return message(body, kind, target, method), True
        case 8:
            return message(body, kind, more=FIELDS[rng.integers(len(FIELDS))]), True
        case _:
            whole = message(body, kind)
            return changed(rng, whole) if rng.random() < 0.7 else rng.bytes(int(rng.integers(1, 400))), True


def answers(data: bytes) -> list[tuple[int, str, bytes]]:
    """(status, type, body) of each answer in what a connection gave; one to HEAD has no body."""
    found = []
    while data.startswith(b"HTTP/1."):
        top, _, rest = data.partition(b"\r\n\r\n")
        status, size = int(top.split()[1]), re.search(rb"Content-Length: (\d+)", top)
        kind = re.search(rb"Content-Type: ([^\r]*)", top)
        size = 0 if size is None or (rest.startswith(b"HTTP/1.") and int(size[1])) else int(size[1])
        found.append((status, kind[1].decode() if kind else "", rest[:size]))
        data = rest[size:]
    assert not data, data[:200]
    return [x for x in found if x[0] != 100]


def converse(server: Server, seed: int, length: int) -> tuple[int, int, list[str]]:
    """One connection: (requests sent, good answers seen, what is wrong)."""
    rng = np.random.default_rng(seed)
    sent, good, wrong, seen = [], {}, [], 0
    for i in range(length):
        if rng.random() < 0.3:
            good[i] = some_request(rng, bags=int(rng.integers(1, 4)))
            sent.append(message(pack(good[i]), BYTES) if rng.random() < 0.5 else message(json.dumps(good[i]).encode()))
            continue
        one, may_end = hostile(rng)
        sent.append(one)
        if may_end:
            break
    received = b""
    try:
        with server.raw(timeout=30) as s:
            s.sendall(b"".join(sent))
            if rng.random() < 0.95:
                s.shutdown(1)
                while part := s.recv(1 << 16):
                    received += part
            else:
                return len(sent), 0, []  # gone without reading
    except ConnectionError:
        return len(sent), 0, [] if may_end else [f"seed {seed}: reset"]
    found = answers(received)
    for i, request in good.items():
        if i >= len(found):
            wrong.append(f"seed {seed}: request {i} of {len(sent)} has no answer")
            break
        status, kind, body = found[i]
        answer = (unpack(body) if kind == BYTES else json.loads(body)) if status == 200 else None
        if answer is None or not is_right(answer, request):
            wrong.append(f"seed {seed}: request {i} is answered {status} {body[:200]!r}")
        seen += 1
    return len(sent), seen, wrong


def run(server: Server, count: int, first: int, clients: int = 4, length: int = 16) -> tuple[int, int, list[str]]:
    """At least `count` requests over connections of up to `length` each: (sent, good answers, what is wrong)."""
    sent = seen = 0
    wrong: list[str] = []
    with ThreadPoolExecutor(clients) as pool:
        while sent < count and len(wrong) < 10:
            seeds = range(first, first := first + 64)
            for a, b, c in pool.map(lambda seed: converse(server, seed, length), seeds):
                sent, seen, wrong = sent + a, seen + b, wrong + c
    return sent, seen, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", type=Path, help="one that was built before")
    options = parser.parse_args()
    begin = time.monotonic()
    program = options.program or serving.build("address,undefined")
    with Server(
        program, "sums", "--workers", "2", "--timeout-s", "2", "--max-body", "100000", env=SANITIZERS
    ) as server:
        sent, seen, wrong = run(server, options.count, options.seed << 32)
        alive = server.ask("GET", "/healthz")[0]
        codes = {k: int(x) for k, x in server.metrics().items() if "requests_total" in k}
        status, errors = server.stop()
    print(f"{sent} requests, {seen} good ones answered right, in {time.monotonic() - begin:.0f} s; {codes}")
    print(*wrong, errors, sep="\n")
    return int(bool(wrong or errors) or (alive, status) != (200, 0))


if __name__ == "__main__":
    sys.exit(main())

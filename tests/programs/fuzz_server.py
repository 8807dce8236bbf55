"""Hostile requests to a server built with the address sanitizer:

    PYTHONPATH=tests python -m programs.fuzz_server [--package] [--count 100000] [--seed 0] [--program PROGRAM]

The model is the sums model (funcrec-serve-sums). With --package it is a package (programs.packages) that funcrec-serve
runs. Its library and its kernels are built with the sanitizer too. torch and the compiled program are not. With
--package, hostile requests also post weights and deltas, both valid and damaged. Versions therefore change during the
good requests.

Each connection sends a pipeline of good requests between hostile requests and reads all answers. A hostile request has
JSON or bytes that were changed, cut or doubled, false headers, chunks with long extensions, or random bytes. If a
changed body is still a valid request, the server answers it as usual. Every good request before the connection's first
broken message must get the right answer, in order. This also holds for requests that share a batch: connections run in
parallel, and some ids make a batch fail. At the end the server still runs without a leak. The sanitizer reports
nothing.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from programs import serving
from programs.serving import BYTES, JSON, Server, is_right, pack, some_request, unpack

SANITIZERS = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
WORDS = [
    b"null", b"[]", b"{}", b'"', b"1e999", b"-1", b"9" * 40, b"[" * 50, b"\xff\xfe", b"\\u0000", b'"ids":', b"901",
    b"900", b",", b'"shape":[-1],', b'"data":[[]],', b'"binary_data_size":9', b'"datatype":"BOOL"', b"12345678901",
]  # fmt: skip
FIELDS = [
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: 1073741824",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Content-Type: text/html", b"Content-Type:",
    b"Expect: 100-continue",
    b"Inference-Header-Content-Length: 0", b"Inference-Header-Content-Length: 99",
    b"Inference-Header-Content-Length: -1",
    b"Host: x", b"Timeout-Ms: 0", b"Timeout-Ms: x",
    b"Connection: upgrade", b"X: " + b"y" * 9000, b": x", b"x", b"\x00: \x00", b"Host: a\r\n b",
]  # fmt: skip
TARGETS = [
    b"/predict",
    b"/reload",
    b"/delta",
    b"/healthz",
    b"/livez",
    b"/readyz",
    b"/manifest",
    b"/metrics",
    b"/",
    b"*",
    b"/%00",
    b"/predict/..",
    b"/rollback",
    b"/models",
    b"/openapi.json",
    b"/v2",
    b"/v2/health/live",
    b"/v2/health/ready",
    b"/v2/models/sums",
    b"/v2/models/sums/ready",
    b"/v2/models/sums/infer",
    b"/v2/models/sums/versions/0/infer",
    b"/models/sums/predict",
    b"/models/sums/versions/0/manifest",
    b"/v2/models/%",
    b"/v2/models/%41%zz/infer",
    b"/models//predict",
    b"/v2/models/sums/versions//infer",
]
TARGETS += [b"http://x/predict", b"http://localhost/predict", b"/" + b"z" * 300]
METHODS = [b"POST", b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"post"]


class Subject(NamedTuple):
    """A server to fuzz: a maker of good requests (rng, bags=None), the bytes of a request, a check of an answer, and
    bodies of updates."""

    request: Callable
    pack: Callable
    is_right: Callable
    updates: tuple[tuple[bytes, bytes], ...] = ()
    weighted: tuple[str, ...] = serving.WEIGHTED  # features whose ids have weights
    model: str = "sums"
    fails: bool = False  # whether id 900 makes a run fail


SUMS = Subject(some_request, pack, is_right, fails=True)


def message(
    body: bytes, kind: str = JSON, target: bytes = b"/predict", method: bytes = b"POST", more: bytes = b""
) -> bytes:
    own = re.search(rb"(^|\n)Content-Length", more) or b"chunked" in more
    length = b"" if own else b"Content-Length: %d\r\n" % len(body)
    fields = b"Host: localhost\r\nContent-Type: %s\r\n%s%s" % (kind.encode(), length, more and more + b"\r\n")
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, target, fields, body)


def inference(rng, request: dict, subject: Subject, damaged: bool = False) -> bytes:
    """Return a request of the Open Inference Protocol, with some tensors as bytes. damaged: with some changes."""
    whole = serving.tensors(request, subject.weighted)
    order = rng.permutation(list(whole)).tolist()
    binary = {n for n in order if rng.random() < 0.5}
    more = [{}, {"id": "x"}, {"parameters": {"binary_data_output": True}}][rng.integers(3)]
    body, size = serving.infer_body({n: whole[n] for n in order}, binary, **more)
    if damaged:
        body = changed(rng, body)
        size += int(rng.choice([0, 0, 0, 1, -1, 8, -8]))
    field = b"Inference-Header-Content-Length: %d" % size if binary else b""
    target = b"/v2/models/%s/infer" % subject.model.encode()
    return message(body, BYTES if binary else JSON, target, more=field)


def changed(rng, body: bytes) -> bytes:
    """Return the body with a few changes."""
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


def in_chunks(rng, body: bytes, kind: str) -> bytes:
    """Return the body split into chunks, some with long or invalid extensions."""
    long = lambda: b"y" * int(rng.integers(1, 90_000))
    words, cut = [b"", b";a", b';a="b"', b";" + long(), rng.bytes(5)], int(rng.integers(1, len(body) + 1))
    chunk = lambda x: b"%x%s\r\n%s\r\n" % (len(x), words[rng.integers(5)] if rng.random() < 0.3 else b"", x)
    behind = [b"", b"X: y\r\n", b"X: " + long() + b"\r\n", b"X: y\r\n" * 9000, rng.bytes(9)][rng.integers(5)]
    coding = [b"chunked", b"Chunked", b"gzip, chunked", b"chunked, gzip", b""][max(0, int(rng.integers(-16, 5)))]
    whole = b"".join(chunk(x) for x in (body[:cut], body[cut:]) if x) + b"0\r\n" + behind + b"\r\n"
    return message(b"", kind, more=b"Transfer-Encoding: " + coding).replace(b"Content-Length: 0\r\n", b"") + whole


def hostile(rng, subject: Subject) -> tuple[bytes, bool]:
    """Return (a hostile request, whether the connection may end with it)."""
    request = subject.request(rng)
    kind = [JSON, BYTES][rng.integers(2)]
    body = subject.pack(request) if kind == BYTES else json.dumps(request).encode()
    if subject.updates and rng.random() < 0.15:
        target, update = subject.updates[rng.integers(len(subject.updates))]
        return message(changed(rng, update) if rng.random() < 0.3 else update, target=target), False
    match rng.integers(-3, 10):
        case -3 | -2 | -1:
            return inference(rng, request, subject, damaged=True), False
        case 0 | 1 | 2 | 3:
            return message(changed(rng, body), kind), False
        case 4:
            if subject.fails and request["ids"]["b"]:
                request["ids"]["b"][0], request["weights"]["b"][0] = [900], [1.0]
            return message(subject.pack(request), BYTES), False
        case 5:
            return message(body, [JSON, BYTES, "text/plain"][rng.integers(3)], TARGETS[rng.integers(3)]), False
        case 6:
            return message(b"", target=TARGETS[rng.integers(len(TARGETS))], method=METHODS[rng.integers(2)]), False
        case 7:
            target, method = TARGETS[rng.integers(len(TARGETS))], METHODS[rng.integers(len(METHODS))]
            return message(body, kind, target, method), True
        case 8 if rng.random() < 0.5:
            return in_chunks(rng, body, kind), True
        case 8:
            return message(body, kind, more=FIELDS[rng.integers(len(FIELDS))]), True
        case _:
            whole = message(body, kind)
            return changed(rng, whole) if rng.random() < 0.7 else rng.bytes(int(rng.integers(1, 400))), True


def answers(data: bytes) -> list[tuple[int, str, bytes]]:
    """Yield (status, type, body) of each answer in a connection's bytes. An answer to HEAD has no body."""
    found = []
    while data.startswith(b"HTTP/1."):
        top, _, rest = data.partition(b"\r\n\r\n")
        status, size = int(top.split()[1]), re.search(rb"\nContent-Length: (\d+)", top)
        kind = re.search(rb"Content-Type: ([^\r]*)", top)
        size = 0 if size is None or (rest.startswith(b"HTTP/1.") and int(size[1])) else int(size[1])
        found.append((status, kind[1].decode() if kind else "", rest[:size]))
        data = rest[size:]
    assert not data, data[:200]
    return [x for x in found if x[0] != 100]


def answer_of(kind: str, body: bytes) -> dict:
    """Return the answer of any of the three forms, as `serving.unpack` does."""
    if kind == BYTES:
        header = json.JSONDecoder().raw_decode(body.decode(errors="replace"))[1] if body[:1] == b"{" else None
        return unpack(body) if header is None else serving.read_inference(body, str(header))
    return serving.read_inference(body, None) if b'"model_name"' in body[:20] else json.loads(body)


def converse(server: Server, subject: Subject, seed: int, length: int) -> tuple[int, int, list[str]]:
    """Return (requests sent, good answers seen, what is wrong) of one connection."""
    rng = np.random.default_rng(seed)
    sent, good, wrong, seen = [], {}, [], 0
    for i in range(length):
        if rng.random() < 0.3:
            good[i] = subject.request(rng, bags=int(rng.integers(1, 4)))
            forms = (
                lambda: message(subject.pack(good[i]), BYTES),  # noqa: B023
                lambda: message(json.dumps(good[i]).encode()),  # noqa: B023
                lambda: inference(rng, good[i], subject),  # noqa: B023
            )
            sent.append(forms[rng.integers(3)]())
            continue
        one, may_end = hostile(rng, subject)
        sent.append(one)
        if may_end:
            break
    received = b""
    try:
        with server.raw(timeout=30, admin=bool(subject.updates) and rng.random() < 0.5) as s:
            s.sendall(b"".join(sent))
            if rng.random() < 0.95:
                s.shutdown(1)
                while part := s.recv(1 << 16):
                    received += part
            else:
                return len(sent), 0, []  # the server closed the connection before it read a request
    except ConnectionError:
        return len(sent), 0, [] if may_end else [f"seed {seed}: reset"]
    found = answers(received)
    for i, request in good.items():
        if i >= len(found):
            wrong.append(f"seed {seed}: request {i} of {len(sent)} has no answer")
            break
        status, kind, body = found[i]
        answer = answer_of(kind, body) if status == 200 else None
        if answer is None or not subject.is_right(answer, request):
            wrong.append(f"seed {seed}: request {i} is answered {status} {body[:200]!r}")
        seen += 1
    return len(sent), seen, wrong


def run(
    server: Server, count: int, first: int, clients: int = 4, length: int = 16, subject: Subject = SUMS
) -> tuple[int, int, list[str]]:
    """Return (requests sent, good answers, what is wrong). At least `count` requests go over connections of up to
    `length` requests each."""
    sent = seen = 0
    wrong: list[str] = []
    with ThreadPoolExecutor(clients) as pool:
        while sent < count and len(wrong) < 10:
            seeds = range(first, first := first + 64)
            for a, b, c in pool.map(lambda seed: converse(server, subject, seed, length), seeds):
                sent, seen, wrong = sent + a, seen + b, wrong + c
    return sent, seen, wrong


def of_package(folder: Path, pool_size: int = 200) -> Subject:
    """Return a subject with a package in folder/model. Next to the package are other weights and a delta, and damaged
    copies of both. Good requests come from a pool, for which Python has the answers of all versions."""
    import torch

    import funcrec as fr
    from funcrec.history import ChangedRows
    from programs import packages

    packages.export(folder / "model")
    fr.save_weights(folder / "next", packages.params(1), version="next")
    package, newer = fr.load_package(folder / "model"), packages.params(2)
    parts = {t: (ChangedRows(torch.arange(20), x[:20], 0, tuple(x.shape)),) for t, x in newer.tables.items()}
    delta, file = fr.Delta(parts, torch.tensor(1)), folder / "third.delta"
    fr.write_delta(file, delta, package, fr.Params({}, newer.dense), version="third")
    updates = [(b"/reload", "weights", name) for name in ("model", "next", "nothing", "third.delta", "..")]
    updates += [(b"/rollback", "version", name) for name in ("first", "next", "third", "")]
    updates += [(b"/delta", "path", name) for name in ("third.delta", "third.delta", "model", "nothing")]
    updates *= 5
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    for i in range(40):
        at = int(rng.integers(0, len(whole) if i % 2 else 400))
        damaged = whole[:at] if i % 4 < 2 else whole[:at] + rng.bytes(3) + whole[at + 3 :]
        (folder / f"{i}.delta").write_bytes(damaged)
        updates.append((b"/delta", "path", f"{i}.delta"))

    batches = [packages.batch(n % 4, seed=n) for n in range(pool_size)]
    plain = [packages.plain(b) for b in batches]
    right: list[dict] = [{} for _ in batches]
    for change in (lambda: None, lambda: package.apply(file), lambda: package.swap(folder / "next")):
        change()
        for batch, own in zip(batches, right, strict=True):
            own[package.version] = {k: x.numpy() for k, x in package(batch).items()}
    found = {json.dumps(p): r for p, r in zip(plain, right, strict=True)}

    def request(rng, bags=None):
        bags = int(rng.integers(0, 4)) if bags is None else bags
        return plain[4 * int(rng.integers(0, pool_size // 4)) + bags]

    def is_right(answer, asked):
        want = found[json.dumps(asked)][answer["version"]]
        near = lambda x, y: np.abs(np.array(x, np.float32).reshape(y.shape) - y).max(initial=0) <= 1e-6
        return set(want) == set(answer["outputs"]) and all(near(answer["outputs"][k], y) for k, y in want.items())

    own_pack = lambda asked: pack(asked, packages.KEYS, ("seen",))
    bodies = tuple((target, json.dumps({key: name}).encode()) for target, key, name in updates)
    return Subject(request, own_pack, is_right, bodies, ("seen",), "model")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", action="store_true", help="behind funcrec-serve, in the place of sums")
    parser.add_argument("--program", type=Path, help="one that was built before")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subject, words = SUMS, ["sums"]
        program = options.program or (sanitized() if options.package else serving.build("address,undefined"))
        if options.package:
            subject, words = of_package(Path(folder)), [f"{folder}/model", "--updates", folder]
        begin = time.monotonic()
        words += ["--workers", "2", "--timeout-s", "2", "--max-body", "100000"]
        with Server(program, *words, env=SANITIZERS) as server:
            sent, seen, wrong = run(server, options.count, options.seed << 32, subject=subject)
            alive = server.ask("GET", "/healthz")[0]
            codes = {k: int(x) for k, x in server.metrics().items() if "_total{" in k}
            status, errors = server.stop()
    print(f"{sent} requests, {seen} good ones answered right, in {time.monotonic() - begin:.0f} s; {codes}")
    print(*wrong, errors, sep="\n")
    return int(bool(wrong or errors) or (alive, status) != (200, 0))


def sanitized() -> Path:
    """Return the folder of funcrec-serve and its kernels, built with the sanitizer."""
    from funcrec.kernels.cpp import _native

    from programs import answers, sanitize

    kernels = sanitize.build("address", _native.level())
    return answers.build("address,undefined", kernels=kernels.parent) / "funcrec-serve"


if __name__ == "__main__":
    sys.exit(main())

"""A server for tests.

A test builds the server, starts it on a free port of the loopback address, asks it in JSON and bytes, and stops it.

Requests are dicts as in JSON: {"ids": {feature: bags}, "weights": {feature: bags}, "dense": rows}. The answers of
`funcrec-serve-sums` (kernels/serving/http/sums.cpp) are known without running it: `expected` computes them.
"""

import contextlib
import http.client
import json
import os
import re
import select
import socket
import struct
import subprocess
from pathlib import Path

import numpy as np

from programs import cmake

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("u1", "i1", "i2", "i4", "i8", "f2", "u2", "f4", "f8", "?")  # number 6 stands for bfloat16 in 16 bits
JSON, BYTES = "application/json", "application/octet-stream"
UPDATES = ("/reload", "/delta", "/rollback")
HEADER = "Inference-Header-Content-Length"
DATATYPES = {
    "UINT8": "u1", "INT8": "i1", "INT16": "i2", "INT32": "i4", "INT64": "i8", "FP16": "f2", "BF16": "u2", "FP32": "f4",
    "FP64": "f8", "BOOL": "?",
}  # fmt: skip
FEATURES, WEIGHTED, COLUMNS, ROWS = ("a", "b"), ("b",), 3, 1000  # features of the sums model

# a request to the sums model
ONE = {"ids": {"a": [[1]], "b": [[2]]}, "weights": {"b": [[0.5]]}, "dense": [[0, 0, 0.5]]}


def build(sanitize: str = "") -> Path:
    """Return the program funcrec-serve-sums, compiled from kernels/serving/http alone if its sources changed."""
    program = "funcrec-serve-sums"
    return cmake.build("http", "kernels/serving/http", sanitize=sanitize, targets=(program,)) / program


class Server:
    """A running server. `stop()` sends SIGTERM and returns (exit status, the server's stderr).

    A server that takes updates has a separate port for them, `admin`. `ask` chooses the port.
    """

    def __init__(self, program: Path, package: Path | str, *words: str, env: dict | None = None):
        own = ["--admin", "0"] if "--updates" in words and "--admin" not in words else []
        command = [str(program), str(package), "--port", "0", *own, *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
        )
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        line = self.process.stdout.readline() if ready else ""
        found = re.search(r"http://([\d.]+|\[[\da-f:]+\]):(\d+) ", line)
        if not found:
            self.process.kill()
            raise RuntimeError(f"the server did not begin: {line}{self.process.communicate()[1]}")
        self.host, self.port = found[1].strip("[]"), int(found[2])
        self.admin = self.port
        if own:
            self.admin = int(re.search(r"http://127\.0\.0\.1:(\d+) ", self.process.stdout.readline())[1])

    def place(self, admin: bool) -> tuple[str, int]:
        return ("127.0.0.1", self.admin) if admin and self.admin != self.port else (self.host, self.port)

    def connect(self, timeout: float = 20, *, admin: bool = False) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.place(admin), timeout=timeout)

    def raw(self, timeout: float = 20, *, admin: bool = False) -> socket.socket:
        return socket.create_connection(self.place(admin), timeout=timeout)

    def ask(self, method: str, path: str, body=None, type: str = JSON):
        """Return (status, headers, body) of a request over a new connection."""
        with contextlib.closing(self.connect(admin=path.endswith(UPDATES))) as connection:
            return ask(connection, method, path, body, type)

    def metrics(self) -> dict[str, float]:
        lines = self.ask("GET", "/metrics")[2].decode().splitlines()
        return {name: float(x) for name, x in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def stop(self, timeout: float = 30) -> tuple[int, str]:
        self.process.terminate()
        return self.ended(timeout)

    def ended(self, timeout: float = 30) -> tuple[int, str]:
        try:
            _, errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def ask(connection, method: str, path: str, body=None, type: str = JSON, **more: str):
    if not isinstance(body, bytes | None):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
    fields = {k.replace("_", "-"): v for k, v in more.items()}
    connection.request(method, path, body, fields | ({"Content-Type": type} if body is not None else {}))
    reply = connection.getresponse()
    return reply.status, reply.headers, reply.read()


def head(body=b"", path="/predict", method="POST", **more):
    """Return the bytes of a request's header, without the fields that are None."""
    fields = {"Host": "127.0.0.1", "Content_Type": JSON, "Content_Length": len(body), **more}
    lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in fields.items() if v is not None)
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()


def everything(s):
    """Return all bytes that the server sends before it closes the connection."""
    with s:
        return b"".join(iter(lambda: s.recv(1 << 16), b""))


def statuses(answer):
    return [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d+)", answer)]


def predict(connection, request: dict, binary: bool = False):
    """Return (status, {"version", "outputs", "ids_out_of_range"} or {"error"}) of a request sent as JSON or as
    bytes."""
    body, kind = (pack(request), BYTES) if binary else (json.dumps(request), JSON)
    status, headers, out = ask(connection, "POST", "/predict", body, kind)
    return status, unpack(out) if headers["Content-Type"] == BYTES else json.loads(out)


def pack(request: dict, features=FEATURES, weighted=WEIGHTED) -> bytes:
    """Return a request encoded as bytes, as kernels/serving/README.md describes."""
    ids = request.get("ids", {})
    bags = [bag for f in features for bag in ids[f]]
    dense = np.asarray(request.get("dense", []), "<f4")
    columns = dense.shape[1] if dense.ndim == 2 else COLUMNS if "dense" in request else 0
    values = np.asarray([i for bag in bags for i in bag], "<i8")
    own = lambda f: request["weights"][f] if f in weighted else [[1.0] * len(bag) for bag in ids[f]]
    weights = np.asarray([w for f in features for bag in own(f) for w in bag] if weighted else [], "<f4")
    count = len(dense) if columns else len(ids[features[0]])
    header = struct.pack("<4sIIIQQ", b"FRQ1", len(features), columns, bool(weighted), count, len(values))
    lengths = np.asarray([len(bag) for bag in bags], "<u4")
    return header + b"".join(x.tobytes() for x in (dense, lengths, values, weights))


def unpack(body: bytes) -> dict:
    """Return a decoded answer of bytes, with arrays in place of lists."""
    magic, outputs, bags, outside, size = struct.unpack_from("<4sIQQQ", body)
    assert magic == b"FRA1"
    at, up = 32, lambda n: -(-n // 8) * 8
    version, at = body[at : at + size].decode(), at + up(size)
    found = {}
    for _ in range(outputs):
        dtype, rank, size = struct.unpack_from("<IIQ", body, at)
        name, at = body[at + 16 : at + 16 + size].decode(), at + 16 + up(size)
        shape, at = (bags, *struct.unpack_from(f"<{rank}Q", body, at)), at + 8 * rank
        array = np.frombuffer(body, "<" + DTYPES[dtype], int(np.prod(shape)), at)
        found[name], at = array.reshape(shape), at + up(array.nbytes)
    assert at == len(body)
    return {"version": version, "outputs": found, "ids_out_of_range": outside}


def tensors(request: dict, weighted=WEIGHTED) -> dict[str, np.ndarray]:
    """Return the tensors of a request in the Open Inference Protocol, by their names."""
    out = {}
    for f, bags in request.get("ids", {}).items():
        out[f"ids.{f}.values"] = np.array([i for bag in bags for i in bag], "<i8")
        out[f"ids.{f}.lengths"] = np.array([len(bag) for bag in bags], "<i4")
        if f in weighted:
            out[f"weights.{f}"] = np.array([w for bag in request["weights"][f] for w in bag], "<f4")
    if "dense" in request:
        out["dense"] = np.array(request["dense"], "<f4").reshape(
            len(request["dense"]), -1 if request["dense"] else COLUMNS
        )
    return out


def infer_body(inputs: dict[str, np.ndarray], binary=(), **more) -> tuple[bytes, int]:
    """Return (the body of an infer request, the bytes of its JSON). binary: the inputs that are bytes after it."""
    codes = {np.dtype(code): name for name, code in DATATYPES.items() if name != "BF16"}
    listed, rest = [], b""
    for name, x in inputs.items():
        one = {"name": name, "datatype": codes[x.dtype], "shape": list(x.shape)}
        if name in binary:
            one["parameters"], rest = {"binary_data_size": x.nbytes}, rest + x.tobytes()
        else:
            one["data"] = x.tolist()
        listed.append(one)
    text = json.dumps({"inputs": listed, **more}).encode()
    return text + rest, len(text)


def read_inference(body: bytes, header: str | None) -> dict:
    """Return an answer to infer as `unpack` does, with the name of the model, the id and the JSON of all else."""
    found = json.loads(body[: int(header)] if header else body)
    rest, outputs = body[int(header) :] if header else b"", {}
    for x in found["outputs"]:
        size = x.get("parameters", {}).get("binary_data_size")
        kind = np.dtype("<" + DATATYPES[x["datatype"]])
        data = np.array(x["data"], kind) if size is None else np.frombuffer(rest[:size], kind)
        outputs[x["name"]] = data.reshape(x["shape"])
        rest = rest[size or 0 :]
    assert rest == b""
    outside = found["parameters"]["ids_out_of_range"]
    own = {"version": found["model_version"], "outputs": outputs, "ids_out_of_range": outside}
    return own | {"model": found["model_name"], "id": found.get("id")}


def infer(connection, request: dict, *, path="/v2/models/sums/infer", binary=(), weighted=WEIGHTED, **more):
    """Return (status, the answer as `predict` has it, or {"error"}) of a request in the Open Inference Protocol."""
    body, size = infer_body(tensors(request, weighted), binary, **more)
    kind, fields = (BYTES, {"Inference_Header_Content_Length": str(size)}) if binary else (JSON, {})
    status, headers, out = ask(connection, "POST", path, body, kind, **fields)
    return status, read_inference(out, headers.get(HEADER)) if status == 200 else json.loads(out)


def some_request(rng, bags: int | None = None, length: int = 4, ids=(-2, 899)) -> dict:
    """Return a request of random bags, some ids outside the tables, and numbers that f32 holds exactly."""
    bags = int(rng.integers(0, 5)) if bags is None else bags
    draw = lambda: [rng.integers(*ids, rng.integers(0, length + 1)).tolist() for _ in range(bags)]
    made = {f: draw() for f in FEATURES}
    if bags and rng.random() < 0.2:
        made["a"][0] = [ROWS, 1 << 40, -(1 << 62)]
    weights = {"b": [(rng.integers(0, 9, len(bag)) / 4).tolist() for bag in made["b"]]}
    return {"ids": made, "weights": weights, "dense": (rng.integers(-9, 9, (bags, COLUMNS)) / 2).tolist()}


def changed(path, value, request=ONE):
    """Return a request with one changed value. The value `...` removes the entry."""
    made = json.loads(json.dumps(request))
    *way, last = path
    place = made
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return made


def expected(request: dict, version: int = 0) -> dict:
    """Return the required answer of the sums model."""
    scores, counts, outside = [], [], 0
    for a, b, w, dense in zip(*request["ids"].values(), request["weights"]["b"], request["dense"], strict=True):
        terms = [(i, i) for i in a] + [(i, 2 * x * i) for i, x in zip(b, w)]
        scores.append(version + sum(dense) + sum(x for i, x in terms if 0 <= i < ROWS))
        outside += sum(not 0 <= i < ROWS for i, _ in terms)
        counts.append([len(terms)] * 2)
    return {"version": str(version), "outputs": {"score": scores, "ids": counts}, "ids_out_of_range": outside}


def is_right(answer: dict, request: dict) -> bool:
    """Return whether an answer belongs to one version alone, never to two."""
    want = expected(request, int(answer["version"]))
    plain = lambda x: x.tolist() if isinstance(x, np.ndarray) else x
    answer = {k: x for k, x in answer.items() if k not in ("model", "id")}  # of the Open Inference Protocol
    return {**answer, "outputs": {k: plain(x) for k, x in answer["outputs"].items()}} == want

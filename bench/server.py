"""Measures funcrec-serve under load, and a server in Python (server_peer.py). Every answer is compared with Python's.

    .venv/bin/python bench/server.py                      # answers per second, p50, p99 at 1, 8, 32, 256 connections
    .venv/bin/python bench/server.py --swaps 100          # weights and deltas exchanged under load
    .venv/bin/python bench/server.py --soak 240           # 240 seconds; memory at the start, middle and end

The package is a DLRM: 26 tables of int8 rows, 13 dense inputs, 0 to 3 ids per feature. The law: no answer fails or is
wrong. Each answer is within 1e-6 of the package's answer in Python, for the version that the answer names. funcrec-load
(kernels/serving/http/load.cpp) makes the load, with one thread. Its requests to /healthz in the same turn show what
load and HTTP can do without a model. It needs `make serving`. On a shared machine compare also the server's processor
time per answer, and not only clock times.
"""

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from measure import digits, record

import funcrec as fr
from funcrec.history import ChangedRows

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "serving"
JSON, BYTES = "application/json", "application/octet-stream"
DIM, NUM_DENSE, NUM_TABLES = 64, 13, 26


class Served:
    """The package, the batches of the requests, and Python's answers to these batches, by version."""

    def __init__(self, folder: Path, rows: int, num_requests: int = 256, num_bags: int = 1):
        self.folder, self.path = folder, folder / "model"
        names = [f"c{t}" for t in range(NUM_TABLES)]
        tables = [fr.TableConfig(n, rows, DIM, initializer=fr.uniform(0.2)) for n in names]
        features = [fr.FeatureConfig(n, table=n) for n in names]
        sizes = {"bottom": (256, DIM), "sizes": (256, 128)}
        self.model = fr.models.dlrm(tables, features, num_dense=NUM_DENSE, **sizes)
        random = torch.Generator().manual_seed(0)
        lengths = torch.randint(0, 4, (num_requests, NUM_TABLES * num_bags), generator=random)
        ids = [torch.randint(rows, (int(n.sum()),), generator=random) for n in lengths]
        batches = [fr.KeyedJaggedTensor.from_lengths(names, v, n) for v, n in zip(ids, lengths, strict=True)]
        dense = torch.randn(num_requests, num_bags, NUM_DENSE, generator=random).mul(64).round().div(64)
        self.batches = [fr.Batch(b, dense=d) for b, d in zip(batches, dense, strict=True)]
        model = self.model
        predict = lambda params, batch: {"click": torch.sigmoid(model.apply(params, batch))}
        fr.export(predict, self.params(0), self.batches[0], self.path, version="A")
        self.right: list[dict[str, torch.Tensor]] = [{} for _ in self.batches]
        self.learn(fr.load_package(self.path))

    def params(self, seed: int) -> fr.Params:
        params = self.model.init(fr.key(seed))
        return fr.Params(fr.quantize(params.tables, "int8"), params.dense)

    def learn(self, package: fr.Package) -> None:
        for batch, right in zip(self.batches, self.right, strict=True):
            right[package.version] = package(batch)["click"]
        some = torch.cat([r[package.version] for r in self.right])
        assert some.unique().numel() > 0.9 * some.numel(), "answers that do not tell requests apart"

    def add_versions(self) -> None:
        """Add version B, a folder of other weights, and C, a delta from A: rows of one table and all dense weights."""
        package, newer = fr.load_package(self.path), self.model.init(fr.key(2))
        fr.save_weights(self.folder / "B", self.params(1), version="B")
        rows = {n: torch.arange(0, x.shape[0], 7)[: None if n == "c3" else 0] for n, x in newer.tables.items()}
        parts = {n: (ChangedRows(rows[n], x[rows[n]], 0, tuple(x.shape)),) for n, x in newer.tables.items()}
        delta, file = fr.Delta(parts, torch.tensor(1)), self.folder / "C.delta"
        fr.write_delta(file, delta, package, fr.Params({}, newer.dense), version="C")
        package.apply(file)
        self.learn(package)
        package.swap(self.folder / "B")
        self.learn(package)

    def requests(self, kind: str, name: str = "") -> Path:
        """Return the path of a file with the requests for funcrec-load and the expected answers."""
        lines = []
        for batch, right in zip(self.batches, self.right, strict=True):
            body = as_bytes(batch) if kind == BYTES else as_json(batch)
            lines.append(asked(200, message("/predict", body, kind), right))
        path = self.folder / (name or "bytes" if kind == BYTES else "json")
        path.write_bytes(b"".join(lines))
        return path


def as_json(batch: fr.Batch) -> bytes:
    return json.dumps({"ids": batch.ids.to_lists(), "dense": batch.dense.tolist()}).encode()


def as_bytes(batch: fr.Batch) -> bytes:
    (bags, columns), ids = batch.dense.shape, batch.ids
    head = struct.pack("<4sIIIQQ", b"FRQ1", len(ids.keys), columns, 0, bags, len(ids.values))
    return head + b"".join(x.numpy().tobytes() for x in (batch.dense, ids.lengths.to(torch.int32), ids.values))


def message(path: str, body: bytes = b"", kind: str = JSON) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def asked(status: int, sent: bytes, right: dict[str, torch.Tensor]) -> bytes:
    """Return one request in the format that funcrec-load reads."""
    text = lambda s: struct.pack("<I", len(s)) + s
    numbers = lambda x: struct.pack(f"<I{x.numel()}f", x.numel(), *x.flatten().tolist())
    answers = b"".join(text(v.encode()) + numbers(x) for v, x in right.items())
    return struct.pack("<I", status) + text(sent) + struct.pack("<I", len(right)) + answers


class Running:
    """A server in a process of its own, on a free port."""

    def __init__(self, *words):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, *map(str, words)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        line = self.process.stdout.readline()
        found = re.search(r":(\d+) serves", line)
        if not found:
            sys.exit(f"server.py: no server began ({line.strip()})")
        self.port, self.name = int(found[1]), line.split(":")[0]
        admin = "--admin" in words and re.search(r":(\d+) takes updates", self.process.stdout.readline())
        self.admin = int(admin[1]) if admin else self.port

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(20)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Return the own memory of the process in MiB, without mapped weights."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return digits(int(next(x.split()[1] for x in lines if x.startswith("RssAnon"))) / 1024)

    def post(self, path: str, body: dict) -> dict:
        import urllib.request

        head = {"Content-Type": JSON}
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin}{path}", json.dumps(body).encode(), head)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)

    def load(self, file: Path, connections: int, seconds: float, reconnect: int = 0) -> dict:
        """Run funcrec-load, and return its figures. `server_us` is the server's processor time per answer."""
        command = [BUILD / "funcrec-load", self.port, file, connections, seconds, reconnect]
        before = self.cpu_s()
        out = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if out.returncode > 1:
            return {"answers": 0, "wrong": 1, "first_wrong": out.stderr.strip()}
        found = json.loads(out.stdout)
        return {**found, "server_us": digits((self.cpu_s() - before) / found["answers"] * 1e6)}


def ours(served: Served, *words) -> Running:
    return Running("-m", "funcrec", "serve", served.path, "--port", 0, "--updates", served.folder, "--admin", 0, *words)


def figures(found: dict) -> dict:
    own = {k: found[k] for k in ("answers", "wrong", "versions", "first_wrong") if found.get(k)}
    if "seconds" not in found:
        return own
    per_s, cpu = found["answers"] / found["seconds"], found["cpu_s"] / found["answers"] * 1e6
    times = {f"{k}_ms": digits(found[k] * 1e3) for k in ("p50", "p99", "max")}
    return {**own, "per_s": digits(per_s), **times, "server_us": found["server_us"], "load_us": digits(cpu)}


def throughput(served: Served, seconds: float, connections: list[int]) -> dict:
    files = {"json": served.requests(JSON), "bytes": served.requests(BYTES)}
    alive = served.folder / "healthz"
    alive.write_bytes(asked(200, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", {}))
    found = {}
    with ours(served) as mine, Running(Path(__file__).with_name("server_peer.py"), served.path) as peer:
        for n in connections:
            found[f"healthz x{n}"] = {"ours": figures(mine.load(alive, n, seconds / 3))}
            for kind, file in files.items():
                each = {"ours": mine, peer.name: peer}
                found[f"{kind} x{n}"] = {name: figures(server.load(file, n, seconds)) for name, server in each.items()}
    return found


TURN = [
    ("/reload", {"weights": "model"}, "A"),
    ("/delta", {"path": "C.delta"}, "C"),
    ("/reload", {"weights": "B"}, "B"),
]


def swaps(served: Served, count: int, connections: int = 16) -> dict:
    """Return the figures of `count` exchanges of weights (A, a delta to C, B, A again).

    Requests of both forms arrive meanwhile.
    """
    served.add_versions()
    found, each_s = {}, 0.1
    with ours(served, "--workers", 2) as server:

        def load(name: str, file: Path) -> None:
            found[name] = server.load(file, connections, 1.5 * each_s * count + 1)

        files = {"json": served.requests(JSON), "bytes": served.requests(BYTES)}
        threads = [threading.Thread(target=load, args=item) for item in files.items()]
        [t.start() for t in threads]
        began = time.monotonic()
        for i in range(count):
            path, body, version = TURN[i % 3]
            assert server.post(path, body) == {"version": version}
            time.sleep(max(0.0, began + each_s * (i + 1) - time.monotonic()))
        alive = all(t.is_alive() for t in threads)
        [t.join() for t in threads]
    under = "all" if alive else "not all: the load ended first"
    own = {name: figures(f) for name, f in found.items()}
    for f in own.values():
        f.pop("server_us", None)  # this figure covers both loads together
    return {"exchanges": count, "under_load": under, **own}


def soak(served: Served, seconds: float, connections: int = 16, parts: int = 12) -> dict:
    """Return the figures of good requests of both forms among wrong requests.

    A new connection follows after every 50 answers. The server's memory is read after each part.
    """
    wrong = [(400, b"{}"), (400, b"["), (400, b'{"ids": 3}'), (400, b'{"ids": {"c0": [["x"]]}}')]
    broken = [asked(status, message("/predict", body), {}) for status, body in wrong]
    broken += [asked(404, message("/nothing", b"{}"), {}), asked(415, message("/predict", b"x", "text/plain"), {})]
    broken += [asked(403, message("/reload", b'{"weights": "nothing"}'), {})]
    mixed = served.folder / "mixed"
    good = [served.requests(JSON).read_bytes(), served.requests(BYTES).read_bytes()]
    mixed.write_bytes(b"".join([good[0], *broken, good[1], *broken]))
    found, memory = [], []
    with ours(served) as server:
        server.load(mixed, connections, min(5.0, seconds / parts), 50)
        memory.append(server.memory_mb())
        for _ in range(parts):
            found.append(server.load(mixed, connections, seconds / parts, 50))
            memory.append(server.memory_mb())
    memory_mb = {"start": memory[0], "middle": memory[parts // 2], "end": memory[-1], "all": memory}
    bad = [{"wrong": f["wrong"], "first_wrong": f["first_wrong"]} for f in found if f["wrong"]]
    return {"answers": sum(f["answers"] for f in found), "bad": bad, "memory_mb": memory_mb}


def build_load() -> None:
    """Build funcrec-load in the folder of `make serving`, which does not build it."""
    find = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if not (BUILD / "CMakeCache.txt").exists():
        sys.exit(f"server.py: nothing is built in {BUILD}\n  try   make serving")
    command = [shutil.which("cmake", path=find) or "cmake", "--build", BUILD, "--target", "funcrec-load"]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env={**os.environ, "PATH": find})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3, help="of each load")
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 8, 32, 256])
    parser.add_argument("--bags", type=int, default=1, help="of a request")
    parser.add_argument("--rows", type=int, default=100_000, help="of a table")
    parser.add_argument("--swaps", type=int, help="exchanges of weights under load")
    parser.add_argument("--soak", type=float, help="seconds")
    options = parser.parse_args()
    build_load()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), options.rows, num_bags=options.bags)
        if options.swaps:
            name, found = "swaps", swaps(served, options.swaps)
        elif options.soak:
            name, found = "soak", soak(served, options.soak)
        else:
            name, found = "throughput", throughput(served, options.seconds, options.connections)
    red = '"wrong": ' in json.dumps({**found, "wrong": found.get("wrong") or None}).replace('"wrong": null', "")
    red = red or found.get("under_load", "all") != "all"
    record(
        "server", {"case": name, "bags": options.bags, "rows": options.rows, "law": "red" if red else "green", **found}
    )
    return int(red)


if __name__ == "__main__":
    sys.exit(main())

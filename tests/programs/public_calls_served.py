"""Good calls of functions that make packages, run packages and keep them fresh: a part of `public_calls`.

Programs are not compiled here. A stand-in returns zeros. All other parts of a package are real.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import torch

import funcrec as fr
from funcrec.serve import _export, _manifest, _weights
from programs.public_values import (
    IDS,
    KEY,
    LOGGED,
    MESH,
    PARAMS,
    SPARSE,
    TABLES,
    Call,
    f32,
    i64,
    loss_fn,
    rows,
    with_signature,
)

VERSION = "1"
BATCH = fr.Batch(IDS, dense=f32(4, 2))
RAW = {"x": [["a"], []], "y": [["b"], ["b"]], "age": [1.0, 2.0], "price": [3.0, 4.0]}
STORED, STORED_FEATURES = (fr.TableConfig("user", 300, 2),), (fr.FeatureConfig("x", table="user"),)
USER_STORE = fr.table_store(STORED, SPARSE, key=KEY)
CACHES = {"users": fr.CacheConfig(USER_STORE, 128, STORED_FEATURES)}
ENCODING = fr.data.fit_encoding(RAW, fr.data.Schema(multivalued=("x", "y"), dense=("age", "price")))


def predict(params, batch):
    return batch.dense.sum(1) + params.dense["b"]


def described(folder: Path) -> Path:
    """Return the folder of a package of PARAMS for batches of BATCH's form."""
    tensors = _weights.named(PARAMS)
    tables = [{"name": n, "param": f"tables[{n!r}]", "rows": len(x), "dim": 4, "bits": 32} for n, x in TABLES.items()]
    features = [{"name": n, "table": None, "rows": 5, "weighted": False} for n in IDS.keys]
    inputs = [("dense", "float32", ["B", 2]), ("values", "int64", ["N"]), ("offsets", "int64", ["F*B+1"])]
    spec = lambda name, dtype, shape: {"name": name, "dtype": dtype, "shape": shape}
    content = {"format": _manifest.FORMAT, "digest": _manifest.BLANK, "funcrec": "0", "torch": torch.__version__,
        "isa": "native", "needs": [], "inputs": [spec(*x) for x in inputs], "params": _weights.signature(tensors),
        "outputs": [spec("output", "float32", ["B"])], "max_batch": 9, "max_ids": 99, "features": features,
        "tables": tables, "files": dict.fromkeys((_manifest.MODEL, _manifest.ENCODING), _manifest.BLANK)}  # fmt: skip
    content["digest"] = _manifest.digest_of(_manifest.text_of(content))
    folder.mkdir()
    (folder / _manifest.MODEL).write_bytes(b"")
    fr.save(folder / _manifest.ENCODING, ENCODING)
    content["files"] = {n: _manifest.sha256_of(folder / n) for n in content["files"]}
    (folder / _manifest.MANIFEST).write_text(_manifest.text_of(content))
    _weights.write_weights(folder, tensors, VERSION)
    return folder


class Program:
    """A stand-in for a compiled program that torch has opened."""

    def __init__(self, path: str, *_):
        self.digest = json.loads((Path(path).resolve().parent / _manifest.MANIFEST).read_text())["digest"]

    def get_metadata(self) -> dict[str, str]:
        return {"funcrec_digest": self.digest}

    def run(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(given[-3].shape[0])]


def instead(fn, patch):
    """Return `fn` with stand-ins for its slow parts."""

    def run(**given):
        with patch:
            return fn(**given)

    return with_signature(fn, run)


class Server(BaseHTTPRequestHandler):
    """A server that always reports the newest weights."""

    version = VERSION

    def do_GET(self):
        text = json.dumps({"version": self.version}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def served_calls(folder) -> list[Call]:
    """Return the calls of all functions of this file."""
    there, published = described(folder / "package"), folder / "published"
    quick = mock.patch.multiple(_export, load_package=mock.DEFAULT, compare=mock.DEFAULT,
        compile_program=lambda program, path, isa, digest: path.write_bytes(b""))  # fmt: skip
    load = instead(fr.load_package, mock.patch.object(torch._C._aoti, "AOTIModelPackageLoader", Program))
    package = load(path=there)
    tell = fr.publish(published, package, every_steps=1)
    tell(fr.loop.Record("step", 0, 1, {}, LOGGED))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Server.version = next(x.stem for x in published.glob("*.weights"))
    changed = {"package": str(there), "params": PARAMS, "version": "2", "since": VERSION}
    file = fr.write_delta(folder / "1.delta", fr.delta(LOGGED), **changed)
    told = {"every_steps": 2, "keep": 3, "servers": ["http://127.0.0.1:9"], "timeout_s": 1.0, "mesh": MESH}
    return rows("",
        export=(instead(fr.export, quick),
            {"predict": predict, "params": PARAMS, "example": BATCH, "path": str(folder / "exported"),
                "encoding": ENCODING, "version": "1", "max_batch": 9, "max_ids": 99, "isa": "portable",
                "overwrite": True}, ("example.label", "example.weight")),
        load_package=(load, {"path": str(there), "threads": 2, "checksums": True}),
        save_weights=(fr.save_weights, {"path": str(folder / "weights"), "params": PARAMS, "version": "2",
            "overwrite": True}),
        write_delta=(fr.write_delta, {"path": str(folder / "2.delta"), "delta": fr.delta(LOGGED), **changed}),
        publish=(fr.publish, {"folder": "published", "package": str(there), **told}),
        file_store=(fr.file_store, {"path": str(folder / "store"), "num_rows": 3, "width": 2, "dtype": torch.float32,
            "durable": True}),
        memory_store=(fr.memory_store, {"num_rows": 3, "width": 2, "dtype": torch.float32}),
        store_read=(fr.memory_store(3, 2).read, {"rows": i64(1, 2)}),
        store_write=(fr.memory_store(3, 2).write, {"rows": i64(1, 2), "records": f32(2, 2)}),
        store_commit=(fr.memory_store(3, 2).commit, {"step": 1}),
        table_store=(fr.table_store, {"configs": STORED, "sparse": SPARSE, "key": KEY, "path": str(folder / "rows"),
            "durable": True}),
        CacheConfig=(fr.CacheConfig, {"store": USER_STORE, "capacity": 128, "features": STORED_FEATURES,
            "policy": "lru"}),
        cached_tables=(fr.cached_tables, {"tables": {"t": TABLES["t"]}, "caches": CACHES, "device": "cpu"}),
        cached_step=(fr.cached_step, {"step": fr.train_step(loss_fn, sparse=SPARSE, admit=False),
            "stores": {"users": USER_STORE}, "depth": 2}),
        update_server=(fr.update_server, {"address": f"http://127.0.0.1:{server.server_port}",
            "folder": str(published), "timeout_s": 1.0}),
    ) + rows("Package",
        call=(package.__call__, {"batch": BATCH}), encode=(package.encode, {"rows": RAW}),
        swap=(package.swap, {"path": str(there), "checksums": True}),
        apply=(with_signature(package.apply, lambda path: load(path=there).apply(path)), {"path": str(file)}),
        follow=(package.follow, {"folder": str(published)}),
    )  # fmt: skip

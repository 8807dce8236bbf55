"""A server in Python, the peer of bench/server.py. It opens the package by `fr.load_package`, and batches requests.

    python bench/server_peer.py FOLDER        # prints its port; uses aiohttp if it is installed, else asyncio's streams

It reads bodies and writes answers as funcrec-serve does (kernels/serving/README.md), for dense inputs and ids without
weights. One thread reads and writes. Another thread runs the model, with one thread of torch.
"""

import asyncio
import json
import struct
import sys

import numpy as np
import torch

import funcrec as fr

BYTES, JSON = "application/octet-stream", "application/json"
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"


def from_json(body: bytes, keys: list[str]):
    """Return (number of bags, dense, lengths [F, bags], values)."""
    request = json.loads(body)
    bags = [bag for k in keys for bag in request["ids"][k]]
    lengths = np.array([len(bag) for bag in bags]).reshape(len(keys), -1)
    values = np.array([i for bag in bags for i in bag], np.int64)
    return lengths.shape[1], np.array(request["dense"], np.float32), lengths, values


def from_bytes(body: bytes, keys: list[str]):
    features, columns, _, bags, ids = struct.unpack_from("<IIIQQ", body, 4)
    at = lambda dtype, n, begin: np.frombuffer(body, dtype, n, begin)
    dense, rest = at("<f4", bags * columns, 32).reshape(bags, columns), 32 + 4 * bags * columns
    lengths = at("<u4", features * bags, rest).reshape(features, bags)
    return bags, dense, lengths, at("<i8", ids, rest + 4 * features * bags)


def to_json(version: str, out: dict[str, torch.Tensor]) -> bytes:
    return json.dumps({"version": version, "outputs": {k: x.tolist() for k, x in out.items()}}).encode()


def to_bytes(version: str, out: dict[str, torch.Tensor]) -> bytes:
    padded = lambda data: data + b"\0" * (-len(data) % 8)
    name = padded(version.encode())
    parts = [struct.pack("<4sIQQQ", b"FRA1", len(out), len(next(iter(out.values()))), 0, len(version)), name]
    for key, x in out.items():
        sizes = struct.pack("<IIQ", 7, x.dim() - 1, len(key)), padded(key.encode())
        parts += [*sizes, struct.pack(f"<{x.dim() - 1}Q", *x.shape[1:]), padded(x.numpy().tobytes())]
    return b"".join(parts)


class Peer:
    def __init__(self, folder: str):
        self.package, self.waiting = fr.load_package(folder), asyncio.Queue()
        self.keys = [f["name"] for f in self.package.manifest["features"]]

    async def predict(self, kind: str, body: bytes) -> bytes:
        done = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait(((from_bytes if kind == BYTES else from_json)(body, self.keys), done))
        version, out = await done
        return (to_bytes if kind == BYTES else to_json)(version, out)

    async def work(self) -> None:
        while True:
            jobs = [await self.waiting.get()]
            jobs += [self.waiting.get_nowait() for _ in range(self.waiting.qsize())]
            version, out = await asyncio.get_running_loop().run_in_executor(None, self.run, [job for job, _ in jobs])
            begin = 0
            for (bags, *_), done in jobs:
                done.set_result((version, {k: x[begin : begin + bags] for k, x in out.items()}))
                begin += bags

    def run(self, jobs):
        """Return the version and the answers of all requests, which run as one batch, key by key."""
        torch.set_num_threads(1)
        dense, lengths = np.concatenate([j[1] for j in jobs]), np.concatenate([j[2] for j in jobs], 1)
        ends = [np.cumsum(j[2].sum(1))[:-1] for j in jobs]
        parts = zip(*(np.split(j[3], e) for j, e in zip(jobs, ends, strict=True)), strict=True)
        values = np.concatenate([x for feature in parts for x in feature])
        flat = torch.from_numpy(lengths.reshape(-1).astype(np.int64))
        ids = fr.KeyedJaggedTensor.from_lengths(self.keys, torch.from_numpy(values), flat)
        return self.package.version, self.package(fr.Batch(ids, dense=torch.from_numpy(dense)))

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak HTTP/1.1 by hand, only as far as bench/server.py needs it."""
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            lines = head.decode().split("\r\n")
            fields = dict(line.split(": ", 1) for line in lines[1:] if line)
            body, kind = await reader.readexactly(int(fields.get("Content-Length", 0))), fields.get("Content-Type", "")
            answer = await self.predict(kind, body) if body else b"{}"
            writer.write(HEAD.format(kind or JSON, len(answer)).encode() + answer)
            await writer.drain()

    async def guarded(self, reader, writer) -> None:
        try:
            await self.talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has gone
            pass
        finally:
            writer.close()

    async def listen(self) -> int:
        """Start the server; return its port."""
        try:
            from aiohttp import web
        except ImportError:
            server = await asyncio.start_server(self.guarded, "127.0.0.1", 0, limit=1 << 24, backlog=1024)
            return server.sockets[0].getsockname()[1]

        async def predict(request):
            kind = request.content_type
            return web.Response(body=await self.predict(kind, await request.read()), content_type=kind)

        async def healthz(request):
            return web.json_response({})

        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post("/predict", predict), web.get("/healthz", healthz)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def serve(self) -> None:
        port = await self.listen()
        name = "aiohttp" if "aiohttp" in sys.modules else "asyncio"
        print(f"{name}: http://127.0.0.1:{port} serves version {self.package.version}", flush=True)
        await self.work()


if __name__ == "__main__":
    asyncio.run(Peer(sys.argv[1]).serve())

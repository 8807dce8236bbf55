"""A run that saves to S3, moto's server, over a link that breaks in the midst of saves, and ends with the same bits.

    pip install "moto[server]" s3fs
    PYTHONPATH=tests python -m programs.broken_link            # prints a line for each break

The link is a proxy that cuts every connection after a number of bytes, also between the parts of a large upload. It
accepts none until it is healed. MOTO_PATH names the folder of these packages if they are not in the environment.
"""

import contextlib
import os
import site
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

ROWS = 1_700_000  # of 16 floats: 109 MB, which s3fs copies in several parts
MODEL = fr.models.lr((fr.TableConfig("item", 40, 1),), (fr.FeatureConfig("item", table="item"),))
DATA = fr.data.random_rows(fr.key(5), {"item": 40}, num_rows=60)
STEP = fr.train_step(MODEL, sparse=fr.optim.adam(0.02), dense=fr.optim.dense(torch.optim.Adam, lr=0.02))


class Link:
    """A proxy to a port of this machine."""

    def __init__(self, port):
        self.port, self.left, self.sent, self.pairs = port, None, 0, []
        self.server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.server.accept()
            if self.left == 0:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self.port))
            self.pairs += [near, far]
            for a, b, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self.carry, args=(a, b, up), daemon=True).start()

    def carry(self, source, sink, up):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.left == 0:
                    break
                if up and self.left is not None:
                    data = data[: self.left]
                    self.left -= len(data)
                sink.sendall(data)
                self.sent += len(data) if up else 0
                if self.left == 0:
                    break
            if self.left != 0:
                sink.shutdown(socket.SHUT_WR)
        if self.left == 0:
            self.pairs += [source, sink]
            self.cut()

    def cut(self):
        """Reset all connections."""
        pairs, self.pairs = self.pairs, []
        for x in pairs:
            with contextlib.suppress(OSError):
                x.shutdown(socket.SHUT_RDWR)
            x.close()


def served():
    """Start moto's server; return its process and port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("MOTO_PATH"), os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(command, env=os.environ | paths, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(300):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1).close()
            return process, port
        time.sleep(0.1)
    raise SystemExit("moto's server does not answer")


def run(name, **how):
    """Train with checkpoints in the store, each with a large tensor beside the state."""
    load = fr.data.loader(DATA, None, 12, key=fr.key(3))
    where = {"checkpoint": f"s3://bucket/{name}", "save_every_steps": 4, "keep": 2, "resume": "auto"}
    return fr.fit(STEP, STEP.init(MODEL.init(fr.key(0))), load, epochs=2, model=MODEL, **where, **how)


def breaks(link):
    """Break the link in saves of ranks' files and of one large file; print what is found after each break."""
    mesh, big = fr.Mesh.emulated(data=2), torch.arange(ROWS * 16, dtype=torch.float32).view(ROWS, 16)
    for kind, own in (("one file", None), ("ranks", mesh)):
        root = f"s3://bucket/{kind.split()[0]}"
        save = lambda step, root=root, own=own: fr.save(root, {"n": step, "w": big + step}, step=step, keep=2, mesh=own)
        before, began = link.sent, time.monotonic()
        save(1)
        whole, took = link.sent - before, time.monotonic() - began
        for share in (0.3, 0.7, 0.999, 1.0):
            link.left, error, began = max(1, int(whole * share) - (200 if share == 1.0 else 0)), None, time.monotonic()
            try:
                save(2)
            except OSError as failed:
                error = failed
            lost = time.monotonic() - began
            link.left = None
            found = fr.load(fr.latest(root))
            assert torch.equal(found["w"], big + found["n"]) and found["n"] in ((1, 2) if error is not None else (2,))
            text = f"{error}".splitlines()[:2] if error is not None else "saved"
            print(f"{kind}: {whole:,} bytes in {took:.1f} s, cut after {share:.1%}: {lost:.1f} s, {text}", flush=True)
            if error is not None:
                assert str(error).startswith("funcrec.save: ") and "\n  need  " in str(error)
        save(3)
        assert fr.load(fr.latest(root))["n"] == 3


def main():
    site.addsitedir(os.environ.get("MOTO_PATH", ""))
    process, port = served()
    try:
        link = Link(port)
        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {"AWS_MAX_ATTEMPTS": "2", "AWS_RETRY_MODE": "standard"}
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{link.server.getsockname()[1]}"
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        want = run("alone")

        def stop(record):
            if record.when == "step" and record.step == 6:
                link.left = 3000  # the save of step 8 needs more

        try:
            run("lost", callbacks=[stop])
            raise SystemExit("the run ended over a broken link")
        except OSError as error:
            print(str(error).splitlines()[0])
        link.left = None
        print("the newest whole checkpoint:", fr.load(fr.latest("s3://bucket/lost"))["position"])
        assert_trees_close(run("lost").state, want.state, rtol=0, atol=0)
        breaks(link)
        left = s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
        print(f"same bits as the uninterrupted run; {len(left)} uploads in parts are left open")
    finally:
        process.kill()


if __name__ == "__main__":
    main()

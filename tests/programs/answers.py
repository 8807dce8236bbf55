"""Open a package in a process without Python, through the program funcrec-answers (kernels/serving/answers.cpp)."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from programs import cmake

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool,
)  # fmt: skip


def build(sanitize: str = "", kernels: Path | None = None, targets: tuple[str, ...] = ("all",)) -> Path:
    """Return the folder of the built library and its programs. The build is the README's command. The build compiles
    only sources that changed.

    sanitize: "address,undefined" or "thread". kernels: a folder of compiled kernels that replace Python's kernels.
    """
    given = ("FUNCREC_SERVING=ON", f"Python_EXECUTABLE={sys.executable}")
    given += (f"FUNCREC_OBJECTS={kernels}",) if kernels else ()
    anew = kernels is not None
    return cmake.build("serving", "kernels", sanitize=sanitize, given=given, anew=anew, targets=targets)


def pages(pid: int) -> bytes:
    """Return the pages of weights.safetensors as process `pid` maps them, including the writes of that process."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        found = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("/weights.safetensors")]
        parts = [(int(begin, 16), int(end, 16)) for begin, end in found]
        return b"".join(os.pread(memory.fileno(), end - begin, begin) for begin, end in parts)


class AnswersError(Exception):
    """An error that C++ threw. failed: whether the server is at fault, and not the caller."""

    def __init__(self, said: str, failed: bool):
        super().__init__(said)
        self.failed = failed


class Answer(NamedTuple):
    outputs: list[Tensor]
    ids_out_of_range: int
    version: str


class Answers:
    """A package that a separate process has open. As a context manager it ends the process."""

    def __init__(self, program: Path, folder: Path | str, threads: int = 1, runners: int = 1, checksums: int = 0):
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [str(program), str(folder), str(threads), str(runners), str(checksums)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ)
        try:
            self._status()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> int:
        """Return the exit status of the process, after its end."""
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(20)

    def run(self, bags: int, dense, values, offsets, weights=None) -> Answer:
        """Return the result of `package->run`: tensors, and None for each missing tensor."""
        parts = ((dense, "f"), (values, "q"), (offsets, "q"), (weights, "f"))
        lists = [([] if x is None else x.reshape(-1).tolist(), code) for x, code in parts]
        packed = b"".join(struct.pack(f"<q{len(xs)}{code}", len(xs), *xs) for xs, code in lists)
        self._send(b"r" + struct.pack("<q", bags) + packed)
        outside, version = self._number(), self._bytes().decode()
        return Answer([self._tensor() for _ in range(self._number())], outside, version)

    def swap(self, folder: Path | str) -> None:
        self._name(b"s", folder)

    def open(self, folder: Path | str) -> None:
        """Close the package and open the package of this folder."""
        self._name(b"o", folder)

    def apply(self, file: Path | str) -> None:
        self._name(b"a", file)

    def weights(self) -> bytes:
        """Return the pages of weights.safetensors as the package's process maps them."""
        return pages(self.process.pid)

    def _name(self, command: bytes, path: Path | str) -> None:
        name = os.fsencode(path)
        self._send(command + struct.pack("<q", len(name)) + name)

    def _send(self, message: bytes) -> None:
        self.process.stdin.write(message)
        self.process.stdin.flush()
        self._status()

    def _status(self) -> None:
        if status := self._number():
            raise AnswersError(self._bytes().decode(errors="replace"), status == 2)

    def _number(self) -> int:
        got = self.process.stdout.read(8)
        if len(got) < 8:
            raise RuntimeError(f"funcrec-answers ended with {self.process.wait(20)}")
        return struct.unpack("<q", got)[0]

    def _bytes(self) -> bytes:
        return self.process.stdout.read(self._number())

    def _tensor(self) -> Tensor:
        dtype, dims = DTYPES[self._number()], self._number()
        shape = struct.unpack(f"<{dims}q", self.process.stdout.read(8 * dims))
        data = self._bytes()
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)

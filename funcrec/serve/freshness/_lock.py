"""Allows one publisher per folder: each of two would take the other for a killed one, and remove its files.

.publisher    names the publisher and its manifest; locked while it lives, so the lock ends when it is killed
"""

import fcntl
import json
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from funcrec.core import fail
from funcrec.serve.freshness._published import pieces

FILE = ".publisher"
TOKEN = secrets.token_hex(8)  # two machines may have processes with the same number
MOST = 1 << 16  # bytes of the file that are read


class Hold:
    """A folder's publisher. `keep` takes the folder, or checks that it is still its own; else it raises.

    Within one process the newest publisher owns the folder: a restarted one continues, and the old one is refused from
    then on.
    """

    def __init__(self, call: str, folder: Path, run: str, digest: str):
        self.call, self.folder, self.run, self.digest = call, folder, run, digest
        self.fd: int | None = None
        self.close: Callable[[], None] = lambda: None
        HOLDS.add(self)

    def keep(self) -> None:
        try:
            if self.fd is None or not is_at(self.fd, self.folder / FILE):
                self.take()
                return
            lock(self.fd)  # an older publisher of this process that had it may be gone
            owner = read(self.fd)
        except OSError as error:
            got, need = error.strerror or str(error), "a folder to write to, whose files can be locked"
            fail(self.call, f"`{self.folder}` cannot be held.", got=got, need=need, kind=type(error))
        if (owner.get("process"), owner.get("run")) != (this_process(), self.run):
            self.refuse(owner)

    def take(self) -> None:
        """Take the folder with a new open file, which is closed, and so unlocked, when this object is collected."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, self.fd)
        try:
            is_locked, owner = lock(self.fd), read(self.fd)
            if not is_locked and owner.get("process") != this_process():
                self.refuse(owner)
            if owner.get("manifest", self.digest) != self.digest and pieces(self.folder):
                got, hint = f"manifest {owner['manifest']}", "another folder for another package"
                fail(self.call, f"`{self.folder}` is of another package.", got=got, need=self.digest, hint=hint)
            who = f"process {os.getpid()} of {socket.gethostname()}, run {self.run}"
            write(self.fd, {"who": who, "process": this_process(), "run": self.run, "manifest": self.digest})
        except BaseException:
            self.close()
            self.fd = None
            raise

    def refuse(self, owner: Mapping[str, str]) -> None:
        got, hint = owner.get("who", "another process"), "another folder, or an end to that process"
        what = f"`{self.folder}` has another publisher."
        fail(self.call, what, got=got, need="one publisher of a folder", hint=hint)


def let_go() -> None:
    """Release the locks in a forked process.

    It inherits its parent's open files, and with them the lock: it would hold the folder of a parent that was killed.
    """
    for hold in list(HOLDS):
        hold.close()
        hold.fd = None


HOLDS: weakref.WeakSet[Hold] = weakref.WeakSet()
os.register_at_fork(after_in_child=let_go)


def this_process() -> str:
    return f"{TOKEN}-{os.getpid()}"  # the process id tells a forked process from its parent


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at the path, so nobody removed the folder."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read(fd: int) -> dict[str, str]:
    """The file's content; {} if it is half written."""
    try:
        found = json.loads(os.pread(fd, MOST, 0))
    except (ValueError, RecursionError):
        return {}
    is_form = isinstance(found, dict) and all(isinstance(x, str) for x in found.values())
    return found if is_form else {}


def write(fd: int, content: dict[str, str]) -> None:
    data = json.dumps(content).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)

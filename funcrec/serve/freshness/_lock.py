"""A lock that allows one publisher for each folder. Two publishers would each delete the other's files as leftovers.

.publisher    names the publisher and its manifest. It is locked while the publisher lives, so its end frees the folder.
"""

import fcntl
import json
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from funcrec.core import fail
from funcrec.files import Url
from funcrec.serve.freshness._published import pieces

FILE = ".publisher"
TOKEN = secrets.token_hex(8)  # two machines may give their processes the same number
MOST = 1 << 16  # bytes of the file that are read


class Hold:
    """The publisher of a folder. `keep` takes the folder, or raises if another publisher has it.

    Within one process the newest publisher owns the folder. A restarted publisher continues, and from then on the old
    publisher is refused.
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
            lock(self.fd)  # an older publisher of this process may have left
            owner = read(self.fd)
        except OSError as error:
            got, need = error.strerror or str(error), "a folder to write to, whose files can be locked"
            fail(self.call, f"`{self.folder}` cannot be held.", got=got, need=need, kind=type(error))
        if (owner.get("process"), owner.get("run")) != (this_process(), self.run):
            refuse(self, owner)

    def take(self) -> None:
        """Take the folder with a new open file. When this object is collected, the file is closed and unlocked."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, self.fd)
        try:
            is_locked, owner = lock(self.fd), read(self.fd)
            if not is_locked and owner.get("process") != this_process():
                refuse(self, owner)
            if owner.get("manifest", self.digest) != self.digest and pieces(self.folder):
                fail_of_other(self, owner)
            write(self.fd, content_of(self))
        except BaseException:
            self.close()
            self.fd = None
            raise


class UrlHold:
    """The publisher of a folder in a store, which has no locks: the newest publisher owns it, and others are refused.

    An older publisher notices at its next publication. What it writes until then, the next publication removes.
    """

    def __init__(self, call: str, folder: Url, run: str, digest: str):
        self.call, self.folder, self.run, self.digest, self.is_taken = call, folder, run, digest, False

    def keep(self) -> None:
        owner = form_of((self.folder / FILE).read_bytes()) if (self.folder / FILE).exists() else {}
        if self.is_taken and owner.get("run") != self.run:
            refuse(self, owner)
        if not self.is_taken and owner.get("manifest", self.digest) != self.digest and pieces(self.folder):
            fail_of_other(self, owner)
        if not self.is_taken:
            (self.folder / FILE).write_bytes(json.dumps(content_of(self)).encode())
            self.is_taken = True


def refuse(hold: "Hold | UrlHold", owner: Mapping[str, str]) -> NoReturn:
    got, hint = owner.get("who", "another process"), "another folder, or an end to that process"
    what = f"`{hold.folder}` has another publisher."
    fail(hold.call, what, got=got, need="one publisher of a folder", hint=hint)


def fail_of_other(hold: "Hold | UrlHold", owner: Mapping[str, str]) -> NoReturn:
    got, hint = f"manifest {owner['manifest']}", "another folder for another package"
    fail(hold.call, f"`{hold.folder}` is of another package.", got=got, need=hold.digest, hint=hint)


def content_of(hold: "Hold | UrlHold") -> dict[str, str]:
    who = f"process {os.getpid()} of {socket.gethostname()}, run {hold.run}"
    return {"who": who, "process": this_process(), "run": hold.run, "manifest": hold.digest}


def let_go() -> None:
    """Release the locks in a forked process.

    A forked process inherits the open files of its parent, and with them the lock. If the parent were killed, the
    forked process would still hold the folder.
    """
    for hold in list(HOLDS):
        hold.close()
        hold.fd = None


HOLDS: weakref.WeakSet[Hold] = weakref.WeakSet()
os.register_at_fork(after_in_child=let_go)


def this_process() -> str:
    return f"{TOKEN}-{os.getpid()}"  # a forked process has another id than its parent


def is_at(fd: int, path: Path) -> bool:
    """Return whether the open file is still the file at the path. The folder may have been removed."""
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
    """Return the content of the file; {} if it is half written."""
    return form_of(os.pread(fd, MOST, 0))


def form_of(data: bytes) -> dict[str, str]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    is_form = isinstance(found, dict) and all(isinstance(x, str) for x in found.values())
    return found if is_form else {}


def write(fd: int, content: dict[str, str]) -> None:
    data = json.dumps(content).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)

"""A lock that allows one publisher for each folder. Two publishers would each delete the other's files as leftovers.

.publisher    names the publisher and its manifest. It is locked while the publisher lives, so its end frees the folder.
"""

import contextlib
import json
import os
import socket
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from funcrec.core import fail
from funcrec.files import Url, closed_by_fork, form_of, is_at, lock, read_form, this_process, write_form
from funcrec.serve.freshness._published import claim_name, claim_of, piece_of, pieces

FILE = ".publisher"


class Hold:
    """The publisher of a folder. `keep` takes the folder, or raises if another publisher has it.

    Within one process the newest publisher owns the folder. A restarted publisher continues, and from then on the old
    publisher is refused.
    """

    def __init__(self, call: str, folder: Path, run: str, digest: str):
        self.call, self.folder, self.run, self.digest = call, folder, run, digest
        self.fd: int | None = None
        self.close: Callable[[], None] = lambda: None
        closed_by_fork(self)

    def keep(self) -> None:
        try:
            if self.fd is None or not is_at(self.fd, self.folder / FILE):
                self.take()
                return
            lock(self.fd)  # an older publisher of this process may have left
            owner = read_form(self.fd)
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
            is_locked, owner = lock(self.fd), read_form(self.fd)
            if not is_locked and owner.get("process") != this_process():
                refuse(self, owner)
            if owner.get("manifest", self.digest) != self.digest and pieces(self.folder):
                fail_of_other(self, owner)
            write_form(self.fd, content_of(self))
        except BaseException:
            self.close()
            self.fd = None
            raise

    def next_number(self) -> int:
        """Return the number of the next publication. The lock keeps other publishers away."""
        found = pieces(self.folder)
        return found[-1].number + 1 if found else 0

    def used(self) -> None:
        """Do nothing: a published number is seen in the folder."""


class UrlHold:
    """The publisher of a folder in a store, which has no locks: it claims the number of each publication.

    .publisher-0000000012 names the publisher of number 12. Of several publishers, only one can create this object: it
    owns the folder until another publisher creates the next one. So an older publisher is refused before it publishes.
    """

    def __init__(self, call: str, folder: Url, run: str, digest: str):
        self.call, self.folder, self.run, self.digest = call, folder, run, digest
        self.number, self.is_free = -1, False  # the newest claim, and whether it is not yet published

    def keep(self) -> None:
        names = [x.name for x in self.folder.iterdir()] if self.folder.is_dir() else []
        claims = [n for n in map(claim_of, names) if n >= 0]
        newest = max([*claims, *(p.number for p in map(piece_of, names) if p is not None)], default=-1)
        if self.number < 0:
            owner = self.owner(newest) if newest in claims else {}
            if owner.get("manifest", self.digest) != self.digest and pieces(self.folder):
                fail_of_other(self, owner)
            self.claim(newest + 1)
        elif newest != self.number:
            refuse(self, self.owner(newest) if newest in claims else {})

    def next_number(self) -> int:
        """Return the number of the next publication, which no other publisher can have."""
        if not self.is_free:
            self.claim(self.number + 1)
        return self.number

    def used(self) -> None:
        """Record that the number is published."""
        self.is_free = False

    def claim(self, number: int) -> None:
        content = content_of(self)
        if not (self.folder / claim_name(number)).create(json.dumps(content).encode()):
            owner = self.owner(number)
            if owner != content:  # otherwise it is this claim, whose answer was lost
                refuse(self, owner)
        self.number, self.is_free = number, True

    def owner(self, number: int) -> dict[str, str]:
        with contextlib.suppress(FileNotFoundError):
            return form_of((self.folder / claim_name(number)).read_bytes())
        return {}


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

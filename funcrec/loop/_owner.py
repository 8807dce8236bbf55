"""The run that keeps checkpoints in a folder: one at a time, so that no run removes what another one wrote.

    folder/.run    names the run. On a disk with locks it is locked while the run lives, and a second run is refused.

In a store, and on a disk without locks, nobody can see whether a run lives: there the newer run claims the folder by
its name in .run, and the older run raises before its next checkpoint. Neither removes what the other one wrote:
a run lists what it would remove, looks whether the folder is still its own, and only then removes.
"""

import contextlib
import json
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from funcrec.checkpoint import latest
from funcrec.core import fail, sure
from funcrec.files import WITHOUT, closed_by_fork, form_of, is_at, lock, raise_os, read_form, write_form
from funcrec.mesh import Mesh, Ranks, together

CALL, FILE = "funcrec.fit", ".run"


class Owner:
    """A run, and the folder in which it keeps checkpoints: a Path, a Url, or None for a run that keeps none.

    `hold` raises if a living run has the folder, and writes nothing. `claim` takes the folder. `check` raises if a
    newer run has claimed it. All ranks call these three, and the first rank does their work. `owns` returns whether the
    folder is this run's, on the first rank.
    """

    def __init__(self, folder: Any, mesh: Mesh | None):
        self.folder, self.mesh, self.token = folder, mesh, secrets.token_hex(8)
        self.newest: Any = None  # the newest checkpoint when the run began
        self.fd: int | None = None
        self.close: Callable[[], None] = lambda: None
        closed_by_fork(self)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        try:
            self._on_first("hold the folder", self._look)
            yield
        finally:
            self._release()

    def claim(self) -> None:
        self._on_first("claim the folder", self._claim_unchanged)

    def check(self) -> None:
        self._on_first("write a checkpoint", self._check)

    def owns(self) -> bool:
        return (self._read() or {}).get("token") == self.token

    def _on_first(self, doing: str, work: Callable[[], None]) -> None:
        if self.folder is not None:
            ranks = Ranks.of(self.mesh)
            together(ranks, CALL, doing, lambda: work() if ranks.is_first else None)

    def _look(self) -> None:
        try:
            is_taken = isinstance(self.folder, Path) and (self.folder / FILE).exists()
        except OSError as error:
            self._refused(error)
        if is_taken:
            with contextlib.suppress(OSError):  # a folder that only others write to: its `claim` raises
                self._open(0)
        self.newest = latest(self.folder)

    def _claim_unchanged(self) -> None:
        self._claim()
        if (now := latest(self.folder)) != self.newest:
            what, need = f"another run wrote to `{self.folder}` meanwhile.", f"{self.newest}, as when this run began"
            fail(CALL, what, got=f"{now}", need=need, hint="the same call again, or another folder")

    def _claim(self) -> None:
        content = {"who": f"process {os.getpid()} of {socket.gethostname()}", "token": self.token}
        if not isinstance(self.folder, Path):
            (self.folder / FILE).write_bytes(json.dumps(content).encode())
            return
        try:
            self.folder.mkdir(exist_ok=True)
            if self.fd is None or not is_at(self.fd, self.folder / FILE):
                self._release()
                self._open(os.O_CREAT)
            write_form(sure(self.fd), content)
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> NoReturn:
        raise_os(CALL, error, f"`{self.folder}` cannot be held.", "a folder to write to", "another folder")

    def _check(self) -> None:
        found = self._read()
        if found is None:  # somebody has removed the folder
            self._claim()
        elif found.get("token") != self.token:
            what, need = f"`{self.folder}` was taken by a newer run.", "one run at a time in a folder"
            hint = "another folder; resume=True goes on with what is there"
            fail(CALL, what, got=found.get("who", "another process"), need=need, hint=hint)

    def _read(self) -> dict[str, str] | None:
        """Return what the file says; {} if it is half written, and None if it is not there."""
        try:
            return form_of((self.folder / FILE).read_bytes())
        except FileNotFoundError:
            return None

    def _open(self, flags: int) -> None:
        """Open and lock the file of the folder."""
        self.fd = os.open(self.folder / FILE, os.O_RDWR | flags, 0o666)
        self.close = weakref.finalize(self, os.close, self.fd)
        try:
            is_locked = lock(self.fd)
        except OSError as error:
            if error.errno not in WITHOUT:
                raise
            is_locked = True  # the newer run then has the folder
        if not is_locked:
            owner = read_form(self.fd)
            self._release()
            refuse(self.folder, owner)

    def _release(self) -> None:
        self.close()
        self.fd = None


def refuse(folder: Path, owner: Mapping[str, str]) -> NoReturn:
    what, need = f"`{folder}` is the folder of a run that goes on.", "a folder for each run that keeps checkpoints"
    got, hint = owner.get("who", "another process"), "another folder, or an end to that process"
    fail(CALL, what, got=got, need=need, hint=hint)

"""Files by descriptor: what is read of a folder is of the one that was opened, whatever its path names later.

read_folder(path, read) = read(Folder(path))          again, where the path named another folder before it was read
"""

import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TRIES = 3


class OpenFile:
    """A file that is read, and is closed when nothing holds this. path: as errors call it."""

    def __init__(self, path: Path, fd: int):
        self.path, self.fd = path, fd
        weakref.finalize(self, os.close, fd)

    @property
    def own_path(self) -> Path:
        """One that leads to this file, in this process, while it is open."""
        way = Path(f"/proc/self/fd/{self.fd}")
        return way if way.exists() else self.path

    def size(self) -> int:
        """In bytes; -1 of what is no file."""
        about = os.fstat(self.fd)
        return about.st_size if stat.S_ISREG(about.st_mode) else -1

    def text(self) -> str:
        with open(os.dup(self.fd), encoding="utf-8") as file:
            file.seek(0)
            return file.read()


class Folder:
    """A folder that is open. One that cannot be opened raises why when it is read."""

    def __init__(self, path: Path):
        self.path, self.error = path, None
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, self.fd)
        except OSError as error:
            self.error = error

    def open(self, name: str) -> OpenFile:
        path, error = self.path / name, self.error
        if error is None:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self.fd)  # no pipe is waited for
                return OpenFile(path, fd)
            except OSError as own:
                error = own
        raise OSError(error.errno, error.strerror, str(path))

    def has(self, name: str) -> bool:
        return self.error is None and os.access(name, os.F_OK, dir_fd=self.fd)

    def is_current(self) -> bool:
        """Whether its path names it."""
        try:
            return self.error is not None or os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except OSError:
            return False


def read_folder(path: str | os.PathLike, read: Callable[[Folder], T]) -> T:
    """What `read` makes of the folder at a path. Where that fails because the path named a different folder meanwhile,
    who may have removed what it held, it is tried with the one that is there now."""
    tries = TRIES
    while True:
        folder = Folder(Path(os.path.realpath(path)))
        try:
            return read(folder)
        except (OSError, ValueError):
            if tries == 0 or folder.is_current():
                raise
            tries -= 1

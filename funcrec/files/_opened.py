"""Opens files by descriptor: all reads use the folder that was opened, even if its path names another one later.

read_folder(path, read) = read(Folder(path))          repeated if the path named another folder before it was read
"""

import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from funcrec.files._urls import reason

T = TypeVar("T")
TRIES = 3


class OpenFile:
    """A file open for reading, closed when nothing holds this object. path: its name in errors."""

    def __init__(self, path: Path, fd: int):
        self.path, self.fd = path, fd
        weakref.finalize(self, os.close, fd)

    @property
    def own_path(self) -> Path:
        """Return a path that leads to this open file, in this process."""
        way = Path(f"/proc/self/fd/{self.fd}")
        return way if way.exists() else self.path

    def size(self) -> int:
        """Return the size in bytes; -1 if it is not a regular file."""
        about = os.fstat(self.fd)
        return about.st_size if stat.S_ISREG(about.st_mode) else -1

    def read(self, at: int, count: int) -> bytes:
        return os.pread(self.fd, count, at)

    def text(self) -> str:
        with open(os.dup(self.fd), encoding="utf-8") as file:
            file.seek(0)
            return file.read()


class Folder:
    """An open folder. If it cannot be opened, reading it raises the reason."""

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
                fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self.fd)  # does not wait for a pipe
                return OpenFile(path, fd)
            except OSError as own:
                error = own
        raise OSError(error.errno, reason(error), str(path))

    def has(self, name: str) -> bool:
        return self.error is None and os.access(name, os.F_OK, dir_fd=self.fd)

    def is_current(self) -> bool:
        """Return whether the path still names this folder."""
        try:
            return self.error is not None or os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except OSError:
            return False


def read_here(path: str | os.PathLike[str], read: Callable[[Folder], T]) -> T:
    """Return read(folder) for the folder at a path of this machine.

    It may fail because the path now names another folder, whose writer removed the files of the old folder. Then it
    tries again with the present folder.
    """
    tries = TRIES
    while True:
        folder = Folder(Path(os.path.realpath(path)))
        try:
            return read(folder)
        except (OSError, ValueError):
            if tries == 0 or folder.is_current():
                raise
            tries -= 1

"""Folders that are complete or absent, here or in a store.

write_folder(path, write): whoever opens `path` finds all of the old folder or all of the new one
"""

import contextlib
import ctypes
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from funcrec.core import Problem, check
from funcrec.files._opened import Folder, read_here
from funcrec.files._url_folder import INDEX, read_url_folder, remove_url_folder, url_folder_problems, write_url_folder
from funcrec.files._urls import Url
from funcrec.files._whole_file import (
    SUFFIX,
    as_path,
    fcntl,
    flush,
    keep_mode,
    path_or_url,
    raise_unwritten,
    remove_stale,
)

EXCHANGE, HERE = 2, -100  # renameat2's RENAME_EXCHANGE and AT_FDCWD


T = TypeVar("T")


def folder_path(call: str, path: str | os.PathLike[str], *, overwrite: bool, marks: tuple[str, ...]) -> Any:
    """Check and return a path to write a folder to. marks: a folder that may be replaced holds one of these files."""
    found = as_path(call, path, "folder", '"runs/model"', remote=True)
    if isinstance(found, Url):
        check(call, url_folder_problems(found, overwrite, marks))
        return found
    found = Path(os.path.realpath(found))
    check(call, place_problems(found, overwrite, marks))
    return found


def read_folder(call: str, path: str | os.PathLike[str], read: Callable[[Folder], T]) -> T:
    """Return read(folder) for the folder at a path. A folder in a store is copied to this machine."""
    found = path_or_url(call, path, "folder")
    return read_url_folder(found, read) if isinstance(found, Url) else read_here(found, read)


def is_whole_folder(path: Path | Url) -> bool:
    """Return whether a folder that appears at the path is whole. One of this machine appears when it is."""
    return not isinstance(path, Url) or (path / INDEX).exists()


def remove_folder(path: Path | Url) -> None:
    """Remove a folder: readers find all of it or nothing."""
    if isinstance(path, Url):
        remove_url_folder(path)
        return
    aside = path.with_name(f".{secrets.token_hex(8)}{SUFFIX}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def write_folder(call: str, path: Path | Url, write: Callable[[Path], None]) -> None:
    """Fill a folder by `write(folder)`; it gets its name when all of it is on the disk."""
    if isinstance(path, Url):
        write_url_folder(call, path, write)
        return
    temporary = path.with_name(f".{secrets.token_hex(8)}{SUFFIX}")
    try:
        remove_stale(path.parent)
        temporary.mkdir(0o700 if os.path.exists(path) else 0o777)  # readable only for those who may read the old one
        with held(temporary):
            write(temporary)
            keep_mode(temporary, path)
            for x in (*temporary.iterdir(), temporary):
                flush(x)
            take_name(temporary, path)
        flush(path.parent)
    except OSError as error:
        raise_unwritten(call, error, path, "folder")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock the folder: a writer that removes stale folders then leaves it alone."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a disk without locks: its age protects the folder
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def take_name(new: Path, path: Path) -> None:
    """Rename `new` to `path`. If the system can, exchange the names in one step: `new` then names the old folder."""
    if not os.path.exists(path):
        new.rename(path)
        return
    library = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):
        if library.renameat2(HERE, os.fsencode(new), HERE, os.fsencode(path), EXCHANGE) == 0:
            return
    aside = path.with_name(f".{secrets.token_hex(8)}{SUFFIX}")
    path.rename(aside)
    new.rename(path)
    shutil.rmtree(aside, ignore_errors=True)


# -- validators --------------------------------------------------------------------------------------------------


def place_problems(path: Path, overwrite: bool, marks: tuple[str, ...]) -> Iterator[Problem]:
    if not path.parent.is_dir():
        what, hint = f"the folder of `{path}` does not exist.", "os.makedirs(folder, exist_ok=True)"
        yield Problem(what, f"{str(path.parent)!r}", "a folder", hint, FileNotFoundError)
    elif os.path.exists(path) and not overwrite:
        what = f"`{path}` is there already."
        yield Problem(what, "overwrite=False", "a new path", "overwrite=True", FileExistsError)
    elif os.path.exists(path) and not any((path / mark).is_file() for mark in marks):
        what, got = f"`{path}` holds something else.", "a folder without " + " or ".join(marks)
        need = "a folder of this kind"
        yield Problem(what, got if path.is_dir() else "a file", need, "another path", FileExistsError)

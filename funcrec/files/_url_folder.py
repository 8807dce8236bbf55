"""Folders in stores that are complete or absent: files under names that were never used, and one small index of them.

    url/index-of-files          {"files": {name: [place, bytes, CRC]}}; written last, and replaced by one request
    url/files-TOKEN/name        the files

Whoever reads the index finds all files that it names, or reads the index that replaced it.
"""

import contextlib
import json
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from funcrec.core import Problem, check, fail
from funcrec.files._opened import Folder
from funcrec.files._urls import STALE_S, TRIES, Url, crc_of_file, write_problems

T = TypeVar("T")
INDEX, OWN = "index-of-files", re.compile(r"files-[0-9a-f]{16}")
NAME = re.compile(r"\w[\w.-]*")


def write_url_folder(call: str, url: Url, write: Callable[[Path], None]) -> None:
    """Fill a folder on this machine by `write(folder)`, copy its files to the store, and then write their index."""
    check(call, write_problems(url / INDEX))
    files, token = {}, f"files-{secrets.token_hex(8)}"
    try:
        with tempfile.TemporaryDirectory(prefix="funcrec-") as folder:
            write(Path(folder))
            for path in sorted(Path(folder).iterdir()):
                (url / token / path.name).put(path)
                files[path.name] = [f"{token}/{path.name}", path.stat().st_size, crc_of_file(path)]
        old = read_index(url) if (url / INDEX).exists() else {}
        (url / INDEX).write_bytes(json.dumps({"files": files}).encode())
    except BaseException:
        forget(url, token)
        raise
    with contextlib.suppress(OSError):  # what is left costs room, and is removed by a later write
        clear(url, token, {place.split("/")[0] for place, _, _ in old.values()})


def forget(url: Url, token: str) -> None:
    """Remove the files of an interrupted write, unless the index may name them: a store's last answer may be lost."""
    with contextlib.suppress(OSError, ValueError):
        named = read_index(url) if (url / INDEX).exists() else {}
        if not any(place.startswith(f"{token}/") for place, _, _ in named.values()):
            remove_files(url / token)


def clear(url: Url, token: str, old: set[str]) -> None:
    """Remove the files of the old index, and those that killed writers left."""
    for own in [x for x in url.iterdir() if OWN.fullmatch(x.name) and x.name != token]:
        newest = max((x.stat().st_mtime for x in own.files()), default=0.0)
        if own.name in old or time.time() - newest > STALE_S:
            remove_files(own)


def remove_files(url: Url) -> None:
    for x in url.files() if url.is_dir() else ():
        x.unlink(missing_ok=True)


def remove_url_folder(url: Url) -> None:
    """Remove the index, and then the files: half a folder is never found."""
    (url / INDEX).unlink(missing_ok=True)
    for own in list(url.iterdir()) if url.is_dir() else ():
        if OWN.fullmatch(own.name):
            remove_files(own)


def read_index(url: Url) -> dict[str, tuple[str, int, int]]:
    """Return {name: (place, bytes, CRC)} of the files of a folder."""
    try:
        files = json.loads((url / INDEX).read_bytes())["files"]
        found = {name: (place, size, crc) for name, (place, size, crc) in files.items()}
        good = lambda n, p, size: NAME.fullmatch(n) and OWN.fullmatch(p.partition("/")[0]) and p.endswith(f"/{n}")
        if all(good(n, p, size) and isinstance(size, int) for n, (p, size, _) in found.items()):
            return found
        got = f"{files}"[:120]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"[:120]
    fail(url.call, f"`{url / INDEX}` is damaged.", got=got, need="the files of a folder", hint="write the folder again")


def read_url_folder(url: Url, read: Callable[[Folder], T]) -> T:
    """Return read(folder) for a copy of the folder on this machine, whose files stay readable while they are open.

    If the folder is replaced meanwhile, the function copies the new folder.
    """
    tries, mark = TRIES, ""
    while True:
        with tempfile.TemporaryDirectory(prefix="funcrec-") as place:
            try:
                mark = (url / INDEX).mark()
                for name, about in read_index(url).items():
                    copy_file(url, Path(place, name), *about)
                return read(as_folder(url, place))
            except FileNotFoundError as error:
                if not mark:
                    return read(as_folder(url, place, error))
                if tries == 0 or not is_other(url, mark):
                    raise
            except ValueError:
                if tries == 0 or not is_other(url, mark):
                    raise
            tries -= 1


def is_other(url: Url, mark: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (url / INDEX).mark() != mark
    return False


def copy_file(url: Url, path: Path, place: str, size: int, crc: int) -> None:
    (url / place).get(path)
    if (now := path.stat().st_size) != size or crc_of_file(path) != crc:
        got, need = f"{now} bytes" if now != size else "another CRC", f"{size} bytes, with the CRC that `{INDEX}` has"
        fail(url.call, f"`{url / place}` was changed.", got=got, need=need, hint="write the folder again")


def as_folder(url: Url, place: str, error: OSError | None = None) -> Folder:
    """Return a folder of this machine that has the URL's name in errors."""
    folder: Any = Folder(Path(place))
    folder.path, folder.error = url, error
    return folder


# -- validators --------------------------------------------------------------------------------------------------


def url_folder_problems(url: Url, overwrite: bool, marks: tuple[str, ...]) -> Iterator[Problem]:
    """Report a folder that may not be replaced: without `overwrite`, or of another kind. marks: as of `folder_path`."""
    if not url.exists():
        return
    found = read_index(url) if (url / INDEX).exists() else {}
    if not overwrite:
        what = f"`{url}` is there already."
        yield Problem(what, "overwrite=False", "a new path", "overwrite=True", FileExistsError)
    elif not any(mark in found for mark in marks):
        what, got = f"`{url}` holds something else.", "no index of files with " + " or ".join(marks)
        yield Problem(what, got, "a folder of this kind", "another path", FileExistsError)

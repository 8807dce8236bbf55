"""Files that are complete or absent, here or in a store.

    write_whole(path, write): whoever opens `path` finds all of the old file or all of the new one, whenever a write
      breaks off, and however many processes write

Each write goes to a file of its own next to `path`, locked while it is written. It is flushed to the disk and then
renamed to `path`: the write that finishes last stays. System errors are reported in four parts, as the same kind of
OSError.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from funcrec.core import Problem, check, describe, fail, message
from funcrec.files._urls import STALE_S, STORES, URL, Url, raise_of_store, url_of, write_object

try:
    import fcntl
except ImportError:  # without locks, files of killed writers stay
    fcntl = None

SUFFIX = ".funcrec.tmp"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def as_path(
    call: str,
    path: str | os.PathLike[str],
    kind: str = "file",
    hint: str = 'a file in the folder, as "folder/state.pt"',
    remote: bool = False,
) -> Any:
    """Check and return the path of a file, or of a folder. remote: whether a URL in a store becomes a Url."""
    if isinstance(path, Url) and remote:
        return Url(call, path.text, path.fs)
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        fail(call, "`path` is not a path.", got=describe(path), need="str or pathlib.Path", kind=TypeError)
    text = os.fspath(path)
    if URL.match(text):
        found = url_of(call, text, kind)
        check(call, () if remote or isinstance(found, Path) else local_problems(found, kind))
        return found
    if text.partition(":/")[0] in STORES:  # pathlib writes "s3://bucket/run" with one slash
        hint = repr(text.replace(":/", "://", 1))
        fail(call, "`path` is a URL without its second slash.", got=repr(text), need="a URL as text", hint=hint)
    if not text or "\0" in text or not Path(text).name:
        fail(call, f"`path` names no {kind}.", got=f"{text!r}", need=f"the name of a {kind}", hint=hint)
    return Path(text)


def local_problems(path: Url, kind: str) -> Iterator[Problem]:
    yield Problem("`path` is a URL.", f"{path}", f"a {kind} of this machine", "a copy on this machine")


def path_or_url(call: str, path: str | os.PathLike[str], kind: str = "file") -> Any:
    """Return the Url of a URL, or the Path of anything else, unchecked."""
    is_url = isinstance(path, Url) or bool(URL.match(os.fspath(path)))
    return as_path(call, path, kind, remote=True) if is_url else Path(path)


def write_whole(call: str, path: Path | Url, write: Callable[[BinaryIO], object]) -> None:
    """Write a file by `write(file)`: afterwards all of it is at `path`, or an error was raised and `path` is unchanged.

    A symbolic link at `path` stays: the file that it names is written.
    """
    if isinstance(path, Url):
        write_object(call, path, write)
        return
    path = Path(os.path.realpath(path)) if os.path.islink(path) else path
    check(call, place_problems(path))
    temporary = path.with_name(f".{secrets.token_hex(8)}{SUFFIX}")
    try:
        remove_stale(path.parent)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a disk without locks: its age protects the file
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            keep_mode(temporary, path)
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.utime(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        raise_unwritten(call, error, path, "file")
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def keep_mode(new: Path, path: Path) -> None:
    """Give the new file or folder the mode of the one that it replaces."""
    with contextlib.suppress(FileNotFoundError):
        os.chmod(new, stat.S_IMODE(os.stat(path).st_mode))


def raise_unwritten(call: str, error: OSError, path: Path, kind: str) -> NoReturn:
    """Raise an error that says why a file or a folder was not written, and what is at the path."""
    is_full = error.errno in FULL
    what = f"the disk of `{path}` is full." if is_full else f"`{path}` cannot be written."
    hint = "free some space, or another folder; " if is_full else "another folder; "
    need = f"room for the whole {kind}" if is_full else "a folder to write to"
    raise_os(call, error, what, need, hint + kept(path, kind))


def kept(path: Path, kind: str) -> str:
    with contextlib.suppress(OSError):
        return f"the {kind} that is there is whole" if path.exists() else "nothing is there"
    return "what was there is as it was"


def place_problems(path: Path) -> Iterator[Problem]:
    """Raise unless a file can be at `path`: its folder exists, and only a file may have its name."""
    try:
        mode = path.stat().st_mode
    except OSError:
        if not path.parent.is_dir():
            got, hint = f"{str(path.parent)!r}", "os.makedirs(folder, exist_ok=True)"
            yield Problem(f"the folder of `{path}` does not exist.", got, "a folder", hint, FileNotFoundError)
        return
    if not stat.S_ISREG(mode):
        kind = IsADirectoryError if stat.S_ISDIR(mode) else OSError
        need = "the name of a file"
        yield Problem(f"`{path}` is not a file.", kind_of(mode), need, 'a file in it, as "folder/state.pt"', kind)


def open_file(call: str, path: Path | Url) -> BinaryIO:
    """Open a file for reading; anything else is refused without waiting for it."""
    if isinstance(path, Url):
        return cast(BinaryIO, path.open())
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            near = sorted(p.name for p in path.parent.glob("*") if p.is_file())[:5] if path.parent.is_dir() else []
            hint = f"beside it: {', '.join(near)}" if near else "the path that save returned"
            raise_os(call, error, f"`{path}` does not exist.", "a file that save wrote", hint)
        raise_os(call, error, f"`{path}` cannot be read.", "a file that this user may read", "another path")
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = IsADirectoryError if stat.S_ISDIR(mode) else ValueError
        need = "a file that save wrote"
        fail(call, f"`{path}` is not a file.", got=kind_of(mode), need=need, hint="a file in it", kind=kind)
    return os.fdopen(fd, "rb")


def kind_of(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def raise_os(call: str, error: OSError, what: str, need: str, hint: str) -> NoReturn:
    """Raise the system's error, with its kind and number, in four parts. An error of a store has them already."""
    raise_of_store(error)
    new = type(error)(message(call, [Problem(what, error.strerror or str(error), need, hint)]))
    new.errno = error.errno
    raise new from error


def remove_stale(folder: Path) -> None:
    """Remove files and folders of killed writers: no process holds their lock, and they are old enough."""
    if fcntl is None:
        return
    with os.scandir(folder) as entries:
        found = [e.path for e in entries if e.name.startswith(".") and e.name.endswith(SUFFIX)]
    for path in found:
        with contextlib.suppress(OSError):  # another cleaner was first, or the file is not ours
            status = os.lstat(path)
            is_folder = stat.S_ISDIR(status.st_mode)
            if not (is_folder or stat.S_ISREG(status.st_mode)) or time.time() - status.st_mtime < STALE_S:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True) if is_folder else os.unlink(path)
            finally:
                os.close(fd)


def flush(path: Path | Url) -> None:
    """Flush a file, or the names in a folder, to the disk. A store answers when it has them."""
    if os.name != "posix" or isinstance(path, Url):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the disk does not support it
            raise
    finally:
        os.close(fd)

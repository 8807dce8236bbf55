"""Names in stores such as S3, by their URLs, with the methods of pathlib.Path that funcrec uses. fsspec reaches stores.

    Url("s3://bucket/run") / "manifest" = Url("s3://bucket/run/manifest")

A store shows an object only when all of it has arrived, and has neither renames nor folders. Every error of a store
becomes an OSError in four parts.
"""

import contextlib
import errno
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar

from funcrec.core import Problem, check, fail, message

T = TypeVar("T")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")
LOCAL = ("file", "local")
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "memory")  # they show whole objects only
TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")  # stores call the time of a write so
KINDS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError, TimeoutError)
TRIES = 3  # attempts of a reader whose object is replaced meanwhile
LEAST, READ = 1 << 18, 1 << 23  # bytes of a request: at first, and after reads in order
STALE_S = 600  # the age from which on what an interrupted writer left may be removed


class Entry(NamedTuple):
    """What a store knows of a name, by the names of os.stat. st_mtime is infinite if the store does not tell it."""

    st_mode: int
    st_size: int
    st_mtime: float


class Url:
    """A name in a store. `call` is the function that got it, for errors; `fs` is fsspec's file system."""

    def __init__(self, call: str, text: str, fs: Any):
        self.call, self.text, self.fs = call, text, fs

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Url({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __truediv__(self, name: str) -> "Url":
        return Url(self.call, f"{self.text}/{name}", self.fs)

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(self.call, self.text.rpartition("/")[0], self.fs)

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.text.partition("://")[2].split("/"))

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0].lower()

    @property
    def key(self) -> str:
        """Return the name by which the file system knows this URL."""
        return self.fs._strip_protocol(self.text)

    # -- what is there -------------------------------------------------------------------------------------------

    def stat(self) -> Entry:
        return entry_of(self.ask("read", lambda: self.fs.info(self.key)))

    def exists(self) -> bool:
        return self.mode() != 0

    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode())

    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode())

    def mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def iterdir(self) -> Iterator["Url"]:
        """Yield the names that begin with this one and a slash, up to the next slash."""
        found = self.ask("read", lambda: self.fs.ls(self.key, detail=False))
        names = {x.rstrip("/").rpartition("/")[2] for x in found if x.rstrip("/") != self.key}
        yield from (self / name for name in sorted(names))

    def sizes(self) -> dict[str, int]:
        """Return {name: bytes} of the files of this folder, by one request or few."""
        found = self.ask("read", lambda: self.fs.ls(self.key, detail=True))
        return {x["name"].rpartition("/")[2]: int(x["size"] or 0) for x in found if x["type"] == "file"}

    def files(self) -> list["Url"]:
        """Return all files below this folder, sorted."""
        found, own = self.ask("read", lambda: self.fs.find(self.key)), self.key.rstrip("/")
        names = [x.removeprefix(own).lstrip("/") for x in sorted(found)]
        return [self / name for name in names if name and not name.endswith("/")]

    def mark(self) -> str:
        """Return a text that changes when the object is replaced."""
        return self.ask("read", lambda: self.fs.ukey(self.key))

    # -- reading -------------------------------------------------------------------------------------------------

    def open(self, mode: str = "rb") -> "StoreFile":
        return StoreFile(self, self.stat().st_size)

    def range(self, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""
        return self.ask("read", lambda: self.fs.cat_file(self.key, start=begin, end=end), fresh=False)

    def read_bytes(self) -> bytes:
        return self.ask("read", lambda: self.fs.cat_file(self.key), fresh=False)

    def get(self, path: Path) -> None:
        """Copy the object to a local file."""
        self.ask("read", lambda: self.fs.get_file(self.key, str(path)), fresh=False)

    # -- writing -------------------------------------------------------------------------------------------------

    def write_bytes(self, data: bytes) -> None:
        self.ask("written", lambda: self.fs.pipe_file(self.key, data), fresh=False)

    def create(self, data: bytes) -> bool:
        """Write an object and return True; return False if there is one.

        Of several processes, one gets True: the store compares and writes in one request. hf:// takes two requests.
        """
        try:
            self.ask("written", lambda: self.fs.pipe_file(self.key, data, mode="create"), fresh=False)
        except FileExistsError:
            return False
        return True

    def put(self, path: Path) -> None:
        """Copy a local file to the store, in several parts if it is large. It appears when all parts are there."""
        if self.scheme == "memory":  # fsspec's own copy would show the first part
            self.write_bytes(path.read_bytes())
        else:
            self.ask("written", lambda: self.fs.put_file(str(path), self.key), fresh=False)

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*(FileNotFoundError,) if missing_ok else ()):
            self.ask("removed", lambda: self.fs.rm_file(self.key))

    def mkdir(self, exist_ok: bool = True, **how: Any) -> None:
        """Raise if the name is a file's. There is nothing to make: a store has no folders."""
        if self.is_file():
            raise FileExistsError(errno.EEXIST, "a file has this name", self.text)

    def rmdir(self) -> None:
        """Do nothing: a folder without files is not there."""

    def ask(self, what: str, request: Callable[[], T], fresh: bool = True) -> T:
        """Return the store's answer. fresh: other processes may have written since the last answer."""
        try:
            if fresh:
                self.fs.invalidate_cache()
            return request()
        except Exception as error:  # each store has errors of its own, and of the libraries that it uses
            kind = next((k for k in KINDS if isinstance(error, k)), OSError)
            got = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0][:200]
            need, hint = "an answer of the store", "its credentials and endpoint, from its own environment variables"
            if kind is FileNotFoundError:
                need, hint = "a bucket that is there" if what == "written" else "an object that is there", "another URL"
            new = kind(message(self.call, [Problem(f"`{self.text}` cannot be {what}.", got, need, hint)]))
            new.errno = errno.ENOENT if kind is FileNotFoundError else getattr(error, "errno", None) or errno.EIO
            new.store_said = got  # type: ignore[attr-defined]
            raise new from error


def raise_of_store(error: BaseException) -> None:
    """Raise an error of a store again. Other errors return."""
    if hasattr(error, "store_said"):
        raise error


def reason(error: OSError) -> str:
    """Return why the system, or a store, refused."""
    return getattr(error, "store_said", None) or error.strerror or str(error)


def entry_of(info: dict[str, Any]) -> Entry:
    mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
    when: Any = next((info[k] for k in TIMES if info.get(k)), None)
    when = when.timestamp() if hasattr(when, "timestamp") else when
    return Entry(mode, int(info.get("size") or 0), float(when) if isinstance(when, int | float) else float("inf"))


class StoreFile:
    """An object open for reading at random places. Requests double while it is read in order.

    The last answer is kept until its last byte is read.
    """

    def __init__(self, url: Url, size: int):
        self.url, self.size, self.request, self.closed = url, size, LEAST, False
        self.at, self.first, self.end, self.held = 0, 0, 0, b""

    def read(self, count: int | None = -1) -> bytes:
        begin = min(self.at, self.size)
        end = self.size if count is None or count < 0 else min(begin + count, self.size)
        self.at = end
        if not self.first <= begin <= end <= self.first + len(self.held):
            self.request = min(2 * self.request, READ) if begin == self.end else LEAST
            self.first, self.held = begin, self.url.range(begin, min(max(begin + self.request, end), self.size))
        out = self.held[begin - self.first : end - self.first]
        if end == self.first + len(self.held):
            self.first, self.held = end, b""
        self.end = end
        return out

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self.at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def close(self) -> None:
        self.closed, self.held = True, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def __enter__(self) -> "StoreFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def url_of(call: str, text: str, kind: str) -> Url | Path:
    """Return the Url of a text, or the Path that a URL of a local file names."""
    scheme, rest = text.partition("://")[0].lower(), text.partition("://")[2]
    if "::" in text:
        fail(call, "`path` is a chain of URLs.", got=repr(text), need="one URL", hint='"s3://bucket/run"')
    if scheme in LOCAL:
        return Path(rest)
    if scheme not in STORES:
        need, hint = f"a local path, or one of {', '.join(f'{x}://' for x in STORES)}", "a copy on this machine"
        fail(call, f"`{scheme}://` is not a store that shows whole files only.", got=repr(text), need=need, hint=hint)
    text = text.rstrip("/")
    if not rest.strip("/") or ("/" not in rest.strip("/") and scheme != "memory"):
        hint = '"s3://bucket/run"'
        fail(call, f"`path` names no {kind}.", got=repr(text), need=f"the name of a {kind} in a store", hint=hint)
    need, hint = "a store that fsspec reaches", "pip install 'funcrec[remote]'"
    try:
        import fsspec

        fs = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        what = f"what reads `{scheme}://` is not installed."
        fail(call, what, got=f"{error}"[:200], need=need, hint=hint, kind=ModuleNotFoundError)
    except Exception as error:
        got, hint = f"{type(error).__name__}: {error}".splitlines()[0][:200], "its credentials and its endpoint"
        fail(call, f"the store `{scheme}://` cannot be used.", got=got, need=need, hint=hint)
    return Url(call, text, fs)


def write_problems(path: Url) -> Iterator[Problem]:
    """Report a name that is a folder's."""
    if path.is_dir():
        hint = 'a file in it, as "folder/state.pt"'
        yield Problem(f"`{path}` is not a file.", "a folder", "the name of a file", hint, IsADirectoryError)


def write_object(call: str, path: Url, write: Callable[[BinaryIO], object]) -> None:
    """Write a file by `write(file)` on this machine, and copy it to the store."""
    check(call, write_problems(path))
    folder = tempfile.gettempdir()
    try:
        made = tempfile.NamedTemporaryFile(prefix="funcrec-", dir=folder)  # noqa: SIM115
    except OSError as error:
        raise_room(call, error, folder)
    with made as file:
        try:
            write(file)  # type: ignore[arg-type]
            file.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise_room(call, error, folder)
            raise
        path.put(Path(file.name))


def raise_room(call: str, error: OSError, folder: str) -> NoReturn:
    what, hint = f"the folder of temporary files `{folder}` cannot hold a file for the store.", "TMPDIR=<a larger disk>"
    new = OSError(message(call, [Problem(what, error.strerror or str(error), "room for the whole file", hint)]))
    new.errno = error.errno
    raise new from error


def size_of(file: BinaryIO) -> int:
    """Return the size in bytes of a file that is open for reading, here or in a store."""
    return file.seek(0, os.SEEK_END)


def steady(path: Path | Url, read: Callable[[], T]) -> T:
    """Return read(). If it fails and the object in a store was replaced meanwhile, read again."""
    tries = TRIES
    while True:
        mark = path.mark() if isinstance(path, Url) and path.exists() else ""
        try:
            return read()
        except Exception:
            if not mark or tries == 0 or path.mark() == mark:  # type: ignore[union-attr]
                raise
            tries -= 1


@contextlib.contextmanager
def local_copy(path: Path | Url) -> Iterator[Path]:
    """Yield a path on this machine with the content of a file. A copy lives as long as the block."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="funcrec-") as folder:
        own = Path(folder, path.name)
        path.get(own)
        yield own


def crc_of_file(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while data := file.read(READ):
            crc = zlib.crc32(data, crc)
    return crc

"""Keep compiled code on disk, in files that are used only if they are complete, and find the C++ compiler.

    load(name, make, read)  =  read(path) of the file that make(path) writes, once for all processes

A file ends with a digest of all earlier bytes. If a killed process or a full disk cut a file short, or the file changed
later, the digest does not match, and `load` makes the file again. Each process writes to a temporary name of its own
and then renames the file, so two processes at once are safe. Where there are locks, one process makes a file, and
others that ask for it wait: ranks that start together compile each program once. Inductor uses the same folder:
TORCHINDUCTOR_CACHE_DIR, else torchinductor_<user> in the folder of temporary files.
"""

import contextlib
import getpass
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
SIZE = hashlib.sha256().digest_size  # bytes of the digest that ends a file


def folder() -> Path:
    """Return the folder for compiled code, by torch's rules. The import of torch's function would take a second."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not named:
        try:
            user = getpass.getuser()
        except (KeyError, ImportError, OSError):
            user = f"uid_{os.getuid()}"
        user = re.sub(r'[\\/:*?"<>|]', "_", user)
        named = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return Path(os.path.abspath(named), "funcrec")


def is_off() -> bool:
    """Return whether TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 or torch's config turns torch's caches off."""
    from torch._inductor import config  # torch's tracer has imported it

    return config.force_disable_caches


def is_whole(path: Path) -> bool:
    """Return whether the file exists and holds the bytes that `write` wrote."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > SIZE and hashlib.sha256(content[:-SIZE]).digest() == content[-SIZE:]


def load(name: str, make: Callable[[Path], None], read: Callable[[Path], T]) -> T:
    """Return read(path) of the file of this name.

    `make` writes the file to the path that it gets. It runs only if the file is missing, incomplete or unreadable.

    Raises:
      OSError: if the folder cannot keep a file.
    """
    if is_off():
        with tempfile.TemporaryDirectory(prefix="funcrec_") as place:  # Loaded code no longer needs its file.
            write(Path(place, name), make)
            return read(Path(place, name))
    path = folder() / name
    if (found := kept(path, read)) is not None:
        return found
    make_room(path)
    mine = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}{path.suffix}")
    with alone(path):
        if (found := kept(path, read)) is not None:  # Another thread or process has made it meanwhile.
            return found
        try:
            write(mine, make)
            mine.replace(path)  # This is atomic: other processes see the whole file, or none.
        finally:
            mine.unlink(missing_ok=True)
        return read(path)


def kept(path: Path, read: Callable[[Path], T]) -> T | None:
    """Return read(path), or None if the file is missing, incomplete or unreadable."""
    if is_whole(path):
        with contextlib.suppress(OSError, ImportError):  # Another system that shares the folder made it.
            return read(path)
    return None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Return a context for one thread of one process at a time.

    A lock ends with its process, however that ends. Where there are no locks, on Windows and in some networks' folders,
    threads enter at once.
    """
    own = path.with_name(f"{path.name}.lock")
    while fcntl is not None:
        file = os.open(own, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            os.close(file)
            break
        except BaseException:  # an interrupt
            os.close(file)
            raise
        if is_at(own, file):
            try:
                yield
            finally:
                own.unlink(missing_ok=True)
                fcntl.flock(file, fcntl.LOCK_UN)  # A forked process may hold the file open.
                os.close(file)
            return
        os.close(file)  # The thread that had the lock has deleted its file.
    yield


def is_at(path: Path, file: int) -> bool:
    """Return whether an open file is the file at the path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def make_room(path: Path) -> None:
    """Make the folder of the path, and raise if the path itself is a folder.

    This happens before anything is compiled.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
    except OSError as error:
        raise OSError(
            f"funcrec.kernels: compiled code cannot be kept.\n  got   {error.strerror or error} ({path})\n  need  a "
            "folder that can be written, and a file of ours there or none\n  try   TORCHINDUCTOR_CACHE_DIR=<another "
            "folder>, or TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        ) from error


def write(path: Path, make: Callable[[Path], None]) -> None:
    """Let `make` write the file, and add the digest of its bytes."""
    make(path)
    content = path.read_bytes()
    path.write_bytes(content + hashlib.sha256(content).digest())


def compiler() -> str | None:
    """Return the name of the C++ compiler: CXX, else g++ or clang++. Return None if there is no compiler."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((name for name in names if shutil.which(name)), None)

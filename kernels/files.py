"""Compiled code on disk: files that are whole or are not used, and a C++ compiler.

    load(name, make, read)  =  read(path) of the file that make(path) writes, once for all processes

A file ends with the digest of what is before it. One that was cut short or changed since, by a killed process or a full
disk, does not have it, and is made again. Each process makes a file under a name of its own and renames it: two
at once are safe. The folder is Inductor's: TORCHINDUCTOR_CACHE_DIR, else torchinductor_<user> beside temporary files.
"""

import contextlib
import getpass
import hashlib
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SIZE = hashlib.sha256().digest_size  # of what ends a file


def folder() -> Path:
    """Where compiled code is kept, as torch says it; torch's own function takes a second to import."""
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
    """Whether torch is told to keep nothing: TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, or its config."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        return config.force_disable_caches
    return os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1"


def is_whole(path: Path) -> bool:
    """Whether the file is there as it was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > SIZE and hashlib.sha256(content[:-SIZE]).digest() == content[-SIZE:]


def load(name: str, make: Callable[[Path], None], read: Callable[[Path], T]) -> T:
    """read(path) of the file of this name. `make` writes it to the path that it is
    given, if it is not there whole, or what is there cannot be read.

    Raises:
      OSError: no file can be kept there.
    """
    if is_off():
        with tempfile.TemporaryDirectory(prefix="funcrec_") as place:  # what is loaded needs its file no more
            write(Path(place, name), make)
            return read(Path(place, name))
    path = folder() / name
    if is_whole(path):
        with contextlib.suppress(OSError, ImportError):  # of a system that this one is not
            return read(path)
    make_room(path)
    mine = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}{path.suffix}")
    try:
        write(mine, make)
        mine.replace(path)  # whole or not at all, whoever else makes it
    finally:
        mine.unlink(missing_ok=True)
    return read(path)


def make_room(path: Path) -> None:
    """The folder of the path, and at the path no folder, before anything is compiled for it."""
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
    """What `make` writes, and its digest."""
    make(path)
    content = path.read_bytes()
    path.write_bytes(content + hashlib.sha256(content).digest())


def compiler() -> str | None:
    """The C++ compiler: CXX, else g++ or clang++; None where there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((name for name in names if shutil.which(name)), None)

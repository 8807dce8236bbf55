"""A file that names the process that holds it, locked while that process lives.

The system unlocks the file when its process ends, however it ends. A forked process does not hold it.
"""

import errno
import json
import os
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from funcrec.files._whole_file import fcntl

MOST = 1 << 16  # bytes of the file that are read
TOKEN = secrets.token_hex(8)  # two machines may give their processes the same number
WITHOUT = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}  # the disk has no locks
HOLDS: "weakref.WeakSet[Any]" = weakref.WeakSet()


def closed_by_fork(hold: Any) -> None:
    """Close the open file of `hold`, (hold.fd, hold.close), in every process that this one forks.

    A forked process inherits open files, and with them the lock. If its parent were killed, it would still hold it.
    """
    HOLDS.add(hold)


def let_go() -> None:
    for hold in list(HOLDS):
        hold.close()
        hold.fd = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=let_go)


def this_process() -> str:
    return f"{TOKEN}-{os.getpid()}"  # a forked process has another id than its parent


def is_at(fd: int, path: Path) -> bool:
    """Return whether the open file is still the file at the path. The folder may have been removed."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def lock(fd: int) -> bool:
    """Lock the file; return whether no other open file had the lock."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no locks of files")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_form(fd: int) -> dict[str, str]:
    """Return the content of the file; {} if it is half written."""
    return form_of(os.pread(fd, MOST, 0))


def form_of(data: bytes) -> dict[str, str]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    is_form = isinstance(found, dict) and all(isinstance(x, str) for x in found.values())
    return found if is_form else {}


def write_form(fd: int, content: Mapping[str, str]) -> None:
    data = json.dumps(content).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)

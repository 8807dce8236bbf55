"""Checks that all readers need: that pyarrow is installed, and that files exist."""

import os
from pathlib import Path

from funcrec.core import describe, fail, path_hint


def need_pyarrow(call: str):
    """Return the module pyarrow. If it is missing, the error says how to install it."""
    try:
        import pyarrow
    except ImportError:
        need, hint = "pyarrow, to read tables and files", "pip install funcrec[data]"
        fail(call, "pyarrow is not installed.", got="no module pyarrow", need=need, hint=hint, kind=ModuleNotFoundError)
    return pyarrow


def need_file(call: str, path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        need, hint = "a path", 'path="day_0.tsv"'
        fail(call, "`path` is not a path.", got=describe(path), need=need, hint=hint, kind=TypeError)
    path = Path(path).expanduser()
    if not path.is_file():
        hint = path_hint(path, "a path from the working directory, or an absolute path")
        fail(call, "there is no such file.", got=f"{str(path)!r}", need="a file", hint=hint, kind=FileNotFoundError)
    return path

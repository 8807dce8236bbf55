"""What all readers need: that pyarrow is installed, that files exist, and pyarrow's files for paths and URLs."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from funcrec.core import describe, fail
from funcrec.files import Url, as_path

T = TypeVar("T")
AT_ONCE = 16  # requests
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def need_pyarrow(call: str):
    """Return the module pyarrow. If it is missing, the error says how to install it."""
    try:
        import pyarrow
    except ImportError:
        need, hint = "pyarrow, to read tables and files", "pip install funcrec[data]"
        fail(call, "pyarrow is not installed.", got="no module pyarrow", need=need, hint=hint, kind=ModuleNotFoundError)
    return pyarrow


def compute() -> Any:
    """Return the module pyarrow.compute. pyarrow makes its functions when it is imported: type checkers see none."""
    import pyarrow.compute

    return pyarrow.compute


def as_array(x: Any) -> Any:
    """Return the pyarrow array of a vector of numpy, of a list or of an array of another library.

    pyarrow ends a text of a numpy vector at its first NUL, and so vectors with such texts go through a list.
    """
    import pyarrow as pa

    if isinstance(x, np.ndarray) and x.dtype.kind in "US" and x.size and x.dtype.itemsize:
        is_set = np.ascontiguousarray(x).view(np.uint32 if x.dtype.kind == "U" else np.uint8).reshape(x.size, -1) != 0
        if (~is_set[:, :-1] & is_set[:, 1:]).any():
            return pa.array(x.tolist())
    return pa.array(x)


def parquet_of(path: Path | Url) -> Any:
    """Return what pyarrow reads a Parquet file from."""
    import pyarrow as pa

    return pa.PythonFile(path.open(), mode="r") if isinstance(path, Url) else path


def text_of(path: Path | Url) -> Any:
    """Return a stream of the unpacked bytes of a file."""
    import pyarrow as pa

    if not isinstance(path, Url):
        return pa.input_stream(path)
    file = pa.PythonFile(path.open(), mode="r")
    return pa.CompressedInputStream(file, PACKED[path.suffix]) if path.suffix in PACKED else file


def at_once(fn: Callable[[Any], T], paths: Sequence[Path | Url]) -> list[T]:
    """Return [fn(path) for path in paths]. Files in stores are asked for at once, in threads."""
    if not any(isinstance(path, Url) for path in paths):
        return [fn(path) for path in paths]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(fn, paths))


def files_below(root: Path | Url) -> list:
    """Return all files of a folder, sorted by the parts of their paths."""
    if isinstance(root, Url):
        return sorted(root.files(), key=lambda p: p.parts)
    return [p for p in sorted(root.rglob("*")) if p.is_file()]


def need_file(call: str, path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        need, hint = "a path", 'path="day_0.tsv"'
        fail(call, "`path` is not a path.", got=describe(path), need=need, hint=hint, kind=TypeError)
    path = Path(as_path(call, path)).expanduser()
    if not path.is_file():
        hint = "a path from the working directory, or an absolute path"
        fail(call, "there is no such file.", got=f"{str(path)!r}", need="a file", hint=hint, kind=FileNotFoundError)
    return path

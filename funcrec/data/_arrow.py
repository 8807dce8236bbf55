"""What the readers of files share: pyarrow when it is there, and batches of a fixed number of rows. Floor 6."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from funcrec._configs import count_problems
from funcrec._errors import Problem, check, fail


def need_pyarrow(call: str):
    """The module pyarrow, or an error that says how to have it."""
    try:
        import pyarrow
    except ImportError:
        fail(
            call, "pyarrow is not installed.", got="no module pyarrow", need="pyarrow, to read files in blocks",
            hint="pip install funcrec[data]", kind=ModuleNotFoundError,
        )  # fmt: skip
    return pyarrow


def need_file(call: str, path: str | os.PathLike) -> Path:
    path = Path(path).expanduser()
    if not path.is_file():
        fail(call, "there is no such file.", got=f"{str(path)!r}", need="a file", kind=FileNotFoundError)
    return path


def check_batching(call: str, batch_size: object, skip: object) -> None:
    check(call, count_problems(batch_size, "batch_size"), _skip_problems(skip))


def _skip_problems(skip: object) -> Iterator[Problem]:
    if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
        yield Problem("`skip` is no number of batches.", f"{skip!r}", "an int >= 0", "skip=position.batch")


def fixed_tables(chunks: Iterable, batch_size: int, skip: int, drop_last: bool) -> Iterator[tuple[int, object]]:
    """Record batches of any size -> (number of the first row, table of `batch_size` rows); the first `skip` are left out."""
    import pyarrow

    pending, have, first = [], 0, 0
    for chunk in chunks:
        pending.append(chunk)
        have += chunk.num_rows
        while have >= batch_size:
            table = pyarrow.Table.from_batches(pending)
            if first >= skip * batch_size:
                yield first, table.slice(0, batch_size)
            pending = table.slice(batch_size).to_batches()
            have, first = have - batch_size, first + batch_size
    if have and not drop_last and first >= skip * batch_size:
        yield first, pyarrow.Table.from_batches(pending)

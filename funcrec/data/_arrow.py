"""What the readers of files share: pyarrow when it is there, and batches of a fixed number of rows."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from funcrec.core import Problem, check, count_problems, describe, fail, flag_problems


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
    if not isinstance(path, str | os.PathLike):
        need, hint = "a path", 'path="day_0.tsv"'
        fail(call, "`path` is not a path.", got=describe(path), need=need, hint=hint, kind=TypeError)
    path = Path(path).expanduser()
    if not path.is_file():
        fail(
            call,
            "there is no such file.",
            got=f"{str(path)!r}",
            need="a file",
            hint="a path from here, or a whole one",
            kind=FileNotFoundError,
        )
    return path


def check_batching(call: str, batch_size: object, skip: object, **flags: object) -> None:
    check(call, count_problems(batch_size, "batch_size"), _skip_problems(skip))
    check(call, *(flag_problems(x, name) for name, x in flags.items()))


def _skip_problems(skip: object) -> Iterator[Problem]:
    if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
        yield Problem("`skip` is not a number of batches.", f"{skip!r}", "an int >= 0", "skip=position.batch")


def fixed_tables(
    call: str, path: Path, chunks: Iterable, batch_size: int, skip: int, drop_last: bool
) -> Iterator[tuple[int, object]]:
    """Record batches of any size -> (number of the first row,
    table of `batch_size` rows); the first `skip` are left out.

    Raises: ValueError for a file that has no batch, or less than `skip`
      of them: who reads it again and again would never come on.
    """
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
    rows = first + have
    count = rows // batch_size if drop_last else -(-rows // batch_size)
    if not count or count < skip:
        need = (
            f"at least {batch_size if drop_last else 1} rows" if not count else f"at least {skip} batches, to skip them"
        )
        got, hint = f"{rows} rows, batches of {batch_size}", "a smaller batch_size, or drop_last=False"
        fail(call, f"`{path.name}` does not make a batch.", got=got, need=need, hint=hint)

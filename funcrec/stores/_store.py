"""The contract of stores, and the store in memory, which every other store must equal.

    read(rows) ─▶ records        write(rows, records)        commit(step)  |  rollback() ─▶ step of the last commit
                                                                              rollback(step of the commit before)

A store is the one value here that changes. It stays outside of programs; functions get what was read from it.

Shapes: N rows of a call, R rows of the store, W numbers of a record.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Count, Problem, Within, check, fail, is_tracked, is_wrapped, outside_transforms, stray, typed

Init = Callable[[Tensor], Tensor]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
_known = Within(", ".join(map(str, DTYPES)), DTYPES.__contains__, "is not a dtype of records")
RecordDtype = Annotated[torch.dtype, _known]


class ColdStore(NamedTuple):
    """R records of W numbers each, outside of programs: functions that read, write, commit and roll back.

    Fields:
      read: (rows i[N]) -> the records [N, W], in new memory.
      write: (rows i[N], records [N, W]) -> None. If a row comes twice, its last record stays.
      commit: (step, an int >= 0) -> None. Earlier writes are kept, whatever happens afterwards. A commit of the same
        step without a write in between is the last commit.
      rollback: (step=None) -> the step of the last commit, 0 before the first. Later writes are undone. With the step
        of the commit before, the last commit is undone, too.
      close: () -> None. It undoes nothing and commits nothing; no other function may be called afterwards.
      num_rows, width, dtype: R, W and the dtype of the records.

    Calls from several threads take turns.

    Law: read gives the record that was written last, and for a row that was never written the record of `init`, or
      zeros. After rollback, all records are those of the last commit, or of the one before.

    Example:
      >>> import torch, funcrec as fr
      >>> store = fr.memory_store(5, 2)
      >>> store.write(torch.tensor([3, 1]), torch.tensor([[3.0, 3.0], [1.0, 1.0]]))
      >>> store.commit(10)
      >>> store.write(torch.tensor([3]), torch.tensor([[0.0, 9.0]]))
      >>> store.rollback(), store.read(torch.tensor([3, 0]))
      (10, tensor([[3., 3.],
              [0., 0.]]))
    """

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], None]
    commit: Callable[[int], None]
    rollback: Callable[..., int]
    close: Callable[[], None]
    num_rows: int
    width: int
    dtype: torch.dtype


@typed
def memory_store(
    num_rows: Count, width: Count, *, dtype: RecordDtype = torch.float32, init: Callable[[Tensor], Tensor] | None = None
) -> ColdStore:
    """Return a store whose records are in memory. Other stores must hold the same; tests compare them with it.

    Args:
      num_rows, width: R and W.
      dtype: of the records: a float, int64, int32 or uint8.
      init: (rows i64[N], ascending) -> the records [N, W] of rows that were never written; None for zeros. The record
        of a row must not depend on the other rows, and is computed again whenever such a row is read.

    Raises:
      ValueError, TypeError: from the functions of the store, for rows outside [0, R), or records of another dtype or
        shape. Nothing is then written.
      MemoryError: the records do not fit into memory.

    Example:
      >>> import torch, funcrec as fr
      >>> store = fr.memory_store(5, 2, init=lambda rows: rows[:, None].float().expand(-1, 2))
      >>> store.read(torch.tensor([4, 2]))
      tensor([[4., 4.],
              [2., 2.]])
    """
    try:
        with as_values():
            kept, is_written = torch.zeros(num_rows, width, dtype=dtype), torch.zeros(num_rows, dtype=torch.bool)
            commits = [(0, kept.clone(), is_written.clone())]  # the last, and the one before
    except RuntimeError as error:  # torch has no class for it
        got, need = f"{2 * num_rows * width * dtype.itemsize} bytes", "memory for the records and those of the commit"
        what, hint = "the records do not fit into memory.", "a path, as of fr.file_store or fr.table_store"
        fail(
            "funcrec.memory_store", what, got=f"{got}: {error}".splitlines()[0], need=need, hint=hint, kind=MemoryError
        )
    lock, is_changed, is_open = threading.Lock(), [False], [True]  # changed since the last commit

    def read(rows: Tensor) -> Tensor:
        rows = checked_rows("ColdStore.read", rows, num_rows)
        with lock:
            check("ColdStore.read", open_problems(is_open[0]))
            found, place = kept[rows], (~is_written[rows]).nonzero()[:, 0]
            new, of_place = torch.unique(rows[place], return_inverse=True)
            return found.index_copy_(0, place, first_records(init, new, width, dtype)[of_place])

    def write(rows: Tensor, records: Tensor) -> None:
        rows, records = checked_records("ColdStore.write", rows, records, num_rows, width, dtype)
        with lock:
            check("ColdStore.write", open_problems(is_open[0]))
            kept[rows], is_written[rows], is_changed[0] = records, True, is_changed[0] or len(rows) > 0

    @as_values()
    def commit(step: int) -> None:
        check("ColdStore.commit", step_problems(step), open_problems(is_open[0]))
        with lock:
            if step != commits[0][0] or is_changed[0]:
                commits[:] = (step, kept.clone(), is_written.clone()), commits[0]
            is_changed[0] = False

    @as_values()
    def rollback(step: int | None = None) -> int:
        with lock:
            check("ColdStore.rollback", open_problems(is_open[0]), commit_problems(step, [c[0] for c in commits]))
            if step not in (None, commits[0][0]):
                del commits[0]
            last, *of_rows = commits[0]
            kept.copy_(of_rows[0])
            is_written.copy_(of_rows[1])
            is_changed[0] = False
            return last

    def close() -> None:
        is_open[0] = False

    return ColdStore(read, write, commit, rollback, close, num_rows, width, dtype)


@contextlib.contextmanager
def as_values() -> Iterator[None]:
    """Make plain tensors, also inside of transforms and of inference mode."""
    with outside_transforms(), torch.inference_mode(False):
        yield


def first_records(init: Init | None, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the records of rows that were never written."""
    if init is None or not rows.numel():
        return torch.zeros(len(rows), width, dtype=dtype)
    made = init(rows)
    if not isinstance(made, Tensor) or made.shape != (len(rows), width) or made.dtype != dtype:
        got = f"{made.dtype}{list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        fail("ColdStore.read", "`init(rows)` are not the records.", got=got, need=f"{dtype}[{len(rows)}, {width}]")
    return made.detach().contiguous()


def checked_rows(call: str, rows: Tensor, num_rows: int) -> Tensor:
    """Return rows as i64[N]."""
    check(call, row_problems(rows, num_rows))
    return rows.to(torch.int64)


def checked_records(
    call: str, rows: Tensor, records: Tensor, num_rows: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (rows i64[N], ascending, none twice; their records [N, W]). If a row comes twice, its last
    record stays."""
    check(call, row_problems(rows, num_rows), record_problems(rows, records, width, dtype))
    rows, order = rows.to(torch.int64).sort(stable=True)
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    return rows[is_last], records[order[is_last]]


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(step: int) -> Iterator[Problem]:
    if type(step) is not int or step < 0:
        kind = TypeError if type(step) is not int else ValueError
        yield Problem("`step` is not a step.", repr(step), "an int >= 0", kind=kind)


def commit_problems(step: int | None, commits: Sequence[int]) -> Iterator[Problem]:
    """Report a step that no commit has, to which the store could return. commits: the last first."""
    if step is not None and step not in commits:
        need = f"the step of the last commit or of the one before: {' or '.join(map(str, commits))}"
        yield Problem("`step` is not the step of a commit.", repr(step), need, "rollback(), for the last commit")


def open_problems(is_open: bool) -> Iterator[Problem]:
    if not is_open:
        yield Problem("the store is closed.", "a closed store in memory", "an open one", "fr.memory_store")


def plain_problems(name: str, x: Tensor, hint: str) -> Iterator[Problem]:
    """Yield a problem unless `x` is a plain tensor on the CPU that no transform tracks."""
    if not isinstance(x, Tensor):
        yield Problem(f"`{name}` is not a tensor.", type(x).__name__, "a tensor", hint, TypeError)
    elif is_wrapped(x) or is_tracked(x):
        hint = f"{name}.detach(), outside of grad, vmap and jit"
        yield Problem(f"`{name}` is tracked by a transform.", "a tensor that is not a plain value", "values", hint)
    elif x.device.type != "cpu":
        yield Problem(f"`{name}` is on another device.", str(x.device), "cpu", f"{name}.cpu()")


def row_problems(rows: Tensor, num_rows: int) -> Iterator[Problem]:
    if found := list(plain_problems("rows", rows, "torch.tensor([0, 1])")):
        yield from found
    elif rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
        yield Problem("`rows` are not rows.", f"{rows.dtype}{list(rows.shape)}", "i64[N]", kind=TypeError)
    elif (row := stray(rows, num_rows)) is not None:
        yield Problem("`rows` lie outside the store.", f"row {row}", f"0 <= row < {num_rows}", kind=IndexError)


def record_problems(rows: Tensor, records: Tensor, width: int, dtype: torch.dtype) -> Iterator[Problem]:
    if found := list(plain_problems("records", records, f"torch.zeros(len(rows), {width})")):
        yield from found
    elif isinstance(rows, Tensor) and (records.shape != (*rows.shape, width) or records.dtype != dtype):
        need = f"{dtype}[{', '.join(map(str, (*rows.shape, width)))}]"
        got = f"{records.dtype}{list(records.shape)}"
        yield Problem("`records` do not fit the rows.", got, need, "records.to(dtype)", TypeError)

"""Batches of one epoch in a random order, from a position that goes into checkpoints.

    batch i of epoch e = take(data, rows[order(key, e)][i · B : (i + 1) · B])

The order depends on the key and the epoch only, so a position, two integers, is all there is to save. Shapes: N rows,
B rows of a batch.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcrec.core import Problem, check, count_problems, describe, flag_problems, random, replace
from funcrec.data._ctr import random_order
from funcrec.data._rows import row_problems
from funcrec.jagged import int_problems, pad_to_bucket
from funcrec.tables import Batch


class RowData(Protocol):
    """Data whose rows can be had in any order: `CtrData`, `CriteoArrays`, or a user's own."""

    @property
    def num_rows(self) -> int: ...

    def take(self, rows: Tensor) -> Batch: ...


class Position(NamedTuple):
    """The next batch to read: number `batch` of epoch `epoch`. A plain pair of integers, for checkpoints."""

    epoch: int = 0
    batch: int = 0


def take(data: RowData, rows: Tensor) -> Batch:
    """The batch of these row numbers i[B], in their order and with repeats.

    Raises: TypeError for rows that are no integers; ValueError for rows that the data has not (inside `jit`, where no
      value can be read, the label of such a row is NaN).

    Law: bag b of every key, and label b, depend on rows[b] only.

    Example:
      >>> import torch, funcrec as fr
      >>> from funcrec.data import random_rows, take
      >>> data = random_rows(fr.key(0), {"item": 100}, num_rows=50)
      >>> take(data, torch.tensor([7, 7])).ids.num_bags
      2
    """
    check("funcrec.data.take", data_problems(data))
    check("funcrec.data.take", row_problems(rows, data.num_rows))
    return data.take(rows)


def batches(
    data: RowData,
    rows: Tensor | None,
    batch_size: int,
    *,
    key: Tensor | None = None,
    position: Position = Position(),  # noqa: B008
    drop_last: bool = False,
    bucket: bool = False,
) -> Iterator[tuple[Position, Batch]]:
    """The rest of one epoch, each batch with the position behind it: what to save once the batch is trained on.

    Args:
      data: `CtrData`, `CriteoArrays` or anything with `num_rows` and `take`.
      rows: i64[N], the rows of this part; None for all of them.
      key: shuffles by (key, position.epoch); None keeps the order of `rows`.
      position: where to begin. The last batch comes with Position(epoch + 1, 0), where the next epoch begins.
      drop_last: leave out a last batch that is not full. Else it comes as it is, with fewer bags: a compiled step
        compiles once more for it.
      bucket: pad the ids by `fr.pad_to_bucket`, for data whose batches differ in their number of ids.

    Raises: TypeError or ValueError at the call, not at the first batch: for a row that the data has not, a position
      behind the epoch's last batch, an epoch without a batch.

    Law: every row once per epoch; beginning at a position gives exactly the batches that would have followed it.

    Example:
      >>> import funcrec as fr
      >>> from funcrec.data import Position, batches, random_rows
      >>> data = random_rows(fr.key(0), {"item": 100}, num_rows=10)
      >>> [(p, b.label.shape[0]) for p, b in batches(data, None, 4, key=fr.key(1))]
      [(Position(epoch=0, batch=1), 4), (Position(epoch=0, batch=2), 4), (Position(epoch=1, batch=0), 2)]
    """
    call = "funcrec.data.batches"
    check(call, data_problems(data), batch_problems(rows, batch_size, position))
    check(call, flag_problems(drop_last, "drop_last"), flag_problems(bucket, "bucket"))
    check(call, row_problems(rows.cpu(), data.num_rows) if rows is not None else ())
    if key is not None:
        random.check_key(call, key)
    rows = torch.arange(data.num_rows) if rows is None else rows.clone()  # what was looked at is what is read
    count = num_batches(rows.shape[0], batch_size, drop_last=drop_last)
    check(call, epoch_problems(rows.shape[0], batch_size, count, position))
    return _epoch(data, rows, batch_size, key, Position(*position), count, bucket)


def num_batches(num_rows: int, batch_size: int, *, drop_last: bool = False) -> int:
    """The batches of an epoch."""
    call = "funcrec.data.num_batches"
    check(call, count_problems(num_rows, "num_rows", 0), count_problems(batch_size, "batch_size"))
    check(call, flag_problems(drop_last, "drop_last"))
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


def _epoch(data, rows, batch_size, key, position, count, bucket) -> Iterator[tuple[Position, Batch]]:
    epoch = position.epoch
    if key is not None:
        own = random.fold_in(key, epoch).to(rows.device)
        rows = rows.index_select(0, random_order(own, rows.shape[0]))
    for i in range(position.batch, count):
        batch = data.take(rows[i * batch_size : (i + 1) * batch_size])
        batch = replace(batch, ids=pad_to_bucket(batch.ids)) if bucket else batch
        yield Position(epoch, i + 1) if i + 1 < count else Position(epoch + 1, 0), batch


def data_problems(data: object) -> Iterator[Problem]:
    if not (hasattr(data, "num_rows") and hasattr(data, "take")):
        yield Problem(
            "`data` has no rows.",
            describe(data),
            "a value with `num_rows` and `take(rows)`",
            "fr.data.random_rows(fr.key(0), {'item': 100}, num_rows=50)",
            TypeError,
        )


def epoch_problems(num_rows: int, batch_size: int, count: int, position: Position) -> Iterator[Problem]:
    """An epoch must have a batch, and the position must be before its end: a loop over epochs would never come on."""
    if count == 0:
        need = f"at least {batch_size} rows" if num_rows else "a row or more"
        yield Problem(
            "`rows` do not make a batch.", f"{num_rows} rows", need, "drop_last=False, or a smaller batch_size"
        )
    elif position[1] >= count:
        need, hint = f"batch < {count}, the batches of an epoch", "the position that came with the last batch"
        yield Problem("`position` is behind the end of its epoch.", f"{tuple(position)}", need, hint)


def batch_problems(rows: Tensor | None, batch_size: int, position: Position) -> Iterator[Problem]:
    if rows is not None:
        yield from int_problems(rows, "rows")
    yield from count_problems(batch_size, "batch_size")
    whole = isinstance(position, tuple) and len(position) == 2 and all(type(x) is int for x in position)
    if not whole:
        yield Problem("`position` is not a position.", describe(position), "Position(epoch, batch)", kind=TypeError)
    elif min(position) < 0:
        yield Problem("`position` is negative.", f"{position}", "epoch >= 0 and batch >= 0")

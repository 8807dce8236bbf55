"""Batches of one epoch in a random order, from a starting position that checkpoints save.

    batch i of epoch e = take(data, rows[order(key, e)][i · B : (i + 1) · B])

The order depends on the key and the epoch only. So a checkpoint needs only a position, which is two integers. Any
number of threads may make the batches. Shapes: N rows, B rows of a batch.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from funcrec.core import Count, Device, Form, Key, Problem, Size, check, describe, fail, random, replace, typed
from funcrec.data._prefetch import device_problems, in_threads, prefetch
from funcrec.data.datasets._ctr import random_order
from funcrec.data.readers._rows import row_problems
from funcrec.jagged import pad_to_bucket
from funcrec.tables import Batch


class RowData(Protocol):
    """Data whose rows can be taken in any order, such as `CtrData`, `CriteoArrays`, or a class of the user."""

    @property
    def num_rows(self) -> int: ...

    def take(self, rows: Tensor) -> Batch: ...


class Position(NamedTuple):
    """The next batch to read: number `batch` of epoch `epoch`. It is a plain pair of integers, for checkpoints."""

    epoch: int = 0
    batch: int = 0


Rows = Annotated[Tensor, Form("i[N]")]
At = tuple[Size, Size]  # a Position, or a plain pair


@typed
def take(data: RowData, rows: Tensor) -> Batch:
    """Return the batch of these row numbers i[B], in the given order and with repeats.

    Raises:
      TypeError: rows are not integers.
      ValueError: the data lacks a row. Inside `jit` no value can be read; there the label of such a row is NaN.

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


@typed
def batches(
    data: RowData,
    rows: Rows | None,
    batch_size: Count,
    *,
    key: Key | None = None,
    position: At = Position(),  # noqa: B008
    drop_last: bool = False,
    pad_last: bool = False,
    bucket: bool = False,
) -> Iterator[tuple[Position, Batch]]:
    """Return an iterator over the rest of one epoch: pairs of the position after a batch, and the batch.

    Save this position once the batch is trained on.

    Args:
      data: `CtrData`, `CriteoArrays` or any value with `num_rows` and `take`.
      rows: i64[N], the rows to read; None reads all rows.
      key: shuffles by (key, position.epoch). None keeps the order of `rows`.
      position: where to begin. The last batch comes with Position(epoch + 1, 0), where the next epoch begins.
      drop_last: leave out a last batch that is not full. Otherwise the last batch has fewer bags, and a compiled step
        compiles once more for it.
      pad_last: fill up a last batch that is not full with copies of its last row, of weight 0. The copies bring no new
        ids, and count in no metric, nor in a loss that reads `batch.weight`. A loss of your own must read the weight,
        Σ w l / Σ w; `fr.fit` refuses a `train_step` whose loss does not. Every batch then has weights, 1 if the data
        have none. Every batch also has the shapes of a full batch. Only the number of ids may differ: see `bucket`.
      bucket: pad the ids by `fr.pad_to_bucket`, for data whose batches differ in their number of ids.

    Raises:
      TypeError, ValueError: the data lacks a row, the position is after the last batch of the epoch, or an epoch has no
        batch. The call raises, not the first batch.

    Law: an epoch has every row once. The batches from a position equal those that follow it in a whole epoch.

    Example:
      >>> import funcrec as fr
      >>> from funcrec.data import Position, batches, random_rows
      >>> data = random_rows(fr.key(0), {"item": 100}, num_rows=10)
      >>> [(p, b.label.shape[0]) for p, b in batches(data, None, 4, key=fr.key(1))]
      [(Position(epoch=0, batch=1), 4), (Position(epoch=0, batch=2), 4), (Position(epoch=1, batch=0), 2)]
      >>> [b.weight.tolist() for _, b in batches(data, None, 6, pad_last=True)]
      [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    """
    call = "funcrec.data.batches"
    load = _loader_of(call, data, rows, batch_size, key, drop_last, pad_last, bucket)
    check(call, epoch_problems(load, position))
    return _epoch(load, Position(*position))


def refuse_iteration(call: str) -> NoReturn:
    what = "a loader is called once for each epoch; it is not an iterable."
    need = "a position, (epoch, batch), where to begin"
    hint = "for position, batch in load(position)"
    fail(call, what, got="iter(load)", need=need, hint=hint, kind=TypeError)


@dataclass(frozen=True, eq=False, repr=False)
class Loader:
    """Batches of any epoch, from any starting position. `loader` makes a Loader, and `fr.fit` trains on it.

    A call with a position returns the rest of that epoch, as `batches` does. The length of a Loader is `count`, the
    number of batches in an epoch.

    Example:
      >>> import funcrec as fr
      >>> from funcrec.data import Position, loader, random_rows
      >>> load = loader(random_rows(fr.key(0), {"item": 100}, num_rows=10), None, 4, key=fr.key(1))
      >>> len(load), [position for position, batch in load(Position(epoch=5, batch=1))]
      (3, [Position(epoch=5, batch=2), Position(epoch=6, batch=0)])
    """

    data: RowData
    rows: Tensor
    batch_size: int
    key: Tensor | None
    pad_last: bool
    bucket: bool
    count: int
    workers: int = 0
    depth: int = 1
    device: Device | None = None
    look: Callable[[tuple[Position, Batch]], Any] | None = None  # it sees each item before the device does

    @typed(call="funcrec.data.Loader")
    def __call__(self, position: At = Position()) -> Iterator[tuple[Position, Batch]]:  # noqa: B008
        check("funcrec.data.Loader", epoch_problems(self, position))
        made = _epoch(self, Position(*position))
        made = made if self.look is None else (self.look(item) for item in made)
        return made if self.device is None else prefetch(made, depth=self.depth, device=self.device)

    def __len__(self) -> int:
        return self.count

    if not TYPE_CHECKING:  # an editor marks the loop

        def __iter__(self) -> NoReturn:
            refuse_iteration("funcrec.data.Loader")

    def __repr__(self) -> str:
        return f"Loader({len(self)} batches of {self.batch_size})"

    @property
    def order(self) -> dict[str, Any]:
        """Return the settings that determine the rows of each batch. With equal settings, positions mean the same."""
        key, rows = None if self.key is None else int(self.key), zlib.crc32(self.rows.cpu().numpy().data)
        return {"batch_size": self.batch_size, "key": key, "count": self.count, "rows": rows}


@typed
def loader(
    data: RowData,
    rows: Rows | None,
    batch_size: Count,
    *,
    key: Key | None = None,
    drop_last: bool = False,
    pad_last: bool = False,
    bucket: bool = False,
    workers: Size = 0,
    depth: Count = 2,
    device: Device | None = None,
) -> Loader:
    """Return a Loader: a function from a position to the rest of its epoch, as `batches` returns it.

    Args:
      data, rows, batch_size, key, drop_last, pad_last, bucket: as in `batches`.
      workers: threads that make batches in advance. 0 makes each batch when it is requested. Several threads call
        `take` at the same time. Its result must depend on nothing except the rows. To use processes, see `collate`.
      depth: how many batches are ready ahead of the consumer; at least one for each worker.
      device: where the batches go, as in `prefetch`.

    Law: the batches are those of `batches`, bit for bit and in order, with any number of workers.

    Example:
      >>> import funcrec as fr
      >>> from funcrec.data import loader, random_rows
      >>> load = loader(random_rows(fr.key(0), {"item": 100}, num_rows=10), None, 4, key=fr.key(1), workers=2)
      >>> [batch.label.shape[0] for _, batch in load()]
      [4, 4, 2]
    """
    call = "funcrec.data.loader"
    load = _loader_of(call, data, rows, batch_size, key, drop_last, pad_last, bucket)
    check(call, epoch_problems(load, Position()), device_problems(device))
    return replace(load, workers=workers, depth=depth, device=device)


@typed
def num_batches(num_rows: Size, batch_size: Count, *, drop_last: bool = False) -> int:
    """Return the number of batches of an epoch."""
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


def _loader_of(call: str, data, rows, batch_size, key, drop_last, pad_last, bucket) -> Loader:
    check(call, data_problems(data))
    check(call, row_problems(rows.cpu(), data.num_rows) if rows is not None else (), last_problems(drop_last, pad_last))
    rows = torch.arange(data.num_rows) if rows is None else rows.clone()  # later writes to `rows` have no effect
    count = num_batches(rows.shape[0], batch_size, drop_last=drop_last)
    return Loader(data, rows, int(batch_size), key, pad_last, bucket, count)


def _epoch(load: Loader, position: Position) -> Iterator[tuple[Position, Batch]]:
    (epoch, first), rows = position, load.rows
    if load.key is not None:
        own = random.fold_in(load.key, epoch).to(rows.device)
        rows = rows.index_select(0, random_order(own, rows.shape[0]))
    make, numbers = (lambda i: _batch(load, rows, i)), range(first, load.count)
    made = in_threads(make, numbers, load.workers, load.depth) if load.workers else map(make, numbers)
    for i, batch in zip(numbers, made, strict=True):
        yield Position(epoch, i + 1) if i + 1 < load.count else Position(epoch + 1, 0), batch


def _batch(load: Loader, rows: Tensor, i: int) -> Batch:
    own = rows[i * load.batch_size : (i + 1) * load.batch_size]
    if not load.pad_last:
        batch = load.data.take(own)
    else:
        batch = load.data.take(torch.cat([own, own[-1:].expand(load.batch_size - own.shape[0])]))
        if not isinstance(batch, Batch):
            what, need = "`take` did not make a batch that can have weights.", "a fr.Batch, for pad_last=True"
            fail("funcrec.data.batches", what, got=describe(batch), need=need, hint="pad_last=False", kind=TypeError)
        is_own = torch.arange(load.batch_size, device=own.device) < own.shape[0]
        weight = torch.ones_like(is_own, dtype=torch.float32) if batch.weight is None else batch.weight
        batch = replace(batch, weight=torch.where(is_own.to(weight.device), weight, 0))
    return replace(batch, ids=pad_to_bucket(batch.ids)) if load.bucket else batch


# -- validators ------------------------------------------------------------------------------------------------------


def is_row_data(data: object) -> bool:
    return hasattr(data, "num_rows") and hasattr(data, "take")


def last_problems(drop_last: bool, pad_last: bool) -> Iterator[Problem]:
    if drop_last and pad_last:
        got = "drop_last=True and pad_last=True"
        yield Problem("`pad_last` has no last batch to fill up.", got, "one of them", "drop_last=False")


def data_problems(data: object) -> Iterator[Problem]:
    if not is_row_data(data):
        got, hint = describe(data), "fr.data.examples({'item': [3, 5]}, fr.data.Schema(categorical=('item',)))"
        yield Problem("`data` has no rows.", got, "a value with `num_rows` and `take(rows)`", hint, TypeError)


def epoch_problems(load: Loader, position: tuple[int, int]) -> Iterator[Problem]:
    """Yield problems if an epoch has no batch or if the position is after its end. A loop over epochs would not end."""
    if load.count == 0:
        num_rows = load.rows.shape[0]
        need = f"at least {load.batch_size} rows" if num_rows else "a row or more"
        hint = "drop_last=False, or a smaller batch_size"
        yield Problem("`rows` do not make a batch.", f"{num_rows} rows", need, hint)
    elif position[1] >= load.count:
        need, hint = f"batch < {load.count}, the batches of an epoch", "the position that came with the last batch"
        yield Problem("`position` is past the end of its epoch.", f"{tuple(position)}", need, hint)

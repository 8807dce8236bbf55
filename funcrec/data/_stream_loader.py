"""Batches of a source that is larger than memory, from any position of any epoch.

batch i of epoch e = encode(table i of stream(source, key=fold_in(key, e)))
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Count, Device, Key, Size, check, describe, fail, random, replace, sure, typed
from funcrec.data._examples import Examples, examples_of, whole
from funcrec.data._loader import At, Position, last_problems, refuse_iteration
from funcrec.data._prefetch import device_problems, in_threads, prefetch
from funcrec.data.encoders._encoding import Encoding
from funcrec.data.encoders._encoding import encode as encode_by
from funcrec.data.readers import _columns as columns_of
from funcrec.data.readers._files import Format, is_path, opened
from funcrec.data.readers._rank_parts import RankOf, last_batch_problems, share_of
from funcrec.data.readers._schema import Schema
from funcrec.data.readers._sources import Source, table_of
from funcrec.data.readers._stream import WINDOW, row_name, tables
from funcrec.jagged import pad_to_bucket
from funcrec.tables import Batch

CALL = "funcrec.data.stream_loader"


@dataclass(frozen=True)
class StreamLoader:
    """A loader over a source, as `stream_loader` returns it. A call with a position returns the rest of that epoch.

    `operator.length_hint(load)` is the number of batches in an epoch, if the source knows it. Text does not.

    Example:
      >>> import operator
      >>> from funcrec.data import Position, Schema, stream_loader
      >>> load = stream_loader({"item": [3, 4, 5]}, Schema(categorical=("item",)), 2)
      >>> operator.length_hint(load), [position for position, batch in load(Position(epoch=5, batch=1))]
      (2, [Position(epoch=6, batch=0)])
    """

    source: Any  # a Source
    encode: Callable[[Any], Examples | Batch]
    batch_size: int
    key: Tensor | None
    window: int
    drop_last: bool
    pad_last: bool
    bucket: bool
    workers: int
    depth: int
    device: Device | None
    share: Any  # a rank's Share of the source; None without ranks
    given: dict[str, Any]  # the arguments of `stream_loader`, to make a copy in another process
    look: Callable[[tuple[Position, Batch]], Any] | None = None  # it sees each item before the device does

    @typed(call=CALL)
    def __call__(self, position: At = Position()) -> Iterator[tuple[Position, Batch]]:  # noqa: B008
        made = _positions(self, Position(*position))
        made = made if self.look is None else (self.look(item) for item in made)
        return made if self.device is None else prefetch(made, depth=self.depth, device=self.device)

    if not TYPE_CHECKING:  # an editor marks the loop

        def __iter__(self) -> NoReturn:
            refuse_iteration("funcrec.data.StreamLoader")

    def __length_hint__(self) -> int:
        if self.share is not None:
            return self.share.num_batches
        counts = [part.num_rows for part in self.source.parts]
        if None in counts:
            return NotImplemented
        return sum(counts) // self.batch_size if self.drop_last else -(-sum(counts) // self.batch_size)

    @property
    def order(self) -> dict[str, Any]:
        """Return the settings and the numbers of the source that determine the rows of each batch.

        A file of which only bytes in the middle changed has the same numbers.
        """
        key = None if self.key is None else int(self.key)
        ranks = {} if self.share is None else {"ranks": self.given["rank_of"][1]}
        return {"batch_size": self.batch_size, "key": key, "window": self.window, **ranks, **self.source.content}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments that pickle saves. A path is saved as it is and opened again. A table is saved whole."""
        source = self.given["source"]
        if not is_path(source) and not isinstance(source, Sequence):
            source = table_of(CALL, self.source).combine_chunks()
        return partial(stream_loader, **self.given | {"source": source}), ()

    def __repr__(self) -> str:
        return f"StreamLoader({self.source.name}, batches of {self.batch_size})"


@typed
def stream_loader(
    source: object,
    encode: Schema | Encoding | Callable[..., Any],
    batch_size: Count,
    *,
    columns: Sequence[str] | None = None,
    format: Format = None,
    key: Key | None = None,
    window: Count = WINDOW,
    drop_last: bool = False,
    pad_last: bool = False,
    bucket: bool = False,
    workers: Size = 0,
    depth: Count = 2,
    device: Device | None = None,
    rank_of: RankOf = None,
) -> StreamLoader:
    """Return a loader for `fr.fit` that reads a source larger than memory.

    Args:
      source, format, window, drop_last: as in `stream`.
      encode: a Schema, if the ids are integers; an Encoding; or a function from a pyarrow.Table to Examples.
      columns: the columns that such a function gets. None passes all columns.
      key: shuffles by (key, epoch).
      pad_last: fill up a last batch that is not full with copies of its last row, of weight 0, as `batches` does.
      bucket: pad the ids by `fr.pad_to_bucket`.
      workers, depth, device: as in `loader`. The threads encode; one separate thread reads.
      rank_of: as in `stream`. It requires `drop_last` or `pad_last`. A batch has `batch_size` rows of this rank, and
        every rank takes as many batches: with `drop_last` as the rank with the fewest rows; with `pad_last` as the rank
        with the most rows, and the others end with batches of weight 0.

    Returns:
      a function load(position=Position()) that returns an iterator of (position after the batch, batch), as `batches`.

    Raises:
      TypeError, ValueError: the schema of the source does not fit. The call raises it.
      ValueError: a row cannot be read or encoded. The iterator raises it, and it names the file and the row.

    Law: an epoch has every row once. The batches of load(position) equal those that follow the position in the epoch.

    Example:
      >>> from funcrec.data import Schema, stream_loader
      >>> table = {"click": [1, 0, 1], "item": [3, 4, 5]}
      >>> load = stream_loader(table, Schema(label="click", categorical=("item",)), 2)
      >>> [(position, batch.ids.to_lists()) for position, batch in load()]
      [(Position(epoch=0, batch=1), {'item': [[3], [4]]}), (Position(epoch=1, batch=0), {'item': [[5]]})]
    """
    given = dict(locals())
    check(CALL, last_problems(drop_last, pad_last), device_problems(device))
    check(CALL, last_batch_problems(rank_of, drop_last, pad_last))
    if isinstance(encode, Encoding):
        names = opened(CALL, source, None, format).schema.names
        found = opened(CALL, source, [n for n in encode.schema.columns if n in names], format)
        make = lambda table: encode_by(encode, table)
    elif isinstance(encode, Schema):
        found = opened(CALL, source, encode, format)
        check(CALL, columns_of.type_problems(found.schema, encode))
        make = lambda table: examples_of(CALL, table, encode, {})
    else:
        found, make = opened(CALL, source, columns, format), encode
    share = share_of(CALL, found, rank_of, batch_size, drop_last)
    own = (batch_size, key, window, drop_last, pad_last, bucket, workers, depth, device, share)
    return StreamLoader(found, make, *own, given)


def _positions(load: StreamLoader, position: Position) -> Iterator[tuple[Position, Batch]]:
    """Yield (position after the batch, batch). With the last batch comes the first position of the next epoch."""
    (epoch, number), key = position, load.key
    numbered = _numbered(load, None if key is None else random.fold_in(key, epoch), number)
    make = lambda item: _made(load, *item)
    found = in_threads(make, numbered, load.workers, load.depth) if load.workers else map(make, numbered)
    batch = next(found, None)
    if batch is None:
        need, hint = "a batch of the epoch", "the position that came with the last batch"
        fail(CALL, "`position` is past the end of its epoch.", got=f"{tuple(position)}", need=need, hint=hint)
    for following in chain(found, (None,)):
        number, batch = number + 1, sure(batch)
        yield (Position(epoch, number) if following is not None else Position(epoch + 1, 0)), batch
        batch = following


def _numbered(load: StreamLoader, key: Tensor | None, skip: int) -> Iterator[tuple[np.ndarray, Any, int]]:
    """Yield (numbers of the rows, table, rows that count) of the batches after the first `skip`.

    A rank whose own rows end early repeats its last row, which does not count.
    """
    size, share = load.batch_size, load.share
    if share is None:
        found = tables(CALL, load.source, size, key=key, window=load.window, skip=skip, drop_last=load.drop_last)
        yield from ((rows, table, len(rows)) for rows, table in found)
        return
    own = -(-sum(part.num_rows for part in share.source.parts) // size)
    first = min(skip, own - 1) if load.pad_last else skip
    found = tables(CALL, share.source, size, key=key, window=load.window, skip=first, drop_last=load.drop_last)
    number, rows, table = first, np.empty(0), None
    for rows, table in islice(found, max(share.num_batches - first, 0)):
        if number >= skip:
            yield rows, table, len(rows)
        number += 1
    for _ in range(max(number, skip), share.num_batches if table is not None else 0):
        yield rows[-1:], sure(table).slice(len(rows) - 1), 0


def _made(load: StreamLoader, rows: np.ndarray, table, count: int) -> Batch:
    source = load.source if load.share is None else load.share.source
    if not load.pad_last:
        return to_batch(source, load.encode, rows, table, load.bucket)
    at = np.minimum(np.arange(load.batch_size), len(rows) - 1)
    batch = to_batch(source, load.encode, rows[at], table.take(at) if len(rows) < len(at) else table, load.bucket)
    weight = torch.ones(len(at)) if batch.weight is None else batch.weight
    return replace(batch, weight=torch.where(torch.arange(len(at)) < count, weight, 0))


def to_batch(source: Source, encode: Callable, rows: np.ndarray, table, bucket: bool = False) -> Batch:
    """Return the batch of one encoded table. Errors name a row by its number in the file."""
    with columns_of.rows_named(lambda r: row_name(source, int(rows[r]))):
        made = encode(table)
    if not isinstance(made, Examples | Batch):
        what, need = "`encode` did not make examples.", "a function of a pyarrow.Table to Examples"
        fail(CALL, what, got=describe(made), need=need, hint="a Schema, where ids are integers", kind=TypeError)
    batch = whole(made) if isinstance(made, Examples) else made
    return replace(batch, ids=pad_to_bucket(batch.ids)) if bucket else batch

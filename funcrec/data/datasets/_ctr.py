"""MovieLens ratings as a click-through task: RecBole's `ml-1m_context` protocol.

label = rating >= 4, without ratings of 3;   80 / 10 / 10 of the rows at random

There are seven columns. One column has the genres of the item: several ids, with a separate table. The other six
columns have one id each and share one table. The id of column c is offset_c + number, where offset_c is the sum of the
vocabularies before column c. An eighth column, "history", may have the items that the user clicked before.
Shapes: N rows, B rows of a batch, U users, I items, L the most genres of an item, M clicks to train on, H the longest
history.

Source: RUCAIBox/RecBole, branch 1.1.x, benchmark/md/ml-1m_context.md.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Finite, Size, Within, check, fail, pytree, random, replace, sure, typed
from funcrec.data.datasets._movielens import Ratings
from funcrec.data.readers._rows import marked, row_problems, there
from funcrec.jagged import KeyedJaggedTensor, offsets_of
from funcrec.tables import Batch

SPLIT_SEED = 2020  # RecBole's seed; another split moves a test AUC by up to 0.004
USER_COLUMNS = ("user_id", "age", "gender", "occupation")
ITEM_COLUMNS = ("item_id", "release_year")
FIELDS = ("user_id", "item_id", "age", "gender", "occupation", "release_year")


class Column(NamedTuple):
    """A column of ids offset + 1, ..., offset + vocabulary - 1. The id `offset` is its padding."""

    name: str
    table: str
    vocabulary: int
    offset: int


@pytree(static=("longest",))
class CtrHistories:
    """The clicks that each row's user made before the row, in order of time.

    Args:
      clicks: i32[M], the items of the clicks, by user and then by time.
      begin, end: i32[N]. Row n has the history clicks[begin[n]:end[n]].
      longest: H.
    """

    clicks: Tensor
    begin: Tensor
    end: Tensor
    longest: int


@pytree(static=("columns",), optional=("histories",))
class CtrData:
    """Rows (user, item, label), with the ids of each user and each item. They take a few MB, on any device.

    Args:
      user: i32[N], the row of `user_columns` that belongs to the user.
      item: i32[N], the row of `item_columns` and `genre` that belongs to the item.
      label: f32[N], 0 or 1.
      user_columns: {name: i64[U]}, the ids, with the offset added.
      item_columns: {name: i64[I]}, the ids, with the offset added.
      genre: i64[I, L]. Only the first `genre_length` ids of a row are genres.
      genre_length: i64[I].
      columns: the columns of a batch, in the order of its keys.
      histories: what the column "history" has, or None.
    """

    user: Tensor
    item: Tensor
    label: Tensor
    user_columns: dict[str, Tensor]
    item_columns: dict[str, Tensor]
    genre: Tensor
    genre_length: Tensor
    columns: tuple[Column, ...]
    histories: CtrHistories | None = None

    @property
    def num_rows(self) -> int:
        return self.label.shape[0]

    @property
    def table_sizes(self) -> dict[str, int]:
        """Return num_embeddings of the two tables: {"genre": 19, "fields": 10040} for MovieLens-1M."""
        return {c.table: c.offset + c.vocabulary for c in self.columns}

    def take(self, rows: Tensor) -> Batch:
        """Return the batch of these rows, as `funcrec.data.take` describes it."""
        return take_rows(self, rows)

    def __repr__(self) -> str:
        return f"CtrData({self.num_rows} rows, tables={self.table_sizes})"


class CtrSplit(NamedTuple):
    """The data and the row numbers, i64, of the three parts."""

    data: CtrData
    train: Tensor
    valid: Tensor
    test: Tensor


@typed
def ctr_dataset(
    ratings: Ratings,
    *,
    seed: int = SPLIT_SEED,
    drop: tuple[Finite, ...] = (3.0,),
    threshold: Finite = 4.0,
    holdout: Annotated[float, Within("0 < holdout < 0.5", lambda x: 0 < x < 0.5)] = 0.1,
    history: Size = 0,
) -> CtrSplit:
    """Return the click-through data of these ratings, and the row numbers of its three parts.

    Args:
      seed: torch.randperm's seed for the split; the default gives the split of the published numbers.
      drop: the ratings that are left out.
      threshold: the lowest rating that counts as a click.
      holdout: the share of the rows that goes to validation. The test gets the same share.
      history: the most ids of a column "history", the items of the user's last clicks before the row. 0 means no such
        column. Only clicks of rows to train on count, so that no label of another part is read. Clicks in the same
        second as the row do not count.

    Returns:
      (data, train, valid, test). For MovieLens-1M: data of 739,012 rows, and parts of 591,210, 73,901 and 73,901 rows.
    """
    kept = ~torch.isin(ratings.rating, torch.tensor(drop))
    data = ctr_data(ratings, kept, threshold)
    held = int(holdout * data.num_rows)
    if held == 0:
        got = f"{data.num_rows} of {ratings.num_ratings} ratings kept, holdout={holdout}"
        need = "one row for each part, or more"
        fail("funcrec.data.ctr_dataset", "there are too few rows to split.", got=got, need=need)
    order = torch.randperm(data.num_rows, generator=torch.Generator().manual_seed(seed))
    parts = order.split([data.num_rows - 2 * held, held, held])
    if history:
        data = with_history(data, ratings.timestamp[kept], parts[0], history)
    return CtrSplit(data, *parts)


def with_history(data: CtrData, timestamp: Tensor, train: Tensor, longest: int) -> CtrData:
    """Return the data with the column "history"."""
    clicked = torch.zeros(data.num_rows, dtype=torch.bool)
    clicked[train] = data.label[train] == 1
    rank = torch.unique(timestamp, return_inverse=True)[1]
    when = data.user.long() * (int(rank.max()) + 1) + rank  # one number that orders by user, then by time
    rows = clicked.nonzero()[:, 0]
    rows = rows[when[rows].argsort(stable=True)]
    end = torch.searchsorted(when[rows], when)
    first = torch.searchsorted(data.user[rows].contiguous(), data.user)
    begin = torch.maximum(first, end - longest)
    histories = CtrHistories(data.item[rows], begin.int(), end.int(), longest)
    name = Column("history", "fields", column_of(data, "item_id").vocabulary, column_of(data, "item_id").offset)
    return replace(data, columns=(data.columns[0], name, *data.columns[1:]), histories=histories)


def column_of(data: CtrData, name: str) -> Column:
    return next(c for c in data.columns if c.name == name)


def ctr_data(ratings: Ratings, kept: Tensor, threshold: float) -> CtrData:
    """Return the click-through data of the ratings for which `kept`, bool[N], is true."""
    sizes = {name: len(tokens) for name, tokens in ratings.vocabularies.items()}
    offsets = {name: sum(sizes[before] for before in FIELDS[:i]) for i, name in enumerate(FIELDS)}
    users = {"user_id": torch.arange(sizes["user_id"]), **ratings.users}
    items = {"item_id": torch.arange(sizes["item_id"]), **ratings.items}
    lengths = ratings.genre.lengths
    return CtrData(
        user=ratings.user[kept],
        item=ratings.item[kept],
        label=(ratings.rating[kept] >= threshold).float(),
        user_columns={name: users[name].long() + offsets[name] for name in USER_COLUMNS},
        item_columns={name: items[name].long() + offsets[name] for name in ITEM_COLUMNS},
        genre=ratings.genre.to_padded(max(int(lengths.max()), 1)).long(),
        genre_length=lengths.long(),
        columns=(
            Column("genre", "genre", sizes["genre"], 0),
            *(Column(name, "fields", sizes[name], offsets[name]) for name in FIELDS),
        ),
    )


def random_order(key: Tensor, count: int) -> Tensor:
    """Return a permutation i64[count] that depends on the key only, on any device."""
    return random.bits(key, (count,)).argsort(stable=True)


def take_rows(data: CtrData, rows: Tensor) -> Batch:
    """Return the batch of row numbers i[B]. No value is read on the host, and the shapes depend on B only.

    Returns:
      ids i64 with capacity B · (L + H + 6), and label f32[B]. The ids are all genres first, then histories, then one id
      per row for each of the six fields, then padding.

    Cost: it reads and writes about 20 ids per row, in 0.4 ms for 4096 rows on one core; a history adds its ids.
    """
    check("funcrec.data.take", row_problems(rows, data.num_rows, data.label.device))
    rows, inside = there(rows, data.num_rows)
    num_rows = rows.shape[0]
    user, item = data.user.index_select(0, rows), data.item.index_select(0, rows)
    fields = {name: ids.index_select(0, user) for name, ids in data.user_columns.items()}
    fields |= {name: ids.index_select(0, item) for name, ids in data.item_columns.items()}
    bags = [(data.genre.index_select(0, item), data.genre_length.index_select(0, item))]
    bags += [] if data.histories is None else [history_of(data, rows)]
    lengths = torch.cat([*(n for _, n in bags), bags[0][1].new_ones(num_rows * len(FIELDS))])
    offsets, capacity = offsets_of(lengths), num_rows * (sum(ids.shape[1] for ids, _ in bags) + len(FIELDS))
    # the padding of bags goes to one place after the buffer
    places = []
    for i, (ids, n) in enumerate(bags):
        nth, start = torch.arange(ids.shape[1], device=rows.device), offsets[i * num_rows : (i + 1) * num_rows, None]
        places.append(torch.where(nth < n[:, None], start + nth, capacity).flatten())
    places.append(offsets[len(bags) * num_rows] + torch.arange(num_rows * len(FIELDS), device=rows.device))
    source = torch.cat([*(ids.flatten() for ids, _ in bags), *(fields[name] for name in FIELDS)])
    buffer = source.new_zeros(capacity + 1).scatter(0, torch.cat(places), source)
    ids = KeyedJaggedTensor(buffer[:capacity], offsets, keys=tuple(c.name for c in data.columns))
    return Batch(ids, marked(data.label.index_select(0, rows), inside))


def history_of(data: CtrData, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the histories of rows, padded i64[B, H], and their lengths i64[B]."""
    h, offset = sure(data.histories), column_of(data, "history").offset
    begin, end = h.begin.index_select(0, rows).long(), h.end.index_select(0, rows).long()
    places = begin[:, None] + torch.arange(h.longest, device=rows.device)
    clicks = torch.cat([h.clicks, h.clicks.new_zeros(1)])  # there may be none
    ids = clicks.index_select(0, places.clamp(max=h.clicks.shape[0]).flatten()).long() + offset
    return ids.view(places.shape), end - begin

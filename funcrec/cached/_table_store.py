"""A store of the rows of tables and of their slots: the tables that a cache holds a part of.

record(row) = the row of `init` and its first slots, until it is written

Shapes: R rows of the tables, W bytes of a record.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrec.cached._records import fields_of, packed
from funcrec.core import Key, Problem, check, random, typed
from funcrec.files import as_path, raise_os
from funcrec.kinds import initializer_problems
from funcrec.mesh import Mesh, Ranks
from funcrec.optim import RowOptimizer
from funcrec.stores import ColdStore, file_store, memory_store
from funcrec.tables import TableConfig, id_rows


@dataclass
class Progress:
    """The step whose state the store belongs to, and that of its last commit. Steps are numbers of a vocabulary."""

    now: int
    committed: int
    is_known: bool = False  # whether a state was compared with the records since the store was opened


@dataclass(frozen=True, eq=False)
class TableStore:
    """A store with a record for each row of some tables: the row, and its slots. `table_store` opens it.

    Args:
      store: the records, R rows of W bytes.
      configs: the tables, of R rows each.
      sparse: the optimizer whose slots the records have.
      fields: the parts of a record: table, slot or None, shape and dtype of each.
      progress: `now` and `committed`, the numbers of the step whose state the store belongs to, and of the last
        commit. They change as the store does.
      part: (i, n): the store has the records of rows i, i + n, i + 2 n, ...; (0, 1) for all rows.

    Example:
      >>> import funcrec as fr
      >>> users = fr.TableConfig("user", num_embeddings=10**6, embedding_dim=4)
      >>> fr.table_store([users], fr.optim.rowwise_adagrad(), key=fr.key(0))
      TableStore(user, 1000000 rows of 20 bytes)
    """

    store: ColdStore
    configs: tuple[TableConfig, ...]
    sparse: RowOptimizer
    fields: tuple[Any, ...]
    progress: Any
    part: tuple[int, int] = (0, 1)

    def __repr__(self) -> str:
        names, (i, n) = ", ".join(c.name for c in self.configs), self.part
        own = "" if n == 1 else f", of which it has every {n}th from {i} on"
        return f"TableStore({names}, {self.num_rows} rows of {self.store.width} bytes{own})"

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the tables."""
        return self.configs[0].num_embeddings

    def close(self) -> None:
        """Close the store. What was not committed is undone when it is opened again."""
        self.store.close()


@typed
def table_store(
    configs: Sequence[TableConfig],
    sparse: RowOptimizer,
    *,
    key: Key,
    path: str | os.PathLike[str] | None = None,
    durable: bool = True,
    mesh: Mesh | None = None,
) -> TableStore:
    """Return a store with a record for each row of some tables, for `cached_tables`. Rows are drawn when they are read.

    Args:
      configs: tables of one number of rows, which the same ids read. Each has one of funcrec's initializers.
      sparse: the optimizer that will train them; its slots are parts of the records.
      key: the key that draws the rows, such as that of `init`.
      path: a folder, which is made or opened, as in `file_store`; None keeps the records in memory.
      durable: as in `file_store`.
      mesh: that of the step. Each of n real ranks gets a store of every n-th row, in a folder of its own within `path`:
        "part-0-of-4" and so on. An emulated mesh has one store, as one process has.

    Raises:
      ValueError, TypeError: the tables differ in their numbers of rows, an initializer is not one of funcrec's, a slot
        belongs to no row, or the folder holds another store.

    Law: before its first write, row r of a table is row r of `init(key, configs)`, and its slots are those that
      `sparse.init` gives to it.

    Example:
      >>> import torch, funcrec as fr
      >>> users, key = fr.TableConfig("user", 1000, 2, initializer=fr.normal(0.1)), fr.key(0)
      >>> store = fr.table_store([users], fr.optim.sgd(), key=key)
      >>> record = store.store.read(torch.tensor([7]))
      >>> bool((record.view(torch.float32) == fr.init(key, [users])["user"][7]).all())
      True
    """
    ranks = Ranks.of(mesh)
    part = number, count = ranks.rank, ranks.size
    check("funcrec.table_store", config_problems(configs), part_problems(configs, count))
    random.check_key("funcrec.table_store", key)
    fields, first_key = fields_of(configs, sparse), key.detach().cpu().clone()

    def first(rows: Tensor) -> Tensor:
        tables = {c.name: id_rows(first_key, c, rows * count + number) for c in configs}
        return packed(fields, tables, sparse.init(tables))

    form: dict[str, Any] = {"dtype": torch.uint8, "init": first}
    num_rows, width = -(-(configs[0].num_embeddings - number) // count), sum(f.size for f in fields)
    if path is None:
        store = memory_store(num_rows, width, **form)
    else:
        own = path if count == 1 else part_of(path, number, count)
        store = file_store(own, num_rows, width, durable=durable, **form)
    last = store.rollback()
    return TableStore(store, tuple(configs), sparse, fields, Progress(last, last), part)


def has(store: TableStore, rows: Tensor) -> Tensor:
    """Return whether the store has the record of each row, b[M]."""
    return rows % store.part[1] == store.part[0]


def read_own(store: TableStore, rows: Tensor) -> Tensor:
    """Return the records of those of the rows that the store has, in their order, u8[m, W]."""
    return store.store.read(rows[has(store, rows)] // store.part[1])


def write_own(store: TableStore, rows: Tensor, records: Tensor) -> None:
    """Write the records u8[M, W] of those of the rows that the store has."""
    own = has(store, rows)
    store.store.write(rows[own] // store.part[1], records[own])


def part_of(path: str | os.PathLike, number: int, count: int) -> Path:
    """Return the folder of a rank's store within `path`, which is made."""
    folder = as_path("funcrec.table_store", path, "folder", '"runs/rows"')
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise_os("funcrec.table_store", error, f"`{folder}` cannot be made.", "a folder", "another path")
    return folder / f"part-{number}-of-{count}"


# -- validators --------------------------------------------------------------------------------------------------


def stray_problems(name: str, store: TableStore, ids: Tensor) -> Iterator[Problem]:
    """Report ids that are not rows of a store."""
    num_rows = store.num_rows
    stray = ids[(ids < 0) | (ids >= num_rows)]
    if len(stray):
        got, need = f"id {int(stray[0])}", f"0 <= id < {num_rows}"
        yield Problem(f"ids of cache {name!r} are not rows of its store.", got, need, kind=IndexError)


def part_problems(configs: Sequence[TableConfig], count: int) -> Iterator[Problem]:
    """Report tables with fewer rows than there are ranks."""
    if configs and configs[0].num_embeddings < count:
        got, need = f"{configs[0].num_embeddings} rows", f"at least {count}, one for each rank"
        yield Problem("a rank has no row of the tables.", got, need, "the tables whole in memory")


def config_problems(configs: Sequence[TableConfig]) -> Iterator[Problem]:
    if not configs:
        yield Problem("`configs` are empty.", "no table", "one table or more", 'fr.TableConfig("user", 1000, 8)')
        return
    sizes = {c.name: c.num_embeddings for c in configs}
    if len(set(sizes.values())) > 1:
        yield Problem("`configs` differ in their numbers of rows.", f"{sizes}", "one number", "a store for each number")
    if len(sizes) < len(configs):
        yield Problem("`configs` name a table twice.", f"{[c.name for c in configs]}", "one config for each table")
    for config in configs:
        yield from initializer_problems(config)

"""Draw the initial rows of tables.

    table[r] = initializer(fold_in(key, name), row r)

Row r depends only on the key, the table's name, r and the config. So any shard of any mesh draws its own rows.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.core import Device, Key, check, random, typed, written
from funcrec.kernels.memory import empty_table
from funcrec.kernels.reference_draws import starts_of
from funcrec.tables._checks import table_list_problems
from funcrec.tables._configs import TableConfig
from funcrec.tables._initializers import Initializer, drawing, drawn

INIT_BLOCK = 1 << 20  # elements of one draw; the generator's i64 counters take eight bytes per element


@typed
def init(key: Key, tables: Sequence[TableConfig], *, device: Device | None = None) -> dict[str, Tensor]:
    """Return the initial tables -> {name: [num_embeddings, embedding_dim]}, each in the dtype of its config.

    On device meta, the tables have shapes only.

    Law: row r of a table depends on the key, the table's name, r and the config only.

    Example:
      >>> import funcrec as fr
      >>> weights = fr.init(fr.key(0), [fr.TableConfig("item", num_embeddings=10, embedding_dim=4)])
      >>> weights["item"].shape
      torch.Size([10, 4])
    """
    random.check_key("funcrec.init", key)
    check("funcrec.init", table_list_problems(tables))
    return {t.name: init_rows(key, t, 0, t.num_embeddings, device=device) for t in tables}


def init_rows(key: Tensor, table: TableConfig, start: int, stop: int, *, device=None) -> Tensor:
    """Return rows [start, stop) of the table that `init` makes, without drawing the other rows."""
    shape = (stop - start, table.embedding_dim)
    device = key.device if device is None else torch.device(device)
    if device.type == "meta":
        return torch.empty(shape, dtype=table.dtype, device=device)
    own = random.fold_in(key, name_number(table.name)).to(device)
    step = shape[0] if draws_whole(table, device) else max(INIT_BLOCK // table.embedding_dim, 1)
    if shape[0] <= step:
        return drawn_rows(own, table, start, stop)
    out = empty_table(shape, dtype=table.dtype, device=device)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        out = written(out, (slice(first - start, last - start),), drawn_rows(own, table, first, last))
    return out


def drawn_rows(own: Tensor, table: TableConfig, first: int, last: int) -> Tensor:
    """Return rows [first, last) in one draw. own: the table's key."""
    dim = table.embedding_dim
    if isinstance(table.initializer, Initializer):
        starts = torch.arange(first, last, device=own.device) * dim
        return drawn(table.initializer, own, starts, dim, table.num_embeddings, table.dtype)
    return table.initializer(own, (last - first, dim), first * dim, table.num_embeddings).to(table.dtype)


def draws_whole(table: TableConfig, device: torch.device) -> bool:
    """Return whether a draw takes no more memory than its rows."""
    return isinstance(table.initializer, Initializer) and drawing(device) == "cpp"


def id_rows(key: Tensor, table: TableConfig, ids: Tensor) -> Tensor:
    """Return rows [M, D] of the table that `init` would make, had it 2^40 rows; other ids have rows of their own.

    The config has one of funcrec's initializers.
    """
    own, dim = random.fold_in(key, name_number(table.name)).to(ids.device), table.embedding_dim
    return drawn(
        cast(Initializer, table.initializer), own, starts_of(ids.long(), dim), dim, table.num_embeddings, table.dtype
    )


def table_keys(key: Tensor, tables: Sequence[TableConfig], device: torch.device) -> Tensor:
    """Return the keys that draw the rows of tables, i64[T]."""
    numbers = torch.tensor([name_number(t.name) for t in tables], dtype=torch.int64, device=device)
    return random.fold_in(key.to(device), numbers)


def name_number(name: str) -> int:
    """Return the FNV-1a hash of the name in 31 bits, which is the same in every process, unlike Python's `hash`."""
    number = 0x811C9DC5
    for byte in name.encode():
        number = (number ^ byte) * 0x01000193 % 2**32
    return number >> 1


PER_WORD = 4  # columns that share the 64 bits of one random number
BEHIND = (0, 0, torch.iinfo(torch.int64).max, 0, 0)  # the segment without rows that ends a list of segments


def origin_of(table: str, dim: int, row: Any = 0, column: Any = 0, begin: Any = 0) -> tuple[Any, ...]:
    """Return a segment, which says from which table the rows from `begin` on come.

    Row `begin` is row `row` of a table [R, dim], from column `column` on. The segment is five integers or i64[M]: the
    table's number, the words before the segment's row 0, `begin`, the first column's place in its word, and the words
    of a whole row.
    """
    words = -(-dim // PER_WORD)
    return name_number(table), (row - begin) * words + column // PER_WORD, begin, column % PER_WORD, words

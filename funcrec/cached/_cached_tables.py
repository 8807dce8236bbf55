"""Tables of which a part is in memory: dynamic tables, whose vocabulary says which rows of a store they hold now.

    cached[find(vocabulary, row)] == the row of the whole table, if the vocabulary has the row;      else NaN

Shapes: C rows in memory, R rows of the store.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from funcrec.cached._table_store import TableStore
from funcrec.core import Count, Device, Problem, check, random, reported, typed, typed_fields
from funcrec.kinds import STORED, DynamicTables, Vocabulary, columns_of, owner_problems, plain_problems, vocabulary
from funcrec.tables import FeatureConfig, TableConfig, table_tensor_problems


@typed_fields
class CacheConfig(NamedTuple):
    """A store, how many of its rows are in memory, and the features that read them.

    Args:
      store: the rows, as `table_store` returns it.
      capacity: the least number of rows in memory; a multiple of 128 is made of it. The ids of a step must fit: choose
        it four times as large as their number, or larger.
      features: the features whose columns hold ids of the store's rows.
      policy: "lru", or a function of (ages, counts), as in `vocabulary`: the rows with the least scores leave.

    Example:
      >>> import funcrec as fr
      >>> users, read = fr.TableConfig("user", 10**6, 8), fr.FeatureConfig("user", table="user")
      >>> store = fr.table_store([users], fr.optim.sgd(), key=fr.key(0))
      >>> fr.CacheConfig(store, capacity=50_000, features=[read]).policy
      'lru'
    """

    store: TableStore
    capacity: Count
    features: Sequence[FeatureConfig]
    policy: Literal["lru"] | Callable[[Tensor, Tensor], Tensor] = "lru"

    @property
    def tables(self) -> Sequence[TableConfig]:
        """Return the configs of the store's tables."""
        return self.store.configs


@typed
def cached_tables(
    tables: Mapping[str, Tensor], caches: Mapping[str, CacheConfig], *, device: Device | None = None
) -> DynamicTables:
    """Return tables, some of which are in stores and have only a part of their rows in memory, for `fr.Params`.

    `cached_step` trains them: it brings the rows of a batch's ids into memory before the step reads them. A row that is
    not in memory reads NaN, so that a loss or a prediction without `cached_step` is NaN, and not wrong unnoticed.

    Args:
      tables: {table: f[V, D]}, those that are whole in memory, on `device`.
      caches: {name: a store and its part in memory}.
      device: where the parts in memory are; None for torch's default device. Stores are read on the CPU.

    Raises:
      TypeError, ValueError: two caches have the same column or table, or a table is in memory and in a store.

    Example:
      >>> import torch, funcrec as fr
      >>> users, read = fr.TableConfig("user", 1000, 2), [fr.FeatureConfig("user", table="user")]
      >>> store = fr.table_store([users], fr.optim.sgd(), key=fr.key(0))
      >>> tables = fr.cached_tables({}, {"users": fr.CacheConfig(store, capacity=128, features=read)})
      >>> fr.lookup(tables, fr.KeyedJaggedTensor.from_lists({"user": [[7]]}), read).values
      tensor([[nan, nan]])
    """
    device = torch.empty(0, device=device).device
    check("funcrec.cached_tables", owner_problems(caches), cache_problems(tables, caches, device))
    held, vocabularies = dict(tables), {}
    for name, cache in caches.items():
        vocabularies[name] = own = vocabulary(cache.capacity, policy=cache.policy, unknown=1, device=device)
        held |= {c.name: blank_rows(own, c.embedding_dim, c.dtype) for c in cache.store.configs}
    columns = tuple((c, n, k) for n, cache in caches.items() for c, k in columns_of(cache.features).items())
    of_store = lambda config, name: (config.name, name, STORED, float(config.num_embeddings))
    first = tuple(of_store(c, n) for n, cache in caches.items() for c in cache.store.configs)
    return DynamicTables(held, vocabularies, random.key(0).to(device), columns, first)


def blank_rows(vocabulary: Vocabulary, dim: int, dtype: torch.dtype) -> Tensor:
    """Return a table without rows in use: zeros, and NaN in the row that ids without a row read."""
    table = torch.zeros(vocabulary.num_embeddings, dim, dtype=dtype, device=vocabulary.tags.device)
    table[vocabulary.capacity :] = torch.nan
    return table


# -- validators --------------------------------------------------------------------------------------------------


def cache_problems(
    tables: Mapping[str, Tensor], caches: Mapping[str, CacheConfig], device: torch.device
) -> Iterator[Problem]:
    if (yield from reported(plain_problems("tables", tables))):
        return
    yield from table_tensor_problems(tables)
    for name, x in tables.items():
        if x.device != device:
            got, hint = f"{x.device}, and caches on {device}", f"device={str(x.device)!r}, or tables on {device}"
            yield Problem(f"`tables[{name!r}]` lies on another device.", got, "one device", hint)
    for name, cache in caches.items():
        for config in cache.store.configs:
            if config.name in tables:
                got, need = f"`tables` and `caches[{name!r}]`", "one of them"
                yield Problem(f"table {config.name!r} is in memory and in a store.", got, need, "other names")

"""Rows of tables that follow a vocabulary: new rows for new ids, and rows that move when the vocabulary grows.

    table[row(id)] = initializer(fold_in(key, name), row `id`)        the numbers that `init` gives to row `id`

So the initial numbers of an id depend on the id, the key, and the table's name and config. They do not depend on its
row, or on the step in which it came. Shapes: R rows, D dim, M entries of a turnover.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import Count, Key, Problem, any_tracked, check, describe, mix, random, replace, typed
from funcrec.kernels import ops
from funcrec.kernels.draws import GIVEN, Fresh
from funcrec.kernels.reference_vocabulary import bucket_of
from funcrec.kernels.vocabulary import SLOTS
from funcrec.kinds._admission import Turnover
from funcrec.kinds._vocabulary import MOST_ROWS, Vocabulary, vocabulary_problems
from funcrec.tables import Initializer, TableConfig, draw_of, drawing, id_rows, table_keys

Tables = dict[str, Tensor]
Slots = dict[str, dict[str, Tensor]]


@typed
def renew(
    tables: Mapping[str, Tensor],
    slots: Mapping[str, Mapping[str, Tensor]],
    turnover: Turnover,
    optimizer: Any,
    key: Key,
    configs: Sequence[TableConfig],
) -> tuple[Tables, Slots]:
    """Return the tables and slots with initial numbers in the rows that passed to new ids.

    Args:
      tables: {table: f[R, D]}. Tables without a config in `configs` stay as they are.
      slots: {table: {slot: f[R, ...]}}, those of `optimizer.init(tables)`.
      turnover: what `admit` returned. Rows without a new id stay as they are.
      optimizer: a `RowOptimizer`, whose `init` gives the slots of a new row.
      key: the key with which `init` made the tables.
      configs: the tables that follow the vocabulary. Each has one of funcrec's initializers.

    Raises:
      TypeError, ValueError: a table has no config that fits, another initializer, or slots that belong to no row.

    Law: a new row holds the numbers of row `id` of `init(key, configs)`, if that table has so many rows. The row keeps
      nothing of the id that had it before.

    Cost: it draws and writes the rows that changed. If slots depend on the row's numbers (`has_equal_slots` of the
      optimizer is false), it also draws M rows. `fr.jit` with tables and slots donated writes in place.

    Example:
      >>> import torch, funcrec as fr
      >>> config = fr.TableConfig("user", num_embeddings=128, embedding_dim=2, initializer=fr.uniform(0.1))
      >>> sparse = fr.optim.rowwise_adagrad(lr=0.1)
      >>> tables = {"user": torch.zeros(128, 2)}
      >>> users, rows, turnover = fr.admit(fr.vocabulary(128), torch.tensor([5]))
      >>> tables, slots = fr.renew(tables, sparse.init(tables), turnover, sparse, fr.key(0), [config])
      >>> bool((tables["user"][rows[0]] == fr.init(fr.key(0), [config])["user"][5]).all())
      True
    """
    check("funcrec.renew", renew_problems(tables, slots, turnover, optimizer, configs))
    random.check_key("funcrec.renew", key)
    new = NewRows(turnover.rows, turnover.new_ids, turnover.admitted.sum()[None], (turnover.rows.shape[0],))
    return with_new_rows(tables, slots, new, [(0, c) for c in configs], optimizer, key)


class NewRows(NamedTuple):
    """The rows that passed to new ids, of several vocabularies one after the other.

    rows, ids: i64[P], rows and their new ids. counts: i64[...], how many of a vocabulary's places are used, from its
    first on. places: the number of places of each vocabulary, in all P. every: the distance of their counts. seen: the
    ids of the step (`Seen`), if `admit_columns` returned these rows.
    """

    rows: Tensor
    ids: Tensor
    counts: Tensor
    places: tuple[int, ...]
    every: int = 1
    seen: Any = None

    def of(self, vocabulary: int) -> dict[str, int]:
        """Return the fields of `Fresh` for the rows of a vocabulary."""
        begin = sum(self.places[:vocabulary])
        return {"rows": begin, "ids": begin, "places": self.places[vocabulary], "number": vocabulary * self.every}

    def used(self, vocabulary: int) -> Tensor:
        """Return the new rows of a vocabulary, with -1 in places without one."""
        begin = sum(self.places[:vocabulary])
        own = self.rows[begin : begin + self.places[vocabulary]]
        place = torch.arange(own.shape[0], device=own.device)
        return torch.where(place < self.counts[vocabulary * self.every], own, -1)


def with_new_rows(
    tables: Mapping[str, Tensor],
    slots: Mapping[str, Mapping[str, Tensor]],
    new: NewRows,
    configs: Sequence[tuple[int, TableConfig]],
    optimizer: Any,
    key: Tensor,
) -> tuple[Tables, Slots]:
    """Return the tables and slots with initial numbers in new rows, in one call of the kernels.

    configs: (vocabulary, config) of each table.
    """
    new_tables, new_slots = dict(tables), {n: dict(own) for n, own in slots.items()}
    targets, given, fresh, scales = [], [], [], []

    def add(target: Tensor, kind: int, scale: float = 0.0, **fields: int) -> int:
        fresh.append(Fresh(len(targets), kind, **fields))
        scales.append(scale)
        targets.append(matrix_of(target))
        return len(targets) - 1

    def add_given(config: TableConfig, own: Mapping[str, int]) -> dict[str, int]:
        """Return {slot: its place in `given`}."""
        made = first_slots(optimizer, config, tables[config.name], key, new, own)
        given.extend(map(matrix_of, made.values()))
        return dict(zip(made, range(len(given) - len(made), len(given)), strict=True))

    keys = table_keys(key, [c for _, c in configs], new.rows.device)
    at: list[tuple[dict, str, int]] = []
    alike: dict[tuple, dict[str, int]] = {}  # tables that are updated alike, and have equal slots, share these
    has_equal_slots = getattr(optimizer, "has_equal_slots", False)
    for i, (vocabulary, config) in enumerate(configs):
        name, dim, own = config.name, config.embedding_dim, new.of(vocabulary)
        kind, scale = draw_of(cast(Initializer, config.initializer), config.num_embeddings, dim)
        at.append((new_tables, name, add(tables[name], kind, scale, dim=dim, key=i, **own)))
        form = (optimizer.label(name), dim, config.dtype) if has_equal_slots else (name,)
        if form not in alike:
            alike[form] = add_given(config, own)
        check("funcrec.renew", slot_problems(name, slots.get(name, {}), alike[form]))
        for slot, place in alike[form].items():
            at.append((new_slots[name], slot, add(slots[name][slot], GIVEN, given=place, **own)))
    if targets:
        written = draw(targets, given, new, keys, fresh, scales)
        for where, name, i in at:
            where[name] = written[i].reshape(where[name].shape)
    return new_tables, new_slots


def draw(
    targets: Sequence[Tensor],
    given: Sequence[Tensor],
    new: NewRows,
    keys: Tensor,
    fresh: list[Fresh],
    scales: list[Any],
) -> list[Tensor]:
    choice = None if any_tracked([*targets, *given]) else drawing(new.rows.device, "draw_rows")
    return ops.draw_rows(targets, given, new.rows, new.ids, new.counts, keys, fresh, scales, implementation=choice)


def matrix_of(x: Tensor) -> Tensor:
    """Return f[R] or f[R, ...] as a matrix of R rows."""
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def first_slots(
    optimizer: Any, config: TableConfig, like: Tensor, key: Tensor, new: NewRows, own: Mapping[str, int], first: int = 0
) -> dict[str, Tensor]:
    """Return {slot: the first numbers of new rows}, of one row if they are those of all rows.

    like: f[..., C], a table of columns [first, first + C). own: `new.of` the table's vocabulary.
    """
    num_columns = like.shape[1]
    if getattr(optimizer, "has_equal_slots", False):
        fresh = like.new_zeros(1, num_columns)
    else:
        ids = new.ids[own["ids"] : own["ids"] + own["places"]]
        fresh = id_rows(key, config, ids)[:, first : first + num_columns]
    return optimizer.init({config.name: fresh}).get(config.name, {})


@typed
def grow(
    vocabulary: Vocabulary, tables: Mapping[str, Tensor], slots: Mapping[str, Mapping[str, Tensor]], times: Count = 2
) -> tuple[Vocabulary, Tables, Slots]:
    """Return a vocabulary of `times` times as many rows, with the same ids, and its tables and slots.

    Each bucket becomes `times` buckets, and an id keeps its slot's number within the bucket. Rows without an id are
    zero. The rows of unknown ids stay the last ones.

    Args:
      tables: {table: f[V, D]}, all of which follow the vocabulary: V is its `num_embeddings`.
      slots: {table: {slot: f[V, ...]}}.

    Raises:
      ValueError: a table or slot has another number of rows, or the vocabulary would be too large.

    Law: lookups of find(v, ids) give the same numbers before and after. So do later steps, if no bucket was full.
      Growth by a and then by b is growth by a · b.

    Cost: it reads and writes everything. The shapes change, so compiled steps compile again.

    Example:
      >>> import torch, funcrec as fr
      >>> users, rows, _ = fr.admit(fr.vocabulary(128), torch.arange(100))
      >>> tables = {"user": torch.randn(128, 2)}
      >>> larger, grown, _ = fr.grow(users, tables, {})
      >>> moved = fr.find(larger, torch.arange(100))
      >>> larger.capacity, bool((grown["user"][moved] == tables["user"][rows]).all())
      (256, True)
    """
    check("funcrec.grow", vocabulary_problems(vocabulary))
    check("funcrec.grow", size_problems(vocabulary, times), row_problems(vocabulary, tables, slots))
    num_rows = vocabulary.capacity * times
    row, live = torch.arange(vocabulary.capacity, device=vocabulary.tags.device), vocabulary.tags != 0
    bucket = bucket_of(mix(vocabulary.entries[:, 0] ^ vocabulary.salt), num_rows)
    to = torch.where(live, bucket * SLOTS + row % SLOTS, num_rows)  # rows without an id go to a place that is cut off

    def moved(x: Tensor) -> Tensor:
        own, shared = x[: vocabulary.capacity], x[vocabulary.capacity :]
        out = x.new_zeros((num_rows + 1, *x.shape[1:])).index_put((to,), own)[:-1]
        return torch.cat([out, shared]) if shared.shape[0] else out

    sketch = vocabulary.sketch
    if sketch is not None:  # Each new bucket gets the bucket's whole sketch.
        sketch = sketch.view(-1, 1, SLOTS).expand(-1, times, SLOTS).flatten()
    larger = replace(vocabulary, tags=moved(vocabulary.tags), entries=moved(vocabulary.entries), sketch=sketch)
    grown = {n: {k: moved(x) for k, x in own.items()} for n, own in slots.items()}
    return larger, {n: moved(t) for n, t in tables.items()}, grown


# -- validators --------------------------------------------------------------------------------------------------


def size_problems(vocabulary: Vocabulary, times: int) -> Iterator[Problem]:
    if vocabulary.capacity * times > MOST_ROWS:
        yield Problem("`times` is too large.", f"{times}", f"at most {MOST_ROWS} rows", "several vocabularies")


def row_problems(vocabulary: Vocabulary, tables: Mapping, slots: Mapping) -> Iterator[Problem]:
    num_rows = vocabulary.num_embeddings
    each = [(f"tables[{n!r}]", t) for n, t in tables.items()]
    each += [(f"slots[{n!r}][{k!r}]", x) for n, own in slots.items() for k, x in own.items()]
    for path, x in each:
        if not x.dim() or x.shape[0] != num_rows:
            got, need = describe(x), f"{num_rows} rows, those of the vocabulary"
            yield Problem(f"`{path}` does not follow the vocabulary.", got, need, "tables of `num_embeddings` rows")


def renew_problems(
    tables: Mapping, slots: Mapping, turnover: Turnover, optimizer: Any, configs: Sequence[TableConfig]
) -> Iterator[Problem]:
    if not callable(getattr(optimizer, "init", None)):
        yield Problem("`optimizer` does not make slots.", describe(optimizer), "a RowOptimizer",
                      "fr.optim.rowwise_adagrad(lr=0.1)", TypeError)  # fmt: skip
    elif waiting := getattr(optimizer, "waiting", ()):
        need, hint = "slots of one row each", "an optimizer without `accumulate`"
        yield Problem("`optimizer` keeps gradients for later steps.", f"slots {list(waiting)}", need, hint)
    rows = turnover.rows
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        yield Problem("`turnover.rows` are not rows.", describe(rows), "i64[M], from `admit`", "", TypeError)
    for config in configs:
        table = tables.get(config.name)
        if table is None:
            got, need = f"tables {list(tables)}", "a table for each config"
            yield Problem(f"`tables` has no {config.name!r}.", got, need, "configs=those of the vocabulary")
            continue
        if table.dim() != 2 or table.shape[1] != config.embedding_dim or table.dtype != config.dtype:
            got, need = describe(table), f"{config.dtype}[R, {config.embedding_dim}]"
            yield Problem(f"`tables[{config.name!r}]` is not that of its config.", got, need, "fr.init(key, configs)")
            continue
        yield from initializer_problems(config)
        for slot, x in slots.get(config.name, {}).items():
            if not x.dim() or x.shape[0] != table.shape[0]:
                got, need = describe(x), f"{table.shape[0]} rows, as the table"
                yield Problem(f"`slots[{config.name!r}][{slot!r}]` does not belong to rows.", got, need)


def slot_problems(table: str, slots: Mapping[str, Tensor], made: Mapping[str, int]) -> Iterator[Problem]:
    """Report slots that are not those of the optimizer: they would keep the numbers of the ids before."""
    if slots.keys() != made.keys():
        got, need = f"slots {sorted(slots)}", f"slots {sorted(made)}, those of `optimizer`"
        yield Problem(f"`slots[{table!r}]` are not those of `optimizer`.", got, need, "optimizer.init(tables)")


def initializer_problems(config: TableConfig) -> Iterator[Problem]:
    if not isinstance(config.initializer, Initializer):
        need = "one of funcrec's initializers, which draw the row of any id"
        hint = "fr.uniform(), fr.normal(), fr.xavier_normal() or fr.constant()"
        what = f"The initializer of {config.name!r} is not known."
        yield Problem(what, f"{config.initializer!r}", need, hint, TypeError)

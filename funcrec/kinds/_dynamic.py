"""Tables whose rows belong to ids that come and go: tables, and vocabularies that say which ids have a row now.

    lookup(dynamic, ids) == lookup(dynamic.tables, find(vocabulary, ids))

A lookup finds rows, and changes nothing. A training step first admits the ids of its batch (`admit_batch`), and draws
the rows of new ids. So everything that reads tables reads these: models, evaluation, exports.
Shapes: N ids of a column, V rows of a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import (
    Key,
    Movable,
    Named,
    Problem,
    check,
    describe,
    map_tensors,
    mapping,
    pytree,
    random,
    replace,
    reported,
    short_dtype,
    typed,
    typed_fields,
)
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kinds._columns import Buffers, bags_in, columns_of, find_columns, known_rows
from funcrec.kinds._quantized import quantize
from funcrec.kinds._renewal import initializer_problems
from funcrec.kinds._vocabulary import Vocabulary, id_problems, vocabulary_problems
from funcrec.kinds._vocabulary_shards import find_on_ranks, here, is_cut
from funcrec.tables import (
    KINDS,
    FeatureConfig,
    Initializer,
    Kind,
    Placed,
    TableConfig,
    is_plain,
    kind_of_tables,
    table_shapes,
    table_tensor_problems,
)

STORED = "stored"  # `kind` of rows that a store has, and no initializer draws


@typed_fields
class VocabularyConfig(NamedTuple):
    """A vocabulary, the tables that have a row for each of its ids, and the features that read them.

    Args:
      vocabulary: the ids before the first step, as `fr.vocabulary` returns it.
      tables: configs of `vocabulary.num_embeddings` rows each. Their initializers draw the rows of new ids.
      features: the features whose columns hold the ids. With `max_length` a step admits only so many ids of each bag,
        and its buffers have places for these alone.

    Example:
      >>> import funcrec as fr
      >>> users = fr.vocabulary(1000, policy="lfu", unknown=1)
      >>> table, read = fr.TableConfig("user", users.num_embeddings, 8), fr.FeatureConfig("user", table="user")
      >>> fr.VocabularyConfig(users, [table], [read]).vocabulary
      Vocabulary(1024 rows, policy='lfu', unknown=1)
    """

    vocabulary: Vocabulary
    tables: Sequence[TableConfig]
    features: Sequence[FeatureConfig]


class First(NamedTuple):
    """How the rows of a table are drawn: the fields of its TableConfig that its tensor does not show, as plain values,
    which a checkpoint can write. kind STORED: they are read from a store, of `scale` rows."""

    table: str
    vocabulary: str
    kind: str
    scale: float | None


@mapping(lambda dynamic: dynamic.tables, "part")
@pytree(static=("columns", "first"))
class DynamicTables(Named[Any], Movable):
    """Tables whose rows belong to the ids of vocabularies. `dynamic_tables` makes them, and lookups take ids.

    Args:
      tables: {table: f[V, D]}. Tables that follow no vocabulary may be among them; their ids are rows, as usual.
      vocabularies: {name: Vocabulary}.
      first_key: the key that draws the rows of new ids, i64[].
      columns: (column, vocabulary, the most ids of a bag or None) of each column whose ids a vocabulary holds.
      first: (table, vocabulary, kind, scale) of each table that follows one; kind and scale are its initializer, or
        "stored" and the number of rows of its store.

    Example:
      >>> import torch, funcrec as fr
      >>> users = fr.vocabulary(128)
      >>> read = fr.FeatureConfig("user", table="user")
      >>> config = fr.VocabularyConfig(users, [fr.TableConfig("user", 128, 2)], [read])
      >>> fr.dynamic_tables(fr.init(fr.key(0), config.tables), {"users": config}, key=fr.key(0))
      DynamicTables({user: f32[128, 2] of users}, {users: Vocabulary(128 rows, policy='lru')})
    """

    tables: dict[str, Tensor]
    vocabularies: dict[str, Vocabulary]
    first_key: Tensor
    columns: tuple[tuple[str, str, int | None], ...]
    first: tuple[tuple[str, str, str, float | None], ...]

    def __repr__(self) -> str:
        of = {x[0]: f" of {x[1]}" for x in self.first}
        tables = ", ".join(f"{n}: {describe(t)}{of.get(n, '')}" for n, t in self.tables.items())
        return f"DynamicTables({{{tables}}}, {{{', '.join(f'{n}: {v!r}' for n, v in self.vocabularies.items())}}})"


@typed
def dynamic_tables(
    tables: Mapping[str, Tensor], vocabularies: Mapping[str, VocabularyConfig], *, key: Key
) -> DynamicTables:
    """Return tables whose rows belong to the ids of vocabularies, for `fr.Params`.

    Lookups in them take ids in place of rows, and find their rows in the vocabulary of the table. An id without a row
    reads zeros, or a row of unknown ids. A `train_step` first admits the ids of the features' columns in its batch,
    draws the rows of new ids with fresh slots of the optimizer, and reports counts in metrics["vocabularies"].

    Args:
      tables: {table: f[V, D]}, as `init` makes them. Those without a config stay as they are.
      vocabularies: {name: its vocabulary, tables and features}.
      key: the key that draws the rows of new ids, such as that of `init`.

    Raises:
      KeyError, TypeError, ValueError: a table is missing, or has another number of rows, dim or dtype than its config;
        its initializer is not one of funcrec's; two vocabularies have the same column or table.

    Law: with room for all ids, training gives the losses of a table that has a row for each id, bit for bit: id i has
      row i of init(key, ...), whenever it came. `stochastic_rounding` draws by the id, too, and the norm of `clip` does
      not depend on the order of rows. Only the scale of an initializer without one follows the number of rows.
      Evaluation changes no vocabulary.

    Cost: a step searches each id in two cache lines of memory, to admit it, and again if a lookup reads other tensors
      of ids than the batch has. On a mesh each rank admits the ids of all ranks, in a vocabulary of its own, and then
      searches its ids again; a plan with `buckets` cuts the vocabularies, so that each rank has and searches a part.
      It draws the rows of new ids only. A compiled step whose state is donated writes in place; else it copies tables
      and vocabularies.

    Example:
      >>> import torch, funcrec as fr
      >>> users, read = fr.vocabulary(128), [fr.FeatureConfig("user", table="user")]
      >>> config = fr.VocabularyConfig(users, [fr.TableConfig("user", users.num_embeddings, 2)], read)
      >>> tables = fr.dynamic_tables(fr.init(fr.key(0), config.tables), {"users": config}, key=fr.key(0))
      >>> loss = lambda params, ids: (fr.lookup(params.tables, ids, read).values - 1).square().mean()
      >>> step = fr.train_step(loss, sparse=fr.optim.sgd(0.5))
      >>> state, metrics = step(step.init(fr.Params(tables, {})),
      ...                       fr.KeyedJaggedTensor.from_lists({"user": [[10**15], [-3], [10**15]]}))
      >>> int(metrics["vocabularies"]["users"]["admitted"]), int(state.tables.vocabularies["users"].num_ids)
      (2, 2)

    Source: TorchRec's ManagedCollisionEmbeddingBagCollection, whose modules change themselves when they are called.
    """
    check("funcrec.dynamic_tables", part_problems(tables, vocabularies), owner_problems(vocabularies))
    random.check_key("funcrec.dynamic_tables", key)
    columns = tuple((c, n, k) for n, config in vocabularies.items() for c, k in columns_of(config.features).items())
    first = tuple(
        (t.name, n, t.initializer.kind, t.initializer.scale)
        for n, config in vocabularies.items()
        for t in config.tables
    )
    own = {n: map_tensors(Tensor.clone, config.vocabulary) for n, config in vocabularies.items()}  # a step may donate
    return DynamicTables(dict(tables), own, key.clone(), columns, first)


def configs_of(
    dynamic: DynamicTables, vocabulary: str, forms: Mapping[str, tuple[tuple[int, int], torch.dtype]]
) -> list[TableConfig]:
    """Return the configs of the tables that follow a vocabulary. forms: {table: (its shape, its dtype)}."""
    check("funcrec.train_step", follow_problems(dynamic, {n: shape[0] for n, (shape, _) in forms.items()}))
    following = [x for x in map(First._make, dynamic.first) if x.vocabulary == vocabulary]
    as_config = lambda x, shape, dtype: TableConfig(x.table, shape[0], shape[1], dtype, Initializer(x.kind, x.scale))
    return [as_config(x, *forms[x.table]) for x in following]


def as_rows(dynamic: DynamicTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> tuple[Any, Any]:
    """Return the plain tables, and ids with the rows of the features' columns in place of the vocabularies' ids."""
    of_column, of_table = {c: v for c, v, _ in dynamic.columns}, {x[0]: x[1] for x in dynamic.first}
    sizes = {n: shape[0] for n, shape in table_shapes(dynamic.tables).items()}  # in memory; a store may have more
    check("funcrec.lookup", follow_problems(dynamic, sizes), feature_problems(features, of_column, of_table))
    names = list(dict.fromkeys(of_table[f.table] for f in features if f.table in of_table))
    if not names:
        return dynamic.tables, ids
    vocabularies = [dynamic.vocabularies[n] for n in names]
    own = [here(v) for v in vocabularies]
    check("funcrec.lookup", *map(vocabulary_problems, own), id_problems(ids, own[0]))
    columns = [columns_of([f for f in features if of_table.get(f.table) == n]) for n in names]
    if not is_cut(vocabularies):
        return dynamic.tables, replace(ids, values=find_columns(vocabularies, ids, columns))
    rows = known_rows(vocabularies, ids, columns)
    if rows is None:
        bags = [bag for i, c in enumerate(columns) for bag in bags_in(ids, c, i)]
        rows = find_on_ranks(vocabularies, Buffers([ids.values], [ids.offsets], bags))
    return dynamic.tables, replace(ids, values=rows)


def without_parts(dynamic: DynamicTables) -> DynamicTables:
    """Return all but the tables. Every rank holds it whole, unless a plan cuts its vocabularies."""
    check("funcrec.shard_tables", plain_problems("tables.tables", dynamic.tables))
    return replace(dynamic, tables={})


def quantized(dynamic: DynamicTables, dtypes: Any, key: Any) -> DynamicTables:
    """Return the tables with codes for numbers, and the same vocabularies."""
    check("funcrec.quantize", stored_problems(dynamic))
    return replace(dynamic, tables=quantize(dynamic.tables, dtypes, key=key))


def shapes_of(dynamic: DynamicTables, held: Mapping[str, tuple[int, int]] | None = None) -> dict[str, tuple[int, int]]:
    """Return {table: its shape}. A table whose rows are in a store has the rows of the store. held: the shapes in
    memory."""
    rows = {x[0]: int(x[3]) for x in dynamic.first if x[2] == STORED and x[3] is not None}
    return {n: (rows.get(n, num), dim) for n, (num, dim) in (held or table_shapes(dynamic.tables)).items()}


KINDS[DynamicTables] = Kind(
    shapes_of,
    lambda dynamic, *lookup: kind_of_tables(dynamic.tables).read(dynamic.tables, *lookup),
    is_trained=lambda tables: not isinstance(tables, DynamicTables) or is_plain(tables.tables),
    forms=lambda dynamic: kind_of_tables(dynamic.tables).forms(dynamic.tables),
    quantized=quantized,
    any_ids=lambda dynamic: [x[0] for x in dynamic.first if x[2] != STORED],
    follows=lambda dynamic: [x[0] for x in dynamic.first],
    as_rows=as_rows,
    placed=Placed(
        lambda sharded, parts: replace(sharded.rest, tables=parts),
        lambda sharded: shapes_of(sharded.rest, dict(sharded.layout.shapes)),
        rest=without_parts,
    ),
)


# -- validators --------------------------------------------------------------------------------------------------


def plain_problems(path: str, tables: Any) -> Iterator[Problem]:
    if not is_plain(tables):
        need, hint = "{table: f[V, D]}", "fr.init(key, configs)"
        yield Problem(f"`{path}` are not plain.", describe(tables), need, hint, TypeError)


def stored_problems(dynamic: DynamicTables) -> Iterator[Problem]:
    """Report tables of which stores hold rows, too."""
    if of_stores := [x[0] for x in dynamic.first if x[2] == STORED]:
        need, hint = "tables that are whole in memory", "fr.cached_step(...), or its gather(params) for all rows"
        yield Problem("some rows of `tables` are in stores.", f"cached tables {of_stores}", need, hint)


def part_problems(tables: Mapping[str, Any], vocabularies: Mapping[str, VocabularyConfig]) -> Iterator[Problem]:
    if (yield from reported(plain_problems("tables", tables))):
        return
    yield from table_tensor_problems(tables)
    for name, config in vocabularies.items():
        yield from vocabulary_problems(config.vocabulary)
        num_rows = config.vocabulary.num_embeddings
        for t in config.tables:
            x = tables.get(t.name)
            if x is None:
                got = f"tables {list(tables)}"
                yield Problem(f"`tables` has no {t.name!r}.", got, "a table for each config", "fr.init", KeyError)
            elif tuple(x.shape) != (num_rows, t.embedding_dim) or x.dtype != t.dtype or t.num_embeddings != num_rows:
                got = f"{describe(x)}, and {short_dtype(t.dtype)} and {t.num_embeddings} rows in its config"
                need = f"{short_dtype(t.dtype)}[{num_rows}, {t.embedding_dim}], with the rows of {name!r}"
                hint = f"fr.TableConfig({t.name!r}, vocabulary.num_embeddings, {t.embedding_dim}, {x.dtype})"
                yield Problem(f"table {t.name!r} does not follow its vocabulary.", got, need, hint)
            yield from initializer_problems(t)


def follow_problems(dynamic: DynamicTables, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Report vocabularies that are missing, or have another number of rows than their tables. sizes: {table: rows}."""
    hint = "fr.vocabulary_of and moved rows, or fr.grow"
    for x in map(First._make, dynamic.first):
        vocabulary, num_rows = dynamic.vocabularies.get(x.vocabulary), sizes.get(x.table)
        if vocabulary is None:
            got, need = f"vocabularies {list(dynamic.vocabularies)}", f"the vocabulary of table {x.table!r}"
            yield Problem(f"`tables.vocabularies` has no {x.vocabulary!r}.", got, need, hint, KeyError)
        elif num_rows not in (None, vocabulary.num_embeddings):
            got, need = f"{num_rows} rows", f"{vocabulary.num_embeddings} rows, those of {x.vocabulary!r}"
            yield Problem(f"table {x.table!r} does not follow its vocabulary.", got, need, hint)


def owner_problems(vocabularies: Mapping[str, Any]) -> Iterator[Problem]:
    """Report columns and tables that belong to two vocabularies, and vocabularies without any."""
    owners: dict[tuple[str, str], str] = {}
    for name, config in vocabularies.items():
        tables = [t.name for t in config.tables]
        if not config.features or not tables:
            got = f"features {[f.name for f in config.features]}, tables {tables}"
            yield Problem(f"vocabulary {name!r} has no feature or no table.", got, "one of each, or more")
        of_table = {**dict.fromkeys((f.table for f in config.features), None), **dict.fromkeys(tables, name)}
        yield from feature_problems(config.features, dict.fromkeys(columns_of(config.features), name), of_table)
        for what, n in [*(("column", c) for c in columns_of(config.features)), *(("table", n) for n in tables)]:
            if (what, n) in owners:
                got, need = f"{owners[what, n]!r} and {name!r}", "one vocabulary for each"
                yield Problem(f"{what} {n!r} is named twice.", got, need, "one VocabularyConfig with all its features")
            owners[what, n] = name


def feature_problems(
    features: Sequence[FeatureConfig], of_column: Mapping[str, str], of_table: Mapping[str, str]
) -> Iterator[Problem]:
    """Report features whose column and table do not belong together, or whose ids would be hashed."""
    for f in features:
        column, table = of_column.get(f.key), of_table.get(f.table)
        if column != table:
            got = f"column {f.key!r} of vocabulary {column!r}, table {f.table!r} of {table!r}"
            hint = "one fr.VocabularyConfig with the feature in `features` and its table in `tables`"
            yield Problem(f"feature {f.name!r} reads a table of other ids.", got, "one vocabulary, or none", hint)
        elif table is not None and f.hash is not None:
            hint = "hash=None: a vocabulary takes any id"
            yield Problem(f"feature {f.name!r} hashes ids of a vocabulary.", f"{f.hash}", "ids", hint)

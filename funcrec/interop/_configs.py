"""Converts configs of embeddings: TorchRec has one config for a table and its features, funcrec has a config for each.

EmbeddingBagConfig(name, shape, data_type, init_fn, feature_names, pooling)
  = TableConfig(name, shape, dtype, initializer), FeatureConfig(feature, name, pooling) for each feature
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from funcrec.core import Problem, check, describe, fail
from funcrec.tables import FeatureConfig, Initializer, TableConfig, feature_list_problems, table_list_problems

DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
# The fields that change values or rows of a table and have no counterpart here, with the values that change nothing.
ELSEWHERE = {
    "num_embeddings_post_pruning": None, "need_pos": False, "input_dim": None, "total_num_buckets": None,
    "use_virtual_table": False, "virtual_table_eviction_policy": None, "enable_embedding_update": False,
    "stash_weights": False,
}  # fmt: skip


def from_configs(
    call: str, configs: Sequence[Any], weighted: bool
) -> tuple[tuple[TableConfig, ...], tuple[FeatureConfig, ...]]:
    """Return (tables, features) from the configs of one collection.

    Features have the order of the collection's answer.
    """
    kinds = {type(c).__name__ for c in configs}
    if len(kinds) > 1:
        hint = "one call for each collection"
        fail(call, "`x` has configs of two collections.", got=f"{sorted(kinds)}", need="one kind", hint=hint,
             kind=TypeError)  # fmt: skip
    check(call, *(config_problems(c) for c in configs))
    tables = tuple(
        TableConfig(c.name, c.num_embeddings, c.embedding_dim, DTYPES[c.data_type.value], initializer_of(call, c))
        for c in configs
    )
    names = answer_names([(c.name, column) for c in configs for column in columns_of(c)])
    pooling = lambda c: c.pooling.value.lower() if hasattr(c, "pooling") else "none"
    features = tuple(
        FeatureConfig(
            names[c.name, column], c.name, pooling(c), weighted=weighted,
            column=None if names[c.name, column] == column else column,
        )
        for c in configs
        for column in columns_of(c)
    )  # fmt: skip
    check(call, table_list_problems(tables), feature_list_problems(features))
    return tables, features


def to_configs(call: str, tables: Sequence[TableConfig], features: Sequence[FeatureConfig], weighted: bool) -> list:
    """Return a config for each table.

    It is an EmbeddingConfig if the features are sequences, else an EmbeddingBagConfig.
    """
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from torchrec.types import DataType

    check(call, table_list_problems(tables), feature_list_problems(features))
    check(call, feature_problems(tables, features, weighted), *(table_problems(t) for t in tables))
    data_types = {dtype: DataType[name] for name, dtype in DTYPES.items()}
    made = []
    for t in tables:
        own = [f for f in features if f.table == t.name]
        shared = {
            "name": t.name, "num_embeddings": t.num_embeddings, "embedding_dim": t.embedding_dim,
            "data_type": data_types[t.dtype], "feature_names": [f.key for f in own], **init_of(t.initializer),
        }  # fmt: skip
        if any(f.pooling == "none" for f in features):
            made.append(EmbeddingConfig(**shared))
        else:
            made.append(EmbeddingBagConfig(**shared, pooling=PoolingType[own[0].pooling.upper()]))
    return made


def columns_of(config: Any) -> list[str]:
    """Return the columns that a table reads.

    Without feature names it is the name of the table, as in TorchRec's collections.
    """
    return list(config.feature_names) or [config.name]


def answer_names(places: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return {(table, column): key of the answer}.

    The key is `column@table` for a column that several tables read, else the column.
    """
    columns = [column for _, column in places]
    return {(t, c): f"{c}@{t}" if columns.count(c) > 1 else c for t, c in places}


# -- first rows ----------------------------------------------------------------------------------------------------


def initializer_of(call: str, config: Any) -> Initializer:
    """Return an Initializer with the distribution of `init_fn`."""
    fn, given = config.init_fn, {}
    if isinstance(fn, partial) and not fn.args:
        fn, given = fn.func, fn.keywords
    own = torch.nn.init
    match fn if given.keys() <= {"a", "b", "mean", "std", "gain", "val"} else None:
        case own.uniform_ if given.get("a", 0.0) == -given.get("b", 1.0):
            bound = float(given.get("b", 1.0))
            return Initializer("uniform", None if bound == math.sqrt(1 / config.num_embeddings) else bound)
        case own.normal_ if given.get("mean", 0.0) == 0:
            return Initializer("normal", float(given.get("std", 1.0)))
        case own.xavier_normal_ if given.get("gain", 1.0) == 1:
            return Initializer("xavier_normal")
        case own.constant_ if "val" in given:
            return Initializer("constant", float(given["val"]))
        case own.zeros_ | own.ones_:
            return Initializer("constant", float(fn is own.ones_))
    fail(
        call, f"`init_fn` of table {config.name!r} has no counterpart.", got=f"{config.init_fn!r}",
        need="torch.nn.init's uniform_ of (-b, b), normal_ of mean 0, constant_, zeros_, ones_ or xavier_normal_",
        hint="dataclasses.replace(config, init_fn=None), and an `initializer` of your own in the TableConfig",
    )  # fmt: skip


def init_of(initializer: Any) -> dict[str, Any]:
    """Return the fields of TorchRec's config that draw the distribution of the initializer."""
    own, scale = torch.nn.init, initializer.scale
    match initializer.kind:
        case "uniform":
            return {} if scale is None else {"weight_init_min": -scale, "weight_init_max": scale}
        case "normal":
            return {"init_fn": partial(own.normal_, mean=0.0, std=scale)}
        case "xavier_normal":
            return {"init_fn": own.xavier_normal_}
        case _:  # "constant"
            return {"init_fn": partial(own.constant_, val=scale)}


# -- validators ----------------------------------------------------------------------------------------------------


def config_problems(config: Any) -> Iterator[Problem]:
    """Report the fields of TorchRec's config that have no counterpart in funcrec."""
    path = f"config of table {config.name!r}"
    if config.data_type.value not in DTYPES:
        need, hint = f"one of {list(DTYPES)}", "data_type=DataType.FP32"
        yield Problem(f"the {path} has rows that are not trained.", f"{config.data_type}", need, hint, TypeError)
    for field, plain in ELSEWHERE.items():
        value = getattr(config, field, plain)
        if value != plain:
            what = f"`{field}` of the {path} has no counterpart."
            yield Problem(what, f"{value!r}", f"{plain!r}", f"{field}={plain}")
    if getattr(getattr(config, "pooling", None), "value", "") == "NONE":
        hint = "EmbeddingConfig, for sequences"
        yield Problem(f"`pooling` of the {path} is NONE.", "PoolingType.NONE", "SUM or MEAN", hint)


def table_problems(t: TableConfig) -> Iterator[Problem]:
    if t.dtype not in DTYPES.values():
        need = ", ".join(map(str, DTYPES.values()))
        yield Problem(f"table {t.name!r} has a dtype that TorchRec lacks.", f"{t.dtype}", need,
                      "dtype=torch.float32", TypeError)  # fmt: skip
    if not isinstance(t.initializer, Initializer):
        yield Problem(f"`initializer` of table {t.name!r} is a function of funcrec's keys.", describe(t.initializer),
                      "an Initializer", "dataclasses.replace(table, initializer=fr.uniform()), then init_fn=...",
                      TypeError)  # fmt: skip


def feature_problems(
    tables: Sequence[TableConfig], features: Sequence[FeatureConfig], weighted: bool
) -> Iterator[Problem]:
    """Report properties of these features that a list of configs cannot express."""
    known = [t.name for t in tables]
    strange = {f.name: f.table for f in features if f.table not in known}
    if strange:
        yield Problem("features name tables that `tables` lacks.", f"{strange}", f"one of {known}",
                      "all tables of the features", KeyError)  # fmt: skip
        return
    names = answer_names([(f.table, f.key) for f in features])
    for f in features:
        name = names[f.table, f.key]
        if f.name != name:
            got, need = f"{f.name!r} of column {f.key!r}", f"{name!r}, as TorchRec calls it"
            yield Problem(f"feature {f.name!r} would have another name.", got, need, f"name={name!r}")
        for field, value, plain in (("hash", f.hash, None), ("max_length", f.max_length, None)):
            if value is not plain:
                yield Problem(f"`{field}` of feature {f.name!r} has no counterpart.", f"{value!r}", "None",
                              f"{field}=None")  # fmt: skip
        if f.weighted != weighted:
            yield Problem(f"feature {f.name!r} is {'' if f.weighted else 'not '}weighted.", f"weighted={weighted}",
                          "one for all, as EmbeddingBagCollection's is_weighted", f"weighted={f.weighted}")  # fmt: skip
    yield from order_problems(known, features)


def order_problems(known: Sequence[str], features: Sequence[FeatureConfig]) -> Iterator[Problem]:
    """Report features in a wrong order, tables with two poolings or no feature, and sequences among pooled features."""
    got, need = [f.name for f in features], [f.name for t in known for f in features if f.table == t]
    if got != need:
        yield Problem("the features are in another order than TorchRec's answer.", f"{got}", f"{need}",
                      "features sorted by the position of their tables")  # fmt: skip
    if len({f.pooling == "none" for f in features}) > 1:
        pooled = {f.name: f.pooling for f in features}
        yield Problem("some of the features are sequences.", f"{pooled}", "all pooled, or none of them",
                      "one call for each collection")  # fmt: skip
    if greatest := [f.name for f in features if f.pooling == "max"]:
        yield Problem("TorchRec has no pooling of maxima.", f"{greatest}", "pooling 'sum', 'mean' or 'none'",
                      "torch.nn.EmbeddingBag(mode='max')")  # fmt: skip
    for t in known:
        own = {f.name: f.pooling for f in features if f.table == t}
        if len(set(own.values())) > 1:
            yield Problem(f"the features of table {t!r} are pooled in two ways.", f"{own}", "one pooling for a table",
                          "a table for each pooling")  # fmt: skip
        keys = [f.key for f in features if f.table == t]
        if len(set(keys)) < len(keys):
            yield Problem(f"table {t!r} reads a column twice.", f"{keys}", "each column once for a table")
    bare = [t for t in known if not any(f.table == t for f in features)]
    if bare:
        yield Problem("tables have no feature; TorchRec would give them one.", f"{bare}", "a feature for each table",
                      "the tables of these features")  # fmt: skip


def pair_of(x: Any) -> tuple[tuple[TableConfig, ...], tuple[FeatureConfig, ...]] | None:
    """Return x as (tables, features); None if x is not such a pair."""
    is_list = lambda own, kind: isinstance(own, Sequence) and all(isinstance(c, kind) for c in own)
    if isinstance(x, tuple | list) and not isinstance(x, Mapping) and len(x) == 2:
        tables, features = x
        if is_list(tables, TableConfig) and is_list(features, FeatureConfig) and not isinstance(tables, str):
            return tuple(tables), tuple(features)
    return None

"""Checks of the arguments of lookups and of their transposes, which read shapes and dtypes only.

Shapes: B bags, N ids, R rows, D dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, describe, doubled, fail, kind_of, nearest, replace, reported, vmaps_of
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from funcrec.kernels import ops
from funcrec.tables._configs import TABLE_HINT, FeatureConfig, TableConfig
from funcrec.tables._kinds import LookupResult, is_plain, table_shapes
from funcrec.tables._rowgrads import RowGrads


def duplicate_problems(configs: Sequence[Any], what: str) -> Iterator[Problem]:
    if again := doubled(c.name for c in configs):
        hint = f"{again[0]!r} once" + (", or another name with column=..." if what == "features" else "")
        yield Problem(f"`{what}` has a name twice.", f"{again} more than once", "distinct names", hint)


def table_list_problems(tables: object) -> Iterator[Problem]:
    if not isinstance(tables, Sequence) or not all(isinstance(t, TableConfig) for t in tables):
        yield Problem("`tables` are not table configs.", describe(tables), "a sequence of TableConfig", kind=TypeError)
    else:
        yield from duplicate_problems(tables, "tables")


def feature_list_problems(features: object) -> Iterator[Problem]:
    if not isinstance(features, Sequence) or not all(isinstance(f, FeatureConfig) for f in features):
        each, hint = features if isinstance(features, (list, tuple)) else (), ""
        got, other = describe(features), next((f for f in each if not isinstance(f, FeatureConfig)), None)
        if other is not None:
            got, hint = f"{got} with {describe(other)}", f'[fr.FeatureConfig({other!r}, table="item")]'
        need = "a sequence of FeatureConfig"
        hint = hint if isinstance(other, str) else "[feature]" if isinstance(features, FeatureConfig) else ""
        yield Problem("`features` are not feature configs.", got, need, hint, TypeError)
    else:
        yield from duplicate_problems(features, "features")


def table_tensor_problems(tables: object) -> Iterator[Problem]:
    """Yield a problem unless `tables` is {name: f[R, D]} or a sequence of TableConfig."""
    if not isinstance(tables, Mapping):
        yield from table_list_problems(tables)
        return
    for name, t in tables.items():
        yield from tensor_problems(t, f"tables[{name!r}]")


def tensor_problems(t: object, path: str) -> Iterator[Problem]:
    """Yield a problem unless `t` is f[R, D] in dense memory."""
    if isinstance(t, Tensor) and (t.layout != torch.strided or t.is_nested):
        dense = f"torch.nested.to_padded_tensor({path}, 0.0)" if t.is_nested else f"{path}.to_dense()"
        hint = f"{dense}: a table is dense memory, and its gradient is its rows"
        yield Problem(f"`{path}` is not a table.", describe(t), "f[num_embeddings, dim]", hint, TypeError)
    elif not isinstance(t, Tensor) or t.dim() != 2 or not t.is_floating_point() or t.itemsize < 2:  # float8 cannot add
        yield Problem(f"`{path}` is not a table.", describe(t), "f[num_embeddings, dim]", TABLE_HINT, TypeError)


def gap_problems(
    tables: Mapping[str, Tensor], features: Sequence[FeatureConfig], implementation: str | None
) -> Iterator[Problem]:
    """Yield a problem for each table that is a view with gaps.

    The kernels of a CPU read rows that lie end to end. A copy in every lookup would cost as much as the table.
    """
    for name in dict.fromkeys(f.table for f in features):
        t = tables[name]
        if not t.is_contiguous() and not vmaps_of([t]) and ops.chosen(implementation, t.device) == "cpp":
            got, hint = f"{describe(t)} with strides {t.stride()}", f"tables[{name!r}].contiguous(), once"
            yield Problem(f"`tables[{name!r}]` is a view with gaps.", got, "rows end to end", hint)


def row_problems(tables: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield a problem for each table without rows."""
    for name, t in tables.items():
        if not t.shape[0]:
            hint = f"fr.TableConfig({name!r}, num_embeddings=1, embedding_dim={t.shape[1]}), or more rows"
            yield Problem(f"`tables[{name!r}]` has no row.", describe(t), "one row or more", hint)


def feature_table_problems(features: Sequence[FeatureConfig], tables: object) -> Iterator[Problem]:
    """Yield a problem for each feature whose table is missing."""
    names = list(tables if isinstance(tables, Mapping) and is_plain(tables) else table_shapes(tables))
    for f in features:
        if f.table not in names:
            need, hint = f"one of {names}", "" if names else f"a table named {f.table!r}"
            yield Problem(f"`features[{f.name!r}].table` is not a table.", f"{f.table!r}", need, hint, KeyError)


def feature_key_problems(features: Sequence[FeatureConfig], ids: KeyedJaggedTensor) -> Iterator[Problem]:
    for f in features:
        if f.key not in ids.keys:
            got, need = f"{f.key!r}", f"one of the keys {list(ids.keys)}"
            hint = "column=..., the key of its ids, in the feature's config"
            yield Problem(f"feature {f.name!r} has no ids.", got, need, hint, KeyError)
        if f.weighted and (ids.weights is None or f.key in ids.unweighted):
            got = "`ids.weights` is None" if ids.weights is None else f"`ids.unweighted` has {f.key!r}"
            hint = "weights=..., or weighted=False"
            yield Problem(f"feature {f.name!r} is weighted.", got, "a weight per id", hint)


def bag_count_problems(features: Sequence[FeatureConfig], ids: KeyedJaggedTensor) -> Iterator[Problem]:
    """Yield a problem if pooled features have different numbers of bags, and no inverse indices: the output has one row
    per example."""
    counts = {f.name: ids.bags_of(f.key) for f in features}
    first = next(iter(counts.values()), 0)
    if ids.inverse is None and any(n != first for n in counts.values()):  # A size left open by an export has no hash.
        hint = "fr.lookup_each, for the rows of each feature's own bags; inverse=..., for those of examples"
        yield Problem("the features have different numbers of bags.", f"{counts}", "one B for all", hint)


def row_dtype_problems(tables: object, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> Iterator[Problem]:
    shapes = table_shapes(tables)
    for f in features:
        if f.table in shapes and shapes[f.table][0] > torch.iinfo(ids.values.dtype).max:
            got = f"{describe(ids.values)}; table {f.table!r} has {shapes[f.table][0]} rows"
            yield Problem(f"the ids of feature {f.name!r} cannot hold every row.", got, "i64 ids", "values.long()")


def device_problems(tables: object, ids: KeyedJaggedTensor) -> Iterator[Problem]:
    if not isinstance(tables, Mapping):
        return
    places = {t.device for t in tables.values()} | {ids.values.device, ids.offsets.device}
    if len(places) > 1:
        got = f"{sorted(map(str, places))}"
        yield Problem("tables and ids are on different devices.", got, "one device", "map the batch to the tables'")


ACTS = kind_of(KeyedTensor)


def acts_problems(path: str, acts, ids, features, shapes) -> Iterator[Problem]:
    """Yield a problem unless `acts` has the form that `lookup` returns for pooled features."""
    if (yield from reported(ACTS.find(path, acts))):
        return
    dims = {f.name: shapes[f.table][1] for f in features}
    got = dict(zip(acts.keys, acts.dims, strict=True))
    bags = [ids.bags_of(f.key) if ids.inverse is None else ids.num_examples for f in features]
    if features and (acts.values.dim() != 2 or acts.values.shape[0] not in bags):
        yield Problem(f"`{path}` has another number of bags than the ids.", describe(acts.values), f"{bags[0]} rows")
    if list(got.items()) != list(dims.items()):
        yield Problem(f"`{path}` has other features than the lookup.", f"{got}", f"{dims}")
    elif acts.values.shape[-1] != sum(dims.values()):
        need = f"f[B, {sum(dims.values())}]"
        yield Problem(f"`{path}.values` does not match its dims.", describe(acts.values), need)


def read_problems(kind: str, read: object, ids, features, shapes) -> Iterator[Problem]:
    """Yield a problem unless the `read` of a kind returned rows of the features' tables."""
    if not isinstance(read, LookupResult):
        what = f"`read` of {kind} returned no LookupResult."
        yield Problem(what, describe(read), "LookupResult(out, saved, transpose)", kind=TypeError)
    elif features[0].pooling != "none":
        yield from acts_problems(f"KINDS[{kind}].read(...).out", read.out, replace(ids, inverse=None), features, shapes)
    elif not isinstance(read.out, Mapping) or list(read.out) != [f.name for f in features]:
        got = list(read.out) if isinstance(read.out, Mapping) else describe(read.out)
        need = f"{{feature: JaggedTensor}} for {[f.name for f in features]}"
        yield Problem(f"`read` of {kind} returned other features than the lookup.", f"{got}", need)
    else:
        for f in features:
            x, dim = read.out[f.name], shapes[f.table][1]
            if not isinstance(x, JaggedTensor) or x.values.shape[1:] != (dim,):
                got = describe(x.values if isinstance(x, JaggedTensor) else x)
                what = f"`read` of {kind} returned no rows for feature {f.name!r}."
                yield Problem(what, got, f"JaggedTensor of f[N, {dim}]")


def part_problems(kind: str, grads: object, heights: Mapping[str, int]) -> Iterator[Problem]:
    """Yield a problem for each gradient of a kind's transpose that is for no part. heights: {part: rows}."""
    if not isinstance(grads, Mapping):
        what = f"the transpose of {kind} returned no gradients."
        yield Problem(what, describe(grads), "{part: RowGrads}", kind=TypeError)
        return
    for n, g in grads.items():
        if n not in heights:
            what, need = (
                f"the transpose of {kind} returned a gradient for no part.",
                f"one of the parts {list(heights)}",
            )
            yield Problem(what, repr(n), need, f"{nearest(str(n), list(heights))!r}", KeyError)
        elif not isinstance(g, RowGrads) or g.num_embeddings != heights[n]:
            what = f"the transpose of {kind} returned no row gradient for part {n!r}."
            yield Problem(what, describe(g), f"RowGrads of {heights[n]} rows", kind=TypeError)


def no_feature(call: str, features: Sequence[FeatureConfig], pooling: str, other: str) -> None:
    got, need = f"poolings {sorted({f.pooling for f in features})}", f"a feature with pooling={pooling!r}"
    fail(call, "no feature is for this lookup.", got=got, need=need, hint=f"funcrec.{other}")


def refuse_other_kinds(call: str, tables: Any) -> None:
    """Raise unless the tables are plain.

    Rows of other kinds may be on other ranks, which pool the bags, so they cannot get a tap.
    """
    if not is_plain(tables):
        fail(
            call, f"weights of ids are differentiated inside the loss, and the tables are "
            f"{type(tables).__name__}: their gradient would be lost.",
            got="`ids.weights` that a grad or jvp inside the loss follows",
            need="weights that only the loss as a whole is differentiated by",
            hint="lookup_sequence, then times the weights and a sum over each bag; or tables in one process",
            kind=TypeError,
        )  # fmt: skip

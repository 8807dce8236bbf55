"""Pooled and sequence lookup, each a linear map of the tables with its transpose beside it.

    acts[b, f] = Σ_{i in bag (f, b)} s_i · table_f[row_i]          lookup
    d_table    = Σ_f Σ_b Σ_{i in bag (f, b)} s_i · e_{row_i} ⊗ d_acts[b, f]          lookup_transpose

s_i is the id's weight (or 1), over the bag's length for a mean. Sums run in f32 (f64 tables: f64). An id outside the
table reads zeros and gets no gradient; it still counts in a mean's length.
Shapes: B bags, F features, N ids, D dim, M entries.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import EXAMPLES, Problem, check, describe, fail, is_checking, kind_of, replace
from funcrec.jagged import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    bag_ids,
    check_ids,
    keyed_tensor_parts,
    take_ranges,
)
from funcrec.kernels.forms import Feature
from funcrec.tables import _primitives as primitives
from funcrec.tables import _validate as checks
from funcrec.tables._configs import (
    FeatureConfig,
    TableConfig,
    feature_list_problems,
    feature_table_problems,
    row_problems,
    table_shapes,
    table_tensor_problems,
)
from funcrec.tables._hashing import hash_rows
from funcrec.tables._rowgrads import Bags, RowGrads
from funcrec.tables._taps import Owner, is_followed_inside, open_tables, summed, tapped

Tables = Mapping[str, Tensor]


def lookup(
    tables: Tables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], *, implementation: str | None = None
) -> KeyedTensor:
    """Pool the rows of every bag: the features of `features` whose pooling is "sum" or "mean".

    Args:
      tables: {name: f[R, D]}; f16 and bf16 tables are kept as they are and summed in f32.
      ids: i32 or i64, B bags per key.
      features: those with pooling "none" are left to `lookup_sequence`.
      implementation: of `funcrec.kernels`, chosen by name; None takes the device's own.

    Returns: KeyedTensor f32|f64[B, ΣD] (f64 when a table is), keys in the order of `features`. Without features it is [B, 0], with
    B the bags of every key (0 when the keys differ).

    Raises: TypeError, ValueError or KeyError that names every feature, table or key that does not fit.

    Law: linear in the tables; ⟨lookup(x), y⟩ = ⟨x, lookup_transpose(y)⟩.

    Cost: reads N ids and N · D elements of the tables, writes B · ΣD.

    Example:
      >>> import torch, funcrec as fr
      >>> tables = {"item": torch.tensor([[1.0, 2.0], [10.0, 20.0]])}
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 1, 1], []]})
      >>> fr.lookup(tables, ids, [fr.FeatureConfig("clicked", table="item")])["clicked"]
      tensor([[21., 42.],
              [ 0.,  0.]])

    Source: torch.nn.EmbeddingBag; TorchRec's EmbeddingBagCollection. A weighted mean divides by the bag's length, as
    FBGEMM's inference tables do.
    """
    if hasattr(tables, "lookup"):  # ShardedTables, which stand above
        return tables.lookup(ids, features, implementation)
    tensors, owners = open_tables(tables)
    check_lookup("funcrec.lookup", tensors, ids, features, need_tensors=True)
    pooled = [f for f in features if f.pooling != "none"]
    if not pooled and features:
        no_feature("funcrec.lookup", features, "sum", "lookup_sequence")
    names = list(dict.fromkeys(f.table for f in pooled))
    num_bags = _num_bags("funcrec.lookup", ids, pooled)
    buffers, kernel_features = _buffers_and_features(ids, pooled, names, table_shapes(tensors))
    used, weights = [tensors[n] for n in names], ids.weights if any(f.weighted for f in pooled) else None
    if by_rows := [o for o in owners if is_followed_inside(weights, o)]:
        reading = (ids, pooled, kernel_features, num_bags)
        used, buffers, kernel_features = _tapped_rows(by_rows, names, used, buffers, reading, implementation)
    owners = [o for o in owners if o not in by_rows]
    values = primitives.pooled_lookup(
        used, buffers, ids.offsets, weights, kernel_features, num_bags, implementation=implementation
    )
    out = KeyedTensor(values, tuple(f.name for f in pooled), tuple(tensors[f.table].shape[1] for f in pooled))
    shapes = {n: t for n, t in tensors.items() if n in names}
    return tapped(owners, out, ids, lambda d, ids: lookup_transpose(d, ids, pooled, shapes), "lookup", tuple(pooled))


def lookup_transpose(
    d_acts: KeyedTensor,
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    tables: Tables | Sequence[TableConfig],
) -> dict[str, RowGrads]:
    """The cotangents of the tables that `lookup` read, as ids and cotangents: no entry is written out (nor coalesced).

    Args:
      d_acts: f[B, ΣD], as `lookup` returned them.
      tables: the configs or the tables; only shapes are read.

    Returns: {table: RowGrads} for the tables of the pooled features; a bag's gradient goes to each of its ids.

    Example:
      >>> import torch, funcrec as fr
      >>> item, clicked = fr.TableConfig("item", 3, 1), fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 2], [2]]})
      >>> d_acts = fr.KeyedTensor.from_dict({"clicked": torch.tensor([[1.0], [10.0]])})
      >>> fr.lookup_transpose(d_acts, ids, [clicked], [item])["item"].to_dense().flatten()
      tensor([ 1.,  0., 11.])
    """
    call = "funcrec.lookup_transpose"
    check_lookup(call, tables, ids, features)
    pooled = [f for f in features if f.pooling != "none"]
    shapes = table_shapes(tables)
    check(call, cotangent_problems(d_acts, ids, pooled, shapes))
    names = list(dict.fromkeys(f.table for f in pooled))
    buffers, kernel_features = _buffers_and_features(ids, pooled, names, shapes)
    terms: dict[str, list[Bags]] = {n: [] for n in names}
    for f in kernel_features:  # those of one table and one buffer that follow each other are one term
        of_table, own = terms[names[f.table]], (f._replace(table=0, rows=0),)
        if of_table and of_table[-1].rows is buffers[f.rows]:
            of_table[-1] = replace(of_table[-1], features=of_table[-1].features + own)
        else:
            of_table.append(Bags(d_acts.values, buffers[f.rows], ids.offsets, ids.weights, own))
    return {n: RowGrads(tuple(t), *shapes[n]) for n, t in terms.items()}


def lookup_sequence(
    tables: Tables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], *, implementation: str | None = None
) -> dict[str, JaggedTensor]:
    """One row per id: the features of `features` whose pooling is "none".

    Returns: {feature: JaggedTensor with values f32|f64[capacity, D]}, the bags of its column; padding is zero. With
    `max_length` L the capacity is min(N, B · L) and bags are cut to L, else it is N.

    Law: linear in the tables; lookup_sequence_transpose is its transpose.

    Example:
      >>> import torch, funcrec as fr
      >>> history = fr.FeatureConfig("history", table="item", pooling="none")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"history": [[2, 0], [1]]})
      >>> fr.lookup_sequence({"item": torch.eye(3)}, ids, [history])["history"].to_lists()[0]
      [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]

    Source: TorchRec's EmbeddingCollection, with any dim per table.
    """
    if hasattr(tables, "lookup_sequence"):
        return tables.lookup_sequence(ids, features, implementation)
    tensors, owners = open_tables(tables)
    check_lookup("funcrec.lookup_sequence", tensors, ids, features, need_tensors=True)
    sequences = [f for f in features if f.pooling == "none"]
    if not sequences and features:
        no_feature("funcrec.lookup_sequence", features, "none", "lookup")
    bags = {f.name: sequence_rows(ids, f, tensors[f.table].shape[0]) for f in sequences}
    rows = {
        f.name: primitives.gather_rows(tensors[f.table], bags[f.name].values, implementation=implementation)
        for f in sequences
    }
    if owners:
        heights = {f.name: tensors[f.table].shape[0] for f in sequences}
        numbers = {k: _marked(x.values, heights[k]) for k, x in bags.items()}
        entries = lambda d, numbers: summed(
            (f.table, RowGrads.from_entries(numbers[f.name], d[f.name], num_embeddings=heights[f.name]))
            for f in sequences
        )
        rows = tapped(owners, rows, numbers, entries, "lookup_sequence", tuple(sequences))
    return {k: JaggedTensor(weigh(rows[k], x), x.offsets) for k, x in bags.items()}


def lookup_sequence_transpose(
    d_sequences: Mapping[str, JaggedTensor],
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    tables: Tables | Sequence[TableConfig],
) -> dict[str, RowGrads]:
    """The cotangents of the tables that `lookup_sequence` read, one entry per id; padding of `d_sequences` is not read.

    Args:
      d_sequences: {feature: JaggedTensor of f[capacity, D]}, as `lookup_sequence` returned them.
      tables: the configs or the tables; only shapes are read.

    Example:
      >>> import torch, funcrec as fr
      >>> item, history = fr.TableConfig("item", 3, 1), fr.FeatureConfig("history", table="item", pooling="none")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"history": [[2, 0], [2]]})
      >>> d = {"history": fr.JaggedTensor(torch.tensor([[1.0], [10.0], [100.0]]), ids.offsets)}
      >>> fr.lookup_sequence_transpose(d, ids, [history], [item])["item"].to_dense().flatten()
      tensor([ 10.,   0., 101.])
    """
    call = "funcrec.lookup_sequence_transpose"
    check(call, kind_of(Mapping[str, JaggedTensor]).find("d_sequences", d_sequences))
    check_lookup(call, tables, ids, features)
    sequences = [f for f in features if f.pooling == "none"]
    shapes = table_shapes(tables)
    out: dict[str, RowGrads] = {}
    for f in sequences:
        bags = sequence_rows(ids, f, shapes[f.table][0])
        if f.name not in d_sequences:
            got = f"{list(d_sequences)}"
            fail(
                call, f"`d_sequences` lacks feature {f.name!r}.", got=got, need=f"{f.name!r} among them", kind=KeyError
            )
        d = d_sequences[f.name].values
        if d.shape != (bags.capacity, shapes[f.table][1]):
            need = f"f[{bags.capacity}, {shapes[f.table][1]}]"
            fail(call, f"`d_sequences[{f.name!r}]` does not match the lookup.", got=describe(d), need=need)
        rows = _marked(bags.values, shapes[f.table][0])
        grads = RowGrads.from_entries(rows, weigh(d, bags), num_embeddings=shapes[f.table][0])
        out[f.table] = out[f.table] + grads if f.table in out else grads
    return out


def sequence_rows(ids: KeyedJaggedTensor, feature: FeatureConfig, num_embeddings: int) -> JaggedTensor:
    """The rows of a sequence feature, bag by bag; padding has row -1."""
    bounds = ids.offsets_for(feature.key)
    lengths, capacity = bounds.diff(), ids.capacity
    if feature.max_length is not None:
        lengths = lengths.clamp(max=feature.max_length)
        capacity = min(capacity, lengths.shape[0] * feature.max_length)
    weights = ids.weights if feature.weighted else None
    bags = take_ranges(ids.values, weights, bounds[:-1], lengths, capacity)
    rows = hash_rows(bags.values, feature.hash, num_embeddings)
    return JaggedTensor(torch.where(bags.bag_ids() < bags.num_bags, rows, -1), bags.offsets, bags.weights)


def _marked(rows: Tensor, num_embeddings: int) -> Tensor:
    """The rows, -1 for those outside the table."""
    return torch.where((rows >= 0) & (rows < num_embeddings), rows, -1)


def weigh(rows: Tensor, bags: JaggedTensor) -> Tensor:
    """f[N, D]: each row times its id's weight, if there are any."""
    return rows if bags.weights is None else rows * bags.weights[:, None].to(rows.dtype)


# -- between configs and kernels ---------------------------------------------------------------------------------


def _buffers_and_features(
    ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], names: list[str], shapes: Mapping
) -> tuple[list[Tensor], list[Feature]]:
    """The buffers of rows, one for each way to hash, and what a kernel is told of each feature."""
    buffers: dict = {}
    out, column = [], 0
    for f in features:
        num_embeddings, dim = shapes[f.table]
        how = None if f.hash is None else (f.hash, num_embeddings)
        if how not in buffers:
            buffers[how] = hash_rows(ids.values, f.hash, num_embeddings)
        options = (f.max_length or 0, f.pooling == "mean", f.weighted, column)
        out.append(Feature(names.index(f.table), list(buffers).index(how), ids.bag_range(f.key)[0], *options))
        column += dim
    return list(buffers.values()), out


def _tapped_rows(
    owners: Sequence[Owner],
    names: list[str],
    tables: list[Tensor],
    buffers: list[Tensor],
    reading: tuple,
    implementation,
) -> tuple[list[Tensor], list[Tensor], list[Feature]]:
    """(tables, buffers, features) of the same lookup in a copy of the rows that it reads, with the taps on those.

    Where a derivative inside the loss goes by the weights, the tables are in it: a tap on what the lookup gives would not be.
    """
    ids, configs, features, num_bags = reading
    pairs = list(dict.fromkeys((f.table, f.rows) for f in features))
    numbers = []
    for t, r in pairs:
        own = [_is_read(ids, f, num_bags) for f in features if (f.table, f.rows) == (t, r)]
        numbers.append(_marked(torch.where(torch.stack(own).any(0), buffers[r], -1), tables[t].shape[0]))
    rows = [primitives.gather_rows(tables[t], x, implementation=implementation) for (t, _), x in zip(pairs, numbers)]
    heights = [t.shape[0] for t in tables]
    entries = lambda d, saved: summed(
        (names[t], RowGrads.from_entries(x, g, num_embeddings=heights[t])) for (t, _), g, x in zip(pairs, d, saved)
    )
    rows = tapped(owners, rows, numbers, entries, "lookup of rows", tuple(configs))
    places = torch.arange(ids.capacity, device=ids.values.device)
    return rows, [places], [f._replace(table=pairs.index((f.table, f.rows)), rows=0) for f in features]


def _is_read(ids: KeyedJaggedTensor, feature: Feature, num_bags: int) -> Tensor:
    """bool[N]: the positions of the buffer that a feature reads."""
    bounds = ids.offsets[feature.first_bag : feature.first_bag + num_bags + 1]
    bag, place = bag_ids(bounds, ids.capacity), torch.arange(ids.capacity, device=bounds.device)
    inside = (bag >= 0) & (bag < num_bags)
    if not feature.max_length:
        return inside
    return inside & (place - bounds.index_select(0, bag.clamp(0, num_bags)) < feature.max_length)


def _num_bags(call: str, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> int:
    counts = {f.name: ids.bags_of(f.key) for f in features}
    if len(set(counts.values())) > 1:
        hint = "one lookup for each number of bags"
        fail(call, "the features have different numbers of bags.", got=f"{counts}", need="one B for all", hint=hint)
    common = set(counts.values()) or set(map(ids.bags_of, ids.keys))
    return common.pop() if len(common) == 1 else 0


def no_feature(call: str, features: Sequence[FeatureConfig], pooling: str, other: str) -> None:
    fail(
        call, "no feature is for this lookup.", got=f"poolings {sorted({f.pooling for f in features})}",
        need=f"a feature with pooling={pooling!r}", hint=f"funcrec.{other}",
    )  # fmt: skip


# -- validators --------------------------------------------------------------------------------------------------


def check_lookup(call: str, tables: object, ids: object, features: object, *, need_tensors: bool = False) -> None:
    """Structure, dtypes and devices of a lookup's arguments; a transpose takes configs for tables, too."""
    if need_tensors and not isinstance(tables, Mapping):
        hint = "funcrec.init(key, tables) makes them of configs"
        fail(call, "`tables` is no mapping.", got=describe(tables), need="{name: f[R, D]}", hint=hint, kind=TypeError)
    check(call, table_tensor_problems(tables), feature_list_problems(features))
    check_ids(call, ids)
    check(
        call,
        row_problems(tables) if isinstance(tables, Mapping) else (),
        feature_table_problems(features, tables),
        checks.feature_key_problems(features, ids),
        device_problems(tables, ids),
        row_dtype_problems(tables, ids, features),
    )
    if is_checking():
        check(call, checks.value_problems(ids, features, table_shapes(tables)))


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


def cotangent_problems(d_acts, ids, features, shapes) -> Iterator[Problem]:
    if not isinstance(d_acts, KeyedTensor):
        yield Problem(
            "`d_acts` is not a KeyedTensor.",
            describe(d_acts),
            "as `lookup` returned",
            EXAMPLES["KeyedTensor"],
            TypeError,
        )
        return
    found = list(keyed_tensor_parts(d_acts, "d_acts"))
    yield from found
    if found:
        return
    dims = {f.name: shapes[f.table][1] for f in features}
    got = dict(zip(d_acts.keys, d_acts.dims, strict=True))
    bags = {ids.bags_of(f.key) for f in features}
    if features and (d_acts.values.dim() != 2 or d_acts.values.shape[0] not in bags):
        yield Problem("`d_acts` has another number of bags than the ids.", describe(d_acts.values), f"{bags} rows")
    if list(got.items()) != list(dims.items()):
        yield Problem("`d_acts` has other features than the lookup.", f"{got}", f"{dims}")
    elif d_acts.values.shape[-1] != sum(dims.values()):
        yield Problem(
            "`d_acts.values` does not match its dims.", describe(d_acts.values), f"f[B, {sum(dims.values())}]"
        )

"""Pooled lookup and sequence lookup, each a linear map of the tables, and the transposes of both.

    acts[b, f] = Σ_{i in bag (f, b)} s_i · table_f[row_i]          lookup
    d_table    = Σ_f Σ_b Σ_{i in bag (f, b)} s_i · e_{row_i} ⊗ d_acts[b, f]          lookup_transpose

s_i is the id's weight (or 1), divided by the bag's length for a mean. Sums run in f32 (f64 for f64 tables). An id
outside the table reads zeros and gets no gradient, but counts in the bag's length. `_maxima` has the pooling "max".

For every kind of tables (`KINDS`), this file checks the arguments once, and adds the tap to the output once.
Shapes: B bags, F features, N ids, D dim, M entries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from funcrec.core import check, describe, fail, is_checking, kind_of
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, check_ids
from funcrec.tables._checks import (
    acts_problems,
    bag_count_problems,
    device_problems,
    feature_key_problems,
    feature_list_problems,
    feature_table_problems,
    gap_problems,
    no_feature,
    part_problems,
    read_problems,
    refuse_other_kinds,
    row_dtype_problems,
    row_problems,
    table_tensor_problems,
)
from funcrec.tables._configs import FeatureConfig, TableConfig
from funcrec.tables._each import (
    groups_of,
    sequence_to_examples_transpose,
    sequences_to_examples,
    to_examples,
    to_examples_transpose,
)
from funcrec.tables._kinds import LookupResult, bounded, is_plain, kind_of_tables, see, table_shapes
from funcrec.tables._maxima import as_sequences, greatest, in_order, is_max, maxima_read, maxima_transpose, weigh
from funcrec.tables._plain import Tables, marked, pooled_transpose, read_plain, read_rows, sequence_rows
from funcrec.tables._rowgrads import RowGrads
from funcrec.tables._tape import Owner, is_followed_inside, open_tables, summed, tapped
from funcrec.tables._value_checks import check_values, room_problems, value_problems

FLAG = kind_of(bool)


def lookup(
    tables: Tables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], *, implementation: str | None = None
) -> KeyedTensor:
    """Return the pooled rows of every bag, for the features whose pooling is "sum", "mean" or "max".

    Args:
      tables: {name: f[R, D]}. f16 and bf16 tables keep their dtype, and sums of rows run in f32.
      ids: i32 or i64, B bags per key. With `inverse` indices of E examples the keys may have different numbers of
        bags: each bag is pooled once, B = E, and row e of feature f is that of its bag (zeros if there is none).
      features: the features to look up. `lookup` skips features with pooling "none", which `lookup_sequence` reads.
      implementation: a name from `funcrec.kernels`; None for the device's default.

    Returns:
      KeyedTensor f32|f64[B, ΣD] (f64 if a table is), keys in the order of `features`. Without features it is [B, 0],
      where B is the number of bags of every key (0 if the keys differ).

    Raises:
      TypeError, ValueError, KeyError: if a feature, table or key does not fit. The message reports all of them.

    Law: a lookup of sums and means is linear in the tables x, and ⟨lookup(x), y⟩ = ⟨x, lookup_transpose(y)⟩. A maximum
      is `bag_reduce(lookup_sequence(...)[name], "max")`, but 0 for an empty bag; sharded tables exchange rows for it.

    Cost: reads N ids and N · D elements of the tables, and writes B · ΣD elements; for a maximum also N · D.

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
    call = "funcrec.lookup"
    tables, ids, owners = opened(call, tables, ids, features)
    pooled = tuple(f for f in features if f.pooling != "none")
    if not pooled and features:
        no_feature(call, features, "sum", "lookup_sequence")
    check(call, bag_count_problems(pooled, ids))
    parts = read_groups(call, tables, owners, ids, groups_of(ids, pooled), implementation)
    return parts[0] if ids.inverse is None else to_examples(parts, ids, pooled)


def lookup_each(
    tables: Tables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], *, implementation: str | None = None
) -> dict[str, Tensor]:
    """Return the pooled rows of each feature's own bags, whose numbers may differ -> {feature: f32|f64[B_f, D_f]}.

    Args:
      tables: {name: f[R, D]}. ids: i32 or i64, B_f bags of each feature's key; `inverse` is not read.
      features: the features to look up. `lookup_each` skips features with pooling "none", as `lookup` does.

    Law: lookup(tables, ids, features)[f][e] = lookup_each(tables, ids, features)[f][inverse[f, e]], bit for bit.

    Example:
      >>> import torch, funcrec as fr
      >>> tables = {"item": torch.tensor([[1.0], [10.0]])}
      >>> ids = fr.KeyedJaggedTensor.from_lists({"user": [[0, 1]], "item": [[0], [1], []]})
      >>> features = [fr.FeatureConfig("user", table="item"), fr.FeatureConfig("item", table="item")]
      >>> fr.lookup_each(tables, ids, features)
      {'user': tensor([[11.]]), 'item': tensor([[ 1.],
              [10.],
              [ 0.]])}

    Source: TorchRec's EmbeddingBagCollection of ids with stride_per_key_per_rank, before inverse_indices are applied.
    """
    call = "funcrec.lookup_each"
    tables, ids, owners = opened(call, tables, ids, features)
    pooled = tuple(f for f in features if f.pooling != "none")
    if not pooled and features:
        no_feature(call, features, "sum", "lookup_sequence")
    parts = read_groups(call, tables, owners, ids, groups_of(ids, pooled), implementation) if pooled else []
    found = {k: p[k] for p in parts for k in p.keys}
    return {f.name: found[f.name] for f in pooled}


def read_groups(
    call: str,
    tables: Any,
    owners: Sequence[Owner],
    ids: KeyedJaggedTensor,
    groups: Sequence[tuple[FeatureConfig, ...]],
    implementation: str | None,
) -> list[KeyedTensor]:
    """Return the pooled rows of each group, f[B_g, ΣD_g]. The features of a group have one number of bags."""
    each, every = kind_of_tables(tables).read_each, tuple(f for g in groups for f in g)
    weights = ids.weights if any(f.weighted for f in every) else None
    is_split = any(map(is_max, every)) or any(is_followed_inside(weights, o) for o in owners)
    read = None if each is None or len(groups) == 1 or is_split else each(tables, ids, groups, implementation)
    if read is None:
        return [pooled_of(call, tables, owners, ids, g, implementation) for g in groups]
    check_room(call, read, owners)
    return tapped(owners, read, "lookup", every)


def pooled_of(
    call: str, tables: Any, owners: Sequence[Owner], ids: KeyedJaggedTensor, pooled: tuple, implementation: str | None
) -> KeyedTensor:
    """Return the lookup of features with one number of bags, without the expansion to examples."""
    sums, maxima = (tuple(f for f in pooled if is_max(f) == which) for which in (False, True))
    if not maxima:
        return sums_of(call, tables, owners, ids, pooled, implementation)
    acts = sums_of(call, tables, owners, ids, sums, implementation) if sums else None
    if any(is_followed_inside(ids.weights, o) for o in owners):  # a derivative of the choice's weights needs the rows
        rows = sequences_of(call, tables, owners, ids, as_sequences(maxima), implementation)
        return in_order(pooled, acts, {k: greatest(x) for k, x in rows.items()})
    read = maxima_read(read_kind(call, tables, ids, as_sequences(maxima), implementation))
    check_room(call, read, owners)
    return in_order(pooled, acts, tapped(owners, read, "lookup of maxima", maxima))


def sums_of(
    call: str, tables: Any, owners: Sequence[Owner], ids: KeyedJaggedTensor, pooled: tuple, implementation: str | None
) -> KeyedTensor:
    """Return the lookup of sums and means, with the taps of the owners."""
    weights = ids.weights if any(f.weighted for f in pooled) else None
    if inside := [o for o in owners if is_followed_inside(weights, o)]:
        refuse_other_kinds(call, tables)
        rows, in_a_copy = read_rows(tables, ids, pooled, implementation)
        read = in_a_copy(tapped(inside, rows, "lookup of rows", pooled))
    else:
        read = read_kind(call, tables, ids, pooled, implementation)
    check_room(call, read, owners)
    return tapped([o for o in owners if o not in inside], read, "lookup", pooled)


def lookup_transpose(
    d_acts: KeyedTensor,
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    tables: Tables | Sequence[TableConfig],
) -> dict[str, RowGrads]:
    """Return the cotangents of `lookup`'s tables.

    The result keeps the ids and d_acts; it neither writes out nor coalesces entries.

    Args:
      d_acts: f[B, ΣD], in the form that `lookup` returns. With `inverse`, cotangents of one bag are added in the order
        of the examples.
      tables: the configs or the tables; only their shapes matter. A maximum needs the tables, to see which id won.

    Returns:
      {table: RowGrads} for the tables of the pooled features; a bag's gradient goes to each id of the bag. That of a
      maximum goes to the first id with the maximum, for each column.

    Example:
      >>> import torch, funcrec as fr
      >>> item, clicked = fr.TableConfig("item", 3, 1), fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 2], [2]]})
      >>> d_acts = fr.KeyedTensor.from_dict({"clicked": torch.tensor([[1.0], [10.0]])})
      >>> fr.lookup_transpose(d_acts, ids, [clicked], [item])["item"].to_dense().flatten()
      tensor([ 1.,  0., 11.])
    """
    call = "funcrec.lookup_transpose"
    tables, ids = checked_rows(call, tables, ids, features)
    pooled = [f for f in features if f.pooling != "none"]
    shapes = table_shapes(tables)
    check(call, acts_problems("d_acts", d_acts, ids, pooled, shapes))
    if ids.inverse is None or not pooled:
        return pooled_of_transpose(call, d_acts, ids, pooled, tables)
    groups = groups_of(ids, pooled)
    parts = zip(to_examples_transpose(d_acts, ids, pooled, groups), groups, strict=True)
    return summed(x for d, g in parts for x in pooled_of_transpose(call, d, ids, g, tables).items())


def pooled_of_transpose(
    call: str, d_acts: KeyedTensor, ids: KeyedJaggedTensor, pooled: Sequence[FeatureConfig], tables: Any
) -> dict[str, RowGrads]:
    """Return the transpose of `pooled_of`."""
    shapes, maxima = table_shapes(tables), [f for f in pooled if is_max(f)]
    if not maxima:
        return pooled_transpose(d_acts, ids, pooled, shapes)
    sums = [f for f in pooled if not is_max(f)]
    of_sums = lambda: KeyedTensor.from_dict({f.name: d_acts[f.name] for f in sums})
    found = pooled_transpose(of_sums(), ids, sums, shapes) if sums else {}
    return summed([*found.items(), *maxima_transpose(call, d_acts, ids, maxima, tables).items()])


def lookup_sequence(
    tables: Tables,
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    *,
    expand: bool = True,
    implementation: str | None = None,
) -> dict[str, JaggedTensor]:
    """Return one row per id, for the features whose pooling is "none".

    Args:
      expand: with `inverse` indices, whether to return the bags of the E examples. False returns the distinct bags.

    Returns:
      {feature: JaggedTensor with values f32|f64[capacity, D]}, with the bags of the feature's column; padding is zero.
      With `max_length` L the capacity is min(N, B · L), and bags are cut to L; else the capacity is N. For examples
      the capacity is E · L; without `max_length` it is the number of their ids, which is read on the host.

    Law: lookup_sequence is linear in the tables, and lookup_sequence_transpose is its transpose.

    Example:
      >>> import torch, funcrec as fr
      >>> history = fr.FeatureConfig("history", table="item", pooling="none")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"history": [[2, 0], [1]]})
      >>> fr.lookup_sequence({"item": torch.eye(3)}, ids, [history])["history"].to_lists()[0]
      [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]

    Source: TorchRec's EmbeddingCollection; here each table may have its own dim.
    """
    call = "funcrec.lookup_sequence"
    check(call, FLAG.find("expand", expand))
    tables, ids, owners = opened(call, tables, ids, features)
    sequences = tuple(f for f in features if f.pooling == "none")
    if not sequences and features:
        no_feature(call, features, "none", "lookup")
    out = sequences_of(call, tables, owners, ids, sequences, implementation) if sequences else {}
    return out if ids.inverse is None or not expand else sequences_to_examples(call, out, ids, sequences)


def sequences_of(
    call: str,
    tables: Any,
    owners: Sequence[Owner],
    ids: KeyedJaggedTensor,
    sequences: tuple,
    implementation: str | None,
) -> dict[str, JaggedTensor]:
    """Return each id's row times its weight, with the taps of the owners on the rows."""
    read = read_kind(call, tables, ids, sequences, implementation)
    check_room(call, read, owners)
    rows = read._replace(out={k: x.values for k, x in read.out.items()})
    rows = tapped(owners, rows, "lookup_sequence", sequences)
    return {k: JaggedTensor(weigh(rows[k], x), x.offsets) for k, x in read.out.items()}


def lookup_sequence_transpose(
    d_sequences: Mapping[str, JaggedTensor],
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    tables: Tables | Sequence[TableConfig],
    *,
    expand: bool = True,
) -> dict[str, RowGrads]:
    """Return the cotangents of `lookup_sequence`'s tables, with one entry per id -> {table: RowGrads}.

    Args:
      d_sequences: {feature: JaggedTensor of f[capacity, D]}, in the form that `lookup_sequence` returns. The padding
        does not matter.
      tables: the configs or the tables; only their shapes matter.
      expand: the `expand` of `lookup_sequence`.

    Example:
      >>> import torch, funcrec as fr
      >>> item, history = fr.TableConfig("item", 3, 1), fr.FeatureConfig("history", table="item", pooling="none")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"history": [[2, 0], [2]]})
      >>> d = {"history": fr.JaggedTensor(torch.tensor([[1.0], [10.0], [100.0]]), ids.offsets)}
      >>> fr.lookup_sequence_transpose(d, ids, [history], [item])["item"].to_dense().flatten()
      tensor([ 10.,   0., 101.])
    """
    call = "funcrec.lookup_sequence_transpose"
    check(call, kind_of(Mapping[str, JaggedTensor]).find("d_sequences", d_sequences), FLAG.find("expand", expand))
    tables, ids = checked_rows(call, tables, ids, features)
    sequences = [f for f in features if f.pooling == "none"]
    shapes = table_shapes(tables)
    out: dict[str, RowGrads] = {}
    for f in sequences:
        bags = sequence_rows(ids, f, shapes[f.table][0])
        if f.name not in d_sequences:
            got, need = f"{list(d_sequences)}", f"{f.name!r} among them"
            fail(call, f"`d_sequences` lacks feature {f.name!r}.", got=got, need=need, kind=KeyError)
        d = d_sequences[f.name].values
        if expand and ids.inverse is not None and d.shape[1:] == (shapes[f.table][1],):
            d = sequence_to_examples_transpose(d, bags, ids, f)
        if d.shape != (bags.capacity, shapes[f.table][1]):
            need = f"f[{bags.capacity}, {shapes[f.table][1]}]"
            fail(call, f"`d_sequences[{f.name!r}]` does not match the lookup.", got=describe(d), need=need)
        rows = marked(bags.values, shapes[f.table][0])
        grads = RowGrads.from_entries(rows, weigh(d, bags), num_embeddings=shapes[f.table][0])
        out[f.table] = out[f.table] + grads if f.table in out else grads
    return out


def opened(call: str, tables: Any, ids: object, features: object) -> tuple[Any, KeyedJaggedTensor, list[Owner]]:
    """Return checked tables without TableRefs, ids that are rows, and the owners that want cotangents of the tables."""
    tables, owners = open_tables(tables)
    if not isinstance(tables, Mapping):
        need, hint = "{name: f[R, D]}", "funcrec.init(key, tables) makes them of configs"
        fail(call, "`tables` is not a mapping.", got=describe(tables), need=need, hint=hint, kind=TypeError)
    rows = checked_rows(call, tables, ids, features)
    see(tables, ids, features)
    return *rows, owners


def checked_rows(call: str, tables: Any, ids: Any, features: Any) -> tuple[Any, KeyedJaggedTensor]:
    """Check the arguments, and return the tables and the ids, which are rows, that a lookup reads in their place."""
    check_lookup(call, tables, ids, features)
    return kind_of_tables(tables).as_rows(tables, ids, features) if isinstance(tables, Mapping) else (tables, ids)


def read_kind(
    call: str, tables: Any, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return the result of a kind's `read`. Raise if it does not match the features, or its transpose the parts."""
    if is_plain(tables) or not features:  # Without features nothing is read.
        check(call, gap_problems(tables, features, implementation))
        return read_plain(tables, ids, features, implementation)
    kind, heights = type(tables).__name__, {n: t.shape[0] for n, t in tables.items()}
    read = kind_of_tables(tables).read(tables, ids, features, implementation)
    check(call, read_problems(kind, read, ids, features, table_shapes(tables)))

    def transpose(d_out: Any, saved: Any) -> dict[str, RowGrads]:
        grads = read.transpose(d_out, saved)
        check(call, part_problems(kind, grads, heights))
        return grads

    return read._replace(transpose=transpose)


# -- validators --------------------------------------------------------------------------------------------------


def check_lookup(call: str, tables: Any, ids: Any, features: Any) -> None:
    """Raise unless the structure, dtypes and devices of a lookup's arguments fit.

    The tables of a transpose may also be configs.
    """
    check(call, table_tensor_problems(tables) if is_plain(tables) else (), feature_list_problems(features))
    check_ids(call, ids)
    check(
        call,
        row_problems(tables) if isinstance(tables, Mapping) and is_plain(tables) else (),
        feature_table_problems(features, tables),
        feature_key_problems(features, ids),
        device_problems(tables, ids),
        row_dtype_problems(tables, ids, features),
    )
    if is_checking():
        check_values(call, lambda ids: value_problems(ids, bounded(features, tables), table_shapes(tables)), ids)


def check_room(call: str, read: LookupResult, owners: Sequence[Owner]) -> None:
    """Raise, under `checked`, if ids found no place.

    The check skips a lookup with owners, because the owners get the overflows of that lookup.
    """
    if is_checking() and not owners:
        check_values(call, room_problems, read.overflows)

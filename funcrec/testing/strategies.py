"""Hypothesis strategies for funcrec's values: `from funcrec.testing import strategies as frs`.

Every value is valid, including its padding. The strategies cover the cases that break jagged code: no bags, empty bags,
repeated ids, ids outside the table, padding full of garbage, i32 and i64, one row, one dim, features that share a
table, columns that feed several features, places named out of order and twice. All strategies shrink to the simplest
value that their options allow: no bags, no padding, i64, f32, no weights, one table, one feature, a plain sum, one
rank, replicated tables.

Numbers are small multiples of 1/4. Every dtype here holds these numbers and their sums exactly.
Shapes: B bags, N capacity, R rows, D dim.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from funcrec.core import replace, sure
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from funcrec.kinds import Vocabulary, vocabulary
from funcrec.tables import FeatureConfig, TableConfig, lookup, modulo, multiply_shift
from funcrec.testing._drawn import FLOAT_DTYPES as FLOAT_DTYPES
from funcrec.testing._drawn import INT_DTYPES as INT_DTYPES
from funcrec.testing._drawn import floats as floats
from funcrec.testing._drawn import garbage as garbage
from funcrec.testing._drawn import lists_of
from funcrec.testing._drawn import tensors as tensors
from funcrec.testing._training_strategies import PLACEMENTS as PLACEMENTS
from funcrec.testing._training_strategies import batches as batches
from funcrec.testing._training_strategies import gradients as gradients
from funcrec.testing._training_strategies import meshes as meshes
from funcrec.testing._training_strategies import plans as plans
from funcrec.testing._training_strategies import row_grads as row_grads
from funcrec.testing._training_strategies import train_states as train_states

KEYS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True)
HASHES = (None, modulo(), multiply_shift(0), multiply_shift(7))


class Lookup(NamedTuple):
    """The arguments of `lookup(*it)` and `lookup_sequence(*it)`."""

    tables: dict[str, Tensor]
    ids: KeyedJaggedTensor
    features: tuple[FeatureConfig, ...]


@st.composite
def jagged_tensors(
    draw,
    *,
    elements: st.SearchStrategy | None = None,
    dtypes: Sequence[torch.dtype] = INT_DTYPES,
    offset_dtypes: Sequence[torch.dtype] = INT_DTYPES,
    weighted: bool | None = None,
    row_shape: Sequence[int] = (),
    min_bags: int = 0,
    max_bags: int = 4,
    max_length: int = 4,
    max_padding: int = 3,
) -> JaggedTensor:
    """Draw a JaggedTensor. It shrinks to no bags, no padding, no weights and the first of the dtypes.

    Args:
      elements: the numbers in the bags; by default 0 to 9, or multiples of 1/4 for a float dtype.
      weighted: whether there are weights; None for either.
      row_shape: values are [N, *row_shape].
      max_padding: the most places of garbage after the last bag.
    """
    dtype, offset_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(offset_dtypes))
    lengths = draw(st.lists(st.integers(0, max_length), min_size=min_bags, max_size=max_bags))
    padding = draw(st.integers(0, max_padding))
    values = draw(_buffers(sum(lengths), padding, elements, dtype, tuple(row_shape)))
    has_weights = draw(st.booleans()) if weighted is None else weighted
    weights = draw(_buffers(sum(lengths), padding, None, torch.float32, ())) if has_weights else None
    return JaggedTensor.from_offsets(values, _offsets(lengths, offset_dtype), weights=weights)


@st.composite
def keyed_jagged_tensors(
    draw,
    *,
    keys: Sequence[str] | None = None,
    elements: st.SearchStrategy | None = None,
    dtypes: Sequence[torch.dtype] = INT_DTYPES,
    offset_dtypes: Sequence[torch.dtype] = INT_DTYPES,
    weighted: bool | None = None,
    same_bags: bool = True,
    min_bags: int = 0,
    max_bags: int = 4,
    max_length: int = 4,
    max_padding: int = 3,
) -> KeyedJaggedTensor:
    """Draw a KeyedJaggedTensor.

    It shrinks to one key without bags, no padding, no weights and the first of the dtypes.

    Args:
      keys: the keys, or None for one to three of "a", "b", "c" in any order.
      weighted: True for weights of all keys, False for no weights, None for weights of no key, of all or of some keys.
      same_bags: whether all keys have one number of bags; if not, every key has its own (strides).
      All other arguments are as in `jagged_tensors`.
    """
    keys = sure(draw(KEYS) if keys is None else keys)
    dtype, offset_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(offset_dtypes))
    counts = st.integers(min_bags, max_bags)
    strides = tuple(draw(counts) for _ in keys) if not same_bags else (draw(counts),) * len(keys)
    size = sum(strides)
    lengths = draw(st.lists(st.integers(0, max_length), min_size=size, max_size=size))
    padding = draw(st.integers(0, max_padding))
    values = draw(_buffers(sum(lengths), padding, elements, dtype, ()))
    own = set(keys) if weighted else {k for k in keys if weighted is None and draw(st.booleans())}
    weights = draw(_buffers(sum(lengths), padding, None, torch.float32, ())) if own or weighted else None
    bare = tuple(k for k in keys if k not in own) if own else ()
    more = {"weights": weights, "strides": None if same_bags else strides, "unweighted": bare}
    return KeyedJaggedTensor.from_offsets(keys, values, _offsets(lengths, offset_dtype), **more)


@st.composite
def keyed_tensors(
    draw,
    *,
    keys: Sequence[str] | None = None,
    num_rows: int | None = None,
    max_dim: int = 3,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
) -> KeyedTensor:
    """Draw a KeyedTensor f[B, ΣD].

    B is `num_rows`, or drawn from 0 to 4. It shrinks to one key of width 1, no rows, f32, zeros.
    """
    keys = sure(draw(KEYS) if keys is None else keys)
    dims = tuple(draw(st.integers(1, max_dim)) for _ in keys)
    num_rows = draw(st.integers(0, 4)) if num_rows is None else num_rows
    values = draw(tensors((num_rows, sum(dims)), dtype=draw(st.sampled_from(dtypes))))
    return KeyedTensor(values, tuple(keys), dims)


@st.composite
def table_configs(
    draw,
    *,
    max_tables: int = 3,
    max_rows: int = 6,
    max_dim: int = 3,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    one_dim: bool = False,
) -> tuple[TableConfig, ...]:
    """Draw one to `max_tables` TableConfigs t0, t1, ... They shrink to one f32 table of one row and dim 1.

    Args:
      one_dim: whether all tables have the same embedding_dim.
    """
    count = draw(st.integers(1, max_tables))
    shared = draw(st.integers(1, max_dim))
    return tuple(
        TableConfig(
            f"t{i}",
            num_embeddings=draw(st.integers(1, max_rows)),
            embedding_dim=shared if one_dim else draw(st.integers(1, max_dim)),
            dtype=draw(st.sampled_from(dtypes)),
        )
        for i in range(count)
    )


@st.composite
def feature_configs(
    draw,
    tables: Sequence[TableConfig] | Mapping[str, Tensor],
    *,
    max_features: int = 4,
    columns: Sequence[str] = ("a", "b", "c"),
    poolings: Sequence[str] = ("sum", "mean", "none"),
    weighted: bool | None = None,
    max_lengths: Sequence[int | None] = (None, 1, 2, 4, 40),
    hashes: Sequence = HASHES,
) -> tuple[FeatureConfig, ...]:
    """Draw one to `max_features` FeatureConfigs f0, f1, ... on the `tables`, which may share tables and columns.

    They shrink to one plain sum over the first table and column. A `max_length` may be shorter than a bag: the rest of
    the bag is then not read.
    """
    names = list(tables) if isinstance(tables, Mapping) else [t.name for t in tables]
    return tuple(
        FeatureConfig(
            f"f{i}",
            table=draw(st.sampled_from(names)),
            pooling=draw(st.sampled_from(poolings)),
            max_length=draw(st.sampled_from(max_lengths)),
            weighted=draw(st.booleans()) if weighted is None else weighted,
            hash=draw(st.sampled_from(hashes)),
            column=draw(st.sampled_from(columns)),
        )
        for i in range(draw(st.integers(1, max_features)))
    )


@st.composite
def tables(draw, configs: Sequence[TableConfig]) -> dict[str, Tensor]:
    """Draw the tables of the `configs`, {name: f[R, D]}. They shrink to zeros."""
    return {t.name: draw(tensors(t.shape, dtype=t.dtype)) for t in configs}


@st.composite
def lookups(
    draw,
    *,
    poolings: Sequence[str] = ("sum", "mean", "none"),
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    weighted: bool | None = None,
    hashes: Sequence = HASHES,
    max_lengths: Sequence[int | None] = (None, 1, 2, 4, 40),
    outside: bool = True,
    max_tables: int = 3,
    max_features: int = 4,
    min_bags: int = 0,
    max_bags: int = 4,
    max_length: int = 4,
) -> Lookup:
    """Draw tables, ids and features that fit together.

    They are for `lookup(*it)` if a feature pools, else for `lookup_sequence(*it)`. They shrink to one f32 table of one
    zero row, one summed feature, no bags.

    Args:
      poolings: the poolings of features. At least one feature has the first of them.
      outside: whether ids of features without a hash may lie outside their table.
      All other arguments are as in `table_configs`, `feature_configs` and `keyed_jagged_tensors`.
    """
    configs = draw(table_configs(max_tables=max_tables, dtypes=dtypes))
    options = {"weighted": weighted, "hashes": hashes, "max_lengths": max_lengths}
    sure = draw(feature_configs(configs, poolings=poolings[:1], max_features=1, **options))
    more = draw(feature_configs(configs, poolings=poolings, max_features=max_features, **options))[1:]
    features = sure + more
    columns = draw(st.permutations(sorted({f.key for f in features})))
    smallest = min(t.num_embeddings for t in configs)
    needed = {f.key for f in features if f.weighted}
    ids = draw(
        keyed_jagged_tensors(
            keys=columns,
            elements=st.integers(-2, 7) if outside else st.integers(0, smallest - 1),
            weighted=True if needed else weighted,
            min_bags=min_bags,
            max_bags=max_bags,
            max_length=max_length,
        )
    )
    if needed and weighted is None:
        bare = [k for k in columns if k not in needed and draw(st.booleans())]
        ids = replace(ids, unweighted=tuple(bare))
    return Lookup(draw(tables(configs)), ids, features)


@st.composite
def cotangents(draw, it: Lookup) -> KeyedTensor:
    """Draw a KeyedTensor in the form of `lookup(*it)`, the first argument of `lookup_transpose`.

    It shrinks to zeros.
    """
    acts = lookup(*it)
    return KeyedTensor(draw(tensors(acts.values.shape, dtype=acts.values.dtype)), acts.keys, acts.dims)


@st.composite
def vocabularies(draw, *, policies: Sequence = ("lru", "lfu", "distance_lfu"), max_buckets: int = 2) -> Vocabulary:
    """Draw an empty vocabulary. It shrinks to 128 rows, the first policy, and the defaults of other settings."""
    one, rows = lambda *choices: draw(st.sampled_from(choices)), 128 * draw(st.integers(1, max_buckets))
    unknown, seed = one("zeros", 1, 3), draw(st.integers(0, 9))
    return vocabulary(
        rows, policy=one(*policies), ttl=one(None, 2), admit=one(None, 2, 0.5), unknown=unknown, seed=seed
    )


@st.composite
def _buffers(draw, used: int, padding: int, elements, dtype: torch.dtype, row_shape: tuple[int, ...]) -> Tensor:
    """Draw a tensor [used + padding, *row_shape] of elements, and then of garbage."""
    if elements is None:
        elements = floats() if dtype.is_floating_point else st.booleans() if dtype == torch.bool else st.integers(0, 9)
    width = torch.Size(row_shape).numel()
    numbers = draw(lists_of(elements, used * width)) + draw(lists_of(garbage(dtype), padding * width))
    return torch.tensor(numbers, dtype=dtype).reshape(used + padding, *row_shape)


def _offsets(lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    bounds = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    return torch.tensor(bounds, dtype=dtype)

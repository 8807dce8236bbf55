"""What the tables are and which features read them.

A table is a matrix with a name; a feature is a column of ids, a table and a way of pooling. Many features may share a
table, one column may feed many tables. Both are frozen and hashable: they are part of the compile key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from funcrec.core import Problem, check, count_problems, describe, flag_problems, plain_numbers, refuse_write, typed
from funcrec.tables._initializers import Initializer

TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SEED_MAX = 2**61
POOLINGS = ("sum", "mean", "none")
DEFAULT_INITIALIZER = Initializer("uniform")


@plain_numbers
@dataclass(frozen=True)
class Hash:
    """How an id that is no row becomes one: `fr.modulo()` or `fr.multiply_shift(seed)`.

    Example:
      >>> import funcrec as fr
      >>> fr.FeatureConfig("user", table="user", hash=fr.modulo()).hash
      Hash(kind='modulo', seed=0)
    """

    kind: Literal["modulo", "multiply_shift"]
    seed: int = 0

    def __post_init__(self):
        check("funcrec.Hash", hash_kind_problems(self))


def modulo() -> Hash:
    """row = id mod num_embeddings, in [0, num_embeddings) for negative ids too.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.hash_rows(torch.tensor([3, 103, -1]), fr.modulo(), 100)
      tensor([ 3,  3, 99])
    """
    return Hash("modulo")


@typed
def multiply_shift(seed: int = 0) -> Hash:
    """row = (((a·id + b) mod 2⁶⁴ >> 32) · num_embeddings) >> 32, a odd; a and b from the seed; num_embeddings < 2³¹.

    Example:
      >>> import torch, funcrec as fr
      >>> rows = fr.hash_rows(torch.arange(1000), fr.multiply_shift(seed=1), 10)
      >>> rows.min(), rows.max()
      (tensor(0), tensor(9))

    Source: Dietzfelbinger, Hagerup, Katajainen, Penttonen, "A reliable randomized algorithm for the closest-pair
    problem" (1997), §2; the last product as in Lemire, "Fast random integer generation in an interval" (2019), §4.
    """
    return Hash("multiply_shift", seed)


@plain_numbers
@dataclass(frozen=True)
class TableConfig:
    """One embedding matrix [num_embeddings, embedding_dim].

    Raises:
      TypeError, ValueError: tells every field that is wrong.

    Example:
      >>> import funcrec as fr
      >>> fr.TableConfig("item", num_embeddings=100_000, embedding_dim=64).initializer.kind
      'uniform'
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype = torch.float32
    initializer: Initializer = DEFAULT_INITIALIZER

    def __post_init__(self):
        check(f"funcrec.TableConfig({self.name!r})", table_problems(self))

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim


@plain_numbers
@dataclass(frozen=True)
class FeatureConfig:
    """One use of a table: which column of ids, pooled how.

    Args:
      name: the key of the answer, and of the ids unless `column` says otherwise.
      table: the table's name.
      pooling: "sum", "mean" (divides by the number of ids in the bag, weighted or not) or "none" (a sequence).
      max_length: a promise that no bag is longer, or None. It gives lookups static shapes; ids past it are not read,
        and `checked` and `validate` name the bag that breaks it.
      weighted: multiply each id's row by its weight.
      hash: `fr.modulo()`, `fr.multiply_shift()`, or None for ids that are rows.
      column: the key in the ids, when one column feeds several features.

    Example:
      >>> import funcrec as fr
      >>> deep = fr.FeatureConfig("item", table="item", max_length=1)
      >>> wide = fr.FeatureConfig("item_wide", table="item_wide", column="item", max_length=1)
      >>> wide.key
      'item'
    """

    name: str
    table: str
    pooling: Literal["sum", "mean", "none"] = "sum"
    max_length: int | None = None
    weighted: bool = False
    hash: Hash | None = None
    column: str | None = None

    def __post_init__(self):
        check(f"funcrec.FeatureConfig({self.name!r})", feature_problems(self))

    @property
    def key(self) -> str:
        """The key of its ids."""
        return self.name if self.column is None else self.column


# -- validators --------------------------------------------------------------------------------------------------


TABLE_HINT = "fr.init(key, table_configs), which makes {name: f[num_embeddings, dim]}"


def table_problems(t: TableConfig) -> Iterator[Problem]:
    if not isinstance(t.name, str) or not t.name:
        yield Problem("`name` is not a name.", describe(t.name), "a non-empty string", kind=TypeError)
    for field in ("num_embeddings", "embedding_dim"):
        yield from count_problems(getattr(t, field), field)
    if not isinstance(t.dtype, torch.dtype) or t.dtype not in TABLE_DTYPES:
        need = ", ".join(map(str, TABLE_DTYPES))
        yield Problem("`dtype` cannot be trained.", f"{t.dtype}", need, "`quantize` for integer rows", TypeError)
    if not callable(t.initializer):
        need = "fr.uniform(), fr.normal(), ... or a callable (key, shape, start, num_embeddings) -> f32[shape]"
        yield Problem("`initializer` is not callable.", describe(t.initializer), need, kind=TypeError)


def hash_kind_problems(h: Hash) -> Iterator[Problem]:
    if not isinstance(h.kind, str) or h.kind not in ("modulo", "multiply_shift"):
        yield Problem("`kind` is unknown.", f"{h.kind!r}", "'modulo' or 'multiply_shift'", "fr.multiply_shift(seed)")
    if not isinstance(h.seed, int) or isinstance(h.seed, bool):
        yield Problem("`seed` is not an integer.", describe(h.seed), "an int", kind=TypeError)
    elif not -SEED_MAX < h.seed < SEED_MAX:
        yield Problem("`seed` is too large.", f"{h.seed}", "an int between -2⁶¹ and 2⁶¹")


def feature_problems(f: FeatureConfig) -> Iterator[Problem]:
    for field in ("name", "table", "column"):
        name = getattr(f, field)
        if not (isinstance(name, str) and name) and not (field == "column" and name is None):
            yield Problem(f"`{field}` is not a name.", describe(name), "a non-empty string", kind=TypeError)
    if not isinstance(f.pooling, str) or f.pooling not in POOLINGS:
        yield Problem("`pooling` is unknown.", f"{f.pooling!r}", " or ".join(map(repr, POOLINGS)))
    if f.max_length is not None:
        yield from count_problems(f.max_length, "max_length")
    yield from flag_problems(f.weighted, "weighted")
    if f.hash is not None and not isinstance(f.hash, Hash):
        yield Problem("`hash` is not a hash.", describe(f.hash), "fr.modulo() or fr.multiply_shift()", kind=TypeError)


for _config in (Hash, TableConfig, FeatureConfig):
    _config.__setattr__ = _config.__delattr__ = refuse_write

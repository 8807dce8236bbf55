"""Configs of tables, and of the features that read them.

A table is a matrix with a name; a feature is a column of ids, a table and a way of pooling. Many features may share a
table, and one column may feed many tables. Both configs are frozen and hashable, and are part of the compile key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from funcrec.core import Count, Name, Problem, check, field_problems, plain_numbers, refuse_write, typed
from funcrec.tables._initializers import Initializer

TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SEED_MAX = 2**61
DEFAULT_INITIALIZER = Initializer("uniform")


@plain_numbers
@dataclass(frozen=True)
class Hash:
    """A function from ids to rows of a table: `fr.modulo()` or `fr.multiply_shift(seed)`.

    Example:
      >>> import funcrec as fr
      >>> fr.FeatureConfig("user", table="user", hash=fr.modulo()).hash
      Hash(kind='modulo', seed=0)
    """

    kind: Literal["modulo", "multiply_shift"]
    seed: int = 0

    def __post_init__(self):
        check("funcrec.Hash", field_problems(self), seed_problems(self.seed))


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
      TypeError, ValueError: reports every invalid field.

    Example:
      >>> import funcrec as fr
      >>> fr.TableConfig("item", num_embeddings=100_000, embedding_dim=64).initializer.kind
      'uniform'
    """

    name: Name
    num_embeddings: Count
    embedding_dim: Count
    dtype: torch.dtype = torch.float32
    initializer: Initializer | Callable[..., torch.Tensor] = DEFAULT_INITIALIZER

    def __post_init__(self):
        check(f"funcrec.TableConfig({self.name!r})", field_problems(self), dtype_problems(self.dtype))

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim


@plain_numbers
@dataclass(frozen=True)
class FeatureConfig:
    """One use of a table: a column of ids, and how their rows are pooled.

    Args:
      name: the feature's key in the output, and in the ids unless `column` is given.
      table: the table's name.
      pooling: "sum", "mean" (divides by the number of ids in the bag, weighted or not) or "none" (a sequence).
      max_length: a promise that no bag is longer, or None. It gives lookups static shapes. Further ids in a bag are not
        read; `checked` and `validate` report a bag that breaks the promise.
      weighted: multiply each id's row by its weight.
      hash: `fr.modulo()`, `fr.multiply_shift()`, or None if ids are rows.
      column: the key in the ids, if one column feeds several features.

    Example:
      >>> import funcrec as fr
      >>> deep = fr.FeatureConfig("item", table="item", max_length=1)
      >>> wide = fr.FeatureConfig("item_wide", table="item_wide", column="item", max_length=1)
      >>> wide.key
      'item'
    """

    name: Name
    table: Name
    pooling: Literal["sum", "mean", "none"] = "sum"
    max_length: Count | None = None
    weighted: bool = False
    hash: Hash | None = None
    column: Name | None = None

    def __post_init__(self):
        check(f"funcrec.FeatureConfig({self.name!r})", field_problems(self))

    @property
    def key(self) -> str:
        """The key of the feature's ids."""
        return self.name if self.column is None else self.column


# -- validators --------------------------------------------------------------------------------------------------


TABLE_HINT = "fr.init(key, table_configs), which makes {name: f[num_embeddings, dim]}"


def dtype_problems(dtype: object) -> Iterator[Problem]:
    if isinstance(dtype, torch.dtype) and dtype not in TABLE_DTYPES:
        need = ", ".join(map(str, TABLE_DTYPES))
        yield Problem("`dtype` cannot be trained.", f"{dtype}", need, "`quantize` for integer rows", TypeError)


def seed_problems(seed: object) -> Iterator[Problem]:
    if isinstance(seed, int) and not -SEED_MAX < seed < SEED_MAX:
        yield Problem("`seed` is too large.", f"{seed}", "an int between -2⁶¹ and 2⁶¹")


for _config in (Hash, TableConfig, FeatureConfig):
    _config.__setattr__ = _config.__delattr__ = refuse_write

"""Configs of tables, and of the features that read them.

A table is a matrix with a name. A feature is a column of ids, a table and a way of pooling. Several features may read
one table, and one column may feed several tables. Both configs are frozen, hashable and part of the compile key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from funcrec.core import Count, Name, Problem, Within, check, field_problems, plain_numbers, refuse_write, typed
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
    seed: Annotated[int, Within("an int between -2⁶¹ and 2⁶¹", lambda n: -SEED_MAX < n < SEED_MAX, "is too large")] = 0

    def __post_init__(self) -> None:
        check("funcrec.Hash", field_problems(self))


def modulo() -> Hash:
    """Return the hash row = id mod num_embeddings.

    Negative ids also get rows in [0, num_embeddings).

    Example:
      >>> import torch, funcrec as fr
      >>> fr.hash_rows(torch.tensor([3, 103, -1]), fr.modulo(), 100)
      tensor([ 3,  3, 99])
    """
    return Hash("modulo")


@typed
def multiply_shift(seed: int = 0) -> Hash:
    """Return the hash row = (((a·id + b) mod 2⁶⁴ >> 32) · num_embeddings) >> 32.

    The seed determines a, which is odd, and b. num_embeddings must be less than 2³¹.

    Example:
      >>> import torch, funcrec as fr
      >>> rows = fr.hash_rows(torch.arange(1000), fr.multiply_shift(seed=1), 10)
      >>> rows.min(), rows.max()
      (tensor(0), tensor(9))

    Source: Dietzfelbinger, Hagerup, Katajainen, Penttonen, "A reliable randomized algorithm for the closest-pair
    problem" (1997), §2; for the last product Lemire, "Fast random integer generation in an interval" (2019), §4.
    """
    return Hash("multiply_shift", seed)


@plain_numbers
@dataclass(frozen=True)
class TableConfig:
    """One embedding matrix [num_embeddings, embedding_dim].

    Raises:
      TypeError, ValueError: if a field is invalid. The message reports every invalid field.

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

    def __post_init__(self) -> None:
        check(f"funcrec.TableConfig({self.name!r})", field_problems(self), dtype_problems(self.dtype))

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim


@plain_numbers
@dataclass(frozen=True)
class FeatureConfig:
    """One use of a table: a column of ids, and the pooling of the rows of these ids.

    Args:
      name: the feature's key in the output, and in the ids unless `column` is given.
      table: the table's name.
      pooling: "sum", "mean" (divides by the number of ids in the bag, weighted or not), "max" (the greatest value of
        each column among the bag's rows, 0 without ids) or "none" (a sequence).
      max_length: a promise that no bag is longer, or None. The promise gives lookups static shapes. Lookups do not read
        further ids of a bag. `checked` and `validate` report a bag that breaks the promise.
      weighted: whether a lookup multiplies each id's row by the id's weight.
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
    pooling: Literal["sum", "mean", "max", "none"] = "sum"
    max_length: Count | None = None
    weighted: bool = False
    hash: Hash | None = None
    column: Name | None = None

    def __post_init__(self) -> None:
        check(f"funcrec.FeatureConfig({self.name!r})", field_problems(self))

    @property
    def key(self) -> str:
        """Return the key of the feature's ids."""
        return self.name if self.column is None else self.column


# -- validators --------------------------------------------------------------------------------------------------


TABLE_HINT = "fr.init(key, table_configs), which makes {name: f[num_embeddings, dim]}"


def dtype_problems(dtype: object) -> Iterator[Problem]:
    if isinstance(dtype, torch.dtype) and dtype not in TABLE_DTYPES:
        need = ", ".join(map(str, TABLE_DTYPES))
        yield Problem("`dtype` cannot be trained.", f"{dtype}", need, "`quantize` for integer rows", TypeError)


for _config in (Hash, TableConfig, FeatureConfig):
    _config.__setattr__ = _config.__delattr__ = refuse_write

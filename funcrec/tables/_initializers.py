"""Distributions of the initial rows of tables.

table[r] = initializer(fold_in(key, name), row r)"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from funcrec.core import Count, Form, Key, Problem, Size, check, describe, plain_numbers, sure, typed
from funcrec.kernels import ops
from funcrec.kernels.draws import CONSTANT, NORMAL, UNIFORM


@plain_numbers
@dataclass(frozen=True)
class Initializer:
    """A distribution of rows, made by `fr.uniform()`, `fr.normal()`, `fr.xavier_normal()` or `fr.constant()`.

    The initializer of a table may also be any other hashable callable with the signature of `__call__`.

    Example:
      >>> import funcrec as fr
      >>> fr.constant(1.0)(fr.key(0), (1, 3), start=0, num_embeddings=10)
      tensor([[1., 1., 1.]])
    """

    kind: Literal["uniform", "normal", "xavier_normal", "constant"]
    scale: float | None = None

    def __post_init__(self) -> None:
        check(f"funcrec.{self.kind}", _initializer_problems(self.kind, self.scale))

    @typed
    def __call__(
        self, key: Key, shape: tuple[Size, Size], start: Size | Annotated[Tensor, Form("i64[M]")], num_embeddings: Count
    ) -> Tensor:
        """Return the elements start, start + 1, ... of the table's sequence, as f32[shape].

        With start i64[M], row i has the elements from start[i] on.
        """
        check(f"funcrec.{self.kind}", start_problems(shape, start))
        each = isinstance(start, Tensor)
        starts = start if each else start + torch.arange(shape[0], device=key.device) * shape[1]
        return drawn(self, key, starts, shape[1], num_embeddings, torch.float32)


def draw_of(initializer: Initializer, num_embeddings: int, dim: int) -> tuple[int, float]:
    """Return the kind and scale with which `ops.initial_rows` draws rows of a table."""
    scale = initializer.scale
    match initializer.kind:
        case "uniform":
            return UNIFORM, num_embeddings**-0.5 if scale is None else scale
        case "normal":
            return NORMAL, sure(scale)
        case "xavier_normal":
            return NORMAL, math.sqrt(2 / (num_embeddings + dim))
        case "constant":
            return CONSTANT, sure(scale)


def drawn(
    initializer: Initializer, key: Tensor, starts: Tensor, dim: int, num_embeddings: int, dtype: torch.dtype
) -> Tensor:
    """Return rows of the elements from starts i64[M] on, rounded once to `dtype` -> f[M, D]."""
    how = draw_of(initializer, num_embeddings, dim)
    return ops.initial_rows(key, starts, dim, *how, dtype, implementation=drawing(key.device))


def drawing(device: torch.device, name: str = "initial_rows") -> str:
    """Return the implementation that draws rows on a device: the chosen one, or the reference if that one lacks the
    operation. All draw the same bits."""
    choice = ops.chosen(None, device)
    return choice if ops.has(name, choice) else "reference"


@plain_numbers
def uniform(bound: float | None = None) -> Initializer:
    """Return the distribution U(-bound, bound). bound defaults to sqrt(1 / num_embeddings), as in TorchRec.

    Example:
      >>> import funcrec as fr
      >>> table = fr.TableConfig("item", 10_000, 4, initializer=fr.uniform())
      >>> bool(fr.init(fr.key(0), [table])["item"].abs().max() <= 0.01)
      True
    """
    return Initializer("uniform", bound)


@plain_numbers
def normal(std: float = 1.0) -> Initializer:
    """Return the distribution N(0, std²).

    Example:
      >>> import funcrec as fr
      >>> table = fr.TableConfig("item", 10_000, 4, initializer=fr.normal(0.1))
      >>> round(float(fr.init(fr.key(0), [table])["item"].std()), 2)
      0.1
    """
    return Initializer("normal", std)


def xavier_normal() -> Initializer:
    """Return the distribution N(0, 2 / (num_embeddings + embedding_dim)), that of torch.nn.init.xavier_normal_.

    Example:
      >>> import funcrec as fr
      >>> table = fr.TableConfig("item", 192, 8, initializer=fr.xavier_normal())
      >>> round(float(fr.init(fr.key(0), [table])["item"].std()), 2)
      0.1
    """
    return Initializer("xavier_normal")


@plain_numbers
def constant(value: float = 0.0) -> Initializer:
    """Return the initializer that sets every number to `value`.

    Example:
      >>> import funcrec as fr
      >>> fr.init(fr.key(0), [fr.TableConfig("bias", 2, 1, initializer=fr.constant(0.5))])["bias"].flatten()
      tensor([0.5000, 0.5000])
    """
    return Initializer("constant", value)


SCALES = {"uniform": "bound", "normal": "std", "constant": "value", "xavier_normal": ""}


def start_problems(shape: tuple[int, int], start: int | Tensor) -> Iterator[Problem]:
    if isinstance(start, Tensor) and start.shape[0] != shape[0]:
        yield Problem(
            "`start` is not one number for each row.", describe(start), f"an int, or i64[{shape[0]}]", "start=0"
        )


def _initializer_problems(kind: object, scale: object) -> Iterator[Problem]:
    if not isinstance(kind, str) or kind not in SCALES:
        yield Problem("`kind` is unknown.", f"{kind!r}", f"one of {list(SCALES)}", "fr.uniform(bound)")
        return
    name = SCALES[kind]
    if scale is None and kind in ("uniform", "xavier_normal"):
        return
    least = -math.inf if kind == "constant" else 0
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        yield Problem(f"`{name}` is not a number.", describe(scale), "a float", kind=TypeError)
    elif not (math.isfinite(scale) and scale >= least):
        need = "a finite number" if kind == "constant" else "a finite number >= 0"
        yield Problem(f"`{name}` is not a scale of a distribution.", f"{scale}", need)

"""The best of all items for each query, by inner products.

rows[b] = the k rows r with the greatest ⟨queries[b], items[r]⟩; among equal scores the lower row comes first

Shapes: B queries, R items, D dim, k.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, cast

import torch
from torch import Tensor

from funcrec.core import Form, Problem, Within, any_tracked, check, describe, device_problems, typed
from funcrec.jagged import JaggedTensor
from funcrec.kernels import library, ops
from funcrec.kernels.forms import CODE_BITS
from funcrec.kinds import QuantizedTables

NumItems = Annotated[int, Within("an int in [1, 2³¹)", lambda k: 1 <= k < 2**31)]
F = TypeVar("F", bound=Callable)


def planned(queries: Tensor, items: Tensor, k: int, bits: int) -> tuple[Tensor, Tensor] | None:
    """Return the result of a usual call, or None if the vectors do not fit, or a derivative needs the operation.

    The memory of a lazy negative has the other sign, so the operation takes it.
    """
    is_usual = not any_tracked((queries, items)) and not queries.is_neg() and not items.is_neg()
    return library.planned("top_k")(queries, items, k, bits) if is_usual else None


def planned_first(fn: F) -> F:
    """Return `fn` with a first try of its plan on two tensors and k, whose checks take a tenth of those of `typed`."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and not kwargs and type(args[1]) is Tensor and type(args[2]) is int:
            queries, items, k = args
            if 1 <= k < 2**31 and ops.is_plain(None, queries) and (found := planned(queries, items, k, 0)) is not None:
                return found
        return fn(*args, **kwargs)

    return cast(F, run)


@planned_first
@typed
def top_k(
    queries: Annotated[Tensor, Form("f16+[B, D]")],
    items: Annotated[Tensor, Form("f16+[R, D]")] | QuantizedTables,
    k: NumItems,
    *,
    exclude: Annotated[JaggedTensor, Form("i[L]", bags="B")] | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k rows of `items` that score highest with each query, and their scores, without an f[B, R].

    A score is Σ_d queries[b, d] · items[r, d], summed in the order of d in f32, or in f64 if `queries` or `items` is
    f64. The bits of a score depend only on the two vectors. They do not depend on the batch, the number of threads or
    the processor.

    Args:
      queries: f[B, D], such as the result of `two_tower(...).query`.
      items: f[R, D], such as the vectors of all candidates; or QuantizedTables of one table. Vectors in f16 and bf16
        are read as they are. For codes the result is that of `dequantize`, bit for bit, and no table of floats is
        written.
      k: the number of rows, static. It may exceed R.
      exclude: B bags of rows to leave out, such as items that the user has seen. Rows outside the table are ignored.
      implementation: the name of one of `funcrec.kernels`. None chooses the default of the device.

    Returns:
      two tensors, f32|f64[B, k] or i64[B, k]: the scores, descending, and their rows. A row with score NaN or -∞ is
      left out. If fewer than k rows are left, the other scores are -inf and the other rows -1.

    Raises:
      TypeError, ValueError: the vectors do not fit each other.

    Law: scores[b, j] = ⟨queries[b], items[rows[b, j]]⟩, and no other row has a greater score than the last. Derivatives
      are those of the scores of the chosen rows.

    Cost: B · R · D products, and memory for B · k numbers.

    Example:
      >>> import torch, funcrec as fr
      >>> items = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
      >>> scores, rows = fr.top_k(torch.tensor([[0.0, 1.0]]), items, 2)
      >>> rows, fr.top_k(torch.tensor([[0.0, 1.0]]), items, 2, exclude=fr.JaggedTensor.from_lists([[1]]))[1]
      (tensor([[1, 2]]), tensor([[2, 0]]))

    Source: FAISS's IndexFlatIP.
    """
    bits, fits, dim = 0, True, 0
    if isinstance(items, QuantizedTables):
        check("funcrec.top_k", table_problems(items))
        ((_, bits, dim),), (items,) = items.forms, items.values()
        bits = bits if bits in CODE_BITS else 0
        fits = queries.shape[1:] == (dim,)  # rows of codes may have equal bytes and different dims
    is_usual = fits and exclude is None and ops.is_plain(implementation, queries)
    if is_usual and (found := planned(queries, items, k, bits)) is not None:
        return found
    vectors = items.new_empty((0, dim), dtype=torch.float32) if bits else items
    check("funcrec.top_k", vector_problems(queries, vectors))
    rows, offsets = (None, None) if exclude is None else (exclude.values, exclude.offsets)
    return ops.top_k(queries, items, rows, offsets, k, bits, implementation=implementation)


# -- validators --------------------------------------------------------------------------------------------------


def table_problems(items: QuantizedTables) -> Iterator[Problem]:
    if len(items) != 1:
        got, hint = f"tables {list(items)}", 'fr.quantize({"items": vectors})'
        yield Problem("`items` are not one table.", got, "QuantizedTables of the items' vectors alone", hint)


def vector_problems(queries: Tensor, items: Tensor) -> Iterator[Problem]:
    if queries.shape[1] != items.shape[1] or not items.shape[1]:
        got, need = f"{describe(queries)} and {describe(items)}", "f[B, D] and f[R, D], D >= 1"
        yield Problem("`queries` and `items` have no dim in common.", got, need, "vectors of one model's two towers")
    yield from device_problems(queries=queries, items=items)

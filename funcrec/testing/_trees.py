"""Compares pytrees, and fills the padding of the jagged values in them.

op(garbage_padding(x)) = op(x)   for every operation that never reads padding
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.core import (
    PARTS,
    Key,
    NotNegative,
    check,
    describe,
    paths,
    random,
    replace,
    tree_map,
    tree_structure,
    typed,
)
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, unweighted_places
from funcrec.tables import Bags, Entries, RowGrads

T = TypeVar("T")
JAGGED = (JaggedTensor, KeyedJaggedTensor, RowGrads)


@typed
def assert_trees_close(a: Any, b: Any, *, rtol: NotNegative = 0, atol: NotNegative = 0) -> None:
    """Assert that two pytrees have one structure, and that their leaves have equal dtypes, shapes and close values.

    |a - b| <= atol + rtol · |b|, elementwise. NaN equals NaN. Padding is compared like all other elements (call
    `zero_padding` on both trees to ignore it). The structure is the structure of torch, with static fields.

    Raises:
      AssertionError: if the trees differ. The error has the path and the size of the first difference.

    Example:
      >>> import torch
      >>> from funcrec.testing import assert_trees_close
      >>> assert_trees_close([torch.ones(2)], [torch.ones(2) + 1e-6], atol=1e-5)
    """
    if tree_structure(a) != tree_structure(b):
        raise AssertionError(
            f"the trees have different structures.\n  got   {tree_structure(a)}\n  need  {tree_structure(b)}\n"
            "  try   the same classes, keys and static fields in both"
        )
    for (path, x), (_, y) in zip(paths(a), paths(b), strict=True):
        got, need = _difference(x, y, rtol, atol)
        if got:
            where = f"at `{path}`" if path else "at the root"
            hint = "rtol=1e-5, atol=1e-6, where rounding may differ"
            raise AssertionError(f"the trees differ {where}.\n  got   {got}\n  need  {need}\n  try   {hint}")


def assert_same_bits(a: Any, b: Any, cell: str = "", hint: str = "") -> None:
    """Assert that two pytrees are equal, also in the signs of their zeros. Any NaN equals any other.

    The message begins with `cell`, which says what was compared, and ends with `hint`.
    """
    for x, y, more in ((a, b, ""), (_signs(a), _signs(b), "The values are equal; signs of zero differ.")):
        try:
            assert_trees_close(x, y)
        except AssertionError as error:
            raise AssertionError("\n".join(filter(None, (cell, str(error), more, hint)))) from None


def _signs(tree: Any) -> Any:
    """Return the tree with the sign bit of each float, and False for NaN."""
    is_float = lambda x: isinstance(x, Tensor) and x.is_floating_point()
    return tree_map(lambda x: torch.signbit(x) & (x == x) if is_float(x) else x, tree)


def _difference(x: Any, y: Any, rtol: float, atol: float) -> tuple[str, str]:
    """Return (text of x and its difference, text of the need). Both are empty for leaves that agree."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        same = type(x) is type(y) and (x is y or x == y or (x != x and y != y))
        return ("", "") if same else (repr(x), repr(y))
    if (x.dtype, x.shape, x.device) != (y.dtype, y.shape, y.device):
        return describe(x), describe(y)
    apart = ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    if x.is_meta or not bool(apart.any()):
        return "", ""
    size = torch.where(apart, (x.double() - y.double()).abs().nan_to_num(torch.inf), -1.0).flatten()
    worst = int(size.argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst), x.shape)]
    values = f"{x.flatten()[worst].item()} and {y.flatten()[worst].item()}"
    got = f"{describe(x)}, {int(apart.sum())} of {x.numel()} elements differ; "
    got += f"the worst is {size[worst].item():.3g} apart, at {at}: {values}"
    return got, f"equal within rtol={rtol}, atol={atol}"


@typed
def garbage_padding(tree: T, key: Key | None = None) -> T:
    """Return `tree` with garbage as the padding of every jagged value and RowGrads.

    If only some keys have weights, the weights of all other keys also become garbage. Floats become NaN. Integers
    alternate between small integers, which could be rows, and integers of any size and sign, which are out of range.
    `key` (an i64[], as from `funcrec.key`) chooses them.

    Law: `garbage_padding(x)` and `x` are the same value, so op(garbage_padding(x)) == op(x), except for the answer's
      padding.

    Example:
      >>> import funcrec as fr
      >>> from funcrec.testing import garbage_padding
      >>> x = fr.JaggedTensor.from_lists([[1.0], [2.0]]).pad_to(3)
      >>> garbage_padding(x).values, garbage_padding(x).to_lists()
      (tensor([1., 2., nan]), [[1.0], [2.0]])
    """
    key = random.key(0) if key is None else key
    return _map_padding(lambda x: _garbage(x, key), tree)


def zero_padding(tree: T) -> T:
    """Return `tree` with zero padding in every jagged value. Rows of RowGrads that count for nothing become -1.

    Law: assert_trees_close(zero_padding(op(garbage_padding(x))), zero_padding(op(x))) holds for an op with a jagged
      answer.
    """
    out = _map_padding(torch.zeros_like, tree)

    def mark(x: Any) -> Any:
        if not isinstance(x, RowGrads):
            return x
        entries = replace(x.entries(), rows=torch.where(x.valid, x.rows, -1), count=x.count)
        return replace(x, terms=(entries,))

    return tree_map(mark, out, is_leaf=_is_jagged)


def _is_jagged(x: Any) -> bool:
    return isinstance(x, JAGGED)


def _map_padding(fill: Callable[[Tensor], Tensor], tree: T) -> T:
    def one(x: Any) -> Any:
        if isinstance(x, RowGrads):
            return replace(x, terms=tuple(_fill_term(fill, t, x.num_embeddings) for t in x.terms))
        if isinstance(x, JaggedTensor | KeyedJaggedTensor):
            check("funcrec.testing", PARTS[type(x)](x, "tree"))
            used = torch.arange(x.capacity, device=x.values.device) < x.offsets[-1]
            read = used & ~unweighted_places(x) if getattr(x, "unweighted", ()) else used
            weights = None if x.weights is None else _fill(fill, x.weights, read)
            return replace(x, values=_fill(fill, x.values, used), weights=weights)
        return x

    return tree_map(one, tree, is_leaf=_is_jagged)


def _fill_term(fill: Callable[[Tensor], Tensor], x: Entries | Bags, num_embeddings: int) -> Entries | Bags:
    """Return x with filled entries past `count`, and filled ids after the last bag.

    An entry past `count` loses its row and gradient. An entry without a valid row loses its gradient.
    """
    if isinstance(x, Bags):
        used = torch.arange(x.rows.shape[0], device=x.rows.device) < x.offsets[-1]
        weights = None if x.weights is None else _fill(fill, x.weights, used)
        return replace(x, rows=_fill(fill, x.rows, used), weights=weights)
    one = RowGrads((x,), num_embeddings, x.grads.shape[1])
    counted = torch.arange(x.rows.shape[0], device=x.rows.device) < one.count
    repeats = None if x.repeats is None else _fill(fill, x.repeats, counted)
    return replace(x, rows=_fill(fill, x.rows, counted), grads=_fill(fill, x.grads, one.valid), repeats=repeats)


def _fill(fill: Callable[[Tensor], Tensor], x: Tensor, used: Tensor) -> Tensor:
    return torch.where(used.reshape(-1, *(1,) * (x.dim() - 1)), x, fill(x))


def _garbage(x: Tensor, key: Tensor) -> Tensor:
    if x.is_floating_point():
        return torch.full_like(x, torch.nan)
    wild = random.bits(key, tuple(x.shape))
    if x.dtype != torch.int64:
        wild = wild >> (64 - 8 * x.dtype.itemsize)
    plausible = random.shift_right(wild, 62)
    even = torch.arange(x.shape[0], device=x.device).reshape(-1, *(1,) * (x.dim() - 1)) % 2 == 0
    return torch.where(even, plausible, wild).to(x.dtype)


def dense_leaves(tree: Any) -> dict[str, Tensor]:
    """Return {path: tensor}, the float tensors for inner products, with zero padding and dense RowGrads."""
    plain = tree_map(lambda x: x.to_dense() if isinstance(x, RowGrads) else x, tree, is_leaf=_is_jagged)
    return {path: x for path, x in paths(zero_padding(plain)) if isinstance(x, Tensor) and x.is_floating_point()}


def with_floats(tree: T, leaves: dict[str, Tensor]) -> T:
    """Return `tree` with the tensors of `leaves` at their paths."""
    flat, spec = torch_tree.tree_flatten(tree)
    named = [path for path, _ in paths(tree)]
    return torch_tree.tree_unflatten([leaves.get(path, x) for path, x in zip(named, flat, strict=True)], spec)

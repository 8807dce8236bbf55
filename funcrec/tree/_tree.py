"""Operations on trees for users, over the registry of `funcrec.core`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from optree import PyTreeSpec
from torch import Tensor

from funcrec.core import (
    UNPADDED,
    NotNegative,
    Problem,
    T,
    check,
    copied,
    describe,
    fast_flatten,
    map_tensors,
    message,
    own_errors,
    tree_map,
    typed,
)
from funcrec.core import to as moved


@typed
def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree of fn(leaf, *leaves in the same place of `rest`).

    Args:
      rest: trees with the structure of `tree`. In the place of a leaf, such a tree may have a whole tree, which fn then
        receives.

    Raises:
      ValueError: if a tree in `rest` has another structure than `tree`.

    Law: map(lambda x: x, tree) equals `tree`, and map(f, map(g, tree)) equals map(lambda x: f(g(x)), tree).

    Example:
      >>> import torch, funcrec as fr
      >>> fr.tree.map(lambda x, y: x + y, {"a": torch.ones(2), "b": None}, {"a": torch.ones(2), "b": None})
      {'a': tensor([2., 2.]), 'b': None}
    """
    own, form = fast_flatten(tree)
    others = [_in_places(form, x, f"rest[{i}]") for i, x in enumerate(rest)]
    with own_errors("funcrec.tree.map", fn, tree, *rest, need="leaves that it takes"):
        return form.unflatten([fn(*xs) for xs in zip(own, *others, strict=True)])


@typed
def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree of fn(path, leaf, *leaves in the same place of `rest`), with the paths of `paths`.

    rest: trees with the structure of `tree`, as in `map`. Other errors and laws are those of `map`.

    Example:
      >>> import torch, funcrec as fr
      >>> params = {"w": torch.ones(2), "norm": {"scale": torch.ones(2)}}
      >>> fr.tree.map_with_path(lambda path, x: "norm" not in path, params)  # which leaves decay
      {'w': True, 'norm': {'scale': False}}
    """
    own, form = fast_flatten(tree)
    others = [_in_places(form, x, f"rest[{i}]", "funcrec.tree.map_with_path") for i, x in enumerate(rest)]
    names = [path for path, _ in paths(tree)]
    with own_errors("funcrec.tree.map_with_path", fn, tree, *rest, need="a path, and leaves that it takes"):
        return form.unflatten([fn(*xs) for xs in zip(names, own, *others, strict=True)])


@typed
def reduce(fn: Callable[..., Any], tree: Any, initial: Any) -> Any:
    """Return fn(... fn(fn(initial, leaf 0), leaf 1) ..., last leaf), or `initial` for a tree without leaves.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.tree.reduce(lambda total, x: total + x.square().sum(), [torch.ones(3), {"b": torch.ones(2)}], 0)
      tensor(5.)
    """
    total = initial
    with own_errors("funcrec.tree.reduce", fn, tree, need="a value and a leaf"):
        for leaf in fast_flatten(tree)[0]:
            total = fn(total, leaf)
    return total


def leaves(tree: Any) -> list[Any]:
    """Return the leaves in their order; None is not a leaf.

    Example:
      >>> import funcrec as fr
      >>> fr.tree.leaves({"a": [1, 2], "b": None, "c": 3})
      [1, 2, 3]
    """
    return fast_flatten(tree)[0]


def structure(tree: Any) -> PyTreeSpec:
    """Return the structure of a tree without its leaves.

    A structure is hashable, and calls with equal structures share a compiled program. The order of a dict's keys
    belongs to the structure, and so do the static fields of a value, such as keys, dims and strides.

    Example:
      >>> import funcrec as fr
      >>> fr.tree.structure({"a": [1, 2]}) == fr.tree.structure({"a": [3, 4]})
      True
    """
    return fast_flatten(tree)[1]


def flatten(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    """Return (leaves, structure) of a tree, from which `unflatten` makes the tree again.

    Example:
      >>> import funcrec as fr
      >>> found, form = fr.tree.flatten({"a": [1, 2], "b": None})
      >>> fr.tree.unflatten(form, [10 * x for x in found])
      {'a': [10, 20], 'b': None}
    """
    return fast_flatten(tree)


@typed
def unflatten(structure: PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """Return the tree with this structure and these leaves.

    Raises:
      ValueError: if the structure has another number of leaves.

    Law: unflatten(structure(tree), leaves(tree)) equals `tree`.

    Example:
      >>> import funcrec as fr
      >>> fr.tree.unflatten(fr.tree.structure({"a": 0, "b": (0, 0)}), [1, 2, 3])
      {'a': 1, 'b': (2, 3)}
    """
    check("funcrec.tree.unflatten", count_problems(structure, leaves))
    return structure.unflatten(leaves)


def paths(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) of each leaf, where the path is the Python code that reaches the leaf.

    Errors name leaves by these paths.

    Example:
      >>> import torch, funcrec as fr
      >>> state = {"step": torch.tensor(0), "slots": [torch.zeros(3), torch.zeros(2, 2)]}
      >>> {path: tuple(x.shape) for path, x in fr.tree.paths(state)}
      {"['step']": (), "['slots'][0]": (3,), "['slots'][1]": (2, 2)}
    """
    found, form = fast_flatten(tree)
    return [(at.codify("").lstrip("."), x) for at, x in zip(form.accessors(), found, strict=True)]


def to(tree: T, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> T:
    """Return the tree with its tensors on a device, or with its floats in a dtype, or both.

    Ids, offsets, steps and keys stay integers; leaves that are not tensors stay. `to` does not copy a tensor that needs
    no change. A tensor that occurs in two places stays one tensor. Every value of funcrec, and every class made by
    `fr.pytree`, has the same function as a method: `batch.to("cuda")`, `state.to(torch.float64)`.

    Args:
      device: a device or its name. A dtype may stand in its place: `to(tree, torch.float16)`.
      dtype: a dtype of floats. The floats include an optimizer's state.

    Raises:
      ValueError: if the device does not exist.
      TypeError: if the dtype is not a float dtype.

    Law: `to` is differentiable in the floats. `to` with the tree's own device and dtype returns the tree's tensors.

    Example:
      >>> import torch, funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], []]}, weights={"clicked": [[0.5, 1.0], []]})
      >>> fr.tree.to({"ids": ids, "n": 3}, torch.float16)
      {'ids': KeyedJaggedTensor({'clicked': [[1, 2], []]}, values=i64[2], weights=f16[2]), 'n': 3}
    """
    return moved(tree, device, dtype)


def copy(tree: T) -> T:
    """Return the tree with a copy of every tensor, so that a change of one tree does not show in the other.

    Use it for values that must outlive a donated call: a moving average, the best state so far, a second run from the
    same start.

    Law: the copies have equal values and memory of their own. Leaves that are not tensors stay.

    Example:
      >>> import torch, funcrec as fr
      >>> step = fr.jit(lambda state: {"w": state["w"] + 1}, donate=("state",))
      >>> state = {"w": torch.zeros(2)}
      >>> mean = fr.copy(state)  # a moving average begins where the state does, in its own memory
      >>> for _ in range(2):
      ...     state = step(state)
      ...     mean = fr.tree.map(lambda m, w: 0.5 * m + 0.5 * w, mean, state)
      >>> mean["w"], state["w"]
      (tensor([1.2500, 1.2500]), tensor([2., 2.]))
    """
    return map_tensors(copied, tree)


def num_parameters(tree: Any) -> int:
    """Return the count of numbers in the float tensors.

    A tensor that occurs in two places counts once. The count leaves out the codes of quantised tables; `nbytes`
    includes them.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.tree.num_parameters({"w": torch.zeros(3, 4), "ids": torch.arange(5)})
      12
    """
    return sum(x.numel() for x in _tensors(tree) if x.is_floating_point())


def nbytes(tree: Any) -> int:
    """Return the count of bytes in the tensors.

    A tensor that occurs in two places counts once.

    Example:
      >>> import torch, funcrec as fr
      >>> batch = {"x": torch.zeros(3, 4), "ids": torch.arange(5)}
      >>> fr.tree.nbytes(batch), {path: x.nbytes for path, x in fr.tree.paths(batch)}
      (88, {"['x']": 48, "['ids']": 40})
    """
    return sum(x.nbytes for x in _tensors(tree))


@typed
def allclose(a: Any, b: Any, *, rtol: NotNegative = 1e-5, atol: NotNegative = 1e-8) -> bool:
    """Return whether two trees have the same structure (in any order of dict keys), and tensors that are close.

    Two tensors are close if they agree in dtype, shape and device, and |a - b| <= atol + rtol · |b| elementwise. NaN
    equals NaN. rtol=0 and atol=0 test for equal values. `funcrec.testing.assert_trees_close` says where two trees
    differ. `allclose` reads the tensors on the host.

    Example:
      >>> import torch, funcrec as fr
      >>> a, b = {"w": torch.ones(2)}, {"w": torch.ones(2) + 1e-6}
      >>> fr.tree.allclose(a, b), fr.tree.allclose(a, b, rtol=0, atol=0), fr.tree.allclose(a, {})
      (True, False, False)
    """
    own, form = fast_flatten(a)
    try:
        others = form.flatten_up_to(b)
    except ValueError:
        return False
    return all(_is_close(x, y, rtol, atol) for x, y in zip(own, others, strict=True))


def equal(a: Any, b: Any) -> bool:
    """Return whether two trees have the same structure (in any order of dict keys) and equal values.

    Tensors must agree in dtype, shape and device; NaN equals NaN. Jagged values are equal if their bags are, whatever
    their padding holds and however long it is. `equal` reads the tensors on the host. `==` of jagged values and of
    tensors is another question.

    Example:
      >>> import funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], []]})
      >>> fr.tree.equal(ids, ids.pad_to(9)), fr.tree.equal({"x": ids}, {"x": ids[:1]})
      (True, False)
    """
    return allclose(_unpadded(a), _unpadded(b), rtol=0, atol=0)


def _unpadded(tree: Any) -> Any:
    is_jagged = lambda x: type(x) in UNPADDED
    return tree_map(lambda x: UNPADDED[type(x)](x) if is_jagged(x) else x, tree, is_leaf=is_jagged)


def _is_close(x: Any, y: Any, rtol: float, atol: float) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (x is y or bool(x == y or (x != x and y != y)))
    same = (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device)
    return same and torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the distinct tensors of a tree."""
    return list({id(x): x for x in fast_flatten(tree)[0] if isinstance(x, Tensor)}.values())


def _in_places(form: PyTreeSpec, tree: Any, name: str, call: str = "funcrec.tree.map") -> list[Any]:
    """Return the parts of `tree` that stand in the places of the leaves of `form`."""
    try:
        return form.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(message(call, [structure_problem(form, tree, name, error)])) from error


def structure_problem(form: PyTreeSpec, tree: Any, name: str, error: ValueError) -> Problem:
    got, need = f"{describe(tree)}: {str(error).splitlines()[0]:.200}", f"{str(form)[:200]}"
    hint = "fr.tree.paths of both, to see where they part"
    return Problem(f"`{name}` is not of the structure of `tree`.", got, need, hint)


def count_problems(form: PyTreeSpec, found: Sequence[Any]) -> Iterator[Problem]:
    if len(found) != form.num_leaves:
        hint = "fr.tree.leaves of a tree of this structure"
        yield Problem("`leaves` have another number.", f"{len(found)}", f"{form.num_leaves} leaves", hint)

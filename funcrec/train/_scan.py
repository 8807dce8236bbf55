"""scan: k steps in one call.

state_k, [m_1 ... m_k] = scan(step, state_0, [b_1 ... b_k])
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.compile import is_followed, is_staging, staged_scan
from funcrec.core import (
    Count,
    Problem,
    check,
    describe,
    fail,
    map_tensors,
    own_errors,
    paths,
    plain_number,
    sure,
    tree_leaves,
    typed,
)
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor

S = TypeVar("S")
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@typed
def scan(
    step: Callable[[S, Any], tuple[S, Any]],
    state: S,
    batches: Any = None,
    *,
    length: Count | None = None,
    reverse: bool = False,
    unroll: bool = True,
) -> tuple[S, Any]:
    """Return the state and the stacked metrics after a step over each of k stacked batches.

    It does not wait for the device between the steps.

    Args:
      step: (state, batch) -> (state, metrics), such as `train_step(...)` or `jit` of it. A donating step uses up
        `state`.
      batches: a pytree of tensors [k, ...] that stacks k batches of one shape. With `length`, it may hold no tensors,
        or be None: each step gets it whole.
      length: k. None takes it from `batches`.
      reverse: whether the steps take the last batch first. The metrics stay in the order of the batches.
      unroll: how a function that `jit` compiles holds the steps. True: k copies of the step are one graph, which
        updates a donated state in place. False: the step is compiled once, and Python calls it k times; the program
        copies the state once per call, then updates the copy in place. (Under grad, vmap and jvp inside the compiled
        function, the steps are always unrolled.) To keep a donated state in place and compile one step, scan over
        `jit(step, donate=...)` outside of other jitted functions.

    Returns:
      The last state, and the metrics stacked along a new first dimension of size k. Numbers become tensors i64, f64
      or bool. Other metrics (a name, None) must be the same in every step, and are returned unchanged.

    Raises:
      ValueError: if the tensors of `batches` have no common leading dimension, if it is not `length`, if k is 0, if a
        metric that is not a number changes, or if the shape of a metric changes.
      TypeError: if `batches` holds arrays, or if the class of a metric changes. With unroll=False, in a compiled
        function: if the state changes its form, or the step exchanges values between ranks. There, numbers in the
        state become tensors, too.

    Law: the result has the same bits as k calls of `step`.

    Cost: 16 steps of a small `train_step` compile in 5.9 s unrolled, and in 3.1 s as one step; a call of them takes 3.0
      and 7.5 ms (one core of an EPYC). Choose unroll=False where steps are long, or k is large.

    Example:
      >>> import torch, funcrec as fr
      >>> add = lambda total, x: (total + x, {"total": total + x})
      >>> fr.scan(add, torch.tensor(0), torch.tensor([1, 2, 3]))
      (tensor(6), {'total': tensor([1, 3, 6])})

    Source: jax.lax.scan, with the carry first.
    """
    check("funcrec.scan", batches_problems(batches, length))
    k = sure(next((x.shape[0] for x in tree_leaves(batches) if isinstance(x, Tensor)), length))
    order = range(k)[::-1] if reverse else range(k)
    one = functools.partial(stepped, step)
    tensors = [x for x in tree_leaves((state, batches)) if isinstance(x, Tensor)]
    if not unroll and is_staging() and not is_followed(tensors):
        return staged_scan(one, state, batches, order)
    collected = []
    for i in order:
        state, metrics = one(state, map_tensors(lambda x: x[i], batches))  # noqa: B023
        collected.append(metrics)
    return state, stack_metrics(collected[::-1] if reverse else collected)


def stepped(step: Callable, state: Any, batch: Any) -> tuple[Any, Any]:
    """Return step(state, batch), after a check that it is a pair."""
    with own_errors("funcrec.scan", step, state, batch, need="the state and the batch that it reads"):
        out = step(state, batch)
    if not isinstance(out, tuple | list) or len(out) != 2:
        what, hint = "`step` returned no pair.", "lambda state, batch: (new_state, {})"
        got = f"{len(out)} values" if isinstance(out, tuple | list) else describe(out)
        fail("funcrec.scan", what, got=got, need="(state, metrics)", hint=hint, kind=TypeError)
    return out[0], out[1]


def batches_problems(batches: Any, length: int | None = None) -> Iterator[Problem]:
    """Report tensors that are not stacks [k, ...] of one k, and arrays. Other leaves are the same for all batches."""
    leaves = paths(batches)
    sizes = {x.shape[0] if x.dim() else None for _, x in leaves if isinstance(x, Tensor)}
    if len(sizes) == 1 and length is not None and not sizes & {None, 0, length}:
        got, need = f"length={length} and {sizes.pop()} batches", "one k, or no `length`"
        yield Problem("`length` is not the number of batches.", got, need, "length=None")
    elif (len(sizes) != 1 and (sizes or length is None)) or sizes & {None, 0}:
        got = f"{sorted({describe(x) for _, x in leaves if isinstance(x, Tensor)})}"
        need, hint = "tensors [k, ...] of one k >= 1", "torch.stack each leaf"
        yield Problem("`batches` is not a stack of batches.", got, need, hint)
    for path, x in leaves:
        if not isinstance(x, Tensor) and hasattr(x, "__array__"):
            what, hint = f"`{_at('batches', path)}` is an array, which each step would get whole.", "torch.as_tensor(x)"
            yield Problem(what, describe(x), "a tensor [k, ...]", hint, TypeError)
    jagged = torch_tree.tree_leaves(batches, is_leaf=lambda x: isinstance(x, JaggedTensor | KeyedJaggedTensor))
    for x in jagged:
        if isinstance(x, JaggedTensor | KeyedJaggedTensor) and x.offsets.dim() != 2:
            got, need = f"{type(x).__name__} with offsets {describe(x.offsets)}", "offsets [k, ...] of k batches"
            yield Problem("`batches` is not a stack of batches.", got, need, "torch.stack each of their tensors")


def stack_metrics(collected: list) -> Any:
    """Return the metrics of all steps: tensors and numbers are stacked, and other leaves are the same in each step."""
    (first, structure), *others = map(torch_tree.tree_flatten, collected)
    wrong = next((i for i, (_, other) in enumerate(others, 1) if other != structure), None)
    if wrong is not None:
        got = f"{structure} from step 0, {others[wrong - 1][1]} from step {wrong}"
        fail("funcrec.scan", "`metrics` have another structure in some steps.", got=got, need="one", kind=TypeError)
    columns = [tuple(map(plain_number, xs)) for xs in zip(first, *(leaves for leaves, _ in others), strict=True)]
    check(
        "funcrec.scan",
        (p for (path, _), xs in zip(paths(collected[0]), columns, strict=True) for p in _mixed(path, xs)),
    )
    return torch_tree.tree_unflatten([_stack(xs) for xs in columns], structure)


def _stack(xs: tuple) -> Any:
    if isinstance(xs[0], Tensor):
        return torch.stack(xs)
    return torch.tensor(xs, dtype=NUMBERS[type(xs[0])]) if type(xs[0]) in NUMBERS else xs[0]


def _mixed(path: str, xs: tuple) -> Iterator[Problem]:
    """Report a metric whose form differs between steps."""
    x = xs[0]
    forms = [(type(y), y.shape, y.dtype, y.device) if isinstance(y, Tensor) else type(y) for y in xs]
    other = next((i for i, form in enumerate(forms) if form != forms[0]), None)
    large = next((i for i, y in enumerate(xs) if type(y) is int and not -(2**63) <= y < 2**63), None)
    if large is not None:
        got, hint = f"{xs[large]} from step {large}", "float(x), or x % 2**63"
        yield Problem(f"`{_at('metrics', path)}` is too large for i64.", got, "integers from -2⁶³ to 2⁶³ - 1", hint)
    if other is None and not isinstance(x, Tensor) and type(x) not in NUMBERS:
        other = next((i for i, y in enumerate(xs) if y is not x and not _is_equal(x, y)), None)
    if other is not None:
        got, need = f"{describe(x)} from step 0, {describe(xs[other])} from step {other}", "one form in all steps"
        hint = "a tensor, or a number"
        kind = TypeError if type(x) is not type(xs[other]) else ValueError
        yield Problem(f"`{_at('metrics', path)}` differs between steps.", got, need, hint, kind)


def _is_equal(x: object, y: object) -> bool:
    """Return whether x == y gives a plain True. For arrays it does not."""
    return (x == y) is True


def _at(root: str, path: str) -> str:
    return root + path if path.startswith("[") or not path else f"{root}.{path}"

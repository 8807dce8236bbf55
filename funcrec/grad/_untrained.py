"""Find trainable tensors that a loss reads but does not receive as arguments, so that nothing would train them.

Autograd's graph of the loss shows such tensors. Without such tensors there is no graph, and the search costs nothing.
Tensors that are frozen, detached or read under torch.no_grad() are not in the graph.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from funcrec.core import Problem, below, describe, message, tree_leaves

CALL = "funcrec.value_and_grad"
TRAINED = "params.dense=dict(module.named_parameters()), and torch.func.functional_call(module, params.dense, x)"


def check_constants(loss: Tensor, *given: Any) -> None:
    """Raise if a loss reads an nn.Parameter that is not an argument. Warn of any other leaf that requires grad."""
    at = below(loss)
    if at.grad_fn is None or isinstance(at, FakeTensor):  # `jit` compiles no function that reads such a tensor
        return
    known = [below(x) for x in tree_leaves(given) if isinstance(x, Tensor)]
    found = leaves_behind(at, known)
    if parameters := [x for x in found if isinstance(x, torch.nn.Parameter)]:
        raise TypeError(message(CALL, [_problem("an nn.Parameter that", "module.requires_grad_(False)", parameters)]))
    if found:
        problem = _problem("a tensor that requires grad, and that", "x.detach()", found)
        warnings.warn(message(CALL, [problem]), stacklevel=4)


def leaves_behind(x: Tensor, known: list[Tensor]) -> list[Tensor]:
    """Return the leaves of x's autograd graph, except `known` tensors and leaves on which `known` tensors depend."""
    ids, seen, left, found = set(map(id, known)), {y.grad_fn for y in known} - {None}, [x.grad_fn], []
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [n for n, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in ids:
            found.append(leaf)
    return found[::-1]


def _problem(which: str, frozen: str, found: Sequence[Tensor]) -> Problem:
    shown = ", ".join(map(describe, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return Problem(
        f"the loss reads {which} it was not given: nothing trains it.",
        f"{shown}, closed over",
        "trained tensors in `params.dense`; all others plain",
        f"{TRAINED}; {frozen}, if it is to stay; an argument of the loss, to differentiate by it",
        TypeError,
    )

"""Whether a derivative of a value is wanted, of a tree of values, or of what a function reads besides its arguments.

    tracked  =  requires grad with grad mode on, or of a level of torch.func, or with a forward tangent

Right or refused: a function whose input is tracked differentiates it, or raises before any work.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcrec.core._tree import tree_leaves
from funcrec.kernels.tracked import any_tracked as any_tracked
from funcrec.kernels.tracked import is_followed as is_followed
from funcrec.kernels.tracked import is_forward as is_forward
from funcrec.kernels.tracked import is_tracked as is_tracked
from funcrec.kernels.tracked import is_transformed as is_transformed
from funcrec.kernels.tracked import is_transforming as is_transforming
from funcrec.kernels.tracked import plain as plain
from funcrec.kernels.tracked import vmaps_of as vmaps_of


def has_tracked(*trees: Any) -> bool:
    """Whether a tensor among the leaves of the trees is tracked."""
    return any_tracked(x for tree in trees for x in tree_leaves(tree))


class _Reads(TorchFunctionMode):
    """Notes every tensor that an operation reads and that no earlier one made."""

    def __init__(self, given: list[Tensor]):
        super().__init__()
        self.known = {id(x): x for x in given}  # kept, so that no id is given twice
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self.known:
                self.found[id(x)] = x
        out = func(*args, **(kwargs or {}))
        self.known |= {id(x): x for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) not in self.found}
        return out


def reading(fn: Callable, *args: Any) -> tuple[Any, list[Tensor]]:
    """(fn(*args), the tensors that it read besides `args`): closed over, in a dict, an object, a partial or a module, wherever they lie."""
    with _Reads([x for x in tree_leaves(args) if isinstance(x, Tensor)]) as reads:
        out = fn(*args)
    return out, [
        *reads.found.values(),
        *(x for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) not in reads.known),
    ]

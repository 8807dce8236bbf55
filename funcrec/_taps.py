"""Tables that remember who looked them up.

    acts = lookup(tables) + tap          d_loss/d_tap is the cotangent of that lookup

`value_and_grad` hands its loss tables of `TableRef`s. Each lookup of refs is a site: its output gets a zero tap, and
its transpose turns the tap's cotangent into RowGrads. A ref is no tensor: any other use of it is an error that says
what to do. No global state: the tape travels in the refs. Floor 2.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec._errors import Problem, fail, message
from funcrec._tree import tree_leaves, tree_map

_DENSE_USE = Problem(
    "a table is used densely inside `value_and_grad`.",
    "an operation on the table itself",
    "tables are only read by `lookup` and `lookup_sequence`, so that their gradients stay rows",
    "move a tied or regularised matrix into `params.dense` and gather from it there, or use weight_decay",
    TypeError,
)


class Tape:
    """The lookup sites of one evaluation, in order; with taps, their cotangents can be asked for."""

    def __init__(self, taps: list | None = None):
        self.taps = taps
        self.sites: list[tuple[Any, Any, Callable]] = []
        self.level = _functorch_level()

    def tap(self, out: Any, saved: Any, transpose: Callable[[Any, Any], dict]) -> Any:
        """Add this site's tap to `out`, a pytree of tensors; `transpose(d_out, saved)` reads no other tensor's value."""
        if any(_level(x) > self.level for x in tree_leaves(out)):
            fail(
                "funcrec.value_and_grad", "a lookup stands inside a vmap or grad that is inside the loss, and reads its argument.",
                got="ids or weights that are vmapped or differentiated inside the loss", need="lookups outside of it",
                hint="look up first and vmap over the activations, or vmap the whole value_and_grad",
            )  # fmt: skip
        index = len(self.sites)
        self.sites.append((tree_map(_zeros, out), saved, transpose))
        return out if self.taps is None else tree_map(torch.add, out, self.taps[index])


class TableRef:
    """A table inside a differentiated loss: it can be looked up, and has a shape, a dtype and a device."""

    def __init__(self, table: Tensor, tape: Tape):
        self.table = table
        self.tape = tape

    shape = property(lambda self: self.table.shape)
    dtype = property(lambda self: self.table.dtype)
    device = property(lambda self: self.table.device)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError(message("funcrec.value_and_grad", [_DENSE_USE]))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise TypeError(message("funcrec.value_and_grad", [_DENSE_USE]))

    def _dense_use(self, *args):
        raise TypeError(message("funcrec.value_and_grad", [_DENSE_USE]))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _dense_use
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = __getitem__ = _dense_use
    __len__ = __iter__ = __float__ = __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _dense_use


def open_tables(tables: Any) -> tuple[Any, Tape | None]:
    """The plain tables, and the tape when they are refs."""
    if not isinstance(tables, Mapping) or not any(isinstance(t, TableRef) for t in tables.values()):
        return tables, None
    tape = next(t.tape for t in tables.values() if isinstance(t, TableRef))
    return {name: t.table if isinstance(t, TableRef) else t for name, t in tables.items()}, tape


def _zeros(x: Tensor) -> Tensor:
    """Of x's form. It reads nothing of x: so the pass that makes it is dead code when staged."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _functorch_level() -> int:
    return torch._C._functorch.maybe_current_level() or 0


def _level(x: Tensor) -> int:
    return torch._C._functorch.maybe_get_level(x) if torch._C._functorch.is_functorch_wrapped_tensor(x) else 0

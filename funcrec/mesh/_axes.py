"""Binds the names of axes while a function runs, and numbers ranks by their places on the axes.

    rank = (... (i_1 · n_2 + i_2) · n_3 + ...) + i_k        for axes of n_1, ..., n_k ranks: the last index runs fastest

Bindings are local to the thread and to the call that made them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from funcrec.core import describe, fail

AxisName = str | tuple[str, ...]


class Axis(NamedTuple):
    """A bound axis.

    marker: i64[], this rank's place on the axis. Under emulation only the axis's own vmap level batches it: that is how
      a collective finds the level.
    group: the process group's name; None under emulation.
    index: this rank's place as an int; None under emulation.
    """

    name: str
    size: int
    marker: Tensor
    group: str | None = None
    index: int | None = None


bound: ContextVar[dict[str, Axis]] = ContextVar("funcrec_axes", default={})  # noqa: B039 (never written to)


def coordinates(rank: int, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return {axis: place on it} of the rank with this number among the ranks of these axes."""
    out = {}
    for a in reversed(axes):
        rank, out[a] = divmod(rank, sizes[a])
    return out


def rank_at(where: Mapping[str, Any], axes: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """Return the number of the rank at {axis: place} among the ranks of these axes.

    The places may be tensors. This function is the inverse of `coordinates`.
    """
    rank = where[axes[0]] if axes else 0
    for a in axes[1:]:
        rank = rank * sizes[a] + where[a]
    return rank


@contextlib.contextmanager
def bind(axes: Sequence[Axis]) -> Iterator[None]:
    """Bind the axes while the body of the `with` statement runs.

    Axes that are bound already stay bound.
    """
    before = bound.get()
    try:
        bound.set({**before, **{a.name: a for a in axes}})
        yield
    finally:
        bound.set(before)


def bound_names() -> tuple[str, ...]:
    """Return the names of the axes that are bound here, outermost first."""
    return tuple(bound.get())


def are_emulated(names: Sequence[str]) -> bool:
    """Return whether the ranks of these axes, which are bound here, run in this process."""
    axes = bound.get()
    return all(axes[a].group is None for a in names)


def bound_axis(call: str, name: AxisName) -> Axis:
    """Return the bound axis with this name."""
    axes = bound.get()
    if not isinstance(name, str):
        fail(call, "`axis_name` is not a name.", got=describe(name), need="the name of an axis", kind=TypeError)
    if name not in axes:
        got, need = f"{name!r}; bound here: {list(axes)}", "an axis of the mesh of an enclosing shard_map"
        fail(call, "an axis is not bound.", got=got, need=need, hint="shard_map(f, mesh=..., ...)")
    return axes[name]


def bound_axes(call: str, names: AxisName) -> list[Axis]:
    """Return the axes of a name or of a tuple of names, the major one first."""
    names = (names,) if isinstance(names, str) else names
    if not is_names(names) or not names or len(set(names)) < len(names):
        need = "a name, or a tuple of distinct names"
        fail(call, "`axis_name` names no axes.", got=f"{names!r}", need=need, kind=TypeError)
    return [bound_axis(call, n) for n in names]


def is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(a, str) for a in x)

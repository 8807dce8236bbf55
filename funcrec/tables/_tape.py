"""Tables that record lookups.

    acts = lookup(tables) + tap          d_loss/d_tap is the cotangent of that lookup

`value_and_grad` passes its loss tables of `TableRef`s. Each lookup of refs is a site: its output gets a zero tap. The
lookup's transpose turns the tap's cotangent into RowGrads of the tables that the refs stand for. The loss may give the
tables other names. A ref is not a tensor: any other use of a ref raises an error that says what to do. There is no
global state: the refs carry the tape.

A site may be inside transforms that the loss calls itself. Inside a vmap the tap has the dimension of the vmap, with a
tap for each member. A grad or jvp inside the loss treats the tap as a constant, as it treats the table.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from funcrec.core import (
    Problem,
    current_level,
    current_run,
    fail,
    is_differentiated_above,
    member_of,
    message,
    quiet_levels,
    remembered,
    sure,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    under_vmaps,
    vmaps_above,
)
from funcrec.tables._kinds import LookupResult, with_parts
from funcrec.tables._rowgrads import RowGrads

_DENSE_USE = Problem(
    "a table is used densely inside `value_and_grad`.",
    "an operation on the table itself",
    "tables are only read by `lookup` and `lookup_sequence`, so that their gradients stay rows",
    "a matrix that is tied or regularised: in `params.dense`, or weight_decay; a fixed copy (a "
    "target network): a lookup under "
    "torch.no_grad(); a gradient in the loss by the tables: fr.value_and_grad there",
    TypeError,
)


class Site(NamedTuple):
    """One lookup of refs.

    form: the parts that must be the same in both passes: names, features, and the (shape, dtype, device) of each tap.
    structure: the tree structure of the taps.
    saved: (what the transpose reads, overflows), below all vmaps between the loss and the lookup.
    dims: for each leaf of `saved`, the dimension that each of those vmaps maps, the outermost vmap first (None if all
      members share the leaf).
    sizes: the sizes of those vmaps.
    """

    form: tuple[Any, ...]
    structure: Any
    saved: Any
    dims: list[tuple[int | None, ...]]
    sizes: tuple[int, ...]
    transpose: Callable[[Any, Any], dict[str, RowGrads]]

    def zeros(self) -> Any:
        """Return zero taps. They do not read the output, so the pass that finds the sites is dead code in a graph."""
        like = lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)
        return tree_unflatten([like(*leaf) for leaf in self.form[-1]], self.structure)

    def cotangents(self, d_taps: Any, saved: Any) -> Iterator[tuple[dict[str, RowGrads], tuple[Tensor, ...]]]:
        """Yield (cotangents of the tables, overflows of the lookup) for each member of the vmaps around the lookup."""
        leaves, structure = tree_flatten(saved)
        for member in itertools.product(*map(range, self.sizes)):
            mine = [member_of(x, dims, member) for x, dims in zip(leaves, self.dims, strict=True)]
            d = tree_map(lambda x: x[member], d_taps) if member else d_taps  # noqa: B023
            read, overflows = tree_unflatten(mine, structure)
            yield self.transpose(d, read), overflows


class Tape:
    """The lookup sites of one evaluation of the loss, in order.

    found: the sites of the first pass; None in the first pass. taps: a tap for each of these sites.
    """

    def __init__(self, found: Sequence[Site] | None = None, taps: Sequence[Any] | None = None):
        self.found = found
        self.taps = taps
        self.sites: list[Site] = []
        self.level, self.run = current_level(), current_run()

    def tap(self, out: Any, saved: Any, transpose: Callable[[Any, Any], dict[Any, Any]], what: tuple[Any, ...]) -> Any:
        """Return `out`, a pytree of tensors, plus this site's tap.

        `transpose(d_out, saved)` may read the values of no other tensors. Where a derivative computes a part of the
        loss again, its lookups are no new sites: they get the same taps.
        """
        tap = remembered(self.run, lambda: self.new_tap(out, saved, transpose, what))
        return out if tap is None else tree_map(torch.add, out, tap)

    def new_tap(self, out: Any, saved: Any, transpose: Callable[[Any, Any], dict], what: tuple) -> Any:
        """Return the tap of a new site, or None in the first pass."""
        outs, structure = tree_flatten(out)
        leaves, saved_structure = tree_flatten(saved)
        maps: dict[int, int] = {}
        for x in (*outs, *leaves):
            maps |= {level: size for level, _, size in vmaps_above(x, self.level)[1]}
        levels = sorted(maps)
        sizes = tuple(maps[v] for v in levels)
        stripped = [vmaps_above(x, self.level) for x in leaves]
        dims = [tuple({v: d for v, d, _ in own}.get(v) for v in levels) for _, own in stripped]
        forms = tuple(((*sizes, *x.shape), x.dtype, x.device) for x in outs)
        kept = tree_unflatten([x for x, _ in stripped], saved_structure)
        site = Site((*what, sizes, forms), structure, kept, dims, sizes, transpose)
        self.sites.append(site)
        if self.found is None:
            return None
        if len(self.sites) > len(self.found) or site.form != self.found[len(self.sites) - 1].form:
            self.refuse_impure()
        return tree_map(lambda x: under_vmaps(x, levels), sure(self.taps)[len(self.sites) - 1])

    def refuse_impure(self) -> None:
        """Raise an error that names the first site that differs from the first pass."""
        show = lambda sites, i: _show(sites[i].form) if i < len(sites) else "no lookup"
        found = sure(self.found)
        pairs = zip(found, self.sites, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a.form != b.form), min(len(found), len(self.sites)))
        fail(
            "funcrec.value_and_grad",
            f"the loss is not a function of its arguments: lookup {first} of its second pass is another one.",
            got=f"first {show(self.found, first)}; then {show(self.sites, first)}",
            need="the same lookups, of the same tables and shapes, whenever the loss is called with the same arguments",
            hint="pass what changes (a counter, a choice of table) as an argument; random ids may be drawn again",
        )  # fmt: skip

    def finish(self) -> None:
        """Raise if the second pass had fewer sites than the first."""
        if len(self.sites) < len(sure(self.found)):
            self.refuse_impure()


def _show(form: tuple) -> str:
    kind, names, features, _, leaves = form
    shapes = [list(shape) for shape, _, _ in leaves]
    read = dict(names)
    names = [read.get(f.table, "a constant") for f in features]
    return f"{kind} of tables {names} by {[f.name for f in features]}, shapes {shapes}"


@contextlib.contextmanager
def handed_over() -> Iterator[None]:
    """Return a context whose error for a transform of torch.func over the loss's tables says what to write instead."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if TableRef.__name__ not in str(error):
            raise
        problem = _DENSE_USE._replace(
            what="a transform of torch was given tables of a loss inside `value_and_grad`.",
            got=str(error).splitlines()[0],
            need="a transform of a function of other tensors, whose lookups read the tables from outside",
            hint="fr.value_and_grad(f)(params) there, which is differentiable too; or "
            "torch.func.grad by `params.dense`",
        )  # fmt: skip
        raise TypeError(message("funcrec.value_and_grad", [problem])) from error


class TableRef:
    """A table inside a differentiated loss. It has a shape, a dtype and a device, and only lookups can read it.

    table: a tensor, a ref of an enclosing loss, or a value that stands for a table: its class has a function `joined`
      of a dict of tables, which returns tables of the kind that reads the dict. tape: None if no tape records it.
    """

    def __init__(self, table: Any, name: str, tape: Tape | None = None):
        self.table = table
        self.name = name
        self.tape = tape

    shape: torch.Size = property(lambda self: self.table.shape)  # type: ignore[assignment]
    dtype: torch.dtype = property(lambda self: self.table.dtype)  # type: ignore[assignment]
    device: torch.device = property(lambda self: self.table.device)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(message("funcrec.value_and_grad", [_DENSE_USE]))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TypeError(message("funcrec.value_and_grad", [_DENSE_USE]))

    def _dense_use(self, *args: Any) -> NoReturn:
        raise TypeError(message("funcrec.value_and_grad", [_DENSE_USE]))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _dense_use
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = __getitem__ = _dense_use
    __len__ = __iter__ = __float__ = __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _dense_use


class Owner(NamedTuple):
    """A tape, and the tables of the tape that a lookup reads.

    names: (the lookup's name, the tape's name) of each table.
    """

    tape: Tape
    names: tuple[tuple[str, str], ...]


def open_tables(tables: Any) -> tuple[Any, list[Owner]]:
    """Return the tables without refs, and the owners that want cotangents of these tables, the outermost first.

    Each of several nested losses has its own tape.
    """
    if not isinstance(tables, Mapping):
        return tables, []
    found: dict[int, tuple[Tape, list]] = {}
    while refs := {n: t for n, t in tables.items() if isinstance(t, TableRef)}:
        for n, t in refs.items():
            if t.tape is not None:
                found.setdefault(id(t.tape), (t.tape, []))[1].append((n, t.name))
        tables = with_parts(tables, {n: t.table if isinstance(t, TableRef) else t for n, t in tables.items()})
    owners = [Owner(tape, tuple(names)) for tape, names in found.values()]
    joined = next((t.joined for t in tables.values() if hasattr(t, "joined")), lambda tables: tables)
    return joined(tables), sorted(owners, key=lambda o: o.tape.level)


def tapped(owners: Sequence[Owner], read: LookupResult, what: str, features: tuple) -> Any:
    """Return the lookup's output with the taps of all owners; `what` and `features` identify the lookup."""
    out, saved = read.out, (read.saved(), read.overflows) if owners else None
    for tape, names in owners:
        out = tape.tap(out, saved, _by_own_names(read.transpose, names), (what, names, features))
    return out


def _by_own_names(
    transpose: Callable[[Any, Any], dict], names: Sequence[tuple[str, str]]
) -> Callable[[Any, Any], dict]:
    """Return a transpose that returns cotangents by the names that the owner uses for the tables."""

    def run(d: Any, saved: Any) -> dict[str, RowGrads]:
        made = transpose(d, saved)
        return summed((own, made[n]) for n, own in names if n in made)

    return run


def summed(grads: Iterable[tuple[str, RowGrads]]) -> dict[str, RowGrads]:
    """Return {name: the sum of the gradients of that name}, added in order."""
    out: dict[str, RowGrads] = {}
    for name, g in grads:
        out[name] = out[name] + g if name in out else g
    return out


def plain_tables(tables: Any) -> Any:
    """Return the tables without TableRefs."""
    return tree_map(lambda t: plain_tables(t.table) if isinstance(t, TableRef) else t, tables)


def is_followed_inside(x: Any, owner: Owner) -> bool:
    """Return whether a grad or jvp that began inside the owner's loss tracks a leaf of x.

    Then the loss depends on the tables also through that derivative.
    """
    floats = [y for y in tree_leaves(x) if isinstance(y, Tensor) and y.is_floating_point()]
    quiet = quiet_levels()
    return remembered(owner.tape.run, lambda: any(is_differentiated_above(y, owner.tape.level, quiet) for y in floats))

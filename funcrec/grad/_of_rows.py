"""of_rows: a function of parameters, as a function of only the rows that it reads, whose leaves are all floats.

    fn(params) == of.fn(of.params)          d fn / d row rows[i] == d of.fn / d of.params.tables[table][i]

So every transform of torch.func may take it: second derivatives need memory for a batch, not for the tables.
Shapes: R rows of a table, n rows read, D dim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, paths, tree_structure, typed
from funcrec.grad._row_tables import HeldRows, holds_vocabularies, places_of, with_room
from funcrec.grad._value_and_grad import find_sites, params_problems
from funcrec.jagged import is_concrete
from funcrec.tables import Params, RowGrads, TableRef, is_plain, kind_of_tables, map_parts, summed

CALL = "funcrec.of_rows"


class OfRows(NamedTuple):
    """A function of the rows that it reads.

    fn: (Params) -> what the function returned, differentiable in all leaves of its argument.
    params: Params(tables={table: f[n, D]}, dense): the rows read, and the dense leaves.
    rows: {table: i64[n]}, the rows' numbers, ascending. Where n exceeds their number, the rest is R.
    shapes: {table: (R, D)} of all tables of the whole parameters.

    Example:
      >>> import torch, funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2, 2], [7]]})
      >>> read = lambda p: fr.lookup(p.tables, ids, [fr.FeatureConfig("clicked", table="item")]).values.sum()
      >>> of = fr.of_rows(read, fr.Params({"item": torch.ones(1000, 1)}, {}))
      >>> of.put(torch.func.grad(of.fn)(of.params)).tables["item"]
      RowGrads(entries, at most [2, 1], of 1000 rows)
    """

    fn: Callable[[Params], Any]
    params: Params
    rows: dict[str, Tensor]
    shapes: dict[str, tuple[int, int]]

    def take(self, direction: Params) -> Params:
        """Return a value like `params` of one like the whole parameters: tables are f[R, D] or RowGrads; a table
        that is absent has zeros."""
        check("funcrec.OfRows.take", direction_problems(self, direction))
        of_table = lambda n: taken(direction.tables.get(n), self.rows[n], self.params.tables[n], self.shapes[n][0])
        return Params({n: of_table(n) for n in self.rows}, direction.dense)

    def put(self, values: Params) -> Params:
        """Return a value like `params` with RowGrads of the whole tables."""
        check("funcrec.OfRows.put", value_problems(self, values))
        put = lambda n, x: RowGrads.from_entries(self.rows[n], x, num_embeddings=self.shapes[n][0])
        return Params({n: put(n, x) for n, x in values.tables.items()}, values.dense)


@typed
def of_rows(fn: Callable[..., Any], params: Params, *args: Any, **kwargs: Any) -> OfRows:
    """Return a function of parameters as a function of only the rows that it reads.

    All leaves of its parameters are floats, n rows of each table, so every transform of torch.func takes them: grad of
    grad, jvp, hessian, vmap. What these return is in proportion to the rows read, whatever the size of the tables.

    Args:
      fn: (params, *args, **kwargs) -> a tree of tensors, such as a loss or predictions. It reads tables only through
        lookups, any number of times, under any names, and next to other tables.
      params: the tables are a plain dict {name: f[R, D]}, or `dynamic_tables`, whose vocabularies stay as they are.
      args, kwargs: the other arguments. They are part of the returned function.

    Returns:
      OfRows(fn, params, rows, shapes). `take` restricts a direction or another tree like `params` to the rows read,
      and `put` turns a tree like the small parameters into RowGrads. n is the number of distinct rows read; in a
      program of `fr.jit`, or under vmap, where numbers cannot be read, it is the number of ids.

    Raises:
      TypeError: if the tables are of another kind (sharded, cached, quantised), or are used densely.

    The result pickles where `fn` and the other arguments do, with the rows read and without the rest of the tables.

    Law: `of.fn(of.params) == fn(params, *args, **kwargs)`, bit for bit, and its derivatives by rows are those of `fn`
      by the dense tables. The rows are those of the first call: where fn would read another row of a table, because it
      draws ids, the result is NaN.

    Example:
      >>> import torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2, 2], [7]]})
      >>> loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [clicked]).values * p.dense).square().sum()
      >>> of = fr.of_rows(loss_fn, fr.Params({"item": torch.ones(1000, 1)}, torch.tensor(2.0)), ids)
      >>> of.rows, torch.func.grad(of.fn)(of.params).tables["item"].flatten()
      ({'item': tensor([2, 7])}, tensor([32.,  8.]))
    """
    check(CALL, params_problems(params))
    check(CALL, kind_problems(params))
    sites = find_sites(fn, params, args, kwargs)
    found = summed(x for site in sites for made, _ in site.cotangents(site.zeros(), site.saved) for x in made.items())
    shapes = {n: tuple(t.shape) for n, t in params.tables.items()}
    rows = {n: distinct(g) for n, g in found.items()}
    heights = {n: shapes[n][0] for n in rows}
    own = Params({n: taken(params.tables[n], rows[n], params.tables[n], heights[n]) for n in rows}, params.dense)

    no_row = lambda t: HeldRows(t[:1].clone(), torch.full((1,), t.shape[0], device=t.device), t.shape[0])
    others = None if is_plain(params.tables) else map_parts(lambda _, t: no_row(t), params.tables)
    return OfRows(RowsFunction(fn, args, kwargs, own, rows, heights, others), own, rows, shapes)


@dataclass(eq=False, repr=False)
class RowsFunction:
    """The function `fn` of an OfRows. It pickles where the user's function and its other arguments do.

    like: parameters of the function. others: None, or tables of another kind than a dict, with rows held of none."""

    fn: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    like: Params
    rows: dict[str, Tensor]
    heights: dict[str, int]
    others: Any

    def __repr__(self) -> str:
        return f"<{getattr(self.fn, '__name__', type(self.fn).__name__)} of rows>"

    def __call__(self, params: Params) -> Any:
        check("funcrec.OfRows.fn", point_problems(self.like, params))
        held = {n: TableRef(HeldRows(x, self.rows[n], self.heights[n]), n) for n, x in params.tables.items()}
        if self.others is not None:
            held = map_parts(lambda n, t: held[n] if n in held else TableRef(t, n), self.others)
        return self.fn(Params(held, params.dense), *self.args, **self.kwargs)


def distinct(grads: RowGrads) -> Tensor:
    """Return the distinct rows of a gradient, ascending, and R in the places behind them. There is at least one."""
    out, height = with_room(grads).coalesce(), grads.num_embeddings
    rows = torch.where(out.valid, out.rows, height).long()
    if is_concrete(out.count):
        rows = rows[: int(out.count)]
    return rows if rows.shape[0] else rows.new_full((1,), height)


def taken(table: Tensor | RowGrads | None, rows: Tensor, like: Tensor, height: int) -> Tensor:
    """Return the rows of a table or of a gradient, f[n, D]; zeros for places behind the last."""
    if table is None:
        return like.new_zeros(rows.shape[0], like.shape[1])
    if isinstance(table, RowGrads):
        whole = with_room(table).coalesce()
        own = torch.where(whole.valid, whole.rows, height).long()
        if not own.shape[0]:
            return whole.grads.new_zeros(rows.shape[0], whole.dim)
        place, _ = places_of(own, rows, height)
        values = whole.grads
    else:
        place, values = torch.where(rows < height, rows, -1), table
    read = values.index_select(0, place.clamp(min=0)) if values.shape[0] else values.new_zeros(len(rows), like.shape[1])
    return torch.where((place >= 0)[:, None], read, 0)


# -- validators --------------------------------------------------------------------------------------------------


def kind_problems(params: Params) -> Iterator[Problem]:
    if any(isinstance(t, TableRef) for t in params.tables.values()):
        what = "of_rows, hvp and their like read tables of a loss inside of `value_and_grad`."
        need, got = "the tables themselves", "a table of a loss that is differentiated outside"
        hint = (
            "of = fr.of_rows(loss_fn, params, batch) outside, and torch.func.grad of an f(of.params) that calls of.fn"
        )
        yield Problem(what, got, need, hint, TypeError)
    elif not is_plain(params.tables) and not holds_vocabularies(params.tables):
        what, need = "`params.tables` are not plain tables.", "{name: f[R, D]}, or dynamic_tables in memory"
        yield Problem(what, describe(params.tables), need, hint_for(params.tables), TypeError)


def hint_for(tables: Mapping) -> str:
    """Return what to try in place of another kind of tables."""
    kind = kind_of_tables(tables)
    if kind.layout(tables) is not None:
        return "fr.gather_tables(tables, mesh), on one process"
    if kind.follows(tables):
        return "the gather(params) of the fr.cached_step that trains them, which returns all rows"
    return "the float tables, such as `.tables` of fake_quantize: a rounded row has no curvature"


def direction_problems(of: OfRows, direction: object) -> Iterator[Problem]:
    """Report what is not a tree like the whole parameters."""
    yield from params_like_problems("direction", direction)
    if not isinstance(direction, Params) or not isinstance(direction.tables, Mapping):
        return
    for name, x in direction.tables.items():
        what, need = f"`direction.tables[{name!r}]` does not fit.", of.shapes.get(name)
        shape = (x.num_embeddings, x.dim) if isinstance(x, RowGrads) else tuple(getattr(x, "shape", ()))
        if need is None:
            yield Problem(what, f"a table {name!r}", f"one of {list(of.shapes)}", kind=KeyError)
        elif shape != need or not (isinstance(x, RowGrads) or is_float(x)):
            yield Problem(what, describe(x), f"f{list(need)}, or RowGrads of such a table")
    yield from dense_problems("direction", of, direction)


def point_problems(own: Params, point: object) -> Iterator[Problem]:
    """Report what is not small parameters: a table's rows may have another dtype, but no other shape."""
    yield from params_like_problems("params", point)
    if not isinstance(point, Params) or not isinstance(point.tables, Mapping):
        return
    if point.tables.keys() != own.tables.keys():
        got, need = f"tables {list(point.tables)}", f"tables {list(own.tables)}, those of `params` of the OfRows"
        yield Problem("`params.tables` are not the rows of the tables that are read.", got, need, kind=KeyError)
        return
    hint = "torch.func.grad_and_value(of.fn)(of.params), in place of fr.value_and_grad"
    for name, x in point.tables.items():
        need = own.tables[name]
        if not is_float(x) or x.shape != need.shape:
            got = "a table of a loss" if isinstance(x, TableRef) else describe(x)
            yield Problem(f"`params.tables[{name!r}]` are not rows.", got, describe(need), hint, TypeError)


def value_problems(of: OfRows, values: object) -> Iterator[Problem]:
    """Report what is not a tree like the small parameters."""
    yield from params_like_problems("values", values)
    if not isinstance(values, Params) or not isinstance(values.tables, Mapping):
        return
    for name, x in values.tables.items():
        need = of.params.tables[name] if name in of.rows else None
        if need is None or not is_float(x) or x.shape != need.shape:
            what = describe(need) if need is not None else f"a table among {list(of.rows)}, those read"
            hint = "a tree like `params` of the OfRows, such as torch.func.grad(of.fn)(of.params)"
            yield Problem(f"`values.tables[{name!r}]` does not fit.", describe(x), what, hint)
    yield from dense_problems("values", of, values)


def is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def params_like_problems(name: str, x: object) -> Iterator[Problem]:
    hint = "a gradient of value_and_grad; fr.Params({}, dense)"
    if not isinstance(x, Params):
        yield Problem(f"`{name}` is not Params.", describe(x), "Params(tables, dense)", hint, TypeError)
    elif not isinstance(x.tables, Mapping):
        yield Problem(
            f"`{name}.tables` is not a dict.", describe(x.tables), "{name: a table's values}", hint, TypeError
        )


def dense_problems(name: str, of: OfRows, x: Params) -> Iterator[Problem]:
    mine, theirs = tree_structure(of.params.dense), tree_structure(x.dense)
    hint = "fr.tree.map(torch.zeros_like, params.dense), for a direction along tables alone"
    if mine != theirs:
        what, need = f"`{name}.dense` has another structure.", f"{mine}, that of the parameters"
        yield Problem(what, f"{theirs}", need, hint, TypeError)
        return
    for (path, p), (_, y) in zip(paths(of.params.dense), paths(x.dense), strict=True):
        if not is_float(y) or y.shape != p.shape:
            yield Problem(f"`{name}.dense{path}` has another shape or dtype.", describe(y), describe(p), hint)

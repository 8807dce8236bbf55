"""Turn a row optimizer's rule into a formula: the result of the rule's Python code on symbols in place of tensors.

    (row f[D], grad f[D], {slot: f[D] or f[]}, hyper) → {"row": Symbol, slot: Symbol, ...}
    an expression that occurs twice in a formula is one symbol

A symbol has one of three kinds, in this order. HOST: known before the update (hyper-parameters, the step), computed
in f64. NUMBER: one number for a row. WIDE: one number for each element. NUMBER and WIDE are in the dtype of the rule. A
HOST value is rounded to that dtype where it meets another kind. An operation on two kinds gives the later kind. A
reduction turns WIDE into NUMBER and ends a level: an operation that needs the result waits for a pass over the row.
`write_rules` derives from the formula what kernels must know about a rule. `write_cpp` and `write_triton` write the
kernels' code.
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

HOST, NUMBER, WIDE = range(3)
Formula = dict[str, "Symbol"]


class UnknownError(Exception):
    """Raised if a rule does something for which there is no symbol; the message names it."""


class Symbol:
    """The operation `op(*args)`, where an argument is a symbol or a number.

    level: the length of the longest chain of reductions on which the symbol depends.
    """

    def __init__(self, op: str, args: tuple, kind: int, level: int, nodes: dict):
        self.op, self.args, self.kind, self.level, self.nodes = op, args, kind, level, nodes

    __add__: Any = lambda x, y: made("add", x, y)
    __radd__: Any = lambda x, y: made("add", y, x)
    __sub__: Any = lambda x, y: made("sub", x, y)
    __rsub__: Any = lambda x, y: made("sub", y, x)
    __mul__: Any = lambda x, y: made("mul", x, y)
    __rmul__: Any = lambda x, y: made("mul", y, x)
    __truediv__: Any = lambda x, y: made("div", x, y)
    __rtruediv__: Any = lambda x, y: made("div", y, x)
    __neg__: Any = lambda x: made("neg", x)
    __and__: Any = lambda x, y: made("and", x, y)
    __or__: Any = lambda x, y: made("or", x, y)
    __lt__: Any = lambda x, y: made("lt", x, y)
    __le__: Any = lambda x, y: made("le", x, y)
    __gt__: Any = lambda x, y: made("gt", x, y)
    __ge__: Any = lambda x, y: made("ge", x, y)
    __eq__: Any = lambda x, y: made("eq", x, y)
    __hash__: Any = object.__hash__

    def __bool__(self) -> bool:
        raise UnknownError(
            "a rule's branch looks at a number: torch.where, or a bool, a name or None among its hyper-parameters"
        )

    def __getattr__(self, name: str) -> Callable:
        if name not in METHODS:
            raise UnknownError(f"a rule has .{name}(), which has no formula")
        return functools.partial(applied, name, self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = getattr(function, "__name__", str(function))
        if name not in METHODS:
            raise UnknownError(f"a rule has torch.{name}, which has no formula")
        return applied(name, *args, **(kwargs or {}))


def applied(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a torch function or method, given by its name, on symbols."""
    try:
        return METHODS[name](*args, **kwargs)
    except TypeError as error:
        raise UnknownError(f"a rule has {name} with arguments that no formula has: {error}") from error


def made(op: str, *args: "Symbol | float") -> Symbol:
    """Return the symbol of an operation.

    0 · x is the symbol "nothing", and nothing + x is x, so that a formula with a number that is 0 reads less.
    """
    symbols = [x for x in args if isinstance(x, Symbol)]
    if not symbols or not all(isinstance(x, Symbol | int | float) for x in args):
        raise UnknownError(f"{op} of {', '.join(type(x).__name__ for x in args)}")
    kind, level = max(x.kind for x in symbols), max(x.level for x in symbols)
    is_nothing = lambda x: x.op == "nothing" if isinstance(x, Symbol) else x == 0
    if op == "mul" and kind == WIDE and any(map(is_nothing, args)):
        op, args = "nothing", ()
    if op == "add" and kind == WIDE and any(isinstance(x, Symbol) and x.op == "nothing" for x in args):
        return cast(Symbol, next((x for x in args if not is_nothing(x)), symbols[0]))
    if op == "sum":
        kind, level = NUMBER, level + (kind == WIDE)
    return interned(symbols[0].nodes, op, args, kind, level)


def interned(nodes: dict, op: str, args: tuple, kind: int, level: int = 0) -> Symbol:
    key = op, kind, *(id(x) if isinstance(x, Symbol) else repr(x) for x in args)
    return nodes.setdefault(key, Symbol(op, args, kind, level, nodes))


def of_kind(name: str) -> Callable:
    return lambda *args: made(name, *args)


def clamp(x: Symbol, min: Any = None, max: Any = None) -> Symbol:
    x = x if min is None else made("maximum", x, min)
    return x if max is None else made("minimum", x, max)


METHODS = {
    **{name: of_kind(name) for name in ("sign", "abs", "exp2", "where", "maximum", "minimum")},
    "sum": lambda x: made("sum", x) if x.kind == WIDE else x,
    "square": lambda x: made("mul", x, x),
    "mean": lambda x: made("sum", x) / interned(x.nodes, "dim", (), NUMBER) if x.kind == WIDE else x,
    "sqrt": of_kind("root"),
    "clamp": clamp,
    "dim": lambda x: int(x.kind == WIDE),
    "expand_as": lambda x, like: made("like", x, like),
}


def primitive(function: Callable) -> Callable:
    """Return a torch function that on symbols returns the symbol of its own name.

    It serves functions that kernels implement under that name.
    """

    @functools.wraps(function)
    def run(*args):
        is_symbolic = any(isinstance(x, Symbol) for x in args)
        return made(function.__name__, *args) if is_symbolic else function(*args)

    return run


def formula_of(
    rule: Callable, slots: Mapping[str, bool], hyper: Mapping[str, Any], nodes: dict | None = None
) -> Formula:
    """Return what a rule computes for a row.

    slots: {slot: whether it is as wide as the row}.
    hyper: {hyper-parameter: value}. A `Named()` in place of a value makes the hyper-parameter a symbol.
    """
    nodes = {} if nodes is None else nodes
    leaf = lambda op, kind, *args: interned(nodes, op, args, kind)
    own = {name: leaf("slot", WIDE if is_wide else NUMBER, name) for name, is_wide in slots.items()}
    numbers = {k: leaf("hyper", HOST, k) if isinstance(x, Named) else x for k, x in hyper.items()}
    given = namedtuple("Hyper", ["lr", "step", "repeats", *numbers])
    values = given(leaf("lr", NUMBER), leaf("t", HOST), leaf("repeats", NUMBER), **numbers)
    row, written = rule(leaf("row", WIDE), leaf("grad", WIDE), own, values)
    made = {"row": row, **{name: written[name] for name in slots}}
    for name, x in made.items():
        if not isinstance(x, Symbol):
            raise UnknownError(f"a rule's new {name} is a {type(x).__name__}")
    return made


class Named:
    """A hyper-parameter that may have any value."""


def symbols_of(roots: Iterable[Symbol], until: Callable[[Symbol], bool] = lambda x: False) -> list[Symbol]:
    """Return all symbols in the roots' expressions, arguments first.

    The search stops at symbols for which `until` holds.
    """
    found: dict[int, Symbol] = {}

    def visit(x: Symbol) -> None:
        if id(x) not in found:
            for y in () if until(x) else arguments(x):
                visit(y)
            found[id(x)] = x

    for x in roots:
        visit(x)
    return list(found.values())


def arguments(x: Symbol) -> Iterator[Symbol]:
    return (y for y in x.args if isinstance(y, Symbol))


def reads(roots: Iterable[Symbol], *ops: str) -> bool:
    return any(x.op in ops for x in symbols_of(roots))


def summed(formula: Formula) -> list[Symbol]:
    """Return the values that a formula sums over a row, which are the arguments of its reductions."""
    return [x.args[0] for x in symbols_of(formula.values()) if x.op == "sum"]


def is_elementwise(formula: Formula) -> bool:
    """Return whether an element's new value depends only on the same element of row, gradient and slots."""
    return not summed(formula)


def is_gradient_wise(formula: Formula) -> bool:
    """Return whether an element depends on other columns only through the gradient and slots of one number per row."""
    return not any(x.op == "row" or (x.op == "slot" and x.kind == WIDE) for x in symbols_of(summed(formula)))

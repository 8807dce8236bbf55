"""Write formulas as Triton: triton/formulas.py, with a function for each rule that `update` runs on a tile of rows.

The code has the arithmetic of the C++ code, in the same order. Values that depend on the step (and hyper-parameters)
alone are computed in f64 before the launch; other hyper-parameters are compiled in. A tile holds whole rows, so a pass
keeps no value for a later pass.
"""

import textwrap
from collections.abc import Sequence

from funcrec.kernels.formula import HOST, Symbol, UnknownError, arguments, reads, symbols_of
from funcrec.kernels.write_cpp import ATOM, Text, Variant, Written, combined

MOST_SLOTS = 3  # the most slots for which `update` has arguments
LINE = 50  # the longest expression, in columns, that gets no name
NAMES = {"row": "w", "grad": "g", "lr": "lr", "t": "t", "repeats": "repeats"}
HEAD = '''"""The optimizers' rules on a tile of rows: written by `python -m funcrec.optim.write`, and not by hand.

g is the summed gradient, w the row, both f[rows, columns]; slots are f[rows, columns] or f[rows, 1], anything where the
rule has none; HYPER are numbers that are compiled in, computed with in f64 and rounded where they meet a tensor;
scalars hold lr, t and what `SCALARS` makes of hyper-parameters and t, in the tile's dtype. Columns behind the dim are
masked out of every sum along a row.
"""

import triton
import triton.language as tl
from funcrec.kernels.triton.device import divide, root
from funcrec.kernels.triton.tiles import correction, divide_by, row_sum, sign

# fmt: off
# what each rule makes of its hyper-parameters h and the step t f64[]; rules that are not here make nothing
SCALARS = {
'''
WORDS = {
    "root": "root({0})", "exp2": "tl.exp2({0})", "abs": "tl.abs({0})", "sign": "sign({0})",
    "sum": "row_sum({0}, column, DIM)",
    "where": "tl.where({0}, {1}, {2})", "and": "({0}) & ({1})", "or": "({0}) | ({1})",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})", "like": "tl.full({1}.shape, 0, {1}.dtype) + {0}", "dim": "DIM",
    "nothing": "g * 0",
}  # fmt: skip


def literal(x: float, kind: int = HOST) -> Text:
    return Text(str(int(x)) if float(x).is_integer() else repr(float(x)), ATOM)


class Statements:
    """Writes one form of a rule. timed: values that depend on the step and are computed before the launch."""

    def __init__(self, rule: Written, variant: Variant, timed: Sequence[Symbol]):
        self.rule, self.variant, self.lines = rule, variant, []
        self.places = {name: i for i, name in enumerate(widest(rule))}
        self.names = {id(x): f"c{i}" for i, x in enumerate(timed)}
        every = symbols_of(variant.formula.values(), lambda x: id(x) in self.names)
        users = [y for y in every if id(y) not in self.names]
        for x in every:
            uses = sum(x is z for y in users for z in y.args) + sum(x is y for y in variant.formula.values())
            text, is_known = self.text(x).text, x.kind == HOST or x.op == "slot" or x.op in NAMES
            if not is_known and (uses > 1 or len(text) > LINE):
                self.names[id(x)] = f"v{len(self.lines)}"
                self.lines.append(f"{self.names[id(x)]} = {text}")

    def write(self) -> list[str]:
        new = {f"s_{i}": self.variant.formula.get(name) for name, i in self.places.items()}
        out = [
            name if (x := new.get(name)) is None else self.text(x).text
            for name in (f"s_{i}" for i in range(MOST_SLOTS))
        ]
        return [*self.lines, f"return {', '.join([self.text(self.variant.formula['row']).text, *out])}"]

    def text(self, x: Symbol) -> Text:
        if id(x) in self.names:
            return Text(self.names[id(x)], ATOM)
        if x.op == "hyper":
            return Text(f"HYPER[{self.rule.hyper.index(x.args[0])}]", ATOM)
        if x.op == "slot":
            return Text(f"s_{self.places[x.args[0]]}", ATOM)
        if x.op in NAMES:
            return Text(NAMES[x.op], ATOM)
        if x.op == "div" and x.kind != HOST:
            return Text(self.quotient(*x.args), ATOM)
        made = combined(x, self.text, literal)
        if made is None and x.op not in WORDS:
            raise UnknownError(f"{x.op} in a tile of rows")
        args = [self.text(y).text if isinstance(y, Symbol) else literal(y).text for y in x.args]
        return made or Text(WORDS[x.op].format(*args), 0 if x.op in ("and", "or", "like") else ATOM)

    def quotient(self, x: Symbol | float, y: Symbol | float) -> str:
        """Return the text of x / y, rounded to nearest."""
        over, under = ((self.text(z) if isinstance(z, Symbol) else literal(z)).text for z in (x, y))
        is_tensor = isinstance(y, Symbol) and (id(y) in self.names or y.kind != HOST) and y.op != "dim"
        return f"divide{'' if is_tensor else '_by'}({over}, {under})"


def widest(rule: Written) -> tuple[str, ...]:
    """Return the names of all slots of a rule."""
    found = tuple(max((v.slots for v in rule.variants), key=len))
    if len(found) > MOST_SLOTS:
        raise UnknownError(f"{rule.name} has {len(found)} slots, and a tile of rows has room for {MOST_SLOTS}")
    return found


def timed_of(rule: Written) -> list[Symbol]:
    """Return the values that depend only on the step and hyper-parameters, and that operations on tensors read."""
    every = symbols_of(x for v in rule.variants for x in v.formula.values())
    met = {id(y): y for x in every if x.kind != HOST for y in arguments(x) if y.kind == HOST and y.op != "t"}
    return [x for x in met.values() if reads([x], "t")]


def function(rule: Written) -> list[str]:
    timed, roots = timed_of(rule), [x for v in rule.variants for x in v.formula.values()]
    met = symbols_of(roots, lambda x: any(x is y for y in timed))
    names = {name: i for i, name in enumerate(("lr", "t")) if any(x.op == name for x in met)}
    names |= {f"c{i}": 2 + i for i in range(len(timed))}
    loads = ", ".join(f"tl.load(scalars + {i})" for i in names.values())
    lines = [
        "@triton.jit",
        f"def {rule.name}(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER: tl.constexpr, DIM: tl.constexpr):",
        *textwrap.wrap(f'"""{rule.says}"""', 110, initial_indent="    ", subsequent_indent="    "),
        f"    {', '.join(names)} = {loads}",
    ]
    for i, v in enumerate(rule.variants):
        tests = [f"HYPER[{rule.hyper.index(k)}] {'!= 0' if x is None else f'== {x}'}" for k, x in v.conditions.items()]
        tests = tests if len(tests) == 1 else [f"({x})" for x in tests]
        is_last, is_only = i + 1 == len(rule.variants), len(rule.variants) == 1
        if not is_only:
            lines.append(
                f"    else:  # {' & '.join(tests)}" if is_last else f"    {'el' if i else ''}if {' & '.join(tests)}:"
            )
        lines += [" " * (4 if is_only else 8) + line for line in Statements(rule, v, timed).write()]
    return [*lines, "", ""]


def scalars(rule: Written) -> str | None:
    """Return the rule's line of `SCALARS`, or None if no value depends on the step alone."""
    spoken = {"t": "t", "hyper": ""}

    def text(x: Symbol) -> Text:
        if x.op in spoken:
            return Text(spoken[x.op] or f"h[{rule.hyper.index(x.args[0])}]", ATOM)
        if x.op == "correction":
            return Text(f"correction({', '.join(text(y).text for y in arguments(x))})", ATOM)
        if (made := combined(x, text, literal)) is None:
            raise UnknownError(f"{x.op} of the step")
        return made

    found = [text(x).text for x in timed_of(rule)]
    return f'    "{rule.name}": lambda h, t: [{", ".join(found)}],' if found else None


def text_of(rules: Sequence[Written]) -> str:
    """Return the text of triton/formulas.py."""
    lines = [*filter(None, map(scalars, rules)), "}", "", ""]
    for rule in rules:
        lines += function(rule)
    lines += [
        "@triton.jit",
        "def apply_rule(",
        "    w, g, s_0, s_1, s_2, repeats, scalars, column, RULE: tl.constexpr, HYPER: "
        "tl.constexpr, DIM: tl.constexpr,", "):",
        '    """The new row and slots; slots that the rule has not pass through."""',
    ]  # fmt: skip
    for i, rule in enumerate(rules):
        lines.append(f'    {"el" if i else ""}if RULE == "{rule.name}":')
        lines.append(f"        return {rule.name}(w, g, s_0, s_1, s_2, repeats, scalars, column, HYPER, DIM)")
    return HEAD + "\n".join(lines) + "\n"

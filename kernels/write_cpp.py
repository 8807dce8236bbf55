"""Write formulas as C++: csrc/formulas.h, with a struct for each rule that `update_rows` runs on a row.

    rules → text        v ← expression;   total(..) for a reduction;   each(..) for a pass over the row

A value that depends only on the learning rate, the step and hyper-parameters is a member, computed once per update.
Passes come level by level; the last pass writes the row, once. If a pass needs a wide value that an earlier pass
summed, it recomputes the value in few operations, or reads it from the spare row. Forms of one rule (by a bool, a name,
or a number that is 0) are branches on members.
"""

import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from funcrec.kernels.formula import HOST, NUMBER, WIDE, Formula, Symbol, UnknownError, arguments, reads, symbols_of

FEW = 3  # the most operations that a later pass repeats
LINE = 100  # the longest expression, in columns, that gets no name
BINARY = {"add": (" + ", 1), "sub": (" - ", 1), "mul": (" * ", 2), "div": (" / ", 2)}
COMPARED = {"lt": " < ", "le": " <= ", "gt": " > ", "ge": " >= ", "eq": " == "}
TWICE = ("maximum", "minimum")  # operations whose C++ text has each argument twice
ATOM = 4


class Variant(NamedTuple):
    """The formula of a rule under conditions hyper[name] == value, or hyper[name] != 0 for the value None."""

    conditions: dict[str, float | None]
    slots: dict[str, bool]
    formula: Formula


class Written(NamedTuple):
    """A rule to write.

    says: the summary of the docstring. hyper: the hyper-parameters, in the order of calls. variants: the rule's forms.
    """

    name: str
    says: str
    hyper: tuple[str, ...]
    variants: list[Variant]


# -- expressions -------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """An expression, and the precedence of its last operation."""

    text: str
    binds: int

    def inside(self, least: int) -> str:
        return self.text if self.binds >= least else f"({self.text})"


def literal(x: float, kind: int) -> Text:
    """Return the C++ text of a number.

    C++ has no arithmetic of a vector with an integer, or of an f32 vector with a double that f32 does not hold.
    """
    if kind != WIDE and float(x).is_integer():
        return Text(str(int(x)), ATOM)
    return Text(repr(float(x)) if kind == HOST else f"A({x!r})", ATOM)


def combined(x: Symbol, text: Callable[[Symbol], Text], number: Callable[[float, int], Text] = literal) -> Text | None:
    """Return the text of arithmetic, which is the same for vectors and numbers, or None for another operation.

    number: a function that returns the text of a number.
    """
    own = lambda y: text(y) if isinstance(y, Symbol) else number(y, x.kind)
    if x.op in BINARY:
        word, binds = BINARY[x.op]
        left, right = own(x.args[0]), own(x.args[1])
        return Text(left.inside(binds) + word + right.inside(binds + 1), binds)
    if x.op == "neg":
        return Text("-" + own(x.args[0]).inside(3), 3)
    if x.op in COMPARED:
        return Text(COMPARED[x.op].join(own(y).inside(1) for y in x.args), 0)
    return None


def of_numbers(x: Symbol, text: Callable[..., Text]) -> Text:
    """Return the text of an operation on numbers of a row."""
    args = [text(y).text if isinstance(y, Symbol) else f"A({y!r})" for y in x.args]
    word = {
        "root": "std::sqrt({0})", "exp2": "std::exp2({0})", "abs": "std::abs({0})", "like": "{0}",
        "where": "({0} ? {1} : {2})", "and": "({0} && {1})", "or": "({0} || {1})",
        "maximum": "({0} < {1} ? {1} : {0})", "minimum": "({0} > {1} ? {1} : {0})",
    }.get(x.op)  # fmt: skip
    made = combined(x, text)
    if made is not None:
        return made
    if word is None:
        raise UnknownError(f"{x.op} of a number of a row")
    return Text(word.format(*args), ATOM)


def of_elements(x: Symbol, text: Callable[..., Text]) -> Text:
    """Return the text of an operation on vectors of a row's elements."""
    same = combined(x, text)
    if same:
        return same
    plain = lambda y: text(y).text if isinstance(y, Symbol) else f"A({y!r})"
    wide = lambda y: plain(y) if isinstance(y, Symbol) and y.kind == WIDE else f"at.one * {plain(y)}"
    words = {"root": "at.root({0})", "sign": "at.sign({0})", "abs": "at.abs({0})", "where": "at.where({0}, {1}, {2})",
             "and": "({0} & {1})", "or": "({0} | {1})"}  # fmt: skip
    if x.op == "where" and x.args[0].kind == WIDE:
        return Text(words["where"].format(plain(x.args[0]), *map(wide, x.args[1:])), ATOM)
    if x.op in ("maximum", "minimum"):
        a, b, sign = wide(x.args[0]), wide(x.args[1]), "<" if x.op == "maximum" else ">"
        return Text(f"at.where({a} {sign} {b}, {b}, {a})", ATOM)
    if x.op not in words or x.op == "where":
        raise UnknownError(f"{x.op} of a row's elements")
    return Text(words[x.op].format(*map(plain, x.args)), ATOM)


# -- members -----------------------------------------------------------------------------------------------------


def is_shared(x: Symbol) -> bool:
    return x.kind == HOST or (x.kind == NUMBER and not reads([x], "row", "grad", "slot", "repeats", "dim"))


def members(rule: Written) -> dict[int, tuple[str, str]]:
    """Return {id of symbol: (name, text of its first value)} of the shared symbols that a symbol of a row needs."""
    every = symbols_of(x for v in rule.variants for x in v.formula.values())
    used = {id(y): y for x in every if not is_shared(x) for y in arguments(x) if is_shared(y)}
    used |= {id(x): x for v in rule.variants for x in v.formula.values() if is_shared(x)}
    found: dict[int, tuple[str, str]] = {}
    spoken = {"lr": "lr", "t": "t"}

    def host(x: Symbol) -> Text:
        if x.op == "hyper":
            return Text(f"n.h[{rule.hyper.index(x.args[0])}]", ATOM)
        if x.op in spoken:
            return Text(f"n.{spoken[x.op]}", ATOM)
        if x.op == "correction":
            return Text(f"correction({', '.join(host(y).text for y in x.args)})", ATOM)
        if (made := combined(x, host)) is None:
            raise UnknownError(f"{x.op} of hyper-parameters")
        return made

    def take(x: Symbol) -> Text:
        """Return the text of the member for a shared symbol."""
        if id(x) not in found:
            text = (of_numbers(x, take) if x.kind == NUMBER and x.args else host(x)).text
            name = (
                x.args[0]
                if x.op == "hyper"
                else spoken.get(x.op) or f"c{sum(n[1:].isdigit() for n, _ in found.values()) + 1}"
            )
            found[id(x)] = name, text
        return Text(found[id(x)][0], ATOM)

    for x in symbols_of(used.values()):
        if id(x) in used:
            take(x)
    return found


# -- passes over a row -------------------------------------------------------------------------------------------


class Passes:
    """Writes the statements of one form of a rule. known: {id of symbol: text that reads it outside a pass}."""

    def __init__(self, variant: Variant, shared: dict[int, tuple[str, str]]):
        self.formula, self.lines = variant.formula, []
        self.places = {name: i for i, name in enumerate(variant.slots)}
        self.wide = {k: x for k, x in variant.formula.items() if k == "row" or variant.slots[k]}
        self.known = {at: name for at, (name, _) in shared.items()}
        self.every = symbols_of(self.formula.values())
        self.spare = self.choose_spare()

    def write(self) -> list[str]:
        left, last = dict(self.wide), max(x.level for x in self.formula.values())
        for level in range(last + 1):
            self.numbers(level)
            if self.spare is not None and self.spare.level == level:
                self.each([("r.spare", self.spare), *self.early(left, level)])
                self.known[id(self.spare)] = "r.spare"
        self.each(
            [(self.memory(k), x) for k, x in sorted(left.items(), key=lambda k: k[0] == "row") if not self.stays(k, x)]
        )
        for name, x in self.formula.items():
            if name not in self.wide and not self.stays(name, x):
                self.lines.append(f"*r.s[{self.places[name]}] = {self.number(x).text};")
        return self.lines

    def memory(self, name: str) -> str:
        return "r.w" if name == "row" else f"r.s[{self.places[name]}]"

    def stays(self, name: str, x: Symbol) -> bool:
        return x.op == "row" if name == "row" else x.op == "slot" and x.args == (name,)

    def choose_spare(self) -> Symbol | None:
        """Return the one value that is summed, needed after that sum, and long to recompute, or None."""
        within = lambda x: symbols_of([x], lambda y: y.kind != WIDE)
        is_long = lambda x: len([y for y in within(x) if y.kind == WIDE and y.args and y.op != "slot"]) > FEW
        sums = [(x.level, {id(y) for y in within(x.args[0])}) for x in self.every if x.op == "sum"]
        uses = [
            (x.level, y) for x in self.every for y in arguments(x) if x.kind == y.kind == WIDE and x.level > y.level
        ]
        late = [y for level, y in uses if any(done <= level and id(y) in of for done, of in sums)]
        found = {id(y): y for y in late if is_long(y)}
        if len(found) > 1:
            raise UnknownError(f"{len(found)} values to keep from one pass over a row to another")
        return next(iter(found.values()), None)

    def early(self, left: dict[str, Symbol], level: int) -> list[tuple[str, Symbol]]:
        """Return the new slots to write together with the spare row, and remove them from `left`.

        The list is empty if a later value reads the old slots.
        """
        ready = {k: x for k, x in left.items() if k != "row" and x.level <= level}
        later = [x for k, x in self.formula.items() if k not in ready]
        read = symbols_of(later, lambda x: x is self.spare or id(x) in self.known)
        if any(x.op == "slot" and x.args[0] in ready for x in read):
            return []
        for name in ready:
            del left[name]
        return [(self.memory(k), x) for k, x in ready.items()]

    # numbers of the row

    def numbers(self, level: int) -> None:
        """Write the numbers that depend on a chain of `level` sums. Numbers that several places read have names."""
        users = lambda x: [y for y in self.every if any(x is z for z in y.args)]
        for x in self.every:
            if x.kind != NUMBER or x.level != level or id(x) in self.known or x.op in ("repeats", "dim"):
                continue
            uses = users(x) + [y for y in self.formula.values() if y is x] + [y for y in users(x) if y.op in TWICE]
            text = self.number(x).text
            if x.op in ("slot", "sum") or len(uses) > 1 or uses[0].kind == WIDE or len(text) > LINE:
                name = (
                    f"old_{x.args[0]}"
                    if x.op == "slot"
                    else f"v{sum(n[1:].isdigit() for n in self.known.values()) + 1}"
                )
                kind = "bool" if x.op in (*COMPARED, "and", "or") else "A"
                self.lines += [f"const {kind} {name} = {text};"] if x.op != "sum" else self.total(name, x.args[0])
                self.known[id(x)] = name

    def number(self, x: Symbol) -> Text:
        if id(x) in self.known:
            return Text(self.known[id(x)], ATOM)
        if x.op == "slot":
            return Text(f"*r.s[{self.places[x.args[0]]}]", ATOM)
        if x.op in ("repeats", "dim"):
            return Text(f"r.{x.op}", ATOM)
        return Text("", ATOM) if x.op == "sum" else of_numbers(x, self.number)

    # elements

    def total(self, name: str, x: Symbol) -> list[str]:
        statements, (text,) = self.elements([x])
        body = " ".join([*statements, f"return {text};"])
        return [f"const A {name} = total<A, D>(r.dim, [&](auto at) {{ {body} }});"]

    def each(self, stores: Sequence[tuple[str, Symbol]]) -> None:
        if stores:
            statements, texts = self.elements([x for _, x in stores])
            puts = [f"at.put({memory}, {text});" for (memory, _), text in zip(stores, texts, strict=True)]
            self.lines += ["each<A, D>(r.dim, [&](auto at) {", *(f"  {s}" for s in (*statements, *puts)), "});"]

    def elements(self, roots: Sequence[Symbol]) -> tuple[list[str], list[str]]:
        """Return the statements inside a pass, and each root's expression. A value with several readers has a name."""
        inside = [x for x in symbols_of(roots, lambda x: x.kind != WIDE or id(x) in self.known) if x.kind == WIDE]
        names: dict[int, str] = {}
        uses = lambda x: (
            sum((x is z) * (1 + (y.op in TWICE)) for y in inside if id(y) not in self.known for z in y.args)
            + sum(x is y for y in roots)
        )
        statements, count = [], 0

        def text(x: Symbol) -> Text:
            if x.kind != WIDE:
                return self.number(x)
            if id(x) in names:
                return Text(names[id(x)], ATOM)
            if id(x) in self.known:
                return Text(f"at({self.known[id(x)]})", ATOM)
            if x.op in ("row", "grad", "slot"):
                return Text(
                    f"at({self.memory(x.args[0]) if x.op == 'slot' else {'row': 'r.w', 'grad': 'r.x'}[x.op]})", ATOM
                )
            return Text("at.zero", ATOM) if x.op == "nothing" else of_elements(x, text)

        for x in inside:
            made = text(x).text
            if uses(x) > 1 or len(made) > LINE:
                count += 1
                plain = {"row": "w", "grad": "g"}.get(x.op) or (f"old_{x.args[0]}" if x.op == "slot" else f"u{count}")
                statements.append(f"const auto {plain} = {made};")
                names[id(x)] = plain
        return statements, [text(x).text for x in roots]


# -- rules -------------------------------------------------------------------------------------------------------

HEAD = """// The rules of the row optimizers: written by `python -m funcrec.optim.write`, and not by hand.
// Each is for one row, as rules.h says; a number n.h[i] is a hyper-parameter, in the order of kernels/rules.py.
#pragma once
#include "rules.h"

namespace funcrec {
"""


def condition(rule: Written, variant: Variant, prefix: str) -> str:
    at = lambda name: f"{prefix}{rule.hyper.index(name)}{']' if '[' in prefix else ''}"
    parts = [f"{at(k)} != 0" if x is None else f"{at(k)} == {x:g}" for k, x in variant.conditions.items()]
    return " && ".join(parts)


def layouts(rule: Written) -> Iterator[tuple[str, list[Variant]]]:
    """Yield (the name of a struct, the forms that it holds): forms with the same slots share a struct."""
    kinds: dict[tuple, list[Variant]] = {}
    for v in rule.variants:
        kinds.setdefault(tuple(v.slots.items()), []).append(v)
    name = "".join(map(str.capitalize, rule.name.split("_")))
    for i, each in enumerate(kinds.values()):
        yield name if i == 0 else f"{name}{i + 1}", each


def struct(rule: Written, name: str, variants: list[Variant]) -> list[str]:
    shared = members(rule._replace(variants=variants))
    asked = sorted({rule.hyper.index(k) for v in variants for k in v.conditions}) if len(variants) > 1 else []
    named = ["lr", *(n for n, _ in shared.values() if n != "lr"), *(f"h{i}" for i in asked)]
    begins = {"lr": "n.lr", **dict(shared.values()), **{f"h{i}": f"n.h[{i}]" for i in asked}}
    slots = variants[0].slots
    widths = ", ".join("WIDE" if is_wide else "NARROW" for is_wide in slots.values())
    lines = [
        f"// {rule.name}: {rule.says}",
        f"template <class A> struct {name} {{",
        f"  static constexpr int slots = {len(slots)}, width[MOST_SLOTS] = {{{widths}}};",
        f"  A {', '.join(named)};",
        f"  explicit {name}(const Hyper& n)",
        *textwrap.wrap(
            f": {', '.join(f'{n}({begins[n]})' for n in named)} {{}}",
            110,
            initial_indent=" " * 6,
            subsequent_indent=" " * 8,
        ),
        "  template <int D, class W> FUNCREC_INLINE void apply(const Row<A, W>& r) const {",
    ]
    for i, v in enumerate(variants):
        test = condition(rule, v, "h")
        if len(variants) > 1:
            lines.append(
                "    "
                + (
                    f"if ({test}) {{"
                    if i == 0
                    else f"}} else if ({test}) {{"
                    if i + 1 < len(variants)
                    else f"}} else {{  // {test}"
                )
            )
        lines += [" " * (4 + 2 * (len(variants) > 1)) + line for line in Passes(v, shared).write()]
    return [*lines, *(["    }"] if len(variants) > 1 else []), "  }", "};"]


def bodies(rules: Sequence[Written]) -> list[str]:
    """Return the lines of the structs, and of the function that chooses a struct."""
    lines, cases = [], []
    for number, rule in enumerate(rules):
        made = [*layouts(rule)]
        for name, variants in made:
            lines += [*struct(rule, name, variants), ""]
        either = lambda each: " || ".join(condition(rule, v, "n.h[") for v in each)  # noqa: B023
        asks = [f"if ({either(v)}) return f({name}<A>(n));" for name, v in made[:-1]]
        cases.append(" ".join([f"    case {number}:", *asks, f"return f({made[-1][0]}<A>(n));"]))
    return [
        *lines,
        f"constexpr int64_t GENERATED = {len(rules)};  // a user's rule",
        "",
        "// f(rule) with the rule of that number in the order of kernels/rules.py, or GENERATED.",
        "template <class A, class F> void with_rule(int64_t number, const Hyper& n, const F& f) {",
        "  switch (number) {",
        *cases,
        "    case GENERATED: return f(Generated<A>(n));",
        "  }",
        "}",
    ]


def version_of(rules: Sequence[Written]) -> int:
    """Return a checksum of the text without comments, by which an object reports the rules of its build."""
    return zlib.crc32("\n".join(x for x in bodies(rules) if not x.startswith("//")).encode())


def text_of(rules: Sequence[Written]) -> str:
    """Return the text of csrc/formulas.h."""
    version = f"constexpr int64_t FORMULAS = {version_of(rules)};  // as in kernels/rules.py"
    return "\n".join([HEAD, version, "", *bodies(rules), "", "}  // namespace funcrec", ""])

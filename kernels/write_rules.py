"""Write the table rules.py, with what callers and implementations must know about each rule."""

from collections.abc import Sequence

from funcrec.kernels.forms import Rule
from funcrec.kernels.formula import reads
from funcrec.kernels.write_cpp import Written, version_of

HEAD = '''"""The rules of the built-in row optimizers: written by `python -m funcrec.optim.write`, and not by hand.

A rule's number is its place in the table, and never changes.
"""

from funcrec.kernels.forms import Rule

# fmt: off
RULES: dict[str, Rule] = {
'''


def row_of(rule: Written) -> Rule:
    """Return the `forms.Rule` of a rule."""
    full = max((v.slots for v in rule.variants), key=len)
    optional = []
    for slot in full:
        without = [v.conditions for v in rule.variants if slot not in v.slots]
        if without:
            optional.append((slot, next(name for name, x in without[0].items() if x == 0 and name in rule.hyper)))
    roots = [x for v in rule.variants for x in v.formula.values()]
    return Rule(
        tuple(full), rule.hyper, tuple(full.values()), tuple(optional), reads(roots, "t"), reads(roots, "repeats")
    )


def text_of(rules: Sequence[Written]) -> str:
    """Return the text of rules.py."""
    lines = []
    for rule in rules:
        given = zip(Rule._fields, row_of(rule), strict=True)
        stated = [f"{name}={str(x).replace(chr(39), chr(34))}" for name, x in given if x or name in ("slots", "hyper")]
        lines += [f'    "{rule.name}": Rule(\n', *(f"        {x},\n" for x in stated), "    ),\n"]
    return (
        HEAD
        + "".join(lines)
        + f"}}\nFORMULAS = {version_of(rules)}  # of csrc/formulas.h, which an object must have been built from\n"
    )

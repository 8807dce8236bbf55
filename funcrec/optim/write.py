"""`python -m funcrec.optim.write`: writes the kernels of the built-in optimizers' rules, from their formulas.

    funcrec/optim/*.py → kernels/rules.py, kernels/csrc/formulas.h, kernels/triton/formulas.py
then build the kernels again

A rule may have several forms, chosen by a bool, by a name, by None, or by a number. If the number is 0, the rule may
read fewer sums over the row, or fewer slots.
"""

import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from funcrec.core import sure
from funcrec.kernels import formula, ops, write_cpp, write_rules, write_triton
from funcrec.kernels.write_cpp import Variant, Written
from funcrec.optim._builtin import BUILTIN, Builtin, widths
from funcrec.optim._checks import choices_of

TRIED = {
    "weight_decay": 0.1,
    "eta": 0.2,
    "momentum": 0.9,
    "clip_ratio": 0.1,
    "lower_bound": 0.01,
    "l1": 0.2,
    "half_life": 3.0,
    "max_norm": 0.5,
}


def written(own: Builtin) -> Written:
    """Return all forms of a rule, as the kernels' writers read them."""
    nodes: dict[Any, Any] = {}
    forms = [v for chosen in choices(own) for v in forms_of(own, chosen, nodes)]
    read = {x.args[0] for v in forms for x in formula.symbols_of(v.formula.values()) if x.op == "hyper"}
    asked = {name for v in forms for name in v.conditions}
    names = tuple(n for n in parameters(own) if n in read | asked)
    says = (inspect.getdoc(own.declare) or "").split("\n\n")[0].replace("\n", "  ")
    return Written(own.declare.__name__, says, names, forms)


def parameters(own: Builtin) -> dict[str, Any]:
    """Return {hyper-parameter: its default}, with 0.5 for a hyper-parameter without a default."""
    given = inspect.signature(own.declare).parameters
    return {n: 0.5 if p.default is p.empty else p.default for n, p in given.items() if n != "lr"}


def choices(own: Builtin) -> Iterator[dict[str, tuple[Any, float | None]]]:
    """Yield each choice of the values that a rule may branch on, as {name: (value, number)}.

    A kernel gets `number` for the value. None stands for any number except 0."""
    found = {}
    for name, default in parameters(own).items():
        if default is None:
            found[name] = [(None, 0), (formula.Named(), None)]
        elif isinstance(default, bool):
            found[name] = [(False, 0), (True, None)]
        elif isinstance(default, str):
            found[name] = [(x, i) for i, x in enumerate(choices_of(name))]
    return (dict(zip(found, each, strict=True)) for each in itertools.product(*found.values()))


def forms_of(own: Builtin, chosen: dict[str, tuple[Any, float | None]], nodes: dict[Any, Any]) -> Iterator[Variant]:
    """Yield a form for each number whose default 0 saves reads. Then yield the form of the choice itself."""
    conditions = {name: number for name, (_, number) in chosen.items()}
    plain = {name: value for name, (value, _) in chosen.items()}
    usual = variant(own, conditions, plain, nodes)
    for name, default in parameters(own).items():
        if name in chosen or default != 0:
            continue
        less = variant(own, {**conditions, name: 0}, {**plain, name: 0.0}, nodes)
        if less.slots != usual.slots or seen(less) != seen(usual):
            yield less
            usual = usual._replace(conditions={**usual.conditions, name: None})
    yield usual


def variant(
    own: Builtin, conditions: dict[str, float | None], values: dict[str, Any], nodes: dict[Any, Any]
) -> Variant:
    any_number = {name: formula.Named() for name in parameters(own)}
    sample = {n: 0.5 if isinstance(x, formula.Named) else x for n, x in {**any_number, **values}.items()}
    slots = widths(own.slots(SimpleNamespace(**sample)))
    return Variant(conditions, slots, formula.formula_of(own.rule, slots, {**any_number, **values}, nodes))


def seen(v: Variant) -> set[int]:
    """Return the inputs of a row that the rule reads for sums over the row."""
    return {
        id(x)
        for x in formula.symbols_of(formula.summed(v.formula))
        if x.kind == formula.WIDE and x.op in ("row", "grad", "slot")
    }


def examples(name: str) -> list[dict[str, Any]]:
    """Return hyper-parameters of a built-in optimizer, one set for each form of its rule.

    Each number is chosen so that it has an effect."""
    own = BUILTIN[name]
    given = parameters(own)

    def value(n: str, x: float | None) -> Any:
        if isinstance(given[n], bool | str):
            return x is None if isinstance(given[n], bool) else choices_of(n)[int(sure(x))]
        return TRIED.get(n, given[n] or 0.1) if x is None else None if given[n] is None else float(x)

    return [{n: value(n, v.conditions.get(n)) for n in given} for v in written(own).variants]


def rules() -> list[Written]:
    """Return all built-in rules. A rule that the kernels have already keeps its number."""
    known = {name: i for i, name in enumerate(ops.RULES)}
    return [written(BUILTIN[n]) for n in sorted(BUILTIN, key=lambda n: known.get(n, len(known)))]


def texts() -> dict[str, str]:
    """Return {name of a file in kernels/: its text}."""
    found = rules()
    return {
        "rules.py": write_rules.text_of(found),
        "csrc/formulas.h": write_cpp.text_of(found),
        "triton/formulas.py": write_triton.text_of(found),
    }


def main() -> None:
    folder = Path(ops.__file__).parent
    for name, text in texts().items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"{path}: written", file=sys.stderr)


if __name__ == "__main__":
    main()

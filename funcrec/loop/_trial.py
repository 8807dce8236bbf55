"""Trials before the first step of `fit`: of the first batch, of the loss on that batch, and of the evaluation.

So errors that would come after an epoch are raised before the first step.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from funcrec.core import check, is_of_handler, own_errors
from funcrec.loop._bad_ids import unknown_problems
from funcrec.loop._checks import known_problems, mapping_problems
from funcrec.loop._epochs import OF_AN_EPOCH, monitor_problems
from funcrec.loop._evaluate import evaluate as run_evaluate
from funcrec.loop._evaluate import one_batch
from funcrec.loop._numbers import named_numbers
from funcrec.loop._run_state import Run, Work, whole_params
from funcrec.loop._watch import at
from funcrec.mesh import Ranks, say
from funcrec.tables import lookups_seen


def check_first_batch(work: Work, state: Any, batch: Any) -> None:
    """Raise for faults of the first batch, before any work, and learn which lookups read its ids."""
    bad_ids = work.bad_ids
    with lookups_seen() as lookups:
        if bad_ids.mode == "count":  # a check by value would raise for ids that `fit` only counts
            if work.trial is not None:
                work.trial(state, batch, by_value=False)
            bad_ids.learn(lookups, batch)
        cleaned = bad_ids.cleaned(batch)
        with own_errors("funcrec.fit", work.check_batch, cleaned, need="a batch that it takes"):
            work.check_batch(cleaned)
        if work.trial is not None:
            work.trial(state, cleaned)
    bad_ids.learn(lookups, cleaned)
    check("funcrec.fit", unknown_problems(bad_ids, batch))


def try_evaluate(work: Work, run: Run) -> None:
    """Run the evaluation of an epoch on one batch, so that its errors are raised now.

    An evaluation that does not call `fr.evaluate` is not tried: it cannot be run on a single batch.
    """
    if work.evaluate is None or not uses(work.evaluate, run_evaluate):
        return
    at("the evaluation of one batch, before the first step")
    params, entry, failed = whole_params(run.state, work.mesh), dict.fromkeys(OF_AN_EPOCH[:1] + OF_AN_EPOCH[2:]), False
    try:
        with one_batch():
            found = measured(work.evaluate, params, entry)
    except Exception as error:
        if is_of_handler(error):
            raise
        failed = True
    # one batch may lack what all batches together have, such as examples of each class
    if any(say(failed, Ranks.of(work.mesh))):
        found = measured(work.evaluate, params, entry)
    if work.monitor is not None and not is_part_of_unread(work.monitor, found):
        check("funcrec.fit", monitor_problems(dict.fromkeys(OF_AN_EPOCH) | found, work.monitor, run.position.epoch))


def is_part_of_unread(monitor: str, found: Mapping[str, float]) -> bool:
    """Return whether the trial has NaN for a metric that may have several values, of which `monitor` names one.

    The trial takes no batch of an iterator, so the names of these values are not yet known.
    """
    return any(math.isnan(x) and monitor.startswith(f"{n}.") for n, x in found.items())


def uses(fn: Any, used: Callable, depth: int = 4) -> bool:
    """Return whether the code of fn, or of a function that fn names, uses the function `used`.

    The code may name `used` directly or as an attribute of a module.
    """
    fn = fn.func if isinstance(fn, functools.partial) else fn
    own = fn if isinstance(fn, FunctionType | MethodType) else vars(type(fn)).get("__call__")
    fn = own.__func__ if isinstance(own, MethodType) else own
    if not isinstance(fn, FunctionType) or not depth:
        return False
    names = list(names_in(fn.__code__))
    closed = [c.cell_contents for c in fn.__closure__ or () if c != CellType()]
    named = [*closed, *(fn.__globals__[n] for n in names if n in fn.__globals__)]
    of_modules = [getattr(m, n, None) for m in named if isinstance(m, ModuleType) for n in names]
    functions = [x for x in (*named, *of_modules) if isinstance(x, FunctionType | MethodType | functools.partial)]
    return used in functions or any(uses(x, used, depth - 1) for x in functions)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in the code of a function, and in the code of functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)


def measured(evaluate: Callable | None, params: Any, entry: Mapping) -> dict[str, float]:
    """Return {name: number}, the numbers of `evaluate`. Their names must be new to the entry."""
    found = {}
    if evaluate is not None:
        with own_errors("funcrec.fit", evaluate, params, need="the parameters that it reads"):
            found = evaluate(params)
    check("funcrec.fit", mapping_problems(found))
    numbers = named_numbers("funcrec.fit", found, "`evaluate` gave no number for {name}.", "evaluate")
    check("funcrec.fit", known_problems(numbers, entry))
    return numbers

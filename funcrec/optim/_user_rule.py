"""A user's rule inside the row loop of the fused update: one operator, which gets the number of the rule.

rule on one row → graph of aten operations → C++ (kernels/cpp/_rules.py)
→ the fused update of every table in one call

The rule is traced and compiled once for each form of table, which is dim, dtype and shapes of slots. A rule with an
operation that the translation does not know runs in blocks (_blocks.py), and a warning names the operation.
"""

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from funcrec.core import NoHostMemory, Problem, Reading, message
from funcrec.kernels import library, stacks
from funcrec.kernels.forms import Terms, accumulation_dtype, segments_of
from funcrec.optim._blocks import BlockRule

# The number of compiled forms of a rule before a warning, and the number that are kept.
MANY, MOST = 8, 16
_numbers = itertools.count()
_rules: WeakValueDictionary[int, "UserRule"] = WeakValueDictionary()
_staged: dict[int, "UserRule"] = {}  # compiled functions call these rules by number, and may outlive the optimizer


class RuleMemory:
    """The compiled forms of a rule, one form for each state of the variables that the rule closes over.

    The state is their numbers, the branches that they take, and which tensors there are. The last MOST forms are kept.

    call, rule, round_rows: as in `UserRule`.
    """

    def __init__(self, call: str, rule: Callable[..., Any], round_rows: Callable[..., Any]):
        self.call, self.make = call, lambda names: UserRule(call, rule, names, round_rows)
        self.made: dict[tuple[str, ...], list[UserRule]] = {}
        self.is_told = False
        self.lock = threading.Lock()

    def find(self, names: tuple[str, ...], readings: Mapping[tuple[Any, ...], Reading]) -> "UserRule":
        """Return the compiled rule for slots of these names that does on each form of table what the rule does now.

        `readings` is {form of a table: what the rule does now}."""
        with self.lock:
            known = self.made.setdefault(names, [])
            for rule in reversed(known):
                if rule.is_blocked and get_proxy_mode() is None:  # a rule in blocks runs uncompiled
                    return rule
                if all(form not in rule.readings or rule.readings[form].is_same(r) for form, r in readings.items()):
                    rule.readings |= readings
                    return rule
            rule = self.make(names)
            rule.readings |= readings
            if known:
                rule.generated |= known[-1].with_tensors(readings)
            self.made[names] = [*known, rule][-MOST:]
            if len(known) >= MANY and not self.is_told:
                self.is_told = True
                warnings.warn(changing_message(self.call, known[-1], rule), stacklevel=3)
            return rule


def changing_message(call: str, before: "UserRule", now: "UserRule") -> str:
    both = ((before.readings[form].calls, now.readings[form].calls) for form in now.readings if form in before.readings)
    name = lambda x: getattr(x[0], "__name__", "what it gives")
    differ = next((f"in {name(y)}" for a, b in both for x, y in zip(a, b, strict=False) if x != y), "")
    problem = Problem(
        "the rule changes again and again, and is compiled each time.",
        f"{MANY} compilations; another Python number or branch {differ}".rstrip(),
        "a rule whose numbers stay, or are tensors",
        "lr=a function of the step; hyper.step; a slot; a tensor f[] that the rule closes over in place of a number",
    )
    return message(call, [problem])


class UserRule:
    """A rule for one row, with its compiled forms.

    rule: (row f[D], grad f[D], {slot: f[...]}, lr f[], t f[], repeats f[]) -> (row, slots).
    names: the names of the slots, in order.
    round_rows: (new f[M, D], dtype, rows i64[M], draws i64[S + 1, 4]) -> new, for stochastic rounding in blocks.
    call: the name of the function in messages.
    """

    def __init__(self, call: str, rule: Callable[..., Any], names: Sequence[str], round_rows: Callable[..., Any]):
        def flat_rule(row, grad, rate, t, repeats, *slots):
            new, written = rule(row, grad, dict(zip(names, slots, strict=True)), rate, t, repeats)
            return [new, *(written[k] for k in names)]

        self.call, self.rule = call, flat_rule
        self.readings: dict[tuple, Reading] = {}  # {form of a table: what the rule did on it}
        self.modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # a rule may read these modes
        self.blocks = BlockRule(flat_rule, len(names), round_rows, self.traced)
        self.generated: dict = {}  # {form of a table: the compiled rule}
        self.is_blocked = False
        self.lock = threading.Lock()
        self.number = next(_numbers)
        _rules[self.number] = self

    def update(self, tables, slots, terms: Terms, lr: Tensor, step: Tensor, key: Tensor | None):
        """Return new tables and slots from `ops.fused_update` with this rule."""
        given, is_staged = [x for s in slots for x in s], get_proxy_mode() is not None
        if is_staged:
            _staged[self.number] = self
        self.prepare(tables, given)
        op = torch.ops.funcrec_rules.rule_update
        out = op(list(tables), given, *terms.flat(), lr, step, key, self.number, is_staged)
        each = len(given) // len(tables)
        new = out[len(tables) :]
        return out[: len(tables)], [new[t * each : (t + 1) * each] for t in range(len(tables))]

    def prepare(self, tables: Sequence[Tensor], slots: Sequence[Tensor]) -> list | None:
        """Return the compiled rule of each table, or None if the rule runs in blocks."""
        each, found = len(slots) // max(len(tables), 1), []
        for t, table in enumerate(tables):
            form = (
                table.shape[1],
                accumulation_dtype(table.dtype),
                *(s.shape[1:] for s in slots[t * each : (t + 1) * each]),
            )
            with self.lock:
                if form not in self.generated and not self.is_blocked:
                    # torch 2.11 keeps what the first use makes on its thread. So no thread that ends may be the first.
                    with FakeTensorMode():
                        pass
                    # A separate thread compiles: the graph must not contain the caller's modes and transforms.
                    with ThreadPoolExecutor(1) as thread:
                        self.generated[form] = thread.submit(self.generate, *form).result()
            if self.is_blocked:
                return None
            found.append(self.generated[form])
        return found

    def with_tensors(self, readings: Mapping[tuple, Reading]) -> dict:
        """Return the entries of `generated` whose rule does the same with other tensors now."""
        made = {}
        for form, now in readings.items():
            dim, dtype, _, slots = form
            own = (dim, dtype, *(shape for _, shape in slots))
            rule, before = self.generated.get(own), self.readings.get(form)
            if rule is None or before is None or before.calls != now.calls:
                continue
            other = {id(x): y for x, y in zip(before.tensors, now.tensors, strict=True)}
            if other.keys() <= set(map(id, rule.constants)):
                made[own] = rule._replace(constants=tuple(other.get(id(x), x) for x in rule.constants))
        return made

    def traced(self, fn: Callable, example: list[Tensor], decompositions: dict | None = None) -> torch.fx.GraphModule:
        """Return the graph of what `fn` does in the modes of the caller."""

        def run(*arguments):
            is_grad, is_inference = self.modes
            with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
                return fn(*arguments)

        return make_fx(run, decompositions)(*example)

    @torch.no_grad()
    def generate(self, dim: int, dtype: torch.dtype, *shapes: Sequence[int]) -> object:
        flat = functionalize(self.rule, remove="mutations")
        try:
            if len(shapes) > _cpp().MOST_SLOTS:
                raise _cpp().UnsupportedError(f"{len(shapes)} slots, more than {_cpp().MOST_SLOTS}")
            with FakeTensorMode(allow_non_fake_inputs=True), NoHostMemory(_cpp().UnsupportedError):
                example = [torch.empty(s, dtype=dtype) for s in ((dim,), (dim,), (), (), (), *shapes)]
                graph = self.traced(flat, example, _cpp().decompositions())
            return _cpp().generate(graph)
        except (_cpp().UnsupportedError, RuntimeError) as error:
            known = (_cpp().UnsupportedError, DataDependentOutputException, DynamicOutputShapeException)
            # functionalize does not support autograd.Function.
            if not isinstance(error, known) and "custom_function_call" not in str(error):
                raise
            self.is_blocked = True
            warnings.warn(
                f"{self.call}: the rule is not a part of the kernel, and takes two to four "
                f"times as long.\n  got   {error}\n"
                "  need  arithmetic on rows and numbers, sums over the row, slices of it",
                stacklevel=2,
            )


def rule_update_(
    tables, slots, d, rows, offsets, weights, segments, lr, step, key, number: int, is_staged: bool
) -> None:  # fmt: skip
    """Update in place by the rule. `slots` lists the slots of one table after the other."""
    rule = _rules[number]
    codes = rule.prepare(tables, slots)
    if codes is None:
        terms = Terms(list(d), list(rows), list(offsets), list(weights), segments_of(segments))
        rule.blocks.update_(tables, slots, terms, lr, step, key, is_staged)
    else:
        _cpp().generated_update_(tables, slots, d, rows, offsets, weights, segments, lr, step, key, codes)


@functools.cache
def _cpp() -> Any:
    return library.load("cpp")


_rule_update_by_member_ = stacks.update_of_members(rule_update_, lambda *rest: True)


def _rule_update_(tables, slots, d, rows, offsets, weights, segments, lr, step, key, number: int, *rest) -> None:
    """Update in place by the rule, for all members of stacks in one call if the rule is compiled."""
    given = d, rows, offsets, weights, segments, lr, step, key
    if tables and tables[0].dim() == 3 and len(tables[0]):
        codes = _rules[number].prepare([t[0] for t in tables], [s[0] for s in slots])
        if codes is not None:
            return _cpp().generated_update_(tables, slots, *given, codes)
    return _rule_update_by_member_(tables, slots, *given, number, *rest)


def _rule_update(tables, slots, *rest) -> list[Tensor]:
    new_tables, new_slots = [t.clone() for t in tables], [s.clone() for s in slots]
    _rule_update_(new_tables, new_slots, *rest)
    return new_tables + new_slots


library.define(
    "funcrec_rules",
    "rule_update",
    f"(Tensor[] tables, Tensor[] slots, {library.TERMS}, Tensor lr, Tensor step, Tensor? "
    f"key, int number, bool is_staged)"
    " -> Tensor[]",
    _rule_update,
    lambda tables, slots, *rest: [torch.empty_like(x) for x in (*tables, *slots)],
    in_place=_rule_update_,
    stacked=(*library.STACKED["fused_update"][:10], "number", "is_staged"),
)

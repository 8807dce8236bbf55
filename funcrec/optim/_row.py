"""Row optimizers: a rule for one row, run on the rows that a batch touched.

    (row', slots') = rule(row, grad, slots, hyper)
for every row in the coalesced gradient; all other rows keep their bits

A rule computes on one row, in f32 (f64 for f64 tables). `torch.func.vmap` maps it over the touched rows. The result is
rounded once, when it is written. The same function makes the built-in optimizers and those of users.
Shapes: R rows, D dim, M touched rows (a capacity: entries past `count` are padding).
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcrec.core import (
    Reading,
    any_tracked,
    check,
    fail,
    is_followed,
    own_errors,
    reading,
    reduced,
    remade,
    shown,
    sure,
    tree_leaves,
    tree_map,
    typed_fields,
    vmaps_of,
)
from funcrec.kernels import formula, ops
from funcrec.optim._blocks import flat
from funcrec.optim._checks import (
    Rate,
    Tables,
    check_update,
    hyper_problems,
    hyper_type,
    made_problems,
    outcome_problems,
    rate_at,
    rule_problems,
    rule_result_problems,
    tables_problems,
)
from funcrec.optim._kernel import Kernel, facts_of
from funcrec.optim._rounding import draws_of, round_stochastic
from funcrec.optim._user_rule import RuleMemory
from funcrec.tables import RowGrads, terms_of
from funcrec.tables import root as root_of

Slots = dict[str, dict[str, Tensor]]
root = formula.primitive(root_of)


class UpdateRows(Protocol):
    """A function that returns tables and slots after a step."""

    __module__ = "funcrec.optim"  # what `help` shows

    def __call__(
        self,
        row_grads: Mapping[str, RowGrads],
        slots: Slots,
        tables: Tables,
        step: int | Tensor,
        *,
        implementation: str | None = None,
        key: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Slots]: ...


@typed_fields
class RowOptimizer(NamedTuple):
    """A pair of functions that trains tables from their row gradients.

    init: (tables) -> slots, {table: {slot: Tensor}}; f32, or f64 for f64 tables; [R] or [R, D].
    update: (row_grads, slots, tables, step, *, implementation=None, key=None) -> (tables, slots).
      `tables` is {table: f[R, D]}, `row_grads` {table: RowGrads}; `step`, int or i64[], is the number of steps taken
      before this step. A table without a gradient comes back as the same tensor. `implementation` names one of
      `funcrec.kernels`; None chooses the default of the device. `key` rounds 16-bit tables stochastically
      (`stochastic_rounding`); None rounds to the nearest number. An update that is w - rate · g for every row has an
      attribute `rate`, (table, step) -> a number or f[].
      Derivatives: any input may be tracked (requires grad, or wrapped by torch.func): gradients, slots, tables, lr, a
      tensor among the hyper-parameters, or a tensor that the rule reads. The rule then runs in plain torch
      ("reference"), and the update is differentiated to any order and in any mode. If another implementation was
      chosen, by argument or by `ops.using`, the update raises a TypeError before any work.
    label: (table) -> a hashable. Tables with equal labels are updated alike, so sharded tables may share one tensor.
    is_elementwise: whether an element's new value depends only on that element of row, gradient and slots. Columns of
      a row may then be updated separately.
    is_joint: whether the gradient of one table acts on another table, as a norm over all tables does.
    is_gradient_wise: whether an element's new value depends only on that element of row and slots, on slots with one
      number per row, and on the row's whole gradient. Columns of a row may then be updated separately if the whole
      gradient is known (`RowGrads.first`).
    waiting: names of slots that belong to no row. They hold gradients for a later step (`accumulate`), or rows if they
      are integers.
    hold, due: the two halves of an `update` with such slots; None without such slots. hold: (row_grads, slots, tables,
      step) -> (the gradients that are due now, slots). due: (these gradients, slots, tables, step) -> (tables, slots).
      So on a mesh, gradients wait on the rank that received them. `hold` gets `takes`, b[]: whether the step counts.
    counts_entries: whether the update of a row may depend on how many entries its gradient sums.
    has_equal_slots: whether `init` gives all rows of a table the same numbers, whatever numbers the rows have.
    ignores_origin: whether updates never depend on where the rows come from (`RowGrads.origin`).

    Law: `update` writes to no argument. Rows and slots that no entry names keep every bit. A row that is named with a
      zero gradient is updated (a lazy Adam changes it).

    Cost: it reads and writes M · (D + the elements of a row's slots).

    Example:
      >>> import torch, funcrec as fr
      >>> sparse = fr.optim.rowwise_adagrad(lr=0.1)
      >>> tables = {"item": torch.zeros(3, 2)}
      >>> slots = sparse.init(tables)
      >>> grads = {"item": fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 2), num_embeddings=3)}
      >>> tables, slots = sparse.update(grads, slots, tables, step=0)
      >>> tables["item"], slots["item"]["sum"]
      (tensor([[ 0.0000,  0.0000],
              [-0.1000, -0.1000],
              [ 0.0000,  0.0000]]), tensor([0., 1., 0.]))
    """

    init: Callable[[Tables], Slots]
    update: UpdateRows
    label: Callable[[str], Hashable] = lambda table: None
    is_elementwise: bool = False
    is_joint: bool = False
    is_gradient_wise: bool = False
    waiting: tuple[str, ...] = ()
    hold: Callable[..., tuple[dict[str, RowGrads], Slots]] | None = None
    due: Callable[..., tuple[dict[str, Tensor], Slots]] | None = None
    counts_entries: bool = False
    has_equal_slots: bool = False
    ignores_origin: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)


@remade
def row_optimizer(
    *,
    init: Callable[[Tensor], dict[str, Tensor]],
    rule: Callable[[Tensor, Tensor, dict[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]],
    lr: Rate = 0.01,
    name: str = "row_optimizer",
    **hyper: Any,
) -> RowOptimizer:
    """Return an optimizer made from a rule for one row.

    Args:
      init: (table f[R, D]) -> {slot: f[R, ...]}. It must work on the meta device, so it reads no value on the host.
      rule: (row f[D], grad f[D], {slot: f[...]}, hyper) -> (row, slots), without host reads. `grad` is the sum over all
        ids of the batch that name the row. `hyper` is a NamedTuple of `lr` (f[]), `step` (f[], 1 at the first update),
        `repeats` (f[], how many entries were summed into the row) and the hyper-parameters below.
      lr: a number, a tensor f[], or a function from the step (i64[], 0 at the first update) to a number or f[], such as
        `schedule`.
      name: the name of the optimizer in errors.
      hyper: further numbers of the optimizer. Those with a usual name (b1, b2, eps, weight_decay, decay, momentum, eta,
        max_norm, initial_accumulator) are checked: each is a number in its range, or a tensor f[] (under vmap, a tensor
        for each member).

    On a CPU the rule becomes C++ inside the kernel of the built-in optimizers, once for each dim, dtype and shape of
    slots. Eager and compiled updates then give the same bits. The rule may use arithmetic, comparisons, `where`,
    `clamp`, powers, the elementary functions, and casts among f32, f64 and integers. It may compute sums, means,
    products, extremes and norms over the whole row, and use slices, `cat`, `stack`, `flip` and reshapes. It may read
    variables that it closes over. Every eager update reads these again. Another number or branch makes new C++; another
    tensor does not. A program that `fr.jit` compiled reads the tensors that it was compiled with. A rule with any other
    operation (sort, cumsum, a matrix product, a number read on the host), or with more than eight slots, runs on blocks
    of rows. It then needs two to four times as long, and a warning says why.

    Raises:
      TypeError, ValueError: a hyper-parameter is out of its range; or, in an update, a table, gradient or slot does not
        fit. The error names all of them.
      RuntimeError: the first update on a CPU finds no C++ compiler.

    Example:
      >>> import torch, funcrec as fr
      >>> def rule(row, grad, slots, hyper):
      ...     age = slots["age"] + 1
      ...     return row - hyper.lr / age * grad.sign(), {"age": age}
      >>> mine = fr.optim.row_optimizer(init=lambda table: {"age": torch.zeros(table.shape[0])}, rule=rule, lr=0.5)
      >>> tables = {"item": torch.zeros(2, 2)}
      >>> grads = {"item": fr.RowGrads.from_entries(torch.tensor([1]), torch.tensor([[3.0, -3.0]]), num_embeddings=2)}
      >>> mine.update(grads, mine.init(tables), tables, step=0)
      ({'item': tensor([[ 0.0000,  0.0000],
              [-0.5000,  0.5000]])}, {'item': {'age': tensor([0., 1.])}})
    """
    return build(init=init, rule=rule, lr=lr, name=name, hyper=hyper)


def build(*, init, rule, lr: Rate, name: str, hyper: Mapping[str, Any], kernel: Kernel | None = None) -> RowOptimizer:
    call, facts = f"funcrec.optim.{name}", facts_of(kernel)
    check(call, rule_problems(init, rule, name), hyper_problems(lr, hyper))
    make_hyper = hyper_type(call, tuple(hyper))

    def init_table(table: Tensor) -> dict[str, Tensor]:
        made = init(table)
        check(f"{call}.init", made_problems(made, table))
        return {k: s.to(ops.accumulation_dtype(table.dtype)) for k, s in made.items()}

    @functools.cache
    def slot_shapes(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
        return {k: tuple(s.shape) for k, s in init_table(torch.empty(shape, dtype=dtype, device="meta")).items()}

    one = lambda row, grad, own, rate, t, repeats: rule(row, grad, own, make_hyper(rate, t, repeats, **hyper))
    rules = RuleMemory(call, one, round_stochastic)

    def init_slots(tables: Tables) -> Slots:
        check(f"{call}.init", tables_problems(tables))
        return {n: init_table(t) for n, t in tables.items()}

    def update(
        row_grads: Mapping[str, RowGrads],
        slots: Slots,
        tables: Tables,
        step: int | Tensor,
        *,
        implementation: str | None = None,
        key: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Slots]:
        check_update(f"{call}.update", row_grads, slots, tables, step, slot_shapes, facts["is_gradient_wise"])
        named = {n: g for n, g in row_grads.items() if g.capacity > 0}
        if not named:
            return dict(tables), dict(slots)
        device = next(iter(tables.values())).device
        fused = kernel if kernel is not None and kernel.fits(hyper, named) else None
        fits = fused is not None
        readings = {} if fits else check_rule(call, one, make_hyper._fields, named, slots, tables)
        own = [x for x in hyper.values() if isinstance(x, Tensor)]
        read = own if fits else [x for r in readings.values() for x in r.tensors]
        given = [x for n, g in named.items() for x in (tables[n], *slots[n].values(), *g.floats)]
        rate, _ = rate_and_step(call, lr, step, torch.float64, device)
        choice = chosen_for(call, implementation, device, [rate, *read, *given])
        if fused and ops.has("fused_update", choice) and (choice == "cpp" or not own):  # a GPU would wait for tensors
            numbers, names = fused.numbers(hyper), sure(fused.form).slots
            call_kernel = functools.partial(ops.fused_update, rule=fused.name, **numbers, implementation=choice)
            changed = update_fused(call_kernel, names, named, slots, tables, (rate, step, key))
        elif choice == "cpp" and not any(g.has_repeats for g in named.values()) and not any(map(is_followed, read)):
            changed = {}, {}
            for names in dict.fromkeys(tuple(slots[n]) for n in named):
                same = {n: g for n, g in named.items() if tuple(slots[n]) == names}
                part = update_fused(rules.find(names, readings).update, names, same, slots, tables, (rate, step, key))
                changed = {**changed[0], **part[0]}, {**changed[1], **part[1]}
        else:
            numbers = functools.cache(lambda dtype: rate_and_step(call, rate, step, dtype, device))
            of = lambda dtype: lambda row, grad, own, repeats: one(row, grad, own, *numbers(dtype), repeats)
            changed = update_rows(call, of, named, slots, tables, key, choice)
        return {**tables, **changed[0]}, {**slots, **changed[1]}

    return RowOptimizer(init_slots, update, **facts, ignores_origin=True)


def update_fused(kernel: Callable, slot_names: Sequence[str], grads: Mapping, slots: Slots, tables: Tables, numbers):
    """Return all tables and slots, updated in one call of kernel(tables, slots, terms, lr, step, keys).

    Under vmap, tables that are equal in all members have a separate call, and stay equal.
    """
    rate, step, key = numbers
    alike: dict[frozenset[int], dict] = {}
    for n, g in grads.items():
        alike.setdefault(vmaps_of([tables[n], *slots[n].values(), *tree_leaves(g)]), {})[n] = g
    if len(alike) > 1:
        made = [update_fused(kernel, slot_names, own, slots, tables, numbers) for own in alike.values()]
        return {n: t for own, _ in made for n, t in own.items()}, {n: s for _, own in made for n, s in own.items()}
    device = next(iter(tables.values())).device
    taken = step_tensor(step, device).to(torch.int64)
    keys = None if key is None else draws_of(key, grads, tables)
    windows = windows_of(grads, device)
    names = {n: [k for k in slot_names if k in slots[n]] for n in grads}
    given = [[slots[n][k] for k in names[n]] for n in grads]
    terms = terms_of(list(grads.values()))
    new_tables, new_slots = kernel([tables[n] for n in grads], given, terms, rate, taken, keys, **windows)
    made = {n: dict(zip(names[n], s, strict=True)) for n, s in zip(grads, new_slots, strict=True)}
    return dict(zip(grads, new_tables, strict=True)), {n: {k: made[n][k] for k in slots[n]} for n in grads}


def windows_of(grads: Mapping[str, RowGrads], device: torch.device) -> dict[str, Any]:
    """Return `first` and `dims` for the kernel if some gradient has more columns than its table, else nothing."""
    if all(g.first is None for g in grads.values()):
        return {}
    zero = torch.zeros((), dtype=torch.int64, device=device)
    first = torch.stack([zero if g.first is None else g.first for g in grads.values()])
    return {"first": first, "dims": [g.dim for g in grads.values()]}


def chosen_for(call: str, implementation: str | None, device: torch.device, tensors: Sequence[Tensor]) -> str:
    """Return the implementation of an update. It is the reference if one of the tensors is differentiated."""
    choice = ops.chosen(implementation, device)
    if choice == "reference" or not any_tracked(tensors):
        return choice
    if not ops.is_free(implementation):
        got = f"implementation={choice!r}, and a tensor that grad or jvp follows (an nn.Parameter is one)"
        need = "plain tensors"
        hint = "implementation=None or 'reference', which run the rule in plain torch; or x.detach()"
        fail(f"{call}.update", "the kernel has no derivative.", got=got, need=need, hint=hint, kind=TypeError)
    return "reference"


def check_rule(
    call: str, rule: Callable, hyper: Sequence[str], grads: Mapping, slots: Slots, tables: Tables
) -> dict[tuple, Reading]:
    """Return what the rule does with each form of table, after a check of its result on one row of ones."""
    forms = {}
    for n in grads:
        dtype = ops.accumulation_dtype(tables[n].dtype)
        forms[grads[n].dim, dtype, tables[n].device, tuple((k, s.shape[1:]) for k, s in slots[n].items())] = None

    for form in forms:

        def watched(*args):
            out, forms[form] = reading(rule, *args)  # noqa: B023
            check(call, outcome_problems(out, forms[form].written))  # noqa: B023
            return out

        dim, dtype, device, own = form
        ones = functools.partial(torch.ones, dtype=dtype, device=device)
        row, mine = ones(1, dim), {k: ones(1, *shape) for k, shape in own}
        each = (row, row, mine, ones(()), ones(()), ones(1))
        with own_errors(call, "rule", *each[:3], need=f"(row, grad, slots, hyper), hyper's {', '.join(hyper)}"):
            new = torch.func.vmap(watched, in_dims=(0, 0, 0, None, None, 0))(*each)
        check(call, rule_result_problems(new[0], new[1], row, mine))
    return forms


def update_rows(call: str, rule_of: Callable, grads: Mapping, slots: Slots, tables: Tables, key, implementation: str):
    """Return all tables and slots, updated one table after another: coalesce, gather, vmap(rule), scatter."""
    new_tables, new_slots = {}, {}
    for n, g in grads.items():
        table, g = tables[n], g.coalesce(implementation=implementation)
        rows, new, written = touched_rows(
            call, rule_of(ops.accumulation_dtype(table.dtype)), g, slots[n], table, implementation
        )
        if key is not None:
            new = round_stochastic(new, table.dtype, rows, draws_of(key, {n: g}, tables)[0])
        put = functools.partial(ops.scatter_rows, rows=rows, count=g.count, implementation=implementation)
        new_tables[n] = put(table, new=new)
        new_slots[n] = {k: put(flat(s), new=written[k]).reshape(s.shape) for k, s in slots[n].items()}
    return new_tables, new_slots


def touched_rows(
    call: str, rule: Callable, grads: RowGrads, slots: dict[str, Tensor], table: Tensor, implementation: str
):
    """Return (rows i64[M], their new values f[M, D], {slot: f[M, ...]})."""
    take = functools.partial(ops.gather_rows, rows=grads.rows, implementation=implementation)
    row = take(table)
    mine = {k: take(flat(s)).reshape(-1, *s.shape[1:]) for k, s in slots.items()}
    if grads.first is not None:
        width, is_wide = row.shape[1], lambda x: x.dim() > 1
        first = grads.first
        row, mine = tree_map(lambda x: put_columns(x, first, grads.dim) if is_wide(x) else x, (row, mine))
    repeats = torch.ones_like(grads.rows) if grads.repeats is None else grads.repeats
    given = (row, grads.grads.to(row.dtype), mine, repeats.to(row.dtype))
    if implementation == "reference":  # padding is 1: at 0 a derivative of a rule may be 0 · ∞
        given = tree_map(lambda x: torch.where(grads.valid.view(-1, *[1] * (x.dim() - 1)), x, 1), given)
    new_row, new_slots = torch.func.vmap(rule)(*given)
    check(call, rule_result_problems(new_row, new_slots, row, mine))
    if grads.first is not None:
        own = grads.first + torch.arange(width, device=row.device)
        new_row, new_slots = tree_map(lambda x: x[:, own] if is_wide(x) else x, (new_row, new_slots))
    return grads.rows, new_row, {k: flat(s) for k, s in new_slots.items()}


def put_columns(x: Tensor, first: Tensor, dim: int) -> Tensor:
    """Return f[M, dim] with x[M, w] in the columns from `first` on, and zeros elsewhere."""
    place = torch.arange(dim, device=x.device) - first
    return torch.where((place >= 0) & (place < x.shape[1]), x[:, place.clamp(0, x.shape[1] - 1)], 0)


def rate_and_step(
    call: str, lr: Rate, step: int | Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return lr f[] and t = step + 1 f[] as tensors on `device`, so that a compiled step does not freeze them."""
    taken = step_tensor(step, device)
    rate = rate_at(call, lr, taken)
    rate = rate.to(device, dtype) if isinstance(rate, Tensor) else torch.full((), rate, dtype=dtype, device=device)
    return rate, (taken + 1).to(dtype)


def step_tensor(step: int | Tensor, device: torch.device) -> Tensor:
    """Return the step as a tensor i[] on `device`."""
    return step.to(device) if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64, device=device)


def norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of a row, f[]."""
    return root(x.square().sum())

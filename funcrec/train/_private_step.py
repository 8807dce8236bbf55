"""private_step: DP-SGD whose noise falls on every row of every table, and is drawn when a row is next read.

    row r, last read in step a, is read in step b:    w_r ← w_r - √(Σ_{a ≤ s < b} (lr_s · σ · C / B_s)²) · N_r(b - 1)

SGD adds its gradient's noise to a row, so the sum of several steps' noise is one normal number of the summed variance.

Source: Lim et al., "LazyDP: Co-designing algorithm-software for scalable training of differentially private
recommendation models" (ASPLOS 2024), sections 5.1 and 5.2.
Shapes: R rows of a table, M rows that a batch reads, D dim.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Movable,
    NotNegative,
    Positive,
    Problem,
    Scalar,
    any_tracked,
    check,
    describe,
    fail,
    kind_of,
    pytree,
    random,
    remade,
    replace,
    tree_leaves,
    typed,
)
from funcrec.grad import Private, key_of_table, noisy_grads, row_noise, rows_read
from funcrec.jagged import is_concrete
from funcrec.kernels import ops
from funcrec.kinds import touched_rows
from funcrec.models import Model, TwoTower
from funcrec.optim import DenseOptimizer, RowOptimizer
from funcrec.tables import Params, RowGrads, is_plain, root, show_tables
from funcrec.train._recipe import Gathered, Stages, run_recipe
from funcrec.train._state import TrainState
from funcrec.train._step import TrainStep, own_memory, state_problems, train_step

CALL = "funcrec.private_step"
BLOCK = 1 << 16  # rows whose noise is made at once


@pytree
class PrivateState(Movable):
    """A training state whose tables lack the noise that rows have not been read with yet. `flush` adds it.

    Args:
      bare: the state; its tables are not private, and lookups outside of the step must not read them.
      drawn: {table: f64[R]}, the variance of the noise that each row has got.
      due: {table: f64[]}, the variance that every row must have when it is read.

    Example:
      >>> import torch, funcrec as fr
      >>> dense = fr.optim.dense(torch.optim.SGD, lr=0.5)
      >>> step = fr.private_step(lambda p, b: p.dense.square() * b.sum(), sparse=fr.optim.sgd(0.1), dense=dense,
      ...                        max_norm=1.0, noise_multiplier=1.0)
      >>> step.init(fr.Params({"item": torch.zeros(10, 4)}, torch.ones(())))
      PrivateState(tables={item: f32[10, 4]}, whose noise waits)
    """

    bare: TrainState
    drawn: Any
    due: Any

    @property
    def params(self) -> Params:
        hint = "fr.flush(state).params"
        need = "parameters with all noise"
        fail("funcrec.PrivateState", "noise waits.", got="`params` of a PrivateState", need=need, hint=hint)

    def __repr__(self) -> str:
        return f"PrivateState(tables={show_tables(self.bare.tables)}, whose noise waits)"


@remade
@typed
def private_step(
    loss_fn: Callable[..., Any] | Model | TwoTower,
    *,
    sparse: RowOptimizer,
    dense: DenseOptimizer | None = None,
    has_aux: bool = False,
    max_norm: Positive | Scalar,
    noise_multiplier: NotNegative | Scalar,
    batch_size: Count | None = None,
    max_ids: Count | None = None,
    chunk_size: Count | None = None,
) -> "TrainStep[PrivateState]":
    """Return a step of DP-SGD whose cost follows the batch, with the guarantee of noise on every row.

    It is `train_step` with `private_grads(rows="all")`, but a row's noise waits until a batch reads the row, or until
    `flush`. Then all noise of the steps since is drawn at once.

    Args:
      loss_fn, has_aux: see `train_step`.
      sparse: `sgd` without weight decay, with any rate or schedule, or `by_table` of such optimizers. The update must
        be the gradient times a rate: only then is the sum of many steps' noise the noise of a sum. Adagrad, Adam,
        momentum and others read each step's noise in their slots, and need train_step(grad=fr.private_grads).
      dense: see `train_step`. Any optimizer: dense parameters get their noise in every step.
      max_norm, noise_multiplier, batch_size, max_ids, chunk_size: see `private_grads`.

    Returns:
      TrainStep over `PrivateState`. `init` takes Params, or a TrainState such as the one of `flush`, to go on from.

    Raises:
      TypeError: for another optimizer; for tables that are not a dict of f32 or f64 in one process; if the loss reads
        rows that follow from values of tables, as mined negatives do (in a program of `fr.jit`, the loss and all later
        noise are NaN).

    Law: a row has its noise whenever a batch reads it. The noise of steps a to b - 1 on row r is normal, with the
      variance Σ (lr · noise_multiplier · max_norm / batch_size)² of these steps, and is a function of the state's key,
      the table's name, r and b. So flushed tables have the distribution that noise in every step gives, also jointly
      with all reads before. If every batch reads every row, they are those of train_step(grad=fr.private_grads).
      Saved and loaded, jitted and donated states go on with the same bits. Variances are summed in f64: the noise of
      a step is lost where its rate is below 1e-8 of the rates before it.

    Cost: as `private_grads(rows="touched")`, and one more forward pass without `fr.jit`. Memory: 8 bytes for each row.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("clicked", table="item")]).values.mean()
      >>> step = fr.private_step(loss_fn, sparse=fr.optim.sgd(0.1), max_norm=1.0, noise_multiplier=1.0)
      >>> run = step.init(fr.Params({"item": torch.zeros(5, 1)}, {}))
      >>> run, metrics = step(run, fr.KeyedJaggedTensor.from_lists({"clicked": [[0], [1]]}))
      >>> run.bare.tables["item"].flatten(), int((fr.flush(run).tables["item"] != 0).sum())
      (tensor([-0.0500, -0.0500,  0.0000,  0.0000,  0.0000]), 5)
    """
    check(CALL, optimizer_problems(sparse))
    private = functools.partial(
        Private, max_norm=max_norm, noise_multiplier=noise_multiplier, rows="later", batch_size=batch_size,
        max_ids=max_ids, chunk_size=chunk_size,
    )  # fmt: skip
    grad = lambda loss_fn, has_aux=False: noisy_grads(private(loss_fn, has_aux))
    step = train_step(loss_fn, sparse=sparse, dense=dense, has_aux=has_aux, grad=grad)
    recipe, where = step.update.recipe, step.update.where
    how = private(recipe.loss_fn, recipe.has_aux)

    def init(params: Params | TrainState, key: Tensor | None = None) -> PrivateState:
        if isinstance(params, TrainState):
            check(CALL, state_problems(params))
        state = params if isinstance(params, TrainState) else step.init(params, key)
        check(CALL, tables_problems(state.tables))
        sparse.init(state.tables)  # it raises for tables without an optimizer
        zeros = lambda t, *shape: torch.zeros(shape, dtype=torch.float64, device=t.device)
        drawn = {n: zeros(t, t.shape[0]) for n, t in state.tables.items()}
        return own_memory(PrivateState(state, drawn, {n: zeros(t) for n, t in state.tables.items()}))

    def update(run: PrivateState, batch: Any) -> tuple[PrivateState, dict]:
        check(CALL, run_problems(run))
        state = run.bare
        key = random.fold_in(state.key, state.step)
        examples = how.examples(batch)
        tables, drawn = settled(run, rows_read(how, examples, state.params, **how.keyed(key)))
        late: list[Tensor] = []

        def checked_update(sparse: RowOptimizer, gathered: Gathered, state: TrainState) -> tuple[Any, Any]:
            late.append(reads_late(gathered.rows, drawn, run.due))
            return where.place.update(sparse, gathered, state)

        stages: Stages = where.place._replace(update=checked_update)
        new, metrics = run_recipe(recipe, stages, replace(state, tables=tables), batch)
        check(CALL, late_problems(late[0]))
        scale = how.scale / how.divisor(examples.count)
        lost = lambda x: torch.where(late[0], torch.nan, x)
        rate_of = cast(Any, sparse.update).rate
        rate = lambda n: torch.as_tensor(rate_of(n, state.step), dtype=torch.float64, device=state.step.device)
        added = {n: (rate(n) * scale) ** 2 for n in tables}
        metrics = {**metrics, "loss": lost(metrics["loss"])}
        return PrivateState(new, drawn, {n: lost(v + added[n]) for n, v in run.due.items()}), metrics

    return TrainStep(init, update)


@typed
def flush(run: PrivateState) -> TrainState:
    """Return the training state with the noise that waits, for evaluation, export, or the end of training.

    To train on, begin again from its result, `step.init(fr.flush(run))`: who shows both the flushed tables and tables
    that trained on without it shows two draws of the same noise, and that is less private.

    Law: the same bits whenever it is called for one state. See `private_step` for the rest.

    Cost: as one step of `private_grads(rows="all")`: it reads and writes all tables.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("clicked", table="item")]).values.mean()
      >>> step = fr.private_step(loss_fn, sparse=fr.optim.sgd(0.1), max_norm=1.0, noise_multiplier=1.0)
      >>> run = step.init(fr.Params({"item": torch.zeros(5, 1)}, {}))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0], [1]]})
      >>> run = step.init(fr.flush(step(run, ids)[0]))
      >>> int(step(run, ids)[0].bare.step)
      2
    """
    check("funcrec.flush", run_problems(run))
    tables = {}
    for name, table in run.bare.tables.items():
        every = torch.arange(table.shape[0], device=table.device)
        parts = [table[own] + waiting_noise(run, name, own) for own in every.split(BLOCK)]
        tables[name] = torch.cat([table[:0], *parts]).to(table.dtype)
    return replace(run.bare, tables=tables)


def waiting_noise(run: PrivateState, name: str, rows: Tensor) -> Tensor:
    """Return the noise f64[M, D] that rows i64[M] of a table have not got yet."""
    last = random.fold_in(run.bare.key, run.bare.step - 1)
    key = key_of_table(random.split(last)[0], name)
    spread = root((run.due[name] - run.drawn[name][rows]).clamp(min=0))
    return -spread[:, None] * row_noise(key, rows, run.bare.tables[name].shape[1])


def settled(run: PrivateState, read: Mapping[str, RowGrads]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (tables, drawn) in which the rows that a batch reads have all their noise."""
    tables, drawn = dict(run.bare.tables), dict(run.drawn)
    names = [n for n, g in read.items() if g.capacity > 0]
    for name, rows in zip(names, touched_rows([read[n] for n in names]), strict=True):
        count = (rows >= 0).sum()
        rows = rows[: int(count)] if is_concrete(count) else rows
        noise = waiting_noise(run, name, rows.clamp(min=0))
        new = (ops.gather_rows(tables[name], rows) + noise).to(tables[name].dtype)
        tables[name] = ops.scatter_rows(tables[name], rows, count, new)
        own = run.due[name].expand(rows.shape[0], 1)
        drawn[name] = ops.scatter_rows(drawn[name][:, None], rows, count, own).reshape(-1)
    return tables, drawn


def reads_late(grads: Mapping[str, RowGrads], drawn: Mapping[str, Tensor], due: Mapping[str, Tensor]) -> Tensor:
    """Return whether a gradient has a row that lacks noise, bool[]."""
    names = [n for n, g in grads.items() if g.capacity > 0]
    rows = touched_rows([grads[n] for n in names])
    lacks = [((own >= 0) & (drawn[n][own.clamp(min=0)] < due[n])).any() for n, own in zip(names, rows, strict=True)]
    return torch.stack(lacks).any() if lacks else torch.zeros((), dtype=torch.bool)


# -- validators --------------------------------------------------------------------------------------------------

STATE = kind_of(PrivateState)


def optimizer_problems(sparse: RowOptimizer) -> Iterator[Problem]:
    """Report optimizers that are not a rate times the gradient."""
    if not hasattr(sparse.update, "rate"):
        need = "fr.optim.sgd(lr) without weight decay, or by_table of such optimizers"
        hint = "train_step(loss_fn, sparse=..., grad=functools.partial(fr.private_grads, ...))"
        what = "`sparse` is not plain SGD, so noise cannot wait."
        yield Problem(what, describe(sparse), need, hint, TypeError)


def tables_problems(tables: Any) -> Iterator[Problem]:
    if not is_plain(tables):
        need, hint = "{name: f[R, D]}", "train_step(grad=functools.partial(fr.private_grads, ...))"
        yield Problem("`tables` are not plain tables, whose noise can wait.", describe(tables), need, hint, TypeError)
        return
    for name, t in tables.items():
        if t.dtype not in (torch.float32, torch.float64):
            hint = "train_step(grad=...), which adds every step's noise and then rounds"
            yield Problem(f"table {name!r} is too coarse for noise that waits.", describe(t), "f32", hint, TypeError)


def run_problems(run: Any) -> Iterator[Problem]:
    found = list(STATE.find("state", run))
    yield from found
    if found:
        return
    yield from state_problems(run.bare)
    yield from tables_problems(run.bare.tables)
    if any_tracked([x for x in tree_leaves(run) if isinstance(x, Tensor)]):
        got = "a tensor that autograd or torch.func follows"
        yield Problem("the state is differentiated.", got, "plain tensors: noise has no derivative", kind=TypeError)
        return
    for part, shape in (("drawn", lambda t: t.shape[:1]), ("due", lambda t: ())):
        own = getattr(run, part)
        for name, t in run.bare.tables.items():
            x = own.get(name) if isinstance(own, Mapping) else None
            if not isinstance(x, Tensor) or x.dtype != torch.float64 or tuple(x.shape) != tuple(shape(t)):
                need = f"f64{list(shape(t))}"
                yield Problem(f"`state.{part}[{name!r}]` does not fit.", describe(x), need, "step.init(params)")


def late_problems(late: Tensor) -> Iterator[Problem]:
    if is_concrete(late) and bool(late):
        need = "rows that follow from the batch and the key alone"
        got = "a lookup of a row whose noise waits"
        hint = "train_step(grad=functools.partial(fr.private_grads, ...)), whose noise never waits"
        yield Problem("the loss reads other rows when its tables change.", got, need, hint, TypeError)

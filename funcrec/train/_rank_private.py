"""Private gradients on ranks: each rank clips the gradients of its own examples, and their sum gets noise once.

    rows that the bags read ─fetch─▶ this rank, which clips each example ─sums─▶ owners of the rows, which add noise

All bags of an example lie on one rank, so the norm of its gradient over all tables needs no exchange.
Shapes: M rows, w columns of a bank, D dim of a table.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, random, replace
from funcrec.grad import HeldRows, Private, clipped_total, key_of_table, rows_read, taken
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.mesh import Mesh, axis_index
from funcrec.sharding import Layout, Plan, ShardedTables, table_rows
from funcrec.tables import KINDS, Entries, FeatureConfig, Params, RowGrads, TableRef
from funcrec.train._recipe import Gathered, Recipe, Stages
from funcrec.train._state import TrainState

CALL = "funcrec.train_step"


def private_on_ranks(how: Private, recipe: Recipe, place: Stages, mesh: Mesh) -> tuple[Recipe, Stages]:
    """Return the recipe and the stages of one rank, for gradients of `private_grads`."""

    def gathered(shares: tuple[Tensor, int], grads: Params, overflows: Sequence, state: TrainState) -> Gathered:
        loss, count = shares
        out = place.gathered(loss, grads, overflows, state)
        key, tables = random.fold_in(state.key, state.step), place.params(state).tables
        noisy = lambda total, *how: Params({n: noisy_bank(n, g, tables, *how) for n, g in total.tables.items()}, {})

        def dense() -> tuple[Any, Tensor]:
            d_dense, total = out.dense()
            return how.mean(Params({}, d_dense), key, count).dense, total

        return out._replace(rows=how.mean(Params(dict(out.rows), {}), key, count, noisy).tables, dense=dense)

    # gradients are sums of the ranks' shares, and noise needs the same key on all ranks
    stages = place._replace(loss_fn=lambda recipe: recipe.loss_fn, key=lambda key: key, gathered=gathered)
    return recipe._replace(grad=lambda loss_fn, has_aux=False: share_of(how, mesh)), stages


def private_of(fn: Callable) -> Private | None:
    """Return the arguments of `private_grads`, if it made the function; of a function around it, None."""
    how, owner = getattr(fn, "private", (None, None))
    return how if owner is fn else None


def share_of(how: Private, mesh: Mesh) -> Callable:
    """Return (params, batch, *, key) -> ((this rank's share of the loss, the number of all examples), the sum of the
    clipped gradients of this rank's examples)."""

    def run(params: Params, batch: Any, *, key: Tensor) -> tuple[Any, Params]:
        check(CALL, tables_problems(params.tables))
        examples, (fetch, send) = how.examples(batch), exchange_of(params.tables)
        examples = examples._replace(first=axis_index(mesh.axis_names) * examples.count)
        own = how.keyed(key)
        unread = {n: HeldRows(x, *no_row(x, h)) for n, (x, h) in blank_rows(params.tables).items()}
        read = rows_read(how, examples, Params(as_refs(unread), params.dense), **own)
        rows = {n: distinct(g) for n, g in read.items() if g.capacity > 0}
        held = {n: HeldRows(x, rows[n], unread[n].height) for n, x in fetch(rows).items()}
        losses, aux, total = clipped_total(how, examples, Params(as_refs(unread | held), params.dense), **own)
        of = lambda n: taken(total.tables[n], rows[n], held[n].held, held[n].height)
        tables = send({n: of(n) for n in rows})
        everyone = examples.count * mesh.size
        loss = losses.sum() / everyone if everyone else losses.sum() * torch.nan
        return ((loss, everyone), aux) if how.has_aux else (loss, everyone), Params(tables, total.dense)

    return run


def blank_rows(tables: ShardedTables) -> dict[str, tuple[Tensor, int]]:
    """Return {table: (one row of zeros, R)}."""
    banks = {s.table: tables.banks[tables.layout.banks[s.bank].name] for s in tables.layout.shards}
    of = lambda n, dim: torch.zeros(1, dim, dtype=banks[n].dtype, device=banks[n].device)
    return {n: (of(n, dim), height) for n, (height, dim) in tables.layout.shapes}


def no_row(like: Tensor, height: int) -> tuple[Tensor, int]:
    return torch.full((1,), height, device=like.device), height


def as_refs(tables: dict[str, HeldRows]) -> dict[str, TableRef]:
    return {n: TableRef(x, n) for n, x in tables.items()}


def distinct(grads: RowGrads) -> Tensor:
    """Return the distinct rows of a gradient i64[M], ascending, and R in the places behind them."""
    out = grads.coalesce()
    return torch.where(out.valid, out.rows, grads.num_embeddings).long()


def exchange_of(tables: ShardedTables) -> tuple[Callable, Callable]:
    """Return (fetch: {table: i64[M]} -> {table: f[M, D]}, send: {table: f[M, D]} -> {bank: RowGrads of this rank})."""
    found: list[Any] = []

    def fetch(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        if not rows:
            return {}
        features = [FeatureConfig(n, table=n, pooling="none") for n in rows]
        values = torch.cat(list(rows.values()))
        lengths = torch.tensor([x.shape[0] for x in rows.values()], device=values.device)
        ids = KeyedJaggedTensor.from_lengths(list(rows), values, lengths)
        read = KINDS[ShardedTables].read(tables, ids, features, None)
        found.append(read)
        return {n: read.out[n].values[: x.shape[0]] for n, x in rows.items()}

    def send(d_rows: dict[str, Tensor]) -> dict[str, RowGrads]:
        if not d_rows:
            return no_gradients(tables)
        read = found[0]
        room = lambda n: read.out[n].values.shape[0] - d_rows[n].shape[0]
        padded = {n: torch.nn.functional.pad(x, (0, 0, 0, room(n))) for n, x in d_rows.items()}
        return no_gradients(tables) | read.transpose(padded, read.saved())

    return fetch, send


def no_gradients(tables: ShardedTables) -> dict[str, RowGrads]:
    dims = {b.name: b.dim for b in gradient_layout(tables).banks}
    form = lambda t: {"dtype": ops.accumulation_dtype(t.dtype), "device": t.device}
    return {n: RowGrads.zeros((t.shape[0], dims[n]), **form(t)) for n, t in tables.banks.items()}


def gradient_layout(tables: ShardedTables) -> Layout:
    """Return the layout of gradients: those of `whole` banks have all columns of their tables."""
    return tables.layout.with_whole_rows(tables.whole)


def noisy_bank(
    name: str, grads: RowGrads, tables: ShardedTables, key: Tensor, scale: float | Tensor, which: str
) -> RowGrads:
    """Return the gradient of this rank's bank with the noise of its rows. Ranks with copies of a row add the same."""
    layout = gradient_layout(tables)
    bank = next(i for i, b in enumerate(layout.banks) if b.name == name)
    axes, dims = layout.banks[bank].axes, dict(layout.shapes)
    rank = axis_index(axes) if axes else torch.zeros((), dtype=torch.int64, device=key.device)
    shards = [s for s in layout.shards if s.bank == bank]
    if which == "touched":
        grads = grads.coalesce()
        own = torch.where(grads.valid, grads.rows, -1).long()
    else:
        own = torch.arange(grads.num_embeddings, device=key.device)
    shard, rows = table_rows(own, shards, rank)
    of = lambda values: torch.stack(values)[shard.clamp(min=0)]
    number = lambda x: torch.tensor(x, device=key.device)
    keys = of([key_of_table(key, s.table) for s in shards])
    begin = rows * of([number(dims[s.table][1]) for s in shards]) + of([number(s.first) for s in shards])
    known = (shard >= 0) & (rows < of([number(dims[s.table][0]) for s in shards]))
    noise = random.normal(keys[:, None], (len(own), grads.dim), start=begin.clamp(min=0), dtype=torch.float64)
    noise = torch.where(known[:, None], scale * noise, 0)
    if which == "touched":
        term = cast(Entries, grads.terms[0])
        return replace(grads, terms=(replace(term, grads=(term.grads + noise).to(term.grads.dtype)),))
    entries = RowGrads.from_entries(
        torch.where(known, own, -1), noise.to(grads.floats[0].dtype), num_embeddings=grads.num_embeddings
    )
    return replace(grads + entries, axes=axes)


# -- validators --------------------------------------------------------------------------------------------------


def tables_problems(tables: Any) -> Iterator[Problem]:
    if tables.of is not dict:
        what, need = "`state.tables` cannot get private gradients.", "tables of a plain dict, sharded"
        yield Problem(
            what, f"sharded {tables.of.__name__}", need, "step.init(fr.Params({name: f[R, D]}, dense))", TypeError
        )
    elif tables.transport.codec is not None:
        what = "`codec` rounds gradients after they are clipped."
        yield Problem(what, describe(tables.transport.codec), "codec=None", "step.init(params)", TypeError)


def place_problems(
    how: Private | None, mesh: Mesh, plan: Plan, batch_axes: Sequence[str] | None, others: dict[str, Any]
) -> Iterator[Problem]:
    """Report arguments of a step on a mesh that do not go with private gradients; `how` is None for other gradients."""
    what = "private gradients on a mesh do not go with `{}`."
    if how is None:
        need, hint = "fr.private_grads", "grad=functools.partial(fr.private_grads, ...), or a step without a mesh"
        yield Problem("`grad` is for one process.", "another transform, and mesh=", need, hint, TypeError)
        return
    if how.max_ids is None:
        need, hint = "the most ids of an example, equal on all ranks", "fr.private_grads(..., max_ids=512)"
        yield Problem("`max_ids` of private_grads is missing.", "None, on a mesh", need, hint, TypeError)
    if batch_axes is not None and set(batch_axes) != set(mesh.axis_names):
        need, hint = "an example on one rank alone", "batch_axes=None, which cuts the batch over all axes"
        yield Problem(what.format("batch_axes"), f"{tuple(batch_axes)}", need, hint, TypeError)
    if plan.replicas:
        need, hint = "one sum over all ranks", "a plan without replicas"
        yield Problem(what.format("replicas"), f"{plan.replicas}", need, hint, TypeError)
    for name, x in others.items():
        if x:
            yield Problem(what.format(name), describe(x), f"a step without `{name}`", "leave it out", TypeError)

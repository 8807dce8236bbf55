"""train_step on a mesh: every rank takes its bags, its rows and the sum of all dense gradients.

    grads = Σ_r d(loss_r / n);   tables: each row's owner has all its terms, in the order of the global batch;   dense: the same sum everywhere

Of a plan with replicas n and Σ are, for the tables, over the ranks of one group; for the dense parameters always over all.

Floor 5. Shapes: n ranks, M touched rows, w columns of a bank, D of a table.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec import _random as random
from funcrec._codec import Codec
from funcrec._collectives import all_gather, axis_index, pmean
from funcrec._errors import describe, fail
from funcrec._grad import value_and_grad
from funcrec._layout import Layout
from funcrec._mesh import Mesh, P
from funcrec._placement import Plan
from funcrec._rowgrads import RowGrads, joined_overflow
from funcrec._shard_map import shard_map
from funcrec._sharded import ShardedTables, shard_tables, sync_grads
from funcrec._sharded_dense import cut_dense, dense_specs, gather_dense, own_dense, sum_dense
from funcrec._state import Params, TrainState
from funcrec._tree import replace, tree_flatten, tree_map, tree_unflatten
from funcrec.kernels import ops
from funcrec.optim import DenseOptimizer, RowOptimizer


def shard_state(
    params: Params,
    key: Tensor,
    mesh: Mesh,
    plan: Plan,
    sparse: RowOptimizer,
    dense: DenseOptimizer,
    dense_axes: tuple[str, ...],
    **how: Any,
) -> TrainState:
    """The first state: tables as the plan places them, slots like their rows, the rest on every rank, or cut. how: of `shard_tables`."""
    labels = {n: sparse.label(n) for n in params.tables}
    tables = shard_tables(params.tables, plan, mesh, labels=labels, **how)
    check_whole_rows("funcrec.train_step", sparse, tables.layout)
    columns = column_banks(sparse, tables.layout)
    slots = init_slots(sparse, tables, columns)
    for n, own in slots.items():
        for k, s in own.items():
            if s.shape[0] != tables.banks[n].shape[0]:
                hint = "an optimizer whose slots have the rows of their table"
                fail(
                    "funcrec.train_step",
                    f"slot {k!r} of bank {n!r} cannot be sharded.",
                    got=describe(s),
                    need=f"{tables.banks[n].shape[0]} rows",
                    hint=hint,
                )
    step = torch.zeros((), dtype=torch.int64, device=key.device)
    kept = cut_dense(params.dense, mesh, dense_axes) if dense_axes else params.dense
    return TrainState(step, tables, slots, kept, dense.init(kept), key)


class Recipe(NamedTuple):
    """What a step does, wherever it runs: the arguments of `train_step` that know of no mesh."""

    loss_fn: Callable
    sparse: RowOptimizer
    dense: DenseOptimizer
    has_aux: bool
    merge: Callable | None

    @property
    def takes_key(self) -> bool:
        return "key" in inspect.signature(self.loss_fn).parameters


def sharded_update(
    recipe: Recipe,
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    replicas: tuple[str, ...],
    capacity: int | None,
    codec: Codec | None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict]]:
    """(state, batch) -> (state, metrics) on a mesh; each rank differentiates its own loss over the number of ranks that train one copy."""
    copies = prod(mesh.shape[a] for a in replicas)
    loss_fn, sparse, dense, has_aux, merge = recipe
    takes_key = recipe.takes_key

    def local(params, batch, **extra):
        out = loss_fn(params, batch, **extra)
        loss, aux = out if has_aux else (out, ())
        return loss / (mesh.size // copies), aux

    def one_rank(state: TrainState, batch: Any):
        at_step = lambda: random.fold_in(random.fold_in(state.key, state.step), axis_index(batch_axes))
        extra = {"key": at_step()} if takes_key else {}
        how = state.tables.codec if codec is None else codec
        params = Params(replace(state.tables, capacity=capacity, codec=how), gather_dense(state.dense))
        (loss, aux), grads = value_and_grad(local, has_aux=True)(params, batch, **extra)
        metrics = overflow_metrics(grads.tables, mesh.axis_names, state.step) if capacity is not None else {}
        fits = metrics["overflow"] == 0 if metrics else None
        kept = grads.tables if fits is None else {n: g.where(fits) for n, g in grads.tables.items()}
        row_grads = sync_grads(kept, state.tables.layout)
        banks, slots = update_banks(sparse, row_grads, state.slots, state.tables, state.step)
        d_dense, total = sum_dense(grads.dense, loss, state.dense, mesh.shape)
        if copies > 1:  # dense parameters follow the bags of all groups
            d_dense, total = tree_map(lambda x: x / copies, (d_dense, total))
        new_dense, dense_opt = dense.update(d_dense, state.dense_opt, state.dense, state.step)
        aux = tree_map(
            lambda x: pmean(x, mesh.axis_names) if isinstance(x, Tensor) and x.is_floating_point() else x, aux
        )
        if merge is not None:
            new_dense = own_dense(merge(gather_dense(new_dense), aux if has_aux else None), new_dense)
        loss, step = total, state.step + 1
        if fits is not None:
            choose = lambda new, old: tree_map(lambda a, b: torch.where(fits, a, b), new, old)
            new_dense, dense_opt = choose(new_dense, state.dense), choose(dense_opt, state.dense_opt)
            loss, step = torch.where(fits, loss, torch.nan), torch.where(fits, step, state.step)
        metrics |= {"loss": loss, **({"aux": aux} if has_aux else {})}
        tables = replace(state.tables, banks=banks)
        return TrainState(step, tables, slots, new_dense, dense_opt, state.key), metrics

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        specs = state_specs(state)
        mapped = shard_map(one_rank, mesh=mesh, in_specs=(specs, P(batch_axes)), out_specs=(specs, P()))
        return mapped(state, batch)

    return update


def check_whole_rows(call: str, sparse: RowOptimizer, layout: Layout) -> None:
    """An optimizer with a norm over all rows sees none that is cut."""
    columns = column_banks(sparse, layout)
    if columns and sparse.is_joint:
        hint = "row_wise or table_wise for it, or an optimizer of single elements, such as adam"
        fail(
            call,
            "a norm of all gradients and rows cut by columns do not go together.",
            got=f"tables {list(columns)} by columns",
            need="whole rows",
            hint=hint,
        )


def overflow_metrics(grads: Mapping[str, RowGrads], axes: Sequence[str], like: Tensor) -> dict[str, Tensor]:
    """How many ids of all ranks found no place, and the capacity with which all would have one."""
    own = joined_overflow(list(grads.values()))
    counts = all_gather(torch.zeros(2, dtype=torch.int64, device=like.device) if own is None else own, tuple(axes))
    return {"overflow": counts[:, 0].sum(), "needed": counts[:, 1].amax()}


def state_specs(state: TrainState) -> TrainState:
    """A P for each part of a sharded state: banks, slots and cut parameters by their axes, the rest whole."""
    banks = state.tables.layout.specs()
    slots = {n: dict.fromkeys(own, banks[n]) for n, own in state.slots.items()}
    return TrainState(P(), state.tables.specs(), slots, dense_specs(state.dense), dense_specs(state.dense_opt), P())


def gather_as_one(tree: Any, axes: Sequence[str]) -> Any:
    """all_gather of every leaf, [n, ...]; all leaves of a dtype travel together."""
    leaves, structure = tree_flatten(tree)
    out = list(leaves)
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        at = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        whole = all_gather(torch.cat([leaves[i].flatten() for i in at]), tuple(axes))
        for i, x in zip(at, whole.split([leaves[i].numel() for i in at], 1), strict=True):
            out[i] = x.reshape(x.shape[0], *leaves[i].shape)
    return tree_unflatten(out, structure)


def column_banks(sparse: RowOptimizer, layout: Layout) -> dict[str, list[str]]:
    """{table: its banks} of the tables cut by columns whose rows the optimizer must see whole."""
    shapes = dict(layout.shapes)
    if sparse.is_elementwise and all(sparse.label(n) is None for n in shapes):
        return {}
    out: dict[str, list[str]] = {}
    for s in layout.shards:
        if s.last - s.first < shapes[s.table][1] and layout.banks[s.bank].name not in out.setdefault(s.table, []):
            out[s.table].append(layout.banks[s.bank].name)
    return out


def as_tables(banks: Mapping[str, Any], columns: Mapping[str, list[str]]) -> dict[str, Any]:
    """The banks as the optimizer names them: a table cut by columns under its own name, with the first of its banks."""
    apart = {b for own in columns.values() for b in own}
    return {n: x for n, x in banks.items() if n not in apart} | {
        t: banks[own[0]] for t, own in columns.items() if own[0] in banks
    }


def init_slots(sparse: RowOptimizer, tables: ShardedTables, columns: Mapping[str, list[str]]) -> dict:
    """{bank: slots}."""
    base = as_tables(tables.banks, columns)
    first = sparse.init(base)
    out = {n: first[n] for n in tables.banks if n in first}
    for table, own in columns.items():
        out |= {b: sparse.init({**base, table: tables.banks[b]})[table] for b in own}
    return {n: out[n] for n in tables.banks}


def update_banks(
    sparse: RowOptimizer, grads: Mapping[str, RowGrads], slots: Mapping, tables: ShardedTables, step: Tensor
):
    """(banks, slots): banks of whole rows at once; of tables cut by columns, touched rows are put together, updated whole, and cut again.

    Every owner of columns updates the whole row and keeps its part: what is one number per row among the slots is the same on all of them.
    """
    layout, columns = tables.layout, column_banks(sparse, tables.layout)
    apart = {b for own in columns.values() for b in own}
    whole = lambda x: {n: v for n, v in x.items() if n not in apart}
    met = rows_together(columns, grads, slots, tables.banks, layout)
    new_banks, new_slots = dict(tables.banks), dict(slots)
    for turn in range(max([1, *map(len, columns.values())])):
        now = {t: met[t][own[turn]] for t, own in columns.items() if turn < len(own) and own[turn] in met[t]}
        rest = {
            t: met[t][own[0]] for t, own in columns.items() if t not in now and own[0] in met[t]
        }  # named, not updated
        mini = {**rest, **now}
        given = ({} if turn else whole(grads)) | {t: r.grads for t, r in now.items()}
        own_slots = whole(slots) | {t: r.slots for t, r in mini.items()}
        moved, made = sparse.update(given, own_slots, whole(tables.banks) | {t: r.table for t, r in mini.items()}, step)
        if not turn:
            new_banks |= whole({n: moved[n] for n in moved if n in new_banks})
            new_slots |= whole({n: made[n] for n in made if n in new_slots})
        for t, r in now.items():
            b = columns[t][turn]
            new_banks[b] = r.put(tables.banks[b], moved[t])
            new_slots[b] = {k: r.put(s, made[t][k]) for k, s in slots[b].items()}
    return new_banks, new_slots


def rows_together(
    columns: Mapping[str, list[str]], grads: Mapping[str, RowGrads], slots: Mapping, banks: Mapping, layout: Layout
) -> "dict[str, dict[str, RowsTogether]]":
    """{table: {bank: its rows}} of the tables cut by columns: what all ranks know of their touched rows travels at once."""
    own = [b for b in layout.banks if b.name in {n for names in columns.values() for n in names} and b.name in grads]
    touched = {b.name: grads[b.name].coalesce() for b in own if grads[b.name].capacity > 0}
    taken = {n: _take(g, banks[n], slots[n]) for n, g in touched.items()}
    gathered: dict[str, dict[str, Tensor]] = {}
    for axes in dict.fromkeys(b.axes for b in own):
        gathered |= gather_as_one({b.name: taken[b.name] for b in own if b.axes == axes and b.name in taken}, axes)
    return {t: RowsTogether.of(t, touched, taken, gathered, layout) for t in columns}


class RowsTogether(NamedTuple):
    """The touched rows of one bank of a table cut by columns, with the columns of all its banks: grads, table and slots as of a
    table of M rows. bank_grads, which, shards: where they lie in the bank, and of which shard each is."""

    grads: RowGrads
    table: Tensor
    slots: dict[str, Tensor]
    bank_grads: RowGrads
    which: Tensor
    shards: tuple

    @staticmethod
    def of(
        table: str, touched: Mapping, taken: Mapping, gathered: Mapping, layout: Layout
    ) -> "dict[str, RowsTogether]":
        """{bank: its rows}, for the banks of the table that have a gradient."""
        shards = [layout.shards[k] for k in layout.shards_of(table)]
        own = [layout.banks[b] for b in dict.fromkeys(s.bank for s in shards)]
        out = {}
        for n, g in ((b.name, touched[b.name]) for b in own if b.name in touched):
            mine = tuple(s for s in shards if layout.banks[s.bank].name == n)
            which, rows = _table_rows(g, mine, axis_index(own[0].axes))
            parts = [_find(rows, s, gathered[layout.banks[s.bank].name]) for s in shards]
            joined = {k: torch.cat([x[k] for x in parts], 1) for k in parts[0] if taken[n][k].dim() > 1}
            kept = {k: joined.get(k, x) for k, x in taken[n].items()}
            row_slots = {k.removeprefix("slot "): x for k, x in kept.items() if k.startswith("slot ")}
            places = torch.where(rows >= 0, torch.arange(rows.shape[0], device=rows.device), -1)
            entries = RowGrads.from_entries(places, joined["grads"], num_embeddings=rows.shape[0], repeats=g.repeats)
            out[n] = RowsTogether(entries, joined["table"], row_slots, g, which, mine)
        return out

    def put(self, old: Tensor, new: Tensor) -> Tensor:
        """The bank, or a slot of it, with the rows' own columns of `new`, [M, D] or [M]."""
        flat = lambda x: x if x.dim() > 1 else x[:, None]
        own = flat(new)
        if new.dim() > 1:
            own = new[:, self.shards[0].first : self.shards[0].last]
            for k, s in enumerate(self.shards[1:], 1):
                own = torch.where((self.which == k)[:, None], new[:, s.first : s.last], own)
        rows, count = self.bank_grads.rows, self.bank_grads.count
        return ops.scatter_rows(flat(old), rows=rows, count=count, new=own).reshape(old.shape)


def _take(grads: RowGrads, bank: Tensor, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is known of the touched rows here: their numbers, gradients, values and slots."""
    rows = torch.where(grads.valid, grads.rows, -1)
    take = lambda x: ops.gather_rows(x if x.dim() > 1 else x[:, None], rows).reshape(-1, *x.shape[1:])
    return {"rows": rows, "grads": grads.grads, "table": take(bank).to(bank.dtype)} | {
        f"slot {k}": take(s) for k, s in slots.items()
    }


def _table_rows(grads: RowGrads, shards: Sequence, rank: Tensor) -> tuple[Tensor, Tensor]:
    """For each touched row of this rank's bank, which of the shards it is of, and its row in the table; -1 for none."""
    which = rows = torch.full_like(grads.rows, -1)
    for k, s in enumerate(shards):
        for i, (r, start) in enumerate(zip(s.ranks, s.starts, strict=True)):
            inside = grads.valid & (rank == r) & (grads.rows >= start) & (grads.rows < start + s.part)
            rows = torch.where(inside, grads.rows - start + i * s.part, rows)
            which = torch.where(inside, k, which)
    return which, rows


def _find(rows: Tensor, shard, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shard's columns of those rows of the table, from what all ranks know of theirs."""
    part = torch.div(rows.clamp(min=0), shard.part, rounding_mode="floor")
    owner = torch.tensor(shard.ranks, device=rows.device)[part]
    row = rows.clamp(min=0) - part * shard.part + torch.tensor(shard.starts, device=rows.device)[part]
    known = gathered["rows"]  # ascending on each rank, -1 behind
    known = torch.where(known < 0, torch.iinfo(known.dtype).max, known)
    most = known.shape[1]
    place = torch.searchsorted(known, row.expand(known.shape[0], -1).contiguous())  # [n, M]: on every rank
    place = place.gather(0, owner[None])[0].clamp(max=most - 1)
    return {k: x[owner, place] for k, x in gathered.items()}

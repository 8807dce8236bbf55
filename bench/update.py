"""Measures a lookup, its transpose and a fused update of T tables in one call: the work of a training step on tables.

The contenders are funcrec under jit with donation, FBGEMM's TBE forward and backward, and F.embedding_bag with sparse
gradients and torch.optim.
"""

import itertools

import cases
import roofline
import torch
from cases import TableCase
from contest import OURS, Closeness, Contender, Setting, Traffic, compete
from peers import (
    FBGEMM_DTYPES,
    FBGEMM_RULES,
    fbgemm_optimizer,
    fbgemm_tables,
    installed,
    sparse_optimizer,
    torch_bags,
    torch_ids,
    torch_optimizer,
)
from torch import Tensor

import funcrec as fr


def funcrec_update(case: TableCase, tables: dict, batches: list, d: Tensor, reference: bool = False) -> Contender:
    """Return funcrec's update. reference: whether it runs in plain torch, not compiled."""
    features, sparse = case.features(), sparse_optimizer(case.rule)
    more = {"implementation": "reference"} if reference else {}
    dims = (case.dim,) * case.num_tables

    def update(state, ids, d, step):
        tables, slots = state
        acts = fr.lookup(tables, ids, features, **more)
        grads = fr.lookup_transpose(fr.KeyedTensor(d, tuple(case.names), dims), ids, features, tables)
        return sparse.update(grads, slots, tables, step, **more), acts.values

    call = update if reference else fr.jit(update, donate=("state",))
    held = {"state": (tables, sparse.init(tables)), "step": torch.zeros((), dtype=torch.int64, device=d.device)}
    turn = itertools.cycle(batches[1:] + batches[:1])

    def step(ids):
        held["state"], out = call(held["state"], ids, d, held["step"])
        return out

    def first():
        out = step(batches[0])
        tables, slots = held["state"]
        return {"output": out, **tables, **{f"{n}.{k}": s.flatten() for n in slots for k, s in slots[n].items()}}

    return Contender(first, lambda: step(next(turn)))


def fbgemm_update(case: TableCase, tables: dict, batches: list, d: Tensor) -> Contender:
    tbe = fbgemm_tables(case, tables, str(d.device), fbgemm_optimizer(case.rule, str(d.device)))
    turn = itertools.cycle(batches[1:] + batches[:1])

    def step(ids):
        out = tbe(ids.values, ids.offsets, ids.weights)
        out.backward(d)
        return out

    def first():
        out = step(batches[0])
        tables = dict(zip(case.names, tbe.split_embedding_weights(), strict=True))
        return {"output": out, **tables, **fbgemm_slots(case.names, tbe)}

    return Contender(first, lambda: step(next(turn)))


def fbgemm_slots(names: list[str], tbe) -> dict[str, Tensor]:
    """Return {"t0.sum": f[R] or f[R · D]} of FBGEMM's Adagrads; {} for rules with state of another form."""
    found = {}
    for name, state in zip(names, tbe.split_optimizer_states(), strict=False):
        state = state.get("sum") if isinstance(state, dict) else state[0] if len(state) == 1 else None
        if state is not None:
            found[f"{name}.sum"] = state.flatten()
    return found


def torch_update(case: TableCase, tables: dict, batches: list, d: Tensor) -> Contender:
    if case.dtype != "float32":
        raise NotImplementedError("torch.optim keeps its sparse state in the table's dtype")
    own = {n: t.clone().requires_grad_() for n, t in tables.items()}
    optimizer = torch_optimizer(case.rule, list(own.values()))
    parts = [torch_ids(case, ids) for ids in batches]
    turn = itertools.cycle(parts[1:] + parts[:1])

    def step(ids):
        out = torch_bags(case, own, ids, sparse=True)
        optimizer.zero_grad(set_to_none=True)
        out.backward(d)
        optimizer.step()
        return out

    def first():
        out = step(parts[0])
        slots = {n: optimizer.state[own[n]].get("sum") for n in case.names}
        return {"output": out, **own, **{f"{n}.sum": s.flatten() for n, s in slots.items() if s is not None}}

    return Contender(first, lambda: step(next(turn)))


def closeness(case: TableCase) -> Closeness:
    if case.dtype == "float32":
        return Closeness(1e-4, 1e-5)
    eps = torch.finfo(case.table_dtype).eps
    return Closeness(2 * eps, eps * 0.05 * case.ids_per_bag)


def run(case: TableCase, setting: Setting) -> dict:
    case = cases.tiny(case) if setting.tiny else case
    tables, batches = cases.make_tables(case, setting.device), cases.table_batches(case, setting.device)
    draw = torch.Generator(setting.device).manual_seed(2)
    d = torch.randn(case.batch, case.num_tables * case.dim, generator=draw, device=setting.device)
    by_fbgemm = installed("fbgemm_gpu") and case.rule in FBGEMM_RULES["cpu"] and case.dtype in FBGEMM_DTYPES["cpu"]
    by_torch = case.rule in ("sgd", "adagrad", "adam") and case.dtype == "float32"
    builders = {
        "fbgemm": lambda: fbgemm_update(case, tables, batches, d),
        "torch.optim": lambda: torch_update(case, tables, batches, d),
    }
    if not (by_fbgemm or by_torch):  # the reference judges the law if no peer can
        builders["reference"] = lambda: funcrec_update(case, tables, batches, d, reference=True)
    builders[OURS] = lambda: funcrec_update(case, tables, batches, d)  # last: it uses up the tables
    slots = sparse_optimizer(case.rule).init({case.names[0]: tables[case.names[0]][:1]})
    traffic = Traffic(cases.update_bytes(case, batches[0], slots), case.dim, case.table_dtype)
    found = compete(builders, setting, closeness(case), traffic)
    work = roofline.update_work(case, batches, dict.fromkeys(case.names, slots[case.names[0]]))
    return {"shape": case._asdict(), **roofline.added(found, work, setting, case.dim, case.table_dtype)}


CASES, QUICK = cases.UPDATES, cases.QUICK_UPDATES

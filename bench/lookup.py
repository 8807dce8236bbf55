"""Measures a pooled lookup of T tables in one call: funcrec under jit, FBGEMM's TBE, F.embedding_bag."""

import itertools

import cases
import roofline
import torch
from cases import TableCase
from contest import OURS, Closeness, Contender, Setting, Traffic, compete
from peers import fbgemm_tables, torch_bags, torch_ids

import funcrec as fr


def funcrec_lookup(case: TableCase, tables: dict, batches: list, implementation: str | None = None) -> Contender:
    features = case.features()
    more = {} if implementation is None else {"implementation": implementation}
    call = lambda tables, ids: fr.lookup(tables, ids, features, **more).values
    call = fr.jit(call) if implementation is None else call
    turn = itertools.cycle(batches)
    return Contender(lambda: {"output": call(tables, batches[0])}, lambda: call(tables, next(turn)))


def fbgemm_lookup(case: TableCase, tables: dict, batches: list, device: str) -> Contender:
    tbe = fbgemm_tables(case, tables, device)
    turn = itertools.cycle(batches)

    @torch.no_grad()
    def call(ids):
        return tbe(ids.values, ids.offsets, ids.weights)

    return Contender(lambda: {"output": call(batches[0])}, lambda: call(next(turn)))


def torch_lookup(case: TableCase, tables: dict, batches: list) -> Contender:
    parts = [torch_ids(case, ids) for ids in batches]
    turn = itertools.cycle(parts)
    own = {n: t.clone() for n, t in tables.items()}
    call = torch.no_grad()(lambda ids: torch_bags(case, own, ids))
    return Contender(lambda: {"output": call(parts[0])}, lambda: call(next(turn)))


def closeness(case: TableCase) -> Closeness:
    """Return the tolerances of a case.

    f32 sums differ in roundings, and a peer that pools in 16 bits rounds every term.
    """
    if case.dtype == "float32":
        return Closeness(1e-4, 1e-6 * case.ids_per_bag)
    eps = torch.finfo(case.table_dtype).eps
    return Closeness(eps, eps * 0.05 * case.ids_per_bag)


def run(case: TableCase, setting: Setting) -> dict:
    case = cases.tiny(case) if setting.tiny else case
    tables, batches = cases.make_tables(case, setting.device), cases.table_batches(case, setting.device)
    builders = {
        OURS: lambda: funcrec_lookup(case, tables, batches),
        "reference": lambda: funcrec_lookup(case, tables, batches, "reference"),
        "fbgemm": lambda: fbgemm_lookup(case, tables, batches, setting.device),
        "embedding_bag": lambda: torch_lookup(case, tables, batches),
    }
    traffic = Traffic(cases.lookup_bytes(case), case.dim, case.table_dtype)
    found = compete(builders, setting, closeness(case), traffic)
    work = roofline.lookup_work(case, batches)
    return {"shape": case._asdict(), **roofline.added(found, work, setting, case.dim, case.table_dtype)}


CASES, QUICK = cases.LOOKUPS, cases.QUICK_LOOKUPS

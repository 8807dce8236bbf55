"""Measures a DLRM's step on two processes that share one GPU and exchange by gloo, beside the step of one process.

NCCL takes no two ranks on one GPU. gloo takes tensors of a GPU: it copies them to the host, sends them, and copies
them back. The law: losses, and tables after two steps, are those of one process. On a CPU all tensors are there.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import cases
import steps
import torch
import torch.distributed as dist
from contest import MIN_ROUNDS, OURS, Closeness, Setting, differences
from measure import interleave, ratios, spread, wait_for
from peers import LR
from torch import Tensor

import funcrec as fr
from funcrec.testing import RankPool

WORLD, LAW_STEPS = 2, 2
LIMIT_S = 60.0
CLOSE = Closeness(1e-4, 1e-6)
ALONE = "one process"


class Shared(NamedTuple):
    """A step with all tables under one placement. compiled: whether `fr.jit` runs it, with a donated state."""

    placement: str
    compiled: bool
    num_rows: int = 100_000
    dim: int = 64
    batch: int = 2048
    ids_per_bag: int = 5


class Runner(NamedTuple):
    """call: () -> the loss of one step. tables: () -> whole tables {name: f[R, D]}."""

    call: Callable[[], Tensor]
    tables: Callable[[], dict[str, Tensor]]


def run(case: Shared, setting: Setting) -> dict:
    case = case._replace(num_rows=500, dim=16, batch=16) if setting.tiny else case
    with RankPool(WORLD, timeout_s=LIMIT_S / 2) as pool:
        ranks = pool.run(one_rank, case, setting, deadline_s=LIMIT_S)
    red = [line for r in ranks for line in r["red"]]
    figures = {"shape": case._asdict(), "law": "red" if red else "green", "absent": {}, "judged_by": [ALONE]}
    if red:
        return {**figures, "red": red[:8]}
    times = {name: list(map(max, *(r["times"][name] for r in ranks))) for name in ranks[0]["times"]}
    figures |= {"rounds": len(times[OURS]), "ms": {n: spread(t, 1e3) for n, t in times.items()}}
    figures |= {"ratio": {ALONE: spread(ratios(times[ALONE], times[OURS]))}, "call_peak_mb": {OURS: None}}
    return {**figures, "samples_per_s": {n: round(case.batch / t["median"] * 1e3) for n, t in figures["ms"].items()}}


def one_rank(case: Shared, setting: Setting) -> dict:
    """Return the red lines of the law on this rank, and the seconds of each round: those of one process on rank 0."""
    kind = torch.device(setting.device).type
    shape = cases.StepCase("dlrm", case.num_rows, case.dim, case.batch, case.ids_per_bag)
    model = steps.make_model(shape, tiny=True)  # three tables: exchanges are what the case is about
    params = steps.move(model.init(fr.key(0)), lambda x: x.to(kind))
    batches = steps.make_batches(shape, model, kind)
    mesh = fr.Mesh.distributed(device=kind, timeout_s=LIMIT_S / 2, x=WORLD)
    built = {OURS: runner(case, model, params, [own_part(b) for b in batches], mesh)}
    built[ALONE] = runner(case, model, params, batches, None)
    firsts = {name: first_steps(each) for name, each in built.items()}
    red = differences(firsts[OURS], firsts[ALONE], ALONE, CLOSE)
    num_red = torch.tensor(len(red))
    dist.all_reduce(num_red)  # all ranks go on, or no rank does
    return {"red": red} if int(num_red) else {"red": red, "times": timed(built, setting)}


def own_part(batch: fr.Batch) -> fr.Batch:
    """Return this rank's examples, in buffers of their own."""
    per = batch.label.shape[0] // WORLD
    own = slice(dist.get_rank() * per, (dist.get_rank() + 1) * per)
    return fr.Batch(batch.ids[own].unpad(), batch.label[own].clone(), batch.dense[own].clone())


def runner(case: Shared, model: fr.models.Model, params: fr.Params, batches: list, mesh: fr.Mesh | None) -> Runner:
    loss = fr.models.loss(model)
    where = {} if mesh is None else {"mesh": mesh, "plan": fr.Plan.uniform(case.placement, params.tables, mesh)}
    step = fr.train_step(
        lambda params, batch, *, key: loss(params, batch, key=key)[0], sparse=fr.optim.sgd(lr=LR),
        dense=fr.optim.dense(torch.optim.SGD, lr=steps.DENSE_LR), **where,
    )  # fmt: skip
    fast = fr.jit(step, donate=("state",)) if case.compiled else step
    held, turn = {"state": step.init(fr.copy(params))}, itertools.cycle(batches)

    def call() -> Tensor:
        held["state"], metrics = fast(held["state"], next(turn))
        return metrics["loss"]

    def tables() -> dict[str, Tensor]:
        own = held["state"].tables
        return fr.copy(dict(own) if mesh is None else fr.gather_tables(own, mesh))

    return Runner(call, tables)


def first_steps(own: Runner) -> dict[str, Tensor]:
    losses = {f"loss of step {i}": own.call().clone() for i in range(LAW_STEPS)}
    return losses | {f"table {n}": t for n, t in own.tables().items()}


def timed(built: dict[str, Runner], setting: Setting) -> dict[str, list[float]]:
    """Return {name: seconds of each round}. One process works alone: the other one waits at a barrier."""
    wait = wait_for(setting.device)
    is_first = dist.get_rank() == 0

    def ranks() -> None:
        dist.barrier()
        built[OURS].call()

    def alone() -> None:
        dist.barrier()
        if is_first:
            built[ALONE].call()
            wait()
        dist.barrier()

    rounds = max(MIN_ROUNDS, min(setting.rounds, 8))  # the same on all ranks
    return interleave({OURS: ranks, ALONE: alone}, rounds=rounds, wait=wait)

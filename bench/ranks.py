"""Measures whole training steps of a DLRM on two ranks of this machine (gloo): funcrec's sharded step and TorchRec's
DistributedModelParallel.

Tables, placements, batches and dense weights are the same. The law: on every rank the losses of the first steps
agree, each after the updates of the steps before, and so do the tables after the first two steps. Later tables may
differ: a hidden unit that is zero within rounding may be on for one side and off for the other, and then the rows of
that sample differ. Each round is timed from one barrier until the slower rank is done. Bytes are counted in the graph
of the step.
"""

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from cases import StepCase
from contest import MIN_ROUNDS, OURS, Closeness, Setting, differences
from funcrec.kernels.owners import NOWHERE
from measure import digits, ratios, spread
from peers import EPS, LR
from peers_ranks import torchrec_step
from steps import DENSE_LR, NUM_DENSE, make_batches, make_model

import funcrec as fr
from funcrec.core._tree import tree_map
from funcrec.jagged._jagged import bag_ids
from funcrec.sharding._lanes import lane_bags, owned_rows, routes_of
from funcrec.testing import RankPool

WORLD = 2
LAW_STEPS, TABLE_STEPS = 4, 2
LIMIT_S = 1500.0
CLOSE = Closeness(0.0, 1e-6)
CODED_CLOSE = Closeness(0.0, 2.0**-7)  # for losses, because bfloat16 rounds by 2^-8
RULES = {"rowwise_adagrad": lambda: fr.optim.rowwise_adagrad(lr=LR, eps=EPS), "sgd": lambda: fr.optim.sgd(lr=LR)}


class RankCase(NamedTuple):
    """A case with all tables under one placement.

    With a codec, vectors and cotangents travel coded, and the peer is funcrec without a codec.
    """

    placement: str
    ids_per_bag: int
    rule: str = "rowwise_adagrad"
    num_tables: int = 26
    num_rows: int = 100_000
    dim: int = 64
    batch: int = 2048
    sizes: tuple[int, ...] | None = None  # the sizes of the dense part; None for DLRM's sizes
    codec: str | None = None

    @property
    def is_same_optimizer(self) -> bool:
        """Return whether funcrec and TorchRec use the same optimizer.

        For a row that is cut by columns TorchRec keeps a second moment for each part, and funcrec keeps one. Then only
        the first losses agree.
        """
        return self.rule == "sgd" or self.placement != "column_wise"


class Runner(NamedTuple):
    """A library on this rank. call: runs one step, and returns the loss of all ranks or of this rank.

    tables: returns the whole tables {name: f[R, D]}. about: figures of the compiled step.
    """

    call: Callable[[], torch.Tensor]
    tables: Callable[[], dict[str, torch.Tensor]]
    is_own_loss: bool
    about: dict


def mesh_axes(placement: str) -> dict[str, int]:
    return {"node": 1, "local": WORLD} if placement in ("table_row_wise", "table_column_wise", "grid") else {"x": WORLD}


def run(case: RankCase, setting: Setting) -> dict:
    if setting.tiny:
        case = case._replace(num_rows=500, dim=16, batch=16)
    with RankPool(WORLD, timeout_s=600) as pool:
        ranks = pool.run(one_rank, case, setting, deadline_s=LIMIT_S)
    first = ranks[0]
    red = [line for r in ranks for line in r["red"]]
    figures = {
        "shape": case._asdict(),
        "law": "red" if red else "green",
        **{k: first[k] for k in ("absent", "judged_by")},
    }
    if red or "times" not in first:
        return {**figures, "law": "red", "red": red[:8] or ["nothing to compare with"]}
    slowest = lambda name, i: [max(r["times"][name][k][i] for r in ranks) for k in range(len(first["times"][name]))]
    wall, cpu = ({n: slowest(n, i) for n in first["times"]} for i in (0, 1))
    over = lambda t: {n: spread(ratios(x, t[OURS])) for n, x in t.items() if n != OURS}
    figures |= {
        "rounds": len(wall[OURS]),
        "ms": {n: spread(t, 1e3) for n, t in wall.items()},
        "ratio": over(wall),
        "cpu_ms": {n: spread(t, 1e3) for n, t in cpu.items()},
        "cpu_ratio": over(cpu),
        "call_peak_mb": {OURS: None},
    }
    figures["samples_per_s"] = {n: round(case.batch / t["median"] * 1e3) for n, t in figures["ms"].items()}
    return {**figures, **first["about"]}


def one_rank(case: RankCase, setting: Setting) -> dict:
    """Return this rank's results: the red lines of the law, and the seconds and CPU seconds of each round."""
    dims = StepCase("dlrm", case.num_rows, case.dim, case.batch, case.ids_per_bag)
    model = make_model(dims, setting.tiny)
    if case.sizes is not None:
        n = len(model.tables) if setting.tiny else case.num_tables
        model = fr.models.dlrm(
            model.tables[:n],
            model.features[:n],
            num_dense=NUM_DENSE,
            bottom=(case.dim,),
            sizes=case.sizes,
            keep="dense",
        )
    params = model.init(fr.key(0))
    batches = [own_part(b) for b in make_batches(dims, model, "cpu")]
    builders = {
        "torchrec": lambda: torchrec_runner(case, model, params, batches, compiled=False),
        "torchrec, dense compiled": lambda: torchrec_runner(case, model, params, batches, compiled=True),
        OURS: lambda: funcrec_runner(case, model, params, batches),
    }
    if case.codec is not None:
        whole, own = case._replace(codec=None), tree_map(torch.clone, params)  # each runner has its own tensors
        builders = {"every bit": lambda: funcrec_runner(whole, model, own, batches), OURS: builders[OURS]}
    built, absent, firsts = {}, {}, {}
    for name, build in builders.items():
        try:
            built[name] = build()
        except (ImportError, NotImplementedError) as error:
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        firsts[name] = first_steps(built[name], case)
    close = CLOSE if case.codec is None else CODED_CLOSE
    red = [line for n in firsts if n != OURS for line in differences(firsts[OURS], firsts[n], n, close)]
    firsts.clear()
    num_red = torch.tensor(len(red))
    dist.all_reduce(num_red)  # all ranks go on, or no rank does
    out = {"red": red, "absent": absent, "judged_by": sorted(set(built) - {OURS}), "about": built[OURS].about}
    return out if int(num_red) or len(built) == 1 else {**out, "times": timed(built, setting)}


def own_part(batch: fr.Batch) -> fr.Batch:
    """Return this rank's bags, in buffers of their own."""
    per, rank = batch.label.shape[0] // WORLD, dist.get_rank()
    own = slice(rank * per, (rank + 1) * per)
    return fr.Batch(batch.ids[own].unpad(), batch.label[own].clone(), batch.dense[own].clone())


def first_steps(runner: Runner, case: RankCase) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of the global losses and then of the tables, as far as the law compares them."""
    losses, tables = [], {}
    for i in range(LAW_STEPS):
        losses.append(runner.call())
        if i + 1 == TABLE_STEPS:
            tables = {f"table {n}": t.clone() for n, t in runner.tables().items()}
    for x in losses if runner.is_own_loss else ():
        dist.all_reduce(x)
        x /= WORLD
    if not case.is_same_optimizer:
        return {"loss of step 0": losses[0]}
    if case.codec is not None:  # Adagrad moves rows equally far for nearly cancelled gradients
        return {f"loss of step {i}": x for i, x in enumerate(losses)}
    return {**{f"loss of step {i}": x for i, x in enumerate(losses)}, **tables}


def timed(built: dict[str, Runner], setting: Setting) -> dict[str, list[tuple[float, float]]]:
    """Return {name: (seconds, CPU seconds) of each round}.

    All ranks run the same rounds, and the first runner alternates.
    """
    names = [OURS, *(n for n in built if n != OURS)]
    one_round = sum(min(timed_call(built[n])[0] for _ in range(2)) for n in names)
    wanted = torch.tensor(max(MIN_ROUNDS, min(setting.rounds, int(setting.seconds / one_round))))
    dist.broadcast(wanted, 0)
    times: dict[str, list] = {n: [] for n in names}
    for r in range(int(wanted)):
        first = r % len(names)
        for n in names[first:] + names[:first]:
            times[n].append(timed_call(built[n]))
    return times


def timed_call(runner: Runner) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    runner.call()
    return time.perf_counter() - wall, time.process_time() - cpu


def torchrec_runner(case: RankCase, model, params: fr.Params, batches: list, *, compiled: bool) -> Runner:
    call, tables = torchrec_step(case, model, params, batches, compiled=compiled)
    return Runner(call, tables, True, {})


def funcrec_runner(case: RankCase, model, params: fr.Params, batches: list) -> Runner:
    mesh = fr.Mesh.distributed(device="cpu", timeout_s=600, **mesh_axes(case.placement))
    loss = fr.models.loss(model)
    step = fr.train_step(
        lambda params, batch, *, key: loss(params, batch, key=key)[0], sparse=RULES[case.rule](),
        dense=fr.optim.dense(torch.optim.SGD, lr=DENSE_LR), mesh=mesh,
        plan=fr.Plan.uniform(case.placement, params.tables, mesh),
        codec=fr.Codec(case.codec, case.codec),
    )  # fmt: skip
    state, turn = step.init(params), itertools.cycle(batches)
    held, fast = {"state": state}, fr.jit(step, donate=("state",))
    lowered = fast.lower(state, batches[0])
    about = {"least_mb": least_mb(batches[0].ids, state, model, 4 if case.codec is None else 2)}
    about |= {"num_collectives": len(lowered.exchanges), "sent_mb": digits(lowered.sent_bytes / 1e6)}

    def call():
        held["state"], metrics = fast(held["state"], next(turn))
        return metrics["loss"]

    return Runner(call, lambda: fr.gather_tables(held["state"].tables, mesh), False, about)


def least_mb(ids: fr.KeyedJaggedTensor, state, model, element_bytes: int) -> float:
    """Return the MB that must leave a rank, as the mean over ranks.

    They are the row numbers (4 bytes) of ids that another rank holds, a vector for each bag on that rank, a vector for
    the bag's gradient, and twice the dense gradients, without the part that a rank keeps.
    """
    layout, features, rank = state.tables.layout, tuple(model.features), dist.get_rank()
    total = 2 * 4 * fr.models.num_parameters(fr.Params({}, state.dense)) * (WORLD - 1) / WORLD
    for routes in routes_of(layout, features):
        used = [x.feature for x in routes.lanes]
        bags = lane_bags(ids, used)
        per_lane = bags.num_bags // len(used)
        bag = bag_ids(bags.offsets, bags.capacity)
        owner = owned_rows(bags, routes.lanes) // NOWHERE
        dims = torch.tensor([x.bank.dim for x in routes.lanes])
        if not routes.axes:  # copies: every rank needs the ids and gradients of all other ranks
            total += (WORLD - 1) * 4 * (len(bag) + per_lane * int(dims.sum()))
            continue
        away = (owner >= 0) & (owner != rank)
        pairs = (bag[away] * WORLD + owner[away]).unique()
        total += 4 * int(away.sum()) + 2 * element_bytes * int(dims[pairs // WORLD // per_lane].sum())
    mean = torch.tensor(total / WORLD)
    dist.all_reduce(mean)
    return digits(float(mean) / 1e6)


PLACEMENTS = ("table_wise", "row_wise", "column_wise", "replicated", "table_row_wise", "table_column_wise", "grid")
RULE_OF = {  # TorchRec's only rule for the placement, or, where it cuts rows, a rule that does not depend on the cut
    "replicated": "sgd",
    "table_column_wise": "sgd",
    "grid": "sgd",
}
CASES = {
    **{f"{p}-l{n}": RankCase(p, n, RULE_OF.get(p, "rowwise_adagrad")) for p in PLACEMENTS for n in (1, 5)},
    **{f"{p}-l20": RankCase(p, 20) for p in ("table_wise", "row_wise")},
    **{f"{p}-small": RankCase(p, 5, num_rows=1000, dim=16, batch=128) for p in ("table_wise", "row_wise")},
    **{
        f"{p}-light-l{n}": RankCase(p, n, RULE_OF.get(p, "rowwise_adagrad"), sizes=(16,))
        for p in PLACEMENTS
        for n in (5, 20)
    },
    **{  # three tables and four bags on a rank show the cost of a step with hardly any work
        f"{p}-least": RankCase(p, 2, RULE_OF.get(p, "rowwise_adagrad"), 3, 20, 8, 8, (16,)) for p in PLACEMENTS
    },
    **{f"column_wise-sgd-l{n}": RankCase("column_wise", n, "sgd") for n in (1, 5)},
    "column_wise-sgd-light-l5": RankCase("column_wise", 5, "sgd", sizes=(16,)),
    "column_wise-sgd-least": RankCase("column_wise", 2, "sgd", 3, 20, 8, 8, (16,)),
    **{f"{p}-bf16-l5": RankCase(p, 5, codec="bfloat16") for p in ("table_wise", "row_wise")},
}
QUICK = ("table_wise-l5", "row_wise-l5", "table_wise-light-l5", "row_wise-light-l5")

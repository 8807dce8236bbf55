"""Measures vocabularies: ids found and admitted a second, beside TorchRec's and FBGEMM's managed collision.

    .venv/bin/python bench/vocabulary.py           # 1 M rows; --large: also 16 M; --maps: only hash maps as peers
    .venv/bin/python bench/vocabulary.py --step    # a training step whose 26 tables follow a vocabulary each
    .venv/bin/python bench/vocabulary.py --dlrm 2048    # a DLRM's step
    .venv/bin/python bench/vocabulary.py --memory       # bytes for each id that has a row
    .venv/bin/python bench/vocabulary.py --ranks 4 --bags 2048    # a step on gloo ranks: vocabularies whole, or cut

find: rows of ids, without a change. admit: a step of training, with stamps, counts and new ids. Times are CPU times of
one thread, from interleaved calls; a call has 262,144 ids, drawn uniformly from those that have a row (80 % of all
rows), except a share that is new. searchsorted is torch's binary search among the same ids. TorchRec's MCH module
makes room once in EVERY steps, FBGEMM's operator only reads on a CPU. The hash maps of Boost and Abseil
(`flat_map.py`) grow and never remove an id; they count, but keep no stamps.
"""

import argparse
import itertools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import ZIPF
from flat_map import FlatMap, flat_maps
from measure import digits, interleave, ratios, record, spread

import funcrec as fr
from funcrec.data.datasets._random_rows import zipf_ranks
from funcrec.testing import RankPool

NUM_IDS, LOAD, EVERY, WARMUP, TRAIN_WARMUP = 2**18, 0.8, 8, 2, 10
LAST = 2**62


def drawn(num_rows: int, new: float, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the ids that have a row, and `count` batches of ids, of which a share was never seen."""
    generator = torch.Generator().manual_seed(num_rows)
    held = torch.randint(0, LAST, (int(LOAD * num_rows),), generator=generator).unique()

    def batch() -> torch.Tensor:
        ids = held[torch.randint(0, held.shape[0], (NUM_IDS,), generator=generator)]
        fresh = torch.randint(0, LAST, (NUM_IDS,), generator=generator)
        return torch.where(torch.rand(NUM_IDS, generator=generator) < new, fresh, ids)

    return held, [batch() for _ in range(count)]


# -- contenders --------------------------------------------------------------------------------------------------


def searchsorted(held: torch.Tensor):
    rows = torch.randperm(held.shape[0])

    def find(ids):
        at = torch.searchsorted(held, ids).clamp(max=held.shape[0] - 1)
        return torch.where(held[at] == ids, rows[at], -1)

    return find


def zero_collision_hash(held: torch.Tensor, num_rows: int):
    """Return FBGEMM's reading of a table of identities, which ids fill here by the probe that its operator makes."""
    import fbgemm_gpu.sparse_ops  # noqa: F401 (registers the operators)

    identities, _ = torch.ops.fbgemm.create_zch_buffer(num_rows, long_type=True)
    read = lambda ids, most: torch.ops.fbgemm.zero_collision_hash(
        ids, identities, most, circular_probe=True, readonly=True
    )[0]
    table = [-1] * num_rows
    for i, place in zip(held.tolist(), read(held, 1).tolist(), strict=True):
        while table[place] >= 0:
            place = (place + 1) % num_rows
        table[place] = i
    identities.copy_(torch.tensor(table)[:, None])
    return lambda ids: read(ids, 128)


def mch_module(held: torch.Tensor, num_rows: int):
    """Return TorchRec's module, in which the ids have a row."""
    from torchrec import JaggedTensor
    from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule

    policy = LRU_EvictionPolicy(decay_exponent=1.0)
    module = MCHManagedCollisionModule(num_rows, torch.device("cpu"), policy, eviction_interval=EVERY)
    lengths = torch.ones(1, dtype=torch.int64)
    run = lambda ids: module({"f": JaggedTensor(ids, lengths=lengths * ids.shape[0])})["f"].values()
    for part in held.split(NUM_IDS):
        for _ in range(EVERY):  # the first batch's size times EVERY is all that its history holds
            run(part)
    return module, run


def funcrec_state(held: torch.Tensor, num_rows: int) -> fr.Vocabulary:
    return fr.admit(fr.vocabulary(num_rows), held)[0]


# -- cases -------------------------------------------------------------------------------------------------------


def find(num_rows: int, new: float, rounds: int, only_maps: bool) -> None:
    """Record the speed of readings of known ids, and of ids of which a share is unknown."""
    held, batches = drawn(num_rows, new, rounds + WARMUP)
    it = funcrec_state(held, num_rows)
    calls = {"funcrec": lambda ids: fr.find(it, ids)}
    if not only_maps:
        module, mch = mch_module(held, num_rows)
        module.eval()
        calls |= {"searchsorted": searchsorted(held), "TorchRec MCH": mch}
        calls["FBGEMM zero_collision_hash"] = zero_collision_hash(held, num_rows)
    calls |= {name: FlatMap(name, held).find for name in flat_maps()}
    refused = int((fr.find(it, held) < 0).sum())
    kept = held[fr.find(it, held) >= 0]
    told = {name: call(kept).unique().numel() / kept.shape[0] for name, call in calls.items()}  # 1: no collision
    write("find", num_rows, new, calls, batches, rounds, {"refused": refused, "distinct_rows": told})


def admit(num_rows: int, new: float, rounds: int, only_maps: bool) -> None:
    """Record the speed of steps, EVERY of them in a call."""
    held, batches = drawn(num_rows, new, EVERY * (rounds + WARMUP))
    step, state = fr.jit(fr.admit, donate=("vocabulary",)), [funcrec_state(held, num_rows)]

    def ours(ids):
        state[0], rows, _ = step(state[0], ids)
        return rows

    calls = {"funcrec": ours} if only_maps else {"funcrec": ours, "TorchRec MCH": mch_module(held, num_rows)[1]}
    calls |= {name: FlatMap(name, held).admit for name in flat_maps()}
    write("admit", num_rows, new, calls, batches, rounds, {}, EVERY)


class Job(NamedTuple):
    """A step to measure: its tables and features, its loss, and its dense parameters.

    bags: the bags of a batch, of one id each. ids: how many ids each table has rows for, of which `draw` draws.
    """

    name: str
    bags: int
    ids: int
    configs: list[fr.TableConfig]
    features: list[fr.FeatureConfig]
    loss: Callable | fr.models.Model
    dense: Any
    draw: Callable[[torch.Generator, int], torch.Tensor]
    num_dense: int = 0
    optimizer: Any = None


def tables_of(count: int, rows: int, dim: int) -> tuple[list[fr.TableConfig], list[fr.FeatureConfig]]:
    names = [f"t{i}" for i in range(count)]
    configs = [fr.TableConfig(n, rows, dim) for n in names]
    return configs, [fr.FeatureConfig(n, table=n, max_length=1) for n in names]


def small() -> Job:
    """Return a small step: two layers on rows of 16, 512 bags, ids of a power law."""
    configs, features = tables_of(26, 2**16, 16)
    generator = torch.Generator().manual_seed(0)
    weights = [0.02 * torch.randn(*shape, generator=generator) for shape in ((26 * 16, 256), (256, 1))]
    head = lambda x, dense: ((x @ dense[0]).relu() @ dense[1])[:, 0]
    loss = lambda p, b: fr.losses.bce(head(fr.lookup(p.tables, b.ids, features).values, p.dense), b.label)
    draw = lambda generator, count: (torch.rand(count, generator=generator) ** 4 * 50_000).long()
    return Job("train_step", 512, 50_000, configs, features, loss, weights, draw)


def dlrm(bags: int, dim: int = 64) -> Job:
    """Return the DLRM of `steps.py`, with 100,000 ids for each table in 131,072 rows, drawn as Zipf numbers."""
    configs, features = tables_of(26, 2**17, dim)
    model = fr.models.dlrm(configs, features, num_dense=13, bottom=(512, 256, dim), sizes=(512, 256), keep="dense")
    params, spread_out = model.init(fr.key(0)), torch.randperm(100_000, generator=torch.Generator().manual_seed(1))
    draw = lambda generator, count: spread_out[
        zipf_ranks(torch.rand(count, generator=generator).double(), 100_000, ZIPF)
    ]
    sgd = fr.optim.dense(torch.optim.SGD, lr=0.01)
    return Job(f"dlrm-d{dim}", bags, 100_000, configs, features, model, params.dense, draw, 13, sgd)


def train(job: Job, held: int, new: float, rounds: int) -> None:
    """Record the CPU time of a compiled, donated step of plain tables, and of tables that follow vocabularies, with the
    admission in the step and apart. The latter have a row for ids i · 10¹⁰ with i < `held`. Of their ids, such numbers,
    a share `new` was never seen."""
    names, generator = [c.name for c in job.configs], torch.Generator().manual_seed(0)
    count = len(names) * job.bags

    def batches(apart: int):
        for _ in range(rounds + TRAIN_WARMUP):
            ids = job.draw(generator, count) * apart
            if apart > 1:
                fresh = torch.randint(0, LAST, ids.shape, generator=generator)
                ids = torch.where(torch.rand(ids.shape, generator=generator) < new, fresh, ids)
            keyed = fr.KeyedJaggedTensor.from_lengths(names, ids, torch.ones_like(ids))
            label = torch.randint(0, 2, (job.bags,), generator=generator).float()
            yield fr.Batch(keyed, label, torch.rand(job.bags, job.num_dense, generator=generator))

    def trained(is_dynamic: bool, is_apart: bool):
        first = fr.admit(fr.vocabulary(job.configs[0].num_embeddings), torch.arange(held) * 10**10)[0]
        each = zip(names, job.configs, job.features, strict=True)
        following = {n: fr.VocabularyConfig(first, [c], [f]) for n, c, f in each}
        sparse = fr.optim.rowwise_adagrad(lr=0.05)
        step = fr.train_step(job.loss, sparse=sparse, dense=job.optimizer, admit=not is_apart)
        tables = fr.init(fr.key(0), job.configs)
        tables = fr.dynamic_tables(tables, following, key=fr.key(0)) if is_dynamic else tables
        state = [step.init(fr.Params(tables, fr.copy(job.dense)))]
        parts = [fr.jit(f, donate=("state",)) for f in ([fr.admission(step)] if is_apart else []) + [step]]
        given = iter(list(batches(10**10 if is_dynamic else 1)))

        def call():
            batch = next(given)
            for part in parts:
                state[0], _ = part(state[0], batch)

        return call

    calls = {"plain": trained(False, False), "apart": trained(True, True), "in the step": trained(True, False)}
    times = interleave(calls, rounds=rounds, warmup=TRAIN_WARMUP, clock=time.thread_time)
    rows, dim = job.configs[0].shape
    shape = {"tables": len(names), "bags": job.bags, "dim": dim, "rows": rows, "held": held, "new": new}
    ms = {n: spread(t, 1e3) for n, t in times.items()}
    ratio = {n: spread(ratios(times[n], times["plain"])) for n in ("apart", "in the step")}
    record("vocabulary", {"case": job.name, "threads": 1, "shape": shape, "ms": ms, "ratio": ratio})


def on_rank(bags: int, new: float, rounds: int, count: int, rows: int, kind: str) -> dict:
    """Return what one gloo rank measures: CPU and wall seconds of each round, and the bytes of its vocabularies.

    Compiled, donated steps of `count` tables, all placed alike: plain, with whole vocabularies, and with vocabularies
    that are cut by buckets. As in `train`, the ids are i · 10¹⁰ with i < 80 % of the rows, and a share was never seen.
    """
    torch.set_num_threads(1)
    mesh, names = (
        fr.Mesh.distributed(device="cpu", x=torch.distributed.get_world_size()),
        [f"t{i}" for i in range(count)],
    )
    generator, held = torch.Generator().manual_seed(mesh.coordinates["x"]), int(LOAD * rows)
    configs, features = tables_of(count, rows, 16)
    weights = [0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((count * 16, 1),)]
    loss = lambda p, b: fr.losses.bce((fr.lookup(p.tables, b.ids, features).values @ p.dense[0])[:, 0], b.label)

    def trained(buckets: tuple[str, ...], is_dynamic: bool = True):
        first, apart = fr.vocabulary(rows), 1
        tables = fr.init(fr.key(0), configs)
        if is_dynamic:
            first, apart = fr.admit(first, torch.arange(held) * 10**10)[0], 10**10
            each = zip(names, configs, features, strict=True)
            following = {n: fr.VocabularyConfig(first, [c], [f]) for n, c, f in each}
            tables = fr.dynamic_tables(tables, following, key=fr.key(0))
        plan = fr.Plan.uniform(kind, configs, mesh, buckets=buckets)
        step = fr.train_step(loss, sparse=fr.optim.rowwise_adagrad(lr=0.05), mesh=mesh, plan=plan)
        state = [step.init(fr.Params(tables, fr.copy(weights)))]
        run, own = fr.jit(step, donate=("state",)), state[0].tables.rest
        parts = own.vocabularies.values() if is_dynamic else ()
        sizes = [x.nbytes for v in parts for x in fr.tree.leaves(v) if x.dim()]

        def call():
            ids = torch.randint(held, (count * bags,), generator=generator) * apart
            if is_dynamic:
                fresh = torch.randint(0, LAST, ids.shape, generator=generator)
                ids = torch.where(torch.rand(ids.shape, generator=generator) < new, fresh, ids)
            keyed = fr.KeyedJaggedTensor.from_lengths(names, ids, torch.ones_like(ids))
            state[0], _ = run(state[0], fr.Batch(keyed, torch.zeros(bags)))

        return call, sum(sizes)

    made = {"plain": trained((), False), "whole": trained(()), "cut": trained(("x",))}
    both = lambda: torch.tensor([time.process_time(), time.perf_counter()], dtype=torch.float64)
    times = interleave({n: call for n, (call, _) in made.items()}, rounds=rounds, warmup=TRAIN_WARMUP, clock=both)
    return {n: {"s": [x.tolist() for x in t], "bytes": made[n][1]} for n, t in times.items()}


def ranks(num_ranks: int, bags: int, kind: str, rounds: int, new: float = 0.01) -> None:
    """Record the CPU time of a step on one of several gloo ranks, and the bytes of a rank's vocabularies."""
    count, rows = 8, 2**18
    with RankPool(num_ranks, timeout_s=300) as pool:
        found = pool.run(on_rank, bags, new, rounds, count, rows, kind)
    rounds_of = lambda name: zip(*(x[name]["s"] for x in found), strict=True)  # [CPU, wall] of all ranks
    means = {n: [[sum(x) / num_ranks for x in zip(*each, strict=True)] for each in rounds_of(n)] for n in found[0]}
    ms = {n: {"cpu": spread([c for c, _ in t], 1e3), "wall": spread([w for _, w in t], 1e3)} for n, t in means.items()}
    shape = {"ranks": num_ranks, "placement": kind, "tables": count, "bags": bags, "dim": 16, "rows": rows, "new": new}
    bytes_of = {n: x["bytes"] for n, x in found[0].items()}
    record("vocabulary", {"case": "ranks", "threads": 1, "shape": shape, "ms": ms, "vocabulary_bytes": bytes_of})


def write(case: str, num_rows: int, new: float, calls: dict, batches: list, rounds: int, more: dict, steps: int = 1):
    turns = {n: itertools.cycle(batches) for n in calls}
    of = lambda name, call: lambda: [call(next(turns[name])) for _ in range(steps)]
    timed = {n: of(n, c) for n, c in calls.items()}
    times = interleave(timed, rounds=rounds, warmup=WARMUP, clock=time.thread_time)
    speeds = {n: spread([steps * NUM_IDS / x for x in t], 1e-6) for n, t in times.items()}
    first, *others = times
    ratio = {n: spread(ratios(times[n], times[first])) for n in others}
    shape = {"rows": num_rows, "ids": NUM_IDS, "load": LOAD, "new": digits(new)}
    record("vocabulary", {"case": case, "threads": 1, "shape": shape, "m_ids_per_s": speeds, "ratio": ratio, **more})


def memory(num_rows: int) -> None:
    """Record the bytes for each id that has a row, of the same ids: tensors by their sizes, hash maps by the growth of
    the process."""
    held, _ = drawn(num_rows, 0.0, 0)
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    used, maps = {}, []
    for name in flat_maps():
        before = resident()
        maps.append(FlatMap(name, held))
        used[name] = (resident() - before, held.shape[0])
    for name, how in {"funcrec": {}, "funcrec, with a sketch": {"admit": 2}}.items():
        it = fr.vocabulary(num_rows, **how)
        for _ in range(2):
            it = fr.admit(it, held)[0]
        used[name] = (fr.tree.nbytes(it), int(it.num_ids))
    module, _ = mch_module(held, num_rows)
    raw = module._mch_sorted_raw_ids
    used["TorchRec MCH"] = (sum(x.nbytes for x in module.buffers()), int((raw != torch.iinfo(raw.dtype).max).sum()))
    identities, metadata = torch.ops.fbgemm.create_zch_buffer(num_rows, long_type=True, support_evict=True)
    used["FBGEMM zero_collision_hash"] = (identities.nbytes + metadata.nbytes, held.shape[0])
    shape = {"rows": num_rows, "load": LOAD}
    record(
        "vocabulary",
        {"case": "memory", "shape": shape, "bytes_per_id": {n: digits(b / k) for n, (b, k) in used.items()}},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true", help="16 M rows too")
    parser.add_argument("--maps", action="store_true", help="only hash maps as peers of find and admit")
    parser.add_argument("--step", action="store_true", help="a training step in place of single calls")
    parser.add_argument("--memory", action="store_true", help="bytes for each id in place of times")
    parser.add_argument("--dlrm", type=int, default=0, help="a step of a DLRM with batches of so many bags")
    parser.add_argument("--ranks", type=int, default=0, help="a step on so many gloo ranks")
    parser.add_argument("--bags", type=int, default=2048, help="the bags of a rank, with --ranks")
    parser.add_argument("--placement", default="row_wise", help="of all tables, with --ranks")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.memory:
        return memory(2**20)
    if options.step:
        train(small(), 50_000, 0.01, options.rounds)
        return train(small(), 0, 0.0, options.rounds)
    if options.ranks:
        return ranks(options.ranks, options.bags, options.placement, options.rounds)
    if options.dlrm:
        return train(job := dlrm(options.dlrm), job.ids, 0.01, options.rounds)
    for num_rows in (2**20, *([2**24] if options.large else [])):
        for new in (0.0, 1.0):
            find(num_rows, new, options.rounds, options.maps)
        for new in (0.0, 0.01, 0.1):
            admit(num_rows, new, options.rounds, options.maps)


if __name__ == "__main__":
    main()

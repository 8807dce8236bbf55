"""Measures training with a part of a table in memory, beside training with the whole table in memory.

    .venv/bin/python bench/cached.py             # 2 M rows of 32; 1, 5, 10 and 25 % of them in memory
    .venv/bin/python bench/cached.py --large     # a table of 40 GB in a file, a fiftieth of it in memory
    .venv/bin/python bench/cached.py --package   # a package of 8 GB, served (after make serving)

A table [rows, 32] with row-wise Adagrad, its store in a file (132 bytes a row); batches of 1,024 bags of 8 ids, drawn
by a Zipf law (exponent 1.05) over shuffled rows; two dense layers. Both steps are compiled and donated. Steps take
turns; times are medians of wall clock; torch has one thread, and reading ahead another. "dropped": the page cache holds
nothing of the file at the first measured step of a round. Hit rates are shares of distinct ids a batch: of the cache,
that looks 16 batches ahead, of a list of the least recently used ids, and of Belady's rule, which knows the future.
"""

import argparse
import heapq
import os
import resource
import statistics
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import torch
from measure import record
from server import Running

import funcrec as fr

DIM, BAGS, IDS, EXPONENT = 32, 1024, 8, 1.05
SHARES = (0.01, 0.05, 0.1, 0.25)
LOOK_AHEAD = 16  # batches
READ = [fr.FeatureConfig("user", table="user", pooling="mean")]


def drawn(rows: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Return the ids of `count` batches, i64[BAGS · IDS] each."""
    g = torch.Generator().manual_seed(seed)
    # the inverse of the continuous law's distribution function, to the nearest rank
    u = torch.rand(count, BAGS * IDS, generator=g, dtype=torch.float64)
    top = float(rows) ** (1 - EXPONENT)
    rank = (1 - u * (1 - top)).pow(1 / (1 - EXPONENT)).long().clamp(1, rows) - 1
    spread = 2_654_435_761  # a prime: a permutation of the rows, whose number it does not divide
    return list(rank * spread % rows)


def batch_of(ids: torch.Tensor) -> fr.Batch:
    lengths = torch.full((BAGS,), IDS)
    return fr.Batch(fr.KeyedJaggedTensor.from_lengths(["user"], ids, lengths), (ids[::IDS] % 2).float())


def loss_fn(params, batch):
    x = fr.lookup(params.tables, batch.ids, READ)["user"]
    hidden = torch.relu(x @ params.dense["a"])
    return fr.losses.bce((hidden @ params.dense["b"])[:, 0], batch.label)


def model_of():
    g = torch.Generator().manual_seed(0)
    return {"a": torch.randn(DIM, 64, generator=g) / 8, "b": torch.randn(64, 1, generator=g) / 8}


def steps_of(sparse):
    dense = fr.optim.dense(torch.optim.SGD, lr=0.01)
    return fr.jit(fr.train_step(loss_fn, sparse=sparse, dense=dense, admit=False), donate=("state",))


# -- hit rates ---------------------------------------------------------------------------------------------------------


def rates(batches: list[torch.Tensor], capacity: int, skip: int) -> dict[str, float]:
    """Return {rule: the share of distinct ids of the batches after `skip` that were in memory}."""
    distinct = [x.unique().tolist() for x in batches]
    return {"lru": lru(distinct, capacity, skip), "belady": belady(distinct, capacity, skip)}


def lru(distinct: list[list[int]], capacity: int, skip: int) -> float:
    held, hits, total = OrderedDict(), 0, 0
    for k, ids in enumerate(distinct):
        found = sum(i in held for i in ids)
        hits, total = (hits + found, total + len(ids)) if k >= skip else (hits, total)
        for i in ids:
            held[i] = True
            held.move_to_end(i)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / total


def belady(distinct: list[list[int]], capacity: int, skip: int) -> float:
    never, following, after = len(distinct), {}, [None] * len(distinct)
    for k in range(len(distinct) - 1, -1, -1):
        after[k] = {i: following.get(i, never) for i in distinct[k]}
        following.update(dict.fromkeys(distinct[k], k))
    held, order, hits, total = {}, [], 0, 0
    for k, ids in enumerate(distinct):
        found = sum(i in held for i in ids)
        hits, total = (hits + found, total + len(ids)) if k >= skip else (hits, total)
        for i in ids:
            held[i] = after[k][i]
            heapq.heappush(order, (-after[k][i], i))
        while len(held) > capacity:
            use, i = heapq.heappop(order)
            if held.get(i) == -use:
                del held[i]
    return hits / total


def drop_caches(*paths: Path) -> None:
    """Take the files' pages out of the page cache."""
    os.sync()
    for path in (x for x in paths if x.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# -- training ----------------------------------------------------------------------------------------------------------


class Cached:
    """Training with some rows in memory; the store is in a file."""

    def __init__(self, folder: Path, rows: int, capacity: int, depth: int, look_ahead: int = 0):
        sparse, config = fr.optim.rowwise_adagrad(0.05), fr.TableConfig("user", rows, DIM)
        self.path = folder / f"{capacity}-{depth}-{look_ahead}"
        self.store = fr.table_store([config], sparse, key=fr.key(0), path=self.path, durable=False)
        tables = fr.cached_tables({}, {"users": fr.CacheConfig(self.store, capacity, READ)})
        how = {"depth": max(depth, 1), "look_ahead": look_ahead}
        self.step = fr.cached_step(steps_of(sparse), {"users": self.store}, **how)
        self.state, self.depth, self.counts = self.step.init(fr.Params(tables, model_of())), depth, []

    def seconds(self, batches: list[fr.Batch]) -> list[float]:
        """Train on batches, and return the time of each step."""
        times, began = [], time.perf_counter()
        for batch in self.step.ahead(self.state, batches) if self.depth else batches:
            self.state, metrics = self.step(self.state, batch)
            times.append(time.perf_counter() - began)
            self.counts.append({n: int(x) for n, x in metrics["vocabularies"]["users"].items()})
            began = time.perf_counter()
        return times

    def hit_rate(self, skip: int) -> float:
        hits, new = (sum(x[n] for x in self.counts[skip:]) for n in ("hits", "admitted"))
        return hits / (hits + new)

    def drop(self) -> None:
        drop_caches(self.path / "records")


class Whole:
    """Training with the whole table in memory."""

    def __init__(self, rows: int):
        sparse = fr.optim.rowwise_adagrad(0.05)
        self.step = steps_of(sparse)
        tables = fr.init(fr.key(0), [fr.TableConfig("user", rows, DIM)])
        self.state = self.step.init(fr.Params(tables, model_of()))

    def seconds(self, batches: list[fr.Batch]) -> list[float]:
        times = []
        for batch in batches:
            began = time.perf_counter()
            self.state, _ = self.step(self.state, batch)
            times.append(time.perf_counter() - began)
        return times

    def drop(self) -> None:
        pass


def measured(rows: int, warm: int, rounds: int, each: int) -> None:
    """Print and record the times of steps by the share of rows in memory."""
    ids = drawn(rows, warm + rounds * each)
    batches = list(map(batch_of, ids))
    with tempfile.TemporaryDirectory(dir="build") as folder:
        cases = {"whole": Whole(rows)}
        for share in SHARES:
            for depth in (0, 2):
                cases[f"{share:.0%}, depth {depth}"] = Cached(Path(folder), rows, int(share * rows), depth)
            cases[f"{share:.0%}, looks ahead"] = Cached(Path(folder), rows, int(share * rows), 2, LOOK_AHEAD)
        for case in cases.values():
            case.seconds(batches[:warm])
        times = {n: [] for n in cases}
        dropped = {n: [] for n in cases}
        for r in range(rounds):
            part = batches[warm + r * each : warm + (r + 1) * each]
            for n, case in cases.items():
                into = dropped if r % 2 else times
                if r % 2:
                    case.drop()
                into[n] += case.seconds(part)[1:]
        found = {}
        for share in SHARES:
            capacity = int(share * rows)
            own = cases[f"{share:.0%}, depth 0"].hit_rate(warm)
            ahead = cases[f"{share:.0%}, looks ahead"].hit_rate(warm)
            found[f"{share:.0%}"] = {"cache": own, "looks ahead": ahead, **rates(ids, capacity, warm)}
    ms = lambda x: {n: round(statistics.median(t) * 1e3, 3) for n, t in x.items()}
    figures = {"case": "cached", "shape": {"rows": rows, "dim": DIM, "bags": BAGS, "ids": IDS, "zipf": EXPONENT}}
    record(
        "cached", {**figures, "steps": warm + rounds * each, "ms": ms(times), "ms, dropped": ms(dropped), "hits": found}
    )


def large(bytes_of_table: float, steps: int) -> None:
    """Train a table that is larger than this machine's memory, and record the time of a step and the most memory."""
    rows = int(bytes_of_table) // (4 * DIM + 4)
    with tempfile.TemporaryDirectory(dir="build") as folder:
        case = Cached(Path(folder), rows, rows // 50, 2)
        times = []
        for first in range(0, steps, 50):
            times += case.seconds(list(map(batch_of, drawn(rows, 50, seed=first))))[1:]
        began = time.perf_counter()
        case.step.commit(case.state)
        commit = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        case.store.close()
    ms = {"first half": times[: len(times) // 2], "second half": times[len(times) // 2 :]}
    shape = {"rows": rows, "in memory": rows // 50, "gb": bytes_of_table / 1e9, "bags": BAGS, "ids": IDS}
    medians = {n: round(statistics.median(t) * 1e3, 3) for n, t in ms.items()}
    figures = {
        "ms": medians,
        "commit s": round(commit, 2),
        "peak GiB": round(peak, 2),
        "hits": case.hit_rate(steps // 2),
    }
    record("cached", {"case": "large", "shape": shape, "steps": steps, **figures})


def packaged(bytes_of_table: float, steps: int, asked: int) -> None:
    """Train a table in a file, export all its rows, and serve them: seconds of each, the server's memory and answers.

    Run it within a limit of memory, such as a control group of 1 GiB, to see a package that is larger than memory.
    """
    rows = int(bytes_of_table) // (4 * DIM)
    with tempfile.TemporaryDirectory(dir="build") as folder:
        params, seconds = gathered(Path(folder), rows, steps)
        clock = time.perf_counter()
        fr.export(answer, params, batch_of(drawn(rows, 1)[0]), f"{folder}/package")
        seconds["export"] = time.perf_counter() - clock
        ids = torch.randint(rows, (asked, 2), generator=torch.Generator().manual_seed(1))
        want = params.tables["user"][ids].mean(1)
        del params
        drop_caches(*Path(folder).rglob("*"))
        clock, times, right = time.perf_counter(), [], 0
        with Running("-m", "funcrec", "serve", f"{folder}/package", "--port", 0) as server:
            seconds["open"] = time.perf_counter() - clock
            for each, row in zip(ids.tolist(), want, strict=True):
                clock = time.perf_counter()
                found = server.post("/predict", {"ids": {"user": [each]}})
                times.append((time.perf_counter() - clock) * 1e3)
                right += torch.allclose(torch.tensor(found["outputs"]["user"][0]), row, rtol=1e-5, atol=1e-7)
            own = server.memory_mb()
    shape = {"rows": rows, "gb": bytes_of_table / 1e9, "asked": asked}
    part = lambda q: round(sorted(times)[int(q * (len(times) - 1))], 3)
    ms = {"first tenth": round(statistics.median(times[: asked // 10]), 3), "p50": part(0.5), "p99": part(0.99)}
    s = {n: round(x, 2) for n, x in seconds.items()}
    record("cached", {"case": "package", "shape": shape, "s": s, "ms": ms, "right": right, "server MiB": own})


def gathered(folder: Path, rows: int, steps: int) -> tuple[fr.Params, dict[str, float]]:
    """Train a table in a file, and return all its rows, mapped from another file, and the seconds that it took."""
    config = fr.TableConfig("user", rows, DIM, initializer=fr.normal(0.1))
    store = fr.table_store([config], fr.optim.sgd(0.1), key=fr.key(0), path=folder / "rows", durable=False)
    tables = fr.cached_tables({}, {"users": fr.CacheConfig(store, 200_000, READ)})
    step = fr.cached_step(fr.train_step(loss_fn, sparse=store.sparse, admit=False), {"users": store}, depth=2)
    state = step.init(fr.Params(tables, model_of()))
    for batch in step.ahead(state, map(batch_of, drawn(rows, steps))):
        state, _ = step(state, batch)
    clock = time.perf_counter()
    params = step.gather(state.params, folder / "whole")
    store.close()
    return params, {"gather": time.perf_counter() - clock}


def answer(params, batch):
    return {"user": fr.lookup(params.tables, batch.ids, READ)["user"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", type=float, nargs="?", const=8.0, help="the GB of a package")
    parser.add_argument("--large", action="store_true", help="a table of 40 GB")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--warm", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--each", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.large:
        large(40e9, 600)
    elif args.package:
        packaged(args.package * 1e9, 30, 2000)
    else:
        measured(args.rows, args.warm, args.rounds, args.each)

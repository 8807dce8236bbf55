"""Measures products, sums and compiled steps whose bits depend on the numbers alone, beside torch's own.

    python bench/invariant.py [--threads 1] [--rounds 15] [--cases dlrm-d64-b512-l1 deepfm]

Products are x Wᵀ, dy W and dyᵀ x in f32, in GFLOP/s, by `invariant_bmm`, MKL and oneDNN (the weight stored as in
`F.linear`, or turned; oneDNN's second operand transposed beforehand). Steps are `train_step(invariant=True)` beside the
ordinary step, both jitted and donated, in turns. The law: the losses of the first two steps agree. --ranks n measures
only `psum` of n gloo ranks, as a tree and as gloo's all_reduce, in turns: milliseconds, and the bytes that leave a
rank.
"""

import argparse
import statistics
import time

import cases
import products
import steps
import torch
from contest import Closeness, differences
from funcrec.kernels import ops
from measure import digits, record

import funcrec as fr
from funcrec.compile.backend import _onednn
from funcrec.mesh._exchange import MOST_JOINED
from funcrec.testing import RankPool

SHAPES = (
    (512, 13, 512), (512, 512, 256), (512, 415, 512), (2048, 512, 256), (2048, 1024, 1024), (64, 415, 512),
    (512, 256, 1), (4096, 512, 256), (1, 64, 64), (1, 415, 512), (1, 1024, 1024), (2, 415, 512), (4, 415, 512),
    (8, 415, 512), (16, 415, 512), (16, 256, 1),
)  # fmt: skip
STACKS = ((512, 27, 16), (512, 27, 64), (2048, 27, 64))  # the dot interaction: examples, vectors, dim
SUMS = ((1, 2048, 512), (1, 2048, 1), (2048, 512, 1), (2048, 27, 64))


def speeds(rows: int, inner: int, outer: int, rounds: int) -> dict:
    """Return {product: GFLOP/s of funcrec, MKL and oneDNN}."""
    x, w, dy = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    found, flop, repeats = {}, 2 * rows * inner * outer, max(1, 20_000_000 // (rows * inner * outer))
    given = {"x Wᵀ": (x, w.t(), w), "dy W": (dy, w, w.t().contiguous()), "dyᵀ x": (dy.t(), x, x.t().contiguous())}
    given["x Wᵀ, W turned"] = x, w.t().contiguous(), w
    for name, (a, b, turned) in given.items():
        left = a.contiguous()
        calls = {
            "funcrec": lambda a=a, b=b: ops.invariant_bmm(a[None], b[None]), "MKL": lambda a=a, b=b: torch.mm(a, b),
            "oneDNN": lambda a=left, b=turned: _onednn.onednn()(a, b, None, "none", [], ""),
        }  # fmt: skip
        many = {n: lambda f=f: [f() for _ in range(repeats)] for n, f in calls.items()}
        times = products.turns(many, rounds)
        found[name] = {n: digits(repeats * flop / min(t for _, t in times[n]) / 1e9) for n in calls}
    return found


def small(count: int, vectors: int, dim: int, rounds: int) -> dict:
    """Return the milliseconds of the products of a stack of small matrices, by funcrec and by torch."""
    x, d = torch.randn(count, vectors, dim), torch.randn(count, vectors, vectors)
    found = {}
    for name, pair in {"x xᵀ": (x, x.mT), "d x": (d, x)}.items():
        calls = {"funcrec": lambda p=pair: ops.invariant_bmm(*p), "torch": lambda p=pair: torch.bmm(*p)}
        times = products.turns(calls, rounds)
        found[name] = {n: digits(min(t for _, t in times[n]) * 1e3) for n in calls}
    return found


def sums(shape: tuple[int, int, int], rounds: int) -> dict:
    x = torch.randn(shape)
    times = products.turns({"funcrec": lambda: ops.invariant_sum(x), "torch": lambda: x.sum(1)}, rounds)
    return {n: digits(min(t for _, t in found) * 1e6) for n, found in times.items()}


def compared(case: cases.StepCase, rounds: int) -> dict:
    """Return the milliseconds of a step with and without, and the median of the rounds' ratios."""
    case = case._replace(num_rows=min(case.num_rows, products.MOST_ROWS))
    model = products.make_model(case)
    batches = steps.make_batches(case, model, "cpu")
    how = {"ordinary": False, "invariant": True}
    made = {
        n: steps.funcrec_step(case, model, model.init(fr.key(0)), batches, "cpu", invariant=x) for n, x in how.items()
    }
    first = {n: c.first() for n, c in made.items()}
    red = differences(first["invariant"], first["ordinary"], "ordinary", Closeness(1e-4, 1e-5))
    if red:
        return {"law": "red", "red": red}
    times = products.turns({n: c.call for n, c in made.items()}, rounds)
    over = [
        statistics.median(a[k] / b[k] for a, b in zip(times["invariant"], times["ordinary"], strict=True))
        for k in (0, 1)
    ]
    figures = {n: [digits(statistics.median(x[k] for x in t) * 1e3) for k in (0, 1)] for n, t in times.items()}
    return {"law": "green", "cpu_ms, clock_ms": figures, "over_ordinary_cpu, clock": [digits(x) for x in over]}


def sums_over_ranks(num_ranks: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round of psum on a rank, by the tree and by all_reduce."""
    mesh, x = fr.Mesh.distributed(data=num_ranks), torch.randn(size)
    run = lambda f: fr.shard_map(f, mesh=mesh, in_specs=fr.P(), out_specs=fr.P(), check=False)
    total = lambda x: fr.psum(x, "data")
    calls, found = {"tree": run(fr.invariant(total)), "all_reduce": run(total)}, {"tree": [], "all_reduce": []}
    for i in range(rounds + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call(x)
            found[name] += [time.perf_counter() - begin] * (i > 1)
    return found


def ranks_compared(num_ranks: int, rounds: int) -> None:
    """Record the exchange beside all_reduce, the slowest rank of each round."""
    with RankPool(num_ranks) as pool:
        for size in (1_000, 100_000, 1_000_000, 10_000_000):
            each = pool.run(sums_over_ranks, num_ranks, size, rounds)
            slowest = {n: [max(own[n][i] for own in each) for i in range(rounds)] for n in each[0]}
            ms = {n: digits(statistics.median(t) * 1e3) for n, t in slowest.items()}
            over = statistics.median(a / b for a, b in zip(slowest["tree"], slowest["all_reduce"], strict=True))
            is_whole = num_ranks == 2 or 4 * size * num_ranks <= MOST_JOINED
            ring = 2 * 4 * size * (num_ranks - 1) // num_ranks
            leaves = {"tree": 4 * size * (num_ranks - 1) if is_whole else ring, "all_reduce": ring}
            told = {"psum of floats": size, "ranks": num_ranks, "rounds": rounds, "clock_ms": ms}
            record("invariant", {**told, "over_all_reduce": digits(over), "bytes_from_a_rank": leaves})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="*", choices=products.CASES, default=products.SHORT, metavar="CASE")
    parser.add_argument("--ranks", type=int, help="gloo ranks whose sums are measured, and nothing else")
    options = parser.parse_args()
    if options.ranks:
        return ranks_compared(options.ranks, options.rounds)
    torch.set_num_threads(options.threads)
    told = {"threads": options.threads, "rounds": options.rounds}
    with torch.no_grad():
        shown = lambda s: " x ".join(map(str, s))
        record("invariant", {**told, "gflops": {shown(s): speeds(*s, options.rounds) for s in SHAPES}})
        record("invariant", {**told, "stacks_ms": {shown(s): small(*s, options.rounds) for s in STACKS}})
        record("invariant", {**told, "sums_us": {shown(s): sums(s, options.rounds) for s in SUMS}})
    for name in options.cases:
        rounds = options.rounds if name != "dcnv2" else min(options.rounds, 5)
        record("invariant", {"case": name, **told, "rounds": rounds, **compared(products.CASES[name], rounds)})


if __name__ == "__main__":
    main()

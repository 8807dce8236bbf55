"""Measures exact top-k against matmul + topk and FAISS's IndexFlatIP, and recall and latency of an approximate index.

    .venv/bin/python bench/retrieval.py            # exact: 3,700 and 100,000 items, --large: also 1 M; index: 30,000

Times are CPU times of one thread, from interleaved calls. A batch of queries is one call. Items lie in clusters, like
items of two-tower models. recall@10 is relative to `fr.top_k`.
"""

import argparse
import itertools
import statistics
import time
from functools import partial

import torch
from measure import digits, interleave, ratios, record, spread

import funcrec as fr

DIM, K = 64, 10
QUERIES = (1, 16, 64)
EFFORTS = {"hnsw": (16, 64, 256), "ivf": (4, 16, 64)}


def drawn(num_items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return items around 256 centres, and queries around the same centres, enough for all batches."""
    generator = torch.Generator().manual_seed(num_items)
    centres = torch.randn(256, DIM, generator=generator)

    def around(n):
        own = torch.randint(0, 256, (n,), generator=generator)
        return centres[own] + 0.7 * torch.randn(n, DIM, generator=generator)

    return around(num_items), around(512)


def timed(calls: dict, queries: torch.Tensor, size: int, rounds: int) -> tuple[dict, dict]:
    """Return (the ms of each call for `size` queries at a time, the ratio of its time to the first call's time)."""
    turns = {n: itertools.cycle(queries.split(size)) for n in calls}
    of = lambda name, call: lambda: call(next(turns[name]))
    times = interleave({n: of(n, c) for n, c in calls.items()}, rounds=rounds, clock=time.thread_time)
    first, *others = times
    return ({n: spread(t, 1e3) for n, t in times.items()}, {n: spread(ratios(times[n], times[first])) for n in others})


def exact(num_items: int, rounds: int) -> None:
    """Compare `fr.top_k` on floats and on int8 with other exact searches, and record the figures."""
    import faiss

    items, queries = drawn(num_items)
    flat, coded = faiss.IndexFlatIP(DIM), fr.quantize({"item": items}, "int8")
    flat.add(items.numpy())
    calls = {
        "funcrec": lambda q: fr.top_k(q, items, K),
        "funcrec, int8": lambda q: fr.top_k(q, coded, K),
        "matmul + topk": lambda q: torch.topk(q @ items.T, K),
        "faiss.IndexFlatIP": lambda q: flat.search(q.numpy(), K),
    }
    for size in QUERIES:
        ms, ratio = timed(calls, queries, size, rounds)
        shape = {"num_items": num_items, "dim": DIM, "k": K, "num_queries": size}
        write("exact", {"shape": shape, "ms": ms, "ratio": ratio})


def approximate(num_items: int, rounds: int) -> None:
    """Record recall and milliseconds of 1 query and of 64 queries, for each effort and for the exact search."""
    items, queries = drawn(num_items)
    wanted = fr.top_k(queries, items, K)[1]
    for kind, efforts in EFFORTS.items():
        began = time.thread_time()
        index = fr.build_index(items, kind)
        build_s = time.thread_time() - began
        for effort in efforts:
            calls = {
                "funcrec.search_index": partial(fr.search_index, index, k=K, effort=effort),
                "funcrec.top_k": partial(fr.top_k, items=items, k=K),
            }
            rows = fr.search_index(index, queries, K, effort=effort)[1]
            recall = statistics.mean(len({*a} & {*b}) / K for a, b in zip(rows.tolist(), wanted.tolist(), strict=True))
            told = {"shape": {"num_items": num_items, "dim": DIM, "k": K}, "kind": kind, "effort": effort}
            found = {size: timed(calls, queries, size, rounds) for size in (1, 64)}
            times = {str(n): {"ms": ms, "ratio": ratio} for n, (ms, ratio) in found.items()}
            write("approximate", {**told, "recall": digits(recall), "build_s": digits(build_s), "num_queries": times})


def write(case: str, row: dict) -> None:
    record("retrieval", {"case": case, "threads": 1, **row})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true", help="1 M items too")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for num_items in (3_700, 100_000, *([1_000_000] if options.large else [])):
        exact(num_items, options.rounds)
    approximate(30_000, options.rounds)


if __name__ == "__main__":
    main()

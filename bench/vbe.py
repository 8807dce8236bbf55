"""Compares lookups of examples that share bags with lookups of the expanded batch, and with TorchRec's unsharded VBE.

    python bench/vbe.py

26 tables of 20,000 rows x 64, 2048 examples, bags of 10 ids. B_f / B is the share of distinct bags: 1, 1/2, 1/8. The
cases are a compiled lookup and a donated step of SGD. TorchRec's are EmbeddingBagCollection, without a gradient, and
with its dense gradients and torch.optim.SGD. Times are of the processor, with one thread. The law comes first: all
outputs agree.
"""

import argparse
import time
from pathlib import Path

import torch
from measure import RESULTS, digits, interleave, median_ms, ratios, record, spread
from peers import quiet

import funcrec as fr

TABLES, ROWS, DIM, BATCH, BAG = 26, 20_000, 64, 2048, 10
SHARES = {"1": 1, "1/2": 2, "1/8": 8}


def batches(size: dict, every: int) -> tuple[fr.KeyedJaggedTensor, fr.KeyedJaggedTensor]:
    """Return (ids whose examples share bags, the ids of the expanded batch). Each bag has `every` examples."""
    draw = torch.Generator().manual_seed(0)
    count, keys = size["batch"] // every, [f"f{i}" for i in range(size["tables"])]
    values = torch.randint(0, size["rows"], (len(keys) * count * size["bag"],), generator=draw)
    bags = fr.KeyedJaggedTensor.from_lengths(keys, values, torch.full((len(keys) * count,), size["bag"]))
    inverse = torch.stack([torch.randperm(size["batch"], generator=draw) % count for _ in keys])
    shared = fr.KeyedJaggedTensor(bags.values, bags.offsets, None, inverse, bags.keys)
    chosen = bags.values.view(len(keys), count, -1).gather(1, inverse[:, :, None].expand(-1, -1, size["bag"]))
    whole = torch.full((len(keys) * size["batch"],), size["bag"])
    return shared, fr.KeyedJaggedTensor.from_lengths(keys, chosen.flatten(), whole)


def lookups(size: dict, shared, plain, tables: dict, features) -> dict:
    theirs, kjt = collection(size, tables, features), fr.interop.to_torchrec(shared)
    look = fr.jit(lambda tables, ids: fr.lookup(tables, ids, features).values)
    return {
        "funcrec": lambda: look(tables, shared),
        "expanded": lambda: look(tables, plain),
        "torchrec": torch.no_grad()(lambda: theirs(kjt).values()),
    }


def steps(size: dict, shared, plain, tables: dict, features) -> dict:
    theirs, kjt = collection(size, tables, features), fr.interop.to_torchrec(shared)
    step = make_step(features)
    fast = fr.jit(step, donate=("state",))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    held = {n: step.init(fr.Params(fr.copy(tables), {})) for n in ("funcrec", "expanded")}

    def ours(name: str, ids):
        held[name], metrics = fast(held[name], ids)
        return metrics["loss"]

    def torchrec():
        sgd.zero_grad()
        loss = theirs(kjt).values().square().mean()
        loss.backward()
        sgd.step()
        return loss.detach()

    return {
        "funcrec": lambda: ours("funcrec", shared), "expanded": lambda: ours("expanded", plain), "torchrec": torchrec
    }  # fmt: skip


def make_step(features) -> fr.TrainStep:
    loss = lambda params, ids: fr.lookup(params.tables, ids, features).values.square().mean()
    return fr.train_step(loss, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))


def collection(size: dict, tables: dict, features):
    with quiet():
        import torchrec
    configs = [fr.TableConfig(n, size["rows"], size["dim"]) for n in tables]
    made = torchrec.EmbeddingBagCollection(fr.interop.to_torchrec((tuple(configs), tuple(features))))
    for name, bag in made.embedding_bags.items():
        bag.weight.data.copy_(tables[name])
    return made


def moved_bytes(ids, size: dict) -> dict:
    """Return the bytes that a lookup reads and writes: ids, rows of the tables and of bags, rows of the examples."""
    bags = sum(ids.bags_of(k) for k in ids.keys)
    expanded = len(ids.keys) * ids.num_examples * size["dim"] * 4
    rows = (ids.capacity + (0 if ids.inverse is None else bags)) * size["dim"] * 4
    return {"ids": ids.capacity * 8, "rows": rows, "out": expanded}


def measured(size: dict, share: str, rounds: int) -> dict:
    shared, plain = batches(size, SHARES[share])
    features = [fr.FeatureConfig(k, table=k) for k in shared.keys]
    tables = fr.init(fr.key(0), [fr.TableConfig(k, size["rows"], size["dim"]) for k in shared.keys])
    figures = {"bytes": {"shared": moved_bytes(shared, size), "expanded": moved_bytes(plain, size)}}
    for name, make in {"lookup": lookups, "step": steps}.items():
        cases = make(size, shared, plain, tables, features)
        firsts = {n: call() for n, call in cases.items()}
        for other in ("expanded", "torchrec"):
            torch.testing.assert_close(firsts["funcrec"], firsts[other], rtol=1e-4, atol=1e-6)
        times = interleave(cases, rounds=rounds, clock=time.process_time)
        figures[name] = {
            **{f"{n}_ms": digits(median_ms(t)) for n, t in times.items()},
            "expanded / funcrec": spread(ratios(times["expanded"], times["funcrec"])),
            "torchrec / funcrec": spread(ratios(times["torchrec"], times["funcrec"])),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tiny", action="store_true", help="only checks that all code runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = {"tables": TABLES, "rows": ROWS, "dim": DIM, "batch": BATCH, "bag": BAG}
    if args.tiny:
        size |= {"tables": 3, "rows": 100, "batch": 64}
    cases = {share: measured(size, share, 3 if args.tiny else args.rounds) for share in SHARES}
    record("vbe", {"shape": size, "threads": 1, "rounds": args.rounds, "law": "green", "cases": cases}, args.out)


if __name__ == "__main__":
    main()

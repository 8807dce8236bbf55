"""Many evictions: each row that is read must have the numbers of its own id.

    PYTHONPATH=tests .venv/bin/python -m programs.evictions --count 2000000

The rate is 0, so the numbers of a row are a function of its id for ever: those with which it began.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import funcrec as fr
from funcrec.tables import id_rows

ROOM, IDS, DIM, NUM_ROWS = 8192, 2048, 8, 200_000
READ = [fr.FeatureConfig("u", table="u", pooling="none", max_length=1)]
KEY, SPARSE = fr.key(0), fr.optim.rowwise_adagrad(0.0)


def loss_fn(params, batch):
    return fr.lookup_sequence(params.tables, batch.ids, READ)["u"].values.sum() * 0.0


def batch_of(ids: torch.Tensor) -> fr.Batch:
    return fr.Batch(fr.KeyedJaggedTensor.from_lengths(["u"], ids, torch.ones(len(ids), dtype=torch.int64)))


def dynamic(count: int, wrap: Callable) -> int:
    """Train with a vocabulary until `count` ids were evicted. Return the number of rows that were compared."""
    users, g = fr.vocabulary(ROOM), torch.Generator().manual_seed(0)
    config = fr.TableConfig("u", users.num_embeddings, DIM, initializer=fr.normal(1.0))
    follow = {"v": fr.VocabularyConfig(users, [config], READ)}
    step = wrap(fr.train_step(loss_fn, sparse=SPARSE))
    state = step.init(fr.Params(fr.dynamic_tables(fr.init(KEY, [config]), follow, key=KEY), {}))
    evicted = compared = k = 0
    while evicted < count:
        often = torch.randint(0, 40_000, (IDS,), generator=g) * (2**40 + 7)
        ids = often if k % 2 else torch.randint(-(2**62), 2**62, (IDS,), generator=g)
        state, metrics = step(state, batch_of(ids))
        evicted, k = evicted + int(metrics["vocabularies"]["v"]["evicted"]), k + 1
        rows = fr.find(state.tables.vocabularies["v"], ids)
        found = state.tables["u"][rows[rows >= 0]]
        assert torch.equal(found, id_rows(KEY, config, ids[rows >= 0])), f"step {k}"
        compared += len(found)
    return compared


def cached(count: int, wrap: Callable, folder: Path) -> int:
    """Train with a cache of a table in a file until `count` rows left memory. Return the number of rows compared."""
    config, g = fr.TableConfig("u", NUM_ROWS, DIM, initializer=fr.normal(1.0)), torch.Generator().manual_seed(0)
    whole = fr.init(KEY, [config])["u"]
    store = fr.table_store([config], SPARSE, key=KEY, path=folder / "u", durable=False)
    step = fr.cached_step(wrap(fr.train_step(loss_fn, sparse=SPARSE, admit=False)), {"v": store}, depth=2)
    tables = fr.cached_tables({}, {"v": fr.CacheConfig(store, ROOM, READ)})
    state = step.init(fr.Params(tables, {}))
    draw = lambda: batch_of(torch.randint(0, NUM_ROWS, (IDS,), generator=g))
    evicted = compared = k = 0
    for one in step.ahead(state, iter(draw, None)):
        state, metrics = step(state, one)
        evicted, k = evicted + int(metrics["vocabularies"]["v"]["evicted"]), k + 1
        ids = one.batch.ids.values
        rows = fr.find(state.tables.vocabularies["v"], ids)
        assert torch.equal(state.tables["u"][rows], whole[ids]), f"step {k}"
        compared += len(ids)
        if k % 300 == 0:
            step.commit(state)
        if evicted >= count:
            break
    step.commit(state)
    records = store.store.read(torch.arange(NUM_ROWS))[:, : 4 * DIM].contiguous().view(torch.float32)
    assert torch.equal(records, whole)
    store.close()
    return compared + NUM_ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2_000_000)
    count = parser.parse_args().count
    compiled = lambda step: fr.jit(step, donate=("state",))
    with tempfile.TemporaryDirectory(dir="build") as folder:
        for name, run in (("vocabulary", dynamic), ("cache", lambda *a: cached(*a, Path(folder)))):
            began = time.perf_counter()
            print(f"{name}: {count:,} evictions, {run(count, compiled):,} rows compared, 0 wrong", end=", ")
            print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

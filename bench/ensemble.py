"""An ensemble of eight by vmap against eight runs: one call of each kernel for all members.

    python bench/ensemble.py

Four tables of 1,000 rows x 16, 128 bags of 4 ids each, a small MLP, row-wise Adagrad and Adam. The cases: a lookup in stacked tables, a
lookup of stacked ids, and training steps, eager and compiled with donation. The law comes first: the ensemble is the eight runs.
"""

import torch
from measure import interleave, median_ms, ratios, record, spread
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

import funcrec as fr

MEMBERS, TABLES, ROWS, DIM, BATCH, BAG = 8, 4, 1000, 16, 128, 4
NAMES = [f"f{i}" for i in range(TABLES)]
CONFIGS = [fr.TableConfig(n, ROWS, DIM) for n in NAMES]
FEATURES = [fr.FeatureConfig(n, table=n, max_length=BAG) for n in NAMES]


def make_step(hidden) -> fr.TrainStep:
    def loss_fn(params, batch):
        acts = fr.lookup(params.tables, batch.ids, FEATURES).values
        logits = hidden.apply(params.dense, acts).squeeze(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)

    dense = fr.optim.dense(torch.optim.Adam, lr=0.01)
    return fr.train_step(loss_fn, sparse=fr.optim.rowwise_adagrad(lr=0.01), dense=dense)


def make_batch(seed: int) -> fr.Batch:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, ROWS, (TABLES * BATCH * BAG,), generator=generator)
    ids = fr.KeyedJaggedTensor.from_lengths(NAMES, values, torch.full((TABLES * BATCH,), BAG))
    return fr.Batch(ids, torch.rand(BATCH, generator=generator).round())


def stack(trees):
    return tree_map(lambda *x: torch.stack(x), *trees)


def lookups(states, batches) -> dict:
    acts = lambda tables, ids: fr.lookup(tables, ids, FEATURES).values
    tables, ids = [s.tables for s in states], [b.ids for b in batches[:MEMBERS]]
    all_tables, all_ids = stack(tables), stack(ids)
    return {
        "lookup, stacked tables": (lambda: vmap(acts, in_dims=(0, None))(all_tables, ids[0]), lambda: stack([acts(t, ids[0]) for t in tables])),
        "lookup, stacked ids": (lambda: vmap(acts, in_dims=(None, 0))(tables[0], all_ids), lambda: stack([acts(tables[0], i) for i in ids])),
    }  # fmt: skip


def training(step, states, batches, compiled: bool) -> tuple:
    """(a step of the ensemble, a step of each member)"""
    together = vmap(step, in_dims=(0, None))
    one, many = (fr.jit(f, donate=("state",)) if compiled else f for f in (step, together))
    own = [tree_map(torch.clone, s) for s in states]
    held = {"all": stack(own), "each": own, "all turn": 0, "each turn": 0}

    def ensemble():
        held["all"], metrics = many(held["all"], batches[held["all turn"] % len(batches)])
        held["all turn"] += 1
        return metrics["loss"]

    def runs():
        batch = batches[held["each turn"] % len(batches)]
        made = [one(s, batch) for s in held["each"]]
        held["each"] = [s for s, _ in made]
        held["each turn"] += 1
        return torch.stack([m["loss"] for _, m in made])

    return ensemble, runs


def main(rounds: int = 40) -> None:
    torch.set_num_threads(1)
    hidden = fr.nn.mlp((TABLES * DIM, 64, 32, 1))
    step, batches = make_step(hidden), [make_batch(seed) for seed in range(16)]
    fresh = lambda key: step.init(fr.Params(fr.init(key, CONFIGS), hidden.init(key)), key)
    states = [fresh(key) for key in fr.split(fr.key(0), MEMBERS)]
    cases = lookups(states, batches)
    cases["step, eager"] = training(step, states, batches, compiled=False)
    cases["step, compiled and donated"] = training(step, states, batches, compiled=True)
    figures = {}
    for name, (ensemble, runs) in cases.items():
        for _ in range(3):
            torch.testing.assert_close(ensemble(), runs(), rtol=1e-4, atol=1e-5)
        times = interleave({"ensemble": ensemble, "runs": runs}, rounds=rounds)
        figures[name] = {
            "ensemble_ms": round(median_ms(times["ensemble"]), 3),
            "runs_ms": round(median_ms(times["runs"]), 3),
            "ratio": spread(ratios(times["ensemble"], times["runs"])),
        }
    parameters = sum(x.numel() for x in tree_leaves(states[0].params))
    shape = {"members": MEMBERS, "tables": TABLES, "rows": ROWS, "dim": DIM, "batch": BATCH, "ids_per_bag": BAG}
    record(
        "ensemble",
        {"shape": shape, "parameters": parameters, "threads": 1, "rounds": rounds, "law": "green", "cases": figures},
    )


if __name__ == "__main__":
    main()

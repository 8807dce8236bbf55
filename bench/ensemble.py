"""Compares an ensemble of eight by vmap with eight runs. One call of each kernel serves all members.

    python bench/ensemble.py

The small size has four tables of 1,000 rows x 16, with 128 bags of 4 ids each. The large size has 26 tables of 20,000
rows x 16, with 512 bags of 4 ids each. The cases are a lookup in stacked tables and a lookup of stacked ids, for both
sizes, eager and compiled. Further cases are training steps of the small size (an MLP, row-wise Adagrad and Adam),
eager, and compiled with donation. The law comes first: the ensemble gives the results of the eight runs.
"""

from typing import NamedTuple

import torch
from measure import interleave, median_ms, ratios, record, spread
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

import funcrec as fr

MEMBERS = 8


class Size(NamedTuple):
    tables: int
    rows: int
    dim: int
    batch: int
    ids_per_bag: int

    @property
    def names(self) -> list[str]:
        return [f"f{i}" for i in range(self.tables)]

    @property
    def configs(self) -> list[fr.TableConfig]:
        return [fr.TableConfig(n, self.rows, self.dim) for n in self.names]

    @property
    def features(self) -> list[fr.FeatureConfig]:
        return [fr.FeatureConfig(n, table=n, max_length=self.ids_per_bag) for n in self.names]


SMALL, LARGE = Size(4, 1000, 16, 128, 4), Size(26, 20_000, 16, 512, 4)


def make_step(hidden, size: Size) -> fr.TrainStep:
    features = size.features

    def loss_fn(params, batch):
        acts = fr.lookup(params.tables, batch.ids, features).values
        logits = hidden.apply(params.dense, acts).squeeze(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)

    dense = fr.optim.dense(torch.optim.Adam, lr=0.01)
    return fr.train_step(loss_fn, sparse=fr.optim.rowwise_adagrad(lr=0.01), dense=dense)


def make_batch(size: Size, seed: int) -> fr.Batch:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, size.rows, (size.tables * size.batch * size.ids_per_bag,), generator=generator)
    lengths = torch.full((size.tables * size.batch,), size.ids_per_bag)
    ids = fr.KeyedJaggedTensor.from_lengths(size.names, values, lengths)
    return fr.Batch(ids, torch.rand(size.batch, generator=generator).round())


def stack(trees):
    return tree_map(lambda *x: torch.stack(x), *trees)


def lookups(size: Size) -> dict:
    """Return {case: (the lookup of the ensemble, one lookup per member)}. Tables of members are parts of the stacks."""
    features = size.features
    acts = lambda tables, ids: fr.lookup(tables, ids, features).values
    all_tables = stack([fr.init(key, size.configs) for key in fr.split(fr.key(0), MEMBERS)])
    tables = [{n: w[i] for n, w in all_tables.items()} for i in range(MEMBERS)]
    ids = [make_batch(size, seed).ids for seed in range(MEMBERS)]
    all_ids, by_tables, by_ids = stack(ids), vmap(acts, in_dims=(0, None)), vmap(acts, in_dims=(None, 0))
    cases = {}
    for how, wrap in {"eager": lambda f: f, "compiled": fr.jit}.items():
        one, of_tables, of_ids = wrap(acts), wrap(by_tables), wrap(by_ids)
        cases[f"lookup, stacked tables, {how}"] = (
            lambda f=of_tables: f(all_tables, ids[0]), lambda f=one: [f(t, ids[0]) for t in tables],
        )  # fmt: skip
        cases[f"lookup, stacked ids, {how}"] = (
            lambda f=of_ids: f(tables[0], all_ids), lambda f=one: [f(tables[0], i) for i in ids],
        )  # fmt: skip
    return cases


def training(step, states, batches, compiled: bool) -> tuple:
    """Return (one step of the ensemble, one step of each member)."""
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
        return [m["loss"] for _, m in made]

    return ensemble, runs


def measured(cases: dict, rounds: int) -> dict:
    figures = {}
    for name, (ensemble, runs) in cases.items():
        for _ in range(3):
            torch.testing.assert_close(ensemble(), torch.stack(runs()), rtol=1e-4, atol=1e-5)
        times = interleave({"ensemble": ensemble, "runs": runs}, rounds=rounds)
        figures[name] = {
            "ensemble_ms": round(median_ms(times["ensemble"]), 3),
            "runs_ms": round(median_ms(times["runs"]), 3),
            "ratio": spread(ratios(times["ensemble"], times["runs"])),
        }
    return figures


def training_cases(size: Size) -> tuple[dict, int]:
    """Return (the cases of whole steps, the number of parameters of a member)."""
    hidden = fr.nn.mlp((size.tables * size.dim, 64, 32, 1))
    step, batches = make_step(hidden, size), [make_batch(size, seed) for seed in range(16)]
    fresh = lambda key: step.init(fr.Params(fr.init(key, size.configs), hidden.init(key)), key)
    states = [fresh(key) for key in fr.split(fr.key(0), MEMBERS)]
    cases = {
        "step, eager": training(step, states, batches, compiled=False),
        "step, compiled and donated": training(step, states, batches, compiled=True),
    }
    return cases, sum(x.numel() for x in tree_leaves(states[0].params))


def main(rounds: int = 40, rounds_of_lookups: int = 400) -> None:
    torch.set_num_threads(1)
    how = {"threads": 1, "rounds": rounds, "rounds_of_lookups": rounds_of_lookups, "law": "green"}
    for name, size in {"small": SMALL, "large": LARGE}.items():
        figures, about = measured(lookups(size), rounds_of_lookups), {}
        if size is SMALL:
            cases, about["parameters"] = training_cases(size)
            figures |= measured(cases, rounds)
        shape = {"members": MEMBERS, **size._asdict()}
        record("ensemble", {"size": name, "shape": shape, **about, **how, "cases": figures})


if __name__ == "__main__":
    main()

"""Compares ensembles with runs of their members. One call of each kernel serves all members.

    python bench/ensemble.py            # eight members by vmap, and sixteen learning rates by `fr.sweep`
    python bench/ensemble.py --sweeps   # the learning rates alone

The small size has four tables of 1,000 rows x 16, with 128 bags of 4 ids each. The large size has 26 tables of 20,000
rows x 16, with 512 bags of 4 ids each. The cases are a lookup in stacked tables and a lookup of stacked ids, for both
sizes, eager and compiled. Further cases are training steps of the small size (an MLP, row-wise Adagrad and Adam),
eager, and compiled with donation. A sweep is sixteen learning rates for both sizes: its compiled and donated step
against sixteen steps of one program that takes the rate. Times are those of the processor, on one thread. The law comes
first: an ensemble gives the results of the runs.
"""

import argparse
import functools
import time
from typing import NamedTuple

import torch
from measure import interleave, median_ms, ratios, record, spread
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

import funcrec as fr

MEMBERS = 8
RATES = torch.logspace(-4, -1, 16, dtype=torch.float64)


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


def make_step(hidden, size: Size, lr: float | torch.Tensor = 0.01) -> fr.TrainStep:
    features = size.features

    def loss_fn(params, batch):
        acts = fr.lookup(params.tables, batch.ids, features).values
        logits = hidden.apply(params.dense, acts).squeeze(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)

    dense = fr.optim.dense(torch.optim.Adam, lr=lr)
    return fr.train_step(loss_fn, sparse=fr.optim.rowwise_adagrad(lr=lr), dense=dense)


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
        times = interleave({"ensemble": ensemble, "runs": runs}, rounds=rounds, clock=time.process_time)
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


def sweep_cases(size: Size) -> dict:
    """Return {case: (one step of sixteen learning rates, one step of each of sixteen runs)}, compiled and donated."""
    hidden = fr.nn.mlp((size.tables * size.dim, 64, 32, 1))
    batches = [make_batch(size, seed) for seed in range(16)]
    params = fr.Params(fr.init(fr.key(0), size.configs), hidden.init(fr.key(1)))
    of_rate = functools.partial(make_step, hidden, size)
    many = fr.jit(fr.sweep(lambda lr: of_rate(lr), {"lr": RATES}), donate=("state",))
    one = fr.jit(lambda rate, state, batch: of_rate(rate)(state, batch), donate=("state",))
    held = {"all": many.init(params), "each": [fr.copy(of_rate(0.1).init(params)) for _ in RATES], "turn": [0, 0]}

    def next_batch(which: int) -> fr.Batch:
        held["turn"][which] += 1
        return batches[held["turn"][which] % len(batches)]

    def ensemble():
        held["all"], metrics = many(held["all"], next_batch(0))
        return metrics["loss"]

    def runs():
        batch = next_batch(1)
        made = [one(rate, state, batch) for rate, state in zip(RATES, held["each"], strict=True)]
        held["each"] = [state for state, _ in made]
        return [metrics["loss"] for _, metrics in made]

    return {"sixteen learning rates, compiled and donated": (ensemble, runs)}


def main(rounds: int = 40, rounds_of_lookups: int = 400) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", action="store_true", help="the learning rates alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    how = {"threads": 1, "rounds": rounds, "law": "green", "clock": "processor"}
    for name, size in {"small": SMALL, "large": LARGE}.items():
        shape = {"members": len(RATES), **size._asdict()}
        figures = measured(sweep_cases(size), rounds)
        record("ensemble", {"size": name, "shape": shape, **how, "cases": figures})
    if asked.sweeps:
        return
    for name, size in {"small": SMALL, "large": LARGE}.items():
        figures, about = measured(lookups(size), rounds_of_lookups), {}
        if size is SMALL:
            cases, about["parameters"] = training_cases(size)
            figures |= measured(cases, rounds)
        shape = {"members": MEMBERS, **size._asdict()}
        record(
            "ensemble",
            {"size": name, "shape": shape, **about, **how, "rounds_of_lookups": rounds_of_lookups, "cases": figures},
        )


if __name__ == "__main__":
    main()

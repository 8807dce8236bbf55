"""An HSTU ranker, trained on generated histories in order of time: MLPerf's DLRMv3, small.

    python -m funcrec.examples.hstu --out runs/hstu

Each timestamp brings the requests of its active users; a request has candidates that its user then rates. The program
trains once on each request of the first timestamps, in order of time, and then scores the requests of the last ten. It
prints normalised entropy, accuracy and AUC of the ranker, of the share of likes, of two counts, and of the generator,
which knows the probability of each label. It writes result.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import funcrec as fr
from funcrec.files import write_whole

NUM_CATEGORIES, HELD_OUT = 128, 10
MODEL: dict[str, Any] = {
    "dim": 64,
    "num_layers": 2,
    "num_heads": 2,
    "qk_dim": 32,
    "linear_dim": 32,
    "hidden": 64,
    "head": 64,
}


class Scores(NamedTuple):
    """Predictions of candidates, and their labels."""

    predictions: dict[str, Tensor]
    label: Tensor


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    torch.manual_seed(0)
    data, model = make_data(options), make_model(options)
    step = fr.train_step(
        fr.models.ranker_loss(model), sparse=fr.optim.adam(lr=options.table_lr),
        dense=fr.optim.dense(torch.optim.Adam, lr=options.lr), has_aux=True, merge=fr.models.merge_stats,
    )  # fmt: skip
    for_params, for_steps = fr.split(fr.key(options.seed))
    state = step.init(model.init(for_params), for_steps)
    run = fr.jit(step, donate=("state",)) if options.compile else step
    counts = Counts.empty(options)
    trained, tokens, seconds = [], 0, 0.0
    for t in range(options.timestamps - HELD_OUT):
        begun, losses = time.perf_counter(), []
        for batch in requests(data, t, options):
            counts = counts.add(batch)
            tokens += int(batch.ids["item"].lengths.sum()) + batch.label.numel() + batch.label.shape[0]
            started = time.perf_counter()
            state, metrics = run(state, batch)
            seconds += time.perf_counter() - started
            losses.append(metrics["loss"])
        trained.append({"timestamp": t, "loss": float(torch.stack(losses).mean()), "steps": len(losses)})
        elapsed = time.perf_counter() - begun
        print(f"timestamp {t:3d}  loss {trained[-1]['loss']:.4f}  {len(losses)} steps in {elapsed:.0f} s", flush=True)
    params = fr.Params(state.tables, state.dense)
    found = judge(scores_of(data, model, params, counts, options))
    report(options, params, trained, tokens / seconds, found)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m funcrec.examples.hstu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--users", type=int, default=3000)
    parser.add_argument("--items", type=int, default=128 * 150, help="about 50 samples each by default, as in DLRMv3")
    parser.add_argument("--timestamps", type=int, default=30, help="the last ten are held out (default %(default)s)")
    parser.add_argument("--length", type=int, default=16, help="mean samples of an active user at a timestamp")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--history", type=int, default=96, help="the most positions of a history")
    parser.add_argument("--eval-users", type=int, default=1000, help="requests of each held-out timestamp, at most")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the dense parameters (default %(default)s)")
    parser.add_argument("--table-lr", type=float, default=5e-3, help="of the tables (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters, dropout and the data")
    parser.add_argument("--compile", action="store_true", help="compile the step")
    parser.add_argument("--out", type=Path, default=Path("runs/hstu"), help="a folder for result.json")
    options = parser.parse_args(argv)
    for name in ("users", "items", "length", "candidates", "history", "eval_users", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.timestamps <= HELD_OUT:
        parser.error(f"--timestamps must be more than {HELD_OUT}, the held-out ones")
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def make_data(options: argparse.Namespace) -> fr.data.GeneratedHistories:
    return fr.data.generated_histories(
        fr.fold_in(fr.key(options.seed), 7), num_users=options.users, num_items=options.items,
        num_categories=NUM_CATEGORIES, num_timestamps=options.timestamps, length=options.length,
        num_candidates=options.candidates, max_history=options.history,
    )  # fmt: skip


def make_model(options: argparse.Namespace) -> fr.models.HstuRanker:
    """Return the ranker of DLRMv3 with fewer and smaller layers."""
    dim = MODEL["dim"]
    sizes = {"item": options.items, "category": NUM_CATEGORIES, "user": options.users}
    tables = [fr.TableConfig(name, size, dim) for name, size in sizes.items()]
    sequence = lambda name, table, most: fr.FeatureConfig(name, table=table, pooling="none", max_length=most)
    return fr.models.hstu_ranker(
        tables,
        history=[sequence(name, name, options.history) for name in ("item", "category")],
        candidates=[sequence(f"candidate_{name}", name, options.candidates) for name in ("item", "category")],
        context=[fr.FeatureConfig("user", table="user", max_length=1)],
        action="action", time="time", query_time="query_time", action_std=1.0,
        normalizer=float(options.history), num_positions=options.history + 1, concatenate=True, **MODEL,
    )  # fmt: skip


def requests(data: fr.data.GeneratedHistories, t: int, options: Any, most: int | None = None) -> Iterator[fr.Batch]:
    """Yield the batches of a timestamp's requests. The last batch of a timestamp is full: it repeats its last row with
    weight 0."""
    rows = data.requests(t)[:most]
    load = fr.data.loader(data, rows, options.batch_size, pad_last=True, workers=1)
    return (batch for _, batch in load())


class Counts(NamedTuple):
    """Likes and ratings so far, by category and by item."""

    category: Tensor
    item: Tensor

    @staticmethod
    def empty(options: argparse.Namespace) -> "Counts":
        return Counts(torch.zeros(2, NUM_CATEGORIES), torch.zeros(2, options.items))

    def add(self, batch: fr.Batch) -> "Counts":
        assert batch.weight is not None
        weight = batch.weight[:, None].expand(batch.label.shape).flatten()
        both = torch.stack([batch.label.flatten() * weight, weight])
        return Counts(
            *(
                old.index_add(1, batch.ids[f"candidate_{name}"].to_padded(batch.label.shape[1]).flatten(), both)
                for name, old in zip(self._fields, self, strict=True)
            )
        )

    def predict(self, batch: fr.Batch) -> dict[str, Tensor]:
        """Return the share of likes of each candidate's category and item, shrunk towards the share of all."""
        share = self.category[0].sum() / self.category[1].sum()
        out = {"share of likes": share.expand(batch.label.shape)}
        for name, (likes, ratings) in zip(self._fields, self, strict=True):
            ids = batch.ids[f"candidate_{name}"].to_padded(batch.label.shape[1])
            out[f"likes by {name}"] = ((likes + 4 * share) / (ratings + 4))[ids]
        return out


def scores_of(data: Any, model: Any, params: fr.Params, counts: Counts, options: argparse.Namespace) -> Scores:
    """Return the predictions of all held-out candidates, each from the history up to the timestamp before."""
    found, labels = {}, []
    for t in range(options.timestamps - HELD_OUT, options.timestamps):
        for batch in requests(data, t, options, options.eval_users):
            rows = batch.ids["user"].values[: batch.ids.num_bags] + t * options.users
            logits = model.apply(params, batch)
            ours = {"hstu": logits.to_padded(options.candidates)[:, :, 0].sigmoid(), **counts.predict(batch)}
            ours["the generator"] = data.chances(rows)
            assert batch.weight is not None
            real = batch.weight > 0
            for name, p in ours.items():
                found.setdefault(name, []).append(p[real].double().flatten())
            labels.append(batch.label[real].double().flatten())
    return Scores({name: torch.cat(parts) for name, parts in found.items()}, torch.cat(labels))


def judge(scores: Scores) -> dict[str, dict[str, float]]:
    """Return normalised entropy, accuracy and AUC of each predictor."""
    metrics = {"ne": fr.metrics.normalized_entropy(), "accuracy": fr.metrics.accuracy()}
    found = {}
    for name, p in scores.predictions.items():
        values = {k: float(m.compute(m.update(m.init(), p, scores.label))) for k, m in metrics.items()}
        found[name] = {**values, "auc": float(fr.metrics.exact_auc(p, scores.label))}
    return found


def report(options: Any, params: fr.Params, trained: list[Any], tokens_per_s: float, found: dict[Any, Any]) -> None:
    print(f"{'':16}{'NE':>8}{'accuracy':>10}{'AUC':>8}")
    for name, x in found.items():
        print(f"{name:16}{x['ne']:8.4f}{x['accuracy']:10.4f}{x['auc']:8.4f}")
    print(f"{tokens_per_s:,.0f} tokens/s in training")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    result = {
        "options": settings, "model": MODEL, "num_parameters": fr.models.num_parameters(params), "trained": trained,
        "tokens_per_s": tokens_per_s, "held_out": found, "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }  # fmt: skip
    write_whole(
        "result.json", options.out / "result.json", lambda file: file.write(json.dumps(result, indent=1).encode())
    )


if __name__ == "__main__":
    sys.exit(main())

"""Models of the next item on MovieLens-1M, trained on jagged histories and judged by full ranking.

    python -m funcrec.examples.sequence --model sasrec

The protocol, and the numbers to reach, are those of Klenitskiy and Vasilev (RecSys 2023): 6,040 users, the 3,416 items
with 5 ratings or more, 999,611 ratings in time order (ratings of equal times in the order of the file). The last item
of each user is the test, the one before it the validation. All items are ranked except those that the user has seen.
With --min-count 1 it is that of eSASRec (RecSys 2025), which published HSTU's number: all 3,706 items and 1,000,209
ratings. A run writes checkpoint.pt and result.json into --out; with --resume it continues, and ends with the same bits.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import funcrec as fr
from funcrec.files import write_whole

PUBLISHED = {  # test HR@10 and NDCG@10 by (model, --min-count)
    ("sasrec", 5): (0.3152, 0.1821),  # with all items in the loss, of Klenitskiy and Vasilev (RecSys 2023)
    ("sasrec", 1): (0.2929, 0.1684),  # with 256 drawn items, of eSASRec (RecSys 2025), as HSTU
    ("hstu", 1): (0.3037, 0.1719),
}
MODELS: dict[str, Callable[..., Any]] = {
    "gru4rec": lambda tables, history, o: fr.models.gru4rec(
        tables, history, max_length=o.max_length, dropout=o.dropout
    ),
    "hstu": lambda tables, history, o: fr.models.hstu(
        tables, history, layers=o.blocks, heads=o.heads, max_length=o.max_length, dropout=o.dropout
    ),
    "sasrec": lambda tables, history, o: fr.models.sasrec(
        tables, history, blocks=o.blocks, heads=o.heads, max_length=o.max_length, dropout=o.dropout
    ),
}
EVAL_BATCH = 128  # its activations stay in the cache: 512 takes twice the time
K = 10


class Job(NamedTuple):
    """The values that a run needs and that never change."""

    options: argparse.Namespace
    model: fr.models.SequenceModel
    train: fr.data.Histories
    valid: fr.data.Histories
    test: fr.data.Histories
    num_items: int


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    job = make_job(options)
    step = fr.train_step(
        loss_of(job.model, options),
        sparse=fr.optim.adam(options.lr),
        dense=fr.optim.dense(torch.optim.Adam, lr=options.lr),
    )
    for_params, for_steps, for_order = fr.split(fr.key(options.seed), 3)
    state = step.init(job.model.init(for_params), for_steps)
    load = fr.data.loader(job.train, None, options.batch_size, key=for_order, pad_last=True, bucket=True, workers=1)
    began = time.process_time()
    done = fr.fit(
        fr.jit(step, donate=("state",)), state, load, epochs=options.epochs,
        evaluate=lambda params: judged(job, params, job.valid, "valid_"), monitor=f"valid_ndcg@{K}",
        patience=options.patience, checkpoint=options.out / "checkpoint.pt", resume=options.resume,
        overwrite=options.overwrite, settings=settings_of(options), callbacks=[print_scores(began)], progress=False,
    )  # fmt: skip
    if done.stopped:
        return 128 + done.stopped
    report(job, done)
    return 0


def loss_of(model: fr.models.SequenceModel, options: argparse.Namespace) -> Callable[..., Any]:
    """Return the loss over all items, or over --negatives drawn items."""
    drawn = {"loss": "sampled_softmax", "num_negatives": options.negatives} if options.negatives else {}
    return fr.models.next_item_loss(model, temperature=options.temperature, **drawn)


def print_scores(began: float) -> Callable[..., Any]:
    """Return a callback that prints a line after each epoch."""

    def on_record(record: fr.loop.Record) -> None:
        if record.when == "epoch":
            h, best = record.metrics, "  best" if record.is_best else ""
            scores = f"valid HR@{K} {h[f'valid_hit_rate@{K}']:.4f}  NDCG@{K} {h[f'valid_ndcg@{K}']:.4f}"
            used = f"{h['seconds']:.1f} s, {time.process_time() - began:.0f} s of the processor so far"
            print(f"epoch {h['epoch']:3d}  loss {h['loss']:.4f}  {scores}  {used}{best}", flush=True)

    return on_record


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m funcrec.examples.sequence", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=MODELS, default="sasrec")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--max-length", type=int, default=200, help="the latest items that a model reads")
    parser.add_argument("--negatives", type=int, default=0, help="items drawn for each loss (default 0: all items)")
    parser.add_argument("--temperature", type=float, default=1.0, help="that divides scores in the loss")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--batch-size", type=int, default=128, help="users")
    parser.add_argument("--epochs", type=int, default=100, help="at most (default %(default)s)")
    parser.add_argument("--patience", type=int, default=10, help="epochs without a better valid NDCG before the end")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters, the order and dropout")
    parser.add_argument("--data", help="a folder with ml-1m.inter, .user and .item; without it they are fetched once")
    parser.add_argument("--min-count", type=int, default=5, help="the least number of ratings of users and items")
    parser.add_argument("--out", type=Path, help="a folder for the results (default runs/MODEL)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--overwrite", action="store_true", help="begin again in a folder that holds a run")
    options = parser.parse_args(argv)
    for name in ("dim", "blocks", "heads", "max_length", "batch_size", "epochs", "patience", "min_count"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.negatives < 0 or not options.temperature > 0:
        parser.error("--negatives must be at least 0, and --temperature above 0")
    options.out = options.out or Path("runs") / options.model
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that must not change between a run and its continuation."""
    return {
        k: v for k, v in vars(options).items() if k not in ("out", "resume", "overwrite", "epochs", "patience", "data")
    }


def make_job(options: argparse.Namespace) -> Job:
    """Return the job: ratings of users and items that are frequent enough, split by leaving out the last two."""
    try:
        ratings = fr.data.movielens_1m(options.data)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from error
    rows = fr.data.k_core(ratings.user, ratings.item, options.min_count)
    user, time_of = ratings.user[rows], ratings.timestamp[rows]
    kept, item = ratings.item[rows].unique(return_inverse=True)
    train, valid, test = fr.data.leave_one_out(user, time_of)
    before = torch.cat([train, valid])
    cut = {"max_length": options.max_length}
    of = lambda rows, held_out, **how: fr.data.histories(user, item, time_of, rows=rows, held_out=held_out, **how)
    table = fr.TableConfig("item", len(kept), options.dim, initializer=fr.normal(0.02))
    model = MODELS[options.model]((table,), fr.FeatureConfig("history", table="item", pooling="none"), options)
    parts = of(train, None, max_length=options.max_length + 1), of(train, valid, **cut), of(before, test, **cut)
    print(f"{len(user):,} ratings, {parts[0].num_rows:,} users, {len(kept):,} items", flush=True)
    return Job(options, model, *parts, len(kept))


def judged(job: Job, params: fr.Params, data: fr.data.Histories, prefix: str) -> dict[str, float]:
    """Return the hit rate and NDCG of a full ranking of all items that a user has not seen."""
    metrics = {f"{prefix}hit_rate@{K}": fr.metrics.hit_rate(K), f"{prefix}ndcg@{K}": fr.metrics.ndcg(K)}
    batches = fr.data.batches(data, None, EVAL_BATCH)
    return fr.evaluate_retrieval(
        job.model.query, params, batches, job.model.items(params), "target", seen="seen", k=K, metrics=metrics
    )


def report(job: Job, done: fr.Fitted) -> None:
    """Write result.json with the test scores of the best epoch, and print them."""
    options, test = job.options, judged(job, done.best, job.test, "test_")
    best = done.history[fr.loop.best_epoch(done.history, f"valid_ndcg@{K}") or 0]
    result = {
        **settings_of(options),
        "num_parameters": fr.models.num_parameters(done.best),
        "best_epoch": best["epoch"],
        **{k: v for k, v in best.items() if k.startswith("valid_")},
        **test,
        "published": PUBLISHED.get((options.model, options.min_count)),
        "history": done.history,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }
    text = (json.dumps(result, indent=2) + "\n").encode()
    write_whole("result.json", options.out / "result.json", lambda file: file.write(text))
    known = PUBLISHED.get((options.model, options.min_count))
    said = "" if known is None else f" (published {known[0]:.4f}, {known[1]:.4f})"
    print(f"best epoch {best['epoch']}, test HR@{K} {test[f'test_hit_rate@{K}']:.4f}, "
          f"NDCG@{K} {test[f'test_ndcg@{K}']:.4f}{said}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""Days of ids that come and go: a vocabulary of a tenth of them, beside all ids, a hash, and a table in a file.

    python -m funcrec.examples.days --out runs/days
    python -m funcrec.examples.days --data movielens --out runs/days-ml1m     # MovieLens-1M in order of time

Each day's examples are first predicted and then trained on, once. Four tables of the same model:

    all         a row for each id of all days
    vocabulary  `fr.dynamic_tables`: a tenth as many rows, which new ids take from those not seen for longest (films of
                MovieLens: from those seen least, by their age)
    hashed      a tenth as many rows, which ids share by their hash
    file        all rows in a file, a twentieth of them in memory (`fr.cached_step`): the numbers of "all", bit for bit

Generated days: users and items join every day, and stay for a tenth of the days. The program prints the AUC of each
day, and writes result.json and auc.png.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import funcrec as fr
from funcrec.files import write_whole

SPREAD = 0x9E3779B97F4A7C15 - 2**64  # an odd number: number · SPREAD is another id for each number
FEATURES = [fr.FeatureConfig(n, table=n) for n in ("user", "item")]
LATENT = 4  # dimensions of the generated tastes


class Stream(NamedTuple):
    """The examples of all days, in order of time. ids: i64[N] each, any integers; label: f[N]; days: i64[D + 1]."""

    user: Tensor
    item: Tensor
    label: Tensor
    days: Tensor


class Contender(NamedTuple):
    """One way to hold the tables. predict: (state, batch) -> logits; step: (state, batch) -> (state, metrics). rows: of
    all tables, in memory."""

    state: Any
    step: Callable[..., Any]
    predict: Callable[..., Any]
    rows: int
    close: Callable[[], Any] = lambda: None


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    stream = movielens(options) if options.data == "movielens" else generated(options)
    numbers = {n: getattr(stream, n).unique(return_inverse=True) for n in ("user", "item")}
    sizes = {n: len(ids) for n, (ids, _) in numbers.items()}
    as_numbers = stream._replace(**{n: number for n, (_, number) in numbers.items()})
    print(f"{len(stream.label):,} examples, {sizes['user']:,} users, {sizes['item']:,} items, {options.days} days")
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        contenders = {
            "all": (whole(options, sizes), as_numbers),
            "vocabulary": (following(options, sizes), stream),
            "hashed": (hashed(options, sizes), stream),
            "file": (in_a_file(options, sizes, Path(folder)), as_numbers),
        }
        found = {name: judged(own, data, options) for name, (own, data) in contenders.items()}
        report(options, sizes, {n: own.rows for n, (own, _) in contenders.items()}, found)
        for own, _ in contenders.values():
            own.close()
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m funcrec.examples.days", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", choices=["generated", "movielens"], default="generated")
    parser.add_argument("--data-dir", type=Path, help="a folder with MovieLens' files; they are fetched otherwise")
    parser.add_argument("--users", type=int, default=60_000, help="of all generated days (default %(default)s)")
    parser.add_argument("--items", type=int, default=20_000, help="of all generated days (default %(default)s)")
    parser.add_argument("--days", type=int, default=30, help="an id stays for a tenth of them (default %(default)s)")
    parser.add_argument("--examples", type=int, default=40_000, help="of a generated day (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.1, help="rows of the vocabulary by ids (default %(default)s)")
    parser.add_argument(
        "--in-memory", type=float, default=0.05, help="rows in memory of the file (default %(default)s)"
    )
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/days"), help="a folder for result.json and auc.png")
    options = parser.parse_args(argv)
    for name in ("users", "items", "days", "examples", "dim", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("share", "in_memory"):
        if not 0 < getattr(options, name) <= 1:
            parser.error(f"--{name.replace('_', '-')} must be in (0, 1]")
    options.out.mkdir(parents=True, exist_ok=True)
    return options


# -- the examples ------------------------------------------------------------------------------------------------------


def generated(options: argparse.Namespace) -> Stream:
    """Return days in which users and items come and go. A label depends on the tastes of both, and on the item."""
    g = torch.Generator().manual_seed(options.seed)
    tastes = {
        n: torch.randn(size, LATENT, generator=g) for n, size in (("user", options.users), ("item", options.items))
    }
    liked, parts = torch.randn(options.items, generator=g), []
    for day in range(options.days):
        user, item = (drawn(len(tastes[n]), day, options, g) for n in ("user", "item"))
        logit = (tastes["user"][user] * tastes["item"][item]).sum(1) + liked[item]
        label = (torch.rand(len(user), generator=g) < logit.sigmoid()).float()
        parts.append((user * SPREAD, item * SPREAD, label))
    days = torch.arange(options.days + 1) * options.examples
    user, item, label = (torch.cat(x) for x in zip(*parts, strict=True))
    return Stream(user, item, label, days)


def drawn(size: int, day: int, options: argparse.Namespace, g: torch.Generator) -> Tensor:
    """Return the numbers of those that the examples of a day show: of all that are there, a few more often."""
    stay = max(1, options.days // 10)
    each = size / (options.days + stay - 1)  # so many join in a day
    first, last = int(day * each), int((day + stay) * each)
    u = torch.rand(options.examples, generator=g)
    return first + (u * u * (last - first)).long()


def movielens(options: argparse.Namespace) -> Stream:
    """Return the ratings of MovieLens-1M in order of time, in days of equal numbers. Four stars and more are liked."""
    r = fr.data.movielens_1m(options.data_dir)
    order = r.timestamp.argsort(stable=True)
    days = torch.linspace(0, len(order), options.days + 1).long()
    ids = (r.user[order].long() * SPREAD, r.item[order].long() * SPREAD)
    return Stream(*ids, (r.rating[order] >= 4).float(), days)


def batches_of(stream: Stream, day: int, size: int) -> list[fr.Batch]:
    """Return the batches of a day. The last one is full: it repeats its last example with weight 0."""
    out = []
    first, last = stream.days[day : day + 2].tolist()
    for at in range(first, last, size):
        rows = torch.arange(at, at + size)
        weight = (rows < last).float()
        rows = rows.clamp(max=last - 1)
        values = torch.cat([stream.user[rows], stream.item[rows]])
        ids = fr.KeyedJaggedTensor.from_lengths(["user", "item"], values, torch.ones(2 * size, dtype=torch.int64))
        out.append(fr.Batch(ids, stream.label[rows], weight=weight))
    return out


# -- the contenders ----------------------------------------------------------------------------------------------------


def logits(params: fr.Params, batch: fr.Batch, features: Any = FEATURES) -> Tensor:
    """Return u · v + the bias of both, f[B]. The last number of a row is its bias."""
    x = fr.lookup(params.tables, batch.ids, features)
    user, item = x["user"], x["item"]
    return (user[:, :-1] * item[:, :-1]).sum(1) + user[:, -1] + item[:, -1] + params.dense


def trained(options: argparse.Namespace, features: Any = FEATURES, **how: Any) -> tuple[Any, Any, Callable[..., Any]]:
    """Return the optimizer of the tables, a step, and predictions."""
    loss = lambda params, batch: fr.losses.bce(logits(params, batch, features), batch.label, batch.weight)
    sparse = fr.optim.rowwise_adagrad(options.lr)
    step = fr.train_step(loss, sparse=sparse, dense=fr.optim.dense(torch.optim.SGD, lr=0.01), **how)
    predict = lambda params, batch: logits(params, batch, features)
    return sparse, compiled(step, options, donate=("state",)), compiled(predict, options)


def compiled(fn: Callable, options: argparse.Namespace, **how: Any) -> Callable:
    return fn if options.eager else fr.jit(fn, **how)


def configs_of(options: argparse.Namespace, rows: dict[str, int]) -> list[fr.TableConfig]:
    return [fr.TableConfig(n, size, options.dim + 1, initializer=fr.normal(0.1)) for n, size in rows.items()]


def whole(options: argparse.Namespace, sizes: dict[str, int]) -> Contender:
    _, step, predict = trained(options)
    tables = fr.init(fr.key(options.seed), configs_of(options, sizes))
    state = step.init(fr.Params(tables, torch.zeros(())))
    return Contender(state, step, lambda state, batch: predict(state.params, batch), sum(sizes.values()))


def following(options: argparse.Namespace, sizes: dict[str, int]) -> Contender:
    """Return tables that follow a vocabulary each. A step admits ids in a program of its own, which writes in place."""
    key = fr.key(options.seed)
    policies: dict[str, Any] = {
        "user": "lru",
        "item": "distance_lfu" if options.data == "movielens" else "lru",
    }  # old films stay
    vocabularies = {n: fr.vocabulary(max(1, int(options.share * s)), policy=policies[n]) for n, s in sizes.items()}
    configs = configs_of(options, {n: v.num_embeddings for n, v in vocabularies.items()})
    follow = {
        c.name: fr.VocabularyConfig(vocabularies[c.name], [c], [f]) for c, f in zip(configs, FEATURES, strict=True)
    }
    _, step, predict = trained(options, admit=False)
    admit = compiled(fr.admission(step if options.eager else step.fn), options, donate=("state",))
    state = step.init(fr.Params(fr.dynamic_tables(fr.init(key, configs), follow, key=key), torch.zeros(())))
    rows = sum(v.capacity for v in vocabularies.values())
    run = lambda state, batch: step(admit(state, batch)[0], batch)
    return Contender(state, run, lambda state, batch: predict(state.params, batch), rows)


def hashed(options: argparse.Namespace, sizes: dict[str, int]) -> Contender:
    rows = {n: -(-max(1, int(options.share * size)) // 128) * 128 for n, size in sizes.items()}  # as the vocabulary
    features = [fr.FeatureConfig(f.name, table=f.table, hash=fr.multiply_shift()) for f in FEATURES]
    _, step, predict = trained(options, features)
    state = step.init(fr.Params(fr.init(fr.key(options.seed), configs_of(options, rows)), torch.zeros(())))
    return Contender(state, step, lambda state, batch: predict(state.params, batch), sum(rows.values()))


def in_a_file(options: argparse.Namespace, sizes: dict[str, int], folder: Path) -> Contender:
    """Return tables whose rows are in files, a part of them in memory."""
    sparse, step, predict = trained(options, admit=False)
    stores, caches = {}, {}
    for config, feature in zip(configs_of(options, sizes), FEATURES, strict=True):
        n = config.name
        stores[n] = fr.table_store([config], sparse, key=fr.key(options.seed), path=folder / n, durable=False)
        room = max(int(options.in_memory * sizes[n]), 4 * options.batch_size)
        caches[n] = fr.CacheConfig(stores[n], room, [feature])
    tables = fr.cached_tables({}, caches)
    cached = fr.cached_step(step, stores)
    state = cached.init(fr.Params(tables, torch.zeros(())))
    rows = sum(v.capacity for v in tables.vocabularies.values())
    predict_rows = lambda state, batch: predict(*cached.read(state.params, batch))
    return Contender(state, cached, predict_rows, rows, lambda: [x.close() for x in stores.values()])


# -- judging -----------------------------------------------------------------------------------------------------------


def is_real(batch: fr.Batch) -> torch.Tensor:
    """Return which examples are not padding, bool[B]."""
    assert batch.weight is not None
    return batch.weight > 0


def judged(own: Contender, stream: Stream, options: argparse.Namespace) -> dict[str, Any]:
    """Return the AUC of each day, predicted before the step's training on it, and seconds of training."""
    state, aucs, seconds = own.state, [], 0.0
    for day in range(options.days):
        batches = batches_of(stream, day, options.batch_size)
        found = torch.cat([own.predict(state, b)[is_real(b)] for b in batches])
        label = torch.cat([b.label[is_real(b)] for b in batches])
        aucs.append(float(fr.metrics.exact_auc(found, label)))
        began = time.perf_counter()
        for batch in batches:
            state, _ = own.step(state, batch)
        seconds += time.perf_counter() - began
    return {"auc": aucs, "seconds": round(seconds, 2)}


def report(options: argparse.Namespace, sizes: dict[str, int], rows: dict[str, int], found: dict[str, Any]) -> None:
    """Print a line for each day and each contender, and write result.json and auc.png."""
    print("day  " + "".join(f"{n:>12}" for n in found))
    for day in range(options.days):
        print(f"{day:3}  " + "".join(f"{x['auc'][day]:12.4f}" for x in found.values()))
    late = {n: sum(x["auc"][options.days // 2 :]) / len(x["auc"][options.days // 2 :]) for n, x in found.items()}
    for n, x in found.items():
        print(f"{n:12}AUC of the later half {late[n]:.4f}, {rows[n]:,} rows in memory, {x['seconds']} s of training")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    result = {"options": settings, "ids": sizes, "rows": rows, "found": found, "later_half": late}
    text = (json.dumps(result, indent=1) + "\n").encode()
    write_whole("result.json", options.out / "result.json", lambda file: file.write(text))
    figure = figure_of(found)
    write_whole("auc.png", options.out / "auc.png", lambda file: figure.savefig(file, dpi=120, format="png"))


def figure_of(found: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, x), style in zip(found.items(), ["-", "-", "-", ":"], strict=True):
        axes.plot(x["auc"], style, label=name)
    axes.set_xlabel("day")
    axes.set_ylabel("AUC before training on the day")
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())

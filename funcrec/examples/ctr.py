"""Click-through models on MovieLens-1M, trained by one compiled, donated, pure step.

    python -m funcrec.examples.ctr --model deepfm torchrun --nproc-per-node 2 -m funcrec.examples.ctr --model deepfm
    --plan row_wise

The protocol, and the AUC to reach, are those of RecBole's `ml-1m_context` benchmark (`funcrec.data.ctr_dataset`). A run
writes into --out: checkpoint.pt (before the first step, after each epoch, and on Ctrl-C and SIGTERM), result.json and
curve.png. With --resume a run ends with the same bits as without the interruption. On other ranks or under another
plan, its results are equal up to rounding. With --replicas, copies of the tables train separately. They become equal
every --sync-every steps of an epoch, at its end, and when a run is interrupted. Exit codes: 130 after Ctrl-C, 143 after
SIGTERM, 1 for an error, 2 for wrong options.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import funcrec as fr
from funcrec.examples import _folder as folder
from funcrec.examples import _ranks as ranks
from funcrec.examples import _signals as signals

PUBLISHED = {  # test AUC, RecBole 1.1.x, benchmark/md/ml-1m_context.md
    "lr": 0.8699,
    "fm": 0.8935,
    "dlrm": 0.8967,  # RecBole's PNN with inner products
    "widedeep": 0.8987,
    "deepfm": 0.8997,
    "dcnv2": 0.8998,
    "din": None,  # the benchmark has no histories
}
HISTORY = 50  # clicks
SPARSE = ("adam", "adamw", "partial_rowwise_adam", "adagrad", "rowwise_adagrad", "sgd", "rmsprop", "lion", "ftrl")
EVAL_BATCH = 8192


class Job(NamedTuple):
    """The values that a run needs and that never change."""

    options: argparse.Namespace
    split: fr.data.CtrSplit
    model: fr.models.Model
    mesh: fr.Mesh | None  # None for a single process
    init: Callable  # (params, key) -> the first state
    step: Callable[..., Any]  # a compiled function that reuses the memory of the state
    sync: Callable | None  # state -> the same state, with equal copies of its tables
    predict: Callable[..., Any]


def main(argv: list[str] | None = None) -> int:
    with signals.listen() as heard:
        options = parse(argv)
        job = make_job(options)
        try:
            with fr.loop.watch(job.mesh):
                return train(job, heard)
        except fr.loop.RankLost as error:
            error.add_note(how_to_go_on(options))
            raise
        except Exception as error:  # after a signal, the signal is the cause of any error
            if not heard.asked():
                raise
            told = f"interrupted in the midst of {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            print(f"{told}\n{how_to_go_on(options)}", file=sys.stderr, flush=True)
            return 128 + heard.asked()


def train(job: Job, heard: signals.Heard) -> int:
    """Return the exit code, after a run that begins or resumes and goes to its end or to a signal."""
    options = job.options
    path, has_begun = folder.checkpoint_path(options), False
    is_new = not (options.resume and path.exists())
    check_first_batch(job)

    def on_record(record: fr.loop.Record) -> None:
        nonlocal has_begun
        if record.when == "begin":
            has_begun = True
            heard.hold()
            if is_new and record.is_chief:
                folder.remove_results(options)
            if not is_new:
                announce(job, f"resumed at epoch {record.epoch}, batch {record.step % num_steps(job)}")
        elif record.when == "epoch":
            print_scores(job, record)

    try:
        done = fr.fit(
            job.step, start(job), loader_of(job),
            epochs=options.epochs, evaluate=lambda params: evaluate(job, params, job.split.valid, "valid_"),
            monitor="valid_auc", patience=options.patience, checkpoint=path, resume=not is_new,
            overwrite=options.overwrite, settings=folder.fixed_options(options), callbacks=[on_record],
            stop=heard.asked, mesh=job.mesh, sync=job.sync,
        )  # fmt: skip
    except OSError as error:
        whole = " The checkpoint before this one is whole: --resume goes on from it." if path.exists() else ""
        raise SystemExit(f"{error}\nThe run ends here.{whole}") from error
    except ValueError as error:
        if has_begun or is_new:
            raise
        raise SystemExit(f"--resume: {error}\n--overwrite begins again.") from error
    if done.stopped:
        announce(job, f"interrupted; {how_to_go_on(options)}")
        return 128 + done.stopped
    report(job, done)
    return 0


def how_to_go_on(options: argparse.Namespace) -> str:
    return f"the same command with --resume goes on from {folder.checkpoint_path(options)}"


def announce(job: Job, text: str) -> None:
    if fr.loop.is_chief(job.mesh):
        print(text, flush=True)


# -- the job -----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m funcrec.examples.ctr", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=PUBLISHED, default="deepfm")
    parser.add_argument("--optimizer", choices=SPARSE, default="adam", help="of the tables: touched rows only")
    parser.add_argument("--lr", type=float, default=0.005, help="of tables and dense parameters (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=100, help="at most (default %(default)s)")
    parser.add_argument("--patience", type=int, default=10, help="epochs without a better valid AUC before the end")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the parameters, the order and dropout; the split is the benchmark's"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="a folder with ml-1m.inter, .user and .item; without it they are fetched once")
    folder.add_options(parser)
    ranks.add_options(parser)
    options = parser.parse_args(argv)
    for name in ("batch_size", "epochs", "patience"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= options.lr < math.inf:
        parser.error(f"--lr must be a finite number of at least 0, and is {options.lr}")
    if options.device != "cpu" and not torch.accelerator.is_available():
        parser.error(f"--device {options.device}: this machine has no accelerator that torch can use")
    ranks.settle_options(parser, options)
    import_pyplot(parser)
    folder.settle_options(parser, options)
    return options


def import_pyplot(parser: argparse.ArgumentParser) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error("the learning curve needs matplotlib: pip install 'funcrec[plots]'")


def make_job(options: argparse.Namespace) -> Job:
    try:
        split = fr.data.ctr_dataset(fr.data.movielens_1m(options.data), history=HISTORY * (options.model == "din"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from error
    if options.batch_size > len(split.train):
        raise SystemExit(f"--batch-size {options.batch_size} is more than the {len(split.train)} rows to train on")
    split = fr.tree.to(split, options.device)
    model = fr.models.ml1m(options.model)
    for table in model.tables:
        if (ids := split.data.table_sizes.get(table.name, 0)) > table.num_embeddings:
            raise SystemExit(f"--data: table '{table.name}' has {table.num_embeddings} rows, and the data {ids} ids")
    mesh = ranks.mesh_of(options)
    sparse = getattr(fr.optim, options.optimizer)(lr=options.lr)
    plan = None if mesh is None else ranks.plan_of(options, model, mesh, sparse)
    dense = fr.optim.dense(torch.optim.Adam, lr=options.lr)
    step = fr.train_step(model, sparse=sparse, dense=dense, mesh=mesh, plan=plan)
    sync = ranks.sync_of(mesh, options.replicas)
    num_steps = fr.data.num_batches(len(split.train), options.batch_size, drop_last=True)
    fast = ranks.with_sync(fr.jit(step, donate=("state",)), sync, options.sync_every, num_steps)
    return Job(options, split, model, mesh, step.init, fast, sync, fr.jit(model.apply))


def start(job: Job) -> fr.TrainState:
    for_params, for_steps = fr.split(fr.key(job.options.seed))
    return job.init(fr.tree.to(job.model.init(for_params), job.options.device), for_steps)


def check_first_batch(job: Job) -> None:
    """Raise SystemExit if an id of the batch that all ranks share is outside its table.

    The model would read zeros for such an id and learn nothing."""
    _, batch = next(loader_of(job._replace(mesh=None))())
    try:
        fr.validate(batch, job.model.features, job.model.tables)
    except fr.CheckError as error:
        raise SystemExit(f"the first batch: {error}") from error


def num_steps(job: Job) -> int:
    return fr.data.num_batches(len(job.split.train), job.options.batch_size, drop_last=True)


def loader_of(job: Job) -> fr.data.Loader:
    """Return a loader of this process's rows. It drops an incomplete last batch. Those rows come in other epochs."""
    data, key = ranks.OwnRows(job.split.data, job.mesh), fr.fold_in(fr.key(job.options.seed), 1)
    return fr.data.loader(data, job.split.train, job.options.batch_size, key=key, drop_last=True, workers=1)


def evaluate(job: Job, params: fr.Params, rows: Tensor, prefix: str) -> dict[str, float]:
    """Return AUC and log loss of the model on these rows. Each rank reads its part and gets the whole result."""
    short = -len(rows) % (EVAL_BATCH * fr.loop.num_processes(job.mesh))
    padded = torch.cat([rows, rows[:1].expand(short)])  # whole batches: one shape is compiled
    weight = (torch.arange(len(padded), device=rows.device) < len(rows)).float()
    own = (fr.loop.own_part(x, job.mesh).split(EVAL_BATCH) for x in (padded, weight))
    batches = (replace(fr.data.take(job.split.data, chunk), weight=w) for chunk, w in zip(*own, strict=True))
    exact = {"auc": fr.metrics.exact_auc, "log_loss": lambda z, y, w: fr.losses.bce(z.double(), y, w.double())}
    metrics = {f"{prefix}{name}": metric for name, metric in exact.items()}
    return fr.evaluate(job.predict, params, batches, metrics, mesh=job.mesh)


def samples_per_s(job: Job, entry: Mapping[str, float]) -> float:
    return entry.get("samples_per_s", entry.get("steps_per_s", 0.0) * job.options.batch_size)


def print_scores(job: Job, record: fr.loop.Record) -> None:
    h, best = record.metrics, "  best" if record.is_best else ""
    scores = f"valid AUC {h['valid_auc']:.4f}  log loss {h['valid_log_loss']:.4f}"
    speed = f"{samples_per_s(job, h):,.0f} samples/s"
    announce(job, f"epoch {h['epoch']:3d}  loss {h['loss']:.4f}  {scores}  {speed}{best}")


# -- what a run leaves -------------------------------------------------------------------------------------------


def report(job: Job, done: fr.Fitted) -> None:
    """Write result.json and curve.png with the test scores of the best epoch, and print its AUC."""
    options = job.options
    test = evaluate(job, done.best, job.split.test, "test_")
    if not fr.loop.is_chief(job.mesh):
        return
    history = [{**h, "samples_per_s": samples_per_s(job, h)} for h in done.history]
    best = history[fr.loop.best_epoch(history, "valid_auc") or 0]
    result = {
        **folder.fixed_options(options),
        "mesh": options.axes,
        "plan": options.plan,
        "replicas": options.replicas,
        "sync_every": options.sync_every,
        "num_parameters": fr.models.num_parameters(done.best),
        "best_epoch": best["epoch"],
        "valid_auc": best["valid_auc"],
        **test,
        "published_test_auc": PUBLISHED[options.model],
        "history": history,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }
    folder.write_results(options, result, draw_curve(history, options))
    print(
        f"{options.model}: {result['num_parameters']:,} parameters, best epoch "
        f"{best['epoch']}, results in {options.out}"
    )
    published = PUBLISHED[options.model]
    print(f"test AUC {test['test_auc']:.4f}" + (f" (published {published:.4f})" if published else ""))


def draw_curve(history: list[dict[str, float]], options: argparse.Namespace) -> Any:
    from matplotlib.figure import Figure

    epochs = [h["epoch"] for h in history]
    figure = Figure(figsize=(7, 4), layout="constrained")
    loss, auc = figure.subplots(1, 2)
    loss.plot(epochs, [h["loss"] for h in history], label="train")
    loss.plot(epochs, [h["valid_log_loss"] for h in history], label="valid")
    loss.set(xlabel="epoch", ylabel="log loss", title=options.model)
    loss.legend()
    auc.plot(epochs, [h["valid_auc"] for h in history], label="valid")
    if PUBLISHED[options.model]:
        auc.axhline(PUBLISHED[options.model], linestyle="--", color="grey", label="published test")
    auc.axvline(fr.loop.best_epoch(history, "valid_auc") or 0, linestyle=":", color="grey", label="best epoch")
    auc.set(xlabel="epoch", ylabel="AUC")
    auc.legend()
    for axes in (loss, auc):
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


if __name__ == "__main__":
    sys.exit(main())

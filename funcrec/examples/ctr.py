"""Click-through models on MovieLens-1M, trained by one compiled, donated, pure step.

    python -m funcrec.examples.ctr --model deepfm
    torchrun --nproc-per-node 2 -m funcrec.examples.ctr --model deepfm --plan row_wise

The protocol, and the AUC to reach, are RecBole's `ml-1m_context` benchmark (`funcrec.data.ctr_dataset`). A run leaves
in --out: checkpoint.pt (before the first step, after each epoch, and on Ctrl-C and SIGTERM), result.json and curve.png.
With --resume a run goes on to the same bits as if it had not been interrupted; on other ranks or under another plan
too, but for their rounding. With --replicas copies of the tables train apart; they are made one every --sync-every
steps of an epoch, at its end, and when a run is interrupted. Exit codes: 130 after Ctrl-C, 143 after SIGTERM, 1 for
what went wrong, 2 for wrong options.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import funcrec as fr
from funcrec.core import map_tensors, tree_map
from funcrec.examples import _folder as folder
from funcrec.examples import _ranks as ranks
from funcrec.examples import _signals as signals

PUBLISHED = {  # test AUC, RecBole 1.1.x, benchmark/md/ml-1m_context.md
    "lr": 0.8699,
    "fm": 0.8935,
    "dlrm": 0.8967,  # there: PNN with inner products
    "widedeep": 0.8987,
    "deepfm": 0.8997,
    "dcnv2": 0.8998,
}
SPARSE = ("adam", "adamw", "partial_rowwise_adam", "adagrad", "rowwise_adagrad", "sgd", "rmsprop", "lion", "ftrl")
EVAL_BATCH = 8192


class Job(NamedTuple):
    """What a run needs and never changes."""

    options: argparse.Namespace
    split: fr.data.CtrSplit
    model: fr.models.Model
    mesh: fr.Mesh | None  # None for a lone process
    crew: Tensor | None  # the processes of all ranks; None for a lone one
    init: Callable  # params, key -> the first state
    place: Callable  # a plain state -> one for `step`
    step: Callable  # compiled; takes the state's memory
    sync: Callable  # a state -> the same with equal copies of its tables
    predict: Callable


class Run(NamedTuple):
    """What a run changes: all of it is in the checkpoint."""

    state: fr.TrainState
    position: fr.data.Position
    loss_sum: Tensor  # f64[], over the steps of this epoch
    best: fr.Params
    history: list[dict[str, float]]  # one entry per finished epoch


def main(argv: list[str] | None = None) -> int:
    with signals.listen() as heard:
        options = parse(argv)
        job = make_job(options)
        try:
            return train(job, heard)
        except Exception as error:  # whatever it is, a rank that ended or a signal is the cause
            gone = ranks.cause(error, job.crew)
            if not gone and not heard.asked():
                raise
            told = gone or f"interrupted in the midst of {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            print(f"{told}\n{how_to_go_on(options)}", file=sys.stderr, flush=True)
            return 1 if gone else 128 + heard.asked()


def train(job: Job, heard: signals.Heard) -> int:
    """Begin or go on, to the end or to a signal: the exit code."""
    options, is_new = job.options, not ranks.is_resumed(job.options, job.mesh)
    run = start(job) if is_new else resume(job)
    look_at_first_batch(job, run)
    heard.hold()
    if is_new:
        save(job, run)
        if ranks.is_chief(job.mesh):
            folder.remove_results(options)
    stop = ranks.agreed(heard.asked, job.mesh, options.device)
    while not (is_finished(run, options) or stop()):
        run = train_epoch(job, run, stop)
        save(job, run)
    if stop():
        say(job, f"interrupted; {how_to_go_on(options)}")
        return 128 + stop()
    report(job, run)
    return 0


def how_to_go_on(options: argparse.Namespace) -> str:
    return f"the same command with --resume goes on from {folder.checkpoint_path(options)}"


def say(job: Job, text: str) -> None:
    if ranks.is_chief(job.mesh):
        print(text, flush=True)


# -- the job -----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m funcrec.examples.ctr", description=__doc__.splitlines()[0])
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
        split = fr.data.ctr_dataset(fr.data.movielens_1m(options.data))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from error
    if options.batch_size > len(split.train):
        raise SystemExit(f"--batch-size {options.batch_size} is more than the {len(split.train)} rows to train on")
    split = tree_map(lambda x: x.to(options.device), split)
    model = fr.models.ml1m(options.model)
    for table in model.tables:
        if (ids := split.data.table_sizes.get(table.name, 0)) > table.num_embeddings:
            raise SystemExit(f"--data: table '{table.name}' has {table.num_embeddings} rows, and the data {ids} ids")
    mesh = ranks.mesh_of(options)
    plan = None if mesh is None else fr.Plan.uniform(options.plan, model.tables, mesh, replicas=options.replicas)
    sparse = getattr(fr.optim, options.optimizer)(lr=options.lr)
    step = fr.train_step(
        loss_and_stats(model),
        sparse=sparse,
        dense=fr.optim.dense(torch.optim.Adam, lr=options.lr),
        has_aux=True,
        merge=fr.models.merge_stats,
        mesh=mesh,
        plan=plan,
    )
    place = lambda state: state if mesh is None else fr.reshard(state, plan, mesh=mesh, sparse=sparse)
    fast = fr.jit(step, donate=("state",))
    sync = ranks.sync_of(mesh, options.replicas)
    crew = ranks.meet(mesh, options.device)
    return Job(options, split, model, mesh, crew, step.init, place, fast, sync, fr.jit(model.apply))


def loss_and_stats(model: fr.models.Model) -> Callable:
    """The model's loss without its logits: ranks would average them."""
    loss_fn = fr.models.loss(model)

    def loss(params: fr.Params, batch: fr.Batch, *, key: Tensor):
        value, aux = loss_fn(params, batch, key=key)
        return value, {"stats": aux["stats"]}

    return loss


def start(job: Job) -> Run:
    for_params, for_steps = fr.split(fr.key(job.options.seed))
    params = map_tensors(lambda x: x.to(job.options.device), job.model.init(for_params))
    state = job.init(params, for_steps)
    loss_sum = torch.zeros((), dtype=torch.float64, device=job.options.device)
    return Run(state, fr.data.Position(), loss_sum, map_tensors(torch.clone, params), [])


def look_at_first_batch(job: Job, run: Run) -> None:
    """The values of the whole batch, as every rank sees it: ids outside
    a table would read zeros, and nothing would be learnt."""
    _, batch = next(batches_of(job, run, job.split.data))
    try:
        fr.validate(batch, job.model.features, job.model.tables)
    except fr.CheckError as error:
        raise SystemExit(f"the first batch: {error}") from error


def is_finished(run: Run, options: argparse.Namespace) -> bool:
    epochs = len(run.history)
    return epochs >= options.epochs or (epochs > 0 and epochs - 1 - best_epoch(run.history) >= options.patience)


def best_epoch(history: list[dict[str, float]]) -> int:
    """The first epoch of the highest valid AUC; NaN is below every number."""
    auc = [h["valid_auc"] for h in history]
    return max(range(len(history)), key=lambda e: (not math.isnan(auc[e]), auc[e], -e))


# -- training ----------------------------------------------------------------------------------------------------


def train_epoch(job: Job, run: Run, stop: Callable[[], bool]) -> Run:
    """The rest of the epoch at run.position, and its evaluation; less when `stop` says so.

    The first step is not timed: it may compile.
    """
    state, loss_sum, position = run.state, run.loss_sum, run.position
    epoch, began, samples = position.epoch, None, 0
    for position, batch in progress(job, run):
        state, metrics = job.step(state, batch)
        loss_sum = loss_sum + metrics["loss"].double()
        if began is None:
            began = time.perf_counter()
        else:
            samples += job.options.batch_size
        if job.options.replicas and position.batch and position.batch % job.options.sync_every == 0:
            state = job.sync(state)
        if stop() and position.epoch == epoch:
            return run._replace(state=job.sync(state), position=position, loss_sum=loss_sum)
    state = job.sync(state)
    seconds = time.perf_counter() - began
    params = ranks.whole_params(state, job.mesh)
    auc, log_loss = evaluate(job, params, job.split.valid)
    entry = {
        "epoch": epoch,
        "loss": float(loss_sum) / num_steps(job),
        "valid_auc": auc,
        "valid_log_loss": log_loss,
        "seconds": seconds,
        "samples_per_s": samples / seconds,
    }
    history = [*run.history, entry]
    better = best_epoch(history) == len(history) - 1
    best = map_tensors(torch.clone, params) if better else run.best
    say(
        job,
        f"epoch {epoch:3d}  loss {entry['loss']:.4f}  valid AUC {auc:.4f}  log loss {log_loss:.4f}"
        f"  {entry['samples_per_s']:,.0f} samples/s{'  best' if better else ''}",
    )
    return Run(state, position, torch.zeros_like(loss_sum), best, history)


def num_steps(job: Job) -> int:
    return fr.data.num_batches(len(job.split.train), job.options.batch_size, drop_last=True)


def progress(job: Job, run: Run) -> Iterator[tuple[fr.data.Position, fr.Batch]]:
    """The batches of the epoch behind a progress bar; the rows
    of a last batch that is not full come in other epochs."""
    batches = batches_of(job, run, ranks.OwnRows(job.split.data, job.mesh))
    label, done = f"epoch {run.position.epoch:3d}", run.position.batch
    is_shown = sys.stderr.isatty() and ranks.is_chief(job.mesh)
    bar = tqdm(total=num_steps(job), initial=done, desc=label, leave=False, disable=not is_shown)
    with bar:
        for item in fr.data.prefetch(batches):
            yield item
            bar.update()


def batches_of(job: Job, run: Run, data: fr.data.RowData) -> Iterator[tuple[fr.data.Position, fr.Batch]]:
    key = fr.fold_in(fr.key(job.options.seed), 1)
    return fr.data.batches(
        data, job.split.train, job.options.batch_size, key=key, position=run.position, drop_last=True
    )


def evaluate(job: Job, params: fr.Params, rows: Tensor) -> tuple[float, float]:
    """(AUC, log loss) of the model on these rows; each rank takes its part of them, and knows the whole answer."""
    short = -len(rows) % (EVAL_BATCH * ranks.num_processes(job.mesh))
    padded = torch.cat([rows, rows[:1].expand(short)])  # whole batches, so that one shape is compiled
    own = ranks.own_part(padded, job.mesh).split(EVAL_BATCH)
    logits = [job.predict(params, fr.data.take(job.split.data, chunk)) for chunk in own]
    scores = ranks.all_parts(torch.cat(logits), job.mesh)[: len(rows)].double()
    labels = job.split.data.label[rows].double()
    log_loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
    return float(fr.metrics.exact_auc(scores, labels)), float(log_loss)


# -- what a run leaves -------------------------------------------------------------------------------------------


def save(job: Job, run: Run) -> None:
    """The checkpoint, which is that of a lone process whatever the plan is."""
    state = run.state if job.mesh is None else fr.gather_state(run.state, job.mesh)
    tree = {**run._asdict(), "state": state, "position": tuple(run.position)}
    if ranks.is_chief(job.mesh):
        folder.write_checkpoint(job.options, tree)


def resume(job: Job) -> Run:
    tree = folder.read_checkpoint(job.options)
    run = Run(**{**tree, "state": job.place(tree["state"]), "position": fr.data.Position(*tree["position"])})
    say(job, f"resumed at epoch {run.position.epoch}, batch {run.position.batch}")
    return run


def report(job: Job, run: Run) -> None:
    """Test the best epoch; write result.json and curve.png; say the AUC."""
    options, history = job.options, run.history
    auc, log_loss = evaluate(job, run.best, job.split.test)
    if not ranks.is_chief(job.mesh):
        return
    best = history[best_epoch(history)]
    result = {
        **folder.fixed_options(options),
        "mesh": options.axes,
        "plan": options.plan,
        "replicas": options.replicas,
        "sync_every": options.sync_every,
        "num_parameters": fr.models.num_parameters(run.best),
        "best_epoch": best["epoch"],
        "valid_auc": best["valid_auc"],
        "test_auc": auc,
        "test_log_loss": log_loss,
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
    print(f"test AUC {auc:.4f} (published {PUBLISHED[options.model]:.4f})")


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
    auc.axhline(PUBLISHED[options.model], linestyle="--", color="grey", label="published test")
    auc.axvline(best_epoch(history), linestyle=":", color="grey", label="best epoch")
    auc.set(xlabel="epoch", ylabel="AUC")
    auc.legend()
    for axes in (loss, auc):
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


if __name__ == "__main__":
    sys.exit(main())

"""fit: runs epochs of steps, evaluates each epoch, keeps the best parameters, and saves checkpoints to resume from.

    state, metrics = step(state, batch)   for each batch of an epoch;      history += evaluate(params);      save

A resumed run has the same bits. No step or loader depends on this file: a loop of your own can use the same parts
(`fr.evaluate`, `fr.copy`, `fr.save`, `fr.loop`).
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch

from funcrec.checkpoint import finish, settle
from funcrec.core import Count, PositiveMagnitude, check, describe, fail, own_errors, sure, typed
from funcrec.data import Position
from funcrec.files import path_or_url
from funcrec.loop._bad_ids import BadIds, batch_name
from funcrec.loop._callbacks import Record
from funcrec.loop._checks import (
    clock_problems,
    has_loss,
    item_problems,
    loader_problems,
    loss_of,
    loss_problems,
    mode_problems,
    model_problems,
    place_problems,
    tables_of,
    work_problems,
)
from funcrec.loop._diverged import Divergence
from funcrec.loop._epochs import Limits, best_epoch, is_finished, monitor_problems
from funcrec.loop._evaluate import ANY, evaluation
from funcrec.loop._fitted import Fitted, S
from funcrec.loop._owner import Owner
from funcrec.loop._progress import Progress
from funcrec.loop._ranks import is_chief, questions
from funcrec.loop._run_state import (
    Clock,
    Run,
    Work,
    begin,
    find,
    load_run,
    make_room,
    order_of,
    resume_problems,
    save_run,
    steps_of,
    whole_params,
)
from funcrec.loop._signals import end, listen
from funcrec.loop._trial import check_first_batch, measured, try_evaluate
from funcrec.loop._watch import at, watch
from funcrec.loop.pipelines._pipeline import ahead_of
from funcrec.mesh import Mesh, Ranks, say
from funcrec.metrics import Metric
from funcrec.tables import bounded
from funcrec.tables import validate as validate_batch
from funcrec.train import trial_of
from funcrec.tree import copy

NEEDS = {
    "validation": "model", "metrics": "validation",
    "patience": "monitor", "save_every_steps": "checkpoint", "save_every_minutes": "checkpoint", "keep": "checkpoint",
    "save_asynchronously": "checkpoint", "resume": "checkpoint", "overwrite": "checkpoint",
}  # fmt: skip


@typed(needs=NEEDS)
def fit(
    step: Callable[[S, Any], tuple[S, Any]],
    state: S,
    loader: Callable[[Position], Iterable[Any]] | Iterable[Any],
    *,
    epochs: Count,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    validation: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    metrics: Mapping[str, Metric | Callable[..., Any]] | None = None,
    monitor: str | None = None,
    mode: Literal["max", "min"] | None = None,
    patience: Count | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: Count = 1,
    save_every_steps: Count | None = None,
    save_every_minutes: PositiveMagnitude | None = None,
    keep: Count | None = None,
    save_asynchronously: bool = False,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    settings: Mapping[str, Any] = {},
    callbacks: Sequence[Callable[[Record], Any]] = (),
    model: Any = None,
    validate: Callable[[Any], Any] | None = None,
    on_bad_ids: Literal["raise", "count"] | None = None,
    stop: Callable[[], int] | None = None,
    progress: bool | None = None,
    mesh: Mesh | None = None,
    place: Callable[[Any], Any] | None = None,
    sync: Callable[[Any], Any] | None = None,
) -> Fitted[S]:
    """Return the state, the best parameters and the history of a run of some epochs.

    The loop evaluates, writes checkpoints, and may stop early.

    Args:
      step: (state, batch) -> (state, metrics), such as `train_step(...)`, plain or jitted, or a `pipeline` of it. A
        step that donates its state uses up `state`. A `cached_step` commits its stores before each checkpoint.
      loader: position -> the rest of the epoch from that position on, as pairs (position after the batch, batch), such
        as `lambda position: fr.data.batches(..., position=position)`. Or a list of batches, the same in every epoch.
      epochs: the most epochs of the run.
      evaluate: params -> {name: number}. It runs after each epoch, such as `lambda params: fr.evaluate(predict, params,
        ...)`. If it calls `fr.evaluate`, it also runs once before the first step, with one batch, so that its errors
        come before the first step.
      validation, metrics: instead of `evaluate`, for fr.evaluate(model.apply, params, validation, metrics).
      monitor, mode: the name of the number that decides which epoch is best, and whether the greatest ("max") or the
        least ("min") is best. mode=None is "max", and raises if the name sounds like a loss or an error. NaN is never
        best.
      patience: the number of epochs without a better epoch after which the run ends; None for no such end.
      checkpoint: a file, or its URL in a store (see `save`). `fit` writes it before the first step, after epochs, and
        when `stop` or a signal ends the run.
      save_every: the number of epochs between two checkpoints. The last epoch also writes a checkpoint.
      save_every_steps: a number n. `fit` also writes the checkpoint after every nth step of an epoch.
      save_every_minutes: a number n. `fit` also writes the checkpoint n minutes after the last one, by the clock of the
        first rank, between two steps. Ranks ask the first rank at every 16th step.
      keep: the number of newest checkpoints in the folder `checkpoint`, each named by its step (`fr.latest`). Ranks
        then write their own parts of a sharded state, and gather nothing. The folder has one run at a time: while a run
        lives, a second run raises before any work. In a store, and on a disk without locks, the newer run takes the
        folder, and the older one raises before its next checkpoint. None: `checkpoint` is one file of whole tables.
      save_asynchronously: whether to copy what this rank writes, and to train on while a thread writes the copy. An
        error of the thread is raised at the next checkpoint, or at the end, which waits for the last checkpoint.
      resume: whether to continue from the checkpoint; "auto" if there is one. The result has the bits of an
        uninterrupted run. In the midst of an epoch a loader with an `order`, such as `fr.data.loader`, must have the
        order of the saved run.
      overwrite: whether to start again if there is a checkpoint. Otherwise an existing checkpoint is an error.
      settings: plain values that go into the checkpoint. To resume with different settings is an error that names them.
      callbacks: functions of a `fr.loop.Record`, called before the first step, after each step and after each epoch;
        an exception of a callback ends the run.
      model, validate: checks of the first batch before any work. With a model, the batch is checked against the model's
        features and tables (`fr.validate`). With or without a model, the batch goes once through the loss of a
        `train_step`, or of `jit` of one (under `fr.checked`, which names ids outside their tables). If the batch has
        weights, a loss that does not read `batch.weight` raises. The loss is not tried if the step runs on a mesh, or
        is a function of your own around a `train_step`. `validate`, a function of that batch that may raise, replaces
        all these checks.
      on_bad_ids: the reaction to ids outside their tables, which read zeros: "raise", as None does, or "count": each
        epoch's entry has the number of such ids as "bad_ids", and the bar shows it. If the loader has a thread, it
        looks for such ids before the batch goes to a device. `model`, or else the lookups of `batch.ids` in the loss of
        the first batch, show which features read the ids. If neither shows this, no batch is searched, and "raise" and
        "count" are errors.
      stop: () -> whether to end. `fit` calls it between steps; on ranks the answer of any rank counts. None: SIGINT and
        SIGTERM end the run, if there is a checkpoint. The signal is raised again after the checkpoint is written.
      progress: whether to show a bar on stderr, with examples per second and the time left; None shows it on a
      terminal.
      mesh: the mesh on which the state lies. The loader of a real rank yields the rank's own part of each batch, as by
        `fr.shard`. `evaluate` and the checkpoint have whole tables, and the first rank writes. Real ranks watch each
        other (`fr.loop.watch`): if a rank is lost, all ranks end.
      place: a whole state -> the state that `step` takes, to resume on a mesh:
        `lambda state: fr.reshard(state, ...)`. None lays the state out like `state`.
      sync: state -> state. It runs before a state is evaluated or saved: `fr.sync_replicas` for copies that train
        apart.

    Returns:
      Fitted(state, best, history, stopped).

    Raises:
      TypeError, ValueError: if arguments do not fit; before the first step.
      CheckError: if ids are outside their tables.
      ValueError: if another run keeps checkpoints in the folder, or has taken it.
      ValueError: if a label or a weight is not one that the loss takes. Its note names the batch. With `jit`, the error
        comes after the step, which had a loss of NaN.
      DivergedError: if a loss is NaN, infinite or greater than 1e20, or if parameters are NaN or infinite at an epoch's
        end or before a checkpoint (`fr.loop.DivergedError`).
      RankLost: on all other ranks, if a rank fails (`fr.loop.RankLost`).

    Errors of `step`, `loader`, `evaluate` and `callbacks` pass through. The last written checkpoint then stays.

    Law: the same arguments give the same bits, however often the run is interrupted and resumed (except for times in
      the history).

    Example:
      >>> import torch, funcrec as fr
      >>> model = fr.models.lr((fr.TableConfig("item", 4, 1),), (fr.FeatureConfig("item", table="item"),))
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]}), torch.tensor([0.0, 1.0]))
      >>> step = fr.train_step(model, sparse=fr.optim.sgd(1.0), dense=fr.optim.dense(torch.optim.SGD, lr=1.0))
      >>> judged = {"validation": [batch], "metrics": {"auc": fr.metrics.exact_auc}, "monitor": "auc"}
      >>> done = fr.fit(step, step.init(model.init(fr.key(0))), [batch], epochs=3, model=model, **judged)
      >>> len(done.history), done.history[-1]["auc"], done.history[-1]["loss"] < done.history[0]["loss"]
      (3, 1.0, True)
    """
    path = None if checkpoint is None else path_or_url("funcrec.fit", checkpoint)
    check("funcrec.fit", model_problems(model, validate, state), mode_problems(mode, monitor))
    evaluate = evaluation(step, model, evaluate, validation, metrics, on_bad_ids == "count")
    features, mode = bounded(model.features, tables_of(state)) if model else [], mode or "max"
    held = lambda batch: validate_batch(batch, features, model.tables, labels=ANY) if model else batch
    bad_ids = BadIds(on_bad_ids, model, tables_of(state))
    work = Work(
        step, bad_ids.watching(loader), evaluate, monitor, mode, path, save_every, save_every_steps, dict(settings),
        tuple(callbacks), validate or held, progress, mesh, place, sync or (lambda state: state), order_of(loader),
        trial_of(step) if validate is None else None, Clock(save_every_minutes), bad_ids,
        Owner(path if keep else None, mesh), keep, save_asynchronously,
    )  # fmt: skip
    limits = Limits(epochs, monitor, mode, patience)
    check("funcrec.fit", work_problems(work), clock_problems(save_every_minutes, sync))
    check("funcrec.fit", loader_problems(loader), place_problems(state, mesh))
    listens = stop is None and path is not None
    with watch(mesh), listen() if listens else contextlib.nullcontext(stop or (lambda: 0)) as asked, work.owner.hold():
        found = find(work)
        check("funcrec.fit", resume_problems(work, found, resume, overwrite))
        try:
            done = train(work, limits, load_run(work, state, found) if found and resume else begin(state), asked)
        finally:
            finish()  # however the run ends, an unfinished write completes
        settle()
        signum = done.stopped or (listens and max(say(asked(), Ranks.of(mesh))))
    if listens and signum:  # a signal may have come after the last check
        end(signum, signal.getsignal(signum))
    return done


def train(work: Work, limits: Limits, run: Run, stop: Callable[[], int]) -> Fitted:
    """Return the result of training from the run's position to the end of the run, or until `stop` ends it."""
    is_due = lambda: is_chief(work.mesh) and work.clock.is_due()
    ask, stopped = questions([stop, is_due], Ranks.of(work.mesh)), 0
    at("the loader before its first step")
    if not is_finished(run.history, limits):
        items = iter(rest_of_epoch(work, run.position))
        first = next(items, None)
        check("funcrec.fit", item_problems(first, run.position))
        check_first_batch(work, run.state, sure(first)[1])
        try_evaluate(work, run)
        work.owner.claim()
        items = itertools.chain([first], items)
        if run.position == Position():  # an interrupt then has a checkpoint
            make_room(work)
            save_run(work, run)
    done, divergence = steps_of(run.history) + run.position.batch, Divergence(work.step, run.state, work.mesh)
    call_back(work, Record("begin", run.position.epoch, done, {}, run.state, is_chief=is_chief(work.mesh)))
    while not is_finished(run.history, limits):
        stopped, is_late = ask()
        if is_late and not stopped:
            save_run(work, run)
        if not stopped:
            run, stopped = train_epoch(work, run, items, ask, limits.epochs, divergence)
        if stopped:
            break
        if len(run.history) % work.save_every == 0 or is_finished(run.history, limits):
            save_run(work, run)
        items = rest_of_epoch(work, run.position)
    if stopped:
        save_run(work, run)
    best = whole_params(run.state, work.mesh) if run.best is None else run.best
    return Fitted(run.state, best, run.history, stopped)


def train_epoch(
    work: Work, run: Run, items: Iterable, ask: Callable[[], list[int]], epochs: int, divergence: Divergence
) -> tuple[Run, int]:
    """Return (the run after an epoch and its evaluation, 0), or (the run that `ask` ends, the answer of `ask`)."""
    state, position, loss_sum, bad = run.state, run.position, run.loss_sum, run.bad_ids
    now = lambda: Run(work.sync(state), position, loss_sum, run.best, run.history, bad)
    before = steps_of(run.history)
    epoch, steps, began = position.epoch, position.batch, 0.0
    with Progress(work, epoch, steps, epochs) as bar:
        for item in ahead_of(work.step, items, state):
            check("funcrec.fit", item_problems(item, position))
            position, batch = item
            bad += work.bad_ids.take(position, batch)
            at(f"step {before + steps + 1}")
            state, metrics = one_step(work.step, state, batch, position)
            check("funcrec.fit", loss_problems(work, metrics))
            loss_sum = loss_sum + loss_of(metrics, loss_sum)
            steps, began = steps + 1, began or time.perf_counter()
            bar.step(batch, bad)
            call_back(work, Record("step", epoch, before + steps, metrics, state, is_chief=is_chief(work.mesh)))
            is_last = position.epoch != epoch
            stopped, is_late = (0, 0) if is_last else ask()
            is_due = is_late or (work.save_every_steps and steps % work.save_every_steps == 0)
            divergence.check(before + steps, item, metrics, run._replace(state=state), is_last or stopped or is_due)
            if is_last:
                break
            if stopped:
                return now(), stopped
            if is_due:
                saved = now()
                state = saved.state
                save_run(work, saved)
            at(f"the loader after step {before + steps}")
        else:
            got, need = f"{steps} batches, the last with {position}", f"Position({epoch + 1}, 0) with the last one"
            fail("funcrec.fit", f"`loader` ended in the midst of epoch {epoch}.", got=got, need=need)
    loss = {"loss": float(loss_sum) / steps} if has_loss(metrics) else {}  # this waits for the device
    seconds, timed = time.perf_counter() - began, steps - run.position.batch - 1
    entry = {"epoch": epoch, **loss, "steps": steps, "seconds": seconds, "steps_per_s": timed / seconds}
    if work.bad_ids.mode == "count":
        entry["bad_ids"] = sum(say(bad, Ranks.of(work.mesh)))
    return end_epoch(work, now()._replace(loss_sum=torch.zeros_like(loss_sum), bad_ids=0), entry), 0


def end_epoch(work: Work, run: Run, entry: dict[str, float]) -> Run:
    """Return the run with the epoch's entry in its history, and with the best parameters so far."""
    epoch = int(entry["epoch"])
    at(f"the evaluation of epoch {epoch}")
    params = whole_params(run.state, work.mesh) if work.evaluate or work.callbacks or work.monitor else None
    history = [*run.history, entry | measured(work.evaluate, params, entry)]
    if work.monitor is not None:
        check("funcrec.fit", monitor_problems(history[-1], work.monitor, epoch))
    is_best = work.monitor is not None and best_epoch(history, work.monitor, work.mode) == len(history) - 1
    run = run._replace(best=copy(params) if is_best else run.best, history=history)
    steps, chief = steps_of(history), is_chief(work.mesh)
    call_back(work, Record("epoch", epoch, steps, history[-1], run.state, params, is_best, chief))
    return run


def call_back(work: Work, record: Record) -> None:
    for callback in work.callbacks:
        with own_errors("funcrec.fit", callback, record, need="a record that it reads"):
            callback(record)


def one_step(step: Callable, state: Any, batch: Any, position: Position) -> tuple[Any, Any]:
    try:
        with own_errors("funcrec.fit", step, state, batch, need="the state and the batch that it reads"):
            out = step(state, batch)
    except ValueError as error:
        error.add_note(f"in {batch_name(position)}")
        raise
    if not isinstance(out, tuple | list) or len(out) != 2:
        got, need, hint = describe(out), "(state, metrics)", "lambda state, batch: (new_state, {})"
        fail("funcrec.fit", "`step` returned no pair.", got=got, need=need, hint=hint, kind=TypeError)
    return out[0], out[1]


def rest_of_epoch(work: Work, position: Position) -> Iterator[tuple[Position, Any]]:
    """Return the loader's items after `position`, watched for bad ids."""
    return work.bad_ids.watched(work.loader, given_of_epoch(work.loader, position))


def given_of_epoch(loader: Any, position: Position) -> Iterator[tuple[Position, Any]]:
    """Return the loader's items after `position`. A list of batches serves every epoch."""
    if callable(loader):
        with own_errors("funcrec.fit", loader, position, need="a position, of which it gives the rest of the epoch"):
            return iter(cast(Callable, loader)(position))
    if position.batch and not isinstance(loader, Sequence):
        got, need = f"{position}, and {describe(loader)}", "a function of a position, or a list of batches"
        hint = "a checkpoint of an epoch's end: save_every_steps=None"
        fail("funcrec.fit", "`loader` cannot begin in the midst of an epoch.", got=got, need=need, hint=hint)
    return numbered(itertools.islice(loader, position.batch, None), position)


def numbered(batches: Iterator, position: Position) -> Iterator[tuple[Position, Any]]:
    """Yield (the position after the batch, the batch) for each batch.

    The last batch is known when no batch follows it.
    """
    epoch, count = position
    last = list(itertools.islice(batches, 1))
    for batch in batches:
        count += 1
        yield Position(epoch, count), last.pop()
        last.append(batch)
    if last:
        yield Position(epoch + 1, 0), last.pop()

"""What `fit` asks of its arguments, and of what its functions give it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, count_problems, describe, flag_problems, function_problems
from funcrec.data import Position
from funcrec.loop._epochs import Limits
from funcrec.loop._epochs import mode_problems as known_mode_problems
from funcrec.loop._run_state import Work, is_sharded
from funcrec.mesh import Mesh

OF_AN_EPOCH = (
    "epoch",
    "loss",
    "steps",
    "seconds",
    "steps_per_s",
    "bad_ids",
)  # the last if counted: what the history has without `evaluate`
LESS_IS_BETTER = ("loss", "error", "entropy", "mse", "mae", "nll", "perplexity")  # in the name of a number


def look_problems(model: Any, validate: Any) -> Iterator[Problem]:
    if model is not None and validate is not None:
        yield Problem("`model` and `validate` exclude each other.", "both", "one of them, or none", "validate=None")
    elif model is not None and not (hasattr(model, "features") and hasattr(model, "tables")):
        hint = "model=fr.models.deepfm(tables, features)"
        yield Problem("`model` has no features and tables.", describe(model), "a Model", hint, TypeError)
    elif validate is not None:
        yield from function_problems(validate=validate)


def settings_problems(settings: Any, callbacks: Any, stop: Any) -> Iterator[Problem]:
    if not isinstance(settings, Mapping):
        need, hint = "{name: plain value}", 'settings={"lr": 0.01}'
        yield Problem("`settings` are not values by name.", describe(settings), need, hint, TypeError)
    if not isinstance(callbacks, tuple | list):
        need, hint = "a list of functions", "callbacks=[fr.loop.print_epoch]"
        yield Problem("`callbacks` are not a list.", describe(callbacks), need, hint, TypeError)
    if stop is not None:
        yield from function_problems(stop=stop)


def work_problems(work: Work) -> Iterator[Problem]:
    optional = {"evaluate": work.evaluate, "place": work.place}
    given = {name: fn for name, fn in optional.items() if fn is not None}
    yield from function_problems(sync=work.sync, **given)
    if not callable(work.step):
        hint = "step=fr.jit(fr.train_step(loss_fn, sparse=sparse, dense=dense), donate=('state',))"
        need = "(state, batch) -> (state, metrics)"
        yield Problem("`step` is not a function.", describe(work.step), need, hint, TypeError)
    known = OF_AN_EPOCH if work.bad_ids.mode == "count" else OF_AN_EPOCH[:-1]
    if work.evaluate is None and isinstance(work.monitor, str) and work.monitor not in known:
        what, hint = "`monitor` is measured by nothing.", f"evaluate=... that gives {work.monitor!r}"
        yield Problem(what, f"{work.monitor!r}", f"among {list(known)}, without `evaluate`", hint, KeyError)
    for i, callback in enumerate(work.callbacks):
        if not callable(callback):
            hint = "callbacks=[print_epoch]"
            yield Problem(f"`callbacks[{i}]` is not a function.", describe(callback), "record -> None", hint, TypeError)
    yield from count_problems(work.save_every, "save_every")
    if work.save_every_steps is not None:
        yield from count_problems(work.save_every_steps, "save_every_steps")
        if work.checkpoint is None:
            need = "checkpoint=path"
            yield Problem("`save_every_steps` is of a checkpoint.", "checkpoint=None", need, "checkpoint='run.pt'")
    if work.keep is not None:
        yield from count_problems(work.keep, "keep")
        if work.checkpoint is None:
            yield Problem("`keep` is of a checkpoint.", "checkpoint=None", "checkpoint=path", "checkpoint='runs/one'")
    yield from flag_problems(work.asynchronous, "save_asynchronously")
    if work.asynchronous and work.checkpoint is None:
        what, need = "`save_asynchronously` is of a checkpoint.", "checkpoint=path"
        yield Problem(what, "checkpoint=None", need, "checkpoint='run.pt'")
    if work.progress is not None:
        yield from flag_problems(work.progress, "progress")


def clock_problems(minutes: Any, path: Any, sync: Any) -> Iterator[Problem]:
    """When the clock says so a run may be saved, but nothing that changes it may be done."""
    if minutes is None:
        return
    if isinstance(minutes, bool) or not isinstance(minutes, int | float):
        hint = "save_every_minutes=10"
        yield Problem("`save_every_minutes` is not a number.", describe(minutes), "minutes > 0", hint, TypeError)
    elif not 0 < minutes < math.inf:
        need, hint = "minutes > 0", "save_every_minutes=10"
        yield Problem("`save_every_minutes` is out of range.", f"{minutes}", need, hint)
    if path is None:
        need = "checkpoint=path"
        yield Problem("`save_every_minutes` is of a checkpoint.", "checkpoint=None", need, "checkpoint='run.pt'")
    if sync is not None:
        what = "`save_every_minutes` would have `sync` change the training when a clock says so."
        yield Problem(what, "both", "one of them, or none", "save_every_steps=1000")


def mode_problems(mode: object, monitor: object) -> Iterator[Problem]:
    if mode is not None:
        yield from known_mode_problems(mode)
    elif isinstance(monitor, str) and any(word in monitor.lower() for word in LESS_IS_BETTER):
        what = "`mode` is not said, and the least of what `monitor` names sounds best."
        yield Problem(what, f"monitor={monitor!r}", "mode='min', or mode='max'", f"monitor={monitor!r}, mode='min'")


def limit_problems(limits: Limits) -> Iterator[Problem]:
    yield from count_problems(limits.epochs, "epochs")
    if limits.monitor is not None and not isinstance(limits.monitor, str):
        hint = "monitor='auc'"
        yield Problem("`monitor` is not a name.", describe(limits.monitor), "a name, or None", hint, TypeError)
    if limits.patience is not None:
        yield from count_problems(limits.patience, "patience")
        if limits.monitor is None:
            need, hint = "the name of a number of the history", "monitor='auc', or monitor='loss', mode='min'"
            yield Problem("`patience` waits for no number.", "monitor=None", need, hint)


def loader_problems(loader: Any) -> Iterator[Problem]:
    need = "a function of a position, or batches that can be gone through again"
    hint = "loader=lambda position: fr.data.batches(data, rows, 512, key=key, position=position)"
    if callable(loader):
        return
    if not isinstance(loader, Iterable) or isinstance(loader, Tensor | Mapping | str):
        yield Problem("`loader` is not a loader.", describe(loader), need, hint, TypeError)
    elif isinstance(loader, Iterator):
        yield Problem("`loader` is an iterator, which one epoch uses up.", describe(loader), need, hint, TypeError)


def place_problems(state: Any, mesh: Any) -> Iterator[Problem]:
    if mesh is not None and not isinstance(mesh, Mesh):
        yield Problem("`mesh` is not a mesh.", describe(mesh), "a Mesh, or None", kind=TypeError)
    elif mesh is None and is_sharded(state):
        yield Problem("`mesh` is missing.", "None", "the mesh that `state.tables` lie on", "mesh=mesh", TypeError)


def item_problems(item: Any, position: Position) -> Iterator[Problem]:
    """What a loader gives behind `position` is a pair of the next position and a batch."""
    need, hint = "(Position, batch)", "fr.data.batches(data, rows, 512, position=position)"
    if item is None:
        yield Problem(f"`loader` has no batch behind {position}.", "nothing", need, hint)
    elif not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], Position):
        got = describe(item[0]) if isinstance(item, tuple) and item else describe(item)
        yield Problem("`loader` does not tell positions.", got, need, hint, TypeError)
    elif item[0] not in (Position(position.epoch, position.batch + 1), Position(position.epoch + 1, 0)):
        want = (
            f"{Position(position.epoch, position.batch + 1)}, or {Position(position.epoch + 1, 0)} with the last batch"
        )
        yield Problem("`loader` goes to another position than the next.", f"{item[0]} behind {position}", want, hint)


def has_loss(metrics: Any) -> bool:
    """Whether a step gave a loss: a number, or one for each of some members."""
    loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
    return isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() > 0 and not loss.is_complex())


def loss_problems(work: Work, metrics: Any) -> Iterator[Problem]:
    if work.monitor == "loss" and work.evaluate is None and not has_loss(metrics):
        got = f"metrics {list(metrics)}" if isinstance(metrics, Mapping) else f"metrics: {describe(metrics)}"
        what, hint = "`monitor` is not a number that the step gives.", "evaluate=... that gives 'loss'"
        yield Problem(what, got, 'metrics["loss"], a number', hint, TypeError)


def measure_problems(found: Any, entry: Mapping) -> Iterator[Problem]:
    hint = "evaluate=lambda params: fr.evaluate(predict, params, batches, metrics)"
    if not isinstance(found, Mapping):
        yield Problem("`evaluate` gave no numbers by name.", describe(found), "{name: number}", hint, TypeError)
        return
    for name, x in found.items():
        is_number = isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1 and x.dtype != torch.bool)
        if not isinstance(name, str) or not is_number:
            yield Problem(f"`evaluate` gave no number for {name!r}.", describe(x), "a number", hint, TypeError)
        elif name in entry:
            need = f"other names than {list(entry)}"
            yield Problem("`evaluate` gave a name that the history has.", f"{name!r}", need, f"valid_{name}")

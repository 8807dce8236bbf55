"""Checks of the arguments of `fit`, and of the results of functions that `fit` calls."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Problem, describe, paths
from funcrec.data import Position
from funcrec.loop._epochs import OF_AN_EPOCH
from funcrec.loop._run_state import Work, is_sharded
from funcrec.mesh import Mesh
from funcrec.tables import table_shapes

LESS_IS_BETTER = ("loss", "error", "entropy", "mse", "mae", "nll", "perplexity")  # words in the name of a number


def model_problems(model: Any, validate: Any, state: Any) -> Iterator[Problem]:
    if model is not None and validate is not None:
        yield Problem("`model` and `validate` exclude each other.", "both", "one of them, or none", "validate=None")
    elif model is not None and not (hasattr(model, "features") and hasattr(model, "tables")):
        hint = "model=fr.models.deepfm(tables, features)"
        yield Problem("`model` has no features and tables.", describe(model), "a Model", hint, TypeError)
    elif model is not None:
        yield from other_model_problems(model, state)


def tables_of(state: Any) -> Any:
    """Return the tables of a state; None if it has no parameters."""
    return getattr(getattr(state, "params", None), "tables", None)


def other_model_problems(model: Any, state: Any) -> Iterator[Problem]:
    """Report a model whose tables are not those of the state."""
    tables = tables_of(state)
    if not isinstance(tables, Mapping):
        return
    found = {n: tuple(shape)[-2:] for n, shape in table_shapes(tables).items()}  # a stack has a table for each member
    want = {t.name: tuple(t.shape) for t in model.tables}
    if found != want:
        wrong = [n for n in {**want, **found} if found.get(n) != want.get(n)]
        got, need = ({n: x.get(n, "missing") for n in wrong[:3]} for x in (want, found))
        hint = "the model that made the parameters of `state`"
        yield Problem("`model` has other tables than `state`.", f"{got}", f"{need}, as in `state`", hint)


def work_problems(work: Work) -> Iterator[Problem]:
    known = OF_AN_EPOCH if work.bad_ids.mode == "count" else OF_AN_EPOCH[:-1]
    if work.evaluate is None and work.monitor is not None and work.monitor not in known:
        what, hint = "`monitor` is measured by nothing.", f"evaluate=... that gives {work.monitor!r}"
        yield Problem(what, f"{work.monitor!r}", f"among {list(known)}, without `evaluate`", hint, KeyError)
    for path, x in paths(work.settings):
        if isinstance(x, Tensor | np.ndarray):
            need, hint = "what `==` compares: numbers, texts", "x.tolist()"
            yield Problem(f"`settings{path}` is not a plain value.", describe(x), need, hint, TypeError)


def clock_problems(minutes: float | None, sync: Any) -> Iterator[Problem]:
    """Report `save_every_minutes` with `sync`: `sync` changes the run, and a clock must not decide when."""
    if minutes is not None and sync is not None:
        what = "`save_every_minutes` would have `sync` change the training when a clock says so."
        yield Problem(what, "both", "one of them, or none", "save_every_steps=1000")


def mode_problems(mode: str | None, monitor: str | None) -> Iterator[Problem]:
    if mode is None and monitor is not None and any(word in monitor.lower() for word in LESS_IS_BETTER):
        what = "`mode` is not said, and the least of what `monitor` names sounds best."
        yield Problem(what, f"monitor={monitor!r}", "mode='min', or mode='max'", f"monitor={monitor!r}, mode='min'")


def loader_problems(loader: Any) -> Iterator[Problem]:
    need = "a function of a position, or batches that can be iterated again"
    hint = "loader=lambda position: fr.data.batches(data, rows, 512, key=key, position=position)"
    if callable(loader):
        return
    if not isinstance(loader, Iterable) or isinstance(loader, Tensor | Mapping | str):
        yield Problem("`loader` is not a loader.", describe(loader), need, hint, TypeError)
    elif isinstance(loader, Iterator):
        yield Problem("`loader` is an iterator, which one epoch uses up.", describe(loader), need, hint, TypeError)


def place_problems(state: Any, mesh: Mesh | None) -> Iterator[Problem]:
    if mesh is None and is_sharded(state):
        yield Problem("`mesh` is missing.", "None", "the mesh that `state.tables` lie on", "mesh=mesh", TypeError)


def item_problems(item: Any, position: Position) -> Iterator[Problem]:
    """Report an item of a loader that is not a pair of the position after `position` and a batch."""
    need, hint = "(Position, batch)", "fr.data.batches(data, rows, 512, position=position)"
    if item is None:
        yield Problem(f"`loader` has no batch after {position}.", "nothing", need, hint)
    elif not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], Position):
        got = describe(item[0]) if isinstance(item, tuple) and item else describe(item)
        yield Problem("`loader` gives no positions.", got, need, hint, TypeError)
    elif item[0] not in (Position(position.epoch, position.batch + 1), Position(position.epoch + 1, 0)):
        want = (
            f"{Position(position.epoch, position.batch + 1)}, or {Position(position.epoch + 1, 0)} with the last batch"
        )
        yield Problem("`loader` goes to another position than the next.", f"{item[0]} behind {position}", want, hint)


def has_loss(metrics: Any) -> bool:
    """Return whether the metrics of a step have a loss: a number, or a number for each member."""
    loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
    return isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() > 0 and not loss.is_complex())


def loss_of(metrics: Any, like: Tensor) -> Tensor:
    """Return metrics["loss"], or its mean over members, f64[]; NaN if the step gives no loss."""
    loss = metrics["loss"] if has_loss(metrics) else torch.nan
    return loss.detach().double().mean() if isinstance(loss, Tensor) else torch.full_like(like, loss)


def loss_problems(work: Work, metrics: Any) -> Iterator[Problem]:
    if work.monitor == "loss" and work.evaluate is None and not has_loss(metrics):
        got = f"metrics {list(metrics)}" if isinstance(metrics, Mapping) else f"metrics: {describe(metrics)}"
        what, hint = "`monitor` is not a number that the step gives.", "evaluate=... that gives 'loss'"
        yield Problem(what, got, 'metrics["loss"], a number', hint, TypeError)


def mapping_problems(found: Any) -> Iterator[Problem]:
    """Report a result of `evaluate` that has no names."""
    if not isinstance(found, Mapping):
        got, hint = describe(found), "evaluate=lambda params: fr.evaluate(predict, params, batches, metrics)"
        yield Problem("`evaluate` gave no numbers by name.", got, "{name: number}", hint, TypeError)
    elif wrong := [n for n in found if not isinstance(n, str)]:
        yield Problem("`evaluate` gave a name that is not a string.", describe(wrong[0]), "strings", kind=TypeError)


def known_problems(numbers: Mapping[str, float], entry: Mapping) -> Iterator[Problem]:
    """Report names of numbers that the entry of the epoch has already."""
    for name in numbers:
        if name in entry:
            need = f"other names than {list(entry)}"
            yield Problem("`evaluate` gave a name that the history has.", f"{name!r}", need, f"valid_{name}")

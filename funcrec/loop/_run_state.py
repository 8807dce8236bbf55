"""The constants of a run of `fit`, its changing state, and the checkpoint that holds the state.

load(save(run)) = run, so that a resumed run has the bits of a run without an interrupt.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcrec.cached import CachedStep
from funcrec.checkpoint import difference_problems, latest, load, load_as, remove_all, save, save_owned, settle
from funcrec.core import Problem, check, describe, fail, sure, tree_leaves
from funcrec.data import Position
from funcrec.loop._bad_ids import BadIds
from funcrec.loop._owner import Owner
from funcrec.loop._ranks import is_chief
from funcrec.loop._watch import at
from funcrec.mesh import Mesh, Ranks, say
from funcrec.sharding import gather_tables, join_dense
from funcrec.tables import Params, layout_in
from funcrec.train import TrainState, gather_state

APPEAR_S = 10.0
PARTS = {"options", "state", "position", "loss_sum", "best", "history"}


class Work(NamedTuple):
    """The arguments of `fit`, which stay the same throughout the run."""

    step: Callable[..., Any]
    loader: Any
    evaluate: Callable[..., Any] | None
    monitor: str | None
    mode: Literal["max", "min"]
    checkpoint: Path | None
    save_every: int
    save_every_steps: int | None
    settings: dict[str, Any]
    callbacks: tuple[Callable, ...]
    check_batch: Callable[[Any], Any]
    progress: bool | None
    mesh: Mesh | None
    place: Callable[..., Any] | None
    sync: Callable
    order: dict[str, Any]  # describes the batches that the loader gives
    trial: Callable[..., None] | None  # tries the loss on the first state and batch, before any work
    clock: "Clock"
    bad_ids: BadIds
    owner: Owner
    keep: int | None = None
    asynchronous: bool = False


@dataclass
class Clock:
    """The time of the last checkpoint, or of the start of the run."""

    minutes: float | None
    saved_s: float = field(default_factory=time.monotonic)

    def is_due(self) -> bool:
        return self.minutes is not None and time.monotonic() - self.saved_s >= 60 * self.minutes


class Run(NamedTuple):
    """The state of a run: the checkpoint holds all of it."""

    state: Any
    position: Position
    loss_sum: Tensor  # the sum over the steps of this epoch
    best: Any  # the parameters of the best epoch; None before the first evaluation
    history: list[dict[str, float]]
    bad_ids: int = 0  # the number in the steps of this epoch, on this process


def device_of(state: Any) -> torch.device:
    return next((x.device for x in tree_leaves(state) if isinstance(x, Tensor)), torch.device("cpu"))


def is_sharded(state: Any) -> bool:
    return isinstance(state, TrainState) and layout_in(state.tables) is not None


def whole_params(state: Any, mesh: Mesh | None) -> Any:
    """Return the whole parameters of a state, as one process has them.

    A state of another kind has its `params`, or else is itself the parameters.
    """
    if is_sharded(state):
        return Params(gather_tables(state.tables, sure(mesh)), join_dense(state.dense, sure(mesh)))
    return getattr(state, "params", state)


def order_of(loader: Any) -> dict[str, Any]:
    """Return the loader's description of the order of its batches; {} if it has no description."""
    order = getattr(loader, "order", None)
    return dict(order) if isinstance(order, Mapping) else {}


def begin(state: Any) -> Run:
    zero = torch.zeros((), dtype=torch.float64, device=device_of(state))
    return Run(state, Position(), zero, None, [])


def save_run(work: Work, run: Run) -> None:
    """Write the checkpoint, which any plan can resume.

    The checkpoint has whole tables, or with `keep` each rank's own parts.
    """
    if work.checkpoint is None:
        return
    at(f"the checkpoint of epoch {run.position.epoch}, batch {run.position.batch}")
    work.owner.check()
    more = {"options": work.settings, "monitor": [work.monitor, work.mode], "order": work.order}
    if isinstance(work.step, CachedStep):
        settle()  # stores return by one commit at most, to the state of the last checkpoint that is whole
        work.step.commit(run.state)
    tree = {**more, **run._asdict(), "position": tuple(run.position)}
    in_parts = is_sharded(run.state) and work.keep is not None
    if is_sharded(run.state) and not in_parts:
        tree["state"] = gather_state(run.state, sure(work.mesh))
    if in_parts or is_chief(work.mesh):
        if work.keep is None:
            save(work.checkpoint, tree, asynchronous=work.asynchronous)
        else:
            own, step = {"keep": work.keep, "owns": work.owner.owns}, steps_of(run.history) + run.position.batch
            save_owned(work.checkpoint, tree, step=step, asynchronous=work.asynchronous, **own)
    work.clock.saved_s = time.monotonic()


def make_room(work: Work) -> None:
    """Remove checkpoints of an earlier run from the folder for `keep` checkpoints."""
    if work.checkpoint is not None and work.keep is not None and is_chief(work.mesh):
        remove_all(work.checkpoint, work.owner.owns)


def load_run(work: Work, state: Any, path: Path) -> Run:
    """Return the run that `save_run` wrote, with a state that is laid out like `state`.

    The run must have the same settings.
    """
    call = "funcrec.fit"
    if is_sharded(state) and work.place is None:
        tree = load_as(path, state, mesh=sure(work.mesh), device=device_of(state))
    else:
        tree = load(path, device=device_of(state))
    check(call, checkpoint_problems(work, tree))
    check(call, same_problems(work, tree))
    saved = tree["state"]
    if is_sharded(state) and work.place is not None:
        saved = work.place(saved)
    check(call, state_problems(saved, state))
    if isinstance(work.step, CachedStep):
        work.step.rollback(saved)
    run = Run(**{name: tree[name] for name in Run._fields if name in tree})
    return run._replace(state=saved, position=Position(*tree["position"]))


def find(work: Work) -> Path | None:
    """Return the checkpoint to resume.

    The first rank chooses it, and all ranks must see it. Call the function before any rank writes.
    """
    if work.checkpoint is None:
        return None
    check("funcrec.fit", keep_problems(work.checkpoint, work.keep))
    newest = latest(work.checkpoint) if work.keep is not None else work.checkpoint
    own = newest if newest is not None and newest.exists() else None
    ranks = Ranks.of(work.mesh)
    if ranks.size == 1:
        return own
    chosen = say(None if own is None else own.name, ranks)[0]
    path = None if chosen is None else work.checkpoint if work.keep is None else work.checkpoint / chosen
    others = [rank for rank, x in enumerate(say(own is None if path is None else appears(path), ranks)) if not x]
    if others:
        what = f"`checkpoint` {path or work.checkpoint} is not one for all ranks."
        got = f"{'not ' if path else ''}seen by {['rank', 'ranks'][len(others) > 1]} {', '.join(map(str, others))}"
        fail("funcrec.fit", what, got=got, need="a disk that all share")
    return path


def appears(path: Path) -> bool:
    """Return whether the path appears within some seconds. A network disk may show files of other ranks late."""
    end = time.monotonic() + APPEAR_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return path.exists()


def steps_of(history: Sequence[Mapping[str, float]]) -> int:
    return sum(int(h.get("steps", 0)) for h in history)


# -- validators --------------------------------------------------------------------------------------------------


def resume_problems(work: Work, found: Path | None, resume: bool | str, overwrite: bool) -> Iterator[Problem]:
    """Report a missing checkpoint to resume, an existing one without `overwrite`, and `resume` with `overwrite`."""
    path = work.checkpoint
    if resume and overwrite:
        yield Problem("`resume` and `overwrite` exclude each other.", "both", "one of them, or none", "overwrite=False")
    elif resume is True and not found:
        need = "a file that fit wrote"
        yield Problem("`checkpoint` does not exist.", f"{path}", need, "resume='auto' begins where none is")
    elif found and not resume and not overwrite:
        hint = "resume=True goes on with it, overwrite=True starts again"
        yield Problem("`checkpoint` holds a run.", f"{path}", "a path that is free", hint)


def keep_problems(path: Path, keep: int | None) -> Iterator[Problem]:
    """Report a folder for one checkpoint, and a file for several checkpoints."""
    if keep is None and path.is_dir():
        yield Problem(f"`checkpoint` {path} is a folder.", "keep=None", "a file; or a number of checkpoints", "keep=3")
    elif keep is not None and path.exists() and not path.is_dir():
        yield Problem(f"`checkpoint` {path} is a file.", f"keep={keep}", "a folder for them", "checkpoint='runs/one'")


def state_problems(saved: Any, state: Any) -> Iterator[Problem]:
    """Report a saved state whose form differs from the form of the state to train."""
    found = list(difference_problems(saved, state))
    if found:
        got = "; ".join(f"{p.what.rstrip('.')} ({p.got} for {p.need})" for p in found[:3])
        more, hint = f"; {len(found) - 3} more" if len(found) > 3 else "", "the model and the optimizers that it had"
        yield Problem("`checkpoint` has another state.", got + more, "a state of the form of `state`", hint)


def checkpoint_problems(work: Work, tree: Any) -> Iterator[Problem]:
    path = f"`checkpoint` {work.checkpoint}"
    if not isinstance(tree, dict) or not set(tree) >= PARTS or not isinstance(tree["options"], dict):
        yield Problem(f"{path} is not a checkpoint of fit.", describe(tree), f"{sorted(PARTS)}", "another path")
        return
    if told := changes(tree["options"], work.settings):
        hint = "the settings that it had, or overwrite=True"
        yield Problem(f"{path} belongs to another run.", told, "the same settings", hint)
    order = tree.get("order", {})
    if tree["position"][1] and order and work.order and (told := changes(order, work.order)):
        what = f"{path} ends in the midst of an epoch of other batches."
        yield Problem(what, told, "the loader's order until the epoch ends", "the loader that it had")
    was, now = list(tree.get("monitor", [work.monitor, work.mode])), [work.monitor, work.mode]
    if was != now and tree["history"] and (was[0], now[0]) != (None, None):
        told, need = (f"monitor={name!r}, mode={mode!r}" for name, mode in (now, was))
        yield Problem("`monitor` is another than the checkpoint's, and so is the best.", told, need, need)


def same_problems(work: Work, tree: Any) -> Iterator[Problem]:
    """Report ranks that resume from different checkpoints, which differ in the times of their histories."""
    own = [*tree["position"], zlib.crc32(repr((float(tree["loss_sum"]), tree["history"])).encode())]
    seen = say(own, Ranks.of(work.mesh))
    if any(x != seen[0] for x in seen):
        got = "; ".join(f"rank {r} has one of epoch {x[0]}, batch {x[1]}" for r, x in enumerate(seen))
        what, need = f"`checkpoint` {work.checkpoint} is another on some of the ranks.", "one, on a disk that all share"
        yield Problem(what, got, need, "the newest one, copied to all")


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a text of all values that differ: `lr was 0.1 and is 0.2`."""
    both = {n: (was.get(n), now.get(n)) for n in [*now, *(set(was) - set(now))]}
    return "; ".join(f"{n} was {x!r} and is {y!r}" for n, (x, y) in both.items() if x != y and repr(x) != repr(y))

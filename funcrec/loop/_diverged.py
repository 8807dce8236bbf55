"""Ends a run whose loss or parameters diverged, or whose batch has values that the loss does not take.

diverged(l) = not |l| <= 1e20,   diverged(params) = a number that was finite when the run began is not finite now

Shapes: M members of an ensemble.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.core import CheckError, Problem, describe, message, paths
from funcrec.data import Position
from funcrec.loop._bad_ids import batch_name
from funcrec.loop._checks import has_loss
from funcrec.loop._ranks import STEPS_PER_QUESTION
from funcrec.loop._run_state import Run
from funcrec.loop.pipelines._ready_batches import Ready
from funcrec.mesh import Mesh, Ranks, say
from funcrec.tables import Batch, batch_value_problems
from funcrec.train import error_of_loss

LARGEST_LOSS = 1e20  # the square of a larger number is infinite in f32


class DivergedError(FloatingPointError):
    """The loss of a step of `fit` is NaN, infinite or greater than 1e20, or its parameters are NaN or infinite.

    `fit` looks at the parameters, which are `state.params`, after each epoch and before each checkpoint. Parameters
    that were not finite when the run began do not count. If a step gives a loss for each of several members, all
    members diverged.

    step: the number of that step since the beginning of the run. best: the parameters of the best epoch by `monitor`,
    or None. history: one dict per epoch, as in `Fitted`. The checkpoint is the last one that `fit` wrote before that
    step.

    Example:
      >>> import torch, funcrec as fr
      >>> double = lambda w, batch: (w * 1e15, {"loss": w})
      >>> try:
      ...     fr.fit(double, torch.tensor(1.0), [None], epochs=3, monitor="loss", mode="min")
      ... except fr.loop.DivergedError as error:
      ...     print(error.step, error.best, len(error.history))
      3 tensor(1.0000e+15) 2
    """

    step: int
    best: Any
    history: list[dict[str, Any]]

    def __init__(self, text: str, step: int = 0, best: Any = None, history: Any = ()):
        super().__init__(text)
        self.step, self.best, self.history = step, best, list(history)


class Divergence:
    """Finds losses and parameters of a run of `fit` that are not finite.

    Losses on the CPU are read at once. Losses on another device are read a few at a time.

    unread: (step, loss, (position after the batch, batch)) of each step whose loss is not yet read.
    finite: the paths of the parameters that were finite when the run began.
    members: M, if a step gives a loss for each member.
    """

    def __init__(self, step: Any, state: Any, mesh: Mesh | None):
        self.step, self.mesh, self.unread, self.members = step, mesh, [], 1
        self.finite = {path for path, x in floats(state) if sums_are_finite([x]) or bool(are_finite(x, 1).all())}

    def check(self, step: int, item: tuple[Position, Any], metrics: Any, run: Run, at_once: int | None) -> None:
        """Note the loss of a step, and raise for what diverged. With `at_once`, read all losses and the parameters."""
        if has_loss(metrics):
            loss = torch.as_tensor(metrics["loss"]).detach()
            self.members = loss.numel()
            self.unread.append((step, loss, item))
        is_ready = any(loss.device.type == "cpu" for _, loss, _ in self.unread)
        if at_once or is_ready or len(self.unread) >= STEPS_PER_QUESTION:
            self.check_losses(run)
        if at_once:
            self.check_params(run, step)

    def check_losses(self, run: Run) -> None:
        """Raise for the first loss that diverged. If the loss function does not take the batch, raise its error."""
        unread, self.unread = self.unread, []
        for step, loss, (position, batch) in unread:
            if bool((loss.abs() <= LARGEST_LOSS).any()):
                continue
            given = batch.batch if isinstance(batch, Ready) else batch
            if error := error_of_loss(self.step, run.state, given):
                error.add_note(f"in {batch_name(position)}, step {step}")
                raise error
            got = f"{loss.flatten()[0].item()}" + (f" and {loss.numel() - 1} more" if loss.numel() > 1 else "")
            what, need = f"the loss diverged in step {step}.", f"a number of at most {LARGEST_LOSS:g}"
            raise diverged(what, f"{got}, in {batch_name(position)}{values_of(given)}", need, step, run)

    def check_params(self, run: Run, step: int) -> None:
        """Raise if parameters that were finite when the run began are not, on any rank."""
        own = {path: x for path, x in floats(run.state) if path in self.finite}
        wrong = [] if sums_are_finite(own.values()) else not_finite(own, self.members)
        wrong = next(filter(None, say(wrong, Ranks.of(self.mesh))), [])
        if wrong:
            got = f"numbers that are NaN or infinite in {wrong[0]}" + (f" and {len(wrong) - 1} more" * (len(wrong) > 1))
            what, need = f"the parameters diverged by step {step}.", "finite parameters"
            raise diverged(what, got, need, step, run)


def diverged(what: str, got: str, need: str, step: int, run: Run) -> DivergedError:
    hint = "a smaller lr, or fr.optim.clip(sparse, ...); the error has `best` and `history`"
    return DivergedError(message("funcrec.fit", [Problem(what, got, need, hint)]), step, run.best, run.history)


def floats(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, x) for each tensor of floats among the parameters of a state; nothing without `state.params`."""
    for path, x in paths(getattr(state, "params", None)):
        if isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1 and x.numel():
            yield f"params.{path}", x.detach()


def sums_are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether the sum of each tensor is finite. Then all numbers are; if not, a sum may have overflowed."""
    sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    devices = {x.device for x in sums}  # one read of each device
    return all(bool(torch.stack([x.double() for x in sums if x.device == d]).isfinite().all()) for d in devices)


def not_finite(named: Mapping[str, Tensor], members: int) -> list[str]:
    """Return the paths of tensors with numbers that are not finite; [] if some member has finite numbers only."""
    found = {path: are_finite(x, members) for path, x in named.items()}
    alive = torch.stack([x.expand(members) for x in found.values()]).all(0)
    return [] if bool(alive.any()) else [path for path, x in found.items() if not bool(x.all())]


def are_finite(x: Tensor, members: int) -> Tensor:
    """Return whether all numbers of each member are finite, bool[M]; bool[1] if x has no part for each member."""
    parts = x if members > 1 and x.dim() and x.shape[0] == members else x[None]
    ends = [torch.stack(part.aminmax()) for part in parts]  # both are NaN if a number is
    return torch.stack(ends).isfinite().all(1).cpu()


def values_of(batch: Any) -> str:
    """Return a text of the values of a batch that make a loss NaN, and of the range of its labels."""
    if not isinstance(batch, Batch):
        return ""
    found = batch_value_problems(batch, (-math.inf, math.inf))
    wrong = [f"{p.what.rstrip('.')}: {p.got}" for p in found if p.kind is CheckError]
    if wrong or batch.label is None or not batch.label.numel() or batch.label.dtype == torch.bool:
        return "".join(f"; {x}" for x in wrong)
    return f"; {describe(batch.label)} labels in [{batch.label.min().item():g}, {batch.label.max().item():g}]"

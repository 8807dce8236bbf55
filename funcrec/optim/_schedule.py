"""schedule: a learning rate as a function of the step, in stages.

    lr(step) = lr · factor_s(step) · lr_scale_s,    s the first stage with step <= max_iters_s; after the last, lr

Tensor in, tensor out: the rate is computed inside a compiled step, and no step makes a new graph.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, plain_numbers

Policy = Literal[
    "none", "linear", "constant", "poly", "step", "inv_sqrt", "cosine_annealing_warm_restarts", "interpolate"
]


@plain_numbers
@dataclass(frozen=True)
class Stage:
    """One stage of a schedule, in force up to and including step `max_iters`, counted from the start of training.

        none                            1
        linear                          value + (1 - value) · step / max_iters
        constant                        value
        poly                            (1 - step / decay_iters) ^ value, 0 beyond decay_iters
        step                            value ^ ⌊step / decay_iters⌋
        inv_sqrt                        1 / √step, 1 at step 0
        cosine_annealing_warm_restarts  value + (1 - value) · (1 + cos(π · (step mod period) / period)) / 2
        interpolate                     value + (end_value - value) · (step - start) / (max_iters - start)

    Args:
      value: as above.
      lr_scale: multiplies the factor.
      decay_iters: defaults to max_iters, and to 1 for "step".
      sgdr_period: the period of the cosine, in steps.
      start_interpolating_iters, end_value: start and end_value of "interpolate", which needs both.

    Source: TorchRec's WarmupStage, whose field names these are. There inv_sqrt divides by zero at step 0, and poly with
    a fractional value fails beyond decay_iters.
    """

    policy: Policy = "linear"
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int | None = None
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def __post_init__(self):
        check(f"funcrec.optim.Stage({self.policy!r})", stage_problems(self))


@plain_numbers
def schedule(stages: Sequence[Stage], *, lr: float = 1.0) -> Callable[[int | Tensor], Tensor]:
    """A function from the steps taken (int or i64[], or i64[...] for many) to
    the learning rate, f64[]; give it as any optimizer's `lr`.

    Raises:
      ValueError: when `max_iters` does not rise from stage to stage.

    Example:
      >>> import torch, funcrec as fr
      >>> Stage = fr.optim.Stage
      >>> lr = fr.optim.schedule([Stage("linear", max_iters=4, value=0.0), Stage("constant", 6, value=0.5)], lr=0.1)
      >>> [round(float(lr(step)), 3) for step in (0, 2, 4, 5, 6, 7)]
      [0.0, 0.05, 0.1, 0.05, 0.05, 0.1]
      >>> sparse = fr.optim.adam(lr=lr)

    Source: TorchRec's WarmupOptimizer.
    """
    check("funcrec.optim.schedule", schedule_problems(stages, lr))
    return functools.partial(_rate, tuple(stages), lr)


def _rate(stages: tuple[Stage, ...], lr: float, step: int | Tensor) -> Tensor:
    check("funcrec.optim.schedule", count_problems(step))
    t = step if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64)
    factor = torch.ones_like(t, dtype=torch.float64)
    for stage in reversed(stages):
        factor = torch.where(t <= stage.max_iters, _factor(stage, t) * stage.lr_scale, factor)
    return factor * lr


def _factor(stage: Stage, step: Tensor) -> Tensor:
    """f64[]: the factor of one stage."""
    t, value = step.to(torch.float64), stage.value
    match stage.policy:
        case "linear":
            return value + (1 - value) * t / stage.max_iters
        case "constant":
            return torch.full_like(t, value)
        case "poly":
            return (1 - t / (stage.decay_iters or stage.max_iters)).clamp(min=0) ** value
        case "step":
            return value ** (step // (stage.decay_iters or 1)).to(torch.float64)
        case "inv_sqrt":
            return t.clamp(min=1).rsqrt()
        case "cosine_annealing_warm_restarts":
            return value + (1 - value) * (1 + torch.cos(math.pi * (t % stage.sgdr_period) / stage.sgdr_period)) / 2
        case "interpolate":
            start = stage.start_interpolating_iters
            return value + (stage.end_value - value) * (t - start) / (stage.max_iters - start)
        case _:
            return torch.ones_like(t)


# -- validators --------------------------------------------------------------------------------------------------


def count_problems(step: object) -> Iterator[Problem]:
    if isinstance(step, Tensor):
        counts = not (step.is_floating_point() or step.is_complex() or step.dtype == torch.bool)
    else:
        counts = isinstance(step, Integral) and not isinstance(step, bool) and step >= 0
    if not counts:
        need = "an int >= 0, or an integer tensor, the steps taken"
        yield Problem("`step` is not a step.", describe(step), need, kind=TypeError)


def stage_problems(s: Stage) -> Iterator[Problem]:
    policies = Policy.__args__
    if not isinstance(s.policy, str) or s.policy not in policies:
        yield Problem("`policy` is unknown.", f"{s.policy!r}", " or ".join(map(repr, policies)))
        return
    for name in ("max_iters", "sgdr_period", "decay_iters"):
        n = getattr(s, name)
        if name == "decay_iters" and n is None:
            continue
        if not isinstance(n, int) or isinstance(n, bool):
            yield Problem(f"`{name}` is not an integer.", describe(n), "an int >= 1", kind=TypeError)
        elif n < 1:
            yield Problem(f"`{name}` is too small.", f"{n}", "an int >= 1")
    for name in ("value", "lr_scale", "end_value"):
        x = getattr(s, name)
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        if not is_number and not (name == "end_value" and x is None):
            yield Problem(f"`{name}` is not a number.", describe(x), "a number", kind=TypeError)
        elif is_number and not 0 <= x < math.inf:
            yield Problem(f"`{name}` is out of range.", f"{x}", "a finite number >= 0")
    if s.policy == "interpolate":
        start = s.start_interpolating_iters
        if not isinstance(start, int) or isinstance(start, bool) or start < 0 or s.end_value is None:
            got = f"start_interpolating_iters={start}, end_value={s.end_value}"
            need, hint = "an int >= 0 and a number", "start_interpolating_iters=10, end_value=0.0"
            yield Problem("`interpolate` does not know from where to where.", got, need, hint)
        elif isinstance(s.max_iters, int) and start >= s.max_iters:
            yield Problem("`start_interpolating_iters` is too late.", f"{start}", f"< max_iters = {s.max_iters}")


def schedule_problems(stages: object, lr: object) -> Iterator[Problem]:
    if not isinstance(lr, (int, float)) or isinstance(lr, bool):
        yield Problem("`lr` is not a number.", describe(lr), "a number >= 0", kind=TypeError)
    elif not 0 <= lr < math.inf:
        yield Problem("`lr` is out of range.", f"{lr}", "a finite number >= 0")
    if not isinstance(stages, Sequence) or not all(isinstance(s, Stage) for s in stages):
        yield Problem("`stages` are not stages.", describe(stages), "a sequence of fr.optim.Stage", kind=TypeError)
        return
    ends = [s.max_iters for s in stages]
    if any(b <= a for a, b in itertools.pairwise(ends)):
        yield Problem("`max_iters` does not rise from stage to stage.", f"{ends}", "strictly rising")

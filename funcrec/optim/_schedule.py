"""schedule: a learning rate as a function of the step, in stages.

lr(step) = lr · factor_s(step) · lr_scale_s,    s the first stage with step <= max_iters_s; lr after the last stage

The rate is a tensor if the step is a tensor. So a compiled step computes the rate, and no step makes a new graph.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from funcrec.core import Count, Magnitude, Problem, Scalar, Size, check, field_problems, plain_numbers, sure, typed
from funcrec.optim._checks import step_problems

Policy = Literal[
    "none", "linear", "constant", "poly", "step", "inv_sqrt", "cosine_annealing_warm_restarts", "interpolate"
]


@plain_numbers
@dataclass(frozen=True)
class Stage:
    """One stage of a schedule. It lasts up to and including step `max_iters`, counted from the start of training.

        none                            1
        linear                          value + (1 - value) · step / max_iters
        constant                        value
        poly                            (1 - step / decay_iters) ^ value, 0 after decay_iters
        step                            value ^ ⌊step / decay_iters⌋
        inv_sqrt                        1 / √step, 1 at step 0
        cosine_annealing_warm_restarts  value + (1 - value) · (1 + cos(π · (step mod period) / period)) / 2
        interpolate                     value + (end_value - value) · (step - start) / (max_iters - start)

    Args:
      value: as in the formulas. `value`, `lr_scale` and `end_value` are numbers, or f[].
      lr_scale: multiplies the factor.
      decay_iters: as in the formulas. The default is max_iters, and 1 for "step".
      sgdr_period: the period of the cosine, in steps.
      start_interpolating_iters, end_value: `start` and `end_value` of "interpolate", which needs both.

    Source: TorchRec's WarmupStage, with its field names. There inv_sqrt divides by zero at step 0, and poly with a
    fractional value fails after decay_iters.
    """

    policy: Policy = "linear"
    max_iters: Count = 1
    value: Magnitude | Scalar = 1.0
    lr_scale: Magnitude | Scalar = 1.0
    decay_iters: Count | None = None
    sgdr_period: Count = 1
    start_interpolating_iters: Size | None = None
    end_value: Magnitude | Scalar | None = None

    def __post_init__(self) -> None:
        call = f"funcrec.optim.Stage({self.policy!r})"
        check(call, field_problems(self))
        check(call, interpolation_problems(self))


@typed
def schedule(stages: Sequence[Stage], *, lr: Magnitude | Scalar = 1.0) -> Callable[[int | Tensor], Tensor]:
    """Return a function from the number of steps taken to the learning rate, f64[].

    The number is an int or i64[], or i64[...] for many numbers. Any optimizer accepts the function as `lr`.

    Args:
      lr: a number, or f[], that multiplies the factors.

    Raises:
      ValueError: `max_iters` does not rise from stage to stage.

    Example:
      >>> import torch, funcrec as fr
      >>> Stage = fr.optim.Stage
      >>> lr = fr.optim.schedule([Stage("linear", max_iters=4, value=0.0), Stage("constant", 6, value=0.5)], lr=0.1)
      >>> [round(float(lr(step)), 3) for step in (0, 2, 4, 5, 6, 7)]
      [0.0, 0.05, 0.1, 0.05, 0.05, 0.1]
      >>> sparse = fr.optim.adam(lr=lr)

    Source: TorchRec's WarmupOptimizer.
    """
    check("funcrec.optim.schedule", order_problems(stages))
    return functools.partial(_rate, tuple(stages), lr)


def _rate(stages: tuple[Stage, ...], lr: float | Tensor, step: int | Tensor) -> Tensor:
    check("funcrec.optim.schedule", step_problems(step, is_one=False))
    t = step if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64)
    factor = torch.ones_like(t, dtype=torch.float64)
    for stage in reversed(stages):
        factor = torch.where(t <= stage.max_iters, _factor(stage, t) * stage.lr_scale, factor)
    return factor * lr


def _factor(stage: Stage, step: Tensor) -> Tensor:
    """Return the factor of one stage, f64[]."""
    t, value = step.to(torch.float64), stage.value
    match stage.policy:
        case "linear":
            return value + (1 - value) * t / stage.max_iters
        case "constant":
            return torch.ones_like(t) * value
        case "poly":
            return (1 - t / (stage.decay_iters or stage.max_iters)).clamp(min=0) ** value
        case "step":
            return value ** (step // (stage.decay_iters or 1)).to(torch.float64)
        case "inv_sqrt":
            return t.clamp(min=1).rsqrt()
        case "cosine_annealing_warm_restarts":
            return value + (1 - value) * (1 + torch.cos(math.pi * (t % stage.sgdr_period) / stage.sgdr_period)) / 2
        case "interpolate":
            start = sure(stage.start_interpolating_iters)
            return value + (sure(stage.end_value) - value) * (t - start) / (stage.max_iters - start)
        case _:
            return torch.ones_like(t)


# -- validators --------------------------------------------------------------------------------------------------


def interpolation_problems(s: Stage) -> Iterator[Problem]:
    start = s.start_interpolating_iters
    if s.policy != "interpolate":
        return
    if start is None or s.end_value is None:
        got = f"start_interpolating_iters={start}, end_value={s.end_value}"
        need, hint = "an int >= 0 and a number", "start_interpolating_iters=10, end_value=0.0"
        yield Problem("`interpolate` lacks its start or its end value.", got, need, hint)
    elif start >= s.max_iters:
        yield Problem("`start_interpolating_iters` is too late.", f"{start}", f"< max_iters = {s.max_iters}")


def order_problems(stages: Sequence[Stage]) -> Iterator[Problem]:
    ends = [s.max_iters for s in stages]
    if any(b <= a for a, b in itertools.pairwise(ends)):
        yield Problem("`max_iters` does not rise from stage to stage.", f"{ends}", "strictly rising")

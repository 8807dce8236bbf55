"""The rules of five classes of torch.optim as formulas of tensors, for rates that vary and numbers that are tensors.

    (p', state') = rule(p, g, state, hyper, lr)

torch's classes test their hyper-parameters as Python numbers, and so take no tensor that vmap, grad or jit follows.
Each rule computes one parameter in f32 (f64 for f64), and rounds once. Its state is that of the class.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.kernels.forms import accumulation_dtype
from funcrec.tables import root

# The hyper-parameters besides `lr` that may be tensors f[]. The number stands for a tensor where a class is made.
TENSORS = {
    "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.5, "eps": 0.5, "betas": 0.5, "alpha": 0.5, "lr_decay": 0.5,
    "initial_accumulator_value": 0.5,
}  # fmt: skip
State = dict[str, Tensor]


def tensors_in(hyper: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return {name: its tensors} of the hyper-parameters other than `lr` that are or hold tensors."""
    each = {n: list(x) if isinstance(x, (tuple, list)) else [x] for n, x in hyper.items() if n != "lr"}
    found = {n: [x for x in xs if isinstance(x, Tensor)] for n, xs in each.items()}
    return {n: xs for n, xs in found.items() if xs}


def with_numbers(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters with a number in place of each tensor that a rule takes."""
    plain = lambda n, x: TENSORS[n] if isinstance(x, Tensor) else x
    own = lambda n, x: type(x)(plain(n, y) for y in x) if isinstance(x, (tuple, list)) else plain(n, x)
    return {n: own(n, x) if n in TENSORS else x for n, x in hyper.items()}


def begun(hyper: Mapping[str, Any], states: Sequence[State]) -> list[State]:
    """Return the first states of parameters, with the first sum of Adagrad if that is a tensor."""
    first = hyper.get("initial_accumulator_value")
    if not isinstance(first, Tensor):
        return list(states)
    filled = lambda s: first.to(s.device, s.dtype).expand(s.shape).clone()
    return [{**s, "sum": filled(s["sum"])} for s in states]


def updated(
    cls: type, hyper: Mapping[str, Any], leaves: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
    taken: Tensor,
) -> tuple[list[Tensor], list[State]]:  # fmt: skip
    """Return (parameters, states) after a step of the class with these hyper-parameters, all those of its signature.

    taken: i64[], the number of steps before."""
    out = [_one(RULES[cls], hyper, *each, taken) for each in zip(leaves, grads, states, strict=True)]
    return [p for p, _ in out], [s for _, s in out]


def _one(rule: Callable, hyper: Mapping[str, Any], p, g, state, taken) -> tuple[Tensor, State]:
    wide = accumulation_dtype(p.dtype)
    h = Hyper(hyper, wide, taken)
    steps = {k: s + 1 for k, s in state.items() if k == "step"}
    own = {k: s.to(wide) for k, s in state.items() if k != "step"}
    w, g = p.to(wide), g.to(wide)
    new, moved = rule(w, -g if hyper.get("maximize") else g, own, steps.get("step"), h)
    return new.to(p.dtype), {k: steps[k] if k in steps else moved[k].to(s.dtype) for k, s in state.items()}


class Hyper(NamedTuple):
    """The hyper-parameters of one parameter's step. They are f64 until they meet elements, in `dtype`.

    values: all of the class's signature, with the rate of this step. taken: the number of steps before."""

    values: Mapping[str, Any]
    dtype: torch.dtype
    taken: Tensor

    def at(self, name: str, place: int | None = None) -> Tensor:
        x = self.values[name] if place is None else self.values[name][place]
        like = {"dtype": torch.float64, "device": self.taken.device}
        return x.to(**like) if isinstance(x, Tensor) else torch.full((), x, **like)

    def has(self, name: str) -> bool:
        """Return whether the class does what the hyper-parameter stands for. A tensor stands for any number."""
        x = self.values.get(name)
        return isinstance(x, Tensor) or bool(x)

    def of(self, x: str | Tensor) -> Tensor:
        """Return a number, or the hyper-parameter of a name, in the dtype of the elements."""
        return (self.at(x) if isinstance(x, str) else x).to(self.dtype)

    def decayed(self, p: Tensor, g: Tensor) -> Tensor:
        return g + self.of("weight_decay") * p if self.has("weight_decay") else g


def _sgd(p, g, state, step, h):
    g = h.decayed(p, g)
    if h.has("momentum"):
        momentum, damped = h.of("momentum"), 1 - h.at("dampening") * (h.taken > 0)  # the first step has no dampening
        mean = momentum * state["momentum_buffer"] + h.of(damped) * g
        g, state = g + momentum * mean if h.has("nesterov") else mean, {"momentum_buffer": mean}
    return p - h.of("lr") * g, state


def _adam(p, g, state, step, h, is_apart=False):
    b1, b2 = h.at("betas", 0), h.at("betas", 1)
    if h.has("weight_decay") and (is_apart or h.has("decoupled_weight_decay")):
        p = p * h.of(1 - h.at("lr") * h.at("weight_decay"))
    else:
        g = h.decayed(p, g)
    m = state["exp_avg"] + h.of(1 - b1) * (g - state["exp_avg"])
    v = h.of(b2) * state["exp_avg_sq"] + h.of(1 - b2) * g * g
    most = torch.maximum(state["max_exp_avg_sq"], v) if h.has("amsgrad") else v
    rate, length = h.of(h.at("lr") / (1 - b1**step)), root(most) / h.of((1 - b2**step).sqrt())
    return p - rate * (m / (length + h.of("eps"))), {"exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": most}


def _adamw(p, g, state, step, h):
    return _adam(p, g, state, step, h, is_apart=True)


def _adagrad(p, g, state, step, h):
    g = h.decayed(p, g)
    total = state["sum"] + g * g
    rate = h.at("lr") / (1 + (step - 1) * h.at("lr_decay"))
    return p - h.of(rate) * (g / (root(total) + h.of("eps"))), {"sum": total}


def _rmsprop(p, g, state, step, h):
    g, alpha = h.decayed(p, g), h.at("alpha")
    square = h.of(alpha) * state["square_avg"] + h.of(1 - alpha) * g * g
    new = {"square_avg": square}
    if h.has("centered"):
        mean = new["grad_avg"] = state["grad_avg"] + h.of(1 - alpha) * (g - state["grad_avg"])
        square = square - mean * mean
    g = g / (root(square) + h.of("eps"))
    if h.has("momentum"):
        g = new["momentum_buffer"] = h.of("momentum") * state["momentum_buffer"] + g
    return p - h.of("lr") * g, new


def mended(new: Tensor, old: Tensor, grad: Tensor, rate: Any) -> Tensor:
    """Return parameters without NaN at rate 0: torch's Adam for graphs divides 0 by 0 where a gradient is 0."""
    still = torch.as_tensor(rate, device=old.device) == 0
    return torch.where(still & new.isnan() & grad.isfinite(), old, new)


RULES: dict[type, Callable] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
}

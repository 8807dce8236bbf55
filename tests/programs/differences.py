"""Right or raises, one input at a time: derivatives in every mode against central differences in f64.

    s(t) = Σ c · f(x + t · v)        every mode's derivative of s at 0 is (s(h) - s(-h)) / 2h, or it raises

A function is given as a case: its named float inputs and what it makes of them. Directions v and weights c are drawn
once, from the names. What a mode cuts without a word gives 0 for s', which the difference is not.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import funcrec as fr
from funcrec.core._tree import tree_leaves
from funcrec.tables._init import name_number

H, H2 = 1e-5, 3e-4  # of first and second differences
RTOL, RTOL2 = 1e-6, 2e-5  # of the size of the derivative, and of s, which the differences are taken of
RIGHT, RAISED = "right", "raised"
ZERO = torch.zeros((), dtype=torch.float64)
ONE = torch.ones((), dtype=torch.float64)
BATCH = torch.tensor([0.0, 0.01], dtype=torch.float64)


class Case(NamedTuple):
    """f(**inputs) -> a tree; inputs are f64. refused: the inputs
    that may raise, "*" for all; everything else must be right.

    smooth: f without its rounding, which differences are taken of; rtol:
      how much of their size, and of s, the rounding may make.
    """

    name: str
    f: Callable
    inputs: dict[str, Tensor]
    refused: tuple[str, ...] = ()
    smooth: Callable | None = None
    rtol: float = 0.0


@functools.cache  # drawn once, outside of every transform, whichever it is first asked for in
def draw(name: str, shape) -> Tensor:
    generator = torch.Generator().manual_seed(name_number(name) % 2**31)
    with temporarily_clear_interpreter_stack():
        return torch.randn(shape, dtype=torch.float64, generator=generator)


def projected(tree: Any, name: str) -> Tensor:
    """Σ c · x over the float leaves."""
    total = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(tree_leaves(tree)):
        if isinstance(x, Tensor) and x.is_floating_point():
            total = total + (x.double() * draw(f"{name} {i}", x.shape)).sum()
    return total


def along(case: Case, which: str) -> Callable[[Tensor], Tensor]:
    """s(t), with 0 · t, so that plain autograd finds a way to t where f has cut its own."""
    x = case.inputs[which]
    v = draw(f"{case.name} {which}", x.shape)

    def s(t: Tensor) -> Tensor:
        inputs = {k: y.clone() for k, y in case.inputs.items()}
        return projected(case.f(**{**inputs, which: x + t * v}), case.name) + 0 * t

    return s


def autograd(s: Callable) -> Tensor:
    t = ZERO.clone().requires_grad_()
    return torch.autograd.grad(s(t), t)[0]


def dual(s: Callable) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(s(forward_ad.make_dual(ZERO.clone(), ONE))).tangent.clone()


def pushed(s: Callable) -> Callable:
    return lambda t: jvp(s, (t,), (torch.ones_like(t),))[1]


def mapped(s: Callable) -> Callable:
    """t -> Σ s(t + b) over a batch."""
    return lambda t: vmap(s)(t + BATCH).sum()


def first(s: Callable, at: float = 0.0) -> Tensor:
    return (s(ZERO + at + H) - s(ZERO + at - H)) / (2 * H)


def second(s: Callable) -> Tensor:
    near, far = (s(ZERO + k * H2) + s(ZERO - k * H2) for k in (1, 2))
    return (16 * near - far - 30 * s(ZERO)) / (12 * H2**2)  # + O(h⁴)


def over_batch(f: Callable) -> Callable:
    return lambda s: sum(f(s, float(b)) for b in BATCH)


FIRST: dict[str, tuple[Callable, Callable]] = {  # mode: (derivative, difference)
    "grad": (lambda s: grad(s)(ZERO), first),
    "autograd": (autograd, first),
    "jvp": (lambda s: pushed(s)(ZERO), first),
    "dual": (dual, first),
    "vmap": (lambda s: vmap(s)(BATCH).sum(), lambda s: sum(s(b) for b in BATCH)),
    "vmap of grad": (lambda s: vmap(grad(s))(BATCH).sum(), over_batch(first)),
    "vmap of jvp": (lambda s: vmap(pushed(s))(BATCH).sum(), over_batch(first)),
    "grad of vmap": (lambda s: grad(mapped(s))(ZERO), over_batch(first)),
    "jvp of vmap": (lambda s: pushed(mapped(s))(ZERO), over_batch(first)),
}
SECOND: dict[str, tuple[Callable, Callable]] = {
    "grad of grad": (lambda s: grad(grad(s))(ZERO), second),
    "jvp of grad": (lambda s: pushed(grad(s))(ZERO), second),
    "grad of jvp": (lambda s: grad(pushed(s))(ZERO), second),
    "jvp of jvp": (lambda s: pushed(pushed(s))(ZERO), second),
}
MODES = {**FIRST, **SECOND}
JITTED: dict[str, tuple[Callable, Callable]] = {  # of untracked numbers, the derivative within what is staged
    "jit of grad": (lambda s: fr.jit(grad(s))(ZERO), first),
    "jit of jvp": (lambda s: fr.jit(pushed(s))(ZERO), first),
}
EVERY = {**MODES, **JITTED}


def outcome(s: Callable, mode: str, needs: dict, smooth: Callable, rtol: float = 0.0) -> str:
    """RIGHT, RAISED, or the two numbers; smooth: what differences are taken of."""
    derivative, difference = EVERY[mode]
    try:
        got = derivative(s)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{RAISED}: {type(error).__name__} {str(error)[:400]}"
    if difference not in needs:
        needs[difference] = difference(smooth)
    return compared(got.detach(), needs[difference], smooth, mode, rtol)


def compared(got: Tensor, need: Tensor, s: Callable, mode: str, rtol: float = 0.0) -> str:
    """RIGHT, or the two numbers, as far as differences of s can tell."""
    size = max(1.0, float(s(ZERO).detach().abs()))
    tolerance = (rtol or (RTOL2 if mode in SECOND else RTOL)) * (size + float(need.abs()))
    return RIGHT if bool((got - need).abs() <= tolerance) else f"got {float(got):.8g}, difference {float(need):.8g}"


def sweep(case: Case, modes=tuple(MODES)) -> dict[tuple[str, str], str]:
    """{(input, mode): outcome}."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for which in case.inputs:
            s, smooth, needs = along(case, which), along(case._replace(f=case.smooth or case.f), which), {}
            s(ZERO)
            found |= {(which, mode): outcome(s, mode, needs, smooth, case.rtol) for mode in modes}
    return found


def count(found: dict) -> Counter:
    return Counter(RAISED if o.startswith(RAISED) else o if o == RIGHT else "silently wrong" for o in found.values())

"""Compare the derivatives of every mode with central differences in f64, one input at a time: right, or an error.

    s(t) = Σ c · f(x + t · v)        the derivative of s at 0 in every mode is (s(h) - s(-h)) / 2h, or it raises

A case gives a function and the function's named float inputs. Directions v and weights c are drawn once, from the
names. If a mode silently drops a gradient, the mode's s' is 0 and the difference is not 0.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from funcrec.compile import jit
from funcrec.core import outside_transforms, sure, tree_leaves
from funcrec.tables import name_number

H, H2 = 1e-5, 3e-4  # step sizes of first and second differences
# tolerances relative to the derivative, and relative to s, from which differences are computed
RTOL, RTOL2 = 1e-6, 2e-5
RIGHT, RAISED = "right", "raised"
ZERO = torch.zeros((), dtype=torch.float64)
ONE = torch.ones((), dtype=torch.float64)
BATCH = torch.tensor([0.0, 0.01], dtype=torch.float64)


class Case(NamedTuple):
    """A function and its inputs. f(**inputs) returns a tree. inputs are f64. refused: the inputs that may raise, "*"
    for all inputs. All other inputs must give right derivatives.

    smooth: f without its rounding, for the differences. rtol: the rounding allowed, relative to the derivative and
    relative to s.
    """

    name: str
    f: Callable
    inputs: dict[str, Tensor]
    refused: tuple[str, ...] = ()
    smooth: Callable | None = None
    rtol: float = 0.0


# A weight is drawn once, outside of all transforms, whichever transform asks first.
@functools.cache
def draw(name: str, shape) -> Tensor:
    generator = torch.Generator().manual_seed(name_number(name) % 2**31)
    with outside_transforms():
        return torch.randn(shape, dtype=torch.float64, generator=generator)


def projected(tree: Any, name: str) -> Tensor:
    """Return Σ c · x over the float leaves of the tree."""
    total = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(tree_leaves(tree)):
        if isinstance(x, Tensor) and x.is_floating_point():
            total = total + (x.double() * draw(f"{name} {i}", x.shape)).sum()
    return total


def along(case: Case, which: str) -> Callable[[Tensor], Tensor]:
    """Return s(t) plus 0 · t, so that plain autograd finds a path to t even where f cuts it."""
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
        return sure(forward_ad.unpack_dual(s(forward_ad.make_dual(ZERO.clone(), ONE))).tangent).clone()


def pushed(s: Callable) -> Callable:
    return lambda t: jvp(s, (t,), (torch.ones_like(t),))[1]


def exported(s: Callable[..., Any]) -> Tensor:
    """Return s's value from the program that torch.export makes of it."""
    module = torch.nn.Module()
    module.forward = lambda t: s(t)
    return torch.export.export(module, (AT,), strict=False).module()(AT)


def mapped(s: Callable[..., Any]) -> Callable[..., Any]:
    """Return t -> Σ s(t + b) over a batch."""
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
# For numbers without requires_grad: the staged function differentiates.
JITTED: dict[str, tuple[Callable, Callable]] = {
    "jit of grad": (lambda s: jit(grad(s))(ZERO), first),
    "jit of jvp": (lambda s: jit(pushed(s))(ZERO), first),
}
AT = torch.tensor(0.01, dtype=torch.float64)
value = lambda s: s(AT).detach()
# What follows from the modes above where torch's transforms are right, and programs of the function.
MORE: dict[str, tuple[Callable, Callable]] = {
    "vjp": (lambda s: vjp(s, ZERO)[1](ONE)[0], first),
    "linearize": (lambda s: linearize(s, ZERO)[1](ONE), first),
    "jacrev": (lambda s: jacrev(s)(ZERO), first),
    "jacfwd": (lambda s: jacfwd(s)(ZERO), first),
    "hessian": (lambda s: hessian(s)(ZERO), second),
    "functionalize": (lambda s: functionalize(s)(AT), value),
    "make_fx": (lambda s: make_fx(s)(ZERO)(AT), value),
}
COMPILED: dict[str, tuple[Callable, Callable]] = {
    "jit": (lambda s: jit(s)(AT), value),
    "jit, donated": (lambda s: jit(lambda t: s(t), donate="t")(AT.clone()), value),
    **JITTED,
    "export": (exported, value),
}
EVERY = {**MODES, **MORE, **COMPILED}


def outcome(s: Callable, mode: str, needs: dict, smooth: Callable, rtol: float = 0.0) -> str:
    """Return RIGHT, RAISED, or the two numbers.

    smooth: the function from which differences are computed; values are those of s. needs keeps the differences, the
    numbers that they are made of, and the size of s at 0, for the next mode.
    """
    derivative, difference = EVERY[mode]
    try:
        got = derivative(s)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        return f"{RAISED}: {type(error).__name__} {str(error)[:400]}"
    if difference not in needs:
        plain = s if difference is value or mode == "vmap" else smooth
        needs[difference] = difference(at_points(plain, needs.setdefault(plain, {})))
    if "size" not in needs:
        needs["size"] = size_of(at_points(smooth, needs.setdefault(smooth, {})))
    return compared(got.detach(), needs[difference], needs["size"], mode, rtol)


def at_points(s: Callable, known: dict[float, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return s for numbers t. known keeps its values: the differences of several modes read the same points."""

    def read(t: Tensor) -> Tensor:
        at = float(t)
        if at not in known:
            known[at] = s(t)
        return known[at]

    return read


def size_of(s: Callable) -> float:
    return max(1.0, float(s(ZERO).detach().abs()))


def compared(got: Tensor, need: Tensor, size: float, mode: str, rtol: float = 0.0) -> str:
    """Return RIGHT, or the two numbers if they differ by more than the error of the differences of an s of this
    size."""
    tolerance = (rtol or (RTOL2 if mode in SECOND or mode == "hessian" else RTOL)) * (size + float(need.abs()))
    return RIGHT if bool((got - need).abs() <= tolerance) else f"got {float(got):.8g}, difference {float(need):.8g}"


def sweep(
    case: Case, modes: Sequence[str] = tuple(MODES), inputs: Sequence[str] | None = None
) -> dict[tuple[str, str], str]:
    """Return {(input, mode): outcome} for these inputs of the case, or for all."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for which in case.inputs if inputs is None else inputs:
            s, needs = along(case, which), {}
            smooth = along(case._replace(f=case.smooth), which) if case.smooth else s
            at_points(s, needs.setdefault(s, {}))(ZERO)
            found |= {(which, mode): outcome(s, mode, needs, smooth, case.rtol) for mode in modes}
    return found


def count(found: dict) -> Counter:
    return Counter(RAISED if o.startswith(RAISED) else o if o == RIGHT else "silently wrong" for o in found.values())

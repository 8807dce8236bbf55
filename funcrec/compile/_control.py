"""cond, while_loop, fori_loop: branches and loops that values decide, under every transform.

    cond(p, f, g, x) = f(x) if p else g(x)          while_loop(c, b, x) = x if not c(x) else while_loop(c, b, b(x))

A call that can read its predicate runs Python's own `if` and `while`. Under vmap over the predicate both branches run,
and each member takes its own; a loop runs until all members are done. A jitted function stages branches and bodies as
parts of its program (`_parts`), and the program reads the predicate when it runs.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from funcrec.compile._forms_alike import as_tensors, next_carry, predicate, predicate_problems, run, selected
from funcrec.compile._parts import is_staging
from funcrec.compile._staged_control import Flattened, cond_flat, staged_loop
from funcrec.core import Problem, below, check, describe, fail, fast_flatten, typed, value_below, vmaps_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@typed
def cond(pred: Any, true_fn: Callable[[*Ts], T], false_fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return true_fn(*args) if `pred` holds, else false_fn(*args).

    Args:
      pred: bool[], or a bool.
      true_fn, false_fn: functions of `args` that return trees of one structure, with tensors of the same shapes and
        dtypes. Numbers among their results become tensors.

    Raises:
      TypeError: `pred` is not one bool, or the branches return other structures or dtypes.
      ValueError: the branches return other shapes. (A call that runs one branch only does not see the other's.)

    Law: grad, jvp and their compositions differentiate the branch that runs. Under vmap over `pred` both branches run,
      and each member gets its own; a derivative that is not finite in the other branch then makes NaN, as in JAX.
      `fr.jit` compiles both branches, and its program runs one. In a program, a branch gets what a transform follows
      by `args`, and it does not exchange values between ranks. Elsewhere, branches with exchanges need one `pred` on
      all ranks.

    Cost: a call on CUDA waits for `pred`.

    Example:
      >>> import torch, funcrec as fr
      >>> f = lambda x: fr.cond(x.sum() > 0, torch.sin, torch.cos, x)
      >>> f(torch.zeros(1)), torch.func.grad(lambda x: f(x).sum())(torch.zeros(1))
      (tensor([1.]), tensor([-0.]))

    Source: jax.lax.cond.
    """
    call = "funcrec.cond"
    if torch.compiler.is_dynamo_compiling():
        return torch.cond(pred, true_fn, false_fn, args)
    check(call, predicate_problems("pred", pred))
    if isinstance(pred, bool):
        return as_tensors(run(call, true_fn if pred else false_fn, *args))
    if vmaps_of([pred]):
        taken, other = (as_tensors(run(call, fn, *args)) for fn in (true_fn, false_fn))
        return selected(call, pred, taken, other)
    if not is_form(pred):
        return as_tensors(run(call, true_fn if bool(value_below(pred)) else false_fn, *args))
    if not is_staging():
        taken, other = (as_tensors(run(call, fn, *args)) for fn in (true_fn, false_fn))
        return selected(call, pred, taken, other)
    leaves, structure = fast_flatten(args)
    yes, no = (Flattened(call, fn, leaves, structure) for fn in (true_fn, false_fn))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    out = cond_flat(pred, yes, no, tensors)
    return yes.restored(out)


@typed
def while_loop(cond_fn: Callable[[T], Any], body_fn: Callable[[T], T], init: T) -> T:
    """Return the first of init, body_fn(init), body_fn(body_fn(init)), ... for which `cond_fn` does not hold.

    Args:
      cond_fn: a function of the carry that returns one bool, as a tensor or as Python's.
      body_fn: (carry) -> the next carry, a tree with the structure, shapes and dtypes of `init`.
      init: a tree of tensors; numbers in it become tensors.

    Raises:
      TypeError: `cond_fn` returns no bool, or `body_fn` changes the structure or a dtype of the carry; a reverse
        derivative of a loop in a jitted function.
      ValueError: `body_fn` changes a shape.

    Law: under vmap the loop runs until all members are done, and a member that is done keeps its carry. jvp and forward
      mode hold everywhere. Outside of `fr.jit`, reverse mode holds too, and keeps every step's tensors. `fr.jit`
      compiles `cond_fn` and `body_fn` once. In a program, they get what a transform follows by the carry, and do not
      exchange values between ranks. Elsewhere, loops with exchanges need as many steps on all ranks.

    Cost: a loop on CUDA waits for the device once per step. A program copies `init` once.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.while_loop(lambda x: x < 100, lambda x: 2 * x, torch.tensor(3))
      tensor(192)

    Source: jax.lax.while_loop.
    """
    return loop("funcrec.while_loop", cond_fn, body_fn, init)


def loop(call: str, cond_fn: Callable, body_fn: Callable, init: Any) -> Any:
    """Return what `while_loop` returns; errors name the call."""
    if torch.compiler.is_dynamo_compiling():
        return torch.while_loop(cond_fn, body_fn, (init,))
    carry = as_tensors(init)
    if is_staging():
        return staged_loop(call, cond_fn, body_fn, carry)
    while True:
        going = predicate(call, cond_fn, carry)
        if isinstance(going, bool):
            more, batched = going, False
        elif is_form(going):
            if torch.compiler.is_exporting() or get_proxy_mode() is not None:
                what, need = (
                    "an exported program does not hold a loop that values end.",
                    "a number of steps, or fr.jit",
                )
                fail(call, what, got="torch.export", need=need, hint="fr.fori_loop(0, n, ...)", kind=TypeError)
            return selected(call, going, next_carry(call, body_fn, carry), carry)
        else:
            more, batched = bool(value_below(going).any()), bool(vmaps_of([going]))
        if not more:
            return carry
        new = next_carry(call, body_fn, carry)
        carry = selected(call, cast(Tensor, going), new, carry) if batched else new


@typed
def fori_loop(lower: Any, upper: Any, body_fn: Callable[[Tensor, T], T], init: T) -> T:
    """Return the carry after body_fn(i, carry) for i from `lower` to `upper` - 1.

    Args:
      lower, upper: ints, or integer tensors without dimensions.
      body_fn: (i, carry) -> the next carry, as in `while_loop`. i is an i64 tensor without dimensions for all bounds.
      init: a tree of tensors; numbers in it become tensors.

    Law: as `while_loop`. If both bounds are ints, a loop in a jitted function is unrolled, so reverse mode holds there,
      too, and the program grows with the number of steps.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.fori_loop(0, 5, lambda i, total: total + i, torch.tensor(0))
      tensor(10)

    Source: jax.lax.fori_loop.
    """
    call = "funcrec.fori_loop"
    check(call, bound_problems("lower", lower), bound_problems("upper", upper))
    if isinstance(lower, int) and isinstance(upper, int):
        carry = as_tensors(init)
        for i in range(lower, upper):
            carry = next_carry(call, lambda c: body_fn(torch.tensor(i), c), carry)  # noqa: B023
        return carry
    device = next(x.device for x in (lower, upper) if isinstance(x, Tensor))
    first, last = (torch.as_tensor(x, device=device).to(torch.int64) for x in (lower, upper))
    # torch.compile refuses a body that returns a part of its argument.
    body = lambda c: (c[0] + 1, c[1].clone(), next_carry(call, lambda carry: body_fn(c[0], carry), c[2]))
    return loop(call, lambda c: c[0] < c[1], body, (first, last, as_tensors(init)))[2]


def is_form(pred: Tensor) -> bool:
    """Return whether the predicate has no value here: a function is being staged, or shapes alone are computed."""
    plain = below(pred)
    return is_staging() or isinstance(plain, FakeTensor) or plain.is_meta


# -- validators --------------------------------------------------------------------------------------------------


def bound_problems(name: str, x: Any) -> Iterator[Problem]:
    is_tensor = isinstance(x, Tensor) and x.dim() == 0
    is_one = is_tensor and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    if not is_one and (isinstance(x, bool) or not isinstance(x, int)):
        yield Problem(f"`{name}` is not an integer.", describe(x), "an int, or i[]", f"{name}=10", TypeError)
    elif isinstance(x, int) and not -(2**63) <= x < 2**63:
        yield Problem(f"`{name}` is out of range.", f"{x}", "-2⁶³ <= an int < 2⁶³", f"{name}=10")

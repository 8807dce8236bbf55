"""Checks linear maps against their transposes, and derivatives against differences.

⟨Lx, y⟩ = ⟨x, Lᵀy⟩            f'(x)·t = (f(x + h·t) - f(x - h·t)) / 2h + O(h²)
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from funcrec.core import Count, Key, NotNegative, describe, fail, own_errors, paths, random, typed
from funcrec.testing._trees import dense_leaves, with_floats

ADJOINT_ULPS = 16  # the error that an inner product may have, in units of the coarsest dtype's epsilon

# A central difference in f64 has a relative error of about h² + eps / h, which is smallest near h = eps^(1/3). Each
# order of differentiation compares one first derivative of an exact function.
STEP = 6e-6
RTOL = ATOL = 1e-6

Leaves = dict[str, Tensor]


@typed
def check_adjoint(
    forward: Callable[[Any], Any], transpose: Callable[[Any], Any], x: Any, y: Any = None, *, key: Key | None = None
) -> None:
    """Assert that `transpose` is the transpose of the linear map `forward`: ⟨forward(x), y⟩ = ⟨x, transpose(y)⟩.

    Args:
      forward, transpose: functions of one pytree.
      x: a pytree that `forward` takes.
      y: a pytree that `transpose` takes. None draws it from a normal distribution, in the form of forward(x).
      key: the key from which y is drawn; funcrec.key(0) by default.

    Inner products run over the float tensors, path by path, in f64. Padding counts as zero, and RowGrads count as their
    dense gradient. If transpose(y) lacks a path of x, the cotangent there is zero. The tolerance is 16 roundings of
    the coarsest dtype, relative to ‖forward(x)‖·‖y‖ + ‖x‖·‖transpose(y)‖.

    Raises:
      AssertionError: if the inner products differ, which the error shows, or if transpose(y) has a path that x lacks.

    Example:
      >>> import torch
      >>> from funcrec.testing import check_adjoint
      >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
      >>> check_adjoint(lambda x: a @ x, lambda y: a.T @ y, torch.ones(2))
      >>> check_adjoint(lambda x: a @ x, lambda y: a @ y, torch.ones(2), torch.tensor([1.0, 0.0]))
      Traceback (most recent call last):
      AssertionError: `transpose` is not the transpose of `forward`.
        got   ⟨Lx, y⟩ = 3, ⟨x, Lᵀy⟩ = 4
        need  a difference of at most 2.31e-05
        try   torch.func.vjp(forward, x)[1], which is the transpose where `forward` is linear
    """
    call, one = "funcrec.testing.check_adjoint", "a tree of tensors that it takes"
    with own_errors(call, forward, x, need=one):
        lx = forward(x)
    if y is None:
        y = with_floats(lx, _normal(dict(_floats(lx)), random.key(0) if key is None else key))
    with own_errors(call, transpose, y, need=one):
        lty = transpose(y)
    x_, y_, lx_, lty_ = map(dense_leaves, (x, y, lx, lty))
    extra = sorted((set(lty_) - set(x_)) | (set(lx_) ^ set(y_)))
    if extra:
        hint = "trees with the same names on both sides: y as forward(x) is, or y=None"
        got, need = f"{extra} in one tree only", "forward(x) like y, transpose(y) like x"
        fail(call, "the paths of the trees do not match.", got=got, need=need, hint=hint, kind=AssertionError)
    for (path, a), b in zip(
        [*lx_.items(), *lty_.items()], [*(y_[k] for k in lx_), *(x_[k] for k in lty_)], strict=True
    ):
        if a.shape != b.shape:
            what, hint = f"the shapes at `{path}` do not match.", "y as forward(x) is, or y=None"
            fail(call, what, got=f"{describe(a)} and {describe(b)}", need="one shape", hint=hint, kind=AssertionError)
    left, right = _inner(lx_, y_), _inner(x_, lty_)
    leaves = [t for tree in (x_, y_, lx_, lty_) for t in tree.values()]
    eps = max((torch.finfo(t.dtype).eps for t in leaves), default=0.0)
    bound = ADJOINT_ULPS * eps * (_norm(lx_) * _norm(y_) + _norm(x_) * _norm(lty_))
    if not abs(left - right) <= bound:
        raise AssertionError(
            "`transpose` is not the transpose of `forward`.\n"
            f"  got   ⟨Lx, y⟩ = {left:.9g}, ⟨x, Lᵀy⟩ = {right:.9g}\n  need  a difference of at most {bound:.3g}\n"
            "  try   torch.func.vjp(forward, x)[1], which is the transpose where `forward` is linear"
        )


@typed
def check_grads(
    f: Callable,
    args: Sequence[Any],
    *,
    order: Count = 2,
    modes: Sequence[Literal["fwd", "rev"]] = ("fwd", "rev"),
    key: Key | None = None,
    rtol: NotNegative = RTOL,
    atol: NotNegative = ATOL,
) -> None:
    """Assert that torch.func's derivatives of `f` at `args` agree with differences in f64, up to `order`.

    Args:
      f: a function of pytrees whose answer is a pytree. Float tensors are differentiated, and all other leaves are
        fixed.
      args: the arguments of f. The check converts float tensors to f64.
      order: 1 for the derivative, 2 also for the derivative of the derivative, ...
      modes: "fwd" (jvp against a central difference) and "rev" (⟨y, f'·t⟩ by differences = ⟨vjp(y), t⟩). Every order
        is checked in every combination of modes.
      key: the key from which tangents and cotangents are drawn; funcrec.key(0) by default.

    Raises:
      AssertionError: if a derivative differs. The error names the mode, the order and the sizes.

    Example:
      >>> import torch
      >>> from funcrec.testing import check_grads
      >>> check_grads(lambda x: {"y": x["a"].sin() * x["b"]}, ({"a": torch.ones(3), "b": torch.tensor(2.0)},))

    Source: jax.test_util.check_grads.
    """
    example = tuple(args)
    point = {path: x.detach().double() for path, x in _floats(example)}
    if not point:
        got = f"{[describe(a) for a in example]}"
        fail("funcrec.testing.check_grads", "`args` have no float tensor.", got=got, need="one", kind=TypeError)

    def flat(leaves: Leaves) -> Leaves:
        return dict(_floats(f(*with_floats(example, leaves))))

    _check(flat, point, order, modes, random.key(0) if key is None else key, (rtol, atol), "")


def _check(f: Callable[[Leaves], Leaves], x: Leaves, order: int, modes, key: Tensor, tol, trail: str) -> None:
    if order == 0:
        return
    tangent, inner = _normal(x, random.fold_in(key, 1)), random.fold_in(key, 2)
    above, below = (f({k: x[k] + h * tangent[k] for k in x}) for h in (STEP, -STEP))
    difference = {k: (above[k] - below[k]) / (2 * STEP) for k in above}
    cotangent = _normal(above, random.fold_in(key, 3))
    if "fwd" in modes:
        fwd = lambda p: torch.func.jvp(f, (p,), (tangent,))[1]
        _agree(dict(fwd(x)), difference, tol, f"{trail}fwd")
        _check(fwd, x, order - 1, modes, inner, tol, f"{trail}fwd of ")
    if "rev" in modes:
        rev = lambda p: torch.func.vjp(f, p)[1](cotangent)[0]
        got, need = _products(rev(x), tangent), _products(cotangent, difference)
        _agree({"": got}, {"": need}, tol, f"{trail}rev")
        _check(rev, x, order - 1, modes, inner, tol, f"{trail}rev of ")


def _agree(got: Leaves, need: Leaves, tol: tuple[float, float], mode: str) -> None:
    rtol, atol = tol
    for path, g in got.items():
        apart, scale = (g - need[path]).abs(), need[path].abs().amax() if g.numel() else 0
        if not bool((apart <= atol + rtol * scale).all()):
            raise AssertionError(
                f"the derivative ({mode}) of `f` is not what differences say{f', at `{path}`' if path else ''}.\n"
                f"  got   {g.tolist()}\n  need  {need[path].tolist()}, within rtol={rtol}, atol={atol}"
            )


def _floats(tree: Any) -> list[tuple[str, Tensor]]:
    return [(path, x) for path, x in paths(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def _normal(like: Leaves, key: Tensor) -> Leaves:
    """Return N(0, 1) tensors with the shapes, dtypes and devices of `like`."""
    out = {}
    for i, (path, x) in enumerate(like.items()):
        draw = random.normal(random.fold_in(key, i), tuple(x.shape), dtype=torch.float64)
        out[path] = draw.to(device=x.device, dtype=x.dtype)
    return out


def _products(a: Leaves, b: Leaves) -> Tensor:
    return sum(((a[k].double() * b[k].double()).sum() for k in a if k in b), torch.zeros((), dtype=torch.float64))


def _inner(a: Leaves, b: Leaves) -> float:
    return float(_products(a, b))


def _norm(a: Leaves) -> float:
    return _inner(a, a) ** 0.5

"""All uses of torch's private levels of transforms, in one file, because torch's next release may change the levels.

    x at levels 1, 2, ... of vmap, grad, jvp, ...  =
    a tensor wrapped once for each level that it belongs to; the innermost level is the outermost wrapper

The kernels import torch only. So the kernels have a separate file of this kind: `kernels/tracked.py`.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch._C._functorch as _functorch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.eager_transforms import _create_differentiable
from torch._functorch.predispatch import _add_batch_dim
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual

from funcrec.core._errors import Problem
from funcrec.core._tree import tree_flatten, tree_unflatten

outside_transforms = temporarily_clear_interpreter_stack
get_unwrapped = _functorch.get_unwrapped


def is_in_transform() -> bool:
    """Return whether a transform of torch.func runs; a forward level alone does not count."""
    return _functorch.peek_interpreter_stack() is not None


def is_in_vmap() -> bool:
    """Return whether the innermost transform is a vmap."""
    top = _functorch.peek_interpreter_stack()
    return top is not None and top.key() == _functorch.TransformType.Vmap


def current_level() -> int:
    """Return the level of the innermost transform, or 0 outside all transforms."""
    return _functorch.maybe_current_level() or 0


def level_of(x: Tensor) -> int:
    """Return the innermost level that x belongs to, 0 if x belongs to none, or -1 if that level has ended."""
    return _functorch.maybe_get_level(x) if is_wrapped(x) else 0


def is_wrapped(x: Tensor) -> bool:
    """Return whether x belongs to a level."""
    return _functorch.is_functorch_wrapped_tensor(x)


def below(x: Tensor) -> Tensor:
    """Return x below all transforms, the tensor that autograd tracks; under vmap this is the whole batch."""
    while is_wrapped(x):
        x = _functorch.get_unwrapped(x)
    return x


def value_below(x: Tensor) -> Tensor:
    """Return x below all transforms, without autograd's history."""
    return below(x).detach()


def member_problems(x: Tensor, name: str) -> Iterator[Problem]:
    """Yield a problem if a vmap around x has no members: torch cannot compute a single number for zero members."""
    if is_wrapped(x) and not torch.compiler.is_dynamo_compiling() and 0 in below(x).shape:
        got, need = f"`{name}` of a vmap of size 0", "a vmap of size 1 or more"
        yield Problem("the vmap has no members.", got, need, "a branch in Python, if there may be none")


def tangents_below(x: Tensor, place: int = 1) -> dict[int, Tensor]:
    """Return {place: tangent}, the tangents of x at all levels of forward derivatives, each below all transforms.

    The dict includes tangents of tangents. A place encodes the levels that lead to its tangent.
    """
    found = {}
    with contextlib.ExitStack() as lowered:
        while True:
            level = level_of(x)
            while (top := _functorch.peek_interpreter_stack()) is not None and top.level() > level:
                lowered.enter_context(temporarily_pop_interpreter_stack())
            if not is_wrapped(x) or not _functorch.is_batchedtensor(x):  # A batch has its tangent inside.
                tangent = torch._VF._unpack_dual(x, level=0)[1]
                own = place * 64 + level + 1
                found |= {} if tangent is None else {own: value_below(tangent)} | tangents_below(tangent, own)
            if not is_wrapped(x):
                return found
            x = _functorch.get_unwrapped(x)


@contextlib.contextmanager
def own_level() -> Iterator[tuple[int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Return a context with a level of its own, at which nothing is differentiated, as (level, wrap, unwrap).

    wrap: a tensor -> the same tensor at the level. unwrap: the inverse.
    """
    level = _functorch._grad_increment_nesting()
    try:
        yield level, lambda x: _functorch._wrap_for_grad(x, level), lambda x: _functorch._unwrap_for_grad(x, level)
    finally:
        _functorch._grad_decrement_nesting()


def pulled_back(fn: Callable[..., Sequence[Tensor]], xs: Sequence[Tensor], d: Sequence[Tensor]) -> list[Tensor]:
    """Return the cotangents of xs, from the cotangents d of fn(*xs).

    torch.func.vjp differentiates when its level is gone, and then a rule of fn that opens a level meets tensors of the
    old one. Here the level is open until the end. (In 2.13, `create_graph` decides whether outer levels track.) A zero
    is made outside of the level, whose wrapper would outlive it.
    """
    create_graph, found = torch.is_grad_enabled(), [None] * len(xs)
    with own_level() as (level, wrap, unwrap), torch.enable_grad():
        own = [_create_differentiable(wrap(x), level) for x in xs]
        pairs = [(y, wrap(g)) for y, g in zip(fn(*own), d, strict=True) if y.requires_grad]
        if pairs:
            ys, gs = zip(*pairs, strict=True)
            grads = torch.autograd.grad(ys, own, gs, create_graph=create_graph, allow_unused=True)
            found = [None if g is None else unwrap(g) for g in grads]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]


def pushed_forward(fn: Callable[..., Any], xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return the tangents of fn(*xs), a tree, along those of xs.

    torch refuses torch.func.jvp inside forward_ad.dual_level and torch.func.linearize. There the tangents are those of
    the transpose of the transpose: y -> fn'ᵀ y is linear.
    """
    if forward_ad._current_level < 0 or eager_transforms.JVP_NESTING:
        return torch.func.jvp(fn, tuple(xs), tuple(tangents))[1]
    y, transpose = torch.func.vjp(fn, *xs)[:2]
    leaves, structure = tree_flatten(y)
    back = torch.func.vjp(transpose, tree_unflatten([torch.zeros_like(x) for x in leaves], structure))[1]
    return back(tuple(tangents))[0]


def is_differentiated_above(x: Tensor, level: int, quiet: Collection[int] = ()) -> bool:
    """Return whether a grad or jvp inside `level` tracks x. At the levels `quiet` nothing is differentiated."""
    while level_of(x) > level:
        if not _functorch.is_batchedtensor(x) and level_of(x) not in quiet:
            return True
        x = _functorch.get_unwrapped(x)
    return False


def belongs_above(x: Tensor, level: int) -> bool:
    """Return whether a vmap inside `level` batches x, or a grad or jvp inside `level` tracks x."""
    with torch._C.DisableTorchFunction():  # A tensor inside x may have a stand-in of its own (`_runs`).
        while level_of(x) > level:
            if _functorch.is_batchedtensor(x) or x.requires_grad or unpack_dual(x).tangent is not None:
                return True
            x = _functorch.get_unwrapped(x)
        return False


def vmaps_above(x: Tensor, level: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Return x below all transforms above `level`, and (level, dimension, size) of each vmap among these transforms.

    The outermost vmap comes first.
    """
    maps = []
    while level_of(x) > level:
        own, dim = level_of(x), _functorch.maybe_get_bdim(x) if _functorch.is_batchedtensor(x) else None
        x = _functorch.get_unwrapped(x)
        if dim is not None:
            maps.append((own, dim, x.shape[dim]))
    return x, maps[::-1]


def member_of(x: Any, dims: Sequence[int | None], member: Sequence[int]) -> Any:
    """Return the part of x for one member of nested vmaps, the outermost vmap first.

    dims: the dimension of x that each vmap maps, or None. member: the member's place in each vmap.
    """
    for dim, i in zip(dims, member, strict=True):
        x = x if dim is None else x.select(dim, i)
    return x


def members_below(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return (place, tree) of each member of the surrounding vmaps.

    The trees lie below all transforms, so code can read values.
    """
    leaves, structure = tree_flatten(tree)
    below = [vmaps_above(x, 0) if isinstance(x, torch.Tensor) else (x, []) for x in leaves]
    sizes = {level: size for _, maps in below for level, _, size in maps}
    dims = [[{v: d for v, d, _ in maps}.get(v) for v in sorted(sizes)] for _, maps in below]
    with outside_transforms():
        of = lambda place: [member_of(x, d, place) for (x, _), d in zip(below, dims, strict=True)]
        places = itertools.product(*(range(sizes[v]) for v in sorted(sizes)))
        return [(place, tree_unflatten(of(place), structure)) for place in places]


def under_vmaps(x: Tensor, levels: Sequence[int]) -> Tensor:
    """Return x [K, ..., rest] as the vmaps of these levels see it, [rest]."""
    for level in levels:
        x = _functorch._add_batch_dim(x, 0, level)
    return x


def by_vmap_rule(fn: Callable[..., Tensor], rule: Callable, tensors: Sequence[Tensor]) -> Tensor:
    """Return fn(*tensors), computed below the innermost transform, which is a vmap.

    If a tensor is a batch of that vmap, the result is the `out` of rule(info, dims, *tensors) -> (out, 0). The `vmap`
    of an autograd.Function takes the same arguments. This function needs no autograd.Function.
    """
    level = _functorch.peek_interpreter_stack().level()
    tensors, dims = zip(*(_functorch._unwrap_batched(x, level) for x in tensors), strict=True)
    with temporarily_pop_interpreter_stack():
        if all(d is None for d in dims):
            return fn(*tensors)
        sizes = {x.shape[d] for x, d in zip(tensors, dims, strict=True) if d is not None}
        out, _ = rule(VmapInfo(sizes.pop(), "error"), dims, *tensors)
    return _add_batch_dim(out, 0, level)


def one_level_below(rule: Callable[..., Any], tensors: Any, tangents: Any) -> Any:
    """Return rule(tensors, tangents), a tensor or a tuple of tensors, which outer transforms can differentiate.

    torch 2.13 runs a jvp rule at the level of its jvp, with forward derivatives off: jvp of jvp would be silently zero.
    So the rule runs one level below, as torch.func runs `forward`.
    """
    if not is_in_transform():
        return rule(tensors, tangents)
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    plain = [[x if x is None else _functorch._unwrap_for_grad(x, level) for x in xs] for xs in (tensors, tangents)]
    with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
        out = rule(*plain)
    wrap = lambda x: None if x is None else _functorch._wrap_for_grad(x, level)
    return tuple(map(wrap, out)) if isinstance(out, tuple) else wrap(out)

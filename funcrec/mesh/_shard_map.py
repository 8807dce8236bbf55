"""shard_map: runs a function that is written for one rank on every rank of a mesh.

    shard_map(f)(x) = join_r f(cut(x)[r])        with the collectives of f between the ranks

On an emulated mesh f runs once, vmapped over every axis, on global values. On real ranks f runs on each rank, on the
rank's own shard.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from funcrec.core import (
    Problem,
    describe,
    fail,
    level_of,
    own_errors,
    sure,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    typed,
    vmaps_of,
)
from funcrec.core import check as raise_for
from funcrec.mesh._axes import Axis, bind, bound_axis, bound_names
from funcrec.mesh._collectives import all_gather
from funcrec.mesh._mesh import Mesh, ambient_mesh
from funcrec.mesh._parts import Part, axis_problems, cut, flatten_parts, join, match_specs, size_problems
from funcrec.mesh._same import is_readable, unequal, unequal_over_ranks
from funcrec.mesh._spec import P
from funcrec.mesh.processes._alike import RankForm, agree_on_program, apart_over_ranks, report_failure, staged
from funcrec.mesh.processes._together import broken_off

A = ParamSpec("A")
R = TypeVar("R")
CALL = "funcrec.shard_map"


@typed
def shard_map(
    f: Callable[A, R],
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Collection[str] | None = None,
    check: bool = True,
) -> Callable[A, R]:
    """Return f as each rank of a mesh runs it, with the mesh's axes bound for collectives.

    Args:
      f: takes one rank's values and returns one rank's values. It must run the same collectives on all ranks.
      mesh: None for the mesh of the enclosing `with mesh:`.
      in_specs: a P for each positional argument (a tuple), or one P for all; each may be a prefix of its argument's
        tree. A leaf that is not a tensor goes to every rank unchanged, under P().
      out_specs: a P for the result, or a tree of Ps that is a prefix of the result's tree. Where a P does not name an
        axis, the value must be the same on all ranks of that axis.
      axis_names: the axes to bind; None for all axes that are not bound yet.
        An enclosing or nested shard_map binds the other axes.
      check: whether to check, also under vmap, that results have equal bits along the axes that out_specs do not name.
        On real ranks this costs two exchanges and reads on the host. One sends checksums. The other, of 16 bytes,
        shows whether the same arguments have a derivative (requires_grad, a transform) on all ranks.
        In two cases equal values cannot be checked, or do not suffice: inside `jit`, where no value can be read, and on
        an emulated mesh if a result is differentiated. There a result may depend only on arguments that are whole along
        the axis and on results of psum, pmean, pmax, pmin and all_gather over it. (JAX counts all_gather's results as
        different on each rank.) If a result is the same for another reason, pass check=False: the result is then rank
        0's. On real ranks tangents are compared as values are. A reverse derivative is that of the rank's own result.

    Returns:
      On an emulated mesh a function of global values. On real ranks a function of this rank's shards (`shard`,
      `unshard`). Inside another shard_map the values are global over the new axes on both kinds of mesh.

    Raises:
      TypeError, ValueError: if an argument, a result, an axis or a size does not fit. The error names each of them.
      ValueError: if a value differs along an axis that its spec does not name, or, inside `jit` or a derivative,
        may differ.

    Law: f computes the same values on an emulated mesh and on real ranks.

    Example: each rank multiplies its rows of a matrix; psum adds the products.
      >>> import torch, funcrec as fr
      >>> f = lambda w, x: fr.psum(x @ w, "model")
      >>> g = fr.shard_map(f, mesh=fr.Mesh.emulated(model=2), in_specs=(fr.P("model"), fr.P(None, "model")),
      ...     out_specs=fr.P())
      >>> g(torch.eye(4), torch.arange(4.0)[None])
      tensor([[0., 1., 2., 3.]])

    Source: jax.shard_map, with check_vma inside `jit` and derivatives.
    """

    return mapped(f, mesh, in_specs, out_specs, axis_names, check)


def mapped(
    f: Callable[..., Any],
    mesh: Mesh | None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Collection[str] | None = None,
    check: bool = True,
    alike: Mapping[Any, Any] | None = None,
) -> Callable[..., Any]:
    """Return f as each rank runs it, as `shard_map` does, and compare forms of arguments between real ranks.

    alike: {number of an argument: its name}, for the arguments to compare where `check` is set. An emulated mesh has
      one form by nature.
    """

    @functools.wraps(f)
    def run(*args):
        where = _mesh_of(CALL, mesh)
        names = _mapped_axes(where, axis_names)
        with reported_to_ranks(where if check else None, args, names, bool(alike)):
            parts = _arguments(in_specs, args, alike or {})
            raise_for(CALL, axis_problems(parts, names))
        if where.is_emulated:
            return _run_emulated(f, where, names, parts, args, out_specs, check)
        if _is_nested(where):
            return _run_nested(f, where, names, parts, args, out_specs, check)
        return _run_real(f, where, names, parts, args, out_specs, check, alike or {})

    return run


@contextlib.contextmanager
def reported_to_ranks(mesh: Mesh | None, args: Any, names: Sequence[str] = (), is_alike: bool = True) -> Iterator[None]:
    """Report an error of this rank to the other ranks, which then also raise it.

    The error occurs before the exchange in which real ranks compare their arguments (`_check_alike`). The error travels
    in that exchange.
    """
    try:
        yield
    except Exception as error:
        where = None if mesh is None else _mesh_of(CALL, mesh)
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if where is None or where.is_emulated or not (is_alike if staged.get() else all(map(is_readable, tensors))):
            raise
        with contextlib.suppress(RuntimeError):  # the other ranks have failed too, in another place
            device = torch.device(sure(where.device_mesh).device_type)
            with bind(where.bound_axes(names or where.axis_names, device)):
                report_failure(error, names or where.axis_names)
        raise


@typed
def shard(tree: Any, specs: Any, *, mesh: Mesh | None = None) -> Any:
    """Return global values in the form that `shard_map` takes.

    On real ranks it returns this rank's parts. On an emulated mesh it returns the values themselves.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.shard(torch.arange(4), fr.P("data"), mesh=fr.Mesh.emulated(data=2))
      tensor([0, 1, 2, 3])
    """
    where = _mesh_of("funcrec.shard", mesh)
    parts = match_specs("funcrec.shard", "tree", specs, tree)
    raise_for("funcrec.shard", axis_problems(parts, where.axis_names))
    raise_for("funcrec.shard", size_problems(parts, where.shape))
    return tree if where.is_emulated else _rebuild(tree, [_own(p, where, where.shape) for p in parts])


@typed
def unshard(tree: Any, specs: Any, *, mesh: Mesh | None = None) -> Any:
    """Return a result of `shard_map` as global values, on every rank.

    This is the inverse of `shard`.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.unshard(torch.arange(4), fr.P("data"), mesh=fr.Mesh.emulated(data=2))
      tensor([0, 1, 2, 3])
    """
    where = _mesh_of("funcrec.unshard", mesh)
    parts = match_specs("funcrec.unshard", "tree", specs, tree)
    raise_for("funcrec.unshard", axis_problems(parts, where.axis_names))
    if where.is_emulated:
        return tree
    with bind(where.bound_axes(where.axis_names, _device(parts))):
        _check_alike("funcrec.unshard", parts, where.axis_names, {0: "tree"})
        return _rebuild(tree, [_whole(p, where.shape) for p in parts])


# -- one process -------------------------------------------------------------------------------------------------


def _run_emulated(f, mesh: Mesh, names, parts: Sequence[Part], args, out_specs, is_checked: bool):
    """Return the result of f, which runs once, on cut values."""
    sizes = {a: mesh.shape[a] for a in names}
    raise_for(CALL, size_problems(parts, sizes))
    tree, results, whole, varying = _emulate(f, sizes, parts, [cut(p, sizes) for p in parts], args, out_specs)
    if is_checked:
        raise_for(CALL, unequal(results, whole, varying, sizes))
    first = [_drop_axes(x, p.spec, names) for p, x in zip(results, whole, strict=True)]
    return _rebuild(tree, [join(x, p.spec, sizes) for p, x in zip(results, first, strict=True)])


def _emulate(f, sizes, parts: Sequence[Part], stacked: Sequence[Any], args, out_specs, members: Mapping = {}):
    """Return the results of f, which runs under a vmap for each axis. The first axis is outermost.

    The result is the tree of one rank's results, its parts, each part with all axes in front, and for each tensor of a
    part the axes that it depends on.

    members: {axis: how many of its ranks run}, for the forms of results alone.
    """
    leaves, structure = tree_flatten(stacked)
    axes_of = [p.spec.axes for p, x in zip(parts, stacked, strict=True) for _ in tree_leaves(x)]
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    # Marker a holds a rank's place on axis a. Only the vmap level of that
    # axis batches it, and so a collective finds its level.
    markers = [torch.arange(members.get(a, n), device=_device(parts)) for a, n in sizes.items()]
    found: dict[str, Any] = {}

    def one_rank(markers, *tensors):
        mine = list(leaves)
        for i, x in zip(at, tensors, strict=True):
            mine[i] = x
        with bind([Axis(a, n, m) for (a, n), m in zip(sizes.items(), markers, strict=True)]):
            out = _call(f, *_rebuild(args, tree_unflatten(mine, structure)))
        found["tree"], found["parts"] = out, _results(out_specs, out, tuple(sizes))
        levels = {level_of(m): a for a, m in zip(sizes, markers, strict=True)}
        own_axes = lambda x: frozenset(levels[v] for v in vmaps_of([x]) if v in levels)
        found["varying"] = [list(map(own_axes, _tensors(p))) for p in found["parts"]]
        return [x for p in found["parts"] for x in _tensors(p)]

    mapped = one_rank
    for name in reversed(sizes):
        # A value that is not cut along the axis is not batched there: P() says that all ranks have the same value.
        dims = [0 if name in axes_of[i] else None for i in at]
        mapped = torch.func.vmap(mapped, in_dims=([0 if a == name else None for a in sizes], *dims))
    results = iter(mapped(markers, *(leaves[i] for i in at)))
    whole = [tree_map(lambda x: next(results) if isinstance(x, Tensor) else x, p.value) for p in found["parts"]]
    return found["tree"], found["parts"], whole, found["varying"]


def _drop_axes(stacked: Any, spec: P, names: Sequence[str]) -> Any:
    """Return the values of rank 0 along the axes that the spec does not name."""
    place = tuple(slice(None) if a in spec.axes else 0 for a in names)
    return tree_map(lambda x: x[place] if isinstance(x, Tensor) else x, stacked)


# -- real ranks --------------------------------------------------------------------------------------------------


def _run_real(f, mesh: Mesh, names, parts: Sequence[Part], args, out_specs, is_checked: bool, alike: Mapping = {}):
    """Return the result of f on this rank's shards."""
    with bind(mesh.bound_axes(names, _device(parts))), _lost_ranks():
        if is_checked:
            _check_alike(CALL, parts, names, alike)
        out = _call(f, *args)
        results = _results(out_specs, out, names)
        if is_checked and all(is_readable(x) for p in results for x in _tensors(p)):
            raise_for(CALL, unequal_over_ranks(results, names))
        elif is_checked:
            raise_for(CALL, _unequal_in_emulation(f, mesh, names, parts, args, out_specs))
    return out


@contextlib.contextmanager
def _lost_ranks() -> Iterator[None]:
    """Return a context that raises an error with words if an exchange in its body breaks off."""
    try:
        yield
    except RuntimeError as error:
        if (said := broken_off(CALL, error)) is error:
            raise
        raise said from error


def _check_alike(call: str, parts: Sequence[Part], names: Sequence[str], alike: Mapping[int, str]) -> None:
    told = [RankForm.of(p, p.path.startswith(tuple(alike.values()))) for p in parts]
    if all(is_readable(x) for p in parts for x in _tensors(p)):
        raise_for(call, apart_over_ranks(told, names))
    elif staged.get() and alike:
        agree_on_program(
            f"funcrec.jit({staged.get()})", [t for t in told if t.form], sure(bound_axis(call, names[0]).group)
        )


def _unequal_in_emulation(f, mesh: Mesh, names, parts: Sequence[Part], args, out_specs) -> Iterator[Problem]:
    """Report the results that may differ between ranks, while f is staged.

    It runs f for two ranks of each axis at once, on shapes alone, and adds no operation to the program. Two show what
    depends on a rank, and more would cost more: work and static arguments grow with the ranks that run.
    """
    sizes = {a: min(mesh.shape[a], 2) for a in names}
    cut_by = lambda p: [sizes[a] for a in sizes if a in p.spec.axes]
    some = lambda p: tree_map(lambda x: x.new_empty([*cut_by(p), *x.shape]) if isinstance(x, Tensor) else x, p.value)
    with disable_proxy_modes_tracing():
        each = {a: mesh.shape[a] for a in names}
        _, results, whole, varying = _emulate(f, each, parts, list(map(some, parts)), args, out_specs, sizes)
    yield from unequal(results, whole, varying, sizes)


def _run_nested(f, mesh: Mesh, names, parts: Sequence[Part], args, out_specs, is_checked: bool):
    """Return the result of f on this rank's part of values that are whole along the new axes."""
    sizes = {a: mesh.shape[a] for a in names}
    raise_for(CALL, size_problems(parts, sizes))
    out = _run_real(f, mesh, names, parts, _rebuild(args, [_own(p, mesh, sizes) for p in parts]), out_specs, is_checked)
    with bind(mesh.bound_axes(names, _device(parts))):
        return _rebuild(out, [_whole(p, sizes) for p in _results(out_specs, out, names)])


def _own(part: Part, mesh: Mesh, sizes) -> Any:
    """Return this rank's part of a global value."""
    place = tuple(mesh.coordinates[a] for a in sizes if a in part.spec.axes)
    return tree_map(lambda x: x[place] if isinstance(x, Tensor) else x, cut(part, sizes)) if place else part.value


def _whole(part: Part, sizes) -> Any:
    """Return the global value, gathered from the parts of the ranks."""
    axes = tuple(a for a in sizes if a in part.spec.axes)
    if not axes:
        return part.value
    gathered = all_gather(part.value, axes)
    return join(tree_map(lambda x: x.unflatten(0, [sizes[a] for a in axes]), gathered), part.spec, sizes)


# -- arguments ---------------------------------------------------------------------------------------------------


def _call(f: Callable, *args: Any) -> Any:
    with own_errors(CALL, f, *args, need="one rank's part of each argument"):
        return f(*args)


def _mesh_of(call: str, mesh: Mesh | None) -> Mesh:
    where = ambient_mesh() if mesh is None else mesh
    if not isinstance(where, Mesh):
        got, hint = "None, and no `with mesh:`" if mesh is None else describe(mesh), "fr.Mesh.emulated(data=2)"
        fail(call, "there is no mesh.", got=got, need="a Mesh", hint=hint, kind=TypeError)
    # `_unequal_in_emulation` emulates real ranks to check shapes: calls inside that function use the emulated axes.
    bound = [bound_axis(call, a) for a in where.axis_names if a in bound_names()]
    return Mesh(where.axes) if any(a.group is None for a in bound) else where


def _mapped_axes(mesh: Mesh, axis_names: Collection[str] | None) -> tuple[str, ...]:
    """Return the axes that a call binds, in the order of the mesh."""
    bound = bound_names()
    chosen = [a for a in mesh.axis_names if a not in bound] if axis_names is None else list(axis_names)
    wrong = [a for a in chosen if a not in mesh.axis_names]
    if wrong:
        fail(CALL, "`axis_names` are not the mesh's.", got=f"{wrong}", need=f"among {list(mesh.axis_names)}")
    twice = [a for a in chosen if a in bound]
    if twice or not chosen:
        got, need = f"{twice or list(mesh.axis_names)}, bound by an enclosing shard_map", "axes that are not bound yet"
        fail(CALL, "an axis is bound twice.", got=got, need=need, hint="axis_names=... of the outer call")
    return tuple(a for a in mesh.axis_names if a in chosen)


def _is_nested(mesh: Mesh) -> bool:
    return any(a in bound_names() for a in mesh.axis_names)


def _arguments(in_specs: Any, args: tuple, called: Mapping[int, str]) -> list[Part]:
    if isinstance(in_specs, P):
        in_specs = (in_specs,) * len(args)
    if not isinstance(in_specs, tuple) or len(in_specs) != len(args):
        many = f" of {len(in_specs)}" if isinstance(in_specs, tuple) else ""
        got, need = f"{describe(in_specs)}{many} for {len(args)} arguments", "a tuple with a spec for each"
        fail(CALL, "`in_specs` does not match the arguments.", got=got, need=need, kind=TypeError)
    pairs = enumerate(zip(in_specs, args, strict=True))
    return [p for i, (s, x) in pairs for p in match_specs(CALL, called.get(i, f"args[{i}]"), s, x)]


def _results(out_specs: Any, out: Any, names: Sequence[str]) -> list[Part]:
    parts = match_specs(CALL, "result", out_specs, out)
    raise_for(CALL, axis_problems(parts, names))
    return parts


def _rebuild(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree with the structure of `tree` and these leaves. A jagged value is one leaf."""
    return tree_unflatten(list(leaves), flatten_parts(tree)[1])


def _tensors(part: Part) -> list[Tensor]:
    return [x for x in tree_leaves(part.value) if isinstance(x, Tensor)]


def _device(parts: Sequence[Part]) -> torch.device:
    tensors = [x for p in parts for x in _tensors(p)]
    return tensors[0].device if tensors else torch.device("cpu")

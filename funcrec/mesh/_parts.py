"""Cuts global values into the ranks' parts, and joins the parts again. A P for each value says how.

    join(cut(x, spec), spec) == x        cut(x, P("a", None))[i] = rows i · (R/n) to (i + 1) · (R/n)

A jagged value counts as one leaf with one dimension, its bags: P("data") gives each rank B / n bags of every key.
The buffers of all ranks have one capacity. With inverse indices each rank gets E / n examples and B_f / n bags of each
key f; the examples of a part have bags of that part (`fr.dedup_bags(ids, num_parts=n)`).
Shapes: n ranks on an axis; a stacked value has one leading dimension for each axis that cuts it, in the mesh's order.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.core import Problem, check, describe, outside_transforms, tree_map
from funcrec.jagged import (
    JaggedTensor,
    KeyedJaggedTensor,
    bucket,
    is_concrete,
    join_examples,
    part_problems,
    parts_of_examples,
    ranges_of_parts,
    stack_bags,
    take_ranges,
)
from funcrec.mesh._axes import bound
from funcrec.mesh._collectives import pmax
from funcrec.mesh._spec import P

Sizes = Mapping[str, int]


class Part(NamedTuple):
    """A leaf of an argument or a result, with its path and its spec."""

    path: str
    spec: P
    value: Any


def is_jagged(x: Any) -> bool:
    return isinstance(x, JaggedTensor | KeyedJaggedTensor)


def flatten_parts(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree, in which a jagged value is one leaf."""
    return torch_tree.tree_flatten(tree, is_leaf=is_jagged)


def match_specs(call: str, name: str, specs: Any, tree: Any) -> list[Part]:
    """Return the leaves of `tree`, each with its P.

    `specs` is a prefix of `tree` whose leaves are Ps.
    """
    problems: list[Problem] = []
    parts = list(_match(specs, tree, name, problems))
    check(call, problems)
    return parts


def _match(spec: Any, tree: Any, path: str, problems: list[Problem]) -> Iterator[Part]:
    if isinstance(spec, P):
        flat, _ = torch_tree.tree_flatten_with_path(tree, is_leaf=is_jagged)
        for keys, leaf in flat:
            yield Part(path + torch_tree.keystr(keys), spec, leaf)
        return
    below = lambda x: torch_tree.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    if not isinstance(spec, tuple | list | dict) and torch_tree.tree_is_leaf(spec):
        hint = "P() for a value that every rank has whole"
        problems.append(
            Problem(f"`{path}` has no spec.", describe(spec), "a P, or a container of them", hint, TypeError)
        )
    elif type(spec) is not type(tree) or [k for k, _ in below(spec)] != [k for k, _ in below(tree)]:
        show = lambda x: (
            describe(x)
            + (f" of {[torch_tree.keystr(k) for k, _ in below(x)]}" if not torch_tree.tree_is_leaf(x) else "")
        )
        what, got = f"the specs of `{path}` are not a prefix of it.", f"specs {show(spec)}; value {show(tree)}"
        need, hint = "one structure down to the Ps", "one P, for all of it"
        problems.append(Problem(what, got, need, hint, TypeError))
    else:
        for (key, s), (_, t) in zip(below(spec), below(tree), strict=True):
            yield from _match(s, t, path + torch_tree.keystr(key), problems)


def cut(part: Part, sizes: Sizes) -> Any:
    """Return the parts of a value, stacked.

    Leading dimensions stand for the axes of the spec, in the order of `sizes`.
    """
    if (not isinstance(part.value, Tensor) and not is_jagged(part.value)) or not part.spec.axes:
        return part.value
    if is_jagged(part.value):
        n = prod(sizes[a] for a in part.spec.axes)
        stacked = _stack_bags(part.value, n)
        return tree_map(
            lambda x: _lead(x.unflatten(0, [sizes[a] for a in part.spec.axes]), part.spec.axes, sizes), stacked
        )
    return _lead(*_split(part.value, part.spec, sizes), sizes)


def _split(x: Tensor, spec: P, sizes: Sizes) -> tuple[Tensor, tuple[str, ...]]:
    """Return (x with leading dimensions for the axes that cut it, these axes), in the order of the spec."""
    front, at = [], 0
    for d, names in reversed(
        list(enumerate(spec.dims))
    ):  # the last dimension comes first, so that earlier dimensions keep their numbers
        if names:
            n = [sizes[a] for a in names]
            x = x.unflatten(d, (*n, x.shape[d] // prod(n)))
    for names in spec.dims:
        front += range(at, at + len(names))
        at += len(names) + 1
    local = [d for d in range(x.dim()) if d not in front]
    return x.permute(*front, *local), spec.axes


def _lead(x: Tensor, axes: Sequence[str], sizes: Sizes) -> Tensor:
    """Return x with the leading dimensions of `axes` in the order of `sizes`."""
    order = [axes.index(a) for a in sizes if a in axes]
    return x.permute(*order, *range(len(axes), x.dim()))


def join(stacked: Any, spec: P, sizes: Sizes) -> Any:
    """Return the global value of a stacked value.

    The leading dimensions of `stacked` are the axes of the spec in the order of `sizes`.
    """
    axes = spec.axes
    order = [a for a in sizes if a in axes]
    back = lambda x: x.permute(*(order.index(a) for a in axes), *range(len(axes), x.dim()))  # in the spec's order
    if is_jagged(stacked):
        if not axes:
            return stacked
        flat = tree_map(lambda x: back(x).flatten(0, len(axes) - 1), stacked)
        return join_bags([tree_map(lambda x, i=i: x[i], flat) for i in range(prod(sizes[a] for a in axes))])
    if not isinstance(stacked, Tensor) or not axes:
        return stacked
    x, at = back(stacked), 0
    for d, names in enumerate(spec.dims):
        if names:  # the axes of dimension d stand in front: move them before d and merge
            rest = len(axes) - at - len(names)
            for _ in names:
                x = x.movedim(0, rest + len(names) - 1 + d)
            x = x.flatten(rest + d, rest + d + len(names))
            at += len(names)
    return x


def _stack_bags(x: Any, n: int) -> Any:
    """Return n parts of the bags, stacked.

    The capacity of a part is the bucket for the ids of the fullest part of all ranks. Where the lengths cannot be
    read it is the whole capacity.
    """
    if getattr(x, "inverse", None) is not None:
        parts = parts_of_examples(x, n)
        if is_concrete(x.values) and is_concrete(x.offsets):
            capacity = min(bucket(_most_over_ranks(max(int(p.offsets[-1]) for p in parts))), x.capacity)
            parts = [p.unpad().pad_to(capacity) for p in parts]
        return tree_map(lambda *xs: torch.stack(xs), *parts)
    ranges, capacity = ranges_of_parts(x, n), x.capacity
    if is_concrete(x.values) and is_concrete(x.offsets):
        capacity = min(bucket(_most_over_ranks(int(ranges.offsets[:, -1].max()))), x.capacity)
    return stack_bags(x, ranges, capacity)


def _most_over_ranks(size: int) -> int:
    """Return the greatest size on the real ranks of all bound axes.

    These ranks exchange their parts in buffers of one size.
    """
    names = tuple(a.name for a in bound.get().values() if a.group is not None)
    if not names:
        return size
    with outside_transforms():
        return int(pmax(torch.tensor(size, device=bound.get()[names[0]].marker.device), names))


def join_bags(parts: Sequence[Any]) -> Any:
    """Return the bags of all parts, joined key by key, in a buffer with the sum of the capacities."""
    first = parts[0]
    if getattr(first, "inverse", None) is not None:
        return join_examples(parts)
    weights = None if first.weights is None else torch.cat([p.weights for p in parts])
    base = [i * first.capacity for i in range(len(parts))]  # where the buffer of part i begins in the joined buffer
    keys = len(first.keys) if isinstance(first, KeyedJaggedTensor) else 1
    grid = lambda xs: torch.stack(
        [x.reshape(keys, -1) for x in xs], 1
    ).flatten()  # [keys, parts, bags] is key-major again
    starts = grid([p.offsets[:-1] + b for p, b in zip(parts, base, strict=True)])
    values = torch.cat([p.values for p in parts])
    out = take_ranges(values, weights, starts, grid([p.lengths for p in parts]), values.shape[0])
    if isinstance(first, JaggedTensor):
        return out
    return KeyedJaggedTensor(out.values, out.offsets, out.weights, None, first.keys, unweighted=first.unweighted)


# -- validators --------------------------------------------------------------------------------------------------


def axis_problems(parts: Sequence[Part], names: Sequence[str]) -> Iterator[Problem]:
    """Report specs that name axes outside the mesh, or more dimensions than the value has."""
    for p in parts:
        for a in p.spec.axes:
            if a not in names:
                need = f"one of {list(names)}"
                yield Problem(f"the spec of `{p.path}` names an axis that is not mapped.", f"{a!r} in {p.spec}", need)
        if not isinstance(p.value, Tensor) and not is_jagged(p.value):
            if p.spec.axes:
                hint = "fr.P() for it, which goes to every rank"
                yield Problem(f"`{p.path}` cannot be cut.", describe(p.value), "a tensor, or P()", hint, TypeError)
            continue
        dims = 1 if is_jagged(p.value) else p.value.dim()
        if len(p.spec.dims) > dims:
            got = f"{p.spec} for {describe(p.value)}"
            hint = "a jagged value is cut by its bags: P('data')" if is_jagged(p.value) else "P() for a scalar"
            yield Problem(f"the spec of `{p.path}` has more dimensions than it.", got, f"at most {dims}", hint)


def size_problems(parts: Sequence[Part], sizes: Sizes) -> Iterator[Problem]:
    """Report cut dimensions whose size is not a multiple of the number of ranks that cut them."""
    for p in parts:
        for d, names in enumerate(p.spec.dims):
            n = prod(sizes[a] for a in names)
            if is_jagged(p.value):
                if getattr(p.value, "inverse", None) is not None:
                    yield from part_problems(p.value, p.path, n)
                elif getattr(p.value, "strides", None) is not None:
                    got = f"strides={p.value.strides}"
                    yield Problem(f"`{p.path}` has keys with different numbers of bags.", got, "one number of bags")
                elif p.value.num_bags % n:
                    need = f"a multiple of {n}"
                    yield Problem(f"`{p.path}` has bags that {n} ranks cannot share.", f"{p.value.num_bags} bags", need)
            elif p.value.shape[d] % n:
                got, need = f"{describe(p.value)}; {' · '.join(f'{a}={sizes[a]}' for a in names)}", f"a multiple of {n}"
                yield Problem(f"dimension {d} of `{p.path}` is not cut evenly.", got, need, "pad it first")

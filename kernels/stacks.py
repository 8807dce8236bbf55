"""Make the vmap of a lookup, an update or a sum of row gradients one call for all members, with stacks of operands.

    fused_update(tables [K, R, D]) = stack over k of fused_update(tables[k])        pooled_lookup and coalesce likewise

An operand with one extra dimension in front is a stack of K. All members share an operand without that dimension. The
call copies nothing: an implementation sees K times as many tables, cotangents, buffers of rows and segments.
Shapes: K members, T tables of one member.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from funcrec.kernels.forms import features_of, flatten, segments_of, widest
from torch import Tensor

RANKS = {
    "tables": 2, "d": 2, "rows": 1, "offsets": 1, "weights": 1, "lr": 0, "step": 0, "key": 3, "first": 1, "numbers": 1
}  # fmt: skip
_TERMS = ("d", "rows", "offsets", "weights")


def num_members(**operands: Any) -> int | None:
    """Return K if an operand is a stack, else None.

    The operands have the names of RANKS; each is a tensor, a list of tensors, or None.
    """
    for name, own in operands.items():
        xs = own if isinstance(own, (list, tuple)) else () if own is None else (own,)
        if max(map(Tensor.dim, xs), default=0) > RANKS[name]:
            return next(x.shape[0] for x in xs if x.dim() > RANKS[name])
    return None


def update_of_members(update: Callable, is_timed: Callable[..., bool], takes_members: bool = False) -> Callable:
    """Return an update in place that takes stacks, made from an update that takes none.

    The signature is update(tables, slots, d, rows, offsets, weights, segments, lr, step, key, *rest), where `rest` is
    the rule and the rule's arguments. There is a call for each member if each member has its own rate or numbers, or
    its own step under a rule that reads the step.

    takes_members: whether the given update takes stacks, rates, steps and numbers of members itself, in one call.
    """

    def run(tables, slots, d, rows, offsets, weights, segments, lr, step, key, *rest):
        terms = d, rows, offsets, weights
        k = num_members(tables=tables)
        if k is None:
            return update(tables, slots, *terms, segments, lr, step, key, *_rest_of_member(rest, 0))
        if takes_members:
            return update(tables, slots, *terms, segments, lr, step, key, *rest)
        own = _each(tables, k), _each(slots, k)
        if lr.dim() or (step.dim() and is_timed(*rest)) or _has_numbers(rest, RANKS["numbers"] + 1):
            for i in range(k):
                mine = [[_of_member(x, i, RANKS[n]) for x in xs] for n, xs in zip(_TERMS, terms, strict=True)]
                when = _of_member(lr, i, 0), _of_member(step, i, 0), _of_member(key, i, RANKS["key"])
                update(own[0][i], own[1][i], *mine, segments, *when, *_rest_of_member(rest, i))
            return None
        flat, numbers = spread(terms, segments, k, len(tables))
        keys = None if key is None else key.expand(k, *key.shape[-3:]).flatten(0, 1)
        together = [x for xs in own[0] for x in xs], [x for xs in own[1] for x in xs]
        return update(*together, *flat, numbers, lr, step[0] if step.dim() else step, keys, *_rest_of_all(rest, k))

    return run


def lookup_of_members(lookup: Callable, reads_stacks: bool = False) -> Callable:
    """Return a `pooled_lookup` that takes and returns stacks, made from a `pooled_lookup` that takes none.

    With `reads_stacks` the given lookup takes a stack of tables as one tensor.
    """

    def run(tables, rows, offsets, weights, features, num_bags, blocks=1):
        k = num_members(tables=tables, rows=rows, offsets=offsets, weights=weights)
        if k is None:
            return lookup(tables, rows, offsets, weights, features, num_bags, blocks)
        if k == 0:
            return no_members(tables, offsets, features, num_bags, blocks)
        apart = offsets.dim() > 1 or (weights is not None and weights.dim() > 1)
        if apart and not fit(rows, weights):
            mine = lambda x, i, name: x[i].contiguous() if x is not None and x.dim() > RANKS[name] else x
            parts = []
            for i in range(k):
                own = [[mine(x, i, name) for x in xs] for name, xs in (("tables", tables), ("rows", rows))]
                own += [mine(offsets, i, "offsets"), mine(weights, i, "weights")]
                parts.append(lookup(*own, features, num_bags, blocks))
            return torch.stack(parts)
        *flat, numbers = lookups_together(tables, rows, offsets, weights, features, k, apart, reads_stacks=reads_stacks)
        return lookup(*flat, numbers, num_bags, blocks * k).unflatten(0, (k, blocks * num_bags))

    return run


def fit(rows: Sequence[Tensor], weights: Tensor | None) -> bool:
    """Return whether all buffers have one length, so that every id has a weight and every weight has an id."""
    return len({x.shape[-1] for x in (*rows, *([] if weights is None else [weights]))}) <= 1


def no_members(
    tables: Sequence[Tensor], offsets: Tensor, features: Sequence[int], num_bags: int, blocks: int
) -> Tensor:
    """Return the output of a lookup of empty stacks."""
    shape = (0, blocks * num_bags, _width(features, tables) // blocks)
    return offsets.new_zeros(shape, dtype=widest(tables))


def lookups_together(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    k: int,
    apart: bool,
    width: int | None = None,
    reads_stacks: bool = False,
) -> tuple:
    """Return the lookups of all members as one lookup: tables, buffers, offsets, weights, and K times the features.

    Stacks of tables and buffers are split into members. A shared table or buffer occurs once.

    apart: whether offsets or weights are stacks. Then the members' ids lie in one buffer, member after member, and the
      offsets ascend from the first member to the last.
    width: the distance in columns from one member to the next; None for the width of a member's output.
    reads_stacks: whether each stack of tables stays one tensor, and counts as K tables.
    """
    width = _width(features, tables) if width is None else width
    of_tables, of_rows = (tuple(x.dim() > rank for x in xs) for xs, rank in ((tables, 2), (rows, 1)))
    bags = 0
    if apart:
        together = lambda x: x.expand(k, x.shape[-1]).reshape(-1)
        size = max((x.shape[-1] for x in rows), default=0)
        offsets = (offsets.long().clamp(0, size) + torch.arange(k, device=offsets.device)[:, None] * size).flatten()
        rows, of_rows = [together(x) for x in rows], (False,) * len(rows)
        weights, bags = None if weights is None else together(weights), offsets.shape[0] // k
    rows = _one_by_one(rows, 1) if any(of_rows) else rows
    if not (reads_stacks and all(map(Tensor.is_contiguous, tables))):
        tables = _one_by_one(tables, 2)
    return tables, rows, offsets, weights, _features_of_members(tuple(features), k, (of_tables, of_rows), bags, width)


def _width(features: Sequence[int], tables: Sequence[Tensor]) -> int:
    return max((c + tables[t].shape[-1] for t, c in zip(features[::7], features[6::7], strict=True)), default=0)


def _one_by_one(xs: Sequence[Tensor], rank: int) -> list[Tensor]:
    whole = lambda x: x.unbind(0) if x.is_contiguous() else [y.contiguous() for y in x.unbind(0)]
    return [y for x in xs for y in (whole(x) if x.dim() > rank else (x,))]


@functools.lru_cache(maxsize=256)
def _features_of_members(
    features: tuple[int, ...], k: int, stacks: tuple[tuple[bool, ...], ...], bags: int, width: int
) -> tuple[int, ...]:
    """Return the features of all members, member by member.

    bags: the distance from the offsets of one member to the offsets of the next member.
    """
    tables, rows = ([sum(k if s else 1 for s in own[:i]) for i in range(len(own))] for own in stacks)
    moved = (
        f._replace(
            table=tables[f.table] + i * stacks[0][f.table],
            rows=rows[f.rows] + i * stacks[1][f.rows],
            first_bag=f.first_bag + i * bags,
            column=f.column + i * width,
        )
        for i in range(k)
        for f in features_of(features)
    )
    return tuple(flatten(moved))


def sums_of_members(written_out: Callable) -> Callable:
    """Return a `coalesce` or `expand` that takes and returns stacks, made from a function that takes none."""

    def run(d, rows, offsets, weights, segments, shapes):
        k = num_members(d=d, rows=rows, offsets=offsets, weights=weights)
        if k is None:
            return written_out(d, rows, offsets, weights, segments, shapes)
        flat, numbers = spread((d, rows, offsets, weights), segments, k, len(shapes) // 2)
        parts = written_out(*flat, numbers, list(shapes) * k)
        each = len(parts) // k
        return [torch.stack(parts[i::each]) for i in range(each)]

    return run


def spread(
    terms: Sequence[Sequence[Tensor]], segments: Sequence[int], k: int, num_tables: int
) -> tuple[list, list[int]]:
    """Return the tensors and segments of the tables of all members. Table t of member i has number i · T + t."""
    each = zip(_TERMS, terms, strict=True)
    flat = [[y for x in xs for y in (x.unbind(0) if x.dim() > RANKS[name] else (x,))] for name, xs in each]
    return flat, list(segments_of_members(terms, segments, k, num_tables))


def segments_of_members(
    terms: Sequence[Sequence[Tensor]], segments: Sequence[int], k: int, num_tables: int
) -> tuple[int, ...]:
    """Return the segments of the tables of all members. A stack among the terms counts as its K tensors."""
    places = []
    for name, xs in zip(_TERMS, terms, strict=True):
        at, before = [], 0
        for x in xs:
            is_stack = x.dim() > RANKS[name]
            at.append((before, int(is_stack)))
            before += k if is_stack else 1
        places.append(tuple(at))
    return _segments_of_members(tuple(segments), tuple(places), k, num_tables)


@functools.lru_cache(maxsize=256)
def _segments_of_members(segments: tuple[int, ...], places: tuple, k: int, num_tables: int) -> tuple[int, ...]:
    d, rows, offsets, weights = places
    at = lambda where, number, i: number if number < 0 else where[number][0] + i * where[number][1]
    out: list[int] = []
    for i in range(k):
        for s in segments_of(segments):
            moved = s._replace(
                table=i * num_tables + s.table,
                d=at(d, s.d, i),
                rows=at(rows, s.rows, i),
                offsets=at(offsets, s.offsets, i),
                weights=at(weights, s.weights, i),
            )
            out += map(int, moved)
    return tuple(out)


def _each(stacks: Sequence[Tensor], k: int) -> list[list[Tensor]]:
    """Return the parts of each member, as views of the stacks."""
    parts = [x.unbind(0) for x in stacks]
    return [[xs[i] for xs in parts] for i in range(k)]


def _of_member(x: Tensor | None, i: int, rank: int) -> Tensor | None:
    return x[i] if x is not None and x.dim() > rank else x


def _rest_of_member(rest: tuple, i: int) -> tuple:
    """Return (rule, hyper, first, dims) of member i, where the hyper-parameters are those in `numbers` if it is given.

    `first` and `numbers` may be stacks; all after `hyper` may be absent."""
    if len(rest) < 3:
        return rest
    rule, _, first, *dims = rest[:4]
    return rule, _hyper_of_member(rest, i), _of_member(first, i, RANKS["first"]), *dims


def _hyper_of_member(rest: tuple, i: int) -> Sequence[float]:
    """Return the numbers of a member, or those of all if `numbers` is no stack."""
    return (
        cast(Tensor, _of_member(rest[4], i, RANKS["numbers"])).tolist()
        if _has_numbers(rest, RANKS["numbers"])
        else rest[1]
    )


def _has_numbers(rest: tuple, rank: int) -> bool:
    """Return whether hyper-parameters are given as a tensor of at least this rank."""
    return len(rest) > 4 and rest[4] is not None and rest[4].dim() >= rank


def _rest_of_all(rest: tuple, k: int) -> tuple:
    if len(rest) < 4:
        return rest
    rule, _, first, dims = rest[:4]
    hyper = _hyper_of_member(rest, 0)
    return rule, hyper, None if first is None else first.expand(k, len(dims)).reshape(-1), list(dims) * k


# -- vmap --------------------------------------------------------------------------------------------------------


def map_of(op: Callable, names: Sequence[str], loop: Callable) -> Callable:
    """Return the vmap rule of an operator whose arguments have these names.

    The rule makes one call on stacks. For stacks of stacks it calls `loop`.
    """

    def rule(info, in_dims, *args):
        named = list(zip(names, args, in_dims, strict=False))
        if any(name in RANKS and _is_stack(x, dim, RANKS[name]) for name, x, dim in named):
            return loop(info, in_dims, *args)
        must = ("tables", "slots") if "slots" in names else ()  # the operands that an update writes
        made = op(*(_stacked(x, dim, info.batch_size, name in must) for name, x, dim in named))
        return made, [0] * len(made) if isinstance(made, list) else 0

    return rule


def _is_stack(x: object, dim: Any, rank: int) -> bool:
    """Return whether an operand, or a tensor in a list, has an extra dimension besides the mapped dimension."""
    if isinstance(x, (list, tuple)):
        return any(_is_stack(y, d, rank) for y, d in zip(x, dim, strict=True))
    return isinstance(x, Tensor) and x.dim() - (dim is not None) > rank


def _stacked(x: object, dim: Any, k: int, must: bool) -> object:
    """Return the operand with the mapped dimension in front. With `must`, a shared operand is expanded to a stack."""
    if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
        return [_stacked(y, d, k, must) for y, d in zip(x, dim, strict=True)]
    if not isinstance(x, Tensor) or (dim is None and not must):
        return x
    return x.expand(k, *x.shape) if dim is None else x.movedim(dim, 0).contiguous() if dim else x

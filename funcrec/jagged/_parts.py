"""Parts of ids with inverse indices: each part has examples and bags of its own.

    part i of n:  examples i · E/n to (i + 1) · E/n,  and of each key f bags i · B_f/n to (i + 1) · B_f/n

`dedup_bags(num_parts=n)` makes ids whose parts share no bag.
Shapes: E examples, F keys, B_f bags of key f.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, sure
from funcrec.jagged._jagged import take_ranges
from funcrec.jagged._keyed_jagged import KeyedJaggedTensor
from funcrec.jagged._primitives import are_equal, is_concrete


def parts_of_examples(ids: KeyedJaggedTensor, n: int) -> list[KeyedJaggedTensor]:
    """Return n parts of the ids, each in a buffer of the whole capacity."""
    counts, device = [ids.bags_of(k) // n for k in ids.keys], ids.offsets.device
    firsts = [ids.bag_range(k)[0] for k in ids.keys]
    whole = sure(ids.inverse)
    inverse = whole.unflatten(1, (n, -1))
    strides, parts = None if are_equal(counts) else tuple(counts), []
    for i in range(n):
        own = [torch.arange(f + i * c, f + (i + 1) * c, device=device) for f, c in zip(firsts, counts, strict=True)]
        at = torch.cat(own) if own else torch.zeros(0, dtype=torch.int64, device=device)
        starts, lengths = ids.offsets[:-1].index_select(0, at), ids.lengths.index_select(0, at)
        x = take_ranges(ids.values, ids.weights, starts, lengths, ids.capacity)
        mine = inverse[:, i] - _column(counts, whole) * i
        parts.append(KeyedJaggedTensor(x.values, x.offsets, x.weights, mine, ids.keys, strides, ids.unweighted))
    return parts


def join_examples(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Return the examples and the bags of all parts, which have the same numbers of both, in one buffer."""
    first, n = parts[0], len(parts)
    counts = [first.bags_of(k) for k in first.keys]
    in_order = lambda xs: torch.cat([y for key in zip(*(x.split(counts) for x in xs), strict=True) for y in key] or xs)
    starts = in_order([p.offsets[:-1] + i * first.capacity for i, p in enumerate(parts)])
    values = torch.cat([p.values for p in parts])
    weights = None if first.weights is None else torch.cat([sure(p.weights) for p in parts])
    out = take_ranges(values, weights, starts, in_order([p.lengths for p in parts]), values.shape[0])
    inverses = [sure(p.inverse) for p in parts]
    inverse = torch.cat([x + _column(counts, x) * i for i, x in enumerate(inverses)], 1)
    strides = None if are_equal(counts) else tuple(c * n for c in counts)
    return KeyedJaggedTensor(out.values, out.offsets, out.weights, inverse, first.keys, strides, first.unweighted)


def _column(counts: Sequence[int], inverse: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=inverse.dtype, device=inverse.device)[:, None]


# -- validators --------------------------------------------------------------------------------------------------


def part_problems(ids: Any, path: str, n: int) -> Iterator[Problem]:
    """Yield a problem unless n ranks can share the examples, and an example of a part has bags of that part.

    The check of the indices runs if the indices can be read.
    """
    counts, hint = {k: ids.bags_of(k) for k in ids.keys}, f"fr.dedup_bags(ids, num_parts={n})"
    if ids.num_examples % n or any(c % n for c in counts.values()):
        what, got = f"`{path}` has bags that {n} ranks cannot share.", f"{ids.num_examples} examples, bags {counts}"
        yield Problem(what, got, f"multiples of {n}", hint)
    elif is_concrete(ids.inverse) and ids.inverse.numel():
        each = _column([max(c // n, 1) for c in counts.values()], ids.inverse)
        part = torch.arange(n).repeat_interleave(ids.num_examples // n)
        if bool((torch.div(ids.inverse, each, rounding_mode="floor") != part).any()):
            what = f"`{path}` has examples that share a bag across {n} parts."
            yield Problem(what, f"inverse indices of {tuple(counts)}", "bags of one part for its examples", hint)

"""Make one buffer from Python's lists, NumPy's arrays and tensors, or raise for a value that its dtype does not hold.

    dtype of the buffer = `dtype` if given; else the dtype of the tensors and arrays; else i64, f32 or bool for Python's
    numbers

A float may be rounded to the dtype. An integer never changes.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, fail, short_dtype
from funcrec.jagged._primitives import are_equal, is_concrete

MOST_SHOWN = 8  # bags, and values of a bag


def flat_list(
    call: str, bags: Iterable, path: str, dtype: torch.dtype | None, numbers: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return (values [N, ...], lengths i64[B]) of the bags.

    numbers: the dtype of Python's numbers; None for i64, f32 or bool.
    """
    check(call, dtype_problems(dtype))
    bags = list(bags)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    if not any(_has_dtype(bag) or any(map(_has_dtype, bag)) for bag in bags):
        return _of_numbers(call, [v for bag in bags for v in bag], path, dtype or numbers), lengths
    full = [_of_bag(call, bag, path, dtype or numbers) for bag in bags if len(bag)]
    pieces = full or [_of_array(call, bag, path) for bag in bags if _has_dtype(bag)]
    check(call, piece_problems(pieces, path))
    flat = torch.cat(pieces)
    return (flat if dtype is None else _convert(call, flat, path, dtype)), lengths


def _has_dtype(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray, np.generic))


def _of_array(call: str, x: Any, path: str) -> Tensor:
    if isinstance(x, Tensor):
        return x
    kind, size = x.dtype.kind, x.dtype.itemsize
    if kind not in "biuf" or (kind == "u" and size > 1) or size > 8:
        need, hint = "i8 to i64, u8, f16 to f64 or bool", "x.astype(numpy.int64)"
        fail(call, f"`{path}` holds an array of another kind.", got=f"{x.dtype}", need=need, hint=hint, kind=TypeError)
    return torch.from_numpy(np.array(x, dtype=x.dtype.newbyteorder("=")))


def _of_bag(call: str, bag: Any, path: str, numbers: torch.dtype | None) -> Tensor:
    """Return a non-empty bag as a tensor, with the dtype and the derivative of its elements."""
    if _has_dtype(bag):
        return _of_array(call, bag, path)
    odd = [x for x in bag if not _has_dtype(x)]
    if len(odd) == len(bag):  # Other bags are arrays, and this bag must get the dtype of these arrays.
        return _of_numbers(call, list(bag), path, numbers)
    if odd:
        what, hint = f"`{path}` mixes numbers with tensors or arrays.", "torch.tensor(x) of the dtype that is wanted"
        fail(call, what, got=describe(odd[0]), need="one kind of values", hint=hint, kind=TypeError)
    values = [_of_array(call, x, path) for x in bag]
    check(call, piece_problems(values, path))
    if len({x.shape for x in values}) > 1:
        fail(call, f"`{path}` has values of different shapes.", got=_shown(values), need="one shape")
    return torch.stack(values)


def _of_numbers(call: str, flat: list, path: str, dtype: torch.dtype | None) -> Tensor:
    """Return Python's numbers, or lists of numbers with one length, as a tensor."""
    leaves = list(_leaves(flat))
    kinds = set(map(type, leaves))
    odd = [x for x in leaves if not isinstance(x, (bool, int, float))]
    if odd or (bool in kinds and len(kinds) > 1):
        got = describe(odd[0]) if odd else "booleans and numbers"
        need, hint = "integers, floats or booleans; NumPy's arrays; tensors", "[[1, 2], [], ...]"
        fail(call, f"`{path}` holds what is not a number.", got=got, need=need, hint=hint, kind=TypeError)
    try:
        x = torch.tensor(flat, dtype=torch.float64 if float in kinds else torch.bool if bool in kinds else torch.int64)
    except (ValueError, RuntimeError, OverflowError) as error:
        need = "integers within i64, vectors of one length"
        fail(call, f"`{path}` cannot be one buffer.", got=str(error)[:120], need=need)
    dtype = dtype or (torch.float32 if float in kinds else x.dtype)
    if float in kinds and len(kinds) > 1:  # Integers among floats must keep their values, too.
        _convert(call, torch.tensor([n for n in leaves if isinstance(n, int)], dtype=torch.int64), path, dtype)
    return _convert(call, x, path, dtype)


def _leaves(flat: Iterable) -> Iterator:
    for x in flat:
        if isinstance(x, (list, tuple)):
            yield from _leaves(x)
        else:
            yield x


def _convert(call: str, x: Tensor, path: str, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`. A float becomes the nearest float, and may not overflow. Other values must not change."""
    out = x.to(dtype)
    if x.dtype == dtype or not is_concrete(x):
        return out
    is_rounded = x.is_floating_point() and dtype.is_floating_point
    changed = out.isinf() & ~x.isinf() if is_rounded else out.to(x.dtype) != x
    if bool(changed.any()):
        value, name = x[changed].flatten()[0].item(), short_dtype(dtype)
        fail(call, f"`{path}` has a value that {name} does not hold.", got=f"{value}", need=name, hint="dtype=...")
    return out


def _shown(values: Sequence[Tensor]) -> str:
    return ", ".join(dict.fromkeys(map(describe, values)))[:120]


# -- bags, read and shown -----------------------------------------------------------------------------------------


def bag_list(bags: Any, num_bags: int, call: str) -> list[int]:
    """Return the positions in [0, num_bags) that an int, a slice or a sequence of ints names."""
    if isinstance(bags, slice):
        return list(range(*bags.indices(num_bags)))
    chosen: list[Any] = [bags] if isinstance(bags, int) else list(bags) if isinstance(bags, Sequence) else [None]
    if any(type(b) is not int or not -num_bags <= b < num_bags for b in chosen):
        need, hint = f"integers in [-{num_bags}, {num_bags})", "select(bags, capacity=...) for positions in a tensor"
        fail(call, "`bags` are not positions of bags.", got=f"{bags!r}", need=need, hint=hint, kind=IndexError)
    return [b % num_bags for b in chosen]


def repeats(chosen: Sequence) -> int:
    """Return how often the most frequent element occurs in `chosen`, but at least 1."""
    return max([1, *Counter(chosen).values()])


def split_list(values: Tensor, offsets: Tensor) -> list[list]:
    bounds = offsets.tolist()
    return [values[a:b].tolist() for a, b in itertools.pairwise(bounds)]


def show_bags(values: Tensor, offsets: Tensor) -> str:
    """Return a text that shows the first bags, or only the number of bags if the values cannot be read."""
    num_bags = offsets.shape[-1] - 1
    if offsets.dim() != 1:  # the members of a vmap, as code outside of it sees them
        return "stacked bags"
    if not (is_concrete(values) and is_concrete(offsets)):
        return f"{num_bags} bags"
    shown = split_list(values, offsets[: MOST_SHOWN + 1]) if values.dim() == 1 else offsets.diff()[:MOST_SHOWN].tolist()
    text = ", ".join(map(str, shown)) if values.dim() > 1 else ", ".join(_show_bag(bag) for bag in shown)
    more = f", ... {num_bags} bags" if num_bags > MOST_SHOWN else ""
    return f"[{text}{more}]" if values.dim() == 1 else f"lengths=[{text}{more}]"


def _show_bag(bag: list) -> str:
    return str(bag) if len(bag) <= MOST_SHOWN else f"[{', '.join(map(str, bag[:MOST_SHOWN]))}, ... {len(bag)} values]"


def show_buffer(x: Any) -> str:
    """Return a text that describes a buffer, `values=i64[3]`, with its weights and its padding if it has any."""
    parts = [f"values={describe(x.values)}"]
    if x.weights is not None:
        parts.append(f"weights={describe(x.weights)}")
    if x.offsets.dim() == 1 and is_concrete(x.offsets) and int(x.offsets[-1]) != x.values.shape[0]:
        parts.append(f"{int(x.offsets[-1])} used of capacity {x.values.shape[0]}")
    return ", ".join(parts)


# -- validators --------------------------------------------------------------------------------------------------


def dtype_problems(dtype: object) -> Iterator[Problem]:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype.is_complex):
        need = "torch.int64, torch.float32, ... or None"
        yield Problem("`dtype` is not a dtype of values.", f"{dtype!r}", need, kind=TypeError)


def piece_problems(pieces: Sequence[Tensor], path: str) -> Iterator[Problem]:
    """Yield a problem unless the tensors have one dtype, one device, and rows of one shape."""
    if len({(x.dtype, x.device) for x in pieces}) > 1:
        hint = "x.to(torch.int64), say, for each of them"
        yield Problem(f"`{path}` mixes dtypes or devices.", _shown(pieces), "one dtype on one device", hint, TypeError)
    elif not are_equal(x.shape[1:] for x in pieces):
        yield Problem(f"`{path}` has values of different shapes.", _shown(pieces), "one shape")

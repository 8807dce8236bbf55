"""Checks of a buffer of bags: its values, weights, offsets, lengths and capacity.

The checks of shapes and dtypes read metadata. The checks of values run only if the values lie on the host.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, describe, device_problems, is_wrapped, reported, short_dtype, stray
from funcrec.jagged._primitives import is_concrete

INT_DTYPES = (torch.int32, torch.int64)


def bag_problems(bags: Any, path: str) -> Iterator[Problem]:
    """Yield a problem unless `bags` is a collection of collections, all ordered and with a length."""
    unordered = (str, bytes, bytearray, Mapping, Set)
    has_elements = lambda x: isinstance(x, Collection) and not isinstance(x, unordered) and getattr(x, "ndim", 1) > 0
    if not has_elements(bags):
        yield Problem(f"`{path}` is not a list of bags.", describe(bags), "[[1, 2], [], ...]", kind=TypeError)
        return
    for b, bag in enumerate(bags):
        if not has_elements(bag):
            hint = "a bag [id] for a feature with one id per example"
            yield Problem(f"`{path}[{b}]` is not a bag.", describe(bag), "a list of values", hint, TypeError)
            return


def capacity_problems(capacity: int, least: int) -> Iterator[Problem]:
    if capacity < least:
        what, hint = "`capacity` is smaller than the buffer.", "unpad() first, which reads offsets on the host"
        yield Problem(what, f"{capacity}", f"capacity >= {least}", hint)


def mapped_problems(values: object, path: str) -> Iterator[Problem]:
    """Yield a problem for a vmap over the buffer of a ragged value, which would cut the buffer into single numbers."""
    if isinstance(values, Tensor) and values.dim() < 1 and is_wrapped(values):
        what, need = f"`{path}` are mapped by vmap along the buffer of all bags.", "bags of one length, padded"
        hint = "ids[key].to_padded(length), i[B, length], in its place; in_dims=None, if members share the ids"
        yield Problem(what, f"{path}.values {describe(values)}", need, hint, TypeError)


def buffer_problems(values: Tensor, weights: Tensor | None, path: str = "") -> Iterator[Problem]:
    if not isinstance(values, Tensor) or values.dim() < 1:
        need = "a tensor [N, ...]"
        yield Problem(f"`{path}values` is not a tensor with rows.", describe(values), need, kind=TypeError)
        return
    if weights is None:
        return
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        need = f"a floating-point tensor f[{values.shape[0]}]"
        yield Problem(f"`{path}weights` are not floating-point numbers.", describe(weights), need, kind=TypeError)
    elif weights.dim() > 1:
        hint = "a JaggedTensor of these weights, with the same offsets; or values times them, and weights=None"
        yield Problem(f"`{path}weights` have several numbers for a value.", describe(weights), "f[N]", hint)
    elif weights.shape != values.shape[:1]:
        yield Problem(
            f"`{path}weights` does not match its values.",
            f"{describe(weights)}; values is {describe(values)}",
            "weights.shape == values.shape[:1]",
            "weights=None, or cut the padding off first (`unpad`)",
        )
    elif weights.device != values.device:
        yield Problem(f"`{path}weights` is on another device.", describe(weights), f"device {values.device}")


def int_problems(x: Tensor, name: str, device: torch.device | None = None) -> Iterator[Problem]:
    """Yield a problem unless x is an i32 or i64 vector, on `device` if one is given."""
    if not isinstance(x, Tensor) or x.dtype not in INT_DTYPES:
        is_mask = name in ("rows", "bags") and describe(x).startswith("bool[")
        hint = f"{name}.nonzero()[:, 0], where the mask is True" if is_mask else ""
        yield Problem(f"`{name}` is not an integer tensor.", describe(x), "i32 or i64", hint, TypeError)
    elif x.dim() != 1:
        yield Problem(f"`{name}` is not a vector.", describe(x), "one dimension")
    elif isinstance(device, torch.device) and x.device != device:
        yield Problem(f"`{name}` is on another device.", f"{x.device}", f"device {device}, where the values are")


def list_length_problems(lists: Sequence, weights: Sequence) -> Iterator[Problem]:
    got, need = ([len(bag) for bag in x] for x in (weights, lists))
    if got != need:
        yield Problem("`weights` has bags of other lengths.", f"{got}", f"{need}", "a weight for each value")


def length_problems(values: Tensor, lengths: Tensor) -> Iterator[Problem]:
    """Yield a problem unless lengths i[B], read on the host, sum to the number of rows of the buffer."""
    if (yield from reported(device_problems(values=values, lengths=lengths))) or not is_concrete(lengths):
        return
    if lengths.numel() and int(lengths.min()) < 0:
        yield Problem("`lengths` has a negative length.", f"{int(lengths.min())}", "lengths >= 0")
    elif (lengths.numel() and int(lengths.max()) > values.shape[0]) or int(lengths.sum()) != values.shape[0]:
        got = f"sum {sum(lengths.tolist())}; values is {describe(values)}"  # No sum within the buffer overflows.
        need, hint = "lengths.sum() == values.shape[0]", "from_offsets, which takes padding after the last bag"
        yield Problem("`lengths` does not sum to the number of values.", got, need, hint)


def offset_problems(values: Tensor, offsets: Tensor) -> Iterator[Problem]:
    wrong = yield from reported(offset_form_problems(offsets, values.device, "offsets"))
    if not wrong and is_concrete(offsets):
        yield from offset_value_problems(values.shape[0], offsets)


def offset_value_problems(capacity: int, offsets: Tensor, name: str = "offsets") -> Iterator[Problem]:
    """Yield the problems of the values of `offsets`, which it reads on the host."""
    falls = offsets[1:] < offsets[:-1]  # A difference might overflow; a comparison does not.
    if int(offsets[0]) != 0:
        hint = "torch.cat([offsets.new_zeros(1), offsets]), if it has the ends alone; or from_lengths"
        yield Problem(f"`{name}` does not begin at 0.", f"offsets[0] = {int(offsets[0])}", "offsets[0] == 0", hint)
    if bool(falls.any()):
        at = int(falls.to(torch.int8).argmax())
        got = f"offsets[{at}] = {int(offsets[at])}, offsets[{at + 1}] = {int(offsets[at + 1])}"
        yield Problem(f"`{name}` descends.", got, "offsets[b] <= offsets[b + 1]", "from_lengths, if these are lengths")
    elif int(offsets[-1]) > capacity:
        got = f"offsets[-1] = {int(offsets[-1])}; {capacity} values"
        yield Problem(f"`{name}` ends beyond the values.", got, "offsets[-1] <= values.shape[0]")


def fill_problems(fill: object, dtype: torch.dtype) -> Iterator[Problem]:
    """Yield a problem unless the buffer's dtype holds `fill`, for integers without wrapping."""
    floats = dtype.is_floating_point or dtype.is_complex
    if not isinstance(fill, (int, float) if floats else int):
        what, need = f"`fill` is not of {short_dtype(dtype)}.", "a number" if floats else "an integer"
        yield Problem(what, describe(fill), need, "values.float() first", TypeError)
    elif not floats:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if not low <= fill <= high:
            what = f"`fill` is not of {short_dtype(dtype)}."
            yield Problem(what, describe(fill), f"{low} to {high}", "values.long() first")


def select_problems(offsets: Tensor, bags: Tensor, capacity: int) -> Iterator[Problem]:
    if not (is_concrete(bags) and is_concrete(offsets)):
        return
    if (wrong := stray(bags, count := offsets.shape[0] - 1)) is not None:
        need, hint = f"0 <= bag < {count}", "the bags of this value"
        yield Problem("`bags` has a bag that does not exist.", f"bag {wrong}", need, hint)
        return
    total = int(offsets.diff().index_select(0, bags).sum())
    if total > capacity:
        yield Problem("`capacity` does not hold the bags.", f"{capacity}", f"capacity >= {total}", f"capacity={total}")


def padded_problems(padded: Tensor, lengths: Tensor) -> Iterator[Problem]:
    """Yield the problems of the values of `lengths`."""
    if lengths.numel() and is_concrete(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > padded.shape[1]:
            yield Problem("`lengths` leave the padded dimension.", f"from {low} to {high}", f"0 to {padded.shape[1]}")


def jagged_parts(x: Any, path: str) -> Iterator[Problem]:
    """Yield the problems of the fields of a JaggedTensor that code made by hand or took out of a tree."""
    yield from buffer_problems(x.values, x.weights, f"{path}.")
    yield from offset_form_problems(x.offsets, getattr(x.values, "device", None), f"{path}.offsets")


def offset_form_problems(offsets: Any, device: torch.device | None, path: str) -> Iterator[Problem]:
    """Yield a problem unless `offsets` is i[B + 1], B >= 0, on the values' device."""
    if not (yield from reported(int_problems(offsets, path, device))) and offsets.shape[0] == 0:
        hint = "torch.zeros(1, dtype=torch.int64), for no bags"
        yield Problem(f"`{path}` is empty.", describe(offsets), "B + 1 boundaries, the first of them 0", hint)

"""Splits into row numbers, by chance, by time, by group or by last rows, and the k-core of a table.

    parts = split(...)      every row is in one part;  a part's rows ascend

A part is a vector i64. Pass it as `rows` to `batches` and `loader`; the data are not copied. Each function states as
its law how the parts are separated. Shapes: N rows, P parts.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from funcrec.core import Count, Key, Size, Within, check, fail, member_problems, typed
from funcrec.data.datasets._ctr import random_order
from funcrec.data.encoders._codes import codes_of, length_problems

Part = Annotated[float, Within("a number above 0, at most 1", lambda x: 0 < x <= 1)]
Parts = Annotated[Sequence[Part], Within("a share for each part", len, "is empty")]
Shares = Annotated[
    Parts, Within("shares of all rows, together 1", lambda s: abs(math.fsum(s) - 1) <= 1e-9, "do not sum to 1")
]


@typed
def random_split(num_rows: Size, fractions: Shares, *, key: Key) -> tuple[Tensor, ...]:
    """Return the row numbers of parts with these shares, split at random: -> i64[...] for each part.

    Args:
      fractions: the share of each part, together 1. Part p ends at row round(N · (f_0 + ... + f_p)) of a random order
        of the rows 0 .. num_rows - 1.

    Raises:
      ValueError: the shares do not sum to 1, or a part would have no row.

    Law: every row is in one part. The same key gives the same parts on every device.

    Example:
      >>> import funcrec as fr
      >>> train, valid, test = fr.data.random_split(10, (0.8, 0.1, 0.1), key=fr.key(0))
      >>> len(train), len(valid), len(test)
      (8, 1, 1)
    """
    call = "funcrec.data.random_split"
    order, bounds = random_order(key, num_rows), bounds_of(num_rows, fractions)
    return parts_of(call, order, bounds, f"{num_rows} rows")


@typed
def split_by_time(time: Any, fractions: Shares) -> tuple[Tensor, ...]:
    """Return the row numbers of parts split by time, the oldest part first: -> i64[...] for each part.

    Args:
      time: a number, date or timestamp of each row: a tensor, a numpy array, a list, a column of pyarrow, pandas
        or polars.
      fractions: the share of each part, together 1, the oldest part first. Rows with equal times stay in one
        part, so a part ends where the time changes, as near to its share as possible.

    Raises:
      ValueError: a time is missing, or a part would have no row (for instance, when all times are equal).

    Law: every row is in one part. Every time of a part is before every time of the next part.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.data.split_by_time(torch.tensor([3, 1, 1, 1, 2]), (0.5, 0.5))
      (tensor([1, 2, 3]), tensor([0, 4]))
    """
    call = "funcrec.data.split_by_time"
    codes = codes_of(call, time, "time", is_time=True)
    *ends, count = torch.bincount(codes).cumsum(0).tolist()  # number of rows up to each time, inclusive
    near = lambda b: min(ends, key=lambda end: abs(end - b), default=count)
    bounds = [*map(near, bounds_of(count, fractions)[:-1]), count]
    return parts_of(call, codes.argsort(stable=True), bounds, f"{count} rows, {len(ends) + 1} different times")


@typed
def split_by_group(group: Any, fractions: Shares, *, key: Key) -> tuple[Tensor, ...]:
    """Return the row numbers of parts of whole groups, assigned at random: -> i64[...] for each part.

    Args:
      group: the user, session or query of each row, as numbers or text, in any form that `split_by_time` accepts.
      fractions: the share of the groups that each part gets, together 1. The numbers of rows follow from the groups.

    Raises:
      ValueError: a group is missing, or a part would have no group.

    Law: no group is in two parts. The part of a group does not depend on the order of the rows.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.data.split_by_group(torch.tensor([7, 8, 7, 9]), (0.6, 0.4), key=fr.key(0))
      (tensor([0, 1, 2]), tensor([3]))
    """
    call = "funcrec.data.split_by_group"
    check(call, member_problems(key, "key"))
    codes = codes_of(call, group, "group")
    count = int(codes.max()) + 1
    place = torch.empty(count, dtype=torch.int64)
    place[random_order(key, count).to("cpu")] = torch.arange(count)
    bounds = torch.tensor(bounds_of(count, fractions))
    part = torch.searchsorted(bounds, place[codes], right=True)
    ends = torch.bincount(part, minlength=len(bounds)).cumsum(0).tolist()
    return parts_of(call, part.argsort(stable=True), ends, f"{count} groups")


@typed
def leave_one_out(group: Any, time: Any, *, held_out: Literal[2, 1] = 2) -> tuple[Tensor, ...]:
    """Return (train, valid, test), i64[...] each, with the last rows of each group held out.

    The last row of a group is in test. The row before the last row is in valid.

    Args:
      group, time: as in `split_by_group` and `split_by_time`. Of rows with equal times, the larger row number is later.
      held_out: 2, or 1 for (train, test) without validation.

    Each group keeps a row in train. A group of two rows has no row in valid. A group of one row has none in test.

    Raises:
      ValueError: a group or a time is missing, or no group has a row to hold out.

    Law: every row is in one part. A group has at most one row in each of valid and test, and no later row in train.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.data.leave_one_out(torch.tensor([7, 7, 7, 8, 8]), torch.tensor([3, 1, 2, 5, 6]))
      (tensor([1, 3]), tensor([2]), tensor([0, 4]))
    """
    call = "funcrec.data.leave_one_out"
    groups = codes_of(call, group, "group")
    times = codes_of(call, time, "time", is_time=True)
    check(call, length_problems(group=groups, time=times))
    order = times.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]  # the rows, sorted by group, then by time
    sizes = torch.bincount(groups)
    from_end = (sizes.cumsum(0) - 1)[groups[order]] - torch.arange(len(order))
    is_held = (from_end < held_out) & (from_end < sizes[groups[order]] - 1)
    part = torch.where(is_held, held_out - from_end, 0)
    ends = torch.bincount(part, minlength=held_out + 1).cumsum(0).tolist()
    got = f"{len(order)} rows of {len(sizes)} groups, of at most {int(sizes.max())} rows"
    return parts_of(call, order[part.argsort(stable=True)], ends, got)


@typed
def k_core(user: Any, item: Any, k: Count | tuple[Count, Count]) -> Tensor:
    """Return the rows that stay after users and items with fewer than k rows are removed repeatedly, i64[...].

    Args:
      user, item: the user and the item of each row, in the forms that `split_by_time` accepts. A pair that appears
        twice counts twice.
      k: the least number of rows of a user and of an item, or a pair (k of users, k of items).

    Returns:
      the row numbers, ascending. There are none if the table has no such core.

    Law: every user and every item of the returned rows has at least k of these rows. No larger set has this property.

    Cost: each round passes once over the rows that are left. Real data take few rounds; a chain takes N / 4.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.data.k_core(torch.tensor([1, 1, 2, 2, 3]), torch.tensor([5, 6, 5, 6, 5]), 2)
      tensor([0, 1, 2, 3])
    """
    call = "funcrec.data.k_core"
    columns = [codes_of(call, user, "user"), codes_of(call, item, "item")]
    check(call, length_problems(user=columns[0], item=columns[1]))
    least = k if isinstance(k, tuple) else (k, k)
    rows = torch.arange(len(columns[0]))
    while len(rows):
        stays = torch.ones(len(rows), dtype=torch.bool)
        for codes, need in zip(columns, least, strict=True):
            stays &= (torch.bincount(codes) >= need)[codes]
        if bool(stays.all()):
            break
        rows, columns = rows[stays], [codes[stays] for codes in columns]
    return rows


# -- parts -----------------------------------------------------------------------------------------------------------


def bounds_of(count: int, fractions: Sequence[float]) -> list[int]:
    """Return the end of each part. The last part ends at `count`."""
    sums = [math.fsum(fractions[: p + 1]) for p in range(len(fractions) - 1)]
    return [*(int(count * s + 0.5) for s in sums), count]


def parts_of(call: str, order: Tensor, bounds: Sequence[int], got: str) -> tuple[Tensor, ...]:
    """Return the sorted parts of `order` between the bounds. An empty part is an error."""
    sizes = [b - a for a, b in zip((0, *bounds), bounds)]
    if min(sizes) < 1:
        sizes_of = f"parts of {', '.join(map(str, sizes))}"
        hint = "more rows, fewer parts, or larger shares for the small ones"
        got, need = f"{got}: {sizes_of}", "a row or more in each part"
        fail(call, "some part would have no row.", got=got, need=need, hint=hint)
    return tuple(part.sort().values for part in order.split(sizes))

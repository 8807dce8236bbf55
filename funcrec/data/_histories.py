"""Histories of users in time order, as row data of models of sequences.

    history(u) = the items of u's rows, by time, then by row;    target(u) = the items of u's held out rows

Shapes: N rows of the table, U users, B users of a batch.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import Count, Form, Problem, check, pytree, stray, typed
from funcrec.data.encoders._codes import codes_of, length_problems
from funcrec.data.readers._rows import row_problems, there
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, is_concrete, offsets_of, take_ranges
from funcrec.tables import Batch

CALL = "funcrec.data.histories"
Ids = Annotated[Tensor, Form("i[N]")]
Rows = Annotated[Tensor, Form("i[M]")]
HeldOut = Annotated[Tensor, Form("i[L]")]


@pytree(static=("max_length", "most"), optional=("target",))
class Histories:
    """One history for each user, as row data: `take`, `batches` and `loader` accept it.

    Args:
      history: U bags of items in time order.
      target: U bags of held out items, in time order; or None.
      max_length: the number of latest items in a batch's "history", or None for all.
      most: the largest number of items in a history, and in a target.

    Example:
      >>> import torch
      >>> from funcrec.data import histories, take
      >>> user, item, time = torch.tensor([7, 7, 9, 7]), torch.tensor([1, 2, 3, 4]), torch.tensor([5, 3, 1, 9])
      >>> take(histories(user, item, time), torch.tensor([1, 0])).ids.to_lists()
      {'history': [[3], [2, 1, 4]]}
    """

    history: JaggedTensor
    target: JaggedTensor | None
    max_length: int | None = None
    most: tuple[int, int] = (0, 0)

    @property
    def num_rows(self) -> int:
        return self.history.num_bags

    def take(self, rows: Tensor) -> Batch:
        """Return the batch of these users: ids "history", and with held out rows "target" and "seen".

        "seen" has the whole history, also the items before the latest `max_length`."""
        check("funcrec.data.take", row_problems(rows, self.num_rows, self.history.offsets.device))
        rows, inside = there(rows, self.num_rows)
        parts = {"history": _taken(self.history, rows, inside, self.max_length, self.most[0])}
        if self.target is not None:
            parts["target"] = _taken(self.target, rows, inside, None, self.most[1])
            parts["seen"] = _taken(self.history, rows, inside, None, self.most[0])
        return Batch(KeyedJaggedTensor.from_jagged(parts))

    def __repr__(self) -> str:
        return f"Histories({self.num_rows} users, {self.history.capacity} items)"


def _taken(bags: JaggedTensor, rows: Tensor, inside: Tensor | None, latest: int | None, most: int) -> JaggedTensor:
    """Return the bags of these rows, cut to their latest items. A row that does not exist has an empty bag."""
    ends = bags.offsets[1:].index_select(0, rows)
    lengths = ends - bags.offsets.index_select(0, rows)
    lengths, most = (lengths, most) if latest is None else (lengths.clamp(max=latest), min(most, latest))
    lengths = lengths if inside is None else torch.where(inside, lengths, 0)
    is_read = is_concrete(rows) and is_concrete(lengths)
    capacity = int(lengths.sum()) if is_read else rows.shape[0] * most
    return take_ranges(bags.values, None, ends - lengths, lengths, capacity)


@typed
def histories(
    user: Any,
    item: Ids,
    time: Any,
    *,
    rows: Rows | None = None,
    held_out: HeldOut | None = None,
    max_length: Count | None = None,
) -> Histories:
    """Return the Histories of a table of interactions, one history for each user, in the order of the users.

    Args:
      user: the user of each row, as numbers or text, in any form that `split_by_group` accepts.
      item: i[N], the row of the item table for each interaction.
      time: as in `split_by_time`. Of rows with equal times, the larger row number is later.
      rows: i[M], the rows that are in histories, such as a part of `leave_one_out`; None takes all rows. Their order
        does not matter.
      held_out: i[L], the rows that are targets, such as the validation part. The histories are then those of the users
        with a held out row, also if such a user has no row in `rows`.
      max_length: the number of latest items in a batch's "history". "seen" has all of them.

    Raises:
      ValueError: a user or a time is missing, columns differ in length, or a row does not exist.

    Law: a history has the items of the user's rows, no others, by ascending time. The order of `rows` changes nothing.

    Example:
      >>> import torch, funcrec as fr
      >>> user, item, time = torch.tensor([7, 7, 7, 8, 8]), torch.tensor([1, 2, 3, 1, 5]), torch.tensor([3, 1, 2, 5, 6])
      >>> train, test = fr.data.leave_one_out(user, time, held_out=1)
      >>> data = fr.data.histories(user, item, time, rows=train, held_out=test)
      >>> fr.data.take(data, torch.tensor([0, 1])).ids.to_lists()
      {'history': [[2, 3], [1]], 'target': [[1], [5]], 'seen': [[2, 3], [1]]}
    """
    users, times = codes_of(CALL, user, "user"), codes_of(CALL, time, "time", is_time=True)
    check(CALL, length_problems(user=users, item=item), length_problems(user=users, time=times))
    check(CALL, *(part_problems(part, len(users), name) for name, part in (("rows", rows), ("held_out", held_out))))
    order = times.argsort(stable=True)
    order = order[users[order].argsort(stable=True)]  # the rows, sorted by user, then by time, then by row
    count = int(users.max()) + 1 if len(users) else 0
    history = _bags(order, users, item, rows, count)
    target = None if held_out is None else _bags(order, users, item, held_out, count)
    kept = (history if target is None else target).lengths > 0
    history, target = _kept(history, kept), None if target is None else _kept(target, kept)
    most = lambda x: 0 if x is None or not len(x) else int(x.lengths.max())
    return Histories(history, target, max_length, (most(history), most(target)))


def _bags(order: Tensor, users: Tensor, item: Tensor, rows: Tensor | None, count: int) -> JaggedTensor:
    """Return the items of the rows, a bag for each user, in the given order."""
    if rows is not None:
        is_in = torch.zeros(len(users), dtype=torch.bool)
        is_in[rows.long()] = True
        order = order[is_in[order]]
    return JaggedTensor(item[order], offsets_of(torch.bincount(users[order], minlength=count)))


def _kept(bags: JaggedTensor, kept: Tensor) -> JaggedTensor:
    lengths = bags.lengths[kept]
    return take_ranges(bags.values, None, bags.offsets[:-1][kept], lengths, int(lengths.sum()))


# -- validators --------------------------------------------------------------------------------------------------


def part_problems(part: Tensor | None, num_rows: int, name: str) -> Iterator[Problem]:
    if part is not None and (row := stray(part, num_rows)) is not None:
        need, hint = f"0 <= row < {num_rows}", "a part of fr.data.leave_one_out"
        yield Problem(f"`{name}` has rows that the table lacks.", f"row {row}", need, hint)

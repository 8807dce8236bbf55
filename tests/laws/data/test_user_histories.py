"""fr.data.histories against lists of rows that Python sorts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import batches, histories, leave_one_out, loader, split_by_time, take

USER = torch.tensor([7, 7, 9, 7, 9, 3])
ITEM = torch.tensor([1, 2, 3, 4, 5, 6])
TIME = torch.tensor([5, 3, 1, 9, 1, 4])


def sorted_items(user, item, time, rows):
    """Return {user: items by time, then by row}."""
    order = sorted(rows, key=lambda r: (time[r], r))
    return {u: [item[r] for r in order if user[r] == u] for u in sorted({user[r] for r in rows})}


@st.composite
def tables(draw):
    n = draw(st.integers(1, 30))
    column = lambda most: draw(st.lists(st.integers(0, most), min_size=n, max_size=n))
    return column(4), column(9), column(6), draw(st.permutations(range(n)))[: draw(st.integers(1, n))]


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(1, 4))
def test_a_history_is_the_users_rows_in_time_order(table, length):
    """Each user's bag has the items of the user's chosen rows, by time, then by row. `max_length` keeps the latest."""
    user, item, time, rows = table
    made = histories(user, torch.tensor(item), torch.tensor(time), rows=torch.tensor(rows), max_length=length)
    want = list(sorted_items(user, item, time, rows).values())
    assert made.history.to_lists() == want and made.num_rows == len(want)
    taken = take(made, torch.arange(len(want)).flip(0)).ids
    assert taken.to_lists() == {"history": [b[-length:] for b in want[::-1]]}
    assert taken.capacity == sum(len(b[-length:]) for b in want)


@settings(max_examples=60, deadline=None)
@given(tables())
def test_held_out_rows_are_targets(table):
    """The users are those with a held out row. Their targets are these rows, and "seen" is the whole history."""
    user, item, time, rows = table
    held_out = [r for r in range(len(user)) if r not in rows]
    columns = user, torch.tensor(item), torch.tensor(time)
    made = histories(
        *columns, rows=torch.tensor(rows), held_out=torch.tensor(held_out, dtype=torch.int64), max_length=1
    )
    before, after = (sorted_items(user, item, time, part) for part in (rows, held_out))
    got = take(made, torch.arange(made.num_rows)).ids.to_lists()
    assert got["target"] == list(after.values())
    assert got["seen"] == [before.get(u, []) for u in after]
    assert got["history"] == [before.get(u, [])[-1:] for u in after]


def test_leave_one_out_of_histories():
    """With the parts of leave_one_out, validation and test have one target each, which follows the history."""
    user, time = torch.tensor([0] * 5 + [1] * 3), torch.tensor([5, 4, 3, 2, 1, 1, 1, 1])
    item = torch.arange(8)
    train, valid, test = leave_one_out(user, time)
    of = lambda rows, held_out: take(histories(user, item, time, rows=rows, held_out=held_out), torch.tensor([0, 1]))
    assert of(train, valid).ids.to_lists() == {"history": [[4, 3, 2], [5]], "target": [[1], [6]],
                                               "seen": [[4, 3, 2], [5]]}  # fmt: skip
    assert of(torch.cat([valid, train]), test).ids["target"].to_lists() == [[0], [7]]
    early, late = split_by_time(TIME, (0.5, 0.5))
    got = take(histories(USER, ITEM, TIME, rows=early, held_out=late), torch.tensor([0, 1])).ids.to_lists()
    assert got == {"history": [[], [2]], "target": [[6], [1, 4]], "seen": [[], [2]]}


def test_a_loader_takes_them():
    """Histories are row data: a loader shuffles users, pads ids to buckets, and pads the last batch to the full size. A
    row that does not exist raises; inside jit its bags are empty."""
    made = histories(USER, ITEM, TIME)
    assert repr(made) == "Histories(3 users, 6 items)"
    load = loader(made, None, 2, key=fr.key(0), pad_last=True, bucket=True)
    found = [batch for _, batch in load()]
    assert [b.weight.tolist() for b in found] == [[1, 1], [1, 0]]
    own = [bag for b in found for bag, w in zip(b.ids["history"].to_lists(), b.weight.tolist(), strict=True) if w]
    assert sorted(own) == [[2, 1, 4], [3, 5], [6]]
    assert [b.ids.to_lists()["history"] for _, b in batches(made, None, 2)] == [[[6], [2, 1, 4]], [[3, 5]]]
    with pytest.raises(ValueError, match="rows"):
        take(made, torch.tensor([3]))
    inside = fr.jit(lambda rows: made.take(rows).ids["history"])(torch.tensor([1, 5]))
    assert inside.to_lists() == [[2, 1, 4], []]


@pytest.mark.parametrize("change, part", [
    ({"item": ITEM[:3]}, "`item`"), ({"time": TIME[:3]}, "`time`"), ({"item": ITEM.float()}, "`item`"),
    ({"rows": torch.tensor([6])}, "`rows` has rows that the table lacks"), ({"user": [None] * 6}, "`user`"),
    ({"held_out": torch.tensor([-1])}, "`held_out` has rows that the table lacks"), ({"max_length": 0}, "`max_length`"),
])  # fmt: skip
def test_bad_input(change, part):
    """Columns that differ in length or dtype, missing users and rows that do not exist raise in four parts."""
    with pytest.raises((TypeError, ValueError)) as raised:
        histories(**{"user": USER, "item": ITEM, "time": TIME} | change)
    assert part in str(raised.value) and all(f"\n  {word}" in str(raised.value) for word in ("got ", "need", "try "))

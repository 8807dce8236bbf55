"""Splits. Every row is in one part, no part knows the times of the next part, and a key gives the same parts."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import k_core, leave_one_out, random_split, split_by_group, split_by_time

KEY = fr.key(3)
SHARES = st.sampled_from([(1.0,), (0.5, 0.5), (0.8, 0.1, 0.1), (0.6, 0.2, 0.2), (0.25, 0.25, 0.25, 0.25)])
VALUES = st.lists(st.integers(-3, 6), min_size=4, max_size=40)


def is_partition(parts, count):
    """Return whether every row is in one part and the rows of each part ascend."""
    ascend = all(p.dtype == torch.int64 and bool((p.diff() > 0).all()) for p in parts)
    return ascend and sorted(torch.cat(parts).tolist()) == list(range(count))


def split_or_none(split, *args, **settings):
    """Return the parts, or None if the call says that a part would be empty."""
    try:
        return split(*args, **settings)
    except ValueError as error:
        assert "some part would have no row" in str(error)
        return None


@given(count=st.integers(10, 200), shares=SHARES)
def test_a_random_split_has_every_row_once(count, shares):
    """Every row is in one part, the sizes are the shares to the row, and only the key decides the parts."""
    parts = random_split(count, shares, key=KEY)
    assert is_partition(parts, count)
    ends = torch.tensor([len(p) for p in parts]).cumsum(0) - torch.tensor(shares).double().cumsum(0) * count
    assert bool((ends.abs() <= 0.5 + 1e-6).all())
    again, other = random_split(count, shares, key=fr.key(3)), random_split(count, shares, key=fr.key(4))
    assert all(map(torch.equal, parts, again))
    assert len(shares) == 1 or count < 50 or not all(map(torch.equal, parts, other))


@given(time=VALUES, shares=SHARES)
def test_a_split_by_time_does_not_leak(time, shares):
    """Every time in a part is before every time in the next part. Rows of one time are therefore in one part."""
    x = torch.tensor(time)
    parts = split_or_none(split_by_time, x, shares)
    assume(parts is not None)
    assert is_partition(parts, len(time))
    assert all(int(x[a].max()) < int(x[b].min()) for a, b in itertools.pairwise(parts))


@given(count=st.integers(20, 60), shares=SHARES)
def test_a_split_by_time_without_ties_has_its_shares(count, shares):
    """Where all times differ, the parts have their shares to the row."""
    time = torch.arange(count)[torch.randperm(count, generator=torch.Generator().manual_seed(count))]
    sizes = [len(p) for p in split_by_time(time, shares)]
    assert sizes == [len(p) for p in random_split(count, shares, key=KEY)]


def test_a_split_by_time_ends_where_its_share_is_nearest():
    """A part ends at the change of time nearest to its share."""
    assert [len(p) for p in split_by_time(torch.tensor([1, 2, 2, 2, 2, 2, 3, 4, 5, 6]), (0.5, 0.5))] == [6, 4]
    assert [len(p) for p in split_by_time(torch.tensor([1] + [2] * 9), (0.8, 0.2))] == [1, 9]


@given(group=VALUES, shares=SHARES, seed=st.integers(0, 99))
def test_a_split_by_group_keeps_groups_whole(group, shares, seed):
    """No group is in two parts. The part of a group does not depend on the order or number of the group's rows."""
    parts = split_or_none(split_by_group, torch.tensor(group), shares, key=KEY)
    assume(parts is not None)
    assert is_partition(parts, len(group))
    homes = {g: i for i, p in enumerate(parts) for g in np.array(group)[p.numpy()].tolist()}
    assert len(homes) == sum(len(set(np.array(group)[p.numpy()].tolist())) for p in parts)
    moved = np.random.default_rng(seed).permutation(group + group[:3])
    again = split_by_group(moved, shares, key=KEY)
    assert homes == {g: i for i, p in enumerate(again) for g in moved[p.numpy()].tolist()}


def by_hand(group, time, held_out):
    """Return the result of leave_one_out, computed group by group."""
    parts = [[] for _ in range(held_out + 1)]
    for g in set(group):
        own = sorted((t, r) for r, (x, t) in enumerate(zip(group, time)) if x == g)
        for place, (_, row) in enumerate(reversed(own)):
            is_held = place < held_out and place < len(own) - 1
            parts[held_out - place if is_held else 0].append(row)
    return [sorted(p) for p in parts]


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=40),
    held=st.sampled_from([1, 2]),
)
def test_leave_one_out_holds_the_last_rows(rows, held):
    """The last rows of each group are held out, as in a loop over groups. A group keeps a row for training."""
    group, time = zip(*rows)
    parts = split_or_none(leave_one_out, torch.tensor(group), torch.tensor(time), held_out=held)
    want = by_hand(group, time, held)
    assert (parts is None) == (min(map(len, want)) == 0)
    assert parts is None or [p.tolist() for p in parts] == want


def core_by_hand(pairs, of_users, of_items):
    """Return the k-core, computed by a removal of one row at a time."""
    rows = list(range(len(pairs)))
    while True:
        count = lambda side, x: sum(pairs[r][side] == x for r in rows)
        few = [r for r in rows if count(0, pairs[r][0]) < of_users or count(1, pairs[r][1]) < of_items]
        if not few:
            return rows
        rows.remove(few[0])


@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=30),
    k=st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 4), st.integers(1, 4))),
)
def test_a_core_is_the_largest_that_there_is(pairs, k):
    """k_core keeps the rows that remain when rows are removed one by one until each user and item has k."""
    user, item = (torch.tensor(x) for x in zip(*pairs))
    assert k_core(user, item, k).tolist() == core_by_hand(pairs, *(k if isinstance(k, tuple) else (k, k)))


def test_a_core_is_found_along_a_chain():
    """Rows are removed until nothing changes. A chain of pairs disappears from its ends. A ring stays."""
    user, item = torch.arange(40) // 2, (torch.arange(40) + 1) // 2
    assert k_core(user, item, 2).tolist() == []
    assert k_core(user, item % 20, np.int64(2)).tolist() == list(range(40))


NUMBERS = [5, -2, 5, 9, 0, 9, -2, 7, 3, 3]
TIMES = np.array(NUMBERS, "datetime64[D]")


class Capsule:
    """A column as other libraries (pandas, polars) export it."""

    def __init__(self, chunks):
        self.chunks = pa.chunked_array(chunks)

    def __arrow_c_stream__(self, requested_schema=None):
        return self.chunks.__arrow_c_stream__(requested_schema)


FORMS = {
    "of another library": Capsule([NUMBERS[:3], NUMBERS[3:]]),
    "i64 tensor": torch.tensor(NUMBERS),
    "f16 tensor": torch.tensor(NUMBERS).half(),
    "bfloat16 tensor": torch.tensor(NUMBERS).bfloat16(),
    "numpy": np.array(NUMBERS),
    "numpy dates": TIMES,
    "pyarrow": pa.array(NUMBERS),
    "chunks": pa.chunked_array([NUMBERS[:3], NUMBERS[3:]]),
    "no chunk at the end": pa.chunked_array([NUMBERS, []], pa.int16()),
    "timestamps": pa.array(TIMES).cast(pa.timestamp("us", "UTC")),
    "dictionary": pa.array(NUMBERS).dictionary_encode(),
    "uint64": pa.array([x + 2**63 for x in NUMBERS], pa.uint64()),
    "of a table": pa.table({"x": NUMBERS})["x"],
}
TEXTS = {
    "pyarrow text": pa.array([f"u{x + 2:02}" for x in NUMBERS]),
    "large text": pa.array([f"u{x + 2:02}" for x in NUMBERS], pa.large_string()),
    "dictionary of text": pa.chunked_array([[f"u{x + 2:02}" for x in NUMBERS]]).dictionary_encode(),
    "numpy text": np.array([f"u{x + 2:02}" for x in NUMBERS]),
    "objects": np.array([f"u{x + 2:02}" for x in NUMBERS], object),
}


@pytest.mark.parametrize("form", [*FORMS, *TEXTS])
def test_columns_of_all_forms_are_split_alike(form):
    """Tensors, numpy arrays and pyarrow columns of the same values give the same parts. Text is compared by its
    bytes."""
    column = {**FORMS, **TEXTS}[form]
    assert all(
        map(
            torch.equal,
            split_by_group(column, (0.5, 0.5), key=KEY),
            split_by_group(FORMS["numpy"], (0.5, 0.5), key=KEY),
        )
    ), form
    if form in FORMS:
        assert all(map(torch.equal, split_by_time(column, (0.5, 0.5)), split_by_time(FORMS["numpy"], (0.5, 0.5))))
    assert k_core(column, column, 2).tolist() == [0, 1, 2, 3, 5, 6, 8, 9]


def test_a_split_feeds_batches():
    """`batches` takes a part as its rows."""
    data = fr.data.random_rows(KEY, {"item": 9}, num_rows=20, num_dense=1)
    train, test = random_split(20, (0.7, 0.3), key=KEY)
    seen = [x for part in (train, test) for _, b in fr.data.batches(data, part, 4) for x in b.dense[:, 0].tolist()]
    assert sorted(seen) == sorted(data.take(torch.arange(20)).dense[:, 0].tolist())

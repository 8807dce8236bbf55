"""Loaders give the batches of any epoch from any position, with any number of threads, and with torch's DataLoader."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import Position, batches, collate, loader, num_batches, random_rows
from funcrec.testing import assert_trees_close

KEY = fr.key(7)
DATA = random_rows(KEY, {"row": 1000, "tags": 30}, num_rows=23, ids_per_bag={"row": 1, "tags": (0, 4)}, num_dense=1)
ALL = DATA.take(torch.arange(23)).dense[:, 0].tolist()
same = lambda a, b: assert_trees_close(a, b, rtol=0, atol=0)


@given(
    size=st.integers(1, 30), stop=st.integers(0, 30), workers=st.integers(0, 3), depth=st.integers(1, 4),
    last=st.sampled_from([{}, {"drop_last": True}, {"pad_last": True}]), bucket=st.booleans(),
)  # fmt: skip
def test_a_loader_gives_batches_from_any_position(size, stop, workers, depth, last, bucket):
    """With any number of workers a loader gives the batches of `batches`, in order, from any position of any epoch."""
    size, settings = min(size, 23), {"key": KEY, "bucket": bucket, **last}
    load = loader(DATA, None, size, workers=workers, depth=depth, **settings)
    assert len(load) == num_batches(23, size, drop_last="drop_last" in last)
    position = Position(stop % 3, stop % len(load))
    want = list(batches(DATA, None, size, position=position, **settings))
    found = list(load(position))
    assert [p for p, _ in found] == [p for p, _ in want]
    same([b for _, b in found], [b for _, b in want])


def test_a_loader_goes_on_where_it_was_left():
    """A loop that passes each position back to the loader goes through the epochs batch by batch."""
    load, position, seen_rows = loader(DATA, None, 6, key=KEY, workers=2, pad_last=True), Position(), []
    for _ in range(2 * len(load)):
        position, batch = next(load(position))
        seen_rows += batch.dense[batch.weight > 0, 0].tolist()
    assert position == Position(2, 0) and sorted(seen_rows[:23]) == sorted(seen_rows[23:]) == sorted(ALL)


def test_a_loaders_batches_go_to_a_device():
    """A loader with a device gives the same batches on that device."""
    same([b for _, b in loader(DATA, None, 5, device="cpu")()], [b for _, b in batches(DATA, None, 5)])


def ended(before):
    """Return whether all threads that started since `before` end within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if {*threading.enumerate()} <= before:
            return True
        time.sleep(0.01)
    return False


class Broken:
    """A source of rows. One of them raises when it is read."""

    num_rows = 23

    def take(self, rows):
        if 12 in rows.tolist():
            raise OSError("the disk is gone")
        return DATA.take(rows)


def test_workers_end_with_their_iterator():
    """The threads end when the epoch is over, when the consumer stops, and after an error. The error is raised at its
    place."""
    load, before = loader(DATA, None, 2, workers=3, depth=8), {*threading.enumerate()}
    assert len(list(load())) == 12 and ended(before)
    half = load()
    next(half)
    assert not {*threading.enumerate()} <= before
    half.close()
    assert ended(before)
    got = []
    with pytest.raises(OSError, match="the disk is gone"):
        for _, batch in loader(Broken(), None, 5, workers=3)():
            got.append(batch)
    same(got, [b for _, b in batches(DATA, None, 5)][:2])
    assert ended(before)


def test_workers_are_ahead_by_depth_and_no_more():
    """Workers make about `depth` batches more than the consumer has taken."""
    made = []

    class Counting:
        num_rows = 23

        def take(self, rows):
            made.append(int(rows[0]))
            return DATA.take(rows)

    ahead = loader(Counting(), None, 1, workers=2, depth=4)()
    next(ahead)
    time.sleep(0.1)
    assert 4 <= len(made) <= 6
    ahead.close()


# -- torch's DataLoader ------------------------------------------------------------------------------------------

SCHEMA = fr.data.Schema(label="click", dense=("price",), categorical=("item",), multivalued=("tags",))
EXAMPLES = [
    {"click": i % 2, "price": torch.tensor(i / 4), "item": torch.tensor(i), "tags": list(range(i % 3))}
    for i in range(7)
]
TABLE = {"click": [i % 2 for i in range(7)], "price": [i / 4 for i in range(7)], "item": list(range(7)),
         "tags": [list(range(i % 3)) for i in range(7)]}  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_makes_batches_of_rows(workers):
    """torch's DataLoader over row numbers, in this process or in worker processes, gives the batches of these rows."""
    rows = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    load = torch.utils.data.DataLoader(rows.tolist(), 3, collate_fn=collate(DATA), num_workers=workers)
    same(list(load), [b for _, b in batches(DATA, rows, 3)])


def test_a_dataloader_makes_batches_of_examples():
    """torch's DataLoader over a dataset of dicts gives the batches of the dicts' table, by a Schema or by an
    Encoding."""
    encoding = fr.data.fit_encoding(
        TABLE, SCHEMA, {"item": fr.data.identity(9), "tags": fr.data.identity(9), "price": None}
    )
    for source in (SCHEMA, encoding):
        load = torch.utils.data.DataLoader(EXAMPLES, 3, collate_fn=collate(source), num_workers=int(source is encoding))
        same(list(load), [b for _, b in batches(fr.data.examples(TABLE, SCHEMA), None, 3)])

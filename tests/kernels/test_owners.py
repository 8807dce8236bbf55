"""owner_blocks returns the rows that a rank sends to their owners, with the values of loops over Python's lists.

Outputs start as NaN or the least integer (tests/conftest.py). An unwritten element is therefore visible. Shapes: N ids,
L lanes, B bags of a lane, n ranks, K slots.
"""

import hypothesis.strategies as st
import pytest
import torch
from funcrec.kernels import ops
from funcrec.kernels.ops import Owners
from hypothesis import given, settings

from funcrec.testing import assert_trees_close

I32, I64 = torch.int32, torch.int64


@st.composite
def exchanges(draw, own_bags=False):
    """Return random arguments of ops.owner_blocks: lanes of whole tables and of row-wise tables, ids outside tables,
    and garbage in the padding.

    own_bags: every lane has its own bags, so that each id goes to one position.
    """
    n, num_bags, num_lanes = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.integers(1, 5))
    num_groups = num_lanes if own_bags else draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 6), min_size=num_groups * num_bags, max_size=num_groups * num_bags))
    first = draw(st.integers(0, 3))
    offsets = torch.tensor([first, *lengths]).cumsum(0).to(draw(st.sampled_from([I32, I64])))
    used = int(offsets[-1])
    dtype = draw(st.sampled_from([I32, I64]))
    seed = draw(st.integers(0, 99))
    ids = torch.randint(-2, 14, (used + draw(st.integers(0, 4)),), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    ids[5::7], ids[6::7] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    ids[:first], ids[used:] = torch.iinfo(dtype).min, 1
    order = draw(st.permutations(range(num_lanes)))
    lanes = []
    for lane in range(num_lanes):
        ranks = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
        num_rows = draw(st.integers(1, 13))
        part = -(-num_rows // len(ranks))
        starts = draw(st.lists(st.integers(0, 20), min_size=len(ranks), max_size=len(ranks)))
        group = order[lane] if own_bags else draw(st.integers(0, num_groups - 1))
        lanes.append(
            Owners(group * num_bags, draw(st.sampled_from([0, 2])), num_rows, part, tuple(ranks), tuple(starts))
        )
    served = [[i for i, x in enumerate(lanes) if r in x.ranks] for r in range(n)]
    most = max(map(len, served))
    slots = [draw(st.permutations([*own, *[-1] * (most - len(own))])) for own in served]
    return ids, offsets, lanes, slots, num_bags, draw(st.sampled_from([0, 1, 5, ids.shape[0]]))


def by_loops(ids, offsets, lanes, slots, num_bags, room):
    """Return (blocks, counts, places), computed from the definition."""
    numbers, cuts, n = ids.tolist(), offsets.tolist(), len(slots)
    rows, places = [[] for _ in range(n)], [-1] * len(numbers)
    lengths = [[[0] * num_bags for _ in lanes] for _ in range(n)]
    for i, lane in enumerate(lanes):
        for b in range(num_bags):
            begin, end = cuts[lane.first_bag + b], cuts[lane.first_bag + b + 1]
            for at in range(begin, min(end, begin + (lane.max_length or end))):
                row = numbers[at]
                if not 0 <= row < lane.num_rows:
                    continue
                which = row // lane.part
                r = lane.ranks[which]
                places[at] = r * room + len(rows[r]) if len(rows[r]) < room else -1
                rows[r].append(row - which * lane.part + lane.starts[which])
                lengths[r][i][b] += 1
    told = [[x for i in slots[r] for x in (lengths[r][i] if i >= 0 else [0] * num_bags)] for r in range(n)]
    blocks = [(own + [-1] * room)[:room] + told[r] for r, own in enumerate(rows)]
    width = room + len(slots[0]) * num_bags
    return (
        torch.tensor(blocks, dtype=I64).view(n, width),
        torch.tensor([len(x) for x in rows]),
        torch.tensor(places, dtype=I64),
    )


@pytest.mark.needs("owner_blocks")
def test_owner_blocks(ask, known):
    """Every rank gets its rows lane by lane and bag by bag, up to the rank's room. The rank also gets the lengths of
    the bags of all its slots."""

    @settings(max_examples=8 if known.slow else 60)
    @given(exchanges(), st.booleans())
    def law(arguments, wide):
        blocks, counts, _ = by_loops(*arguments)
        want = blocks.to(I64 if wide else I32), counts, torch.empty(0, dtype=I64)
        assert_trees_close(ask("owner_blocks", *arguments, wide=wide), want)

    law()


@pytest.mark.needs("owner_blocks")
def test_where_ids_go(ask, known):
    """With `placed`, each id gets its position among the sent rows. The position is -1 for an id that has no owner, is
    cut off, or finds no room."""

    @settings(max_examples=8 if known.slow else 40)
    @given(exchanges(own_bags=True), st.booleans())
    def law(arguments, wide):
        blocks, counts, places = by_loops(*arguments)
        want = blocks.to(I64 if wide else I32), counts, places
        assert_trees_close(ask("owner_blocks", *arguments, wide=wide, placed=True), want)

    law()


def large():
    """Return eight lanes, of whole and row-wise tables, with enough ids for several threads."""
    generator = torch.Generator().manual_seed(0)
    num_bags, lanes = 500, 8
    lengths = torch.randint(0, 12, (num_bags * lanes,), generator=generator)
    offsets = torch.cat([torch.tensor([3]), 3 + lengths.cumsum(0)])
    ids = torch.randint(-5, 110, (int(offsets[-1]) + 9,), generator=generator)
    whole = [Owners(i * num_bags, 0, 100, 100, (i % 3,), (7 * i,)) for i in range(4)]
    cut = [Owners(i * num_bags, 0, 100, 34, (2, 0, 1), (100, 200, 300)) for i in range(4, 8)]
    slots = [[i for i, x in enumerate(whole + cut) if r in x.ranks] for r in range(3)]
    slots = [x + [-1] * (max(map(len, slots)) - len(x)) for x in slots]
    return ids, offsets, whole + cut, slots, num_bags


@pytest.mark.parametrize("room", [30_000, 3_000])
def test_threads_change_nothing(room):
    """The C++ kernel gives the reference's integers on any number of threads, with room for all rows and with less
    room."""
    arguments = (*large(), room)
    for placed in (False, True):
        want = ops.owner_blocks(*arguments, placed=placed, implementation="reference")
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert_trees_close(ops.owner_blocks(*arguments, placed=placed, implementation="cpp"), want)
        finally:
            torch.set_num_threads(1)


def test_a_rank_that_is_not_there():
    """The C++ kernel refuses a lane whose rank or bags the call does not have. Such a lane would write outside its
    output."""
    ids, offsets = torch.arange(4), torch.tensor([0, 2, 4])
    for lane in (Owners(0, 0, 4, 4, (1,), (0,)), Owners(1, 0, 4, 4, (0,), (0,)), Owners(-1, 0, 4, 4, (0,), (0,))):
        with pytest.raises(ValueError, match="owner_blocks"):
            ops.owner_blocks(ids, offsets, [lane], [[0]], 2, 4, implementation="cpp")

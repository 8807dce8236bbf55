"""The generated histories of raters follow their law: availability, categories, ratings, order of time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as torch_tree

import funcrec as fr
from funcrec.data.datasets import _histories as law

SIZES = {
    "num_users": 40, "num_items": 800, "num_categories": 8, "num_timestamps": 10, "length": 8, "num_candidates": 3,
    "max_history": 1000,
}  # fmt: skip
DATA = fr.data.generated_histories(fr.key(3), **SIZES)
PER_CATEGORY = 100


def columns(data, row):
    """Return {column: list} and the labels of one row."""
    batch = data.take(torch.tensor([row]))
    return {k: batch.ids[k].to_lists()[0] for k in batch.ids.keys}, batch.label[0].tolist()


def within(found, chance):
    """Return whether the mean of numbers in [0, 1] lies within five deviations of its expectation."""
    found, chance = found.double().flatten(), chance.double().flatten()
    deviation = (chance * (1 - chance)).sum().sqrt() + 1e-9
    return abs(float((found - chance).sum())) <= 5 * float(deviation)


def samples(data, users, timestamp):
    """Return (place, item, rating) of all samples of users at a timestamp, each [B, S]."""
    places, _ = law.all_places(data, users, torch.full_like(users, timestamp), timestamp + 2)
    which = ((timestamp + 1) * data.most + torch.arange(data.most)).expand(users.shape[0], -1)
    item, _, rating, _ = law.samples_of(data, users, law.categories_of(data, users), places.flatten(1), which)
    return places[:, -1], item, rating


@given(st.lists(st.integers(0, 399), max_size=3))
def test_a_row_is_its_own(rows):
    """A row is the same alone and in every batch. The shapes depend on the number of rows only."""
    batch = DATA.take(torch.tensor(rows, dtype=torch.int64))
    assert batch.label.shape == (len(rows), 3)
    assert batch.ids.capacity == len(rows) * (2 + 4 * 1000 + 2 * 3)
    for i, row in enumerate(rows):
        alone = DATA.take(torch.tensor([row]))
        assert batch.ids[i : i + 1].to_lists() == alone.ids.to_lists()
        assert torch.equal(batch.label[i], alone.label[0])


def test_a_history_holds_the_rows_before():
    """The history of a row is the history of the user's row before, then that row's samples, if the user was active."""
    for user in range(5):
        before, was_active = None, False
        for t in range(10):
            row = t * 40 + user
            now, _ = columns(DATA, row)
            assert now["user"] == [user] and now["query_time"] == [t + 1]
            assert now["time"] == sorted(now["time"]) and max(now["time"]) <= t
            if before is not None:
                size = len(before["item"])
                assert now["item"][:size] == before["item"]
                new = now["item"][size:]
                assert (len(new) > 3) if was_active else not new
                assert not was_active or new[:3] == before["candidate_item"]
            before, was_active = now, row in DATA.requests(t).tolist()


def test_a_long_history_keeps_the_newest():
    """A small max_history keeps the last samples."""
    short = fr.data.generated_histories(fr.key(3), **{**SIZES, "max_history": 7})
    for row in (0, 211, 399):
        (whole, labels), (cut, same) = columns(DATA, row), columns(short, row)
        assert labels == same and all(cut[k] == whole[k][-7:] for k in law.HISTORY)
        assert all(cut[k] == whole[k] for k in whole if k not in law.HISTORY)


def test_items_come_with_time():
    """At timestamp t a category has its first items_per_category (t + 1) / T items, and the last of these occur."""
    seen = dict.fromkeys(range(10), 0)
    for t in range(10):
        batch = DATA.take(torch.arange(40) + t * 40)
        item, category = batch.ids["candidate_item"].unpad().values, batch.ids["candidate_category"].unpad().values
        assert torch.equal(item // PER_CATEGORY, category)
        seen[t] = int((item % PER_CATEGORY).max())
        assert seen[t] < PER_CATEGORY * (t + 1) // 10
    assert seen[9] > 80 and seen[0] >= 7


def test_users_have_categories_without_repeats():
    """A user has K different categories, and each category has the K-th part of the users."""
    data = fr.data.generated_histories(fr.key(0), **{**SIZES, "num_users": 4000})
    found = law.categories_of(data, torch.arange(4000))
    assert found.shape == (4000, 4) and all(len(set(x)) == 4 for x in found.tolist())
    for c in range(8):
        assert within((found == c).any(1), torch.full((4000,), 0.5))


def test_categories_follow_their_counts():
    """A sample has category c with probability (α / K + n_c) / (α + n), α uniform in 1 .. 500."""
    data = fr.data.generated_histories(fr.key(7), **{**SIZES, "num_users": 800})
    drawn, u = law.draws_of(data, law.visit(data, torch.arange(800), 4))
    share = drawn[:, None] / 4 * torch.arange(1, 4)
    place = law.places_of(u, law.bounds_of(share, torch.tensor([0, 5, 105]), drawn[:, None] + 405))
    alpha = torch.arange(1, 501).double()
    for c, n in enumerate((0, 5, 100, 300)):
        chance = ((alpha / 4 + n) / (alpha + 405)).mean()
        share = (place == c).double().mean(1)  # of one user, whose samples have one α
        assert abs(float(share.mean() - chance)) <= 5 * float(share.std()) / math.sqrt(800)


def test_ratings_follow_their_quarter_and_time():
    """A rating is the mean of the item's own rating and a rating that the category's quarter may have at that time."""
    data = fr.data.generated_histories(fr.key(7), **{**SIZES, "num_users": 2000})
    users = torch.arange(2000)
    for t in (0, 1, 5):
        place, item, rating = samples(data, users, t)
        own = law.own_rating(data, item)
        waves = [0.5 * math.cos((t + shift) * math.pi / 4) for shift in (0, 2, 4)]
        for quarter, (base, chances) in enumerate(zip(law.CATEGORY_RATINGS, law.CATEGORY_CHANCES, strict=True)):
            of_category = (2 * rating - own)[place == quarter]
            left = torch.ones_like(of_category, dtype=torch.bool)
            for x, wave, chance in zip(base, waves, chances, strict=True):
                is_one = left & ((of_category - x - wave).abs() < 1e-9)
                assert within(is_one, torch.full(is_one.shape, chance))
                left = left & ~is_one
            assert not left.any()


def test_items_have_the_stated_ratings():
    """An item's own rating is 5, 4, 3, 2, 1 with probability .2, .25, .25, .2, .1."""
    own = law.own_rating(DATA, torch.arange(20_000))
    for rating, chance in zip(law.ITEM_RATINGS, law.ITEM_CHANCES, strict=True):
        assert within(own == rating, torch.full((20_000,), chance))


def test_labels_have_the_stated_chances():
    """Among labels with equal chances, the share of ones equals the chance, so no model has a lower log loss."""
    data = fr.data.generated_histories(fr.key(5), **{**SIZES, "num_users": 500})
    rows = torch.cat([data.requests(t) for t in (0, 3, 6, 9)])
    label, chances = data.take(rows).label, data.chances(rows)
    found = chances.unique()
    assert 0.1 < float(chances.mean()) < 0.9 and len(found) > 3
    for x in found:
        assert within(label[chances == x], chances[chances == x])


def test_actions_are_the_floors_of_ratings():
    """A history has action 2^(floor(rating) - 1)."""
    now, _ = columns(DATA, 399)
    assert set(now["action"]) <= {1, 2, 4, 8, 16} and len(set(now["action"])) > 2
    start = samples(DATA, torch.tensor([39]), -1)
    for item, rating in zip(start[1][0].tolist()[:4], start[2][0].tolist()[:4], strict=True):
        assert now["action"][now["item"].index(item)] == 2 ** (math.floor(rating) - 1)


def test_users_are_active_at_their_rate():
    """A user has a request at a timestamp with probability `activity`."""
    data = fr.data.generated_histories(fr.key(5), **{**SIZES, "num_users": 5000}, activity=0.3)
    for t in (0, 9):
        active = torch.zeros(5000)
        active[data.requests(t) - t * 5000] = 1
        assert within(active, torch.full((5000,), 0.3))


def test_traced_rows_are_eager_ones():
    """A traced `take` has the rows of the eager one; a row that the data lack has NaN as its labels. A timestamp adds
    few operators to the graph, so that many timestamps can be compiled."""
    data = fr.data.generated_histories(fr.key(3), **{**SIZES, "num_timestamps": 2, "max_history": 20})
    rows = torch.tensor([5, 79, 80])
    trace = lambda data: make_fx(
        lambda rows: torch_tree.tree_leaves(data.take(rows)), tracing_mode="fake", _allow_non_fake_inputs=True
    )(rows)
    graph, more = trace(data), trace(fr.data.generated_histories(fr.key(3), **SIZES))
    assert len(more.graph.nodes) - len(graph.graph.nodes) <= 8 * 13
    *ids, label = graph(rows)
    want = data.take(rows[:2])
    batch = fr.Batch(fr.KeyedJaggedTensor(*ids, keys=want.ids.keys), label)
    assert batch.ids[:2].to_lists() == want.ids.to_lists()
    assert torch.equal(label[:2], want.label) and label[2].isnan().all()
    with pytest.raises(ValueError, match="`rows` has a row"):
        data.take(rows)


def test_large_data_take_no_memory():
    """The data of DLRMv3 itself, a billion items and five million users, can return a row of an early timestamp."""
    data = fr.data.generated_histories(fr.key(0))
    batch = data.take(torch.tensor([5_000_000 * 2 + 4_999_999]))
    assert data.num_rows == 500_000_000 and int(batch.ids["item"].unpad().values.max()) < 1_000_000_000
    assert batch.label.shape == (1, 32)

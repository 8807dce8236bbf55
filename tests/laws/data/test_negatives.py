"""Negative sampling. Each id has its share, known ids are never drawn, and a key gives the same ids, traced or not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.data import known_items, log_q, popularity_negatives, uniform_negatives
from funcrec.testing import check_grads

KEY = fr.key(5)
USERS, IDS = 4, 9
# the last id is free for every user
PAIRS = st.lists(st.tuples(st.integers(0, USERS - 1), st.integers(0, IDS - 2)), max_size=20)
COUNTS = st.lists(st.integers(0, 50), min_size=IDS - 1, max_size=IDS - 1).map(lambda x: [*x, 3])


def of_pairs(pairs):
    columns = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return known_items(columns[:, 0], columns[:, 1], num_users=USERS)


def by_hand(masses, known, user, shape):
    """Return, for each number, the free id into whose probability interval the number falls. Python's lists draw the
    ids."""
    bits = fr.core.random.bits(KEY, shape).reshape(shape[0], -1)
    out = []
    for u, row in zip(user, bits.tolist()):
        free = [m if i not in known[u] else 0 for i, m in enumerate(masses)]
        for x in row:
            t = ((x % 2**64) >> 1) % sum(free)
            for i, m in enumerate(free):
                if t < m:
                    out.append(i)
                    break
                t -= m
    return torch.tensor(out).reshape(shape)


@given(pairs=PAIRS, first=st.integers(0, 3), user=st.lists(st.integers(0, USERS - 1), min_size=1, max_size=6))
def test_uniform_negatives_are_those_counted_by_hand(pairs, first, user):
    """For a uniform t from the key, a draw is the t-th id that the user does not know. Known ids are never drawn."""
    known = of_pairs(pairs)
    draw, shape = uniform_negatives(IDS, first=first, known=known), (len(user), 5)
    found = draw(KEY, shape, torch.tensor(user))
    sets = [set(bag) for bag in known.to_lists()]
    assert all(i not in sets[u] and i >= first for u, row in zip(user, found.tolist()) for i in row)
    assert torch.equal(found, by_hand([int(i >= first) for i in range(IDS)], sets, user, shape))


@given(
    pairs=PAIRS,
    counts=COUNTS,
    exponent=st.sampled_from([0.0, 0.75, 1.0]),
    user=st.lists(st.integers(0, USERS - 1), min_size=1, max_size=6),
)
def test_popular_negatives_are_those_counted_by_hand(pairs, counts, exponent, user):
    """Each draw is the id into whose probability interval the number falls. The ids are those that occurred and that
    the user does not know."""
    known, counts = of_pairs(pairs), torch.tensor(counts)
    draw, shape = popularity_negatives(counts, exponent=exponent, known=known), (len(user), 2, 3)
    found = draw(KEY, shape, torch.tensor(user))
    sets = [set(bag) for bag in known.to_lists()]
    assert all(i not in sets[u] and counts[i] for u, row in zip(user, found.flatten(1).tolist()) for i in row)
    masses = draw.ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    assert torch.equal(found, by_hand(masses, sets, user, shape))
    shares = torch.tensor([c**exponent if c else 0.0 for c in counts.tolist()], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(masses).double() / sum(masses), shares / shares.sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("exponent", [None, 0.0, 0.75, 1.0])
def test_ids_come_in_their_shares(exponent):
    """Over many draws every id has its share, within five deviations. For users with known ids, an id has its share of
    the remaining ids."""
    counts, known = torch.tensor([0, 900, 90, 9, 1]), known_items(torch.tensor([1, 1]), torch.tensor([2, 4]))
    draw = (
        uniform_negatives(5, known=known)
        if exponent is None
        else popularity_negatives(counts, exponent=exponent, known=known)
    )
    weights = torch.ones(5) if exponent is None else torch.where(counts > 0, counts.double() ** exponent, 0)
    for user, left_out in ((0, []), (1, [2, 4])):
        found = draw(KEY, (40_000,), torch.full((40_000,), user)).bincount(minlength=5).double()
        want = weights.double().index_fill(0, torch.tensor(left_out, dtype=torch.int64), 0)
        want = want / want.sum() * 40_000
        assert bool(((found - want).abs() <= 5 * want.sqrt()).all()) and found[left_out].sum() == 0


def test_draws_are_functions_of_the_key():
    """The same key gives the same ids. Another key gives other ids. A sampler without known ids needs no user."""
    draw = uniform_negatives(1000)
    assert torch.equal(draw(KEY, (4, 3)), draw(fr.key(5), (4, 3))) and not torch.equal(
        draw(KEY, (4, 3)), draw(fr.key(6), (4, 3))
    )


def test_draws_trace():
    """Traced draws and draws mapped over keys are the same. A user who knows all ids gets -1, which is in no table."""
    known = known_items(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 1]), num_users=3)
    draw, user = popularity_negatives(torch.tensor([5, 3, 1]), known=known), torch.tensor([1, 2, 1])
    run = lambda key, draw, user: draw(key, (3, 4), user)
    traced = make_fx(run, tracing_mode="fake")(KEY, draw, user)
    assert torch.equal(traced(KEY, draw, user), run(KEY, draw, user))
    assert traced(KEY, draw, torch.tensor([0, 7, 1]))[0].tolist() == [-1] * 4
    keys = fr.split(KEY, 3)
    mapped = torch.func.vmap(run, in_dims=(0, None, None))(keys, draw, user)
    assert torch.equal(mapped, torch.stack([run(k, draw, user) for k in keys]))


def test_negatives_go_through_a_file(tmp_path):
    """A sampler that was saved and loaded gives the same draws."""
    draw = uniform_negatives(9, first=1, known=known_items(torch.tensor([0, 1]), torch.tensor([3, 4])))
    found = fr.load(fr.save(tmp_path / "negatives", draw))
    assert torch.equal(found(KEY, (2, 5), torch.tensor([0, 1])), draw(KEY, (2, 5), torch.tensor([0, 1])))


@given(pairs=PAIRS)
def test_known_items_are_sets(pairs):
    """Bag u is the sorted set of the items of user u."""
    want = [sorted({i for u, i in pairs if u == user}) for user in range(USERS)]
    assert of_pairs(pairs).to_lists() == want


@given(counts=COUNTS, exponent=st.sampled_from([0.5, 1.0]))
def test_log_q_is_the_logarithm_of_the_shares(counts, exponent):
    """exp(log_q) sums to 1, in proportion to the counts. A count of 0 counts as 1."""
    found = log_q(torch.tensor(counts), exponent=exponent).double().exp()
    shares = [max(c, 1) ** exponent for c in counts]
    torch.testing.assert_close(found, torch.tensor(shares, dtype=torch.float64) / math.fsum(shares), rtol=1e-5, atol=0)


def test_log_q_is_differentiated():
    """log_q has the derivatives of the formula, forward and reverse."""
    counts = torch.tensor([3.0, 1.5, 7.0], dtype=torch.float64)
    check_grads(lambda x: log_q(x, exponent=0.7), (counts,))


def test_counts_of_a_vocabulary_are_what_is_drawn_by():
    """The counts of an encoding's vocabulary equal bincount of the encoding's ids. popularity_negatives takes these
    counts."""
    table = {"item": ["b", "a", "b", None, "c", "b"]}
    encoding = fr.data.fit_encoding(table, fr.data.Schema(categorical=("item",)))
    ids = fr.data.encode(encoding, table).categorical[:, 0]
    assert torch.equal(encoding.ids["item"].counts, ids.bincount(minlength=4))
    assert popularity_negatives(encoding.ids["item"].counts)(KEY, (9,)).max() < encoding.num_ids["item"]

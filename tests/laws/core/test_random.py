"""Random numbers are a pure, pinned function of the key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.core import random
from funcrec.testing import assert_trees_close

SEEDS = st.integers(-(2**63), 2**64)
N = 20_000


def splitmix(state, count):
    """Return numbers of SplitMix64 in Python's integers: Steele, Lea, Flood (2014), fig. 17."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return out


def unsigned(x):
    return [n % 2**64 for n in x.tolist()]


@given(SEEDS, st.integers(0, 5))
def test_bits_are_splitmix64(seed, count):
    """bits(key) is the sequence of SplitMix64 whose state is the key, for any seed."""
    k = fr.key(seed)
    assert unsigned(random.bits(k, (count,))) == splitmix(k.item(), count)


@given(SEEDS, SEEDS)
def test_fold_in_takes_any_integer(seed, data):
    """fold_in(key, n) is defined for every i64 and u64 n, both int and tensor. Neighbouring n give different keys."""
    k = fr.key(seed)
    assert fr.fold_in(k, data) != fr.fold_in(k, data + 1)
    if -(2**63) <= data < 2**63:
        assert_trees_close(fr.fold_in(k, torch.tensor(data)), fr.fold_in(k, data))
    if -(2**31) <= data < 2**31:
        assert_trees_close(fr.fold_in(k, torch.tensor(data, dtype=torch.int32)), fr.fold_in(k, data))


def test_values_are_pinned():
    """A key gives the same numbers in every version."""
    assert unsigned(random.bits(torch.tensor(0), (3,))) == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip
    assert fr.key(0).item() == splitmix(0, 1)[0] - 2**64
    assert random.uniform(torch.tensor(0), (2,)).tolist() == [(0xE220A8 / 2**24), (0x6E789E / 2**24)]


@given(SEEDS, st.integers(0, 40), st.integers(0, 40))
def test_start_skips(seed, start, count):
    """draw(shape, start=s) == draw(s + count)[s:], bit for bit. Any block of a table can therefore be drawn alone."""
    k = fr.key(seed)
    for draw in (random.bits, random.uniform, random.normal):
        assert_trees_close(draw(k, (count,), start=start), draw(k, (start + count,))[start:])


@given(SEEDS, st.integers(2, 50))
def test_split_keys_are_distinct(seed, num):
    """split gives `num` keys, which differ from each other, from the parent and from the parent's bits."""
    k = fr.key(seed)
    keys = [*fr.split(k, num).tolist(), k.item(), *random.bits(k, (num,)).tolist()]
    assert len(set(keys)) == 2 * num + 1


def test_streams_are_uncorrelated():
    """Numbers of split keys, of neighbouring seeds and of neighbouring fold_ins do not correlate."""
    k = fr.key(0)
    keys = [*fr.split(k, 3), k, fr.key(1), fr.key(2), fr.fold_in(k, 1), fr.fold_in(k, 2)]
    draws = torch.stack([random.normal(x, (N,)) for x in keys])
    apart = torch.corrcoef(draws) - torch.eye(len(keys))
    assert apart.abs().max() < 4.5 / N**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_uniform(dtype):
    """uniform lies in [0, 1) with equally full deciles (chi-square, nine degrees of freedom, one in 10⁴ fails)."""
    x = random.uniform(fr.key(3), (N,), dtype=dtype)
    assert x.dtype == dtype and x.min() >= 0 and x.max() < 1
    counts = torch.histc(x.double(), 10, 0, 1)
    assert ((counts - N / 10) ** 2 / (N / 10)).sum() < 33.7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uniform_of_few_digits_stays_inside(dtype):
    """uniform in a 16-bit dtype lies in [0, 1). It is not infinite and not rounded up to 1."""
    x = random.uniform(fr.key(3), (N,), dtype=dtype)
    assert x.dtype == dtype and bool((x >= 0).all()) and bool((x < 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_has_the_moments_of_a_normal(dtype):
    """normal has mean 0, variance 1, skew 0 and kurtosis 3, within 4.5 standard errors."""
    x = random.normal(fr.key(4), (N,), dtype=dtype).double()
    for power, want, error in [(1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)]:
        assert abs((x**power).mean() - want) < 4.5 * error / N**0.5


def test_normal_is_finite_at_its_ends(monkeypatch):
    """normal is finite for the least and greatest random bits, in f32 and f64."""
    ends = torch.tensor([0, -1])
    monkeypatch.setattr(random, "bits", lambda key, shape, start=0: ends)
    for dtype in (torch.float32, torch.float64):
        x = random.normal(fr.key(0), (2,), dtype=dtype)
        assert bool(x.isfinite().all()) and x[0] == -x[1]


def test_keys_map():
    """vmap over keys gives the numbers of each key."""
    keys = fr.split(fr.key(6), 3)
    got = torch.func.vmap(lambda k: random.uniform(fr.fold_in(k, 2), (4,)))(keys)
    assert_trees_close(got, torch.stack([random.uniform(fr.fold_in(k, 2), (4,)) for k in keys]))

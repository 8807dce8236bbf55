"""fr.random: distributions, the same numbers under every transform, and bad input."""

import itertools

import pytest
import torch
from scipy import stats

import funcrec as fr

KEY = fr.key(11)
DRAWS = {
    "uniform": lambda key: fr.random.uniform(key, (7, 3), low=-2.0, high=5.0),
    "normal": lambda key: fr.random.normal(key, (7, 3), dtype=torch.float64),
    "bernoulli": lambda key: fr.random.bernoulli(key, torch.linspace(0, 1, 7)),
    "randint": lambda key: fr.random.randint(key, (7, 3), -4, 9),
    "permutation": lambda key: fr.random.permutation(key, torch.arange(21).view(7, 3)),
    "categorical": lambda key: fr.random.categorical(key, torch.linspace(-1, 2, 21).view(7, 3)),
}


def each(key):
    return {name: draw(key) for name, draw in DRAWS.items()}


def test_numbers_are_those_of_the_key_under_every_transform(interpreted):
    """A staged program, a vmap over keys and ranks with one key draw the same numbers; another key draws others."""
    alone = each(KEY)
    assert fr.tree.equal(fr.jit(each)(KEY), alone)
    keys = fr.split(KEY, 3)
    many = torch.func.vmap(each)(keys)
    assert all(fr.tree.equal(fr.tree.map(lambda x: x[i], many), each(keys[i])) for i in range(3))  # noqa: B023
    mesh = fr.Mesh.emulated(data=2)
    on_ranks = fr.shard_map(each, mesh=mesh, in_specs=fr.P(), out_specs=fr.P())(KEY)
    assert fr.tree.equal(on_ranks, alone)
    other = each(fr.key(12))
    assert not any(torch.equal(alone[n], other[n]) for n in DRAWS)
    apart = lambda key: fr.random.uniform(fr.fold_in(key, fr.axis_index("data")), (1,))
    drawn = fr.shard_map(apart, mesh=mesh, in_specs=fr.P(), out_specs=fr.P("data"))(KEY)
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_have_their_distribution(dtype):
    """40,000 numbers pass a test of Kolmogorov and Smirnov; a range excludes its upper end in every dtype."""
    x = fr.random.uniform(KEY, (40_000,), low=-1.0, high=3.0, dtype=dtype)
    assert x.dtype == dtype and bool((x >= -1).all() and (x < 3).all())
    if dtype in (torch.float64, torch.float32):
        assert stats.kstest((x.double().numpy() + 1) / 4, "uniform").pvalue > 0.01
    y = fr.random.normal(KEY, (40_000,), dtype=dtype)
    assert y.dtype == dtype
    width = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-9)
    assert stats.kstest(y.double().numpy(), "norm").statistic < 1.63 / 200 + width
    narrow = fr.random.uniform(KEY, (1000,), low=1.0, high=1.0 + 2 * torch.finfo(dtype).eps, dtype=dtype)
    assert bool((narrow < 1.0 + 2 * torch.finfo(dtype).eps).all())


def chi_squared(counts, shares) -> float:
    return stats.chisquare(counts, [s * sum(counts) for s in shares]).pvalue


def test_integers_have_their_distribution():
    """Truths, integers, orders and classes pass chi-squared tests of their probabilities."""
    keys = fr.split(KEY, 12_000)
    p = fr.random.bernoulli(KEY, 0.3, (12_000,))
    assert chi_squared([int(p.sum()), int((~p).sum())], [0.3, 0.7]) > 0.01
    dice = fr.random.randint(KEY, (12_000,), 1, 7, dtype=torch.int32)
    assert dice.dtype == torch.int32 and chi_squared(torch.bincount(dice)[1:].tolist(), [1 / 6] * 6) > 0.01
    orders = torch.func.vmap(lambda key: fr.random.permutation(key, 4))(keys)
    codes = (orders * torch.tensor([64, 16, 4, 1])).sum(1)
    counts = [int((codes == 64 * a + 16 * b + 4 * c + d).sum()) for a, b, c, d in itertools.permutations(range(4))]
    assert sum(counts) == 12_000 and chi_squared(counts, [1 / 24] * 24) > 0.01
    logits = torch.tensor([0.0, -torch.inf, 1.0, 2.0])
    classes = fr.random.categorical(KEY, logits.expand(12_000, 4))
    found = torch.bincount(classes, minlength=4)
    assert found[1] == 0 and chi_squared(found[[0, 2, 3]].tolist(), logits.softmax(0)[[0, 2, 3]].tolist()) > 0.01


def test_sizes_of_zero_and_scalars():
    """No numbers, no rows, and a single number."""
    assert fr.random.uniform(KEY).shape == () and fr.random.normal(KEY, (0, 3)).shape == (0, 3)
    assert fr.random.permutation(KEY, 0).tolist() == [] and fr.random.permutation(KEY, torch.ones(0, 2)).shape == (0, 2)
    assert fr.random.categorical(KEY, torch.ones(0, 3)).shape == (0,)
    assert bool(fr.random.bernoulli(KEY, 1.0)) and not bool(fr.random.bernoulli(KEY, 0.0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.uniform(KEY, (2,), low=1.0, high=1.0), "not the bounds of a range"),
        (lambda r: r.uniform(KEY, (2,), high=float("inf")), "not the bounds of a range"),
        (lambda r: r.uniform(KEY, (2,), high=1e300), "not the bounds of a range"),
        (lambda r: r.uniform(KEY, (2,), low=16777217.0, high=16777218.0), "no number between them"),
        (lambda r: r.uniform(KEY, (2,), low=1.001, high=1.002, dtype=torch.bfloat16), "no number between them"),
        (lambda r: r.categorical(KEY, torch.full((4,), -torch.inf)), "without a distribution"),
        (lambda r: r.categorical(KEY, torch.tensor([0.0, torch.nan])), "without a distribution"),
        (lambda r: r.uniform(KEY, (2,), dtype=torch.int64), "not a float dtype"),
        (lambda r: r.uniform(fr.split(KEY, 2), (2,)), "key"),
        (lambda r: r.bernoulli(KEY, 1.5), "not a probability"),
        (lambda r: r.bernoulli(KEY, torch.tensor([0.5, torch.nan])), "not a probability"),
        (lambda r: r.bernoulli(KEY, torch.ones(3), (2,)), "cannot be broadcast"),
        (lambda r: r.randint(KEY, (2,), 5, 5), "not the bounds of a range"),
        (lambda r: r.randint(KEY, (2,), 0, 2**40, dtype=torch.int32), "not the bounds of a range"),
        (lambda r: r.permutation(KEY, torch.tensor(3)), "has no rows"),
        (lambda r: r.permutation(KEY, -1), "not a number of rows"),
        (lambda r: r.categorical(KEY, torch.ones(3, 0)), "has no classes"),
    ],
)
def test_bad_input(call, words):
    """Wrong bounds, dtypes, keys and shapes are refused."""
    with pytest.raises((ValueError, TypeError), match=words):
        call(fr.random)

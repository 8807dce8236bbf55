"""Initial rows: their distributions, and their bits, which no implementation, vector or neighbour changes."""

import math

import pytest
import torch
from funcrec.kernels import ops, reference
from funcrec.kernels.draws import CONSTANT, NORMAL, UNIFORM, Fresh
from funcrec.kernels.reference_draws import DIGITS, quantiles
from scipy import special, stats

import funcrec as fr
from funcrec.core import random
from funcrec.tables import id_rows, name_number
from funcrec.testing import assert_trees_close


def test_all_normal_numbers_are_the_nearest():
    """Each of the 2²⁴ normal numbers is Φ⁻¹ of its cell's midpoint, rounded to f32, as scipy computes it in f64."""
    for u in torch.arange(2 ** (DIGITS - 1)).split(2**16):  # 1 - p is exact, and Φ⁻¹(1 - p) = -Φ⁻¹(p)
        p = (u.double() + 0.5) * 2.0**-DIGITS
        x, want = quantiles(p), torch.from_numpy(special.ndtri(p.numpy()))
        assert torch.equal(x.float(), want.float()) and ((x - want) / want).abs().max() < 4e-15
        assert torch.equal(x, -quantiles(1 - p))


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_elements_are_those_of_the_keys_sequence(implementation):
    """Uniform rows are `random.uniform` and normal rows `random.normal` of the key, scaled in f32, from any start."""
    key, dim = fr.key(4), 33
    starts = torch.tensor([0, 33, 66, 5, 2**40, 2**62, 2**63 - 1, -7])
    got = lambda kind: ops.initial_rows(key, starts, dim, kind, 0.3, torch.float32, implementation=implementation)
    uniform, normal = (draw(key, (8, dim), start=starts) for draw in (random.uniform, random.normal))
    assert_trees_close((got(UNIFORM), got(NORMAL)), ((uniform * 2 - 1) * 0.3, normal * 0.3))
    assert_trees_close(got(CONSTANT), torch.full((8, dim), 0.3))


@pytest.mark.parametrize(
    ("initializer", "cdf"),
    [
        (fr.normal(0.25), stats.norm(scale=0.25).cdf),
        (fr.xavier_normal(), stats.norm(scale=math.sqrt(2 / (50_000 + 7))).cdf),
        (fr.uniform(0.5), stats.uniform(-0.5, 1).cdf),
        (fr.uniform(), stats.uniform(-(50_000**-0.5), 2 * 50_000**-0.5).cdf),
    ],
    ids=["normal", "xavier_normal", "uniform", "uniform by size"],
)
def test_tables_follow_their_distribution(initializer, cdf):
    """The numbers of a table and of each column pass the test of Kolmogorov and Smirnov. Rows do not correlate."""
    x = fr.init(fr.key(1), [fr.TableConfig("t", 50_000, 7, initializer=initializer)])["t"].double()
    assert stats.kstest(x.flatten().numpy(), cdf).pvalue > 1e-4
    assert min(stats.kstest(c.numpy(), cdf).pvalue for c in x.unbind(1)) > 1e-4
    assert torch.corrcoef(torch.cat([x[1:], x[:-1]], 1).t()).fill_diagonal_(0).abs().max() < 0.03


def test_the_implementation_changes_no_bit_of_init():
    """fr.init by the C++ kernel, by the reference, and compiled gives the same bits in each dtype."""
    makers = {"n": fr.normal(0.1), "u": fr.uniform(), "c": fr.constant(0.1), "x": fr.xavier_normal()}
    dtypes = torch.float32, torch.float64, torch.float16, torch.bfloat16
    configs = [fr.TableConfig(f"{n} {t}", 70, 19, dtype=t, initializer=f) for n, f in makers.items() for t in dtypes]
    want = fr.init(fr.key(2), configs)
    for implementation in ("reference", "fbgemm"):  # FBGEMM draws no rows
        with ops.using(implementation):
            assert_trees_close(fr.init(fr.key(2), configs), want)
    assert_trees_close(fr.jit(lambda key: fr.init(key, configs))(fr.key(2)), want)
    keys = fr.split(fr.key(2), 3)
    each = [fr.init(k, configs) for k in keys]
    stacked = torch.func.vmap(lambda k: fr.init(k, configs))(keys)
    assert_trees_close(stacked, {n: torch.stack([x[n] for x in each]) for n in want})


def test_the_reference_draws_row_by_row():
    """A row of `initial_rows` is that of a call for this row alone."""
    starts = torch.tensor([3, 2**50, -9])
    rows = reference.initial_rows(fr.key(0), starts, 5, NORMAL, 1.0, torch.float32)
    one = [reference.initial_rows(fr.key(0), s[None], 5, NORMAL, 1.0, torch.float32) for s in starts]
    assert_trees_close(rows, torch.cat(one))


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_ids_of_all_64_bits_have_rows_of_their_own(implementation):
    """Ids that differ in their upper bits alone, whose product with the dim would be the same in 64 bits, get different
    first rows. `draw_rows` gives a table the rows of `id_rows`."""
    config = fr.TableConfig("t", 64, 64, initializer=fr.normal(0.1))
    ids = torch.cat([torch.arange(32) << 58 | 12345, torch.tensor([0, 2**40 - 1, 2**40, -1, 2**63 - 1, -(2**63)])])
    key = random.fold_in(fr.key(3), name_number("t"))
    table, rows = torch.zeros(64, 64), torch.arange(len(ids))
    fresh = [Fresh(0, NORMAL, 0, 64, 0, 0, 0, len(ids), 0, 0)]
    given = rows, ids, torch.tensor([len(ids)]), key[None], fresh, [0.1]
    (drawn,) = ops.draw_rows([table], [], *given, implementation=implementation)
    assert torch.equal(drawn[: len(ids)], id_rows(fr.key(3), config, ids))
    assert len(drawn[: len(ids)].unique(dim=0)) == len(ids)
    assert torch.equal(drawn[32], fr.init(fr.key(3), [config])["t"][0])

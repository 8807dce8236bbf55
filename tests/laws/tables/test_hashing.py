"""hash_rows maps ids to rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.tables._hashing import hash_lanes, multipliers
from funcrec.testing import assert_trees_close

ANY_I64 = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)
ANY_I32 = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)
HASHES = {"modulo": fr.modulo(), "multiply_shift": fr.multiply_shift(), "multiply_shift(5)": fr.multiply_shift(5)}


@pytest.mark.parametrize("name", HASHES)
@given(ids=ANY_I64, size=st.one_of(st.integers(1, 9), st.integers(1, 2**31 - 1)))
def test_a_row_is_in_the_table(name, ids, size):
    """0 <= hash_rows(id) < num_embeddings, for every i64 id."""
    rows = fr.hash_rows(torch.tensor(ids, dtype=torch.int64), HASHES[name], size)
    assert all(0 <= r < size for r in rows.tolist()) and rows.dtype == torch.int64


@given(ANY_I64, st.integers(1, 2**62))
def test_modulo_is_pythons(ids, size):
    """modulo: row == id % num_embeddings, negative ids included."""
    assert fr.hash_rows(torch.tensor(ids, dtype=torch.int64), fr.modulo(), size).tolist() == [i % size for i in ids]


@given(ANY_I64, st.integers(1, 2**31 - 1), st.integers(0, 2**40))
def test_multiply_shift_is_its_formula(ids, size, seed):
    """multiply_shift: row == (((a·id + b) mod 2⁶⁴ >> 32) · R) >> 32 in Python's integers, a odd."""
    a, b = (int(x) for x in multipliers(seed, torch.device("cpu")))
    rows = fr.hash_rows(torch.tensor(ids, dtype=torch.int64), fr.multiply_shift(seed), size)
    assert rows.tolist() == [(((a * i + b) % 2**64 >> 32) * size) >> 32 for i in ids] and a % 2


@pytest.mark.parametrize("name", HASHES)
@given(ids=ANY_I32, size=st.integers(1, 2**31 - 1))
def test_i32_and_i64_ids_agree(name, ids, size):
    """The row of an id does not depend on the dtype of the id. The row has the dtype of the id."""
    short, long = (torch.tensor(ids, dtype=d) for d in (torch.int32, torch.int64))
    rows = fr.hash_rows(short, HASHES[name], size)
    assert rows.dtype == torch.int32 and rows.tolist() == fr.hash_rows(long, HASHES[name], size).tolist()


@given(st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_ids_of_several_features_are_hashed_as_each_alone(data, dtype):
    """hash_lanes gives every id the row from the hash of the id's feature."""
    hashes = st.sampled_from([None, *HASHES.values()])
    hows = data.draw(st.lists(st.tuples(hashes, st.integers(1, 2**31 - 1)), min_size=1, max_size=4))
    ids = torch.tensor(data.draw(ANY_I32 if dtype == torch.int32 else ANY_I64), dtype=dtype)
    lane = torch.tensor([data.draw(st.integers(0, len(hows) - 1)) for _ in ids], dtype=torch.int64)
    want = [fr.hash_rows(ids[i], *hows[k]) for i, k in enumerate(lane.tolist())]
    assert_trees_close(hash_lanes(ids, lane, hows), torch.stack(want) if want else ids)


@given(ANY_I64)
def test_without_a_hash_an_id_is_its_row(ids):
    """hash_rows(ids, None, R) == ids."""
    ids = torch.tensor(ids, dtype=torch.int64)
    assert fr.hash_rows(ids, None, 3) is ids


@pytest.mark.parametrize("seed", range(4))
def test_multiply_shift_spreads_ids_evenly(seed):
    """Random ids fill 64 rows evenly (chi-square, 63 degrees of freedom, one in 10⁴ fails)."""
    n, rows = 64_000, 64
    ids = torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator().manual_seed(seed))
    counts = fr.hash_rows(ids, fr.multiply_shift(seed), rows).bincount(minlength=rows).double()
    assert ((counts - n / rows) ** 2 / (n / rows)).sum() < 115


@pytest.mark.parametrize("stride", [1, 3, 2**10, 2**20])
def test_multiply_shift_spreads_progressions(stride):
    """For ids in arithmetic progression no row gets over twice its share. The hash is universal, though not random."""
    n, rows = 64_000, 64
    for seed in range(4):
        counts = fr.hash_rows(torch.arange(n) * stride, fr.multiply_shift(seed), rows).bincount(minlength=rows)
        assert counts.max() <= 2 * n / rows


def test_seeds_give_different_hashes():
    """Two seeds map few ids to the same row."""
    ids = torch.arange(1000)
    a, b = (fr.hash_rows(ids, fr.multiply_shift(s), 1000) for s in (0, 1))
    assert (a == b).sum() < 20


@pytest.mark.parametrize("name", HASHES)
def test_hashing_reads_nothing_on_the_host(name):
    """hash_rows traces with fake tensors and maps under vmap, with the same results."""
    ids = torch.tensor([[5, -3], [2**40, 0]])
    fn = lambda x: fr.hash_rows(x, HASHES[name], 7)
    assert_trees_close(make_fx(fn, tracing_mode="fake")(ids)(ids), fn(ids))
    assert_trees_close(torch.func.vmap(fn)(ids), fn(ids))

"""init: row r of a table depends only on the key, the table's name, r and the config."""

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.tables import _init
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

INITIALIZERS = {
    "uniform": fr.uniform(),
    "uniform(0.5)": fr.uniform(0.5),
    "normal": fr.normal(2.0),
    "xavier_normal": fr.xavier_normal(),
    "constant": fr.constant(3.0),
}


@pytest.mark.parametrize("name", INITIALIZERS)
@given(data=st.data())
def test_a_shard_draws_its_own_rows(name, data):
    """init_rows(a, b) == init(...)[a:b], bit for bit."""
    rows, dim = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 9))
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    table = fr.TableConfig("t", rows, dim, initializer=INITIALIZERS[name])
    whole = fr.init(fr.key(1), [table])["t"]
    assert_trees_close(_init.init_rows(fr.key(1), table, start, stop), whole[start:stop])


@pytest.mark.parametrize("name", INITIALIZERS)
def test_blocks_do_not_show(name, monkeypatch):
    """The size of the blocks that are drawn at once changes no bit. C++ draws a table at once."""
    table = fr.TableConfig("t", 50, 7, initializer=INITIALIZERS[name])
    whole = fr.init(fr.key(1), [table])
    for block in (1, 20, 64):
        monkeypatch.setattr(_init, "INIT_BLOCK", block)
        for implementation in ("cpp", "reference"):
            with ops.using(implementation):
                assert_trees_close(fr.init(fr.key(1), [table]), whole)
                assert_trees_close(_init.init_rows(fr.key(1), table, 9, 31), whole["t"][9:31])


@given(frs.table_configs())
def test_tables_have_the_shapes_and_dtypes_of_their_configs(configs):
    """init gives {name: [num_embeddings, embedding_dim]} in the dtype of the config, even on the meta device."""
    for device in ("cpu", "meta"):
        tables = fr.init(fr.key(0), configs, device=device)
        assert {n: (tuple(t.shape), t.dtype, t.device.type) for n, t in tables.items()} == {
            c.name: (c.shape, c.dtype, device) for c in configs
        }


def test_a_huge_table_has_a_shape_on_meta():
    """On the meta device, init makes a table of 2⁴⁰ rows without drawing it."""
    assert fr.init(fr.key(0), [fr.TableConfig("t", 2**40, 128)], device="meta")["t"].shape == (2**40, 128)


def test_a_row_depends_on_nothing_else():
    """Other tables and their order do not change a row. Another name or key does."""
    a, b = fr.TableConfig("a", 5, 3), fr.TableConfig("b", 5, 3)
    both = fr.init(fr.key(0), [b, a])
    assert_trees_close(fr.init(fr.key(0), [a])["a"], both["a"])
    assert not torch.equal(both["a"], both["b"])
    assert not torch.equal(fr.init(fr.key(1), [a])["a"], both["a"])


def test_a_dtype_rounds_the_same_numbers():
    """A table in f16, bf16 or f64 is the f32 table converted to that dtype."""
    tables = [fr.TableConfig("t", 9, 4, dtype=d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
    first, *rest = (fr.init(fr.key(0), [t])["t"] for t in tables)
    assert all(torch.equal(t, first.to(t.dtype)) for t in rest)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_distribution_has_its_spread(name):
    """The mean and the standard deviation of a table are those of the initializer, within five standard errors."""
    rows, dim = 400, 50
    bound = {"uniform": rows**-0.5, "uniform(0.5)": 0.5}.get(name)
    std = {"normal": 2.0, "xavier_normal": (2 / (rows + dim)) ** 0.5, "constant": 0.0}.get(name, (bound or 0) / 3**0.5)
    x = fr.init(fr.key(2), [fr.TableConfig("t", rows, dim, initializer=INITIALIZERS[name])])["t"].double()
    n = x.numel()
    assert abs(x.mean() - (3 if name == "constant" else 0)) <= 5 * std / n**0.5
    assert abs(x.std() - std) <= 5 * std / n**0.5
    assert bound is None or x.abs().max() <= bound


def test_an_initializer_of_ones_own():
    """A user's callable (key, shape, start, num_embeddings) fills a table, block by block."""
    counting = lambda key, shape, start, rows: torch.arange(start, start + shape[0] * shape[1]).reshape(shape).float()
    table = fr.TableConfig("t", 4, 3, initializer=counting)
    assert torch.equal(fr.init(fr.key(0), [table])["t"], torch.arange(12.0).reshape(4, 3))

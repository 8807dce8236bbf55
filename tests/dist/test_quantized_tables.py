"""Quantised tables under every placement, emulated and on ranks, against one process."""

import pytest
import torch
from programs import coded_tables as coded

import funcrec as fr
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.xdist_group("ranks")

ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
CASES = [({"x": 2}, k) for k in ONE_AXIS] + [
    ({"x": 2, "y": 2}, k) for k in ("table_row_wise", "table_column_wise", "grid")
]  # fmt: skip
HOW = ({}, {"exact": True}, {"dedup": True})
SUMS = ("row_wise", "table_row_wise", "grid")  # of rows on several ranks


def near(kind, how):
    return {"rtol": 1e-6, "atol": 1e-6} if kind in SUMS and not how else {}


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_sharded_codes_are_looked_up(axes, kind):
    """Lookups of codes have one process's bits under every placement, but for sums over ranks, which round otherwise in
    the last place; gathered, the tables are bit for bit what was placed, scales of rows that are cut by columns too."""
    want, q = coded.whole(), fr.quantize(coded.tables(), coded.DTYPES)
    for how in HOW:
        got, gathered = coded.looked_up(axes, kind, how)
        assert_trees_close(gathered, q)
        assert_trees_close(got, want, **near(kind, how))


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_codes_on_ranks_are_looked_up(axes, kind, ranks):
    """On gloo ranks, too."""
    want, q = coded.whole(), fr.quantize(coded.tables(), coded.DTYPES)
    for got, gathered in ranks(torch.Size(axes.values()).numel()).run(coded.on_ranks, axes, kind, HOW[1]):
        assert_trees_close((got, gathered), (want, q))


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_sharded_tables_are_quantised_where_they_lie(axes, kind):
    """quantize(shard_tables(tables)) has the codes of quantize(tables), wherever rows are whole; elsewhere, for a key,
    and for codes it is refused, with the way that there is."""
    held = lambda: coded.looked_up(axes, kind, {"exact": True}, late=True)
    if "column" in kind or kind == "grid":
        with pytest.raises(ValueError, match=r"cut by columns(.|\n)*fr.shard_tables\(fr.quantize"):
            held()
        return
    assert_trees_close(held()[1], fr.quantize(coded.tables(), "int8"))


def test_what_is_sharded_and_coded_is_refused_elsewhere(tmp_path):
    """Several dtypes in one bank, a key, codes again, a checkpoint by parts, and gradients are refused by name."""
    mesh = fr.Mesh.emulated(x=2)
    same = {"a": torch.ones(4, 2), "b": torch.ones(4, 2)}
    placed = fr.shard_tables(same, fr.Plan({"a": fr.row_wise("x"), "b": fr.row_wise("x")}), mesh)
    with pytest.raises(ValueError, match=r"tables of one bank, 'a', have several dtypes"):
        fr.quantize(placed, {"a": "int8", "b": "int4"})
    with pytest.raises(ValueError, match=r"`key` is for tables that are whole"):
        fr.quantize(placed, key=fr.key(0))
    q = fr.quantize(placed)
    assert q.to(torch.float16).layout == q.layout
    with pytest.raises(TypeError, match=r"table 'a' is quantised"):
        fr.quantize(q)
    with pytest.raises(TypeError, match=r"quantised tables on a mesh(.|\n)*fr.gather_tables"):
        fr.save(tmp_path / "q", q, mesh=mesh)
    with pytest.raises(TypeError, match=r"are read, and not trained"):
        fr.value_and_grad(lambda p: pytest.fail("the loss was run"))(fr.Params(q, {}))

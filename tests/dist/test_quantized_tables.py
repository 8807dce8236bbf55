"""Quantised tables under every placement, emulated and on ranks, equal those of one process."""

import pytest
import torch
from programs import coded_tables as coded
from programs import rounded_ranks as rounded
from programs.as_staged import as_staged

import funcrec as fr
from funcrec.testing import assert_trees_close

ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
CASES = [({"x": 2}, k) for k in ONE_AXIS] + [
    ({"x": 2, "y": 2}, k) for k in ("table_row_wise", "table_column_wise", "grid")
]  # fmt: skip
HOW = ({}, {"exact": True}, {"dedup": True})
# placements that sum the rows of several ranks
SUMS = ("row_wise", "table_row_wise", "grid")


def near(kind, how):
    return {"rtol": 1e-6, "atol": 1e-6} if kind in SUMS and not how else {}


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_sharded_codes_are_looked_up(axes, kind):
    """Lookups of codes have the bits of one process under every placement. Only sums over ranks differ by rounding.
    Gathered tables have the bits of the placed tables, including the scales of column-wise rows."""
    want, q = coded.whole(), fr.quantize(coded.tables(), coded.DTYPES)
    for how in HOW:
        got, gathered = coded.looked_up(axes, kind, how)
        assert_trees_close(gathered, q)
        assert_trees_close(got, want, **near(kind, how))


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_codes_on_ranks_are_looked_up(axes, kind, ranks):
    """On gloo ranks, lookups of codes also have these bits."""
    want, q = coded.whole(), fr.quantize(coded.tables(), coded.DTYPES)
    for got, gathered in ranks(torch.Size(axes.values()).numel()).run(coded.on_ranks, axes, kind, HOW[1]):
        assert_trees_close((got, gathered), (want, q))


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_sharded_tables_are_quantised_where_they_lie(axes, kind):
    """quantize(shard_tables(tables)) has the codes of quantize(tables) if rows are whole. Column-wise rows, a key and
    codes raise, and the error suggests what to call instead."""
    held = lambda: coded.looked_up(axes, kind, {"exact": True}, late="int8")
    if "column" in kind or kind == "grid":
        with pytest.raises(ValueError, match=r"cut by columns(.|\n)*fr.shard_tables\(fr.quantize"):
            held()
        floats = coded.looked_up(axes, kind, {"exact": True}, late="bfloat16")
        assert_trees_close(floats, coded.looked_up(axes, kind, {"exact": True}, dtypes=FLOATS))
        return
    assert_trees_close(held()[1], fr.quantize(coded.tables(), "int8"))


FLOATS = dict.fromkeys("abcd", "bfloat16")


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_rows_are_rounded_at_their_owners(axes, kind):
    """fake_quantize of sharded tables reads the values of one process, even with a key, bit for bit except for sums
    over ranks. A step trains the same rows. Column-wise rows accept only float dtypes."""
    dtypes = coded.DTYPES
    if "column" in kind or kind == "grid":
        with pytest.raises(ValueError, match=r"funcrec.fake_quantize: table 'a' is cut by columns(.|\n)*row_wise"):
            coded.trained(axes, kind, {}, dtypes)
        dtypes = FLOATS
    (rows, loss, tables) = coded.trained(None, None, {}, dtypes)
    for how in HOW:
        got, got_loss, got_tables = coded.trained(axes, kind, how, dtypes)
        assert_trees_close(got, rows, **near(kind, how))
        assert_trees_close((got_loss, got_tables), (loss, tables), rtol=1e-5, atol=1e-6)


def test_rows_are_rounded_at_their_owners_on_ranks(ranks):
    """On gloo ranks, fake_quantize also reads these values."""
    rows, loss, tables = coded.trained(None, None, {}, coded.DTYPES)
    for got in ranks(2).run(coded.trained_on_ranks, {"x": 2}, "row_wise", {"exact": True}, coded.DTYPES):
        assert_trees_close(got[0], rows)
        assert_trees_close(got[1:], (loss, tables), rtol=1e-5, atol=1e-6)


def test_steps_of_every_kind_round_at_the_owners(ranks):
    """Steps whose loss reads fake-quantised sharded tables, with several dtypes in a bank, have the bits of one process
    on two gloo ranks. Staged and donated steps agree within 1e-6. A pipeline and a stale pipeline have the bits of
    their loop, the latter with a codec."""
    ways = ("alone", "jit", "pipeline")
    found = ranks(2).run(as_staged, rounded.every_way, {"exact": True}, ways, deadline_s=120)[0]
    assert found == dict.fromkeys(ways, True)
    coded_too = {"exact": True, "codec": fr.Codec("bfloat16", "int8")}
    assert ranks(2).run(as_staged, rounded.every_way, coded_too, ("stale",), deadline_s=120)[0] == {"stale": True}


def test_what_reads_its_parts_otherwise_is_not_placed():
    """Fake-quantised tables, even sharded tables, raise where tables are placed, because their parts would be read as
    plain tables. The error suggests what to place instead."""
    mesh, plan = fr.Mesh.emulated(x=2), fr.Plan({"a": fr.row_wise("x")})
    tables = {"a": torch.ones(4, 2)}
    make = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    loss_fn = lambda p, ids: pytest.fail("the loss was run")
    fake = fr.fake_quantize(tables, "int2")
    state = fr.train_step(loss_fn, **make).init(fr.Params(fake, {}))
    calls = (
        lambda: fr.shard_tables(fake, plan, mesh),
        lambda: fr.train_step(loss_fn, **make, mesh=mesh, plan=plan).init(fr.Params(fake, {})),
        lambda: fr.reshard(state, plan, mesh=mesh, sparse=make["sparse"]),
    )
    for call in calls:
        with pytest.raises(
            TypeError, match=r"FakeQuantizedTables, which are not placed(.|\n)*fr.fake_quantize\(params"
        ):
            call()
    placed = fr.shard_tables(tables, plan, mesh)
    with pytest.raises(TypeError, match=r"ShardedTables, which are not placed(.|\n)*fr.gather_tables"):
        fr.shard_tables(placed, plan, mesh)
    with pytest.raises(TypeError, match=r'learned scales belong to plain tables(.|\n)*scales="row"'):
        fr.fake_quantize(placed, scales="learned")
    with pytest.raises(TypeError, match=r"`tables` are sharded QuantizedTables"):
        fr.fake_quantize(fr.quantize(placed))


def test_what_is_sharded_and_coded_is_refused_elsewhere(tmp_path):
    """Several dtypes in one bank, a key, codes of codes, a checkpoint by parts, and gradients each raise with their
    name."""
    mesh = fr.Mesh.emulated(x=2)
    same = {"a": torch.ones(4, 2), "b": torch.ones(4, 2)}
    placed = fr.shard_tables(same, fr.Plan({"a": fr.row_wise("x"), "b": fr.row_wise("x")}), mesh)
    with pytest.raises(ValueError, match=r"tables of one bank, 'a', have several dtypes"):
        fr.quantize(placed, {"a": "int8", "b": "int4"})
    with pytest.raises(ValueError, match=r"`key` is for tables that are whole"):
        fr.quantize(placed, key=fr.key(0))
    q = fr.quantize(placed)
    assert q.to(torch.float16).layout == q.layout
    with pytest.raises(TypeError, match=r"`tables` are sharded QuantizedTables"):
        fr.quantize(q)
    with pytest.raises(TypeError, match=r"quantised tables on a mesh(.|\n)*fr.gather_tables"):
        fr.save(tmp_path / "q", q, mesh=mesh)
    with pytest.raises(TypeError, match=r"are read, and not trained"):
        fr.value_and_grad(lambda p: pytest.fail("the loss was run"))(fr.Params(q, {}))

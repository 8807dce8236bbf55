"""Towers on a mesh equal the same towers in one process, in values and in all gradients.

They are also those of one process in steps, staged, and on gloo ranks, and send fewer bytes between nodes."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import tower_models
from programs.as_staged import as_staged
from programs.tower_models import KINDS, SAME, SINGULAR, SUM, models, on_mesh, towers_of, trained, whole

import funcrec as fr
from funcrec.testing import assert_trees_close

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SHARED = fr.nn.mlp((3, 4, 2))


@given(models())
def test_towers_on_a_mesh_are_those_of_one_process(model):
    """On any mesh, for any plan with each tower on one node, outputs and the gradients of rows and of layers are those
    of plain tables."""
    assert_trees_close(on_mesh(model), whole(model), **CLOSE)


@settings(max_examples=15)
@given(
    models(
        layers=(SAME,), kinds=KINDS[:-1], poolings=("sum", "mean"), alike=False,
        dtypes=((torch.float32,), (torch.float64,), (torch.bfloat16,)),
    ),
    st.booleans(),
)  # fmt: skip
def test_lookups_of_towers_keep_their_bits(model, exact):
    """The gradients of rows are summed in the order of the global batch, so they have the bits of one process. With
    exact=True the pooled vectors have them, too."""
    got, want = on_mesh(model, exact=exact), whole(model)
    assert_trees_close(got[0], want[0], **({} if exact else {"rtol": 1e-6, "atol": 1e-6}))
    assert_trees_close(got[1], want[1])


def test_a_node_without_a_tower_adds_nothing():
    """A node runs layers that none of its towers has. If these give NaN and infinite derivatives, no value and no
    gradient has any."""
    model = towers_of(2, 2, [SINGULAR, SUM, SINGULAR, SAME], nodes=[0, 0, 0, 1], least=1)
    got = on_mesh(model)
    assert_trees_close(got, whole(model), **CLOSE)
    assert all(x.isfinite().all() for x in fr.tree.leaves(got))


@pytest.mark.parametrize(
    "how", [{"dedup": True}, {"capacity": 90}, {"dedup": True, "capacity": 90}, {"axis": None}], ids=str
)
def test_exchanges_of_towers_may_be_others(how):
    """Deduplicated exchanges, exchanges with room for all ids, and towers without nodes give the same."""
    model = towers_of(2, 2, [SHARED] * 4)
    assert_trees_close(on_mesh(model, **how), whole(model), **CLOSE)


@settings(max_examples=8)
@given(models(dtypes=((torch.float32, torch.float64),)))
def test_tables_may_have_several_dtypes(model):
    """A layer gets f64 vectors if a table of its tower is f64, else f32 vectors, whatever tables other towers have."""
    (mesh, plan, tables, ids, towers), met = model, {}
    seen = lambda n, x: x._replace(apply=lambda p, v: (met.setdefault(n, v.dtype), x.apply(p, v))[1], train_apply=None)
    own = {n: replace(t, layer=seen(n, t.layer)) for n, t in towers.items()}
    is_wide = {n: any(tables[f.table].dtype == torch.float64 for f in t.features) for n, t in own.items()}
    wanted = {n: torch.float64 if wide else torch.float32 for n, wide in is_wide.items()}
    params = {n: fr.tree.to(t.layer.init(fr.key(1)), dtype=wanted[n]) for n, t in own.items()}
    want = fr.towers(own).apply(params, tables, ids)
    held, ax = fr.shard_tables(tables, plan, mesh), fr.P(mesh.axis_names)
    for axis in ("node", None):
        met.clear()
        f = fr.towers(own, axis=axis).apply
        got = fr.shard_map(f, mesh=mesh, in_specs=(fr.P(), held.specs(), ax), out_specs=ax)(params, held, ids)
        assert met == wanted
        assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("code, unit", [("bfloat16", 2**-7), ("int8", 1 / 60)])
def test_outputs_travel_by_the_codec(code, unit):
    """A codec rounds what ranks send within a node and between nodes."""
    model = towers_of(2, 1, [SUM, SAME])
    got, want = on_mesh(model, codec=fr.Codec(code))[0], whole(model)[0]
    assert 0 < (got - want).abs().max() <= 2 * unit * want.abs().max()


def test_ids_without_room_make_their_outputs_nan():
    """If ids of a rank find no room on the way to a node, the outputs of that rank are NaN, and others are not. If they
    find no room within the node, all outputs of the node's towers are NaN."""
    mesh, plan, tables, _, towers = towers_of(2, 1, [SAME, SUM])
    lists = [[0, 1, 2], [3, 4, 5], [1], [2]]  # the first two bags are those of rank 0
    ids = fr.KeyedJaggedTensor.from_lists(dict.fromkeys("uv", lists))
    on_node = fr.Plan({n: fr.table_wise("node", rank=p.ranks[0]) for n, p in plan.placements})
    for how, capacity, lost in ((on_node, 12, [0, 0]), (on_node, 4, [2, 0]), (plan, 12, [2, 2]), (plan, 16, [0, 0])):
        model = mesh, how, tables, ids, towers
        got, want = on_mesh(model, capacity=capacity)[0], whole(model)[0]
        assert [int(x.isnan().all(1).sum()) for x in got.split(2)] == lost
        assert_trees_close(got[~got.isnan()], want[~got.isnan()])


def test_a_batch_without_room_changes_nothing():
    """A step whose ids find no room, on the way to their node or within it, counts them and returns the state as it
    was. `needed` says the capacity that suffices."""
    how = (fr.Mesh.emulated(node=2, local=1), "table_row_wise", [SHARED] * 2)
    *first, _ = trained(*how, num_steps=0)
    *state, metrics = trained(*how, num_steps=1, capacity=1)
    assert metrics["overflow"] > 0 and metrics["loss"].isnan()
    assert_trees_close(state, first)
    *state, metrics = trained(*how, num_steps=1, capacity=int(metrics["needed"]))
    assert metrics["overflow"] == 0
    assert_trees_close(state, list(trained(*how, num_steps=1)[:2]))


@pytest.mark.parametrize("num_nodes, runs", [(1, 4), (2, 2), (4, 1)])
def test_alike_towers_are_one_program(num_nodes, runs):
    """Four towers with one layer cost each of n nodes 4 / n runs of the layer, on the bags of n ranks. A fifth tower
    with another layer costs every node one run more."""
    met = []
    counted = SHARED._replace(apply=lambda p, x: (met.append(tuple(x.shape)), SHARED.apply(p, x))[1], train_apply=None)
    for others in ([], [SUM]):
        mesh, plan, tables, ids, towers = towers_of(num_nodes, 1, [counted] * 4 + others)
        held, layer, ax = fr.shard_tables(tables, plan, mesh), fr.towers(towers), fr.P("node")
        params = fr.tree.to(layer.init(fr.key(1)), dtype=torch.float64)
        met.clear()
        f = fr.shard_map(layer.apply, mesh=mesh, in_specs=(fr.P(), held.specs(), ax), out_specs=ax)
        f(params, held, ids)
        assert met == [(ids.num_bags, 3)] * runs


def test_towers_read_quantised_and_dynamic_tables():
    """Lookups of towers read quantised rows, and ids that a vocabulary maps to rows, as lookups without towers do."""
    mesh, plan, _, ids, towers = towers_of(2, 2, [SHARED] * 2)
    layer, ax, vocabulary = fr.towers(towers), fr.P(mesh.axis_names), fr.admit(fr.vocabulary(128), torch.arange(4))[0]
    params, features = layer.init(fr.key(1)), [f for t in towers.values() for f in t.features]
    configs = [fr.TableConfig(f.table, vocabulary.num_embeddings, 2 - int(f.key == "v")) for f in features]
    of_column = lambda c: [i for i, f in enumerate(features) if f.key == c]
    some = lambda xs, c: tuple(xs[i] for i in of_column(c))
    named = {c: fr.VocabularyConfig(vocabulary, some(configs, c), some(features, c)) for c in "uv"}
    plain = fr.init(fr.key(0), configs)
    for own in (fr.quantize(plain, "int8"), fr.dynamic_tables(plain, named, key=fr.key(0))):
        held = fr.shard_tables(own, plan, mesh)
        f = fr.shard_map(layer.apply, mesh=mesh, in_specs=(fr.P(), held.specs(), ax), out_specs=ax)
        assert_trees_close(f(params, held, ids), layer.apply(params, own, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_layers_drop_out_in_training(rate):
    """train_apply drops out inputs of layers. At rate 0 its outputs are those of apply, on a mesh, too."""
    mesh, plan, tables, ids, towers = towers_of(2, 1, [fr.nn.mlp((3, 2), dropout=rate)] * 2)
    layer, ax, key = fr.towers(towers), fr.P(mesh.axis_names), fr.key(0)
    params, held = fr.tree.to(layer.init(fr.key(1)), dtype=torch.float64), fr.shard_tables(tables, plan, mesh)
    train = lambda *xs: layer.train_apply(*xs)[0]
    f = fr.shard_map(train, mesh=mesh, out_specs=ax, in_specs=(fr.P(), held.specs(), ax, fr.P()))
    want = layer.apply(params, tables, ids)
    for got in (f(params, held, ids, key), train(params, tables, ids, key)):
        assert got.shape == want.shape and torch.allclose(got, want) == (rate == 0)


def test_towers_pickle():
    """Towers pickle as the call that makes them."""
    _, _, tables, ids, towers = towers_of(1, 1, [SHARED] * 2, dtype=torch.float32)
    model = fr.towers(towers, axis="host")
    again, params = pickle.loads(pickle.dumps(model)), model.init(fr.key(0))
    assert_trees_close(again.init(fr.key(0)), params)
    assert_trees_close(again.apply(params, tables, ids), model.apply(params, tables, ids))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("kind", ["table_wise", "table_row_wise", "table_column_wise"])
def test_steps_of_towers_are_those_of_one_process(sizes, kind):
    """Three steps on a mesh end with the tables and layers of three steps without it."""
    layers = [SHARED, SHARED, fr.nn.linear(3, 2), SHARED]
    mesh = fr.Mesh.emulated(node=sizes[0], local=sizes[1])
    assert_trees_close(trained(mesh, kind, layers)[:2], trained(None, kind, layers)[:2], rtol=1e-5, atol=1e-6)


def test_a_staged_step_of_towers_is_the_eager_one():
    """A staged, donated step ends with the numbers of the eager one."""
    mesh, layers = fr.Mesh.emulated(node=2, local=2), [SHARED] * 2
    got = as_staged(trained, mesh, "table_wise", layers, fr.jit)
    assert_trees_close(got, trained(mesh, "table_wise", layers), rtol=1e-5, atol=1e-6)


def test_compiled_towers_are_the_eager_ones():
    """Compiled outputs of two different towers on a mesh are the eager ones."""
    mesh, plan, tables, ids, towers = towers_of(2, 1, [fr.nn.linear(2, 1), SAME], dims=(2,))
    held, layer, ax = fr.shard_tables(tables, plan, mesh), fr.towers(towers), fr.P("node")
    params = tower_models.params_of(towers)
    f = fr.shard_map(layer.apply, mesh=mesh, in_specs=(fr.P(), held.specs(), ax), out_specs=ax)
    assert_trees_close(fr.jit(f)(params, held, ids), layer.apply(params, tables, ids), **CLOSE)


def test_gloo_ranks_of_towers_are_emulated_ones(ranks):
    """On 2 x 2 gloo ranks, towers of two layers have the outputs and gradients of an emulated mesh."""
    want = tower_models.results(fr.Mesh.emulated(node=2, local=2))
    for got in ranks(4).run(tower_models.real_results):
        assert_trees_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_staged_step_of_towers_on_gloo_ranks_is_the_emulated_one(ranks):
    """A staged, donated step of towers of two layers on two gloo ranks ends with the numbers of an emulated mesh."""
    want = trained(fr.Mesh.emulated(node=2), "table_wise", tower_models.two_layers())
    for got in ranks(2).run(as_staged, tower_models.real_trained):
        assert_trees_close(got, want, rtol=1e-5, atol=1e-6)


def test_towers_send_less_between_nodes(ranks):
    """A DLRM of 26 tables in two towers sends, between nodes, vectors as wide as the towers' outputs, and half as many
    blocks of ids. Within nodes it sends as many bytes as without towers."""
    bags, columns, places, outputs, room = 32, 16, 7, 40, 26 * 32  # 13 features of a tower, over two ranks
    for plain, towers in ranks(4).run(tower_models.sent_bytes):
        assert plain["node"] == 4 * (2 * bags * places * columns + 2 * (room + places * bags))
        assert towers["node"] == 4 * (bags * outputs + room + 13 * bags)
        assert towers["local"] == plain["local"]
        assert 3.5 * towers["node"] < plain["node"]

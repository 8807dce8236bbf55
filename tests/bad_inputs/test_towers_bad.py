"""Bad inputs of towers. Each row is a call, the call's exception, and a part of the message."""

import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr

MESH = fr.Mesh.emulated(node=2, local=2)
X, KEY, LINEAR = torch.ones(4, 2), fr.key(0), fr.nn.linear(2, 1)
F = {n: fr.FeatureConfig(n, table=n) for n in ("t", "u", "v")}
TABLES = dict.fromkeys(F, X)
IDS = fr.KeyedJaggedTensor.from_lists({n: [[1]] * 4 for n in F})
UNEVEN = fr.KeyedJaggedTensor.from_lists({n: [[1]] * i for i, n in enumerate(F, 1)})
EACH = {n: fr.Tower([f], LINEAR) for n, f in F.items()}
PAIR = {"pair": fr.Tower([F["t"], F["u"]], fr.nn.linear(4, 1))}
SEQUENCE = fr.FeatureConfig("h", table="t", pooling="none")
AT = lambda rank: fr.table_wise(("node", "local"), rank=rank)


def e(call, kind, *fragments):
    return call, kind, fragments


def plan(**placements):
    return fr.Plan({**{n: AT(0) for n in F}, **placements})


def on_mesh(towers, own, ids=IDS, axis="node", tables=TABLES, mesh=MESH, params=None):
    """Return a call of the towers on a mesh."""
    layer = fr.towers(towers, axis=axis)

    def call():
        held = fr.shard_tables(tables, own, mesh) if own else tables
        specs = {"in_specs": (fr.P(), held.specs(), fr.P(mesh.axis_names)), "out_specs": fr.P(mesh.axis_names)}
        return fr.shard_map(layer.apply, mesh=mesh, **specs)(params or layer.init(KEY), held, ids)

    return call


def plain(towers, params=None, tables=TABLES, ids=IDS):
    return lambda: fr.towers(towers).apply(params or fr.towers(towers).init(KEY), tables, ids)


HELD = fr.shard_tables(TABLES, plan(), MESH)
FAKE = fr.fake_quantize(HELD, "int8")
NORMED = fr.nn.mlp((2, 2, 1), batch_norm=True)
SHARED_BAGS = fr.dedup_bags(IDS, num_parts=4)
ROWS = {
    "Tower: sequence": e(lambda: fr.Tower([SEQUENCE], LINEAR), ValueError, "`features['h']` is a sequence"),
    "Tower: nothing": e(lambda: fr.Tower([], LINEAR), ValueError, "`features` are empty"),
    "Tower: running statistics": e(lambda: fr.Tower([F["t"]], NORMED), ValueError, "`layer` depends on other examples",
        "layer_norm"),
    "Tower: a function": e(lambda: fr.Tower([F["t"]], torch.relu), TypeError, "`layer` is not a Layer"),
    "Tower: one name twice": e(lambda: fr.Tower([F["t"], F["t"]], LINEAR), ValueError, "`features`"),
    "towers: nothing": e(lambda: fr.towers({}), ValueError, "`towers` are empty"),
    "towers: a list": e(lambda: fr.towers([EACH["t"]]), TypeError, "`towers`"),
    "towers: two features of one name": e(
        lambda: fr.towers({**EACH, "other": fr.Tower([fr.FeatureConfig("t", table="u")], LINEAR)}),
        ValueError, "different features of `towers` have one name", "['t'] more than once",
    ),
    "towers: params of others": e(plain(EACH, {"t": {}}), ValueError, "`params` are not these towers'", "names ['t']"),
    "towers: another output": e(plain({"t": fr.Tower([F["t"]], fr.nn.Layer(lambda key: {}, lambda p, x: x.sum(0)))}),
        ValueError, "returned no row for each bag", "f32[2]"),
    "towers: a table too few": e(plain(EACH, tables={"t": X}), KeyError, "'u'"),
    "towers: several nodes": e(on_mesh(EACH, plan(u=fr.row_wise(("node", "local")))), ValueError,
        "table 'u' of a tower lies on several nodes", "nodes [0, 1]", "fr.tower_placements"),
    "towers: columns on several nodes": e(on_mesh(EACH, plan(u=fr.column_wise(("node", "local"), ranks=(0, 2)))),
        ValueError, "table 'u' of a tower lies on several nodes"),
    "towers: tables apart": e(on_mesh(PAIR, plan(u=AT(2))), ValueError, "a tower's tables lie on different nodes",
        "'t' on node 0, 'u' on node 1"),
    "towers: another axis": e(on_mesh(EACH, plan(), axis="host"), ValueError, "`axis` is not an axis", "'host'",
        "axis=None"),
    "towers: outside": e(lambda: fr.towers(EACH).apply(fr.towers(EACH).init(KEY), HELD,
        IDS), ValueError, "outside of their mesh"),
    "towers: copies apart": e(on_mesh(EACH, fr.Plan({n: fr.row_wise("local") for n in F}, replicas="node")), ValueError,
        "`axis` is an axis whose copies train apart"),
    "towers: inverse indices": e(on_mesh(EACH, plan(), SHARED_BAGS), ValueError, "`ids` have inverse indices"),
    "towers: other numbers of bags": e(
        lambda: fr.shard_map(lambda t: fr.towers(EACH).apply(fr.towers(EACH).init(KEY), t, UNEVEN), mesh=MESH,
            in_specs=(HELD.specs(),), out_specs=fr.P())(HELD),
        ValueError, "the towers' columns have different numbers of bags", "'u': 2",
    ),
    "towers: fake quantised": e(
        lambda: fr.shard_map(lambda x: fr.towers(EACH).apply(fr.towers(EACH).init(KEY), FAKE, IDS), mesh=MESH,
            in_specs=fr.P(), out_specs=fr.P())(X),
        TypeError, "of a kind that nodes do not read", "FakeQuantizedTables", "axis=None",
    ),
    "towers: a key": e(lambda: fr.towers(EACH).init(0), TypeError, "funcrec.towers.init", "int 0"),
    "tower_placements: axis": e(lambda: fr.tower_placements(EACH, MESH, axis="host"), ValueError,
        "`axis` is not an axis of the mesh", "'host'"),
    "tower_placements: one axis": e(lambda: fr.tower_placements(EACH, fr.Mesh.emulated(node=2), kind="table_row_wise"),
        ValueError, "'table_row_wise' has no such axes here", "axes ['node']"),
    "tower_placements: kind": e(lambda: fr.tower_placements(EACH, MESH, kind="grid"), ValueError, "`kind` is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_bad_input_is_refused(name):
    """A bad argument raises before any work. The message has the argument's name, got and need."""
    call, kind, fragments = ROWS[name]
    assert_refused(call, kind, *fragments)

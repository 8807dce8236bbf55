"""Towers: groups of features, each with an interaction of its own, which a mesh computes where the tables are.

    towers(params, tables, ids) = (layer_1(lookup(features_1)), ..., layer_T(lookup(features_T)))        along dim 1

    ids ─▶ node of the tower ─lookup within the node─▶ pooled vectors ─layer─▶ outputs ─▶ ranks that have the bags

On a mesh, only ids and outputs travel between nodes; pooled vectors stay on their node.
Shapes: B bags on a rank, T towers, N nodes, W columns of a tower's output.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import (
    Problem,
    check,
    describe,
    fail,
    field_problems,
    random,
    remade,
    replace,
    reported,
    tree_flatten,
    tree_problems,
    twice_problems,
    typed,
)
from funcrec.jagged import KeyedJaggedTensor, are_equal
from funcrec.kernels import ops
from funcrec.nn import Layer
from funcrec.sharding._lookup import check_bound
from funcrec.sharding._tables import ShardedTables
from funcrec.sharding.by_node._interact import run_seats, send_back
from funcrec.sharding.by_node._node_ids import send_ids
from funcrec.sharding.by_node._node_tables import NodeTables
from funcrec.sharding.by_node._seating import CALL, seating_of
from funcrec.sharding.placement._layout import Layout
from funcrec.tables import (
    FeatureConfig,
    checked_rows,
    feature_list_problems,
    layout_in,
    lookup,
    placed_as,
    plain_tables,
)  # fmt: skip


@dataclass(frozen=True)
class Tower:
    """A group of features, and the interaction of their pooled vectors.

    Args:
      features: pooled features ("sum", "mean" or "max").
      layer: its input is the features' vectors, side by side in their order: a row for each bag. Its output must have a
        row for each bag, too, that depends on no other bag.

    Raises:
      TypeError, ValueError: if a feature is a sequence, or if the layer keeps running statistics, which would depend on
        the bags that meet on a node.

    Example:
      >>> import funcrec as fr
      >>> features = [fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item")]
      >>> fr.Tower(features, fr.nn.mlp((16, 4))).features[1].name
      'item'

    Source: TorchRec's EmbeddingTower.
    """

    features: Sequence[FeatureConfig]
    layer: Layer

    def __post_init__(self) -> None:
        check("funcrec.Tower", field_problems(self))
        check("funcrec.Tower", tower_problems(self))
        object.__setattr__(self, "features", tuple(self.features))


@remade
@typed
def towers(towers: Mapping[str, Tower], *, axis: str | None = "node") -> Layer[Tensor]:
    """Return the layer of several towers: its parameters are {tower: those of the tower's layer}.

    Args:
      towers: {name: Tower}. Towers may share features; different features have different names.
      axis: the axis of the mesh whose places are nodes, for ShardedTables of a plan on such a mesh. All tables of a
        tower must lie on one node, as those of `tower_placements` do. None: every rank runs all towers on its own bags,
        after lookups as usual, under any plan.

    Returns:
      Layer whose functions are apply(params, tables, ids) -> f[B, ΣW], the outputs side by side in the order of the
      towers, and train_apply(params, tables, ids, key, stats=[]) -> (f[B, ΣW], []), where layers drop out by keys of
      their own. `tables` are plain tables, or inside `shard_map` ShardedTables.

    Raises:
      ValueError, KeyError, TypeError: if the parameters, features, tables and ids do not fit; on a mesh if a tower's
        tables lie on several nodes, or if the ids have inverse indices.

    Law: on any mesh apply has the values and gradients of plain tables, up to the rounding of a sharded lookup and of
      matrix products of other sizes.

    Cost: a rank (t, l) gets the ids of ranks (0, l), ..., (N-1, l) for the towers of node t. It looks them up with the
      ranks of its node, and runs the node's towers on N · B bags. To each of the other nodes it sends B vectors of ΣW
      numbers, where a lookup sends a vector for each feature; ΣW is that of the node that has most.
      All ranks run one program. Towers share a run in it, each with parameters of its own, if they have the same layer
      (one object), parameters of the same shapes and equally wide inputs. Other towers do not share: every node runs
      each layer as often as the node that has most towers with it, and drops the outputs that are not its own. So T
      different towers cost each of N nodes the work of all T towers; the bytes between nodes do not grow.
      A step adds up the gradients of all layers over all ranks, as those of other dense parameters.

    Example:
      >>> import torch, funcrec as fr
      >>> tables = {n: torch.arange(8.0).reshape(4, 2) for n in ("user", "item")}
      >>> layer = fr.nn.linear(2, 1)
      >>> parts = {n: fr.Tower([fr.FeatureConfig(n, table=n)], layer) for n in tables}
      >>> model = fr.towers(parts)
      >>> params = model.init(fr.key(0))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"user": [[0], [1, 2]], "item": [[3], []]})
      >>> alone = model.apply(params, tables, ids)
      >>> mesh = fr.Mesh.emulated(node=2)
      >>> held = fr.shard_tables(tables, fr.Plan(fr.tower_placements(parts, mesh)), mesh)
      >>> specs = {"in_specs": (fr.P(), held.specs(), fr.P("node")), "out_specs": fr.P("node")}
      >>> torch.allclose(fr.shard_map(model.apply, mesh=mesh, **specs)(params, held, ids), alone)
      True

    Source: TorchRec's EmbeddingTowerCollection; Luo et al., "Disaggregated Multi-Tower: Topology-aware Modeling
    Technique for Efficient Large-Scale Recommendation", MLSys 2024.
    """
    check(CALL, name_problems(towers))
    names, own = tuple(towers), tuple(towers.values())

    def init(key: Tensor) -> dict[str, Any]:
        random.check_key(f"{CALL}.init", key)
        keys = random.split(key, len(names))
        return {n: t.layer.init(k) for n, t, k in zip(names, own, keys, strict=True)}

    def run(params: Any, tables: Any, ids: KeyedJaggedTensor, key: Tensor | None) -> Tensor:
        check(
            CALL, tree_problems(params, "params", dict.fromkeys(names, ...), "are not these towers'", "layer.init(key)")
        )
        mine = [params[n] for n in names]
        keys = [()] * len(names) if key is None else list(random.split(key, len(names)))
        pairs = list(zip(mine, keys, strict=True))
        read = plain_tables(tables)
        layout = layout_in(read)
        if layout is None:
            if axis is not None and isinstance(getattr(read, "tables", None), ShardedTables):
                check(CALL, kind_problems(read))  # sharded tables in tables of another kind
            each = [lookup(tables, ids, t.features).values for t in own]
        elif axis is not None:
            return on_nodes(own, pairs, tables, ids, layout, axis)
        else:
            each = of_one_lookup(own, tables, ids, layout)
        return torch.cat([interaction(t, p, x) for t, p, x in zip(own, pairs, each, strict=True)], 1)

    def apply(params: dict[str, Any], tables: Any, ids: KeyedJaggedTensor) -> Tensor:
        return run(params, tables, ids, None)

    def train_apply(
        params: dict[str, Any], tables: Any, ids: KeyedJaggedTensor, key: Tensor, stats: Sequence = ()
    ) -> tuple[Tensor, list]:
        random.check_key(f"{CALL}.train_apply", key)
        return run(params, tables, ids, key), []

    return Layer(init, apply, train_apply)


def of_one_lookup(towers: Sequence[Tower], tables: Any, ids: KeyedJaggedTensor, layout: Layout) -> Iterator[Tensor]:
    """Yield the pooled vectors of each tower for this rank's bags, f[B, ΣD], from the exchanges of one lookup."""
    found = lookup(tables, ids, features_of(towers))
    for t in towers:
        yield torch.cat([found[f.name] for f in t.features], 1).to(dtype_of(t, layout))


def features_of(towers: Iterable[Tower]) -> list[FeatureConfig]:
    """Return the features of all towers, each once."""
    return list(dict.fromkeys(f for t in towers for f in t.features))


def interaction(tower: Tower, params: tuple[Any, Any], x: Tensor) -> Tensor:
    """Return the layer's output for pooled vectors f[M, ΣD]; params: the layer's, and a key in training, else ()."""
    own, key = params
    train, is_training = tower.layer.train_apply, isinstance(key, Tensor)
    y = train(own, x, key)[0] if is_training and train is not None else tower.layer.apply(own, x)
    if not isinstance(y, Tensor) or y.dim() != 2 or y.shape[0] != x.shape[0]:
        got, need = f"{describe(y)} for pooled vectors {describe(x)}", "f[B, W], with a row for each bag"
        fail(CALL, "a tower's layer returned no row for each bag.", got=got, need=need)
    return y


def on_nodes(
    own: Sequence[Tower],
    pairs: Sequence[tuple[Any, Any]],
    tables: Any,
    ids: KeyedJaggedTensor,
    layout: Layout,
    axis: str,
) -> Tensor:
    """Return the outputs of all towers for this rank's bags, each computed on the tower's node."""
    held, rows = checked_rows(CALL, plain_tables(tables), ids, features_of(own))
    check(CALL, kind_problems(held), axis_problems(layout, axis))
    check_bound(CALL, layout)
    check(CALL, bag_problems(ids, own))
    forms = [form_of(t, p, layout) for t, p in zip(own, pairs, strict=True)]
    labels = tuple(forms.index(f) for f in forms)
    seating = seating_of(layout, tuple(t.features for t in own), labels, axis)
    transport = held.transport
    node_ids, lost = send_ids(rows, seating, transport.capacity)
    view = replace(held, banks=tables.banks, layout=seating.view)  # with the references of a differentiated loss
    x = lookup(NodeTables(view, lost, layout, axis), node_ids, seating.slots).values
    run = lambda i, params, x: interaction(own[i], params, x.to(forms[i].dtype))
    outputs = send_back(run_seats(x, seating, run, pairs), seating, len(own), transport.codec)
    y = torch.cat(outputs, 1)
    return y if transport.capacity is None else y * torch.where(lost[0] > 0, torch.nan, 1).to(y.dtype)


class Form(NamedTuple):
    """What towers must have in common to share a seat: one layer, and parameters and inputs of the same shapes."""

    layer: Layer
    structure: Any
    leaves: tuple
    width: int
    dtype: torch.dtype


def form_of(tower: Tower, params: Any, layout: Layout) -> Form:
    shapes, (leaves, structure) = dict(layout.shapes), tree_flatten(params)
    forms = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    width = sum(shapes[f.table][1] for f in tower.features)
    return Form(tower.layer, structure, forms, width, dtype_of(tower, layout))


def dtype_of(tower: Tower, layout: Layout) -> torch.dtype:
    """Return the dtype of a lookup of the tower's tables: f64 if one of them is."""
    banks = (layout.banks[layout.shards[layout.shards_of(f.table)[0]].bank] for f in tower.features)
    is_wide = any(ops.accumulation_dtype(b.dtype) == torch.float64 for b in banks)
    return torch.float64 if is_wide else torch.float32


# -- validators --------------------------------------------------------------------------------------------------


def tower_problems(tower: Tower) -> Iterator[Problem]:
    if (yield from reported(feature_list_problems(tower.features))):
        return
    if not tower.features:
        hint = '[fr.FeatureConfig("clicked", table="item")]'
        yield Problem("`features` are empty.", "no feature", "at least one pooled feature", hint)
    for f in tower.features:
        if f.pooling == "none":
            yield Problem(f"`features[{f.name!r}]` is a sequence.", "pooling 'none'", "pooling 'sum', 'mean' or 'max'")
    if tower.layer.init_stats():
        got, hint = "running statistics", "fr.nn.layer_norm, which treats each example alone"
        yield Problem("`layer` depends on other examples.", got, "a layer without running statistics", hint)


def name_problems(towers: Mapping[str, Tower]) -> Iterator[Problem]:
    if not towers:
        yield Problem("`towers` are empty.", "{}", "{name: fr.Tower(features, layer)}")
    names, hint = (f.name for f in features_of(towers.values())), "another name with column=..."
    yield from twice_problems("different features of `towers` have one name.", names, hint)


def kind_problems(tables: Any) -> Iterator[Problem]:
    if not isinstance(tables, ShardedTables) or placed_as(tables.of).read is not None:
        of = type(tables).__name__ if not isinstance(tables, ShardedTables) else f"sharded {tables.of.__name__}"
        hint = "axis=None, which reads them by plain lookups"
        yield Problem(
            "`tables` are of a kind that nodes do not read.", of, "ShardedTables of plain tables", hint, TypeError
        )


def axis_problems(layout: Layout, axis: str) -> Iterator[Problem]:
    names, hint = [a for a, _ in layout.mesh_shape], "axis=None, for interactions on every rank"
    if axis not in names:
        yield Problem("`axis` is not an axis of the tables' mesh.", f"{axis!r}", f"one of {names}", hint)
    elif axis in layout.replicas:
        got, need = f"{axis!r}, an axis of `replicas`", "an axis that cuts the tables"
        yield Problem("`axis` is an axis whose copies train apart.", got, need, hint)


def bag_problems(ids: KeyedJaggedTensor, towers: Sequence[Tower]) -> Iterator[Problem]:
    keys = list(dict.fromkeys(f.key for t in towers for f in t.features))
    if ids.inverse is not None:
        need, hint = "ids without inverse indices", "axis=None, whose lookups pool the bags of several examples once"
        yield Problem("`ids` have inverse indices.", f"{tuple(ids.inverse.shape)} of them", need, hint)
    elif not are_equal(ids.bags_of(k) for k in keys):
        got = ", ".join(f"{k!r}: {ids.bags_of(k)}" for k in keys)
        yield Problem("the towers' columns have different numbers of bags.", got, "one number of bags")

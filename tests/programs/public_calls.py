"""One good call of every public function, constructor and method: what a sweep of wrong arguments begins with.

A row is a name, a function and its keyword arguments. Values that are trees (`Params`, `JaggedTensor`, ...) have no row
for their own constructor: their fields may be anything that stands in a tree (a P, an axis for vmap), and functions
look at them when they are used.
"""

import inspect
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

import funcrec as fr
from funcrec import data, interop, metrics, models, nn, optim, testing
from funcrec.optim._builtin import BUILTIN
from funcrec.optim.write import examples

JT, KJT, KT, RG = fr.JaggedTensor, fr.KeyedJaggedTensor, fr.KeyedTensor, fr.RowGrads
FC, TC, P = fr.FeatureConfig, fr.TableConfig, fr.P
i64 = lambda *numbers: torch.tensor(numbers, dtype=torch.int64)
f32 = lambda *shape: torch.ones(shape)

MESH = fr.Mesh.emulated(a=2, b=2)
KEY = fr.key(0)
CONFIGS = (TC("t", 6, 4), TC("u", 5, 4))
TABLES = fr.init(KEY, CONFIGS)
FEATURES = (FC("x", table="t"), FC("y", table="u", pooling="mean"))
SEQUENCES = (FC("x", table="t", pooling="none"),)
IDS = KJT.from_lists({"x": [[0, 1], [], [2], [5]], "y": [[2], [0, 4], [1], [1]]})
WEIGHTED = KJT.from_lists({"x": [[0, 1], []]}, weights={"x": [[0.5, 2.0], []]})
BAGS = JT.from_lists([[1, 2], [], [3]])
ACTS = fr.lookup(TABLES, IDS, FEATURES)
ROWS = fr.lookup_sequence(TABLES, IDS, SEQUENCES)
DENSE = {"w": f32(8), "b": f32()}
QUANTIZED, FAKE = fr.quantize(TABLES), fr.fake_quantize(TABLES, scales="learned")
PARAMS = fr.Params(TABLES, DENSE)
BATCH = fr.Batch(IDS, f32(4))
GRADS = fr.lookup_transpose(ACTS, IDS, FEATURES, CONFIGS)
PLAN = fr.Plan({"t": fr.row_wise("a"), "u": fr.table_wise("b", rank=1)})
SPARSE, OPT = optim.adagrad(lr=0.1), optim.dense(torch.optim.Adam, lr=0.1)


def loss_fn(params, batch):
    z = fr.lookup(params.tables, batch.ids, FEATURES).values @ params.dense["w"] + params.dense["b"]
    return (z - batch.label).square().mean()


STEP = fr.train_step(loss_fn, sparse=SPARSE, dense=OPT)
STATE = STEP.init(PARAMS)
ON_MESH = fr.train_step(loss_fn, sparse=SPARSE, dense=OPT, mesh=MESH, plan=PLAN)
HELD = ON_MESH.init(PARAMS)
COPIES = fr.Plan({"t": fr.replicated(), "u": fr.replicated()}, replicas="b")
APART = fr.reshard(STATE, COPIES, mesh=MESH, sparse=SPARSE)
SHARDED = fr.shard_tables(TABLES, PLAN, MESH)
MODEL = models.lr((TC("t", 6, 1), TC("u", 5, 1)), FEATURES)
MODEL_PARAMS = MODEL.init(KEY)
TOWERS = models.two_tower(CONFIGS, FEATURES[:1], FEATURES[1:], sizes=(8, 3))
TOWER_PARAMS = TOWERS.init(KEY)
RANDOM = data.random_rows(KEY, {"x": 6, "y": 5}, num_rows=8)
RATINGS = data.Ratings(
    user=i64(*range(20)) % 3, item=i64(*range(20)) % 4, rating=torch.arange(20) % 5 + 1.0, timestamp=i64(*range(20)),
    users={n: i64(0, 1, 0) for n in ("age", "gender", "occupation", "zip_code")},
    items={"release_year": i64(0, 0, 1, 1)},
    genre=JT.from_lists([[0], [1], [0, 1], []]),
    vocabularies=dict.fromkeys(("user_id", "item_id", "age", "gender", "occupation", "zip_code", "release_year",
            "genre"), ("p", "q", "r", "s")),
)  # fmt: skip
SCORES, LABELS = torch.tensor([0.2, 0.8, 0.5]), torch.tensor([0.0, 1.0, 1.0])
AUC, LOSS = metrics.auc(16), metrics.log_loss()
MLP = nn.mlp((4, 3, 1), dropout=0.1, batch_norm=True)
MLP_PARAMS, MLP_STATS = MLP.init(KEY), MLP.init_stats()
LINEAR, CROSS, NORM, POSITION = nn.linear(4, 2), nn.cross(4), nn.batch_norm(4), nn.position_weights(3)

SCHEMA = data.Schema(dense=("price",), categorical=("item",), multivalued=("tags",))
TABLE = {"item": ["a", None], "price": [1.0, 2.0], "tags": [["x"], []]}
ENCODING = data.fit_encoding(TABLE, SCHEMA)


class Call(NamedTuple):
    """`fn(**good)` works. `skip` names arguments whose wrong values are another row's."""

    name: str
    fn: Any
    good: dict
    skip: tuple[str, ...] = ()


def on_ranks(f):
    """A function of keywords that calls f with x as one rank of MESH has it."""

    def run(**kwargs):
        x = kwargs.pop("x", f32(4, 4))
        if isinstance(x, torch.Tensor) and x.shape == (4, 4):
            inside = lambda x: (f(x, **kwargs), fr.psum(f32(), ("a", "b")))[1]
            return fr.shard_map(inside, mesh=MESH, in_specs=P(), out_specs=P())(x)
        return fr.shard_map(lambda: (f(x, **kwargs), f32())[1], mesh=MESH, in_specs=(), out_specs=P())()

    return _like(f, run)


def _like(f, run):
    run.__signature__, run.__wrapped__ = inspect.signature(f), f
    return run


def first(f):
    """f's first item: what it says at the call, and what at the first batch."""
    return _like(f, lambda **kwargs: next(iter(f(**kwargs)), None))


def rows(prefix: str, **calls) -> list[Call]:
    return [Call(f"{prefix}.{name}", *spec) if isinstance(spec, tuple) else spec for name, spec in calls.items()]


def collective(name: str, **more) -> tuple:
    return on_ranks(getattr(fr, name)), {"x": f32(4, 4), "axis_name": "a", **more}


def values() -> list[Call]:
    take = lambda value, which: value[which]
    return [
        *rows("JaggedTensor",
            from_lists=(JT.from_lists, {"lists": [[1, 2], []], "weights": [[0.5, 1.0], []], "dtype": None}),
              from_lengths=(JT.from_lengths, {"values": f32(3), "lengths": i64(1, 2), "weights": f32(3)}),
              from_offsets=(JT.from_offsets, {"values": f32(3), "offsets": i64(0, 1, 3), "weights": f32(3)}),
              from_padded=(JT.from_padded, {"padded": f32(2, 3), "lengths": i64(1, 3), "weights": f32(2, 3)}),
              to_padded=(BAGS.to_padded, {"length": 2, "fill": 0}),
              select=(BAGS.select, {"bags": i64(0, 2), "capacity": 4}),
              pad_to=(BAGS.pad_to, {"capacity": 4}), getitem=(lambda which: take(BAGS, which), {"which": [0, 1]})),
        *rows("KeyedJaggedTensor",
            from_lists=(KJT.from_lists, {"lists": {"x": [[1], []]}, "weights": {"x": [[0.5], []]}, "dtype": None}),
              from_lengths=(KJT.from_lengths,
                  {"keys": ("x", "y"), "values": i64(1, 2), "lengths": i64(1, 0, 1), "weights": f32(2),
                      "strides": (2, 1), "unweighted": ("y",)}),
              from_offsets=(KJT.from_offsets,
                  {"keys": ("x", "y"), "values": i64(1, 2), "offsets": i64(0, 1, 1, 2), "weights": f32(2),
                      "strides": (2, 1), "unweighted": ("y",)}),
              from_jagged=(KJT.from_jagged, {"features": {"x": BAGS}}),
              from_padded=(KJT.from_padded,
                  {"padded": {"x": i64(1, 2)[None]}, "lengths": {"x": i64(2)}, "weights": {"x": f32(1, 2)}}),
              bag_range=(IDS.bag_range, {"key": "x"}), bags_of=(IDS.bags_of, {"key": "x"}),
              offsets_for=(IDS.offsets_for, {"key": "x"}),
              permute=(IDS.permute, {"keys": ["y", "x"]}), split=(IDS.split, {"segments": [1, 1]}),
              concat=(KJT.concat,
                  {"parts": [WEIGHTED, KJT.from_lists({"z": [[1], [2]]}, weights={"z": [[1.0], [1.0]]})]}),
              pad_to=(IDS.pad_to, {"capacity": 12}), getitem=(lambda which: take(IDS, which), {"which": "x"}),
              bags=(lambda which: take(IDS, which), {"which": [0, 1]})),
        *rows("KeyedTensor", from_dict=(KT.from_dict, {"features": {"x": f32(2, 3), "y": f32(2, 1)}}),
            concat=(KT.concat, {"parts": [ACTS]}),
              getitem=(lambda which: take(ACTS, which), {"which": "x"})),
        *rows("RowGrads",
            from_entries=(RG.from_entries,
                {"rows": i64(0, 2), "grads": f32(2, 4), "num_embeddings": 6, "count": i64(2)[0], "repeats": i64(1, 1),
                    "coalesced": False}),
              zeros=(RG.zeros, {"shape": (6, 4), "dtype": torch.float32, "device": None}),
              scale=(GRADS["t"].scale, {"factor": 2.0}),
              clip=(GRADS["t"].clip, {"max_value": 1.0}), where=(GRADS["t"].where, {"condition": torch.tensor(True)}),
              coalesce=(GRADS["t"].coalesce, {"implementation": None})),
        Call("RowGrads.add", lambda other: GRADS["t"] + other, {"other": GRADS["t"]}),
        *rows("", regroup=(fr.regroup, {"parts": [ACTS], "groups": [["x"], ["y", "x"]]}),
            pad_to_bucket=(fr.pad_to_bucket, {"ids": IDS, "minimum": 16}),
              global_norm=(lambda grads, more: fr.global_norm(grads, more), {"grads": GRADS, "more": f32(2)}),
              clip_by_global_norm=(fr.clip_by_global_norm, {"grads": GRADS, "max_norm": 1.0}),
              validate=(fr.validate, {"ids": IDS, "features": FEATURES, "tables": CONFIGS, "labels": (0.0, 1.0)}),
              pytree=(fr.pytree, {"cls": type("V", (), {"__annotations__": {"a": int}}), "static": (), "optional": ()}),
              checked=(fr.checked, {"fn": loss_fn})),
    ]  # fmt: skip


def trees() -> list[Call]:
    """Trees may be anything: what is wrong is what is done to them."""
    tree, form = {"w": f32(2), "n": 3}, fr.tree.structure([0, 0])
    add = lambda fn, tree: fr.tree.map(fn, tree, tree)
    own = lambda name: (name, f"{name}['w']", f"{name}['n']")
    return rows("tree",
        map=(add, {"fn": lambda x, y: x, "tree": tree}, own("tree")),
        to=(fr.tree.to, {"tree": tree, "device": "cpu", "dtype": torch.float64}, own("tree")),
        unflatten=(fr.tree.unflatten, {"structure": form, "leaves": [1, 2]}, ("leaves[0]", "leaves[1]")),
        allclose=(fr.tree.allclose, {"a": tree, "b": tree, "rtol": 0.0, "atol": 0.0}, (*own("a"), *own("b"))),
        jagged_to=(BAGS.to, {"device": "cpu", "dtype": torch.float64}))  # fmt: skip


def functions() -> list[Call]:
    return rows("", key=(fr.key, {"seed": 3}), split=(fr.split, {"key": KEY, "num": 2}),
        fold_in=(fr.fold_in, {"key": KEY, "data": 7}),
        TableConfig=(TC,
            {"name": "t", "num_embeddings": 3, "embedding_dim": 2, "dtype": torch.float32,
                "initializer": fr.uniform()}),
        FeatureConfig=(FC,
            {"name": "x", "table": "t", "pooling": "sum", "max_length": 3, "weighted": False, "hash": fr.modulo(),
                "column": "x"}),
        Hash=(fr.Hash, {"kind": "modulo", "seed": 0}), multiply_shift=(fr.multiply_shift, {"seed": 0}),
        top_k=(fr.top_k, {"queries": f32(3, 2), "items": f32(5, 2), "k": 2, "exclude": BAGS, "implementation": None}),
        build_index=(fr.build_index,
            {"items": f32(5, 2), "kind": "ivf", "links": 4, "build_effort": 9, "num_lists": 1}),
        search_index=(fr.search_index,
            {"index": fr.build_index(f32(5, 2)), "queries": f32(3, 2), "k": 2, "effort": 9}),
        Codec=(fr.Codec, {"forward": "int8", "backward": None}),
        hash_rows=(fr.hash_rows, {"ids": i64(1, 9), "hash": fr.modulo(), "num_embeddings": 5}),
        Initializer=(fr.Initializer, {"kind": "normal", "scale": 1.0}),
        initialize=(fr.normal(), {"key": KEY, "shape": (2, 3), "start": 0, "num_embeddings": 6}),
        constant=(fr.constant, {"value": 0.0}), normal=(fr.normal, {"std": 1.0}), uniform=(fr.uniform, {"bound": 1.0}),
        init=(fr.init, {"key": KEY, "tables": CONFIGS, "device": None}),
        lookup=(fr.lookup, {"tables": TABLES, "ids": IDS, "features": FEATURES, "implementation": None}),
        lookup_transpose=(fr.lookup_transpose, {"d_acts": ACTS, "ids": IDS, "features": FEATURES, "tables": CONFIGS}),
        lookup_sequence=(fr.lookup_sequence,
            {"tables": TABLES, "ids": IDS, "features": SEQUENCES, "implementation": None}),
        lookup_sequence_transpose=(fr.lookup_sequence_transpose,
            {"d_sequences": ROWS, "ids": IDS, "features": SEQUENCES, "tables": TABLES}),
        quantize=(fr.quantize, {"tables": TABLES, "dtype": {"t": "int4", "u": "float16"}, "key": KEY}),
        dequantize=(fr.dequantize, {"q": QUANTIZED}),
        fake_quantize=(fr.fake_quantize, {"tables": TABLES, "dtype": {"t": "int4", "u": "float16"}, "scales": "row",
            "key": KEY}),
        fake_getitem=(lambda part: FAKE[part], {"part": "t.scale"}),
        quantized_getitem=(lambda table: QUANTIZED[table], {"table": "t"}),
        value_and_grad=(fr.value_and_grad, {"loss_fn": loss_fn, "has_aux": False}),
        grad_fn=(fr.value_and_grad(loss_fn), {"params": PARAMS, "batch": BATCH}),
        train_step=(fr.train_step,
            {"loss_fn": loss_fn, "sparse": SPARSE, "dense": OPT, "has_aux": False, "merge": None, "mesh": MESH,
                "plan": PLAN, "batch_axes": ("a", "b"),
                                    "exact": False, "capacity": 8, "codec": fr.Codec("int8"), "dedup": False,
                                    "dense_axes": ("a",)}),
        step_init=(STEP.init, {"params": PARAMS, "key": KEY}), step=(STEP, {"state": STATE, "batch": BATCH}),
        step_on_mesh=(ON_MESH, {"state": HELD, "batch": BATCH}),
        TrainStep=(fr.TrainStep, {"init": STEP.init, "update": STEP.update}),
        jit=(fr.jit, {"fn": loss_fn, "donate": ("params",)}),
        scan=(fr.scan, {"step": lambda s, x: (s + x.sum(), {"m": s}), "state": f32(), "batches": f32(3, 2)}),
        stale_pipeline=(fr.stale_pipeline, {"step": STEP, "depth": 2, "mesh": MESH, "device": "cpu", "blank": len}),
        stale_run=(first(fr.stale_pipeline(STEP).run), {"state": STATE, "batches": [BATCH]}, ("batches[0]",)),
        retry_overflow=(fr.retry_overflow, {"make_step": lambda n: STEP, "capacity": "measure", "steps": 4}),
    )  # fmt: skip


def meshes() -> list[Call]:
    axes = lambda f: lambda a, b: f(a=a, b=b)
    return rows("", Mesh_emulated=(axes(fr.Mesh.emulated), {"a": 2, "b": 2}),
        P=(lambda a, b: P(a, b), {"a": "a", "b": None}),
        Placement=(fr.Placement, {"kind": "table_wise", "axes": ("a",), "ranks": (1,)}),
        table_wise=(fr.table_wise, {"axis": "a", "rank": 1}),
        row_wise=(fr.row_wise, {"axis": "a"}), column_wise=(fr.column_wise, {"axis": "a", "ranks": (1, 0)}),
        grid=(fr.grid, {"axes": ("a", "b"), "ranks": (1, 0)}),
        table_row_wise=(fr.table_row_wise, {"axes": ("a", "b"), "rank": 1}),
        table_column_wise=(fr.table_column_wise, {"axes": ("a", "b"), "rank": 1}),
        blocks=(fr.row_wise("a").blocks, {"sizes": {"a": 2}, "dim": 4}),
        Plan=(fr.Plan, {"placements": {"t": fr.row_wise("a")}, "replicas": ("b",)}),
        Plan_uniform=(fr.Plan.uniform, {"kind": "row_wise", "tables": CONFIGS, "mesh": MESH, "replicas": ("b",)}),
        Plan_getitem=(lambda table: PLAN[table], {"table": "t"}),
        Plan_from_json=(fr.Plan.from_json, {"text": PLAN.to_json()}),
        plan=(fr.plan, {"tables": CONFIGS, "features": FEATURES, "mesh": {"a": 2}, "batch_size": 8, "hardware": "cpu",
            "constraints": {"t": {"pooling_factor": 2.0}}, "optimizer": SPARSE, "exact": False, "dedup": True,
            "codec": fr.Codec("int8"), "capacity_factor": 2.0, "replicas": (), "memory_bytes": 10**9, "reserve": 0.1,
            "effort": 1}),
        Hardware=(fr.Hardware, {"name": "mine", "memory_bytes": 10**9, "memory_bytes_per_s": 1e9,
            "link_bytes_per_s": 1e9, "host_bytes_per_s": 1e8, "ranks_per_host": 2}),
        Hardware_named=(fr.Hardware.named, {"name": "h100"}),
        Hardware_measure=(fr.Hardware.measure, {"mesh": MESH, "memory_bytes": 10**9}),
        TableConstraint=(fr.TableConstraint, {"kinds": ("row_wise",), "min_partition": 1, "pooling_factor": 2.0,
            "zipf": 1.1, "row_counts": (3.0, 2.0), "ranks": (0,), "together": "x"}),
        shard=(fr.shard, {"tree": {"v": f32(4)}, "specs": P("a"), "mesh": MESH}),
        unshard=(fr.unshard, {"tree": {"v": f32(4)}, "specs": P("a"), "mesh": MESH}),
        shard_map=(lambda x, **k: fr.shard_map(**k)(x),
            {"f": lambda x: x * 2, "mesh": MESH, "in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"},
                "check": True, "x": f32(4)}),
        shard_tables=(fr.shard_tables,
            {"tables": TABLES, "plan": PLAN, "mesh": MESH, "exact": False, "capacity": 8, "codec": None, "dedup": False,
                "labels": {"t": 1, "u": 2}}),
        gather_tables=(fr.gather_tables, {"tables": SHARDED, "mesh": MESH}),
        gather_state=(fr.gather_state, {"state": HELD, "mesh": MESH}),
        reshard=(fr.reshard,
            {"state": STATE, "plan": PLAN, "mesh": MESH, "sparse": SPARSE, "from_mesh": MESH, "exact": False,
                "codec": None, "dedup": False, "dense_axes": ("a",)}),
        sync_replicas=(fr.sync_replicas, {"state": APART, "mesh": MESH, "slots": True, "greatest": ("last",)}),
        sharded_getitem=(lambda bank: SHARDED[bank], {"bank": next(iter(SHARDED.banks))}),
        psum=collective("psum"), psum_invariant=collective("psum_invariant"), pmean=collective("pmean"),
        pmax=collective("pmax"), pmin=collective("pmin"), pvary=collective("pvary"),
        all_gather=collective("all_gather", dim=0, tiled=True),
        all_to_all=collective("all_to_all", split_dim=0, concat_dim=0, tiled=True),
        psum_scatter=collective("psum_scatter", dim=0, tiled=True),
        ppermute=collective("ppermute", perm=[(0, 1), (1, 0)]),
        axis_index=(on_ranks(lambda x, axis_name: fr.axis_index(axis_name)), {"axis_name": "a"}),
        axis_size=(on_ranks(lambda x, axis_name: fr.axis_size(axis_name)), {"axis_name": "a"}),
        ragged_all_to_all=(on_ranks(lambda x, **k: fr.ragged_all_to_all(**k)),
            {"operand": f32(4, 2), "output": f32(4, 2), "input_offsets": i64(0, 2), "send_sizes": i64(2, 2),
                           "output_offsets": i64(0, 2), "recv_sizes": i64(2, 2), "axis_name": "a", "capacity": 2}),
    )  # fmt: skip


def optimizers() -> list[Call]:
    step = {"row_grads": GRADS, "slots": STATE.slots, "tables": TABLES, "step": 3}
    update = lambda opt: (opt.update, {**step, "slots": opt.init(TABLES)})
    own = optim.row_optimizer(init=lambda table: {}, rule=lambda row, grad, slots, hyper: (row - grad, {}))
    dense = {"grads": DENSE, "state": STATE.dense_opt, "params": DENSE, "step": 3}
    stage = {
        "policy": "interpolate",
        "max_iters": 9,
        "value": 1.0,
        "lr_scale": 1.0,
        "decay_iters": 1,
        "sgdr_period": 1,
        "start_interpolating_iters": 1,
        "end_value": 0.5,
    }
    return rows("optim", **{n: (getattr(optim, n), {"lr": 0.1, **examples(n)[0]}) for n in BUILTIN},
        row_optimizer=(optim.row_optimizer,
            {"init": lambda table: {}, "rule": lambda row, grad, slots, hyper: (row, {}), "lr": 0.1, "name": "mine"}),
        init=(SPARSE.init, {"tables": TABLES}), update=update(SPARSE),
        update_own=(lambda **k: own.update(**k, implementation="reference"), {**step, "slots": own.init(TABLES)}),
        by_table=(optim.by_table, {"optimizers": {"t": SPARSE}, "default": SPARSE}),
        update_by_table=update(optim.by_table({"t": SPARSE}, default=optim.sgd())),
        clip=(optim.clip, {"optimizer": SPARSE, "max_norm": 1.0, "max_value": 1.0}),
        update_clip=update(optim.clip(SPARSE, max_norm=1.0)),
        freeze=(optim.freeze, {"optimizer": SPARSE, "tables": ["t"]}),
        accumulate=(optim.accumulate, {"optimizer": SPARSE, "every": 2, "capacity": 8}),
        update_accumulate=update(optim.accumulate(SPARSE, every=2, capacity=16)),
        stochastic_rounding=(optim.stochastic_rounding, {"optimizer": SPARSE, "key": KEY}),
        RowOptimizer=(optim.RowOptimizer, SPARSE._asdict()), DenseOptimizer=(optim.DenseOptimizer, OPT._asdict()),
        dense=(optim.dense, {"cls": torch.optim.Adam, "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        dense_init=(OPT.init, {"params": DENSE}), dense_update=(OPT.update, dense),
        Stage=(optim.Stage, stage), schedule=(optim.schedule, {"stages": [optim.Stage(max_iters=3)], "lr": 0.1}),
        rate=(optim.schedule([optim.Stage()]), {"step": 3}),
    )  # fmt: skip


def layers() -> list[Call]:
    model = {"tables": (TC("t", 6, 1), TC("u", 5, 1)), "features": FEATURES}
    deep = {"tables": CONFIGS, "features": FEATURES, "num_dense": 0}
    sized = {"sizes": (8,), "dropout": 0.1, "batch_norm": True}
    at = {"params": MODEL_PARAMS, "batch": BATCH}
    return [*rows("nn", Layer=(nn.Layer, LINEAR._asdict()),
            linear=(nn.linear, {"num_in": 4, "num_out": 2, "weight": nn.xavier_normal, "bias": nn.zeros}),
            linear_apply=(LINEAR.apply, {"params": LINEAR.init(KEY), "x": f32(3, 4)}),
        linear_init=(LINEAR.init, {"key": KEY}), batch_norm=(nn.batch_norm, {"dim": 4, "momentum": 0.1, "eps": 1e-5}),
        norm_apply=(NORM.apply, {"params": NORM.init(KEY), "x": f32(3, 4), "stats": NORM.init_stats()}),
        cross=(nn.cross, {"dim": 4, "rank": 2, "weight": nn.xavier_normal}),
        cross_apply=(CROSS.apply, {"params": CROSS.init(KEY), "x0": f32(3, 4), "x": f32(3, 4)}),
        cross_network=(nn.cross_network, {"dim": 4, "num_layers": 2, "rank": 2, "weight": nn.xavier_normal}),
        dot_interaction=(nn.dot_interaction, {"x": f32(2, 3, 4)}),
        factorization_machine=(nn.factorization_machine, {"x": f32(2, 3, 4)}),
        dropout=(nn.dropout, {"x": f32(3), "key": KEY, "rate": 0.5}),
        fan_out_normal=(nn.fan_out_normal, {"key": KEY, "shape": (2, 3)}),
        xavier_normal=(nn.xavier_normal, {"key": KEY, "shape": (2, 3)}),
        zeros=(nn.zeros, {"key": KEY, "shape": (2, 3)}),
        normal=(nn.normal, {"std": 1.0}), position_weights=(nn.position_weights, {"max_length": 3}),
        position_apply=(POSITION.apply, {"params": POSITION.init(KEY), "bags": WEIGHTED["x"]}),
        mlp=(nn.mlp,
            {"sizes": (4, 3, 1), "activation": torch.relu, "final_activation": None, "dropout": 0.1,
                "batch_norm": False, "weight": nn.xavier_normal, "bias": nn.zeros}),
        mlp_apply=(MLP.apply, {"params": MLP_PARAMS, "x": f32(3, 4), "stats": MLP_STATS}),
        mlp_train=(MLP.train_apply, {"params": MLP_PARAMS, "x": f32(3, 4), "key": KEY, "stats": MLP_STATS})),
        *rows("models", Model=(models.Model, MODEL._asdict()), TwoTower=(models.TwoTower, TOWERS._asdict()),
            lr=(models.lr, {**model, "num_dense": 0}), fm=(models.fm, {**deep, "linear": ()}),
            wide_deep=(models.wide_deep, {**deep, **sized, "linear": ()}),
        deepfm=(models.deepfm, {**deep, **sized, "linear": ()}),
        simple_deepfm=(models.simple_deepfm, {**model, "num_dense": 3, "hidden_size": 6, "deep_size": 5}),
        dlrm=(models.dlrm, {**deep, **sized, "bottom": (), "keep": "all"}),
        dcnv2=(models.dcnv2, {**deep, "sizes": (8,), "dropout": 0.1}), linear_twins=(models.linear_twins, model),
        loss=(models.loss, {"model": MODEL}),
        loss_fn=(models.loss(MODEL), {**at, "key": KEY}), init=(MODEL.init, {"key": KEY}), apply=(MODEL.apply, at),
        train_apply=(MODEL.train_apply, {**at, "key": KEY}),
        merge_stats=(models.merge_stats, {"dense": DENSE, "aux": {"stats": {}}}),
        num_parameters=(models.num_parameters, {"params": PARAMS}), ml1m=(models.ml1m, {"name": "lr"}),
        mlperf_dlrm_dcnv2=(models.mlperf_dlrm_dcnv2, {"max_rows": 10, "embedding_dim": 8}),
        two_tower=(models.two_tower,
            {"tables": CONFIGS, "query": FEATURES[:1], "candidate": FEATURES[1:], "sizes": (8, 3), "dropout": 0.0,
                "temperature": 0.1}),
        query=(TOWERS.query, {"params": TOWER_PARAMS, "batch": fr.Batch(IDS, f32(4))}),
        towers=(TOWERS.towers, {"params": TOWER_PARAMS, "batch": BATCH, "key": KEY}),
        in_batch_softmax=(models.in_batch_softmax,
            {"query": f32(3, 2), "candidate": f32(3, 2), "temperature": 1.0, "log_q": -f32(3),
                "candidate_ids": i64(0, 1, 2)}),
        in_batch_softmax_loss=(models.in_batch_softmax_loss,
            {"model": TOWERS, "log_q": None, "candidate_ids": None}))]  # fmt: skip


def inputs(folder) -> list[Call]:
    """Data, metrics, checkpoints; the files lie in `folder`."""
    np.save(folder / "dense.npy", np.ones((4, 2), np.float32))
    np.save(folder / "sparse.npy", np.ones((4, 2), np.int64))
    np.save(folder / "label.npy", np.ones(4, np.float32))
    fr.save(folder / "tree.pt", {"w": f32(2)})
    fr.save(folder / "steps", HELD, keep=1)
    on_ranks = {"path": str(folder / "held"), "tree": HELD, "mesh": MESH, "keep": 2, "step": 1, "asynchronous": False}
    placed = {"plan": PLAN, "mesh": MESH, "sparse": SPARSE, "exact": False, "codec": None, "dedup": False}
    (folder / "day.tsv").write_text("\t".join(["1"] + ["3"] * 13 + ["0000000a"] * 26) + "\n")
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"label": [0.0, 1.0], "int_0": [1.0, 2.0], "cat_0": [1, 2]}), folder / "day.parquet")
    npy = {n: str(folder / f"{n}.npy") for n in ("dense", "sparse", "label")}
    examples = {"predictions": SCORES, "labels": LABELS, "weights": f32(3)}
    streamed = {"batch_size": 2, "format": "parquet", "key": KEY, "window": 4, "drop_last": False}
    criteo = {"batch_size": 1, "transform": "log1", "skip": 0, "drop_last": False}
    return [*rows("data",
            batches=(first(data.batches),
                {"data": RANDOM, "rows": i64(0, 1, 2), "batch_size": 2, "key": KEY, "position": data.Position(),
                    "drop_last": False, "pad_last": False, "bucket": False}),
        loader=(_like(data.loader, lambda **k: next(data.loader(**k)())),
            {"data": RANDOM, "rows": i64(0, 1, 2), "batch_size": 2, "key": KEY, "drop_last": False, "pad_last": True,
                "bucket": False, "workers": 1, "depth": 2, "device": None}),
        load=(data.loader(RANDOM, None, 2), {"position": data.Position()}),
        collate=(data.collate, {"source": RANDOM}), collated=(data.collate(RANDOM), {"items": [0, 1]}),
        num_batches=(data.num_batches, {"num_rows": 9, "batch_size": 2, "drop_last": False}),
        take=(data.take, {"data": RANDOM, "rows": i64(0, 1)}), RandomRows_take=(RANDOM.take, {"rows": i64(0, 1)}),
        RandomRows_logits=(RANDOM.logits, {"rows": i64(0, 1)}),
        ctr_dataset=(data.ctr_dataset,
            {"ratings": RATINGS, "seed": 1, "drop": (3.0,), "threshold": 4.0, "holdout": 0.2}),
        prefetch=(first(data.prefetch), {"items": [1, 2], "depth": 2, "pin_memory": False, "device": None}),
        transform_dense=(data.transform_dense, {"x": f32(2), "transform": "log1"}),
        random_rows=(data.random_rows,
            {"key": KEY, "vocabularies": {"x": 5}, "num_rows": 9, "ids_per_bag": (0, 2), "alpha": 1.0, "num_dense": 1,
                "scatter": True}),
        random_batches=(first(data.random_batches), {"key": KEY, "vocabularies": {"x": 5}, "batch_size": 2}),
        zipf=(data.zipf, {"key": KEY, "shape": (3,), "size": 9, "alpha": 1.0}),
        vocabularies_of=(data.vocabularies_of, {"tables": CONFIGS, "features": FEATURES}),
        criteo_npy=(data.criteo_npy, {**npy, "transform": None, "keys": ("p", "q")}),
        criteo_arrays_take=(data.criteo_npy(**npy).take, {"rows": i64(0, 1)}),
        criteo_tsv=(first(data.criteo_tsv),
            {"path": str(folder / "day.tsv"), "keys": [f"c{i}" for i in range(26)], **criteo}, ("keys[*]",)),
        criteo_parquet=(first(data.criteo_parquet),
            {"path": str(folder / "day.parquet"), "label": "label", "dense": ["int_0"], "sparse": ["cat_0"],
                "missing": 0, "bucket": False, **criteo}),
            Schema=(data.Schema, {"label": "y", "dense": ("x",), "categorical": ("a",), "multivalued": ("g",),
                "weights": {"g": "s"}, "weight": "w", "time": "t", "label_kind": "binary"}, ("weights['g']",)),
            examples=(data.examples, {"table": {"y": [1.0], "a": [3]}, "schema": data.Schema("y", categorical=("a",)),
                "vocabularies": {"a": 5}, "missing": 0}, ("vocabularies['a']",)),
            Text=(data.Text, {"delimiter": ",", "names": ("a", "b"), "types": {"a": "int64"}, "nulls": ("",),
                "quotes": True}, ("names[0]", "names[1]", "types", "types['a']")),  # looked at where they are used
            read=(data.read, {"source": str(folder / "day.parquet"), "columns": ("label",), "format": "parquet"}),
            stream=(first(data.stream), {"source": str(folder / "day.parquet"), **streamed, "columns": ("label",),
                "skip": 0}),
            stream_loader=(_like(data.stream_loader, lambda **given: next(data.stream_loader(**given)())),
                {"source": str(folder / "day.parquet"), **streamed, "bucket": False, "pad_last": False,
                    "workers": 0, "depth": 2, "device": None,
                    "encode": data.Schema("label", categorical=("cat_0",))})),
        *rows("metrics", Metric=(metrics.Metric, AUC._asdict()), collect=(metrics.collect, {"metrics": {"auc": AUC}}),
            merge=(metrics.merge, {"a": LOSS.init(), "b": LOSS.init()}),
            auc=(metrics.auc, {"num_bins": 16, "from_logits": False}),
        auc_update=(AUC.update, {"state": AUC.init(), **examples}), auc_compute=(AUC.compute, {"state": AUC.init()}),
        auc_error=(metrics.auc_error, {"state": AUC.init()}),
        exact_auc=(metrics.exact_auc, {"scores": SCORES, "labels": LABELS, "weights": f32(3)}),
        accuracy=(metrics.accuracy, {"threshold": 0.5, "from_logits": False}),
        log_loss=(metrics.log_loss, {"from_logits": False}), update=(LOSS.update, {"state": LOSS.init(), **examples}),
        compute=(lambda state: LOSS.compute(state), {"state": LOSS.init()}),
        init=(LOSS.init, {"device": None}), calibration=(metrics.calibration, {"from_logits": False}),
        normalized_entropy=(metrics.normalized_entropy, {"from_logits": False})),
        *rows("", save=(fr.save, {"path": str(folder / "new.pt"), "tree": {"w": f32(2)}}),
            load=(fr.load, {"path": str(folder / "tree.pt"), "like": {"w": f32(2)}, "device": None}),
            save_ranks=(fr.save, on_ranks), latest=(fr.latest, {"folder": str(folder / "steps")}),
            load_ranks=(fr.load, {"path": str(fr.save(folder / "a", HELD)), **placed, "dense_axes": ("a",)})),
        *rows("testing",
            assert_trees_close=(testing.assert_trees_close, {"a": f32(2), "b": f32(2), "rtol": 0.0, "atol": 0.0}),
            garbage_padding=(testing.garbage_padding, {"tree": BAGS, "key": KEY}),
        check_adjoint=(testing.check_adjoint,
            {"forward": lambda x: x * 2, "transpose": lambda x: x * 2, "x": f32(2), "y": f32(2), "key": KEY}),
        zero_padding=(testing.zero_padding, {"tree": BAGS}),
        check_grads=(testing.check_grads,
            {"f": lambda x: x * x, "args": (torch.ones(2, dtype=torch.float64),), "order": 1, "modes": ("fwd", "rev"),
                "key": KEY, "rtol": 1e-5, "atol": 1e-5},
            ("args[0]", "f", "order", "key", "rtol", "atol", "modes[0]", "modes[1]")))]  # fmt: skip


def parts() -> list[Call]:
    """What makes examples of columns."""
    import pyarrow as pa

    table, known = pa.table(TABLE), JT.from_lists([[1, 3], [2]])
    shares, users, items = {"fractions": (0.5, 0.5)}, i64(0, 1, 0, 1, 0, 1), i64(0, 1, 1, 2, 2, 2)
    return rows("data",
        random_split=(data.random_split, {"num_rows": 8, **shares, "key": KEY}),
        split_by_time=(data.split_by_time, {"time": i64(3, 1, 2), **shares}),
        split_by_group=(data.split_by_group, {"group": users, **shares, "key": KEY}),
        leave_one_out=(data.leave_one_out, {"group": users, "time": i64(*range(6)), "held_out": 2}),
        k_core=(data.k_core, {"user": users, "item": items, "k": (2, 1)}),
        vocabulary=(data.vocabulary, {"min_count": 2, "max_size": 9}),
        hashed=(data.hashed, {"num_embeddings": 9, "seed": 1}), identity=(data.identity, {"num_embeddings": 9}),
        bucketize_edges=(data.bucketize, {"edges": (1.0, 2.0), "num_quantiles": None}),
        bucketize=(data.bucketize, {"edges": None, "num_quantiles": 4}),
        chain=(lambda a, b: data.chain(a, b), {"a": data.log1p(), "b": data.normalize()}),
        fit=(data.vocabulary().fit, {"column": ["a", None]}),
        decode=(ENCODING.ids["item"].decode, {"ids": i64(0, 1)}),
        fit_encoding=(data.fit_encoding,
            {"source": table, "schema": SCHEMA, "encoders": {"item": data.vocabulary()}, "share": {"tags": "item"}}),
        encode=(data.encode, {"encoding": ENCODING, "table": table}),
        known_items=(data.known_items, {"user": users, "item": items, "num_users": 2}),
        uniform_negatives=(data.uniform_negatives, {"num_ids": 5, "first": 1, "known": known}),
        popularity_negatives=(data.popularity_negatives, {"counts": i64(1, 2, 3, 4), "exponent": 1.0, "known": known}),
        draw=(data.uniform_negatives(9, known=known), {"key": KEY, "shape": (2, 3), "user": i64(0, 1)}),
        log_q=(data.log_q, {"counts": i64(1, 2), "exponent": 1.0}),
        configs=(data.configs, {"encoding": ENCODING, "embedding_dim": {"item": 4}, "pooling": {"tags": "mean"}}),
    )  # fmt: skip


def others() -> list[Call]:
    """What other libraries have."""
    params, buffers, apply = interop.module(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))

    def module_apply(params, buffers, train: bool, key: torch.Tensor | None):
        return apply(params, buffers, f32(3, 4), train=train, key=key)

    held = {f"embedding_bags.{n}.weight": t for n, t in TABLES.items()} | DENSE
    sums = {"state": {f"{n}.weight": {"momentum1": own["sum"]} for n, own in STATE.slots.items()}}
    to_torchrec = rows("interop", to_torchrec=(interop.to_torchrec, {"x": IDS, "weighted": False}),
        configs_to_torchrec=(interop.to_torchrec, {"x": (CONFIGS, FEATURES)}))  # fmt: skip
    return (to_torchrec if find_spec("torchrec") else []) + rows("interop",
        from_nested=(interop.from_nested, {"x": interop.to_nested(BAGS)}), to_nested=(interop.to_nested, {"x": BAGS}),
        from_fbgemm=(interop.from_fbgemm, {"rows": interop.to_fbgemm(QUANTIZED), "forms": QUANTIZED.forms}),
        to_fbgemm=(interop.to_fbgemm, {"q": QUANTIZED, "layout": "tbe", "row_alignment": 16}),
        module=(interop.module, {"nn_module": torch.nn.Linear(2, 1)}),
        module_apply=(module_apply, {"params": params, "buffers": buffers, "train": True, "key": KEY}),
        load_torchrec_state_dict=(interop.load_torchrec_state_dict, {"state": PARAMS, "state_dict": held}),
        load_slots=(interop.load_torchrec_state_dict, {"state": STATE, "state_dict": sums, "step": 3, "group": None}),
        to_torchrec_state_dict=(interop.to_torchrec_state_dict, {"state": PARAMS, "like_dict": held}),
        slots_to_torchrec=(interop.to_torchrec_state_dict, {"state": STATE, "like_dict": sums}))  # fmt: skip


def loops() -> list[Call]:
    """What goes through batches, and what it ends in."""
    step = lambda state, batch: (state + 1, {"loss": 1.0})
    record = fr.loop.Record("epoch", 0, 2, {"epoch": 0, "loss": 0.5}, None)
    lossy = {"label": LABELS, "weight": f32(3), "reduction": "mean"}
    return rows("",
        fit=(fr.fit, {"step": step, "state": torch.zeros(()), "loader": [1, 2], "epochs": 1, "evaluate": lambda p: {},
            "monitor": "loss", "mode": "max", "patience": 1, "settings": {"a": 1}, "resume": False, "overwrite": False,
            "callbacks": [len], "validate": lambda b: b, "stop": lambda: 0, "progress": False},
            ("state", "loader[0]", "loader[1]", "settings['a']")),
        evaluate=(fr.evaluate, {"predict": MODEL.apply, "params": MODEL_PARAMS, "batches": [BATCH],
            "metrics": {"auc": metrics.auc(from_logits=True)}}),
    ) + rows("loop",
        best_epoch=(fr.loop.best_epoch, {"history": [{"a": 0.5}], "monitor": "a", "mode": "max"}),
        tensorboard=(fr.loop.tensorboard, {"writer": "runs", "every": 2}),
        print_epoch=(fr.loop.print_epoch, {"record": record}),
    ) + rows("losses",
        bce=(fr.losses.bce, {"logits": SCORES, **lossy}),
        mse=(fr.losses.mse, {"predictions": SCORES, **lossy}),
        huber=(fr.losses.huber, {"predictions": SCORES, **lossy, "delta": 0.5}),
        cross_entropy=(fr.losses.cross_entropy, {"logits": f32(3, 4), **lossy}),
        multi_task=(fr.losses.multi_task, {"losses": [fr.losses.bce, fr.losses.mse], "weights": (1.0, 0.5)}),
        loss_of_tasks=(fr.losses.multi_task([fr.losses.bce, fr.losses.mse]), {"predictions": f32(3, 2),
            "label": f32(3, 2), "weight": f32(3, 2), "reduction": "none"}),
        in_batch_softmax=(fr.losses.in_batch_softmax, {"query": f32(3, 2), "candidate": f32(3, 2), "weight": f32(3),
            "log_q": -f32(3), "temperature": 0.5, "candidate_ids": i64(1, 2, 3), "reduction": "mean"}),
        weighted_mean=(fr.losses.weighted_mean, {"values": SCORES, "weight": f32(3)}),
    )  # fmt: skip


def served(folder) -> list[Call]:
    """What is said to servers of a package; of the package there is what describes it."""
    from funcrec.serve import _manifest, _weights

    there, tensors = folder / "package", _weights.named(PARAMS)
    tables = [{"name": n, "param": f"tables[{n!r}]", "rows": len(x), "dim": 4, "bits": 32} for n, x in TABLES.items()]
    content = {"format": 1, "digest": _manifest.BLANK, "funcrec": "0", "torch": torch.__version__, "isa": "native",
        "needs": [], "inputs": [], "params": _weights.signature(tensors), "outputs": [], "max_batch": 1, "max_ids": 1,
        "features": [], "tables": tables, "files": {_manifest.MODEL: _manifest.BLANK}}  # fmt: skip
    content["digest"] = _manifest.digest_of(_manifest.text_of(content))
    there.mkdir()
    (there / _manifest.MANIFEST).write_text(_manifest.text_of(content))
    _weights.write_weights(there, tensors, "1")
    return rows("",
        save_weights=(fr.save_weights, {"path": str(folder / "weights"), "params": PARAMS, "version": "2",
            "overwrite": True}),
        publish=(fr.publish, {"folder": "published", "package": str(there), "every_steps": 2, "keep": 3,
            "servers": ["http://127.0.0.1:9"], "timeout_s": 1.0, "mesh": MESH}),
    )  # fmt: skip


def public_calls(folder) -> list[Call]:
    """All of them."""
    return [
        *values(),
        *trees(),
        *functions(),
        *meshes(),
        *optimizers(),
        *layers(),
        *others(),
        *inputs(folder),
        *parts(),
        *loops(),
        *served(folder),
    ]

"""One good call of every public function, constructor and method, from which a sweep makes wrong calls.

A row is a name, a function and the function's keyword arguments. Values that are trees (`Params`, `JaggedTensor`, ...)
have no row for their own constructor. Their fields may be anything that a tree may hold (a P, an axis for vmap).
Functions check the fields when they use them.
"""

from importlib.util import find_spec

import torch

import funcrec as fr
from funcrec import interop, metrics
from programs.public_calls_data import data_calls
from programs.public_calls_models import model_calls
from programs.public_calls_served import served_calls
from programs.public_values import (
    ACTS,
    APART,
    BAGS,
    BATCH,
    CONFIGS,
    DENSE,
    FAKE,
    FC,
    FEATURES,
    GRADS,
    HELD,
    IDS,
    JT,
    KEY,
    KJT,
    KT,
    LABELS,
    LOGGED,
    MESH,
    MODEL,
    MODEL_PARAMS,
    ON_MESH,
    OPT,
    PARAMS,
    PLAN,
    QUANTIZED,
    RG,
    ROWS,
    SCORES,
    SEQUENCES,
    SHARDED,
    SPARSE,
    STATE,
    STEP,
    TABLES,
    TC,
    WEIGHTED,
    Call,
    P,
    collective,
    entered,
    f32,
    first,
    i64,
    loss_fn,
    on_ranks,
    rows,
)


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
            concat=(KT.concat, {"parts": [ACTS], "along": "keys"}), select=(ACTS.select, {"bags": i64(0, 1)}),
              bags=(lambda which: take(ACTS, which), {"which": [0, 1]}),
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
        *rows("", bag_reduce=(fr.bag_reduce, {"bags": JT(f32(5, 2), i64(0, 2, 2, 5)), "reduce": "max"}),
            bag_softmax=(fr.bag_softmax, {"bags": JT(f32(5, 2), i64(0, 2, 2, 5))}),
            bag_filter=(fr.bag_filter, {"bags": BAGS, "mask": BAGS.values > 0}),
            drop_ids=(fr.drop_ids, {"ids": IDS, "padding": {"x": 0}}),
            jagged_attention=(fr.jagged_attention,
                {"queries": JT(f32(6, 2, 3), i64(0, 2, 4)), "keys": JT(f32(6, 2, 3), i64(0, 2, 6)),
                    "values": f32(6, 2, 5), "causal": True, "activation": "silu", "scale": 0.5, "normalizer": 4.0,
                    "position_bias": f32(1, 7), "time_bias": f32(2, 9), "query_times": f32(6), "key_times": f32(6),
                    "num_targets": i64(1, 0)})),
        *rows("", regroup=(fr.regroup, {"parts": [ACTS], "groups": [["x"], ["y", "x"]]}),
            regroup_named=(fr.regroup, {"parts": [ACTS], "groups": {"g": ["x"]}}),
            sequence_ids=(fr.sequence_ids, {"ids": IDS, "features": SEQUENCES, "expand": True}),
            pad_to_bucket=(fr.pad_to_bucket, {"ids": IDS, "minimum": 16}),
            dedup_bags=(fr.dedup_bags, {"ids": IDS, "keys": ("x",), "num_parts": 2}),
              global_norm=(lambda grads, more: fr.global_norm(grads, more), {"grads": GRADS, "more": f32(2)}),
              clip_by_global_norm=(fr.clip_by_global_norm, {"grads": GRADS, "max_norm": 1.0}),
              validate=(fr.validate, {"ids": IDS, "features": FEATURES, "tables": CONFIGS, "labels": (0.0, 1.0)}),
              pytree=(fr.pytree, {"cls": type("V", (), {"__annotations__": {"a": int}}), "static": (), "optional": ()}),
              checked=(fr.checked, {"fn": loss_fn})),
    ]  # fmt: skip


def trees() -> list[Call]:
    """Return the calls of functions on trees. A tree may be anything. Only the operations on a tree can be wrong."""
    tree, form = {"w": f32(2), "n": 3}, fr.tree.structure([0, 0])
    add = lambda fn, tree: fr.tree.map(fn, tree, tree)
    own = lambda name: (name, f"{name}['w']", f"{name}['n']")
    read = ("copy", "flatten", "leaves", "nbytes", "num_parameters", "paths", "structure")
    return rows("tree", **{n: (getattr(fr.tree, n), {"tree": tree}) for n in read},
        map=(add, {"fn": lambda x, y: x, "tree": tree}, own("tree")),
        to=(fr.tree.to, {"tree": tree, "device": "cpu", "dtype": torch.float64}, own("tree")),
        unflatten=(fr.tree.unflatten, {"structure": form, "leaves": [1, 2]}, ("leaves[0]", "leaves[1]")),
        allclose=(fr.tree.allclose, {"a": tree, "b": tree, "rtol": 0.0, "atol": 0.0}, (*own("a"), *own("b"))),
        equal=(fr.tree.equal, {"a": tree, "b": tree}, (*own("a"), *own("b"))),
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
        lookup_each=(fr.lookup_each, {"tables": TABLES, "ids": IDS, "features": FEATURES, "implementation": None}),
        lookup_transpose=(fr.lookup_transpose, {"d_acts": ACTS, "ids": IDS, "features": FEATURES, "tables": CONFIGS}),
        lookup_sequence=(fr.lookup_sequence,
            {"tables": TABLES, "ids": IDS, "features": SEQUENCES, "expand": True, "implementation": None}),
        lookup_sequence_transpose=(fr.lookup_sequence_transpose,
            {"d_sequences": ROWS, "ids": IDS, "features": SEQUENCES, "tables": TABLES, "expand": True}),
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
        accumulate_grads=(fr.accumulate_grads, {"loss_fn": loss_fn, "num_micro_batches": 2, "has_aux": False}),
        logged=(fr.logged, {"step": STEP, "steps": 2, "rows": {"t": 4, "u": 4}}),
        rewind=(fr.rewind, {"logged": LOGGED, "k": 0, "mesh": None, "donate": False}),
        delta=(fr.delta, {"logged": LOGGED, "since": 0, "mesh": None}),
        apply_delta=(fr.apply_delta, {"tables": TABLES, "delta": fr.delta(LOGGED)}),
        pipeline=(fr.pipeline, {"step": STEP, "depth": 2, "mesh": MESH, "device": "cpu", "blank": len}),
        pipeline_run=(first(fr.pipeline(STEP).run), {"state": STATE, "batches": [BATCH]}, ("batches[0]",)),
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


def others() -> list[Call]:
    """Return the calls of functions that convert from and to other libraries."""
    params, buffers, apply = interop.module(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))

    def module_apply(params, buffers, train: bool, key: torch.Tensor | None):
        return apply(params, buffers, f32(3, 4), train=train, key=key)

    held = {f"embedding_bags.{n}.weight": t for n, t in TABLES.items()} | DENSE
    sums = {"state": {f"{n}.weight": {"momentum1": own["sum"]} for n, own in STATE.slots.items()}}
    to_torchrec = lambda: rows("interop", to_torchrec=(interop.to_torchrec, {"x": IDS, "weighted": False}),
        configs_to_torchrec=(interop.to_torchrec, {"x": (CONFIGS, FEATURES)}),
        from_torchrec=(interop.from_torchrec, {"x": interop.to_torchrec(IDS), "weighted": False}))  # fmt: skip
    return (to_torchrec() if find_spec("torchrec") else []) + rows("interop",
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
    """Return the calls of loops over batches, and of losses and metrics."""
    step = lambda state, batch: (state + 1, {"loss": 1.0})
    record = fr.loop.Record("epoch", 0, 2, {"epoch": 0, "loss": 0.5}, None)
    encoding = fr.data.fit_encoding({"item": ["tea", "jam"]}, fr.data.Schema(categorical=("item",)))
    seller = fr.models.lr(*fr.data.configs(encoding, 1))
    lossy = {"label": LABELS, "weight": f32(3), "reduction": "mean"}
    return rows("",
        fit=(fr.fit, {"step": step, "state": torch.zeros(()), "loader": [1, 2], "epochs": 1, "evaluate": lambda p: {},
            "monitor": "loss", "mode": "max", "patience": 1, "settings": {"a": 1}, "resume": False, "overwrite": False,
            "callbacks": [len], "validate": lambda b: b, "stop": lambda: 0, "progress": False},
            ("state", "loader[0]", "loader[1]", "settings['a']")),
        evaluate=(fr.evaluate, {"predict": MODEL.apply, "params": MODEL_PARAMS, "batches": [BATCH],
            "metrics": {"auc": metrics.auc(from_logits=True)}}),
        evaluate_retrieval=(fr.evaluate_retrieval, {"query": lambda p, b: p[: b.ids.num_bags], "params": torch.eye(6),
            "batches": [BATCH], "items": torch.eye(6), "relevant": "x", "seen": lambda b: b.ids["y"], "k": 2,
            "metrics": {"recall": metrics.recall(2)}, "counts": torch.ones(6), "num_users": 2,
            "groups": {"new": lambda b: b.label > 0}, "item_groups": {"rare": torch.ones(6) > 0},
            "weight": lambda b: None, "effort": 1, "mesh": None}),
        predict=(fr.predict, {"model": seller, "params": seller.init(KEY), "encoding": encoding,
            "rows": {"item": ["jam", "tea", "jam"]}, "batch_size": 2}),
    ) + rows("loop",
        best_epoch=(fr.loop.best_epoch, {"history": [{"a": 0.5}], "monitor": "a", "mode": "max"}),
        tensorboard=(fr.loop.tensorboard, {"writer": "runs", "every": 2}),
        print_epoch=(fr.loop.print_epoch, {"record": record}),
        json_lines=(fr.loop.json_lines, {"path": "lines.json"}), csv_lines=(fr.loop.csv_lines, {"path": "lines.csv"}),
        is_chief=(fr.loop.is_chief, {"mesh": MESH}), num_processes=(fr.loop.num_processes, {"mesh": MESH}),
        own_part=(fr.loop.own_part, {"x": f32(4), "mesh": MESH}),
        all_parts=(fr.loop.all_parts, {"x": f32(4), "mesh": MESH}),
        agreed=(fr.loop.agreed, {"stop": lambda: 0, "mesh": MESH, "device": "cpu"}),
        watch=(entered(fr.loop.watch), {"mesh": MESH}),
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
        contrastive=(fr.losses.contrastive, {"one": f32(3, 2), "other": f32(3, 2), "weight": f32(3),
            "temperature": 0.5, "reduction": "mean"}),
        full_softmax=(fr.losses.full_softmax, {"hidden": f32(3, 2), "items": f32(5, 2), "target": i64(0, 4, 2),
            "weight": f32(3), "temperature": 0.5, "chunk": 2, "reduction": "mean"}),
        sampled_softmax=(fr.losses.sampled_softmax, {"query": f32(3, 2), "candidate": f32(3, 2),
            "negatives": f32(4, 2), "weight": f32(3), "log_q": -f32(3), "negative_log_q": -f32(4),
            "candidate_ids": i64(1, 2, 3), "negative_ids": i64(1, 2, 3, 4), "temperature": 0.5, "reduction": "mean"}),
        gbce=(fr.losses.gbce, {"query": f32(3, 2), "candidate": f32(3, 2), "negatives": f32(4, 2), "weight": f32(3),
            "num_items": 9, "calibration": 0.5, "candidate_ids": i64(1, 2, 3), "negative_ids": i64(1, 2, 3, 4),
            "reduction": "mean"}),
        weighted_mean=(fr.losses.weighted_mean, {"values": SCORES, "weight": f32(3)}),
    )  # fmt: skip


def public_calls(folder) -> list[Call]:
    """Return the calls of all public functions."""
    return [
        *values(),
        *trees(),
        *functions(),
        *meshes(),
        *model_calls(),
        *others(),
        *data_calls(folder),
        *loops(),
        *served_calls(folder),
    ]

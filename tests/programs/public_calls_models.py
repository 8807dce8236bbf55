"""Good calls of training, optimizers, layers and models: a part of `public_calls`."""

import torch

import funcrec as fr
from funcrec import models, nn, optim
from funcrec.optim._builtin import BUILTIN
from funcrec.optim.write import examples
from programs.public_values import (
    BATCH,
    CONFIGS,
    DENSE,
    FEATURES,
    GRADS,
    IDS,
    KEY,
    MODEL,
    MODEL_PARAMS,
    OPT,
    PARAMS,
    SPARSE,
    STATE,
    TABLES,
    TC,
    TOWER_PARAMS,
    TOWERS,
    WEIGHTED,
    Call,
    f32,
    i64,
    rows,
)

MLP = nn.mlp((4, 3, 1), dropout=0.1, batch_norm=True)
MLP_PARAMS, MLP_STATS = MLP.init(KEY), MLP.init_stats()
MMOE, VECTOR = nn.mmoe(4, 2, num_experts=2, sizes=(3,)), nn.vector_cross_network(4, 2)
PLE = nn.ple(4, 2, shared_experts=1, task_experts=1, sizes=((3,), (2,)))
MIXTURE = nn.mixture_cross_network(4, 2, 2, 2)
TARGET, VECTORS = nn.target_attention(4, sizes=(3,)), fr.JaggedTensor(f32(3, 4), i64(0, 2, 2, 3))
HISTORY = (fr.FeatureConfig("seen", table="t", pooling="none"),)
HSTU = nn.hstu_layer(4, normalizer=8.0, num_positions=3, num_times=2)
SEQUENCE = lambda name: fr.FeatureConfig(name, table="t", pooling="none", max_length=3)
RANKER_SETTINGS = {"tables": (TC("t", 6, 4),), "history": (SEQUENCE("seen"),), "candidates": (SEQUENCE("next"),),
    "context": (fr.FeatureConfig("x", table="t"),), "action": "did", "time": "then", "query_time": "now",
    "action_weights": (1, 2), "num_tasks": 1, "dim": 4, "num_layers": 1, "num_heads": 1, "qk_dim": 2, "linear_dim": 3,
    "normalizer": 8.0, "num_positions": 3, "num_times": 2, "hidden": 3, "head": 5, "action_dim": 2, "action_std": 0.1,
    "input_dropout": 0.1, "dropout": 0.1, "concatenate": True}  # fmt: skip
RANKER = models.hstu_ranker(**RANKER_SETTINGS)
RANKED = {"x": [[1]], "seen": [[1, 2]], "did": [[1, 2]], "then": [[0, 3]], "next": [[3, 4]], "now": [[9]]}
RANK_BATCH = fr.Batch(fr.KeyedJaggedTensor.from_lists(RANKED), f32(1, 2))
RANK_AT = {"params": RANKER.init(KEY), "batch": RANK_BATCH}
RANKED_KEPT = RANKER.encode_history(**RANK_AT)
LAYER_NORM, SWISH = nn.layer_norm(4), nn.swish_layer_norm(4)
LISTED = fr.FeatureConfig("x", table="t", pooling="none")
SASREC = models.sasrec((TC("t", 6, 4),), LISTED, blocks=1, max_length=3)
LINEAR, CROSS, NORM, POSITION = nn.linear(4, 2), nn.cross(4), nn.batch_norm(4), nn.position_weights(3)


def optimizers() -> list[Call]:
    step = {"row_grads": GRADS, "slots": STATE.slots, "tables": TABLES, "step": 3}
    update = lambda opt: (opt.update, {**step, "slots": opt.init(TABLES)})
    own = optim.row_optimizer(init=lambda table: {}, rule=lambda row, grad, slots, hyper: (row - grad, {}))
    dense = {"grads": DENSE, "state": STATE.dense_opt, "params": DENSE, "step": 3}
    frozen = optim.freeze(OPT, paths=["w"])
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
        clip_dense=(optim.clip, {"optimizer": OPT, "max_norm": 1.0, "max_value": 1.0}),
        update_clip_dense=(optim.clip(OPT, max_norm=1.0).update, dense),
        freeze_dense=(optim.freeze, {"optimizer": OPT, "paths": ["w"]}),
        update_freeze_dense=(frozen.update, {**dense, "state": frozen.init(DENSE)}),
        by_path=(optim.by_path, {"optimizers": {"w": OPT}, "default": OPT}),
        update_by_path=(optim.by_path({"w": OPT}, default=OPT).update, dense),
        ema=(optim.ema, {"optimizer": OPT, "decay": 0.9}),
        update_ema=(optim.ema(OPT).update, {**dense, "state": optim.ema(OPT).init(DENSE)}),
        averaged=(optim.averaged, {"params": DENSE, "state": optim.ema(OPT).init(DENSE)}),
        accumulate=(optim.accumulate, {"optimizer": SPARSE, "every": 2, "capacity": 8}),
        update_accumulate=update(optim.accumulate(SPARSE, every=2, capacity=16)),
        stochastic_rounding=(optim.stochastic_rounding, {"optimizer": SPARSE, "key": KEY}),
        RowOptimizer=(optim.RowOptimizer, SPARSE._asdict()), DenseOptimizer=(optim.DenseOptimizer, OPT._asdict()),
        dense=(optim.dense, {"cls": torch.optim.Adam, "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        dense_init=(OPT.init, {"params": DENSE}), dense_update=(OPT.update, dense),
        Stage=(optim.Stage, stage), schedule=(optim.schedule, {"stages": [optim.Stage(max_iters=3)], "lr": 0.1}),
        schedule_f=(optim.schedule, {"stages": [], "lr": f32()}),
        Stage_f=(optim.Stage, {"value": f32(), "lr_scale": f32(), "end_value": f32()}),
        rate=(optim.schedule([optim.Stage()]), {"step": 3}),
    )  # fmt: skip


def layers() -> list[Call]:
    model = {"tables": (TC("t", 6, 1), TC("u", 5, 1)), "features": FEATURES}
    listed = {"tables": (TC("t", 6, 4),), "history": LISTED}
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
        vector_cross_network=(nn.vector_cross_network, {"dim": 4, "num_layers": 2, "weight": nn.xavier_normal}),
        mixture_cross_network=(nn.mixture_cross_network, {"dim": 4, "num_layers": 2, "num_experts": 2, "rank": 2,
            "activation": torch.relu, "weight": nn.xavier_normal}),
        layer_norm=(nn.layer_norm, {"dim": 4, "eps": 1e-5}),
        swish_layer_norm=(nn.swish_layer_norm, {"dim": 4, "eps": 1e-5}),
        layer_norm_apply=(LAYER_NORM.apply, {"params": LAYER_NORM.init(KEY), "x": f32(3, 4)}),
        swish_apply=(SWISH.apply, {"params": SWISH.init(KEY), "x": f32(3, 4)}),
        mmoe=(nn.mmoe, {"num_in": 4, "num_tasks": 2, "num_experts": 2, "sizes": (3,), "activation": torch.relu,
            "weight": nn.xavier_normal}),
        mmoe_apply=(MMOE.apply, {"params": MMOE.init(KEY), "x": f32(3, 4)}),
        ple=(nn.ple, {"num_in": 4, "num_tasks": 2, "shared_experts": 1, "task_experts": 1, "sizes": ((3,), (2,)),
            "activation": torch.relu, "weight": nn.xavier_normal}),
        ple_apply=(PLE.apply, {"params": PLE.init(KEY), "x": f32(3, 4)}),
        mixture_apply=(MIXTURE.apply, {"params": MIXTURE.init(KEY), "x0": f32(3, 4)}),
        vector_apply=(VECTOR.apply, {"params": VECTOR.init(KEY), "x0": f32(3, 4)}),
        dot_interaction=(nn.dot_interaction, {"x": f32(2, 3, 4)}),
        factorization_machine=(nn.factorization_machine, {"x": f32(2, 3, 4)}),
        dropout=(nn.dropout, {"x": f32(3), "key": KEY, "rate": 0.5}),
        fan_out_normal=(nn.fan_out_normal, {"key": KEY, "shape": (2, 3)}),
        xavier_normal=(nn.xavier_normal, {"key": KEY, "shape": (2, 3)}),
        zeros=(nn.zeros, {"key": KEY, "shape": (2, 3)}),
        normal=(nn.normal, {"std": 1.0}), position_weights=(nn.position_weights, {"max_length": 3}),
        hstu_layer=(nn.hstu_layer, {"dim": 4, "normalizer": 8.0, "num_heads": 1, "qk_dim": 2, "linear_dim": 2,
            "num_positions": 3, "num_times": 2, "concatenate": False, "dropout": 0.1}),
        HstuLayer=(nn.HstuLayer, HSTU._asdict()),
        hstu_apply=(HSTU.apply, {"params": HSTU.init(KEY), "x": VECTORS, "times": i64(0, 1, 2),
            "num_targets": i64(1, 0, 0), "kept": None}),
        hstu_keep=(HSTU.keep, {"params": HSTU.init(KEY), "x": VECTORS, "times": i64(0, 1, 2)}),
        target_attention=(nn.target_attention, {"dim": 4, "sizes": (3,), "activation": torch.sigmoid,
            "normalize": False}),
        target_apply=(TARGET.apply, {"params": TARGET.init(KEY), "history": VECTORS, "target": f32(3, 4)}),
        position_weights_of_keys=(nn.position_weights, {"max_length": {"x": 3}}),
        position_apply_of_keys=(nn.position_weights({"x": 3}).apply, {"params": {"x": f32(3)}, "ids": WEIGHTED}),
        position_apply=(POSITION.apply, {"params": POSITION.init(KEY), "bags": WEIGHTED["x"]}),
        mlp=(nn.mlp,
            {"sizes": (4, 3, 1), "activation": torch.relu, "final_activation": None, "dropout": 0.1,
                "batch_norm": False, "weight": nn.xavier_normal, "bias": nn.zeros}),
        mlp_apply=(MLP.apply, {"params": MLP_PARAMS, "x": f32(3, 4), "stats": MLP_STATS}),
        mlp_train=(MLP.train_apply, {"params": MLP_PARAMS, "x": f32(3, 4), "key": KEY, "stats": MLP_STATS})),
        *rows("nn", gru=(nn.gru, {"num_in": 4, "num_hidden": 3}),
            sasrec_block=(nn.sasrec_block, {"dim": 4, "heads": 2, "dropout": 0.1}),
            position_embedding=(nn.position_embedding, {"max_length": 3, "dim": 4, "std": 0.1})),
        *rows("models", SequenceModel=(models.SequenceModel, SASREC._asdict()),
            sasrec=(models.sasrec, {**listed, "blocks": 1, "heads": 2, "max_length": 3, "dropout": 0.1}),
            gru4rec=(models.gru4rec, {**listed, "num_hidden": 3, "layers": 1, "max_length": 3, "dropout": 0.1}),
            hstu=(models.hstu, {**listed, "layers": 1, "heads": 2, "qk_dim": 2, "linear_dim": 2, "max_length": 3,
                "dropout": 0.1}),
            next_item_loss=(models.next_item_loss, {"model": SASREC, "loss": "full_softmax", "temperature": 0.5,
                "chunk": 4}),
            next_item_loss_drawn=(models.next_item_loss, {"model": SASREC, "loss": "gbce", "num_negatives": 3,
                "calibration": 0.5})),
        *rows("models", Model=(models.Model, MODEL._asdict()), TwoTower=(models.TwoTower, TOWERS._asdict()),
            lr=(models.lr, {**model, "num_dense": 0}), fm=(models.fm, {**deep, "linear": ()}),
            wide_deep=(models.wide_deep, {**deep, **sized, "linear": ()}),
        deepfm=(models.deepfm, {**deep, **sized, "linear": ()}),
        simple_deepfm=(models.simple_deepfm, {**model, "num_dense": 3, "hidden_size": 6, "deep_size": 5}),
        dlrm=(models.dlrm, {**deep, **sized, "bottom": (), "keep": "all"}),
        dcnv2=(models.dcnv2, {**deep, "sizes": (8,), "dropout": 0.1}),
        din=(models.din, {**deep, "history": HISTORY, "target": ("x",), **sized, "linear": (),
            "attention": (3,), "normalize": False}),
        hstu_ranker=(models.hstu_ranker, RANKER_SETTINGS), HstuRanker=(models.HstuRanker, RANKER._asdict()),
        ranker_apply=(RANKER.apply, RANK_AT), ranker_train=(RANKER.train_apply, {**RANK_AT, "key": KEY}),
        ranker_encode=(RANKER.encode_history, RANK_AT), ranker_query=(RANKER.query, RANK_AT),
        ranker_score=(RANKER.score, {"params": RANK_AT["params"], "history": RANKED_KEPT,
            "batch": RANK_BATCH}),
        history_to_padded=(RANKED_KEPT.to_padded, {"length": 5}),
        history_from_padded=(models.History.from_padded, {"keys": f32(2, 1, 3, 1, 2), "values": f32(2, 1, 3, 1, 4),
            "lengths": i64(3, 0), "time": i64(0, 1, 2, 3, 4, 5).view(2, 3)}),
        ranker_loss=(models.ranker_loss, {"model": RANKER, "losses": (fr.losses.bce,), "weights": None}),
        ranker_loss_fn=(models.ranker_loss(RANKER), {**RANK_AT, "key": KEY}),
        mlperf_dlrmv3=(models.mlperf_dlrmv3, {"max_rows": 10, "embedding_dim": 8, "max_history": 4,
            "num_candidates": 2}),
        dlrm_dcnv2=(models.dlrm_dcnv2,
            {**deep, "num_dense": 2, "bottom": (8,), "num_cross": 1, "rank": 2, "sizes": (8,)}),
        linear_twins=(models.linear_twins, model),
        loss=(models.loss, {"model": MODEL}),
        loss_fn=(models.loss(MODEL), {**at, "key": KEY}), init=(MODEL.init, {"key": KEY}), apply=(MODEL.apply, at),
        train_apply=(MODEL.train_apply, {**at, "key": KEY}),
        merge_stats=(models.merge_stats, {"dense": DENSE, "aux": {"stats": {}}}),
        num_parameters=(models.num_parameters, {"params": PARAMS}),
        summary=(models.summary, {"model": MODEL, "params": MODEL_PARAMS}), ml1m=(models.ml1m, {"name": "lr"}),
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


def model_calls() -> list[Call]:
    """Return the calls of all functions of this file."""
    return [*optimizers(), *layers()]

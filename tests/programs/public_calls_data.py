"""Good calls of functions that load, encode, measure, save and check: a part of `public_calls`."""

from functools import partial

import numpy as np
import torch
from hypothesis.strategies import just

import funcrec as fr
from funcrec import data, metrics, testing
from programs import small_movielens
from programs.public_values import (
    AUC,
    BAGS,
    CONFIGS,
    ENCODING,
    FEATURES,
    HELD,
    JT,
    KEY,
    LABELS,
    LOSS,
    MESH,
    PLAN,
    RANDOM,
    RATINGS,
    SCHEMA,
    SCORES,
    SPARSE,
    TABLE,
    Call,
    f32,
    first,
    i64,
    rows,
    with_signature,
)

HISTORIES = {"num_users": 4, "num_items": 40, "num_categories": 4, "categories_per_user": 2, "num_timestamps": 2,
    "length": 3, "num_candidates": 2, "max_history": 5, "activity": 0.5}  # fmt: skip
MADE = data.generated_histories(KEY, **HISTORIES)


def loaded(folder) -> list[Call]:
    """Return the calls of data sets and loaders, with files in `folder`."""
    np.save(folder / "dense.npy", np.ones((4, 2), np.float32))
    np.save(folder / "sparse.npy", np.ones((4, 2), np.int64))
    np.save(folder / "label.npy", np.ones(4, np.float32))
    (folder / "day.tsv").write_text("\t".join(["1"] + ["3"] * 13 + ["0000000a"] * 26) + "\n")
    (folder / "ml-1m").mkdir()
    small_movielens.write(folder / "ml-1m")
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"label": [0.0, 1.0], "int_0": [1.0, 2.0], "cat_0": [1, 2]}), folder / "day.parquet")
    npy = {n: str(folder / f"{n}.npy") for n in ("dense", "sparse", "label")}
    streamed = {"batch_size": 2, "format": "parquet", "key": KEY, "window": 4, "drop_last": False}
    criteo = {"batch_size": 1, "transform": "log1", "skip": 0, "drop_last": False}
    return rows("data",
            batches=(first(data.batches),
                {"data": RANDOM, "rows": i64(0, 1, 2), "batch_size": 2, "key": KEY, "position": data.Position(),
                    "drop_last": False, "pad_last": False, "bucket": False}),
        loader=(with_signature(data.loader, lambda **k: next(data.loader(**k)())),
            {"data": RANDOM, "rows": i64(0, 1, 2), "batch_size": 2, "key": KEY, "drop_last": False, "pad_last": True,
                "bucket": False, "workers": 1, "depth": 2, "device": None}),
        load=(data.loader(RANDOM, None, 2), {"position": data.Position()}),
        collate=(data.collate, {"source": RANDOM}), collated=(data.collate(RANDOM), {"items": [0, 1]}),
        ctr_take=(data.ctr_dataset(RATINGS).data.take, {"rows": i64(0, 1)}),
        examples_take=(data.encode(ENCODING, TABLE).take, {"rows": i64(0, 1)}),
        movielens_1m=(with_signature(data.movielens_1m, lambda data_dir, cache: data_dir is None  # None would download
                or data.movielens_1m(data_dir, cache=cache)),
            {"data_dir": str(folder / "ml-1m"), "cache": str(folder / "cache")}),
        num_batches=(data.num_batches, {"num_rows": 9, "batch_size": 2, "drop_last": False}),
        take=(data.take, {"data": RANDOM, "rows": i64(0, 1)}), RandomRows_take=(RANDOM.take, {"rows": i64(0, 1)}),
        RandomRows_logits=(RANDOM.logits, {"rows": i64(0, 1)}),
        ctr_dataset=(data.ctr_dataset,
            {"ratings": RATINGS, "seed": 1, "drop": (3.0,), "threshold": 4.0, "holdout": 0.2,
                "history": 2}),
        generated_histories=(data.generated_histories, {"key": KEY, **HISTORIES}),
        histories_take=(MADE.take, {"rows": i64(0, 1)}), histories_chances=(MADE.chances, {"rows": i64(0, 1)}),
        histories_requests=(MADE.requests, {"timestamp": 1}),
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
                "quotes": True}, ("names[0]", "names[1]", "types", "types['a']")),  # `read` and `stream` check these
            read=(data.read, {"source": str(folder / "day.parquet"), "columns": ("label",), "format": "parquet"}),
            stream=(first(data.stream), {"source": str(folder / "day.parquet"), **streamed, "columns": ("label",),
                "skip": 0}),
            stream_loader=(with_signature(data.stream_loader, lambda **given: next(data.stream_loader(**given)())),
                {"source": str(folder / "day.parquet"), **streamed, "bucket": False, "pad_last": False,
                    "workers": 0, "depth": 2, "device": None,
                    "encode": data.Schema("label", categorical=("cat_0",))}))  # fmt: skip


PAIRS = (LABELS, i64(0, 0, 1))


def measured() -> list[Call]:
    examples = {"predictions": SCORES, "labels": LABELS, "weights": f32(3)}
    return rows("metrics", Metric=(metrics.Metric, AUC._asdict()), collect=(metrics.collect, {"metrics": {"auc": AUC}}),
            merge=(metrics.merge, {"a": LOSS.init(), "b": LOSS.init()}),
            auc=(metrics.auc, {"num_bins": 16, "from_logits": False}),
        auc_update=(AUC.update, {"state": AUC.init(), **examples}), auc_compute=(AUC.compute, {"state": AUC.init()}),
        auc_error=(metrics.auc_error, {"state": AUC.init()}),
        exact_auc=(metrics.exact_auc, {"scores": SCORES, "labels": LABELS, "weights": f32(3)}),
        accuracy=(metrics.accuracy, {"threshold": 0.5, "from_logits": False}),
        log_loss=(metrics.log_loss, {"from_logits": False, "unit": "bits"}),
        update=(LOSS.update, {"state": LOSS.init(), **examples}),
        compute=(lambda state: LOSS.compute(state), {"state": LOSS.init()}),
        init=(LOSS.init, {"device": None}), calibration=(metrics.calibration, {"from_logits": False}),
        normalized_entropy=(metrics.normalized_entropy, {"from_logits": False}),
        positive_normalized_entropy=(metrics.positive_normalized_entropy, {"from_logits": False}),
        binary_precision=(metrics.binary_precision, {"threshold": 0.5, "from_logits": False}),
        binary_recall=(metrics.binary_recall, {"threshold": 0.5, "from_logits": False}),
        mean_prediction=(metrics.mean_prediction, {"from_logits": False}),
        average_precision=(metrics.average_precision, {"num_bins": 16, "from_logits": False}),
        recall_at_precision=(metrics.recall_at_precision, {"target": 0.5, "num_bins": 16, "from_logits": False}),
        top_k_accuracy=(metrics.top_k_accuracy, {"k": 2}),
        grouped_auc=(metrics.grouped_auc, {"scores": SCORES, "labels": PAIRS, "weights": f32(3), "equal": False}),
        cali_free_ne=(metrics.cali_free_ne, {"from_logits": False}),
        hindsight_target_pr=(metrics.hindsight_target_pr, {"target": 0.5, "num_bins": 16, "from_logits": False}),
        exact_average_precision=(metrics.exact_average_precision, {"scores": SCORES, "labels": LABELS,
            "weights": f32(3)}),
        exact_rauc=(metrics.exact_rauc, {"scores": SCORES, "labels": LABELS, "weights": f32(3)}),
        grouped_average_precision=(metrics.grouped_average_precision, {"scores": SCORES, "labels": PAIRS,
            "weights": f32(3), "equal": True}),
        grouped_rauc=(metrics.grouped_rauc, {"scores": SCORES, "labels": PAIRS, "weights": f32(3), "equal": True}),
        by_session=(metrics.by_session, {"metric": AUC}),
        by_session_update=(metrics.by_session(AUC).update, {"state": metrics.by_session(AUC).init(), **examples,
            "labels": PAIRS}),
        top_k_of_session=(metrics.top_k_of_session, {"metric": AUC, "k": 2, "rank_labels": False}),
        recall_session_level=(metrics.recall_session_level, {"k": 2, "rank_labels": False}),
        recall_session_level_update=(metrics.recall_session_level(2).update, {
            "state": metrics.recall_session_level(2).init(), **examples, "labels": PAIRS}),
        precision_session_level=(metrics.precision_session_level, {"k": 2, "rank_labels": False}),
        session_ndcg=(metrics.session_ndcg, {"k": 2, "exponential": False}),
        session_ndcg_update=(metrics.session_ndcg(2).update, {"state": metrics.session_ndcg(2).init(), **examples,
            "labels": PAIRS}),
        xauc_update=(metrics.xauc().update, {"state": metrics.xauc().init(), **examples}),
        labelled=(metrics.labelled, {"metric": AUC}),
        named=(metrics.named, {"metric": metrics.per_task(AUC, 2), "names": ["click", "buy"]}),
        per_task=(metrics.per_task, {"metric": AUC, "num_tasks": 2}),
        per_task_update=(metrics.per_task(AUC, 2).update, {"state": metrics.per_task(AUC, 2).init(),
            "predictions": SCORES[:, None].expand(3, 2).clone(), "labels": LABELS[:, None].expand(3, 2).clone(),
            "weights": f32(3)}),
        windowed=(metrics.windowed, {"metric": AUC, "num_updates": 2}),
        grouped=(metrics.grouped, {"metric": AUC, "num_groups": 2}),
        recalibrated=(metrics.recalibrated, {"metric": AUC, "coefficient": 0.5}),
        unweighted=(metrics.unweighted, {"metric": AUC}),
        windowed_update=(metrics.windowed(AUC, 2).update, {"state": metrics.windowed(AUC, 2).init(), **examples}),
        grouped_update=(metrics.grouped(AUC, 2).update, {"state": metrics.grouped(AUC, 2).init(), **examples,
            "labels": PAIRS}),
        recall=(metrics.recall, {"k": 2}), hit_rate=(metrics.hit_rate, {"k": 2}), ndcg=(metrics.ndcg, {"k": 2}),
        precision=(metrics.precision, {"k": 2}), mrr=(metrics.mrr, {"k": 2}),
        mean_average_precision=(metrics.mean_average_precision, {"k": 2}),
        coverage=(metrics.coverage, {"k": 2, "num_items": 3}),
        novelty=(metrics.novelty, {"k": 2, "counts": torch.tensor([1, 2]), "num_users": 3}),
        recall_update=(metrics.recall(2).update, {"state": metrics.recall(2).init(), "predictions": i64(1, 2)[None],
            "labels": JT.from_lists([[1]]), "weights": f32(1)}))  # fmt: skip


def saved(folder) -> list[Call]:
    """Return the calls of checkpoints."""
    fr.save(folder / "tree.pt", {"w": f32(2)})
    tensors = fr.save_safetensors(folder / "tree.safetensors", {"w": f32(2)})
    fr.save(folder / "steps", HELD, keep=1)
    on_ranks = {"path": str(folder / "held"), "tree": HELD, "mesh": MESH, "keep": 2, "step": 1, "asynchronous": False}
    placed = {"plan": PLAN, "mesh": MESH, "sparse": SPARSE, "exact": False, "codec": None, "dedup": False}
    return rows("", save=(fr.save, {"path": str(folder / "new.pt"), "tree": {"w": f32(2)}}),
            load=(fr.load, {"path": str(folder / "tree.pt"), "like": {"w": f32(2)}, "device": None}),
            save_safetensors=(fr.save_safetensors, {"path": str(folder / "new.safetensors"), "tensors": {"w": f32(2)},
                "mesh": None, "metadata": {"a": "b"}}),
            load_safetensors=(fr.load_safetensors, {"path": str(tensors), "device": None, "mmap": False}),
            save_ranks=(fr.save, on_ranks), latest=(fr.latest, {"folder": str(folder / "steps")}),
            load_ranks=(fr.load, {"path": str(fr.save(folder / "a", HELD)), **placed, "dense_axes": ("a",)}),
    )  # fmt: skip


def tested() -> list[Call]:
    return rows("testing",
            assert_trees_close=(testing.assert_trees_close, {"a": f32(2), "b": f32(2), "rtol": 0.0, "atol": 0.0}),
            garbage_padding=(testing.garbage_padding, {"tree": BAGS, "key": KEY}),
        check_adjoint=(testing.check_adjoint,
            {"forward": lambda x: x * 2, "transpose": lambda x: x * 2, "x": f32(2), "y": f32(2), "key": KEY}),
        zero_padding=(testing.zero_padding, {"tree": BAGS}),
        check_invariant=(lambda fn, batch: testing.check_invariant(fn, batch), {"fn": torch.abs, "batch": f32(4, 3)}),
        check_invariant_step=(testing.check_invariant_step,
            {"step_of": partial(fr.train_step, lambda p, x: (x @ p.dense).mean(), sparse=SPARSE, invariant=True),
                "params": fr.Params({"t": f32(4, 2)}, f32(3)), "batch": f32(512, 3), "ranks": [2],
                "kinds": ["row_wise"], "micro_batches": [2], "threads": [1], "num_steps": 1, "compiled": False},
            ("params.tables", "params.dense", "compiled")),
        check_transforms=(lambda f, x, **how: testing.check_transforms(f, x, **how),
            {"f": torch.sin, "x": f32(2), "modes": ["grad"], "may_raise": ["jvp"]}),
        transform_cells=(lambda f, x, modes: testing.transform_cells(f, x, modes=modes),
            {"f": torch.sin, "x": f32(2), "modes": ["grad"]}),
        law=(lambda draw, **how: testing.law(draw, **how),
            {"draw": just(f32(2)), "reference": torch.sin, "example": (f32(2),), "modes": ["grad"],
                "may_raise": ["jvp"], "rtol": 0.0, "atol": 0.0}),
        law_tests=(testing.law_tests, {"f": testing.law(just(f32(2)), reference=torch.sin)(torch.sin)}),
        check_grads=(testing.check_grads,
            {"f": lambda x: x * x, "args": (torch.ones(2, dtype=torch.float64),), "order": 1, "modes": ("fwd", "rev"),
                "key": KEY, "rtol": 1e-5, "atol": 1e-5},
            ("args[0]", "f", "order", "key", "rtol", "atol", "modes[0]", "modes[1]")))  # fmt: skip


def parts() -> list[Call]:
    """Return the calls that make examples from columns."""
    import pyarrow as pa

    table, known = pa.table(TABLE), JT.from_lists([[1, 3], [2]])
    shares, users, items = {"fractions": (0.5, 0.5)}, i64(0, 1, 0, 1, 0, 1), i64(0, 1, 1, 2, 2, 2)
    return rows("data",
        random_split=(data.random_split, {"num_rows": 8, **shares, "key": KEY}),
        split_by_time=(data.split_by_time, {"time": i64(3, 1, 2), **shares}),
        split_by_group=(data.split_by_group, {"group": users, **shares, "key": KEY}),
        histories=(data.histories, {"user": users, "item": items, "time": i64(*range(6)), "rows": i64(0, 1, 2),
            "held_out": i64(3, 4), "max_length": 2}),
        take_histories=(data.histories(users, items, i64(*range(6))).take, {"rows": i64(0, 1)}),
        crop=(data.crop, {"bags": known, "key": KEY, "share": 0.5}),
        mask=(data.mask, {"bags": known, "key": KEY, "item": 0, "share": 0.5}),
        reorder=(data.reorder, {"bags": known, "key": KEY, "share": 0.5}),
        leave_one_out=(data.leave_one_out, {"group": users, "time": i64(*range(6)), "held_out": 2}),
        k_core=(data.k_core, {"user": users, "item": items, "k": (2, 1)}),
        vocabulary=(data.vocabulary, {"min_count": 2, "max_size": 9}),
        hash_keys=(data.hash_keys, {"column": ["anna", "bob"]}),
        hashed=(data.hashed, {"num_embeddings": 9, "seed": 1}), identity=(data.identity, {"num_embeddings": 9}),
        bucketize_edges=(data.bucketize, {"edges": (1.0, 2.0), "num_quantiles": None}),
        bucketize=(data.bucketize, {"edges": None, "num_quantiles": 4}),
        chain=(lambda a, b: data.chain(a, b), {"a": data.log1p(), "b": data.normalize()}),
        fit=(data.vocabulary().fit, {"column": ["a", None]}),
        apply=(ENCODING.ids["item"].apply, {"column": ["a", None], "place": data.Place("mine", "item")}),
        apply_numbers=(ENCODING.dense["price"].apply, {"column": [1.0], "place": data.Place("mine", "price")}),
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


def data_calls(folder) -> list[Call]:
    """Return the calls of all functions of this file."""
    return [*loaded(folder), *measured(), *saved(folder), *tested(), *parts()]

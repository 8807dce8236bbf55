"""The HSTU ranker: DLRMv3 at its full size on the meta device, and candidates a second by three ways of scoring.

    .venv/bin/python bench/hstu.py [runs/hstu]

With the folder of a run of `python -m funcrec.examples.hstu`, the record has its scores too.
"""

import json
import statistics
import sys
from pathlib import Path

import torch
from measure import interleave, record

import funcrec as fr

HISTORY, CANDIDATES, LAYERS, HEADS, DIM, INNER = 1024, 2048, 5, 4, 512, 128


def staged() -> dict[str, float]:
    """Return the sizes of DLRMv3's model, and the floating-point operations of one request in one pass."""
    model = fr.models.mlperf_dlrmv3()
    params = model.init(fr.key(0).to("meta"))
    tokens, before = 1 + HISTORY + CANDIDATES, 1 + HISTORY
    pairs = before * (before + 1) // 2 + CANDIDATES * (before + 1)
    flops = {
        "content": 2 * (2 * DIM * 256 + 256 * DIM) * tokens + 2 * (40 * 256 + 256 * DIM) * before,
        "uvqk": LAYERS * 2 * DIM * 4 * HEADS * INNER * tokens,
        "attention": LAYERS * HEADS * 2 * (INNER + INNER) * pairs,
        "output": LAYERS * 2 * 3 * HEADS * INNER * DIM * tokens,
        "head": 2 * (2 * DIM * DIM + DIM * DIM + DIM * DIM + DIM) * CANDIDATES,
    }
    return {
        "table_bytes": fr.tree.nbytes(params.tables),
        "table_rows": sum(t.num_embeddings for t in model.tables),
        "dense_parameters": fr.models.num_parameters(fr.Params({}, params.dense)),
        "gflop": {name: round(x / 1e9, 2) for name, x in flops.items()},
        "gflop_in_all": round(sum(flops.values()) / 1e9, 2),
    }


def scored(users: int = 4, history: int = 512, candidates: int = 128) -> dict[str, float]:
    """Return candidates a second: of one sequence, of a kept history, and one candidate at a time."""
    data = fr.data.generated_histories(
        fr.key(0), num_users=100, num_items=12_800, num_timestamps=20, length=200, num_candidates=candidates,
        max_history=history, activity=1.0,
    )  # fmt: skip
    model = fr.models.mlperf_dlrmv3(20_000, embedding_dim=64, max_history=history, num_candidates=candidates)
    params, batch = model.init(fr.key(0)), data.take(data.requests(19)[:users])
    kept = model.encode_history(params, batch)
    singles = [one(batch, c, candidates) for c in range(4)]
    cases = {
        "one_sequence": lambda: model.apply(params, batch),
        "kept_history": lambda: model.score(params, kept, batch),
        "one_by_one": lambda: [model.apply(params, single) for single in singles],
    }
    times = {name: statistics.median(x) for name, x in interleave(cases, rounds=5, warmup=1).items()}
    counts = {"one_sequence": candidates, "kept_history": candidates, "one_by_one": len(singles)}
    apart = (model.apply(params, batch).unpad().values - model.score(params, kept, batch).unpad().values).abs().max()
    alone = torch.cat([model.apply(params, s).unpad().values for s in singles], 1)
    together = model.apply(params, batch).unpad().values.view(users, candidates)[:, : len(singles)]
    return {
        "users": users, "history": history, "candidates": candidates, "dense_parameters":
        fr.models.num_parameters(fr.Params({}, params.dense)),
        "candidates_per_s": {n: round(users * counts[n] / t, 1) for n, t in times.items()},
        "kept_apart": float(apart), "one_by_one_apart": float((alone - together).abs().max()),
    }  # fmt: skip


def one(batch: fr.Batch, place: int, count: int) -> fr.Batch:
    """Return the batch with one candidate for each user."""
    ids = batch.ids.to_dict()
    for name in ("candidate_item", "candidate_category"):
        own = ids[name].to_padded(count)[:, place]
        ids[name] = fr.JaggedTensor.from_lengths(own, torch.ones_like(own))
    return fr.Batch(fr.KeyedJaggedTensor.from_jagged(ids))


def main(folder: str | None = None) -> None:
    results = {"staged": staged(), "scored": scored()}
    if folder is not None:
        results["trained"] = json.loads((Path(folder) / "result.json").read_text())
    print(json.dumps({k: results[k] for k in ("staged", "scored")}, indent=1))
    record("hstu", results)


if __name__ == "__main__":
    main(*sys.argv[1:])

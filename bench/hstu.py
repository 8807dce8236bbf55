"""The HSTU ranker: DLRMv3 at its full size on the meta device, candidates a second by three ways of scoring, and tokens
a second of its layers beside the same layers padded in plain torch.

    .venv/bin/python bench/hstu.py [runs/hstu] [--parts staged scored layers]

With the folder of a run of `python -m funcrec.examples.hstu`, the record has its scores too.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import interleave, record

import funcrec as fr

CANDIDATES, LAYERS, HEADS, DIM, INNER = 2048, 5, 4, 512, 128
# The events of a history: the average of the published timings on an H100; and the mean at MLPerf's timestamps 90 to
# 99, whose generator gives 1e9 items · 50 / 5e6 users / 100 timestamps = 100 events to the start and, with probability
# .7, to each timestamp: 100 + .7 · 100 · 94.5.
HISTORIES = (1024, 6715)


def staged() -> dict[str, object]:
    """Return the sizes of DLRMv3's model, and the operations of one request in one pass, for each length of history."""
    model = fr.models.mlperf_dlrmv3()
    params = model.init(fr.key(0).to("meta"))
    return {
        "table_bytes": fr.tree.nbytes(params.tables),
        "table_rows": sum(t.num_embeddings for t in model.tables),
        "dense_parameters": fr.models.num_parameters(fr.Params({}, params.dense)),
        "requests": [{"history": n, "candidates": CANDIDATES, **operations(n)} for n in HISTORIES],
    }


def operations(history: int) -> dict[str, object]:
    """Return the floating-point operations of a request, and the multiply-adds: half as many."""
    tokens, before = 1 + history + CANDIDATES, 1 + history
    pairs = before * (before + 1) // 2 + CANDIDATES * (before + 1)
    flops = {
        "content": 2 * (2 * DIM * 256 + 256 * DIM) * tokens + 2 * (40 * 256 + 256 * DIM) * before,
        "uvqk": LAYERS * 2 * DIM * 4 * HEADS * INNER * tokens,
        "attention": LAYERS * HEADS * 2 * (INNER + INNER) * pairs,
        "output": LAYERS * 2 * 3 * HEADS * INNER * DIM * tokens,
        "head": 2 * (2 * DIM * DIM + DIM * DIM + DIM * DIM + DIM) * CANDIDATES,
    }
    in_all = sum(flops.values()) / 1e9
    return {
        "gflop": {name: round(x / 1e9, 2) for name, x in flops.items()},
        "gflop_in_all": round(in_all, 2),
        "giga_multiply_adds": round(in_all / 2, 2),
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


def layers(users: int = 8, history: int = 512, candidates: int = 128) -> dict[str, float]:
    """Return tokens a second of HSTU layers over bags, and of the same layers in plain torch, compiled, where bags are
    padded to the longest: forward, and with the gradient of the parameters; and the share of the rate of a product."""
    data = fr.data.generated_histories(
        fr.key(0), num_users=100, num_items=12_800, num_timestamps=20, length=200, num_candidates=candidates,
        max_history=history, activity=0.5,
    )  # fmt: skip
    batch = data.take(data.requests(1)[:users])
    lengths = 1 + batch.ids["item"].lengths + candidates
    heads, dim, inner, count = 4, 64, 32, 3
    layer = fr.nn.hstu_layer(
        dim, normalizer=float(history), num_heads=heads, qk_dim=inner, linear_dim=inner, concatenate=True
    )
    params = [layer.init(k) for k in fr.split(fr.key(1), count)]
    x = fr.JaggedTensor.from_lengths(torch.randn(int(lengths.sum()), dim), lengths)
    targets, padded, most = torch.full((users,), candidates), x.to_padded(int(lengths.max())), int(lengths.max())
    place, valid = torch.arange(most), torch.arange(most) < lengths[:, None]
    is_target = (place >= lengths[:, None] - candidates) & valid
    seen = (place[:, None] > place) & ~is_target[:, None] | (place[:, None] == place)
    mask = (seen & valid[:, None])[:, None]

    def ours(params, x):
        for own in params:
            x = layer.apply(own, x, None, targets)
        return x

    def theirs(params, x):
        for own in params:
            normed = F.layer_norm(x, (dim,), *(own["norm"][n] for n in ("weight", "bias")))
            u, v, q, k = F.silu(F.linear(normed, own["project"]["weight"], own["project"]["bias"])).split(
                heads * inner, 2
            )
            cut = lambda y: y.unflatten(2, (heads, -1)).transpose(1, 2)
            scores = F.silu(cut(q) @ cut(k).mT / inner**0.5) / history * mask
            a = (scores @ cut(v)).transpose(1, 2).flatten(2)
            gated = u * F.layer_norm(a, (heads * inner,), *(own["out_norm"][n] for n in ("weight", "bias")))
            x = x + F.linear(torch.cat([u, a, gated], 2), own["out"]["weight"])
        return x

    apart = (ours(params, x).to_padded(most) - theirs(params, padded))[valid].abs().max()
    of_ours = lambda params, x: ours(params, x).values.square().mean()
    of_theirs = lambda params, x: theirs(params, x)[valid].square().mean()
    fast, peer = fr.jit(ours), torch.compile(theirs)
    grads, peer_grads = (wrap(torch.func.grad(f)) for wrap, f in ((fr.jit, of_ours), (torch.compile, of_theirs)))
    square = torch.randn(1024, 1024)
    cases = {
        "forward": lambda: fast(params, x), "forward, padded": lambda: peer(params, padded),
        "gradient": lambda: grads(params, x), "gradient, padded": lambda: peer_grads(params, padded),
        "product": lambda: square @ square,
    }  # fmt: skip
    with torch.no_grad():
        times = {n: statistics.median(t) for n, t in interleave(cases, rounds=9, warmup=2).items()}
    own = lengths.double()
    before = own - candidates
    pairs = (before * (before + 1) / 2 + candidates * (before + 1)).sum()
    flops = count * float(pairs * heads * 4 * inner + own.sum() * 2 * dim * heads * inner * 7)
    rate = 2 * 1024**3 / times.pop("product")
    return {
        "lengths": {"mean": float(own.mean()), "most": most}, "heads": heads, "dim": dim, "layers": count,
        "apart": float(apart), "tokens_per_s": {n: round(float(own.sum()) / t) for n, t in times.items()},
        "share_of_a_product's_rate": round(flops / times["forward"] / rate, 3),
    }  # fmt: skip


def one(batch: fr.Batch, place: int, count: int) -> fr.Batch:
    """Return the batch with one candidate for each user."""
    ids = batch.ids.to_dict()
    for name in ("candidate_item", "candidate_category"):
        own = ids[name].to_padded(count)[:, place]
        ids[name] = fr.JaggedTensor.from_lengths(own, torch.ones_like(own))
    return fr.Batch(fr.KeyedJaggedTensor.from_jagged(ids))


def main() -> None:
    parts = {"staged": staged, "scored": scored, "layers": layers}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a run of funcrec.examples.hstu")
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    args = parser.parse_args()
    results = {name: parts[name]() for name in args.parts}
    if args.folder is not None:
        results["trained"] = json.loads((args.folder / "result.json").read_text())
    record("hstu", results)


if __name__ == "__main__":
    main()

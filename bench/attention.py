"""Measures attention of bags against torch's scaled_dot_product_attention: padded, and bucketed by length.

    .venv/bin/python bench/attention.py [--rounds 15] [--threads 1]

Lengths are like those of MovieLens-1M cut at 200 (mean about 140), and of a long tail. Calls take turns in one process;
times are CPU times of the process. "padded" pads to the longest bag. "bucketed" sorts the bags into 8 groups, each
padded to its longest bag; its times include neither the sorting nor the padding. The law: outputs and gradients agree.
Rates count the products of pairs that a query sees; `share_of_mm` is relative to torch.mm in the same run.
"""

import argparse
import time

import torch
from measure import digits, interleave, ratios, record, spread
from torch.nn.functional import scaled_dot_product_attention as sdpa

import funcrec as fr

BATCH, GROUPS = 128, 8
SHAPES = {"1 head of 64": (1, 64), "2 heads of 32": (2, 32), "4 heads of 128": (4, 128)}


def lengths_of(name: str, num_bags: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    if name == "ml-1m":  # a third of the users have 200 or more
        return (20 + torch.rand(num_bags, generator=generator) * 270).long().clamp(max=200)
    return (16 / torch.rand(num_bags, generator=generator).clamp(min=1e-2).pow(0.9)).long().clamp(max=1000)


def groups_of(lengths: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return the bags of each group, by ascending length."""
    return list(lengths.argsort().chunk(count))


def padded(x: torch.Tensor, bags: fr.JaggedTensor, which: torch.Tensor) -> torch.Tensor:
    """Return the vectors [N, H, D] of some bags as [B, H, longest, D]."""
    rows = fr.JaggedTensor(x, bags.offsets).to_padded(int(bags.lengths[which].max()))
    return rows[which].movedim(1, 2).contiguous()


def gradients(call, inputs: list[torch.Tensor], d_out: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(call(), inputs, d_out)


def contenders(bags: fr.JaggedTensor, heads: int, dim: int) -> tuple[dict, dict, list]:
    """Return {name: forward}, {name: forward and backward}, and the pairs that must agree."""
    total = bags.values.shape[0]
    q, k, v, d = (torch.randn(total, heads, dim, generator=torch.Generator().manual_seed(i)) for i in range(4))
    own = [x.clone().requires_grad_() for x in (q, k, v)]

    def ours(q, k, v):
        return fr.jagged_attention(fr.JaggedTensor(q, bags.offsets), fr.JaggedTensor(k, bags.offsets), v).values

    forward, both = {"funcrec": lambda: ours(q, k, v)}, {"funcrec": lambda: gradients(lambda: [ours(*own)], own, [d])}
    agree = []
    for name, count in {"padded": 1, "bucketed": GROUPS}.items():
        groups = groups_of(bags.lengths, count)
        blocks = [[padded(x, bags, g) for x in (q, k, v, d)] for g in groups]
        free = [[x.clone().requires_grad_() for x in b[:3]] for b in blocks]
        run = lambda which: [sdpa(*b[:3], is_causal=True) for b in which]
        forward[name] = lambda run=run, blocks=blocks: run(blocks)
        flat, d_out = [x for b in free for x in b], [b[3] for b in blocks]
        both[name] = lambda run=run, free=free, flat=flat, d_out=d_out: gradients(lambda: run(free), flat, d_out)
        agree += [(ours(q, k, v), sdpa_rows(run(blocks), bags, groups))]
        found = both[name]()
        for i, x in enumerate(both["funcrec"]()):
            agree += [(x, sdpa_rows(found[i::3], bags, groups))]
    return forward, both, agree


def sdpa_rows(blocks: list[torch.Tensor], bags: fr.JaggedTensor, groups: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of padded results [B, H, L, D] in the order of the bags, [N, H, D]."""
    rows = {int(b): x[i].movedim(0, 1) for g, x in zip(groups, blocks, strict=True) for i, b in enumerate(g)}
    return torch.cat([rows[b][:n] for b, n in enumerate(bags.lengths.tolist())])


def product_rate(rounds: int) -> float:
    """Return the GFLOP/s of torch.mm of squares of 1024, by the CPU's time."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = interleave({"mm": lambda: torch.mm(a, b)}, rounds=rounds, clock=time.process_time)["mm"]
    return 2 * 1024**3 / min(times) / 1e9


def measured(name: str, heads: int, dim: int, rounds: int) -> dict:
    lengths = lengths_of(name, BATCH)
    bags = fr.JaggedTensor.from_lengths(torch.zeros(int(lengths.sum())), lengths)
    forward, both, agree = contenders(bags, heads, dim)
    worst = max(float((x - y).abs().max() / y.abs().max()) for x, y in agree)
    if not worst < 1e-4:
        return {"law": "red", "worst": worst}
    pairs, out = float((lengths * (lengths + 1) / 2).sum()) * heads, {"law": "green", "worst": digits(worst)}
    peak = product_rate(rounds)
    for what, calls, flop in (("forward", forward, 4 * dim), ("forward and backward", both, 14 * dim)):
        times = interleave(calls, rounds=rounds, clock=time.process_time)
        rate = pairs * flop / (sorted(times["funcrec"])[rounds // 2] * 1e9)
        out[what] = {
            "cpu_ms": {n: spread(t, 1e3) for n, t in times.items()},
            "ratio": {n: spread(ratios(t, times["funcrec"])) for n, t in times.items() if n != "funcrec"},
            "gflop_s": digits(rate),
            "share_of_mm": digits(rate / peak),
        }
    return out | {"mm_gflop_s": digits(peak), "mean_length": digits(float(lengths.float().mean()))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="only checks that all code runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for lengths in ("ml-1m", "long tail"):
        for shape, (heads, dim) in list(SHAPES.items())[: 1 if options.tiny else None]:
            figures = measured(lengths, heads, dim, 3 if options.tiny else options.rounds)
            about = {"lengths": lengths, "shape": shape, "batch": BATCH, "threads": options.threads}
            if options.tiny:
                print(about, figures)
            else:
                record("attention", {**about, **figures})


if __name__ == "__main__":
    main()

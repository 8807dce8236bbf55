"""Makes tables and plots from the results of `run.py`.

    python bench/report.py                     # bench/results -> bench/results/REPORT.md, plots
    python bench/report.py --results DIR       # DIR/REPORT.md, plots

For each case, device and number of threads the last line counts, if it comes from the machine of the newest line. A
red case has no number.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean

from measure import RESULTS, digits

OURS = "funcrec"
TABLED = ("lookup", "update", "jagged", "steps", "on_device", "ranks")
TITLES = {
    "lookup": "Pooled lookup",
    "update": "Lookup, transpose and fused update in one call",
    "jagged": "Jagged operations",
    "steps": "Whole training steps",
    "on_device": "Attention, sampled softmax, quantised lookups and a pipeline",
    "ranks": "Training steps on two ranks, by placement",
}
MEAN_OF = {"lookup": ("a", "b", "c", "e"), "update": ("a", "b", "c", "e")}


def load(folder: Path) -> list[dict]:
    """Return the last line of each case, from the machine of the newest line."""
    paths = [folder / f"{name}.jsonl" for name in ("bandwidth", *TABLED, "overhead", "first_step")]
    lines = [json.loads(text) for p in paths if p.exists() for text in p.read_text().splitlines()]
    lines = [x for x in lines if "case" in x and "group" in x]  # other programs write figures of their own there
    lines = [x for x in lines if not x.get("tiny") and not x.get("implementation")] or lines
    if not lines:
        return []
    newest = max(lines, key=lambda x: x["date"])
    here = [x for x in lines if machine_of(x) == machine_of(newest)]
    return list({(x["group"], x["case"], x["device"], x["threads"]): x for x in here}.values())


def machine_of(line: dict) -> tuple:
    return line["cpu"], line["cores"], line.get("gpu")


def tables(lines: list[dict]) -> str:
    """Return the tables of all groups, as Markdown."""
    parts = [header(lines)]
    for group in TABLED:
        mine = [x for x in lines if x["group"] == group]
        if mine:
            parts += [f"**{TITLES[group]}**", table(mine), notes(mine), means(group, mine)]
    parts += [others(lines)]
    return "\n\n".join(p for p in parts if p)


def header(lines: list[dict]) -> str:
    first, commits = lines[-1], sorted({x["commit"] for x in lines})
    where = f"{first['cpu']}, {first['cores']} cores" + (f", {first['gpu']}" if first.get("gpu") else "")
    loads = [x["load"][0] for x in lines if x.get("load")]
    busiest = f" Load average before a case: {min(loads)} to {max(loads)}." if loads else ""
    own = " Times are the processor's, without those of other jobs." if first.get("clock") == "processor" else ""
    small = " EVERY SHAPE WAS CUT: these are no results." if any(x.get("tiny") for x in lines) else ""
    return (
        f"{where}, torch {first['torch']}, {max(x['date'] for x in lines)}, commit "
        f"{', '.join(commits)}.{busiest}{own}{small} "
        "A ratio is a peer's time over funcrec's: medians of interleaved rounds, in brackets the quartiles. "
        "GB/s counts ids, rows, state, output and gradient once; the share is of the copy's bandwidth in the same run. "
        "The roofline is the time of the case's bytes at the rates of a copy and of gathers, and of its products at "
        "torch's best rate for their shapes, all of the same run. Peak memory is what a call adds."
    )


def table(lines: list[dict]) -> str:
    peers = list(dict.fromkeys(name for x in lines for name in [*x.get("ratio", {}), *x.get("absent", {})]))
    speed = any("gb_per_s" in x for x in lines)
    roofs = any("roofline" in x for x in lines)
    heads = ["case", "threads", "ms"] + (["roofline ms", "time over roofline"] if roofs else [])
    heads += (["GB/s", "share"] if speed else ["samples/s"]) + ["MiB"] + peers
    rows = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for x in sorted(lines, key=lambda x: x["threads"]):
        rows.append("| " + " | ".join([x["case"], str(x["threads"]), *cells(x, speed, roofs, peers)]) + " |")
    return "\n".join(rows)


def cells(x: dict, speed: bool, roofs: bool, peers: Iterable[str]) -> list[str]:
    if "ms" not in x:
        return ["red", *["-"] * (2 * roofs + 1 + speed), "-", *["-" for _ in peers]]
    roof = x.get("roofline")
    limit = ([f"{roof['ms']:.3g}", f"{roof['time_over_roofline']:.2f}"] if roof else ["-", "-"]) if roofs else []
    middle = [f"{x['gb_per_s'][OURS]:.1f}", f"{x['share_of_copy']:.0%}"] if speed and "gb_per_s" in x else None
    middle = middle or (["-", "-"] if speed else [f"{x['samples_per_s'][OURS]:,}" if "samples_per_s" in x else "-"])
    peak = x["call_peak_mb"][OURS]
    return [
        f"{x['ms'][OURS]['median']:.3g}",
        *limit,
        *middle,
        "-" if peak is None else f"{peak:.0f}",
        *(ratio(x, p) for p in peers),
    ]


def ratio(x: dict, peer: str) -> str:
    if peer not in x["ratio"]:
        return "absent" if peer in x["absent"] else "-"
    r = x["ratio"][peer]
    return f"{r['median']:.2f} ({r['q1']:.2f} to {r['q3']:.2f})"


def notes(lines: list[dict]) -> str:
    """Return lines that say why peers are absent, and why cases are red."""
    absent: dict[str, list[str]] = {}
    for x in lines:
        for peer, why in x.get("absent", {}).items():
            absent.setdefault(f"{peer}: {why.partition(': ')[2]}", []).append(x["case"])
    said = [f"{why} ({', '.join(dict.fromkeys(names))})" for why, names in absent.items()]
    red = [f"{x['case']}, {x['threads']} threads: {x['red'][0]}" for x in lines if x.get("law") == "red"]
    parts = [f"Absent: {'; '.join(said)}." if said else "", f"Red: {'; '.join(red)}." if red else ""]
    return "\n".join(p for p in parts if p)


def means(group: str, lines: list[dict]) -> str:
    """Return a text of the geometric mean and the least ratio, over the shapes that are judged together."""
    said = []
    for threads in sorted({x["threads"] for x in lines}):
        mine = {x["case"]: x for x in lines if x["threads"] == threads and "ratio" in x}
        names = MEAN_OF.get(group, tuple(mine))
        for peer in dict.fromkeys(p for x in mine.values() for p in x["ratio"]):
            found = [mine[n]["ratio"][peer]["median"] for n in names if n in mine and peer in mine[n]["ratio"]]
            if len(found) > 1:
                over = f"{len(found)} of {', '.join(names)}" if group in MEAN_OF else f"{len(found)} cases"
                said.append(
                    f"{peer}, {threads} threads: {digits(geometric_mean(found))}, least {digits(min(found))} ({over})"
                )
    return "Geometric means: " + "; ".join(said) + "." if said else ""


def others(lines: list[dict]) -> str:
    said = []
    for x in lines:
        if x["group"] == "overhead" and "overhead_us" in x:
            said.append(
                f"- A jitted call of {x['shape']['num_tensors']} tensors costs {x['overhead_us']} µs "
                f"over the compiled function's own "
                f"call, donated {x['overhead_donated_us']} µs ({x['threads']} threads)."
            )
        if x["group"] == "ranks" and "sent_mb" in x:
            busy = ", ".join(f"{p} {r['median']:.2f}" for p, r in x["cpu_ratio"].items())
            said.append(
                f"- {x['case']} on two ranks: {x['num_collectives']} collectives, {x['sent_mb']} MB "
                f"leave a rank in a step, of which "
                f"{x['least_mb']} must; CPU time over funcrec's {x['cpu_ms'][OURS]['median']:.3g} ms: {busy}."
            )
        if "launches" in x:
            own = x["launches"][OURS]
            top = ", ".join(f"{name} {share:.0%}" for name, share in own["top"].items())
            said.append(
                f"- {x['case']} starts {own['kernels']:.0f} kernels ({own['kernels_ms']} ms) and {own['copies']:.0f} "
                f"copies a call, and the host waits {own['waits']:.0f} times: {top}."
            )
        if x["group"] == "first_step":
            said.append(
                f"- {x['case']}, from nothing, nothing cached: import {x['import_s']} s, first step "
                f"{x['first_call_s']} s, second {x['second_call_s']} s ({x['threads']} threads)"
                + (f"; in a later process {x['warm']['first_call_s']} s." if "warm" in x else ".")
            )
        if x["group"] == "bandwidth":
            said.append(
                f"- Memory, {x['threads']} threads: copy {x['copy_gb_per_s']} GB/s, gather of rows "
                f"of {x['shape']['dim']} floats "
                f"{x['gather_gb_per_s']}, in ascending order {x['gather_sorted_gb_per_s']}."
            )
    return "\n".join(said)


def plot(lines: list[dict], folder: Path) -> list[Path]:
    """Return the paths of one picture per group, which shows the ratio to each peer, with quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for group in TABLED:
        mine = [x for x in lines if x["group"] == group and x.get("ratio")]
        if not mine:
            continue
        mine.sort(key=lambda x: (x["threads"], x["case"]))
        labels = [f"{x['case']}, {x['threads']}" for x in mine]
        peers = list(dict.fromkeys(p for x in mine for p in x["ratio"]))
        figure, axes = plt.subplots(figsize=(8, 1 + 0.22 * len(mine) * len(peers)))
        for i, peer in enumerate(peers):
            at = [(k + 0.8 * i / len(peers), x["ratio"][peer]) for k, x in enumerate(mine) if peer in x["ratio"]]
            wide = [r["median"] for _, r in at]
            low = [max(r["median"] - r["q1"], 0) for _, r in at]
            high = [max(r["q3"] - r["median"], 0) for _, r in at]
            axes.barh([y for y, _ in at], wide, 0.8 / len(peers), xerr=[low, high], label=peer)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks([k + 0.4 * (1 - 1 / len(peers)) for k in range(len(mine))], labels)
        axes.invert_yaxis()
        axes.set_xlabel("time of the peer / time of funcrec")
        axes.set_title(f"{TITLES[group]} (case, threads)")
        axes.legend()
        figure.tight_layout()
        made.append(folder / f"{group}.png")
        figure.savefig(made[-1], dpi=110)
        plt.close(figure)
    return made


def plot_rooflines(lines: list[dict], folder: Path) -> list[Path]:
    """Return the path of one picture: each case's roofline by its parts, and its time, as multiples of the roofline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mine = sorted((x for x in lines if "roofline" in x), key=lambda x: (x["group"], x["threads"], x["case"]))
    if not mine:
        return []
    figure, axes = plt.subplots(figsize=(8, 1 + 0.25 * len(mine)))
    begins = [0.0] * len(mine)
    for part in mine[0]["roofline"]["parts_ms"]:
        shares = [x["roofline"]["parts_ms"][part] / x["roofline"]["ms"] for x in mine]
        axes.barh(range(len(mine)), shares, 0.7, left=begins, label=part)
        begins = [a + b for a, b in zip(begins, shares, strict=True)]
    times = [x["roofline"]["time_over_roofline"] for x in mine]
    axes.plot(times, range(len(mine)), "k|", markersize=10, label="time of funcrec")
    axes.axvline(1.3, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(mine)), [f"{x['group']} {x['case']}, {x['threads']}" for x in mine])
    axes.invert_yaxis()
    axes.set_xlabel("time / roofline; dotted: the goal of 1.3")
    axes.legend()
    figure.tight_layout()
    path = folder / "roofline.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


def write(folder: Path = RESULTS) -> None:
    lines = load(folder)
    if not lines:
        raise SystemExit(f"{folder} holds no results: python bench/run.py")
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    try:
        made = plot(lines, plots) + plot_rooflines(lines, plots)
    except ImportError:
        made = []
        print('no plots: pip install "funcrec[bench]"', file=sys.stderr)
    pictures = "\n\n".join(f"![{p.stem}](plots/{p.name})" for p in made)
    (folder / "REPORT.md").write_text(f"# Results\n\n{tables(lines)}\n\n{pictures}\n")
    print(f"{folder / 'REPORT.md'}, {len(made)} plots")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    write(parser.parse_args().results)

"""Measures the time from nothing to the first step, without compiled code and then in a process that finds it.

The times are those to import torch and funcrec, to make the state, of the first call (staging and compiling), and of
the second call.

    .venv/bin/python bench/first_step.py                 # also counts the eager steps that pay for compilation
    .venv/bin/python bench/first_step.py ../before       # compares funcrec of another checkout, in turn
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from contest import Setting
from measure import digits, record

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = """
import contextlib, json, os, statistics, sys, time
def cpu(): return sum(os.times()[:4])
marks = [(time.perf_counter(), cpu())]
def mark(): marks.append((time.perf_counter(), cpu()))
sys.path.insert(0, sys.argv[1])
import torch, funcrec
assert not sys.argv[8] or funcrec.__file__.startswith(sys.argv[8]), funcrec.__file__
torch.set_num_threads(int(sys.argv[3]))
mark()
import cases, steps
import funcrec as fr
case = cases.STEPS[sys.argv[2]]
case = cases.tiny(case)._replace(dim=16) if sys.argv[5] == "tiny" else case
mark()
model = steps.make_model(case, sys.argv[5] == "tiny")
batches = steps.make_batches(case, model, sys.argv[4])
params = steps.move(model.init(fr.key(0)), lambda x: x.to(sys.argv[4]))
mark()
from funcrec.kernels import ops
def median_of(call, count=100):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        float(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
step = steps.funcrec_step(case, model, params, batches, sys.argv[4])
with ops.using(sys.argv[6]) if sys.argv[6] else contextlib.nullcontext():
    losses = []
    for _ in range(2):
        losses.append(float(step.call()))
        mark()
    compiled = median_of(step.call)
eager = None
if sys.argv[7] == "eager":
    call = steps.funcrec_step(case, model, model.init(fr.key(0)), batches, sys.argv[4], compiled=False).call
    call()
    eager = median_of(call)
wall = [b[0] - a[0] for a, b in zip(marks, marks[1:])]
print(json.dumps([wall, [b[1] - a[1] for a, b in zip(marks, marks[1:])], [x.hex() for x in losses], compiled, eager]))
"""
NAMES = ("import_s", "import_bench_s", "state_s", "first_call_s", "second_call_s")


def start(case: str, setting: Setting, place: str, tree: str = "", eager: bool = False) -> dict:
    """Return the times of one process. place: the cache of compiled code. tree: the checkout with that funcrec."""
    tiny, implementation = "tiny" if setting.tiny else "whole", setting.implementation or ""
    tree = tree and os.path.abspath(tree)
    words = [HERE, case, str(setting.threads), setting.device, tiny, implementation, "eager" if eager else "", tree]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": place, "TMPDIR": place}
    python = os.path.join(tree, ".venv", "bin", "python") if tree else sys.executable  # has the funcrec of `tree`
    command = [python, "-P", "-c", PROGRAM, *words]  # with -P Python does not import funcrec from the working folder
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    wall, cpu, losses, compiled, eager_s = json.loads(done.stdout.strip().splitlines()[-1])
    spent = {k: digits(s) for k, s in zip(NAMES, wall, strict=True)} | {"first_call_cpu_s": digits(cpu[3])}
    spent["compiled_ms"] = digits(compiled * 1e3)
    if eager:
        won = eager_s - compiled
        spent |= {"eager_ms": digits(eager_s * 1e3), "steps_to_win_back": round(wall[3] / won) if won > 0 else None}
    return {**spent, "losses": losses}


def run(case: str, setting: Setting, eager: bool = False, tree: str = "") -> dict:
    """Return the figures of a process without a cache, and of another process with the cache of the first."""
    with tempfile.TemporaryDirectory() as place:
        cold, warm = (start(case, setting, place, tree, eager) for _ in range(2))
    law = "green" if cold["losses"] == warm["losses"] else "red"
    return {"shape": {"step": case}, "law": law, **cold, "warm": warm}


def compare(case: str, setting: Setting, trees: dict[str, str], rounds: int) -> dict:
    """Return medians for each tree; the trees take turns. The law: all trees have the same losses, bit for bit."""
    found: dict[str, list[dict]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            found[name].append(run(case, setting, tree=tree))
    runs = [x for lines in found.values() for x in lines]
    law = "green" if len({tuple(y["losses"]) for x in runs for y in (x, x["warm"])}) == 1 else "red"
    keys = ("first_call_s", "first_call_cpu_s", "compiled_ms")
    middle = lambda lines: {k: digits(statistics.median(x[k] for x in lines)) for k in keys}
    out = {n: {"from nothing": middle(x), "kept": middle([y["warm"] for y in x])} for n, x in found.items()}
    return {"comparison": case, "law": law, "rounds": rounds, "threads": setting.threads, **out}


CASES = {name: name for name in ("dlrm-d64-b512-l1", "dcnv2")}
QUICK = ("dlrm-d64-b512-l1",)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", help="another checkout, with a .venv of its own")
    parser.add_argument("--case", default=QUICK[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    setting = Setting(device="cpu", threads=given.threads, implementation=None, tiny=given.tiny)
    if given.before:
        trees = {"before": given.before, "now": os.path.dirname(HERE)}
        record("first_step", compare(given.case, setting, trees, given.rounds))
    else:
        record("first_step", {"winning back": given.case, **run(given.case, setting, eager=True)})

"""Measures the host's cost to call a jitted function, without the cost of the compiled code.

    overhead = time(fr.jit(fn)(state, x)) - time(torch.compile(fn on the flat tensors)(*tensors))

fn adds a number to each of the state's small tensors. The donated form reuses the memory of the state.

    python bench/overhead.py ../before       # compares funcrec of another checkout, in turn, with its own .venv
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import torch
from contest import Setting
from measure import digits, explain, interleave, record, spread, wait_for

import funcrec as fr

ELEMENTS = 16


class OverheadCase(NamedTuple):
    num_tensors: int


def run(case: OverheadCase, setting: Setting) -> dict:
    make = lambda: {f"w{i}": torch.zeros(ELEMENTS, device=setting.device) for i in range(case.num_tensors)}
    one = torch.ones((), device=setting.device)
    add = lambda state, x: {n: w + x for n, w in state.items()}
    pure, donated = fr.jit(add), fr.jit(add, donate=("state",))
    compiled = torch.compile(lambda tensors, x: [w + x for w in tensors], fullgraph=True, dynamic=False)
    state, flat, held = make(), list(make().values()), {"state": make()}

    def donate():
        held["state"] = donated(held["state"], one)
        return held["state"]

    calls = {
        "fr.jit": lambda: pure(state, one),
        "fr.jit, donated": donate,
        "torch.compile": torch.no_grad()(lambda: compiled(flat, one)),
    }
    right = all(bool((w == 1).all()) for call in calls.values() for w in values_of(call()))
    if not right:
        return {"shape": case._asdict(), "law": "red", "red": ["a call did not add 1"]}
    rounds = 50 if setting.tiny else 2000
    times = interleave(calls, rounds=rounds, warmup=20, wait=wait_for(setting.device))
    own = times["torch.compile"]
    beyond = lambda name: digits(statistics.median(a - b for a, b in zip(times[name], own, strict=True)) * 1e6)
    return {
        "shape": case._asdict(),
        "law": "green",
        "rounds": rounds,
        "us": {name: spread(t, 1e6) for name, t in times.items()},
        "overhead_us": beyond("fr.jit"),
        "overhead_donated_us": beyond("fr.jit, donated"),
    }


def values_of(out) -> list[torch.Tensor]:
    return list(out.values()) if isinstance(out, dict) else list(out)


CASES = {f"tensors{n}": OverheadCase(n) for n in (1, 60, 240)}
QUICK = ("tensors60",)


# -- two checkouts -------------------------------------------------------------------------------------------------


def serve(num_tensors: int = 60, calls: int = 400) -> None:
    """Answer each line with the us of a call: the compiled code alone, `fr.jit`, and `fr.jit` donated.

    Each number is the first quartile of `calls` calls, which other processes disturb less than a median.
    """
    torch.set_num_threads(1)
    make = lambda: {f"w{i}": torch.zeros(ELEMENTS) for i in range(num_tensors)}
    add = lambda state, x: {n: w + x for n, w in state.items()}
    pure, donated, one = fr.jit(add), fr.jit(add, donate=("state",)), torch.ones(())
    state, held = make(), {"state": make()}
    pure(state, one)
    program = next(iter(pure.compiled.values())).rest
    tensors = [[*state.values(), one][i] for i in program.inputs]

    def alone():
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            program.call(*tensors)

    cases = {
        "code": alone,
        "fr.jit": lambda: pure(state, one),
        "fr.jit, donated": lambda: held.update(state=donated(held["state"], one)),
    }
    for _ in sys.stdin:
        times = interleave(cases, rounds=calls, warmup=20, clock=time.perf_counter)
        print(json.dumps({n: statistics.quantiles(t, n=4)[0] * 1e6 for n, t in times.items()}), flush=True)


def main(before: str, rounds: int = 16) -> None:
    trees = {"before": before, "now": os.path.join(os.path.dirname(__file__), "..")}
    start = lambda tree: subprocess.Popen(
        [os.path.join(tree, ".venv/bin/python"), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    workers, found = {n: start(tree) for n, tree in trees.items()}, {n: [] for n in trees}
    for _ in range(rounds):
        for n, worker in workers.items():
            print(file=worker.stdin, flush=True)
            found[n].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
    beyond = {
        case: {n: spread([x[case] - x["code"] for x in xs]) for n, xs in found.items()}
        for case in ("fr.jit", "fr.jit, donated")
    }
    code = {n: spread([x["code"] for x in xs]) for n, xs in found.items()}
    record("overhead", {"case": "tensors60, two checkouts", "threads": 1, "code_us": code, "beyond_code_us": beyond})


if __name__ == "__main__":
    explain(__doc__)
    main(sys.argv[1]) if len(sys.argv) > 1 else serve()

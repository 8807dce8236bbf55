"""Measures the host's cost to call a jitted function, without the cost of the compiled code.

    overhead = time(fr.jit(fn)(state, x)) - time(torch.compile(fn on the flat tensors)(*tensors))

fn adds a number to each of the state's small tensors. The donated form reuses the memory of the state.
"""

import statistics
from typing import NamedTuple

import torch
from contest import Setting
from measure import digits, interleave, spread, wait_for

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

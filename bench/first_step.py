"""From nothing to the first step: a fresh process, no compiled code kept from before.

import torch and funcrec, make the state, the first call (staging and compiling), the second call
"""

import json
import os
import subprocess
import sys
import tempfile

from contest import Setting
from measure import digits

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = """
import contextlib, json, sys, time
marks = [time.perf_counter()]
def mark(): marks.append(time.perf_counter())
sys.path.insert(0, sys.argv[1])
import torch, funcrec
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
step = steps.funcrec_step(case, model, params, batches, sys.argv[4])
with ops.using(sys.argv[6]) if sys.argv[6] else contextlib.nullcontext():
    for _ in range(2):
        float(step.call())
        mark()
print(json.dumps([b - a for a, b in zip(marks, marks[1:])]))
"""
NAMES = ("import_s", "import_bench_s", "state_s", "first_call_s", "second_call_s")


def run(case: str, setting: Setting) -> dict:
    words = [
        HERE,
        case,
        str(setting.threads),
        setting.device,
        "tiny" if setting.tiny else "whole",
        setting.implementation or "",
    ]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    spent = json.loads(done.stdout.strip().splitlines()[-1])
    return {"shape": {"step": case}, "law": "green", **{k: digits(s) for k, s in zip(NAMES, spent, strict=True)}}


CASES = {name: name for name in ("dlrm-d64-b512-l1", "dcnv2")}
QUICK = ("dlrm-d64-b512-l1",)

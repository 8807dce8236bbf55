"""After an interrupted first call, a process can make another call: no import and no set-up of torch is cut in half."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import first_calls

import funcrec as fr

TESTS = Path(__file__).parents[1]


def wanted(call):
    """Return the values of the call in eager mode."""
    if call == "export":
        return first_calls.predict(first_calls.PARAMS, first_calls.BATCH).tolist()
    value, grads = fr.value_and_grad(first_calls.loss)(first_calls.PARAMS, first_calls.BATCH)
    return [float(value), *grads.dense["w"].tolist()]


@pytest.mark.parametrize("call", ["jit", "export"])
def test_a_call_behind_an_interrupted_one_is_as_the_first(tmp_path, call):
    """The handler's error passes unchanged. The next call gives the right result. In neither call does the main thread
    import anything of torch, because a handler could cut an import there in half."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "programs.first_calls", call, "80"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sent"]
    assert found["said"] == 'TooLateError("a handler\'s own words")'
    assert (found["then"], found["by_main"]) == (wanted(call), [])

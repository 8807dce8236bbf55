"""After an interrupted first call, a process can make another call: no import and no set-up of torch is cut in half."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import first_calls

TESTS = Path(__file__).parents[1]
WANT = {"jit": first_calls.jit, "export": first_calls.export}


@pytest.mark.parametrize("call", WANT)
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
    assert (found["then"], found["by_main"]) == (WANT[call](), [])

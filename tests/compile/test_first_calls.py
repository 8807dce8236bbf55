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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def run(*words):
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
            "PYTHONPATH": str(TESTS),
        }
        command = [sys.executable, "-m", "programs.first_calls", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize(("call", "number"), [("jit", 80), ("export", 80)])
def test_a_call_behind_an_interrupted_one_is_as_the_first(run, call, number):
    """The handler's error passes unchanged. The next call gives the right result."""
    found = run(call, number)
    assert found["sent"]
    assert found["said"] == 'TooLateError("a handler\'s own words")'
    assert found["then"] == WANT[call]()


@pytest.mark.parametrize("call", ["jit", "export"])
def test_the_main_thread_imports_nothing_of_torch(run, call):
    """The main thread imports nothing of torch, because a handler could cut an import there in half."""
    assert run(call, 1, "main") == {"sent": "", "said": "", "then": WANT[call]()}

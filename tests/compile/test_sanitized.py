"""Three programs of `fr.jit` run under one check of programs.sanitize_jit.

`make sanitize` runs all of its programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="pages without access are put around buffers by glibc's own names")
def test_compiled_programs_stay_in_their_buffers():
    """Compiled integer programs touch no page next to a buffer and give the integers of eager mode. The check finds
    each deliberate fault."""
    command = [sys.executable, "-m", "programs.sanitize_jit", "--mode", "guard", "--count", "3", "--batch", "3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("found\n") == 3 and "guard: 3 of arithmetic, 0 findings" in ended.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called by its name in glibc")
def test_what_is_padded_is_read_within_its_memory():
    """Masked vectors, which Inductor loads whole, read no byte next to a tensor that begins or ends with its page."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "programs.at_page_ends"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "right\n"), ended.stderr

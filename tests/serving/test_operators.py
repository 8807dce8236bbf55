"""The operators of a process without Python (kernels/serving/operators.cpp)."""

import os
import subprocess
import sys

import pytest
from programs import answers


@pytest.fixture(scope="session")
def library(built):
    return built / "libfuncrec_operators.so"


def ended(command, **environ):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=answers.ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr[-2000:]


def test_operators_without_python_are_the_references_own(library):
    """Each operator has the schema of kernels/library.py and the reference's results. No operator reads outside
    memory."""
    path = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    assert ended(["-m", "programs.other_operators", str(library)], PYTHONPATH=path) == (0, "")


@pytest.mark.parametrize("level", ["v3", "base"])
def test_every_instruction_set_can_be_forced(library, level):
    """FUNCREC_CPU chooses the compiled object, as in Python."""
    code = f"import torch; torch.ops.load_library({str(library)!r})\n"
    code += "torch.ops.funcrec_cpp.gather_rows(torch.eye(2), torch.tensor([1]))\n"
    code += "print([line.split()[-1] for line in open('/proc/self/maps') if '/_' in line])"
    status, said = ended(["-c", code], FUNCREC_CPU=level)
    assert status == 0 and f"/_{level}.so" in said, said

"""What a long loop needs of single numbers is computed before the loop."""

import re

import pytest
import torch
from torch import Tensor

import funcrec as fr
from funcrec.compile.backend import _inductor, _scalars

LONG = _scalars.LONG


@pytest.fixture
def texts(monkeypatch, tmp_path):
    """Return the list of C++ texts that are compiled from here on; none is read from disk."""
    found, build = [], _inductor.build
    monkeypatch.setattr(_inductor, "build", lambda text, *args: (found.append(text), build(text, *args)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return found


def powered(x: Tensor, step: Tensor) -> Tensor:
    return x * (1 - 0.9 ** step.double()).float()


def depths_of_powers(text: str) -> set[int]:
    """Return in how many loops each power stands, by the indents of the text's loops."""
    depths, open_loops = set(), []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        while open_loops and line.strip() and indent <= open_loops[-1] and not line.lstrip().startswith(("{", "}")):
            open_loops.pop()
        if re.match(r"\s*for\(", line):
            open_loops.append(indent)
        if "std::pow" in line:
            depths.add(len(open_loops))
    return depths


def test_a_power_of_a_number_stands_before_the_loop(texts):
    """A compiled power of a number f[] stands in no loop over the elements that it scales."""
    x, step = torch.randn(LONG), torch.tensor(3)
    assert torch.equal(fr.jit(powered)(x, step), powered(x, step))
    assert depths_of_powers(texts[-1]) == {0}


def test_a_power_of_each_member_stands_before_the_loop_of_its_elements(texts):
    """Members of vmap have a power each, and none stands in the loop over a member's elements."""
    x, steps = torch.randn(2, LONG), torch.tensor([3, 5])
    ensemble = torch.func.vmap(powered)
    assert torch.equal(fr.jit(ensemble)(x, steps), ensemble(x, steps))
    assert max(depths_of_powers(texts[-1])) <= 1


def test_a_short_loop_has_no_buffer_for_a_number(texts):
    """Eight elements do not pay for a buffer: the number stays in their expression."""
    x, step = torch.randn(8), torch.tensor(3)
    assert torch.equal(fr.jit(powered)(x, step), powered(x, step))
    assert "out_ptr1" not in texts[-1]

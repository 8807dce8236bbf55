"""fit's progress bar shows examples per second and the time left."""

from types import SimpleNamespace

import pytest
import torch

import funcrec as fr
from funcrec.loop import _progress


def test_the_bar_tells_examples_and_the_time_left(monkeypatch):
    """The rate counts the examples after the first step, which may compile. The time left is for all epochs."""
    ticks = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(_progress, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    work = SimpleNamespace(loader=[None] * 10, progress=True, mesh=None)
    batch = fr.Batch(None, torch.zeros(512))
    with _progress.Progress(work, epoch=1, done=4, epochs=3) as bar:
        for _ in range(3):
            bar.step(batch, 0)
        # the time of 3 + 10 steps, 2 s each
        assert bar.bar.postfix == "examples/s=256, left=00:26" and bar.bar.n == 7
        assert bar.words(4.0, 7) == {"examples/s": "256", "left": "00:26", "bad_ids": 7}


@pytest.mark.parametrize("batch, count", [
    (fr.Batch(None, torch.zeros(3)), 3), (fr.Batch(None, None, torch.zeros(2, 5)), 2), ({"x": torch.zeros(4, 1)}, 4),
    (torch.tensor(1.0), 0), (3, 0), (fr.Batch(None), 0),
], ids=str)  # fmt: skip
def test_the_bar_counts_what_a_batch_has(batch, count):
    """The bar counts the labels of a batch, or the rows of any tree of tensors. A batch of numbers counts 0."""
    assert _progress.num_examples(batch) == count

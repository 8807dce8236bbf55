"""Records are written to a store while a thread reads the rows of the next batches from it."""

import time

import pytest
import torch
from programs.cached_users import Both

import funcrec as fr


@pytest.mark.parametrize("depth", [1, 3])
def test_a_row_is_not_read_before_it_was_written(depth):
    """A row that leaves memory in one step and enters it in the next has its last numbers, however long the write of
    its record takes."""
    both, columns = Both("adam", depth=depth), lambda ids: {"user": [ids], "item": [[0]]}
    ids = [torch.randperm(300, generator=torch.Generator().manual_seed(i))[:100].tolist() for i in range(12)]
    batches = [fr.Batch(fr.KeyedJaggedTensor.from_lists(columns(x)), torch.ones(1)) for x in ids]
    store = both.store.store

    def slow_write(rows, records):
        time.sleep(0.05)  # the thread reads ahead meanwhile
        store.write(rows, records)

    object.__setattr__(both.store, "store", store._replace(write=slow_write))
    for batch, one in zip(batches, both.cached.ahead(both.state, batches), strict=True):
        both.whole, want = both.step(both.whole, batch)
        both.state, got = both.cached(both.state, one)
        assert torch.equal(got["loss"], want["loss"])
    both.check_all()

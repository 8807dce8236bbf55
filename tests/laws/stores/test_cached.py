"""A table of few rows in memory, whose other rows are in a store, trains as the whole table in memory."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

NUM_ROWS, DIM, CAPACITY = 700, 3, 128
CONFIG = fr.TableConfig("user", NUM_ROWS, DIM, initializer=fr.normal(0.5))
FEATURE, SPARSE = fr.FeatureConfig("user", table="user", pooling="mean"), fr.optim.rowwise_adagrad(lr=0.3)
WHOLE = fr.init(fr.key(0), [CONFIG])["user"]


def loss_fn(params, batch):
    vectors = fr.lookup(params.tables, batch.ids, [FEATURE])["user"]
    return (vectors - batch.label[:, None]).square().mean()


def rare(age, count):
    """Return a score by which the rows that were read least leave first."""
    return 100 * count - age


STEP = fr.train_step(loss_fn, sparse=SPARSE)


def steps_of(seed, count):
    """Return batches of ids that come again, with bags of 0 to 4."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        first = int(torch.randint(NUM_ROWS, (), generator=g))
        bags = [
            ((first + torch.randint(150, (n,), generator=g)) % NUM_ROWS).tolist()
            for n in torch.randint(5, (30,), generator=g).tolist()
        ]
        yield fr.Batch(fr.KeyedJaggedTensor.from_lists({"user": bags}), torch.randn(30, generator=g))


def served(state, store, turnover):
    """Write the records that leave the table, and read those that enter it: a row and its slot each."""
    table, slot = state.tables["user"], state.slots["user"]["sum"]
    out, into = turnover.rows[turnover.evicted], turnover.rows[turnover.admitted]
    store.write(turnover.old_ids[turnover.evicted], torch.cat([table[out], slot[out, None]], 1))
    read = store.read(turnover.new_ids[turnover.admitted])
    tables = {"user": table.index_copy(0, into, read[:, :DIM])}
    return dataclasses.replace(state, tables=tables, slots={"user": {"sum": slot.index_copy(0, into, read[:, DIM])}})


@pytest.mark.parametrize("kind", ["memory", "file"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**30), policy=st.sampled_from(["lru", rare]))
def test_a_cache_changes_no_bit(tmp_path_factory, kind, seed, policy):
    """Training with 128 rows in memory, the others in a store, gives the losses, rows and slots of training with the
    whole table, bit for bit, whatever the policy. First records are the rows that init draws."""
    first = lambda rows: torch.cat([WHOLE[rows], torch.zeros(len(rows), 1)], 1)
    path = tmp_path_factory.mktemp("store") / "rows"
    form = {"num_rows": NUM_ROWS, "width": DIM + 1, "init": first}
    store = fr.memory_store(**form) if kind == "memory" else fr.file_store(path, **form, durable=False)
    whole, cached = (STEP.init(fr.Params({"user": t}, {})) for t in (WHOLE, torch.zeros(CAPACITY, DIM)))
    cache, evicted = fr.vocabulary(CAPACITY, policy=policy), 0
    for batch in steps_of(seed, 8):
        whole, want = STEP(whole, batch)
        cache, rows, turnover = fr.admit(cache, batch.ids)
        assert not turnover.refused
        cached, got = STEP(served(cached, store, turnover), dataclasses.replace(batch, ids=rows))
        evicted += int(turnover.evicted.sum())
        assert torch.equal(got["loss"], want["loss"])
    assert evicted
    at, ids = torch.nonzero(cache.tags).flatten(), cache.entries[:, 0][cache.tags != 0]
    store.write(ids, torch.cat([cached.tables["user"][at], cached.slots["user"]["sum"][at, None]], 1))
    final = store.read(torch.arange(NUM_ROWS))
    store.close()
    assert_trees_close(final, torch.cat([whole.tables["user"], whole.slots["user"]["sum"][:, None]], 1), rtol=0, atol=0)

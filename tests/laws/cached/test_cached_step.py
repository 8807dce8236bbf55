"""Tables of few rows in memory, whose other rows are in stores, train as whole tables in memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.cached_users import CAPACITY, FEATURES, KEY, NUM_ROWS, OPTIMIZERS, Both, batches_of, loss_fn, rare

import funcrec as fr
from funcrec.testing import assert_trees_close


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    name=st.sampled_from(list(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    policy=st.sampled_from(["lru", rare]),
    depth=st.sampled_from([None, 1, 3]),
    is_file=st.booleans(),
    look_ahead=st.sampled_from([0, 0, 2, 9]),
)
@example(seed=0, name="clipped", dtype=torch.bfloat16, policy=rare, depth=1, is_file=False, look_ahead=0)
def test_a_cache_changes_no_bit(tmp_path_factory, seed, name, dtype, policy, depth, is_file, look_ahead):
    """Training with 128 rows in memory, the others in a store, gives the losses, rows and slots of training with whole
    tables, bit for bit, whatever the optimizer, the dtype, the policy, the store and the depth of reading ahead."""
    path = tmp_path_factory.mktemp("store") / "rows" if is_file else None
    both = Both(name, dtype, policy, depth or 1, path=path, look_ahead=look_ahead if policy == "lru" else 0)
    batches = batches_of(seed, 7)
    seen = batches if depth is None else both.cached.ahead(both.state, batches)
    for batch, one in zip(batches, seen, strict=True):
        both.whole, want = both.step(both.whole, batch)
        held = both.state.tables.vocabularies["users"].num_ids
        both.state, got = both.cached(both.state, one)
        assert torch.equal(got["loss"], want["loss"])
        counts, own = got["vocabularies"]["users"], batch.ids["user"].values[: int(batch.ids["user"].offsets[-1])]
        assert counts["hits"] + counts["admitted"] == len(own.unique()) and counts["refused"] == 0
        assert held + counts["admitted"] - counts["evicted"] == both.state.tables.vocabularies["users"].num_ids
    both.check_all()
    both.store.close()


@pytest.mark.parametrize(
    ("depth", "name", "dtype"), [(None, "rowwise_adagrad", torch.float32), (2, "clipped", torch.bfloat16)]
)
def test_a_compiled_donated_step_changes_no_bit(depth, name, dtype):
    """A jitted step that donates its state trains the same bits, in place. So it does with random rounding, and with
    gradients that are clipped by their norm. A use of the old state raises, and names the step."""
    both = Both(name, dtype, depth=depth or 1, jitted=True)
    first = both.state
    batches = batches_of(3, 8)
    at = both.state.tables["user"].data_ptr(), both.state.tables.vocabularies["users"].entries.data_ptr()
    for batch, one in zip(batches, batches if depth is None else both.cached.ahead(both.state, batches), strict=True):
        both.whole, want = both.step(both.whole, batch)
        both.state, got = both.cached(both.state, one)
        assert torch.equal(got["loss"], want["loss"])
    assert at == (both.state.tables["user"].data_ptr(), both.state.tables.vocabularies["users"].entries.data_ptr())
    with pytest.raises(fr.DonatedError, match="donated to call 1 of `cached_step`"):
        first.tables["user"] + 1
    both.check_all()


def test_rows_that_leave_before_they_are_read_are_read_late():
    """A row that leaves memory in a step that was not taken yet, and enters again later, has its last numbers."""
    both = Both(depth=4)
    ids = [[first + i for i in range(120)] for first in (0, 200, 0, 200, 0)]
    batches = [fr.Batch(fr.KeyedJaggedTensor.from_lists({"user": [x], "item": [[0]]}), torch.ones(1)) for x in ids]
    ahead, late = list(both.cached.ahead(both.state, batches)), 0
    for batch, one in zip(batches, ahead, strict=True):
        late += len(one.caches["users"].late)
        both.whole, want = both.step(both.whole, batch)
        both.state, got = both.cached(both.state, one)
        assert torch.equal(got["loss"], want["loss"])
    assert late > 100
    both.check_all()


def belady(steps, capacity):
    """Return for each step how many of its ids are in memory, if the ids leave that are used last again, or never."""
    held, hits = set(), []
    after = lambda i, k: next((j for j in range(k + 1, len(steps)) if i in steps[j]), len(steps))
    for k, ids in enumerate(steps):
        hits.append(len(held & ids))
        free = sorted(held - ids, key=lambda i: -after(i, k))
        held = (held | ids) - set(free[: max(0, len(held | ids) - capacity)])
    return hits


@pytest.mark.parametrize("depth", [1, 3])
def test_looking_ahead_over_all_batches_is_beladys_rule(depth):
    """With all batches known, the hits of a cache of one bucket are those of Belady's rule, and more than those of the
    rule that knows none."""
    batches, of_rules = batches_of(7, 12), []
    steps = [set(b.ids["user"].values[: int(b.ids["user"].offsets[-1])].tolist()) for b in batches]
    for look_ahead in (12, 0):
        both = Both("sgd", depth=depth, look_ahead=look_ahead)
        run = both.cached.run(both.state, batches)
        of_rules.append([int(metrics["vocabularies"]["users"]["hits"]) for _, metrics in run])
    assert of_rules[0] == belady(steps, CAPACITY) and sum(of_rules[0]) > sum(of_rules[1])
    with pytest.raises(ValueError, match="has a policy besides `look_ahead`"):
        both = Both(policy=rare, look_ahead=2)
        both.cached.ahead(both.state, batches)


def test_evaluation_reads_memory_and_stores_and_changes_neither():
    """`read` gives the rows of a batch, from memory or from the store: predictions are those of whole tables, bit for
    bit, compiled too, and neither the state nor the store changes."""
    both = Both()
    for batch in batches_of(1, 5):
        both.whole, _ = both.step(both.whole, batch)
        both.state, _ = both.cached(both.state, batch)
    before, records = fr.copy(both.state), both.store.store.read(torch.arange(NUM_ROWS))
    for batch in batches_of(2, 4):
        for fn in (loss_fn, fr.jit(loss_fn)):
            assert torch.equal(fn(*both.cached.read(both.state.params, batch)), fn(both.whole.params, batch))
    assert_trees_close(both.state, before, rtol=0, atol=0)
    assert torch.equal(both.store.store.read(torch.arange(NUM_ROWS)), records)


def test_ids_after_max_length_are_not_read():
    """An id after the `max_length` of a cache's features reads NaN in a lookup without it, as in a step; a lookup with
    it has the bits of whole tables."""
    of = lambda most: [fr.FeatureConfig("user", table="user", max_length=most)]
    config, sparse = fr.TableConfig("user", NUM_ROWS, 2), fr.optim.sgd(0.1)
    store = fr.table_store([config], sparse, key=KEY)
    tables = fr.cached_tables({}, {"users": fr.CacheConfig(store, CAPACITY, of(1))})
    ids = fr.KeyedJaggedTensor.from_lists({"user": [[500, 0], [7]]})
    read = lambda most: lambda params, ids: fr.lookup(params.tables, ids, of(most)).values
    step = fr.train_step(lambda *given: read(1)(*given).sum(), sparse=sparse, admit=False)
    found = fr.cached_step(step, {"users": store}).read(fr.Params(tables, {}), ids)
    assert torch.equal(read(1)(*found), read(1)(fr.Params(fr.init(KEY, [config]), {}), ids))
    assert read(2)(*found).isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_tables_are_gathered_into_memory_or_files(tmp_path, dtype):
    """`gather` gives all rows, those in memory and those in the store, and changes neither. Its files map to the same
    bits, and an export of them answers as whole tables do."""
    both = Both(dtype=dtype)
    for batch in batches_of(1, 4):
        both.whole, _ = both.step(both.whole, batch)
        both.state, _ = both.cached(both.state, batch)
    before = fr.copy(both.state)
    for params in (both.cached.gather(both.state.params), both.cached.gather(both.state.params, tmp_path / "rows")):
        assert all(torch.equal(params.tables[n], x) for n, x in both.whole.tables.items())
    predict = lambda params, batch: {"vectors": fr.lookup(params.tables, batch.ids, FEATURES).values}
    if dtype == torch.float32:
        fr.export(predict, params, batches_of(1, 1)[0], tmp_path / "package")
        batch = batches_of(2, 1)[0]
        got = fr.load_package(tmp_path / "package")(batch)
        assert_trees_close(got, predict(both.whole.params, batch), rtol=0, atol=0)
    assert_trees_close(both.state, before, rtol=0, atol=0)
    with pytest.raises(FileExistsError, match="rows` cannot be made"):
        both.cached.gather(both.state.params, tmp_path / "rows")
    with pytest.raises(ValueError, match="not the one that store"):
        both.cached.gather(both.cached.init(fr.Params(both.first, torch.ones(()))).params)


def test_gathered_tables_of_like_names_have_files_of_their_own(tmp_path):
    """Tables whose names differ in a character that no file name has are gathered into different files."""
    configs = [fr.TableConfig(name, 200, 2, initializer=fr.normal(1.0)) for name in ("a/b", "a_b", "a%2Fb")]
    read = [fr.FeatureConfig(c.name, table=c.name, column="id") for c in configs]
    store = fr.table_store(configs, OPTIMIZERS["sgd"], key=KEY)
    tables = fr.cached_tables({}, {"ids": fr.CacheConfig(store, CAPACITY, read)})
    loss = lambda params, ids: fr.lookup(params.tables, ids, read).values.sum()
    step = fr.cached_step(fr.train_step(loss, sparse=OPTIMIZERS["sgd"], admit=False), {"ids": store})
    found = step.gather(step.init(fr.Params(tables, {})).params, tmp_path / "rows").tables
    want = fr.init(KEY, configs)
    assert all(torch.equal(found[n], want[n]) for n in want)


def test_read_rows_are_for_their_batch_alone(tmp_path):
    """Tables of a batch's rows refuse other columns, losses over all items, exports and meshes: their rows are not
    those of ids."""
    both, batch = Both(), batches_of(1, 1)[0]
    params, of_rows = both.cached.read(both.state.params, batch)
    other = [fr.FeatureConfig("other", table="user", column="item")]
    with pytest.raises(ValueError, match="reads a table of other ids"):
        fr.lookup(params.tables, of_rows.ids, other)
    with pytest.raises(TypeError, match="rows of one batch"):
        fr.export(lambda p, b: fr.lookup(p.tables, b.ids, FEATURES).values, params, of_rows, tmp_path / "package")
    plan = fr.Plan({c.name: fr.row_wise("x") for c in both.configs})
    with pytest.raises(TypeError, match="are not placed"):
        fr.shard_tables(params.tables, plan, fr.Mesh.emulated(x=2))
    items = fr.models.sasrec([both.configs[0]], fr.FeatureConfig("user", table="user", pooling="none"), max_length=3)
    with pytest.raises(ValueError, match="a table with a row for each item"):
        items.items(params)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "compiled"])
def test_ids_of_another_read_give_nan(jit):
    """Tables of one read with the batch of another read, before or after it, or with the batch itself, give NaN; their
    own batch gives the loss. Bags may be empty, and the columns may have different numbers of bags."""
    both, fn = Both(), fr.jit(loss_fn) if jit else loss_fn
    first, second = batches_of(1, 2)
    (old, of_old), (new, of_new) = (both.cached.read(both.state.params, x) for x in (first, second))
    for params, batch in ((old, of_new), (new, of_old), (old, first), (new, second)):
        assert fn(params, batch).isnan()
    assert torch.equal(fn(old, of_old), fn(both.whole.params, first))
    assert torch.equal(fr.checked(loss_fn)(new, of_new), loss_fn(both.whole.params, second))
    grads = fr.value_and_grad(loss_fn)(new, of_new)[1]
    assert_trees_close(grads.dense, fr.value_and_grad(loss_fn)(both.whole.params, second)[1].dense, rtol=0, atol=0)


def test_rows_that_are_not_in_memory_read_nan():
    """Without `cached_step` a lookup of rows that are not in memory gives NaN, also compiled."""
    both = Both()
    batch = batches_of(1, 1)[0]
    for fn in (loss_fn, fr.jit(loss_fn)):
        assert fn(both.state.params, batch).isnan()


def test_empty_batches_train():
    """A batch without ids, and one without bags, change no row of a cache."""
    both = Both()
    for users in ([[], []], [[]]):
        ids = fr.KeyedJaggedTensor.from_lists({"user": users, "item": [[1]] * len(users)})
        batch = fr.Batch(ids, torch.ones(len(users)))
        both.whole, want = both.step(both.whole, batch)
        both.state, got = both.cached(both.state, batch)
        assert_trees_close(got["loss"], want["loss"], rtol=0, atol=0)
    both.check_all()


# -- interrupted calls -------------------------------------------------------------------------------------------------


class Stop(Exception):
    """What a loss raises."""


def test_a_step_that_fails_leaves_the_state_and_the_store():
    """If the loss raises, the old state goes on with the store, although rows were written to it."""
    both, batches = Both(), batches_of(4, 6)

    def fails(params, batch):
        raise Stop

    failing = fr.cached_step(fr.train_step(fails, sparse=OPTIMIZERS["adam"], admit=False), {"users": both.store})
    for batch in batches:
        with pytest.raises(Stop):
            failing(both.state, batches_of(9, 1)[0])
        both.whole, want = both.step(both.whole, batch)
        both.state, got = both.cached(both.state, batch)
        assert torch.equal(got["loss"], want["loss"])
    both.check_all()


def test_a_loop_that_ends_early_goes_on():
    """Batches that were read ahead and not taken change nothing: another loop begins at the state."""
    both, batches = Both(depth=3), batches_of(6, 9)
    at = 0
    while at < 9:
        for one in both.cached.ahead(both.state, batches[at:]):
            both.whole, want = both.step(both.whole, batches[at])
            both.state, got = both.cached(both.state, one)
            assert torch.equal(got["loss"], want["loss"])
            at += 1
            if at % 2:
                break
    both.check_all()


PROGRAM = """
import sys, torch, funcrec as fr
from programs.cached_users import Both, batches_of
torch.set_num_threads(1)
folder, both = sys.argv[1], Both("rowwise_adagrad", path=sys.argv[1] + "/rows")
if (newest := fr.latest(folder + "/states")) is not None:
    both.state = fr.load(newest, like=both.state)
    both.cached.rollback(both.state)
for batch in batches_of(8, 40)[int(both.state.step):]:
    both.state, _ = both.cached(both.state, batch)
    if int(both.state.step) % 3 == 0:
        both.cached.commit(both.state)
        fr.save(folder + "/states", both.state, step=int(both.state.step), keep=2)
        print(int(both.state.step), flush=True)
both.cached.commit(both.state)
fr.save(folder + "/end", both.state)
"""


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    """A run that SIGKILL ends at random moments, and that goes on each time from its last saved state, ends with the
    bits of whole tables."""
    (tmp_path / "states").mkdir()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for moment in range(3):
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, env=env)
        for _ in range(1 + moment % 2):
            child.stdout.readline()
        if moment < 2:
            child.send_signal(signal.SIGKILL)
        assert child.wait() == (-signal.SIGKILL if moment < 2 else 0)
    both = Both("rowwise_adagrad", path=tmp_path / "rows")
    for batch in batches_of(8, 40):
        both.whole, _ = both.step(both.whole, batch)
    state = fr.load(tmp_path / "end", like=both.state)
    assert torch.equal(state.dense, both.whole.dense)
    assert torch.equal(both.store.store.read(torch.arange(NUM_ROWS)), both.records())

"""Logs of tables whose rows belong to ids that come and go: rewind and delta include what vocabularies changed."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import daily_ids as daily

import funcrec as fr
from funcrec.testing import assert_trees_close

SPARSE = {"sgd": fr.optim.sgd(0.3), "adam": fr.optim.adam(0.1), "rowwise_adagrad": fr.optim.rowwise_adagrad(lr=0.3)}
KINDS = {
    "full buckets": {"users": fr.vocabulary(128, unknown=2), "items": fr.vocabulary(128, policy="lfu", admit=2)},
    "ages": {
        "users": fr.vocabulary(128, ttl=2, admit=0.7), "items": fr.vocabulary(128, policy="distance_lfu", admit=3),
    },
    "scores": {
        "users": fr.vocabulary(128, policy=lambda ages, counts: counts - ages, seed=3),
        "items": fr.vocabulary(256, policy="lfu", unknown=1),
    },
}  # fmt: skip
ROWS = {"user": 128, "item": 128, "day": 7}


def logged(name="adam", *, steps=6, rows=ROWS, **where):
    return fr.logged(daily.step(SPARSE[name], **where), steps=steps, rows=rows if steps else None)


def begun(step, kind="full buckets", dtype=torch.float32):
    tables = fr.tree.to(daily.dynamic(**KINDS[kind]), dtype)
    return step.init(fr.Params(tables, torch.ones((), dtype=dtype)))


def states(step, run, batches):
    """Return (copies of the states before each batch and of the last state, the last value, the sums of counts)."""
    before, sums = [], {}
    for batch in batches:
        before.append(fr.copy(run.state))
        run, metrics = step(run, batch)
        for own in metrics["vocabularies"].values():
            sums = {k: sums.get(k, 0) + int(x) for k, x in own.items()}
    return [*before, fr.copy(run.state)], run, sums


def same(got, want):
    assert_trees_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**30), size=st.sampled_from([8, 60]), name=st.sampled_from([*SPARSE]))
def test_any_history_is_undone(kind, seed, size, name):
    """rewind gives the state k steps ago bit for bit, vocabularies included. The log changes no bit of a state, and
    training goes on from the rewound state to the same bits."""
    step, given = logged(name), list(daily.batches(seed, 8, size))
    before, run, sums = states(step, begun(step, kind), given)
    alone, plain = before[0], daily.step(SPARSE[name])
    for batch in given:
        alone, _ = plain(alone, batch)
    same(alone, before[8])
    assert sums["admitted"] and (size == 8 or sums["evicted"])
    for k in range(1, 7):
        back = fr.rewind(run, k)
        same(back.state, before[8 - k])
    for batch in given[2:]:
        back, _ = step(back, batch)
    same(back.state, before[8])
    same(fr.rewind(fr.rewind(back, 2), 3).state, before[3])


def test_a_compiled_log_writes_in_place():
    """A compiled step whose state is donated writes tables, slots, vocabularies and log in place. Its steps are undone
    bit for bit, and rewind with donate=True writes in place, too."""
    step = logged("adam")
    fast = fr.jit(step, donate=("state",))
    run, given = begun(step), list(daily.batches(3, 6, 60))
    places = lambda run: [x.data_ptr() for x in fr.tree.leaves((dict(run.state.tables), run.state.slots,
        [(v.entries, v.tags, v.sketch) for v in run.state.tables.vocabularies.values()],
        [(t.old, t.last) for t in run.log.touched]))]  # fmt: skip
    at = places(run)
    before, run, sums = states(fast, run, given)
    assert sums["evicted"] and places(run) == at and fast.num_compiled() == 1
    back = fr.rewind(run, 4)
    same(back.state, before[2])
    back, _ = step(back, given[2])
    same(back.state.tables.vocabularies, before[3].tables.vocabularies)
    back = fr.rewind(run, 3, donate=True)
    assert places(back) == at
    same(back.state, before[3])


def test_rows_that_no_gradient_names_come_back():
    """A row that passes to a new id is undone even if the loss does not read it."""
    read = [daily.FEATURES[0]]
    loss = lambda params, batch: (fr.lookup(params.tables, batch.ids, read).values * params.dense).sum()
    step = fr.logged(fr.train_step(loss, sparse=SPARSE["adam"]), steps=6, rows=128)
    before, run, sums = states(step, begun(step), daily.batches(4, 6, 60))
    assert sums["evicted"]
    for k in range(7):
        same(fr.rewind(run, k).state, before[6 - k])
    tables = before[2].tables
    same(fr.apply_delta(tables, fr.delta(run, 2)), run.state.tables)


@pytest.mark.parametrize("shape", ["cut bags", "shared bags", "two batches"])
def test_other_forms_of_a_batch_are_undone(shape):
    """Ids beyond `max_length`, which no step admits, ids of shared bags, and columns in several values are undone. A
    Delta has the entries of the ids that the steps saw, and no others."""
    v, most = fr.vocabulary(128, admit=2), 1 if shape == "cut bags" else None
    config, read = fr.TableConfig("user", 128, 2), [
        fr.FeatureConfig(c, table="user", max_length=most) for c in ("user", "friends")
    ]  # fmt: skip
    follows = {"users": fr.VocabularyConfig(v, [config], read)}
    tables = fr.dynamic_tables(fr.init(daily.KEY, [config]), follows, key=daily.KEY)
    apart = lambda ids: [ids.permute(["user"]), ids.permute(["friends"])] if shape == "two batches" else [ids]
    loss = lambda p, each: sum(
        fr.lookup(p.tables, x, [f for f in read if f.key in x.keys]).values.square().sum() for x in each
    )
    step = fr.logged(fr.train_step(loss, sparse=fr.optim.sgd(0.1)), steps=6, rows=128)
    run = step.init(fr.Params(tables, {}))
    given = [apart(fr.dedup_bags(b.ids) if shape == "shared bags" else b.ids) for b in daily.batches(3, 6, 60)]
    before = [fr.copy(run.state)]
    for each in given:
        run, _ = step(run, each)
        before.append(fr.copy(run.state))
    for k in range(7):
        same(fr.rewind(run, k).state, before[6 - k])
        same(fr.apply_delta(before[6 - k].tables, fr.delta(run, 6 - k)), run.state.tables)
    was, now = (x.tables.vocabularies["users"] for x in before[5:7])
    changed = (was.entries != now.entries).any(1).nonzero()[:, 0]
    assert torch.equal(fr.delta(run, 5).vocabularies["users"].rows, changed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_come_back(dtype):
    """Tables of f64 and bf16 are undone bit for bit."""
    step = logged("sgd")
    given = [fr.tree.to(x, dtype) for x in daily.batches(6, 5, 40)]
    before, run, _ = states(step, begun(step, dtype=dtype), given)
    for k in range(6):
        same(fr.rewind(run, k).state, before[5 - k])


def test_scanned_steps_and_members_are_undone():
    """Steps of `scan`, and the members of an ensemble, are undone like single steps."""
    step, given = logged(), list(daily.batches(7, 4, 40))
    before, _, _ = states(step, begun(step), given)
    run, _ = fr.scan(step, begun(step), fr.tree.map(lambda *x: torch.stack(x), *given))
    for k in range(5):
        same(fr.rewind(run, k).state, before[4 - k])
    tables = daily.dynamic(**KINDS["full buckets"])
    of_key = lambda key: step.init(fr.Params(tables, torch.ones(())), key)
    runs, many = torch.func.vmap(of_key)(fr.split(fr.key(1), 2)), torch.func.vmap(step, in_dims=(0, None))
    first = fr.copy(runs.state)
    for batch in given[:2]:
        runs, _ = many(runs, batch)
    same(torch.func.vmap(lambda run: fr.rewind(run, 2))(runs).state, first)


def test_batches_without_ids_are_undone():
    """A step whose columns are empty, and one without examples, are undone."""
    step, made = logged(), []
    for n in (0, 2):
        lists = {c: [[]] * n for c in daily.COLUMNS}
        made.append(fr.Batch(fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64), torch.zeros(n)))
    full = next(daily.batches(1, 1))
    before, run, _ = states(step, begun(step), [full, *made, full])
    for k in range(5):
        same(fr.rewind(run, k).state, before[4 - k])


def test_ids_in_padding_change_nothing():
    """The log of a batch with garbage in its padding is that of a batch with zeros there."""
    step, (batch,) = logged(), daily.batches(2, 1)
    end = int(batch.ids.offsets[-1])
    dirty = batch.ids.values.clone()
    dirty[end:] = torch.arange(len(dirty) - end) * 10**15 - 5
    clean = torch.where(torch.arange(len(dirty)) < end, dirty, 0)
    runs = [step(begun(step), dataclasses.replace(batch, ids=dataclasses.replace(batch.ids, values=x)))[0]
            for x in (dirty, clean)]  # fmt: skip
    same(*runs)
    same(fr.rewind(runs[0], 1).state, begun(step).state)


def test_a_log_that_was_saved_goes_on(tmp_path):
    """A Logged and its Delta are saved and loaded bit for bit."""
    step, given = logged(), list(daily.batches(8, 4, 40))
    before, run, _ = states(step, begun(step), given)
    fr.save(tmp_path / "run.pt", run), fr.save(tmp_path / "delta.pt", fr.delta(run, 1))
    loaded = fr.load(tmp_path / "run.pt")
    same(loaded, run)
    same(fr.rewind(loaded, 3).state, before[1])
    same(fr.apply_delta(before[1].tables, fr.load(tmp_path / "delta.pt")), run.state.tables)


# -- deltas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**30), steps=st.sampled_from([0, 3]))
def test_deltas_make_the_tables_of_now(kind, seed, steps):
    """apply_delta of the delta since any version gives the present tables and vocabularies bit for bit, also after a
    rewind."""
    step = logged("rowwise_adagrad", steps=steps)
    run, then = begun(step, kind), []
    for batch in daily.batches(seed, 6, 40):
        then.append((int(run.log.version), run.state.tables))
        run, _ = step(run, batch)
    for now in [run, fr.rewind(run, 2)] if steps else [run]:
        for version, tables in then:
            same(fr.apply_delta(tables, fr.delta(now, version)), now.state.tables)
    assert all(x.rows.numel() == 0 for x in fr.delta(run, int(run.log.version)).vocabularies.values())


def test_a_delta_names_the_entries_that_changed():
    """A Delta has the entries of the ids that the steps saw, and no others. An evicted id is then unknown."""
    step = logged(steps=0)
    run = begun(step)
    batch = next(daily.batches(0, 1))
    lists = {"user": [[5, 7], [5]], "friends": [[9], []], "item": [[3], [3]], "day": [[1], [1]]}
    one = fr.Batch(fr.KeyedJaggedTensor.from_lists(lists).pad_to(batch.ids.capacity), torch.zeros(2))
    run, _ = step(run, one)
    first = fr.delta(run)
    found = fr.find(run.state.tables.vocabularies["users"], torch.tensor([5, 7, 9])).sort().values
    assert torch.equal(first.vocabularies["users"].rows, found)
    assert first.vocabularies["items"].rows.numel() == 1 and first.vocabularies["items"].buckets.numel() <= 1
    assert repr(first).startswith("Delta(user: ") and "users: 3 entries" in repr(first)
    server = fr.apply_delta(daily.dynamic(**KINDS["full buckets"]), first)
    for i in range(1, 5):
        lists = {"user": [list(range(100 * i, 100 * i + 90))], "friends": [[]], "item": [[]], "day": [[]]}
        run, _ = step(run, fr.Batch(fr.KeyedJaggedTensor.from_lists(lists), torch.zeros(1)))
    server = fr.apply_delta(server, fr.delta(run, first))
    now = fr.find(server.vocabularies["users"], torch.tensor([5, 405]))
    assert now[0] >= 128 and now[1] < 128
    same(server, run.state.tables)


def test_a_donated_delta_is_written_in_place():
    """`fr.jit(fr.apply_delta, donate=("tables",))` writes tables and vocabularies in place."""
    step = logged(steps=0)
    run = begun(step)
    then = fr.copy(run.state.tables)
    for batch in daily.batches(9, 3, 40):
        run, _ = step(run, batch)
    places = lambda tables: [x.data_ptr() for x in [*tables.values(),
        *(x for v in tables.vocabularies.values() for x in (v.entries, v.tags))]]  # fmt: skip
    at = places(then)
    got = fr.jit(fr.apply_delta, donate=("tables",))(then, fr.delta(run))
    same(got, run.state.tables)
    assert places(got) == at


# -- refusals --------------------------------------------------------------------------------------------------------


def of_a_name():
    entry = "vocabularies['users']"
    tables = daily.dynamic(**KINDS["full buckets"])
    step = logged(rows=128)
    step.init(
        fr.Params(dataclasses.replace(tables, tables={**tables.tables, entry: torch.zeros(3, 2)}), torch.ones(()))
    )


def delta_to(make):
    def call():
        step = logged(steps=0)
        run, _ = step(begun(step), next(daily.batches(0, 1)))
        fr.apply_delta(make(run.state.tables), fr.delta(run))

    return call


def with_entries(**fields):
    def call():
        step = logged(steps=0)
        run, _ = step(begun(step), next(daily.batches(0, 1)))
        delta = fr.delta(run)
        other = {n: dataclasses.replace(x, **fields) if fields else 3 for n, x in delta.vocabularies.items()}
        fr.apply_delta(run.state.tables, dataclasses.replace(delta, vocabularies=other))

    return call


def without_rows():
    step = logged(rows=2)
    run, _ = step(begun(step), next(daily.batches(0, 1)))
    fr.rewind(run)


other_users = lambda v: lambda t: dataclasses.replace(t, vocabularies={**t.vocabularies, "users": v})
REFUSED = {
    "admission apart": (lambda: begun(logged(admit=False)), "does not see those of `admission`"),
    "a table's name": (of_a_name, "has the name of a vocabulary's entries"),
    "plain tables": (delta_to(dict), "vocabulary 'users' does not exist"),
    "another size": (delta_to(other_users(fr.vocabulary(256, unknown=2))), "are not its vocabulary's"),
    "another seed": (delta_to(other_users(fr.vocabulary(128, unknown=2, seed=1))), "are not its vocabulary's"),
    "a sketch": (delta_to(other_users(fr.vocabulary(128, unknown=2, admit=2))), "are not its vocabulary's"),
    "no entries": (with_entries(), "has no entries"),
    "rows of floats": (with_entries(rows=torch.ones(3)), "rows does not fit"),
    "no tags": (with_entries(tags=torch.zeros(1, dtype=torch.uint8)), "tags does not fit"),
    "rows outside": (
        with_entries(
            rows=torch.tensor([128]),
            tags=torch.zeros(1, dtype=torch.uint8),
            entries=torch.zeros(1, 2, dtype=torch.int64),
        ),
        "are not among its vocabulary's",
    ),
    "too many rows": (without_rows, "a step touched more rows than were kept"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_log_does_not_take_is_refused(name):
    """A log that would not see every change, and a Delta of another vocabulary, raise before any work."""
    call, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError, KeyError), match=words):
        call()

"""Tables whose rows belong to ids that come and go are trained, read, saved and exported as other tables are."""

import contextlib
import dataclasses

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import daily_ids as daily
from programs.as_staged import staged_only

import funcrec as fr
from funcrec.testing import assert_trees_close

SPARSE = {
    "sgd": fr.optim.sgd(0.3), "adam": fr.optim.adam(0.1), "rowwise_adagrad": fr.optim.rowwise_adagrad(lr=0.3),
    "clipped": fr.optim.clip(fr.optim.sgd(3.0), max_norm=0.3),
    "rounded": fr.optim.stochastic_rounding(fr.optim.adam(0.1), key=fr.key(3)),
}  # fmt: skip
ROOMY = {"users": fr.vocabulary(1024), "items": fr.vocabulary(1024, policy="lfu", unknown=2)}
LARGE = lambda i: i * 10**14 - 7  # ids far beyond any table, and a negative one


@pytest.mark.parametrize("name", ["clipped", "rounded", "rowwise_adagrad"])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**30))
def test_with_room_for_all_ids_training_is_that_of_static_tables(name, seed):
    """With room for all ids, losses are those of tables with a row for each id, bit for bit. So they are with gradients
    that are clipped by their norm, and 16-bit tables that are rounded at random."""
    step, dtype = daily.step(SPARSE[name]), torch.bfloat16 if name == "rounded" else torch.float32
    wanted, _, _ = daily.run(step, daily.static(dtype), daily.batches(seed, 4))
    got, state, _ = daily.run(step, daily.dynamic(**ROOMY, dtype=dtype), daily.batches(seed, 4))
    assert torch.equal(got, wanted)
    assert int(state.tables.vocabularies["users"].num_ids) > 50


@settings(max_examples=6)
@given(seed=st.integers(0, 2**30), size=st.sampled_from([16, 96]))
def test_a_step_admits_renews_and_trains(seed, size):
    """A step is `admit` of each vocabulary's columns, `renew` of its tables, and a step of plain tables with rows in
    place of ids. This also holds when rows change hands, and when ids are refused."""
    sparse = SPARSE["adam"]
    step = daily.step(sparse)
    dynamic = step.init(fr.Params(daily.dynamic(), torch.ones(())))
    plain = step.init(fr.Params(dict(daily.dynamic().tables), torch.ones(())))
    held, seen = {"users": daily.USERS, "items": daily.ITEMS}, {"evicted": 0, "refused": 0}
    user, item, _ = daily.configs(daily.USERS.num_embeddings, daily.ITEMS.num_embeddings)
    for batch in daily.batches(seed, 5, size):
        tables, slots, rows, counts = plain.tables, plain.slots, {}, {}
        for name, keys, config in (("users", ["user", "friends"], user), ("items", ["item"], item)):
            held[name], rows[name], turnover = fr.admit(held[name], batch.ids.permute(keys))
            tables, slots = fr.renew(tables, slots, turnover, sparse, daily.KEY, [config])
            counts[name] = {n: getattr(turnover, n).sum() for n in ("hits", "admitted", "evicted", "refused")}
            for n in seen:
                seen[n] += int(counts[name][n])
        ids = fr.KeyedJaggedTensor.concat([rows["users"], rows["items"], batch.ids.permute(["day"])])
        given_rows = dataclasses.replace(batch, ids=ids.permute(batch.ids.keys).unpad().pad_to(batch.ids.capacity))
        plain, wanted = step(dataclasses.replace(plain, tables=tables, slots=slots), given_rows)
        dynamic, got = step(dynamic, batch)
        assert torch.equal(got["loss"], wanted["loss"])
        assert_trees_close(dict(got["vocabularies"]), counts, rtol=0, atol=0)
    assert_trees_close(dynamic.tables.tables, plain.tables, rtol=0, atol=0)
    assert_trees_close(dynamic.slots, plain.slots, rtol=0, atol=0)
    assert_trees_close(dynamic.tables.vocabularies, held, rtol=0, atol=0)
    assert seen["refused"] and (size == 16 or seen["evicted"])


@pytest.mark.parametrize("donate", [(), ("state",)])
def test_a_compiled_step_is_the_step(donate):
    """A compiled and donated step, and a staged one, give the vocabularies of the eager step bit for bit, and close
    tables."""
    step, given = daily.step(SPARSE["adam"]), list(daily.batches(3, 4))
    wanted, eager, _ = daily.run(step, daily.dynamic(), given)
    compiled = fr.jit(step, donate=donate)
    state, losses = step.init(fr.Params(daily.dynamic(), torch.ones(()))), []
    with contextlib.nullcontext() if donate else staged_only():
        for batch in given:
            state, metrics = compiled(state, batch)
            losses.append(metrics["loss"])
    assert_trees_close(state.tables.vocabularies, eager.tables.vocabularies, rtol=0, atol=0)
    assert_trees_close((torch.stack(losses), state.tables.tables), (wanted, eager.tables.tables), rtol=1e-4, atol=1e-5)


def test_admission_apart_is_that_of_the_step():
    """`admission` and a step with admit=False give the states and metrics of the step that admits, bit for bit.
    Compiled and donated, both write in place. Without `admission` the vocabularies stay as they are."""
    step, given = daily.step(SPARSE["adam"]), list(daily.batches(8, 3))
    _, wanted, last = daily.run(step, daily.dynamic(), given)
    apart = daily.step(SPARSE["adam"], admit=False)
    admit, first = fr.admission(apart), lambda: apart.init(fr.Params(daily.dynamic(), torch.ones(())))
    for is_compiled in (False, True):
        one, two = (fr.jit(f, donate=("state",)) for f in (admit, apart)) if is_compiled else (admit, apart)
        state, close = first(), {"rtol": 1e-4, "atol": 1e-5} if is_compiled else {"rtol": 0, "atol": 0}
        for batch in given:
            at = state.tables["user"].data_ptr()
            state, counts = one(state, batch)
            state, metrics = two(state, batch)
            assert not is_compiled or state.tables["user"].data_ptr() == at
        assert_trees_close(state, wanted, **close)
        assert_trees_close({**counts, **metrics}, last, **close)
    frozen, _ = apart(first(), given[0])
    assert_trees_close(frozen.tables.vocabularies, first().tables.vocabularies, rtol=0, atol=0)


def test_a_step_searches_its_ids_once(monkeypatch):
    """The lookups of a step take the rows that it admitted. Lookups of other ids, or in vocabularies that the step did
    not change, search them. The losses are the same, bit for bit."""
    every, searches, search = {}, [], ops.find_columns
    monkeypatch.setattr(ops, "find_columns", lambda *given, **how: searches.append(given) or search(*given, **how))
    copied = lambda batch: dataclasses.replace(batch, ids=dataclasses.replace(batch.ids, values=batch.ids.values + 0))
    before = daily.dynamic()
    losses = {
        "its own ids": daily.loss_fn,
        "copied ids": lambda params, batch: daily.loss_fn(params, copied(batch)),
        "both vocabularies": lambda params, batch: (
            daily.loss_fn(params, batch) + 0 * daily.loss_fn(dataclasses.replace(params, tables=before), batch)
        ),
    }
    for name, loss_fn in losses.items():
        searches.clear()
        step = fr.train_step(loss_fn, sparse=SPARSE["adam"], dense=fr.optim.dense(torch.optim.SGD, lr=0.01))
        got, *_ = daily.run(step, daily.dynamic(), daily.batches(3, 2))
        assert bool(searches) == (name != "its own ids")
        every[name] = got
    assert all(torch.equal(x, every["its own ids"]) for x in every.values())


def test_evaluation_finds_and_changes_nothing():
    """A lookup gives the rows that `find` gives, zeros or shared rows for other ids, and no new vocabulary."""
    _, state, _ = daily.run(daily.step(SPARSE["sgd"]), daily.dynamic(), daily.batches(0, 3, ids_of=LARGE))
    tables, ids = state.tables, fr.KeyedJaggedTensor.from_lists({"user": [[LARGE(1)], [5], []], "item": [[], [5], [6]]})
    before = fr.copy(tables)
    read = [fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item")]
    got = fr.lookup(tables, ids, read)
    known = fr.find(tables.vocabularies["users"], torch.tensor([LARGE(1), 5]))
    assert torch.equal(got["user"][:2], tables["user"][known])
    assert known[1] == daily.USERS.capacity  # the row of unknown ids
    assert not got["item"].any()
    assert_trees_close(tables, before, rtol=0, atol=0)
    metrics = {"mse": fr.metrics.mse()}
    assert fr.evaluate(daily.predict, state.params, list(daily.batches(0, 2, ids_of=LARGE)), metrics)["mse"] > 0


def test_every_number_is_an_id():
    """`checked`, `validate` and `fit` take any number as an id of a vocabulary, and refuse it as a row elsewhere."""
    step, given = daily.step(SPARSE["sgd"]), list(daily.batches(1, 2, ids_of=LARGE))
    _, state, _ = daily.run(step, daily.dynamic(), given)
    assert torch.equal(fr.checked(daily.predict)(state.params, given[0]), daily.predict(state.params, given[0]))
    fr.validate(given[0].ids, daily.FEATURES, state.tables)
    first = step.init(fr.Params(daily.dynamic(), torch.ones(())))
    done = fr.fit(step, first, given, epochs=1, progress=False, on_bad_ids="raise")
    assert done.history[0]["steps"] == 2
    wrong = fr.KeyedJaggedTensor.from_lists({"user": [[1]], "friends": [[1]], "item": [[1]], "day": [[9]]})
    with pytest.raises(fr.CheckError, match="feature 'day' has ids outside table 'day'"):
        fr.validate(wrong, daily.FEATURES, state.tables)


def test_transposes_and_gradients_name_rows():
    """`lookup_transpose` and `value_and_grad` give gradients of the rows that the ids have."""
    _, state, _ = daily.run(daily.step(SPARSE["sgd"]), daily.dynamic(), daily.batches(2, 2))
    ids, read = next(daily.batches(2, 1)).ids, [daily.FEATURES[0], daily.FEATURES[3]]
    d = fr.lookup(state.tables, ids, read)
    loss = lambda params, ids: (fr.lookup(params.tables, ids, read).values * d.values).sum()
    by_loss = fr.value_and_grad(loss)(state.params, ids)[1].tables
    by_hand = fr.lookup_transpose(d, ids, read, state.tables)
    rows = fr.find(state.tables.vocabularies["users"], ids.permute(["user"]))
    wanted = fr.lookup_transpose(fr.KeyedTensor.from_dict({"user": d["user"]}), rows, read[:1], dict(state.tables))
    for found in (by_loss, by_hand):
        assert torch.equal(found["user"].to_dense(), wanted["user"].to_dense())


def test_several_steps_members_and_parts():
    """`scan`, `vmap` over states and micro-batches give what single steps, single states and whole batches give."""
    step, given = daily.step(SPARSE["adam"]), list(daily.batches(5, 2))
    losses, last, _ = daily.run(step, daily.dynamic(), given)
    first = step.init(fr.Params(daily.dynamic(), torch.ones(())))
    scanned, metrics = fr.scan(step, first, fr.tree.map(lambda *x: torch.stack(x), *given))
    assert torch.equal(metrics["loss"], losses)
    assert_trees_close(scanned, last, rtol=0, atol=0)
    parts = daily.step(SPARSE["adam"], micro_batches=2)
    assert_trees_close(daily.run(parts, daily.dynamic(), given)[0], losses, rtol=1e-4, atol=1e-6)
    of_key = lambda key: step.init(fr.Params(daily.dynamic(), torch.ones(())), key)
    members = torch.func.vmap(of_key)(fr.split(fr.key(1), 2))
    for batch in given:
        members, metrics = torch.func.vmap(step, in_dims=(0, None))(members, batch)
    assert_trees_close(metrics["loss"], losses[-1].expand(2), rtol=1e-5, atol=1e-6)
    assert torch.equal(members.tables.vocabularies["users"].entries[1], last.tables.vocabularies["users"].entries)


def test_lookups_under_transforms():
    """vmap over batches, derivatives by a table of first and second order, and `jit` give what plain lookups give."""
    given = list(daily.batches(9, 2))
    _, state, _ = daily.run(daily.step(SPARSE["sgd"]), daily.dynamic(), given[:1])
    wanted = torch.stack([daily.predict(state.params, batch) for batch in given])
    both, read = fr.tree.map(lambda *x: torch.stack(x), *given), lambda batch: daily.predict(state.params, batch)
    assert torch.equal(torch.func.vmap(read)(both), wanted)
    assert_trees_close(fr.jit(torch.func.vmap(read))(both), wanted, rtol=1e-5, atol=1e-6)

    def cubed(a):
        scaled = {n: t * a for n, t in state.tables.tables.items()}
        tables = dataclasses.replace(state.tables, tables=scaled)
        return daily.predict(fr.Params(tables, state.dense), given[0]).pow(3).sum()

    one, total = torch.ones(()), wanted[0].pow(3).sum()
    assert_trees_close(torch.func.grad(cubed)(one), 3 * total, rtol=1e-4)
    assert_trees_close(torch.func.grad(torch.func.grad(cubed))(one), 6 * total, rtol=1e-4)
    assert_trees_close(torch.func.jvp(cubed, (one,), (one,))[1], 3 * total, rtol=1e-4)


@pytest.mark.parametrize("mode", ["grad", "jvp", "autograd", "staged grad"])
def test_steps_that_renew_rows_are_differentiated(mode):
    """The derivative of a later loss by the first tables is that of central differences, in f64: rows that pass to new
    ids carry none."""
    step, given = daily.step(SPARSE["sgd"]), [fr.tree.to(x, torch.float64) for x in daily.batches(15, 2)]
    first, _ = step(
        step.init(fr.Params(fr.tree.to(daily.dynamic(), torch.float64), torch.ones((), dtype=torch.float64))), given[0]
    )

    def later(a):
        scaled = {n: t * a for n, t in first.tables.tables.items()}
        state = dataclasses.replace(first, tables=dataclasses.replace(first.tables, tables=scaled))
        state, _ = step(state, given[1])
        return step(state, given[1])[1]["loss"]

    one = torch.ones((), dtype=torch.float64)
    wanted = (later(one + 1e-5) - later(one - 1e-5)) / 2e-5
    tracked = one.clone().requires_grad_()
    found = {
        "grad": lambda: torch.func.grad(later)(one), "jvp": lambda: torch.func.jvp(later, (one,), (one,))[1],
        "autograd": lambda: torch.autograd.grad(later(tracked), tracked)[0],
        "staged grad": lambda: fr.jit(torch.func.grad(later))(one),
    }[mode]  # fmt: skip
    with staged_only() if mode == "staged grad" else contextlib.nullcontext():
        got = found()
    assert_trees_close(got, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", ["i32 ids", "shared bags", "f64", "bf16"])
def test_other_forms_of_a_batch_and_of_tables(form):
    """Ids of 32 bits and shared bags give the same step, tables of other dtypes a step in their dtype."""
    step, batch = daily.step(SPARSE["sgd"]), next(daily.batches(10, 1))
    dtype = {"f64": torch.float64, "bf16": torch.bfloat16}.get(form, torch.float32)
    tables, ids = fr.tree.to(daily.dynamic(), dtype), batch.ids
    if form == "shared bags":
        ids = fr.dedup_bags(ids)
    elif form == "i32 ids":
        ids = dataclasses.replace(ids, values=ids.values.int())
    state, metrics = step(step.init(fr.Params(tables, torch.ones(()))), dataclasses.replace(batch, ids=ids))
    _, wanted, last = daily.run(step, daily.dynamic(), [batch])
    close = {"f64": 1e-6, "bf16": 0.05}.get(form, 0.0)
    assert_trees_close(metrics["loss"].float(), last["loss"], rtol=close, atol=close)
    assert state.tables["user"].dtype == dtype
    assert torch.equal(state.tables.vocabularies["users"].tags, wanted.tables.vocabularies["users"].tags)


def test_a_table_may_have_the_name_of_a_vocabularys_tensor():
    """A table named "tags", as a tensor of vocabularies is named, is trained with them."""
    config, read = fr.TableConfig("tags", 128, 2), fr.FeatureConfig("day", table="tags")
    follows = {"days": fr.VocabularyConfig(fr.vocabulary(128), [config], [read])}
    tables = fr.dynamic_tables(fr.init(daily.KEY, [config]), follows, key=daily.KEY)
    step = fr.train_step(lambda p, b: fr.lookup(p.tables, b.ids, [read]).values.sum(), sparse=SPARSE["sgd"])
    batch = next(daily.batches(0, 1))
    state, metrics = step(step.init(fr.Params(tables, {})), batch)
    rows = fr.find(state.tables.vocabularies["days"], batch.ids["day"]).values.unique()
    assert int(metrics["vocabularies"]["days"]["admitted"]) == 7
    assert not torch.equal(state.tables["tags"][rows[-1]], tables["tags"][rows[-1]])


def test_states_are_saved_and_continued(tmp_path):
    """A state that was saved and loaded goes on to the same bits."""
    step, given = daily.step(SPARSE["rowwise_adagrad"]), list(daily.batches(6, 4))
    _, wanted, _ = daily.run(step, daily.dynamic(), given)
    _, state, _ = daily.run(step, daily.dynamic(), given[:2])
    fr.save(tmp_path / "state.pt", state)
    state = fr.load(tmp_path / "state.pt")
    for batch in given[2:]:
        state, _ = step(state, batch)
    assert_trees_close(state, wanted, rtol=0, atol=0)


def test_quantised_tables_keep_their_vocabularies():
    """`quantize` gives tables of codes whose lookups take ids, with the bits of codes looked up by rows."""
    _, state, _ = daily.run(daily.step(SPARSE["sgd"]), daily.dynamic(), daily.batches(7, 2))
    codes, batch = fr.quantize(state.tables, "int8"), next(daily.batches(7, 1))
    read, rows = [daily.FEATURES[0]], fr.find(state.tables.vocabularies["users"], batch.ids.permute(["user"]))
    wanted = fr.lookup(fr.quantize(dict(state.tables), "int8"), rows, read)
    assert torch.equal(fr.lookup(codes, batch.ids, read).values, wanted.values)


@pytest.mark.parametrize("num_users", [0, 1])
def test_batches_without_ids(num_users):
    """A batch without ids, or without examples, admits nothing."""
    step = daily.step(SPARSE["sgd"])
    lists = {c: [[]] * num_users for c in daily.COLUMNS}
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists(lists), torch.zeros(num_users))
    state, metrics = step(step.init(fr.Params(daily.dynamic(), torch.ones(()))), batch)
    assert {k: int(x) for k, x in metrics["vocabularies"]["users"].items()} == dict.fromkeys(
        ("hits", "admitted", "evicted", "refused"), 0
    )
    assert int(state.tables.vocabularies["users"].num_ids) == 0


def with_users(tables, **others):
    """Return tables with others in place of the vocabulary of users."""
    kept = {n: v for n, v in tables.vocabularies.items() if n != "users"}
    return dataclasses.replace(tables, vocabularies={**kept, **others})


MISTAKES = {
    "a table of other ids": (
        lambda t, ids: fr.lookup(t, ids, [fr.FeatureConfig("item", table="user")]), "reads a table of other ids",
    ),
    "ids that are hashed": (
        lambda t, ids: fr.lookup(t, ids, [fr.FeatureConfig("user", table="user", hash=fr.modulo())]), "hashes ids of",
    ),
    "no column": (
        lambda t, ids: daily.step(SPARSE["sgd"]).update(
            daily.step(SPARSE["sgd"]).init(fr.Params(t, torch.ones(()))), fr.Batch(ids.permute(["day"]))
        ),
        "the batch has no ids for vocabulary 'users'",
    ),
    "gradients that wait": (
        lambda t, ids: daily.run(
            daily.step(fr.optim.accumulate(SPARSE["sgd"], every=2, capacity=64)), t, daily.batches(0, 1)
        ),
        "keeps gradients for rows that may pass to other ids",
    ),
    "a vocabulary of another size": (
        lambda t, ids: fr.lookup(with_users(t, users=fr.vocabulary(256)), ids, daily.FEATURES), "follow its vocabulary",
    ),
    "a step of another size": (
        lambda t, ids: daily.run(
            daily.step(SPARSE["sgd"]), with_users(t, users=fr.vocabulary(256)), daily.batches(0, 1)
        ),
        "follow its vocabulary",
    ),
    "a vocabulary of another name": (
        lambda t, ids: fr.lookup(with_users(t, user=fr.vocabulary(128)), ids, daily.FEATURES), "has no 'users'",
    ),
    "rounding": (lambda t, ids: fr.fake_quantize(t), "are not plain tables"),
    "two in one": (lambda t, ids: fr.dynamic_tables(t, {}, key=daily.KEY), "`tables` are not plain"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_vocabularies_do_not_take_is_refused(name):
    """A call that vocabularies do not support raises before any work, and suggests another."""
    call, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, KeyError), match=words):
        call(daily.dynamic(), next(daily.batches(0, 1)).ids)


def test_configs_that_do_not_fit_are_named():
    """Missing tables, other numbers of rows, unknown initializers and shared columns are all named."""
    user, item, _ = daily.configs(daily.USERS.num_embeddings, 5)
    tables = fr.init(daily.KEY, (user, item))
    read = lambda table: fr.FeatureConfig("user", table=table)
    own = lambda *tables: fr.VocabularyConfig(daily.USERS, tables, [read(t.name) for t in tables])
    odd = dataclasses.replace(user, initializer=lambda key, shape, start, num_embeddings: torch.zeros(shape))
    cases = {
        "has no 'away'": {"a": own(dataclasses.replace(user, name="away"))},
        "table 'item' does not follow its vocabulary": {"a": own(item)},
        "initializer of 'user' is not known": {"a": own(odd)},
        "column 'user' is named twice": {"a": own(user), "b": own(user)},
        "vocabulary 'a' has no feature": {"a": fr.VocabularyConfig(daily.USERS, (user,), ())},
        "reads a table of other ids": {"a": fr.VocabularyConfig(daily.USERS, (user,), [read("item")])},
    }
    for words, given_configs in cases.items():
        with pytest.raises((TypeError, ValueError, KeyError), match=words):
            fr.dynamic_tables(tables, given_configs, key=daily.KEY)

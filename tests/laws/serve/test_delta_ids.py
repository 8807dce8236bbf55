"""Deltas of tables whose rows belong to ids that come and go: a package that applies them has the vocabularies, too."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import daily_ids as daily
from programs import packages
from programs.fresh import bits

import funcrec as fr

pytestmark = pytest.mark.xdist_group("packages")
LOGGED = daily.LOGGED
REST = lambda run: run.state.params


def held(state, name):
    """Return the parameters as a package stores them."""
    return fr.Params(state.tables if name == "plain" else fr.quantize(state.tables, "int8"), state.dense)


def ids_of(batch):
    return fr.Batch(batch.ids)


@pytest.fixture(scope="module")
def first(of_ids):
    return of_ids[0]


@pytest.fixture(scope="module")
def folders(of_ids, tmp_path_factory):
    (first, plain), example = of_ids, ids_of(next(daily.batches(1, 1, 8)))
    coded = tmp_path_factory.mktemp("ids") / "coded"
    return {"plain": plain, "coded": fr.export(daily.predict, held(first.state, "coded"), example, coded, version="0")}


@pytest.mark.parametrize("name", ["plain", "coded"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**30), size=st.sampled_from([8, 80]))
def test_deltas_make_the_package_of_the_later_state(name, first, folders, tmp_path_factory, seed, size):
    """A package with its deltas applied has every bit of a package of the later parameters, vocabularies included. It
    answers new ids by their new rows, and evicted ids like unknown ones."""
    package, run, tmp_path = fr.load_package(folders[name]), first, tmp_path_factory.mktemp("d")
    for i, batch in enumerate(daily.batches(seed, 3, size), 1):
        sent = run.log.version
        run, metrics = LOGGED(run, batch)
        path = fr.write_delta(tmp_path / f"{i}", fr.delta(run, sent), package, REST(run), version=str(i))
        package.apply(path)
    newer = fr.load_package(folders[name])
    newer.swap(fr.save_weights(tmp_path / "newer", held(run.state, name), version="3"))
    assert bits(package.params) == bits(newer.params) and package.version == "3"
    assert int(metrics["vocabularies"]["users"]["admitted"])
    asked = [ids_of(b) for b in (batch, next(daily.batches(1, 1, 40)))]
    for b in asked:
        assert torch.equal(package(b), newer(b))
        if name == "plain":
            assert torch.allclose(package(b), daily.predict(run.state.params, b), rtol=1e-5, atol=1e-6)


def test_evicted_ids_are_unknown_after_a_delta(first, folders, tmp_path):
    """An id whose row passed to another id answers like an id that was never seen, in every version of the package."""
    package, run = fr.load_package(folders["plain"]), first
    users = lambda run: run.state.tables.vocabularies["users"]
    known = fr.vocabulary_items(users(run))
    known = known["ids"][: known["count"]]
    ask = lambda ids: package(fr.Batch(fr.KeyedJaggedTensor.from_lists(
        {"user": [[i] for i in ids], **{c: [[] for _ in ids] for c in ("friends", "item", "day")}})))  # fmt: skip
    for i in range(1, 4):
        lists = {"user": [list(range(10**6 * i, 10**6 * i + 100))], **{c: [[]] for c in ("friends", "item", "day")}}
        sent = run.log.version
        run, _ = LOGGED(run, fr.Batch(fr.KeyedJaggedTensor.from_lists(lists), torch.zeros(1)))
        package.apply(fr.write_delta(tmp_path / f"{i}", fr.delta(run, sent), package, REST(run), version=str(i)))
        rows = fr.find(users(run), known)
        gone, unknown = known[rows >= users(run).capacity], ask([-5])
        assert torch.equal(ask(gone.tolist()), unknown.expand(len(gone)))
        assert not torch.equal(ask([10**6 * i]), unknown)
    assert len(gone) > 20


def test_a_publisher_sends_new_ids(first, folders, tmp_path):
    """`publish` writes deltas with the vocabularies, and whole weights that have them. Either leads to the weights of
    the state."""
    path = folders["plain"]
    package = fr.load_package(path)
    tell = fr.publish(tmp_path / "published", package, every_steps=1, keep=2)
    done = fr.fit(LOGGED, first, list(daily.batches(2, 5, 40)), epochs=1, callbacks=[tell], progress=False)
    names = [x.name for x in (tmp_path / "published").iterdir()]
    assert any(n.endswith(".delta") for n in names) and any(n.endswith(".weights") for n in names)
    package.follow(tmp_path / "published")
    newer = fr.load_package(path)
    newer.swap(fr.save_weights(tmp_path / "newer", done.state.state.params, version="x"))
    assert bits(package.params) == bits(newer.params)


def changed(**fields):
    """Return a function that changes fields of the entries of a Delta."""
    other = lambda own: {n: dataclasses.replace(x, **fields) for n, x in own.items()}
    return lambda delta: dataclasses.replace(delta, vocabularies=other(delta.vocabularies))


MISTAKES = {
    "no key": (lambda d: d, lambda run: fr.Params({}, run.state.dense), "lack parameters without rows"),
    "another seed": (
        changed(seed=5), lambda run: fr.Params(dict(run.state.tables), run.state.dense), "lack parameters without rows",
    ),
    "another size": (changed(capacity=512), REST, "is of another vocabulary"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_entries_that_do_not_fit_are_refused(name, first, folders, tmp_path):
    """Entries of another vocabulary, and parameters without the vocabularies' rest, raise before a file is written."""
    change, rest, words = MISTAKES[name]
    run, _ = LOGGED(first, next(daily.batches(3, 1)))
    with pytest.raises((ValueError, TypeError), match=words):
        fr.write_delta(tmp_path / "d", change(fr.delta(run, 2)), folders["plain"], rest(run), version="1")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("buckets", [(), "x"], ids=["whole", "cut"])
def test_a_mesh_publishes_new_ids(buckets, folders, tmp_path):
    """What `publish` writes from a sharded state leads to the weights of the whole state, with vocabularies that are
    whole on each rank, or cut by buckets."""
    mesh = fr.Mesh.emulated(x=2)
    placements = {"user": fr.row_wise("x"), "item": fr.row_wise("x"), "day": fr.replicated()}
    plan = fr.Plan(placements, buckets=buckets)
    step = fr.logged(daily.step(fr.optim.adam(0.1), mesh=mesh, plan=plan), steps=0)
    run = step.init(fr.Params(daily.dynamic(), torch.ones(())))
    whole = lambda run: fr.Params(fr.gather_tables(run.state.tables, mesh), run.state.dense)
    package, wanted = (fr.load_package(folders["plain"]) for _ in range(2))
    package.swap(fr.save_weights(tmp_path / "begun", whole(run), version="0"))
    tell = fr.publish(tmp_path / "published", package, every_steps=1, mesh=mesh)
    for i, batch in enumerate(daily.batches(12, 4, size=64), 1):
        run, metrics = step(run, batch)
        tell(fr.loop.Record("step", 0, i, {}, run))
    package.follow(tmp_path / "published")
    wanted.swap(fr.save_weights(tmp_path / "w", whole(run), version="x"))
    assert bits(package.params) == bits(wanted.params)
    assert len([x for x in (tmp_path / "published").iterdir() if x.suffix == ".delta"]) == 3
    assert int(metrics["vocabularies"]["users"]["evicted"])


def test_weights_of_a_vocabulary_with_another_seed_are_refused(folders, tmp_path):
    """A program holds the seed that finds the ids of its vocabulary. Weights with another seed, which would give rows
    of other ids, are refused. Weights with the same seed are taken, and answer as the parameters do."""
    package, weights = fr.load_package(folders["plain"]), torch.ones(())
    tables = lambda seed: daily.dynamic(fr.vocabulary(256, unknown=1, seed=seed))
    for seed in (1, 2):
        fr.save_weights(tmp_path / f"{seed}", fr.Params(tables(seed), weights))
        with pytest.raises(ValueError, match="of other parameters than the package"):
            package.swap(tmp_path / f"{seed}")
    package.swap(fr.save_weights(tmp_path / "same", fr.Params(tables(0), 2 * weights)))
    asked = ids_of(next(daily.batches(1, 1, 8)))
    assert torch.allclose(package(asked), daily.predict(fr.Params(tables(0), 2 * weights), asked), rtol=1e-5, atol=1e-6)


def test_several_vocabularies_of_a_name_are_refused(first, tmp_path, monkeypatch):
    """A package of a model and its average has two vocabularies of one name. A delta of it raises. The package is not
    compiled, since a delta reads its manifest."""
    packages.uncompiled(monkeypatch)
    both = {"now": first.state.tables, "average": fr.copy(first.state.tables)}
    predict = lambda params, batch: sum(
        fr.lookup(t, batch.ids, daily.FEATURES[:1]).values.sum(1) for t in params.values()
    )
    example = ids_of(next(daily.batches(1, 1, 8)))
    path = fr.export(predict, both, fr.Batch(example.ids.permute(["user"])), tmp_path / "model", version="0")
    run, _ = LOGGED(first, next(daily.batches(3, 1)))
    with pytest.raises(ValueError, match="several parameters are"):
        fr.write_delta(tmp_path / "d", fr.delta(run, 2), path, both, version="1")

"""Deltas of vocabularies give a running server new ids with their rows, and take evicted ids away (kernels/serving)."""

import threading

import pytest
import torch
from programs import answers, daily_ids, serving

import funcrec as fr
from funcrec.serve._weights import FILE

pytestmark = pytest.mark.xdist_group("packages")
COLUMNS = [*daily_ids.COLUMNS]
LOGGED = daily_ids.LOGGED


def trained(run, seed, count=2, size=60):
    for batch in daily_ids.batches(seed, count, size):
        run, metrics = LOGGED(run, batch)
    return run, metrics


@pytest.fixture(scope="module")
def first(of_ids):
    return of_ids[0]


@pytest.fixture(scope="module")
def path(of_ids):
    return of_ids[1]


def asked(seed=1, size=30):
    return fr.Batch(next(daily_ids.batches(seed, 1, size)).ids.unpad())


def request_of(batch):
    return {"ids": {c: batch.ids[c].to_lists() for c in COLUMNS}}


@pytest.mark.parametrize("seed", range(4))
def test_deltas_of_ids_in_cpp_are_pythons(seed, built, path, first, tmp_path):
    """A package in C++ with the deltas of a history has the bytes of weights saved at its end, and Python's answers.
    New ids read their rows there, and evicted ids the row of unknown ids."""
    package, run, batches = fr.load_package(path), first, [asked(1), asked(seed + 10), asked(seed + 11)]
    far = next(daily_ids.batches(seed, 1, ids_of=lambda i: i * 10**14 - 7)).ids  # known to no version
    batches.append(fr.Batch(far.unpad()))
    with answers.Answers(built / "funcrec-answers", path) as running:
        for i in range(1, 4):
            sent = run.log.version
            run, metrics = trained(run, seed + 9 + i, 1)
            assert int(metrics["vocabularies"]["users"]["evicted"]) or i < 3
            file = fr.write_delta(tmp_path / f"{i}", fr.delta(run, sent), package, run.state.params, version=str(i))
            package.apply(file), running.apply(file)
        saved = fr.save_weights(tmp_path / "saved", run.state.params, version="3")
        content, own = (saved / FILE).read_bytes(), running.weights()
        begin = content.index(b"}}") + 2  # the version in the header is that of the mapped file
        assert own[begin : len(content)] == content[begin:]
        for batch in batches:
            got = running.run(batch.ids.num_bags, None, batch.ids.values, batch.ids.offsets)
            assert got.version == "3" and got.ids_out_of_range == 0
            assert torch.equal(got.outputs[0], package(batch))
            want = daily_ids.predict(run.state.params, batch)
            torch.testing.assert_close(got.outputs[0], want, rtol=1e-5, atol=1e-6)


def test_answers_are_of_one_vocabulary_and_its_rows(built, path, first, tmp_path):
    """While a training run publishes to a server, each answer is that of the version it names: a vocabulary never meets
    the rows of another version. Ids that were unknown at first get their rows, and ids that left are unknown."""
    folder = tmp_path / "published"
    folder.mkdir()
    package, batch = fr.load_package(path), asked(1)
    new = torch.arange(300) + 10**12
    lists = {c: [[int(i)] if c == "user" else [] for i in new] for c in COLUMNS}
    both = fr.KeyedJaggedTensor.from_lists(lists)
    asks = [batch, fr.Batch(both)]
    with serving.Server(built / "funcrec-serve", path, "--updates", str(folder)) as server:
        address = f"http://127.0.0.1:{server.admin}"
        tell = fr.publish(folder, package, every_steps=1, servers=[address])
        expected, seen, stop, errors = {}, [], threading.Event(), []

        def ask(which):
            connection, body = server.connect(), serving.pack(request_of(asks[which]), COLUMNS, ())
            try:
                while not stop.is_set():
                    status, _, data = serving.ask(connection, "POST", "/predict", body, serving.BYTES)
                    answer = serving.unpack(data)
                    seen.append((which, answer["version"], torch.tensor(next(iter(answer["outputs"].values())))))
                    assert status == 200
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(i,)) for i in (0, 1)]
        expected["0"] = [package(x) for x in asks]
        [t.start() for t in threads]
        run, before = first, []
        tell(fr.loop.Record("begin", 0, 0, {}, run))
        for i in range(1, 7):
            lists = {"user": [[x] for x in new[50 * i - 50 : 50 * i].tolist()], **{c: [[]] * 50 for c in COLUMNS[1:]}}
            ids = fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64)
            run, metrics = LOGGED(run, fr.Batch(ids, torch.zeros(50)))
            before.append(len(seen))
            tell(fr.loop.Record("step", 0, i, {}, run))
            package.follow(folder)
            expected[package.version] = [package(x) for x in asks]
            while len(seen) < before[-1] + 6 and not errors:
                pass
        stop.set()
        [t.join(20) for t in threads]
    assert not errors and int(metrics["vocabularies"]["users"]["evicted"])
    assert len({version for _, version, _ in seen}) > 3
    for which, version, out in seen:
        assert torch.equal(out, expected[version][which]), version
    unknown = expected["0"][1]
    assert len(unknown.unique()) == 1  # no id of the second request was known
    last = expected[package.version][1]
    known = fr.find(run.state.tables.vocabularies["users"], new) < daily_ids.USERS.capacity
    assert known[-50:].all() and not known.all()
    assert (last[known] != last[~known][0]).all() and len(last[~known].unique()) == 1

"""Packages give the same outputs in a process without Python (kernels/serving) as in Python."""

import functools
import hashlib
import json
import shutil

import pytest
import torch
from programs import answers, every_dtype, tensor_files

import funcrec as fr
from funcrec.serve._trace import form_of, trace
from funcrec.serve._weights import FILE, named
from funcrec.serve.freshness._delta_file import Change, write_file

pytestmark = pytest.mark.xdist_group("every_dtype")
KEYS = fr.key(1), fr.key(1)


@pytest.fixture(scope="module")
def next_weights(folder):
    return fr.save_weights(folder.parent / "next", every_dtype.params(1), version="second")


@pytest.fixture(scope="module")
def program(built):
    return built / "funcrec-answers"


@pytest.fixture(scope="module")
def running(program, folder):
    with answers.Answers(program, folder) as process:
        yield process


def ask(running, batch):
    ids = batch.ids
    return running.run(ids.num_bags, batch.dense, ids.values, ids.offsets, ids.weights)


def assert_same(got, want):
    for x, (name, y) in zip(got.outputs, want.items(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("num_bags, most", [(0, 3), (1, 0), (1, 5), (3, 5), (64, 3), (512, 5)])
def test_cpp_answers_as_python_does(running, folder, num_bags, most):
    """C++ = Python within 1e-6 for every dtype and pooling, weights, sequences, empty bags, and ids outside the table,
    such as -1; of a bag longer than `max_length` neither reads further ids."""
    batch = every_dtype.batch(num_bags, seed=num_bags + most, most=most)
    assert bool((batch.ids["b"].lengths > 3).any()) == (most > 3 and num_bags > 1)  # `max_length` of some features
    got = ask(running, batch)
    assert_same(got, every_dtype.predict(every_dtype.params(), batch) if num_bags else fr.load_package(folder)(batch))
    rows = {f["name"]: f["rows"] for f in json.loads((folder / "manifest.json").read_text())["features"]}
    outside = sum(
        int(((x < 0) | (x >= rows[k])).sum()) for k, x in ((k, batch.ids[k].values) for k in every_dtype.KEYS)
    )
    assert (got.ids_out_of_range, got.version) == (outside, "first")


def test_a_history_is_answered_without_python(program, tmp_path):
    """SASRec's queries, with attention within bags, are in C++ what they are in Python, for lengths from 0, and under
    `invariant` bit for bit, also with newer weights. From the package in Python, too, they find the rows that top_k
    finds without it."""
    tables, history = (fr.TableConfig("item", 30, 8),), fr.FeatureConfig("history", table="item", pooling="none")
    model = fr.models.sasrec(tables, history, blocks=1, max_length=6)
    params = model.init(fr.key(0))
    batch = lambda bags: fr.Batch(fr.KeyedJaggedTensor.from_lists({"history": bags}))
    exact = fr.invariant(model.query)
    query = fr.load_package(fr.export(exact, params, batch([[1, 2], [3]]), path=tmp_path / "model"))
    with answers.Answers(program, tmp_path / "model") as process:
        for bags in ([[]], [[4]], [[1, 2, 3, 4, 5, 6], [7], [29, 0, 2]], [[9, 9]] * 20):
            got, want = ask(process, batch(bags)).outputs[0], model.query(params, batch(bags))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            own = exact(params, batch(bags))
            assert torch.equal(got, own) and torch.equal(query(batch(bags)), own)
            seen = fr.JaggedTensor.from_lists(bags)
            rows = [fr.top_k(x, model.items(params), 3, exclude=seen)[1] for x in (query(batch(bags)), want)]
            assert rows[0].equal(rows[1])
        # Weights that the program takes turned follow a delta of their rows, and a swap.
        first, rows, newer, mixed = (
            "dense['blocks'][0]['first']['weight']",
            torch.tensor([1, 4]),
            *map(model.init, KEYS),
        )
        assert first in query.manifest["turned"]
        values = named(newer)[first][rows]
        mixed.dense["blocks"][0]["first"]["weight"] = named(params)[first].index_copy(0, rows, values)
        changes = {n: Change(None, x) for n, x in named(newer).items()} | {first: Change(rows, values)}
        write_file("test", tmp_path / "delta", query.manifest["digest"], query.version, "newer", changes)
        fr.save_weights(tmp_path / "next", newer)
        for change, path, now in (("apply", "delta", mixed), ("swap", "next", newer)):
            for own in (query, process):
                getattr(own, change)(tmp_path / path)
            got, own = ask(process, batch([[1, 2], [3]])).outputs[0], exact(now, batch([[1, 2], [3]]))
            assert torch.equal(got, own) and torch.equal(query(batch([[1, 2], [3]])), own)


SEQUENCE = functools.partial(fr.FeatureConfig, pooling="none", max_length=6)
RANKER = fr.models.hstu_ranker(
    [fr.TableConfig("item", 50, 6), fr.TableConfig("user", 7, 4)], history=[SEQUENCE("seen", table="item")],
    candidates=[SEQUENCE("next", table="item")], context=[fr.FeatureConfig("user", table="user", max_length=1)],
    action="action", time="time", query_time="now", dim=8, hidden=5, head=7, num_positions=4, num_times=8,
    qk_dim=4, linear_dim=3, num_layers=1,
)  # fmt: skip
ONE = {"user": [1], "seen": [4, 5, 6], "action": [1, 2, 16], "time": [0, 5, 60], "next": [12, 13], "now": [100]}
TWO = {"user": [2], "seen": [], "action": [], "time": [], "next": [14, 3, 49, 0, 1, 2], "now": [2000]}
COLD = {"user": [], "seen": [50], "action": [0], "time": [7], "next": [], "now": []}
scores = lambda params, batch: RANKER.apply(params, batch).to_padded(6)[:, :, 0]


def requests(*bags, keys=tuple(ONE), dense=None):
    lists = {k: [bag[k] for bag in bags] for k in keys}
    return fr.Batch(fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64), dense=dense)


def test_a_request_of_history_and_candidates_is_one_program():
    """One request has context, history and candidates: the HSTU ranker scores all candidates in one pass, in the
    program of a package as without it. A bag whose columns differ in their lengths answers NaN, and the bags that came
    with it do not. C++ runs the two parts of this pass in the next test."""
    params, form = RANKER.init(fr.key(0)), form_of(requests(ONE, TWO))
    program = trace(scores, params, form, 64, 4096).exported.module(check_guards=False)
    run = lambda batch: program(*named(params).values(), *form.inputs(batch))[0]
    wrong = {**TWO, "seen": [9, 8], "action": [1, 2, 3], "time": [5, 6]}
    for bags in ([ONE], [TWO, ONE], [COLD, TWO, TWO, ONE] * 9):
        torch.testing.assert_close(run(requests(*bags)), scores(params, requests(*bags)), rtol=1e-5, atol=1e-5)
    got = run(requests(ONE, wrong, TWO))
    assert got[1].isnan().all()
    torch.testing.assert_close(got[::2], scores(params, requests(ONE, TWO)), rtol=1e-5, atol=1e-5)


def test_a_kept_history_is_scored_without_python(program, tmp_path):
    """One package answers the keys and values of a history, which a client keeps. Another scores candidates by them, as
    often as candidates come, and answers what one pass does. A bag whose columns differ has a length of -1. A length
    outside the keys answers NaN."""
    params, size = RANKER.init(fr.key(0)), 7 * 2  # positions and heads; keys have 4 numbers, values 3
    keep = lambda params, batch: RANKER.encode_history(params, batch).to_padded(7)

    def score(params, batch):
        keys, values = batch.dense.split([size * 4, size * 3], 1)
        keys, values = keys.unflatten(1, (1, 7, 2, 4)), values.unflatten(1, (1, 7, 2, 3))
        times = batch.ids["kept"]  # its lengths are the numbers of positions
        history = fr.models.History.from_padded(keys, values, times.lengths, times.to_padded(7))
        return RANKER.score(params, history, fr.Batch(batch.ids)).to_padded(6)[:, :, 0]

    def second(kept, *bags):
        keys, values, length, time = kept
        times = [t[:n].tolist() for t, n in zip(time, length.tolist(), strict=True)]
        bags = [{**bag, "kept": own} for bag, own in zip(bags, times, strict=True)]
        dense = torch.cat([keys.flatten(1), values.flatten(1)], 1)
        return requests(*bags, keys=("next", "now", "kept"), dense=dense)

    first = lambda *bags: requests(*({**bag, "next": [], "now": []} for bag in bags))
    kept = tuple(keep(params, first(ONE, TWO)).values())
    fr.export(keep, params, first(ONE, TWO), path=tmp_path / "keep")
    fr.export(score, params, second(kept, ONE, TWO), path=tmp_path / "score")
    opened = (answers.Answers(program, tmp_path / name) for name in ("keep", "score"))
    with next(opened) as keeps, next(opened) as process:
        kept = ask(keeps, first(ONE, COLD, TWO)).outputs
        assert [x.shape for x in kept] == [(3, 1, 7, 2, 4), (3, 1, 7, 2, 3), (3,), (3, 7)]
        assert ask(keeps, first(ONE, {**ONE, "seen": [1]})).outputs[2].tolist() == [4, -1]
        for candidates in ([12, 13], [], [49, 48, 47, 1, 0, 12]):
            bags = [{**bag, "next": candidates} for bag in (ONE, COLD, TWO)]
            got, want = ask(process, second(kept, *bags)).outputs[0], scores(params, requests(*bags))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        long = second(kept, ONE, COLD, TWO)
        long = fr.Batch(
            fr.KeyedJaggedTensor.from_lists({**long.ids.to_lists(), "kept": [[0] * 4, [0] * 9, [0] * 9]}),
            dense=long.dense,
        )
        got = ask(process, long).outputs[0]
        assert got[2].isnan().all() and got[0].isfinite().all()


def wrong(offsets=None, values=7, bags=2, dense=6, weights=None):
    offsets = [0, 1, 2, 3, 4, 5, 7] if offsets is None else offsets
    weights = values if weights is None else weights
    numbers = torch.tensor(offsets, dtype=torch.int64)
    return bags, torch.zeros(dense), torch.zeros(values, dtype=torch.int64), numbers, torch.ones(weights)


WRONG = {
    "first offset": wrong([1, 1, 2, 3, 4, 5, 7]),
    "last offset": wrong([0, 1, 2, 3, 4, 5, 8]),
    "last offset below": wrong([0, 1, 2, 3, 4, 5, 6]),
    "descending": wrong([0, 5, 2, 3, 4, 5, 7]),
    "far": wrong([0, 2**62, 2, 3, 4, 5, 7]),
    "negative": wrong([0, -(2**63), 2, 3, 4, 5, 7]),
    "too few offsets": wrong([0, 1, 7]),
    "no offsets": wrong([]),
    "negative bags": wrong(bags=-1),
    "many bags": wrong(bags=2**62),
    "too many bags": wrong(torch.zeros(3 * 5000 + 1).long().tolist(), values=0, bags=5000, dense=15000),
    "short dense": wrong(dense=5),
    "no dense": wrong(dense=0),
    "short weights": wrong(weights=6),
    "more weights": wrong(weights=8),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_the_clients_fault(running, name):
    """An invalid request raises Bad with got and need. The next request is answered."""
    with pytest.raises(answers.AnswersError, match=r"(?s)got .*need ") as error:
        running.run(*WRONG[name])
    assert not error.value.failed
    assert running.run(*wrong()).ids_out_of_range == 0


def test_weights_are_swapped_whole_or_not_at_all(program, folder, next_weights, tmp_path):
    """After swap, outputs use the new values. Weights that have another signature, are cut or were changed leave the
    old values."""
    batch = every_dtype.batch(5)
    with answers.Answers(program, folder) as running:
        for name, change in WEIGHTS.items():
            shutil.copytree(next_weights, tmp_path / name)
            change(tmp_path / name)
            with pytest.raises(answers.AnswersError, match=r"(?s)got .*need ") as error:
                running.swap(tmp_path / name)
            assert not error.value.failed
            assert_same(ask(running, batch), every_dtype.predict(every_dtype.params(), batch))
        running.swap(next_weights)
        got = ask(running, batch)
    assert got.version == "second"
    assert_same(got, every_dtype.predict(every_dtype.params(1), batch))


def rewritten(name, change):
    """Change a JSON file and its digest. A refusal is then about the content itself."""

    def run(folder):
        path = folder / name
        content = json.loads(path.read_text())
        change(content)
        content["digest"] = "0" * 64
        text = json.dumps(content, indent=1) + "\n"
        for key in content.get("files", {}):
            text = text.replace(content["files"][key], "0" * 64)
        digest = hashlib.sha256(text.encode()).hexdigest()
        content["digest"] = digest
        path.write_text(json.dumps(content, indent=1) + "\n")

    return run


def told(change):
    """Return a function that changes the header of the weights, under right checks."""

    def run(folder):
        path = folder / FILE
        path.write_bytes(tensor_files.changed(path.read_bytes(), change, 4096))

    return run


def entry(key, value):
    def change(content, _):
        content[list(tensor_files.places(content))[1]][key] = value

    return told(change)


def renamed(content, _):
    content["x"] = content.pop(next(iter(tensor_files.places(content))))


def edited(change):
    return lambda f: (f / FILE).write_bytes(change((f / FILE).read_bytes()))


WEIGHTS = {
    "cut off": edited(lambda data: data[:-1]),
    "longer": edited(lambda data: data + b"1"),
    "no file": lambda f: (f / FILE).unlink(),
    "a changed header": edited(lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:]),
    "another format": told(lambda content, _: content["__metadata__"].__setitem__("format", "funcrec weights 9")),
    "no JSON": told(lambda content, _: tensor_files.text_of(content)[:-1]),
    "deep": told(lambda content, _: tensor_files.text_of(content)[:-1] + b',"x":' + b"[" * 100_000),
    "another shape": entry("shape", [1]),
    "a huge shape": entry("shape", [2**40, 2**40]),
    "a negative shape": entry("shape", [-1, 5]),
    "a far offset": entry("data_offsets", [2**47, 2**47 + 4096]),
    "a negative offset": entry("data_offsets", [-4096, 0]),
    "another offset": entry("data_offsets", [1, 2]),
    "more bytes": entry("data_offsets", [0, 2**62]),
    "another dtype": entry("dtype", "C64"),
    "a number for a name": entry("dtype", 7),
    "another name": told(renamed),
    "no version": told(lambda content, _: content["__metadata__"].pop("version") and None),
    "off its page": lambda f: (f / FILE).write_bytes(tensor_files.sealed(*told_text(f))),
}


def told_text(folder):
    """Return (the text of the header, the bytes after the header). Their file has a header that is no multiple of
    pages."""
    content, body = tensor_files.parts((folder / FILE).read_bytes())
    return tensor_files.text_of(content), body


def manifest(key, value):
    return rewritten("manifest.json", lambda content: content.__setitem__(key, value))


PACKAGES = {
    "another torch": (manifest("torch", "2.11.0"), "torch"),
    "another processor": (manifest("needs", ["avx1024"]), "avx1024"),
    "another format": (manifest("format", 4), "format"),
    "a format without its entry": (manifest("format", 3), 'no "turned"'),
    "a turned stranger": (
        rewritten("manifest.json", lambda c: c.update(format=3, turned=["a"])),
        "turned[0]` is wrong",
    ),
    "a changed manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text() + " "),
        "changed",
    ),
    "no entry": (rewritten("manifest.json", lambda content: content.pop("outputs")), "outputs"),
    "a wrong type": (manifest("features", 3), "features"),
    "a huge number": (manifest("max_batch", 10**30), "max_batch"),
    "another program": (lambda f: (f / "model.pt2").write_bytes((f / "model.pt2").read_bytes()[:-1]), "model.pt2"),
    "another manifest": (manifest("max_ids", 5), "not the manifest's program"),
    "no features": (manifest("features", []), "not the manifest's program"),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_of_others_are_refused_with_the_reason(program, folder, tmp_path, name):
    """A changed file, another torch, another processor, and invalid manifest entries each raise Bad with the reason."""
    change, said = PACKAGES[name]
    shutil.copytree(folder, tmp_path / "copy")
    change(tmp_path / "copy")
    with pytest.raises(answers.AnswersError, match=r"(?s)got .*need ") as error:
        answers.Answers(program, tmp_path / "copy")
    assert said in str(error.value) and not error.value.failed


def test_no_python_is_in_the_process(running):
    """The process maps torch's libraries and the operators, but nothing of Python."""
    ask(running, every_dtype.batch(2))
    with open(f"/proc/{running.process.pid}/maps") as file:
        mapped = {line.split()[-1].rsplit("/", 1)[-1] for line in file if "/" in line}
    assert {"libtorch_cpu.so", "libfuncrec_operators.so", "libfuncrec_serving.so", FILE} <= mapped
    assert not [name for name in mapped if "python" in name.lower()]

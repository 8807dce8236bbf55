"""Deltas as files. A package that applies deltas has the weights of training, bit for bit, always of one version."""

import threading
from dataclasses import replace

import pytest
import torch
from programs import answers, tensor_files
from programs.fresh import REST, STEP, batch, begun, bits, changed_manifest, held

import funcrec as fr
from funcrec.serve.freshness._delta import tables_problems

pytestmark = pytest.mark.xdist_group("packages")


@pytest.fixture(scope="module")
def first():
    return begun()


@pytest.mark.parametrize("name", ["plain", "coded"])
def test_deltas_make_the_weights_of_training(name, first, tmp_path, request):
    """A package with its deltas applied has the bits of the newer parameters, for every dtype."""
    folder = request.getfixturevalue(name)
    package, run = fr.load_package(folder), first
    for i in range(1, 4):
        sent = run.log.version
        run, _ = STEP(run, batch(i))
        path = fr.write_delta(tmp_path / f"{i}.delta", fr.delta(run, sent), package, REST(run), version=str(i))
        assert path.stat().st_size < 9000
        package.apply(path)
    newer = fr.load_package(folder)
    newer.swap(fr.save_weights(tmp_path / "newer", held(run.state, name), version="3"))
    assert bits(package.params) == bits(newer.params) and package.version == newer.version == "3"
    assert torch.equal(package(batch(9)), newer(batch(9)))
    # the files did not change
    assert fr.load_package(folder).version == "0"


def test_damage_is_refused_and_changes_nothing(plain, first, tmp_path):
    """A file that is cut anywhere, or that has any flipped bit, raises with the reason. Every weight stays."""
    package = fr.load_package(plain)
    run, _ = STEP(first, batch(1))
    path = fr.write_delta(tmp_path / "good", fr.delta(run), package, REST(run), version="1")
    whole, before, bad = path.read_bytes(), bits(package.params), tmp_path / "bad"
    cut = [whole[:n] for n in range(0, len(whole), 5)] + [whole + b"\0"]
    turned = [whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :] for n in range(0, len(whole), 3)]
    for data in cut + turned:
        bad.unlink(missing_ok=True)  # a file system may flush a file that is truncated, which takes milliseconds
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=r"funcrec\.Package\.apply: `"):
            package.apply(bad)
    assert bits(package.params) == before and package.version == "0"
    package.apply(path)
    assert bits(package.params) != before


def test_deltas_go_in_their_order(plain, first, tmp_path):
    """A delta of another version or package, or one that is applied twice, raises. The error names the next version."""
    package = fr.load_package(plain)
    one, _ = STEP(first, batch(1))
    two, _ = STEP(one, batch(2))
    a = fr.write_delta(tmp_path / "a", fr.delta(one), plain, REST(one), version="1")
    b = fr.write_delta(tmp_path / "b", fr.delta(two, 1), plain, REST(two), version="2", since="1")
    before = bits(package.params)
    with pytest.raises(ValueError, match="not the next delta"):
        package.apply(b)
    assert bits(package.params) == before
    package.apply(a)
    with pytest.raises(ValueError, match=r"from '0' to '1'"):
        package.apply(a)
    package.apply(b)
    assert package.version == "2"
    foreign = fr.write_delta(tmp_path / "c", fr.delta(two), package, REST(two), version="3")
    other = lambda content, _: content["__metadata__"].__setitem__("manifest", "0" * 64)
    foreign.write_bytes(tensor_files.changed(foreign.read_bytes(), other))
    with pytest.raises(ValueError, match="of another package"):
        package.apply(foreign)


def test_answers_are_of_one_version(plain, first, tmp_path):
    """Threads that predict while deltas are applied get the weights of one version in each call, never of two
    versions."""
    package, run, asked = fr.load_package(plain, threads=2), first, batch(7, 8)
    right, files = [package(asked)], []
    reader = fr.load_package(plain)
    for i in range(1, 7):
        sent = run.log.version
        run, _ = STEP(run, batch(i, 8))
        own = fr.write_delta(tmp_path / str(i), fr.delta(run, sent), reader, REST(run), version=str(i))
        reader.apply(own)
        files.append(own)
        right.append(reader(asked))
    answers, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            answers.append(package(asked))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for t in threads:
        t.start()
    for file in files:
        seen = len(answers)
        while len(answers) < seen + 4:
            pass
        package.apply(file)
    stop.set()
    for t in threads:
        t.join()
    answers.append(package(asked))
    found = [next((i for i, want in enumerate(right) if torch.equal(x, want)), None) for x in answers]
    assert None not in found and found[-1] == len(files)
    assert len(set(found)) > 3


def test_a_file_that_is_not_there(plain, tmp_path):
    """A delta that cannot be read raises the system's kind of error, with the path."""
    with pytest.raises(FileNotFoundError, match=r"funcrec\.Package\.apply: `.*missing` cannot be read"):
        fr.load_package(plain).apply(tmp_path / "missing")


def test_an_interrupted_apply_leaves_the_old_weights(plain, first, tmp_path, monkeypatch):
    """If apply is interrupted while rows are written, the package keeps every bit and its version. The package then
    continues to answer."""
    from funcrec.serve.freshness import _apply

    package = fr.load_package(plain)
    run, _ = STEP(first, batch(1))
    path = fr.write_delta(tmp_path / "1", fr.delta(run), package, REST(run), version="1")
    before, put = bits(package.params), _apply.put

    def half(tensors, changes):
        monkeypatch.setattr(_apply, "put", put)
        put(tensors, dict(list(changes.items())[:2]))
        raise KeyboardInterrupt

    monkeypatch.setattr(_apply, "put", half)
    with pytest.raises(KeyboardInterrupt):
        package.apply(path)
    assert bits(package.params) == before and package.version == "0"
    package.apply(path)
    assert package.version == "1"


def test_what_is_left_as_it_is_is_said(plain, first, tmp_path):
    """Dense parameters are part of a delta. Without them the delta raises, unless params=None says that they stay."""
    package = fr.load_package(plain)
    run, _ = STEP(first, batch(1))
    with pytest.raises(ValueError, match="lack parameters without rows in `delta`") as error:
        fr.write_delta(tmp_path / "1", fr.delta(run), package, fr.Params({}, {"w": run.state.dense["w"]}), version="1")
    assert "dense['b']" in str(error.value)
    dense = {n: x for n, x in bits(package.params).items() if "dense" in n}
    package.apply(fr.write_delta(tmp_path / "1", fr.delta(run), package, None, version="1"))
    now = package.params
    assert {n: x for n, x in bits(now).items() if "dense" in n} == dense
    assert torch.equal(now["tables['int8']"], run.state.tables["int8"])


def test_a_name_of_two_tables_is_refused(plain, first, tmp_path):
    """Two parameters of a package may be tables with one name, such as those of a model and of its average. A delta
    then raises with the name and both parameters. A run that would publish these tables raises, too."""

    def share(found):
        one, other = (t for t in found["tables"] if t["name"] in ("int8", "int4"))
        other.update({**one, "param": other["param"]})

    package = changed_manifest(plain, tmp_path / "two", share)
    run, _ = STEP(first, batch(1))
    with pytest.raises(ValueError, match="several parameters are tables called 'int") as error:
        fr.write_delta(tmp_path / "1", fr.delta(run), package, REST(run), version="1")
    assert "tables['int4'], tables['int8']" in str(error.value) and not (tmp_path / "1").exists()
    with pytest.raises(ValueError, match="several parameters are tables called 'int"):
        fr.publish(tmp_path / "published", package, every_steps=1)
    other = fr.Delta({"float16": fr.delta(run).tables["float16"]}, torch.tensor(1))
    # this delta has no rows of these tables
    fr.write_delta(tmp_path / "2", other, package, None, version="1")


BAD = {
    "the version it has": ({"version": "0"}, ValueError, "`version` is already"),
    "another shape": ({"params": fr.Params({}, {"w": torch.ones(3), "b": torch.zeros(())})}, ValueError, "is not the"),
    "a file in no folder": ({"path": "missing/1.delta"}, FileNotFoundError, "the folder of `path` is not there"),
    "a folder": ({"path": "."}, ValueError, "`path` does not name a file"),
    "no delta": ({"delta": 3}, TypeError, "`delta`"),
    "another table": ({"delta": fr.Delta({"int8": ()}, torch.tensor(1))}, ValueError, "lack parameters without rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_told(name, plain, first, tmp_path):
    """A wrong argument raises before any file is written, in four parts."""
    changed, kind, text = BAD[name]
    run, _ = STEP(first, batch(1))
    good = {"path": tmp_path / "1", "delta": fr.delta(run), "package": plain, "params": REST(run), "version": "1"}
    with pytest.raises(kind) as error:
        fr.write_delta(**{**good, **changed})
    assert "funcrec.write_delta" in str(error.value) and text in str(error.value) and "  need  " in str(error.value)
    assert not list(tmp_path.iterdir())


def part_with(**fields):
    """Return a function of a run: its delta, whose only table has a part with other fields, or with one of these."""
    made = lambda part: {n: f(part) for n, f in fields.items()}
    return lambda run: fr.Delta(
        {"int8": (replace(part := fr.delta(run).tables["int8"][0], **made(part)),)}, run.log.version
    )


def of_columns(*spans):
    """Return a function of a run: its delta with a part for each of (first column, end, number of rows)."""
    cut = lambda p, a, b, n: fr.history.ChangedRows(p.rows[:n], p.values[:n, a:b], a, p.shape)
    return lambda run: fr.Delta(
        {"int8": tuple(cut(fr.delta(run).tables["int8"][0], *span) for span in spans)}, run.log.version
    )


BROKEN = {
    "rows of another table": (part_with(shape=lambda p: (31, 8)), ValueError, "is of another table"),
    "columns after the last": (part_with(first=lambda p: 1), ValueError, "is of another table"),
    "fewer rows than values": (part_with(rows=lambda p: p.rows[1:]), ValueError, "is of another table"),
    "codes": (part_with(values=lambda p: p.values.to(torch.uint8)), TypeError, "is not of floats on the CPU"),
    "another device": (lambda run: part_with()(run).to("meta"), TypeError, "is not of floats on the CPU"),
    "a row twice": (part_with(rows=lambda p: torch.cat([p.rows[:1], p.rows[:-1]])), ValueError, "has rows twice"),
    "a row outside": (part_with(rows=lambda p: p.rows + 30), ValueError, "has rows twice, or outside"),
    "a row before the first": (part_with(rows=lambda p: p.rows - 30), ValueError, "has rows twice, or outside"),
    "columns without their neighbours": (of_columns((0, 4, 7)), ValueError, "does not have all columns"),
    "other rows of each column": (of_columns((0, 4, 7), (4, 8, 6)), ValueError, "7 rows' columns 0 to 4, 6 rows'"),
    "no part": (lambda run: fr.Delta({"int8": (3,)}, run.log.version), TypeError, "has no rows"),
    "nothing of the package": (
        lambda run: fr.Delta({"other": ()}, run.log.version),
        ValueError,
        "nothing of the package",
    ),
    "a tracked tensor": (part_with(values=lambda p: p.values.requires_grad_()), TypeError, "is being differentiated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_delta_that_does_not_fit_is_refused(name, coded, first, tmp_path):
    """Rows that are not the whole rows of a table of the package, each once, raise before any file is written."""
    made, kind, text = BROKEN[name]
    run, _ = STEP(first, batch(1))
    with pytest.raises(kind, match=r"funcrec\.write_delta: ") as error:
        fr.write_delta(tmp_path / "1", made(run), coded, None, version="1")
    assert text in str(error.value) and not list(tmp_path.iterdir())


def test_parts_of_columns_are_one_delta(coded, first, tmp_path):
    """Parts of columns, in any order, give the file of the whole rows."""
    run, _ = STEP(first, batch(1))
    files = [fr.write_delta(tmp_path / n, of_columns(*spans)(run), coded, None, version="1").read_bytes()
             for n, spans in (("whole", [(0, 8, 7)]), ("parts", [(3, 8, 7), (0, 3, 7)]))]  # fmt: skip
    assert files[0] == files[1]


def test_a_process_without_python_takes_the_same_files(coded, first, tmp_path):
    """In C++ the outputs after each delta are those of Python, bit for bit. Damaged deltas, and deltas that are not the
    next, raise."""
    package, run = fr.load_package(coded), first
    asked = batch(9)
    ids = asked.ids.permute([f["name"] for f in package.manifest["features"]])
    with answers.Answers(answers.build() / "funcrec-answers", coded) as other:
        ask = lambda: other.run(5, None, ids.values, ids.offsets)
        for i in range(1, 4):
            sent = run.log.version
            run, _ = STEP(run, batch(i))
            path = fr.write_delta(tmp_path / str(i), fr.delta(run, sent), package, REST(run), version=str(i))
            whole, bad = path.read_bytes(), tmp_path / "bad"
            for n in range(0, len(whole), 29):
                for data in (whole[:n], whole[:n] + bytes([whole[n] ^ 4]) + whole[n + 1 :]):
                    bad.write_bytes(data)
                    with pytest.raises(answers.AnswersError, match="  need  "):
                        other.apply(bad)
            answer = ask()
            assert torch.equal(answer.outputs[0], package(asked)) and answer.version == package.version
            package.apply(path)
            other.apply(path)
            answer = ask()
            assert torch.equal(answer.outputs[0], package(asked)) and answer.version == str(i)
            with pytest.raises(answers.AnswersError, match="not the next delta"):
                other.apply(path)


def test_rows_of_learned_scales_are_refused():
    """A delta cannot give codes with learned scales. Rows of such tables therefore raise with the name of the table."""
    clicked = fr.FeatureConfig("clicked", table="item")
    loss = lambda p, b: fr.lookup(p.tables, b.ids, [clicked]).values.sum()
    kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    step = fr.logged(fr.train_step(loss, **kind), steps=0)
    tables = fr.fake_quantize({"item": torch.eye(3, 2)}, "int8", scales="learned")
    run = step.init(fr.Params(tables, {"w": torch.ones(())}))
    run, _ = step(run, fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 2], [2]]}), torch.ones(2)))
    found = list(tables_problems(fr.delta(run), {"item": {"name": "item", "rows": 3, "dim": 2}}))
    assert [p.what for p in found] == ["`delta.tables['item']` has learned scales."]

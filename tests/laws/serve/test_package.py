"""A package gives the outputs of its exported function, or an error says what is wrong with the package."""

import json
import re
import shutil
import subprocess
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import packages, tensor_files
from programs.shared_bags import with_inverse
from torch._subclasses.fake_tensor import FakeTensorMode

import funcrec as fr
from funcrec.files import Folder
from funcrec.serve import _export, _manifest
from funcrec.serve._weights import FILE, read_index

# compiled once
pytestmark = pytest.mark.xdist_group("packages")


@pytest.fixture(scope="module")
def path(packaged):
    return packaged


@pytest.fixture(scope="module")
def package(path):
    return fr.load_package(path)


@pytest.fixture
def copy(path, tmp_path):
    return shutil.copytree(path, tmp_path / "copy")


def same(got, want):
    assert set(got) == set(want)
    for n, x in got.items():
        assert x.shape == want[n].shape and (x.numel() == 0 or (x - want[n]).abs().max() <= 1e-6)


@pytest.mark.parametrize("num_bags", [0, 1, 3, 64, 512])
@pytest.mark.parametrize("most", [0, 1, 5, 40])
def test_one_program_takes_every_batch(package, num_bags, most):
    """For any number of bags and ids, some outside their tables, the package gives the outputs of `predict`."""
    batch = packages.batch(num_bags, seed=num_bags + most, most=most)
    same(package(batch), packages.predict(packages.params(), batch))


def test_shared_bags_have_the_answers_of_whole_ones(package):
    """Examples that share bags get the bits of a bag for each example: with weights, i32 indices, other orders of keys,
    one example and none."""
    few, which = packages.batch(6, seed=3), [0, 1, 1, 2, 2, 2, 5, 0]
    whole = fr.Batch(few.ids[which], dense=torch.randn(8, 3))
    for count in (8, 1, 0):
        batch = fr.Batch(whole.ids[:count], dense=whole.dense[:count])
        once = fr.dedup_bags(batch.ids, ["user", "seen"])
        turned = fr.dedup_bags(batch.ids).permute(["seen", "user", "item"])
        for ids in (once, turned, with_inverse(once, once.inverse.int())):
            got, want = package(fr.Batch(ids, dense=batch.dense)), package(batch)
            assert all(torch.equal(got[n], want[n]) for n in want)


def test_columns_go_by_their_names(package):
    """Keys in another order, i32 ids and offsets, padding, labels and weights of examples change no output."""
    batch = packages.batch(4, seed=9)
    want, ids = package(batch), batch.ids
    turned = ids.permute(["seen", "user", "item"])
    small = fr.KeyedJaggedTensor(
        ids.values.int(), ids.offsets.int(), ids.weights, keys=ids.keys, unweighted=ids.unweighted
    )
    for other in (turned, small, ids.pad_to(100)):
        got = package(fr.Batch(other, label=torch.ones(4), dense=batch.dense, weight=torch.ones(4)))
        assert all(torch.equal(got[n], want[n]) for n in want)


def test_raw_rows_are_encoded_as_in_training(package):
    """`encode` of columns, of a list of rows and of a data frame gives the batch of the encoding, in the package's
    order of keys."""
    batch = fr.data.encode(packages.encoding(), packages.ROWS).take(torch.arange(3))
    want = packages.predict(packages.params(), batch)
    rows = [{n: x[i] for n, x in packages.ROWS.items()} for i in range(3)]
    import pyarrow as pa

    for raw in (packages.ROWS, rows, pa.table(packages.ROWS)):
        same(package(package.encode(raw)), want)


def test_the_manifest_tells_what_is_read(package, path):
    """The manifest lists inputs, outputs, tables with their parameters, and the rows for each column."""
    found = package.manifest
    assert found == json.loads((path / "manifest.json").read_text()) and found["format"] == 2
    assert [x["name"] for x in found["inputs"]] == ["dense", "values", "offsets", "weights"]
    assert found["inputs"][0]["shape"] == ["B", 3] and found["inputs"][2]["shape"] == ["F*B+1"]
    assert found["outputs"] == [
        {"name": "click", "dtype": "float32", "shape": ["B"]},
        {"name": "last", "dtype": "float32", "shape": ["B", 8]},
    ]
    rows = {x["name"]: (x["rows"], x["weighted"]) for x in found["features"]}
    assert rows == {"user": (50, False), "item": (100, False), "seen": (100, True)}
    assert {x["name"]: x["param"] for x in found["tables"]}["item"] == "tables['item']"
    assert {x["name"]: (x["rows"], x["dim"], x["bits"]) for x in found["tables"]}["user"] == (50, 8, 32)
    assert [x["name"] for x in found["params"]] == sorted(x["name"] for x in found["params"])


def test_a_portable_program_has_no_wide_registers(path, tmp_path):
    """The code of `isa="portable"` uses at most 256-bit vectors."""
    with zipfile.ZipFile(path / "model.pt2") as file:
        (name,) = [n for n in file.namelist() if n.endswith(".so")]
        library = file.extract(name, tmp_path)
    said = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "%ymm" in said and "%zmm" not in said


def test_what_is_compiled_lies_apart(path):
    """An export compiles in its own folder, which is removed afterwards. In a shared folder, another process that
    exports the same function could write to the files while the export packs them."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with zipfile.ZipFile(path / "model.pt2") as archive:
        (kernel,) = (n for n in archive.namelist() if n.endswith(".kernel.cpp"))
        folder = Path(re.search(r"^// g\+\+ (\S+)\.kernel\.cpp ", archive.read(kernel).decode(), re.M)[1]).parent
    assert folder.is_absolute() and not folder.exists() and Path(cache_dir()) not in folder.parents


def test_a_package_is_small_and_opens_fast(path):
    """Without its weights a package is below 5 MB. To open it, with the weights read once, takes at most 50 ms of
    CPU."""
    assert sum(x.stat().st_size for x in path.iterdir() if x.name != FILE) < 5e6
    took = []
    for _ in range(3):
        before = time.process_time()
        fr.load_package(path)
        took.append(time.process_time() - before)
    assert min(took) < 0.05


def test_quantised_tables_are_parameters_as_others(tmp_path):
    """Tables of 8 and 4 bits and of f16, read in one lookup, are exported unchanged. The manifest has the bits of each
    table. The example has inverse indices, so the program pools shared bags once. All batches get the same bits."""
    clicked, seen, last = (fr.FeatureConfig(n, table=t) for n, t in (("clicked", "a"), ("seen", "b"), ("last", "c")))
    tables = fr.init(fr.key(0), [fr.TableConfig(n, 20, dim) for n, dim in (("a", 5), ("b", 8), ("c", 3))])
    params = {"q": fr.quantize(tables, {"a": "int8", "b": "int4", "c": "float16"}), "w": torch.randn(16)}
    rows = fr.FeatureConfig("rows", table="b", column="seen", pooling="none", max_length=2)

    def predict(p, b):
        pooled = fr.lookup(p["q"], b.ids, (clicked, seen, last)).values @ p["w"]
        return {"x": pooled, "rows": fr.lookup_sequence(p["q"], b.ids, [rows])["rows"].to_padded(2)}

    lists = {"clicked": [[1, 2], [], [19, 20]], "seen": [[3], [-1, 4], [3]], "last": [[0, 0]] * 3}
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists(lists))
    once = fr.Batch(fr.dedup_bags(batch.ids))
    package = fr.load_package(fr.export(predict, params, once, tmp_path / "model"))
    assert [x["shape"] for x in package.manifest["inputs"]] == [["N"], ["F*U+1"], [3, "B"]] and once.ids.strides
    same(package(batch), predict(params, batch))
    for own in (batch, fr.Batch(batch.ids[:1]), fr.Batch(batch.ids[:0]), fr.Batch(batch.ids[[2, 0, 0, 1] * 9])):
        want = package(own)
        for ids in (fr.dedup_bags(own.ids), fr.dedup_bags(own.ids, ["last"]), fr.pad_to_bucket(fr.dedup_bags(own.ids))):
            got = package(fr.Batch(ids))
            assert all(torch.equal(got[n], want[n]) for n in want)
    with pytest.raises(ValueError, match=r"`ids\.inverse` names bags"):
        package(fr.Batch(with_inverse(once.ids, once.ids.inverse + 1)))
    found = {x["name"]: (x["bits"], x["dim"], x["rows"], x["param"]) for x in package.manifest["tables"]}
    at = lambda n: f"['q'].tables['{n}']"
    assert found == {"a": (8, 5, 20, at("a")), "b": (4, 8, 20, at("b")), "c": (16, 3, 20, at("c"))}


# -- weights -----------------------------------------------------------------------------------------------------


def test_weights_are_exchanged_while_others_call(path, tmp_path):
    """While weights are swapped, every output is from one version, the old or the new version."""
    package = fr.load_package(path, threads=2)
    batch = packages.batch(3)
    folders = [fr.save_weights(tmp_path / f"w{i}", packages.params(i), version=f"v{i}") for i in (0, 1)]
    want = []
    for folder in folders:
        package.swap(folder)
        want.append(package(batch))
    stop, wrong, count = threading.Event(), [], []

    def call():
        while not stop.is_set():
            got = package(batch)
            count.append(1)
            if not any(all(torch.equal(got[n], x[n]) for n in x) for x in want):
                wrong.append(got)

    threads = [threading.Thread(target=call) for _ in range(3)]
    [t.start() for t in threads]
    for i in range(60):
        package.swap(folders[i % 2])
    stop.set()
    [t.join() for t in threads]
    assert not wrong and count and package.version == "v1"


def test_weights_are_nobodys_to_write(path):
    """A write to `params` changes no output, no other package and no file."""
    package, batch = fr.load_package(path), packages.batch(3)
    want, before = package(batch), (path / FILE).read_bytes()
    for x in package.params.values():
        x.zero_()
    same(package(batch), want)
    same(fr.load_package(path)(batch), want)
    assert (path / FILE).read_bytes() == before
    assert all(
        torch.equal(x, y) for x, y in zip(package.params.values(), fr.load_package(path).params.values(), strict=True)
    )


def version_of(folder):
    return read_index("test", Folder(folder))[2]


def test_versions_are_names_of_values(tmp_path):
    """Without an explicit version, equal values get one version name. Different values get another name."""
    version = lambda n, x: version_of(fr.save_weights(tmp_path / n, {"w": x}))
    assert version("a", torch.ones(3)) == version("b", torch.ones(3)) != version("c", torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_weights_of_every_dtype_and_shape_come_back(dtype, tmp_path):
    """Weights written by save_weights are mapped bit for bit: views, scalars, tensors without elements."""
    from funcrec.serve._weights import named, read_weights, signature

    given = {
        "a": torch.arange(12).reshape(3, 4).to(dtype).t(),
        "b": torch.ones((), dtype=dtype),
        "c": torch.zeros(0, 2, dtype=dtype),
    }
    want = named(given)
    folder = Folder(fr.save_weights(tmp_path / "w", given))
    found = read_weights("test", folder, {"params": signature(want)}, checksums=True).tensors
    assert all(torch.equal(found[n], x) and x.dtype == found[n].dtype for n, x in want.items())


# -- whole or not there ------------------------------------------------------------------------------------------


def test_a_package_is_whole_or_not_there(path, tmp_path, monkeypatch):
    """An export that fails leaves the previous files and no other file."""
    there = shutil.copytree(path, tmp_path / "model")
    before = {x.name: x.read_bytes() for x in there.iterdir()}

    def broken(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_export, "compile_program", broken)
    for target, more in (("model", {"overwrite": True}), ("new", {})):
        with pytest.raises(KeyboardInterrupt):
            fr.export(lambda params, batch: batch.dense @ params["w"], {"w": torch.ones(3)}, packages.batch(3),
                tmp_path / target, **more)  # fmt: skip
    assert [x.name for x in tmp_path.iterdir()] == ["model"]
    assert {x.name: x.read_bytes() for x in there.iterdir()} == before


def test_weights_are_replaced_whole(tmp_path):
    """overwrite=True replaces weights. Without overwrite, or where the folder holds no weights, no file changes."""
    first = fr.save_weights(tmp_path / "w", {"w": torch.ones(3)}, version="first")
    with pytest.raises(FileExistsError, match="is there already"):
        fr.save_weights(first, {"w": torch.zeros(3)})
    fr.save_weights(first, {"w": torch.zeros(3)}, version="second", overwrite=True)
    assert version_of(first) == "second"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match="holds something else"):
        fr.save_weights(tmp_path / "mine", {"w": torch.zeros(3)}, overwrite=True)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["mine", "w"]


# -- refused -----------------------------------------------------------------------------------------------------


def edited(file, old, new):
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(old, new, 1))


def cut(file, count):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-count])


def flipped(file, at):
    def flip(folder):
        data = bytearray((folder / file).read_bytes())
        data[at] ^= 1
        (folder / file).write_bytes(data)

    return flip


def retold(key, value):
    """Return a function that changes or removes a text of the weights and writes the right CRCs."""

    def change(content, _):
        content["__metadata__"] |= {key: value}
        content["__metadata__"] = {k: x for k, x in content["__metadata__"].items() if x is not None}

    def write(folder):
        path = folder / FILE
        path.write_bytes(tensor_files.changed(path.read_bytes(), change, 4096))

    return write


def rewritten(**changes):
    """Change entries of the manifest, and give the manifest the right digest."""

    def write(folder):
        content = json.loads((folder / "manifest.json").read_text()) | changes
        content["digest"] = _manifest.digest_of(_manifest.text_of(content))
        (folder / "manifest.json").write_text(_manifest.text_of(content))

    return write


DAMAGES = {
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "is not a package"),
    "half a manifest": (cut("manifest.json", 40), "is damaged"),
    "a changed manifest": (edited("manifest.json", '"max_batch": 4096', '"max_batch": 8192'), "was changed"),
    "rows": (edited("manifest.json", '"rows": 50', '"rows": 51'), "was changed"),
    "another format": (rewritten(format=4), "another format"),
    "a format without its entry": (rewritten(format=3), "turned"),
    "a turned vector": (rewritten(format=3, turned=["dense['bias']"]), r"turned\[0\]` is wrong"),
    "another torch": (rewritten(torch="2.9.1"), "another torch"),
    "another processor": (rewritten(needs=["avx2", "avx9"]), "lacks"),
    "another program's manifest": (rewritten(max_batch=8192), "is not the manifest's program"),
    "a changed program": (flipped("model.pt2", 5000), "`.*model.pt2` was changed"),
    "half a program": (cut("model.pt2", 9), "`.*model.pt2` was changed"),
    "no program": (lambda p: (p / "model.pt2").unlink(), "`.*model.pt2` was changed"),
    "a changed encoding": (flipped("encoding.frc", 50), "`.*encoding.frc` was changed"),
    "no weights": (lambda p: (p / FILE).unlink(), "has no weights"),
    "half the weights": (cut(FILE, 100), "is cut off"),
    "more weights": (lambda p: (p / FILE).write_bytes((p / FILE).read_bytes() + b"1"), "goes on past its end"),
    "a changed weight": (flipped(FILE, -1), "was changed, in"),
    "a changed header": (flipped(FILE, 100), "was changed"),
    "another kind of weights": (retold("format", "funcrec weights 9"), "is of another format"),
    "no version": (retold("version", None), "is damaged"),
    "weights of another model": (
        lambda p: shutil.copy(fr.save_weights(p.parent / "o", {"w": torch.ones(2)}) / FILE, p),
        "other parameters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_changed_is_refused_with_the_reason(name, copy):
    """A package with a missing, cut, changed or foreign file raises at open. The error says why."""
    fr.load_package(copy)
    damage, reason = DAMAGES[name]
    damage(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=reason) as error:
        fr.load_package(copy)
    assert {"got", "need", "try"} <= set(re.findall(r"^  (got|need|try)   ?", str(error.value), re.M))


def test_a_swap_that_fails_changes_nothing(path, tmp_path):
    """Weights of another signature, or damaged weights, raise. The package continues with its present weights."""
    package, batch = fr.load_package(path), packages.batch(3)
    want = package(batch)
    other = packages.params().dense
    bad = [fr.save_weights(tmp_path / "a", {"w": torch.ones(2)}), fr.save_weights(tmp_path / "b", other)]
    more = replace(packages.params(1), dense={**packages.params(1).dense, "more": torch.ones(1)})
    bad.append(fr.save_weights(tmp_path / "e", more))
    bad.append(fr.save_weights(tmp_path / "c", packages.params(1).to(torch.float64)))
    bad.append(fr.save_weights(tmp_path / "d", packages.params(1)))
    flipped(FILE, -4)(bad[-1])
    for folder in bad:
        with pytest.raises(ValueError, match=r"other parameters|was changed"):
            package.swap(folder)
        assert package.version == "first"
    same(package(batch), want)


ids = lambda **own: fr.KeyedJaggedTensor.from_lists({k: own.get(k, [[1], [2]]) for k in packages.KEYS},
    weights={"seen": own.get("by", [[1.0], [1.0]])})  # fmt: skip
DENSE = torch.zeros(2, 3)
BATCHES = {
    "no batch": (lambda: ids(), TypeError, "`batch` is not a batch"),
    "a missing key": (lambda: fr.Batch(ids().permute(["user", "seen"]), dense=DENSE), KeyError, "lacks keys"),
    "a key too many": (lambda: fr.Batch(fr.KeyedJaggedTensor.from_lists(
        {k: [[1], [2]] for k in (*packages.KEYS, "more")}, weights={"seen": [[1.0], [1.0]]}), dense=DENSE),
        KeyError, "does not read"),
    "no weights": (lambda: fr.Batch(fr.KeyedJaggedTensor.from_lists(ids().to_lists()), dense=DENSE),
        ValueError, "other keys have weights"),
    "no dense": (lambda: fr.Batch(ids()), ValueError, "`batch.dense` is missing"),
    "narrow dense": (lambda: fr.Batch(ids(), dense=DENSE[:, :2]), ValueError, "`batch.dense` does not fit"),
    "short dense": (lambda: fr.Batch(ids(), dense=DENSE[:1]), ValueError, "`batch.dense` does not fit"),
    "dense of f64": (lambda: fr.Batch(ids(), dense=DENSE.double()), TypeError, "is not f32"),
    "bags of no example": (lambda: fr.Batch(ids(user=[[1]]), dense=DENSE), ValueError, "different numbers of bags"),
    "shared bags that do not exist": (lambda: fr.Batch(with_inverse(ids(), torch.full((3, 2), 2)), dense=DENSE),
        ValueError, "names bags of 'user' that do not exist"),
    "shared bags of too many ids": (lambda: fr.Batch(with_inverse(ids(user=[[1] * 9000, [2]]), torch.zeros(3, 2000,
        dtype=torch.int64)), dense=torch.zeros(2000, 3)), ValueError, "too many ids"),
    "too many bags": (lambda: packages.batch(4097, most=0), ValueError, "too many bags"),
    "tracked": (lambda: fr.Batch(ids(), dense=torch.zeros(2, 3, requires_grad=True)), TypeError, "under a transform"),
    "without memory": (lambda: fr.tree.map(FakeTensorMode().from_tensor, packages.batch(2)), TypeError, "being traced"),
    "on no device": (lambda: packages.batch(2).to("meta"), ValueError, "another device"),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_do_not_fit_are_refused(name, package):
    """A batch with other columns, sizes or dtypes than those of the package raises before any work."""
    make, kind, reason = BATCHES[name]
    with pytest.raises(kind, match=reason):
        package(make())


def test_paths_that_are_taken_are_refused(path, tmp_path):
    """An existing folder, or a folder whose parent does not exist, raises before any work."""
    before = {x.name: x.stat().st_mtime_ns for x in path.iterdir()}
    with pytest.raises(FileExistsError, match="overwrite"):
        packages.export(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        packages.export(tmp_path / "no" / "model")
    with pytest.raises(FileExistsError, match="is a package"):
        fr.save_weights(path, packages.params(), overwrite=True)
    assert {x.name: x.stat().st_mtime_ns for x in path.iterdir()} == before


@pytest.mark.parametrize(("bags", "scale"), [([[1]], float("nan")), ([[], []], 1.0)], ids=["NaN", "no ids"])
def test_a_package_without_a_canary_is_warned_of(bags, scale, tmp_path, monkeypatch):
    """export warns if its example gives no finite output that depends on the tables. A server uses this output to
    detect diverged weights."""
    # the warning comes before the compilation
    monkeypatch.setattr(_export, "compile_program", lambda *arguments: None)
    feature = fr.FeatureConfig("c", table="item")
    predict = lambda params, batch: fr.lookup(params.tables, batch.ids, [feature]).values
    params = fr.Params({"item": torch.ones(4, 3) * scale}, {})
    with pytest.warns(UserWarning, match="shows no finite answer"), pytest.raises(FileNotFoundError):
        ids = fr.KeyedJaggedTensor.from_lists({"c": bags}, dtype=torch.int64)
        fr.export(predict, params, fr.Batch(ids), tmp_path / "package")

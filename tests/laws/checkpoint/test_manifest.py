"""The manifest of a folder: its size is in files and tensors, not in blocks; folders of the earlier format load."""

import json

import pytest
import torch

import funcrec as fr
from funcrec.checkpoint import _folder
from funcrec.checkpoint._folder import MANIFEST, WITH_BLOCKS, Files, read_manifest, whole_pieces
from funcrec.checkpoint._format import Block, Stored, read_index, write_file
from funcrec.checkpoint._tree_json import decode, encode
from funcrec.files import write_whole

AXES = {"x": 3}
PLANS = {
    "row_wise": fr.Plan({"a": fr.row_wise("x"), "b": fr.row_wise("x")}),
    "column_wise": fr.Plan({"a": fr.column_wise("x"), "b": fr.table_wise("x", rank=1)}),
    "replicated": fr.Plan({"a": fr.replicated(), "b": fr.table_wise("x", rank=2)}),
}


def a_state(plan):
    step = fr.train_step(
        lambda params, batch: 0.0, sparse=fr.optim.adam(), dense=fr.optim.dense(torch.optim.SGD, lr=0.1),
        mesh=fr.Mesh.emulated(**AXES), plan=plan,
    )  # fmt: skip
    tables = {"a": torch.randn(500, 3, generator=torch.Generator().manual_seed(0)), "b": torch.ones(131, 2)}
    return step.init(fr.Params(tables, {"w [0:1, 0:2]": torch.arange(7.0)}))


def in_earlier_format(folder):
    """Write the manifest of the folder again, with every block of every file, as format 2 had it."""
    found = read_manifest("", folder)
    files, numbers = Files("", folder, found.files, {}, set(), {}), {n: i for i, n in enumerate(found.files)}
    leaves = []
    for x in found.leaves:
        blocks = [b for held in x.blocks for b in files.blocks_of(held, x)]
        where = [[numbers[b.file], b.offset, b.first, b.first_column, b.rows, b.columns, b.crc] for b in blocks]
        leaves.append([x.name, str(x.dtype).removeprefix("torch."), list(x.shape), list(x.grid), x.device, where])
    files.close()
    content = {"files": [[n, size] for n, size in found.files.items()], "tensors": leaves, "tree": found.code}
    code = encode({"format": WITH_BLOCKS, "manifest": json.dumps(content)}, "manifest").code
    write_whole("", folder / MANIFEST, lambda file: write_file(file, code, [], [], lambda: None))


def rewritten(folder, change):
    """Write the manifest again, with right checksums, after change(tree), whose `manifest` is then a dict."""
    with open(folder / MANIFEST, "rb") as file:
        found, code = read_index(file)
        tree = decode(code, (_folder._in_memory(file, x) for x in found))
    tree["manifest"] = json.loads(tree["manifest"])
    change(tree)
    tree["manifest"] = json.dumps(tree["manifest"])
    told = encode(tree, "manifest")
    pieces = whole_pieces(told.tensors)
    write_whole("", folder / MANIFEST, lambda file: write_file(file, told.code, [*told.leaves], pieces, lambda: None))


def equal(x, y):
    pairs = zip(fr.core.tree_leaves(x), fr.core.tree_leaves(y), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("kind", PLANS)
def test_a_manifest_does_not_grow_with_blocks(kind, tmp_path, monkeypatch):
    """Blocks of few rows give the manifest of whole parts, but for the files' sizes. The folder loads whole, and under
    every other plan, as a folder of large blocks does."""
    state = a_state(PLANS[kind])
    large = fr.save(tmp_path / "large", state)
    monkeypatch.setattr(_folder, "BLOCK_BYTES", 1)
    small = fr.save(tmp_path / "small", state)
    told = [read_manifest("", folder) for folder in (large, small)]
    strip = lambda x: [(b.first, b.first_column, b.rows, b.columns) for b in x.blocks]
    assert list(map(strip, told[0].leaves)) == list(map(strip, told[1].leaves))
    assert (small / MANIFEST).stat().st_size - (large / MANIFEST).stat().st_size < 64
    files = Files("", small, told[1].files, {}, set(), {})
    assert sum(len(files.blocks_of(b, x)) for x in told[1].leaves for b in x.blocks) > 10
    files.close()
    assert equal(fr.load(small), fr.load(large)) and equal(fr.load(small, mmap=True), fr.load(large))
    for plan in PLANS.values():
        how = {"plan": plan, "mesh": fr.Mesh.emulated(x=4), "sparse": fr.optim.adam()}
        assert equal(fr.load(small, **how), fr.load(large, **how))


@pytest.mark.parametrize("kind", PLANS)
def test_folders_of_the_earlier_format_load(kind, tmp_path):
    """A folder whose manifest has every block loads to the same bits, whole and under another plan. `latest` finds it,
    and a new save replaces it."""
    state = a_state(PLANS[kind])
    path = fr.save(tmp_path, state, keep=2, step=7)
    new, how = fr.load(path), {"plan": PLANS["row_wise"], "mesh": fr.Mesh.emulated(x=2), "sparse": fr.optim.adam()}
    placed = fr.load(path, **how)
    in_earlier_format(path)
    assert equal(fr.load(path), new) and equal(fr.load(path, **how), placed)
    assert fr.latest(tmp_path) == path
    with pytest.raises(ValueError, match="is the manifest of a folder"):
        fr.load(path / MANIFEST)
    fr.save(path, state)
    assert equal(fr.load(path), new) and read_manifest("", path).files.keys() == {
        p.name for p in path.iterdir() if p.name != MANIFEST
    }


def test_an_index_that_has_other_rows_than_its_manifest_is_refused(tmp_path):
    """If the file of a rank is one of another save, with the name and length of the right one, load names the rows that
    it lacks."""
    one, two = (fr.save(tmp_path / str(i), a_state(PLANS[k])) for i, k in enumerate(("row_wise", "replicated")))
    mine, other = (sorted(p for p in folder.iterdir() if p.name.startswith("rank-1")) for folder in (one, two))
    found, size = read_manifest("", one), other[0].stat().st_size
    mine[0].write_bytes(other[0].read_bytes())
    files = Files("", one, {**found.files, mine[0].name: size}, {}, set(), {})
    x = next(x for x in found.leaves if any(b.file == mine[0].name for b in x.blocks))
    with pytest.raises(_folder.CodeError, match="which has other rows"):
        [files.blocks_of(b, x) for b in x.blocks]
    files.close()


def at(*path):
    """Return a function (value) -> a change that puts the value at the path in the manifest."""

    def put(tree, value):
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return lambda value: lambda tree: put(tree["manifest"], value)


def of_ranges(change):
    return lambda tree: tree.update(ranges=change(tree["ranges"]))


def range_with(column, value):
    return of_ranges(lambda x: torch.cat([x[:1].index_fill(1, torch.tensor([column]), value), x[1:]]))


HEAD, BLOCK = at("tensors", 0), lambda k: at("tensors", 0, 5, 0, k)
BOTH = {
    "no files": (lambda tree: tree["manifest"].pop("files"), "a manifest that cannot be read"),
    "a pair of three": (at("files", 0)(["rank-1", 2, 3]), "a manifest that cannot be read"),
    "a file elsewhere": (at("files", 0, 0)("../rank-1"), "files that cannot be"),
    "a size below 0": (at("files", 0, 1)(-1), "files that cannot be"),
    "a file twice": (lambda tree: tree["manifest"]["files"].append(tree["manifest"]["files"][0]), "named twice"),
    "tensors by name": (at("tensors")({}), "named twice"),
    "half a tensor": (HEAD(["a"]), "a tensor that cannot be"),
    "a dtype that torch lacks": (at("tensors", 0, 1)("float7"), "a tensor that cannot be"),
    "another grid": (at("tensors", 0, 3)([7, 7]), "a tensor that cannot be"),
}
NEW = {
    "no ranges": (lambda tree: tree.pop("ranges"), "a manifest that save did not write"),
    "ranges of floats": (of_ranges(torch.Tensor.double), "a manifest that save did not write"),
    "ranges of five": (of_ranges(lambda x: x[:, :5]), "a manifest that save did not write"),
    "another tensor in place of the ranges": (
        lambda tree: tree.update(ranges=3, others=torch.ones(2)), "a manifest that save did not write"),
    "a range of no tensor": (range_with(0, 99), "rows that cannot be"),
    "a range of no file": (range_with(3, 99), "rows that cannot be"),
    "a range below 0": (range_with(1, -1), "rows that cannot be"),
    "a range without rows": (range_with(4, 0), "rows that cannot be"),
    "a range that is gone": (of_ranges(lambda x: x[1:]), "with other rows than it has"),
    "a range twice": (of_ranges(lambda x: torch.cat([x[:1], x])), "with other rows than it has"),
    "columns that are gone": (range_with(2, 1), "with other rows than it has"),
}  # fmt: skip
EARLIER = {
    "no blocks": (at("tensors", 0, 5)(3), "a tensor that cannot be"),
    "a block of six numbers": (at("tensors", 0, 5, 0)([0] * 6), "a block of .* that cannot be"),
    "a block of no file": (BLOCK(0)(99), "a block of .* that cannot be"),
    "a block after the file": (BLOCK(1)(10**9), "a block of .* that is not in its file"),
    "a block without rows": (BLOCK(4)(0), "a block of .* that is not in its file"),
    "a block that is gone": (at("tensors", 0, 5)([]), "with other rows than it has"),
    "other columns": (BLOCK(3)(1), "with other rows than it has"),
}  # fmt: skip


CASES = [("new", *x) for x in {**BOTH, **NEW}.values()] + [("earlier", *x) for x in {**BOTH, **EARLIER}.values()]


@pytest.mark.parametrize(
    "kind, change, text", CASES, ids=[f"new, {n}" for n in BOTH | NEW] + [*map(str, BOTH | EARLIER)]
)
def test_a_manifest_that_does_not_fit_is_refused(kind, change, text, tmp_path):
    """A manifest with right checksums that save cannot have written raises in `load`, with what is wrong in it."""
    path = fr.save(tmp_path / "state", a_state(PLANS["row_wise"]))
    if kind == "earlier":
        in_earlier_format(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=rf"funcrec\.load: (.|\n)*{text}"):
        fr.load(path)


def test_ranges_of_a_file_that_holds_others_are_refused(tmp_path):
    """The index of a rank's file may say other rows than the name of a block can have."""
    stored = Stored("a [3:1, 0:2]", torch.float32, (4,), (4, 1), "cpu", (Block("", 0, 0, 0, 4, 1, 0),))
    with pytest.raises(_folder.CodeError, match="a block that cannot be"):
        _folder.labelled([stored], "rank-1")


@pytest.mark.parametrize("mmap", [False, True])
def test_no_bool_at_all(mmap, tmp_path):
    """Bools without elements load as other tensors do, also by mmap."""
    tree = {"none": torch.zeros(0, dtype=torch.bool), "rows": torch.zeros(3, 0, dtype=torch.bool)}
    assert equal(fr.load(fr.save(tmp_path / "x", tree), mmap=mmap), tree)


@pytest.mark.parametrize("mmap", [False, True])
def test_bytes_that_are_not_bools(mmap, tmp_path):
    """A bool of another byte than 0 and 1, with a right checksum, raises: torch would compute with it wrongly."""
    odd = torch.tensor([0, 7], dtype=torch.uint8).view(torch.bool)
    with pytest.raises(ValueError, match="with bytes that are not bools"):
        fr.load(fr.save(tmp_path / "x", {"odd": odd}), mmap=mmap)

"""The weights come from one folder, and have that folder's version, even if a folder is renamed during the read."""

import contextlib
import shutil
import threading

import pytest
import torch
from programs import answers, every_dtype

import funcrec as fr
from funcrec.files._whole_folder import take_name
from funcrec.serve import _weights

pytestmark = pytest.mark.xdist_group("every_dtype")
VERSIONS = ("first", "second")


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    """Return (two folders of weights, a batch, {version: the outputs of the batch with these weights})."""
    there = tmp_path_factory.mktemp("exchanged")
    paths = [fr.save_weights(there / v, every_dtype.params(n), version=v) for n, v in enumerate(VERSIONS)]
    batch, package, right = every_dtype.batch(5), fr.load_package(folder), {}
    for path in paths:
        package.swap(path)
        right[package.version] = package(batch)
    return paths, batch, right


@contextlib.contextmanager
def going_on(change):
    """Repeat `change` in a thread."""
    over = threading.Event()

    def run():
        while not over.is_set():
            change()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def outputs(answer, names):
    return dict(zip(names, answer.outputs, strict=True))


def assert_right(found, want):
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-6)


def test_cpp_takes_one_folder(two, built, folder):
    """While two folders exchange their names, each swap takes one of the folders whole, with checksums or without. No
    swap raises. The outputs are those of the version that they name."""
    paths, batch, right = two
    ids = batch.ids
    with answers.Answers(built / "funcrec-answers", folder) as running, going_on(lambda: take_name(*paths)):
        seen = set()
        for _ in range(400):
            running.swap(paths[0])
            got = running.run(ids.num_bags, batch.dense, ids.values, ids.offsets, ids.weights)
            assert_right(outputs(got, right[got.version]), right[got.version])
            seen.add(got.version)
    assert seen == set(VERSIONS)


def test_python_takes_one_folder(two, folder, monkeypatch):
    """If the folder is renamed after the read of its header, the header and the values come from the opened folder."""
    paths, batch, right = two
    own, package = _weights.read_index, fr.load_package(folder)

    def read_index(*args):
        found = own(*args)
        take_name(*paths)
        return found

    monkeypatch.setattr(_weights, "read_index", read_index)
    for checksums in (False, True) * 2:
        package.swap(paths[0], checksums=checksums)
        assert_right(package(batch), right[package.version])


@pytest.mark.parametrize("language", ["python", "cpp"])
def test_a_folder_that_is_written_again_is_never_refused(language, two, built, folder, tmp_path):
    """Weights that are overwritten during a read, with the old files removed, are read whole, old or new."""
    paths, batch, right = two
    path, turn = shutil.copytree(paths[0], tmp_path / "again"), iter(range(1 << 20))

    def write():
        version = VERSIONS[next(turn) % 2]
        fr.save_weights(path, every_dtype.params(VERSIONS.index(version)), version=version, overwrite=True)

    package = fr.load_package(folder)
    with answers.Answers(built / "funcrec-answers", folder, 1, 1, 1) as running, going_on(write):
        for _ in range(200):
            if language == "cpp":
                running.swap(path)
            else:
                package.swap(path)
                assert_right(package(batch), right[package.version])


@pytest.mark.parametrize("language", ["python", "cpp"])
def test_a_package_is_opened_whole(language, built, folder, tmp_path):
    """While two packages exchange their names, a package always opens, whatever the files of the other package."""
    paths = [shutil.copytree(folder, tmp_path / v) for v in VERSIONS]
    shutil.rmtree(paths[1])
    other = fr.save_weights(tmp_path / "w", every_dtype.params(1), version="second")
    shutil.copytree(folder, paths[1])
    shutil.copy(other / _weights.FILE, paths[1] / _weights.FILE)
    with answers.Answers(built / "funcrec-answers", folder, 1, 1, 1) as running, going_on(lambda: take_name(*paths)):
        for _ in range(30):
            running.open(paths[0]) if language == "cpp" else fr.load_package(paths[0])

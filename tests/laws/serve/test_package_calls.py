"""Calls of packages that are interrupted or staged, and callers that write to arguments or outputs."""

import signal
import threading
from queue import SimpleQueue

import pytest
import torch

import funcrec as fr
from funcrec.serve import _package
from funcrec.serve.freshness._apply import permits

pytestmark = pytest.mark.xdist_group("packages")

EXAMPLE = fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[1], [2]]}), dense=torch.ones(2, 3))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the folder of a function whose outputs are views of a parameter, of the batch, and of a constant."""

    def predict(params, batch):
        rows, two = batch.ids.num_bags, torch.tensor([1.0, 2.0])
        views = {"w": params["w"].expand(rows, 3), "dense": batch.dense, "two": two.expand(rows, 2)}
        return {**views, "x": batch.dense @ params["w"]}

    return fr.export(predict, {"w": torch.ones(3)}, EXAMPLE, tmp_path_factory.mktemp("packages") / "model")


@pytest.mark.parametrize("bags", [1, 3])
def test_answers_are_nobodys_memory(path, bags):
    """A write to an output, or to a batch, reaches no other output, no batch and no weight."""
    package = fr.load_package(path)
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[1]] * bags}), dense=torch.ones(bags, 3))
    first, want = package(batch), {n: x.clone() for n, x in package(batch).items()}
    batch.dense.zero_()
    assert all(torch.equal(x, want[n]) for n, x in first.items())
    for x in first.values():
        x[0] = 99.0
        assert (x[1:] != 99.0).all()
    again = package(fr.Batch(batch.ids, dense=torch.ones(bags, 3)))
    assert all(torch.equal(x, want[n]) for n, x in again.items()) and not batch.dense.any()


def test_what_a_package_has_not(path):
    """A package says what it reads and answers. Rows without an encoding, and more ids than it takes, raise."""
    package = fr.load_package(path)
    assert repr(package) == f"Package(a -> w, dense, two, x; version {package.version!r})"
    with pytest.raises(ValueError, match="the package has no encoding"):
        package.encode({"a": [[1]]})
    many = fr.KeyedJaggedTensor.from_lists({"a": [[1] * (package.manifest["max_ids"] + 1)]})
    with pytest.raises(ValueError, match="too many ids"):
        package(fr.Batch(many, dense=torch.ones(1, 3)))


def test_packages_are_not_staged(path):
    """A package inside fr.jit, torch.export or a fake mode raises, because the package would get no values."""
    package = fr.load_package(path)
    with pytest.raises(TypeError, match="being traced"):
        fr.jit(lambda batch: package(batch)["x"])(EXAMPLE)
    with torch._subclasses.fake_tensor.FakeTensorMode(), pytest.raises(TypeError, match="being traced"):
        package(EXAMPLE)


def test_an_interrupted_call_gives_its_permit_back(path):
    """Wherever Ctrl-C interrupts a call, the package answers the next call. Derivatives are as before."""
    package = fr.load_package(path)

    def interrupt(*_):
        raise KeyboardInterrupt

    before, met = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for i in range(1000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 5e-5 + 1e-6 * (i % 311))
                while True:
                    package(EXAMPLE)
            except KeyboardInterrupt:
                met += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    answered = threading.Event()
    threading.Thread(target=lambda: (package(EXAMPLE), answered.set()), daemon=True).start()
    assert met and answered.wait(10)
    w = torch.ones(3, requires_grad=True)
    (2 * w).sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))


def test_most_batches_are_not_looked_at_closely(path, monkeypatch):
    """A usual batch is accepted without the search for problems. An unusual batch is searched, and gives the same bits.
    Outputs are plain tensors, through which derivatives may pass."""
    package, searched = fr.load_package(path), []
    search = _package.batch_problems
    monkeypatch.setattr(_package, "batch_problems", lambda *args: searched.append(args) or search(*args))
    w = torch.ones(2, requires_grad=True)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            want = package(EXAMPLE)["x"]
        assert not searched and not want.requires_grad
    (package(EXAMPLE)["x"] * w).sum().backward()
    assert torch.equal(w.grad, want)
    ids, dense = EXAMPLE.ids, EXAMPLE.dense
    for own in (
        fr.Batch(fr.KeyedJaggedTensor(ids.values.int(), ids.offsets.int(), keys=ids.keys), dense=dense),
        fr.Batch(ids, dense=dense.T.contiguous().T),
        fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": []}), dense=dense[:0]),
    ):
        assert torch.equal(package(own)["x"], want[: own.ids.num_bags]) and not searched
    for own in (
        fr.Batch(fr.KeyedJaggedTensor(ids.values.float(), ids.offsets, keys=ids.keys), dense=dense),
        fr.Batch(ids, torch.ones(2), dense),
    ):
        searched.clear()
        assert torch.equal(package(own)["x"], want) and searched
    for wrong in (None, torch.ones(2, 4), torch.ones(3, 3), dense.double(), dense.clone().requires_grad_()):
        with pytest.raises((TypeError, ValueError), match=r"funcrec\.Package: "):
            package(fr.Batch(ids, dense=wrong))


def test_permits_taken_in_part_come_back():
    """A call that is interrupted while it waits for all permits returns the permits that it has."""
    free = SimpleQueue()
    free.put(True)
    take, give = permits(free, 2)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        try:
            take()
        finally:
            give()
    signal.signal(signal.SIGALRM, before)
    assert free.qsize() == 1

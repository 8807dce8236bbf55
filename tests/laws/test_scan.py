"""scan: k steps in one call are k calls."""

import functools

import pytest
import torch

import funcrec as fr
from funcrec._tree import map_tensors, tree_map
from funcrec.testing import assert_trees_close

FEATURES = (fr.FeatureConfig("item", table="item"),)
STEP = fr.train_step(
    lambda p, b: (fr.lookup(p.tables, b.ids, FEATURES)["item"] * p.dense).square().sum() + b.label.sum(),
    sparse=fr.optim.adagrad(0.1),
    dense=fr.optim.dense(torch.optim.SGD, lr=0.125),
)
K = 4
copied = functools.partial(map_tensors, torch.clone)


def first_state():
    return copied(STEP.init(fr.Params({"item": torch.arange(10.0).reshape(5, 2)}, torch.tensor([1.0, -1.0]))))


def make_batch(i: int) -> fr.Batch:
    return fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[i, 3], [1]]}), torch.tensor([float(i), 0.0]))


BATCHES = tree_map(lambda *xs: torch.stack(xs), *map(make_batch, range(K)))


@functools.cache
def calls():
    """What k calls of the eager step give."""
    state, metrics = first_state(), []
    for i in range(K):
        state, m = STEP(state, make_batch(i))
        metrics.append(m)
    return state, tree_map(lambda *xs: torch.stack(xs), *metrics)


def test_scan_is_k_calls():
    """scan(step) gives the bits of k calls, and writes neither to the state nor to the batches."""
    state, batches = first_state(), copied(BATCHES)
    assert_trees_close(fr.scan(STEP, state, batches), calls())
    assert_trees_close((state, batches), (first_state(), BATCHES))


def test_scan_of_a_jitted_donating_step():
    """scan(jit(step, donate)) is the same to the bit, takes the state's memory, compiles once, and its metrics keep their values."""
    step = fr.jit(STEP, donate=("state",))
    state, need = first_state(), calls()
    place = state.tables["item"].data_ptr()
    got = fr.scan(step, state, BATCHES)
    assert_trees_close(got[0], need[0])
    assert_trees_close(got[1], need[1], rtol=1e-6)  # a loss's sum may run in another order
    assert got[0].tables["item"].data_ptr() == place and step.num_compiled() == 1
    with pytest.raises(fr.DonatedError):
        state.step + 1
    assert_trees_close(fr.scan(step, got[0], BATCHES)[0].step, torch.tensor(2 * K))


def test_a_jitted_scan(monkeypatch):
    """jit(scan) with the state donated stages all k steps in one graph, with the eager bits."""
    monkeypatch.setattr("funcrec._compile.compile_graph", lambda graph, arguments: graph)
    whole = fr.jit(lambda state, batches: fr.scan(STEP, state, batches), donate=("state",))
    assert_trees_close(whole(first_state(), BATCHES), calls())


def test_scan_passes_static_leaves_on():
    """What is no tensor goes to each step as it is, and comes back once."""
    step = lambda total, batch: (total + batch["x"] * batch["scale"], {"name": batch["name"], "total": total})
    got = fr.scan(step, torch.tensor(0.0), {"x": torch.tensor([1.0, 2.0]), "scale": 3, "name": "a"})
    assert_trees_close(got, (torch.tensor(9.0), {"name": "a", "total": torch.tensor([0.0, 3.0])}))


def test_scan_composes():
    """Scans nest, and a scan can be differentiated and mapped."""
    add = lambda total, x: (total + x * x, total)
    xs = torch.arange(6.0).reshape(2, 3)
    nested = fr.scan(lambda total, row: fr.scan(add, total, row), torch.tensor(0.0), xs)
    assert_trees_close(nested[0], torch.tensor(55.0))
    assert nested[1].shape == (2, 3)
    total = lambda x: fr.scan(add, torch.tensor(0.0), x)[0]
    assert_trees_close(torch.func.grad(total)(xs[1]), 2 * xs[1])
    assert_trees_close(torch.func.vmap(total)(xs), xs.square().sum(1))


BAD = {
    "no tensors": {"x": 1},
    "nothing": None,
    "a scalar": torch.tensor(1.0),
    "another k": {"x": torch.ones(2), "y": torch.ones(3)},
    "no batch": torch.ones(0, 3),
}


@pytest.mark.parametrize("batches", BAD.values(), ids=BAD)
def test_bad_batches(batches):
    """Batches that are no stack are told before the first step."""
    called = []
    with pytest.raises(
        ValueError, match=r"funcrec.scan: `batches` is not a stack of batches.\n  got .*\n  need .*\n  try "
    ):
        fr.scan(lambda state, batch: called.append(batch), None, batches)
    assert not called

"""scan: k steps in one call equal k calls."""

import functools

import numpy as np
import pytest
import torch
from programs.as_staged import staged_only

import funcrec as fr
from funcrec.core._tree import map_tensors, tree_map
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
    """Return the results of k calls of the eager step."""
    state, metrics = first_state(), []
    for i in range(K):
        state, m = STEP(state, make_batch(i))
        metrics.append(m)
    return state, tree_map(lambda *xs: torch.stack(xs), *metrics)


def test_scan_is_k_calls():
    """scan(step) gives the bits of k calls, and changes neither the state nor the batches."""
    state, batches = first_state(), copied(BATCHES)
    assert_trees_close(fr.scan(STEP, state, batches), calls())
    assert_trees_close((state, batches), (first_state(), BATCHES))


def test_scan_of_a_jitted_donating_step():
    """scan(jit(step, donate)) gives the same bits, takes the memory of the state, and compiles once. The metrics keep
    their values."""
    step = fr.jit(STEP, donate=("state",))
    state, need = first_state(), calls()
    place = state.tables["item"].data_ptr()
    got = fr.scan(step, state, BATCHES)
    assert_trees_close(got[0], need[0])
    # the loss may be summed in another order
    assert_trees_close(got[1], need[1], rtol=1e-6)
    assert got[0].tables["item"].data_ptr() == place and step.num_compiled() == 1
    with pytest.raises(fr.DonatedError):
        state.step + 1
    assert_trees_close(fr.scan(step, got[0], BATCHES)[0].step, torch.tensor(2 * K))


def test_a_jitted_scan(monkeypatch):
    """jit(scan) with a donated state stages all k steps in one graph, with the eager bits."""
    monkeypatch.setattr("funcrec.compile._program.compile_graph", lambda graph, arguments: graph)
    whole = fr.jit(lambda state, batches: fr.scan(STEP, state, batches), donate=("state",))
    assert_trees_close(whole(first_state(), BATCHES), calls())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("donate", [(), ("state",)], ids=["kept", "donated"])
def test_a_body_that_is_staged_once(donate, reverse):
    """With unroll=False a jitted scan has one part for all steps, and the eager bits. It keeps what is not donated."""
    whole = fr.jit(lambda state, batches: fr.scan(STEP, state, batches, reverse=reverse, unroll=False), donate=donate)
    need, state = fr.scan(STEP, first_state(), BATCHES, reverse=reverse), first_state()
    with staged_only():
        assert_trees_close(whole(state, BATCHES), need)
        assert_trees_close(whole(first_state(), BATCHES), need)
    assert whole.num_compiled() == 1
    if not donate:
        assert_trees_close(state, first_state())


def test_a_staged_body_does_not_grow():
    """The graph of a scan with unroll=False has as many nodes for 3 steps as for 30."""
    step = lambda s, x: (s * x.sin(), {"s": s, "n": 1, "name": "a"})
    of = lambda k: fr.jit(lambda s, x: fr.scan(step, s, x, unroll=False)).lower(torch.tensor(1.0), torch.ones(k)).graph
    assert len(str(of(3)).splitlines()) == len(str(of(30)).splitlines())
    with staged_only():
        got = fr.jit(lambda s, x: fr.scan(step, s, x, unroll=False))(torch.tensor(1.0), torch.ones(4))
    assert_trees_close(got, fr.scan(step, torch.tensor(1.0), torch.ones(4)))


def test_a_staged_body_composes():
    """Under grad and vmap inside a jitted function the steps are unrolled, and the values stay."""
    f = lambda s: fr.scan(lambda s, x: (s * x + s.sin(), s), s, torch.tensor([1.0, 0.5]), unroll=False)[0]
    with staged_only():
        for own in (torch.func.grad(f), lambda s: torch.func.vmap(f)(torch.stack([s, s + 1])), f):
            torch.testing.assert_close(fr.jit(own)(torch.tensor(0.3)), own(torch.tensor(0.3)))


def test_length_and_reverse():
    """`length` needs no tensors. `reverse` takes the last batch first, and the metrics keep the batches' order."""
    add = lambda total, x: (2 * total + x, total)
    assert_trees_close(
        fr.scan(lambda s, _: (2 * s, s), torch.tensor(1), length=3), (torch.tensor(8), torch.tensor([1, 2, 4]))
    )
    got = fr.scan(add, torch.tensor(0), torch.tensor([1, 2, 3]), length=3, reverse=True)
    assert_trees_close(got, (torch.tensor(17), torch.tensor([8, 3, 0])))
    with pytest.raises(ValueError, match="`length` is not the number of batches"):
        fr.scan(add, torch.tensor(0), torch.tensor([1, 2, 3]), length=2)
    step = lambda s, b: ((s, s), b)
    with staged_only(), pytest.raises(TypeError, match="the new state has another structure than the state"):
        fr.jit(lambda s: fr.scan(step, s, length=2, unroll=False))(torch.tensor(1.0))


def test_scan_passes_static_leaves_on():
    """A leaf that is no tensor goes to each step unchanged, and is returned once."""
    step = lambda total, batch: (total + batch["x"] * batch["scale"], {"name": batch["name"], "total": total})
    got = fr.scan(step, torch.tensor(0.0), {"x": torch.tensor([1.0, 2.0]), "scale": 3, "name": "a"})
    assert_trees_close(got, (torch.tensor(9.0), {"name": "a", "total": torch.tensor([0.0, 3.0])}))


def test_numbers_among_metrics_are_stacked():
    """A Python number of each step becomes one element of a tensor."""
    count = iter(range(3))

    def step(total, x):
        i = next(count)
        return total + x, {"int": i, "float": i / 3, "bool": i == 1, "big": 2**60 + i, "none": None, "pair": (i, "a"),
                           "numpy": np.float64(i)}  # fmt: skip

    _, got = fr.scan(step, torch.tensor(0.0), torch.ones(3))
    need = {
        "int": torch.tensor([0, 1, 2]),
        "float": torch.tensor([0.0, 1 / 3, 2 / 3], dtype=torch.float64),
        "bool": torch.tensor([False, True, False]),
        "big": torch.tensor([2**60, 2**60 + 1, 2**60 + 2]),
        "none": None,
        "pair": (torch.tensor([0, 1, 2]), "a"),
        "numpy": torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64),
    }
    assert_trees_close(got, need)


CHANGING = {
    "a name": (lambda i: f"step {i}", ValueError, r"`metrics\['x'\]` differs between steps.\n  got .* from step 1"),
    "number, then tensor": (lambda i: torch.tensor(1.0) if i else 1.0, TypeError, r"`metrics\['x'\]` differs"),
    "int, then float": (lambda i: 1.5 if i else 1, TypeError, r"got   int 1 from step 0, float 1.5 from step 1"),
    "another shape": (lambda i: torch.ones(i + 1), ValueError, r"got   f32\[1\] from step 0, f32\[2\] from step 1"),
    "another dtype": (lambda i: torch.ones(1).to([torch.float64, torch.float32][i]), ValueError, "differs between"),
    "arrays": (lambda i: np.ones(2), ValueError, r"`metrics\['x'\]` differs between steps"),
    "another structure": (lambda i: {"y": i} if i else i, TypeError, "another structure in some steps"),
    "None at last": (lambda i: None if i else 1, TypeError, "differs between"),
}


@pytest.mark.parametrize("metric, kind, fragment", CHANGING.values(), ids=CHANGING)
def test_metrics_that_change_their_kind(metric, kind, fragment):
    """A metric that cannot be stacked, and that differs between steps, raises. The value of the first step never stands
    for all steps."""
    count = iter(range(2))
    with pytest.raises(kind, match=fragment):
        fr.scan(lambda total, x: (total, {"x": metric(next(count))}), torch.tensor(0.0), torch.ones(2))


def test_scan_of_jagged_values():
    """Stacked jagged values, weighted and with empty bags, act as k batches. So do tensors without elements."""
    make = lambda i: fr.JaggedTensor.from_lists([[1.0 * i, 2.0], [], [3.0]])
    stacked = tree_map(lambda *xs: torch.stack(xs), *map(make, range(3)))
    step = lambda total, b: (total + b[0].values.sum(), (b[0].offsets, b[1].sum()))
    total, (offsets, sums) = fr.scan(step, torch.tensor(0.0), (stacked, torch.ones(3, 0)))
    assert_trees_close(total, torch.tensor(0.0 + 1 + 2 + 3 * 5))
    assert_trees_close(offsets, make(0).offsets.expand(3, 4).clone())
    assert_trees_close(sums, torch.zeros(3))


def test_scan_composes():
    """Scans can be nested, differentiated and mapped."""
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
    "jagged values of one batch": fr.KeyedJaggedTensor.from_lists({"a": [[1, 2]]}),
}


@pytest.mark.parametrize("batches", BAD.values(), ids=BAD)
def test_bad_batches(batches):
    """Batches that are no stack raise before the first step."""
    called = []
    with pytest.raises(
        ValueError, match=r"funcrec.scan: `batches` is not a stack of batches.\n  got .*\n  need .*\n  try "
    ):
        fr.scan(lambda state, batch: called.append(batch), None, batches)
    assert not called


def test_arrays_are_no_batches():
    """An array, which every step would get whole, raises before the first step."""
    called = []
    with pytest.raises(TypeError, match=r"`batches\['y'\]` is an array"):
        fr.scan(lambda state, batch: called.append(batch), None, {"x": torch.ones(2), "y": np.ones(2)})
    assert not called

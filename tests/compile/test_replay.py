"""Replayed steps give the values of steps that are not recorded. A recording holds for the addresses of a state."""

import functools

import pytest
import torch
from programs import daily_ids as daily
from programs import interrupts

import funcrec as fr
from funcrec.compile._recording import record
from funcrec.core._tree import map_tensors
from funcrec.testing import assert_trees_close

CALLS = 5
FEATURES = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("user", table="user", weighted=True))
copied = functools.partial(map_tensors, torch.clone)


def loss_fn(params, batch, *, key):
    acts = fr.lookup(params.tables, batch.ids, FEATURES).values
    keep = fr.nn.dropout(acts, key, 0.5)
    return (keep * params.dense["w"]).square().sum() + (acts[:, 0] * batch.label).sum(), {"acts": acts}


STEP = fr.train_step(
    loss_fn, sparse=fr.optim.rowwise_adagrad(0.1), dense=fr.optim.dense(torch.optim.Adam, lr=0.125), has_aux=True
)


def make_batch(seed: int, device: str = "cpu") -> fr.Batch:
    draw = torch.Generator().manual_seed(seed)
    values, weights = torch.randint(0, 9, (6,), generator=draw), torch.rand(6, generator=draw)
    ids = fr.KeyedJaggedTensor.from_lengths(["clicked", "user"], values, torch.tensor([2, 1, 0, 3]), weights=weights)
    return map_tensors(lambda x: x.to(device), fr.Batch(ids, torch.rand(2, generator=draw)))


def first_state(seed: int = 0, device: str = "cpu") -> fr.TrainState:
    draw = torch.Generator().manual_seed(seed)
    tables = {"item": torch.randn(9, 2, generator=draw), "user": torch.randn(9, 1, generator=draw).bfloat16()}
    state = STEP.init(fr.Params(tables, {"w": torch.ones(3)}), fr.key(seed))
    return map_tensors(lambda x: x.to(device), copied(state))


def places(tree) -> list[int]:
    return [x.data_ptr() for x in torch.utils._pytree.tree_leaves(tree)]


def address_of(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of x. The tensor does not keep the memory alive."""
    memory = torch._C._construct_storage_from_data_pointer(x.data_ptr(), x.device, x.nbytes)
    return torch.empty(0, dtype=x.dtype).set_(memory, 0, x.shape, x.stride())


@pytest.fixture
def recordings(monkeypatch):
    """Return the list of recordings. Calls are recorded as on CUDA, by a stand-in that runs nothing while it
    records."""
    made = []

    def capture(once):
        out = {}

        def replay():
            for j, x in once().items():
                # a recording keeps its outputs at their addresses
                out.setdefault(j, torch.empty_like(x)).copy_(x)

        made.append(out)
        return replay, out

    def record_addresses(run, leaves, donated, *rest):
        """Return a recording that has only the addresses of the donated leaves. The recording keeps no such leaf alive,
        as on the device."""
        at = [address_of(x) if i in donated else x for i, x in enumerate(leaves)]
        return record(run, at, donated, *rest)

    monkeypatch.setattr("funcrec.compile._compiled.is_replayed", lambda donated: True)
    monkeypatch.setattr("funcrec.compile._compiled.record", record_addresses)
    monkeypatch.setattr("funcrec.compile._compiled.capture_cuda", capture)
    return made


def test_replayed_steps_are_eager_ones(recordings):
    """Five compiled steps, all but the first replayed, with new batch tensors in each, give the states of eager mode.
    The state stays at its address from the second call on. Metrics of earlier calls keep their values."""
    step, state, need = fr.jit(STEP, donate=("state",)), first_state(), first_state()
    seen, wanted, where = [], [], []
    for i in range(CALLS):
        state, metrics = step(state, make_batch(i))
        need, values = STEP(need, make_batch(i))
        assert_trees_close(state, need, rtol=1e-5, atol=1e-6)
        seen, wanted = [*seen, metrics], [*wanted, values]
        where.append(places(state))
    assert_trees_close(seen, wanted, rtol=1e-5, atol=1e-6)
    assert all(p == where[0] for p in where)
    assert len(recordings) == 1 and step.num_compiled() == 1


def test_the_interpreted_replay_is_the_eager_step(recordings, interpreted):
    """Interpreted, without the rounding of a compiler, a replayed step equals the eager step bit for bit."""
    step, state, need = fr.jit(STEP, donate=("state",)), first_state(), first_state()
    for i in range(CALLS):
        state, metrics = step(state, make_batch(i))
        need, values = STEP(need, make_batch(i))
        assert_trees_close((state, metrics), (need, values))


def test_another_state_is_recorded_anew(recordings, interpreted):
    """The first call of a fresh state is not recorded. A later call is recorded for the addresses of that state. A
    return to the first state is right, too."""
    step = fr.jit(STEP, donate=("state",))
    states, needs = [first_state(k) for k in range(2)], [first_state(k) for k in range(2)]
    for i, k in enumerate([0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0]):
        states[k], metrics = step(states[k], make_batch(i))
        needs[k], values = STEP(needs[k], make_batch(i))
        assert_trees_close((states, metrics), (needs, values))
    assert len(recordings) >= 2 and step.num_compiled() == 1


def test_an_old_state_is_gone(recordings, interpreted):
    """A use of a state that a replayed call took raises. The new state continues."""
    step, state = fr.jit(STEP, donate=("state",)), first_state()
    for i in range(3):
        old, (state, _) = state, step(state, make_batch(i))
        with pytest.raises(fr.DonatedError):
            step(old, make_batch(i))
    assert_trees_close(state.step, torch.tensor(3))


@pytest.mark.parametrize("moment", [interrupts.AtEvent, interrupts.AtOperation])
def test_an_interrupted_replay(recordings, interpreted, moment):
    """After an interrupted recorded call, the state is whole or gone, and the next call is right."""
    trial = interrupts.Trial()
    ends = interrupts.at_every(trial, moment, step=23)
    assert ends["whole"] > 10 and ends["gone"] > 10 and recordings


PROGRAMS = {
    "arithmetic": lambda s, x: ({"w": s["w"] + x, "t": s["t"] * 2}, s["w"] - x),
    "crosswise": lambda s, x: ({"w": s["w"] + s["t"], "t": s["t"] + s["w"]}, x),
    "swap": lambda s, x: ({"w": s["t"], "t": s["w"]}, x),
    "swap of new values": lambda s, x: ({"w": s["t"] + x, "t": s["w"] * 2}, None),
    "rows written crosswise": lambda s, x: (
        {"w": s["t"].index_put((torch.tensor([1]),), x[:1]), "t": s["w"].index_put((torch.tensor([2]),), x[1:2])},
        None,
    ),
    "one leaf stays": lambda s, x: ({"w": s["w"], "t": s["t"] + s["w"] + x}, s["w"]),
    "one leaf for both": lambda s, x: ({"w": s["w"], "t": s["w"]}, x * 2),
    "the argument is the new state": lambda s, x: ({"w": x, "t": s["w"]}, x),
    "rows and a reader": lambda s, x: (
        {"w": (p := s["w"].index_put((torch.tensor([1]),), x[:1])), "t": p * 2},
        p.sum(),
    ),
    "a static output": lambda s, x: ({"w": s["w"] + x, "t": s["t"]}, "text"),
    "the state in the metrics": lambda s, x: ({"w": (p := s["w"] + x), "t": s["t"]}, p),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_replayed(recordings, interpreted, name):
    """The replayed function equals the eager function, whatever a program does with the donated leaves. Earlier outputs
    keep their values."""
    fn = PROGRAMS[name]
    step, state = fr.jit(fn, donate=("s",)), {"w": torch.arange(4.0), "t": torch.ones(4)}
    need, seen, wanted = copied(state), [], []
    for i in range(CALLS):
        x = torch.arange(4.0) * i - 1
        state, out = step(state, x)
        need, value = fn(need, x)
        assert_trees_close(state, need)
        seen, wanted = [*seen, out], [*wanted, value]
    assert_trees_close(seen, wanted)


@pytest.mark.parametrize(
    "make", [lambda i: torch.tensor([float(i)]).expand(4), lambda i: torch.arange(8.0)[i % 2 :: 2]]
)
def test_batches_of_any_strides_are_replayed(recordings, make):
    """A batch tensor that is a view, even one that repeats an element, enters the recording in its compiled form."""
    fn = lambda s, x: (s + x, x * 2)
    step, state, need = fr.jit(fn, donate=("s",)), torch.zeros(4), torch.zeros(4)
    for i in range(CALLS):
        state, out = step(state, make(i))
        need, value = fn(need, make(i))
        assert_trees_close((state, out), (need, value))


# -- on CUDA -----------------------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@cuda
def test_cuda_replays_without_synchronisation():
    """On CUDA, steps are recorded as one graph. No replay waits for the device. The state stays in place. The
    values equal those of the eager step. Batches may come from pinned host memory."""
    step, state, need = fr.jit(STEP, donate=("state",)), first_state(0, "cuda"), first_state(0, "cuda")
    pinned = [map_tensors(torch.Tensor.pin_memory, make_batch(i)) for i in range(CALLS)]
    seen, where = [], []
    for i, batch in enumerate(pinned):
        torch.cuda.set_sync_debug_mode("error" if i >= 2 else "default")
        try:
            state, metrics = step(state, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(metrics)
        where.append(places(state))
    wanted = []
    for i in range(CALLS):
        need, values = STEP(need, make_batch(i, "cuda"))
        wanted.append(values)
    assert_trees_close((state, seen), (need, wanted), rtol=1e-4, atol=1e-5)
    assert all(p == where[0] for p in where)


@cuda
def test_cuda_records_a_fresh_state_anew():
    """A second state of the same form is recorded for its own memory. The first state does not change."""
    step = fr.jit(STEP, donate=("state",))
    states, needs = [first_state(k, "cuda") for k in range(2)], [first_state(k, "cuda") for k in range(2)]
    for i, k in enumerate([0, 0, 0, 1, 1, 1, 0, 0]):
        batch = make_batch(i, "cuda")
        states[k], _ = step(states[k], batch)
        needs[k], _ = STEP(needs[k], batch)
    assert_trees_close(states, needs, rtol=1e-4, atol=1e-5)


def test_a_step_that_renews_rows_is_replayed(recordings, interpreted):
    """A replayed step that draws the rows of new ids before it reads them is the eager step, and keeps its memory."""
    own, given = daily.step(fr.optim.adam(0.1)), list(daily.batches(5, CALLS))
    make = lambda: fr.copy(own.init(fr.Params(daily.dynamic(), torch.ones(()))))
    step, state, eager, where = fr.jit(own, donate=("state",)), make(), make(), []
    for batch in given:
        state, metrics = step(state, batch)
        eager, wanted = own(eager, batch)
        assert_trees_close((state, metrics), (eager, wanted), rtol=0, atol=0)
        where.append(places(state))
    assert all(p == where[1] for p in where[1:]) and len(recordings) == 1

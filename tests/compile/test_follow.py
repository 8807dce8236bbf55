"""The quick path of jit, for a state that the last call returned, gives the answers of a full check of the leaves."""

import functools

import numpy as np
import pytest
import torch
from funcrec.kernels import ops
from programs.surroundings import on_threads

import funcrec as fr
from funcrec.core._tree import map_tensors
from funcrec.testing import assert_trees_close

copied = functools.partial(map_tensors, torch.clone)

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture
def looks(monkeypatch):
    """Return a list with an item for each call that checked every leaf."""
    made, admit = [], fr.compile._compiled.Compiled.admit
    monkeypatch.setattr(
        "funcrec.compile._compiled.Compiled.admit", lambda self, leaves: (made.append(1), admit(self, leaves))[1]
    )
    return made


def fn(state, x, scale=1):
    """Return a state with a written row of a table, which stays in place, and a dense leaf, which is new in every
    call."""
    row = x.reshape(-1)[:1].expand(1, 2).to(state["table"].dtype)
    return {
        "table": state["table"].index_put((torch.tensor([1]),), row),
        "dense": state["dense"] + x.sum() * scale,
    }, x.sum()


def start():
    return {"table": torch.arange(8.0).reshape(4, 2), "dense": torch.zeros(4)}


def warm(donate=("state",), calls=3, **given):
    """Return a jitted function on its quick path, and the state from its last call."""
    step, state = fr.jit(given.pop("fn", fn), donate=donate), start()
    for _ in range(calls):
        state, _ = step(state, torch.ones(4))
    return step, state


def test_a_returned_state_is_looked_at_once(looks):
    """From the second call on, a state and a batch of known form are not checked again. The values equal those of eager
    mode."""
    step, state, need = fr.jit(fn, donate=("state",)), start(), start()
    for i in range(6):
        x = torch.arange(4.0) + i
        state, out = step(state, x)
        need, value = fn(need, x)
        assert_trees_close((state, out), (need, value))
    assert len(looks) == 1 and step.num_compiled() == 1


SHARED = {
    "a view of the table": lambda s: s["table"].view(-1)[2:6],
    "the end of the table": lambda s: s["table"].view(-1)[4:],
    "strided rows of the table": lambda s: s["table"][:, 0],
    "a view of the dense leaf": lambda s: s["dense"][:],
    "the table's memory under numpy": lambda s: torch.from_numpy(s["table"].numpy().reshape(-1)[4:]),
    "the dense leaf's memory under numpy": lambda s: torch.from_numpy(s["dense"].numpy()),
    "an alias": lambda s: s["dense"].data,
}


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("name", SHARED)
def test_memory_given_twice_is_found(name, calls):
    """A batch tensor in the memory of the donated state raises on the quick path, as it does in the first call. The
    state stays valid."""
    step, state = warm(calls=calls)
    before = copied(state)
    for given in (state, copied(state)):
        with pytest.raises(ValueError, match="is given twice"):
            step(given, SHARED[name](given))
    assert_trees_close(state, before)
    assert_trees_close(step(state, torch.ones(4)), fn(before, torch.ones(4)))


def test_memory_beside_the_state_is_not_shared():
    """A call accepts batch tensors right before and right after a state's leaf in one buffer."""
    buffer = torch.arange(16.0)
    step, state = fr.jit(fn, donate=("state",)), {"table": buffer[4:12].view(4, 2), "dense": torch.zeros(4)}
    for i in range(6):
        state, _ = step(state, buffer[:4] if i % 2 else buffer[12:])
    assert_trees_close(buffer[:4], torch.arange(4.0))
    assert_trees_close(buffer[12:], torch.arange(12.0, 16.0))


def test_numpy_batches_are_read_anew():
    """Each call reads again a batch in the memory of numpy."""
    step, state = warm()
    array, dense = np.zeros(4, dtype=np.float32), state["dense"].clone()
    for i in range(3):
        array[:] = i
        state, _ = step(state, torch.from_numpy(array))
    assert_trees_close(state["dense"], dense + 4 * (0 + 1 + 2))


def test_donated_values_in_the_batch_raise():
    """A donated leaf in the batch, or the state of an earlier call, raises DonatedError. The call takes nothing."""
    step, old = warm()
    state, _ = step(old, torch.ones(4))
    for given, x in ((state, old["dense"]), (old, torch.ones(4)), ({**state, "dense": old["dense"]}, torch.ones(4))):
        with pytest.raises(fr.DonatedError, match=r"`state\['(dense|table)'\]` was donated to call 4 of `fn`"):
            step(given, x)
    assert float(step(state, torch.ones(4))[0]["dense"][0]) == 20


FORMS = {
    "shape": torch.ones(5),
    "dimensions": torch.ones(2, 2),
    "dtype": torch.ones(4, dtype=torch.float64),
    "integers": torch.ones(4, dtype=torch.int64),
    "strides": torch.arange(8.0)[::2],
    "a parameter": torch.nn.Parameter(torch.ones(4), requires_grad=False),
}


@pytest.mark.parametrize("name", FORMS)
def test_another_form_of_batch_compiles_anew(name):
    """A batch of another form is compiled for that form. Both forms stay known."""
    step, state = warm()
    need = copied(state)
    for x in (FORMS[name], torch.ones(4), FORMS[name]):
        state, out = step(state, x)
        need, value = fn(need, x)
        assert_trees_close((state, out), (need, value))
    assert step.num_compiled() == 2


@pytest.mark.parametrize("one, other", [(1, 2), (0.0, -0.0), (1, 1.0), (True, 1), (float("nan"), 0.5)])
def test_another_static_value_compiles_anew(one, other):
    """A Python number is part of the compilation. 0.0 and -0.0 differ, and so do 1, 1.0 and True."""
    sign = lambda state, x, scale: (
        {"v": state["v"] + x},
        x * 0 + torch.copysign(torch.ones(2), torch.tensor(float(scale))) * scale,
    )
    step, state = fr.jit(sign, donate=("state",)), {"v": torch.zeros(2)}
    for scale in (one, one, one, other, other, one, other):
        state, out = step(state, torch.ones(2), scale)
        need = sign({"v": torch.zeros(2)}, torch.ones(2), scale)[1]
        assert_trees_close(out, need)
        assert torch.equal(out.signbit(), need.signbit())
    assert step.num_compiled() == 2
    assert_trees_close(state["v"], torch.full((2,), 7.0))


def test_two_states_take_turns():
    """Two states of one form share the compilation, in any order of calls. Each state keeps its memory."""
    step, states, needs = fr.jit(fn, donate=("state",)), [start(), start()], [start(), start()]
    where = [s["table"].data_ptr() for s in states]
    for i, k in enumerate([0, 1, 0, 1, 1, 1, 0, 0, 0, 1]):
        x = torch.arange(4.0) * (i + 1)
        states[k], out = step(states[k], x)
        needs[k], value = fn(needs[k], x)
        assert_trees_close((states, out), (needs, value))
    assert [s["table"].data_ptr() for s in states] == where and step.num_compiled() == 1


def test_forms_of_batches_take_turns(looks):
    """A state that goes from one form of batch to another is checked once for each form."""
    step, state, need = fr.jit(fn, donate=("state",)), start(), start()
    for i in range(9):
        x = torch.arange(4.0 + i % 3)
        state, out = step(state, x)
        need, value = fn(need, x)
        assert_trees_close((state, out), (need, value))
    assert len(looks) == step.num_compiled() == 3


def test_batches_that_share_memory_with_each_other(looks):
    """Views of one buffer, such as a sequence and its targets, stay on the quick path."""
    step, state = fr.jit(lambda state, x: (fn(state, x["now"])[0], x["next"].sum()), donate=("state",)), start()
    for i in range(5):
        buffer = torch.arange(5.0) + i
        state, out = step(state, {"now": buffer[:-1], "next": buffer[1:]})
        assert out == buffer[1:].sum()
    assert len(looks) == 1


def test_a_holder_in_the_place_of_another_is_seen():
    """A batch in the buffer of the state, and then a view of the state instead: the view keeps the old values."""
    buffer = torch.arange(16.0)
    step, state = fr.jit(fn, donate=("state",)), {"table": buffer[4:12].view(4, 2).data, "dense": torch.zeros(4)}
    x = buffer[:4].data
    del buffer
    state, _ = step(state, x)
    del x
    held = state["table"].detach()
    before = held.clone()
    with pytest.warns(UserWarning, match="is held elsewhere, and was copied"):
        state, _ = step(state, torch.full((4,), 9.0))
    assert_trees_close(held, before)
    assert float(state["table"][1, 0]) == 9.0


@pytest.mark.parametrize("make", [lambda x: {"x": x}, lambda x: [x], lambda x: None, lambda x: "text"])
def test_a_container_in_the_place_of_a_leaf(make):
    """A container or a static value where the last call had a tensor is another structure, and the state stays."""
    step, state = warm(fn=lambda state, x: fn(state, x if isinstance(x, torch.Tensor) else torch.ones(4)))
    kept = copied(state)
    state, _ = step(state, make(torch.ones(4)))
    assert_trees_close(state, fn(kept, torch.ones(4))[0])


def test_mixed_states_are_looked_at():
    """A state with one exchanged leaf is another state. The call reads and takes the new leaf. The old leaf stays
    valid."""
    step, state = warm()
    fresh, kept = torch.full((4,), 100.0), state["dense"]
    state, _ = step({**state, "dense": fresh}, torch.ones(4))
    assert_trees_close(state["dense"], torch.full((4,), 104.0))
    assert_trees_close(kept, torch.full((4,), 12.0))
    with pytest.raises(fr.DonatedError):
        fresh + 1


def test_leaves_in_each_others_place():
    """When a state's leaves change places between calls, the step uses each leaf in the leaf's new place."""
    exchange = lambda state, x: ({"a": state["a"] + x, "b": state["b"].index_put((torch.tensor([0]),), x[:1])}, None)
    step = fr.jit(exchange, donate=("state",))
    state, need = {"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.ones(2)}
    for i in range(8):
        turn = (lambda s: {"a": s["b"], "b": s["a"]}) if i % 3 == 2 else lambda s: s
        state, _ = step(turn(state), torch.full((2,), float(i)))
        need, _ = exchange(turn(need), torch.full((2,), float(i)))
        assert_trees_close(state, need)


def test_the_surroundings_are_honoured():
    """Between two calls, another number of threads or another kernel implementation causes a compilation. A change back
    causes no compilation."""
    seen = []

    def looked_up(state, rows):
        seen.append(ops.ambient())
        return {"t": state["t"].index_put((rows[:1],), state["t"][1:2])}, ops.gather_rows(state["t"], rows)

    step, state, rows = fr.jit(looked_up, donate=("state",)), {"t": torch.arange(4.0)[:, None]}, torch.tensor([0, 1])
    turn = lambda: step(state, rows)[0]
    for i in range(2):
        for _ in range(2):
            state = turn()
        with ops.using("reference"):
            for _ in range(2):
                state = turn()
        with on_threads(2):
            state = turn()
        assert step.num_compiled() == 3, i
    assert set(seen) == {None, "reference"}


def test_checked_and_transformed_calls_leave_the_quick_path():
    """`checked` and torch.func run the plain function on the quick path as elsewhere. They take no state."""
    step, state = warm()
    before = copied(state)
    got = fr.checked(step)(state, torch.ones(4))
    assert_trees_close(got, fn(before, torch.ones(4)))
    summed = torch.func.grad(lambda x: step(state, x)[0]["dense"].sum())(torch.ones(4))
    assert_trees_close(summed, torch.full((4,), 4.0))
    mapped = torch.func.vmap(lambda x: step(state, x)[1])(torch.ones(3, 4))
    assert_trees_close(mapped, torch.full((3,), 4.0))
    assert_trees_close(state, before)


def test_a_failed_call_leaves_the_quick_path_whole():
    """After a call that raises, the state is whole and the next call succeeds."""
    step, state = warm()
    with pytest.raises((RuntimeError, IndexError)):
        step(state, torch.ones(0))
    state, _ = step(state, torch.ones(4))
    assert_trees_close(state["dense"], torch.full((4,), 16.0))

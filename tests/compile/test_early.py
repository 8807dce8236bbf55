"""A donated step that renews rows writes them in place before its lookups read them, in a program of two parts."""

import warnings

import pytest
import torch
from programs import daily_ids as daily
from programs.as_staged import staged_only
from torch import Tensor

import funcrec as fr
from funcrec.compile import _program
from funcrec.core import tree_leaves
from funcrec.testing import assert_trees_close

STEP = daily.step(fr.optim.adam(0.1))
GIVEN = list(daily.batches(5, 5))


@pytest.fixture
def staged():
    with staged_only():
        yield


def first_state() -> fr.TrainState:
    return fr.copy(STEP.init(fr.Params(daily.dynamic(), torch.ones(()))))


def memory(state: fr.TrainState) -> list[int]:
    """Return the addresses of tables, slots and vocabularies."""
    return [x.data_ptr() for x in tree_leaves((state.tables.tables, state.slots, state.tables.vocabularies))]


def parts(step) -> list[bool]:
    """Return for each compilation whether it has two parts."""
    return [entry.first is not None for entry in step.compiled.values()]


def test_the_state_keeps_its_memory(staged):
    """Tables, slots and vocabularies keep their memory in a donated step, which gives the eager step's bits."""
    step, state, eager = fr.jit(STEP, donate=("state",)), first_state(), first_state()
    where = memory(state)
    for batch in GIVEN:
        state, metrics = step(state, batch)
        eager, wanted = STEP(eager, batch)
        assert_trees_close((state, metrics), (eager, wanted), rtol=0, atol=0)
        assert memory(state) == where
    assert parts(step) == [True]


def test_only_donated_rows_are_written_early(staged):
    """Without donation, the step is one program, and its arguments keep every bit."""
    step, state = fr.jit(STEP), first_state()
    before = fr.copy(state)
    got = step(state, GIVEN[0])
    assert_trees_close(state, before, rtol=0, atol=0)
    assert_trees_close(got, STEP(before, GIVEN[0]), rtol=0, atol=0)
    assert parts(step) == [False]


def test_who_holds_the_memory_keeps_the_old_values(staged):
    """A view of a table keeps its values, with a warning: the step copies that table. The old state raises."""
    step, state = fr.jit(STEP, donate=("state",)), first_state()
    wanted, view = STEP(first_state(), GIVEN[0])[0], state.tables.tables["user"][3:]
    kept = view.clone()
    with pytest.warns(UserWarning, match="held elsewhere"):
        got, _ = step(state, GIVEN[0])
    assert torch.equal(view, kept)
    assert_trees_close(got, wanted, rtol=0, atol=0)
    with pytest.raises(fr.DonatedError):
        step(state, GIVEN[0])


def test_old_rows_are_read_before_they_are_overwritten(staged):
    """What a function reads of the old tables has the old values: sums, and views that it returns."""

    def both(state, batch):
        table = state.tables.tables["user"]
        old = {"sum": table.sum(), "row": table[5], "tags": state.tables.vocabularies["users"].tags[:9]}
        state, metrics = STEP(state, batch)
        return state, {**metrics, **old, "change": state.tables.tables["user"].sum() - old["sum"]}

    step, state, eager = fr.jit(both, donate=("state",)), first_state(), first_state()
    for batch in GIVEN:
        state, metrics = step(state, batch)
        eager, wanted = both(eager, batch)
        assert_trees_close((state, metrics), (eager, wanted), rtol=0, atol=0)
    assert parts(step) == [True]


def test_rows_of_a_view_of_an_old_table_are_read_first(staged, monkeypatch):
    """Rows that are read through a view of an old table, such as its bits, are read before the writes. No table crosses
    from one part to the other."""

    def both(state, batch):
        bits = state.tables.tables["user"].view(torch.int32)
        state, metrics = STEP(state, batch)
        return state, {**metrics, "bits": bits[torch.tensor([5, 3])]}

    step, state, eager = fr.jit(both, donate=("state",)), first_state(), first_state()
    compute, made = _program.Program.compute, []

    def run(self, leaves: list) -> list[Tensor]:
        made.append(compute(self, leaves))
        return made[-1]

    monkeypatch.setattr(_program.Program, "compute", run)
    for batch in GIVEN[:2]:
        state, metrics = step(state, batch)
        eager, wanted = both(eager, batch)
        assert_trees_close((state, metrics), (eager, wanted), rtol=0, atol=0)
    assert parts(step) == [True] and len(made) == 4
    assert max(x.numel() for x in made[2]) < state.tables.tables["user"].numel()


@pytest.mark.parametrize(
    "also",
    [
        lambda old, new: old.tables.tables["user"],
        lambda old, new: old.tables.tables["user"] - new.tables.tables["user"],
    ],
    ids=["returned", "read beside the new table"],
)
def test_a_table_that_is_needed_old_and_new_is_copied(also, staged):
    """If a function needs the whole old table after the new rows are drawn, the program has one part, and is right."""

    def both(state, batch):
        new, _ = STEP(state, batch)
        return new, also(state, new)

    step = fr.jit(both, donate=("state",))
    assert_trees_close(step(first_state(), GIVEN[0]), both(first_state(), GIVEN[0]), rtol=0, atol=0)
    assert parts(step) == [False]


def test_two_steps_in_one_program(staged):
    """The second step of a program reads what the first one has written: such a program has one part."""
    twice = lambda state, batch: STEP(STEP(state, batch)[0], batch)
    step = fr.jit(twice, donate=("state",))
    assert_trees_close(step(first_state(), GIVEN[0]), twice(first_state(), GIVEN[0]), rtol=0, atol=0)
    assert parts(step) == [False]


def test_a_view_that_is_written_and_read_makes_one_part(staged):
    """Rows are renewed through a view of a leaf, and the same view is read: the program has one part, and is right."""
    config, sparse, key = fr.TableConfig("t", 128, 2, initializer=fr.normal()), fr.optim.sgd(), fr.key(0)

    def by_view(state, ids):
        view = state["flat"].view(128, 2)
        vocabulary, rows, turnover = fr.admit(state["vocabulary"], ids)
        tables, _ = fr.renew({"t": view}, {"t": {}}, turnover, sparse, key, [config])
        return {"vocabulary": vocabulary, "flat": tables["t"].view(-1)}, (tables["t"][rows].sum(), view.sum())

    make = lambda: {"vocabulary": fr.vocabulary(128), "flat": fr.init(key, [config])["t"].view(-1)}
    step = fr.jit(by_view, donate=("state",))
    assert_trees_close(step(make(), torch.arange(5)), by_view(make(), torch.arange(5)), rtol=0, atol=0)
    assert parts(step) == [False]


def test_a_failure_after_the_first_writes_loses_the_state(staged, monkeypatch):
    """If the second part fails, the old state raises, and the error says that it is gone. A failure of the first part
    leaves the state whole."""
    step, state = fr.jit(STEP, donate=("state",)), first_state()
    state, _ = step(state, GIVEN[0])
    compute, calls = _program.Program.compute, []

    def fail_at(number: int):
        def run(self, leaves: list) -> list[Tensor]:
            calls.append(self)
            if len(calls) == number:
                raise MemoryError("no memory")
            return compute(self, leaves)

        calls.clear()
        monkeypatch.setattr(_program.Program, "compute", run)

    before = fr.copy(state)
    fail_at(1)
    with pytest.raises(MemoryError):
        step(state, GIVEN[1])
    assert_trees_close(state, before, rtol=0, atol=0)
    fail_at(2)
    with pytest.raises(MemoryError) as error:
        step(state, GIVEN[1])
    assert any("which is gone" in note for note in error.value.__notes__)
    monkeypatch.undo()
    with staged_only(), pytest.raises(fr.DonatedError):
        step(state, GIVEN[1])


def test_ranks_of_an_emulated_mesh(staged):
    """Under shard_map on an emulated mesh, a donated step gives the bits of the eager one."""
    mesh = fr.Mesh.emulated(x=2)
    plan = fr.Plan({"user": fr.row_wise("x"), "item": fr.table_wise("x", rank=1), "day": fr.replicated()})
    own = daily.step(fr.optim.rowwise_adagrad(lr=0.3), mesh=mesh, plan=plan)
    make = lambda: fr.copy(own.init(fr.Params(daily.dynamic(), torch.ones(()))))
    step, state, eager = fr.jit(own, donate=("state",)), make(), make()
    for batch in GIVEN[:3]:
        state, metrics = step(state, batch)
        eager, wanted = own(eager, batch)
        assert_trees_close((state, metrics), (eager, wanted), rtol=0, atol=0)


def test_compiled_it_is_close_to_the_eager_step():
    """The same, with both parts compiled by Inductor, and without a warning."""
    step, state, eager = fr.jit(STEP, donate=("state",)), first_state(), first_state()
    where = memory(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for batch in GIVEN[:3]:
            state, metrics = step(state, batch)
            eager, wanted = STEP(eager, batch)
    assert_trees_close((state, metrics), (eager, wanted), rtol=1e-4, atol=1e-5)
    assert memory(state) == where and step.num_compiled() == 1


def test_rows_renewed_by_hand(staged):
    """A donated function that admits, renews and reads gives the eager bits. The first part alone reads some leaves."""
    config, sparse, key = fr.TableConfig("t", 128, 2, initializer=fr.normal()), fr.optim.adam(), fr.key(0)

    def by_hand(state, ids):
        vocabulary, rows, turnover = fr.admit(state["vocabulary"], ids)
        tables, slots = fr.renew(state["tables"], state["slots"], turnover, sparse, key, [config])
        new = {"vocabulary": vocabulary, "tables": tables, "slots": slots, "seen": ids.sum() + state["seen"]}
        return new, tables["t"][rows].sum()

    def make():
        tables = fr.init(key, [config])
        return {
            "vocabulary": fr.vocabulary(128), "tables": tables, "slots": sparse.init(tables), "seen": torch.tensor(0),
        }  # fmt: skip

    step, state, eager = fr.jit(by_hand, donate=("state",)), make(), make()
    for ids in torch.tensor([[3, 5, 3], [5, -7, 9], [10**15, 3, 1]]):
        state, got = step(state, ids)
        eager, want = by_hand(eager, ids)
        assert_trees_close((state, got), (eager, want), rtol=0, atol=0)
    assert parts(step) == [True]

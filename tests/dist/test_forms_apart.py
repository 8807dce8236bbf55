"""If the batches of ranks have different forms, all ranks raise before they send anything."""

import contextlib
import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from programs import training
from programs.as_staged import as_staged
from programs.training import plan_of

import funcrec as fr
from funcrec.mesh import others_changed
from funcrec.testing import RankError, RankPool

pytestmark = pytest.mark.xdist_group("ranks")


def step_of(mesh, compiled=False, kind="row_wise"):
    step = fr.train_step(training.loss_fn, **training.optimizers("adam"), mesh=mesh, plan=plan_of(kind, {"x": 2}))
    return step, fr.jit(step) if compiled else step


def other(batch, how):
    """Return the batch with one changed part."""
    ids = batch.ids
    match how:
        case "capacity":
            return fr.Batch(ids.pad_to(99), batch.label)
        case "bags":
            return fr.Batch(ids[:2], batch.label[:2])
        case "dtype":
            return fr.Batch(ids, batch.label.double())
        case "keys":
            return fr.Batch(ids.permute(["u"]), batch.label)
        case "weights":
            weights = torch.ones(ids.capacity)
            return fr.Batch(fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, None, ids.keys), batch.label)
        case "label":
            return fr.Batch(ids, None)
        case "order":
            return fr.Batch(ids.permute(["v", "u"]), batch.label)


TOLD = {
    "capacity": ("batch.ids", "values int64[32]", "values int64[99]"),
    "bags": ("batch.label", "float32[4] on rank 0", "float32[2] on rank 1"),
    "dtype": ("batch.label", "float32[4] on rank 0", "float64[4] on rank 1"),
    "keys": ("batch.ids", "keys ['u', 'v']", "keys ['u']"),
    "weights": ("batch.ids", "weights float32"),
    "label": ("batch.label", "nothing on rank 1"),
    "order": ("batch.ids", "keys ['v', 'u']"),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_batches_of_other_forms_are_named_on_all_ranks(compiled, ranks):
    """If capacity, number of bags, dtype, keys, their order, weights or a label differ on a rank, every rank raises at
    once. The error names the differences and the ranks. The next call, with one form, succeeds."""
    each = ranks(2).run(as_staged, apart_on_ranks, compiled, deadline_s=200)
    for errors, finite in each:
        assert finite
        for how, (error, took_s) in errors.items():
            assert error.startswith("ValueError funcrec."), (how, error)
            assert all(part in error for part in TOLD[how]), (how, error)
            assert took_s < 30
    assert {h: e for h, (e, _) in each[0][0].items()} == {h: e for h, (e, _) in each[1][0].items()}


def apart_on_ranks(compiled):
    mesh, errors = fr.Mesh.distributed(x=2), {}
    for how in ("capacity", "label") if compiled else TOLD:
        step, run = step_of(mesh, compiled)
        state = step.init(training.params())
        mine = training.part(training.batch(0, 8), dist.get_rank(), 2)
        mine = fr.Batch(mine.ids.unpad().pad_to(32), mine.label)
        begin = time.monotonic()
        try:
            run(state, other(mine, how) if dist.get_rank() else mine)
            errors[how] = "no error", 0
        except ValueError as error:
            errors[how] = f"ValueError {error}", time.monotonic() - begin
    _, metrics = run(state, mine)
    return errors, bool(metrics["loss"].isfinite())


WRONG = {
    "no batch": lambda state, batch: (state, None),
    "lists": lambda state, batch: (state, [[1, 2], [3]]),
    "a scalar": lambda state, batch: (state, fr.Batch(batch.ids, torch.tensor(1.0))),
    "no state": lambda state, batch: ({}, batch),
    "a plain state": lambda state, batch: (fr.tree.copy(state).dense, batch),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_rank_whose_call_cannot_begin_tells_the_others(compiled, ranks):
    """If one rank's batch cannot be cut, or its state is another state, the rank raises with the reason. The other rank
    raises at once with the failed rank's message. The next call succeeds. A rank that already runs a compiled program
    gets the message at the program's end."""
    first, second = ranks(2).run(begins_on_one, compiled, deadline_s=200)
    assert first.pop("then") and second.pop("then")
    for how, (here, took_s) in first.items():
        there, _ = second.get(how, second["no batch"])
        assert "funcrec." in here and "rank 1 failed before it exchanged anything" in here, here
        assert " ".join(there.split())[:200] in here and took_s < 30, (there, here)
    assert "`batch` cannot be cut" in second["no batch"][0]


def begins_on_one(compiled):
    mesh, said = fr.Mesh.distributed(x=2), {}
    mine = training.part(training.batch(0, 8), dist.get_rank(), 2)
    # no earlier test has agreed on this form
    mine = fr.Batch(mine.ids.unpad().pad_to(37), mine.label)
    for how in ("no batch", "a scalar") if compiled else WRONG:
        step, run = step_of(mesh, compiled)
        state = step.init(training.params())
        begin = time.monotonic()
        try:
            run(*(WRONG[how](state, mine) if dist.get_rank() else (state, mine)))
        except (TypeError, ValueError) as error:
            said[how] = f"{type(error).__name__}: {error}", time.monotonic() - begin
    said["then"] = bool(run(state, mine)[1]["loss"].isfinite())
    if compiled:
        # the first rank fails alone, as if the other rank were in an exchange of its program
        for rank in (1, 0):
            if dist.get_rank() == rank:
                with contextlib.suppress(TypeError):
                    run(state, None)
            dist.barrier()
            if rank == 1 and dist.get_rank() == 0:
                said["late"] = str(others_changed("funcrec.jit", RuntimeError("timed out"))), 0
    return said


def test_ranks_change_forms_together(ranks):
    """Jitted ranks whose batches grow on all ranks at once continue, and can return to the first form."""
    assert ranks(2).run(as_staged, grows_on_all, deadline_s=200) == [[True] * 3] * 2


APART = [
    ("step", "gather"),
    ("gather", "save"),
    ("reshard", "step"),
    ("save", "unshard"),
    ("reshard", "gather"),
    ("step", "wrong gather"),
]
WORDS = {
    "step": "run a mapped function",
    "unshard": "run a mapped function",
    "gather": "gather a state",
    "reshard": "reshard a state",
    "save": "save its tree",
}


def test_ranks_in_different_calls_raise_at_once(ranks, tmp_path):
    """If one rank steps and the other gathers, reshards or saves its state, both raise at once, and the error names
    both calls. A call that cannot begin says so on both ranks. The next step succeeds."""
    first, second = ranks(2).run(calls_apart, str(tmp_path), deadline_s=100)
    for pair, errors in zip(APART, zip(first[:-1], second[:-1], strict=True), strict=True):
        for error in errors:
            if "wrong gather" in pair:
                assert "`state` is not sharded" in " ".join(error.split()), (pair, error)
            else:
                assert "the ranks do different things." in error, (pair, error)
                assert f"rank 0 is to {WORDS[pair[0]]}" in error and f"rank 1 to {WORDS[pair[1]]}" in error, error
    assert first[-1] and second[-1]


def calls_apart(folder):
    """Return the error of each pair of calls on this rank, and whether a step of both ranks succeeds afterwards."""
    mesh, sparse, errors = fr.Mesh.distributed(x=2), training.optimizers("adam")["sparse"], []
    step, _ = step_of(mesh)
    state = step.init(fr.tree.map(torch.Tensor.detach, training.params()))
    mine = training.part(training.batch(0, 8), dist.get_rank(), 2)
    mine = fr.Batch(mine.ids.unpad().pad_to(32), mine.label)
    calls = {
        "step": lambda: step(state, mine),
        "gather": lambda: fr.gather_state(state, mesh),
        "wrong gather": lambda: fr.gather_state(dataclasses.replace(state, tables={}), mesh),
        "reshard": lambda: fr.reshard(state, plan_of("table_wise", {"x": 2}), mesh=mesh, sparse=sparse),
        "save": lambda: fr.save(folder + "/state", state),
        "unshard": lambda: fr.unshard(torch.ones(2), fr.P("x"), mesh=mesh),
    }
    for pair in APART:
        try:
            calls[pair[dist.get_rank()]]()
            errors.append("no error")
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    return [*errors, bool(step(state, mine)[1]["loss"].isfinite())]


def grows_on_all():
    step, run = step_of(fr.Mesh.distributed(x=2), True)
    state = step.init(training.params())
    mine = training.part(training.batch(0, 8), dist.get_rank(), 2)
    out = []
    for capacity in (40, 48, 40):
        state, metrics = run(state, fr.Batch(mine.ids.unpad().pad_to(capacity), mine.label))
        out.append(bool(metrics["loss"].isfinite()))
    return out


def test_a_rank_that_changes_its_forms_alone_is_named():
    """If one jitted rank's batch grows in the middle of training, and the other's batch does not, both ranks raise
    within the timeout. The error names the rank and both forms."""
    begin = time.monotonic()
    with RankPool(2, timeout_s=20) as pool, pytest.raises(RankError) as raised:
        pool.run(as_staged, grows_on_one, deadline_s=200)
    assert time.monotonic() - begin < 150
    text = str(raised.value)
    assert "rank 0: ValueError: funcrec.jit" in text and "rank 1: ValueError: funcrec.jit" in text, text
    assert text.count("new forms came on some ranks only") >= 2
    assert "values int64[64]" in text and "values int64[40]" in text


def grows_on_one():
    step, run = step_of(fr.Mesh.distributed(x=2, timeout_s=6), True)
    state = step.init(training.params())
    mine = training.part(training.batch(0, 8), dist.get_rank(), 2)
    for capacity in (40, 64 if dist.get_rank() else 40):
        state, _ = run(state, fr.Batch(mine.ids.unpad().pad_to(capacity), mine.label))

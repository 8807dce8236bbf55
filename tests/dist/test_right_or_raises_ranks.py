"""The right-or-raises sweep on a mesh, emulated and on real ranks.

Functions that shard, place and send have right derivatives or raise."""

import functools

import pytest
import torch
from programs.float_ranks import BITS, CASES, CODED, FEW, STAGED, TRAINED, at_once, case_of, outcomes, trained

import funcrec as fr
from funcrec.testing._modes import JITTED, MODES, RAISED, RIGHT, sweep

SHORT = ("collectives", "gather_tables", "gather_state", "reshard")


@pytest.mark.parametrize("name", [*CASES, *CODED])
def test_every_derivative_on_an_emulated_mesh_is_right(name):
    """Every mode's derivative by all float inputs together equals central differences. Coded vectors agree up to
    rounding."""
    found = sweep(case_of(name, fr.Mesh.emulated(x=2)), tuple(MODES) if name in SHORT else FEW)
    assert [k for k, o in found.items() if o != RIGHT] == []


# the others are emulated: exact and dedup of `lookups`, the options of `train_step`, a codec stand for them
ON_RANKS = [n for n in CASES if n not in ("lookups", "lookups, dedup", "train_step")] + ["lookups, int8, dedup"]


@pytest.mark.parametrize("name", ON_RANKS)
def test_every_derivative_on_real_ranks_is_right_or_raises(name, ranks):
    """On each of two gloo ranks, the rank's derivative equals the rank's own difference. For a step, the sum of the
    ranks' reverse derivatives equals the difference. Rows that travel as bits raise on both ranks."""
    for found in ranks(2).run(outcomes, name, FEW):
        wrong = {k: o for (_, k), o in found.items() if o != RIGHT}
        refused = set(FEW) - {"vmap"} if name in BITS else set()
        assert set(wrong) == refused and all(o.startswith(f"{RAISED}: TypeError funcrec.") for o in wrong.values()), (
            wrong
        )


@pytest.mark.parametrize("name", ["collectives", "lookups, int8, dedup", "gather_tables"])
def test_derivatives_within_jit_are_right(name, ranks):
    """For inputs without requires_grad, the derivative inside jit is right: of collectives and gathered tables on an
    emulated mesh and on each of two ranks, of coded lookups on ranks. Gathered tables are compiled on ranks."""
    if name != "lookups, int8, dedup":
        with STAGED:
            assert set(sweep(case_of(name, fr.Mesh.emulated(x=2)), tuple(JITTED)).values()) == {RIGHT}
    modes = tuple(JITTED) if name == "collectives" else ("jit of grad",)
    for found in ranks(2).run(outcomes, name, modes, name == "gather_tables"):
        assert set(found.values()) == {RIGHT}, found


def test_jit_of_a_step_on_a_mesh_is_differentiated():
    """The derivative of a jitted step by all float inputs equals central differences of the step."""
    case = case_of("train_step", fr.Mesh.emulated(x=2))
    jitted = at_once(functools.partial(trained, fr.Mesh.emulated(x=2), how="plain", steps=1, jit=True), TRAINED)[0]
    with STAGED:
        found = sweep(case._replace(f=jitted, smooth=case.f), [m for m in FEW if m != "vmap"])
    assert set(found.values()) == {RIGHT}, found


def test_a_table_that_one_rank_holds_is_differentiated_alone(ranks):
    """The derivative by a table that is whole on one rank makes the same exchanges on all ranks."""
    assert ranks(2).run(of_one_table) == [[12.0, 12.0]] * 2


def of_one_table():
    """Return the gradient of Σ 3 · table, gathered, on this rank, for a table on rank 0 and for a table on rank 1."""
    mesh, sums = fr.Mesh.distributed(x=2), []
    plans = [fr.Plan({"t": fr.table_wise("x", rank=r)}) for r in (0, 1)]
    for plan in plans:
        total = lambda t: 3 * fr.gather_tables(fr.shard_tables({"t": t}, plan, mesh), mesh)["t"].sum()  # noqa: B023
        both = torch.func.grad(total)(torch.ones(2, 1)).sum()
        torch.distributed.all_reduce(both)
        sums.append(float(both))
    return sums


@pytest.mark.parametrize("how", ["requires grad", "jvp", "cut tables", "moved rows"])
def test_ranks_that_follow_different_tensors_are_refused(how, ranks):
    """If one rank differentiates and the other does not, both ranks raise before any work. Their next call succeeds."""
    for error, after in ranks(2).run(followed_apart, how, deadline_s=100):
        assert error.startswith("TypeError funcrec.")
        assert ("is differentiated" if how == "moved rows" else "on some ranks only") in error
        assert after == [18.0, 18.0]


def followed_apart(how):
    mesh, here = fr.Mesh.distributed(x=2), torch.distributed.get_rank() == 0
    summed = fr.shard_map(lambda x: fr.psum(x * x, "x"), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P())
    held = fr.shard_tables({"t": torch.ones(2, 1, requires_grad=here)}, fr.Plan({"t": fr.row_wise("x")}), mesh)
    options = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD)}
    own = fr.train_step(len, **options, mesh=mesh, plan=fr.Plan({"t": fr.table_wise("x", rank=1)}))
    # rank 0 has no row of the table
    state = own.init(fr.Params({"t": torch.ones(2, 1, requires_grad=True)}, {}))
    run = {
        "moved rows": lambda: fr.gather_state(state, mesh),
        "requires grad": lambda: summed(torch.ones(2, requires_grad=here)),
        "jvp": lambda: torch.func.jvp(summed, (torch.ones(2),), (torch.ones(2),)) if here else summed(torch.ones(2)),
        "cut tables": lambda: fr.gather_tables(held, mesh)["t"],
    }
    error = ""
    try:
        run[how]()
    except TypeError as refused:
        error = f"TypeError {refused}"
    return error, summed(torch.full((2,), 3.0)).tolist()


def test_a_jitted_function_that_exchanges_is_followed_on_no_rank(ranks):
    """A jitted function that exchanges with other ranks raises before any work if a caller differentiates it. The other
    ranks may run its program. The jitted derivative of the function is right."""
    for errors, inside in ranks(2).run(followed_jitted):
        assert all("exchanges with other ranks" in x and "fr.jit of the derivative" in x for x in errors)
        assert inside == [2.0, 2.0]


def followed_jitted():
    mesh = fr.Mesh.distributed(x=2)
    summed = fr.shard_map(lambda x: fr.psum(x, "x"), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P())
    jitted, x, errors = fr.jit(summed), torch.ones(2), []
    tracked = torch.ones(2, requires_grad=True)
    held = fr.jit(lambda: summed(tracked))
    for follow in (
        lambda: jitted(tracked),
        lambda: torch.func.jvp(jitted, (x,), (x,)),
        lambda: torch.func.grad(lambda x: jitted(x).sum())(x),
        lambda: fr.jit(summed)(tracked),
        held,
    ):
        with pytest.raises(TypeError) as error:
            follow()
        errors.append(str(error.value))
        assert jitted(x).tolist() == [2, 2]
    return errors, fr.jit(torch.func.grad(lambda x: fr.jit(summed)(x).sum()))(x).tolist()

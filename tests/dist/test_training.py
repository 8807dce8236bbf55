"""Training under every placement, emulated and on gloo ranks, equals one process.

The process adds the gradients of the same batches."""

import pytest
import torch
from programs import training
from programs.as_staged import as_staged
from programs.training import OPTIMIZERS, WAITING, plan_of

import funcrec as fr
from funcrec.testing import assert_trees_close

ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES = (*ONE_AXIS, "table_row_wise", "table_column_wise", "grid")
STEPS = 4
# each placement of a grid of ranks with one optimizer; columns, of which a rule needs the whole row, with row-wise ones
ON_A_GRID = [(kind, "rowwise_adagrad" if kind in ("row_wise", "column_wise", "grid") else "adam") for kind in TWO_AXES]


def assert_same_training(got, want, **tolerance):
    for name, a, b in zip(("tables", "slots", "dense"), got, want, strict=False):
        assert_trees_close({name: a}, {name: b}, **tolerance)
    # the printed mean of the losses is added in any order
    assert_trees_close(got[3], want[3], rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad", "lamb", "by_table"])
@pytest.mark.parametrize("kind", ONE_AXIS)
def test_two_ranks_change_no_bit(kind, name, ranks):
    """Four steps on two ranks give the tables, slots and dense parameters of one process that adds the same two
    batches, bit for bit."""
    axes = {"x": 2}
    want = training.alone(name, 2, STEPS, 4)
    for got in ranks(2).run(training.real, name, axes, plan_of(kind, axes), STEPS, 4, True):
        assert_same_training(got, want)


@pytest.mark.parametrize(("kind", "name"), ON_A_GRID)
def test_a_grid_of_four_ranks_changes_no_bit(kind, name, ranks):
    """Four steps on 2 x 2 ranks give the bits of one process that adds the same four batches. Without exact=True,
    row-wise training agrees within 1e-6."""
    axes = {"x": 2, "y": 2}
    want = training.alone(name, 4, STEPS, 8)
    for got in ranks(4).run(training.real, name, axes, plan_of(kind, axes), STEPS, 8, True):
        assert_same_training(got, want)
    rounded = {"rtol": 1e-6, "atol": 1e-6} if kind in ("row_wise", "table_row_wise", "grid") else {}
    assert_same_training(
        ranks(4).run(training.real, name, axes, plan_of(kind, axes), 3, 8, False)[0],
        training.alone(name, 4, 3, 8),
        **rounded,
    )


@pytest.mark.parametrize(("kind", "name"), [*zip(ONE_AXIS, WAITING, strict=True)])
def test_gradients_wait_on_ranks(kind, name, ranks):
    """7 steps with two or three updates give the bits of one process that adds the same two batches, in tables, slots
    and dense parameters. `accumulate` is used alone, by table, clipped, over a clip, or over a schedule."""
    want = without_waiting(training.alone(name, 2, 7, 4))
    for got in ranks(2).run(training.real, name, {"x": 2}, plan_of(kind, {"x": 2}), 7, 4, True):
        assert_same_training(got, want)


@pytest.mark.parametrize("kind", TWO_AXES)
def test_gradients_wait_on_a_grid(kind, ranks):
    """On 2 x 2 ranks, steps with waiting gradients also give the bits of one process."""
    axes = {"x": 2, "y": 2}
    name = ("accumulate", "accumulate rows", "accumulate lamb")[TWO_AXES.index(kind) % 3]
    want = without_waiting(training.alone(name, 4, 4, 8))
    for got in ranks(4).run(training.real, name, axes, plan_of(kind, axes), 4, 8, True):
        assert_same_training(got, want)


def test_a_staged_step_on_ranks_lets_gradients_wait(ranks):
    """jit with donation changes accumulating steps only by rounding."""
    args = ("accumulate rows", {"x": 2}, plan_of("row_wise", {"x": 2}), 4, 4, True, True)
    want = without_waiting(training.alone("accumulate rows", 2, 4, 4))
    assert_same_training(ranks(2).run(as_staged, training.real, *args, deadline_s=300)[0], want, rtol=1e-5, atol=1e-6)


def without_waiting(made):
    tables, slots, *others = made
    own = {n: {k: s for k, s in kept.items() if not k.startswith("pending")} for n, kept in slots.items()}
    return tables, own, *others


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_ranks_send_the_weights_of_the_keys_that_have_some(kind, ranks):
    """With ids of which one key has weights, a step on two ranks has the bits of the emulated step."""
    want = training.some_weights({"x": 2}, kind, False)
    assert all(t.isfinite().all() for t in want.values())
    for got in ranks(2).run(training.some_weights, {"x": 2}, kind, True):
        assert_trees_close(got, want)


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 8}, {"x": 2, "y": 4}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_emulated_training_is_training(name, axes):
    """Emulated steps differ from steps in one process only by the rounding of dense products. Each optimizer meets
    every placement on one of two meshes of one axis, and half of the placements of two axes."""
    mesh, turn = fr.Mesh.emulated(**axes), list(OPTIMIZERS).index(name) + (axes == {"x": 8})
    want = training.alone(name, mesh.size, 3, 8)
    for kind in (TWO_AXES if len(axes) > 1 else ONE_AXIS)[turn % 2 :: 2]:
        got = training.together(name, mesh, plan_of(kind, axes), 3, 8, exact=True)
        assert_same_training(got, want, rtol=2e-6, atol=2e-6)


def test_a_row_cut_by_columns_keeps_one_second_moment(ranks):
    """Under column_wise, row-wise Adagrad keeps the second moment of the whole row. The owner of each column has the
    same number."""
    mesh, axes = fr.Mesh.emulated(x=2), {"x": 2}
    got = training.together("rowwise_adagrad", mesh, plan_of("column_wise", axes), 3, 8, exact=True)
    plain = training.together("rowwise_adagrad", mesh, plan_of("row_wise", axes), 3, 8, exact=True)
    assert_trees_close(got[1], plain[1], rtol=1e-6)


def test_a_norm_of_all_gradients_is_that_of_all_ranks():
    """clip(max_norm) on a mesh clips by the norm over the rows of all ranks, under every placement of whole rows."""
    sparse = fr.optim.clip(fr.optim.sgd(1.0), max_norm=0.01)
    dense = fr.optim.dense(torch.optim.SGD, lr=0.0)
    plain = fr.train_step(training.loss_fn, sparse=sparse, dense=dense)
    want = plain(plain.init(training.params()), training.batch(0, 8))[0].tables
    for kind in ("table_wise", "row_wise", "replicated", "column_wise"):
        mesh = fr.Mesh.emulated(x=2)
        step = fr.train_step(training.loss_fn, sparse=sparse, dense=dense, mesh=mesh, plan=plan_of(kind, {"x": 2}))
        state, _ = step(step.init(training.params()), training.batch(0, 8))
        assert_trees_close(fr.gather_tables(state.tables, mesh), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "replicated"])
def test_a_compiled_step_on_ranks_is_the_step(kind, ranks):
    """jit with donation, compiled for rows and staged for the others, changes a sharded step only by the rounding of
    dense parts. test_column_update has the laws of columns."""
    axes, through = {"x": 2}, () if kind == "row_wise" else (as_staged,)
    want = training.alone("rowwise_adagrad", 2, 5, 4)
    args = (training.real, "rowwise_adagrad", axes, plan_of(kind, axes), 5, 4, True, True)
    got = ranks(2).run(*through, *args, deadline_s=300)[0]
    assert_same_training(got, want, rtol=1e-5, atol=1e-6)

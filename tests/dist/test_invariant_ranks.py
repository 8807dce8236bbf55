"""invariant on ranks: ranks, placements and micro-batches change no bit of a training whose parts are equal."""

import functools

import pytest
import torch
from programs import invariant_ranks as runs

import funcrec as fr
from funcrec.testing import assert_trees_close

equal = functools.partial(assert_trees_close, rtol=0, atol=0)
ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES = ("table_row_wise", "table_column_wise", "grid")
CELLS = [({"x": n}, kind) for n in (2, 4) for kind in ONE_AXIS] + [({"x": 2, "y": 2}, kind) for kind in TWO_AXES]
alone = functools.cache(runs.trained)


@pytest.mark.parametrize("name", runs.OPTIMIZERS)
def test_ranks_and_placements_change_no_bit(name):
    """Three steps of DLRM on 2, 4 and 2 x 2 emulated ranks, under every placement, give the whole state and the losses
    of one process, bit for bit. Each optimizer meets a third of the cells."""
    turn = list(runs.OPTIMIZERS).index(name)
    for axes, kind in CELLS[turn :: len(runs.OPTIMIZERS)]:
        equal(runs.trained(name, axes, kind), alone(name))


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_change_no_bit(parts):
    """Micro-batches give the bits of the undivided step, in one process and on two ranks; and the state of 600 examples
    on four ranks is that of one process."""
    equal(runs.trained("adam", micro_batches=parts), alone("adam"))
    if parts == 2:
        equal(runs.trained("adam", {"x": 2}, "row_wise", micro_batches=2), alone("adam"))
        equal(runs.trained("sgd", {"x": 4}, "row_wise", size=600)[0], runs.trained("sgd", size=600)[0])


@pytest.mark.parametrize(("axes", "kind", "options"), [
    ({"x": 4}, "row_wise", {"max_norm": 0.05}),
    ({"x": 4}, "replicated", {"max_norm": 0.05, "dense_axes": ("x",)}),
    ({"x": 2}, "table_wise", {"max_norm": 0.05, "micro_batches": 2}),
    ({"x": 2, "y": 2}, "row_wise", {"dense_axes": ("y",)}),
    ({"x": 2}, "row_wise", {"capacity": 4000}),
    ({"x": 2}, "column_wise", {"dtype": torch.bfloat16}),
])  # fmt: skip
def test_norms_cut_parameters_and_16_bits_change_no_bit(axes, kind, options):
    """Clipping by the norm of all gradients, dense parameters cut over ranks, a capacity, and tables of bf16 keep the
    bits of one process."""
    own = {k: x for k, x in options.items() if k in ("max_norm", "dtype")}
    equal(runs.trained("adam", axes, kind, **options), runs.trained("adam", **own))


@pytest.mark.parametrize("ranks_and_size", [(4, 4), (3, 6)])
def test_small_and_odd_numbers_of_parts_have_right_values(ranks_and_size):
    """Three and four ranks with one or two examples each take steps that agree with one process up to rounding."""
    n, size = ranks_and_size
    got, want = runs.trained("sgd", {"x": n}, "row_wise", size=size), runs.trained("sgd", size=size)
    assert_trees_close(got, want, rtol=1e-4, atol=1e-5)


def test_real_ranks_change_no_bit(ranks):
    """Two and four gloo ranks give the bits of one process, with tables cut by rows, by columns and not at all."""
    for n, kind in ((2, "row_wise"), (4, "column_wise"), (4, "replicated")):
        for got in ranks(n).run(functools.partial(runs.trained, is_real=True), "rowwise_adagrad", {"x": n}, kind):
            equal(got, alone("rowwise_adagrad"))


def test_fit_that_changes_its_ranks_keeps_its_bits(ranks, tmp_path):
    """A run of `fit` on two ranks, resumed on four under another plan and then in one process, ends with the bits of
    the run in one process."""
    ranks(2).run(runs.fitted, tmp_path / "run", 1, {"x": 2}, "row_wise")
    ranks(4).run(runs.fitted, tmp_path / "run", 2, {"x": 4}, "column_wise")
    equal(runs.fitted(tmp_path / "run", 3), runs.fitted(tmp_path / "alone", 3))


@pytest.mark.parametrize("size", [3, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_over_ranks_are_trees(size, dtype, ranks):
    """psum, pmean, psum_scatter and the transposes add the terms of 2 x 2 and of 3 ranks as a tree of neighbours, on
    emulated and on real ranks, whole or in parts."""
    for axes in ({"x": 2, "y": 2}, {"x": 3}):
        want, got = runs.sums_by_hand(axes, size, dtype), runs.sums(axes, size, dtype)
        equal(got, want)
        if dtype == torch.float32 and len(axes) == 2:
            for own in ranks(4).run(runs.sums, axes, size, dtype, True):
                equal(own, want)


def test_sums_of_integers_and_extrema_are_as_ever():
    """Sums of integers, bools and numbers, and extrema, have one result under invariant, too."""
    f = lambda x: (fr.psum((x.int(), x > 2, 3), "x"), fr.pmax(x, "x"), fr.pmin(x, "x"))
    run = lambda f: fr.shard_map(f, mesh=fr.Mesh.emulated(x=3), in_specs=fr.P("x"), out_specs=fr.P())
    equal(run(fr.invariant(f))(torch.arange(6.0)), run(f)(torch.arange(6.0)))


def test_what_rounds_on_ranks_is_refused():
    """Codecs, dedup, replicas, other batch axes and a transform of gradients raise with invariant on a mesh."""
    mesh = fr.Mesh.emulated(x=2)
    plan = fr.Plan.uniform("row_wise", runs.SHAPES, mesh)
    make = lambda **options: fr.train_step(runs.model_of(), mesh=mesh, invariant=True, **{"plan": plan, **options})
    for options in (
        {"codec": fr.Codec("bfloat16")}, {"dedup": True}, {"batch_axes": ()}, {"grad": fr.private_grads},
        {"plan": fr.Plan.uniform("replicated", runs.SHAPES, mesh, replicas=("x",))},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="invariant=True"):
            make(**options)
    ask = fr.invariant(lambda t, ids: fr.lookup(t, ids, runs.FEATURES[:1]).values)
    tables = runs.model_of().init(fr.key(0)).tables
    for how, words in (({"dedup": True}, "rank by rank"), ({"codec": fr.Codec("bfloat16")}, "rounds what ranks send")):
        held = fr.shard_tables(tables, plan, mesh, **how)
        with pytest.raises(ValueError, match=words):
            fr.shard_map(ask, mesh=mesh, in_specs=(held.specs(), fr.P("x")), out_specs=fr.P("x"))(
                held, runs.batch_of(0, 8).ids
            )


def test_two_sequences_of_one_table_have_a_lookup_each():
    """Gradients of two sequences of a table in one lookup arrive rank by rank, so a step on ranks raises and names
    both. With a lookup for each it has the bits of one process."""
    features = [fr.FeatureConfig(name, table="t", pooling="none", max_length=2) for name in ("a", "b")]
    lists = [[i % 7, i % 3] for i in range(512)]
    ids = fr.KeyedJaggedTensor.from_lists({"a": lists, "b": lists[::-1]})
    total = lambda found: sum((x.values * x.values.sin()).sum(1).mean() for x in found)

    def together(params, ids):
        return total(fr.lookup_sequence(params.tables, ids, features)[n] for n in ("a", "b"))

    def apart(params, ids):
        return total(fr.lookup_sequence(params.tables, ids, [f])[f.name] for f in features)

    mesh = fr.Mesh.emulated(x=2)
    ranks = {"mesh": mesh, "plan": fr.Plan.uniform("row_wise", {"t": (7, 4)}, mesh)}
    params = fr.Params({"t": torch.linspace(-1, 1, 28).view(7, 4)}, {})

    def trained(loss, **options):
        step = fr.train_step(loss, sparse=fr.optim.sgd(0.1), invariant=True, **options)
        return step(step.init(params), ids)[0]

    with pytest.raises(ValueError, match=r"several sequences read table 't'[\s\S]*\['a', 'b'\]"):
        trained(together, **ranks)
    equal(fr.gather_state(trained(apart, **ranks), mesh).tables, trained(apart).tables)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_parameters_of_16_bits_are_refused(dtype):
    """Ranks and micro-batches round their gradients of 16-bit parameters, so `init` and a step raise before any work;
    one process trains them."""
    mesh, loss = fr.Mesh.emulated(x=2), lambda params, x: (x @ params.dense["w"].float()).mean()
    wide, narrow = (fr.Params({"t": torch.ones(4, 2)}, {"w": torch.ones(3, dtype=d)}) for d in (torch.float32, dtype))
    on_ranks = {"mesh": mesh, "plan": fr.Plan.uniform("row_wise", {"t": (4, 2)}, mesh)}
    for options in (on_ranks, {"micro_batches": 2}):
        step = fr.train_step(loss, sparse=fr.optim.sgd(0.1), invariant=True, **options)
        state = step.init(wide)
        half = fr.TrainState(state.step, state.tables, state.slots, narrow.dense, state.dense_opt, state.key)
        for call in (lambda: step.init(narrow), lambda: step(half, torch.ones(512, 3))):  # noqa: B023
            with pytest.raises(TypeError, match=r"round gradients of 16 bits[\s\S]*dense\['w'\]"):
                call()
    alone = fr.train_step(loss, sparse=fr.optim.sgd(0.1), invariant=True)
    alone(alone.init(narrow), torch.ones(512, 3))


def test_a_run_that_changes_its_ranks_keeps_its_bits(tmp_path):
    """A state saved on two ranks and loaded on four, under another plan, ends with the bits of the run of one process
    that did not change."""
    two, four = fr.Mesh.emulated(x=2), fr.Mesh.emulated(x=4)
    by_rows = runs.step_on(two, "row_wise", "adam")
    state = runs.steps_from(by_rows, by_rows.init(runs.model_of().init(fr.key(0)), fr.key(1)), two, range(2))
    path = fr.save(tmp_path / "state", state, mesh=two)
    plan = fr.Plan.uniform("column_wise", runs.SHAPES, four)
    moved = fr.load(path, mesh=four, plan=plan, sparse=runs.OPTIMIZERS["adam"]())
    last = runs.steps_from(runs.step_on(four, "column_wise", "adam"), moved, four, [2])
    equal(fr.gather_state(last, four), alone("adam")[0])

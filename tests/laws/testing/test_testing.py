"""funcrec.testing itself. Its checkers fail when they should, and its strategies reach and shrink as documented."""

import pytest
import torch
from hypothesis import Phase, find, given, settings, strategies

import funcrec as fr
from funcrec.testing import assert_trees_close, check_adjoint, check_grads, garbage_padding, zero_padding
from funcrec.testing import strategies as frs


def t(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)


DIFFERENT = {
    "value": ({"a": t(1.0)}, {"a": t(1.5)}, "`['a']`"),
    "nan": (t(1.0), t(float("nan")), "worst is inf"),
    "dtype": ([t(1.0)], [t(1.0, dtype=torch.float64)], "f64[1]"),
    "shape": ((t(1.0),), (t(1.0, 2.0),), "f32[2]"),
    "structure": ({"a": t(1.0)}, {"b": t(1.0)}, "structures"),
    "static field": (fr.KeyedTensor(t(1.0), ("a",), (1,)), fr.KeyedTensor(t(1.0), ("b",), (1,)), "structures"),
    "other leaf": ({"n": 1}, {"n": 2}, "`['n']`"),
    "number for a bool": ([1], [True], "True"),
    "none": ([None], [t(1.0)], "None"),
    "padding": (fr.JaggedTensor.from_lists([[1]]).pad_to(2), fr.JaggedTensor.from_lists([[1]]).pad_to(3), "values"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_trees_that_differ_are_told_apart(name):
    """assert_trees_close raises when trees differ in anything. The error names the path."""
    a, b, fragment = DIFFERENT[name]
    with pytest.raises(AssertionError) as e:
        assert_trees_close(a, b)
    assert fragment in str(e.value)


@given(frs.lookups())
def test_a_tree_is_close_to_itself(it):
    """assert_trees_close(x, x) passes, NaN in the padding included."""
    assert_trees_close(it._replace(features=()), it._replace(features=()))


def test_tolerances_are_those_asked_for():
    """|a - b| <= atol + rtol |b| passes, and any greater difference fails."""
    assert_trees_close(t(1.0), t(1.25), atol=0.25)
    assert_trees_close(t(5.0), t(4.0), rtol=0.25)
    with pytest.raises(AssertionError, match=r"0\.25 apart"):
        assert_trees_close(t(1.0), t(1.25), atol=0.24)


@given(frs.keyed_jagged_tensors(max_padding=8), frs.row_grads(coalesced=None, max_padding=8))
def test_garbage_padding_changes_only_padding(x, g):
    """garbage_padding(x) is the same value as x. zero_padding removes the garbage."""
    assert_trees_close(garbage_padding([x])[0].to_lists(), x.to_lists())
    assert_trees_close(garbage_padding({"g": g})["g"].to_dense(), g.to_dense())
    assert_trees_close(zero_padding(garbage_padding((x, g))), zero_padding((x, g)))


def test_garbage_is_in_and_out_of_range():
    """Garbage padding of ids holds valid rows of a small table and ids outside every table. Garbage padding of weights
    holds NaN."""
    x = fr.JaggedTensor(torch.zeros(64, dtype=torch.int32), torch.tensor([0, 4]), torch.ones(64))
    got = garbage_padding(x, fr.key(1))
    tail = got.values[4:]
    assert bool((tail < -1000).any()) and bool((tail > 1000).any()) and bool(((tail >= 0) & (tail < 4)).any())
    assert bool(got.weights[4:].isnan().all()) and not bool(got.weights[:4].isnan().any())


def test_an_adjoint_that_is_wrong_is_found():
    """check_adjoint raises for a wrong factor, a lost entry and a path that does not exist."""
    g = fr.RowGrads.from_entries(t(0, 2, dtype=torch.int64), torch.ones(2, 1), num_embeddings=3)
    gather = lambda x: {"y": x["table"][[0, 2]]}
    right = lambda y: {"table": fr.RowGrads.from_entries(g.rows, y["y"], num_embeddings=3)}
    x = {"table": torch.randn(3, 1, dtype=torch.float64), "unused": torch.ones(2)}
    check_adjoint(gather, right, x)
    wrong = {
        "factor": lambda y: {"table": right(y)["table"].scale(1 + 1e-6)},
        "entry": lambda y: {"table": fr.RowGrads.from_entries(g.rows[:1], y["y"][:1], num_embeddings=3)},
        "path": lambda y: {"tabel": y["y"]},
    }
    x = {"table": torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)}
    for transpose in wrong.values():
        with pytest.raises(AssertionError):
            check_adjoint(gather, transpose, x)


def test_an_adjoint_of_nan_is_no_adjoint():
    """check_adjoint does not pass on NaN."""
    with pytest.raises(AssertionError):
        check_adjoint(lambda x: x, lambda y: y * torch.nan, torch.ones(2))


class Wrong(torch.autograd.Function):
    """The function x², with 2.01 x as its backward. The derivative of this backward is right."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, d):
        return d * 2.01 * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, d):
        return d * 2.01 * ctx.saved_tensors[0]


class WrongTwice(torch.autograd.Function):
    """The function x², with a right but detached backward."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, d):
        return d * 2 * ctx.saved_tensors[0].detach()


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_a_wrong_derivative_is_found(mode):
    """check_grads raises for a derivative with an error of half a percent, in either mode."""
    with pytest.raises(AssertionError, match=mode):
        check_grads(Wrong.apply, (t(1.0, 2.0),), order=1, modes=(mode,))


def test_a_wrong_second_derivative_is_found():
    """check_grads of order 2 finds an error that order 1 does not."""
    check_grads(WrongTwice.apply, (t(1.0, 2.0),), order=1, modes=("rev",))
    with pytest.raises(AssertionError, match="rev of rev"):
        check_grads(WrongTwice.apply, (t(1.0, 2.0),), order=2, modes=("rev",))


def test_derivatives_with_integer_arguments():
    """check_grads keeps ids fixed and differentiates floats, in trees."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 1], [1]]}, weights={"a": [[1.0, 2.0], [0.5]]})
    features = [fr.FeatureConfig("a", table="t", weighted=True, pooling="mean")]
    check_grads(lambda w, ids: fr.lookup(w, ids, features).values.sin(), ({"t": torch.ones(2, 3)}, ids))


SMALLEST = {
    "jagged_tensors": (frs.jagged_tensors(), "JaggedTensor([], values=i64[0])"),
    "keyed_jagged_tensors": (frs.keyed_jagged_tensors(), "KeyedJaggedTensor({'a': []}, values=i64[0])"),
    "keyed_tensors": (frs.keyed_tensors(), "KeyedTensor(a: 1, values=f32[0, 1])"),
    "table_configs": (
        frs.table_configs().map(lambda ts: [(t.name, *t.shape, str(t.dtype)) for t in ts]),
        "[('t0', 1, 1, 'torch.float32')]",
    ),
    "row_grads": (frs.row_grads(), "RowGrads(entries, at most [0, 1], of 1 rows)"),
    "lookups": (frs.lookups().map(lambda it: it.tables), "{'t0': tensor([[0.]])}"),
    "batches": (
        frs.batches(frs.keyed_jagged_tensors(keys=["a"])),
        "Batch(ids=KeyedJaggedTensor({'a': []}, values=i64[0]), label=f32[0])",
    ),
    "gradients": (
        frs.gradients(fr.Params({"t": torch.ones(2, 1)}, {"w": torch.ones(1)})).map(lambda g: (g.tables, g.dense)),
        "({'t': RowGrads(entries, at most [0, 1], of 2 rows)}, {'w': tensor([0.])})",
    ),
    "train_states": (
        frs.train_states([fr.TableConfig("t", 2, 1)]),
        "TrainState(step=0, tables={t: f32[2, 1]}, slots=0 tensors, dense=1 tensor, dense_opt=0 tensors)",
    ),
    "features": (frs.lookups().map(lambda it: it.features), f"{(fr.FeatureConfig('f0', 't0', column='a'),)}"),
}


def smallest(strategy):
    """Return the draw to which hypothesis shrinks. It would explain the draw by a hundred more."""
    return find(strategy, lambda x: True, settings=settings(phases=[Phase.generate, Phase.shrink]))


def test_meshes_and_plans_shrink_and_reach():
    """The smallest mesh is one rank. The smallest plan is replicated. Draws include ranks in another order,
    repeated ranks, and axes in another order than those of the mesh."""
    assert str(smallest(frs.meshes())) == "Mesh.emulated(x=1)"
    mesh = fr.Mesh.emulated(x=2, y=3)
    plans = frs.plans({"t": None, "u": None}, mesh, replicas=True)
    assert smallest(plans) == fr.Plan({"t": fr.replicated(), "u": fr.replicated()})
    by_columns = frs.plans({"t": None}, mesh, kinds=["column_wise"])
    assert smallest(by_columns) == fr.Plan({"t": fr.column_wise("x")})
    reach(by_columns, lambda plan: len(set(plan["t"].ranks)) < len(plan["t"].ranks))
    reach(by_columns, lambda plan: list(plan["t"].ranks) != sorted(plan["t"].ranks))
    reach(plans, lambda plan: plan["t"].axes == ("y", "x") and plan["t"].kind == "grid")
    reach(plans, lambda plan: plan.replicas == ("y",) and plan["u"].axes == ("x",))


@pytest.mark.parametrize("name", SMALLEST)
def test_strategies_shrink_to_the_least(name):
    """The smallest example has no bags, no padding, i64, f32, one table and one feature."""
    strategy, text = SMALLEST[name]
    assert str(smallest(strategy)) == text


REACHED = {
    "an empty bag between others": lambda it: any([] in bags[1:-1] for bags in it.ids.to_lists().values()),
    "repeated ids": lambda it: any(len(set(bag)) < len(bag) for bags in it.ids.to_lists().values() for bag in bags),
    "an id outside": lambda it: -1 in it.ids.values[: it.ids.offsets[-1]].tolist(),
    "NaN in the padding": lambda it: it.ids.weights is not None and bool(it.ids.weights.isnan().any()),
    "i32 ids with i64 offsets": lambda it: (it.ids.values.dtype, it.ids.offsets.dtype) == (torch.int32, torch.int64),
    "a shared table": lambda it: len({f.table for f in it.features}) < len(it.features),
    "a column of two tables": lambda it: (
        len({(f.key, f.table) for f in it.features}) > len({f.key for f in it.features})
    ),
    "pooled and sequence": lambda it: {"none", "mean"} <= {f.pooling for f in it.features},
    "two dtypes": lambda it: len({w.dtype for w in it.tables.values()}) > 1,
    "weighted and hashed and cut": lambda it: any(f.weighted and f.hash and f.max_length == 1 for f in it.features),
}


def reach(strategy, condition):
    """Raise hypothesis.errors.NoSuchExample if no draw meets the condition."""
    find(strategy, condition, settings=settings(max_examples=1000, phases=[Phase.generate], derandomize=True))


@pytest.mark.parametrize("name", REACHED)
def test_lookups_reach_the_hard_cases(name):
    """Within some hundred draws, lookups() gives every case that it promises."""
    reach(frs.lookups(), REACHED[name])


CONFIGS = (fr.TableConfig("t", 5, 3),)
READ = (fr.FeatureConfig("a", table="t"),)


@given(strategies.data())
def test_strategies_of_training_compose(data):
    """A step takes any drawn state and batch, on any drawn plan of a drawn mesh: the tables are those of one process.
    The state's optimizer takes any drawn gradients of its parameters."""
    sparse, mesh = fr.optim.adam(0.25), data.draw(frs.meshes(max_ranks=2))
    state = data.draw(frs.train_states(CONFIGS, optimizers=[sparse]))
    ids = frs.keyed_jagged_tensors(
        keys=["a"], elements=strategies.integers(0, 4), weighted=False, min_bags=2, max_bags=2
    )
    batch = data.draw(frs.batches(ids, weighted=False, max_dense=0))
    loss = lambda p, b: fr.losses.mse(fr.lookup(p.tables, b.ids, READ).values @ p.dense["w"], b.label)
    how = {"sparse": sparse, "dense": fr.optim.dense(torch.optim.SGD, lr=0.25)}
    alone, _ = fr.train_step(loss, **how)(state, batch)
    plan = data.draw(frs.plans(CONFIGS, mesh))
    placed = fr.reshard(state, plan, mesh=mesh, sparse=sparse)
    own = fr.shard(batch, fr.P(mesh.axis_names), mesh=mesh)
    there, _ = fr.train_step(loss, **how, mesh=mesh, plan=plan)(placed, own)
    assert_trees_close(fr.gather_state(there, mesh).tables, alone.tables, rtol=1e-4, atol=1e-4)
    grads = data.draw(frs.gradients(state.params))
    tables, _ = sparse.update(grads.tables, state.slots, state.tables, state.step)
    rows = torch.ones(5, dtype=torch.bool).index_fill(0, grads.tables["t"].coalesce().rows.clamp(0, 4).long(), False)
    assert torch.equal(tables["t"][rows], state.tables["t"][rows])


def test_strategies_of_training_reach_the_hard_cases():
    """Batches have labels of several tasks, examples of weight 0, and dense inputs; states have slots."""
    ids = frs.keyed_jagged_tensors(keys=["a"], min_bags=2)
    reach(frs.batches(ids, num_tasks=2), lambda b: b.label.shape[1:] == (2,) and bool((b.label.sum(1) == 1).any()))
    reach(frs.batches(ids), lambda b: b.weight is not None and bool((b.weight == 0).any() & (b.weight > 1).any()))
    reach(frs.batches(ids), lambda b: b.dense is not None and b.dense.shape[1] == 2 and bool((b.dense < 0).any()))
    reach(
        frs.train_states(CONFIGS), lambda s: bool(s.slots["t"]) and int(s.step) > 1 and bool((s.tables["t"] != 0).any())
    )


def test_row_grads_reach_the_hard_cases():
    """row_grads() gives repeats, rows outside the table, and garbage after the count."""
    reach(frs.row_grads(), lambda g: len(set(g.rows[: g.count].tolist())) < int(g.count))
    reach(frs.row_grads(), lambda g: bool((g.rows[: g.count] < 0).any()))
    reach(frs.row_grads(), lambda g: bool(g.grads.isnan().any()) and int(g.count) < g.rows.shape[0])
    reach(frs.row_grads(coalesced=None), lambda g: g.coalesced and int(g.count) > 1)

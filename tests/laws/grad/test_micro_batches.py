"""accumulate_grads and train_step(micro_batches=) give the gradients of a batch, part by part."""

import functools
import operator
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ordered
from torch.utils.flop_counter import FlopCounterMode

import funcrec as fr
from funcrec.testing import assert_trees_close

ROWS = {"item": (13, 4), "user": (7, 3)}
FEATURES = (
    fr.FeatureConfig("a", table="item"),
    fr.FeatureConfig("b", table="item", pooling="mean", weighted=True),
    fr.FeatureConfig("c", table="user", hash=fr.modulo(), max_length=2),
)
LATE = (fr.FeatureConfig("d", table="item", column="a", pooling="none"),)
POWERS = (2, 8)


def drawn(seed: int, num_examples: int = 8, dtype=torch.float32):
    """Return parameters, and a batch with empty bags, repeats, ids outside their table, weights and padding."""
    g = torch.Generator().manual_seed(seed)
    bags = lambda n: [
        torch.randint(-1, n, (int(k),), generator=g).tolist() for k in torch.randint(0, 5, (num_examples,), generator=g)
    ]
    ids = fr.KeyedJaggedTensor.from_lists({"a": bags(14), "b": bags(13), "c": bags(99)}, dtype=torch.int64)
    weights = torch.rand(ids.capacity, generator=g).to(dtype)
    ids = fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, None, ids.keys).pad_to(ids.capacity + 5)
    weight = torch.rand(num_examples, generator=g).to(dtype) * (torch.arange(num_examples) % 3 > 0)
    tables = {n: torch.randn(s, generator=g).to(dtype) for n, s in ROWS.items()}
    dense = {"w": torch.randn(11, generator=g).to(dtype), "c": torch.zeros((), dtype=dtype)}
    return fr.Params(tables, dense), fr.Batch(ids, torch.rand(num_examples, generator=g).to(dtype), weight=weight)


def logits(params, batch):
    """Return the logit of each example alone. Sums over columns are rounded alike for any number of examples."""
    pooled = fr.lookup(params.tables, batch.ids, FEATURES)
    rows = fr.lookup_sequence(params.tables, batch.ids, LATE)["d"]
    return (pooled.values * params.dense["w"]).sum(1) + params.dense["c"] + rows.to_padded(4).sum((1, 2))


def linear_loss(params, batch):
    """Return a loss whose cotangents need no sum over columns, because vmap may sum columns in another order."""
    x = fr.lookup(params.tables, batch.ids, FEATURES).values
    rows = fr.lookup_sequence(params.tables, batch.ids, LATE)["d"].to_padded(4)
    return (x * params.dense["w"] * batch.label[:, None]).mean() + (rows * batch.label[:, None, None]).mean()


def plain_loss(params, batch):
    return (logits(params, batch) - batch.label).square().mean()


def weighted_loss(params, batch):
    """Return the sum of two weighted means with different weights."""
    other = (batch.weight > 0.5).to(batch.weight.dtype)
    z = logits(params, batch)
    return fr.losses.bce(z, batch.label, batch.weight) + fr.losses.mse(z, batch.label, other)


LOSSES = {"plain": plain_loss, "weighted": weighted_loss}


@pytest.mark.parametrize("k", POWERS)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6))
def test_tables_get_the_whole_batchs_gradient_to_the_bit(name, k, seed):
    """If a loss treats examples separately, 2 and 8 micro-batches give the row gradients of the whole batch bit for
    bit. This includes repeats and several features of a table. Loss and dense gradients agree within 1e-6."""
    params, batch = drawn(seed)
    want, grads = fr.value_and_grad(LOSSES[name])(params, batch)
    got, mine = fr.accumulate_grads(LOSSES[name], k)(params, batch)
    for n in ROWS:
        a, b = mine.tables[n].coalesce(), grads.tables[n].coalesce()
        count = int(b.count)
        assert int(a.count) == count
        assert_trees_close((a.rows[:count], a.grads[:count]), (b.rows[:count], b.grads[:count]))
    torch.testing.assert_close((got, mine.dense), (want, grads.dense), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_any_number_of_micro_batches_is_the_float64_gradient(name):
    """3, 5 and 15 micro-batches of 15 examples give the float64 gradient of the whole batch: within 1e-12 in float64,
    within 1e-6 in float32."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        params, batch = drawn(3, 15, dtype)
        exact = fr.value_and_grad(LOSSES[name])(*drawn(3, 15, torch.float64) if dtype == torch.float64 else
                                                fr.tree.to((params, batch), dtype=torch.float64))  # fmt: skip
        for k in (3, 5, 15):
            loss, grads = fr.accumulate_grads(LOSSES[name], k)(params, batch)
            tables = {n: g.to_dense().double() for n, g in grads.tables.items()}
            want = {n: g.to_dense() for n, g in exact[1].tables.items()}
            torch.testing.assert_close(tables, want, rtol=tolerance, atol=tolerance)
            assert_trees_close((loss.double(), fr.tree.to(grads.dense, dtype=torch.float64)),
                               (exact[0], exact[1].dense), rtol=tolerance, atol=tolerance)  # fmt: skip


def step_of(k=1, loss=weighted_loss, **where):
    return fr.train_step(
        loss, sparse=fr.optim.adam(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), micro_batches=k, **where
    )


def test_a_step_in_micro_batches_moves_tables_as_the_whole(k=4):
    """A step in micro-batches gives the same tables as the whole step, bit for bit."""
    params, batch = drawn(5)
    whole, step = step_of(), step_of(k)
    want, _ = whole(whole.init(params), batch)
    got, metrics = step(step.init(params), batch)
    assert_trees_close((got.tables, got.slots), (want.tables, want.slots))
    assert_trees_close(metrics["loss"], whole(whole.init(params), batch)[1]["loss"], rtol=1e-6)


@pytest.mark.parametrize("kind", ("row_wise", "table_wise", "column_wise"))
def test_micro_batches_on_ranks_move_tables_as_the_whole(kind):
    """Two emulated ranks with two micro-batches each give the tables of two ranks without micro-batches, bit for
    bit."""
    mesh = fr.Mesh.emulated(x=2)
    plan = fr.Plan.uniform(kind, ROWS, mesh)
    params, batch = drawn(7)
    made = []
    for k in (1, 2):
        step = step_of(k, linear_loss, mesh=mesh, plan=plan)
        state, metrics = step(step.init(params), batch)
        made.append((fr.gather_tables(state.tables, mesh), state.dense, metrics["loss"]))
    assert_trees_close(made[0][0], made[1][0])
    assert_trees_close(made[0][1:], made[1][1:], rtol=1e-6, atol=1e-6)


KEPT = fr.FeatureConfig("a", table="item")


def with_dropout(params):
    """Return Params with one table and a matrix."""
    return fr.Params({"item": params.tables["item"]}, {"m": torch.linspace(-1, 1, 20).reshape(4, 5)})


def dropped(params, batch, key, product, total):
    x = fr.nn.dropout(fr.lookup(params.tables, batch.ids, [KEPT])["a"], key, rate=0.5)
    logits = total(product(x, params.dense["m"]).relu(), 1)
    return total((logits - batch.label).square(), 0) / batch.label.shape[0]


def test_micro_batches_are_ranks():
    """k micro-batches and k emulated ranks give the same tables, dense parameters and loss, bit for bit, with dropout.
    The loss must sum in a fixed order. Emulated ranks share one matrix product. A library may sum that product in
    another order than the product of a single rank."""
    loss_fn = lambda params, batch, key: dropped(params, batch, key, ordered.product, ordered.total)
    params, batch = drawn(11)
    params, mesh = with_dropout(params), fr.Mesh.emulated(x=4)
    alone = step_of(4, loss_fn)
    ranks = step_of(1, loss_fn, mesh=mesh, plan=fr.Plan({"item": fr.row_wise("x")}), exact=True)
    batch = fr.Batch(batch.ids, batch.label)
    a, of_a = alone(alone.init(params), batch)
    b, of_b = ranks(ranks.init(params), batch)
    assert_trees_close((a.tables, a.dense, of_a), (fr.gather_tables(b.tables, mesh), b.dense, of_b))


def test_micro_batches_are_batches_that_are_added(k=4):
    """k micro-batches give the sums of the loss, rows and dense gradients of k batches, bit for bit. This includes the
    draws of dropout and matrix products, because both have the same shapes."""
    loss_fn = lambda params, batch, key: dropped(params, batch, key, torch.matmul, torch.sum)
    share = fr.value_and_grad(lambda params, batch, key: loss_fn(params, batch, key) / k)
    params, batch = drawn(11)
    params, batch, n = with_dropout(params), fr.Batch(batch.ids, batch.label), batch.label.shape[0] // k
    got, mine = fr.accumulate_grads(loss_fn, k)(params, batch, key=fr.key(3))
    parts = [fr.Batch(batch.ids[j * n : (j + 1) * n], batch.label[j * n : (j + 1) * n]) for j in range(k)]
    made = [share(params, part, key=fr.fold_in(fr.key(3), j)) for j, part in enumerate(parts)]
    want = sum(loss for loss, _ in made)
    rows = functools.reduce(operator.add, [g.tables["item"] for _, g in made]).to_dense()
    dense = functools.reduce(operator.add, [g.dense["m"] for _, g in made])
    assert_trees_close((got, mine.tables["item"].to_dense(), mine.dense["m"]), (want, rows, dense))


def test_aux_is_the_mean():
    """Float tensors in aux are averaged. All other values must be equal. Metrics and merge get the mean."""
    params, batch = drawn(2)
    loss_fn = lambda p, b: (plain_loss(p, b), {"mean": b.label.mean(), "name": "x", "none": None})
    (_, aux), _ = fr.accumulate_grads(loss_fn, 4, has_aux=True)(params, batch)
    torch.testing.assert_close(aux["mean"], batch.label.mean())
    assert aux["name"] == "x" and aux["none"] is None
    assert fr.accumulate_grads(loss_fn, 1, has_aux=True)(params, batch)[0][1] == loss_fn(params, batch)[1]
    of_tasks = lambda p, b: (plain_loss(p, b), b.label.mean() * torch.ones(3))
    (_, aux), _ = fr.accumulate_grads(of_tasks, 4, has_aux=True)(params, batch)
    torch.testing.assert_close(aux, batch.label.mean() * torch.ones(3))


def test_aux_of_each_example_is_refused():
    """With several micro-batches, a value of aux for each example raises, because an average would mix unrelated
    examples. One micro-batch returns the value."""
    params, batch = drawn(2)
    each = lambda p, b: (plain_loss(p, b), {"logits": b.label * 1})
    with pytest.raises(ValueError, match=r"(?s)`aux` has a value for each example.*micro-batches of 2 examples"):
        fr.accumulate_grads(each, 4, has_aux=True)(params, batch)
    (_, aux), _ = fr.accumulate_grads(each, 1, has_aux=True)(params, batch)
    assert torch.equal(aux["logits"], batch.label)


@pytest.mark.parametrize(
    "auxs, kind, words",
    [(("a", "b"), ValueError, "differs between micro-batches(.|\n)*'a' and others"),
     ((1.0, True), ValueError, "differs between micro-batches"),
     (({"x": 1.0}, [1.0]), TypeError, "has another structure in some micro-batches")],
)  # fmt: skip
def test_aux_that_differs_is_refused(auxs, kind, words):
    """aux that is no tensor has one value and one structure in all micro-batches."""
    params, batch = drawn(2)
    own = lambda p, b: (plain_loss(p, b), auxs[int(not torch.equal(b.label, batch.label[:4]))])
    with pytest.raises(kind, match=rf"`aux` {words}"):
        fr.accumulate_grads(own, 2, has_aux=True)(params, batch)


def test_an_empty_batch_is_what_it_is_whole():
    """Without examples, the loss of micro-batches is NaN like that of the whole batch. No row has a gradient."""
    params, _ = drawn(0)
    ids = fr.KeyedJaggedTensor.from_lists({k: [] for k in "abc"}, dtype=torch.int64)
    batch = fr.Batch(fr.KeyedJaggedTensor(ids.values, ids.offsets, torch.zeros(0), None, ids.keys), torch.zeros(0))
    loss, grads = fr.accumulate_grads(plain_loss, 2)(params, batch)
    assert loss.isnan() and int(grads.tables["item"].coalesce().count) == 0


@pytest.mark.filterwarnings("ignore:funcrec.value_and_grad")
def test_derivatives_go_through():
    """The derivative of an accumulated gradient with respect to the examples' weights equals that of the whole batch,
    by torch.func, and by autograd while a mode of torch watches."""
    params, batch = drawn(4, dtype=torch.float64)
    live = batch.weight + 0.1

    def norm(transform, weight):
        given = fr.Batch(batch.ids, batch.label, weight=weight)
        _, grads = transform(lambda p, b: fr.losses.bce(logits(p, b), b.label, b.weight))(params, given)
        return grads.dense["w"].square().sum() + grads.tables["item"].to_dense().square().sum()

    want = torch.func.grad(lambda w: norm(fr.value_and_grad, w))(live)
    of_parts = lambda w: norm(lambda f: fr.accumulate_grads(f, 4), w)
    torch.testing.assert_close(torch.func.grad(of_parts)(live), want)
    with FlopCounterMode(display=False):
        value = of_parts(live.requires_grad_())
    torch.testing.assert_close(torch.autograd.grad(value, live)[0], want)


PEAK = """
import torch, funcrec as fr
from torch.profiler import profile, ProfilerActivity
item = fr.FeatureConfig("a", table="item")
def loss_fn(p, b):
    x = fr.lookup(p.tables, b.ids, [item])["a"]
    for w in p.dense["ws"]:
        x = (x @ w).tanh()
    return fr.losses.mse(x.sum(1), b.label, b.weight)
B = 8192
ids = fr.KeyedJaggedTensor.from_lengths(["a"], torch.arange(B) % 50, torch.ones(B, dtype=torch.int64))
ws = [torch.randn(8, 128) / 4, *(torch.randn(128, 128) / 11 for _ in range(3))]
params = fr.Params({"item": torch.randn(50, 8)}, {"ws": ws})
step = fr.train_step(loss_fn, sparse=fr.optim.sgd(), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), micro_batches=8)
state, batch = step.init(params), fr.Batch(ids, torch.zeros(B), weight=torch.arange(B) % 3 / 2)
made = []
for run in (step, fr.jit(step)):
    made.append(run(state, batch))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        run(state, batch)
    held = most = 0
    for e in p.profiler.kineto_results.events():
        if e.name() == "[memory]":
            held += e.nbytes()
            most = max(most, held)
    print(most)
fr.testing.assert_trees_close(made[0], made[1], rtol=1e-4, atol=1e-5)
"""


def test_activations_of_one_micro_batch_live_at_a_time():
    """The loss of a step has the activations of four layers, of 16 MiB. In 8 micro-batches, the eager step allocates
    less than half of their bytes. The compiled step allocates less than a third. Both steps give the same state."""
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    eager, compiled = (int(x) for x in out.split()[-2:])
    assert 2e6 < eager < 8e6 and 2e6 < compiled < 5.25e6, (eager, compiled)


def test_other_lookups_in_some_micro_batches_are_refused():
    """A loss that reads other features in some parts of a batch has no entries in the batch's order."""
    params, batch = drawn(3)
    calls = iter([0, 0, 1, 1])  # the first pass and the second over each of two parts

    def loss_fn(params, batch):
        return fr.lookup(params.tables, batch.ids, FEATURES[next(calls) :][:1]).values.square().mean()

    with pytest.raises(ValueError, match="the micro-batches look up other tables"):
        fr.accumulate_grads(loss_fn, 2)(params, fr.Batch(batch.ids, batch.label))


@pytest.mark.parametrize("more", [-1, 1])
def test_other_weighted_means_in_some_calls_are_refused(more):
    """A loss with fewer or more weighted means in the pass of the derivative has no common total weights."""
    params, batch = drawn(3)
    calls = iter([2, 2, 2, *[2 + more] * 4])  # the first part, in it both parts for the totals; then each part

    def loss_fn(params, batch):
        errors = (logits(params, batch) - batch.label).square()
        return sum(fr.losses.weighted_mean(errors, batch.weight) for _ in range(next(calls)))

    with pytest.raises(ValueError, match="the loss is not a function of its arguments"):
        fr.accumulate_grads(loss_fn, 2)(params, batch)
    by_part = lambda p, b: sum(
        fr.losses.weighted_mean((logits(p, b) - b.label).square(), b.weight)
        for _ in range(1 + torch.equal(b.label, batch.label[: len(b.label)]))
    )
    with pytest.raises(ValueError, match="the loss is not a function of its arguments"):
        fr.accumulate_grads(by_part, 2)(params, batch)

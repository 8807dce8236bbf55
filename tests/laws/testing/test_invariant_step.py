"""check_invariant_step passes for an invariant step, and fails for steps whose bits follow what cuts them."""

import functools

import pytest
import torch
from programs import invariant_ranks as runs

import funcrec as fr
from funcrec.testing import check_invariant_step
from funcrec.testing._invariant_step import OF_PARTS
from funcrec.testing._trees import assert_same_bits

SPARSE = {"sparse": fr.optim.rowwise_adagrad(lr=0.1)}
FEW = {"ranks": [2], "micro_batches": [2], "threads": [1, 2], "compiled": False}
DENSE = fr.Params({"t": torch.ones(4, 2)}, torch.tensor([0.3, -1.0, 0.7]))
X = torch.randn(512, 3, generator=torch.Generator().manual_seed(0))


def step_of(loss_fn, **more):
    return functools.partial(fr.train_step, loss_fn, **SPARSE, **more)


def test_a_model_passes_in_every_cell():
    """A DLRM passes on 4 ranks under placements of one axis and of two, in micro-batches, and as a member of vmap."""
    model = runs.model_of()
    step = functools.partial(fr.train_step, model, **SPARSE, invariant=True)
    few = {**FEW, "ranks": [4], "micro_batches": [4], "kinds": ["column_wise", "grid"]}
    check_invariant_step(step, model.init(fr.key(0)), runs.batch_of(0), num_steps=1, **few)


@pytest.mark.parametrize(("fields", "count"), [(3, 1024), (26, 1024), (5, 1000)])
def test_a_weight_that_each_example_uses_several_times_passes(fields, count):
    """A layer over 3, 5 or 26 fields sums its gradient over as many rows for each example, and keeps its bits in parts.
    A loss that is the mean of as many values is rounded in each part of 1,024 examples; the check says so."""
    layer = fr.Params(
        {"t": torch.ones(4, 2)}, {"w": DENSE.dense[:, None] * torch.tensor([0.5, 0.3]), "b": torch.ones(2)}
    )
    x = torch.randn(count, 3 * fields, generator=torch.Generator().manual_seed(1))
    values = lambda params, x: torch.tanh(x.view(len(x), fields, 3) @ params.dense["w"] + params.dense["b"])
    adam = fr.optim.dense(torch.optim.Adam, lr=0.01)
    few = {**FEW, "ranks": [4], "kinds": ["row_wise"]}
    of_examples = step_of(lambda params, x: values(params, x).sum((1, 2)).square().mean(), dense=adam, invariant=True)
    check_invariant_step(of_examples, layer, x, **few)
    if fields == 3:
        of_values = step_of(lambda params, x: values(params, x).square().mean(), dense=adam, invariant=True)
        with pytest.raises(AssertionError, match=r"\[1\]\[0\]\['loss'\]"):
            check_invariant_step(of_values, layer, x, **few)


def test_a_step_with_bits_of_its_own_fails():
    """A step without `invariant`, and an invariant one whose loss adds what each part rounds, fail with the cell."""
    mean = lambda params, x: (x @ params.dense).exp().mean()
    with pytest.raises(AssertionError, match=r"has other bits than one process.\nthe trees differ"):
        check_invariant_step(step_of(mean), DENSE, X, **FEW)
    of_parts = lambda params, x: (x @ params.dense).exp().mean().sqrt()
    with pytest.raises(AssertionError, match=r"a step of 2 micro-batches has[\s\S]*one mean over the examples"):
        check_invariant_step(step_of(of_parts, invariant=True), DENSE, X, **FEW)
    check_invariant_step(step_of(mean, invariant=True), DENSE, X, **{**FEW, "compiled": True})


@pytest.mark.parametrize("weight", [None, lambda w: w, lambda w: torch.stack([w, 0.7 * w + 0.3], 1)])
def test_the_mean_of_several_tasks_is_one_sum(weight):
    """A loss of two tasks adds those of an example first, also if each task has weights of its own. So its metric, too,
    has the bits of micro-batches and of ranks."""
    tasks = fr.losses.multi_task([fr.losses.bce, fr.losses.huber], weights=(1.0, 0.3))

    def loss_fn(params, batch):
        x, w = batch
        logits = x @ params.dense
        labels = torch.stack([(x[:, 0] > 0).float(), x[:, 1] * 3], 1)
        return tasks(torch.stack([logits, logits * 1.7], 1), labels, weight and weight(w))

    one, parts = (step_of(loss_fn, invariant=True)(micro_batches=k) for k in (1, 2))
    mesh = fr.Mesh.emulated(x=2)
    ranks = step_of(loss_fn, invariant=True)(mesh=mesh, plan=fr.Plan({"t": fr.row_wise("x")}))
    on_ranks = ranks.init(DENSE)
    state = one.init(DENSE)
    for seed in range(20):
        x = torch.randn(512, 3, generator=torch.Generator().manual_seed(seed))
        batch = x, (torch.arange(512) % 3).float()
        assert_same_bits(one(state, batch), parts(state, batch))
        assert_same_bits(one(state, batch)[1], ranks(on_ranks, batch)[1])


def test_signs_of_zero_are_bits():
    """A step whose zeros have another sign where its batch is cut fails, though -0 = 0."""

    def made(**how):
        step = step_of(lambda params, x: (x @ params.dense).mean(), invariant=True)(**how)

        def update(state, batch):
            state, metrics = step(state, batch)
            return state, {"loss": torch.full_like(metrics["loss"], -0.0 if "micro_batches" in how else 0.0)}

        return fr.TrainStep(step.init, update)

    with pytest.raises(AssertionError) as caught:
        check_invariant_step(made, DENSE, X, **FEW)
    first, *lines = str(caught.value).splitlines()
    assert first == "funcrec.testing.check_invariant_step: a step of 2 micro-batches has other bits than one process."
    last = ["The values are equal; signs of zero differ.", *OF_PARTS.splitlines()]
    assert lines[-len(last) :] == last


def test_the_metrics_of_each_step_are_compared():
    """A step whose first metrics follow the micro-batches fails, though the last metrics and states are equal."""

    def made(**how):
        step = step_of(lambda params, x: (x @ params.dense).mean(), invariant=True)(**how)

        def update(state, batch):
            new, metrics = step(state, batch)
            return new, {"loss": torch.where(state.step == 0, float("micro_batches" in how), metrics["loss"] * 0)}

        return fr.TrainStep(step.init, update)

    with pytest.raises(AssertionError, match=r"2 micro-batches[\s\S]*differ at `\[1\]\[0\]\['loss'\]`"):
        check_invariant_step(made, DENSE, X, **FEW)

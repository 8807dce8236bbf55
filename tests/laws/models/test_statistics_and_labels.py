"""A training run must not silently leave running statistics unchanged, or learn from invalid labels."""

import math

import pytest
import torch

import funcrec as fr

TABLES, FEATURES = (fr.TableConfig("t", 20, 4),), (fr.FeatureConfig("f", table="t"),)
ADAM = fr.optim.dense(torch.optim.Adam, lr=0.02)
MODEL = fr.models.wide_deep(TABLES, FEATURES, sizes=(8,), batch_norm=True, num_dense=2)


def batch_of(seed, label=None):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (32,), generator=g)
    dense = torch.randn(32, 2, generator=g) * 5 + 20
    ids = fr.KeyedJaggedTensor.from_lengths(["f"], ids, torch.ones(32, dtype=torch.int64))
    return fr.Batch(ids, (dense[:, 0] > 20).float() if label is None else label, dense)


def step_of(**options):
    return fr.train_step(fr.models.loss(MODEL), sparse=fr.optim.sgd(0.1), dense=ADAM, has_aux=True, **options)


def test_batch_norm_cannot_be_forgotten():
    """Without `merge`, a step of a model with batch norm raises at its init and at every call. With `merge` the
    statistics move."""
    params = MODEL.init(fr.key(0))
    with pytest.raises(ValueError, match=r"`merge` is missing(.|\n)*merge_stats"):
        step_of().init(params)
    state = step_of(merge=fr.models.merge_stats).init(params)
    with pytest.raises(ValueError, match="`merge` is missing"):
        step_of()(state, batch_of(0))
    with pytest.raises(ValueError, match="`merge` is missing"):
        fr.jit(step_of())(state, batch_of(0))
    only = lambda p, b, key: fr.models.loss(MODEL)(p, b, key=key)[0]
    with pytest.raises(ValueError, match="`merge` is missing"):
        fr.train_step(only, sparse=fr.optim.sgd(0.1), dense=ADAM).init(params)
    kept = step_of(merge=lambda dense, aux: dense)
    after, _ = kept(kept.init(params), batch_of(0))
    assert torch.equal(after.dense["stats"][0]["mean"], params.dense["stats"][0]["mean"])


def test_evaluation_follows_training():
    """A model with batch norm, trained with merge_stats, has about the same loss in evaluation as in training."""
    step = step_of(merge=fr.models.merge_stats)
    state = step.init(MODEL.init(fr.key(0)))
    losses = []
    for i in range(200):
        state, metrics = step(state, batch_of(i % 8))
        losses.append(float(metrics["loss"]))
    batch = batch_of(3)
    evaluated = torch.nn.functional.binary_cross_entropy_with_logits(MODEL.apply(state.params, batch), batch.label)
    assert losses[-1] < 0.2 and abs(float(evaluated) - losses[-1]) < 0.2


def test_a_mesh_needs_merge_too():
    """On a mesh, too, a missing `merge` raises."""
    mesh = fr.Mesh.emulated(data=2)
    step = step_of(mesh=mesh, plan=fr.Plan({"t": fr.row_wise("data")}))
    with pytest.raises(ValueError, match="`merge` is missing"):
        step.init(MODEL.init(fr.key(0)))


def test_parameters_of_these_names():
    """A dict that has a mean and a variance among other parameters is not taken for running statistics."""
    loss = lambda p, b: (p.dense["mean"] * p.dense["var"] * p.dense["w"]).sum()
    step = fr.train_step(loss, sparse=fr.optim.sgd(0.1), dense=ADAM)
    step.init(fr.Params({}, {"mean": torch.ones(2), "var": torch.ones(2), "w": torch.ones(2)}))


def test_merge_stats_wants_statistics():
    """merge_stats raises if the loss returns no statistics for those of the model."""
    with pytest.raises(ValueError, match="the loss gave no statistics"):
        fr.models.merge_stats(MODEL.init(fr.key(0)).dense, {"stats": {}})
    with pytest.raises(TypeError, match="`aux` has no statistics"):
        fr.models.merge_stats({}, {"logits": 1})


LR = fr.models.lr((fr.TableConfig("t", 20, 1),), FEATURES, num_dense=2)


@pytest.mark.parametrize("bad", [5.0, -1.0, math.nan, math.inf])
def test_labels_that_are_none(bad):
    """The loss and validate name a label outside [0, 1]. Where the label cannot be read, the loss is NaN."""
    label = torch.zeros(32)
    label[7] = bad
    batch, params, loss = batch_of(0, label), LR.init(fr.key(0)), fr.models.loss(LR)
    with pytest.raises(ValueError, match=r"`label` are not labels(.|\n)*label\[7\]"):
        loss(params, batch, key=fr.key(1))
    with pytest.raises(ValueError, match=r"label\[7\]"):
        fr.value_and_grad(loss, has_aux=True)(params, batch, key=fr.key(1))
    with pytest.raises(fr.CheckError, match=r"label\[7\]"):
        fr.validate(batch, LR.features, LR.tables)
    compiled = fr.jit(lambda p, b: loss(p, b, key=fr.key(1))[0])
    assert compiled(params, batch).isnan() and not compiled(params, batch_of(0)).isnan()


def test_labels_of_every_dtype():
    """Labels of 0 and 1 count the same as floats, integers and booleans. Probabilities in between are kept."""
    params, loss = LR.init(fr.key(0)), fr.models.loss(LR)
    of = lambda label: loss(params, batch_of(0, label), key=fr.key(1))[0]
    label = (torch.arange(32) % 3 == 0).float()
    for other in (label.double(), label.long(), label.bool(), label.bfloat16()):
        assert torch.equal(of(label), of(other))
    soft = label * 0.75 + 0.125
    want = torch.nn.functional.binary_cross_entropy_with_logits(LR.apply(params, batch_of(0)), soft)
    torch.testing.assert_close(of(soft), want)


@pytest.mark.parametrize("label, dense, message", [
    (torch.zeros(31), None, "does not match its ids"), (torch.zeros(32, 1), None, "is not a vector"),
    (None, math.inf, "`batch.dense` is not finite"), (None, math.nan, "`batch.dense` is not finite"),
])  # fmt: skip
def test_validate_looks_at_the_batch(label, dense, message):
    """validate of a batch names labels and dense inputs that no model can learn from, and accepts a good batch."""
    batch = batch_of(0, label)
    assert fr.validate(batch_of(0), FEATURES, TABLES).label.shape == (32,)
    if dense is not None:
        batch.dense[3, 1] = dense
    with pytest.raises((ValueError, TypeError), match=message):
        fr.validate(batch, FEATURES, TABLES)

"""Laws of Batch: missing fields, and weights of examples."""

import pytest
import torch
from programs.small_models import ALL, EACH, FEATURES, WIDE, B, close, make, with_dense_bumps
from programs.small_models import make_batch as batch_of
from torch.utils import _pytree as torch_tree

import funcrec as fr
from funcrec import models

EACH_FIELD = pytest.mark.parametrize("names", [(), ("label",), ("weight",), ("label", "dense", "weight")])
FIELDS = {"label": torch.zeros(B), "dense": torch.ones(B, 2), "weight": torch.arange(float(B))}


def dense_grads(grads, configs):
    """Return gradients in dense form, without the order of rows and without zero rows."""
    return {t.name: grads.tables[t.name].to_dense() for t in configs}, grads.dense


def cut(batch, count):
    """Return a batch of the first `count` examples."""
    ids = {k: batch.ids[k].to_lists()[:count] for k in batch.ids.keys}
    dense = None if batch.dense is None else batch.dense[:count]
    return fr.Batch(fr.KeyedJaggedTensor.from_lists(ids), batch.label[:count], dense)


@EACH_FIELD
def test_fields_that_are_none_are_structure(names, tmp_path):
    """A field that is None is no leaf. Trees, vmap, jit, shard_map and checkpoints return the field as None."""
    batch = fr.Batch(batch_of().ids.unpad(), **{n: FIELDS[n] for n in names})
    leaves, structure = torch_tree.tree_flatten(batch)
    assert all(isinstance(x, torch.Tensor) for x in leaves) and len(leaves) == 2 + len(names)
    fr.save(tmp_path / "batch.pt", batch)
    mesh = fr.Mesh.emulated(data=2)
    on_ranks = fr.shard_map(lambda b: b, mesh=mesh, in_specs=fr.P("data"), out_specs=fr.P("data"))
    back = [torch_tree.tree_unflatten(leaves, structure), fr.load(tmp_path / "batch.pt"), on_ranks(batch)]
    for other in (*back, fr.jit(lambda b: torch_tree.tree_map(torch.clone, b))(batch)):
        assert [n for n in FIELDS if getattr(other, n) is not None] == [n for n in FIELDS if n in names]
        assert all(torch.equal(getattr(other, n), FIELDS[n]) for n in names)
    twice = torch_tree.tree_map(lambda x: torch.stack([x, x]), batch)
    assert torch.func.vmap(lambda b: 0 * b.ids.values if b.weight is None else b.weight)(twice).shape[0] == 2


def test_an_older_checkpoint_of_a_batch_is_read():
    """A batch of ids, labels and dense inputs has the same structure as in checkpoints without the field for
    weights."""
    batch = fr.Batch(batch_of().ids, torch.zeros(B), torch.ones(B, 2))
    assert torch_tree.tree_flatten(batch)[1].context == (("ids", "label", "dense"), ())


@EACH
def test_an_example_of_weight_zero_changes_nothing(name):
    """An example of weight 0 changes neither loss, gradients nor running statistics, whatever the example holds."""
    model, params, batch = make(name)
    params, kept, weight = with_dense_bumps(params), B - 2, torch.linspace(0.5, 3.0, B)
    garbage = lambda x: None if x is None else torch.cat([x[:kept], torch.full_like(x[kept:], torch.nan)])
    weight[kept:] = 0
    padded = fr.Batch(batch.ids, garbage(batch.label), garbage(batch.dense), weight)
    alone = cut(batch, kept)
    alone = fr.Batch(alone.ids, alone.label, alone.dense, weight[:kept])
    # dropout draws by the shape of the batch
    if name in ("wide_deep", "deepfm", "dlrm", "dcnv2"):
        model = model._replace(train_apply=lambda p, b, key: (model_apply(p, b), {}))
        model_apply = models.loss(model) and model.apply
    loss_fn = fr.value_and_grad(models.loss(model), has_aux=True)
    (got, aux), grads = loss_fn(params, padded, key=fr.key(1))
    (want, expected), d_want = loss_fn(params, alone, key=fr.key(1))
    close(got, want)
    close(dense_grads(grads, model.tables), dense_grads(d_want, model.tables), rtol=1e-4, atol=1e-6)
    close(aux["stats"], expected["stats"])
    close(model.apply(params, padded)[:kept], model.apply(params, alone))


def test_weights_of_ids_in_an_example_of_weight_zero():
    """NaN among an example's weights of ids reaches no gradient if the weight of the example is 0."""
    model = models.deepfm(ALL, FEATURES, linear=WIDE, sizes=(4,))
    ids = fr.KeyedJaggedTensor.from_lists(
        {k: [[1], [2]] for k in ("user", "clicked", "bought")},
        weights={k: [[1.0], [torch.nan]] for k in ("user", "clicked", "bought")},
    )
    batch = fr.Batch(ids, torch.tensor([1.0, torch.nan]), None, torch.tensor([2.0, 0.0]))
    grad_fn = fr.checked(fr.value_and_grad(models.loss(model), has_aux=True))
    grads = grad_fn(model.init(fr.key(0)), batch, key=fr.key(1))[1]
    assert all(x.isfinite().all() for x in torch_tree.tree_leaves(dense_grads(grads, model.tables)))


def test_a_weight_of_two_is_the_example_twice():
    """The loss is Σ w l / Σ w. Integer weights repeat examples, and a common factor of all weights changes no loss."""
    model, params, batch = make("deepfm, dense")
    loss = lambda b: models.loss(model)(params, b, key=fr.key(1))[0]
    weighted = lambda w: fr.Batch(batch.ids, batch.label, batch.dense, w)
    single = [models.loss(model)(params, weighted(torch.eye(B)[i]), key=fr.key(1))[0] for i in range(B)]
    weight = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 1.0])
    close(loss(weighted(weight)), (weight * torch.stack(single)).sum() / 8)
    close(loss(weighted(weight)), loss(weighted(weight * 7)))
    close(loss(weighted(torch.ones(B))), loss(batch))


def test_all_weights_zero(interpreted):
    """A batch of padding alone has loss 0 and zero gradients, not NaN. Invalid weights raise."""
    model, params, batch = make("dcnv2, low rank")
    nothing = fr.Batch(batch.ids, batch.label * torch.nan, batch.dense * torch.nan, torch.zeros(B))
    (loss, _), grads = fr.value_and_grad(models.loss(model), has_aux=True)(params, nothing, key=fr.key(1))
    assert loss == 0 and all((x == 0).all() for x in torch_tree.tree_leaves(dense_grads(grads, model.tables)))
    compiled = fr.jit(lambda p, b: models.loss(model)(p, b, key=fr.key(1))[0])
    for wrong in (-1.0, torch.nan, torch.inf):
        bad = fr.Batch(batch.ids, batch.label, batch.dense, torch.tensor([1.0] * (B - 1) + [wrong]))
        with pytest.raises(ValueError, match=r"weight\[5\]"):
            models.loss(model)(params, bad, key=fr.key(1))
        with pytest.raises(fr.CheckError, match=r"batch.weight\[5\]"):
            fr.validate(bad, model.features, model.tables)
        assert compiled(params, bad).isnan()
    close(compiled(params, batch), models.loss(model)(params, batch, key=fr.key(1))[0])


@pytest.mark.parametrize("weight", [[3, 1, 2, 0, 0, 0], [0, 1, 0.5, 0, 4, 1], [0] * 6])
def test_the_mean_over_ranks_is_the_weighted_mean(weight):
    """On a mesh a step uses Σ w l / Σ w over the bags of all ranks, even if one rank holds only padding."""
    model, params, batch = make("deepfm, dense")
    batch = fr.Batch(batch.ids.unpad(), batch.label, batch.dense, torch.tensor(weight, dtype=torch.float32))
    mesh = fr.Mesh.emulated(data=2)
    plan = fr.Plan.uniform("row_wise", model.tables, mesh)
    how = {"sparse": fr.optim.sgd(0.5), "dense": fr.optim.dense(torch.optim.SGD, lr=0.5), "has_aux": True}
    alone, ranks = (fr.train_step(models.loss(model), **how, **on) for on in ({}, {"mesh": mesh, "plan": plan}))
    want, seen = alone(alone.init(params), batch)
    got, on_ranks = ranks(ranks.init(params), batch)
    close(on_ranks["loss"], seen["loss"])
    close(fr.gather_tables(got.tables, mesh), want.tables, rtol=1e-5, atol=1e-6)
    close(got.dense, want.dense, rtol=1e-5, atol=1e-6)


def test_a_batch_without_a_label():
    """A model can predict a batch without a label. A loss of such a batch raises in four parts."""
    model, params, batch = make("deepfm, dense")
    bare = fr.Batch(batch.ids, dense=batch.dense)
    assert torch.equal(model.apply(params, bare), model.apply(params, batch))
    assert torch.equal(fr.jit(model.apply)(params, bare), fr.jit(model.apply)(params, batch))
    assert fr.validate(fr.Batch(batch.ids.unpad(), dense=batch.dense), model.features, model.tables).label is None
    with pytest.raises(ValueError, match=r"(?s)`batch.label` is missing.*got   None.*need  f32\[B\].*try   fr.Batch"):
        models.loss(model)(params, bare, key=fr.key(1))


def test_validate_takes_other_labels():
    """Labels of regressions and of several tasks are checked in their own range. Labels of padding are not checked."""
    ids, features, tables = batch_of().ids.unpad(), FEATURES, ALL
    rating = fr.Batch(ids, torch.full((B, 2), 4.5), weight=torch.ones(B))
    assert fr.validate(rating, features, tables, labels=(0.5, 5)) is rating
    rating.label[3, 1] = torch.nan
    with pytest.raises(fr.CheckError, match=r"label\[3, 1\] = nan"):
        fr.validate(rating, features, tables, labels=(-torch.inf, torch.inf))
    rating.weight[3] = 0
    assert fr.validate(rating, features, tables, labels=(0.5, 5)) is rating
    with pytest.raises(fr.CheckError, match="labels in"):
        fr.validate(rating, features, tables)

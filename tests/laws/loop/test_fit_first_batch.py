"""fit checks the first batch and the loss and type of a step, even without a model."""

import functools

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import funcrec as fr

ITEM, CLICKED = fr.TableConfig("item", 8, 2), fr.FeatureConfig("clicked", table="item")
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[1], [2], [3]]})
BATCH = fr.Batch(IDS, torch.tensor([0.0, 1.0, 1.0]))
PADDED = fr.Batch(IDS, BATCH.label, weight=torch.tensor([1.0, 1.0, 0.0]))
KIND = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}


def logits(p, batch):
    return fr.lookup(p.tables, batch.ids, [CLICKED])["clicked"] @ p.dense


def unweighted(p, batch):
    return bce(logits(p, batch), batch.label)


def weighted(p, batch):
    return (bce(logits(p, batch), batch.label, reduction="none") * batch.weight).sum() / batch.weight.sum()


def masked(p, batch):
    return unweighted(p, batch) if batch.weight is None else bce(logits(p, batch)[batch.weight > 0], batch.label[:2])


def by_vmap(p, batch):
    return torch.func.vmap(lambda z, y, w: torch.where(w > 0, bce(z, y), 0))(
        logits(p, batch), batch.label, batch.weight
    ).sum()


def with_aux(p, batch, key):
    return weighted(p, batch) + fr.nn.dropout(p.dense, key, 0.5).sum(), {"logits": logits(p, batch)}


def fit(loss, batch, kind=lambda step: step, **how):
    step = fr.train_step(loss, **KIND, has_aux=loss is with_aux)
    state = step.init(fr.Params(fr.init(fr.key(0), [ITEM]), torch.zeros(2)))
    return fr.fit(kind(step), state, [batch], epochs=1, **how)


@pytest.mark.parametrize("kind", [lambda step: step, fr.jit, functools.partial(fr.jit, donate=("state",))])
def test_ids_outside_their_table_are_found_without_a_model(kind, tmp_path):
    """Before any work, the first batch runs once through the loss of a step of `train_step`. The lookups there find ids
    outside their table. The law includes jitted and donating steps."""
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[1], [999], [3]]}), BATCH.label)
    with pytest.raises(fr.CheckError, match="feature 'clicked' has ids outside table 'item'"):
        fit(unweighted, batch, kind, checkpoint=tmp_path / "run.pt")
    assert not (tmp_path / "run.pt").exists()


def test_weights_that_the_loss_does_not_read_are_refused():
    """A batch with weights, as pad_last makes it, raises if the loss reads no weights, jitted or not, because its
    padding would count. (The dense parameters are zeros, so that no value shows the reads.)"""
    for kind in (lambda step: step, fr.jit):
        with pytest.raises(ValueError, match=r"reads no `batch\.weight`"):
            fit(unweighted, PADDED, kind)
    assert fit(unweighted, PADDED, validate=lambda batch: batch).history[0]["steps"] == 1
    assert fit(unweighted, BATCH).history[0]["steps"] == 1


@pytest.mark.parametrize("loss", [weighted, masked, by_vmap, with_aux])
def test_weights_that_the_loss_reads_in_any_way_are_right(loss):
    """A product, a mask and an argument of vmap each count as a read of the weights."""
    assert fit(loss, PADDED).history[0]["steps"] == 1


def test_the_look_changes_no_bit():
    """A run has the bits of calls of the step itself. The check of the first batch draws and writes nothing."""
    step = fr.train_step(with_aux, **KIND, has_aux=True)
    state = step.init(fr.Params(fr.init(fr.key(0), [ITEM]), torch.ones(2)))
    fr.testing.assert_trees_close(fit_of(step, state), step(state, PADDED)[0], rtol=0, atol=0)


def fit_of(step, state):
    return fr.fit(step, state, [PADDED], epochs=1).state


def counted(metrics):
    return lambda total, batch: (total + batch, metrics(total))


def run(metrics, **how):
    return fr.fit(counted(metrics), torch.tensor(0.0), [1.0, 2.0], epochs=2, **how)


def test_the_loss_of_members_is_their_mean():
    """If a step gives a loss for each member of an ensemble, the history has the mean of these losses. The mean can be
    monitored."""
    done = run(lambda total: {"loss": torch.stack([total, total + 2])}, monitor="loss", mode="min")
    assert [h["loss"] for h in done.history] == [1.5, 4.5]
    assert done.best.item() == 3.0


def test_a_step_without_a_loss_has_none_in_the_history():
    """A step without a loss gives no loss to the history. A monitor of the loss raises at the first step, unless
    `evaluate` gives a loss."""
    for metrics in (lambda total: {"error": total}, lambda total: {"loss": "low"}, lambda total: None):
        assert all("loss" not in h for h in run(metrics).history)
        seen = []
        with pytest.raises((KeyError, ValueError, TypeError), match="`monitor` is not a number that the step gives"):
            run(metrics, monitor="loss", mode="min", callbacks=[seen.append])
        assert [r.when for r in seen] == ["begin"]
        done = run(metrics, monitor="loss", mode="min", evaluate=lambda params: {"loss": 1.0})
        assert [h["loss"] for h in done.history] == [1.0, 1.0]


@pytest.mark.parametrize("where", ["plain", "members", "mesh"])
def test_a_model_that_is_not_the_states_is_refused(where, tmp_path):
    """A `model` whose tables are not those of the state raises before any work, and names both shapes. The state's own
    model is accepted."""
    own, other = (fr.models.lr((fr.TableConfig("item", n, 1),), [CLICKED]) for n in (8, 9))
    renamed = fr.models.lr((fr.TableConfig("goods", 8, 1),), [fr.FeatureConfig("clicked", table="goods")])
    mesh = fr.Mesh.emulated(x=2) if where == "mesh" else None
    place = {"mesh": mesh, "plan": fr.Plan({"item": fr.row_wise("x")})} if mesh else {}
    step = fr.train_step(own, **KIND, **place)
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[1], [2]]}), torch.tensor([0.0, 1.0]))
    state = step.init(own.init(fr.key(0)))
    if where == "members":
        keys = torch.stack([fr.key(0), fr.key(1)])
        state = torch.func.vmap(step.init)(torch.func.vmap(own.init)(keys), keys)
        step = torch.func.vmap(step, in_dims=(0, None))
    for wrong, words in ((other, r"\(9, 1\).*\(8, 1\)"), (renamed, "goods.*missing.*item")):
        with pytest.raises(ValueError, match=f"(?s)`model` has other tables than `state`.*{words}"):
            fr.fit(step, state, [batch], epochs=1, model=wrong, mesh=mesh, checkpoint=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fr.fit(step, state, [batch], epochs=1, model=own, mesh=mesh).history[0]["steps"] == 1


@pytest.mark.parametrize("mesh", [None, fr.Mesh.emulated(x=2)])
@pytest.mark.parametrize("mode", ["raise", "count"])
def test_a_model_on_dynamic_tables_takes_any_ids(mode, mesh):
    """A table that follows a vocabulary takes ids of any value, in training and in validation, also on a mesh. Ids
    outside the other tables are still found."""
    users = fr.vocabulary(128)
    user, item = fr.TableConfig("user", users.num_embeddings, 2), fr.TableConfig("item", 4, 2)
    features = [fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item")]
    model = fr.models.deepfm([user, item], features, sizes=(4,))
    follows = {"users": fr.VocabularyConfig(users, [user], features[:1])}
    tables = fr.dynamic_tables(fr.init(fr.key(0), [user, item]), follows, key=fr.key(0))
    plan = mesh and fr.Plan({"user": fr.row_wise("x"), "item": fr.replicated()})
    step = fr.train_step(model, **KIND, mesh=mesh, plan=plan)
    first = step.init(fr.Params(tables, model.init(fr.key(1)).dense))

    def fitted(item_id):
        ids = fr.KeyedJaggedTensor.from_lists({"user": [[10**15], [-7]], "item": [[1], [item_id]]})
        batch = fr.Batch(ids, torch.tensor([0.0, 1.0]))
        judged = {"validation": [batch], "metrics": {"auc": fr.metrics.exact_auc}, "monitor": "auc"}
        return fr.fit(step, first, [batch], epochs=2, model=model, mesh=mesh, on_bad_ids=mode, **judged)

    done = fitted(2)
    assert int(done.best.tables.vocabularies["users"].num_ids) == 2
    assert [entry.get("bad_ids", 0) for entry in done.history] == [0, 0]
    if mode == "raise":
        with pytest.raises(fr.CheckError, match="feature 'item' has ids outside table 'item'"):
            fitted(9)
    else:
        assert [entry["bad_ids"] for entry in fitted(9).history] == [1, 1]

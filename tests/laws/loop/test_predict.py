"""fr.predict: what a model says of rows as they come; and a model in the place of a loss and of an evaluation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

ROWS = {
    "user": ["ann", "bob", "cid", None, "ann", "dan"],
    "tags": [["a", "b"], [], ["c"], ["a"], ["b", "b"], []],
    "price": [1.0, 2.5, None, 4.0, 0.5, 3.0],
}
LABELS = {"click": [1, 0, 1, 0, 1, 1], "stars": [3.0, 1.5, 2.0, 5.0, 4.0, 1.0], "genre": [0, 2, 1, 1, 0, 2]}
INPUTS = {"dense": ("price",), "categorical": ("user",), "multivalued": ("tags",)}


def encoded(label, **kind):
    """(encoding, model, params) of a model of this label."""
    encoding = fr.data.fit_encoding(ROWS | LABELS, fr.data.Schema(label, **INPUTS, **kind))
    model = fr.models.deepfm(*fr.data.configs(encoding, embedding_dim=4), num_dense=1, sizes=(4,), batch_norm=True)
    return encoding, model, model.init(fr.key(0))


def scores_of(encoding, model, params, rows=ROWS):
    data = fr.data.encode(encoding, rows)
    return model.apply(params, data.take(torch.arange(data.num_rows)))


@given(st.integers(1, 9))
def test_blocks_of_rows_are_the_whole(batch_size):
    """However many rows go through the model at once, a row's answer is the probability that it has alone."""
    encoding, model, params = encoded("click")
    want = scores_of(encoding, model, params).sigmoid()
    assert_trees_close(fr.predict(model, params, encoding, ROWS, batch_size=batch_size), want, rtol=1e-6, atol=1e-6)


def test_answers_are_of_the_labels_kind():
    """Of numbers the model's own, of several labels each by its kind, of classes probabilities that add up to 1."""
    encoding, model, params = encoded("stars", label_kind="number")
    assert_trees_close(fr.predict(model, params, encoding, ROWS), scores_of(encoding, model, params))

    encoding, model, params = encoded(("click", "stars"), label_kind=("binary", "number"))
    twice = model._replace(apply=lambda p, b: torch.stack([model.apply(p, b), 2 * model.apply(p, b)], 1))
    one = scores_of(encoding, model, params)
    assert_trees_close(fr.predict(twice, params, encoding, ROWS), torch.stack([one.sigmoid(), 2 * one], 1))
    with pytest.raises(ValueError, match=r"which scores are of which label is not known"):
        fr.predict(model, params, encoding, ROWS)

    encoding, model, params = encoded("genre", label_kind="class")
    classes = model._replace(apply=lambda p, b: model.apply(p, b)[:, None] * torch.tensor([1.0, 2.0, 3.0]))
    assert_trees_close(fr.predict(classes, params, encoding, ROWS).sum(1), torch.ones(6), rtol=1e-6)


def test_no_rows_have_no_answers():
    """Of no rows there are none; rows may lack the label, and not an input."""
    encoding, model, params = encoded("click")
    assert fr.predict(model, params, encoding, {n: x[:0] for n, x in ROWS.items()}).shape == (0,)
    with pytest.raises(ValueError, match="price"):
        fr.predict(model, params, encoding, {n: x for n, x in ROWS.items() if n != "price"})


def test_answers_are_differentiated():
    """A derivative by the parameters is that of the model's own scores."""
    encoding, model, params = encoded("click")
    of = lambda f: torch.func.grad(lambda w: f(fr.Params(params.tables, w)).sum())(params.dense)
    got = of(lambda p: fr.predict(model, p, encoding, ROWS))
    assert_trees_close(got, of(lambda p: scores_of(encoding, model, p).sigmoid()))


def test_a_model_stands_for_its_loss():
    """train_step(model) is train_step of its loss with its statistics merged and its logits left out, bit for bit."""
    encoding, model, params = encoded("click")
    batch = fr.data.encode(encoding, ROWS | LABELS).take(torch.arange(6))
    kinds = {"sparse": fr.optim.adam(0.001), "dense": fr.optim.dense(torch.optim.Adam, lr=0.001)}
    plain = fr.train_step(fr.models.loss(model), **kinds, has_aux=True, merge=fr.models.merge_stats)
    short = fr.train_step(model)
    want, got = plain.init(params), short.init(params)
    for _ in range(3):
        want, said = plain(want, batch)
        got, heard = short(got, batch)
    assert_trees_close(got, want, rtol=0, atol=0)
    assert_trees_close(heard["loss"], said["loss"], rtol=0, atol=0)
    assert set(heard["aux"]) == {"stats"}


def test_validation_stands_for_an_evaluation():
    """fit(validation=, metrics=) has the history and the best parameters of fit(evaluate=)."""
    encoding, model, params = encoded("click")
    data = fr.data.encode(encoding, ROWS | LABELS)
    load, auc = fr.data.loader(data, None, 3, key=fr.key(1)), {"auc": fr.metrics.exact_auc}
    step = fr.train_step(model, sparse=fr.optim.adam(0.1))
    measure = lambda p: fr.evaluate(model.apply, p, load, auc)
    found = []
    for how in ({"evaluate": measure}, {"validation": load, "metrics": auc}):
        done = fr.fit(step, step.init(params), load, epochs=4, monitor="auc", model=model, progress=False, **how)
        found.append(([(h["loss"], h["auc"]) for h in done.history], done.best))
    assert_trees_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize(("how", "said"), [
    ({"validation": [1]}, "`validation` needs `metrics`"),
    ({"metrics": {"auc": fr.metrics.exact_auc}}, "`metrics` needs `validation`"),
    ({"validation": [1], "metrics": {"auc": fr.metrics.exact_auc}, "model": None}, "`validation` needs `model`"),
    ({"validation": [1], "metrics": {"auc": fr.metrics.exact_auc}, "evaluate": lambda p: {}}, "are both given"),
])  # fmt: skip
def test_half_an_evaluation_is_refused(how, said):
    """Batches without metrics or a model, metrics without batches, and two evaluations raise before any work."""
    _, model, _ = encoded("click")
    with pytest.raises((ValueError, TypeError), match=said):
        fr.fit(lambda s, b: (s, {}), 0, [1], **({"epochs": 1, "model": model} | how))

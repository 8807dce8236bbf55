"""fr.predict gives a model's predictions for raw rows.

fit and train_step accept a model in place of a loss and an evaluation."""

import dataclasses

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
    """Return (encoding, model, params) of a model with this label."""
    encoding = fr.data.fit_encoding(ROWS | LABELS, fr.data.Schema(label, **INPUTS, **kind))
    model = fr.models.deepfm(*fr.data.configs(encoding, embedding_dim=4), num_dense=1, sizes=(4,), batch_norm=True)
    return encoding, model, model.init(fr.key(0))


def scores_of(encoding, model, params, rows=ROWS):
    data = fr.data.encode(encoding, rows)
    return model.apply(params, data.take(torch.arange(data.num_rows)))


@given(st.integers(1, 9))
def test_blocks_of_rows_are_the_whole(batch_size):
    """For any batch size, the prediction of a row is the probability that the row has alone."""
    encoding, model, params = encoded("click")
    want = scores_of(encoding, model, params).sigmoid()
    assert_trees_close(fr.predict(model, params, encoding, ROWS, batch_size=batch_size), want, rtol=1e-6, atol=1e-6)


def test_answers_are_of_the_labels_kind():
    """Predictions of numbers are the scores of the model, those of several labels follow the kind of each label. Class
    probabilities sum to 1."""
    encoding, model, params = encoded("stars", label_kind="number")
    assert_trees_close(fr.predict(model, params, encoding, ROWS), scores_of(encoding, model, params))

    encoding, model, params = encoded(("click", "stars"), label_kind=("binary", "number"))
    twice = model._replace(apply=lambda p, b: torch.stack([model.apply(p, b), 2 * model.apply(p, b)], 1))
    one = scores_of(encoding, model, params)
    assert_trees_close(fr.predict(twice, params, encoding, ROWS), torch.stack([one.sigmoid(), 2 * one], 1))
    with pytest.raises(ValueError, match=r"need  f\[6, 2\]"):
        fr.predict(model, params, encoding, ROWS)

    encoding, model, params = encoded("genre", label_kind="class")
    classes = model._replace(apply=lambda p, b: model.apply(p, b)[:, None] * torch.tensor([1.0, 2.0, 3.0]))
    assert_trees_close(fr.predict(classes, params, encoding, ROWS).sum(1), torch.ones(6), rtol=1e-6)


CLASS = {"label": "genre", "label_kind": "class"}
ODD = {  # a user's model for 6 rows: (its label, its apply, the message)
    "one score for classes": (CLASS, lambda p, b: torch.ones(b.ids.num_bags), r"need  f\[6, K\], K >= 2"),
    "one class": (CLASS, lambda p, b: torch.ones(b.ids.num_bags, 1), r"need  f\[6, K\], K >= 2"),
    "a number": ({"label": "click"}, lambda p, b: torch.tensor(1.0), r"need  f\[6\]"),
    "a dict": ({"label": "click"}, lambda p, b: {"click": torch.ones(6)}, r"need  f\[6\]"),
    "too few": ({"label": "click"}, lambda p, b: torch.ones(2), r"need  f\[6\]"),
    "a column": ({"label": "click"}, lambda p, b: torch.ones(6, 1), r"need  f\[6\]"),
    "integers": ({"label": "click"}, lambda p, b: torch.ones(6, dtype=torch.int64), r"need  f\[6\]"),
    "a class among labels": ({"label": ("click", "genre"), "label_kind": ("binary", "class")},
        lambda p, b: torch.ones(6, 2), "a class among several labels"),
}  # fmt: skip


@pytest.mark.parametrize(("label", "apply", "said"), ODD.values(), ids=ODD)
def test_scores_of_other_labels_are_refused(label, apply, said):
    """A model whose scores do not match the labels of the schema raises. No score is taken for another row."""
    encoding, model, params = encoded(**label)
    with pytest.raises((ValueError, TypeError), match=said):
        fr.predict(model._replace(apply=apply), params, encoding, ROWS)


def test_labels_and_weights_are_not_read():
    """Rows with an unknown label, or without the schema's weight and time, get predictions."""
    columns = ROWS | LABELS | {"w": [1.0] * 6, "t": list(range(6))}
    encoding = fr.data.fit_encoding(columns, fr.data.Schema("click", weight="w", time="t", **INPUTS))
    model = fr.models.lr(*fr.data.configs(encoding, embedding_dim=1), num_dense=1)
    params = model.init(fr.key(0))
    want = fr.predict(model, params, encoding, ROWS)
    assert_trees_close(fr.predict(model, params, encoding, ROWS | {"click": [None] * 6}), want)


def test_ids_beyond_the_tables_are_refused():
    """An encoding with more ids than a table has rows raises, and so does a batch in an evaluation. `count` counts such
    ids."""
    encoding, model, params = encoded("click")
    more = fr.data.fit_encoding(ROWS | LABELS | {"user": list("abcdef")}, encoding.schema)
    with pytest.raises(ValueError, match="column 'user' has more ids than table 'user' has rows"):
        fr.predict(model, params, more, ROWS)
    hashed = [dataclasses.replace(f, hash=fr.modulo()) for f in model.features]
    small = fr.models.deepfm(model.tables, hashed, num_dense=1, sizes=(4,))
    assert fr.predict(small, small.init(fr.key(0)), more, ROWS).isfinite().all()
    good = fr.data.encode(encoding, ROWS | LABELS).take(torch.arange(6))
    ids = good.ids
    bad = dataclasses.replace(good, ids=fr.KeyedJaggedTensor.from_offsets(ids.keys, ids.values + 100, ids.offsets))
    how = {"epochs": 1, "model": model, "metrics": {"auc": fr.metrics.exact_auc}, "progress": False}
    step = fr.train_step(model)
    with pytest.raises(fr.CheckError, match="id 10"):
        fr.fit(step, step.init(params), [good], validation=[good, bad], **how)
    fr.fit(step, step.init(params), [good], validation=[good, bad], on_bad_ids="count", **how)


def test_numbers_and_classes_are_trained():
    """fit with a model accepts labels that are any numbers or classes. The loss itself checks the labels."""
    encoding, model, params = encoded("stars", label_kind="number")
    batch = fr.data.encode(encoding, ROWS | LABELS).take(torch.arange(6))
    kinds = {"has_aux": True, "merge": fr.models.merge_stats}
    step = fr.train_step(fr.models.loss(model, fr.losses.mse), sparse=fr.optim.adam(0.1), **kinds)
    judged = {"validation": [batch], "metrics": {"rmse": fr.metrics.rmse()}}
    done = fr.fit(step, step.init(params), [batch], epochs=3, model=model, progress=False, **judged)
    assert done.history[2]["rmse"] < done.history[0]["rmse"]
    with pytest.raises(ValueError, match="label"):
        clicks = fr.train_step(model)
        fr.fit(clicks, clicks.init(params), [batch], epochs=1, model=model, progress=False)


def test_no_rows_have_no_answers():
    """An empty table gives no predictions. Rows may lack the label, but not an input."""
    encoding, model, params = encoded("click")
    assert fr.predict(model, params, encoding, {n: x[:0] for n, x in ROWS.items()}).shape == (0,)
    with pytest.raises(ValueError, match="price"):
        fr.predict(model, params, encoding, {n: x for n, x in ROWS.items() if n != "price"})


def test_answers_are_differentiated():
    """Derivatives of predictions with respect to the parameters equal those of the scores of the model."""
    encoding, model, params = encoded("click")
    of = lambda f: torch.func.grad(lambda w: f(fr.Params(params.tables, w)).sum())(params.dense)
    got = of(lambda p: fr.predict(model, p, encoding, ROWS))
    assert_trees_close(got, of(lambda p: scores_of(encoding, model, p).sigmoid()))


def test_a_model_stands_for_its_loss():
    """train_step(model) equals train_step of the loss of the model, with merged statistics and without logits in aux,
    bit for bit."""
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


def test_two_towers_stand_for_their_loss():
    """train_step(towers) equals train_step of the in-batch softmax loss of the towers, bit for bit."""
    tables = (fr.TableConfig("user", 9, 4), fr.TableConfig("item", 9, 4))
    features = [(fr.FeatureConfig(t.name, table=t.name),) for t in tables]
    towers = fr.models.two_tower(tables, *features, sizes=(4,), dropout=0.2)
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"user": [[1], [2], [3]], "item": [[4], [5], [6]]}))
    plain, short = fr.train_step(fr.models.in_batch_softmax_loss(towers), has_aux=True), fr.train_step(towers)
    want, got = (s(s.init(towers.init(fr.key(0))), batch)[0] for s in (plain, short))
    assert_trees_close(got, want, rtol=0, atol=0)


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
    ({"validation": iter([1]), "metrics": {"auc": fr.metrics.exact_auc}}, "gives its batches once"),
])  # fmt: skip
def test_half_an_evaluation_is_refused(how, said):
    """Validation batches without metrics or a model, metrics without batches, and two evaluations each raise before any
    work."""
    _, model, _ = encoded("click")
    with pytest.raises((ValueError, TypeError), match=said):
        fr.fit(lambda s, b: (s, {}), 0, [1], **({"epochs": 1, "model": model} | how))


def test_members_are_answered_together_and_jit_is_refused():
    """vmap over parameters gives the predictions of each member. jit refuses predict, because predict reads columns on
    the host."""
    encoding, model, _ = encoded("click")
    members = [model.init(fr.key(i)) for i in range(3)]
    answers = lambda params: fr.predict(model, params, encoding, ROWS)
    stacked = fr.tree.map(lambda *x: torch.stack(x), *members)
    want = torch.stack([answers(p) for p in members])
    assert_trees_close(torch.func.vmap(answers)(stacked), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="reads a tensor's value on the host"):
        fr.jit(answers)(members[0])

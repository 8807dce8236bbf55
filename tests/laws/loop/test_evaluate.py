"""fr.evaluate computes metrics of a model on batches."""

import pytest
import torch

import funcrec as fr

N = 12
SCORES = torch.linspace(-2, 2, N).roll(5)
LABEL = (torch.arange(N) % 3 == 0).float()
WEIGHT = torch.arange(N) % 4 * 0.5
METRICS = {
    "auc": fr.metrics.auc(from_logits=True),
    "exact": fr.metrics.exact_auc,
    "log_loss": fr.metrics.log_loss(from_logits=True),
    "mean": lambda scores, labels, weights: (scores * weights).sum(),
}


def predict(params, batch):
    return params[batch.ids.values]


def batches(size, *, label=LABEL, weight=WEIGHT):
    cut = lambda x, i: None if x is None else x[i : i + size]
    ids = lambda i: fr.KeyedJaggedTensor.from_lists({"item": [[k] for k in range(i, min(i + size, N))]})
    return [fr.Batch(ids(i), cut(label, i), None, cut(weight, i)) for i in range(0, N, size)]


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_it_is_the_metric_of_all_examples(size, weight):
    """Metrics, and functions of all examples, give the values of the whole set, for any cut into batches."""
    w = torch.ones(N) if weight is None else weight
    got = fr.evaluate(predict, SCORES, batches(size, weight=weight), METRICS)
    assert list(got) == list(METRICS) and all(type(x) is float for x in got.values())
    assert got["exact"] == float(fr.metrics.exact_auc(SCORES, LABEL, weight))
    assert got["auc"] == pytest.approx(got["exact"], abs=1e-12), "the scores lie in bins of their own"
    want = torch.nn.functional.binary_cross_entropy_with_logits(SCORES.double(), LABEL.double(), reduction="none")
    assert got["log_loss"] == pytest.approx(float((want * w).sum() / w.sum()))
    assert got["mean"] == pytest.approx(float((SCORES * w).sum()))


def test_what_gives_batches():
    """evaluate accepts an iterable of batches, an iterable of pairs with positions, or a function that returns
    either."""
    want = fr.evaluate(predict, SCORES, batches(5), METRICS)
    pairs = [(fr.data.Position(0, i), b) for i, b in enumerate(batches(5))]
    for given in (iter(batches(5)), pairs, lambda: iter(pairs)):
        assert fr.evaluate(predict, SCORES, given, METRICS) == want


def test_examples_of_weight_zero_do_not_count():
    """Padding with any label and any finite score changes no metric."""
    label = torch.where(WEIGHT == 0, 7.0, LABEL)
    scores = torch.where(WEIGHT == 0, 1e6, SCORES)
    got = fr.evaluate(predict, scores, batches(5, label=label), METRICS)
    assert got == pytest.approx(fr.evaluate(predict, SCORES, batches(5), METRICS))


def test_one_of_several_tasks():
    """`label` and `weight` say what to read from a batch, of any type."""
    rows = [{"x": SCORES[i : i + 5], "y": torch.stack([LABEL, 1 - LABEL], 1)[i : i + 5]} for i in range(0, N, 5)]
    read = {"label": lambda b: b["y"][:, 1], "weight": lambda b: None}
    got = fr.evaluate(lambda params, b: b["x"], None, rows, {"auc": fr.metrics.exact_auc}, **read)
    assert got["auc"] == pytest.approx(1 - float(fr.metrics.exact_auc(SCORES, LABEL)))


def test_no_derivative_is_kept():
    """Parameters that require grad are evaluated without derivatives."""
    assert fr.evaluate(predict, SCORES.clone().requires_grad_(), batches(5), METRICS)["exact"] > 0


@pytest.mark.parametrize("how, error, part", [
    ({"batches": []}, ValueError, "`batches` are empty"), ({"batches": 3}, TypeError, "`batches` is not iterable"),
    ({"metrics": {}}, ValueError, "`metrics` are none"),
    ({"metrics": {"auc": fr.metrics.auc}}, TypeError, "makes a metric, and is not one"),
    ({"metrics": {"auc": 0.5}}, TypeError, "`metrics['auc']` is not a Metric"),
    ({"batches": batches(5, label=None)}, ValueError, "`batch.label` is missing"),
    ({"predict": lambda params, batch: 3}, TypeError, "`predict` gave no tensor"),
    ({"predict": lambda params, batch: SCORES.mean()}, ValueError, "`predict` gave one number"),
    ({"predict": 3}, TypeError, "`predict` is not a function"),
    ({"metrics": {"auc": fr.metrics.auc()}}, ValueError, "from_logits=True"),
    ({"predict": lambda params, batch: SCORES[:3]}, ValueError, "`labels` do not match"),
])  # fmt: skip
def test_bad_input(how, error, part):
    """Wrong arguments, and predictions that no metric accepts, raise in four parts."""
    given = {"predict": predict, "params": SCORES, "batches": batches(5), "metrics": METRICS} | how
    with pytest.raises(error) as raised:
        fr.evaluate(**given)
    assert part in str(raised.value) and "\n  need  " in str(raised.value)

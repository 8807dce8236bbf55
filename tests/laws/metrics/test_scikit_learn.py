"""Metrics of numbers and classes equal those of scikit-learn.

log_q corrections that are no logarithms of probabilities raise."""

import math

import pytest
import sklearn.metrics as sklearn
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

import funcrec as fr
from funcrec import losses, metrics

NAN, INF = math.nan, math.inf
f64 = lambda *numbers: torch.tensor(numbers, dtype=torch.float64)
ERRORS = {"mse": metrics.mse(), "rmse": metrics.rmse(), "mae": metrics.mae()}
SKLEARN = {
    "mse": sklearn.mean_squared_error, "rmse": sklearn.root_mean_squared_error, "mae": sklearn.mean_absolute_error
}  # fmt: skip
each_error = pytest.mark.parametrize("name", ERRORS)
CLASSES = metrics.multiclass_accuracy()


def value(metric, *rows):
    return metric.compute(metric.update(metric.init(), *rows))


@st.composite
def rows_of(draw):
    """Return random (predictions f64[B, 4] with ties, numbers f64[B], classes i64[B], weights f64[B] not all 0), with B
    from 1 to 20."""
    n, g = draw(st.integers(1, 20)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    p, y = torch.randint(-3, 4, (n, 4), generator=g).double(), torch.randn(n, generator=g).double() * 100
    w = torch.randint(0, 3, (n,), generator=g).double()
    return p, y, torch.randint(0, 4, (n,), generator=g), torch.where(w.sum() > 0, w, w + 1)


@each_error
@given(rows=rows_of())
def test_errors_of_any_numbers(name, rows):
    """Errors of finite labels of any size equal those of scikit-learn, whole and in parts, weighted and not."""
    p, y, _, w = rows
    metric, at = ERRORS[name], len(y) // 2
    for weights in (None, w):
        want = SKLEARN[name](y, p[:, 0], sample_weight=weights)
        assert float(value(metric, p[:, 0], y, weights)) == pytest.approx(want, rel=1e-12)
    head, tail = ([x[part] for x in (p[:, 0], y, w)] for part in (slice(at), slice(at, None)))
    state = metrics.merge(metric.update(metric.init(), *head), metric.update(metric.init(), *tail))
    torch.testing.assert_close(metric.compute(state), value(metric, p[:, 0], y, w), rtol=1e-12, atol=0)


@each_error
def test_labels_that_are_no_numbers(name):
    """A label that is not finite raises. In padding such a label is not read. Where values cannot be read, the result
    is NaN."""
    of = lambda *rows: value(ERRORS[name], *rows)
    for odd in (NAN, INF, -INF):
        rows = f64(1, 2), f64(-7, odd)
        with pytest.raises(ValueError, match=r"labels\[1\](.|\n)*finite labels"):
            of(*rows)
        assert of(*rows, f64(1, 0)) == of(f64(1), f64(-7))
        assert vmap(of)(*(x[None] for x in rows)).isnan().all()
    assert of(f64(), f64()).isnan() and of(f64(1), f64(2), f64(0)).isnan()


@given(rows=rows_of())
def test_accuracy_of_classes(rows):
    """Accuracy is the fraction of examples whose highest logit is at their class, as in scikit-learn for the argmax.
    The law holds weighted, in parts and mapped. Among equal logits the first logit counts, as in argmax."""
    p, _, y, w = rows
    for weights in (None, w):
        want = sklearn.accuracy_score(y, p.numpy().argmax(1), sample_weight=weights)
        assert float(value(CLASSES, p, y, weights)) == pytest.approx(want, rel=1e-12)
        assert value(CLASSES, p.float(), y.float(), weights) == value(CLASSES, p, y, weights)
    state = CLASSES.init()
    for i in range(len(y)):
        state = CLASSES.update(state, p[i : i + 1], y[i : i + 1], w[i : i + 1])
    torch.testing.assert_close(CLASSES.compute(state), value(CLASSES, p, y, w), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        vmap(lambda *r: value(CLASSES, *r))(p[None], y[None], w[None])[0], value(CLASSES, p, y, w)
    )


def test_classes_of_nothing_and_of_padding():
    """Without examples the accuracy is NaN. Examples of weight 0 are not read. An invalid row raises, or gives NaN."""
    p, y = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), torch.tensor([1, 1])
    assert value(CLASSES, p[:0], y[:0]).isnan() and value(CLASSES, p, y, f64(0, 0)).isnan()
    for odd_p, odd_y in ((NAN, 1.0), (0.0, 3.0), (0.0, -1.0), (0.0, 0.5), (0.0, NAN)):
        rows = torch.where(torch.tensor([[False], [True]]), p + odd_p, p), torch.tensor([1.0, odd_y])
        assert value(CLASSES, *rows, f64(2, 0)) == 1
        with pytest.raises(ValueError, match=r"\[1"):
            value(CLASSES, *rows)
        assert vmap(lambda *r: value(CLASSES, *r))(*(x[None] for x in rows)).isnan().all()
    assert fr.jit(lambda *r: value(CLASSES, *r))(*rows).isnan()
    assert value(CLASSES, torch.tensor([[-INF, 0.0], [INF, 0.0]]), torch.tensor([1, 0])) == 1


def test_evaluate_takes_them():
    """fr.evaluate of numbers and classes gives the metrics of all examples with a weight above 0."""
    n = 10
    g = torch.Generator().manual_seed(0)
    logits, number, kind = torch.randn(n, 3, generator=g), torch.randn(n, generator=g) * 9, torch.arange(n) % 3
    ids = lambda i: fr.KeyedJaggedTensor.from_lists({"item": [[k] for k in range(i, min(i + 4, n))]})
    for weight in (None, torch.arange(n) % 3 * 0.5):
        cut = lambda x, i: None if x is None else x[i : i + 4]
        batches = lambda y: [fr.Batch(ids(i), y[i : i + 4], None, cut(weight, i)) for i in range(0, n, 4)]  # noqa: B023
        own = {"own": lambda s, y, w: (s.argmax(1) == y).double().mul(w).sum() / w.sum(), "accuracy": CLASSES}
        found = fr.evaluate(lambda p, b: p[b.ids.values], logits, batches(kind), own)
        assert found["accuracy"] == pytest.approx(float(value(CLASSES, logits, kind, weight)), rel=1e-12)
        assert found["own"] == pytest.approx(found["accuracy"])
        found = fr.evaluate(lambda p, b: p[b.ids.values, 0], logits, batches(number), ERRORS)
        assert found == pytest.approx({n: float(value(m, logits[:, 0], number, weight)) for n, m in ERRORS.items()})


def test_log_q_is_the_logarithm_of_a_chance():
    """log_q that holds counts, probabilities or non-finite numbers raises. Where values cannot be read, the loss is
    NaN."""
    x, w = torch.eye(2), torch.tensor([1.0, 0.0])
    loss = lambda q, w=None: losses.in_batch_softmax(x, x, w, log_q=q)
    for odd in (50.0, 1e-9, NAN, -INF):
        log_q = torch.tensor([-1.0, odd])
        with pytest.raises(ValueError, match=r"`log_q` (.|\n)*log_q\[1\](.|\n)*fr.data.log_q"):
            loss(log_q)
        assert vmap(loss)(log_q[None]).isnan().all()
        assert loss(log_q, w) == loss(torch.tensor([-1.0, -1.0]), w), "padding is not read"
    assert loss(torch.zeros(2)) == losses.in_batch_softmax(x, x, log_q=None), "a chance of 1"


@given(counts=st.lists(st.integers(0, 2**40), min_size=1, max_size=5).filter(any))
def test_log_q_of_counts_is_one(counts):
    """fr.data.log_q is never above 0."""
    assert (fr.data.log_q(torch.tensor(counts)) <= 0).all()

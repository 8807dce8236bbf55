"""Metrics of one class, of no examples, of padding, of infinite logits and of NaN have their documented values.

NaN is never the best value."""

import math
import warnings

import pytest
import sklearn.metrics as sklearn
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

import funcrec as fr
from funcrec import metrics
from funcrec.loop import best_epoch

NAN, INF = math.nan, math.inf
METRICS = {
    "auc": metrics.auc(64), "log_loss": metrics.log_loss(), "normalized_entropy": metrics.normalized_entropy(),
    "calibration": metrics.calibration(), "ctr": metrics.ctr(), "accuracy": metrics.accuracy(), "mse": metrics.mse(),
    "rmse": metrics.rmse(), "mae": metrics.mae(),
}  # fmt: skip
EXACT = {"exact_auc": metrics.exact_auc}
ALL = {**{n: (lambda p, y, w=None, m=m: m.compute(m.update(m.init(), p, y, w))) for n, m in METRICS.items()}, **EXACT}
every = pytest.mark.parametrize("name", ALL)
f64 = lambda *numbers: torch.tensor(numbers, dtype=torch.float64)

# labels that are all 0, and labels that are all 1, with predictions .2 and .6
ONE_CLASS = {
    "auc": (NAN, NAN), "exact_auc": (NAN, NAN), "normalized_entropy": (NAN, NAN), "calibration": (NAN, 0.4),
    "ctr": (0.0, 1.0), "accuracy": (0.5, 0.5), "mse": (0.2, 0.4), "rmse": (0.2**0.5, 0.4**0.5), "mae": (0.4, 0.6),
    "log_loss": ((-math.log(0.8) - math.log(0.4)) / 2, (-math.log(0.2) - math.log(0.6)) / 2),
}  # fmt: skip


@every
def test_one_class(name):
    """With labels of one class, a metric has its documented value. The value is NaN where the quotient is undefined,
    never an infinite score."""
    for label, want in zip((0.0, 1.0), ONE_CLASS[name], strict=True):
        for weights in (None, f64(2, 2)):
            found = ALL[name](f64(0.2, 0.6), f64(label, label), weights)
            torch.testing.assert_close(found, f64(want)[0], equal_nan=True)


@every
def test_nothing(name):
    """Without examples, or with all weights 0, a metric is NaN."""
    assert ALL[name](f64(), f64()).isnan()
    assert ALL[name](f64(0.2, NAN), f64(0, 1), f64(0, 0)).isnan()


@every
def test_nan_is_never_the_best(name):
    """Early stopping by comparison, and the best epoch, never choose an evaluation without a value."""
    nan = float(ALL["normalized_entropy"](f64(0.2, 0.6), f64(1, 1)))
    for values in ([nan, 0.7, 0.8], [0.7, nan, 0.8], [0.7, 0.8, nan], [nan, nan, 0.8]):
        best = best_epoch([{"valid_auc": v} for v in values], "valid_auc")
        assert values[best] == 0.8
        lowest = INF
        for v in values:
            lowest = v if v < lowest else lowest
        assert lowest == min(v for v in values if v == v)
    assert best_epoch([{"valid_auc": nan}, {"valid_auc": nan}], "valid_auc") is None


BAD_ROWS = {  # predictions, labels and weights, where the second example is invalid
    "NaN prediction": (f64(0.3, NAN, 0.6), f64(0, 1, 1), None),
    "label 5": (f64(0.3, 0.5, 0.6), f64(0, 5, 1), None),
    "label -1": (f64(0.3, 0.5, 0.6), f64(0, -1, 1), None),
    "NaN label": (f64(0.3, 0.5, 0.6), f64(0, NAN, 1), None),
    "negative weight": (f64(0.3, 0.5, 0.6), f64(0, 1, 1), f64(1, -1, 2)),
    "NaN weight": (f64(0.3, 0.5, 0.6), f64(0, 1, 1), f64(1, NAN, 2)),
    "infinite weight": (f64(0.3, 0.5, 0.6), f64(0, 1, 1), f64(1, INF, 2)),
    "no probability": (f64(0.3, 1.5, 0.6), f64(0, 1, 1), None),
}
# these accept any labels
ERRORS = ("mse", "rmse", "mae")
ANY_PREDICTION = ("rmse", "ctr", "mse", "mae", "exact_auc")


@every
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_what_means_nothing_is_refused_or_shows(name, bad):
    """An invalid row raises where values can be read. In a traced, mapped or compiled call, the result is NaN."""
    if (bad == "no probability" and name in ANY_PREDICTION) or (bad in ("label 5", "label -1") and name in ERRORS):
        return
    rows = [x for x in BAD_ROWS[bad] if x is not None]
    with pytest.raises(ValueError, match=r"leave their range(.|\n)*\[1\]"):
        ALL[name](*rows)
    stacked = [torch.stack([x, x]) for x in rows]
    assert vmap(ALL[name])(*stacked).isnan().all()
    if bad == "label 5" and name in ("accuracy", "exact_auc"):
        assert fr.jit(ALL[name])(*rows).isnan()


@every
@given(seed=st.integers(0, 999), num=st.integers(1, 12), junk=st.sampled_from([NAN, INF, -INF, 7.0]))
def test_padding_is_never_read(name, seed, num, junk):
    """Rows of weight 0 change no result, whatever the rows hold and wherever they are."""
    g = torch.Generator().manual_seed(seed)
    p, y = torch.rand(num, generator=g).double(), torch.randint(0, 2, (num,), generator=g).double()
    w = torch.randint(0, 3, (num,), generator=g).double()
    kept = w > 0
    filled = lambda x: torch.where(kept, x, junk)
    torch.testing.assert_close(ALL[name](filled(p), filled(y), w), ALL[name](p[kept], y[kept], w[kept]), equal_nan=True)


def test_infinite_logits():
    """A logit of ±∞ costs nothing when right and infinity when wrong, and ranks as the highest or lowest score."""
    loss = ALL["log_loss"], metrics.log_loss(from_logits=True)
    of = lambda m, z, y: m.compute(m.update(m.init(), z, y))
    assert of(loss[1], f64(INF, -INF, 0), f64(1, 0, 1)) == f64(math.log(2) / 3)[0]
    assert of(loss[1], f64(INF), f64(0)) == INF and of(loss[1], f64(-INF), f64(0.5)) == INF
    assert of(metrics.auc(from_logits=True), f64(INF, -INF, 0), f64(1, 0, 1)) == 1
    assert metrics.exact_auc(f64(INF, -INF, 0), f64(1, 0, 1)) == 1


@given(seed=st.integers(0, 999), num=st.integers(2, 30), weighted=st.booleans())
def test_sklearn_where_it_has_a_value(seed, num, weighted):
    """With ties, weights of 0 or one class, exact_auc equals the value of scikit-learn. exact_auc is NaN where
    scikit-learn raises or warns."""
    g = torch.Generator().manual_seed(seed)
    p = (torch.rand(num, generator=g) * 4).round().double() / 4
    y = torch.randint(0, 2, (num,), generator=g)
    w = torch.randint(0, 3, (num,), generator=g).double() if weighted else torch.ones(num).double()
    used = w > 0
    if not bool(used.any()):
        return
    found = float(metrics.exact_auc(p, y, w))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if len(set(y[used].tolist())) < 2:
            assert math.isnan(found)
        else:
            assert abs(found - sklearn.roc_auc_score(y[used], p[used], sample_weight=w[used])) < 1e-12
    assert abs(float(ALL["accuracy"](p, y, w)) - sklearn.accuracy_score(y, p >= 0.5, sample_weight=w)) < 1e-12
    assert abs(float(ALL["mse"](p, y, w)) - sklearn.mean_squared_error(y, p, sample_weight=w)) < 1e-12


def test_states_of_other_shapes_do_not_merge():
    """States of auc with different numbers of bins do not merge."""
    with pytest.raises(TypeError, match="states of different metrics"):
        metrics.merge(metrics.auc(1).init(), metrics.auc(8).init())


@pytest.mark.parametrize(
    "make", [metrics.auc, metrics.log_loss, metrics.normalized_entropy, metrics.calibration, metrics.accuracy]
)
def test_from_logits_is_a_flag(make):
    """from_logits must be True or False."""
    with pytest.raises(TypeError, match="`from_logits` is not a truth value"):
        make(from_logits="no")

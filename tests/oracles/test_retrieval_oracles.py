"""Ranking metrics equal those of scikit-learn and those of Python's sets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

import funcrec as fr

metrics = fr.metrics
GIVEN = st.lists(st.integers(0, 9), unique=True, min_size=4, max_size=7)
LISTS = st.lists(st.tuples(GIVEN, st.lists(st.integers(0, 9), max_size=6)), min_size=1, max_size=5)


def of(metric, rows, relevant, weights=None):
    return float(metric.compute(metric.update(metric.init(), rows, relevant, weights)))


@given(LISTS, st.integers(1, 9))
def test_lists_are_measured_as_sets_are(lists, k):
    """recall, hit rate and NDCG at k equal those of Python's sets and of scikit-learn. Lists without a relevant row do
    not count. Padding, -1 and repeated rows do not count either."""
    rows = torch.tensor([(own + [-1] * 7)[:7] for own, _ in lists])
    bags = fr.JaggedTensor.from_lists([bag for _, bag in lists], dtype=torch.int64)
    padded = fr.JaggedTensor(torch.cat([bags.values, rows.flatten()]), bags.offsets)
    found = [(own[:k], set(bag)) for own, bag in lists if bag]
    mean = lambda xs: float(np.mean(xs)) if xs else np.nan
    recall = mean([len(bag & set(own)) / len(bag) for own, bag in found])
    hit = mean([float(bool(bag & set(own))) for own, bag in found])
    np.testing.assert_allclose(of(metrics.recall(k), rows, padded), recall)
    np.testing.assert_allclose(of(metrics.hit_rate(k), rows, padded), hit)
    gains = []
    for own, bag in ((own, set(bag)) for own, bag in lists if bag):
        score = np.array([[100 - own.index(i) if i in own else -i for i in range(10)]])
        label = np.array([[float(i in bag) for i in range(10)]])
        if k <= len(own):
            gains.append((ndcg_score(label, score, k=k), own, bag))
    for want, own, bag in gains:
        got = of(metrics.ndcg(k), torch.tensor([own]), fr.JaggedTensor.from_lists([list(bag)]))
        np.testing.assert_allclose(got, want)


@given(LISTS, st.integers(1, 9))
def test_ranks_are_measured_as_textbooks_do(lists, k):
    """precision, MRR and MAP at k equal those of loops over Python's lists."""
    rows = torch.tensor([(own + [-1] * 7)[:7] for own, _ in lists])
    bags = fr.JaggedTensor.from_lists([bag for _, bag in lists], dtype=torch.int64)
    precisions, reciprocals, averages = [], [], []
    for own, bag in ((own[:k], set(bag)) for own, bag in lists if bag):
        hits = [i in bag for i in own]
        precisions.append(sum(hits) / k)
        reciprocals.append(1 / (1 + hits.index(True)) if any(hits) else 0.0)
        averages.append(sum(sum(hits[: j + 1]) / (j + 1) for j, hit in enumerate(hits) if hit) / min(k, len(bag)))
    wanted = {"precision": precisions, "mrr": reciprocals, "mean_average_precision": averages}
    for name, want in wanted.items():
        got = of(getattr(metrics, name)(k), rows, bags)
        np.testing.assert_allclose(got, np.mean(want) if want else np.nan, err_msg=name)


@given(st.lists(GIVEN, min_size=1, max_size=5), st.integers(1, 9), st.data())
def test_coverage_and_novelty_are_those_of_the_rows_given(lists, k, data):
    """Coverage is the share of a set. Novelty is the mean of means of bits. Lists of weight 0 are left out of both."""
    rows = torch.tensor([(own + [-1] * 7)[:7] for own in lists])
    none = fr.JaggedTensor.from_lists([[] for _ in lists], dtype=torch.int64)
    counts = data.draw(st.lists(st.integers(0, 20), min_size=10, max_size=10))
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=len(lists), max_size=len(lists)))
    kept = [own[:k] for own, w in zip(lists, weights, strict=True) if w]
    bits = lambda i: np.log2(20 / max(counts[i], 1))
    found = [np.mean([bits(i) for i in own]) for own in kept]
    want = np.average(found, weights=[w for w in weights if w]) if found else np.nan
    w = torch.tensor(weights)
    got = of(metrics.novelty(k, torch.tensor(counts), 20), rows, none, w)
    np.testing.assert_allclose(got, want)
    assert of(metrics.coverage(k, 10), rows, none, w) == len({i for own in kept for i in own}) / 10


def test_states_add_up_and_weights_count():
    """Two batches equal one batch. A list of weight w counts w times. A list of weight 0 is padding."""
    rows, bags = torch.tensor([[1, 2], [3, 4], [5, 6]]), fr.JaggedTensor.from_lists([[1], [9, 4], [5]])
    m = metrics.recall(2)
    whole = m.update(m.init(), rows, bags, torch.tensor([2.0, 1.0, 0.0]))
    parts = m.update(m.init(), rows[:1], fr.JaggedTensor.from_lists([[1]]), torch.tensor([2.0]))
    parts = m.update(parts, rows[1:2], fr.JaggedTensor.from_lists([[9, 4]]))
    assert float(m.compute(whole)) == float(m.compute(parts)) == 2.5 / 3
    assert float(fr.jit(lambda r, b: m.compute(m.update(m.init(), r, b)))(rows, bags)) == 2.5 / 3


@pytest.mark.parametrize("rows, bags, kind, text", [
    (torch.ones(2, 3), fr.JaggedTensor.from_lists([[1], [2]]), TypeError, "not lists of rows"),
    (torch.tensor([1]), fr.JaggedTensor.from_lists([[1]]), ValueError, "not lists of rows"),
    (torch.tensor([[1]]), fr.JaggedTensor.from_lists([[0.5]]), TypeError, "`labels.values` is not rows"),
    (torch.tensor([[1]]), fr.JaggedTensor.from_lists([[1], [2]]), ValueError, "have other lists"),
])  # fmt: skip
def test_bad_lists_are_told(rows, bags, kind, text):
    """An argument that is no lists of rows raises in four parts. So does one without a bag of relevant rows for each
    list."""
    with pytest.raises(kind, match=text):
        of(metrics.ndcg(2), rows, bags)


@pytest.mark.parametrize("name", ["coverage", "novelty"])
def test_rows_and_weights_out_of_range_show(name):
    """They are refused where values can be read, not read in padding, and make the number NaN where it is traced."""
    none = fr.JaggedTensor.from_lists([[], []], dtype=torch.int64)
    m = metrics.coverage(2, 4) if name == "coverage" else metrics.novelty(2, torch.tensor([4, 2, 1, 0]), 4)
    rows, wrong = torch.tensor([[0, 1], [2, -1]]), torch.tensor([[0, 1], [2, 9]])
    traced = fr.jit(lambda rows, w: m.compute(m.update(m.init(), rows, none, w)))
    for lists, w, text in (
        (wrong, torch.ones(2), "rows that no item has"),
        (rows, torch.tensor([1.0, -1.0]), "`weights` leave their range"),
        (rows, torch.tensor([1.0, torch.nan]), "`weights` leave their range"),
    ):
        with pytest.raises(ValueError, match=text):
            of(m, lists, none, w)
        assert traced(lists, w).isnan()
    padded = torch.tensor([1.0, 0.0])
    assert of(m, wrong, none, padded) == of(m, rows, none, padded) == float(traced(wrong, padded))
    for counts in (torch.tensor([9, 1]), torch.tensor([torch.inf, 1.0])):
        with pytest.raises(ValueError, match="`counts` leave their range"):
            metrics.novelty(2, counts, 4)

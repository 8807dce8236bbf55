"""evaluate_retrieval equals sets in Python, over any split of the queries, any form of the items, and any groups."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.refused import assert_refused

import funcrec as fr

metrics = fr.metrics
R, D = 9, 4
ITEMS = torch.randn(R, D, generator=torch.Generator().manual_seed(0))
BAGS = st.lists(st.integers(0, R - 1), max_size=4)
QUERIES = st.lists(st.tuples(BAGS, BAGS, st.sampled_from([0.0, 1.0, 2.0])), min_size=1, max_size=7)


def query(params, batch):
    return batch.dense @ params


def batch_of(queries, seed=0):
    """Return a batch of (relevant, seen, weight). The random vectors have whole numbers, so that sums are exact."""
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randint(-3, 4, (len(queries), D), generator=draw).float()
    wanted, seen, weights = zip(*queries, strict=True)
    bags = {"wanted": list(wanted), "seen": list(seen)}
    ids = fr.KeyedJaggedTensor.from_lists(bags, dtype=torch.int64)
    return fr.Batch(ids, dense=vectors, weight=torch.tensor(weights))


def judged(batches, items=ITEMS, **more):
    more = {"seen": "seen", "k": (2, 5)} | more
    return fr.evaluate_retrieval(query, torch.eye(D), batches, items, "wanted", **more)


def by_hand(batch, queries, k, masks=(True,) * R):
    """Return recall@k of the queries with a weight, from all scores and Python's sets."""
    total = weights = 0.0
    for x, (wanted, seen, w) in zip(batch.dense, queries, strict=True):
        wanted = {i for i in wanted if masks[i]}
        scores = [(-float((x * y).sum()), i) for i, y in enumerate(ITEMS) if i not in seen]
        first = {i for _, i in sorted(scores)[:k]}
        if wanted and w:
            total, weights = total + w * len(first & wanted) / len(wanted), weights + w
    return total / weights if weights else math.nan


@settings(max_examples=40)
@given(QUERIES, st.integers(0, 5))
def test_lists_are_of_all_items_but_the_seen_ones(queries, seed):
    """The recall of each length is that of sorted scores without the seen items. A query of weight 0 is padding."""
    batch = batch_of(queries, seed)
    found = judged([batch])
    for k in (2, 5):
        assert found[f"recall@{k}"] == pytest.approx(by_hand(batch, queries, k), nan_ok=True)


@settings(max_examples=20)
@given(QUERIES, QUERIES)
def test_batches_add_up(first, second):
    """Two batches in either order have the numbers of one batch. Batches may come with positions or from a function."""
    a, b = batch_of(first, 1), batch_of(second, 2)
    both = batch_of([*first, *second])
    both = fr.Batch(both.ids, dense=torch.cat([a.dense, b.dense]), weight=both.weight)
    want = pytest.approx(judged([both]), nan_ok=True, abs=1e-12)
    assert judged([a, b]) == want and judged([b, a]) == want
    assert judged(lambda: iter([(fr.data.Position(0, 1), a), (fr.data.Position(1, 0), b)])) == want


@settings(max_examples=20)
@given(QUERIES)
def test_groups_are_parts(queries):
    """A group of queries has the numbers of these queries alone. A group of items has those of its relevant items."""
    batch, mask = batch_of(queries), torch.arange(R) < 4
    chosen = torch.arange(len(queries)) % 2 == 0
    found = judged([batch], groups={"even": lambda b: chosen}, item_groups={"low": mask, "all": mask | True})
    plain = judged([batch])
    alone = judged([batch], weight=lambda b: b.weight * chosen)
    same = lambda x, y: x == pytest.approx(y, nan_ok=True)
    assert all(same(found[n], x) and same(found[f"{n} of all"], x) for n, x in plain.items())
    assert all(same(found[f"{n} of even"], x) for n, x in alone.items())
    assert same(found["recall@5 of low"], by_hand(batch, queries, 5, mask.tolist()))


@settings(max_examples=20)
@given(QUERIES, st.lists(st.integers(0, 3), min_size=R, max_size=R))
def test_the_most_popular_are_a_baseline(queries, counts):
    """The result also has the numbers of a baseline. The baseline's list is the same for all queries with the same seen
    items."""
    batch, counts = batch_of(queries), torch.tensor(counts)
    found = judged([batch], counts=counts)
    total = weights = 0.0
    for wanted, seen, w in queries:
        first = sorted((-int(n), i) for i, n in enumerate(counts) if i not in seen)[:5]
        if wanted and w:
            total, weights = total + w * len({i for _, i in first} & {*wanted}) / len({*wanted}), weights + w
    assert found["popularity recall@5"] == pytest.approx(total / weights if weights else math.nan, nan_ok=True)
    assert {n for n in found if n.startswith("novelty")} == {"novelty@2", "novelty@5"}


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_an_index_that_finds_all_is_exact(kind):
    """Seen items are left out of the rows that an index finds. They do not shorten its lists."""
    queries = [([i % R], [(i + 1) % R, (i + 2) % R][: i % 3], 1.0) for i in range(12)]
    items = torch.randint(-9, 9, (R, D), generator=torch.Generator().manual_seed(3)).float()
    index = fr.build_index(items, kind, **({"num_lists": 2} if kind == "ivf" else {}))
    batch, effort = batch_of(queries), 100 if kind == "hnsw" else 2
    nothing = batch_of([(wanted, [], w) for wanted, _, w in queries])
    assert judged([batch], index, effort=effort) == judged([batch], items)
    assert judged([batch], index, effort=effort, seen=None) == judged([batch], items, seen=None)
    assert judged([nothing], index, effort=effort) == judged([batch], items, seen=None)


def test_quantized_items_have_the_numbers_of_their_values():
    """QuantizedTables of one table are ranked by the values of the codes."""
    codes = fr.quantize({"items": ITEMS}, "int8")
    batch = batch_of([([1], [], 1.0), ([3, 4], [1], 1.0)])
    assert judged([batch], codes) == judged([batch], fr.dequantize(codes)["items"])


def test_two_towers_are_judged_in_one_call():
    """A trained pair of towers finds items that popularity does not find, and `fit` stops by the measured recall."""
    tables = (fr.TableConfig("user", 12, 8), fr.TableConfig("item", 12, 8))
    sides = (fr.FeatureConfig("user", table="user"),), (fr.FeatureConfig("item", table="item"),)
    model = fr.models.two_tower(tables, *sides, sizes=(8,))
    each = [[i] for i in range(12)]
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"user": each, "item": each}))
    step = fr.train_step(model, sparse=fr.optim.adam(0.05), dense=fr.optim.dense(torch.optim.Adam, lr=0.05))
    judge = lambda params: fr.evaluate_retrieval(
        model.query, params, [batch], model.candidate(params, batch), "item", k=1, counts=torch.ones(12)
    )
    done = fr.fit(step, step.init(model.init(fr.key(0))), [batch], epochs=40, evaluate=judge, monitor="recall@1")
    assert max(e["recall@1"] for e in done.history) == 1.0 and done.history[0]["popularity recall@1"] == 1 / 12


ONE = batch_of([([1], [2], 1.0), ([3], [], 1.0)])
BAD = {
    "no batch": (lambda: judged([]), ValueError, "`batches` are empty"),
    "a key that is not there": (lambda: judged([ONE], seen="before"), ValueError, "`seen` names ids"),
    "vectors of another dim": (lambda: judged([ONE], ITEMS[:, :3]), ValueError, "`items` does not match `queries`"),
    "no vectors": (lambda: fr.evaluate_retrieval(lambda p, b: b.dense[0], 0, [ONE], ITEMS, "wanted"), TypeError,
        "`query(params, batch)` are not vectors"),
    "no bags": (lambda: judged([ONE], seen=lambda b: b.dense), TypeError, "`seen` gave no bags"),
    "NaN in a vector": (
        lambda: fr.evaluate_retrieval(query, torch.full((D, D), math.nan), [ONE], ITEMS, "wanted"), ValueError,
        "`query(params, batch)` have NaN", "NaN in row 0"),
    "fewer weights": (lambda: judged([ONE], weight=lambda b: b.weight[:1]), TypeError,
        "`weight` gave no number for each query"),
    "shared bags": (lambda: judged([replace(ONE, ids=fr.dedup_bags(ONE.ids))]), ValueError,
        "`relevant` has bags that queries share"),
    "other bags": (lambda: judged([ONE], seen=lambda b: fr.JaggedTensor.from_lists([[1]])), ValueError,
        "bags of other queries"),
    "fewer items": (lambda: judged([ONE], ITEMS[:3]), ValueError, "rows that no item has"),
    "other counts": (lambda: judged([ONE], counts=torch.ones(3)), ValueError, "`counts` do not match `items`"),
    "NaN for a count": (lambda: judged([ONE], counts=torch.full((R,), float("nan"))), ValueError,
        "`counts` leave their range"),
    "infinite counts": (lambda: judged([ONE], counts=torch.full((R,), float("inf"))), ValueError,
        "`counts` leave their range"),
    "counts below 0": (lambda: judged([ONE], counts=-torch.ones(R)), ValueError, "`counts` leave their range"),
    "no length": (lambda: judged([ONE], k=()), ValueError, "`k` is empty"),
    "metrics without a length": (lambda: judged([ONE], metrics={"recall@50": metrics.recall(50)}, k=None), ValueError,
        "`k`"),
    "no metric": (lambda: judged([ONE], metrics={}), ValueError, "`metrics` are none"),
    "a group of numbers": (lambda: judged([ONE], groups={"new": lambda b: b.weight}), ValueError,
        "does not say which queries"),
    "a group of other items": (lambda: judged([ONE], item_groups={"new": torch.ones(3) > 0}), ValueError,
        "`item_groups['new']` do not match `items`"),
    "one name twice": (
        lambda: judged([ONE], groups={"a": lambda b: b.weight > 0}, item_groups={"a": torch.ones(R) > 0}),
        ValueError, "have one name"),
    "two tables": (lambda: judged([ONE], fr.quantize({"a": ITEMS, "b": ITEMS}, "int8")), ValueError,
        "not one table"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_judged_is_refused(name):
    """Each invalid call raises with what, got, need and try, before any number is computed."""
    assert_refused(*BAD[name])


def test_counts_of_any_dtype():
    """Counts of 16 bits without a sign give the numbers of the same counts in 64 bits."""
    counts = torch.arange(R)
    assert judged([ONE], counts=counts.to(torch.uint16)) == pytest.approx(judged([ONE], counts=counts), nan_ok=True)

"""Batches, positions, prefetching and generated rows."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.data import (
    Position,
    batches,
    num_batches,
    prefetch,
    random_batches,
    random_rows,
    take,
    vocabularies_of,
    zipf,
)
from funcrec.testing import assert_trees_close

KEY = fr.key(7)
DATA = random_rows(KEY, {"row": 1000, "tags": 30}, num_rows=23, ids_per_bag={"row": 1, "tags": (0, 4)}, num_dense=1)


def seen(items):
    """Return the dense feature of each row, which identifies the row."""
    return [x for _, b in items for x in b.dense[:, 0].tolist()]


ALL = DATA.take(torch.arange(23)).dense[:, 0].tolist()


def test_rows_differ():
    """The test rows all differ in their dense feature."""
    assert len(set(ALL)) == 23


@given(size=st.integers(1, 30), epoch=st.integers(0, 3), shuffled=st.booleans())
def test_once_per_epoch(size, epoch, shuffled):
    """Every row comes once per epoch. The last position is the first position of the next epoch."""
    epoch_items = list(batches(DATA, None, size, key=KEY if shuffled else None, position=Position(epoch)))
    assert sorted(seen(epoch_items)) == sorted(ALL)
    assert len(epoch_items) == num_batches(23, size) and epoch_items[-1][0] == Position(epoch + 1, 0)
    if not shuffled:
        assert seen(epoch_items) == ALL


@given(size=st.integers(1, 30), stop=st.integers(0, 30), drop=st.booleans())
def test_resume(size, stop, drop):
    """A start at the position that came with a batch gives exactly the batches after that batch."""
    items = list(batches(DATA, None, min(size, 23), key=KEY, drop_last=drop))
    size = min(size, 23)
    stop = min(stop, len(items) - 1)
    if not items or items[stop][0].epoch:
        return
    rest = list(batches(DATA, None, size, key=KEY, position=items[stop][0], drop_last=drop))
    assert [p for p, _ in rest] == [p for p, _ in items[stop + 1 :]]
    assert_trees_close([b for _, b in rest], [b for _, b in items[stop + 1 :]], rtol=0, atol=0)


def test_order_depends_on_key_and_epoch():
    """Another epoch or another key gives another order. The same key and epoch give the same order."""
    order = lambda key, epoch: seen(batches(DATA, None, 5, key=key, position=Position(epoch)))
    assert order(KEY, 1) == order(fr.key(7), 1)
    assert order(KEY, 1) != order(KEY, 2) and order(KEY, 1) != order(fr.key(8), 1)


def test_part_of_the_rows():
    """Only the given rows come, repeats included."""
    rows = torch.tensor([3, 3, 20])
    assert sorted(seen(batches(DATA, rows, 2, key=KEY))) == sorted([ALL[3], ALL[3], ALL[20]])


def test_drop_last():
    """drop_last drops a batch that is not full, so that all batches have the same shapes."""
    items = [b for _, b in batches(DATA, None, 5, key=KEY, drop_last=True)]
    assert len(items) == 4 and {b.label.shape[0] for b in items} == {5}
    assert len({b.ids.capacity for b in items}) == 1


def test_bucket():
    """bucket pads the ids and does not change the ids."""
    for (_, a), (_, b) in zip(batches(DATA, None, 5), batches(DATA, None, 5, bucket=True), strict=True):
        assert b.ids.capacity == fr.pad_to_bucket(a.ids).capacity and a.ids.to_lists() == b.ids.to_lists()


def test_take_is_row_wise():
    """Bag b of every key, and label b, depend on rows[b] only."""
    whole = take(DATA, torch.arange(23))
    part = take(DATA, torch.tensor([22, 0, 5, 5]))
    chosen = [22, 0, 5, 5]
    assert part.ids.to_lists() == {k: [bags[i] for i in chosen] for k, bags in whole.ids.to_lists().items()}
    assert part.label.tolist() == whole.label[chosen].tolist()


def test_rows_that_are_not_there_show_when_traced(interpreted):
    """In a traced call, which cannot check rows, a row that is out of range has label NaN. The other labels do not
    change."""
    rows = torch.tensor([3, -1, 22, 23])
    want = DATA.take(torch.tensor([3, 22])).label
    for label in (
        fr.jit(lambda r: DATA.take(r).label)(rows),
        torch.func.vmap(lambda r: DATA.take(r).label)(rows[None])[0],
    ):
        assert label.isnan().tolist() == [False, True, False, True] and torch.equal(label[[0, 2]], want)
    logits = make_fx(lambda d, r: d.logits(r), tracing_mode="fake")(DATA, rows)
    assert logits(DATA, rows).isnan().tolist() == [False, True, False, True]


same = lambda a, b: assert_trees_close(a, b, rtol=0, atol=0)


@given(size=st.integers(1, 30), weighted=st.booleans())
def test_pad_last_has_one_shape(size, weighted):
    """With pad_last every batch has the shapes of a full batch. The added examples have weight 0. All other examples do
    not change."""
    data = Weighted(torch.arange(23) % 3 * 0.5) if weighted else DATA
    plain, padded = (list(batches(data, None, size, key=KEY, pad_last=pad)) for pad in (False, True))
    assert [p for p, _ in plain] == [p for p, _ in padded]
    assert len({(b.label.shape, b.dense.shape, b.weight.shape, b.ids.offsets.shape) for _, b in padded}) == 1
    for (_, a), (_, b) in zip(plain, padded, strict=True):
        own = a.label.shape[0]
        assert b.weight.shape == (size,) and bool((b.weight[own:] == 0).all())
        assert torch.equal(b.weight[:own], torch.ones(own) if a.weight is None else a.weight)
        same((b.label[:own], b.dense[:own]), (a.label, a.dense))
        bags = b.ids.to_lists()
        assert {key: x[:own] for key, x in bags.items()} == a.ids.to_lists()
        # padding adds no new ids
        assert all(bag == x[own - 1] for x in bags.values() for bag in x[own:])


class Weighted:
    """A source of rows that have their own weights."""

    num_rows = 23

    def __init__(self, weight):
        self.weight = weight

    def take(self, rows):
        return fr.core.replace(DATA.take(rows), weight=self.weight[rows])


def test_what_pad_last_adds_counts_nowhere():
    """A padded batch gives the loss and gradients of the batch alone, and touches the same rows."""
    tables = (fr.TableConfig("row", 1000, 4), fr.TableConfig("tags", 30, 4))
    features = [fr.FeatureConfig(n, n) for n in ("row", "tags")]
    model = fr.models.deepfm(tables, features, num_dense=1, sizes=(8,), dropout=0.0)
    short, padded = (list(batches(DATA, None, 9, pad_last=pad))[-1][1] for pad in (False, True))
    assert short.label.shape[0] == 5 and padded.label.shape[0] == 9
    grad = fr.value_and_grad(fr.models.loss(model), has_aux=True)
    (a, _), grads = grad(model.init(KEY), short, key=KEY)
    (b, _), more = grad(model.init(KEY), padded, key=KEY)
    assert_trees_close((a, grads.dense), (b, more.dense))
    for x, y in ((grads.tables[n].coalesce(), more.tables[n].coalesce()) for n in ("row", "tags")):
        assert_trees_close(x.to_dense(), y.to_dense())
        assert set(x.rows[: x.count].tolist()) == set(y.rows[: y.count].tolist())


# -- prefetch ----------------------------------------------------------------------------------------------------


def is_alone():
    """Return whether all prefetch threads end within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(t.name == "funcrec.data.prefetch" for t in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


@given(n=st.integers(0, 20), depth=st.integers(1, 5))
def test_prefetch_same(n, depth):
    """prefetch gives the same items in the same order. Then the thread of prefetch ends."""
    assert list(prefetch(iter(range(n)), depth=depth)) == list(range(n))
    assert is_alone()


def test_prefetch_batches():
    """prefetch of batches gives the batches on the requested device."""
    plain, ahead = batches(DATA, None, 5, key=KEY), prefetch(batches(DATA, None, 5, key=KEY), device="cpu")
    assert_trees_close([b for _, b in plain], [b for _, b in ahead], rtol=0, atol=0)


def test_prefetch_exception():
    """An exception is raised at its item's place, after the items before it."""

    def items():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    got, ahead = [], prefetch(items(), depth=5)
    with pytest.raises(OSError, match="the disk is gone"):
        for x in ahead:
            got.append(x)
    assert got == [1, 2] and is_alone()


def test_prefetch_early_stop():
    """A consumer that stops early leaves no thread. The source is closed."""
    closed = threading.Event()

    def items():
        try:
            yield from range(10**9)
        finally:
            closed.set()

    for x in (ahead := prefetch(items())):
        if x == 3:
            break
    ahead.close()
    assert closed.is_set() and is_alone()
    unused = prefetch(items())
    del unused
    assert is_alone()


def test_prefetch_depth():
    """prefetch takes at most depth + 1 items more than the consumer."""
    made = []

    def items():
        for i in range(50):
            made.append(i)
            yield i

    ahead = prefetch(items(), depth=3)
    next(ahead)
    time.sleep(0.1)
    assert 1 < len(made) <= 1 + 3 + 1
    ahead.close()


# -- generated rows ----------------------------------------------------------------------------------------------


def test_random_batches_are_rows():
    """random_batches gives the batches of random_rows, and the same batches for the same key."""
    data = random_rows(KEY, {"a": 50}, alpha=1.0)
    made = random_batches(KEY, {"a": 50}, 8, alpha=1.0)
    for i in range(3):
        assert_trees_close(next(made), data.take(torch.arange(8 * i, 8 * i + 8)), rtol=0, atol=0)
    other = random_rows(fr.key(8), {"a": 50}, alpha=1.0).take(torch.arange(64))
    assert other.ids.to_lists() != data.take(torch.arange(64)).ids.to_lists()


@given(
    size=st.integers(1, 3000),
    alpha=st.sampled_from([0, 0.5, 1.0, 1.3, 4.0]),
    fewest=st.integers(0, 3),
    more=st.integers(0, 3),
)
def test_random_rows_in_range(size, alpha, fewest, more):
    """Ids lie in the vocabulary, bags have the requested lengths, and labels are 0 or 1."""
    most = max(fewest + more, 1)
    data = random_rows(KEY, {"a": size, "b": 2}, alpha=alpha, ids_per_bag=(fewest, most))
    batch = data.take(torch.arange(40))
    bags = batch.ids.to_lists()
    assert {len(bag) for bag in bags["a"]} <= set(range(fewest, most + 1))
    assert all(0 <= i < size for bag in bags["a"] for i in bag) and all(i in (0, 1) for bag in bags["b"] for i in bag)
    assert batch.ids.capacity == 40 * 2 * most and set(batch.label.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("size", [500, 5000])
def test_zipf_frequencies(alpha, size):
    """The k-th id has probability k^-alpha / Σ j^-alpha. Every cell of a log scale is within five deviations."""
    num = 400_000
    ids = zipf(fr.key(1), (num,), size, alpha)
    counts = torch.bincount(ids, minlength=size).double()
    share = torch.arange(1, size + 1, dtype=torch.float64).pow(-alpha)
    expected = num * share / share.sum()
    cell = torch.arange(1, size + 1).log2().long()
    n = int(cell[-1]) + 1
    found, wanted = (torch.zeros(n, dtype=torch.float64).index_add(0, cell, x) for x in (counts, expected))
    assert bool(((found - wanted).abs() < 5 * wanted.sqrt()).all())


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.2])
def test_zipf_slope(alpha):
    """The slope of log frequency over log rank is -alpha, on both sides of the exact table's end."""
    counts = torch.bincount(zipf(fr.key(2), (2_000_000,), 4096, alpha), minlength=4096).double()
    rank = torch.arange(1, 4097, dtype=torch.float64).log()
    for part in (slice(0, 1024), slice(1024, 4096)):
        # the variance of log(count) is 1 / count
        x, w = rank[part], counts[part]
        x = x - (w * x).sum() / w.sum()
        slope = (w * x * w.log()).sum() / (w * x * x).sum()
        error = (1 / (w * x * x).sum()).sqrt()
        assert abs(float(slope) + alpha) < 5 * float(error) + 0.01, part


def test_scatter_is_a_bijection():
    """With `scatter`, the ids have the same frequencies as the ranks, in another order."""
    rows = torch.arange(20_000)
    counts = [
        torch.bincount(random_rows(KEY, {"a": 37}, alpha=1.0, scatter=s).take(rows).ids.values, minlength=37)
        for s in (True, False)
    ]
    assert counts[0].sort().values.tolist() == counts[1].sort().values.tolist()
    assert counts[0].tolist() != counts[1].tolist() and int(counts[1].argmax()) == 0


def test_labels_can_be_learnt():
    """The labels follow the logits of the data, with an AUC above 0.8, and are calibrated."""
    data = random_rows(KEY, {"a": 100, "b": 1000}, num_dense=3, alpha=0.5)
    rows = torch.arange(20_000)
    labels, logits = data.take(rows).label, data.logits(rows)
    assert float(fr.metrics.exact_auc(logits, labels)) > 0.8
    # 4.5 deviations
    assert abs(float(logits.sigmoid().mean() - labels.mean())) < 0.015


def test_vocabularies_of():
    """A column's vocabulary is the size of its smallest table."""
    tables = [fr.TableConfig("t", 10, 2), fr.TableConfig("s", 7, 2)]
    features = [fr.FeatureConfig("a", "t"), fr.FeatureConfig("b", "s", column="a"), fr.FeatureConfig("c", "t")]
    assert vocabularies_of(tables, features) == {"a": 7, "c": 10}


def test_generation_traces():
    """Rows can be generated inside a compiled step, because no operation depends on data."""
    rows = torch.arange(6)
    traced = make_fx(lambda d, r: d.take(r), tracing_mode="fake")(DATA, rows)
    assert_trees_close(traced(DATA, rows + 1), DATA.take(rows + 1), rtol=0, atol=0)


def test_rows_are_those_of_the_call():
    """Changes to `rows` after the call have no effect. The rows at the time of the call come."""
    data, rows = random_rows(fr.key(0), {"item": 50}, num_rows=8, num_dense=1), torch.arange(8)
    read = batches(data, rows, 2)
    first = next(read)[1]
    rows.zero_()
    want = [b for _, b in batches(data, torch.arange(8), 2)]
    assert_trees_close([first, *(b for _, b in read)], want)

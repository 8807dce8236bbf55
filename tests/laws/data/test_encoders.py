"""Encoders equal loops in Python. Any chunks give the same state. Any form of column gives the same ids."""

import bisect
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import bucketize, chain, hashed, identity, log1p, normalize, vocabulary
from funcrec.data.encoders import _numbers as numbers
from funcrec.data.encoders import _vocabulary as vocabularies
from funcrec.testing import assert_trees_close

TEXTS = st.one_of(st.none(), st.sampled_from(["", "a", "b", "ab", "é", "日", "a\0", "zz", "z"]))
WHOLE = st.one_of(st.none(), st.integers(-5, 9))
REAL = st.one_of(st.none(), st.floats(-1e6, 1e6, width=32), st.sampled_from([0.0, -0.0, 1.0, 2.5]))
same = lambda a, b: assert_trees_close(a, b, rtol=0, atol=0)


def cut(values, kind, places):
    """Return the column cut into chunks at these places."""
    places = sorted({min(p, len(values)) for p in places})
    return [pa.array(values[a:b], kind) for a, b in pairwise([0, *places, len(values)])]


@pytest.mark.parametrize(
    "kind, elements", [(pa.string(), TEXTS), (pa.int32(), WHOLE), (pa.large_string(), TEXTS)], ids=str
)
@given(draw=st.data(), min_count=st.integers(1, 3), max_size=st.one_of(st.none(), st.integers(1, 4)))
def test_a_vocabulary_is_the_sorted_values(kind, elements, draw, min_count, max_size):
    """Ids are 1 + the position among the kept values, sorted by their bytes. All other values get id 0."""
    seen, asked = (draw.draw(st.lists(elements, max_size=25)) for _ in range(2))
    counts = Counter(x for x in seen if x is not None)
    order = lambda x: x.encode() if isinstance(x, str) else x
    kept = sorted((x for x, n in counts.items() if n >= min_count), key=lambda x: (-counts[x], order(x)))[:max_size]
    kept = sorted(kept, key=order)
    state = vocabulary(min_count=min_count, max_size=max_size).fit(pa.array(seen, kind))
    ids = {x: i for i, x in enumerate(kept, 1)}
    assert state.num_ids == len(kept) + 1
    assert state.counts.tolist() == [len(seen) - sum(counts[x] for x in kept), *(counts[x] for x in kept)]
    assert state.apply(pa.array(asked, kind)).to_pylist() == [ids.get(x, 0) for x in asked]
    if kept:
        assert state.decode(torch.arange(state.num_ids)).to_pylist() == [None, *kept]


ENCODERS = {
    "vocabulary of text": (vocabulary(min_count=2), pa.string(), TEXTS),
    "vocabulary of integers": (vocabulary(max_size=3), pa.int64(), WHOLE),
    "hashed": (hashed(50, seed=1), pa.string(), TEXTS),
    "quantiles": (bucketize(num_quantiles=4), pa.float64(), REAL),
    "normalize": (normalize(), pa.float64(), REAL),
    "chain": (chain(log1p(), bucketize(num_quantiles=3)), pa.int8(), st.integers(0, 9)),
}


@pytest.mark.parametrize("name", ENCODERS)
@given(draw=st.data(), places=st.lists(st.integers(0, 30), max_size=4))
def test_a_state_does_not_depend_on_chunks(name, draw, places):
    """A column gives the same state, bit for bit, whole, in chunks, and as an iterator of chunks."""
    encoder, kind, elements = ENCODERS[name]
    values = [*draw.draw(st.lists(elements, max_size=30)), draw.draw(elements.filter(lambda x: x is not None))]
    chunks = cut(values, kind, places)
    whole = encoder.fit(pa.array(values, kind))
    same(whole, encoder.fit(pa.chunked_array(chunks, kind)))
    same(whole, encoder.fit(iter(chunks)))
    assert whole.apply(pa.chunked_array(chunks, kind)).to_pylist() == whole.apply(pa.array(values, kind)).to_pylist()


@pytest.mark.parametrize("name", ["vocabulary of text", "vocabulary of integers", "quantiles"])
def test_what_is_counted_does_not_depend_on_the_order_of_rows(name):
    """Counts and quantiles do not depend on the order of rows."""
    encoder, kind, _ = ENCODERS[name]
    values = ["b", "a", "b", None, "c"] if kind == pa.string() else [5, 3, 5, None, 1]
    same(encoder.fit(pa.array(values, kind)), encoder.fit(pa.array(values[::-1], kind)))


def test_much_is_added_up_as_little_is(monkeypatch):
    """Counts and moments are the same when partial results are merged after every chunk, or over many blocks."""
    values = np.random.default_rng(0).integers(0, 300, 2000)
    chunks = np.array_split(values, 37)
    for module, name, size in ((vocabularies, "MERGE_AT", 5), (numbers, "BLOCK", 7)):
        text = [pa.array([f"v{x}" for x in c]) for c in chunks]
        whole = vocabulary().fit(pa.chunked_array(text)), bucketize(num_quantiles=9).fit(values)
        monkeypatch.setattr(module, name, size)
        same(whole, (vocabulary().fit(iter(text)), bucketize(num_quantiles=9).fit(pa.array(c) for c in chunks)))
    same(normalize().fit(values), normalize().fit(pa.array(c) for c in chunks))
    state = normalize().fit(values)
    assert math.isclose(float(state.mean), values.mean(), rel_tol=1e-13)
    assert math.isclose(float(state.deviation), values.std(), rel_tol=1e-13)


@given(cuts=st.lists(st.integers(0, 400), max_size=5), most=st.integers(20, 60))
def test_quantiles_of_more_values_than_are_counted(cuts, most):
    """When the exact counting is limited to few values, the edges are approximate. The edges are still the same for any
    chunks."""
    values = np.random.default_rng(1).lognormal(size=400) * np.where(np.arange(400) % 3, 1, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "BLOCK", 16)
        exact = bucketize(num_quantiles=5).fit(values).edges
        patch.setattr(numbers, "MOST_COUNTED", most)
        rough = bucketize(num_quantiles=5).fit(values)
        same(rough, bucketize(num_quantiles=5).fit(iter(cut(values.tolist(), pa.float64(), cuts))))
        if len(rough.edges) == 4:
            assert bool(((rough.edges - exact).abs() <= exact.abs() / 2).all())


@given(edges=st.lists(st.floats(-10, 10), min_size=1, max_size=5, unique=True), x=st.lists(REAL, max_size=20))
def test_buckets_are_closed_below(edges, x):
    """A number's bucket is 1 + the number of edges that are not above the number, as in bisect. The bucket of a missing
    number is 0."""
    edges = sorted(edges)
    state = bucketize(edges=edges).fit([])
    assert state.num_ids == len(edges) + 2
    assert state.apply(pa.array(x, pa.float64())).to_pylist() == [
        0 if v is None else 1 + bisect.bisect_right(edges, v) for v in x
    ]


def test_nan_is_missing():
    """NaN is treated as null: no edge, no moment, bucket 0, and the mean when normalized. log1p leaves a missing number
    missing."""
    values, nulls = [1.0, math.nan, 3.0], [1.0, None, 3.0]
    for encoder in (bucketize(num_quantiles=2), normalize()):
        same(encoder.fit(np.array(values)), encoder.fit(nulls))
        assert encoder.fit(nulls).apply(np.array(values)).to_pylist() == encoder.fit(nulls).apply(nulls).to_pylist()
    assert normalize().fit(nulls).apply(np.array(values)).to_pylist() == [-1.0, 0.0, 1.0]
    assert log1p().fit([]).apply([0.0, None]).to_pylist() == [0.0, None]
    assert normalize().fit([7, 7]).apply([7, 8]).to_pylist() == [0.0, 1.0]


# -- hashes ----------------------------------------------------------------------------------------------------------


def text_hash(text, seed, size):
    """Return the hash of a text, computed with Python's integers."""
    wrap = lambda n: n % 2**64

    def mix(z):
        z = wrap((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9)
        z = wrap((z ^ (z >> 27)) * 0x94D049BB133111EB)
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    bits = mix(wrap(sum(mix(wrap((i * 256 + b + 1) * gamma)) for i, b in enumerate(text.encode()))))
    return 1 + int(
        fr.hash_rows(torch.tensor(bits - 2**64 if bits >= 2**63 else bits), fr.multiply_shift(seed), size - 1)
    )


@given(texts=st.lists(st.text(max_size=6), max_size=12), step=st.sampled_from([1, 7, 1 << 22]))
def test_a_hash_is_that_of_the_bytes(texts, step):
    """A text's id follows the formula, for any number of bytes hashed at a time. An integer's id follows
    `fr.hash_rows`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabularies, "HASHED_BYTES", step)
        made = hashed(1000, seed=3).fit(texts).apply([*texts, None]).to_pylist()
    assert made == [*(text_hash(t, 3, 1000) for t in texts), 0]
    whole = [5, -1, None, 2**62]
    rows = fr.hash_rows(torch.tensor([5, -1, 2**62]), fr.multiply_shift(3), 999) + 1
    assert [x for x in hashed(1000, seed=3).fit(whole).apply(whole).to_pylist() if x] == rows.tolist()


def test_hashes_spread():
    """10,000 texts that differ in a digit are spread evenly over 1,000 ids, with chi-square within five deviations."""
    ids = hashed(1001).fit(["x"]).apply([f"user_{i}" for i in range(10_000)]).to_numpy()
    counts = np.bincount(ids, minlength=1001)[1:]
    assert counts.sum() == 10_000 and abs(float(((counts - 10) ** 2 / 10).sum()) - 999) < 5 * math.sqrt(2 * 999)


# -- forms of columns ------------------------------------------------------------------------------------------------

LISTS = [["b", "a"], [], None, ["a", None, "?"], ["b"]]


class Capsule:
    """A column as other libraries (pandas, polars) export it."""

    def __init__(self, chunks):
        self.chunks = pa.chunked_array(chunks)

    def __arrow_c_stream__(self, requested_schema=None):
        return self.chunks.__arrow_c_stream__(requested_schema)


FORMS = {
    "of another library": Capsule([LISTS[:2], LISTS[2:]]),
    "lists": pa.array(LISTS),
    "large lists": pa.array(LISTS, pa.large_list(pa.large_string())),
    "lists of dictionaries": pa.array(LISTS, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "a slice": pa.array([["zz"], *LISTS, ["a"]]).slice(1, 5),
    "chunks": pa.chunked_array([LISTS[:2], [], LISTS[2:]], pa.list_(pa.string())),
    "views": pa.array(LISTS, pa.list_view(pa.string_view())),
    "a list": LISTS,
}


@pytest.mark.parametrize("form", FORMS)
def test_lists_are_encoded_element_by_element(form):
    """Lists of any layout stay lists. Missing lists stay missing. A missing element gets the unknown id."""
    state = vocabulary().fit(["a", "b"])
    assert state.apply(FORMS[form]).to_pylist() == [[2, 1], [], None, [1, 0, 0], [2]]
    same(vocabulary().fit(FORMS[form]), vocabulary().fit(["b", "a", "a", None, "?", "b"]))


def test_a_fixed_number_of_elements_stays_so():
    """Lists of a fixed size keep that size. A vector of k numbers therefore becomes k dense numbers."""
    column = pa.array([[1.0, 2.0], [3.0, 6.0]], pa.list_(pa.float32(), 2))
    made = normalize().fit(column).apply(column)
    assert made.type.list_size == 2 and abs(float(np.array(made.to_pylist()).mean())) < 1e-15


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint16(), pa.uint64()], ids=str)
def test_integers_of_all_widths_are_one(kind):
    """A vocabulary of integers reads integers of any width, signed or not. Values that the vocabulary's dtype cannot
    hold are unknown."""
    state = vocabulary().fit(pa.array([3, 1, 100], kind))
    assert state.apply(pa.array([100, 2, 1], pa.int32())).to_pylist() == [3, 0, 1]
    assert state.apply(pa.array([-1, None, 3], pa.int64())).to_pylist() == [0, 0, 2]
    assert state.apply(pa.array([2**64 - 1, 2**63 + 3, 3], pa.uint64())).to_pylist() == [0, 0, 2]


def test_unsigned_ids_keep_their_bits():
    """Unsigned ids of 2⁶³ and above have different ids, in their order, and are decoded."""
    ids = [2**64 - 1, 5, 2**63]
    state = vocabulary().fit(pa.array(ids, pa.uint64()))
    assert state.apply(pa.array(ids, pa.uint64())).to_pylist() == [3, 1, 2]
    assert state.decode(torch.tensor([3, 1, 2, 0])).to_pylist() == [*ids, None]
    assert state.apply(pa.array([5, -1])).to_pylist() == [1, 0]


def test_few_texts_are_found_as_many_are():
    """A search of few texts by bisection and a search of many texts by an index give the same ids."""
    known = [f"v{i:03}" for i in range(0, 1000, 3)]
    state, asked = vocabulary().fit(known), ["", "v000", "v001", "v999", "w", None, "v500", "v501"]
    one = [state.apply(pa.array([x], pa.string())).to_pylist()[0] for x in asked]
    assert one == state.apply(asked * 50).to_pylist()[: len(asked)] == [0, 1, 0, 334, 0, 0, 0, 168]


def test_nothing_is_learned_from_nothing():
    """A column without values teaches nothing, so that all values are unknown. identity and fixed edges need no
    values."""
    for empty in (pa.nulls(3), pa.array([None], pa.string()), pa.array([], pa.int64())):
        state = vocabulary().fit(empty)
        assert state.num_ids == 1 and state.counts.tolist() == [empty.null_count]
    assert vocabulary().fit(pa.nulls(3)).apply(["a", None]).to_pylist() == [0, 0]
    assert identity(4).fit([]).apply([[3], [], [0, 1]]).to_pylist() == [[3], [], [0, 1]]


def test_states_come_back_from_a_file(tmp_path):
    """A state that was saved and loaded gives the same ids as the original state."""
    for name, (encoder, kind, _) in ENCODERS.items():
        values = pa.array(["a", None, "b", "a"] if kind == pa.string() else [1, 2, 1, 5], kind)
        state = encoder.fit(values)
        found = fr.load(fr.save(tmp_path / "state", state))
        same(state, found)
        assert type(found) is type(state) and found.apply(values).to_pylist() == state.apply(values).to_pylist(), name


def test_an_encoder_of_ones_own():
    """init, update and compute are enough to define an encoder. The encoder here uses the length of a text as its
    id."""

    @fr.pytree(static=("most",))
    class Lengths:
        most: int

        @property
        def num_ids(self):
            return self.most + 1

        def apply(self, column, place=None):
            import pyarrow.compute as pc

            return pc.min_element_wise(pc.fill_null(pc.utf8_length(column), 0).cast("int64"), self.most)

    longest = lambda known, values, place: max([known, *(len(x) for x in values.to_pylist() if x)])
    lengths = fr.data.Encoder(lambda: 0, longest, Lengths)
    schema = fr.data.Schema(categorical=("word",))
    encoding = fr.data.fit_encoding({"word": ["a", "abc", None]}, schema, {"word": lengths})
    assert fr.data.encode(encoding, {"word": ["ab", "abcdef"]}).categorical.tolist() == [[2], [3]]

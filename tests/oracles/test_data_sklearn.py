"""Encoders equal those of scikit-learn."""

import numpy as np
import pytest
from sklearn.preprocessing import KBinsDiscretizer, OrdinalEncoder, QuantileTransformer, StandardScaler

from funcrec.data import bucketize, normalize, vocabulary

RANDOM = np.random.default_rng(0)
COLUMNS = {
    "continuous": RANDOM.lognormal(size=500),
    "integers": RANDOM.integers(0, 12, 500).astype(float),
    "far from 0": 1.7e9 + RANDOM.normal(size=500) * 2.5e4,
    "mostly 0": np.maximum(RANDOM.normal(size=500), 0),
}


@pytest.mark.parametrize("values", [RANDOM.integers(-9, 9, 400), RANDOM.choice(["a", "é", "Z", "日本", "ab"], 400)])
def test_a_vocabulary_is_an_ordinal_encoder(values):
    """Ids are the ordinals of OrdinalEncoder, plus 1. Both libraries number the sorted values. Unknown values get id
    0."""
    theirs = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1).fit(values[:200, None])
    want = theirs.transform(values[:, None])[:, 0].astype(int) + 1
    assert vocabulary().fit(values[:200]).apply(values).to_pylist() == want.tolist()


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("num", [2, 4, 10])
def test_quantile_buckets_are_those_of_a_discretizer(name, num):
    """Without repeats, the edges equal the quantiles of numpy and of QuantileTransformer to the bit. The buckets are
    those of KBinsDiscretizer."""
    x = COLUMNS[name]
    state = bucketize(num_quantiles=num).fit(x)
    quantiles = QuantileTransformer(n_quantiles=num + 1, subsample=None).fit(x[:, None]).quantiles_[1:-1, 0]
    distinct = lambda edges: sorted({q for q in edges.tolist() if q > x.min()})
    assert state.edges.tolist() == distinct(np.quantile(x, np.arange(1, num) / num))
    np.testing.assert_allclose(state.edges, distinct(quantiles), rtol=1e-14)
    theirs = KBinsDiscretizer(num, encode="ordinal", strategy="quantile", quantile_method="linear", subsample=None)
    want = theirs.fit_transform(x[:, None])[:, 0].astype(int) + 1
    ids = np.array(state.apply(x).to_pylist())
    if len(theirs.bin_edges_[0]) == len(state.edges) + 2:
        assert ids.tolist() == want.tolist()
    # KBinsDiscretizer keeps an edge at the least value. Apart from that edge, both cut the rows into the same parts.
    pairs = set(zip(ids.tolist(), want.tolist()))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


@pytest.mark.parametrize("name", COLUMNS)
def test_normalize_is_a_standard_scaler(name):
    """The mean, the deviation and the normalized values are those of StandardScaler."""
    x = COLUMNS[name]
    state, theirs = normalize().fit(x), StandardScaler().fit(x[:, None])
    np.testing.assert_allclose(
        [float(state.mean), float(state.deviation)], [theirs.mean_[0], theirs.scale_[0]], rtol=1e-9
    )
    np.testing.assert_allclose(state.apply(x).to_numpy(), theirs.transform(x[:, None])[:, 0], rtol=1e-7, atol=1e-9)

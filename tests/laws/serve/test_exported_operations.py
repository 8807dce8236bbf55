"""Operations on jagged values inside `predict` make one program for all numbers of bags and ids."""

import pytest
import torch

import funcrec as fr

pytestmark = pytest.mark.xdist_group("packages")

draw = torch.Generator().manual_seed(0)
PARAMS = fr.Params({"t": torch.randn(20, 4, generator=draw), "u": torch.randn(20, 4, generator=draw)}, {})
FEATURES = (fr.FeatureConfig("a", table="t"), fr.FeatureConfig("b", table="u", pooling="mean"))
SEQUENCE = (fr.FeatureConfig("a", table="t", pooling="none", max_length=3),)
MAXIMA = (fr.FeatureConfig("a", table="t", pooling="max"), FEATURES[1])
lookup = lambda params, ids: fr.lookup(params.tables, ids, FEATURES)
rows = lambda params, batch: fr.lookup_sequence(params.tables, batch.ids, SEQUENCE)["a"]


def summed(params, batch):
    """Return the sum of the rows of each bag, computed by hand."""
    x = rows(params, batch)
    return x.values.new_zeros(x.num_bags + 1, 4).index_add(0, x.bag_ids(), x.values)[:-1]


OPERATIONS = {
    "a KeyedTensor of a dict": lambda p, b: fr.KeyedTensor.from_dict(
        {k: 2 * x for k, x in lookup(p, b.ids).items()}
    ).values,
    "KeyedTensors side by side": lambda p, b: fr.KeyedTensor.concat(
        [fr.lookup(p.tables, b.ids, [f]) for f in FEATURES]
    ).values,
    "stacked features": lambda p, b: lookup(p, b.ids).stack().sum(1),
    "ids in another order": lambda p, b: lookup(p, b.ids.permute(["b", "a"])).values,
    "split ids": lambda p, b: fr.lookup(p.tables, b.ids.split([1, 1])[0], FEATURES[:1]).values,
    "ids side by side": lambda p, b: lookup(p, fr.KeyedJaggedTensor.concat(b.ids.split([1, 1]))).values,
    "ids of jagged ones": lambda p, b: lookup(p, fr.KeyedJaggedTensor.from_jagged(dict(b.ids.items()))).values,
    "one key's ids under two names": lambda p, b: lookup(
        p, fr.KeyedJaggedTensor.from_jagged({"a": b.ids["b"], "b": b.ids["b"]})
    ).values,
    "lengths": lambda p, b: b.ids["a"].lengths[:, None] + lookup(p, b.ids).values,
    "padded rows": lambda p, b: rows(p, b).to_padded(3).sum(1),
    "bags in another order": lambda p, b: rows(p, b).select(
        torch.arange(b.ids.num_bags), capacity=b.ids.capacity
    ).to_padded(3).sum(1),
    "rows added by hand": summed,
    "numbers between two": lambda p, b: lookup(p, b.ids).values * torch.linspace(0, 1, 8),
    "the greatest of bags": lambda p, b: fr.lookup(p.tables, b.ids, MAXIMA).values,
    "ids without those that mean nothing": lambda p, b: lookup(p, fr.drop_ids(b.ids, {"a": 3})).values,
}  # fmt: skip


def batch_of(*bags):
    """Return a batch of pairs (a, b) of bags, followed by padding."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [a for a, _ in bags], "b": [b for _, b in bags]})
    return fr.Batch(ids.pad_to(ids.capacity + 3))


def test_a_package_has_the_operations(tmp_path):
    """For one bag, several bags, empty bags and no bags, the package gives the outputs of the function."""
    predict = lambda params, batch: {k: f(params, batch) for k, f in OPERATIONS.items()}
    several = batch_of(([1, 2], [1]), ([], [2]), ([3, 3, 4, 5], [3, 4, 5]), ([7], []))
    package = fr.load_package(fr.export(predict, PARAMS, several, tmp_path / "package"))
    for batch in (several, batch_of(([5], [6])), batch_of(([], [])), batch_of(*[([1], [2])] * 70), batch_of()):
        got, want = package(batch), predict(PARAMS, batch)
        for k, x in want.items():
            torch.testing.assert_close(got[k], x, msg=lambda m, k=k: f"{k}: {m}")
    with pytest.raises(ValueError, match=r"`batch\.dense` would not be read"):
        package(fr.Batch(batch.ids, dense=torch.ones(0, 3)))

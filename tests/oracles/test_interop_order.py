"""A model with TorchRec's weights needs its features in the order of TorchRec's tables.

In some cases, TorchRec's column names do not match its numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

TABLES = tuple(fr.TableConfig(name, 5, 4) for name in ("c", "a", "b"))
FEATURES = tuple(fr.FeatureConfig(t.name, table=t.name) for t in TABLES)


def dlrm(tables, features):
    return fr.models.dlrm(tables, features, num_dense=3, bottom=(5, 4), sizes=(6,), keep="dense")


def test_another_order_of_features_is_refused():
    """A DLRM raises if its features or tables have another order than the tables of the state dict. In the same order,
    the DLRM predicts the values of TorchRec."""
    theirs = DLRM(EmbeddingBagCollection(fr.interop.to_torchrec((TABLES, FEATURES))), 3, [5, 4], [6, 1])
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], []], "b": [[3], [4]], "c": [[0], [1]]}, dtype=torch.int64)
    x, held = torch.linspace(-1, 1, 6).reshape(2, 3), theirs.state_dict()
    params_of = lambda tables: dlrm(tables, FEATURES).init(fr.key(0))
    params = fr.interop.load_torchrec_state_dict(params_of(TABLES), held, features=FEATURES)
    ours, want = dlrm(TABLES, FEATURES).apply(params, fr.Batch(ids, None, x)), theirs(x, fr.interop.to_torchrec(ids))
    torch.testing.assert_close(ours, want[:, 0], rtol=1e-5, atol=1e-6)
    wrong = dlrm(TABLES, FEATURES[::-1]).apply(params, fr.Batch(ids, None, x))
    # without the error, the model would give other values
    assert (wrong - want[:, 0]).abs().max() > 1e-4
    for tables, how in ((TABLES, {"features": FEATURES[::-1]}), (TABLES[::-1], {})):
        with pytest.raises(ValueError, match="in another order") as error:
            fr.interop.load_torchrec_state_dict(params_of(tables), held, **how)
        assert all(
            f"\n  {part}" in str(error.value) for part in ("got   ['b', 'a', 'c']", "need  ['c', 'a', 'b']", "try ")
        )
    with pytest.raises(TypeError, match=r"`features\[0\]` is not a FeatureConfig"):
        fr.interop.load_torchrec_state_dict(params, held, features=["c"])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2), st.sampled_from((4, 8))), min_size=1, max_size=4))
def test_a_fused_collection_of_several_poolings_has_another_order(drawn):
    """Features read from FBGEMM's fused collection give its numbers column by column, whatever the collection names the
    columns. The weights of a dense part follow that order. A model in the order of the collection's configs raises,
    with features and without features."""
    configs = []
    for i, (is_mean, count, dim) in enumerate(drawn):
        pooling = PoolingType.MEAN if is_mean else PoolingType.SUM
        columns = [f"f{i}{j}" for j in range(count)]
        configs.append(EmbeddingBagConfig(6, dim, f"t{i}", feature_names=columns, pooling=pooling))
    theirs = FusedEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 0.1})
    for i, x in enumerate(theirs.state_dict().values()):
        x.data.copy_(torch.arange(x.numel()).reshape(x.shape) + 100 * i)
    lists = {c: [[0, 3, 3], [], [1]] for config in configs for c in config.feature_names}
    ids = fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64)
    tables, features = fr.interop.from_torchrec(theirs)
    want = theirs(fr.interop.to_torchrec(ids)).values()
    w = torch.linspace(-1, 1, want.shape[1])
    held = {**theirs.state_dict(), "w": w}
    load = lambda tables, **how: fr.interop.load_torchrec_state_dict(
        fr.Params(fr.init(fr.key(0), tables), {"w": torch.zeros_like(w)}), held, **how
    )
    params = load(tables, features=features)
    got = fr.lookup(params.tables, ids, features).values
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(got @ params.dense["w"], want.detach() @ w)
    plain_tables, plain = fr.interop.from_torchrec(configs)
    if plain != features:
        for how in ({"features": plain}, {}):
            with pytest.raises(ValueError, match="in another order"):
                load(plain_tables, **how)


def test_a_weighted_mean_is_trained_by_its_derivative():
    """Our derivative of a weighted mean of length L is the exact derivative. The derivative of TorchRec's fused module
    on a CPU is L times the exact derivative. The page for TorchRec's users says so."""
    config = EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="a", feature_names=["f"], pooling=PoolingType.MEAN
    )
    theirs = FusedEmbeddingBagCollection([config], torch.optim.SGD, {"lr": 1.0}, is_weighted=True)
    before = theirs.state_dict()["embedding_bags.a.weight"].clone()
    ids = fr.KeyedJaggedTensor.from_lists({"f": [[0, 1, 2, 3]]}, weights={"f": [[1.0, 2.0, 3.0, 4.0]]})
    theirs(fr.interop.to_torchrec(ids)).values().sum().backward()
    features = (fr.FeatureConfig("f", table="a", pooling="mean", weighted=True),)
    loss = lambda params: fr.lookup(params.tables, ids, features).values.sum()
    _, grads = fr.value_and_grad(loss)(fr.Params({"a": torch.ones(5, 4)}, {}))
    got = grads.tables["a"].to_dense()
    assert_trees_close(got, torch.tensor([[0.25], [0.5], [0.75], [1.0], [0.0]]).expand(5, 4))
    assert_trees_close(before - theirs.state_dict()["embedding_bags.a.weight"], 4 * got, rtol=1e-5, atol=1e-5)

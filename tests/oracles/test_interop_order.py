"""The features of a model that takes TorchRec's weights stand in the order of its tables."""

import pytest
import torch

import funcrec as fr

pytest.importorskip("torchrec")
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection

TABLES = tuple(fr.TableConfig(name, 5, 4) for name in ("c", "a", "b"))
FEATURES = tuple(fr.FeatureConfig(t.name, table=t.name) for t in TABLES)


def dlrm(tables, features):
    return fr.models.dlrm(tables, features, num_dense=3, bottom=(5, 4), sizes=(6,), keep="dense")


def test_another_order_of_features_is_refused():
    """A DLRM of features, or of tables, in another order than the state dict's tables is refused; of the same order it
    predicts what TorchRec's does."""
    theirs = DLRM(EmbeddingBagCollection(fr.interop.to_torchrec((TABLES, FEATURES))), 3, [5, 4], [6, 1])
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], []], "b": [[3], [4]], "c": [[0], [1]]}, dtype=torch.int64)
    x, held = torch.linspace(-1, 1, 6).reshape(2, 3), theirs.state_dict()
    params_of = lambda tables: dlrm(tables, FEATURES).init(fr.key(0))
    params = fr.interop.load_torchrec_state_dict(params_of(TABLES), held, features=FEATURES)
    ours, want = dlrm(TABLES, FEATURES).apply(params, fr.Batch(ids, None, x)), theirs(x, fr.interop.to_torchrec(ids))
    torch.testing.assert_close(ours, want[:, 0], rtol=1e-5, atol=1e-6)
    wrong = dlrm(TABLES, FEATURES[::-1]).apply(params, fr.Batch(ids, None, x))
    assert (wrong - want[:, 0]).abs().max() > 1e-4  # what is refused would be another model
    for tables, how in ((TABLES, {"features": FEATURES[::-1]}), (TABLES[::-1], {})):
        with pytest.raises(ValueError, match="in another order") as error:
            fr.interop.load_torchrec_state_dict(params_of(tables), held, **how)
        assert all(
            f"\n  {part}" in str(error.value) for part in ("got   ['b', 'a', 'c']", "need  ['c', 'a', 'b']", "try ")
        )
    with pytest.raises(TypeError, match="`features` are not feature configs"):
        fr.interop.load_torchrec_state_dict(params, held, features=["c"])

"""Records of tables of several dtypes, whose parts lie at odd bytes."""

import pytest
import torch

import funcrec as fr

USERS = [fr.TableConfig("user", 500, 7, torch.bfloat16), fr.TableConfig("bias", 500, 1, torch.float32)]
FEATURES = [fr.FeatureConfig("user", table="user"), fr.FeatureConfig("bias", table="bias", column="user")]


def loss_fn(params, ids):
    return (fr.lookup(params.tables, ids, FEATURES).values.float() - 1).square().mean()


@pytest.mark.parametrize("num_ids", [1, 2])
def test_a_batch_of_one_id_trains(num_ids):
    """A step, and a reading, whose batch has one id have the bits of whole tables, as those of two ids have."""
    sparse, ids = fr.optim.adam(0.1), fr.KeyedJaggedTensor.from_lists({"user": [[7, 300][:num_ids]]})
    store = fr.table_store(USERS, sparse, key=fr.key(0))
    tables = fr.cached_tables({}, {"users": fr.CacheConfig(store, capacity=128, features=FEATURES)})
    step = fr.train_step(loss_fn, sparse=sparse, admit=False)
    cached, whole = fr.cached_step(step, {"users": store}), step.init(fr.Params(fr.init(fr.key(0), USERS), {}))
    state = cached.init(fr.Params(tables, {}))
    for _ in range(2):
        assert torch.equal(loss_fn(*cached.read(state.params, ids)), loss_fn(whole.params, ids))
        (state, got), (whole, want) = cached(state, ids), step(whole, ids)
        assert torch.equal(got["loss"], want["loss"])

"""Models, layers and their steps pickle. A loaded one computes the same bits."""

import copy
import pickle

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

TABLES = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
USER, ITEM = fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item")
WIDE = fr.models.linear_twins(TABLES, (USER, ITEM))
IDS = fr.KeyedJaggedTensor.from_lists({"user": [[1], [2, 3]], "item": [[4], [5]]})
BATCH = fr.Batch(IDS, torch.tensor([0.0, 1.0]), dense=torch.tensor([[0.5], [2.0]]))
BOTH = (USER, ITEM)
MODELS = {
    "lr": lambda: fr.models.lr(WIDE[0], WIDE[1], num_dense=1),
    "fm": lambda: fr.models.fm(TABLES + WIDE[0], BOTH, linear=WIDE[1], num_dense=1),
    "wide_deep": lambda: fr.models.wide_deep(TABLES, BOTH, sizes=(3,), num_dense=1, dropout=0.5),
    "deepfm": lambda: fr.models.deepfm(TABLES, BOTH, sizes=(3,), num_dense=1),
    "simple_deepfm": lambda: fr.models.simple_deepfm(TABLES, BOTH, num_dense=1),
    "dcnv2": lambda: fr.models.dcnv2(TABLES, BOTH, sizes=(3,), num_dense=1, batch_norm=True),
    "dlrm": lambda: fr.models.dlrm(TABLES, BOTH, num_dense=1, bottom=(4,), sizes=(3,)),
    "dlrm_dcnv2": lambda: fr.models.dlrm_dcnv2(TABLES, BOTH, num_dense=1, bottom=(4,), num_cross=1, rank=2, sizes=(3,)),
    "din": lambda: fr.models.din(
        TABLES,
        BOTH,
        sizes=(3,),
        num_dense=1,
        attention=(2,),
        target=["item"],
        history=[fr.FeatureConfig("seen", table="item", column="item", pooling="none")],
    ),
    "two_tower": lambda: fr.models.two_tower(TABLES, (USER,), (ITEM,), sizes=(3,)),
}
LAYERS = {
    "linear": lambda: fr.nn.linear(3, 2),
    "mlp": lambda: fr.nn.mlp((3, 2, 2), batch_norm=True, dropout=0.5),
    "batch_norm": lambda: fr.nn.batch_norm(3),
    "mixture": lambda: fr.nn.mixture_cross_network(3, 2, num_experts=2, rank=2),
    "cross_network": lambda: fr.nn.cross_network(3, 2, weight=fr.nn.fan_out_normal),
    "vector_cross_network": lambda: fr.nn.vector_cross_network(3, 2),
    "mmoe": lambda: fr.nn.mmoe(3, num_tasks=2, num_experts=2, sizes=(2,)),
    "layer_norm": lambda: fr.nn.layer_norm(3),
    "swish_layer_norm": lambda: fr.nn.swish_layer_norm(3),
}
same = lambda a, b: assert_trees_close(a, b, rtol=0, atol=0)


def copies(x):
    return pickle.loads(pickle.dumps(x)), copy.deepcopy(x), pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(x))))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_pickles(name):
    """A model that was pickled or copied makes the same parameters and gives the same logits."""
    model = MODELS[name]()
    batch = BATCH if name != "two_tower" else fr.core.replace(BATCH, dense=None)
    params = model.init(fr.key(0))
    for other in copies(model):
        assert type(other) is type(model) and other.tables == model.tables and other.features == model.features
        same(other.init(fr.key(0)), params)
        same(other.apply(params, batch), model.apply(params, batch))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_pickles(name):
    """A layer that was pickled or copied makes the same parameters and gives the same output."""
    layer = LAYERS[name]()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    params, stats = layer.init(fr.key(0)), layer.init_stats()
    given = (params, x, stats) if stats else (params, x)
    for other in copies(layer):
        same(other.init(fr.key(0)), params)
        same(other.apply(*given), layer.apply(*given))


@pytest.mark.parametrize("name", ["deepfm", "dcnv2", "two_tower"])
def test_a_step_of_a_model_pickles(name):
    """A pickled `train_step(model)` makes the same state and the same next state, also for a pickled model."""
    model = MODELS[name]()
    batch = BATCH if name != "two_tower" else fr.core.replace(BATCH, dense=None)
    step = fr.train_step(model, sparse=fr.optim.adagrad(0.1))
    state = step.init(model.init(fr.key(0)))
    for other in (pickle.loads(pickle.dumps(step)), fr.train_step(copies(model)[0], sparse=fr.optim.adagrad(0.1))):
        same(other.init(model.init(fr.key(0))), state)
        same(other(state, batch), step(state, batch))


def test_a_model_with_another_field_is_not_the_one_that_was_made():
    """A model that `_replace` changed does not pickle as the call that made it: it keeps its own fields."""
    model = MODELS["lr"]()._replace(penalty=torch.sum)
    made = copy.deepcopy(model)
    assert made.penalty is torch.sum and made.apply is model.apply

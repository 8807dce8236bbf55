"""Bad inputs of funcrec.nn and funcrec.models. Each row is a call, the call's exception and a part of the message."""

import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr
from funcrec import models, nn

T4, T8 = fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 8)
USER, ITEM = fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item")
SEQUENCE = fr.FeatureConfig("history", table="user", pooling="none")
IDS = fr.KeyedJaggedTensor.from_lists({"user": [[1], [2]], "item": [[3], [4]]})
BATCH = fr.Batch(IDS, torch.zeros(2))
DEEP = models.wide_deep((T4,), (USER,), sizes=(3,), num_dense=2)
PLAIN = models.wide_deep((T4,), (USER,), sizes=(3,), dropout=0.5)
TOWERS = models.two_tower((T4, T8), (USER,), (ITEM,))
NORMED = nn.mlp((3, 2, 1), batch_norm=True)
KEY, X = fr.key(0), torch.zeros(2, 3)


def params(model):
    return model.init(KEY)


def loss(label):
    batch = fr.Batch(IDS, label)
    return models.loss(PLAIN)(params(PLAIN), batch, key=KEY)


ROWS = [
    # (id, call, exception, a part of the message)
    ("linear(0, 3)", lambda: nn.linear(0, 3), ValueError, "`num_in` is out of range."),
    ("linear(2.0, 3)", lambda: nn.linear(2.0, 3), TypeError, "got   float 2.0"),
    ("linear of another width", lambda: nn.linear(4, 1).apply(nn.linear(4, 1).init(KEY), X), ValueError, "f[..., 4]"),
    ("linear of ids", lambda: nn.linear(3, 1).apply(nn.linear(3, 1).init(KEY), X.long()), TypeError, "i64[2, 3]"),
    ("mlp((3,))", lambda: nn.mlp((3,)), ValueError, "need  at least two sizes"),
    ("mlp(dropout=1)", lambda: nn.mlp((3, 1), dropout=1), ValueError, "need  a number in [0, 1)"),
    ("mlp without its stats", lambda: NORMED.apply(NORMED.init(KEY), X), ValueError, "`stats` are not this layer's."),
    ("dropout(rate=1.5)", lambda: nn.dropout(X, KEY, 1.5), ValueError, "`rate` is out of range."),
    (
        "batch_norm of one row",
        lambda: nn.batch_norm(3).train_apply(nn.batch_norm(3).init(KEY), X[:1], None, nn.batch_norm(3).init_stats()),
        ValueError,
        "`x` is too small a batch to train on.",
    ),
    ("cross(0)", lambda: nn.cross(0), ValueError, "`dim` is out of range."),
    ("cross(3, rank=-1)", lambda: nn.cross(3, -1), ValueError, "`rank` is out of range."),
    (
        "cross of another width",
        lambda: nn.cross(3).apply(nn.cross(3).init(KEY), X, X[:, :2]),
        ValueError,
        "`x` has another width than the layer.",
    ),
    (
        "cross_network of fewer layers",
        lambda: nn.cross_network(3, 2).apply(nn.cross_network(3, 2).init(KEY)[:1], X),
        ValueError,
        "got   1 of them",
    ),
    ("factorization_machine of ids", lambda: nn.factorization_machine(X.long()), TypeError, "`x` is not a float"),
    ("dot_interaction of a vector", lambda: nn.dot_interaction(X[0]), ValueError, "need  f[B, F, D]"),
    ("dot_interaction with ids", lambda: nn.dot_interaction(X[None], X[None].long()), TypeError, "`more[0]` is not a"),
    (
        "dot_interaction with another dim",
        lambda: nn.dot_interaction(X[None], X[None, :, :2]),
        ValueError,
        "`more[0]` does not continue `x`.",
    ),
    (
        "position_weights of a key that is not there",
        lambda: nn.position_weights({"z": 3}).apply({"z": X[0]}, fr.KeyedJaggedTensor.from_lists({"a": [[1]]})),
        KeyError,
        "`max_length` names keys without ids.",
    ),
    # configs
    ("fm of two dims", lambda: models.fm((T4, T8), (USER, ITEM)), ValueError, "dims {'user': 4, 'item': 8}"),
    (
        "deepfm of two dims",
        lambda: models.deepfm((T4, T8), (USER, ITEM)),
        ValueError,
        "the interacting features differ",
    ),
    ("dlrm of two dims", lambda: models.dlrm((T4, T8), (USER, ITEM)), ValueError, "need  one dim for all"),
    ("no features", lambda: models.wide_deep((T4,), ()), ValueError, "`features` are empty."),
    ("a sequence", lambda: models.dcnv2((T4,), (USER, SEQUENCE)), ValueError, "`features['history']` is a sequence."),
    ("an unknown table", lambda: models.dcnv2((T4,), (ITEM,)), KeyError, "`features['item'].table` is not a table."),
    ("a linear feature of dim 4", lambda: models.fm((T4,), (USER,), linear=(USER,)), ValueError, "`linear_twins("),
    ("lr of dim 4", lambda: models.lr((T4,), (USER,)), ValueError, "need  embedding_dim 1 for all"),
    ("num_dense=-1", lambda: models.dcnv2((T4,), (USER,), num_dense=-1), ValueError, "`num_dense` is out of range."),
    ("sizes=()", lambda: models.deepfm((T4,), (USER,), sizes=()), ValueError, "need  at least one size"),
    ("dropout=-0.1", lambda: models.wide_deep((T4,), (USER,), dropout=-0.1), ValueError, "`dropout` is out of range."),
    (
        "bottom that ends elsewhere",
        lambda: models.dlrm((T4,), (USER,), num_dense=3, bottom=(8, 5)),
        ValueError,
        "need  bottom[-1] == 4, the embeddings' dim",
    ),
    ("no bottom", lambda: models.dlrm((T4,), (USER,), num_dense=3), ValueError, "`bottom` has no layer."),
    ("bottom without input", lambda: models.dlrm((T4,), (USER,), bottom=(4,)), ValueError, "`bottom` has no input."),
    ("keep='some'", lambda: models.dlrm((T4,), (USER,), keep="some"), ValueError, "`keep` is unknown."),
    ("keep='dense' of none", lambda: models.dlrm((T4,), (USER,), keep="dense"), ValueError, "'dense' with num_dense=0"),
    ("max_rows=0", lambda: models.mlperf_dlrm_dcnv2(0), ValueError, "`max_rows` is out of range."),
    (
        "ml1m('bert')",
        lambda: models.ml1m("bert"),
        ValueError,
        "need  'lr' or 'fm' or 'dlrm' or 'widedeep' or 'deepfm' or 'dcnv2'",
    ),
    ("temperature=1", lambda: models.two_tower((T4,), (USER,), (USER,), temperature=1), ValueError, "a name twice"),
    (
        "temperature=-1",
        lambda: models.two_tower((T4, T8), (USER,), (ITEM,), temperature=-1),
        ValueError,
        "`temperature` is out of range.",
    ),
    # batches
    ("dense is missing", lambda: DEEP.apply(params(DEEP), BATCH), ValueError, "`batch.dense` is missing."),
    (
        "dense of another width",
        lambda: DEEP.apply(params(DEEP), fr.Batch(IDS, torch.zeros(2), X)),
        ValueError,
        "need  f[B, 2]",
    ),
    (
        "dense of ids",
        lambda: DEEP.apply(params(DEEP), fr.Batch(IDS, torch.zeros(2), X[:, :2].long())),
        TypeError,
        "`batch.dense` is not a float tensor.",
    ),
    (
        "dense that nobody reads",
        lambda: PLAIN.apply(params(PLAIN), fr.Batch(IDS, torch.zeros(2), X)),
        ValueError,
        "`batch.dense` would not be read.",
    ),
    (
        "dense for two towers",
        lambda: TOWERS.candidate(params(TOWERS), fr.Batch(IDS, torch.zeros(2), X)),
        ValueError,
        "need  None: this model reads ids\n  try   Batch(ids, label); fr.data.bucketize",
    ),
    (
        "dense for the scores of two towers",
        lambda: TOWERS.apply(params(TOWERS), fr.Batch(IDS, torch.zeros(2), X)),
        ValueError,
        "None: this model reads ids",
    ),
    ("ids for a batch", lambda: PLAIN.apply(params(PLAIN), IDS), TypeError, "`batch` is not a Batch."),
    ("init(0)", lambda: PLAIN.init(0), TypeError, "funcrec.models.wide_deep.init: `key` is not a key."),
    ("labels [B, 1]", lambda: loss(torch.zeros(2, 1)), ValueError, "try   label.squeeze(-1)"),
    (
        "towers of other batches",
        lambda: models.in_batch_softmax(X, X[:1]),
        ValueError,
        "`candidate` does not match `query`.",
    ),
    ("log_q of another batch", lambda: models.in_batch_softmax(X, X, log_q=X[0]), ValueError, "`log_q` does not match"),
]


@pytest.mark.parametrize(("call", "kind", "part"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_bad_input(call, kind, part):
    """The error has this type, names the bad argument, and has got and need."""
    assert_refused(call, kind, part)


def test_all_problems_are_told_at_once():
    """A constructor with two bad arguments names both."""
    with pytest.raises(ValueError) as error:
        nn.mlp((3, 0), dropout=2.0)
    assert "`sizes[1]` is out of range." in str(error.value) and "`dropout`" in str(error.value)

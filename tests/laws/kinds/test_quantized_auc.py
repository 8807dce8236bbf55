"""The loss in AUC of quantised tables for a trained model (bench/quantized_auc.py measures it on MovieLens-1M)."""

import torch

import funcrec as fr

USERS, ITEMS, DIM, ROWS = 200, 300, 8, 12_000


def generated():
    """Return clicks whose odds are a product of hidden vectors."""
    random = torch.Generator().manual_seed(0)
    users, items = (torch.randn(n, 4, generator=random) for n in (USERS, ITEMS))
    u, i = (torch.randint(0, n, (ROWS,), generator=random) for n in (USERS, ITEMS))
    odds = torch.sigmoid(1.5 * (users[u] * items[i]).sum(1))
    return u, i, (torch.rand(ROWS, generator=random) < odds).float()


def test_quantised_tables_keep_the_auc():
    """The AUC of a trained DeepFM with 8-bit tables is within 0.0005 of its float AUC, with 4-bit tables within
    0.005."""
    tables = (fr.TableConfig("user", USERS, DIM), fr.TableConfig("item", ITEMS, DIM))
    features = (fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item"))
    linear_tables, linear = fr.models.linear_twins(tables, features)
    model = fr.models.deepfm((*tables, *linear_tables), features, linear=linear, sizes=(16,))
    kind = {"sparse": fr.optim.adagrad(0.2), "dense": fr.optim.dense(torch.optim.Adam, lr=0.01)}
    step = fr.train_step(fr.models.loss(model), **kind, has_aux=True, merge=fr.models.merge_stats)
    u, i, label = generated()

    def batch(rows):
        ids = fr.KeyedJaggedTensor.from_lengths(
            ("user", "item"), torch.cat([u[rows], i[rows]]), torch.ones(2 * len(rows), dtype=torch.int64)
        )
        return fr.Batch(ids, label[rows])

    state, held = step.init(model.init(fr.key(0))), [batch(torch.arange(8000, ROWS))]
    for n in range(80):
        state, _ = step(state, batch(torch.arange(500 * n, 500 * n + 500) % 8000))
    auc = lambda tables: fr.evaluate(model.apply, fr.Params(tables, state.dense), held, {"auc": fr.metrics.exact_auc})[
        "auc"
    ]
    found = {dtype: auc(fr.quantize(state.tables, dtype)) for dtype in ("int8", "int4", "int2")}
    floats = auc(state.tables)
    assert floats > 0.65
    assert abs(found["int8"] - floats) <= 0.0005 and abs(found["int4"] - floats) <= 0.005
    # rows with large errors do change the AUC
    assert abs(found["int2"] - floats) > 0.0005

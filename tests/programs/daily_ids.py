"""A model whose ids come and go, for the tests of vocabularies, on ranks too: tables, a loss and batches."""

import torch

import funcrec as fr

KEY, DIM = fr.key(0), 3
USERS, ITEMS = fr.vocabulary(256, unknown=1), fr.vocabulary(128, policy="lfu", admit=2)
FEATURES = (
    fr.FeatureConfig("user", table="user"),
    fr.FeatureConfig("friends", table="user", pooling="mean"),
    fr.FeatureConfig("closest", table="user", pooling="max", column="friends"),
    fr.FeatureConfig("item", table="item"),
    fr.FeatureConfig("day", table="day"),
)
COLUMNS = {"user": 400, "friends": 400, "item": 300, "day": 7}  # the ids of each column lie below the number

ONE_AXIS = {
    "row_wise": fr.row_wise("x"), "table_wise": fr.table_wise("x", rank=1), "column_wise": fr.column_wise("x"),
    "replicated": fr.replicated(),
}  # fmt: skip
TWO_AXES = {
    "table_row_wise": fr.table_row_wise(("x", "y"), rank=1),
    "table_column_wise": fr.table_column_wise(("x", "y"), rank=0), "grid": fr.grid(("x", "y")),
}  # fmt: skip
SPARSE = {"adam": fr.optim.adam(0.1), "rowwise_adagrad": fr.optim.rowwise_adagrad(lr=0.3)}
# placements and optimizers in turn; rows have both
PAIRS = [("row_wise", "adam"), *zip([*ONE_AXIS, *TWO_AXES], ["rowwise_adagrad", "adam"] * 4, strict=False)]


def configs(num_users, num_items, dtype=torch.float32):
    """Return the configs of tables with so many rows."""
    normal = fr.normal(0.5)
    return (
        fr.TableConfig("user", num_users, DIM, dtype, normal),
        fr.TableConfig("item", num_items, DIM, dtype, normal),
        fr.TableConfig("day", 7, DIM, dtype),
    )


def dynamic(users=USERS, items=ITEMS, dtype=torch.float32):
    """Return tables of which two follow a vocabulary each."""
    user, item, day = configs(users.num_embeddings, items.num_embeddings, dtype)
    following = {
        "users": fr.VocabularyConfig(users, (user,), FEATURES[:3]),
        "items": fr.VocabularyConfig(items, (item,), FEATURES[3:4]),
    }
    return fr.dynamic_tables(fr.init(KEY, (user, item, day)), following, key=KEY)


def static(dtype=torch.float32):
    """Return tables with a row for each id."""
    return fr.init(KEY, configs(COLUMNS["user"], COLUMNS["item"], dtype))


def loss_fn(params, batch):
    return (predict(params, batch) - batch.label).square().mean()


def predict(params, batch):
    return fr.lookup(params.tables, batch.ids, FEATURES).values.sum(1) * params.dense


def batches(seed, count, size=16, ids_of=lambda ids: ids):
    """Return batches with 0 to 2 ids a bag, padded to one capacity."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lists = {
            c: [torch.randint(n, (k,), generator=g).tolist() for k in torch.randint(3, (size,), generator=g).tolist()]
            for c, n in COLUMNS.items()
        }
        lists |= {c: [[ids_of(x) for x in bag] for bag in lists[c]] for c in ("user", "friends", "item")}
        ids = fr.KeyedJaggedTensor.from_lists(lists).pad_to(8 * size)
        yield fr.Batch(ids, torch.rand(size, generator=g))


def step(sparse, **where):
    return fr.train_step(loss_fn, sparse=sparse, dense=fr.optim.dense(torch.optim.SGD, lr=0.01), **where)


def run(step, tables, given):
    """Return (losses f[steps], the last state, the last metrics) of a training."""
    state, losses = step.init(fr.Params(tables, torch.ones(()))), []
    for batch in given:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return torch.stack(losses), state, metrics


LOGGED = fr.logged(step(fr.optim.adam(0.1)), steps=0)


def begun():
    """Return a run of LOGGED after two batches."""
    run = LOGGED.init(fr.Params(dynamic(), torch.ones(())))
    for batch in batches(1, 2, 60):
        run, _ = LOGGED(run, batch)
    return run

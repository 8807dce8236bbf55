"""Training with whole tables beside training with a cache of few rows of the users, from one first state."""

import torch

import funcrec as fr
from funcrec.cached._table_store import has, read_own

NUM_ROWS, CAPACITY = 700, 128
KEY = fr.key(5)


def configs_of(dtype=torch.float32):
    user = fr.TableConfig("user", NUM_ROWS, 3, dtype, fr.normal(0.5))
    return [
        user,
        fr.TableConfig("user_bias", NUM_ROWS, 1, dtype, fr.uniform(0.1)),
        fr.TableConfig("item", 40, 2, dtype),
    ]


FEATURES = [
    fr.FeatureConfig("user", table="user", pooling="mean"),
    fr.FeatureConfig("user_bias", table="user_bias", column="user"),
    fr.FeatureConfig("item", table="item"),
]


def loss_fn(params, batch):
    vectors = fr.lookup(params.tables, batch.ids, FEATURES)
    scores = vectors.values.double().square().sum(1) * params.dense
    return (scores - batch.label).square().mean()


def rare(age, count):
    """Return a score by which the rows that were read least leave first."""
    return 100 * count - age


def batches_of(seed, count, num_bags=20):
    """Return batches of ids that come again, with bags of 0 to 4, padded to one capacity."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda most, *shape: torch.randint(most, shape, generator=g)
    out = []
    for _ in range(count):
        first = int(draw(NUM_ROWS))
        users = [((first + draw(150, n)) % NUM_ROWS).tolist() for n in draw(5, num_bags).tolist()]
        ids = {"user": users, "item": [[i] for i in draw(40, num_bags).tolist()]}
        out.append(fr.Batch(fr.KeyedJaggedTensor.from_lists(ids).pad_to(128), torch.randn(num_bags, generator=g)))
    return out


OPTIMIZERS = {
    "sgd": fr.optim.sgd(0.1),
    "adam": fr.optim.adam(0.05),
    "rowwise_adagrad": fr.optim.rowwise_adagrad(0.1),
    "adagrad": fr.optim.adagrad(0.1),
    "rounded": fr.optim.stochastic_rounding(fr.optim.adam(0.05), key=fr.key(3)),
    "rounded by whole rows": fr.optim.stochastic_rounding(fr.optim.rowwise_adagrad(0.1, max_norm=1.0), key=fr.key(3)),
    "clipped": fr.optim.stochastic_rounding(fr.optim.clip(fr.optim.rowwise_adagrad(0.1), max_norm=0.5), key=fr.key(3)),
}


class Both:
    """Training with whole tables, and with a cache of 128 rows of the users, from one first state.

    On a mesh both are placed by one plan, and their lookups are exact: rows lie on other ranks in a cache.
    """

    def __init__(
        self,
        name="adam",
        dtype=torch.float32,
        policy="lru",
        depth=1,
        jitted=False,
        path=None,
        mesh=None,
        plan=None,
        look_ahead=0,
    ):
        sparse, self.configs, self.mesh = OPTIMIZERS[name], configs_of(dtype), mesh
        tables = fr.init(KEY, self.configs)
        how = {"sparse": sparse, "dense": fr.optim.dense(torch.optim.SGD, lr=0.01), "admit": False}
        how |= {} if mesh is None else {"mesh": mesh, "plan": plan, "exact": True}
        wrap = (lambda f: fr.jit(f, donate=("state",))) if jitted else (lambda f: f)
        self.step = wrap(fr.train_step(loss_fn, **how))
        self.whole = self.step.init(fr.Params(tables, torch.ones((), dtype=torch.float64)))
        self.store = fr.table_store(self.configs[:2], sparse, key=KEY, path=path, durable=False, mesh=mesh)
        config = fr.CacheConfig(self.store, CAPACITY, FEATURES[:2], policy)
        self.first = fr.cached_tables({"item": tables["item"].clone()}, {"users": config})
        self.cached = fr.cached_step(
            wrap(fr.train_step(loss_fn, **how)), {"users": self.store}, depth=depth, look_ahead=look_ahead
        )
        self.state = self.cached.init(fr.Params(self.first, torch.ones((), dtype=torch.float64)))

    def records(self):
        """Return the records that the whole tables have."""
        from funcrec.cached._records import packed

        whole = self.whole if self.mesh is None else fr.gather_state(self.whole, self.mesh)
        return packed(self.store.fields, whole.tables, whole.slots)

    def check_all(self):
        """Every row and slot in the store, after a commit, and the rest of the state, has the bits of whole tables."""
        self.cached.commit(self.state)
        rows = torch.arange(NUM_ROWS)
        assert torch.equal(read_own(self.store, rows), self.records()[has(self.store, rows)])
        assert torch.equal(self.state.dense, self.whole.dense)
        items = lambda x: (x if self.mesh is None else fr.gather_state(x, self.mesh)).tables["item"]
        assert torch.equal(items(self.state), items(self.whole))

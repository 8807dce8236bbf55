"""The values in the arguments of public calls (`public_calls`), and the class of a call."""

import inspect
from typing import Any, NamedTuple

import torch

import funcrec as fr
from funcrec import data, metrics, models, optim

JT, KJT, KT, RG = fr.JaggedTensor, fr.KeyedJaggedTensor, fr.KeyedTensor, fr.RowGrads
FC, TC, P = fr.FeatureConfig, fr.TableConfig, fr.P
i64 = lambda *numbers: torch.tensor(numbers, dtype=torch.int64)
f32 = lambda *shape: torch.ones(shape)

MESH = fr.Mesh.emulated(a=2, b=2)
KEY = fr.key(0)
CONFIGS = (TC("t", 6, 4), TC("u", 5, 4))
TABLES = fr.init(KEY, CONFIGS)
FEATURES = (FC("x", table="t"), FC("y", table="u", pooling="mean"))
SEQUENCES = (FC("x", table="t", pooling="none"),)
IDS = KJT.from_lists({"x": [[0, 1], [], [2], [5]], "y": [[2], [0, 4], [1], [1]]})
WEIGHTED = KJT.from_lists({"x": [[0, 1], []]}, weights={"x": [[0.5, 2.0], []]})
BAGS = JT.from_lists([[1, 2], [], [3]])
ACTS = fr.lookup(TABLES, IDS, FEATURES)
ROWS = fr.lookup_sequence(TABLES, IDS, SEQUENCES)
DENSE = {"w": f32(8), "b": f32()}
USERS, _, TURNOVER = fr.admit(fr.vocabulary(128, ttl=5, unknown=1), i64(1, 2, 3))
USER_ITEMS = {k: x for k, x in fr.vocabulary_items(USERS).items() if k != "rows"}
USER_TABLES = {"user": f32(129, 2)}
USER_CONFIG = fr.VocabularyConfig(USERS, (TC("user", 129, 2),), (FC("x", table="user"),))
QUANTIZED, FAKE = fr.quantize(TABLES), fr.fake_quantize(TABLES, scales="learned")
PARAMS = fr.Params(TABLES, DENSE)
BATCH = fr.Batch(IDS, f32(4))
GRADS = fr.lookup_transpose(ACTS, IDS, FEATURES, CONFIGS)
PLAN = fr.Plan({"t": fr.row_wise("a"), "u": fr.table_wise("b", rank=1)})
SPARSE, OPT = optim.adagrad(lr=0.1), optim.dense(torch.optim.Adam, lr=0.1)


def loss_fn(params, batch):
    z = fr.lookup(params.tables, batch.ids, FEATURES).values @ params.dense["w"] + params.dense["b"]
    return (z - batch.label).square().mean()


def outputs(params, batch):
    return fr.lookup(params.tables, batch.ids, FEATURES).values @ params.dense["w"]


OF_ROWS = fr.of_rows(loss_fn, PARAMS, BATCH)
EXAMPLES = fr.per_example_grads(loss_fn)(PARAMS, BATCH)[1]
STEP = fr.train_step(loss_fn, sparse=SPARSE, dense=OPT)
SWEPT = fr.sweep(
    lambda lr: fr.train_step(loss_fn, sparse=SPARSE, dense=fr.optim.dense(torch.optim.SGD, lr=lr)), {"lr": [0.1, 0.2]}
)
PRIVATE = fr.private_step(loss_fn, sparse=optim.sgd(lr=0.1), dense=OPT, max_norm=1.0, noise_multiplier=1.0)
STATE = STEP.init(PARAMS)
ON_MESH = fr.train_step(loss_fn, sparse=SPARSE, dense=OPT, mesh=MESH, plan=PLAN)
HELD = ON_MESH.init(PARAMS)
LOGGED = fr.logged(STEP, steps=1, rows=4).init(STATE)
COPIES = fr.Plan({"t": fr.replicated(), "u": fr.replicated()}, replicas="b")
APART = fr.reshard(STATE, COPIES, mesh=MESH, sparse=SPARSE)
SHARDED = fr.shard_tables(TABLES, PLAN, MESH)
PARTS = {f.table: fr.Tower([f], fr.nn.mlp((4, 2), dropout=0.1)) for f in FEATURES}
BOTH = fr.towers(PARTS)
MODEL = models.lr((TC("t", 6, 1), TC("u", 5, 1)), FEATURES)
MODEL_PARAMS = MODEL.init(KEY)
TOWERS = models.two_tower(CONFIGS, FEATURES[:1], FEATURES[1:], sizes=(8, 3))
TOWER_PARAMS = TOWERS.init(KEY)
RANDOM = data.random_rows(KEY, {"x": 6, "y": 5}, num_rows=8)
RATINGS = data.Ratings(
    user=i64(*range(20)) % 3, item=i64(*range(20)) % 4, rating=torch.arange(20) % 5 + 1.0, timestamp=i64(*range(20)),
    users={n: i64(0, 1, 0) for n in ("age", "gender", "occupation", "zip_code")},
    items={"release_year": i64(0, 0, 1, 1)},
    genre=JT.from_lists([[0], [1], [0, 1], []]),
    vocabularies=dict.fromkeys(("user_id", "item_id", "age", "gender", "occupation", "zip_code", "release_year",
            "genre"), ("p", "q", "r", "s")),
)  # fmt: skip
SCORES, LABELS = torch.tensor([0.2, 0.8, 0.5]), torch.tensor([0.0, 1.0, 1.0])
AUC, LOSS = metrics.auc(16), metrics.log_loss()

SCHEMA = data.Schema(dense=("price",), categorical=("item",), multivalued=("tags",))
TABLE = {"item": ["a", None], "price": [1.0, 2.0], "tags": [["x"], []]}
ENCODING = data.fit_encoding(TABLE, SCHEMA)


class Call(NamedTuple):
    """One good call: `fn(**good)` works. `skip` names arguments whose wrong values another row tries."""

    name: str
    fn: Any
    good: dict
    skip: tuple[str, ...] = ()


def on_ranks(f):
    """Return a function of keywords that calls f with one rank's x on MESH."""

    def run(**kwargs):
        x = kwargs.pop("x", f32(4, 4))
        if isinstance(x, torch.Tensor) and x.shape == (4, 4):
            inside = lambda x: (f(x, **kwargs), fr.psum(f32(), ("a", "b")))[1]
            return fr.shard_map(inside, mesh=MESH, in_specs=P(), out_specs=P())(x)
        return fr.shard_map(lambda: (f(x, **kwargs), f32())[1], mesh=MESH, in_specs=(), out_specs=P())()

    return with_signature(f, run)


def with_signature(f, run):
    run.__signature__, run.__wrapped__ = inspect.signature(f), f
    return run


def first(f):
    """Return a function that takes f's first item. Errors at the call and at the first batch are then seen."""
    return with_signature(f, lambda **kwargs: next(iter(f(**kwargs)), None))


def entered(f):
    """Return a function that enters f's context. Errors at the call and at the context's start are then seen."""

    def run(**kwargs):
        with f(**kwargs):
            pass

    return with_signature(f, run)


def rows(prefix: str, **calls) -> list[Call]:
    return [Call(f"{prefix}.{name}", *spec) if isinstance(spec, tuple) else spec for name, spec in calls.items()]


def collective(name: str, **more) -> tuple:
    return on_ranks(getattr(fr, name)), {"x": f32(4, 4), "axis_name": "a", **more}

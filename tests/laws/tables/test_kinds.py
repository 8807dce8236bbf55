"""A kind of tables that funcrec does not know goes wherever plain tables go: `KINDS` is all that lookups ask.

row_i = base_i + left_i @ right        the parts of one table, of which features know only the whole
"""

from collections.abc import Mapping

import pytest
import torch

import funcrec as fr
from funcrec.tables import KINDS, Kind, LookupResult
from funcrec.testing import assert_trees_close

R, D, K = 7, 3, 2
TABLE = (torch.arange(R * D, dtype=torch.float64) * 0.9).sin().reshape(R, D)
LEFT = (torch.arange(R * K, dtype=torch.float64) * 0.7).cos().reshape(R, K)
RIGHT = (torch.arange(K * D, dtype=torch.float64) * 1.3).sin().reshape(K, D)
POOLED = (
    fr.FeatureConfig("sum", table="item", column="a", weighted=True),
    fr.FeatureConfig("mean", table="item", column="b", pooling="mean", hash=fr.modulo()),
)
SEQUENCES = (fr.FeatureConfig("seq", table="item", column="a", pooling="none", weighted=True, max_length=2),)
IDS = fr.KeyedJaggedTensor.from_lists(
    {"a": [[1, 1, 6], [], [0, -1]], "b": [[9], [2, 3], [4]]},
    weights={"a": [[0.5, 2.0, 1.0], [], [3.0, 1.0]], "b": [[1.0], [1.0] * 2, [1.0]]}
)  # fmt: skip


@fr.pytree
class LowRank:
    """base f[R, D], left f[R, K], right f[K, D]: a table that is trained as a sum."""

    base: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def items(self):
        return {n: getattr(self, n) for n in self}.items()

    def keys(self):
        return list(self)

    def values(self):
        return [getattr(self, n) for n in self]

    def __getitem__(self, part):
        return getattr(self, part)

    def __iter__(self):
        return iter(("base", "left", "right"))

    def __len__(self):
        return 3


def read_low_rank(tables, ids, features, implementation=None):
    """The lookup is linear in base, and in left and right: two plain lookups,
    and what they gave of left for the gradient of right."""
    is_pooled = features[0].pooling != "none"
    reads = {n: KINDS[dict].read({"item": tables[n]}, ids, features, implementation) for n in ("base", "left")}
    base, left = (
        {f.name: r.out[f.name] if is_pooled else r.out[f.name].values for f in features} for r in reads.values()
    )
    rows = {k: base[k] + left[k] @ tables.right for k in base}
    if is_pooled:
        out = fr.KeyedTensor.from_dict(rows)
    else:
        out = {k: fr.JaggedTensor(rows[k], x.offsets, x.weights) for k, x in reads["base"].out.items()}

    def transpose(d, saved):
        base_saved, left_saved, left, right = saved
        d_left = {k: d[k] @ right.T for k in left}
        d_left = fr.KeyedTensor.from_dict(d_left) if is_pooled else d_left
        d_right = sum(left[k].T @ d[k] for k in left)
        return {
            "base": reads["base"].transpose(d, base_saved)["item"],
            "left": reads["left"].transpose(d_left, left_saved)["item"],
            "right": fr.RowGrads.from_entries(torch.arange(K), d_right, num_embeddings=K),
        }

    return LookupResult(out, lambda: (reads["base"].saved(), reads["left"].saved(), left, tables.right), transpose)


Mapping.register(LowRank)


@pytest.fixture(autouse=True)
def low_rank(monkeypatch):
    shapes = lambda tables: {"item": tuple(tables.base.shape)}
    monkeypatch.setitem(KINDS, LowRank, Kind(shapes, read_low_rank))
    return LowRank(TABLE, LEFT, RIGHT)


def loss_fn(params, ids):
    """Reads bags and sequences, twice."""
    acts, seq = fr.lookup(params.tables, ids, POOLED), fr.lookup_sequence(params.tables, ids, SEQUENCES)["seq"]
    again = fr.lookup(params.tables, ids, POOLED[:1])["sum"]
    x = acts["sum"] * acts["mean"].cos() + again.square() + seq.to_padded(2).sum(1)
    return (x @ params.dense).sin().mean()


DENSE = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)
whole = lambda t: {"item": t["base"] + t["left"] @ t["right"]}


def by_autograd(tables):
    """The loss and its gradients by torch.func alone, the table written out."""
    f = lambda parts, dense: loss_fn(fr.Params(whole(parts), dense), IDS)
    (d_parts, d_dense), loss = torch.func.grad_and_value(f, argnums=(0, 1))(dict(tables.items()), DENSE)
    return loss, d_parts, d_dense


def test_a_third_kind_is_looked_up(low_rank):
    """Its lookups are those of the table that it stands for; one of no features is empty, as it is of plain tables."""
    pooled = fr.lookup(low_rank, IDS, POOLED)
    assert_trees_close(pooled, fr.lookup(whole(low_rank), IDS, POOLED), rtol=1e-12, atol=1e-12)
    rows = fr.lookup_sequence(low_rank, IDS, SEQUENCES)["seq"]
    assert_trees_close(rows, fr.lookup_sequence(whole(low_rank), IDS, SEQUENCES)["seq"], rtol=1e-12, atol=1e-12)
    assert fr.lookup(low_rank, IDS, ()).values.shape == (3, 0) and fr.lookup_sequence(low_rank, IDS, ()) == {}


def test_a_third_kind_is_differentiated(low_rank):
    """value_and_grad gives the gradient of each part as rows: those that torch.func gives densely."""
    loss, d_parts, d_dense = by_autograd(low_rank)
    got, grads = fr.value_and_grad(loss_fn)(fr.Params(low_rank, DENSE), IDS)
    made = {n: g.to_dense() for n, g in grads.tables.items()}
    assert_trees_close((got, made, grads.dense), (loss, d_parts, d_dense), rtol=1e-12, atol=1e-12)


def test_a_third_kind_is_trained(low_rank):
    """A step's tables are of its kind, each part moved along its gradient, compiled and donated too."""
    loss, d_parts, d_dense = by_autograd(low_rank)
    want = {n: t - 0.1 * d_parts[n] for n, t in low_rank.items()}
    step = fr.train_step(loss_fn, sparse=fr.optim.sgd(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    for run in (step, fr.jit(step, donate=("state",))):
        state, metrics = run(step.init(fr.Params(fr.copy(low_rank), DENSE.clone())), IDS)
        assert type(state.tables) is LowRank
        got = dict(state.tables.items()), state.dense, metrics["loss"]
        assert_trees_close(got, (want, DENSE - 0.1 * d_dense, loss), rtol=1e-9, atol=1e-9)


def started(low_rank):
    step = fr.train_step(loss_fn, sparse=fr.optim.adam(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    return step, step(step.init(fr.Params(fr.copy(low_rank), DENSE.clone())), IDS)[0]


def test_a_third_kind_is_saved(low_rank, tmp_path):
    """A state comes back with its kind and every bit, and goes on as it would have."""
    step, state = started(low_rank)
    back = fr.load(fr.save(tmp_path / "state", state))
    assert type(back.tables) is LowRank
    assert_trees_close(back, state, rtol=0, atol=0)
    assert_trees_close(step(back, IDS), step(state, IDS), rtol=0, atol=0)


def test_a_third_kind_is_logged(low_rank):
    """Steps are undone, and their rows told, part by part."""
    step, state = started(low_rank)
    logged = fr.logged(step, steps=2, rows=R)
    begun = logged.init(state)
    moved, _ = logged(begun, IDS)
    changed = fr.delta(moved, since=0)
    assert {n: len(own[0].rows) for n, own in changed.tables.items()} == {"base": 6, "left": 6, "right": K}
    assert_trees_close(fr.rewind(moved, 1).state, state, rtol=0, atol=0)


def test_a_third_kind_is_exported(low_rank, tmp_path):
    """A package has its lookups, for any number of bags."""
    predict = lambda params, batch: fr.lookup(params.tables, batch.ids, POOLED).values @ params.dense.repeat(2)
    params = fr.tree.map(lambda x: x.float(), fr.Params(low_rank, DENSE))
    ids = fr.KeyedJaggedTensor.from_lists(IDS.to_lists(), weights={"a": [[0.5, 2.0, 1.0], [], [3.0, 1.0]]})
    package = fr.load_package(fr.export(predict, params, fr.Batch(ids), tmp_path / "package"))
    torch.testing.assert_close(package(fr.Batch(ids)), predict(params, fr.Batch(ids)))


def test_what_a_third_kind_does_not_tell_is_refused(low_rank):
    """It is placed on no mesh, quantised and read as if quantised by nobody who does not know how."""
    _, state = started(low_rank)
    mesh, plan = fr.Mesh.emulated(x=2), fr.Plan({"item": fr.row_wise("x")})
    for call in (
        lambda: fr.shard_tables(low_rank, plan, mesh),
        lambda: fr.reshard(state, plan, mesh=mesh, sparse=fr.optim.adam(0.1)),
        lambda: fr.quantize(low_rank),
        lambda: fr.fake_quantize(low_rank),
        lambda: fr.save_safetensors("never", low_rank),
    ):
        with pytest.raises(TypeError, match="LowRank"):
            call()


def test_a_third_kind_tells_how_it_is_quantised(low_rank, monkeypatch):
    """`quantize` gives what its kind's row says, of the arguments that it was given."""
    codes = lambda tables, dtype, key: fr.quantize({"item": whole(tables)["item"]}, dtype)
    monkeypatch.setitem(KINDS, LowRank, KINDS[LowRank]._replace(quantized=codes))
    assert_trees_close(fr.quantize(low_rank, "int4"), fr.quantize(whole(low_rank), "int4"), rtol=0, atol=0)


def test_a_third_kind_is_checked(low_rank):
    """Features, ids and their values are held to the names and shapes that the kind tells, by every public call."""
    unknown = [fr.FeatureConfig("a", table="base")]
    for call in (fr.lookup, lambda t, ids, f: fr.validate(ids, f, t)):
        with pytest.raises(KeyError, match=r"`features\['a'\].table` is not a table(.|\n)*one of \['item'\]"):
            call(low_rank, IDS, unknown)
    outside = fr.KeyedJaggedTensor.from_lists({"a": [[R]]})
    with pytest.raises(fr.CheckError, match=f"0 <= id < {R}"):
        fr.checked(fr.lookup)(low_rank, outside, [fr.FeatureConfig("a", table="item")])
    back = fr.lookup_transpose(fr.lookup(low_rank, IDS, POOLED), IDS, POOLED, low_rank)
    assert {n: g.to_dense().shape for n, g in back.items()} == {"item": (R, D)}


def test_weights_that_a_third_kind_cannot_follow_are_refused(low_rank):
    """A derivative inside the loss by the ids' weights needs rows by
    themselves: refused, and nothing is lost without a word."""

    def loss(params, w):
        inner = lambda w: fr.lookup(
            params.tables, fr.KeyedJaggedTensor(IDS.values, IDS.offsets, w, None, IDS.keys), POOLED
        ).values.sum()
        return torch.func.grad(inner)(w).square().sum()  # fmt: skip

    with pytest.raises(TypeError, match=r"the tables are LowRank(.|\n)*lookup_sequence"):
        fr.value_and_grad(loss)(fr.Params(low_rank, DENSE), IDS.weights)


def test_parts_of_one_name_are_refused(monkeypatch):
    """Two tensors of one name would share one gradient: the kind is refused before the loss runs."""

    @fr.pytree
    class Sum:
        base: dict[str, torch.Tensor]
        delta: dict[str, torch.Tensor]

        def __iter__(self):
            return iter({**self.base, **self.delta})

        def __len__(self):
            return len({**self.base, **self.delta})

        items = lambda self: {**self.base, **self.delta}.items()
        __getitem__ = lambda self, part: {**self.base, **self.delta}[part]

    Mapping.register(Sum)
    monkeypatch.setitem(KINDS, Sum, Kind(lambda t: {"item": (R, D)}, None))
    params = fr.Params(Sum({"item": TABLE}, {"item": TABLE.clone()}), DENSE)
    never = lambda params: pytest.fail("the loss was run")
    with pytest.raises(ValueError, match=r"the parts of Sum(.|\n)*\['item', 'item'\](.|\n)*name the parts apart"):
        fr.value_and_grad(never)(params)

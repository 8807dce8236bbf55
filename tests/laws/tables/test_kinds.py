"""A kind of tables that funcrec does not know goes wherever plain tables go. The library asks only `KINDS`.

row_i = base_i + scale · left_i @ right        the parts of one table, of which features know only the whole
"""

from collections import ChainMap, OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import funcrec as fr
from funcrec.checkpoint import load_as
from funcrec.tables import KINDS, Kind, LookupResult, Placed
from funcrec.testing import assert_trees_close

R, D, K = 7, 3, 2
TABLE = (torch.arange(R * D, dtype=torch.float64) * 0.9).sin().reshape(R, D)
LEFT = (torch.arange(R * K, dtype=torch.float64) * 0.7).cos().reshape(R, K)
RIGHT = (torch.arange(K * D, dtype=torch.float64) * 1.3).sin().reshape(K, D)
POOLED = (
    fr.FeatureConfig("sum", table="item", column="a", weighted=True),
    fr.FeatureConfig("mean", table="item", column="b", pooling="mean", hash=fr.modulo()),
)
SCALE = torch.tensor(1.7, dtype=torch.float64)
SEQUENCES = (fr.FeatureConfig("seq", table="item", column="a", pooling="none", weighted=True, max_length=2),)
IDS = fr.KeyedJaggedTensor.from_lists(
    {"a": [[1, 1, 6], [], [0, -1]], "b": [[9], [2, 3], [4]]},
    weights={"a": [[0.5, 2.0, 1.0], [], [3.0, 1.0]], "b": [[1.0], [1.0] * 2, [1.0]]}
)  # fmt: skip


@fr.pytree
class LowRank:
    """A table that is trained as a sum: base f[R, D], left f[R, K], right f[K, D]. scale f[] is no part."""

    base: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    scale: torch.Tensor

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
    """Return the lookup result, linear in base and in left and right. One lookup reads base and left, whole or on
    ranks. The rows of left stay for the gradient of right."""
    parts, scale = (dict(tables), tables.scale) if type(tables) is LowRank else (tables, tables.rest["scale"])
    is_pooled, right, names = features[0].pooling != "none", parts["right"], [f.name for f in features]
    both = [replace(f, name=f"{p} {f.name}", table=p, column=f.key) for p in ("base", "left") for f in features]
    read = KINDS[type(parts)].read(parts, ids, both, implementation)
    base, left = ({k: read.out[f"{p} {k}"] for k in names} for p in ("base", "left"))
    values = lambda x: x if is_pooled else x.values
    rows = {k: values(base[k]) + scale * values(left[k]) @ right for k in names}
    if is_pooled:
        out = fr.KeyedTensor.from_dict(rows)
    else:
        out = {k: fr.JaggedTensor(rows[k], x.offsets, x.weights) for k, x in base.items()}

    def transpose(d, saved):
        read_saved, left, right, scale = saved
        d_both = {f"base {k}": d[k] for k in names} | {f"left {k}": scale * d[k] @ right.T for k in names}
        d_right = sum(scale * left[k].T @ d[k] for k in names)
        return read.transpose(fr.KeyedTensor.from_dict(d_both) if is_pooled else d_both, read_saved) | {
            "right": fr.RowGrads.from_entries(torch.arange(K), d_right, num_embeddings=K)
        }

    return LookupResult(out, lambda: (read.saved(), {k: values(x) for k, x in left.items()}, right, scale), transpose)


Mapping.register(LowRank)


@pytest.fixture(autouse=True)
def low_rank(monkeypatch):
    shapes = lambda tables: {"item": tuple(tables.base.shape)}
    monkeypatch.setitem(KINDS, LowRank, Kind(shapes, read_low_rank))
    return LowRank(TABLE, LEFT, RIGHT, SCALE)


def loss_fn(params, ids):
    """Return a loss that reads bags twice, and sequences."""
    acts, seq = fr.lookup(params.tables, ids, POOLED), fr.lookup_sequence(params.tables, ids, SEQUENCES)["seq"]
    again = fr.lookup(params.tables, ids, POOLED[:1])["sum"]
    x = acts["sum"] * acts["mean"].cos() + again.square() + seq.to_padded(2).sum(1)
    return (x @ params.dense).sin().mean()


DENSE = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)
whole = lambda t: {"item": t["base"] + SCALE * t["left"] @ t["right"]}


def by_autograd(tables):
    """Return the loss and its gradients by torch.func alone, with the table written out."""
    f = lambda parts, dense: loss_fn(fr.Params(whole(parts), dense), IDS)
    (d_parts, d_dense), loss = torch.func.grad_and_value(f, argnums=(0, 1))(dict(tables.items()), DENSE)
    return loss, d_parts, d_dense


def test_a_third_kind_is_looked_up(low_rank):
    """Lookups equal those of the dense table. A lookup of no features is empty, as for plain tables."""
    pooled = fr.lookup(low_rank, IDS, POOLED)
    assert_trees_close(pooled, fr.lookup(whole(low_rank), IDS, POOLED), rtol=1e-12, atol=1e-12)
    rows = fr.lookup_sequence(low_rank, IDS, SEQUENCES)["seq"]
    assert_trees_close(rows, fr.lookup_sequence(whole(low_rank), IDS, SEQUENCES)["seq"], rtol=1e-12, atol=1e-12)
    assert fr.lookup(low_rank, IDS, ()).values.shape == (3, 0) and fr.lookup_sequence(low_rank, IDS, ()) == {}


def test_a_third_kind_is_differentiated(low_rank):
    """value_and_grad gives row gradients for each part. These gradients equal the dense gradients of torch.func."""
    loss, d_parts, d_dense = by_autograd(low_rank)
    got, grads = fr.value_and_grad(loss_fn)(fr.Params(low_rank, DENSE), IDS)
    made = {n: g.to_dense() for n, g in grads.tables.items()}
    assert_trees_close((got, made, grads.dense), (loss, d_parts, d_dense), rtol=1e-12, atol=1e-12)


def test_a_third_kind_is_trained(low_rank, interpreted):
    """The tables of a step keep their kind. Each part moves along its gradient, even staged and donated."""
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
    """A state loads with its kind and every bit, and trains on in the same way."""
    step, state = started(low_rank)
    back = fr.load(fr.save(tmp_path / "state", state))
    assert type(back.tables) is LowRank
    assert_trees_close(back, state, rtol=0, atol=0)
    assert_trees_close(step(back, IDS), step(state, IDS), rtol=0, atol=0)


def test_a_third_kind_is_logged(low_rank):
    """Steps are undone. Deltas name the rows of steps, part by part."""
    step, state = started(low_rank)
    logged = fr.logged(step, steps=2, rows=R)
    begun = logged.init(state)
    moved, _ = logged(begun, IDS)
    changed = fr.delta(moved, since=0)
    assert {n: len(own[0].rows) for n, own in changed.tables.items()} == {"base": 6, "left": 6, "right": K}
    assert_trees_close(fr.rewind(moved, 1).state, state, rtol=0, atol=0)


def test_a_third_kind_is_exported(low_rank, tmp_path):
    """A package of the third kind gives the lookups of the kind, for any number of bags."""
    predict = lambda params, batch: fr.lookup(params.tables, batch.ids, POOLED).values @ params.dense.repeat(2)
    params = fr.tree.map(lambda x: x.float(), fr.Params(low_rank, DENSE))
    ids = fr.KeyedJaggedTensor.from_lists(IDS.to_lists(), weights={"a": [[0.5, 2.0, 1.0], [], [3.0, 1.0]]})
    package = fr.load_package(fr.export(predict, params, fr.Batch(ids), tmp_path / "package"))
    torch.testing.assert_close(package(fr.Batch(ids)), predict(params, fr.Batch(ids)))


def test_what_a_third_kind_does_not_tell_is_refused(low_rank):
    """The third kind is not quantised, not read as if quantised, and not written as tensors alone."""
    for call in (
        lambda: fr.quantize(low_rank),
        lambda: fr.fake_quantize(low_rank),
        lambda: fr.save_safetensors("never", low_rank),
    ):
        with pytest.raises(TypeError, match="LowRank"):
            call()


def test_a_third_kind_tells_how_it_is_quantised(low_rank, monkeypatch):
    """`quantize` returns the result of the `quantized` entry of the kind. The entry gets the arguments of the call."""
    codes = lambda tables, dtype, key: fr.quantize({"item": whole(tables)["item"]}, dtype)
    monkeypatch.setitem(KINDS, LowRank, KINDS[LowRank]._replace(quantized=codes))
    assert_trees_close(fr.quantize(low_rank, "int4"), fr.quantize(whole(low_rank), "int4"), rtol=0, atol=0)


# -- on a mesh ---------------------------------------------------------------------------------------------------


MESH = fr.Mesh.emulated(x=3)
PLAN = fr.Plan({"base": fr.row_wise("x"), "left": fr.table_wise("x", rank=1), "right": fr.replicated()})
OTHER_MESH = fr.Mesh.emulated(y=2, z=2)
OTHER_PLAN = fr.Plan({"base": fr.column_wise("y"), "left": fr.row_wise("y"), "right": fr.replicated()})
STEP = {"sparse": fr.optim.adam(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1), "mesh": MESH, "plan": PLAN}
PLACED = Placed(
    joined=lambda sharded, parts: LowRank(**parts, **sharded.rest),
    shapes=lambda sharded: {"item": dict(sharded.layout.shapes)["base"]},
    read=read_low_rank,
    rest=lambda tables: {"scale": tables.scale},
    whole=("right",),
)


@pytest.fixture
def placed(low_rank, monkeypatch):
    monkeypatch.setitem(KINDS, LowRank, KINDS[LowRank]._replace(placed=PLACED))
    return fr.shard_tables(low_rank, PLAN, MESH)


def test_a_third_kind_is_placed(low_rank, placed):
    """The lookups of each rank are those of the whole tables, also of keys with different numbers of bags. The parts
    come back with every bit."""
    pooled = lambda tables, ids: fr.lookup(tables, ids, POOLED).values
    rows = lambda tables, ids: fr.lookup_sequence(tables, ids, SEQUENCES)["seq"].to_padded(2)
    for read in (pooled, rows):
        on_ranks = fr.shard_map(read, mesh=MESH, in_specs=(placed.specs(), fr.P("x")), out_specs=fr.P("x"))
        assert_trees_close(on_ranks(placed, IDS), read(low_rank, IDS), rtol=1e-12, atol=1e-12)
    columns = [fr.FeatureConfig("few", table="item"), fr.FeatureConfig("many", table="item")]
    lists = {"few": [[1]] * 6, "many": [[0], [3], [1, 2], [], [5], [4]]}
    shared = fr.dedup_bags(fr.KeyedJaggedTensor.from_lists(lists), num_parts=3)
    each = lambda tables, ids: fr.lookup_each(tables, ids, columns)
    on_ranks = fr.shard_map(each, mesh=MESH, in_specs=(placed.specs(), fr.P("x")), out_specs=fr.P("x"))
    assert shared.strides == (3, 6)
    assert_trees_close(on_ranks(placed, shared), each(low_rank, shared), rtol=1e-12, atol=1e-12)
    back = fr.gather_tables(placed, MESH)
    assert type(back) is LowRank
    assert_trees_close(back, low_rank, rtol=0, atol=0)


def test_a_part_that_is_read_whole_is_on_every_rank(low_rank, placed, tmp_path):
    """It shares no bank with a table of its width, so that its name is that of its rows. A plan that cuts it is refused
    wherever tables are placed."""
    same = fr.Plan({n: fr.replicated() for n in low_rank})
    wide = replace(low_rank, base=low_rank.base.float(), left=low_rank.left.float(), right=low_rank.right.float())
    wide = replace(wide, scale=SCALE.float(), left=torch.randn(R, D), right=torch.randn(D, D))
    read = lambda tables, ids: fr.lookup(tables, ids, POOLED).values
    for plan in (same, OTHER_PLAN):
        mesh = MESH if plan is same else OTHER_MESH
        axes = fr.P(mesh.axis_names)
        tables = fr.shard_tables(wide, plan, mesh)
        ids = IDS if mesh is MESH else fr.KeyedJaggedTensor.from_lists({k: [[1], [2], [3], [1, 2]] for k in "ab"})
        ids = ids if mesh is MESH else replace(ids, weights=torch.ones(ids.values.shape[0], dtype=torch.float64))
        on_ranks = fr.shard_map(read, mesh=mesh, in_specs=(tables.specs(), axes), out_specs=axes)
        assert_trees_close(on_ranks(tables, ids), read(wide, ids), rtol=1e-5, atol=1e-5)
    cut = fr.Plan({"base": fr.row_wise("x"), "left": fr.row_wise("x"), "right": fr.row_wise("x")})
    _, state = started(low_rank)
    path = fr.save(tmp_path / "state", state)
    for call in (
        lambda: fr.shard_tables(low_rank, cut, MESH),
        lambda: fr.reshard(state, cut, mesh=MESH, sparse=STEP["sparse"]),
        lambda: fr.load(path, plan=cut, mesh=MESH, sparse=STEP["sparse"]),
    ):
        with pytest.raises(ValueError, match=r"the plan cuts 'right', which is read whole\.\n  got   row_wise"):
            call()


def test_a_third_kind_is_trained_on_a_mesh(low_rank, placed, interpreted):
    """A step on ranks moves each part as a step of one process does, even staged and donated."""
    _, whole_state = started(low_rank)
    step = fr.train_step(loss_fn, **STEP)
    for run in (step, fr.jit(step, donate=("state",))):
        state, _ = run(step.init(fr.Params(fr.copy(low_rank), DENSE.clone())), IDS)
        assert_trees_close(fr.gather_state(state, MESH), whole_state, rtol=1e-9, atol=1e-9)


def test_a_third_kind_is_placed_anew(low_rank, placed, tmp_path):
    """A state keeps its type and every bit in another plan, in a file, and on the ranks that load it. Training
    continues."""
    step, how = fr.train_step(loss_fn, **STEP), {"plan": OTHER_PLAN, "mesh": OTHER_MESH, "sparse": STEP["sparse"]}
    state, _ = step(step.init(fr.Params(low_rank, DENSE)), IDS)
    whole_state = fr.gather_state(state, MESH)
    assert type(whole_state.tables) is LowRank
    path = fr.save(tmp_path / "state", state)
    moved = fr.reshard(state, **how, from_mesh=MESH)
    for own in (moved, fr.reshard(whole_state, **how), fr.load(path, **how), load_as(path, moved, mesh=OTHER_MESH)):
        assert type(own.tables) is fr.ShardedTables and own.tables.layout == moved.tables.layout
        assert_trees_close(fr.gather_state(own, OTHER_MESH), whole_state, rtol=0, atol=0)
    assert_trees_close(fr.load(path), whole_state, rtol=0, atol=0)
    back = fr.reshard(moved, PLAN, mesh=MESH, sparse=STEP["sparse"], from_mesh=OTHER_MESH)
    assert_trees_close(step(back, IDS), step(state, IDS), rtol=0, atol=0)


def test_a_third_kind_is_logged_on_a_mesh(low_rank, placed):
    """Steps are undone on ranks to the bit. The rows that the steps changed are named part by part."""
    step = fr.train_step(loss_fn, **STEP)
    logged = fr.logged(step, steps=2, rows=R)
    begun = logged.init(step.init(fr.Params(low_rank, DENSE)))
    moved, _ = logged(begun, IDS)
    changed = fr.delta(moved, since=0, mesh=MESH).tables
    assert {n: sum(len(x.rows) for x in own) for n, own in changed.items()} == {"base": 6, "left": 6, "right": K}
    assert_trees_close(fr.rewind(moved, 1, mesh=MESH).state, begun.state, rtol=0, atol=0)


def test_a_kind_without_a_place_is_refused(low_rank, monkeypatch, tmp_path):
    """Every call that places tables raises with the type, before it looks at the plan. The error says what to try."""
    _, state = started(low_rank)
    path, empty = fr.save(tmp_path / "state", state), fr.Plan({})
    monkeypatch.setitem(KINDS, LowRank, KINDS[LowRank]._replace(placed="the table written out"))
    step = fr.train_step(loss_fn, **STEP | {"plan": empty})
    said = r"LowRank, which are not placed\.\n  got   \S*LowRank\n  need  .*\n  try   the table written out$"
    for call in (
        lambda: fr.shard_tables(low_rank, empty, MESH),
        lambda: step.init(fr.Params(low_rank, DENSE)),
        lambda: fr.reshard(state, empty, mesh=MESH, sparse=STEP["sparse"]),
        lambda: fr.load(path, plan=empty, mesh=MESH),
    ):
        with pytest.raises(TypeError, match=said):
            call()


def test_what_a_third_kind_does_not_tell_is_refused_on_a_mesh(placed):
    """The parts of the third kind do not count as tables of floats."""
    for words, call in (
        ("sharded LowRank", lambda: fr.quantize(placed)),
        ("sharded LowRank", lambda: fr.quantize(placed, {"item": "int8"})),
        ("sharded LowRank", lambda: fr.fake_quantize(placed)),
        ("sharded LowRank", lambda: fr.FakeQuantizedTables(placed, {}, (("item", "int8"),))),
        ("more than tensors", lambda: fr.save_safetensors("never", placed, mesh=MESH)),
        ("ShardedTables, which are not placed", lambda: fr.shard_tables(placed, PLAN, MESH)),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_a_third_kind_is_checked(low_rank):
    """Every public call checks features, ids and their values against the names and shapes of the kind."""
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
    """A derivative inside the loss with respect to the ids' weights needs single rows. It therefore raises. No
    derivative is silently lost."""

    def loss(params, w):
        inner = lambda w: fr.lookup(
            params.tables, fr.KeyedJaggedTensor(IDS.values, IDS.offsets, w, None, IDS.keys), POOLED
        ).values.sum()
        return torch.func.grad(inner)(w).square().sum()  # fmt: skip

    with pytest.raises(TypeError, match=r"the tables are LowRank(.|\n)*lookup_sequence"):
        fr.value_and_grad(loss)(fr.Params(low_rank, DENSE), IDS.weights)


def test_parts_of_one_name_are_refused(monkeypatch):
    """Two tensors with one name would share one gradient. The kind therefore raises before the loss runs."""

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


def with_read(monkeypatch, changed):
    """Let the third kind return changed(its LookupResult)."""
    read = lambda *args: changed(read_low_rank(*args))
    monkeypatch.setitem(KINDS, LowRank, KINDS[LowRank]._replace(read=read))


def changed_grads(change):
    """Return a function that changes the row gradients that the transpose of a LookupResult returns."""
    return lambda read: read._replace(transpose=lambda d, saved: change(read.transpose(d, saved)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda g: {n.replace("right", "rigth"): x for n, x in g.items()},
            r"a gradient for no part\.\n  got   'rigth'(.|\n)*try   'right'",
        ),
        (lambda g: g | {"right": g["left"]}, r"no row gradient for part 'right'(.|\n)*need  RowGrads of 2 rows"),
        (lambda g: g | {"right": TABLE}, r"no row gradient for part 'right'(.|\n)*need  RowGrads of 2 rows"),
        (lambda g: None, r"the transpose of LowRank returned no gradients(.|\n)*\{part: RowGrads\}"),
    ],
)
def test_a_gradient_for_no_part_is_refused(low_rank, monkeypatch, change, words):
    """A transpose that names a part wrongly, or returns no rows of it, raises: the part would not train."""
    with_read(monkeypatch, changed_grads(change))
    with pytest.raises((TypeError, KeyError), match=words):
        fr.value_and_grad(loss_fn)(fr.Params(low_rank, DENSE), IDS)


def test_rows_of_another_width_are_refused(low_rank, monkeypatch):
    """A lookup whose kind returns other features, bags or columns than the call asks for raises."""
    cut = lambda kt: fr.KeyedTensor.from_dict({k: kt[k][:, :2] for k in kt.keys})
    cases = (
        (lambda r: r._replace(out=cut(r.out)), "has other features than the lookup"),
        (lambda r: r._replace(out=replace(r.out, values=r.out.values[:1])), "another number of bags than the ids"),
        (lambda r: r._replace(out=r.out.values), "is not a KeyedTensor"),
        (lambda r: r.out, "returned no LookupResult"),
    )
    for changed, words in cases:
        with_read(monkeypatch, changed)
        with pytest.raises((TypeError, ValueError), match=words):
            fr.lookup(low_rank, IDS, POOLED)
    rows = lambda r, x: r._replace(out={"seq": x(r.out["seq"])})
    cases = (
        (lambda r: rows(r, lambda x: replace(x, values=x.values[:, :2])), r"no rows for feature 'seq'(.|\n)*f\[N, 3\]"),
        (lambda r: rows(r, lambda x: x.values), r"no rows for feature 'seq'(.|\n)*JaggedTensor of f\[N, 3\]"),
        (lambda r: r._replace(out={"sek": r.out["seq"]}), r"other features than the lookup(.|\n)*\['seq'\]"),
        (lambda r: r._replace(out=r.out["seq"]), "other features than the lookup"),
    )
    for changed, words in cases:
        with_read(monkeypatch, changed)
        with pytest.raises((TypeError, ValueError), match=words):
            fr.lookup_sequence(low_rank, IDS, SEQUENCES)


def test_a_type_that_is_no_kind_is_refused(low_rank, monkeypatch):
    """A Mapping that `KINDS` lacks is not read as a dict of tables. Subclasses of dict are."""
    item = [fr.FeatureConfig("a", table="item")]
    monkeypatch.delitem(KINDS, LowRank)
    for tables in (low_rank, ChainMap({"item": TABLE})):
        for call in (
            lambda t: fr.lookup(t, IDS, item),
            lambda t: fr.lookup_sequence(t, IDS, SEQUENCES),
            lambda t: fr.lookup_transpose(None, IDS, item, t),
            lambda t: fr.value_and_grad(loss_fn)(fr.Params(t, DENSE), IDS),
            lambda t: fr.shard_tables(t, PLAN, MESH),
            lambda t: fr.quantize(t),
            lambda t: fr.fake_quantize(t),
            lambda t: fr.validate(IDS, item, t),
        ):
            name = type(tables).__name__
            said = rf"not in `KINDS`\.\n  got   \S*{name}(.|\n)*try   dict\(tables\)(.|\n)*KINDS\[{name}\]"
            with pytest.raises(TypeError, match=said):
                call(tables)
    plain = OrderedDict(item=TABLE)
    assert_trees_close(fr.lookup(plain, IDS, item), fr.lookup(dict(plain), IDS, item), rtol=0, atol=0)

"""Bad inputs of meshes, specs and collectives. Each row is a call, the call's exception, and a part of the message."""

import tempfile
from pathlib import Path

import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr

MESH = fr.Mesh.emulated(a=2, b=3)
X = torch.zeros(4, 6)
IDS = fr.KeyedJaggedTensor.from_lists({"k": [[1], [2], [3]]})
UNEVEN = fr.KeyedJaggedTensor.from_lists({"k": [[1], [2]], "j": [[1]]})


PLAN = fr.Plan({"t": fr.row_wise("a")})
HELD = fr.shard_tables({"t": torch.ones(4, 2)}, PLAN, MESH)
SEQUENCE = fr.FeatureConfig("k", table="t", pooling="none")


def step(**kwargs):
    return fr.train_step(lambda p, b: 0, sparse=fr.optim.sgd(), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), **kwargs)


def e(call, kind, *fragments):
    return call, kind, fragments


A = fr.P("a")
STATE = fr.TrainState(torch.tensor(0), {"t": X, "u": X}, {"t": {"sum": X}, "u": {"sum": X}}, {}, {}, fr.key(0))
BY_ROWS = fr.Plan({"t": fr.row_wise("a"), "u": fr.row_wise("a")})
BY_COLUMNS = fr.Plan({"t": fr.column_wise("a"), "u": fr.replicated()})
IN_C = fr.Plan({"t": fr.row_wise("c"), "u": fr.row_wise("c")})
ADAGRAD = fr.optim.adagrad(lr=0.1)


def resharded(state=STATE, plan=BY_ROWS, mesh=MESH, sparse=ADAGRAD, **kwargs):
    return fr.reshard(state, plan, mesh=mesh, sparse=sparse, **kwargs)


def state_with(**fields):
    return fr.core._tree.replace(STATE, **fields)


def apart():
    """Return a state with three copies of t and u, each copy over two ranks."""
    return resharded(plan=fr.Plan(dict(BY_ROWS.placements), replicas="b"))


def following(**how):
    """Return a table that follows a vocabulary."""
    users, features = fr.vocabulary(128, **how), [fr.FeatureConfig("k", table="t")]
    configs = [fr.TableConfig("t", 128, 2)]
    config = fr.VocabularyConfig(users, configs, features)
    return fr.dynamic_tables(fr.init(fr.key(0), configs), {"v": config}, key=fr.key(0))


IN_BUCKETS = fr.Plan({"t": fr.row_wise("a")}, buckets=("a", "b"))


def in_buckets(**how):
    """Return a sharded table, whose vocabulary is cut."""
    return fr.shard_tables(following(**how), IN_BUCKETS, MESH)


def trained_in_buckets(**how):
    """Take a step with a vocabulary that is cut."""
    taken = step(mesh=MESH, plan=IN_BUCKETS, **how)
    ids = fr.KeyedJaggedTensor.from_lists({"k": [[1]] * 6})
    return taken(taken.init(fr.Params(following(), {})), ids)


def cache_in_buckets():
    """Cut the vocabulary of a cache."""
    with tempfile.TemporaryDirectory() as folder:
        configs, sparse = [fr.TableConfig("t", 1000, 2, initializer=fr.normal(0.1))], fr.optim.sgd()
        store = fr.table_store(configs, sparse, key=fr.key(0), path=Path(folder) / "t")
        cache = fr.CacheConfig(store, capacity=128, features=[fr.FeatureConfig("k", table="t", max_length=1)])
        return fr.shard_tables(fr.cached_tables({}, {"v": cache}), IN_BUCKETS, MESH)


def differing():
    """Return the state of `apart` with another number in t of one copy."""
    state = apart()
    state.tables["t"][-1, 0] = 1
    return state


def cut_off():
    """Return a state whose banks lack a row."""
    state = resharded(plan=IN_C, mesh=fr.Mesh.emulated(c=2), sparse=ADAGRAD)
    state.tables.banks["t"] = state.tables.banks["t"][1:]
    return fr.core._tree.replace(state, slots={"t": {}})


def in_file(tree):
    return fr.save(Path(tempfile.mkdtemp()) / "a.pt", tree)


def text_file():
    path = Path(tempfile.mkdtemp()) / "a.pt"
    path.write_text("no tensors at all")
    return path


def mapped(f, in_specs=A, out_specs=A, args=(X,), **kwargs):
    return lambda: fr.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **kwargs)(*args)


def inside(f):
    return mapped(lambda x: f(x) * 0 + x)


ROWS = {
    "Mesh.emulated: no axes": e(lambda: fr.Mesh.emulated(), ValueError, "a mesh has no axes", "Mesh.emulated(data=2)"),
    "Mesh.emulated: zero": e(lambda: fr.Mesh.emulated(a=0, b=-1), ValueError, "`a` is out of range",
        "`b` is out of range", "an int >= 1"),
    "Mesh.distributed: no ranks": e(lambda: fr.Mesh.distributed(a=2), RuntimeError, "there are no ranks", "torchrun"),
    "Mesh.distributed: a kind of device": e(lambda: fr.Mesh.distributed(device="tpu", timeout_s=0, debug=1, a="x"),
        ValueError, "`device` is unknown", "`timeout_s` is out of range", "`debug` is not", "`a` is not an integer"),
    "Mesh.coordinates: emulated": e(lambda: MESH.coordinates, ValueError, "no rank of its own", "axis_index"),
    "P: a number": e(lambda: fr.P(0), TypeError, "a dimension has no axis", "axis names"),
    "P: twice": e(lambda: fr.P("a", ("b", "a")), ValueError, "an axis is named twice", "['a']"),
    "table_row_wise: one axis twice": e(lambda: fr.table_row_wise(("a", "a"), rank=0), ValueError,
        "the axes are not axes of a mesh", "['a']"),
    "Placement: one axis for two": e(lambda: fr.Placement("grid", ("a",)), ValueError, "the placement mixes two axes",
        "('a',)", "the outer one first"),
    "shard_map: no mesh": e(lambda: fr.shard_map(lambda: X, in_specs=(), out_specs=fr.P())(), TypeError,
        "there is no mesh", "with mesh"),
    "shard_map: not a mesh": e(lambda: fr.shard_map(lambda: X, mesh=2, in_specs=(), out_specs=fr.P())(), TypeError,
        "int 2"),
    "shard_map: number of specs": e(mapped(lambda x: x, in_specs=(fr.P(), fr.P())), TypeError,
        "`in_specs` does not match", "1 arguments"),
    "shard_map: an assertion": e(mapped(lambda x: (torch._assert_async(x.sum() < 0), x)[1]), TypeError,
        "asserts a tensor's value", "the assertion outside"),
    "shard_map: no spec": e(mapped(lambda x: x, in_specs=(None,)), TypeError, "`args[0]` has no spec", "P()"),
    "shard_map: a name for a spec": e(mapped(lambda x: x, in_specs=("a",)), TypeError, "`args[0]` has no spec",
        "str 'a'"),
    "shard_map: specs of another structure": e(
        mapped(lambda x: x, in_specs=({"v": fr.P()},), args=({"w": X},)), TypeError, "not a prefix", "['v']", "['w']"
    ),
    "shard_map: a spec too deep": e(mapped(lambda x: x, in_specs=((fr.P(), fr.P()),)), TypeError, "not a prefix",
        "f32[4, 6]"),
    "shard_map: unknown axis": e(mapped(lambda x: x, in_specs=fr.P("c")), ValueError,
        "names an axis that is not mapped", "'c'", "['a', 'b']"),
    "shard_map: too many dimensions": e(mapped(lambda x: x, in_specs=fr.P("a", None, "b")), ValueError,
        "more dimensions", "at most 2"),
    "shard_map: jagged in two dimensions": e(mapped(lambda x: x, in_specs=fr.P(None, "a"), args=(IDS,)), ValueError,
        "cut by its bags"),
    "shard_map: uneven": e(mapped(lambda x: x, in_specs=fr.P("b")), ValueError,
        "dimension 0 of `args[0]` is not cut evenly", "b=3"),
    "shard_map: uneven bags": e(mapped(lambda x: x, args=(IDS,)), ValueError, "2 ranks cannot share", "3 bags"),
    "shard_map: strides": e(mapped(lambda x: x, args=(UNEVEN,)), ValueError, "different numbers of bags", "(2, 1)"),
    "shard_map: a string cut": e(mapped(lambda x: x, args=("name",)), TypeError, "`args[0]` cannot be cut"),
    "shard_map: result's spec": e(mapped(lambda x: {"y": x}, out_specs={"z": fr.P()}), TypeError, "`result`", "['z']",
        "['y']"),
    "shard_map: result's axis": e(mapped(lambda x: x, out_specs=fr.P("c")), ValueError, "`result`", "'c'"),
    "shard_map: result's dimensions": e(mapped(lambda x: x.sum(), out_specs=fr.P("a")), ValueError,
        "`result` has more dimensions"),
    "shard_map: unknown axis_names": e(mapped(lambda x: x, axis_names={"c"}), ValueError,
        "`axis_names` are not the mesh's", "['c']"),
    "shard_map: axis bound twice": e(
        mapped(lambda x: fr.shard_map(lambda y: y, mesh=MESH, in_specs=fr.P(), out_specs=fr.P(), axis_names={"a"})(x)),
        ValueError, "an axis is bound twice", "['a']",
    ),
    "shard: uneven": e(lambda: fr.shard(X, fr.P("b"), mesh=MESH), ValueError, "funcrec.shard", "not cut evenly"),
    "unshard: axis": e(lambda: fr.unshard(X, fr.P("c"), mesh=MESH), ValueError, "funcrec.unshard", "'c'"),
    "psum: outside": e(lambda: fr.psum(X, "a"), ValueError, "funcrec.psum: an axis is not bound", "shard_map"),
    "psum: not a name": e(inside(lambda x: fr.psum(x, 3)), TypeError, "`axis_name` names no axes"),
    "psum: no names": e(inside(lambda x: fr.psum(x, ())), TypeError, "`axis_name` names no axes"),
    "psum: a name twice": e(inside(lambda x: fr.psum(x, ("a", "a"))), TypeError, "`axis_name` names no axes"),
    "pvary: a number": e(inside(lambda x: fr.pvary({"v": 3}, "a")), TypeError, "`x['v']` is not a tensor", "int 3"),
    "psum: a name": e(inside(lambda x: fr.psum("x", "a")), TypeError, "`x` is not a tensor", "tensors and numbers"),
    "psum_scatter: bool": e(inside(lambda x: fr.psum_scatter(x > 0, "a")), TypeError, "cannot be summed", "long()"),
    "all_gather: dim": e(inside(lambda x: fr.all_gather(x, "a", dim=3)), IndexError, "`dim` is not a dimension",
        "-3 to 2"),
    "psum_scatter: size": e(inside(lambda x: fr.psum_scatter(x, "b")), ValueError, "not cut by the axis",
        "3, the number of ranks", "tiled=True"),
    "psum_scatter: multiple": e(inside(lambda x: fr.psum_scatter(x, "b", tiled=True)), ValueError, "a multiple of 3"),
    "all_to_all: size": e(inside(lambda x: fr.all_to_all(x, "b")), ValueError, "not cut by the axis"),
    "all_to_all: concat_dim": e(inside(lambda x: fr.all_to_all(x, "a", concat_dim=2)), IndexError,
        "`concat_dim` is not a dimension"),
    "ppermute: beyond": e(inside(lambda x: fr.ppermute(x, "a", [(0, 2)])), ValueError, "a rank that does not exist",
        "0 to 1"),
    "ppermute: sends twice": e(inside(lambda x: fr.ppermute(x, "a", [(0, 0), (0, 1)])), ValueError, "sends twice"),
    "ppermute: receives twice": e(inside(lambda x: fr.ppermute(x, "a", [(0, 1), (1, 1)])), ValueError,
        "receives twice"),
    "axis_index: outside": e(lambda: fr.axis_index("a"), ValueError, "funcrec.axis_index", "not bound"),
    "axis_size: unknown": e(inside(lambda x: fr.axis_size("c") * x), ValueError, "'c'; bound here: ['a', 'b']"),
    "ragged_all_to_all: rows": e(
        inside(lambda x: fr.ragged_all_to_all(x, x[:, :2], *[torch.zeros(2, dtype=torch.int64)] * 4, axis_name="a")),
        ValueError, "different rows", "f32[2, 6] and f32[2, 2]",
    ),
    "ragged_all_to_all: sizes": e(
        inside(lambda x: fr.ragged_all_to_all(x, x, *[torch.zeros(3, dtype=torch.int64)] * 4, axis_name="a")),
        ValueError, "`input_offsets` is not one number per rank", "i64[3]", "shape [2]",
    ),
    "ragged_all_to_all: float sizes": e(
        inside(lambda x: fr.ragged_all_to_all(x, x, *[torch.zeros(2)] * 4, axis_name="a")), TypeError,
        "`input_offsets` is not a tensor of this dtype", "`recv_sizes` is not", "i[n]",
    ),
    "ragged_all_to_all: capacity": e(
        inside(lambda x: fr.ragged_all_to_all(x, x, *[torch.zeros(2, dtype=torch.int64)] * 4, axis_name="a",
                capacity=-1)),
        ValueError, "`capacity` is out of range", "an int >= 0",
    ),
    "gather_state: plain": e(lambda: fr.gather_state(STATE, MESH), TypeError, "`state` is not sharded", "fr.reshard"),
    "gather_state: another mesh": e(
        lambda: fr.gather_state(resharded(), fr.Mesh.emulated(b=3, a=2)), ValueError, "lies on another mesh",
        "{'a': 2, 'b': 3}"
    ),
    "reshard: all at once": e(
        lambda: resharded({"t": X}, mesh=2, sparse=3), TypeError, "is not a TrainState", "`mesh` is not a Mesh",
        "is not a RowOptimizer"
    ),
    "reshard: another mesh": e(
        lambda: resharded(resharded(), mesh=fr.Mesh.emulated(a=2)), ValueError, "lies on another mesh", "from_mesh"
    ),
    "reshard: no placement": e(lambda: resharded(plan=fr.Plan({"t": fr.replicated()})), KeyError,
        "the plan lacks table 'u'"),
    "reshard: no axis": e(lambda: resharded(mesh=fr.Mesh.emulated(c=2)), ValueError, "an axis that the mesh lacks",
        "['a']"),
    "reshard: no slots": e(lambda: resharded(state_with(slots={"t": {}})), ValueError, "'u' has no slots"),
    "reshard: another optimizer": e(
        lambda: resharded(sparse=fr.optim.adam(0.1)), ValueError, "`sparse` is another optimizer", "mean f[R, 6]",
        "one with sum f[R, 6]", "the step that made the state"
    ),
    "reshard: slots by row, not by column": e(
        lambda: resharded(resharded(), IN_C, mesh=fr.Mesh.emulated(c=2), from_mesh=MESH,
            sparse=fr.optim.rowwise_adagrad(0.1)),
        ValueError, "`sparse` is another optimizer", "sum f[R]", "one with sum f[R, 6]"
    ),
    "reshard: an optimizer without slots": e(
        lambda: resharded(sparse=fr.optim.sgd(0.1)), ValueError, "`sparse` is another optimizer", "with no slots"
    ),
    "step: a state of another mesh": e(
        lambda: step(mesh=fr.Mesh.emulated(a=2), plan=BY_ROWS)(resharded(), None), ValueError,
        "`state` lies on another mesh", "axes {'a': 2}"
    ),
    "reshard: slots of other rows": e(
        lambda: resharded(state_with(slots={"t": {"s": X[:2]}, "u": {"s": X.sum()}})), ValueError,
        "slot 's' of 't' has no rows", "[4, ...]", "of 'u'"
    ),
    "reshard: one label, two kinds of slots": e(
        lambda: resharded(state_with(slots={"t": {"sum": X}, "u": {"m": X}})), ValueError,
        "different slots and one label", "['sum']", "['m']"
    ),
    "reshard: a norm over cut rows": e(
        lambda: resharded(plan=BY_COLUMNS, sparse=fr.optim.clip(fr.optim.rowwise_adagrad(lr=0.1), max_norm=1.0)),
        ValueError, "a norm of all gradients", "whole rows"
    ),
    "reshard: slots that cannot be cut": e(
        lambda: resharded(state_with(slots={"t": {"s": X[:, :5]}, "u": {}}), BY_COLUMNS), ValueError,
        "cannot be cut by columns", "[R, 6]",
    ),
    "Plan.uniform: another kind": e(lambda: fr.Plan.uniform("by_rows", {"t": X}, MESH), ValueError, "`kind` is unknown",
        "'by_rows'", "'row_wise'"),
    "Plan.uniform: two axes": e(
        lambda: fr.Plan.uniform("grid", {"t": X}, MESH, replicas="a"), ValueError, "'grid' has no such axes",
        "['b'] besides", "two, the outer one first"
    ),
    "Plan.uniform: no axis left": e(
        lambda: fr.Plan.uniform("row_wise", {"t": X}, MESH, replicas=("a", "b", "c")), ValueError,
        "'row_wise' has no such axes", "one at least", "lacks", "['c']"
    ),
    "Plan.uniform: a table twice": e(lambda: fr.Plan.uniform("row_wise", [fr.TableConfig("t", 2, 2)] * 2, MESH),
        ValueError, "`tables` has a name twice", "['t']"),
    "Plan: replicas of a placement": e(
        lambda: fr.Plan({"t": fr.row_wise("a"), "u": fr.replicated()}, replicas=("a", "b")), ValueError,
        "table 't' is cut over an axis whose copies train apart", "['a']"
    ),
    "Plan: a replica axis twice": e(lambda: fr.Plan({}, replicas=("a", "a")), ValueError, "`replicas` are not axes",
        "distinct"),
    "Plan: a bucket axis twice": e(lambda: fr.Plan({}, buckets=("a", "a")), ValueError, "`buckets` are not axes",
        "distinct"),
    "shard_tables: buckets": e(lambda: fr.shard_tables({"t": X}, fr.Plan({"t": fr.row_wise("a")}, buckets="c"), MESH),
        ValueError, "`buckets` of the plan name an axis that the mesh lacks", "['c']"),
    "shard_tables: buckets of a policy": e(lambda: in_buckets(policy=lambda age, count: age), ValueError,
        "the policy of vocabulary 'v' reads all rows", "a policy by name"),
    "shard_tables: buckets of a cache": e(cache_in_buckets, ValueError, "cache 'v' is not cut by buckets",
        "without `buckets`"),
    "train_step: buckets and bags": e(lambda: trained_in_buckets(batch_axes=("a",)), ValueError,
        "vocabularies and the batch are cut over different axes", "buckets over ('a', 'b')", "bags over ('a',)"),
    "find: a part of a vocabulary": e(lambda: fr.find(in_buckets().rest.vocabularies["v"], torch.arange(3)), TypeError,
        "`vocabulary` is not", "VocabularyShard"),
    "lookup: outside of buckets' mesh": e(lambda: fr.lookup(in_buckets(), IDS, [fr.FeatureConfig("k", table="t")]),
        ValueError, "looked up outside of their mesh", "are not bound"),
    "shard_tables: replicas": e(
        lambda: fr.shard_tables({"t": X}, fr.Plan({"t": fr.row_wise("a")}, replicas="c"), MESH), ValueError,
        "`replicas` of the plan", "lacks", "['c']"
    ),
    "sync_replicas: plain": e(lambda: fr.sync_replicas(STATE, mesh=MESH), TypeError, "`state` is not sharded"),
    "sync_replicas: no state": e(lambda: fr.sync_replicas(HELD, mesh=3), TypeError, "`state` is not a TrainState",
        "`mesh` is not a Mesh"),
    "sync_replicas: no replicas": e(lambda: fr.sync_replicas(resharded(), mesh=MESH), ValueError,
        "no copies that train apart", "replicas='group'"),
    "sync_replicas: another mesh": e(
        lambda: fr.sync_replicas(apart(), mesh=fr.Mesh.emulated(b=3, a=2)), ValueError, "lies on another mesh",
        "{'a': 2, 'b': 3}"
    ),
    "gather_tables: copies that differ": e(
        lambda: fr.gather_tables(differing().tables, MESH), ValueError, "copies that trained apart",
        "3 copies over ('b',)", "table of 't'", "sync_replicas"
    ),
    "gather_state: copies that differ": e(lambda: fr.gather_state(differing(), MESH), ValueError,
        "copies that trained apart", "table of 't'"),
    "reshard: copies that differ": e(lambda: resharded(differing()), ValueError, "funcrec.reshard",
        "copies that trained apart", "sync_replicas"),
    "save: another mesh": e(lambda: fr.save("x", resharded(), mesh=fr.Mesh.emulated(c=6)), ValueError,
        "`tree` lies on another mesh", "its own mesh"),
    "save: two meshes": e(lambda: fr.save("x", [resharded(), resharded(plan=IN_C, mesh=fr.Mesh.emulated(c=2))]),
        ValueError, "states of several meshes", "a save for each"),
    "save: copies that differ": e(lambda: fr.save("x", differing()), ValueError, "funcrec.save",
        "copies that trained apart", "sync_replicas"),
    "save: no slots": e(lambda: fr.save("x", fr.core._tree.replace(resharded(), slots={})), ValueError,
        "'t' has no slots"),
    "save: other rows": e(lambda: fr.save("x", cut_off()), ValueError, "other rows than their layout"),
    "save: keep": e(lambda: fr.save("x", STATE, keep=0), ValueError, "`keep` is out of range", "int >= 1"),
    "save_safetensors: no mesh": e(lambda: fr.save_safetensors("x", resharded().tables), ValueError,
        "`mesh` is missing", "mesh=mesh"),
    "save_safetensors: another mesh": e(
        lambda: fr.save_safetensors("x", resharded().tables, mesh=fr.Mesh.emulated(c=6)), ValueError,
        "`tensors` lie on another mesh", "their own mesh"),
    "save_safetensors: a dict in the dict": e(lambda: fr.save_safetensors("x", {"layer": {"w": X[0]}}), TypeError,
        "funcrec.save_safetensors: `tensors['layer']` is not a tensor"),
    "save_safetensors: complex": e(lambda: fr.save_safetensors("x", {"c": X + 0j}), TypeError,
        "`tensors['c']` has a dtype that the format lacks", "complex64", "F64, F32"),
    "save_safetensors: a derivative": e(lambda: fr.save_safetensors("x", {"w": X.clone().requires_grad_()}), TypeError,
        "`tensors['w']` cannot be saved", "x.detach()"),
    "save_safetensors: names": e(lambda: fr.save_safetensors("x", {"__metadata__": X}), ValueError,
        "has the name of the header's texts", "metadata={...}"),
    "save_safetensors: no text": e(lambda: fr.save_safetensors("x", {"\ud800": X}, metadata={"k": 3}), TypeError,
        "`metadata['k']` is not a string"),
    "load_safetensors: another file": e(lambda: fr.load_safetensors(text_file()), ValueError,
        "`a.pt` is not a safetensors file", "header", "fr.load"),
    "load_safetensors: no file": e(lambda: fr.load_safetensors("/none/x"), FileNotFoundError, "does not exist"),
    "load: a plan besides a step": e(lambda: fr.load("x", like=fr.train_step(len), plan=PLAN), TypeError,
        "`like` is a step, which says how states are laid out", "also plan", "the path and the step alone"),
    "load: like a logged step": e(lambda: fr.load("x", like=fr.logged(fr.train_step(len), rows=2)), TypeError,
        "`like` is a step of another kind", "logged(train_step(len), rows=2)", "a step of train_step, or a state"),
    "load: plan without a mesh": e(lambda: fr.load("x", plan=PLAN), ValueError, "`mesh` is missing", "emulated"),
    "load: sparse without a plan": e(lambda: fr.load("x", sparse=ADAGRAD, exact=True), ValueError,
        "`sparse` requires `plan`",
        "`exact` requires `plan`"),
    "load: mmap and plan": e(lambda: fr.load("x", plan=PLAN, mesh=MESH, mmap=True), ValueError,
        "`mmap` requires whole tensors", "mmap=False"),
    "load: exact and dedup": e(lambda: fr.load("x", plan=PLAN, mesh=MESH, exact=True, dedup=True), ValueError,
        "exclude each other"),
    "load: dense_axes of another mesh": e(lambda: fr.load("x", plan=PLAN, mesh=MESH, dense_axes=("c",)), ValueError,
        "not the mesh's"),
    "load: no placement": e(lambda: fr.load(in_file(STATE), plan=PLAN, mesh=MESH), KeyError, "lacks table 'u'"),
    "load: no state": e(lambda: fr.load(in_file({"x": X}), plan=PLAN, mesh=MESH), ValueError, "no state to lay out",
        "loads the file as it is"),
    "load: no table": e(lambda: fr.load(in_file(state_with(tables={"t": X[0]})), plan=PLAN, mesh=MESH), ValueError,
        "table 't' of the checkpoint is not a table"),
    "load: slots of other rows": e(
        lambda: fr.load(in_file(state_with(slots={"t": {"sum": X[1:]}, "u": {}})), plan=PLAN, mesh=MESH), ValueError,
        "slot 'sum' of 't' has no rows of its table",
    ),
    "train_step: capacity": e(lambda: step(mesh=MESH, plan=PLAN, capacity=0), ValueError, "`capacity` is out of range",
        "int >= 1"),
    "shard_tables: exact and dedup": e(
        lambda: fr.shard_tables({"t": torch.ones(4, 2)}, PLAN, MESH, exact=True, dedup=True),
        ValueError, "`exact` and `dedup` exclude each other", "one of them",
    ),
    "train_step: exact and dedup": e(lambda: step(mesh=MESH, plan=PLAN, exact=True, dedup=True), ValueError,
        "exclude each other"),
    "train_step: dedup without a mesh": e(lambda: step(dedup=True), ValueError, "`dedup` needs `mesh`",
        "dedup=True, mesh=None", "try   mesh="),
    "train_step: dense_axes without a mesh": e(lambda: step(dense_axes=("a",)), ValueError,
        "`dense_axes` require `mesh`", "dense_axes=()"),
    "train_step: dense_axes of another mesh": e(lambda: step(mesh=MESH, plan=PLAN, dense_axes=("c",)), ValueError,
        "not the mesh's", "'a', 'b'"),
    "train_step: dense_axes twice": e(lambda: step(mesh=MESH, plan=PLAN, dense_axes=("a", "a")), ValueError,
        "each once"),
    "train_step: dense_axes and matrices": e(
        lambda: fr.train_step(lambda p, b: 0, sparse=ADAGRAD, dense=fr.optim.dense(torch.optim.Muon), mesh=MESH,
            plan=PLAN, dense_axes=("a",)),
        ValueError, "Muon",
    ),
    "reshard: dense_axes of another mesh": e(lambda: resharded(dense_axes=("c",)), ValueError, "not the mesh's",
        "'a', 'b'"),
    "reshard: exact and dedup": e(lambda: resharded(exact=True, dedup=True), ValueError, "exclude each other"),
    "train_step: capacity without a mesh": e(lambda: step(capacity=8), ValueError, "`capacity` needs `mesh`",
        "try   mesh="),
    "pipeline: depth": e(lambda: fr.pipeline(step, depth=0), ValueError, "`depth`"),
    "pipeline: no step": e(lambda: fr.pipeline(3), TypeError, "`step`", "int 3"),
    "pipeline: of a pipeline": e(lambda: fr.pipeline(fr.pipeline(step)), TypeError, "`step` is a pipeline"),
    "pipeline: of a stale one": e(lambda: fr.pipeline(fr.stale_pipeline(step())), TypeError, "`step` is a pipeline"),
    "pipeline: no batches": e(lambda: fr.pipeline(step).run(None, 3), TypeError,
        "`batches` cannot be iterated", "int 3"),
    "stale_pipeline: of logged": e(lambda: fr.stale_pipeline(fr.logged(step(), steps=0)), TypeError,
        "`step` does not come from `train_step`", "fr.pipeline(step)"),
    "stale_pipeline: of a pipeline": e(lambda: fr.stale_pipeline(fr.pipeline(step())), TypeError,
        "funcrec.stale_pipeline", "`step` does not come from `train_step`"),
    "stale_pipeline: no batches": e(lambda: fr.stale_pipeline(step()).run(None, 3), TypeError,
        "`batches` cannot be iterated", "int 3"),
    "stale_pipeline: one batch": e(lambda: fr.stale_pipeline(step())(None, 3), TypeError, "no stale rows", "stale.run"),
    "retry_overflow: numbers": e(lambda: fr.retry_overflow(step, capacity=0, steps=0), ValueError,
        "`capacity` is out of range", "`steps` is out of range"),
    "retry_overflow: a name": e(lambda: fr.retry_overflow(step, capacity="auto"), ValueError, "`capacity` is unknown",
        "an int >= 1 or 'measure'"),
    "Codec: unknown": e(lambda: fr.Codec("fp8", "int4"), ValueError, "`forward` is unknown", "'fp8'",
        "`backward` is unknown", "'bfloat16'"),
    "Codec: a dtype": e(lambda: fr.Codec(torch.bfloat16), TypeError, "`forward` is unknown", "torch.dtype"),
    "shard_tables: codec": e(lambda: fr.shard_tables({"t": X}, PLAN, MESH, codec="int8"), TypeError,
        "`codec` is not a Codec", "'int8'"),
    "train_step: codec without a mesh": e(lambda: step(codec=fr.Codec("int8")), ValueError, "`codec` needs `mesh`",
        "try   mesh="),
    "lookup_sequence: outside": e(lambda: fr.lookup_sequence(HELD, IDS, [SEQUENCE]), ValueError,
        "outside of their mesh", "['a', 'b'] are not bound"),
    "lookup_sequence: pooled only": e(
        mapped(lambda t: fr.lookup_sequence(t, IDS, [fr.FeatureConfig("k", table="t")]), (HELD.specs(),), fr.P(),
            (HELD,)),
        ValueError, "no feature is for this lookup", "pooling='none'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_bad_input_is_refused(name):
    """A bad argument raises before any work. The message has the argument's name, got and need."""
    call, kind, fragments = ROWS[name]
    assert_refused(call, kind, *fragments)

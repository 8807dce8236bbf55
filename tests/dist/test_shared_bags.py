"""Examples that share bags, on a mesh: every placement pools each bag once, and ranks exchange a row for each bag."""

import pytest
import torch
from hypothesis import given
from programs import training
from programs.as_staged import as_staged
from programs.placement_models import models, sharded, whole

import funcrec as fr
from funcrec.testing import assert_trees_close

KINDS = ("table_wise", "row_wise", "column_wise", "replicated", "table_row_wise", "table_column_wise", "grid")
TINY = {"rtol": 1e-6, "atol": 1e-6}
BAGS, STEPS = 8, 3


def shared(model):
    """Return the model with equal bags of each rank's part stored once."""
    mesh, plan, tables, ids, features = model
    return mesh, plan, tables, fr.dedup_bags(ids, num_parts=mesh.size), features


@given(models())
def test_exact_lookups_have_one_processs_bits(model):
    """With exact=True a lookup of shared bags has the bits of the plain lookup of all examples, under every placement.
    The gradients have the bits of one process that accumulates the ranks' shared bags."""
    acts, grads = sharded(shared(model), exact=True)
    assert_trees_close(acts, whole(model)[0])
    assert_trees_close(grads, whole(shared(model))[1])


@given(models())
def test_sums_of_owners_differ_by_rounding_only(model):
    """Without exact=True the owners' sums agree with the plain lookup within 1e-6, means included, whose divisor is
    the requester's length (TorchRec's issue 2362). The gradients keep their bits."""
    acts, grads = sharded(shared(model))
    assert_trees_close(acts, whole(model)[0], **TINY)
    assert_trees_close(grads, whole(shared(model))[1])


@given(models())
def test_lookups_by_distinct_rows_are_lookups(model):
    """With dedup=True, where rows travel once, a lookup of shared bags has the bits of the plain lookup, too."""
    acts, grads = sharded(shared(model), dedup=True)
    assert_trees_close(acts, whole(model)[0])
    assert_trees_close(grads, whole(model)[1], rtol=1e-5, atol=1e-5)


def fixed(kind, axes):
    """Return a mesh, tables, shared ids whose keys have different numbers of bags, and a key without ids."""
    mesh = fr.Mesh.emulated(**axes)
    tables = {n: torch.randn(*s, generator=torch.Generator().manual_seed(1)) for n, s in training.SHAPES.items()}
    held = fr.shard_tables(tables, training.plan_of(kind, axes), mesh)
    lists = {
        "u": [[0, 3], [0, 3], [1], [1], [2, 4], [2, 4], [], []] * mesh.size,
        "v": [[i % 5] for i in range(8)] * mesh.size,
        "w": [[]] * 8 * mesh.size,
    }
    ids = fr.KeyedJaggedTensor.from_lists(lists)
    return mesh, tables, held, ids, fr.dedup_bags(ids, num_parts=mesh.size)


def axes_of(kind):
    return {"x": 2, "y": 2} if kind in KINDS[4:] else {"x": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_strides_and_keys_without_ids_work_under_every_placement(kind):
    """Keys of 4, 5 and 1 bags a rank, and several tables of one placement, give all features' rows (TorchRec's issues
    4456 under grid, 4159 with replicated tables, 4459 with strides that collapse on some ranks)."""
    mesh, tables, held, ids, own = fixed(kind, axes_of(kind))
    features = (*training.FEATURES, fr.FeatureConfig("f4", table="b", column="w"))
    assert own.strides == (4 * mesh.size, 5 * mesh.size, mesh.size)
    at = fr.P(mesh.axis_names)
    look = fr.shard_map(
        lambda t, ids: fr.lookup(t, ids, features).values, mesh=mesh, in_specs=(held.specs(), at), out_specs=at
    )
    assert_trees_close(look(held, own), fr.lookup(tables, ids, features).values, **TINY)
    each = fr.shard_map(
        lambda t, ids: fr.lookup_each(t, ids, features), mesh=mesh, in_specs=(held.specs(), at), out_specs=at
    )
    assert_trees_close(each(held, own), fr.lookup_each(tables, own, features), **TINY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{}, {"dedup": True}], ids=["sums", "dedup"])
def test_sequences_and_maxima_of_shared_bags(kind, how):
    """Sequences of examples and maxima equal those of one process where keys have different numbers of bags."""
    mesh, tables, _, ids, own = fixed(kind, axes_of(kind))
    held = fr.shard_tables(tables, training.plan_of(kind, mesh.shape), mesh, **how)
    sequences = [fr.FeatureConfig(k, table="a", pooling="none", column=k, max_length=2) for k in "uvw"]
    maxima = [fr.FeatureConfig(k, table="a", pooling="max", column=k) for k in "uv"]
    at = fr.P(mesh.axis_names)
    look = fr.shard_map(
        lambda t, ids: ({k: x.to_padded(2) for k, x in fr.lookup_sequence(t, ids, sequences).items()},
                        fr.lookup(t, ids, maxima).values),
        mesh=mesh, in_specs=(held.specs(), at), out_specs=at,
    )  # fmt: skip
    want = {k: x.to_padded(2) for k, x in fr.lookup_sequence(tables, ids, sequences).items()}
    got = look(held, own)
    assert_trees_close(got[0], want)
    assert_trees_close(got[1], fr.lookup(tables, ids, maxima).values)


# -- training ----------------------------------------------------------------------------------------------------


def batch(step, num_parts):
    """Return a batch of training's, whose examples of a rank share bags."""
    made = training.batch(step, BAGS)
    return fr.Batch(fr.dedup_bags(made.ids, num_parts=num_parts), made.label)


def trained(mesh, kind):
    """Return (tables, dense) after steps on shared bags."""
    plan = training.plan_of(kind, mesh.shape)
    step = fr.train_step(training.loss_fn, **training.optimizers("adam"), mesh=mesh, plan=plan)
    state = step.init(training.params())
    for i in range(STEPS):
        state, _ = step(state, fr.shard(batch(i, mesh.size), fr.P(mesh.axis_names), mesh=mesh))
    end = fr.gather_state(state, mesh)
    return end.tables, end.dense


def real(axes, kind):
    return trained(fr.Mesh.distributed(**axes), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_process(kind):
    """Steps of shared bags reach the numbers of one process on the plain examples, under every placement."""
    mesh = fr.Mesh.emulated(**axes_of(kind))
    want = training.alone("adam", mesh.size, STEPS, BAGS)
    got = trained(mesh, kind)
    assert_trees_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert_trees_close(got[1], want[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_training_on_ranks_is_training(kind, ranks):
    """Two gloo ranks, each with its part of the examples, reach the emulated mesh's numbers."""
    want = trained(fr.Mesh.emulated(x=2), kind)
    for got in ranks(2).run(real, {"x": 2}, kind):
        assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


# -- bytes -------------------------------------------------------------------------------------------------------

D, EXAMPLES, CAPACITY = 16, 32, 64


def sent(counts):
    """Return the bytes that a rank sends in a lookup and its gradient: 32 examples, and `counts` bags of two keys."""
    mesh, n = fr.Mesh.distributed(x=2), sum(counts)
    inverse = torch.stack([torch.arange(EXAMPLES) % c for c in counts])
    ids = fr.KeyedJaggedTensor(torch.zeros(CAPACITY, dtype=torch.int64), torch.arange(n + 1), None, inverse,
                               ("a", "b"), None if counts[0] == counts[1] else tuple(counts))  # fmt: skip
    held = fr.shard_tables({"t": torch.ones(8, D)}, fr.Plan({"t": fr.row_wise("x")}), mesh)
    features = [fr.FeatureConfig(k, table="t") for k in "ab"]
    loss = lambda p, ids: fr.lookup(p.tables, ids, features).values.square().mean()
    own = lambda held, ids: (
        fr.value_and_grad(loss)(fr.Params(held, {}), ids)[1].tables["t"].coalesce().grads.sum()[None]
    )
    step = fr.shard_map(own, mesh=mesh, in_specs=(held.specs(), fr.P("x")), out_specs=fr.P("x"))
    return [x.sent_bytes for x in fr.jit(step).lower(held, ids).exchanges]


def test_bytes_follow_the_distinct_bags(ranks):
    """Vectors and cotangents travel once for each distinct bag: a rank sends Σ B_f · D numbers each way, whatever the
    number of examples. The ids travel once for all keys, with a length for each bag of the longest key."""
    for counts in ((32, 32), (16, 16), (4, 4), (32, 4)):
        got = ranks(2).run(as_staged, sent, counts, deadline_s=300)[0]
        vectors, lengths = 2 * sum(counts) * D * 4, (CAPACITY + 2 * max(counts)) * 4
        assert sum(got) == vectors + lengths, (counts, got)

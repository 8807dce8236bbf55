"""lookup and the jagged operations equal those of torch.nn and FBGEMM."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

SAFE = {"outside": False, "hashes": (None,), "max_lengths": (None,), "max_tables": 1, "max_features": 1}
F32 = {"dtypes": (torch.float32,)}


def bag_arguments(it, feature):
    """Return the (ids, offsets, weights) of one feature, in the form that torch.nn.EmbeddingBag takes."""
    bags = it.ids[feature.key].unpad()
    return bags.values.long(), bags.offsets.long(), bags.weights if feature.weighted else None


@pytest.mark.parametrize("mode", ["sum", "mean"])
@given(data=st.data())
def test_embedding_bag(mode, data):
    """lookup equals torch.nn.functional.embedding_bag. lookup_transpose equals the gradient of embedding_bag."""
    weighted = None if mode == "sum" else False
    it = data.draw(frs.lookups(poolings=(mode,), weighted=weighted, min_bags=1, **SAFE, **F32))
    (feature,) = it.features
    ids, offsets, weights = bag_arguments(it, feature)
    table = it.tables[feature.table].clone().requires_grad_()
    want = torch.nn.functional.embedding_bag(
        ids, table, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
    )
    got = fr.lookup(*it)
    assert_trees_close(got[feature.name], want.detach(), rtol=1e-6)
    d = data.draw(frs.cotangents(it))
    want.backward(d.values)
    mine = fr.lookup_transpose(d, it.ids, it.features, it.tables)[feature.table]
    assert_trees_close(mine.to_dense(), table.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@given(data=st.data())
def test_ids_dropped_are_the_padding_of_embedding_bag(mode, data):
    """lookup of `drop_ids` and its transpose equal embedding_bag with `padding_idx`: not counted, and no gradient."""
    weighted = None if mode == "sum" else False
    it = data.draw(frs.lookups(poolings=(mode,), weighted=weighted, min_bags=1, **SAFE, **F32))
    (feature,) = it.features
    ids, offsets, weights = bag_arguments(it, feature)
    padding = data.draw(st.integers(0, it.tables[feature.table].shape[0] - 1))
    table = it.tables[feature.table].clone().requires_grad_()
    want = torch.nn.functional.embedding_bag(
        ids, table, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True, padding_idx=padding
    )
    rest = fr.drop_ids(it.ids, padding)
    assert_trees_close(fr.lookup(it.tables, rest, it.features)[feature.name], want.detach(), rtol=1e-6)
    d = data.draw(frs.cotangents(it))
    want.backward(d.values)
    mine = fr.lookup_transpose(d, rest, it.features, it.tables)[feature.table].coalesce()
    assert_trees_close(mine.to_dense(), table.grad, rtol=1e-6, atol=1e-6)
    assert padding not in mine.rows[: int(mine.count)]


@given(frs.lookups(poolings=("none",), weighted=False, **SAFE, **F32), st.integers(0, 99))
def test_embedding(it, seed):
    """lookup_sequence equals torch.nn.functional.embedding. The transpose of lookup_sequence equals the gradient of
    embedding."""
    (feature,) = it.features
    ids, _, _ = bag_arguments(it, feature)
    table = it.tables[feature.table].clone().requires_grad_()
    want = torch.nn.functional.embedding(ids, table)
    got = fr.lookup_sequence(*it)[feature.name]
    assert_trees_close(got.unpad().values, want.detach())
    d = fr.JaggedTensor(torch.randn(got.values.shape, generator=torch.Generator().manual_seed(seed)), got.offsets)
    want.backward(d.unpad().values)
    mine = fr.lookup_sequence_transpose({feature.name: d}, it.ids, it.features, it.tables)[feature.table]
    assert_trees_close(mine.to_dense(), table.grad, rtol=1e-6, atol=1e-6)


def test_one_loss_against_modules():
    """value_and_grad of a loss of two features equals torch's autograd over EmbeddingBag modules with a shared
    table."""
    generator = torch.Generator().manual_seed(0)
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 3, 3], [], [1]], "b": [[2], [4, 0], [1, 1]]})
    features = [fr.FeatureConfig("a", table="t"), fr.FeatureConfig("b", table="t", pooling="mean")]
    weight, w = torch.randn(5, 4, generator=generator), torch.randn(8, generator=generator)
    loss = lambda p, ids: torch.sigmoid(fr.lookup(p.tables, ids, features).values @ p.dense).sum()
    value, grads = fr.value_and_grad(loss)(fr.Params({"t": weight}, w), ids)

    modules = [torch.nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode=m) for m in ("sum", "mean")]
    modules[1].weight = modules[0].weight
    dense = torch.nn.Parameter(w.clone())
    acts = [m(ids[k].unpad().values, ids[k].offsets[:-1]) for m, k in zip(modules, "ab")]
    want = torch.sigmoid(torch.cat(acts, 1) @ dense).sum()
    want.backward()
    assert_trees_close(value, want.detach(), rtol=1e-6)
    assert_trees_close(grads.dense, dense.grad, rtol=1e-5, atol=1e-6)
    assert_trees_close(grads.tables["t"].to_dense(), modules[0].weight.grad, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def fbgemm():
    pytest.importorskip("fbgemm_gpu")
    return torch.ops.fbgemm


@given(
    x=frs.jagged_tensors(
        dtypes=(torch.float32,), offset_dtypes=(torch.int64,), weighted=False, row_shape=(3,), min_bags=1, max_padding=0
    )
)
def test_to_padded_is_fbgemms(fbgemm, x):
    """to_padded equals jagged_to_padded_dense. from_padded equals dense_to_jagged."""
    dense = fbgemm.jagged_to_padded_dense(x.values, [x.offsets], [5], 0.0)
    assert_trees_close(x.to_padded(5), dense)
    (back,) = fbgemm.dense_to_jagged(dense, [x.offsets])[:1]
    assert_trees_close(fr.JaggedTensor.from_padded(dense, x.lengths).unpad().values, back)


@given(x=frs.keyed_jagged_tensors(keys=("a", "b", "c"), weighted=True, min_bags=1, max_padding=0))
def test_permute_is_fbgemms(fbgemm, x):
    """permute equals permute_2D_sparse_data."""
    order = [2, 0, 1]
    lengths, values, weights = fbgemm.permute_2D_sparse_data(
        torch.tensor(order, dtype=torch.int32), x.lengths.reshape(3, -1), x.values, x.weights
    )
    got = x.permute(order).unpad()
    assert_trees_close((got.lengths.reshape(3, -1), got.values, got.weights), (lengths, values, weights))


@given(data=st.data(), pooling=st.sampled_from(["sum", "mean"]))
def test_lookup_is_fbgemms_table_batched_embedding(fbgemm, data, pooling):
    """lookup of several tables equals the forward of FBGEMM's inference and training kernels (dims are multiples of
    4)."""
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    ids = data.draw(
        frs.keyed_jagged_tensors(
            keys=("a", "b"), elements=st.integers(0, 4), weighted=False, min_bags=1, max_padding=0,
            dtypes=(torch.int64,), offset_dtypes=(torch.int64,),
        )
    )  # fmt: skip
    tables = {n: data.draw(frs.tensors(shape)) for n, shape in (("s", (5, 4)), ("t", (6, 8)))}
    features = [fr.FeatureConfig("a", table="s", pooling=pooling), fr.FeatureConfig("b", table="t", pooling=pooling)]
    module = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(*t.shape, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU) for t in tables.values()],
        pooling_mode={"sum": common.PoolingMode.SUM, "mean": common.PoolingMode.MEAN}[pooling],
    )
    for mine, theirs in zip(tables.values(), module.split_embedding_weights()):
        theirs.copy_(mine)
    want = module(ids.values, ids.offsets).detach()
    assert_trees_close(fr.lookup(tables, ids, features).values, want, rtol=1e-6, atol=1e-7)

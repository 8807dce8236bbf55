"""Quantised rows are read and written as the bytes of FBGEMM and TorchRec.

Lookups give the values of TorchRec's modules."""

import copy

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.inference.modules import quantize_embeddings
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.quant.embedding_modules import quant_prep_enable_quant_state_dict_split_scale_bias as split_prep

load, to, back = fr.interop.load_torchrec_state_dict, fr.interop.to_fbgemm, fr.interop.from_fbgemm
DTYPES = {"int8": torch.qint8, "int4": torch.quint4x2, "int2": torch.quint2x4, "float16": torch.float16}
BITS = {"int8": 8, "int4": 4, "int2": 2, "float16": 16}
ENDS = {"x": [[1, 1, 6], [], [0, 2], [3]], "y": [[4], [2, 3, 4], [4], []]}
WEIGHTS = {"x": [[0.5, 2.0, 1.0], [], [3.0, 1.0], [1.0]], "y": [[1.5], [1.0, -2.0, 0.5], [1.0], []]}


def rows_of(seed, dims=(8, 16)):
    draws = torch.Generator().manual_seed(seed)
    return {n: torch.randn(7, d, generator=draws) for n, d in zip("ab", dims, strict=True)}


def bags(weighted, tables):
    """Return a collection of three tables, pooled by mean, sum and mean, with shared columns."""
    ebc = EmbeddingBagCollection([
        EmbeddingBagConfig(num_embeddings=7, embedding_dim=8, name="a", feature_names=["x"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(num_embeddings=7, embedding_dim=16, name="b", feature_names=["x", "y"]),
        EmbeddingBagConfig(num_embeddings=7, embedding_dim=8, name="c", feature_names=["y"], pooling=PoolingType.MEAN),
    ], is_weighted=weighted)  # fmt: skip
    for n, bag in ebc.embedding_bags.items():
        bag.weight.data.copy_(tables.get(n, tables["a"].flip(0)))
    return ebc


def quantised(module, dtype, is_split=False):
    if is_split:
        split_prep(module)
    kinds = {"additional_qconfig_spec_keys": [EmbeddingCollection],
             "additional_mapping": {EmbeddingCollection: QuantEmbeddingCollection}}  # fmt: skip
    return quantize_embeddings(torch.nn.Sequential(module), DTYPES[dtype], inplace=False, **kinds)[0]


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_quantised_bag_collection_gives_its_answers(dtype, weighted, is_split):
    """Tables and features read from a module of torchrec.quant give the module's lookups, with its keys in order. Bags
    are sums and means, weighted or not. The module's state dict alone fills tables of the same form."""
    module = quantised(bags(weighted, rows_of(0)), dtype, is_split)
    ids = fr.KeyedJaggedTensor.from_lists(ENDS, weights=WEIGHTS if weighted else None)
    q, features = fr.interop.from_torchrec(module)
    assert {f[1] for f in q.forms} == {BITS[dtype]} and all(f.weighted == weighted for f in features)
    got, want = fr.lookup(q, ids, features), module(fr.interop.to_torchrec(ids))
    assert list(got.keys) == want.keys() and list(got.dims) == want.length_per_key()
    assert_trees_close(got.values, want.values().float(), rtol=1e-5, atol=1e-5)
    empty = fr.tree.map(torch.zeros_like, q)
    assert_trees_close(load(empty, module.state_dict()).tables, q.tables)
    assert float(empty["b"].float().abs().max()) == 0, "a new value"


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("is_split", [False, True])
def test_quantised_tables_go_back(dtype, is_split):
    """A module of torchrec.quant, loaded with the state dict of other tables, gives the lookups of these tables. A read
    of the module returns the tables bit for bit. The state dict that gives the form does not change."""
    module = quantised(bags(False, rows_of(0)), dtype, is_split)
    _, features = fr.interop.from_torchrec(module)
    other = fr.interop.from_torchrec(quantised(bags(False, rows_of(1)), dtype, is_split))[0]
    held = lambda: {n: x.view(torch.uint8).clone() if x.dtype == torch.uint8 else x.clone()
                    for n, x in module.state_dict().items()}  # fmt: skip
    before = held()
    made = fr.interop.to_torchrec_state_dict(other, module.state_dict())
    assert_trees_close(held(), before)
    module.load_state_dict(made)
    assert_trees_close(fr.interop.from_torchrec(module)[0].tables, other.tables)
    ids = fr.KeyedJaggedTensor.from_lists(ENDS)
    got, want = fr.lookup(other, ids, features), module(fr.interop.to_torchrec(ids))
    assert_trees_close(got.values, want.values().float(), rtol=1e-5, atol=1e-5)
    small = fr.quantize({n: t[:3] for n, t in fr.dequantize(other).items()}, dtype)
    with pytest.raises(ValueError, match="another number of rows"):
        fr.interop.to_torchrec_state_dict(small, module.state_dict())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantised_sequence_collection_gives_its_answers(dtype):
    """Tables read from a quantised EmbeddingCollection give the values of the module, feature by feature."""
    ec = EmbeddingCollection([
        EmbeddingConfig(num_embeddings=7, embedding_dim=16, name="b", feature_names=["x", "y"]),
        EmbeddingConfig(num_embeddings=7, embedding_dim=16, name="a", feature_names=["x"]),
    ])  # fmt: skip
    module, ids = quantised(ec, dtype), fr.KeyedJaggedTensor.from_lists(ENDS)
    q, features = fr.interop.from_torchrec(module)
    got, want = fr.lookup_sequence(q, ids, features), module(fr.interop.to_torchrec(ids))
    assert_trees_close({k: got[k].unpad().values for k in want}, {k: x.values().float() for k, x in want.items()},
                       rtol=1e-6, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2"])
def test_rows_are_the_bytes_of_fbgemms_quantiser(dtype):
    """to_fbgemm writes the bytes of FBGEMM's NBit quantiser. from_fbgemm reads the bytes back with their values."""
    tables, bits = rows_of(1), BITS[dtype]
    theirs = {n: torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(t, bits) for n, t in tables.items()}
    q = fr.quantize(tables, dtype)
    assert_trees_close(to(q, layout="nbit"), theirs)
    assert_trees_close(back(theirs, q.forms, layout="nbit"), q)
    numbers = {n: torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(t, bits) for n, t in theirs.items()}
    assert_trees_close(fr.dequantize(q), numbers, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("alignment", [1, 16])
def test_rows_are_those_of_fbgemms_table_batched_lookup(dtype, alignment):
    """The inference TBE, filled with the rows of to_fbgemm for its alignment, gives our lookups. Its rows, read back,
    equal our rows bit for bit."""
    kind = getattr(SparseType, {"float16": "FP16"}.get(dtype, dtype.upper()))
    q = fr.quantize(rows_of(2), dtype)
    specs = [(n, 7, dim, kind, EmbeddingLocation.HOST) for n, _, dim in q.forms]
    tbe = IntNBitTableBatchedEmbeddingBagsCodegen(specs, device="cpu", row_alignment=alignment,
                                                  output_dtype=SparseType.FP32)  # fmt: skip
    tbe.fill_random_weights()
    held = [x for x, _ in tbe.split_embedding_weights(split_scale_shifts=False)]
    for x, rows in zip(held, to(q, row_alignment=alignment).values(), strict=True):
        assert x.shape == rows.shape
        x.copy_(rows)
    ids = fr.KeyedJaggedTensor.from_lists(ENDS)
    features = [fr.FeatureConfig("x", table="a"), fr.FeatureConfig("y", table="b")]
    want = tbe.forward(ids.values.int(), ids.offsets.int())
    assert_trees_close(fr.lookup(q, ids, features).values, want, rtol=1e-5, atol=1e-5)
    assert_trees_close(back(dict(zip("ab", held, strict=True)), q.forms), q)


@pytest.mark.parametrize("dim", [1, 5, 8])
def test_rows_of_eight_bits_with_heads_in_f32(dim):
    """Rows of FloatToFused8BitRowwiseQuantized are read within the docstring's bound. FBGEMM reads the rows that we
    write as the same numbers. We read these rows back bit for bit."""
    table = torch.randn(9, dim, generator=torch.Generator().manual_seed(dim)) * torch.logspace(-6, 3, 9)[:, None]
    rows = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(table)
    q = back({"a": rows}, [("a", 8, dim)], layout="8bit")
    numbers = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(rows)[:, :dim].double()
    scale, bias = rows[:, -8:].contiguous().view(torch.float32).double().split(1, 1)
    off = (fr.dequantize(q)["a"].double() - numbers).abs()
    assert bool((off <= (bias.abs() + 255 * scale) / 2048 + 2**-17).all()) and float(off.max()) > 0
    ours = to(q, layout="8bit")["a"]
    assert_trees_close(
        torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(ours)[:, :dim], fr.dequantize(q)["a"], rtol=1e-6
    )
    assert_trees_close(back({"a": ours}, q.forms, layout="8bit"), q)


def test_what_does_not_fit_is_refused():
    """A scale outside f16, a form of other bits, a dict of floats and a state dict with more keys each raise. The error
    has what it got."""
    wide = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.tensor([[0.0, 1.0], [0.0, 1e9]]))
    with pytest.raises(ValueError, match=r"`rows\['a'\]` has what f16 does not hold(.|\n)*of row 1; 1 such rows"):
        back({"a": wide}, [("a", 8, 2)], layout="8bit")
    ebc = bags(False, rows_of(0))
    module = quantised(copy.deepcopy(ebc), "int4")
    q, _ = fr.interop.from_torchrec(module)
    held, eight = module.state_dict(), fr.quantize(fr.dequantize(q), "int8")
    with pytest.raises(ValueError, match=r"not stored as the table's form says(.|\n)*from_torchrec"):
        load(eight, held)
    with pytest.raises(TypeError, match=r"is not rows of codes(.|\n)*fr.quantize"):
        load(eight, ebc.state_dict())
    with pytest.raises(ValueError, match=r"the state dict has names that no table has(.|\n)*over.weight"):
        load(q, {**held, "over.weight": torch.ones(2)})
    with pytest.raises(KeyError, match="table 'b' is not in the state dict"):
        load(q, {n: x for n, x in held.items() if ".b." not in n})
    with pytest.raises(ValueError, match="another number of rows"):
        load(fr.quantize({n: t[:3] for n, t in fr.dequantize(q).items()}, "int4"), held)
    with pytest.raises(TypeError, match="`step` does not belong to quantised tables"):
        load(q, held, step=3)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_of_a_wide_range_differ_by_their_rounding(dtype):
    """FBGEMM sums scales and least values separately. If one column has much larger values, the numbers of a bag
    therefore equal our numbers only up to rounding of the largest number. A bag of one id has our bits."""
    draws = torch.Generator().manual_seed(3)
    rows = {"a": torch.randn(7, 8, generator=draws) * torch.tensor([1e3, *[1.0] * 7])}
    features = (fr.FeatureConfig("x", table="a"),)
    collection = EmbeddingBagCollection([EmbeddingBagConfig(7, 8, "a", feature_names=["x"])])
    collection.embedding_bags["a"].weight.data.copy_(rows["a"])
    theirs, ours = quantised(collection, dtype), fr.quantize(rows, dtype)
    both = lambda ids: (fr.lookup(ours, ids, features).values, theirs(fr.interop.to_torchrec(ids)).values().float())
    got, want = both(fr.KeyedJaggedTensor.from_lists({"x": [[i] for i in range(7)]}))
    assert torch.equal(got, want)
    bags = [[3, 2, 3], [0, 1, 2, 3, 4, 5, 6], [5, 5]]
    got, want = both(fr.KeyedJaggedTensor.from_lists({"x": bags}))
    greatest = torch.tensor([[rows["a"][bag].abs().sum(0).max()] for bag in bags])
    assert ((got - want).abs() <= 8 * torch.finfo(torch.float32).eps * greatest).all()

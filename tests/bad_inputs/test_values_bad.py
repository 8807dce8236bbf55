"""Arguments of configs, hashes, initializers, layers and models raise if they are no numbers, flags or functions."""

import math

import pytest
import torch
from funcrec.kernels import ops
from programs.refused import assert_refused

import funcrec as fr

NAN, INF = math.nan, math.inf
TABLE, FEATURE = fr.TableConfig("t", 5, 4), fr.FeatureConfig("f", table="t")
T, F = (TABLE,), (FEATURE,)
KEYED = fr.KeyedJaggedTensor.from_lists({"f": [[1]]})
IDS, BYTES = torch.tensor([1, 2]), torch.zeros(3, 8, dtype=torch.uint8)
feature = lambda **options: fr.FeatureConfig("f", table="t", **options)

WRONG = {  # call: (kind, the part of the message that names the argument)
    "fbgemm: words": (lambda: fr.interop.from_fbgemm({"t": BYTES}, [("t", 8, 4)], layout="mine"), ValueError,
        "`layout`"),
    "fbgemm: floats": (lambda: fr.interop.from_fbgemm({"t": BYTES.float()}, [("t", 8, 4)]), TypeError, "is not bytes"),
    "fbgemm: narrow": (lambda: fr.interop.from_fbgemm({"t": BYTES}, [("t", 8, 5)]), ValueError, "rows of another size"),
    "fbgemm: padded nbit": (lambda: fr.interop.from_fbgemm({"t": BYTES}, [("t", 4, 4)], layout="nbit"), ValueError,
        "rows of another size"),
    "fbgemm: other table": (lambda: fr.interop.from_fbgemm({"t": BYTES}, [("u", 8, 4)]), ValueError,
        "`forms` do not match `rows`"),
    "fbgemm: 3 bits": (lambda: fr.interop.from_fbgemm({"t": BYTES}, [("t", 3, 4)]), ValueError, "has bits that layout"),
    "to fbgemm: half bytes": (lambda: fr.interop.to_fbgemm(fr.quantize({"t": torch.ones(2, 3)}, "int4")), ValueError,
        "do not fill whole bytes"),
    "to fbgemm: bfloat16": (lambda: fr.interop.to_fbgemm(fr.quantize({"t": torch.ones(2, 3)}, "bfloat16")), TypeError,
        "a dtype that FBGEMM does not read"),
    "to fbgemm: 4 as 8": (lambda: fr.interop.to_fbgemm(fr.quantize({"t": torch.ones(2, 4)}, "int4"), layout="8bit"),
        ValueError, "has bits that layout '8bit' lacks"),
    "to fbgemm: aligned nbit": (lambda: fr.interop.to_fbgemm(fr.quantize({"t": torch.ones(2, 4)}), layout="nbit",
        row_alignment=16), ValueError, "`row_alignment` does not fit"),
    "codes of no forms": (lambda: fr.QuantizedTables({"t": BYTES}, None), TypeError, "`tables` or `forms`"),
    "codes in a list": (lambda: fr.QuantizedTables([BYTES], (("t", 8, 4),)), TypeError, "`tables` or `forms`"),
    "codes of '4'": (lambda: fr.QuantizedTables({"t": BYTES}, (("t", 8, "4"),)), TypeError, "forms` are not forms"),
    "codes of 4.0": (lambda: fr.QuantizedTables({"t": BYTES}, (("t", 8, 4.0),)), TypeError, "forms` are not forms"),
    "codes of 8.0 bits": (lambda: fr.QuantizedTables({"t": BYTES}, (("t", 8.0, 4),)), TypeError, "are not forms"),
    "codes of another order": (
        lambda: fr.QuantizedTables({"t": BYTES, "u": BYTES}, (("u", 8, 4), ("t", 8, 4))), ValueError,
        "do not match the tables"),
    "codes of 3 bits": (lambda: fr.QuantizedTables({"t": BYTES}, (("t", 3, 4),)), ValueError, "have unknown bits"),
    "floats for codes": (lambda: fr.QuantizedTables({"t": BYTES.float()}, (("t", 8, 4),)), TypeError,
        "is not stored as its form says"),
    "codes of -4": (lambda: fr.QuantizedTables({"t": BYTES}, (("t", 8, -4),)), TypeError, "forms` are not forms"),
    "a mesh without its name": (lambda: fr.shard(IDS, fr.P(), fr.Mesh.emulated(x=1)), TypeError, "not those that it"),
    "quantised, as tensors": (lambda: fr.save_safetensors("t", fr.quantize({"t": torch.ones(2, 3)})), TypeError,
        "`tensors` are more than tensors"),
    "fake, as tensors": (lambda: fr.save_safetensors("t", fr.fake_quantize({"t": torch.ones(2, 3)})), TypeError,
        "`tensors` are more than tensors"),
    "coding a row": (lambda: ops.quantize_rows(torch.ones(3), 8), ValueError, "`table` is not a table"),
    "coding integers": (lambda: ops.quantize_rows(IDS[None], 8), TypeError, "`table` is not a table"),
    "coding float8": (lambda: ops.quantize_rows(torch.ones(2, 3).to(torch.float8_e4m3fn), 8), TypeError,
        "`table` is not a table"),
    "coding by a float": (lambda: ops.quantize_rows(torch.ones(2, 3), 8, torch.tensor(1.0)), TypeError,
        "`key` is not a key"),
    "coding by three keys": (lambda: ops.quantize_rows(torch.ones(2, 3), 8, fr.split(fr.key(0), 3)), ValueError,
        "`key` is not a key"),
    "a table of float8": (lambda: fr.lookup({"t": torch.ones(5, 4).to(torch.float8_e4m3fn)}, KEYED, F), TypeError,
        "`tables['t']` is not a table"),
    "queries of float8": (lambda: fr.top_k(torch.ones(5, 4).to(torch.float8_e4m3fn), torch.ones(5, 4), 1), TypeError,
        "need  f[B, D] of 16 bits or more"),
    "hash in words": (lambda: feature(hash="modulo"), TypeError, "`hash` is not a Hash"),
    "seed 2⁶³": (lambda: fr.multiply_shift(2**63), ValueError, "`seed` is too large"),
    "hash of -1 rows": (lambda: fr.hash_rows(IDS, fr.modulo(), -1), ValueError, "`num_embeddings` is out of range"),
    "no hash of -1 rows": (lambda: fr.hash_rows(IDS, None, -1), ValueError, "`num_embeddings` is out of range"),
    "bound NaN": (lambda: fr.uniform(NAN), ValueError, "`bound` is not a scale"),
    "bound -1": (lambda: fr.uniform(-1.0), ValueError, "need  a finite number >= 0"),
    "std infinite": (lambda: fr.normal(INF), ValueError, "`std` is not a scale"),
    "constant NaN": (lambda: fr.constant(NAN), ValueError, "`value` is not a scale"),
    "constant infinite": (lambda: fr.constant(INF), ValueError, "need  a finite number\n"),
    "split in -1": (lambda: fr.split(fr.key(0), -1), ValueError, "`num` is out of range"),
    "momentum NaN": (lambda: fr.nn.batch_norm(2, momentum=NAN), ValueError, "`momentum` is out of range"),
    "momentum 2": (lambda: fr.nn.batch_norm(2, momentum=2), ValueError, "`momentum` is out of range"),
    "eps -1": (lambda: fr.nn.batch_norm(2, eps=-1.0), ValueError, "`eps` is out of range"),
    "dropout NaN": (lambda: fr.nn.mlp((2, 1), dropout=NAN), ValueError, "`dropout` is out of range"),
    "normal of NaN": (lambda: fr.nn.normal(NAN), ValueError, "`std` is out of range"),
    "penalty NaN": (lambda: fr.models.dcnv2(T, F, cross_penalty=NAN), ValueError, "`cross_penalty` is out of range"),
    "temperature NaN": (lambda: fr.models.two_tower(T, F, (fr.FeatureConfig("g", table="t"),), temperature=NAN),
        ValueError, "`temperature`"),
    "no sizes": (lambda: fr.models.wide_deep(T, F, sizes=()), ValueError, "need  at least one size"),
    "moved nowhere": (lambda: fr.tree.to({}), ValueError, "`device` and `dtype` are both None"),
    "moved to integers": (lambda: fr.tree.to({}, torch.int32), TypeError, "`dtype` is not of floats"),
    "no such device": (lambda: fr.Batch(None, IDS).to("nowhere"), ValueError, "`device` is not available"),
    "map over two forms": (lambda: fr.tree.map(max, {"a": 1}, {"b": 1}), ValueError, "`rest[0]` is not of the"),
    "a leaf too many": (lambda: fr.tree.unflatten(fr.tree.structure(1), [1, 2]), ValueError, "`leaves` have another"),
    "closer than 0": (lambda: fr.tree.allclose(1, 1, rtol=-1.0), ValueError, "`rtol` is out of range"),
    "merge of no aux": (lambda: fr.models.merge_stats({}, None), TypeError, "`aux` has no statistics"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    """An argument that is no number, flag or function in its range raises at the call, with got and need."""
    assert_refused(*WRONG[name])

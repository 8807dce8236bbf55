"""Quantised tables: values that lookups read in place of a dict of float tables.

    lookup(quantize(tables), ids)  =  lookup(dequantize(quantize(tables)), ids)  ~  lookup(tables, ids)

Each row of codes has its own scale and bias. The docstring of `quantize` bounds the error of a number.
Shapes: R rows, D dim, S bytes of a stored row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import (
    RETYPED,
    Key,
    Movable,
    Named,
    Problem,
    any_tracked,
    check,
    describe,
    fail,
    fold_in,
    mapping,
    pytree,
    replace,
    sure,
    tree_leaves,
    typed,
)
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.kernels.forms import CODE_BITS
from funcrec.kinds._codes import CODES, FLOATS, Dtype, Form, bits_of, dtype_problems, form_problems, named_dtypes
from funcrec.tables import (
    KINDS,
    FeatureConfig,
    Kind,
    LookupResult,
    Placed,
    is_plain,
    kind_of_tables,
    lookup_forms,
    name_number,
    num_bags_of,
    pooled_read,
    read_weights,
    row_problems,
    sequences_read,
    table_tensor_problems,
)


@mapping(lambda q: q.tables, "table")
@pytree(static=("forms",))
class QuantizedTables(Named[Tensor], Movable):
    """Tables as codes of 8, 4 or 2 bits, or as floats of 16 or 32 bits. `quantize` returns them, and lookups read them.

    They are read, and not trained. `value_and_grad` accepts them in its params. `fake_quantize` trains tables for them.

    Args:
      tables: {table: u8[R, S] or f[R, D]}. A row of codes begins with its scale and its bias, two bytes each. The codes
        follow, low bits first.
      forms: (table, bits, dim) of each table, in order: bits 8, 4 or 2 for codes, 16 or 32 for floats.

    Example:
      >>> import torch, funcrec as fr
      >>> q = fr.quantize({"item": torch.tensor([[0.0, 1.0, 0.5], [2.0, 2.0, 2.0]])}, "int8")
      >>> q, q.forms[0], fr.tree.nbytes(q)
      (QuantizedTables({item: int8[2, 3]}), ('item', 8, 3), 14)
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 1], []]})
      >>> fr.lookup(q, ids, [fr.FeatureConfig("clicked", table="item")])["clicked"]
      tensor([[2.0000, 3.0000, 2.5020],
              [0.0000, 0.0000, 0.0000]])

    Source: FBGEMM's IntNBitTableBatchedEmbeddingBags, which stores rows the same way.
    """

    tables: dict[str, Tensor]
    forms: tuple[Form, ...]

    def __post_init__(self) -> None:
        call = "funcrec.QuantizedTables"
        if not isinstance(self.tables, Mapping) or not isinstance(self.forms, tuple):
            got, need = f"{describe(self.tables)}, {describe(self.forms)}", "a dict of tables, a tuple of forms"
            hint = "fr.quantize(tables)"
            fail(call, "`tables` or `forms` have another type.", got=got, need=need, hint=hint, kind=TypeError)
        if all(isinstance(t, Tensor) for t in self.tables.values()):  # skips placeholders of tensors
            check(call, form_problems(self.tables, self.forms, "QuantizedTables"))

    def __repr__(self) -> str:
        each = (f"{n}: {shown(self.tables[n], *rest)}" for n, *rest in self.forms)
        return f"QuantizedTables({{{', '.join(each)}}})"


def shown(t: Any, bits: int, dim: int) -> str:
    """Return the text `int8[R, D]`, with the dtype and shape that a stored table stands for."""
    return f"int{bits}[{t.shape[0]}, {dim}]" if bits in CODE_BITS and isinstance(t, Tensor) else describe(t)


def shapes_of(q: QuantizedTables) -> dict[str, tuple[int, int]]:
    return {n: (q[n].shape[0], dim) for n, _, dim in q.forms}


def read_quantized(
    tables: Any, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None = None
) -> LookupResult:
    """Return the lookup of QuantizedTables. `features` are all pooled, or all sequences."""
    forms = {n: (bits, dim) for n, bits, dim in tables.forms}
    shapes = {n: (t.shape[0], forms[n][1]) for n, t in tables.items()}
    if features[0].pooling == "none":
        gather = lambda n, rows: ops.quantized_rows(tables[n], rows, *forms[n], implementation=implementation)
        return sequences_read(gather, ids, features, shapes)
    names, buffers, told = lookup_forms(ids, features, shapes)
    values = ops.quantized_lookup(
        [tables[n] for n in names], buffers, ids.offsets, read_weights(ids, features), told, num_bags_of(ids, features),
        [forms[n][0] for n in names], [forms[n][1] for n in names], implementation=implementation,
    )  # fmt: skip
    return pooled_read(values, ids, features, shapes)


KINDS[QuantizedTables] = Kind(
    shapes_of,
    read_quantized,
    is_trained=lambda q: False,
    forms=lambda q: {n: (bits, dim) for n, bits, dim in q.forms},
    placed=Placed(lambda sharded, parts: QuantizedTables(parts, sharded.layout.forms)),
)


def retyped(q: QuantizedTables, dtype: torch.dtype) -> QuantizedTables:
    """Return the tables with floats converted to `dtype`, which lookups must be able to read. Codes stay."""
    floats = [n for n, bits, _ in q.forms if bits not in CODE_BITS]
    if floats and dtype not in FLOATS.values():
        what, need = f"tables {floats} cannot be stored so.", ", ".join(map(str, FLOATS.values()))
        fail("funcrec.QuantizedTables.to", what, got=f"{dtype}", need=need, hint="q.to(torch.float32)", kind=TypeError)
    return replace(q, forms=tuple((n, 8 * dtype.itemsize if n in floats else b, dim) for n, b, dim in q.forms))


RETYPED[QuantizedTables] = retyped


@typed
def quantize(
    tables: Mapping[str, Any], dtype: Dtype | Mapping[str, Dtype] | None = None, *, key: Key | None = None
) -> QuantizedTables:
    """Return tables f[R, D] stored as QuantizedTables: each row as codes between its least and its greatest number.

        x ~ code · scale + bias        scale = f16((max - bias) / L), bias = f16(min) of the row, L = 2^bits - 1

    Args:
      tables: {table: f[R, D]} of any float dtype; f64 tables are read as f32.
      dtype: one dtype for all tables, or {table: dtype}. A dtype is "int8", "int4", "int2", "float16" (numbers above
        65504 become inf), "bfloat16", or "float32", which leaves a table as it is. None means "int8", or the dtypes of
        FakeQuantizedTables.
      key: rounds codes at random. A code is rounded up with a probability equal to the fraction, so that the mean over
        keys is x. None rounds to the nearest code. Floats of 16 bits are always rounded to the nearest number.

    Returns:
      QuantizedTables, which `lookup` and `lookup_sequence` accept. A row is NaN in all columns if it holds NaN or inf,
      or if its bias or scale is above 65504, the largest number of f16. Codes do not keep the sign of a zero.

    Raises:
      KeyError: a table has no dtype.
      TypeError: tables are differentiated (use `fake_quantize`).
      ValueError: `tables` are sharded and there is a key, or tables cut by columns have a dtype of codes (a row has one
        scale).

    Law: for every number x of a row, and r = max - min of the row,
      codes of 8, 4, 2 bits:  |x - x̂| <= scale / 2 + 2⁻¹¹ (|min| + r) + 2⁻¹⁷, with scale <= (r + 2⁻¹¹ |min|) / L · 1.001
                              + 2⁻²⁴; with a key twice the first term;
      float16:                |x - x̂| <= 2⁻¹¹ |x| + 2⁻²⁵;    bfloat16: |x - x̂| <= 2⁻⁸ |x| (2⁻¹³³ near 0).
      f16 loses 2⁻¹⁷ of a scale below 6e-5. Scale up rows whose numbers differ by less than 1e-5.

    Cost: it reads the tables once, and writes D · bits / 8 + 4 bytes for each row.

    Example:
      >>> import torch, funcrec as fr
      >>> tables = {"item": torch.tensor([[0.0, 0.1, 0.3]]), "user": torch.tensor([[1.5, 2.0]])}
      >>> fr.dequantize(fr.quantize(tables, {"item": "int2", "user": "float16"}))
      {'item': tensor([[0.0000, 0.1000, 0.2999]]), 'user': tensor([[1.5000, 2.0000]])}

    Source: FBGEMM's FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf, which torchrec.inference calls.
    """
    call = "funcrec.quantize"
    if any_tracked(tree_leaves(tables)):
        fail(
            call, "the tables are differentiated, and codes have no derivative.", got="tables that grad or jvp follows",
            need="plain tables", hint="fr.fake_quantize(tables, dtype), which lookups differentiate", kind=TypeError,
        )  # fmt: skip
    if not is_plain(tables):
        check(call, kind_problems(tables))
        return sure(kind_of_tables(tables).quantized)(tables, dtype, key)
    dtype = "int8" if dtype is None else dtype
    check(call, dtype_problems(tables, dtype), table_tensor_problems(tables))
    check(call, row_problems(tables))
    named = named_dtypes(tables, dtype)
    made = {n: stored(t, named[n], table_key(key, n)) for n, t in tables.items()}
    return QuantizedTables(made, tuple((n, bits_of(named[n]), t.shape[1]) for n, t in tables.items()))


def stored(t: Tensor, dtype: str, key: Tensor | None = None) -> Tensor:
    """Return a table, or rows of it, as its dtype stores them: u8[R, S], or floats [R, D]."""
    return ops.quantize_rows(t, CODES[dtype], key) if dtype in CODES else t.to(FLOATS[dtype])


def table_key(key: Tensor | None, table: str) -> Tensor | None:
    """Return the key i64[] that rounds the codes of a table."""
    return None if key is None else fold_in(key, name_number(table))


def dequantize(q: QuantizedTables) -> dict[str, Tensor]:
    """Return the tables that the codes stand for: q -> {table: f32[R, D]}.

    Law: lookups of q equal lookups of dequantize(q) up to rounding in f32. Quantising dequantize(q) gives the same
      numbers within the bound of `quantize`.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.dequantize(fr.quantize({"item": torch.tensor([[0.0, 3.0, 255.0]])}))
      {'item': tensor([[  0.,   3., 255.]])}
    """
    if not isinstance(q, QuantizedTables):
        need, hint = "QuantizedTables", "fr.quantize(tables); of sharded ones fr.gather_tables(q, mesh) first"
        fail("funcrec.dequantize", "`q` is not quantised.", got=describe(q), need=need, hint=hint, kind=TypeError)
    return {n: decoded(q[n], bits, dim) for n, bits, dim in q.forms}


def decoded(t: Tensor, bits: int, dim: int) -> Tensor:
    """Return the numbers of a stored table, f32[R, D]."""
    if bits not in CODE_BITS:
        return t.to(torch.float32)
    return ops.quantized_rows(t.contiguous(), torch.arange(t.shape[0], device=t.device), bits, dim)


def kind_problems(tables: Mapping[str, Any]) -> Iterator[Problem]:
    if kind_of_tables(tables).quantized is None:
        need, hint = "{name: f[R, D]}, or a kind that tells how", "fr.dequantize(q) first, of quantised ones"
        what = f"`tables` are {type(tables).__name__}, which are not quantised."
        yield Problem(what, describe(tables), need, hint if isinstance(tables, QuantizedTables) else "", TypeError)

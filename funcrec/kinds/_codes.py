"""How tables are stored: users name dtypes, and kernels get (bits, dim) of each table.

table f[R, D]  ->  u8[R, 4 + ceil(D · bits / 8)] for codes of 8, 4 or 2 bits; f16, bf16 or f32 [R, D] for 16 or 32
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from funcrec.core import Problem, absent_problems, describe, unknown_problems
from funcrec.kernels.forms import CODE_BITS, row_bytes

Dtype = Literal["int8", "int4", "int2", "float16", "bfloat16", "float32"]
CODES = {"int8": 8, "int4": 4, "int2": 2}
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


Form = tuple[str, int, int]  # (table, bits of a number, D), a static value


def named_dtypes(tables: Collection[str], dtype: str | Mapping[str, str]) -> dict[str, str]:
    """Return {table: the name of its dtype}, from one dtype for all tables or a dtype for each."""
    return {n: dtype if isinstance(dtype, str) else dtype[n] for n in tables}


def bits_of(dtype: str) -> int:
    return CODES.get(dtype) or 8 * FLOATS[dtype].itemsize


# -- validators --------------------------------------------------------------------------------------------------


def dtype_problems(tables: Collection[str], dtype: str | Mapping[str, str]) -> Iterator[Problem]:
    """Yield problems if a dict of dtypes lacks a table, or names a table that is absent."""
    if isinstance(dtype, str):
        return
    need, hint = "a dtype for each table", 'dtype={"item": "int8"}, or "float32" to leave a table as it is'
    yield from absent_problems("`dtype` lacks table {}.", dtype, tables, need, hint)
    yield from unknown_problems("`dtype` names no table.", dtype, tables, kind=KeyError)


def is_form(form: object) -> bool:
    is_count = lambda n: isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 0
    return isinstance(form, tuple) and len(form) == 3 and isinstance(form[0], str) and all(map(is_count, form[1:]))


def form_problems(tables: Mapping[str, Tensor], forms: Sequence[Form], path: str) -> Iterator[Problem]:
    """Yield problems if a table is not stored as its form says."""
    if not isinstance(forms, Sequence) or not all(map(is_form, forms)):
        need = "(table, bits, dim) of each table"
        yield Problem(f"`{path}.forms` are not forms.", repr(forms), need, "fr.quantize(tables)", TypeError)
        return
    if [f[0] for f in forms] != list(tables):
        got, need = f"forms of {[f[0] for f in forms]}", f"one for each of {list(tables)}, in order"
        yield Problem(f"`{path}.forms` do not match the tables.", got, need, "fr.quantize(tables)")
        return
    for name, bits, dim in forms:
        t = tables[name]
        dtypes = {16: (torch.float16, torch.bfloat16), 32: (torch.float32,)}.get(bits, (torch.uint8,))
        width = row_bytes(bits, dim) if bits in CODE_BITS else dim
        if bits not in (*CODE_BITS, 16, 32):
            yield Problem(f"`{path}.forms` have unknown bits.", f"{name!r}: {bits}", "8, 4, 2, 16 or 32", "8")
        elif not isinstance(t, Tensor) or t.dtype not in dtypes or t.dim() != 2 or t.shape[1] != width:
            need = f"{'u8' if bits in CODE_BITS else f'f{bits}'}[R, {width}], {dim} numbers of {bits} bits"
            what = f"`{path}.tables[{name!r}]` is not stored as its form says."
            yield Problem(what, describe(t), need, "fr.quantize(tables)", TypeError)

"""Converts rows of codes of FBGEMM and TorchRec, where scale, bias and padding have other places than here.

    "tbe"    [scale f16][bias f16][codes][padding]    IntNBitTableBatchedEmbeddingBagsCodegen, and so TorchRec
    "nbit"   [codes][scale f16][bias f16]             FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
    "8bit"   [codes][scale f32][bias f32]             FloatToFused8BitRowwiseQuantized

Shapes: R rows, D dim, W bytes of a row of FBGEMM, S bytes of a row of funcrec.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as with_fields
from typing import Any, Literal

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, fail, is_wrapped, replace, typed
from funcrec.interop._configs import from_configs
from funcrec.interop._places import table_of
from funcrec.kernels.forms import CODE_BITS, HEAD_BYTES, row_bytes
from funcrec.kinds import QuantizedTables
from funcrec.tables import FeatureConfig

Layout = Literal["tbe", "nbit", "8bit"]
FLOATS = {16: torch.float16, 32: torch.float32}
BITS = {"INT8": 8, "INT4": 4, "INT2": 2, "FP16": 16, "FP32": 32}  # by TorchRec's dtype names
ALIGNMENTS = (1, 2, 4, 8, 16, 32, 64, 128)  # bytes for TorchRec's rows; the default is 16
QPARAMS = ("_qscale", "_qbias")  # suffixes of a weight's name in TorchRec's split state dicts


@typed
def from_fbgemm(
    rows: Mapping[str, Tensor], forms: Sequence[tuple[str, int, int]], *, layout: Layout = "tbe"
) -> QuantizedTables:
    """Return FBGEMM's quantised rows as QuantizedTables. It copies rows.

    | layout | a row | of |
    | --- | --- | --- |
    | "tbe" | scale f16, bias f16, codes, any padding | the inference TBE, `split_embedding_weights(False)` |
    | "nbit" | codes, scale f16, bias f16 | `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf` |
    | "8bit" | codes of 8 bits, scale f32, bias f32 | `FloatToFused8BitRowwiseQuantized` |

    Args:
      rows: {table: u8[R, W]}.
      forms: (table, bits, dim) of each table, in order, as in `QuantizedTables.forms`: 8, 4 or 2 bits; for "tbe" also
        16 and 32, for rows of f16 and f32. The bytes do not show the form.

    Raises:
      ValueError: if a scale or a bias of "8bit" exceeds 65504, which f16 cannot hold.

    Law: "tbe" and "nbit" keep every bit. For "8bit", scale and bias are rounded to f16, which moves a number of the row
      by at most 2⁻¹¹ (|bias| + 255 · scale) + 2⁻¹⁷.

    Example:
      >>> import torch, funcrec as fr
      >>> rows = torch.tensor([[0, 128, 255, 0, 60, 0, 0]], dtype=torch.uint8)  # codes, 1.0 and 0.0 in f16
      >>> q = fr.interop.from_fbgemm({"item": rows}, [("item", 8, 3)], layout="nbit")
      >>> fr.dequantize(q)
      {'item': tensor([[  0., 128., 255.]])}
    """
    call = "funcrec.interop.from_fbgemm"
    check(call, layout_problems(forms, layout), row_problems(rows, forms, layout))
    own = {n: our_rows(call, n, rows[n], b, d, layout) for n, b, d in forms}
    return QuantizedTables(own, tuple((n, b, d) for n, b, d in forms))


@typed
def to_fbgemm(q: QuantizedTables, *, layout: Layout = "tbe", row_alignment: int = 1) -> dict[str, Tensor]:
    """Return quantised tables as rows of FBGEMM. It is the inverse of `from_fbgemm`.

    Args:
      row_alignment: for "tbe", rows are padded with zeros to a multiple of this number of bytes, as by FBGEMM's
        `row_alignment` (by default 1 on a CPU and 16 on a GPU).

    Returns:
      {table: u8[R, W]}, new tensors.

    Raises:
      ValueError: if the codes of a row do not fill whole bytes, if codes of 4 or 2 bits have the layout "8bit", or if
        floats have another layout than "tbe".
      TypeError: if rows are bfloat16, which FBGEMM does not read.

    Law: `from_fbgemm(to_fbgemm(q, layout=layout), q.forms, layout=layout)` equals q, bit for bit.

    Example:
      >>> import torch, funcrec as fr
      >>> q = fr.quantize({"item": torch.tensor([[0.0, 3.0, 1.0, 2.0]])}, "int2")
      >>> fr.interop.to_fbgemm(q, layout="nbit"), fr.interop.to_fbgemm(q, row_alignment=8)
      ({'item': tensor([[156,   0,  60,   0,   0]], dtype=torch.uint8)},
       {'item': tensor([[  0,  60,   0,   0, 156,   0,   0,   0]], dtype=torch.uint8)})
    """
    call = "funcrec.interop.to_fbgemm"
    check(call, layout_problems(q.forms, layout), alignment_problems(row_alignment, layout), bfloat_problems(q))
    return {n: their_rows(q[n], bits, layout, row_alignment) for n, bits, _ in q.forms}


# -- a table ---------------------------------------------------------------------------------------------------------


def bytes_of(bits: int, dim: int) -> int:
    """Return the number of bytes of a row without padding."""
    return row_bytes(bits, dim) if bits in CODE_BITS else dim * FLOATS[bits].itemsize


def our_rows(call: str, name: str, x: Tensor, bits: int, dim: int, layout: str) -> Tensor:
    """Return rows in the form of funcrec, u8[R, S] or f[R, D]."""
    size = bytes_of(bits, dim)
    if layout == "tbe":
        own = x[:, :size].clone(memory_format=torch.contiguous_format)
        return own if bits in CODE_BITS else own.view(FLOATS[bits])
    if layout == "nbit":
        return x.roll(HEAD_BYTES, 1)
    wide = x[:, -2 * HEAD_BYTES :].clone(memory_format=torch.contiguous_format).view(torch.float32)
    half = wide.to(torch.float16)
    lost = (wide.isfinite() & half.isinf()).any(1).nonzero()[:, 0].tolist()
    if lost:
        got = f"scale and bias {wide[lost[0]].tolist()} of row {lost[0]}; {len(lost)} such rows in all"
        hint = "tables in another unit, or fr.quantize(tables, 'float32')"
        fail(call, f"`rows[{name!r}]` has what f16 does not hold.", got=got, need="within ±65504", hint=hint)
    return torch.cat([half.view(torch.uint8), x[:, :dim]], 1)


def their_rows(x: Tensor, bits: int, layout: str, row_alignment: int) -> Tensor:
    """Return rows in the form of the layout, u8[R, W]."""
    x = x.contiguous() if bits in CODE_BITS else x.contiguous().view(torch.uint8)
    if layout == "tbe":
        return padded(x, row_alignment)
    if layout == "nbit":
        return x.roll(-HEAD_BYTES, 1)
    head = x[:, :HEAD_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float16)
    return torch.cat([x[:, HEAD_BYTES:], head.to(torch.float32).view(torch.uint8)], 1)


def padded(x: Tensor, alignment: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % alignment))


# -- TorchRec's modules ------------------------------------------------------------------------------------------------


def is_quantised(module: Any) -> bool:
    """Return whether one of TorchRec's collections holds rows of bytes."""
    held = module.state_dict() if hasattr(module, "state_dict") else {}
    return any(n.endswith(".weight") and getattr(x, "dtype", None) == torch.uint8 for n, x in held.items())


def from_quantised(
    call: str, module: Any, configs: Sequence[Any], weighted: bool
) -> tuple[QuantizedTables, tuple[FeatureConfig, ...]]:
    """Return (tables, features) of a quantised collection, without the initializers of the tables."""
    check(call, *(data_type_problems(c) for c in configs))
    pooled = [getattr(c, "pooling", None) for c in configs]  # the collection's answer groups tables by pooling
    configs = [c for kind in dict.fromkeys(pooled) for c, own in zip(configs, pooled, strict=True) if own == kind]
    float_configs = [with_fields(c, data_type=type(c.data_type).FP32, init_fn=None) for c in configs]
    _, features = from_configs(call, float_configs, weighted)
    forms = tuple((c.name, BITS[c.data_type.value], c.embedding_dim) for c in configs)
    return loaded_rows(call, forms, module.state_dict()), features


def load_quantised(call: str, q: QuantizedTables, state_dict: Mapping[str, Any]) -> QuantizedTables:
    """Return `q` with the rows of a quantised module's state dict."""
    new = loaded_rows(call, q.forms, state_dict)
    other = {n: (t.shape[0], new[n].shape[0]) for n, t in q.items() if t.shape[0] != new[n].shape[0]}
    for n, (ours, theirs) in other.items():
        fail(call, f"table {n!r} has another number of rows in the state dict.", got=f"{theirs}", need=f"{ours}")
    return replace(q, tables={n: new[n].to(t.device, t.dtype) for n, t in q.items()})


def quantised_like(call: str, q: QuantizedTables, like_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of `q` in the form of a quantised module's state dict.

    They are padded or split like the rows of that dict.
    """
    names, made = placed_names(call, q.forms, like_dict), dict(like_dict)
    for n, bits, _ in q.forms:
        name = names[n]
        x, theirs = their_rows(q[n], bits, "tbe", 1), like_dict[name]
        if x.shape[0] != theirs.shape[0]:
            got, need = f"{theirs.shape[0]}", f"{x.shape[0]}"
            fail(call, f"table {n!r} has another number of rows in the state dict.", got=got, need=need)
        if bits in CODE_BITS and name + QPARAMS[0] in like_dict:
            head, x = x[:, :HEAD_BYTES].contiguous().view(torch.float16), x[:, HEAD_BYTES:]
            for part, own in zip(QPARAMS, head.split(1, 1), strict=True):
                made[name + part] = own.to(like_dict[name + part], copy=True)
        width = theirs.detach().view(torch.uint8).shape[1]
        plain = torch.nn.functional.pad(x, (0, width - x.shape[1])).to(theirs.device, copy=True)
        made[name] = type(theirs)(plain) if hasattr(type(theirs), "N") else plain  # UInt4Tensor and UInt2Tensor
    return {n: x.clone() if isinstance(x, Tensor) and x is like_dict[n] else x for n, x in made.items()}


def placed_names(call: str, forms: Sequence[tuple[str, int, int]], held: Mapping[str, Any]) -> dict[str, str]:
    """Return {table: its name in a state dict}. It ignores buffers of a TBE."""
    tables = {n for n, _, _ in forms}
    names = {table: n for n in held if (table := table_of(n, tables)) is not None}
    known = {n + part for n in names.values() for part in ("", *QPARAMS)}
    check(call, place_problems(forms, names, [n for n in held if n not in known and ".tbes." not in f".{n}"]))
    check(call, *(weight_problems(names[n], held, bits, dim) for n, bits, dim in forms))
    return names


def loaded_rows(call: str, forms: Sequence[tuple[str, int, int]], held: Mapping[str, Any]) -> QuantizedTables:
    """Return the tables of a state dict, whose rows are whole, or split into codes, scales and biases."""
    names = placed_names(call, forms, held)
    whole = {n: joined_rows(names[n], held, bits) for n, bits, _ in forms}
    return QuantizedTables({n: our_rows(call, n, whole[n], b, d, "tbe") for n, b, d in forms}, tuple(forms))


def joined_rows(name: str, held: Mapping[str, Any], bits: int) -> Tensor:
    """Return rows in the form of the TBE, u8[R, W]."""
    x = held[name].detach().view(torch.uint8)  # the bytes of a UInt4Tensor or UInt2Tensor
    if bits not in CODE_BITS or name + QPARAMS[0] not in held:
        return x
    head = torch.cat([held[name + part].detach() for part in QPARAMS], 1)
    return torch.cat([head.view(torch.uint8), x], 1)


# -- validators --------------------------------------------------------------------------------------------------------


def layout_problems(forms: Sequence[tuple[str, int, int]], layout: str) -> Iterator[Problem]:
    """Report bits and dims that do not fit the layout."""
    need = {"tbe": (*CODE_BITS, *FLOATS), "nbit": CODE_BITS, "8bit": (8,)}[layout]
    for name, bits, dim in forms:
        if bits not in need:
            hint = 'layout="tbe"' if bits in (*CODE_BITS, *FLOATS) else "forms=q.forms"
            yield Problem(f"table {name!r} has bits that layout {layout!r} lacks.", f"{bits}", f"one of {need}", hint)
        elif dim < 1 or dim * bits % 8:
            need_dim = f"a multiple of {max(1, 8 // bits)}, at least 1"
            got, hint = f"dim {dim} of {bits} bits", "tables whose last columns are zeros"
            yield Problem(f"table {name!r} has codes that do not fill whole bytes.", got, need_dim, hint)


def row_problems(rows: Mapping[str, Tensor], forms: Sequence[tuple[str, int, int]], layout: str) -> Iterator[Problem]:
    if [n for n, _, _ in forms] != list(rows):
        got, need = f"forms of {[n for n, _, _ in forms]}", f"one for each of {list(rows)}, in order"
        yield Problem("`forms` do not match `rows`.", got, need, '[(table, 8, 64)] or q.forms')  # fmt: skip
        return
    for name, bits, dim in forms:
        x = rows[name]
        if bits not in (*CODE_BITS, *FLOATS) or dim < 1:
            continue  # `layout_problems` reports these
        size = bytes_of(bits, dim)
        wide = {"tbe": (), "nbit": (size,), "8bit": (dim + 8, dim + 8 + -dim % 4)}[layout]
        fits = x.dim() == 2 and (x.shape[1] in wide if wide else x.shape[1] >= size)
        if x.dtype != torch.uint8 or is_wrapped(x):
            hint = "the operator's own bytes, outside of torch.func"
            yield Problem(f"`rows[{name!r}]` is not bytes.", describe(x), "u8[R, W]", hint, TypeError)
        elif not fits:
            widths = " or ".join(map(str, sorted(set(wide)))) or f"{size} or more"
            need = f"u8[R, {widths}], {dim} numbers of {bits} bits"
            yield Problem(f"`rows[{name!r}]` has rows of another size.", describe(x), need,
                          f"the form and the layout of its maker; layout={layout!r} was read")  # fmt: skip


def alignment_problems(row_alignment: int, layout: str) -> Iterator[Problem]:
    if row_alignment < 1 or (layout != "tbe" and row_alignment != 1):
        need = "an integer >= 1" if layout == "tbe" else f"1: rows of {layout!r} have no padding"
        hint = "row_alignment=16" if layout == "tbe" else 'layout="tbe"'
        yield Problem("`row_alignment` does not fit.", f"{row_alignment}", need, hint)


def bfloat_problems(q: QuantizedTables) -> Iterator[Problem]:
    for n, t in q.items():
        if t.dtype == torch.bfloat16:
            hint = f'fr.quantize(tables, {{..., {n!r}: "float16"}})'
            what = f"table {n!r} has a dtype that FBGEMM does not read."
            yield Problem(what, describe(t), "f16 or f32", hint, TypeError)


def data_type_problems(config: Any) -> Iterator[Problem]:
    if config.data_type.value not in BITS:
        what = f"the config of table {config.name!r} has a dtype that quantised tables lack."
        yield Problem(what, f"{config.data_type}", f"one of {list(BITS)}", "weight dtype torch.qint8", TypeError)


def place_problems(
    forms: Sequence[tuple[str, int, int]], names: Mapping[str, str], spare: Sequence[str]
) -> Iterator[Problem]:
    for n, _, _ in forms:
        if n not in names:
            got, need = f"{list(names.values())}", f"one name *.embedding_bags.{n}.weight"
            yield Problem(f"table {n!r} is not in the state dict.", got, need, "tables named as TorchRec's configs are",
                          KeyError)  # fmt: skip
    if spare:
        hint = "the collection's own state_dict(); dense weights by a call with fr.Params({}, dense)"
        yield Problem("the state dict has names that no table has.", f"{list(spare)}", "a table for each", hint)


def weight_problems(name: str, held: Mapping[str, Any], bits: int, dim: int) -> Iterator[Problem]:
    """Report rows that are not bytes, or not as many bytes as the form says, and codes of another number of bits.

    The class of TorchRec's tensor shows whether codes have 4 or 2 bits.
    """
    x, rests = held[name], [held.get(name + part) for part in QPARAMS]
    if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() != 2 or is_wrapped(x):
        hint = "fr.quantize(load_torchrec_state_dict(params, ...).tables), for tables of floats"
        yield Problem(f"`state_dict[{name!r}]` is not rows of codes.", describe(x), "u8[R, W]", hint, TypeError)
        return
    per_byte = getattr(type(x), "N", 1)
    x = x.view(torch.uint8)
    size, is_split = bytes_of(bits, dim), bits in CODE_BITS and rests[0] is not None
    wide = {size - HEAD_BYTES} if is_split else {size + -size % a for a in ALIGNMENTS}
    if per_byte != {4: 2, 2: 4}.get(bits, 1) or x.shape[1] not in wide:
        got = f"u8[{x.shape[0]}, {x.shape[1]}], {per_byte} codes in a byte"
        need = f"u8[R, {min(wide)}{'' if is_split else ' and padding'}]: {dim} numbers of {bits} bits"
        yield Problem(f"`state_dict[{name!r}]` is not stored as the table's form says.", got, need,
                      "q, features = fr.interop.from_torchrec(module)")  # fmt: skip
    for part, r in zip(QPARAMS, rests, strict=True) if is_split else ():
        if not isinstance(r, Tensor) or r.dtype != torch.float16 or tuple(r.shape) != (x.shape[0], 1):
            yield Problem(f"`state_dict[{name + part!r}]` does not match its codes.", describe(r),
                          f"f16[{x.shape[0]}, 1]", "module.state_dict()", TypeError)  # fmt: skip

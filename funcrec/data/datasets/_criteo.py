"""Criteo's click logs: tab-separated text, and the .npy arrays that are made from this text.

    label <tab> 13 integers <tab> 26 categories of eight hexadecimal digits        an empty field is missing

A category's id is its number + 1. A missing category has id 0. Ids reach 2³², so features of these columns need a hash
(`fr.modulo()`, `fr.multiply_shift()`). Shapes: B rows of a batch.

Source: the Kaggle Display Advertising Challenge and the Criteo 1TB Click Logs; facebookresearch/dlrm for log(x + 1),
MLPerf's DLRM-DCNv2 for log(x + 3).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Count, Form, Problem, Size, check, fail, twice_problems, typed
from funcrec.data._stream_loader import to_batch
from funcrec.data.readers import _columns as columns
from funcrec.data.readers._arrow import need_file
from funcrec.data.readers._files import Text, opened
from funcrec.data.readers._rows import (
    Vocabularies,
    need_finite,
    need_ids,
    need_labels,
    row_problems,
    vocabulary_problems,
)
from funcrec.data.readers._stream import tables
from funcrec.jagged import KeyedJaggedTensor
from funcrec.tables import Batch

NUM_DENSE, NUM_SPARSE, DIGITS = 13, 26, 8
INTEGERS = ("label", *(f"int_{i}" for i in range(NUM_DENSE)))
CATEGORIES = tuple(f"cat_{i}" for i in range(NUM_SPARSE))
Transform = Literal["log1", "log3"] | None
TWICE = "`keys` names a column twice."
SHIFT = [np.uint64(n) for n in range(33)]


@typed
def transform_dense(x: Annotated[Tensor, Form("x[...]")], transform: Transform) -> Tensor:
    """Return transformed dense features: log(max(x, 0) + 1), log(max(x, -2) + 3), or x.

    "log1" names Kaggle's formula log(max(x, 0) + 1). "log3" names MLPerf's formula log(max(x, -2) + 3). None returns x.

    Example:
      >>> import torch
      >>> from funcrec.data import transform_dense
      >>> transform_dense(torch.tensor([-3.0, -2.0, 0.0]), "log1")
      tensor([0., 0., 0.])
    """
    if transform is None:
        return x
    return torch.log1p(x.clamp(min=0)) if transform == "log1" else torch.log(x.clamp(min=-2) + 3)


@typed
def criteo_tsv(
    path: object,
    batch_size: Count,
    *,
    transform: Transform = "log1",
    keys: Sequence[str] = CATEGORIES,
    skip: Size = 0,
    drop_last: bool = False,
    vocabularies: Vocabularies = None,
) -> Iterator[Batch]:
    """Return an iterator over batches of Criteo's text, which may be plain, .gz or .bz2. It reads block by block.

    A category's id is its number + 1. A missing category has id 0. Ids reach 2³², so a feature of these columns needs
    a hash.

    Args:
      path: a file, a list of files or a folder. Each line has 40 fields. There is no header.
      transform: the transform of the integers, see `transform_dense`. A missing integer counts as 0.
      keys: the names of the 26 columns.
      skip: the number of first batches to leave out, for a run that continues.
      drop_last: leave out a last batch that is not full.
      vocabularies: {column: V}. An id outside [0, V) is then an error. Without V, such an id reads zeros. Use
        `vocabularies_of(tables, features)` for features without a hash.

    Returns:
      batches with one id i64 per key and row, dense f32[B, 13], label f32[B]. All full batches have the same shapes.

    Raises:
      TypeError, ValueError, FileNotFoundError: an argument does not fit, or a file is missing. The call raises it.
      ModuleNotFoundError: pyarrow is missing.
      ValueError: a line cannot be read. The iterator raises it, and it names the file and the line.
    """
    call = "funcrec.data.criteo_tsv"
    check(call, _column_problems(keys), vocabulary_problems(vocabularies, keys))
    types = dict.fromkeys(INTEGERS, "int64") | dict.fromkeys(CATEGORIES, "binary")
    source = opened(call, path, None, Text("\t", names=list(types), types=types, quotes=False))
    encode = lambda table: _tsv_batch(call, table, transform, tuple(keys), vocabularies or {})
    numbered = tables(call, source, batch_size, skip=skip, drop_last=drop_last)
    return (to_batch(source, encode, rows, table) for rows, table in numbered)


def _tsv_batch(call: str, table, transform: Transform, keys: tuple[str, ...], sizes: Mapping) -> Batch:
    label, *ints = (columns.numbers_of(call, table[n], n, missing=-1 if n == "label" else 0) for n in INTEGERS)
    odd = np.flatnonzero((label != 0) & (label != 1))
    if odd.size:
        got = "no label" if table["label"][odd[0]].as_py() is None else f"label {label[odd[0]]}"
        columns.refuse(call, odd[0], "label", got, "0 or 1")
    sparse = np.stack([_categories(call, table[name], name) for name in CATEGORIES])
    for key, ids in zip(keys, sparse, strict=True):
        need_ids(ids, sizes.get(key), key, lambda row, name, got, need: columns.refuse(call, row, name, got, need))
    return single_ids(label, np.stack(ints, 1).astype(np.float32), sparse, transform, keys)


def _categories(call: str, column, name: str) -> np.ndarray:
    """Return ids i64[n]: 1 + the number that the digits encode, or 0 for no digits."""
    lengths, data = _fields(column)
    there = lengths != 0
    wrong = there & (lengths != DIGITS)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
    else:
        numbers, is_hex = hexadecimal(data.view("<u8"))
        if is_hex.all():
            out = np.zeros(len(lengths), np.int64)
            out[there] = numbers + 1
            return out
        row = int(np.flatnonzero(there)[np.flatnonzero(~is_hex)[0]])
    columns.refuse(call, row, name, f"{column[row].as_py()!r}", "eight hexadecimal digits, or nothing")


def _fields(column) -> tuple[np.ndarray, np.ndarray]:
    """Return (lengths, bytes end to end) of a column of binary strings. A missing string has no bytes."""
    parts = [chunk.buffers() for chunk in column.chunks]
    bounds = [
        np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        for chunk, (_, offsets, _) in zip(column.chunks, parts, strict=True)
    ]
    data = [
        np.frombuffer(bytes_ or b"", np.uint8)[at[0] : at[-1]] for at, (_, _, bytes_) in zip(bounds, parts, strict=True)
    ]
    return np.concatenate([np.diff(at) for at in bounds]), np.concatenate(data)


def hexadecimal(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (numbers i64, whether all characters are digits) of texts of eight characters.

    Each text is a u64 whose lowest byte is the first character. All eight bytes are decoded at once: a digit is the low
    four bits of its byte, + 9 for a letter. Each decoded digit must encode back to its character.
    """
    each = lambda byte: np.uint64(byte * 0x0101010101010101)
    digit = (text & each(0x0F)) + (text >> SHIFT[6] & each(1)) * np.uint64(9)
    is_letter = digit + each(0x76) >> SHIFT[7] & each(1)
    lower = digit + each(ord("0")) + is_letter * np.uint64(ord("a") - ord("0") - 10)
    has_case = (text | text << SHIFT[1]) & each(0x40)  # 0 to 9 have bit 5, letters bit 6
    is_hex = (lower == text | each(0x20)) & (has_case == each(0x40)) & (digit & each(0x10) == 0)
    pairs = (digit << SHIFT[4] | digit >> SHIFT[8]) & np.uint64(0x00FF00FF00FF00FF)
    halves = (pairs << SHIFT[8] | pairs >> SHIFT[16]) & np.uint64(0x0000FFFF0000FFFF)
    return ((halves << SHIFT[16] | halves >> SHIFT[32]) & np.uint64(0xFFFFFFFF)).view(np.int64), is_hex


def single_ids(label, dense, sparse: np.ndarray, transform: Transform, keys: tuple[str, ...]) -> Batch:
    """Return a batch with one id per key and row, from label [B], dense f32[B, J] and sparse ids [F, B]."""
    values = torch.from_numpy(np.ascontiguousarray(sparse)).flatten()
    values = values if values.dtype in (torch.int32, torch.int64) else values.long()
    ids = KeyedJaggedTensor(values, torch.arange(values.shape[0] + 1), keys=keys)
    x = transform_dense(torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float32)), transform)
    return Batch(ids, torch.from_numpy(np.ascontiguousarray(label, dtype=np.float32)), x)


# -- arrays ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CriteoArrays:
    """Memory-mapped arrays: dense [N, J], sparse i[N, F], label [N] or [N, 1]. `batches` and `take` accept them."""

    dense: np.ndarray
    sparse: np.ndarray
    label: np.ndarray
    transform: Transform
    keys: tuple[str, ...]
    vocabularies: Vocabularies = None

    @property
    def num_rows(self) -> int:
        return self.sparse.shape[0]

    def take(self, rows: Tensor) -> Batch:
        """Return the batch of row numbers i[B]. The ids keep their dtype, i32 or i64."""
        check("funcrec.data.take", row_problems(rows, self.num_rows, torch.device("cpu")))
        at = rows.numpy()
        label, sparse = self.label.reshape(-1)[at], self.sparse[at].T
        with np.errstate(over="ignore"):  # a number too large for f32 becomes inf, which is an error
            dense = self.dense[at].astype(np.float32)

        def refuse(row: int, name: str, got: str, need: str) -> None:
            fail("funcrec.data.take", f"row {at[row]}, `{name}` cannot be read.", got=got, need=need)

        need_labels(label, "label", refuse)
        need_finite(dense, [f"dense[{i}]" for i in range(dense.shape[1])], refuse)
        for key, ids in zip(self.keys, sparse, strict=True):
            need_ids(ids, (self.vocabularies or {}).get(key), key, refuse)
        return single_ids(label, dense, sparse, self.transform, self.keys)

    def __repr__(self) -> str:
        return f"CriteoArrays({self.num_rows} rows, {self.dense.shape[1]} dense features, {len(self.keys)} columns)"


@typed
def criteo_npy(
    dense: str | os.PathLike[str],
    sparse: str | os.PathLike[str],
    label: str | os.PathLike[str],
    *,
    transform: Transform = None,
    keys: Sequence[str] | None = None,
    vocabularies: Vocabularies = None,
) -> CriteoArrays:
    """Return memory-mapped arrays of one day's three .npy files, without reading them.

    The files are such as `day_0_dense.npy`, `day_0_sparse.npy` and `day_0_labels.npy`.

    Args:
      dense: f[N, J] or i[N, J]. The published arrays hold log(x + 3) already, so transform=None fits them.
      sparse: i32 or i64 [N, F], used directly as ids. If a table has fewer rows than there are ids, its features need a
        hash.
      label: numbers in [0, 1], [N] or [N, 1].
      keys: F names. None names them cat_0, cat_1, ...
      vocabularies: as in `criteo_tsv`.

    Raises:
      ValueError: a file is cut short, or has another shape or dtype. The error names the file. `take` raises if a label
        is outside [0, 1], a dense feature is not finite in f32, or an id is outside its vocabulary. It names the row.
    """
    call = "funcrec.data.criteo_npy"
    opened = {name: _open_npy(call, path) for name, path in [("dense", dense), ("sparse", sparse), ("label", label)]}
    keys = tuple(keys) if keys is not None else tuple(f"cat_{i}" for i in range(opened["sparse"].shape[-1]))
    check(call, twice_problems(TWICE, keys), _array_problems(**opened, keys=keys))
    check(call, vocabulary_problems(vocabularies, keys))
    return CriteoArrays(**opened, transform=transform, keys=keys, vocabularies=vocabularies)


def _open_npy(call: str, path: str | os.PathLike) -> np.ndarray:
    path = need_file(call, path)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        got = f"{path.stat().st_size} bytes; {error}"
        fail(call, f"`{path.name}` is not a whole .npy file.", got=got, need="an array as numpy.save writes it")


def _array_problems(dense: np.ndarray, sparse: np.ndarray, label: np.ndarray, keys: tuple) -> Iterator[Problem]:
    show = lambda x: f"{x.dtype}{list(x.shape)}"
    if sparse.ndim != 2 or sparse.dtype not in (np.int32, np.int64):
        yield Problem("`sparse` does not hold ids.", show(sparse), "int32 or int64 [N, F]", kind=TypeError)
        return
    if sparse.shape[1] != len(keys):
        yield Problem("`keys` do not match the columns of `sparse`.", f"{len(keys)} keys", f"{sparse.shape[1]} names")
    if dense.ndim != 2 or dense.dtype.kind not in "fiu":
        yield Problem("`dense` does not hold numbers.", show(dense), "floats or integers [N, J]", kind=TypeError)
    elif dense.shape[0] != sparse.shape[0]:
        yield Problem("`dense` and `sparse` differ in rows.", show(dense), f"{sparse.shape[0]} rows")
    if label.size != sparse.shape[0] or label.dtype.kind not in "fiub":
        yield Problem("`label` does not match `sparse`.", show(label), f"{sparse.shape[0]} numbers")


def _column_problems(keys: Sequence[str]) -> Iterator[Problem]:
    yield from twice_problems(TWICE, keys)
    if len(keys) != NUM_SPARSE:
        yield Problem("`keys` do not match the columns.", f"{len(keys)} keys", f"{NUM_SPARSE} names")

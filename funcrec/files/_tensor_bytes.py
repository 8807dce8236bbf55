"""Writes the bytes of tensors, with their CRCs.

write_bytes(file, x) = crc_of(x)          and the file then holds x's elements in order
"""

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import torch
from torch import Tensor

CHUNK = 1 << 18  # bytes: on some systems longer writes take up to five times as long per byte
PART = 1 << 24  # bytes of a tensor that are copied at once, if its elements are not contiguous


def write_bytes(file: BinaryIO, x: Tensor) -> int:
    """Write the elements of a tensor of any device, in their order; return their CRC."""
    crc = 0
    for part in plain_parts(x):
        for chunk in chunks(part):
            crc = zlib.crc32(chunk, crc)
            file.write(chunk)
    return crc


def crc_of(x: Tensor) -> int:
    """Return the CRC of a contiguous tensor on the CPU."""
    crc = 0
    for chunk in chunks(x):
        crc = zlib.crc32(chunk, crc)
    return crc


def chunks(x: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor on the CPU, in chunks."""
    if x.numel():
        flat = x.as_strided((x.numel(),), (1,))  # one element may have any stride
        data = flat.view(torch.uint8).numpy().data
        yield from (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))


def plain_parts(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensor's rows as contiguous host memory, one part after the other."""
    rows = x.detach() if x.dim() else x.detach().view(1)
    if not rows.numel():
        return
    for part in rows.split(max(1, PART * rows.shape[0] // rows.nbytes)):
        plain = part.resolve_conj().resolve_neg().cpu()
        yield torch.zeros_like(plain).copy_(plain) if plain._is_zerotensor() else plain.contiguous()

"""write_bytes writes a tensor's elements in their order, whatever its memory layout."""

import io
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcrec.files import _tensor_bytes, crc_of, write_bytes

DTYPES = (torch.float64, torch.float32, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64)


def written(x):
    """Return (the bytes of a written tensor, the CRC of these bytes)."""
    file = io.BytesIO()
    crc = write_bytes(file, x)
    return file.getvalue(), crc


def same(x, values):
    """Check that the file has the bytes of the values in numpy, and the CRC of these bytes."""
    data, crc = written(x)
    assert data == np.ascontiguousarray(values).tobytes()
    assert crc == zlib.crc32(data)


@given(st.lists(st.integers(0, 7), max_size=4), st.sampled_from(DTYPES), st.randoms(use_true_random=False))
def test_elements_are_written_in_their_order(shape, dtype, rng):
    """Elements are written in order for any permutation of dimensions, and for every second row. The law includes
    tensors that are empty or have no dimension."""
    x = (torch.arange(torch.Size(shape).numel()) % 100).to(dtype).reshape(shape)
    order = rng.sample(range(len(shape)), len(shape))
    for y in (x.permute(order), x[::2] if shape else x):
        same(y, y.numpy())


@given(st.integers(0, 40), st.integers(0, 5), st.integers(1, 64))
def test_parts_make_the_whole(rows, columns, part):
    """A tensor that is copied in parts of a few bytes gives the same file."""
    x = torch.arange(float(columns * rows)).reshape(columns, rows).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tensor_bytes, "PART", part)
        patch.setattr(_tensor_bytes, "CHUNK", max(1, part // 2))
        same(x, x.numpy())


@pytest.mark.parametrize("part", [8, 1 << 24])
def test_what_torch_keeps_as_a_bit_is_written_out(part, monkeypatch):
    """Conjugate views, negative views, and torch's zeros without memory are written as their values."""
    monkeypatch.setattr(_tensor_bytes, "PART", part)
    x = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(3, 2)
    same(x.conj(), x.numpy().conj())
    same(x.conj().imag, x.numpy().conj().imag)
    same(torch._efficientzerotensor((3, 2)), np.zeros((3, 2), np.float32))


def test_the_crc_of_a_tensor_in_memory():
    """crc_of equals the CRC of the output of write_bytes."""
    for x in (torch.arange(100_000.0), torch.empty(0), torch.tensor(3), torch.ones(3, 2, dtype=torch.bfloat16)):
        assert crc_of(x) == written(x)[1]

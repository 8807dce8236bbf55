"""Coded vectors: their rounding, their size in bytes, and values out of range."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcrec.mesh import _codec
from funcrec.mesh._codec import STEPS, Code
from funcrec.testing import assert_trees_close

# relative half steps of bfloat16 and float16
HALF_STEP = 2.0**-8, 2.0**-11


@st.composite
def vectors(draw):
    """Return random (x f[..., W], widths): elements of many sizes, some rows of zeros. Shrinks to one zero."""
    widths = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 8, 65]), min_size=1, max_size=5)))
    lead = draw(st.sampled_from([(), (0,), (3,), (2, 3), (2, 1, 63)]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    x = torch.randn((*lead, sum(widths)), generator=g, dtype=torch.float64)
    x = x * 2.0 ** draw(st.sampled_from([-140, -30, -16, 0, 12]))
    rows = [r * (torch.rand((*lead, 1), generator=g) > 0.2) for r in x.split(widths, -1)]
    return torch.cat(rows, -1).to(dtype), widths


def coded(x, kind, widths):
    """Return x after an encoding and a decoding, as a receiver gets it."""
    return _codec._decode(_codec._encode(x, kind, widths), kind, widths, x.dtype)


def by_rows(x, widths):
    """Return x in int8 by the definition, row by row in f64."""
    out = []
    for row in x.double().split(widths, -1):
        most = row.abs().amax(-1, keepdim=True).float().double()
        steps = torch.where(most > 0, row / most * STEPS, 0).round().clamp(-STEPS, STEPS)
        out.append(steps * most / STEPS)
    return torch.cat(out, -1)


@given(vectors(), st.sampled_from(get_args(Code)))
def test_a_coded_vector_is_near(made, kind):
    """bfloat16 is within 2^-8 of the size of each element, float16 within 2^-11 (or 2^-25, if that is more). int8 is
    within half a step of its row."""
    x, widths = made
    error = (coded(x, kind, widths).double() - x.double()).abs()
    if kind == "int8":
        most = torch.cat([r.abs().amax(-1, keepdim=True).expand_as(r) for r in x.double().split(widths, -1)], -1)
        # the last term is the least number of f32
        bound = most / STEPS / 2 * (1 + 1e-4) + 2.0**-149
    elif kind == "bfloat16":
        bound = (x.double().abs() * HALF_STEP[0]).clamp(min=2.0**-134)
    else:
        bound = (x.double().abs() * HALF_STEP[1]).clamp(min=2.0**-25)
    assert (error <= bound).all()


@given(vectors())
def test_int8_is_its_definition(made):
    """int8 gives round(x / max|row| · 127) / 127 · max|row|, ties to even. The error is at most an element's last bits,
    or one step at a tie."""
    x, widths = made
    got, want = coded(x, "int8", widths).double(), by_rows(x, widths)
    most = torch.cat([r.abs().amax(-1, keepdim=True).expand_as(r) for r in x.double().split(widths, -1)], -1)
    apart = (got - want).abs()
    is_tie = ((x.double() / most * STEPS).nan_to_num().remainder(1) - 0.5).abs() < 1e-4
    assert (apart <= want.abs() * 2.0**-22 + 2.0**-149 + torch.where(is_tie, most / STEPS, 0)).all()


@given(vectors(), st.sampled_from(get_args(Code)))
def test_coding_twice_is_coding_once(made, kind):
    """A second coding of a received vector adds no error. Zeros and the largest element of an int8 row keep their
    bits."""
    x, widths = made
    once = coded(x, kind, widths)
    assert_trees_close(coded(once, kind, widths), once)
    assert ((x != 0) | (once == 0)).all()
    if kind == "int8" and x.dtype == torch.float32:
        for row, got in zip(x.split(widths, -1), once.split(widths, -1), strict=True):
            assert_trees_close(got.abs().amax(-1), row.abs().amax(-1))


@given(vectors(), st.sampled_from(get_args(Code)))
def test_coded_bytes_are_counted(made, kind):
    """A 16-bit element takes two bytes. int8 takes one byte for each element and four bytes for each row. Strides
    change no byte. The shapes of the operators are known on meta."""
    x, widths = made
    sent = _codec._encode(x, kind, widths)
    per_vector = sum(widths) + 4 * len(widths) if kind == "int8" else 2 * sum(widths)
    assert sent.dtype == torch.int8 and sent.shape == (*x.shape[:-1], per_vector)
    wide = torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    assert torch.equal(_codec._encode(wide, kind, widths), sent)
    apart = torch.cat([sent, torch.zeros_like(sent)], -1)[..., :per_vector]
    assert_trees_close(_codec._decode(apart, kind, widths, x.dtype), coded(x, kind, widths))
    meta = _codec._encode(x.to("meta"), kind, widths)
    assert (meta.shape, meta.dtype) == (sent.shape, sent.dtype)
    back = _codec._decode(meta, kind, widths, x.dtype)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("kind", get_args(Code))
def test_operators_pass_torchs_checks(kind):
    """Each operator passes torch's checks of schema, shapes and aliasing."""
    x = torch.linspace(-2, 3, 10).reshape(2, 5)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_codec._encode.default, (x, kind, [2, 3]), test_utils=tests)
    sent = _codec._encode(x, kind, [2, 3])
    torch.library.opcheck(_codec._decode.default, (sent, kind, [2, 3], torch.float32), test_utils=tests)


def test_values_that_do_not_fit():
    """float16 saturates finite values and keeps infinities and NaN. bfloat16 keeps all of them. In int8 they make their
    own row NaN."""
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([1e6, -65520.0, inf, -inf, nan, 1.0])
    assert_trees_close(coded(x, "float16", [6]), torch.tensor([65504.0, -65504.0, inf, -inf, nan, 1.0]))
    assert_trees_close(coded(x, "bfloat16", [6]), torch.tensor([999424.0, -65536.0, inf, -inf, nan, 1.0]))
    for bad in (inf, -inf, nan):
        got = coded(torch.tensor([1.0, bad, 3e38, 1e-45]), "int8", [2, 1, 1])
        assert_trees_close(got, torch.tensor([nan, nan, 3e38, 1e-45]))


@pytest.mark.parametrize("kind, dtype, want", [
    (None, torch.float32, False), ("bfloat16", torch.float32, True), ("float16", torch.float64, True),
    ("bfloat16", torch.float16, False), ("float16", torch.bfloat16, False), ("int8", torch.bfloat16, True),
])  # fmt: skip
def test_only_what_becomes_narrower_is_coded(kind, dtype, want):
    """A codec leaves elements unchanged that do not have more bits than the codec's elements."""
    assert _codec.is_coded(kind, dtype) is want

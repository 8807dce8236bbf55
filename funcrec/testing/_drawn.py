"""The numbers of which `funcrec.testing.strategies` makes its values."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

INT_DTYPES = (torch.int64, torch.int32)
FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def floats() -> st.SearchStrategy[float]:
    """Return a strategy for multiples of 1/4: -4, -3.75, ..., 4. It shrinks to 0."""
    return st.integers(-16, 16).map(lambda n: n / 4)


def garbage(dtype: torch.dtype) -> st.SearchStrategy:
    """Return a strategy for padding: NaN and infinities, or integers of any size and sign. It shrinks to NaN, or 0."""
    if dtype.is_floating_point:
        return st.sampled_from([float("nan"), float("inf"), -float("inf"), 1.0])
    if dtype == torch.bool:
        return st.booleans()
    info = torch.iinfo(dtype)
    return st.sampled_from([0, 1, -1, 100, info.max, info.min])


@st.composite
def tensors(draw, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a tensor f[shape] of multiples of 1/4 in [-4, 4], from a drawn seed. It shrinks to zeros."""
    seed = draw(st.integers(0, 2**16))
    numbers = torch.randint(-16, 17, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return (numbers if seed else numbers * 0).to(dtype) / 4


def lists_of(elements: st.SearchStrategy, size: int) -> st.SearchStrategy[list]:
    return st.lists(elements, min_size=size, max_size=size)

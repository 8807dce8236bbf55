"""Declarations that relate several arguments.

Dimensions with one letter are equal. An argument may require another argument."""

from typing import Annotated

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import funcrec as fr
from funcrec.core import Count, Form, Sizes, Within, typed

SIZE = st.integers(0, 3)
Pair = Annotated[Sizes, Within("two sizes", lambda sizes: len(sizes) == 2)]
Rows = Annotated[Tensor, Form("f[B, D]")]


@typed(call="funcrec.product", needs={"keep": "path", "late": "path"})
def product(
    x: Annotated[Tensor, Form("f[B, D]")],
    w: Annotated[Tensor, Form("f[D]")] | None = None,
    bias: Annotated[Tensor, Form("x[B]")] | None = None,
    *,
    keep: Count | None = None,
    late: bool = False,
    path: str | None = None,
) -> Tensor:
    y = x.sum(1) if w is None else x @ w
    return y if bias is None else y + bias


@given(b=SIZE, d=SIZE, other_b=SIZE, other_d=SIZE, order=st.booleans())
def test_dimensions_of_one_letter_are_of_one_size(b, d, other_b, other_d, order):
    """A call passes if and only if B and D each have one size, however the arguments are passed."""
    x, w, bias = torch.ones(b, d), torch.ones(other_d), torch.ones(other_b, dtype=torch.int64)
    call = lambda: product(bias=bias, w=w, x=x) if order else product(x, w, bias)
    if (b, d) == (other_b, other_d):
        assert call().shape == (b,)
        return
    with pytest.raises(ValueError, match=r"^funcrec.product: `(w|bias)` does not match `x`") as error:
        call()
    text = str(error.value)
    assert (f"need  f[{d}], as `x`, which is f32[{b}, {d}]" in text) == (d != other_d)
    assert (f"need  [{b}], as `x`" in text) == (b != other_b)


def test_what_is_left_out_has_no_size():
    """None and a default have no sizes. All other arguments must still match."""
    x = torch.ones(2, 3)
    assert product(x).tolist() == product(x, None, torch.zeros(2)).tolist() == [3, 3]
    with pytest.raises(ValueError, match="`bias` does not match `x`"):
        product(x, None, torch.zeros(3))


def test_members_of_a_vmap_have_the_sizes_of_a_member():
    """Under vmap, the letters are the sizes of one member."""
    x, w = torch.ones(5, 2, 3), torch.ones(5, 3)
    assert torch.func.vmap(product)(x, w).shape == (5, 2)
    assert torch.func.vmap(product, in_dims=(0, None))(x, torch.ones(3)).shape == (5, 2)
    with pytest.raises(ValueError, match="`w` does not match `x`"):
        torch.func.vmap(product, in_dims=(0, None))(x, torch.ones(2))


@pytest.mark.parametrize("how, name", [({"keep": 2}, "keep"), ({"late": True}, "late")])
def test_what_needs_another_argument_has_it(how, name):
    """An argument that requires another argument raises without that argument. None and its default require no other
    argument."""
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=f"(?s)`{name}` needs `path`.*need  `path` too, or no `{name}`.*try   path="):
        product(x, **how)
    for good in (how | {"path": "a"}, {"keep": None, "late": False}, {"path": "a"}):
        assert product(x, **good).tolist() == [3, 3]


def test_a_range_of_a_range_is_both():
    """An alias of an alias checks both ranges. Elements keep their own messages."""

    @typed
    def area(sizes: Pair) -> int:
        return sizes[0] * sizes[1]

    assert area((2, 3)) == area([2, 3]) == 6
    for sizes, words in (((2,), "need  two sizes"), ((), "need  two sizes"), ((2, 0), "need  an int >= 1")):
        with pytest.raises(ValueError, match=words):
            area(sizes)


def test_an_error_of_the_body_keeps_its_cause():
    """A TypeError that the function itself raises keeps its cause."""

    @typed
    def fails(x: Count) -> None:
        try:
            {}[x]
        except KeyError as error:
            raise TypeError("no such row") from error

    with pytest.raises(TypeError, match="no such row") as error:
        fails(3)
    assert isinstance(error.value.__cause__, KeyError)


def test_a_letter_that_stands_twice_in_a_form_is_one_size():
    """A letter that occurs twice in a form means equal sizes. The form is then a square matrix."""

    @typed
    def trace(x: Annotated[Tensor, Form("f[D, D]")]) -> Tensor:
        return x.trace()

    assert trace(torch.eye(3)) == 3
    with pytest.raises(ValueError, match=r"does not match(.|\n)*need  f\[2, 2\]"):
        trace(torch.ones(2, 3))


@given(d=SIZE, bags=SIZE, weighted=st.booleans(), dtype=st.sampled_from([torch.float16, torch.int64]))
def test_a_form_of_bags_is_of_their_values(d, bags, weighted, dtype):
    """A form of a JaggedTensor states its values, its weights, and the letter of its number of bags."""

    @typed
    def scale(
        x: Annotated[fr.JaggedTensor, Form("f16+[N, D]", bags="B", weights=False)], by: Rows | None = None
    ) -> int:
        return x.num_bags

    offsets = torch.tensor([0, 2, 2])
    x = fr.JaggedTensor(torch.ones(2, 3, dtype=dtype), offsets, torch.ones(2) if weighted else None)
    call = lambda: scale(x, torch.ones(bags, d))
    if dtype == torch.int64 or weighted:
        words = (
            r"`x.values` is not a tensor of this dtype(.|\n)*16 bits" if dtype == torch.int64 else "`x` have weights"
        )
        with pytest.raises(TypeError, match=words):
            call()
    elif (bags, d) == (2, 3):
        assert call() == scale(x) == 2
    else:
        with pytest.raises(ValueError, match=r"`by` does not match `x`(.|\n)*as `x`, which is f16\[2, 3\] in 2 bags"):
            call()


def test_a_wide_form_is_of_strided_numbers():
    """Floats of 8 bits and sparse tensors raise where a form has 16+. `n` takes no truth values."""

    @typed
    def total(x: Annotated[Tensor, Form("f16+[B]")], w: Annotated[Tensor, Form("n[B]")] | None = None) -> float:
        return float(x.sum())

    assert total(torch.ones(2), torch.ones(2, dtype=torch.int8)) == 2
    with pytest.raises(TypeError, match="16 bits or more"):
        total(torch.ones(2).to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match="is not dense"):
        total(torch.ones(2).to_sparse())
    with pytest.raises(TypeError, match=r"need  \[B\], numbers"):
        total(torch.ones(2), torch.ones(2) > 0)

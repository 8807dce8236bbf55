"""Strides of index expressions are those of Inductor, with and without the short way."""

import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.sizevars import stride_at_vec_range
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from funcrec.compile.backend._index_strides import of_sums

X = sympy.symbols("d0 d1 s2", integer=True, nonnegative=True)
numbers = st.integers(-3, 130)
variables = st.sampled_from(X)
terms = st.one_of(
    numbers.map(sympy.Integer),
    st.builds(lambda n, x: n * x, numbers, variables),
    st.builds(lambda n, x, y: n * x * y, numbers, variables, variables),
    st.builds(lambda n, x, d: n * FloorDiv(x, d), numbers, variables, st.sampled_from([2, 16, 32])),
    st.builds(lambda n, x, m: n * ModularIndexing(x, 1, m), numbers, variables, st.sampled_from([8, 16, 48])),
)


@settings(max_examples=60)
@given(st.lists(terms, max_size=4).map(lambda xs: sympy.Add(*xs)), variables, st.sampled_from([None, 8, 16]))
def test_a_stride_is_inductors(index, variable, length):
    """A sum of variables times numbers has its stride by the short way, and every other index by Inductor's own."""
    asked = []

    def general(*args):
        asked.append(args)
        return stride_at_vec_range(*args)

    got, want = of_sums(general)(index, variable, length), stride_at_vec_range(index, variable, length)
    assert got == want and got.is_number == want.is_number
    is_sum = index.is_polynomial(*X) and (index.is_number or sympy.Poly(index, *X).total_degree() <= 1)
    assert not (is_sum and asked)

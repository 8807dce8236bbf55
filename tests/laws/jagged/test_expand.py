"""Columns of distinct bags expanded to examples, and bags of several values joined bag by bag, equal loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.jagged import Columns, expand_columns, expand_columns_transpose, joined_bags
from funcrec.testing import check_adjoint, garbage_padding
from funcrec.testing import strategies as frs

F64 = torch.float64


@st.composite
def groups(draw):
    """Draw (groups f64[B_g, W_g], the columns of some features, inverse i[F, E])."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) for _ in counts]
    tables = [draw(frs.tensors((n, sum(own)), dtype=F64)) for n, own in zip(counts, dims, strict=True)]
    columns = [Columns(g, sum(own[:i]), own[i]) for g, own in enumerate(dims) for i in range(len(own))]
    chosen = draw(st.permutations(columns))[: draw(st.integers(1, len(columns)))]
    size, dtype = draw(st.integers(0, 4)), draw(st.sampled_from(frs.INT_DTYPES))
    # -1 and counts[g] are bags that do not exist: they give zeros
    rows = [draw(st.lists(st.integers(-1, counts[c.group]), min_size=size, max_size=size)) for c in chosen]
    return tables, chosen, torch.tensor(rows, dtype=dtype).reshape(len(chosen), size)


@given(groups())
def test_columns_are_copied_to_the_examples_that_have_them(drawn):
    """out[e] is the columns of each feature, of the bag that its inverse index names, or zeros; NaN where the index
    cannot be read. And the transpose."""
    tables, columns, inverse = drawn
    none = lambda c: torch.zeros(c.dim, dtype=F64)
    one = lambda c, b: tables[c.group][b, c.first : c.first + c.dim] if 0 <= b < len(tables[c.group]) else none(c)
    rows = [torch.cat([one(c, int(own[e])) for c, own in zip(columns, inverse, strict=True)])
            for e in range(inverse.shape[1])]  # fmt: skip
    got = expand_columns(tables, columns, inverse)
    assert torch.equal(got, torch.stack(rows) if rows else got.new_zeros(0, sum(c.dim for c in columns)))
    shapes = [tuple(x.shape) for x in tables]
    back = lambda d: expand_columns_transpose(d, shapes, columns, inverse)
    check_adjoint(lambda x: expand_columns(x, columns, inverse), back, tables)
    mapped = torch.func.vmap(lambda own: expand_columns(tables, columns, own))(inverse[None])[0]
    absent = [torch.full((c.dim, len(i)), torch.nan).where((i < 0) | (i >= len(tables[c.group])), 0.0)
              for c, i in zip(columns, inverse, strict=True)]  # fmt: skip
    torch.testing.assert_close(mapped, got + torch.cat(absent).T, rtol=0, atol=0, equal_nan=True)


def test_no_columns_are_no_numbers():
    """Without features the result has no columns, and the groups get zeros."""
    inverse = torch.zeros(0, 3, dtype=torch.int64)
    assert expand_columns([torch.ones(2, 2)], [], inverse).shape == (3, 0)
    assert expand_columns_transpose(torch.ones(3, 0), [(2, 2)], [], inverse)[0].tolist() == [[0, 0], [0, 0]]


@given(st.integers(0, 3), st.data())
def test_bags_are_joined_bag_by_bag(num_bags, data):
    """Bag b of the result is bag b of the first value, then of the second, and so on; its padding is zero."""
    one = frs.jagged_tensors(min_bags=num_bags, max_bags=num_bags, weighted=False, dtypes=(F64,), row_shape=(2,))
    parts = data.draw(st.lists(one, min_size=1, max_size=3))
    got = joined_bags(parts)
    want = [sum((p.to_lists()[b] for p in parts), []) for b in range(num_bags)]  # noqa: RUF017
    assert got.to_lists() == want and got.offsets.dtype == parts[0].offsets.dtype
    assert got.capacity == sum(p.capacity for p in parts)
    assert not got.values[int(got.offsets[-1]) :].any()
    assert joined_bags([garbage_padding(p) for p in parts]).to_lists() == want
    assert fr.bag_reduce(got).tolist() == sum(fr.bag_reduce(p) for p in parts).tolist()

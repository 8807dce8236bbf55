"""JaggedTensor: operations equal those on Python's lists, and read no padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.testing import assert_trees_close, check_adjoint, check_grads, garbage_padding, zero_padding
from funcrec.testing import strategies as frs

ANY = {"dtypes": (torch.int64, torch.int32, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool)}

# name: (the operation, the same on lists). Every operation must run without a read of a value on the host.
OPS = {
    "int": (lambda x: x[-1], lambda bags: [bags[-1]]),
    "slice": (lambda x: x[1:], lambda bags: bags[1:]),
    "reversed": (lambda x: x[::-1], lambda bags: bags[::-1]),
    "none": (lambda x: x[0:0], lambda bags: []),
    "list": (lambda x: x[[1, 0, 1]], lambda bags: [bags[1], bags[0], bags[1]]),
    "select": (
        lambda x: x.select(torch.tensor([0, 0, 1]), capacity=3 * x.capacity),
        lambda bags: [bags[0], bags[0], bags[1]],
    ),
    "pad_to": (lambda x: x.pad_to(x.capacity + 3), lambda bags: bags),
    "padded and back": (lambda x: fr.JaggedTensor.from_padded(x.to_padded(6), x.lengths), lambda bags: bags),
    "from_offsets": (lambda x: fr.JaggedTensor.from_offsets(x.values, x.offsets), lambda bags: bags),
}


def two_or_more(**options):
    return frs.jagged_tensors(**{"min_bags": 2, **options})


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_an_operation_is_that_of_lists(name, data):
    """op(x).to_lists() == op(x.to_lists()) for every dtype. Weights follow their values. Dtypes stay."""
    op, on_lists = OPS[name]
    x = data.draw(two_or_more(weighted=False, **ANY))
    out = op(x)
    assert out.to_lists() == on_lists(x.to_lists())
    assert (out.values.dtype, out.offsets.dtype) == (x.values.dtype, x.offsets.dtype)


@pytest.mark.parametrize("name", [n for n in OPS if n not in ("padded and back", "from_offsets")])
@given(data=st.data())
def test_weights_go_with_their_values(name, data):
    """The weights of op(x) are op of the weights."""
    op, on_lists = OPS[name]
    x = data.draw(two_or_more(weighted=True))
    out = op(x)
    assert fr.JaggedTensor(out.weights, out.offsets).to_lists() == on_lists(
        fr.JaggedTensor(x.weights, x.offsets).to_lists()
    )


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_padding_is_never_read(name, data):
    """op(x with garbage in its padding) == op(x)."""
    x = data.draw(two_or_more())
    op, _ = OPS[name]
    assert_trees_close(zero_padding(op(garbage_padding(x, fr.key(1)))), zero_padding(op(x)))


@pytest.mark.parametrize("name", [n for n in OPS if n not in ("from_offsets", "pad_to")])
@given(data=st.data())
def test_padding_of_an_answer_is_zero(name, data):
    """The padding of a result is zero if the result's buffer is new."""
    out = OPS[name][0](data.draw(two_or_more()))
    assert_trees_close(zero_padding(out), out)


@pytest.mark.parametrize("name", OPS)
def test_an_operation_reads_nothing_on_the_host(name):
    """op traces with fake tensors, whose values cannot be read. The traced op gives the same result."""
    op, _ = OPS[name]
    x = fr.JaggedTensor(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 1, 3]), torch.ones(4))
    traced = make_fx(op, tracing_mode="fake")(x)
    assert_trees_close(traced(x), op(x))


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_inputs_are_unchanged(name, data):
    """op(x) does not change x."""
    x = data.draw(two_or_more())
    before = fr.JaggedTensor(*(None if t is None else t.clone() for t in (x.values, x.offsets, x.weights)))
    OPS[name][0](x)
    assert_trees_close(x, before)


@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=4))
def test_from_lists_and_to_lists_are_inverse(lists):
    """from_lists(x).to_lists() == x."""
    assert fr.JaggedTensor.from_lists(lists).to_lists() == lists


@given(frs.jagged_tensors(**ANY))
def test_to_lists_and_from_lists_are_inverse(x):
    """from_lists(x.to_lists()) == x.unpad(), with weights."""
    weights = None if x.weights is None else fr.JaggedTensor(x.weights, x.offsets).to_lists()
    back = fr.JaggedTensor.from_lists(x.to_lists(), weights=weights, dtype=x.values.dtype)
    tight = x.unpad()
    assert_trees_close(back, fr.JaggedTensor(tight.values, tight.offsets.long(), tight.weights))


def test_lists_of_vectors_keep_their_fractions():
    """from_lists(x).to_lists() == x for bags of vectors of floats."""
    x = [[[0.5, 1.5], [2.0, 3.0]], [], [[-0.25, 0.0]]]
    assert fr.JaggedTensor.from_lists(x).to_lists() == x


@given(frs.jagged_tensors(), st.integers(0, 3))
def test_unpad_undoes_pad_to(x, more):
    """x.pad_to(n).unpad() == x.unpad()."""
    assert_trees_close(x.pad_to(x.capacity + more).unpad(), x.unpad())
    assert x.pad_to(x.capacity + more).capacity == x.capacity + more


@given(frs.jagged_tensors(row_shape=(2,), **ANY), st.integers(0, 5))
def test_to_padded_cuts_and_fills(x, length):
    """to_padded(L)[b] has the first L values of bag b, then `fill`."""
    fill = 0 if x.values.dtype == torch.bool else 7
    want = [(bag + [[fill, fill]] * length)[:length] for bag in x.to_lists()]
    out = x.to_padded(length, fill)
    assert out.tolist() == want and out.dtype == x.values.dtype
    assert out.shape == (x.num_bags, length, 2)
    assert_trees_close(garbage_padding(x).to_padded(length, fill), out)


@given(frs.jagged_tensors(weighted=True), st.integers(4, 6))
def test_from_padded_takes_weights(x, length):
    """from_padded(x.to_padded(L), lengths, weights=...) == x for L no less than the length of the longest bag."""
    weights = fr.JaggedTensor(x.weights, x.offsets).to_padded(length)
    back = fr.JaggedTensor.from_padded(x.to_padded(length), x.lengths, weights=weights)
    assert_trees_close(back.unpad(), x.unpad())
    assert back.capacity == x.num_bags * length


@given(frs.jagged_tensors())
def test_bag_ids_number_the_positions(x):
    """bag_ids()[i] is the bag that holds position i, or B in the padding."""
    want = [b for b, n in enumerate(x.lengths.tolist()) for _ in range(n)]
    assert x.bag_ids().tolist() == want + [x.num_bags] * (x.capacity - len(want))


@given(frs.jagged_tensors(weighted=False, max_padding=0))
def test_from_lengths_and_from_offsets_agree(x):
    """from_lengths(values, lengths) == from_offsets(values, offsets)."""
    assert_trees_close(fr.JaggedTensor.from_lengths(x.values, x.lengths), x)


@given(two_or_more(dtypes=(torch.float64,), row_shape=(2,)))
def test_to_padded_and_select_have_transposes(x):
    """⟨to_padded(v), y⟩ = ⟨v, to_paddedᵀ(y)⟩, where the transpose is the values of from_padded. Derivatives agree with
    finite differences."""
    length = 4
    forward = lambda v: fr.JaggedTensor(v.values, x.offsets).to_padded(length)
    transpose = lambda y: fr.JaggedTensor.from_padded(y, x.lengths).unpad().pad_to(x.capacity)
    check_adjoint(forward, transpose, fr.JaggedTensor(x.values, x.offsets))
    finite = zero_padding(x).values
    rows = lambda v: fr.JaggedTensor(v, x.offsets)[[1, 0, 1]].values
    check_grads(rows, (finite,), order=1)


@given(frs.jagged_tensors(dtypes=(torch.float64,), weighted=False, min_bags=2))
def test_operations_map_over_stacked_values(x):
    """vmap(op)(stacked values) stacks the results of op of each member."""
    stacked = torch.stack([x.values, x.values * 2])
    op = lambda v: fr.JaggedTensor(v, x.offsets)[[1, 0]].to_padded(4)
    assert_trees_close(torch.func.vmap(op)(stacked), torch.stack([op(v) for v in stacked]))


@given(frs.jagged_tensors(dtypes=(torch.int64,), weighted=False, min_bags=2, max_padding=0))
def test_operations_map_over_stacked_offsets(x):
    """vmap(op) over batches with different lengths and one capacity stacks the results of op of each batch."""
    y = fr.JaggedTensor(x.values, torch.where(torch.arange(x.num_bags + 1) > 0, x.offsets[-1], 0))
    both = fr.JaggedTensor(torch.stack([x.values, y.values]), torch.stack([x.offsets, y.offsets]))
    op = lambda z: z.select(torch.tensor([1, 0]), capacity=z.capacity).to_padded(3)
    assert_trees_close(torch.func.vmap(op)(both), torch.stack([op(x), op(y)]))


def test_repr_shows_bags_without_reading_fakes():
    """repr accepts traced and meta tensors, and shows small bags and padding on the CPU."""
    x = fr.JaggedTensor.from_lists([[1], []]).pad_to(3)
    assert repr(x) == "JaggedTensor([[1], []], values=i64[3], 1 used of capacity 3)"
    meta = fr.JaggedTensor(x.values.to("meta"), x.offsets.to("meta"))
    assert "2 bags" in repr(meta)
    seen = []
    make_fx(lambda y: (seen.append(repr(y)), y.values)[1], tracing_mode="fake")(x)
    torch.func.vmap(lambda v: (seen.append(repr(fr.JaggedTensor(v, x.offsets))), v)[1])(torch.ones(2, 3))
    assert all("2 bags" in text for text in seen)

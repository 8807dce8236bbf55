"""psum, pmean, pmax and pmin of integers, bools and Python's numbers, as in JAX.

jax.vmap with axis_name gave the values: psum of bools counts, psum(1) is the number of ranks, and means of integers are
floats. JAX sums i8 in i8, which overflows; here means are exact.
"""

import functools

import pytest
import torch
from programs.as_staged import staged_only

import funcrec as fr

MESH = fr.Mesh.emulated(x=3)


def on_ranks(fn, *xs, mesh=MESH, axis="x"):
    """Return the results of a function of each rank's element, stacked over the ranks."""
    specs = {"in_specs": (fr.P(axis),) * len(xs), "out_specs": fr.P(axis)}
    return fr.shard_map(lambda *own: fr.tree.map(lambda y: y[None], fn(*(x[0] for x in own))), mesh=mesh, **specs)(*xs)


@pytest.mark.parametrize("sum_of", [fr.psum, fr.psum_invariant])
def test_bools_are_counted(sum_of):
    """The sum of bools is their number, i64; the mean is their share."""
    x = torch.tensor([True, True, False])
    assert torch.equal(on_ranks(lambda x: sum_of(x, "x"), x), torch.tensor([2, 2, 2]))
    torch.testing.assert_close(on_ranks(lambda x: fr.pmean(x, "x"), x), torch.full((3,), 2 / 3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_means_of_integers(dtype):
    """The mean of integers is a float of the default dtype, from an exact sum. The sum stays in its dtype."""
    x = torch.tensor([100, 101, 102], dtype=dtype)
    mean = on_ranks(lambda x: fr.pmean(x, "x"), x)
    assert mean.tolist() == [101, 101, 101] and mean.dtype == torch.float32
    assert on_ranks(lambda x: fr.psum(x, "x"), x).dtype == dtype
    torch.set_default_dtype(torch.float64)
    try:
        assert on_ranks(lambda x: fr.pmean(x, "x"), x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_numbers_are_equal_on_all_ranks():
    """Python's numbers stay numbers: psum(1) is the number of ranks, over one axis or several, also in a program."""
    seen = []

    def fn(x):
        tree = {"x": x, "n": 1, "b": True, "f": 2.5}
        seen.append([op(tree, "x") for op in (fr.psum, fr.psum_invariant, fr.pmean, fr.pmax, fr.pmin)])
        return x * fr.psum(1, "x")

    x = torch.tensor([1.0, 2.0, 3.0])
    with staged_only():
        for call in (lambda x: on_ranks(fn, x), fr.jit(lambda x: on_ranks(fn, x))):
            assert call(x).tolist() == [3, 6, 9]
            one, own, mean, most, least = ({k: y for k, y in t.items() if k != "x"} for t in seen[-1])
            assert one == own == {"n": 3, "b": 3, "f": 7.5} and type(one["b"]) is int
            assert mean == {"n": 1.0, "b": 1.0, "f": 2.5} and most == least == {"n": 1, "b": True, "f": 2.5}
    square = fr.Mesh.emulated(x=2, y=3)
    total = fr.shard_map(lambda: torch.tensor([fr.psum(1, ("x", "y"))]), mesh=square, in_specs=(), out_specs=fr.P())
    assert total().tolist() == [6]


def test_derivatives_pass_by_the_floats():
    """In a tree of floats, integers and numbers, the derivative by the floats is that of the floats alone."""

    def loss(op, x):
        total = op({"x": x, "n": 2, "i": torch.tensor(1)}, "x")
        return (total["x"].sin() * total["n"]).sum()

    x = torch.tensor([0.1, 0.2, 0.3])
    for op, factor, scale in ((fr.psum, 6, 1), (fr.psum_invariant, 6, 1 / 3), (fr.pmean, 2, 1 / 3)):
        total = x.sum() / (1 if op is not fr.pmean else 3)
        got = on_ranks(lambda x: torch.func.grad(functools.partial(loss, op))(x), x)  # noqa: B023
        torch.testing.assert_close(got, (3 * scale * factor * total.cos()).expand(3))

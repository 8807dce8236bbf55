"""Ranks exchange gradients together or separately, with the same result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import training
from programs.training import plan_of

import funcrec as fr
from funcrec.mesh import _joined
from funcrec.sharding import _gather_terms
from funcrec.testing import assert_trees_close

DTYPES = (torch.float32, torch.int32, torch.int64, torch.float64, torch.bfloat16)


@given(
    axes=st.sampled_from([{"x": 1}, {"x": 2}, {"x": 3}, {"x": 2, "y": 2}]),
    forms=st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES)), max_size=5),
    most=st.sampled_from([0, 64, 1 << 16]),
)
def test_every_rank_gets_each_tensor_of_all(axes, forms, most):
    """Tensors of any shapes and dtypes, or no tensors, arrive as each rank has them. The limit between small and large
    tensors may be anywhere."""
    mesh = fr.Mesh.emulated(**axes)
    made = [
        (torch.arange(mesh.size * 27) - 40).reshape(mesh.size, 27)[:, : torch.Size(s).numel()].to(d) for s, d in forms
    ]
    own = tuple(x.reshape(mesh.size, *s) for x, (s, _) in zip(made, forms, strict=True))

    def one_rank(xs):
        xs = [x[0] for x in xs]
        got = _joined.gather_each([*xs, *xs], tuple(axes), {}) if xs else {}
        assert all(y.shape == x.shape and y.dtype == x.dtype for x in xs for y in got[id(x)])
        return [torch.stack(got[id(x)]) for x in xs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_joined, "MOST_JOINED", most)
        mapped = fr.shard_map(one_rank, mesh=mesh, in_specs=fr.P(tuple(axes)), out_specs=fr.P())
        assert_trees_close(mapped(own), list(own))


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("kind", ["replicated", "row_wise"])
def test_what_travels_apart_trains_alike(kind, axes, ranks):
    """With a separate exchange for every tensor, as for large tensors, training on ranks also has the bits of one
    process."""
    world = 2 ** len(axes)
    want = training.alone("adam", world, 5, 2 * world)
    for got in ranks(world).run(training.real_apart, "adam", axes, plan_of(kind, axes), 5, 2 * world):
        assert_trees_close(got[:3], want[:3])


def test_bounds_are_narrow_where_rows_are():
    """Bounds travel as i32 together with i32 rows, and arrive as i64. With i64 rows they stay i64."""
    mesh, bounds = fr.Mesh.emulated(x=2), torch.tensor([[0, 1, 4], [0, 2, 3]])
    for dtype, is_narrow in ((torch.int32, True), (torch.int64, False)):

        def one_rank(own, dtype=dtype, is_narrow=is_narrow):
            bags = fr.tables._rowgrads.Bags(torch.zeros(2, 3), torch.zeros(4, dtype=dtype), own[0])
            narrow = _gather_terms.narrow_bounds([bags])
            assert [x.dtype for x in narrow.values()] == [torch.int32] * is_narrow
            return torch.stack(_joined.gather_each([bags.offsets], ("x",), narrow)[id(bags.offsets)])

        assert_trees_close(fr.shard_map(one_rank, mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P())(bounds), bounds)

"""Collectives on emulated meshes equal maps of the values of all ranks in plain torch."""

import pytest
import torch
from programs import transforms
from programs.as_staged import as_staged
from programs.transforms import COLLECTIVES, DENSE, TRANSFORMS, WIDTH, cells, dense_transforms, run, values

import funcrec as fr
from funcrec.testing import assert_trees_close

# the tolerance allows f64 sums in another order
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", DENSE)
def test_a_collective_is_its_map_of_all_values(name, n):
    """A collective, and every transform of it, equals the map of all ranks' values. The sum of the ranks' losses is
    differentiated."""
    got = cells(fr.Mesh.emulated(x=n), name)
    want = {k: f(values(n)) for k, f in dense_transforms(DENSE[name]).items()}
    assert_trees_close(got, want, **EXACT)


@pytest.mark.parametrize("n", [1, 2])
def test_a_staged_collective_is_the_collective(n):
    """jit of a mapped function, and of its gradient, changes no value. The graphs are staged here, and compiled on real
    ranks in test_ranks."""
    mesh = fr.Mesh.emulated(x=n)
    staged = as_staged(transforms.compiled_cells, mesh)
    for name in COLLECTIVES:
        got = {"fwd": staged["jit"][name], "grad": staged["jit_grad"][name]}
        assert_trees_close(got, cells(mesh, name, {k: TRANSFORMS[k] for k in got}), **EXACT)


@pytest.mark.parametrize("n", [2, 4])
def test_psum_invariant_counts_a_shared_loss_once(n):
    """On each rank, d/dx of L(psum_invariant(x)) is L'(Σ x), and the Hessian couples all ranks."""
    mesh, x = fr.Mesh.emulated(x=n), values(n)
    loss = lambda total: lambda x: total(x, "x").square().sum() / 2
    got = run(mesh, lambda x: torch.func.grad(loss(fr.psum_invariant))(x))
    assert_trees_close(got, x.sum(0).expand_as(x), **EXACT)
    twice = lambda x: torch.func.grad(lambda x: (torch.func.grad(loss(fr.psum_invariant))(x) * x.detach().cos()).sum())(
        x
    )
    assert_trees_close(run(mesh, twice), x.cos().sum(0).expand_as(x), **EXACT)
    assert_trees_close(run(mesh, lambda x: torch.func.grad(loss(fr.psum))(x)), n * x.sum(0).expand_as(x), **EXACT)


def test_pvary_is_the_transpose_of_psum_invariant():
    """A value that every rank holds, and uses on its own data, gets the sum of the gradients of the ranks."""
    mesh, x = fr.Mesh.emulated(x=3), values(3)
    loss = lambda w, x: fr.psum_invariant((fr.pvary(w, "x") * x).sum(), "x")
    f = lambda x: torch.func.grad(loss)(x.new_ones(WIDTH), x)
    assert_trees_close(run(mesh, f), x.sum((0, 1)).expand(3, WIDTH), **EXACT)


PAIRS = ("a", "b")
OF_TWO_AXES = {
    "psum": (lambda x: fr.psum(x, PAIRS), lambda x: fr.psum(x, "x")),
    "pmean": (lambda x: fr.pmean(x, PAIRS), lambda x: fr.pmean(x, "x")),
    "pmax": (lambda x: fr.pmax(x, PAIRS), lambda x: fr.pmax(x, "x")),
    "all_gather": (lambda x: fr.all_gather(x, PAIRS, dim=1), lambda x: fr.all_gather(x, "x", dim=1)),
    "psum_scatter": (lambda x: fr.psum_scatter(x, PAIRS, tiled=True), lambda x: fr.psum_scatter(x, "x", tiled=True)),
    "all_to_all": (lambda x: fr.all_to_all(x, PAIRS, tiled=True), lambda x: fr.all_to_all(x, "x", tiled=True)),
    "axis_index": (lambda x: fr.axis_index(PAIRS) * x, lambda x: fr.axis_index("x") * x),
    "axis_size": (lambda x: fr.axis_size(PAIRS) * x, lambda x: fr.axis_size("x") * x),
}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("name", OF_TWO_AXES)
def test_two_axes_are_one_long_axis(name, sizes):
    """A collective over a tuple of axes equals a collective over a single axis of all their ranks. The first axis is
    the major axis."""
    two, one = OF_TWO_AXES[name]
    n = sizes[0] * sizes[1]
    mesh = fr.Mesh.emulated(a=sizes[0], b=sizes[1])
    for key in ("fwd", "grad", "jvp_grad"):
        mapped = lambda f, key=key: lambda x: TRANSFORMS[key](f, x[0])[None]
        got = fr.shard_map(mapped(two), mesh=mesh, in_specs=fr.P(PAIRS), out_specs=fr.P(PAIRS))(values(n))
        assert_trees_close(got, run(fr.Mesh.emulated(x=n), lambda x, key=key: TRANSFORMS[key](one, x)), **EXACT)


def test_trees_and_integers_are_exchanged():
    """A collective accepts a tree, leaf by leaf. Integers keep their dtype."""
    mesh = fr.Mesh.emulated(x=2)
    tree = {"ids": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), "w": torch.tensor([[1.0], [0.5]])}
    f = lambda t: (fr.psum(t, "x"), fr.all_to_all({"ids": t["ids"][0]}, "x"), fr.pmax(t, "x"))
    total, swapped, most = fr.shard_map(f, mesh=mesh, in_specs=fr.P("x"), out_specs=(fr.P(), fr.P("x"), fr.P()))(tree)
    assert total["ids"].dtype == torch.int32
    assert total["ids"].tolist() == [[4, 6]]
    assert total["w"].tolist() == [[1.5]]
    assert swapped["ids"].tolist() == [1, 3, 2, 4]
    assert most["w"].tolist() == [[1.0]]


def test_ragged_all_to_all_keeps_what_nobody_writes():
    """Output rows that no rank writes keep their values. Only these rows pass the gradient of `output`."""
    mesh = fr.Mesh.emulated(x=2)

    def f(x):
        sizes, starts = torch.ones(2, dtype=torch.int64), torch.arange(2)
        places = fr.axis_index("x") * torch.ones(2, dtype=torch.int64) * 2
        loss = lambda x, out: fr.ragged_all_to_all(x, out, starts, sizes, places, sizes, axis_name="x", capacity=1)
        y, back = torch.func.vjp(loss, x, torch.full((4,), 7.0))
        return y, *back(torch.arange(1.0, 5.0))

    y, d_x, d_out = fr.shard_map(f, mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x"))(torch.tensor([1.0, 2, 3, 4]))
    assert y.reshape(2, 4).tolist() == [[1, 7, 3, 7], [2, 7, 4, 7]]
    assert d_x.tolist() == [1, 1, 3, 3]
    assert d_out.reshape(2, 4).tolist() == [[0, 2, 0, 4], [0, 2, 0, 4]]

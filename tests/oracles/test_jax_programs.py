"""Small programs of collectives, scan and transforms give the numbers of JAX 0.10.2.

jax_programs.json stores these numbers (x64, CPU devices)."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.func import grad, jvp, vmap

import funcrec as fr
from funcrec import P
from funcrec.compile import _program
from funcrec.testing import assert_trees_close

WANTED = json.loads((Path(__file__).parent / "jax_programs.json").read_text())
ONE, TWO, BOTH = fr.Mesh.emulated(x=2), fr.Mesh.emulated(x=2, y=2), ("x", "y")
X = torch.arange(1.0, 9.0, dtype=torch.float64) / 4
COLLECTIVES = {
    "psum": lambda x: fr.psum(x.sin(), "x"),
    "pmean": lambda x: fr.pmean(x**2, "x"),
    "all_gather": lambda x: fr.all_gather(x, "x", tiled=True) ** 2,
    "ppermute": lambda x: fr.ppermute(x, "x", [(0, 1)]) * x,
    "swap": lambda x: fr.ppermute(x, "x", [(0, 1), (1, 0)]) * x,
    "psum_scatter": lambda x: fr.psum_scatter(x, "x", tiled=True) ** 2,
    "all_to_all": lambda x: fr.all_to_all(x, "x", tiled=True) ** 2 * x,
    "axis_index": lambda x: x * fr.axis_index("x"),
}
DECIDED = {  # whether staging may accept out_specs=P() for these programs
    "identity": lambda x: x,
    "psum": lambda x: fr.psum(x, "x"),
    "index": lambda x: fr.axis_index("x") * 1.0 + 0 * fr.psum(x, "x"),
    "index_ge0": lambda x: (fr.axis_index("x") >= 0).double(),
    "const": lambda x: torch.ones(2, dtype=torch.float64),
    "pmax": lambda x: fr.pmax(x, "x"),
    "scatter": lambda x: fr.psum_scatter(x, "x", tiled=True),
    "zero": lambda x: x * 0,
    "pmean_twice": lambda x: fr.pmean(fr.pmean(x, "x"), "x"),
}
NESTED = {
    "psum_x": lambda x: fr.psum(x, "x"),
    "psum_xy": lambda x: fr.psum(x, BOTH),
    "index": lambda x: x * 0 + fr.axis_index(BOTH),
    "gather_yx": lambda x: fr.all_gather(x, ("y", "x"), tiled=True)[:2],
    "gather_xy": lambda x: fr.all_gather(x, BOTH, tiled=True)[:6],
    "scatter": lambda x: fr.psum(fr.psum_scatter(torch.cat([x, x]), "y", tiled=True), "x"),
}


def mapped(f, spec="x", out=None, mesh=ONE):
    return fr.shard_map(f, mesh=mesh, in_specs=P(spec), out_specs=P(spec) if out is None else out)


def curved(f):
    return lambda x: f(x).sin().sum()


KINDS = {
    "value": lambda f: mapped(f)(X),
    "outer grad": lambda f: grad(curved(mapped(f)))(X),
    "inner grad": lambda f: mapped(grad(curved(f)))(X),
    "vmap": lambda f: vmap(mapped(f))(torch.stack([X, 2 * X])),
    "jvp": lambda f: jvp(mapped(f), (X,), (X.cos(),))[1],
    "inner vmap grad": lambda f: mapped(lambda x: vmap(grad(lambda v: f(v * x).sum()))(X.new_tensor([1, 2]))[None])(X),
}


def close(got, name):
    assert_trees_close(got, torch.tensor(WANTED[name], dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_under_transforms_are_jaxs(kind, name):
    """grad, vmap and jvp of a collective, inside and outside of shard_map, have the numbers of JAX."""
    close(KINDS[kind](COLLECTIVES[name]), f"{kind} {name}")


@pytest.mark.parametrize("name", NESTED)
def test_two_axes_are_jaxs(name):
    """Collectives over one axis and over both axes, and their gradients, have the numbers of JAX."""
    f = mapped(NESTED[name], BOTH, mesh=TWO)
    close(f(X), f"nested {name}")
    close(grad(curved(f))(X), f"nested grad {name}")


@pytest.mark.parametrize("name", DECIDED)
def test_what_may_be_called_the_same_is_what_jax_lets_be(name):
    """Staging refuses out_specs that promise one value for all ranks in the cases where check_vma of JAX refuses
    them."""
    staged = fr.jit(mapped(DECIDED[name], out=P()))
    # the staged graph itself runs
    with mock.patch.object(_program, "compile_graph", lambda graph, args: graph):
        if WANTED[f"decide {name}"] == "refused":
            with pytest.raises(ValueError, match="is not the same along axis"):
                staged(X)
        else:
            close(staged(X), f"decide {name}")


def test_scan_is_jaxs():
    """The outputs of scan have the numbers of JAX. So do their derivatives by a value that every step reads."""
    zero, half = X.new_zeros(()), X.new_tensor(0.5)
    scanned = lambda a: fr.scan(lambda c, x: (c * a + x, c * x), zero, X)[1]
    close(scanned(half), "scan")
    close(grad(lambda a: scanned(a).sum())(half), "grad scan")

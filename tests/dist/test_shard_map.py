"""shard_map: the arguments and results of a mapped function, on emulated meshes."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.mesh import bound_names
from funcrec.testing import assert_trees_close

X = torch.arange(24, dtype=torch.float64).reshape(4, 6)


@st.composite
def cuts(draw):
    """Return random (mesh, spec, tensor): axes of 1 to 3 ranks that cut the tensor's dimensions in any order. Shrinks
    to one axis."""
    names = draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))]
    sizes = {n: draw(st.integers(1, 3)) for n in names}
    rank = draw(st.integers(1, 3))
    dims = [[] for _ in range(rank)]
    for name in draw(st.permutations(names))[: draw(st.integers(0, len(names)))]:
        dims[draw(st.integers(0, rank - 1))].append(name)
    shape = []
    for d in dims:
        n = draw(st.integers(0, 2))
        for name in d:
            n *= sizes[name]
        shape.append(n)
    spec = fr.P(*(tuple(d) or None for d in dims))
    count = torch.tensor(shape).prod()
    return fr.Mesh.emulated(**sizes), spec, torch.arange(int(count), dtype=torch.float32).reshape(shape)


@given(cuts())
def test_what_is_cut_is_joined_again(drawn):
    """A mapped identity is the identity for any mesh and spec. Each rank sees its own block."""
    mesh, spec, x = drawn
    seen = fr.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    assert_trees_close(seen, x)

    def place(x):
        first = x
        for d, names in enumerate(spec.dims):
            if names:
                first = first + fr.axis_index(names) * 10.0 ** (d + 3)
        return first

    got, want = fr.shard_map(place, mesh=mesh, in_specs=spec, out_specs=spec)(x), x
    for d, names in enumerate(spec.dims):
        n = 1
        for a in names:
            n *= mesh.shape[a]
        block = torch.arange(x.shape[d]) // max(x.shape[d] // n, 1)
        want = want + (block * 10.0 ** (d + 3)).reshape([-1 if i == d else 1 for i in range(x.dim())]) * (n > 1)
    assert_trees_close(got, want)


def test_a_jagged_value_may_go_to_every_rank_whole():
    """Under P() each rank gets all bags, padding included, and returns all bags."""
    bags, ids = (
        fr.JaggedTensor.from_lists([[1, 2], [], [3]]),
        fr.KeyedJaggedTensor.from_lists({"a": [[1], [2]]}).pad_to(4),
    )
    both = fr.shard_map(
        lambda x, y: (x, y, y.values[None] + fr.axis_index("x")), mesh=fr.Mesh.emulated(x=2), in_specs=fr.P(),
        out_specs=(fr.P(), fr.P(), fr.P("x")),
    )  # fmt: skip
    got = both(bags, ids)
    assert_trees_close(got[:2], (bags, ids))
    assert got[2].tolist() == [[x + r for x in ids.values.tolist()] for r in range(2)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_jagged_values_are_cut_by_their_bags(n):
    """Each rank gets B / n bags of every key. The padding of the whole value goes to no rank."""
    ids = fr.KeyedJaggedTensor.from_lists(
        {"a": [[1, 2], [], [3], [4]], "b": [[5], [6, 7, 8], [], [9]]},
        weights={"a": [[0.1, 0.2], [], [0.3], [0.4]], "b": [[0.5], [0.6, 0.7, 0.8], [], [0.9]]},
    ).pad_to(20)
    f = fr.shard_map(lambda x: x, mesh=fr.Mesh.emulated(x=n), in_specs=fr.P("x"), out_specs=fr.P("x"))
    assert f(ids).to_lists() == ids.to_lists()
    assert_trees_close(f(ids)["b"].unpad().weights, ids["b"].unpad().weights)
    assert f(ids["a"]).to_lists() == ids["a"].to_lists()
    count = fr.shard_map(
        lambda x: torch.stack([x.offsets[-1], fr.axis_index("x")])[None],
        mesh=fr.Mesh.emulated(x=n), in_specs=fr.P("x"), out_specs=fr.P("x"),
    )  # fmt: skip
    bags = [a + b for a, b in zip(ids.to_lists()["a"], ids.to_lists()["b"], strict=True)]
    per = 4 // n
    assert count(ids)[:, 0].tolist() == [sum(map(len, bags[r * per : (r + 1) * per])) for r in range(n)]


def test_specs_are_prefixes():
    """A P stands for all leaves below it. Dicts, tuples, funcrec's values and leaves that are no tensors keep their
    place."""
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[1], [2, 3]]}), torch.tensor([0.0, 1.0]))
    seen = []

    def f(params, batch, name):
        seen.append((params["w"].shape, batch.label.shape, batch.ids.num_bags, name))
        return {"name": name, "label": batch.label, "w": (params["w"], None)}

    specs = ({"w": fr.P(None, "x"), "b": fr.P()}, fr.P("x"), fr.P())
    out_specs = {"name": fr.P(), "label": fr.P("x"), "w": (fr.P(None, "x"), fr.P())}
    g = fr.shard_map(f, mesh=fr.Mesh.emulated(x=2), in_specs=specs, out_specs=out_specs)
    out = g({"w": X, "b": X[0]}, batch, "run")
    assert seen == [((4, 3), (1,), 1, "run")]
    assert out["name"] == "run"
    assert_trees_close((out["w"][0], out["label"]), (X, batch.label))


def test_transforms_go_through_a_mapped_function():
    """grad, vmap and jvp of an emulated shard_map equal those of the unmapped function."""
    mesh = fr.Mesh.emulated(x=2)
    f = fr.shard_map(lambda x: fr.psum(x.sin().sum(0), "x"), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P())
    plain = lambda x: x.sin().sum(0)
    assert_trees_close(f(X), plain(X), rtol=1e-14)
    grad = lambda f: torch.func.grad(lambda x: f(x).square().sum())(X)
    assert_trees_close(grad(f), grad(plain), rtol=1e-12)
    assert_trees_close(
        torch.func.vmap(f)(torch.stack([X, -X])), torch.stack([plain(X), plain(-X)]), rtol=1e-12, atol=1e-14
    )
    assert_trees_close(torch.func.jvp(f, (X,), (X,))[1], torch.func.jvp(plain, (X,), (X,))[1], rtol=1e-12)


def test_nested_calls_bind_the_other_axes():
    """Inside a call that binds one axis, another call may bind the other axes, on values that are whole along them."""
    mesh = fr.Mesh.emulated(a=2, b=3)

    def f(x):
        inner = fr.shard_map(lambda y: fr.psum(y, ("a", "b")), mesh=mesh, in_specs=fr.P(None, "b"), out_specs=fr.P())
        return inner(x) + 0 * fr.axis_index("a")

    g = fr.shard_map(f, mesh=mesh, in_specs=fr.P("a"), out_specs=fr.P("a"), axis_names={"a"})
    want = (X[:2] + X[2:]).unflatten(1, (3, 2)).sum(1)
    assert_trees_close(g(X), torch.cat([want, want]))


def test_the_mesh_of_a_with_block_is_the_default():
    """`with mesh:` sets the default mesh of calls, the innermost mesh first. Another thread does not see this mesh."""
    f = fr.shard_map(lambda: fr.axis_index("x")[None], in_specs=(), out_specs=fr.P("x"))
    others = []
    with fr.Mesh.emulated(x=3):
        with fr.Mesh.emulated(x=2):
            assert f().tolist() == [0, 1]

            def elsewhere():
                with pytest.raises(TypeError, match="there is no mesh"):
                    f()
                others.append(True)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert f().tolist() == [0, 1, 2]
    assert others == [True]
    assert bound_names() == ()


def test_axes_are_unbound_after_an_error():
    """If a mapped function raises, no axis stays bound."""
    mesh = fr.Mesh.emulated(x=2)
    with pytest.raises(ZeroDivisionError):
        fr.shard_map(lambda x: x / (1 // 0), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x"))(torch.ones(2))
    assert bound_names() == ()


NOT_THE_SAME = {
    "an index": lambda x: fr.axis_index("b") + 0 * x.sum(),
    "its own shard": lambda x: x.sum(),
    "a NaN on one rank": lambda x: torch.where(fr.axis_index("b") == 1, torch.nan, 0.0),
    "a permuted value": lambda x: fr.ppermute(x, "b", [(0, 1), (1, 0)]).sum(),
}
THE_SAME = {
    "a sum": lambda x: fr.psum(x, "b").sum(),
    "a gathered value": lambda x: fr.all_gather(x, "b").sin().sum(),
    "equal by computation": lambda x: (fr.axis_index("b") >= 0).double(),
    "NaN on all ranks": lambda x: torch.full((), torch.nan) * fr.psum(x, "b").sum(),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_a_value_promised_to_be_the_same_must_be(name):
    """out_specs that leave out an axis promise equal bits along that axis. Otherwise an error names the result and the
    axis. check=False takes the value of the first rank."""
    mesh, f = fr.Mesh.emulated(a=2, b=2), lambda x: {"out": NOT_THE_SAME[name](x), "good": fr.psum(x, "b")}
    specs = {"in_specs": fr.P(None, "b"), "out_specs": {"out": fr.P(), "good": fr.P()}}
    with pytest.raises(ValueError, match="axis 'b'") as raised:
        fr.shard_map(f, mesh=mesh, **specs)(X)
    assert "`result['out']` is not the same along axis 'b'" in str(raised.value)
    assert "good" not in str(raised.value)
    assert "axis 'a'" not in str(raised.value)
    fr.shard_map(f, mesh=mesh, check=False, **specs)(X)


@pytest.mark.parametrize("name", THE_SAME)
def test_a_value_that_is_the_same_passes(name):
    """Equal bits along an axis keep the promise, however the program computed the bits."""
    mesh = fr.Mesh.emulated(a=2, b=2)
    fr.shard_map(THE_SAME[name], mesh=mesh, in_specs=fr.P(None, "b"), out_specs=fr.P())(X)


BELOW = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f, in_dims=1)(torch.stack([x, x + 1], 1)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x + 1])),
    "requires grad": lambda f, x: f(x.clone().requires_grad_()),
    "jit": lambda f, x: fr.jit(f)(x),
    "jit of grad": lambda f, x: fr.jit(torch.func.grad(lambda x: f(x).sum()))(x),
    "grad of jit": lambda f, x: torch.func.grad(lambda x: fr.jit(f)(x).sum())(x),
}


@pytest.mark.parametrize("how", BELOW)
@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_a_broken_promise_is_found_below_transforms(name, how):
    """A value that out_specs declare equal, and that is not equal, raises under every transform and inside jit, as it
    does outside."""
    mesh, specs = (
        fr.Mesh.emulated(a=2, b=2),
        {"in_specs": fr.P(None, "b"), "out_specs": {"out": fr.P(), "good": fr.P()}},
    )
    both = lambda x: {"out": NOT_THE_SAME[name](x), "good": fr.psum(x, "b")}
    f = lambda check: lambda x: fr.shard_map(both, mesh=mesh, check=check, **specs)(x)["out"]
    with pytest.raises(ValueError, match=r"`result\['out'\]` is not the same along axis 'b'") as raised:
        BELOW[how](f(True), X)
    assert "good" not in str(raised.value)
    BELOW[how](f(False), X)


@pytest.mark.parametrize("how", BELOW)
@pytest.mark.parametrize("name", ["a sum", "a gathered value"])
def test_a_kept_promise_passes_below_transforms(name, how):
    """Values that psum and all_gather made equal pass under every transform and inside jit."""
    f = fr.shard_map(THE_SAME[name], mesh=fr.Mesh.emulated(a=2, b=2), in_specs=fr.P(None, "b"), out_specs=fr.P())
    BELOW[how](f, X)


FOLLOWED = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.arange(4.0),)),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x])),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(torch.stack([x, x])).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "requires grad": lambda f, x: f(x.clone().requires_grad_()),
    "no memory": lambda f, x: torch.func.grad(lambda y: f(y.expand(4)).sum())(torch.ones(())),
    "by another": lambda f, x: torch.func.grad(lambda y: f(x * y).sum())(torch.ones(())),
    "double": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x.double()),
}
HAPPEN_TO_BE_EQUAL = {  # both ranks have the same shard here
    "its own shard": lambda x: x,
    "a sum of it": lambda x: x.sum()[None],
    "an index": lambda x: x * (fr.axis_index("x") - 0.5).square(),
    "a permuted value": lambda x: fr.ppermute(x, "x", [(0, 1), (1, 0)]),
    "through a nested call": lambda x: fr.shard_map(
        lambda y: fr.psum(y, "y"), mesh=fr.Mesh.emulated(x=2, y=2), in_specs=fr.P("y"), out_specs=fr.P()
    )(x),
}


@pytest.mark.parametrize("how", FOLLOWED)
@pytest.mark.parametrize("name", HAPPEN_TO_BE_EQUAL)
def test_equal_values_are_no_promise_of_equal_derivatives(name, how):
    """Under a derivative, the program must make a value equal that is declared equal. Ranks that only happen to have
    equal shards raise, because the derivative of rank 0 is not that of the other ranks. check=False takes the
    derivative of rank 0."""
    specs = {"in_specs": fr.P("x"), "out_specs": fr.P(), "mesh": fr.Mesh.emulated(x=2)}
    f = lambda check: fr.shard_map(HAPPEN_TO_BE_EQUAL[name], check=check, **specs)
    x = torch.tensor([1.0, 2.0, 1.0, 2.0])
    f(True)(x)
    with pytest.raises(ValueError, match="`result` is not the same along axis 'x'") as raised:
        FOLLOWED[how](f(True), x)
    assert "follows from the rank's place, or from what is cut along the axis" in str(raised.value)
    FOLLOWED[how](f(False), x)


@pytest.mark.parametrize("how", FOLLOWED)
@pytest.mark.parametrize("reduce", [fr.psum, fr.pmean, fr.pmax, fr.all_gather, fr.psum_invariant])
def test_what_collectives_made_the_same_is_differentiated(reduce, how):
    """psum, pmean, pmax and all_gather of different or equal shards, and unsharded values, keep the promise under every
    derivative."""
    f = lambda x, whole: (reduce(x.sin(), "x"), whole * 2)
    g = fr.shard_map(f, mesh=fr.Mesh.emulated(x=2), in_specs=(fr.P("x"), fr.P()), out_specs=fr.P())
    for x in (torch.tensor([1.0, 2.0, 1.0, 2.0]), torch.arange(4.0)):
        FOLLOWED[how](lambda x: sum(y.sum(0, keepdim=True) for y in g(x, x)), x)


def test_inside_jit_what_cannot_be_read_is_refused():
    """Inside jit, a value that is equal only by its values raises, as in JAX's check_vma. check=False takes the value
    of rank 0."""
    same, specs = lambda x: (fr.axis_index("x") >= 0).double() + 0 * x, {"in_specs": fr.P(), "out_specs": fr.P()}
    mapped = lambda check: fr.shard_map(same, mesh=fr.Mesh.emulated(x=2), check=check, **specs)
    assert_trees_close(mapped(True)(X), torch.ones_like(X))
    with pytest.raises(ValueError, match="follows from the rank's place"):
        fr.jit(mapped(True))(X)
    assert_trees_close(fr.jit(mapped(False))(X), torch.ones_like(X))


def test_axes_of_one_rank_keep_every_promise():
    """Along an axis of one rank every promise holds, even inside jit."""
    f = fr.shard_map(
        lambda x: x.sum() + fr.axis_index("x"), mesh=fr.Mesh.emulated(x=1), in_specs=fr.P("x"), out_specs=fr.P()
    )
    assert_trees_close(fr.jit(f)(X), X.sum())


def test_collectives_are_called_in_one_place():
    """Only the exchange's module calls the collectives of torch.distributed, because their derivatives are silently
    wrong under torch.func. (Shards of another library's state are detached, and the planner measures the time of a
    link.)"""
    from pathlib import Path

    root = Path(fr.__file__).parent
    calls = (
        "all_reduce",
        "all_gather_into",
        "reduce_scatter",
        "all_to_all_single",
        "ops._c10d_functional",
        "wait_tensor",
        "broadcast(",
    )
    found = {p.name for p in root.rglob("*.py") if any(c in p.read_text() for c in calls)}
    assert found <= {"_exchange.py", "_shards.py", "_measure.py"}

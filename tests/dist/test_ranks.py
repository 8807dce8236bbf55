"""Functions give the same on real (gloo) ranks as under emulation. Failures of ranks raise on the other ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from programs import planned_ranks, transforms
from programs.as_staged import as_staged
from programs.transforms import COLLECTIVES, cells
from torch._subclasses.fake_tensor import FakeTensorMode

import funcrec as fr
from funcrec.testing import RankError, RankPool, assert_trees_close

pytestmark = pytest.mark.xdist_group("ranks")
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_real_ranks_give_what_emulation_gives(name, n, ranks):
    """On each gloo rank, a collective and every transform of it have the same values as under emulation."""
    want = cells(fr.Mesh.emulated(x=n), name)
    for got in ranks(n).run(transforms.real_cells, name):
        assert_trees_close(got, want, **EXACT)


def test_compiled_ranks_give_what_emulation_gives(ranks):
    """jit of a mapped function, staged, and of its gradient, compiled, has the same values on gloo ranks as under
    emulation. The gradient's program also has all exchanges of the function."""
    got = ranks(2).run(as_staged, transforms.real_compiled_cells, ("fwd",))[0]
    got |= ranks(2).run(transforms.real_compiled_cells, ("grad",), deadline_s=500)[0]
    mesh = fr.Mesh.emulated(x=2)
    for name in COLLECTIVES:
        assert_trees_close(got["jit"][name], cells(mesh, name)["fwd"], **EXACT)
        assert_trees_close(got["jit_grad"][name], cells(mesh, name)["grad"], **EXACT)


def test_ranks_measure_one_hardware(ranks):
    """Hardware.measure on real ranks gives all ranks the same positive numbers, and therefore the same plan."""
    first, second = ranks(2).run(planned_ranks.measured)
    assert first == second and first.ranks_per_host == 2 and first.memory_bytes == 10**9
    assert min(first.memory_bytes_per_s, first.link_bytes_per_s) > 1e6


def grid(mesh, x, through=lambda f: f):
    """Return sums over one axis in a nested call, and gathers over both axes with sums over the second axis."""

    def inner(y):
        return fr.psum(y, "model") * (fr.axis_index("model") + 1)

    def f(x):
        nested = fr.shard_map(inner, mesh=mesh, in_specs=fr.P("model"), out_specs=fr.P("model"))
        return nested(fr.psum(x, "data"))

    g = fr.shard_map(f, mesh=mesh, in_specs=fr.P("data"), out_specs=fr.P(), axis_names={"data"})
    both = fr.shard_map(
        lambda x: (fr.all_gather(x, ("data", "model")), fr.psum(x, "model")),
        mesh=mesh, in_specs=fr.P(("data", "model")), out_specs=(fr.P(), fr.P("data")),
    )  # fmt: skip
    cut = lambda spec: fr.shard(x, spec, mesh=mesh)
    out = through(both)(cut(fr.P(("data", "model"))))
    return through(g)(cut(fr.P("data"))), fr.unshard(out, (fr.P(), fr.P("data")), mesh=mesh)


def real_grid(x):
    mesh = fr.Mesh.distributed(data=2, model=2)
    return grid(mesh, x), grid(mesh, x, fr.jit)


def test_a_grid_of_ranks_is_the_emulated_grid(ranks):
    """Axes of a real mesh, tuples of axes and nested calls give the values of the emulated mesh, even staged."""
    x = torch.arange(8, dtype=torch.float64)
    want = grid(fr.Mesh.emulated(data=2, model=2), x)
    for got, staged in ranks(4).run(as_staged, real_grid, x):
        assert_trees_close(got, want)
        assert_trees_close(staged, want)


def bags(ids, mesh):
    """Return the ids after every rank reversed the keys of its bags."""
    spec = fr.P("x")
    f = fr.shard_map(lambda ids: ids.permute(["b", "a"]), mesh=mesh, in_specs=spec, out_specs=spec)
    return fr.unshard(f(fr.shard(ids, spec, mesh=mesh)), spec, mesh=mesh)


def real_bags(ids):
    return bags(ids, fr.Mesh.distributed(x=dist.get_world_size())).to_lists()


@pytest.mark.parametrize("n", [2, 4])
def test_jagged_values_are_cut_by_bags(n, ranks):
    """On real ranks, a jagged value is split by bags and joined as under emulation."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [], [3], [4]], "b": [[5], [6, 7, 8], [], [9]]})
    want = {"b": ids.to_lists()["b"], "a": ids.to_lists()["a"]}
    assert bags(ids, fr.Mesh.emulated(x=n)).to_lists() == want
    assert ranks(n).run(real_bags, ids) == [want] * n


def promise(varying):
    mesh = fr.Mesh.distributed(x=2)
    f = lambda x: {"loss": x * (fr.axis_index("x") if varying else 1)}
    return fr.shard_map(f, mesh=mesh, in_specs=fr.P(), out_specs=fr.P())(torch.ones(3))["loss"].tolist()


def test_a_broken_promise_is_found_on_ranks(ranks):
    """out_specs may declare a result equal on all ranks that is not equal. Every rank then raises with the result's
    name and the axis."""
    with pytest.raises(RankError) as raised:
        ranks(2).run(promise, True)
    assert str(raised.value).count("`result['loss']` is not the same along axis 'x'.") >= 2
    assert ranks(2).run(promise, False) == [[1.0] * 3] * 2


def equal_with_tangents(kind):
    """Return the tangent of a result with equal values on all ranks. The tangent differs on rank 1, or only rank 1 has
    a tangent."""
    mesh, here = fr.Mesh.distributed(x=2), dist.get_rank()
    f = fr.shard_map(lambda x: x * x.detach(), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P())
    x, t = torch.ones(3), torch.arange(3.0) * (1 if kind in ("the same", "twice the same") else here)
    if kind.startswith("twice"):
        g = lambda x: torch.func.jvp(lambda y: f(x * y), (torch.ones(3),), (torch.ones(3),))[1]
        return torch.func.jvp(g, (x,), (t,))[1].tolist()
    if kind == "vmapped":
        return torch.func.jacfwd(lambda s: f(x * s + (1 - s.detach()) + (here * s - here)))(torch.ones(())).tolist()
    return torch.func.jvp(f, (x,), (t,))[1].tolist()


@pytest.mark.parametrize("kind", ["unlike", "twice unlike", "vmapped"])
def test_a_promise_is_of_tangents_too_on_ranks(kind, ranks):
    """A result declared equal, with equal values but different tangents, raises on every rank. This holds at every
    level of forward derivatives. Equal tangents pass."""
    with pytest.raises(RankError) as raised:
        ranks(2).run(equal_with_tangents, kind)
    assert str(raised.value).count("`result` is not the same along axis 'x'.") >= 2
    same = kind.replace("unlike", "the same")
    if same != kind:
        first, second = ranks(2).run(equal_with_tangents, same)
        assert first == second and first[1:] != [0, 0]


def staged_then_differentiated(size):
    """Return the devices of gradients on fake tensors. Before, real ranks stage a function whose result has `size`
    equal values."""
    mesh, x = fr.Mesh.distributed(x=2), torch.ones(())
    f = fr.shard_map(lambda x: (x, x + 1), mesh=mesh, in_specs=fr.P(), out_specs=fr.P())
    assert fr.jit(lambda x: torch.func.vmap(lambda _: f(x)[1])(torch.ones(size)))(x).tolist() == [2.0] * size
    fr.jit(f)(x)
    with FakeTensorMode():
        return [torch.func.grad(lambda x: x.mean())(torch.ones(n)).device.type for n in (2, size)]


def test_staging_leaves_what_torch_remembers_right(ranks):
    """Staging on ranks does not corrupt torch's cache of operations on fake tensors. Later gradients are on their own
    device."""
    assert ranks(2).run(staged_then_differentiated, 7) == [["cpu", "cpu"]] * 2


def promises_below(name, how):
    """Return the error of a program of test_shard_map on real ranks, or None. The function also checks that a kept
    promise passes."""
    mesh, x = fr.Mesh.distributed(x=2), torch.arange(6.0).reshape(3, 2) + dist.get_rank()
    specs = {"mesh": mesh, "in_specs": (fr.P("x"), fr.P()), "out_specs": fr.P()}
    kept = fr.shard_map(lambda x, w: fr.psum((x * w).sum(), "x"), **specs)
    broken = {
        "own shard": lambda x, w: (x * w).sum(),
        "place": lambda x, w: fr.psum((x * w).sum(), "x") * (fr.axis_index("x") + 1),
    }
    through = {
        "grad": lambda f: torch.func.grad(f)(x, x[0]),
        "vmap": lambda f: torch.func.vmap(f)(torch.stack([x, x]), torch.stack([x[0], x[1]])),
        "jvp": lambda f: torch.func.jvp(f, (x, x[0]), (x, x[0])),
        "jit": lambda f: fr.jit(f)(x, x[0]),
        "jit of grad": lambda f: fr.jit(torch.func.grad(f))(x, x[0]),
        "jit of vmap": lambda f: fr.jit(torch.func.vmap(f))(torch.stack([x, x]), torch.stack([x[0], x[1]])),
    }[how]
    through(kept)
    through(fr.shard_map(broken[name], check=False, **specs))
    try:
        through(fr.shard_map(broken[name], **specs))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("how", ["grad", "vmap", "jvp", "jit", "jit of grad", "jit of vmap"])
@pytest.mark.parametrize("name", ["own shard", "place"])
def test_a_broken_promise_is_found_below_transforms(name, how, ranks):
    """On real ranks, too, a false promise raises under every transform and inside jit. A kept promise passes."""
    for said in ranks(2).run(as_staged, promises_below, name, how):
        assert "`result` is not the same along axis 'x'" in said


def staged_with_promises():
    """Return the numbers of exchanges of a compiled function with and without checked promises."""
    from programs.generated_code import generated_code

    specs = {"mesh": fr.Mesh.distributed(x=2), "in_specs": fr.P("x"), "out_specs": fr.P()}
    f = lambda x: fr.psum(x.sin().sum(), "x")
    counts = []
    for check in (True, False):
        _, (code,) = generated_code(fr.jit(fr.shard_map(f, check=check, **specs)), torch.ones(4))
        counts.append(code.count("all_reduce"))
    return counts


def test_a_promise_costs_a_compiled_step_nothing(ranks):
    """Promises are checked during staging. The compiled code therefore has no additional exchange."""
    for checked, unchecked in ranks(2).run(staged_with_promises):
        assert checked == unchecked > 0


def order_of_overlap():
    """Return the positions in the code at which an exchange starts, matrices are multiplied, and the exchange is
    awaited."""
    from programs.generated_code import generated_code

    f = lambda a, w: fr.all_to_all(a, "x", tiled=True).sin() + (w @ w).relu() @ w
    specs = {"in_specs": (fr.P("x"), fr.P()), "out_specs": fr.P("x")}
    g = fr.jit(fr.shard_map(f, mesh=fr.Mesh.distributed(x=2), **specs))
    _, (code,) = generated_code(g, torch.ones(4, 4), torch.ones(4, 4))
    body = code[code.index("def call(") :]
    return [body.index("all_to_all_single"), body.index("extern_kernels.mm"), body.index("wait_tensor.default")]


def test_ranks_compute_while_values_travel(ranks):
    """In a compiled function, an exchange starts before an operation that does not need the exchange. The exchange is
    awaited after that operation."""
    for places in ranks(2).run(order_of_overlap):
        assert places == sorted(places)


def fail_in(how):
    """Run a step of two collectives. In the middle of the step, rank 1 does something else."""
    mesh = fr.Mesh.distributed(x=2, timeout_s=4)

    def f(x):
        x = fr.psum(x, "x")
        if dist.get_rank() == 1 and how == "killed":
            os._exit(3)
        if dist.get_rank() == 1 and how == "hangs":
            time.sleep(60)
        if dist.get_rank() == 1 and how == "another collective":
            return fr.all_to_all(x[:2], "x")
        return fr.psum(x[: 2 if how == "another shape" and dist.get_rank() == 1 else 3], "x")

    return fr.shard_map(f, mesh=mesh, in_specs=fr.P(), out_specs=fr.P())(torch.ones(3))


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_lost_rank_ends_the_others(how):
    """If a rank dies or hangs in the middle of a step, the other rank raises within the timeout, in words."""
    begin = time.monotonic()
    with RankPool(2, timeout_s=6) as pool, pytest.raises(RankError) as raised:
        pool.run(fail_in, how, deadline_s=20)
    assert time.monotonic() - begin < 60
    assert "rank 0: RuntimeError: funcrec.shard_map: the other ranks did not take part." in str(raised.value)
    if how == "killed":
        assert "rank 1: the process ended with exit code 3" in str(raised.value)


@pytest.mark.parametrize("how, said", [("another collective", "ALLTOALL"), ("another shape", "TensorShape=[2]")])
def test_a_rank_that_does_something_else_is_named(how, said):
    """With debug=True, an error names a rank that calls another collective or uses another shape, with the rank's
    call."""
    with RankPool(2, timeout_s=6, debug=True) as pool, pytest.raises(RankError) as raised:
        pool.run(fail_in, how, deadline_s=40)
    text = str(raised.value)
    assert "Detected mismatch between collectives on ranks" in text
    assert "Rank 1" in text or "rank 1" in text
    assert said in text


def made_again():
    """Return [(whether the first mesh and the last have the same groups and threads, the sums over the mesh's axes)] on
    two worlds of ranks. On each world, one mesh is made 50 times after another."""
    out = []
    for world in range(2):
        if world:
            store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("next", store), rank=rank, world_size=4)
        counted = []
        for axes in [{"data": 2, "model": 2}] + 50 * [{"x": 2, "y": 2}]:
            mesh = fr.Mesh.distributed(**axes)
            counted.append((len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))))
        total = lambda axis, mesh: fr.shard_map(
            lambda x: fr.psum(x, axis), mesh=mesh, in_specs=fr.P(axis), out_specs=fr.P()
        )(torch.tensor([float(mesh.coordinates[axis] + 1)]))
        out.append((counted[0] == counted[-1], [total(axis, mesh).item() for axis in ("x", "y")]))
    return out


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the threads of a process are counted by Linux")
def test_a_mesh_made_again_has_the_groups_of_the_first():
    """A mesh that is made 50 times, with any axis names, makes its groups and threads once. A new world of ranks gets
    new groups and threads."""
    with RankPool(4) as pool:
        assert pool.run(made_again) == [[(True, [3.0, 3.0])] * 2] * 4


def test_ranks_must_fit_the_axes(ranks):
    """If the sizes of the axes do not multiply to the number of ranks, the error has both numbers."""
    with pytest.raises(RankError, match="data=3"):
        ranks(2).run(three_ranks)


def three_ranks():
    fr.Mesh.distributed(data=3)


def other_sizes():
    """Return what meshes of three and of four ranks say on this rank, and what a debugged mesh says after another."""
    told = []
    fr.Mesh.distributed(x=2)
    for call in (lambda: fr.Mesh.distributed(x=3), lambda: fr.Mesh.distributed(x=2, y=2),
                 lambda: fr.Mesh.distributed(x=2, debug=True)):  # fmt: skip
        try:
            call()
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return told


def test_axes_of_another_number_of_ranks_are_refused(ranks):
    """Axes that do not multiply to the number of ranks raise on all ranks, and so does `debug` after the first mesh."""
    for three, four, late in ranks(2).run(other_sizes):
        assert "the axes do not multiply to the number of ranks" in three and "x=3 = 3; 2 ranks" in three
        assert "x=2 · y=2 = 4; 2 ranks" in four and "`debug` is set too late" in late

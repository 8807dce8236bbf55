"""Functions that gloo's ranks run as if their tensors were on a GPU that they share."""

from unittest import mock

import torch
import torch.distributed as dist

import funcrec as fr
from funcrec.compile import _compiled
from funcrec.mesh import _mesh
from funcrec.testing import assert_trees_close

COLLECTIVES = {
    "psum": lambda x: fr.psum(x, "x"), "pmean": lambda x: fr.pmean(x, "x"), "pmax": lambda x: fr.pmax(x, "x"),
    "pmin": lambda x: fr.pmin(x, "x"), "all_gather": lambda x: fr.all_gather(x, "x"),
    "psum_scatter": lambda x: fr.psum_scatter(x, "x"), "all_to_all": lambda x: fr.all_to_all(x, "x"),
    "ppermute": lambda x: fr.ppermute(x, "x", [(0, 1), (1, 0)]),
}  # fmt: skip


def mesh_of(num_gpus):
    """Return (devices that this rank chose, the group's backend for CUDA tensors, a sum over the ranks)."""
    chosen = []
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: num_gpus),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "is_initialized", lambda: bool(chosen)),
        mock.patch.object(torch.cuda, "set_device", chosen.append),
    ):
        mesh = fr.Mesh.distributed(device="cuda", x=2)
    group = mesh.device_mesh.get_group("x")
    total = fr.shard_map(lambda x: fr.psum(x, "x"), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P())
    _mesh.GROUPS.clear()
    return chosen, group._get_backend(torch.device("cuda")).name(), total(torch.ones(1) + dist.get_rank()).item()


def refused(num_gpus, num_ranks, backend):
    """Return the text of the error of ranks of a machine with this number of GPUs."""
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: num_gpus),
        mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": str(num_ranks)}),
        mock.patch.object(dist, "get_backend", lambda *_: backend),
    ):
        return "\n".join(f"{p.what} {p.got} {p.need} {p.hint}" for p in _mesh.gpu_problems())


def operators():
    """Return {collective: the operators that its program and its derivative's program call}."""
    mesh, out = fr.Mesh.distributed(device="cpu", x=2), {}
    for name, fn in COLLECTIVES.items():
        mapped = fr.shard_map(fn, mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x"), check=False)
        total = lambda x, mapped=mapped: sum(y.sum() for y in fr.tree.leaves(mapped(x)) if y.is_floating_point())
        x = torch.ones(2, 3)
        lowered = [fr.jit(f).lower(x) for f in (mapped, torch.func.grad(total))]
        out[name] = sorted({sent.kind for own in lowered for sent in own.exchanges})
    return out


def recorded():
    """Run donated calls as on a device whose calls are recorded. Return the number of recordings of a function that
    exchanges, whose values are checked, and of one that does not."""
    mesh, found = fr.Mesh.distributed(device="cpu", x=2), []
    sums = fr.shard_map(lambda x: x + fr.psum(x, "x"), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x"))
    capture = lambda once: (found.append(once) or (lambda: None), once())
    with (
        mock.patch.object(_compiled, "is_replayed", lambda x: True),
        mock.patch.object(_compiled, "capture_cuda", capture),
    ):
        step, x = fr.jit(sums, donate=("x",)), torch.ones(2) + dist.get_rank()
        for wanted in (x + 3, x + 12, x + 39):  # the sum of both ranks trebles: 3, 9, 27
            x = step(x)
            assert_trees_close(x, wanted)
        num_sums, alone = len(found), fr.jit(lambda x: 3 * x, donate=("x",))
        alone(alone(torch.ones(2)))
    return num_sums, len(found) - num_sums

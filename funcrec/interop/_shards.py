"""Handles tensors cut over ranks: a ShardedTensor, a DTensor of TorchRec's LocalShardsWrapper, or any DTensor.

    whole(x) = the parts of all ranks in their places          like(x, whole) = x with parts cut from `whole`

Each part travels once, from the rank that has it to all other ranks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from funcrec.core import fail
from funcrec.mesh import Ranks, say


class Parts(NamedTuple):
    """This rank's parts of a tensor of `shape`, each with its first index. `group` holds the parts of all ranks."""

    shape: torch.Size
    own: list[tuple[tuple[int, ...], Tensor]]
    group: Any


class Elsewhere(NamedTuple):
    """A tensor without parts on this rank."""

    shape: torch.Size
    dtype: torch.dtype
    device: str
    group: Any


def parts_of(x: Any) -> Parts | None:
    """Return the parts of this rank; None for a tensor that is whole, or for a DTensor that torch itself can gather."""
    if isinstance(x, Elsewhere):
        return Parts(x.shape, [], x.group)
    if hasattr(x, "local_shards") and hasattr(x, "metadata"):
        shards = [(tuple(s.metadata.shard_offsets), s.tensor.detach().view(tuple(s.metadata.shard_sizes)))
                  for s in x.local_shards()]  # fmt: skip
        return Parts(torch.Size(x.metadata().size), shards, x._process_group)
    local: Any = x.to_local() if hasattr(x, "to_local") else None
    if hasattr(local, "local_shards"):
        cut = next(i for i, p in enumerate(x.placements) if p.is_shard())
        offsets = [tuple(o) for o in local.local_offsets()]
        return Parts(x.shape, list(zip(offsets, local.local_shards())), x.device_mesh.get_group(cut))
    return None


def shape_of(x: Any) -> torch.Size:
    return torch.Size(x.metadata().size) if hasattr(x, "local_shards") and hasattr(x, "metadata") else x.shape


def whole(call: str, name: str, x: Any) -> Tensor:
    """Return on every rank a copy of the whole of x. If x has parts on other ranks, all ranks must call."""
    parts = parts_of(x)
    if parts is None:
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        return x.detach().clone()
    device = parts.own[0][1].device if parts.own else getattr(x, "device", "cpu")
    out, held = torch.empty(parts.shape, dtype=x.dtype, device=device), 0
    ranks = Ranks.of_group(parts.group)
    for rank, places in enumerate(say([(at, tuple(part.shape)) for at, part in parts.own], ranks)):
        source = dist.get_global_rank(parts.group, rank)
        for i, (at, size) in enumerate(places):
            is_mine = rank == ranks.rank
            part = parts.own[i][1].detach().contiguous() if is_mine else torch.empty(size, dtype=x.dtype, device=device)
            dist.broadcast(part, source, group=parts.group)
            out[tuple(slice(a, a + n) for a, n in zip(at, size))] = part
            held += part.numel()
    if held != out.numel():
        got, need = f"{held} numbers in all shards", f"{out.numel()}, each in one shard"
        hint = "the state dict of one training, from every rank"
        fail(call, f"the shards of {name!r} are not its parts.", got=got, need=need, hint=hint)
    return out


def like(x: Any, new: Tensor) -> Any:
    """Return the whole tensor `new` in the form of x: with the dtype and device of x, and cut like x."""
    parts = parts_of(x)
    if parts is None and not hasattr(x, "full_tensor"):
        return new.to(x.device, x.dtype, copy=True).reshape(x.shape)
    if parts is None:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(new.to(x.dtype, copy=True).reshape(x.shape), x.device_mesh, x.placements)
    new = new.reshape(parts.shape)
    cut = [
        new[tuple(slice(a, a + n) for a, n in zip(at, part.shape))].to(part.device, x.dtype, copy=True)
        for at, part in parts.own
    ]
    if hasattr(x, "to_local"):
        from torch.distributed.tensor import DTensor

        local = x.to_local()
        own = type(local)(cut, [list(at) for at, _ in parts.own])
        return DTensor.from_local(own, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    made = [type(s)(part.contiguous(), s.metadata) for s, part in zip(x.local_shards(), cut)]
    return type(x)._init_from_local_shards_and_global_metadata(made, x.metadata(), process_group=parts.group)


def joined(theirs: dict[str, dict[str, Any]], group: Any) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state with the names of all ranks of a group.

    Each rank names only tables of which it has a part.
    """
    form = lambda x: (shape_of(x), x.dtype, first_device(x)) if hasattr(x, "dtype") else x
    of_all = say({n: {k: form(x) for k, x in own.items()} for n, own in theirs.items()}, Ranks.of_group(group))
    every = {n: own for rank in of_all for n, own in rank.items()}
    there = lambda x: Elsewhere(x[0], x[1], x[2], group) if isinstance(x, tuple) else x
    return {n: theirs.get(n, {k: there(x) for k, x in own.items()}) for n, own in every.items()}


def first_device(x: Any) -> str:
    parts = parts_of(x)
    return parts.own[0][1].device.type if parts and parts.own else "cpu" if parts else x.device.type

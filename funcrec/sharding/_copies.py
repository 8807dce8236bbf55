"""Checks that copies of tables that train apart are equal."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from funcrec.core import Problem, value_below
from funcrec.mesh import Mesh, all_gather, bind, bits_of, checksum, pmax
from funcrec.sharding.placement._layout import Layout


def copy_problems(layout: Layout, leaves: Mapping[str, Mapping[str, Tensor]], mesh: Mesh) -> Iterator[Problem]:
    """Report tensors of {kind: {bank: f[rows, ...]}} that differ between copies. Real ranks compare checksums."""
    flat = [(kind, n, x) for kind, own in leaves.items() for n, x in own.items()]
    if layout.num_copies == 1 or not flat:
        return
    if mesh.is_emulated:
        copies = [bits_of(x).unflatten(0, (layout.num_copies, -1)) for _, _, x in flat]
        differ = [bool(value_below((x != x[:1]).any()).any()) for x in copies]
    else:
        sums = torch.stack([checksum(value_below(x)) for _, _, x in flat])
        with bind(mesh.bound_axes(mesh.axis_names, sums.device)):
            of_all = all_gather(sums, layout.replicas)
            unequal = (of_all != of_all[:1]).any(0).int()
            differ = pmax(unequal, mesh.axis_names).tolist()  # with pmax all ranks raise
    names = [f"{kind} of {n!r}" for (kind, n, _), wrong in zip(flat, differ, strict=True) if wrong]
    if names:
        hint = "state = fr.sync_replicas(state, mesh=mesh) first"
        got = f"{layout.num_copies} copies over {layout.replicas}; not equal: {', '.join(names)}"
        yield Problem("the tables have copies that trained apart.", got, "copies of equal bits", hint)

"""A graph as compiled code: what Inductor is asked for, and what is kept from it because torch 2.13 gets it wrong.

compile_graph(graph, x)(*x) = graph(*x)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from funcrec.compile._passes import fill_waits


def add_with_product(x, y, *, alpha=1):
    """x + alpha · y without `alpha`, which Inductor drops when y
    is a matrix product (addition and product become addmm)."""
    return NotImplemented if alpha == 1 else x + y * alpha


def remember_writes(steps: list) -> list:
    """The steps of a graph before they are fused: each that reads what another wrote in place is told so once more.

    Inductor looks up anew what a step reads when it fuses loops of different shapes, and then forgets that the buffer
    has been written since, unless the step has a dependency of this kind: it would run before the write.
    """
    from torch._inductor.dependencies import WeakDep

    for step in (s for group in steps for s in group.get_nodes()):
        written = {d.name for d in step.read_writes.reads} & set(step.mutation_renames.values())
        for name in sorted(written):
            step.add_fake_dep(WeakDep(name, mutating_buf=step.get_name(), is_fake=True))
    return steps


DECOMPOSITIONS = {torch.ops.aten.add.Tensor: add_with_product}  # for the graph, before it is compiled
OPTIONS = {
    "_pre_fusion_custom_pass": remember_writes,
    # it writes into rows that their own new values, or parts of a cat, still read
    "disabled_passes": "reinplace_inplaceable_ops",
    "emulate_precision_casts": True,  # casts to 16 bits round as in eager mode
    # ranks compute while values travel: started at once, awaited where they are read
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [fill_waits],
    # a chain of key derivations, inlined, would grow by eight with each link (30 is torch's)
    "realize_opcount_threshold": 16,
}


def compile_graph(graph: torch.fx.GraphModule, arguments: list[Tensor]) -> Callable:
    """The graph as code for arguments of these forms."""
    import torch._inductor  # slow to import, and only needed to compile

    return torch._inductor.compile(graph, arguments, OPTIONS)

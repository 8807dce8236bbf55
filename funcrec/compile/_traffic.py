"""What a staged function sends: the collectives of its graph.

    bytes that leave a rank in a step = Σ over collectives of `LEAVES` of its operand

Shapes: n ranks in a collective's group.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from funcrec.mesh import LEAVES


class Sent(NamedTuple):
    """One collective: its operator's name, the shape and dtype of its operand, and the bytes that leave the rank."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent_bytes: int


def collectives_of(graph: torch.fx.Graph) -> Iterator[Sent]:
    """The collectives of a staged graph, in its order."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in LEAVES:
            operand, *how, group = node.args
            x: Tensor = operand.meta["val"]
            name = node.target.name().partition("::")[2]
            yield Sent(
                name, tuple(x.shape), x.dtype, LEAVES[node.target](x.nbytes, _resolve_process_group(group), *how)
            )

"""Sends any number of bytes from every real rank of a mesh to every other rank. All ranks know the sizes.

swap_bytes(blocks)[r] = (what rank 0 sent to r, ..., what rank n-1 sent to r)
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from funcrec.core import sure
from funcrec.mesh._exchange import AWAIT, SWAP
from funcrec.mesh._mesh import Mesh


def swap_bytes(blocks: list[Tensor], coming: Sequence[int], going: Sequence[int], mesh: Mesh) -> Tensor:
    """Return the received bytes, u8[sum(coming)].

    Rank r sends coming[r] bytes to this rank. `blocks` holds, for each rank r in turn, going[r] bytes to send.
    """
    device = sure(mesh.device_mesh).device_type
    sent = torch.cat(blocks) if blocks else torch.zeros(0, dtype=torch.uint8, device=device)
    return AWAIT(SWAP(sent, list(coming), list(going), sure(dist.group.WORLD).group_name))

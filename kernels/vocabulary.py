"""The schemas of the operations on vocabularies, the shapes of their results, and the numbers that they share.

Shapes: N ids, R rows.
"""

import torch
from torch import Tensor

SLOTS = 128  # rows of a bucket
LRU, LFU, DISTANCE_LFU, SCORED = range(4)  # the policies
EVERYONE = 1 << 53  # `share` that admits every id

SCHEMAS = {
    "find_ids": "(Tensor tags, Tensor entries, Tensor ids, Tensor valid, int shared, int salt) -> Tensor",
    "admit_ids": "(Tensor[] state, Tensor now, Tensor ids, Tensor valid, Tensor? scores, int policy, int ttl, int "
    "least, int share, int shared, int salt) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "settle_ids": "(Tensor[] state, Tensor now, Tensor ids, Tensor rows, Tensor missed, Tensor changed, Tensor "
    "new_ids, Tensor counts, Tensor numbers, int least, int salt) -> Tensor[]",
    "settle_ids_": "(Tensor(a!)[] state, Tensor now, Tensor ids, Tensor rows, Tensor missed, Tensor changed, Tensor "
    "new_ids, Tensor counts, Tensor numbers, int least, int salt) -> ()",
}


def _admit_ids(state, now, ids, *rest):
    n = ids.shape[0]
    kinds = [torch.int64] * 4 + [torch.bool, torch.int64, torch.bool]
    return *(ids.new_empty(n, dtype=kind) for kind in kinds), ids.new_empty(4, dtype=torch.int64)


def _blank(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


FAKES = {
    "find_ids": lambda tags, entries, ids, *rest: ids.new_empty(ids.shape[0], dtype=torch.int64),
    "admit_ids": _admit_ids,
    "settle_ids": lambda state, *rest: [_blank(x) for x in state],
}

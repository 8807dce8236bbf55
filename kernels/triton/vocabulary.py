"""Rows of ids in a set-associative vocabulary: a program compares some ids with all slots of their buckets.

`reference_vocabulary` has the hash, the tags and the entries. Shapes: N ids, R rows.
"""

import torch
import triton.language as tl
from funcrec.kernels.reference_columns import columns_by
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import kernel, lanes, mix, smaller
from funcrec.kernels.vocabulary import SLOTS, of_shared
from torch import Tensor

IDS = 4  # of a program, with 128 slots each


def find_ids(tags: Tensor, entries: Tensor, ids: Tensor, valid: Tensor, shared: int, salt: int) -> Tensor:
    """Return the row of each of the first `valid` ids, i64[N]; for an unknown id a shared row, or -1."""
    out, (shared, buckets) = torch.empty(ids.shape[0], dtype=torch.int64, device=ids.device), of_shared(shared)
    num_rows = tags.shape[0]
    on.launch(
        _find, (on.cdiv(ids.shape[0], IDS),), tags.contiguous(), entries.contiguous(), ids.contiguous(), valid, out,
        ids.shape[0], num_rows, buckets or num_rows // SLOTS, shared, salt, TILE_IDS=IDS, TILE_SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip
    return out


find_columns = columns_by(find_ids)


@kernel()
def _find(
    tags,
    entries,
    ids,
    valid,
    out,
    num_ids,
    num_rows,
    buckets,
    shared,
    salt,
    TILE_IDS: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
):
    place = lanes(TILE_IDS)
    given = (place < num_ids) & (place < tl.load(valid))
    id = tl.load(ids + place, mask=given, other=0).to(tl.int64)
    h = mix(id ^ salt)
    bucket = ((((h >> 32) & 0xFFFFFFFF) * buckets) >> 32) % (num_rows // TILE_SLOTS)
    tag = tl.maximum(h & 255, 1)
    row = (bucket * TILE_SLOTS)[:, None] + tl.arange(0, TILE_SLOTS)[None, :]
    near = given[:, None] & (tl.load(tags + row, mask=given[:, None], other=0).to(tl.int64) == tag[:, None])
    same = near & (tl.load(entries + 2 * row, mask=near, other=0) == id[:, None])
    found = tl.reduce(tl.where(same, row, num_rows), 1, smaller)
    unknown = tl.where(shared > 0, num_rows + (((h & 0xFFFFFFFF) * shared) >> 32), -1)
    tl.store(out + place, tl.where(given, tl.where(found < num_rows, found, unknown), -1), mask=place < num_ids)

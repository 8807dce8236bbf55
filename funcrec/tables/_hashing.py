"""Map ids to rows by a pure function, which the feature's config names.

    modulo: id mod R          multiply_shift: (((a·id + b) mod 2⁶⁴ >> 32) · R) >> 32

R is the number of rows. Without a hash, an id is its row.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import GAMMA, Count, Form, Problem, check, describe, mix, shift_right, typed
from funcrec.tables._configs import Hash


@typed
def hash_rows(ids: Annotated[Tensor, Form("i[...]")], hash: Hash | None, num_embeddings: Count) -> Tensor:
    """Return the rows of ids i[...] -> i[...], in the same dtype.

    Law: a hashed row lies in [0, num_embeddings). Without a hash, the row equals the id.

    Raises:
      ValueError: if num_embeddings >= 2³¹ with multiply_shift, or the ids' dtype cannot hold every row.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.hash_rows(torch.tensor([12, -1]), fr.modulo(), 10)
      tensor([2, 9])
    """
    if hash is None:
        return ids
    check("funcrec.hash_rows", height_problems(ids, hash, num_embeddings))
    if hash.kind == "modulo":
        return torch.remainder(ids, num_embeddings)
    a, b = multipliers(hash.seed, ids.device)
    high = shift_right(ids.to(torch.int64) * a + b, 32)
    return shift_right(high * num_embeddings, 32).to(ids.dtype)


def hash_lanes(ids: Tensor, lane: Tensor, hows: Sequence[tuple[Hash | None, int]]) -> Tensor:
    """Return the rows of ids i[N] of several features, computed in one pass.

    hows[lane[i]] is the hash and num_embeddings for id i.

    Law: hash_lanes(ids, lane, hows)[i] == hash_rows(ids, *hows[lane[i]])[i].
    """
    for hash, num_embeddings in hows:
        if hash is not None:  # Without a hash, ids are rows of a table of any height.
            check("funcrec.hash_rows", height_problems(ids, hash, num_embeddings))
    of_lane = lambda numbers: torch.tensor(numbers, device=ids.device)[lane]
    kinds = [None if hash is None else hash.kind for hash, _ in hows]
    sizes, rows = of_lane([1 if k is None else n for k, (_, n) in zip(kinds, hows, strict=True)]), ids
    if "modulo" in kinds:
        rows = torch.where(of_lane([k == "modulo" for k in kinds]), torch.remainder(ids, sizes.to(ids.dtype)), rows)
    if "multiply_shift" in kinds:
        ab = torch.stack([torch.stack(multipliers(hash.seed if hash else 0, ids.device)) for hash, _ in hows])[lane]
        high = shift_right(ids.to(torch.int64) * ab[:, 0] + ab[:, 1], 32)
        shifted = shift_right(high * sizes, 32).to(ids.dtype)
        rows = torch.where(of_lane([k == "multiply_shift" for k in kinds]), shifted, rows)
    return rows


def multipliers(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a (odd) and b of multiply_shift, i64[]."""
    a, b = mix(torch.arange(2 * seed + 1, 2 * seed + 3, device=device) * GAMMA)
    return a | 1, b


def height_problems(ids: Tensor, hash: Hash, num_embeddings: int) -> Iterator[Problem]:
    if num_embeddings >= 2**31 and (hash.kind == "multiply_shift" or ids.dtype == torch.int32):
        got, need = f"{num_embeddings} rows, {describe(ids)}", "num_embeddings < 2³¹"
        yield Problem(f"`{hash.kind}` cannot reach every row.", got, need, "i64 ids and modulo()")

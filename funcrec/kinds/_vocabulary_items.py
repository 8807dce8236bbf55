"""A vocabulary as a list of its ids, and a vocabulary made from such a list, with any number of rows.

A list names no bucket. So checkpoints keep a list, and vocabularies of any size are made from it.
Shapes: R rows, L places of a list.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, mix, replace, sure, typed
from funcrec.kernels.reference_vocabulary import LOWER, bucket_of, halves, order_by, score_of, tag_of, unsigned
from funcrec.kernels.vocabulary import SLOTS
from funcrec.kinds._admission import scores_at
from funcrec.kinds._vocabulary import POLICIES, Vocabulary, vocabulary_problems

FIELDS = ("ids", "rows", "ages", "counts")


@typed
def vocabulary_items(vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Return the ids of a vocabulary, in the order of their hashes, as a dict of tensors.

    It writes no file: `save` writes its result like any tree.

    Returns:
      "ids", "rows", "ages" and "counts", with a place for each row, and the numbers "count" and "now", all in i64.
      Places below `count` hold ids, their rows, the steps since each was last seen, and how often it was seen. Later
      places are 0.

    Law: the list depends on what the vocabulary holds, and not on the order in which ids came. `vocabulary_of` makes a
      vocabulary of it. The sketch of missed ids is not part of it.

    Example:
      >>> import torch, funcrec as fr
      >>> users, rows, _ = fr.admit(fr.vocabulary(128), torch.tensor([4, 5, 4]))
      >>> items = fr.vocabulary_items(users)
      >>> items["ids"][: items["count"]], items["counts"][: items["count"]]
      (tensor([5, 4]), tensor([1, 2]))
    """
    check("funcrec.vocabulary_items", vocabulary_problems(vocabulary))
    live = vocabulary.tags != 0
    ids, (stamp, count) = vocabulary.entries[:, 0], halves(vocabulary.entries[:, 1])
    order = order_by(unsigned(mix(ids ^ vocabulary.salt)), ~live)
    values = ids, torch.arange(vocabulary.capacity, device=ids.device), (vocabulary.now - stamp) & LOWER, count
    listed = {name: torch.where(live, x, 0)[order] for name, x in zip(FIELDS, values, strict=True)}
    return {**listed, "count": live.sum(), "now": vocabulary.now}


@typed
def vocabulary_of(empty: Vocabulary, items: Mapping[str, Tensor]) -> tuple[Vocabulary, Tensor]:
    """Return a vocabulary that holds the ids of a list, with the settings and the size of `empty`, and their rows.

    Args:
      empty: a vocabulary, such as `vocabulary` returns, whose size and settings count. They may differ from those of
        the vocabulary that the list came from. Ids that it holds are not kept.
      items: what `vocabulary_items` returned: "ids", "ages" and "counts" of L places, and numbers "count" and "now",
        all i64. Places from `count` on are not read. "rows" is not read.

    Returns:
      the vocabulary, and the row of each id, i64[L], or -1. An id has no row if its bucket is full: ids older than
        the `ttl` of `empty` leave first, then its policy chooses. Rows of tables move by it:
        new[rows[k]] = old[items["rows"][k]] for k < count.

    Raises:
      TypeError, ValueError: `empty` or the list does not have these tensors.

    Law: the order of the list changes nothing. vocabulary_items(vocabulary_of(empty, items)) has the same ids, ages and
      counts, if no bucket has more than 128. An id that is listed twice has one row, and its least age.

    Example:
      >>> import torch, funcrec as fr
      >>> users, rows, _ = fr.admit(fr.vocabulary(128), torch.arange(100))
      >>> items = fr.vocabulary_items(users)
      >>> larger, moved = fr.vocabulary_of(fr.vocabulary(1024), items)
      >>> int(larger.num_ids), bool((fr.find(larger, items["ids"][:100]) == moved[:100]).all())
      (100, True)
    """
    check("funcrec.vocabulary_of", vocabulary_problems(empty), item_problems(items, empty))
    ids, ages, counts, num_rows = items["ids"], items["ages"], items["counts"].clamp(0, LOWER), empty.capacity
    place = torch.arange(ids.shape[0], device=ids.device)
    h = mix(ids ^ empty.salt)
    by_id = order_by(-counts, ages, unsigned(h), place >= items["count"])
    again = (h[by_id] == h[by_id].roll(1)) & (place > 0)
    listed = torch.zeros_like(again).scatter(0, by_id, (place < items["count"]) & ~again)
    policy = empty.policy
    score = scores_at(policy, ages, counts) if callable(policy) else score_of(POLICIES[policy], ages, counts, ages)
    bucket, is_old = bucket_of(h, num_rows), torch.zeros_like(listed) if empty.ttl is None else ages > empty.ttl
    score = torch.where(is_old, 0, score)
    order = order_by(unsigned(h), ages, ~score, is_old, bucket, ~listed)  # ~score descends; -score may overflow
    own = bucket[order]
    rank = place - torch.where((own != own.roll(1)) | (place == 0), place, 0).cummax(0).values
    rows = torch.zeros_like(order).scatter(0, order, own * SLOTS + rank)
    fits = listed & (torch.zeros_like(order).scatter(0, order, rank) < SLOTS)
    at = torch.where(fits, rows, num_rows)
    put = lambda x, new: x.new_zeros(num_rows + 1, *x.shape[1:]).index_put((at,), new.to(x.dtype))[:-1]
    words = ((items["now"] - ages) & LOWER) << 32 | counts
    own = put(empty.tags, tag_of(h)), put(empty.entries, torch.stack([ids, words], 1)), items["now"].clone()
    sketch = None if empty.sketch is None else torch.zeros_like(empty.sketch)
    made = replace(empty, tags=own[0], entries=own[1], now=own[2], sketch=sketch)
    return made, torch.where(fits, rows, -1)


# -- validators --------------------------------------------------------------------------------------------------


def item_problems(items: Mapping[str, Tensor], empty: Vocabulary) -> Iterator[Problem]:
    for name, dims in {"ids": 1, "ages": 1, "counts": 1, "count": 0, "now": 0}.items():
        x, need = items.get(name), "i64[L], as long as `ids`" if dims else "i64[]"
        fits = isinstance(x, Tensor) and x.dtype == torch.int64 and x.dim() == dims and x.device == empty.tags.device
        ids = items.get("ids")
        same = ids.shape if dims and isinstance(ids, Tensor) else None
        if not fits or same not in (None, sure(x).shape):
            yield Problem(f"`items[{name!r}]` does not fit.", describe(x), need, "fr.vocabulary_items(vocabulary)")

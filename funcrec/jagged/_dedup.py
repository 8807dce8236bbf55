"""Store equal bags of a key once, with inverse indices that say which bag each example has.

    bag of example e and key f = distinct[f][inverse[f, e]]

Bags are equal if their ids and the bits of their weights are. A hash groups them; then each bag is compared with the
first bag of its group, so that no collision counts.
Shapes: E examples, F keys, B bags of a key, U distinct bags, p parts of a batch.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Count, Problem, any_tracked, check, doubled, replace, sure, typed
from funcrec.core.random import mix
from funcrec.jagged._jagged import bag_ids, take_ranges
from funcrec.jagged._keyed_checks import id_dtype_problems, inverse_value_problems, keyed_parts
from funcrec.jagged._keyed_jagged import KeyedJaggedTensor
from funcrec.jagged._primitives import are_equal, is_concrete

CALL = "funcrec.dedup_bags"


@typed
def dedup_bags(ids: KeyedJaggedTensor, keys: Sequence[str] | None = None, *, num_parts: Count = 1) -> KeyedJaggedTensor:
    """Return the ids with equal bags of a key stored once, in the order of their first examples.

    `lookup` then pools each distinct bag once, and copies the result to the examples. `dedup_bags` reads values on the
    host, so call it where batches are made: before a device, `jit` or vmap gets them.

    Args:
      ids: B bags for each key, or bags that inverse indices already share.
      keys: the keys whose equal bags are stored once; None for all keys. The bags of other keys stay as they are.
      num_parts: p, the number of ranks or micro-batches that share the batch. Each part of E / p examples then has
        bags of its own, and all parts have the same number of bags; empty bags fill the parts up. So `shard_map`
        and `accumulate_grads` can cut the result.

    Returns:
      ids without padding, with `inverse` indices, and with `strides` if the keys have different numbers of bags.

    Raises:
      KeyError: a key does not exist.
      TypeError: weights are differentiated, but examples that share a bag share its weights.
      ValueError: the values cannot be read here, the parts are not equal, or the keys have different numbers of bags
        and no inverse indices.

    Law: lookup(tables, dedup_bags(ids), features) = lookup(tables, ids, features), bit for bit.

    Cost: a sort of the bags' hashes and two passes over the ids.

    Example:
      >>> import funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"user": [[7, 8], [7, 8], [9]], "item": [[1], [2], [3]]})
      >>> once = fr.dedup_bags(ids)
      >>> once.to_lists(), once.strides, once.inverse.tolist()
      ({'user': [[7, 8], [9]], 'item': [[1], [2], [3]]}, (2, 3), [[0, 0, 1], [0, 1, 2]])

    Source: TorchRec's variable batch per feature (KeyedJaggedTensor with stride_per_key_per_rank, inverse_indices).
    """
    check(CALL, keyed_parts(ids, "ids"), id_dtype_problems(ids.values, "ids"))
    check(CALL, readable_problems(ids))
    check(CALL, key_problems(ids, keys), batch_problems(ids, num_parts), inverse_value_problems(ids))
    chosen = ids.keys if keys is None else keys
    bags, inverses, counts = [], [], []
    for f, key in enumerate(ids.keys):
        first, last = ids.bag_range(key)
        own = torch.arange(last - first) if ids.inverse is None else ids.inverse[f].long()
        which = equal_bags(ids, key)[own] if key in chosen else own
        firsts, inverse = distinct(which, num_parts)
        bags.append(torch.where(firsts < 0, -1, first + own[firsts.clamp(min=0)]))
        inverses.append(inverse)
        counts.append(firsts.shape[0])
    return _with_bags(ids, bags, inverses, tuple(counts))


def _with_bags(
    ids: KeyedJaggedTensor, bags: list[Tensor], inverses: list[Tensor], counts: tuple[int, ...]
) -> KeyedJaggedTensor:
    """Return ids of these bags of each key; position -1 is an empty bag."""
    at = torch.cat(bags) if bags else torch.zeros(0, dtype=torch.int64)
    inverse = torch.stack(inverses) if inverses else torch.zeros(0, ids.num_examples, dtype=torch.int64)
    return _at(ids, at, inverse, None if are_equal(counts) else counts)


def bags_of_examples(ids: KeyedJaggedTensor) -> Tensor:
    """Return the position in the flat buffer of each example's bag, key-major, i64[F · E]."""
    inverse = sure(ids.inverse)
    firsts = torch.tensor([ids.bag_range(k)[0] for k in ids.keys], dtype=torch.int64, device=inverse.device)
    return (firsts[:, None] + inverse).flatten()


def expand_bags(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids without inverse indices, with a bag for each example; it reads lengths on the host.

    Law: expand_bags(dedup_bags(ids)).to_lists() = ids.to_lists()."""
    return _at(ids, bags_of_examples(ids), None, None)


def _at(ids: KeyedJaggedTensor, at: Tensor, inverse: Tensor | None, strides: tuple[int, ...] | None):
    """Return ids of the bags at these positions of the flat buffer; position -1 is an empty bag."""
    used = at.clamp(min=0)
    starts, lengths = ids.offsets[:-1].index_select(0, used), ids.lengths.index_select(0, used)
    lengths = torch.where(at < 0, 0, lengths)
    taken = take_ranges(ids.values, ids.weights, starts, lengths, int(lengths.sum()))
    return replace(
        ids, values=taken.values, offsets=taken.offsets, weights=taken.weights, inverse=inverse, strides=strides
    )


def distinct(which: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Return (the first example of each bag i64[p · U], the bag of each example i64[E]), part by part.

    which: i64[E], equal for examples with equal bags. U is the most distinct bags of a part; -1 marks an empty bag.
    """
    parts = [_by_first(x) for x in which.view(num_parts, -1)] if which.numel() else []
    most, size = max((x.shape[0] for x, _ in parts), default=0), which.shape[0] // num_parts
    filled = [torch.cat([x + i * size, x.new_full((most - x.shape[0],), -1)]) for i, (x, _) in enumerate(parts)]
    own = [inverse + i * most for i, (_, inverse) in enumerate(parts)]
    none = torch.zeros(0, dtype=torch.int64)
    return torch.cat(filled or [none]), torch.cat(own or [none])


def _by_first(which: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the first place of each distinct number, ascending; the number of that place for each element)."""
    _, first, inverse = np.unique(which.numpy(), return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    return torch.from_numpy(first[order]), torch.from_numpy(number[inverse.reshape(-1)])


def equal_bags(ids: KeyedJaggedTensor, key: str) -> Tensor:
    """Return a number for each bag of a key, i64[B]: the position of the first bag that is equal to it."""
    bounds = ids.offsets_for(key).long()
    begin, end = int(bounds[0]), int(bounds[-1])
    offsets = bounds - begin
    parts = [ids.values[begin:end].long()]
    if ids.weights is not None and key not in ids.unweighted:
        parts.append(_bits(ids.weights[begin:end].detach()))
    bag = bag_ids(offsets, end - begin)
    place = torch.arange(end - begin) - offsets[bag]
    firsts = _first_of_each(_hashes(parts, bag, place, offsets.diff()))
    twin = offsets[firsts[bag]] + place  # the same place in the first bag of the group
    is_twin = offsets.diff() == offsets.diff()[firsts]
    inside = is_twin[bag]
    for x in parts:
        odd = inside & (x != x[torch.where(inside, twin, 0)]) if x.numel() else inside
        is_twin = is_twin.index_put((bag[odd],), torch.tensor(False))
    return firsts if bool(is_twin.all()) else _first_of_each_exactly(parts, offsets)


def _hashes(parts: Sequence[Tensor], bag: Tensor, place: Tensor, lengths: Tensor) -> Tensor:
    """Return a hash of each bag, i64[B], which depends on its numbers and their order."""
    code = mix(place)
    for x in parts:
        code = mix(code + x)
    return mix(lengths).index_add(0, bag, code)


def _first_of_each(which: Tensor) -> Tensor:
    """Return the first place at which each element's number occurs, i64[B]."""
    firsts, inverse = _by_first(which)
    return firsts[inverse] if which.numel() else which


def _first_of_each_exactly(parts: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """Return the same for bags whose hashes collide, by comparing the bags."""
    found: dict = {}
    contents = (tuple(x[a:b].numpy().tobytes() for x in parts) for a, b in pairwise(offsets.tolist()))
    return torch.tensor([found.setdefault(x, i) for i, x in enumerate(contents)], dtype=torch.int64)


def _bits(x: Tensor) -> Tensor:
    """Return the bits of floats, i64[N]."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).long()


# -- validators --------------------------------------------------------------------------------------------------


def readable_problems(ids: KeyedJaggedTensor) -> Iterator[Problem]:
    if any_tracked([x for x in (ids.weights,) if x is not None]):
        hint = "dedup_bags of the ids before their weights are differentiated"
        what, got = "the weights are differentiated, and equal bags share one.", "weights that grad or jvp follows"
        yield Problem(what, got, "plain weights", hint, TypeError)
    elif not all(is_concrete(x) for x in (ids.values, ids.offsets, ids.weights, ids.inverse) if x is not None):
        what, got = "the bags cannot be compared here.", f"values on {ids.values.device}, or inside of jit or vmap"
        yield Problem(what, got, "values on the host", "dedup_bags where the batch is made, before `jit` or a device")


def key_problems(ids: KeyedJaggedTensor, keys: Sequence[str] | None) -> Iterator[Problem]:
    odd = [k for k in keys or () if k not in ids.keys]
    if odd:
        yield Problem("`keys` are not keys of the ids.", f"{odd}", f"some of {list(ids.keys)}", kind=KeyError)
    if again := doubled(ids.keys):
        yield Problem("`ids` has a key twice.", f"{again}", "distinct keys", "ids.permute([...]), each key once")


def batch_problems(ids: KeyedJaggedTensor, num_parts: int) -> Iterator[Problem]:
    if ids.inverse is None and ids.strides is not None:
        hint = "the ids of whole examples, before equal bags are left out"
        what, got = "the keys have different numbers of bags.", f"strides={ids.strides}"
        yield Problem(what, got, "one bag for each example, or inverse indices", hint)
    elif ids.num_examples % num_parts:
        got, need = f"{ids.num_examples} examples", f"a multiple of num_parts={num_parts}"
        yield Problem("the examples are not cut evenly.", got, need, "a batch of another size")

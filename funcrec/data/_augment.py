"""Augmentations of histories: other views of the same bags, drawn by a key, for contrastive losses.

    crop:    s_a, ..., s_{a+m-1}                                            m = ⌊share · n⌋, at least 1
    mask:    s with m items replaced by one item                            m = ⌊share · n⌋
    reorder: s with s_a, ..., s_{a+m-1} in another order                    m = ⌊share · n⌋

The draw of a bag depends on the key, the bag's number and its length, not on other bags or on the padding.
Shapes: B bags, N capacity.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec.core import Key, Problem, UnitInterval, check, describe, random, replace, typed
from funcrec.jagged import JaggedTensor, take_ranges

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@typed
def crop(bags: JaggedTensor, key: Key, *, share: UnitInterval = 0.6) -> JaggedTensor:
    """Return for each bag a run of its values, drawn by the key.

    Args:
      bags: histories, with values [N, ...]. Weights are cut too.
      share: η. Of n values ⌊η n⌋ stay, but at least one if the bag is not empty. All runs are equally likely.

    Returns:
      bags of the same capacity. The padding is zero.

    Raises:
      TypeError: complex values, and unsigned integers of 16 bits or more.

    Law: crop(bags, key)[b] is a run of bags[b]. The same key gives the same run.

    Example:
      >>> import funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([[1, 2, 3, 4, 5], [], [6, 7]])
      >>> fr.data.crop(bags, fr.key(1), share=0.6).to_lists()
      [[2, 3, 4], [], [6]]

    Source: Xie et al., "Contrastive learning for sequential recommendation" (ICDE 2022), section III-B.
    """
    check("funcrec.data.crop", value_problems(bags))
    lengths = bags.lengths
    kept = torch.where(lengths > 0, counts_of(lengths, share).clamp(min=1), 0)
    starts = bags.offsets[:-1] + first_of(lengths, kept, key)
    return take_ranges(bags.values, bags.weights, starts, kept, bags.capacity)


@typed
def mask(bags: JaggedTensor, key: Key, *, item: int, share: UnitInterval = 0.3) -> JaggedTensor:
    """Return the same bags with some of their ids replaced by one, drawn by the key.

    Args:
      bags: histories of ids i[N].
      item: the id that replaces them: one with a row of its own in the table; or -1, which is read as zeros.
      share: γ. Of n ids, ⌊γ n⌋ are replaced. All choices of places are equally likely.

    Raises:
      TypeError, ValueError: values that are no ids, and an item that their dtype cannot hold.

    Law: mask(bags, key)[b] equals bags[b] but for ⌊γ n⌋ places. The same key gives the same places.

    Example:
      >>> import funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([[1, 2, 3, 4, 5], [], [6, 7]])
      >>> fr.data.mask(bags, fr.key(0), item=0, share=0.4).to_lists()
      [[0, 2, 0, 4, 5], [], [6, 7]]

    Source: Xie et al., "Contrastive learning for sequential recommendation" (ICDE 2022), section III-B.
    """
    check("funcrec.data.mask", id_problems(bags, item))
    bag = bags.bag_ids()
    order = sorted_by(bag, numbers_of(key, bag, bags))
    rank = torch.arange(bags.capacity, device=bag.device) - of_bag(bags.offsets[:-1], bag)
    is_first = rank < of_bag(counts_of(bags.lengths, share), bag)  # of the places of a bag, in the order of numbers
    chosen = torch.zeros_like(is_first).scatter(0, order, is_first)
    return replace(bags, values=torch.where(chosen, item, bags.values))


@typed
def reorder(bags: JaggedTensor, key: Key, *, share: UnitInterval = 0.6) -> JaggedTensor:
    """Return the same bags with a run of each in another order, drawn by the key.

    Args:
      bags: histories, with values [N, ...]. Weights move along.
      share: β. Of n values, a run of ⌊β n⌋ is shuffled. All runs and orders are equally likely.

    Raises:
      TypeError: as `crop`.

    Law: reorder(bags, key)[b] has the values of bags[b], and those before and after the run stay in their places. The
      same key gives the same order.

    Example:
      >>> import funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([[1, 2, 3, 4, 5], [], [6, 7]])
      >>> fr.data.reorder(bags, fr.key(1), share=0.8).to_lists()
      [[1, 2, 4, 3, 5], [], [6, 7]]

    Source: Xie et al., "Contrastive learning for sequential recommendation" (ICDE 2022), section III-B.
    """
    check("funcrec.data.reorder", value_problems(bags))
    for_runs, for_order = random.split(key)
    bag, lengths = bags.bag_ids(), bags.lengths
    size = counts_of(lengths, share)
    begin = bags.offsets[:-1] + first_of(lengths, size, for_runs)
    place = torch.arange(bags.capacity, device=bag.device)
    is_after = place >= of_bag(begin + size, bag)
    is_in = (place >= of_bag(begin, bag)) & ~is_after
    numbers = torch.where(is_in, numbers_of(for_order, bag, bags), 0)  # equal numbers keep their order
    order = sorted_by(3 * bag.long() + is_in + 2 * is_after, numbers)
    weights = None if bags.weights is None else bags.weights.index_select(0, order)
    return replace(bags, values=bags.values.index_select(0, order), weights=weights)


def counts_of(lengths: Tensor, share: float) -> Tensor:
    """Return ⌊share · n⌋ for each length, in f64 as Python computes it."""
    return (lengths.double() * share).floor().to(lengths.dtype)


def first_of(lengths: Tensor, sizes: Tensor, key: Tensor) -> Tensor:
    """Return for each bag the first place of a run of its size, drawn uniformly from all such places."""
    drawn = random.shift_right(random.bits(key, (lengths.shape[0],)), 1)
    return (drawn % (lengths - sizes + 1).long()).to(lengths.dtype)


def numbers_of(key: Tensor, bag: Tensor, bags: JaggedTensor) -> Tensor:
    """Return a random number of each place, i64[N] >= 0, from the key, the bag's number and the place in the bag."""
    own = of_bag(random.bits(key, (bags.num_bags,)), bag)
    place = torch.arange(bags.capacity, device=bag.device) - of_bag(bags.offsets[:-1], bag)
    return random.shift_right(random.mix(own + random.GAMMA * (place + 1)), 1)


def of_bag(x: Tensor, bag: Tensor) -> Tensor:
    """Return x [B] of the bag of each place, [N], 0 in the padding."""
    return torch.cat([x, x.new_zeros(1)]).index_select(0, bag)


def sorted_by(block: Tensor, numbers: Tensor) -> Tensor:
    """Return the order i64[N] of places by block, and within a block by number."""
    order = numbers.argsort(stable=True)
    return order.index_select(0, block.index_select(0, order).argsort(stable=True))


# -- validators --------------------------------------------------------------------------------------------------


def value_problems(bags: JaggedTensor) -> Iterator[Problem]:
    x = bags.values
    if not (x.dtype in INTEGERS or x.dtype == torch.bool or x.is_floating_point()):
        need, hint = "[N, ...], integers or floats", "bags of values.long()"
        yield Problem("`bags.values` are neither integers nor floats.", describe(x), need, hint, TypeError)


def id_problems(bags: JaggedTensor, item: int) -> Iterator[Problem]:
    x = bags.values
    if x.dtype not in INTEGERS:
        yield Problem("`bags.values` are not ids.", describe(x), "i[N]", "bags of rows, values.long()", TypeError)
    elif not torch.iinfo(x.dtype).min <= item <= torch.iinfo(x.dtype).max:
        yield Problem("`item` does not fit the ids' dtype.", f"{item}; ids are {describe(x)}", "an id", "item=-1")

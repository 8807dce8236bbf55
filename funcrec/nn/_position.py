"""Learned weights for the positions in a bag, for one feature or for some features of a batch.

    weights[offsets[b] + p] = w_p,   0 for p >= max_length

Shapes: N ids, L positions, F features.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Count, check, kind_of, remade, replace, typed, unknown_problems
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, bag_ids, check_ids, take_ranges
from funcrec.nn._layer import Layer, ones, param_problems

BAGS = kind_of(JaggedTensor)
CALL = "funcrec.nn.position_weights"
NEAR_ZEROS = 64  # a range that lies inside the buffer is copied faster than one beyond its end


@remade
@typed
def position_weights(max_length: Count | Mapping[str, Count]) -> Layer[Any]:
    """Return a layer of weights by position, for a feature or for some features of a batch.

    The weight is 0 at positions >= max_length, so a lookup reads a longer bag as one cut to `max_length`, except for
    the divisor of a mean. It is 0 in the padding.

    Args:
      max_length: the number of positions of one feature, L; or {key: L} for some keys of a KeyedJaggedTensor.

    Returns:
      Layer whose params are ones at first. For one feature, apply(params f[L], bags) -> f[N], where `bags` is a
      JaggedTensor. For {key: L}, apply({key: f[L]}, ids) -> the same ids with these weights, for features with
      `weighted=True`. Where a key already has weights, the result has the products. Other keys keep their weights, or
      have none.

    Law: a lookup of the result is the lookup of ids whose weights the caller gathered, on any mesh and under every
      placement: positions are counted before ids travel.

    Example:
      >>> import torch, funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([[7, 8], [], [9]])
      >>> fr.nn.position_weights(3).apply(torch.tensor([1.0, 0.5, 0.2]), bags)
      tensor([1.0000, 0.5000, 1.0000])
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[7, 8], [9]], "user": [[1], [2]]})
      >>> given = fr.nn.position_weights({"clicked": 3}).apply({"clicked": torch.tensor([1.0, 0.5, 0.2])}, ids)
      >>> given["clicked"].unpad().weights, given["user"].weights
      (tensor([1.0000, 0.5000, 1.0000]), None)

    Source: TorchRec's PositionWeightedModule and PositionWeightedModuleCollection, which replace weights that ids have,
    and raise for longer bags.
    """
    if isinstance(max_length, Mapping):
        return weights_of_keys(dict(max_length))

    def apply(params: Tensor, bags: JaggedTensor) -> Tensor:
        check(CALL, BAGS.find("bags", bags), param_problems(params, (max_length,)))
        starts = torch.zeros_like(bags.offsets[1:])  # ranges beyond the params are 0
        return take_ranges(params, None, starts, bags.offsets.diff(), bags.capacity).values

    return Layer(lambda key: ones(key, (max_length,)), apply)


def weights_of_keys(sizes: Mapping[str, int]) -> Layer[KeyedJaggedTensor]:
    def init(key: Tensor) -> dict[str, Tensor]:
        return {k: ones(key, (n,)) for k, n in sizes.items()}

    def apply(params: Mapping[str, Tensor], ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        check_ids(CALL, ids)
        unknown = unknown_problems("`max_length` names keys without ids.", sizes, ids.keys, kind=KeyError)
        check(CALL, unknown, param_problems(params, {k: (n,) for k, n in sizes.items()}, some=False))
        return with_weights(sizes, params, ids) if sizes else ids

    return Layer(init, apply)


def with_weights(sizes: Mapping[str, int], params: Mapping[str, Tensor], ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the ids with the weights of their positions, from one copy of two ranges for each bag.

    The first range has the key's weights, or ones for a key that has no weights here. The second, from a bag's position
    L on, has zeros: those after the weights, then those read outside the buffer.
    """
    numbers, total = [params[k] for k in sizes], sum(sizes.values())
    ones = ids.capacity if any(k not in sizes for k in ids.keys) else 0
    numbers = torch.cat([*numbers, numbers[0].new_ones(ones), numbers[0].new_zeros(NEAR_ZEROS)])
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    shaped = lambda x: for_bags(ids, torch.tensor(x, dtype=ids.offsets.dtype, device=ids.offsets.device))
    lengths = ids.offsets.diff()
    lengths = lengths.unflatten(0, (len(ids.keys), -1)) if ids.strides is None else lengths
    near = lengths.minimum(shaped([sizes.get(k, ids.capacity) for k in ids.keys]))
    starts = shaped([[starts.get(k, total), total + ones] for k in ids.keys])
    ranges = torch.stack([near, lengths - near], -1)
    starts = starts.expand(ranges.shape).reshape(-1)
    weights = take_ranges(numbers, None, starts, ranges.view(-1), ids.capacity).values
    own = () if ids.weights is None else tuple(k for k in ids.keys if k not in ids.unweighted)
    if ids.weights is not None and own:
        key = bag_ids(ids.offset_per_key, ids.capacity)
        has = torch.tensor([k in own for k in ids.keys] + [False], device=key.device).index_select(0, key)
        weights = weights * torch.where(has, ids.weights, 1).to(weights.dtype)
    return replace(ids, weights=weights, unweighted=tuple(k for k in ids.keys if k not in own and k not in sizes))


def for_bags(ids: KeyedJaggedTensor, x: Tensor) -> Tensor:
    """Return for each bag the row of its key, [F · B, ...]; or [F, 1, ...] to broadcast, if all keys have equally many
    bags."""
    if ids.strides is None:
        return x[:, None]
    return x.repeat_interleave(torch.tensor(ids.strides, device=x.device), 0, output_size=sum(ids.strides))

"""Learned weights for the positions in a bag, for one feature or for some features of a batch.

    weights[offsets[b] + p] = w_p,   0 for p >= max_length

Shapes: N ids, L positions, F features.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from funcrec.core import Count, Problem, check, describe, kind_of, remade, replace, typed, unknown_problems
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, bag_ids, check_ids
from funcrec.nn._layer import Layer, ones

BAGS = kind_of(JaggedTensor)
CALL = "funcrec.nn.position_weights"


@remade
@typed
def position_weights(max_length: Count | Mapping[str, Count]) -> Layer:
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

    Law: a lookup of the result is the lookup of ids whose weights were gathered by hand, on any mesh and under every
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
        check(CALL, BAGS.find("bags", bags), param_problems(params, max_length, "params"))
        place, bag = places(bags.offsets, bags.capacity)
        inside = (bag < bags.num_bags) & (place < max_length)
        return torch.where(inside, params.index_select(0, torch.where(inside, place, 0)), 0)

    return Layer(lambda key: ones(key, (max_length,)), apply)


def weights_of_keys(sizes: Mapping[str, int]) -> Layer:
    def init(key: Tensor) -> dict[str, Tensor]:
        return {k: ones(key, (n,)) for k, n in sizes.items()}

    def apply(params: Mapping[str, Tensor], ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        check_ids(CALL, ids)
        check(CALL, keyed_problems(sizes, params, ids))
        return with_weights(sizes, params, ids) if sizes else ids

    return Layer(init, apply)


def places(offsets: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the position of each value in its bag, and its bag, i64[N]; padding has the number of bags."""
    bag = bag_ids(offsets, capacity)
    return torch.arange(capacity, device=offsets.device) - offsets.index_select(0, bag), bag


def with_weights(sizes: Mapping[str, int], params: Mapping[str, Tensor], ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the ids with the weights of their positions, from one gather for all keys.

    The numbers to gather are all keys' weights, then a 0 for far positions and padding, then a 1 for other keys.
    """
    numbers = torch.cat([params[k] for k in sizes])
    numbers = torch.cat([numbers, numbers.new_tensor([0, 1])])
    zero, starts = sum(sizes.values()), dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    of_key = lambda own: torch.tensor(own, device=ids.offsets.device).index_select(0, key)
    (place, _), key = places(ids.offsets, ids.capacity), bag_ids(ids.offset_per_key, ids.capacity)
    first = of_key([starts.get(k, zero + 1) for k in ids.keys] + [zero])
    size = of_key([sizes.get(k, 0) for k in ids.keys] + [0])
    far = torch.where(first == zero + 1, zero + 1, zero)
    weights = numbers.index_select(0, torch.where(place < size, first + place, far))
    own = () if ids.weights is None else tuple(k for k in ids.keys if k not in ids.unweighted)
    if own:
        has = of_key([k in own for k in ids.keys] + [False])
        weights = weights * torch.where(has, ids.weights, 1).to(weights.dtype)
    return replace(ids, weights=weights, unweighted=tuple(k for k in ids.keys if k not in own and k not in sizes))


# -- validators --------------------------------------------------------------------------------------------------


def param_problems(params: object, size: int, path: str) -> Iterator[Problem]:
    if not isinstance(params, Tensor) or not params.is_floating_point() or params.shape != (size,):
        kind = ValueError if isinstance(params, Tensor) else TypeError
        yield Problem(f"`{path}` are not this layer's.", describe(params), f"f[{size}]", "layer.init(key)", kind)


def keyed_problems(sizes: Mapping[str, int], params: object, ids: KeyedJaggedTensor) -> Iterator[Problem]:
    yield from unknown_problems("`max_length` names keys without ids.", sizes, ids.keys, kind=KeyError)
    if not isinstance(params, Mapping) or set(params) != set(sizes):
        got = f"{list(params)}" if isinstance(params, Mapping) else describe(params)
        need = f"{{key: f[L]}} for {list(sizes)}"
        yield Problem("`params` are not this layer's.", got, need, "layer.init(key)", TypeError)
        return
    for k, n in sizes.items():
        yield from param_problems(params[k], n, f"params[{k!r}]")

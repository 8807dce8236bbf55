"""Weights of some keys only, in one buffer: the places of the other keys are 1, and nothing reads these places."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.core import check, replace
from funcrec.jagged._checks import list_length_problems
from funcrec.jagged._jagged import bag_ids
from funcrec.jagged._lists import flat_list


def given(weights: Any) -> Any:
    """Return {key: weights} without the keys whose weights are None. Any other value is returned as it is."""
    return {k: w for k, w in weights.items() if w is not None} if isinstance(weights, Mapping) else weights


def flat_weights(call: str, lists: Mapping, weights: Mapping) -> Tensor:
    """Return the weights of all bags, f[N], in the dtype of `weights`. Keys that `weights` lacks have weights 1."""
    sizes = {k: sum(map(len, bags)) for k, bags in lists.items()}
    own = [k for k in lists if k in weights]
    check(call, (p for k in own for p in list_length_problems(lists[k], weights[k])))
    flat = flat_list(call, (bag for k in own for bag in weights[k]), "weights", None, torch.float32)[0]
    parts = dict(zip(own, flat.split([sizes[k] for k in own]), strict=True))
    return torch.cat([parts[k] if k in parts else flat.new_ones(size) for k, size in sizes.items()])


def unweighted_places(ids: Any) -> Tensor:
    """Return a mask of the places in a KeyedJaggedTensor's buffer that belong to keys without weights, bool[N]."""
    bare = [k in ids.unweighted for k, n in zip(ids.keys, ids._counts, strict=True) for _ in range(n)]
    bag = bag_ids(ids.offsets, ids.capacity)
    return torch.tensor([*bare, False], device=bag.device)[bag]


def read_alone(ids: Any) -> Any:
    """Return a KeyedJaggedTensor without its padding, and with 1 in the places of weights that nothing reads."""
    tight = ids.unpad()
    return replace(tight, weights=tight.weights.where(~unweighted_places(tight), 1)) if ids.unweighted else tight

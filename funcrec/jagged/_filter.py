"""Bags without some of their values: those outside a mask, or the ids that stand for a missing value.

    kept[b] = the values x of bag b whose mask is true, in order

Shapes: N capacity.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, TypeVar, cast

import torch
from torch import Tensor

from funcrec.core import Form, Problem, check, describe, replace, typed, unknown_problems
from funcrec.jagged._jagged import JaggedTensor, bag_ids
from funcrec.jagged._keyed_jagged import KeyedJaggedTensor
from funcrec.jagged._primitives import kept_places, offsets_of

Bags = TypeVar("Bags", JaggedTensor, KeyedJaggedTensor)
I64 = torch.iinfo(torch.int64)


@typed
def bag_filter(bags: Bags, mask: Annotated[Tensor, Form("b[N]")]) -> Bags:
    """Return the same bags with only the values, and their weights, for which `mask` is true.

    The buffer keeps its length N: the new padding is zero. The mask of the padding is not read.

    Args:
      bags: JaggedTensor or KeyedJaggedTensor, of N values with the padding.
      mask: bool[N], for instance `bags.values != 0`.

    Law: bag_filter(bags, mask)[b].values == bags[b].values[mask of bag b], and it is differentiable in values and
      weights.

    Cost: three passes over the values.

    Example:
      >>> import funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([[3, 8], [5], [9]])
      >>> fr.bag_filter(bags, bags.values > 5).to_lists()
      [[8], [], [9]]

    Source: tf.ragged.boolean_mask.
    """
    check("funcrec.bag_filter", mask_problems(bags, mask))
    source, lengths = kept_places(mask, bags.offsets)
    offsets = offsets_of(lengths.to(bags.offsets.dtype))
    inside = torch.arange(bags.capacity, device=source.device) < offsets[-1]

    def taken(x: Tensor) -> Tensor:
        rows = x.index_select(0, source)
        return torch.where(inside.view(-1, *[1] * (x.dim() - 1)), rows, torch.zeros((), dtype=x.dtype, device=x.device))

    weights = None if bags.weights is None else taken(bags.weights)
    return replace(bags, values=taken(bags.values), offsets=offsets, weights=weights)


@typed
def drop_ids(ids: Bags, padding: int | Mapping[str, int]) -> Bags:
    """Return the same bags without the ids that equal `padding`, which stand for a missing value.

    `lookup` of the result has the semantics of `padding_idx` in torch.nn.EmbeddingBag: such an id adds nothing, does
    not count in a mean, and its row gets no gradient. It is separate from lookups, so it works with every kind of
    tables, hash, placement and kernel. A hash, where a feature has one, comes later: `padding` is the raw id. Sequences
    get shorter by these ids.

    Args:
      ids: JaggedTensor or KeyedJaggedTensor of i32 or i64.
      padding: the id, often 0 or -1; or {key: id} if keys have different ones, or none.

    Example:
      >>> import torch, funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 0], [0, 0]], "user": [[0], [2]]})
      >>> fr.drop_ids(ids, {"clicked": 0}).to_lists()
      {'clicked': [[1], []], 'user': [[0], [2]]}
      >>> mean = fr.FeatureConfig("clicked", table="item", pooling="mean")
      >>> fr.lookup({"item": torch.tensor([[9.0], [4.0]])}, fr.drop_ids(ids, 0), [mean])["clicked"]
      tensor([[4.],
              [0.]])

    Source: `padding_idx` of torch.nn.EmbeddingBag.
    """
    check("funcrec.drop_ids", padding_problems(ids, padding))
    if not isinstance(padding, Mapping) or not isinstance(ids, KeyedJaggedTensor):
        return bag_filter(ids, ids.values.ne(cast(int, padding)))
    if not padding:
        return ids
    key = bag_ids(ids.offset_per_key, ids.capacity)
    of_key = lambda numbers: torch.tensor([*numbers, 0], device=key.device).index_select(0, key)
    own, has = of_key(padding.get(k, 0) for k in ids.keys), of_key(k in padding for k in ids.keys)
    return bag_filter(ids, (ids.values != own) | (has == 0))


# -- validators --------------------------------------------------------------------------------------------------


def mask_problems(bags: JaggedTensor | KeyedJaggedTensor, mask: Tensor) -> Iterator[Problem]:
    if mask.shape[0] != bags.capacity:
        need, hint = f"bool[{bags.capacity}]", "a comparison of `bags.values`, with its padding"
        yield Problem("`mask` does not match the values.", describe(mask), need, hint)
    elif mask.device != bags.values.device:
        yield Problem("`mask` is on another device.", f"{mask.device}", f"{bags.values.device}", "mask.to(device)")


def padding_problems(ids: JaggedTensor | KeyedJaggedTensor, padding: int | Mapping[str, int]) -> Iterator[Problem]:
    if ids.values.dtype not in (torch.int32, torch.int64):
        hint = "fr.bag_filter(bags, bags.values != 0)" if ids.values.is_floating_point() else "ids.values.long()"
        yield Problem("`ids.values` are not ids.", describe(ids.values), "i32[N] or i64[N]", hint, TypeError)
    if isinstance(padding, Mapping) and isinstance(ids, KeyedJaggedTensor):
        yield from unknown_problems("`padding` names unknown keys.", padding, ids.keys, kind=KeyError)
    elif isinstance(padding, Mapping):
        need = "an id for a JaggedTensor, which has no keys"
        yield Problem("`padding` names keys.", describe(padding), need, "padding=0", TypeError)
    numbers = padding.values() if isinstance(padding, Mapping) else [padding]
    if beyond := [n for n in numbers if not I64.min <= n <= I64.max]:
        yield Problem("`padding` is not an id.", f"{beyond}", "integers within i64", "padding=-1")

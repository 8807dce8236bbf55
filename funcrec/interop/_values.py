"""Converts ids and pooled features to values of TorchRec and back. Both values share tensors.

    from_torchrec(to_torchrec(x)) = x without padding,   to_torchrec(from_torchrec(y)) = y

Both libraries keep values, offsets and weights key-major in one buffer. TorchRec differs in three ways. It has no
padding. It may have lengths instead of offsets. It may hold batches of several ranks in one value. Shapes: B bags, N
ids, F keys, E examples.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.core import fail, replace, sure
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, is_concrete, unweighted_places


def from_jagged_tensor(call: str, x: Any) -> JaggedTensor:
    """Return TorchRec's JaggedTensor as a JaggedTensor. Both objects share values and weights."""
    return JaggedTensor.from_offsets(x.values(), offsets_in(call, x), weights=x.weights_or_none())


def to_jagged_tensor(x: JaggedTensor) -> Any:
    from torchrec.sparse import jagged_tensor as theirs

    x = x.unpad()
    return theirs.JaggedTensor(x.values, x.weights, offsets=x.offsets)


def from_keyed_jagged_tensor(call: str, x: Any) -> KeyedJaggedTensor:
    """Return TorchRec's KeyedJaggedTensor, which holds the batch of one rank, as a KeyedJaggedTensor."""
    strides, weights = strides_in(call, x), x.weights_or_none()
    places = [str(i) for i in range(len(x.keys()))]  # a key may occur twice, as after `permute` of both libraries
    ids = KeyedJaggedTensor.from_offsets(places, x.values(), offsets_in(call, x), weights=weights, strides=strides)
    return replace(ids, keys=tuple(x.keys()), inverse=inverse_in(call, x))


def to_keyed_jagged_tensor(x: KeyedJaggedTensor) -> Any:
    from torchrec.sparse import jagged_tensor as theirs

    x, more = x.unpad(), {}
    if x.strides is not None or x.inverse is not None:  # else TorchRec takes the number of examples as that of bags
        more["stride_per_key_per_rank"] = [[x.bags_of(k)] for k in x.keys]
    if x.inverse is not None:
        more["inverse_indices"] = (list(x.keys), x.inverse)
    weights = x.weights if not x.unweighted else torch.where(unweighted_places(x), 1, sure(x.weights))
    return theirs.KeyedJaggedTensor(list(x.keys), x.values, weights, offsets=x.offsets, **more)


def from_keyed_tensor(call: str, x: Any) -> KeyedTensor:
    if x.key_dim() not in (1, -1) or x.values().dim() != 2:
        got = f"key_dim {x.key_dim()} of {x.values().dim()} dimensions"
        fail(call, "`x` has its keys elsewhere than in columns.", got=got, need="values [B, ΣD], key_dim=1",
             hint="TorchRec's KeyedTensor.from_tensor_list(keys, [x[k].flatten(1) for k in keys])")  # fmt: skip
    return KeyedTensor(x.values(), tuple(x.keys()), tuple(x.length_per_key()))


def to_keyed_tensor(x: KeyedTensor) -> Any:
    from torchrec.sparse import jagged_tensor as theirs

    return theirs.KeyedTensor(list(x.keys), list(x.dims), x.values)


# -- what TorchRec's ids hold ------------------------------------------------------------------------------------


def offsets_in(call: str, x: Any) -> Tensor:
    """Return the offsets of x, or offsets made from the lengths of x, i[B + 1].

    `x.offsets()` would store made offsets in x.
    """
    lengths, offsets = x.lengths_or_none(), x.offsets_or_none()
    if offsets is None:
        return KeyedJaggedTensor.from_lengths(("",), x.values(), lengths).offsets
    agree = lengths is None or (
        torch.equal(offsets.diff(), lengths.to(offsets.dtype))
        if is_concrete(lengths) and is_concrete(offsets)
        else offsets.shape[0] == lengths.shape[0] + 1
    )
    if lengths is not None and not agree:  # some operators of TorchRec make views of bags with gaps
        got, need = f"lengths {lengths.tolist()}, offsets {offsets.tolist()}", "lengths == offsets.diff()"
        hint = "KeyedJaggedTensor(keys, values, weights, lengths=lengths), without offsets"
        fail(call, "`x` has lengths that differ from its offsets.", got=got, need=need, hint=hint)
    return offsets


def strides_in(call: str, x: Any) -> tuple[int, ...] | None:
    """Return the number of bags of each key; None if all keys have the same number."""
    per_rank = x.stride_per_key_per_rank() if x.variable_stride_per_key() else None
    if per_rank is None:
        return None
    if any(len(own) != 1 for own in per_rank):
        fail(call, "`x` holds the batches of several ranks.", got=f"strides {per_rank} by key and rank",
             need="the batch of one rank: a stride for each key",
             hint="the value before TorchRec's input exchange; fr.shard_map routes ids itself")  # fmt: skip
    counts = tuple(own[0] for own in per_rank)
    is_plain = x.inverse_indices_or_none() is not None and len(set(counts)) <= 1
    return None if is_plain else counts


def inverse_in(call: str, x: Any) -> Tensor | None:
    """Return the inverse indices in the order of the keys, i[F, E]."""
    pair = x.inverse_indices_or_none()
    if pair is None:
        return None
    names, inverse = pair
    keys = list(x.keys())
    if list(names) == keys:
        return inverse
    if sorted(names) != sorted(keys):
        need = f"a row for each of the keys {keys}"
        fail(call, "`x` has inverse indices of other keys.", got=f"{list(names)}", need=need, hint="x.permute(...)")
    return inverse.index_select(0, torch.tensor([list(names).index(k) for k in keys], device=inverse.device))


FROM = {
    "KeyedJaggedTensor": from_keyed_jagged_tensor,
    "JaggedTensor": from_jagged_tensor,
    "KeyedTensor": from_keyed_tensor,
}
TO = {KeyedJaggedTensor: to_keyed_jagged_tensor, JaggedTensor: to_jagged_tensor, KeyedTensor: to_keyed_tensor}


def is_all(x: Any, kind: type) -> bool:
    return isinstance(x, Mapping) and bool(x) and all(isinstance(v, kind) for v in x.values())

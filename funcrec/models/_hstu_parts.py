"""The parts of the HSTU ranker: vectors of context, history and candidates, and the logits of candidates.

    x_context = W e + b,   x_history = content(e) + action(bits),   x_candidate = content(e) + action(unknown)
    logits = head(norm(y) ⊙ item(e))

Shapes: B bags, N capacity of the history, M capacity of the candidates, A bits of an action, T tasks, D dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec import nn
from funcrec.core import check, random
from funcrec.jagged import JaggedTensor, is_concrete, offsets_of, take_ranges
from funcrec.models._hstu_checks import CALL
from funcrec.models._model import equal_bag_problems, part
from funcrec.nn import HstuLayer, Layer
from funcrec.tables import Batch, FeatureConfig, Params, TableConfig, lookup, lookup_sequence


class Columns(NamedTuple):
    """What the model reads of a batch."""

    tables: tuple[TableConfig, ...]
    context: tuple[FeatureConfig, ...]
    history: tuple[FeatureConfig, ...]
    candidates: tuple[FeatureConfig, ...]
    action: str | None
    time: str | None
    query_time: str | None
    action_weights: tuple[int, ...]


class Layers(NamedTuple):
    """The layers of the model, by the names of their parameters."""

    content: Layer
    item: Layer
    norm: Layer
    head: Layer
    context: list[Layer]
    action: list[Layer]  # one, or none
    hstu: list[HstuLayer]


class Positions(NamedTuple):
    """Vectors x f[N, D] of positions in bags, and their times [N] or None. fits: bool[B], in which bags the columns fit
    each other; None means in all."""

    x: JaggedTensor
    times: Tensor | None
    fits: Tensor | None


def tower(num_in: int, hidden: int, num_out: int, normed: bool = True) -> Layer[Tensor]:
    """Return a layer of linear, swish layer norm, linear and layer norm. Without `normed` there is no layer norm at the
    end."""
    stages = [nn.linear(num_in, hidden), nn.swish_layer_norm(hidden), nn.linear(hidden, num_out)]
    stages += [nn.layer_norm(num_out)] if normed else []

    def init(key: Tensor) -> list:
        return [layer.init(k) for layer, k in zip(stages, random.split(key, len(stages)), strict=True)]

    def apply(params: list[Any], x: Tensor) -> Tensor:
        for layer, own in zip(stages, params, strict=True):
            x = layer.apply(own, x)
        return x

    return Layer(init, apply)


def init_dense(columns: Columns, layers: Layers, action_dim: int, action_std: float, key: Tensor) -> dict[str, Any]:
    keys = random.split(key, 6)
    each = lambda key, own: [x.init(k) for x, k in zip(own, random.split(key, len(own)), strict=True)]
    dense = {
        "content": layers.content.init(keys[0]),
        "item": layers.item.init(keys[1]),
        "head": layers.head.init(keys[2]),
        "norm": layers.norm.init(key),
        "context": each(keys[3], layers.context),
        "hstu": each(keys[4], layers.hstu),
    }
    if columns.action:
        bits, unknown, mlp = random.split(keys[5], 3)
        draw, size = nn.normal(action_std), len(columns.action_weights)
        rows = {"bits": draw(bits, (size, action_dim)), "unknown": draw(unknown, (size * action_dim,))}
        dense["action"] = {**rows, "mlp": layers.action[0].init(mlp)}
    return dense


def vectors(params: Params, batch: Batch, features: Sequence[FeatureConfig]) -> tuple[JaggedTensor, list[Tensor]]:
    """Return the concatenated vectors of sequences f[N, ΣD], zero in the padding, and the offsets of each sequence."""
    found = lookup_sequence(params.tables, batch.ids, features)
    first, *others = (found[f.name] for f in features)
    rows = [first.values, *(in_places(x, first).values for x in others)]
    return JaggedTensor(torch.cat(rows, 1), first.offsets), [first.offsets, *(x.offsets for x in others)]


def in_places(x: JaggedTensor, like: JaggedTensor) -> JaggedTensor:
    """Return the bags of x with the offsets of `like`, so that a bag of another length does not move the bags after
    it."""
    if is_concrete(x.offsets) and is_concrete(like.offsets):
        return x  # `fit` compares them
    return take_ranges(x.values, None, x.offsets[:-1], like.lengths, like.capacity)


def column(batch: Batch, name: str, like: JaggedTensor, most: int | None) -> tuple[Tensor, Tensor]:
    """Return the integers of a column with the offsets of `like`, [N], and the offsets of its bags, cut to `most`
    each."""
    bags = batch.ids[name]
    lengths = bags.lengths if most is None else bags.lengths.clamp(max=most)
    return take_ranges(bags.values, None, bags.offsets[:-1], like.lengths, like.capacity).values, offsets_of(lengths)


def fit(offsets: Sequence[Tensor]) -> Tensor | None:
    """Return in which bags all lengths are equal, bool[B]; None if in all of them, or if there is nothing to compare.
    Raise if the lengths can be read and differ."""
    first, *others = offsets
    if not others:
        return None
    lengths = first.diff()
    fits = torch.stack([lengths == x.diff() for x in others]).all(0)
    if not is_concrete(fits):
        return fits
    check(CALL, equal_bag_problems(bool(fits.all())))
    return None


def context_of(columns: Columns, layers: Layers, params: Params, batch: Batch) -> JaggedTensor | None:
    """Return a bag of one position for each feature of the context, or None."""
    if not columns.context:
        return None
    acts, own = lookup(params.tables, batch.ids, columns.context), part(params.dense, "context")
    rows = [layer.apply(p, acts[f.name]) for layer, p, f in zip(layers.context, own, columns.context, strict=True)]
    count = len(rows)
    offsets = torch.arange(batch.ids.num_bags + 1, device=rows[0].device) * count
    return JaggedTensor(torch.stack(rows, 1).flatten(0, 1), offsets.to(batch.ids.offsets.dtype))


def history_of(columns: Columns, layers: Layers, params: Params, batch: Batch) -> Positions:
    """Return the positions of the history."""
    bags, offsets = vectors(params, batch, columns.history)
    most, x = columns.history[0].max_length, layers.content.apply(part(params.dense, "content"), bags.values)
    if columns.action:
        actions, bounds = column(batch, columns.action, bags, most)
        x = x + action_vectors(columns, layers, part(params.dense, "action"), actions)
        offsets.append(bounds)
    times = None
    if columns.time:
        times, bounds = column(batch, columns.time, bags, most)
        offsets.append(bounds)
    return Positions(JaggedTensor(x, bags.offsets), times, fit(offsets))


def action_vectors(columns: Columns, layers: Layers, own: Mapping, actions: Tensor) -> Tensor:
    """Return the MLP of the embeddings of the bits that are set, f[N, D]."""
    weights = torch.tensor(columns.action_weights, device=actions.device)
    is_set = (actions[:, None] & weights) > 0
    rows = torch.where(is_set[:, :, None], own["bits"], 0).flatten(1)
    return layers.action[0].apply(own["mlp"], rows)


def candidates_of(columns: Columns, layers: Layers, params: Params, batch: Batch) -> tuple[Positions, Tensor]:
    """Return the positions of the candidates, and the vectors f[M, D] that the head multiplies."""
    bags, offsets = vectors(params, batch, columns.candidates)
    x = layers.content.apply(part(params.dense, "content"), bags.values)
    if columns.action:
        own = part(params.dense, "action")
        x = x + layers.action[0].apply(own["mlp"], own["unknown"])
    times = None
    if columns.query_time:
        times = by_bag(batch.ids[columns.query_time].to_padded(1)[:, 0], bags)
    item = layers.item.apply(part(params.dense, "item"), bags.values)
    return Positions(JaggedTensor(x, bags.offsets), times, fit(offsets)), item


def by_bag(x: Tensor, bags: JaggedTensor) -> Tensor:
    """Return x [B] of the bag of each position, [N], 0 in the padding."""
    return torch.cat([x, x.new_zeros(1)]).index_select(0, bags.bag_ids())


def first_times(times: Tensor, bags: JaggedTensor) -> Tensor:
    """Return the time of the first position of each bag, [B], 0 for an empty bag."""
    start = bags.offsets[:-1].long()
    padded = torch.cat([times, times.new_zeros(1)])
    return torch.where(bags.lengths > 0, padded.index_select(0, start), 0)

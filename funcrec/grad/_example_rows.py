"""The stacked row gradients of examples, written out: for each id its example, its row and its gradient.

    entry i: example e, row r of all tables one after the other, s_i · d[e, columns of the id's feature]

Each id is written out once for each feature that reads it, and not once for each table. So the cost follows the ids.
Shapes: B examples, b bags of an example and key, C ids of an example's buffer, G keys, D dim.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.kernels.forms import Feature
from funcrec.tables import Bags, Entries, RowGrads

Reader = tuple[Feature, int, int]  # a feature, the height of its table, and the table's first row


class ExampleRows(NamedTuple):
    """Entries of gradients of dim D: example i[M], row i[M] or -1 for padding, values f[M, D].

    `row` counts the rows of all tables in the order of the gradients: `first_rows`."""

    example: Tensor
    row: Tensor
    values: Tensor


def first_rows(grads: Mapping[str, RowGrads]) -> dict[str, int]:
    """Return the number of each table's first row, if the rows of all tables are counted one after the other."""
    out, first = {}, 0
    for name, g in grads.items():
        out[name], first = first, first + g.num_embeddings
    return out


def written_out(grads: Mapping[str, RowGrads]) -> list[ExampleRows]:
    """Return the entries of stacked gradients, those of each dim together."""
    found: dict[int, list[ExampleRows]] = {}
    for rows in _of_terms(grads):
        found.setdefault(rows.values.shape[1], []).append(rows)
    return [ExampleRows(*(torch.cat(x) for x in zip(*each, strict=True))) for each in found.values()]


def _of_terms(grads: Mapping[str, RowGrads]) -> Iterator[ExampleRows]:
    first = first_rows(grads)
    lookups: dict[tuple, tuple[Bags, list[Reader]]] = {}
    for name, g in grads.items():
        for t in g.terms:
            if isinstance(t, Entries):
                yield _of_entries(t, g, first[name])
                continue
            for f in t.features:
                key = (id(t.d), id(t.rows), id(t.offsets), id(t.weights), g.dim)
                lookups.setdefault(key, (t, []))[1].append((f, g.num_embeddings, first[name]))
    for key, (term, features) in lookups.items():
        for layer in _layers(features):
            yield _of_bags(term, layer, key[4])


def _of_entries(term: Entries, grads: RowGrads, first: int) -> ExampleRows:
    rows = (term.rows if term.count is None else torch.func.vmap(Entries.marked)(term)).long()
    inside = (rows >= 0) & (rows < grads.num_embeddings)
    example = torch.arange(rows.shape[0], device=rows.device)[:, None].expand(rows.shape)
    return ExampleRows(example.flatten(), torch.where(inside, rows + first, -1).flatten(), term.grads.flatten(0, 1))


def _layers(features: list[Reader]) -> list[list[Reader]]:
    """Return the features in groups, in each of which a key has at most one feature."""
    layers: list[list[Reader]] = []
    for reader in features:
        keys = lambda layer: {f.first_bag for f, _, _ in layer}
        free = next((x for x in layers if reader[0].first_bag not in keys(x)), None)
        if free is None:
            layers.append(free := [])
        free.append(reader)
    return layers


def _of_bags(term: Bags, layer: list[Reader], dim: int) -> ExampleRows:
    """Return the entries of one pooled lookup's features, of which each reads another key."""
    count, bags, width = term.d.shape
    size, device = term.rows.shape[1], term.d.device
    offsets = term.offsets.long()
    starts = sorted((f.first_bag, i) for i, (f, _, _) in enumerate(layer))
    place = torch.arange(size, device=device).expand(count, size).contiguous()
    bag = torch.searchsorted(offsets[:, 1:].contiguous(), place, right=True)  # its number among the example's bags
    at = torch.tensor([s for s, _ in starts], device=device)
    which = torch.searchsorted(at, bag, right=True) - 1  # the feature that reads the bag, by its first bag
    own = which.clamp(min=0)
    of = lambda values: torch.tensor([values(layer[i]) for _, i in starts], device=device)[own]
    in_key = bag - at[own]
    inside = (which >= 0) & (in_key < bags) & (bag < offsets.shape[1] - 1)
    start = offsets.gather(1, bag.clamp(max=offsets.shape[1] - 2))
    length = offsets.gather(1, (bag + 1).clamp(max=offsets.shape[1] - 1)) - start
    most = of(lambda x: x[0].max_length)
    inside &= (most == 0) | (place - start < most)
    rows = term.rows.long()
    inside &= (rows >= 0) & (rows < of(lambda x: x[1]))
    read = torch.where(most > 0, torch.minimum(length, most), length).clamp(min=1)
    scale = torch.where(of(lambda x: x[0].mean), 1 / read.to(term.d.dtype), 1)
    if term.weights is not None:
        scale = torch.where(of(lambda x: x[0].weighted), scale * term.weights.to(scale.dtype), scale)
    example = torch.arange(count, device=device)[:, None].expand(count, size)
    first = ((example * bags + torch.where(inside, in_key, 0)) * width + of(lambda x: x[0].column)).flatten()
    index = first[:, None] + torch.arange(dim, device=device)
    values = torch.where(inside.flatten()[:, None], scale.flatten()[:, None] * term.d.flatten()[index], 0)
    return ExampleRows(example.flatten(), torch.where(inside, rows + of(lambda x: x[2]), -1).flatten(), values)

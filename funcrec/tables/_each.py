"""Features with different numbers of bags: groups with one number each, and the expansion of their rows to examples.

    out[e, f] = pooled_f[inverse[f, e]]          d_pooled_f[u] = Σ_{e: inverse[f, e] = u} d_out[e, f]

Shapes: E examples, F features, B_f bags of feature f, D dim.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from funcrec.core import Problem, check, replace, sure
from funcrec.jagged import (
    Columns,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    expand_columns,
    expand_columns_transpose,
    is_concrete,
    take_ranges,
    take_ranges_transpose,
)
from funcrec.tables._configs import FeatureConfig

Features = tuple[FeatureConfig, ...]


def groups_of(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> list[Features]:
    """Return the features, those with one number of bags together, the most bags first.

    Without features, return one empty group.
    """
    if ids.strides is None:
        return [tuple(features)]
    counts, groups = [], []
    for f in features:  # A size that an export leaves open has no hash for a dict.
        count = ids.bags_of(f.key)
        at = next((i for i, n in enumerate(counts) if n == count), len(counts))
        if at == len(counts):
            counts.append(count)
            groups.append([])
        groups[at].append(f)
    order = sorted(range(len(groups)), key=lambda i: -counts[i]) if len(groups) > 1 else range(len(groups))
    return [tuple(groups[i]) for i in order] or [()]


def to_examples(parts: Sequence[KeyedTensor], ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> KeyedTensor:
    """Return the rows of the examples, f[E, ΣD], from the rows f[B_g, ΣD_g] of each group's distinct bags."""
    columns = _columns([list(zip(p.keys, p.dims, strict=True)) for p in parts], features)
    values = expand_columns([p.values for p in parts], columns, _inverse_of(ids, features))
    return KeyedTensor(values, tuple(f.name for f in features), tuple(c.dim for c in columns))


def to_examples_transpose(
    d_acts: KeyedTensor, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], groups: Sequence[Features]
) -> list[KeyedTensor]:
    """Return the cotangents of the groups' rows, added in the order of the examples."""
    dims = dict(zip(d_acts.keys, d_acts.dims, strict=True))
    forms = [[(f.name, dims[f.name]) for f in g] for g in groups]
    shapes = [
        (ids.bags_of(g[0].key) if g else 0, sum(d for _, d in form)) for g, form in zip(groups, forms, strict=True)
    ]
    parts = expand_columns_transpose(d_acts.values, shapes, _columns(forms, features), _inverse_of(ids, features))
    return [
        KeyedTensor(x, tuple(n for n, _ in form), tuple(d for _, d in form))
        for x, form in zip(parts, forms, strict=True)
    ]


def _columns(forms: Sequence[Sequence[tuple[str, int]]], features: Sequence[FeatureConfig]) -> list[Columns]:
    """Return where each feature's columns lie. forms: (name, dim) of the features of each group, in order."""
    found = {}
    for g, form in enumerate(forms):
        firsts = accumulate((dim for _, dim in form), initial=0)
        found |= {name: Columns(g, first, dim) for (name, dim), first in zip(form, firsts, strict=False)}
    return [found[f.name] for f in features]


def _inverse_of(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> Tensor:
    """Return the inverse indices of the features, i[F, E]."""
    keys, inverse = tuple(f.key for f in features), sure(ids.inverse)
    if keys == ids.keys:
        return inverse
    places = [ids.keys.index(k) for k in keys]
    return inverse.index_select(0, torch.tensor(places, dtype=torch.int64, device=inverse.device))


# -- sequences ---------------------------------------------------------------------------------------------------


def sequences_to_examples(
    call: str, rows: Mapping[str, JaggedTensor], ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]
) -> dict[str, JaggedTensor]:
    """Return the sequences of the examples, with the rows f[N, D] of each feature's distinct bags copied to them."""
    out = {}
    for f in features:
        x = rows[f.name]
        inverse = _inverse_of(ids, [f])[0]
        starts, lengths = _ranges(x.offsets, inverse)
        own = take_ranges(x.values, x.weights, starts, lengths, _capacity(call, f, lengths))
        if not is_concrete(inverse):  # what an error says where the indices can be read
            is_bag = ((inverse >= 0) & (inverse < x.offsets.shape[0] - 1)).all()
            wrong = torch.nan if own.values.is_floating_point() else -1  # an id of no row
            own = replace(own, values=torch.where(is_bag, own.values, wrong))
        out[f.name] = own
    return out


def sequence_to_examples_transpose(
    d: Tensor, bags: JaggedTensor, ids: KeyedJaggedTensor, feature: FeatureConfig
) -> Tensor:
    """Return the cotangent f[N, D] of the rows of a feature's distinct bags, added in the order of the examples."""
    starts, lengths = _ranges(bags.offsets, _inverse_of(ids, [feature])[0])
    return take_ranges_transpose(d, starts, lengths, bags.capacity)


def _ranges(offsets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (starts, lengths) of the bag of each example; the bag of an index outside is empty."""
    most = offsets.shape[0] - 1
    inside, at = (inverse >= 0) & (inverse < most), inverse.clamp(0, max(most - 1, 0))
    if not most:
        return inverse.new_zeros(inverse.shape), inverse.new_zeros(inverse.shape)
    return offsets[:-1].index_select(0, at), torch.where(inside, offsets.diff().index_select(0, at), 0)


def _capacity(call: str, feature: FeatureConfig, lengths: Tensor) -> int:
    """Return the ids of all examples: E · L with a `max_length` of L, else their number, read on the host."""
    if feature.max_length is not None:
        return lengths.shape[0] * feature.max_length
    if not is_concrete(lengths):
        hint = "max_length=... in the feature's config; or expand=False, for the rows of the distinct bags"
        what, got = f"the examples of feature {feature.name!r} have an unknown number of ids.", "max_length=None"
        check(call, [Problem(what, got, "a capacity that does not depend on values", hint)])
    return int(lengths.sum())

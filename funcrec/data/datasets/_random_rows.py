"""Generated rows: each row depends on the key and its number, so that data of any size take no memory.

    P(rank k) = k^-alpha / Σ_{j <= V} j^-alpha,   k = 1 .. V        the bounded Zipf distribution
    label ~ Bernoulli(sigmoid(s · (Σ_f mean of effect_f(id) + Σ_j w_j x_j) / √(F + J)))

effect and w are fixed normal numbers, drawn from the key. So a model that embeds the ids can learn them. Shapes: B rows
of a batch, F columns, V ids of a column, L the most ids of a bag, J dense features.

Source: the inverse in the tail follows the midpoint rule, as in Hörmann and Derflinger, "Rejection-inversion to
generate variates from monotone discrete distributions" (1996), without the rejection.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Key,
    Magnitude,
    Problem,
    Shape,
    Size,
    Within,
    absent_problems,
    check,
    pytree,
    random,
    replace,
    typed,
    unknown_problems,
)  # fmt: skip
from funcrec.data.readers._rows import marked, row_problems, there
from funcrec.jagged import KeyedJaggedTensor, offsets_of
from funcrec.tables import (
    Batch,
    FeatureConfig,
    TableConfig,
    feature_list_problems,
    feature_table_problems,
    name_number,
    table_list_problems,
)

# The number of ranks with exact weights. Weights of other ranks have relative errors alpha (alpha + 1) / (24 · 1024²).
HEAD = 1024
LABEL_SCALE = 2.0  # s, which gives logits with standard deviation 2
Counts = Size | tuple[Size, Size]
NumIds = Annotated[int, Within("an int in [1, 2³¹)", lambda n: 1 <= n < 2**31)]
Vocabularies = Annotated[Mapping[str, NumIds], Within("{column: V}", len, "are none")]


class RandomColumn(NamedTuple):
    """A column of bags. Their number is uniform in `fewest` to `most`. Ids are Zipf(alpha) in [0, vocabulary)."""

    name: str
    vocabulary: int
    fewest: int
    most: int
    alpha: float


@pytree(static=("columns", "num_dense", "num_rows", "scatter"))
class RandomRows:
    """A dataset that is a function of its key, as `random_rows` returns it."""

    key: Tensor
    columns: tuple[RandomColumn, ...]
    num_dense: int
    num_rows: int
    scatter: bool

    def take(self, rows: Tensor) -> Batch:
        """Return the batch of row numbers i64[B]. Its shapes depend on B only. Row r is the same in every batch."""
        check("funcrec.data.take", row_problems(rows, self.num_rows, self.key.device))
        batch = generate(self, rows)[0]
        return replace(batch, label=marked(batch.label, there(rows, self.num_rows)[1]))

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits f32[B] from which the labels were drawn. No model can learn better logits."""
        check("funcrec.data.RandomRows.logits", row_problems(rows, self.num_rows, self.key.device))
        return marked(generate(self, rows)[1], there(rows, self.num_rows)[1])

    def __repr__(self) -> str:
        return f"RandomRows({self.num_rows} rows, {len(self.columns)} columns, {self.num_dense} dense features)"


@typed
def random_rows(
    key: Key,
    vocabularies: Vocabularies,
    *,
    num_rows: Count = 2**31,
    ids_per_bag: Counts | Mapping[str, Counts] = 1,
    alpha: Magnitude | Mapping[str, Magnitude] = 0.0,
    num_dense: Size = 0,
    scatter: bool = True,
) -> RandomRows:
    """Return a generated click-through dataset, for benchmarks, tests and trials.

    Args:
      vocabularies: {column: V}, for example `vocabularies_of(tables, features)`.
      ids_per_bag: a number, or a pair (fewest, most) for bags of different lengths. One setting serves all columns, or
        {column: setting} sets each.
      alpha: the Zipf exponent, 0 for uniform ids. One exponent serves all columns, or {column: alpha} sets each.
      num_dense: the number of dense features, which are standard normal.
      scatter: spread the ranks over the ids by a bijection. With False, id k - 1 is the k-th most frequent id.

    Law: row r depends only on the key, on r, and on the names and settings of the columns.

    Example:
      >>> import torch, funcrec as fr
      >>> from funcrec.data import random_rows, take
      >>> data = random_rows(fr.key(0), {"item": 1000, "tags": 50}, ids_per_bag={"item": 1, "tags": (0, 3)}, alpha=1.1)
      >>> batch = take(data, torch.arange(4))
      >>> batch.ids.keys, batch.ids.num_bags, batch.ids.capacity
      (('item', 'tags'), 4, 16)
    """
    call = "funcrec.data.random_rows"
    bags: Mapping[str, Any] = (
        ids_per_bag if isinstance(ids_per_bag, Mapping) else dict.fromkeys(vocabularies, ids_per_bag)
    )
    alphas: Mapping[str, float] = alpha if isinstance(alpha, Mapping) else dict.fromkeys(vocabularies, alpha)
    check(call, *(_setting_problems(n, x, vocabularies) for n, x in (("ids_per_bag", bags), ("alpha", alphas))))
    counts: dict[str, tuple[int, int]] = {n: (c, c) if type(c) is int else c for n, c in bags.items()}
    check(call, _count_problems(counts))
    columns = tuple(RandomColumn(n, v, *counts[n], float(alphas[n])) for n, v in vocabularies.items())
    return RandomRows(key, columns, num_dense, num_rows, scatter)


@typed
def random_batches(key: Key, vocabularies: Mapping[str, Count], batch_size: Count, **settings: Any) -> Iterator[Batch]:
    """Return an endless iterator over batches of `random_rows(key, vocabularies, **settings)`.

    Batch i has rows [i · B, (i + 1) · B).

    Example:
      >>> import funcrec as fr
      >>> from funcrec.data import random_batches
      >>> next(random_batches(fr.key(0), {"item": 100}, 8, num_dense=2)).dense.shape
      torch.Size([8, 2])
    """
    data = random_rows(key, vocabularies, **settings)
    rows = torch.arange(batch_size, device=key.device)
    return (generate(data, rows + i * batch_size)[0] for i in count())


def vocabularies_of(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> dict[str, int]:
    """Return {column: num_embeddings of its table}. If a column feeds several tables, the smallest table counts."""
    check("funcrec.data.vocabularies_of", table_list_problems(tables), feature_list_problems(features))
    check("funcrec.data.vocabularies_of", feature_table_problems(features, tables))
    sizes, out = {t.name: t.num_embeddings for t in tables}, {}
    for f in features:
        out[f.key] = min(out.get(f.key, sizes[f.table]), sizes[f.table])
    return out


@typed
def zipf(key: Key, shape: Shape, size: Count, alpha: Magnitude) -> Tensor:
    """Return random numbers i64[shape] in [0, size): k - 1 has probability proportional to k^-alpha, k = 1 .. size."""
    return zipf_ranks(random.uniform(key, tuple(shape), dtype=torch.float64), size, alpha)


def zipf_ranks(u: Tensor, size: int, alpha: float) -> Tensor:
    """Return the inverse of the distribution function at u, f64 in [0, 1).

    A table holds the first ranks exactly. A formula gives the other ranks."""
    if alpha == 0:
        return (u * size).long().clamp(max=size - 1)
    head = min(size, HEAD)
    cumulative = torch.arange(1, head + 1, dtype=u.dtype, device=u.device).pow(-alpha).cumsum(0)
    first, last = head + 0.5, size + 0.5
    # The midpoint rule: Σ_{head < k <= size} k^-alpha = ∫ x^-alpha dx from head + ½ to size + ½
    if abs(alpha - 1) < 1e-9:
        tail = math.log(last / first)
        invert = lambda mass: first * torch.exp(mass)
    else:
        power = 1 - alpha
        tail = (last**power - first**power) / power
        invert = lambda mass: (first**power + power * mass).pow(1 / power)
    mass = u * (cumulative[-1] + tail)
    in_head = torch.searchsorted(cumulative, mass, right=True)
    beyond = invert((mass - cumulative[-1]).clamp(min=0, max=tail)).round().long() - 1
    return torch.where(in_head < head, in_head, beyond.clamp(min=head, max=size - 1)).clamp(max=size - 1)


def generate(data: RandomRows, rows: Tensor) -> tuple[Batch, Tensor]:
    """Return the batch of `rows` and the logits of its labels."""
    rows, parts = rows.long(), [column_ids(data, c, rows) for c in data.columns]
    score = torch.zeros(rows.shape[0], device=rows.device, dtype=torch.float64)
    for c, (ids, lengths) in zip(data.columns, parts, strict=True):
        effect = normal_of(random.mix(_key(data, c.name, 2) + (ids + 1) * random.GAMMA))
        valid = torch.arange(c.most, device=rows.device) < lengths[:, None]
        score = score + torch.where(valid, effect, 0).sum(1) / lengths.clamp(min=1)
    dense = None
    if data.num_dense:
        at = rows[:, None] * data.num_dense + torch.arange(data.num_dense, device=rows.device)
        x = normal_of(random.mix(_key(data, "dense", 4) + (at + 1) * random.GAMMA))
        score = score + x @ random.normal(_key(data, "dense", 5), (data.num_dense,), dtype=torch.float64)
        dense = x.float()
    logits = score * (LABEL_SCALE / math.sqrt(len(data.columns) + data.num_dense))
    chance = uniform_of(random.mix(_key(data, "label", 6) + (rows + 1) * random.GAMMA))
    label = (chance < logits.sigmoid()).float()
    return Batch(_pack(data.columns, parts), label, cast(Tensor, dense)), logits.float()


def column_ids(data: RandomRows, c: RandomColumn, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ids i64[B, L], lengths i64[B]). The ids of a row from its length on are present but unused."""
    at = rows[:, None] * max(c.most, 1) + torch.arange(c.most, device=rows.device)
    ids = zipf_ranks(uniform_of(random.mix(_key(data, c.name, 0) + (at + 1) * random.GAMMA)), c.vocabulary, c.alpha)
    if data.scatter:
        ids = (ids * coprime(c.vocabulary)) % c.vocabulary
    extra = uniform_of(random.mix(_key(data, c.name, 1) + (rows + 1) * random.GAMMA))
    return ids, c.fewest + (extra * (c.most - c.fewest + 1)).long()


def coprime(size: int) -> int:
    """Return a factor near the golden section of `size` that has no common divisor with `size`.

    So the map x -> factor · x mod size is one to one."""
    factor = max(int(size * 0.6180339887), 1)
    while math.gcd(factor, size) != 1:
        factor += 1
    return factor


def _key(data: RandomRows, name: str, purpose: int) -> Tensor:
    return random.fold_in(data.key, name_number(name) * 8 + purpose)


def uniform_of(bits: Tensor) -> Tensor:
    """Return f64 in [0, 1), from the upper 53 bits of each i64."""
    return random.shift_right(bits, 11).to(torch.float64) * 2.0**-53


def normal_of(bits: Tensor) -> Tensor:
    """Return standard normal numbers f64, from the bits of each i64."""
    return math.sqrt(2) * torch.erfinv((uniform_of(bits) + 2.0**-54) * 2 - 1)


def _pack(columns: tuple[RandomColumn, ...], parts: list[tuple[Tensor, Tensor]]) -> KeyedJaggedTensor:
    """Return the ids of all padded columns in one buffer of capacity B · ΣL."""
    keys = tuple(c.name for c in columns)
    offsets = offsets_of(torch.cat([lengths for _, lengths in parts]))
    flat = torch.cat([ids.flatten() for ids, _ in parts])
    if all(c.fewest == c.most for c in columns):
        return KeyedJaggedTensor(flat, offsets, keys=keys)
    capacity, num_rows = flat.shape[0], parts[0][0].shape[0]
    places = []
    for i, (ids, lengths) in enumerate(parts):
        nth = torch.arange(ids.shape[1], device=ids.device)
        starts = offsets[i * num_rows : (i + 1) * num_rows, None]
        places.append(torch.where(nth < lengths[:, None], starts + nth, capacity).flatten())
    buffer = flat.new_zeros(capacity + 1).scatter(0, torch.cat(places), flat)
    return KeyedJaggedTensor(buffer[:capacity], offsets, keys=keys)


# -- validators --------------------------------------------------------------------------------------------------


def _count_problems(counts: Mapping[str, tuple[int, int]]) -> Iterator[Problem]:
    for name, (fewest, most) in counts.items():
        if not fewest <= most or most < 1:
            need, hint = "0 <= fewest <= most, 1 <= most", "ids_per_bag=(0, 5)"
            yield Problem(f"`ids_per_bag` of {name!r} is not a range.", f"{(fewest, most)}", need, hint)


def _setting_problems(name: str, setting: Mapping, vocabularies: Mapping) -> Iterator[Problem]:
    yield from unknown_problems(f"`{name}` names columns that do not exist.", setting, vocabularies)
    yield from absent_problems(f"`{name}` lacks column {{}}.", setting, vocabularies, "a setting for each column")

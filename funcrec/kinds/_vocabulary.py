"""Vocabularies: which ids have a row of a table now.

    row(id) = 128 · bucket + slot        bucket = ⌊h₃₂ · B / 2³²⌋, h = mix(id), h₃₂ its upper 32 bits

An id has one bucket of 128 rows, and any free slot in it. So a vocabulary needs no list of free rows, a shard is a
range of buckets, and growth splits each bucket. `mix` is a bijection of 64 bits. Time is the number of the step.
Shapes: N ids, R rows, B = R / 128 buckets.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, overload

import torch
from torch import Tensor

from funcrec.core import (
    GAMMA,
    Count,
    Device,
    Form,
    Movable,
    Problem,
    Size,
    check,
    describe,
    pytree,
    random,
    replace,
    typed,
)
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.kernels.vocabulary import DISTANCE_LFU, LFU, LRU, SLOTS

POLICIES: dict[Any, int] = {"lru": LRU, "lfu": LFU, "distance_lfu": DISTANCE_LFU}
MOST_ROWS, MOST_COUNT = 2**37, 255  # the most rows, and the most that the sketch can count
Policy = Literal["lru", "lfu", "distance_lfu"] | Callable[..., Any]
Ids = Annotated[Tensor, Form("i[N]")] | JaggedTensor | KeyedJaggedTensor


@pytree(static=("policy", "ttl", "admit", "unknown", "seed"), optional=("sketch",))
class Vocabulary(Movable):
    """The ids that have a row of a table, when each was last seen, and how often. `vocabulary` returns an empty one.

    Args:
      tags: u8[R], 0 for a free row, else 8 bits of the id's hash.
      entries: i64[R, 2], the id, and stamp · 2³² + count.
      now: i64[], the number of the last step.
      sketch: u8[R], counts of ids without a row, or None.
      policy, ttl, admit, unknown, seed: as in `vocabulary`.

    Example:
      >>> import torch, funcrec as fr
      >>> users = fr.vocabulary(200, unknown=1)
      >>> users, users.num_embeddings
      (Vocabulary(256 rows, policy='lru', unknown=1), 257)
      >>> users, rows, turnover = fr.admit(users, torch.tensor([7, -9, 7]))
      >>> bool(rows[0] == rows[2]), int(users.num_ids)
      (True, 2)
    """

    tags: Tensor
    entries: Tensor
    now: Tensor
    sketch: Tensor | None
    policy: Policy
    ttl: int | None
    admit: int | float | None
    unknown: str | int
    seed: int

    @property
    def capacity(self) -> int:
        """Return R, the number of rows for ids."""
        return self.tags.shape[-1]

    @property
    def num_shared(self) -> int:
        """Return the number of rows that unknown ids share."""
        return self.unknown if isinstance(self.unknown, int) else 0

    @property
    def num_embeddings(self) -> int:
        """Return the number of rows that a table of this vocabulary needs: R, and the rows of unknown ids."""
        return self.capacity + self.num_shared

    @property
    def num_ids(self) -> Tensor:
        """Return the number of ids that have a row -> i64[]."""
        return (self.tags != 0).sum(-1)

    @property
    def salt(self) -> int:
        """Return the number that ids are combined with before they are hashed."""
        return random.wrap(self.seed * GAMMA)

    def __repr__(self) -> str:
        told = {"ttl": None, "admit": None, "unknown": "zeros", "seed": 0}
        more = [f"{n}={getattr(self, n)!r}" for n, usual in told.items() if getattr(self, n) != usual]
        return f"Vocabulary({', '.join([f'{self.capacity} rows', f'policy={self.policy!r}', *more])})"


@typed
def vocabulary(
    capacity: Count,
    *,
    policy: Policy = "lru",
    ttl: Count | None = None,
    admit: int | float | None = None,
    unknown: Literal["zeros"] | Count = "zeros",
    seed: Size = 0,
    device: Device | None = None,
) -> Vocabulary:
    """Return an empty vocabulary of at least `capacity` rows, a multiple of 128.

    A row takes 17 bytes, or 18 if misses are counted. Choose a capacity a quarter above the number of ids in use at
    once. If 80 % of the rows are in use, one id in 5,000 finds its bucket full; at 90 % it is one in 200.

    Args:
      policy: which id leaves a full bucket. "lru": the one that was not seen for longest. "lfu": the one that was seen
        least. "distance_lfu": the one with the least count / (age + 1). With "lfu" and "distance_lfu" a new id must
        have a greater value than that id; otherwise it gets no row. A function of (ages, counts) of all rows, two
        tensors of integers, returns a score for each row, and the least leaves. It reads the whole vocabulary in each
        step, and `save` refuses it, because a checkpoint holds no code. Ties go to the oldest, then the first.
      ttl: an id that was not seen for more than `ttl` steps leaves before all others. `expire` removes such ids.
      admit: which new ids get a row. None: all. An int k <= 255 admits ids that were missed k times recently. A sketch
        counts the misses: 128 counters for each bucket, two for an id, halved from time to time. Collisions may admit
        an id early, never late within a window. A float p admits an id with probability p in each step in which it
        occurs; the draw depends on seed, id and step.
      unknown: "zeros": ids without a row have row -1, which lookups read as zeros. An int n: they share n further rows
        of the table, from R on.
      seed: another seed puts ids into other buckets, and makes other draws.

    Raises:
      TypeError, ValueError: a setting is unknown or out of its range.

    Example:
      >>> import funcrec as fr
      >>> fr.vocabulary(1000, policy="lfu", ttl=500, admit=2)
      Vocabulary(1024 rows, policy='lfu', ttl=500, admit=2)

    Source: TorchRec's managed collision modules; HierarchicalKV (arXiv:2603.17168) for buckets of 128 slots with tags;
      TinyLFU (arXiv:1512.00727), section 3.4, for the sketch that halves.
    """
    check("funcrec.vocabulary", setting_problems(capacity, ttl, admit, unknown))
    num_rows = -(-capacity // SLOTS) * SLOTS
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype, device=device)
    bytes_of = lambda: zeros(num_rows, dtype=torch.uint8)
    sketch = bytes_of() if least_of(admit) else None
    return Vocabulary(bytes_of(), zeros(num_rows, 2), zeros(), sketch, policy, ttl, admit, unknown, seed)


@overload
def find(vocabulary: Vocabulary, ids: Tensor) -> Tensor: ...
@overload
def find(vocabulary: Vocabulary, ids: JaggedTensor) -> JaggedTensor: ...
@overload
def find(vocabulary: Vocabulary, ids: KeyedJaggedTensor) -> KeyedJaggedTensor: ...
@typed
def find(vocabulary: Vocabulary, ids: Ids) -> Tensor | JaggedTensor | KeyedJaggedTensor:
    """Return the row of each id, i64[N], or the bags with rows in place of ids. The vocabulary does not change.

    Args:
      ids: i32 or i64[N], or bags of ids. Any number is an id, negative ones too. The padding of bags is not read.

    Returns:
      the rows, in [0, R). An id without a row has row -1, or one of the shared rows from R on, chosen by its hash.

    Raises:
      TypeError, ValueError: the ids are not integers, or the vocabulary's tensors do not fit each other.

    Law: two ids never have the same row below R. find(v, ids) == the rows of admit(v, ids), for ids that v holds.

    Cost: two cache lines of memory for each id.

    Example:
      >>> import torch, funcrec as fr
      >>> items, rows, _ = fr.admit(fr.vocabulary(128), torch.tensor([10**15, 4]))
      >>> bool((fr.find(items, torch.tensor([10**15, 4])) == rows).all()), fr.find(items, torch.tensor([5]))
      (True, tensor([-1]))
    """
    check("funcrec.find", vocabulary_problems(vocabulary), id_problems(ids, vocabulary))
    values, valid = flat_ids(ids)
    how = vocabulary.num_shared, vocabulary.salt
    implementation = ops.available("find_ids", values.device)
    rows = ops.find_ids(vocabulary.tags, vocabulary.entries, values, valid, *how, implementation=implementation)
    return as_bags(ids, rows)


def flat_ids(ids: Tensor | JaggedTensor | KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
    """Return the ids i[N], and how many of them are not padding, i64[]."""
    if isinstance(ids, Tensor):
        return ids, torch.full((), ids.shape[0], dtype=torch.int64, device=ids.device)
    return ids.values, ids.offsets[-1].to(torch.int64)


def as_bags(ids: Tensor | JaggedTensor | KeyedJaggedTensor, rows: Tensor) -> Tensor | JaggedTensor | KeyedJaggedTensor:
    return rows if isinstance(ids, Tensor) else replace(ids, values=rows)


def least_of(admit: int | float | None) -> int:
    """Return how often an id must have been missed before it is admitted, or 0 if misses are not counted."""
    return admit if isinstance(admit, int) and admit > 1 else 0


# -- validators --------------------------------------------------------------------------------------------------


def setting_problems(capacity: int, ttl: int | None, admit: object, unknown: object) -> Iterator[Problem]:
    if capacity > MOST_ROWS:
        yield Problem("`capacity` is too large.", f"{capacity}", f"at most {MOST_ROWS}", "several vocabularies")
    if ttl is not None and ttl >= 2**32:
        need, hint = "fewer than 2³² steps: ages are exact below that", "a clock with longer steps"
        yield Problem("`ttl` is too large.", f"{ttl}", need, hint)
    if isinstance(unknown, int) and unknown >= 2**31:
        yield Problem("`unknown` is too large.", f"{unknown}", "fewer than 2³¹ shared rows", "unknown=1")
    if isinstance(admit, bool):
        yield Problem("`admit` is a bool.", f"{admit}", "None, an int or a float", "admit=None, for all ids", TypeError)
    elif isinstance(admit, int) and not 1 <= admit <= MOST_COUNT:
        yield Problem("`admit` is out of range.", f"{admit}", f"a count in [1, {MOST_COUNT}]", "admit=2")
    elif isinstance(admit, float) and not 0 <= admit <= 1:
        yield Problem("`admit` is out of range.", f"{admit}", "a probability in [0, 1]", "admit=0.1")


def vocabulary_problems(vocabulary: Vocabulary) -> Iterator[Problem]:
    tags, rest = vocabulary.tags, {"entries": (2,), "sketch": ()}
    good = isinstance(tags, Tensor) and tags.dtype == torch.uint8 and tags.dim() == 1
    if not good or not tags.shape[0] or tags.shape[0] % SLOTS:
        need = f"u8[R], R a multiple of {SLOTS} and not 0"
        yield Problem(
            "`vocabulary.tags` are not those of a vocabulary.", describe(tags), need, "fr.vocabulary(capacity)"
        )
        return
    for name, more in rest.items():
        x, dtype = getattr(vocabulary, name), torch.uint8 if name == "sketch" else torch.int64
        if name == "sketch" and x is None and not least_of(vocabulary.admit):
            continue
        if not isinstance(x, Tensor) or x.dtype != dtype or x.shape != (*tags.shape, *more) or x.device != tags.device:
            got, need = f"{describe(x)}; tags are {describe(tags)}", f"{dtype}{[tags.shape[0], *more]} beside `tags`"
            yield Problem(f"`vocabulary.{name}` does not fit `tags`.", got, need, "fr.vocabulary(capacity)")
    now = vocabulary.now
    if not isinstance(now, Tensor) or now.dtype != torch.int64 or now.dim():
        yield Problem("`vocabulary.now` is not a step.", describe(now), "i64[]", "fr.vocabulary(capacity)")


def id_problems(ids: Tensor | JaggedTensor | KeyedJaggedTensor, vocabulary: Vocabulary) -> Iterator[Problem]:
    values, name = (ids, "ids") if isinstance(ids, Tensor) else (ids.values, "ids.values")
    if not isinstance(values, Tensor) or values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        hint = "ids.long(); for strings, fr.data.hash_keys(column)"
        yield Problem(f"`{name}` are not ids.", describe(values), "i32 or i64[N]", hint, TypeError)
    elif isinstance(vocabulary.tags, Tensor) and values.device != vocabulary.tags.device:
        got = f"{values.device} and {vocabulary.tags.device}"
        yield Problem(f"`{name}` lie on another device.", got, "that of the vocabulary", "ids.to(device)")

"""Admit new ids to a vocabulary, and remove old ones.

    vocabulary', rows, turnover = admit(vocabulary, ids)

The result is a function of the step's multiset of ids. It does not depend on their order, on threads or on ranks.
Shapes: N ids, R rows, M places of a turnover.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import Form, Movable, Problem, Size, check, describe, own_errors, pytree, replace, sure, typed
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.kernels.reference_vocabulary import LOWER, halves
from funcrec.kernels.vocabulary import EVERYONE, SCORED
from funcrec.kinds._vocabulary import (
    POLICIES,
    Ids,
    Vocabulary,
    as_bags,
    flat_ids,
    id_problems,
    least_of,
    vocabulary_problems,
)


@pytree
class Turnover(Movable):
    """What a step changed in a vocabulary: which rows passed to which ids. Only the first `count` places are used.

    Args:
      rows: i64[M], rows whose id changed; -1 from `count` on.
      new_ids: i64[M], the row's new id, where `admitted` is true.
      old_ids: i64[M], the id that had the row before, where `evicted` is true.
      admitted: b[M], whether the row has a new id.
      evicted: b[M], whether an id had the row before.
      count: i64[], the number of changed rows.
      hits: i64[], how many distinct ids of the step had a row.
      refused: i64[], how many distinct ids of the step got no row.

    Law: hits + admitted.sum() + refused is the number of distinct ids of the step. Turnovers replayed in order, from an
      empty vocabulary, give the row of each id.

    Example:
      >>> import torch, funcrec as fr
      >>> _, rows, turnover = fr.admit(fr.vocabulary(128), torch.tensor([3, 3, 5]))
      >>> int(turnover.count), turnover.admitted, sorted(turnover.new_ids[:2].tolist())
      (2, tensor([ True,  True, False]), [3, 5])
    """

    rows: Tensor
    new_ids: Tensor
    old_ids: Tensor
    admitted: Tensor
    evicted: Tensor
    count: Tensor
    hits: Tensor
    refused: Tensor


@typed
def admit(
    vocabulary: Vocabulary, ids: Ids, *, now: Size | Annotated[Tensor, Form("i64[]")] | None = None
) -> tuple[Vocabulary, Tensor | JaggedTensor | KeyedJaggedTensor, Turnover]:
    """Return the vocabulary after a step with these ids, the row of each id, and what changed.

    Ids that have a row keep it: their stamp becomes `now`, and their count rises by the number of their occurrences. Of
    the other ids, those that pass `admit` are candidates. In each bucket the candidates with the most occurrences come
    first. They take free slots, then slots of ids older than `ttl`, then slots by the policy. A row that this step
    reads is never taken. A candidate that finds no slot is refused, and has the row of an unknown id.

    Args:
      ids: i32 or i64[N], or bags of ids, as in `find`.
      now: the number of this step, or any clock of whole numbers. None means one more than the last. The clock does not
        go back: a lower number counts as the last one. Ages are exact below 2³².

    Returns:
      the new vocabulary; the rows, in the form of `ids`; and a Turnover with N places. A new row holds the numbers of
      the id that had it before: pass the turnover to `renew` before a lookup.

    Raises:
      TypeError, ValueError: the ids are not integers, or the vocabulary's tensors do not fit each other.

    Law: a permutation of the ids gives the same vocabulary and turnover, and permuted rows. An id keeps its row until
      it is evicted. If no bucket ever has more than 128 ids, none is evicted.

    Cost: two cache lines of memory for each id; and 2 KB for each bucket that has new ids and no free slot. `fr.jit`
      with the vocabulary donated writes in place. Otherwise the vocabulary is copied.

    Example:
      >>> import torch, funcrec as fr
      >>> users = fr.vocabulary(128)
      >>> users, rows, turnover = fr.admit(users, torch.tensor([900, 17, 900]))
      >>> users, again, turnover = fr.admit(users, torch.tensor([17, 900]))
      >>> bool(rows[0] == again[1]), int(turnover.hits), int(turnover.count)
      (True, 2, 0)
    """
    choice = choose(vocabulary, ids, now)
    return settled(vocabulary, choice), as_bags(ids, choice.rows), turnover_of(choice)


@pytree
class Choice:
    """What a step with some ids changes in a vocabulary, before it is written.

    The fields are those that `admit_ids` of `funcrec.kernels.ops` returns for the ids i[N]; step: i64[].
    """

    step: Tensor
    ids: Tensor
    rows: Tensor
    changed: Tensor
    new_ids: Tensor
    old_ids: Tensor
    evicted: Tensor
    counts: Tensor
    missed: Tensor
    numbers: Tensor


def choose(vocabulary: Vocabulary, ids: Ids, now: int | Tensor | None = None) -> Choice:
    """Return what `admit` would change. The vocabulary stays as it is, and is not copied."""
    check("funcrec.admit", vocabulary_problems(vocabulary), id_problems(ids, vocabulary), clock_problems(now))
    values, valid = flat_ids(ids)
    step = vocabulary.now + 1 if now is None else torch.maximum(vocabulary.now, as_step(now, vocabulary.now))
    given, scores = state_of(vocabulary), scores_of(vocabulary, step)
    least, salt, policy = least_of(vocabulary.admit), vocabulary.salt, POLICIES.get(vocabulary.policy, SCORED)
    share = int(vocabulary.admit * EVERYONE) if isinstance(vocabulary.admit, float) else EVERYONE
    how = policy, vocabulary.ttl or 0, least, share, vocabulary.num_shared, salt
    choice = ops.available("admit_ids", values.device)
    return Choice(step, values, *ops.admit_ids(given, step, values, valid, scores, *how, implementation=choice))


def settled(vocabulary: Vocabulary, choice: Choice) -> Vocabulary:
    """Return the vocabulary after the step of a choice."""
    implementation = ops.available("settle_ids", choice.ids.device)
    after = ops.settle_ids(state_of(vocabulary), *settling(vocabulary, choice), implementation=implementation)
    return with_state(vocabulary, after, choice.step)


def settle(vocabulary: Vocabulary, choice: Choice) -> Vocabulary:
    """Return the vocabulary after the step of a choice, in the memory of `vocabulary`, which nobody else may read."""
    ops.settle_ids_(state_of(vocabulary), *settling(vocabulary, choice))
    return replace(vocabulary, now=choice.step)


def settling(vocabulary: Vocabulary, c: Choice) -> tuple:
    """Return the arguments of `settle_ids` besides the state."""
    of_choice = c.step, c.ids, c.rows, c.missed, c.changed, c.new_ids, c.counts, c.numbers
    return *of_choice, least_of(vocabulary.admit), vocabulary.salt


def turnover_of(choice: Choice) -> Turnover:
    admitted = torch.arange(choice.changed.shape[0], device=choice.changed.device) < choice.numbers[0]
    of_rows = choice.changed, choice.new_ids, choice.old_ids, admitted, choice.evicted
    return Turnover(*of_rows, choice.numbers[0], choice.numbers[2], choice.numbers[3])


@typed
def expire(vocabulary: Vocabulary) -> tuple[Vocabulary, Turnover]:
    """Return the vocabulary without the ids that were not seen for more than `ttl` steps, and their rows.

    Raises:
      ValueError: the vocabulary has no `ttl`.

    Returns:
      the new vocabulary, and a Turnover with R places, in which no row has a new id.

    Law: an id stays if now - (the step in which it was last seen) <= ttl.

    Cost: it reads the whole vocabulary.

    Example:
      >>> import torch, funcrec as fr
      >>> users, _, _ = fr.admit(fr.vocabulary(128, ttl=10), torch.tensor([4, 5]))
      >>> users, _, _ = fr.admit(users, torch.tensor([5]), now=12)
      >>> users, turnover = fr.expire(users)
      >>> int(users.num_ids), turnover.old_ids[turnover.evicted]
      (1, tensor([4]))
    """
    check("funcrec.expire", vocabulary_problems(vocabulary), ttl_problems(vocabulary))
    tags, entries = vocabulary.tags, vocabulary.entries
    age = (vocabulary.now - halves(entries[:, 1])[0]) & LOWER
    gone = (tags != 0) & (age > sure(vocabulary.ttl))
    order = (~gone).to(torch.uint8).argsort(dim=0, stable=True)
    evicted, none = gone[order], torch.zeros((), dtype=torch.int64, device=tags.device)
    rows, old_ids = torch.where(evicted, order, -1), torch.where(evicted, entries[:, 0][order], 0)
    blank = torch.zeros_like(old_ids)
    turnover = Turnover(rows, blank, old_ids, torch.zeros_like(evicted), evicted, gone.sum(), none, none)
    tags, entries = torch.where(gone, 0, tags).to(torch.uint8), torch.where(gone[:, None], 0, entries)
    return replace(vocabulary, tags=tags, entries=entries), turnover


def state_of(vocabulary: Vocabulary) -> list[Tensor]:
    """Return the tensors that a step writes to."""
    given = [vocabulary.tags, vocabulary.entries]
    return given if vocabulary.sketch is None else [*given, vocabulary.sketch]


def with_state(vocabulary: Vocabulary, state: list[Tensor], now: Tensor) -> Vocabulary:
    return replace(vocabulary, **dict(zip(("tags", "entries", "sketch"), state, strict=False)), now=now)


def as_step(now: int | Tensor, like: Tensor) -> Tensor:
    return now if isinstance(now, Tensor) else torch.full_like(like, now)


def scores_of(vocabulary: Vocabulary, now: Tensor) -> Tensor | None:
    """Return the scores of all rows by a policy that is a function, i64[R], or None for the other policies."""
    if not callable(vocabulary.policy):
        return None
    stamp, count = halves(vocabulary.entries[:, 1])
    return scores_at(vocabulary.policy, (now - stamp) & LOWER, count)


def scores_at(policy: Callable, age: Tensor, count: Tensor) -> Tensor:
    """Return the numbers of a function of ages and counts, as i64 in the same order; NaN is the least."""
    with own_errors("funcrec.admit", "policy", age, count, need="(age i64[R], count i64[R]) -> numbers [R]"):
        x = policy(age, count)
    check("funcrec.admit", score_problems(x, age))
    if not x.is_floating_point():
        return x.to(torch.int64)
    bits = (x.detach().double() + 0.0).view(torch.int64)  # + 0.0 makes -0.0 equal to 0.0
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.where(x.isnan(), least, torch.where(bits < 0, bits ^ most, bits))


# -- validators --------------------------------------------------------------------------------------------------


def clock_problems(now: int | Tensor | None) -> Iterator[Problem]:
    if isinstance(now, int) and now >= 2**63:
        yield Problem("`now` is too large.", f"{now}", "a number of 64 bits, below 2⁶³", "now=None, which counts steps")


def ttl_problems(vocabulary: Vocabulary) -> Iterator[Problem]:
    if vocabulary.ttl is None:
        yield Problem("`vocabulary` has no ttl.", f"{vocabulary!r}", "an age after which an id leaves",
                      "fr.vocabulary(capacity, ttl=1000)")  # fmt: skip


def score_problems(x: Any, age: Tensor) -> Iterator[Problem]:
    is_real = isinstance(x, Tensor) and not x.is_complex() and x.dtype != torch.bool
    if not is_real or x.shape != age.shape or x.device != age.device:
        need, hint = f"numbers {list(age.shape)}, a score for each row", "policy=lambda age, count: count - age"
        yield Problem("`policy` returns no score for each row.", describe(x), need, hint, TypeError)

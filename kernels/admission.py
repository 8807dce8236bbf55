"""The contracts of the operations on vocabularies, as in `ops`. reference_vocabulary.py describes tags and entries.

Shapes: N ids, R rows, V vocabularies, P places of their changes.
"""

from collections.abc import Sequence
from typing import Any

from funcrec.kernels.choice import available, has, operation
from funcrec.kernels.forms import flatten
from funcrec.kernels.vocabulary import Admission, Column
from torch import Tensor


def find_ids(
    tags: Tensor, entries: Tensor, ids: Tensor, valid: Tensor, shared: int, salt: int, *, implementation: Any = None
) -> Tensor:
    """Return the row of each id of i[N] in a vocabulary, i64[N].

    An unknown id has one of `shared` rows from R on, or -1 if `shared` is 0. Ids from `valid` (i64[]) on are not read
    and have row -1. R is a multiple of 128, and not 0.
    """
    return operation("find_ids", implementation, tags, bare=[entries, ids, valid])(
        tags, entries, ids, valid, shared, salt
    )


def admit_ids(state: Sequence[Tensor], *rest: Any, implementation: str | None = None) -> tuple[Tensor, ...]:
    """Return what a step's ids change in a vocabulary. The result depends on the multiset of valid ids alone.

    Args:
      state: tags u8[R], entries i64[R, 2] and, if `least` is not 0, sketch u8[R].
      rest: now (i64[], the step), ids (i[N]), valid (i64[]), scores (i64[R] for policy SCORED, else None), policy, ttl
        (0 for none), least (of the sketch's count, 0 for none), share (of 2⁵³ draws that admit), shared (as
        `vocabulary.shared_of` has it; then no id is of another part), salt.

    Returns:
      rows i64[N] of the ids, after admission, as from `find_ids`; changed i64[N], the rows of admitted ids by
        descending frequency in each bucket, then -1; their new_ids i64[N], the old_ids i64[N] that they evict, evicted
        b[N], and counts i64[N] from which theirs begin; missed b[N], whether an id had no row before; numbers i64[4]:
        distinct ids admitted, evicted, found, refused.
    """
    return operation("admit_ids", implementation, state[0])(list(state), *rest)


def settle_ids_(state: Sequence[Tensor], *rest: Any) -> None:
    """Write what `settle_ids` returns to the state itself."""
    choice = available("settle_ids_", state[0].device)
    if has("settle_ids_", choice):
        operation("settle_ids_", choice, state[0])(list(state), *rest)
    else:
        for x, new in zip(state, settle_ids(state, *rest, implementation="reference"), strict=True):
            x.copy_(new)


def settle_ids(state: Sequence[Tensor], *rest: Any, implementation: str | None = None) -> list[Tensor]:
    """Return the state after admission: new ids written, and each seen row with stamp `now` and its count raised.

    Args:
      rest: now, ids, the rows, missed, changed, new_ids, counts and numbers of `admit_ids`, least, salt.
    """
    return operation("settle_ids", implementation, state[0])(list(state), *rest)


def find_columns(
    state: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    how: Sequence[tuple[int, int]],
    columns: Sequence[Column],
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the ids i[N] of a buffer with rows in place of the ids of `columns`, i64[N], as by `find_ids` on each.

    Args:
      state: tags and entries of each vocabulary. how: (shared, salt) of each; `shared` as in `vocabulary.shared_of`.
      columns: no two have the same bag.
    """
    call = operation("find_columns", implementation, state[0], bare=[*state[1:], ids, offsets])
    return call(list(state), ids, offsets, flatten(how), flatten(columns))


def admit_columns(
    state: Sequence[Tensor],
    scores: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor],
    how: Sequence[Admission],
    columns: Sequence[Column],
    *,
    implementation: str | None = None,
) -> tuple[Tensor, ...]:
    """Return what a step's ids change in several vocabularies: `admit_ids` of each at the step `now + 1`.

    Args:
      state: tags, entries, now and, if `least` is not 0, a sketch of each vocabulary.
      scores: those of the vocabularies whose policy is SCORED, in order.
      ids, offsets: i[N_k] and i[B_k + 1] of each buffer. columns: no two have the same bag.

    Returns:
      rows i64[N] and missed b[N] of the ids of all buffers, end to end; -1 and False outside the columns. changed,
        new_ids, counts i64[P], one vocabulary after the other; each has `vocabulary.places_of` places. numbers
        i64[V, 4].
    """
    call = operation("admit_columns", implementation, state[0])
    return call(list(state), list(scores), list(ids), list(offsets), flatten(how), flatten(columns))


def settle_columns(
    state: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor],
    found: Sequence[Tensor],
    how: Sequence[Admission],
    columns: Sequence[Column],
    *,
    implementation: str | None = None,
) -> list[Tensor]:
    """Return the state after an admission. found: what `admit_columns` returned; the other arguments are the same."""
    call = operation("settle_columns", implementation, state[0])
    return call(list(state), list(ids), list(offsets), list(found), flatten(how), flatten(columns))

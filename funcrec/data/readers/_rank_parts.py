"""The parts of a source that one rank reads: no part is read twice, and none is left out.

    parts = own(0) + own(1) + ... + own(n - 1)

Large parts are given first, each to the rank that has the fewest rows, so ranks differ by one part at most.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from funcrec.core import Count, Problem, Size, check
from funcrec.data.readers._sources import Source

RankOf = tuple[Size, Count] | None  # (rank, number of ranks)


class Share(NamedTuple):
    """One rank's part of a source. num_batches: the batches that every rank takes in an epoch."""

    source: Source
    num_batches: int


def split_parts(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of each rank's parts, ascending."""
    own: list[list[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = min(range(ranks), key=lambda r: rows[r])
        own[rank].append(i)
        rows[rank] += sizes[i]
    return [sorted(x) for x in own]


def source_of(call: str, source: Source, rank_of: RankOf) -> Source:
    """Return the source with the parts of one rank."""
    if rank_of is None:
        return source
    check(call, rank_problems(rank_of), count_problems(source))
    rank, ranks = rank_of
    sizes = [part.num_rows or 0 for part in source.parts]
    own = split_parts(sizes, ranks)
    check(call, empty_problems(source, sizes, own))
    return source._replace(parts=[source.parts[i] for i in own[rank]])


def share_of(call: str, source: Source, rank_of: RankOf, batch_size: int, drop_last: bool) -> Share | None:
    """Return one rank's part of the source, of which every rank takes as many batches; None without ranks."""
    if rank_of is None:
        return None
    own = source_of(call, source, rank_of)
    sizes = [part.num_rows or 0 for part in source.parts]
    rows = [sum(sizes[i] for i in x) for x in split_parts(sizes, rank_of[1])]
    check(call, short_problems(source, rows, batch_size if drop_last else 1))
    return Share(own, min(rows) // batch_size if drop_last else -(-max(rows) // batch_size))


# -- validators --------------------------------------------------------------------------------------------------


def rank_problems(rank_of: tuple[int, int]) -> Iterator[Problem]:
    rank, ranks = rank_of
    if rank >= ranks:
        yield Problem("`rank_of` is not a rank.", f"rank {rank} of {ranks}", f"0 <= rank < {ranks}", "rank_of=(0, 2)")


def last_batch_problems(rank_of: RankOf, drop_last: bool, pad_last: bool) -> Iterator[Problem]:
    """Report ranks that would take different numbers of steps, and so wait for each other for ever."""
    if rank_of is not None and not drop_last and not pad_last:
        need, hint = "as many batches on every rank", "pad_last=True, or drop_last=True"
        yield Problem("`rank_of` requires whole batches.", "drop_last=False, pad_last=False", need, hint)


def count_problems(source: Source) -> Iterator[Problem]:
    if any(part.num_rows is None for part in source.parts):
        need, hint = "row groups of Parquet, or a table, whose rows are counted", "the data as Parquet"
        yield Problem("`rank_of` requires parts whose rows are known.", f"{source.name}, of text", need, hint)


def empty_problems(source: Source, sizes: Sequence[int], own: Sequence[Sequence[int]]) -> Iterator[Problem]:
    if empty := [rank for rank, x in enumerate(own) if not sum(sizes[i] for i in x)]:
        got = f"{sum(n > 0 for n in sizes)} parts with rows, and none for ranks {empty[:8]}"
        hint = "fewer ranks, or smaller row groups: pyarrow.parquet.write_table(..., row_group_size=...)"
        yield Problem(f"{source.name} has no rows for some ranks.", got, f"a part for each of {len(own)} ranks", hint)


def short_problems(source: Source, rows: Sequence[int], least: int) -> Iterator[Problem]:
    if short := [rank for rank, n in enumerate(rows) if n < least]:
        got, hint = f"{min(rows)} rows on rank {short[0]}", "a smaller batch_size, or pad_last=True"
        yield Problem(f"{source.name} does not make a batch on each rank.", got, f"at least {least} rows", hint)

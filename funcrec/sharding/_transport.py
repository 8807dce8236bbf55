"""Transport: describes the values that the exchanges of a sharded lookup send.

    answer       an owner sends back                    a rank first sends               gradients arrive as
    "sums"       the sum of a bag's rows there          a row number for each id         d_acts of each bag
    "rows"       the row of each id                     a row number for each id         d_acts of each bag
    "distinct"   each row that was named, once          each row number once, a count    the sum over a row's ids

Two dicts list the functions that compute an answer: one for pooled features, one for sequences, whose "sums" are
"rows".
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Problem, check, is_by_tree
from funcrec.mesh import Codec
from funcrec.sharding._combine import combine_transpose, fetch, pooled_here, pooled_there
from funcrec.sharding._lanes import Routes
from funcrec.sharding._route import route
from funcrec.sharding._route_distinct import fetch_rows_transpose, fetch_transpose, route_rows
from funcrec.sharding._sequences import send_cotangents


class Transport(NamedTuple):
    """A description of what an exchange sends. It is static and hashable.

    answer: a row of the list above.
    capacity: the most ids, or distinct rows, that a rank may send to another rank; None for all its ids.
    codec: the codes of the vectors and their cotangents; None for every bit.
    """

    answer: Literal["sums", "rows", "distinct"] = "sums"
    capacity: int | None = None
    codec: Codec | None = None

    @property
    def codec_back(self) -> Codec | None:
        """Return the codec for cotangents: its `forward` codes the cotangents that a rank sends."""
        return None if self.codec is None else self.codec.transposed()


class Steps(NamedTuple):
    """The functions that compute an answer.

    route: (ids, routes, capacity) -> routed: the rows that this rank received, and the places to which its ids went.
    fetch: (banks, routed, routes, implementation, codec) -> {lane: f[B, width]}; for sequences {bank: f[n · C, dim]}.
    transpose: ({lane: d}, routed, routes, codec) -> {bank: RowGrads} at the owners.
    """

    route: Callable[..., Any]
    fetch: Callable[..., Any]
    transpose: Callable


POOLED = {
    "sums": Steps(functools.partial(route, placed=False), pooled_there, combine_transpose),
    "rows": Steps(route, pooled_here, combine_transpose),
    "distinct": Steps(route_rows, pooled_here, fetch_transpose),
}
SEQUENCES = {
    "sums": Steps(route, fetch, send_cotangents),
    "rows": Steps(route, fetch, send_cotangents),
    "distinct": Steps(route_rows, fetch, fetch_rows_transpose),
}


def steps_of(answers: Mapping[str, Steps], transport: Transport, routes: Routes) -> Steps:
    """Return the functions that compute the answer of an exchange.

    Lookups in replicated tables read the copies in place: no row is sent, so "distinct" saves nothing. Inside of
    `invariant`, owners send rows: sums of owners would have other bits than the sum of a bag.
    """
    answer = "sums" if transport.answer == "distinct" and not routes.axes else transport.answer
    if is_by_tree() and routes.axes:
        check("funcrec.invariant", rounded_problems(transport))
        answer = "rows"
    return answers[answer]


def transport_of(exact: bool, dedup: bool, capacity: int | None = None, codec: Codec | None = None) -> Transport:
    """Return the transport that the keywords of `shard_tables` describe."""
    return Transport("distinct" if dedup else "rows" if exact else "sums", capacity, codec)


def joined_overflow(overflows: Sequence[Tensor]) -> Tensor | None:
    """Return the overflow of several exchanges, i64[2]: the sum of the ids without room, and the greatest needed
    capacity.

    It is None if no exchange counts ids without room.
    """
    if not overflows:
        return None
    return torch.stack([torch.stack([x[0] for x in overflows]).sum(), torch.stack([x[1] for x in overflows]).amax()])


# -- validators --------------------------------------------------------------------------------------------------


def rounded_problems(transport: Transport) -> Iterator[Problem]:
    """Report what rounds on ranks otherwise than in one process."""
    if transport.answer == "distinct":
        what, need = "`dedup` adds a row's gradients rank by rank.", "every id's gradient, in the batch's order"
        yield Problem(what, "tables with dedup=True", need, "dedup=False")
    if transport.codec is not None:
        yield Problem("`codec` rounds what ranks send.", repr(transport.codec), "every bit", "codec=None")


def dedup_problems(exact: bool, dedup: bool) -> Iterator[Problem]:
    if exact and dedup:
        need = "one of them: dedup adds a row's gradients up rank by rank, which rounds them otherwise"
        yield Problem("`exact` and `dedup` exclude each other.", "exact=True, dedup=True", need)

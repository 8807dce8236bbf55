"""The interactions of towers on every node, and their outputs sent back to the ranks that have the bags.

    rank (t, l): y = layer_t(x)  ─all_to_all over nodes─▶  rank (i, l): (y of node 0, ..., y of node N-1) of its bags

A seat runs once, with the parameters of the node's own tower. Parameters, and columns where they differ, are chosen by
the place on the axis, not by Python: one program runs on all ranks.
Shapes: N nodes, B bags on a rank, W columns that a node sends.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from funcrec.core import tree_flatten, tree_unflatten
from funcrec.mesh import Codec, axis_index, send
from funcrec.sharding.by_node._seating import Seat, Seating


def run_seats(
    x: Tensor, seating: Seating, run: Callable[[int, Any, Tensor], Tensor], params: Sequence[Any]
) -> list[Tensor]:
    """Return the output of each seat, f[N · B, W_s].

    run: (a tower of the seat, parameters, f[N · B, ΣD]) -> f[N · B, W_s].
    params: the parameters of each tower.
    """
    return [run_seat(x, seat, seating.axis, run, params) for seat in seating.seats]


def run_seat(x: Tensor, seat: Seat, axis: str, run: Callable, params: Sequence[Any]) -> Tensor:
    own = chosen_columns(x, seat.columns, axis)
    members = [i for i in dict.fromkeys(seat.towers) if i >= 0]
    mine = chosen([params[i] for i in members], [max(members.index(i) if i >= 0 else 0, 0) for i in seat.towers], axis)
    if -1 in seat.towers:
        # A node without a tower here runs the program for nothing. Zeros times an infinite derivative would be NaN, so
        # its inputs are cut off: a choice has the derivative 0.
        is_used = of_this_node([i >= 0 for i in seat.towers], axis, x.device)
        leaves, structure = tree_flatten(mine)
        cut = lambda t: torch.where(is_used, t, torch.zeros_like(t)) if isinstance(t, Tensor) else t
        own, mine = cut(own), tree_unflatten(list(map(cut, leaves)), structure)
    return run(members[0], mine, own)


def chosen(trees: Sequence[Any], which: Sequence[int], axis: str) -> Any:
    """Return trees[which[t]] on node t. The trees differ in the values of tensors only."""
    if len(trees) == 1:
        return trees[0]
    flat, structures = zip(*map(tree_flatten, trees), strict=True)
    pick = lambda xs: torch.stack(xs).index_select(0, of_this_node(which, axis, xs[0].device)[None])[0]
    mine = [pick(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*flat, strict=True)]
    return tree_unflatten(mine, structures[0])


def chosen_columns(x: Tensor, columns: Sequence[tuple[int, ...]], axis: str) -> Tensor:
    """Return the columns columns[t] of x[M, C] on node t."""
    first = columns[0]
    begin = first[0] if first else 0
    if {*columns} == {tuple(range(begin, begin + len(first)))}:
        return x[:, begin : begin + len(first)]
    at = of_this_node(columns, axis, x.device)
    return x.gather(1, at.expand(x.shape[0], len(first)))


def of_this_node(values: Sequence[Any], axis: str, device: torch.device) -> Tensor:
    """Return values[t] on node t."""
    return torch.tensor(values, device=device).index_select(0, axis_index(axis)[None])[0]


def send_back(outputs: Sequence[Tensor], seating: Seating, num_towers: int, codec: Codec | None) -> list[Tensor]:
    """Return the output of each tower for this rank's bags, f[B, W_i], from the outputs of the seats on all nodes.

    A node sends the outputs of its own towers, one after the other, in as many columns as the fullest node needs.
    """
    seat_of = {i: s for s, seat in enumerate(seating.seats) for i in seat.towers if i >= 0}
    starts = list(accumulate((y.shape[1] for y in outputs), initial=0))
    spans = lambda i: range(starts[seat_of[i]], starts[seat_of[i] + 1])
    columns = [[c for i in own for c in spans(i)] for own in seating.nodes]
    size = max(map(len, columns))
    padded = [tuple(c + [0] * (size - len(c))) for c in columns]
    y = chosen_columns(torch.cat(list(outputs), 1), padded, seating.axis)
    widths = [tuple(len(spans(i)) for i in own) for own in seating.nodes]
    width = widths[0] if len(set(widths)) == 1 else (size,)
    n = len(seating.nodes)
    (got,) = send("all_to_all", [y.unflatten(0, (n, y.shape[0] // n))], (seating.axis,), codec, [width])
    out: list[Tensor] = [y] * num_towers
    for t, own in enumerate(seating.nodes):
        at = 0
        for i in own:
            out[i] = got[t][:, at : at + len(spans(i))]
            at += len(spans(i))
    return out

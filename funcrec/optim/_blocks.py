"""Updates by a user's rule with an operation that the kernel lacks: the compiled rule runs on blocks of touched rows.

for each table: rows, x = coalesce(terms);   for each block of rows: scatter(rule(gather(rows), x))

On a CPU the host may read the number of touched rows, so padding costs nothing. A block stays in the caches between the
three steps.
Shapes: T tables, R rows, D dim, M touched rows.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from funcrec.compile import compile_graph
from funcrec.kernels import library
from funcrec.kernels.forms import Terms, accumulation_dtype

BLOCK_BYTES = 1 << 19  # bytes of the rows in one block


class BlockRule:
    """A rule for one row that runs on blocks of rows.

    rule: (row f[D], grad f[D], lr f[], t f[], repeats f[], slots f[...]...) -> [row, slots...].
    round_rows: (new f[M, D], dtype, rows i64[M], draws i64[S + 1, 4]) -> new, for stochastic rounding.
    traced: (fn, arguments) -> the graph of fn.
    """

    def __init__(
        self, rule: Callable[..., Any], num_slots: int, round_rows: Callable[..., Any], traced: Callable[..., Any]
    ):
        self.rule = torch.func.vmap(rule, in_dims=(0, 0, None, None, 0, *[0] * num_slots))
        self.round_rows, self.traced = round_rows, traced
        self.compiled: dict = {}  # {form of the arguments: the compiled rule}

    def run(self, arguments: Sequence[Tensor], is_compiled: bool) -> list[Tensor]:
        if not is_compiled:
            return self.rule(*arguments)
        form = tuple((x.shape, x.dtype) for x in arguments)
        if form not in self.compiled:
            # A separate thread compiles: inside an operator, torch's dispatcher does not let vmap be staged.
            with ThreadPoolExecutor(1) as thread:
                self.compiled[form] = thread.submit(self.compile, list(arguments)).result()
        return self.compiled[form](*arguments)

    @torch.no_grad()
    def compile(self, arguments: list[Tensor]) -> Callable:
        return compile_graph(self.traced(lambda *x: self.rule(*x), arguments), arguments)

    def update_(
        self, tables, slots, terms: Terms, lr: Tensor, step: Tensor, key: Tensor | None, is_compiled: bool
    ) -> None:
        """Run `ops.fused_update` with this rule, in place. `slots` lists the slots of one table after the other."""
        each = len(slots) // max(len(tables), 1)
        for t, table in enumerate(tables):
            dtype, own = accumulation_dtype(table.dtype), slots[t * each : (t + 1) * each]
            touched, grads, count, repeats = _cpp().coalesce(*_only(terms, t).flat(), list(table.shape))
            sums, num_touched = (touched, grads.to(dtype), repeats.to(dtype)), int(count)
            rate, taken = lr.to(dtype), (step + 1).to(dtype)
            block = min(max(BLOCK_BYTES // (table.shape[1] * dtype.itemsize), 1), next_power_of_two(num_touched))
            targets, shapes = [table, *map(flat, own)], [s.shape[1:] for s in own]
            for first in range(0, num_touched, block):
                at, x, n = (_block(y, first, block) for y in sums)
                row, *mine = _cpp().gather_block(targets, at)
                mine = (y.reshape(-1, *shape) for y, shape in zip(mine, shapes, strict=True))
                new, *written = self.run((row, x, rate, taken, n, *mine), is_compiled)
                if key is not None:
                    new = self.round_rows(new, table.dtype, at, key[t])
                left = torch.full((), min(block, num_touched - first))
                _cpp().scatter_block_(targets, at, left, [new, *map(flat, written)])


def _only(terms: Terms, table: int) -> Terms:
    """Return the terms of one table, as table 0. They view only the ids that they read.

    So a coalesced gradient has at most as many rows as these ids."""
    out = Terms(terms.d, [], [], terms.weights, [])
    for s in terms.segments:
        if s.table != table:
            continue
        rows, place = terms.rows[s.rows], s._replace(table=0, rows=len(out.rows))
        if s.offsets >= 0:
            bounds = terms.offsets[s.offsets][s.first_bag : s.first_bag + s.num_bags + 1]
            first, last = (min(max(int(x), 0), rows.shape[0]) for x in (bounds[0], bounds[-1]))
            if s.weights < 0:
                rows, bounds = rows[first:last], bounds - first
            out.offsets.append(bounds)
            place = place._replace(offsets=len(out.offsets) - 1, first_bag=0)
        out.rows.append(rows)
        out.segments.append(place)
    return out


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _block(x: Tensor, first: int, size: int) -> Tensor:
    """Return x[first : first + size]. Places past the end of x hold -1 for rows and 0 for numbers."""
    part = x[first : first + size]
    if part.shape[0] == size:
        return part
    rest = part.new_full((size - part.shape[0], *part.shape[1:]), 0 if x.is_floating_point() else -1)
    return torch.cat([part, rest])


def flat(slot: Tensor) -> Tensor:
    """Return a slot in the form of a table [R, ...]."""
    return slot.flatten(1) if slot.dim() > 1 else slot[:, None]


@functools.cache
def _cpp() -> Any:
    return library.load("cpp")

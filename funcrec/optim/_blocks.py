"""A user's rule at the speed of a kernel: one operator that sums, and runs the compiled rule on blocks of touched rows.

    for each table: rows, x = coalesce(terms);   for each block of rows: scatter(rule(gather(rows), x))

On a CPU the number of touched rows may be read, so nothing is done for places that hold no row, and a block stays in the caches
between the three steps. The operator holds the rule by number. Floor 3.
Shapes: T tables, R rows, D dim, M touched rows.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from funcrec._compile import compile_graph
from funcrec.kernels import library, ops
from funcrec.kernels.forms import Terms, accumulation_dtype, segments_of

BLOCK_BYTES = 1 << 19  # of one block's rows
_numbers = itertools.count()
_rules: WeakValueDictionary[int, "BlockRule"] = WeakValueDictionary()
_staged: dict[int, "BlockRule"] = {}  # those that a compiled function calls by number: it may outlive their optimizer


class BlockRule:
    """A rule for one row, run on blocks of rows.

    rule: (row f[D], grad f[D], {slot: f[...]}, lr f[], t f[], repeats f[]) -> (row, slots).
    round_rows: (new f[M, D], dtype, rows i64[M], key i64[]) -> new, for stochastic rounding.
    """

    def __init__(self, rule: Callable, names: Sequence[str], round_rows: Callable):
        def flat_rule(row, grad, rate, t, repeats, *slots):
            new, written = rule(row, grad, dict(zip(names, slots, strict=True)), rate, t, repeats)
            return [new, *(written[k] for k in names)]

        self.rule = torch.func.vmap(flat_rule, in_dims=(0, 0, None, None, 0, *[0] * len(names)))
        self.round_rows = round_rows
        self.compiled: dict = {}  # {form of the arguments: the rule, compiled}
        self.number = next(_numbers)
        _rules[self.number] = self

    def run(self, arguments: Sequence[Tensor], is_compiled: bool) -> list[Tensor]:
        if not is_compiled:
            return self.rule(*arguments)
        form = tuple((x.shape, x.dtype) for x in arguments)
        if form not in self.compiled:
            # on a thread of its own: inside an operator torch's dispatcher is in a state in which vmap cannot be staged
            with ThreadPoolExecutor(1) as thread:
                self.compiled[form] = thread.submit(self.compile, list(arguments)).result()
        return self.compiled[form](*arguments)

    @torch.no_grad()
    def compile(self, arguments: list[Tensor]) -> Callable:
        return compile_graph(make_fx(lambda *x: self.rule(*x))(*arguments), arguments)

    def update(self, tables, slots, terms: Terms, lr: Tensor, step: Tensor, key: Tensor | None):
        """`ops.fused_update` with this rule; while a step is staged, with the rule to be compiled."""
        ops.refuse_derivatives("rule_update", "cpp", [*tables, *terms.d])
        given, staged = [x for s in slots for x in s], get_proxy_mode() is not None
        if staged:
            _staged[self.number] = self
        op = torch.ops.funcrec_blocks.rule_update
        out = op(list(tables), given, *terms.flat(), lr, step, key, self.number, staged)
        each = len(given) // len(tables)
        new = out[len(tables) :]
        return out[: len(tables)], [new[t * each : (t + 1) * each] for t in range(len(tables))]


def rule_update_(
    tables, slots, d, rows, offsets, weights, segments, lr, step, key, number: int, is_compiled: bool
) -> None:  # fmt: skip
    """The rule's update in place; slots are each table's, one table after the other."""
    rule, each = _rules[number], len(slots) // max(len(tables), 1)
    terms = Terms(list(d), list(rows), list(offsets), list(weights), segments_of(segments))
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
            new, *written = rule.run((row, x, rate, taken, n, *mine), is_compiled)
            if key is not None:
                new = rule.round_rows(new, table.dtype, at, key[t])
            left = torch.full((), min(block, num_touched - first))
            _cpp().scatter_block_(targets, at, left, [new, *map(flat, written)])


def _only(terms: Terms, table: int) -> Terms:
    """The terms of one table, as table 0, over views of just the ids that they read: a coalesced gradient is no longer than they."""
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
    """x[first : first + size], behind its end -1 for rows and zeros for numbers."""
    part = x[first : first + size]
    if part.shape[0] == size:
        return part
    rest = part.new_full((size - part.shape[0], *part.shape[1:]), 0 if x.is_floating_point() else -1)
    return torch.cat([part, rest])


def flat(slot: Tensor) -> Tensor:
    """A slot as a table [R, ...]."""
    return slot.flatten(1) if slot.dim() > 1 else slot[:, None]


@functools.cache
def _cpp():
    return library.load("cpp")


def _rule_update(tables, slots, *rest) -> list[Tensor]:
    new_tables, new_slots = [t.clone() for t in tables], [s.clone() for s in slots]
    rule_update_(new_tables, new_slots, *rest)
    return new_tables + new_slots


library.define(
    "funcrec_blocks",
    "rule_update",
    f"(Tensor[] tables, Tensor[] slots, {library.TERMS}, Tensor lr, Tensor step, Tensor? key, int number, bool is_compiled)"
    " -> Tensor[]",
    _rule_update,
    lambda tables, slots, *rest: [torch.empty_like(x) for x in (*tables, *slots)],
    in_place=rule_update_,
)

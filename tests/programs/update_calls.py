"""Arguments for the operations of an update: tables' cotangents, and the cotangents' entries by the definition."""

from typing import NamedTuple

import torch
from funcrec.kernels.forms import capacity_of, is_padded, segments_of
from funcrec.kernels.rules import RULES
from torch import Tensor

from funcrec.optim._builtin import BUILTIN, arguments_of
from funcrec.optim._kernel import numbers_of
from funcrec.optim.write import examples

# all forms of all built-in optimizers
CASES = [(rule, options) for rule in RULES for options in examples(rule)]
OUTSIDE = (-1, -(2**63), 2**63 - 1, 2**40)  # no table has these rows


class Call(NamedTuple):
    """The cotangents of tables of `shapes`, in the form that flat operations take."""

    d: list[Tensor]
    rows: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor]
    segments: list[int]
    shapes: list[int]


def numbers(rule: str, options: dict) -> list[float]:
    """Return the hyper-parameters in the order of the rule."""
    return numbers_of(RULES[rule], arguments_of(BUILTIN[rule], **options)[1])


def ids(n: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return random ids with repeats, one in eight outside the table."""
    inside = torch.randint(0, max(1, num_rows), (n,))
    outside = [x for x in (*OUTSIDE, num_rows) if torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max]
    pick = torch.tensor(outside)[torch.randint(0, len(outside), (n,))]
    return torch.where(torch.rand(n) < (1 / 8 if num_rows else 1), pick, inside).to(dtype)


def offsets(num_bags: int, first: int, ends: int, dtype: torch.dtype) -> Tensor:
    cuts = torch.randint(first, ends + 1, (num_bags + 1,)).sort().values
    return torch.cat([torch.tensor([-(10**6), -5]), cuts, torch.tensor([-(10**6)])]).to(dtype)


def make(shapes: list[tuple[int, int]], dtype=torch.float32, seed=0, n=200, bags=40) -> Call:
    """Return a call with three segments per table: bags, bags with other options, entries. Dtypes and strides differ
    between segments."""
    torch.manual_seed(seed)
    d, rows, cuts, weights, segments = [], [], [], [], []
    for t, (num_rows, dim) in enumerate(shapes):
        wide = torch.randn(2 * dim + 3, bags).t().to(dtype)  # the columns are strided
        d += [wide if t % 2 else wide.contiguous(), torch.randn(n, dim + 1, dtype=torch.float64).to(dtype)]
        ints = (torch.int32, torch.int64)
        rows += [ids(n, num_rows, ints[t % 2]), ids(n, num_rows, ints[(t + 1) % 2])]
        cuts += [offsets(bags, 3, n - 4, ints[(t + 1) % 2]), offsets(bags, 0, n - 20, ints[t % 2])]
        weights.append(torch.randn(n, dtype=torch.float64 if t % 3 == 2 else torch.float32))
        at = 2 * t
        segments += [t, at, 3, at, at, 2, bags, 0, 0, -1]
        segments += [t, at, dim, at + 1, at + 1, 2, bags - 1, (0, 1, 3)[t % 3], 1, t]
        segments += [t, at + 1, 1, at, -1, 0, n - 7, 0, 0, t if t % 2 else -1]
    return Call(d, rows, cuts, weights, segments, [x for shape in shapes for x in shape])


def entries(call: Call, table: int, dtype=torch.float64) -> list[tuple[int, Tensor, int]]:
    """Return (row, gradient computed in `dtype`, place of the entry when written out) of each entry, by the
    definition."""
    out, begin = [], 0
    dim = call.shapes[2 * table + 1]
    for s in segments_of(call.segments):
        if s.table != table:
            continue
        grads, rows = call.d[s.d].to(dtype)[:, s.column : s.column + dim], call.rows[s.rows].tolist()
        weights = call.weights[s.weights].to(dtype).tolist() if s.weights >= 0 else [1.0] * len(rows)
        if s.offsets < 0:
            out += [(rows[i], weights[i] * grads[i], begin + i) for i in range(s.num_bags)]
        else:
            cuts = call.offsets[s.offsets].tolist()[s.first_bag :]
            for b in range(s.num_bags):
                end = min(cuts[b + 1], cuts[b] + s.max_length) if s.max_length else cuts[b + 1]
                for i in range(cuts[b], end):
                    scale = weights[i] / (end - cuts[b] if s.mean else 1)
                    place = b * s.max_length + i - cuts[b] if is_padded(s, len(rows)) else i
                    out.append((rows[i], scale * grads[b], begin + place))
        begin += capacity_of(s, len(rows))
    return [e for e in out if 0 <= e[0] < call.shapes[2 * table]]

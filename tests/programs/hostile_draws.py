"""Generated calls of the operations on initial rows, with any keys, ids and rows. See hostile.py.

Shapes: M rows, R rows of a table, P places, D dim.
"""

import torch
from funcrec.kernels import cpp, reference
from funcrec.kernels.draws import CONSTANT, GIVEN, Fresh
from funcrec.kernels.forms import flatten
from torch import Tensor

from programs.hostile_draw import DIMS, EXTREMES, F32, F64, FLOATS, I32, I64, Draw, Result


def words(draw: Draw, n: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=draw.generator)


def initial_rows(draw: Draw) -> Result:
    n, dim = draw.size() // (10 if draw.is_large else 1), draw.one(*DIMS)
    starts = draw.one(torch.arange(n) * dim, words(draw, n), words(draw, n).to(I32))
    given = draw.place(words(draw, 1)[0]), draw.put(draw.mix(starts, draw.one(0, 0.2))), dim
    how = draw.random.randrange(3), draw.one(0.0, 1.0, 0.3, 1e30), draw.one(*FLOATS)
    run = lambda: [torch.ops.funcrec_cpp.initial_rows(*given, *how)]
    return Result(run, [reference.initial_rows(*given, *how)])


def draw_rows(draw: Draw) -> Result:
    """Return the result of entries of several tables; some tables have several entries, in rows of their own."""
    sizes = [(draw.one(0, 1, 7, 300), draw.one(*DIMS)) for _ in range(draw.one(1, 2, 4))]
    tables = [draw.place(draw.noise(*x, dtype=draw.one(*FLOATS))) for x in sizes]
    free = [torch.randperm(r, generator=draw.generator) for r, _ in sizes]
    keys, counts = words(draw, 3), draw.mix(torch.randint(0, 40, (3,), generator=draw.generator), 0.3)
    rows, given, fresh, scales, begin = [], [], [], [], 0
    for _ in range(draw.one(0, 1, 3, 6)):
        t, kind = draw.random.randrange(len(tables)), draw.random.randrange(4)
        places = min(draw.size(), len(free[t]))
        own, free[t] = free[t][:places], free[t][places:]
        rows.append(draw.mix(own, 0.1, sizes[t][0], *EXTREMES) if draw.one(0, 1) else own)
        number, first = draw.random.randrange(3), draw.one(0, 5, -7)
        if kind == GIVEN:
            given.append(draw.place(draw.noise(draw.one(1, places), sizes[t][1], dtype=draw.one(F32, F64))))
        where = begin, draw.one(0, begin), places, number, draw.random.randrange(3)
        fresh.append(Fresh(t, kind, max(len(given) - 1, 0), draw.one(*DIMS), first, *where))
        scales.append(draw.one(0.0, 1.0, 0.3, -2.0 if kind == CONSTANT else 3.0))
        begin += places
    flat = draw.put(torch.cat([torch.empty(0, dtype=I64), *rows]))
    given = tables, given, flat, draw.put(words(draw, begin)), draw.place(counts), draw.place(keys)
    given = *given, flatten(fresh), scales

    def run() -> list[Tensor]:
        own = [draw.place(x) for x in tables]
        cpp.draw_rows_(own, *given[1:])
        return own

    return Result(run, reference.draw_rows(*given))


DRAWS = (initial_rows, draw_rows)

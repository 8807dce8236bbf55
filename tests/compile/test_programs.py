"""Compiled programs of scatters, gathers, cats, sorts and views give the values of eager mode.

The programs are generated. Their values are plain tensors."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

N, D = 6, 3  # every value is f64[N, D]
WIDE = torch.linspace(-3, 6, N * (D + 2), dtype=torch.float64).sin().reshape(N, D + 2)
# the positions below 2 N, each once
EVERY = torch.arange(2 * N) * 5 % (2 * N)
# positions, some of them twice
SOME = torch.tensor([0, 4, 4, 1, 5, 0])
ONCE = EVERY[EVERY < N]

# name: (p, q, k) -> a value, where k is a number below N
OPERATIONS = {
    "multiply": lambda p, q, k: p * q,
    "add": lambda p, q, k: p + 0.5 * q,
    "cos": lambda p, q, k: p.cos(),
    "flat": lambda p, q, k: (p.flatten() * torch.linspace(0, 1, N * D, dtype=p.dtype)).reshape(N, D),
    "columns": lambda p, q, k: WIDE[:, k % 3 : k % 3 + D] * q,
    "center": lambda p, q, k: p - p.mean(0, keepdim=True),
    "product": lambda p, q, k: p @ (p.t() @ q) * 0.1,
    "where": lambda p, q, k: torch.where(p > 0, q, p),
    "cat": lambda p, q, k: torch.cat([p[:k], q[k:]]),
    "roll": lambda p, q, k: p.roll(k, 0),
    "sort": lambda p, q, k: p.sort(0)[0],
    "cumsum": lambda p, q, k: p.cumsum(0) * 0.3,
    "gather": lambda p, q, k: p.gather(0, SOME[:, None].expand(N, D)) * q,
    "rows": lambda p, q, k: p[SOME.roll(k)],
    "put": lambda p, q, k: p.index_put((ONCE.roll(k)[:3],), q[:3]),
    "put and add": lambda p, q, k: p.index_put((SOME,), q, accumulate=True),
    "put own rows": lambda p, q, k: p.index_put((SOME[:3],), p[3:] * 0.5 + q[:3], accumulate=True),
    "put into a cat": lambda p, q,
    k: torch.cat([p, q]).index_put((EVERY,), torch.cat([q, p]), accumulate=True)[k : k + N],
    "index_add": lambda p, q, k: p.index_add(0, SOME, q),
    "scatter_add": lambda p, q,
    k: p.new_zeros(N + 1, D).scatter_add(0, (EVERY % (N + 1))[:, None].expand(2 * N, D), torch.cat([p, q]))[:N],
    "scatter_max": lambda p, q, k: p.scatter_reduce(0, SOME[:, None].expand(N, D), q, "amax"),
    "slice_scatter": lambda p, q, k: torch.slice_scatter(p, q[1:4], 0, k % 3, k % 3 + 3),
    "transpose of rows": lambda p, q, k: torch.func.vjp(lambda t: t[SOME], p)[1](q)[0],
}  # fmt: skip
number = st.integers(0, 99)
programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), number, number, st.integers(0, N - 1)), min_size=10, max_size=16
).filter(lambda program: len({name for name, *_ in program}) > 4)  # the first example would be one operation


def run(program, x):
    """Return the last four values. Each operation takes two earlier values."""
    values = [x, WIDE[:, :D], WIDE[:, 1 : D + 1]]
    for name, first, second, k in program:
        values.append(OPERATIONS[name](values[-1 - first % len(values)], values[-1 - second % len(values)], k))
    return values[-4:]


# the shrink phase is left out, because it would compile for minutes
@settings(max_examples=2, phases=[Phase.generate])
@given(many=st.lists(programs, min_size=6, max_size=6))
def test_compiled_programs_are_eager_ones(many):
    """jit of a function of six programs gives the values of each program."""
    x = torch.linspace(-1, 2, N * D, dtype=torch.float64).sin().reshape(N, D)
    fn = lambda x: [run(p, x * (i + 1)) for i, p in enumerate(many)]
    assert_trees_close(fr.jit(fn)(x), fn(x), rtol=1e-9, atol=1e-9)

"""Generated programs of updates, writes, reads and swaps give the values of the plain program, compiled and donated."""

import functools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec import optim
from funcrec.core._tree import map_tensors
from funcrec.testing import assert_trees_close

CALLS = 3
copied = functools.partial(map_tensors, torch.clone)
LEAVES = ("a", "b", "c")
RULES = {"sgd": optim.sgd(0.5), "momentum": optim.momentum(0.5, momentum=0.5), "adagrad": optim.adagrad(0.5)}
SLOTS = {"sgd": (), "momentum": ("momentum",), "adagrad": ("sum",)}
leaf = st.sampled_from(LEAVES)
row = st.integers(0, 3)
operations = st.one_of(
    st.tuples(st.just("update"), leaf, st.sampled_from(sorted(RULES)), leaf, st.booleans()),
    st.tuples(st.just("put"), leaf, leaf, row, st.booleans()),
    st.tuples(st.sampled_from(("pair", "add", "swap")), leaf, leaf),
    st.tuples(st.just("old"), st.sampled_from((*LEAVES, "sum", "momentum"))),
    st.tuples(st.just("read"), leaf, row),
    st.tuples(st.just("keep"), leaf),
)
programs = st.lists(operations, min_size=1, max_size=6)  # shrink to one operation
MANY = st.lists(programs, min_size=8, max_size=8)


def start():
    table = lambda k: torch.arange(8.0).reshape(4, 2) % 5 - k
    return {n: table(k) for k, n in enumerate(LEAVES)} | {"sum": torch.ones(4, 2), "momentum": torch.zeros(4, 2)}


def run_program(program, state, x):
    """Return (the state, the values that were read) after the operations in order."""
    old, now, seen = state, dict(state), []
    for kind, first, *rest in program:
        if kind == "update":
            rule, source, is_old = rest
            rows = torch.tensor([1, 3, 1])
            g = fr.RowGrads.from_entries(rows, (old if is_old else now)[source][:3] + x, num_embeddings=4)
            slots = {first: {k: now[k] for k in SLOTS[rule]}}
            tables, slots = RULES[rule].update({first: g}, slots, {first: now[first]}, 0)
            now |= {**tables, **slots[first]}
        # one update of two tables, or of one table
        elif kind == "pair":
            g = fr.RowGrads.from_entries(torch.tensor([2, 2]), now[first][:2] - x, num_embeddings=4)
            pair = {n: now[n] for n in (first, rest[0])}
            now |= RULES["sgd"].update(dict.fromkeys(pair, g), {n: {} for n in pair}, pair, 0)[0]
        elif kind == "old":
            now[first] = old[first]
        elif kind == "put":
            source, at, is_old = rest
            now[first] = now[first].index_put((torch.tensor([at]),), (old if is_old else now)[source][3:] + x)
        elif kind == "add":
            now[first] = now[first] + now[rest[0]] * 0.5
        elif kind == "swap":
            now[first], now[rest[0]] = now[rest[0]], now[first]
        else:
            seen.append(now[first][rest[0]] if rest else now[first])
    return now, seen


def same_as_eager(fn, compiled, state):
    got, need = copied(state), copied(state)
    for i in range(CALLS):
        x = torch.tensor(float(i))
        got, seen = compiled(got, x)
        need, values = fn(need, x)
        assert_trees_close((got, seen), (need, values))


@settings(max_examples=30)
@given(program=programs)
def test_generated_programs(program):
    """jit(program, donate) equals the program over three calls, with the plan of writes and an interpreted graph."""
    fn = functools.partial(run_program, program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("funcrec.compile._program.compile_graph", lambda graph, arguments: graph)
        same_as_eager(fn, fr.jit(fn, donate=("state",)), start())


# the shrink phase is left out, because it would compile for minutes
@settings(max_examples=1, phases=[Phase.generate])
@given(many=MANY.filter(lambda many: len({str(p) for p in many}) > 5))  # the first example would be eight times one
def test_generated_programs_compiled(many):
    """Eight compiled programs in one function, each with its own state, give the values of the plain programs."""

    def fn(state, x):
        made = [run_program(p, s, x) for p, s in zip(many, state, strict=True)]
        return [s for s, _ in made], [seen for _, seen in made]

    same_as_eager(fn, fr.jit(fn, donate=("state",)), [start() for _ in many])

"""Errors in compiled loops raise at the call of the program, however many threads run the loops."""

import functools
import threading

import pytest
import torch

import funcrec as fr

# a loop in one thread, and a loop in several threads where torch has them
SIZES = [100, 100_000]
RAISES = {
    "a gather": (lambda t, i: t[i] * 2, IndexError, 5000),
    "a gather of negative indices": (lambda t, i: t[i - 1000] * 2, IndexError, -1),
    "a gather and a sum": (lambda t, i: (t[i] * 2).double().sum(), IndexError, 10**14),
    "an index_put": (lambda t, i: t.index_put((i,), 2.0 * i), IndexError, 5000),
    "a scatter": (lambda t, i: t.scatter(0, i, 2.0 * i), IndexError, -1),
    "an embedding": (lambda t, i: torch.nn.functional.embedding(i, t[:, None]) * 2, IndexError, 5000),
    "a quotient": (lambda t, i: i // (i - 999), RuntimeError, 999),
    "a remainder": (lambda t, i: 7 % (i - 999), RuntimeError, 999),
    "counts of another sum": (lambda t, i: repeated(i), RuntimeError, 5000),
    "negative counts": (lambda t, i: repeated(i), RuntimeError, -1),
    "an assertion": (lambda t, i: (torch._assert_async((i < 999).all()), t + 1)[1], RuntimeError, 999),
    "an assertion in words": (
        lambda t, i: (torch._assert_async((i < 999).all(), "ids below 999"), t)[1],
        RuntimeError,
        999,
    ),
    "an assertion in a branch that nothing reads": (
        lambda t, i: (fr.cond(len(i) > 5 * t.sum(), torch.neg, below_999, i), t - 1)[1],
        RuntimeError,
        999,
    ),
    "an assertion in a loop that nothing reads": (
        lambda t, i: (fr.while_loop(lambda x: x[0] < 1, lambda x: (x[0] + 1, below_999(x[1])), (t[0], i)), t - 2)[1],
        RuntimeError,
        999,
    ),
}
WORDS = r"out of bounds|ZeroDivisionError|allocated size does not match|can not be negative|got zero|ids below 999"


def repeated(i):
    """Return the ids of i, each valid id once. An id outside 0 to 998 is its own number of repeats."""
    return i.repeat_interleave(torch.where((i >= 0) & (i < 999), 1, i), output_size=len(i))


def below_999(i):
    """Return the ids less 1. They are all below 999."""
    torch._assert_async((i < 999).all())
    return i - 1


def ids(size, bad=None):
    out = torch.arange(size) % 999
    if bad is not None:
        out[size // 3] = bad
    return out


T = torch.arange(1000.0)


# a program of each size is compiled once
@functools.cache
def all_loops(size):
    """Return (a program of all loops, each of ids of its own; the results for valid ids)."""
    program = fr.jit(lambda t, xs: {name: f(t, xs[name]) for name, (f, *_) in RAISES.items()})
    return program, {name: f(T, ids(size)) for name, (f, *_) in RAISES.items()}


@pytest.mark.xdist_group("loops")
@pytest.mark.parametrize("name", RAISES)
def test_a_loop_raises(name):
    """jit(f)(x) raises where f(x) raises, even in a loop of several threads. The next call is right."""
    f, kind, bad = RAISES[name]
    for size in SIZES:
        program, expected = all_loops(size)
        with pytest.raises((IndexError, RuntimeError)):
            f(T, ids(size, bad))
        valid = {n: ids(size) for n in RAISES}
        with pytest.raises(kind, match=WORDS):
            program(T, {**valid, name: ids(size, bad)})
        torch.testing.assert_close(program(T, valid), expected, rtol=0, atol=0)
        assert program.num_compiled() == 1


def test_a_donating_call_that_raises_has_not_begun():
    """An index out of bounds leaves a donated state whole."""
    step = fr.jit(lambda state, i: state.index_put((i,), state[i] + 1), donate=("state",))
    state, before = torch.arange(1000.0), torch.arange(1000.0)
    with pytest.raises(IndexError, match="out of bounds for a dimension of size 1000"):
        step(state, ids(100_000, 5000))
    assert torch.equal(state, before)


def test_calls_of_several_threads_raise_each_its_own():
    """When several threads call one program, only the calls that divide by 0 raise. All other calls return."""
    program = fr.jit(lambda i, n: (i // n).sum())
    x, wrong = ids(100_000), []
    program(x, torch.ones_like(x))

    def calls(divisor, raises):
        for _ in range(100):
            try:
                program(x, torch.full_like(x, divisor))
                wrong.extend(["did not raise"] * raises)
            except RuntimeError as error:
                wrong.extend([] if raises else [error])

    threads = [threading.Thread(target=calls, args=x) for x in ((0, True), (3, False), (0, True), (1, False))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_integers_to_negative_powers_raise():
    """An integer tensor to a negative whole power raises during staging, as in eager mode. Other powers do not
    raise."""
    for fn in (lambda x: x**-1, lambda x: (x > 0) ** -2):
        with pytest.raises(RuntimeError, match="negative integer powers"):
            fr.jit(fn)(torch.arange(3))
    x = torch.arange(1, 4)
    torch.testing.assert_close(fr.jit(lambda x: x**-1.5 + x.double() ** -2)(x), x**-1.5 + x.double() ** -2)

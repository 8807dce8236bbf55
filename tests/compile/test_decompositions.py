"""Compiled programs give the values and dtypes of eager mode for the operators that Inductor gets wrong."""

import itertools
import operator
import warnings

import pytest
import torch

import funcrec as fr

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def of_each(f, cases):
    """Return {case: f(*arguments)} from one compiled program. Inductor shares no loop between cases that share no
    input."""
    return fr.jit(lambda cases: {k: f(*x) for k, x in cases.items()})(cases)


def test_products_of_vectors_and_stacks_keep_their_type():
    """A vector times a stack of integer matrices, in either order, has the dtype and the values of integers."""
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randint(0, 100, shape, generator=draw)
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    made = {dtype: [make(10), make(2, 3, 10, 4), make(2, 1, 5), make(2, 5, 1)] for dtype in integers}
    cases = {f"{dtype}": [x.to(dtype) for x in xs] for dtype, xs in made.items()}
    f = lambda v, stack, one, other: (v @ stack, stack.mT @ v, torch.bmm(one, other), torch.bmm(other, one))
    for name, found in of_each(f, cases).items():
        for got, want in zip(found, f(*cases[name]), strict=True):
            assert f"{got.dtype}" == name and torch.equal(got, want)


def test_products_of_vectors_and_stacks_are_rounded_once():
    """A vector times a stack of 16-bit float matrices is as near to the exact sums as one rounding allows."""
    draw = torch.Generator().manual_seed(0)
    made = {d: [torch.randn(*shape, generator=draw).to(d) for shape in ((40,), (3, 5, 40, 4))] for d in FLOATS[:2]}
    for dtype, found in of_each(
        lambda v, stack: (v @ stack, stack.mT @ v), {f"{d}": x for d, x in made.items()}
    ).items():
        v, stack = next(x for d, x in made.items() if f"{d}" == dtype)
        for got, want in zip(found, (v.double() @ stack.double(), stack.double().mT @ v.double()), strict=True):
            error = (got.double() - want).abs() - torch.finfo(v.dtype).eps / 2 * want.abs()
            assert got.dtype == v.dtype and error.amax() < 1e-4


def test_moments_of_nothing_are_no_numbers():
    """The mean and the variance of no elements are NaN, computed together or separately."""
    of = lambda x, dim: [*torch.var_mean(x, dim), *torch.std_mean(x, dim, keepdim=True), x.mean(dim), x.var(dim)]
    f = lambda *xs: [y for x in xs for dim in (None, 0, 1, (0, 1)) for y in of(x, dim)]
    xs = [torch.ones(shape) for shape in ((0, 3), (3, 0), (2, 3))]
    for got, want in zip(fr.jit(f)(*xs), f(*xs), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_floors_of_quotients_are_those_of_eager_mode():
    """Floored quotients, truncated quotients, remainders and lerp equal those of eager mode. Each function meets one
    dtype of 16 bits, whose results equal 32-bit results, rounded once, and one wider dtype. The inputs include zeros,
    division by 0 and quotients that round to a whole number."""
    draw = torch.Generator().manual_seed(0)
    tenths = lambda: torch.randint(-40, 40, (3001,), generator=draw) * 0.1
    cases = {f"{d}": (tenths().to(d), tenths().to(d)) for d in FLOATS}
    f = lambda x, y: (
        torch.div(x, y, rounding_mode="floor"), x // y, x // 0.3, 7.0 // y, torch.div(x, 0.3, rounding_mode="floor"),
        x % y, x % 0.3, 7.0 % y, torch.div(x, y, rounding_mode="trunc"), torch.lerp(x, y, 0.3), torch.lerp(x, y, y),
    )  # fmt: skip
    turn = {name: i % 2 for i, name in enumerate(cases)}
    every = lambda cases: {name: f(*xs)[turn[name] :: 2] for name, xs in cases.items()}
    for name, found in fr.jit(every)(cases).items():
        x, y = cases[name]
        wide, rtol = torch.promote_types(x.dtype, torch.float32), torch.finfo(x.dtype).eps
        for got, want in zip(found, f(x.to(wide), y.to(wide))[turn[name] :: 2], strict=True):
            torch.testing.assert_close(got, want.to(x.dtype), rtol=rtol, atol=4 * rtol, equal_nan=True)


def test_quotients_of_integers_by_floats_are_floored():
    """Integers and floats are promoted before they are divided, as in eager mode."""
    x, y = torch.arange(-20, 20), torch.full((40,), 0.1, dtype=torch.bfloat16)
    f = lambda x, y: (x // y, x % y, x // 0.1, x % 3, x // 3, 2.5 // x, x.to(torch.int8) % 2.5)
    for got, like, want in zip(fr.jit(f)(x, y), f(x, y), f(x, y.float()), strict=True):
        assert got.dtype == like.dtype
        torch.testing.assert_close(got, want.to(got.dtype), rtol=2**-7, atol=1e-6, equal_nan=True)


def no_numbers(dtype):
    """Return all pairs of infinities, NaN, signed zeros and extreme numbers as two vectors."""
    least, most = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    values = [0.0, 1.0, 3.7, least, most, torch.inf]
    x = torch.tensor([*values, *(-v for v in values), torch.nan], dtype=dtype)
    return x.repeat_interleave(len(x)), x.repeat(len(x))


def test_quotients_of_what_is_no_number_are_those_of_eager_mode():
    """Floors, truncations and remainders of infinities, NaN, signed zeros and extreme numbers equal those of eager
    mode, for all pairs of these numbers. The signs of zeros match, and empty tensors succeed. Each function meets one
    dtype of 16 bits, which is computed in 32 bits, and one wider dtype."""
    f = lambda x, y, turn: (
        x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.div(x, y, rounding_mode="floor"), x // 3.7, x % 3.7
    )[turn::2]  # fmt: skip
    sizes = [*((d, 169) for d in FLOATS), (torch.float16, 7), (torch.float32, 0)]
    cases = {f"{d} {n}": [*(x[:n].clone() for x in no_numbers(d)), i % 2] for i, (d, n) in enumerate(sizes)}
    for name, found in of_each(f, cases).items():
        *xs, turn = cases[name]
        wide = torch.promote_types(xs[0].dtype, torch.float32)
        for got, want in zip(found, f(*(x.to(wide) for x in xs), turn), strict=True):
            want = want.to(cases[name][0].dtype)
            torch.testing.assert_close(got, want, equal_nan=True)
            is_zero = want == 0
            assert torch.equal(got[is_zero].signbit(), want[is_zero].signbit())


def test_remainders_of_large_quotients_are_exact():
    """A remainder is exact even where the quotient has more digits than a float32."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e9
    assert torch.equal(fr.jit(lambda x: x % 3.7)(x), x % 3.7)


FEW = [torch.int8, torch.uint8, torch.float16, torch.int32, torch.int64, torch.float32, torch.float64]


def test_comparisons_are_compared():
    """Bools from comparisons of different dtypes compare with each other, with bools of Python, and with numbers. Each
    of six comparisons meets every second pair of dtypes."""
    compares = [getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")]
    draw = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 3, (2, 37), generator=draw).to(d) for d in FEW[::2]]

    def f(*values):
        bools = [x < y for x, y in values]
        pairs = [c(p, q) for i, c in enumerate(compares) for p, q in list(itertools.product(bools, bools))[i % 2 :: 2]]
        others = (True, False, 1, 0.5, bools[0][0], bools[0][:1])  # each with one of the bools, in turn
        return *pairs, *(c(bools[i % len(bools)], other) for c in compares for i, other in enumerate(others))

    for got, want in zip(fr.jit(f)(*values), f(*values), strict=True):
        assert got.dtype == torch.bool and torch.equal(got, want)


ADDED = [*FEW, torch.bfloat16, torch.bool]


def test_sums_with_a_factor_are_promoted_first():
    """x + alpha · y has the dtype and the bits of eager mode for all pairs of dtypes, in one of the two orders. In the
    dtype of y alone, the product would wrap, round or become infinite."""
    draw = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 120, (2, 37), generator=draw).to(d) for d in ADDED]
    whole = lambda *xs: not any(x.is_floating_point() for x in xs)
    both = [(values[i], values[j]) for i in range(len(values)) for j in range(i + 1)]
    pairs = [(x[0], y[1], 100) for i, pair in enumerate(both) for x, y in [pair[:: (-1) ** i]]]
    pairs += [(x, y, 0.1) for x, y, _ in pairs[::2] if not whole(x, y)]
    pairs += [(x, other, a) for x, y, a in pairs[::6] for other in (y[0], y[0].item())]
    f = lambda xs, ys: [torch.add(x, y, alpha=a) for x, y, (*_, a) in zip(xs, ys, pairs, strict=True)]
    xs, ys = [p[0] for p in pairs], [p[1] for p in pairs]
    for got, want in zip(fr.jit(f)(xs, ys), f(xs, ys), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(
            got, want, rtol=torch.finfo(want.dtype).eps if want.is_floating_point() else 0, atol=0
        )


def test_reductions_of_bools_are_those_of_eager_mode():
    """Reductions of bool masks equal those of eager mode: maxima, minima, the positions of both, sums, and products.
    Masks of any dtype meet some of them; masks that are compared, and masks that are cast, meet each."""
    x = torch.randint(-1, 2, (17, 65), generator=torch.Generator().manual_seed(0))
    dtypes = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int8)
    cases = {f"{d}": (x.to(d), i % 2, i in (1, 2)) for i, d in enumerate(dtypes)}  # compared and cast in turn

    def f(x, is_cast, is_whole):
        b = x.bool() if is_cast else x > 0
        some = [*b.max(1), b.amin(0), b.any(0), x.sum(0, dtype=torch.bool), x.prod(1, dtype=torch.bool)]
        if not is_whole:
            return some
        pairs = [*b.max(0), *(r for d in (0, 1) for r in b.min(d, keepdim=True))]
        return some + pairs + [b.amax(1), b.max(), b.min(), b.all(1), b.sum(0), b.prod(1)]

    for name, found in of_each(f, cases).items():
        for got, want in zip(found, f(*cases[name]), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)


def test_numbers_to_the_power_of_integers():
    """Whole numbers and fractions to the power of integers, in any memory layout, have the dtype and the values of
    eager mode."""
    x = torch.randint(0, 5, (32, 17), generator=torch.Generator().manual_seed(0))
    values = [
        y for d in (torch.int8, torch.uint8, torch.int64) for y in (x.to(d), x.to(d).t(), x.to(d)[::2], x.to(d)[0, 0])
    ]
    f = lambda *values: [r for y in values for r in (2**y, (-3) ** y, 0.5**y, torch.pow(2, y + 1))]
    for got, want in zip(fr.jit(f)(*values), f(*values), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_nothing_is_said_of_torchs_own_old_calls(tmp_path, monkeypatch):
    """The first compilation of a diagonal gives no warning about the deprecated calls of Inductor itself."""
    # the cache is empty, so that this call compiles
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert torch.equal(fr.jit(lambda x: x.diagonal() * 3.25)(torch.ones(3, 3)), torch.full((3,), 3.25))


def test_powers_of_two_are_those_of_eager_mode():
    """x · 2^n has the dtype and the bits of eager mode for all pairs of dtypes, in one of the two orders. This holds
    where 2^n alone overflows, where x is subnormal, and for exponents outside int32."""
    extremes = lambda info: (info.smallest_normal, info.smallest_normal / 3, -info.max, torch.inf, torch.nan)
    small = torch.tensor([1, 0, 5, 2, 3, -1, -2, 1, 1])
    far = torch.tensor([-149, 200, -2100, 2000, 130, 2098, -1080, -5000, 2**40])
    exponents = [*(small.to(n) for n in (torch.int8, torch.int64, *FLOATS)), far, far + 2**32, torch.tensor(2.5)]
    cases = {
        f"{d}": (torch.tensor([1, -1.1, 3, 0, *extremes(torch.finfo(d))], dtype=d), [n.clone() for n in exponents])
        for d in FLOATS
    }
    cases["exponents"] = (small, exponents)
    pairs = lambda x, others, turn: [torch.ldexp(*((x, n) if (i + turn) % 2 else (n, x))) for i, n in enumerate(others)]
    f = lambda cases: {name: pairs(*xs, turn) for turn, (name, xs) in enumerate(cases.items())}
    want_of = f(cases)
    for name, found in fr.jit(f)(cases).items():
        for got, want in zip(found, want_of[name], strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_whole_numbers_between_two_are_those_of_eager_mode():
    """linspace with whole bounds equals that of eager mode in every integer dtype, even on processors that fuse product
    and sum."""
    bounds = [(-3, 1, 7), (-3, 7, 7), (0, 7, 50), (4, 4, 3), (50, 1, 10), (0, 1, 1), (2, 9, 0)]
    dtypes = (torch.int64, torch.int32, torch.int8)

    def f(x):
        return [torch.linspace(a, b, n, dtype=d) + x.to(d) for a, b, n in bounds for d in dtypes]

    for found, want in zip(fr.jit(f)(torch.tensor(2)), f(torch.tensor(2)), strict=True):
        assert torch.equal(found, want) and found.dtype == want.dtype


def test_elements_are_taken_by_places_of_any_shape():
    """torch.take accepts positions of any shape, without a read on the host. A position out of bounds raises."""
    x, places = torch.arange(12.0).reshape(3, 4), [torch.full(shape, -2) for shape in ((), (1,), (0,), (2, 2))]
    take = fr.jit(lambda x, places: [torch.take(x, at) for at in places])
    for got, at in zip(take(x, places), places, strict=True):
        assert torch.equal(got, torch.take(x, at))
    for i in (0, 1, 3):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            take(x, [at + 14 * (i == j) for j, at in enumerate(places)])


def test_shifts_of_and_by_bools_are_those_of_eager_mode():
    """A shift of bools by integers, or of integers by bools, has eager mode's values and dtype."""
    bools = torch.tensor([True, False, True])
    numbers = [torch.tensor([3, 1, 2], dtype=d) for d in (torch.int8, torch.uint8, torch.int32, torch.int64)]

    def shifts(bools, numbers):
        functions = (operator.lshift, operator.rshift, torch.bitwise_left_shift, torch.bitwise_right_shift)
        pairs = [f(*xs) for f in functions for n in numbers for xs in ((bools, n), (n, bools), (bools[0], n))]
        return [*pairs, bools << 2, bools >> 1, numbers[0] << True, 5 << bools, 5 >> bools]

    for got, want in zip(fr.jit(shifts)(bools, numbers), shifts(bools, numbers), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)

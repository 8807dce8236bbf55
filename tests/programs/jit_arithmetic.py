"""Programs of integers, each drawn from a number. Eager torch defines the results of programs for every value.

    program(7).text  =  "def program(key, ids, few): ..."

A program reads a key i64[], ids i64[N] of any value, and `few` of a narrower dtype. It is text, so that a failing
program can be copied. Programs leave out what eager torch leaves undefined: the least integer divided by -1, shifts by
a dtype's number of bits, and casts of floats outside the integer's range.
"""

import functools
import itertools
import random
import re
from typing import NamedTuple

import torch
from torch import Tensor

import funcrec as fr

MOST = 4096  # the greatest number of elements of a value
BITS = {torch.int64: 64, torch.int32: 32, torch.int16: 16, torch.int8: 8, torch.uint8: 8}
CONSTANTS = (
    0, 1, 2, 3, 7, 8, 63, 97, 127, 128, 255, 256, 1000, 65521, 2**31 - 1, 2**31, 2**32, 2**33 + 1, 2**53 + 1, 2**56,
    2**62, 2**62 + 1, 2**63 - 1, 7046029254386353131, 4658895280553007687, 7723592293110705685, 1018231460777725123,
)  # fmt: skip
CASTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64)


class Program(NamedTuple):
    number: int
    text: str
    inputs: tuple[Tensor, Tensor]  # ids, few


@functools.cache
def program(number: int) -> Program:
    """Return the program drawn from a number, with 3 to 14 steps on 1 to 300 elements."""
    return Drawing(number).program()


def function(text: str):
    """Return the program as a function of (key, ids, few)."""
    scope = {"torch": torch, "fr": fr}
    exec(text, scope)
    return scope["program"]


class Drawing(random.Random):
    """The part of a program that is written so far. `scope` has the values of the program's names."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number, self.lines = number, []
        self.n = self.choice([self.randint(1, 300), self.randint(1, 20), 8 * self.randint(1, 37) + self.randint(-1, 1)])
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(-(2**63), 2**63 - 1, (self.n,), generator=generator)
        ids = ids >> torch.randint(0, 64, (self.n,), generator=generator) if self.random() < 0.5 else ids
        wide = torch.randint(-(2**31), 2**31, (self.randint(1, 300),), generator=generator)
        few = wide.to(self.choice([torch.int32, torch.int32, torch.uint8, torch.int8, torch.bool, torch.int16]))
        self.scope = {"torch": torch, "fr": fr, "key": fr.key(number), "ids": ids, "few": few}
        self.names, self.new = ["key", "ids", "few"], (f"x{i}" for i in itertools.count())

    def program(self) -> Program:
        inputs = self.scope["ids"], self.scope["few"]
        for _ in range(self.randint(1, 3)):
            self.write(self.start())
        for _ in range(self.randint(2, 11)):
            self.write(self.step())
        own = [n for n in self.names if n.startswith("x")]
        read = set(re.findall(r"\bx\d+\b", " ".join(line.partition("=")[2] for line in self.lines)))
        results = [n for n in own if n not in read or self.random() < 0.2]
        lines = [*self.lines, f"return [{', '.join(results)}]"]
        return Program(self.number, "\n    ".join(["def program(key, ids, few):", *lines]) + "\n", inputs)

    def write(self, expression: str) -> None:
        """Add a line, if the line's value is not too large."""
        value = eval(expression, self.scope)
        if 0 < value.numel() <= MOST:
            name = next(self.new)
            self.scope[name] = value
            self.names.append(name)
            self.lines.append(f"{name} = {expression}")

    # -- what a step is made of ----------------------------------------------------------------------------------------

    def constant(self, dtype: torch.dtype = torch.int64) -> int:
        """Return a random integer of the dtype, sometimes near a special value."""
        bits, is_signed = BITS[dtype], dtype != torch.uint8
        drawn = self.getrandbits(self.randint(1, 64)) if self.random() < 0.3 else self.choice(CONSTANTS)
        drawn = drawn if self.random() < 0.6 else -drawn
        half = 1 << (bits - 1)
        return (drawn + half) % (2 * half) - half if is_signed else drawn % (2 * half)

    def divisor(self, dtype: torch.dtype) -> int:
        """Return a random divisor other than 0 and -1."""
        return next(c for c in iter(lambda: self.constant(dtype), None) if c not in (0, -1))

    def any(self, *dtypes: torch.dtype) -> str:
        """Return the name of a random value of one of these dtypes, more often of a late value. If there is none, cast
        a value."""
        names = [n for n in self.names if not dtypes or self.scope[n].dtype in dtypes]
        if not names:
            return f"{self.any(*BITS)}.to({dtypes[0]})"
        return names[max(self.randrange(len(names)), self.randrange(len(names)))]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(eval(name, self.scope).shape)

    def dtype(self, name: str) -> torch.dtype:
        return eval(name, self.scope).dtype

    def vector(self) -> str:
        """Return a random value of integers as a one-dimensional expression."""
        x = self.any(*BITS)
        return x if len(self.shape(x)) == 1 else f"{x}.reshape(-1)"

    def like(self, x: str, y: str) -> str:
        """Return an expression of y in the shape of x: y itself, a slice of it, or its elements repeated."""
        shape, size = self.shape(x), len(self.shape(x)) and eval(x, self.scope).numel()
        if self.shape(y) in (shape, ()):
            return y
        count = eval(y, self.scope).numel()
        if not shape:
            return f"{y}.reshape(-1)[{self.randrange(count)}]"
        flat = y if len(self.shape(y)) == 1 else f"{y}.reshape(-1)"
        if count >= size:
            start = self.randint(0, count - size)
            return f"{flat}[{start}:{start + size}].reshape({shape})"
        return f"{flat}[torch.arange({size}) % {count}].reshape({shape})"

    def rows(self, size: int) -> str:
        """Return random row numbers i64[N] for `size` rows, counted from the start or from the end. N is often the size
        of a drawn vector."""
        y = self.vector()
        kinds = [
            f"{y} % {size}", f"{y}.long() % {size}", f"({y} >> {self.randint(0, 7)}) % {size}",
            f"{y}.long() % {size} - {size}", f"{y}.clamp(0, {min(size - 1, 127)})",
        ]  # fmt: skip
        if size & (size - 1) == 0:
            kinds += [f"{y} & {size - 1}"] if size <= 128 else [f"{y}.long() & {size - 1}"]
        if size <= MOST:
            kinds += [f"torch.arange({size})", f"-1 - torch.arange({size})", f"torch.arange({self.randint(1, size)})"]
            factor = self.constant()
            kinds += [f"(torch.arange({self.randint(1, 300)}) * {factor}) % {size}"]
            kinds += [f"((torch.arange({self.randint(1, 300)}) * {factor} + key) >> {self.randint(40, 63)}) % {size}"]
        small = self.dtype(y) in (torch.int8, torch.uint8, torch.int16) and size > 127
        return f"({self.choice(kinds[1:2] + kinds[5:] if small else kinds)}).long()"

    def unique_rows(self, size: int) -> str:
        """Return an expression i64[size] that has every row once."""
        turned = f"(torch.arange({size}) + {self.randint(0, 2**40)}) % {size}"
        return self.choice(
            [f"torch.arange({size})", f"torch.arange({size}).flip(0)", f"-1 - torch.arange({size})", turned]
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Return a first expression from a counter or from keys."""
        n, c, d = self.n, self.constant(), self.constant()
        return self.choice([
            f"torch.arange({n})", f"torch.arange({n}) * {c}", f"torch.arange({n}) * {c} + key", "ids",
            f"torch.arange({n}) + {c}", f"torch.arange({n}) * {c} + {d}", f"{c} - torch.arange({n})",
            f"torch.arange({n}, dtype=torch.int32) * {self.constant(torch.int32)}", "few",
            f"torch.arange({self.randint(-300, 300)}, {self.randint(301, 600)}, {self.randint(1, 9)})",
            f"fr.split(key, {n})", f"fr.split(fr.fold_in(key, {c}), {n})", f"torch.full(({n},), {c}) + key",
            f"torch.func.vmap(lambda i: fr.fold_in(key, i))(torch.arange({n}))",
            f"torch.func.vmap(lambda i: fr.fold_in(key, i))(torch.arange({n}) * {c})",
            "torch.func.vmap(lambda i: fr.fold_in(key, i))(ids)",
            f"torch.func.vmap(lambda i: fr.split(fr.fold_in(key, i), 3))(torch.arange({min(n, 100)}))",
        ])  # fmt: skip

    def step(self) -> str:
        kinds = [self.arithmetic] * 9 + [self.between] * 5 + [self.cast] * 3 + [self.form] * 4 + [self.gather] * 3
        return self.choice([*kinds, *[self.scatter] * 3, *[self.reduce] * 2, self.of_floats, self.of_bools])()

    def arithmetic(self) -> str:
        """Return an expression of one value and constants."""
        x = self.any(*BITS)
        dtype = self.dtype(x)
        c, d, by, shift = self.constant(dtype), self.constant(dtype), self.divisor(dtype), self.randrange(BITS[dtype])
        low, high = sorted([c, d])
        return self.choice([
            f"{x} + {c}", f"{x} - {c}", f"{x} * {c}", f"{x} * {c}", f"{c} - {x}", f"{x} // {by}", f"{x} % {by}",
            f"torch.fmod({x}, {by})", f"torch.div({x}, {by}, rounding_mode='trunc')", f"torch.remainder({x}, {by})",
            f"{x} >> {shift}", f"{x} << {shift}", f"{x} ^ {c}", f"{x} & {c}", f"{x} | {c}", f"~{x}", f"-{x}",
            f"{x}.abs()", f"{x}.clamp({low}, {high})", f"{x}.clamp(min={c})", f"{x}.clamp(max={c})", f"{x}.sign()",
            f"{x}.square()", f"{x} ** 3", f"torch.where({x} < {c}, {x}, {d})", f"torch.where({x} == {c}, {d}, {x})",
            f"({x} ^ ({x} >> {shift})) * {c}", f"({x} * {c}) // {by}", f"({x} + {c}) % {by}", f"{x} < {c}",
            f"{x} >= {c}", f"{x} != {c}", f"({x} - {c} < {x}).to({dtype})",
        ])  # fmt: skip

    def between(self) -> str:
        """Return an expression of two values."""
        x, other = self.any(*BITS), self.any(*BITS)
        y, bits = self.like(x, other), BITS[self.dtype(x)]
        over = f"(({y}) & {self.choice([1, 7, 63, 127])}) + {self.choice([2, 3, 11])}"
        least = self.choice([f"({y}).clamp(max=-2)", f"({y}).clamp(min=1)"]) if self.dtype(y) != torch.uint8 else over
        return self.choice([
            f"{x} + {y}", f"{x} - {y}", f"{x} * {y}", f"{x} * {y}", f"{x} ^ {y}", f"{x} & {y}", f"{x} | {y}",
            f"torch.minimum({x}, {y})", f"torch.maximum({x}, {y})", f"{x} // ({over})", f"{x} % ({over})",
            f"{x} // ({least})", f"torch.remainder({x}, {least})", f"torch.fmod({x}, {least})",
            f"{x} >> (({y}).to({self.dtype(x)}) & {bits - 1})", f"{x} << (({y}).to({self.dtype(x)}) & {bits - 1})",
            f"torch.where({x} < {y}, {x}, {y})", f"({x} <= {y})", f"({x} == {y})", f"torch.where({y} > 0, {x}, key)",
        ])  # fmt: skip

    def cast(self) -> str:
        x, to = self.any(*BITS, torch.bool), self.choice(CASTS)
        return f"{x}.to({to})"

    def form(self) -> str:
        """Return an expression that moves elements to other places."""
        v, w = self.vector(), self.vector()
        size = eval(v, self.scope).numel()
        a = self.choice([k for k in range(1, size + 1) if size % k == 0])
        x = self.any()
        dims = len(self.shape(x))
        out = [
            f"{v}.reshape({a}, {size // a})", f"{v}.reshape({a}, {size // a}).t()", f"{v}.flip(0)",
            f"{v}.reshape({a}, {size // a}).t().reshape(-1)", f"{v}[::{self.randint(1, 4)}]", f"torch.cat([{v}, {w}])",
            f"{v}[{self.randrange(size)}:]", f"{v}.roll({self.randint(-9, 9)})", f"{v}[:20, None] ^ {w}[None, :30]",
            f"{v}[:20, None] * {w}[None, :30]", f"{v}[:9].expand(7, {min(9, size)}) + {self.constant(torch.int8) & 7}",
            f"torch.nn.functional.pad({v}, ({self.randint(0, 9)}, {self.randint(0, 9)}), value={self.randint(0, 9)})",
            f"{v}.reshape({a}, {size // a}).tril()", f"{v}.unfold(0, {self.randint(1, size)}, {self.randint(1, 5)})",
            f"torch.stack([{v}, {v}.flip(0)], {self.randint(0, 1)})", f"{v}.reshape({a}, {size // a}).flip(1)",
            f"{v}.repeat({self.randint(1, 4)})", f"{v}.repeat_interleave({self.randint(1, 4)})",
            f"torch.cat([{v}.reshape({a}, {size // a}), {v}.reshape({a}, {size // a})], 1)",
        ]  # fmt: skip
        return self.choice([*out, f"{x}.transpose(0, {dims - 1})" if dims > 1 else f"{x}.reshape(-1)"])

    def gather(self) -> str:
        x, v = self.any(), self.vector()
        if self.shape(x) == ():
            x = v
        size, whole = self.shape(x)[0], eval(x, self.scope).numel()
        flat = f"{x}.reshape(-1)"
        step = self.randint(1, 2**40)
        positive = f"({self.vector()}.long() % {whole})"
        return self.choice([
            f"{x}[{self.rows(size)}]", f"{x}[{self.rows(size)}]", f"{flat}[{self.rows(whole)}]",
            f"torch.gather({flat}, 0, {positive})", f"torch.index_select({x}, 0, ({v}.long() % {size}))",
            f"torch.take({x}, {positive})", f"torch.bucketize({v}, torch.arange({self.randint(1, 99)}) * {step})",
            f"torch.searchsorted(torch.arange({self.randint(1, 99)}) * {step}, {v}.long(), right=True)",
        ])  # fmt: skip

    def scatter(self) -> str:
        """Return an expression that scatters into zeros or into a value. Where rows may repeat, the scatter sums."""
        x = self.vector()
        size, dtype = eval(x, self.scope).numel(), self.dtype(x)
        n = self.choice([1, 2, 64, self.randint(1, 300)])
        into = self.choice([f"torch.zeros({n}, dtype={dtype})", f"torch.arange({n}).to({dtype})"])
        hashed = f"(torch.arange({size}) * {self.constant()}) % {n}"
        rows = self.choice([f"{x}.long() % {n}", self.like(x, self.rows(n)), hashed])
        same = self.like(x, f"(({self.vector()}).long() % {n})")
        unique = self.unique_rows(size)
        positive = f"(({unique}) % {size})"
        return self.choice([
            f"({into}).scatter_add(0, {same}, {x})", f"({into}).index_add(0, {same}, {x})",
            f"({into}).index_put(({rows},), {x}, accumulate=True)", f"({into}).scatter_add(0, ({rows}) % {n}, {x})",
            f"torch.zeros({size}, dtype={dtype}).index_put(({unique},), {x})",
            f"{x}.index_put(({unique},), {x}.flip(0))",
            f"torch.zeros({size}, dtype={dtype}).scatter(0, {positive}, {x})",
            f"({into}).scatter_reduce(0, {same}, {x}, 'amax')", f"({into}).index_fill(0, torch.arange({n})[::2], 3)",
            f"{x}.index_copy(0, {positive}, {x})",
        ])  # fmt: skip

    def reduce(self) -> str:
        x = self.any(*BITS)
        dims = len(self.shape(x))
        dim = self.randrange(dims) if dims else 0
        to = self.choice(list(BITS))
        return self.choice([
            f"{x}.sum()", f"{x}.sum({dim})", f"{x}.cumsum({dim})", f"{x}.amax({dim})", f"{x}.amin({dim})",
            f"{x}.prod()", f"{x} - {x}.sum()", f"{x} ^ {x}.amax({dim}, keepdim=True)", f"({x} > 3).sum({dim})",
            f"({x} > 3).any()", f"{self.vector()}.sort().values", f"{x}.to(torch.int32).sum({dim})",
            f"{x}.cumsum({dim}) % 97", f"{x}.sum({dim}, dtype={to})", f"{x}.sum(dtype={to})", f"{x}.prod(dtype={to})",
            f"{x}.cumsum({dim}, dtype={to})", f"{x}.prod({dim}, dtype={to})", f"{x}.argmax({dim})",
            f"{x}.argmin({dim}, keepdim=True)", f"({x} > 3).all({dim})", f"{x}.to({to}).amax({dim})",
        ])  # fmt: skip

    def of_bools(self) -> str:
        x = self.any(torch.bool)
        y = self.like(x, self.any(torch.bool))
        c, d = self.constant(), self.constant()
        return self.choice([
            f"{x} & {y}", f"{x} | {y}", f"{x} ^ {y}", f"~{x}", f"{x}.long() * {c}", f"{x}.sum()",
            f"{x}.reshape(-1).cumsum(0)", f"torch.where({x}, {c}, {d})",
        ])  # fmt: skip

    def of_floats(self) -> str:
        """Return an expression of floats. Sums are of numbers with few digits, so that they are exact. Elementwise
        operations are on any numbers."""
        x = self.any(torch.float32, torch.float64)
        exact = f"({self.any(*BITS)} % 100).to(torch.float32)"
        whole = f"{x}.nan_to_num(0.0).clamp(-1e6, 1e6)"
        return self.choice([
            f"{exact} * 0.25", f"{exact}.sum()", f"{x} * 0.5", f"{x} + {self.randint(-9, 9)}", f"{x}.abs() + 1",
            f"-{x}", f"{x} / 3", f"torch.where({x} > 1, {x}, {x} * 2)", f"{x}.clamp(-9, 9)", f"{x}.floor()",
            f"{x} < 2.5", f"{whole}.to(torch.int64)", f"{whole}.to(torch.int32)",
            f"{whole}.to(torch.int64) * {self.constant()}",
            f"{whole}.abs().clamp(max=255.0).to(torch.uint8)", f"torch.maximum({x}, {x} * 3)", f"{x}.round()",
        ])  # fmt: skip

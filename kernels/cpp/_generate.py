"""Write a rule for one row as C++: a graph of aten operations becomes loops over the row.

    (row f[D], grad f[D], lr, t, repeats, slots...) → (row, slots...)    as    for (i < D) r1 += x[i] * x[i];   v2 = ..;
    for (i < D) w[i] = ..;

A value that is one number for a whole row is a scalar. Elementwise operations of one size share a loop. A reduction, or
a read at another index, ends the loop: an operation that needs the result belongs to the next level. The scalars and
loops of a level follow those of the level before. `prepare` computes numbers that depend on lr, t and closed-over
tensors alone, once per update. The number of threads does not change the order of a sum.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from funcrec.kernels.cpp import _formulas as formulas
from torch import Tensor

TYPES = {
    torch.float32: "float", torch.float64: "double", torch.bool: "bool", torch.int64: "int64_t", torch.int32: "int32_t",
}  # fmt: skip


class UnsupportedError(Exception):
    """Raised if a part of a rule has no formula; the message names that part."""


class Base:
    """Elements that a loop computes, or that lie in memory.

    loop: (level, size), or None for memory. memory: the C++ name of the memory.
    """

    def __init__(self, text: str, dtype: torch.dtype, size: int, loop: tuple[int, int] | None, memory: str, ready: int):
        self.text, self.dtype, self.size, self.loop, self.memory = text, dtype, size, loop, memory
        self.ready = ready  # the first level that may read the memory
        self.free = 0  # the first level in which a loop of this size may overwrite the memory
        self.is_kept = False  # whether a computed base has memory


class Value(NamedTuple):
    """A node of the graph: a number, or a view of a base.

    number: the C++ text of a number, else None. is_shared: whether the number is the same for all rows.
    Element (c₀, c₁, ..) of a view is the base's element at offset + Σ cₖ · strideₖ.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    number: str | None = None
    level: int = 0
    is_shared: bool = False
    base: Base | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0

    @property
    def elements(self) -> Base:
        """The base of a view."""
        assert self.base is not None
        return self.base

    @property
    def text(self) -> str:
        """The C++ text of a number."""
        assert self.number is not None
        return self.number


class Loop(NamedTuple):
    """The parts of a loop over i < size: variables before the loop, kinds of reductions, statements, and stores."""

    before: list[str]
    kinds: list[str]
    body: list[str]
    stores: list[str]


class Writer:
    """Writes the C++ text of one rule."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.shared: list[str] = []  # the statements of `prepare`
        self.fields = {"lr": TYPES[dtype], "t": TYPES[dtype]}  # {number that `prepare` gives to the rows: its type}
        self.numbers: dict[int, list[str]] = defaultdict(list)  # {level: the statements of its scalars}
        self.loops: dict[tuple[int, int], Loop] = defaultdict(lambda: Loop([], [], [], []))
        self.arrays: dict[str, tuple[torch.dtype, int]] = {}
        self.functions: dict[
            str, tuple[str, torch.dtype, int, int]
        ] = {}  # {C++ name of a pointer to a vector function: (symbol, element type, lanes, number of arguments)}
        self.count = 0

    def name(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def number(self, dtype: torch.dtype, shape: Sequence[int], level: int, text: str, is_shared: bool = False) -> Value:
        name = self.name()
        (self.shared if is_shared else self.numbers[level]).append(f"const {TYPES[dtype]} {name} = {text};")
        if is_shared:
            self.fields[name] = TYPES[dtype]
        return Value(dtype, tuple(shape), name, level, is_shared)

    def elements(self, dtype: torch.dtype, shape: Sequence[int], level: int, text: str) -> Value:
        name, loop = self.name(), (level, math.prod(shape))
        self.loops[loop].body.append(f"const {TYPES[dtype]} {name} = {text};")
        return whole(Base(name, dtype, loop[1], loop, f"m_{name}", level + 1), shape)

    def array(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Value:
        """Return a tensor in memory as a value. The text reads a tensor of one number at once."""
        if math.prod(shape) == 1:
            return self.number(dtype, shape, 0, f"{name}[0]")
        return whole(Base(name, dtype, math.prod(shape), None, name, 0), shape)

    def pointwise(self, formula: str, operands: Sequence[Value], like: Tensor, *types: torch.dtype) -> Value:
        """Return formula(operands) as a value with the dtype and shape of `like`.

        The text first casts each operand to its type in `types`, or without `types` to the result's dtype.
        """
        dtype, shape = known(like.dtype), tuple(like.shape)
        types = types or (dtype,) * len(operands)
        level = max(needs(x, shape) for x in operands)
        text = formula.format(*(self.read(x, level, shape, known(to)) for x, to in zip(operands, types, strict=True)))
        if all(x.number is not None for x in operands):
            return self.number(dtype, shape, level, text, all(x.is_shared for x in operands))
        return self.elements(dtype, shape, level, text)

    def mapped(self, symbol: str, lanes: int, operands: Sequence[Value], like: Tensor) -> Value:
        """Return the result of a vector function on all elements. Operands and result lie in memory.

        symbol: the name of the function.
        """
        dtype, shape, size = like.dtype, tuple(like.shape), like.numel()
        level, names = max(needs(x, shape) for x in operands), []
        for x in operands:
            names.append(self.name("m"))
            self.arrays[names[-1]] = dtype, size
            self.loops[level, size].stores.append(f"{names[-1]}[i] = {self.read(x, level, shape, dtype)};")
        result = self.name("m")
        self.arrays[result] = dtype, size
        self.functions[f"p_{symbol}"] = symbol, dtype, lanes, len(operands)
        self.numbers[level + 1].append(f"map_{symbol}({', '.join([result, *names])}, {size});")
        return whole(Base(result, dtype, size, None, result, level + 1), shape)

    def read(self, x: Value, level: int, shape: tuple[int, ...], to: torch.dtype) -> str:
        """Return the text that reads x at place i of the loop with this level and shape."""
        if x.number is not None:
            return cast(x.number, x.dtype, to)
        base = x.elements
        if is_straight(x, shape) and base.loop == (level, math.prod(shape)):
            return cast(base.text, x.dtype, to)
        self.keep(base, level + (not is_straight(x, shape)))
        return cast(f"{base.memory}[{'i' if is_straight(x, shape) else place(x, shape)}]", x.dtype, to)

    def keep(self, base: Base, until: int) -> None:
        """Keep a base in memory for a read, so that no level before `until` may overwrite the memory."""
        base.free = max(base.free, until)
        if base.loop and not base.is_kept:
            base.is_kept = True
            self.arrays[base.memory] = base.dtype, base.size
            self.loops[base.loop].stores.append(f"{base.memory}[i] = {base.text};")

    def reduce(self, kind: str, x: Value, like: Tensor) -> Value:
        """Return one number, the reduction of all elements of x.

        Sums, products and extremes run by lanes, in the order that the prelude writes out.
        """
        dtype, size = x.dtype if kind in ("amax", "amin") else known(like.dtype), math.prod(x.shape)
        if like.numel() != 1 or (kind in ("amax", "amin") and not dtype.is_floating_point):
            raise UnsupportedError(f"{kind} of {list(x.shape)} to {like.dtype}{list(like.shape)}")
        level = needs(x, x.shape)
        loop, text = self.loops[level, size], self.read(x, level, x.shape, dtype)
        if kind in formulas.BY_LANES:
            name, term, result = self.name("m"), *formulas.BY_LANES[kind]
            self.arrays[name] = dtype, size
            loop.stores.append(f"{name}[i] = {term.format(text)};")
            result = result.format(name, size)
        else:
            result, (start, operator, step) = self.name("r"), formulas.REDUCTIONS[kind]
            loop.before.append(f"{TYPES[dtype]} {result} = {start};")
            loop.kinds.append(f"reduction({operator}:{result})")
            loop.body.append(step.format(result, text))
        return self.number(dtype, tuple(like.shape), level + 1, result)

    def view(self, x: Value, like: Tensor, change: Callable[[Tensor], Tensor]) -> Value:
        """Return change(x) as a view of the same base. torch computes the view's strides on a tensor without data."""
        if x.number is not None:
            return x._replace(shape=tuple(like.shape))
        base = x.elements
        seen = change(torch.empty(base.size, device="meta").as_strided(x.shape, x.strides, x.offset))
        x = x._replace(shape=tuple(seen.shape), strides=seen.stride(), offset=int(seen.storage_offset()))
        if math.prod(x.shape) != 1:
            return x
        self.keep(base, base.ready)
        return self.number(x.dtype, x.shape, base.ready, f"{base.memory}[{x.offset}]")

    def concatenate(self, parts: Sequence[Value], dim: int, like: Tensor) -> Value:
        name, ready, at = self.name("m"), 0, 0
        self.arrays[name] = known(like.dtype), like.numel()
        for x in parts:
            target = like.new_empty(like.shape, device="meta").narrow(dim, at, x.shape[dim])
            into = Value(like.dtype, x.shape, strides=target.stride(), offset=int(target.storage_offset()))
            level, at = needs(x, x.shape), at + x.shape[dim]
            text = self.read(x, level, x.shape, like.dtype)
            if math.prod(x.shape) == 1:
                self.numbers[level].append(f"{name}[{into.offset}] = {text};")
            else:
                self.loops[level, math.prod(x.shape)].stores.append(f"{name}[{place(into, x.shape)}] = {text};")
            ready = max(ready, level + 1)
        return whole(Base(name, like.dtype, like.numel(), None, name, ready), like.shape)

    def write(self, results: Sequence[tuple[Value, str, Value]]) -> list[str]:
        """Return the statements that write new scalars, and add stores of all other new values to the loops.

        The store of a value follows all reads of the old value. results: (new, memory, old) of each.
        """
        last, later = [], []
        for new, name, old in results:
            if math.prod(old.shape) == 1:
                last.append(f"{name}[0] = {cast(new.text, new.dtype, self.dtype)};")
            elif not (new.base is old.base and is_straight(new, old.shape)):
                level = needs(new, old.shape)
                text = self.read(new, level, old.shape, self.dtype)
                later.append((self.elements(self.dtype, old.shape, level, text), name, old))
        for new, name, old in later:
            base = old.elements
            made = new.elements.loop
            assert made is not None  # `elements` returns what a loop computes
            loop = max(made[0], base.free), base.size
            text = self.read(new, loop[0], old.shape, self.dtype)
            self.loops[loop].stores.append(f"{name}[i] = {text};")
        return last


def whole(base: Base, shape: Sequence[int]) -> Value:
    return Value(base.dtype, tuple(shape), base=base, strides=contiguous(shape))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def strides_for(x: Value, shape: Sequence[int]) -> list[int]:
    """Return the strides of x, expanded to a larger shape. They are 0 along each repeated dimension."""
    own = [0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]
    return [0] * (len(shape) - len(own)) + own


def is_straight(x: Value, shape: Sequence[int]) -> bool:
    """Return whether place i of the shape is element i of the base of x."""
    own = zip(shape, strides_for(x, shape), contiguous(shape), strict=True)
    return x.offset == 0 and math.prod(shape) == x.elements.size and all(n == 1 or s == c for n, s, c in own)


def needs(x: Value, shape: Sequence[int]) -> int:
    """Return the first level that can read x at the places of the shape."""
    if x.number is not None:
        return x.level
    base = x.elements
    return base.loop[0] if base.loop and is_straight(x, shape) else base.ready


def place(x: Value, shape: Sequence[int]) -> str:
    """Return the text of offset + Σ cₖ · strideₖ, where cₖ are the coordinates of place i."""
    own = zip(shape, strides_for(x, shape), contiguous(shape), strict=True)
    return " + ".join([str(x.offset), *(f"i / {c} % {n} * {s}" for n, s, c in own if n > 1 and s)])


def cast(text: str, of: torch.dtype, to: torch.dtype) -> str:
    return text if of == to else f"({text} != 0)" if to == torch.bool else f"{TYPES[to]}({text})"


def known(dtype: torch.dtype) -> torch.dtype:
    if dtype not in TYPES:
        raise UnsupportedError(f"a tensor of {dtype}")
    return dtype


def literal(x: bool | int | float) -> Value:
    if isinstance(x, bool):
        return Value(torch.bool, (), str(x).lower(), 0, True)
    if isinstance(x, int):
        return Value(torch.int64, (), f"({x}LL)", 0, True)
    text = repr(x) if math.isfinite(x) else "NAN" if math.isnan(x) else "INFINITY" if x > 0 else "-INFINITY"
    return Value(torch.float64, (), f"({text})", 0, True)

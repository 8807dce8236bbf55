"""Ranges of numbers and forms of tensors, which annotations add to a class, and names for common annotations."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor


class Within(NamedTuple):
    """The range of a number, or another property of a value. what: how errors describe a value without it."""

    need: str
    holds: Callable[[Any], object]
    what: str = "is out of range"

    def __repr__(self) -> str:  # Signatures show this text.
        return self.need


class Form(NamedTuple):
    """The form of a tensor, or of a JaggedTensor's values: a kind of dtype, then the dimensions.

    Kinds are f, i, i64, b, x for real numbers and truths, n for real numbers, and "" for any dtype. After f or n, 16+
    means at least 16 bits, in a strided tensor. Examples are `i[N]`, `f16+[...]` and `f[B, ...]`; "..." stands for any
    dimensions.

    noun: what errors call the tensor. bags: the letter of the number of a JaggedTensor's bags. weights: whether a
    JaggedTensor may have weights.
    """

    text: str
    noun: str = "a tensor"
    bags: str = ""
    weights: bool = True

    @property
    def dtype(self) -> str:
        return self.text.partition("[")[0].removesuffix("16+")

    @property
    def dims(self) -> tuple[str, ...]:
        """Return the words of the dimensions before "..."."""
        inside = self.text.partition("[")[2].rstrip("]").partition("...")[0]
        return tuple(d.strip() for d in inside.split(",") if d.strip())

    @property
    def is_wide(self) -> bool:
        """Return whether numbers have at least 16 bits, and memory is strided."""
        return "16+[" in self.text

    @property
    def need(self) -> str:
        """Return the form in words: "x" and "n" are dtypes without a name."""
        dims = "[" + self.text.partition("[")[2]
        words = f"{self.dtype.strip('xn')}{dims}" + (", numbers" if self.dtype == "n" else "")
        return words + (" of 16 bits or more, strided" if self.is_wide else "")

    @property
    def is_open(self) -> bool:
        """Return whether more dimensions may follow."""
        return "..." in self.text

    @property
    def example(self) -> str:
        """Return an expression for a tensor of this form."""
        sizes = ", ".join(["4"] * len(self.dims)) or "()"
        dtype = {"i": ", dtype=torch.int64", "b": ", dtype=torch.bool"}.get(self.dtype[:1], "")
        return f"torch.ones({sizes}{dtype})"

    def __repr__(self) -> str:
        return self.text


Count = Annotated[int, Within("an int >= 1", lambda n: n >= 1)]
Size = Annotated[int, Within("an int >= 0", lambda n: n >= 0)]
Positive = Annotated[float, Within("a number > 0", lambda x: x > 0)]
NotNegative = Annotated[float, Within("a number >= 0", lambda x: x >= 0)]
Magnitude = Annotated[float, Within("a finite number >= 0", lambda x: 0 <= x < math.inf)]
PositiveMagnitude = Annotated[float, Within("a finite number > 0", lambda x: 0 < x < math.inf)]
Finite = Annotated[float, Within("a finite number", lambda x: -math.inf < x < math.inf)]
UnitInterval = Annotated[float, Within("a number in [0, 1]", lambda x: 0 <= x <= 1)]
Share = Annotated[float, Within("a number in [0, 1)", lambda x: 0 <= x < 1)]
Name = Annotated[str, Within("a non-empty string", bool, "is empty")]
Sizes = Annotated[Sequence[Count], Within("at least one size, an int >= 1", lambda s: len(s) >= 1, "is empty")]
Shape = Sequence[Size]
Key = Annotated[Tensor, Form("i64[]", "a key")]
Scalar = Annotated[Tensor, Form("f[]", "a number")]  # where vmap, grad or jit may give a number
Device = Annotated[torch.device | str, "device"]

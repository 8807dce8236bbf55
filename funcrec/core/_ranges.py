"""What annotations say beyond a class: the range of a number, the form of a tensor; and the names of those in use."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor


class Within(NamedTuple):
    """The range of a number."""

    need: str
    holds: Callable[[Any], bool]

    def __repr__(self) -> str:  # as signatures show it
        return self.need


class Form(NamedTuple):
    """The form of a tensor: a kind of dtype (f, i, i64, b, or x for any), then its
    dimensions in words: `i[N]`, `f[...]`. noun: its name."""

    text: str
    noun: str = "a tensor"

    def __repr__(self) -> str:
        return self.text


Count = Annotated[int, Within("an int >= 1", lambda n: n >= 1)]
Size = Annotated[int, Within("an int >= 0", lambda n: n >= 0)]
Positive = Annotated[float, Within("a number > 0", lambda x: x > 0)]
NotNegative = Annotated[float, Within("a number >= 0", lambda x: x >= 0)]
Share = Annotated[float, Within("a number in [0, 1)", lambda x: 0 <= x < 1)]
Shape = Sequence[Size]
Key = Annotated[Tensor, Form("i64[]", "a key")]
Device = Annotated[torch.device | str, "device"]

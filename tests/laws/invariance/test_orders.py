"""Validators read shapes and dtypes without the mode that orders products, which all other calls pass."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import funcrec as fr
from funcrec.core import Problem, check
from funcrec.invariance._orders import LeftToRight


def modes() -> list:
    return [*map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))]


def test_validators_do_not_pass_the_mode():
    """Inside of a check the mode is aside, also if checks nest. After it the mode is back, also after an error."""
    seen = []

    def problems(found: bool):
        seen.append(modes())
        check("inner", iter(()))
        seen.append(modes())
        if found:
            yield Problem("wrong.", "this", "that")

    def fn(x):
        (own,) = modes()
        assert isinstance(own, LeftToRight)
        check("outer", problems(False))
        assert modes() == [own]
        with pytest.raises(ValueError, match="wrong"):
            check("outer", problems(True))
        with pytest.raises(ZeroDivisionError):
            check("outer", (1 // 0 for _ in range(1)))
        assert modes() == [own]
        return torch.cdist(x, x)

    with pytest.raises(TypeError, match=r"torch.cdist"):
        fr.invariant(fn)(torch.ones(2, 3))
    assert seen == [[]] * 4 and modes() == []


class Counts(TorchFunctionMode):
    """A mode that counts the calls that it sees."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_other_modes_see_what_validators_read():
    """A mode of the user's own sees the reads of a check, inside of invariant and outside."""
    x = torch.ones(2, 3)

    def fn(x):
        outer, own = modes()
        with Counts() as mine:
            check("call", (Problem("wrong.", "", "") for _ in range(3) if x.shape[0] != 2))
        assert mine.count == 3 and modes() == [outer, own]
        return x + 1

    with Counts() as outer:
        assert torch.equal(fr.invariant(fn)(x), x + 1)
    assert outer.count > 3


def test_a_lookup_passes_the_mode_once_for_each_table(monkeypatch):
    """Of what Python reads of a lookup's tables, one shape of each passes the mode."""
    passed, function = [], LeftToRight.__torch_function__

    def count(self, func, *rest):
        passed.append(func)
        return function(self, func, *rest)

    def calls(n: int) -> int:
        names = [f"t{i}" for i in range(n)]
        ids = fr.KeyedJaggedTensor.from_lists({k: [[0], [1, 2]] for k in names})
        features, tables = [fr.FeatureConfig(k, table=k) for k in names], {k: torch.ones(3, 4) for k in names}
        passed.clear()
        fr.invariant(lambda t, ids: fr.lookup(t, ids, features).values)(tables, ids)
        return len(passed)

    monkeypatch.setattr(LeftToRight, "__torch_function__", count)
    assert calls(9) - calls(2) == 7

"""jit(static_argnames=, static_argnums=): arguments that are part of the key as they are."""

import pickle

import pytest
import torch
from programs.as_staged import staged_only

import funcrec as fr


class Config:
    """A hashable value of a class that `jit` knows nothing about."""

    def __init__(self, power, note=""):
        self.power, self.note = power, note

    def __eq__(self, other):
        return isinstance(other, Config) and other.power == self.power

    def __hash__(self):
        return hash(self.power)


def grown(x, config, times=1):
    return x**config.power * times


@pytest.mark.parametrize(
    "how",
    [{"static_argnames": "config"}, {"static_argnums": 1}, {"static_argnames": ["config"]}, {"static_argnums": (1,)}],
    ids=str,
)
def test_equal_values_share_a_program(how):
    """By name or by place: equal values share a program, other values get their own, also as keywords."""
    f, x = fr.jit(grown, **how), torch.tensor(3.0)
    with staged_only():
        assert f(x, Config(2)) == 9 and f(x, config=Config(2, "other")) == 9 and f.num_compiled() == 1
        assert f(x, Config(3)) == 27 and f.num_compiled() == 2
        assert f(x, Config(2), times=4) == 36 and f.num_compiled() == 3
        assert torch.func.grad(f)(x, Config(2)) == 6
        assert torch.func.vmap(f, in_dims=(0, None))(torch.stack([x, x]), Config(2)).tolist() == [9, 9]
        assert f.lower(x, Config(2)).compile()(x, Config(2)) == 9
        assert pickle.loads(pickle.dumps(f))(x, Config(3)) == 27


def test_classes_are_told_apart():
    """1, 1.0 and True are equal, and three programs, since a function can tell them apart. So are 0.0 and -0.0."""
    f = fr.jit(lambda x, n: x * n if isinstance(n, int) else x - n, static_argnames="n")
    with staged_only():
        assert [f(torch.tensor(3.0), n).item() for n in (1, 1.0, True)] == [3, 2, 3] and f.num_compiled() == 3
        signs = fr.jit(lambda x, n: x * n, static_argnames="n")
        assert [bool(signs(torch.tensor(3.0), n).signbit()) for n in (0.0, -0.0)] == [False, True]
        g = fr.jit(lambda x, sizes: x.reshape(sizes), static_argnums=1)
        assert g(torch.ones(4), (2, 2)).shape == (2, 2)


def test_messages_show_the_value():
    """The tenth value gives a warning, and a program that meets another value raises. Both show two values."""
    f, x = fr.jit(lambda x, sizes: x.reshape(sizes), static_argnums=1), torch.ones(12)
    with staged_only():
        for n in range(1, 10):
            f(x[:n], (n, 1))
        with pytest.warns(UserWarning, match=r"`sizes`: \(9, 1\), then \(1, 9\)(.|\n)*not static"):
            f(x[:9], (1, 9))
        with pytest.raises(TypeError, match=r"got   `sizes`: \(2, 2\), then \(4, 1\)"):
            f.lower(x[:4], (2, 2)).compile()(x[:4], (4, 1))


def test_a_donating_function():
    """Static and donated arguments go together."""
    f = fr.jit(lambda state, config: state + config.power, donate="state", static_argnames="config")
    with staged_only():
        old = torch.zeros(2)
        assert f(old, Config(2)).tolist() == [2, 2]
        with pytest.raises(fr.DonatedError):
            old + 1


REFUSED = {
    "no parameter": (lambda: fr.jit(grown, static_argnames="cnfg"), ValueError, "`static_argnames` names no parameter"),
    "no place": (lambda: fr.jit(grown, static_argnums=3), ValueError, "`static_argnums` names no parameter"),
    "donated": (lambda: fr.jit(grown, donate="x", static_argnames="x"), ValueError, "names a donated parameter"),
    "a tensor": (lambda: fr.jit(grown, static_argnames="x")(torch.ones(2), Config(2)), TypeError,
        "`x` is static, and holds tensors"),
    "a list": (lambda: fr.jit(grown, static_argnames="config")(torch.ones(2), [2]), TypeError,
        "`config` is static, and not hashable"),
}  # fmt: skip


@pytest.mark.parametrize("call, kind, words", REFUSED.values(), ids=REFUSED)
def test_refused(call, kind, words):
    """Names of no parameter, and values that cannot be a key, raise before any work."""
    with pytest.raises(kind, match=words):
        call()

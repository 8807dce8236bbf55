"""fr.interop.module refuses state that it cannot carry."""

import pytest
import torch
from torch import nn

import funcrec as fr


class Hashed(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.register_buffer("seed", torch.tensor([7, seed]))

    def forward(self, x):
        return x + self.seed[1] % 1000


def test_integers_that_no_float_holds_are_refused():
    """Buffers are converted to f64. An integer that f64 cannot hold raises an error that names the buffer. All other
    integers keep their bits."""
    for seed in (2**53, 2**60, -(2**63)):
        params, buffers, apply = fr.interop.module(Hashed(seed))
        assert torch.equal(apply(params, buffers, torch.zeros(1))[0], Hashed(seed)(torch.zeros(1)))
    for seed in (2**53 + 1, 2**60 + 1, 2**63 - 1):
        with pytest.raises(ValueError, match=r"`nn_module` has integers.*\n.*seed"):
            fr.interop.module(Hashed(seed))


class Averaging(nn.Module):
    """A module whose `keep` writes the attributes of the module."""

    def __init__(self, keep):
        super().__init__()
        self.keep, self.ema, self.calls = keep, torch.zeros(1), 0
        self.seen, self.past, self.done = {}, [], set()

    def forward(self, x):
        self.keep(self, x)
        return x + self.ema + self.calls + len(self.seen) + len(self.past) + len(self.done)


def rebind(m, x):
    m.ema = 0.9 * m.ema + 0.1 * x.mean()


def write(m, x):
    m.ema.mul_(0.9)


def count(m, x):
    m.calls += 1


def first(m, x):
    m.cache = x


def memorise(m, x):
    m.seen["calls"] = m.seen.get("calls", 0) + 1


def gather(m, x):
    m.past.append(x)


def toggle(m, x):
    m.done ^= {0}


@pytest.mark.parametrize("keep", [rebind, write, count, first, memorise, gather, toggle])
def test_state_in_plain_attributes_is_refused(keep):
    """A module that changes attributes that are not buffers raises in every call, plain or staged. The copy keeps its
    old state. A module that only reads such attributes is right."""
    params, buffers, apply = fr.interop.module(nn.Sequential(Averaging(keep)))
    for call in (apply, apply, fr.jit(apply)):
        with pytest.raises((TypeError, RuntimeError), match=r"0\.(ema|calls|cache|seen|past|done)"):
            call(params, buffers, torch.ones(1))
    params, buffers, apply = fr.interop.module(nn.Sequential(Averaging(lambda m, x: None)))
    assert apply(params, buffers, torch.ones(1))[0].tolist() == [1.0]

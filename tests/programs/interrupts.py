"""Interrupt donated calls. Afterwards the state is whole or gone. No other value is changed.

    python tests/programs/interrupts.py [COUNT]

First, a timer's signal interrupts a donated training step COUNT times at random moments. Then one interrupt comes at
every moment of a call at which CPython would see a signal. A profiler sees where a function begins or C code returns. A
tracer sees each operation, such as a call or a backward jump.
"""

import dis
import functools
import gc
import itertools
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import torch
from funcrec.kernels import ops

import funcrec as fr
from funcrec.core import _checked
from funcrec.core._tree import map_tensors, tree_leaves
from funcrec.mesh import _axes

FEATURES = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("user", table="user", weighted=True))
LEAST_S = 2e-6
AFTER = ("CALL", "JUMP_BACKWARD", "RESUME")  # the operations after which CPython checks for signals


class Interrupt(BaseException):
    """The exception that the signal raises. Like KeyboardInterrupt, it is not an Exception."""


def loss_fn(params, batch, *, key):
    acts = fr.lookup(params.tables, batch.ids, FEATURES).values
    keep = fr.nn.dropout(acts, key, 0.5)
    return (keep * params.dense["w"]).square().sum() + (acts[:, 0] * batch.label).sum()


STEP = fr.train_step(loss_fn, sparse=fr.optim.rowwise_adagrad(0.1), dense=fr.optim.dense(torch.optim.Adam, lr=0.125))


def make_batch(seed: int) -> fr.Batch:
    draw = torch.Generator().manual_seed(seed)
    values, weights = torch.randint(0, 9, (6,), generator=draw), torch.rand(6, generator=draw)
    ids = fr.KeyedJaggedTensor.from_lengths(["clicked", "user"], values, torch.tensor([2, 1, 0, 3]), weights=weights)
    return fr.Batch(ids, torch.rand(2, generator=draw))


def first_state() -> fr.TrainState:
    draw = torch.Generator().manual_seed(0)
    tables = {"item": torch.randn(9, 2, generator=draw), "user": torch.randn(9, 1, generator=draw).bfloat16()}
    return STEP.init(fr.Params(tables, {"w": torch.ones(3)}), fr.key(0))


def switches() -> tuple:
    """Return the switches that a call may change while it runs, and that it must restore."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch._C._functorch.peek_interpreter_stack() is None,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.get_num_threads(),
        _checked.is_checking(),
        ops.ambient(),
        len(_axes.bound.get()),
    )


# -- moments -----------------------------------------------------------------------------------------------------


class AtRandom:
    """A signal from a timer, some microseconds after the call began. Delays are log-uniform: 10 to 20 µs are as likely
    as 100 to 200 µs."""

    def __init__(self, longest_s: float, draw: random.Random):
        self.longest_s, self.draw = longest_s, draw

    def __enter__(self):
        def interrupt(*_):
            raise Interrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, LEAST_S * (self.longest_s / LEAST_S) ** self.draw.random())

    def __exit__(self, *_):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


class AtEvent:
    """An error at the n-th event. At an event, a function begins or C code returns."""

    def __init__(self, n: int):
        self.left = n

    def __enter__(self):
        sys.setprofile(self.see)

    def __exit__(self, *_):
        sys.setprofile(None)

    def see(self, frame, event, arg):
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            self.left -= 1
            if self.left < 0:
                raise Interrupt


class AtOperation:
    """An error after the n-th operation after which CPython checks for signals."""

    def __init__(self, n: int):
        self.left, self.before = n, {}

    def __enter__(self):
        self.outer = sys.gettrace()
        sys.settrace(self.see)

    def __exit__(self, *_):
        sys.settrace(self.outer)
        self.before.clear()

    def see(self, frame, event, arg):
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            at, before = frame.f_lasti, self.before.get(frame)
            self.before[frame] = at
            if before is not None and at in checked_before(frame.f_code).get(before, ()):
                self.left -= 1
                if self.left < 0:
                    raise Interrupt
        return self.see


class AtAudit:
    """An error in an audit hook, where a signal could be seen in Python: at the n-th attribute, `times` in a row."""

    left, times = None, 0  # attributes of the only hook, which can never be removed

    def __init__(self, n: int, times: int = 1):
        self.n, self.most = n, times

    def __enter__(self):
        hooked()
        AtAudit.left, AtAudit.times = self.n, self.most

    def __exit__(self, *_):
        AtAudit.left = None


@functools.cache
def hooked() -> None:
    def hear(event, args):
        if AtAudit.left is not None and event == "object.__setattr__":
            AtAudit.left -= 1
            if AtAudit.left < 0 < AtAudit.times:
                AtAudit.times -= 1
                raise Interrupt

    sys.addaudithook(hear)


@functools.cache
def checked_before(code) -> dict[int, tuple[int, ...]]:
    """Return {an operation after which CPython sees signals: the next such operations}. A next operation counts only if
    the same handler catches errors of both operations."""
    handlers = [(e.start, e.end, e.target) for e in dis._parse_exception_table(code)]
    handler = lambda at: next((t for start, end, t in handlers if start <= at < end), None)
    steps = list(dis.get_instructions(code))
    following = {}
    for here, then in itertools.pairwise(steps):
        if here.opname.startswith(AFTER):
            targets = (here.argval,) if here.opname.startswith("JUMP") else (then.offset,)
            following[here.offset] = tuple(t for t in targets if handler(t) == handler(here.offset))
    return following


# -- one interrupt -----------------------------------------------------------------------------------------------


def is_gone(x: torch.Tensor) -> bool:
    try:
        x.shape  # noqa: B018
    except fr.DonatedError:
        return True
    return False


def bits(tree: Any) -> list:
    return [x.clone() for x in tree_leaves(tree)]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Trial:
    """A jitted step, a state in the middle of training, and the step's result."""

    def __init__(self, device: str = "cpu"):
        self.fast = fr.jit(STEP, donate=("state",))
        made = first_state(), [make_batch(i) for i in range(2)]
        self.first, self.batches = map_tensors(lambda x: x.to(device), made)
        for _ in range(2):
            state, _ = self.fast(fr.copy(self.first), self.batches[0])
            self.middle = bits(state)
            began = time.perf_counter()
            state, metrics = self.fast(state, self.batches[1])
            self.lasts_s = time.perf_counter() - began
        self.need = bits((state, metrics))

    def run(self, moment: Any, follows: bool = True) -> str:
        """Return "whole", "gone" or "finished". Raise for any other result. follows: whether the state is the result of
        the previous call."""
        state, _ = self.fast(fr.copy(self.first), self.batches[0])
        if not follows:
            state = fr.copy(state)
        leaves, before = tree_leaves(state), switches()
        out = None
        gc.disable()  # an interrupt raised in a finalizer would be lost
        try:
            with moment:
                out = self.fast(state, self.batches[1])
        except Interrupt:
            pass
        finally:
            gc.enable()
        assert switches() == before, (before, switches())
        gone = sum(map(is_gone, leaves))
        assert gone in (0, len(leaves)), f"torn: {gone} of {len(leaves)} leaves are gone"
        if out is not None:
            assert gone and same(bits(out), self.need), "another result"
            return "finished"
        if not gone:
            assert same(bits(state), self.middle), "torn: the state was written to, and is still usable"
        again = state if not gone else self.fast(fr.copy(self.first), self.batches[0])[0]
        assert same(bits(self.fast(again, self.batches[1])), self.need), "the next call went wrong"
        return "gone" if gone else "whole"


def at_random(trial: Trial, count: int, seed: int = 0) -> Counter:
    """Return how many of `count` interrupts at random moments ended in each way."""
    draw = random.Random(seed)
    return Counter(trial.run(AtRandom(1.5 * trial.lasts_s, draw), follows=i % 4 > 0) for i in range(count))


def at_every(trial: Trial, moment: type, follows: bool = True, step: int = 1) -> Counter:
    """Return how many interrupts at every moment of a call, or at every `step`-th moment, ended in each way."""
    ends: Counter = Counter()
    while True:
        now = moment(step * sum(ends.values()))
        end = trial.run(now, follows)
        if now.left >= 0:
            return ends
        # "finished" if a finalizer got the interrupt, because Python ignores exceptions in finalizers
        ends[end] += 1


def main(count: int = 2000) -> None:
    torch.set_num_threads(1)
    trial = Trial()
    print("at random", dict(at_random(trial, count)))
    for moment in (AtEvent, AtOperation):
        for follows in (True, False):
            print(
                moment.__name__,
                "a state that follows" if follows else "another state",
                dict(at_every(trial, moment, follows)),
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""The arguments that `sweep`, its steps, `member` and `sweep_table` refuse, and the messages of the errors."""

import math

import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr


def make_step(lr, momentum=0.0):
    loss = lambda params, batch: params.dense["w"].square().sum()
    return fr.train_step(loss, sparse=fr.optim.sgd(lr), dense=fr.optim.dense(torch.optim.SGD, lr=lr, momentum=momentum))


PARAMS = fr.Params({"t": torch.ones(3, 2)}, {"w": torch.ones(2)})
OTHER = fr.Params({"t": torch.ones(3, 2)}, {"v": torch.ones(2)})
TWO = fr.sweep(make_step, {"lr": [0.1, 0.2]})
STATES = TWO.init(PARAMS)
EMPTY = fr.sweep(lambda: make_step(0.1), {})
TABLE = fr.SweepTable({"lr": torch.ones(2)}, {"loss": torch.ones(1, 2)})
made = lambda *a, **k: fr.sweep(make_step, *a, **k)

ROWS = [
    ("an unknown name", lambda: made({"lr": [1.0], "rate": [0.1]}), TypeError, "`make_step` takes no 'rate'"),
    ("a missing name", lambda: made({"momentum": [0.1]}), TypeError, "`hyper` has no 'lr', which `make_step` needs"),
    ("texts", lambda: made({"lr": ["a", "b"]}), TypeError, "`hyper['lr']` holds no numbers"),
    ("one number", lambda: made({"lr": 0.1}), ValueError, "`hyper['lr']` is not a list of numbers"),
    ("a matrix", lambda: made({"lr": torch.ones(2, 2)}), ValueError, "got   f32[2, 2]"),
    ("truths", lambda: made({"lr": torch.tensor([True])}), ValueError, "`hyper['lr']` is not a list of numbers"),
    ("NaN", lambda: made({"lr": [0.1, math.nan]}), ValueError, "`hyper['lr']` has a number that is not finite"),
    ("two lengths", lambda: made({"lr": [0.1, 0.2], "momentum": [0.5]}), ValueError, "try   product=True"),
    ("no member", lambda: made({"lr": []}), ValueError, "one length >= 1"),
    ("a list of truths", lambda: made({"lr": [True, False]}), ValueError, "`hyper['lr']` is not a list of numbers"),
    ("no step", lambda: fr.sweep(lambda lr: 3, {"lr": [0.1]}).init(PARAMS), TypeError, "`make_step` returned no step"),
    ("a value that is read", lambda: fr.sweep(lambda lr: make_step(float(lr)), {"lr": [0.1]}).init(PARAMS), TypeError,
        "`make_step` reads a tensor's value on the host"),
    ("one of two params", lambda: TWO.init([PARAMS]), ValueError, "the members are not of one number"),
    ("three keys of two", lambda: TWO.init(PARAMS, fr.split(fr.key(0), 3)), ValueError, "need  2, as in `hyper`"),
    ("a key of floats", lambda: TWO.init(PARAMS, torch.ones(2)), TypeError, "`key` is not a key"),
    ("params of two structures", lambda: TWO.init([PARAMS, OTHER]), TypeError, "`params` have different structures"),
    ("a tensor for params", lambda: TWO.init(torch.ones(2)), TypeError, "`params` is not Params"),
    ("no number of members", lambda: EMPTY.init(PARAMS), ValueError, "the number of members is not said"),
    ("the state of one run", lambda: TWO(make_step(0.1).init(PARAMS), None), ValueError, "`state` is not a stack"),
    ("states of three", lambda: TWO(made({"lr": [0.1] * 3}).init(PARAMS), None), ValueError,
        "need  [2, ...], one for each member"),
    ("member(2) of two", lambda: fr.member(STATES, 2), IndexError, "need  0 <= index < 2"),
    ("member(-1)", lambda: fr.member(STATES, -1), ValueError, "`index` is out of range"),
    ("member of one run", lambda: fr.member(PARAMS, 0), ValueError, "`states` is not a stack"),
    ("member of nothing", lambda: fr.member({}, 0), TypeError, "`states` holds no tensors"),
    ("a table of another step", lambda: fr.sweep_table(make_step(0.1), {"loss": torch.ones(2)}), TypeError,
        "`step` is not a sweep"),
    ("a loss of one run", lambda: fr.sweep_table(TWO, {"loss": torch.tensor(1.0)}), TypeError,
        "`metrics['loss']` is not a loss of each member"),
    ("no metrics", lambda: fr.sweep_table(TWO, []), TypeError, "is not a loss of each member"),
    ("metrics of another sweep", lambda: fr.sweep_table(TWO, {"loss": torch.ones(3)}), ValueError,
        "`metrics` are those of another sweep"),
    ("a metric 'member'", lambda: fr.sweep_table(TWO, {"loss": torch.ones(2), "member": torch.ones(2)}), ValueError,
        "'member' is the name of the members' numbers"),
    ("best(auc)", lambda: TABLE.best("auc"), KeyError, "`metric` is not in the table"),
    ("plot(x=momentum)", lambda: TABLE.plot(x="momentum"), KeyError, "`x` is not a hyper-parameter"),
    ("trials with another name", lambda: TABLE.add_trials(None, distributions={"rate": None}), KeyError,
        "`distributions` names no hyper-parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "fragments"), [pytest.param(*r[1:3], r[3:], id=r[0]) for r in ROWS])
def test_refused(call, kind, fragments):
    """Each row is refused before any work, in the library's words."""
    assert_refused(call, kind, *fragments)

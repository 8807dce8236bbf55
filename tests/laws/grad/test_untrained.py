"""Modules that a loss closes over. A module that nothing would train raises with its name.

Frozen modules and modules among the arguments are accepted."""

import warnings

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 2], [1]]})
FEATURES = (fr.FeatureConfig("clicked", table="item"),)
MESH = {"mesh": fr.Mesh.emulated(x=2), "plan": fr.Plan({"item": fr.row_wise("x")})}
OPTIMIZERS = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))


def closed(net, how=lambda f, x: f(x)):
    """Return a loss that closes over net, with no dense parameters."""
    return lambda params, ids: how(net, fr.lookup(params.tables, ids, FEATURES).values).square().mean()


def given(net):
    """Return the same loss with the parameters of net as dense parameters."""
    call = lambda params, x: torch.func.functional_call(net, params.dense, (x,))
    return lambda params, ids: call(params, fr.lookup(params.tables, ids, FEATURES).values).square().mean()


def tables():
    return {"item": torch.linspace(-1, 1, 6).reshape(3, 2)}


def steps(step, params, times=3, run=None):
    state, losses = step.init(params), []
    for _ in range(times):
        state, metrics = (run or step)(state, IDS)
        losses.append(metrics["loss"])
    return state, losses


@pytest.mark.parametrize("where", ["value_and_grad", "a step", "a jitted step", "a mesh", "under vmap"])
def test_a_module_that_nothing_trains_is_named(where):
    """A loss that reads an nn.Module that is not an argument raises, wherever the loss is differentiated, and suggests
    the fix."""
    loss = closed(module())
    if where == "value_and_grad":
        run = lambda: fr.value_and_grad(loss)(fr.Params(tables(), {}), IDS)
    elif where == "under vmap":
        of = lambda item: fr.value_and_grad(loss)(fr.Params({"item": item}, {}), IDS)[0]
        run = lambda: torch.func.vmap(of)(torch.stack([tables()["item"]] * 2))
    else:
        step = fr.train_step(loss, **OPTIMIZERS, **(MESH if where == "a mesh" else {}))
        run = lambda: steps(step, fr.Params(tables(), {}), run=fr.jit(step) if where == "a jitted step" else step)
    with pytest.raises(TypeError, match=r"reads an nn.Parameter that it was not given(.|\n)*f32\[3, 2\]") as error:
        run()
    assert all(cure in str(error.value) for cure in ("named_parameters", "functional_call", "requires_grad_(False)"))
    assert "and 1 more" in str(error.value)


def test_three_parameters_are_all_named():
    """A message has the forms of up to three tensors."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, bias=False))
    with pytest.raises(TypeError, match="was not given") as error:
        fr.value_and_grad(closed(net))(fr.Params(tables(), {}), IDS)
    assert "f32[1, 3], closed over" in str(error.value)


@pytest.mark.parametrize("how", ["frozen", "no_grad", "detached", "given", "a plain leaf"])
def test_what_is_not_to_be_trained_is_let_be(how):
    """Modules are accepted silently if they are frozen, under no_grad, detached in the result, or passed as an
    argument. A tensor that requires grad but is no Parameter is reported, and differentiated."""
    net = module()
    loss = closed(net)
    if how == "frozen":
        net.requires_grad_(False)
    elif how == "no_grad":
        loss = closed(net, torch.no_grad()(lambda f, x: f(x)))
    elif how == "detached":
        loss = closed(net, lambda f, x: f(x).detach() + x[:, :1])
    elif how == "given":
        by = lambda params, ids, own: given(net)(fr.Params(params.tables, own), ids)
        own = dict(net.named_parameters())
        value, _ = fr.value_and_grad(by)(fr.Params(tables(), {}), IDS, own)
        assert torch.autograd.grad(value, own["2.bias"])[0] != 0
        loss = lambda params, ids: by(params, ids, {n: x.detach() for n, x in own.items()})
    else:
        weight = torch.ones((), requires_grad=True)
        loss = closed(net.requires_grad_(False), lambda f, x: f(x) * weight)
        with pytest.warns(UserWarning, match="a tensor that requires grad, and that it was not given"):
            value, _ = fr.value_and_grad(loss)(fr.Params(tables(), {}), IDS)
        assert_trees_close(torch.autograd.grad(value, weight)[0], 2 * value.detach())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fr.value_and_grad(loss)(fr.Params(tables(), {}), IDS)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_s_parameters_are_trained_as_plain_ones(compiled, monkeypatch):
    """Params(tables, dict(module.named_parameters())) trains in the same way as the detached values, eager and donated.
    The new state has no autograd history."""
    monkeypatch.setattr("funcrec.compile._program.compile_graph", lambda graph, arguments: graph)
    net = module()
    own = dict(net.named_parameters())
    step = fr.train_step(given(net), **OPTIMIZERS)
    run = fr.jit(step, donate=("state",)) if compiled else step
    # the call warns that it copies the module's own memory
    with warnings.catch_warnings(record=True):
        got = steps(step, fr.Params(tables(), own), run=run)
    want = steps(step, fr.Params(tables(), {n: x.detach().clone() for n, x in own.items()}))
    assert_trees_close(got, want, atol=1e-6 if compiled else 0)
    assert not any(x.requires_grad for x in (*got[0].dense.values(), *got[0].tables.values(), *got[1]))
    value, grads = fr.value_and_grad(given(net))(fr.Params(tables(), own), IDS)
    whole = given(net)(fr.Params(tables(), own), IDS)
    wanted = dict(zip(own, torch.autograd.grad(whole, list(own.values())), strict=True))
    assert_trees_close((value.detach(), {n: x.detach() for n, x in grads.dense.items()}), (whole.detach(), wanted))

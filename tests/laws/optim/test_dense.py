"""Dense optimizers: torch.optim's classes as pure functions."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.optim import Stage, dense, schedule
from funcrec.optim._as_compiled import tensor_scalars
from funcrec.testing import assert_trees_close

CLASSES = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"t0": 2.0}),
}
every_class = pytest.mark.parametrize("name", CLASSES)
STEPS = 7
RATE = schedule([Stage("linear", 4, value=0.2)], lr=0.05)


@fr.pytree
class Tower:
    weight: torch.Tensor
    biases: list


def generated(seed: int, dtype=torch.float64):
    """Return a tree of a matrix, a vector and a scalar, and STEPS gradients of the tree."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=dtype)
    tree = lambda: {"tower": Tower(normal(3, 2), [normal(2), normal()])}
    return tree(), [tree() for _ in range(STEPS)]


def run(opt, params, grads):
    state = opt.init(params)
    for step, g in enumerate(grads):
        params, state = opt.update(g, state, params, step)
    return params, state


def kinds(tree):
    flat, structure = torch.utils._pytree.tree_flatten(tree)
    return structure, [(x.shape, x.dtype) for x in flat]


@pytest.fixture
def double_default():
    """Use f64 as the default dtype, in which torch.optim keeps its counters."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@every_class
@pytest.mark.parametrize("rate", [0.05, RATE], ids=["number", "schedule"])
def test_is_the_class(name, rate, double_default):
    """k updates equal k steps of the torch.optim class."""
    cls, hyper = CLASSES[name]
    params, grads = generated(0)
    got, _ = run(dense(cls, lr=rate, **hyper), params, grads)
    leaves, structure = torch.utils._pytree.tree_flatten(params)
    theirs = [torch.nn.Parameter(p.clone()) for p in leaves]
    opt = cls(theirs, lr=float(rate(0)) if callable(rate) else rate, foreach=False, **hyper)
    for step, g in enumerate(grads):
        for p, d in zip(theirs, torch.utils._pytree.tree_leaves(g), strict=True):
            p.grad = d.clone()
        if callable(rate):
            opt.param_groups[0]["lr"] = float(rate(step))
        opt.step()
    need = torch.utils._pytree.tree_unflatten([p.detach() for p in theirs], structure)
    assert_trees_close(got, need, rtol=1e-12, atol=1e-14)


@every_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pure_and_staged(name, dtype):
    """Staged on shapes, an update gives the eager bits. The update keeps structure, shapes and dtypes, and changes no
    argument."""
    cls, hyper = CLASSES[name]
    opt = dense(cls, lr=RATE, **hyper)
    params, grads = generated(1, dtype)
    state = opt.init(params)
    staged = make_fx(opt.update, tracing_mode="fake", _allow_non_fake_inputs=True)(
        grads[0], state, params, torch.tensor(0)
    )
    for step, g in enumerate(grads):
        before = torch.utils._pytree.tree_map(torch.clone, (g, state, params))
        got, need = staged(g, state, params, torch.tensor(step)), opt.update(g, state, params, step)
        assert_trees_close((g, state, params), before)
        assert_trees_close(got, need)
        assert kinds(need) == kinds((params, state))
        params, state = need
    assert not torch.compiler.is_compiling()


@every_class
def test_f32_is_near_f64(name):
    """f32 parameters stay within 1e-5 of the f64 parameters."""
    cls, hyper = CLASSES[name]
    params, grads = generated(2, torch.float32)
    low, _ = run(dense(cls, lr=0.05, **hyper), params, grads)
    double = lambda t: torch.utils._pytree.tree_map(torch.Tensor.double, t)
    high, _ = run(dense(cls, lr=0.05, **hyper), double(params), [double(g) for g in grads])
    assert_trees_close(double(low), high, rtol=1e-5, atol=1e-5)


@every_class
def test_vmap(name):
    """An update mapped over an ensemble equals the update of each member."""
    cls, hyper = CLASSES[name]
    opt = dense(cls, lr=0.05, **hyper)
    stack = lambda *xs: torch.utils._pytree.tree_map(lambda *y: torch.stack(y), *xs)
    members = []
    for seed in (3, 4):
        params, grads = generated(seed, torch.float32)
        params, state = run(opt, params, grads[:1])
        members.append((grads[1], state, params))
    got = torch.func.vmap(opt.update, in_dims=(0, 0, 0, None))(*stack(*members), 1)
    assert_trees_close(got, stack(*[opt.update(*m, 1) for m in members]), rtol=1e-6, atol=1e-7)


@every_class
def test_a_member_follows_the_schedule_by_the_bits_of_its_own_run(name):
    """Under `invariant`, members with their own numbers of steps have the bits of their own updates."""
    cls, hyper = CLASSES[name]
    opt = dense(cls, lr=RATE, **hyper)
    update, stack = fr.invariant(opt.update), lambda *xs: fr.tree.map(lambda *y: torch.stack(y), *xs)
    members = []
    for seed, step in ((6, 1), (7, 3)):
        params, grads = generated(seed, torch.float32)
        params, state = run(opt, params, grads[:step])
        members.append((grads[step], state, params, torch.tensor(step)))
    assert_trees_close(torch.func.vmap(update)(*stack(*members)), stack(*[update(*m) for m in members]), rtol=0, atol=0)


def test_any_tree():
    """A single tensor, a list and an empty tree are valid trees."""
    opt = dense(torch.optim.Adam, lr=0.1)
    one, grad = torch.ones(2), torch.tensor([1.0, -1.0])
    moved, _ = run(opt, one, [grad])
    assert_trees_close(run(opt, [one, one], [[grad, grad]])[0], [moved, moved])
    for empty in ({}, [], ()):
        assert run(opt, empty, [empty]) == (empty, empty)


def test_parameters_that_require_grad():
    """Leaves that require grad are read, not written. The new leaves are functions of these leaves. From detached
    leaves the new leaves are plain."""
    p = torch.ones(2, requires_grad=True)
    moved, _ = run(dense(torch.optim.SGD, lr=0.5, weight_decay=0.2), p, [torch.ones(2)])
    assert moved.tolist() == pytest.approx([0.4, 0.4]) and p.tolist() == [1, 1] and p.grad is None
    assert torch.autograd.grad(moved.sum(), p)[0].tolist() == pytest.approx([0.9, 0.9])
    assert not run(dense(torch.optim.SGD, lr=0.5), p.detach(), [torch.ones(2)])[0].requires_grad


@every_class
def test_a_rate_of_zero_makes_no_nan(name):
    """While a schedule gives 0, parameters with gradient 0 do not change, and no parameter becomes NaN."""
    cls, hyper = CLASSES[name]
    opt, params = (
        dense(cls, lr=schedule([Stage("constant", 2, value=0.0)], lr=0.1), **hyper),
        [torch.tensor([1.0, -2.0, 0.0])],
    )
    got, _ = run(opt, params, [[torch.tensor([0.0, 1.0, 0.0])]] * 2)
    assert got[0].isfinite().all()
    # weight decay and ASGD move a parameter without a gradient
    still = "weight_decay" not in hyper and name != "asgd"
    assert not still or torch.equal(got[0][[0, 2]], params[0][[0, 2]])


def test_rates():
    """A number, a tensor and a function of the step with the same rate agree."""
    params, grads = generated(5)
    need, _ = run(dense(torch.optim.RMSprop, lr=0.125), params, grads)
    for rate in (torch.tensor(0.125), lambda step: 0.125, lambda step: torch.full((), 0.125)):
        assert_trees_close(run(dense(torch.optim.RMSprop, lr=rate), params, grads)[0], need, rtol=1e-14, atol=1e-15)


def test_threads_update_at_once():
    """Optimizers that run in two threads do not disturb each other, `jit` or torch's flag, whichever thread ends
    first."""
    opt, params = fr.optim.dense(torch.optim.Adam, lr=0.1), {"w": torch.ones(2)}
    update = lambda: opt.update(params, opt.init(params), params, step=0)
    want, state = update(), torch.zeros(2)
    with ThreadPoolExecutor(1) as other:
        mine, others = tensor_scalars(), tensor_scalars()
        mine.__enter__()
        other.submit(others.__enter__).result()
        try:
            mine.__exit__(None, None, None)
            assert_trees_close(update(), want)
            assert torch.compiler.is_compiling(), "the other thread runs its optimizer still"
            assert_trees_close(fr.jit(lambda state: state + 1, donate=("state",))(state), torch.ones(2))
            with pytest.raises(fr.DonatedError):
                state.sum()
            with pytest.raises(TypeError, match="`x` is not a tensor"):
                fr.nn.dropout("x", fr.key(0), 0.5)
        finally:
            other.submit(others.__exit__, None, None, None).result()
    assert not torch.compiler.is_compiling()

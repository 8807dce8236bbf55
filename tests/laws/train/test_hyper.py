"""Hyper-parameters as tensors: of row and dense optimizers, clipping, schedules, losses and private gradients.

A tensor f[] gives what its number gives, and passes vmap, grad, jvp and jit."""

import functools
import inspect
from unittest import mock

import pytest
import torch
from torch.func import grad, jacfwd, vmap
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import funcrec as fr
from funcrec import losses, optim
from funcrec.compile import _program
from funcrec.core._tree import tree_leaves
from funcrec.optim import Stage
from funcrec.optim._builtin import BUILTIN
from funcrec.testing import assert_trees_close

F64 = torch.float64
AT = torch.tensor([0.2, 0.5, 0.8], dtype=F64)
draw = lambda seed, *shape: torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
Q, C, N, ITEMS = draw(0, 5, 3), draw(1, 5, 3), draw(2, 4, 3), draw(3, 7, 3)
TARGET = torch.tensor([0, 1, 2, 3, 6])
FEATURE = fr.FeatureConfig("clicked", table="item")
PARAMS = fr.Params({"item": draw(4, 10, 2), "other": draw(5, 3, 2)}, {"w": draw(6, 2)})
BATCH = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[3], [4, 4], [1]]}), draw(7, 3))
DENSE = optim.dense(SGD, lr=0.1)
GRADS = {"t": fr.RowGrads.from_entries(torch.tensor([1, 2, 1]), draw(8, 3, 4), num_embeddings=7)}


def loss_fn(params, batch):
    acts = fr.lookup(params.tables, batch.ids, [FEATURE])["clicked"]
    score = (acts * params.dense["w"]).sum(1)  # a product of BLAS has other bits among members
    return (score - batch.label).square().mean()


def trained(sparse=None, dense=DENSE):
    """Return (the parameters after two steps, the loss)."""
    step = fr.train_step(loss_fn, sparse=sparse or optim.sgd(lr=0.1), dense=dense)
    state = step.init(PARAMS)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    return state.tables["item"], state.dense["w"], metrics["loss"]


def averaged(dense):
    state = dense.init(PARAMS.dense)
    return tuple(tree_leaves(dense.update({"w": ITEMS[0, :2]}, state, PARAMS.dense, 0)))


def private(max_norm=0.7, noise_multiplier=0.5, rows="all"):
    grads_fn = fr.private_grads(loss_fn, max_norm=max_norm, noise_multiplier=noise_multiplier, rows=rows, max_ids=2)
    _, grads = grads_fn(PARAMS, BATCH, key=fr.key(3))
    return grads.tables["item"].to_dense(), grads.dense["w"]


def row_hypers():
    """Return {name: x -> the training with a number of a built-in row optimizer}."""
    out = {}
    for name, own in BUILTIN.items():
        for p in inspect.signature(own.declare).parameters.values():
            if not isinstance(p.default, (bool, str)):
                needed = {"half_life": 2.0} if name == "rowwise_adagrad_counter" else {}
                make = lambda x, n=name, own={**needed}, k=p.name: trained(getattr(optim, n)(**{**own, k: x}))
                out[f"{name}({p.name})"] = make
    return out


CLASSES = {
    SGD: {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    Adam: {"lr": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True},
    AdamW: {"lr": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
    Adagrad: {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3},
    RMSprop: {"lr": 0.1, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.5, "centered": True},
}


def dense_of(cls, hyper):
    own = {k: x for k, x in hyper.items() if k not in ("b1", "b2")}
    return optim.dense(cls, **own, **({"betas": (hyper["b1"], hyper["b2"])} if "b1" in hyper else {}))


def dense_hypers():
    numbers = lambda hyper: [k for k, x in hyper.items() if not isinstance(x, bool)]
    make = lambda cls, key: lambda x: trained(dense=dense_of(cls, {**CLASSES[cls], key: x}))
    return {f"{cls.__name__}({k})": make(cls, k) for cls, hyper in CLASSES.items() for k in numbers(hyper)}


def scheduled(x, *stages):
    return trained(optim.sgd(lr=optim.schedule(stages, lr=x)), optim.dense(Adam, lr=optim.schedule(stages, lr=x)))


OTHERS = {
    "clip(max_norm)": lambda x: trained(optim.clip(optim.sgd(lr=0.1), max_norm=x)),
    "clip(max_value)": lambda x: trained(optim.clip(optim.sgd(lr=0.1), max_value=x)),
    "clip(max_norm) of dense": lambda x: trained(dense=optim.clip(DENSE, max_norm=x)),
    "clip(max_value) of dense": lambda x: trained(dense=optim.clip(DENSE, max_value=x)),
    "ema(decay)": lambda x: averaged(optim.ema(DENSE, decay=x)),
    "clip_by_global_norm": lambda x: (fr.clip_by_global_norm(GRADS, x)["t"].to_dense(),),
    "RowGrads.clip": lambda x: (GRADS["t"].clip(x).to_dense(),),
    "schedule(lr)": lambda x: scheduled(x, Stage("linear", 3, value=0.1)),
    "Stage(value)": lambda x: scheduled(0.1, Stage("poly", 1, value=x), Stage("constant", 3, value=x)),
    "Stage(lr_scale)": lambda x: scheduled(0.1, Stage("cosine_annealing_warm_restarts", 3, value=x, lr_scale=x)),
    "Stage(end_value)": lambda x: scheduled(
        0.1, Stage("step", 1, value=x), Stage("interpolate", 3, value=0.3, start_interpolating_iters=0, end_value=x)
    ),
    "huber": lambda x: (losses.huber(Q[:, 0], 3 * C[:, 0], delta=x),),
    "multi_task": lambda x: (losses.multi_task([losses.mse, losses.mse], weights=(x, 1.0))(Q[:, :2], C[:, :2]),),
    "in_batch_softmax": lambda x: (losses.in_batch_softmax(Q, C, log_q=None, temperature=x),),
    "contrastive": lambda x: (losses.contrastive(Q, C, temperature=x),),
    "sampled_softmax": lambda x: (losses.sampled_softmax(Q, C, N, temperature=x),),
    "full_softmax": lambda x: (losses.full_softmax(Q, ITEMS, TARGET, temperature=x),),
    "grad of full_softmax": lambda x: (grad(lambda h: losses.full_softmax(h, ITEMS, TARGET, temperature=x))(Q),),
    "gbce": lambda x: (losses.gbce(Q, C, N, num_items=9, calibration=x),),
    "private_grads(max_norm)": lambda x: private(max_norm=x),
    "private_grads(max_norm), touched": lambda x: private(max_norm=x, rows="touched"),
    "private_grads(noise)": lambda x: private(noise_multiplier=x),
}
HYPERS = row_hypers() | dense_hypers() | OTHERS
# Without these, row optimizers with numbers run their kernels, and so do those with tensors: bits are equal.
BY_FORMULA = {"rmsprop(momentum)"} | {n for n in HYPERS if "max_norm" in n}


@pytest.mark.parametrize("name", HYPERS)
def test_members_with_their_own_number_are_runs(name):
    """Under vmap over a hyper-parameter each member equals its own run with a number: by bits for row optimizers."""
    f = HYPERS[name]
    many, runs = vmap(f)(AT), [f(float(x)) for x in AT]
    exact = name in row_hypers() and name not in BY_FORMULA
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-10, "atol": 1e-12}
    for got, *need in zip(many, *runs, strict=True):
        torch.testing.assert_close(got, torch.stack(need), **close)
    assert all(bool(x.isfinite().all()) for x in many)


@pytest.mark.parametrize("name", {**dense_hypers(), **OTHERS, "adagrad(initial_accumulator)": None, "lamb(b2)": None})
def test_a_hyper_parameter_is_differentiated(name):
    """Reverse and forward derivatives by a hyper-parameter equal central differences, also under vmap."""
    f = lambda x: sum((y.sin().flatten() * torch.arange(1.0, y.numel() + 1)).sum() for y in HYPERS[name](x))
    x, h = torch.tensor(0.43, dtype=F64), 1e-5
    need = (f(x + h) - f(x - h)) / (2 * h)
    for got in (grad(f)(x), jacfwd(f)(x), vmap(grad(f))(x[None])[0]):
        torch.testing.assert_close(got, need, rtol=2e-5, atol=1e-7)


PROGRAMS = [
    "adamw(weight_decay)",
    "lion(b1)",
    "Adam(b2)",
    "RMSprop(momentum)",
    "huber",
    "Stage(value)",
    "clip(max_norm)",
]


@pytest.mark.parametrize("name", [*PROGRAMS, "private_grads(max_norm), touched"])
def test_a_hyper_parameter_is_an_argument_of_a_program(name):
    """A program takes the hyper-parameters of all members as an argument: other values need no other program."""
    f = vmap(HYPERS[name])
    with mock.patch.object(_program, "compile_graph", lambda graph, args: graph):
        compiled = fr.jit(f)
        for x in (AT, AT * 0.9):
            assert_trees_close(compiled(x), f(x), rtol=1e-12, atol=1e-14)
    assert compiled.num_compiled() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_formulas_of_dense_optimizers_are_the_classes(cls, dtype):
    """With tensors in place of all numbers an update keeps forms, and gives what the class gives within rounding."""
    hyper = CLASSES[cls]
    tensors = {k: x if isinstance(x, bool) else torch.tensor(x, dtype=F64) for k, x in hyper.items()}
    params = {"a": draw(10, 3, 2).to(dtype), "b": [draw(11).to(dtype)]}
    outs = []
    for opt in (dense_of(cls, hyper), dense_of(cls, tensors)):
        state, now = opt.init(params), params
        for t in range(4):
            grads = {"a": draw(20 + t, 3, 2).to(dtype), "b": [draw(30 + t).to(dtype)]}
            now, state = opt.update(grads, state, now, t)
        outs.append((now, state))
    kinds = [[(x.shape, x.dtype) for x in tree_leaves(out)] for out in outs]
    assert kinds[0] == kinds[1]
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    assert_trees_close(outs[1], outs[0], **close)


def test_a_parameter_of_a_loss_outside_of_its_range_makes_it_nan():
    """The value of a tensor is not checked before the work: outside of its range the loss or the gradient is NaN."""
    bad = torch.tensor(-1.0, dtype=F64)
    for name in ("huber", "in_batch_softmax", "contrastive", "sampled_softmax", "full_softmax", "gbce"):
        assert bool(HYPERS[name](bad)[0].isnan())
    for name in ("private_grads(max_norm)", "private_grads(noise)"):
        assert all(bool(x.isnan().all()) for x in HYPERS[name](bad))


def test_other_dense_classes_take_no_followed_number():
    """A class without a formula refuses a number that vmap or grad follows, in words."""
    make = functools.partial(optim.dense, torch.optim.NAdam, lr=0.1)
    for transform in (vmap, lambda f: lambda x: grad(f)(x[0])):
        with pytest.raises(TypeError, match=r"`momentum_decay` of NAdam cannot be followed"):
            transform(lambda x: make(momentum_decay=x))(AT)

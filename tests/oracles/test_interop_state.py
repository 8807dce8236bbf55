"""State dicts of TorchRec's modules and optimizers convert to states of funcrec and back.

Predictions and training are equal."""

from dataclasses import replace

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")
from programs.torchrec_states import (
    EPS,
    LR,
    TABLES,
    WIDTH,
    batch,
    configs,
    features,
    fresh,
    loss_of,
    models,
    our_step,
    scattered,
    theirs,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

load, to = fr.interop.load_torchrec_state_dict, fr.interop.to_torchrec_state_dict
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


# -- modules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_collections_predict_the_same(dtype):
    """The rows of an EmbeddingBagCollection and of an EmbeddingCollection, loaded here, give the lookups of the two
    modules. The state dict on the way back passes strict loading and keeps the modules' bits."""
    tables = tuple(replace(t, dtype=dtype) for t in TABLES)
    ids = batch(0).ids
    bags = scattered(EmbeddingBagCollection(configs(tables=tables)))
    params = load(fresh(tables), bags.state_dict())
    got, want = fr.lookup(params.tables, ids, features()), bags(theirs(ids))
    assert_trees_close(got.values.float(), want.values().detach(), rtol=1e-6 if dtype == torch.float32 else 2e-3)
    sequences = scattered(EmbeddingCollection(configs("none", tables)))
    rows = load(fresh(tables), sequences.state_dict())
    # an EmbeddingCollection of f16 returns f16 rows, which differ from our f32 rows
    if dtype == torch.float32:
        answer, want = fr.lookup_sequence(rows.tables, ids, features("none")), sequences(theirs(ids))
        assert_trees_close(
            {k: answer[k].unpad().values for k in want}, {k: x.values().detach() for k, x in want.items()}
        )
    for module, own in ((bags, params), (sequences, rows)):
        before = {k: v.clone() for k, v in module.state_dict().items()}
        other = scattered(type(module)(configs("sum" if module is bags else "none", tables)).double().to(dtype))
        other.load_state_dict(to(own, other.state_dict()))
        assert_trees_close(dict(other.state_dict()), before)
        assert_trees_close(load(fresh(tables), to(own, module.state_dict())), own)


def answers(name, model, params, b):
    logits = model.apply(params, b)
    return logits.sigmoid() if name == "deepfm" else logits


def batch_of(name, seed=0):
    b = batch(seed)
    if name != "dlrm":
        return b
    lists = b.ids.to_lists()
    ids = fr.KeyedJaggedTensor.from_lists({"item": lists["clicked"], "user": lists["user"]}, dtype=torch.int64)
    return fr.Batch(ids, b.label, b.dense)


@pytest.mark.parametrize("prefix", ["", "module.model."])
@pytest.mark.parametrize("name", ["dlrm", "dlrm, shared", "dcn", "deepfm"])
def test_models_predict_the_same(name, prefix):
    """TorchRec's DLRM, DLRM_DCN and SimpleDeepFMNN, loaded here, give the same predictions, under any prefix of their
    names. The state dict on the way back passes strict loading and keeps the modules' bits."""
    module, model = models()[name]
    scattered(module)
    held = {prefix + k: v for k, v in module.state_dict().items()}
    params = load(model.init(fr.key(3)), held)
    b = batch_of(name)
    want = module(b.dense, theirs(b.ids)).squeeze(1).detach()
    assert_trees_close(answers(name, model, params, b), want, rtol=1e-5, atol=1e-5)
    assert want.std() > 1e-3
    other = models()[name][0]
    back = to(params, held)
    assert list(back) == list(held)
    other.load_state_dict({k.removeprefix(prefix): v for k, v in back.items()}, strict=True)
    assert_trees_close(dict(other.state_dict()), dict(module.state_dict()))
    assert_trees_close(load(model.init(fr.key(4)), back), params)
    assert not {x.data_ptr() for x in held.values()} & {x.data_ptr() for x in params.tables.values()}


def test_a_model_of_ones_own_is_loaded_by_its_names():
    """A user's module has a collection and layers of torch. The ends of their names find its parameters and buffers,
    named as in `interop.module`. This includes integer buffers."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = EmbeddingBagCollection(configs())
            self.over = torch.nn.Sequential(torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))

        def forward(self, ids):
            return self.over(self.bags(ids).values())

    net = scattered(Own())
    net(theirs(batch(0).ids))
    params, buffers, apply = fr.interop.module(Own().over)
    state = load(fresh(dense={"over": params, "buffers": buffers}), net.state_dict())
    x = fr.lookup(state.tables, batch(1).ids, features()).values
    got, _ = apply(state.dense["over"], state.dense["buffers"], x)
    assert_trees_close(got, net.eval()(theirs(batch(1).ids)).detach(), rtol=1e-5, atol=1e-6)
    other = Own()
    other.load_state_dict(to(state, other.state_dict()))
    assert_trees_close(dict(other.state_dict()), dict(net.state_dict()))


# -- training goes on --------------------------------------------------------------------------------------------------

FUSED = {  # name -> (our optimizer, the optimizer class that TorchRec fuses, the arguments of the class)
    "sgd": (fr.optim.sgd(LR), torch.optim.SGD, {"lr": LR}),
    "adagrad": (fr.optim.adagrad(LR, eps=EPS), torch.optim.Adagrad, {"lr": LR, "eps": EPS}),
    "rowwise_adagrad": (fr.optim.rowwise_adagrad(LR, eps=EPS), RowWiseAdagrad, {"lr": LR, "eps": EPS}),
}


def their_steps(module, opts, w, seeds):
    losses = []
    for seed in seeds:
        b = batch(seed)
        loss = loss_of(module(theirs(b.ids)).values(), w, b.label)
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        losses.append(loss.detach())
    return losses


def our_steps(step, state, seeds):
    losses = []
    for seed in seeds:
        state, metrics = step(state, batch(seed))
        losses.append(metrics["loss"])
    return state, losses


@pytest.mark.parametrize("name", FUSED)
def test_training_goes_on_with_fused_state(name):
    """After three fused steps, the tables and optimizer state of TorchRec are loaded here. Three more steps on both
    sides give the same losses, tables and state. So do three more steps after a fresh module loads our state."""
    sparse, cls, options = FUSED[name]
    make = lambda: FusedEmbeddingBagCollection(configs(), cls, options)
    module, w = make(), torch.linspace(-1, 1, WIDTH)
    fused = module.fused_optimizer()
    their_steps(module, [fused], w, range(3))
    step = our_step(sparse, fr.optim.dense(torch.optim.SGD, lr=0.0))
    state = load(step.init(fresh(dense={"w": w})), {**module.state_dict(), "w": w})
    state = load(state, fused.state_dict(), step=3)
    assert_trees_close(dict(state.tables), rows_of(module))
    want = their_steps(module, [fused], w, range(3, 6))
    state, got = our_steps(step, state, range(3, 6))
    assert_trees_close(got, want, **CLOSE)
    assert_trees_close(dict(state.tables), rows_of(module), **CLOSE)
    other = make()
    other.load_state_dict({k: v for k, v in to(state, {**other.state_dict(), "w": w}).items() if k != "w"}, strict=True)
    other.fused_optimizer().load_state_dict(to(state, other.fused_optimizer().state_dict()))
    want = their_steps(other, [other.fused_optimizer()], w, range(6, 9))
    state, got = our_steps(step, state, range(6, 9))
    assert_trees_close(got, want, **CLOSE)
    assert_trees_close(dict(state.tables), rows_of(other), **CLOSE)


def rows_of(module):
    return {k.split(".")[-2]: v.detach() for k, v in module.state_dict().items()}


class Whole(torch.nn.Module):
    """A collection and a vector, trained by optimizers of named parameters."""

    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(configs(tables=TABLES))
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def optimizer(self, cls):
        named = dict(self.named_parameters())
        make = lambda **own: KeyedOptimizerWrapper(own, lambda ps: cls(ps, lr=1e-2))
        tables = make(**{k: p for k, p in named.items() if k != "w"})
        return CombinedOptimizer([("", tables), ("", make(w=named["w"]))])


KEYED = {
    "adam": (fr.optim.adam(1e-2), torch.optim.Adam),
    "adagrad": (fr.optim.adagrad(1e-2, eps=1e-10), torch.optim.Adagrad),
}


@pytest.mark.parametrize("name", KEYED)
def test_training_goes_on_with_keyed_state(name):
    """Training also continues with the state dict of a KeyedOptimizer of tables and dense weights, which holds the
    step. Converted back, the state dict passes strict loading and equals that of TorchRec. (Every batch names every
    row, because Adam in torch is not lazy.)"""
    sparse, cls = KEYED[name]
    net = Whole()
    opt = net.optimizer(cls)
    run = lambda net, opt, seeds: [every_row(net, opt, seed) for seed in seeds]
    run(net, opt, range(3))
    step = our_step(sparse, fr.optim.dense(cls, lr=1e-2))
    state = load(step.init(fresh(dense={"w": torch.zeros(WIDTH)})), net.state_dict())
    state = load(state, opt.state_dict())
    assert state.step == 3
    want = run(net, opt, range(3, 6))
    got = []
    for seed in range(3, 6):
        state, metrics = step(state, full_batch(seed))
        got.append(metrics["loss"])
    assert_trees_close(got, want, **CLOSE)
    held = {k: v.detach() for k, v in net.state_dict().items()}
    assert_trees_close(to(state, net.state_dict()), held, rtol=1e-4, atol=1e-5)
    other = Whole()
    other_opt = other.optimizer(cls)
    every_row(other, other_opt, 0)
    other.load_state_dict(to(state, other.state_dict()), strict=True)
    other_opt.load_state_dict(to(state, other_opt.state_dict()))
    assert_trees_close(other_opt.state_dict()["state"], opt.state_dict()["state"], rtol=1e-4, atol=1e-6)
    assert_trees_close(run(other, other_opt, range(6, 8)), run(net, opt, range(6, 8)), **CLOSE)


def full_batch(seed):
    """Return a batch with every row of every table in each bag, and some rows twice."""
    more = batch(seed).ids.to_lists()
    lists = {k: [[*range(7 if k == "clicked" else 5), *bag] for bag in bags] for k, bags in more.items()}
    return replace(batch(seed), ids=fr.KeyedJaggedTensor.from_lists(lists))


def every_row(net, opt, seed):
    b = full_batch(seed)
    loss = loss_of(net.bags(theirs(b.ids)).values(), net.w, b.label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach()


FBGEMM = {  # rule: {slot: FBGEMM's name of the slot}, as in a sharded module's optimizer
    "adagrad": {"sum": "momentum1"},
    "rowwise_adagrad": {"sum": "momentum1"},
    "adam": {"mean": "momentum1", "square": "exp_avg_sq"},
    "adamw": {"mean": "momentum1", "square": "exp_avg_sq"},
    "partial_rowwise_adam": {"mean": "momentum1", "square": "exp_avg_sq"},
    "lamb": {"mean": "momentum1", "square": "exp_avg_sq"},
    "partial_rowwise_lamb": {"mean": "momentum1", "square": "exp_avg_sq"},
    "lars_sgd": {"momentum": "momentum1"},
    "lion": {"mean": "momentum1"},
}


@pytest.mark.parametrize("name", FBGEMM)
def test_state_of_every_fused_rule_comes_back(name):
    """The state that FBGEMM keeps for each rule, under FBGEMM's names and shapes, becomes our slots, and converts
    back."""
    step = our_step(getattr(fr.optim, name)(LR), fr.optim.dense(torch.optim.SGD, lr=LR))
    state, _ = our_steps(step, step.init(fresh(dense={"w": torch.ones(WIDTH)})), range(2))
    form = {
        f"bags.embedding_bags.{t}.weight": {f"{t}.{FBGEMM[name][k]}": x.flatten() if x.dim() == 1 else x
                                            for k, x in own.items()}
        for t, own in state.slots.items()
    }  # fmt: skip
    empty = {"state": {k: {n: torch.zeros_like(x) for n, x in own.items()} for k, own in form.items()}}
    back = to(state, empty)
    assert_trees_close(back["state"], form)
    got = load(step.init(state.params), back, step=2)
    assert_trees_close((got.slots, got.step), (state.slots, state.step))

"""Nested tensors and nn.Modules of torch give the same values through interop as in torch."""

import copy
import inspect
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import nn

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

from_nested, to_nested, module = fr.interop.from_nested, fr.interop.to_nested, fr.interop.module


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- nested tensors ------------------------------------------------------------------------------------------------


@given(frs.jagged_tensors(weighted=False, row_shape=()), frs.jagged_tensors(weighted=False, row_shape=(2,)))
def test_bags_come_back(x, rows):
    """Bags converted to a nested tensor and back are the bags without padding, in the same memory. The rows of the
    nested tensor are the bags."""
    for own in (x, rows):
        nested = to_nested(own)
        back = from_nested(nested)
        assert_trees_close(back, own.unpad())
        assert back.values.data_ptr() == own.unpad().values.data_ptr() and back.offsets is own.offsets
        if own.num_bags:
            assert [bag.tolist() for bag in nested.unbind()] == own.to_lists()


def test_nested_tensors_come_back():
    """A nested tensor made by torch is converted to bags and back in the same memory. Gradients pass both ways."""
    bags = [normal(0, 2, 3), normal(1, 0, 3), normal(2, 4, 3)]
    nested = torch.nested.nested_tensor(bags, layout=torch.jagged, requires_grad=True)
    back = to_nested(from_nested(nested))
    assert back.values().data_ptr() == nested.values().data_ptr()
    assert_trees_close(list(back.unbind()), bags)
    (back.values().square().sum()).backward()
    assert_trees_close([g.clone() for g in nested.grad.unbind()], [2 * bag for bag in bags])


JAGGED = fr.JaggedTensor.from_lists([[1.0], [2.0, 3.0]])
NESTED = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
HOLES = torch.nested.narrow(torch.ones(2, 9), 1, torch.tensor([0, 1]), torch.tensor([3, 4]), layout=torch.jagged)
NO_BAGS = {
    "a list": (lambda: from_nested([[1]]), TypeError, "`x` is not a nested tensor"),
    "a tensor": (lambda: from_nested(torch.ones(2)), TypeError, "`x` is not a nested tensor"),
    "strided": (lambda: from_nested(torch.nested.nested_tensor([torch.ones(2)])), TypeError, "has another layout"),
    "holes": (lambda: from_nested(HOLES), ValueError, "holes between its bags"),
    "columns": (lambda: from_nested(NESTED.transpose(1, 2)), ValueError, "ragged in another dimension"),
    "nested already": (lambda: to_nested(NESTED), TypeError, "`x` is not a JaggedTensor"),
    "weighted": (lambda: to_nested(fr.JaggedTensor.from_lists([[1]], weights=[[0.5]])), ValueError, "has weights"),
    "in grad": (lambda: torch.func.grad(lambda v: to_nested(fr.JaggedTensor(v, JAGGED.offsets)).values().sum())(
        JAGGED.values), TypeError, "a transform of torch.func"),
    "in vmap": (lambda: torch.func.vmap(lambda v: to_nested(fr.JaggedTensor(v, JAGGED.offsets)).values())(
        torch.ones(2, 3)), TypeError, "a transform of torch.func"),
}  # fmt: skip


# -- modules -------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()))


class Averaged(nn.Module):
    """A module with a buffer that forward replaces, a boolean buffer, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("kept", torch.tensor([True, False, True, True]))
        self.scale = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear((x - self.mean) * self.scale * self.kept)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def frozen_norm():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net[1].eval()
    return net


MODULES = {
    "norms": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 1)),
    "cumulative": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None, affine=False), nn.Linear(4, 1)),
    "tied": Tied,
    "averaged": Averaged,
    "recurrent": Recurrent,
    "frozen_norm": frozen_norm,
    "normed": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
    ),
    "no_buffer": lambda: nn.Linear(4, 1, bias=False),
}


@pytest.fixture(params=MODULES)
def net(request):
    torch.manual_seed(0)
    return MODULES[request.param]()


def loss_of(net, x):
    return net(x).square().mean()


@pytest.mark.parametrize("train", [False, True])
def test_apply_is_the_module(net, train):
    """apply gives the outputs of the module bit for bit through three calls, and the module's final buffers, in train()
    and eval(). The gradient equals that of backward."""
    theirs = copy.deepcopy(net)
    params, buffers, apply = module(net)
    before = copy.deepcopy((dict(net.state_dict()), params))
    if not train:
        theirs.eval()

    def loss(params, buffers, x):
        y, buffers = apply(params, buffers, x, train=train)
        return y.square().mean(), buffers

    for i in range(3):
        x = normal(i, 5, 4)
        want = loss_of(theirs, x)
        grads, (got, buffers) = torch.func.grad_and_value(loss, has_aux=True)(params, buffers, x)
        theirs.zero_grad()
        want.backward()
        assert torch.equal(got, want.detach())
        want = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
        # the sums of an LSTM are rounded in another order
        assert_trees_close(grads, want, rtol=1e-5, atol=1e-7)
    held = {**{n: p for n, p in theirs.named_parameters() if not p.requires_grad}, **dict(theirs.named_buffers())}
    assert_trees_close(buffers, {n: b if b.is_floating_point() else b.double() for n, b in held.items()})
    # the calls wrote nothing
    assert_trees_close((dict(net.state_dict()), params), before)


def test_apply_is_compiled_and_mapped(net):
    """apply gives the same values and buffers when fr.jit stages it, and under vmap over members. jit refuses a batch
    norm that reads its count on the host. torch raises for modules without a vmap rule (LSTM, spectral norm)."""
    params, buffers, apply = module(net)
    x = normal(0, 5, 4)
    run = lambda p, b, x: apply(p, b, x, train=True)
    alone = run(params, buffers, x)
    if isinstance(net, nn.Sequential) and getattr(net[0], "momentum", 0.1) is None:
        with pytest.raises(TypeError, match="reads a tensor's value on the host"):
            fr.jit(run).lower(params, buffers, x)
        return
    staged = fr.jit(run).lower(params, buffers, x)
    flat = staged.graph(*(eval(path, {"p": params, "b": buffers, "x": x}) for path in staged.reads))
    assert_trees_close(list(flat), torch.utils._pytree.tree_leaves(alone), rtol=1e-6, atol=1e-6)
    stacked = torch.utils._pytree.tree_map(lambda t: torch.stack([t, t]), (params, buffers))
    mapped = torch.func.vmap(run, in_dims=(0, 0, None))
    if any(type(part).__name__ in ("LSTM", "_SpectralNorm") for part in net.modules()):
        with pytest.raises(RuntimeError):
            mapped(*stacked, x)
        return
    got = torch.utils._pytree.tree_map(lambda t: t[1], mapped(*stacked, x))
    assert_trees_close(got, alone, rtol=1e-6, atol=1e-6)


def test_the_module_may_change_afterwards(net):
    """Later changes of the module's values, mode or parts do not change apply."""
    params, buffers, apply = module(net)
    x = normal(0, 5, 4)
    before = apply(params, buffers, x, train=True)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    net.eval()
    assert_trees_close(apply(params, buffers, x, train=True), before)
    forms = inspect.getclosurevars(apply).nonlocals["forms"].values()
    # the forms have no memory, and apply can therefore read nothing from them
    assert all(t.is_meta for form in forms for t in (*form.parameters(), *form.buffers()))


class Waiting(nn.Module):
    """A module that lets other threads run in the middle of a call."""

    def forward(self, x):
        time.sleep(0.005)
        return x


def test_threads_do_not_meet_in_a_module():
    """Simultaneous calls from many threads give each call's own values. No call sees the parameters or running
    statistics of another call."""
    params, buffers, apply = module(nn.Sequential(nn.BatchNorm1d(4), Waiting(), nn.Linear(4, 1)))
    x = normal(0, 32, 4)
    scaled = [{n: p * (i + 1) for n, p in params.items()} for i in range(4)]
    run = lambda p: [apply(p, buffers, x, train=True) for _ in range(3)]
    alone = [run(p) for p in scaled]
    with ThreadPoolExecutor(4) as pool:
        assert_trees_close(list(pool.map(run, scaled)), alone)


def test_dropout_draws_from_the_key():
    """In train mode, nn.Dropout draws from the key. The same key drops the same elements, and each layer drops
    different elements. The mean is kept. torch's generator does not change. In eval() nothing is dropped."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5))
    _, _, apply = module(net)
    x, state = torch.ones(20_000), torch.get_rng_state()
    run = lambda seed: apply({}, {}, x, train=True, key=fr.key(seed))[0]
    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))
    assert abs(float(run(0).mean()) - 1) < 0.05 and abs(float((run(0) > 0).float().mean()) - 0.25) < 0.02
    assert torch.equal(apply({}, {}, x)[0], x) and torch.equal(torch.get_rng_state(), state)
    staged = fr.jit(lambda x, key: apply({}, {}, x, train=True, key=key)[0]).lower(x, fr.key(0))
    assert torch.equal(staged.graph(x, fr.key(0))[0], run(0))


def test_a_module_in_eval_mode_can_train():
    """`train=True` trains a module that was given in eval mode, as `.train()` does; dropout of 0 needs no key."""
    net, x = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.0)), torch.randn(5, 2)
    params, buffers, apply = module(net.eval())
    assert torch.equal(apply(params, buffers, x)[0], net(x))
    got, after = apply(params, buffers, x, train=True)
    assert torch.equal(got, net.train()(x)) and torch.equal(after["0.running_mean"], net[0].running_mean)


class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.count.add_(1)
        return x


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.ones(2, requires_grad=True)


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.tensor(2**60 + 1))


LINEAR, ONES = nn.Linear(2, 1), torch.ones(3, 2)
PARAMS, BUFFERS, APPLY = module(LINEAR)
drawn = lambda x: module(Functional())[2]({}, {}, x, train=True, key=fr.key(0))[0]
NO_MODULE = {
    "a function": (lambda: module(lambda x: x), TypeError, "`nn_module` is not a module"),
    "lazy": (lambda: module(nn.LazyLinear(2)), TypeError, "parameters of no shape yet"),
    "complex": (lambda: module(nn.Linear(2, 1, dtype=torch.complex64)), TypeError, "has complex numbers"),
    "a complex buffer": (lambda: module(Turning()), TypeError, "['turn']"),
    "wide integers": (lambda: module(Wide()), ValueError, "has integers that f64 does not hold"),
    "max_norm": (lambda: module(nn.Embedding(3, 2, max_norm=1.0)), TypeError, "renormalised in place"),
    "loose": (lambda: module(Loose()), TypeError, "parametrizations.weight_norm"),
    "no params": (lambda: APPLY({}, BUFFERS, ONES), ValueError, "`params` are not this module's"),
    "a parameter more": (lambda: APPLY({**PARAMS, "more": ONES}, BUFFERS, ONES), ValueError, "`params` are not"),
    "a parameter's shape": (lambda: APPLY({**PARAMS, "bias": ONES}, BUFFERS, ONES), ValueError, "has another shape"),
    "a parameter's dtype": (lambda: APPLY({**PARAMS, "bias": torch.tensor([1])}, BUFFERS, ONES), TypeError,
        "is not a float tensor"),
    "buffers of another": (lambda: APPLY(PARAMS, {"mean": ONES}, ONES), ValueError, "`buffers` are not this module's"),
    "no flag": (lambda: APPLY(PARAMS, BUFFERS, ONES, train="no"), TypeError, "`train` is not a truth value"),
    "no key": (lambda: module(nn.Dropout(0.5))[2]({}, {}, ONES, train=True), TypeError, "`key` is missing"),
    "a seed": (lambda: module(nn.Dropout(0.5))[2]({}, {}, ONES, train=True, key=3), TypeError, "`key` is not a key"),
    "torch's generator": (lambda: module(Functional())[2]({}, {}, ONES, train=True, key=fr.key(0)), TypeError,
        "draws from torch's generator"),
    "torch's generator, in grad": (lambda: torch.func.grad(lambda x: drawn(x).sum())(ONES), TypeError,
        "draws from torch's generator"),
    "torch's generator, in vjp": (lambda: torch.func.vjp(drawn, ONES), TypeError, "draws from torch's generator"),
    "torch's generator, in jvp": (lambda: torch.func.jvp(drawn, (ONES,), (ONES,)), TypeError,
        "draws from torch's generator"),
    "torch's generator, in vmap": (lambda: torch.func.vmap(drawn, randomness="different")(ONES), TypeError,
        "draws from torch's generator"),
    "writes": (lambda: module(Counting())[2]({"count": torch.zeros(())}, {}, ONES), TypeError,
        "writes to its parameters"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*NO_BAGS, *NO_MODULE])
def test_a_wrong_argument_is_named(name):
    """A value raises in four parts if it is no nested tensor, no bags, or no module that can be a function."""
    call, kind, fragment = {**NO_BAGS, **NO_MODULE}[name]
    with pytest.raises(kind) as error:
        call()
    text = str(error.value)
    assert all(f in text for f in (fragment, "funcrec", "\n  got   ", "\n  need  ")), text
    assert "\n  try   " in text, text


# -- a DLRM of torch's parts ---------------------------------------------------------------------------------------

TABLES = (fr.TableConfig("item", 9, 4), fr.TableConfig("user", 7, 4))
FEATURES = tuple(fr.FeatureConfig(t.name, table=t.name) for t in TABLES)


class DLRMDense(nn.Module):
    """The dense part of a DLRM: bottom and top layers with batch norm. Between them are the dot products of all
    pairs."""

    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())
        layers = nn.Linear(4 + 3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        self.top = nn.Sequential(*layers)

    def forward(self, pooled, dense):
        first = self.bottom(dense)
        x = torch.cat([first[:, None], pooled.unflatten(1, (2, 4))], 1)
        pairs = (x @ x.mT)[:, *torch.tril_indices(3, 3, -1)]
        return self.top(torch.cat([first, pairs], 1))[:, 0]


def batch(step):
    draw = torch.Generator().manual_seed(step)
    lists = {t.name: [torch.randint(0, 5, (n,), generator=draw).tolist() for n in (2, 0, 1, 3, 1, 2)] for t in TABLES}
    label = torch.randint(0, 2, (6,), generator=draw).float()
    return fr.Batch(fr.KeyedJaggedTensor.from_lists(lists), label, torch.randn(6, 3, generator=draw))


def train_theirs(net, tables, steps):
    """Train nn.EmbeddingBag and the module with the optimizers of torch."""
    bags = {n: nn.EmbeddingBag.from_pretrained(t.clone(), False, mode="sum", include_last_offset=True) for n, t in
            tables.items()}  # fmt: skip
    opts = [torch.optim.SGD([b.weight for b in bags.values()], lr=0.1), torch.optim.Adam(net.parameters(), lr=1e-2)]
    losses = []
    for i in range(steps):
        b = batch(i)
        parts = [(bags[f.name], b.ids[f.name].unpad()) for f in FEATURES]
        pooled = torch.cat([bag(x.values, x.offsets) for bag, x in parts], 1)
        loss = F.binary_cross_entropy_with_logits(net(pooled, b.dense), b.label)
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        losses.append(loss.detach())
    return losses, {n: b.weight.detach() for n, b in bags.items()}


def test_a_dlrm_of_a_module_and_tables_trains_as_torch_does():
    """Five steps of train_step over tables and a module give the losses, tables, parameters and running statistics of
    torch. The compiled step writes the tables in place."""
    torch.manual_seed(0)
    net, tables = DLRMDense(), fr.init(fr.key(0), TABLES)
    params, buffers, apply = module(net)

    def loss_fn(p, b):
        pooled = fr.lookup(p.tables, b.ids, FEATURES).values
        z, buffers = apply(p.dense["net"], p.dense["buffers"], pooled, b.dense, train=True)
        return F.binary_cross_entropy_with_logits(z, b.label), buffers

    dense = fr.optim.dense(torch.optim.Adam, lr=1e-2)
    merge = lambda dense, buffers: {**dense, "buffers": buffers}
    step = fr.train_step(loss_fn, sparse=fr.optim.sgd(0.1), dense=dense, has_aux=True, merge=merge)
    state, mine = step.init(fr.Params(tables, {"net": params, "buffers": buffers})), []
    assert fr.jit(step, donate=("state",)).lower(state, batch(0)).written == ("state.tables['item']",
                                                                              "state.tables['user']")  # fmt: skip
    for i in range(5):
        state, metrics = step(state, batch(i))
        mine.append(metrics["loss"])
    losses, weights = train_theirs(net, tables, 5)
    assert_trees_close(mine, losses, rtol=1e-5, atol=1e-6)
    assert_trees_close(dict(state.tables), weights, rtol=1e-5, atol=1e-6)
    assert_trees_close(state.dense["net"], {n: p.detach() for n, p in net.named_parameters()}, rtol=1e-4, atol=1e-5)
    held = {n: b if b.is_floating_point() else b.double() for n, b in net.named_buffers()}
    assert_trees_close(state.dense["buffers"], held, rtol=1e-5, atol=1e-6)
    assert state.dense["buffers"]["top.1.num_batches_tracked"] == 5


def test_running_statistics_are_not_forgotten():
    """A step whose dense parameters hold the running statistics of a module requires `merge` for these statistics."""
    params, buffers, _ = module(nn.BatchNorm1d(2))
    step = fr.train_step(lambda p, b: p.dense["net"]["weight"].sum(), sparse=fr.optim.sgd(),
                         dense=fr.optim.dense(torch.optim.SGD, lr=0.1))  # fmt: skip
    with pytest.raises(ValueError, match="`merge` is missing"):
        step.init(fr.Params({}, {"net": params, "buffers": buffers}))

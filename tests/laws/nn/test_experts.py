"""mmoe and ple against loops over tasks and experts, and what gates of one expert make of them."""

import pytest
import torch
from torch.func import grad, vmap

import funcrec as fr
from funcrec import nn

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ACTIVE = torch.tanh


def double(layer):
    return fr.tree.map(lambda x: x.double(), layer.init(fr.key(0)))


def expert(params, x):
    """Apply an MLP whose every layer is followed by the activation."""
    for own in params["linear"]:
        x = ACTIVE(x @ own["weight"].T + own["bias"])
    return x


def mix(gate, x, outputs):
    weights = [(x * row).sum(-1) for row in gate]
    total = sum(w.exp() for w in weights)
    return sum((w.exp() / total)[..., None] * y for w, y in zip(weights, outputs, strict=True))


def test_mmoe_is_a_loop():
    """Each task's output is the sum of all experts, by the softmax of its gate."""
    layer = nn.mmoe(4, 3, num_experts=2, sizes=(5, 6), activation=ACTIVE)
    params = double(layer)
    outputs = [expert(p, X) for p in params["experts"]]
    want = torch.stack([mix(gate, X, outputs) for gate in params["gate"]], -2)
    torch.testing.assert_close(layer.apply(params, X), want)


def test_ple_is_a_loop():
    """Three levels: a task mixes its own and the shared experts; the shared input of the next level mixes all."""
    layer = nn.ple(4, 2, shared_experts=1, task_experts=2, sizes=((5,), (6, 3), (2,)), activation=ACTIVE)
    params = double(layer)
    own, shared = [X, X], X
    for p in params:
        tasks = [[expert(e, x) for e in experts] for experts, x in zip(p["tasks"], own, strict=True)]
        common = [expert(e, shared) for e in p["shared"]]
        own = [mix(g, x, [*found, *common]) for g, x, found in zip(p["gates"], own, tasks, strict=True)]
        if "gate" in p:
            shared = mix(p["gate"], shared, [*tasks[0], *tasks[1], *common])
    torch.testing.assert_close(layer.apply(params, X), torch.stack(own, -2))
    assert [("gate" in p) for p in params] == [True, True, False]


def test_one_expert_is_that_expert():
    """With one expert every task has its output, whatever the gate."""
    layer = nn.mmoe(4, 3, num_experts=1, sizes=(5,), activation=ACTIVE)
    params = double(layer)
    want = expert(params["experts"][0], X)
    torch.testing.assert_close(layer.apply(params, X), want[:, None].expand(-1, 3, -1))


@pytest.mark.parametrize("name", ["mmoe", "ple"])
def test_they_compose_with_transforms(name, interpreted):
    """vmap over the batch, jit and gradients have the numbers of the plain call; an empty batch has no rows."""
    layers = {
        "mmoe": nn.mmoe(4, 2, num_experts=3, sizes=(5,), activation=ACTIVE),
        "ple": nn.ple(4, 2, shared_experts=1, task_experts=1, sizes=((5,), (3,)), activation=ACTIVE),
    }
    layer = layers[name]
    params = double(layer)
    want = layer.apply(params, X)
    torch.testing.assert_close(vmap(layer.apply, in_dims=(None, 0))(params, X), want)
    torch.testing.assert_close(fr.jit(layer.apply)(params, X), want)
    assert layer.apply(params, X[:0]).shape == (0, *want.shape[1:])
    for i in range(2):  # a task that nothing is asked of moves no gate of its own
        other = grad(lambda p, i=i: layer.apply(p, X)[:, 1 - i].square().sum())(params)
        gate = other["gate"][i] if name == "mmoe" else other[-1]["gates"][i]
        own = grad(lambda p, i=i: layer.apply(p, X)[:, i].square().sum())(params)
        assert not gate.any() and (own["gate"][i] if name == "mmoe" else own[-1]["gates"][i]).any()


@pytest.mark.parametrize("name", ["experts", "gate", "level", "sizes", "width", "ple gate", "ple experts"])
def test_what_does_not_fit_is_refused(name):
    """Parameters of another layer, no level and inputs of another width are named in four parts."""
    mmoe = nn.mmoe(4, 2, num_experts=3, sizes=(5,))
    ple = nn.ple(4, 2, shared_experts=1, task_experts=1, sizes=((5,),))
    params = mmoe.init(fr.key(0))
    level = ple.init(fr.key(0))[0]
    calls = {
        "ple gate": lambda: ple.apply([{**level, "gates": [torch.ones(7, 4)] * 2}], X.float()),
        "ple experts": lambda: ple.apply([{**level, "tasks": [[], level["tasks"][1]]}], X.float()),
        "experts": lambda: mmoe.apply({**params, "experts": params["experts"][:2]}, X.float()),
        "gate": lambda: mmoe.apply({**params, "gate": params["gate"][:1]}, X.float()),
        "level": lambda: ple.apply([], X.float()),
        "sizes": lambda: nn.ple(4, 2, shared_experts=1, task_experts=1, sizes=()),
        "width": lambda: mmoe.apply(params, X.float()[:, :3]),
    }
    with pytest.raises((TypeError, ValueError), match=r"funcrec\.nn") as error:
        calls[name]()
    assert "\n  got   " in str(error.value) and "\n  need  " in str(error.value)

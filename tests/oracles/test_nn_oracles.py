"""The layers of funcrec.nn equal the layers of torch.nn and explicit formulas."""

import itertools
import math

import pytest
import torch

import funcrec as fr
from funcrec import nn


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def copy_linear(module: torch.nn.Linear) -> dict:
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def test_linear_is_torch_linear():
    """Values and gradients equal those of torch.nn.Linear. Its state dict is the parameters."""
    module, x = torch.nn.Linear(5, 3).double(), normal(0, 7, 5)
    layer, params = nn.linear(5, 3), copy_linear(module)
    assert torch.equal(layer.apply(params, x), module(x))
    module(x).sin().sum().backward()
    gradient = torch.func.grad(lambda p: layer.apply(p, x).sin().sum())(params)
    torch.testing.assert_close(gradient, {"weight": module.weight.grad, "bias": module.bias.grad})


@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_batch_norm_is_torch_batch_norm(momentum):
    """Training, evaluation, running statistics and gradients equal those of torch.nn.BatchNorm1d over several
    batches."""
    module = torch.nn.BatchNorm1d(4, momentum=momentum).double()
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    layer = nn.batch_norm(4, momentum=momentum)
    params = {"scale": module.weight.detach(), "shift": module.bias.detach()}
    stats = {k: v.double() for k, v in layer.init_stats().items()}
    for seed in range(3):
        x = normal(seed, 6, 4) * 3 + 1
        y, stats = layer.train_apply(params, x, None, stats)
        torch.testing.assert_close(y, module(x))
        torch.testing.assert_close(stats, {"mean": module.running_mean, "var": module.running_var})
    x = normal(9, 6, 4).requires_grad_()
    module(x).sin().sum().backward()
    d_params, d_x = torch.func.grad(lambda p, x: layer.train_apply(p, x, None, stats)[0].sin().sum(), argnums=(0, 1))(
        params, x.detach()
    )
    torch.testing.assert_close(d_params, {"scale": module.weight.grad, "shift": module.bias.grad})
    torch.testing.assert_close(d_x, x.grad)
    stats = {"mean": module.running_mean, "var": module.running_var}
    torch.testing.assert_close(layer.apply(params, x.detach(), stats), module.eval()(x).detach())


@pytest.mark.parametrize("final", [None, torch.relu])
def test_mlp_with_batch_norm_is_a_sequential(final):
    """The MLP equals a Sequential of Linear, BatchNorm1d, ReLU, ..., in training and in evaluation."""
    parts, hidden = [], (5, 4, 3)
    for i, (a, b) in enumerate(itertools.pairwise(hidden)):
        last = i == len(hidden) - 2 and final is None
        parts += [torch.nn.Linear(a, b)] + ([] if last else [torch.nn.BatchNorm1d(b), torch.nn.ReLU()])
    module = torch.nn.Sequential(*parts).double()
    norms = [m for m in parts if isinstance(m, torch.nn.BatchNorm1d)]
    params = {
        "linear": [copy_linear(m) for m in parts if isinstance(m, torch.nn.Linear)],
        "norm": [{"scale": m.weight.detach(), "shift": m.bias.detach()} for m in norms],
    }
    layer = nn.mlp(hidden, batch_norm=True, final_activation=final)
    stats = [{k: v.double() for k, v in s.items()} for s in layer.init_stats()]
    x = normal(0, 8, 5)
    y, stats = layer.train_apply(params, x, None, stats)
    torch.testing.assert_close(y, module(x))
    torch.testing.assert_close(layer.apply(params, x, stats), module.eval()(x))


def test_factorization_machine_is_the_double_sum():
    """factorization_machine is Σ_{i<j} Σ_d x_id x_jd, term by term."""
    x = normal(0, 3, 5, 2)
    expected = [sum(float(e[i] @ e[j]) for i, j in itertools.combinations(range(5), 2)) for e in x]
    torch.testing.assert_close(nn.factorization_machine(x), torch.tensor(expected, dtype=torch.float64))


def test_dot_interaction_is_the_lower_triangle():
    """dot_interaction gives the entries of X Xᵀ that torch.tril_indices names, in the order of torch.tril_indices.
    Values and gradients agree."""
    x = normal(0, 3, 6, 2).requires_grad_()
    rows, columns = torch.tril_indices(6, 6, -1)
    expected = torch.bmm(x, x.transpose(1, 2))[:, rows, columns]
    torch.testing.assert_close(nn.dot_interaction(x), expected)
    weights = normal(1, *expected.shape)
    (d_expected,) = torch.autograd.grad((expected * weights).sum(), x)
    d_x = torch.func.grad(lambda x: (nn.dot_interaction(x) * weights).sum())(x.detach())
    torch.testing.assert_close(d_x, d_expected)


@pytest.mark.parametrize("rank", [None, 2])
def test_cross_network_is_its_recurrence(rank):
    """The cross network is x_{l+1,i} = x_{0,i} (Σ_j W_ij x_{l,j} + b_i) + x_{l,i}, element by element."""
    layer = nn.cross_network(4, 3, rank)
    params = [{k: normal(7 * i + len(k), *v.shape) for k, v in p.items()} for i, p in enumerate(layer.init(fr.key(0)))]
    x0 = normal(3, 2, 4)
    expected = x0.tolist()
    for p in params:
        w = p["weight"] if rank is None else p["u"] @ p["v"]
        expected = [
            [
                float(x0[b, i]) * (sum(float(w[i, j]) * row[j] for j in range(4)) + float(p["bias"][i])) + row[i]
                for i in range(4)
            ]
            for b, row in enumerate(expected)
        ]
    torch.testing.assert_close(layer.apply(params, x0), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("draw", "shape", "std"),
    [
        (nn.xavier_normal, (300, 100), math.sqrt(2 / 400)),
        (nn.fan_out_normal, (30_000,), math.sqrt(1 / 30_000)),
        (nn.normal(0.5), (200, 150), 0.5),
    ],
)
def test_draws_have_their_moments(draw, shape, std):
    """Initial weights have mean 0 and the deviation of torch.nn.init, within five standard errors of 30,000 draws."""
    x = draw(fr.key(0), shape).double()
    count = x.numel()
    assert abs(float(x.mean())) < 5 * std / math.sqrt(count)
    assert abs(float(x.std()) / std - 1) < 5 / math.sqrt(2 * count)


def test_xavier_normal_has_the_deviation_of_torch_init():
    """Weights have the deviation of torch.nn.init.xavier_normal_ for the same matrix, within sampling error."""
    torch.manual_seed(0)
    theirs = torch.nn.init.xavier_normal_(torch.empty(200, 400)).std()
    assert abs(float(nn.xavier_normal(fr.key(0), (200, 400)).std() / theirs) - 1) < 0.02

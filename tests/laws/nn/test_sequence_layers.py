"""Layers of bags of vectors: positions, blocks of attention, recurrent units."""

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

import funcrec as fr
from funcrec import nn
from funcrec.testing import assert_trees_close, check_grads

LENGTHS = [3, 0, 1, 4]


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bags_of(dim, padding=0, seed=1):
    """Return bags of 8 vectors, and garbage in the padding."""
    values = torch.cat([numbers(seed, 8, dim), torch.full((padding, dim), torch.nan, dtype=torch.float64)])
    return fr.JaggedTensor(values, torch.tensor([0, 3, 3, 4, 8]))


def params_of(layer):
    return fr.tree.map(
        lambda x: x.double() + 0.1 * torch.cos(torch.arange(x.numel())).view(x.shape), layer.init(fr.key(0))
    )


LAYERS = {
    "gru": (nn.gru(2, 3), 2),
    "sasrec_block": (nn.sasrec_block(4, heads=2), 4),
    "position_embedding": (nn.position_embedding(3, 4), 4),
}
EACH = pytest.mark.parametrize("name", LAYERS)


@EACH
def test_padding_is_not_read(name):
    """NaN in the padding changes neither the vectors nor a gradient. A bag alone has the same result as in a batch."""
    layer, dim = LAYERS[name]
    params, plain, padded = params_of(layer), bags_of(dim), bags_of(dim, 3)
    loss = lambda params, bags: layer.apply(params, bags).values[:8].sin().sum()
    torch.testing.assert_close(layer.apply(params, padded).values[:8], layer.apply(params, plain).values)
    assert_trees_close(grad(loss)(params, padded), grad(loss)(params, plain), rtol=1e-12, atol=1e-12)
    apart = [layer.apply(params, fr.JaggedTensor(x, torch.tensor([0, len(x)]))) for x in plain.values.split(LENGTHS)]
    torch.testing.assert_close(torch.cat([x.values for x in apart]), layer.apply(params, plain).values)
    none = fr.JaggedTensor(plain.values[:0], torch.tensor([0, 0]))
    assert layer.apply(params, none).values.shape[0] == 0


@EACH
def test_derivatives_and_members(name):
    """First and second derivatives agree with finite differences. vmap over parameters equals a loop."""
    layer, dim = LAYERS[name]
    params, bags = params_of(layer), bags_of(dim)
    loss = lambda x, params: layer.apply(params, fr.JaggedTensor(x, bags.offsets)).values.sin().sum()
    check_grads(lambda x: loss(x, params), (bags.values,), order=2)
    check_grads(lambda params: loss(bags.values, params), (params,), order=2)
    stacked = fr.tree.map(lambda x: torch.stack([x, -x]), params)
    members = [fr.tree.map(lambda x: x[i], stacked) for i in (0, 1)]  # noqa: B023
    step = lambda params: grad(loss, argnums=(0, 1))(bags.values, params)
    both = fr.tree.map(lambda *xs: torch.stack(xs), *map(step, members))
    assert_trees_close(vmap(step)(stacked), both, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer", [nn.layer_norm(4), nn.swish_layer_norm(4)], ids=["layer_norm", "swish"])
def test_norms_have_second_tangents(layer):
    """A norm's derivatives of second order, also the tangent of a tangent, agree with finite differences."""
    params = params_of(layer)
    check_grads(lambda x, p: layer.apply(p, x).sin().sum(), (bags_of(4).values, params), order=2)


def test_a_gru_is_torchs():
    """States, gradients, tangents and second derivatives equal those of torch.nn.GRU, bag by bag."""
    layer, params, bags = nn.gru(2, 3), params_of(nn.gru(2, 3)), bags_of(2)
    theirs = torch.nn.GRU(2, 3, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict({f"{name}_l0": x for name, x in params.items()})
    want = torch.cat([theirs(x[None])[0][0] for x in bags.values.split(LENGTHS) if len(x)])
    torch.testing.assert_close(layer.apply(params, bags).values, want.detach())
    want.sin().sum().backward()
    of = lambda params: layer.apply(params, bags).values.sin().sum()
    found = grad(of)(params)
    for name, x in found.items():
        torch.testing.assert_close(x, getattr(theirs, f"{name}_l0").grad)
    tangent = jvp(of, (params,), (params,))[1]
    torch.testing.assert_close(tangent, sum((found[n] * params[n]).sum() for n in params))


def test_a_compiled_gru():
    """Under jit the first derivative equals the eager one; a second derivative, which reads lengths, is refused."""
    layer, params, bags = nn.gru(2, 3), params_of(nn.gru(2, 3)), bags_of(2, 1)
    loss = lambda params, bags: layer.apply(params, bags).values[:8].sin().sum()
    assert_trees_close(fr.jit(grad(loss))(params, bags), grad(loss)(params, bags), rtol=1e-9, atol=1e-12)
    twice = lambda bias, bags: hessian(lambda b: loss({**params, "bias_hh": b}, bags))(bias)
    with pytest.raises(TypeError, match="a further derivative of a GRU reads lengths"):
        fr.jit(twice)(params["bias_hh"], bags)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "position_embedding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(name, dtype):
    """The vectors have the dtype of parameters and bags, and are close to those in f64."""
    layer, dim = LAYERS[name]
    params, bags = params_of(layer), bags_of(dim)
    got = layer.apply(fr.tree.to(params, dtype=dtype), bags.to(dtype=dtype)).values
    assert got.dtype == dtype
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), layer.apply(params, bags).values, rtol=tolerance, atol=tolerance)


def test_dropout_of_a_block():
    """In training the key decides a block's dropout: the same key gives the same bits, and rate 0 gives the result of
    evaluation."""
    block, bags = nn.sasrec_block(4, dropout=0.5), bags_of(4)
    params = params_of(block)
    once, again, other = (block.train_apply(params, bags, fr.key(k))[0].values for k in (1, 1, 2))
    assert once.equal(again) and not once.equal(other)
    plain = nn.sasrec_block(4)
    assert plain.train_apply(params, bags, fr.key(1))[0].values.equal(plain.apply(params, bags).values)

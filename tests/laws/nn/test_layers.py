"""Laws of the layers of funcrec.nn: one table of layers, one list of laws, then the laws of single layers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as torch_tree

import funcrec as fr
from funcrec import nn
from funcrec.testing import garbage_padding
from funcrec.testing import strategies as frs

B = 5


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def double(tree):
    return torch_tree.tree_map(lambda x: x.double(), tree)


def close(a, b, **kwargs):
    torch_tree.tree_map(lambda x, y: torch.testing.assert_close(x, y, **kwargs), a, b)


def stateful(layer):
    """Return (init, f) of a layer with statistics. f gives the training output and the new statistics."""
    return layer.init, lambda params, x: layer.train_apply(params, x, fr.key(7), layer.init_stats())


NORMED = nn.mlp((6, 4, 3), batch_norm=True)
LAYERS = {
    # name: (init, f(params, x), the shape of x)
    "linear": (*nn.linear(6, 3)[:2], (B, 6)),
    "linear without bias": (*nn.linear(6, 3, bias=None)[:2], (B, 6)),
    "mlp": (*nn.mlp((6, 4, 3), activation=torch.tanh)[:2], (B, 6)),
    "mlp, dropout": (*stateful(nn.mlp((6, 4, 3), activation=torch.tanh, dropout=0.4)), (B, 6)),
    "mlp, batch norm in training": (*stateful(NORMED), (B, 6)),
    "mlp, batch norm in evaluation": (NORMED.init, lambda p, x: NORMED.apply(p, x, NORMED.init_stats()), (B, 6)),
    "batch_norm": (*stateful(nn.batch_norm(6)), (B, 6)),
    "cross": (nn.cross(6).init, lambda p, x: nn.cross(6).apply(p, x, x.sin()), (B, 6)),
    "cross of low rank": (nn.cross(6, 2).init, lambda p, x: nn.cross(6, 2).apply(p, x, x.sin()), (B, 6)),
    "cross_network": (*nn.cross_network(6, 3)[:2], (B, 6)),
    "vector_cross_network": (*nn.vector_cross_network(6, 3)[:2], (B, 6)),
    "mixture_cross_network": (*nn.mixture_cross_network(6, 2, 3, 2, activation=torch.tanh)[:2], (B, 6)),
    "layer_norm": (*nn.layer_norm(6)[:2], (B, 6)),
    "swish_layer_norm": (*nn.swish_layer_norm(6)[:2], (B, 6)),
    "mmoe": (*nn.mmoe(6, 2, num_experts=3, sizes=(4, 3), activation=torch.tanh)[:2], (B, 6)),
    "ple": (*nn.ple(6, 2, shared_experts=2, task_experts=1, sizes=((4,), (3,)), activation=torch.tanh)[:2], (B, 6)),
    "factorization_machine": (lambda key: {}, lambda p, x: nn.factorization_machine(x), (B, 4, 3)),
    "dot_interaction": (lambda key: {}, lambda p, x: nn.dot_interaction(x), (B, 4, 3)),
    "dropout": (lambda key: {}, lambda p, x: nn.dropout(x, fr.key(3), 0.5), (B, 6)),
}
EACH = pytest.mark.parametrize("name", LAYERS)


@EACH
def test_init_is_a_function_of_the_key(name):
    """A key draws the same parameters every time. All parameters are f32."""
    init, _, _ = LAYERS[name]
    first, second = init(fr.key(1)), init(fr.key(1))
    assert torch_tree.tree_structure(first) == torch_tree.tree_structure(second)
    close(first, second, rtol=0, atol=0)
    assert all(x.dtype == torch.float32 for x in torch_tree.tree_leaves(first))


def test_weights_of_different_keys_and_layers_differ():
    """No two weight matrices are equal, for different keys or within a layer."""
    layer = nn.mlp((4, 4, 4, 4))
    drawn = [w["weight"] for seed in (0, 1) for w in layer.init(fr.key(seed))["linear"]]
    cross = nn.cross(4, 4).init(fr.key(0))
    drawn += [cross["u"], cross["v"]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


@EACH
def test_traced_is_eager(name):
    """A layer traced with fake tensors gives the bits of eager mode."""
    init, f, shape = LAYERS[name]
    params, x = init(fr.key(0)), normal(0, *shape)
    leaves, structure = torch_tree.tree_flatten((params, x))

    def flat(*tensors):
        return torch_tree.tree_leaves(f(*torch_tree.tree_unflatten(list(tensors), structure)))

    graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    close(graph(*leaves), flat(*leaves), rtol=0, atol=0)


@EACH
def test_arguments_are_not_written(name):
    """A layer does not change its parameters or its input."""
    init, f, shape = LAYERS[name]
    params, x = init(fr.key(0)), normal(0, *shape)
    before = torch_tree.tree_map(torch.clone, (params, x))
    f(params, x)
    close((params, x), before, rtol=0, atol=0)


@EACH
def test_f64_stays_f64(name):
    """f64 parameters and inputs give f64 results, close to the f32 results."""
    init, f, shape = LAYERS[name]
    params, x = init(fr.key(0)), normal(0, *shape)
    out, small = f(double(params), x.double()), f(params, x)
    assert torch_tree.tree_leaves(out)[0].dtype == torch.float64
    close(torch_tree.tree_map(lambda y: y.float(), out), small, rtol=1e-4, atol=1e-5)


@EACH
def test_gradients_are_finite_differences(name):
    """The gradient with respect to the parameters and the input agrees with finite differences, in f64."""
    init, f, shape = LAYERS[name]
    args = double((init(fr.key(0)), normal(1, *shape)))
    leaves, structure = torch_tree.tree_flatten(args)
    leaves = [x.detach().requires_grad_() for x in leaves]

    def flat(*tensors):
        return tuple(torch_tree.tree_leaves(f(*torch_tree.tree_unflatten(list(tensors), structure))))

    assert torch.autograd.gradcheck(flat, leaves, eps=1e-6, atol=1e-5, rtol=1e-4)


@EACH
def test_jvp_is_the_transpose_of_vjp(name):
    """⟨Jv, w⟩ = ⟨v, Jᵀw⟩."""
    init, f, shape = LAYERS[name]
    args = double((init(fr.key(0)), normal(2, *shape)))
    tangents = torch_tree.tree_map(lambda x: normal(x.numel(), *x.shape, dtype=torch.float64), args)
    g = lambda a: tuple(torch_tree.tree_leaves(f(*a)))
    out, pushed = torch.func.jvp(g, (args,), (tangents,))
    cotangents = tuple(normal(i, *y.shape, dtype=torch.float64) for i, y in enumerate(out))
    (pulled,) = torch.func.vjp(g, args)[1](cotangents)
    dot = lambda a, b: sum(
        (x * y).sum() for x, y in zip(torch_tree.tree_leaves(a), torch_tree.tree_leaves(b), strict=True)
    )
    torch.testing.assert_close(dot(pushed, cotangents), dot(tangents, pulled), rtol=1e-10, atol=1e-10)


@EACH
def test_vmap_is_a_loop(name):
    """vmap over an ensemble's stacked parameters equals the loop over its members."""
    init, f, shape = LAYERS[name]
    members = [(init(fr.key(i)), normal(i, *shape)) for i in range(3)]
    stacked = torch_tree.tree_map(lambda *xs: torch.stack(xs), *members)
    out = torch.func.vmap(lambda args: f(*args))(stacked)
    loop = torch_tree.tree_map(lambda *ys: torch.stack(ys), *[f(*m) for m in members])
    close(out, loop, rtol=1e-5, atol=1e-6)


# -- dropout -----------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 0.95), st.integers(0, 2**62))
def test_dropout_keeps_the_mean(rate, seed):
    """The mean of 40,000 ones after dropout is 1, within five standard errors. Elements are 0 or 1 / (1 - rate)."""
    y = nn.dropout(torch.ones(40_000, dtype=torch.float64), fr.key(seed), rate)
    scale = 1 / (1 - rate)
    assert ((y == 0) | (y == scale)).all()
    assert abs(y.mean() - 1) <= 5 * math.sqrt(rate * scale / 40_000)


def test_dropout_is_a_function_of_the_key():
    """The same key drops the same elements. Another key drops other elements. Neighbouring elements are independent."""
    x = torch.ones(20_000)
    first, again, other = (nn.dropout(x, fr.key(k), 0.5) for k in (1, 1, 2))
    assert torch.equal(first, again)
    # independent coins agree 10,000 ± 5 · 71 times
    assert abs((first == other).sum() - 10_000) < 360
    assert abs((first[1:] == first[:-1]).sum() - 10_000) < 360


def test_dropout_at_rate_zero_is_the_identity():
    """Dropout with rate 0 returns the same tensor."""
    x = torch.tensor([1.0, torch.nan])
    assert nn.dropout(x, fr.key(0), 0.0) is x
    layer = nn.mlp((6, 4, 3))
    params = layer.init(fr.key(0))
    assert torch.equal(layer.train_apply(params, normal(0, B, 6), None)[0], layer.apply(params, normal(0, B, 6)))


def test_dropout_under_vmap_over_keys():
    """vmap over keys equals the loop over keys."""
    keys, x = fr.split(fr.key(0), 3), normal(0, 10)
    out = torch.func.vmap(lambda k: nn.dropout(x, k, 0.5))(keys)
    assert torch.equal(out, torch.stack([nn.dropout(x, k, 0.5) for k in keys]))


def test_dropped_elements_do_not_leak():
    """A dropped element may be NaN. Its gradient is zero."""
    key = fr.key(4)
    dropped = nn.dropout(torch.ones(64), key, 0.5) == 0
    x = torch.where(dropped, torch.nan, 1.0)
    out, gradient = torch.func.grad_and_value(lambda x: nn.dropout(x, key, 0.5).sum())(x)[::-1]
    assert torch.isfinite(out) and (gradient[dropped] == 0).all() and (gradient[~dropped] == 2).all()


def test_an_mlp_drops_before_every_linear_layer():
    """In training, an MLP composes dropout, linear and activation, with its own key for each layer."""
    layer, x, key = nn.mlp((6, 5, 4), dropout=0.5, final_activation=torch.relu), normal(0, B, 6), fr.key(5)
    params, expected = layer.init(fr.key(0)), x
    for own, k in zip(params["linear"], fr.split(key, 2), strict=True):
        expected = torch.relu(nn.dropout(expected, k, 0.5) @ own["weight"].T + own["bias"])
    torch.testing.assert_close(layer.train_apply(params, x, key)[0], expected)


# -- interactions ------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 1000))
def test_factorization_machine_is_the_sum_of_the_dot_products(num, features, dim, seed):
    """fm(x) = Σ dot_interaction(x), in any order of the features. fm(c x) = c² fm(x)."""
    x = normal(seed, num, features, dim, dtype=torch.float64)
    fm = nn.factorization_machine(x)
    torch.testing.assert_close(fm, nn.dot_interaction(x).sum(1))
    torch.testing.assert_close(nn.factorization_machine(x.flip(1)), fm)
    torch.testing.assert_close(nn.factorization_machine(3 * x), 9 * fm)


def test_a_cross_layer_of_zeros_is_the_identity():
    """W = 0 and b = 0 give x. W = 0 and b = 1 give x + x0."""
    x0, x = normal(0, B, 4), normal(1, B, 4)
    zero = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    assert torch.equal(nn.cross(4).apply(zero, x0, x), x)
    assert torch.equal(nn.cross(4).apply({**zero, "bias": torch.ones(4)}, x0, x), x0 + x)


def test_low_rank_is_the_full_matrix_of_its_product():
    """A cross layer with U and V equals the cross layer with W = U V."""
    low = nn.cross(4, 2)
    params = double(low.init(fr.key(0)))
    x0, x = normal(0, B, 4, dtype=torch.float64), normal(1, B, 4, dtype=torch.float64)
    full = {"weight": params["u"] @ params["v"], "bias": params["bias"]}
    torch.testing.assert_close(low.apply(params, x0, x), nn.cross(4).apply(full, x0, x))


# -- batch norm and positions ------------------------------------------------------------------------------------


def test_batch_norm_in_training_has_mean_zero_and_variance_one():
    """The training output of fresh parameters has mean 0 and variance 1 - eps / (var + eps) per column."""
    norm, x = nn.batch_norm(3), normal(0, 50, 3, dtype=torch.float64) * 4 + 7
    y, _ = norm.train_apply(norm.init(fr.key(0)), x, None, norm.init_stats())
    torch.testing.assert_close(y.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.var(0, unbiased=False), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-5)


def test_batch_norm_in_evaluation_sees_one_row_at_a_time():
    """With running statistics, a row's output does not depend on the other rows."""
    norm, x = nn.batch_norm(3), normal(0, 4, 3)
    params, stats = norm.init(fr.key(0)), {"mean": normal(1, 3), "var": normal(2, 3).square() + 0.1}
    whole = norm.apply(params, x, stats)
    assert torch.equal(whole, torch.cat([norm.apply(params, x[i : i + 1], stats) for i in range(4)]))


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_position_weights_are_the_weight_of_each_place(lists, length, padding):
    """The id at position p of its bag has weight w_p. Ids after `max_length`, and padding, have weight 0."""
    bags = fr.JaggedTensor.from_lists(lists)
    w = torch.arange(1.0, length + 1)
    out = nn.position_weights(length).apply(w, bags.pad_to(bags.capacity + padding))
    expected = [float(p + 1) if p < length else 0.0 for bag in lists for p in range(len(bag))]
    assert out.tolist() == expected + [0.0] * padding


@given(ids=frs.keyed_jagged_tensors(keys=("a", "b", "c"), same_bags=False), lengths=st.tuples(*[st.integers(1, 4)] * 2))
def test_position_weights_of_some_keys(ids, lengths):
    """Named keys have w_p, times their own weights; 0 from max_length on; others keep theirs, or have none."""
    sizes = dict(zip(("a", "c"), lengths, strict=True))
    params = {k: torch.arange(2.0, n + 2) for k, n in sizes.items()}
    got = nn.position_weights(sizes).apply(params, garbage_padding(ids))
    assert got.to_lists() == ids.to_lists() and not got.weights[int(got.offsets[-1]) :].any()
    for k in ids.keys:
        before, after = ids[k], got[k]
        own = None if before.weights is None else before.unpad().weights.tolist()
        where = [p for bag in before.to_lists() for p in range(len(bag))]
        learned = [1.0] * len(where) if k not in sizes else [p + 2.0 if p < sizes[k] else 0.0 for p in where]
        if k not in sizes and own is None:
            assert after.weights is None and k in got.unweighted
        else:
            want = [x * y for x, y in zip(learned, own or [1.0] * len(where), strict=True)]
            assert after.unpad().weights.tolist() == want


POSITIONS = nn.position_weights({"a": 2})
PLACED = fr.KeyedJaggedTensor.from_lists({"a": [[0, 1, 1], [2], [], [1, 0]], "b": [[1], [2, 3], [0], []]})
PLACED_FEATURES = (fr.FeatureConfig("a", table="t", weighted=True), fr.FeatureConfig("b", table="t", pooling="mean"))


def position_loss(params, ids):
    """A loss of a feature with position weights and a feature without any."""
    return fr.lookup(params.tables, POSITIONS.apply(params.dense, ids), PLACED_FEATURES).values.sin().mean()


def test_a_loss_of_position_weights_has_torchs_gradients():
    """Gradients of the weights and the table, and second derivatives, are those of plain torch, also vmapped, and
    compiled with its state donated."""
    table, w = normal(0, 4, 3, dtype=torch.float64), normal(1, 2, dtype=torch.float64)
    params = fr.Params({"t": table}, {"a": w})

    def plain(t, w):
        a = [w[0] * t[0] + w[1] * t[1], w[0] * t[2], 0 * t[0], w[0] * t[1] + w[1] * t[0]]
        b = [t[1], (t[2] + t[3]) / 2, t[0], 0 * t[0]]
        return torch.cat([torch.stack(a), torch.stack(b)], 1).sin().mean()

    ours = lambda t, w: position_loss(fr.Params({"t": t}, {"a": w}), PLACED)
    torch.testing.assert_close(ours(table, w), plain(table, w))
    _, grads = fr.value_and_grad(position_loss)(params, PLACED)
    torch.testing.assert_close(grads.dense["a"], torch.func.grad(plain, 1)(table, w))
    torch.testing.assert_close(grads.tables["t"].to_dense(), torch.func.grad(plain)(table, w))
    for k in range(2):
        torch.testing.assert_close(torch.func.hessian(ours, k)(table, w), torch.func.hessian(plain, k)(table, w))
    ws = torch.stack([w, -w])
    torch.testing.assert_close(
        torch.func.vmap(lambda w: ours(table, w))(ws), torch.stack([plain(table, w) for w in ws])
    )
    step = fr.train_step(
        lambda p, b: position_loss(p, b.ids), sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1)
    )
    state, _ = fr.jit(step, donate=("state",))(step.init(fr.copy(params)), fr.Batch(PLACED, torch.zeros(4)))
    torch.testing.assert_close(state.dense["a"], w - 0.1 * torch.func.grad(plain, 1)(table, w))


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_position_weights_hold_under_every_placement(kind):
    """Positions are counted before ids travel: sharded rows and columns give one process's values and gradients."""
    mesh, params = fr.Mesh.emulated(x=2), fr.Params({"t": normal(0, 4, 4)}, {"a": normal(1, 2)})
    held = fr.shard_tables(params.tables, fr.Plan.uniform(kind, params.tables, mesh), mesh)
    apart = lambda t, w, i: fr.lookup(t, POSITIONS.apply({"a": w}, i), PLACED_FEATURES).values
    f = fr.shard_map(apart, mesh=mesh, in_specs=(held.specs(), fr.P(), fr.P("x")), out_specs=fr.P("x"))
    total = lambda f, t: lambda w: f(t, w, PLACED).sin().sum()
    torch.testing.assert_close(f(held, params.dense["a"], PLACED), apart(params.tables, params.dense["a"], PLACED))
    got, want = (torch.func.grad(total(g, t))(params.dense["a"]) for g, t in ((f, held), (apart, params.tables)))
    torch.testing.assert_close(got, want)


def test_position_weights_get_gradients():
    """The gradient of the sum of all weights counts the bags that have each position."""
    bags = fr.JaggedTensor.from_lists([[1, 2], [], [3]]).pad_to(6)
    gradient = torch.func.grad(lambda w: nn.position_weights(3).apply(w, bags).sum())(torch.ones(3))
    assert gradient.tolist() == [2.0, 1.0, 0.0]

"""torch's operators under invariant: right, or refused. The samples are those of torch's own tests (OpInfo)."""

import functools
import warnings

import pytest
import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import funcrec as fr
from funcrec.testing import assert_trees_close, check_invariant

aten = torch.ops.aten
EVERY = 8  # 1 for all 600 operators
UNKNOWN = ("empty", "rmatmul", "jiterator")  # values of new memory, a result that is no tensor, kernels for CUDA


def test_an_operator_is_right_or_refused():
    """The first sample of every eighth operator gives torch's values, up to rounding, or an error of `invariant`;
    nothing else is raised."""
    refused, right = [], []
    ops = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    for op in [op for op in ops if not any(n in op.name for n in UNKNOWN)][::EVERY]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=False)))
            call = lambda op=op, s=sample: op.op(s.input, *s.args, **s.kwargs)
            try:
                got = fr.invariant(call)()
            except TypeError as error:
                assert "funcrec.invariant" in str(error), op.name
                refused.append(op.name)
                continue
            torch.testing.assert_close(got, call(), rtol=2e-4, atol=2e-5, equal_nan=True, msg=op.name)
            right.append(op.name)
    assert len(right) > len(refused) > 10


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, SQUARE = noise(5, 8, seed=3), noise(8, 8)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: torch.add(y, x, alpha=0.3), lambda x, y: torch.addcmul(x, x, y, value=0.3),
        lambda x, y: torch.addcdiv(y, y, x, value=0.3), lambda x, y: torch.dot(x[0], y[0]),
        lambda x, y: torch.vdot(y[0], x[0]), lambda x, y: torch.addmm(y, x, SQUARE, alpha=0.3, beta=0.2),
    ],
    ids=["add", "addcmul", "addcdiv", "dot", "vdot", "addmm"],
)  # fmt: skip
def test_a_forward_derivative_by_one_of_two_is_torchs(f):
    """torch keeps the tangent of the other as zeros without memory, which no operation here may read."""
    for run in (f, lambda x, y: torch.func.grad(lambda x: f(x, y).square().sum())(x)):
        along = lambda x, t, run=run: torch.func.jvp(lambda x: run(x, SQUARE[:5]), (x,), (t,))
        for got, want in zip(fr.invariant(along)(X, X + 1), along(X, X + 1), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("f", [lambda x: x**1, lambda x: x[0, 0].sum(), lambda x: x[0, 0].mean(), lambda x: x + 0])
def test_a_result_has_memory_of_its_own(f):
    """A write to a result changes no argument, also where the result has the argument's numbers."""

    def written(x):
        f(x).add_(1)
        return x.clone()

    assert fr.invariant(written)(X.clone()).equal(X)
    along = lambda x: torch.func.jvp(f, (x,), (x,))
    assert fr.invariant(along)(X[:1].expand(3, 8))[0].equal(f(X[:1].expand(3, 8)))


def test_an_error_says_what_to_write_in_place():
    """Each of these operators is named with calls that take its place; the ones that can be called here run."""
    hinted = {
        "fr.random": lambda x: torch.nn.functional.dropout(x),
        "fr.bag_reduce": lambda x: x.scatter_reduce(0, torch.zeros(5, 8, dtype=torch.int64), x, "prod"),
        "torch.einsum": lambda x: torch.nn.functional.bilinear(x, x, SQUARE.expand(2, 8, 8)),
        "vector_norm": lambda x: torch.cdist(x, x),
        "unfold": lambda x: torch.nn.functional.conv1d(x[None], SQUARE[None, :5, :3]),
        "fr.lookup": lambda x: torch.nn.functional.embedding_bag(torch.tensor([1, 2]), x, torch.tensor([0, 1])),
        "before the call": lambda x: torch.linalg.inv(x[:5, :5]),
        "sums and elementwise": torch.lgamma,
    }
    for words, f in hinted.items():
        with pytest.raises(TypeError, match=f"try   .*({words})"):
            fr.invariant(f)(X)
    written = lambda x, w: (torch.einsum("bi,oij,bj->bo", x, w, x), torch.linalg.vector_norm(x[:, None] - x, dim=-1))
    w = SQUARE.expand(2, 8, 8)
    want = torch.nn.functional.bilinear(X, X, w), torch.cdist(X, X)
    assert_trees_close(fr.invariant(written)(X, w), want, rtol=1e-5, atol=1e-5)


def attend(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": (torch.arange(25).reshape(5, 5) % 3 > 0), "scale": 0.3},
     {"attn_mask": torch.arange(25.0).reshape(5, 5) / 9}, {"enable_gqa": True}],
)  # fmt: skip
def test_attention_is_torchs_with_its_gradients(options):
    """scaled_dot_product_attention and its gradients are torch's in f64, up to rounding; an example has its bits alone,
    and a query that may see no key gets zeros, as in torch."""
    heads = 2 if "enable_gqa" in options else 4
    q, k, v = noise(6, 4, 5, 8, seed=1), noise(6, heads, 5, 8, seed=2), noise(6, heads, 5, 8, seed=3)
    ask = lambda q, k, v: torch.func.vjp(functools.partial(attend, **options), q, k, v)[1](q)
    wide = [x.double() for x in (q, k, v)]
    own = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    truth = torch.func.vjp(functools.partial(attend, **own), *wide)
    for f, want in ((functools.partial(attend, **options), truth[0]), (ask, truth[1](wide[0]))):
        got = fr.invariant(f)(q, k, v)
        assert_trees_close(fr.tree.map(torch.Tensor.double, got), want, rtol=1e-5, atol=1e-6)
        check_invariant(lambda b, f=f: fr.invariant(f)(*b), (q, k, v))
    blind = functools.partial(attend, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
    assert torch.equal(fr.invariant(blind)(q, q, q), torch.zeros(6, 4, 5, 8))


WEIGHT, BIAS = noise(8, seed=1), noise(8, seed=2)
COMPOSED = {
    "softmax": (aten._softmax.default, lambda x: (x, 1, False)),
    "softmax of rows": (aten._softmax.default, lambda x: (x, 0, False)),
    "softmax of a number": (aten._softmax.default, lambda x: (x[0, 0], 0, False)),
    "softmax of none": (aten._softmax.default, lambda x: (x[:, :0], 1, False)),
    "log_softmax": (aten._log_softmax.default, lambda x: (x.mT, 1, False)),
    "layer_norm": (aten.native_layer_norm.default, lambda x: (x, [8], None, None, 1e-5)),
    "layer_norm, weights": (aten.native_layer_norm.default, lambda x: (x, [8], WEIGHT, BIAS, 1e-5)),
    "layer_norm, bias": (aten.native_layer_norm.default, lambda x: (x, [5, 8], None, BIAS.expand(5, 8), 1e-5)),
    "gelu": (aten.gelu.default, lambda x: (x,)),
    "gelu, tanh": (aten.gelu.default, lambda x: (x, "tanh")),
    "softplus": (aten.softplus.default, lambda x: (x,)),
    "softplus, beta": (aten.softplus.default, lambda x: (x, 0.3, 1.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", COMPOSED)
def test_what_torch_composes_has_the_bits_of_its_composition(name, dtype):
    """An operator whose parts are called directly has the bits of torch's own composition, part by part, and
    compiled ones."""
    operator, args = COMPOSED[name]
    move = lambda v: v.to(dtype) if isinstance(v, torch.Tensor) else v
    own = [move(v) for v in args(X * 3)]
    how = {"approximate": own.pop()} if operator is aten.gelu.default and len(own) == 2 else {}
    direct = fr.invariant(lambda: tree_leaves(operator(*own, **how)))
    composition = {**decomposition_table, **core_aten_decompositions()}[operator]
    by_parts = fr.invariant(lambda: tree_leaves(composition(*own, **how)))
    assert_trees_close(direct(), by_parts(), rtol=0, atol=0)
    if dtype in (torch.float32, torch.bfloat16) and "," not in name:
        assert_trees_close(fr.jit(direct)(), direct(), rtol=0, atol=0)
    assert [y.dtype for y in direct()] == [y.dtype for y in tree_leaves(operator(*own, **how))]

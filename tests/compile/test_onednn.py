"""Compiled f32 products use oneDNN where oneDNN is faster, by shape and processor. The products are right in any
layout."""

import pytest
import torch
import torch.nn.functional as F
from programs.generated_code import generated_code

import funcrec as fr
from funcrec.compile import OPTIONS
from funcrec.compile.backend import _onednn
from funcrec.compile.backend._digest import digest
from funcrec.compile.backend._onednn import MM, faster_products
from funcrec.testing import assert_trees_close

LAYOUTS = {
    "row by row": lambda x: x,
    "column by column": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: F.pad(x[:, :, None], (0, 1)).flatten(1)[:, ::2],
    "one row for all": lambda x: x[:1].expand_as(x),
}


@pytest.fixture
def faster(monkeypatch):
    """Pretend that MKL does not use AVX-512, on any processor."""
    monkeypatch.setattr(_onednn, "stays_away", lambda: True)


SIZES = [(333, 1023, 77), (8, 4096, 64), (512, 999, 13), (64, 9, 999)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_products_are_rounded_as_float32(rows, inner, columns, monkeypatch):
    """oneDNN's products, for operands of any layout, have the error bound of f32 sums against float64. The second
    operand is passed without gaps, because gaps would cost oneDNN seconds."""
    real = _onednn.onednn()

    def without_gaps(a, w, *how):
        assert w.is_contiguous() or w.t().is_contiguous()
        return real(a, w, *how)

    monkeypatch.setattr(_onednn, "onednn", lambda: without_gaps)
    torch.manual_seed(0)
    first, second = torch.randn(rows, inner), torch.randn(inner, columns)
    for one in LAYOUTS.values():
        for other in LAYOUTS.values():
            a, b = one(first), other(second)
            want, most = a.double() @ b.double(), a.abs().double() @ b.abs().double()
            for got in (MM(a, b), a @ b):
                assert got.is_contiguous() and got.dtype == torch.float32
                assert ((got - want).abs() <= torch.finfo(torch.float32).eps * inner**0.5 * most).all()


def products(x, w, b):
    """Yield four products that are large enough for oneDNN, then products of all kinds that are not."""
    yield from (x @ w, F.linear(x, w.t(), b), torch.addmm(x, x, w), torch.stack([x, x + 1]) @ torch.stack([w, 2 * w]))
    # products of a vector, of no rows, of few rows, and of few elements
    yield from (x @ w[:, :1], x[:1] @ w, x[:0] @ w, x[:7] @ w, x[:30] @ w)
    yield from (x.double() @ w.double(), x.bfloat16() @ w.bfloat16(), x.view(-1, 10, 130) @ w.expand(20, 130, 130))
    yield torch.addmm(b, x, w, beta=2)


def graph_of(*x):
    return fr.jit(lambda *x: list(products(*x))).lower(*x).graph


def test_products_are_chosen_by_their_shape(faster):
    """Only large f32 products become products of oneDNN. addmm still adds its first argument. The
    code with oneDNN and the code without oneDNN are kept under different names."""
    x = torch.randn(200, 130), torch.randn(130, 130) / 11, torch.randn(130)
    graph = graph_of(*x)
    made = faster_products(graph)
    assert len(made.graph.find_nodes(op="call_function", target=MM)) == 4
    assert graph.graph.find_nodes(op="call_function", target=MM) == []
    assert_trees_close(list(made(*x)), list(products(*x)), rtol=1e-5, atol=1e-5)
    names = {digest(g, x, OPTIONS) for g in (graph, made)}
    assert len(names) == 2 and None not in names


@pytest.mark.parametrize("why", ["oneDNN is off", "tf32", "bf16", *_onednn.ROUNDS, "another processor"])
def test_who_asked_for_something_else_gets_it(why, faster, monkeypatch):
    """The graph stays unchanged without oneDNN, with products of lower precision, or where MKL is as fast."""
    x = torch.randn(200, 130), torch.randn(130, 130), torch.randn(130)
    graph = graph_of(*x)
    assert faster_products(graph) is not graph
    if why == "oneDNN is off":
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    elif why == "another processor":
        monkeypatch.setattr(_onednn, "stays_away", lambda: False)
    elif why in _onednn.ROUNDS:
        monkeypatch.setenv(why, "BF16")
    else:
        monkeypatch.setattr(torch._C, "_get_fp32_precision_getter", lambda *of: why)
    assert faster_products(graph) is graph


def loss(w, x, y):
    return (torch.relu(x @ w["first"]) @ w["second"] - y).square().mean()


def step(w, x, y, v):
    """Return a step of gradient descent, a Hessian-vector product, and the outputs of two models."""
    g, value = torch.func.grad_and_value(loss)(w, x, y)
    _, curved = torch.func.jvp(lambda w: torch.func.grad(loss)(w, x, y), (w,), (v,))
    said = torch.func.vmap(lambda k: torch.relu(x @ (k * w["first"])))(torch.tensor([1.0, 2.0]))
    return {n: w[n] - 0.1 * g[n] for n in w}, (value, curved, said)


def test_compiled_steps_have_oneDNN_s_products(faster):
    """A donated step with gradients, second derivatives and vmap gives the values of eager mode within rounding. oneDNN
    computes the products, forward and backward."""
    torch.manual_seed(0)
    w = {"first": torch.randn(128, 130) / 11, "second": torch.randn(130, 100) / 11}
    v = {n: torch.randn_like(x) for n, x in w.items()}
    x, y = torch.randn(256, 128), torch.randn(256, 100)
    want = step(w, x, y, v)
    fast = fr.jit(step, donate=("w",))
    got, (code,) = generated_code(lambda: fast(w, x, y, v))
    assert_trees_close(got, want, rtol=1e-5, atol=1e-5)
    assert code.count("funcrec_onednn.mm.default(") >= 6 and "extern_kernels." not in code
    with pytest.raises(fr.DonatedError):
        w["first"] + 1

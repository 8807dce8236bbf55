"""Values and slopes under invariant are NaN, infinite, zero or finite where torch's are, at every special number."""

import functools
import math

import pytest
import torch
from torch.nn import functional as F

import funcrec as fr

INF, NAN = math.inf, math.nan
NUMBERS = [NAN, INF, -INF, 0.0, -0.0, 3e38, -3e38, 1e-40, -1e-40, 1.0, -1.0, 0.3]
LABELS = (0.0, 1.0, 0.25, -1.0, NAN, INF, -INF)


def row(f):
    """Return f of rows of three numbers, of which one is given."""
    return lambda x: f(torch.stack([x, torch.full_like(x, 0.5), torch.full_like(x, -2.0)], -1))


names = """
    relu relu6 elu selu celu silu mish softplus softsign softshrink hardshrink tanhshrink hardtanh hardsigmoid hardswish
    leaky_relu logsigmoid sigmoid tanh rrelu
"""
of_torch = """
    exp expm1 log log1p log2 log10 sqrt rsqrt sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv
    square reciprocal abs sign floor frac exp2 logit sinc
"""
LOSSES = {
    "bce": F.binary_cross_entropy_with_logits, "mse": F.mse_loss, "l1": F.l1_loss, "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss, "poisson": F.poisson_nll_loss, "hinge": F.hinge_embedding_loss,
    "power": lambda x, y, reduction: x**y, "xlogy": lambda x, y, reduction: torch.xlogy(x, y),
    "logaddexp": lambda x, y, reduction: torch.logaddexp(x, y), "atan2": lambda x, y, reduction: torch.atan2(x, y),
}  # fmt: skip


def of_label(loss, y):
    return lambda x: loss(x, torch.full_like(x, y), reduction="none")


FUNCTIONS = {
    **{n: getattr(F, n) for n in names.split()},
    **{n: getattr(torch, n) for n in of_torch.split()},
    **{f"{n}, {y}": of_label(loss, y) for n, loss in LOSSES.items() for y in LABELS},
    "gelu, tanh": functools.partial(F.gelu, approximate="tanh"),
    "glu": lambda x: F.glu(torch.stack([x, 1 - x], -1), -1),
    "power": lambda x: x**-1 + x**1.7 + 2.0**x,
    **{n: row(functools.partial(getattr(torch, n), dim=-1)) for n in ("softmax", "log_softmax", "logsumexp", "amax")},
    **{n: row(functools.partial(getattr(torch, n), dim=-1)) for n in ("logcumsumexp", "cumsum", "prod", "mean")},
    "normalize": row(functools.partial(F.normalize, dim=-1)),
}
DIFFERENT = {  # {function: (what differs, why)}
    "softshrink": ("value", "torch's vectors give zeros another sign than its last elements"),
    "bce, inf": ("value", "a label that is no probability"),
}


def kinds(x):
    """Return 2 for NaN, the sign of what is infinite times 3, of what is zero times 1, and 0 for other numbers."""
    sign = torch.where(torch.signbit(x), -1, 1)
    return torch.where(x.isnan(), 2, torch.where(x.isinf(), 3 * sign, torch.where(x == 0, sign, 0)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_is_of_torchs_kind(name):
    """Values and slopes are NaN, infinite or zero, with the sign of these, where those of torch's vectors are."""
    f = FUNCTIONS[name]
    x = torch.tensor(NUMBERS).repeat_interleave(64)  # so many that torch takes whole vectors of each
    slope = torch.func.grad(lambda x: f(x).sum())
    for what, call in (("value", f), ("slope", slope)):
        if DIFFERENT.get(name, ("",))[0] != what:
            got, want = kinds(fr.invariant(call)(x))[::64], kinds(call(x))[::64]
            wrong = [n for n, a, b in zip(NUMBERS, got, want, strict=True) if not a.equal(b)]
            assert not wrong, (what, wrong)


def test_where_it_differs_it_is_as_stated():
    """What the guide states where torch's kind is another: rows whose variance overflows, and slopes that do not."""
    large = torch.tensor([[3e38, 0.5, -2.0]])
    assert fr.invariant(lambda x: F.layer_norm(x, (3,)))(large).eq(0).all()
    assert fr.invariant(lambda x: x.std(1))(large).isinf().all()
    slope = torch.func.grad(lambda x: F.soft_margin_loss(x, torch.tensor([1.0]), reduction="sum"))
    assert fr.invariant(slope)(torch.tensor([-3e38])).equal(torch.tensor([-1.0]))
    outside = torch.tensor([NAN, INF, -INF, 3e38, -1.0, -1e-40, 1.5])
    for y in (0.0, 0.3, 1.0):
        loss = functools.partial(F.binary_cross_entropy, target=torch.full((7,), y), reduction="none")
        assert fr.invariant(loss)(outside).isnan().all()

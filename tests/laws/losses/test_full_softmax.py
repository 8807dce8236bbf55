"""fr.losses.full_softmax: the cross entropy of a product that never exists whole."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.as_staged import staged_only
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import funcrec as fr
from funcrec import losses
from funcrec.testing import check_grads

N, R, D = 7, 5, 3
TARGET = torch.tensor([0, 4, 2, 2, 1, 3, 0])


def numbers(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


H, W = numbers(1, N, D), numbers(2, R, D)
whole = lambda h, w, t=TARGET, how="mean": F.cross_entropy(h @ w.T, t, reduction=how)
full = lambda h, w, t=TARGET, **how: losses.full_softmax(h, w, t, **{"chunk": 3, **how})


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(1, 50), st.integers(0, 99))
def test_it_is_the_cross_entropy_of_the_product(n, r, d, chunk, seed):
    """Value and gradients are those of torch's cross entropy of the whole logits in f64, to 1e-12, for any chunk."""
    h, w = numbers(seed, n, d), 3 * numbers(seed + 1, r, d)
    t = torch.randint(0, r, (n,), generator=torch.Generator().manual_seed(seed))
    own = torch.func.grad_and_value(lambda h, w: losses.full_softmax(h, w, t, chunk=chunk), argnums=(0, 1))
    want = torch.func.grad_and_value(lambda h, w: whole(h, w, t), argnums=(0, 1))
    torch.testing.assert_close(own(h, w), want(h, w), rtol=1e-12, atol=1e-12)


def test_derivatives_of_every_order():
    """Gradients, tangents, and second and third derivatives are those of the whole logits, in every composition."""
    check_grads(lambda h, w: full(h, w), (H, W), order=2)
    for of in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacfwd(f))):
        torch.testing.assert_close(of(lambda h: full(h, W))(H), of(lambda h: whole(h, W))(H))
        torch.testing.assert_close(of(lambda w: full(H, w))(W), of(lambda w: whole(H, w))(W))
    third = lambda f: grad(lambda h: grad(lambda h: grad(f)(h).square().sum())(h).square().sum())(H)
    torch.testing.assert_close(third(lambda h: full(h, W)), third(lambda h: whole(h, W)))
    both = lambda f: jvp(lambda h, w: grad(f, argnums=(0, 1))(h, w), (H, W), (W[TARGET], numbers(3, R, D)))
    torch.testing.assert_close(both(full), both(whole))
    h, w = H.clone().requires_grad_(), W.clone().requires_grad_()
    (first,) = torch.autograd.grad(full(h, w), w, create_graph=True)
    plain = torch.autograd.grad(whole(h, w), w, create_graph=True)[0]
    seconds = [torch.autograd.grad(x.square().sum(), (h, w)) for x in (first, plain)]
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 1, 0), (2, 0, None)])
def test_mapped_it_is_a_loop(dims):
    """vmap over queries, items and targets, alone and together, equals a loop. So does vmap of the gradient."""
    members = [numbers(5, 2, N, D), numbers(6, 2, R, D), torch.stack([TARGET, TARGET.flip(0)])]
    singles = [H, W, TARGET]
    stack = lambda x, d: x.movedim(0, d).contiguous()
    given_ = [s if d is None else stack(m, d) for s, m, d in zip(singles, members, dims, strict=True)]
    pick = lambda i: [s if d is None else m[i] for s, m, d in zip(singles, members, dims, strict=True)]
    for f in (full, lambda h, w, t: grad(full, argnums=(0, 1))(h, w, t)):
        looped = [f(*pick(i)) for i in range(2)]
        want = torch.stack(looped) if isinstance(looped[0], torch.Tensor) else tuple(map(torch.stack, zip(*looped)))
        torch.testing.assert_close(vmap(f, in_dims=dims)(*given_), want)
    per_example = vmap(grad(lambda h, t: full(h[None], W, t[None])))(H, TARGET)
    torch.testing.assert_close(per_example, grad(lambda h: whole(h, W, how="sum"))(H))


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = out if isinstance(out, tuple | list) else (out,)
        self.most = max([self.most, *(x.numel() for x in leaves if isinstance(x, torch.Tensor))])
        return out


def test_no_tensor_has_all_logits():
    """With a gradient, no operation makes a tensor larger than the logits of one chunk, the queries or the items."""
    n, r, d, chunk = 400, 300, 8, 16
    h, w, t = numbers(1, n, d), numbers(2, r, d), torch.arange(n) % r
    with Sizes() as sizes:
        grad(lambda h, w: losses.full_softmax(h, w, t, chunk=chunk), argnums=(0, 1))(h, w)
    assert sizes.most <= max(chunk * r, n * d, r * d)
    with Sizes() as sizes:
        grad(lambda h, w: whole(h, w, t), argnums=(0, 1))(h, w)
    assert sizes.most == n * r


class Products(TorchDispatchMode):
    """The operators of the losses that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "funcrec_losses":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def test_value_and_gradient_share_the_logits():
    """A mean with its gradient makes the logits once. Without a gradient, with tangents, with gradients of weights or
    without a mean, the value makes them separately."""
    ones = torch.ones(N, dtype=torch.float64)
    either = lambda h, w: full(h, W, weight=w)
    calls = {
        ("softmax_sum",): lambda: torch.func.grad_and_value(full, argnums=(0, 1))(H, W),
        ("softmax_sum", "softmax_sum"): lambda: [grad(either)(H, k * ones) for k in (1, 2)],
        ("softmax_losses",): lambda: full(H, W),
        ("softmax_losses", "softmax_cotangents"): lambda: grad(either, argnums=(0, 1))(H, ones),
    }
    for want, call in calls.items():
        with Products() as products:
            call()
        assert tuple(products.names) == want
    with Products() as products:
        jvp(lambda h: full(h, W), (H,), (H,))
    assert products.names[:1] == ["softmax_losses"]


@given(st.integers(0, 6), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_weighted_means_of_any_weights(first, chunk, seed):
    """The gradients of a weighted mean are those of the whole logits, whatever weights are 0, for cotangents of any
    size, by plain autograd and mapped over weights."""
    g = torch.Generator().manual_seed(seed)
    w = torch.rand(3, N, generator=g, dtype=torch.float64) * torch.randint(0, 2, (3, N), generator=g)
    w[:, first:] = 0
    w[0, 0] = 1
    f = lambda h, i, w: full(h, i, weight=w, chunk=chunk).exp()
    each = lambda h, i, w: (F.cross_entropy(h @ i.T, TARGET, reduction="none") * w).sum() / w.sum().clamp(min=1e-300)
    want = [grad(lambda h, i, x=x: each(h, i, x).exp(), argnums=(0, 1))(H, W) for x in w]
    got = vmap(lambda x: grad(lambda h, i: f(h, i, x), argnums=(0, 1))(H, W))(w)
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*want))), rtol=1e-12, atol=1e-12)
    h, i = H.clone().requires_grad_(), W.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(f(h, i, w[0]), (h, i)), want[0], rtol=1e-12, atol=1e-12)


def test_weights_and_padding():
    """A query of weight 0 is not read, whatever it and its target hold. Without any weight the loss is 0."""
    w = torch.tensor([1.0, 2.0, 0.0, 0.5, 0.0, 1.0, 1.0], dtype=torch.float64)
    hole = (w == 0)[:, None]
    h, t = torch.where(hole, torch.nan, H), torch.where(w == 0, 99, TARGET)
    kept = lambda h: (F.cross_entropy(h @ W.T, TARGET, reduction="none") * w).sum() / w.sum()
    torch.testing.assert_close(full(h, W, t, weight=w), kept(H))
    torch.testing.assert_close(grad(lambda h: full(h, W, t, weight=w))(h), grad(kept)(H))
    assert full(h, W, t, weight=0 * w) == 0
    assert full(H[:0], W, TARGET[:0], weight=w[:0]) == 0
    each = full(h, W, t, weight=w, reduction="none")
    torch.testing.assert_close(each, torch.where(w == 0, 0, F.cross_entropy(H @ W.T, TARGET, reduction="none")))
    torch.testing.assert_close(full(H, W, temperature=0.5), whole(2 * H, W))


def test_a_target_that_is_none():
    """A target outside the items raises with its position. Where values cannot be read, the loss is NaN."""
    bad = TARGET.clone()
    bad[2] = R
    with pytest.raises(ValueError, match=r"target\[2\] = 5"):
        full(H, W, bad)
    assert vmap(lambda t: full(H, W, t))(bad[None]).isnan()
    with pytest.raises(ValueError, match="`items` does not match `hidden`"):
        full(H, W[:, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """The result has the dtype of the vectors. It equals the result of f32 vectors, rounded once."""
    h, w = H.to(dtype), W.to(dtype)
    got = full(h, w)
    assert got.dtype == dtype
    assert got.equal(full(h.float(), w.float()).to(dtype))
    assert all(x.dtype == dtype for x in grad(full, argnums=(0, 1))(h, w))
    large = torch.diag(torch.tensor([20.0, 15.5, 1e4])).to(dtype)
    own = losses.full_softmax(large, torch.eye(3, dtype=dtype), torch.arange(3), reduction="none")
    assert own.equal(F.cross_entropy(large.float(), torch.arange(3), reduction="none").to(dtype))


def test_compiled_it_is_the_same():
    """Under jit, value and gradient equal those of eager torch, in a step that is compiled once for each shape."""
    step = torch.func.grad_and_value(lambda h, w, t: full(h, w, t), argnums=(0, 1))
    fast = fr.jit(step)
    for n in (N, 4):
        given_ = (H[:n].float(), W.float(), TARGET[:n])
        torch.testing.assert_close(fast(*given_), step(*given_))
    with staged_only():
        twice = fr.jit(hessian(lambda h: full(h, W)))(H)
    torch.testing.assert_close(twice, hessian(lambda h: whole(h, W))(H))


def test_micro_batches_are_the_batch():
    """accumulate_grads over queries gives the gradients of the whole batch."""
    loss_fn = lambda p, b: losses.full_softmax(b.dense @ p.dense, W.float(), b.label.long(), b.weight, chunk=2)
    ids = fr.KeyedJaggedTensor.from_lists({"x": [[0]] * 6})
    batch = fr.Batch(ids, TARGET[:6].float(), H[:6].float(), torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 0.5]))
    params = fr.Params({}, torch.eye(D))
    want, got = fr.value_and_grad(loss_fn)(params, batch), fr.accumulate_grads(loss_fn, 3)(params, batch)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1].dense, want[1].dense)

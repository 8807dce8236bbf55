"""fr.losses: one table of losses, one list of laws, and torch's own losses as oracles."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from programs.as_staged import staged_only
from torch.func import grad, hessian, jacfwd, jvp, vmap

import funcrec as fr
from funcrec import losses
from funcrec.testing import check_grads

B, T, C, D = 6, 2, 4, 3
ITEMS = torch.tensor([1, 2, 1, 3, 4, 2])


def numbers(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


CLICKS, CLASSES = torch.tensor([0.0, 1.0, 1.0, 0.25, 0.0, 1.0]), torch.tensor([0, 3, 1, 2, 2, 0])
TASKS = losses.multi_task([losses.bce, losses.mse], weights=(1.0, 0.5))
BOTH = torch.stack([CLICKS, CLICKS * 3], 1)
_paired = lambda **how: lambda x, y, w=None, **more: losses.in_batch_softmax(x, y, w, **how, **more)


def nt_xent(x, y):
    """Return the loss of each example, the mean of its two views, from the matrix of all views."""
    views, n = torch.cat([x, y]), len(x)
    logits = (views @ views.T / 0.5).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * n).roll(n), reduction="none").view(2, n).mean(0)


# name: (loss, predictions' shape, label, the loss of each example in torch, an invalid label)
LOSSES = {
    "bce": (losses.bce, (B,), CLICKS, lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), 5.0),
    "mse": (losses.mse, (B,), CLICKS * 3, lambda x, y: F.mse_loss(x, y, reduction="none"), torch.nan),
    "huber": (lambda *a, **k: losses.huber(*a, delta=0.7, **k), (B,), CLICKS * 3,
        lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.7), torch.inf),
    "cross_entropy": (losses.cross_entropy, (B, C), CLASSES, lambda x, y: F.cross_entropy(x, y, reduction="none"), C),
    "cross_entropy, floats": (losses.cross_entropy, (B, C), CLASSES.double(),
        lambda x, y: F.cross_entropy(x, y.long(), reduction="none"), 0.5),
    "multi_task": (TASKS, (B, T), BOTH, lambda x, y: F.binary_cross_entropy_with_logits(
        x[:, 0], y[:, 0], reduction="none") + F.mse_loss(x[:, 1], y[:, 1], reduction="none") / 2, -1.0),
    "in_batch_softmax": (_paired(log_q=None, temperature=0.5), (B, D), numbers(9, B, D),
        lambda x, y: F.cross_entropy(x @ y.T / 0.5, torch.arange(len(x)), reduction="none"), None),
    "in_batch_softmax, log_q": (_paired(log_q=-numbers(8, B).abs()), (B, D), numbers(9, B, D),
        lambda x, y: F.cross_entropy(
            x @ y.T + numbers(8, B).abs()[: len(x)], torch.arange(len(x)), reduction="none"), None),
    "contrastive": (functools.partial(losses.contrastive, temperature=0.5), (B, D), numbers(9, B, D), nt_xent, None),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", LOSSES)
SOFTMAX = ("in_batch_softmax", "in_batch_softmax, log_q", "contrastive")


def make(name, dtype=torch.float64):
    loss, shape, label, oracle, wrong = LOSSES[name]
    return loss, numbers(1, *shape, dtype=dtype), label.to(dtype) if label.is_floating_point() else label, oracle, wrong


@EACH
def test_it_is_torchs(name):
    """The loss of each example, the mean and the weighted mean equal those of torch."""
    loss, x, y, oracle, _ = make(name)
    want, w = oracle(x, y), torch.linspace(0.5, 2.0, B, dtype=torch.float64)
    torch.testing.assert_close(loss(x, y, reduction="none"), want)
    torch.testing.assert_close(loss(x, y), want.mean())
    torch.testing.assert_close(loss(x, y, w), (want * w).sum() / w.sum())
    torch.testing.assert_close(loss(x, y, w, reduction="none"), want)


@EACH
def test_an_example_of_weight_zero_is_not_there(name):
    """An example of weight 0 changes neither value nor gradient, whatever the example holds. Without any examples, both
    are 0."""
    loss, x, y, oracle, _ = make(name)
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 0.0], dtype=torch.float64)
    hole = (w == 0).reshape(-1, *(1,) * (x.dim() - 1))
    garbage = torch.where(hole, torch.nan, x)
    label = torch.where((w == 0).reshape(-1, *(1,) * (y.dim() - 1)), torch.nan if y.is_floating_point() else 99, y)
    kept = lambda x: (oracle(x[:4], y[:4]) * w[:4]).sum() / w.sum()
    torch.testing.assert_close(loss(garbage, label, w), kept(x))
    torch.testing.assert_close(grad(lambda x: loss(x, label, w))(garbage), grad(kept)(x))
    assert loss(garbage, label, w, reduction="none")[4:].eq(0).all()
    nothing = lambda x: loss(x, label, torch.zeros_like(w))
    assert nothing(garbage * torch.nan) == 0 and grad(nothing)(garbage).eq(0).all()


@EACH
def test_it_is_differentiated_and_mapped(name):
    """First and second derivatives, forward and reverse, agree with finite differences. vmap equals a loop."""
    loss, x, y, _, _ = make(name)
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 3.0], dtype=torch.float64)
    check_grads(lambda x: loss(x, y, w), (x,), order=2)
    check_grads(lambda w: loss(x, y, w), (w + 0.5,), order=2)
    many = torch.stack([x, 2 * x, -x])
    torch.testing.assert_close(vmap(lambda x: loss(x, y, w))(many), torch.stack([loss(a, y, w) for a in many]))
    of_each = vmap(hessian(lambda x: loss(x, y, w)))(many[:2])
    torch.testing.assert_close(of_each[0], hessian(lambda x: loss(x, y, w))(x))
    assert jvp(lambda x: loss(x, y), (x,), (x,))[1].isfinite()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_no_example(name, dtype):
    """The result has the predictions' dtype and is close to the f64 result. With weights but without examples, it is
    0."""
    loss, x, y, _, _ = make(name, dtype)
    if name != "in_batch_softmax, log_q":
        empty = loss(x[:0], y[:0], torch.ones(0))
        assert empty.dtype == dtype and empty == 0
    got, want = loss(x, y, torch.ones(B)), loss(x.double(), y.double() if y.is_floating_point() else y)
    torch.testing.assert_close(got.double(), want, rtol=0.05 if dtype == torch.bfloat16 else 1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_small_loss_of_large_logits_keeps_its_digits(dtype):
    """Cross entropies are small differences of large logits. The losses have the bits of torch in every dtype, and are
    not computed as a difference of rounded sums."""
    z, y = torch.tensor([[20.0, 15.5], [0.0, 3.0], [1e4, 1e4 - 16]]).to(dtype), torch.tensor([0, 0, 0])
    assert losses.cross_entropy(z, y, reduction="none").equal(F.cross_entropy(z, y, reduction="none"))
    q, c = (torch.diag(x).to(dtype) for x in (torch.tensor([20.0, 15.5, 1e4]), torch.ones(3)))
    own = F.cross_entropy(q @ c.T, torch.arange(3), reduction="none")
    assert losses.in_batch_softmax(q, c, log_q=None, reduction="none").equal(own)


def test_compiled_it_is_the_same():
    """Under jit the values equal the eager values."""
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 3.0])
    made = {
        n: make(n, torch.float32)[:3] for n in ("bce", "cross_entropy", "multi_task", "in_batch_softmax", "contrastive")
    }
    every = lambda xs, w: {n: made[n][0](x, y, w) for n, (x, y) in xs.items()}
    xs = {n: (x.clone(), y.clone()) for n, (_, x, y) in made.items()}
    torch.testing.assert_close(fr.jit(every)(xs, w), every(xs, w))


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in SOFTMAX])
def test_a_label_that_is_none(name):
    """An invalid label raises with its position if values can be read. Otherwise the loss is NaN (or infinite). With
    weight 0 the label is ignored."""
    loss, x, y, _, wrong = make(name)
    bad = y.clone().to(torch.float64 if isinstance(wrong, float) else y.dtype)
    bad[(2, 0) if y.dim() == 2 else 2] = wrong
    with pytest.raises(ValueError, match=r"label\[2"):
        loss(x, bad)
    assert not vmap(lambda x, y: loss(x, y))(x[None], bad[None]).isfinite()
    w = torch.ones(B, dtype=torch.float64)
    w[2] = 0
    assert loss(x, bad, w).isfinite()


def test_negatives_of_one_batch():
    """Rows with the same candidate are not negatives of each other. Rows of weight 0 are no negatives at all."""
    q, c, w = numbers(1, B, D), numbers(2, B, D), torch.tensor([1.0, 1, 0, 1, 1, 0], dtype=torch.float64)
    got = losses.in_batch_softmax(q, c, w, log_q=None, candidate_ids=ITEMS)
    kept = w != 0
    torch.testing.assert_close(got, losses.in_batch_softmax(q[kept], c[kept], log_q=None, candidate_ids=ITEMS[kept]))
    same = losses.in_batch_softmax(q[:3], c[:3], log_q=None, candidate_ids=ITEMS[:3], reduction="none")
    assert same[0] < losses.in_batch_softmax(q[:3], c[:3], log_q=None, reduction="none")[0]
    with pytest.raises(TypeError, match="log_q"):
        losses.in_batch_softmax(q, c)


def test_two_towers_weigh_their_examples():
    """The loss of two towers is weighted. An example of weight 0 is no negative, and trains no parameter."""
    tables = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
    sides = ((fr.FeatureConfig("user", table="user"),), (fr.FeatureConfig("item", table="item"),))
    model = fr.models.two_tower(tables, *sides, sizes=(8, 3))
    ids = lambda k: fr.KeyedJaggedTensor.from_lists({"user": [[0], [1], [2]][:k], "item": [[5], [6], [7]][:k]})
    loss_fn, params = fr.models.in_batch_softmax_loss(model), model.init(fr.key(0))
    got = loss_fn(params, fr.Batch(ids(3), weight=torch.tensor([1.0, 1.0, 0.0])), key=fr.key(1))[0]
    torch.testing.assert_close(got, loss_fn(params, fr.Batch(ids(2)), key=fr.key(1))[0])


def test_tasks_with_weights_of_their_own():
    """Weights [B, T] can leave out the label of an example for one task alone."""
    x, label = numbers(1, B, T), BOTH.double().clone()
    w = torch.ones(B, T, dtype=torch.float64)
    label[1, 0], w[1, 0] = torch.nan, 0
    keep = torch.arange(B) != 1
    want = losses.bce(x[keep, 0], label[keep, 0]) + losses.mse(x[:, 1], label[:, 1]) / 2
    torch.testing.assert_close(TASKS(x, label, w), want)


def test_a_model_is_trained_on_another_loss():
    """fr.models.loss accepts another loss in place of binary cross entropy, with the batch's weights."""
    model = fr.models.lr((fr.TableConfig("item", 9, 1),), (fr.FeatureConfig("item", table="item"),))
    ids = fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]})
    batch = fr.Batch(ids, torch.tensor([4.5, 2.0]), weight=torch.tensor([1.0, 3.0]))
    params = model.init(fr.key(0))
    value, aux = fr.models.loss(model, losses.mse)(params, batch, key=fr.key(1))
    torch.testing.assert_close(value, losses.mse(aux["logits"], batch.label, batch.weight))
    with pytest.raises(TypeError, match="`loss` is not a function"):
        fr.models.loss(model, "mse")


def test_a_model_of_two_tasks_is_trained():
    """A model with a head for each of two tasks, labels f[B, T] and one joint loss improves on both tasks."""
    item, features = fr.TableConfig("item", 9, 4), (fr.FeatureConfig("item", table="item"),)
    heads = fr.nn.linear(4, 2)

    def predict(params, batch):
        return heads.apply(params.dense, fr.lookup(params.tables, batch.ids, features)["item"])

    loss_fn = lambda params, batch: TASKS(predict(params, batch), batch.label, batch.weight)
    ids = fr.KeyedJaggedTensor.from_lists({"item": [[i] for i in range(B)]})
    batch = fr.Batch(ids, BOTH, weight=torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 0.0]))
    step = fr.train_step(loss_fn, sparse=fr.optim.adam(0.1), dense=fr.optim.dense(torch.optim.Adam, lr=0.1))
    params = fr.Params(fr.init(fr.key(0), [item]), heads.init(fr.key(1)))
    errors = {f"task {t}": lambda p, y, w: (w * (p - y).square()).sum() for t in (0, 1)}
    of_task = lambda params, t: fr.evaluate(
        lambda params, b: predict(params, b)[:, t], params, [batch], {"error": errors[f"task {t}"]},
        label=lambda b: b.label[:, t],
    )["error"]  # fmt: skip
    look = lambda b: fr.validate(b, features, [item], labels=(0, 3))
    done = fr.fit(step, step.init(params), [batch], epochs=60, monitor="loss", mode="min", validate=look)
    assert done.history[-1]["loss"] < done.history[0]["loss"] / 2
    assert of_task(done.best, 1) < of_task(params, 1) / 4


@pytest.mark.parametrize("call, error, part", [
    (lambda x: losses.mse(x, CLICKS[:3]), ValueError, "`label` does not match `predictions`"),
    (lambda x: losses.mse(x, None), TypeError, "`label` is not a tensor"),
    (lambda x: losses.bce(x, CLICKS, torch.ones(B).long()), TypeError, "`weight` is not a tensor of this dtype"),
    (lambda x: losses.bce(x, CLICKS, torch.ones(3)), ValueError, "`weight` does not match"),
    (lambda x: losses.bce(x, CLICKS, -torch.ones(B)), ValueError, "weight[0] = -1"),
    (lambda x: losses.bce(x, CLICKS, reduction="sum"), ValueError, "`reduction` is unknown"),
    (lambda x: losses.cross_entropy(x, CLASSES), ValueError, "`logits` is not a tensor of these dimensions"),
    (lambda x: losses.cross_entropy(numbers(1, B, 3), CLASSES), ValueError, "label[1] = 3"),
    (lambda x: losses.huber(x, CLICKS, delta=0.0), ValueError, "`delta`"),
    (lambda x: losses.huber(x, CLICKS, delta=torch.inf), ValueError, "need  a finite number > 0"),
    (lambda x: losses.multi_task([]), ValueError, "`losses` are none"),
    (lambda x: losses.multi_task([losses.mse, lambda p, y, w: (p - y).mean()]), TypeError, "takes no `reduction`"),
    (lambda x: losses.multi_task([losses.mse], weights=(1.0, 2.0)), ValueError, "do not match the tasks"),
    (lambda x: TASKS(numbers(1, B, 3), numbers(2, B, 3)), ValueError, "`predictions` do not match the tasks"),
    (lambda x: TASKS(x, CLICKS), ValueError, "`predictions` is not a tensor of these dimensions"),
])  # fmt: skip
def test_bad_input(call, error, part):
    """Wrong arguments raise in four parts."""
    with pytest.raises(error) as raised:
        call(numbers(1, B))
    text = str(raised.value)
    assert part in text and all(f"\n  {word}" in text for word in ("got ", "need", "try "))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.5, 2.0])], ids=["no weights", "weights"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bce_has_a_jvp_of_a_jvp(weight, reduction):
    """jacfwd(jacfwd(bce)) and one more jacfwd equal forward over reverse mode, also at logit 0, and compiled for one
    of the losses."""
    z, y = torch.tensor([0.0, -30.0, 2.0], dtype=torch.float64), torch.tensor([0.0, 1.0, 0.3], dtype=torch.float64)
    loss = lambda z: losses.bce(z, y, weight, reduction=reduction).sum()
    second, third = jacfwd(jacfwd(loss)), jacfwd(jacfwd(jacfwd(loss)))
    torch.testing.assert_close(second(z), hessian(loss)(z), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(third(z), jacfwd(hessian(loss))(z), rtol=1e-12, atol=1e-15)
    with contextlib.nullcontext() if reduction == "none" and weight is not None else staged_only():
        torch.testing.assert_close(fr.jit(second)(z), hessian(loss)(z), rtol=1e-12, atol=1e-15)

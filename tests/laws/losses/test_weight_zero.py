"""The derivative with respect to an example's weight where the weight is 0. There, learning to reweight starts.

d/dw_b Σ w l / Σ w = (l_b - mean) / Σ w        for w_b = 0 as for any other weight
"""

import pytest
import torch
from programs.training import FEATURES, SHAPES
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import funcrec as fr
from funcrec import losses, metrics

B = 4
ZEROS = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64)
Z = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
Y = torch.tensor([1.0, 0.0, 1.0, 0.25], dtype=torch.float64)
CLASSES = torch.stack([Z, Z.square(), -Z], 1)
TASKS = losses.multi_task([losses.bce, losses.huber], weights=(1.0, 0.5))
OWN = {  # a loss of (z, w), whose examples are independent
    "bce": lambda w, z: losses.bce(z, Y, w),
    "mse": lambda w, z: losses.mse(z, Y, w),
    "huber": lambda w, z: losses.huber(z, Y, w, delta=0.5),
    "cross_entropy": lambda w, z: losses.cross_entropy(z[:, None] * CLASSES, torch.tensor([0, 1, 2, 1]), w),
    "multi_task": lambda w, z: TASKS(torch.stack([z, z * 2], 1), torch.stack([Y, Y], 1), w),
    "multi_task, weights of each": lambda w, z: TASKS(
        torch.stack([z, z * 2], 1), torch.stack([Y, Y], 1), torch.stack([w, w.flip(0)], 1)
    ),
    "weighted_mean": lambda w, z: losses.weighted_mean(z.sin(), w),
}
HOW = {
    "grad": lambda f, w: grad(f)(w),
    "vjp": lambda f, w: vjp(f, w)[1](torch.ones((), dtype=w.dtype))[0],
    "jacrev": lambda f, w: jacrev(f)(w),
    "jacfwd": lambda f, w: jacfwd(f)(w),
    "jvp": lambda f, w: torch.stack([jvp(f, (w,), (e,))[1] for e in torch.eye(B, dtype=w.dtype)]),
    "linearize": lambda f, w: torch.stack([linearize(f, w)[1](e) for e in torch.eye(B, dtype=w.dtype)]),
    "vmap of grad": lambda f, w: vmap(grad(f))(torch.stack([w, w + 1]))[0],
    "requires grad": lambda f, w: torch.autograd.grad(f(v := w.clone().requires_grad_()), v)[0],
}


def near(w):
    """Return w with 1e-12 in place of weights of 0."""
    return torch.where(w == 0, 1e-12, w)


# linearize, which traces jvp, meets two losses
CELLS = [(n, how) for n in OWN for how in HOW if how != "linearize" or n in ("bce", "multi_task, weights of each")]


@pytest.mark.parametrize("name, how", CELLS, ids=map("-".join, CELLS))
def test_it_is_the_limit_from_above(name, how):
    """The derivative with respect to a weight of 0 equals that of a weight just above 0. The value equals the value
    without the example."""
    f = lambda w: OWN[name](w, Z)
    torch.testing.assert_close(f(ZEROS), f(near(ZEROS)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(HOW[how](f, ZEROS), HOW[how](f, near(ZEROS)), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OWN)
def test_mixed_and_second_derivatives_are_the_limits(name):
    """The second derivative by weights is also a limit from above. So is the derivative of the loss's gradient by a
    weight, from which a training step's derivative follows."""
    f = OWN[name]
    for second in (lambda w: hessian(f)(w, Z), lambda w: jacfwd(grad(f, 1))(w, Z), lambda w: jacrev(grad(f, 1))(w, Z)):
        torch.testing.assert_close(second(ZEROS), second(near(ZEROS)), rtol=1e-6, atol=1e-8)


def test_compiled_it_is_the_limit_too():
    """jit of the derivatives, and derivatives of a jitted loss, give the same limits."""
    several = {n: f for n, f in OWN.items() if n not in ("bce", "mse", "multi_task")}
    every = lambda through: {n: through(lambda w, f=f: f(w, Z)) for n, f in several.items()}
    made = fr.jit(lambda w: {n: f(w) for n, f in every(grad).items()})(ZEROS)
    mixed = fr.jit(lambda w: jacfwd(grad(OWN["bce"], 1))(w, Z))(ZEROS)
    want = {n: grad(lambda w, f=f: f(w, Z))(near(ZEROS)) for n, f in OWN.items()}
    torch.testing.assert_close(made, {n: want[n] for n in several}, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(mixed, jacfwd(grad(OWN["bce"], 1))(near(ZEROS), Z), rtol=1e-6, atol=1e-8)
    jitted = fr.jit(lambda w: OWN["bce"](w, Z))
    torch.testing.assert_close(grad(jitted)(ZEROS), want["bce"], rtol=1e-6, atol=1e-8)


def test_compiled_second_derivatives_are_those_of_eager_mode():
    """Compiled second derivatives of weighted losses, by predictions and weights in any order, equal those of eager
    mode, even at weight 0."""
    ways = [hessian, lambda f, at=0: jacrev(jacfwd(f, at), at)]
    each = [("bce", 0, 1), ("bce", 1, 0), ("huber", 0, 0), ("huber", 1, 1)]
    every = lambda w, z: [ways[i](OWN[n], at)(w, z) for n, i, at in each]
    for got, want in zip(fr.jit(every)(ZEROS, Z), every(ZEROS, Z), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


MADE = {
    "by a comparison": lambda z: (ZEROS > 0).double(),
    "by a factor": lambda z: ZEROS * 1.0,
    "of predictions, cut off": lambda z: torch.where(z.isfinite(), 1.0, 0.0).detach() * ZEROS.sign(),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("how", [hessian, lambda f: jacfwd(jacrev(f)), lambda f: jacfwd(jacfwd(f))])
def test_weights_that_are_made_inside_are_not_followed(name, how):
    """If the function itself makes the weights, rows of weight 0 are not read, whatever they hold, even compiled
    where predictions make them."""
    z = torch.where(ZEROS == 0, torch.tensor([0.0, 0.0, torch.nan, torch.inf]).double(), Z)
    names = ("mse", "huber") + ("bce",) * (how is hessian)
    every = lambda z, how: [how(lambda z, n=n: OWN[n](MADE[name](z), z))(z) for n in names]
    want = every(z, lambda f: jacrev(jacrev(f)))
    torch.testing.assert_close(every(z, how), want, rtol=1e-12, atol=1e-12)
    if how is hessian and name == "of predictions, cut off":
        torch.testing.assert_close(fr.jit(lambda z: every(z, how))(z), want, rtol=1e-12, atol=1e-12)


SUMS = {
    "log_loss": metrics.log_loss(from_logits=True),
    "normalized_entropy": metrics.normalized_entropy(from_logits=True),
    "calibration": metrics.calibration(from_logits=True),
    "ctr": metrics.ctr(),
    "accuracy": metrics.accuracy(from_logits=True),
    "mse": metrics.mse(),
    "rmse": metrics.rmse(),
    "mae": metrics.mae(),
    "auc": metrics.auc(64, from_logits=True),
}


@pytest.mark.parametrize("name", [*SUMS, "exact_auc", "multiclass_accuracy", "recall"])
def test_a_metrics_derivative_is_the_limit(name):
    """The derivative of a metric with respect to a weight of 0 equals that of a weight just above 0."""
    if name == "exact_auc":
        f = lambda w: metrics.exact_auc(Z, Y, w)
    elif name == "multiclass_accuracy":
        m = metrics.multiclass_accuracy()
        f = lambda w: m.compute(m.update(m.init(), CLASSES, torch.tensor([0, 1, 1, 2]), w))
    elif name == "recall":
        m, rows = metrics.recall(1), torch.tensor([[0], [1], [2], [3]])
        f = lambda w: m.compute(m.update(m.init(), rows, fr.JaggedTensor.from_lists([[0], [3], [2], [3]]), w))
    else:
        m = SUMS[name]
        f = lambda w: m.compute(m.update(m.init(), Z, Y, w))
    want = grad(f)(near(ZEROS))
    assert want.ne(0).any()
    torch.testing.assert_close(f(ZEROS), f(near(ZEROS)), rtol=1e-9, atol=1e-9)
    for how in ("grad", "jacfwd", "vmap of grad", "requires grad"):
        torch.testing.assert_close(HOW[how](f, ZEROS), want, rtol=1e-6, atol=1e-8)


def loss_fn(params, batch):
    acts = fr.lookup(params.tables, batch.ids, FEATURES).values
    return losses.bce(acts @ params.dense["w"], batch.label, batch.weight)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("mesh", [None, fr.Mesh.emulated(x=2)], ids=["alone", "ranks"])
def test_through_a_step_it_is_the_limit(mesh, k):
    """The derivative of a step's new tables and dense parameters by a weight of 0 equals that of a weight just above 0.
    This holds in k micro-batches, on one process and on two ranks."""
    g = torch.Generator().manual_seed(0)
    tables = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()}
    params = fr.Params(tables, {"w": torch.randn(17, generator=g, dtype=torch.float64)})
    ids = fr.KeyedJaggedTensor.from_lists({"u": [[0], [1, 2], [3], [4]], "v": [[1], [2], [0, 5], [3]]})
    where = {} if mesh is None else {"mesh": mesh, "plan": fr.Plan.uniform("row_wise", SHAPES, mesh)}
    step = fr.train_step(loss_fn, sparse=fr.optim.sgd(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1),
                         micro_batches=k, **where)  # fmt: skip
    state = step.init(params)

    def moved(w):
        new, _ = step(state, fr.Batch(ids, Y, weight=w))
        whole = new.tables if mesh is None else fr.gather_tables(new.tables, mesh)
        return sum(t.sin().sum() for t in whole.values()) + new.dense["w"].sin().sum()

    w = ZEROS[[0, 2, 1, 3]]
    want = grad(moved)(near(w))
    assert want.ne(0).all()
    torch.testing.assert_close(grad(moved)(w), want, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacfwd(moved)(w), want, rtol=1e-6, atol=1e-8)


def test_a_models_padding_is_read_where_its_weight_is_followed():
    """The loss of a model, with dense inputs and weights of ids, has the limit. Batch norm raises, because its
    statistics leave out examples of weight 0."""
    tables, features = (fr.TableConfig("t", 9, 3),), (fr.FeatureConfig("a", table="t", weighted=True),)
    ids = fr.KeyedJaggedTensor.from_lists(
        {"a": [[1], [2, 3], [4], [5]]}, weights={"a": [[0.5], [1.0, 2.0], [3.0], [1]]}
    )
    dense = torch.linspace(-1, 1, 2 * B).reshape(B, 2)

    def value(w, batch_norm=False):
        model = fr.models.wide_deep(tables, features, num_dense=2, sizes=(4,), batch_norm=batch_norm)
        return fr.models.loss(model)(model.init(fr.key(0)), fr.Batch(ids, Y.float(), dense, w), key=fr.key(1))[0]

    w = ZEROS.float()
    want = grad(value)(torch.where(w == 0, 1e-7, w))
    torch.testing.assert_close(grad(value)(w), want, rtol=1e-4, atol=1e-5)
    assert value(w, True).isfinite() and grad(lambda w: value(w, True))(w + 1).isfinite().all()
    with pytest.raises(ValueError, match="batch norm is discontinuous where a weight is 0"):
        grad(lambda w: value(w, True))(w)


REFUSED = {
    "no finite loss": (
        lambda w: losses.mse(torch.where(w == 0, torch.nan, Z), Y, w), "an example of weight 0 has no finite loss"),
    "all weights 0": (lambda w: losses.mse(Z, Y, w.clamp(max=0)), "all weights are 0"),
    "each example's": (lambda w: (w * losses.bce(Z, Y, w, reduction="none")).sum(), "discontinuous where"),
    "candidates": (lambda w: losses.in_batch_softmax(CLASSES, CLASSES, w, log_q=None), "discontinuous where"),
    "views": (lambda w: losses.contrastive(CLASSES, CLASSES, w), "discontinuous where"),
}  # fmt: skip


@pytest.mark.parametrize("how", ["grad", "jacfwd", "vmap of grad", "requires grad"])
@pytest.mark.parametrize("name", REFUSED)
def test_where_there_is_no_derivative_it_is_refused(name, how):
    """Padding that holds no numbers, a mean without weight, and losses that jump where a weight is 0 have no derivative
    there. Their derivatives raise. Without a derivative, they keep their value."""
    f, part = REFUSED[name]
    assert f(ZEROS).isfinite()
    with pytest.raises(ValueError, match=part):
        HOW[how](f, ZEROS)


def test_compiled_without_a_derivative_it_is_nan():
    """In compiled code, which cannot read values, a derivative that does not exist is NaN."""
    made = fr.jit(lambda w: {n: grad(f)(w) for n, (f, _) in REFUSED.items()})(ZEROS)
    assert all(x.isnan().any() for x in made.values()), made

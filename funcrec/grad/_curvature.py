"""Products with matrices of second derivatives that nobody writes out: the Hessian, Gauss-Newton's matrix, Fisher's.

    H v = d/dt ∇L(w + t v)        G v = Jᵀ (∇²ℓ) J v        F v = 1/B Σ_e g_e (g_eᵀ v)

w are the rows that a batch reads and the dense leaves, so a product costs a few gradients, and memory for the batch.
Shapes: B examples, R rows of a table, D dim.
"""

import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor

from funcrec.core import (
    check,
    describe,
    fail,
    float_leaf_problems,
    named_as,
    own_errors,
    pushed_forward,
    tree_map,
    typed,
)
from funcrec.grad._of_rows import OfRows, of_rows
from funcrec.tables import Params

A = ParamSpec("A")
FORWARD_MODE = threading.RLock()  # torch has one level of forward mode for all threads: another's tangents are zero


class Product(Protocol[A]):
    """A function of parameters, a direction and other arguments that returns a product, which is like a gradient."""

    __module__ = "funcrec.grad"  # what `help` shows

    def __call__(self, params: Params, direction: Params, /, *args: A.args, **kwargs: A.kwargs) -> Params: ...


@typed
def hvp(loss_fn: Callable[Concatenate[Any, A], Tensor]) -> Product[A]:
    """Return a function that multiplies the Hessian of a loss with a direction.

    Args:
      loss_fn: (params, *args, **kwargs) -> f[]. It reads tables only through lookups.

    Returns:
      a function (params, direction, *args, **kwargs) -> Params like a gradient: tables are RowGrads of the rows read,
      and `dense` is like `params.dense`. `direction` is a Params with tables f[R, D] or RowGrads, where a table that is
      absent has zeros, and `dense` like `params.dense`: a gradient of `value_and_grad` is one.

    Raises:
      TypeError, ValueError: if tables are not plain tables, or the direction does not fit.

    Law: the product is that of `torch.func.hessian` by the dense tables, and the difference of two gradients at
      w + t v and w - t v over 2 t, within rounding. Rows of the direction that the loss does not read change nothing.

    Threads: torch has one level of forward mode for all threads, so products of funcrec wait for each other. A
    torch.func.jvp of your own must not run in another thread at the same time: tangents of both may get lost.

    Example:
      >>> import torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2, 2], [7]]})
      >>> loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [clicked]).values * p.dense).square().sum()
      >>> params = fr.Params({"item": torch.ones(1000, 1)}, torch.tensor(2.0))
      >>> product = fr.hvp(loss_fn)(params, params, ids)
      >>> product.tables["item"].coalesce().grads.flatten(), product.dense
      (tensor([96., 24.]), tensor(60.))

    Source: Pearlmutter, "Fast exact multiplication by the Hessian" (1994); forward over reverse, as in JAX's cookbook.
    """

    @named_as(loss_fn)
    def run(params: Params, direction: Params, *args, **kwargs) -> Params:
        of = of_rows(loss_fn, params, *args, **kwargs)
        gradient = torch.func.grad(lambda p: scalar("funcrec.hvp", of.fn(p)))
        return product("funcrec.hvp", of, direction, lambda at, v: pushed_forward(gradient, (at,), (v,)))

    return run


@typed
def gauss_newton_product(predict_fn: Callable[Concatenate[Any, A], Any], loss_fn: Callable[..., Tensor]) -> Product[A]:
    """Return a function that multiplies the Gauss-Newton matrix of a loss of predictions with a direction.

    The matrix is the Hessian without the second derivatives of the predictions. If the loss is convex in the
    predictions, no eigenvalue is negative. For cross-entropy it is Fisher's matrix of the model's own distribution.

    Args:
      predict_fn: (params, *args, **kwargs) -> predictions, a tensor or a tree of floats.
      loss_fn: (predictions, *args, **kwargs) -> f[].

    Returns:
      a function (params, direction, *args, **kwargs) -> Params, as that of `hvp`.

    Law: the product is Jᵀ (∇²ℓ) J v with the Jacobian J of the predictions by the dense tables and leaves, within
      rounding. Where the predictions are linear in the parameters, it is that of `hvp`.

    Example:
      >>> import torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2, 2], [7]]})
      >>> predict = lambda p, ids: fr.lookup(p.tables, ids, [clicked]).values * p.dense
      >>> params = fr.Params({"item": torch.ones(1000, 1)}, torch.tensor(2.0))
      >>> multiply = fr.gauss_newton_product(predict, lambda y, ids: y.square().sum())
      >>> multiply(params, params, ids).dense
      tensor(40.)

    Source: Schraudolph, "Fast curvature matrix-vector products" (2002).
    """

    @named_as(predict_fn)
    def run(params: Params, direction: Params, *args, **kwargs) -> Params:
        call, of = "funcrec.gauss_newton_product", of_rows(predict_fn, params, *args, **kwargs)
        loss = lambda y: scalar(call, loss_fn(y, *args, **kwargs))

        def predictions(at: Params) -> Any:
            y = of.fn(at)
            hint = "the floats that the loss reads; what is not differentiated as an argument of the loss"
            check(call, float_leaf_problems("`predictions{}` cannot be differentiated.", y, hint))
            return y

        def multiply(at: Params, v: Params) -> Params:
            y, back = torch.func.vjp(predictions, at)[:2]
            pushed = pushed_forward(predictions, (at,), (v,))
            return back(pushed_forward(torch.func.grad(loss), (y,), (pushed,)))[0]

        return product(call, of, direction, multiply)

    return run


@typed
def fisher_product(losses_fn: Callable[Concatenate[Any, A], Tensor]) -> Product[A]:
    """Return a function that multiplies the empirical Fisher matrix, the mean of the examples' g gᵀ, with a direction.

    Args:
      losses_fn: (params, *args, **kwargs) -> f[B], the loss of each example.

    Returns:
      a function (params, direction, *args, **kwargs) -> Params, as that of `hvp`.

    Law: the product is the mean over examples of g_e (g_eᵀ v), with g_e the gradient of the loss e, within rounding.

    Example:
      >>> import torch, funcrec as fr
      >>> losses = lambda p, x: p.dense * x
      >>> params = fr.Params({}, torch.tensor(1.0))
      >>> fr.fisher_product(losses)(params, fr.Params({}, torch.tensor(10.0)), torch.tensor([1.0, 3.0])).dense
      tensor(50.)

    Source: Martens, "New insights and perspectives on the natural gradient method" (2020), section 11.
    """

    @named_as(losses_fn)
    def run(params: Params, direction: Params, *args, **kwargs) -> Params:
        call, of = "funcrec.fisher_product", of_rows(losses_fn, params, *args, **kwargs)

        def multiply(at: Params, v: Params) -> Params:
            losses, back = torch.func.vjp(lambda p: each(call, of.fn(p)), at)[:2]
            along = pushed_forward(of.fn, (at,), (v,))
            return back(along / max(losses.shape[0], 1))[0]

        return product(call, of, direction, multiply)

    return run


def product(call: str, of: OfRows, direction: Params, multiply: Callable[[Params, Params], Params]) -> Params:
    """Return the product with a direction like the whole parameters, whose numbers take the parameters' dtypes."""
    own = of.take(direction)
    like = lambda v, at: v.to(at.dtype)
    fn = getattr(of.fn, "fn", of.fn)
    with FORWARD_MODE, own_errors(call, fn, of.params, need="a function that can be differentiated twice"):
        return of.put(multiply(of.params, tree_map(like, own, of.params)))


def scalar(call: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        fail(call, "the loss is not a scalar.", got=describe(loss), need="f[]", hint="loss.mean()", kind=TypeError)
    return loss


def each(call: str, losses: Any) -> Tensor:
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.is_floating_point():
        hint = "losses without the mean over the batch"
        fail(
            call,
            "the losses are not one for each example.",
            got=describe(losses),
            need="f[B]",
            hint=hint,
            kind=TypeError,
        )
    return losses

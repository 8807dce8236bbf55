"""eval_shape: the form of a function's results, without its work.

eval_shape(f, x) = f(x) without values
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from funcrec.compile._trace import HOST, like, without_log_of_shapes
from funcrec.core import any_tracked, fail, is_in_transform, map_tensors, message, own_errors, tree_leaves, typed

A = ParamSpec("A")
R = TypeVar("R")
CALL = "funcrec.eval_shape"


@typed
def eval_shape(fn: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
    """Return the tree that fn(*args, **kwargs) returns, its tensors on the device meta: shapes and dtypes, no values.

    No kernel runs and no memory of a table's size is used, so a model that fits on no machine can be tried. Arguments
    may be on the device meta themselves.

    Args:
      fn: a pure function of trees. It reads no tensor's value on the host.

    Raises:
      TypeError: fn reads a value, or eval_shape is called under a transform; the errors that fn raises from shapes.

    Law: shapes and dtypes are those of fn(*args, **kwargs); the arguments keep their values.

    Example:
      >>> import torch, funcrec as fr
      >>> table = torch.empty(10**12, 64, device="meta")
      >>> read = [fr.FeatureConfig("a", table="t")]
      >>> ids = fr.KeyedJaggedTensor.from_lists({"a": [[1], [2, 3]]}).to("meta")
      >>> fr.eval_shape(lambda t, ids: fr.lookup({"t": t}, ids, read), table, ids)["a"].shape
      torch.Size([2, 64])

    Source: jax.eval_shape.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if is_in_transform() or any_tracked(tensors):
        what, got = "eval_shape is called inside a transform.", "a tracked call"
        hint = "fr.eval_shape(torch.func.grad(f), x)"
        if not is_in_transform() and any(x.requires_grad for x in tensors):
            what, got, hint = "an argument requires grad.", "a tensor that autograd tracks", "x.detach()"
        fail(CALL, what, got=got, need="plain tensors, outside of transforms", hint=hint, kind=TypeError)
    with without_log_of_shapes(), FakeTensorMode(allow_non_fake_inputs=True):
        own_args, own_kwargs = map_tensors(like, (args, kwargs))
        try:
            with own_errors(CALL, fn, *args, *kwargs.values(), need="the arguments that it takes"):
                out = fn(*own_args, **own_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TypeError(message(CALL, [HOST._replace(got=f"{error}")])) from error
    form = lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return map_tensors(form, out)

"""per_example_grads: the gradient of each example of a batch, the gradients of tables as rows.

    (loss_e, grads_e) = value_and_grad(loss)(params, example e)         vmap over e, with a batch of one example each

The examples are stacked: the ids of an example lie in a buffer of their own, as long as the longest. All lookups of
all examples are one lookup. Shapes: B examples, C ids of the longest.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.core import (
    Count,
    Problem,
    check,
    current_level,
    describe,
    random,
    sure,
    tree_flatten,
    tree_unflatten,
    typed,
)
from funcrec.grad._micro_batches import Totals, num_examples, size_problems
from funcrec.grad._value_and_grad import Gradient, loss_and_aux, value_and_grad
from funcrec.jagged import is_concrete, ranges_of_parts, stack_bags
from funcrec.mesh import flatten_parts, is_jagged
from funcrec.tables import Params

R = TypeVar("R")
A = ParamSpec("A")
CALL = "funcrec.per_example_grads"


@typed
def per_example_grads(
    loss_fn: Callable[Concatenate[Any, A], R], has_aux: bool = False, *, max_ids: Count | None = None
) -> Gradient[A, R]:
    """Return a function like that of `value_and_grad`, which differentiates the loss of each example of a batch alone.

    Args:
      loss_fn: (params: Params, batch, *args, **kwargs) -> f[], or (f[], aux) with `has_aux`. It must be a mean over the
        batch's examples, plain or by `losses.weighted_mean` and the losses built on it. It is called on a batch of one
        example.
      max_ids: the most ids of one example in a jagged value, all keys together; None reads it from the batch, which a
        program of `fr.jit` cannot do. Where the program meets a longer example, this example's loss and gradients are
        NaN.

    Returns:
      a function with the arguments of the function that `value_and_grad` returns. It cuts `batch` by its examples, and
      passes the other arguments to every example; it folds the example's number into a keyword `key`. It returns
      (losses f[B], grads) or ((losses, aux), grads), each leaf with a leading dimension B: `grads` is a Params whose
      dense leaves are f[B, ...], and whose row gradients are those of all examples, stacked. Read them by
      `torch.func.vmap` (`vmap(lambda g: g.to_dense())(grads.tables["item"])`), or by `sum_examples`, `example_norms`
      and `example_dots`; `fr.tree.map(lambda x: x[chosen], grads)` takes some of the examples.

    Raises:
      ValueError: if a leaf of the batch has another number of examples, or an example has more than `max_ids` ids.
        Or the loss is one of `funcrec.losses` that needs the other examples, as `in_batch_softmax` does.
      TypeError: if weights of a loss depend on its parameters, or `max_ids` is missing in a program of `fr.jit`.

    A loss of your own that mixes examples (negatives from the batch, a mean over the batch) sees one example alone, and
    so differs in silence. So does data of examples in another argument than `batch`: every example sees all of it.

    Law: if the loss draws nothing by a key, member e has the loss and the gradients of `value_and_grad` for the batch
      of example e alone, times its weight over the mean weight if the loss has weights of examples. The mean over e is
      the loss and the gradient of the whole batch. Both hold within rounding.

    Cost: gradients of dense leaves are B times as large as the leaves. Gradients of tables are the cotangents of the
      lookups, f[B, ΣD] where bags are pooled, and B · C row numbers.

    Example:
      >>> import torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2, 2], [], [0]]})
      >>> loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [clicked])["clicked"] * p.dense).sum()
      >>> params = fr.Params(tables={"item": torch.ones(3, 1)}, dense=torch.tensor(5.0))
      >>> losses, grads = fr.per_example_grads(loss_fn)(params, ids)
      >>> losses, grads.dense, fr.example_norms(grads)
      (tensor([10.,  0.,  5.]), tensor([2., 0., 1.]), tensor([10.1980,  0.0000,  5.0990]))

    Source: `jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))`, for ragged batches and sparse gradients.
    """

    @functools.wraps(loss_fn)
    def run(params: Params, batch: Any, *args, **kwargs):
        examples = stacked_examples(CALL, batch, max_ids)
        return over_examples(loss_fn, has_aux, examples)(params, *args, **kwargs)

    return cast(Any, run)


class Examples(NamedTuple):
    """The examples of a batch, stacked: the tensors of its tree, each with a leading dimension B, and the tree.

    fits: bool[B], whether the ids of an example found room, or None where all do. first: the first example's number.
    """

    tensors: list[Tensor]
    rest: list[Any]
    structure: Any
    count: int
    fits: Tensor | None
    first: int | Tensor = 0

    def tree(self, tensors: list[Tensor]) -> Any:
        """Return one example's batch of its own tensors."""
        mine = iter(tensors)
        return tree_unflatten([next(mine) if x is _TENSOR else x for x in self.rest], self.structure)

    def part(self, begin: int, end: int) -> "Examples":
        """Return the examples from `begin` to `end`."""
        fits = None if self.fits is None else self.fits[begin:end]
        tensors = [x[begin:end] for x in self.tensors]
        return Examples(tensors, self.rest, self.structure, end - begin, fits, self.first + begin)


_TENSOR = object()  # stands for a tensor of the example


def stacked_examples(call: str, batch: Any, max_ids: int | None, *, may_be_empty: bool = False) -> Examples:
    """Return the examples of a batch. Bags that examples share are copied to each of them."""
    leaves, structure = flatten_parts(batch)
    check(call, size_problems(leaves, 1))
    check(call, example_problems(leaves, max_ids, may_be_empty))
    count = next(n for n in map(num_examples, leaves) if n is not None)
    fits, made = [], []
    for x in leaves:
        if is_jagged(x):
            ranges = ranges_of_parts(x, count)
            most = max_ids if max_ids is not None else int(ranges.offsets[:, -1].max()) if count else 0
            capacity = min(most, x.capacity)
            if max_ids is not None and not is_concrete(x.offsets):
                fits.append(ranges.offsets[:, -1] <= capacity)
            x = stack_bags(x, ranges, capacity)
        made.append(x[:, None] if isinstance(x, Tensor) else x)
    flat, structure = tree_flatten(torch_tree.tree_unflatten(made, structure))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    rest = [_TENSOR if isinstance(x, Tensor) else x for x in flat]
    return Examples(tensors, rest, structure, count, torch.stack(fits).all(0) if fits else None)


def over_examples(
    loss_fn: Callable,
    has_aux: bool,
    examples: Examples,
    *,
    own_weights: bool = False,
    transform: Callable[..., Any] = value_and_grad,
) -> Callable:
    """Return a function (params, *args, **kwargs) -> (losses, gradients), stacked, of the examples.

    own_weights: whether an example's weight counts as it is, and not as a share of all weights. transform: what is
    applied to each example's loss."""

    def run(params: Params, *args, **kwargs):
        own = {}
        if "key" in kwargs:
            number = examples.first + torch.arange(examples.count, device=kwargs["key"].device)
            own = {"key": torch.func.vmap(random.fold_in, (None, 0))(kwargs.pop("key"), number)}
        call = lambda params, tensors, own: loss_fn(params, examples.tree(tensors), *args, **kwargs, **own)

        def measure(totals):
            alone = lambda tensors, own: _sums(totals, lambda: call(params, tensors, own))
            return [x.sum() / totals.k for x in torch.func.vmap(alone)(examples.tensors, own)]

        totals = Totals(examples.count, None if own_weights else measure)

        def one(tensors, fits, own):
            totals.level = current_level()

            def loss(params):
                with totals.one_call():
                    out = call(params, tensors, own)
                value, aux = loss_and_aux(CALL, out) if has_aux else (out, ())
                return (value * torch.where(fits[0], 1, torch.nan) if fits else value), aux

            (value, aux), grads = transform(loss, has_aux=True)(params)
            leaves, structure = tree_flatten(aux)
            static.update(leaves=[_TENSOR if isinstance(x, Tensor) else x for x in leaves], structure=structure)
            return value, [x for x in leaves if isinstance(x, Tensor)], grads

        static: dict[str, Any] = {}
        fits = [] if examples.fits is None else [examples.fits]
        losses, tensors, grads = torch.func.vmap(one)(examples.tensors, fits, own)
        each = iter(tensors)
        aux = tree_unflatten([next(each) if x is _TENSOR else x for x in static["leaves"]], static["structure"])
        return ((losses, aux) if has_aux else losses), grads

    return run


def _sums(totals: Totals, call: Callable[[], Any]) -> list[Tensor]:
    """Return the sum of the weights of each weighted mean in one example's call, inside of a vmap over examples."""
    totals.found, level, totals.level = [], totals.level, current_level()
    try:
        with totals.one_call():
            call()
    finally:
        totals.level = level
    return [weights.sum() for weights in totals.found]


# -- validators --------------------------------------------------------------------------------------------------


def example_problems(leaves: Sequence[Any], max_ids: int | None, may_be_empty: bool) -> Iterator[Problem]:
    """Report a batch without examples, and examples with more ids than `max_ids`, or than a program can know."""
    if next(n for n in map(num_examples, leaves) if n is not None) == 0:
        if not may_be_empty:
            yield Problem("`batch` has no examples.", describe(leaves), "at least one example")
        return
    for x in filter(is_jagged, leaves):
        if not is_concrete(x.offsets):
            if max_ids is None:
                got, need = (
                    f"max_ids=None for {describe(x)}, whose lengths cannot be read",
                    "the most ids of an example",
                )
                yield Problem("`max_ids` is missing where lengths cannot be read.", got, need, "max_ids=512", TypeError)
        elif max_ids is not None:
            most = int(ranges_of_parts(x, sure(num_examples(x))).offsets[:, -1].max())
            if most > max_ids:
                yield Problem("`batch` has an example with too many ids.", f"{most} ids", f"at most max_ids={max_ids}")

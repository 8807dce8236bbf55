"""accumulate_grads: compute the gradients of a batch from its micro-batches, one after the other.

    grads.dense = Σ_j d(loss_j / k)        grads.tables: the batch's own entries, in the batch's own order

The activations of only one micro-batch exist at a time. Of earlier micro-batches, only the gradients stay in memory.
Shapes: B examples, k micro-batches of B / k examples.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Problem,
    any_tracked,
    belongs_above,
    check,
    current_level,
    current_run,
    describe,
    fail,
    is_in_transform,
    map_tensors,
    quiet,
    random,
    remembered,
    replace,
    sure,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    typed,
)
from funcrec.grad._value_and_grad import Gradient, loss_and_aux, value_grad_and_overflows
from funcrec.jagged import part_problems
from funcrec.kernels import library
from funcrec.mesh import P, Part, added, axis_size, cut, flatten_parts, is_jagged, pushed, sum_of_kept
from funcrec.tables import Bags, Params, RowGrads

R = TypeVar("R")
A = ParamSpec("A")
CALL = "funcrec.accumulate_grads"


@typed
def accumulate_grads(
    loss_fn: Callable[Concatenate[Any, A], R], num_micro_batches: Count, has_aux: bool = False
) -> Gradient[A, R]:
    """Return a function like that of `value_and_grad`, which differentiates k micro-batches in turn.

    It serves a batch that is too large to differentiate at once.

    Args:
      loss_fn: (params: Params, batch, *args, **kwargs) -> f[], or (f[], aux) with `has_aux`. The loss must be a mean
        over the batch's examples, plain or by `losses.weighted_mean` and the losses built on it. Anything else that
        depends on the whole batch is computed per micro-batch: statistics of a batch norm, a mean over weights of your
        own. `accumulate_grads` refuses `in_batch_softmax`, because a micro-batch has fewer candidates.
      num_micro_batches: k, which divides the number B of examples. Every tensor and every jagged value of the batch has
        B examples.

    Returns:
      a function with the arguments and results of the function that `value_and_grad` returns. It cuts `batch` by its
      examples, and passes the other arguments to every micro-batch. Before each call it folds the micro-batch's number
      into a keyword `key`, as a mesh folds in the rank. aux: the mean of each float tensor over the micro-batches. The
      function refuses an aux tensor [examples of a micro-batch, ...]. Every other leaf of aux must be a value that is
      not a tensor, equal in all micro-batches.

    Raises:
      ValueError: if k does not divide the batch, tensors differ in their number of examples, or the loss looks up other
        tables in some micro-batch.
      TypeError: if the weights of a loss depend on its parameters.

    Law: grads.tables are the batch's entries in the batch's order. Equal cotangents give equal bits, in sums and in
      every update. Cotangents are equal if k is a power of two, and the loss treats each example alone by operations
      whose rounding does not depend on the number of examples (matrix products may break this). Otherwise cotangents
      agree within 1e-6, and so do the loss and dense gradients. k micro-batches give the bits of k real ranks with one
      micro-batch each, if the ranks add their gradients in order. An emulated mesh gives the same bits except in matrix
      products: one product of all ranks may sum in another order than the product of one rank. Inside of `invariant`,
      the micro-batches are added as a tree: if k is a power of two, and B / k is more than 128, all gradients have the
      bits of the undivided batch. So has the loss if B is a power of two; else its mean rounds in each micro-batch.

    Cost: activations of B / k examples, besides the ids and the cotangents of all lookups; inside of `invariant`, up to
      log2 k + 1 sums of dense gradients. With weights the loss runs once more, to sum the weights over the batch. Under
      `jit` the micro-batches are one program. The program cannot read lengths, so every part of a jagged value has room
      for all ids of the value. If the ids of a batch nearly fill the capacity, this costs k passes over the capacity.

    Example:
      >>> import torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2], [2], [0], []]})
      >>> loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [clicked])["clicked"] * p.dense).mean()
      >>> params = fr.Params(tables={"item": torch.ones(3, 1)}, dense=torch.tensor(4.0))
      >>> loss, grads = fr.accumulate_grads(loss_fn, 2)(params, ids)
      >>> loss, grads.dense, grads.tables["item"].to_dense().flatten()
      (tensor(3.), tensor(0.7500), tensor([1., 0., 2.]))

    Source: gradient accumulation as in optax.MultiSteps, inside one step.
    """
    run = over_micro_batches(loss_fn, num_micro_batches, has_aux)
    pair: Callable[..., Any] = lambda params, batch, *args, **kwargs: run(params, batch, *args, **kwargs)[:2]
    return cast(Any, functools.wraps(loss_fn)(pair))


def over_micro_batches(loss_fn: Callable, num_micro_batches: int, has_aux: bool) -> Callable:
    """Return a function like that of `value_grad_and_overflows`, which computes its results from k micro-batches."""
    k = num_micro_batches

    def run(params: Params, batch: Any, *args, **kwargs):
        parts = micro_batches(batch, k)
        own = [{**kwargs, "key": random.fold_in(kwargs["key"], j)} if "key" in kwargs else kwargs for j in range(k)]
        each = list(zip(parts, own, strict=True))
        run_all = lambda: [loss_fn(params, part, *args, **more) for part, more in each]
        totals = Totals(k, functools.partial(means_over_parts, run_all))

        def share(params, batch, *args, **kwargs):
            with totals.one_call():
                out = loss_fn(params, batch, *args, **kwargs)
            loss, aux = loss_and_aux(CALL, out) if has_aux else (out, ())
            return (loss / k if isinstance(loss, Tensor) else loss), aux

        differentiated = value_grad_and_overflows(share, has_aux=True)
        made, dense = [], []
        for j, (part, more) in enumerate(each):
            now = in_turn(part, [made[-1], dense]) if made else part
            value, grads, overflows = differentiated(params, now, *args, **more)
            dense = pushed(dense, grads.dense, j)
            made.append((value, grads.tables, overflows))
        values, rows, overflows = zip(*made, strict=True)
        loss, dense = added([loss for loss, _ in values]), sum_of_kept(dense)
        tables = {n: in_order([g[n] for g in rows]) for n in rows[0]}
        value = (loss, mean_aux([aux for _, aux in values], examples_of(parts[0]))) if has_aux else loss
        return value, Params(tables, dense), [x for each in overflows for x in each]

    return run


def micro_batches(batch: Any, k: int) -> list[Any]:
    """Return k parts of the batch, with its examples in order."""
    leaves, structure = flatten_parts(batch)
    check(CALL, size_problems(leaves, k))
    stacked = [cut(Part("batch", P("micro") if num_examples(x) is not None else P(), x), {"micro": k}) for x in leaves]
    part = lambda x, j: map_tensors(lambda t: t[j], x) if num_examples(x) is not None else x
    return [tree_unflatten([part(x, j) for x in stacked], structure) for j in range(k)]


def in_turn(part: Any, done: Any) -> Any:
    """Return the part, which in a traced program waits for `done`.

    Otherwise the compiler could run all micro-batches side by side, and keep the tensors that each derivative needs.
    """
    if not torch._C._len_torch_dispatch_stack() or is_in_transform():
        return part
    leaves, structure = tree_flatten(part)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    before = [x for x in tree_leaves(done) if isinstance(x, Tensor)]
    if any_tracked([*(leaves[i] for i in at), *before]):  # the operator that waits has no derivative
        return part
    for i, x in zip(at, torch.ops.funcrec_tables.after([leaves[i] for i in at], before), strict=True):
        leaves[i] = x
    return tree_unflatten(leaves, structure)


library.define(
    "funcrec_tables",
    "after",
    "(Tensor[] xs, Tensor[] done) -> Tensor[]",
    lambda xs, done: [x.clone() for x in xs],
    lambda xs, done: [torch.empty_like(x) for x in xs],
)


def in_order(parts: Sequence[RowGrads]) -> RowGrads:
    """Return the entries of all micro-batches in the whole batch's order: by lookup, then feature, then example.

    `coalesce` adds a row's entries in this order.
    """
    if len({tuple(t.features if isinstance(t, Bags) else None for t in g.terms) for g in parts}) > 1:
        got, hint = "another structure of its gradient in some of them", "one loss for all examples"
        fail(CALL, "the micro-batches look up other tables.", got=got, need="the same lookups in all", hint=hint)
    n = axis_size(parts[0].axes) if parts[0].axes else 1  # On a mesh, a lookup has a term for each sender.
    each = range(0, len(parts[0].terms), n)
    return replace(parts[0], terms=tuple(t for i in each for t in _by_feature([g.terms[i : i + n] for g in parts])))


def _by_feature(groups: Sequence[Sequence[Any]]) -> Iterator[Any]:
    first = groups[0][0]
    if not isinstance(first, Bags) or len(first.features) == 1:
        yield from (t for group in groups for t in group)
        return
    for f in range(len(first.features)):
        yield from (replace(t, features=t.features[f : f + 1]) for group in groups for t in group)


def examples_of(part: Any) -> int:
    return next(n for n in map(num_examples, flatten_parts(part)[0]) if n is not None)


def mean_aux(auxs: Sequence[Any], size: int) -> Any:
    """Return the tree of the means of each float tensor in `auxs`; other leaves must be the same in all `auxs`."""
    flat = [tree_flatten(x) for x in auxs]
    columns, structure = list(zip(*(leaves for leaves, _ in flat), strict=True)), flat[0][1]
    check(CALL, aux_problems(columns, [s for _, s in flat], size))
    mean = lambda xs: added(xs) / len(xs) if isinstance(xs[0], Tensor) else xs[0]
    return tree_unflatten([mean(xs) for xs in columns], structure)


# -- weights of examples -----------------------------------------------------------------------------------------


class Totals:
    """The total weights of each weighted mean in a loss that is called on k parts of a batch.

    measure: a function of these totals that runs the loss on all parts, and returns the mean total of each weighted
    mean, in the order of the loss's calls. The first weighted mean calls it, because the mean needs all weights. None
    if each weight counts as it is: then every total is 1.
    """

    def __init__(self, k: int, measure: Callable[["Totals"], list[Tensor]] | None):
        self.k, self.measure, self.level, self.run = k, measure, current_level(), current_run()
        self.found: list[Tensor] = []
        self.means: list[Tensor] | None = None  # the mean total of each weighted mean, in the order of the loss's calls
        self.place, self.finding = 0, False

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        self.place, token = 0, _totals.set(self)
        try:
            yield
        finally:
            _totals.reset(token)
        if self.means is not None and self.place != len(self.means):
            self.refuse_impure()

    def find(self) -> None:
        self.finding, place = True, self.place
        try:
            with quiet():
                means = sure(self.measure)(self)
        finally:
            self.finding = False
        self.means, self.place = means, place

    def mean_of(self, weights: Tensor) -> Tensor:
        if belongs_above(weights, self.level):
            got = "weights that follow from parameters"
            hint = "weight.detach(), or fr.value_and_grad of the whole batch"
            fail(CALL, "weights of examples are not the batch's own.", got=got, need="data", hint=hint, kind=TypeError)
        if self.measure is None:
            return torch.ones_like(weights.sum())
        if self.finding:
            self.found.append(weights)
            return torch.ones_like(weights.sum())  # Nothing uses this loss. A part's sum may be 0.
        if self.means is None:
            self.find()
        means = sure(self.means)
        if self.place >= len(means):
            self.refuse_impure()
        self.place += 1
        return means[self.place - 1]

    def refuse_impure(self) -> None:
        got, need = "another number of weighted means in some call", "the same ones for every micro-batch"
        fail(CALL, "the loss is not a function of its arguments.", got=got, need=need, hint="one loss for all examples")


def means_over_parts(run_all: Callable[[], Any], totals: Totals) -> list[Tensor]:
    """Return the mean totals after run_all(), which runs the loss on all parts, in order."""
    run_all()
    if len(totals.found) % totals.k:
        totals.refuse_impure()
    each = len(totals.found) // totals.k
    # One sum over all weights gives the bits of the whole batch's sum.
    return [torch.cat(totals.found[i::each]).sum() / totals.k for i in range(each)]


_totals: ContextVar[Totals | None] = ContextVar("funcrec_totals", default=None)


def total_weight(weights: Tensor) -> Tensor:
    """Return the sum f[] of weights f[B]. In a micro-batch, return the mean of the sums of all micro-batches."""
    totals = _totals.get()
    return weights.sum() if totals is None else remembered(totals.run, lambda: totals.mean_of(weights))


def refuse_in_micro_batches(call: str, what: str) -> None:
    """Raise if there are several micro-batches, for a loss that is not a mean over examples."""
    totals = _totals.get()
    if totals is not None and totals.k > 1:
        hint = "num_micro_batches=1, or smaller batches with fr.optim.accumulate"
        fail(call, f"{what} of a micro-batch are not those of the batch.", got=f"1 of {totals.k} micro-batches",
             need="the whole batch", hint=hint)  # fmt: skip


# -- validators --------------------------------------------------------------------------------------------------


def num_examples(x: Any) -> int | None:
    """Return how many examples a leaf of a batch has; None if it is not a tensor, -1 if it has no examples."""
    if is_jagged(x):
        if getattr(x, "inverse", None) is not None:
            return x.num_examples
        return x.num_bags if getattr(x, "strides", None) is None else -1
    return (x.shape[0] if x.dim() else -1) if isinstance(x, Tensor) else None


def size_problems(leaves: Sequence[Any], k: int) -> Iterator[Problem]:
    sizes = [n for n in map(num_examples, leaves) if n is not None]
    if not sizes:
        need = "tensors [B, ...], or jagged values"
        yield Problem("`batch` has no examples.", describe(leaves), need, kind=TypeError)
    elif -1 in sizes:
        odd = next(x for x in leaves if num_examples(x) == -1)
        hint = "a keyword argument for what is of no example"
        yield Problem("`batch` cannot be cut by its examples.", describe(odd), "B examples in every leaf", hint)
    elif len(set(sizes)) > 1:
        got, hint = f"{sorted(set(sizes))} examples", "a keyword argument for what is of no example"
        yield Problem("`batch` has other numbers of examples in some leaves.", got, "one B", hint)
    elif sizes[0] % k:
        hint = "pad with examples of weight 0 (fr.data.loader(pad_last=True)), or another `num_micro_batches`"
        yield Problem("`batch` is not cut evenly.", f"{sizes[0]} examples", f"a multiple of {k}", hint)
    else:
        for x in leaves:
            if is_jagged(x) and getattr(x, "inverse", None) is not None:
                yield from part_problems(x, "batch", k)


def aux_problems(columns: Sequence[tuple], structures: Sequence[Any], size: int) -> Iterator[Problem]:
    """Yield the problems of `aux` from several micro-batches. size: the number of examples in a micro-batch."""
    if any(s != structures[0] for s in structures):
        yield Problem("`aux` has another structure in some micro-batches.", f"{structures}", "one", kind=TypeError)
    for xs in columns:
        if isinstance(xs[0], Tensor):
            if not xs[0].is_floating_point():
                hint = "aux.float(), or fr.value_and_grad of the whole batch"
                yield Problem("`aux` has no mean.", describe(xs[0]), "float tensors", hint, TypeError)
            elif len(xs) > 1 and xs[0].shape[:1] == (size,):
                got, hint = f"{describe(xs[0])}, micro-batches of {size} examples", "x.mean(0); of no example: x[None]"
                yield Problem("`aux` has a value for each example.", got, "a value that has a mean", hint)
        elif any(type(x) is not type(xs[0]) or x != xs[0] for x in xs):
            yield Problem("`aux` differs between micro-batches.", f"{xs[0]!r} and others", "one value", "a tensor")

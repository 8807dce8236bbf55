"""Gradients of single examples, stacked as `per_example_grads` returns them: sums, norms, inner products.

    sum_examples: Σ_e weight_e · g_e        example_norms: ‖g_e‖        example_dots: g_e · h

For norms, example e has rows of its own, e · R to (e + 1) · R: so one call of a kernel adds the repeated rows of each
example.
Shapes: B examples, R rows of a table, D dim.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import (
    Form,
    Problem,
    check,
    describe,
    fail,
    float_leaf_problems,
    paths,
    replace,
    reported,
    tree_leaves,
    tree_map,
    typed,
)
from funcrec.grad._example_rows import first_rows, written_out
from funcrec.jagged import JaggedTensor, take_ranges
from funcrec.tables import Bags, Entries, Params, RowGrads, is_stacked, root


@typed
def sum_examples(grads: Params, weights: Annotated[Tensor, Form("f[B]")] | None = None) -> Params:
    """Return Σ_e weight_e · grads_e, as `value_and_grad` returns the gradient of a batch.

    Args:
      grads: the gradients of B examples, from `per_example_grads`.
      weights: f[B]; None for 1. They have the dtype of the gradients: f32 weights of 1 / B cost f64 gradients digits.

    Law: with weights 1 / B, it is the batch's gradient within rounding; its entries come in the batch's order.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, x: (p.dense * x).sum()
      >>> grads = fr.per_example_grads(loss_fn)(fr.Params({}, torch.ones(())), torch.tensor([1.0, 4.0]))[1]
      >>> fr.sum_examples(grads, torch.tensor([1.0, 0.5])).dense
      tensor(3.)
    """
    count = checked_count("funcrec.sum_examples", grads, weights)
    w = lambda x: torch.ones_like(x[:, 0]) if weights is None else weights.to(x.dtype)
    summed = lambda x: (w(flat := x.reshape(count, -1)) @ flat).reshape(x.shape[1:]) if isinstance(x, Tensor) else x
    dense = tree_map(summed, grads.dense)
    shared: dict = {}
    tables = {n: in_one(g, weights, shared) for n, g in grads.tables.items()}
    return Params(tables, dense)


@typed
def example_norms(grads: Params) -> Tensor:
    """Return the Euclidean norm of each example's gradient, over all tables and all dense leaves -> f[B].

    grads: the gradients of B examples, from `per_example_grads`. Rows that an example reads twice are added first.

    Law: member e is `fr.global_norm(tables, *dense leaves)` of example e's gradients, within rounding. Its derivative
      is 0 at 0.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, x: (p.dense * x).sum()
      >>> params = fr.Params({}, torch.ones(2))
      >>> fr.example_norms(fr.per_example_grads(loss_fn)(params, torch.tensor([[3.0, 4.0], [0.0, 1.0]]))[1])
      tensor([5., 1.])
    """
    count = checked_count("funcrec.example_norms", grads)
    wide = lambda x: x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # whose squares may overflow
    squares = [_dot(y := wide(x).reshape(count, -1), y) for x in _tensors(grads.dense)]
    height = max(sum(g.num_embeddings for g in grads.tables.values()), 1)
    for example, row, values in written_out(grads.tables):
        own = torch.where(row < 0, -1, example * height + row)
        whole = RowGrads.from_entries(own, values, num_embeddings=count * height).coalesce()
        square = torch.where(whole.valid, whole.grads.square().sum(1), 0)
        at = torch.where(whole.valid, whole.rows // height, 0)
        squares.append(square.new_zeros(count).index_add(0, at, square))
    return root(torch.stack(squares).sum(0))


@typed
def example_dots(grads: Params, other: Params) -> Tensor:
    """Return the inner product of each example's gradient with one gradient -> f[B].

    It is what a step along `other` changes in each example's loss, to first order. Times the rate, summed over
    checkpoints, it is TracIn's influence of training examples on the example whose gradient is `other`.

    Args:
      grads: the gradients of B examples, from `per_example_grads`.
      other: the gradient of one loss, from `value_and_grad`, for the same parameters. For several others, stacked by
        `per_example_grads`: `torch.func.vmap(lambda o: fr.example_dots(grads, o))(others)`, a row for each.

    Law: the inner product of the dense forms, within rounding. Rows that only one of the two reads add nothing.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, x: (p.dense * x).sum()
      >>> params = fr.Params({}, torch.ones(2))
      >>> grads = fr.per_example_grads(loss_fn)(params, torch.tensor([[1.0, 0.0], [2.0, 3.0]]))[1]
      >>> fr.example_dots(grads, fr.value_and_grad(loss_fn)(params, torch.tensor([10.0, 1.0]))[1])
      tensor([10., 23.])

    Source: Pruthi et al., "Estimating training data influence by tracing gradient descent" (NeurIPS 2020).
    """
    count = checked_count("funcrec.example_dots", grads)
    check("funcrec.example_dots", other_problems(grads, other, count))
    named = dict(paths(other.dense))
    out = [x.reshape(count, -1) @ named[path].flatten() for path, x in paths(grads.dense)]
    first = first_rows(grads.tables)
    coalesced = {name: g.coalesce() for name, g in other.tables.items()}
    for example, row, values in written_out(grads.tables):
        same_dim = [name for name, g in grads.tables.items() if g.dim == values.shape[1]]
        theirs = [(coalesced[name], first[name]) for name in same_dim]
        rows = torch.cat([torch.where(g.valid, g.rows.long() + r, -1) for g, r in theirs])
        rows, order = rows.sort()
        if not rows.shape[0]:  # `other` read no table
            out.append(values.new_zeros(count))
            continue
        at = torch.searchsorted(rows, row).clamp(max=rows.shape[0] - 1)
        gradient = torch.cat([g.grads for g, _ in theirs]).index_select(0, order[at])
        each = torch.where((row >= 0) & (rows[at] == row), (values * gradient).sum(1), 0)
        out.append(each.new_zeros(count).index_add(0, example, each))
    return torch.stack(out).sum(0)


@typed
def gradient_noise_scale(grads: Params) -> Tensor:
    """Return the simple noise scale tr(Σ) / ‖G‖² of the examples' gradients -> f[].

    Below a batch size of about this scale, a batch twice as large nearly halves the number of steps; far above it, a
    larger batch gains little. Σ is the covariance of one example's gradient, G the true gradient; both are estimated
    without bias from B >= 2 examples, so that for few examples the result may be negative.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, x: (p.dense * x).sum()
      >>> grads = fr.per_example_grads(loss_fn)(fr.Params({}, torch.ones(())), torch.tensor([1.0, 2.0, 3.0]))[1]
      >>> fr.gradient_noise_scale(grads)
      tensor(0.2727)

    Source: McCandlish et al., "An empirical model of large-batch training" (2018), appendix A.
    """
    call = "funcrec.gradient_noise_scale"
    count = checked_count(call, grads)
    if count < 2:
        fail(call, "one example has no spread.", got=f"{count} example", need="at least 2 examples")
    total = sum_examples(grads)
    squares = [x.square().sum() for x in _tensors(total.dense)]
    of_mean = torch.stack(squares + [g.squared_norm() for g in total.tables.values()]).sum() / count**2
    of_each = example_norms(grads).square().mean()
    return count * (of_each - of_mean) / (count * of_mean - of_each)


def in_one(grads: RowGrads, weights: Tensor | None, shared: dict) -> RowGrads:
    """Return the sum of the stacked gradients of B examples, each times its weight.

    shared: a dict for the calls of one Params. Terms that share a tensor keep sharing it, so that kernels read it once.
    """

    def once(x: Tensor | None, bags: Tensor | None, make: Callable) -> Any:
        key = id(x), id(bags)  # one buffer may have other bags in another lookup
        if x is not None and key not in shared:
            shared[key] = (x, bags, make(x))  # with both, so that no other tensor gets their ids
        return None if x is None else shared[key][2]

    scaled = lambda x: x if weights is None else x * weights.to(x.dtype)[:, None, None]
    terms = []
    for t in grads.terms:
        if isinstance(t, Entries):
            rows = t.rows if t.count is None else torch.func.vmap(Entries.marked)(t)
            repeats = None if t.repeats is None else t.repeats.flatten()
            terms.append(Entries(rows.flatten(), scaled(t.grads).flatten(0, 1), None, repeats))
            continue
        take = functools.partial(_taken, *_places(t))
        rows, scale = once(t.rows, t.offsets, take), once(t.weights, t.offsets, take)
        d = once(t.d, None, lambda x: scaled(x).flatten(0, 1))
        features = tuple(f._replace(first_bag=f.first_bag * t.d.shape[0]) for f in t.features)
        weights_of_ids = None if scale is None else scale.values
        terms.append(Bags(d, rows.values, rows.offsets, weights_of_ids, features))
    mark = grads.mark[0] if grads.mark is not None and grads.mark.dim() else grads.mark
    return replace(grads, terms=tuple(terms), coalesced=False, mark=mark)


def _places(term: Bags) -> tuple[Tensor, Tensor]:
    """Return (starts, lengths) of all examples' bags in the stacked rows [B, C], key-major as in a batch's offsets."""
    count, size = term.rows.shape
    grid = lambda x: x.reshape(count, -1, term.d.shape[1]).transpose(0, 1).flatten().long()
    first = torch.arange(count, device=term.rows.device)[:, None] * size
    return grid(term.offsets[:, :-1] + first), grid(torch.diff(term.offsets, dim=1))


def _taken(starts: Tensor, lengths: Tensor, x: Tensor) -> JaggedTensor:
    return take_ranges(x.flatten(), None, starts, lengths, x.numel())


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner product of each row -> f[B], without a temporary of the size of x."""
    return (x[:, None, :] @ y[:, :, None])[:, 0, 0]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _floats(term: Entries | Bags) -> Tensor:
    return term.d if isinstance(term, Bags) else term.grads


# -- validators --------------------------------------------------------------------------------------------------


def checked_count(call: str, grads: Params, weights: Tensor | None = None) -> int:
    """Return B, after checks that the gradients are those of B examples."""
    check(call, stacked_problems(grads))
    sizes = [_floats(g.terms[0]).shape[0] for g in grads.tables.values()]
    sizes += [x.shape[0] for x in _tensors(grads.dense)]
    check(call, size_problems(sizes, weights))
    return sizes[0]


def stacked_problems(grads: Params) -> Iterator[Problem]:
    hint = "losses, grads = fr.per_example_grads(loss_fn)(params, batch)"
    if (yield from reported(table_problems(grads.tables, "grads"))):
        return
    for name, g in grads.tables.items():
        if not all(map(is_stacked, g.terms)):
            yield Problem(
                f"`grads.tables[{name!r}]` is not of examples.", describe(g), "stacked RowGrads", hint, TypeError
            )
        elif g.first is not None or g.origin is not None or g.axes:
            got = f"{describe(g)} of tables on a mesh"
            yield Problem(f"`grads.tables[{name!r}]` is one rank's part.", got, "tables in one process", "", TypeError)
    if (yield from reported(float_leaf_problems("`grads.dense{}` is not a gradient.", grads.dense, hint))):
        return
    for path, x in paths(grads.dense):
        if not x.dim():
            yield Problem(f"`grads.dense{path}` is not of examples.", describe(x), "f[B, ...]", hint)


def table_problems(tables: Any, name: str) -> Iterator[Problem]:
    hint = "the result of fr.value_and_grad, or of fr.per_example_grads"
    if not isinstance(tables, Mapping) or not all(isinstance(g, RowGrads) for g in tables.values()):
        yield Problem(f"`{name}.tables` are not row gradients.", describe(tables), "{name: RowGrads}", hint, TypeError)


def size_problems(sizes: Sequence[int], weights: Tensor | None) -> Iterator[Problem]:
    if not sizes:
        yield Problem("`grads` is empty.", "no table and no dense leaf", "the gradients of examples")
    elif len(set(sizes)) > 1:
        yield Problem("`grads` has other numbers of examples in some leaves.", f"{sorted(set(sizes))}", "one B")
    elif weights is not None and weights.shape[0] != sizes[0]:
        yield Problem("`weights` is not one for each example.", describe(weights), f"f[{sizes[0]}]")


def other_problems(grads: Params, other: Params, count: int) -> Iterator[Problem]:
    if (yield from reported(table_problems(other.tables, "other"))):
        return
    if (
        yield from reported(
            float_leaf_problems("`other.dense{}` is not a gradient.", other.dense, "fr.value_and_grad(loss_fn)")
        )
    ):
        return
    shapes = lambda p: {n: (g.num_embeddings, g.dim) for n, g in p.tables.items()}
    if any(any(map(is_stacked, g.terms)) for g in other.tables.values()):
        got, hint = "gradients of examples", "fr.value_and_grad, or torch.func.vmap over `other`"
        yield Problem("`other` is not one gradient.", got, "the gradient of one loss", hint, TypeError)
    elif shapes(grads) != shapes(other):
        yield Problem("`other` has other tables.", f"{shapes(other)}", f"{shapes(grads)}")
    mine = {path: list(x.shape[1:]) for path, x in paths(grads.dense)}
    theirs = {path: list(x.shape) for path, x in paths(other.dense)}
    if mine != theirs:
        yield Problem("`other` has other dense leaves.", f"{theirs}", f"{mine}")

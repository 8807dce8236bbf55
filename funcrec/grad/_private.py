"""private_grads: gradients that say little about any one example, for differentially private training (DP-SGD).

    g = (Σ_e min(1, C / ‖g_e‖) · g_e + σ · C · N(0, 1)) / B

Source: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1.
Shapes: B examples, R rows of a table, D dim.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    NotNegative,
    Positive,
    Problem,
    Scalar,
    check,
    describe,
    member_problems,
    named_as,
    or_nan,
    paths,
    random,
    sure,
    tree_leaves,
    tree_map,
    typed,
)
from funcrec.grad._examples import example_norms, in_one, sum_examples
from funcrec.grad._micro_batches import num_examples
from funcrec.grad._noise import with_noise
from funcrec.grad._per_example import Examples, over_examples, stacked_examples
from funcrec.grad._value_and_grad import find_sites, params_problems
from funcrec.jagged import is_concrete
from funcrec.kernels import ops
from funcrec.mesh import bound_names, flatten_parts
from funcrec.tables import Params, RowGrads, summed

CALL = "funcrec.private_grads"


@typed
def private_grads(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    max_norm: Positive | Scalar,
    noise_multiplier: NotNegative | Scalar,
    rows: Literal["all", "touched"] = "all",
    batch_size: Count | None = None,
    max_ids: Count | None = None,
    chunk_size: Count | None = None,
) -> Callable[..., tuple[Any, Params]]:
    """Return a function (params, batch, *args, key, **kwargs) -> (loss f[], grads), whose gradients are private.

    Each example's gradient, over all tables and dense leaves, is scaled to a norm of at most C = `max_norm`. Normal
    noise of standard deviation `noise_multiplier` · C is added to every number of their sum. An example whose gradient
    is not finite (also one with more than `max_ids` ids in a program) adds nothing. A batch without examples, as
    drawing each with a chance may give, has the gradient 0 and gets noise alone.

    Args:
      loss_fn: (params, batch, ...) -> f[], a mean over the batch's examples, all of whose data is in `batch`. An
        example of weight w counts w times its loss before it is scaled; the weights of other examples change nothing.
        With `has_aux` it returns (f[], aux), and aux holds no tensor: a tensor could show an example.
      max_norm: C > 0. noise_multiplier: σ >= 0. Each is a number, or f[]. A tensor that is out of its range makes the
        gradients NaN.
      rows: the rows of tables that get noise. "all": every row of every table, so a step costs as much as its tables
        are large; the guarantee of DP-SGD holds. (`private_step` has this guarantee at the cost of the batch.)
        "touched": the rows that the batch reads. This is fast, but shows which rows were read: it protects the values
        of gradients, not the fact that an id was there.
      batch_size: the divisor B, for batches drawn with a chance for each example; None for the batch's own number.
      max_ids: see `per_example_grads`.
      chunk_size: how many examples are differentiated at once; None for all. Fewer take less memory.

    Returns:
      the function. Its `key` i64[] makes the noise: a step needs a key of its own, such as fold_in(state.key,
      state.step). `loss_fn` gets another key, folded with the example's number, if it has a parameter `key`. The loss
      is the mean of the examples' own losses, without noise: it is not private. Of a model, it is
      `private_grads(lambda p, b, *, key: fr.models.loss(model)(p, b, key=key)[0])`; a step takes the model itself.

    Raises:
      TypeError: without a key; for tables that are not a dict in one process (on a mesh, pass this function to
        `train_step`); for dense leaves of 16 bits, in which
        noise would round away; for data of examples outside of the batch.

    Law: without noise, the mean of the examples' clipped gradients, whatever the chunks are, within rounding. The noise
      of a row is a function of the key, the table's name and the row: not of the batch, its order, or other tables. The
      noise of a dense leaf follows the key and the leaf's place. It is drawn in f64, up to 8.1 deviations.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, x: (p.dense * x).sum(-1).mean()
      >>> grads_fn = fr.private_grads(loss_fn, max_norm=1.0, noise_multiplier=0.0)
      >>> batch = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
      >>> loss, grads = grads_fn(fr.Params({}, torch.ones(2)), batch, key=fr.key(0))
      >>> loss, grads.dense
      (tensor(3.8500), tensor([0.4500, 0.6000]))
    """

    return noisy_grads(Private(loss_fn, has_aux, max_norm, noise_multiplier, rows, batch_size, max_ids, chunk_size))


class Private(NamedTuple):
    """The arguments of `private_grads`. rows: also "later", for tables that get their noise elsewhere."""

    loss_fn: Callable
    has_aux: bool
    max_norm: float | Tensor
    noise_multiplier: float | Tensor
    rows: str
    batch_size: int | None
    max_ids: int | None
    chunk_size: int | None

    def examples(self, batch: Any) -> Examples:
        return stacked_examples(CALL, batch, self.max_ids, may_be_empty=True)

    def chunks(self, examples: Examples) -> Iterator[Examples]:
        size = self.chunk_size or max(examples.count, 1)
        for begin in range(0, examples.count, size):
            yield examples.part(begin, min(begin + size, examples.count))

    def keyed(self, key: Tensor) -> dict[str, Tensor]:
        """Return the keyword of the loss for a step's key."""
        return {"key": random.split(key)[1]} if takes_key(self.loss_fn) else {}

    @property
    def scale(self) -> float | Tensor:
        """Return the deviation of the noise of a sum; NaN if a tensor is out of its range."""
        bound = or_nan(self.max_norm, lambda x: (x > 0) & x.isfinite())
        return bound * or_nan(self.noise_multiplier, lambda x: (x >= 0) & x.isfinite())

    def divisor(self, count: int) -> int:
        return self.batch_size or max(count, 1)

    def mean(self, total: Params, key: Tensor, count: int, noisy: Callable = with_noise) -> Params:
        """Return the sum of the clipped gradients of `count` examples with its noise, divided by B."""
        scale, divisor = self.scale, self.divisor(count)
        out = noisy(total, random.split(key)[0], scale, self.rows) if isinstance(scale, Tensor) or scale > 0 else total
        return Params({n: g.scale(1 / divisor) for n, g in out.tables.items()},
                      tree_map(lambda x: x / divisor, out.dense))  # fmt: skip


def noisy_grads(how: Private) -> Callable:
    """Return the function of `private_grads`. Its attribute `private` has `how`, and the function itself."""

    @named_as(how.loss_fn)
    def run(params: Params, batch: Any, *args, key: Tensor | None = None, **kwargs):
        check(CALL, key_problems(key))
        check(CALL, table_problems(params), argument_problems(args, kwargs, batch))
        check("funcrec.value_and_grad", params_problems(params))
        examples = how.examples(batch)
        key = sure(key)
        losses, aux, total = clipped_total(how, examples, params, *args, **kwargs, **how.keyed(key))
        loss = losses.mean() if examples.count else torch.full((), torch.nan, device=key.device)
        return ((loss, aux) if how.has_aux else loss), how.mean(total, key, examples.count)

    cast(Any, run).private = how, run
    return run


def clipped_total(how: Private, examples: Examples, params: Params, *args, **kwargs) -> tuple[Tensor, Any, Params]:
    """Return (the losses of the examples, aux, the sum of their clipped gradients)."""
    total, losses, aux = nothing(params), [torch.zeros(0)], None
    bound = or_nan(how.max_norm, lambda x: (x > 0) & x.isfinite())
    for part in how.chunks(examples):
        value, grads = over_examples(how.loss_fn, how.has_aux, part, own_weights=True)(params, *args, **dict(kwargs))
        loss, aux = value if how.has_aux else (value, None)
        check(CALL, aux_problems(aux))
        total = added(total, clipped_sum(grads, bound))
        losses.append(loss)
    return torch.cat(losses[1:] or losses), aux, total


def rows_read(how: Private, examples: Examples, params: Params, **kwargs) -> dict[str, RowGrads]:
    """Return {table: a gradient of zeros with the rows that the losses of the examples read}."""
    tables = nothing(params).tables
    for part in how.chunks(examples):
        read = over_examples(how.loss_fn, how.has_aux, part, own_weights=True, transform=zero_gradients)
        found, shared = read(params, **dict(kwargs))[1], {}
        tables = {n: g + in_one(found.tables[n], None, shared) for n, g in tables.items()}
    return tables


def zero_gradients(loss_fn: Callable, has_aux: bool) -> Callable:
    """Return a function like that of `value_and_grad`, which returns zeros: gradients of the rows that are read."""

    def run(params: Params) -> tuple[Any, Params]:
        sites = find_sites(loss_fn, params, (), {})
        made = [x for site in sites for found, _ in site.cotangents(site.zeros(), site.saved) for x in found.items()]
        return (torch.zeros(()), ()), Params(nothing(params).tables | summed(made), {})

    return run


def nothing(params: Params) -> Params:
    """Return the gradient of no example."""
    zeros = lambda t: RowGrads.zeros(t.shape, dtype=ops.accumulation_dtype(t.dtype), device=t.device)
    dense = tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, params.dense)
    return Params({n: zeros(t) for n, t in params.tables.items()}, dense)


def clipped_sum(grads: Params, max_norm: float | Tensor) -> Params:
    """Return the sum of the examples' gradients, each scaled to the norm. One that is not finite adds nothing."""
    norms = example_norms(grads)
    counts = norms.isfinite()
    if not (is_concrete(counts) and bool(counts.all())):
        own = lambda x: torch.where(counts.reshape(-1, *(1,) * (x.dim() - 1)), x, 0)
        grads = tree_map(lambda x: own(x) if isinstance(x, Tensor) and x.is_floating_point() else x, grads)
    return sum_examples(grads, torch.where(counts, max_norm / norms.clamp(min=max_norm), 0))


def added(total: Params, grads: Params) -> Params:
    tables = {n: g + grads.tables[n] for n, g in total.tables.items()}
    return Params(tables, tree_map(torch.add, total.dense, grads.dense))


def takes_key(fn: Callable, *, own: bool = False) -> bool:
    """Return whether a function has a parameter `key`; `own`: itself, not the function that it wraps."""
    try:
        return "key" in inspect.signature(fn, follow_wrapped=not own).parameters
    except ValueError:  # a builtin has no signature
        return False


# -- validators --------------------------------------------------------------------------------------------------


def key_problems(key: Any) -> Iterator[Problem]:
    if key is None:
        need, hint = "i64[], a key of its own for each step", "key=fr.fold_in(state.key, state.step)"
        yield Problem("`key` is missing, which the noise is made from.", "no keyword", need, hint, TypeError)
    elif not isinstance(key, Tensor) or key.dtype != torch.int64 or key.dim() != 0:
        yield Problem("`key` is not a key.", describe(key), "i64[], from funcrec.key(seed)", kind=TypeError)
    else:
        yield from member_problems(key, "key")


def table_problems(params: Params) -> Iterator[Problem]:
    if not isinstance(params, Params):
        yield Problem("`params` is not Params.", describe(params), "Params(tables=..., dense=...)", kind=TypeError)
    elif type(params.tables) is not dict or bound_names():
        got = describe(params.tables) + (", on ranks" if bound_names() else "")
        hint = "a dict of tables in one process; on a mesh train_step(grad=functools.partial(fr.private_grads, ...))"
        yield Problem("`params.tables` cannot get private gradients.", got, "{name: f[R, D]}", hint, TypeError)
    else:
        for path, x in paths(params.dense):
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float32, torch.float64):
                what, hint = f"`params.dense{path}` is too coarse for noise.", "x.float(); tables may have 16 bits"
                yield Problem(what, describe(x), "f32 or f64", hint, TypeError)


def argument_problems(args: tuple, kwargs: dict[str, Any], batch: Any) -> Iterator[Problem]:
    """Report data of examples that is not in the batch: every example would see all of it."""
    sizes = {n for n in map(num_examples, flatten_parts(batch)[0]) if n is not None and n > 1}
    named = {f"argument {i + 3}": arg for i, arg in enumerate(args)} | {f"`{k}`": arg for k, arg in kwargs.items()}
    for name, arg in named.items():
        if any(num_examples(x) in sizes for x in flatten_parts(arg)[0] if num_examples(x) is not None):
            need, hint = "all data of examples in `batch`", "fr.Batch(ids, label), or a tuple of tensors"
            yield Problem(f"{name} has a value for each example.", describe(arg), need, hint, TypeError)


def aux_problems(aux: Any) -> Iterator[Problem]:
    tensors = [x for x in tree_leaves(aux) if isinstance(x, Tensor)]
    if tensors:
        got, hint = f"{describe(tensors[0])} of each example", "layer_norm in place of batch_norm; no logits in aux"
        yield Problem("`aux` has tensors, which could show an example.", got, "no tensor", hint, TypeError)

"""private_grads: gradients that say little about any one example, for differentially private training (DP-SGD).

    g = (Σ_e min(1, C / ‖g_e‖) · g_e + σ · C · N(0, 1)) / B

Source: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1.
Shapes: B examples, R rows of a table, D dim.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    NotNegative,
    Positive,
    Problem,
    check,
    describe,
    random,
    replace,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    typed,
)
from funcrec.grad._examples import example_norms, sum_examples
from funcrec.grad._per_example import over_examples, stacked_examples
from funcrec.jagged import is_concrete
from funcrec.tables import Entries, Params, RowGrads, name_number

CALL = "funcrec.private_grads"


@typed
def private_grads(
    loss_fn: Callable,
    has_aux: bool = False,
    *,
    max_norm: Positive,
    noise_multiplier: NotNegative,
    rows: Literal["all", "touched"] = "all",
    batch_size: Count | None = None,
    max_ids: Count | None = None,
    chunk_size: Count | None = None,
) -> Callable:
    """Return a function (params, batch, *args, key, **kwargs) -> (loss f[], grads), whose gradients are private.

    Each example's gradient, over all tables and dense leaves, is scaled to a norm of at most C = `max_norm`. Normal
    noise of standard deviation `noise_multiplier` · C is added to every number of their sum.

    Args:
      loss_fn: (params, batch, ...) -> f[], a mean over the batch's examples. An example of weight w counts w times its
        loss before it is scaled; the weights of other examples change nothing. With `has_aux` it returns (f[], aux),
        and aux holds no tensor: a tensor could show an example.
      max_norm: C > 0. noise_multiplier: σ >= 0.
      rows: the rows of tables that get noise. "all": every row of every table, so a step costs as much as its tables
        are large; the guarantee of DP-SGD holds. "touched": the rows that the batch reads. This is fast, but shows
        which rows were read: it protects the values of gradients, not the fact that an id was there.
      batch_size: the divisor B, for batches drawn with a chance for each example; None for the batch's own number.
      max_ids: see `per_example_grads`.
      chunk_size: how many examples are differentiated at once; None for all. Fewer take less memory.

    Returns:
      the function. Its `key` i64[] makes the noise: a step needs a key of its own, such as fold_in(state.key,
      state.step). `loss_fn` gets another key, folded with the example's number, if it has a parameter `key`. The loss
      is the mean of the examples' own losses, without noise: it is not private.

    Law: without noise, the mean of the examples' clipped gradients, whatever the chunks are, within rounding. The noise
      of a row is a function of the key, the table's name and the row: not of the batch, its order, or other tables.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, x: (p.dense * x).sum(-1).mean()
      >>> grads_fn = fr.private_grads(loss_fn, max_norm=1.0, noise_multiplier=0.0)
      >>> batch = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
      >>> loss, grads = grads_fn(fr.Params({}, torch.ones(2)), batch, key=fr.key(0))
      >>> loss, grads.dense
      (tensor(3.8500), tensor([0.4500, 0.6000]))
    """

    @functools.wraps(loss_fn)
    def run(params: Params, batch: Any, *args, key: Tensor, **kwargs):
        random.check_key(CALL, key)
        check(CALL, table_problems(params))
        for_noise, for_loss = random.split(key)
        if takes_key(loss_fn):
            kwargs["key"] = for_loss
        examples = stacked_examples(CALL, batch, max_ids)
        size, total, losses, aux = chunk_size or examples.count, None, [], None
        for begin in range(0, examples.count, size):
            part = examples.part(begin, min(begin + size, examples.count))
            value, grads = over_examples(loss_fn, has_aux, part, own_weights=True)(params, *args, **kwargs)
            loss, aux = value if has_aux else (value, None)
            check(CALL, aux_problems(aux))
            factors = max_norm / example_norms(grads).clamp(min=max_norm)
            total = added(total, sum_examples(grads, factors))
            losses.append(loss)
        scale, divisor = noise_multiplier * max_norm, batch_size or examples.count
        noisy = with_noise(total, for_noise, scale, rows) if noise_multiplier else total
        mean = Params({n: g.scale(1 / divisor) for n, g in noisy.tables.items()},
                      tree_map(lambda x: x / divisor, noisy.dense))  # fmt: skip
        loss = torch.cat(losses).mean()
        return ((loss, aux) if has_aux else loss), mean

    return run


def added(total: Params | None, grads: Params) -> Params:
    if total is None:
        return grads
    tables = {n: g + grads.tables[n] for n, g in total.tables.items()}
    return Params(tables, tree_map(torch.add, total.dense, grads.dense))


def with_noise(grads: Params, key: Tensor, scale: float, rows: str) -> Params:
    """Return the gradients with normal noise of standard deviation `scale` for each dense number and each row."""
    leaves, structure = tree_flatten(grads.dense)
    for_dense, for_tables = random.split(key)
    noise = lambda i, x: random.normal(random.fold_in(for_dense, i), tuple(x.shape), dtype=_drawn(x.dtype)).to(x.dtype)
    dense = [x + scale * noise(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
    tables = {
        n: _noisy_rows(g, random.fold_in(for_tables, name_number(n)), scale, rows) for n, g in grads.tables.items()
    }
    return Params(tables, tree_unflatten(dense, structure))


def _noisy_rows(grads: RowGrads, key: Tensor, scale: float, rows: str) -> RowGrads:
    if rows == "touched":
        out = grads.coalesce()
        term, dtype = out.terms[0], out.grads.dtype
        if is_concrete(out.count):  # else noise is made for padding, too
            own = slice(int(out.count))
            term = Entries(term.rows[own], term.grads[own], out.count, None)
            out = replace(out, terms=(term,))
        noise = row_noise(key, term.rows, grads.dim, dtype)
        made = torch.where(out.valid[:, None], term.grads + scale * noise, term.grads)
        return replace(out, terms=(replace(term, grads=made),))
    dtype = grads.floats[0].dtype
    every = torch.arange(grads.num_embeddings, device=key.device)
    return grads + RowGrads.from_entries(
        every, scale * row_noise(key, every, grads.dim, dtype), num_embeddings=grads.num_embeddings
    )


def row_noise(key: Tensor, rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return normal numbers f[M, D] of rows i[M]: those of a row are the same in whatever place it stands."""
    return random.normal(key, (rows.shape[0], dim), start=rows.long() * dim, dtype=_drawn(dtype)).to(dtype)


def _drawn(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which noise is drawn: floats of 16 bits would have few distinct numbers."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def takes_key(fn: Callable, *, own: bool = False) -> bool:
    """Return whether a function has a parameter `key`; `own`: itself, not the function that it wraps."""
    try:
        return "key" in inspect.signature(fn, follow_wrapped=not own).parameters
    except ValueError:  # a builtin has no signature
        return False


# -- validators --------------------------------------------------------------------------------------------------


def table_problems(params: Params) -> Iterator[Problem]:
    if not isinstance(params, Params):
        yield Problem("`params` is not Params.", describe(params), "Params(tables=..., dense=...)", kind=TypeError)
    elif type(params.tables) is not dict:
        got, hint = describe(params.tables), "a dict of tables in one process"
        yield Problem("`params.tables` cannot get private gradients.", got, "{name: f[R, D]}", hint, TypeError)


def aux_problems(aux: Any) -> Iterator[Problem]:
    tensors = [x for x in tree_leaves(aux) if isinstance(x, Tensor)]
    if tensors:
        got, hint = f"{describe(tensors[0])} of each example", "layer_norm in place of batch_norm; no logits in aux"
        yield Problem("`aux` has tensors, which could show an example.", got, "no tensor", hint, TypeError)

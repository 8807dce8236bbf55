"""value_and_grad: compute dense gradients of dense leaves, and row gradients of tables.

    (dL/d_dense, dL/d_taps) by torch.func;   dL/d_table = Σ over sites of siteᵀ(dL/d_tap)

A first pass finds the lookup sites and the shapes of their outputs. A second pass adds a zero tap to each output, and
torch.func differentiates this pass. Under `jit` the first pass is dead code, and the zeros fold away.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor

from funcrec.core import (
    CheckError,
    Problem,
    Size,
    check,
    describe,
    fail,
    float_leaf_problems,
    is_checking,
    own_errors,
    paths,
    quiet,
    tree_flatten,
    tree_unflatten,
    typed,
)
from funcrec.grad._untrained import check_constants
from funcrec.kernels import ops
from funcrec.tables import (
    SHOWN_MAX,
    Params,
    RowGrads,
    Site,
    TableRef,
    Tape,
    check_values,
    finite_problems,
    handed_over,
    kind_of_tables,
    map_parts,
    plain_tables,
    room_problems,
    summed,
    tensor_problems,
)

W = TypeVar("W")
R = TypeVar("R", covariant=True)
A = ParamSpec("A")
_TENSOR = object()  # stands for a tensor among the static leaves of aux


class Gradient(Protocol[A, R]):
    """A function of parameters and other arguments that returns (loss, grads), with grads like the parameters."""

    __module__ = "funcrec.grad"  # what `help` shows

    def __call__(self, params: W, /, *args: A.args, **kwargs: A.kwargs) -> tuple[R, W]: ...


@overload
def value_and_grad(loss_fn: Callable[Concatenate[Any, A], R], has_aux: bool = False) -> Gradient[A, R]: ...
@overload
def value_and_grad(
    loss_fn: Callable[A, R], has_aux: bool = False, *, argnums: Size | Sequence[Size]
) -> Callable[A, tuple[R, Any]]: ...
@typed
def value_and_grad(
    loss_fn: Callable[..., Any], has_aux: bool = False, *, argnums: Size | Sequence[Size] = 0
) -> Callable[..., Any]:
    """Return a function that computes a loss and its gradients. The loss may call lookups anywhere.

    Args:
      loss_fn: (params: Params, *args, **kwargs) -> f[], or (f[], aux) with `has_aux`. It may read the tables of Params
        only through `lookup` and `lookup_sequence`, any number of times. In place of Params it may have any tree of
        float tensors, such as a dict: all of its leaves get dense gradients.
      argnums: the positional arguments by which the loss is differentiated, an int or a tuple of ints. At most one of
        them is Params with tables.

    Returns:
      a function with the arguments of the loss, which returns (loss, grads) or ((loss, aux), grads). grads is a Params
      with tables {name: RowGrads} (not coalesced), and dense like `params.dense`. The gradient by another tree is like
      the tree. For a tuple of `argnums` grads is a tuple.

    A table that the loss also reads as a matrix (tied weights) gets one dense gradient of all its uses if it is a dense
    leaf: lookup({"item": params.dense["item"]}, ids, features). The gradient, and an optimizer's update of it, then
    cost as much as the whole table.

    Raises:
      TypeError: if a table is used densely, a dense leaf is not a float tensor, the loss is not a scalar, or the loss
        reads an nn.Parameter that is not an argument, so that nothing would train it. (Other autograd leaves give a
        warning.)
      ValueError: if the loss, called again with the same arguments, looks up other tables or other shapes.

    Law: grads.tables[name].to_dense() equals the gradient that torch.func.grad gives for the table as a dense leaf.
    The function composes with torch.func.vmap, jvp and `fr.jit`. jacrev and vjp take floats only, so apply them to
    `grads.dense` or `to_dense()`, not to a RowGrads, which also holds row numbers. The loss may call grad, jvp, vmap
    and value_and_grad of functions with lookups, also with lookups of its own tables. The gradient carries the table's
    own name, even if a lookup renames the table: {"a": params.tables["b"]}.

    With a capacity (`shard_tables`), a rank whose ids find no place looks up NaN, so its loss and gradients are NaN. If
    the loss replaces NaN by numbers (`torch.nan_to_num`, `torch.where`), loss and gradients follow from these numbers.
    `checked` raises in either case and reports how many ids were lost. `train_step` counts the lost ids and keeps the
    state unchanged.

    Cost: without `fr.jit`, the forward pass runs twice.

    Example:
      >>> import torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2, 2]]})
      >>> loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [clicked])["clicked"] * p.dense).sum()
      >>> params = fr.Params(tables={"item": torch.ones(3, 1)}, dense=torch.tensor(5.0))
      >>> loss, grads = fr.value_and_grad(loss_fn)(params, ids)
      >>> loss, grads.dense, grads.tables["item"].to_dense().flatten()
      (tensor(10.), tensor(2.), tensor([ 0.,  0., 10.]))
    """

    check("funcrec.value_and_grad", argnums_problems(argnums))

    def of_params(loss_fn: Callable, *args, **kwargs) -> tuple[Any, Params]:
        value, grads, overflows = value_grad_and_overflows(loss_fn, has_aux)(*args, **kwargs)
        if is_checking() and overflows:
            check_values("funcrec.value_and_grad", room_problems, overflows)
            check_gradients(value[0] if has_aux else value, grads)
        return value, grads

    @functools.wraps(loss_fn)
    def run(*args, **kwargs):
        if argnums == 0 and (not args or isinstance(args[0], Params)):
            return of_params(loss_fn, *args, **kwargs)
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        check("funcrec.value_and_grad", argument_problems(args, numbers))
        own = [args[i] for i in numbers]
        tables = next((x.tables for x in own if isinstance(x, Params) and x.tables), {})

        def joined(params: Params, *args, **kwargs):
            whole = list(args)
            for i, x, dense in zip(numbers, own, params.dense, strict=True):
                whole[i] = Params(params.tables if x.tables else x.tables, dense) if isinstance(x, Params) else dense
            return loss_fn(*whole, **kwargs)

        joined.__name__ = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        dense = [x.dense if isinstance(x, Params) else x for x in own]
        value, grads = of_params(joined, Params(tables, dense), *args, **kwargs)
        made = [
            Params(grads.tables if x.tables else {}, d) if isinstance(x, Params) else d
            for x, d in zip(own, grads.dense, strict=True)
        ]
        return value, made[0] if isinstance(argnums, int) else tuple(made)

    return run


def value_grad_and_overflows(loss_fn: Callable, has_aux: bool) -> Callable:
    """Return a function like that of `value_and_grad`, which also returns the overflows of all lookups.

    There is an overflow i64[2] for each exchange with a capacity.
    """

    def run(params: Params, *args, **kwargs):
        check("funcrec.value_and_grad", params_problems(params))
        sites = find_sites(loss_fn, params, args, kwargs)
        structure: dict[str, Any] = {}

        def with_taps(dense, taps):
            tape = structure["tape"] = Tape(sites, taps)
            out = loss_fn(_with_refs(params.tables, dense, tape), *args, **kwargs)
            tape.finish()
            loss, aux = loss_and_aux("funcrec.value_and_grad", out) if has_aux else (out, ())
            _check_scalar(loss)
            leaves, structure["aux"] = tree_flatten(aux)
            structure["static"] = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
            saved = [site.saved for site in tape.sites]  # from this pass, as a loss may draw other ids in each
            return loss, ([x for x in leaves if isinstance(x, Tensor)], saved)

        taps = [site.zeros() for site in sites]
        with named_errors(loss_fn, params, args, kwargs):
            (d_dense, d_taps), (loss, (aux_tensors, saved)) = torch.func.grad_and_value(
                with_taps, argnums=(0, 1), has_aux=True
            )(params.dense, taps)
        check_constants(loss, params, args, kwargs)
        tables = {
            name: RowGrads.zeros(t.shape, dtype=ops.accumulation_dtype(t.dtype), device=t.device)
            for name, t in params.tables.items()
        }
        of_sites = zip(structure["tape"].sites, d_taps, saved, strict=True)
        made = [member for site, d, x in of_sites for member in site.cotangents(d, x)]
        tables |= summed(item for grads, _ in made for item in grads.items())
        overflows = [x for _, own in made for x in own]
        if is_checking() and not overflows:  # Lost ids make gradients NaN, so the caller checks overflows.
            check_gradients(loss, Params(tables, d_dense))
        if not has_aux:
            return loss, Params(tables, d_dense), overflows
        tensors = iter(aux_tensors)
        leaves = [next(tensors) if x is _TENSOR else x for x in structure["static"]]
        return (loss, tree_unflatten(leaves, structure["aux"])), Params(tables, d_dense), overflows

    return run


def named_errors(loss_fn: Callable, params: Params, args, kwargs) -> contextlib.AbstractContextManager:
    need = "the batch that it reads"
    return own_errors("funcrec.value_and_grad", loss_fn, params, *args, *kwargs.values(), need=need)


def find_sites(loss_fn: Callable, params: Params, args, kwargs) -> list[Site]:
    tape = Tape()
    refs = _with_refs(plain_tables(params.tables), params.dense, tape)
    with quiet(), handed_over(), named_errors(loss_fn, params, args, kwargs):
        loss_fn(refs, *args, **kwargs)
    return tape.sites


def _with_refs(tables: dict[str, Tensor], dense: Any, tape: Tape) -> Params:
    return Params(map_parts(lambda name, t: TableRef(t, name, tape), tables), dense)


def loss_and_aux(call: str, out: object) -> tuple[Any, Any]:
    """Return the pair (loss, aux) that a loss returns with `has_aux`; raise if it is no pair."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"a {type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else describe(out)
        hint = "return loss, aux; has_aux=False for a loss alone"
        fail(call, "`loss_fn` gave no pair.", got=got, need="(f[], aux), for has_aux=True", hint=hint, kind=TypeError)
    return tuple(out)


def _check_scalar(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        fail(
            "funcrec.value_and_grad", "the loss is not a scalar.", got=describe(loss), need="f32[] or another float",
            hint="loss.mean(); has_aux=True when the loss function returns (loss, aux)", kind=TypeError,
        )  # fmt: skip


def params_problems(params: object) -> Iterator[Problem]:
    if not isinstance(params, Params):
        yield Problem("`params` is not Params.", describe(params), "Params(tables=..., dense=...)", kind=TypeError)
        return
    if not isinstance(params.tables, Mapping):
        got, hint = describe(params.tables), "fr.init(key, table_configs); {} for no tables"
        yield Problem("`params.tables` is not a dict of tables.", got, "{name: f[R, D]}", hint, TypeError)
        return
    if not kind_of_tables(params.tables).is_trained(params.tables):
        got, need = describe(params.tables), "tables of floats"
        hint = "beside them: fr.value_and_grad(loss_fn)(fr.Params({}, dense), tables, batch); or fr.fake_quantize"
        yield Problem("`params.tables` are read, and not trained.", got, need, hint, TypeError)
        return
    for name, t in params.tables.items():
        if isinstance(t, TableRef):  # a table of an enclosing loss
            continue
        yield from tensor_problems(t, f"params.tables[{name!r}]")
    hint = "numbers and integer tensors belong in the batch or in the loss's closure"
    yield from float_leaf_problems("`params.dense{}` cannot be differentiated.", params.dense, hint)


def argnums_problems(argnums: int | Sequence[int]) -> Iterator[Problem]:
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    if not numbers or len(set(numbers)) < len(numbers):
        yield Problem("`argnums` are not places of arguments.", f"{argnums}", "each place once", "argnums=(0, 1)")


def argument_problems(args: tuple, numbers: Sequence[int]) -> Iterator[Problem]:
    """Yield the reasons why a loss cannot be differentiated by these of its arguments."""
    missing = [i for i in numbers if i >= len(args)]
    if missing:
        hint = "the arguments by place: f(params, batch)"
        yield Problem("`argnums` names no positional argument.", f"{missing} of {len(args)}", "places of them", hint)
        return
    if sum(isinstance(args[i], Params) and bool(args[i].tables) for i in numbers) > 1:
        need = "one Params with tables, and other trees"
        yield Problem(
            "two arguments of `argnums` have tables.", f"{numbers}", need, "one Params of all tables", TypeError
        )
    for i in numbers:
        if isinstance(args[i], Params):
            yield from params_problems(args[i])
        else:
            hint = "fr.Params(tables, dense), or a tree of float tensors"
            yield from float_leaf_problems(f"`args[{i}]{{}}` cannot be differentiated.", args[i], hint)


def check_gradients(loss: Tensor, grads: Params) -> None:
    """Raise if the loss or a gradient is not finite. `checked` runs this check."""
    check_values("funcrec.value_and_grad", gradient_problems, loss, grads.tables, grads.dense)


def gradient_problems(loss: Tensor, tables: dict[str, RowGrads], d_dense: Any) -> Iterator[Problem]:
    yield from finite_problems("the loss", loss)
    for path, leaf in paths(d_dense):
        yield from finite_problems(f"the gradient of `params.dense{path}`", leaf)
    for name, grads in tables.items():
        valid = grads.valid
        bad = (~torch.isfinite(grads.grads)).any(1) & valid
        if bool(bad.any()):
            rows = grads.rows[bad].tolist()
            got = f"rows {rows[:SHOWN_MAX]}, {len(rows)} in all"
            what = f"the gradient of `params.tables[{name!r}]` is not finite."
            yield Problem(what, got, "finite numbers", kind=CheckError)

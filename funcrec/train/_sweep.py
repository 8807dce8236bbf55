"""sweep: K models that differ in numbers of their steps, trained as one.

    state_i, metrics_i = make_step(**{name: x[i] for name, x in hyper})(state_i, batch)          for all i, in one step

The members are a stack, and torch.func.vmap maps the step over it: one lookup, one product and one update serve all.
Shapes: K members.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import torch.utils._pytree as torch_tree
from torch import Tensor
from torch.func import vmap

from funcrec.core import (
    Form,
    Problem,
    Size,
    check,
    describe,
    fail,
    is_followed,
    is_tracked,
    map_tensors,
    own_errors,
    paths,
    random,
    remade,
    sure,
    typed,
)
from funcrec.grad import params_problems
from funcrec.kernels.memory import empty_table
from funcrec.tables import Params
from funcrec.train._state import TrainState
from funcrec.train._step import TrainStep
from funcrec.tree import copy

T = TypeVar("T")
CALL = "funcrec.sweep"
Keys = Annotated[Tensor, Form("i64[...]", "a key")]


@dataclass(eq=False)
class SweptUpdate:
    """The function (state, batch) -> (state', metrics) of a `sweep`, on stacks. hyper: {name: f[K]}."""

    make_step: Callable[..., TrainStep[Any]]
    hyper: dict[str, Tensor]

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[Any, Any]]:
        check(CALL, tensor_problems(state), stack_problems("state", state, num_members(self.hyper)))
        one = lambda hyper, state: made(self.make_step, hyper)(state, batch)
        return vmap(one)(self.hyper, state)


@remade
@typed
def sweep(
    make_step: Callable[..., TrainStep[Any]], hyper: Mapping[str, Any], *, product: bool = False
) -> TrainStep[TrainState]:
    """Return a training step that trains K models at once, each with hyper-parameters of its own.

    The members take every step on the same batch. One lookup and one update serve all of them, so that K members cost
    far less than K runs. A member that diverges does not change the others.

    Args:
      make_step: (**hyper) -> TrainStep, such as `lambda lr: fr.train_step(loss_fn, sparse=fr.optim.adam(lr))`. It gets
        each hyper-parameter as a tensor f[], and must not read its value. So whatever takes a tensor f[] can be swept:
        every number of every row optimizer, of torch's SGD, Adam, AdamW, Adagrad and RMSprop, of `optim.clip`,
        `optim.schedule`, losses and `private_grads`.
      hyper: {argument of make_step: K numbers, as a sequence or a tensor [K]}. Member i gets the i-th number of each.
        {} is for members that differ in their parameters or keys alone.
      product: whether there is a member for each combination of the numbers, the last name's varying fastest.

    Returns:
      TrainStep. `init(params, key=fr.key(0))` returns a TrainState whose tensors are stacks [K, ...]. `params` are
      those of all members, or a list of K Params; `key` is one key, or K keys i64[K]. The step returns stacked states
      and metrics, so loss is f[K]. Compile it by `fr.jit(step, donate=("state",))`; `scan`, `save` and `load` take it
      and its states. `fit` does, too: its loss is the mean over the members, and it ends if all members diverge.
      `member` returns the state of one member, and `sweep_table` a table of the members.

    Raises:
      TypeError, ValueError: `make_step` does not take a name, the lengths differ, or a number is not finite.

    Law: each member equals its own run with the same numbers. Lookups, and updates of row optimizers, give the same
      bits for the same cotangents. (A number that may be None, and momentum of rmsprop, agree within rounding.) Matrix
      products of members run as batched products, and agree within rounding.

    Example:
      >>> import torch, funcrec as fr
      >>> def make_step(lr):
      ...     dense = fr.optim.dense(torch.optim.SGD, lr=lr)
      ...     return fr.train_step(lambda params, batch: params.dense.square(), dense=dense)
      >>> swept = fr.sweep(make_step, {"lr": [0.1, 0.5]})
      >>> states, metrics = swept(swept.init(fr.Params({}, torch.tensor(2.0))), batch=None)
      >>> states.dense, metrics
      (tensor([1.6000, 0.0000]), {'loss': tensor([4., 4.])})
    """
    check(CALL, name_problems(make_step, hyper), value_problems(hyper))
    own = {n: numbers_of(x) for n, x in hyper.items()}
    if product and own:
        own = dict(zip(own, (x.flatten() for x in torch.meshgrid(*own.values(), indexing="ij")), strict=True))
    check(CALL, length_problems(own))
    count = num_members(own)

    def init(params: Params | Sequence[Params], key: Tensor | None = None) -> TrainState:
        call = f"{CALL}.init"
        check(call, given_problems(params, key, count))
        k = count or (len(params) if isinstance(params, list | tuple) else sure(key).shape[0])
        together = joined(params) if isinstance(params, list | tuple) else repeated(params, k)
        keys = (random.key(0) if key is None else key).expand(k)
        one = lambda hyper, params, key: made(make_step, hyper).init(params, key)
        return vmap(one)(own, together, keys)

    return TrainStep(init, SweptUpdate(make_step, own))


@typed
def member(states: T, index: Size) -> T:
    """Return one member of a tree of stacked tensors [K, ...], such as the states of a `sweep`, in memory of its own.

    Args:
      index: the member's number, 0 <= index < K.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.member({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, 1)
      {'w': tensor([3., 4.])}
    """
    check("funcrec.member", stack_problems("states", states, None, above=index))
    return copy(map_tensors(lambda x: x[index], states))


def swept_of(step: Any) -> SweptUpdate | None:
    """Return the update of a `sweep`, or of `jit` of it; None for any other step."""
    fn = getattr(step, "fn", step)
    found = fn.update if isinstance(fn, TrainStep) else fn
    return found if isinstance(found, SweptUpdate) else None


def made(make_step: Callable[..., Any], hyper: dict[str, Tensor]) -> TrainStep[Any]:
    """Return the step of one member."""
    with own_errors(
        CALL, "make_step", *hyper.values(), need="hyper-parameters as tensors f[], whose values nobody reads"
    ):
        step = make_step(**hyper)
    if not isinstance(step, TrainStep):
        hint = "def make_step(lr): return fr.train_step(loss_fn, sparse=fr.optim.adam(lr))"
        fail(CALL, "`make_step` returned no step.", got=describe(step), need="a TrainStep", hint=hint, kind=TypeError)
    return step


def num_members(hyper: Mapping[str, Tensor]) -> int | None:
    return next((x.shape[0] for x in hyper.values()), None)


def numbers_of(x: Any) -> Tensor:
    """Return the numbers as floats f[K], f64 if they are not floats of a tensor."""
    x = x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64)
    return x if x.is_floating_point() else x.to(torch.float64)


def repeated(params: Any, k: int) -> Any:
    """Return a stack of K copies of each tensor."""

    def of(x: Tensor) -> Tensor:
        x = x.detach() if isinstance(x, torch.nn.Parameter) else x
        if is_followed(x) or is_tracked(x):
            return x.expand(k, *x.shape).clone()
        return empty_table((k, *x.shape), dtype=x.dtype, device=x.device).copy_(x)

    return map_tensors(of, params)


def joined(params: Sequence[Any]) -> Any:
    """Return a stack of the tensors of K trees."""
    plain = lambda x: x.detach() if isinstance(x, torch.nn.Parameter) else x
    return torch_tree.tree_map(lambda *x: torch.stack(x) if isinstance(x[0], Tensor) else x[0],
                               *(map_tensors(plain, p) for p in params))  # fmt: skip


# -- validators --------------------------------------------------------------------------------------------------


def name_problems(make_step: Callable, hyper: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        taken = inspect.signature(make_step).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return
    by_name = {n for n, p in taken.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    for n in hyper:
        if n not in by_name:
            yield Problem(
                f"`make_step` takes no {n!r}.", f"{n!r}", f"among {sorted(by_name)}", "another name", TypeError
            )
    for n in needed:
        if n not in hyper:
            hint = f'{{"{n}": [0.01, 0.1]}}, or a default in `make_step`'
            yield Problem(
                f"`hyper` has no {n!r}, which `make_step` needs.", f"{list(hyper)}", f"{n!r}", hint, TypeError
            )


def value_problems(hyper: Mapping[str, Any]) -> Iterator[Problem]:
    for n, x in hyper.items():
        need, hint = "K numbers, as a sequence or a tensor [K]", "[0.01, 0.1]"
        try:
            own = x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            yield Problem(f"`hyper[{n!r}]` holds no numbers.", describe(x), need, hint, TypeError)
            continue
        is_list = own.dim() == 1 and not own.is_complex() and own.dtype != torch.bool
        if not is_list or (not isinstance(x, Tensor) and any(isinstance(y, bool | np.bool_) for y in x)):
            yield Problem(f"`hyper[{n!r}]` is not a list of numbers.", describe(x), need, hint)
        elif not is_followed(own) and not bool(own.isfinite().all()):
            yield Problem(f"`hyper[{n!r}]` has a number that is not finite.", f"{own.tolist()}", "finite numbers")


def length_problems(own: Mapping[str, Tensor]) -> Iterator[Problem]:
    sizes = {n: x.shape[0] for n, x in own.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        hint = "product=True, for all combinations"
        yield Problem("`hyper` gives no number to some members.", f"{sizes}", "one length >= 1", hint)


def given_problems(params: Any, key: Any, count: int | None) -> Iterator[Problem]:
    """Report parameters and keys of another number of members."""
    each, sizes = params if isinstance(params, list | tuple) else [params], {}
    for p in each:
        yield from params_problems(p)
    devices = {x.device for p in each for _, x in paths(p) if isinstance(x, Tensor)}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        yield Problem("`params` lie on several devices.", f"{names}", "one device", f"params.to({names[0]!r})")
    structures = {str(torch_tree.tree_structure(p)) for p in each} if all(isinstance(p, Params) for p in each) else ()
    if len(structures) > 1:
        yield Problem("`params` have different structures.", f"{len(structures)} structures", "one", kind=TypeError)
    if isinstance(params, list | tuple):
        sizes["params"] = len(params)
    if key is not None:
        if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.dim() > 1:
            hint = "fr.key(0), or fr.split(fr.key(0), K)"
            yield Problem("`key` is not a key.", describe(key), "i64[], or i64[K]", hint, TypeError)
        elif key.dim():
            sizes["key"] = key.shape[0]
    wanted = {count} - {None} | set(sizes.values())
    if len(wanted) > 1 or 0 in wanted:
        need = f"{count}, as in `hyper`" if count else "one number of members"
        hint = "fr.split(fr.key(0), K) for K keys; one Params, or one key, for all members"
        yield Problem("the members are not of one number.", f"{sizes}", need, hint)
    elif not wanted:
        need, hint = "K parameters or K keys", "key=fr.split(fr.key(0), 8)"
        yield Problem("the number of members is not said.", "`hyper` is empty", need, hint)


def tensor_problems(state: Any) -> Iterator[Problem]:
    """Report a state that is no TrainState, and leaves that are not tensors."""
    hint = "the states that `init` of the sweep made"
    if not isinstance(state, TrainState):
        yield Problem("`state` is not a TrainState.", describe(state), "a TrainState of stacks", hint, TypeError)
        return
    for path, x in paths(state):
        if not isinstance(x, Tensor):
            yield Problem(f"`state.{path}` is not a tensor.", describe(x), "a stack [K, ...]", hint, TypeError)


def stack_problems(what: str, states: Any, count: int | None, above: int = 0) -> Iterator[Problem]:
    """Report tensors that are not stacks [K, ...] of one K > `above`, or of K = count."""
    sizes = {path: (x.shape[0] if x.dim() else None) for path, x in paths(states) if isinstance(x, Tensor)}
    found = set(sizes.values())
    if not sizes:
        yield Problem(
            f"`{what}` holds no tensors.", describe(states), "stacks [K, ...]", "swept.init(params)", TypeError
        )
    elif len(found) > 1 or None in found or (count is not None and found != {count}):
        path, size = next(
            (p, n) for p, n in sizes.items() if n is None or n != (count or next(iter(found))) or len(found) > 1
        )
        need = f"[{count}, ...], one for each member" if count is not None else "stacks [K, ...] of one K"
        got, hint = "a tensor []" if size is None else f"[{size}, ...]", "the states that `init` of the sweep made"
        yield Problem(f"`{what}` is not a stack: `{path.lstrip('.')}`.", got, need, hint)
    elif sure(next(iter(found))) <= above:
        yield Problem("`index` is not a member.", f"{above}", f"0 <= index < {next(iter(found))}", kind=IndexError)

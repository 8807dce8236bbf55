"""dense: the maths of torch.optim as a pure function of trees.

    dense', state' = update(grads, state, dense, step)

An update constructs the class on clones, sets gradients and state, calls `step`, and reads the clones. Step counters
and learning rates stay tensors, as under torch.compile. So the same code runs eagerly and while it is staged, without a
read on the host.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from funcrec.core import (
    Problem,
    check,
    describe,
    float_leaf_problems,
    has_tracked,
    is_followed,
    is_transforming,
    paths,
    reduced,
    remade,
    shown,
    tree_flatten,
    tree_leaves,
    tree_problems,
    tree_structure,
    tree_unflatten,
    typed_fields,
)
from funcrec.optim._as_compiled import tensor_scalars
from funcrec.optim._checks import hyper_problems as row_hyper_problems
from funcrec.optim._checks import rate_at, step_problems
from funcrec.optim._dense_rules import RULES, TENSORS, begun, mended, tensors_in, updated, with_numbers
from funcrec.optim._row import step_tensor

DIFFERENTIABLE = tuple(RULES)
State = Any  # a tree like the parameters, with {name: Tensor} at each leaf


@typed_fields
class DenseOptimizer(NamedTuple):
    """A pair of functions that trains a tree of float tensors: a dict, list, `fr.pytree` value, tensor or empty tree.

    init: (params) -> state, a tree like `params` with a dict of tensors at each leaf.
    update: (grads, state, params, step) -> (params, state), leaf by leaf, for grads, params f[...]. step: the number of
      steps before, int or i64[].
    parts: the optimizers that it is made of, () for none.
    is_joint: whether the gradient of one parameter acts on another parameter, as a norm over all parameters does.

    Law: `update` writes to no argument, and keeps structure, shapes and dtypes.
    """

    init: Callable[[Any], State]
    update: Callable[[Any, State, Any, int | Tensor], tuple[Any, State]]
    parts: tuple[Any, ...] = ()
    is_joint: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)


@remade
def dense(cls: type[torch.optim.Optimizer], **hyper: Any) -> DenseOptimizer:
    """Return a DenseOptimizer that runs a torch.optim class as a pure function.

    Args:
      cls: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, RMSprop, Rprop, ASGD, Muon (matrices only), or a
        class written like them.
      hyper: its keyword arguments. `lr` may also be a tensor f[] or a function of the step, such as `schedule`. For
        SGD, Adam, AdamW, Adagrad and RMSprop each other number (momentum, dampening, weight_decay, eps, alpha,
        lr_decay, initial_accumulator_value, each of betas) may be a tensor f[], too. The range of a tensor is not
        checked.

    Raises:
      TypeError: the class cannot run as a function (LBFGS needs a closure, SparseAdam sparse tensors, Adafactor reads
        its counter). The class raises its own errors for its hyper-parameters.

    Law: k updates equal k steps of the class, up to rounding: counters and bias corrections are in f64. Staged and
      eager updates give the same bits. Compiled updates may round once more where eager torch fuses a product and a
      sum. With numbers that are tensors, or an `lr` that is a function, SGD, Adam, AdamW, Adagrad and RMSprop compute
      the class's formula in f32 (f64 for f64) and round once: a member of vmap has the rate, and under `invariant` the
      bits, of its own run. These five classes have derivatives by parameters, gradients, state and all numbers that may
      be tensors, of any order and mode. Other classes raise a TypeError if one of these is tracked (requires grad, or
      wrapped by torch.func).

    Example:
      >>> import torch, funcrec as fr
      >>> opt = fr.optim.dense(torch.optim.SGD, lr=0.5, momentum=0.9)
      >>> params = {"w": torch.ones(2)}
      >>> state = opt.init(params)
      >>> params, state = opt.update({"w": torch.ones(2)}, state, params, step=0)
      >>> params, state
      ({'w': tensor([0.5000, 0.5000])}, {'w': {'momentum_buffer': tensor([1., 1.])}})
    """
    lr = hyper.get("lr")
    check("funcrec.optim.dense", class_problems(cls, hyper))
    fixed = with_numbers(hyper) if cls in DIFFERENTIABLE else dict(hyper)
    fixed |= {"lr": 1.0} if _varies(lr) else {}
    check("funcrec.optim.dense", hyper_problems(cls, fixed))
    counters = [k for k, s in _first_state(cls, fixed, [torch.zeros(1, 1)], (), None)[0].items() if s.dim() == 0]
    call = f"funcrec.optim.dense({cls.__name__})"
    keeps_rate = _varies(lr) and _keeps_rate(cls, fixed, counters)
    has_rule = cls in DIFFERENTIABLE and (_varies(lr) or bool(tensors_in(hyper)))
    own = {**_make(cls, fixed, [torch.zeros(1, 1)]).param_groups[0], **hyper} if has_rule else {}

    @functools.cache
    def first_state(shape: torch.Size, dtype: torch.dtype) -> dict[str, Tensor]:
        return _first_state(cls, fixed, [torch.empty(shape, dtype=dtype, device="meta")], counters, None)[0]

    def init(params: Any) -> State:
        check(f"{call}.init", leaf_problems("dense", params))
        leaves, structure = tree_flatten(params)
        rate = None
        if _varies(lr) and keeps_rate:
            rate = rate_at(call, lr, torch.zeros((), dtype=torch.int64))
            check(f"{call}.init", rate_problems(cls, rate))
            rate = float(rate)
        return tree_unflatten(begun(own, _first_state(cls, fixed, leaves, counters, rate)), structure)

    def update(grads: Any, state: State, params: Any, step: int | Tensor) -> tuple[Any, State]:
        check(f"{call}.update", leaf_problems("dense", params), step_problems(step))
        check(f"{call}.update", gradient_problems(grads, params), state_problems(state, params, first_state))
        leaves, structure = tree_flatten(params)
        if not leaves:
            return params, state
        taken, own_grads, held = step_tensor(step, leaves[0].device), tree_leaves(grads), structure.flatten_up_to(state)
        rate = rate_at(call, lr, taken)
        rate = rate.to(taken.device) if isinstance(rate, Tensor) else rate
        if has_rule:
            new = updated(cls, {**own, "lr": own["lr"] if lr is None else rate}, leaves, own_grads, held, taken)
            return tree_unflatten(new[0], structure), tree_unflatten(new[1], structure)
        tracked = has_tracked(leaves, own_grads, state, rate, fixed)
        check(f"{call}.update", derivative_problems(cls) if tracked else ())
        if is_transforming():
            leaves, held = _alike(leaves, own_grads, held, counters, rate)
        clones = _with_grads(leaves, own_grads, tracked)  # torch 2.14's Dynamo sets no gradient inside a mode
        with tensor_scalars(tracked):
            states = _stepped(cls, fixed, clones, held, taken, tracked, _varies(lr) and rate)
            if _varies(lr):
                clones = [mended(*xs, rate) for xs in zip(clones, leaves, own_grads, strict=True)]
        return tree_unflatten(clones, structure), tree_unflatten(states, structure)

    return DenseOptimizer(init, update)


def _stepped(cls, hyper: dict, clones: list[Tensor], held: list[dict], taken: Tensor, tracked: bool, rate: Any) -> list:
    """Return the states after a step of the class, which writes the clones. rate: False for that among `hyper`."""
    opt = _make(cls, hyper, clones, tracked)
    for p, mine in zip(clones, held, strict=True):
        if mine:
            opt.state[p] = {k: _copy(s, tracked) for k, s in mine.items()}
    group = opt.param_groups[0]
    if rate is not False:
        group["lr"] = rate
    if group.get("dampening"):  # SGD has no dampening at its first step
        group["dampening"] = group["dampening"] * (taken > 0).to(torch.float64)
    _unhooked_step(cls)(opt)
    return [dict(opt.state[p]) if p in opt.state else {} for p in clones]


def _alike(
    leaves: list[Tensor], grads: list[Tensor], held: list[dict], counters: Sequence[str], rate: Any
) -> tuple[list[Tensor], list[dict]]:
    """Return parameters and states with every batch dimension of the gradients or of the rate: a write in place
    cannot add a dimension to a tensor."""
    rates = [rate] if isinstance(rate, Tensor) else []
    new_leaves, states = [], []
    for p, g, mine in zip(leaves, grads, held, strict=True):
        own = {k: s for k, s in mine.items() if s.shape == p.shape and k not in counters}
        new_leaves.append(_as_batched(p, g, *own.values(), *rates))
        states.append({k: _as_batched(s, p, g) if k in own else s for k, s in mine.items()})
    return new_leaves, states


def _as_batched(x: Tensor, *others: Tensor) -> Tensor:
    """Return x with the batch dimensions of the other tensors."""
    for other in others:
        x = torch.where(torch.ones_like(other, dtype=torch.bool), x, other.to(x.dtype))
    return x


def _copy(x: Tensor, tracked: bool) -> Tensor:
    return x.clone() if tracked else x.detach().clone()


def _with_grads(leaves: list[Tensor], grads: list[Tensor], tracked: bool = False) -> list[Tensor]:
    """Return clones of the leaves with their gradients set. Derivatives pass through the clones if `tracked`."""
    clones = [_copy(p, tracked) for p in leaves]
    for p, g in zip(clones, grads, strict=True):
        p.grad = (g if tracked else g.detach()).to(p.dtype)
    return clones


def _make(cls, hyper: dict, clones: list[Tensor], tracked: bool = False) -> torch.optim.Optimizer:
    """Return the class on these clones. It updates one tensor at a time."""
    opt = cls(clones, **hyper, **({"differentiable": True} if tracked else {}))
    group = opt.param_groups[0]
    group.update({k: v for k, v in {"foreach": False, "fused": False, "capturable": True}.items() if k in group})
    return opt


def _first_state(
    cls, hyper: dict, leaves: list[Tensor], counters: Sequence[str], rate: float | None
) -> list[dict[str, Tensor]]:
    """Return the state that the class makes at its first step, from `_init_group`.

    `counters` names the scalars that belong to no element. They are kept in f64.
    """
    if not leaves:
        return []
    opt = _make(cls, hyper, clones := _with_grads(leaves, [torch.zeros_like(p) for p in leaves]))
    group = opt.param_groups[0]
    if rate is not None:
        group["lr"] = rate
    init_group = cast(Any, opt)._init_group
    init_group(group, *([] for _ in range(len(inspect.signature(init_group).parameters) - 1)))
    states = []
    for p in clones:
        state = dict(opt.state[p]) if p in opt.state else {}
        if cls is torch.optim.SGD and group["momentum"]:
            state["momentum_buffer"] = torch.zeros_like(p)  # zeros act as a missing buffer: m = momentum · 0 + g
        states.append({k: s.to(p.device, torch.float64) if k in counters else s for k, s in state.items()})
    return states


def _keeps_rate(cls, hyper: dict, counters: Sequence[str]) -> bool:
    """Return whether the first state holds the learning rate."""
    with _disable_current_modes():  # the comparison needs values, also in a staged function
        (a,), (b,) = (_first_state(cls, hyper, [torch.ones(1, 1)], counters, rate) for rate in (1.0, 2.0))
        return not all(torch.equal(a[k], b[k]) for k in a)


def _varies(lr: object) -> bool:
    return callable(lr) or isinstance(lr, Tensor)


def _unhooked_step(cls: type) -> Callable:
    """Return `cls.step` without the profiler's hook, which the constructor of Optimizer wraps around it."""
    return cls.step.__wrapped__ if getattr(cls.step, "hooked", False) else cls.step


# -- validators --------------------------------------------------------------------------------------------------


def hyper_problems(cls: type, hyper: dict) -> Iterator[Problem]:
    """Yield what the class raises for its hyper-parameters."""
    try:
        _first_state(cls, hyper, [torch.zeros(1, 1)], (), None)
    except Exception as error:  # a class may raise anything
        got = ", ".join(f"{k}={describe(v) if isinstance(v, Tensor) else repr(v)}" for k, v in hyper.items())
        what, need = f"torch.optim.{cls.__name__} does not take these hyper-parameters.", str(error).splitlines()[0]
        hint = f"what torch.optim.{cls.__name__}([torch.zeros(1)], ...) takes"
        kind = type(error) if isinstance(error, ValueError) else TypeError
        yield Problem(what, got[:200], need or type(error).__name__, hint, kind)


def class_problems(cls: object, hyper: Mapping[str, Any]) -> Iterator[Problem]:
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        yield Problem("`cls` is not a class of torch.optim.", describe(cls), "torch.optim.Adam, ...", kind=TypeError)
        return
    if not hasattr(cls, "_init_group") or cls in (torch.optim.SparseAdam, torch.optim.Adafactor):
        what = f"`{cls.__name__}` cannot be run as a function of (grads, state)."
        need = "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, RMSprop, Rprop, ASGD or Muon"
        yield Problem(what, cls.__name__, need, "tables are trained by a RowOptimizer: fr.optim.adam", TypeError)
    for name in ("foreach", "fused", "capturable", "differentiable"):
        if hyper.get(name):
            yield Problem(f"`{name}` cannot be set.", f"{name}={hyper[name]}", f"no {name}: `fr.jit` fuses")
    yield from row_hyper_problems(hyper.get("lr", 0.0), {})
    for name, xs in tensors_in(hyper).items():
        wrong = [x for x in xs if x.dim() or not x.is_floating_point()]
        if wrong:
            hint = "betas=(b1, b2)" if name == "betas" else f"{name}=0.01"
            yield Problem(f"`{name}` is not one number.", describe(wrong[0]), "a number, or a tensor f[]", hint)
        elif any(map(is_followed, xs)) and not (cls in DIFFERENTIABLE and name in TENSORS):
            need = f"a plain number or tensor; {', '.join(c.__name__ for c in DIFFERENTIABLE)} also take such numbers"
            what, got = f"`{name}` of {cls.__name__} cannot be followed.", f"`{name}` inside vmap, grad, jvp or jit"
            yield Problem(what, got, need, "`lr`, which may be such a tensor", TypeError)


def rate_problems(cls: type, rate: Any) -> Iterator[Problem]:
    if isinstance(rate, Tensor) and is_followed(rate):
        what = f"the first state of {cls.__name__} holds the learning rate, as a number."
        hint = "`init` outside of the transform, with a plain rate; SGD, Adam, AdamW, Adagrad and RMSprop hold none"
        yield Problem(what, "an `lr` inside vmap, grad, jvp or jit", "a plain number or tensor", hint, TypeError)


def derivative_problems(cls: type) -> Iterator[Problem]:
    """Yield the reasons why a tracked update has no derivative."""
    names = ", ".join(c.__name__ for c in DIFFERENTIABLE)
    if cls not in DIFFERENTIABLE:
        hint = f"one of {names}; or detach the inputs, if no derivative of the update is meant"
        got = f"{cls.__name__}, and a tensor that grad or jvp follows"
        yield Problem("the update has no derivative.", got, "plain tensors", hint, TypeError)


def leaf_problems(what: str, tree: Any) -> Iterator[Problem]:
    hint = "x.float(); numbers and integer tensors belong in the batch or in the loss's closure"
    yield from float_leaf_problems(f"`{what}{{}}` cannot be trained.", tree, hint)


def gradient_problems(grads: Any, params: Any) -> Iterator[Problem]:
    if tree_structure(grads) != tree_structure(params):
        got, need = (f"{[p for p, _ in paths(x)]}" for x in (grads, params))
        hint = "the `dense` of value_and_grad's gradients"
        yield Problem("`grads` is not a tree like `dense`.", f"leaves {got}", f"leaves {need}", hint, TypeError)
        return
    for (path, g), (_, p) in zip(paths(grads), paths(params), strict=True):
        if not isinstance(g, Tensor) or g.shape != p.shape:
            hint = "the `dense` of value_and_grad's gradients"
            yield Problem(f"`grads{path}` does not match its parameter.", describe(g), describe(p), hint)


def state_problems(state: Any, params: Any, first_state: Callable) -> Iterator[Problem]:
    hint = "the state that this optimizer's `init` made of these parameters"
    try:
        states = tree_structure(params).flatten_up_to(state)
    except ValueError:
        got, need = (f"{[p for p, _ in paths(x)]}" for x in (state, params))
        yield Problem("`state` has other parameters.", f"leaves {got}", f"a dict of tensors at each of {need}", hint)
        return
    for (path, p), held in zip(paths(params), states, strict=True):
        need = dict(first_state(p.shape, p.dtype))
        yield from tree_problems(held, f"state{path}", need, "is another optimizer's", hint)

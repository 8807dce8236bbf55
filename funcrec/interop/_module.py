"""Makes an nn.Module a pure function, which takes parameters and buffers, and returns the answer and new buffers.

    y, buffers' = apply(params, buffers, *args)

`module` copies the module's structure without its numbers, once as in train() and once as in eval(). A call runs
`torch.func.functional_call` on a copy, so the call neither reads the module nor writes to it.
"""

import collections
import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from funcrec.core import Problem, check, describe, kind_of, random, sure, tree_problems
from funcrec.jagged import is_concrete
from funcrec.nn import dropout

CALL = "funcrec.interop.module"
# the key of the running call, and a counter of the call's draws
DRAWS: ContextVar[tuple[Tensor | None, Iterator[int]]] = ContextVar("draws")
ABSENT: tuple = (object(), [])  # this stands for a missing attribute
COLLECTIONS = (dict, list, set, collections.deque)
OF_TORCH = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}  # the last two hold an LSTM's parameters


def module(nn_module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], Callable[..., Any]]:
    """Return an nn.Module as (params, buffers, apply), for a loss of funcrec.

    Args:
      nn_module: any module whose state consists of parameters and buffers. The call does not change the module, and
        does not see later changes of the module.

    Returns:
      (params, buffers, apply). `params` {name: f[...]} are copies of the parameters that require grad; a tied parameter
      occurs once. `buffers` {name: f[...]} are copies of all other tensors: running statistics, frozen parameters, and
      integers (counters, masks) as f64, because `Params.dense` is a tree of floats. The function `apply(params,
      buffers, *args, train=False, key=None, **kwargs) -> (answer, buffers)` passes args and kwargs to the module. With
      train=True it runs the module in train() (parts that were set to eval() stay so): batch norm takes its statistics
      from the batch, `apply` returns the new running statistics, and nn.Dropout draws from `key`. Derivatives treat
      buffers as constants.

    Raises:
      TypeError: if `nn_module` is not a module, has lazy or complex parameters, or renormalises its rows in place. From
        `apply`, for params or buffers of another module, for a draw without a key or from torch's generator, and if the
        module writes to a parameter or an attribute (a number, a tensor that is not a buffer, a list or dict).
      ValueError: if integers in buffers exceed ±2⁵³, which f64 cannot hold.

    Law: `apply` returns the bits of the module's answer, and the buffers that a call of the module leaves.

    Example: a loss with batch norm and tables. `merge` keeps the buffers that the loss returns.
      >>> import torch, funcrec as fr
      >>> tables, clicked = (fr.TableConfig("item", 10, 4),), fr.FeatureConfig("clicked", table="item")
      >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
      >>> params, buffers, apply = fr.interop.module(net)
      >>> def loss_fn(p, batch):
      ...     x = fr.lookup(p.tables, batch.ids, [clicked])["clicked"]
      ...     z, buffers = apply(p.dense["net"], p.dense["buffers"], x, train=True)
      ...     return (z[:, 0] - batch.label).square().mean(), buffers
      >>> step = fr.train_step(loss_fn, sparse=fr.optim.sgd(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1),
      ...                      has_aux=True, merge=lambda dense, buffers: {**dense, "buffers": buffers})
      >>> dense = {"net": params, "buffers": buffers}
      >>> state = step.init(fr.Params(fr.init(fr.key(0), tables), dense))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[3], [4, 4]]})
      >>> state, metrics = step(state, fr.Batch(ids, torch.ones(2)))
      >>> state.dense["buffers"]["0.num_batches_tracked"]
      tensor(1., dtype=torch.float64)
    """
    check(CALL, module_problems(nn_module))
    of = lambda wanted: {n: p for n, p in nn_module.named_parameters() if p.requires_grad == wanted}
    given, held = of(True), {**of(False), **dict(nn_module.named_buffers())}
    dtypes = {n: b.dtype for n, b in held.items()}
    params = {n: p.detach().clone() for n, p in given.items()}
    buffers = {n: as_float(b.detach().clone()) for n, b in held.items()}
    shapes = [{n: x.shape for n, x in own.items()} for own in (params, buffers)]
    forms = {True: hollow(nn_module), False: hollow(nn_module).eval()}
    if not nn_module.training:
        forms[True].train()
    draw_from_keys(forms[True])
    lock = threading.RLock()  # a running call puts its tensors into a copy of the module

    def apply(params, buffers, *args: Any, train: bool = False, key: Tensor | None = None, **kwargs: Any):
        for name, given, own in (("params", params, shapes[0]), ("buffers", buffers, shapes[1])):
            hint = f"`{name}` as fr.interop.module gave them"
            check(f"{CALL}'s apply", tree_problems(given, name, own, "are not this module's", hint))
        check(f"{CALL}'s apply", kind_of(bool).find("train", train))
        if train and key is None:
            check(f"{CALL}'s apply", draw_problems(forms[True]))
        if key is not None:
            random.check_key(f"{CALL}'s apply", key)
        # Copies, because the module writes to its buffers. If it makes new buffers, functional_call puts them into
        # `state`.
        own = {n: b.detach().clone().to(dtypes[n]) for n, b in buffers.items()}
        state = {**params, **own}
        before = state_of_generator(), versions(params.values())
        token = DRAWS.set((key, itertools.count()))
        try:
            with lock, kept_attributes(forms[train]) as kept:
                out = functional_call(forms[train], state, args, kwargs)
        finally:
            DRAWS.reset(token)
        after = state_of_generator(), versions(params.values())
        check(f"{CALL}'s apply", side_effect_problems(before, after, params), memory_problems(kept))
        return out, {n: as_float(state[n]) for n in buffers}

    return params, buffers, apply


def as_float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.double()


def hollow(nn_module: nn.Module) -> nn.Module:
    """Return a copy of the module with parameters and buffers on the meta device, tied as in the module.

    So a tensor that a call does not replace cannot be read.
    """
    memo: dict[int, Any] = {}
    for x in itertools.chain(nn_module.parameters(), nn_module.buffers()):
        empty = x.detach().to("meta")
        memo[id(x)] = nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty
    return copy.deepcopy(nn_module, memo)


def draw_from_keys(nn_module: nn.Module) -> None:
    for part in nn_module.modules():
        if type(part) is nn.Dropout:
            cast(Any, part).forward = keyed_dropout(part)


def keyed_dropout(part: nn.Dropout) -> Callable[[Tensor], Tensor]:
    """Return a forward function for the dropout. The i-th draw of a run uses fold_in(key, i)."""

    def forward(x: Tensor) -> Tensor:
        if not part.training or part.p == 0:
            return x
        key, count = DRAWS.get()
        return dropout(x, random.fold_in(sure(key), next(count)), part.p)

    return forward


def state_of_generator() -> Tensor | None:
    """Return the state of torch's generator; None while a call is staged.

    `jit` itself raises for draws, and a transform has no generator.
    """
    state = None if torch.compiler.is_dynamo_compiling() else torch.default_generator.get_state()
    return state if state is not None and is_concrete(state) else None


def versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]


@contextlib.contextmanager
def kept_attributes(nn_module: nn.Module) -> Iterator[list[str]]:
    """Yield a list of names, which gets the attributes (tensors, numbers, collections) that change inside the block.

    On exit it undoes new bindings and changes of collections, so that the next call finds the same attributes.
    """
    before, changed = attributes(nn_module), []
    kept = {at: copy.copy(x) for at, (x, _) in before.items() if isinstance(x, COLLECTIONS)}
    try:
        yield changed
    finally:
        after = attributes(nn_module)
        for part, name in before | after:
            was, now = before.get((part, name), ABSENT), after.get((part, name), ABSENT)
            if was[0] is not now[0] or was[1] != now[1]:
                changed.append(f"{part}.{name}".lstrip("."))
                of = vars(nn_module.get_submodule(part))
                of.pop(name, None)
                of |= {} if was is ABSENT else {name: kept.get((part, name), was[0])}


def attributes(nn_module: nn.Module) -> dict[tuple[str, str], tuple[Any, list[int]]]:
    """Return {(part, name): (value, its version or contents)} for tensors, numbers and collections.

    It leaves out parameters, buffers and torch's own attributes.
    """
    return {(part, name): (x, state_of_attribute(x)) for part, m in nn_module.named_modules()
            for name, x in vars(m).items() if isinstance(x, Tensor | int | float | None)
            or (isinstance(x, COLLECTIONS) and name not in OF_TORCH)}  # fmt: skip


def state_of_attribute(x: Any) -> list[int]:
    inside = [*x, *x.values()] if isinstance(x, dict) else x if isinstance(x, COLLECTIONS) else [x]
    return [
        *(map(id, inside) if isinstance(x, COLLECTIONS) else ()),
        *versions(t for t in inside if isinstance(t, Tensor)),
    ]


# -- validators ----------------------------------------------------------------------------------------------------


def module_problems(x: object) -> Iterator[Problem]:
    if not isinstance(x, nn.Module):
        hint = "torch.nn.Sequential(torch.nn.Linear(8, 1))"
        yield Problem("`nn_module` is not a module.", describe(x), "a torch.nn.Module", hint, TypeError)
        return
    lazy = [n for n, p in itertools.chain(x.named_parameters(), x.named_buffers())
            if is_lazy(p)]  # fmt: skip
    if lazy:
        yield Problem("`nn_module` has parameters of no shape yet.", f"{lazy}", "parameters with shapes",
                      "nn_module(example), once", TypeError)  # fmt: skip
    loose = [f"{n}.{k}".lstrip(".") for n, part in x.named_modules() for k, v in vars(part).items()
             if isinstance(v, Tensor) and v.requires_grad]  # fmt: skip
    if loose:
        yield Problem("`nn_module` has tensors that require grad and would never be trained.", f"{loose}",
                      "parameters", "self.w = torch.nn.Parameter(w); nn.utils.parametrizations.weight_norm(layer), "
                      "where nn.utils.weight_norm left them", TypeError)  # fmt: skip
    unreal = [n for n, b in itertools.chain(x.named_parameters(), x.named_buffers()) if b.is_complex()]
    if unreal:
        hint = "torch.view_as_real(x) as the buffer, and torch.view_as_complex in forward"
        yield Problem("`nn_module` has complex numbers, and `Params.dense` has floats.", f"{unreal}", "real parameters "
                      "and buffers", hint, TypeError)  # fmt: skip
    wide = [n for n, b in itertools.chain(x.named_parameters(), x.named_buffers())
            if b.dtype in (torch.int64, torch.uint64) and not b.is_meta
            and not torch.equal(b.double().to(b.dtype), b)]  # fmt: skip
    if wide:
        need, hint = "integers of at most 53 bits in buffers", "a plain attribute for a constant, as an int"
        yield Problem("`nn_module` has integers that f64 does not hold.", f"{wide}, beyond ±2⁵³", need, hint)
    normed = [n for n, part in x.named_modules() if getattr(part, "max_norm", None) is not None]
    if normed:
        yield Problem("`nn_module` writes to its parameters: rows are renormalised in place.", f"max_norm in {normed}",
                      "max_norm=None", "fr.optim.rowwise_adagrad(max_norm=...), with the table in `tables`",
                      TypeError)  # fmt: skip


def memory_problems(changed: Sequence[str]) -> Iterator[Problem]:
    if changed:
        yield Problem("the module writes to attributes, which `apply` could not hand on.", f"{list(changed)}",
                      "a forward that changes buffers only", "self.register_buffer(name, tensor) in its __init__",
                      TypeError)  # fmt: skip


def draw_problems(nn_module: nn.Module) -> Iterator[Problem]:
    found = [n for n, part in nn_module.named_modules() if type(part) is nn.Dropout and part.training and part.p]
    if found:
        yield Problem("the module draws, and `key` is missing.", f"nn.Dropout in {found}", "a key", "key=fr.key(0)",
                      TypeError)  # fmt: skip


def side_effect_problems(before: tuple, after: tuple, params: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Report side effects that functional_call cannot prevent."""
    if after[0] is not None and not torch.equal(before[0], after[0]):
        yield Problem("the module draws from torch's generator.", "another state of it than before the call",
                      "draws by nn.Dropout, which are made of `key`",
                      "train=False, or nn.Dropout in place of functional.dropout and other layers that draw",
                      TypeError)  # fmt: skip
    written = [n for n, a, b in zip(params, before[1], after[1], strict=True) if a != b]
    if written:
        yield Problem("the module writes to its parameters.", f"{written}", "a forward that only reads them",
                      "a buffer for what a forward changes", TypeError)  # fmt: skip

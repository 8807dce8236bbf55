"""Dense optimizers made from dense optimizers: by the path of a parameter, with clipping, with frozen parameters.

by_path({a: f}, default=g)  =  f on the parameters that pattern a names, g on the others
clip_dense(f)(g) = f(min(1, c / ‖g‖) · g)

Each result keeps the contract of DenseOptimizer, so combinators nest. A path is the keys, fields and places that lead
to a parameter, joined by dots: "tower.0.weight".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate as running
from typing import Any

import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.core import (
    Problem,
    absent_problems,
    check,
    paths,
    remade,
    sure,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
    typed,
)
from funcrec.optim._checks import step_problems
from funcrec.optim._dense import DenseOptimizer, State, gradient_problems, leaf_problems
from funcrec.tables import clip_factor, global_norm, scaled_leaves


@remade
@typed
def by_path(optimizers: Mapping[str, DenseOptimizer], *, default: DenseOptimizer | None = None) -> DenseOptimizer:
    """Return a dense optimizer with an optimizer for each group of parameters, chosen by path.

    A path is the keys that lead to a parameter, joined by dots: "tower.0.weight". A key of `optimizers` is a pattern of
    a path, or of its beginning: "tower" names all parameters below it, "*.bias" all biases. `*` stands for any
    characters, `?` for one. The first pattern that fits counts. `default` updates the other parameters.

    Raises:
      KeyError: a pattern gets no parameter, because it fits none, or because patterns before it fit all that it fits.
      ValueError: a parameter is not named and there is no default, or two parameters have one path.

    Law: each optimizer updates its parameters as it would alone. Groups of torch.optim's classes equal one instance of
      the class with param_groups.

    Example: biases do not decay.
      >>> import torch, funcrec as fr
      >>> adamw = lambda decay: fr.optim.dense(torch.optim.AdamW, lr=0.1, weight_decay=decay)
      >>> opt = fr.optim.by_path({"*.bias": adamw(0.0)}, default=adamw(0.5))
      >>> params = {"head": {"weight": torch.ones(1), "bias": torch.ones(1)}}
      >>> grads = fr.tree.map(torch.zeros_like, params)
      >>> opt.update(grads, opt.init(params), params, step=0)[0]
      {'head': {'weight': tensor([0.9500]), 'bias': tensor([1.])}}

    Source: optax.multi_transform; torch.optim's param_groups.
    """
    call, patterns = "funcrec.optim.by_path", tuple(optimizers)

    def groups(names: Sequence[str]) -> Iterator[tuple[DenseOptimizer, list[str]]]:
        """Yield each optimizer with its parameters. The default gets its parameters at once, as in `by_table`."""
        first = {n: next((p for p in patterns if fits(p, n)), None) for n in names}
        yield from ((optimizers[p], [n for n in names if first[n] == p]) for p in patterns)
        rest = [n for n in names if first[n] is None]
        if rest:
            yield sure(default), rest

    def group_problems(names: Sequence[str]) -> Iterator[Problem]:
        yield from pattern_problems("optimizers", patterns, names, is_first=True)
        named = [n for n in names if any(fits(p, n) for p in patterns)]
        need, hint = "one for each parameter, or `default`", "default=fr.optim.dense(torch.optim.SGD, lr=0.1)"
        wanted = names if default is None else ()
        yield from absent_problems("parameter {} has no optimizer.", named, wanted, need, hint, ValueError)

    def init(params: Any) -> State:
        check(f"{call}.init", leaf_problems("dense", params))
        own, structure = named(f"{call}.init", params)
        check(f"{call}.init", group_problems(list(own)))
        made: dict[Any, Any] = {}
        for opt, names in groups(list(own)):
            made |= opt.init({n: own[n] for n in names})
        return tree_unflatten([made[n] for n in own], structure)

    def update(grads: Any, state: State, params: Any, step: int | Tensor) -> tuple[Any, State]:
        own, held, given, structure = parts(f"{call}.update", grads, state, params, step)
        check(f"{call}.update", group_problems(list(own)))
        moved, made = {}, {}
        for opt, names in groups(list(own)):
            g, s, p = ({n: x[n] for n in names} for x in (given, held, own))
            new, new_state = opt.update(g, s, p, step)
            moved |= new
            made |= new_state
        return tuple(tree_unflatten([x[n] for n in own], structure) for x in (moved, made))

    return DenseOptimizer(init, update, (*optimizers.values(), *([] if default is None else [default])))


def clip_dense(optimizer: DenseOptimizer, max_norm: Any, max_value: Any) -> DenseOptimizer:
    """Return the dense optimizer of `clip`."""
    call = "funcrec.optim.clip"

    def update(grads: Any, state: State, params: Any, step: int | Tensor) -> tuple[Any, State]:
        check(f"{call}.update", leaf_problems("dense", params), step_problems(step))
        check(f"{call}.update", gradient_problems(grads, params))
        if max_value is not None:
            grads = tree_map(lambda g: g.clamp(-max_value, max_value), grads)
        if max_norm is not None and tree_leaves(grads):
            factor = clip_factor(global_norm({}, *tree_leaves(grads)), max_norm)
            grads = scaled_leaves(grads, factor)
        return optimizer.update(grads, state, params, step)

    return DenseOptimizer(optimizer.init, update, (optimizer,), max_norm is not None)


def freeze_dense(optimizer: DenseOptimizer, patterns: tuple[str, ...]) -> DenseOptimizer:
    """Return the dense optimizer of `freeze`."""
    call = "funcrec.optim.freeze"
    is_frozen = lambda name: any(fits(p, name) for p in patterns)

    def init(params: Any) -> State:
        check(f"{call}.init", leaf_problems("dense", params))
        own, structure = named(f"{call}.init", params)
        check(f"{call}.init", pattern_problems("paths", patterns, list(own)))
        made = optimizer.init({n: x for n, x in own.items() if not is_frozen(n)})
        return tree_unflatten([made.get(n, {}) for n in own], structure)

    def update(grads: Any, state: State, params: Any, step: int | Tensor) -> tuple[Any, State]:
        own, held, given, structure = parts(f"{call}.update", grads, state, params, step)
        check(f"{call}.update", pattern_problems("paths", patterns, list(own)))
        check(f"{call}.update", kept_problems({n: s for n, s in held.items() if is_frozen(n)}))
        g, s, p = ({n: x for n, x in of.items() if not is_frozen(n)} for of in (given, held, own))
        moved, made = optimizer.update(g, s, p, step)
        return tuple(
            tree_unflatten([x.get(n, old[n]) for n in own], structure) for x, old in ((moved, own), (made, held))
        )

    return DenseOptimizer(init, update, (optimizer,))


def parts(
    call: str, grads: Any, state: State, params: Any, step: int | Tensor
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor], Any]:
    """Return the parameters, states and gradients by path, and the structure of the parameters, after checks."""
    check(call, leaf_problems("dense", params), step_problems(step))
    check(call, gradient_problems(grads, params), held_problems(state, params))
    own, structure = named(call, params)
    held = dict(zip(own, structure.flatten_up_to(state), strict=True))
    return own, held, dict(zip(own, tree_leaves(grads), strict=True)), structure


def named(call: str, params: Any) -> tuple[dict[str, Tensor], Any]:
    """Return {path: parameter} and the structure of the tree."""
    found, structure = torch_tree.tree_flatten_with_path(params)
    names = [".".join(map(_key, path)) for path, _ in found]
    check(call, one_path_problems(names))
    return dict(zip(names, (x for _, x in found), strict=True)), structure


def _key(key: Any) -> str:
    return str(next(getattr(key, n) for n in ("key", "name", "idx") if hasattr(key, n)))


def fits(pattern: str, path: str) -> bool:
    """Return whether a pattern fits a path or a beginning of the path."""
    return any(fnmatchcase(start, pattern) for start in running(path.split("."), "{}.{}".format))


# -- validators --------------------------------------------------------------------------------------------------


def pattern_problems(
    what: str, patterns: Iterable[str], names: Sequence[str], is_first: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each pattern that fits no parameter. If `is_first`, patterns before it leave it some."""
    left = list(names)
    for p in patterns:
        if not any(fits(p, n) for n in left):
            why = "fits" if not any(fits(p, n) for n in names) else "gets"
            yield Problem(f"`{what}` has a pattern that {why} no parameter.", f"{p!r}", f"one that fits some of {left}",
                "'*.bias', or 'tower' for all below it", KeyError)  # fmt: skip
        left = [n for n in left if not fits(p, n)] if is_first else left


def kept_problems(states: Mapping[str, Mapping]) -> Iterator[Problem]:
    hint = "the state that this optimizer's `init` made of these parameters"
    for n, s in states.items():
        if s:
            yield Problem(f"`state` of {n!r}, which is frozen, is another optimizer's.", f"{sorted(s)}", "{}", hint)


def one_path_problems(names: Sequence[str]) -> Iterator[Problem]:
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        yield Problem("two parameters have one path.", f"{twice}", "one path for each", "keys without dots")


def held_problems(state: Any, params: Any) -> Iterator[Problem]:
    """Yield a problem unless the state has a dict at each parameter. The group's optimizer checks the dict."""
    try:
        held = tree_structure(params).flatten_up_to(state)
        fits_all = all(isinstance(x, Mapping) for x in held)
    except ValueError:
        fits_all = False
    if not fits_all:
        got, need = (f"{[p for p, _ in paths(x)]}" for x in (state, params))
        hint = "the state that this optimizer's `init` made of these parameters"
        yield Problem("`state` has other parameters.", f"leaves {got}", f"a dict of tensors at each of {need}", hint)

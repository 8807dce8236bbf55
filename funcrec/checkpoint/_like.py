"""The example that `load` is given: a tree that the checkpoint must equal in kinds, shapes and dtypes, or a step."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.checkpoint._tree_json import show
from funcrec.core import CLASSES, Problem, class_name, describe, paths, tree_structure
from funcrec.mesh import Mesh
from funcrec.optim import DenseOptimizer
from funcrec.sharding import DenseShard, optimizer_problems
from funcrec.train import Recipe, TrainState, TrainStep, readers


def step_kind_problems(like: Any) -> Iterator[Problem]:
    """Report a step that has no layout, such as a logged one."""
    if isinstance(getattr(like, "fn", like), TrainStep):
        need, hint = "a step of train_step, or a state", "like=step.init(params)"
        yield Problem("`like` is a step of another kind.", repr(like), need, hint, TypeError)


def given_problems(given: dict[str, Any]) -> Iterator[Problem]:
    """Report arguments besides a step, which has its own."""
    names = [n for n, x in given.items() if x not in (None, False, ())]
    if names:
        what, need = "`like` is a step, which says how states are laid out.", "the path and the step alone"
        yield Problem(what, f"also {', '.join(names)}", need, "like=None, or a step with these arguments", TypeError)


def of_step_problems(recipe: Recipe, tree: Any, mesh: Mesh | None) -> Iterator[Problem]:
    """Report a tree without a state, and the state of another optimizer than those of the step."""
    leaves = torch_tree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, TrainState))
    states = [x for x in leaves if isinstance(x, TrainState)]
    if not states:
        yield Problem("the checkpoint has no state of a step.", describe(tree), "a TrainState", "like=None")
    for state in states:
        samples = {n: {k: rows(0, 0) for k, rows in own.items()} for n, own in readers(state, cast(Mesh, mesh)).items()}
        yield from optimizer_problems(recipe.sparse, samples)
        yield from dense_problems(recipe.dense, state)


def dense_problems(dense: DenseOptimizer, state: TrainState) -> Iterator[Problem]:
    """Report parameters whose optimizer has tensors of other names than that of the step."""
    is_cut = lambda x: isinstance(x, DenseShard)
    blank = lambda x: torch.empty(x.shape, dtype=(x.flat if is_cut(x) else x).dtype, device="meta")
    params = torch_tree.tree_map(blank, state.dense, is_leaf=is_cut)
    at_each = tree_structure(params).flatten_up_to
    for (path, _), own, x in zip(paths(params), at_each(dense.init(params)), at_each(state.dense_opt), strict=True):
        held = x.flat if is_cut(x) else x
        if set(held) != set(own):
            what = f"`dense_opt{path}` is another optimizer's."
            hint = "like=None, or a step with the optimizer of the save"
            yield Problem(what, f"tensors {sorted(held)}", f"tensors {sorted(own)}", hint)


def difference_problems(tree: Any, like: Any) -> Iterator[Problem]:
    """Report every node that differs between two trees in place, kind, shape or dtype."""
    found, wanted = dict(_nodes(tree, "")), dict(_nodes(like, ""))
    leaves = lambda nodes: [p for p, (_, is_leaf) in nodes.items() if is_leaf]
    hint = "like=None, which loads the file as it is"
    for path in [p for p in leaves(wanted) if p not in found]:
        yield Problem(f"`{path}` is missing.", "nothing", wanted[path][0], hint)
    for path in [p for p in leaves(found) if p not in wanted]:
        yield Problem(f"`{path}` is not expected.", found[path][0], "nothing", hint)
    for path, (need, is_leaf) in wanted.items():
        if path in found and found[path][0] != need:
            differs = "has another shape or dtype" if is_leaf and found[path][1] else "is another kind of value"
            yield Problem(f"`{path or 'tree'}` {differs}.", found[path][0], need, hint)


def _nodes(node: Any, path: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield (path, (kind, whether it is a leaf)) for every node."""
    children: list[tuple[str, Any]] = []
    kind = type(node).__name__
    if isinstance(node, Tensor):
        kind = describe(node)
    elif isinstance(node, dict):
        children = [(f"{path}[{show(k)}]", v) for k, v in node.items()]
    elif isinstance(node, (list, tuple)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(node)]
    elif class_name(type(node)) in CLASSES:
        values, (fields, static) = CLASSES[class_name(type(node))][0](node)
        kind = f"{kind} {show(static)}" if static else kind
        children = [(f"{path}.{n}".lstrip("."), v) for n, v in zip(fields, values, strict=True)]
    yield path, (kind, not children)
    for where, child in children:
        yield from _nodes(child, where)

"""Loads TorchRec's state dicts into Params and TrainState, and writes them back.

    state = load_torchrec_state_dict(state, module.state_dict()) module.load_state_dict(to_torchrec_state_dict(state,
    module.state_dict()))

An optimizer's state dict works the same way: {parameter: {state: tensor}} under "state".
"""

import copy
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from funcrec.core import (
    Problem,
    Size,
    check,
    describe,
    has_tracked,
    is_wrapped,
    replace,
    tree_flatten,
    tree_structure,
    tree_unflatten,
    typed,
)
from funcrec.grad import params_problems
from funcrec.interop._managed import load_managed, managed_like, unmanaged_problems
from funcrec.interop._places import (
    Place,
    find_places,
    is_optimizer,
    shape_problems,
    table_of,
    to_our_columns,
    to_their_columns,
)
from funcrec.interop._quantized import load_quantised, quantised_like
from funcrec.interop._shards import joined, like, shape_of, whole
from funcrec.kinds import DynamicTables, QuantizedTables
from funcrec.tables import FeatureConfig, Params, feature_list_problems
from funcrec.train import TrainState

# The names of funcrec's slots, and the names in FBGEMM and torch.optim. FBGEMM calls the first state momentum1,
# whatever it is.
FIRST = ("momentum1", "momentum_1")
SLOTS = {
    "sum": ("sum", *FIRST),
    "mean": ("exp_avg", *FIRST),
    "square": ("exp_avg_sq", "momentum2", "momentum_2", "square_avg"),
    "momentum": ("momentum_buffer", *FIRST),
    "counter": ("row_counter",),
    "last": ("prev_iter",),
}
COUNTS = ("step", "iter")  # counters of steps, in place of TrainState.step
State = TypeVar("State", Params, TrainState, QuantizedTables)


@typed
def load_torchrec_state_dict(
    state: State,
    state_dict: Mapping[str, Any],
    *,
    features: Sequence[FeatureConfig] | None = None,
    step: Size | None = None,
    group: dist.ProcessGroup | None = None,
    module: Mapping[str, Any] | None = None,
) -> State:
    """Return `state` with the numbers of a TorchRec state dict, which a module or an optimizer made.

    Args:
      state: Params, or a TrainState whose tables are whole. Its structure says which numbers to load, and its dtypes
        how to store them. Tables are found by name. Dense tensors of `torchrec.models.dlrm.DLRM` go to
        `fr.models.dlrm(..., keep="dense")`, with the products of pairs in funcrec's order. Those of DLRM_DCN go to
        `fr.models.dlrm_dcnv2`, and those of `torchrec.models.deepfm.SimpleDeepFMNN` to `fr.models.simple_deepfm`. For
        other dense tensors, the longest tail of a leaf's path that is the end of exactly one name decides, as for
        `{"over": fr.interop.module(over)[0]}`. Or QuantizedTables, for the rows of a quantised collection, in the forms
        that `from_torchrec(module)` gives: bytes do not tell int8 from float16.
      state_dict: `module.state_dict()` of an EmbeddingBagCollection, an EmbeddingCollection, or a model with one,
        sharded (ShardedTensor or DTensor: every rank must call, and each rank gets whole tables) or not. For a
        TrainState's slots and dense optimizer: `module.fused_optimizer().state_dict()`, and the state dict of a
        KeyedOptimizer. The function copies numbers but no hyper-parameters. So the state must have the rule of the
        optimizer: the names do not tell one first moment from another.
      features: the features of the model of `state`. **Give them whenever the model has dense weights**: these
        read the features' vectors in the order of TorchRec's tables. The numbers of neither library show that order, so
        a model of funcrec with another order computes something else without an error. Given features must have the
        order of the tables in a module's state dict, as `from_torchrec` gives them. Without features the tables of
        `state` must have that order, unless the module is sharded.
      step: the number of steps so far, for `TrainState.step`. State dicts of torch.optim contain this number, and
        state dicts of FBGEMM do not.
      group: the ranks, if each rank has only the state of its own tables, as with DistributedModelParallel's fused
        optimizer (`torch.distributed.group.WORLD`); None if every rank has all names.
      module: for an optimizer's state dict and dynamic tables, the state dict of the module, which has the ids of the
        rows. Load it into `state` first.

    Raises:
      TypeError, ValueError, KeyError: if a name has no place, a place has no name, shapes differ (row-wise state of
        column-wise shards has one number for each shard, which is another optimizer), optimizer state does not match
        the slots, or the state of Adam has no step. This error comes before any tensor is gathered.
      TypeError: if autograd tracks the state dict.

    Law: predictions on a batch are equal, and k more steps leave the same tables in both libraries, up to rounding.

    Example:
      >>> import torch, funcrec as fr
      >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
      >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
      >>> tables, features = fr.interop.from_torchrec(ebc)
      >>> params = fr.Params(fr.init(fr.key(0), tables), dense={})
      >>> params = fr.interop.load_torchrec_state_dict(params, ebc.state_dict())
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], [], [7]]})
      >>> ours, theirs = fr.lookup(params.tables, ids, features), ebc(fr.interop.to_torchrec(ids))
      >>> torch.allclose(ours.values, theirs.values())
      True
    """
    call, own = "funcrec.interop.load_torchrec_state_dict", cast(Any, state)
    if isinstance(own, QuantizedTables):
        check(call, dict_problems(state_dict, "state_dict"), rest_problems(features, step, group))
        return cast(Any, load_quantised(call, own, state_dict))
    check(call, dict_problems(state_dict, "state_dict"))
    if isinstance(own.tables, DynamicTables):
        check(call, tracked_problems(state_dict))
        load = functools.partial(load_torchrec_state_dict, features=features, step=step, group=group)
        return load_managed(call, own, state_dict, module, load)
    check(call, unmanaged_problems(state_dict, module))
    check(call, state_problems(own), step_problems(own, step), tracked_problems(state_dict))
    check(call, () if features is None else feature_list_problems(features))
    if is_optimizer(state_dict):
        check(call, trained_problems(own))
        theirs = {n: stated(x) for n, x in state_dict["state"].items()}
        return cast(Any, load_optimizer(call, own, theirs if group is None else joined(theirs, group), step))
    places, problems = find_places(list(state_dict), own.tables, own.dense)
    check(call, problems, *(shape_problems(p, shape_of(state_dict[p.name]), p.ours.shape) for p in places))
    check(call, order_problems(state_dict, own, features))
    new = {p.at: loaded(call, p, state_dict[p.name], p.ours, dim_of(own)) for p in places}
    leaves, structure = tree_flatten(own.dense)
    tables = {name: new[name] for name in own.tables}
    own = replace(own, tables=tables, dense=tree_unflatten([new[i] for i in range(len(leaves))], structure))
    return own if step is None else replace(own, step=torch.full_like(own.step, step))


@typed
def to_torchrec_state_dict(
    state: Params | TrainState | QuantizedTables,
    like_dict: Mapping[str, Any],
    *,
    module: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the numbers of `state` in the form of a TorchRec state dict.

    Args:
      state: Params, or a TrainState whose tables are whole (call `fr.gather_state` first if they are sharded). Or
        QuantizedTables, for a quantised collection with the same bits.
      like_dict: `module.state_dict()`, or the `state_dict()` of an optimizer (for a TrainState). The result has its
        names, dtypes, devices and shards, a copy of its param_groups, and none of its numbers. For managed collision
        modules, an id that `like_dict` has keeps its row there, and rows without an id keep its numbers.

    Returns:
      A new dict of new tensors, which `load_state_dict` of TorchRec takes strictly. For a sharded tensor it has each
      rank's own shards.

    Raises:
      The errors of `load_torchrec_state_dict`.

    Law: `load_torchrec_state_dict(state, to_torchrec_state_dict(state, like_dict))` equals `state`, up to the rounding
      of TorchRec's dtypes.

    Example:
      >>> import torch, funcrec as fr
      >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
      >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
      >>> params = fr.Params({"item": torch.ones(10, 4)}, dense={})
      >>> ebc.load_state_dict(fr.interop.to_torchrec_state_dict(params, ebc.state_dict()))
      <All keys matched successfully>
      >>> bool((ebc.embedding_bags["item"].weight == 1).all())
      True
    """
    call = "funcrec.interop.to_torchrec_state_dict"
    if isinstance(state, QuantizedTables):
        check(call, dict_problems(like_dict, "like_dict"))
        return quantised_like(call, state, like_dict)
    check(call, dict_problems(like_dict, "like_dict"), tracked_problems(state))
    if isinstance(state.tables, DynamicTables):
        both = load_torchrec_state_dict, to_torchrec_state_dict
        return managed_like(call, state, like_dict, module, *both)
    check(call, state_problems(state), unmanaged_problems(like_dict, module))
    if is_optimizer(like_dict):
        check(call, trained_problems(state))
        made = {"state": optimizer_like(call, cast(TrainState, state), like_dict["state"])}
        return {**{k: copy.deepcopy(v) for k, v in like_dict.items() if k != "state"}, **made}
    places, problems = find_places(list(like_dict), state.tables, state.dense)
    check(call, problems, *(shape_problems(p, shape_of(like_dict[p.name]), p.ours.shape) for p in places))
    new = {p.name: like(like_dict[p.name], to_their_columns(p.ours, p, dim_of(state))) for p in places}
    return {name: new[name] for name in like_dict}


# -- an optimizer's -------------------------------------------------------------------------------------------------


def load_optimizer(call: str, state: TrainState, theirs: Mapping[str, Any], step: int | None) -> TrainState:
    slots, said = match_optimizer(call, state, theirs, all_of_tables=True)
    known = step if step is not None else next(iter(said), None)
    check(call, count_problems(state, said, step))
    dim = dim_of(state)
    tables = {name: dict(own) for name, own in state.slots.items()}
    leaves, structure = dense_states(state)
    leaves = [dict(own) for own in leaves]
    for place, own, found in slots:
        into = tables[place.at] if isinstance(place.at, str) else leaves[place.at]
        into[own] = loaded(call, place, theirs[place.name][found], into[own], dim)
    state = replace(state, slots=tables, dense_opt=tree_unflatten(leaves, structure))
    return state if known is None else replace(state, step=torch.full_like(state.step, known))


def optimizer_like(call: str, state: TrainState, theirs: Mapping[str, Any]) -> dict[str, Any]:
    slots, _ = match_optimizer(call, state, {n: stated(own) for n, own in theirs.items()})
    leaves, _ = dense_states(state)
    made = {name: dict.fromkeys(own) for name, own in theirs.items()}
    for place, own, found in slots:
        ours = state.slots[place.at][own] if isinstance(place.at, str) else leaves[place.at][own]
        made[place.name][found] = like(theirs[place.name][found], to_their_columns(ours, place, dim_of(state)))
    for name, own in made.items():  # the remaining entries count steps, or are None in both
        for found in [k for k, x in own.items() if x is None and theirs[name][k] is not None]:
            value = theirs[name][found]
            own[found] = torch.full_like(value, int(state.step)) if isinstance(value, Tensor) else int(state.step)
    return made


def match_optimizer(
    call: str, state: TrainState, theirs: Mapping[str, Any], *, all_of_tables: bool = False
) -> tuple[list[tuple[Place, str, str]], set[int]]:
    """Return ([(place, slot, TorchRec's name of the slot)], the counts of steps that the state dict gives)."""
    named = {n: own for n, own in theirs.items() if own}
    mentioned = {table_of(n, state.tables) for n in named}
    tables: dict[str, Tensor] = state.tables
    wanted = {n: t for n, t in tables.items() if n in mentioned or (all_of_tables and state.slots.get(n))}
    places, problems = find_places(list(named), wanted, state.dense, all_of_dense=False)
    check(call, problems)
    leaves, _ = dense_states(state)
    slots: list[tuple[Place, str, str]] = []
    said: set[int] = set()
    for place in places:
        own, is_table = named[place.name], isinstance(place.at, str)
        ours = state.slots[place.at] if isinstance(place.at, str) else leaves[place.at]
        left = dict.fromkeys(own)
        for slot, x in ours.items():
            names = SLOTS.get(slot, ()) if is_table else (slot,)  # slots of a dense leaf: names of torch.optim
            found = next((k for k in left for n in names if k.split(".")[-1] == n), None)
            if found is None:
                problems.append(Problem(f"slot {slot!r} of `{place.path}` is not in the state dict.", f"{list(own)}",
                                        f"one of {list(names)}", "the rule of TorchRec's optimizer"))  # fmt: skip
                continue
            del left[found]
            problems += shape_problems(place, shape_of(own[found]), x.shape, f"'s {slot!r}")
            slots.append((place, slot, found))
        counts = [k for k in left if k.split(".")[-1] in COUNTS]
        said |= {int(own[k]) for k in counts} if is_table else set()
        more = [k for k in left if k not in counts]
        if more:
            problems.append(Problem(f"the state of `{place.path}` has more than its slots.", f"{more}",
                                    f"{list(ours)}", "the rule of TorchRec's optimizer"))  # fmt: skip
    check(call, problems)
    return slots, said


def stated(own: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in own.items() if x is not None}


def dense_states(state: TrainState) -> tuple[list[dict[str, Tensor]], Any]:
    """Return ({name: tensor} of the dense optimizer for each dense leaf, the structure of the tree)."""
    structure = tree_structure(state.dense)
    return structure.flatten_up_to(state.dense_opt), structure


# -- tensors ---------------------------------------------------------------------------------------------------------


def loaded(call: str, place: Place, theirs: Any, ours: Tensor, dim: int) -> Tensor:
    """Return the gathered whole tensor, in the order, shape, dtype and device of funcrec's tensor."""
    return to_our_columns(whole(call, place.name, theirs), place, dim).reshape(ours.shape).to(ours.device, ours.dtype)


def dim_of(state: Params | TrainState) -> int:
    return next((t.shape[1] for t in state.tables.values()), 0)


# -- validators --------------------------------------------------------------------------------------------------------


def state_problems(state: Params | TrainState) -> Iterator[Problem]:
    if type(state.tables) is not dict:
        hint = "fr.gather_state(state, mesh); fr.reshard(state, plan, mesh=mesh, sparse=sparse) afterwards"
        yield Problem("`state.tables` are not whole.", describe(state.tables), "{name: f[R, D]}", hint, TypeError)
    else:
        yield from params_problems(state.params if isinstance(state, TrainState) else state)


def dict_problems(x: Mapping[str, Any], name: str) -> Iterator[Problem]:
    hint = f"{name}=module.state_dict(), or optimizer.state_dict()"
    if not is_optimizer(x):
        wrong = {k: v for k, v in x.items() if not is_tensor(v)}
    elif not all(isinstance(k, str) for k in x["state"]):
        keyed = "torchrec.optim.keyed.KeyedOptimizerWrapper(dict(module.named_parameters()), make)"
        yield Problem(f"`{name}` belongs to an optimizer without names.", f"keys {list(x['state'])}",
                      "names of parameters", keyed, TypeError)  # fmt: skip
        return
    else:
        states = {k: own for k, own in x["state"].items() if isinstance(own, Mapping)}
        wrong = {k: own for k, own in x["state"].items() if k not in states}
        inside = {f"{k}'s {n}": v for k, own in states.items() for n, v in own.items()}
        wrong |= {k: v for k, v in inside.items() if not is_tensor(v) and not isinstance(v, int | float | None)}
    for k, v in wrong.items():
        yield Problem(f"`{name}[{k!r}]` is not a tensor.", describe(v), "a tensor, whole or sharded", hint, TypeError)


def is_tensor(x: object) -> bool:
    return isinstance(x, Tensor) or hasattr(x, "local_shards")


def tracked_problems(tree: Any) -> Iterator[Problem]:
    """Report tensors that are differentiated, because copied numbers have no derivative."""
    leaves = [x for x in tree_flatten(dict(tree) if isinstance(tree, Mapping) else tree)[0] if isinstance(x, Tensor)]
    if any(is_wrapped(x) for x in leaves) or (torch.is_grad_enabled() and has_tracked(leaves)):
        got, hint = "a tensor that requires grad, or is of a transform", "module.state_dict(), outside of torch.func"
        yield Problem(
            "the state has tensors that autograd or torch.func tracks.", got, "numbers alone", hint, TypeError
        )


def trained_problems(state: object) -> Iterator[Problem]:
    if not isinstance(state, TrainState):
        need = "a TrainState"
        yield Problem("the state dict belongs to an optimizer.", describe(state), need, "step.init(params)", TypeError)
        return
    try:
        leaves, _ = dense_states(state)
    except ValueError:
        leaves = [None]
    if not all(isinstance(own, dict) and all(isinstance(x, Tensor) for x in own.values()) for own in leaves):
        yield Problem("`state.dense_opt` is not the state of `state.dense`.", describe(state.dense_opt),
                      "a tree like it, with {name: tensor} for each leaf", "step.init(params)", TypeError)  # fmt: skip
    for n, own in state.slots.items():
        for slot, x in own.items():
            if not isinstance(x, Tensor):
                need, hint = "f[R, ...]", "the state of a rule alone, not of `accumulate`"
                yield Problem(f"`state.slots[{n!r}][{slot!r}]` is not a tensor.", describe(x), need, hint, TypeError)


def order_problems(
    state_dict: Mapping[str, Any], state: Params | TrainState, features: Sequence[FeatureConfig] | None
) -> Iterator[Problem]:
    """Report features or tables in another order than the collection's tables.

    Dense weights of a model read the features' vectors in that order.
    """
    tables = state.tables
    known = [table_of(n, tables) for n in state_dict if table_of(n, tables) is not None]
    if features is None:
        tells = bool(tree_flatten(state.dense)[0]) and all(isinstance(x, Tensor) for x in state_dict.values())
        what, got = "tables", list(tables) if tells else known  # the order of a sharded module may differ
    else:
        what, got = "features", [t for t, _ in itertools.groupby(f.table for f in features) if t in known]
    need = [t for t in known if t in got]
    if got != need:
        hint = "tables, features = fr.interop.from_torchrec(module's collection), for the model"
        yield Problem(f"the model's {what} are in another order than the state dict's tables.", f"{got}", f"{need}",
                      hint)  # fmt: skip


def step_problems(state: object, step: object) -> Iterator[Problem]:
    if step is not None and not isinstance(state, TrainState):
        yield Problem("`step` requires a TrainState.", describe(state), "a TrainState", "step.init(params)", TypeError)


def rest_problems(features: object, step: object, group: object) -> Iterator[Problem]:
    for name, x in {"features": features, "step": step, "group": group}.items():
        if x is not None:
            hint = "load_torchrec_state_dict(q, state_dict)"
            yield Problem(f"`{name}` does not belong to quantised tables.", describe(x), "None", hint, TypeError)


def count_problems(state: TrainState, said: set[int], step: int | None) -> Iterator[Problem]:
    if len(said) > 1 and step is None:
        yield Problem("the tables' counts of steps differ.", f"{sorted(said)}", "one number of steps for all",
                      "step=..., where they do not matter")  # fmt: skip
    needs = [n for n, own in state.slots.items() if {"mean", "square"} <= set(own) or "last" in own]
    if needs and not said and step is None:
        yield Problem("the state dict does not say how many steps were taken.", f"no {' or '.join(COUNTS)}",
                      f"it, for the correction of {needs}", "step=..., as FBGEMM's `iter`")  # fmt: skip

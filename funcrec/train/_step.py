"""train_step: combines a loss, a row optimizer and a dense optimizer into one pure function of the state.

state, batch -> (loss, grads) -> (tables', slots'), (dense', dense_opt') -> state'
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Form,
    Positive,
    Problem,
    check,
    describe,
    kind_of,
    map_tensors,
    member_problems,
    random,
    reduced,
    remade,
    reported,
    shown,
    sure,
    tree_leaves,
    typed,
    typed_fields,
    vmaps_of,
)
from funcrec.grad import params_problems, takes_key
from funcrec.mesh import Codec, Mesh, P, mapped, reported_to_ranks
from funcrec.models import Model, TwoTower, in_batch_softmax_loss, loss, merge_stats
from funcrec.optim import DenseOptimizer, RowOptimizer, adam
from funcrec.optim import dense as optimizer
from funcrec.sharding import Plan, check_whole_rows, dedup_problems, dense_axes_problems
from funcrec.tables import Params
from funcrec.train._rank_private import place_problems as private_problems
from funcrec.train._rank_private import private_of, private_on_ranks
from funcrec.train._rank_step import rank_of, shard_state, state_specs
from funcrec.train._recipe import Recipe, Stages, run_recipe
from funcrec.train._state import TrainState
from funcrec.train._step_problems import (
    grad_problems,
    invariant_problems,
    merge_problems,
    mesh_problems,
    norm_problems,
    place_problems,
    rounded_problems,
    sharded_problems,
)

S = TypeVar("S")
Made = TypeVar("Made", covariant=True)
RATE = 0.001  # the rate of Adam where no optimizer is given, as in torch


class InitState(Protocol[Made]):
    """A function (params, key) -> state."""

    __module__ = "funcrec.train"  # what `help` shows

    def __call__(self, params: Any, key: Tensor | None = None) -> Made: ...


@typed_fields
class TrainStep(NamedTuple, Generic[S]):
    """A step and its first state: `step.init(params)`, then `step(state, batch)`.

    Example:
      >>> import torch, funcrec as fr
      >>> dense = fr.optim.dense(torch.optim.SGD, lr=0.5)
      >>> step = fr.train_step(lambda params, batch: params.dense.square(), sparse=fr.optim.sgd(), dense=dense)
      >>> state, metrics = step(step.init(fr.Params({}, torch.tensor(2.0))), batch=None)
      >>> state.dense, metrics
      (tensor(0.), {'loss': tensor(4.)})
    """

    init: InitState[S]
    update: Callable[[S, Any], tuple[S, dict[str, Any]]]

    def __call__(self, state: S, batch: Any) -> tuple[S, dict[str, Any]]:
        return self.update(state, batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)


@remade
@typed(needs={"capacity": "mesh", "dedup": "mesh", "codec": "mesh"})
def train_step(
    loss_fn: Callable[..., Any] | Model | TwoTower,
    *,
    sparse: RowOptimizer | None = None,
    dense: DenseOptimizer | None = None,
    has_aux: bool = False,
    merge: Callable[[Any, Any], Any] | None = None,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    batch_axes: Sequence[str] | None = None,
    exact: bool = False,
    capacity: Count | None = None,
    codec: Codec | None = None,
    dedup: bool = False,
    dense_axes: Sequence[str] = (),
    micro_batches: Count = 1,
    admit: bool = True,
    grad: Callable[..., Any] | None = None,
    max_norm: Positive | Annotated[Tensor, Form("f[]", "a number")] | None = None,
    invariant: bool = False,
) -> TrainStep[TrainState]:
    """Return a training step, a pure function (state, batch) -> (state, metrics).

    `fr.jit(step, donate=("state",))` compiles it, and runs it in place.

    Args:
      loss_fn: (params, batch) -> f[], or (f[], aux) with `has_aux`. If it has a parameter `key`, it gets
        fold_in(state.key, state.step), from which dropout draws. A model stands for `fr.models.loss(model)`, and two
        towers stand for `fr.models.in_batch_softmax_loss(towers)`. The step then merges the statistics, and returns no
        logits.
      sparse: the optimizer of the tables' touched rows; None for `fr.optim.adam(0.001)`.
      dense: the optimizer of params.dense; None for torch's Adam with the rate 0.001.
      merge: (dense, aux) -> dense. It runs after the optimizer, and keeps values that the loss computes and training
        needs. If `dense` holds running statistics of `nn.batch_norm`, pass `fr.models.merge_stats`.
      mesh, plan: the ranks that train, and the plan by which `init` places the tables on them. A state that `reshard`
        moved to another plan is trained where it lies. The loss covers one rank's bags.
        Gradients and `aux` are means over the ranks, and the key is folded with the number of the rank. Under a
        plan with `replicas` the tables of a group follow the mean over the ranks of that group alone, and differ
        between groups until `sync_replicas`. Dense parameters follow the mean over all ranks at every step, and are
        equal on all ranks. The batches of all ranks need the same shapes and dtypes, and their ids the same keys and
        capacity (`pad_to`). If batches differ, every rank raises before it sends anything, and names the differences.
        (A compiled rank that has a program for its batch does not compare. It waits for a rank whose batch is new, and
        both ranks raise when the mesh's `timeout_s` is over. If ranks run existing programs for different forms, such
        as buckets that each rank chose, gloo ends a process and does not name the forms: let the longest batch of all
        ranks choose the bucket.)
      batch_axes: the axes over which a batch is cut by its bags; None for all axes.
      exact, dedup: see `shard_tables`.
      capacity: the most ids that a rank may send to another rank in a step; None for all its ids. If some ids find no
        room, the step leaves every bit of the state as it was, and its loss is NaN: run the batch again with a larger
        capacity (`retry_overflow`).
      dense_axes: axes over which dense parameters and the state of their optimizer are cut. Each rank keeps an equal
        part of every leaf (`DenseShard`) and gathers the whole for the loss. () keeps the whole on every rank. It needs
        an optimizer that treats each element on its own.
      micro_batches: k. Each rank differentiates its bags in k parts, one after the other, as `accumulate_grads` does:
        memory holds the activations of one part at a time.
      admit: whether the step admits the ids of its batch to the vocabularies of `dynamic_tables`. Without it they stay
        as they are, or `admission` admits the ids before.
      grad: the transform that gives the loss's gradients, called as grad(loss_fn), or grad(loss_fn, has_aux=True); None
        for `value_and_grad`. `functools.partial(fr.private_grads, max_norm=1.0, noise_multiplier=1.1)` trains with
        differential privacy. If the function that it returns has a parameter `key`, it gets the step's key. On a mesh
        it is `private_grads`, with `max_ids`: each rank clips the gradients of its examples, and noise follows a row's
        table and number, whatever the plan. Another transform is for one process.
      max_norm: scales all gradients of a step to a norm of at most this number, a number > 0 or a tensor f[]. The norm
        is over tables and dense parameters together, and over all ranks, as in `clip_by_global_norm`. (For the norm of
        tables alone, or of dense parameters alone, use `fr.optim.clip`.)
      invariant: whether the bits of a step depend on its numbers alone, not on threads or the processor, as those of
        `fr.invariant`. On a mesh, sharded tables are read as with `exact`. Then the ranks, the plan and micro-batches
        change no bit of the state, if three things hold. The numbers n of ranks and k of micro-batches are powers of
        two, and B / (n · k) is more than 128. The loss is a mean over examples, and draws nothing by `key`. Layers over
        the ids of sequences (SASRec, HSTU) add over ids, and not over examples. (metrics["loss"] has the same bits,
        too, if the loss is the mean of a power of two of values.) In other cases a step is right, and repeats its own
        bits, but a run on other ranks differs by rounding. `fr.optim.accumulate` adds the gradients of its steps in
        their order. `dedup`, `codec`, `replicas`, other `batch_axes`, and `grad` on a mesh raise. Dense parameters of
        16 bits raise on ranks and in micro-batches.
      codec: the codes of looked up vectors and their cotangents; None for the codec of the state's tables
        (`shard_tables`, `reshard`).

    Returns:
      TrainStep. `init(params, key=fr.key(0)) -> TrainState` detaches each nn.Parameter, so that steps do not build
      one long autograd graph. (Other tensors that require grad stay tracked.) The step returns (state, metrics) with
      metrics["loss"] and, with `has_aux`, metrics["aux"]. With a `capacity` it also returns metrics["overflow"], the
      number of ids of all ranks that found no room, and metrics["needed"], the capacity that holds all ids (i64[]).

    Law: the state is everything that changes. The same state and batch give the same bits on the same number of
      threads. For the same cotangents of the loss, updates of tables give the same bits on any number of threads. A
      plan changes no bit: n ranks give the bits of one process that adds the gradients of the same n batches (for
      row-wise tables with exact=True; dedup rounds gradients differently). Under torch.func.vmap over states
      (`vmap(step.init)` makes such states) every member takes its own step, in one update for all members. Under vmap
      of vmap there is one update for each member of the outer vmap. Matrix products of members, and of emulated ranks,
      run as one batched product, which may sum in another order: these products agree within rounding.

    Example:
      >>> import torch, funcrec as fr
      >>> item, clicked = fr.TableConfig("item", 10, 1), fr.FeatureConfig("clicked", table="item")
      >>> loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [clicked])["clicked"] * p.dense - 1).square().mean()
      >>> step = fr.train_step(loss_fn, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
      >>> state = step.init(fr.Params(fr.init(fr.key(0), [item]), torch.ones(1)))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[3], [4, 4]]})
      >>> first = step(state, ids)[1]["loss"]
      >>> for _ in range(50):
      ...     state, metrics = step(state, ids)
      >>> bool(metrics["loss"] < first / 10), state.step
      (True, tensor(50))
    """
    sparse, dense = sparse or adam(RATE), dense or optimizer(torch.optim.Adam, lr=RATE)
    if isinstance(loss_fn, Model | TwoTower):
        loss_fn, has_aux, merge = loss_of(loss_fn), True, merge or (None if dense_axes else merge_stats)
    check("funcrec.train_step", mesh_problems(mesh, plan, batch_axes))
    check("funcrec.train_step", dedup_problems(exact, dedup))
    check("funcrec.train_step", dense_axes_problems(mesh, dense_axes, dense))
    check("funcrec.train_step", grad_problems(grad, micro_batches), norm_problems(max_norm, plan))
    check("funcrec.train_step", invariant_problems(mesh, plan, batch_axes, dedup, codec, grad) if invariant else ())
    keyed = takes_key(loss_fn) or (grad is not None and takes_key(grad(loss_fn), own=True))
    recipe = Recipe(loss_fn, sparse, dense, has_aux, merge, keyed, micro_batches, admit, grad, max_norm, invariant)
    cutting = mesh and (mesh.axis_names if batch_axes is None else tuple(batch_axes))
    options = {"dense_axes": tuple(dense_axes), "exact": exact, "codec": codec, "dedup": dedup}
    where = OnMesh(mesh, cutting, Stages(), capacity, plan, options)
    if mesh is not None and plan is not None:
        copies = prod(mesh.shape[a] for a in plan.replicas)
        place = rank_of(sparse, mesh, sure(where.batch_axes), copies, capacity, codec, micro_batches)
        if grad is not None:
            how = private_of(grad(loss_fn, has_aux=True) if has_aux else grad(loss_fn))
            others = {"capacity": capacity, "codec": codec, "dense_axes": dense_axes}
            check("funcrec.train_step", private_problems(how, mesh, plan, batch_axes, others))
            recipe, place = private_on_ranks(sure(how), recipe, place, mesh)
        where = where._replace(place=place)

    def init(params: Params, key: Tensor | None = None) -> TrainState:
        check("funcrec.train_step.init", params_problems(params))
        params = map_tensors(lambda x: x.detach() if isinstance(x, torch.nn.Parameter) else x, params)
        check("funcrec.train_step.init", merge_problems(params.dense, merge))
        check("funcrec.train_step.init", rounded_problems(params.dense, mesh, micro_batches) if invariant else ())
        key = random.key(0) if key is None else key
        random.check_key("funcrec.train_step.init", key)
        if mesh is not None and plan is not None:
            return own_memory(shard_state(params, key, mesh, plan, sparse, dense, **options))
        device = next((t.device for t in params.tables.values()), key.device)
        step = torch.zeros((), dtype=torch.int64, device=device)
        slots, dense_opt = sparse.init(params.tables), dense.init(params.dense)
        return own_memory(TrainState(step, params.tables, slots, params.dense, dense_opt, key.to(device, copy=True)))

    return TrainStep(init, Update(recipe, where))


@typed
def admission(step: TrainStep[Any]) -> Callable[[TrainState, Any], tuple[TrainState, dict[Any, Any]]]:
    """Return the function (state, batch) -> (state, counts) that admits the ids of a batch, as `step` does it.

    It comes before a step of `train_step(..., admit=False)`, for ids that are admitted at another time than the step.
    One compiled and donated step that admits is faster than both apart.

    Args:
      step: the step that `train_step` returned, not yet jitted.

    Law: admission and then the step without `admit` give the states and metrics of the step that admits, bit for bit.

    Example:
      >>> import torch, funcrec as fr
      >>> users, read = fr.vocabulary(128), [fr.FeatureConfig("user", table="user")]
      >>> config = fr.VocabularyConfig(users, [fr.TableConfig("user", 128, 2)], read)
      >>> tables = fr.dynamic_tables(fr.init(fr.key(0), config.tables), {"users": config}, key=fr.key(0))
      >>> step = fr.train_step(lambda p, ids: fr.lookup(p.tables, ids, read).values.sum(), admit=False)
      >>> admit, state = fr.admission(step), step.init(fr.Params(tables, {}))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"user": [[7], [-9]]})
      >>> state, counts = admit(state, ids)
      >>> state, metrics = step(state, ids)
      >>> int(counts["vocabularies"]["users"]["admitted"]), int(state.step), list(metrics)
      (2, 1, ['loss'])
    """
    own = update_of(step)
    check("funcrec.admission", step_problems(step, own))
    own = sure(own)

    def admit(state: TrainState, batch: Any) -> tuple[TrainState, dict[Any, Any]]:
        own.check(state, batch)
        alone = lambda place, state, batch: place.admitted(own.recipe.sparse, state, batch)[:2]
        return own.where.run(alone, state_specs, state, batch)

    return admit


def loss_of(model: Model | TwoTower) -> Callable[..., Any]:
    """Return the model's loss with only its statistics as aux.

    Each rank has its own logits, and a step would average logits in aux.
    """
    whole = loss(model) if isinstance(model, Model) else in_batch_softmax_loss(model)

    def loss_fn(params: Params, batch: Any, *, key: Tensor):
        value, aux = whole(params, batch, key=key)
        return value, {"stats": aux["stats"]}

    return loss_fn


class OnMesh(NamedTuple):
    """The place where a step runs: the mesh, the axes that cut a batch, the stages, and the room of an exchange."""

    mesh: Mesh | None
    batch_axes: tuple[str, ...] | None
    place: Stages
    capacity: int | None = None
    plan: Plan | None = None
    options: Mapping[str, Any] | None = None  # with the plan, the layout of the step's first state (`shard_state`)

    def run(
        self, fn: Callable[..., Any], specs_of: Callable[..., Any], state: Any, batch: Any
    ) -> tuple[Any, dict[Any, Any]]:
        """Return the result of fn(place, state, batch), run on each rank. specs_of: state -> a P for each part."""
        if self.mesh is None:
            return fn(self.place, state, batch)
        specs = specs_of(state)
        specs_in, specs_out = (specs, P(self.batch_axes)), (specs, P())
        one_rank = functools.partial(fn, self.place)
        return mapped(one_rank, self.mesh, specs_in, specs_out, alike={1: "batch"})(state, batch)


@dataclass(eq=False)
class Update:
    """The function (state, batch) -> (state', metrics) of a `train_step`: its recipe, and the place where it runs."""

    recipe: Recipe
    where: OnMesh

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[Any, Any]]:
        self.check(state, batch)
        return self.where.run(functools.partial(run_recipe, self.recipe), state_specs, state, batch)

    def check(self, state: TrainState, batch: Any) -> None:
        mesh = self.where.mesh
        with reported_to_ranks(mesh, (state, batch)):
            check("funcrec.train_step", state_problems(state))
            check("funcrec.train_step", merge_problems(state.dense, self.recipe.merge))
            if self.recipe.is_invariant:
                check("funcrec.train_step", rounded_problems(state.dense, mesh, self.recipe.micro_batches))
            if mesh is not None:
                check("funcrec.train_step", sharded_problems(state))
                check("funcrec.train_step", place_problems(state.tables, mesh))
                if self.recipe.max_norm is not None:
                    joint = self.recipe.sparse._replace(is_joint=True)
                    check_whole_rows("funcrec.train_step", joint, state.tables.layout)


def update_of(step: Any) -> Update | None:
    """Return the Update of a `train_step`, of the step's `update`, or of `jit` of either; None for any other step."""
    fn = getattr(step, "fn", step)
    found = fn.update if isinstance(fn, TrainStep) else fn
    return found if isinstance(found, Update) else None


def own_memory(state: S) -> S:
    """Return the state with memory for each member of a vmap in all leaves, so that a donated step can write.

    Without a vmap it returns the state itself.
    """
    leaves = tree_leaves(state)
    levels = vmaps_of(leaves)
    # True in all members; it is not differentiated
    every = [x.flatten()[:0].sum() == 0 for x in leaves if vmaps_of([x])]
    own = lambda x: x if vmaps_of([x]) == levels else torch.where(functools.reduce(torch.logical_and, every), x, x)
    return map_tensors(own, state) if levels else state


STATE = kind_of(TrainState)


def state_problems(state: Any) -> Iterator[Problem]:
    if not (yield from reported(STATE.find("state", state))):
        yield from member_problems(state.step, "state.step")


def step_problems(step: TrainStep[Any], own: Any) -> Iterator[Problem]:
    if own is None:
        what, need = "`step` is not a step of `train_step`.", "the result of fr.train_step"
        yield Problem(what, describe(step), need, "", TypeError)

"""pipeline: exchanges the ids of the next batches while a step computes.

    time ─▶    compute(i)        compute(i+1)       compute(i+2)
               route(i+1)        route(i+2)         ...                 route: ids to the owners of their rows
               copy(i+2)         copy(i+3)          ...

Routes depend on ids and the plan, and on nothing that a step changes, so early routes are exact. Rows change, so
lookups read them when the batch is computed. `pipeline` finds the cut in the graph of the step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.cached import CachedStep
from funcrec.compile import cut, form_key, is_transformed, surroundings
from funcrec.core import Count, Device, Problem, any_tracked, check, describe, fail, fast_flatten, is_checking, typed
from funcrec.data import prefetch
from funcrec.loop.pipelines._ready_batches import Ahead, Ready, versions_of
from funcrec.loop.pipelines._ready_batches import blank as blank_of
from funcrec.mesh import Mesh, twins_of

CALL = "funcrec.pipeline"


@typed
def pipeline(
    step: Callable[..., Any],
    *,
    depth: Count = 2,
    mesh: Mesh | None = None,
    device: Device | None = None,
    blank: Callable[[Any], Any] | None = None,
) -> "Pipeline":
    """Return a step that fetches the next batches, copies them to the device and routes them while it computes.

    Args:
      step: (state, batch) -> (state, metrics): `train_step(...)`, plain or jitted, donating or not, or a similar
        function that `fr.jit` could stage.
      depth: how many batches are ahead of the computed batch.
      mesh: the mesh of the step. On real ranks ids travel ahead. On an emulated mesh, or without a mesh, batches are
        only fetched.
      device: the device to which batches are copied, from page-locked memory on a separate stream. None does not copy.
      blank: a batch -> a batch of its form that counts for nothing. A rank without data goes on with it while other
        ranks have data. None: for a `Batch` with weights, a batch with weights 0 and bags without ids. Without a blank
        batch, ranks with different numbers of batches raise, all at the same batch.

    Returns:
      A step `pipe`: `pipe(state, batch)` is `step(state, batch)`. `pipe.run(state, batches)` yields (state, metrics)
      for each batch; `for batch in pipe.ahead(batches): state, metrics = pipe(state, batch)` is the same, for loops
      that do more. `fr.fit(pipe, ...)` takes it, and reports which rank is lost. (In a loop of your own use
      `fr.loop.watch`.)

    Raises:
      RuntimeError: on all other ranks, if the loader of a rank raises. That rank raises its own error.
      ValueError: if ranks have batches of different forms, or different numbers of batches.
      TypeError: if a ready batch is used under vmap or grad, or with a state that requires grad.

    However the loop ends (the last batch, `break`, an exception, an interrupt), no thread is left. (On ranks a loop
    that ends early waits 1 s for its thread. A thread that must still exchange with other ranks ends with their
    threads.)

    Law: states and metrics are those of the plain loop, bit for bit, if batches stay unchanged after the loader gave
      them. A loader that writes each batch into the same memory overwrites batches that are ahead: let it give clones.

    Another thread makes the batches, on each rank at its own time. So a loader must not exchange over the groups of
    the step (the groups of the mesh, and the default group), but only over a group of its own (`dist.new_group`).

    Cost: memory for `depth` + 1 batches (with `device` two more under way), and for the exchanged values of each batch.
      For a lookup these are the received rows: about as many integers as a rank's ids have room for, times the number
      of ranks (`pipe.routed_bytes` says how many bytes). The pipeline starts one thread, and one process group for each
      axis. The first batch of a new form is not routed ahead. If the form of the state changes (another plan), the step
      runs a batch that is under way without its routes.

    There is no deadlock: all exchanges of the thread go over groups of its own, from one thread, batch by batch. First
    come a few numbers (whether the rank has a batch, or why not), then the ids. The number of batches that the loop has
    taken decides which batches these are. The steps of the loop decide whether the ids are exchanged. If the loops of
    all ranks do the same, their exchanges match, at whatever time. If a loop ends early, its thread finishes the
    exchanges that other threads begin. (A rank that alone ends early waits at most 1 s. As in a plain loop the other
    ranks wait for it until it ends, or for `timeout_s`. Before the rank begins again on that pipeline it waits for its
    thread.) On CUDA the loop itself launches the next batch's exchange, on a separate stream, before it computes, so
    that all ranks have one order.

    Example:
      >>> import torch, funcrec as fr
      >>> add = lambda total, batch: (total + batch, {"total": total + batch})
      >>> pipe = fr.pipeline(add, depth=2)
      >>> [metrics["total"].item() for _, metrics in pipe.run(torch.tensor(0), map(torch.tensor, range(4)))]
      [0, 1, 3, 6]

    Source: TorchRec's TrainPipelineSparseDist, which finds the lookups by tracing the model.
    """
    check(CALL, step_problems(step))
    return Pipeline(step, depth, mesh, device, blank or blank_of)


class Pipeline:
    """The result of `pipeline`. A stale pipeline also makes its batches ready with a Pipeline."""

    step: Callable[..., Any]
    depth: int
    mesh: Mesh | None
    device: Device | None
    blank: Callable[..., Any]
    fn: Callable[..., Any]
    twins: Any
    stream: Any
    under_way: Any
    routed_bytes: int

    def __init__(
        self,
        step: Callable[..., Any],
        depth: int,
        mesh: Mesh | None,
        device: Device | None,
        blank: Callable[..., Any],
        call: str = CALL,
    ):
        self.step, self.depth, self.mesh, self.device, self.blank = step, depth, mesh, device, blank
        self.call = call  # the name in messages
        self.fn = getattr(step, "fn", step)
        self.programs: dict[
            Any, dict[Any, Any]
        ] = {}  # {form of the state, surroundings: {form of a batch: Halves or None}}
        self.twins, self.stream, self.under_way, self.routed_bytes = None, None, None, 0

    @property
    def init(self) -> Callable:
        """Return the step's `init`."""
        return self.step.init

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, Ready):
            return self.step(state, batch)
        one, source = batch, batch.source
        leaves, structure = fast_flatten(state)
        refuse_followed(self.call, leaves)
        if self.twins is None or is_checking():
            return self.step(state, one.batch)
        present = getattr(self.step, "present", None)  # retry_overflow names the step that it would run now
        step = self.step if present is None else present()
        key = id(step), form_key(leaves, structure), surroundings()
        programs = self.programs.setdefault(key, {})
        if not source.begin(one, programs):
            return self.step(state, one.batch)
        if one.form not in programs:
            source.add(programs, one.form, cut(CALL, step, state, one.batch, self.twins.names))
        source.wait(one) if self.stream is None else source.launch(one, programs)
        halves, routed, one.routed = one.halves, one.routed, None
        if halves is None:
            return self.step(state, one.batch)
        self.routed_bytes = halves.routed_bytes
        if versions_of(halves) != one.versions:
            got = "a write to " + ", ".join(map(describe, halves.read))
            need = "tensors that stay as they are while batches are under way"
            fail(CALL, "the values that give the step's ids changed after the exchange.", got=got, need=need)
        if present is None:
            return halves.rest(state, one.batch, routed)
        return self.step(state, one.batch, lambda state, batch: halves.rest(state, batch, routed))

    def ahead(self, batches: Iterable[Any]) -> Iterator[Ready]:
        """Return an iterator over ready batches, which a thread makes ready.

        The thread ends when the iterator ends, or when the loop closes or drops the iterator. Only one iterator is open
        at a time: a new iterator closes the earlier iterator.
        """
        check(CALL, batches_problems(batches))
        return self.start(batches, self.blank)

    def start(self, batches: Iterable[Any], blank: Callable[..., Any]) -> Iterator[Ready]:
        if self.under_way is not None:
            self.under_way.close(wait_s=None)
        if self.twins is None and self.mesh is not None and self.mesh.device_mesh is not None:
            self.twins = twins_of(self.mesh)
            self.stream = None if self.mesh.device_mesh.device_type == "cpu" else torch.cuda.Stream()
        if self.device is not None:
            is_cuda = torch.device(self.device).type == "cuda"
            batches = prefetch(batches, depth=1, pin_memory=is_cuda, device=self.device)
        self.under_way = Ahead(self.call, batches, self.depth, self.twins, blank, self.stream)
        return iter(self.under_way)

    def run(self, state: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (state, metrics) after each batch."""
        check(CALL, batches_problems(batches))
        return self.steps(state, batches)

    def steps(self, state: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for batch in self.ahead(batches):
            state, metrics = self(state, batch)
            del batch
            yield state, metrics

    def __repr__(self) -> str:
        return f"<funcrec.pipeline of {self.step!r}, depth={self.depth}>"


def ahead_of(step: Any, items: Iterable, state: Any) -> Iterable:
    """Return the items (position, batch). Their batches are ready batches if the step is a pipeline or has caches."""
    if not isinstance(step, Pipeline | CachedStep):
        return items
    taken: deque = deque()
    is_pair = lambda item: isinstance(item, tuple) and len(item) == 2
    batches = (taken.append(item) or (item[1] if is_pair(item) else item) for item in items)
    both = lambda item, one: (item[0], one) if is_pair(item) else item
    ready = step.ahead(state, batches) if isinstance(step, CachedStep) else step.start(batches, lambda batch: None)
    return (both(taken.popleft(), one) for one in ready)


def refuse_followed(call: str, leaves: list) -> None:
    if any_tracked(leaves) or (is_transformed() and not is_checking()):
        need, hint = "a plain loop over batches", "`.detach()`, or the step itself: step(state, batch)"
        got = "requires_grad of the state, or a transform around the step"
        what = "a batch that is ready is taken where something follows."
        fail(call, what, got=got, need=need, hint=hint, kind=TypeError)


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(step: object) -> Iterator[Problem]:
    if isinstance(step, Pipeline) or isinstance(getattr(step, "pipe", None), Pipeline):
        yield Problem("`step` is a pipeline.", describe(step), "a step", "fr.pipeline(step), once", TypeError)


def batches_problems(batches: object) -> Iterator[Problem]:
    if not isinstance(batches, Iterable) or (isinstance(batches, Tensor) and not batches.dim()):
        yield Problem("`batches` cannot be iterated.", describe(batches), "an iterable of batches", kind=TypeError)

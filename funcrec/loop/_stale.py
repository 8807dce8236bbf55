"""stale_pipeline: the rows of the next batch are read before this batch's update, and travel while it is computed.

    time ─▶    read(i+1)  compute(i), update(i)      read(i+2)  compute(i+1), update(i+1)
                    └─── rows(i+1) under way ───────────▶ └─── rows(i+2) under way ──────▶
               route(i+2)                            route(i+3)            route: ids to the owners of their rows

Batch i + 1 reads the tables of state i. The gradients of that batch update state i + 1.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from funcrec.compile import RowsAhead, cut_stale, form_key, surroundings
from funcrec.core import Count, Device, Problem, check, describe, fail, fast_flatten, is_checking, typed
from funcrec.loop.pipelines._pipeline import Pipeline, batches_problems, refuse_followed
from funcrec.loop.pipelines._ready_batches import Ahead, Ready, versions_of
from funcrec.loop.pipelines._ready_batches import blank as blank_of
from funcrec.mesh import Mesh
from funcrec.train import stale_of

CALL = "funcrec.stale_pipeline"


@typed
def stale_pipeline(
    step: Callable[..., Any],
    *,
    depth: Count = 2,
    mesh: Mesh | None = None,
    device: Device | None = None,
    blank: Callable[[Any], Any] | None = None,
) -> "StalePipeline":
    """Return a pipeline that reads the rows of each batch one update early.

        acts_i = lookup(tables_{i-1}, batch_i);     state_{i+1} = update(state_i, gradient of the loss at acts_i)

    So the rows travel while the step computes the earlier batch. Only the rows that lookups read are stale, by one
    update. The first batch of a run reads current rows. All other values are
    current: dense parameters, and the tables and slots to which an update writes.

    Args:
      step: `train_step(...)`, plain or jitted, donating or not.
      depth: how many batches are ahead of the computed batch, as in `pipeline`. With any depth rows are one update old.
      mesh: the mesh of the step. On an emulated mesh, or without a mesh, nothing travels, and the values are the same.
      device, blank: see `pipeline`.

    Returns:
      A pipeline `stale`: `stale.run(state, batches)` yields (state, metrics) for each batch. It keeps programs for the
      next run. `fr.fit` does not take it, because it calls a step batch by batch. Use `fr.loop.watch` to learn which
      rank was lost.

    Raises:
      TypeError: if `train_step` did not make the step (`logged`, `scan` and `retry_overflow` must read and write
        current tables).
      ValueError: if the ids of a lookup depend on the state (a loss that draws ids by its key, `micro_batches`), or on
        a mesh of CUDA devices, where it was never run. Also the errors of `pipeline`.

    Law: states and metrics are those of this plain loop: compute the loss and its gradients at Params(tables of the
      earlier state, dense of this state), and update this state with the gradients. Both agree bit for bit if that loop
      is compiled as the step is.
      A run holds its own state: between two steps only the loop may change it. The states that a run yields are whole.
      A donating step uses up a state with the next batch.

    Cost: the cost of `pipeline`, and memory for the rows of a batch's lookups, both here and under way
      (`stale.held_bytes` counts both). No table is copied. Only the last exchange of a lookup is hidden, which is the
      whole exchange if tables lie on one axis. If rows do not arrive late, the pipeline gains nothing.

    Example: from the second batch on, a lookup reads the rows from before the last update.
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("clicked", table="item")]).values.sum()
      >>> kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
      >>> step = fr.train_step(loss_fn, **kind)
      >>> state = step.init(fr.Params({"item": torch.zeros(1, 1)}, {}))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0]]})
      >>> [metrics["loss"].item() for _, metrics in fr.stale_pipeline(step).run(state, [ids] * 4)]
      [0.0, 0.0, -1.0, -2.0]

    Source: TorchRec's TrainPipelineSemiSync.
    """
    check(CALL, step_problems(step), mesh_problems(mesh))
    return StalePipeline(step, Pipeline(step, depth, mesh, device, blank or blank_of, CALL))


class StalePipeline:
    """The result of `stale_pipeline`. pipe: the pipeline that makes the batches ready."""

    step: Callable[..., Any]
    pipe: Pipeline
    stale: Any
    held_bytes: int

    def __init__(self, step: Callable[..., Any], pipe: Pipeline):
        self.step, self.pipe, self.stale = step, pipe, stale_of(step)
        self.programs: dict[Any, dict[Any, Any]] = {}  # {form of the state, surroundings: {form of a batch: Thirds}}
        self.held_bytes = 0

    @property
    def init(self) -> Callable:
        """Return the step's `init`."""
        return self.step.init

    def run(self, state: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (state, metrics) after each batch.

        Ranks exchange the ids of the next batches ahead, and read their rows ahead.
        """
        check(CALL, batches_problems(batches))
        return self.steps(state, batches)

    def steps(self, state: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        looked, key = None, None
        for one in self.pipe.start(batches, self.pipe.blank):
            if key is None:
                self.stale.check(state, one.batch)
            before, key = key, key_of(state)
            if before not in (None, key):
                got, need = "a state of another form, or other surroundings, than a batch before", "one run, one form"
                fail(CALL, "rows were read for another program.", got=got, need=need, hint="a run of its own")
            source, programs = self.pipe.under_way, self.programs.setdefault(key, {})
            source.begin(one, programs)
            looked = self.read_ahead(source, programs, state, one) if looked is None else looked
            following = source.following()
            # The rows are read before the update of this batch, which may write to the tables.
            after = None if following is None else self.read_ahead(source, programs, state, following)
            thirds, routed, one.routed = one.halves, one.routed, None
            state, metrics = thirds.rest(state, one.batch, routed, looked)
            looked, routed = after, None
            del one, following, after
            yield state, metrics

    def read_ahead(self, source: Ahead, programs: dict[Any, Any], state: Any, one: Ready) -> RowsAhead:
        """Return the started read of the batch's rows from the tables of this state."""
        is_sent, form = source.twins is not None, form_key(*fast_flatten(one.batch))
        if form not in programs:
            names = {} if source.twins is None else source.twins.names
            thirds = cut_stale(CALL, self.step, self.stale.update, state, state.tables, one.batch, names)
            source.add(programs, form, thirds)
        if is_sent:
            source.wait(one)
        else:
            one.halves, one.routed, one.versions = programs[form], [], versions_of(programs[form])
        if versions_of(one.halves) != one.versions:
            got = "a write to " + ", ".join(map(describe, one.halves.read))
            need = "tensors that stay as they are while batches are under way"
            fail(CALL, "the values that give the step's ids changed after the exchange.", got=got, need=need)
        self.held_bytes = one.halves.bytes
        return one.halves.read_ahead(state.tables, one.batch, one.routed)

    def __call__(self, state: Any, batch: Any) -> None:
        got, need = "a state and a batch alone", "a run, which knows the batch before"
        hint = "for state, metrics in stale.run(state, batches): ..., a loop of your own in the place of fr.fit"
        fail(CALL, "a single batch has no stale rows.", got=got, need=need, hint=hint, kind=TypeError)

    def __repr__(self) -> str:
        return f"<funcrec.stale_pipeline of {self.step!r}, depth={self.pipe.depth}>"


def key_of(state: Any) -> tuple:
    """Return what programs depend on besides the batch: the form of the state, and the surroundings."""
    leaves, structure = fast_flatten(state)
    refuse_followed(CALL, leaves)
    if is_checking():
        got, hint = "`funcrec.checked` around a run", "fr.checked(step)(state, batch), in a plain loop"
        fail(CALL, "a program is not looked at value by value.", got=got, need="a run without", hint=hint)
    return form_key(leaves, structure), surroundings()


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(step: object) -> Iterator[Problem]:
    if isinstance(step, Pipeline) or stale_of(step) is None:
        what, need = "`step` does not come from `train_step`.", "train_step(...), or jit of it"
        hint = "fr.pipeline(step), which is not stale, for logged, scanned and retried steps"
        yield Problem(what, describe(step), need, hint, TypeError)


def mesh_problems(mesh: Mesh | None) -> Iterator[Problem]:
    if mesh is not None and mesh.device_mesh is not None and mesh.device_mesh.device_type != "cpu":
        got, hint = mesh.device_mesh.device_type, "fr.pipeline(step, mesh=mesh)"
        yield Problem("`mesh` has devices other than CPUs.", got, "a mesh of processes on CPUs", hint)

"""Steps with a small capacity that lose no id: a batch that does not fit runs again with a larger capacity.

step_C(state, batch) = (state, overflow > 0)   ->   step_C'(state, batch),   C' = bucket(needed)
"""

from collections.abc import Callable
from typing import Any, Literal

from funcrec.core import Count, typed
from funcrec.jagged import bucket

UNBOUNDED = 1 << 62  # a step makes no more room than there are ids
MEASURED = 4  # the number of steps that measure a capacity


@typed
def retry_overflow(
    make_step: Callable[[int], Callable], *, capacity: Count | Literal["measure"] = "measure", steps: Count = MEASURED
) -> Callable[[Any, Any], tuple[Any, dict]]:
    """Return a step that trains on every whole batch, with buffers as small as possible.

    Args:
      make_step: (capacity) -> a step, such as `lambda c: fr.jit(fr.train_step(..., capacity=c), donate=("state",))`. It
        is called once for each capacity. Capacities are buckets (16, 24, 32, 48, ...), so they are few.
      capacity: the first capacity. "measure" gives the first `steps` steps room for all ids, and later steps the room
        that the first steps needed.

    If a batch does not fit, the state stays as it was, and the batch runs again with the capacity that it needs. Later
    batches keep this capacity.

    Law: the states have the bits of steps with capacity=None.

    Cost: each run of a step reads metrics["overflow"] on the host, so a step waits for the step before it. A batch that
      does not fit is computed twice.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh, plan = fr.Mesh.emulated(model=2), fr.Plan({"item": fr.table_wise("model", rank=1)})
      >>> loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("clicked", table="item")]).values.sum()
      >>> kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1), "mesh": mesh,
      ...     "plan": plan}
      >>> make_step = lambda capacity: fr.train_step(loss_fn, **kind, capacity=capacity)
      >>> state = make_step(1).init(fr.Params({"item": torch.zeros(3, 1)}, {}))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 1, 1], [2]]})
      >>> make_step(1)(state, ids)[1]["overflow"]
      tensor(2)
      >>> state, metrics = fr.retry_overflow(make_step, capacity=1)(state, ids)
      >>> metrics["overflow"], fr.gather_tables(state.tables, mesh)["item"].flatten()
      (tensor(0), tensor([-0.5000, -1.0000, -0.5000]))
    """
    made: dict[int, Callable[..., Any]] = {}
    size, most, measured = capacity, 1, 0

    def present() -> Callable:
        now = UNBOUNDED if isinstance(size, str) else size
        if now not in made:
            made[now] = make_step(now)
        return made[now]

    def run(state: Any, batch: Any, first: Callable[..., Any] | None = None) -> tuple[Any, dict[Any, Any]]:
        """Return (state, metrics) after the batch. first: the step for which a pipeline has routed this batch."""
        nonlocal size, most, measured
        while True:
            step, first = first or present(), None
            state, metrics = step(state, batch)
            is_whole = int(metrics["overflow"]) == 0
            if size == "measure":
                most, measured = max(most, int(metrics["needed"])), measured + 1
                size = bucket(most) if measured == steps else size
            elif not is_whole:
                size = bucket(int(metrics["needed"]))
            if is_whole:
                return state, metrics

    run.present = present
    return run

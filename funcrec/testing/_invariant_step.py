"""A check that ranks, placements, micro-batches, threads, members of vmap and compiling change no bit of a training.

step_of(mesh=mesh, plan=plan), step_of(micro_batches=k)  take  step_of()  to the same state
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from funcrec.compile import jit
from funcrec.core import Count, Problem, check, describe, own_errors, random, tree_map, typed
from funcrec.mesh import Mesh
from funcrec.sharding import Plan
from funcrec.tables import Params
from funcrec.testing._invariant import examples_of
from funcrec.testing._trees import assert_same_bits
from funcrec.train import TrainStep, gather_state

CALL = "funcrec.testing.check_invariant_step"
BLOCK = 256  # the most terms of one block of a sum
OF_PARTS = (
    "Parts keep the bits of one mean over the examples: a sum of means is rounded in each part.\n"
    "So is the gradient of a weight that several products read, such as tied layers.\n"
    "A norm of all gradients (`max_norm`) takes one difference to every leaf: leave it out to see where it begins."
)
Kind = Literal[
    "table_wise", "row_wise", "column_wise", "replicated", "table_row_wise", "table_column_wise", "grid"
]  # fmt: skip
ONE_AXIS: tuple[Kind, ...] = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES: tuple[Kind, ...] = ("table_row_wise", "table_column_wise", "grid")


@typed
def check_invariant_step(
    step_of: Callable[..., Any],
    params: Params,
    batch: Any,
    *,
    ranks: Sequence[Count] = (2, 4),
    kinds: Sequence[Kind] = (*ONE_AXIS, *TWO_AXES),
    micro_batches: Sequence[Count] = (2, 4),
    threads: Sequence[Count] = (1, 2, 3, 4),
    num_steps: Count = 2,
    compiled: bool = True,
) -> None:
    """Assert that a training step ends with the same bits, however it is cut, placed, mapped, threaded and compiled.

    Args:
      step_of: () -> TrainStep. It passes its keywords `micro_batches`, `mesh` and `plan` on to `train_step`.
      params: the parameters of one process, with which each run begins.
      batch: a `Batch`, a KeyedJaggedTensor, or a tree of tensors [B, ...].
      ranks: numbers of emulated ranks. kinds: kinds of placement of all tables; two axes need 4 ranks or more.
      micro_batches: numbers of parts of the batch. threads: numbers of threads.
      num_steps: the steps of a run. compiled: whether a program of `fr.jit` runs, too, which takes a minute.

    Raises:
      AssertionError: the bits of the last state or of any step's metrics differ. The message has the cell and the first
        difference: `[0]` is the state, `[1][k]` are the metrics of step k.
      TypeError: `step_of` does not return a TrainStep.
      ValueError: the parts are no power of two of equal parts of more than 128 examples, where no step keeps its bits.

    Law: parts compare the state, and for a batch of a power of two of examples the metrics, too. The mean of another
      number of losses, such as three for each example, is rounded in each part; their gradients are not.

    Example:
      >>> import functools, torch, funcrec as fr
      >>> from funcrec.testing import check_invariant_step
      >>> loss_fn = lambda params, x: ((x @ params.dense) ** 2).mean()
      >>> step_of = functools.partial(fr.train_step, loss_fn, sparse=fr.optim.sgd(lr=0.1), invariant=True)
      >>> params, x = fr.Params({"t": torch.ones(4, 2)}, torch.ones(3)), torch.linspace(-1, 1, 1536).view(512, 3)
      >>> few = {"ranks": [2], "kinds": ["row_wise"], "micro_batches": [2], "compiled": False}
      >>> check_invariant_step(step_of, params, x, **few)
    """
    count = examples_of(batch, CALL)
    check(CALL, part_problems(count, "ranks", ranks))
    check(CALL, part_problems(count, "micro_batches", micro_batches))
    compared = lambda out: out if is_power_of_two(count) else out[0]  # a mean of another number rounds in each part

    def trained(run: Callable, state: Any) -> tuple[Any, list]:
        metrics = []
        for _ in range(num_steps):
            state, of_step = run(state, batch)
            metrics.append(of_step)
        return state, metrics

    with own_errors(CALL, step_of, need="the keywords of fr.train_step"):
        step = step_of()
    check(CALL, step_problems(step))
    first, before = step.init(params, random.key(0)), torch.get_num_threads()
    want = trained(step, first)
    try:
        for n in threads:
            torch.set_num_threads(n)
            same(trained(step, first), want, f"a step on {n} threads")
    finally:
        torch.set_num_threads(before)
    both = tree_map(lambda x: torch.stack([torch.zeros_like(x), x]), first)
    member = trained(torch.func.vmap(step, in_dims=(0, None)), both)
    same(tree_map(lambda x: x[1], member), want, "a member of vmap")
    for k in micro_batches:
        same(
            compared(trained(step_of(micro_batches=k), first)), compared(want), f"a step of {k} micro-batches", OF_PARTS
        )
    shapes = {name: tuple(table.shape) for name, table in params.tables.items()}
    for mesh, kind in cells(ranks, kinds):
        on_ranks = step_of(mesh=mesh, plan=Plan.uniform(kind, shapes, mesh))
        state, metrics = trained(on_ranks, on_ranks.init(params, random.key(0)))
        got = compared((gather_state(state, mesh), metrics))
        same(got, compared(want), f"a step on {mesh.size} ranks, {kind},", OF_PARTS)
    if compiled:
        same(trained(jit(step), first), want, "a compiled step")


def cells(ranks: Sequence[int], kinds: Sequence[Kind]) -> Iterator[tuple[Mesh, Kind]]:
    for n in ranks:
        for kind in kinds:
            if kind in ONE_AXIS:
                yield Mesh.emulated(x=n), kind
            elif n >= 4:
                yield Mesh.emulated(x=n // 2, y=2), kind


def same(got: Any, want: Any, what: str, hint: str = "") -> None:
    assert_same_bits(got, want, f"{CALL}: {what} has other bits than one process.", hint)


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(step: Any) -> Iterator[Problem]:
    if not isinstance(step, TrainStep):
        need, hint = "a TrainStep", "functools.partial(fr.train_step, loss_fn, invariant=True)"
        yield Problem("`step_of` made no training step.", describe(step), need, hint, TypeError)


def part_problems(count: int, name: str, numbers: Sequence[int]) -> Iterator[Problem]:
    """Report numbers of parts whose sums are no nodes of the batch's tree."""
    for n in numbers:
        if count % n or 2 * count <= n * BLOCK or not is_power_of_two(n):
            got, need = f"{count} examples in {n} parts", f"2, 4, 8, ... equal parts of more than {BLOCK // 2} examples"
            hint = f"a batch of {BLOCK * max(numbers)} examples" if is_power_of_two(n) else f"{name}=(2, 4)"
            yield Problem(f"`{name}` cut the batch inside of a block of a sum.", got, need, hint)


def is_power_of_two(n: int) -> bool:
    return not n & (n - 1)

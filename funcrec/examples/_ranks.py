"""The main job on ranks: the mesh and the plan for its options, and what a rank does differently from one process.

    torchrun ... --plan row_wise: this process is one rank;   --emulate data=2,model=2: this process is all ranks;
    without both: there are no ranks

All ranks run the same program on the same data. The decisions when to stop and which epoch was best follow from values
that are equal on all ranks. So ranks wait for each other only in an exchange.
"""

import argparse
import os
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

import funcrec as fr

OF_TWO_AXES = ("table_row_wise", "table_column_wise", "grid")
PLANS = ("table_wise", "row_wise", "column_wise", *OF_TWO_AXES, "replicated")


def add_options(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group("ranks", "one process for each under torchrun, or all of them in one")
    ranks.add_argument(
        "--plan", choices=(*PLANS, "auto"), help="where all tables lie (default row_wise on ranks); auto: by fr.plan"
    )
    ranks.add_argument("--mesh", type=parse_axes, help="the axes of torchrun's ranks (default data=RANKS)")
    ranks.add_argument("--emulate", type=parse_axes, help="ranks in this process: data=2,model=2")
    ranks.add_argument("--replicas", help="axes, by commas, along which copies of all tables train apart")
    ranks.add_argument("--sync-every", type=int, help="steps after which the copies become one (default 16)")


def parse_axes(text: str) -> dict[str, int]:
    """Return {"data": 2, "model": 2} for the text data=2,model=2."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and n.isdigit() and int(n) > 0 for name, _, n in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form data=2,model=2")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    return {name: int(n) for name, _, n in pairs}


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set options.axes (None for a single process), options.plan and options.replicas.

    End the program if these options do not fit together."""
    is_launched = torch.distributed.is_torchelastic_launched()
    num_ranks = int(os.environ.get("WORLD_SIZE", 1)) if is_launched else 1
    if options.emulate and (is_launched or options.mesh):
        parser.error("--emulate is for one process, without torchrun and --mesh")
    if not is_launched and options.mesh:
        parser.error("--mesh: there are no ranks; torchrun --nproc-per-node 2 -m funcrec.examples.ctr, or --emulate")
    if not is_launched and options.plan and not options.emulate:
        parser.error("--plan: there are no ranks; torchrun --nproc-per-node 2 -m funcrec.examples.ctr, or --emulate")
    options.axes = options.emulate or options.mesh or ({"data": num_ranks} if is_launched else None)
    settle_replicas(parser, options)
    if options.axes is None:
        return
    options.plan = options.plan or "row_wise"
    if is_launched and prod(options.axes.values()) != num_ranks:
        parser.error(f"--mesh {options.axes}: its sizes multiply to {prod(options.axes.values())}, not to {num_ranks}")
    own = [a for a in options.axes if a not in options.replicas]
    if not own and options.plan not in ("replicated", "auto"):
        option = f"--mesh replica={num_ranks},model=1" if is_launched else "--emulate replica=2,model=1"
        parser.error(f"--plan {options.plan} has no axis besides --replicas: {option}")
    if options.plan in OF_TWO_AXES and len(own) != 2:
        option = "--mesh data=1,model=N" if is_launched else "--emulate data=2,model=2"
        parser.error(f"--plan {options.plan} mixes two axes: {option}")
    if options.batch_size % prod(options.axes.values()):
        parser.error(f"--batch-size {options.batch_size} cannot be shared by {prod(options.axes.values())} ranks")


def settle_replicas(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set options.replicas, which is () for none, and options.sync_every, which is None without replicas."""
    options.replicas = tuple(options.replicas.split(",")) if options.replicas else ()
    if options.sync_every is not None and not options.replicas:
        parser.error("--sync-every requires copies that train apart: --replicas AXIS")
    unknown = [a for a in options.replicas if a not in (options.axes or {})]
    if unknown or len(set(options.replicas)) < len(options.replicas):
        parser.error(f"--replicas {','.join(options.replicas)}: need distinct axes among {list(options.axes or {})}")
    if options.replicas:
        options.sync_every = 16 if options.sync_every is None else options.sync_every
        if options.sync_every < 1:
            parser.error("--sync-every must be at least 1")


def mesh_of(options: argparse.Namespace) -> fr.Mesh | None:
    """Return the mesh of settled options. It is None for a single process."""
    if options.axes is None:
        return None
    if options.emulate:
        return fr.Mesh.emulated(**options.axes)
    return fr.Mesh.distributed(device=options.device.partition(":")[0], **options.axes)


def plan_of(
    options: argparse.Namespace, model: fr.models.Model, mesh: fr.Mesh, sparse: fr.optim.RowOptimizer
) -> fr.Plan:
    """Return the plan that --plan names. If fr.plan makes the plan, print its table."""
    if options.plan != "auto":
        return fr.Plan.uniform(options.plan, model.tables, mesh, replicas=options.replicas)
    hardware = "cpu" if options.device == "cpu" else "h100"
    how = {"hardware": hardware, "optimizer": sparse, "replicas": options.replicas}
    made = fr.plan(model.tables, model.features, mesh, batch_size=options.batch_size, **how)
    if fr.loop.is_chief(mesh):
        print(made.table(), flush=True)
    return made


def sync_of(mesh: fr.Mesh | None, replicas: tuple[str, ...]) -> Callable[[fr.TrainState], fr.TrainState] | None:
    """Return a compiled function that makes the copies of tables equal, in the state's memory; None without copies."""
    if mesh is None or not replicas:
        return None
    return fr.jit(lambda state: fr.sync_replicas(state, mesh=mesh), donate=("state",))


def with_sync(step: Callable, sync: Callable | None, every: int, num_steps: int) -> Callable:
    """Return `step`, with `sync` after every `every`-th of the num_steps steps of an epoch."""
    if sync is None:
        return step

    def synced(state: fr.TrainState, batch: fr.Batch) -> tuple[fr.TrainState, dict]:
        state, metrics = step(state, batch)
        done = int(state.step) % num_steps
        return (sync(state) if done and done % every == 0 else state), metrics

    return synced


class OwnRows(NamedTuple):
    """Data whose batches are the part of this process. No rank makes the bags of other ranks."""

    data: fr.data.CtrData
    mesh: fr.Mesh | None

    @property
    def num_rows(self) -> int:
        return self.data.num_rows

    def take(self, rows: Tensor) -> fr.Batch:
        return self.data.take(fr.loop.own_part(rows, self.mesh))

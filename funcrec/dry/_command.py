"""python -m funcrec dryrun spec.json --ranks 1024: what a rank of a step sends, holds and takes; no rank is started.

The file is that of `python -m funcrec plan`, with an `optimizer`, and with "dense" for a DLRM over the features:

{"mesh": {"data": 128, "model": 8}, "batch_size": 65536, "hardware": "h100", "optimizer": "rowwise_adagrad",
 "tables": [{"name": "item", "num_embeddings": 1000000, "embedding_dim": 64}],
 "features": [{"name": "clicked", "table": "item"}],
 "constraints": {"item": {"pooling_factor": 20.0}},
 "dense": {"num_dense": 13, "bottom": [512, 64], "sizes": [512, 256]}}
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from funcrec.compile import eval_shape
from funcrec.core import Problem, check, describe, random
from funcrec.dry._dry_run import DryRun, dry_run
from funcrec.jagged import KeyedJaggedTensor
from funcrec.mesh import Backend, Mesh
from funcrec.models import Model, dlrm
from funcrec.planner import TableConstraint, arguments_of, plan, read, solver_on_stderr
from funcrec.sharding import Plan
from funcrec.tables import Batch, FeatureConfig, Params, lookup, lookup_sequence
from funcrec.train import TrainStep, train_step

CALL = "python -m funcrec dryrun"
WRONG = (OSError, ImportError, KeyError, TypeError, ValueError)
OF_STEP = ("exact", "dedup", "codec")  # the arguments of the planner that are those of the step


def main(words: list[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, or 2 for errors in the file or the options, or without a plan."""
    raw = argparse.RawDescriptionHelpFormatter
    own = argparse.ArgumentParser(prog=CALL, description=__doc__, formatter_class=raw)
    own.add_argument("spec", type=Path, help="a JSON file, or YAML where PyYAML is installed")
    own.add_argument("--ranks", type=int, help="so many ranks: the first axis of the mesh is made longer or shorter")
    own.add_argument("--plan", type=Path, help="the plan as JSON, of `plan --out`; without it, the planner makes one")
    own.add_argument("--backend", choices=get_args(Backend), help="who carries the bytes; by default the hardware's")
    options = own.parse_args(words)
    try:
        spec = read(CALL, options.spec)
        check(CALL, mapping_problems(spec), ranks_problems(spec, options.ranks))
        if options.ranks is not None:
            spec = {**spec, "mesh": resized(spec["mesh"], options.ranks)}
        made = None if options.plan is None else Plan.from_json(options.plan.read_text())
        begun = time.perf_counter()
        with solver_on_stderr():
            given, made = planned(spec, made)
        between = time.perf_counter()
        found = run_on_paper(given, spec.get("dense"), made, options.backend)
    except WRONG as error:
        print(error, file=sys.stderr)
        return 2
    took = between - begun, time.perf_counter() - between
    print(found.table())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"\nthis dry run: {took[0]:.1f} s for the plan, {took[1]:.1f} s for the program, {most:,.0f} MB of memory")
    return 0


def resized(mesh: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Return the mesh with so many ranks: all axes but the first keep their sizes."""
    first, *others = mesh
    return {first: num_ranks // prod(mesh[a] for a in others), **{a: mesh[a] for a in others}}


def planned(spec: Mapping[str, Any], made: Plan | None) -> tuple[dict[str, Any], Plan]:
    """Return (the arguments of the planner for a specification, the plan: the planner's, or `made` as it rates it)."""
    given = arguments_of(CALL, spec)
    check(CALL, step_problems(given))
    made = plan(**given) if made is None else plan(**{**given, "placements": made})
    check(CALL, plan_problems(made))
    return given, made


def run_on_paper(given: Mapping[str, Any], dense: Mapping[str, Any] | None, made: Plan, backend: Any) -> DryRun:
    """Return the dry run of a step for the arguments of the planner. dense: the keywords of `dlrm`; None for none."""
    features, bags = given["features"], given["batch_size"] // prod(given["mesh"].values())
    sizes = {f.key: ceil(bags * pooling_of(f, given.get("constraints") or {})) for f in features}
    model = None if dense is None else dlrm(given["tables"], features, **tuples(dense))
    capacity = capacity_of(sum(sizes.values()), given)
    how = {k: given[k] for k in OF_STEP if given.get(k)}

    def make(mesh: Mesh) -> TrainStep[Any]:
        of = loss_of(features) if model is None else model
        return train_step(of, sparse=given["optimizer"], mesh=mesh, plan=made, capacity=capacity, **how)

    number = 0 if dense is None else dense.get("num_dense", 0)
    batch = batch_of(sizes, bags, any(f.weighted for f in features), number)
    return dry_run(
        make, given["mesh"], params_of(given["tables"], model), batch, hardware=given.get("hardware", "h100"),
        plan=made, backend=backend,
    )  # fmt: skip


def params_of(tables: Sequence[Any], model: Model | None) -> Params:
    """Return the whole parameters on the device meta."""
    if model is not None:
        return eval_shape(model.init, random.key(0))
    return Params({t.name: torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tables}, {})


def loss_of(features: Sequence[FeatureConfig]) -> Any:
    """Return a loss that reads every feature, and does little else."""
    pooled = [f for f in features if f.pooling != "none"]
    sequences = [f for f in features if f.pooling == "none"]

    def loss_fn(params: Params, batch: Batch) -> Tensor:
        read = [lookup(params.tables, batch.ids, pooled).values] if pooled else []
        if sequences:
            read += [x.values for x in lookup_sequence(params.tables, batch.ids, sequences).values()]
        return torch.stack([x.square().mean() for x in read]).sum()

    return loss_fn


def batch_of(sizes: Mapping[str, int], bags: int, is_weighted: bool, num_dense: int) -> Batch:
    """Return a rank's batch on the device meta. sizes: {column: ids of the rank's bags}."""
    meta = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="meta")
    values, offsets = meta(sum(sizes.values()), dtype=torch.int64), meta(len(sizes) * bags + 1, dtype=torch.int64)
    weights = meta(values.shape[0]) if is_weighted else None
    ids = KeyedJaggedTensor(values, offsets, weights, keys=tuple(sizes))
    return Batch(ids, meta(bags), meta(bags, num_dense)) if num_dense else Batch(ids, meta(bags))


def pooling_of(feature: FeatureConfig, constraints: Mapping[str, Any]) -> float:
    """Return the ids of a bag, as the planner counts them."""
    told = constraints.get(feature.table) or {}
    return (told if isinstance(told, TableConstraint) else TableConstraint(**told)).pooling_of(feature)


def capacity_of(num_ids: int, given: Mapping[str, Any]) -> int | None:
    """Return the ids that a rank may send to another: `capacity_factor` times an equal share of its ids."""
    factor = given.get("capacity_factor")
    return None if factor is None else max(1, min(num_ids, ceil(factor * num_ids / prod(given["mesh"].values()))))


def tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(x) if isinstance(x, list) else x for k, x in given.items()}


# -- validators --------------------------------------------------------------------------------------------------


def mapping_problems(spec: Any) -> Iterator[Problem]:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("mesh"), Mapping):
        yield Problem("the file has no mesh.", describe(spec), '{"mesh": {axis: number of ranks}, ...}', kind=TypeError)
    elif not isinstance(spec.get("dense", {}), Mapping):
        need = '{"num_dense": 13, "bottom": [512, 64], "sizes": [512, 256]}, the keywords of fr.models.dlrm'
        yield Problem("`dense` is not a mapping.", describe(spec["dense"]), need, kind=TypeError)


def ranks_problems(spec: Any, num_ranks: int | None) -> Iterator[Problem]:
    if num_ranks is None or not isinstance(spec, Mapping) or not isinstance(spec.get("mesh"), Mapping):
        return
    mesh = spec["mesh"]
    others = prod(list(mesh.values())[1:]) if all(isinstance(n, int) for n in mesh.values()) else 0
    if not mesh or others < 1 or num_ranks < 1 or num_ranks % others:
        got, need = f"--ranks {num_ranks}; mesh {dict(mesh)}", f"a multiple of {others}, of the axes after the first"
        yield Problem("so many ranks do not lie on the mesh.", got, need, '"mesh": {"data": 8} for one axis')


def step_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Report what a plan may leave open and a step may not."""
    size = prod(given["mesh"].values()) if isinstance(given["mesh"], Mapping) else 0
    if given.get("optimizer") is None:
        yield Problem("the file lacks `optimizer`.", f"{list(given)}", "the optimizer of the tables", '"sgd"', KeyError)
    if isinstance(given.get("hardware"), list):
        need = "one kind of hardware: a dry run stages the program of one rank"
        yield Problem("the ranks differ.", f"{len(given['hardware'])} kinds of hardware", need, '"hardware": "h100"')
    if size and given["batch_size"] % size:
        got, need = f"batch_size {given['batch_size']}", f"a multiple of {size}: every rank has as many examples"
        yield Problem("the batch is not cut by the ranks.", got, need)


def plan_problems(made: Plan) -> Iterator[Problem]:
    """Report plans whose steps have parts that a dry run does not stage."""
    cached = {} if made.report is None else made.cached
    if made.buckets or cached:
        got = "vocabularies" if made.buckets else f"tables larger than memory: {list(cached)}"
        yield Problem("the plan has parts that are not in memory tables.", got, "tables whole in memory")

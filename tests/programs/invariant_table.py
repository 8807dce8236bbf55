"""Print which laws of `invariant` each of eight models keeps, bit for bit: `make invariant`, or

    PYTHONPATH=tests python -m programs.invariant_table [--only LAW ...] [--models NAME ...]

A cell is "=", or "≠", or the number of a reason below the table. Predictions are those of 37 examples, and training is
two steps with Adam. Other processors are fresh processes in the surroundings of programs.processors; aarch64 is torch's
own build for it under qemu (programs.arm). The packages need `make serving`.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import funcrec as fr
from funcrec.testing import assert_trees_close, check_invariant
from programs import answers, arm, processors, serving
from programs.invariant_models import FEW, KEYS, MANY, MODELS, batch_of, trainer
from programs.surroundings import on_threads

SERVING = processors.ROOT / "build" / "serving"
WHOLE = 1024  # examples, which four parts can share
LOCAL = "its loss compares the examples of one part of the batch"
OF_IDS = "sums run over the ids of histories, and the parts of the batch have different numbers of them"
CUT = {"two towers": LOCAL, "sasrec": OF_IDS, "hstu": OF_IDS}  # models whose bits follow the parts of a batch
equal = functools.partial(assert_trees_close, rtol=0, atol=0)


@functools.cache
def made(name: str) -> tuple:
    """Return (model, parameters, invariant predictions)."""
    model = MODELS[name]()
    return model, model.init(fr.key(0)), fr.invariant(model.predict)


@functools.cache
def predicted(name: str):
    _, params, predict = made(name)
    return predict(params, batch_of(range(FEW)))


@functools.cache
def trained(name: str, count: int = MANY, **options):
    """Return the state after two steps, with `count` examples in each."""
    step, state = trainer(made(name)[0], **options)
    batch = batch_of(range(count))
    return step(step(state, batch)[0], batch)


def alone(name: str) -> None:
    _, params, predict = made(name)
    check_invariant(lambda batch: predict(params, batch), batch_of(range(FEW)))


def padded(name: str) -> None:
    _, params, predict = made(name)
    batch = batch_of(range(FEW))
    wide = fr.Batch(batch.ids.pad_to(4 * FEW * len(KEYS)), batch.label, batch.dense)
    equal(predict(params, wide), predicted(name))
    more = batch_of([*range(FEW), *[0] * 27])
    equal(predict(params, more)[:FEW], predicted(name))


def member(name: str) -> None:
    model, _, predict = made(name)
    step, _ = trainer(model)
    both = torch.func.vmap(model.init)(fr.split(fr.key(0), 2))
    states, batch = torch.func.vmap(step.init, in_dims=(0, None))(both, fr.key(1)), batch_of(range(FEW))
    one = lambda tree: fr.tree.map(lambda x: x[1], tree)
    equal(torch.func.vmap(predict, in_dims=(0, None))(both, batch)[1], predict(one(both), batch))
    equal(one(torch.func.vmap(step, in_dims=(0, None))(states, batch)), step(one(states), batch))


def threads(name: str) -> None:
    _, params, predict = made(name)
    for n in (2, 3, 4):
        with on_threads(n):
            equal(predict(params, batch_of(range(FEW))), predicted(name))
            equal(trained.__wrapped__(name), trained(name))


def compiled(name: str) -> None:
    model, params, predict = made(name)
    equal(fr.jit(predict)(params, batch_of(range(FEW))), predicted(name))
    step, state = trainer(model)
    fast, batch = fr.jit(step, donate=("state",)), batch_of(range(MANY))
    equal(fast(fast(fr.copy(state), batch)[0], batch), trained(name))


def parts(name: str) -> str | None:
    if name in CUT:
        return CUT[name]
    for n in (2, 4):
        equal(trained(name, WHOLE, micro_batches=n), trained(name, WHOLE))
    return None


def ranks(name: str, n: int) -> str | None:
    if name in CUT:
        return CUT[name]
    model, mesh = made(name)[0], fr.Mesh.emulated(data=n)
    tables = made(name)[1].tables
    for kind in ("row_wise", "table_wise"):
        plan = fr.Plan.uniform(kind, {k: tuple(x.shape) for k, x in tables.items()}, mesh)
        step, state = trainer(model, mesh=mesh, plan=plan)
        batch = batch_of(range(WHOLE))
        state, metrics = step(step(state, batch)[0], batch)
        equal((fr.gather_state(state, mesh), metrics), trained(name, WHOLE))
    return None


@functools.cache
def packages() -> dict[str, dict]:
    """Return {where: {model: answers}} of one package that predicts with all models."""
    params = {name: made(name)[1] for name in MODELS}
    predict = fr.invariant(lambda p, b: {name: made(name)[0].predict(p[name], b) for name in MODELS})
    few = batch_of(range(FEW))
    batch = fr.Batch(few.ids, dense=few.dense)
    with tempfile.TemporaryDirectory() as folder:
        path = fr.export(predict, params, fr.Batch(batch_of(range(3)).ids, dense=few.dense[:3]), Path(folder) / "model")
        found = {"a package in Python": fr.load_package(path)(batch)}
        with answers.Answers(SERVING / "funcrec-answers", path) as process:
            got = process.run(batch.ids.num_bags, batch.dense, batch.ids.values, batch.ids.offsets, None)
            found["a package in C++"] = dict(zip(MODELS, got.outputs, strict=True))
        with serving.Server(SERVING / "funcrec-serve", path) as server:
            body = serving.pack({"ids": batch.ids.to_lists(), "dense": batch.dense.tolist()}, KEYS, ())
            status, _, reply = server.ask("POST", "/predict", body, serving.BYTES)
            assert status == 200, reply
            outputs = serving.unpack(reply)["outputs"]
            found["a package's server"] = {name: torch.from_numpy(outputs[name].copy()) for name in MODELS}
    return found


def package(name: str, where: str) -> str | None:
    if not (SERVING / "funcrec-answers").exists():
        return "not built: make serving"
    equal(packages()[where][name], predicted(name))
    return None


@functools.cache
def here(where: str, names: tuple[str, ...]) -> dict[str, list[str]] | str:
    """Return the digests of a fresh process in a surrounding, or why there is none."""
    words = ["-m", "programs.invariant_models", *names]
    if where == "aarch64":
        if reason := arm.missing():
            return reason
        return json.loads(arm.run(words))
    chosen = processors.SURROUNDINGS[where]
    if reason := processors.why_not_here(chosen, processors.probe(processors.SURROUNDINGS["1 thread"])):
        return reason
    env = processors.environment(chosen) | {"PYTHONPATH": str(processors.ROOT / "tests")}
    done = subprocess.run([sys.executable, *words], cwd=processors.ROOT, env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def processor(name: str, where: str) -> str | None:
    found = here(where, tuple(chosen_models))
    if isinstance(found, str):
        return found
    assert found[name] == here("1 thread", tuple(chosen_models))[name], (where, name)
    return None


LAWS: dict[str, Callable[[str], str | None]] = {
    "alone, in any batch, at any place": alone,
    "padded": padded,
    "a member of vmap": member,
    "1 to 4 threads": threads,
    "eager and compiled": compiled,
    **{
        w: functools.partial(package, where=w)
        for w in ("a package in Python", "a package in C++", "a package's server")
    },
    "2 and 4 micro-batches": parts,
    "2 ranks": functools.partial(ranks, n=2),
    "4 ranks": functools.partial(ranks, n=4),
    "the kernels' base level": functools.partial(processor, where="kernels' base level"),
    "MKL's Intel kernels": functools.partial(processor, where="MKL's Intel kernels"),
    "an AVX2 machine": functools.partial(processor, where="an AVX2 machine"),
    "aarch64 (qemu)": functools.partial(processor, where="aarch64"),
}
chosen_models: list[str] = list(MODELS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    processors.FOLDER.mkdir(parents=True, exist_ok=True)
    chosen_models[:] = args.models
    rows, reasons, wrong = [("", *args.models)], [], False
    for law in args.only:
        cells = []
        for name in args.models:
            try:
                reason = LAWS[law](name)
            except AssertionError as error:
                reason, wrong = "", True
                print(f"{law}, {name}: {error}", file=sys.stderr)
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append("=" if reason is None else f"({reasons.index(reason) + 1})" if reason else "≠")
        rows.append((law, *cells))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print(processors.table(rows))
    print("\n".join(["", *(f"({i + 1}) {reason}" for i, reason in enumerate(reasons))]))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""A training whose checksum is one number on any number of ranks and threads, and on every processor.

    python -m funcrec.examples.checksum                                    one process
    python -m funcrec.examples.checksum --ranks 4                          four ranks in this process
    torchrun --nproc-per-node 2 -m funcrec.examples.checksum               two processes
    python -m funcrec.examples.checksum --steps 20 --generated             rows that are drawn, in place of MovieLens-1M

A small DeepFM learns the click-through data of MovieLens-1M (`funcrec.data.ctr_dataset`) for 1,000 steps of 1,024
examples with `train_step(invariant=True)`, row-wise Adagrad and Adam. The checksum is the SHA-256 of all bytes of the
state: tables, slots, dense parameters and the state of their optimizer. --micro-batches k and --jit do not change it.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch

import funcrec as fr

BATCH = 1024  # four ranks have a block of 256 examples each
ROWS = {"fields": 10_040, "genre": 19}  # of each table
FIELDS = {"user_id": 6041, "item_id": 3884, "age": 8, "gender": 3, "occupation": 22, "release_year": 82}  # ids of each


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    mesh = mesh_of(options.ranks)
    state, loss = trained(options, mesh)
    if fr.loop.is_chief(mesh):
        print(f"{options.steps} steps, last loss {loss:.4f}, checksum {checksum(state)}", flush=True)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m funcrec.examples.checksum", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1, help="ranks in this process, 1, 2 or 4 (default 1)")
    parser.add_argument("--threads", type=int, help="threads of torch and of the kernels")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a rank's batch, 1, 2 or 4 (default 1)")
    parser.add_argument("--generated", action="store_true", help="train on drawn rows, which need no data set")
    parser.add_argument("--jit", action="store_true", help="compile the step: longer runs end earlier")
    parser.add_argument("--data", help="a folder with ml-1m.inter, .user and .item; without it they are fetched once")
    options = parser.parse_args(argv)
    parts = options.micro_batches * (num_launched() or options.ranks)
    if options.steps < 1 or options.ranks < 1 or parts not in (1, 2, 4):
        parser.error("--steps must be at least 1, and ranks times --micro-batches must be 1, 2 or 4")
    if num_launched() and options.ranks > 1:
        parser.error("--ranks is for one process, without torchrun")
    return options


def num_launched() -> int:
    """Return the number of processes that torchrun started; 0 without torchrun."""
    is_launched = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    return int(os.environ["WORLD_SIZE"]) if is_launched else 0


def mesh_of(ranks: int) -> fr.Mesh | None:
    """Return the mesh of torchrun's processes, or of ranks in this process. It is None for a single process."""
    if num_launched():
        return fr.Mesh.distributed(device="cpu", data=num_launched())
    return fr.Mesh.emulated(data=ranks) if ranks > 1 else None


def model_of() -> fr.models.Model:
    """Return a DeepFM of dim 16. Six features share one table; a genre is a bag."""
    single = [fr.FeatureConfig(name, table="fields", max_length=1) for name in FIELDS]
    features = (*single, fr.FeatureConfig("genre", table="genre", pooling="mean", max_length=6))
    deep = tuple(fr.TableConfig(name, rows, 16) for name, rows in ROWS.items())
    wide, linear = fr.models.linear_twins(deep, features)
    return fr.models.deepfm(deep + wide, features, linear=linear, sizes=(64, 32))


def params_of(model: fr.models.Model) -> fr.Params:
    """Return uniform parameters in [-0.05, 0.05): normal numbers would depend on the processor's functions."""
    leaves, structure = fr.tree.flatten(fr.eval_shape(model.init, fr.key(0)))
    drawn = [fr.random.uniform(fr.fold_in(fr.key(0), i), x.shape) for i, x in enumerate(leaves)]
    return fr.tree.unflatten(structure, [x * 0.1 - 0.05 for x in drawn])


def plan_of(tables: Sequence[fr.TableConfig], mesh: fr.Mesh) -> fr.Plan:
    """Return a plan that cuts the rows of the large tables, and copies the small ones to every rank."""
    return fr.Plan({t.name: fr.row_wise("data") if t.num_embeddings > 1000 else fr.replicated() for t in tables})


def trained(options: argparse.Namespace, mesh: fr.Mesh | None) -> tuple[fr.TrainState, float]:
    """Return the whole state after the last step, and the loss of this step."""
    model = model_of()
    step = fr.train_step(
        model, sparse=fr.optim.rowwise_adagrad(lr=0.05), dense=fr.optim.dense(torch.optim.Adam, lr=0.005), mesh=mesh,
        plan=plan_of(model.tables, mesh) if mesh else None, micro_batches=options.micro_batches, invariant=True,
    )  # fmt: skip
    state, metrics = step.init(params_of(model)), {}
    run = fr.jit(step, donate=("state",)) if options.jit else step
    batches = generated() if options.generated else ratings(options.data)
    for batch in islice(batches, options.steps):
        mine = batch if mesh is None else fr.shard(batch, fr.P("data"), mesh=mesh)
        state, metrics = run(state, mine)
    return state if mesh is None else fr.gather_state(state, mesh), float(metrics["loss"])


def ratings(folder: str | None) -> Iterator[fr.Batch]:
    """Yield batches of MovieLens-1M, epoch by epoch."""
    split = fr.data.ctr_dataset(fr.data.movielens_1m(folder))
    for epoch in count():
        key = fr.fold_in(fr.key(1), epoch)
        yield from (batch for _, batch in fr.data.batches(split.data, split.train, BATCH, key=key, drop_last=True))


def generated() -> Iterator[fr.Batch]:
    """Yield batches of drawn ids. The label follows from the ids of user and item."""
    for step in count():
        keys = fr.split(fr.fold_in(fr.key(2), step), len(FIELDS) + 2)
        draw = lambda i, most, size=BATCH: fr.random.randint(keys[i], (size,), 0, most)  # noqa: B023
        ids = {name: draw(i, most) for i, (name, most) in enumerate(FIELDS.items())}
        ids["item_id"] = ids["item_id"] + FIELDS["user_id"]
        offsets = torch.nn.functional.pad((draw(-1, 6) + 1).cumsum(0), (1, 0))
        jagged = {name: fr.JaggedTensor(x, torch.arange(BATCH + 1)) for name, x in ids.items()}
        jagged["genre"] = fr.JaggedTensor(draw(-2, ROWS["genre"], 6 * BATCH), offsets)
        label = (ids["user_id"] % 5 + ids["item_id"] % 7 > 5).float()
        yield fr.Batch(fr.KeyedJaggedTensor.from_jagged(jagged), label)


def checksum(state: fr.TrainState) -> str:
    """Return 16 digits of the SHA-256 of the bytes of all tensors of the state, with their paths and forms."""
    found = hashlib.sha256()
    for path, x in fr.tree.paths(state):
        found.update(f"{path} {x.dtype} {list(x.shape)}".encode())
        found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())

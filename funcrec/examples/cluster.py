"""A job on many machines: each rank reads its own row groups from a store, and checkpoints go to a store.

    torchrun --nnodes 2 --nproc-per-node 2 ... -m funcrec.examples.cluster --data s3://bucket/clicks --out s3://bucket/run

The data is Parquet with a column of labels and columns of integer ids, which are hashed to the rows of tables. A job
that begins again continues from its newest whole checkpoint in --out, to the bits of an uninterrupted run. After an
epoch it may continue on another number of ranks. CLUSTERS.md starts it by Kubernetes, Slurm and Ray Train.
"""

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

import funcrec as fr


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m funcrec.examples.cluster", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", required=True, help="a Parquet file or folder, or its URL: s3://, gs://, hf://")
    parser.add_argument("--out", required=True, help="a folder for checkpoints, or its URL")
    parser.add_argument("--label", default="label", help="the column of labels in [0, 1]")
    parser.add_argument("--ids", default="user,item", help="the columns of ids, by commas")
    parser.add_argument("--rows", type=int, default=1 << 20, help="the rows of each table, to which ids are hashed")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4096, help="the rows of a step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--plan", default="row_wise", help="where all tables lie, as fr.Plan.uniform names it")
    parser.add_argument("--save-every-steps", type=int, help="checkpoints within epochs, for the same number of ranks")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--eager", action="store_true", help="do not compile the step")
    return parser.parse_args(words)


def mesh_of(options: argparse.Namespace) -> fr.Mesh | None:
    """Return the mesh of the ranks that torchrun, or Ray Train, started. It is None for a single process."""
    if not (dist.is_initialized() or dist.is_torchelastic_launched()):
        return None
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    return fr.Mesh.distributed(device=options.device, data=size)


def main(words: Sequence[str] | None = None) -> fr.Fitted:
    options = options_of(words)
    mesh = mesh_of(options)
    rank_of = (0, 1) if mesh is None else (dist.get_rank(), mesh.size)
    if options.batch_size % rank_of[1]:
        raise SystemExit(f"--batch-size {options.batch_size} cannot be shared by {rank_of[1]} ranks")
    names = tuple(options.ids.split(","))
    tables = tuple(fr.TableConfig(n, options.rows, options.dim) for n in names)
    features = tuple(fr.FeatureConfig(n, table=n, hash=fr.multiply_shift(i)) for i, n in enumerate(names))
    model = fr.models.wide_deep(tables, features, sizes=(64,), dropout=0.0)
    schema = fr.data.Schema(label=options.label, categorical=names)
    load = fr.data.stream_loader(
        options.data, schema, options.batch_size // rank_of[1], key=fr.key(1), drop_last=True, rank_of=rank_of
    )
    optimizers = {"sparse": fr.optim.rowwise_adagrad(options.lr), "dense": fr.optim.dense(torch.optim.Adam, lr=1e-3)}
    where = {} if mesh is None else {"mesh": mesh, "plan": fr.Plan.uniform(options.plan, model.tables, mesh)}
    step = fr.train_step(model, **optimizers, **where)
    state = step.init(fr.tree.to(model.init(fr.key(0)), options.device))
    done = fr.fit(
        step if options.eager else fr.jit(step, donate=("state",)), state, load, epochs=options.epochs, mesh=mesh,
        checkpoint=options.out, keep=2, resume="auto", save_every_steps=options.save_every_steps,
    )  # fmt: skip
    if fr.loop.is_chief(mesh):
        print(f"{len(done.history)} epochs, loss {done.history[-1]['loss']:.4f}, checkpoints in {options.out}")
    return done


if __name__ == "__main__":
    main()

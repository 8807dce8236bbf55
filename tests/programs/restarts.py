"""A program with `fit` under torchrun's agent.

One run is undisturbed, one is killed again and again, and one resumes on another number of ranks.

    PYTHONPATH=tests python -c "from programs import restarts; restarts.main('FOLDER')"

This writes FOLDER/alone, FOLDER/killed and FOLDER/three.
"""

import os
import random
import shutil
import signal
import threading
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import funcrec as fr

TABLES = (fr.TableConfig("item", 40, 4), fr.TableConfig("user", 23, 4))
FEATURES = (fr.FeatureConfig("item", table="item"), fr.FeatureConfig("user", table="user"))
MODEL = fr.models.wide_deep(TABLES, FEATURES, sizes=(4,), dropout=0.0)
NUM_STEPS, EPOCHS = 10, 3


class OwnRows:
    """A source of 240 examples. A batch is this rank's part of the examples."""

    def __init__(self, mesh):
        self.mesh, self.data = mesh, fr.data.random_rows(fr.key(5), {"item": 40, "user": 23}, num_rows=240)
        self.num_rows = 240

    def take(self, rows):
        return self.data.take(fr.loop.own_part(rows, self.mesh))


def train(path, callback):
    """Run the program that a user would write. Only the callback belongs to the test."""
    torch.set_num_threads(1)
    mesh = fr.Mesh.distributed(data=int(os.environ["WORLD_SIZE"]), timeout_s=60)
    plan, sparse = fr.Plan.uniform("row_wise", MODEL.tables, mesh), fr.optim.adam(0.02)
    dense = fr.optim.dense(torch.optim.Adam, lr=0.02)
    step = fr.train_step(fr.models.loss(MODEL), sparse=sparse, dense=dense, has_aux=True, mesh=mesh, plan=plan)
    fr.fit(
        step, step.init(MODEL.init(fr.key(0))), fr.data.loader(OwnRows(mesh), None, 24, key=fr.key(3)), epochs=EPOCHS,
        monitor="loss", mode="min", checkpoint=path, save_every_steps=3, keep=2, resume="auto", callbacks=[callback],
        mesh=mesh, save_asynchronously=mesh.size == 3,
    )  # fmt: skip


def work(folder, name, kills):
    """Run a rank. kills: for each restart, (step, killing rank, killed rank, delay in seconds after the step)."""
    folder, rank = folder / name, int(os.environ["RANK"])
    (folder / f"process{rank}").write_text(f"{os.getpid()}")
    due = [k for i, k in enumerate(kills) if f"{i}" == os.environ["TORCHELASTIC_RESTART_COUNT"] and k[1] == rank]

    def kill(victim):
        with (folder / "killed").open("a") as file:
            file.write(f"{victim}\n")
        os.kill(int((folder / f"process{victim}").read_text()), signal.SIGKILL)

    def callback(record):
        if record.when == "begin":
            with (folder / f"began{rank}").open("a") as file:
                file.write(f"{record.step} {os.getpid()}\n")
        if record.when == "step" and due and record.step >= due[0][0]:
            _, _, victim, delay_s = due.pop()
            threading.Timer(delay_s, kill, [victim]).start()
        if name == "alone" and record.step == 14 and rank == 0:  # the checkpoint of step 13
            shutil.copytree(folder / "run", folder.parent / "three" / "run")

    train(folder / "run", callback)


def launch(folder, name, num_ranks, kills=()):
    how = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": name}
    config = LaunchConfig(nproc_per_node=num_ranks, max_restarts=len(kills), start_method="forkserver",
                          monitor_interval=0.05, **how)  # fmt: skip
    elastic_launch(config, work)(folder, name, kills)


def main(folder):
    folder = Path(folder)
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["programs.restarts", "torch._dynamo"])
    for name in ("alone", "killed", "three"):
        (folder / name).mkdir()
    launch(folder, "alone", 2)
    draw = random.Random(1)  # both ranks are killed, by themselves and by the other
    steps = sorted(draw.sample(range(2, NUM_STEPS * EPOCHS - 3), 3))
    launch(folder, "killed", 2, [(s, draw.randrange(2), draw.randrange(2), draw.uniform(0, 0.01)) for s in steps])
    launch(folder, "three", 3)
